"""From a built model to plain records: names, shapes, ties, paths, sizes. Holds no tensor afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import getsource, isfunction, signature
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from fsdptool.inspection.logit_tail import logit_tail
from fsdptool.inspection.source_reads import hookless, reads_own_weight, weights_read
from fsdptool.records.anatomy import Buffer, LogitTail, Module, Parameter
from fsdptool.records.diagnostic import Diagnostic

if TYPE_CHECKING:
    from torch import nn


CYCLE = "DET130"


@dataclass(slots=True)
class WalkResult:
    """The result of :func:`walk`, before any check."""

    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    modules: tuple[Module, ...]
    input_embedding: str | None
    output_embedding: str | None
    logit_tail: LogitTail | None
    final_norm: str | None
    no_split_modules: tuple[str, ...]
    repeated_blocks: tuple[str, ...]
    fsdp_plan_unmatched: tuple[str, ...]
    class_modules: dict[str, str]
    weights_read: tuple[str, ...]
    hookless: tuple[str, ...]
    tensor_plan: dict[str, str]
    expert_plan: dict[str, str]
    diagnostics: tuple[Diagnostic, ...]


@dataclass(slots=True)
class _Seen:
    """Names by object identity, in first-seen order (the order of ``named_modules``)."""

    modules: dict[int, tuple[Any, list[str], bool]] = field(default_factory=dict)
    parameters: dict[int, tuple[Any, list[str]]] = field(default_factory=dict)
    buffers: dict[int, tuple[Any, list[str], bool]] = field(default_factory=dict)
    cycles: list[str] = field(default_factory=list)


def walk(model: nn.Module) -> WalkResult:
    """Read a model's structure. Works on any device; parameters are told apart by identity."""
    seen = _Seen()
    _visit(model, "", False, set(), seen)
    paths = {identity: names[0] for identity, (_, names, _) in seen.modules.items()}
    head = _embedding_path(model, "get_output_embeddings", paths)
    classes: dict[type, tuple[str, tuple[str, ...], bool, bool]] = {}
    modules = []
    for module, names, listed in seen.modules.values():
        kind: Any = type(module)
        if kind not in classes:
            classes[kind] = _describe(kind)
        name, bases, embedding, forwards = classes[kind]
        aliases = tuple(sorted(names[1:]))
        sizes = sizes_of(module)
        arguments = () if kind.__module__.startswith("torch.") else arguments_of(kind)
        modules.append(Module(names[0], name, bases, listed, embedding, forwards, aliases, sizes, arguments))
    return WalkResult(
        parameters=tuple(
            Parameter(
                fqn=names[0],
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                trainable=bool(tensor.requires_grad),
                aliases=tuple(sorted(names[1:])),
            )
            for tensor, names in seen.parameters.values()
        ),
        buffers=tuple(
            Buffer(names[0], tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), persistent)
            for tensor, names, persistent in seen.buffers.values()
        ),
        modules=tuple(modules),
        input_embedding=_embedding_path(model, "get_input_embeddings", paths),
        output_embedding=head,
        logit_tail=logit_tail(model, head),
        final_norm=_final_norm(model, paths),
        no_split_modules=_names(getattr(model, "_no_split_modules", None)),
        repeated_blocks=_names(getattr(model, "_repeated_blocks", None)),
        fsdp_plan_unmatched=_unmatched_plan(model, paths),
        class_modules={kind.__name__: kind.__module__ for kind in reversed(classes)},
        weights_read=_weights_read(modules, seen, classes),
        hookless=hookless(model, paths),
        tensor_plan=library_plan(model, "tp_plan"),
        expert_plan=library_plan(model, "ep_plan"),
        diagnostics=tuple(
            Diagnostic(
                code=CYCLE,
                severity="error",
                message=f"module {path or '(root)'} contains itself",
                help="keep the back reference in a list or a weakref, outside nn.Module's registration",
            )
            for path in seen.cycles
        ),
    )


def _weights_read(modules: list[Module], seen: _Seen, classes: Iterable[type]) -> tuple[str, ...]:
    """Return the paths of embeddings whose weight is read, by other modules or by their own forward."""
    embeddings = [item.path for item in modules if item.embedding]
    kinds = {names[0]: type(module) for module, names, _ in seen.modules.values()}
    read = {path for path in embeddings if reads_own_weight(kinds[path])}
    read.update(weights_read(embeddings, classes))
    return tuple(path for path in embeddings if path in read)


def _visit(module: Any, path: str, listed: bool, above: set[int], seen: _Seen) -> None:
    identity = id(module)
    known = seen.modules.get(identity)
    if known is None:
        seen.modules[identity] = (module, [path], listed)
    else:
        known[1].append(path)
        if identity in above:
            seen.cycles.append(known[1][0])
            return
    prefix = f"{path}." if path else ""
    for name, tensor in module._parameters.items():
        if tensor is not None:
            _name(seen.parameters, tensor, prefix + name)
    for name, tensor in module._buffers.items():
        if tensor is not None:
            entry = seen.buffers.setdefault(
                id(tensor), (tensor, [], name not in module._non_persistent_buffers_set)
            )
            entry[1].append(prefix + name)
    above.add(identity)
    lists = _is_list(module)
    for name, child in module._modules.items():
        if child is not None:
            _visit(child, prefix + name, lists, above, seen)
    above.discard(identity)


