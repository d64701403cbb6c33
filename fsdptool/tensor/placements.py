"""Where every parameter lies on a tensor- or expert-parallel group, adapters included. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdptool.errors import ConfigError
from fsdptool.records.anatomy import Parameter
from fsdptool.records.tensor_plan import Placement, SplitModule, TensorPlan
from fsdptool.tensor.refusals import EXPERT, TENSOR

_ADAPTERS = ("lora_A", "lora_B")


def placements(parameters: Sequence[Parameter], plan: TensorPlan) -> tuple[Placement, ...]:
    """Return the placement of each parameter, in their order.

    Args:
        parameters: Of the published model, or of the model as it is trained: PEFT's names are understood
            (``X.base_layer.weight``, ``X.lora_A.default.weight``, ``X.lora_B.default.weight``).
        plan: Of the published model.

    Raises:
        ConfigError: A split module has an adapter or a format that cannot be divided, or a parameter's shape
            does not fit its module's sections.
    """
    split = {module.path: module for module in plan.modules}
    regions = frozenset(plan.regions)
    shared = frozenset(plan.shared)
    placed = (_place(parameter, split, regions, shared, plan) for parameter in parameters)
    return tuple(
        replace(item, aliases=parameter.aliases) for item, parameter in zip(placed, parameters, strict=True)
    )


def merged(tensor: Sequence[Placement], experts: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return where parameters lie on a tensor-parallel group beside an expert-parallel one."""
    pairs = zip(tensor, experts, strict=True)
    return tuple(spread if spread.experts else divided for divided, spread in pairs)


def _place(
    parameter: Parameter,
    split: Mapping[str, SplitModule],
    regions: frozenset[str],
    shared: frozenset[str],
    plan: TensorPlan,
) -> Placement:
    names = [published(name) for name in parameter.names]
    for name, adapter in names:
        owner = name.rpartition(".")[0]
        module = split.get(name) or split.get(owner)
        if module is not None:
            return _split(parameter, name, adapter, module, plan)
    reason = next((plan.whole[name] for name, _ in names if name in plan.whole), None)
    name, adapter = names[0]
    if adapter is not None and any(
        path == module or path.startswith(f"{module}.") for path in (name,) for module in split
    ):
        raise _refusal(parameter, "an adapter of fused parameters", plan)
    if adapter is not None:
        reason = "latent"
    inside = name in shared or _inside(name, regions) or _sees_parts(name, plan)
    return Placement(parameter.fqn, parameter.shape, None, (), inside, reason or "unknown")


def published(name: str) -> tuple[str, str | None]:
    """Return a parameter's name in the published model, and which adapter matrix it is, if one."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part in _ADAPTERS:
            return ".".join([*parts[:at], parts[-1]]), part
        if part.startswith("lora_"):
            return ".".join([*parts[:at], parts[-1]]), part
    changed = next((part for part in ("modules_to_save", "trainable_tokens_delta") if part in parts), None)
    inner = ("base_layer", "original_module", "token_adapter", "default", changed)
    hidden = inner if changed else inner[:3]
    kept = [part for part in parts if part not in hidden]
    return ".".join([*kept, "weight"] if changed == "trainable_tokens_delta" else kept), changed


def _inside(name: str, regions: frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:at]) in regions for at in range(1, len(parts)))


def _sees_parts(name: str, plan: TensorPlan) -> bool:
    return plan.sequence is not None and plan.sequence.covers(name)


def _split(
    parameter: Parameter, name: str, adapter: str | None, module: SplitModule, plan: TensorPlan
) -> Placement:
    if adapter is None and parameter.dtype in ("uint8", "int8"):
        raise _refusal(parameter, "a quantised base", plan)
    if adapter is not None:
        return _adapter(parameter, name, adapter, module, plan)
    dim = split_dim(parameter, name, module)
    if dim is None:
        partial = _sees_parts(name, plan)
        return Placement(parameter.fqn, parameter.shape, partial_gradient=partial, reason="after_sum")
    return _along(parameter, dim, module)


def split_dim(parameter: Parameter, name: str, module: SplitModule) -> int | None:
    """Return the dimension along which a parameter of a split module is divided; None for a row's bias."""
    rank, bias = len(parameter.shape), name.endswith("bias")
    if module.style in ("vocabulary", "experts"):
        return 0
    if bias or rank == 1:
        return None if module.style == "row" else rank - 1
    outputs, inputs = rank - 2, rank - 1
    if rank == 3 and parameter.shape[1:] == (1, 1):
        outputs = 0  # a scale per head
    return outputs if (module.style == "column") != module.transposed else inputs


def _adapter(
    parameter: Parameter, name: str, adapter: str, module: SplitModule, plan: TensorPlan
) -> Placement:
    """Place a low-rank matrix: ``lora_A`` is (rank, in), ``lora_B`` (out, rank), whatever the base stores."""
    if adapter not in _ADAPTERS or len(parameter.shape) != 2 or module.style not in ("column", "row"):
        raise _refusal(parameter, f"{adapter} on a layer split by {module.style}", plan)
    if (module.style, adapter) == ("column", "lora_B"):
        return _along(parameter, 0, module)
    if (module.style, adapter) == ("row", "lora_A"):
        return _along(parameter, 1, module)
    # A column layer's lora_A feeds a divided lora_B; a row layer's lora_B receives the sum over the group.
    partial = module.style == "column" or _sees_parts(name, plan)
    return Placement(parameter.fqn, parameter.shape, None, (), partial, "latent")


def _along(parameter: Parameter, dim: int, module: SplitModule) -> Placement:
    length = parameter.shape[dim]
    sections = module.sections or (length,)
    if sum(sections) != length:
        raise ConfigError(
            f"{parameter.fqn}: {length} elements along dimension {dim}, but sections of {sum(sections)}",
            help="the tensor-parallel plan belongs to another configuration of the model",
        )
    return Placement(parameter.fqn, parameter.shape, dim, sections, experts=module.style == "experts")


def _refusal(parameter: Parameter, what: str, plan: TensorPlan) -> ConfigError:
    experts = any(module.style == "experts" for module in plan.modules)
    group, setting = ("an expert", EXPERT.rstrip(":")) if experts else ("a tensor", TENSOR)
    return ConfigError(
        f"{parameter.fqn}: {what} cannot be divided over {group}-parallel group",
        help=f"use LoRA on linear layers with an unquantised base, or set {setting} to 1",
    )
