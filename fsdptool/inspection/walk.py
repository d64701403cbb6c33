"""From a built model to plain records: names, shapes, ties, paths. Holds no tensor afterwards."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.records.anatomy import Buffer, Module, Parameter
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
    final_norm: str | None
    no_split_modules: tuple[str, ...]
    repeated_blocks: tuple[str, ...]
    fsdp_plan_unmatched: tuple[str, ...]
    class_modules: dict[str, str]
    weights_read: tuple[str, ...]
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
    classes: dict[type, tuple[str, tuple[str, ...], bool, bool]] = {}
    modules = []
    for module, names, listed in seen.modules.values():
        kind = type(module)
        if kind not in classes:
            classes[kind] = _describe(kind)
        name, bases, embedding, forwards = classes[kind]
        modules.append(Module(names[0], name, bases, listed, embedding, forwards, tuple(sorted(names[1:]))))
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
        output_embedding=_embedding_path(model, "get_output_embeddings", paths),
        final_norm=_final_norm(model, paths),
        no_split_modules=_names(getattr(model, "_no_split_modules", None)),
        repeated_blocks=_names(getattr(model, "_repeated_blocks", None)),
        fsdp_plan_unmatched=_unmatched_plan(model, paths),
        class_modules={kind.__name__: kind.__module__ for kind in reversed(classes)},
        weights_read=weights_read([item.path for item in modules if item.embedding], classes),
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


_NOT_FORWARD = (
    "__init__",
    "_init",
    "init_",
    "tie_",
    "_tie",
    "reset_",
    "resize_",
    "set_",
    "get_input_",
    "load",
)
"""Beginnings of the names of functions that do not run in a training step."""
_HARMLESS = frozenset({"device", "dtype", "is_floating_point", "ndim", "requires_grad", "shape", "size"})
"""What may be asked of a sharded weight: a DTensor answers with the whole tensor's properties."""


# A unit is gathered when its module is called. DeBERTa takes ``self.rel_embeddings.weight`` instead: as a
# unit of its own it would still be sharded there, while the root's parameters are gathered. ProphetNet calls
# ``self.position_embeddings._forward``, which runs no hook either. So the source of the classes the model is
# made of is searched, except for functions that run before training.
def weights_read(paths: Iterable[str], kinds: Iterable[type]) -> tuple[str, ...]:
    """Return the paths of embeddings whose weight the model's code reads without calling the module.

    Args:
        paths: Of the embeddings.
        kinds: The classes of the model's modules.
    """
    classes = {base for kind in kinds for base in kind.__mro__ if not base.__module__.startswith("torch.")}
    modules = {kind.__module__ for kind in classes}
    names = {kind.__name__ for kind in classes}
    methods = frozenset(name for kind in classes for name in _lookups(kind))
    read_paths = []
    for path in paths:
        name = next((part for part in reversed(path.split(".")) if not part.isdigit()), path)
        # Most sources do not contain the name, and parsing one takes far longer than searching it.
        hits = [module for module in modules if _mentions(name, _source(module))]
        read = any(name in reads for module in hits for owner, reads in _read_in(module) if owner in names)
        if read or any(_calls(name, method, _source(module)) for method in methods for module in modules):
            read_paths.append(path)
    return tuple(read_paths)


def _lookups(kind: type) -> Iterator[str]:
    """Yield the methods besides ``forward`` with which an embedding's class looks up rows."""
    from torch import nn

    if not issubclass(kind, nn.Embedding):
        return
    for name, method in vars(kind).items():
        runs = isfunction(method) and name != "forward" and not name.startswith(_NOT_FORWARD)
        if runs and {"super", "forward"} <= set(method.__code__.co_names):
            yield name


def _calls(name: str, method: str, text: str) -> bool:
    """Say whether a source calls that method of the attribute ``name``."""
    return re.search(rf"\.{re.escape(name)}\.{re.escape(method)}\(", text) is not None


def _mentions(name: str, text: str) -> bool:
    """Say whether a source has the name's weight outside a quoted key (``"model.embed.weight"``)."""
    if name not in text or ".weight" not in text:
        return False
    start = r"""(?:(?<=[\])]\.)|(?<!["'\w.])(?:\w+\.)*)"""
    return re.search(rf"{start}{re.escape(name)}(?:\[[^\]]*\])?\.weight\b", text) is not None


@cache
def _source(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return Path(file).read_text(encoding="utf-8") if file else ""
    except (OSError, ValueError):
        return ""


@cache
def _read_in(module: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return, for each class of a Python module, the attributes of which it reads ``.weight``."""
    try:
        tree = ast.parse(_source(module))
    except SyntaxError:
        return ()
    return tuple((node.name, frozenset(_reads(node))) for node in tree.body if isinstance(node, ast.ClassDef))


def _reads(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name.startswith(_NOT_FORWARD):
            continue
        if isinstance(child, ast.Attribute) and child.attr in _HARMLESS and _owner(child.value):
            continue
        if name := _owner(child):
            yield name
        yield from _reads(child)


def _owner(node: ast.AST) -> str | None:
    """Return ``name`` of an expression ``name.weight`` or ``name[...].weight`` that is read."""
    if not isinstance(node, ast.Attribute) or node.attr != "weight" or not isinstance(node.ctx, ast.Load):
        return None
    owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
    if isinstance(owner, ast.Attribute):
        return owner.attr
    return owner.id if isinstance(owner, ast.Name) else None
