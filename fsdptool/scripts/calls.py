"""Attributes, items and calls: functions of a script are entered, those of libraries are known or unknown."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from fsdptool.scripts.names import KNOWN, UNSLOTH, library, short
from fsdptool.scripts.state import ScriptState, joined
from fsdptool.scripts.values import (
    Choice,
    Class,
    Const,
    Function,
    Items,
    Library,
    Partial,
    Scope,
    Table,
    Thing,
    Value,
    flat,
    is_key,
    made_by,
)

RANKS = frozenset(
    {"rank", "local_rank", "global_rank", "world_rank", "process_index", "local_process_index", "RANK"}
)
_MAIN = frozenset({
    "is_main_process", "is_local_main_process", "is_world_process_zero", "is_local_process_zero", "is_main",
    "is_master", "is_rank_zero", "is_rank_0", "is_rank0", "master_process", "main_process", "is_main_rank",
})  # fmt: skip
OF_ENVIRONMENT = {"RANK": "rank", "LOCAL_RANK": "rank", "SLURM_PROCID": "rank", "WORLD_SIZE": "world"}
"""Variables of a launcher, and what they hold."""
ITSELF = frozenset({
    "to", "cuda", "cpu", "train", "eval", "half", "bfloat16", "float", "double", "requires_grad_", "to_empty",
    "apply", "type", "share_memory", "get_base_model",
})  # fmt: skip
"""Methods of a module that return it."""
PARTS = frozenset({
    "parameters", "named_parameters", "modules", "named_modules", "children", "named_children", "buffers",
    "named_buffers", "state_dict",
})  # fmt: skip
WRAPPERS = frozenset({
    "FullyShardedDataParallel", "DistributedDataParallel", "get_peft_model", "PeftModel.from_pretrained",
    "checkpoint_wrapper", "prepare_model_for_kbit_training", "prepare_model_for_int8_training",
    *(f"{name}.get_peft_model" for name in UNSLOTH),
})  # fmt: skip
_THROUGH = frozenset(
    f"builtins.{name}"
    for name in ("list", "tuple", "set", "sorted", "reversed", "iter", "filter", "int", "str", "next")
)
_REMOTE = ("remote", "local", "spawn", "remote_gen")
"""Methods by which Modal calls a function elsewhere."""
_DEPTH = 10


class Calls(ScriptState, ABC):
    """What follows attributes and calls."""

    @abstractmethod
    def value(self, node: ast.AST | None) -> Value:
        """Return what an expression stands for."""

    @abstractmethod
    def assign(self, target: ast.AST, value: Value) -> None:
        """Bind a target to a value."""

    @abstractmethod
    def run_function(self, body: Sequence[ast.stmt]) -> Value:
        """Run the body of a function in the current scope; return what it returns."""

    # Attributes and items

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        """Return an attribute of a value."""
        if isinstance(value, Library):
            return Library(f"{value.name}.{name}")
        if isinstance(value, Class):
            found = value.lookup(name)
            if found is None:
                return Thing("unknown", label=name, node=node)
            return Function(
                found[1], found[0].scope, value if _is_decorated(found[1], "classmethod") else None
            )
        if isinstance(value, Choice):
            chosen = value.options
            if name == "module":  # of ``model.module if ddp else model``
                chosen = tuple(item for item in chosen if made_by(item, *WRAPPERS)) or chosen
            options = [self.attribute(option, name, node) for option in chosen]
            return joined(options, value.by_rank)
        if not isinstance(value, Thing):
            return Thing("unknown", label=name, node=node, sources=(value,), tags=_named(name))
        value.seen.add(name)
        if name == "module":
            self.emit("attribute", name, node, target=value)
        if value.kind in WRAPPERS and isinstance(value.inner, Thing) and name not in value.parts:
            return value.inner if name == "module" else self.attribute(value.inner, name, node)
        if name in value.parts:
            return value.parts[name]
        found = value.owner.lookup(name) if value.owner is not None else None
        if found is not None:
            function = Function(found[1], found[0].scope, value)
            if _is_property(found[1]):
                return self.enter(function, (), {}, node)
            return function
        made = Thing(
            "attribute", label=name, node=node, parent=value, tags=_named(name), outside=value.outside
        )
        value.parts[name] = made
        return made

    def item(self, whole: Value, index: Value, node: ast.AST) -> Value:
        """Return an item of a value."""
        if isinstance(whole, Table) and is_key(index):
            return whole.items.get(index.value) or Thing("unknown", node=node, sources=(whole,))
        if isinstance(whole, Items) and isinstance(index, Const) and isinstance(index.value, int):
            if -len(whole.values) <= index.value < len(whole.values):
                return whole.values[index.value]
            return Thing("unknown", node=node, sources=(whole,))
        if isinstance(whole, Library):
            return self._environment(index, node) if short(whole.name) == "os.environ" else whole
        if not isinstance(whole, Thing):
            return Thing("unknown", node=node, sources=(whole, index), tags=_held(whole, index))
        key = ("item", index.value) if is_key(index) else None
        if key is not None and key in whole.parts:
            return whole.parts[key]
        label = f"[{index.value!r}]" if isinstance(index, Const) else "[?]"
        if made_by(index, "slice"):
            label = "[:]"
        tags = _named(str(index.value)) if isinstance(index, Const) else frozenset[str]()
        made = Thing(
            "item", label=label, node=node, parent=whole, sources=(index,), tags=_held(whole, index) | tags,
            outside=whole.outside,
        )  # fmt: skip
        if key is not None:
            whole.parts[key] = made
        return made

    def element(self, whole: Value, node: ast.AST) -> Value:
        """Return what a loop over a value takes from it."""
        if isinstance(whole, Items):
            return joined(whole.values) if whole.values else Thing("unknown", node=node)
        if not isinstance(whole, Thing):
            return Thing("unknown", node=node, sources=(whole,), tags=_held(whole))
        if whole.kind == "comprehension" and whole.inner is not None:
            return whole.inner
        if whole.kind == "builtins.enumerate":
            return Items([Thing("index", node=node, parent=whole), self.element(whole.args[0], node)])
        if whole.kind == "builtins.zip":
            return Items([self.element(argument, node) for argument in whole.args])
        made = whole.parts.get("[]")
        if made is None:
            made = Thing(
                "item", label="[]", node=node, parent=whole, tags=_held(whole), outside=whole.outside
            )
            whole.parts["[]"] = made
        if whole.kind.startswith("named_") or whole.label == "items":
            return Items([Thing("name", node=node, parent=whole), made])
        return made

    # Calls

    def call_node(self, node: ast.Call) -> Value:
        """Return what a call yields."""
        receiver: Value | None = None
        if isinstance(node.func, ast.Attribute):
            receiver = self.value(node.func.value)
        function = self.value(node.func) if receiver is None else None
        args: list[Value] = []
        partly = False
        for argument in node.args:
            value = self.value(argument)
            if isinstance(argument, ast.Starred):
                if isinstance(value, Items):
                    args.extend(value.values)
                else:
                    partly = True
            else:
                args.append(value)
        keywords: dict[str, Value] = {}
        places: dict[str, ast.AST] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg], places[keyword.arg] = value, keyword
            elif isinstance(value, Table):
                partly = partly or not value.whole
                for key, item in value.items.items():
                    keywords[str(key)], places[str(key)] = item, value.nodes.get(key, node)
            else:
                partly = True
        if receiver is not None and isinstance(node.func, ast.Attribute):
            return self._method(receiver, node.func.attr, args, keywords, places, partly, node)
        assert function is not None
        return self.call(function, args, keywords, places, partly, node)

    def call(
        self,
        function: Value,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        places: Mapping[str, ast.AST],
        partly: bool,
        node: ast.AST,
    ) -> Value:
        """Return what a function yields for arguments."""
        if isinstance(function, Partial):
            merged = {**function.keywords, **keywords}
            return self.call(function.function, (*function.args, *args), merged, places, partly, node)
        if isinstance(function, Library):
            return self._library(function, args, keywords, places, partly, node)
        if isinstance(function, Function):
            return self.enter(function, args, keywords, node, partly)
        if isinstance(function, Class):
            return self._make(function, args, keywords, node, partly)
        if isinstance(function, Choice) and all(isinstance(option, Library) for option in function.options):
            names = {short(option.name) for option in function.options if isinstance(option, Library)}
            if len(names) == 1:
                return self.call(function.options[0], args, keywords, places, partly, node)
        sources = (function, *args, *keywords.values())
        result = Thing(
            "output", node=node, sources=sources, tags=_held(*sources), outside=isinstance(function, Choice)
        )
        self.emit(
            "use", "", node, target=function, args=args, keywords=keywords, partly=partly, result=result
        )
        return result

    def _method(
        self,
        receiver: Value,
        name: str,
        args: list[Value],
        keywords: dict[str, Value],
        places: dict[str, ast.AST],
        partly: bool,
        node: ast.Call,
    ) -> Value:
        if isinstance(receiver, Library | Class | Partial):
            if isinstance(receiver, Library) and short(receiver.name) == "os.environ":
                return self._environment_method(name, args, node)
            return self.call(self.attribute(receiver, name, node), args, keywords, places, partly, node)
        if isinstance(receiver, Function) and name in _REMOTE:
            return self.call(receiver, args, keywords, places, partly, node)
        if isinstance(receiver, Choice) and (single := _single(receiver)) is not None:
            receiver = single
        if isinstance(receiver, Thing):
            receiver.seen.add(name)
            own = receiver.parts.get(name)
            base = receiver
            while base.kind in WRAPPERS and isinstance(base.inner, Thing):
                base = base.inner
            found = base.owner.lookup(name) if base.owner is not None else None
            if found is not None:
                self._event(name, receiver, args, keywords, places, partly, node, None, kind="method")
                bound: Value | None = None if _is_decorated(found[1], "staticmethod") else base
                bound = base.owner if _is_decorated(found[1], "classmethod") else bound
                function = Function(found[1], found[0].scope, bound)
                return self.enter(function, args, keywords, node, partly)
            if isinstance(own, Function | Class | Partial | Library) or (
                own is not None and made_by(own, "attribute") is None
            ):
                return self.call(own, args, keywords, places, partly, node)
        result = self._result(receiver, name, args, keywords, node)
        if partly and isinstance(receiver, Table) and name == "update":
            self.unsure(receiver, node)
        self._event(name, receiver, args, keywords, places, partly, node, result, kind="method")
        return result

    def _event(
        self,
        name: str,
        receiver: Value,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        places: Mapping[str, ast.AST],
        partly: bool,
        node: ast.AST,
        result: Value | None,
        *,
        kind: str,
    ) -> None:
        self.emit(
            kind, name, node, target=receiver, args=args, keywords=keywords, places=places, partly=partly,
            result=result,
        )  # fmt: skip

    def _result(
        self, receiver: Value, name: str, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.Call
    ) -> Value:
        """Return what a method of something else than a script's own class yields."""
        if isinstance(receiver, Table):
            return self._of_table(receiver, name, args, keywords, node)
        if isinstance(receiver, Items) and name in ("append", "add", "extend"):
            several = args[0] if name == "extend" and args else None
            receiver.values.extend(several.values if isinstance(several, Items) else args)
            return Const(None)
        sources = (receiver, *args, *keywords.values())
        tags = _held(*sources) | _named(name)
        if isinstance(receiver, Const):
            if isinstance(receiver.value, str) and name == "format" and ":" in receiver.value:
                for value in args:
                    self.emit("format", "format", node, target=value)
            return Thing("text", node=node, sources=sources, tags=tags)
        if name in ITSELF and (isinstance(receiver, Choice) or _may_be_module(receiver)):
            return receiver
        if isinstance(receiver, Thing) and name in PARTS:
            return Thing(name, label=name, node=node, parent=receiver, args=tuple(args), sources=sources)
        if isinstance(receiver, Thing) and receiver.kind == "Accelerator" and name.startswith("prepare"):
            return args[0] if len(args) == 1 else Items(list(args))
        parent = receiver if isinstance(receiver, Thing) and name.startswith("get_") else None
        return Thing(
            "result", label=name, node=node, args=tuple(args), keywords=keywords, sources=sources, tags=tags,
            parent=parent, outside=isinstance(receiver, Thing) and receiver.outside, inner=receiver,
        )  # fmt: skip

    def _of_table(
        self,
        table: Table,
        name: str,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        node: ast.Call,
    ) -> Value:
        if name in ("get", "pop", "setdefault") and args and is_key(args[0]):
            found = table.items.get(args[0].value)
            if found is not None:
                if name == "pop":
                    self.drop_item(table, args[0].value)
                return found
            value = args[1] if len(args) > 1 and table.whole else Thing("unknown", node=node)
            if name == "setdefault":
                self.store_item(table, args[0].value, value, node)
            return value
        if name == "clear":
            for key in list(table.items):
                self.drop_item(table, key)
        elif name in ("pop", "popitem", "setdefault", "merge_with"):
            self.unsure(table, node)
        if name == "update" and all(isinstance(item, Table) and item.whole for item in args):
            added = [item for given in args if isinstance(given, Table) for item in given.items.items()]
            for key, value in (*added, *keywords.items()):
                self.store_item(table, key, value, node)
        elif name == "update":
            self.unsure(table, node)
        if name == "items" and table.whole:
            pairs: list[Value] = [Items([Const(key), item]) for key, item in table.items.items()]
            return Items(pairs, sources=(table,))
        return Thing("result", label=name, node=node, sources=(table,), inner=table)

    def enter(
        self,
        function: Function,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        node: ast.AST,
        partly: bool = False,
    ) -> Value:
        """Run a function of the script for a call; return what it returns."""
        self.called.add(function.node)
        if len(self.stack) >= _DEPTH or any(function.node is item for item in self._entered()):
            sources = (*args, *keywords.values())
            return Thing("unknown", node=node, sources=sources, outside=True, tags=_held(*sources))
        given = args if function.bound is None else (function.bound, *args)
        names = self._bound(function, given, keywords, partly)
        outer, loops, guards = self.scope, self.loops, len(self.guards)
        self.scope, self.loops = Scope(names, function.scope), list(self.loops)
        self.stack.append(node)
        self._functions.append(function.node)
        try:
            if isinstance(function.node, ast.Lambda):
                return self.value(function.node.body)
            return self.run_function(function.node.body)
        finally:
            self.scope, self.loops = outer, loops
            self.stack.pop()
            self._functions.pop()
            del self.guards[guards:]

    _functions: list[ast.AST]

    def _entered(self) -> list[ast.AST]:
        return self._functions

    def _bound(
        self, function: Function, args: Sequence[Value], keywords: Mapping[str, Value], partly: bool
    ) -> dict[str, Value]:
        """Return the names that a call of a function binds."""
        form = function.node.args
        positional = [*form.posonlyargs, *form.args]
        defaults: dict[str, ast.expr] = {}
        for argument, default in zip(reversed(positional), reversed(form.defaults), strict=False):
            defaults[argument.arg] = default
        for argument, given in zip(form.kwonlyargs, form.kw_defaults, strict=True):
            if given is not None:
                defaults[argument.arg] = given
        names: dict[str, Value] = {}
        for index, argument in enumerate((*positional, *form.kwonlyargs)):
            name = argument.arg
            if index < len(args) and index < len(positional):
                names[name] = args[index]
            elif name in keywords:
                names[name] = keywords[name]
            elif name in defaults and not partly:
                names[name] = self._value_in(function.scope, defaults[name])
            else:
                names[name] = self.parameter(argument)
        if form.vararg is not None:
            names[form.vararg.arg] = Items(list(args[len(positional) :]))
        if form.kwarg is not None:
            known = {argument.arg for argument in (*positional, *form.kwonlyargs)}
            rest: dict[object, Value] = {key: item for key, item in keywords.items() if key not in known}
            names[form.kwarg.arg] = Table(rest, {}, not partly)
        return names

    def _value_in(self, scope: Scope, node: ast.expr) -> Value:
        """Return what an expression stands for where a function is defined."""
        outer, self.scope = self.scope, scope
        try:
            return self.value(node)
        finally:
            self.scope = outer

    def parameter(self, argument: ast.arg) -> Thing:
        """Return what a parameter stands for when its value is not known."""
        made = Thing("parameter", label=argument.arg, node=argument, tags=_named(argument.arg))
        annotation = argument.annotation
        if isinstance(annotation, ast.Name | ast.Attribute):
            found = self.value(annotation)
            if isinstance(found, Class):
                made.owner = found
            elif isinstance(found, Library):
                made.annotation = short(found.name)
        return made

    def _make(
        self, made: Class, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.AST, partly: bool
    ) -> Value:
        """Return an object of a class of the script."""
        thing = Thing(
            "object", label=made.node.name, node=node, owner=made, args=tuple(args), keywords=keywords,
            tags=self.contextual(), sources=(*args, *keywords.values()),
        )  # fmt: skip
        self.called.add(made.node)
        self.emit("make", made.node.name, node, args=args, keywords=keywords, partly=partly, result=thing)
        found = made.lookup("__init__")
        if found is not None:
            self.enter(Function(found[1], found[0].scope, thing), args, keywords, node, partly)
        else:
            for name, value in keywords.items():
                self.store(thing.parts, name, value)
        return thing

    def contextual(self) -> frozenset[str]:
        """Return what ``with`` blocks say about objects that are made in them."""
        for context in self.contexts:
            if made_by(context, "init_empty_weights", "init_on_device") is not None:
                return frozenset({"meta"})
            device = made_by(context, "torch.device")
            if device is not None and any(
                isinstance(item, Const) and item.value == "meta" for item in device.args
            ):
                return frozenset({"meta"})
        return frozenset()

    def _library(
        self,
        function: Library,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        places: Mapping[str, ast.AST],
        partly: bool,
        node: ast.AST,
    ) -> Value:
        name = short(function.name)
        result = self._made(name, function, args, keywords, node)
        self.emit(
            "call", name, node, args=args, keywords=keywords, places=places, partly=partly, result=result
        )
        if name in (
            "torch.multiprocessing.spawn",
            "multiprocessing.spawn",
            "torch.multiprocessing.start_processes",
        ):
            self._spawn(args, keywords, node)
        elif name == "builtins.setattr" and len(args) == 3:
            self.set_attribute(args[0], args[1], args[2], node)
        return result

    def store_attribute(self, whole: Thing, name: object, value: Value, node: ast.AST) -> None:
        """Keep an attribute of an object; ``[]``: whichever it is."""
        del node
        self.store(whole.parts, name, value)

    def set_attribute(self, whole: Value, name: Value, value: Value, node: ast.AST) -> None:
        """Set an attribute whose name is a value."""
        if isinstance(whole, Thing):
            self.store_attribute(whole, name.value if is_key(name) else "[]", value, node)
        elif isinstance(whole, Table) and is_key(name):
            self.store_item(whole, name.value, value, node)
        elif isinstance(whole, Table):
            self.unsure(whole, node)

    def _spawn(self, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.AST) -> None:
        function = keywords.get("fn") or (args[0] if args else None)
        rest = keywords.get("args") or (args[1] if len(args) > 1 else None)
        if isinstance(function, Function):
            rank = Thing("rank", node=node, tags=frozenset({"rank"}))
            known = isinstance(rest, Items)
            self.enter(
                function, (rank, *(rest.values if isinstance(rest, Items) else ())), {}, node, not known
            )

    def _made(
        self,
        name: str,
        function: Library,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        node: ast.AST,
    ) -> Value:
        """Return what a function of a library yields."""
        first = args[0] if args else None
        if name in ("fully_shard", "torch.compile", "simple_fsdp") and first is not None:
            return first
        if name == "partial" and first is not None:
            return Partial(first, tuple(args[1:]), dict(keywords))
        if first is not None and (name in _THROUGH or name in ("tqdm.tqdm", "tqdm.auto.tqdm")):
            return first
        if name in ("dist.get_rank", "dist.get_node_local_rank"):
            return Thing("rank", node=node, tags=frozenset({"rank"}))
        if name == "dist.get_world_size":
            return Thing("world", node=node, tags=frozenset({"world"}))
        if name == "dist.is_initialized":
            return Thing("test", label="initialised", node=node, tags=frozenset({"initialised"}))
        if name in ("torch.cuda.is_available", "dist.is_available"):
            return Const(True)
        if name == "os.getenv" and first is not None:
            return self._environment(first, node)
        if name == "builtins.dict" and not args:
            nodes: dict[object, ast.AST] = {}
            items: dict[object, Value] = dict(keywords.items())
            return Table(items, nodes | dict.fromkeys(keywords, node))
        if name == "builtins.getattr" and len(args) > 1 and isinstance(args[1], Const):
            return self.attribute(args[0], str(args[1].value), node)
        if name == "builtins.getattr" and first is not None:
            return self.element(first, node)
        if name.rpartition(".")[2] in _MAIN:
            return Thing("test", label=name, node=node, tags=frozenset({"one"}))
        return self._object(name, function, args, keywords, node)

    def _object(
        self,
        name: str,
        function: Library,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        node: ast.AST,
    ) -> Value:
        first = args[0] if args else None
        inner = first or keywords.get("module") or keywords.get("model") if name in WRAPPERS else None
        if name == "FullyShardedDataParallel" and inner is None:
            inner = keywords.get("module")
        sources = (*args, *keywords.values())
        tags = _held(*sources) | self.contextual()
        if library(function.name) == "builtins":
            tags -= {"meta"}
        device = keywords.get("device")
        if isinstance(device, Const) and device.value == "meta":
            tags |= {"meta"}
        return Thing(
            name, label=function.name, node=node, args=tuple(args), keywords=keywords, sources=sources,
            tags=tags,
            inner=inner, outside=library(function.name) not in KNOWN,
        )  # fmt: skip

    def _environment(self, key: Value, node: ast.AST) -> Value:
        name = key.value if isinstance(key, Const) else None
        self.emit("environment read", str(name), node)
        tag = OF_ENVIRONMENT.get(str(name))
        return Thing("variable", label=str(name), node=node, tags=frozenset({tag} if tag else ()))

    def _environment_method(self, name: str, args: Sequence[Value], node: ast.Call) -> Value:
        if name in ("get", "pop") and args:
            return self._environment(args[0], node)
        if name == "setdefault" and args:
            return self._environment(args[0], node)
        if name == "update" and args and isinstance(args[0], Table):
            for key, value in args[0].items.items():
                self.emit("environment", str(key), node, args=(value,))
        return Thing("unknown", node=node)


