"""Write the committed benchmark figures into README.md and the page of measured results.

    python benchmarks/readme/measured.py

This script does not measure anything: every cell is read from ``benchmarks/results``, and a test compares
both files with it. They contain a block between ``measured`` marks; the README shows three of the rows.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "explanation" / "measured.md")
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- measured -->\n)(.*?)(<!-- end -->)", re.DOTALL)


README_ROWS = ("memory_accuracy", "faults-soak", "config-against-to-fsdp2")


def main() -> None:
    """Rewrite the table of each page."""
    for page in PAGES:
        before, start, _, end, after = BLOCK.split(page.read_text(encoding="utf-8"))
        page.write_text(before + start + table(page) + end + after, encoding="utf-8")


def table(page: Path) -> str:
    """Return the table of a page in Markdown; the README has the last row of each of ``README_ROWS``."""
    shown = list(rows())
    if page == PAGES[0]:
        last = {name: (what, figure, name) for what, figure, name in shown}
        shown = [last[name] for name in README_ROWS]
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    lines = ["| what | figure | result |", "|---|---|---|"]
    for what, figure, name in shown:
        lines.append(f"| {what} | {figure} | [{name}]({up}benchmarks/results/{name}.json) |")
    return "\n".join(lines) + "\n"


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield what was measured, its figure, and the name of the result file."""
    accuracy = _read("memory_accuracy")["summary"]
    for backend, where in (("fake", "one rank of many"), ("gloo", "real ranks")):
        errors = accuracy[backend]["all"]
        yield (
            f"error of the predicted peak memory, {where}, {errors['settings']} settings",
            f"median {errors['median_percent']} %, maximum {errors['worst_percent']} %",
            "memory_accuracy",
        )
    unseen = _read("memory_unseen")["summary"]
    yield (
        f"the same for {unseen['architectures']} architectures that were not used for tuning, of odd sizes,"
        f" {unseen['settings']} settings",
        f"median {unseen['median_percent']} %, maximum {unseen['worst_percent']} %"
        f" ({unseen['worst_percent_with_onednn']} % with the scratch memory of oneDNN's convolutions)",
        "memory_unseen",
    )
    rows = _read("memory_other_programs")["rows"].values()
    assert not any(limit["side"] == "more" for row in rows for limit in row.get("limits", ())), "lower bounds"
    others = [abs(row["difference"]) for row in rows]
    yield (
        "error of the peak planned from files of other programs (Trainer, TRL, torchtune), one"
        f" and two processes, {len(others)} settings",
        f"median {statistics.median(others):.2%}, maximum {max(others):.2%}".replace("%", " %"),
        "memory_other_programs",
    )
    scripts = [abs(row["difference"]) for row in _read("memory_own_scripts")["rows"].values()]
    yield (
        "the same for hand-written training loops (`fully_shard`, DDP, accelerate, autocast), one and two"
        f" processes, {len(scripts)} settings",
        f"median {statistics.median(scripts):.2%}, maximum {max(scripts):.2%}".replace("%", " %"),
        "memory_own_scripts",
    )
    oracle = _read("memory_oracle")["rows"].values()
    differences = [abs(row["error_percent"]) for row in oracle if row.get("error_percent") is not None]
    yield (
        "difference from torch's own `fully_shard` on fake tensors, 2 to 512 ranks,"
        f" {len(differences)} settings",
        f"maximum {max(differences):.3f} %",
        "memory_oracle",
    )
    published = _read("planning_published")
    item = published["summary"]["memory, allocated, alike"]
    yield (
        "planned allocated peak on GPUs that others measured, for runs with the same model, loss and"
        f" grouping, {item['rows']} rows, relative to the published figure",
        f"median {item['median']:.2f} ×, {item['least']:.2f} to {item['most']:.2f}",
        "planning_published",
    )
    judged = published["leave_one_source_out"]
    yield (
        f"error of the planned throughput on GPUs that others measured, {judged['rows']} runs of"
        f" {judged['sources']} sources",
        f"median {judged['median_error']:.0%}",
        "planning_published",
    )
    yield (
        "these runs inside the range of P10 to P90 that the runs of all other sources give",
        f"{judged['inside']} of {judged['rows']} ({judged['share']:.0%})",
        "planning_published",
    )
    yield (
        "time for which an asynchronous checkpoint pauses training, relative to a synchronous one",
        _ratio(_read("training_save_stall")["ratios"]["stall"]),
        "training_save_stall",
    )
    yield (
        "host memory of a rank while loading, relative to `from_pretrained`",
        _ratio(_read("training_loading_memory")["ratio"]),
        "training_loading_memory",
    )
    yield (
        "time from the command to the first step, relative to an accelerate script, which does not shard",
        _ratio(_read("training_start_up")["ratio"]),
        "training_start_up",
    )
    soak = _read("faults-soak")
    kills, survived = sum(soak["asked"].values()), sum(soak["survived"].values())
    equal = "equal to" if soak["final_checkpoint_equal"] and soak["losses_equal"] else "different from"
    yield (
        "killed ranks, half of them while a checkpoint is being written",
        f"{survived} of {kills} survived; final weights and losses {equal} those of an undisturbed run",
        "faults-soak",
    )
    yield from _configurations()


def _configurations() -> Iterator[tuple[str, str, str]]:
    detect = _read("detect_cost")["commands"][0]
    yield (
        f"CPU time of `detect {detect['reference']}`, relative to a bare script that builds it on meta",
        f"{detect['cold_over_floor_cpu']} ×, {detect['cold_peak_mib']} MiB; from the cache"
        f" {detect['hit_over_cold_cpu']} × of that",
        "detect_cost",
    )
    many = _read("config-speed")["many_files"]
    yield (
        f"CPU time of `validate` on {many['files']:,} files, relative to check-jsonschema",
        f"{many['ratio']} ×",
        "config-speed",
    )
    against = _read("config-against-to-fsdp2")
    ours, theirs = against["results"]["fsdptool migrate"], against["results"]["accelerate to-fsdp2"]
    yield (
        f"{against['files']} real FSDP1 files migrated to FSDP2: how many work, how many mean the same",
        f"{ours['works']} and {ours['means_the_same']}; `accelerate to-fsdp2` {theirs['works']} and"
        f" {theirs['means_the_same']}",
        "config-against-to-fsdp2",
    )


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} × [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
