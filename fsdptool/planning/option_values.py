"""Values of options as text, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptool.errors import PlanError


def reshard_value(value: bool | int | str) -> bool | int:
    """Return ``true``, ``false`` or a number of ranks as a value.

    Raises:
        PlanError: The text is none of them.
    """
    if not isinstance(value, str):
        return value
    words = {"true": True, "yes": True, "false": False, "no": False}
    if value.lower() in words:
        return words[value.lower()]
    if value.isdecimal() and int(value) > 1:
        return int(value)
    raise PlanError(
        f"--reshard {value!r} is not supported", help="write true, false or a number of ranks above 1"
    )


def hsdp_shape(text: str) -> tuple[int, int]:
    """Return the replicate and shard sizes of ``2x8``.

    Raises:
        PlanError: The text is not a mesh shape.
    """
    left, _, right = text.lower().replace(" ", "").partition("x")
    if not left.isdecimal() or not right.isdecimal():
        raise PlanError(
            f"--hsdp {text!r} is not a mesh shape", help="write replicate x shard, for example 2x8"
        )
    return int(left), int(right)


def one_of(flag: str, value: str, choices: Sequence[str]) -> str:
    """Return the choice ``value`` spells, forgiving case and dashes.

    Raises:
        PlanError: It is none of them.
    """
    spelled = {choice.replace("-", "_").lower(): choice for choice in choices}
    match = spelled.get(value.replace("-", "_").lower())
    if match is None:
        raise PlanError(f"{flag} {value!r} is not supported", help=f"choose one of: {', '.join(choices)}")
    return match
