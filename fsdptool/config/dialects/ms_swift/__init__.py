"""ms-swift's files and command lines: only the run that they describe is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.config.dialects.protocol import RunFormat

if TYPE_CHECKING:
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.files.tree import Node
    from fsdptool.records.described_run import DescribedRun

_OWN = frozenset({"tuner_type", "train_type", "sft_type", "rlhf_type"})
_MEGATRON = frozenset([
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "micro_batch_size", "recompute_granularity", "attention_backend",
])  # fmt: skip
"""Keys that only ``megatron sft`` takes, whose files are like those of ``swift sft`` otherwise."""
_COMMON = frozenset([
    "torch_dtype", "per_device_train_batch_size", "target_modules", "attn_impl", "max_length", "lora_rank",
    "num_train_epochs", "split_dataset_ratio",
])  # fmt: skip


class MsSwift(RunFormat):
    """ms-swift's YAML, JSON and command lines."""

    name = "ms-swift"

    def describes(self, root: Node) -> float:
        """Return how surely the mapping is ms-swift's, also under ``args`` of a wrapper."""
        keys = {str(entry.key) for entry in root.entries}
        inner = root.get("args")
        if inner is not None and inner.node.kind == "map" and "model" not in keys:
            return self.describes(inner.node)
        if "model" not in keys and "model_id_or_path" not in keys:
            return 0.0
        if keys & {"model_name_or_path", "base_model", "model_class"}:
            return 0.0
        if "tensor_model_parallel_size" in keys and not keys & _OWN:
            return 0.0
        if keys & _OWN:
            return 1.0
        return 0.92 if len(keys & _COMMON) >= 3 and "dataset" in keys else 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line is ``swift sft``, or the module behind it."""
        if launch.program in ("swift", "megatron") or launch.script.startswith("swift.cli"):
            return 1.0
        return 1.0 if "sft_type" in names or ("model" in names and names & _OWN) else 0.0

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the run of a file or a command line."""
        megatron = file.launch.program == "megatron" or "_megatron" in file.launch.script
        if megatron or (not file.launch.program and file.data.keys() & _MEGATRON):
            from fsdptool.config.dialects.ms_swift.megatron import describe as describe_megatron

            return describe_megatron(file)
        from fsdptool.config.dialects.ms_swift.run import describe

        return describe(file)
