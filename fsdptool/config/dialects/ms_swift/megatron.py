"""The run of ``megatron sft`` (Megatron-SWIFT), whose sharding is out of scope: told, and not planned.

Source: ms-swift 4.6.0 ``swift/megatron/arguments/megatron_base_args.py`` and ``megatron_args.py`` (defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fsdptool.config.dialects.launches import ranks_of
from fsdptool.config.dialects.ms_swift.run_keys import KEYS
from fsdptool.config.dialects.run_reader import RunFile, RunKeys, RunReader, dtype_word
from fsdptool.records.described_run import DescribedMesh, DescribedRun, UnmodelledKey

_KEYS = RunKeys(KEYS.program, KEYS.version, no_effect=frozenset({"*"}), unknown="dropped")
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a command line or a file; its verdict is unknown.

    With Ray, what trains stands in a section of its own.
    """
    role = file.data.get("train")
    if isinstance(role, Mapping):
        file = replace(file, data={**file.data, **role})
    read = RunReader(file, _KEYS)
    mesh = DescribedMesh(**{name: read.whole(key) or 1 for name, key in _SIZES.items()})
    processes = file.launch.processes if file.launch.program != "megatron" else None
    if "NPROC_PER_NODE" in file.environment and processes is None:
        processes, _ = ranks_of(file.environment, None)
    processes = processes or read.whole("gpus")
    micro, total = read.whole("micro_batch_size") or 1, read.whole("global_batch_size") or 16
    shared = (mesh.tp or 1) * (mesh.pp or 1) * (mesh.cp or 1)
    steps = total // (micro * max(1, processes // shared)) if processes else None
    kind = read.text("rlhf_type")
    method = read.text("tuner_type", "train_type") or "full"
    adapter = method != "full"
    dtype = dtype_word(read.text("torch_dtype")) or "bf16"
    read.notes.append("Megatron is out of scope: the FSDP2 equivalent is swift sft with --fsdp fsdp2")
    run = read.describe(
        model=read.text("model", "load", "mcore_model"),
        method=method,
        lora_rank=(read.whole("lora_rank") or 8) if adapter else None,
        lora_targets=read.names("target_modules") or "all-linear" if adapter else None,
        base_dtype=dtype,
        quantisation="none",
        stored_dtype=dtype,
        compute_dtype=dtype,
        objective=kind or {"rlhf": "dpo", "pt": "pretrain"}.get(file.launch.verb, "sft"),
        sequence_length=read.whole("max_length", "seq_length"),
        packing=read.flag("packing"),
        micro_batch=micro,
        accumulation=max(1, steps) if steps is not None else None,
        global_batch=total,
        optimizer="adam",
        optimizer_state_bits=32,
        gradient_checkpointing=read.text("recompute_granularity") or "selective",
        processes=processes,
        fsdp="none",
        mesh=mesh,
        epochs=read.number("num_train_epochs", "max_epochs"),
    )
    sharding = UnmodelledKey("tensor_model_parallel_size", "memory")
    return replace(run, keys=replace(run.keys, not_modelled=(*run.keys.not_modelled, sharding)))
