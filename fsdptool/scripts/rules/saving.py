"""Rules on saving, and on collectives that only some ranks reach."""

from __future__ import annotations

import ast

from fsdptool.scripts.facts import FSDP1, Facts, label, unwrapped
from fsdptool.scripts.names import COLLECTIVES
from fsdptool.scripts.rules.table import BLOCKS, DIST, SHARD, STATE, TORCH, Report, rule
from fsdptool.scripts.values import (
    Condition,
    Event,
    Library,
    Thing,
    Value,
    constant,
    flat,
    is_constant,
    made_by,
    origins,
)

_FULL = (
    "    weights = get_model_state_dict(\n"
    "        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)\n    )\n"
)
_DEF = TORCH + DIST + STATE + SHARD + "\ndef save(model, path):\n"

RULES = (
    rule(650, "collective-on-one-rank", "error",
         "The call waits for every rank, and a condition lets only one pass: the job hangs until the "
         "process group "
         "times out, with NCCL after ten minutes.",
         "Call it on every rank, and guard only the write.",
         _DEF, "    if dist.get_rank() == 0:\n" + _FULL.replace("    ", "        ", 1).replace("\n    ",
         "\n        ")
         .rstrip(" ") + "        torch.save(weights, path)\n",
         _FULL + "    if dist.get_rank() == 0:\n        torch.save(weights, path)\n"),
    rule(651, "sharded-state-saved", "warning",
         "`state_dict()` of an FSDP2 module holds DTensors with the shards of this rank. `torch.load` "
         "refuses the file "
         "elsewhere with `weights_only=True`; without it, only a part of each weight is there (torch 2.13).",
         "Save `get_model_state_dict` with `full_state_dict=True`, or use "
         "`torch.distributed.checkpoint.save`.",
         _DEF + BLOCKS, "    if dist.get_rank() == 0:\n        torch.save(model.state_dict(), path)\n",
         _FULL + "    if dist.get_rank() == 0:\n        torch.save(weights, path)\n"),
    rule(652, "every-rank-writes", "warning",
         "Every rank writes one path. With `cpu_offload=True` the full state dict is empty on all ranks "
         "but the first, "
         "and the last writer may leave a file without weights (seen with torch 2.13).",
         "Write on rank 0 only.",
         _DEF + _FULL, "    torch.save(weights, path)\n",
         "    if dist.get_rank() == 0:\n        torch.save(weights, path)\n"),
    rule(653, "unwrapped-save", "warning",
         "`save_pretrained` of a module that `fully_shard` has sharded fails in transformers 5.23 "
         "(`invalid python "
         "storage`); older versions write the shards of one rank.",
         "Pass a gathered `state_dict=`, or use `trainer.save_model`.",
         "from transformers import AutoModelForCausalLM\n" + DIST + STATE + SHARD
         + "\ndef main(name, path):\n"
         "    model = AutoModelForCausalLM.from_pretrained(name)\n"
         "    for layer in model.model.layers:\n        fully_shard(layer)\n    fully_shard(model)\n" + _FULL,
         "    model.save_pretrained(path)\n",
         "    if dist.get_rank() == 0:\n        model.save_pretrained(path, state_dict=weights)\n"),
    rule(654, "fsdp1-call-on-fsdp2", "error",
         "A module that `fully_shard` has sharded has no `no_sync`, `clip_grad_norm_` or `module`: "
         "AttributeError. "
         "`FSDP.state_dict_type` raises KeyError, `summon_full_params` silently does nothing, and "
         "`isinstance(model, "
         "FullyShardedDataParallel)` is False, so that guarded code is skipped.",
         "Use `set_requires_gradient_sync`, `torch.nn.utils.clip_grad_norm_`, `get_model_state_dict`, "
         "`full_tensor` "
         "and `FSDPModule`.",
         TORCH + SHARD + "\ndef main(model, batch):\n" + BLOCKS,
         "    model(batch).backward()\n    model.clip_grad_norm_(1.0)\n",
         "    model(batch).backward()\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"),
)  # fmt: skip


def check(facts: Facts, report: Report) -> None:
    """Report what hangs, and files that cannot be used."""
    _collectives(facts, report)
    _saves(facts, report)
    _old_calls(facts, report)


