"""Chunked losses against torch's own, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fsdptool.families.objectives.entropy import cross_entropy, divergence


def _logits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    return drawn.to(dtype).requires_grad_()


def _targets(*shape: int) -> torch.Tensor:
    targets = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))
    targets[..., ::3] = -100
    return targets


@pytest.mark.parametrize("chunk", [0, 1, 7, 13, 1000])
def test_cross_entropy_is_torchs(chunk: int) -> None:
    logits, targets = _logits(torch.float64, 2, 13, 50), _targets(2, 13)
    ours = cross_entropy(logits, targets, chunk)
    (gradient,) = torch.autograd.grad(ours * 0.3, logits)
    theirs = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (expected,) = torch.autograd.grad(theirs * 0.3, logits)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, expected)


def test_cross_entropy_passes_gradcheck() -> None:
    logits, targets = _logits(torch.float64, 5, 50), _targets(5)
    assert torch.autograd.gradcheck(lambda value: cross_entropy(value, targets, 2), (logits,))


@pytest.mark.parametrize("chunk", [0, 3, 1000])
def test_divergence_is_torchs(chunk: int) -> None:
    student = _logits(torch.float64, 2, 9, 50)
    teacher = torch.randn(2, 9, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    valid = _targets(2, 9) != -100
    ours = divergence(student, teacher, valid, 2.5, chunk)
    (gradient,) = torch.autograd.grad(ours * 0.7, student)
    each = functional.kl_div(
        functional.log_softmax(student / 2.5, -1),
        functional.log_softmax(teacher / 2.5, -1),
        reduction="none",
        log_target=True,
    )
    theirs = (each.sum(-1) * valid).sum() * 2.5**2
    (expected,) = torch.autograd.grad(theirs * 0.7, student)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, expected)


def test_half_precision_sums_in_single() -> None:
    logits, targets = _logits(torch.bfloat16, 4, 40, 50), _targets(4, 40)
    ours = cross_entropy(logits, targets, 16)
    assert ours.dtype == torch.float32
    ours.backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    exact = functional.cross_entropy(
        logits.detach().double().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    assert ours.item() == pytest.approx(exact.item(), rel=1e-6)


def test_no_full_single_precision_copy_of_the_logits() -> None:
    """The largest fp32 tensor is a chunk, not the whole; checked on every tensor any operator returns."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    self.elements = max(self.elements, tensor.numel())
            return result

    logits, targets = _logits(torch.bfloat16, 1, 256, 500), torch.arange(256).remainder(500).unsqueeze(0)
    with Largest() as seen:
        cross_entropy(logits, targets, 16).backward()
    assert seen.elements == 16 * 500
    with Largest() as plain:
        cross_entropy(logits, targets, 0).backward()
    assert plain.elements == 256 * 500


def test_no_targets_costs_nothing() -> None:
    logits = _logits(torch.float32, 3, 50)
    loss = cross_entropy(logits, torch.full((3,), -100), 2)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None and not logits.grad.any()
