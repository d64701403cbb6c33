"""Statements of a script: it is followed from its first line, and then each function that nothing calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fsdptool.scripts.expressions import Expressions
from fsdptool.scripts.names import COLLECTIVES
from fsdptool.scripts.state import joined
from fsdptool.scripts.values import (
    Class,
    Condition,
    Const,
    Event,
    Function,
    Items,
    Library,
    Table,
    Thing,
    Value,
    is_key,
    outermost,
)

_UNROLLED, _PAIRS = 6, 40
"""Items that a loop is followed for one by one: of a list, and names with values of a dictionary."""
TRIGGERS = frozenset({
    "fully_shard", "FullyShardedDataParallel", "FSDP", "FSDPModule", "Accelerator", "prepare",
    "TrainingArguments",
    "Trainer", "SFTTrainer", "SFTConfig", "Seq2SeqTrainingArguments", "FullyShardedDataParallelPlugin",
    "DataLoader",
    "DistributedSampler", "set_model_state_dict", "get_model_state_dict", "get_state_dict", "set_state_dict",
    "get_optimizer_state_dict", "set_optimizer_state_dict", "set_requires_gradient_sync",
    "init_process_group",
    "environ", "barrier", "MixedPrecisionPolicy", "MixedPrecision", "StateDictOptions", "checkpoint_wrapper",
    "init_device_mesh", "transformer_auto_wrap_policy", "size_based_auto_wrap_policy", "DPOConfig",
    "GRPOConfig",
    "CPUOffload", "CPUOffloadPolicy", "dcp",
})  # fmt: skip
"""Words without which no rule finds anything in a function."""


@dataclass(frozen=True, slots=True)
class Path:
    """What happens on one way through a script.

    Attributes:
        events: The events in their order.
        own: How many events at the beginning belong to the module; None where it is the module itself.
        tree: The script.
        classes: Its classes.
        words: The names that occur in it.
        root: The function that the way begins with; None for the module.
    """

    events: tuple[Event, ...]
    own: int | None
    tree: ast.Module
    classes: tuple[Class, ...]
    words: frozenset[str]
    root: ast.AST | None = None


class Interpreter(Expressions):
    """Follows a script without running it.

    Attributes:
        starts_anyway: Whether a check that would end the script is passed over: it is started with arguments
            that are not known here.
        repeated: How many loops are around that may run any number of times.
    """

    starts_anyway = False

    def __init__(self, tree: ast.Module) -> None:
        super().__init__()
        self.tree = tree
        self._functions = []
        self._returned: list[Value] = []
        self._unrolled = 1
        self.repeated = 0
        self._left = False
        self.classes: list[Class] = []
        self.roots: list[Function] = []
        self.words: frozenset[str] = frozenset()
        self.triggers = TRIGGERS | COLLECTIVES | _renamed(tree)

    def paths(self) -> list[Path]:
        """Return the ways through the script.

        Raises:
            TooLongError: It takes too many steps.
            RecursionError: An expression is nested too deeply.
        """
        self.block(self.tree.body)
        self.guards.clear()
        whole = tuple(self.events)
        self.words = words_of(self.tree)
        found = [Path(whole, None, self.tree, tuple(self.classes), self.words)]
        named = _loaded(self.tree)
        first = [root for root in self.roots if root.node not in self.called and _name(root) not in named]
        mattering = self._mattering()
        for roots in (first, self.roots):
            for root in roots:
                made = root.bound.lookup("__init__") if isinstance(root.bound, Class) else None
                matters = root.node in mattering or (made is not None and made[1] in mattering)
                if root.node not in self.called and matters:
                    found.append(self._from(root, whole))
        return found

    def _mattering(self) -> set[ast.AST]:
        """Return the functions that have a word that rules ask for, or name one of the script that has."""
        names = {_name(root) for root in self.roots}
        users: dict[str, list[Function]] = {}
        waiting: list[Function] = []
        for root in self.roots:
            words = words_of(root.node)
            if words & self.triggers:
                waiting.append(root)
            for name in words & names:
                users.setdefault(name, []).append(root)
        found: set[ast.AST] = set()
        while waiting:
            root = waiting.pop()
            if root.node not in found:
                found.add(root.node)
                waiting.extend(users.pop(_name(root), ()))
        return found

    def _from(self, root: Function, before: tuple[Event, ...]) -> Path:
        """Return the way through a function that is called from elsewhere."""
        self.events = list(before)
        mark = self.mark
        assert not isinstance(root.node, ast.Lambda)
        args: list[Value] = []
        if isinstance(root.bound, Class):
            args.append(self._self(root.bound, root.node))
        self.enter(Function(root.node, root.scope), args, {}, root.node, partly=True)
        path = Path(tuple(self.events), len(before), self.tree, tuple(self.classes), self.words)
        self.take_back(mark)
        return path

    def _self(self, owner: Class, method: ast.AST) -> Thing:
        made = Thing("parameter", label="self", node=owner.node, owner=owner)
        found = owner.lookup("__init__")
        if found is not None and found[1] is not method:
            self.enter(Function(found[1], found[0].scope), [made], {}, owner.node, partly=True)
        return made

    def run_function(self, body: Sequence[ast.stmt]) -> Value:
        """Run the body of a function in the current scope; return what it returns."""
        outer, self._returned = self._returned, []
        try:
            self.block(body)
            return joined(self._returned) if self._returned else Const(None)
        finally:
            self._returned = outer

    def block(self, body: Sequence[ast.stmt]) -> bool:
        """Run statements; return whether what follows them is not reached."""
        for statement in body:
            self.count()
            run = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            if run is None:
                for child in ast.iter_child_nodes(statement):
                    if isinstance(child, ast.expr):
                        self.value(child)
            elif run(statement):
                return True
        return False

    def assign(self, target: ast.AST, value: Value) -> None:
        """Bind a target to a value."""
        if isinstance(target, ast.Name):
            scope = outermost(self.scope) if target.id in self.scope.globals else self.scope
            self.store(scope.names, target.id, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, Thing("unknown", node=target, sources=(value,)))
        elif isinstance(target, ast.Tuple | ast.List):
            for index, part in enumerate(target.elts):
                if isinstance(value, Items) and len(value.values) == len(target.elts):
                    self.assign(part, value.values[index])
                else:
                    self.assign(part, self._part(value, index, target))
        elif isinstance(target, ast.Attribute):
            self._assign_attribute(target, value)
        elif isinstance(target, ast.Subscript):
            self._assign_item(target, value)

    def _part(self, value: Value, index: int, node: ast.AST) -> Value:
        if isinstance(value, Thing) and value.kind not in ("output", "result"):
            return self.item(value, Const(index), node)
        return Thing(
            "unknown", node=node, sources=(value,), outside=isinstance(value, Thing) and value.outside
        )

    def _assign_attribute(self, target: ast.Attribute, value: Value) -> None:
        whole = self.value(target.value)
        self.emit("store", target.attr, target, target=whole, args=(value,))
        if isinstance(whole, Table):  # OmegaConf
            self.store_item(whole, target.attr, value, target)
        if not isinstance(whole, Thing):
            return
        if (
            isinstance(value, Thing)
            and value.parent is None
            and value is not whole
            and value.kind != "parameter"
        ):
            value.parent, value.label = whole, value.label or target.attr
        self.store_attribute(whole, target.attr, value, target)

    def _assign_item(self, target: ast.Subscript, value: Value) -> None:
        whole, index = self.value(target.value), self.value(target.slice)
        if isinstance(whole, Library) and whole.name == "os.environ":
            name = index.value if isinstance(index, Const) else None
            self.emit("environment", str(name), target, args=(value,))
        elif isinstance(whole, Table) and is_key(index):
            self.store_item(whole, index.value, value, target)
        elif isinstance(whole, Table):
            self.unsure(whole, target)
        elif isinstance(whole, Thing):
            self.emit("store", "[]", target, target=whole, args=(value,))
            key = ("item", index.value) if is_key(index) else "[]"
            self.store(whole.parts, key, value)
            if isinstance(value, Thing) and value.parent is None:
                value.parent = whole

    # Definitions and imports

    def _do_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        function = Function(node, self.scope)
        self.store(self.scope.names, node.name, function)
        if self.scope is self.module:
            self.roots.append(function)

    _do_asyncfunctiondef = _do_functiondef

    def _do_classdef(self, node: ast.ClassDef) -> None:
        bases = tuple(self.value(base) for base in node.bases)
        made = Class(node, self.scope, bases)
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                made.methods[item.name] = item
                if self.scope is self.module:
                    self.roots.append(Function(item, self.scope, made))
        self.classes.append(made)
        self.store(self.scope.names, node.name, made)

    def _do_import(self, node: ast.Import) -> None:
        for item in node.names:
            name = item.name if item.asname else item.name.partition(".")[0]
            self.emit("import", item.name, node)
            self.store(self.scope.names, item.asname or name, Library(name))

    def _do_importfrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for item in node.names:
            self.emit("import", f"{module}.{item.name}", node)
            if item.name == "*":
                self.stars.append(module)
            else:
                self.store(self.scope.names, item.asname or item.name, Library(f"{module}.{item.name}"))

    def _do_global(self, node: ast.Global) -> None:
        self.scope.globals.update(node.names)

    # Assignments

    def _do_assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _do_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value))

    def _do_augassign(self, node: ast.AugAssign) -> None:
        load = ast.copy_location(ast.BinOp(_loading(node.target), node.op, node.value), node)
        self.assign(node.target, self.value(load))

    def _do_delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id in self.scope.names:
                self.store(self.scope.names, target.id, Thing("unknown", node=node))
            elif isinstance(target, ast.Subscript):
                self._delete_item(self.value(target.value), self.value(target.slice), node)

    def _delete_item(self, whole: Value, key: Value, node: ast.Delete) -> None:
        if not isinstance(whole, Table):
            return
        if not is_key(key):
            self.unsure(whole, node)
        elif key.value in whole.items:
            self.drop_item(whole, key.value)

    # Conditions

    def _do_return(self, node: ast.Return) -> bool:
        self._returned.append(self.value(node.value))
        self._left = False
        return True

    def _do_raise(self, node: ast.Raise) -> bool:
        self.value(node.exc)
        return True

    def _do_break(self, node: ast.stmt) -> bool:
        self._left = isinstance(node, ast.Break)
        return True

    _do_continue = _do_break

    def _do_expr(self, node: ast.Expr) -> bool:
        self.value(node.value)
        return _exits(node)

    def _do_if(self, node: ast.If) -> bool:
        test = self.value(node.test)
        known = is_equal(node.test) if is_main(node.test) else self.truth(test)
        if _is_typing(node.test):
            known = False
        if known is not None:
            chosen, before = node.body if known else node.orelse, len(self.events)
            over = self.block(chosen)
            return over and not (self.starts_anyway and _is_check(node.test, chosen, self.events[before:]))
        yes = Condition(node, True, "one" in test.tags, len(self.stack), test)
        no = Condition(node, False, "rest" in test.tags, len(self.stack), test)
        ends: list[bool] = []

        def run(body: Sequence[ast.stmt]) -> bool:
            ends.append(self.block(body))
            return ends[-1]

        branches = [(partial(run, node.body), yes), (partial(run, node.orelse), no)]
        over = self.join(branches, by_rank=bool(test.tags & {"one", "rest"}))
        self._left = False  # one of two branches: it may have been the other
        if not over and any(ends) and not _dies(node.body if ends[0] else node.orelse):
            self.guards.append(no if ends[0] else yes)
        return over

    def _do_match(self, node: ast.Match) -> bool:
        self.value(node.subject)
        branches: list[tuple[Callable[[], bool], Condition | None]] = [
            (partial(self.block, case.body), Condition(case, True, False, len(self.stack)))
            for case in node.cases
        ]
        branches.append((lambda: False, Condition(node, False, False, len(self.stack))))
        return self.join(branches, by_rank=False)

    def _do_try(self, node: ast.Try) -> bool:
        self.tries.append(node)
        try:
            over = self.block(node.body)
        finally:
            self.tries.pop()
        imports = any(isinstance(item, ast.Import | ast.ImportFrom) for item in node.body)
        for handler in node.handlers:
            guard = Condition(handler, True, False, len(self.stack))
            if imports:
                mark = self.mark
                with self.under(guard):
                    self.block(handler.body)
                self.take_back(mark)
            else:
                self.join([(partial(self.block, handler.body), guard), (lambda: over, None)], by_rank=False)
        if not over:
            over = self.block(node.orelse)
        return self.block(node.finalbody) or (over and bool(node.handlers) is False)

    _do_trystar = _do_try

    # Loops and contexts

    def _do_for(self, node: ast.For | ast.AsyncFor) -> None:
        whole = self.value(node.iter)
        self.emit("iterate", "for", node, target=whole)
        if self.is_empty(whole):
            self.block(node.orelse)
            return
        values: list[Value] = [self.element(whole, node)]
        outer, repeated = self._unrolled, self.repeated
        if isinstance(whole, Items) and self._is_short(whole):
            values = list(whole.values)
            self._unrolled *= len(values)
            self.repeated -= 1
        for value in values:
            self.assign(node.target, value)
            if self._loop(node, node.body) and len(values) > 1 and self._left:
                break
        else:
            self._unrolled, self.repeated = outer, repeated
            self.block(node.orelse)
        self._unrolled, self.repeated = outer, repeated

    _do_asyncfor = _do_for

    def is_empty(self, whole: Value) -> bool:
        """Say whether a loop certainly takes nothing from a value."""
        del whole
        return False

    def _is_short(self, whole: Items) -> bool:
        """Say whether a loop is followed item by item, with the loops around it that are."""
        many = len(whole.values)
        if 0 < many <= _UNROLLED:
            return self._unrolled * many <= _UNROLLED * _PAIRS
        return _is_paired(whole) and 0 < self._unrolled * many <= _PAIRS

    def _do_while(self, node: ast.While) -> None:
        self.value(node.test)
        self._loop(node, node.body)
        self.block(node.orelse)

    def _loop(self, node: ast.AST, body: Sequence[ast.stmt]) -> bool:
        """Run the body of a loop once; return whether it certainly ends before its last statement."""
        self.loops.append(node)
        self._left = False
        self.repeated += 1
        with self.under(None):
            over = self.block(body)
        self.repeated -= 1
        self.loops.pop()
        return over

    def _do_with(self, node: ast.With | ast.AsyncWith) -> bool:
        depth = len(self.contexts)
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, Thing("unknown", node=node, sources=(value,)))
            self.contexts.append(value)
        try:
            return self.block(node.body)
        finally:
            del self.contexts[depth:]

    _do_asyncwith = _do_with


def _loading(target: ast.expr) -> ast.expr:
    """Return an expression that reads what a target writes."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    if isinstance(target, ast.Attribute):
        return ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
    if isinstance(target, ast.Subscript):
        return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
    return target