def _collectives(facts: Facts, report: Report) -> None:
    found = [(event, what) for event in facts.events for what in (_collective(facts, event),) if what]
    for event, what in found:
        guard = event.one_rank
        if guard is None or _is_after_branch(event):
            continue
        others = [other for other, _ in found if _is_other_side(other, guard)]
        if others:
            continue
        deeper = event.stack[guard.depth] if len(event.stack) > guard.depth else event.node
        report("FSD650", deeper, f"{what} waits for every rank, and only one comes here")


def _is_after_branch(event: Event) -> bool:
    """Whether the script asks inside of the condition for a job of one process."""
    return any(test.test is not None and "world" in test.test.tags for test in event.guards)


def _is_other_side(event: Event, guard: Condition) -> bool:
    return any(item.node is guard.node and item.branch != guard.branch for item in event.guards)


_GATHERS = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")
_DISTRIBUTED = frozenset(f"dist.{name}" for name in COLLECTIVES)
_ACCELERATOR = (
    "get_state_dict",
    "save_state",
    "wait_for_everyone",
    "gather",
    "gather_for_metrics",
    "reduce",
    "load_state",
)


def _collective(facts: Facts, event: Event) -> str:
    """Return what a collective is called, or an empty text."""
    if event.kind == "call":
        return _collective_call(facts, event)
    target = event.target
    if event.kind == "use":
        generation = facts.generation(target, event)
        return f"a call of {label(target)}" if generation else ""
    if event.kind != "method" or not isinstance(target, Thing):
        return ""
    if target.kind == "Accelerator" and event.name in _ACCELERATOR:
        return f"accelerator.{event.name}"
    if target.kind in ("Trainer", "SFTTrainer", "Seq2SeqTrainer"):
        return (
            f"trainer.{event.name}"
            if event.name in ("save_model", "train", "evaluate") and _trains_sharded(target)
            else ""
        )
    generation = facts.generation(target, event)
    if generation == 1 and event.name in (
        "state_dict",
        "clip_grad_norm_",
        "summon_full_params",
        "save_pretrained",
    ):
        return f"{event.name} of FSDP1"
    if generation and event.name in ("generate", "unshard"):
        return event.name
    if event.name == "full_tensor" and any(_is_part(facts, item, event) for item in origins(target)):
        return "full_tensor"
    return ""


def _is_part(facts: Facts, value: Value, event: Event) -> bool:
    return isinstance(value, Thing) and facts.generation(value, event) == 2


def _trains_sharded(trainer: Thing) -> bool:
    args = trainer.keywords.get("args") or (trainer.args[1] if len(trainer.args) > 1 else None)
    made = made_by(args, "TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments")
    return made is not None and constant(made.keywords.get("fsdp")) not in (None, False, "")


def _collective_call(facts: Facts, event: Event) -> str:
    if event.name in _DISTRIBUTED:
        return event.name if event.keywords.get("group") is None and facts.mentions("fsdp", *_NAMES) else ""
    if event.name in _GATHERS:
        options = made_by(event.keywords.get("options") or event.get("options", 1), "StateDictOptions")
        whole = options is not None and is_constant(options.keywords.get("full_state_dict"), True)
        plain = isinstance(event.argument, Thing) and _is_plain(facts, event.argument, event)
        return event.name if whole and not plain else ""
    if event.name in (
        f"{FSDP1}.summon_full_params",
        f"{FSDP1}.full_optim_state_dict",
        f"{FSDP1}.optim_state_dict",
    ):
        return event.name.rpartition(".")[2]
    if event.name in ("dcp.save", "dcp.load", "dcp.save_state_dict", "dcp.load_state_dict", "dcp.async_save"):
        return event.name if "no_dist" not in event.keywords and not event.partly else ""
    return ""


_NAMES = ("fully_shard", FSDP1, "FSDPModule", "FullyShardedDataParallelPlugin", "get_model_state_dict")


def _is_plain(facts: Facts, value: Thing, event: Event) -> bool:
    """Say whether a module is certainly not sharded."""
    known = unwrapped(value).kind == "object" or unwrapped(value).kind.endswith(
        (".from_pretrained", ".from_config")
    )
    sharded = any(item is value for _, item in facts.shardings) or facts.generation(value, event)
    return known and not sharded and not facts.is_given_away(value)


