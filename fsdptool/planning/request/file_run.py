"""The recipe and the settings of a run that another program's file describes.

What neither can express is listed with the side on which it puts the plan: a run that needs more than what is
planned has a lower bound, one that needs less an upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from shlex import quote
from typing import Any, cast, get_args

from fsdptool.errors import PlanError
from fsdptool.files.text import is_file
from fsdptool.planning.request.options import Options
from fsdptool.records.checkpointing import Checkpointing
from fsdptool.records.described_run import (
    OWN_UNITS,
    QUANTISED_BASES,
    TOKEN_OBJECTIVES,
    TORCH_DTYPES,
    DescribedRun,
    Masters,
    Side,
    UnmodelledKey,
)
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import Bound, PlanLimit
from fsdptool.records.recipe import (
    FUSED_ATTENTION,
    Batch,
    Data,
    Distillation,
    Ema,
    Lora,
    Method,
    ModelChoice,
    Objective,
    Optimizer,
    OptimizerName,
    Recipe,
    Sharding,
)
from fsdptool.records.sharding import ALL_MODULES, FsdpSettings, Precision
from fsdptool.scripts import SCRIPTS
from fsdptool.source.known_models import OWN_CODE, layer_classes_of
from fsdptool.source.peft_targets import PEFT_TARGETS
from fsdptool.source.references import IMPORT_FLAG, is_import

_FILES = frozenset({
    ".yaml", ".yml", ".json", ".toml", ".env", ".sh", ".bash", ".slurm", ".sbatch", ".txt", ".args", ".cfg",
    *SCRIPTS,
})  # fmt: skip
_MODEL_FILES = frozenset({"config.json", "model_index.json", "adapter_config.json"})

_PRECISIONS: Mapping[str | None, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

_FORMATS = {"nf4": "nf4", "fp4": "nf4", "int8": "int8", "float8": "float8", "fp8": "float8"}
"""What a description of a quantised base contains, and the base of as many bits that is planned."""
_OBJECTIVES = {
    "sft": None, "pretrain": None, "diffusion": None, "dpo": "dpo", "orpo": "orpo", "simpo": "simpo",
    "classification": "classification", "reward": "classification", "kto": "apo_zero_unpaired",
}  # fmt: skip
_LOSSES = {"none": "whole"}
"""The loss that is planned for what a description calls otherwise."""
LAUNCHED = ("trl", "trainer", "llamafactory", "diffusers", "ms-swift")
"""Programs that ``accelerate launch`` can start with a sharding of its own configuration."""
_PER_NODE = 8
"""GPUs that are linked inside most machines (NVIDIA HGX and DGX, AMD MI300X platforms)."""
_OTHER_ENGINE = ("verl", "ms-swift", "llamafactory")
"""Programs that divide a model over ranks without FSDP only with Megatron."""
_OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    **{name: (name, "auto") for name in get_args(OptimizerName)},
    **dict.fromkeys(("adamw", "adamw_hf", "adam", "adamw_torch", "adamw_torch_xla"), ("adamw", "foreach")),
    **dict.fromkeys(("adamw_torch_fused", "adamw_apex_fused", "fusedadam"), ("adamw", "fused")),
    **dict.fromkeys(
        ("adamw_8bit", "adamw8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "bnb-adamw8bit"),
        ("adamw8bit", "auto"),
    ),
}
_ADAM = re.compile(r"(?:optimi-|bnb-|torch-|torchao-)?adamw?(?:[-_]?(?:torch|bf16|8bit|32bit|fused|xla))*")
"""Other names of Adam, with two states of the size of a parameter."""
_SMALLER = (
    "lion",
    "4bit",
    "fp8",
    "galore",
    "apollo",
    "lomo",
    "badam",
    "adam-mini",
    "adam_mini",
    "came",
    "rmsprop",
)
"""Parts of the names of optimizers with smaller states than Adam. Others may have more (Prodigy)."""


_MASTERS: Mapping[Masters, list[PlanLimit]] = {
    "none": [PlanLimit("the optimizer's fp32 states beside weights of 16 bits", "more")],
    "whole": [PlanLimit("weights of 16 bits beside the optimizer's masters in fp32", "more")],
    "remainders": [PlanLimit("gradients of 16 bits, which are planned in fp32", "less")],
}
"""What a plan leaves out of weights of 16 bits and what the optimizer adds to them. Masters are planned as
weights that are stored in fp32: bf16 weights with their remainders have as many bytes."""
_OTHER_STATES = PlanLimit("the dtype of the optimizer's states", None)


_DECIDED = {
    "model": ("model", "family"), "precision": ("compute_dtype", "reduce_dtype"),
    "dtype": ("stored_dtype", "base_dtype"), "offload": ("cpu_offload",), "wrap": ("wrap_classes",),
    "gpus": ("processes",), "checkpointing": ("gradient_checkpointing",),
    "dp_replicate": ("mesh.dp_replicate",), "dp_shard": ("mesh.dp_shard",), "cp": ("mesh.cp",),
    "tp": ("mesh.tp",), "ep": ("mesh.ep",), "pp": ("mesh.pp",), "optimizer": ("optimizer_state_bits",),
    "accumulation": ("global_batch",),
}  # fmt: skip
"""Facts that options decide beside those of their own names."""


@dataclass(frozen=True, slots=True)
class FileRun:
    """A described run as inputs of a plan.

    Attributes:
        recipe, settings: What is planned.
        options: Further options of a plan that the file decides.
        limits: What changes memory and is not planned.
    """

    recipe: Recipe
    settings: FsdpSettings
    options: Options
    limits: tuple[PlanLimit, ...]


def read_file_run(reference: str, words: Sequence[str] = ()) -> DescribedRun | None:
    """Return the run that a reference names as a file of some program; None where it is a model.

    Args:
        reference: As it is given.
        words: Arguments that a script is started with.

    Raises:
        ConfigError: The file cannot be read or parsed, or two programs claim it.
        PlanError: It is for no program that is known, and is not a model.
    """
    from fsdptool.config.described import describe_path
    from fsdptool.config.no_run import why_no_run

    path = Path(reference).expanduser()
    named = path.suffix.lower() in _FILES or reference == "-"
    if not named or path.name in _MODEL_FILES or not is_file(path):
        return None
    run = describe_path(path, words=words)
    if run is None and path.suffix.lower() in SCRIPTS:
        raise PlanError(
            f"{reference} starts no training run that is known here",
            help="name the script that makes the Trainer or shards the model, not a module of it",
        )
    if run is None and path.suffix.lower() != ".json":  # models are JSON
        why = why_no_run(path)
        if why is not None:
            raise PlanError(
                f"{reference} describes no run that is known here: {why}",
                help="plan a training file of a known program, or the Python file that trains",
            )
        raise PlanError(
            f"{reference} is neither a model nor a training file of a program that is known here",
            help=f"settings of accelerate alone go with a model: fsdptool plan MODEL --config {reference}",
        )
    return run


def ranks_of(run: DescribedRun, given: int | None, where: str, flag: str) -> int:
    """Return the ranks of a described run: as given, or as its file says.

    Raises:
        PlanError: Neither says how many ranks share the model.
    """
    if given is None and run.processes is None and run.fsdp in (1, 2):
        raise PlanError(
            f"{where} leaves the number of processes to its launch", help=f"give the GPUs of a node: {flag}"
        )
    return given or run.processes or 1


def nodes_of(run: DescribedRun, ranks: int) -> int:
    """Return the number of nodes: what the file says, or as few as hold at most eight GPUs each."""
    if run.nodes is not None and run.nodes > 0 and ranks % run.nodes == 0:
        return run.nodes
    return next(ranks // each for each in range(min(_PER_NODE, ranks), 0, -1) if ranks % each == 0)


def is_recipe(run: DescribedRun) -> bool:
    """Whether a recipe trains what a described run does, and not only what needs as much memory."""
    known = ("sft", "pretrain", "diffusion", "orpo", "simpo", "classification", None)
    return run.objective in known and run.method in (None, "full", "lora", *QUANTISED_BASES)


def file_run(
    run: DescribedRun,
    model: str | None,
    where: str,
    ranks: int,
    *,
    cpu: bool = False,
    fused: bool = False,
    attention: str | None = None,
    decided: Collection[str] = (),
    trusted: bool = False,
) -> FileRun:
    """Return a described run as inputs of a plan.

    Args:
        run: As its file describes it.
        model: What to take for its model; None takes the size of the catalogue that its name stands for.
        where: The file, for messages.
        ranks: Ranks that the plan is for.
        cpu: Whether they are CPU processes.
        fused: Whether to take the fused attention that the file names, and not SDPA in its place.
        attention: The attention that an option gives instead of the file's, or None.
        decided: Names of the options that override the file.
        trusted: Whether code that the file names as its model may be imported.

    Raises:
        PlanError: The model is not known, or Megatron divides it.
    """
    sizes = (run.mesh.tp or 1, run.mesh.pp or 1, run.mesh.ep or 1)
    if run.fsdp == "none" and run.program in _OTHER_ENGINE and max(sizes) > 1:
        raise PlanError(
            f"{where}: Megatron divides this model, which is out of scope",
            help="plan a run with FSDP2: fsdptool plan MODEL --gpu GPU --gpus N",
        )
    limits: list[PlanLimit] = [
        PlanLimit(key.key, key.side)
        for key in run.keys.unmodelled_by_section()
        if key.changes == "memory" and not _is_decided(key, run, decided)
    ]
    choice = ModelChoice(_model(run, model, where, trusted), trust_remote_code=trusted)
    run = _with_dtype_of_checkpoint(run, choice)
    run = _with_whole_rows(run, choice, limits, decided)
    whole = "cp" not in decided and (run.mesh.cp or 1) == 1
    choice = replace(choice, **_model_settings(run, fused and whole))
    choice = _with_head(run, choice)
    recipe = Recipe(
        choice,
        method=_method(run, choice, limits, decided),
        objective=Objective(_objective(run, limits)),
        data=_data(run, attention or run.attention or ""),
        batch=_batch(run, ranks, limits, decided),
        optimizer=_optimizer(run, limits, cpu, decided),
        sharding=_sharding(run),
        ema=Ema(0.999) if run.ema else Ema(),
        steps=run.steps,
    )
    if recipe.objective.name is not None and not _offered(recipe):
        limits.append(PlanLimit(f"{run.objective}, which is not known of this model's family", "more"))
        recipe = replace(recipe, objective=Objective(), method=_without_reference(recipe.method))
    options = _loop_options(run, recipe)
    if run.activation_offloading:
        limits.append(PlanLimit("activations that are kept in host memory", "less"))
    if run.optimizer_masters is not None and recipe.method.name == "full" and "optimizer" not in decided:
        limits += _MASTERS[run.optimizer_masters] if run.optimizer_state_bits == 32 else [_OTHER_STATES]
    copies = run.fsdp == "none" and not {"hsdp", "dp_shard"} & {*decided}
    if copies and run.processes is None and ranks > 1 and run.program in LAUNCHED:
        limits.append(PlanLimit("sharding that its launch may add: a copy on every rank is planned", "less"))
    if run.fsdp is None and ranks > 1:
        limits.append(PlanLimit("how ranks share the model, which is left open: FSDP2 is planned", None))
    length = run.sequence_length if not {"sequence_length", "lengths"} & {*decided} else None
    if length is not None and run.packing is False and not run.full_rows:
        # Samples are cut at this length, and padded to the longest of their batch.
        limits.append(
            PlanLimit(f"rows shorter than {length} tokens: samples are not packed", "less", passing=True)
        )
    if run.micro_batch is None and "micro_batch" not in decided:
        limits.append(PlanLimit("the micro-batch, which is left open: 1 is planned", "more"))
    settings = _suited(_settings(run), run, ranks)
    if choice.overrides and run.fsdp == "none" and not settings.wrap_classes:
        # The library's own list may name the embeddings, which FSDP cannot wrap and nothing here shards.
        settings = replace(settings, wrap_classes=layer_classes_of(run.family) or ())
    return FileRun(recipe, settings, cast("Options", options), tuple(limits))


def _with_whole_rows(
    run: DescribedRun, choice: ModelChoice, limits: list[PlanLimit], decided: Collection[str]
) -> DescribedRun:
    """Return a run without context parallelism where that is not planned for its model: an upper bound.

    Ranks that shared a row then have one each. The global batch grows with them, so that each still
    accumulates as many micro-batches.
    """
    parts = run.mesh.cp or 1
    if parts == 1 or "cp" in decided or _splits_rows(choice):
        return run
    what = f"context parallelism of {parts}, which is not planned for this model: whole rows are planned"
    limits.append(PlanLimit(what, "less", passing=True))
    total = run.global_batch * parts if run.global_batch is not None else None
    return replace(run, mesh=replace(run.mesh, cp=1), global_batch=total)


def _splits_rows(choice: ModelChoice) -> bool:
    """Whether context parallelism of a model is planned: of plain text, by attention without sinks."""
    from fsdptool.source import resolve_choice

    config = resolve_choice(choice, catalogue=True).config
    layers = config.get("layer_types") or ()
    other = any(str(kind) not in ("full_attention", "sliding_attention") for kind in layers)
    seen = {"vision_config", "audio_config"} & config.keys()
    return not (seen or other or config.get("model_type") == "gpt_oss")


def _with_head(run: DescribedRun, choice: ModelChoice) -> ModelChoice:
    """Return a model of texts with the head that its run trains: classes, or one reward.

    Programs load such a model by its task, whatever class its configuration names (transformers 5.23
    ``AutoModelForSequenceClassification``; TRL 1.16 ``trainer/reward_trainer.py`` with ``num_labels=1``).
    """
    if run.objective not in ("classification", "reward"):
        return choice
    from fsdptool.families.bases.families import classifier_for
    from fsdptool.source import resolve_choice

    spec = resolve_choice(choice, catalogue=True)
    name = classifier_for(str(spec.config.get("model_type")))
    if name is None or "Classification" in spec.model_class:
        return choice
    head: dict[str, Any] = {"architectures": [name]}
    if run.objective == "reward":
        head["num_labels"] = 1
    if spec.config.get("pad_token_id") is None:
        head["pad_token_id"] = 0  # programs take the tokenizer's: decoders look for the end of each row by it
    return replace(choice, overrides={**choice.overrides, **head})


def _offered(recipe: Recipe) -> bool:
    """Say whether the family of a recipe's model trains under its objective."""
    from fsdptool.families.registry import family_of
    from fsdptool.source import resolve_choice

    return recipe.objective.name in family_of(resolve_choice(recipe.model, catalogue=True)).objectives()


