"""Values of ``plan``'s options that are more than a word or a number."""

from __future__ import annotations

from typing import Any

from fsdptool.errors import PlanError


def hsdp_shape(text: str | None) -> tuple[int | None, int | None]:
    """Return replicas and shards of ``2x8``."""
    if text is None:
        return None, None
    left, _, right = text.lower().replace(" ", "").partition("x")
    if not left.isdigit() or not right.isdigit():
        raise PlanError(f"--hsdp {text!r} is no shape", help="write replicate x shard, for example 2x8")
    return int(left), int(right)


def reshard_value(text: str | None) -> bool | int | None:
    """Return ``true``, ``false`` or a number of ranks as such."""
    if text is None:
        return None
    words = {"true": True, "yes": True, "false": False, "no": False}
    if text.lower() in words:
        return words[text.lower()]
    if text.isdigit() and int(text) > 1:
        return int(text)
    raise PlanError(f"--reshard {text!r} is not known", help="write true, false or a number of ranks above 1")


def override_values(items: list[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` texts as a mapping; values are read as YAML."""
    import yaml

    result: dict[str, Any] = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise PlanError(f"--override {item!r} changes nothing", help="write KEY=VALUE")
        result[key.strip()] = yaml.safe_load(value)
    return result
