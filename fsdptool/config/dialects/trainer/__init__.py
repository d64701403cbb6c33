"""transformers' TrainingArguments: ``fsdp`` and ``fsdp_config``, alone in a file or among other arguments.

Source: transformers 5.23.0 ``training_args.py:_process_fsdp_args``. Two forms are read: the file
given as ``fsdp_config`` (its keys at the top), and a file of TrainingArguments with both keys.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import (
    ACCELERATE_ONLY,
    LAUNCH,
    MESH,
    WRITTEN,
    check_expressible,
    values_written,
)
from fsdptool.config.dialects.protocol import Dialect, LintContext
from fsdptool.config.dialects.trainer.fsdp_config import (
    ELSEWHERE,
    FSDP1,
    KEYS,
    XLA_KEYS,
    judge_truth,
    read_config,
)
from fsdptool.config.dialects.trainer.switch import OLD_ARGUMENTS, has_old_arguments
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, Node, effective_entries, to_python

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext, Rewriter, Target
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.files.tree import Node
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.sharding import FsdpSettings

NAME = "trainer"
_COMMON_WORDS = frozenset({"version", "offload"})

ARGUMENTS = frozenset([
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "learning_rate",
    "gradient_accumulation_steps", "lr_scheduler_type", "save_strategy", "logging_steps", "report_to",
    "bf16", "fp16", "gradient_checkpointing", "max_steps", "save_only_model", "deepspeed", "optim",
    "activation_checkpointing",
])  # fmt: skip
_NOT_ALONE = frozenset([
    "stage", "finetuning_type", "base_model", "model_family", "tuner_type", "train_type", "sft_type",
    "rlhf_type", "num_generations", "use_peft", "max_length", "max_seq_length", "dataset_mixture",
])  # fmt: skip
"""Keys of the programs that add their own to TrainingArguments."""
CANNOT = (*ACCELERATE_ONLY, *MESH, "cp_comm_strategy", *LAUNCH)


def mapping(settings: FsdpSettings, name: str = NAME, cannot: tuple[str, ...] = CANNOT) -> dict[str, Any]:
    """Return ``fsdp``, precision and ``fsdp_config`` as TrainingArguments hold them.

    Args:
        settings: What is to be written.
        name: Name of the dialect, for the message.
        cannot: Canonical settings that the dialect cannot express.

    Raises:
        ConfigError: The dialect cannot express a setting.
    """
    check_expressible(settings, name, cannot)
    config = values_written(settings, KEYS)
    if settings.wrap_classes:
        config["transformer_layer_cls_to_wrap"] = list(settings.wrap_classes)
    precision = settings.mixed_precision
    if precision == "fp8":
        raise ConfigError(f"{name} cannot express mixed_precision = 'fp8'", help="write accelerate instead")
    return {"fsdp": True, "bf16": precision == "bf16", "fp16": precision == "fp16", "fsdp_config": config}


class Trainer(Dialect):
    """transformers' TrainingArguments, or the file that their ``fsdp_config`` names."""

    name = "trainer"
    consumers: tuple[str, ...] = ("trainer", "llamafactory")
    cannot: tuple[str, ...] = CANNOT

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
        known = bare & (set(KEYS) | set(FSDP1) | set(ELSEWHERE) | set(XLA_KEYS))
        if not known - _COMMON_WORDS and known != bare:  # files of all kinds have a version
            return 0.0
        if len(known) * 2 >= len(bare - {"xla_fsdp_settings"}):
            return 0.85
        return 0.3 if len(keys) < 12 else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        read(lint)

    def describes(self, root: Node) -> float:
        """Return how surely the mapping holds TrainingArguments, with or without FSDP."""
        keys = {str(entry.key) for entry in root.entries}
        if keys & _NOT_ALONE or len(keys & ARGUMENTS) < 3:
            return 0.0
        return 0.91 if "per_device_train_batch_size" in keys or "output_dir" in keys else 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line is that of a script with TrainingArguments."""
        own = {"output_dir", "per_device_train_batch_size", "num_train_epochs", "per_device_eval_batch_size"}
        from fsdptool.config.dialects.trainer.run_keys import MODELS, script_of

        if names & own and script_of(launch.script) is not None:
            return 0.97
        known = "model_name_or_path" in names and bool(names & own)
        known = known or bool(names & {*MODELS} and "per_device_train_batch_size" in names)
        return (
            0.91 if known and launch.program in ("python", "torchrun", "accelerate", "deepspeed", "") else 0.0
        )

    def describe(self, file: RunFile) -> DescribedRun | None:
        """Return the run of a file or a command line; None where it is told not to train."""
        from fsdptool.config.dialects.trainer.run import describe

        return describe(file)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return TrainingArguments as JSON (``HfArgumentParser.parse_json_file`` reads them).

        Raises:
            ConfigError: As :func:`mapping`.
        """
        return json.dumps(mapping(settings), indent=2) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place."""
        block = None if lint.root.get("fsdp_config") is None else "fsdp_config"
        if lint.fsdp_entry is not None and block is None:
            steps.apply(steps.editor.add(steps.root, None, {"fsdp_config": {"version": 2}}), "fsdp_config")
            block = "fsdp_config"
        for key in (*KEYS, *FSDP1):
            parent, _ = steps.block(block)
            if parent.kind == "map" and parent.get(f"fsdp_{key}") is not None:
                steps.drop(block, key)
        steps.drop(
            block,
            *FSDP1,
            *(f"fsdp_{key}" for key in FSDP1),
        )
        steps.put(block, "reshard_after_forward", target.reshard, synonyms=("fsdp_reshard_after_forward",))
        steps.put(
            block,
            "state_dict_type",
            WRITTEN["state_dict_type"][target.state_dict],
            synonyms=("fsdp_state_dict_type",),
        )
        steps.put(block, "version", 2, synonyms=("fsdp_version",))
        switch = steps.root.get("fsdp") if block is not None else None
        if switch is not None and to_python(switch.node) is not True:
            value = to_python(switch.node)
            offload = "offload" in (value if isinstance(value, list) else str(value).split())
            if (offload and lint.facts["cpu_offload"].entry is switch) or lint.get("cpu_offload"):
                steps.put(block, "cpu_offload", True, synonyms=("fsdp_cpu_offload",))
            switch = steps.root.get("fsdp")
            assert switch is not None
            steps.apply(steps.editor.replace_entry(switch, True), "fsdp")
        return {}


def read(lint: LintContext) -> None:
    """Read either form into facts."""
    lint.names = {canonical: key for key, canonical in KEYS.items()}
    root = lint.root
    arguments = root.get("fsdp") is not None or root.get("fsdp_config") is not None
    block: Node | None = root
    if arguments:
        block = read_arguments(lint)
        _alone(lint)
    if not lint.configures_fsdp:
        return
    read_config(lint, block)


def _alone(lint: LintContext) -> None:
    """Nothing but ``fsdp`` and ``fsdp_config``: perhaps meant as the file that ``fsdp_config`` names."""
    keys = {str(entry.key) for entry in lint.root.entries if not str(entry.key).startswith("_")}
    entry = lint.root.get("fsdp_config")
    if lint.document.language == "flags":
        return
    if keys == {"fsdp", "fsdp_config"} and entry is not None and entry.node.kind == "map":
        lint.report(
            "FSD355",
            "valid as TrainingArguments only: given as --fsdp_config, no key of this file is read",
            entry,
            help="for --fsdp_config, keep what is inside fsdp_config and pass --fsdp on the command line",
        )


def read_arguments(lint: LintContext) -> Node | None:
    """Read the arguments around ``fsdp_config``; return the block, or None when it lies in another file."""
    root = lint.root
    _precision(lint)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        entry = root.get(key)
        if entry is not None and entry.node.value is True:
            lint.gradient_checkpointing = entry
    only = root.get("save_only_model")
    if only is not None and only.node.value is True:
        best = root.get("load_best_model_at_end")
        lint.save_only_model = only
        lint.loads_best_model = best is not None and best.node.value is True
    deepspeed = root.get("deepspeed")
    if deepspeed is not None and to_python(deepspeed.node):
        lint.deepspeed = True
    for old in OLD_ARGUMENTS:
        entry = root.get(old)
        if entry is not None and not has_old_arguments(lint):
            lint.ignore(entry, "not an argument of transformers 5")
            lint.report(
                "FSD211",
                f"{old} is not an argument of transformers 5: it belongs in fsdp_config",
                entry,
                severity="error",
                help=f"write it in fsdp_config as {old.removeprefix('fsdp_')}",
                edits=_move_old(lint, entry),
                safe=False,
                fix="move it into fsdp_config",
                changes={"wrap_classes": entry.node.value},
            )
    entry = root.get("fsdp_config")
    lint.fsdp_entry = entry or root.get("fsdp")
    block: Node | None = None
    if entry is not None and entry.node.kind == "map":
        block = entry.node
    elif entry is not None and isinstance(entry.node.value, str):
        lint.config_path = entry.node.value
    elif entry is not None and entry.node.value is not None:
        lint.report_value("FSD205", "fsdp_config must be a mapping or the path of one", entry)
    switch = root.get("fsdp")
    if switch is None or not to_python(switch.node):
        return _off(lint, switch, block)
    return block


def _move_old(lint: LintContext, entry: Entry) -> Any:
    removed = lint.editor.remove(lint.root, entry)
    target = lint.root.get("fsdp_config")
    key = str(entry.key).removeprefix("fsdp_")
    values_ = {key: to_python(entry.node)}
    added = (
        lint.editor.add(target.node, target, values_)
        if target
        else lint.editor.add(lint.root, None, {"fsdp_config": values_})
    )
    return (*removed, *added) if removed is not None and added is not None else None


def _off(lint: LintContext, switch: Entry | None, block: Node | None) -> Node | None:
    """``fsdp`` missing or false: transformers never looks at ``fsdp_config``."""
    lint.runs_fsdp = False
    lint.configures_fsdp = False
    if block is not None and block.entries:
        for entry in effective_entries(block):
            lint.ignore(entry, "fsdp is not enabled")
        if switch is None:
            edits = lint.editor.add(lint.root, None, {"fsdp": True})
        else:
            edits = lint.editor.replace(switch.node, True)
        lint.report(
            "FSD330",
            "fsdp_config has no effect: fsdp is not enabled",
            lint.root.get("fsdp_config"),
            edits=edits,
            safe=False,
            fix="write fsdp: true",
            changes={"*": True},
        )
    else:
        lint.report("FSD113", "the arguments do not enable FSDP")
    return block


def _precision(lint: LintContext) -> None:
    """Read ``fp16`` and ``bf16``; a file's values go into TrainingArguments as they are (TRL parses text)."""
    lint.set("mixed_precision", "no")
    on: list[Entry] = []
    for key in ("fp16", "bf16"):  # in the order in which transformers 5.23 looks
        entry = lint.root.get(key)
        if entry is None:
            continue
        value = to_python(entry.node)
        parsed = lint.consumer.name == "trl" and isinstance(value, str)
        if not parsed:
            judge_truth(lint, key, "mixed_precision", entry, value)
        if spelling.boolean(value) if parsed else value:
            on.append(entry)
    if on:
        lint.set("mixed_precision", str(on[0].key), entry=on[0])
    if len(on) > 1:
        message = "fp16 and bf16 are both true; TrainingArguments take at most one"
        lint.report_value("FSD206", message, on[-1], help="keep the one that the GPU supports")
