"""Applies a UnitPlan with ``fully_shard``, and proves that the model is what the plan lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.utils import _apply_to_tensors

from fsdptool.errors import ConfigError, WorkerError
from fsdptool.modeling.prepare import to_dtype
from fsdptool.records.sharding import Unit, UnitPlan
from fsdptool.torch_private import fsdp_group, fsdp_state
from fsdptool.versions import torch_is

if TYPE_CHECKING:
    from fsdptool.distributed.session import Session


def sharded_like(rows: torch.Tensor, whole: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """Return ``rows`` as this rank's part of a tensor that is sharded as ``whole`` is, where they lie.

    The only place where the project makes sharded tensors. ``DTensor.from_local`` moves the rows to the
    device type of the mesh (torch 2.13, ``distributed/tensor/_api.py``): parameters that FSDP2 offloads to
    the CPU, their optimizer states and the copies of an asynchronous save would return to the GPU.

    Args:
        rows: This rank's part, on any device; the result shares its memory.
        whole: A DTensor. For any other tensor ``rows`` are returned as they are.
        shape: Global shape if it differs from that of ``whole``.
    """
    if not isinstance(whole, DTensor):
        return rows
    shape = whole.shape if shape is None else shape
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(whole.device_mesh, whole.placements, TensorMeta(shape, stride, rows.dtype))
    # Not typed by torch: DTensor's constructor takes the local tensor and its specification.
    make: Any = DTensor
    made: torch.Tensor = make(rows, spec, requires_grad=rows.requires_grad)
    return made


def sharded_dimension(parameter: DTensor) -> int:
    """Return the dimension along which FSDP shards a parameter."""
    placement = parameter.placements[-1]
    assert isinstance(placement, Shard)
    return placement.dim


def grads_by_dtype(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Return this rank's rows of gradients, without empty ones, by dtype."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            if grad.numel():
                groups.setdefault(grad.dtype, []).append(grad)
    return groups


def cast_inputs(model: nn.Module, dtype: torch.dtype | None, exact: Collection[str]) -> None:
    """Cast ``model``'s floating inputs before each forward, but for the arguments named in ``exact``.

    Stands for ``cast_forward_inputs`` of FSDP2's root, which casts every floating tensor: a time of 999
    becomes 1000 in bfloat16, and a denoiser is told of another noise level than it is shown.

    Args:
        model: The root, after ``fully_shard``: inputs are cast before its parameters are gathered.
        dtype: None leaves all inputs as they come.
        exact: Names of keyword arguments.
    """
    if dtype is None:
        return

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kept = {name: value for name, value in kwargs.items() if name in exact}
        return _apply_to_tensors(cast, args), {**_apply_to_tensors(cast, kwargs), **kept}

    model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def shard(model: nn.Module, plan: UnitPlan, session: Session) -> list[FSDPModule]:
    """Call ``fully_shard`` once per unit, in the plan's order.

    Args:
        model: On meta, already changed by method, checkpointing and compilation.
        plan: What ``layout.group`` decided for this very model.
        session: Gives the mesh and the device.

    Returns:
        The first module of each unit that owns parameters, in call order.

    Raises:
        ConfigError: The plan names a module or parameter the model does not have.
    """
    named = _parameters_by_name(model)
    ignored = {_look_up(named, parameter.fqn) for parameter in plan.ignored}
    policy = MixedPrecisionPolicy(
        param_dtype=to_dtype(plan.param_dtype),
        reduce_dtype=to_dtype(plan.reduce_dtype),
        output_dtype=to_dtype(plan.output_dtype),
    )
    offload = (
        CPUOffloadPolicy(pin_memory=session.device.type == "cuda") if plan.cpu_offload else OffloadPolicy()
    )
    if any(not parameter.is_floating_point() for parameter in named.values()):
        accept_integers()
    units: list[FSDPModule] = []
    for unit in plan.units:
        modules = [_module(model, path) for path in unit.modules]
        experts = unit.kind == "experts"
        mesh = session.expert_mesh if experts else session.shard_mesh
        assert mesh is not None
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=_reshard(unit, session),
            # The block around experts casts the hidden states; the router's weights stay exact.
            mp_policy=replace(policy, cast_forward_inputs="" not in unit.modules and not experts),
            offload_policy=offload,
            ignored_params=ignored or None,
            shard_placement_fn=_placement(plan, unit, mesh.size(mesh.ndim - 1)),
        )
        first = modules[0]
        assert isinstance(first, FSDPModule)
        if unit.parameters:
            units.append(first)
            if not unit.unshard_in_backward:
                first.set_unshard_in_backward(False)
        if mesh.size() > 1:
            # The step divides by the global weight itself, so gradients are summed, not averaged. Plain
            # sums, too, because the CPU backend has no pre-multiplied sum (torch 2.13,
            # ``_get_gradient_divide_factors``). One rank sums nothing, and a factor costs it a copy.
            first.set_gradient_divide_factor(1.0)
            first.set_force_sum_reduction_for_comms(True)
    cast_inputs(model, to_dtype(plan.input_dtype), plan.exact_inputs)
    _set_prefetch(plan, model, units)
    return units


def gather_in_float8(model: nn.Module, plan: UnitPlan, session: Session) -> None:
    """Let FSDP gather weights in float8 where the plan says so; elsewhere it gathers the compute dtype.

    torchao casts before a gather, and makes the tensor that layers find after it (torchao 0.18,
    ``float8/fsdp_utils.py:WeightWithDynamicFloat8CastTensor``). There, that class holds the rows of a
    parameter. Here, rows stay plain tensors for optimizers, averages and checkpoints, and have its two
    functions as attributes: FSDP asks for no more (torch 2.13, ``FSDPParam._init_extensions``).

    The scales of all weights are computed together, with one message, before each forward of the model: they
    fit the weights whether a step, a checkpoint or an evaluation of averages changed them.

    Args:
        model: Sharded and materialised, its layers converted.
        plan: Which weights.
        session: Gives the mesh.
    """
    if not plan.float8:
        return
    from torchao.float8.float8_utils import amax_to_scale
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    mesh = session.shard_mesh
    ranks = mesh.size(mesh.ndim - 1)
    casts: list[Any] = []
    for unit in plan.units:
        for parameter in unit.parameters:
            if plan.gathers_in_float8(unit, parameter, ranks):
                layer: Any = _module(model, parameter.fqn.removesuffix(".weight"))
                rows: Any = local(layer.weight)
                dtype = layer.config.cast_config_weight.target_dtype
                # Detached: rows that hold what holds them would outlive the model.
                cast = WeightWithDynamicFloat8CastTensor(rows.detach(), layer.linear_mm_config, dtype)
                rows.fsdp_pre_all_gather = cast.fsdp_pre_all_gather
                rows.fsdp_post_all_gather = cast.fsdp_post_all_gather
                casts.append(cast)
    if not casts:
        return
    group = mesh.get_group(mesh.ndim - 1)

    @torch.no_grad()
    def scale(_module: nn.Module, _arguments: object) -> None:
        largest = torch.stack(torch._foreach_norm([cast._tensor for cast in casts], ord=math.inf))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        for cast, value in zip(casts, amax_to_scale(largest, casts[0]._dtype).unbind(), strict=True):
            cast._precomputed_scale = value

    # Before FSDP's own hook, which gathers.
    model.register_forward_pre_hook(scale, prepend=True)


def _placement(plan: UnitPlan, unit: Unit, ranks: int) -> Callable[[nn.Parameter], Shard | None] | None:
    """Return what tells ``fully_shard`` the dimension of each parameter; None where all are cut by rows."""

    def dimension(parameter: Any) -> int:
        return plan.shard_dimension(unit, parameter.shape, ranks)

    if not any(map(dimension, unit.parameters)):
        return None
    return lambda parameter: Shard(dimension(parameter))


class _Modules:
    """``torch.nn``, whose parameters of integers require no gradient unless they are told to."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: torch.Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(data, data.is_floating_point() if requires_grad is None else requires_grad)


