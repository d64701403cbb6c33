"""A trainer class that keeps the wrapped model in an attribute and accumulates in a plain no_sync."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp


class Trainer:
    def __init__(self, net: nn.Module, rank: int) -> None:
        self.rank = rank
        self.model = fsdp.FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self) -> torch.Tensor:
        x = torch.randn(3, 6)
        return nn.functional.mse_loss(self.model(x), x * 2)

    def step(self) -> float:
        total = 0.0
        with self.model.no_sync():  # local gradients
            for _ in range(2):
                loss = self.loss()
                loss.backward()
                total += loss.item()
        loss = self.loss()
        loss.backward()
        if not isinstance(self.model, fsdp.FullyShardedDataParallel):
            raise TypeError(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total + loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    trainer = Trainer(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 6)), dist.get_rank())
    torch.manual_seed(30 + trainer.rank)
    losses = [trainer.step() for _ in range(5)]
    with open(f"{os.environ['LOSSES']}.{trainer.rank}", "w") as file:
        file.write("\n".join(map(repr, losses)))
    dist.destroy_process_group()
