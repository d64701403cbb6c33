"""The run that a training script describes, from its text alone.

Trainers of transformers and TRL decide what they decide for files of arguments. A loop that the script holds
decides the rest itself (torch 2.13 ``distributed/fsdp/_fully_shard``, ``fully_sharded_data_parallel.py``;
accelerate 1.15 ``utils/dataclasses.py``, ``accelerator.py``; peft 0.21 ``tuners/lora/config.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import PurePath
from typing import Any, Literal

from fsdptool.config.command_lines import NamedFiles
from fsdptool.config.dialects.run_reader import (
    Launch,
    RunFile,
    RunKeys,
    RunReader,
    dtype_word,
    global_batch,
    names,
    sides,
    state_bits,
)
from fsdptool.config.dialects.trainer.run import arguments, computed_in
from fsdptool.config.dialects.trainer.run_keys import KEYS as TRAINER
from fsdptool.files.text import SourceText, UnreadableError
from fsdptool.records.described_run import NOT_FACTS, DescribedMesh, DescribedRun, UnmodelledKey
from fsdptool.records.diagnostic import EffectiveSetting
from fsdptool.scripts import SCRIPTS
from fsdptool.scripts.hydra_files import Packaged, has_content, package_of
from fsdptool.scripts.judge import parsed
from fsdptool.scripts.models import PARTS_OF_UNSLOTH, RECOMPUTED_BY_UNSLOTH
from fsdptool.scripts.runs import read_script_run
from fsdptool.scripts.settings import ScriptRun, Setting
from fsdptool.source.known_models import STORED_IN_FP32, family_of_name
from fsdptool.source.peft_targets import PEFT_TARGETS, USUAL, type_of

_MODEL = (
    "model_name_or_path dtype attn_implementation use_peft lora_r lora_alpha padding max_length resolution"
)
_QUANTISED = "load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant"
_LOOP = RunKeys(
    "torch",
    "2.13.0",
    no_effect=names(f"{_MODEL} {_QUANTISED} fsdp_version"),
    memory=sides(more="one_unit", either="auto_wrap_policy fsdp_plugin sharding_strategy"),
)
_ACCELERATE = replace(_LOOP, program="accelerate", version="1.15.0")
_LIGHTNING = replace(_LOOP, program="lightning", version="2.6.6")
_MEMORY: Mapping[str, Literal["less", "more"] | None] = {
    "LoraConfig.use_dora": "more", "LoraConfig.bias": "more", "LoraConfig.target_parameters": None,
    "LoraConfig.layers_to_transform": "less", "LoraConfig.rank_pattern": None,
    "LoraConfig.exclude_modules": "less",
    "LoraConfig.trainable_token_indices": "more", "Accelerator.deepspeed_plugin": None,
    "Accelerator.parallelism_config": None, "Accelerator.fp8": None, "Accelerator.megatron_lm_plugin": None,
    "FullyShardedDataParallelPlugin.mixed_precision_policy": None,
    "FullyShardedDataParallelPlugin.ignored_modules": None,
    "FullyShardedDataParallelPlugin.min_num_params": None,
    "FullyShardedDataParallelPlugin.activation_checkpointing_offload": "less",
    **{f"weights.{name}": "less" for name in ("requires_grad", *PARTS_OF_UNSLOTH)},
    "Trainer.ref_model": "more", "Trainer.precision": None, "Fabric.precision": None,
}  # fmt: skip
"""Arguments of other calls that change memory, and whether a run needs less or more for them."""
_INERT = (
    "use_cache",
    "pretraining_tp",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "_attn_implementation",
)
"""Attributes of a model's configuration that change no shape of a training step."""
_STAND_INS: tuple[Any, ...] = (
    1, 2, True, False, "float32", "bfloat16", "adamw_8bit", "muon", "eager", "full_shard", ["Layer"],
)  # fmt: skip
"""What stands in turn for a value that cannot be read, to find the facts that change with it."""
_OF_WHOLE_RUN = frozenset({"steps", "epochs", "processes"})
_UNSAID = Launch()


