"""A loss that the head computes against torch's own on all logits: values, gradients and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fsdptool.families.objectives import fused_head
from fsdptool.families.objectives.fused_head import fused_cross_entropy
from fsdptool.records.anatomy import LogitTail

TOKENS, WIDTH, CLASSES = 26, 8, 50
TAILS = {
    "plain": LogitTail(),
    "scaled": LogitTail(scale=0.25),
    "capped": LogitTail(cap=3.0),
    "scaled and capped": LogitTail(scale=1.5, cap=3.0),
}


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _inputs(dtype: torch.dtype, *, bias: bool = True) -> list[Tensor]:
    drawn = [
        _draw(0, 2, TOKENS // 2, WIDTH),
        _draw(1, CLASSES, WIDTH),
        *([_draw(2, CLASSES)] if bias else []),
    ]
    return [value.to(dtype).requires_grad_() for value in drawn]


def _targets() -> Tensor:
    targets = torch.randint(0, CLASSES, (2, TOKENS // 2), generator=torch.Generator().manual_seed(3))
    targets[..., ::3] = -100
    return targets


def _expected(inputs: list[Tensor], targets: Tensor, tail: LogitTail) -> Tensor:
    logits = functional.linear(*inputs) * tail.scale
    if tail.cap is not None:
        logits = torch.tanh(logits / tail.cap) * tail.cap
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("chunk", [0, 1, 3, 6, 13, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_loss_of_all_logits(
    chunk: int, tail: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and products with and without remainders; the weight's gradient in parts that leave one, too."""
    monkeypatch.setattr(fused_head, "GRADIENT_ROWS", 16)
    inputs, targets = _inputs(torch.float64, bias=bias), _targets()
    offset = inputs[2] if bias else None
    ours = fused_cross_entropy(inputs[0], inputs[1], offset, targets, chunk, TAILS[tail])
    found = torch.autograd.grad(ours * 0.3, inputs)
    theirs = _expected(inputs, targets, TAILS[tail])
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    for value, expected in zip(found, torch.autograd.grad(theirs * 0.3, inputs), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tail", TAILS)
def test_single_precision_is_exact_to_a_millionth(tail: str) -> None:
    inputs, targets = _inputs(torch.float32), _targets()
    ours = fused_cross_entropy(inputs[0], inputs[1], inputs[2], targets, 3, TAILS[tail])
    theirs = _expected(inputs, targets, TAILS[tail])
    assert float((ours - theirs).detach().abs() / theirs.detach()) < 1e-6
    pairs = zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True)
    for value, expected in pairs:
        assert float((value - expected).norm() / expected.norm()) < 1e-6


def test_half_precision_sums_the_gradient_of_the_weight_in_single() -> None:
    """Thirty-two products of four rows: sums in bfloat16 would lose the last ones."""
    torch.manual_seed(0)
    hidden = torch.rand(128, WIDTH, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(CLASSES, WIDTH) * 0.1).bfloat16().requires_grad_()
    targets = torch.zeros(128, dtype=torch.int64)
    (found,) = torch.autograd.grad(fused_cross_entropy(hidden, weight, None, targets, 1), weight)
    wide = [value.detach().double().requires_grad_() for value in (hidden, weight)]
    (expected,) = torch.autograd.grad(
        _expected([wide[0].unsqueeze(0), wide[1]], targets, LogitTail()), wide[1]
    )
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).norm() / expected.norm()) < 4e-3


def test_tokens_without_targets_have_no_gradient() -> None:
    inputs, targets = _inputs(torch.float64), torch.full((2, TOKENS // 2), -100)
    loss = fused_cross_entropy(inputs[0], inputs[1], inputs[2], targets, 4)
    assert loss.item() == 0.0
    assert not any(value.any() for value in torch.autograd.grad(loss, inputs))


def test_a_frozen_weight_gets_no_gradient_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = fused_head._Gradients.scaled

    def seen(gradients: fused_head._Gradients, *given: object) -> object:
        made.append((gradients.hidden is not None, gradients.weight is not None))
        return original(gradients, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_head._Gradients, "scaled", seen)
    hidden, weight = _inputs(torch.float64, bias=False)
    weight.requires_grad_(False)
    fused_cross_entropy(hidden, weight, None, _targets(), 3).backward()  # type: ignore[no-untyped-call]
    assert made == [(True, False)]
    expected = hidden.detach().clone().requires_grad_()
    _expected([expected, weight], _targets(), LogitTail()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(hidden.grad, expected.grad)


def test_validation_computes_the_loss_alone() -> None:
    inputs, targets = _inputs(torch.float64), _targets()
    with torch.no_grad():
        loss = fused_cross_entropy(inputs[0], inputs[1], inputs[2], targets, 3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, _expected(inputs, targets, LogitTail()).detach())


def test_a_second_backward_is_refused() -> None:
    """Its gradients are scaled where they are: twice would be wrong."""
    inputs = _inputs(torch.float64)
    loss = fused_cross_entropy(inputs[0], inputs[1], inputs[2], _targets(), 3)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(AttributeError):
        loss.backward()  # type: ignore[no-untyped-call]
