"""The options of a plan, declared once: the command, ``fsdptool.plan`` and the request read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast, get_args

from fsdptool.errors import PlanError
from fsdptool.options import Declared, Option, of_declared_type
from fsdptool.options import declared as declared_in
from fsdptool.records.cluster import DEVICE_PROFILES, Cluster
from fsdptool.records.fused_loss import NamedLoss
from fsdptool.records.plan import AdapterDtype, Assumption, Preference
from fsdptool.records.plan_details import PipelineSchedule
from fsdptool.records.recipe import MethodName, Recipe
from fsdptool.records.sharding import FsdpSettings, Loading
from fsdptool.spelling import unknown_option

LOSSES = ("whole", "kept", "chunked", "model", *get_args(NamedLoss))
"""``whole`` keeps fp32 logits of all tokens, as transformers does; ``chunked`` those of 1,024 at a time;
``model`` what the model's own forward keeps, given ``labels``; the others are losses of other programs."""

METHODS = tuple(
    word for name in get_args(MethodName) for word in ((name, "qlora") if name == "lora" else (name,))
)
"""A recipe's training methods, and ``qlora``: ``lora`` with an nf4 base."""

OPTIMAL = "optimal"
"""What ``checkpointing`` takes to have the policy found."""


def reshard_value(value: bool | int | str) -> bool | int:
    """Return ``true``, ``false`` or a number of ranks as a value.

    Raises:
        PlanError: It is none of them.
    """
    words = {"true": True, "yes": True, "false": False, "no": False}
    text = str(value).lower()
    if text in words:
        return words[text]
    if text.isdecimal() and int(text) > 1:
        return int(text)
    raise PlanError(
        f"--reshard {value!r} is not supported", help="write true, false or a number of ranks above 1"
    )


def hsdp_shape(text: str) -> tuple[int, int]:
    """Return the replicate and shard sizes of ``2x8``.

    Raises:
        PlanError: The text is not a mesh shape.
    """
    left, _, right = text.lower().replace(" ", "").partition("x")
    if not left.isdecimal() or not right.isdecimal():
        raise PlanError(
            f"--hsdp {text!r} is not a mesh shape", help="write replicate x shard, for example 2x8"
        )
    return int(left), int(right)


def one_of(flag: str, value: str, choices: Sequence[str]) -> str:
    """Return the choice ``value`` spells, forgiving case and dashes.

    Raises:
        PlanError: It is none of them.
    """
    spelled = {choice.replace("-", "_").lower(): choice for choice in choices}
    match = spelled.get(value.replace("-", "_").lower())
    if match is None:
        raise PlanError(f"{flag} {value!r} is not supported", help=f"choose one of: {', '.join(choices)}")
    return match


