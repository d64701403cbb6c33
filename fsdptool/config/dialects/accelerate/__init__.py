"""accelerate's YAML (or JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects.protocol import Dialect

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.tree import Node
    from fsdptool.records.sharding import FsdpSettings


class Accelerate(Dialect):
    """accelerate's YAML (or JSON)."""

    name = "accelerate"
    consumers = ("accelerate", "fsdptool")

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is accelerate's, 0 to 1."""
        keys = {entry.key for entry in root.entries}
        if "distributed_type" in keys:
            return 1.0
        if keys & {"compute_environment", "main_training_function", "rdzv_backend", "parallelism_config"}:
            return 0.9
        block = root.get("fsdp_config")
        if block and "num_processes" in keys and "num_machines" in keys:
            return 0.8
        return 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.accelerate.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the file."""
        from fsdptool.config.dialects.accelerate.mapping import write

        return write(settings, header)

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place."""
        from fsdptool.config.dialects.accelerate.mapping import migrate

        return migrate(steps, lint, target)
