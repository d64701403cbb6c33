"""Denoisers that are said to embed times in fp32 do so when all else is bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors

from fsdptool.families.registry import load_registry
from fsdptool.testing.families import small_model

EXACT = [family.name for family in load_registry().all() if family.exact_inputs and family.flavours()]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", EXACT)
def test_exact_times_run_beside_bfloat16(name: str) -> None:
    family = load_registry().get(name)
    small = small_model(family, next(iter(family.flavours().values())))
    buffers = {key: buffer.clone() for key, buffer in small.model.named_buffers()}
    model = small.model.eval().to(torch.bfloat16)
    for key, buffer in model.named_buffers():  # FSDP casts parameters, not buffers
        buffer.data = buffers[key]
    seen: set[torch.dtype] = set()

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert not [value for value in args if isinstance(value, torch.Tensor) and value.dim() == 1]
        kept = {key: value for key, value in kwargs.items() if key in family.exact_inputs}
        seen.update(value.dtype for value in kept.values())
        return _apply_to_tensors(cast, args), {**_apply_to_tensors(cast, kwargs), **kept}

    model.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        predicted = small.objective.predict(model, small.batch)["prediction"]
    assert seen and seen <= {torch.float32, torch.int64}
    assert predicted.shape[0] == small.batch["latents"].shape[0]
