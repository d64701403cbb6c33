"""What a trace on fake tensors does as a real run does it: masks, and products that kernels refuse."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptool.memory.tracing.kernels import kernels_of
from fsdptool.memory.tracing.recorder import Recorder


def test_a_mask_that_a_model_fills_with_ones_is_dropped_and_the_batchs_is_not() -> None:
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(hidden_size=16, num_attention_heads=2, attn_implementation="sdpa")

    def built(given: torch.Tensor | None) -> torch.Tensor | None:
        return create_causal_mask(
            config=config, inputs_embeds=torch.empty(2, 8, 16), attention_mask=given, past_key_values=None
        )

    with kernels_of("cpu"), FakeTensorMode():
        of_batch = torch.empty(2, 8, dtype=torch.int64)
        assert built(torch.ones(2, 8)) is None
        assert built(torch.ones_like(of_batch)) is None
        kept = built(of_batch)
        assert kept is not None and kept.shape == (2, 1, 8, 8)
    assert torch.ones(2, 3).sum() == 6 and torch.ones.__name__ == "ones", "torch is left as it was"


def test_a_product_of_two_dtypes_cannot_be_traced() -> None:
    layer = torch.nn.Linear(4, 3, bias=False).to(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder([]):
        layer(torch.empty(2, 4, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match=r"float32 and torch\.bfloat16"):
            layer(torch.empty(2, 4))
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.zeros(2, 4))
