"""What a dialect must offer, and who reads its files. Authors subclass :class:`Dialect` (docs/config.md)."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document, Node
    from fsdptool.records.diagnostic import EffectiveDtypes
    from fsdptool.records.plan import NotPlanned
    from fsdptool.records.recipe import GradientAccumulation, Layout
    from fsdptool.records.sharding import FsdpSettings

API_VERSION = 1


class Dialect(ABC):
    """One way to write FSDP settings: how such files are recognised, read, written and migrated.

    Every installed dialect is asked whether a file is its own, so importing the module that holds the
    class should cost little: import the code that reads and writes inside the methods.

    Attributes:
        name: What ``--dialect`` calls it; the entry point has the same name.
        consumers: The programs that read such files, by name; the first unless somebody says otherwise.
        programs: Those of ``consumers`` that fsdptool does not know.
        cannot: Canonical settings (``canonical.COMMON``) that the dialect cannot express.
        base: Settings that every file of the dialect can say, where those are not the defaults.
        in_place: Whether FSDP1 becomes FSDP2 by edits of the text (:meth:`migrate`); otherwise the file is
            written again.
    """

    api_version: int = API_VERSION
    name: str
    consumers: tuple[str, ...]
    programs: tuple[Program, ...] = ()
    cannot: tuple[str, ...] = ()
    base: FsdpSettings | None = None
    in_place: bool = True

    def sniff(self, text: str) -> bool:
        """Whether a text that is neither YAML nor JSON is of this dialect."""
        return False

    def parse(self, source: SourceText) -> Document | None:
        """Return the text's tree; None: it is JSON if its name ends in ``.json``, else YAML.

        Raises:
            ParseError: The text cannot be parsed.
        """
        return None

    def matches(self, root: Node) -> float:
        """Return how surely a mapping is of this dialect, from 0 to 1; at 0.9 it is taken for one."""
        return 0.0

    def consumer_of(self, root: Node) -> str:
        """Return the program that a file is for unless somebody says otherwise."""
        return self.consumers[0]

    @abstractmethod
    def read(self, lint: LintContext) -> None:
        """Read a tree into canonical settings, as the consumer would, and report what it would not take.

        Every setting of ``canonical.COMMON`` that the consumer knows is set, with its entry where the
        file writes it and without where a default counts. What is written and not used is ignored
        explicitly (``lint.ignore``). A mistake is a finding, never an exception.
        """

    @abstractmethod
    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return settings as a file that :meth:`read` reads back to the same settings.

        Args:
            settings: What to write. Defaults that programs read differently are written out.
            header: Comment lines (without ``#``) to put first, where the dialect has comments.

        Raises:
            ConfigError: A setting cannot be expressed; the message names it.
        """

    def dtypes(self, lint: LintContext) -> EffectiveDtypes | None:
        """Return the dtypes of the run that the file configures; None: not known.

        Called after :meth:`read`. By default they follow ``mixed_precision`` as accelerate has it.
        """
        from fsdptool.config.dtypes import consumer_dtypes

        return consumer_dtypes(lint)

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Turn an FSDP1 file into FSDP2 by edits; return what changes besides ``target``.

        Raises:
            NotEditableError: The form of the text does not allow it.
        """
        from fsdptool.config.fsdp1 import NotEditableError

        raise NotEditableError(f"{self.name} files are not migrated in place")


@dataclass(frozen=True, slots=True)
class ProgramLoop:
    """What the training loop of a program does in a step, as far as its memory depends on it.

    Attributes:
        layout: Whose FSDP units and dtypes it has (docs/layouts.md).
        gradients: How it accumulates gradients.
        loss: Logits that its loss over tokens holds: of all of them, or of a chunk at a time.
        loss_in_forward: Whether the model's own forward computes the loss (``labels=``).
        marks_last: Whether it calls ``set_is_last_backward``.
        outside_in_root: Whether embedding and head belong to the root, in the native layout.
        not_planned: What a plan of it leaves out.
        source: Where this can be read.
    """

    layout: Layout
    gradients: GradientAccumulation
    loss: Literal["whole", "chunked"]
    loss_in_forward: bool
    source: str
    marks_last: bool = False
    outside_in_root: bool = False
    not_planned: tuple[NotPlanned, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A program that reads configuration files.

    Attributes:
        name: What ``--consumer`` calls it.
        title: What it is, for people.
        package: Distribution whose version counts and which ``--target PACKAGE==VERSION`` names.
        assumed: Version to judge for where the program need not be installed here; None: the installed one.
        checked: Version that the rules were checked against by running it, or None.
        loop: What its training loop does, where that differs from ``fsdptool train``; None: not known.
    """

    name: str
    title: str
    package: str
    assumed: str | None = None
    checked: str | None = None
    loop: ProgramLoop | None = None


