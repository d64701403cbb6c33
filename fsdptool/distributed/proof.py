"""Proof that a live model is sharded as planned: before a run's first step, and in any script."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdptool.distributed.materialize import held_range
from fsdptool.distributed.shard import local, managed_names, require, sharded_modules
from fsdptool.memory.simulation.collective_bytes import stored_dtype
from fsdptool.modeling.methods.quantised_layers import describe_base
from fsdptool.records.anatomy import Parameter
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.proof import Difference, DifferenceKind
from fsdptool.records.sharding import Unit, UnitPlan
from fsdptool.torch_private import fsdp_group

if TYPE_CHECKING:
    from fsdptool.distributed.session import Session


_EXAMPLES = 4
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing (torch, accelerate) and compilation put into the names of parameters."""
_PEFT = "base_model.model."
"""What ``get_peft_model`` puts before them; fsdptool injects adapters without it."""


def prove(model: nn.Module, plan: UnitPlan, session: Session) -> dict[str, Any]:
    """Check on every rank that a run's model is as planned, by :func:`differences`; a collective.

    Args:
        model: Materialised.
        plan: What it should be.
        session: This rank.

    Returns:
        Plain data for ``summary.json``: counts, bytes per rank, examples with placements per rank.

    Raises:
        WorkerError: Something differs; the message names each kind of difference and where it is.
    """
    found = differences(model, plan, session.dims)
    require(not found, "; ".join(describe(item) for item in found))
    names = dict(model.named_parameters(remove_duplicate=False))
    return _summary(model, names, plan, session, _digest_whole(names, plan))


def differences(model: nn.Module, plan: UnitPlan, dims: ParallelDims) -> tuple[Difference, ...]:
    """Return what is not as planned, the same on every rank; a collective where there are several.

    Compares units, placements and rows, stored, compute and reduce dtypes, resharding after forward, offload,
    ties, and the values of replicas.

    Args:
        model: Sharded and materialised.
        plan: What it should be.
        dims: The planned mesh, sizes filled in.
    """
    names = live_parameters(model, plan)
    groups = list(_groups(model, plan))
    mine: list[Difference] = []
    if not groups:
        whole = f"{len(plan.units)} FSDP units"
        mine.append(Difference(DifferenceKind.NOT_SHARDED, type(model).__name__, whole, "no FSDP unit"))
    else:
        mine += _parameter_differences(names, plan)
        mine += _unit_differences(groups, plan)
        mine += _placement_differences(names, plan, dims)
        mine += _setting_differences(names, groups, plan)
    everyone = gather(tuple(_merged(mine)))
    if not any(everyone):
        everyone = gather(tuple(_replica_differences(names, plan, dims)))
    return _of_all_ranks(everyone)


def live_parameters(model: nn.Module, plan: UnitPlan) -> dict[str, nn.Parameter]:
    """Return the parameters by the plan's names, every name of a tied one included."""
    rename = _renamer(plan)
    return {rename(name): item for name, item in model.named_parameters(remove_duplicate=False)}


def _renamer(plan: UnitPlan) -> Callable[[str], str]:
    """Return what makes the plan's names of live ones."""
    prefixed = any(parameter.fqn.startswith(_PEFT) for parameter in _planned(plan))

    def rename(name: str) -> str:
        name = unwrapped_names(name)
        return name if prefixed else name.removeprefix(_PEFT)

    return rename


def unwrapped_names(name: str) -> str:
    """Return a module's or parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model below DistributedDataParallel and ``torch.compile``."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner.module
    return inner if isinstance(inner, nn.Module) else model


def compute_device(model: nn.Module) -> torch.device:
    """Return the device that forward runs on, wherever the shards live."""
    for module in sharded_modules(model):
        group = fsdp_group(module)
        if group is not None:
            return torch.device(group.device)
    return next(iter(model.parameters())).device


def local_bytes(model: nn.Module) -> tuple[int, ...]:
    """Return the bytes of the parameters of every rank; a collective."""
    mine = sum(local(item).numel() * item.element_size() for item in model.parameters())
    return tuple(gather(mine))


def _planned(plan: UnitPlan) -> list[Parameter]:
    return [*(parameter for unit in plan.units for parameter in unit.parameters), *plan.ignored]


def _groups(model: nn.Module, plan: UnitPlan) -> Iterable[tuple[str, frozenset[str], Any]]:
    """Yield every live FSDP group that holds parameters: its path, the plan's names of them, and itself."""
    rename = _renamer(plan)
    canonical = {name: parameter.fqn for parameter in _planned(plan) for name in parameter.names}
    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[int] = set()
    for module in sharded_modules(model):
        group = fsdp_group(module)
        if group is None or id(group) in seen:
            continue
        seen.add(id(group))
        names = (rename(name) for name in managed_names(model, module))
        path = rename(f"{paths[id(module)]}.").removesuffix(".") or "root"
        yield path, frozenset(canonical.get(name, name) for name in names), group