def _name(table: dict[int, tuple[Any, list[str]]], tensor: Any, name: str) -> None:
    table.setdefault(id(tensor), (tensor, []))[1].append(name)


def _is_list(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _describe(kind: type) -> tuple[str, tuple[str, ...], bool, bool]:
    from torch import nn

    bases = tuple(
        base.__name__ for base in kind.__mro__[1:] if issubclass(base, nn.Module) and base is not nn.Module
    )
    # torch 2.13 `_fsdp_init.py:_validate_module` refuses exactly these containers.
    container = issubclass(kind, nn.ModuleList | nn.ModuleDict) and kind.forward is nn.Module.forward
    return kind.__name__, bases, issubclass(kind, nn.Embedding), not container


def _embedding_path(model: Any, getter: str, paths: dict[int, str]) -> str | None:
    try:
        embedding = getattr(model, getter)()
    except Exception:
        # Absent on diffusers models; raises NotImplementedError where a transformers class has none.
        return None
    return paths.get(id(embedding)) if embedding is not None else None


def _final_norm(model: Any, paths: dict[int, str]) -> str | None:
    """Return what accelerate 1.15 puts into its tail group (``fsdp_utils.py:_find_final_norm``)."""
    from torch import nn

    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    if not isinstance(base, nn.Module):
        return None
    final = None
    for child in base.children():
        if "Norm" in type(child).__name__:
            final = child
    return paths.get(id(final)) if final is not None else None


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, set | frozenset | list | tuple):
        return ()
    return tuple(sorted({item for item in value if isinstance(item, str)}))


def _unmatched_plan(model: Any, paths: dict[int, str]) -> tuple[str, ...]:
    """Return the rules of transformers' own FSDP plan (5.x) that match no module of the model."""
    try:
        plan = model.fsdp_plan
        rules = list(plan) if plan else []
    except Exception:
        return ()
    have = set(paths.values())
    numbered = {".".join("*" if part.isdigit() else part for part in path.split(".")) for path in have}
    return tuple(sorted(rule for rule in rules if isinstance(rule, str) and rule not in have | numbered))


_FLAGS = frozenset({"is_concatenated", "is_transposed"})
"""How fused experts of transformers 5.23 store their weights (``integrations/moe.py``)."""
_CONFIG = re.compile(r"\bself\.config\.(\w+)")
_NUMBERS = ("layer_idx", "layer_id", "layer_number")
"""Attributes that number a module, not measure it."""


def sizes_of(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the integers a module computes with, sorted by name (``Module.sizes``)."""
    if type(module).__module__.startswith("torch."):
        return ()
    found = {
        name: int(value)
        for name, value in vars(module).items()
        if (type(value) is int and value > 0 and name not in _NUMBERS) or (name in _FLAGS)
    }
    config, kind = getattr(module, "config", None), cast("Any", type(module))
    for name in _config_reads(kind) if config is not None else ():
        value = getattr(config, name, None)
        if type(value) is int and value > 0:
            found[f"config.{name}"] = value
    return tuple(sorted(found.items()))


@cache
def arguments_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a class's ``forward``."""
    try:
        return tuple(signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


@cache
def _config_reads(kind: Any) -> frozenset[str]:
    """Return the attributes of ``self.config`` that a class's methods read after it is built."""
    reads: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            break
        for name, method in vars(base).items():
            if isfunction(method) and name != "__init__" and "config" in method.__code__.co_names:
                try:
                    reads.update(_CONFIG.findall(getsource(method)))
                except (OSError, TypeError):
                    continue
    return frozenset(reads)


def library_plan(model: nn.Module, name: str) -> dict[str, str]:
    """Return a plan of the model's library, style by pattern; empty where it has none.

    transformers merges the plans of a model's parts and of their configurations into one, ``tp_plan`` and
    ``ep_plan``; diffusers declares ``_tp_plan`` on the class.

    Args:
        model: The model.
        name: ``tp_plan`` or ``ep_plan``.
    """
    try:
        plan = getattr(model, name, None) or getattr(model, f"_{name}", None)
    except Exception:
        return {}
    if not isinstance(plan, Mapping):
        return {}
    return {
        pattern: _style(model, pattern, style)
        for pattern, style in plan.items()
        if isinstance(pattern, str) and style is not None
    }


def _style(model: nn.Module, pattern: str, style: Any) -> str:
    if isinstance(style, str):
        return style
    # diffusers 0.42 marks fused layers with objects; the proportions are theirs or stored on the layer
    # (``hooks/tensor_parallel.py``).
    way = "col" if "Colwise" in type(style).__name__ else "row"
    blocks = getattr(style, "blocks", None)
    if not blocks:
        matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        marked = (module for path, module in model.named_modules() if matching.fullmatch(path))
        blocks = next(chain(marked), None)
        blocks = getattr(blocks, f"_tp_packed_{way}_blocks", None)
    return ":".join([f"packed_{way}wise", *(str(block) for block in blocks or ())])