ACCELERATE_LOOP = ProgramLoop(
    layout="accelerate",
    gradients="unsharded",
    loss="whole",
    loss_in_forward=True,
    source="accelerate 1.15 accelerator.py (no_sync, accumulate, prepare_model), utils/fsdp_utils.py",
    not_planned=("autocast", "outputs", "stored_dtype", "encoders"),
)
"""A loop that prepares its model with accelerate, accumulates with it and gives the model its labels."""

TRAINER_LOOP = replace(
    ACCELERATE_LOOP,
    source="transformers 5.23 trainer.py (no_sync but for the last micro-batch; compute_loss drops outputs)",
    not_planned=("autocast", "fused_loss", "stored_dtype"),
)
"""transformers' Trainer, and the programs that are built on it."""


PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "accelerate",
            "accelerate launch and the plugin it builds",
            "accelerate",
            None,
            "1.15.0",
            ACCELERATE_LOOP,
        ),
        Program("fsdptool", "fsdptool's own trainer, started on an accelerate YAML", "fsdptool"),
        Program("trainer", "transformers' TrainingArguments", "transformers", None, "5.23.0", TRAINER_LOOP),
        Program("axolotl", "axolotl", "axolotl", "0.19.0", loop=TRAINER_LOOP),
        # Its FSDP keys are transformers'.
        Program("llamafactory", "LLaMA-Factory", "transformers", "5.23.0", "5.23.0", TRAINER_LOOP),
        Program(
            "simpletuner",
            "SimpleTuner",
            "simpletuner",
            "4.8.0",
            loop=replace(
                ACCELERATE_LOOP,
                loss_in_forward=False,
                source="SimpleTuner 4.8 helpers/training/trainer.py (accumulate; text encoders are unloaded)",
                not_planned=("autocast",),
            ),
        ),
    )
}
"""The programs that the shipped dialects are for, by name; another dialect brings its own."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """The program that will read the file, at a version.

    Attributes:
        name: The program.
        version: Its version.
        checked: False when the version is not one the rules were checked against by running it.
        beside: Versions of other packages that ``--target`` names behind the program's.
    """

    name: str
    version: str
    checked: bool = True
    beside: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def before(self, *parts: int) -> bool:
        """Whether the version is older than ``parts``."""
        return is_before(self.version, *parts)

    def version_of(self, package: str) -> str:
        """Return the version of a package beside the program: as given, as installed here, or as checked."""
        program = _of_package(package)
        checked = program.checked if program is not None else None
        return dict(self.beside).get(package) or _installed(package) or checked or "0"


def is_before(version: str, *parts: int) -> bool:
    """Whether a version is older than ``parts``."""
    numbers = []
    for piece in version.split(".")[: len(parts)]:
        digits = "".join(character for character in piece if character.isdecimal())
        numbers.append(int(digits[:9] or 0))
    return tuple(numbers) < parts


def known_programs() -> dict[str, Program]:
    """Return every program by name: those above, and what installed dialects bring."""
    from fsdptool.config.dialects import load_registry

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
    first, *others = target.split(",") if target is not None else [None]
    package, version = _target(first)
    beside = tuple((found[0] or "", found[1] or "") for found in (_target(item, "torch") for item in others))
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
    if version is None:
        version = program.assumed or _installed(program.package) or program.checked or "0"
    checked = program.checked is None or _same_minor(version, program.checked)
    return Consumer(program.name, version, checked, beside)


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


@cache
def _installed(package: str) -> str | None:
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
    return None


def _same_minor(version: str, checked: str) -> bool:
    return version.split(".")[:2] == checked.split(".")[:2]