def _name(function: Function) -> str:
    return "" if isinstance(function.node, ast.Lambda) else function.node.name


def _renamed(tree: ast.AST) -> frozenset[str]:
    """Return the names that a script gives to what rules ask for."""
    return frozenset(
        node.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.alias)
        and node.asname
        and (node.name.rpartition(".")[2] in TRIGGERS or node.name.startswith("torch.distributed.checkpoint"))
    )


def words_of(tree: ast.AST) -> frozenset[str]:
    """Return the names, attributes and imported modules that occur in a tree."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.alias):
            words.update(node.name.split("."))
    return frozenset(words)


def _loaded(tree: ast.AST) -> frozenset[str]:
    """Return the names that a script reads."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
    return frozenset(names)


def is_main(test: ast.expr) -> bool:
    """Say whether a test asks whether the file was started itself."""
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def is_equal(test: ast.expr) -> bool:
    """Say whether a comparison is no ``!=``."""
    return not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.NotEq)


def _is_typing(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


def _is_paired(whole: Items) -> bool:
    return all(isinstance(item, Items) and len(item.values) == 2 for item in whole.values)


def _exits(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute | ast.Name)
        and (ast.unparse(call.func) in ("sys.exit", "exit", "quit", "os._exit"))
    )


def _is_check(test: ast.expr, body: Sequence[ast.stmt], events: Sequence[Event]) -> bool:
    """Say whether a block is a check of what the script is given: it ends with an error, and trains nothing.

    An exit without an error is one where the script has too few arguments, and prints how it is used.
    """
    if not body or any(_trains(event) for event in events):
        return False
    last = body[-1]
    if isinstance(last, ast.Raise):
        value = last.exc
        raised = value.func if isinstance(value, ast.Call) else value
        if raised is None or ast.unparse(raised) != "SystemExit":
            return True
    elif isinstance(last, ast.Expr) and _exits(last):
        value = last.value
    else:
        return False
    status = value.args[0] if isinstance(value, ast.Call) and value.args else ast.Constant(None)
    fine = isinstance(status, ast.Constant) and status.value in (0, None)
    return not fine or "sys.argv" in ast.unparse(test)


def _trains(event: Event) -> bool:
    """Say whether something belongs to a training."""
    if event.kind == "method":
        return event.name in ("train", "fit", "backward")
    owner = event.result.owner if event.kind == "make" and isinstance(event.result, Thing) else None
    names = owner.library_bases if owner is not None else (event.name,) if event.kind == "call" else ()
    return any(name.endswith("Trainer") for name in names)


def _dies(body: Sequence[ast.stmt]) -> bool:
    """Say whether a block ends the process rather than a function or a loop."""
    return bool(body) and isinstance(body[-1], ast.Raise | ast.Expr)
