"""States and temporaries of Adafactor. Torch-free."""

from __future__ import annotations

from math import prod

from fsdptool.modeling.optimizer_costs.tensors import Trained, TrainedTensor
from fsdptool.records.recipe import Optimizer

ADAFACTOR_PIECE = 1 << 22
"""Elements whose squares Adafactor sums at a time."""


def adafactor_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    """A row and a column mean for matrices, else a full second moment; and a step count."""
    if len(tensor.rows) < 2:
        return [tensor.bytes, 4]
    rows = prod(tensor.rows[:-1])
    columns = prod(tensor.rows[:-2]) * tensor.rows[-1]
    return [rows * tensor.width, columns * tensor.width, 4]


def adafactor_temporaries(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """One parameter's update, its copy in fp32 where it is narrower, and the squares of a piece of that."""
    if not trained:
        return []
    worst = max(trained, key=lambda tensor: tensor.numel)
    wide = max(worst.width, 4)
    copies = [worst.numel * wide] if worst.width < wide else []
    return [worst.bytes, *copies, min(worst.numel, ADAFACTOR_PIECE) * wide]
