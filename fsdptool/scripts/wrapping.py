"""``FullyShardedDataParallel(...)`` as calls of ``fully_shard``: blocks by the policy, then the whole."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from fsdptool.records.diagnostic import Edit
from fsdptool.scripts.facts import FSDP1
from fsdptool.scripts.names import short
from fsdptool.scripts.recorded import Blocked, MigrationStep, Recorded, class_name, owner_of, reached
from fsdptool.scripts.signatures import SIGNATURES
from fsdptool.scripts.values import (
    Choice,
    Const,
    Function,
    Items,
    Library,
    Partial,
    Thing,
    Value,
    flat,
    made_by,
)

FSDP = "torch.distributed.fsdp"
STATE = "torch.distributed.checkpoint.state_dict"
MESH = "torch.distributed.device_mesh"
_NAMES = SIGNATURES[FSDP1].names
_DROPPED = ("use_orig_params", "limit_all_gathers", "backward_prefetch", "forward_prefetch", "device_id")


@dataclass
class _Wrapping:
    """One call of FSDP1 and what it becomes."""

    script: Recorded
    call: ast.Call
    given: dict[str, ast.expr]
    options: dict[str, str] = field(default_factory=dict)
    imports: list[tuple[str, str]] = field(default_factory=lambda: [(FSDP, "fully_shard")])
    notes: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        """Return the text of an argument."""
        return self.script.spans.of(self.given[name])

    def value(self, name: str) -> Value | None:
        """Return the value of an argument."""
        return self.script.value(self.given[name])


def wrappings(script: Recorded) -> list[tuple[ast.Call, MigrationStep | Blocked]]:
    """Return what each call of FSDP1 becomes, or why it cannot be written."""
    found: list[tuple[ast.Call, MigrationStep | Blocked]] = []
    for call in script.calls(FSDP1):
        try:
            found.append((call, _proposal(_Wrapping(script, call, _arguments(script, call)))))
        except Blocked as blocked:
            found.append((call, blocked))
    return found


def _arguments(script: Recorded, call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call by their names, those of a dictionary too."""
    given: dict[str, ast.expr] = {}
    for name, value in zip(_NAMES, call.args, strict=False):
        if isinstance(value, ast.Starred):
            raise Blocked("its arguments come from a list")
        given[name] = value
    for keyword in call.keywords:
        if keyword.arg is not None:
            given[keyword.arg] = keyword.value
        else:
            given |= _expanded(script, call, keyword.value)
    if "module" not in given:
        raise Blocked("its module is not written in the call")
    for name, value in given.items():
        if name not in _NAMES:
            raise Blocked(f"FullyShardedDataParallel has no argument {name}")
        if name != "module" and name not in _DROPPED and isinstance(script.value(value), Choice):
            chosen = script.value(value)
            kinds = {type(item) for item in flat(chosen)} - {Choice}
            if name not in ("mixed_precision", "cpu_offload") or not kinds <= {Thing, Const}:
                raise Blocked(f"{name} is decided at run time")
    constant = {name: script.value(value) for name, value in given.items()}
    return {
        name: value
        for name, value in given.items()
        if not (isinstance(item := constant[name], Const) and item.value is None)
    }


def _expanded(script: Recorded, call: ast.Call, node: ast.expr) -> dict[str, ast.expr]:
    """Return the items of a dictionary that a call expands."""
    if isinstance(node, ast.Name):
        scopes = (script.scope(call), script.tree)
        stored = [
            item
            for item in ast.walk(script.tree)
            if isinstance(item, ast.Assign)
            and script.scope(item) in scopes
            and any(isinstance(target, ast.Name) and target.id == node.id for target in item.targets)
        ]
        changed = any(
            isinstance(item, ast.Subscript | ast.Attribute)
            and isinstance(item.value, ast.Name)
            and item.value.id == node.id
            for item in ast.walk(script.tree)
        )
        if len(stored) != 1 or changed:
            raise Blocked(f"its arguments are decided at run time by {node.id}")
        node = stored[0].value
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
    named = isinstance(node, ast.Call) and all(keyword.arg is not None for keyword in node.keywords)
    if (
        isinstance(node, ast.Call)
        and named
        and script.library(node.func) == "builtins.dict"
        and not node.args
    ):
        return {str(keyword.arg): keyword.value for keyword in node.keywords}
    raise Blocked("its arguments are decided elsewhere")


