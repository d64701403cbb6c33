"""What kernels refuse for its dtypes, a trace refuses: fake tensors alone would go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from fsdptool.memory.tracing.kernels import kernels_of
from fsdptool.memory.tracing.operators import check_factors
from fsdptool.memory.tracing.recorder import SegmentRecorder

HALF, WHOLE = torch.bfloat16, torch.float32


def convolve() -> Tensor:
    """Convolve bf16 by fp32."""
    return functional.conv1d(torch.ones(1, 2, 8, dtype=HALF), torch.ones(3, 2, 1, dtype=WHOLE))


def multiply() -> Tensor:
    """Multiply fp32 by bf16."""
    return torch.ones(2, 3, dtype=WHOLE) @ torch.ones(3, 2, dtype=HALF)


def normalise() -> Tensor:
    """Normalise by bf16 weights with running statistics in fp32, as FSDP2's mixed precision leaves them."""
    mean, variance = torch.zeros(4, dtype=WHOLE), torch.ones(4, dtype=WHOLE)
    weight, bias = torch.ones(4, dtype=HALF), torch.zeros(4, dtype=HALF)
    inputs = torch.ones(2, 4, 8, dtype=HALF)
    return functional.batch_norm(inputs, mean, variance, weight, bias, training=True)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (convolve, "Input type"),
        (multiply, "a matrix product of"),
        (normalise, "batch normalisation"),
    ],
)
def test_mixed_dtypes_are_refused_as_kernels_refuse_them(run: Callable[[], Tensor], words: str) -> None:
    with pytest.raises(RuntimeError):
        run()
    with kernels_of("cpu"), FakeTensorMode(), SegmentRecorder([]), pytest.raises(RuntimeError, match=words):
        run()


def test_a_convolution_is_told_from_a_product() -> None:
    """torch 2.13 refuses it itself, in fake mode, too."""
    factors = torch.ones(1, 2, 8, dtype=HALF), torch.ones(3, 2, 1, dtype=WHOLE)
    with pytest.raises(RuntimeError, match="a convolution of"):
        check_factors(torch.ops.aten.convolution.default, factors)
