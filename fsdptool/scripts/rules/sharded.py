"""Rules on what is sharded: roots, blocks, containers, shared weights, and parameters that do not mix."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fsdptool.scripts.facts import (
    FSDP1,
    Facts,
    above,
    belongs,
    called_name,
    containers_of,
    is_inside,
    is_module_class,
    label,
    unwrapped,
)
from fsdptool.scripts.rules.table import BLOCKS, SHARD, TORCH, WRAP, Report, rule
from fsdptool.scripts.values import (
    Class,
    Event,
    Function,
    Items,
    Library,
    Thing,
    Value,
    constant,
    is_constant,
    made_by,
    precedes,
)

_DEF = TORCH + SHARD + "\ndef main(model, batch):\n"
_LLAMA = (
    TORCH + SHARD + "from transformers import AutoModelForCausalLM\n\n"
    'model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")\n'
)
_NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(100, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.head = torch.nn.Linear(8, 100, bias=False)
"""
_PEFT = (
    TORCH
    + WRAP
    + "from peft import LoraConfig, get_peft_model\nfrom transformers import AutoModelForCausalLM\n"
    "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n\ndef main(block, device):\n"
)

RULES = (
    rule(620, "root-not-sharded", "error",
         "Parameters outside of the blocks stay ordinary tensors. Nobody averages their gradients: with "
         "SGD they drift "
         "apart between the ranks; AdamW and clipping stop with `got mixed torch.Tensor and DTensor` "
         "(torch 2.13).",
         "Call `fully_shard(model)` last.",
         _DEF, BLOCKS.replace("    fully_shard(model)\n", "") + "    model(batch).backward()\n",
         BLOCKS + "    model(batch).backward()\n"),
    rule(621, "blocks-not-sharded", "warning",
         "One unit holds the whole model: each step gathers every parameter at once, and nothing "
         "overlaps. Only "
         "optimizer states and idle memory are saved.",
         "Shard each block, then the model; with FSDP1 pass an `auto_wrap_policy`.",
         _LLAMA, "fully_shard(model)\n",
         "for layer in model.model.layers:\n    fully_shard(layer)\nfully_shard(model)\n"),
    rule(622, "full-shard-without-auto-wrap", "warning",
         'Before transformers 5, `fsdp="full_shard"` without `auto_wrap` or a wrapping policy makes one '
         'unit of the '
         "whole model. Newer versions wrap by class.",
         'Write `fsdp="full_shard auto_wrap"`, and the class in `fsdp_config`.',
         "from transformers import TrainingArguments\n",
         'args = TrainingArguments("out", fsdp="full_shard")\n',
         'args = TrainingArguments("out", fsdp="full_shard auto_wrap")\n', "--target transformers==4.57"),
    rule(623, "container-sharded", "error",
         "A ModuleList has no forward: `fully_shard` raises ValueError.",
         "Shard each of its modules in a loop.",
         _DEF, "    fully_shard(model.blocks)\n    fully_shard(model)\n    for block in model.blocks:\n"
         "        batch = block(batch)\n", BLOCKS),
    rule(624, "tied-weight-split", "error",
         "Two modules that share a weight are in two units. In torch 2.13 the first forward raises "
         "ValueError (shared "
         "with a parameter already managed by another FSDP group); older versions untie them silently.",
         "Leave both in the unit of the root, or give them one unit: `fully_shard([a, b])`.",
         TORCH + SHARD + _NET + "        self.head.weight = self.embed.weight\n\ndef shard(net: Net):\n"
         "    for block in net.blocks:\n        fully_shard(block)\n",
         "    fully_shard(net.embed)\n    fully_shard(net.head)\n    fully_shard(net)\n",
         "    fully_shard([net.embed, net.head])\n    fully_shard(net)\n"),
    rule(625, "weight-used-outside-unit", "error",
         "The module has its own unit, whose parameters are sharded again after its forward. The forward "
         "of its parent "
         "reads the weight directly: `got mixed torch.Tensor and DTensor` (torch 2.13).",
         "Leave the module in the unit of the parent that reads its weight.",
         TORCH + SHARD + _NET + "\n    def forward(self, x):\n"
         "        return torch.nn.functional.linear(self.embed(x), self.embed.weight)\n\ndef shard(net: "
         "Net):\n",
         "    fully_shard(net.embed)\n    for block in net.blocks:\n        fully_shard(block)\n    "
         "fully_shard(net)\n",
         "    for block in net.blocks:\n        fully_shard(block)\n    fully_shard(net)\n"),
    rule(626, "unit-dtype-mix", "error",
         "The trainable parameters of a unit must have one dtype: `FSDP expects uniform original "
         "parameter dtype` (torch "
         "2.13).",
         "Keep one dtype in each unit, and let MixedPrecisionPolicy choose what is computed in.",
         _DEF, "    model.to(torch.bfloat16)\n    model.head.float()\n" + BLOCKS,
         "    model.to(torch.bfloat16)\n" + BLOCKS),
    rule(627, "requires-grad-mix", "error",
         "FSDP1 flattens frozen and trainable weights into one parameter: ValueError about uniform "
         "`requires_grad`.",
         "Pass `use_orig_params=True`, or use `fully_shard`.",
         _PEFT, '    base = AutoModelForCausalLM.from_pretrained("gpt2")\n'
         "    model = get_peft_model(base, LoraConfig(r=8))\n"
         "    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}), device_id=device)\n",
         '    base = AutoModelForCausalLM.from_pretrained("gpt2")\n'
         "    model = get_peft_model(base, LoraConfig(r=8))\n"
         "    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}), device_id=device, "
         "use_orig_params=True)\n"),
    rule(628, "adapter-dtype-mix", "error",
         "peft 0.21 keeps the adapters of a 16-bit base in float32, and FSDP1 flattens both together: "
         "`ValueError: Must "
         "flatten tensors with uniform dtype`.",
         "Pass `autocast_adapter_dtype=False`, cast the adapters, or use `fully_shard`.",
         _PEFT, '    base = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)\n'
         "    model = get_peft_model(base, LoraConfig(r=8))\n"
         "    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}), device_id=device, "
         "use_orig_params=True)\n",
         '    base = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)\n'
         "    model = get_peft_model(base, LoraConfig(r=8), autocast_adapter_dtype=False)\n"
         "    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}), device_id=device, "
         "use_orig_params=True)\n"),
    rule(629, "groups-by-name-of-flat", "warning",
         "Without `use_orig_params`, every parameter of FSDP1 is called `_flat_param`: a group that is "
         "chosen by name "
         "is empty or holds everything.",
         "Pass `use_orig_params=True`.",
         WRAP + "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n\ndef main(model, block, "
                "device):\n"
         "    policy = ModuleWrapPolicy({block})\n",
         "    model = FSDP(model, auto_wrap_policy=policy, device_id=device)\n"
         '    return [p for n, p in model.named_parameters() if "bias" in n]\n',
         "    model = FSDP(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)\n"
         '    return [p for n, p in model.named_parameters() if "bias" in n]\n'),
    rule(630, "double-wrapping", "error",
         "A module that `fully_shard` has sharded is wrapped again: DDP raises NotImplementedError, FSDP1 "
         "fails on mixed "
         "tensors, a second `fully_shard` raises AssertionError (torch 2.13).",
         "Keep one of them.",
         TORCH + SHARD + "from torch.nn.parallel import DistributedDataParallel\n\ndef main(model):\n",
         BLOCKS + "    return DistributedDataParallel(model)\n", BLOCKS),
    rule(631, "checkpointing-discarded", "error",
         "The loop binds its own name to the wrapped block. The model keeps the block that it had: "
         "nothing is "
         "recomputed, or compiled.",
         "Store it: `model.blocks[i] = checkpoint_wrapper(block)`, or use `apply_activation_checkpointing`.",
         "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n\n"
         "def main(model):\n",
         "    for block in model.blocks:\n        block = checkpoint_wrapper(block)\n",
         "    for i, block in enumerate(model.blocks):\n        model.blocks[i] = "
         "checkpoint_wrapper(block)\n"),
    rule(632, "placement-not-shard", "error",
         "`shard_placement_fn` may return `Shard` or None; anything else raises ValueError (torch 2.13).",
         "Leave parameters unsharded with `ignored_params`.",
         SHARD + "from torch.distributed.tensor import Replicate, Shard\n\ndef main(model):\n"
         "    for block in model.blocks:\n        fully_shard(block)\n",
         "    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else Replicate())\n",
         "    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else Shard(0))\n"),
)  # fmt: skip