def _proposal(wrapping: _Wrapping) -> MigrationStep:
    script, given = wrapping.script, wrapping.given
    test = _test(wrapping)
    _mesh(wrapping)
    _options(wrapping)
    statement = script.statement(wrapping.call)
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    whole = getattr(statement, "value", None) is wrapping.call
    assigned = isinstance(statement, ast.Assign | ast.AnnAssign) and len(targets) == 1
    module = wrapping.text("module")
    if not whole or not (assigned or isinstance(statement, ast.Return)):
        if test is not None or wrapping.before or _loads(wrapping):
            raise Blocked("stands inside another expression; give the wrapped model a name first")
        arguments = "".join(f", {name}={value}" for name, value in wrapping.options.items())
        edit = script.spans.replace(wrapping.call, f"fully_shard({module}{arguments})")
        return MigrationStep(wrapping.call, (edit,), tuple(wrapping.imports), tuple(wrapping.notes))
    if isinstance(statement, ast.Return):
        plain = isinstance(given["module"], ast.Name | ast.Attribute)
        name = module if plain else script.fresh("model", "sharded_model")
    else:
        name = script.spans.of(targets[0])
    return _written(wrapping, statement, name, test)


def _written(wrapping: _Wrapping, statement: ast.stmt, name: str, test: str | None) -> MigrationStep:
    """Return the statements that shard a module that has a name."""
    script = wrapping.script
    margin, step = script.indent(statement), script.step
    lines = _kept_comments(wrapping)
    if name != wrapping.text("module"):
        lines.append(f"{name} = {wrapping.text('module')}")
    loads = _loads(wrapping)
    weights = script.fresh("weights", "initial_weights")
    if loads:
        lines.append(f"{weights} = {name}.state_dict()")
    loop = _loop(script, statement)
    edits = [_ahead(script, loop, wrapping.before)] if loop is not None and wrapping.before else []
    lines += wrapping.before if not edits else []
    arguments = "".join(f", {key}={value}" for key, value in wrapping.options.items())
    if test is not None:
        unit = script.fresh("module", "block", "unit")
        if len(arguments) > 70:
            settings = script.fresh("sharding", "sharding_options")
            items = [f'{step}"{key}": {value},' for key, value in wrapping.options.items()]
            lines += [f"{settings} = {{", *items, "}"]
            arguments = f", **{settings}"
        lines.append(f"for {unit} in reversed(list({name}.modules())):")
        lines.append(f"{step}if {test.format(unit=unit)}:")
        lines.append(f"{step}{step}fully_shard({unit}{arguments})")
    lines.append(f"fully_shard({name}{arguments})")
    lines += _initialised(wrapping, name, loads, weights)
    if isinstance(statement, ast.Return):
        lines.append(f"return {name}")
    text = f"{script.spans.source.newline}{margin}".join(part for line in lines for part in line.split("\n"))
    edits.append(script.spans.replace(statement, text))
    return MigrationStep(wrapping.call, tuple(edits), tuple(wrapping.imports), tuple(wrapping.notes))


def _loop(script: Recorded, statement: ast.stmt) -> ast.stmt | None:
    """Return the outermost loop around a statement in its function: one mesh is enough for all units."""
    found = None
    for node in script.around(statement):
        if isinstance(node, ast.For | ast.While):
            found = node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            break
    return found


def _ahead(script: Recorded, loop: ast.stmt, lines: list[str]) -> Edit:
    """Return the edit that writes lines before a loop."""
    margin, at = (
        script.spans.text[script.spans.line_span(loop)[0] : script.spans.start(loop)],
        script.spans.line_span(loop)[0],
    )
    return Edit(at, at, "".join(margin + line + script.spans.source.newline for line in lines))


def _kept_comments(wrapping: _Wrapping) -> list[str]:
    """Return the comments of a call that are about arguments that remain."""
    call = wrapping.call
    arguments = sorted(
        [*((None, item) for item in call.args), *((item.arg, item.value) for item in call.keywords)],
        key=lambda item: item[1].lineno,
    )
    kept = []
    for line, comment in wrapping.script.comments(call):
        about = [name for name, item in arguments if (item.end_lineno or item.lineno) >= line]
        if not about or about[0] not in _DROPPED:
            kept.append(comment)
    return kept


