"""SimpleTuner's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.dialects.simpletuner.mapping import CANNOT

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document, Node
    from fsdptool.records.sharding import FsdpSettings


class SimpleTuner(Dialect):
    """SimpleTuner's ``config.json``."""

    name = "simpletuner"
    consumers = ("simpletuner",)
    cannot = CANNOT

    def parse(self, source: SourceText) -> Document | None:
        """Read JSON whatever the file is called."""
        from fsdptool.files.json_tree import parse_json_source

        return parse_json_source(source) if source.text.lstrip()[:1] == "{" else None

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is SimpleTuner's."""
        keys = {str(entry.key).lstrip("-").replace("-", "_").lower() for entry in root.entries}
        own = {"model_flavour", "data_backend_config", "model_type", "lora_rank"}
        if "model_family" in keys and keys & own:
            return 1.0
        return 0.95 if keys & {"fsdp_enable", "context_parallel_comm_strategy"} else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.simpletuner.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the file."""
        from fsdptool.config.dialects.simpletuner.mapping import write

        return write(settings, header)

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place."""
        from fsdptool.config.dialects.simpletuner.mapping import migrate

        return migrate(steps, lint, target)
