"""The conformance test that authors run on their own family.

In a plugin's tests::

    from fsdptool.testing.families import assert_conforms

    def test_my_family() -> None:
        assert_conforms(MyFamily())

Every flavour is built at its true size on the meta device; its exact total, wrap choice, batch
spec and LoRA targets are checked; a shrunk copy is then trained for one step on the CPU, its merged
adapters are compared with the adapters beside it, and a copy split over two ranks (tensor parallelism, and
expert parallelism where experts are fused) is compared with the whole one. torch is imported on use.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.families.protocol import API_VERSION, Family, Flavour, Objective, TensorSpec
from fsdptool.families.synthetic import shrink, synthesise
from fsdptool.records.anatomy import ModelSpec, Parameter, Reference
from fsdptool.records.recipe import Batch, Method, ModelChoice, Recipe
from fsdptool.records.tensor_plan import Placement, TensorPlan
from fsdptool.tensor.placements import placements

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
    def forward(_ctx: Any, tensor: Tensor, group: _Group, rank: int, where: str) -> Tensor:
        return group.sum(rank, where, tensor)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
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


SMALL_BATCHES = (
    Batch(micro_batch=2, sequence_length=32, height=64, width=64, frames=9),
    Batch(micro_batch=2, sequence_length=32, height=64, width=64, frames=1),
    Batch(micro_batch=2, sequence_length=32, height=128, width=128, frames=1),
    Batch(micro_batch=2),
    Batch(micro_batch=1, sequence_length=32, height=64, width=64, frames=22),
    Batch(micro_batch=1, sequence_length=32, height=64, width=64, frames=9),
)
"""Sizes tried for the shrunk copy, in this order; the first the family accepts is used."""


@dataclass(frozen=True, slots=True)
class Conformance:
    """What the conformance test found about one flavour; no problems means that it conforms.

    ``unmatched`` are LoRA targets this flavour lacks: fine as long as another flavour has them.
    """

    reference: str
    problems: tuple[str, ...]
    parameters: int | None = None
    wrap: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()


def assert_conforms(
    family: Family, *, flavours: Iterable[str] | None = None, train: bool = True
) -> tuple[Conformance, ...]:
    """Check a family and all its flavours; return the verdicts if there is no problem.

    Args:
        family: An instance, as the plugin's entry point yields it.
        flavours: Names to check; None checks all.
        train: Whether to take one training step with a shrunk copy of each.

    Raises:
        AssertionError: Lists every problem of every flavour.
    """
    problems = [f"{getattr(family, 'name', '?')}: {problem}" for problem in check_family(family)]
    verdicts = []
    for flavour in family.flavours().values():
        if flavours is None or flavour.name in set(flavours):
            verdicts.append(check_flavour(family, flavour, train=train))
    problems += [f"{verdict.reference}: {problem}" for verdict in verdicts for problem in verdict.problems]
    nowhere = set.intersection(*(set(verdict.unmatched) for verdict in verdicts)) if verdicts else set()
    # A target may be that of a flavour which is not checked.
    for flavour in family.flavours().values() if nowhere and flavours is not None and not problems else ():
        nowhere &= set(_lora(family, flavour, _on_meta(family, flavour))[0])
    if nowhere:
        problems.append(f"{family.name}: no flavour has the LoRA targets {', '.join(sorted(nowhere))}")
    if problems:
        raise AssertionError("\n".join(problems))
    return tuple(verdicts)


def check_family(family: Family) -> list[str]:
    """Return what is wrong with a family's own fields, its data and its objectives."""
    problems = []
    if family.api_version != API_VERSION:
        problems.append(f"api_version is {family.api_version}, this fsdptool uses {API_VERSION}")
    for field in ("name", "library", "default_objective"):
        if not isinstance(getattr(family, field, None), str):
            problems.append(f"{field} is not set")
    for name, flavour in family.flavours().items():
        if name != flavour.name:
            problems.append(f"flavour {flavour.name!r} is listed under {name!r}")
        try:
            same = json.loads(json.dumps(dict(flavour.config))) == dict(flavour.config)
        except (TypeError, ValueError):
            same = False
        if not same:
            problems.append(f"flavour {name!r}: its configuration is not plain JSON data")
    objectives = family.objectives()
    if family.default_objective not in objectives:
        problems.append(f"default objective {family.default_objective!r} is not among {sorted(objectives)}")
    if family.match({"model_type": "fsdptool-nobody", "_class_name": "FsdptoolNobody"}) not in (
        None,
        *_generic(family),
    ):
        problems.append("match claims a configuration that is nobody's")
    return problems