def check(facts: Facts, report: Report) -> None:
    """Report what is sharded in a way that fails or saves little."""
    _root(facts, report)
    _blocks(facts, report)
    _full_shard(facts, report)
    _containers(facts, report)
    _weights(facts, report)
    _dtypes(facts, report)
    _flattened(facts, report)
    _twice(facts, report)
    _discarded(facts, report)
    for event in facts.calls("fully_shard"):
        if _may_replicate(event.get("shard_placement_fn")):
            report("FSD632", event.node, "shard_placement_fn can return something else than Shard or None")


def _root(facts: Facts, report: Report) -> None:
    roots: dict[int, tuple[Event, Thing]] = {}
    for event, item in facts.shardings:
        top = list(above(item))[-1]
        if top is not item and item.parent is not None:
            roots.setdefault(id(top), (event, top))
    everything = [item for _, item in (*facts.shardings, *facts.wrappers)]
    for event, top in roots.values():
        # The root may be an inner module: then whatever is above it holds no parameters of its own.
        units = [item for item in everything if belongs(item, top)]
        outer = any(item is not other and is_inside(other, item) for item in units for other in units)
        used = [use for use in facts.of_kind("use") if use.target is top and precedes(event, use)]
        listed = any(item.kind == "item" for item in units)
        if top in units or outer or not used or not listed or facts.is_given_away(top):
            continue
        if top.kind not in ("object", "parameter") and not top.label.startswith("transformers"):
            continue
        if not any(event.name == "backward" for event in facts.of_kind("method")):
            continue
        last = [other for other, item in facts.shardings if belongs(item, top)][-1]
        report(
            "FSD620",
            _loop_of(last),
            f"the blocks of {label(top)} are sharded, and {label(top)} itself never is",
        )


