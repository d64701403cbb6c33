"""Cross-entropy inside a language-model head: no more logits exist than those of one chunk of tokens.

The head's module computes the loss itself, from the hidden states that it is called with, and computes the
gradients of the hidden states and of its weight at once, while a chunk's logits are there. Backward only
scales them, so nothing is computed twice. The gradients are those of the *summed* loss: the factor that
normalises over ranks and micro-batches arrives in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fsdptool.families.objectives.common import IGNORED, accumulation_dtype, unwrapped
from fsdptool.records.anatomy import LogitTail
from fsdptool.records.fused_loss import PRODUCT_CHUNKS

GRADIENT_ROWS = 8192
"""Entries of the vocabulary whose part of the weight's gradient is computed and added at a time."""

HEAD = "fused_head"
"""Attribute of a model whose head computes the loss (a :class:`FusedHead`), and key of the loss in its
predictions."""


class _Gradients:
    """The gradients of the summed loss, while they add up.

    Args:
        hidden: [tokens, width].
        weight: [vocabulary, width].
        bias: [vocabulary], or None.
        wanted: Which of the three gradients are wanted.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], wide: torch.dtype
    ) -> None:
        self._source, self._matrix = hidden, weight
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.weight is not None or self.bias is not None

    def add(self, logits: Tensor, first: int) -> None:
        """Add what the gradient of the logits of tokens from ``first`` on contributes."""
        last = first + logits.shape[0]
        if self.hidden is not None:
            torch.mm(logits, self._matrix, out=self.hidden[first:last])
        if self.weight is not None:
            states = self._source[first:last]
            # In parts, because a product in 16 bits is a tensor of its own before it is added.
            for at in range(0, self.weight.shape[0], GRADIENT_ROWS):
                part = self.weight[at : at + GRADIENT_ROWS]
                columns = logits[:, at : at + GRADIENT_ROWS].t()
                if part.dtype == logits.dtype:
                    part.addmm_(columns, states)
                else:
                    part.add_(columns @ states)
        if self.bias is not None:
            self.bias.add_(logits.sum(0, dtype=self.bias.dtype))

    def scaled(self, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return the three gradients times ``factor``, in the dtype of the parameters."""
        found = (self.hidden, self.weight, self.bias)
        self.hidden = self.weight = self.bias = None
        return tuple(value if value is None else value.mul_(factor).to(dtype) for value in found)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        tail: LogitTail,
        training: bool,
    ) -> Tensor:
        wide = accumulation_dtype(hidden.dtype)
        wanted = tuple(training and needed for needed in ctx.needs_input_grad[:3])
        gradients = _Gradients(hidden, weight, bias, wanted, wide)
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        rows = max(min(chunk * PRODUCT_CHUNKS, tokens), 1)
        logits = hidden.new_empty(rows, vocabulary)
        same = wide == hidden.dtype
        buffer = logits if same else hidden.new_empty(min(chunk, rows), vocabulary, dtype=wide)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for first in range(0, tokens, rows):
            states, aims = hidden[first : first + rows], targets[first : first + rows]
            made = logits[: states.shape[0]]
            if bias is None:
                torch.mm(states, weight.t(), out=made)
            else:
                torch.addmm(bias, states, weight.t(), out=made)
            for at in range(0, states.shape[0], chunk):
                own = made[at : at + chunk]
                part = own if same else buffer[: own.shape[0]].copy_(own)
                total += _loss_of(part, aims[at : at + chunk], tail, gradients.wanted)
                if gradients.wanted and not same:
                    own.copy_(part)
            if gradients.wanted:
                gradients.add(made, first)
        ctx.gradients, ctx.dtype = gradients, hidden.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        # A second backward would find nothing, not gradients that are scaled twice.
        del ctx.gradients
        return (*gradients.scaled(gradient, ctx.dtype), None, None, None, None)


