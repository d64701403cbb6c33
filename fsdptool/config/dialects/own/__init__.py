"""fsdptool's recipes: only the run that they describe is read; their sharding is in an accelerate file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.config.dialects.protocol import RunFormat

if TYPE_CHECKING:
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.files.tree import Node
    from fsdptool.records.described_run import DescribedRun

_SECTIONS = frozenset([
    "method", "objective", "data", "batch", "optimizer", "schedule", "sharding", "checkpoints", "evaluation",
    "ema", "tracking", "steps", "epochs", "seed", "on_nonfinite",
])  # fmt: skip


class OwnRecipe(RunFormat):
    """fsdptool's recipes."""

    name = "fsdptool"

    def describes(self, root: Node) -> float:
        """Return how surely the mapping is a recipe: a model's reference, and sections of recipes alone."""
        model = root.get("model")
        if model is None or model.node.kind != "map" or model.node.get("reference") is None:
            return 0.0
        return 1.0 if {str(entry.key) for entry in root.entries} <= _SECTIONS | {"model"} else 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return 0: ``fsdptool train`` names a recipe, which describes the run."""
        return 0.0

    def describe(self, file: RunFile) -> DescribedRun | None:
        """Return the run of a recipe."""
        from fsdptool.config.dialects.own.run import describe

        return describe(file)

    def write_run(self, to: RunWriter) -> None:
        """Set the text of a recipe, and of the accelerate file beside it."""
        from fsdptool.config.dialects.own.write import write

        write(to)
