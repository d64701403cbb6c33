"""Calls and contexts of FSDP1 modules as those of FSDP2: state dicts, clipping, accumulation, parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdptool.records.diagnostic import Edit
from fsdptool.scripts.facts import FSDP1
from fsdptool.scripts.recorded import Blocked, MigrationStep, Recorded, reached
from fsdptool.scripts.values import Const, Library, Thing, flat
from fsdptool.scripts.wrapping import FSDP, STATE

_TYPED = (f"{FSDP1}.state_dict_type", f"{FSDP1}.set_state_dict_type")
_OF_OPTIMIZER = (
    f"{FSDP1}.optim_state_dict", f"{FSDP1}.full_optim_state_dict", f"{FSDP1}.sharded_optim_state_dict",
)  # fmt: skip
_LOADED = (f"{FSDP1}.optim_state_dict_to_load", f"{FSDP1}.shard_full_optim_state_dict")
Found = Iterator[tuple[ast.AST, MigrationStep | Blocked]]


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a state dict: gathered or in shards, and where it lies."""

    full: bool = True
    on_cpu: bool = False

    def options(self, *, load: bool = False, extra: str = "") -> str:
        """Return the options as an argument, with a comma before it; empty where all are defaults."""
        parts = ["full_state_dict=True"] if self.full else []
        parts += ["cpu_offload=True"] if self.on_cpu and not load else []
        parts += [extra] if extra else []
        return f", options=StateDictOptions({', '.join(parts)})" if parts else ""


def leaves(script: Recorded) -> Found:
    """Yield what single calls become."""
    yield from (*_state_dicts(script), *_clips(script), *_inner_modules(script), *_names(script))


def contexts(script: Recorded) -> Found:
    """Yield what ``with`` statements become."""
    for statement in ast.walk(script.tree):
        if not isinstance(statement, ast.With | ast.AsyncWith):
            continue
        for item in statement.items:
            try:
                found = _context(script, statement, item.context_expr)
            except Blocked as blocked:
                yield item.context_expr, blocked
                continue
            if found is not None:
                yield statement, found
    for call in script.calls(f"{FSDP1}.set_state_dict_type"):
        yield call, _removed(script, call)


def _removed(script: Recorded, call: ast.Call) -> MigrationStep | Blocked:
    statement = script.statement(call)
    if not isinstance(statement, ast.Expr):
        return Blocked("its result is used")
    body = next(
        (
            value
            for _, value in ast.iter_fields(script.parents[statement])
            if isinstance(value, list) and statement in value
        )
    )
    edit = (
        script.spans.replace(statement, "pass")
        if len(body) == 1
        else Edit(*script.spans.line_span(statement), "")
    )
    return MigrationStep(call, (edit,))


# State dicts


def _form(script: Recorded, node: ast.AST, *, optimizer: bool = False) -> _Form:
    """Return the form of state dicts at a place."""
    calls = [
        item.context_expr
        for outer in script.around(node)
        if isinstance(outer, ast.With)
        for item in outer.items
    ]
    typed = next((call for call in calls if isinstance(call, ast.Call) and _is_typed(script, call)), None)
    if typed is None:
        before = list(script.calls(_TYPED[1]))
        typed = before[-1] if len(before) == 1 else None
        if len(before) > 1:
            raise Blocked("the type of the state dict is set in several places")
    if typed is None:
        return _Form()
    given = dict(zip(("model", "type", "config", "optimizer"), typed.args, strict=False))
    for keyword in typed.keywords:
        named = {
            "state_dict_type": "type",
            "state_dict_config": "config",
            "optim_state_dict_config": "optimizer",
        }
        given[named.get(keyword.arg or "", keyword.arg or "")] = keyword.value
    kind = script.value(given.get("type"))
    name = kind.name.rpartition(".")[2] if isinstance(kind, Library) else ""
    if name not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        raise Blocked(f"state dicts of type {name or 'that is decided at run time'} have no counterpart")
    full = name == "FULL_STATE_DICT"
    config = given.get("optimizer") if optimizer and "optimizer" in given else given.get("config")
    made = script.value(config)
    if config is None or (isinstance(made, Const) and made.value is None):
        return _Form(full)
    if not isinstance(made, Thing) or not made.kind.endswith("StateDictConfig"):
        raise Blocked("the configuration of the state dict is decided elsewhere")
    offload, alone = made.keywords.get("offload_to_cpu"), made.keywords.get("rank0_only")
    on_cpu = isinstance(offload, Const) and offload.value is True
    # The configurations of optimizers offload by default, those of models do not (torch 2.13).
    on_cpu = on_cpu or (offload is None and "Optim" in made.kind)
    if full and on_cpu and not (isinstance(alone, Const) and alone.value is True):
        # With cpu_offload the other ranks would have an empty one.
        on_cpu = False
    return _Form(full, on_cpu)


