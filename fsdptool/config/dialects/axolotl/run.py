"""The run that an axolotl file describes.

Source: axolotl 0.19.0 (src/axolotl): ``utils/schemas`` (keys, defaults), ``utils/config/__init__.py``
(normalize_config, resolve_dtype), ``loaders/model.py``, ``loaders/adapter.py``,
``monkeypatch/accelerate/fsdp2.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fsdptool.config.dialects.axolotl.run_keys import KEYS
from fsdptool.config.dialects.launches import counted, on_ranks
from fsdptool.config.dialects.run_reader import RunFile, RunReader, global_batch, state_bits
from fsdptool.config.dialects.trainer.run import loader_settings
from fsdptool.config.programs import is_before
from fsdptool.records.described_run import DescribedMesh, DescribedRun

_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "eager_attention": "eager",
}
"""Deprecated switches, and what they set ``attn_implementation`` to (utils/schemas/config.py:1547)."""
_LINEAR = "all-linear"
_OBJECTIVES = {"ipo": "dpo", "gdpo": "grpo"}
"""Values of ``rl`` that change only the loss of another one (core/builders/rl.py)."""


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a file."""
    read = RunReader(file, KEYS)
    adapter = (read.text("adapter") or "").lower()
    dtype = _dtype(read)
    method, quantisation, base = _method(read, adapter, dtype)
    fsdp, sharding = _fsdp(read)
    read.problems.extend(_refusals(read, adapter))
    stored: str | None = "fp32" if adapter else base
    if adapter and read.value("peft_autocast_adapter_dtype") is False and fsdp == "none":
        stored = dtype  # loaders/adapter.py:368; under FSDP2 accelerate casts what trains to fp32
    if fsdp == "none" and file.launch.fsdp:
        # The environment that accelerate sets counts, and axolotl's own preparation is not put in its place.
        fsdp, stored = file.launch.fsdp, "fp32" if dtype != "fp32" else stored
        sharding = {
            "wrap_classes": file.launch.wrap_classes,
            "reshard": file.launch.reshard,
            "cpu_offload": file.launch.cpu_offload,
            "checkpoints": file.launch.checkpointing,
        }
    elif file.launch.unread is not None and fsdp == "none":
        fsdp = None
    if fsdp == 1:
        stored = "fp32"  # accelerate's preparation of FSDP1 upcasts what trains
    plugins = " ".join(map(str, _list(read.value("plugins")))).lower()
    if "llm_compressor" in plugins:
        base, stored, quantisation = "checkpoint", None, None
    micro = read.whole("micro_batch_size")
    accumulation = _accumulation(read)
    mesh = DescribedMesh(
        dp_replicate=read.whole("dp_replicate_size"),
        dp_shard=read.whole("dp_shard_size"),
        cp=read.whole("context_parallel_size", "sequence_parallel_degree"),
        tp=read.whole("tensor_parallel_size"),
        ep=read.whole("expert_parallel_size"),
    )
    packing = read.flag("sample_packing")
    if packing and (micro or 1) > 1:
        read.notes.append(
            "packing joins the micro-batch into one row of micro_batch_size x sequence_len tokens"
        )
    read.use("lora_alpha")
    loader_settings(read)
    if read.raw("deepspeed"):
        read.notes.append(
            "DeepSpeed is out of scope: the FSDP2 equivalent is fsdp_config with fsdp_version: 2"
        )
    if str(read.raw("model_quantization_config")) == "Mxfp4Config":
        read.use("model_quantization_config", "model_quantization_config_kwargs")
        read.notes.append("the MXFP4 checkpoint is dequantised while it is loaded")
    processes = _processes(read)
    if processes is None and (mesh.dp_shard or 0) > 0 and (mesh.dp_replicate or 0) > 1:
        # Only without dp_replicate_size may further ranks be replicas (utils/distributed.py:320).
        sizes = (mesh.dp_shard, mesh.dp_replicate, mesh.cp, mesh.tp)
        processes = math.prod(size or 1 for size in sizes)
    optimizer = read.text("optimizer")
    return read.describe(
        model=read.text("base_model"),
        method=method,
        lora_rank=read.whole("lora_r") if adapter else None,
        lora_dropout=read.number("lora_dropout") if adapter else None,
        lora_targets=_targets(read) if adapter else None,
        lora_modules_to_save=_names(read.value("lora_modules_to_save")) if adapter else (),
        base_dtype=base,
        quantisation=quantisation,
        stored_dtype=stored,
        compute_dtype="fp8" if read.flag("fp8") else dtype,
        reduce_dtype=None if stored is None else dtype if fsdp != "none" else stored,
        objective=_objective(read),
        sequence_length=read.whole("sequence_len"),
        packing=packing,
        # core/builders/causal.py: only false leaves out pad_to_multiple_of
        full_rows=None if read.value("pad_to_sequence_len") is None else read.flag("pad_to_sequence_len"),
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=global_batch(micro, accumulation, processes, mesh),
        optimizer=optimizer,
        optimizer_state_bits=state_bits(optimizer, stored) if stored else None,
        attention=_attention(read),
        fused_loss=_fused_loss(read, plugins),
        fused_kernels=_fused_kernels(read, plugins),
        compile=read.value("torch_compile") not in (False, None, "false"),
        processes=processes,
        fsdp=fsdp,
        mesh=mesh,
        steps=read.whole("max_steps"),
        epochs=read.number("num_epochs"),
        **_checkpointing(read, adapter, sharding.pop("checkpoints")),
        **sharding,
    )