def _loop_of(event: Event) -> ast.AST:
    """Return the loop that shards the blocks, if one does."""
    return event.loops[-1] if event.loops else event.node


def _blocks(facts: Facts, report: Report) -> None:
    for event, item in (*facts.shardings, *facts.wrappers):
        if not _has_blocks(item) or event.partly or facts.is_given_away(item):
            continue
        if event.name == FSDP1 and "auto_wrap_policy" in event.keywords:
            continue
        others = (other for _, other in (*facts.shardings, *facts.wrappers) if other is not item)
        if any(is_inside(other, unwrapped(item)) or is_inside(other, item) for other in others):
            continue
        report("FSD621", event.node, f"{label(item)} becomes one unit: its blocks are not sharded")


def _has_blocks(value: Thing) -> bool:
    """Say whether a model certainly has a list of blocks."""
    base = unwrapped(value)
    if base.kind.endswith((".from_pretrained", ".from_config")) and base.label.startswith("transformers"):
        return True
    if (
        base.label.startswith("transformers") and base.kind.endswith(("Model", "LMHeadModel"))
    ) or "For" in base.kind:
        return base.label.startswith("transformers") and base.kind[:1].isupper()
    made = base.owner
    return made is not None and base.kind == "object" and is_module_class(made) and bool(containers_of(made))


def _full_shard(facts: Facts, report: Report) -> None:
    if not facts.versions.get("transformers", "5").startswith("4."):
        return
    for event in facts.calls("TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments"):
        value = constant(event.get("fsdp"))
        others = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
        alone = isinstance(value, str) and value.split() == ["full_shard"] and not event.partly
        if alone and not any(name in event.keywords for name in others):
            report("FSD622", event.places.get("fsdp", event.node), "the whole model becomes one unit")


def _containers(facts: Facts, report: Report) -> None:
    for event, item in facts.shardings:
        if _is_container(facts, item):
            report("FSD623", event.node, f"{label(item)} is a container without a forward")


def _is_container(facts: Facts, item: Thing) -> bool:
    if item.kind in ("nn.ModuleList", "nn.ModuleDict"):
        return True
    if item.kind != "attribute" or item.parent is None:
        return False
    made = facts.class_of(item.parent)
    if made is not None:
        return item.label in containers_of(made)
    return item.label in ("layers", "blocks", "h") and any(
        event.target is item and event.name == "for" for event in facts.of_kind("iterate")
    )


def _weights(facts: Facts, report: Report) -> None:
    apart: dict[int, tuple[Thing, dict[str, Event]]] = {}
    for event, item in facts.shardings:
        alone = not isinstance(event.argument, Items)
        if item.kind != "attribute" and item.parent is None:
            continue
        name = _attribute_name(item)
        if item.parent is not None and name and alone:
            apart.setdefault(id(item.parent), (item.parent, {}))[1].setdefault(name, event)
    for parent, names in apart.values():
        made = facts.class_of(parent)
        if made is None:
            continue
        for one, two in _ties(made):
            if one in names and two in names:
                last = max(names[one], names[two], key=lambda event: event.order)
                message = f"{one} and {two} share a weight and have a unit each"
                report("FSD624", last.node, message)
            elif one in names or two in names:
                split = names[one] if one in names else names[two]
                if any(item is parent for _, item in facts.shardings):
                    report(
                        "FSD624",
                        split.node,
                        f"{one} and {two} share a weight; only one has a unit of its own",
                    )
        for name, node in _reads(made):
            if name in names and not any(name in pair for pair in _ties(made)):
                where = facts.place(names[name].node)
                report("FSD625", node, f"{name} has a unit of its own ({where}), and its weight is read here")