def describe_script(
    source: SourceText,
    words: Sequence[str] = (),
    launch: Launch = _UNSAID,
    load: Callable[[str], object] | None = None,
) -> DescribedRun | None:
    """Return the run that a script starts; None where it starts none that is known.

    Args:
        source: The script, or a notebook.
        words: The arguments that it is started with; defaults count for the others.
        launch: What starts it.
        load: Returns a file of settings that it loads as plain data, or None.

    Raises:
        ConfigError: It does not parse, or takes too many steps to follow.
    """
    script = read_script_run(source, words, load=load, processes=launch.processes)
    return described(script, source.path, launch) if script is not None else None


def _tree_of(name: str, files: NamedFiles) -> object:
    """Return the tree of a file in Python; where it has none, something else."""
    try:
        source = files.read(name, SCRIPTS)
    except UnreadableError:
        return None
    return parsed(source.text) if isinstance(source, SourceText) else None


def loaded(name: str, files: NamedFiles, read: Callable[[NamedFiles, str], object]) -> object:
    """Return a file of a script's project: plain data, or the tree of one in Python.

    Of one for Hydra, which may be empty, the data also say where a comment puts them.
    """
    if name.endswith(".py"):
        return _tree_of(name, files)
    data = read(files, name)
    if not name.endswith((".yaml", ".yml")) or not isinstance(data, dict | None):
        return data
    try:
        source = files.read(name)
    except UnreadableError:
        return data
    if isinstance(source, str) or (data is None and has_content(source.text)):
        return data
    made = Packaged(data or {})
    made.package = package_of(source.text)
    return made


def script_settings(
    source: SourceText, words: Sequence[str] = (), load: Callable[[str], object] | None = None
) -> tuple[EffectiveSetting, ...]:
    """Return what a script sets, with its lines; arguments and errors as :func:`describe_script`."""
    script = read_script_run(source, words, load=load)
    return tuple(_effective(item) for item in script.settings.values()) if script is not None else ()


def _effective(item: Setting) -> EffectiveSetting:
    value = tuple(map(str, item.value)) if isinstance(item.value, list) else item.value
    if not isinstance(value, str | int | float | bool | tuple | None):
        value = str(value)
    origin = f"line {item.line}"
    if item.unread is not None:
        origin += f", not read: {item.unread}"
    elif item.option is not None:
        origin += f", {item.option}"
    return EffectiveSetting(item.name, value, origin, item.line)


def described(script: ScriptRun, path: str | None, launch: Launch = _UNSAID) -> DescribedRun:
    """Return the run of the settings of a script; ``path`` is its file."""
    given = _of_launch(script, launch)
    fsdp = script.fsdp
    if given and fsdp is None and launch.unread is None:
        fsdp = launch.fsdp or "none"
    script = replace(script, fsdp=fsdp, processes=script.processes or launch.processes)
    unread = {key: item for key, item in script.settings.items() if item.unread is not None}
    data = {key: item.value for key, item in script.settings.items() if key not in unread}
    # None leaves a setting to the launcher.
    data |= {key: value for key, value in given.items() if data.get(key) is None}
    run = _described(script, data, path, launch)
    limits: list[UnmodelledKey] = []
    open_facts: set[str] = set()
    inert: list[str] = []
    problems = list(script.problems)
    for key in script.further:
        open_facts |= _decided_by(script, data, key, path, launch)
    if "fsdp" in open_facts:
        open_facts.add("cpu_offload")
    beside = {
        "packing": "documents_joined",
        "loss_type": "fused_loss",
        RECOMPUTED_BY_UNSLOTH: "gradient_checkpointing",
    }
    open_facts |= {fact for key, fact in beside.items() if key in script.further}
    for key, item in unread.items():
        changed = _decided_by(script, data, key, path, launch)
        open_facts |= changed & _OF_WHOLE_RUN
        if key in _MEMORY or key.startswith("config.") or changed - _OF_WHOLE_RUN:
            open_facts |= changed
            decided = ("family", "model") if key.startswith("config.") else tuple(sorted(changed))
            limits.append(UnmodelledKey(item.name, "memory", decides=decided))
            problems.append(f"line {item.line}: {item.name} is not read: it is {item.unread}")
        else:
            inert.append(item.name)
    for key, item in script.settings.items():
        if key in unread or not _is_other(key):
            continue
        if key in _MEMORY and item.value not in (None, False, "none", []):
            limits.append(UnmodelledKey(item.name, "memory", _MEMORY[key]))
        elif key.startswith("beside."):
            limits.append(UnmodelledKey(item.name, "memory", "more"))
        elif key.startswith("config.") and key.removeprefix("config.") not in _INERT:
            limits.append(UnmodelledKey(item.name, "memory", decides=("family", "model")))
        else:
            inert.append(item.name)
    keys = run.keys
    named = {key: item.name for key, item in script.settings.items()}
    told = replace(
        keys,
        used=tuple(dict.fromkeys(named.get(key, key) for key in keys.used)),
        no_effect=tuple(dict.fromkeys((*(named.get(key, key) for key in keys.no_effect), *inert))),
        not_modelled=(*(replace(key, key=named.get(key.key, key.key)) for key in keys.not_modelled), *limits),
        learning=tuple(named.get(key, key) for key in keys.learning),
        lines={item.name: item.line for item in script.settings.values()},
    )
    facts: dict[str, Any] = {name: None for name in open_facts if "." not in name}
    facts |= {name: () for name in facts if name == "lora_modules_to_save"}
    mesh = {name.removeprefix("mesh."): None for name in open_facts if name.startswith("mesh.")}
    return replace(
        run,
        **facts,
        mesh=replace(run.mesh, **mesh),
        keys=told,
        defaults=tuple(item for item in run.defaults if item.key not in unread),
        notes=(*run.notes, *_notes(script)),
        problems=(*run.problems, *problems),
        unresolved=(*run.unresolved, *problems),
    )


