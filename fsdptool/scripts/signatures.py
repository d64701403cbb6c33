"""Arguments of the calls that set FSDP up, by version: what exists, and what to write instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The arguments of a call.

    Attributes:
        package: Distribution whose version decides.
        names: Every argument, positional ones first.
        positional: How many may be given by position; None: all.
        since: Version of arguments that came later.
        gone: Version without arguments that were there before.
        instead: What to write in place of arguments that do not exist.
        whole: Whether ``names`` has all; else only those of ``gone`` are known not to exist.
    """

    package: str
    names: tuple[str, ...] = ()
    positional: int | None = None
    since: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)
    whole: bool = True

    def lacks(self, name: str, version: str) -> bool:
        """Say whether an argument does not exist in a version."""
        if name in self.gone:
            return not is_older(version, self.gone[name])
        if name in self.since:
            return is_older(version, self.since[name])
        return self.whole and name not in self.names


@cache
def is_older(version: str, than: str) -> bool:
    """Say whether a version is older than another one; a version that cannot be read is not."""
    try:
        return Version(version).release < Version(than).release
    except InvalidVersion:
        return False


_ARGUMENTS = {
    "evaluation_strategy": ("4.46", "eval_strategy"),
    "warmup_ratio": ("5.23", "warmup_steps, which takes a share below 1"),
    "fsdp_transformer_layer_cls_to_wrap": ("5.0", "transformer_layer_cls_to_wrap in fsdp_config"),
    "fsdp_min_num_params": ("5.0", "min_num_params in fsdp_config"),
    "no_cuda": ("5.0", "use_cpu"),
    "overwrite_output_dir": ("5.0", ""),
    "logging_dir": ("5.23", ""),
    "save_safetensors": ("5.0", ""),
    "half_precision_backend": ("5.0", ""),
    "fp16_backend": ("5.0", ""),
    "group_by_length": ("5.23", 'train_sampling_strategy="group_by_length"'),
    "push_to_hub_token": ("5.0", "hub_token"),
    "push_to_hub_model_id": ("5.0", "hub_model_id"),
    "push_to_hub_organization": ("5.0", "hub_model_id"),
    "tpu_num_cores": ("5.0", ""),
    "per_gpu_train_batch_size": ("5.0", "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": ("5.0", "per_device_eval_batch_size"),
}

SIGNATURES = {
    "fully_shard": CallSignature(
        "torch",
        ("module", "mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy",
         "ignored_params", "dp_mesh_dims"),
        positional=1,
        since={"ignored_params": "2.7", "shard_placement_fn": "2.6", "dp_mesh_dims": "2.12"},
        instead={
            "mixed_precision": "mp_policy=MixedPrecisionPolicy(...)",
            "mixed_precision_policy": "mp_policy=",
            "cpu_offload": "offload_policy=CPUOffloadPolicy()",
            "backward_prefetch": "set_modules_to_backward_prefetch",
            "forward_prefetch": "set_modules_to_forward_prefetch",
            "auto_wrap_policy": "fully_shard on each block, then on the model",
            "policy": "fully_shard on each block, then on the model",
            "device_id": "mesh=",
            "device_mesh": "mesh=",
            "process_group": "mesh=",
            "sync_module_states": "set_model_state_dict with broadcast_from_rank0=True",
            "sharding_strategy": "reshard_after_forward=",
            "ignored_modules": "ignored_params=",
            "use_orig_params": "nothing: FSDP2 keeps the parameters",
            "limit_all_gathers": "nothing: FSDP2 does this by itself",
        },
    ),
    "MixedPrecisionPolicy": CallSignature(
        "torch", ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
        instead={"buffer_dtype": "nothing: cast the buffers yourself"},
    ),
    "CPUOffloadPolicy": CallSignature("torch", ("pin_memory",),
    instead={"offload_params": "nothing: it offloads"}),
    "FullyShardedDataParallel": CallSignature(
        "torch",
        ("module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy",
        "backward_prefetch",
         "mixed_precision", "ignored_modules", "param_init_fn", "device_id", "sync_module_states",
         "forward_prefetch",
         "limit_all_gathers", "use_orig_params", "ignored_states", "device_mesh"),
        since={"device_mesh": "2.2"},
        instead={
            "fsdp_auto_wrap_policy": "auto_wrap_policy=",
            "flatten_parameters": "use_orig_params=",
            "mp_policy": "mixed_precision=MixedPrecision(...)",
            "offload_policy": "cpu_offload=CPUOffload(...)",
            "mesh": "device_mesh=",
            "reshard_after_forward": "sharding_strategy=",
            "ignored_parameters": "ignored_states=",
            "reshard_after_backward": "sharding_strategy=",
        },
    ),
    "MixedPrecision": CallSignature(
        "torch",
        ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads", "cast_forward_inputs",
         "cast_root_forward_inputs", "_module_classes_to_ignore"),
    ),
    "CPUOffload": CallSignature("torch", ("offload_params",)),
    "FullStateDictConfig": CallSignature("torch", ("offload_to_cpu", "rank0_only")),
    "FullOptimStateDictConfig": CallSignature("torch", ("offload_to_cpu", "rank0_only")),
    "ShardedStateDictConfig": CallSignature("torch", ("offload_to_cpu", "_use_dtensor")),
    "ShardedOptimStateDictConfig": CallSignature("torch", ("offload_to_cpu", "_use_dtensor")),
    "LocalStateDictConfig": CallSignature("torch", ("offload_to_cpu",)),
    "StateDictOptions": CallSignature(
        "torch",
        ("full_state_dict", "cpu_offload", "ignore_frozen_params", "keep_submodule_prefixes", "strict",
         "broadcast_from_rank0", "flatten_optimizer_state_dict", "dsd_fqn_modifiers"),
        since={"broadcast_from_rank0": "2.4", "flatten_optimizer_state_dict": "2.5",
        "dsd_fqn_modifiers": "2.6"},
        instead={"rank0_only": "cpu_offload=True, which leaves the others an empty one",
                 "offload_to_cpu": "cpu_offload="},
    ),
    "init_device_mesh": CallSignature(
        "torch", ("device_type", "mesh_shape", "mesh_dim_names", "backend_override"),
        since={"backend_override": "2.9"}, instead={"dim_names": "mesh_dim_names="},
    ),
    "ModuleWrapPolicy": CallSignature("torch", ("module_classes",)),
    "FullyShardedDataParallelPlugin": CallSignature(
        "accelerate",
        ("fsdp_version", "sharding_strategy", "reshard_after_forward", "backward_prefetch",
        "mixed_precision_policy",
         "auto_wrap_policy", "cpu_offload", "ignored_modules", "state_dict_type", "state_dict_config",
         "optim_state_dict_config", "limit_all_gathers", "use_orig_params", "param_init_fn",
         "sync_module_states",
         "forward_prefetch", "activation_checkpointing", "activation_checkpointing_offload",
         "cpu_ram_efficient_loading", "transformer_cls_names_to_wrap", "min_num_params"),
        since={"fsdp_version": "1.6", "reshard_after_forward": "1.6",
        "activation_checkpointing_offload": "1.15"},
        instead={"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap=",
                 "fsdp_auto_wrap_policy": "auto_wrap_policy=", "mixed_precision": "mixed_precision_policy="},
    ),
    "TrainingArguments": CallSignature(
        "transformers", whole=False,
        gone={name: version for name, (version, _) in _ARGUMENTS.items()},
        instead={name: text for name, (_, text) in _ARGUMENTS.items()},
    ),
    "Trainer": CallSignature(
        "transformers", whole=False, gone={"tokenizer": "5.0"}, instead={"tokenizer": "processing_class="}
    ),
}  # fmt: skip
"""By the name that rules know a call by. Read from the installed versions: torch 2.13, accelerate 1.15,
transformers 5.23; when an argument came or went is from their release notes."""

