"""Rules on arguments, imports and policies: what a version does not have, or takes in another form."""

from __future__ import annotations

import ast

from fsdptool.scripts.facts import FSDP1, Facts
from fsdptool.scripts.names import short
from fsdptool.scripts.rules.table import BLOCKS, SHARD, TORCH, WRAP, Report, rule
from fsdptool.scripts.signatures import (
    DEPRECATED,
    PUBLIC,
    PUBLIC_SINCE,
    REMOVED,
    RENAMED,
    SIGNATURES,
    is_older,
)
from fsdptool.scripts.spans import Change
from fsdptool.scripts.values import (
    Const,
    Event,
    Items,
    Library,
    Partial,
    Value,
    constant,
    is_constant,
    made_by,
)

_POLICIES = (
    "from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy, size_based_auto_wrap_policy\n"
)
_PARTIAL = "from functools import partial\n"

RULES = (
    rule(610, "unknown-argument", "error",
         "The call has no argument of this name in the version that the script is judged for: TypeError. "
         "Most are "
         "arguments of FSDP1 that `fully_shard` never had, or of an older transformers.",
         "Write what the message names. `--target torch==2.9` judges for another version.",
         TORCH + SHARD + "from torch.distributed.fsdp import MixedPrecisionPolicy\n\ndef main(model):\n"
         "    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n"
         "    for block in model.blocks:\n        fully_shard(block, mp_policy=policy)\n",
         "    fully_shard(model, mixed_precision=policy)\n", "    fully_shard(model, mp_policy=policy)\n",
         safety="safe"),
    rule(611, "wrong-argument-value", "error",
         "The argument takes an object or another type: a boolean as `cpu_offload` or `mixed_precision` "
         "of FSDP1 is an "
         "AttributeError, a text as `sharding_strategy` a KeyError, a text as `reshard_after_forward` a "
         "ValueError "
         "(torch 2.13).",
         "Pass `CPUOffload(...)`, `MixedPrecision(...)`, `ShardingStrategy.FULL_SHARD`; True, False or a "
         "number.",
         WRAP + "from torch.distributed.fsdp import ShardingStrategy\n"
         "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n\ndef main(model, block):\n"
         "    policy = ModuleWrapPolicy({block})\n",
         '    return FSDP(model, auto_wrap_policy=policy, sharding_strategy="FULL_SHARD")\n',
         "    return FSDP(model, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.FULL_SHARD)\n"),
    rule(612, "fsdp1-object-in-fsdp2", "error",
         "`fully_shard` accepts the FSDP1 object, and the first forward fails: `MixedPrecision` has no "
         "attribute "
         "`output_dtype` (torch 2.13, two gloo ranks).",
         "Use MixedPrecisionPolicy and CPUOffloadPolicy.",
         TORCH + SHARD + "from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy\n\n"
         "def main(model):\n    for block in model.blocks:\n        fully_shard(block)\n",
         "    fully_shard(model, mp_policy=MixedPrecision(param_dtype=torch.bfloat16))\n",
         "    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))\n"),
    rule(613, "import-removed", "error",
         "The version that the script is judged for does not have this name: ImportError, or "
         "AttributeError for a "
         "name in a class.",
         "Import what the message names.",
         "", "from torch.distributed.fsdp.wrap import default_auto_wrap_policy\n",
         "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy\n"),
    rule(614, "import-deprecated", "info",
         "The name still works in torch 2.13; it is private, or warns that it will be removed.",
         "Use the public name.",
         "", "from torch.distributed._composable.fsdp import fully_shard\n", SHARD, safety="safe"),
    rule(615, "sharding-failure-swallowed", "warning",
         "If sharding fails, the handler goes on with the plain model: every rank trains a model of its "
         "own, or runs "
         "out of memory far from the cause.",
         "Let the failure end the run.",
         SHARD + "\ndef main(model):\n",
         "    try:\n        fully_shard(model.layers[0])\n        fully_shard(model)\n"
         "    except Exception as error:\n        print(error)\n",
         "    fully_shard(model.layers[0])\n    fully_shard(model)\n"),
    rule(616, "policy-not-bound", "error",
         "`transformer_auto_wrap_policy` needs the classes of the blocks. FSDP calls it without them: "
         "TypeError.",
         "Bind them: `partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})`, or use "
         "`ModuleWrapPolicy({Block})`.",
         WRAP + _POLICIES + _PARTIAL + "\ndef main(model, block):\n",
         "    return FSDP(model, auto_wrap_policy=transformer_auto_wrap_policy)\n",
         "    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={block})\n"
         "    return FSDP(model, auto_wrap_policy=policy)\n"),
    rule(617, "policy-default-threshold", "warning",
         "`size_based_auto_wrap_policy` wraps modules of more than 100 million parameters by default: "
         "most models stay "
         "one unit, which is gathered as a whole.",
         "Bind a smaller threshold (`partial(..., min_num_params=1_000_000)`), or wrap by class.",
         WRAP + _POLICIES + _PARTIAL + "\ndef main(model):\n",
         "    return FSDP(model, auto_wrap_policy=size_based_auto_wrap_policy)\n",
         "    policy = partial(size_based_auto_wrap_policy, min_num_params=1_000_000)\n"
         "    return FSDP(model, auto_wrap_policy=policy)\n"),
    rule(618, "wrap-outside-context", "warning",
         "`wrap` returns the module unchanged unless it is called inside `enable_wrap`.",
         "Call it inside `with enable_wrap(wrapper_cls=FSDP):`, or drop it.",
         TORCH + WRAP + "from torch.distributed.fsdp.wrap import enable_wrap, wrap\n",
         "layer = wrap(torch.nn.Linear(8, 8))\n",
         "with enable_wrap(wrapper_cls=FSDP):\n    layer = wrap(torch.nn.Linear(8, 8))\n", safety="safe"),
    rule(619, "hsdp-mesh-unnamed", "error",
         "`fully_shard` on a mesh with two dimensions needs their names: AssertionError (torch 2.13).",
         'Name both, the replicated one first: `mesh_dim_names=("replicate", "shard")`.',
         SHARD + "from torch.distributed.device_mesh import init_device_mesh\n\ndef main(model):\n",
         '    mesh = init_device_mesh("cuda", (2, 4))\n'
         + BLOCKS.replace("(block)", "(block, mesh=mesh)").replace("(model)", "(model, mesh=mesh)"),
         '    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))\n'
         + BLOCKS.replace("(block)", "(block, mesh=mesh)").replace("(model)", "(model, mesh=mesh)")),
)  # fmt: skip


