"""Random numbers of a tensor-parallel group: equal for whole tensors, different for divided ones.

Dropout of a whole tensor has to drop the same elements on all ranks of a group: their residual streams are
copies of each other. The ranks therefore keep equal generators. Dropout of a divided tensor should not drop
the same elements on all ranks, or the heads of different ranks would share their masks. A region therefore
seeds the generator anew, from its state and the rank, and puts the state back at its first sum, behind which
tensors are whole (Megatron-LM has a second generator for this,
``megatron/core/tensor_parallel/random.py``). With sequence parallelism whole blocks do so, since each rank
holds other positions behind a sum. The seed depends on nothing else: activation checkpointing restores the
generator before it recomputes a block, which then draws the same numbers again.
"""

from __future__ import annotations

import functools
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from fsdptool.modeling.tensor_group import TensorGroup
    from fsdptool.records.tensor_plan import SequenceSpan, TensorPlan

_STEP = 4
"""What the offset of a CUDA generator is a multiple of (``ATen/cuda/CUDAGeneratorImpl.cpp``, torch 2.13)."""


def draw_apart(model: nn.Module, plan: TensorPlan, group: TensorGroup) -> None:
    """Let the regions of a rank's local model that drop elements draw numbers of their own.

    A divided layer outside all regions draws nothing itself; what its block drops between it and the row
    layer is the same part on every rank.

    Args:
        model: Its layers are divided, and it is not checkpointed yet.
        plan: Lists regions and sums.
        group: This rank's group; nothing changes without processes (the memory tracer).
    """
    if group.process_group is None:
        return
    divided, sums = (
        (plan.regions, plan.sums) if plan.sequence is None else (_blocks(model, plan.sequence), ())
    )
    for path in divided:
        region = model.get_submodule(path)
        if not _drops(region):
            continue
        numbers = _OwnNumbers(group.rank)
        object.__setattr__(region, "forward", _between(region.forward, region, numbers))
        for summed in sums:
            if summed == path or summed.startswith(f"{path}."):
                model.get_submodule(summed).register_forward_hook(numbers.put_back)


def _blocks(model: nn.Module, span: SequenceSpan) -> list[str]:
    return [f"{span.blocks}.{name}" for name, _ in model.get_submodule(span.blocks).named_children()]


def agree(group: TensorGroup) -> None:
    """Give all ranks of a tensor-parallel group the generators' states of its first rank."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states: list[Any] = [torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None]
    dist.broadcast_object_list(states, group=group.process_group, group_src=0)
    torch.set_rng_state(states[0])
    if on_gpu:
        torch.cuda.set_rng_state(states[1])


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops elements in training, by its dropout layers and probabilities."""
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p:
            return True
        shares = (value for name, value in vars(part).items() if "dropout" in name)
        if any(isinstance(value, float) and value for value in shares):
            return True
    return False


class _OwnNumbers:
    """Replaces the state of the default generators for the time of a region."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outer: list[torch.Tensor] | None = None

    def start(self) -> None:
        """Seed the generators from their states and the rank."""
        seeds = Random(f"{int(torch.randint(1 << 62, ()))}/{self._rank}")
        outer = [torch.get_rng_state()]
        torch.default_generator.manual_seed(seeds.getrandbits(62))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The state is a seed and an offset, known to the host: no draw has to wait for the device.
            state = torch.cuda.get_rng_state()
            torch.cuda.manual_seed(Random(f"{state.tolist()}/{self._rank}").getrandbits(62))
            state.view(torch.int64)[1] += _STEP
            outer.append(state)
        self._outer = outer

    def put_back(self, *hooked: Any) -> None:
        """Put the states back, once."""
        if self._outer is not None:
            torch.set_rng_state(self._outer[0])
            if len(self._outer) > 1:
                torch.cuda.set_rng_state(self._outer[1])
            self._outer = None


def _between(forward: Any, region: nn.Module, numbers: _OwnNumbers) -> Any:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not region.training:
            return forward(*args, **kwargs)
        numbers.start()
        try:
            return forward(*args, **kwargs)
        finally:
            numbers.put_back()

    return run
