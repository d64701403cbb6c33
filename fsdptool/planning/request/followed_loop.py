"""Whose training loop is planned, and the options that follow from it where nobody gives them.

The programs that read configuration files say what their loops do (``config/dialects/protocol.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, get_args

from fsdptool.files.tree import Node
from fsdptool.inspection.micro_batch import planned_batch
from fsdptool.planning.request.options import Options, declared
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.fused_loss import NamedLoss
from fsdptool.records.plan import AdapterDtype, NotPlanned, PlanInputs, TrainingLoop, UnreadKeys
from fsdptool.records.sharding import Loading

if TYPE_CHECKING:
    from fsdptool.config.programs import ProgramLoop
    from fsdptool.config.result import Reading
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.lengths import SampleLengths
    from fsdptool.records.recipe import Recipe

OWN = "fsdptool"


@dataclass(frozen=True, slots=True)
class Followed:
    """The loop that is planned.

    Attributes:
        program: Whose it is.
        does: What it does; None for fsdptool's own, and for one that is not known.
        options: The given options, and those that follow from the loop.
    """

    program: str
    does: ProgramLoop | None
    options: Options


def follow(options: Options, reading: Reading | None, program: str | None = None) -> Followed:
    """Return whose loop the options mean, with the options that follow from it.

    A recipe is trained by ``fsdptool train``. A file is for the program that reads it; accelerate's own
    formats start fsdptool's trainer, too, and mean accelerate where its layout is asked for.

    Args:
        options: As given.
        reading: Of the configuration file, if there is one.
        program: The program whose training file is planned.
    """
    from fsdptool.config.dialects import known_programs
    from fsdptool.config.programs import RUN_LOOPS

    program = program or _program(options, reading)
    known = known_programs().get(program)
    does = known.loop if known is not None else RUN_LOOPS.get(program)
    if does is None:
        return Followed(program, None, options)
    implied: dict[str, Any] = {"layout": does.layout, "gradients": does.gradients}
    file = reading.settings.mesh.tp if reading is not None and reading.settings is not None else 1
    if (options.get("tp") or file) > 1:
        del implied["layout"]  # only the native layout plans tensor-parallel ranks
    if does.outside_in_root:
        implied |= {"group_embedding": "root", "group_head": "root"}
    stored = reading.dtypes.stored if reading is not None and reading.dtypes is not None else None
    if does.layout == "native" and stored is not None:
        implied["dtype"] = stored
    return Followed(program, does, cast("Options", {**implied, **options}))


def _program(options: Options, reading: Reading | None) -> str:
    if options.get("recipe") is not None:
        return OWN
    if reading is not None and reading.written_in is not None and OWN not in reading.written_in.consumers:
        return reading.consumer.name
    return "accelerate" if options.get("layout") == "accelerate" else OWN


def training_loop(
    followed: Followed, mixed: bool, *, version: int = 2, outputs: bool | None = None
) -> TrainingLoop:
    """Return what the plan assumes of the loop; options say it differently.

    Args:
        followed: The loop.
        mixed: Whether the run has mixed precision.
        version: Of FSDP. The first gathers all that is outside the blocks at once.
        outputs: Whether it holds what the model returned until backward ends; None: that is not known.
    """
    options, does = followed.options, followed.does
    loss, inside = options.get("loss"), options.get("loss_in_forward")
    if inside is None:
        inside = loss == "model" or (does is not None and does.loss_in_forward)
    chunked = does if does is not None and (loss or does.loss) == "chunked" else None
    return TrainingLoop(
        loading=cast("Loading | None", options.get("loading")),
        keeps_logits=loss == "kept",
        keeps_outputs=bool(outputs) and loss in (None, "whole"),
        program=followed.program,
        loss_in_forward=inside,
        own_loss=loss == "model",
        whole_logits=loss is None and does is not None and does.loss == "whole",
        tiles=chunked.tiles if chunked is not None else None,
        head_chunks=chunked.head_chunks if chunked is not None else 0,
        head_loss=cast("NamedLoss", loss) if loss in get_args(NamedLoss) else None,
        adapter_dtype=cast("AdapterDtype | None", options.get("adapter_dtype")),
        marks_last=does is None or does.marks_last,
        wraps_adapters=does is not None and does.wraps_adapters and version == 2,
        not_planned=_open(does, loss, mixed, outputs is not None) if does is not None else (),
    )


def masked_from_rows(
    followed: Followed, recipe: Recipe, lengths: SampleLengths | None, run: DescribedRun | None
) -> int:
    """Return the number of rows of a forward from which on a mask hides their padding; 0 without a mask.

    Rows of one length have no padding, and transformers drops a mask of ones (5.23, ``masking_utils.py``).

    Args:
        followed: The loop.
        recipe: Of the run.
        lengths: Of the samples, where they are known.
        run: What its file says.
    """
    does, limit = followed.does, recipe.batch.sequence_length
    least = does.masked_from_rows if does is not None else 0
    if not least or recipe.data.packing or (run is not None and not run.takes_mask):
        return 0
    if run is not None and run.full_rows is not None:
        least = 1 if run.full_rows else 2
    if lengths is not None and limit is not None and lengths.shortest >= limit:
        return 0
    return 0 if lengths is not None and lengths.shortest == lengths.longest and least > 1 else least


def _open(does: ProgramLoop, loss: str | None, mixed: bool, outputs: bool) -> tuple[NotPlanned, ...]:
    """Return what is open, less what the options or the precision decide."""
    decided = {"autocast": not mixed, "stored_dtype": mixed}
    decided |= dict.fromkeys(("outputs", "fused_loss", "whole_loss"), loss is not None)
    decided["outputs"] = decided["outputs"] or outputs
    return tuple(name for name in does.not_planned if not decided.get(name, False))


_ABOUT_LOSSES = ("outputs", "fused_loss", "whole_loss")


def suited(spec: ModelSpec, inputs: PlanInputs) -> PlanInputs:
    """Return the inputs with what only the model decides of its loop: whether its loss has labels and logits.

    A denoiser's loss is computed by every program's loop, from what the model returns.
    """
    from fsdptool.modeling.objective import objective_for

    loop, recipe = inputs.loop, inputs.recipe
    objective = objective_for(recipe, spec)
    open_points = loop.not_planned
    if objective.samples != "latents":
        open_points = tuple(name for name in open_points if name != "encoders")
    elif loop.program == OWN:
        open_points = ("encoders",)
    labelled = any(item.name == "labels" for item in planned_batch(spec, recipe))
    if not labelled or objective.scores_tokens or recipe.method.distillation is not None:
        loop = replace(loop, loss_in_forward=False, own_loss=False)
        open_points = tuple(name for name in open_points if name not in _ABOUT_LOSSES)
    if (run := inputs.run) is not None and (
        run.objective == "kto" or (run.objective == "dpo" and run.method not in (None, "full"))
    ):
        open_points = (*open_points, "forwards")
    chunks = "chunk" in inspect.signature(type(objective)).parameters
    if loop.whole_logits and chunks and "chunk" not in recipe.objective.options:
        options = {**recipe.objective.options, "chunk": 0}
        recipe = replace(recipe, objective=replace(recipe.objective, options=options))
    loop = replace(loop, not_planned=open_points)
    return replace(inputs, recipe=recipe, loop=loop)


_BY_OPTION: Mapping[str | None, tuple[str, ...]] = {
    "micro_batch": (
        "per_device_train_batch_size", "micro_batch_size", "train_batch_size", "local_batch_size",
        "batch_size",
    ),
    "global_batch": ("global_batch_size", "generation_batch_size"),
    "accumulation": ("gradient_accumulation_steps",),
    "sequence_length": (
        "max_length", "max_seq_length", "max_seq_len", "sequence_len", "sequence_length", "seq_len",
        "seq_length", "cutoff_len", "model_max_length", "block_size",
    ),
    "height": ("resolution",),
    "frames": ("num_frames",),
    "method": ("adapter", "use_peft", "use_lora", "peft_type", "finetuning_type", "lora_type"),
    "lora_rank": ("lora_r", "lora_rank"),
    "lora_targets": (
        "lora_target", "lora_target_modules", "lora_target_linear", "lora_target_parameters",
    ),
    "lora_base": (
        "load_in_4bit", "load_in_8bit", "quantization_bit", "base_model_precision", "quantize",
    ),
    "checkpointing": ("gradient_checkpointing", "selective_ac_option", "memory_budget"),
    "optimizer": ("optim", "optimizer"),
    "loss": (
        "use_liger_kernel", "enable_liger_kernel", "liger_fused_linear_cross_entropy", "loss_type",
        "cut_cross_entropy", "chunked_cross_entropy",
    ),
    "dtype": ("torch_dtype", "model_dtype", "pure_bf16"),
    "attention": ("attn_implementation", "flash_attention", "flash_attn"),
    "ema": ("use_ema",),
    None: (
        "max_prompt_length", "max_completion_length", "num_generations", "lora_modules_to_save",
        "modules_to_save", "additional_target", "activation_offloading", "enable_activation_offloading",
        "optimizer_in_bwd", "torch_compile", "ref_model", "train_text_encoder", "custom_sharded_layers",
        "packing", "sample_packing", "neat_packing", "padding_free",
    ),
}  # fmt: skip
MEMORY_KEYS = {key: option for option, keys in _BY_OPTION.items() for key in keys}
"""Keys of other programs' files that change memory, with the option of a plan that says the same."""

