"""Build the documentation site: hooks of mkdocs that generate the reference pages from the program.

    mkdocs build --strict

``mkdocs.yml`` names this file. The pages exist only in the site: commands from their parsers, the keys of a
recipe and the GPUs from the records and the catalogue, documents from their schemas, known failures from
their table. Files for contributors become pages, and links to files outside of ``docs`` become plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "stability.md": "STABILITY.md",
    "contributing.md": "CONTRIBUTING.md",
}
"""Page of the site to the file of the repository that it shows."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository into their names; the site does not contain these files."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = match["target"].partition("#")[0]
        if not target or "://" in target:
            return match[0]
        goal = (here / target).resolve()
        if goal.is_relative_to(ROOT / "docs") or not goal.exists():
            return match[0]
        if goal.name.endswith(".schema.json"):
            up = "../" * page.file.src_uri.count("/")
            name = goal.name.removesuffix(".schema.json")
            return f"[{match['label']}]({up}reference/documents.md#{name})"
        name = goal.relative_to(ROOT).as_posix()
        return match["label"] if match["label"].startswith("`") else f"{match['label']} (`{name}`)"

    return re.sub(r"(?<!!)\[(?P<label>[^\]]*)\]\((?P<target>[^)\s]+)\)", link, markdown)


def generated() -> dict[str, str]:
    """Return the generated pages, by their path in the site."""
    pages = {
        "reference/commands.md": "\n".join(commands()),
        "reference/recipe-keys.md": "\n".join(recipe_keys()),
        "reference/gpus.md": "\n".join(gpus()),
        "reference/documents.md": "\n".join(documents()),
        "reference/failures.md": failures(),
    }
    root = {page: (ROOT / file).read_text(encoding="utf-8") for page, file in ROOT_PAGES.items()}
    return pages | {page: _from_the_root(text) for page, text in root.items()}


def _from_the_root(text: str) -> str:
    """Return the text of a file at the root with links as the pages of the site have them."""
    names = {file: page for page, file in ROOT_PAGES.items()}

    def link(match: re.Match[str]) -> str:
        target = match[2]
        if target in names:
            return f"[{match[1]}]({names[target]})"
        if target.startswith("docs/"):
            return f"[{match[1]}]({target.removeprefix('docs/')})"
        return match[0] if "://" in target else match[1]

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, text)


def _opening(title: str, reader: str, source: str) -> str:
    return f"# {title}\n\nThis page is for {reader}. It is generated from the {source}.\n"


def commands() -> Iterator[str]:
    """Yield the lines of the page of commands, from the parsers themselves."""
    from fsdptool.cli.app import build_app

    root: Any = typer.main.get_command(build_app())
    yield _opening("Commands", "anyone who looks up an option", "program")
    for name, command in sorted(root.commands.items()):
        yield from _command(f"fsdptool {name}", command, 2)


def _command(path: str, command: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {path}\n\n{_cell(command.help or '')}\n"
    positional = [item for item in command.params if item.param_type_name == "argument"]
    arguments = [item.metavar or item.name.upper() for item in positional]
    yield f"```\n{' '.join([path, *arguments, '[OPTIONS]'])}\n```\n"
    options = [item for item in command.params if item.param_type_name == "option" and not item.hidden]
    if options:
        yield "| option | meaning |\n|---|---|"
        for option in options:
            names = ", ".join(f"`{text}`" for text in (*option.opts, *option.secondary_opts))
            yield f"| {names} | {_meaning(option)} |"
        yield ""
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _command(f"{path} {name}", child, level + 1)


def _meaning(option: Any) -> str:
    """Return the help of an option, with the choices that its type names."""
    annotation = option.type_descriptor.annotation
    if not (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return _cell(option.help or "")
    choices = ", ".join(f"`{member.value}`" for member in annotation)
    return f"{_cell(option.help or '')} One of {choices}."


def recipe_keys() -> Iterator[str]:
    """Yield the lines of the page of a recipe's keys, from its schema."""
    schema = _schema("recipe")
    yield _opening("Keys of a recipe", "anyone who writes a recipe", "schema")
    yield "| key | values | default | meaning |\n|---|---|---|---|"
    yield from _keys(schema, schema, "")


def _keys(schema: Any, root: Any, prefix: str) -> Iterator[str]:
    for name, item in schema.get("properties", {}).items():
        entry = _resolve(item, root)
        key = f"{prefix}{name}"
        default = f"`{json.dumps(entry['default'])}`" if "default" in entry else ""
        yield f"| `{key}` | {_values(entry, root)} | {default} | {_cell(entry.get('description', ''))} |"
        for part in (entry, *(_resolve(part, root) for part in entry.get("anyOf", ()))):
            yield from _keys(part, root, f"{key}.")


def _resolve(item: Any, root: Any) -> Any:
    while "$ref" in item:
        found: Any = root
        for part in item["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        item = {**found, **{key: value for key, value in item.items() if key != "$ref"}}
    return item


def _values(entry: Any, root: Any) -> str:
    if "enum" in entry:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in entry["enum"])
    if "const" in entry:
        return f"`{entry['const']}`"
    if "anyOf" in entry:
        return " or ".join(dict.fromkeys(_values(_resolve(part, root), root) for part in entry["anyOf"]))
    kind = entry.get("type", "any value")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def gpus() -> Iterator[str]:
    """Yield the lines of the page of GPUs, from the catalogue."""
    path = ROOT / "fsdptool" / "planning" / "data" / "gpus.json"
    catalogue = json.loads(path.read_text(encoding="utf-8"))
    yield _opening("GPUs", "anyone who names a GPU with `--gpu`", "catalogue")
    yield "Rates are peaks of dense products from data sheets. Memory is torch's `total_memory`.\n"
    yield "| name | memory | bf16 TFLOP/s | memory TB/s | link | link GB/s |\n|---|--:|--:|--:|---|--:|"
    for gpu in catalogue["gpus"]:
        flops = gpu["flops"].get("bfloat16")
        rate = f"{flops / 1e12:.0f}" if flops else ""
        yield (
            f"| {gpu['name']} | {gpu['memory_bytes'] / 2**30:.1f} GiB | {rate} |"
            f" {gpu['memory_bandwidth'] / 1e12:.2f} | {gpu['link']} | {gpu['link_bandwidth'] / 1e9:.0f} |"
        )


def documents() -> Iterator[str]:
    """Yield the lines of the page of JSON documents, from their schemas."""
    yield _opening("JSON documents", "authors of scripts that read answers", "schemas")
    yield "`fsdptool schema NAME` prints a schema. [Stability](../stability.md) says what may change.\n"
    for path in sorted((ROOT / "schemas").glob("*.json")):
        name = path.name.removesuffix(".schema.json")
        schema = _schema(name)
        yield f"## {name}\n\n{_cell(schema.get('description', schema.get('title', '')))}\n"
        if schema.get("properties"):
            yield "| key | type | meaning |\n|---|---|---|"
            for key, item in schema["properties"].items():
                entry = _resolve(item, schema)
                yield f"| `{key}` | {_values(entry, schema)} | {_cell(entry.get('description', ''))} |"
            yield ""


def failures() -> str:
    """Return the page of known failures of runs."""
    from fsdptool.report.rules import signatures_table
    from fsdptool.rules import signatures

    table = signatures_table(signatures())
    return (
        f"{_opening('Known failures', 'anyone who looks for the message of a failed run', 'table')}\n{table}"
    )


def _schema(name: str) -> Any:
    return json.loads((ROOT / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