SIGNATURES["SFTConfig"] = SIGNATURES["DPOConfig"] = SIGNATURES["GRPOConfig"] = SIGNATURES["TrainingArguments"]
SIGNATURES["Seq2SeqTrainingArguments"] = SIGNATURES["TrainingArguments"]
SIGNATURES["SFTTrainer"] = SIGNATURES["DPOTrainer"] = SIGNATURES["Seq2SeqTrainer"] = SIGNATURES["Trainer"]

REMOVED = {
    "torch.distributed.fsdp.wrap.default_auto_wrap_policy": ("2.1", "size_based_auto_wrap_policy"),
    "torch.distributed._composable.fully_shard": ("2.7", "torch.distributed.fsdp.fully_shard"),
    "torch.distributed._tensor.placement_specs": ("2.5", "torch.distributed.tensor"),
    "torch.distributed._composable.fsdp._fsdp_param_group": ("2.7", "torch.distributed.fsdp"),
    "torch.distributed.tensor.parallel.fsdp.enable_2d_with_fsdp": ("2.3", "a mesh with two dimensions"),
}
"""Names that torch no longer has: since which version at the latest, and what to use instead."""

DEPRECATED = {
    "torch.distributed._composable.fsdp": "torch.distributed.fsdp",
    "torch.distributed._tensor": "torch.distributed.tensor",
}
"""Modules of torch that have a public name now."""

PUBLIC_SINCE = "2.6"
"""The first torch whose ``torch.distributed.fsdp`` has ``fully_shard``."""

PUBLIC = {
    "torch.distributed.fsdp": frozenset({
        "CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard",
        "register_fsdp_forward_method", "UnshardHandle",
    }),
    "torch.distributed.tensor": frozenset({
        "DTensor", "Partial", "Placement", "Replicate", "Shard", "distribute_module", "distribute_tensor",
        "empty", "full", "ones", "rand", "randn", "zeros",
    }),
}  # fmt: skip
"""Names that public modules have as well as the private ones (torch 2.13)."""

_TRAINING = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "push_to_hub_token": "hub_token",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}

_TRAINER = {"tokenizer": "processing_class"}

RENAMED = {
    "fully_shard": {
        "mixed_precision_policy": "mp_policy",
        "device_mesh": "mesh",
        "use_orig_params": "",
        "limit_all_gathers": "",
    },
    "CPUOffloadPolicy": {"offload_params": ""},
    "FullyShardedDataParallel": {
        "fsdp_auto_wrap_policy": "auto_wrap_policy",
        "mesh": "device_mesh",
        "ignored_parameters": "ignored_states",
    },
    "StateDictOptions": {"offload_to_cpu": "cpu_offload"},
    "init_device_mesh": {"dim_names": "mesh_dim_names"},
    "FullyShardedDataParallelPlugin": {
        "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
        "fsdp_auto_wrap_policy": "auto_wrap_policy",
    },
    **dict.fromkeys(
        ("TrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "Seq2SeqTrainingArguments"), _TRAINING
    ),
    **dict.fromkeys(("Trainer", "SFTTrainer", "DPOTrainer", "Seq2SeqTrainer"), _TRAINER),
}
"""Arguments with the one name that means the same; the name is empty where the argument has no meaning."""
