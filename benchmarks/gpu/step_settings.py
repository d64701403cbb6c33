"""The settings of the stages ``memory`` and ``variants``, the most valuable first.

Every model is measured masked (documents in a packed batch are separated, the default) and unmasked, because
the mask decides the attention kernel: on Hopper torch tries cuDNN first, with and without a mask.
"""

from __future__ import annotations

from dataclasses import replace

from settings import Setting
from step_rows import StepRow

_NO_CUDNN = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_TEXT = {"sequence_length": 2048, "micro_batch": 1}
_LONG = {"sequence_length": 8192, "micro_batch": 1}
_LENGTHS = (17, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 63)
"""Of a batch that is padded to its longest sample: cuDNN builds a graph for each length."""
_IMAGE = {"height": 1024, "width": 1024, "micro_batch": 1}


def _text(name: str, family: str, reference: str, *, masked: bool = False, **fields: object) -> Setting:
    full = {"batch": _TEXT, "packed": masked, "ranks": 1, **fields}
    kind = "masked" if masked else "unmasked"
    return Setting(f"{name} {kind}", family, reference, **full)  # type: ignore[arg-type]


_SMALL = ("qwen3 0.6b n1", "qwen3", "qwen3:0.6b")
_MIDDLE = ("qwen3", "qwen3:1.7b")
_LARGE = ("llama", "llama3:8b")


def _without_cudnn(row: StepRow) -> StepRow:
    name = f"{row.setting.name} without cuDNN attention"
    return replace(row, setting=replace(row.setting, name=name), environment=_NO_CUDNN)


_PLAIN = StepRow(_text(*_SMALL))
_MASKED = StepRow(_text(*_SMALL, masked=True))

MEMORY = (
    _PLAIN,
    _MASKED,
    StepRow(_text("llama3 8b n8", *_LARGE, ranks=8)),
    StepRow(_text("llama3 8b n8", *_LARGE, ranks=8, masked=True)),
    _without_cudnn(_PLAIN),
    _without_cudnn(_MASKED),
    StepRow(_text("qwen3 1.7b n1 ac-full", *_MIDDLE, checkpointing="full")),
    StepRow(_text("qwen3 1.7b n1 ac-full", *_MIDDLE, checkpointing="full", masked=True)),
    StepRow(_text("qwen3 1.7b n8 ac-selective", *_MIDDLE, ranks=8, checkpointing="selective")),
    StepRow(_text("llama3 8b n64 ac-full s8192", *_LARGE, ranks=64, checkpointing="full", batch=_LONG)),
    StepRow(_text("llama3 8b n8 reduced in bf16", *_LARGE, ranks=8, precision="bf16r")),
    StepRow(_text("llama3 8b n8 not resharded", *_LARGE, ranks=8, reshard=False)),
    StepRow(_text("llama3 8b n8 expandable", *_LARGE, ranks=8), environment=_EXPANDABLE),
    StepRow(_text("llama3 8b lora n1 ac-full", *_LARGE, method="lora", checkpointing="full")),
    StepRow(
        _text("qwen3 14b lora n8 ac-full", "qwen3", "qwen3:14b", ranks=8, method="lora", checkpointing="full")
    ),
    StepRow(
        Setting(
            "gpt2 xl n8 fp32",
            "llama",
            "gpt2:xl",
            batch={"sequence_length": 1024},
            precision="fp32",
            packed=False,
        )
    ),
    StepRow(_text("llama3 8b n8 accumulated unsharded", *_LARGE, ranks=8, accumulation=2, held="unsharded")),
    StepRow(_text("llama3 8b n8 accumulated sharded", *_LARGE, ranks=8, accumulation=2)),
    StepRow(
        _text(
            "qwen3-moe 30b-a3b n64 ac-full", "qwen3-moe", "qwen3-moe:30b-a3b", ranks=64, checkpointing="full"
        )
    ),
    StepRow(
        Setting(
            "flux lora n8 ac-full", "flux", "flux.1:dev", batch=_IMAGE, method="lora", checkpointing="full"
        )
    ),
    StepRow(Setting("sdxl n8", "sdxl", "sdxl:unet", batch=_IMAGE)),
    StepRow(Setting("bert large n1", "bert", "bert:large-uncased", ranks=1, batch={"sequence_length": 512})),
    StepRow(_text("qwen3 1.7b n8 ac-every-2", *_MIDDLE, ranks=8, checkpointing="every_n")),
    StepRow(_text("qwen3 1.7b n8 prefetch 2", *_MIDDLE, ranks=8, prefetch=2)),
    StepRow(_text("qwen3 0.6b n8 accelerate layout", "qwen3", "qwen3:0.6b", ranks=8, layout="accelerate")),
    StepRow(_text("qwen3 4b n1 ac-full", "qwen3", "qwen3:4b", checkpointing="full")),
    StepRow(_text("llama3 8b n8 offloaded", *_LARGE, ranks=8), offload=True, timed=2),
    StepRow(
        _text("qwen3 1.7b n1 ac-full activations offloaded", *_MIDDLE, checkpointing="full"),
        offload_activations=True,
    ),
    StepRow(_text("qwen3 0.6b n1 of many lengths", "qwen3", "qwen3:0.6b"), lengths=_LENGTHS),
    _without_cudnn(StepRow(_text("qwen3 0.6b n1 of many lengths", "qwen3", "qwen3:0.6b"), lengths=_LENGTHS)),
)
"""Eager steps: 30 settings. Those of one model and environment run in one process, one after another."""

VARIANTS = (
    StepRow(_text("qwen3 1.7b n1 compiled", *_MIDDLE), compile=True),
    StepRow(_text("llama3 8b n8 compiled", *_LARGE, ranks=8), compile=True),
    StepRow(_text("llama3 8b lora nf4 n1 ac-full", *_LARGE, method="lora-nf4", checkpointing="full")),
    StepRow(_text("llama3 8b lora int8 n1 ac-full", *_LARGE, method="lora-int8", checkpointing="full")),
    StepRow(_text("llama3 8b lora float8 n1 ac-full", *_LARGE, method="lora-float8", checkpointing="full")),
    StepRow(_text("qwen3 1.7b n1 fp8", *_MIDDLE), fp8=True),
    StepRow(_text("qwen3 1.7b n1 fp8 compiled", *_MIDDLE), fp8=True, compile=True),
    StepRow(_text("qwen3 1.7b n1 adamw8bit", *_MIDDLE, optimizer="adamw8bit")),
    StepRow(_text("qwen3 1.7b n1 muon", *_MIDDLE, optimizer="muon")),
    StepRow(_text("qwen3 1.7b n1 ac-full compiled", *_MIDDLE, checkpointing="full"), compile=True),
)
"""Other kernels than plain bf16 ones: compiled blocks, quantised bases, float8, other optimizers."""