def _without_reference(method: Method) -> Method:
    return Method() if method.distillation is not None else method


def bound_of(limits: Iterable[PlanLimit]) -> Bound:
    """Return on which side of a run's memory a plan is that leaves so much of it out."""
    sides = {limit.side for limit in limits}
    if not sides:
        return "exact"
    return "upper" if sides == {"less"} else "lower" if sides == {"more"} else "open"


def _model(run: DescribedRun, model: str | None, where: str, trusted: bool) -> str:
    known = model or run.family
    if known is None and run.model is not None and Path(run.model).expanduser().exists():
        known = run.model
    if known is None and trusted and run.model is not None and ":" in run.model:
        known = run.model
    if known is not None:
        return known
    if run.model is None:
        why = next((f": {item}" for item in run.unresolved), "")
        advice = "name it: --model REFERENCE"
        if where.endswith(".py"):
            advice += (
                f"; or give the command that starts the script: fsdptool plan -- python {quote(where)} ..."
            )
        raise PlanError(f"{where} names no model{why}", help=advice)
    if is_import(run.model):
        raise PlanError(
            f"{where} trains {run.model}, a class of its own, which is imported only on request",
            help=f"read the script, then give {IMPORT_FLAG}; or name a model of its sizes: --model MODEL",
        )
    if OWN_CODE.search(run.model):
        raise PlanError(
            f"{where} trains {run.model}, whose classes are code of its own that transformers does not have",
            help=f"read that code in a copy of the model, then name it: --model FOLDER {IMPORT_FLAG}",
        )
    raise PlanError(
        f"{where} trains {run.model}, whose sizes are not known here",
        help="give its configuration: --model path/to/config.json, or a size of fsdptool families",
    )