_USUAL = frozenset({"", "none", "no", "false", "full", "1", "adamw", "adamw_torch", "adamw_torch_fused"})
_PACKED = frozenset({"packing", "sample_packing", "neat_packing", "padding_free"})
"""Values that say what a plan assumes anyhow; it assumes packed samples."""


def unread_keys(reading: Reading | None, options: Options) -> UnreadKeys | None:
    """Return which keys of the file change memory and were read neither from it nor from an option."""
    if reading is None or reading.document is None or reading.document.root is None:
        return None
    used = {id(entry) for entry in reading.used}
    given = cast("Mapping[str, Any]", options)
    found: dict[str, str | None] = {}
    for key, node, entry in _entries(reading.document.root):
        option = MEMORY_KEYS.get(key)
        if key in MEMORY_KEYS and id(entry) not in used and option not in given and not _usual(key, node):
            found[key] = option
    if not found:
        return None
    flags = [declared()[name].flags[0] for name in found.values() if name is not None]
    return UnreadKeys(str(reading.path or "the file"), tuple(found), tuple(dict.fromkeys(flags)))


def _entries(node: Node) -> Iterator[tuple[str, Node, Any]]:
    for entry in node.entries:
        yield str(entry.key).removeprefix("--"), entry.node, entry
        if entry.node.kind == "map":
            yield from _entries(entry.node)


def _usual(key: str, node: Node) -> bool:
    if node.kind != "scalar":
        return not (node.entries or node.items)
    value = str(node.value if node.value is not None else "").lower()
    return value in ("true", "") if key in _PACKED else value in _USUAL
