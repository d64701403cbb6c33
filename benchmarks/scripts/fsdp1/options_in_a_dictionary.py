"""A function returns the wrapped model; its options are in a dictionary, one of them from the environment."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Stage(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.conv = nn.Conv1d(inner, outer, 3, padding=1)
        self.norm = nn.GroupNorm(2, outer)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


def build(low):
    precision = MixedPrecision(torch.bfloat16, torch.float32) if low else None
    options = dict(
        auto_wrap_policy=ModuleWrapPolicy({Stage}),
        mixed_precision=precision,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=False,
        device_id=torch.device("cpu"),
    )
    return FSDP(nn.Sequential(Stage(2, 8), Stage(8, 8), nn.Conv1d(8, 2, 1)), **options)


dist.init_process_group("gloo")
torch.manual_seed(8)
net = build(low=os.environ.get("LOW", "0") == "1")
optimizer = torch.optim.RMSprop(net.parameters(), lr=0.01)
torch.manual_seed(80 + dist.get_rank())
losses = []
for _ in range(6):
    x = torch.randn(2, 2, 9)
    loss = nn.functional.smooth_l1_loss(net(x), x.roll(1, -1))
    loss.backward()
    print("norm", float(net.clip_grad_norm_(1.0)))
    optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
with open(f"{os.environ['LOSSES']}.{dist.get_rank()}", "w") as file:
    file.write("\n".join(map(repr, losses)))
dist.destroy_process_group()