def _with_dtype_of_checkpoint(run: DescribedRun, choice: ModelChoice) -> DescribedRun:
    """Return the run with the dtype that its model's configuration names, where its program keeps that.

    Checkpoints of 16 bits are the rule where none is named, and readers name those of the catalogue in 32.
    """
    from fsdptool.source import resolve_choice

    names = ("base_dtype", "stored_dtype", "compute_dtype", "reduce_dtype")
    open_names = [name for name in names if getattr(run, name) == "checkpoint"]
    if not open_names:
        return run
    config = resolve_choice(choice, catalogue=True).config
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtype = next((short for short, long in TORCH_DTYPES.items() if long == named), "bf16")
    decided: dict[str, Any] = dict.fromkeys(open_names, dtype)
    return replace(run, **decided)


_FUSED = {
    "fa2": "flash_attention_2", "fa3": "flash_attention_3", "varlen": "flash_attention_2",
    "te": "flash_attention_2", "flex": "flex_attention",
}  # fmt: skip
"""Other names of attention without scores. cuDNN's, which Transformer Engine calls, keeps what flash
attention keeps. Kernels of the hub have ``flash-attn2`` or ``-attn3`` in their names."""


def _attention(named: str) -> str:
    """Return the attention that keeps for backward what one of another program keeps.

    Args:
        named: As a file names it, or a program's default: ``flash_attention_2 if installed, else sdpa``.
    """
    named = named.partition(" if installed")[0]
    hub = re.fullmatch(r"[\w-]+/(?:vllm-)?flash-attn([23])?(?:@.*|:.*)?", named)
    word = f"flash_attention_{hub[1] or 2}" if hub is not None else _FUSED.get(named, named)
    return word if word == "eager" or word in FUSED_ATTENTION else "sdpa"


