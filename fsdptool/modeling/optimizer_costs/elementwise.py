"""States and temporaries of AdamW, in 32 and in 8 bits, and of SGD. Torch-free."""

from __future__ import annotations

from fsdptool.modeling.optimizer_costs.tensors import Trained, TrainedTensor
from fsdptool.records.recipe import Optimizer

_EIGHT_BIT_BLOCK = 256
"""Elements per quantisation block of 8-bit AdamW (bitsandbytes 0.50)."""
_EIGHT_BIT_FROM = 4096
"""Elements from which bitsandbytes quantises a tensor's states (``Optimizer2State.init_state``)."""


def adamw_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    """Two moments, and a step count that is a tensor on the device (fused) or on a CPU (torch 2.13)."""
    return [tensor.bytes, tensor.bytes, *([4] if kernel == "fused" or not cuda else [])]


def eight_bit_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    """Two moments of one byte per element with two scales per block; small tensors in fp32."""
    if tensor.numel < _EIGHT_BIT_FROM:
        return [tensor.numel * 4] * 2
    return [tensor.numel, tensor.numel, *[-(-tensor.numel // _EIGHT_BIT_BLOCK) * 4] * 2]


def sgd_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    """The momentum, if the recipe has one."""
    return [tensor.bytes] if optimizer.momentum else []


def no_temporaries(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """Nothing: the update is one kernel over what is stored."""
    return []


def adamw_temporaries(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """foreach AdamW holds the square roots of a parameter group's second moments (``_multi_tensor_adam``)."""
    if kernel == "fused" or not trained:
        return []
    if kernel == "foreach":
        return max(_groups(trained), key=sum)
    return _two_of_one(optimizer, trained, kernel, cuda)


def _two_of_one(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """Two temporaries of one parameter and one of the parameter before it.

    The previous parameter's denominator is still bound while the next one's is computed
    (``_single_tensor_adam``, torch 2.13).
    """
    worst = [
        (size, size, before)
        for group in _groups(trained)
        for before, size in zip([0, *group], group, strict=False)
    ]
    return [size for size in max(worst, key=sum, default=()) if size]


def _groups(trained: Trained) -> list[list[int]]:
    """Sizes by parameter group: matrices, which decay, are one, everything else the other."""
    return [[t.bytes for t in trained if (len(t.rows) >= 2) is wide] for wide in (True, False)]
