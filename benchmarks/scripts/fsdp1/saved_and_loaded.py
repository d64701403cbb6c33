"""A full checkpoint is gathered, written by rank 0, and loaded into a model of other weights."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

FILE = os.environ["LOSSES"] + ".pt"


def wrapped(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True))
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.LSTM}), device_id=torch.device("cpu"))


def save(model, rank):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        # every rank takes part
        state = model.state_dict()
    if rank == 0:
        torch.save(state, FILE)
    dist.barrier()


def load(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(torch.load(FILE))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    save(wrapped(6), rank)
    model = wrapped(7)
    load(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    torch.manual_seed(60 + rank)
    losses = []
    for _ in range(5):
        tokens = torch.randint(20, (3, 7))
        output, _ = model(tokens)
        loss = output.pow(2).mean() - output.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with open(f"{os.environ['LOSSES']}.{rank}", "w") as file:
        file.write("\n".join(map(repr, losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