def _parameter_differences(names: Mapping[str, nn.Parameter], plan: UnitPlan) -> Iterable[Difference]:
    kind = DifferenceKind.PARAMETER
    known: set[str] = set()
    for listed in _planned(plan):
        known.update(listed.names)
        parameter = next((names[name] for name in listed.names if name in names), None)
        if parameter is None:
            yield Difference(kind, listed.fqn, "a parameter of the model", "no such parameter")
        elif tuple(parameter.shape) != listed.shape:
            yield Difference(kind, listed.fqn, f"shape {listed.shape}", f"shape {tuple(parameter.shape)}")
        elif parameter.requires_grad != listed.trainable:
            words = {True: "trained", False: "frozen"}
            yield Difference(kind, listed.fqn, words[listed.trainable], words[parameter.requires_grad])
    tied = {id(names[name]) for name in known if name in names}
    for name, parameter in names.items():
        if name not in known and id(parameter) not in tied:
            yield Difference(kind, name, "no such parameter", "a parameter of the model")


def _unit_differences(
    groups: Iterable[tuple[str, frozenset[str], Any]], plan: UnitPlan
) -> Iterable[Difference]:
    live = {names: path for path, names, _ in groups}
    unmatched = dict(live)
    owner = {name: path for names, path in live.items() for name in names}
    for unit in plan.units:
        wanted = frozenset(parameter.fqn for parameter in unit.parameters)
        if not wanted or unmatched.pop(wanted, None) is not None:
            continue
        homes = sorted({owner.get(name, "no unit") for name in wanted})
        if len(homes) > 1:
            found = f"them in units {', '.join(homes[:3])}{', ...' if len(homes) > 3 else ''}"
        else:
            found = "them in no unit" if homes[0] == "no unit" else f"them in unit {homes[0]}, with others"
        yield Difference(DifferenceKind.UNIT, unit.id, "its parameters in a unit of their own", found)
    planned = {parameter.fqn for unit in plan.units for parameter in unit.parameters}
    for names, path in unmatched.items():
        # Those that hold planned parameters are named above.
        if not names & planned:
            yield Difference(DifferenceKind.UNIT, path, "no unit", f"a unit of {len(names)} parameters")


def _placement_differences(
    names: Mapping[str, nn.Parameter], plan: UnitPlan, dims: ParallelDims
) -> Iterable[Difference]:
    kind = DifferenceKind.PLACEMENT
    for unit in plan.units:
        sizes = tuple(dims.parameter_mesh(experts=unit.kind == "experts").values())
        for listed in unit.parameters:
            dimension = plan.shard_dimension(unit, listed.shape, sizes[-1])
            expected: tuple[Placement, ...] = (*[Replicate()] * (len(sizes) - 1), Shard(dimension))
            parameter: Any = names.get(listed.fqn)
            if parameter is None or tuple(parameter.shape) != listed.shape:
                continue
            planned = f"{_placed(expected)} over {' x '.join(map(str, sizes))} ranks"
            if not isinstance(parameter, DTensor):
                yield Difference(kind, listed.fqn, planned, "whole on every rank")
                continue
            mesh = tuple(parameter.device_mesh.shape)
            found = f"{_placed(parameter.placements)} over {' x '.join(map(str, mesh))} ranks"
            if tuple(parameter.placements) != expected or mesh != sizes:
                yield Difference(kind, listed.fqn, planned, found)
                continue
            _, first, last = held_range(parameter)
            shard = local(parameter)
            wanted = [*listed.shape]
            wanted[dimension] = last - first
            if list(shard.shape) != wanted:
                rows = shard.shape[dimension] if shard.dim() else 0
                yield Difference(kind, listed.fqn, f"{last - first} rows", f"{rows} rows")
            elif shard.is_meta:
                yield Difference(kind, listed.fqn, "values", "no values (meta device)")
    for listed in plan.ignored:
        whole: Any = names.get(listed.fqn)
        if isinstance(whole, DTensor):
            placed = _placed(whole.placements)
            yield Difference(kind, listed.fqn, "whole on every rank", placed)


