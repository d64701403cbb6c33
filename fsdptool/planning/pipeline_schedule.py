"""The schedule of a pipeline: its bubble, the forwards in flight, and the order in which a rank runs stages.

A pipeline of p ranks and m micro-batches (the accumulation) idles for (p - 1) / m of the ideal time under
1F1B, and for (p - 1) / (v m) under interleaved 1F1B with v virtual stages per rank (Narayanan et al.,
arXiv:2104.04473, sections 2.2.1 and 2.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdptool.records.plan import Pipeline


def bubble_fraction(pipeline: Pipeline, micro_batches: int) -> float:
    """Return the idle time of a step divided by its ideal time (arXiv:2104.04473, section 2.2)."""
    return (pipeline.ranks - 1) / (pipeline.virtual * micro_batches)


def in_flight(pipeline: Pipeline, micro_batches: int, rank: int) -> int:
    """Return the most forwards of a virtual stage whose activations pipeline rank ``rank`` holds at once.

    torch 2.13 (``distributed/pipelining/schedules.py``): 1F1B begins with min(m, p - rank) forwards;
    interleaved 1F1B with (v - 1) p + 2 (p - 1 - rank) (``_get_warmup_ops``), and runs one more forward before
    the first backward.
    """
    stages = pipeline.ranks - rank
    if pipeline.schedule == "1f1b":
        return min(micro_batches, stages)
    warmup = (pipeline.virtual - 1) * pipeline.ranks + 2 * (stages - 1)
    return min(micro_batches * pipeline.virtual, warmup + 1)


def schedule_order(pipeline: Pipeline, micro_batches: int, rank: int) -> Iterator[tuple[int, bool]]:
    """Yield what pipeline rank ``rank`` runs: which of its virtual stages, and whether backward.

    torch 2.13 (``distributed/pipelining/schedules.py``): forwards, then forwards and backwards by turns, then
    the remaining backwards. Interleaved 1F1B changes the virtual stage after every p micro-batches; backwards
    begin with the last one (``ScheduleInterleaved1F1B._calculate_single_rank_operations``).
    """
    warmup = in_flight(pipeline, micro_batches, rank) - 1
    total = micro_batches * pipeline.virtual
    for step in range(total + warmup):
        if step < total:
            yield step // pipeline.ranks % pipeline.virtual, False
        if step >= warmup:
            yield pipeline.virtual - 1 - (step - warmup) // pipeline.ranks % pipeline.virtual, True