def check(facts: Facts, report: Report) -> None:
    """Report arguments, imports and policies that do not exist or have no effect."""
    for event in facts.of_kind("call"):
        _arguments(facts, event, report)
        _values(event, report)
        _removed_attribute(event, report)
    _imports(facts, report)
    _policies(facts, report)
    for event, _ in facts.shardings:
        _swallowed(facts, event, report)
        mesh = made_by(event.get("mesh", 1), "init_device_mesh")
        shape = (
            mesh.args[1] if mesh is not None and len(mesh.args) > 1 else facts.option_of(mesh, "mesh_shape")
        )
        named = mesh is not None and ("mesh_dim_names" in mesh.keywords or len(mesh.args) > 2)
        if mesh is not None and not named and isinstance(shape, Items) and len(shape.values) == 2:
            report("FSD619", mesh.node or event.node, "the mesh of two dimensions has no mesh_dim_names")
    for event in facts.calls("wrap"):
        if facts.path.own is None and not event.stack and not event.contexts:
            call = event.node
            plain = isinstance(call, ast.Call) and len(call.args) == 1 and not call.keywords
            report(
                "FSD618", call, "wrap is called outside of enable_wrap and does nothing",
                Change(call, by=call.args[0]) if plain and isinstance(call, ast.Call) else None,
            )  # fmt: skip


