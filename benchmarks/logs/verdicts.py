"""How well ``fsdptool diagnose`` answers logs of real failures, by kind of failure.

    python benchmarks/logs/verdicts.py FOLDER [--write benchmarks/results/logs-verdicts.json] [--show]

FOLDER holds logs and an ``index.jsonl`` with, for each log, regular expressions (case ignored) on what the
answer says of causes: all of ``must_say`` have to match, none of ``must_not_say`` may.

- right: so it is;
- general: a cause is named, and something of ``must_say`` is missing;
- misleading: something of ``must_not_say`` is said;
- nothing: no cause is named, at most an exception is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from fsdptool.records.diagnosis import FailureDiagnosis
from fsdptool.report.console.runs import print_diagnosis
from fsdptool.rules import signatures
from fsdptool.runs.diagnose import diagnose

VERDICTS = ("right", "general", "misleading", "nothing")


def said_of_causes(answer: FailureDiagnosis) -> str:
    """Return what the command prints, without consequences and sources."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        print_diagnosis(answer)
    lines = stream.getvalue().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("consequence: ", "  more: ")))


def faults(answer: FailureDiagnosis, entry: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what the answer lacks, and what it should not say."""
    said = said_of_causes(answer)
    missing = [pattern for pattern in entry["must_say"] if not re.search(pattern, said, re.IGNORECASE)]
    wrong = [pattern for pattern in entry["must_not_say"] if re.search(pattern, said, re.IGNORECASE)]
    return missing, wrong


def verdict(answer: FailureDiagnosis, entry: dict[str, Any]) -> str:
    """Return one of :data:`VERDICTS`."""
    missing, wrong = faults(answer, entry)
    if wrong:
        return "misleading"
    if not missing:
        return "right"
    return "general" if any(not item.consequence for item in answer.failures) else "nothing"


def main() -> None:
    """Print the table, and write it if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path, help="a JSON file for the table")
    parser.add_argument("--show", action="store_true", help="say what is wrong with each log")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    for line in (options.folder / "index.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        answer = diagnose(options.folder / entry["log"])
        found = verdict(answer, entry)
        counts.setdefault(entry["kind"], Counter())[found] += 1
        if options.show and found != "right":
            missing, wrong = faults(answer, entry)
            codes = [item.code for item in answer.failures if not item.consequence]
            print(f"{entry['id']}: {found} {codes}; lacks {missing}; says {wrong}")
    total = sum(counts.values(), Counter())
    kinds = sorted(counts, key=lambda kind: (-counts[kind].total(), kind))
    print(f"{'kind':<34} logs  " + "  ".join(f"{name:>10}" for name in VERDICTS))
    for name, row in [*((kind, counts[kind]) for kind in kinds), ("all", total)]:
        print(f"{name:<34} {row.total():>4}  " + "  ".join(f"{row[each]:>10}" for each in VERDICTS))
    if options.write:
        table = {kind: {each: counts[kind][each] for each in VERDICTS} for kind in kinds}
        document = {
            "signatures": len(signatures()),
            "logs": total.total(),
            "all": {each: total[each] for each in VERDICTS},
            "kinds": table,
        }
        options.write.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
