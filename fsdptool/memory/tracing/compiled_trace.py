"""The trace of a model whose blocks are compiled: memory from compiled blocks, arithmetic from eager ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fsdptool.memory.tracing.compiled_blocks import (
    BlockCompiler,
    Fusion,
    UncompiledBlockError,
)
from fsdptool.modeling.compilation import MEASURED_TORCH
from fsdptool.records.trace import Segment, Trace

REMAINS = (
    "compiled blocks: the plan runs the program that Inductor writes for a CPU, and other devices fuse other"
    " operators; memory of autotuning, of CUDA graphs and of compilation in the first step is not included"
)
_EAGER = "the memory of compiled blocks: the figures are those of uncompiled blocks, because"


def trace_compiled(
    eager: Trace, trace_with: Callable[[BlockCompiler], Trace], *, reason: str | None = None
) -> Trace:
    """Return the trace with compiled blocks.

    The time model is calibrated on what eager operators compute and move, so these figures stay those of
    ``eager``. A class of blocks that cannot be compiled stays eager, and the trace's ``unknowns`` say so.

    Args:
        eager: The same micro-batch with no block compiled.
        trace_with: Traces with blocks compiled by what it is given.
        reason: Why no block can be compiled; None if nothing is known against it.
    """
    version = torch.__version__.split("+")[0]
    if version.rpartition(".")[0] not in MEASURED_TORCH:
        reason = f"compiled blocks were not compared with measurements on torch {version}"
    if reason is not None:
        return replace(eager, unknowns=(*eager.unknowns, f"{_EAGER} {reason}"))
    compiler = BlockCompiler()
    try:
        with compiler.compiling():
            estimate = _traced(compiler, trace_with)
            compiler.fusion = Fusion.NONE
            upper = trace_with(compiler)
        merged = replace(
            estimate, segments=_with_costs(estimate.segments, eager), operations=eager.operations, upper=upper
        )
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        return trace_compiled(eager, trace_with, reason=f"they fail on fake tensors ({text})")
    failed = tuple(f"{_EAGER} {why} cannot be compiled" for why in compiler.uncompiled.values())
    return replace(merged, unknowns=(*eager.unknowns, REMAINS, *failed), notes=eager.notes)


def _traced(compiler: BlockCompiler, trace_with: Callable[[BlockCompiler], Trace]) -> Trace:
    """Trace until every class of blocks that cannot be compiled is known."""
    while True:
        try:
            return trace_with(compiler)
        except UncompiledBlockError as error:
            if error.kind in compiler.uncompiled:
                raise
            compiler.uncompiled[error.kind] = str(error)


def _with_costs(segments: Sequence[Segment], eager: Trace) -> tuple[Segment, ...]:
    """Return segments with the arithmetic of an eager trace, which has boundaries inside blocks, too.

    Raises:
        ValueError: The two do not reach the same boundaries in the same order.
    """
    boundaries = {segment.path for segment in segments}
    groups: list[list[Segment]] = []
    for segment in eager.segments:
        if segment.path in boundaries:
            groups.append([])
        groups[-1].append(segment)
    if [(g[0].marker, g[0].path) for g in groups] != [(s.marker, s.path) for s in segments]:
        raise ValueError("compiled and eager blocks reach module boundaries in another order")
    return tuple(_costs(segment, group) for segment, group in zip(segments, groups, strict=True))


def _costs(segment: Segment, group: Sequence[Segment]) -> Segment:
    flops: dict[str, float] = {}
    for part in group:
        for dtype, count in part.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + count
    return replace(
        segment,
        flops=flops,
        bytes_moved=sum(part.bytes_moved for part in group),
        kernels=sum(part.kernels for part in group),
        recomputed=sum(part.recomputed for part in group),
        operations=tuple(number for part in group for number in part.operations),
        calls=tuple(call for part in group for call in part.calls),
        summed=tuple(size for part in group for size in part.summed),
        gathered=tuple(size for part in group for size in part.gathered),
    )