def _model_settings(run: DescribedRun, fused: bool) -> dict[str, Any]:
    """Return the dtype of the stored model and its attention implementation.

    Args:
        run: As its file describes it.
        fused: Whether attention may be a fused kernel's. None is planned on a part of a sequence.
    """
    frozen = run.method not in (None, "full")
    stored = run.base_dtype if frozen else "fp32" if _has_masters(run) else run.stored_dtype
    attention = _attention((run.attention or "").lower())
    if attention in FUSED_ATTENTION and not fused:
        attention = "sdpa"
    return {"dtype": TORCH_DTYPES.get(stored or "", "auto"), "attention": attention}


def _data(run: DescribedRun, attention: str) -> Data:
    """Return how samples share a shape.

    Flash kernels of variable length need no mask, neither one that keeps packed documents apart nor one that
    hides padding. What they allocate is what SDPA's flash kernel allocates. Where documents are joined,
    nothing keeps them apart.
    """
    if run.documents_joined or "flash" in attention.lower():
        return Data(document_mask=False)
    return Data(packing=run.packing is not False)


def _is_decided(key: UnmodelledKey, run: DescribedRun, decided: Collection[str]) -> bool:
    """Whether options override all that a key of unknown value leaves open."""
    facts = {*decided, *(fact for name in decided for fact in _DECIDED.get(name, ()))}
    if run.accumulation is not None:  # it and the micro-batch decide the global batch
        facts.add("global_batch")
    return bool(key.decides) and facts.issuperset(key.decides or ())


