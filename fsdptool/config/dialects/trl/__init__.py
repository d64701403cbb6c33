"""TRL's YAML: what ``TrlParser`` reads with ``trl sft --config FILE``, TrainingArguments among its own keys.

Sources: TRL 1.16.0 ``trainer/base_config.py`` (defaults), ``scripts/utils.py:TrlParser``,
``cli/commands/training.py`` (what no trainer knows goes to ``accelerate launch``), ``accelerate_configs/``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.dialects.trainer import (
    ARGUMENTS,
    CANNOT,
    Trainer,
    mapping,
    read_arguments,
)
from fsdptool.config.dialects.trainer.fsdp_config import KEYS, read_config
from fsdptool.config.programs import TRAINER_LOOP, Program
from fsdptool.files.tree import Entry, Node, to_python
from fsdptool.records.fused_loss import LossTiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsdptool.config.dialects.protocol import LintContext, Rewriter, Target
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.records.config_documents import Loss
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.sharding import FsdpSettings

_LAUNCH = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""What ``trl`` hands on to ``accelerate launch``."""

_OWN = frozenset([
    "dataset_name", "datasets", "dataset_config", "dataset_train_split", "dataset_test_split",
    "dataset_text_field", "dataset_num_proc", "max_length", "max_seq_length", "packing",
    "assistant_only_loss", "completion_only_loss", "loss_type", "beta", "num_generations",
    "max_completion_length", "use_vllm", "vllm_mode", "use_peft", "lora_target_modules", "lora_r",
    "attn_implementation", "model_revision", "accelerate_config", "chat_template_path", "eos_token",
])  # fmt: skip
_TRAINERS = frozenset([
    "sft", "dpo", "grpo", "kto", "rloo", "orpo", "cpo", "gkd", "reward_modeling", "online_dpo", "nash_md",
    "ppo", "ppo_tldr", "prm", "bco", "xpo",
])  # fmt: skip
"""Scripts that TRL ships (trl/scripts, examples/scripts)."""
_OTHERS = frozenset({"stage", "finetuning_type", "base_model", "accelerate_launch_args"})
"""Keys of LLaMA-Factory, axolotl and fms-hf-tuning, which share many of the others."""

_OF_RUNS = _OWN | {
    "max_prompt_length", "reward_funcs", "dataset_mixture", "load_in_4bit", "load_in_8bit", "torch_dtype",
    "dtype", "reward_weights", "precompute_ref_log_probs", "dataset_id_or_path", "max_seq_length",
    "padding_free",
}  # fmt: skip
"""Keys of TRL's trainers and of the scripts that are written around them."""
_DPO_WITHOUT_LIGER = frozenset([
    "hinge", "ipo", "exo_pair", "robust", "bco_pair", "aot", "aot_pair", "aot_unpaired", "discopop", "sft",
])  # fmt: skip
"""Losses of DPO that are not among those TRL 0.24 computes with Liger (``trainer/dpo_trainer.py``)."""

_SHIPPED: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_version": 2, "reshard_after_forward": True},
    "fsdp1": {
        "fsdp_version": 1, "sharding_strategy": "full_shard", "backward_prefetch": "BACKWARD_PRE",
        "forward_prefetch": True, "use_orig_params": True, "sync_module_states": True,
    },
}  # fmt: skip
"""What TRL's own accelerate configurations say, besides what both say (:data:`_BOTH`)."""

_BOTH: dict[str, Any] = {
    "wrap_policy": "transformer", "wrap_classes": (), "state_dict_type": "full", "cpu_offload": False,
    "cpu_ram_efficient_loading": True, "activation_checkpointing": False, "mixed_precision": "bf16",
    "num_processes": 8,
}  # fmt: skip


_LOOP = replace(
    TRAINER_LOOP,
    loss="chunked",
    tiles=LossTiles(4096, 32768),
    source="TRL 1.16.0 trainer/utils.py (add_fused_lm_head), kernels/chunked_logprob.py (TOKEN_CHUNK_SIZE);"
    " the rest is transformers' Trainer",
    not_planned=("autocast", "whole_loss", "stored_dtype"),
)


