"""Add a row that ``fsdptool share`` wrote to the collection of published runs.

    python benchmarks/planning/add_row.py row.json --source https://example.org/thread [--group NAME]

The row is checked against ``schemas/shared-row.schema.json`` and planned once. A row whose configuration and
figures the collection already has is refused. ``published.py`` then compares it with its plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from published import ROWS, predict, read_rows

from fsdptool.errors import FsdptoolError, PlanError
from fsdptool.files.values import read_object
from fsdptool.records.codec import from_json
from fsdptool.records.diagnostic import digest
from fsdptool.records.shared_row import SharedRow

_SAME = ("recipe", "options", "published", "gpus")


def collected(row: SharedRow, source: str, group: str | None = None) -> dict[str, Any]:
    """Return a shared row in the form of the collection.

    Raises:
        PlanError: The source is not an address.
    """
    place = urlsplit(source)
    if place.scheme not in ("http", "https") or not place.netloc:
        raise PlanError(f"{source} is not an address", help="give where the row was published: --source URL")
    figures, recipe, options = row.published, dict(row.recipe), dict(row.options)
    throughput = {}
    if figures.tokens_per_second_and_gpu is not None:
        throughput["tokens_per_s_gpu"] = figures.tokens_per_second_and_gpu
    if figures.samples_per_second_and_gpu is not None:
        throughput["samples_per_s_gpu"] = figures.samples_per_second_and_gpu
    name = f"shared_{digest([recipe, options, row.gpu, row.gpus, throughput]).removeprefix('sha256:')[:12]}"
    memory = {"kind": figures.peak_kind, "gib": figures.peak_gib} if figures.peak_gib is not None else None
    batch, sharding = recipe.get("batch", {}), recipe.get("sharding", {})
    return {
        "id": name,
        "source": source,
        "source_group": group or place.netloc,
        "model": f"{row.model} ({row.parameters:,})",
        "gpu": row.gpu,
        "gpus": row.gpus,
        "sharding": f"FSDP2 {options.get('hsdp', '')}, reshard_after_forward={options.get('reshard')}",
        "precision": str(options.get("precision")),
        "activation_checkpointing": str(options.get("checkpointing")),
        "compile": {True: "compiled blocks", False: "eager"}.get(sharding.get("compile"), "not said"),
        "loss": "as the program's default",
        "attention": "SDPA",
        "optimizer": str(recipe.get("optimizer", {}).get("name")),
        "allocator": "not said",
        "measured": f"printed by {row.program}; median over steps",
        "published": {"memory": memory, "throughput": throughput or None},
        "class": "shared",
        "seq_len": batch.get("sequence_length"),
        "per_gpu_batch": batch.get("micro_batch"),
        "recipe": recipe,
        "cluster": {
            "name": name,
            "gpu": row.gpu,
            "gpus_per_node": row.gpus_per_node,
            "nodes": row.gpus // row.gpus_per_node,
        },
        "options": options,
    }


def refuse_again(new: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise PlanError if the collection has the row already."""
    for row in rows:
        if row["id"] == new["id"] or all(row[key] == new[key] for key in _SAME):
            raise PlanError(f"the collection has this row as {row['id']}", help="nothing is to be added")


def main() -> int:
    """Check a row and add it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("row", type=Path)
    parser.add_argument("--source", required=True, help="where the row was published")
    parser.add_argument("--group", help="rows of one group count as one source; default: the address's host")
    parser.add_argument("--collection", type=Path, default=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        row = from_json(SharedRow, read_object(arguments.row, "shared-row"), where=str(arguments.row))
        new = collected(row, arguments.source, arguments.group)
        refuse_again(new, read_rows(arguments.collection))
        planned = predict(new)
    except FsdptoolError as error:
        print(f"error: {error.message}\nhelp: {error.help}", file=sys.stderr)
        return 2
    with arguments.collection.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(new) + "\n")
    speed = planned.tokens_per_second or planned.samples_per_second or 0.0
    print(f"added {new['id']}; the plan says {speed / row.gpus:,.0f} per second and GPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
