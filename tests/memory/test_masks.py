"""The masks that transformers builds while a step is traced are those of a real run."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptool.memory.tracing.kernels import kernels_of


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
