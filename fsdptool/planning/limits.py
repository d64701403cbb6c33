"""Sizes beyond which a plan would mean nothing: typing errors rather than runs."""

from __future__ import annotations

from fsdptool.config.recipe_ranges import MAX_RANK
from fsdptool.errors import PlanError
from fsdptool.records.recipe import Recipe

MAX_SIZE = 1 << 40
"""Samples x positions or pixels of a micro-batch beyond which byte counts no longer mean anything."""

MAX_TOKENS = 1 << 24
"""Tokens of a micro-batch: sixteen million. Losses run over them in chunks, a trace through every one."""


def check_sizes(recipe: Recipe) -> None:
    """Refuse sizes no memory arithmetic can mean.

    Raises:
        PlanError: The micro-batch holds more positions, pixels or samples than anything could, or an
            adapter's rank is larger than any layer.
    """
    lora = recipe.method.lora
    if lora is not None and lora.rank > MAX_RANK:
        raise PlanError(
            f"LoRA rank {lora.rank:,} is larger than any layer is wide",
            help="ranks of 8 to 256 are usual",
        )
    batch = recipe.batch
    sizes = {
        "micro-batch": batch.micro_batch,
        "sequence length": batch.sequence_length,
        "height": batch.height,
        "width": batch.width,
        "frames": batch.frames,
    }
    total = 1
    for name, size in sizes.items():
        if size is not None and size > MAX_SIZE:
            raise PlanError(
                f"{name} {size:,} is too large for memory arithmetic", help="check for a typing error"
            )
        total *= size or 1
    tokens = batch.micro_batch * (batch.sequence_length or 1)
    if tokens > MAX_TOKENS and total <= MAX_SIZE:
        raise PlanError(
            f"{tokens:,} tokens in one forward are too many for one rank",
            help="check for a typing error, or accumulate smaller micro-batches",
        )
    if total > MAX_SIZE:
        parts = " x ".join(f"{name} {size:,}" for name, size in sizes.items() if size is not None)
        raise PlanError(
            f"{parts} = {total:,} is too large for memory arithmetic", help="check for a typing error"
        )