def _notes(script: ScriptRun) -> tuple[str, ...]:
    """Return what arguments, variables and fields of the script decide."""
    taken = [
        f"{item.name} = {item.value} ({item.option})"
        for item in script.settings.values()
        if item.option is not None and item.unread is None and item.value is not None
    ]
    return (
        (f"what the script's own arguments, variables and fields decide: {'; '.join(taken)}",)
        if taken
        else ()
    )


def _is_other(key: str) -> bool:
    """Whether a setting belongs to a call that no table of a program lists."""
    return "." in key and not key.startswith(("fsdp_config.", "mesh."))


def _of_launch(script: ScriptRun, launch: Launch) -> dict[str, Any]:
    """Return what ``Accelerator`` takes from ``accelerate launch``, as settings of the script.

    A plugin of the script replaces FSDP's settings (accelerate 1.15 ``accelerator.py``).
    """
    if script.form != "accelerate" or launch.program != "accelerate":
        return {}
    found: dict[str, Any] = {"mixed_precision": launch.mixed_precision}
    if launch.compiles:
        found["torch_compile"] = True
    if script.fsdp is None and launch.fsdp is not None:
        found |= {
            "wrap_classes": list(launch.wrap_classes or ()) or None,
            "reshard_after_forward": launch.reshard,
            "cpu_offload": launch.cpu_offload or None,
            "gradient_checkpointing": launch.checkpointing or None,
        }
        if launch.mesh is not None:
            found |= {
                f"mesh.{name}": getattr(launch.mesh, name)
                for name in ("dp_replicate", "dp_shard", "cp", "tp")
            }
    return {key: value for key, value in found.items() if value is not None}


def _decided_by(
    script: ScriptRun, data: Mapping[str, Any], key: str, path: str | None, launch: Launch
) -> set[str]:
    """Return the facts that change with a setting whose value is not known."""
    if _is_other(key):
        return set()
    seen: dict[str, set[str]] = {}
    for value in _STAND_INS:
        for name, fact in _facts(_described(script, {**data, key: value}, path, launch)).items():
            seen.setdefault(name, set()).add(repr(fact))
    return {name for name, values in seen.items() if len(values) > 1}


def _facts(run: DescribedRun) -> dict[str, Any]:
    facts = {item.name: getattr(run, item.name) for item in fields(run) if item.name not in NOT_FACTS}
    mesh = facts.pop("mesh")
    return facts | {f"mesh.{item.name}": getattr(mesh, item.name) for item in fields(mesh)}


