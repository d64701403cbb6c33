"""Draw the map of a model's FSDP units and the ladder of checkpointing policies, for the documentation.

    python benchmarks/readme/pictures.py

``units.svg`` shows the units of Llama 3 8B in the native layout, each as wide as its share of the parameters.
``ladder.svg`` plans one model under each policy of activation checkpointing, with everything else equal. Both
go to ``docs/images``; the figures are those of today's detection and plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import fsdptool
from fsdptool.formatting import amount
from fsdptool.report.page.parts import CHARTS

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MODEL, GPU, GPUS, LENGTH = "llama3:8b", "H100-80GB-SXM", 8, 4096
POLICIES = ("none", "every_2", "selective", "selective:every-2-matmuls", "full")
COLOURS = {"embedding": "gathered", "block": "states", "tail": "passing", "root": "outside"}
WIDTH = 960


def units() -> Iterator[str]:
    """Yield the elements of the map of units."""
    found = fsdptool.detect(MODEL).document()["units"]
    total = sum(unit["parameters"] for unit in found)
    order = sorted(found, key=lambda unit: ("embedding", "block", "tail", "root").index(unit["kind"]))
    yield _text(14, 24, f"{MODEL}: {len(found)} FSDP units, as wide as their parameters", "strong")
    x = 14.0
    for kind, members in groupby(order, key=lambda unit: unit["kind"]):
        start, count, parameters = x, 0, 0
        for unit in members:
            width = max(unit["parameters"] / total * (WIDTH - 28), 1.0)
            colour = COLOURS[kind]
            yield f'<rect class="g-{colour}" x="{x:.1f}" y="70" width="{width:.1f}" height="60"/>'
            x, count, parameters = x + width, count + 1, parameters + unit["parameters"]
        name = f"{count} x {kind}" if count > 1 else kind
        middle, anchor = ((start + x) / 2, "middle") if x - start > 160 else (start, "start")
        high = kind == "root"
        if high:
            middle, anchor = x, "end"
        yield _text(middle, 164 if high else 148, f"{name}, {_millions(parameters)}", "", anchor)
    yield _text(14, 56, "forward gathers one unit after another, and prefetches the next", "")


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.0f} M" if parameters > 500_000 else "under 1 M"


def ladder() -> Iterator[str]:
    """Yield the elements of the ladder: memory of one rank and time of a step under each policy."""
    yield _text(14, 24, f"{MODEL} on {GPUS} {GPU}, {LENGTH:,} tokens: what is kept for backward", "strong")
    plans = [_planned(policy) for policy in POLICIES]
    most = max(memory for memory, _, _ in plans)
    for row, (policy, (memory, usable, seconds)) in enumerate(zip(POLICIES, plans, strict=True)):
        y = 48 + row * 34
        width = memory / max(most, usable) * 520
        colour = "activations" if memory <= usable else "gathered"
        yield _text(14, y + 15, policy, "")
        yield f'<rect class="g-{colour}" x="200" y="{y}" width="{width:.1f}" height="22"/>'
        yield _text(730, y + 15, f"{amount(memory)}, {seconds:.3f} s per step", "")
    limit = 200 + plans[0][1] / max(most, plans[0][1]) * 520
    bottom = 48 + len(POLICIES) * 34
    yield f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="42" y2="{bottom}"/>'
    yield _text(limit, bottom + 16, f"usable {amount(plans[0][1])}", "", "end")


def _planned(policy: str) -> tuple[int, int, float]:
    plan = fsdptool.plan(
        MODEL,
        gpu=GPU,
        gpus=GPUS,
        sequence_length=LENGTH,
        micro_batch=2,
        checkpointing=policy,
        search=False,
    )
    candidate = plan.candidates[0]
    assert candidate.device_total_bytes is not None
    assert candidate.usable_bytes is not None
    assert candidate.step_seconds is not None
    return candidate.device_total_bytes, candidate.usable_bytes, candidate.step_seconds


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _write(name: str, height: int, title: str, shapes: Iterator[str]) -> None:

    ground = '<rect width="100%" height="100%" fill="var(--bg)"/>'
    (IMAGES / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-labelledby="{name}-title"><title id="{name}-title">{title}</title><style>{CHARTS}</style>'
        f"{ground}{''.join(shapes)}</svg>\n",
        encoding="utf-8",
    )


def main() -> None:
    """Write both pictures."""
    _write("units", 180, f"FSDP units of {MODEL}", units())
    _write("ladder", 80 + len(POLICIES) * 34, f"Checkpointing policies of {MODEL}", ladder())


if __name__ == "__main__":
    main()
