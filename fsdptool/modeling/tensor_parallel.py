"""Tensor parallelism: gives each rank of a group its part of every divided layer.

The model of a rank is an ordinary model of smaller layers. Its own code runs unchanged between two
collectives: the gradient of a region's input is summed over the group in backward, and so is the output of a
row layer in forward (Megatron-LM, arXiv:1909.08053, figure 3: *f* and *g*). With sequence parallelism an
all-gather and a reduce-scatter take their places (``modeling/sequence_parallel.py``). FSDP2 shards the local
parameters over the other ranks. Divided parameters are plain tensors of local shape, not DTensors over the
group: the memory tracer runs the same modules in one process, no operator needs a sharding rule, and fused
projections, whose parts are cut separately, cannot be expressed as a DTensor.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.common import unwrapped
from fsdptool.families.objectives.vocabulary import PART, VocabularyPart
from fsdptool.modeling.divided_dropout import draw_apart
from fsdptool.modeling.expert_parallel import spread
from fsdptool.modeling.sequence_parallel import divide_sequence
from fsdptool.modeling.tensor_group import ALONE, TensorGroup, enter, leave
from fsdptool.records.tensor_plan import Placement, SplitModule, SplitStyle, TensorPlan

if TYPE_CHECKING:
    from fsdptool.records.sharding import UnitPlan


def split(model: nn.Module, plan: UnitPlan, group: TensorGroup) -> None:
    """Make ``model`` the local model of one rank; nothing happens where the plan divides nothing.

    Args:
        model: On meta, changed by the training method already; parameters have global shapes.
        plan: Says how each parameter is divided.
        group: This rank's groups.

    Raises:
        ConfigError: The plan names a module that the model does not have, or one of a kind that cannot be
            divided.
    """
    _replace_parameters(model, plan.placements, group)
    tensor = plan.tensor
    if plan.experts is not None:
        # Between regions, each rank has a part of the tokens already.
        divided = tensor is not None and tensor.sequence is None
        _share_out(model, plan.experts, group, divides=divided)
    if tensor is None:
        return
    heads = _heads(model, tensor)
    parts = None
    if tensor.sequence is not None:
        parts = divide_sequence(model, tensor.sequence, group)
    if heads:
        rows = next(p.shape[0] for p in model.get_submodule(heads[0]).parameters(recurse=False))
        setattr(unwrapped(model), PART, VocabularyPart(group, group.rank * rows))
    leaving = partial(leave, group=group) if parts is None else parts.leave
    for path, sizes in tensor.attributes.items():
        module = _module(model, path)
        # A wrapper of LoRA stands where the layer was.
        _divide_attributes(getattr(module, "base_layer", module), sizes, group.size)
    sums = set(tensor.sums)
    for item in tensor.modules:
        # A parameter that no layer of its own holds (fused experts) is divided with its module.
        if isinstance(_attribute(model, item.path), nn.Module):
            for layer in _layers(_module(model, item.path), item.style):
                _divide_layer(layer, item, group, leaving if item.path in sums else None)
    split_layers = {item.path for item in tensor.modules}
    for path in sums - split_layers:
        _module(model, path).register_forward_hook(lambda _module, _args, output: leaving(output))
    for name in tensor.shared:
        path, _, leaf = name.rpartition(".")
        _share(_module(model, path), leaf, group.size)
    for path in (*_entered(tensor), *heads):
        region = _module(model, path)
        # Between the final norm, which gathers the sequence, and a head there may be further layers.
        if parts is not None and path not in heads:
            region.register_forward_pre_hook(parts.entry(path, region), with_kwargs=True, prepend=True)
            continue
        entry = _entry(region, group, frozenset(tensor.divided_arguments))
        region.register_forward_pre_hook(entry, with_kwargs=True, prepend=True)
    draw_apart(model, tensor, group)


def _share_out(model: nn.Module, experts: TensorPlan, group: TensorGroup, *, divides: bool) -> None:
    """Let each module of experts compute for its whole group.

    Args:
        model: Holds a part of the experts already.
        experts: How they are shared out.
        group: This rank's groups.
        divides: Whether the ranks of the tensor-parallel group hold the same tokens and share them out.
    """
    assert group.experts is not None
    for path, sizes in experts.attributes.items():
        _divide_attributes(_module(model, path), sizes, experts.size)
    for item in experts.modules:
        module: Any = _module(model, item.path)
        spread(module, module.down_proj.shape[0] * experts.size, group.experts, group if divides else ALONE)


def _entered(tensor: TensorPlan) -> list[str]:
    """Return the paths whose inputs are whole: the regions, and divided layers outside all of them."""
    inside = tuple(f"{path}." for path in tensor.regions)
    alone = [m.path for m in tensor.modules if m.style == "column" and not m.path.startswith(inside)]
    return [*tensor.regions, *alone]


def _heads(model: nn.Module, tensor: TensorPlan) -> list[str]:
    """Return the layers whose logits are divided: their input is whole."""
    paths = (module.path for module in tensor.modules if module.style == "vocabulary")
    return [path for path in paths if not isinstance(_module(model, path), nn.Embedding)]


def _attribute(model: nn.Module, path: str) -> Any:
    parent, _, leaf = path.rpartition(".")
    return getattr(_module(model, parent), leaf)


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ConfigError(
            f"the tensor-parallel plan lists {path!r}, which {type(model).__name__} does not have",
            help="plan the run again: the model changed",
        ) from error


def _replace_parameters(model: nn.Module, placements: Sequence[Placement], group: TensorGroup) -> None:
    divided = {item.fqn: item for item in placements if item.dim is not None}
    fresh: dict[int, nn.Parameter] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        if name in divided:
            shape = divided[name].local_shape(group.of(divided[name]).size)
            local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            fresh[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
    for name, parameter in named.items():
        if id(parameter) in fresh:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_parameter(leaf, fresh[id(parameter)])


def _layers(module: nn.Module, style: SplitStyle) -> list[nn.Module]:
    """Return the layers to divide behind one module: itself, or a base layer and its LoRA matrices."""
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        return [module]
    # A column layer's adapter is divided at its second matrix, a row layer's at its first.
    adapters: Any = getattr(module, "lora_B" if style == "column" else "lora_A", {})
    return [base, *adapters.values()]


_OUTPUTS = ("out_features", "embedding_dim")
_INPUTS = ("in_features",)
"""Of torch's own layers; what other layers compute with is among the plan's attributes."""


def _divide_layer(
    layer: Any, item: SplitModule, group: TensorGroup, leaving: Callable[[Tensor], Tensor] | None
) -> None:
    """Tell a layer its local sizes, and let what it computes leave its region where it must."""
    if item.style == "vocabulary":
        if isinstance(layer, nn.Embedding):
            _divide_names(layer, ("num_embeddings",), group.size)
            _replace_forward(layer, _lookup(layer, group.rank * layer.num_embeddings, group))
        else:
            _divide_names(layer, _OUTPUTS, group.size)
        return
    _divide_names(layer, _OUTPUTS if item.style == "column" else _INPUTS, group.size)
    if leaving is not None:
        _replace_forward(layer, _row_forward(layer, leaving, transposed=hasattr(layer, "nf")))


def _divide_names(module: nn.Module, names: Sequence[str], size: int) -> None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            setattr(module, name, value // size)


def _divide_attributes(module: nn.Module, sizes: Mapping[str, int], size: int) -> None:
    """Divide the integers that a module's own code computes with; its configuration is copied first."""
    for name, value in sizes.items():
        holder, _, leaf = name.rpartition(".")
        if holder == "config":
            # Other modules share the configuration, and compute with whole sizes.
            module.config = copy.copy(module.config)
            setattr(module.config, leaf, value // size)
        else:
            setattr(module, leaf, value // size)


def _share(module: nn.Module, name: str, size: int) -> None:
    """Let a module compute with a ``size``-th of a whole parameter, which every rank adds before the sum."""

    def divide(module: nn.Module, _args: Any) -> None:
        whole = module._parameters[name]
        assert whole is not None
        held.append(whole)
        module._parameters[name] = cast("nn.Parameter", whole / size)

    def restore(module: nn.Module, _args: Any, _output: Any) -> None:
        module._parameters[name] = held.pop()

    held: list[nn.Parameter] = []
    module.register_forward_pre_hook(divide)
    module.register_forward_hook(restore, prepend=True, always_call=True)


def _entry(region: nn.Module, group: TensorGroup, divided: frozenset[str]) -> Callable[..., Any]:
    """Return a hook that lets every hidden state that enters a region sum its gradient.

    Args:
        region: Its ``forward`` names the arguments.
        group: This rank's group.
        divided: Arguments that arrive divided already.
    """
    names = list(inspect.signature(region.forward).parameters)

    def entered(name: str, value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.requires_grad and name not in divided
        return enter(value, group) if whole else value

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Further positional arguments have no name.
        named = zip(chain(names, repeat("")), args, strict=False)
        return tuple(entered(n, v) for n, v in named), {n: entered(n, v) for n, v in kwargs.items()}

    return hook


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    object.__setattr__(module, "forward", forward)


def _row_forward(
    layer: Any, leaving: Callable[[Tensor], Tensor], *, transposed: bool
) -> Callable[[Tensor], Tensor]:
    """Return the forward of a row layer: the bias is added once, after the sum."""

    def forward(value: Tensor) -> Tensor:
        weight = layer.weight.t() if transposed else layer.weight
        output = leaving(F.linear(value, weight))
        return output if layer.bias is None else output + layer.bias

    return forward


def _lookup(module: nn.Embedding, first: int, group: TensorGroup) -> Callable[[Tensor], Tensor]:
    """Return the forward of a table whose rows are divided: foreign rows are zero before the sum."""
    forward = module.forward
    if module.padding_idx is not None:
        padding = module.padding_idx - first
        module.padding_idx = padding if 0 <= padding < module.num_embeddings else None

    def lookup(ids: Tensor) -> Tensor:
        inside = (ids >= first) & (ids < first + module.num_embeddings)
        # The table's own forward: Gemma's scales the rows.
        rows = forward(torch.where(inside, ids - first, 0))
        return leave(rows * inside.unsqueeze(-1).to(rows.dtype), group)

    return lookup


def by_name(placements: Sequence[Placement]) -> Mapping[str, Placement]:
    """Return the placements by parameter name, every name of a tied parameter included."""
    return {name: item for item in placements for name in (item.fqn, *item.aliases)}
