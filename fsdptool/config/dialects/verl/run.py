"""The run that a command line or a file of verl describes: the training of the actor, or of an SFT trainer.

Source: verl b178a3cd ``trainer/fsdp_sft_trainer.py:244-484``, ``workers/fsdp_workers.py:241-526`` (batches,
offload), ``workers/actor/dp_actor.py:552``, ``utils/fsdp_utils.py:524`` (units).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.run_reader import RunFile, RunReader, dtype_word, state_bits
from fsdptool.config.dialects.verl.run_keys import ENGINE, RL, SFT
from fsdptool.records.described_run import DescribedMesh, DescribedRun
from fsdptool.source.known_models import family_of_name, layer_classes_of

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_OBJECTIVES = {"gae": "ppo"}
_SHIPPED = frozenset([
    "ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer",
    "dapo_megatron_trainer",
])  # fmt: skip
"""verl's own configurations, whose defaults the tables hold (``trainer/config``, ``recipe/dapo/config``)."""
_SECTIONS = ("data", "model", "optim", "engine", "trainer", "algorithm", "actor_rollout_ref")
_GROUPS = frozenset({"fsdp", "megatron", "veomni", "torchtitan", "automodel", "hf_model", "legacy_data"})
"""verl's own groups of configurations that a section may name (``engine=megatron``)."""
_MEGATRON = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""Sizes of the mesh in the section ``megatron`` (``trainer/config/engine/megatron.yaml``)."""


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a file or a command line."""
    name = str(file.data.get("config_name", ""))
    shipped = re.sub(r"\.ya?ml$", "", name) in _SHIPPED
    for key in ("config_path", "config_name"):
        if key in file.data and not shipped:
            problem = f"{key}: {file.data[key]} is not read: what it sets is not known"
            file = replace(file, launch=replace(file.launch, problems=(*file.launch.problems, problem)))
    for key in _SECTIONS:
        group = file.groups.get(key, file.data.get(key))
        if isinstance(group, str) and group not in _GROUPS:
            problem = f"{key}: {group} is a group of configurations, which is not read"
            file = replace(file, launch=replace(file.launch, problems=(*file.launch.problems, problem)))
    script = file.launch.script.rpartition(".")[2]
    if "actor_rollout_ref" in file.data or script.startswith("main_"):
        return _describe_rl(file, megatron="megatron" in name)
    engine = "engine" in file.data or script == "sft_trainer"
    return _describe_sft(file, engine)


def _describe_sft(file: RunFile, engine: bool) -> DescribedRun:
    read = RunReader(file, ENGINE if engine else SFT)
    place, config = ("engine", "engine") if engine else ("model", "model.fsdp_config")
    model = read.text("model.path") if engine else read.text("model.partial_pretrain")
    sp = (
        read.whole("engine.ulysses_sequence_parallel_size" if engine else "ulysses_sequence_parallel_size")
        or 1
    )
    total = read.whole("data.train_batch_size")
    dynamic = engine and read.flag("data.use_dynamic_bsz")
    micro = None if dynamic else read.whole("data.micro_batch_size_per_gpu")
    if dynamic:
        tokens = read.whole("data.max_token_len_per_gpu")
        most = f"{tokens} x {sp}" if tokens is not None else "max_token_len_per_gpu"
        read.notes.append(f"a micro-batch holds up to {most} tokens (data.use_dynamic_bsz)")
    if read.has("data.micro_batch_size"):
        read.notes.append("data.micro_batch_size is not read: data.micro_batch_size_per_gpu is")
    read.use("model.use_remove_padding", "use_remove_padding", "data.truncation", "data.pad_mode")
    # The trainer joins a group of processes that only a launcher prepares: plain Python starts none.
    alone = file.launch.program == "python" and file.launch.processes == 1
    processes = None if alone else file.launch.processes
    stored = dtype_word(read.text(f"{config}.model_dtype"))
    rank = read.whole("model.lora_rank")
    common = _common(read, model, stored, rank, "model", "optim")
    chosen = file.groups.get("engine", read.raw("engine"))
    group = chosen if isinstance(chosen, str) else None
    if group not in (None, "fsdp"):
        read.keys = replace(ENGINE, memory={**ENGINE.memory, "engine": None})
        read.notes.append(f"engine: {group} is out of scope: the equivalent of FSDP2 is engine=fsdp")
    mesh = _mesh(read.whole("engine.fsdp_size") if engine else None, sp, processes)
    if group == "megatron":
        mesh = DescribedMesh(**{axis: read.whole(f"engine.{key}") or 1 for axis, key in _MEGATRON.items()})
        common |= {"wrap_classes": None}
    offload = read.flag(f"{config}.cpu_offload") or read.flag(f"{config}.offload_policy")
    read.use(f"{config}.offload_params")
    return read.describe(
        **common,
        objective="sft",
        sequence_length=read.whole("data.max_length"),
        micro_batch=micro,
        accumulation=_accumulation(total, micro, processes, _sharing(mesh)),
        global_batch=total,
        gradient_checkpointing="full" if read.flag("model.enable_gradient_checkpointing") else "none",
        fused_loss="none",
        processes=processes,
        fsdp=_version(read, f"{place}.strategy") if group in (None, "fsdp") else "none",
        reshard=read.flag("engine.reshard_after_forward") if engine else True,
        cpu_offload=offload,
        mesh=mesh,
        steps=read.whole("trainer.total_training_steps"),
        epochs=read.number("trainer.total_epochs"),
    )


