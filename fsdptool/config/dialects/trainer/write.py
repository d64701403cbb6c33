"""The TrainingArguments of a run, which Trainer, TRL and LLaMA-Factory share."""

from __future__ import annotations

from fsdptool.config.dialects.run_writer import RunWriter
from fsdptool.config.dialects.trainer import mapping

_OPTIMIZERS = {
    "adamw": "adamw_torch_fused", "adamw8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd",
    "paged_adamw_8bit": "paged_adamw_8bit", "paged_adamw_32bit": "paged_adamw_32bit",
    "lion": "lion_32bit",
}  # fmt: skip
_OF_TRANSFORMERS = (
    "adamw_",
    "paged_",
    "lion_",
    "galore_",
    "rmsprop",
    "ademamix",
    "apollo_",
    "lomo",
    "stable_",
)
"""How the names begin that transformers gives optimizers (``training_args.py:OptimizerNames``)."""


def put_arguments(to: RunWriter) -> None:
    """Set the arguments that decide a run's batch, precision, optimizer and sharding."""
    run = to.run
    to.put("per_device_train_batch_size", run.micro_batch)
    to.put("gradient_accumulation_steps", run.accumulation)
    if run.micro_batch is None or run.accumulation is None:
        to.lose("left open by the source: the default counts", "micro_batch", "accumulation")
    name = run.optimizer or ""
    plain = name.startswith(_OF_TRANSFORMERS) and not name.endswith("_opt_bf16")
    to.put("optim", to.optimizer(_OPTIMIZERS, (name,) if plain else ()))
    to.put("num_train_epochs", run.epochs)
    to.put("max_steps", run.steps)
    to.put("bf16", run.compute_dtype in ("bf16", "fp8"))
    to.put("fp16", run.compute_dtype == "fp16")
    if run.compute_dtype == "fp8":
        to.lose("TrainingArguments have no fp8: bf16 is written", "compute_dtype")
    to.put("torch_compile", run.compile)
    if run.fsdp not in (None, "none"):
        block = mapping(to.settings(), to.program)
        to.put("fsdp", block["fsdp"])
        to.put("fsdp_config", block["fsdp_config"])
    names = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
    to.lose("TrainingArguments hold no mesh", *(f"mesh.{name}" for name in names))
    to.launched()
