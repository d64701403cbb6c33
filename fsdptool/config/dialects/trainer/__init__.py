"""transformers' TrainingArguments, or the file that their ``fsdp_config`` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.dialects.trainer.mapping import ARGUMENTS, CANNOT, ELSEWHERE, FSDP1_KEYS, KEYS, XLA_KEYS

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.tree import Node
    from fsdptool.records.sharding import FsdpSettings


class Trainer(Dialect):
    """transformers' TrainingArguments, or the file that their ``fsdp_config`` names."""

    name = "trainer"
    consumers = ("trainer", "llamafactory")
    cannot = CANNOT

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is TrainingArguments' or their ``fsdp_config``."""
        keys = {str(entry.key) for entry in root.entries}
        switch = root.get("fsdp")
        if switch is not None and switch.node.kind == "map":
            return 0.0
        if keys & {"fsdp", "fsdp_config"} and not keys & {"base_model", "stage", "model_family"}:
            alone = {key for key in keys if not key.startswith("_")} <= {"fsdp", "fsdp_config"}
            return 0.95 if alone or keys & ARGUMENTS else 0.5
        bare = {key.removeprefix("fsdp_") for key in keys}
        known = bare & (set(KEYS) | set(FSDP1_KEYS) | set(ELSEWHERE) | {"sharding_strategy"} | set(XLA_KEYS))
        if known and len(known) * 2 >= len(bare - {"xla_fsdp_settings"}):
            return 0.85
        return 0.3 if known and len(keys) < 12 else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.trainer.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the file."""
        from fsdptool.config.dialects.trainer.mapping import write

        return write(settings, header)

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place."""
        from fsdptool.config.dialects.trainer.mapping import migrate

        return migrate(steps, lint, target)
