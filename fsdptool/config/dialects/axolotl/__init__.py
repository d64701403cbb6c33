"""axolotl's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects.axolotl.mapping import CANNOT
from fsdptool.config.dialects.protocol import Dialect

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.tree import Node
    from fsdptool.records.sharding import FsdpSettings


class Axolotl(Dialect):
    """axolotl's YAML."""

    name = "axolotl"
    consumers = ("axolotl",)
    cannot = CANNOT

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is axolotl's."""
        keys = {str(entry.key) for entry in root.entries}
        if "base_model" in keys and keys & {
            "datasets",
            "micro_batch_size",
            "sequence_len",
            "adapter",
            "fsdp_config",
            "output_dir",
            "fsdp_version",
            "chat_template",
        }:
            return 1.0
        if {"fsdp_version", "fsdp_config"} <= keys and "fsdp" not in keys:
            return 0.96
        own = keys & {
            "sequence_len",
            "sample_packing",
            "micro_batch_size",
            "dp_shard_size",
            "tensor_parallel_size",
        }
        return 0.95 if len(own) >= 2 or (own and "fsdp_config" in keys) else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.axolotl.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the file."""
        from fsdptool.config.dialects.axolotl.mapping import write

        return write(settings, header)

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place."""
        from fsdptool.config.dialects.axolotl.mapping import migrate

        return migrate(steps, lint, target)