def _processes(read: RunReader) -> int | None:
    """Return the ranks: ``axolotl train`` hands flags of its launcher on (``cli/utils/args.py``)."""
    launch = read.file.launch
    if read.switched_on("use_ray"):  # cli/train.py: Ray's TorchTrainer
        return read.whole("ray_num_workers")
    if launch.program != "axolotl":
        return launch.processes
    launcher = read.raw("launcher")
    if launcher == "python":
        return 1
    if launcher == "torchrun" or read.has("nproc_per_node"):
        return on_ranks(launch, {"nproc_per_node": 1, **read.data}, "nproc_per_node", "nnodes").processes
    return counted(read.raw("num_processes")) if read.has("num_processes") else launch.processes


def _refusals(read: RunReader, adapter: str) -> Iterator[str]:
    """Yield what the schema refuses (utils/schemas): the run is described all the same."""
    if not read.has("learning_rate"):
        yield "learning_rate is missing: axolotl stops"
    switched = [key for key in _ATTENTION if read.switched_on(key)]
    if switched and read.has("attn_implementation"):
        yield f"attn_implementation cannot be combined with {switched[0]} (config.py:1571)"
    if not adapter and (read.switched_on("load_in_8bit") or read.switched_on("load_in_4bit")):
        yield "load_in_8bit and load_in_4bit need an adapter"
    if read.has("batch_size") and read.has("gradient_accumulation_steps"):
        yield "only one of gradient_accumulation_steps and batch_size may be set (validation.py:278)"


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, _list(value)))


def _dtype(read: RunReader) -> str:
    """Return what ``resolve_dtype`` sets ``torch_dtype`` to; ``auto`` is bf16 on every GPU since Ampere."""
    half = read.flag("fp16")
    if "bf16" in read.data and read.data["bf16"] is None:  # no default counts beside a null
        read.use("bf16")
        if read.flag("bfloat16"):
            return "bf16"
        return "fp16" if half or read.flag("float16") or read.flag("load_in_8bit") else "fp32"
    automatic = str(read.value("bf16")).lower() == "auto"
    if (automatic and not half) or (not automatic and read.flag("bf16")) or read.flag("bfloat16"):
        return "bf16"
    return "fp16" if half or read.flag("float16") or read.flag("load_in_8bit") else "fp32"


def _method(read: RunReader, adapter: str, dtype: str) -> tuple[str, str | None, str]:
    """Return the method, the quantisation and the dtype of the loaded base (loaders/model.py:801)."""
    four, eight = read.flag("load_in_4bit"), read.flag("load_in_8bit")
    if not adapter:
        return "full", "none", dtype
    block = read.raw("peft")
    if isinstance(block, Mapping) and block.get("weight_dtype"):
        read.notes.append(
            "0.19.0 does not read peft.weight_dtype; later versions quantise the base by torchao"
        )
        if read.file.version is not None and is_before(read.file.version, 0, 20):
            read.inert("peft.weight_dtype")
        else:
            read.unmodelled("peft.weight_dtype", "less")
    if adapter == "qlora":
        if not four:
            read.problems.append("adapter: qlora needs load_in_4bit: true (utils/schemas/peft.py:220)")
        return "qlora", f"bnb nf4, double quantisation, storage {dtype}", dtype
    if adapter == "lora" and eight:
        return "lora8bit", "bnb int8", dtype
    if four:
        read.notes.append(
            "load_in_4bit quantises only with adapter: qlora; here prepare_model_for_kbit_training casts the "
            "unquantised base to fp32 (loaders/model.py:1144)"
        )
        return adapter, "none", "fp32"
    return adapter, "none", dtype


def _targets(read: RunReader) -> tuple[str, ...] | str | None:
    named = read.names("lora_target_modules")
    if read.flag("lora_target_linear"):
        if isinstance(named, tuple):
            read.notes.append(
                "lora_target_linear: every Linear layer but the output embedding, and those named"
            )
        return _LINEAR
    return (named,) if isinstance(named, str) and isinstance(read.raw("lora_target_modules"), list) else named


