"""What loading a pipeline's parts has in common."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def quiet() -> None:
    """No progress bars of the libraries: ours is one line per shard."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def free(device: str) -> None:
    """Give back what nobody holds any more."""
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def owned(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, laid out as it reads: a view would keep, and save, all of a larger tensor."""
    import torch

    return tensor.cpu().clone(memory_format=torch.contiguous_format)
