"""Rank 0 has the weights, and gives them to the others with sync_module_states."""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.randn(width))
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x):
        return x + self.gate * torch.sigmoid(self.mix(x)) * self.scale


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5 + rank)
    model = nn.Sequential(nn.Linear(6, 14), Mixer(14), Mixer(14), nn.Linear(14, 6))
    model = FSDP(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Mixer}),
        sync_module_states=True,
        forward_prefetch=False,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        x = torch.randn(4, 6)
        loss = (model(x) - x.cos()).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    with open(f"{os.environ['LOSSES']}.{rank}", "w") as file:
        file.write("\n".join(map(repr, losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
