"""The table of keys by version beside the real classes of releases, and every known version on many files.

    python benchmarks/config/keys_against_releases.py PACKAGES [--files FOLDER] [-o OUT_JSON]

PACKAGES holds installed releases as folders ``NAME-VERSION`` (``pip install --no-deps --target``). Each one
is imported in a process of its own, before the libraries of this interpreter, and the fields of its classes
are compared with the table: names in both directions, and every default that is a plain value. ``--files``
reads each file of a folder for each version of the table: the result counts the findings and the crashes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from fsdptool.config import read_settings
from fsdptool.config.key_history import TABLE, default_of, has_key, known_versions

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {
    "accelerate": {
        "file": "accelerate.commands.config.config_args:ClusterConfig",
        "plugin": "accelerate.utils.dataclasses:FullyShardedDataParallelPlugin",
    },
    "transformers": {"arguments": "transformers.training_args:TrainingArguments"},
    "trl": {
        name: f"trl:{name}"
        for name in ("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "ModelConfig")
    },
    "axolotl": {
        "arguments": "axolotl.utils.schemas.config:AxolotlInputConfig",
        "fsdp_config": "axolotl.utils.schemas.fsdp:FSDPConfig",
    },
}
_OLDER = ("huggingface_hub-0.36.2", "tokenizers-0.22.1")
_OLD = ("huggingface_hub-1.5.0", "tokenizers-0.22.1", "httpx-0.28.1", "httpcore-1.0.9")
RELEASES: dict[str, tuple[str, ...]] = {
    **{f"accelerate-1.{minor}": () for minor in ("6.0", "9.0", "10.1", "12.0", "13.0", "14.0", "15.0")},
    "transformers-4.57.6": _OLDER,
    **{f"transformers-5.{minor}": _OLD for minor in ("0.0", "3.0", "9.0")},
    "transformers-5.23.0": (),
    **{f"trl-{version}": () for version in ("0.29.1", "1.0.0", "1.8.0", "1.16.0")},
    **{f"axolotl-{version}": () for version in ("0.13.2", "0.19.0")},
}
"""Releases that are imported, with the packages that they need in other versions than this interpreter's."""
PROBE = """
import dataclasses, enum, importlib, json, sys
found = {}
for group, place in json.loads(sys.argv[1]).items():
    module, _, name = place.partition(":")
    real = getattr(importlib.import_module(module), name)
    schema = hasattr(real, "model_fields")
    fields = real.model_fields if schema else {f.name: f for f in dataclasses.fields(real)}
    base = {}
    for parent in real.__mro__[1:]:
        if parent.__name__ == "TrainingArguments" and name != "TrainingArguments":
            base = {f.name: f.default for f in dataclasses.fields(parent)}
    rows = {}
    for key, field in fields.items():
        if key.startswith("_") or base.get(key, base) == field.default:
            continue
        value = field.default
        plain = value is None or type(value) in (bool, int, float, str)
        rows[key] = [value] if plain else []
    found[group] = rows
print(json.dumps(found))
"""


def real_fields(folders: list[Path], package: str) -> dict[str, dict[str, list[Any]]]:
    """Return the fields of a release's classes, each with its default if that is a plain value.

    Raises:
        RuntimeError: The release cannot be imported beside the libraries of this interpreter.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(CLASSES[package])],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "TRANSFORMERS_VERBOSITY": "error",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1][:200])
    found: dict[str, dict[str, list[Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(package: str, version: str, real: dict[str, dict[str, list[Any]]]) -> dict[str, Any]:
    """Return the counts of keys and defaults that were compared, and every difference."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))[package]["keys"]
    keys = defaults = 0
    differences: list[str] = []
    for group, rows in real.items():
        here = {key for key in table[group] if has_key(package, (group,), key, version)}
        differences += [f"{group}.{key}: only in the release" for key in sorted(rows.keys() - here)]
        missing = here - rows.keys()
        if package == "trl":  # a field that repeats the default of TrainingArguments
            missing = {key for key in missing if not has_key("transformers", ("arguments",), key, "5.23")}
        differences += [f"{group}.{key}: only in the table" for key in sorted(missing)]
        for key in sorted(rows.keys() & here):
            keys += 1
            expected = default_of(package, group, key, version)
            if rows[key] and not isinstance(expected, dict):
                defaults += 1
                if rows[key] != [expected]:
                    differences.append(
                        f"{group}.{key}: {rows[key][0]!r} in the release, {expected!r} in the table"
                    )
    return {"keys": keys, "defaults": defaults, "differences": differences}


def sweep(folder: Path) -> dict[str, Any]:
    """Return what reading each file for each known version gives."""
    paths = sorted(
        path for path in folder.iterdir() if path.suffix in (".yaml", ".yml", ".json", ".toml", ".sh")
    )
    rows: dict[str, Any] = {"files": len(paths), "crashes": [], "new_or_removed_keys": {}}
    for package in CLASSES:
        for version in known_versions(package):
            codes: Counter[str] = Counter()
            for path in paths:
                try:
                    reading = read_settings(path, target=f"{package}=={version}", environment={})
                except Exception as error:
                    rows["crashes"].append(f"{path.name} for {package} {version}: {type(error).__name__}")
                    continue
                codes.update(item.code for item in reading.diagnostics)
            rows["crashes"] += [f"internal error for {package} {version}"] * codes["FSD101"]
            rows["new_or_removed_keys"][f"{package} {version}"] = codes["FSD344"]
            if codes["FSD354"]:
                rows["crashes"].append(f"{package} {version} is not known")
    return rows


def main() -> int:
    """Compare, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", type=Path)
    parser.add_argument("--files", type=Path)
    parser.add_argument("-o", type=Path, default=ROOT / "benchmarks" / "results" / "keys_by_version.json")
    arguments = parser.parse_args()
    started = time.monotonic()
    rows: dict[str, Any] = {}
    for name, beside in RELEASES.items():
        package, _, version = name.partition("-")
        folders = [arguments.packages / folder for folder in (name, *beside)]
        try:
            rows[f"{package} {version}"] = compare(package, version, real_fields(folders, package))
        except RuntimeError as error:
            rows[f"{package} {version}"] = {"not_imported": str(error)}
        print(name, rows[f"{package} {version}"], flush=True)
    document: dict[str, Any] = {
        "command": "python benchmarks/config/keys_against_releases.py PACKAGES --files FOLDER",
        "beside": {name: installed(name) for name in ("torch", "accelerate", "transformers")},
        "releases": rows,
    }
    if arguments.files is not None:
        document["files"] = sweep(arguments.files)
        print(document["files"]["files"], "files;", len(document["files"]["crashes"]), "crashes")
    document["seconds"] = round(time.monotonic() - started)
    arguments.o.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    bad = [name for name, row in rows.items() if row.get("differences")]
    return 1 if bad or document.get("files", {}).get("crashes") else 0


if __name__ == "__main__":
    raise SystemExit(main())
