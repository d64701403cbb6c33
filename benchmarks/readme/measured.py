"""Put the committed figures of the benchmarks into README.md, between its ``measured`` marks.

    python benchmarks/readme/measured.py

Nothing is measured here: every cell is read from ``benchmarks/results``, and a test holds the README to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Rewrite the table."""
    text = README.read_text(encoding="utf-8")
    README.write_text(BLOCK.sub(lambda found: found[1] + table() + found[2], text), encoding="utf-8")


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| what | figure | result |", "|---|---|---|"]
    for what, figure, name in rows():
        lines.append(f"| {what} | {figure} | [{name}](benchmarks/results/{name}.json) |")
    return "\n".join(lines) + "\n"


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield what was measured, its figure, and the result it is read from."""
    accuracy = _read("memory_accuracy")["summary"]
    for backend, where in (("fake", "one rank of many"), ("gloo", "real ranks")):
        found = accuracy[backend]["all"]
        yield (
            f"predicted peak memory against the allocator's events, {where}, {found['settings']} settings",
            f"off by {found['median_percent']} % in the median, {found['worst_percent']} % at worst",
            "memory_accuracy",
        )
    oracle = _read("memory_oracle")["rows"].values()
    errors = [abs(row["error_percent"]) for row in oracle if row.get("error_percent") is not None]
    yield (
        f"the same against torch's own `fully_shard` on fake tensors, 2 to 512 ranks, {len(errors)} settings",
        f"off by {max(errors):.3f} % at worst",
        "memory_oracle",
    )
    for rival, name in (
        ("bare", "a bare FSDP2 loop"),
        ("accelerate", "accelerate, made to shard on the CPU"),
    ):
        yield (
            f"time of a step over {name}",
            _ratio(_read("training_step_time")["ratios"][rival]),
            ("training_step_time"),
        )
    yield (
        "time of a step over Hugging Face's Trainer, made to shard on the CPU",
        _ratio(_read("training_versus_trainer")["sharded"]["ratio"]),
        "training_versus_trainer",
    )
    yield (
        "time a run stands still for an asynchronous checkpoint over a synchronous one",
        _ratio(_read("training_save_stall")["ratios"]["stall"]),
        "training_save_stall",
    )
    yield (
        "host memory of a rank while loading over `from_pretrained`",
        _ratio(_read("training_loading_memory")["ratio"]),
        "training_loading_memory",
    )
    yield (
        "command to first step over an accelerate script, which does not shard",
        _ratio(_read("training_start_up")["ratio"]),
        "training_start_up",
    )
    soak = _read("faults-soak")
    asked, survived = sum(soak["asked"].values()), sum(soak["survived"].values())
    equal = "equal to" if soak["final_checkpoint_equal"] and soak["losses_equal"] else "other than"
    yield (
        "kills of ranks, half of them while a checkpoint is written",
        f"{survived} of {asked} survived, final weights and losses {equal} the undisturbed run's",
        "faults-soak",
    )
    yield from _configurations()


def _configurations() -> Iterator[tuple[str, str, str]]:
    detect = _read("detect_cost")["commands"][0]
    yield (
        f"processor time of `detect {detect['reference']}` over a bare script that builds it on meta",
        f"{detect['cold_over_floor_cpu']} ×, {detect['cold_peak_mib']} MiB; asked again"
        f" {detect['hit_over_cold_cpu']} × of that",
        "detect_cost",
    )
    many = _read("config-speed")["many_files"]
    yield (
        f"processor time of `validate` on {many['files']:,} files over check-jsonschema",
        f"{many['ratio']} ×",
        "config-speed",
    )
    against = _read("config-against-to-fsdp2")
    ours, theirs = against["results"]["fsdptool migrate"], against["results"]["accelerate to-fsdp2"]
    yield (
        f"{against['files']} real FSDP1 files moved to FSDP2: those that work, those that mean the same",
        f"{ours['works']} and {ours['means_the_same']}; `accelerate to-fsdp2` {theirs['works']} and"
        f" {theirs['means_the_same']}",
        "config-against-to-fsdp2",
    )


def _ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} × [{found['low']:.2f}, {found['high']:.2f}]"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
