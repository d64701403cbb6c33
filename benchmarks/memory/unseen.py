"""Measure and predict models that nobody tuned the memory model on: odd sizes, odd numbers of ranks.

The matrix (``matrix.py``) was measured while the memory model was written. These architectures were cut
small and measured afterwards, with widths, vocabularies, experts and sequences that the ranks do not divide.

``python benchmarks/memory/unseen.py [--only TEXT] [--again]`` measures the missing rows, predicts every row
that was measured, and writes ``benchmarks/results/memory_unseen.json`` row by row and, without ``--only``,
the table between the marks in ``docs/explanation/memory-accuracy.md``. ``--again`` predicts every row again.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kept_rows import read_document, row_options, write_between, write_document
from matrix import UNSEEN
from settings import Setting

from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import library_versions

RESULTS = Path(__file__).parent.parent / "results" / "memory_unseen.json"
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "memory-accuracy.md"
NOTABLE = 0.1
"""Percent. Rows that miss by more are measured without oneDNN, too."""
BEGIN, END = "<!-- unseen: begin (benchmarks/memory/unseen.py) -->", "<!-- unseen: end -->"

_FAKE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mixtral", {"ranks": 16, "checkpointing": "full", "reshard": False}),
    ("mixtral", {"ranks": 4}),
    ("mixtral-even", {"ranks": 16}),
    ("granitemoe", {"ranks": 3}),
    ("gpt-oss", {"ranks": 5, "checkpointing": "full"}),
    ("deepseek-v2", {"ranks": 6, "reshard": False}),
    ("qwen2-moe", {"ranks": 7, "precision": "bf16r", "accumulation": 2}),
    ("cohere", {"ranks": 3}),
    ("cohere", {"ranks": 7, "checkpointing": "full", "accumulation": 2}),
    ("falcon", {"ranks": 3, "precision": "fp32"}),
    ("gptj", {"ranks": 5, "checkpointing": "selective"}),
    ("granite", {"ranks": 9, "accumulation": 2, "held": "unsharded"}),
    ("mamba2", {"ranks": 3}),
    ("jamba", {"ranks": 5}),
    ("qwen3-next", {"ranks": 6, "checkpointing": "full"}),
    ("bart", {"ranks": 5, "optimizer": "sgd", "implementation": "foreach"}),
    ("bart", {"ranks": 5, "optimizer": "sgd", "implementation": "foreach", "padded": True}),
    ("modernbert", {"ranks": 7, "reshard": False}),
    ("modernbert", {"ranks": 7, "reshard": False, "padded": True}),
    ("siglip", {"ranks": 3, "precision": "fp32"}),
    ("siglip", {"ranks": 3, "precision": "fp32", "padded": True}),
    ("wav2vec2", {"ranks": 3}),
    ("pixart-sigma", {"ranks": 3}),
    ("auraflow", {"ranks": 5, "checkpointing": "full"}),
    ("cogvideox", {"ranks": 3, "method": "lora"}),
    ("gemma3", {"ranks": 3}),
    ("bloom", {"ranks": 2}),
    ("recurrentgemma", {"ranks": 3}),
    ("deberta-v3", {"ranks": 3, "padded": True}),
    ("pegasus", {"ranks": 3, "padded": True}),
    ("clip", {"ranks": 2, "precision": "fp32", "padded": True}),
    ("dit", {"ranks": 3}),
    ("sana", {"ranks": 2}),
)
_GLOO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sd3", {"ranks": 2}),
    ("mixtral", {"ranks": 3}),
    ("auraflow", {"ranks": 2, "precision": "fp32"}),
)


def rows() -> Iterator[Setting]:
    """Yield every row; a name says what differs from bf16 with resharding and AdamW."""
    for backend, choices in (("fake", _FAKE), ("gloo", _GLOO)):
        for name, change in choices:
            _, reference, overrides, batch = UNSEEN[name]
            words = ", ".join(f"{key} {value}" for key, value in change.items())
            row = Setting(f"{backend} {name}: {words}", name, reference, overrides, backend=backend)
            yield replace(row, batch=batch, kept_aside=True, **change)


def main() -> None:
    """Measure and predict the missing rows, and write the table."""
    options = row_options(__doc__)
    document = read_document(RESULTS)
    document |= {"benchmark": "memory/unseen", "libraries": library_versions()}
    for setting in rows():
        if options.only not in setting.name:
            continue
        row = document["rows"].setdefault(setting.name, {})
        if row.get("setting") != to_json(setting):
            row.clear()
        if "measured_bytes" not in row:
            row |= _measured(setting)
            _write(document)
        if "measured_bytes" in row and (options.again or "predicted_bytes" not in row):
            row |= _predicted(setting, row["measured_bytes"])
        if abs(row.get("error_percent", 0)) > NOTABLE and setting.backend == "fake":
            _compare_without_onednn(setting, row)
        print(setting.name, {key: value for key, value in row.items() if key != "setting"}, flush=True)
        _write(document)
    if not options.only:
        write_between(PAGE, BEGIN, END, _table(document["rows"]))


def _write(document: dict[str, Any]) -> None:
    document["summary"] = _summary(document["rows"])
    write_document(RESULTS, document)


def _measured(setting: Setting) -> dict[str, Any]:
    import measure  # noqa: F401 - imported before the fork, so that every row starts alike
    from run import measured

    result = measured(setting)
    if "error" in result:
        return {"setting": to_json(setting), "error": result["error"]}
    return {"setting": to_json(setting), "measured_bytes": result["peak_bytes"]}


def _predicted(setting: Setting, measured: int) -> dict[str, Any]:
    from report import predict

    predicted = predict(setting)
    if predicted.allocated_peak_bytes is None:
        return {"predicted_bytes": None, "unknown": "; ".join(predicted.unknowns)}
    return {
        "predicted_bytes": predicted.allocated_peak_bytes,
        "error_percent": round(100 * (predicted.allocated_peak_bytes / measured - 1), 3),
    }


def _compare_without_onednn(setting: Setting, row: dict[str, Any]) -> None:
    """Measure a miss again without oneDNN, whose scratch memory for convolutions only CPUs need."""
    if "measured_bytes_without_onednn" not in row:
        with torch.backends.mkldnn.flags(enabled=False):
            row["measured_bytes_without_onednn"] = _measured(setting)["measured_bytes"]
    measured = row["measured_bytes_without_onednn"]
    row["error_percent_without_onednn"] = round(100 * (row["predicted_bytes"] / measured - 1), 3)


def _summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    with_onednn = [abs(row["error_percent"]) for row in rows.values() if "error_percent" in row]
    errors = {
        name: abs(row.get("error_percent_without_onednn", row["error_percent"]))
        for name, row in rows.items()
        if "error_percent" in row
    }
    return {
        "settings": len(errors),
        "architectures": len({rows[name]["setting"]["family"] for name in errors}),
        "median_percent": round(statistics.median(errors.values()), 3) if errors else None,
        "worst_percent": max(errors.values(), default=None),
        "worst_percent_with_onednn": max(with_onednn, default=None),
        "not_predicted": [name for name, row in rows.items() if row.get("predicted_bytes") is None],
    }


def _table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | setting | measured | predicted | error | without oneDNN |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        model, _, setting = name.partition(": ")
        kind = UNSEEN[model.partition(" ")[2]][0]
        measured = f"{row['measured_bytes']:,}" if "measured_bytes" in row else ""
        figures = f"{measured} | {'unknown' if 'unknown' in row else 'failed'} | |"
        if "error_percent" in row:
            figures = (
                f"{row['measured_bytes']:,} | {row['predicted_bytes']:,} | {row['error_percent']:+.2f} % |"
            )
        without = row.get("error_percent_without_onednn")
        figures += f" {without:+.2f} % |" if without is not None else " |"
        lines.append(f"| {model} ({kind}) | {setting} | {figures}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
