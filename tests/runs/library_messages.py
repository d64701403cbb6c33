"""The messages that the installed libraries raise and warn of where FSDP is set up, run, saved and loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FILES: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "distributed/fsdp/*.py",
        "distributed/fsdp/_fully_shard/*.py",
        "distributed/_composable/*.py",
        "distributed/checkpoint/*.py",
        "distributed/device_mesh.py",
    ),
    "accelerate": (
        "accelerator.py",
        "state.py",
        "parallelism_config.py",
        "commands/launch.py",
        "commands/config/config_args.py",
        "utils/fsdp_utils.py",
        "utils/launch.py",
        "utils/dataclasses.py",
    ),
    "transformers": ("integrations/fsdp.py", "distributed/*.py", "trainer.py", "training_args.py"),
    "peft": ("utils/*.py", "tuners/lora/*.py"),
}
"""Where each library deals with FSDP."""

PARTS: tuple[str, ...] = (
    "accelerate/accelerator.py",
    "accelerate/state.py",
    "accelerate/utils/dataclasses.py",
)
PARTS += ("transformers/trainer.py", "transformers/training_args.py", "peft/")
"""Of files that deal with everything, the classes or functions that deal with FSDP or parallelism."""

_ABOUT = (
    "fsdp",
    "fullysharded",
    "parallelismconfig",
    "parallelism_config",
    "tensorparallel",
    "contextparallel",
    "context parallel",
    "tensor parallel",
    "sequenceparallel",
    "no valid checkpoint",
    "valid checkpoint at",
)
_SAID = ("warning", "warn", "error", "critical", "exception", "warning_once")


@dataclass(frozen=True)
class Message:
    """A message as it is written: ``{}`` stands for a value."""

    file: str
    line: int
    raised: bool
    text: str

    def filled(self, value: str) -> str:
        """Return the message with a value in every place."""
        return self.text.replace("{}", value)


class _Texts:
    """The texts of a file, those that it puts into variables first included."""

    def __init__(self, tree: ast.Module) -> None:
        self.named: dict[str, list[str]] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if text := self.of(value):
                    self.named.setdefault(name, []).append(text)

    def of(self, node: ast.expr | None) -> str | None:
        """Return the text an expression makes, ``{}`` for what is not literal; None without any literal."""
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=parts):
                return "".join(self._part(part) for part in parts)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                texts = self._value(left), self._value(right)
                return None if texts == (None, None) else "".join(text or "{}" for text in texts)
            case ast.BinOp(left=left, op=ast.Mod()):
                text = self.of(left)
                return text.replace("%s", "{}").replace("%d", "{}") if text is not None else None
            case ast.Call(func=ast.Attribute(value=value, attr="format")):
                return self.of(value)
            case ast.IfExp(body=body):
                return self.of(body)
        return None

    def _value(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return next(iter(self.named.get(node.id, ())), None)
        return self.of(node)

    def _part(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        named = self._value(node.value) if isinstance(node, ast.FormattedValue) else None
        return named if named is not None else "{}"

    def said(self, node: ast.expr) -> list[str]:
        """Return the texts that a message may have: all of those that its variable holds."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            node = node.func.value
        if isinstance(node, ast.Name):
            return self.named.get(node.id, [])
        text = self.of(node)
        return [text] if text is not None else []


def _spoken(node: ast.AST) -> tuple[ast.expr, bool] | None:
    """Return the expression of a message, and whether it is raised."""
    match node:
        case ast.Raise(exc=ast.Call(args=[first, *_])) | ast.Assert(msg=ast.expr() as first):
            return first, True
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in _SAID:
            return first, False
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="add"), args=[first]) if (
            "warnings" in name
        ):
            return first, False
    return None


def _parts(tree: ast.Module, source: str) -> Iterator[ast.AST]:
    """Yield the functions, and the classes as a whole where their name says so, that deal with FSDP."""
    lines = source.lower().splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if any(word in body for word in _ABOUT):
                yield node
        elif isinstance(node, ast.ClassDef) and any(word in node.name.lower() for word in _ABOUT):
            yield node


def _in_file(path: Path, name: str) -> Iterator[Message]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    texts = _Texts(tree)
    parts = _parts(tree, source) if any(part in name for part in PARTS) else [tree]
    for node in (inner for part in parts for inner in ast.walk(part)):
        if (spoken := _spoken(node)) is None:
            continue
        for text in texts.said(spoken[0]):
            # Without a word of its own it says nothing that could be recognised.
            if len(text.replace("{}", "").split()) > 1:
                yield Message(name, getattr(node, "lineno", 0), spoken[1], text)


@cache
def library_messages() -> tuple[Message, ...]:
    """Return every message of the files, each text of a file once."""
    found: dict[tuple[str, str], Message] = {}
    for package, patterns in FILES.items():
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
            name = f"{package}/{path.relative_to(root).as_posix()}"
            for message in _in_file(path, name):
                found.setdefault((name, message.text), message)
    return tuple(found.values())
