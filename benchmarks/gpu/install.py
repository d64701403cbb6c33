"""Make a checkout importable on a machine without network: carried wheels, and the entry points.

``python benchmarks/gpu/install.py SITE [WHEELS]``

Installs the wheels of the folder WHEELS into the folder SITE, and writes the metadata of the checkout there:
families and dialects are discovered by entry points, which a bare checkout does not have. Use it with
``PYTHONPATH=CHECKOUT:CHECKOUT/plugins:SITE``.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install(site: Path, wheels: Path | None) -> None:
    """Fill the folder ``site``.

    Args:
        site: Is created; metadata in it are replaced.
        wheels: A folder of wheels for this interpreter, or None.
    """
    site.mkdir(parents=True, exist_ok=True)
    files = sorted(wheels.glob("*.whl")) if wheels is not None else []
    if files:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        command += ["--no-compile", "--no-cache-dir", "--target", str(site), *map(str, files)]
        subprocess.run(command, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    install(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
