"""Gives meta parameters their values: each rank makes or reads only its own rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map

from fsdptool.distributed.initialisation import Blueprint, loose_tensors, replay
from fsdptool.distributed.shard import local, sharded_dimension, sharded_like
from fsdptool.errors import ModelError
from fsdptool.modeling.methods.lora import base_name
from fsdptool.modeling.methods.quantised_formats import empty_parts, encode
from fsdptool.modeling.methods.quantised_layers import QuantisedLinear, quantised_layers
from fsdptool.modeling.tensor_group import ALONE, TensorGroup
from fsdptool.records.tensor_plan import Placement

if TYPE_CHECKING:
    from fsdptool.distributed.session import Session
    from fsdptool.distributed.weights import FolderWeights
    from fsdptool.modeling.methods.lora import Derived


@dataclass(frozen=True, slots=True)
class Origins:
    """Where values come from.

    Attributes:
        blueprint: The base model's initialisation and buffers.
        weights: Pretrained weights, or None for random ones.
        adapters: Initialisation of parameters the method added, or None.
        derived: What starts from values of the base's weights, by name.
        continued: An adapter's own weights, or None.
        seed: The run's seed.
        placements: Where each divided parameter lies on a tensor-parallel group, by name.
        group: This rank's place in that group.
        published: The base model's parameters, by name.
    """

    blueprint: Blueprint
    weights: FolderWeights | None
    adapters: Blueprint | None
    seed: int
    placements: Mapping[str, Placement] = field(default_factory=dict)
    group: TensorGroup = ALONE
    derived: Mapping[str, Derived] = field(default_factory=dict)
    continued: FolderWeights | None = None
    published: Mapping[str, Published] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """A parameter of the published model.

    Attributes:
        names: All its names: tied ones have several.
        shape: Its whole shape.
        dtype: In which it is stored.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def published_parameters(model: nn.Module) -> dict[str, Published]:
    """Return the parameters of a model before a method changes it, under each of their names."""
    found: dict[str, Published] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for names in _aliases(model).values():
        parameter = named[names[0]]
        item = Published(tuple(names), tuple(parameter.shape), parameter.dtype)
        found.update(dict.fromkeys(names, item))
    return found


def materialize(model: nn.Module, origins: Origins, session: Session, *, offload: bool = False) -> list[str]:
    """Replace every meta tensor of ``model`` by its values on this rank's device.

    Args:
        model: Sharded; its parameters are meta DTensors (and plain meta tensors where ignored).
        origins: Where values come from.
        session: Gives the device.
        offload: Whether shards live in host memory (``CPUOffloadPolicy``); whole parameters never do.

    Returns:
        Names of parameters that a pretrained checkpoint lacked and that were initialised.

    Raises:
        ModelError: A parameter or buffer has no origin.
    """
    device = torch.device("cpu") if offload else session.device
    missing: list[str] = []
    packed = quantised_layers(model)
    for path, layer in packed.items():
        _pack(model, path, layer, origins, missing, session.device, device)
    packed_names = {f"{path}.{part}" for path in packed for part in ("codes", "scales")}
    aliases = _aliases(model)
    for names in aliases.values():
        if names[0] in packed_names:
            continue
        parameter = model.get_parameter(names[0])
        values = _part(parameter, names, origins, missing)
        # FSDP brings home what it manages and nothing else: whole parameters compute where they lie.
        place = device if isinstance(parameter, DTensor) else session.device
        rows = _own(values.to(place))
        if offload and session.device.type == "cuda" and isinstance(parameter, DTensor):
            # FSDP2 pins what is not pinned, by a second copy of every shard (``reset_sharded_param``).
            rows = rows.pin_memory()
        _assign(model, names, parameter, rows)
    _fill_buffers(model, origins, session.device)
    _fill_loose(model, origins, session.device)
    return missing


def _pack(
    model: nn.Module,
    path: str,
    layer: QuantisedLinear,
    origins: Origins,
    missing: list[str],
    worker: torch.device,
    device: torch.device,
) -> None:
    """Make or read this rank's rows of a weight, quantise them on ``worker`` and keep only the codes."""
    shape, rows = (layer.out_features, layer.in_features), held_range(layer.codes)[1:]
    # What stays is allocated before what goes: the other way round the C allocator keeps the holes.
    into = empty_parts(layer.format, rows[1] - rows[0], layer.in_features, worker)
    weight = _values(shape, rows, layer.plain_dtype, [f"{path}.weight"], origins, missing)
    codes, scales = encode(layer.format, weight.to(worker), into)
    del weight
    _assign(model, [f"{path}.codes"], layer.codes, codes.to(device))
    _assign(model, [f"{path}.scales"], layer.scales, scales.to(device))