def _described(script: ScriptRun, data: Mapping[str, Any], path: str | None, launch: Launch) -> DescribedRun:
    """Return the run of settings whose values are known."""
    nested: dict[str, Any] = {}
    for key, value in data.items():
        section, dot, last = key.partition(".")
        if dot and not _is_other(key):
            nested.setdefault(section, {})[last] = value
        elif not dot and key != "model class":
            nested[key] = value
    launch = replace(launch, verb=script.objective or "", script="", processes=script.processes)
    recompute = nested.pop(RECOMPUTED_BY_UNSLOTH, None)
    run = _of_form(script, nested, path, launch)
    return _of_unsloth(run, recompute) if RECOMPUTED_BY_UNSLOTH in script.settings else run


def _of_form(script: ScriptRun, nested: dict[str, Any], path: str | None, launch: Launch) -> DescribedRun:
    """Return the run of settings as the loop decides it that the script starts."""
    if script.form == "trl":
        from fsdptool.config.dialects.trl.run import describe

        nested.pop("padding", None)
        if script.objective in ("grpo", "rloo"):  # their rows are a prompt and a completion
            nested.pop("max_length", None)
        return describe(RunFile(nested, launch, path, added=script.own_fields))
    read = RunReader(RunFile(nested, launch, path, added=script.own_fields), _table(script))
    model = read.text("model_name_or_path")
    if model is None and script.own_class is not None:
        model = f"{PurePath(path or 'script').stem}:{script.own_class}"
        read.notes.append(f"the model is {script.own_class}, a class of the script, which is not built here")
    facts = {"model": model, "objective": script.objective, "quantisation": _quantisation(read)}
    facts |= _trainer(read) if script.form == "trainer" else _loop(read, script, model)
    length, padded = read.whole("max_length", "max_seq_length"), read.text("padding")
    side = read.whole("resolution")
    return read.describe(
        **facts,
        sequence_length=length,
        height=side,
        width=side,
        full_rows=True if padded == "max_length" else None,
        attention=read.text("attn_implementation")
        or read.default("attn_implementation", "sdpa", "transformers' default"),
    )


def _of_unsloth(run: DescribedRun, recompute: object) -> DescribedRun:
    """Return a run of TRL whose model unsloth loaded.

    ``True`` recomputes layers, ``"unsloth"`` keeps their inputs in host memory, too; adapters are fp32; the
    loss holds the logits of one chunk; its models ignore the mask while training (unsloth 2025.11
    ``models/_utils.py``, ``models/llama.py``; unsloth-zoo 2025.11
    ``training_utils.py``, ``fused_losses/cross_entropy_loss.py``).
    """
    how: Literal["none", "full", "offload"] | None = None
    if recompute is not None:
        how = "offload" if recompute == "unsloth" else "full" if recompute in (True, "true") else "none"
    stored = run.stored_dtype if run.method == "full" else "fp32"
    return replace(
        run,
        gradient_checkpointing=how,
        # The forward computes it from labels; trainers of preferences give none.
        fused_loss="chunked" if run.objective in ("sft", "pretrain") else run.fused_loss,
        stored_dtype=stored,
        takes_mask=False,
        optimizer_state_bits=state_bits(run.optimizer, stored),
        keys=replace(
            run.keys,
            used=(*run.keys.used, RECOMPUTED_BY_UNSLOTH),
            not_modelled=(*run.keys.not_modelled, UnmodelledKey("unsloth's kernels", "memory", "less")),
        ),
    )


def _table(script: ScriptRun) -> RunKeys:
    if script.form == "trainer":
        return replace(TRAINER, no_effect=TRAINER.no_effect | _LOOP.no_effect | names("wrap_classes"))
    return {"accelerate": _ACCELERATE, "lightning": _LIGHTNING}.get(script.form, _LOOP)


def _trainer(read: RunReader) -> dict[str, Any]:
    """Return what a script with transformers' Trainer decides."""
    facts = arguments(read)
    base = dtype_word(read.text("dtype")) or "checkpoint"
    adapter = _adapter(read)
    sharded = facts["fsdp"] != "none"
    mixed = sharded and facts["compute_dtype"] != "fp32"
    stored = "fp32" if mixed or adapter["method"] != "full" else base
    joined = read.flag("packing")
    return {
        **facts,
        **adapter,
        "compute_dtype": computed_in(facts["compute_dtype"], base),
        "base_dtype": base,
        "stored_dtype": stored,
        "reduce_dtype": facts["compute_dtype"] if mixed else stored,
        "packing": joined,
        "documents_joined": joined,
        "optimizer_state_bits": state_bits(facts["optimizer"], stored),
    }


