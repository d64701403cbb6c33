"""What reading a configuration yields: settings, where each came from, and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.files.tree import Document
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.settings import FsdpSettings


@dataclass(frozen=True, slots=True)
class Consumer:
    """The program that will read the file, at a version.

    ``checked`` is False when the version is not one the rules were checked against by running it.
    """

    name: str
    version: str
    checked: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def before(self, *parts: int) -> bool:
        """Whether the version is older than ``parts``."""
        numbers = []
        for piece in self.version.split(".")[: len(parts)]:
            digits = "".join(character for character in piece if character.isdecimal())
            numbers.append(int(digits[:9] or 0))
        return tuple(numbers) < parts


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective setting. ``line`` is None for defaults and the environment."""

    key: str
    value: Any
    origin: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """Something that was written and that the consumer does not use."""

    key: str
    value: Any
    line: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A configuration as its consumer will understand it.

    Attributes:
        settings: The settings in canonical form (an FSDP1 file as FSDP2 would express it), or None
            when the text yields none. Best effort while there are errors: see :meth:`require`.
        diagnostics: Findings, in the order of the file.
        effective: Every setting that takes effect, with its origin.
        ignored: What was written and does nothing.
        dialect: Name of the dialect, or None when it was not recognised.
        consumer: Who the file was judged for.
        version: FSDP version the consumer would run, or None if it would not run FSDP.
        changes: Per diagnostic (same index): settings its fix changes, by key.
        suppressed: Findings that a ``# fsdptool: ignore[...]`` comment silences.
    """

    settings: FsdpSettings | None
    diagnostics: tuple[Diagnostic, ...]
    effective: tuple[Setting, ...]
    ignored: tuple[Ignored, ...]
    dialect: str | None
    consumer: Consumer
    version: int | None = None
    path: str | None = None
    source: SourceText | None = field(default=None, repr=False)
    document: Document | None = field(default=None, repr=False)
    changes: tuple[Mapping[str, Any], ...] = ()
    suppressed: tuple[Diagnostic, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """Findings of severity ``error``."""
        return tuple(item for item in self.diagnostics if item.severity == "error")

    @property
    def status(self) -> str:
        """``error`` (something no fix repairs), ``fixable`` or ``ok`` (contract ``validate``)."""
        if any(item.fix is None for item in self.errors):
            return "error"
        if any(item.fix is not None and item.severity != "info" for item in self.diagnostics):
            return "fixable"
        return "ok"

    def require(self) -> FsdpSettings:
        """Return the settings of a file without errors.

        Raises:
            ConfigError: There are errors; the message is the first one, with its place.
        """
        if self.errors or self.settings is None:
            first = self.errors[0] if self.errors else None
            if first is None:
                raise ConfigError(f"{self.path or 'the configuration'} holds no FSDP settings")
            place = (
                f"{first.path or 'configuration'}:{first.line}:{first.column}: "
                if first.line
                else (f"{first.path}: " if first.path else "")
            )
            raise ConfigError(f"{place}{first.code} {first.message}", help=first.help)
        return self.settings
