"""Inspect every model class of the installed transformers and diffusers with its default configuration.

The classes are the causal-LM, masked-LM, seq2seq, image-text, vision and audio classes of transformers and
the transformer and UNet classes of diffusers. For each, the result has the wrap choice, the share of the
largest unit, and, if that is 35 % or more, the reason (``fsdptool.records.anatomy.WrapConcern``). Classes
whose defaults cannot be built are listed with the library's own message. Any other exception counts as a
failure of fsdptool.

    python benchmarks/detect/sweep.py -o benchmarks/results/detect-sweep.json

Takes about three minutes on one core. A Markdown table is written next to the JSON file.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import platform
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "breadth"))

from classes import GROUPS, subjects

from fsdptool.errors import FsdptoolError
from fsdptool.inspection.api import describe
from fsdptool.inspection.build import build
from fsdptool.inspection.census import DOMINANT, unit_plan
from fsdptool.records.anatomy import ModelSpec, Reference, WrapConcern
from fsdptool.records.diagnostic import library_versions

CONCERNS: dict[WrapConcern, str] = {
    "no_repeated_block": "no class repeats: nothing can be wrapped by class",
    "shared_block": "one block is applied many times: it is one unit, gathered for every application",
    "mostly_embedding": "embedding tables hold the parameters; FSDP2 gathers a table whole",
    "convolutional_stages": "convolutional stages of different widths: no two blocks are alike",
    "few_blocks": "so few blocks that each is a large part of the model",
    "large_head": "one layer outside the blocks (a head, a projection) holds the parameters",
    "uneven_blocks": "blocks of one class differ so much in size that one dominates",
    "shared_parameters": "parameters shared between blocks must be one unit",
    "many_parts": "parameters outside the blocks add up although no single one is large",
}
"""Meaning of each code, for the table."""


def diffusers_classes() -> list[str]:
    """Return every public ModelMixin class of diffusers' transformers and unets packages."""
    import diffusers
    from diffusers.models.modeling_utils import ModelMixin

    results = []
    for name in dir(diffusers):
        kind = getattr(diffusers, name, None)
        if not (inspect.isclass(kind) and issubclass(kind, ModelMixin) and kind is not ModelMixin):
            continue
        if kind.__module__.startswith(("diffusers.models.transformers", "diffusers.models.unets")):
            results.append(name)
    return sorted(results)


def look(library: str, group: str, name: str) -> dict[str, Any]:
    """Inspect one class with its default configuration."""
    config = {"_class_name": name} if library == "diffusers" else {"architectures": [name]}
    spec = ModelSpec(Reference("config", name), "generic", None, library, name, config)
    row: dict[str, Any] = {"class": name, "group": group}
    started = time.process_time()
    try:
        model = build(spec, initialise=False)
        anatomy = describe(model, spec)
        plan = unit_plan(anatomy)
    except FsdptoolError as error:
        return {**row, "outcome": "not_built", "why": error.message}
    except Exception as error:
        return {**row, "outcome": "failure", "why": f"{type(error).__name__}: {error}"}
    largest = max(unit.numel for unit in plan.units) / anatomy.total_parameters
    return {
        **row,
        "outcome": "concern" if largest >= DOMINANT else "good",
        "parameters": anatomy.total_parameters,
        "wrap": list(anatomy.wrap.classes),
        "units": len(plan.units),
        "largest_share": round(largest, 4),
        "concern": anatomy.wrap.concern_code,
        "cpu_seconds": round(time.process_time() - started, 3),
    }


def table(document: dict[str, Any]) -> str:
    """Return the summary as Markdown."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for row in document["rows"]:
        groups[row["group"]][row["outcome"]] += 1
    lines = [
        "# Detection sweep: every class with its default configuration",
        "",
        f"Libraries: {', '.join(f'{k} {v}' for k, v in document['libraries'].items())}. Written by"
        " `benchmarks/detect/sweep.py`.",
        "",
        "| group | classes | largest unit below 35 % | a reason from the closed list |"
        " not buildable from defaults | failures |",
        "|---|---|---|---|---|---|",
    ]
    for group, counts in groups.items():
        total = sum(counts.values())
        cells = [str(counts[key]) for key in ("good", "concern", "not_built", "failure")]
        lines.append(f"| {group} | {total} | {' | '.join(cells)} |")
    lines += ["", "| reason | classes | meaning |", "|---|---|---|"]
    reasons = Counter(row["concern"] for row in document["rows"] if row["outcome"] == "concern")
    lines += [f"| {code} | {count} | {CONCERNS[code]} |" for code, count in reasons.most_common()]
    lines += ["", "| class | group | reason | largest unit | wrap classes |", "|---|---|---|---|---|"]
    for row in document["rows"]:
        if row["outcome"] == "concern":
            wrap = ", ".join(row["wrap"]) or "none"
            cells = [row["class"], row["group"], row["concern"], f"{row['largest_share']:.0%}", wrap]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| not buildable | the library's words |", "|---|---|"]
    lines += [
        f"| {row['class']} | {row['why'].replace('|', '/')[:160]} |"
        for row in document["rows"]
        if row["outcome"] in ("not_built", "failure")
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the sweep and write both files; return 1 if fsdptool failed on a class."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="substring of class names")
    arguments = parser.parse_args()
    rows = []
    found = sorted(subjects(), key=lambda item: (list(GROUPS).index(item.group), item.name))
    jobs = [("transformers", item.group, item.name) for item in found]
    jobs += [("diffusers", "diffusers", name) for name in diffusers_classes()]
    for index, (library, group, name) in enumerate(jobs):
        if arguments.only in name:
            rows.append(look(library, group, name))
            if index % 50 == 0:
                sys.stderr.write(f"{index}/{len(jobs)}\n")
                gc.collect()
    outcomes = dict(Counter(row["outcome"] for row in rows))
    document: dict[str, Any] = {
        "libraries": library_versions(),
        "python": platform.python_version(),
        "outcomes": outcomes,
        "concerns": dict(Counter(row["concern"] for row in rows if row["outcome"] == "concern")),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(table(document))
    print(json.dumps({"classes": len(rows), **outcomes, "concerns": document["concerns"]}))
    return 1 if outcomes.get("failure") else 0


if __name__ == "__main__":
    raise SystemExit(main())