def _placed(placements: Iterable[Placement]) -> str:
    words = {Replicate(): "replicated", Shard(0): "sharded by rows", Shard(1): "sharded along dimension 1"}
    return " and ".join(words.get(item, str(item)) for item in placements)


def _setting_differences(
    names: Mapping[str, nn.Parameter],
    groups: Iterable[tuple[str, frozenset[str], Any]],
    plan: UnitPlan,
) -> Iterable[Difference]:
    for listed in _planned(plan):
        parameter = names.get(listed.fqn)
        planned = stored_dtype(listed, plan)
        if parameter is not None and _short(parameter.dtype) != planned:
            yield Difference(
                DifferenceKind.STORED_DTYPE, listed.fqn, planned, _short(parameter.dtype) or "none"
            )
        present = {id(names[name]) for name in listed.names if name in names}
        if len(present) > 1:
            tied = f"one tensor, as {listed.aliases[0]}"
            yield Difference(DifferenceKind.TIE, listed.fqn, tied, f"{len(present)} tensors")
    by_names = {frozenset(parameter.fqn for parameter in unit.parameters): unit for unit in plan.units}
    for path, held, group in groups:
        # The group has no policy of its own from torch 2.15 on, where parameters may differ.
        policy = group.mp_policy if hasattr(group, "mp_policy") else group.fsdp_params[0].mp_policy
        dtypes = (("compute", policy.param_dtype, plan.param_dtype),)
        # A reduction in the compute dtype may be said by either (torch 2.13, ``init_dtype_attrs``).
        reduced = (policy.reduce_dtype or policy.param_dtype, plan.reduce_dtype or plan.param_dtype)
        for word, found, wanted in (*dtypes, ("reduce", *reduced)):
            if _short(found) != wanted:
                stated = [f"{word} in {value or 'the stored dtype'}" for value in (wanted, _short(found))]
                yield Difference(DifferenceKind.COMPUTE_DTYPE, path, stated[0], stated[1])
        offloaded = bool(group.fsdp_params) and group.fsdp_params[0].offload_to_cpu
        if offloaded != plan.cpu_offload:
            homes = {True: "host memory", False: "device memory"}
            yield Difference(DifferenceKind.OFFLOAD, path, homes[plan.cpu_offload], homes[offloaded])
        unit = by_names.get(held)
        if unit is not None and unit.reshard_after_forward is not None:
            freed = {True: "freed after forward", False: "kept after forward"}
            wanted_freed, is_freed = bool(unit.reshard_after_forward), bool(group._reshard_after_forward)
            if wanted_freed != is_freed:
                yield Difference(DifferenceKind.RESHARD, path, freed[wanted_freed], freed[is_freed])