def _describe_rl(file: RunFile, *, megatron: bool = False) -> DescribedRun:
    read = RunReader(file, RL)
    megatron = megatron or read.raw("model_engine") == "megatron" or read.has(f"{_ACTOR}.megatron")
    if megatron:
        read.keys = replace(RL, memory={**RL.memory, "config_name": None, "model_engine": None})
    model = read.text(f"{_MODEL}.path")
    if model is None and not read.has(f"{_MODEL}.path"):
        read.notes.append("no model is named: verl would take ~/models/deepseek-llm-7b-chat")
    if "defaults" in file.data:
        read.notes.append("the defaults list is not read: what it includes is taken from verl's own files")
    sp = read.whole(f"{_ACTOR}.ulysses_sequence_parallel_size") or 1
    prompt, response = read.whole("data.max_prompt_length"), read.whole("data.max_response_length")
    mini, answers = read.whole(f"{_ACTOR}.ppo_mini_batch_size"), read.whole("actor_rollout_ref.rollout.n")
    total = mini * answers if mini is not None and answers is not None else None
    gpus, nodes = read.whole("trainer.n_gpus_per_node"), read.whole("trainer.nnodes")
    processes = gpus * nodes if gpus is not None and nodes is not None else None
    micro = read.whole(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    read.use("data.train_batch_size")
    if read.flag(f"{_ACTOR}.use_dynamic_bsz"):
        tokens = read.whole(f"{_ACTOR}.ppo_max_token_len_per_gpu")
        most = f"{tokens} x {sp}" if tokens is not None else "ppo_max_token_len_per_gpu"
        read.notes.append(f"a micro-batch holds up to {most} tokens (use_dynamic_bsz)")
        micro = None
    elif micro is None:
        shared = read.whole(f"{_ACTOR}.ppo_micro_batch_size")
        micro = shared // max(1, processes // sp) if shared and processes else None
        if micro is None:
            read.problems.append("no micro-batch is given: verl stops (workers/config/actor.py:187)")
    estimator = read.text("algorithm.adv_estimator") or "gae"
    if estimator == "gae" or read.raw("critic.enable"):
        read.notes.append("a critic is trained beside the actor: it is not in this plan")
    read.notes.append("rollout, reference and reward models are not in this plan")
    stored = dtype_word(read.text(f"{_ACTOR}.fsdp_config.model_dtype"))
    read.use(f"{_MODEL}.use_remove_padding", f"{_ACTOR}.fsdp_config.param_offload")
    read.use(f"{_ACTOR}.fsdp_config.optimizer_offload")
    facts = _common(read, model, stored, read.whole(f"{_MODEL}.lora_rank"), _MODEL, f"{_ACTOR}.optim")
    if megatron:
        facts |= _megatron(read)
    else:
        facts |= {
            "fsdp": _version(read, f"{_ACTOR}.strategy"),
            "reshard": read.flag(f"{_ACTOR}.fsdp_config.reshard_after_forward"),
            "cpu_offload": read.flag(f"{_ACTOR}.fsdp_config.offload_policy"),
            "mesh": _mesh(read.whole(f"{_ACTOR}.fsdp_config.fsdp_size"), sp, processes),
            "gradient_checkpointing": "full"
            if read.flag(f"{_MODEL}.enable_gradient_checkpointing")
            else "none",
        }
    return read.describe(
        **facts,
        objective=_OBJECTIVES.get(estimator, estimator),
        sequence_length=prompt + response if prompt is not None and response is not None else None,
        micro_batch=micro,
        accumulation=_accumulation(total, micro, processes, _sharing(facts["mesh"])),
        global_batch=total,
        fused_loss="cce" if read.flag(f"{_MODEL}.use_fused_kernels") else "none",
        processes=processes,
        nodes=nodes,
        steps=read.whole("trainer.total_training_steps"),
        epochs=read.number("trainer.total_epochs"),
    )


def _common(
    read: RunReader, model: str | None, stored: str | None, rank: int | None, section: str, optim: str
) -> dict[str, Any]:
    adapter = bool(rank)
    layers = layer_classes_of(family_of_name(model or "")[0])
    named = read.names(f"{section}.target_modules")
    optimizer = (read.text(f"{optim}.optimizer") or "adamw").lower()
    read.use(f"{optim}.optimizer_impl")
    return {
        "model": model,
        "method": "lora" if adapter else "full",
        "lora_rank": rank if adapter else None,
        "lora_targets": named or "all-linear" if adapter else None,
        "base_dtype": stored if adapter else None,
        "quantisation": "none",
        "stored_dtype": stored,
        "compute_dtype": "bf16",
        "reduce_dtype": "fp32",
        "packing": False,
        "optimizer": optimizer,
        "optimizer_state_bits": state_bits(optimizer, stored),
        "attention": "flash_attention_2",
        "activation_offloading": read.flag(f"{section}.enable_activation_offload"),
        "compile": False,
        "wrap_classes": (*(layers or ("the model's _no_split_modules",)), "root"),
    }


def _megatron(read: RunReader) -> dict[str, Any]:
    """Return what Megatron's section says, whose sharding no plan has (``workers/megatron_workers.py``)."""
    place = f"{_ACTOR}.megatron"
    read.notes.append(f"Megatron is out of scope: the FSDP2 equivalent is {_ACTOR}.strategy=fsdp2")
    read.inert(f"{_MODEL}.enable_gradient_checkpointing")
    sizes = {name: read.whole(f"{place}.{key}") or 1 for name, key in _MEGATRON.items()}
    granularity = read.text(f"{place}.override_transformer_config.recompute_granularity")
    return {
        "stored_dtype": dtype_word(read.text(f"{place}.dtype")) or "bf16",
        "compute_dtype": dtype_word(read.text(f"{place}.dtype")) or "bf16",
        "optimizer_state_bits": 32,
        "fsdp": "none",
        "wrap_classes": None,
        "mesh": DescribedMesh(**sizes),
        "gradient_checkpointing": granularity or "none",
    }


def _sharing(mesh: DescribedMesh) -> int:
    """Return the ranks that share their samples."""
    return (mesh.cp or 1) * (mesh.tp or 1) * (mesh.pp or 1)


def _version(read: RunReader, key: str) -> Any:
    """Return the version of FSDP that a strategy names; other engines are out of scope."""
    strategy = read.text(key) or "fsdp"
    if not strategy.startswith("fsdp"):
        read.notes.append(f"{key}: {strategy} is out of scope: the equivalent of FSDP2 is fsdp2")
        return "none"
    return 2 if strategy == "fsdp2" else 1


def _accumulation(total: int | None, micro: int | None, processes: int | None, sp: int) -> int | None:
    if total is None or not micro or processes is None:
        return None
    return max(1, total // max(1, processes // sp) // micro)


def _mesh(size: int | None, sp: int, processes: int | None) -> DescribedMesh:
    """Return the mesh: each ``fsdp_size`` ranks hold a copy (``fsdp_workers.py:create_device_mesh``).

    The ranks that share a sequence are among them. Groups that do not divide the ranks are left open.
    """
    if not size or size < 0 or (processes is not None and size > processes):
        return DescribedMesh(dp_replicate=1, dp_shard=-1, cp=sp)
    if size % sp or (processes is not None and processes % size):
        return DescribedMesh(cp=sp)
    replicas = processes // size if processes is not None else None
    return DescribedMesh(dp_replicate=replicas, dp_shard=size // sp, cp=sp)
