"""Values of options that are more than a word or a number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fsdptool.errors import ConfigError, PlanError


def hsdp_shape(text: str | None) -> tuple[int | None, int | None]:
    """Return replicas and shards of ``2x8``."""
    if text is None:
        return None, None
    left, _, right = text.lower().replace(" ", "").partition("x")
    if not left.isdecimal() or not right.isdecimal():
        raise PlanError(f"--hsdp {text!r} is no shape", help="write replicate x shard, for example 2x8")
    return int(left), int(right)


def reshard_value(text: str | None) -> bool | int | None:
    """Return ``true``, ``false`` or a number of ranks as such."""
    if text is None:
        return None
    words = {"true": True, "yes": True, "false": False, "no": False}
    if text.lower() in words:
        return words[text.lower()]
    if text.isdecimal() and int(text) > 1:
        return int(text)
    raise PlanError(f"--reshard {text!r} is not known", help="write true, false or a number of ranks above 1")


def override_values(items: Sequence[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` texts as a mapping; dots in a key reach into nested parts.

    A value is JSON, else what YAML makes of it (``True``, ``[a, b]``), else text.

    Raises:
        ConfigError: An item is not KEY=VALUE.
    """
    result: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--override {item!r} is not KEY=VALUE", help="for example num_hidden_layers=4")
        target = result
        *parents, last = key.strip().split(".")
        for parent in parents:
            inner = target.setdefault(parent, {})
            target[parent] = inner if isinstance(inner, dict) else {}
            target = target[parent]
        target[last] = _value(text)
    return result


def _value(text: str) -> Any:
    import yaml

    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
