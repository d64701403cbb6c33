"""Time and FLOPs of a model that is divided over a tensor-parallel group.

Each rank of the group runs a smaller model (:mod:`fsdptool.records.tensor_plan`). Its trace counts the
products of the local shapes and notes every tensor that is summed over the group: the output of each row
layer in forward, and the gradient of each region's input in backward, so two sums of a micro-batch's hidden
states in forward and two in backward for each decoder block (Megatron-LM, arXiv:1909.08053, section 3), and
the first of forward once more where it is recomputed (backward does not need the second). With sequence
parallelism (arXiv:2205.05198, section 4.2.2) an all-gather and a reduce-scatter take the place of each,
which move the same bytes. The next operator reads what arrives: nothing hides either, unless torch's async
TP divides both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdptool.memory.simulation.program import traced_path
from fsdptool.planning.time.overlap import Ring
from fsdptool.planning.time.step_time import ModuleSeconds, copies_of, owners_of
from fsdptool.records.sharding import UnitPlan
from fsdptool.records.trace import Repeat, Segment, Trace


def summed_seconds(
    trace: Trace, group: Ring, products: Sequence[float] | None = None
) -> dict[str, ModuleSeconds]:
    """Return what every traced module waits for its tensor-parallel group, recomputation included.

    Async TP divides an all-gather and the products that read it, or products and the reduce-scatter of what
    they make, into a part for each rank, and moves one part while another is multiplied (torch 2.13,
    ``distributed/_symmetric_memory/__init__.py:_pipelined_multi_all_gather_and_consume`` and
    ``_pipelined_produce_and_all2all``). One part of N needs no transfer, so products of c seconds hide
    (N - 1) / N c at most. All products of a module are counted, which is an upper bound: torch fuses with a
    collective only the products next to it. In blocks alone: the head is not compiled.

    Args:
        trace: The micro-batch of one rank.
        group: Its tensor-parallel group.
        products: Seconds of every operation of the trace if async TP is assumed; None: nothing overlaps.
    """
    waited: dict[str, ModuleSeconds] = {}
    backward = False
    for owner, segment in owners_of(trace):
        backward = backward or segment.marker == "backward"
        seconds = sum(group.reduce(size) for size in segment.summed)
        moved = sum(group.gather(size) for size in segment.gathered)
        if products is not None and any(map(_is_block, _upwards(owner))):
            multiplied = (n for n in segment.operations if trace.operations[n].kind == "product")
            moved -= sum(products[n] for n in multiplied) * (group.ranks - 1) / group.ranks
        seconds += max(moved, 0.0)
        if seconds:
            cost = ModuleSeconds(0.0, seconds) if backward else ModuleSeconds(seconds)
            waited[owner] = waited.get(owner, ModuleSeconds()) + cost
    return waited


def model_flops(trace: Trace, plan: UnitPlan | None = None, teacher: UnitPlan | None = None) -> float:
    """Return the FLOPs a micro-batch needs at full depth, recomputation not counted.

    Blocks that were not traced count as the period they repeat; a distillation's teacher counts, its
    forward being part of what the method computes. What the ranks of a tensor-parallel group divide counts
    once for each of them, what all compute alike (an undivided head, routers, latent projections) once.

    Args:
        trace: The micro-batch of one rank.
        plan: The units of the model; None: no layer is divided.
        teacher: Those of a distillation's teacher.
    """
    tensor = plan.tensor if plan is not None else None
    size = tensor.size if tensor is not None else 1
    span = tensor.sequence if tensor is not None else None
    divided, whole = _paths(plan, trace.repeats)
    if trace.upper is not None:
        # A compiled block has no boundaries inside: all of it counts as divided.
        divided |= {
            path for region in divided for path in _upwards(region.rpartition(".")[0]) if _is_block(path)
        }
    total = model_flops(trace.teacher, teacher) if trace.teacher is not None else 0.0
    for owner, segment in _innermost(trace):
        flops = (sum(segment.flops.values()) - segment.recomputed) * copies_of(owner, trace.repeats)
        inside = any(path in divided for path in _upwards(owner))
        # What lies between the regions computes with a part of the sequence.
        shared = size > 1 and (owner not in whole if inside else span is not None and span.covers(owner))
        total += flops * (size if shared else 1)
    return total


def _innermost(trace: Trace) -> Iterator[tuple[str, Segment]]:
    """Yield every segment with the innermost module whose code runs in it.

    What a head returns is what its model returns: the gradient arrives at both before the head's backward.
    """
    inner = ""
    for owner, segment in owners_of(trace):
        if segment.marker != "grad_enter":
            inner = ""
        elif inner and (not owner or inner.startswith(f"{owner}.")):
            owner = inner
        yield owner, segment
        inner = owner if segment.marker == "grad_enter" and not segment.kernels else ""


def _paths(plan: UnitPlan | None, repeats: Sequence[Repeat]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the traced paths of divided modules, and of modules in them that are whole."""
    if plan is None or plan.tensor is None:
        return frozenset(), frozenset()
    # The ranks of the group share out the tokens of experts that another group holds.
    plans = (plan.tensor, plan.experts) if plan.experts is not None else (plan.tensor,)
    modules = {item.path for part in plans for item in part.modules}
    whole = {item.fqn.rpartition(".")[0] for item in plan.placements if item.dim is None} - modules
    divided = modules | set(plan.tensor.regions)
    return (
        frozenset(traced_path(path, repeats) for path in divided),
        frozenset(traced_path(path, repeats) for path in whole),
    )


def _is_block(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _upwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