def _is_typed(script: Recorded, call: ast.Call) -> bool:
    return script.library(call.func) == _TYPED[0] or (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "state_dict_type"
        and script.wrapped(call.func.value) is True
    )


def _imports(form: str, function: str) -> tuple[tuple[str, str], ...]:
    return ((STATE, function), *(((STATE, "StateDictOptions"),) if form else ()))


def _state_dicts(script: Recorded) -> Found:
    for call, target in script.methods("state_dict", "load_state_dict"):
        inside = any(
            isinstance(outer, ast.With)
            and any(
                isinstance(item.context_expr, ast.Call) and _is_typed(script, item.context_expr)
                for item in outer.items
            )
            for outer in script.around(call)
        )
        known = script.wrapped(target)
        if known is False or (known is None and not (inside and _is_model(script, target, call))):
            continue
        try:
            yield call, _state_dict(script, call, target)
        except Blocked as blocked:
            yield call, blocked
    for call in script.calls(*_OF_OPTIMIZER):
        try:
            yield call, _optimizer_state(script, call)
        except Blocked as blocked:
            yield call, blocked
    for call in script.calls(*_LOADED):
        try:
            yield call, _optimizer_load(script, call)
        except Blocked as blocked:
            yield call, blocked


def _is_model(script: Recorded, target: ast.expr, call: ast.Call) -> bool:
    """Say whether an expression is the module of the state_dict_type around it."""
    for outer in script.around(call):
        for item in outer.items if isinstance(outer, ast.With) else ():
            made = item.context_expr
            if isinstance(made, ast.Call) and _is_typed(script, made):
                first = (
                    made.args[0]
                    if made.args
                    else next((k.value for k in made.keywords if k.arg == "module"), None)
                )
                return first is not None and ast.unparse(first) == ast.unparse(target)
    return False


def _state_dict(script: Recorded, call: ast.Call, target: ast.expr) -> MigrationStep:
    assert isinstance(call.func, ast.Attribute)
    model, form = script.spans.of(target), _form(script, call)
    if call.func.attr == "state_dict":
        if call.args or call.keywords:
            raise Blocked("state_dict is called with arguments")
        options = form.options()
        text = f"get_model_state_dict({model}{options})"
        return MigrationStep(
            call, (script.spans.replace(call, text),), _imports(options, "get_model_state_dict")
        )
    strict = next((item.value for item in call.keywords if item.arg == "strict"), None)
    strict = strict or (call.args[1] if len(call.args) > 1 else None)
    extra = f"strict={script.spans.of(strict)}" if strict is not None else ""
    options = form.options(load=True, extra=extra)
    if not call.args:
        raise Blocked("load_state_dict is called without a state dict by position")
    text = f"set_model_state_dict({model}, {script.spans.of(call.args[0])}{options})"
    return MigrationStep(call, (script.spans.replace(call, text),), _imports(options, "set_model_state_dict"))


def _given(call: ast.Call, *names: str) -> dict[str, ast.expr]:
    given = dict(zip(names, call.args, strict=False))
    return given | {item.arg: item.value for item in call.keywords if item.arg is not None}


def _optimizer_state(script: Recorded, call: ast.Call) -> MigrationStep:
    name = script.library(call.func).rpartition(".")[2]
    given = _given(call, "model", "optim", "optim_state_dict")
    if not {"model", "optim"} <= set(given):
        raise Blocked("the model or the optimizer is not written in the call")
    state = given.get("optim_state_dict")
    if state is not None and name == "optim_state_dict":
        value = ast.unparse(state)
        if value != f"{ast.unparse(given['optim'])}.state_dict()":
            raise Blocked("the state of the optimizer is not taken in the call")
    if name == "optim_state_dict":
        form = _form(script, call, optimizer=True)
    else:
        form = _Form(name.startswith("full"), name.startswith("full"))
    options = form.options()
    model, optimizer = script.spans.of(given["model"]), script.spans.of(given["optim"])
    text = f"get_optimizer_state_dict({model}, {optimizer}{options})"
    return MigrationStep(
        call, (script.spans.replace(call, text),), _imports(options, "get_optimizer_state_dict")
    )