def _loop(read: RunReader, script: ScriptRun, model: str | None) -> dict[str, Any]:
    """Return what the loop of a script decides."""
    named = read.text("dtype")
    base = dtype_word(named) or ("checkpoint" if named == "auto" else "fp32")
    family = (family_of_name(model)[0] or "") if model is not None else ""
    if base == "checkpoint":
        base = "fp32" if family.partition(":")[0] in STORED_IN_FP32 else base
    mixed = dtype_word(read.text("mixed_precision"))
    given, reduced = dtype_word(read.text("param_dtype")), dtype_word(read.text("reduce_dtype"))
    cast = dtype_word(read.text("autocast"))
    adapter = _adapter(read)
    stored = "fp32" if adapter["method"] != "full" else base
    compute = given or mixed or cast or base
    if mixed is not None and script.fsdp != "none":
        stored, reduced = ("fp32" if mixed != "fp32" else stored), reduced or mixed
    micro = read.whole("batch_size")
    accumulation = read.whole("gradient_accumulation_steps")
    mesh = DescribedMesh(
        **{name: read.whole(f"mesh.{name}") for name in ("dp_replicate", "dp_shard", "cp", "tp") if
           read.has(f"mesh.{name}")}
    )  # fmt: skip
    optimizer = read.text("optimizer")
    classes = read.names("wrap_classes")
    reshard = read.raw("reshard_after_forward")
    read.use("reshard_after_forward")
    rows = read.has("padding") or (script.settings.get("max_length") or Setting("", 0, 0)).name.startswith(
        "token"
    )
    sharded = script.fsdp != "none"
    joined = read.flag("packing")
    steps = read.whole("max_steps")
    return {
        **adapter,
        "fsdp": script.fsdp,
        "base_dtype": base,
        "stored_dtype": stored,
        "compute_dtype": compute,
        "reduce_dtype": (reduced or given or stored) if sharded else stored,
        "micro_batch": micro,
        "accumulation": 1 if accumulation is None else accumulation,
        "global_batch": global_batch(micro, accumulation or 1, script.processes, mesh),
        "optimizer": optimizer,
        "optimizer_state_bits": state_bits(optimizer, stored),
        "gradient_checkpointing": "full" if read.flag("gradient_checkpointing") else "none",
        "fused_loss": "none" if script.objective == "sft" else None,
        "compile": read.flag("torch_compile"),
        "processes": script.processes,
        "nodes": script.nodes,
        "momentum": read.number("momentum"),
        "loss_in_forward": script.loss_in_forward,
        "keeps_logits": script.keeps_logits,
        "steps": steps if steps is not None and steps > 0 else None,
        "epochs": read.number("num_train_epochs"),
        "mesh": mesh,
        "wrap_classes": (classes,) if isinstance(classes, str) else classes,
        "reshard": (reshard if isinstance(reshard, bool | int) else True) if sharded else None,
        "cpu_offload": read.flag("cpu_offload"),
        "packing": True if joined else False if rows else None,
        "documents_joined": joined or not rows,
    }


def _adapter(read: RunReader) -> dict[str, Any]:
    """Return the method of peft's LoraConfig."""
    if not read.flag("use_peft"):
        return {"method": "full"}
    four, eight = read.flag("load_in_4bit"), read.flag("load_in_8bit")
    saved = read.names("lora_modules_to_save")
    kind = type_of(read.text("model_name_or_path") or "")
    return {
        "method": "qlora" if four else "lora8bit" if eight else "lora",
        "lora_rank": read.whole("lora_r"),
        "lora_dropout": read.number("lora_dropout"),
        "lora_targets": read.names("lora_target_modules") or PEFT_TARGETS.get(kind or "", USUAL),
        "lora_modules_to_save": (saved,) if isinstance(saved, str) else saved or (),
    }


def _quantisation(read: RunReader) -> str:
    if read.flag("load_in_8bit"):
        return "bnb int8"
    if not read.flag("load_in_4bit"):
        return "none"
    kind = read.text("bnb_4bit_quant_type") or "fp4"
    return f"bnb {kind}, {'double' if read.flag('use_bnb_nested_quant') else 'no double'} quantisation"
