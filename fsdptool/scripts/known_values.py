"""What operations on values that a script knows yield: comparisons, texts, numbers, files of settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from fsdptool.scripts.calls import OF_ENVIRONMENT
from fsdptool.scripts.names import KNOWN, library
from fsdptool.scripts.signatures import RENAMED
from fsdptool.scripts.values import (
    Const,
    Items,
    Library,
    Table,
    Thing,
    Value,
    constant,
    is_constant,
    made_by,
    origins,
)

BF16 = ("torch.cuda.is_bf16_supported", "unsloth.is_bfloat16_supported", "unsloth.is_bf16_supported")
"""Functions that say whether a GPU computes in bfloat16."""
_ACCELERATORS = ("TPU", "XLA", "HPU", "MULTI_HPU", "NPU", "MULTI_NPU", "MULTI_CPU", "MULTI_XPU")
"""Members of accelerate's ``DistributedType`` that a run on GPUs does not have."""
_OF_TEXT = frozenset({
    "lower", "upper", "strip", "lstrip", "rstrip", "split", "rsplit", "startswith", "endswith", "isdigit",
    "removeprefix", "removesuffix",
})  # fmt: skip
"""Methods of a text that are followed: none of them makes it longer."""
_ASKED = ("inspect.signature", "inspect.getfullargspec", "dataclasses.fields")
_TAKE_OUT = frozenset({"discard", "remove", "pop", "clear", "difference_update", "intersection_update"})
_FIELDS = re.compile(r"\.(?:__dataclass_fields__|__annotations__|model_fields|__init__\.__code__)\b.*")
"""How a script asks for the arguments that a call of the installed version takes."""
LONGEST = 10_000
"""Characters of a text beyond which it is not followed."""
_DEEPEST = 20


def given_by(value: object, label: str, node: ast.AST | None) -> Const:
    """Return a constant that an argument is."""
    return Const(value, sources=(Thing("option", label=label, node=node),))


def asks_for_bf16(node: ast.expr) -> bool:
    """Say whether an expression asks whether the GPU computes in bfloat16."""
    names = tuple(name.rpartition(".")[2] for name in BF16)
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(names)


def asked_of(value: Value) -> str | None:
    """Return what of a library a script asked the arguments of to get a value, or None."""
    for item in origins(value):
        if isinstance(item, Thing) and not _is_plain(item):
            return None
        thing = made_by(item, *_ASKED)
        asked = thing.args[0] if thing is not None and thing.args else item
        if isinstance(asked, Library) and (thing is not None or _FIELDS.search(asked.name)):
            return _FIELDS.sub("", asked.name).removesuffix(".__init__")
    return None


def _is_plain(thing: Thing) -> bool:
    """Say whether a value holds all the arguments that were asked for: none is taken out of them."""
    if thing.kind == "comprehension":
        return not any(one.ifs for one in getattr(thing.node, "generators", ()))
    passed = thing.kind != "result" or thing.label in ("keys", "values", "items", "copy")
    return passed and thing.kind not in ("binary", "unknown") and not thing.seen & _TAKE_OUT


def _takes(name: object, right: Value) -> bool | None:
    """Say whether a call takes an argument; None where a script asks something else.

    A script asks so that it runs with several versions: only names that got a new one are not taken.
    """
    difference = made_by(right, "binary")
    if difference is not None and difference.label == "Sub":  # ``set(...) - {"self"}``
        without = difference.args[1]
        given = [constant(item) for item in without.values] if isinstance(without, Items) else [None]
        if None in given or name in given:
            return None if None in given else False
        right = difference.args[0]
    if not isinstance(name, str) or (asked := asked_of(right)) is None:
        return None
    return name not in RENAMED.get(asked.rpartition(".")[2], {})


def path_of(value: Value | None, depth: int = 0) -> str | None:
    """Return the path of a file that a script opens or reads, where it is made of constants."""
    if isinstance(value, Const):
        return value.value if isinstance(value.value, str) else None
    if not isinstance(value, Thing) or depth > _DEEPEST:
        return None
    parts: Sequence[Value] = value.args[:1] if value.kind in ("builtins.open", "io.open") else ()
    if value.kind in ("pathlib.Path", "os.path.join") or (value.kind, value.label) == ("binary", "Div"):
        parts = value.args
    elif value.kind == "unknown":  # ``with open(...) as file``
        parts = value.sources[:1]
    elif value.kind == "result" and value.label in ("open", "read", "read_text", "read_bytes"):
        parts = (value.inner,) if value.inner is not None else ()
    paths = [path_of(part, depth + 1) for part in parts]
    known = [path for path in paths if path is not None]
    return "/".join(known) if known and len(known) == len(paths) else None