def _optimizer_load(script: Recorded, call: ast.Call) -> MigrationStep:
    """Return the load of an optimizer's state, in the place of its conversion and its ``load_state_dict``."""
    whole = script.library(call.func).endswith("shard_full_optim_state_dict")
    order = ("full_optim_state_dict", "model", "optim") if whole else ("model", "optim", "optim_state_dict")
    given = _given(call, *order)
    state = given.get("full_optim_state_dict" if whole else "optim_state_dict")
    if "model" not in given or "optim" not in given or state is None:
        raise Blocked("the model, the optimizer or its state is not written in the call")
    form = _Form() if whole else _form(script, call, optimizer=True)
    options, spans = form.options(load=True), script.spans
    optimizer = spans.of(given["optim"])
    text = f"set_optimizer_state_dict({spans.of(given['model'])}, {optimizer}, {spans.of(state)}{options})"
    needed = _imports(options, "set_optimizer_state_dict")
    outer = script.parents[call]
    if _loads_into(outer, given["optim"]):
        return MigrationStep(call, (spans.replace(outer, text),), needed)
    if isinstance(outer, ast.Assign) and isinstance(outer.targets[0], ast.Name):
        name = outer.targets[0].id
        uses = [
            item
            for item in ast.walk(script.scope(call))
            if isinstance(item, ast.Name)
            and item.id == name
            and isinstance(item.ctx, ast.Load)
            and item.lineno > (outer.end_lineno or 0)
        ]
        loading = script.parents[uses[0]] if len(uses) == 1 else None
        if loading is not None and _loads_into(loading, given["optim"]):
            statement = script.statement(loading)
            if isinstance(statement, ast.Expr):
                script.indent(statement)
                gone = Edit(*spans.line_span(statement), "")
                # What is loaded is written where it was loaded, in the form that is loaded.
                return MigrationStep(call, (spans.replace(outer, text), gone), needed)
    raise Blocked("what it returns is not loaded right away; use set_optimizer_state_dict")


def _loads_into(node: ast.AST, optimizer: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "load_state_dict"
        and ast.unparse(node.func.value) == ast.unparse(optimizer)
    )


# Clipping, inner modules and names


def _clips(script: Recorded) -> Found:
    for call, target in script.methods("clip_grad_norm_"):
        known, value = script.wrapped(target), script.values.get(target, [])
        library = any(
            isinstance(item, Library) or (isinstance(item, Thing) and item.kind == "Accelerator")
            for item in value
        )
        if known is False or library or len(call.args) + len(call.keywords) > 2:
            continue
        named = "accelerator" in ast.unparse(target).lower() or "fabric" in ast.unparse(target).lower()
        if known is None and (named or any(isinstance(item, ast.Call) for item in call.args)):
            continue
        arguments = ", ".join(script.spans.of(item) for item in (*call.args, *call.keywords))
        function, needed = reached(script, "torch.nn.utils", "clip_grad_norm_")
        text = f"{function}({script.spans.of(target)}.parameters(), {arguments})"
        if not isinstance(script.parents[call], ast.Expr):
            text += ".full_tensor()"
        yield call, MigrationStep(call, (script.spans.replace(call, text),), needed)


def _inner_modules(script: Recorded) -> Found:
    for node in ast.walk(script.tree):
        read = isinstance(node, ast.Attribute) and node.attr == "module" and isinstance(node.ctx, ast.Load)
        if isinstance(node, ast.Attribute) and read and script.wrapped(node.value) is True:
            yield node, MigrationStep(node, (Edit(script.spans.end(node.value), script.spans.end(node), ""),))


_HANDLED = (FSDP1, *_TYPED, *_OF_OPTIMIZER, *_LOADED, f"{FSDP1}.summon_full_params")