def _generic(family: Family) -> tuple[Any, ...]:
    nobody = {"model_type": "fsdptool-nobody", "_class_name": "FsdptoolNobody"}
    return (family.match(nobody),) if family.precedence < 0 else ()


def check_flavour(family: Family, flavour: Flavour, *, train: bool = True) -> Conformance:
    """Check one flavour. Never raises for what the family does; every failure is a problem."""
    reference = f"{family.name}:{flavour.name}"
    problems: list[str] = []
    total: int | None = None
    wrap: tuple[str, ...] = ()
    unmatched: list[str] = []
    try:
        model = _on_meta(family, flavour)
        total, wrap, found = _structure(family, flavour, model)
        problems += found
        unmatched, found = _lora(family, flavour, model)
        problems += found
        del model
    except FsdptoolError as error:
        problems.append(f"cannot be built: {error.message}")
    except Exception as error:
        problems.append(f"cannot be built: {type(error).__name__}: {error}")
    if train and not problems:
        try:
            problems += _training(family, flavour)
        except FsdptoolError as error:
            problems.append(f"a shrunk copy cannot be trained: {error.message}")
        except Exception as error:
            problems.append(f"a shrunk copy cannot be trained: {type(error).__name__}: {error}")
    return Conformance(reference, tuple(problems), total, wrap, tuple(unmatched))


def _on_meta(family: Family, flavour: Flavour) -> nn.Module:
    import torch

    with torch.device("meta"):
        return family.build(flavour.config, model_class=flavour.model_class)


def _structure(family: Family, flavour: Flavour, model: nn.Module) -> tuple[int, tuple[str, ...], list[str]]:
    from fsdptool.inspection.census import Census
    from fsdptool.inspection.walk import walk
    from fsdptool.inspection.wrap_classes import choose

    walked = walk(model)
    census = Census(walked.modules, walked.parameters)
    problems = [finding.message for finding in walked.diagnostics if finding.severity == "error"]
    if flavour.parameters is not None and census.total != flavour.parameters:
        problems.append(f"has {census.total:,} parameters, its data says {flavour.parameters:,}")
    if type(model).__name__ != flavour.model_class:
        problems.append(f"builds a {type(model).__name__}, its data says {flavour.model_class}")
    hint = family.wrap_hint(flavour.config)
    for name in hint.classes if hint else ():
        if name not in census.by_class:
            problems.append(f"hints at wrapping {name}, which is not in the model")
    return census.total, choose(census, hint=hint).classes, problems


