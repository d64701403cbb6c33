"""The quantised base of LoRA: which layers of a model it replaces, and the layer that computes with codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.modeling.methods.quantised_formats import BLOCK, Format, decode, parts, suits

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What of a model's blocks a quantised base takes.

    Attributes:
        layers: Paths of linear layers, in ``named_modules`` order.
        left: Paths of frozen parameters of two or more dimensions that stay as they are, by reason.
    """

    layers: tuple[str, ...]
    left: dict[str, tuple[str, ...]]


def choose_layers(model: nn.Module, format: Format) -> LayerChoice:
    """Choose the layers: every frozen ``nn.Linear`` inside a list of blocks whose rows suit the format.

    Embeddings, heads and whatever else is outside the lists stay, as QLoRA has it; so do layers that
    the model itself wants in fp32 (transformers' ``_keep_in_fp32_modules``, T5's ``wo``), tied weights
    and weights an adapter computes with directly. The choice does not depend on wrap classes, so one
    trace serves every grouping.
    """
    counted = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    exempt = _exempt(model)
    layers: list[str] = []
    left: dict[str, list[str]] = {}
    for path, module in in_blocks(model):
        if isinstance(module, QuantisedLinear):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or parameter.dim() < 2:
                continue
            fqn = f"{path}.{name}"
            reason = _why_not(module, path, parameter, format, counted[id(parameter)] > 1, exempt)
            if reason is None:
                layers.append(path)
            else:
                left.setdefault(reason, []).append(fqn)
    return LayerChoice(tuple(layers), {reason: tuple(names) for reason, names in left.items()})


def quantise_base(model: nn.Module, format: Format) -> None:
    """Replace the chosen layers by :class:`QuantisedLinear`, on meta and in place.

    Raises:
        ConfigError: The model has no layer for the format.
    """
    taken = choose_layers(model, format)
    if not taken.layers:
        raise ConfigError(
            f"method.lora.base: {format} cannot quantise any linear layer in the blocks of"
            f" {type(model).__name__}{_unchanged(taken)}",
            help="leave the base unchanged",
        )
    for path in taken.layers:
        parent, _, name = path.rpartition(".")
        linear: Any = model.get_submodule(path)
        setattr(model.get_submodule(parent), name, QuantisedLinear(linear, format))


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers of a prepared model, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, QuantisedLinear)}


def describe_base(model: nn.Module) -> str | None:
    """Return one sentence on what of a prepared model's base is quantised, or None for nothing."""
    layers = quantised_layers(model)
    if not layers:
        return None
    first = next(iter(layers.values()))
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    stored = sum(
        p.numel() * p.element_size() for layer in layers.values() for p in (layer.codes, layer.scales)
    )
    taken = choose_layers(model, first.format)
    return (
        f"{first.format} base: {len(layers)} linear layers of the blocks at {8 * stored / weights:.3g} bits"
        f" per weight{_unchanged(taken)}"
    )


def _unchanged(taken: LayerChoice) -> str:
    reasons = []
    for reason, names in taken.left.items():
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        reasons.append(f"{len(names)} {reason} ({shown})")
    return f"; unchanged: {'; '.join(reasons)}" if reasons else ""


def in_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what is inside lists of modules, adapters and modules that a trained copy stands for left out."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    prefixes = tuple(f"{path}." for path in lists)
    for path, module in model.named_modules():
        if path.startswith(prefixes) and ".lora_" not in f".{path}" and ".original_module" not in path:
            yield path, module


def _why_not(
    module: nn.Module, path: str, parameter: nn.Parameter, format: Format, shared: bool, exempt: set[str]
) -> str | None:
    if type(module) is not nn.Linear:
        return "fused experts" if parameter.dim() == 3 else f"weights of {type(module).__name__}"
    if shared:
        return "tied weights"
    if path in exempt:
        return "layers kept in fp32 or adapted as parameters"
    if not suits(format, parameter.shape[1]):
        return f"layers whose row length is not a multiple of {BLOCK}"
    return None


def _exempt(model: Any) -> set[str]:
    """Return layers the model keeps in fp32 and layers whose parameter an adapter reads itself."""
    kept: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        kept |= set(getattr(model, attribute, None) or ())
    layers = set()
    for path, module in model.named_modules():
        names = path.replace(".base_layer", "").split(".")
        if kept.intersection(names):
            layers.add(path)
        # peft's ParamWrapper (0.21) computes with the wrapped layer's parameter, not with the layer.
        if hasattr(module, "parameter_name") and hasattr(module, "base_layer"):
            layers.add(f"{path}.base_layer")
    return layers


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
        """The decoded weight, for the few models that look at a layer's weight themselves."""
        return decode(self.format, self.codes, self.scales, self.plain_dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product in the input's dtype."""
        product: torch.Tensor = _Product.apply(input, self.codes, self.scales, self.bias, self.format)  # type: ignore[no-untyped-call]
        return product

    def extra_repr(self) -> str:
        """Return sizes and format."""
        return f"{super().extra_repr()}, format={self.format}"