def _test(wrapping: _Wrapping) -> str | None:
    """Return the condition under which a module is a unit, or None where there are no inner units."""
    if "auto_wrap_policy" not in wrapping.given:
        return None
    script, policy = wrapping.script, wrapping.value("auto_wrap_policy")
    name = short(policy.name) if isinstance(policy, Library) else ""
    keywords = dict[str, Value]()
    if isinstance(policy, Partial) and isinstance(policy.function, Library):
        name, keywords = short(policy.function.name), dict(policy.keywords)
    elif isinstance(policy, Thing):
        name = policy.kind
    if name == "transformer_auto_wrap_policy":
        return _isinstance(wrapping, keywords.get("transformer_layer_cls"))
    if name == "ModuleWrapPolicy" and isinstance(policy, Thing):
        given = policy.args[0] if policy.args else policy.keywords.get("module_classes")
        return _isinstance(wrapping, given)
    if name == "size_based_auto_wrap_policy":
        raise Blocked(
            "wraps by size, which fully_shard does not do: name the classes of the blocks (fsdptool detect)"
        )
    function = keywords.get("lambda_fn") if name == "lambda_auto_wrap_policy" else policy
    if isinstance(function, Function) and function.bound is None:
        return _by_function(script, function, whole=name == "lambda_auto_wrap_policy")
    what = name or "the policy"
    raise Blocked(f"{what} cannot be written as a condition on a module: name the classes of the blocks")


def _isinstance(wrapping: _Wrapping, classes: Value | None) -> str:
    values = list(classes.values) if isinstance(classes, Items) else [classes]
    found: list[str] = []
    for value in values:
        name = class_name(wrapping.script, value) or _near(wrapping, getattr(value, "node", None))
        if name is None:
            raise Blocked("the classes of its policy come from elsewhere")
        found.append(name)
    if not found:
        raise Blocked("its policy names no class")
    found.sort()
    if owner_of(wrapping.value("module")) in found:
        raise Blocked("its policy names the class of the model itself")
    return f"isinstance({{unit}}, {found[0] if len(found) == 1 else '(' + ', '.join(found) + ')'})"


def _near(wrapping: _Wrapping, node: ast.AST | None) -> str | None:
    """Return the text of an expression or a parameter that the function of the call, or the module, has."""
    script = wrapping.script
    if node not in script.parents or script.scope(node) not in (script.scope(wrapping.call), script.tree):
        return None
    if isinstance(node, ast.arg):
        return node.arg
    return script.spans.of(node) if isinstance(node, ast.expr) else None


def _by_function(script: Recorded, function: Function, *, whole: bool) -> str:
    """Return the condition that a function of the script decides.

    Args:
        script: The script.
        function: The policy, or the function of a lambda policy.
        whole: Whether it takes the module alone.
    """
    node = function.node
    arguments = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
    if isinstance(node, ast.Lambda):
        inner = script.spans.of(node)
        if not whole:
            raise Blocked("its policy is a lambda that also decides where to look")
        return f"({inner.replace('{', '{{').replace('}', '}}')})({{unit}})"
    if node not in script.tree.body:
        raise Blocked("its policy is a function inside of another one")
    if whole:
        return f"{node.name}({{unit}})"
    first = next((item for item in node.body if not _is_text(item)), None)
    looks = isinstance(first, ast.If) and isinstance(first.test, ast.Name) and len(arguments) > 1
    if not looks or not isinstance(first, ast.If) or first.test.id != arguments[1]:  # type: ignore[attr-defined]
        raise Blocked("its policy decides by itself where to look for blocks")
    read = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    if len(arguments) > 2 and arguments[2] in read:
        raise Blocked("its policy depends on the number of parameters that are not wrapped yet")
    rest = f", {arguments[2]}=0" if len(arguments) > 2 else ""
    return f"{node.name}({{unit}}, {arguments[1]}=False{rest})"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _device(wrapping: _Wrapping) -> str:
    """Return the kind of device that the model is on."""
    device = wrapping.value("device_id") if "device_id" in wrapping.given else None
    first = (
        device.args[0]
        if isinstance(device, Thing) and device.kind == "torch.device" and device.args
        else device
    )
    return "cpu" if isinstance(first, Const) and str(first.value).startswith("cpu") else "cuda"


