"""What a group of ranks does not divide, in the same words for ``detect``, ``plan``, ``train``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fsdptool.errors import ConfigError
from fsdptool.records.tensor_plan import Indivisible, TensorPlan

TENSOR = "tp_size"
EXPERT = "sharding.expert_parallel:"
"""The settings, as files name them."""


def violations(setting: str, size: int, items: Iterable[Indivisible]) -> Iterator[tuple[str, str]]:
    """Yield a message and what to do instead for everything that a group does not divide.

    Args:
        setting: What the person wrote before the size: an option, or the setting of a file.
        size: Ranks of the group.
        items: What it does not divide.
    """
    name = setting.removesuffix(":")
    for item in items:
        if item.count:
            where = f" of {item.where}" if item.where else ""
            message = f"{setting} {size} does not divide the {item.count} {item.what}{where}"
        else:
            message = f"{setting} {size} is not supported: the model has no {item.what}"
        yield message, f"set {name} to {' or '.join(str(size) for size in item.valid)}"


def refuse_indivisible(plan: TensorPlan, setting: str) -> None:
    """Refuse a group whose size does not divide the model.

    Raises:
        ConfigError: Names the first count, where it is, and the nearest sizes that divide the whole model;
            the other counts are its ``others``.
    """
    found = list(violations(setting, plan.size, plan.indivisible))
    if found:
        (message, advice), *others = found
        more = tuple(ConfigError(text, help=instead) for text, instead in others)
        raise ConfigError(message, help=advice, others=more)
