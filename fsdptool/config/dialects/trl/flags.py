"""The flags of a TRL command line as keys of a TRL file, and those that no file holds.

Sources: TRL 1.16.0 ``scripts/utils.py`` (``set_defaults_with_config``: a file's values become defaults of
argparse, which converts texts and takes lists as they are), ``cli/commands/training.py`` (other keys go to
``accelerate launch``), ``trainer/base_config.py`` (bf16 unless fp16).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fsdptool.config.dialects.run_reader import Launch, names, number_of
from fsdptool.config.dialects.run_writer import RunWriter, word_of
from fsdptool.config.dialects.trl.run_keys import KEYS
from fsdptool.config.key_history import default_of, has_key
from fsdptool.records.config_documents import Loss

_TRANSFORMERS = "5.23.0"
_CONFIGS = {
    "sft": "SFTConfig", "pretrain": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig",
    "grpo": "GRPOConfig", "reward": "RewardConfig",
}  # fmt: skip
_SHARED = ("ModelConfig", "ScriptArguments", "DatasetMixtureConfig")
_OF_GRPO = ("reward_funcs", "reward_model_name_or_path")
"""Keys of the GRPO script's own arguments (``scripts/grpo.py``)."""
_HANDED_ON = names("""
    accelerate_config env num_processes num_machines machine_rank main_process_ip main_process_port
    mixed_precision gpu_ids rdzv_backend
""")
"""Keys of a file that no trainer reads and that ``trl`` takes for the launch."""
REPLACED = {
    "warmup_ratio": "warmup_steps",
    "torch_dtype": "dtype",
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
}
"""Keys that transformers 5.23 and TRL 1.16 take no longer, and those in their place."""
_OPTIONAL = names("""
    activation_checkpointing center_rewards_coefficient completion_only_loss data_seed
    dataloader_prefetch_factor dataset_num_proc ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_static_graph delta disable_tqdm epsilon_high eval_accumulation_steps
    eval_packing eval_steps generation_batch_size greater_is_better hub_private_repo ld_alpha
    max_tool_calling_iterations min_p neftune_noise_alpha num_completions_to_print num_generations_eval
    off_policy_mask_threshold precompute_ref_batch_size router_aux_loss_coef save_total_limit
    steps_per_generation test_split_size tf32 torch_empty_cache_steps vllm_importance_sampling_cap
    vllm_importance_sampling_clip_min vllm_max_model_length
    bf16 include_num_input_tokens_seen num_processes num_machines machine_rank main_process_port
""")
"""Keys of numbers and truths whose defaults do not show it: they have none."""
_NUMBERS_OF_LISTS = ("loss_weights", "reward_weights")
_LISTS = names("""
    include_for_metrics label_names lora_modules_to_save lora_target_modules lora_target_parameters
    reward_funcs
""")
_VARIABLE = re.compile(r"\$[A-Za-z_{(]|`")
_BY_FACTS = names("""
    config_file use_fsdp multi_gpu m module standalone fsdp_version fsdp_transformer_layer_cls_to_wrap
    fsdp_reshard_after_forward fsdp_offload_params fsdp_activation_checkpointing
""")
"""Flags of a launch that are facts of the run, which are compared, or that say nothing by themselves."""
_RANKS = {
    "num_processes": "num_processes", "nproc_per_node": "num_processes", "num_gpus": "num_processes",
    "num_machines": "num_machines", "nnodes": "num_machines", "num_nodes": "num_machines",
}  # fmt: skip


def keep(writer: RunWriter, given: Mapping[str, Any], launch: Launch) -> tuple[Loss, ...]:
    """Put the flags of a command line first, as they are, and what the writer adds to them behind.

    Args:
        writer: Holds the keys that the run itself needs.
        given: The flags with their values.
        launch: What starts the program.

    Returns:
        The flags that the file does not hold, with the reason.
    """
    objective = writer.run.objective or "sft"
    flags: dict[str, Any] = {}
    losses = []
    for old, value in given.items():
        key = REPLACED.get(old, old)
        if key != old and key in given:
            continue
        if _VARIABLE.search(str(value)):
            why = "a variable that is not known here: put its value into the file"
            losses.append(Loss(old, str(value), word_of(writer.data.get(key)), why))
        elif not takes(objective, key):
            why = f"TRL {KEYS.version} refuses it in a file for {objective}"
            losses.append(Loss(old, word_of(value), None, why))
        elif key != old and key in writer.data:
            flags[key] = writer.data[key]
        else:
            flags[key] = typed(objective, key, value)
    writer.data = {**flags, **{key: value for key, value in writer.data.items() if key not in flags}}
    for key in flags:
        writer.asked.pop(key, None)
    return (*losses, *_of_launch(writer, launch))


def takes(objective: str, key: str) -> bool:
    """Return whether TRL reads a key of a file for a trainer, or hands it on to the launch."""
    if key in _HANDED_ON or (objective == "grpo" and key in _OF_GRPO):
        return True
    own = has_key("trl", (_CONFIGS[objective], *_SHARED), key, KEYS.version)
    return bool(own or has_key("transformers", ("arguments",), key, _TRANSFORMERS))


def typed(objective: str, key: str, value: Any) -> Any:
    """Return the value of a flag as a file holds it.

    Words become numbers and truths for keys of those alone: argparse converts every other text by the type of
    its key. A list it does not convert, and one word for a list it would leave a text.
    """
    if key in _LISTS or key in _NUMBERS_OF_LISTS or (key == "loss_type" and objective == "dpo"):
        items = value if isinstance(value, list) else [value]
        return [_number(item) for item in items] if key in _NUMBERS_OF_LISTS else items
    return _number(value) if is_number(objective, key) else value


def is_number(objective: str, key: str) -> bool:
    """Return whether a key is one of numbers or truths."""
    if key in _OPTIONAL:
        return True
    for package, group, version in (
        *(("trl", group, KEYS.version) for group in (_CONFIGS[objective], *_SHARED)),
        ("transformers", "arguments", _TRANSFORMERS),
    ):
        try:
            default = default_of(package, group, key, version)
        except LookupError:
            continue
        if isinstance(default, bool | int | float):
            return True
    return False


def _number(value: Any) -> Any:
    return number_of(value) if isinstance(value, str) else value


def _of_launch(writer: RunWriter, launch: Launch) -> Iterator[Loss]:
    """Yield the flags of ``accelerate launch`` and ``torchrun`` that the file does not say."""
    block = writer.data.get("fsdp_config")
    sharding = block if isinstance(block, dict) else {}
    for name, value in launch.flags.items():
        why = "given at the launch, and not written"
        becomes = None
        if name in _BY_FACTS:
            continue
        if name in _RANKS:
            written = writer.data.get(_RANKS[name])
            one = _RANKS[name] == "num_machines" and str(value) == "1"
            if one or written is not None:
                continue
        elif name == "mixed_precision":
            becomes = next((word for word in ("bf16", "fp16") if writer.data.get(word) is True), "no")
            why = "the trainer's own keys decide: bf16, unless the flags say fp16"
        elif name.startswith("fsdp_"):
            becomes = word_of(sharding.get(name.removeprefix("fsdp_")))
        if becomes is None or becomes.lower() != str(value).lower():
            yield Loss(name, word_of(value), becomes, why)
