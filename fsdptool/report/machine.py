"""The figures of a machine table as people read them."""

from __future__ import annotations

from typing import Any

from fsdptool.formatting import amount
from fsdptool.records.annotations import fields_of
from fsdptool.records.cluster import AttentionRate, Machine

_NAMED_ABOVE = ("name", "source")


def machine_figures(row: Machine) -> list[tuple[str, str]]:
    """Return the figures of a row by name, each with its unit; its name and source are left out."""
    return [
        (name, _figure(name, getattr(row, field.name)))
        for name, field in fields_of(Machine).items()
        if name not in _NAMED_ABOVE
    ]


def _figure(name: str, value: Any) -> str:
    if value is None or value in ("", ()):
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "throughput_range":
        return f"{_percent(value[0])} to {_percent(value[1])} of the prediction"
    if name == "kernels":
        return f"{len(value):,} measured"
    if isinstance(value, tuple):
        return "; ".join(map(_rates, value))
    if name.endswith("_bytes"):
        return amount(value)
    if name.endswith(("_latency", "_ramp")):
        return f"{value * 1e6:.3g} µs"
    if name in _TIMES:
        return f"{value:.3g} times"
    return _percent(value) if isinstance(value, float) else str(value)


_TIMES = ("reserved_ratio", "cached_speedup", "switch_reduction")


def _rates(rates: AttentionRate) -> str:
    return (
        f"heads of {rates.head_size}: forward {_percent(rates.forward)}, backward {_percent(rates.backward)}"
    )


def _percent(fraction: float) -> str:
    return f"{100.0 * fraction:.3g} %"
