"""Runs a tensor- or expert-parallel plan in threads of one process and compares it with the whole model.

Every thread is a rank: it holds the local model that the plan describes, and the ranks exchange sums through
memory. The loss and the gradient of every parameter must equal the whole model's. It is slow and serves small
models only; training uses process groups.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fsdptool.layout.placements import placements
from fsdptool.records.anatomy import Parameter
from fsdptool.records.tensor_plan import Placement, TensorPlan

if TYPE_CHECKING:
    from torch import Tensor

_PATIENCE = 120.0
"""Seconds that a rank waits for the others; a rank that failed releases them at once."""


class _Group:
    """Ranks that sum tensors through memory, in the same order on every rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self.slots: list[tuple[str, Tensor] | None] = [None] * size

    def sum(self, rank: int, where: str, tensor: Tensor) -> Tensor:
        self.slots[rank] = (where, tensor.detach())
        self.barrier.wait()
        given = [slot for slot in self.slots if slot is not None]
        if {name for name, _ in given} != {where}:
            self.barrier.abort()
            raise RuntimeError(f"ranks sum different tensors: {', '.join(sorted({n for n, _ in given}))}")
        total = given[0][1].clone()
        for _, other in given[1:]:
            total += other
        self.barrier.wait()
        return total


class _Enter(torch.autograd.Function):
    """Identity whose gradient is summed: the entry of a region."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: _Group, rank: int, where: str) -> Tensor:
        ctx.sum = (group, rank, where)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        group, rank, where = ctx.sum
        return group.sum(rank, f"{where} backward", gradients[0]), None, None, None


class _Leave(torch.autograd.Function):
    """Sum whose gradient passes unchanged: what a row layer returns."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: _Group, rank: int, where: str) -> Tensor:
        return group.sum(rank, where, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None, None


def local_model(model: nn.Module, plan: TensorPlan, placed: Sequence[Placement], rank: int) -> nn.Module:
    """Return a copy of a model with one rank's parameters and sizes, without any communication."""
    local = copy.deepcopy(model)
    by_name = {placement.fqn: placement for placement in placed}
    values = dict(local.named_parameters())
    replaced: dict[int, nn.Parameter] = {}
    for name, value in values.items():
        placement = by_name[name]
        if placement.dim is not None:
            parts = [
                value.detach().narrow(placement.dim, whole, length)
                for _, whole, length in placement.pieces(plan.size, rank)
            ]
            part = torch.cat(parts, placement.dim).clone()
            replaced[id(value)] = nn.Parameter(part, requires_grad=value.requires_grad)
    for module in local.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in replaced:
                module._parameters[key] = replaced[id(parameter)]
    for path, sizes in plan.attributes.items():
        module = local.get_submodule(path)
        for name, count in sizes.items():
            target: Any = module
            if name.startswith("config."):
                module.config = copy.copy(module.config)
                target = module.config
            setattr(target, name.removeprefix("config."), count // plan.size)
    return local


def _connect(
    local: nn.Module, plan: TensorPlan, placed: Sequence[Placement], group: _Group, rank: int
) -> None:
    """Put the group's sums at the entries of regions and behind row layers."""
    regions = set(plan.regions)
    alone = {
        module.path
        for module in plan.modules
        if module.style == "column" and not any(above in regions for above in _above(module.path))
    }
    for path in (*plan.regions, *sorted(alone)):
        module = local.get_submodule(path)
        module.register_forward_pre_hook(
            _entry(path, module, plan.divided_arguments, group, rank), with_kwargs=True
        )
    biases = {p.fqn for p in placed if p.reason == "after_sum"} | set(plan.shared)
    for path in plan.sums:
        module = local.get_submodule(path)
        owned = [key for key in module._parameters if f"{path}.{key}" in biases]
        module.forward = _summed(module, path, owned, group, rank)
    for split in plan.modules:
        if split.style == "experts":
            module = local.get_submodule(split.path)
            module.forward = _own_experts(module, split.path, group, rank)


def _above(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:at]) for at in range(1, len(parts) + 1))


def _entry(
    path: str, module: nn.Module, divided: Sequence[str], group: _Group, rank: int
) -> Callable[..., Any]:
    names = list(signature(module.forward).parameters)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        def whole(value: Any) -> Any:
            needs = isinstance(value, torch.Tensor) and value.requires_grad
            return _Enter.apply(value, group, rank, path) if needs else value  # type: ignore[no-untyped-call]

        args = tuple(
            value if at < len(names) and names[at] in divided else tree_map(whole, value)
            for at, value in enumerate(args)
        )
        return args, {k: v if k in divided else tree_map(whole, v) for k, v in kwargs.items()}

    return enter