def _single(value: Value) -> Thing | None:
    """Return the object that each of several values is, perhaps wrapped; None where they differ."""
    found: Thing | None = None
    for item in flat(value):
        if isinstance(item, Choice):
            continue
        while isinstance(item, Thing) and item.kind in WRAPPERS and isinstance(item.inner, Thing):
            item = item.inner
        if not isinstance(item, Thing) or item.owner is None or (found is not None and item is not found):
            return None
        found = item
    return found


def _held(*values: Value) -> frozenset[str]:
    """Return what something depends on that was made from values."""
    return frozenset().union(*(item.tags & {"rank", "world"} for value in values for item in flat(value)))


def _named(name: str) -> frozenset[str]:
    """Return what a name alone says."""
    if name in RANKS:
        return frozenset({"rank"})
    if name in ("world_size", "WORLD_SIZE", "num_processes"):
        return frozenset({"world"})
    return frozenset({"one"}) if name in _MAIN else frozenset()


def _may_be_module(value: Value) -> bool:
    """Say whether a value may be a module: tensors have methods of the same names."""
    if not isinstance(value, Thing) or value.kind in ("output", "binary", "result", "item", "index", "unary"):
        return (
            isinstance(value, Thing)
            and value.kind == "item"
            and value.parent is not None
            and (value.parent.kind in ("modules", "children", "named_modules", "attribute", "named_children"))
        )
    return True


def _is_property(node: ast.AST) -> bool:
    names = [item.id for item in getattr(node, "decorator_list", ()) if isinstance(item, ast.Name)]
    names += [item.attr for item in getattr(node, "decorator_list", ()) if isinstance(item, ast.Attribute)]
    return "property" in names or "cached_property" in names


def _is_decorated(node: ast.AST, name: str) -> bool:
    return any(isinstance(item, ast.Name) and item.id == name for item in getattr(node, "decorator_list", ()))