class Trl(Trainer):
    """TRL's YAML."""

    name = "trl"
    consumers = ("trl",)
    programs = (Program("trl", "TRL's trainers", "trl", "1.16.0", loop=_LOOP),)
    cannot = tuple(name for name in CANNOT if name not in _LAUNCH)

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is TRL's: a model, and words that TrainingArguments lack."""
        keys = {str(entry.key) for entry in root.entries}
        if "model_name_or_path" not in keys or keys & _OTHERS:
            return 0.0
        return 0.97 if len(keys & _OWN) >= 2 else 0.0

    def describes(self, root: Node) -> float:
        """Return how surely the mapping is a run of one of TRL's trainers, or of a script around them."""
        keys = {str(entry.key) for entry in root.entries}
        if keys & _OTHERS or "model_name_or_path" not in keys:
            return 0.0
        own = keys & _OF_RUNS
        if not own or (len(own) < 2 and not keys & (ARGUMENTS | {"report_to"})):
            return 0.0
        return 0.97 if len(own) > 1 or keys & ARGUMENTS else 0.92

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line is ``trl sft``, or a script with TRL's flags."""
        if launch.program == "trl" or launch.script.startswith("trl.") or ".trl." in f".{launch.script}":
            return 1.0
        script = launch.script.rpartition(".")[2]
        trains = script in _TRAINERS or bool(_TRAINERS & {*script.split("_")})
        if trains and {"dataset_name", "model_name_or_path"} <= names:
            return 0.95
        known = names & {"model_name_or_path", "model_name"} and not names & (_OTHERS | {"model_max_length"})
        return 0.95 if known and len(names & _OF_RUNS) >= 2 else 0.0

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the run of a file or a command line."""
        from fsdptool.config.dialects.trl.run import describe

        return describe(file)

    def write_run(self, to: RunWriter) -> None:
        """Set the keys of a file."""
        from fsdptool.config.dialects.trl.write import write

        write(to)

    def keep_flags(self, to: RunWriter, given: Mapping[str, Any], launch: Launch) -> tuple[Loss, ...]:
        """Put the flags of a TRL command line into its file."""
        from fsdptool.config.dialects.trl.flags import keep

        return keep(to, given, launch)

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.accelerate import launch

        root = lint.root
        lint.names = {canonical: key for key, canonical in KEYS.items()}
        for key in _LAUNCH:
            entry = root.get(key)
            if entry is not None:
                launch.read_top(lint, key, entry, to_python(entry.node))
        _judge_liger(lint)
        _judge_batch(lint)
        if root.get("fsdp") is None and root.get("fsdp_config") is None:
            self._read_launch(lint, root.get("accelerate_config"))
        else:
            block = read_arguments(lint)
            self._precision(lint)
            if lint.configures_fsdp:
                read_config(lint, block)
                self._checkpointing(lint)
        if lint.configures_fsdp:
            _judge_quantisation(lint)

    def _read_launch(self, lint: LintContext, entry: Entry | None) -> None:
        """FSDP comes from what the run is launched with; two such files are TRL's own."""
        name = entry.node.value if entry is not None else None
        own = _SHIPPED.get(name) if isinstance(name, str) else None
        if own is None or entry is None:
            lint.runs_fsdp = lint.configures_fsdp = False
            where = f"{name} (check that file)" if name else "the accelerate file that it is launched with"
            lint.report("FSD113", f"the file does not configure FSDP: that is up to {where}", entry)
            return
        for key, value in {**_BOTH, **own}.items():
            if key not in lint.facts:
                lint.set(key, value, origin=f"TRL's accelerate_configs/{name}.yaml")
        lint.facts["fsdp_version"].entry = entry
        lint.fsdp_entry = entry

    def _precision(self, lint: LintContext) -> None:
        """``bf16`` that is not written is true, unless ``fp16`` is (``_BaseConfig.__post_init__``)."""
        entry = lint.root.get("bf16")
        unwritten = entry is None or to_python(entry.node) is None
        if unwritten and lint.get("mixed_precision") == "no":
            lint.set("mixed_precision", "bf16")

    def _checkpointing(self, lint: LintContext) -> None:
        """``gradient_checkpointing`` is true where it is not written."""
        keys = ("gradient_checkpointing", "activation_checkpointing")
        if not lint.get("activation_checkpointing") or any(lint.root.get(key) is not None for key in keys):
            return
        lint.report(
            "FSD317",
            "gradient_checkpointing is true by default in TRL, on top of FSDP's activation checkpointing",
            "activation_checkpointing",
            edits=lint.editor.add(lint.root, None, {"gradient_checkpointing": False}),
            safe=False,
            fix="write gradient_checkpointing: false",
        )

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the FSDP part of a file, in YAML.

        Raises:
            ConfigError: TRL cannot express a setting.
        """
        from fsdptool.config.edits import block_lines

        arguments = mapping(settings, self.name, self.cannot)
        values: dict[str, Any] = {"model_name_or_path": "MODEL", "dataset_name": "DATASET", "packing": False}
        values |= arguments
        if settings.activation_checkpointing:
            values["gradient_checkpointing"] = False
        for name in _LAUNCH:
            value = getattr(settings, name)
            if value != getattr(type(settings)(), name):
                values[name] = value
        return "\n".join([*(f"# {line}" if line else "#" for line in header), *block_lines(values)]) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place; TRL's own configuration has its FSDP2 form."""
        if lint.root.get("fsdp") is None and lint.root.get("accelerate_config") is not None:
            steps.put(None, "accelerate_config", "fsdp2")
            return {}
        return super().migrate(steps, lint, target)


