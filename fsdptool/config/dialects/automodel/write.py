"""A file of NeMo AutoModel for a run; :mod:`fsdptool.config.dialects.automodel.run` reads its keys."""

from __future__ import annotations

from fsdptool.config.dialects.automodel.run_keys import KEYS
from fsdptool.config.dialects.run_writer import RunWriter

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "checkpoint": "auto"}
_ATTENTION = {name: name for name in ("sdpa", "eager", "flash_attention_2", "flex_attention", "flex", "te")}
_OPTIMIZERS = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD", "adafactor": "torch.optim.Adafactor",
               "adamw8bit": "bitsandbytes.optim.AdamW8bit"}  # fmt: skip
_RECIPES = {"classification": "TrainFinetuneRecipeForSequenceClassification"}
_LLM = "nemo_automodel.components"


def write(to: RunWriter) -> None:
    """Set the keys of an AutoModel file."""
    run = to.run
    to.need_objective("sft", "pretrain", "classification")
    to.put("recipe", _RECIPES.get(run.objective or "", "TrainFinetuneRecipeForNextTokenPrediction"))
    to.put("step_scheduler.global_batch_size", to.total_batch())
    to.put("step_scheduler.local_batch_size", run.micro_batch)
    if run.micro_batch is None:
        to.lose("left open by the source: AutoModel takes 1", "micro_batch")
    to.put("step_scheduler.max_steps", run.steps)
    to.put("step_scheduler.num_epochs", run.epochs if run.epochs is None else max(1, round(run.epochs)))
    to.lose("AutoModel counts whole passes", "epochs")
    _model(to)
    _method(to)
    _distributed(to)
    fused = run.fused_loss in ("cce", "liger", "chunked")
    loss = "linear_ce.FusedLinearCrossEntropy" if fused else "masked_ce.MaskedCrossEntropy"
    to.put("loss_fn._target_", f"{_LLM}.loss.{loss}")
    to.lose("AutoModel fuses the loss by cut cross-entropy", "fused_loss")
    _data(to)
    target = to.optimizer(_OPTIMIZERS) or "torch.optim.AdamW"
    to.put("optimizer._target_", target)
    to.put("compile.enabled", bool(run.compile))
    to.put_learning(KEYS.learning, "dataset", "adam_beta1", "adam_beta2", "lora_alpha", "max_grad_norm")
    to.put_clipping("clip_grad_norm.max_norm")
    if target.endswith(("AdamW", "AdamW8bit")):
        betas = [run.learning.get("adam_beta1", 0.9), run.learning.get("adam_beta2", 0.999)]
        to.put("optimizer.betas", betas)
    else:
        to.data["optimizer"].pop("eps", None)
        to.lose("they are AdamW's", "learning.adam_beta1", "learning.adam_beta2", "learning.adam_epsilon")
    if "rng" in to.data:
        to.put("rng._target_", f"{_LLM}.training.rng.StatefulRNG")
    to.lose("AutoModel reduces in fp32 and computes in bf16", "reduce_dtype", "compute_dtype")
    to.lose("follows from the ranks, which are given at the launch", "accumulation")
    to.lose("given at the launch (automodel --nproc-per-node)", "processes")


def _model(to: RunWriter) -> None:
    run = to.run
    made = "from_config" if run.objective == "pretrain" else "from_pretrained"
    kind = "SequenceClassification" if run.objective == "classification" else "CausalLM"
    to.put("model._target_", f"nemo_automodel.NeMoAutoModelFor{kind}.{made}")
    to.put("model.pretrained_model_name_or_path", to.model())
    full = run.method in (None, "full")
    to.put("model.torch_dtype", _DTYPES.get((run.stored_dtype if full else run.base_dtype) or "", "auto"))
    why = "AutoModel holds weights, adapters and states in one dtype (torch_dtype)"
    to.lose(why, "stored_dtype", "base_dtype", "optimizer_state_bits")
    word = to.choice("attention", _ATTENTION)
    to.put("model.attn_implementation", word)


