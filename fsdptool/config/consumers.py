"""Who reads a file: consumers, their versions, and the version facts the rules depend on."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from fsdptool.config.reading import Consumer
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
_READ_IN_SOURCE = {"axolotl": "0.13", "simpletuner": "4.8.0", "llamafactory": "5.23.0"}
"""Programs that were read, not run: the version that was read."""

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


def resolve_consumer(name: str | None, target: str | None, dialect: str) -> Consumer:
    """Return the consumer a file is judged for.

    Args:
        name: ``--consumer``, or None for the dialect's natural one.
        target: ``--target``, ``accelerate==1.15`` or a bare version.
        dialect: The file's dialect.

    Raises:
        ConfigError: There is no such consumer, or the target is malformed.
    """
    chosen = name or NATURAL.get(dialect, "accelerate")
    version: str | None = None
    if target is not None:
        package, _, wanted = target.partition("==")
        if not wanted:
            package, wanted = "", package
        if not wanted or not wanted[0].isdigit():
            raise ConfigError(
                f"--target {target!r} is not PACKAGE==VERSION", help="for example --target accelerate==1.15"
            )
        aliases = {"transformers": "trainer"}
        package = aliases.get(package, package)
        if package and package in CONSUMERS and name is None and package != chosen:
            chosen = package
        version = wanted
    if chosen not in CONSUMERS:
        raise ConfigError(f"unknown consumer {chosen!r}", help=f"choose one of: {', '.join(CONSUMERS)}")
    package_name = _PACKAGE.get(chosen, chosen)
    if version is None:
        version = _READ_IN_SOURCE.get(chosen) or _installed(package_name)
    checked = CHECKED.get(package_name)
    return Consumer(chosen, version, checked is None or _same_minor(version, checked))


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
