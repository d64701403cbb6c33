"""Write the data and scripts of a wheel compactly: the sources stay readable, and the base stays small."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ADVISORIES = "fsdptool/advisories/entries"
FAILURES = "fsdptool/failures.json"
"""Entries whose examples only tests read."""

PACKED = (
    *(FAILURES, "fsdptool/config/keys_by_version.json"),
    "fsdptool/planning/data/",
    *("fsdptool_diffusion/data/", "fsdptool_language/data/", "fsdptool_vision/data/"),
)
"""What is read compressed, too (``PACKED`` of ``fsdptool.files.values``)."""
SCRIPTS = "fsdptool/web/static"
"""Scripts that the web interface sends as they are stored (``fsdptool.web.server``)."""


class CompactData(BuildHookInterface[Any]):
    """Write JSON of a wheel without indentation, in part compressed, and rules without examples."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compact files to what a wheel includes; an editable installation reads the sources."""
        if version == "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.root)
        sources = {path: path.relative_to(root).as_posix() for path in _data(root / "fsdptool")}
        sources |= {path: path.relative_to(root / "plugins").as_posix() for path in _data(root / "plugins")}
        # In one file each, because schemas, and advisories, resemble each other.
        schemas = {
            path.name.removesuffix(".schema.json"): json.loads(path.read_bytes())
            for path in _data(root / "schemas")
        }
        text = json.dumps(schemas, ensure_ascii=False, separators=(",", ":"))
        self._add(build_data, text.encode(), "fsdptool/schemas.json", packed=True)
        entries = [path for path, target in sources.items() if target.startswith(f"{ADVISORIES}/")]
        listed = ",".join(_compact(path, sources.pop(path)) for path in entries)
        self._add(build_data, f"[{listed}]".encode(), f"{ADVISORIES}.json", packed=True)
        for path, target in sources.items():
            self._add(build_data, _compact(path, target).encode(), target, packed=target.startswith(PACKED))
        for path in sorted((root / SCRIPTS).rglob("*.js")):
            self._add(build_data, path.read_bytes(), path.relative_to(root).as_posix(), packed=True)

    def _add(self, build_data: dict[str, Any], content: bytes, target: str, *, packed: bool) -> None:
        included = build_data["force_include"]
        compact = Path(self.folder.name) / str(len(included))
        # Without a time, so that equal sources give equal wheels.
        compact.write_bytes(gzip.compress(content, mtime=0) if packed else content)
        included[str(compact)] = f"{target}.gz" if packed else target

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compact files."""
        if version != "editable":
            self.folder.cleanup()


def _data(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.json*") if path.suffix in (".json", ".jsonl"))


def _compact(path: Path, target: str) -> str:
    text = path.read_text(encoding="utf-8")
    documents = [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    if target.startswith(ADVISORIES):
        del documents[0]["database_specific"]["examples"]
    if target == FAILURES:
        documents = [
            [{k: v for k, v in rule.items() if k not in ("examples", "others")} for rule in documents[0]]
        ]
    return "".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) + "\n" for item in documents)
