"""LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.dialects.trainer.mapping import CANNOT

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.tree import Node
    from fsdptool.records.settings import FsdpSettings

_OWN = frozenset(
    ["stage", "finetuning_type", "cutoff_len", "template", "dataset", "do_train", "lora_target", "plot_loss"]
)
_V1 = frozenset([
    "dist_config", "train_dataset", "sample_backend", "init_config", "kernel_config", "model_class",
    "cutoff_len",
])  # fmt: skip


class LlamaFactory(Dialect):
    """LLaMA-Factory's YAML."""

    name = "llamafactory"
    consumers = ("llamafactory",)
    cannot = CANNOT

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is LLaMA-Factory's."""
        keys = {str(entry.key) for entry in root.entries}
        if len(keys & _OWN) >= 2 and "base_model" not in keys:
            return 1.0
        return 0.95 if "dist_config" in keys and len(keys & _V1) >= 2 else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.llamafactory.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the file."""
        from fsdptool.config.dialects.llamafactory.reader import write

        return write(settings, header)

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place."""
        from fsdptool.config.dialects.trainer.mapping import migrate

        return migrate(steps, lint, target)
