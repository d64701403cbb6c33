"""Rules on the order of sharding, optimizers, weights, checkpointing and compiling."""

from __future__ import annotations

from collections.abc import Iterator

from fsdptool.scripts.facts import Facts, is_inside, label
from fsdptool.scripts.rules.table import BLOCKS, SHARD, TORCH, Report, rule
from fsdptool.scripts.values import (
    Event,
    Library,
    Thing,
    Value,
    constant,
    is_constant,
    made_by,
    origins,
    precedes,
)

_DEF = TORCH + SHARD + "\ndef main(model, batch):\n"
_ADAM = "    optimizer = torch.optim.AdamW(model.parameters())\n"

RULES = (
    rule(601, "optimizer-before-sharding", "error",
         "`fully_shard` replaces the parameters of the module. An optimizer that was made before holds "
         "the old ones: "
         "their gradients stay None, `step()` does nothing, no error appears and the weights never change "
         "(torch "
         "2.13, two gloo ranks). FSDP1 with flat parameters does the same; with `use_orig_params=True` it "
         "trains.",
         "Shard the model, materialise it if it is on the meta device, and make the optimizer last.",
         _DEF, _ADAM + BLOCKS, BLOCKS + _ADAM),
    rule(602, "parameters-captured-before-sharding", "error",
         "A list of parameters that was collected before sharding holds the old parameters: an optimizer "
         "over it "
         "trains nothing, and gradient clipping over it returns 0.0 (torch 2.13, two gloo ranks).",
         "Collect the parameters after sharding.",
         _DEF, "    weights = [p for p in model.parameters() if p.ndim > 1]\n" + BLOCKS
         + "    optimizer = torch.optim.AdamW(weights)\n",
         BLOCKS + "    weights = [p for p in model.parameters() if p.ndim > 1]\n"
         + "    optimizer = torch.optim.AdamW(weights)\n"),
    rule(603, "optimizer-after-forward", "error",
         "After a forward the root of FSDP2 stays gathered. An optimizer that is made then holds the "
         "gathered "
         "parameters of the root: the root never trains, the blocks do (torch 2.13; pytorch issue 149205).",
         "Make the optimizer before the first forward, or call `model.reshard()` first.",
         _DEF, BLOCKS + "    model(batch)\n" + _ADAM, BLOCKS + _ADAM + "    model(batch)\n"),
    rule(604, "sharded-top-down", "error",
         "The root takes every parameter that no unit has yet. `fully_shard` of a part after that finds "
         "none: torch "
         "2.13 raises `TypeError: Invariant encountered: value was None`.",
         "Shard the blocks first and the root last.",
         _DEF, "    fully_shard(model)\n    for block in model.blocks:\n        "
               "fully_shard(block)\n", BLOCKS),
    rule(605, "checkpointing-after-sharding", "info",
         "Checkpoint wrappers around FSDP2 units give the same gradients in torch 2.13, but names of "
         "parameters gain "
         "`_checkpoint_wrapped_module.`, and older versions gather once more.",
         "Apply activation checkpointing before `fully_shard`.",
         TORCH + SHARD + "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import "
         "apply_activation_checkpointing\n\ndef main(model):\n",
         BLOCKS + "    apply_activation_checkpointing(model)\n",
         "    apply_activation_checkpointing(model)\n" + BLOCKS),
    rule(606, "compile-before-sharding", "info",
         "`torch.compile(model)` before `fully_shard` works, but every name in the state dict begins with "
         "`_orig_mod.`.",
         "Compile the blocks in place (`block.compile()`) before sharding, or the model after it.",
         _DEF, "    model = torch.compile(model)\n" + BLOCKS, BLOCKS + "    model = torch.compile(model)\n"),
    rule(607, "cast-after-forward", "warning",
         "Casting an FSDP2 module after its first forward leaves buffers of the old dtype: `RuntimeError: "
         "Expected out "
         "tensor to have dtype` in the next forward (torch 2.13). Before the first forward it works.",
         "Cast before sharding, or set the dtypes with MixedPrecisionPolicy.",
         _DEF, BLOCKS + "    model(batch)\n    model.to(torch.bfloat16)\n",
         "    model.to(torch.bfloat16)\n" + BLOCKS + "    model(batch)\n"),
    rule(608, "copy-after-sharding", "error",
         "`copy.deepcopy` of an FSDP2 module raises `AssertionError: FSDP does not support deepcopy` "
         "(torch 2.13).",
         "Copy the module first, and shard both.",
         "import copy\n" + SHARD + "\ndef main(model):\n", BLOCKS + "    average = copy.deepcopy(model)\n",
         "    average = copy.deepcopy(model)\n" + BLOCKS),
    rule(609, "prepare-apart", "error",
         "With FSDP2 accelerate 1.15 exchanges the parameters in the optimizer while it shards the model, "
         "and raises "
         "`ValueError: a model and optimizer must be passed together` if one of them is missing.",
         "Pass the model and the optimizer to one call: `accelerator.prepare(model, optimizer)`.",
         TORCH + "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
         "from transformers import AutoModelForCausalLM\n"
         "accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))\n"
         'model = AutoModelForCausalLM.from_pretrained("gpt2")\n'
         "optimizer = torch.optim.AdamW(model.parameters())\n",
         "model = accelerator.prepare(model)\noptimizer = accelerator.prepare(optimizer)\n",
         "model, optimizer = accelerator.prepare(model, optimizer)\n"),
)  # fmt: skip


