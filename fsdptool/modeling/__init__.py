"""What is done to a model before its first step, by the tracer and the trainer alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdptool.versions import torch_is

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import ModelChoice


def half_groups_only(original: Callable[..., bool], *, flash: bool = True) -> Callable[..., bool]:
    """Return transformers' choice between grouped and repeated keys for SDPA, true for flash attention only.

    CUDA's memory-efficient kernel, the only fused one for fp32, takes fewer key heads than query heads from
    torch 2.14 on (``sdp_utils.cpp``, ``supports_gqa``). Before, SDPA falls to plain products, which hold the
    scores of every head and keep them for backward.

    Args:
        original: ``use_gqa_in_sdpa`` of ``transformers.integrations.sdpa_attention``: mask and key, and from
            5.15 on the value, too.
        flash: Whether the GPU has flash attention, the other fused kernel: it takes 16 bits, from Ampere on.
    """
    import torch

    def wanted(attention_mask: Any, key: Any, *value: Any) -> bool:
        half = key.dtype in (torch.float16, torch.bfloat16)
        return flash and half and original(attention_mask, key, *value)

    return original if torch_is(2, 14) else wanted


def choose_kernels_of_cuda() -> None:
    """Let transformers call SDPA so that CUDA has a fused kernel for it, for the rest of this process."""
    import torch

    try:
        from transformers.integrations import sdpa_attention
    except ImportError:
        return
    if hasattr(sdpa_attention, "use_gqa_in_sdpa"):
        flash = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)
        sdpa_attention.use_gqa_in_sdpa = half_groups_only(sdpa_attention.use_gqa_in_sdpa, flash=flash)


def build_model(spec: ModelSpec, choice: ModelChoice, *, cp: int, initialise: bool = True) -> nn.Module:
    """Build a model on meta as training needs it: without generation caches.

    A cache would grow twice when a block is recomputed.

    Args:
        spec: The model.
        choice: dtype and attention.
        cp: Ranks that share a sequence; with more than one they exchange keys and values.
        initialise: False skips drawing values, which meta tensors cannot hold.
    """
    from fsdptool.garbage import without_gc
    from fsdptool.inspection.build import build
    from fsdptool.modeling.context_parallel import attention_of

    with without_gc():
        model = build(spec, dtype=choice.dtype, attention=attention_of(choice, cp), initialise=initialise)
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False
    return model