class Options(TypedDict, total=False):
    """Every option of ``plan``; one that is left out or None is not given. See ``fsdptool plan --help``."""

    # fmt: off
    reference: Annotated[str | None, Option(
        "Model: family:flavour, Hugging Face id, folder, config.json or package.module:Class; or a training"
        " file of another program, which is planned as it describes its run.",
        sets="recipe.model.reference")]
    model: Annotated[str | None, Option(
        "Model of the run that a training file describes, where its own is not known here.", "Model")]
    gpu: Annotated[str | None, Option("GPU, for example H100-80GB-SXM.", "Hardware")]
    gpus: Annotated[int | None, Option(
        "GPUs (or CPU processes) per node.", "Hardware", flags=("--gpus", "--processes"))]
    nodes: Annotated[int | None, Option("Number of nodes.", "Hardware")]
    clusters: Annotated[Sequence[str | Path | Cluster], Option(
        "Cluster file (repeatable, to compare offers).", "Hardware", flags=("--cluster",))]
    gpus_file: Annotated[str | Path | None, Option(
        "JSON or YAML file with extra GPU definitions.", "Hardware")]
    machine: Annotated[str | Path | None, Option("Machine table written by fsdptool calibrate.", "Hardware")]
    network: Annotated[str | float | None, Option(
        "Bandwidth between nodes per GPU: '400 Gbit/s', '50 GB/s'.", "Hardware")]
    host_memory: Annotated[str | int | None, Option("Host memory per node: '2 TiB'.", "Hardware")]
    price: Annotated[float | None, Option("Price per GPU hour.", "Hardware")]
    expandable_segments: Annotated[bool, Option(
        "Plan for workers with PYTORCH_ALLOC_CONF=expandable_segments:True (train's default).", "Hardware")]
    profile: Annotated[str | None, Option("Device profile", "Hardware", choices=DEVICE_PROFILES)]
    recipe: Annotated[str | Path | Recipe | None, Option("Recipe file.", "Recipe")]
    config: Annotated[str | Path | FsdpSettings | None, Option(
        "accelerate YAML, or another dialect.", "Recipe")]
    method: Annotated[str | None, Option(
        "Training method (qlora is lora with an nf4 base)", "Recipe", "recipe.method.name",
        choices=METHODS)]
    lora_rank: Annotated[int | None, Option("LoRA rank.", "Recipe", "recipe.method.lora.rank", minimum=1)]
    lora_targets: Annotated[Sequence[str], Option(
        "LoRA target module (repeatable).", "Recipe", "recipe.method.lora.targets", ("--lora-target",),
        value=tuple)]
    lora_base: Annotated[str | None, Option(
        "Storage of the frozen base weights", "Recipe", "recipe.method.lora.base")]
    adapters: Annotated[str | None, Option(
        "Placement of the adapters", "Recipe", "recipe.method.lora.adapters")]
    adapter_dtype: Annotated[str | None, Option(
        "Dtype in which another program stores adapters; by default fp32, as peft", "Recipe",
        choices=get_args(AdapterDtype))]
    teacher: Annotated[str | None, Option("Teacher model of a distillation.", "Recipe")]
    objective: Annotated[str | None, Option("Training objective.", "Recipe", "recipe.objective.name")]
    loss: Annotated[str | None, Option(
        "Logits that a loss over tokens holds, to plan for another training loop (kept: as whole, with the"
        " fp32 logits until backward ends; model: the loss that the model computes from its labels)",
        "Recipe", choices=LOSSES)]
    fused_loss: Annotated[bool | None, Option(
        "Whether the head computes the loss in chunks, without whole logits; by default on GPUs, where that"
        " takes less memory.", "Recipe", "recipe.objective.fused", ("--fused-loss/--no-fused-loss",))]
    loss_in_forward: Annotated[bool | None, Option(
        "Whether the model's forward computes the loss (labels=) or the loop after it. By default, as the"
        " program does that reads the configuration.", "Recipe",
        flags=("--loss-in-forward/--loss-after-forward",))]
    optimizer: Annotated[str | None, Option("Optimizer", "Recipe", "recipe.optimizer.name")]
    optimizer_implementation: Annotated[str | None, Option(
        "Optimizer kernels", "Recipe", "recipe.optimizer.implementation",
        closes=("optimizer_implementation",))]
    precision: Annotated[str | None, Option(
        "Mixed precision", "Recipe", "settings.mixed_precision",
        choices=("fp32", "bf16", "fp16", "fp8", "no"), value=lambda name: "no" if name == "fp32" else name)]
    dtype: Annotated[str | None, Option(
        "dtype of the stored parameters (auto: float32; for a frozen base that of --precision)", "Recipe",
        "recipe.model.dtype")]
    attention: Annotated[str | None, Option("Attention implementation", "Recipe", "recipe.model.attention")]
    ema: Annotated[float | None, Option(
        "EMA decay, between 0 and 1.", "Recipe", "recipe.ema.decay")]
    sequence_length: Annotated[int | None, Option(
        "Tokens per sample.", "Batch", "recipe.batch.sequence_length", ("--seq-len", "--sequence-length"))]
    lengths: Annotated[str | Path | None, Option(
        "File with the lengths of tokenised samples: also plan micro-batches that are padded to their longest"
        " sample (docs/how-to/plan-lengths-that-vary.md).", "Batch")]
    height: Annotated[int | None, Option(
        "Image height in pixels.", "Batch", "recipe.batch.height")]
    width: Annotated[int | None, Option(
        "Image width in pixels.", "Batch", "recipe.batch.width")]
    frames: Annotated[int | None, Option(
        "Video frames per sample.", "Batch", "recipe.batch.frames")]
    micro_batch: Annotated[int | None, Option(
        "Samples per rank and forward pass.", "Batch", "recipe.batch.micro_batch",
        closes=("micro_batch", "accumulation"))]
    accumulation: Annotated[int | None, Option(
        "Forward passes per optimizer step.", "Batch", "recipe.batch.accumulation",
        closes=("micro_batch", "accumulation"))]
    global_batch: Annotated[int | None, Option(
        "Samples per step, total over all ranks.", "Batch", "recipe.batch.global_batch")]
    steps: Annotated[int | None, Option(
        "Optimizer steps of the run, for its duration and price.", "Batch", "recipe.steps")]
    max_batch: Annotated[bool, Option("Find the largest micro-batch that fits.", "Batch")]
    layout: Annotated[str | None, Option("Layout of the FSDP units", "Sharding", "recipe.sharding.layout")]
    wrap: Annotated[Sequence[str], Option(
        "Class to wrap (repeatable).", "Sharding", "settings.wrap_classes", value=tuple, closes=("wrap",))]
    exclude: Annotated[Sequence[str], Option("Class never to wrap (repeatable).", "Sharding")]
    reshard: Annotated[bool | int | str | None, Option(
        "reshard_after_forward: true, false or a number of ranks.", "Sharding",
        "settings.reshard_after_forward", value=bool, closes=("reshard_after_forward",))]
    checkpointing: Annotated[str | None, Option(
        "Activation checkpointing: none, full, every_N, selective, selective:every-2-matmuls,"
        " selective:OPERATOR,..., or optimal, which finds the best policy"
        " (docs/how-to/activation-checkpointing.md).",
        "Sharding", "settings.activation_checkpointing", value=lambda mode: mode != "none",
        closes=("checkpointing",))]
    compile: Annotated[bool | None, Option(
        "Whether blocks are compiled; by default on GPUs, where that is known to work.", "Sharding",
        "recipe.sharding.compile", ("--compile/--no-compile",))]
    offload: Annotated[bool | None, Option(
        "CPU offload of parameters, gradients and optimizer.", "Sharding", "settings.cpu_offload",
        ("--offload/--no-offload",), closes=("cpu_offload",))]
    hsdp: Annotated[str | None, Option("Hybrid sharding: replicate x shard, for example 2x8.", "Sharding")]
    dp_replicate: Annotated[int | None, Option(
        "Replicas of hybrid sharding.", sets="settings.mesh.dp_replicate", closes=("mesh",))]
    dp_shard: Annotated[int | None, Option(
        "Ranks that shard one replica.", sets="settings.mesh.dp_shard", closes=("mesh",))]
    group_embedding: Annotated[str | None, Option(
        "FSDP unit of large untied embeddings", "Sharding", "recipe.sharding.grouping.embedding")]
    group_head: Annotated[str | None, Option(
        "FSDP unit of the final norm and an untied head", "Sharding", "recipe.sharding.grouping.head")]
    last_block: Annotated[str | None, Option(
        "Last block, between forward and backward", "Sharding", "recipe.sharding.grouping.last_block")]
    loading: Annotated[str | None, Option(
        "How the training loop fills the model on GPUs: by each rank's rows (fsdptool), by whole parameters"
        " that are broadcast, or by whole units (accelerate with and without cpu_ram_efficient_loading). By"
        " default, as the program of the layout does", "Sharding", choices=get_args(Loading))]
    cp: Annotated[int | None, Option(
        "Context-parallel ranks.", "Sharding", "settings.mesh.cp", closes=("cp",))]
    tp: Annotated[int | None, Option(
        "Tensor-parallel ranks: each holds a part of every layer.", "Sharding", "settings.mesh.tp",
        closes=("tp",))]
    sequence_parallel: Annotated[bool | None, Option(
        "Also divide the hidden states between layers over the tensor-parallel ranks.", "Sharding",
        "recipe.sharding.sequence_parallel", ("--sequence-parallel/--no-sequence-parallel",),
        closes=("sequence_parallel",))]
    assume: Annotated[Sequence[str], Option(
        "What another training loop does (repeatable; in time only, planned and not trained)",
        "Sharding", choices=get_args(Assumption))]
    ep: Annotated[int | None, Option(
        "Expert-parallel ranks: each holds whole experts and receives the tokens for them.", "Sharding",
        "recipe.sharding.expert_parallel", closes=("ep",))]
    pp: Annotated[int | None, Option("Pipeline stages (planned, not trained).", "Sharding", minimum=1)]
    pp_schedule: Annotated[str | None, Option(
        "Pipeline schedule", "Sharding", choices=get_args(PipelineSchedule))]
    pp_virtual: Annotated[int | None, Option("Virtual stages per pipeline rank.", "Sharding", minimum=2)]
    prefetch: Annotated[int | None, Option(
        "FSDP units to prefetch.", "Sharding", "recipe.sharding.prefetch", closes=("prefetch",), minimum=1)]
    reduce_dtype: Annotated[str | None, Option(
        "Gradient reduction dtype", "Sharding", "recipe.sharding.reduce_dtype",
        choices=("float32", "bfloat16", "float16", "param"),
        value=lambda name: None if name == "param" else name)]
    gradients: Annotated[str | None, Option(
        "State of accumulated gradients", "Sharding", "recipe.sharding.accumulation", closes=("gradients",))]
    revision: Annotated[str | None, Option(
        "Revision of a Hugging Face id.", "Model", "recipe.model.revision")]
    component: Annotated[str | None, Option(
        "Component of a diffusers pipeline.", "Model", "recipe.model.component")]
    overrides: Annotated[Mapping[str, Any], Option(
        "Replace a configuration value: KEY=JSON (repeatable).", "Model", "recipe.model.overrides",
        ("--override",))]
    trust_remote_code: Annotated[bool, Option(
        "Allow code that comes with the model, or that package.module:Class names, to run.", "Model",
        "recipe.model.trust_remote_code", ("--trust-remote-code", "--allow-import"))]
    search: Annotated[bool | None, Option(
        "Search all settings, or evaluate only this configuration. Default: search the settings that are not"
        " given.", "Answer", flags=("--search/--no-search",))]
    quick: Annotated[bool | None, Option(
        "Stop the search at the first configuration that fits.", "Answer")]
    prefer: Annotated[str | None, Option("What to optimize", "Answer", choices=get_args(Preference))]
    # fmt: on