def check(facts: Facts, report: Report) -> None:
    """Report what happens in a wrong order."""
    _optimizers(facts, report)
    _captured(facts, report)
    _nested(facts, report)
    _wrapping(facts, report)
    _after_forward(facts, report)
    _prepared(facts, report)


def _prepared_things(facts: Facts) -> set[int]:
    """Return what accelerate prepares: it exchanges parameters by itself."""
    events = (event for event in facts.events if event.kind == "method" and event.name.startswith("prepare"))
    return {id(item) for event in events for value in event.args for item in origins(value)}


def _flattens(event: Event) -> bool:
    """Say whether an FSDP1 wrapper certainly replaces the parameters."""
    return "use_orig_params" not in event.keywords or is_constant(event.keywords["use_orig_params"], False)


def _replacements(facts: Facts) -> Iterator[tuple[Event, Thing]]:
    """Yield what replaces the parameters of modules."""
    yield from facts.shardings
    for event, inner in facts.wrappers:
        if _flattens(event) and not event.partly:
            yield event, inner


def _optimizers(facts: Facts, report: Report) -> None:
    prepared = _prepared_things(facts)
    for event in facts.optimizers:
        given = event.argument or event.get("params")
        module = made_by(given, "parameters", "named_parameters")
        direct = module is not None and module.node is not None and _within(module.node, event.node)
        filtered = made_by(given, "comprehension", "result", "builtins.filter")
        owner = module.parent if module is not None and direct else None
        if owner is None and filtered is not None and _within(filtered.node, event.node):
            owner = facts.module_of(given)
        if owner is None or id(event.result) in prepared or _made_again(facts, event, owner):
            continue
        found = _replaced(facts, owner, event)
        if found is not None:
            report("FSD601", event.node, _later(facts, found, "the optimizer"))


def _later(facts: Facts, found: Event, what: str) -> str:
    where = facts.place(found.node)
    return f"{what} holds the parameters from before the sharding on {where}, and trains nothing"


def _replaced(facts: Facts, module: Thing, after: Event) -> Event | None:
    """Return what replaces every parameter of a module after an event, or None."""
    for event, item in _replacements(facts):
        if item is module and precedes(after, event):
            return event
    return None


def _made_again(facts: Facts, event: Event, module: Thing) -> bool:
    """Whether another optimizer over the same module follows."""
    return any(
        other.order > event.order and any(item is module for item in facts.parameters_of(other.argument))
        for other in facts.optimizers
    )


def _within(node: object, outer: object) -> bool:
    """Say whether one place lies inside another."""
    start, end = getattr(node, "lineno", 0), getattr(outer, "end_lineno", 0) or 0
    return getattr(outer, "lineno", 0) <= start <= end and (
        (start, getattr(node, "col_offset", 0))
        >= (getattr(outer, "lineno", 0), getattr(outer, "col_offset", 0))
    )


