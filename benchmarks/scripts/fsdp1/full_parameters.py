"""Full parameters are summoned to measure them; a policy of the script chooses units, one module is ignored."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def policy(module, recurse, nonwrapped_numel):
    if recurse:
        return True
    return isinstance(module, nn.Linear) and module.out_features > 8


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.first = nn.Linear(5, 16)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = torch.relu(self.first(self.frozen(x)))
        return self.head(torch.relu(self.second(x)))


def size(model: FSDP) -> float:
    with FSDP.summon_full_params(model, writeback=False):
        total = 0.0
        for parameter in model.parameters():
            total += parameter.detach().double().abs().sum().item()
    return total


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = Encoder()
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        ignored_modules=[model.frozen],
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(
        (p for p in model.parameters() if p.requires_grad), lr=0.1, nesterov=True, momentum=0.5
    )
    torch.manual_seed(110 + rank)
    losses = []
    for _ in range(5):
        x = torch.randn(4, 5)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), size(model)]
    with open(f"{os.environ['LOSSES']}.{rank}", "w") as file:
        file.write("\n".join(map(repr, losses)))
    dist.destroy_process_group()
