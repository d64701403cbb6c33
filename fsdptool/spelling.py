"""Forgiving spellings: what a user wrote, as the one canonical value it can mean."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from fsdptool.errors import OptionError

_P = ParamSpec("_P")
_R = TypeVar("_R")

_TRUE = {"y", "yes", "t", "true", "on", "1", "enable", "enabled"}
_FALSE = {"n", "no", "f", "false", "off", "0", "disable", "disabled"}

STATE_DICT_TYPES = {
    "sharded": ("sharded_state_dict", "sharded", "shard", "dcp", "3"),
    "full": ("full_state_dict", "full", "1"),
    "local": ("local_state_dict", "local", "2"),
}
WRAP_POLICIES = {
    "transformer": (
        "transformer_based_wrap",
        "transformer",
        "transformer_based",
        "transformer_wrap",
        "transformer_auto_wrap",
        "transformer_auto_wrap_policy",
        "transformer_based_auto_wrap",
        "auto_wrap",
    ),
    "size": (
        "size_based_wrap",
        "size",
        "size_based",
        "size_wrap",
        "size_based_auto_wrap",
        "size_based_auto_wrap_policy",
    ),
    "none": ("no_wrap", "none", "no", "nowrap", "off", "false"),
}
STRATEGIES = {
    "full_shard": ("full_shard", "full", "1", "zero3", "shardingstrategy.full_shard"),
    "shard_grad_op": ("shard_grad_op", "grad_op", "2", "zero2", "shardingstrategy.shard_grad_op"),
    "no_shard": ("no_shard", "3", "shardingstrategy.no_shard"),
    "hybrid_shard": ("hybrid_shard", "hybrid", "4", "shardingstrategy.hybrid_shard"),
    "hybrid_shard_zero2": (
        "hybrid_shard_zero2",
        "_hybrid_shard_zero2",
        "5",
        "shardingstrategy._hybrid_shard_zero2",
    ),
}
PRECISIONS = {
    "no": ("no", "none", "fp32", "float32", "32", "false", "off"),
    "fp16": ("fp16", "float16", "16", "half"),
    "bf16": ("bf16", "bfloat16"),
    "fp8": ("fp8", "float8"),
}
ROTATIONS = {
    "allgather": ("allgather", "all_gather"),
    "alltoall": ("alltoall", "all_to_all", "a2a"),
}


def normal(text: object) -> str:
    """Return ``text`` in the form spellings are compared in: trimmed, lower case, underscores."""
    return str(text).strip().strip("'\"").strip().lower().replace("-", "_").replace(" ", "_")


def boolean(value: Any) -> bool | None:
    """Return the truth of a boolean in any usual spelling, or None."""
    if isinstance(value, bool):
        return value
    word = normal(value)
    return True if word in _TRUE else False if word in _FALSE else None


def integer(value: Any) -> int | None:
    """Return a whole number in any usual spelling (``1e8``, ``100_000_000``, ``2.0``, ``v2``), or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    word = str(value).strip().strip("'\"").replace("_", "").replace(",", "")
    word = word[1:] if word[:1] in ("v", "V") else word
    if len(word) > 40:
        return None
    try:
        number = float(word)
    except ValueError:
        return None
    return int(number) if number == number and abs(number) < 1e18 and number == int(number) else None


def choice(value: Any, table: dict[str, tuple[str, ...]]) -> str | None:
    """Return the canonical name of one of a table's choices, or None."""
    if isinstance(value, bool):
        value = "true" if value else "false"
    word = normal(value)
    for name, spellings in table.items():
        if word in spellings:
            return name
    return None


def near_choice(value: Any, table: dict[str, tuple[str, ...]]) -> str | None:
    """Return the choice that a value names, or the one that it misspells by a letter or two, or None."""
    found = choice(value, table)
    if found is None and not set(".$") & set(str(value)):  # a dotted path is another finding
        words = (word for spellings in table.values() for word in spellings if len(word) > 6)
        near = nearest(value, words, cutoff=0.88)
        found = None if near is None else choice(near, table)
    return found


def classes(value: Any) -> tuple[str, ...] | None:
    """Return class names from a comma, space or semicolon list, a YAML list or a Python list in text.

    Dotted paths keep their last part (accelerate compares bare class names). None: not class names.
    """
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        items: list[str] = []
        for item in value:
            if not isinstance(item, str):
                return None
            items.extend(_split(item))
    elif isinstance(value, str):
        items = _split(value)
    else:
        return None
    if len(items) == 1 and items[0].lower() in ("none", "null"):
        return ()
    names = [item.rsplit(".", 1)[-1] for item in items]
    return tuple(dict.fromkeys(names)) if all(name.isidentifier() for name in names) else None


def _split(text: str) -> list[str]:
    stripped = text.strip()
    if stripped[:1] in "[({" and stripped:
        for parse in (json.loads, ast.literal_eval):
            try:
                listed = parse(stripped)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(listed, list | tuple | set):
                return [str(item).strip() for item in listed]
        stripped = stripped.strip("[](){}")
    for separator in ";,":
        stripped = stripped.replace(separator, " ")
    return [part.strip("'\"") for part in stripped.split() if part.strip("'\"")]


def nearest(word: object, known: Iterable[str], *, cutoff: float = 0.72) -> str | None:
    """Return the known key nearest to ``word``, or None when none is near."""
    return next(iter(all_near(word, known, most=1, cutoff=cutoff)), None)


def all_near(word: object, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are near to ``word``, the nearest first.

    Args:
        word: What somebody wrote.
        known: The names to choose from.
        most: Names that are returned at most.
        cutoff: Similarity that a name must have, from 0 to 1 (:func:`difflib.get_close_matches`).
    """
    target = normal(word)
    if len(target) > _LONGEST:
        return []
    pool = {normal(item): item for item in known}
    if target in pool and most == 1:
        return [pool[target]]
    return [pool[form] for form in difflib.get_close_matches(target, list(pool), n=most, cutoff=cutoff)]


def did_you_mean(word: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return ``did you mean A or B?`` with the names near to ``word``, or None when none is near."""
    near = all_near(word, known, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else None


_LONGEST = 80
"""Letters of a word that is compared; a mistyped name is shorter."""


def same_ends(word: object, known: Iterable[str]) -> str | None:
    """Return the one known key that begins and ends with the same words (``main_..._port``), or None."""
    parts = normal(word).split("_")
    if len(parts) < 2:
        return None
    alike = [item for item in known if item.split("_")[0] == parts[0] and item.split("_")[-1] == parts[-1]]
    return alike[0] if len(alike) == 1 else None


def unknown_option(
    function: str, word: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> OptionError:
    """Return the error for a keyword that a function does not have; its help names the nearest one.

    Args:
        function: Name of the function.
        word: The keyword.
        known: The keywords it has.
        aliases: Further spellings (of the command line), and the keyword each one stands for.
    """
    names = list(known)
    pool = {**{name: name for name in names}, **(aliases or {})}
    near = nearest(word, pool, cutoff=0.6)
    listed = f"{function} takes {', '.join(names)}"
    advice = f"did you mean {pool[near]}?" if near is not None else listed
    return OptionError(f"{function} has no option {word!r}", help=advice)


def suggest_keywords(**aliases: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function answer an unknown keyword with the nearest one it has.

    Args:
        **aliases: Spellings of the command line that differ, and the keyword each one stands for.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in known:
                    raise unknown_option(function.__name__, name, known, aliases)
            return function(*args, **kwargs)

        return checked

    return decorate
