"""NVIDIA NeMo AutoModel's YAML: only the run that it describes is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.config.dialects.protocol import RunFormat
from fsdptool.files.tree import walk

if TYPE_CHECKING:
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.files.tree import Node
    from fsdptool.records.described_run import DescribedRun


class AutoModel(RunFormat):
    """NeMo AutoModel's YAML."""

    name = "automodel"

    def describes(self, root: Node) -> float:
        """Return how surely the mapping is AutoModel's: its scheduler, and classes of its package."""
        keys = {str(entry.key) for entry in root.entries}
        if "recipe_args" in keys and "model" not in keys:  # recipes of draft models for speculative decoding
            recipe, arguments = root.get("recipe"), root.get("recipe_args")
            if recipe is None or arguments is None or arguments.node.kind != "map":
                return 0.0
            return 0.95 if str(recipe.node.value).startswith("Train") else 0.0
        if "model" not in keys or "actor_rollout_ref" in keys:
            return 0.0
        own = any(
            isinstance(node.value, str) and node.value.startswith("nemo_automodel.") for node in walk(root)
        )
        if own:
            return 1.0
        return 0.95 if "step_scheduler" in keys and keys & {"distributed", "fsdp", "ddp", "recipe"} else 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line starts AutoModel."""
        return 1.0 if launch.program == "automodel" or launch.script.startswith("nemo_automodel.") else 0.0

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the run of a file."""
        from fsdptool.config.dialects.automodel.run import describe

        return describe(file)

    def write_run(self, to: RunWriter) -> None:
        """Set the keys of a file."""
        from fsdptool.config.dialects.automodel.write import write

        write(to)
