"""Help, messages and documentation are plain technical English: idioms that were written once stay out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from fsdptool.cli.app import build_app

ROOT = Path(__file__).parents[2]

IDIOMS = {
    r"(?<!\bthere )\b(?:is|are) no (?!longer\b|more than\b)\w+": "is not a ..., has no ..., does not ...",
    r"\bin all(?! \w)": "total, in total",
    r"\bas data\b": "say what the file contains",
    r"\bwhat bound\b|\bconstraint bound\b": "limiting factor, binding constraint",
    r"\bgets? no more\b": "is disabled for the rest of the run",
    r"\bcannot be had\b|\bcan be had\b": "is (not) supported, is (not) available",
    r"\ba person decides\b": "no automatic fix",
    r"\bbelongs? into\b": "belongs in",
    r"\bdearer\b": "more expensive",
    r"\b(?:derive|derived|made|make|begin|begins|start|starts) (?:\w+ )?(?:anew|afresh)\b": "recompute",
    r"\b(?:names|averages|carries|adapts|shards|means|says) nothing\b": "say what is required",
    r"\bas asked\b|\bwhat (?:is|was) asked\b|\bwhat you asked\b": "as requested, the requested configuration",
    r"\bwithout a word\b|\bin silence\b": "silently",
    r"\bsilent drops?\b": "dropped settings",
    r"\bmade-up\b": "synthetic, generated",
    r"\bthere is no (?:dtype|launcher|rule|such)\b": "... is not supported, unknown ...",
    r"\bgathered ahead\b": "prefetched",
    r"\bof one's own\b|\bof yours\b": "your own",
}
"""Pattern to what a technical writer puts instead. Matching ignores case."""
ANY = re.compile("|".join(f"(?:{pattern})" for pattern in IDIOMS), re.IGNORECASE)

PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/**/*.md",
        "plugins/*/*.md",
        "schemas/*.json",
        ".pre-commit-hooks.yaml",
    )
    for path in ROOT.glob(pattern)
)
MODULES = sorted(
    path
    for folder in ("fsdptool", "plugins", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "examples" / "third_party_family" / "build")
)


def name(path: Path) -> str:
    """Return a file's path in the repository."""
    return path.relative_to(ROOT).as_posix()


def idioms(text: str) -> list[str]:
    """Return the idioms in ``text``, each with what to write instead."""
    flat = " ".join(text.split())
    if not ANY.search(flat):
        return []
    return [
        f"{flat[max(match.start() - 30, 0) : match.end() + 20]!r}: write {instead}"
        for pattern, instead in IDIOMS.items()
        for match in re.finditer(pattern, flat, re.IGNORECASE)
    ]


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the string literals and docstrings of a module with their lines; ``{}`` stands for a value."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant | ast.JoinedStr)]
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(str(part) for part in parts)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module; the lines of one comment are read together."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            yield first, " ".join(block)
            block, first = [], token.start[0]
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    yield first, " ".join(block)


def test_pages_are_plain_english() -> None:
    assert len(PAGES) > 30
    found = {name(path): idioms(path.read_text(encoding="utf-8")) for path in PAGES}
    assert {page: texts for page, texts in found.items() if texts} == {}


def test_strings_and_comments_are_plain_english() -> None:
    assert len(MODULES) > 400
    found = []
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        texts = (*strings(source), *comments(source))
        found += [f"{name(path)}:{line}: {idiom}" for line, text in texts for idiom in idioms(text)]
    assert found == []


def helps(command: object, path: str = "fsdptool") -> Iterator[tuple[str, str]]:
    """Yield the help text of a command, its parameters and its subcommands, each with where it stands."""
    yield path, getattr(command, "help", None) or ""
    for parameter in getattr(command, "params", ()):
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for child, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{path} {child}")


HELPS = dict(helps(typer.main.get_command(build_app())))


def test_every_help_text_is_plain_english() -> None:
    assert len(HELPS) > 100
    assert not {where: bad for where, text in HELPS.items() if (bad := idioms(text))}


def test_every_option_has_a_help_text_that_is_a_sentence() -> None:
    said = {where: text for where, text in HELPS.items() if not where.endswith((" help", "_completion"))}
    assert not [where for where, text in said.items() if not text.strip()]
    # Examples are command lines.
    sentences = {where: text.partition("\n\nExamples:")[0].rstrip() for where, text in said.items()}
    assert not {where: text for where, text in sentences.items() if not text.endswith(".")}


@pytest.mark.parametrize(
    "text",
    [
        "RUN is no run folder",
        "12 GiB in all",
        "further GPUs, as data",
        "limits: what bound: time",
        "fix: none: a person decides",
    ],
)
def test_an_idiom_is_noticed(text: str) -> None:
    assert idioms(text)


@pytest.mark.parametrize(
    "text", ["there is no GPU", "is no longer read", "in all cases", "stored as datasets"]
)
def test_plain_english_is_left_alone(text: str) -> None:
    assert not idioms(text)