def _method(
    run: DescribedRun, choice: ModelChoice, limits: list[PlanLimit], decided: Collection[str]
) -> Method:
    if run.method in (None, "full"):
        if run.objective in ("dpo", "kto"):  # its reference is a frozen copy of the model
            return Method("distillation", distillation=Distillation(choice, alpha=1.0))
        return Method()
    if run.method not in ("lora", *QUANTISED_BASES):
        limits.append(PlanLimit(f"method {run.method}: full fine-tuning is planned", "less"))
        return Method()
    targets = _chosen_targets(run, choice)
    words = run.quantisation or "none"
    named = next((base for word, base in _FORMATS.items() if word in words), "unchanged")
    base = QUANTISED_BASES.get(str(run.method), named)
    if base == "unchanged" and words != "none":
        limits.append(PlanLimit(f"the base in {run.quantisation}", "less"))
    dropout = min(max(run.lora_dropout or 0.0, 0.0), 0.99)
    if dropout and _adapts_experts(targets, choice):
        limits.append(
            PlanLimit("dropout of adapters, which peft does not offer for experts: none is planned", "more")
        )
        dropout = 0.0
    rank = run.lora_rank if run.lora_rank is not None and run.lora_rank > 0 else None
    if rank is None and "lora_rank" not in decided:
        limits.append(PlanLimit("the rank of adapters, which is left open: 16 is planned", None))
    return Method(
        "lora",
        Lora(
            rank=rank or 16,
            dropout=dropout,
            targets=targets if targets is None else _targets(targets),
            modules_to_save=run.lora_modules_to_save,
            base=cast("Any", base),
        ),
    )