def _names(script: Recorded) -> Found:
    """Yield what other mentions of FSDP1 become: types of objects, and what has no counterpart."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        name, outer = script.library(node), script.parents.get(node)
        if name in ("enable_wrap", "wrap"):
            yield node, Blocked(f"{name} has no counterpart: call fully_shard on the modules")
        if name == FSDP1 and isinstance(outer, ast.Attribute) and outer.attr != "__name__":
            called = script.parents.get(outer)
            whole = script.library(outer)
            if not (isinstance(called, ast.Call) and called.func is outer and whole in _HANDLED):
                yield outer, Blocked(f"FSDP.{outer.attr} has no counterpart")
        elif name == FSDP1 and not (isinstance(outer, ast.Call) and outer.func is node):
            if _is_type(script, node):
                edit = script.spans.replace(node, "FSDPModule")
                yield node, MigrationStep(node, (edit,), ((FSDP, "FSDPModule"),))
            else:
                yield node, Blocked("FullyShardedDataParallel is used as a value")
    for node in ast.walk(script.tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in annotations:
            for part in ast.walk(annotation) if isinstance(annotation, ast.AST) else ():
                if isinstance(part, ast.Name) and part.id in _aliases(script) and part not in script.values:
                    edit = script.spans.replace(part, "FSDPModule")
                    yield part, MigrationStep(part, (edit,), ((FSDP, "FSDPModule"),))


def _aliases(script: Recorded) -> frozenset[str]:
    return frozenset(
        item.asname or item.name
        for node in ast.walk(script.tree)
        if isinstance(node, ast.ImportFrom)
        for item in node.names
        if item.name == FSDP1
    )


def _is_type(script: Recorded, node: ast.AST) -> bool:
    for inner, outer in zip((node, *script.around(node)), script.around(node), strict=False):
        if isinstance(outer, ast.Call):
            return (
                isinstance(outer.func, ast.Name) and outer.func.id == "isinstance" and inner is outer.args[1]
            )
        if isinstance(outer, ast.arg | ast.AnnAssign) and outer.annotation is inner:
            return True
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return outer.returns is inner
        if not isinstance(outer, ast.Tuple | ast.BinOp | ast.Subscript):
            return False
    return False


# Contexts


def _context(script: Recorded, statement: ast.With | ast.AsyncWith, made: ast.expr) -> MigrationStep | None:
    """Return what a context of FSDP1 becomes; None for any other context."""
    if isinstance(made, ast.Call):
        if _is_typed(script, made):
            _alone(statement)
            return MigrationStep(made, script.unwrap(statement, (), ()))
        if script.library(made.func) == f"{FSDP1}.summon_full_params":
            _alone(statement)
            return _summon(script, statement, made)
    found = _unsynchronised(script, made)
    if found is None:
        return None
    model, test, stored = found
    _alone(statement)
    switch = f"{model}.set_requires_gradient_sync"
    if _leaves(statement.body):
        raise Blocked(
            "the body leaves the block by itself: set_requires_gradient_sync has to be set on each way"
        )
    if stored is not None:
        edit = script.spans.replace(stored, f"{switch}({test})")
        return MigrationStep(made, (edit, *script.unwrap(statement, (), _after(script, statement, switch))))
    after = [f"{switch}(True)"] if test == "False" else _after(script, statement, switch)
    return MigrationStep(made, script.unwrap(statement, [f"{switch}({test})"], after))


def _after(script: Recorded, statement: ast.stmt, switch: str) -> list[str]:
    """Return what sets synchronisation again, where a backward outside of the block needs it."""
    inside = set(ast.walk(statement))
    other = any(call not in inside for call, _ in script.methods("backward"))
    return [f"{switch}(True)"] if other else []


def _may_be_replicated(script: Recorded, node: ast.expr) -> bool:
    """Say whether an expression is sometimes a DistributedDataParallel, which has ``no_sync`` as well."""
    return any(
        isinstance(item, Thing) and item.kind == "DistributedDataParallel"
        for value in script.values.get(node, ())
        for item in flat(value)
    )


def _alone(statement: ast.With | ast.AsyncWith) -> None:
    if len(statement.items) > 1:
        raise Blocked("the with has several contexts: give this one a with of its own")


def _unsynchronised(script: Recorded, made: ast.expr) -> tuple[str, str, ast.stmt | None] | None:
    """Return the model, when it synchronises, and the statement that stored the context, if one did."""
    stored: ast.stmt | None = None
    name = (
        made.func
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and not made.args
        else made
    )
    if isinstance(name, ast.Name):
        found = [
            item
            for item in ast.walk(script.scope(made))
            if isinstance(item, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == name.id for t in item.targets)
        ]
        if not any("no_sync" in ast.unparse(item.value) for item in found):
            return None
        uses = [
            item
            for item in ast.walk(script.scope(made))
            if isinstance(item, ast.Name) and item.id == name.id and isinstance(item.ctx, ast.Load)
        ]
        if len(found) != 1 or len(uses) != 1:
            raise Blocked(f"{name.id} is set or used in several places")
        stored, made = found[0], found[0].value
    if isinstance(made, ast.IfExp):
        yes, no = _model(script, made.body), _model(script, made.orelse)
        if yes is None and no is None:
            return None
        test = script.spans.of(made.test)
        return (yes, _negated(script, made.test), stored) if yes is not None else (str(no), test, stored)
    model = _model(script, made)
    return (model, "False", stored) if model is not None else None


def _model(script: Recorded, made: ast.expr) -> str | None:
    """Return the model whose ``no_sync`` an expression is."""
    node = made.func if isinstance(made, ast.Call) else made
    if not isinstance(node, ast.Attribute) or node.attr != "no_sync" or script.wrapped(node.value) is False:
        return None
    if script.wrapped(node.value) is None and not _aliases(script):
        return None
    if _may_be_replicated(script, node.value):
        raise Blocked("no_sync is called on a module that may be DistributedDataParallel")
    return script.spans.of(node.value)


_OPPOSITE = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip


def _negated(script: Recorded, test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return script.spans.of(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        start, end = script.spans.end(test.left), script.spans.start(test.comparators[0])
        between = script.spans.text[start:end]
        operator = _OPPOSITE[type(test.ops[0])]
        words = between.replace("(", "").replace(")", "").strip()
        # Brackets around an operand stand between the two as well.
        text = between.replace(words, operator, 1) if words in between else f" {operator} "
        return (
            script.spans.text[script.spans.start(test) : start]
            + text
            + script.spans.text[end : script.spans.end(test)]
        )
    text = script.spans.of(test)
    return f"not {text}" if isinstance(test, ast.Name | ast.Attribute | ast.Call) else f"not ({text})"


def _leaves(body: Sequence[ast.AST], loop: bool = False) -> bool:
    """Say whether statements leave the block that they stand in."""
    for node in body:
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            return True
        if isinstance(node, ast.Break | ast.Continue) and not loop:
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        inner = loop or isinstance(node, ast.For | ast.AsyncFor | ast.While)
        if _leaves(list(ast.iter_child_nodes(node)), inner):
            return True
    return False


def _summon(script: Recorded, statement: ast.With | ast.AsyncWith, made: ast.Call) -> MigrationStep:
    given = _given(made, "module", "recurse", "writeback")
    recurse, writeback = script.value(given.get("recurse")), script.value(given.get("writeback"))
    if "module" not in given or (isinstance(recurse, Const) and recurse.value is False):
        raise Blocked("full parameters of one unit alone: call unshard on it")
    if any(True for _ in script.calls("MixedPrecision", "MixedPrecisionPolicy")):
        raise Blocked("unshard gathers in the dtype of the policy: gather with get_model_state_dict")
    if not (isinstance(writeback, Const) and writeback.value is False) and _writes(statement.body):
        raise Blocked(
            "writes to the full parameters, which fully_shard does not keep: use set_model_state_dict"
        )
    if _leaves(statement.body):
        raise Blocked("the body leaves the block by itself")
    model, step = script.spans.of(given["module"]), script.step
    unit = script.fresh("unit", "fsdp_unit")

    def loop(method: str) -> list[str]:
        return [
            f"for {unit} in {model}.modules():",
            f"{step}if isinstance({unit}, FSDPModule):",
            f"{step}{step}{unit}.{method}()",
        ]

    edits = script.unwrap(statement, loop("unshard"), loop("reshard"))
    return MigrationStep(made, edits, ((FSDP, "FSDPModule"),))


def _writes(body: Sequence[ast.stmt]) -> bool:
    """Say whether statements may write to parameters."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                return True
            if isinstance(node, ast.Subscript | ast.AugAssign) and isinstance(
                getattr(node, "ctx", ast.Store()), ast.Store
            ):
                return True
            called = node.func if isinstance(node, ast.Call) else None
            method = called.attr if isinstance(called, ast.Attribute) else ""
            if method.endswith("_") or method in ("load_state_dict", "apply"):
                return True
    return False
