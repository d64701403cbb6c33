"""Lists, dictionaries and objects of settings: what comprehensions, copies and merges of them hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fsdptool.scripts.interpreter import Interpreter
from fsdptool.scripts.names import ARGUMENTS
from fsdptool.scripts.state import absent, is_there, joined
from fsdptool.scripts.values import Class, Const, Items, Library, Table, Thing, Value, is_key, made_by

_MOST_ITEMS = 64
"""Items that a comprehension is followed for one by one."""
COPIES = (
    *("builtins.dict", "builtins.vars", "copy", "deepcopy", "dataclasses.asdict"),
    *("omegaconf.OmegaConf.to_container", "omegaconf.OmegaConf.to_object"),
)
"""Functions that return a dictionary, or what an object holds, anew."""
_DUMPS = ("copy", "to_dict", "model_dump", "dict", "_asdict", "toDict")
"""Methods that do so."""
_WITHOUT_FIELDS = ("BaseModel", "BaseSettings", "ABC", "Generic", "NamedTuple", "TypedDict", "object", "Enum")
"""Classes of libraries that have no fields of settings."""


class Containers(Interpreter):
    """Follows a script through the dictionaries that it keeps settings in."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self._listed: dict[int, tuple[Value, int, int]] = {}

    def fields(self, made: Class) -> Iterator[tuple[str, ast.AST]]:
        """Yield the fields of a class and of those that it inherits from, the first ones first."""
        found: dict[str, ast.AST] = {}
        for owner in reversed(list(made.line())):
            for item in owner.node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    found[item.target.id] = item
        yield from found.items()

    def table_of(self, value: Value | None, node: ast.AST) -> Table | None:
        """Return what a dictionary or an object holds, as a new dictionary; None where that is open."""
        if isinstance(value, Table):
            return _shallow(value)
        if not isinstance(value, Thing) or (value.kind != "arguments" and value.owner is None):
            return None
        if value.owner is not None and value.owner.library_bases and value.kind == "parameter":
            return None
        names = {str(name): None for name in value.parts if isinstance(name, str)}
        if value.owner is not None:
            names |= {name: None for name, _ in self.fields(value.owner)}
            names = {name: None for name in names if value.owner.lookup(name) is None}
        held: dict[object, Value] = {name: self.attribute(value, name, node) for name in names}
        bases = value.owner.library_bases if value.owner is not None else ()
        whole = all(base.rpartition(".")[2] in _WITHOUT_FIELDS for base in bases)
        return Table(held, dict.fromkeys(names, node), whole)

    def _items_of_object(self, value: Value, node: ast.AST) -> Table | None:
        """Return ``vars`` of an object: what is stored in it is stored in the object."""
        made = self.table_of(value, node)
        if made is not None and isinstance(value, Thing) and all(isinstance(key, str) for key in value.parts):
            for name, item in made.items.items():
                if name not in value.parts:
                    value.parts[name] = item
            if value.parts.keys() == made.items.keys():
                made.items = value.parts
        return made

    def of_class(self, made: Class, name: str) -> Value | None:
        """Return what the body of a class assigns to a name, or None."""
        del made, name
        return None

    def store_attribute(self, whole: Thing, name: object, value: Value, node: ast.AST) -> None:
        """Keep an attribute of an object of settings, which holds another value where this is not done."""
        owner, held = whole.owner, whole.parts
        taken = whole.kind in ARGUMENTS
        plain = whole.kind == "arguments" or (owner is not None and not owner.library_bases)
        if name == "[]" and whole.kind == "module":
            for key, item in list(held.items()):
                if isinstance(item, Const):
                    self.store(held, key, joined((item, absent(node))))
            return
        if name == "[]" and (taken or plain):
            names = {key for key in held if isinstance(key, str) and key != "[]"}
            names |= {key for key, _ in self.fields(owner)} if owner is not None else set()
            for key in sorted(names):
                self.count()
                value = self.attribute(whole, key, node)
                if is_there(value):
                    self.store(held, key, joined((value, absent(node))))
        elif isinstance(name, str) and name not in held:
            found = self.of_class(owner, name) if owner is not None and not taken else None
            if found is not None or taken:
                held[name] = found or absent(node)
        super().store_attribute(whole, name, value, node)

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        made = self._items(node)
        self._listed[id(made)] = made, len(self.guards), self.repeated
        return made

    def _grown(self, made: Items) -> None:
        """Note that a list gets further items: in a branch or a loop, perhaps none, and perhaps more."""
        _, guards, repeated = self._listed.get(id(made), (made, 0, 0))
        made.whole = made.whole and len(self.guards) <= guards and self.repeated <= repeated

    def is_empty(self, whole: Value) -> bool:
        """Say whether a loop certainly takes nothing from a value: the items of an empty dictionary."""
        made = whole.sources[0] if isinstance(whole, Items) and whole.sources and not whole.values else whole
        return isinstance(made, Table) and made.whole and not made.items

    def _library(
        self,
        function: Library,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        places: Mapping[str, ast.AST],
        partly: bool,
        node: ast.AST,
    ) -> Value:
        made = super()._library(function, args, keywords, places, partly, node)
        if isinstance(made, Thing) and made.kind in ARGUMENTS:
            made.parts.update(keywords)  # which a branch may replace
        elif isinstance(made, Table) and partly:  # ``dict(known, **unknown)``
            made.whole = False
        return made

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        """Return an attribute of a value."""
        if name == "__dict__" and (held := self._items_of_object(value, node)) is not None:
            return held
        return super().attribute(value, name, node)

    def copied(
        self, name: str, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.AST
    ) -> Value | None:
        """Return what a function yields that copies a dictionary or an object, or None."""
        first = args[0] if args else None
        if name not in COPIES or first is None:
            return None
        if name in ("copy", "deepcopy"):
            return self._copy(first, {}, deep=name == "deepcopy")
        if name == "builtins.vars":
            return self._items_of_object(first, node)
        made = self.table_of(first, node)
        if made is not None and name != "builtins.dict":
            return self._inside(made, {})
        if made is not None and name == "builtins.dict":
            made.items.update(keywords.items())
            made.nodes |= dict.fromkeys(keywords, node)
        return made

    def _copy(self, value: Value, copies: dict[int, Value], *, deep: bool) -> Value | None:
        """Return a list, a dictionary or an object of settings anew; None: what else it is, is not copied."""
        self.count()
        made: Value | None = None
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, Const):
            return value
        if isinstance(value, Items):
            made = Items(list(value.values), value.whole, sources=value.sources, tags=value.tags)
        elif isinstance(value, Table):
            made = _shallow(value)
        elif (thing := made_by(value, "object", "arguments")) is not None:
            if thing.owner is not None and thing.owner.library_bases:  # a module
                return None
            made = replace(thing, parts=dict(thing.parts))
        if made is None or not deep:
            return made
        copies[id(value)] = made
        return self._inside(made, copies)

    def _inside(self, made: Value, copies: dict[int, Value]) -> Value:
        """Copy what a list, a dictionary or an object holds that is new itself."""
        if isinstance(made, Items):
            made.values = [self._copy(item, copies, deep=True) or item for item in made.values]
        held = made.items if isinstance(made, Table) else made.parts if isinstance(made, Thing) else {}
        for key, item in held.items():
            held[key] = self._copy(item, copies, deep=True) or item
        return made

    def _result(
        self, receiver: Value, name: str, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.Call
    ) -> Value:
        if isinstance(receiver, Items) and name in ("append", "add", "extend", "insert", "remove", "pop"):
            self._grown(receiver)
        if name in _DUMPS and not args and (held := self.table_of(receiver, node)) is not None:
            return held if name in ("copy", "dict") else self._inside(held, {})
        if isinstance(receiver, Table) and receiver.whole and name in ("keys", "values"):
            whole: list[Value] = [Const(key) for key in receiver.items]
            return Items(list(receiver.items.values()) if name == "values" else whole, sources=(receiver,))
        return super()._result(receiver, name, args, keywords, node)

    def _binop(self, node: ast.BinOp) -> Value:
        made = super()._binop(node)
        if isinstance(node.op, ast.BitOr) and isinstance(made, Thing) and len(made.args) == 2:
            left, right = made.args
            if isinstance(left, Table) and isinstance(right, Table):
                return Table(left.items | right.items, left.nodes | right.nodes, left.whole and right.whole)
        return made

    def items_of(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, iterable: Value
    ) -> Value | None:
        """Return the list or dictionary of a comprehension over known items."""
        items = iterable.values if isinstance(iterable, Items) and iterable.whole else []
        if isinstance(iterable, Table) and iterable.whole:
            items = [Const(key) for key in iterable.items]
        if isinstance(node, ast.GeneratorExp) or not 0 < len(items) <= _MOST_ITEMS:
            return None
        made: list[Value] = []
        table = Table({}, {})
        for item in items:
            self.assign(node.generators[0].target, item)
            known = [self.truth(self.value(test)) for test in node.generators[0].ifs]
            if False in known:
                continue
            if not isinstance(node, ast.DictComp):
                if None in known:
                    return None
                made.append(self.value(node.elt))
                continue
            key, value = self.value(node.key), self.value(node.value)
            if not is_key(key):
                return None
            unsure = Thing("unknown", node=node) if None in known else value
            table.items[key.value], table.nodes[key.value] = joined((value, unsure)), node
        return table if isinstance(node, ast.DictComp) else Items(made, sources=tuple(made))


def _shallow(table: Table) -> Table:
    return Table(dict(table.items), dict(table.nodes), table.whole, sources=table.sources)