def _arguments(facts: Facts, event: Event, report: Report) -> None:
    signature = SIGNATURES.get(event.name)
    if signature is None or (event.name.endswith("Trainer") and facts.imports("unsloth")):
        return  # unsloth gives TRL's trainers the arguments of earlier versions back
    version = facts.versions.get(signature.package, "0")
    shown = ".".join(version.split(".")[:2])
    for name in event.keywords:
        if signature.lacks(name, version):
            instead = signature.instead.get(name)
            advice = f"; use {instead}" if instead and not instead.startswith("nothing") else ""
            why = f" ({instead})" if instead and instead.startswith("nothing") else ""
            message = f"{event.name} has no argument {name} in {signature.package} {shown}{advice}{why}"
            report("FSD610", event.places.get(name, event.node), message, _repair(event, name))
    if signature.positional is not None and len(event.args) > signature.positional:
        message = f"{event.name} takes one argument by position; write the others by name"
        report("FSD610", event.node, message)
    if event.name == "FullyShardedDataParallelPlugin" and constant(event.get("fsdp_version")) == 2:
        strategy = event.keywords.get("sharding_strategy")
        if strategy is not None and not is_constant(strategy, None):
            report("FSD610", event.places["sharding_strategy"],
                   "FSDP2 has no sharding_strategy; use reshard_after_forward=True or False")  # fmt: skip


def _repair(event: Event, name: str) -> Change | None:
    """Return what repairs an argument that does not exist, if there is one thing that it can mean."""
    place, call = event.places.get(name), event.node
    if not isinstance(place, ast.keyword) or not isinstance(call, ast.Call):
        return None
    if event.name == "fully_shard":
        for wanted, kinds in (
            ("mp_policy", ("MixedPrecisionPolicy",)),
            ("offload_policy", ("CPUOffloadPolicy", "OffloadPolicy")),
        ):
            if made_by(event.keywords[name], *kinds) is not None:
                return Change(place, wanted, call)
    new = RENAMED.get(event.name, {}).get(name)
    if new is None or new in event.keywords:
        return None
    offloads = name != "offload_params" or is_constant(event.keywords[name], True)
    return Change(place, new or None, call) if offloads else None


_OBJECTS = {
    "cpu_offload": "CPUOffload(offload_params=True)",
    "mixed_precision": "MixedPrecision(...)",
    "sharding_strategy": "ShardingStrategy.FULL_SHARD or another member",
    "auto_wrap_policy": "a function or ModuleWrapPolicy({Block})",
}


def _values(event: Event, report: Report) -> None:
    if event.name == FSDP1:
        for name, wanted in _OBJECTS.items():
            value = event.keywords.get(name)
            wrong = isinstance(value, Const) and (isinstance(value.value, str) or value.value is True)
            if wrong and isinstance(value, Const):
                report(
                    "FSD611", event.places[name], f"{name}={value.value!r} is not an object; pass {wanted}"
                )
    elif event.name == "fully_shard":
        value = event.keywords.get("reshard_after_forward")
        if isinstance(value, Const) and isinstance(value.value, str):
            report("FSD611", event.places["reshard_after_forward"],
                   f"reshard_after_forward={value.value!r} is a text; pass True, False or a "
                   f"number")  # fmt: skip
        for key, old, new in (
            ("mp_policy", "MixedPrecision", "MixedPrecisionPolicy"),
            ("offload_policy", "CPUOffload", "CPUOffloadPolicy"),
        ):
            if made_by(event.keywords.get(key), old) is not None:
                report("FSD612", event.places[key], f"{key} is a {old} of FSDP1; pass a {new}")
    elif event.name == "FullyShardedDataParallelPlugin" and constant(event.get("fsdp_version")) == 2:
        value = event.keywords.get("reshard_after_forward")
        if (
            isinstance(value, Const)
            and isinstance(value.value, str)
            and value.value.lower() not in ("true", "false")
        ):
            report("FSD611", event.places["reshard_after_forward"],
                   f"reshard_after_forward={value.value!r} is a name of FSDP1; pass True or "
                   f"False")  # fmt: skip


_ATTRIBUTES = {f"{FSDP1}.StateDictType": "import StateDictType from torch.distributed.fsdp"}


