"""What a dialect can say, and the error for what it cannot."""

from __future__ import annotations

from collections.abc import Iterable

from fsdptool.config.facts import facts_from
from fsdptool.errors import ConfigError
from fsdptool.records.settings import FsdpSettings

_DEFAULT = facts_from(FsdpSettings())


def check_expressible(settings: FsdpSettings, dialect: str, cannot: Iterable[str] = ()) -> None:
    """Refuse settings that contradict each other or that a dialect has no words for.

    Args:
        settings: What is to be written.
        dialect: Name of the dialect, for the message.
        cannot: Canonical settings the dialect has no word for: only their defaults can be "written".

    Raises:
        ConfigError: Naming the first setting that cannot be expressed, and its value.
    """
    facts = facts_from(settings)
    for name in cannot:
        if facts[name] != _DEFAULT[name]:
            raise ConfigError(
                f"{dialect} cannot express {name} = {_shown(facts[name])}",
                help="leave it at its default, or write another dialect (accelerate expresses everything)",
            )
    if settings.wrap_classes and settings.wrap_policy != "transformer":
        raise ConfigError(f"wrap_classes mean nothing under the wrap policy {settings.wrap_policy!r}")
    if settings.min_num_params is not None and settings.wrap_policy != "size":
        raise ConfigError(f"min_num_params means nothing under the wrap policy {settings.wrap_policy!r}")
    if settings.wrap_policy == "size" and settings.min_num_params is None:
        raise ConfigError(f"{dialect} needs min_num_params written out under the wrap policy 'size'")
    for name in settings.wrap_classes:
        if not name.isidentifier():
            raise ConfigError(f"{dialect} cannot express the wrap class {name!r}: not a class name")
    if settings.activation_checkpointing_offload and not settings.activation_checkpointing:
        raise ConfigError("activation_checkpointing_offload needs activation_checkpointing")


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else repr(value)