def _own(values: torch.Tensor) -> torch.Tensor:
    """Cut values loose from a larger tensor they are a view of, which would stay alive with them."""
    whole = values.untyped_storage().nbytes()
    return values.clone() if whole > values.numel() * values.element_size() else values


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """Group every parameter name by tensor, in ``named_parameters`` order."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return groups


def held_range(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Return the dimension along which FSDP shards a parameter, and the range of it that this rank holds.

    Uneven chunks as ``torch.chunk`` cuts them.
    """
    if not isinstance(parameter, DTensor):
        return 0, 0, parameter.shape[0] if parameter.dim() else 1
    mesh, cut = parameter.device_mesh, sharded_dimension(parameter)
    total = parameter.shape[cut]
    degree, position = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    chunk = -(-total // degree)
    return cut, min(position * chunk, total), min((position + 1) * chunk, total)


def _part(parameter: torch.Tensor, names: list[str], origins: Origins, missing: list[str]) -> torch.Tensor:
    """Return the values this rank holds of a parameter: its rows of its tensor-parallel rank's part."""
    dtype = parameter.dtype
    cut, start, end = held_range(parameter)
    # Experts that are cut along another dimension than the first: all of them, a window of each.
    rows, window = ((0, parameter.shape[0]), (cut, start, end - start)) if cut else ((start, end), None)
    placement = next((origins.placements[name] for name in names if name in origins.placements), None)
    if placement is None or placement.dim is None:
        return _values(tuple(parameter.shape), rows, dtype, names, origins, missing, window)
    parts, noted, group = [], len(missing), origins.group.of(placement)
    for inside, whole, length in placement.pieces(group.size, group.rank):
        if placement.dim > 0:
            inner = (placement.dim, whole, length)
            parts.append(_values(placement.shape, rows, dtype, names, origins, missing, inner))
            continue
        first, last = max(rows[0], inside), min(rows[1], inside + length)
        if first < last:
            piece = (first - inside + whole, last - inside + whole)
            parts.append(_values(placement.shape, piece, dtype, names, origins, missing, window))
    del missing[noted + 1 :]
    if not parts:  # more ranks than rows
        return torch.empty((0, *parameter.shape[1:]), dtype=dtype)
    return parts[0] if len(parts) == 1 else torch.cat(parts, max(placement.dim, 0))


def _values(
    shape: tuple[int, ...],
    rows: tuple[int, int],
    dtype: torch.dtype,
    names: list[str],
    origins: Origins,
    missing: list[str],
    window: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Return rows of a whole parameter, or the part of them in a ``window``: dimension, start and length."""
    for name in names:
        if origins.continued is not None and name in origins.continued:
            return origins.continued.rows(name, shape, rows, window).to(dtype)
        if name in origins.derived:
            return _derive(origins.derived[name], rows, origins, missing, window).to(dtype)
    size = torch.Size(shape)
    plain = [base_name(name) for name in names]
    # A copy of one of several tied modules has one of their names.
    plain += [n for n in (other for name in plain for other in _tied(name, origins)) if n not in plain]
    if origins.adapters is not None and any(origins.adapters.notes.get(name) for name in names):
        name = next(name for name in names if origins.adapters.notes.get(name))
        drawn = (dtype, origins.seed, names[0])
        return replay(origins.adapters, name, size, rows, *drawn, window=window)
    if origins.weights is not None:
        for name in plain:
            if name in origins.weights:
                return origins.weights.rows(name, shape, rows, window).to(dtype)
        missing.append(names[0])
    known = [n for n in plain if origins.blueprint.notes.get(n) or n in origins.blueprint.values]
    if not known:
        raise ModelError(
            f"{names[0]} has neither pretrained values nor an initialisation",
            help="train from pretrained weights (model.weights: pretrained)",
        )
    # One key for all names of a tied parameter: which name comes first differs between builds.
    return replay(origins.blueprint, known[0], size, rows, dtype, origins.seed, min(plain), window=window)


def _tied(name: str, origins: Origins) -> tuple[str, ...]:
    return origins.published[name].names if name in origins.published else ()


def _derive(
    derived: Derived,
    rows: tuple[int, int],
    origins: Origins,
    missing: list[str],
    window: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Return rows of what starts from a weight of the base, of which ``missing`` has the name already."""
    source = origins.published[derived.source]
    noted = len(missing)

    def read(some: tuple[int, int] | None) -> torch.Tensor:
        first, last = some or (0, source.shape[0])
        return _values(source.shape, (first, last), source.dtype, [derived.source], origins, missing)

    values = derived.compute(read, rows)
    del missing[noted:]
    return values if window is None else values.narrow(*window)


def _assign(model: nn.Module, names: Iterable[str], parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Put ``values`` where ``parameter`` was, under every name, tied as before.

    ``fully_shard`` re-reads registered parameters, and pads uneven shards, in its lazy
    initialisation (torch 2.13, ``FSDPParam.reset_sharded_param``).
    """
    fresh = nn.Parameter(sharded_like(values, parameter), requires_grad=parameter.requires_grad)
    for name in names:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_parameter(leaf, fresh)


def _fill_buffers(model: nn.Module, origins: Origins, device: torch.device) -> None:
    shared: dict[int, torch.Tensor] = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if id(buffer) not in shared:
            shared[id(buffer)] = _buffer_values(name, buffer, origins).to(device)
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = shared[id(buffer)]


def _fill_loose(model: nn.Module, origins: Origins, device: torch.device) -> None:
    for name, value in loose_tensors(model):
        if not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_iter(value)):
            continue
        initial = origins.blueprint.loose.get(base_name(name))
        if initial is None:
            raise ModelError(f"attribute {name} has no value: the model does not compute it when it is built")
        path, _, leaf = name.rpartition(".")
        moved = tree_map(lambda item: item.to(device) if isinstance(item, torch.Tensor) else item, initial)
        setattr(model.get_submodule(path), leaf, moved)


def _buffer_values(name: str, buffer: torch.Tensor, origins: Origins) -> torch.Tensor:
    plain = base_name(name)
    if name in origins.derived:
        return _derive(origins.derived[name], (0, buffer.shape[0]), origins, []).to(buffer.dtype)
    if origins.weights is not None and plain in origins.weights:
        total = buffer.shape[0] if buffer.dim() else 1
        return origins.weights.rows(plain, tuple(buffer.shape), (0, total)).to(buffer.dtype)
    if plain in origins.blueprint.buffers:
        # Each run owns its buffers: constructors may share one tensor between modules.
        return origins.blueprint.buffers[plain].detach().clone()
    if not buffer.is_meta:
        return buffer
    raise ModelError(f"buffer {name} has no value: the model does not compute it when it is built")


def local_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes this rank holds of ``tensors``."""
    return sum(local(t).numel() * local(t).element_size() for t in tensors.values())