def declared() -> Mapping[str, Declared]:
    """Return every option of :class:`Options`, in order."""
    return declared_in(Options)


def is_given(value: Any) -> bool:
    """Return whether an option's value says anything: not None, nor an empty list or mapping."""
    return value is not None and (not isinstance(value, Sequence | Mapping) or len(value) > 0)


def read_options(options: Options) -> Options:
    """Return the options that are given, choices spelled as declared, texts read.

    Raises:
        OptionError: An option is unknown.
        PlanError: An option has another type, is none of its choices or is too small.
    """
    values: dict[str, Any] = {}
    for name, value in cast("Mapping[str, Any]", options).items():
        if name not in declared():
            raise unknown_option("plan", name, declared(), _spellings())
        if not is_given(value):
            continue
        option, flag = declared()[name].option, declared()[name].flags[0]
        value = of_declared_type(declared()[name], value, PlanError)
        if not is_given(value):
            continue
        if isinstance(value, str) and (choices := option.allowed()):
            value = one_of(flag, value, choices)
        elif isinstance(value, Sequence) and (choices := option.choices):
            value = tuple(one_of(flag, item, choices) for item in value)
        values[name] = value
    if "hsdp" in values:
        sizes = dict(zip(("dp_replicate", "dp_shard"), hsdp_shape(values["hsdp"]), strict=True))
        for name, size in sizes.items():
            if values.get(name, size) != size:
                flag = declared()[name].flags[0]
                raise PlanError(
                    f"--hsdp {values['hsdp']} contradicts {flag} {values[name]}", help="give one of them"
                )
        values |= sizes
    if "reshard" in values:
        values["reshard"] = reshard_value(values["reshard"])
    return cast("Options", values)