def as_value(data: object, label: str, node: ast.AST, depth: int = 0) -> Value:
    """Return plain data of a file as what a script computes."""
    if isinstance(data, dict) and depth < _DEEPEST:
        items: dict[object, Value] = {
            key: as_value(item, f"{label}: {key}", node, depth + 1) for key, item in data.items()
        }
        return Table(items, dict.fromkeys(items, node))
    if isinstance(data, list) and depth < _DEEPEST:
        return Items([as_value(item, label, node, depth + 1) for item in data])
    return given_by(data, label, node)


def flags(words: Sequence[str]) -> tuple[dict[str, str | list[str]], list[str]]:
    """Return the flags of a command line with their values, and the other words."""
    flags: dict[str, str | list[str]] = {}
    positional: list[str] = []
    current: str | None = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            current = name.replace("-", "_")
            flags[current] = value if equals else "true"
            current = None if equals else current
        elif current is None:
            positional.append(word)
        elif flags[current] == "true":
            flags[current] = word
        else:
            before = flags[current]
            flags[current] = [*before, word] if isinstance(before, list) else [before, word]
    return flags, positional


def of_text(receiver: Value, name: str, args: Sequence[Value]) -> Value | None:
    """Return what a method of a known text yields, or None."""
    text, given = constant(receiver), [item.value for item in args if isinstance(item, Const)]
    if not isinstance(text, str) or name not in _OF_TEXT or len(given) < len(args) or len(text) > LONGEST:
        return None
    try:
        made = getattr(text, name)(*given)
    except (TypeError, ValueError):
        return None
    if isinstance(made, list):
        return Items([Const(item, sources=receiver.sources) for item in made], sources=receiver.sources)
    return Const(made, sources=receiver.sources)


def typed(word: str | list[str]) -> object:
    """Return the value of a word whose type nobody says."""
    if isinstance(word, list):
        return [typed(item) for item in word]
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if re.fullmatch(r"\[[^\[\]{}]*\]", word):  # fire and Hydra
        return [typed(item.strip(" '\"")) for item in word[1:-1].split(",") if item.strip()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return None if word == "None" else word


def guessed(word: str, declared: ast.AST) -> object:
    """Return the value of a field: text where its annotation says so."""
    annotation = ast.unparse(declared.annotation) if isinstance(declared, ast.AnnAssign) else ""
    return (
        word if "str" in annotation and not re.search(r"\b(?:int|float|bool)\b", annotation) else typed(word)
    )


def folded(operator: ast.operator, left: object, right: object) -> object:
    """Return a power, a shift or a remainder of two whole numbers of a usual size, or None."""
    if type(left) is not int or type(right) is not int or not 0 <= right < 64 or abs(left) > 1 << 32:
        return None
    if isinstance(operator, ast.Pow):
        return left**right
    if isinstance(operator, ast.LShift):
        return left << right
    return left % right if isinstance(operator, ast.Mod) and right else None


def launched(operator: ast.cmpop, left: Value, right: Value) -> bool | None:
    """Return the result of a comparison that asks whether a launcher started the script; it did."""
    if isinstance(right, Library) and right.name == "os.environ" and constant(left) in OF_ENVIRONMENT:
        return isinstance(operator, ast.In)
    if "rank" in left.tags and is_constant(right, -1) and isinstance(operator, ast.Eq | ast.NotEq):
        return isinstance(operator, ast.NotEq)
    return None


def compared(operator: ast.cmpop, left: Value, right: Value) -> bool | None:
    """Return the result of a comparison of constants, or None."""
    if isinstance(operator, ast.In | ast.NotIn) and isinstance(left, Const):
        if isinstance(right, Items) and all(isinstance(item, Const) for item in right.values):
            held = left.value in [item.value for item in right.values if isinstance(item, Const)]
        elif isinstance(right, Const) and isinstance(right.value, str) and isinstance(left.value, str):
            held = left.value in right.value
        else:
            taken = _takes(left.value, right)
            if taken is None:
                return None
            held = taken
        return held == isinstance(operator, ast.In)
    if isinstance(left, Library) and isinstance(operator, ast.Is | ast.IsNot) and is_constant(right, None):
        # ``try: from peft import LoraConfig``, ``except ImportError: LoraConfig = None``
        last = left.name.rpartition(".")[2]  # no value of a library: ``torch.version.hip``
        named = last == left.name or (last[:1].isupper() and not last.isupper())
        return isinstance(operator, ast.IsNot) if named and library(left.name) in KNOWN else None
    if isinstance(right, Library) and isinstance(operator, ast.Eq | ast.NotEq):
        owner, _, member = right.name.rpartition(".")
        known = owner.endswith("DistributedType") and member in _ACCELERATORS
        return isinstance(operator, ast.NotEq) if known else None
    one, two = constant(left), constant(right)
    if isinstance(one, int | float) and isinstance(two, int | float):
        if isinstance(operator, ast.Gt):
            return one > two
        if isinstance(operator, ast.GtE):
            return one >= two
        if isinstance(operator, ast.Lt):
            return one < two
        if isinstance(operator, ast.LtE):
            return one <= two
    return None
