"""Blocks wrapped one by one, and a parameter group for each kind of parameter."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def make(rank):
    device = torch.device("cpu")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.SiLU()) for _ in range(4)), nn.Linear(10, 3))
    for index in range(4):
        model[index] = FSDP(model[index], device_id=device, use_orig_params=True)
    return FSDP(model, device_id=device, use_orig_params=True)


def main():
	dist.init_process_group("gloo")
	rank = dist.get_rank()
	torch.manual_seed(4)
	model = make(rank)
	decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
	rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
	groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
	optimizer = torch.optim.AdamW(groups, lr=0.03)
	torch.manual_seed(40 + rank)
	losses = []
	for _ in range(6):
		x, y = torch.randn(5, 10), torch.randint(3, (5,))
		loss = nn.functional.cross_entropy(model(x), y)
		loss.backward()
		optimizer.step()
		optimizer.zero_grad()
		losses.append(loss.item())
	with open(f"{os.environ['LOSSES']}.{rank}", "w") as file:
		file.write("\n".join(map(repr, losses)))
	dist.destroy_process_group()


main()
