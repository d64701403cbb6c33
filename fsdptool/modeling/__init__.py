"""What is done to a model before its first step, by the tracer and the trainer alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import ModelChoice


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