def _method(to: RunWriter) -> None:
    run = to.run
    if run.method in (None, "full"):
        return
    if run.method not in ("lora", "qlora"):
        to.lose(
            f"AutoModel has no method {run.method}", "method", "lora_rank", "lora_dropout", "quantisation"
        )
        to.lose("goes with the method", "lora_targets", "lora_modules_to_save", "learning.lora_alpha")
        return
    to.put("peft._target_", f"{_LLM}._peft.lora.PeftConfig")
    to.put("peft.dim", run.lora_rank)
    to.put("peft.alpha", run.learning.get("lora_alpha"))
    to.put("peft.dropout", run.lora_dropout or 0.0)
    if run.lora_targets == "all-linear":
        to.put("peft.match_all_linear", True)
    else:
        targets = run.lora_targets
        # AutoModel compares whole paths: a suffix needs the wildcard before it.
        named = (targets,) if isinstance(targets, str) else targets or ()
        spelt = [name if "*" in name or run.program == to.program else f"*.{name}" for name in named]
        to.put("peft.target_modules", spelt or None)
        to.lose("AutoModel compares whole paths of modules", "lora_targets")
    to.lose("AutoModel has no modules that train beside the adapters", "lora_modules_to_save")
    if run.method == "qlora":
        to.put("quantization.load_in_4bit", True)
        to.put("quantization.bnb_4bit_quant_type", "nf4")
        to.put("quantization.bnb_4bit_use_double_quant", "no double" not in (run.quantisation or ""))
        to.put("quantization.bnb_4bit_compute_dtype", "bfloat16")
    to.lose("AutoModel quantises with bitsandbytes", "quantisation")


def _distributed(to: RunWriter) -> None:
    run, mesh = to.run, to.run.mesh
    to.lose("AutoModel keeps activations on the device", "activation_offloading")
    sharded = run.fsdp != "none"
    to.put("distributed.strategy", "fsdp2" if sharded else "ddp")
    if not sharded:
        to.lose("AutoModel divides work only with FSDP2", "mesh.cp", "mesh.tp", "mesh.ep", "mesh.pp")
        if run.gradient_checkpointing not in (None, "none"):
            to.put("distributed.activation_checkpointing", True)
        to.lose("AutoModel recomputes whole layers", "gradient_checkpointing")
        return
    shard, replicas = mesh.dp_shard, mesh.dp_replicate
    known = shard is not None and shard > 0
    size = (shard or 1) * max(replicas or 1, 1) if known else None
    if size is None and run.processes is not None:
        size = max(1, run.processes // ((mesh.tp or 1) * (mesh.cp or 1) * (mesh.pp or 1)))
    to.put("distributed.dp_size", size if size is not None else "none")
    to.put("distributed.dp_replicate_size", replicas if replicas is not None and replicas > 1 else None)
    for name in ("tp", "cp", "ep", "pp"):
        to.put(f"distributed.{name}_size", getattr(mesh, name) or 1)
    if (mesh.pp or 1) > 1:
        to.put("distributed.pipeline.pp_schedule", "1f1b")
    to.lose("AutoModel shards over the ranks that are left", "mesh.dp_shard", "mesh.dp_replicate")
    to.lose("FSDP1 becomes FSDP2", "fsdp")
    to.put("distributed.activation_checkpointing", run.gradient_checkpointing not in (None, "none"))
    to.lose("AutoModel recomputes whole layers", "gradient_checkpointing")
    to.put("distributed.reshard_after_forward", run.reshard if isinstance(run.reshard, bool) else None)
    to.lose("only true and false can be said", "reshard")
    if run.cpu_offload:
        to.put("distributed.offload_policy._target_", "torch.distributed.fsdp.CPUOffloadPolicy")
    to.lose("AutoModel wraps every layer of its models", "wrap_classes")


def _data(to: RunWriter) -> None:
    run = to.run
    to.put("dataset._target_", f"{_LLM}.datasets.llm.ChatDataset")
    to.put("dataset.path_or_dataset_id", to.dataset())
    to.put("dataset.split", "train")
    to.lose("AutoModel keeps the samples of a row apart", "documents_joined")
    if run.packing:
        to.put("packed_sequence.packed_sequence_size", run.sequence_length)
        if run.sequence_length is None:
            to.lose("AutoModel packs to a length that the source leaves open", "packing")
    else:
        to.put("dataset.seq_length", run.sequence_length)
        to.put("packed_sequence.packed_sequence_size", 0)
    to.put("dataloader._target_", "torchdata.stateful_dataloader.StatefulDataLoader")
    to.put("dataloader.collate_fn", f"{_LLM}.datasets.utils.default_collater")
