"""Environment variables: ``FSDP_*``, ``ACCELERATE_*`` and ``PARALLELISM_CONFIG_*`` assignments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.config.canonical import LAUNCH
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.shell import parse_environment, sniff

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document
    from fsdptool.records.sharding import FsdpSettings

CANNOT = tuple(name for name in LAUNCH if name not in ("use_cpu", "debug"))


class Environment(Dialect):
    """What accelerate's plugin reads where no launcher sets it."""

    name = "env"
    consumers = ("accelerate", "fsdptool")
    cannot = CANNOT
    in_place = False

    def sniff(self, text: str) -> bool:
        """Whether the text is a list of assignments."""
        return sniff(text) == "env"

    def parse(self, source: SourceText) -> Document:
        """Read the assignments."""
        return parse_environment(source.text)

    def read(self, lint: LintContext) -> None:
        """Read the assignments into facts."""
        from fsdptool.config.dialects.environment.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return ``export`` lines."""
        from fsdptool.config.dialects.environment.reader import write

        return write(settings, header)