def accept_integers() -> None:
    """Let FSDP2 shard frozen parameters of integers (a quantised base) before torch 2.13, which does.

    torch 2.11 makes sharded parameters that require a gradient before it says that they do not, which
    integers refuse, and casts whatever it gathers to the compute dtype (``_fsdp_param.py:
    _init_sharded_param, to_sharded_post_forward, init_dtype_attrs``).
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    module: Any = _fsdp_param
    if torch_is(2, 13) or isinstance(module.nn, _Modules):
        return
    module.nn = _Modules()
    original = module.FSDPParam.init_dtype_attrs

    def init_dtype_attrs(self: Any, policy: MixedPrecisionPolicy) -> None:
        original(self, policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    module.FSDPParam.init_dtype_attrs = init_dtype_attrs


def _reshard(unit: Unit, session: Session) -> bool | int | None:
    ranks = unit.reshard_after_forward
    if ranks is None or isinstance(ranks, bool):
        return ranks
    violation = session.dims.reshard_violation(ranks)
    if violation is not None:
        raise ConfigError(
            f"sharding.reshard_after_forward: {violation}", help="use such a divisor, or true or false"
        )
    return ranks


def _set_prefetch(plan: UnitPlan, model: nn.Module, units: list[FSDPModule]) -> None:
    """Gather ``plan.prefetch`` units ahead, from the first backward on. 1 is what torch does by itself.

    The first forward tells in which order units run: a U-Net lists its middle block after the last one.
    The root's parameters are gathered before all others.
    """
    if plan.prefetch <= 1:
        return
    by_state = {id(fsdp_state(unit)): unit for unit in units if id(unit) != id(model)}
    order: dict[int, FSDPModule] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(module: nn.Module, _arguments: object) -> None:
        state = id(fsdp_state(module))
        order.setdefault(state, by_state[state])

    def chain_units(_module: nn.Module, _arguments: object, _output: object) -> None:
        for hook in hooks:
            hook.remove()
        chain = list(order.values())
        for index, unit in enumerate(chain):
            unit.set_modules_to_forward_prefetch(chain[index + 1 : index + 1 + plan.prefetch])
            before = chain[max(index - plan.prefetch, 0) : index]
            unit.set_modules_to_backward_prefetch(before[::-1])

    hooks = [
        module.register_forward_pre_hook(note)
        for module in sharded_modules(model)
        if id(fsdp_state(module)) in by_state and isinstance(module, nn.Module)
    ]
    hooks.append(model.register_forward_hook(chain_units))


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ConfigError(
            f"the unit plan lists {path!r}, which {type(model).__name__} does not have",
            help="plan the run again: the model changed",
        ) from error


def _parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _look_up(named: dict[str, nn.Parameter], fqn: str) -> nn.Parameter:
    if fqn not in named:
        raise ConfigError(f"the unit plan ignores {fqn!r}, which the model does not have")
    return named[fqn]


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield every module that carries FSDP state."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def reshard_all(model: nn.Module) -> None:
    """Free whatever forwards without a backward left gathered, and forget that they ran.

    The root keeps its parameters by default. FSDP also notes the order of forwards until a backward
    ends (torch 2.13, ``post_forward_order``): the notes of an evaluation would let the next backward
    gather a unit it does not need, and a teacher's would grow for ever.

    Args:
        model: The root, between steps.
    """
    for module in sharded_modules(model):
        module.reshard()
    forget = getattr(model, "reset_iter_state", None)
    if forget is not None:
        forget()
        return
    for module in sharded_modules(model):
        # torch 2.11 has no function for it; backward's end clears the same two lists (_fsdp_state.py:
        # _root_post_backward_final_callback, _fsdp_param_group.py:finalize_backward).
        fsdp_state(module)._comm_ctx.post_forward_order.clear()
        group = fsdp_group(module)
        if group is not None:
            group._post_forward_indices.clear()


def managed_names(model: nn.Module, module: FSDPModule) -> list[str]:
    """Return the fully qualified names FSDP manages in ``module``'s group, in its order."""
    group = fsdp_group(module)
    if group is None:
        return []
    paths = {id(child): path for path, child in model.named_modules()}
    names = []
    for item in group.fsdp_params:
        path = paths[id(item._module_info.module)]
        names.append(f"{path}.{item._module_info.param_name}" if path else item._module_info.param_name)
    return names


def require(condition: bool, message: str) -> None:
    """Stop the run if it is not sharded as planned.

    Raises:
        WorkerError: ``condition`` does not hold.
    """
    if not condition:
        raise WorkerError(f"sharding proof failed: {message}", help="report this: the run has not started")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor
