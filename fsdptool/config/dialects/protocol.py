"""What a dialect must offer. Authors subclass :class:`Dialect` (docs/config.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.config.consumers import Program

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document, Node
    from fsdptool.records.sharding import FsdpSettings

API_VERSION = 1


class Dialect(ABC):
    """One way to write FSDP settings: how such files are recognised, read, written and migrated.

    Every installed dialect is asked whether a file is its own, so importing the module that holds the
    class should cost little: import the code that reads and writes inside the methods.

    Attributes:
        name: What ``--dialect`` calls it; the entry point bears the same name.
        consumers: The programs that read such files, by name; the first unless somebody says otherwise.
        programs: Those of ``consumers`` that fsdptool does not know.
        cannot: Canonical settings (``canonical.COMMON``) that the dialect has no word for.
        in_place: Whether FSDP1 becomes FSDP2 by edits of the text (:meth:`migrate`); otherwise the file is
            written anew.
    """

    api_version: int = API_VERSION
    name: str
    consumers: tuple[str, ...]
    programs: tuple[Program, ...] = ()
    cannot: tuple[str, ...] = ()
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

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Turn an FSDP1 file into FSDP2 by edits; return what changes besides ``target``.

        Raises:
            NotEditableError: The form of the text does not allow it.
        """
        from fsdptool.config.fsdp1 import NotEditableError

        raise NotEditableError(f"{self.name} files are not migrated in place")
