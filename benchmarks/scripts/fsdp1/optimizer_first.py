"""The optimizer is made before the wrapping, which use_orig_params=True allows; a lambda policy chooses units."""

import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy


def is_unit(module):
    return isinstance(module, nn.GRU) or getattr(module, "unit", False)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 8)
            self.gru = nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 4)
            self.head.unit = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.gru(self.embed(x))[0])

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # follows the parameters
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=is_unit),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    torch.manual_seed(90 + rank)
    losses = []
    for _ in range(6):
        x = torch.randint(30, (3, 6))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), (x % 4).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with open(f"{os.environ['LOSSES']}.{rank}", "w") as file:
        file.write("\n".join(map(repr, losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