def _lora(family: Family, flavour: Flavour, model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the targets that match nothing, and what is wrong with the others."""
    unmatched, problems = [], []

    targets = family.lora_targets(flavour.config)
    modules = dict(model.named_modules())
    adaptable = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for suffix in targets.modules:
        hits = [m for path, m in modules.items() if path == suffix or path.endswith(f".{suffix}")]
        if not hits:
            unmatched.append(suffix)
        # transformers' own Conv1D (GPT-2) is a linear layer that peft adapts, too.
        elif not any(isinstance(m, adaptable) or type(m).__name__ == "Conv1D" for m in hits):
            problems.append(f"LoRA target {suffix!r} is a {type(hits[0]).__name__}, which LoRA cannot adapt")
    names = [name for name, _ in model.named_parameters()]
    for suffix in targets.parameters:
        if not any(name == suffix or name.endswith(f".{suffix}") for name in names):
            unmatched.append(suffix)
    if targets.modules and set(targets.modules) <= set(unmatched):
        problems.append(f"none of the LoRA targets {', '.join(targets.modules)} is in the model")
    return unmatched, problems


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A shrunk copy on the CPU with what it trains on."""

    model: nn.Module
    spec: ModelSpec
    batch: dict[str, Tensor]
    objective: Objective


def small_spec(family: Family, flavour: Flavour) -> ModelSpec:
    """Return the spec of a flavour's shrunk copy.

    Raises:
        ModelError: The configuration cannot be shrunk.
    """
    return ModelSpec(
        reference=Reference("flavour", f"{family.name}:{flavour.name}"),
        family=family.name,
        flavour=flavour.name,
        library=family.library,
        model_class=flavour.model_class,
        config=shrink(family, flavour.config, flavour.model_class),
        objective=family.objective_for(flavour.config),
        component=flavour.component,
    )


def small_batch(family: Family, spec: ModelSpec) -> tuple[Recipe, tuple[TensorSpec, ...]]:
    """Return a recipe with sizes that suit a shrunk copy, and its micro-batch.

    Raises:
        ConfigError: The family accepts none of :data:`SMALL_BATCHES`.
    """
    refusal = ""
    for sizes in SMALL_BATCHES:
        recipe = Recipe(model=ModelChoice(spec.reference.id), batch=sizes)
        try:
            return recipe, family.batch_spec({**spec.config, "architectures": [spec.model_class]}, recipe)
        except FsdptoolError as error:
            refusal = refusal or error.message
    raise ConfigError(f"no small batch suits it: {refusal}")


def small_model(family: Family, flavour: Flavour) -> SmallModel:
    """Build a flavour's shrunk copy with random weights on the CPU.

    Raises:
        FsdptoolError: It cannot be shrunk, built or fed.
    """
    import torch

    spec = small_spec(family, flavour)
    recipe, tensors = small_batch(family, spec)
    torch.manual_seed(0)
    model = family.build(spec.config, model_class=spec.model_class)
    objective = family.objectives()[spec.objective or family.default_objective](**recipe.objective.options)
    batch = synthesise(tensors, torch.Generator().manual_seed(0))
    return SmallModel(model, spec, batch, objective)


def _training(family: Family, flavour: Flavour) -> list[str]:
    import torch

    small = small_model(family, flavour)
    problems = list(_batch_problems(small))
    weight = small.objective.weight(small.batch)
    if weight.dtype != torch.int64 or weight.dim() or int(weight) < 1:
        problems.append(f"weight is {weight!r}: a positive int64 scalar is needed")
    loss = small.objective.loss(small.objective.predict(small.model, small.batch), small.batch)
    if loss.dtype != torch.float32 or loss.dim():
        problems.append(f"loss is {loss.dtype} of shape {tuple(loss.shape)}: a float32 scalar is needed")
    if not torch.isfinite(loss):
        problems.append(f"loss is {loss.item()}")
    loss.backward()  # type: ignore[no-untyped-call]
    spared = family.untouched(small.spec.config)
    idle = [
        name
        for name, parameter in small.model.named_parameters()
        if parameter.requires_grad and parameter.grad is None and not name.startswith(spared or ("\0",))
    ]
    if idle:
        problems.append(f"{len(idle)} trainable parameters get no gradient ({', '.join(idle[:3])}, ...)")
    broken = [
        name
        for name, parameter in small.model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    if broken:
        problems.append(f"{len(broken)} gradients are not finite ({broken[0]}, ...)")
    problems += _merging(family, small_model(family, flavour))
    problems += _fusing(small_model(family, flavour))
    return problems + list(_splitting(small_model(family, flavour)))


def _fusing(small: SmallModel) -> Iterator[str]:
    """Compare a shrunk copy with one whose head computes the loss, in chunks that leave a remainder."""
    import copy

    import torch

    from fsdptool.inspection.api import describe
    from fsdptool.modeling.fused_loss import fuse_head, plain_head

    model, objective = small.model.eval(), copy.copy(small.objective)
    anatomy = describe(model, small.spec)
    if not objective.fuses_head or plain_head(anatomy) is None or anatomy.logit_tail is None:
        return
    objective.chunk = 3  # type: ignore[attr-defined]
    fused = copy.deepcopy(model)
    fuse_head(fused)
    losses = []
    for one in (model, fused):
        torch.manual_seed(0)
        losses.append(objective.loss(objective.predict(one, small.batch), small.batch))
        losses[-1].backward()  # type: ignore[no-untyped-call]
    if not torch.allclose(losses[0], losses[1], rtol=1e-5):
        yield f"a head that computes the loss finds {losses[1].item()} in the place of {losses[0].item()}"
    for (name, plain), other in zip(model.named_parameters(), fused.parameters(), strict=True):
        if plain.grad is not None and (other.grad is None or _apart(plain.grad, other.grad)):
            yield f"a head that computes the loss changes the gradient of {name}"
            return


def _apart(one: Tensor, other: Tensor) -> bool:
    """Say whether two gradients differ by more than rounding in fp32."""
    scale = float(one.double().norm())
    return float((one.double() - other.double()).norm()) > 1e-4 * scale + 1e-6


def _splitting(small: SmallModel) -> Iterator[str]:
    """Compare the gradients of a shrunk copy with those of the same copy split over two ranks.

    What two ranks cannot divide is not compared: a shrunk copy may have a single head.
    """
    import torch

    from fsdptool.inspection.api import describe
    from fsdptool.tensor.division import plan_expert_parallel, plan_tensor_parallel

    def loss_of(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        return small.objective.loss(small.objective.predict(model, small.batch), small.batch)

    model = small.model.eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and last layers that start at zero, and norms at one, would hide what is lost of them.
            if parameter.dim() <= 1 or not parameter.any():
                noise = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.add_(noise.to(parameter.dtype))
    anatomy = describe(model, small.spec)
    plans = {
        "tensor": plan_tensor_parallel(anatomy, 2, vocabulary=False),
        "expert": plan_expert_parallel(anatomy, 2),
    }
    for name, plan in plans.items():
        if plan.modules and not plan.indivisible:
            model.zero_grad(set_to_none=True)
            for problem in compare(model, anatomy.parameters, plan, loss_of):
                yield f"{name} parallelism over two ranks: {problem}"


def _merging(family: Family, small: SmallModel) -> Iterator[str]:
    """Compare a shrunk copy that carries random adapters with one that has them merged, as an export does."""
    import copy

    import torch

    from fsdptool.modeling.methods.lora import inject, is_adapter
    from fsdptool.training.export.adapters import merged_fetch

    if not family.lora_targets(small.spec.config).modules:
        return
    adapted, merged = small.model.eval(), copy.deepcopy(small.model).eval()
    recipe = Recipe(model=ModelChoice(small.spec.reference.id), method=Method(name="lora"))
    with torch.no_grad():
        for parameter in merged.parameters():
            # A last layer that starts at zero hides every change before it.
            if not parameter.any():
                parameter.fill_(0.01)
    adapted.load_state_dict(merged.state_dict())
    inject(adapted, recipe, family, small.spec.config)
    generator = torch.Generator().manual_seed(1)
    for path, module in adapted.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_adapter(f"{path}.{name}"):
                value = torch.randn(parameter.shape, generator=generator) * 0.2
                module.register_parameter(name, torch.nn.Parameter(value.to(parameter.dtype)))
    values: dict[str, Tensor] = dict(adapted.named_parameters(remove_duplicate=False))
    values |= dict(adapted.named_buffers(remove_duplicate=False))
    fetch = merged_fetch(copy.deepcopy(adapted).to("meta"), lambda name: values[name].detach())
    plain = _predictions(small, merged)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(fetch(name))
    with_adapters, without = _predictions(small, adapted), _predictions(small, merged)
    change = max(float((value - plain[name]).norm()) for name, value in with_adapters.items())
    error = max(float((value - without[name]).norm()) for name, value in with_adapters.items())
    if not change:
        yield "LoRA adapters with random values change nothing in what the model predicts"
    # float32 arithmetic leaves under a hundredth of the change; a layer that is left out leaves most of it.
    elif not error < 0.05 * change:
        yield f"merging LoRA adapters loses {error / change:.0%} of what they change in the prediction"


def _predictions(small: SmallModel, model: nn.Module) -> dict[str, Tensor]:
    import torch

    with torch.no_grad():
        torch.manual_seed(0)
        predicted = small.objective.predict(model, small.batch)
    return {name: value.float() for name, value in predicted.items() if value.is_floating_point()}


def _batch_problems(small: SmallModel) -> Iterator[str]:
    for name, tensor in small.batch.items():
        if not tensor.dim() or tensor.shape[0] < 1:
            yield f"batch tensor {name!r} has no micro-batch dimension"
