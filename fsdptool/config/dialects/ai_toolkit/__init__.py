"""ai-toolkit's YAML: only the run that it describes is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.config.dialects.protocol import RunFormat

if TYPE_CHECKING:
    from fsdptool.config.dialects.run_reader import RunFile
    from fsdptool.files.tree import Node
    from fsdptool.records.described_run import DescribedRun


class AiToolkit(RunFormat):
    """ai-toolkit's job files."""

    name = "ai-toolkit"

    def describes(self, root: Node) -> float:
        """Return 1 for a job with a list of processes below ``config``."""
        config = root.get("config")
        if config is None or config.node.kind != "map":
            return 0.0
        process = config.node.get("process")
        return 1.0 if process is not None and process.node.kind == "list" else 0.0

    def describe(self, file: RunFile) -> DescribedRun | None:
        """Return the run of a file."""
        from fsdptool.config.dialects.ai_toolkit.run import describe

        return describe(file)
