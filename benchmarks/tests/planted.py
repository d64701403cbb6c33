"""Plant the faults that tests were written against, and see whether the test that is named catches each.

``mutate.py`` plants any fault; these are the ones that a reading of torch's sources found in the product, put
back one at a time into a copy of the last commit. A test is run without a fault first: it has to pass.

Usage: python benchmarks/tests/planted.py [NUMBER or name ...] [--output FILE]

Without names all faults are planted; with some, the others keep their rows of the file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkout_copy import ROOT, copy_checkout, failing_test, replaced
from cuda_faults import FAULTS, PlantedFault

OUTPUT = ROOT / "benchmarks" / "results" / "planted-cuda.json"


def plant(fault: PlantedFault, folder: Path) -> str:
    """Plant a fault in a copy of the checkout.

    Returns:
        The test that failed.

    Raises:
        ValueError: The text to replace is not there, or several times; or no test failed.
    """
    path = folder / fault.module
    text = path.read_text(encoding="utf-8")
    if (count := text.count(fault.text)) != 1:
        raise ValueError(f"{fault.module} has the text {count} times: {fault.text!r}")
    with replaced(path, text.replace(fault.text, fault.replacement).encode()):
        failed = failing_test(folder, fault.test)
    if "::" not in failed:
        raise ValueError(f"no test failed: {failed or 'all passed'}")
    return failed


def main() -> None:
    """Plant the faults and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="subjects of the faults, e.g. 7 or 'fused loss'")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if options.names and options.output.exists():
        kept = json.loads(options.output.read_text(encoding="utf-8"))
        rows = {(row["subject"], row["fault"]): row for row in kept}
    passing: dict[tuple[str, ...], str] = {}
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy_checkout(folder)
        for fault in FAULTS:
            if options.names and fault.subject not in options.names:
                continue
            if fault.test not in passing:
                passing[fault.test] = failing_test(folder, fault.test)
            failed, wrong = "", f"fails without the fault: {passing[fault.test]}"
            if not passing[fault.test]:
                try:
                    failed, wrong = plant(fault, folder), ""
                except ValueError as error:
                    wrong = str(error)
            row = {**asdict(fault), "caught": bool(failed), "failed": failed}
            rows[fault.subject, fault.fault] = row
            print(f"{fault.subject}: {fault.fault}: {failed or wrong}", flush=True)
            known = [rows[key] for each in FAULTS if (key := (each.subject, each.fault)) in rows]
            options.output.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(row['caught'] for row in known)} of {len(FAULTS)} caught")


if __name__ == "__main__":
    main()