def _chosen_targets(run: DescribedRun, choice: ModelChoice) -> tuple[str, ...] | str | None:
    """Return the targets of adapters: where peft chooses them, by the model that is planned."""
    if not any(item.key == "lora_target_modules" for item in run.defaults):
        return run.lora_targets
    from fsdptool.source import resolve_choice

    kind = resolve_choice(choice, catalogue=True).config.get("model_type")
    return PEFT_TARGETS.get(str(kind), run.lora_targets)


def _adapts_experts(targets: tuple[str, ...] | str | None, choice: ModelChoice) -> bool:
    """Whether adapters are of the fused weights of experts, as peft 0.21 maps targets of their layers.

    ``utils/transformers_weight_conversion.py``: layers of experts became parameters in transformers 5.
    """
    from fsdptool.families.registry import load_registry
    from fsdptool.source import resolve_choice

    found = resolve_choice(choice, catalogue=True)
    if not load_registry().get(found.family).lora_targets(found.config).parameters:
        return False
    plain = _targets(targets) if targets is not None else "all-linear"
    words = (plain,) if isinstance(plain, str) else plain
    return any(re.search(r"all-linear|gate|up|down|w[123]|experts", word) for word in words)


def _targets(names: Sequence[str] | str) -> tuple[str, ...] | str:
    """Return the targets of adapters; wildcards become a regular expression over whole paths.

    What a program says in words (all linear layers of the blocks) is planned as all linear layers.
    """
    if isinstance(names, str):
        return "all-linear" if " " in names else names
    if any(" " in name for name in names):
        return "all-linear"
    if not any("*" in name for name in names):
        return tuple(names)
    patterns = (re.escape(name).replace(r"\*", ".*") for name in names)
    return rf"(?:.*\.)?(?:{'|'.join(patterns)})"


