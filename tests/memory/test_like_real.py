"""What a trace on fake tensors does as a real run does it: masks, and products that kernels refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from fsdptool.memory.tracing.kernels import kernels_of
from fsdptool.memory.tracing.recorder import SegmentRecorder
from fsdptool.records.trace import Profile


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
    with FakeTensorMode(allow_non_fake_inputs=True), SegmentRecorder([]):
        layer(torch.empty(2, 4, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match=r"float32 and torch\.bfloat16"):
            layer(torch.empty(2, 4))
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.zeros(2, 4))


_PERMUTED: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, y: torch.ops.aten._softmax(x, -1, False),
    "log_softmax": lambda x, y: torch.ops.aten._log_softmax(x, -1, False),
    "backward of softmax": lambda x, y: torch.ops.aten._softmax_backward_data(x, y, -1, x.dtype),
    "layer norm": lambda x, y: torch.ops.aten.native_layer_norm(x, [64], y[0, 0], y[0, 1], 1e-5),
    "gradient of an embedding": lambda x, y: torch.ops.aten.embedding_dense_backward(
        x, torch.zeros(64, 64, dtype=torch.int64), 8, -1, False
    ),
    "mean": lambda x, y: torch.ops.aten.mean.dim(x.bfloat16(), [-1]),
}


@pytest.mark.parametrize("name", _PERMUTED)
@pytest.mark.parametrize("contiguous", [True, False])
def test_copies_that_kernels_make_of_their_inputs_are_counted(name: str, contiguous: bool) -> None:
    call = _PERMUTED[name]
    x, y = torch.randn(64, 64, 64), torch.randn(64, 64, 64)
    call(x, y)  # what a first call allocates for good
    if not contiguous:
        x = x.transpose(0, 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        out = call(x, y)
    events = profiler.profiler.kineto_results.events()
    real = _highest(
        event.nbytes()
        for event in sorted(events, key=lambda event: event.start_ns())
        if event.name() == "[memory]"
    )
    del out
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, y = mode.from_tensor(x), mode.from_tensor(y)
        with SegmentRecorder([x, y], "cpu") as recorder:
            out = call(x, y)
            trace = recorder.trace(profile="cpu", compute_dtype="float32")
        del out
    planned = _highest(
        trace.sizes[abs(event) - 1] * (1 if event > 0 else -1)
        for segment in trace.segments
        for event in segment.events
    )
    assert planned == pytest.approx(real, rel=0.05)  # some keep partial sums, of 3 % here


def _highest(changes: Iterable[int]) -> int:
    return max(accumulate(changes))


def test_cuda_normalises_by_the_root_mean_square_in_one_kernel() -> None:
    def names(layer: torch.nn.RMSNorm, device: Profile) -> list[str]:
        with kernels_of(device), FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(4, 6, 8, dtype=torch.bfloat16, requires_grad=True)
            with SegmentRecorder([x, *layer.parameters()], device) as recorder:
                layer(x).backward(torch.empty_like(x))
                trace = recorder.trace(profile=device, compute_dtype="bfloat16")
        return [trace.vocabulary[name] for name in trace.names]

    layer = torch.nn.RMSNorm(8, dtype=torch.bfloat16)
    forward, backward = ["_fused_rms_norm"] * 2, ["_fused_rms_norm_backward"] * 2
    assert names(layer, "cuda") == [*forward, "empty_like", *backward]
    assert "_fused_rms_norm" not in names(layer, "cpu")
    assert "_fused_rms_norm" not in names(torch.nn.RMSNorm(8), "cuda"), "dtypes differ"