def _removed_attribute(event: Event, report: Report) -> None:
    for value in (*event.args, *event.keywords.values()):
        if isinstance(value, Library) and f".{FSDP1}.StateDictType" in value.name:
            report(
                "FSD613", event.node, f"{FSDP1} has no StateDictType; {_ATTRIBUTES[f'{FSDP1}.StateDictType']}"
            )


def _imports(facts: Facts, report: Report) -> None:
    version = facts.versions.get("torch", "0")
    shown = ".".join(version.split(".")[:2])
    for event in facts.events[facts.path.own or 0 :]:
        if event.kind != "import" or event.tries or event.guards:
            continue
        for name, (gone, instead) in REMOVED.items():
            if (event.name == name or event.name.startswith(f"{name}.")) and not is_older(version, gone):
                if name.endswith("_composable.fully_shard") and event.name != name:
                    continue
                report("FSD613", event.node, f"torch {shown} has no {name}; use {instead}")
                break
        else:
            for module, instead in DEPRECATED.items():
                late = is_older(version, PUBLIC_SINCE)
                if event.name.startswith(f"{module}.") and not late:
                    moved = _is_public(event.node, module, instead)
                    change = Change(event.node, instead) if moved else None
                    report("FSD614", event.node, f"{module} is private; import from {instead}", change)
    for event in facts.calls("dcp.save_state_dict", "dcp.load_state_dict", f"{FSDP1}.state_dict_type"):
        if event.name.startswith("dcp"):
            public = event.name.removesuffix("_state_dict")
            report("FSD614", event.node, f"{event.name} is deprecated; use {public}")


def _is_public(node: ast.AST, module: str, instead: str) -> bool:
    """Say whether all that a statement imports from a private module exists in the public one."""
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == module
        and all(item.name in PUBLIC[instead] for item in node.names)
    )


def _policies(facts: Facts, report: Report) -> None:
    for event in facts.calls(FSDP1):
        policy = event.get("auto_wrap_policy")
        place = event.places.get("auto_wrap_policy", event.node)
        name, bound = _policy(policy)
        if name == "transformer_auto_wrap_policy" and "transformer_layer_cls" not in bound:
            report("FSD616", place, "transformer_auto_wrap_policy does not know the classes of the blocks")
        elif name == "size_based_auto_wrap_policy" and "min_num_params" not in bound:
            report(
                "FSD617",
                place,
                "the default threshold of size_based_auto_wrap_policy is 100 million parameters",
            )
    for event in facts.calls("transformer_auto_wrap_policy", "size_based_auto_wrap_policy"):
        given = set(event.keywords) | {f"{index}" for index, _ in enumerate(event.args)}
        if not event.partly and not given & {"module", "0"} and event.name.startswith("transformer"):
            report("FSD616", event.node, "the policy is called here instead of being bound with partial")


def _policy(value: Value | None) -> tuple[str, frozenset[str]]:
    """Return the function of a policy, with the names of the arguments that are bound."""
    if isinstance(value, Partial):
        name, bound = _policy(value.function)
        return name, bound | frozenset(value.keywords) | (
            frozenset({"min_num_params"}) if value.args else frozenset()
        )
    return (short(value.name) if isinstance(value, Library) else ""), frozenset()


_BROAD = ("Exception", "BaseException", "RuntimeError")


def _swallowed(facts: Facts, event: Event, report: Report) -> None:
    for statement in event.tries:
        if not any(item is event.node for body in statement.body for item in ast.walk(body)):
            continue
        goes_on = [handler for handler in statement.handlers if _is_broad(handler) and not _ends(handler)]
        if goes_on and not statement.finalbody:
            report("FSD615", event.node, f"{facts.place(goes_on[0])} goes on with an unsharded model")


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or (isinstance(handler.type, ast.Name) and handler.type.id in _BROAD)


def _ends(handler: ast.ExceptHandler) -> bool:
    """Say whether a handler ends the run, or shards in another way."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise | ast.Return):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("exit", "_exit", "quit", "abort", "fully_shard", "FSDP", FSDP1) or "shard" in name:
                return True
    return False