def _attribute_name(item: Thing) -> str:
    """Return the name under which a module is a part of its parent."""
    if item.kind == "attribute":
        return item.label
    if item.parent is not None:
        return next(
            (str(name) for name, part in item.parent.parts.items() if part is item and isinstance(name, str)),
            "",
        )
    return ""


def _ties(made: Class) -> Iterator[tuple[str, str]]:
    """Yield pairs of attributes of a class that share a weight."""
    for owner in made.line():
        for method in owner.methods.values():
            for node in ast.walk(method):
                if isinstance(node, ast.Assign) and len(node.targets) == 1:
                    one, two = _weight_of(node.targets[0]), _weight_of(node.value)
                    if one and two and one != two:
                        yield one, two


def _weight_of(node: ast.AST) -> str:
    """Return ``x`` of an expression ``self.x.weight``, else an empty text."""
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.value, ast.Attribute):
        whole = node.value
        return whole.attr if isinstance(whole.value, ast.Name) and whole.value.id == "self" else ""
    return ""


def _reads(made: Class) -> Iterator[tuple[str, ast.AST]]:
    """Yield the weights of parts that the forward of a class reads."""
    found = made.lookup("forward")
    for node in ast.walk(found[1]) if found is not None else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _weight_of(node):
            yield _weight_of(node), node


_SIXTEEN = ("torch.bfloat16", "torch.float16", "torch.half")


def _dtype(value: Value | None) -> str:
    return value.name if isinstance(value, Library) and value.name.startswith("torch.") else ""


def _loaded_in(value: Thing) -> str:
    """Return the dtype that a model was loaded in, or an empty text."""
    return _dtype(value.keywords.get("dtype") or value.keywords.get("torch_dtype"))


_SHORT = {"bfloat16": "torch.bfloat16", "half": "torch.float16", "float": "torch.float32"}


def _cast_to(event: Event) -> str:
    if event.name in _SHORT:
        return _SHORT[event.name]
    found = [_dtype(value) for value in (*event.args, *event.keywords.values())]
    return next((name for name in found if name in (*_SIXTEEN, "torch.float32", "torch.float")), "")


def _dtypes(facts: Facts, report: Report) -> None:
    """Casts of a part of a unit before sharding."""
    if any(True for _ in facts.methods("requires_grad_")) or facts.mentions(
        "requires_grad", "get_peft_model"
    ):
        return
    casts = [(event, _cast_to(event)) for event in facts.methods("to", "float", "half", "bfloat16")]
    for event, dtype in casts:
        part = event.target
        if not dtype or not isinstance(part, Thing) or part.kind != "attribute" or part.parent is None:
            continue
        root = part.parent
        later = facts.is_sharded_later(root, event)
        if later is None or any(item is part for _, item in facts.shardings):
            continue
        before = [
            name for other, name in casts if other.target is root and other.order < event.order and name
        ]
        whole = before[-1] if before else _loaded_in(root)
        recast = any(
            other.target is root and event.order < other.order < later.order for other, name in casts if name
        )
        if whole and whole != dtype and not recast and precedes(event, later):
            report(
                "FSD626",
                event.node,
                f"{label(part)} is {dtype.removeprefix('torch.')}, the rest of its unit "
                f"{whole.removeprefix('torch.')}",
            )


def _flattened(facts: Facts, report: Report) -> None:
    for event, inner in facts.wrappers:
        original = event.keywords.get("use_orig_params")
        flat = (original is None and not event.partly) or is_constant(original, False)
        adapted = made_by(inner, "get_peft_model")
        if adapted is not None and _by_class(event):
            if flat:
                report("FSD627", event.node, "adapters and frozen weights are flattened together")
            _adapter(facts, adapted, report)
        if flat:
            _frozen_part(facts, event, inner, report)
            _by_name(facts, event, report)