_FLAG = re.compile(r"--([a-z][a-z-]*)( (?=[A-Z0-9'\"]))?")


def as_arguments(text: str) -> str:
    """Return a message with options as Python spells them, ``gpus=8`` for ``--gpus 8``.

    A text that quotes a command line stays.
    """
    names = _spellings()

    def spell(match: re.Match[str]) -> str:
        word = match[1].replace("-", "_")
        if word not in names:
            return match[0]
        if word.startswith("no_") and word not in declared():
            return f"{names[word]}=False"
        return names[word] + ("=" if match[2] else "")

    return text if "fsdptool " in text else _FLAG.sub(spell, text)


def settings_of(options: Options, root: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of the fields that options set below a root, as ``recipe.method.lora``."""
    prefix = f"{root}."
    for name, value in cast("Mapping[str, Any]", options).items():
        option = declared()[name].option
        if option.sets.startswith(prefix):
            path = tuple(option.sets.removeprefix(prefix).split("."))
            yield path, option.value(value) if option.value is not None else value


def closed_by(names: Sequence[str]) -> set[str]:
    """Return the search dimensions that the named options close."""
    return {dimension for name in names for dimension in declared()[name].option.closes}


def _spellings() -> dict[str, str]:
    """Return the options by their flags, as ``seq_len`` of ``--seq-len``."""
    flags = ((flag, item.name) for item in declared().values() for flag in "/".join(item.flags).split("/"))
    return {flag.removeprefix("--").replace("-", "_"): name for flag, name in flags}
