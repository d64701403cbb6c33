"""What a file shows of its run, under the names that conditions of advisories use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from fsdptool.advisories.catalogue import Versions
from fsdptool.config.command_lines import NamedFiles
from fsdptool.config.described import describe_written
from fsdptool.config.reader import judged_or_failed
from fsdptool.config.result import Conditions, Reading
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.files.tree import to_python
from fsdptool.records.described_run import DescribedRun
from fsdptool.records.resolved_run import ResolvedRun

_OF_LAUNCHER = ("fsdp_", "dynamo_", "parallelism_config", "distributed_type")
"""How keys begin that only the file of ``accelerate launch`` has, or that have no effect elsewhere."""

_LAUNCHERS = ("accelerate", "env", "flags")
"""Dialects of what starts a training and does not describe it."""

_DIVIDED = ("mesh.dp_replicate", "mesh.dp_shard", "mesh.cp", "mesh.tp")

_TRAINERS = ("trainer", "trl")
_VERSION_KEYS = ("version", "fsdp_version")
_READS_VERSION, _TAKES_FSDP2 = Version("5.0.0"), Version("5.10.0")
"""transformers runs FSDP1 before 5.0 whatever ``fsdp_config`` says, and before 5.10 where it names no version
(``training_args.py`` of 4.57.6, 5.0.0, 5.9.0 and 5.10.1)."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run.

    Attributes:
        values: Facts by name; what is not there, or None, is not known.
        keys: Values of the keys as they are written, by the last part of their names.
        is_launch: Whether the file is only that of a launcher, which shows nothing of the training.
    """

    values: Mapping[str, Any]
    keys: Mapping[str, Any]
    is_launch: bool

    def knows(self, name: str) -> bool:
        """Whether the absence of a key means that the run does not have it."""
        return not self.is_launch or name.startswith(_OF_LAUNCHER)

    def lacks(self, name: str) -> bool:
        """Whether a fact is known to be absent: the reader has it, or the file could say it and does not."""
        return name in self.values or not self.is_launch


def read_facts(source: SourceText, versions: Versions, files: NamedFiles | None = None) -> RunFacts:
    """Return what a text shows of its run.

    Args:
        source: A file, or the text of a command line.
        versions: Versions of the libraries, for the defaults that changed between them.
        files: Where the files that the text names are looked for.

    Raises:
        ConfigError: The text cannot be parsed, or no program is known that reads it.
    """
    found = describe_written(source, files=files)
    described, written = found.run, found.keys
    reading = judged_or_failed(source, Conditions(files=files), fixes=False)
    if described is None and reading.dialect is None:
        first = reading.errors[0] if reading.errors else None
        raise ConfigError(first.message if first else "no program is known that reads the file")
    if described is None and reading.document is not None and reading.document.root is not None:
        written = to_python(reading.document.root)
    keys = dict(_flat(written))
    launched = _of_settings(reading)
    values = {f"settings.{name}": value for name, value in reading.facts.items()} | launched
    is_launch = described is None and reading.dialect in _LAUNCHERS
    if described is not None:
        values |= {name: value for name, value in _of_run(described) if value is not None}
        # A program's own file leaves the mesh to the launcher, and a run without one has sizes of 1.
        values |= {
            name: value for name, value in launched.items() if name in _DIVIDED and value not in (None, 1)
        }
    elif not is_launch:
        values["program"] = reading.consumer.name
    if _runs_fsdp1(values.get("program"), keys, versions):
        values["fsdp"] = values["settings.fsdp_version"] = 1
    return RunFacts(values, keys, is_launch)


def own_facts(run: ResolvedRun) -> RunFacts:
    """Return the facts of a run of fsdptool's own trainer, of which no key is open."""
    recipe, settings = run.recipe, run.settings
    values: dict[str, Any] = {
        "program": "fsdptool",
        "fsdp": 2,
        "method": recipe.method.name,
        "objective": recipe.objective.name,
        "optimizer": recipe.optimizer.name,
        "accumulation": recipe.batch.accumulation,
        "cpu_offload": settings.cpu_offload,
        "processes": settings.num_processes,
        "settings.mixed_precision": settings.mixed_precision,
    }
    values |= {name: getattr(run.mesh, name.removeprefix("mesh.")) for name in _DIVIDED}
    return RunFacts(values, {}, is_launch=False)


def _of_settings(reading: Reading) -> dict[str, Any]:
    """Return facts of a run that the settings of FSDP alone decide."""
    given = reading.facts
    fsdp = reading.version if reading.version is not None else "none" if "num_processes" in given else None
    values: dict[str, Any] = {"fsdp": fsdp, "processes": given.get("num_processes")}
    values |= {name: given.get(name.removeprefix("mesh.")) for name in _DIVIDED}
    values |= {"cpu_offload": given.get("cpu_offload"), "wrap_classes": given.get("wrap_classes") or None}
    return values


def _of_run(run: DescribedRun) -> Iterator[tuple[str, Any]]:
    for name in run.__dataclass_fields__:
        if name not in ("mesh", "keys", "learning", "defaults", "notes", "problems"):
            yield name, getattr(run, name)
    for name in run.mesh.__dataclass_fields__:
        yield f"mesh.{name}", getattr(run.mesh, name)


def _runs_fsdp1(program: str | None, keys: Mapping[str, Any], versions: Versions) -> bool:
    """Whether an earlier transformers runs FSDP1 where the newest runs FSDP2."""
    known = versions.get("transformers")
    if program not in _TRAINERS or "fsdp" not in keys or not known:
        return False
    named = any(name in keys for name in _VERSION_KEYS)
    return max(known) < (_READS_VERSION if named else _TAKES_FSDP2)


def _flat(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of a file with its value, whatever section it is in."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key).rpartition(".")[2], item
            yield from _flat(item)
    elif isinstance(value, list):
        for item in value:
            yield from _flat(item)
