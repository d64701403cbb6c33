"""Which keys each release of four programs has, and their defaults, read from the releases' own sources.

    python benchmarks/config/keys_by_version.py FOLDER [--write]

``pip download`` puts the releases into FOLDER (about 450 MB), where a second run finds them. Nothing of them
is imported: dataclasses, pydantic schemas, argument parsers and reads of ``fsdp_config`` are found in their
syntax trees. ``--write`` replaces ``fsdptool/config/keys_by_version.json``, from which fsdptool answers
``--target``. Otherwise the table is compared with that file, and a difference is exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "fsdptool" / "config" / "keys_by_version.json"
RELEASES = {
    "accelerate": "1.6.0 1.7.0 1.8.1 1.9.0 1.10.1 1.11.0 1.12.0 1.13.0 1.14.0 1.15.0",
    "transformers": "4.50.3 4.51.3 4.52.4 4.53.3 4.54.1 4.55.4 4.56.2 4.57.6 5.0.0 5.1.0 5.2.0 5.3.0 5.4.0"
    " 5.5.4 5.6.2 5.7.0 5.8.1 5.9.0 5.10.4 5.11.0 5.12.1 5.13.1 5.14.1 5.15.1 5.16.1 5.17.0 5.18.0 5.19.0"
    " 5.20.2 5.21.1 5.22.2 5.23.0 5.24.0",
    "trl": "0.18.2 0.19.1 0.20.0 0.21.0 0.22.2 0.23.1 0.24.0 0.25.1 0.26.2 0.27.2 0.28.0 0.29.1 1.0.0 1.1.0"
    " 1.2.0 1.3.0 1.4.0 1.5.1 1.6.0 1.7.1 1.8.0 1.9.2 1.10.0 1.11.0 1.12.0 1.13.0 1.14.2 1.15.0 1.16.0",
    "axolotl": "0.10.0 0.11.0 0.12.2 0.13.2 0.14.0 0.15.0 0.16.1 0.17.0 0.18.0 0.19.0 0.20.0 0.21.0",
}
"""The newest release of each minor version that pip can download."""
READ = {
    "accelerate": r"accelerate/(commands/(config/config_args|launch)|utils/dataclasses)\.py",
    "transformers": r"transformers/(training_args|trainer|trainer_utils|integrations/fsdp)\.py",
    "trl": r"trl/(trainer/\w+_config|scripts/utils|experimental/.*_config)\.py",
    "axolotl": r"(?:[^/]+/src/)?axolotl/(utils/schemas/.*|integrations/.*args)\.py",
}
CLASSES = {
    "accelerate": {"file": "ClusterConfig", "plugin": "FullyShardedDataParallelPlugin"},
    "transformers": {"arguments": "TrainingArguments"},
    "axolotl": {"arguments": "AxolotlInputConfig", "fsdp_config": "FSDPConfig"},
}
"""Group of keys to the class whose fields they are; TRL's configurations are found by their names."""
REQUIRED = {"required": True}

Keys = dict[str, dict[str, Any]]
"""Group to key to default, of one release."""


def download(package: str, version: str, folder: Path) -> Path:
    """Return the file of a release, which pip downloads where it is not there yet.

    Raises:
        SystemExit: pip cannot download it.
    """
    for _ in range(2):
        found = sorted(folder.glob(f"{package}-{version}*"))
        if found:
            return found[0]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        command += ["--ignore-requires-python"]  # nothing of a release is run
        subprocess.run([*command, f"{package}=={version}"], check=False)
    raise SystemExit(f"pip cannot download {package} {version}")


def sources(archive: Path, wanted: str) -> dict[str, ast.Module]:
    """Return the syntax trees of the modules whose path matches."""
    pattern = re.compile(wanted)
    texts: dict[str, bytes] = {}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as packed:
            texts = {name: packed.read(name) for name in packed.namelist() if pattern.fullmatch(name)}
    else:
        with tarfile.open(archive) as packed_tar:
            for member in packed_tar:
                taken = packed_tar.extractfile(member) if pattern.fullmatch(member.name) else None
                if taken is not None:
                    texts[member.name] = taken.read()
    return {name: ast.parse(text) for name, text in texts.items()}


