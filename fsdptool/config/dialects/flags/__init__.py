"""Command lines: ``accelerate launch`` flags, or SimpleTuner's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.shell import parse_flags, sniff

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document, Node
    from fsdptool.records.sharding import FsdpSettings

CANNOT = ("ignored_modules", "use_cpu")
_SIMPLETUNER = frozenset([
    "fsdp_enable", "context_parallel_size", "context_parallel_comm_strategy", "fsdp_cpu_offload",
    "model_family",
])  # fmt: skip


class Flags(Dialect):
    """A command line; SimpleTuner's are told by the flags that only it has."""

    name = "flags"
    consumers = ("accelerate", "fsdptool", "simpletuner")
    cannot = CANNOT
    in_place = False

    def sniff(self, text: str) -> bool:
        """Whether the text is a command line."""
        return sniff(text) == "flags"

    def parse(self, source: SourceText) -> Document:
        """Read the flags."""
        return parse_flags(source.text)

    def consumer_of(self, root: Node) -> str:
        """Return ``simpletuner`` for its flags."""
        names = {str(entry.key).lstrip("-").replace("-", "_").lower() for entry in root.entries}
        return "simpletuner" if names & _SIMPLETUNER and "use_fsdp" not in names else "accelerate"

    def read(self, lint: LintContext) -> None:
        """Read the flags into facts."""
        from fsdptool.config.dialects.flags.reader import read_accelerate
        from fsdptool.config.dialects.simpletuner import reader as simpletuner

        if lint.consumer.name == "simpletuner":
            lint.migration_refusal = "change the command line to --fsdp_version 2 by hand"
        if self.consumer_of(lint.root) == "simpletuner":
            simpletuner.read(lint)
        else:
            read_accelerate(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return ``accelerate launch`` flags, one per line."""
        from fsdptool.config.dialects.flags.reader import write

        return write(settings, header)
