"""Finds the installed dialects by the entry-point group ``fsdptool.dialects``, and recognises a file's.

No dialect is privileged, ours included: all come through package metadata. The names are known without
loading anything; a dialect loads when it is named, or when a file is to be recognised. One that does not
load is a finding (FSD115), never a crash.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from importlib import import_module, metadata
from typing import Any

from fsdptool.config.dialects.protocol import API_VERSION, Dialect, RunFormat
from fsdptool.config.key_history import is_known, known_versions
from fsdptool.config.programs import PROGRAMS, Consumer, Program, installed_version
from fsdptool.errors import ConfigError
from fsdptool.families.loading import load_bounded
from fsdptool.files.tree import Node, to_python

GROUP = "fsdptool.dialects"
CERTAIN = 0.9
"""Score from which a mapping is taken for a dialect's."""
_XLA = "XLA FSDP settings (torch_xla on TPU), not FSDP2"


class DialectRegistry:
    """The dialects that entry points name; each loads on first use.

    Attributes:
        problems: Why a dialect is left out, by name: of those that were tried so far.
    """

    def __init__(self, entry_points: Iterable[metadata.EntryPoint]) -> None:
        self._entries: dict[str, list[metadata.EntryPoint]] = {}
        for entry in sorted(entry_points, key=lambda item: (item.name, item.value)):
            self._entries.setdefault(entry.name, []).append(entry)
        self._loaded: dict[str, Dialect] = {}
        self.problems: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that is registered, in alphabetical order."""
        return tuple(self._entries)

    def get(self, name: str) -> Dialect:
        """Return the dialect called ``name``.

        Raises:
            ConfigError: It is not registered, or does not load.
        """
        if name not in self._entries:
            raise ConfigError(f"unknown dialect {name!r}", help=f"choose one of: {', '.join(self.names)}")
        dialect = self._load(name)
        if dialect is None:
            raise ConfigError(self.problems[name], help="repair or uninstall the plugin")
        return dialect

    def all(self) -> tuple[Dialect, ...]:
        """Return every dialect that loads."""
        return tuple(dialect for dialect in map(self._load, self._entries) if dialect is not None)

    def read_by(self, consumer: str) -> tuple[Dialect, ...]:
        """Return the dialects that a program reads, first those that are its own."""
        return tuple(
            sorted(
                (dialect for dialect in self.all() if consumer in dialect.consumers),
                key=lambda dialect: dialect.consumers[0] != consumer,
            )
        )

    def leave_out(self, dialect: Dialect, error: BaseException) -> None:
        """Stop asking a dialect that raised where it must not."""
        self._fail(
            self._entries[dialect.name][0], f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )

    def _load(self, name: str) -> Dialect | None:
        if name in self.problems:
            return None
        if name not in self._loaded:
            entry, *others = self._entries[name]
            if others:
                self._fail(entry, f"{' and '.join(map(_origin, others))} registers the same name")
                return None
            try:
                dialect = load_bounded(partial(_load, entry))
            except (Exception, SystemExit) as error:
                self._fail(entry, _one_line(error))
                return None
            problem = _problem(dialect, name)
            if problem is not None:
                self._fail(entry, problem)
                return None
            self._loaded[name] = dialect
        return self._loaded[name]

    def _fail(self, entry: metadata.EntryPoint, why: str) -> None:
        self._loaded.pop(entry.name, None)
        self.problems[entry.name] = f"dialect {entry.name!r} of {_origin(entry)} is left out: {why}"


def _load(entry: metadata.EntryPoint) -> Any:
    loaded = entry.load()
    return loaded() if callable(loaded) else loaded


def _origin(entry: metadata.EntryPoint) -> str:
    owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown distribution"
    return f"{owner} ({entry.value})"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _problem(dialect: object, name: str) -> str | None:
    if not isinstance(dialect, Dialect):
        return f"the entry point names a {type(dialect).__name__}, not a Dialect"
    if dialect.api_version != API_VERSION:
        return f"it implements protocol {dialect.api_version!r}; this fsdptool implements {API_VERSION}"
    if getattr(dialect, "name", None) != name:
        return f"its name is {getattr(dialect, 'name', None)!r}"
    if not getattr(dialect, "consumers", ()):
        return "it names no consumer"
    return None


@cache
def load_registry() -> DialectRegistry:
    """Return the registry of the installed dialects, once per process.

    Raises:
        ConfigError: There is none: fsdptool itself is not installed as it should be.
    """
    registry = DialectRegistry(metadata.entry_points(group=GROUP))
    if not registry.names:
        raise ConfigError(
            f"no dialect is registered in the entry-point group {GROUP}",
            help="install fsdptool again (`pip install -e .` in a checkout): its metadata is out of date",
        )
    return registry


_RUN_FORMATS: tuple[str, ...] = (
    "fsdptool.config.dialects.ai_toolkit:AiToolkit",
    "fsdptool.config.dialects.automodel:AutoModel",
    "fsdptool.config.dialects.diffusers:Diffusers",
    "fsdptool.config.dialects.ms_swift:MsSwift",
    "fsdptool.config.dialects.own:OwnRecipe",
    "fsdptool.config.dialects.verl:Verl",
)
"""Programs of whose files only the run is read: module and class, by a colon."""


@cache
def run_formats() -> tuple[RunFormat, ...]:
    """Return what reads runs: the dialects that describe one, and formats of which only runs are read."""
    able = (item for item in load_registry().all() if type(item).describe is not RunFormat.describe)
    return (*able, *map(_run_format, _RUN_FORMATS))


def run_writers() -> dict[str, RunFormat]:
    """Return what writes whole runs, by the names of the programs."""
    able = (item for item in run_formats() if type(item).write_run is not RunFormat.write_run)
    return {item.name: item for item in able}


def _run_format(place: str) -> RunFormat:
    module, _, name = place.partition(":")
    made: RunFormat = getattr(import_module(module), name)()
    return made


def sniff_dialect(text: str) -> Dialect | None:
    """Return the dialect of a text that is neither YAML nor JSON, or None."""
    registry = load_registry()
    for dialect in registry.all():
        try:
            if dialect.sniff(text):
                return dialect
        except Exception as error:
            registry.leave_out(dialect, error)
    return None


def detect_dialect(root: Node) -> tuple[Dialect | None, tuple[str, str] | None]:
    """Return the dialect of a mapping, or None and a refusal ``(code, message)`` that names the format."""
    if _is_xla(root):
        return None, ("FSD110", _XLA)
    registry = load_registry()
    scores: list[tuple[float, Dialect]] = []
    for dialect in registry.all():
        try:
            scores.append((float(dialect.matches(root)), dialect))
        except Exception as error:
            registry.leave_out(dialect, error)
    best = max(score for score, _ in scores)
    winners = [dialect for score, dialect in scores if score == best]
    if best >= CERTAIN:
        if len(winners) > 1:
            names = " and ".join(dialect.name for dialect in winners)
            return None, ("FSD109", f"the dialects {names} claim the file equally; choose one with --dialect")
        return winners[0], None
    refusal = _foreign_format(root)
    if refusal is not None:
        return None, ("FSD110", refusal)
    return (winners[0], None) if best > 0.2 else (None, None)


RECIPE = "a recipe of fsdptool: `fsdptool train RECIPE --config FILE --dry-run` checks it"
REMEDIES = {RECIPE: "a recipe names no sharding: that is in the FILE, which validate judges by itself"}
"""What to do about a file that is not judged, where it is not what the rule says."""


def _foreign_format(root: Node) -> str | None:
    """Return what a mapping is that belongs to another program, or None where that is not known either."""
    keys = {str(entry.key) for entry in root.entries}
    # oumi's files also have a section fsdp, so they are told by model and training first.
    model, training = root.get("model"), root.get("training")
    if model is not None and model.node.kind == "map" and model.node.get("reference") is not None:
        return RECIPE
    if model is not None and training is not None and model.node.kind == "map":
        section = root.get("fsdp")
        enabled = section is not None and section.node.kind == "map" and section.node.get("enable_fsdp")
        if model.node.get("model_name") is not None or enabled or "peft" in keys:
            return "an oumi training configuration"
        return "a training description of another program (sections model and training)"
    section = root.get("fsdp")
    if section is not None and section.node.kind == "map":
        return "a training description whose section fsdp is its program's own (NeMo AutoModel writes it so)"
    if "model" in keys and any(_is_component(entry.node) for entry in root.entries):
        return "a configuration of _component_ entries that are not torchtune's"
    if "accelerate_launch_args" in keys:
        return "a job description (fms-hf-tuning); FSDP settings are nested under accelerate_launch_args"
    if {"job", "model"} <= keys and keys & {"parallelism", "activation_checkpoint", "profiling", "training"}:
        return "a torchtitan job configuration"
    if {"apiVersion", "kind"} <= keys:
        return "a Kubernetes object"
    if "zero_optimization" in keys or "zero_stage" in keys:
        return "a DeepSpeed configuration"
    if "$schema" in keys and "properties" in keys:
        return "a JSON Schema"
    return _nested(root)


def _is_xla(root: Node) -> bool:
    """Whether the mapping switches torch_xla's own FSDP on, in whatever file."""
    config = root.get("fsdp_config")
    for node in (root, config.node if config is not None and config.node.kind == "map" else None):
        entry = node.get("xla") if node is not None else None
        if entry is not None and str(entry.node.value).lower() in ("true", "1", "yes"):
            return True
    return False


