"""Names of libraries: the one that a rule asks for, whichever module a script imports it from."""

from __future__ import annotations

KNOWN = frozenset({
    "torch", "transformers", "accelerate", "peft", "trl", "datasets", "diffusers", "torchvision", "torchao",
    "bitsandbytes", "safetensors", "functools", "copy", "os", "sys", "math", "random", "time", "logging",
    "numpy", "tqdm", "json", "contextlib", "typing", "itertools", "collections", "pathlib", "wandb",
    "inspect",
    "builtins", "argparse", "dataclasses", "datetime", "gc", "warnings", "loguru", "rich", "pprint",
    "huggingface_hub",
    "tokenizers", "evaluate", "shutil", "enum", "tempfile", "re",
})  # fmt: skip
"""Libraries whose functions shard, load or initialise nothing behind a script's back."""

COLLECTIVES = frozenset({
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter",
    "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "reduce", "gather", "gather_object",
    "scatter",
    "scatter_object_list", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
})  # fmt: skip
_DISTRIBUTED = COLLECTIVES | {
    "get_rank", "get_world_size", "get_node_local_rank", "init_process_group", "destroy_process_group",
    "is_initialized", "is_available", "new_group",
}  # fmt: skip

UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel", "FastTextModel")
"""Loaders of unsloth, which also add its adapters."""

LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Distributions of Lightning: their names stay whole."""

ARGUMENTS = (
    "TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig",
    "ORPOConfig", "RewardConfig", "CPOConfig", "PPOConfig", "RLOOConfig",
)  # fmt: skip
"""Classes of arguments that trainers of transformers and TRL take."""

STARS = {
    "torch.distributed.fsdp": (
        "fully_shard", "FullyShardedDataParallel", "MixedPrecision", "MixedPrecisionPolicy", "CPUOffload",
        "CPUOffloadPolicy", "OffloadPolicy", "ShardingStrategy", "StateDictType", "FullStateDictConfig",
        "ShardedStateDictConfig", "LocalStateDictConfig", "FSDPModule", "BackwardPrefetch",
        "register_fsdp_forward_method", "FullOptimStateDictConfig", "ShardedOptimStateDictConfig",
    ),
    "torch.distributed.fsdp.wrap": (
        "transformer_auto_wrap_policy", "size_based_auto_wrap_policy", "ModuleWrapPolicy", "wrap",
        "enable_wrap",
        "always_wrap_policy", "lambda_auto_wrap_policy", "CustomPolicy",
    ),
    "torch.distributed": tuple(sorted(_DISTRIBUTED)),
    "torch.nn": ("Module", "ModuleList", "Sequential", "Linear", "Embedding", "Parameter"),
    "torch.utils.data": ("DataLoader", "DistributedSampler", "Dataset", "TensorDataset"),
    "torch.utils.data.distributed": ("DistributedSampler",),
    "torch.distributed.checkpoint.state_dict": (
        "StateDictOptions", "get_model_state_dict", "set_model_state_dict", "get_state_dict",
        "set_state_dict",
        "get_optimizer_state_dict", "set_optimizer_state_dict",
    ),
    "torch.optim": ("AdamW", "Adam", "SGD"),
    "transformers": (
        "AutoModelForCausalLM", "AutoConfig", "AutoTokenizer", "Trainer", "TrainingArguments", "AutoModel",
    ),
    "accelerate": ("Accelerator", "FullyShardedDataParallelPlugin", "init_empty_weights"),
}  # fmt: skip
"""Names that ``from … import *`` brings, as far as rules ask for them."""


def short(name: str) -> str:
    """Return the name that rules know something by.

    A class or function of torch.distributed.fsdp, transformers, accelerate, peft or trl is known by its last
    name, its class methods and those of unsloth by two. ``dist.barrier``, ``dcp.save``, ``nn.Linear`` and
    ``optim.AdamW`` keep a short prefix; names of other libraries are whole.
    """
    parts = name.split(".")
    last, head = parts[-1], parts[0]
    if (
        len(parts) > 2
        and parts[-2][:1].isupper()
        and head in ("torch", "transformers", "accelerate", "peft", "trl", "unsloth")
    ):
        return f"{parts[-2]}.{last}"
    if head == "torch":
        return _of_torch(name, parts, last)
    if head == "transformers" and last in ("AdamW", "Adafactor"):
        return f"optim.{last}"
    if head == "bitsandbytes" and "optim" in parts:
        return f"optim.{last}"
    if head in ("transformers", "accelerate", "peft", "trl") and len(parts) > 1:
        return last
    if head in ("functools", "contextlib", "copy") and len(parts) == 2:
        return last
    return name


def _of_torch(name: str, parts: list[str], last: str) -> str:
    if name.startswith("torch.distributed.checkpoint"):
        return last if "state_dict" in parts[3:-1] else f"dcp.{last}"
    if len(parts) > 2 and parts[1] == "distributed":
        return f"dist.{last}" if last in _DISTRIBUTED else last
    if len(parts) > 2 and parts[1] == "optim" and last[:1].isupper() and "lr_scheduler" not in parts:
        return f"optim.{last}"
    if name.startswith("torch.nn.utils."):
        return last
    if name.startswith("torch.nn.functional."):
        return f"F.{last}"
    if name.startswith("torch.nn.parallel."):
        return last
    if len(parts) > 2 and parts[1] == "nn":
        return f"nn.{last}"
    if name.startswith("torch.utils.data"):
        return last
    return name


def library(name: str) -> str:
    """Return the library of a dotted name."""
    return name.partition(".")[0]
