"""Data of a training run: sources, tokens, packing, order over ranks, exact positions.

See docs/explanation/data-order.md.
"""

from fsdptool.training.data.build import (
    build_batches,
    build_evaluation,
    data_cache,
    prepare,
    share_of,
)
from fsdptool.training.data.tokenizer import Encoder, load_tokenizer

__all__ = [
    "Encoder",
    "build_batches",
    "build_evaluation",
    "data_cache",
    "load_tokenizer",
    "prepare",
    "share_of",
]
