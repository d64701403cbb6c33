"""A frozen linear layer that holds codes and scales, and makes its weight only while it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdptool.modeling.methods.quantised.formats import Format, decode, parts


class _Product(torch.autograd.Function):
    """``x W^T + b`` with ``W`` made from its codes once in forward and once more in backward.

    Saved for backward are the packed parameters themselves, which FSDP gathers again before it, and
    never the weight; a frozen weight needs no input saved either.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        format: Format,
    ) -> torch.Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(codes, scales)
            ctx.format = format
        return torch.nn.functional.linear(input, decode(format, codes, scales, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        codes, scales = ctx.saved_tensors
        (gradient,) = gradients
        return gradient.matmul(decode(ctx.format, codes, scales, gradient.dtype)), None, None, None, None


class QuantisedLinear(nn.Linear):
    """A frozen ``nn.Linear`` whose weight is held as two integer parameters, ``codes`` and ``scales``.

    Args:
        linear: The layer it stands for, on any device; its bias is kept.
        format: How the weight is held.
    """

    def __init__(self, linear: nn.Linear, format: Format) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format: Format = format
        self.plain_dtype = linear.weight.dtype
        device = linear.weight.device
        for name, (shape, dtype) in zip(
            ("codes", "scales"), parts(format, self.out_features, self.in_features), strict=True
        ):
            empty = torch.empty(shape, dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = linear.bias
        self.train(linear.training)

    codes: nn.Parameter
    scales: nn.Parameter

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight made anew, for the few models that look at a layer's weight themselves."""
        return decode(self.format, self.codes, self.scales, self.plain_dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product in the input's dtype."""
        made: torch.Tensor = _Product.apply(input, self.codes, self.scales, self.bias, self.format)  # type: ignore[no-untyped-call]
        return made

    def extra_repr(self) -> str:
        """Return sizes and format."""
        return f"{super().extra_repr()}, format={self.format}"