def _is_component(node: Node) -> bool:
    return node.kind == "map" and node.get("_component_") is not None


def _nested(root: Node) -> str | None:
    """A whole accelerate file, or FSDP settings, under some other key."""
    for entry in root.entries:
        if entry.node.kind != "map":
            continue
        inner = {str(item.key) for item in entry.node.entries}
        if "distributed_type" in inner or "fsdp_config" in inner:
            return f"a file whose accelerate settings are nested under {entry.key}"
        if any(key.startswith("fsdp_") for key in inner) and entry.key not in ("fsdp_config",):
            return f"a file whose FSDP settings are nested under {entry.key}"
        value = to_python(entry.node)
        if isinstance(value, dict) and any(
            isinstance(item, dict) and ("fsdp_config" in item or "fsdp" in item) for item in value.values()
        ):
            return f"a file whose FSDP settings are nested under {entry.key}"
    return None


BESIDE = ("torch", "peft", "bitsandbytes", "torchao", "datasets", "diffusers")
"""Packages that run beside a program, whose versions ``--target`` may name."""


def known_programs() -> dict[str, Program]:
    """Return every program by name: those above, and what installed dialects bring."""
    brought = (program for dialect in load_registry().all() for program in dialect.programs)
    return {program.name: program for program in brought} | PROGRAMS