def _short(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _replica_differences(
    names: Mapping[str, nn.Parameter], plan: UnitPlan, dims: ParallelDims
) -> Iterable[Difference]:
    """Compare hashes of what several ranks hold: whole parameters over all of them, shards over HSDP's
    replicas, and what a tensor-parallel group does not divide over that group."""
    divided = {item.fqn for item in plan.placements if item.dim is not None}
    listed = [parameter for unit in plan.units for parameter in unit.parameters]
    shards = [local(names[item.fqn]) for item in listed] if dims.dp_replicate > 1 else []
    undivided = [local(names[item.fqn]) for item in listed if item.fqn not in divided] if dims.tp > 1 else []
    parts = [names[item.fqn] for item in plan.ignored if item.fqn in divided]
    everyone = gather((_digest_whole(names, plan), _checksum(shards), _checksum(undivided), _checksum(parts)))
    kind = DifferenceKind.REPLICA
    if len({item[0] for item in everyone}) > 1:
        yield Difference(kind, "replicated parameters", "equal on all ranks", "different values")
    for position in range(dims.stride("dp_replicate")):
        copies = {everyone[rank][1] for rank in dims.group(position, "dp_replicate")}
        if len(copies) > 1:
            yield Difference(kind, f"replicas of shard {position}", "equal", "different values")
    for first in range(0, len(everyone), dims.tp):
        if len({item[2] for item in everyone[first : first + dims.tp]}) > 1:
            where = f"undivided parameters of tensor-parallel group {first // dims.tp}"
            yield Difference(kind, where, "equal", "different values")
    for position in range(dims.tp):
        if len({item[3] for item in everyone[position :: dims.tp]}) > 1:
            where = f"replicated parts of tensor-parallel rank {position}"
            yield Difference(kind, where, "equal", "different values")


def _digest_whole(names: Mapping[str, nn.Parameter], plan: UnitPlan) -> str:
    divided = {item.fqn for item in plan.placements if item.dim is not None}
    return _digest(names[listed.fqn] for listed in plan.ignored if listed.fqn not in divided)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(content(tensor))
    return digest.hexdigest()


_CHUNK = 1 << 22
"""Words that a checksum takes at a time: 32 MiB in int64."""


def _checksum(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return a number for each tensor, computed where it lies: 32-bit words, each times its place.

    A hash on the host would take a minute for the shards of a 70-billion-parameter model.
    """
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = data.numel() // 4 * 4
        total = (data[whole:].long() + 1).prod()
        for words in torch.split(data[:whole].view(torch.int32), _CHUNK):
            places = torch.arange(1, words.numel() + 1, device=words.device)
            total = total * 31 + (words * places).sum()
        sums.append(total)
    return tuple(torch.stack(sums).tolist()) if sums else ()


def gather(mine: Any) -> list[Any]:
    """Return what every rank has, by rank; a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _merged(found: Iterable[Difference]) -> list[Difference]:
    """Return differences that say the same of several places as one."""
    alike: dict[tuple[DifferenceKind, str, str], Difference] = {}
    for item in found:
        key = (item.kind, item.planned, item.found)
        known = alike.get(key)
        alike[key] = item if known is None else replace(known, places=known.places + 1)
    return list(alike.values())


def _of_all_ranks(everyone: Iterable[Iterable[Difference]]) -> tuple[Difference, ...]:
    """Return the differences of all ranks, each with the ranks that see it."""
    ranks: dict[Difference, list[int]] = {}
    for rank, found in enumerate(everyone):
        for item in found:
            ranks.setdefault(item, []).append(rank)
    return tuple(replace(item, ranks=tuple(seen)) for item, seen in ranks.items())


def describe(item: Difference) -> str:
    """Return a difference in a line: where, what was planned and what was found."""
    more = f" and {item.places - 1} more" if item.places > 1 else ""
    return f"{item.where}{more}: planned {item.planned}, found {item.found}"


def content(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _summary(
    model: nn.Module, names: dict[str, nn.Parameter], plan: UnitPlan, session: Session, replicated: str
) -> dict[str, Any]:
    unique = {id(parameter): parameter for parameter in names.values()}
    mine = sum(local(p).numel() * p.element_size() for p in unique.values())
    gathered: list[Any] = [mine]
    examples = [parameter.fqn for parameter in _example_unit(plan).parameters[:_EXAMPLES]]
    shapes: list[Any] = [[list(local(names[name]).shape) for name in examples]]
    if session.world_size > 1:
        gathered, shapes = [None] * session.world_size, [None] * session.world_size
        dist.all_gather_object(gathered, mine)
        dist.all_gather_object(shapes, [list(local(names[name]).shape) for name in examples])
    placements = Counter(str(list(getattr(p, "placements", ("whole",)))) for p in unique.values())
    return {
        "proven": True,
        "units": len(plan.units),
        "parameters": len(unique),
        "elements": sum(p.numel() for p in unique.values()),
        "placements": dict(placements),
        "replicated": len(plan.ignored),
        "replicated_hash": replicated if plan.ignored else None,
        "quantised": describe_base(model),
        "local_bytes": gathered,
        "examples": [
            {
                "fqn": name,
                "shape": list(names[name].shape),
                "placements": [str(p) for p in getattr(names[name], "placements", ())],
                "local_shapes": [rank[index] for rank in shapes],
            }
            for index, name in enumerate(examples)
        ],
    }


def _example_unit(plan: UnitPlan) -> Unit:
    blocks = [unit for unit in plan.units if unit.kind == "block"]
    return blocks[0] if blocks else plan.units[-1]