def _mesh(wrapping: _Wrapping) -> None:
    """Write the processes that share a model as a mesh."""
    script, given = wrapping.script, wrapping.given
    device = _device(wrapping)
    strategy = wrapping.value("sharding_strategy") if "sharding_strategy" in given else None
    name = strategy.name.rpartition(".")[2] if isinstance(strategy, Library) else ""
    if "sharding_strategy" in given and not name:
        raise Blocked("the sharding strategy is decided at run time")
    if name == "NO_SHARD":
        raise Blocked("NO_SHARD does not shard: use DistributedDataParallel")
    if name not in ("", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        raise Blocked(f"there is no sharding strategy {name}")
    hybrid = "HYBRID" in name
    if "device_mesh" in given:
        wrapping.options["mesh"] = wrapping.text("device_mesh")
        if hybrid:
            wrapping.notes.append("the mesh needs the names of both dimensions, the replicated one first")
    elif "process_group" in given:
        if hybrid:
            raise Blocked("hybrid sharding over process groups: make a mesh of two dimensions")
        wrapping.imports.append((MESH, "DeviceMesh"))
        wrapping.options["mesh"] = script.fresh("mesh", "fsdp_mesh")
        group = wrapping.text("process_group")
        wrapping.before.append(f'{wrapping.options["mesh"]} = DeviceMesh.from_group({group}, "{device}")')
    elif hybrid or device == "cpu":
        world, needed = reached(script, "torch.distributed", "get_world_size")
        wrapping.imports += [(MESH, "init_device_mesh"), *needed]
        wrapping.options["mesh"] = mesh = script.fresh("mesh", "fsdp_mesh")
        if hybrid:
            local = script.fresh("gpus_per_node", "fsdp_gpus_per_node")
            count, needed = reached(script, "torch.cuda", "device_count")
            wrapping.imports += needed
            wrapping.before += [
                f"{local} = {count}()",
                f"{mesh} = init_device_mesh(",
                f'{script.step}"cuda",',
                f"{script.step}({world}() // {local}, {local}),",
                f'{script.step}mesh_dim_names=("replicate", "shard"),',
                ")",
            ]
            wrapping.notes.append("one replica is kept on each node, as FSDP1 does")
        else:
            wrapping.before.append(f'{mesh} = init_device_mesh("cpu", ({world}(),))')
    if name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        wrapping.options["reshard_after_forward"] = "False"


def _options(wrapping: _Wrapping) -> None:
    """Write precision, offload and ignored parameters as arguments of ``fully_shard``."""
    script, given = wrapping.script, wrapping.given
    for name, kind, new in (
        ("mixed_precision", "MixedPrecision", "mp_policy"),
        ("cpu_offload", "CPUOffload", "offload_policy"),
    ):
        if name not in given:
            continue
        value = wrapping.value(name)
        options = [item for item in flat(value) if not isinstance(item, Choice)] if value is not None else []
        if not options or any(
            made_by(item, kind) is None and not (isinstance(item, Const) and item.value is None)
            for item in options
        ):
            raise Blocked(f"{name} is not made in this script")
        empty = {"mp_policy": "MixedPrecisionPolicy()", "offload_policy": "OffloadPolicy()"}[new]
        text = wrapping.text(name)
        if len(options) > 1:
            wrapping.imports.append((FSDP, empty[:-2]))
            text = f"{text} or {empty}"
        wrapping.options[new] = text
        if name == "cpu_offload":
            wrapping.notes.append(
                "with CPUOffloadPolicy the weights stay on the CPU: do not move the model after sharding, "
                'and start the processes with "cpu:gloo,cuda:nccl" to clip gradients'
            )
    if "ignored_modules" in given:
        item, parameter = (
            script.fresh("ignored", "ignored_module"),
            script.fresh("parameter", "ignored_parameter"),
        )
        modules = wrapping.text("ignored_modules")
        wrapping.options["ignored_params"] = (
            f"{{{parameter} for {item} in {modules} for {parameter} in {item}.parameters()}}"
        )
    if "ignored_states" in given:
        raise Blocked("ignored_states may be modules or parameters: give ignored_modules")
    prefetch = script.value(given["forward_prefetch"]) if "forward_prefetch" in given else None
    if isinstance(prefetch, Const) and prefetch.value is True:
        wrapping.notes.append("forward_prefetch is dropped: set_modules_to_forward_prefetch chooses modules")


def _loads(wrapping: _Wrapping) -> str:
    """Return the condition under which rank 0 gives the others its weights; an empty text: never."""
    if "sync_module_states" not in wrapping.given:
        return ""
    value = wrapping.value("sync_module_states")
    if isinstance(value, Const):
        return "True" if value.value else ""
    return wrapping.text("sync_module_states")


def _initialised(wrapping: _Wrapping, name: str, loads: str, weights: str) -> list[str]:
    """Return the statements that fill the weights after sharding."""
    script, given = wrapping.script, wrapping.given
    lines: list[str] = []
    device = wrapping.text("device_id") if "device_id" in given else f'"{_device(wrapping)}"'
    if "param_init_fn" in given:
        lines.append(f"{name}.to_empty(device={device})")
        wrapping.notes.append("to_empty also empties buffers that are not saved: compute them again")
        if not loads:
            part, function = script.fresh("part", "submodule"), wrapping.text("param_init_fn")
            called = (
                function if isinstance(given["param_init_fn"], ast.Name | ast.Attribute) else f"({function})"
            )
            lines += [f"for {part} in {name}.modules():", f"{script.step}{called}({part})"]
    if loads:
        wrapping.imports += [(STATE, "StateDictOptions"), (STATE, "set_model_state_dict")]
        lines.append(
            f"set_model_state_dict(\n{script.step}{name}, {weights}, "
            "options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)\n)"
        )
        if loads != "True":
            lines = [f"if {loads}:", *(script.step + part for line in lines for part in line.split("\n"))]
    return lines


def definitions(script: Recorded) -> list[tuple[ast.Call, MigrationStep | Blocked]]:
    """Return what ``MixedPrecision(...)`` and ``CPUOffload(...)`` become."""
    found: list[tuple[ast.Call, MigrationStep | Blocked]] = []
    for call in script.calls("MixedPrecision"):
        arguments = dict(zip(SIGNATURES["MixedPrecision"].names, call.args, strict=False))
        arguments |= {item.arg: item.value for item in call.keywords if item.arg is not None}
        if len(arguments) < len(call.args) + len(call.keywords):
            found.append((call, Blocked("the dtypes of MixedPrecision are decided elsewhere")))
            continue
        kept = [
            f"{name}={script.spans.of(arguments[name])}"
            for name in ("param_dtype", "reduce_dtype")
            if name in arguments
        ]
        notes = tuple(
            f"{name} is dropped: {why}"
            for name, why in (
                ("buffer_dtype", "buffers keep their dtype; cast them before sharding if they must change"),
                ("keep_low_precision_grads", "gradients have the dtype of the stored weights"),
                ("_module_classes_to_ignore", "give such modules a unit with a policy of its own"),
            )
            if name in arguments
        )
        edits = _rewritten(script, call, "MixedPrecisionPolicy", kept)
        found.append((call, MigrationStep(call, edits, ((FSDP, "MixedPrecisionPolicy"),), notes)))
    for call in script.calls("CPUOffload"):
        given = call.args[0] if call.args else next((item.value for item in call.keywords), None)
        value = script.value(given)
        on, off = "CPUOffloadPolicy()", "OffloadPolicy()"
        if given is None or isinstance(value, Const):
            text = on if isinstance(value, Const) and value.value else off
            needed: tuple[tuple[str, str], ...] = ((FSDP, text[:-2]),)
        else:
            text = f"({on} if {script.spans.of(given)} else {off})"
            needed = ((FSDP, on[:-2]), (FSDP, off[:-2]))
        found.append((call, MigrationStep(call, (script.spans.replace(call, text),), needed)))
    return found


def _rewritten(script: Recorded, call: ast.Call, name: str, kept: list[str]) -> tuple[Edit, ...]:
    """Return the edits that rename a call and remove arguments; comments on the others stay."""
    edits = [script.spans.replace(call.func, name)]
    if call.args:
        start = script.spans.end(call.func)
        return edits[0], Edit(start, script.spans.end(call), f"({', '.join(kept)})")
    gone = [item for item in call.keywords if item.arg not in ("param_dtype", "reduce_dtype")]
    if len(gone) == len(call.keywords) and gone:
        return edits[0], Edit(script.spans.end(call.func), script.spans.end(call), "()")
    return *edits, *script.spans.drop(gone, call.keywords)