def resolve_consumer(
    name: str | None,
    target: str | None,
    natural: str,
    *,
    noted: str | None = None,
    programs: Iterable[Program] = (),
) -> Consumer:
    """Return the consumer a file is judged for.

    Args:
        name: ``--consumer``, or None.
        target: ``--target``, ``accelerate==1.15`` or a bare version; behind commas, the versions of packages
            that run beside it (``accelerate==1.12,transformers==5.0``).
        natural: The consumer of the file's dialect, which counts where nobody says otherwise.
        noted: What a ``# fsdptool: consumer=NAME`` comment in the file says; a target of another
            program is then not about this file.
        programs: Programs that the file's dialect brings.

    Raises:
        ConfigError: The consumer is unknown, the target is malformed or names an unknown program, or
            name and target are two programs.
    """
    chosen = name or noted or natural
    brought = {program.name: program for program in programs}
    program = brought.get(chosen) or PROGRAMS.get(chosen) or known_programs().get(chosen)
    if program is None:
        raise ConfigError(
            f"unknown consumer {chosen!r}", help=f"choose one of: {', '.join(known_programs())}"
        )
    others: list[str] = target.split(",")[1:] if target is not None else []
    first = target.partition(",")[0] if target is not None else None
    package, version = _target(first, "torch")
    if package == "torch" and first is not None:
        others.insert(0, first)
        package = version = None
    beside = tuple((found[0] or "", found[1] or "") for found in (_target(item, *BESIDE) for item in others))
    if package is not None and package != program.package:
        if name is not None:
            raise ConfigError(
                f"--consumer {name} and --target {target} name different programs",
                help=f"give --target {program.package}==VERSION, or leave one of the two out",
            )
        if noted is not None:
            version = None
        else:
            program = _of_package(package) or program
    judged = version is not None
    if version is None:
        version = program.assumed or installed_version(program.package) or program.checked or "0"
    checked = program.checked is None or _same_minor(version, program.checked)
    judged = judged or not checked
    if known_versions(program.package):
        checked = is_known(program.package, version)
    return Consumer(program.name, version, checked, beside, judged)


def script_versions(target: str | None) -> dict[str, str]:
    """Return the versions that a script is judged for: as ``--target`` says, as installed, or as checked.

    Raises:
        ConfigError: The target is malformed or names an unknown program.
    """
    checked = {"torch": "2.13.0", "peft": "0.21.2"}
    checked |= {item.package: item.checked for item in PROGRAMS.values() if item.checked is not None}
    found = {package: installed_version(package) or version for package, version in checked.items()}
    for text in target.split(",") if target is not None else ():
        package, version = _target(text, *checked, *BESIDE)
        if version is not None:
            found[package or "torch"] = version
    return found


def _target(target: str | None, *further: str) -> tuple[str | None, str | None]:
    """Split ``--target`` into a package (None for a bare version) and a version.

    Args:
        target: What was given, or None.
        further: Packages that may be named besides those of programs.
    """
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
    if package and package not in further and _of_package(package) is None:
        packages = dict.fromkeys((*(program.package for program in known_programs().values()), *further))
        raise ConfigError(
            f"--target {target!r} does not name a known program", help=f"choose one of: {', '.join(packages)}"
        )
    return package or None, version


def _of_package(package: str) -> Program | None:
    """Return the first program of a package: for transformers that is the Trainer."""
    for programs in (PROGRAMS, known_programs()):
        for program in programs.values():
            if program.package == package:
                return program
    return None


def _same_minor(version: str, checked: str) -> bool:
    return version.split(".")[:2] == checked.split(".")[:2]