def _loss_of(part: Tensor, targets: Tensor, tail: LogitTail, gradients: bool) -> Tensor:
    """Return the summed loss of some tokens.

    Args:
        part: What the head returned, [tokens, vocabulary]; becomes its gradient if ``gradients``.
        targets: [tokens].
        tail: What the model does to its logits.
    """
    index = targets.clamp(min=0).unsqueeze(1)
    valid = (targets != IGNORED).to(part.dtype).unsqueeze(1)
    slope = None
    if tail.scale != 1.0:
        part.mul_(tail.scale)
    if tail.cap is not None:
        part.div_(tail.cap).tanh_()
        # The derivative of cap * tanh(x / cap) is 1 - tanh(x / cap) ** 2.
        slope = part.square().neg_().add_(1.0) if gradients else None
        part.mul_(tail.cap)
    top = part.amax(-1, keepdim=True)
    chosen = part.gather(1, index)
    sums = part.sub_(top).exp_().sum(-1, keepdim=True)
    loss = ((sums.log() + top - chosen) * valid).sum()
    if gradients:
        part.mul_(valid / sums)
        part.scatter_add_(1, index, -valid)
        if slope is not None:
            part.mul_(slope)
        if tail.scale != 1.0:
            part.mul_(tail.scale)
    return loss


def fused_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk: int,
    tail: LogitTail | None = None,
) -> Tensor:
    """Return the summed cross-entropy of ``tail(hidden @ weight.T + bias)``.

    Args:
        hidden: [..., width], any floating dtype.
        weight: [vocabulary, width], of the same dtype.
        bias: [vocabulary], or None.
        targets: [...], int64; ``-100`` has no target.
        chunk: Tokens whose fp32 logits exist at a time; 0 takes all at once.
        tail: What is done to the logits; None: nothing.

    Returns:
        Scalar in fp32, or fp64 for fp64 states. Its backward runs once.
    """
    flat, aims = hidden.flatten(0, -2), targets.flatten()
    size = chunk if chunk > 0 else max(flat.shape[0], 1)
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, weight, bias, aims, size, tail or LogitTail(), torch.is_grad_enabled()
    )
    return result


HeadLoss = Callable[[Tensor, Tensor, "Tensor | None", Tensor, int, LogitTail], Tensor]
"""Computes the summed loss of a head, with the arguments of :func:`fused_cross_entropy`."""


class FusedLinear(nn.Linear):
    """A head that returns the summed loss instead of logits where it has targets."""

    tail: LogitTail
    compute: HeadLoss
    aims: tuple[Tensor, int] | None
    loss: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Return logits, or the loss of the targets it was given by :func:`computing_loss`."""
        if self.aims is None:
            return functional.linear(input, self.weight, self.bias)
        targets, chunk = self.aims
        self.loss = self.compute(input, self.weight, self.bias, targets, chunk, self.tail)
        return self.loss


class FusedHead:
    """What objectives need to know of a model whose head computes the loss.

    Args:
        model: The model, below any PEFT wrapper: calls ``linear`` itself.
        linear: Its head.
        tail: What the model does to the logits.
        compute: Computes the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        linear: nn.Linear,
        tail: LogitTail,
        compute: HeadLoss = fused_cross_entropy,
    ) -> None:
        linear.__class__ = FusedLinear
        assert isinstance(linear, FusedLinear)
        linear.tail, linear.aims, linear.loss = tail, None, None
        linear.compute = compute
        self.linear = linear
        setattr(model, HEAD, self)
        # What the model made of the loss gives way to the loss, on which FSDP's hooks then register: those
        # are registered later, and run later.
        model.register_forward_hook(self._put_loss, prepend=True)

    def _put_loss(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if self.linear.loss is not None:
            output.logits = self.linear.loss


@contextmanager
def computing_loss(head: FusedHead, targets: Tensor, chunk: int) -> Iterator[FusedLinear]:
    """Let a head compute the loss of one forward of its model.

    Args:
        head: Of the model.
        targets: [batch, positions], ``-100`` where there is none.
        chunk: Tokens whose fp32 logits exist at a time; 0 takes all at once.

    Yields:
        The layer, whose ``loss`` the forward sets.
    """
    linear = head.linear
    linear.aims = (targets, chunk)
    try:
        yield linear
    finally:
        linear.aims = linear.loss = None


@contextmanager
def returning_logits(model: nn.Module) -> Iterator[None]:
    """Let a model return its logits, as sampling needs them, whether its head computes the loss or not."""
    base = unwrapped(model)
    head = getattr(base, HEAD, None)
    if head is not None:
        delattr(base, HEAD)
    try:
        yield
    finally:
        if head is not None:
            setattr(base, HEAD, head)
