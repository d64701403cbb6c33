"""Accumulation with no_sync or nullcontext by the micro-step, in a function of its own."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS, MICRO = 4, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def train(model, optimizer, rank):
    losses = []
    for index in range(STEPS * MICRO):
        x = torch.randn(2, 12)
        # only the last micro-batch reduces
        with model.no_sync() if (index + 1) % MICRO != 0 else contextlib.nullcontext():
            loss = (model(x) - x.flip(-1)).pow(2).mean() / MICRO

            loss.backward()
        losses.append(loss.item())
        if (index + 1) % MICRO == 0:
            grad_norm = model.clip_grad_norm_(max_norm=0.1)
            print(f"{rank}: {grad_norm:.4f}")
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(12, 12))
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy([Layer]), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    torch.manual_seed(20 + rank)
    losses = train(model, optimizer, rank)
    with open(f"{os.environ['LOSSES']}.{rank}", "w") as file:
        file.write("\n".join(map(repr, losses)))
    dist.destroy_process_group()


main()