def _captured(facts: Facts, report: Report) -> None:
    """Parameters that are kept in a list before sharding and used after it."""
    uses: list[tuple[Event, Value | None]] = [
        (event, event.argument or event.get("params")) for event in facts.optimizers
    ]
    uses += [(event, event.argument) for event in facts.calls("clip_grad_norm_", "clip_grad_value_")]
    prepared = _prepared_things(facts)
    for use, given in uses:
        if id(use.result) in prepared:
            continue
        for taken in facts.events:
            if taken.order >= use.order:
                break
            if not isinstance(taken.result, Thing) or taken.result.kind not in (
                "parameters",
                "named_parameters",
            ):
                continue
            module = taken.result.parent
            if module is None or _within(taken.node, use.node):
                continue
            if not any(item is taken.result for item in _kept(given)):
                continue
            found = _replaced(facts, module, taken)
            if found is not None and found.order < use.order and precedes(found, use):
                report("FSD602", taken.node, _later(facts, found, "the list"))
                break


def _kept(value: Value | None) -> Iterator[Value]:
    """Yield what a list of parameters was collected from."""
    return origins(value)


def _nested(facts: Facts, report: Report) -> None:
    for index, (first, whole) in enumerate(facts.shardings):
        if "ignored_params" in first.keywords or first.partly:
            continue
        for second, part in facts.shardings[index + 1 :]:
            if is_inside(part, whole) and precedes(first, second) and not facts.generation(part, first):
                message = f"{label(part)} is sharded after {label(whole)}, which has taken its parameters"
                report("FSD604", first.node, message)
                break


def _wrapping(facts: Facts, report: Report) -> None:
    for event in facts.calls("apply_activation_checkpointing", "checkpoint_wrapper"):
        target = event.argument
        if isinstance(target, Thing) and facts.generation(target, event) == 2:
            report("FSD605", event.node, f"{label(target)} is sharded already")
    for event in facts.calls("torch.compile"):
        target = event.argument
        if (
            isinstance(target, Thing)
            and target.parent is None
            and facts.is_sharded_later(target, event) is not None
        ):
            report("FSD606", event.node, "the model is compiled before it is sharded")
    for event in facts.calls("deepcopy"):
        if facts.generation(event.argument, event) == 2:
            report("FSD608", event.node, f"{label(event.argument)} is sharded: it cannot be copied")


_CASTS = ("half", "bfloat16", "float", "double")


def _after_forward(facts: Facts, report: Report) -> None:
    for use in facts.of_kind("use"):
        root = use.target
        if not isinstance(root, Thing) or facts.generation(root, use) != 2 or root.annotation:
            continue
        for event in facts.optimizers:
            given = made_by(event.argument, "parameters", "named_parameters")
            if (
                given is None
                or given.parent is not root
                or not precedes(use, event)
                or use.stack != event.stack
            ):
                continue
            if not any(
                use.order < item.order < event.order and item.target is root
                for item in facts.methods("reshard")
            ):
                report("FSD603", event.node, "the optimizer is made after a forward: the root does not train")
        for event in facts.methods("to", *_CASTS):
            casts = event.name in _CASTS or any(
                _is_dtype(value) for value in (*event.args, *event.keywords.values())
            )
            if event.target is root and precedes(use, event) and casts:
                report("FSD607", event.node, f"{label(root)} is cast after its first forward")


def _is_dtype(value: Value) -> bool:
    names = ("float16", "bfloat16", "float32", "float64", "half", "float")
    return isinstance(value, Library) and value.name.removeprefix("torch.") in names


def _prepared(facts: Facts, report: Report) -> None:
    for event in facts.methods("prepare", "prepare_model"):
        maker = made_by(event.target, "Accelerator")
        plugin = facts.option_of(maker, "fsdp_plugin") if maker is not None else None
        if plugin is None or constant(facts.option_of(plugin, "fsdp_version")) != 2 or event.partly:
            continue
        makers = {id(item.result) for item in facts.optimizers}
        models = [item for item in event.args if _is_model(item)]
        optimizers = [item for item in event.args if id(item) in makers]
        others = len(event.args) - len(models) - len(optimizers)
        if event.name == "prepare_model" and models:
            report(
                "FSD609",
                event.node,
                "prepare_model does not exist for FSDP2: pass model and optimizer to prepare",
            )
        elif event.name == "prepare" and not others and bool(models) != bool(optimizers):
            missing = "the optimizer" if models else "the model"
            report("FSD609", event.node, f"{missing} is not passed to the same call of prepare")


def _is_model(value: Value) -> bool:
    if not isinstance(value, Thing):
        return False
    return value.kind.endswith((".from_pretrained", ".from_config")) or (
        value.owner is not None and value.kind == "object"
    )