def _whole_number(lint: LintContext, key: str, default: int | None = None) -> int | None:
    entry = lint.root.get(key)
    if entry is None or entry.node.value is None:
        return default
    value = spelling.integer(entry.node.value)
    return value if value is not None and value > 0 else None


def _judge_quantisation(lint: LintContext) -> None:
    """Read how the base model is quantised; report 4-bit weights that accelerate cannot shard.

    Source: TRL 1.16.0 ``trainer/utils.py:get_quantization_config`` passes ``bnb_4bit_quant_storage`` on,
    which is uint8 where it is not written; accelerate 1.14.0 ``fsdp2_prepare_model`` excludes such weights
    from sharding.
    """
    eight, four = lint.root.get("load_in_8bit"), lint.root.get("load_in_4bit")
    lint.load_in_8bit = eight if eight is not None and eight.node.value is True else None
    storage = lint.root.get("bnb_4bit_quant_storage")
    if four is None or four.node.value is not True or lint.get("fsdp_version") != 2:
        return
    if storage is not None and storage.node.value not in (None, "uint8"):
        return
    if storage is None:
        edits = lint.editor.add(lint.root, None, {"bnb_4bit_quant_storage": "bfloat16"})
    else:
        edits = lint.editor.replace(storage.node, "bfloat16")
    lint.report(
        "FSD346",
        "4-bit weights that are stored as uint8 are not sharded: each GPU holds the whole base",
        four,
        severity="warning",
        help="set bnb_4bit_quant_storage to the dtype of the other weights",
        edits=edits,
        safe=False,
        fix="write bnb_4bit_quant_storage: bfloat16",
    )


def _judge_liger(lint: LintContext) -> None:
    root = lint.root
    switch = root.get("use_liger_kernel")
    if switch is None or not spelling.boolean(switch.node.value):
        return
    config, loss = root.get("liger_kernel_config"), root.get("loss_type")
    inner = config.node.get("fused_linear_cross_entropy") if config and config.node.kind == "map" else None
    if inner is not None and inner.node.value is True and not lint.consumer.before(1, 16):
        lint.report_value("FSD359", f"{lint.consumer} refuses fused_linear_cross_entropy", inner, False)
        return
    losses = to_python(loss.node) if loss is not None else None
    named = [losses] if isinstance(losses, str) else losses if isinstance(losses, list) else []
    refused = [name for name in named if name in _DPO_WITHOUT_LIGER]
    if refused and loss is not None and lint.consumer.before(1, 0):
        lint.report_value("FSD359", f"{lint.consumer} has no Liger kernel for the loss {refused[0]}", loss)


def _judge_batch(lint: LintContext) -> None:
    """What GRPO's configuration refuses (``trainer/grpo_config.py:GRPOConfig.__post_init__``)."""
    entry = lint.root.get("generation_batch_size")
    total = _whole_number(lint, "generation_batch_size")
    processes, each = lint.get("num_processes"), _whole_number(lint, "per_device_train_batch_size", 8)
    if entry is None or total is None or each is None:
        return
    if isinstance(processes, int) and total % (each * processes):
        words = (
            f"{total} is not a multiple of {each} x {processes} (per_device_train_batch_size x num_processes)"
        )
        lint.report_value("FSD360", f"generation_batch_size {words}", entry)
    answers = _whole_number(lint, "num_generations", 8)
    if answers is not None and total % answers:
        lint.report_value(
            "FSD360", f"generation_batch_size {total} is not a multiple of num_generations {answers}", entry
        )
