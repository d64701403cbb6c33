"""The stand-ins for named losses hold what their originals hold."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from memory_cases import allocation_peak
from torch import Tensor
from torch.nn import functional

from fsdptool.memory.tracing.named_losses import NAMED_LOSSES, TITAN_CHUNKS, titan_loss
from fsdptool.records.anatomy import LogitTail

ROWS, POSITIONS, WIDTH, VOCABULARY = 2, 256, 32, 2048
LOGITS = ROWS * POSITIONS * VOCABULARY * 2


def head(*, trained: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, POSITIONS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16, requires_grad=trained)
    return hidden, weight, torch.randint(0, VOCABULARY, (ROWS, POSITIONS))


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """torchtitan's ``cross_entropy_loss``."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1), reduction="sum")


@pytest.mark.slow
def test_a_compiled_loss_keeps_16_bit_logits_and_no_others() -> None:
    """What the compiler saves for backward, and the peak of Inductor's kernels on the CPU: two copies."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    hidden, weight, targets = head()
    logits = functional.linear(hidden, weight).detach().requires_grad_()
    compiled = torch.compile(entropy, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(logits, targets)
    large = [tensor for tensor in kept if tensor.numel() == logits.numel()]
    assert [tensor.dtype for tensor in large] == [torch.bfloat16]

    def ours() -> None:
        loss = NAMED_LOSSES["compiled"](hidden, weight, None, targets, 0, LogitTail())
        torch.autograd.backward(loss)

    assert allocation_peak(ours) == pytest.approx(2 * LOGITS, rel=0.02)


@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
def test_torchtitans_chunks_hold_what_its_own_steps_hold(trained: bool) -> None:
    """Detach, head and backward by chunk, gradients that add up in fp32, from its description."""
    hidden, weight, targets = head(trained=trained)
    sums: list[Tensor] = []

    def theirs() -> None:
        total = torch.zeros_like(hidden, dtype=torch.float32)
        pieces = (value.chunk(TITAN_CHUNKS, 1) for value in (hidden, targets, total))
        for part, aims, place in zip(*pieces, strict=True):
            states = part.detach().contiguous().requires_grad_()
            logits = functional.linear(states, weight)
            loss = entropy(logits, aims)
            del logits
            torch.autograd.backward(loss)
            place.copy_(states.grad)
            if weight.grad is not None:
                # FSDP2 keeps the gradient that is not reduced yet in the dtype of the reduction.
                sums[:] = [sums[0].add_(weight.grad) if sums else weight.grad.float()]
                weight.grad = None
        torch.autograd.backward(hidden, total.to(hidden.dtype))

    def ours() -> None:
        torch.autograd.backward(titan_loss(hidden, weight, None, targets, compiled=False))

    expected = allocation_peak(theirs)
    hidden.grad = weight.grad = None
    assert allocation_peak(ours) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
def test_ligers_loss_holds_one_chunk_of_logits_and_gradients_in_the_parameters_dtype(trained: bool) -> None:
    """512 tokens and 64 times as many entries as the width: chunks of 8 tokens."""
    hidden, weight, targets = head(trained=trained)
    run = partial(NAMED_LOSSES["liger"], hidden, weight, None, targets, 0, LogitTail())
    chunk = 8 * VOCABULARY * 2
    gradients = (hidden.numel() + trained * weight.numel()) * 2
    numbers = ROWS * POSITIONS * 4
    assert allocation_peak(lambda: torch.autograd.backward(run())) == pytest.approx(
        chunk + gradients + numbers, rel=0.02
    )
