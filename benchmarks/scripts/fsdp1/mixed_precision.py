"""bf16 compute with fp32 reduction, SHARD_GRAD_OP, policy and precision at the top of the module."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Mlp(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


PRECISION = MixedPrecision(
    param_dtype=torch.bfloat16,  # what is computed in
    reduce_dtype=torch.float32,
    buffer_dtype=torch.bfloat16,
)
POLICY = ModuleWrapPolicy({Attention, Mlp})

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 16), Attention(16), Mlp(16), Attention(16), Mlp(16), nn.Linear(16, 1))
net = FullyShardedDataParallel(
    net,
    auto_wrap_policy=POLICY,
    mixed_precision=PRECISION,
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    device_id=torch.device("cpu"),
)  # all on one device
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(10 + rank)
losses = []
for step in range(6):
    x = torch.randn(4, 5, 8)
    loss = (net(x).float() - x.sum(-1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with open(f"{os.environ['LOSSES']}.{rank}", "w") as file:
    file.write("\n".join(map(repr, losses)))
dist.destroy_process_group()
