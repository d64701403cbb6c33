"""LLaMA-Factory's YAML: TrainingArguments with keys of its own; v1 files say ``dist_config``.

Read, not run. The FSDP keys are transformers' and are read by the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool import spelling
from fsdptool.config.canonical import MESH
from fsdptool.config.dialects.trainer import Trainer, mapping, read_arguments
from fsdptool.config.dialects.trainer.fsdp_config import KEYS, read_config
from fsdptool.files.tree import Entry, Node, to_python

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.sharding import FsdpSettings

_OWN = frozenset(
    ["stage", "finetuning_type", "cutoff_len", "template", "dataset", "do_train", "lora_target", "plot_loss"]
)
_V1 = frozenset([
    "dist_config", "train_dataset", "sample_backend", "init_config", "kernel_config", "model_class",
    "cutoff_len",
])  # fmt: skip


class LlamaFactory(Trainer):
    """LLaMA-Factory's YAML."""

    name = "llamafactory"
    consumers = ("llamafactory",)

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is LLaMA-Factory's."""
        keys = {str(entry.key) for entry in root.entries}
        if len(keys & _OWN) >= 2 and "base_model" not in keys:
            return 1.0
        return 0.95 if "dist_config" in keys and len(keys & _V1) >= 2 else 0.0

    def describes(self, root: Node) -> float:
        """Return :meth:`matches`, and the v1 format without ``dist_config`` as well."""
        keys = {str(entry.key) for entry in root.entries}
        if "model" in keys and len(keys & (_V1 | {"micro_batch_size", "peft_config"})) >= 3:
            return 1.0
        if "model_name_or_path" not in keys or keys & {"export_dir", "infer_backend"}:
            return 0.0
        return 1.0 if {"stage", "finetuning_type"} & keys or len(keys & _OWN) >= 2 else 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line is ``llamafactory-cli train`` or its script."""
        if launch.program in ("llamafactory-cli", "lmf") or launch.script.startswith("llamafactory."):
            return 1.0
        return 1.0 if {"stage", "finetuning_type"} & names and "model_name_or_path" in names else 0.0

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the run of a file or a command line."""
        from fsdptool.config.dialects.llamafactory.run import describe

        return describe(file)

    def write_run(self, to: RunWriter) -> None:
        """Set the keys of a file."""
        from fsdptool.config.dialects.llamafactory.write import write

        write(to)

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        lint.names = {canonical: key for key, canonical in KEYS.items()}
        dist = lint.root.get("dist_config")
        if dist is not None and dist.node.kind == "map":
            _read_v1(lint, dist)
            return
        root = lint.root
        if root.get("fsdp") is None and root.get("fsdp_config") is None:
            deepspeed = root.get("deepspeed")
            lint.runs_fsdp = False
            lint.configures_fsdp = False
            why = (
                "it uses DeepSpeed"
                if deepspeed is not None and to_python(deepspeed.node)
                else ("FSDP can only come from the accelerate file it is launched with")
            )
            lint.report("FSD113", f"the file does not configure FSDP: {why}")
            return
        block = read_arguments(lint)
        if lint.configures_fsdp:
            read_config(lint, block)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the FSDP part of a file, in YAML.

        Raises:
            ConfigError: TrainingArguments have no word for a setting.
        """
        from fsdptool.config.edits import block_lines

        top = {"stage": "sft", "finetuning_type": "full", **mapping(settings, self.name)}
        return "\n".join([*(f"# {line}" if line else "#" for line in header), *block_lines(top)]) + "\n"


def _read_v1(lint: LintContext, dist: Entry) -> None:
    root = lint.root
    kind = dist.node.get("name")
    name = str(kind.node.value) if kind is not None else ""
    lint.fsdp_entry = dist
    entry = root.get("bf16")
    lint.set(
        "mixed_precision", "bf16" if entry is not None and entry.node.value is True else "no", entry=entry
    )
    cp = root.get("cp_size")
    size = spelling.integer(cp.node.value) if cp is not None else 1
    mode = root.get("cp_mode")
    ulysses = mode is not None and str(mode.node.value).lower() == "ulysses"
    if name != "fsdp2":
        lint.runs_fsdp = False
        lint.configures_fsdp = False
        lint.report_value(
            "FSD110",
            f"dist_config {name!r} is LLaMA-Factory's own engine, not FSDP2 as accelerate runs it",
            kind or dist,
        )
        return
    lint.set("fsdp_version", 2, entry=kind)
    for key, value in (
        ("reshard_after_forward", True),
        ("wrap_policy", "transformer"),
        ("wrap_classes", ()),
        ("state_dict_type", "sharded"),
        ("cpu_offload", False),
        ("cpu_ram_efficient_loading", False),
        ("activation_checkpointing", False),
        *((name, None if name == "dp_shard" else 1) for name in MESH),
    ):
        lint.set(key, value)
    lint.set("cp", 1 if ulysses else size or 1, entry=cp)
    if ulysses and (size or 1) > 1:
        # Its own Ulysses attention, beside FSDP2 and not through accelerate's parallelism_config.
        lint.ignore(mode, "LLaMA-Factory splits sequences itself")  # type: ignore[arg-type]
