"""What rules ask about a script: which objects are sharded, by which FSDP, and what happened to them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsdptool.scripts.calls import WRAPPERS
from fsdptool.scripts.interpreter import Path
from fsdptool.scripts.names import KNOWN, library, short
from fsdptool.scripts.values import (
    Choice,
    Class,
    Event,
    Items,
    Library,
    Thing,
    Value,
    flat,
    made_by,
    origins,
    precedes,
)

FSDP1 = "FullyShardedDataParallel"
_PASSES = WRAPPERS - {FSDP1, "DistributedDataParallel"}
HARMLESS = frozenset({
    "parameters", "named_parameters", "modules", "named_modules", "children", "named_children", "buffers",
    "named_buffers", "state_dict", "train", "eval", "to", "cuda", "cpu", "to_empty", "requires_grad_",
    "zero_grad",
    "set_requires_gradient_sync", "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch",
    "reshard",
    "unshard", "no_sync", "half", "bfloat16", "float", "compile", "set_is_last_backward", "get_submodule",
    "backward",
    "gradient_checkpointing_enable", "enable_input_require_grads", "generate", "save_pretrained", "numel",
    "clip_grad_norm_", "__repr__", "append", "items", "keys", "values", "print_trainable_parameters",
    "forward",
})  # fmt: skip
"""Methods that neither shard a module nor fill its weights."""


@dataclass
class Facts:
    """A way through a script, as rules see it.

    Attributes:
        path: The way.
        versions: Versions of libraries, by distribution.
        cells: For each line of a notebook's code its cell, its line in the cell and that in the file; empty
            for a script.
    """

    path: Path
    versions: Mapping[str, str]
    cells: Sequence[tuple[int, int, int | None]] = ()
    _memo: dict[tuple[int, int], int | None] = field(default_factory=dict)

    @property
    def events(self) -> tuple[Event, ...]:
        """Every event, in its order."""
        return self.path.events

    def place(self, node: ast.AST | None) -> str:
        """Return the line of a node, as a reader of the script or of the notebook finds it."""
        line: int = getattr(node, "lineno", 1)
        if not self.cells:
            return f"line {line}"
        cell, own, _ = self.cells[line - 1]
        return f"line {own} of cell {cell}"

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], list[Event]]:
        found: dict[tuple[str, str], list[Event]] = {}
        for event in self.events:
            found.setdefault((event.kind, event.name), []).append(event)
        return found

    def calls(self, *names: str) -> Iterator[Event]:
        """Yield calls of libraries' functions, in their order."""
        yield from self._named("call", names)

    def methods(self, *names: str) -> Iterator[Event]:
        """Yield calls of methods, in their order."""
        yield from self._named("method", names)

    def of_kind(self, kind: str) -> Iterator[Event]:
        """Yield the events of a kind, in their order."""
        return (event for event in self.events if event.kind == kind)

    def _named(self, kind: str, names: tuple[str, ...]) -> Iterator[Event]:
        if len(names) == 1:
            return iter(self._by_name.get((kind, names[0]), ()))
        found = [event for name in names for event in self._by_name.get((kind, name), ())]
        return iter(sorted(found, key=lambda event: event.order))

    @cached_property
    def optimizers(self) -> tuple[Event, ...]:
        """Constructions of optimizers."""
        return tuple(event for event in self.of_kind("call") if event.name.startswith("optim."))

    @cached_property
    def shardings(self) -> tuple[tuple[Event, Thing], ...]:
        """Every call of ``fully_shard`` with each module that it shards."""
        found: list[tuple[Event, Thing]] = []
        for event in self.calls("fully_shard"):
            target = event.argument or event.get("module")
            items = target.values if isinstance(target, Items) else [target]
            found.extend((event, item) for item in items if isinstance(item, Thing))
        return tuple(found)

    @cached_property
    def wrappers(self) -> tuple[tuple[Event, Thing], ...]:
        """Every ``FullyShardedDataParallel`` with the module that it wraps, that is not ``NO_SHARD``."""
        found: list[tuple[Event, Thing]] = []
        for event in self.calls(FSDP1):
            inner = event.argument or event.get("module")
            if isinstance(inner, Thing) and _shards(event.keywords.get("sharding_strategy")):
                found.append((event, inner))
        return tuple(found)

    @cached_property
    def uses_fsdp(self) -> bool:
        """Whether something is sharded with torch's own calls."""
        return bool(self.shardings or self.wrappers)

    def generation(self, value: Value | None, at: Event, depth: int = 0) -> int | None:
        """Return 1 or 2 if a value is certainly sharded by that FSDP when an event happens, else None."""
        if depth > 8:
            return None
        if isinstance(value, Choice):
            found = {self.generation(option, at, depth + 1) for option in value.options}
            return found.pop() if len(found) == 1 else None
        if not isinstance(value, Thing):
            return None
        if value.kind == FSDP1:
            return 1 if _shards(value.keywords.get("sharding_strategy")) else None
        if value.annotation == FSDP1:
            return 1
        if value.annotation in ("FSDPModule", "FSDP2"):
            return 2
        if any(item is value and precedes(event, at) for event, item in self.shardings):
            return 2
        if value.kind in _PASSES:
            return self.generation(value.inner, at, depth + 1)
        return None

    def is_sharded_later(self, value: Thing, after: Event) -> Event | None:
        """Return the first sharding of a module after an event that certainly happened before it."""
        return next(
            (event for event, item in self.shardings if item is value and precedes(after, event)), None
        )

    def parameters_of(self, value: Value | None) -> list[Thing]:
        """Return the modules whose parameters a value holds."""
        return [
            item.parent
            for item in origins(value)
            if isinstance(item, Thing)
            and item.kind in ("parameters", "named_parameters")
            and item.parent is not None
        ]

    def module_of(self, value: Value | None) -> Thing | None:
        """Return the one module whose parameters a value is, or None."""
        direct = made_by(value, "parameters", "named_parameters")
        if direct is not None:
            return direct.parent
        found = {id(item): item for item in self.parameters_of(value)}
        return next(iter(found.values())) if len(found) == 1 else None

    @cached_property
    def _given_away(self) -> tuple[tuple[Event, frozenset[int]], ...]:
        """Calls of functions that are not known, with what they were given."""
        found: list[tuple[Event, frozenset[int]]] = []
        for event in self.events:
            if event.kind == "call":
                maker = event.result
                known = isinstance(maker, Thing) and not maker.outside
                unknown = not known and not (event.name.split(".")[0] in KNOWN or "." not in event.name)
                unknown = unknown or (isinstance(maker, Thing) and maker.outside)
            elif event.kind == "use":
                unknown = not _is_module(event.target)
            else:
                unknown = event.kind == "method" and isinstance(event.target, Thing) and event.target.outside
            if unknown:
                given = {
                    id(item) for value in (*event.args, *event.keywords.values()) for item in flat(value)
                }
                found.append((event, frozenset(given)))
        return tuple(found)

    def is_given_away(self, value: Thing) -> bool:
        """Whether an unknown function was given a module, something that it is a part of, or a part."""
        wanted = {id(item) for item in above(value)}
        for event, given in self._given_away:
            if given & wanted:
                return True
            for argument in (*event.args, *event.keywords.values()):
                if isinstance(argument, Thing) and any(item is value for item in above(argument)):
                    return True
        return False

    def parts_of(self, value: Thing) -> Iterator[Event]:
        """Yield what happens to a module or a part of it: methods, and calls that are given it."""
        for event in self.events:
            involved = [event.target, *event.args, *event.keywords.values()]
            if any(belongs(item, value) for given in involved for item in flat(given)):
                yield event

    def class_of(self, value: Thing) -> Class | None:
        """Return the class of a module: its own, or the only one of the script with the attributes it has."""
        base = unwrapped(value)
        if base.owner is not None:
            return base.owner
        seen = {name for name in base.seen if name not in HARMLESS and not name.startswith("__")}
        if base.kind not in ("parameter",) or not seen:
            return None
        fitting = [
            made for made in self.path.classes if is_module_class(made) and seen <= attributes_of(made)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def imports(self, *libraries: str) -> bool:
        """Whether the script imports one of these."""
        return any(library(event.name) in libraries for event in self.of_kind("import"))

    def mentions(self, *names: str) -> bool:
        """Whether a name or an attribute occurs anywhere in the script."""
        return not self.path.words.isdisjoint(names)

    def option_of(self, value: Value | None, name: str) -> Value | None:
        """Return an argument that a configuration object was made with."""
        return value.keywords.get(name) if isinstance(value, Thing) else None


def _shards(strategy: Value | None) -> bool:
    return not (isinstance(strategy, Library) and strategy.name.endswith("NO_SHARD")) and not isinstance(
        strategy, Choice
    )


def above(value: Value) -> Iterator[Thing]:
    """Yield an object, what it wraps, and everything that it is a part of."""
    item: Value | None = value
    for _ in range(20):
        if not isinstance(item, Thing):
            return
        yield item
        item = item.inner if item.kind in (FSDP1, "DistributedDataParallel", *_PASSES) else item.parent


def belongs(value: Value | None, whole: Thing) -> bool:
    """Say whether a value is an object or a part of it."""
    return isinstance(value, Thing) and any(item is whole for item in above(value))


def is_inside(value: Thing, whole: Thing) -> bool:
    """Say whether an object is a part of another one, and not the same."""
    return value is not whole and belongs(value, whole)


def unwrapped(value: Thing) -> Thing:
    """Return the module inside of wrappers."""
    while value.kind in (FSDP1, "DistributedDataParallel", *_PASSES) and isinstance(value.inner, Thing):
        value = value.inner
    return value


def _is_module(value: Value | None) -> bool:
    if isinstance(value, Choice):
        return all(_is_module(option) for option in value.options)
    if not isinstance(value, Thing):
        return False
    return value.kind not in ("unknown", "result") or value.parent is not None


def is_module_class(made: Class) -> bool:
    """Say whether a class of the script is a module of torch."""
    return any(
        short(name).rpartition(".")[2] in ("Module", "PreTrainedModel", "LightningModule")
        for name in made.library_bases
    )


def attributes_of(made: Class) -> frozenset[str]:
    """Return the attributes and methods that a class of the script gives its objects."""
    names: set[str] = set()
    for owner in made.line():
        names.update(owner.methods)
        names.update(name for name, _ in stores_of(owner))
    return frozenset(names)


def stores_of(made: Class) -> Iterator[tuple[str, ast.expr]]:
    """Yield each attribute that methods of a class set, with the expression."""
    for method in made.methods.values():
        for node in ast.walk(method):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from _pairs(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                yield from _pairs(node.target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        yield target.attr, value
    elif (
        isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
    ):
        for one, two in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, two)


def called_name(node: ast.AST | None) -> str:
    """Return the last name of what an expression calls, or an empty text."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


CONTAINERS = ("ModuleList", "ModuleDict")


def containers_of(made: Class) -> frozenset[str]:
    """Return the attributes of a class that are lists or dictionaries of modules."""
    return frozenset(
        name for owner in made.line() for name, value in stores_of(owner) if called_name(value) in CONTAINERS
    )


def text(node: ast.AST, limit: int = 48) -> str:
    """Return an expression as text for a message."""
    words = ast.unparse(node)
    return words if len(words) <= limit else words[: limit - 1] + "…"


def label(value: Value | None) -> str:
    """Return what a message calls an object."""
    if not isinstance(value, Thing):
        return "the module"
    if value.kind in ("attribute", "item") and value.parent is not None:
        whole = label(value.parent)
        return f"{whole}{value.label}" if value.kind == "item" else f"{whole}.{value.label}"
    if value.kind == "parameter":
        return value.label
    return "the model"
