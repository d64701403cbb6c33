"""Who reads a file: consumers, their versions, and the version facts the rules depend on."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from fsdptool.config.result import Consumer
from fsdptool.errors import ConfigError

CHECKED = {"accelerate": "1.15.0", "transformers": "5.23.0"}
"""Versions whose behaviour the tests run against the rules."""

CONSUMERS = {
    "accelerate": "accelerate launch and the plugin it builds",
    "fsdptool": "fsdptool's own trainer, started on an accelerate YAML",
    "trainer": "transformers' TrainingArguments",
    "axolotl": "axolotl",
    "llamafactory": "LLaMA-Factory",
    "simpletuner": "SimpleTuner",
}
_PACKAGE = {
    "trainer": "transformers",
    "llamafactory": "transformers",
    "axolotl": "axolotl",
    "fsdptool": "fsdptool",
}
_PROGRAMS = {
    "accelerate": "accelerate",
    "transformers": "trainer",
    "fsdptool": "fsdptool",
    "axolotl": "axolotl",
    "simpletuner": "simpletuner",
}
"""Package to the consumer whose version it is; LLaMA-Factory's FSDP keys are transformers'."""
_READ_IN_SOURCE = {"axolotl": "0.19.0", "simpletuner": "4.8.0", "llamafactory": "5.23.0"}
"""Programs that are not installed beside us: the version that was read, and for axolotl run."""

NATURAL = {
    "accelerate": "accelerate",
    "flags": "accelerate",
    "env": "accelerate",
    "trainer": "trainer",
    "axolotl": "axolotl",
    "llamafactory": "llamafactory",
    "simpletuner": "simpletuner",
}
"""The consumer of a dialect unless somebody says otherwise."""

READS = {
    "accelerate": ("accelerate", "flags", "env"),
    "fsdptool": ("accelerate", "flags", "env"),
    "trainer": ("trainer",),
    "axolotl": ("axolotl",),
    # LLaMA-Factory hands the file that its fsdp_config names to transformers.
    "llamafactory": ("llamafactory", "trainer"),
    "simpletuner": ("simpletuner", "flags"),
}
"""The dialects each consumer reads."""


def resolve_consumer(
    name: str | None, target: str | None, dialect: str, *, noted: str | None = None
) -> Consumer:
    """Return the consumer a file is judged for.

    Args:
        name: ``--consumer``, or None.
        target: ``--target``, ``accelerate==1.15`` or a bare version.
        dialect: The file's dialect, whose natural consumer counts where nobody says otherwise.
        noted: What a ``# fsdptool: consumer=NAME`` comment in the file says; a target of another
            program is then not about this file.

    Raises:
        ConfigError: There is no such consumer, the target is malformed or names no program we know, or
            name and target are two programs.
    """
    chosen = name or noted or NATURAL.get(dialect, "accelerate")
    if chosen not in CONSUMERS:
        raise ConfigError(f"unknown consumer {chosen!r}", help=f"choose one of: {', '.join(CONSUMERS)}")
    package, version = _target(target)
    if package is not None and package != _PACKAGE.get(chosen, chosen):
        if name is not None:
            raise ConfigError(
                f"--consumer {name} is not what --target {target} is a version of",
                help=f"give --target {_PACKAGE.get(chosen, chosen)}==VERSION, or leave one of the two out",
            )
        if noted is not None:
            version = None
        else:
            chosen = _PROGRAMS[package]
    package_name = _PACKAGE.get(chosen, chosen)
    if version is None:
        version = _READ_IN_SOURCE.get(chosen) or _installed(package_name)
    checked = CHECKED.get(package_name)
    return Consumer(chosen, version, checked is None or _same_minor(version, checked))


def _target(target: str | None) -> tuple[str | None, str | None]:
    """Split ``--target`` into a package (None for a bare version) and a version."""
    if target is None:
        return None, None
    package, equals, version = target.partition("==")
    if not equals:
        package, version = "", package
    package = package.strip().lower()
    version = version.strip()
    if not version or not version[0].isdecimal():
        raise ConfigError(
            f"--target {target!r} is not PACKAGE==VERSION", help="for example --target accelerate==1.15"
        )
    if package and package not in _PROGRAMS:
        raise ConfigError(
            f"--target {target!r} names no program whose rules are known",
            help=f"choose one of: {', '.join(_PROGRAMS)}",
        )
    return package or None, version


@cache
def _installed(package: str) -> str:
    """Return an installed version from the names of metadata folders: reading the metadata costs 50 ms."""
    prefix = f"{package}-"
    for folder in sys.path:
        try:
            names = [path.name for path in Path(folder or ".").iterdir()]
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info") and name.lower().startswith(prefix):
                return name[len(prefix) : -len(".dist-info")]
    return CHECKED.get(package, "0")


def _same_minor(version: str, checked: str) -> bool:
    return version.split(".")[:2] == checked.split(".")[:2]