def _saves(facts: Facts, report: Report) -> None:
    for event in facts.calls("torch.save"):
        stored = [item for item in flat(event.argument) if isinstance(item, Thing)]
        for item in stored:
            if item.kind == "state_dict" and _holds_shards(facts, item, event):
                report("FSD651", event.node, "the state dict holds the shards of this rank alone")
                break
        else:
            _every_rank(facts, event, stored, report)
    for event in facts.methods("save_pretrained"):
        if "state_dict" in event.keywords or event.partly:
            continue
        target = event.target
        if isinstance(target, Thing) and facts.generation(target, event) == 2 and target.owner is None:
            report(
                "FSD653",
                event.node,
                f"{label(target)} is sharded: save_pretrained needs a gathered state_dict",
            )


def _holds_shards(facts: Facts, state: Thing, event: Event) -> bool:
    whole = state.parent
    if whole is None:
        return False
    if facts.generation(whole, event) == 2:
        return True
    maker = next((item for item in facts.optimizers if item.result is whole), None)
    model = facts.module_of(maker.argument) if maker is not None else None
    return model is not None and facts.generation(model, event) == 2


def _every_rank(facts: Facts, event: Event, stored: list[Thing], report: Report) -> None:
    path = event.get("f", 1)
    if path is None or event.partly or any("rank" in item.tags for item in flat(path)) or "rank" in path.tags:
        return
    if any(not _is_every_step(guard) for guard in event.guards):
        return
    for item in stored:
        full = item.kind in _GATHERS and _is_full(item)
        old = item.kind == "state_dict" and facts.generation(item.parent, event) == 1 and not _is_local(facts)
        if full or old:
            report("FSD652", event.node, "every rank writes this path")
            return


def _is_full(state: Thing) -> bool:
    options = state.keywords.get("options") or (state.args[1] if len(state.args) > 1 else None)
    made = made_by(options, "StateDictOptions")
    return made is not None and is_constant(made.keywords.get("full_state_dict"), True)


def _is_local(facts: Facts) -> bool:
    return facts.mentions("SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "ShardedStateDictConfig")


def _is_every_step(guard: Condition) -> bool:
    """Say whether a condition is about steps and not about ranks."""
    test = getattr(guard.node, "test", None)
    return (
        isinstance(test, ast.AST)
        and any(isinstance(node, ast.Mod) for node in ast.walk(test))
        and not guard.one_rank
    )


_INSTEAD = {
    "no_sync": "set_requires_gradient_sync",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "state_dict_type": "get_model_state_dict",
    "summon_full_params": "full_tensor() of the parameters",
    "set_state_dict_type": "get_model_state_dict",
    "optim_state_dict": "get_optimizer_state_dict",
    "full_optim_state_dict": "get_optimizer_state_dict",
}


def _old_calls(facts: Facts, report: Report) -> None:
    for event in facts.methods("no_sync", "clip_grad_norm_"):
        target = event.target
        if facts.generation(target, event) == 2 and not _defines(target, event.name):
            report("FSD654", event.node, f"{label(target)} has no {event.name}; use {_INSTEAD[event.name]}")
    for event in facts.of_kind("attribute"):
        target = event.target
        if event.name == "module" and facts.generation(target, event) == 2 and not _defines(target, "module"):
            report("FSD654", event.node, f"{label(target)} has no module: fully_shard does not wrap")
    for name in (
        "state_dict_type",
        "set_state_dict_type",
        "summon_full_params",
        "optim_state_dict",
        "full_optim_state_dict",
    ):
        for event in facts.calls(f"{FSDP1}.{name}"):
            if facts.generation(event.argument, event) == 2:
                report("FSD654", event.node, f"FSDP.{name} is for FSDP1; use {_INSTEAD[name]}")
    for event in facts.calls("builtins.isinstance"):
        wanted = event.args[1] if len(event.args) > 1 else None
        old = isinstance(wanted, Library) and wanted.name.endswith(f".{FSDP1}")
        if old and facts.generation(event.argument, event) == 2:
            report(
                "FSD654",
                event.node,
                "fully_shard does not make a FullyShardedDataParallel: test for FSDPModule",
            )


def _defines(value: Value | None, name: str) -> bool:
    if not isinstance(value, Thing):
        return False
    if name in value.parts and (value.owner is not None or not isinstance(value.parts[name], Thing)):
        return True
    if value.owner is None:
        return False
    return value.owner.lookup(name) is not None