def classes(trees: dict[str, ast.Module]) -> dict[str, ast.ClassDef]:
    """Return every class by its name."""
    return {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def fields(name: str, known: dict[str, ast.ClassDef]) -> dict[str, Any]:
    """Return the annotated fields of a class and its bases with their defaults, as Python resolves them."""
    found: dict[str, Any] = {}
    for base in reversed(known[name].bases):
        inner = base.id if isinstance(base, ast.Name) else None
        if inner in known:
            found |= fields(inner, known)
    for node in known[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation)
            if node.target.id.startswith("_") or node.target.id == "model_config" or "ClassVar" in annotation:
                continue
            found[node.target.id] = default(node.value)
    return found


def default(value: ast.expr | None) -> Any:
    """Return a default that is a literal; another expression as ``{"code": text}``."""
    if value is None:
        return REQUIRED
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("field", "Field"):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in given:
            return default(given["default"])
        if "default_factory" in given:
            factory = given["default_factory"]
            if isinstance(factory, ast.Lambda):
                return default(factory.body)
            if ast.unparse(factory) in ("list", "dict"):
                return [] if ast.unparse(factory) == "list" else {}
            return {"code": f"{ast.unparse(factory)}()"}
        return default(value.args[0]) if value.args else REQUIRED
    try:
        literal = ast.literal_eval(value)
        return json.loads(json.dumps(literal))
    except (ValueError, TypeError):
        return {"code": ast.unparse(value)}


def flags(tree: ast.Module) -> dict[str, Any]:
    """Return the long options that ``add_argument`` calls declare, with their defaults."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "add_argument":
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        action = given.get("action")
        switched = isinstance(action, ast.Constant) and action.value == "store_true"
        for word in node.args:
            if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                name = str(word.value)[2:].replace("-", "_")
                found[name] = default(given["default"]) if "default" in given else False if switched else None
    return found


def variables(node: ast.AST, prefix: str) -> Iterator[str]:
    """Yield the names of variables that are read below ``os.environ``, without their prefix."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("environ.get"):
            continue
        name = call.args[0]
        if isinstance(name, ast.BinOp) and isinstance(name.right, ast.Constant):
            yield str(name.right.value)
        elif isinstance(name, ast.Constant) and str(name.value).startswith(prefix):
            yield str(name.value).removeprefix(prefix)


def reads_of(trees: dict[str, ast.Module], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys that are read of a mapping, with the default that ``get`` has for them."""
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                if node.func.attr in ("get", "pop") and ast.unparse(node.func.value).endswith(name):
                    for key in _words(node.args[0], tree):
                        yield key, default(node.args[1]) if len(node.args) > 1 else None
            elif (
                isinstance(node, ast.Compare)
                and isinstance(node.ops[0], ast.In)
                and isinstance(node.left, ast.Constant)
                and ast.unparse(node.comparators[0]).endswith(name)
            ):
                yield str(node.left.value), None


def _words(key: ast.expr, tree: ast.Module) -> list[str]:
    """Return the text of a key; of a loop's variable, the texts that the loop goes over."""
    if isinstance(key, ast.Constant):
        return [str(key.value)]
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and isinstance(node.iter, ast.List)]
    return [
        str(item.value)
        for loop in loops
        if isinstance(key, ast.Name)
        and ast.unparse(loop.target) == key.id
        and isinstance(loop.iter, ast.List)
        for item in loop.iter.elts
        if isinstance(item, ast.Constant) and key in list(ast.walk(loop))
    ]


def keys_of(package: str, trees: dict[str, ast.Module]) -> Keys:
    """Return the keys of a release, by group."""
    known = classes(trees)
    found: Keys = {
        group: fields(name, known) for group, name in CLASSES.get(package, {}).items() if name in known
    }
    if package == "accelerate":
        launch = next(tree for name, tree in trees.items() if name.endswith("commands/launch.py"))
        found["launch"] = flags(launch)
        plugin = known["FullyShardedDataParallelPlugin"]
        found["variables"] = {f"FSDP_{name}": None for name in variables(plugin, "FSDP_")}
    elif package == "transformers":
        read: dict[str, Any] = {}
        for key, value in reads_of(trees, "fsdp_config"):
            earlier = read.get(key)
            if earlier is not None and value is not None and value != earlier:
                value = {"code": f"{_code(earlier)} or {_code(value)}"}  # by the version of FSDP
            read[key] = earlier if value is None else value
        for inner in ("compute_dtype", "buffer_dtype"):  # of xla_fsdp_settings
            read.pop(inner, None)
        found["fsdp_config"] = read
    elif package == "trl":
        stable = classes({name: tree for name, tree in trees.items() if "/experimental/" not in name})
        for name in sorted(known):
            if re.fullmatch(r"[A-Z]\w*Config|ScriptArguments", name) and (own := fields(name, known)):
                found |= {name: own} if name in stable else {}
                if name not in stable:
                    found.setdefault("experimental", {}).update(dict.fromkeys(own))
    elif package == "axolotl":
        plugins = classes({name: tree for name, tree in trees.items() if "/integrations/" in name})
        found["integrations"] = dict.fromkeys(key for name in plugins for key in fields(name, known))
    return found


def _code(value: Any) -> str:
    return str(value["code"]) if isinstance(value, dict) and "code" in value else repr(value)


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def history(releases: dict[str, Keys]) -> tuple[dict[str, list[Any]], dict[str, dict[str, list[list[Any]]]]]:
    """Return the spans of groups that not every version has, and group to key to its spans.

    A span is ``[first, last]`` or ``[first, last, default]``. Null is the end of what is known: of all
    versions for a group, of the group for a key.
    """
    versions = list(releases)
    groups: dict[str, list[Any]] = {}
    table: dict[str, dict[str, list[list[Any]]]] = {}
    for group in dict.fromkeys(name for keys in releases.values() for name in keys):
        having = [version for version in versions if group in releases[version]]
        whole = _span(versions, versions.index(having[0]), versions.index(having[-1]))
        if whole != [None, None]:
            groups[group] = whole
        rows: dict[str, list[list[Any]]] = {}
        for place, version in enumerate(having):
            for key, value in releases[version][group].items():
                spans = rows.setdefault(key, [])
                if spans and spans[-1][1] == place - 1 and spans[-1][2] == value:
                    spans[-1][1] = place
                else:
                    spans.append([place, place, value])
        table[group] = {
            key: [[*_span(having, first, last), value] for first, last, value in spans]
            for key, spans in sorted(rows.items())
        }
    return groups, table


def _span(versions: list[str], first: int, last: int) -> list[str | None]:
    return [versions[first] if first else None, versions[last] if last < len(versions) - 1 else None]


def written(table: dict[str, Any]) -> str:
    """Return the table as JSON with a key on each line."""
    lines = ["{"]
    for package, entry in table.items():
        lines.append(f" {json.dumps(package)}: {{")
        lines.append(f'  "releases": {json.dumps(entry["releases"])},')
        lines.append(f'  "sources": {json.dumps(entry["sources"])},')
        lines.append(f'  "groups": {json.dumps(entry["groups"])},')
        lines.append('  "keys": {')
        for group, rows in entry["keys"].items():
            lines.append(f"   {json.dumps(group)}: {{")
            for key, spans in rows.items():
                lines.append(f"    {json.dumps(key)}: {json.dumps(spans, separators=(',', ':'))},")
            lines[-1] = lines[-1].removesuffix(",")
            lines.append("   },")
        lines[-1] = "   }"
        lines += ["  }", " },"]
    lines[-1] = " }"
    return "\n".join([*lines, "}"]) + "\n"


def main() -> int:
    """Read the releases; write the table, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    table: dict[str, Any] = {}
    for package, versions in RELEASES.items():
        releases = {}
        for version in versions.split():
            trees = sources(download(package, version, arguments.folder), READ[package])
            releases[minor(version)] = keys_of(package, trees)
        groups, keys = history(releases)
        table[package] = {
            "releases": versions.split(), "sources": READ[package], "groups": groups, "keys": keys,
        }  # fmt: skip
        rows = [spans for group in keys.values() for spans in group.values()]
        changed = sum(len(spans) > 1 or spans[0][:2] != [None, None] for spans in rows)
        print(
            f"{package}: {len(releases)} minor versions, {len(rows)} keys; {changed} differ between versions"
        )
    text = written(table)
    print(f"{len(text) / 1000:.0f} kB, {time.monotonic() - started:.0f} s")
    if arguments.write:
        TABLE.write_text(text, encoding="utf-8")
        return 0
    same = TABLE.is_file() and TABLE.read_text(encoding="utf-8") == text
    print("the table is up to date" if same else f"{TABLE.relative_to(ROOT)} differs")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