def _objective(run: DescribedRun, limits: list[PlanLimit]) -> str | None:
    name = run.objective
    if name in ("grpo", "ppo"):
        limits.append(PlanLimit(f"{name}: the engine that samples, and its reference model", "more"))
        limits.append(
            PlanLimit(f"{name}: generated rows, which are shorter than the longest allowed", "less")
        )
    elif name == "reward" and run.program == "llamafactory":  # train/rm: a head beside the language model's
        limits.append(PlanLimit("reward: logits of the language model, which are made and not used", "more"))
    elif name is not None and name not in _OBJECTIVES:
        limits.append(PlanLimit(f"objective {name}: the model's usual loss is planned", None))
    if name in ("dpo", "kto") and run.method not in (None, "full"):
        # Where the head makes logits in tiles, backward needs more than a second forward without gradients.
        if run.fused_loss != "chunked":
            what = f"{name}: the forward pass of the reference, which is the base model"
            limits.append(PlanLimit(what, "more"))
        return "orpo" if name == "dpo" else None  # the same rows without a reference
    return _OBJECTIVES.get(name or "")


def _batch(run: DescribedRun, ranks: int, limits: list[PlanLimit], decided: Collection[str]) -> Batch:
    # A square stands for the largest picture, in the patches of all denoisers.
    side = isqrt(run.pixel_area) // 16 * 16 if run.pixel_area else None
    # A pair is two rows of one batch (TRL 1.16 ``reward_trainer.py``: DataCollatorForPreference).
    rows = 2 if run.objective == "reward" else 1
    batch = Batch(
        micro_batch=(run.micro_batch or 1) * rows,
        sequence_length=run.sequence_length,
        height=run.height or side,
        width=run.width or side,
        frames=run.frames,
    )
    if run.accumulation is not None or run.global_batch is None:
        return replace(batch, accumulation=run.accumulation or 1)
    mesh = run.mesh
    data = max(ranks // ((mesh.cp or 1) * (mesh.tp or 1) * (mesh.pp or 1)), 1)
    total = run.global_batch * rows
    if ranks == run.processes and total % (batch.micro_batch * data):
        # The program refuses what its file says of its own ranks; other ranks are what options say.
        what = f"a global batch of {run.global_batch} on {data} data-parallel ranks"
        if not {"accumulation", "global_batch"} & {*decided}:
            limits.append(PlanLimit(f"{what}, which do not divide it: accumulation 1 is planned", "more"))
        return batch
    return replace(batch, global_batch=total)


def _loop_options(run: DescribedRun, recipe: Recipe) -> dict[str, Any]:
    """Return the options of a plan that say what the program's loop does, beside those of the recipe."""
    options: dict[str, Any] = {}
    if run.fused_loss is not None and run.objective in TOKEN_OBJECTIVES:
        compiled = run.compiled_loss and run.fused_loss == "none"
        options["loss"] = "compiled" if compiled else _LOSSES.get(run.fused_loss, run.fused_loss)
    if run.loss_in_forward is not None:
        options["loss_in_forward"] = run.loss_in_forward
    if run.fused_kernels:
        options["assume"] = run.fused_kernels
    stored = TORCH_DTYPES.get(run.stored_dtype or "")
    if recipe.method.name == "lora" and stored in ("bfloat16", "float16"):
        options["adapter_dtype"] = stored
    if (run.mesh.pp or 1) > 1:
        options["pp"] = run.mesh.pp
    return options


def _optimizer(run: DescribedRun, limits: list[PlanLimit], cpu: bool, decided: Collection[str]) -> Optimizer:
    if run.optimizer is None:
        if "optimizer" not in decided:
            limits.append(PlanLimit("the optimizer, which is left open: AdamW is planned", None))
        return Optimizer()
    name = run.optimizer.rpartition(".")[2].lower()
    name = name.removeprefix("transformer_engine ").removesuffix(" with master weights")
    if "paged" in name:
        limits.append(PlanLimit(f"{run.optimizer}: states that can move to host memory", "less"))
        name = re.sub(r"[-_]?paged[-_]?", "", name)
    known = _OPTIMIZERS.get(name)
    if known is None:
        known = "adamw8bit" if run.optimizer_state_bits == 8 else "adamw", "auto"
        if _ADAM.fullmatch(name) is None:
            side: Side | None = "less" if any(word in name for word in _SMALLER) else None
            limits.append(PlanLimit(f"optimizer {run.optimizer}: AdamW is planned", side))
    # torch's own default (2.13, ``optim/optimizer.py:_default_to_fused_or_foreach``).
    implementation = "for_loop" if cpu and known[1] == "foreach" else known[1]
    momentum = run.momentum if known[0] == "sgd" and run.momentum and 0 < run.momentum < 1 else 0.0
    return Optimizer(cast("Any", known[0]), momentum=momentum, implementation=cast("Any", implementation))


def _sharding(run: DescribedRun) -> Sharding:
    mode = run.gradient_checkpointing
    number = run.reshard if type(run.reshard) is int and run.reshard > 0 else None
    return Sharding(
        reduce_dtype=cast("Any", TORCH_DTYPES.get(run.reduce_dtype or "", "float32")),
        reshard_after_forward=number,
        checkpointing=Checkpointing("selective") if mode == "selective" else None,
        compile=run.compile or None,
        expert_parallel=run.mesh.ep or 1,
    )


def _suited(settings: FsdpSettings, run: DescribedRun, ranks: int) -> FsdpSettings:
    """Return the settings on the ranks that the plan is for.

    Without FSDP every rank that shares no work holds a copy. With it the ranks that are left share one.
    """
    mesh = settings.mesh
    others = mesh.cp * mesh.tp
    if run.fsdp == "none":
        mesh = replace(mesh, dp_replicate=max(ranks // others, 1), dp_shard=1)
    elif ranks != mesh.other_sizes * mesh.size("dp_shard"):
        fits = ranks % (others * mesh.dp_replicate) == 0
        mesh = replace(mesh, dp_shard=None, dp_replicate=mesh.dp_replicate if fits else 1)
    nodes = nodes_of(run, ranks) if ranks == run.processes else 1
    return replace(settings, mesh=mesh, num_processes=ranks, num_machines=nodes)


def _settings(run: DescribedRun) -> FsdpSettings:
    mesh = run.mesh
    return FsdpSettings(
        wrap_classes=_classes(run),
        reshard_after_forward=bool(run.reshard) if run.reshard is not None else True,
        cpu_offload=bool(run.cpu_offload),
        activation_checkpointing=run.gradient_checkpointing not in (None, "none"),
        activation_checkpointing_offload=run.gradient_checkpointing == "offload",
        mixed_precision="no" if _is_pure(run) else _PRECISIONS.get(run.compute_dtype, "no"),
        mesh=ParallelDims(
            dp_replicate=next(_positive(mesh.dp_replicate), 1),
            dp_shard=next(_positive(mesh.dp_shard), None),
            cp=next(_positive(mesh.cp), 1),
            tp=next(_positive(mesh.tp), 1),
        ),
        num_processes=run.processes,
        # Nothing is gathered: every rank holds all parameters, and autocast casts them where they are used.
        ignored_modules=ALL_MODULES if run.fsdp == "none" else None,
    )


def _is_pure(run: DescribedRun) -> bool:
    """Whether all parameters are trained in the dtype that they are stored in."""
    full = run.method in (None, "full")
    return run.stored_dtype == run.compute_dtype and full and not _has_masters(run)


def _has_masters(run: DescribedRun) -> bool:
    """Whether the optimizer keeps fp32 masters, which stand in the plan for the weights of 16 bits."""
    return run.optimizer_masters in ("whole", "remainders") and run.optimizer_state_bits == 32


def _classes(run: DescribedRun) -> tuple[str, ...]:
    """Return the classes to wrap that a file names itself; others are those of the model's layers."""
    if run.program in OWN_UNITS:
        return ()
    return tuple(name for name in run.wrap_classes or () if name.isidentifier() and name[0].isupper())


def _positive(size: int | None) -> Iterator[int]:
    if size is not None and size > 0:
        yield size
