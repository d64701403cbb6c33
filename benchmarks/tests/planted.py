"""Plant the faults that tests were written against, and see whether the test that is named catches each.

    python benchmarks/tests/planted.py [NUMBER or name ...]

The faults are those that a reading of torch's sources found in the product: they would break, mislead or slow
down training on GPUs. ``benchmarks/results/planted-cuda.json`` has a row for each, in the order of the table
in ``docs/explanation/cuda.md``: its number there (or a name), what goes wrong, the file, the text that the
file has once, what replaces it, and the arguments of pytest. This script puts each fault back into a copy of
the last commit and fills in ``caught`` and the test that ``failed``. A test is run without a fault first: it
has to pass. What only a GPU can show has no fault here: how long copies, kernels and collectives take, NCCL's
own watchdog and communicators, and page-locked memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "planted-cuda.json"


def copy_checkout(folder: Path) -> None:
    """Put the last commit into a folder, so that faults are never planted in the checkout itself."""
    archive = folder / "checkout.tar"
    subprocess.run(["git", "-C", ROOT, "archive", "-o", archive, "HEAD"], check=True)
    with tarfile.open(archive) as stream:
        stream.extractall(folder, filter="data")


def failing_test(folder: Path, arguments: Sequence[str]) -> str:
    """Return the first test that failed in a copy of the checkout, ``timeout``, or an empty text if none did.

    A run without any test is one that failed unless ``-m`` left none.
    """
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'plugins'}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0 or (done.returncode == 5 and "-m" in arguments):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit status {done.returncode}"


def plant(row: Mapping[str, Any], folder: Path) -> str:
    """Plant a fault in a copy of the checkout; return the test that failed, or an empty text."""
    path = folder / row["module"]
    whole = path.read_text(encoding="utf-8")
    if (count := whole.count(row["text"])) != 1:
        raise ValueError(f"{row['module']} has the text {count} times: {row['text']!r}")
    path.write_text(whole.replace(row["text"], row["replacement"]), encoding="utf-8")
    failed = failing_test(folder, row["test"])
    path.write_text(whole, encoding="utf-8")
    return failed if "::" in failed else ""


def main() -> None:
    """Plant the faults and fill in the row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="subjects of the faults, e.g. 7 or 'fused loss'; default: all"
    )
    names = parser.parse_args().names
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy_checkout(folder)
        before = cache(lambda test: failing_test(folder, test))
        for row in rows:
            if names and row["subject"] not in names:
                continue
            if wrong := before(tuple(row["test"])):
                raise SystemExit(f"{row['test']} fails without a fault: {wrong}")
            failed = plant(row, folder)
            row |= {"caught": bool(failed), "failed": failed}
            print(f"{row['subject']}: {row['fault']}: {failed or 'not caught'}", flush=True)
            ROWS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(row['caught'] for row in rows)} of {len(rows)} caught")


if __name__ == "__main__":
    main()
