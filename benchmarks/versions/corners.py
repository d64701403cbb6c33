"""Install combinations of the libraries' versions, and run fsdptool's main commands on each.

``python benchmarks/versions/corners.py [--only NAME ...] [--keep FOLDER]``

Every corner gets a fresh environment by ``uv``, which is deleted afterwards; ``smoke.py`` runs in it. Builds
of torch from PyPI are about 4 GB each. Writes ``benchmarks/results/versions.json`` and the table in
``docs/reference/versions.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- versions: begin (benchmarks/versions/corners.py) -->", "<!-- versions: end -->"
LIBRARIES = ("torch", "accelerate", "transformers", "peft", "diffusers")
CORNERS: dict[str, tuple[str, ...]] = {
    "oldest": ("3.11", "2.8.0", "1.10.1", "4.57.6", "0.19.1", "0.39.0"),
    "second oldest": ("3.11", "2.9.1", "1.12.0", "5.10.4", "0.20.0", "0.40.0"),
    "oldest that trains": ("3.11", "2.10.0", "1.10.1", "5.10.4", "0.19.1", "0.39.0"),
    "old transformers": ("3.11", "2.11.0", "1.11.0", "4.57.6", "0.21.2", "0.39.0"),
    "middle, Python 3.12": ("3.12", "2.12.1", "1.13.0", "5.14.1", "0.20.0", "0.41.0"),
    "new, Python 3.13": ("3.13", "2.14.1", "1.14.0", "5.20.2", "0.21.2", "0.42.1"),
    "new torch, old libraries": ("3.11", "2.15.0", "1.10.1", "5.10.4", "0.19.1", "0.39.0"),
    "newest": ("3.11", "2.15.0", "1.15.0", "5.23.0", "0.21.2", "0.42.1"),
}
"""Python, then the versions of ``LIBRARIES``."""

OTHERS = (
    "datasets>=4", "safetensors", "typer", "rich", "jsonschema", "PyYAML", "filelock", "packaging", "psutil",
)  # fmt: skip


def install(versions: tuple[str, ...], folder: Path) -> Path:
    """Make the environment of a corner unless ``folder`` has it; return its interpreter."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "--quiet", "--python", versions[0], folder / "venv"], check=True)
        pins = [f"{name}=={version}" for name, version in zip(LIBRARIES, versions[1:], strict=True)]
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *pins, *OTHERS], check=True)
    return python


def run(name: str, folder: Path) -> dict[str, Any]:
    """Return what came of the commands on one corner."""
    python = install(CORNERS[name], folder)
    subprocess.run([python, ROOT / "benchmarks" / "gpu" / "install.py", folder / "site"], check=True)
    out = folder / "smoke.json"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}:{folder / 'site'}"}
    subprocess.run([python, Path(__file__).with_name("smoke.py"), out], env=environment, check=False)
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return document


def table(corners: dict[str, Any]) -> str:
    """Return the table of the page: one row for each corner, in the order of ``CORNERS``."""
    lines = [f"| Python | {' | '.join(LIBRARIES)} | detect, plan, emit-config | train |", "|---" * 8 + "|"]
    for name in CORNERS:
        if name not in corners:
            continue
        rows = corners[name]["rows"]
        failed = [title for title, row in rows.items() if not row["ok"] and not title.startswith("train")]
        train = next(row for title, row in rows.items() if title.startswith("train"))
        trained = "refused" if train.get("refused") else "yes" if train["ok"] else "no"
        versions = [corners[name]["python"], *(corners[name]["libraries"][item] for item in LIBRARIES)]
        worked = f"not {', '.join(failed)}" if failed else "yes"
        lines.append(f"| {' | '.join([*versions, worked, trained])} |")
    return "\n".join(lines)


def main() -> int:
    """Run the chosen corners and write the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=CORNERS, default=[], help="the others keep their results"
    )
    parser.add_argument("--keep", type=Path, help="keep the environments below this folder")
    options = parser.parse_args()
    corners = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in options.only or CORNERS:
        print(f"== {name}: {' '.join(CORNERS[name])}", flush=True)
        place = options.keep / name.replace(" ", "-") if options.keep else Path(tempfile.mkdtemp())
        try:
            corners[name] = run(name, place)
        finally:
            if not options.keep:
                shutil.rmtree(place)
        ordered = {key: corners[key] for key in CORNERS if key in corners}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(corners)}\n\n{END}{after}", encoding="utf-8")
    return 0 if all(row["ok"] for corner in corners.values() for row in corner["rows"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
