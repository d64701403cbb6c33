"""One rank of a launch that proves models of Trainer, TRL's SFTTrainer and plain accelerate loops.

accelerate 1.15 shards on accelerators only (``state.py``): a list of distributed types decides. Here one of
the types on that list stands for CPU processes; everything else is accelerate's and transformers' own code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import accelerate.state as state
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import fsdptool
from fsdptool.errors import ShardingError
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.sharding import FsdpSettings

BLOCK = "LlamaDecoderLayer"
LENGTH, BATCH = 16, 2
SETTINGS = FsdpSettings(wrap_classes=(BLOCK,), mixed_precision="no", num_processes=2)
ROWS = [{"input_ids": list(range(LENGTH)), "labels": list(range(LENGTH))}] * 16
WRONG = {
    "unit": replace(SETTINGS, wrap_policy="none", wrap_classes=()),
    "reshard": replace(SETTINGS, reshard_after_forward=False),
    "dtype": replace(SETTINGS, mixed_precision="bf16"),
    "ranks": replace(SETTINGS, num_processes=4),
    "mesh": replace(SETTINGS, mesh=ParallelDims(dp_replicate=2, dp_shard=1)),
    "offload": replace(SETTINGS, cpu_offload=True),
}
_REAL = state.DistributedType


class _Shardable:
    MULTI_MLU = _REAL.MULTI_CPU

    def __getattr__(self, name: str) -> Any:
        return getattr(_REAL, name)


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """Let accelerate shard over CPU processes."""
    state.DistributedType = _Shardable()
    try:
        yield
    finally:
        state.DistributedType = _REAL
        state.AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def small_model(folder: Path) -> Any:
    """Return the model of a folder's config.json, equal on every rank."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder), dtype=torch.float32)


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **more: Any) -> Any:
    """Return the arguments of a trainer that shards."""
    return kind(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        fsdp="full_shard",
        fsdp_config={
            "fsdp_version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [BLOCK],
            "cpu_ram_efficient_loading": False,
        },
        **more,
    )


def with_trainer(model: Path, plan: Path, folder: Path) -> dict[str, Any]:
    """Train with transformers' Trainer and the callback; then hold the live model against wrong settings."""
    callback = fsdptool.ProofCallback(plan)
    with sharding_on_cpu():
        trainer = Trainer(small_model(model), arguments(folder), train_dataset=ROWS, callbacks=[callback])
        trainer.train()
    live = trainer.model
    refused = {}
    for name, settings in WRONG.items():
        try:
            fsdptool.prove(live, settings)
        except ShardingError as error:
            refused[name] = [error.message, error.help]
    rows = next(parameter for parameter in live.parameters() if parameter.dim() == 1)
    with torch.no_grad():
        rows.data = rows.data.to(torch.bfloat16)
    try:
        fsdptool.prove(live, plan)
    except ShardingError as error:
        refused["stored"] = [error.message, error.help]
    assert callback.proof is not None
    return {"record": asdict(callback.proof.record), "shown": repr(callback.proof), "refused": refused}


def with_trl(model: Path, folder: Path) -> dict[str, Any] | None:
    """Train with TRL's SFTTrainer, LoRA adapters and the callback; None where trl is not installed."""
    if find_spec("trl") is None:
        return None
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "word": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    callback = fsdptool.ProofCallback(SETTINGS, folder=folder)
    given = arguments(folder, SFTConfig, max_length=LENGTH, gradient_checkpointing=False)
    with sharding_on_cpu():
        trainer = SFTTrainer(
            small_model(model),
            given,
            train_dataset=Dataset.from_list([{"input_ids": row["input_ids"]} for row in ROWS]),
            processing_class=tokenizer,
            callbacks=[callback],
            peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        )
        trainer.train()
    assert callback.proof is not None
    return asdict(callback.proof.record)


def with_accelerate(model: Path, plan: Path, folder: Path) -> dict[str, Any]:
    """Run a plain loop with the tracker."""
    tracker = fsdptool.ProofTracker(plan, folder)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=[BLOCK],
        cpu_ram_efficient_loading=False,
    )
    with sharding_on_cpu():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, log_with=tracker, mixed_precision="no")
        live = small_model(model)
        live, optimizer = accelerator.prepare(live, torch.optim.AdamW(live.parameters()))
        accelerator.init_trackers("run")
        tracker.prove(live)
        tokens = torch.arange(LENGTH).repeat(BATCH, 1)
        for step in range(2):
            loss = live(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()}, step=step)
        tracker.finish()
    return json.loads((folder / "fsdptool-proof.json").read_text()) if dist.get_rank() == 0 else {}


def unsharded(model: Path) -> str:
    """Prepare a model as accelerate does on CPU processes, without sharding, and try to prove it."""
    live, _ = (lambda m: Accelerator(cpu=True).prepare(m, torch.optim.SGD(m.parameters())))(
        small_model(model)
    )
    try:
        fsdptool.prove(live, SETTINGS)
    except ShardingError as error:
        return f"{error.message}\n{error.help}"
    return ""


def main(model: Path, plan: Path, folder: Path) -> None:
    """Run every case and write what rank 0 saw."""
    seen = {
        "trainer": with_trainer(model, plan, folder / "trainer"),
        "trl": with_trl(model, folder / "trl"),
        "accelerate": with_accelerate(model, plan, folder / "accelerate"),
    }
    seen["unsharded"] = {"message": unsharded(model)}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