def _objective(read: RunReader) -> str:
    rl = read.text("rl")
    if rl:
        return _OBJECTIVES.get(rl.lower(), rl.lower())
    if read.flag("gkd_trainer"):
        return "distillation"
    if read.flag("reward_model"):
        return "reward"
    if read.flag("process_reward_model"):
        return "classification"  # of the steps of one row: TRL's PRMTrainer
    return "pretrain" if read.value("pretraining_dataset") else "sft"


def _accumulation(read: RunReader) -> int | None:
    if read.has("batch_size") and not read.has("gradient_accumulation_steps"):
        read.notes.append(
            "batch_size is not looked at: gradient_accumulation_steps is 1 by then (utils/config)"
        )
    return read.whole("gradient_accumulation_steps")


def _attention(read: RunReader) -> str:
    named = read.text("attn_implementation")
    switched = [word for key, word in _ATTENTION.items() if read.flag(key)]
    if named is None and not switched:
        read.default("attn_implementation", "sdpa", "transformers' default")
    return named or (switched[0] if switched else "sdpa")


_KERNELS = {
    "fused_norm": ("liger_rms_norm", "liger_layer_norm"), "fused_rope": ("liger_rope",),
    "fused_glu": ("liger_glu_activation", "liger_swiglu"),
}  # fmt: skip
"""Keys of the Liger plugin (integrations/liger/args.py)."""
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


def _fused_kernels(read: RunReader, plugins: str) -> tuple[str, ...]:
    """Return the kernels that are fused; their keys stay among those whose memory is not planned.

    ``lora_mlp_kernel`` computes the gated activation, too (kernels/lora.py).
    """
    found = {
        name
        for name, keys in _KERNELS.items()
        if "liger" in plugins and any(read.switched_on(k) for k in keys)
    }
    if read.switched_on("lora_mlp_kernel"):
        found.add("fused_glu")
    if all(read.switched_on(key) for key in _LORA_KERNELS):
        found.add("fused_lora")
    return tuple(sorted(found))


def _fused_loss(read: RunReader, plugins: str) -> str:
    cut = "cut_cross_entropy"
    if cut in plugins and (not read.has(cut) or read.switched_on(cut)):
        read.use(cut)
        return "cce"
    if "liger" in plugins and read.flag("liger_fused_linear_cross_entropy"):
        return "liger"
    return "chunked" if read.flag("chunked_cross_entropy") else "none"


def _checkpointing(read: RunReader, adapter: str, by_fsdp: bool) -> dict[str, Any]:
    value = read.value("gradient_checkpointing")
    word = str(value).lower()
    kept = str(read.value("activation_offloading")).lower()
    offloads = word in ("offload", "offload_disk") or kept in ("true", "legacy", "disk")
    recomputes = word in ("true", "offload", "offload_disk", "unsloth") or by_fsdp
    if str(read.raw("selective_checkpointing") or False).lower() != "false":
        read.use("selective_checkpointing")
        return {"gradient_checkpointing": "selective", "activation_offloading": offloads}
    if offloads and adapter:
        read.notes.append(
            "activation_offloading with an adapter: recompute is switched on in one place of axolotl and off "
            "in another; planned as recompute with the inputs of layers in host memory"
        )
        return {"gradient_checkpointing": "offload", "activation_offloading": True}
    return {"gradient_checkpointing": "full" if recomputes else "none", "activation_offloading": offloads}


def _fsdp(read: RunReader) -> tuple[Any, dict[str, Any]]:
    """Return the version of FSDP and what its block says; without a version it is 1 (validation.py:1216)."""
    words, block = read.value("fsdp"), read.section("fsdp_config")
    if not words and not block:
        open_or_none = None if read.has("fsdp_config") and read.raw("fsdp_config") != {} else "none"
        return open_or_none, {
            "wrap_classes": None,
            "reshard": None,
            "cpu_offload": False,
            "checkpoints": False,
        }

    def keys(name: str) -> tuple[str, str]:
        return f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}"

    def get(name: str) -> Any:
        return read.value(*keys(name))

    version = read.whole("fsdp_version") or get("version") or 1
    wrap = get("transformer_layer_cls_to_wrap")
    classes = tuple(part.strip() for part in wrap.split(",")) if isinstance(wrap, str) else _names(wrap)
    second, said = str(version) == "2", get("reshard_after_forward") is not None
    return (2 if second else 1), {
        "wrap_classes": classes or None,
        "reshard": read.flag(*keys("reshard_after_forward")) if second and said else True,
        "cpu_offload": read.flag(*keys("offload_params")) or "offload" in str(words),
        "checkpoints": read.flag(*keys("activation_checkpointing")),
    }
