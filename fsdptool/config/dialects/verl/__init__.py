"""verl's command lines and YAML (Hydra): only the run that they describe is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.config.dialects.protocol import RunFormat

if TYPE_CHECKING:
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.files.tree import Node
    from fsdptool.records.described_run import DescribedRun


class Verl(RunFormat):
    """verl's Hydra overrides and files."""

    name = "verl"

    def describes(self, root: Node) -> float:
        """Return how surely the mapping is verl's: the actor's section, or that of its SFT trainers."""
        keys = {str(entry.key) for entry in root.entries}
        if "actor_rollout_ref" in keys:
            return 1.0
        model = root.get("model")
        inner = {str(entry.key) for entry in model.node.entries} if model is not None else set()
        if {"data", "model", "optim", "trainer"} <= keys and inner & {"partial_pretrain", "fsdp_config"}:
            return 1.0
        return 0.95 if {"data", "engine", "trainer"} <= keys else 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line starts one of verl's trainers."""
        if launch.script.startswith("verl."):
            return 1.0
        own = any(name.startswith("actor_rollout_ref.") for name in names)
        return 1.0 if own or {"data.train_files", "model.partial_pretrain"} <= names else 0.0

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the run of a file or a command line."""
        from fsdptool.config.dialects.verl.run import describe

        return describe(file)

    def write_run(self, to: RunWriter) -> None:
        """Set the keys of a file."""
        from fsdptool.config.dialects.verl.write import write

        write(to)
