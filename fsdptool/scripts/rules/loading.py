"""Rules on the meta device, and on loading weights."""

from __future__ import annotations

import ast

from fsdptool.scripts.facts import (
    HARMLESS,
    Facts,
    called_name,
    label,
    unwrapped,
)
from fsdptool.scripts.rules.table import BLOCKS, DIST, SHARD, TORCH, Report, rule
from fsdptool.scripts.values import (
    Choice,
    Event,
    Function,
    Table,
    Thing,
    Value,
    constant,
    is_constant,
    made_by,
    origins,
    precedes,
)

_NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def main(batch):
    with torch.device("meta"):
        model = Net()
"""
_SET = "from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict\n"
_DEF = TORCH + DIST + SHARD + _SET

RULES = (
    rule(640, "meta-not-materialised", "error",
         "A model that was built on the meta device is called without `to_empty` and without loading "
         "weights: "
         "`RuntimeError: ... should be materialized from meta device` (torch 2.13).",
         "Call `model.to_empty(device=...)` after sharding, then initialise or load the weights.",
         TORCH + SHARD + _NET + BLOCKS, "    return model(batch)\n",
         '    model.to_empty(device="cuda")\n    for block in model.blocks:\n        '
         'block.reset_parameters()\n'
         "    return model(batch)\n"),
    rule(641, "meta-not-initialised", "error",
         "`to_empty` gives memory with arbitrary contents. Nothing fills it: the loss is nan or "
         "arbitrary, and no error "
         "appears. `reset_parameters` of the modules misses what a Hugging Face model initialises otherwise.",
         "Call the model's own initialiser (`init_weights()`), or load weights, after `to_empty`.",
         TORCH + SHARD + _NET + BLOCKS, '    model.to_empty(device="cuda")\n    return model(batch)\n',
         '    model.to_empty(device="cuda")\n    for block in model.blocks:\n        '
         'block.reset_parameters()\n'
         "    return model(batch)\n"),
    rule(642, "meta-buffer-lost", "warning",
         "A buffer with `persistent=False` is in no state dict: after `to_empty` and loading it keeps "
         "arbitrary memory.",
         "Compute such buffers again after loading.",
         _DEF + _NET.replace("        self.blocks", '        self.register_buffer("angles", '
                                                    'torch.ones(8), persistent=False)\n        self.blocks')
         + BLOCKS + '    model.to_empty(device="cuda")\n',
         '    weights = torch.load("weights.pt")\n'
         "    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))\n",
         '    weights = torch.load("weights.pt")\n'
         "    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))\n"
         "    model.angles.fill_(1.0)\n"),
    rule(643, "plain-load-into-sharded", "error",
         "Plain tensors cannot be copied into the DTensors of a sharded module: `got mixed torch.Tensor "
         "and DTensor` "
         "(torch 2.13).",
         "Load before sharding, or use `set_model_state_dict` with `StateDictOptions(full_state_dict=True)`.",
         _DEF + "\ndef main(model):\n" + BLOCKS + '    weights = torch.load("weights.pt")\n',
         "    model.load_state_dict(weights)\n",
         "    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))\n"),
    rule(644, "partial-load-without-broadcast", "error",
         "Rank 0 reads the weights and the others pass an empty state dict: without "
         "`broadcast_from_rank0=True` they "
         "stop with `RuntimeError: model state_dict is empty`, and rank 0 loses its connections.",
         "Add `broadcast_from_rank0=True` to the options.",
         _DEF + '\ndef load(model, path):\n    weights = torch.load(path) if dist.get_rank() == 0 else {}\n',
         "    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))\n",
         "    set_model_state_dict(\n        model, weights, options=StateDictOptions(full_state_dict=True, "
         "broadcast_from_rank0=True)\n    )\n"),
    rule(645, "seed-differs-before-sharding", "info",
         "Each rank builds the model from another seed: the sharded weights are pieces of several draws, "
         "which is "
         "harmless, but buffers and unsharded parts differ between the ranks.",
         "Use one seed until the model is sharded, and another one for each rank after it.",
         TORCH + DIST + SHARD + _NET.replace("def main(batch):\n    with torch.device(\"meta\"):\n        "
                                             "model = Net()\n", "def main():\n"),
         "    torch.manual_seed(7 + dist.get_rank())\n    model = Net()\n" + BLOCKS,
         "    torch.manual_seed(7)\n    model = Net()\n" + BLOCKS + "    torch.manual_seed(7 + "
                                                                    "dist.get_rank())\n"),
    rule(646, "device-map-with-sharding", "error",
         "`device_map` spreads the layers of one model over the GPUs of a node, in every process. "
         "accelerate 1.15 "
         "refuses to train such a model; with torch's own calls the units are on different devices.",
         "Drop `device_map`.",
         SHARD + "from transformers import AutoModelForCausalLM\n\ndef main(name):\n",
         '    model = AutoModelForCausalLM.from_pretrained(name, device_map="auto")\n'
         "    for layer in model.model.layers:\n        fully_shard(layer)\n    fully_shard(model)\n",
         "    model = AutoModelForCausalLM.from_pretrained(name)\n"
         "    for layer in model.model.layers:\n        fully_shard(layer)\n    fully_shard(model)\n"),
)  # fmt: skip


def check(facts: Facts, report: Report) -> None:
    """Report weights that are never filled, or cannot be loaded as they are."""
    _meta(facts, report)
    _empty(facts, report)
    _loads(facts, report)
    _partial(facts, report)
    _seeds(facts, report)
    _device_maps(facts, report)


_FILLS = (
    "to_empty",
    "load_state_dict",
    "apply",
    "init_weights",
    "reset_parameters",
    "initialize_weights",
    "_init_weights",
)
_LOADS = (
    "set_model_state_dict",
    "set_state_dict",
    "dcp.load",
    "dcp.load_state_dict",
    "load_checkpoint_in_model",
)


def _meta(facts: Facts, report: Report) -> None:
    for use in facts.of_kind("use"):
        root = use.target
        if not isinstance(root, Thing) or "meta" not in root.tags or facts.generation(root, use) != 2:
            continue
        if facts.is_given_away(root) or _is_filled(facts, root, use):
            continue
        report("FSD640", use.node, f"{label(root)} is on the meta device when it is called")


def _is_filled(facts: Facts, root: Thing, before: Event) -> bool:
    for event in facts.parts_of(root):
        if event.order >= before.order:
            break
        if event.kind == "method" and event.name not in HARMLESS - {"to_empty", "to", "cuda"}:
            return True
        if event.kind == "call" and event.name in _LOADS:
            return True
    return any(event.order < before.order for event in facts.calls("dcp.load", "dcp.load_state_dict"))


_KEEPS = frozenset({
    "fully_shard", "torch.compile", "clip_grad_norm_", "apply_activation_checkpointing", "checkpoint_wrapper",
    "register_fsdp_forward_method", "get_model_state_dict", "get_state_dict", "get_optimizer_state_dict",
    "torch.save",
})  # fmt: skip


def _empty(facts: Facts, report: Report) -> None:
    for event in facts.methods("to_empty"):
        root = event.target
        if not isinstance(root, Thing) or root.kind == "item" or facts.is_given_away(root):
            continue
        uses = [use for use in facts.of_kind("use") if use.target is root and precedes(event, use)]
        trains = [
            item
            for item in facts.optimizers
            if facts.module_of(item.argument) is root and precedes(event, item)
        ]
        if not (uses or trains) or root.kind == "parameter":
            continue
        later = [item for item in facts.parts_of(root) if item.order > event.order and _fills(item)]
        if any(item.order > event.order for item in facts.calls("dcp.load", "dcp.load_state_dict")):
            continue
        if not later:
            report("FSD641", event.node, f"nothing fills the weights of {label(root)} after to_empty")
        elif (
            all(_misses_some(item) for item in later)
            and unwrapped(root).kind.endswith(".from_config")
            and not _patches(facts)
        ):
            report(
                "FSD641",
                later[0].node,
                "reset_parameters misses weights and buffers of a Hugging Face model",
            )


def _fills(event: Event) -> bool:
    """Say whether something may fill weights."""
    if event.kind == "method":
        return event.name not in HARMLESS
    if event.kind == "call":
        known = event.name in _KEEPS or event.name.startswith(("optim.", "builtins.", "tqdm"))
        return not known
    return event.kind in ("store", "local")


def _misses_some(event: Event) -> bool:
    """Say whether something calls ``reset_parameters`` of the modules and nothing else."""
    if event.name == "reset_parameters":
        return True
    if event.name != "apply" or not event.args or not isinstance(event.args[0], Function):
        return False
    node = event.args[0].node
    calls = {called_name(item) for item in ast.walk(node) if isinstance(item, ast.Call)}
    return "reset_parameters" in calls and calls <= {
        "reset_parameters",
        "hasattr",
        "isinstance",
        "callable",
        "getattr",
    }


def _patches(facts: Facts) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "reset_parameters"
        and isinstance(node.ctx, ast.Store)
        for node in ast.walk(facts.path.tree)
    )


def _from_file(value: Value | None) -> bool:
    """Say whether a state dict was read from a file of plain tensors."""
    for item in origins(value):
        if isinstance(item, Thing) and item.kind in ("torch.load", "safetensors.torch.load_file"):
            return True
    return False


def _loads(facts: Facts, report: Report) -> None:
    for event in facts.methods("load_state_dict"):
        given = event.get("state_dict", 0)
        if facts.generation(event.target, event) == 2 and _from_file(given):
            report(
                "FSD643", event.node, f"{label(event.target)} is sharded; the state dict holds plain tensors"
            )
    for event in facts.calls("set_model_state_dict"):
        options = made_by(event.get("options", 2), "StateDictOptions")
        whole = options is not None and "full_state_dict" in options.keywords
        unknown = event.get("options", 2) is not None and options is None
        given = event.get("model_state_dict", 1)
        if not whole and not unknown and facts.generation(event.argument, event) == 2 and _from_file(given):
            report("FSD643", event.node, "the state dict holds plain tensors; pass full_state_dict=True")
        _buffers(facts, event, report)


def _buffers(facts: Facts, event: Event, report: Report) -> None:
    root = event.argument
    if not isinstance(root, Thing) or root.owner is None or "meta" not in root.tags:
        return
    if not any(item.target is root and item.order < event.order for item in facts.methods("to_empty")):
        return
    if any(item.order > event.order and _fills(item) for item in facts.parts_of(root)) or facts.is_given_away(
        root
    ):
        return
    for owner in root.owner.line():
        for method in owner.methods.values():
            for node in ast.walk(method):
                if (
                    isinstance(node, ast.Call)
                    and called_name(node) == "register_buffer"
                    and any(
                        item.arg == "persistent"
                        and isinstance(item.value, ast.Constant)
                        and item.value.value is False
                        for item in node.keywords
                    )
                ):
                    report(
                        "FSD642", node, "the state dict does not have this buffer: it keeps arbitrary memory"
                    )


def _partial(facts: Facts, report: Report) -> None:
    for event in facts.calls("set_model_state_dict", "set_state_dict", "set_optimizer_state_dict"):
        given = [event.get("model_state_dict", 1), event.get("optim_state_dict", 2)]
        options = made_by(event.keywords.get("options") or event.get("options", 2), "StateDictOptions")
        if options is None or "broadcast_from_rank0" in options.keywords:
            continue
        if not is_constant(options.keywords.get("full_state_dict"), True):
            continue
        for value in given:
            if isinstance(value, Choice) and value.by_rank and any(_is_empty(item) for item in value.options):
                report("FSD644", event.node, "ranks without weights need broadcast_from_rank0=True")


def _is_empty(value: Value) -> bool:
    if isinstance(value, Table):
        return value.whole and not value.items
    return constant(value) is None and type(value).__name__ == "Const"


def _seeds(facts: Facts, report: Report) -> None:
    for event in facts.calls("torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"):
        if event.name != "torch.manual_seed" or event.argument is None or "rank" not in event.argument.tags:
            continue
        reset = [item.order for item in facts.calls("torch.manual_seed") if item.order > event.order]
        for sharding, item in (*facts.shardings, *facts.wrappers):
            base = unwrapped(item)
            made = [other.order for other in facts.events if other.result is base]
            own = base.kind == "object" or base.kind.endswith(".from_config")
            if (
                not own
                or not made
                or not event.order < made[0] < sharding.order
                or not precedes(event, sharding)
            ):
                continue
            if any(event.order < order < made[0] for order in reset) or _is_given_weights(
                facts, base, made[0]
            ):
                continue
            report("FSD645", event.node, "each rank builds the model from another seed")
            break


def _is_given_weights(facts: Facts, base: Thing, since: int) -> bool:
    loads = (*_LOADS, "dist.broadcast")
    return (
        facts.is_given_away(base)
        or any(
            event.order > since and (event.name in loads or event.name in ("load_state_dict", "to_empty"))
            for event in facts.events
        )
        or any("sync_module_states" in event.keywords for event, _ in facts.wrappers)
    )


def _device_maps(facts: Facts, report: Report) -> None:
    models = [item for _, item in (*facts.shardings, *facts.wrappers)]
    for event in facts.calls("Trainer", "SFTTrainer"):
        arguments = made_by(event.get("args", 1), "TrainingArguments", "SFTConfig")
        value = arguments.keywords.get("fsdp") if arguments is not None else None
        model = event.get("model", 0)
        if isinstance(model, Thing) and constant(value) not in (None, False, ""):
            models.append(model)
    for model in {id(item): item for item in models}.values():
        base = unwrapped(model)
        mapped = constant(base.keywords.get("device_map"))
        if mapped in ("auto", "balanced", "balanced_low_0", "sequential") and base.node is not None:
            report("FSD646", base.node, f'device_map="{mapped}" spreads a model that is sharded')
