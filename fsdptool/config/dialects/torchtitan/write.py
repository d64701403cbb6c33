"""A TOML file of torchtitan 0.2 for a run; :mod:`fsdptool.config.dialects.torchtitan.run` reads its keys."""

from __future__ import annotations

from fsdptool.config.dialects.run_writer import RunWriter, toml_text
from fsdptool.config.dialects.torchtitan.run_keys import FAMILIES, FLAVOURS, KEYS
from fsdptool.errors import ConfigError

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "checkpoint": "bfloat16"}
_OPTIMIZERS = {"adamw": "AdamW"}
_SAME_SHAPES = {"llama3.1:8b": "llama3:8b", "llama3.1:70b": "llama3:70b", "llama3.3:70b": "llama3:70b"}
"""Sizes that torchtitan trains under the flavour of another one."""


def write(to: RunWriter) -> None:
    """Set the keys of a torchtitan file."""
    run, mesh = to.run, to.run.mesh
    to.need_objective("pretrain", "sft")
    if run.objective != "pretrain":
        to.lose("torchtitan trains whole rows of text", "objective")
    name, flavour = _model(to)
    to.put("model.name", name)
    to.put("model.flavor", flavour)
    _method(to)
    to.put("optimizer.name", to.optimizer(_OPTIMIZERS, tuple(_OPTIMIZERS.values())))
    to.put("training.dataset", to.dataset())
    _batch(to)
    to.put("training.seq_len", run.sequence_length)
    if run.sequence_length is None:
        to.lose("left open by the source: torchtitan takes 2048", "sequence_length")
    if not run.packing:
        to.lose("torchtitan joins texts to full rows", "packing")
    to.lose("in torchtitan the texts of a row attend to one another", "documents_joined")
    to.put("training.steps", run.steps)
    to.lose("torchtitan counts steps alone", "epochs", "steps")
    _precision(to)
    to.put("training.enable_cpu_offload", bool(run.cpu_offload))
    sizes = {
        "data_parallel_replicate_degree": mesh.dp_replicate, "data_parallel_shard_degree": mesh.dp_shard,
        "context_parallel_degree": mesh.cp, "tensor_parallel_degree": mesh.tp,
        "expert_parallel_degree": mesh.ep, "pipeline_parallel_degree": mesh.pp,
    }  # fmt: skip
    if run.fsdp == "none":
        sizes |= {"data_parallel_replicate_degree": run.processes or 1, "data_parallel_shard_degree": 1}
    elif mesh.dp_shard is None:
        sizes["data_parallel_shard_degree"] = -1
    for key, size in sizes.items():
        to.put(f"parallelism.{key}", size)
    to.lose("torchtitan shards with FSDP2 alone", "fsdp")
    if run.fsdp not in (None, "none"):
        default = run.reshard is True and (mesh.pp or 1) == 1
        to.put("parallelism.fsdp_reshard_after_forward", "default" if default else _reshard(run.reshard))
    to.lose("torchtitan forms units of its own models", "wrap_classes")
    if run.reshard is not None and not isinstance(run.reshard, bool):
        to.lose("only true and false can be said", "reshard")
    _checkpointing(to)
    compiled = [name for name, on in (("model", run.compile), ("loss", run.compiled_loss)) if on]
    to.put("compile.enable", bool(compiled))
    if len(compiled) == 1:
        to.put("compile.components", compiled)
    to.lose("torchtitan's model decides its attention", "attention")
    to.lose("torchtitan computes whole logits", "fused_loss")
    to.put_learning(KEYS.learning, "dataset", "max_grad_norm")
    to.put_clipping("training.max_norm")
    to.lose("given at the launch (torchrun --nproc_per_node)", "processes", "global_batch")
    to.text = toml_text(to.data)


def _model(to: RunWriter) -> tuple[str, str]:
    run = to.run
    if run.program == to.program and run.model is not None:
        name, _, flavour = run.model.partition(" ")
        if flavour:
            return name, flavour
    family = _SAME_SHAPES.get(run.family or "", run.family)
    for (name, flavour), known in FAMILIES.items():
        if known == family and flavour in FLAVOURS.get(name, {}):
            to.lose("torchtitan takes the models of its registry", "model", "family")
            return name, FLAVOURS[name][flavour]
    raise ConfigError(
        f"torchtitan has no counterpart of the model {run.model}",
        help=f"its registry has: {', '.join(f'{name} {size}' for name, size in _names())}",
    )


def _names() -> list[tuple[str, str]]:
    return [(name, size) for name, sizes in FLAVOURS.items() for size in sizes.values()]


def _method(to: RunWriter) -> None:
    if to.run.method not in (None, "full"):
        to.lose("torchtitan trains every parameter", "method", "lora_rank", "lora_dropout", "lora_targets")
        to.lose("torchtitan trains every parameter", "lora_modules_to_save", "base_dtype", "quantisation")
    to.lose("torchtitan has one dtype for what is stored (training.dtype)", "base_dtype")
    to.lose("torchtitan keeps activations on the device", "activation_offloading")


def _batch(to: RunWriter) -> None:
    run = to.run
    to.put("training.local_batch_size", run.micro_batch)
    if run.micro_batch is None:
        to.lose("left open by the source: torchtitan takes 8", "micro_batch")
    known = run.global_batch
    if known is None and run.accumulation not in (None, 1):
        to.lose(
            "torchtitan counts the samples of all ranks, whose number the source does not say", "accumulation"
        )
    to.put("training.global_batch_size", known)
    to.lose("follows from the global batch and the ranks", "accumulation")


def _precision(to: RunWriter) -> None:
    run = to.run
    stored = run.stored_dtype if run.method in (None, "full") else "fp32"
    to.put("training.dtype", _DTYPES.get(stored or ""))
    to.lose("torchtitan stores bf16 or fp32", "stored_dtype", "optimizer_state_bits")
    compute = run.compute_dtype if run.compute_dtype in _DTYPES else "bf16"
    to.put("training.mixed_precision_param", _DTYPES[compute or "bf16"])
    to.lose("torchtitan computes in bf16 or fp32", "compute_dtype")
    to.put("training.mixed_precision_reduce", "float32")
    to.lose("torchtitan reduces in fp32", "reduce_dtype")


def _reshard(value: object) -> str:
    return "never" if value is False else "always"


def _checkpointing(to: RunWriter) -> None:
    run = to.run
    mode = {"offload": "full"}.get(run.gradient_checkpointing or "none", run.gradient_checkpointing or "none")
    to.put("activation_checkpoint.mode", mode)
    if run.gradient_checkpointing == "selective":
        every = next(
            (note.split()[1].rstrip(".") for note in run.notes if "block is recomputed" in note), "op"
        )
        to.put("activation_checkpoint.selective_ac_option", every)
    to.lose("torchtitan keeps the inputs of blocks on the device", "gradient_checkpointing")
