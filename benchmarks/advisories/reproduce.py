"""Run each reproduction of an advisory with an affected release and with one that does not have the bug.

``python benchmarks/advisories/reproduce.py [--only ADVISORY ...] [--packages FOLDER]``

A case runs in fresh processes, one for each gloo rank. Releases are installed without their dependencies,
each into a folder of its own, and stand in front of the other libraries of this interpreter. Writes
``benchmarks/results/advisories.json``; with ``--only``, other rows of the file stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from subprocess import PIPE
from typing import Any

import of_accelerate  # noqa: F401  (each module registers its cases)
import of_others  # noqa: F401
from reproductions import CASES, Case

RESULTS = Path(__file__).resolve().parents[1] / "results" / "advisories.json"
LIBRARIES = ("torch", "accelerate", "transformers", "peft", "trl", "datasets", "bitsandbytes")
LIMIT_SECONDS = 300


def folder_of(name: str, version: str, packages: Path) -> Path:
    """Return the folder of a release, which is installed unless it is there."""
    folder = packages / f"{name}-{version}"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"{name}=={version}"], check=True)
    return folder


def outcome(advisory: str, case: Case, pins: Mapping[str, str], packages: Path) -> tuple[bool | None, str]:
    """Return whether the effect is seen on any rank, and the text about it; None where the case fails."""
    path = os.pathsep.join(str(folder_of(name, version, packages)) for name, version in pins.items())
    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(case.ranks)}
        shared |= {"STORE": f"{folder}/store", "TMPDIR": folder, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--case", advisory]
        ranks = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}, text=True, stdout=PIPE, stderr=PIPE)
            for rank in range(case.ranks)
        ]
        found = []
        for process in ranks:
            try:
                written, errors = process.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return None, f"not finished after {LIMIT_SECONDS} seconds"
            if process.returncode:
                return None, errors.strip().splitlines()[-1][:300] if errors.strip() else "no message"
            found.append(json.loads(written.splitlines()[-1])["seen"])
    seen = next((item for item in found if item), False)
    # Folders of this run say nothing about the bug.
    return bool(seen), seen.replace(folder, "FOLDER") if isinstance(seen, str) else ""


def row(advisory: str, case: Case, packages: Path) -> dict[str, Any]:
    """Return what both sides of a case show."""
    looked_at = " ".join((case.show.__doc__ or "").split())
    made: dict[str, Any] = {"advisory": advisory, "looked_at": looked_at, "ranks": case.ranks}
    for side, pins in (("affected", case.affected), ("other", case.other)):
        if pins is None:
            made[side] = None
            continue
        seen, text = outcome(advisory, case, pins, packages)
        made[side] = {"versions": dict(pins), "seen": seen, "text": text}
        print(f"{advisory}: {side} {pins}: {seen} {text}", flush=True)
    return made


def main() -> None:
    """Run the cases and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="ADVISORY")
    parser.add_argument("--packages", type=Path, default=Path(tempfile.gettempdir()) / "advisory-packages")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps({"seen": CASES[given.case].show()}), flush=True)
        os._exit(0)  # what the libraries do on leaving is not looked at
    kept = json.loads(RESULTS.read_text())["rows"] if given.only and RESULTS.exists() else []
    rows = {item["advisory"]: item for item in kept}
    for advisory in given.only or sorted(CASES):
        rows[advisory] = row(advisory, CASES[advisory], given.packages)
        both = sum(_is_shown(item) for item in rows.values())
        document = {
            "installed": {name: metadata.version(name) for name in LIBRARIES},
            "seen_on_both_sides": both,
            "rows": [rows[name] for name in sorted(rows)],
        }
        RESULTS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"{both} of {len(rows)} advisories are seen with the affected release and not with the other one")


def _is_shown(made: Mapping[str, Any]) -> bool:
    return made["affected"]["seen"] is True and made["other"] is not None and made["other"]["seen"] is False


if __name__ == "__main__":
    main()
