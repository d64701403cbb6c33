"""Prints how a group of ranks divides a model (``detect --tp`` and ``--ep``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdptool.records.detection import PlacedParameter, SplitSummary
from fsdptool.records.tensor_plan import WholeReason
from fsdptool.report.tables import count, print_line, print_table

_WORDS: Mapping[WholeReason, str] = {
    "norm": "norm",
    "router": "router: every rank needs all scores",
    "after_sum": "added once, after the sum",
    "latent": "low-rank projection",
    "embedding": "embedding that is not divided",
    "head": "head that is not divided",
    "state": "state along the sequence",
    "spanned": "a norm over all heads follows",
    "stream": "acts on the whole residual",
    "coupled": "its code treats all heads at once",
    "unknown": "how to divide it is not known",
    "overridden": "the family keeps it whole",
}


def print_split(split: SplitSummary, kind: str) -> None:
    """Print every distinct parameter with its placement, local shape and reason.

    Args:
        split: The division.
        kind: ``tensor`` or ``expert``.
    """
    print_line()
    print_line(
        f"{kind} parallelism over {split.size} ranks: {count(split.local_parameters)} parameters each",
        style="bold",
    )
    rows = [
        (
            item.name + (f" (x{item.count})" if item.count > 1 else ""),
            _placement(item),
            _shape(item.shape),
            _shape(item.local_shape),
            _why(item),
        )
        for item in split.parameters
        if kind == "tensor" or item.style
    ]
    print_table(("parameter", "placement", "shape", "on one rank", "why"), rows, optional=(2, 4))
    for note in split.notes:
        print_line(f"note: {note}")


def _placement(item: PlacedParameter) -> str:
    if item.style is None:
        return "whole, gradients summed" if item.partial_gradient else "whole"
    parts = len(item.sections)
    return f"{item.style}, dimension {item.dim}" + (f", {parts} sections" if parts > 1 else "")


def _why(item: PlacedParameter) -> str:
    return _WORDS[item.reason] if item.reason else f"from the {item.origin}"


def _shape(lengths: Sequence[int]) -> str:
    return " x ".join(str(length) for length in lengths) or "scalar"
