"""A script as it runs when it is started with certain arguments: defaults count where nobody says otherwise.

The rules on scripts never use this: a default is not what certainly happens. A value that an argument decides
has an ``option`` among its sources, whose label says which.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdptool.scripts.calls import OF_ENVIRONMENT
from fsdptool.scripts.commands import Commands
from fsdptool.scripts.known_values import (
    BF16,
    LONGEST,
    asked_of,
    asks_for_bf16,
    compared,
    flags,
    folded,
    given_by,
    guessed,
    launched,
    of_text,
    typed,
)
from fsdptool.scripts.names import ARGUMENTS, LIGHTNING, library, short
from fsdptool.scripts.state import is_there
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
    constant,
    is_constant,
    made_by,
)

_RECORDS = (
    *("omegaconf.OmegaConf.create", "argparse.Namespace", "types.SimpleNamespace", "easydict.EasyDict"),
    *("ml_collections.ConfigDict", "addict.Dict", "munch.Munch", "box.Box", "transformers.utils.AttrDict"),
)
"""What makes an object of a dictionary, whose items are its attributes."""
_ON_GPU = "on a GPU with bfloat16"
_INSTALLED = ("is_peft_available", "is_accelerate_available", "is_bitsandbytes_available")
"""Functions of transformers that ask for libraries; what a script does with them is what it is for."""
_SWITCHES = {"get_peft_config": ("use_peft",), "get_quantization_config": ("load_in_4bit", "load_in_8bit")}
"""Arguments of ``ModelConfig`` without which TRL makes nothing (TRL 1.16 ``trainer/utils.py``)."""
OF_CLASSES = ("parse_args_into_dataclasses", "parse_args_and_config", "parse_yaml_file", "parse_json_file")
"""Methods that fill classes with arguments, also from a file (transformers 5.23 ``hf_argparser.py``)."""
_PARSERS = ("argparse.ArgumentParser", "argparse.add_argument_group")
_DATA_PARSERS = ("HfArgumentParser", "TrlParser")


def is_of_lightning(value: Value | None) -> bool:
    """Say whether a value is a ``Trainer`` or a ``Fabric`` of Lightning."""
    if not isinstance(value, Thing) or library(value.kind) not in LIGHTNING:
        return False
    return value.kind.rpartition(".")[2] in ("Trainer", "Fabric")


def _kept(name: str) -> str:
    """Return the name under which values are kept: in small letters, but for single letters."""
    return name.lower() if len(name) > 1 else name


class RunInterpreter(Commands):
    """Follows a script with the arguments that it is started with.

    Args:
        tree: The script.
        words: Its arguments.
        defaults: Whether defaults count; else what they decide is not known.
        load: Returns a file that the script loads as plain data, or None; without it no file is read.
        processes: Number of ranks that it is started on, or None.
        folder: Where the script lies; None: the modules that it imports are not followed.

    Attributes:
        problems: Files that it is given, and that cannot be read.
    """

    starts_anyway = True

    def __init__(
        self,
        tree: ast.Module,
        words: Sequence[str] = (),
        *,
        defaults: bool = True,
        load: Callable[[str], object] | None = None,
        processes: int | None = None,
        folder: str | None = None,
    ) -> None:
        super().__init__(tree, folder or "", follows=folder is not None)
        self._load = load
        self.problems: list[str] = []
        self._processes = processes
        self._files: dict[str, Value | None] = {}
        self._defaults = defaults
        self._words = words
        self._flags, self._positional = flags(words)
        self._used: set[str] = set()
        self._declares = False
        self._evaluating: set[int] = set()
        self._of_bodies: dict[int, Value] = {}
        self._composed: dict[tuple[str, str], dict[str, Any] | None] = {}
        self._held: dict[str, list[tuple[Value, ast.AST | None]]] = {}

    def unknown_flags(self) -> set[str]:
        """Return the flags that no parser declares; none where no parser is known."""
        return set(self._flags) - self._used if self._declares else set()

    def named(self, name: str) -> list[tuple[Value, ast.AST | None]]:
        """Return the values that names, fields and arguments of this name held."""
        return self._held.get(name, [])

    def holders(self, values: Sequence[Value]) -> Iterator[tuple[str, list[tuple[Value, ast.AST | None]]]]:
        """Yield each name that ever stood for one of these values, with all that it stood for."""
        for name, held in self._held.items():
            if any(value is one for value, _ in held for one in values):
                yield name, held

    def unpacks(self, value: Value) -> bool:
        """Say whether a name stands for a part of a value that nothing is known of."""
        return any(
            isinstance(item, Thing) and item.kind == "unknown" and any(one is value for one in item.sources)
            for held in self._held.values()
            for item, _ in held
        )

    def _hold(self, name: object, value: Value, node: ast.AST | None) -> None:
        if isinstance(name, str) and not self._importing:
            options = [
                item.node for item in value.sources if isinstance(item, Thing) and item.kind == "option"
            ]
            self._held.setdefault(_kept(name), []).append((value, options[0] if options else node))

    def store(self, where: dict[Any, Value], key: Any, value: Value) -> None:
        """Bind a name or an attribute."""
        if any(isinstance(item, Thing) and item.kind == "option" for item in value.sources):
            self._hold(key, value, None)
        super().store(where, key, value)

    def _do_augassign(self, node: ast.AugAssign) -> None:
        if (
            isinstance(node.target, ast.Name) and not self._importing
        ):  # what it held before is not what a loop sees
            self._held.pop(_kept(node.target.id), None)
        super()._do_augassign(node)

    def assign(self, target: ast.AST, value: Value) -> None:
        """Bind a target to a value."""
        if isinstance(target, ast.Name):
            self._hold(target.id, value, target)
        super().assign(target, value)

    def _bound(
        self, function: Function, args: Sequence[Value], keywords: Mapping[str, Value], partly: bool
    ) -> dict[str, Value]:
        names = super()._bound(function, args, keywords, partly)
        for name, value in names.items():
            if isinstance(value, Const):
                self._hold(name, value, function.node)
        return names

    # Parsers of command lines

    def _result(
        self, receiver: Value, name: str, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.Call
    ) -> Value:
        parser = made_by(receiver, *_PARSERS)
        if parser is not None:
            if name in ("add_argument_group", "add_mutually_exclusive_group"):
                return parser
            if name == "add_argument":
                self._declare(parser, args, keywords, node)
                return Const(None)
            if name == "set_defaults":
                for key, value in keywords.items():
                    self.store(parser.parts, ("default", key), value)
                    said = parser.parts.get(("argument", key))
                    if isinstance(said, Thing):  # it replaces the default of what is declared
                        said = replace(said, keywords={**said.keywords, "default": value})
                        self.store(parser.parts, ("argument", key), said)
                return Const(None)
            if name in ("parse_args", "parse_known_args"):
                self._declares = self._declares or name == "parse_args"
                made = self._namespace(parser)
                return made if name == "parse_args" else Items([made, Items([])])
        parser = made_by(receiver, *_DATA_PARSERS)
        if parser is not None and name in OF_CLASSES:
            given = parser.args[0] if parser.args else parser.keywords.get("dataclass_types")
            kinds = given.values if isinstance(given, Items) else [given]
            own = {name for kind in kinds if isinstance(kind, Class) for name, _ in self.fields(kind)}
            return Items([self._filled(kind, node, own) for kind in kinds if kind is not None])
        if name == "map" and args and isinstance(args[0], Function):  # of a data set: how samples are made
            self.enter(args[0], (Thing("parameter", label="sample", node=node),), {}, node, partly=True)
        if (
            is_of_lightning(receiver)
            and (given := self._of_lightning(name, args, keywords, node)) is not None
        ):
            return given
        if (followed := of_text(receiver, name, args)) is not None:
            return followed
        return super()._result(receiver, name, args, keywords, node)

    def _of_lightning(
        self, name: str, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.Call
    ) -> Value | None:
        """Follow the methods of a module that ``fit`` calls, and return what ``setup`` gives back."""
        if name.startswith("setup"):
            given = [*args, *keywords.values()]
            return given[0] if len(given) == 1 else Items(given)
        for made in (*args, *keywords.values()) if name == "fit" else ():
            owner = made.owner if isinstance(made, Thing) else None
            for method in ("configure_model", "configure_optimizers", "train_dataloader"):
                found = owner.lookup(method) if owner is not None else None
                if found is not None and found[1] not in self.called:
                    self.enter(Function(found[1], found[0].scope, made), (), {}, node)
        return None

    def _declare(
        self, parser: Thing, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.AST
    ) -> None:
        """Keep what ``add_argument`` says."""
        names = [item.value for item in args if isinstance(item, Const) and isinstance(item.value, str)]
        if not names:
            return
        long = next((name for name in names if name.startswith("--")), names[0])
        named = keywords.get("dest")
        word = named.value if isinstance(named, Const) else long.lstrip("-").replace("-", "_")
        declared = Thing("declared", label=long, node=node, args=tuple(args), keywords=keywords)
        self.store(parser.parts, ("argument", str(word)), declared)

    def _namespace(self, parser: Thing) -> Thing:
        made = Thing("arguments", label="args", node=parser.node)
        positional = list(self._positional)
        for key, declared in list(parser.parts.items()):
            if isinstance(key, tuple) and key[0] == "argument" and isinstance(declared, Thing):
                default = parser.parts.get(("default", key[1]))
                self.store(made.parts, key[1], self._argument(str(key[1]), declared, default, positional))
        for key, value in list(parser.parts.items()):  # ``set_defaults`` of what no argument is
            if isinstance(key, tuple) and key[0] == "default" and key[1] not in made.parts:
                self.store(made.parts, key[1], value)
        return made

    def _argument(self, name: str, declared: Thing, default: Value | None, positional: list[str]) -> Value:
        """Return what an argument is: as it is given, or its default."""
        keywords, label = declared.keywords, declared.label
        action = constant(keywords.get("action"))
        names = {
            str(item.value).lstrip("-").replace("-", "_") for item in declared.args if isinstance(item, Const)
        }
        given = next((self._flags[item] for item in names if item in self._flags), None)
        self._used.update(names)
        if not label.startswith("-"):
            given = positional.pop(0) if positional else None
        if given is None and f"no_{name}" in self._flags and isinstance(keywords.get("action"), Library):
            self._used.add(f"no_{name}")
            return given_by(False, label, declared.node)
        default = keywords.get("default") or default
        if action in ("store_true", "store_false"):
            if given is not None:
                return given_by(action == "store_true", label, declared.node)
            default = default or Const(action == "store_false")
        elif given is not None:
            several = isinstance(given, list) or keywords.get("nargs") is not None
            words = given if isinstance(given, list) else [given]
            values = [self._converted(word, keywords.get("type")) for word in words]
            if several and constant(keywords.get("nargs")) != "?":
                return Items([given_by(value, label, declared.node) for value in values])
            return given_by(values[0], label, declared.node)
        if default is None or is_constant(default, None):
            if is_constant(keywords.get("required"), True) or not label.startswith("-"):
                return Thing("missing", label=label, node=declared.node)
            return self._default_of(None, label, declared.node)
        if isinstance(default, Const):
            text = isinstance(default.value, str)
            value = self._converted(default.value, keywords.get("type")) if text else default.value
            return self._default_of(value, label, declared.node)
        return default

    def _filled(self, kind: Value, node: ast.AST, own: Collection[str] = ()) -> Value:
        """Return an object whose fields are arguments: as they are given, or their defaults.

        ``own`` are the fields of classes of the script; classes of libraries take the others.
        """
        if isinstance(kind, Class):
            given: dict[str, Value] = {}
            for field, declared in self.fields(kind):
                if field in self._flags:
                    self._used.add(field)
                    word = self._flags[field]
                    value = [guessed(item, declared) for item in (word if isinstance(word, list) else [word])]
                    given[field] = given_by(value[0] if len(value) == 1 else value, f"--{field}", declared)
            if kind.library_bases:  # a library's class has the fields that the script does not list
                for name in self._flags.keys() - {*own, *given}:
                    self._used.add(name)
                    given[name] = given_by(typed(self._flags[name]), f"--{name}", node)
            return self.call(kind, (), given, {}, False, node)
        if isinstance(kind, Library):
            keywords: dict[str, Value] = {}
            for name in self._flags.keys() - own:
                self._used.add(name)
                keywords[name] = given_by(typed(self._flags[name]), f"--{name}", node)
            made = self.call(kind, (), keywords, dict.fromkeys(keywords, node), False, node)
            if isinstance(made, Thing):
                for name, item in keywords.items():
                    self.store(made.parts, name, item)
                if self._words and made.kind in ARGUMENTS and "model_init_kwargs" not in keywords:
                    self.store(made.parts, "model_init_kwargs", Const(None))
            return made
        return Thing("unknown", node=node)

    # Classes that hold settings

    def fields_of(self, thing: Thing) -> tuple[str, ...]:
        """Return the fields that classes of the script declare of an object; none for one of a library."""
        return tuple(name for name, _ in self.fields(thing.owner)) if thing.owner is not None else ()

    def of_class(self, made: Class, name: str) -> Value | None:
        """Return what the body of a class assigns to a name."""
        for owner in made.line():
            for item in reversed(owner.node.body):
                targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
                if not isinstance(item, ast.Assign | ast.AnnAssign) or item.value is None:
                    continue
                if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    continue
                if id(item) in self._evaluating:
                    return None
                if not self._evaluating:
                    self._of_bodies.clear()
                elif id(item) in self._of_bodies:  # of another field that uses it
                    return self._of_bodies[id(item)]
                self._evaluating.add(id(item))
                outer, self.scope = self.scope, Scope(self._beside_in(owner, item.value), owner.scope)
                try:
                    found = self._default(self.value(item.value), name, item)
                    self._of_bodies[id(item)] = found
                    return found
                finally:
                    self.scope = outer
                    self._evaluating.discard(id(item))
        return None

    def _beside_in(self, owner: Class, expression: ast.expr) -> dict[str, Value]:
        """Return what the body of a class assigns to the names that an expression in it uses."""
        used = dict.fromkeys(item.id for item in ast.walk(expression) if isinstance(item, ast.Name))
        found = {name: self.of_class(Class(owner.node, owner.scope), name) for name in used}
        return {name: value for name, value in found.items() if value is not None}

    def _default(self, value: Value, name: str, node: ast.AST) -> Value:
        field = made_by(value, "dataclasses.field", "pydantic.Field")
        if field is not None:
            factory = field.keywords.get("default_factory")
            if isinstance(factory, Function):
                value = self.enter(factory, (), {}, node)
            elif isinstance(factory, Class):
                value = self.call(factory, (), {}, {}, False, node)
            elif "default" in field.keywords:
                value = field.keywords["default"]
            elif field.args and not is_constant(field.args[0], ...):
                value = field.args[0]
            else:
                return Thing("missing", label=name, node=node)
        return self._default_of(value.value, name, node) if isinstance(value, Const) else value

    def item(self, whole: Value, index: Value, node: ast.AST) -> Value:
        """Return an item of a value; those of ``sys.argv`` are the arguments."""
        number = constant(index)
        if isinstance(whole, Library) and whole.name == "sys.argv" and type(number) is int and number > 0:
            if number <= len(self._words):
                return given_by(self._words[number - 1], f"argument {number}", node)
            return Thing("missing", label=f"argument {number}", node=node)
        return super().item(whole, index, node)

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        """Return an attribute of a value; what the body of a class assigns is one of its objects."""
        if isinstance(value, Table) and name in value.items and not hasattr(dict, name):
            return value.items[name]  # OmegaConf
        if name.endswith("_enabled") and (made := made_by(value, "ParallelismConfig")) is not None:
            axes = ("dp_shard", "cp") if name == "fsdp_enabled" else (name.removesuffix("_enabled"),)
            sizes = [constant(made.keywords.get(f"{axis}_size", Const(1))) for axis in axes]
            if all(type(size) is int for size in sizes):
                return Const(any(size != 1 for size in sizes))
        if name == "mixed_precision" and (made := made_by(value, "Accelerator")) is not None:
            given = made.keywords.get(name)
            if given is not None and not is_constant(given, None):
                return given
        if name == "num_processes" and made_by(value, "Accelerator") is not None:
            return self._world() or super().attribute(value, name, node)
        owner = value if isinstance(value, Class) else value.owner if isinstance(value, Thing) else None
        if name == "hparams" and isinstance(value, Thing) and name not in value.parts:
            first = owner.lookup("__init__") if owner is not None else None
            if first is not None:  # Lightning keeps the arguments of a module under this name
                function = Function(first[1], first[0].scope)
                kept = Thing("hparams", label=name, node=node)
                self.store(value.parts, name, kept)
                for key, item in self._bound(function, (value, *value.args), value.keywords, False).items():
                    self.store(kept.parts, key, item)
        if owner is not None and owner.lookup(name) is None:
            known = value.parts if isinstance(value, Thing) else {}
            found = self.of_class(owner, name) if name not in known else None
            if found is not None:
                if isinstance(value, Thing):
                    self.store(value.parts, name, found)
                return found
        return super().attribute(value, name, node)

    def _make(
        self, made: Class, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.AST, partly: bool
    ) -> Value:
        bases = map(short, made.library_bases)
        base = next((name for name in bases if name.endswith("Arguments") or name in ARGUMENTS), None)
        thing = super()._make(made, args, keywords, node, partly)
        if made.lookup("__init__") is None and isinstance(thing, Thing) and not made.library_bases:
            for (field, _), value in zip(self.fields(made), args, strict=False):
                self.store(thing.parts, field, value)
        given = dict(thing.parts) if isinstance(thing, Thing) else {}
        after = made.lookup("__post_init__") if made.lookup("__init__") is None else None
        if after is not None and isinstance(thing, Thing):
            self.enter(Function(after[1], after[0].scope, thing), (), {}, node)
            changed = {
                str(name): value
                for name, value in thing.parts.items()
                if given.get(name) is not value and made_by(value, "attribute") is None
            }
            keywords = {**keywords, **changed}
        if base is not None and isinstance(thing, Thing):
            fields = {name: self.attribute(thing, name, node) for name, _ in self.fields(made)}
            thing.kind, thing.keywords = base, {**fields, **keywords}
            self.emit(
                "call", base, node, args=args, keywords=thing.keywords,
                places=dict.fromkeys(thing.keywords, node), partly=partly, result=thing,
            )  # fmt: skip
        return thing

    # Functions of libraries

    def _made(
        self,
        name: str,
        function: Library,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        node: ast.AST,
    ) -> Value:
        first = args[0] if args else None
        self._samples(name, first, keywords, node)
        if name == "os.getenv" and first is not None:
            return self._variable(first, args[1] if len(args) > 1 else keywords.get("default"), node)
        if (found := self._builtin(name, args, node)) is not None:
            return found
        if name == "dist.get_world_size" and (known := self._world()) is not None:
            return known
        if name in ("setup_chat_format", "clone_chat_template") and len(args) > 1:  # of TRL
            return Items([*args[:2], Items([])][: 2 if name == "setup_chat_format" else 3])
        if name in _RECORDS and (first is None or isinstance(first, Table)):
            kept = first if isinstance(first, Table) else Table({}, {})
            if not name.endswith("Namespace"):  # which copies nothing
                copied = self.copied("deepcopy", (kept,), {}, node)
                kept = copied if isinstance(copied, Table) else kept
            items: dict[object, Value] = kept.items | dict(keywords.items())
            return Table(items, {**dict.fromkeys(items, node), **kept.nodes}, kept.whole)
        if (copied := self.copied(name, args, keywords, node)) is not None:
            return copied
        if name in BF16:
            return given_by(True, _ON_GPU, node)
        if name.rpartition(".")[2] in _INSTALLED:
            return Const(True)
        if name == "torch.cuda.get_device_capability":
            return Items([given_by(number, _ON_GPU, node) for number in (8, 0)])
        if name == "notebook_launcher" and isinstance(first, Function):
            given = args[1] if len(args) > 1 else keywords.get("args")
            return self.enter(first, given.values if isinstance(given, Items) else (), {}, node)
        if (loaded := self.settings_of(name, args, node)) is not None:
            return loaded
        if name in ("fire.Fire", "typer.run", "tyro.cli", "jsonargparse.CLI") and first is not None:
            return self._cli(first, node, typer=name == "typer.run")
        return super()._made(name, function, args, keywords, node)

    def _builtin(self, name: str, args: Sequence[Value], node: ast.AST) -> Value | None:
        """Return what a built-in function, or one of TRL, yields for known values, or None."""
        first = args[0] if args else None
        switches = _SWITCHES.get(name.rpartition(".")[2], ())
        if switches and self._words and isinstance(first, Thing) and first.kind == "ModelConfig":
            given = [first.parts.get(key, first.keywords.get(key)) for key in switches]
            absent = [
                made_by(value, "attribute") is not None or self.truth(value) is False
                for value in given
                if value is not None
            ]
            return Const(None) if all(absent) else None
        if name == "builtins.hasattr" and isinstance(first, Thing) and first.owner is not None:
            field = constant(args[1]) if len(args) > 1 else None
            if isinstance(field, str) and not first.owner.library_bases:
                return Const(field in first.parts or self.of_class(first.owner, field) is not None)
        if name == "builtins.exec" and self.scope is self.module:  # nanoGPT's ``configurator.py``
            for path in (word for word in self._positional if word.endswith(".py")):
                self._execute(path, node)
            for key in self._flags.keys() & self.module.names.keys():
                self._used.add(key)
                self._held.pop(_kept(key), None)
                self.assign(ast.Name(key), given_by(typed(self._flags[key]), f"--{key}", node))
        if name in ("builtins.int", "builtins.float", "builtins.str") and isinstance(first, Const):
            try:
                kind = {"int": int, "float": float, "str": str}[name.rpartition(".")[2]]
                return Const(kind(first.value), sources=first.sources, tags=first.tags)
            except (TypeError, ValueError, OverflowError):
                return None
        if name == "builtins.any" and first is not None and "VAR_KEYWORD" in ast.unparse(node):
            asked = asked_of(first) or ""
            return Const(False) if asked.rpartition(".")[2] in ARGUMENTS else None
        if name == "builtins.len" and isinstance(first, Library) and first.name == "sys.argv":
            return Const(len(self._words) + 1)
        return None

    def _execute(self, path: str, node: ast.AST) -> None:
        """Follow a file in Python that sets variables of the script."""
        tree = self._load(path) if self._load is not None else None
        if not isinstance(tree, ast.Module):
            self.problems.append(f"{path} is not read: what it sets is not known")
            return
        bound = {item.id for item in ast.walk(tree) if isinstance(item, ast.Name)} & self.module.names.keys()
        before = {name: self.module.names[name] for name in bound}
        self.block(tree.body)
        for name, value in before.items():
            found = self.module.names[name]
            if found is not value:
                self._held.pop(_kept(name), None)
                told = given_by(found.value, path, node) if isinstance(found, Const) else found
                self.assign(ast.Name(name), told)

    def _samples(self, name: str, first: Value | None, keywords: Mapping[str, Value], node: ast.AST) -> None:
        """Follow what makes samples and batches for a loader or a trainer, which call it out of sight."""
        loader = name == "DataLoader"
        makers = [(keywords.get("collate_fn"), "__call__"), (keywords.get("data_collator"), "__call__")]
        makers.append((keywords.get("train_dataset"), "__getitem__"))
        makers.append((keywords.get("dataset", first) if loader else None, "__getitem__"))
        sample = Thing("parameter", label="sample", node=node)
        for made, method in makers:
            owner = made.owner if isinstance(made, Thing) else None
            found = owner.lookup(method) if owner is not None else None
            if isinstance(made, Partial) and isinstance(made.function, Function):
                self.enter(made.function, (*made.args, sample), made.keywords, node, partly=True)
            elif isinstance(made, Function):
                self.enter(made, (sample,), {}, node, partly=True)
            elif found is not None and found[1] not in self.called:
                self.enter(Function(found[1], found[0].scope, made), (sample,), {}, node, partly=True)

    def _cli(self, function: Value, node: ast.AST, *, typer: bool) -> Value:
        """Return what a function yields whose parameters are the arguments."""
        if isinstance(function, Class):
            return self._filled(function, node)
        if not isinstance(function, Function):
            return Thing("unknown", node=node)
        if typer:
            return self.enter(function, (), self._of_signature(function, positional=True), node, partly=True)
        form = function.node.args
        names = {item.arg for item in (*form.posonlyargs, *form.args, *form.kwonlyargs)}
        given: dict[str, Value] = {
            name: given_by(typed(word), f"--{name}", node)
            for name, word in self._flags.items()
            if name in names
        }
        if form.kwarg is not None:
            given |= {name: given_by(typed(word), f"--{name}", node) for name, word in self._flags.items()}
        self._used.update(given)
        return self.enter(function, (), given, node)

    def _world(self) -> Const | None:
        return None if self._processes is None else Const(self._processes, tags=frozenset({"world"}))

    def _environment(self, key: Value, node: ast.AST) -> Value:
        found = super()._environment(key, node)
        return (self._world() or found) if "world" in found.tags else found

    def _environment_method(self, name: str, args: Sequence[Value], node: ast.Call) -> Value:
        if name in ("get", "pop", "setdefault") and args:
            return self._variable(args[0], args[1] if len(args) > 1 else None, node)
        return super()._environment_method(name, args, node)

    def _variable(self, key: Value, default: Value | None, node: ast.AST) -> Value:
        name = key.value if isinstance(key, Const) else None
        if isinstance(default, Const) and default.value is not None and str(name) not in OF_ENVIRONMENT:
            return self._default_of(default.value, f"${name}", node)
        return self._environment(key, node)

    # Expressions

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        made = super()._joinedstr(node)
        parts = [part for part in node.values if isinstance(part, ast.FormattedValue)]
        values = made.sources
        if any(part.format_spec is not None for part in parts) or not all(
            isinstance(value, Const) for value in values
        ):
            return made
        held = iter(value.value for value in values if isinstance(value, Const))
        words = [part.value if isinstance(part, ast.Constant) else next(held) for part in node.values]
        try:
            text = "".join(map(str, words))
        except ValueError:  # a number of too many digits
            return made
        if len(text) > LONGEST:
            return made
        sources = tuple(source for value in values for source in value.sources)
        return Const(text, sources=sources)

    def _binop(self, node: ast.BinOp) -> Value:
        made = super()._binop(node)
        if isinstance(made, Thing) and made.kind == "binary":
            left, right = made.args
            if isinstance(left, Const) and isinstance(right, Const):
                found = folded(node.op, left.value, right.value)
                if found is not None:
                    return Const(found, sources=(*left.sources, *right.sources))
        return made

    def _boolop(self, node: ast.BoolOp) -> Value:
        made = super()._boolop(node)
        asks = isinstance(node.op, ast.And) and any(map(asks_for_bf16, node.values))
        # What stands beside it asks for CUDA and NCCL.
        return given_by(True, _ON_GPU, node) if asks and self.truth(made) is None else made

    def _compare(self, node: ast.Compare) -> Value:
        made = super()._compare(node)
        if isinstance(made, Thing) and len(node.ops) == 1 and len(made.args) == 2:
            known = compared(node.ops[0], *made.args)
            if known is None and self._processes is not None:
                known = launched(node.ops[0], *made.args)
            if known is not None:
                return Const(known)
        return made

    def truth(self, value: Value) -> bool | None:
        """Return whether a value is true, or None; a dictionary is true where it holds something."""
        if isinstance(value, Table) and value.whole:
            return bool(value.items) if not value.items or any(map(is_there, value.items.values())) else None
        if isinstance(value, Thing) and value.kind.endswith("Config"):
            return True
        if isinstance(value, Choice):
            known = {self.truth(item) for item in value.options}
            return known.pop() if len(known) == 1 else None
        return super().truth(value)
