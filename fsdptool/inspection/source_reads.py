"""Which modules run where FSDP2's hooks do not, by the source of the model's classes. Holds no tensor.

A unit is gathered when its module is called, and once more before its backward. A model may bypass both: it
reads a weight without calling its module, calls ``forward`` itself, or runs blocks inside an autograd
function of its own. The source of the classes that the model is made of is searched, except for functions
that run before training.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from inspect import getsource, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

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


# DeBERTa takes ``self.rel_embeddings.weight`` instead of a call: as a unit of its own it would still be
# sharded there, while the root's parameters are gathered. ProphetNet calls
# ``self.position_embeddings._forward``, which runs no hook either. Perceiver hands its table by keyword to
# another module, which reads the weight.
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
        read = any(
            _reads_weight(module, alias, names) for module in modules for alias in _aliases(name, module)
        )
        if read or any(_calls(name, method, _source(module)) for method in methods for module in modules):
            read_paths.append(path)
    return tuple(read_paths)


_OWN_WEIGHT = re.compile(rf"\bself\.weight\b(?!\.(?:{'|'.join(sorted(_HARMLESS))})\b)")


def reads_own_weight(kind: type) -> bool:
    """Say whether an embedding's class computes with its table: Ovis 2 multiplies by it.

    The backward of a lookup needs no table, that of a product does.
    """
    from torch import nn

    forward: Any = getattr(kind, "forward", None)
    if forward is nn.Embedding.forward:
        return False
    try:
        return _OWN_WEIGHT.search(getsource(forward)) is not None
    except (OSError, TypeError):
        return False


def _reads_weight(module: str, name: str, owners: Collection[str]) -> bool:
    """Say whether a class among ``owners`` in a Python module reads ``name.weight``."""
    # Most sources do not contain the name, and parsing one takes far longer than searching it.
    if not _mentions(name, module):
        return False
    return any(name in reads for owner, reads in _read_in(module) if owner in owners)


@cache
def _aliases(name: str, module: str) -> tuple[str, ...]:
    """Return the name of an embedding and the keywords by which a Python module hands it on."""
    return (name, *(before[1] for before in _before(name, r"\.", r"\s*[,)]", _KEYWORD, module)))


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


_KEYWORD = re.compile(r"\b(\w+)=(?:\w+\.)*\w+\Z")
_OWNERS = re.compile(r"""(?:[\])]\.|(?<!["'\w.])(?:\w+\.)*)\Z""")


def _before(
    name: str, begin: str, end: str, beginning: re.Pattern[str], module: str
) -> Iterator[re.Match[str]]:
    """Yield what stands, on the same line, before each place of a name in a Python module.

    The name is found first: a pattern that begins with any word is tried at every character of the source.
    """
    text = _source(module)
    if name not in text:  # as in most
        return
    for found in re.finditer(f"{begin}{re.escape(name)}{end}", text):
        line = text.rfind("\n", 0, found.start()) + 1
        if before := beginning.search(text[line : found.start()]):
            yield before


@cache
def _mentions(name: str, module: str) -> bool:
    """Say whether a Python module has the name's weight outside a quoted key (``"model.embed.weight"``)."""
    return any(True for _ in _before(name, r"(?<!\w)", r"(?:\[[^\]]*\])?\.weight\b", _OWNERS, module))


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


_DIRECT = re.compile(r"\b[a-z_]\w*(?:\[[^\]]*\])?\.forward\(")
_INSIDE = re.compile(r"\.apply\([^()]*\bself\.\w+")


def hookless(model: nn.Module, paths: Mapping[int, str]) -> tuple[str, ...]:
    """Return the paths of modules with parameters whose forward or backward runs without FSDP2's hooks.

    Two cases are known from transformers 5.23. SqueezeBERT calls ``layer.forward(...)``, which runs no hook.
    Reformer hands ``self.layers`` to an autograd function of its own: the function's forward runs without
    gradients, so FSDP2 registers nothing that would gather a block before its backward.

    Args:
        model: The model.
        paths: The first path of each module, by identity.
    """
    found: dict[str, None] = {}
    for module in model.modules():
        kind: Any = type(module)
        for name in _hookless_children(kind):
            for child in _listed(getattr(module, name, None)):
                if any(True for _ in child.parameters()):
                    found[paths[id(child)]] = None
    return tuple(found)


def _listed(value: object) -> Iterator[nn.Module]:
    from torch import nn

    if isinstance(value, nn.ModuleList | nn.ModuleDict):
        yield from value.children()
    elif isinstance(value, nn.Module):
        yield value


@cache
def _hookless_children(kind: type) -> frozenset[str]:
    """Return the attributes of a class whose modules it runs without their hooks."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            continue
        names.update(_hookless_in(base.__module__).get(base.__name__, ()))
    return frozenset(names)


@cache
def _hookless_in(module: str) -> Mapping[str, frozenset[str]]:
    text = _source(module)
    if not _DIRECT.search(text) and not ("Function)" in text and _INSIDE.search(text)):
        return {}
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = {node.name for node in classes if any("Function" in ast.unparse(base) for base in node.bases)}
    return {node.name: frozenset(_run_directly(node, functions)) for node in classes}


def _run_directly(node: ast.ClassDef, functions: Collection[str]) -> Iterator[str]:
    """Yield the attributes of ``self`` that a class runs by ``forward`` or inside an autograd function."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith(_NOT_FORWARD):
            continue
        items = {
            name.id: attribute
            for loop in ast.walk(method)
            if isinstance(loop, ast.For)
            for name in ast.walk(loop.target)
            if isinstance(name, ast.Name) and (attribute := _attribute_of_self(loop.iter))
        }
        for call in ast.walk(method):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            owner = call.func.value
            if call.func.attr == "forward":
                own = items.get(owner.id) if isinstance(owner, ast.Name) else _attribute_of_self(owner)
                if own:
                    yield own
            elif call.func.attr == "apply" and isinstance(owner, ast.Name) and owner.id in functions:
                handed = (item for item in call.args if isinstance(item, ast.Attribute))
                yield from (name for item in handed if (name := _attribute_of_self(item)) == item.attr)


def _attribute_of_self(node: ast.AST) -> str | None:
    """Return the first attribute ``self.name`` in an expression."""
    for child in ast.walk(node):
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
        ):
            return child.attr
    return None