def _summed(
    module: nn.Module, path: str, biases: Sequence[str], group: _Group, rank: int
) -> Callable[..., Any]:
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        kept = {key: module._parameters[key] for key in biases}
        for key, value in kept.items():
            if value is not None:
                module._parameters[key] = value / group.size  # type: ignore[assignment]
        try:
            output = forward(*args, **kwargs)
        finally:
            module._parameters.update(kept)
        return _Leave.apply(output, group, rank, path)  # type: ignore[no-untyped-call]

    return run


def _own_experts(module: nn.Module, path: str, group: _Group, rank: int) -> Callable[..., Any]:
    """Run the experts of one rank on all tokens: a token's other experts get weight 0 here."""
    forward = module.forward
    count = next(module.parameters()).shape[0]

    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        mine = torch.div(top_k_index, count, rounding_mode="floor") == rank
        index = torch.where(mine, top_k_index % count, 0)
        output = forward(hidden_states, index, torch.where(mine, top_k_weights, 0))
        return _Leave.apply(output, group, rank, path)  # type: ignore[no-untyped-call]

    return run


_REPLACED = (
    "find_packed_sequence_indices",
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "torch_compilable_check",
)
"""What an objective replaces in transformers for the time of a forward (``objectives/language.py``)."""


def _replaced_functions() -> Iterator[tuple[Any, str, Any]]:
    """Yield where they are, and what they are: threads would put each other's replacement back."""
    for path, module in list(sys.modules.items()):
        if path.startswith("transformers."):
            for name in _REPLACED:
                if name in vars(module):
                    yield module, name, vars(module)[name]


def compare(
    model: nn.Module,
    parameters: Sequence[Parameter],
    plan: TensorPlan,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    tolerance: float = 1e-3,
) -> Iterator[str]:
    """Yield where the split model differs from the whole one in its loss or its gradients.

    Args:
        model: The whole model, on the CPU, in evaluation mode: random numbers would differ between the two.
        parameters: Of its anatomy.
        plan: How it is split.
        loss_of: Computes the loss of a model; runs once for each rank.
        tolerance: Greatest difference, relative to the norm of the whole model's gradient.
    """
    placed = placements(parameters, plan)
    locals_ = [local_model(model, plan, placed, rank) for rank in range(plan.size)]
    group = _Group(plan.size)
    losses: list[float] = [0.0] * plan.size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            _connect(locals_[rank], plan, placed, group, rank)
            loss = loss_of(locals_[rank])
            loss.backward()  # type: ignore[no-untyped-call]
            losses[rank] = float(loss.detach())
        except BaseException as error:
            failures.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(plan.size)]
    replaced = list(_replaced_functions())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for module, name, value in replaced:
        setattr(module, name, value)
    if failures:
        first = next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
        yield f"the split model fails: {type(first).__name__}: {first}"
        return
    loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    for rank, value in enumerate(losses):
        if not abs(value - float(loss.detach())) <= tolerance * max(abs(float(loss.detach())), 1.0):
            yield f"the loss is {value:.6g} on rank {rank}, {float(loss.detach()):.6g} in the whole model"
    ranks = [dict(local.named_parameters()) for local in locals_]
    scale = max((float(p.grad.norm()) for p in model.parameters() if p.grad is not None), default=0.0)
    for (name, parameter), placement in zip(model.named_parameters(), placed, strict=True):
        yield from _gradient(name, parameter, placement, [r[name] for r in ranks], plan, tolerance, scale)


def _gradient(
    name: str,
    parameter: Tensor,
    placement: Placement,
    parts: Sequence[Tensor],
    plan: TensorPlan,
    tolerance: float,
    scale: float,
) -> Iterator[str]:
    if parameter.grad is None:
        if any(part.grad is not None and bool(part.grad.any()) for part in parts):
            yield f"{name} has a gradient in the split model only"
        return
    whole = parameter.grad
    gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
    if placement.dim is not None:
        got = torch.empty_like(whole)
        for rank, gradient in enumerate(gradients):
            for inside, outside, length in placement.pieces(plan.size, rank):
                got.narrow(placement.dim, outside, length).copy_(
                    gradient.narrow(placement.dim, inside, length)
                )
        candidates = [got]
    elif placement.partial_gradient or placement.reason == "after_sum":
        candidates = [torch.stack(gradients).sum(0)]
    else:
        candidates = gradients
    limit = tolerance * float(whole.norm()) + 1e-6 * scale
    for got in candidates:
        error = float((got - whole).norm())
        if not error <= limit:
            share = error / max(float(whole.norm()), 1e-30)
            yield f"{name}: the gradient of the split model differs by {share:.1%}"
            return