def _by_class(event: Event) -> bool:
    """Say whether units are chosen by class or not at all: another policy may set adapters apart."""
    policy = event.get("auto_wrap_policy")
    if policy is None:
        return "auto_wrap_policy" not in event.keywords
    names = [item.name for item in _functions(policy)]
    return bool(names) and all(
        name.endswith(("transformer_auto_wrap_policy", "ModuleWrapPolicy")) for name in names
    )


def _functions(policy: Value) -> Iterator[Library]:
    from fsdptool.scripts.values import Partial

    if isinstance(policy, Partial):
        yield from _functions(policy.function)
    elif isinstance(policy, Library):
        yield policy
    elif isinstance(policy, Thing) and policy.kind == "ModuleWrapPolicy":
        yield Library("ModuleWrapPolicy")


def _adapter(facts: Facts, adapted: Thing, report: Report) -> None:
    base = adapted.inner or (adapted.args[0] if adapted.args else None)
    if not isinstance(base, Thing) or _loaded_in(base) not in _SIXTEEN or adapted.node is None:
        return
    if "autocast_adapter_dtype" in adapted.keywords or "quantization_config" in base.keywords:
        return
    casts = facts.methods("to", "half", "bfloat16", "float")
    if any(belongs(event.target, adapted) and _cast_to(event) for event in casts):
        return
    report("FSD628", adapted.node, "the adapters stay float32 beside a 16-bit base")


def _frozen_part(facts: Facts, event: Event, inner: Thing, report: Report) -> None:
    if (
        "auto_wrap_policy" in event.keywords
        or "ignored_modules" in event.keywords
        or "ignored_states" in event.keywords
    ):
        return
    for frozen in facts.methods("requires_grad_"):
        part = frozen.target
        first = frozen.get("requires_grad", 0)
        if (
            is_constant(first, False)
            and isinstance(part, Thing)
            and part.kind == "attribute"
            and part.parent is inner
            and precedes(frozen, event)
            and not any(wrapped is part for _, wrapped in facts.wrappers)
        ):
            report(
                "FSD627",
                event.node,
                f"{label(part)} is frozen and flattened together with trainable weights",
            )
            return


def _by_name(facts: Facts, event: Event, report: Report) -> None:
    for compared in facts.of_kind("compare"):
        if compared.name not in ("In", "NotIn") or compared.order < event.order:
            continue
        for value in compared.args:
            name = made_by(value, "name")
            source = name.parent if name is not None else None
            if source is not None and source.kind == "named_parameters" and source.parent is event.result:
                report("FSD629", compared.node, "every parameter is called _flat_param here")


def _twice(facts: Facts, report: Report) -> None:
    for event in facts.calls("DistributedDataParallel", FSDP1):
        inner = event.argument or event.get("module")
        if isinstance(inner, Thing) and facts.generation(inner, event) == 2:
            report("FSD630", event.node, f"{label(inner)} is sharded with fully_shard already")
    for event, item in facts.shardings:
        same_item = (other for other, thing in facts.shardings if thing is item and other is not event)
        if any(precedes(other, event) and other.node is not event.node for other in same_item):
            report("FSD630", event.node, f"fully_shard is applied to {label(item)} twice")


_WRAPS = ("checkpoint_wrapper", "torch.compile")


def _discarded(facts: Facts, report: Report) -> None:
    for event in facts.calls(*_WRAPS):
        loop = event.loops[-1] if event.loops else None
        if not isinstance(loop, ast.For):
            continue
        targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        for statement in loop.body:
            if not isinstance(statement, ast.Assign) or statement.value is not event.node:
                continue
            (name, *others) = statement.targets
            if others or not isinstance(name, ast.Name) or name.id not in targets:
                continue
            if not _read_after(loop.body, statement, name.id):
                report("FSD631", statement, f"{name.id} is the loop's own name: the model does not change")


def _read_after(body: list[ast.stmt], statement: ast.stmt, name: str) -> bool:
    rest = body[body.index(statement) + 1 :]
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for other in rest
        for node in ast.walk(other)
    )


def _may_replicate(value: Value | None) -> bool:
    """Say whether a function has a branch that returns ``Replicate()``."""
    if not isinstance(value, Function):
        return False
    body = value.node.body
    returned = (
        [body]
        if isinstance(body, ast.expr)
        else [
            node.value
            for item in body
            for node in ast.walk(item)
            if isinstance(node, ast.Return) and node.value
        ]
    )
    for expression in returned:
        options = [expression.body, expression.orelse] if isinstance(expression, ast.IfExp) else [expression]
        if any(called_name(option) == "Replicate" for option in options):
            return True
    return False
