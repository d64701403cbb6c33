"""Rules on what settings do to a model, and on the hardware of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import settings_from
from fsdptool.config.dialects.protocol import LintContext
from fsdptool.config.programs import is_before
from fsdptool.config.rules.examples import FSDP2, added, classes, sizes
from fsdptool.errors import FsdptoolError
from fsdptool.files.text import SourceText
from fsdptool.formatting import amount
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.diagnostic import Edit, Example, Rule
from fsdptool.records.sharding import FsdpSettings, Layout

if TYPE_CHECKING:
    from fsdptool.records.cluster import Gpu

MODEL = (
    Rule("FSD401", "wrap class absent from the model", "error",
         "accelerate 1.15 stops in prepare: `Could not find the transformer layer class X in the model.`",
         "Use the classes that `fsdptool detect` chooses (--unsafe-fixes writes them).", "unsafe",
         example=classes("LlamaDecoderLayr")),
    Rule("FSD402", "wrap class is the whole model", "warning",
         "Wrapping the model's own class puts everything in one unit: the whole model is gathered at once, "
         "which sharding is meant to avoid.",
         "Wrap the repeated blocks (--unsafe-fixes writes them).", "unsafe",
         example=classes("LlamaForCausalLM")),
    Rule("FSD403", "wrap class contains the input embedding", "error",
         "accelerate 1.15 groups the input embedding separately; when a wrapped class contains it, "
         "fully_shard fails: `TypeError: Invariant encountered: value was None when it should not be`. "
         "FSDP1 trains such a unit unless a module outside of it uses the same weight; otherwise this is a "
         "note there.",
         "Wrap the repeated blocks only (--unsafe-fixes writes them).", "unsafe",
         example=classes("LlamaModel")),
    Rule("FSD404", "RAM-efficient loading with persistent buffers", "error",
         "accelerate 1.15 broadcasts the state dict as DTensors; a persistent buffer is a plain tensor: "
         "`AttributeError: 'Tensor' object has no attribute 'device_mesh'` (accelerate issue 3898). FSDP1 "
         "loads them; there this is a note.",
         "Set fsdp_cpu_ram_efficient_loading to false (--unsafe-fixes: every rank then loads "
         "the weights).", "unsafe",
         example=added("true\n", "false\n", to=FSDP2 + "  fsdp_cpu_ram_efficient_loading: ",
                       options="--model bart:base")),
    Rule("FSD405", "parameter shared by more than two modules", "error",
         "accelerate 1.15 handles a tie of two (input and output embedding); a third name fails: `Parameter "
         "'shared.weight' is shared with a parameter already managed by another FSDP group`. Under FSDP1 "
         "this is a note unless a wrapped class holds one of the names.",
         "Train it with fsdptool's own trainer, which keeps tied parameters in one unit.",
         example=Example(FSDP2, "# fsdptool: consumer=fsdptool\n" + FSDP2, "--model flan-t5:small")),
    Rule("FSD406", "model without wrap classes", "error",
         "The file does not name a class, and the model's `_no_split_modules` are empty: accelerate 1.15 "
         "does not wrap any module and does not warn; the whole model is one unit.",
         "Name the classes that `fsdptool detect` chooses (--unsafe-fixes writes them).", "unsafe",
         example=Example(FSDP2 + "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
                         classes("", "TransformerBlock").passes, "--model distilbert:base-uncased")),
    Rule("FSD407", "model does not support context parallelism", "error",
         "accelerate 1.15 and torch's context parallelism handle full causal attention through SDPA only; "
         "it refuses sliding, chunked and linear attention layers: `Context parallelism does not support "
         "attention layers of type [...]`.",
         "Set cp_size to 1, or train a model with full attention; `fsdptool train` also supports windows "
         "and chunks (consumer fsdptool).",
         example=added(sizes(dp_shard=4, cp=2), sizes(dp_shard=8), options="--model gemma3:1b")),
    Rule("FSD408", "wrap classes leave most parameters in the root", "warning",
         "Parameters outside the wrap classes stay in the root unit, which is gathered before the first "
         "layer and kept until backward ends.",
         "Wrap the classes that hold the parameters (--unsafe-fixes writes detect's choice).", "unsafe",
         example=classes("LlamaMLP")),
    Rule("FSD409", "size-based wrapping of a container", "error",
         "When a ModuleList exceeds the threshold, fully_shard refuses it: `fully_shard does not support "
         "containers that do not implement forward: ModuleList`. torch's FSDP1 policy passes containers by; "
         "there this is a note.",
         "Wrap by class instead (--unsafe-fixes writes detect's choice).", "unsafe",
         example=added("1000\n", "100000000000\n",
                       to=FSDP2 + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: ",
                       options="--model llama3:tiny")),
    Rule("FSD410", "`_no_split_modules` names a class the model lacks", "error",
         "The file does not name a class, so accelerate 1.15 takes the model's `_no_split_modules`; some "
         "of their names are absent from this model and preparation stops.",
         "Name the classes explicitly (--unsafe-fixes writes detect's choice).", "unsafe",
         example=Example(FSDP2 + "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", classes("").passes,
                         "--model llava:1.5-7b")),
    Rule("FSD411", "ignored modules hold trainable parameters", "warning",
         "Ignored parameters stay plain tensors that accelerate 1.15 does not synchronise: after three "
         "steps the ranks hold different weights. RAM-efficient loading silently shards them anyway.",
         "Freeze them, or leave them sharded.",
         example=added("  fsdp_ignored_modules: lm_head\n", options="--model llama3:tiny")),
    Rule("FSD412", "tied embeddings with accelerate 1.14", "error",
         "accelerate 1.14 puts the input embedding into a unit with the last norm and leaves the tied output "
         "embedding in the root unit. torch 2.12 and 2.13 stop at the first forward: `Parameter "
         "'model.embed_tokens.weight' is shared with a parameter already managed by another FSDP group`. "
         "accelerate 1.15 keeps both in one unit, and 1.13 and older both in the root.",
         "Use accelerate 1.15 or newer, or a torch below 2.12 if the shard ranks divide the vocabulary "
         "(else the last rows are not trained). With `--target accelerate==1.14,torch==2.11` the file is "
         "judged for both.",
         example=Example(FSDP2, FSDP2, "--model llama3.2:1b --target accelerate==1.14",
                         "--model llama3.2:1b")),
    Rule("FSD413", "experts that are modules", "warning",
         "Where the model calls only the experts that a token chose, the others have no gradient. FSDP2 "
         "reduces only gradients that exist, by their position: those of different experts are averaged, "
         "without an error, or the job hangs (DET218).",
         "Train with `fsdptool train`, call every expert on every rank, or use a class with fused experts."),
    Rule("FSD414", "tower that some batches skip", "warning",
         "Ranks whose batch is text alone skip an encoder of pictures or sound, and call other collectives "
         "than the ranks that run it: the job hangs or stops (DET219).",
         "Train with `fsdptool train`, or give every rank a picture or sound in each batch.",
         example=Example(FSDP2, "# fsdptool: consumer=fsdptool\n" + FSDP2, "--model llava:1.5-7b")),
)  # fmt: skip


HARDWARE = (
    Rule("FSD501", "GPU does not support bf16 natively", "warning",
         "The GPU's tensor cores do not compute in bfloat16; torch emulates it slowly.",
         "Use fp16 on this GPU, or another GPU (--unsafe-fixes writes fp16).", "unsafe",
         example=added("mixed_precision: bf16\n", "mixed_precision: fp16\n", options="--gpu V100-SXM2-16GB")),
    Rule("FSD502", "not enough host memory for offload", "error",
         "CPU offload keeps parameters, gradients and optimizer states of all ranks of a node in host "
         "memory.",
         "Use more nodes, a smaller optimizer, or no offload.",
         example=added("true\n", "false\n", to=FSDP2 + "  fsdp_offload_params: ",
                       options="--model llama3:70b --host-memory 64GiB")),
    Rule("FSD503", "does not fit in GPU memory", "error",
         "The predicted peak exceeds the memory of the GPU (`fsdptool plan` shows its composition).",
         "Follow the suggestions that `fsdptool plan` prints.",
         example=Example(FSDP2, FSDP2, "--model llama3:8b --gpu V100-SXM2-16GB --gpus 2",
                         "--model llama3:tiny --gpu V100-SXM2-16GB --gpus 2")),
    Rule("FSD504", "number of processes differs from number of GPUs", "error",
         "The number of processes in the file differs from the number of GPUs that was given.",
         "Set num_processes to the total number of GPUs.",
         example=Example(FSDP2, FSDP2, "--gpus 4", "--gpus 8")),
    Rule("FSD505", "GPU does not support fp8", "error",
         "fp8 needs tensor cores of compute capability 8.9 or newer.",
         "Use bf16 on this GPU.",
         example=added("mixed_precision: fp8\n", "mixed_precision: fp16\n", options="--gpu V100-SXM2-16GB")),
    Rule("FSD506", "hardware not checked", "warning",
         "The rules on memory could not be checked.",
         "See the message; `fsdptool plan` gives details.",
         example=Example(FSDP2.replace("num_processes: 8\n", ""), FSDP2,
                         "--model llama3:tiny --gpu V100-SXM2-16GB")),
)  # fmt: skip


def check_model(lint: LintContext, anatomy: Anatomy) -> None:
    """Report what the settings do to this model, as accelerate 1.15's preparation would."""
    policy = lint.get("wrap_policy")
    if policy == "transformer":
        _classes(lint, anatomy)
    elif policy == "size":
        _containers(lint, anatomy)
    _buffers(lint, anatomy)
    _ties(lint, anatomy)
    _context(lint, anatomy)
    _ignored(lint, anatomy)
    _uneven(lint, anatomy)


def _detected_classes(lint: LintContext, anatomy: Anatomy) -> dict[str, Any]:
    """Return the fix that writes detect's classes, as arguments of ``LintContext.report``."""
    text = ",".join(anatomy.wrap.classes)
    entry = lint.at("wrap_classes")
    edits: tuple[Edit, ...] | None = None
    if text and entry is not None:
        edits = lint.editor.replace_entry(entry, text)
    elif text and lint.dialect.name == "accelerate":
        holder = lint.root.get("fsdp_config")
        key = "fsdp_transformer_layer_cls_to_wrap"
        edits = lint.editor.add(holder.node if holder else None, holder, {key: text})
    return {"edits": edits, "safe": False, "fix": f"write {text}", "changes": {"wrap_classes": text}}


def _classes(lint: LintContext, anatomy: Anatomy) -> None:
    named = lint.get("wrap_classes") or ()
    present = {module.class_name for module in anatomy.modules}
    fix = _detected_classes(lint, anatomy)
    place = lint.at("wrap_classes")
    if not named:
        _hints(lint, anatomy, fix)
        return
    for name in named:
        if name not in present:
            lint.report_value("FSD401", absent(anatomy.spec.model_class, name, present), place, **fix)
        elif anatomy.modules and anatomy.modules[0].class_name == name:
            lint.report_value("FSD402", f"{name} is the whole model", place, **fix)
        elif _holds_embedding(anatomy, name):
            _embedding(lint, anatomy, name, fix)
    _coverage(lint, anatomy, [name for name in named if name in present], fix)


def absent(model: str, name: str, present: Collection[str]) -> str:
    """Return what is said of a class that a model lacks."""
    near = spelling.nearest(name, present, cutoff=0.6)
    return f"{model} has no {name}{f': did you mean {near}?' if near else ''}"


def _hints(lint: LintContext, anatomy: Anatomy, fix: dict[str, Any]) -> None:
    """No class is named: accelerate takes ``_no_split_modules`` of the built instance."""
    place = lint.at("wrap_policy") or lint.root.get("fsdp_config")
    model = anatomy.spec.model_class
    absent = ", ".join(entry.name for entry in anatomy.wrap.no_split_modules if entry.status == "absent")
    if not anatomy.no_split_modules:
        lint.report("FSD406", f"{model} has no _no_split_modules; the file names no class", place, **fix)
    elif absent:
        lint.report("FSD410", f"_no_split_modules of {model} list {absent}, which it lacks", place, **fix)


def _embedding(lint: LintContext, anatomy: Anatomy, name: str, fix: dict[str, Any]) -> None:
    """A class with the input embedding: FSDP1 trains it, unless its weight is used outside the unit."""
    place = lint.at("wrap_classes")
    if lint.get("fsdp_version") != 1:
        lint.report_value("FSD403", f"{name} contains the input embedding", place, **fix)
        return
    outside = _used_outside(anatomy, name)
    if outside is None:
        message = f"{name} contains the input embedding, which fails under version 2"
        lint.report_value("FSD403", message, place, severity="info")
    else:
        message = f"{name} contains the input embedding, whose weight {outside} uses, too"
        lint.report_value("FSD403", message, place, **fix)


def _used_outside(anatomy: Anatomy, name: str) -> str | None:
    """Return a name outside of one module of a class for a parameter that this module holds, or None."""
    for prefix in _under(anatomy, [name]):
        for names in anatomy.ties:
            inside = [item for item in names if item.startswith(prefix)]
            if inside and len(inside) < len(names):
                return next(item for item in names if not item.startswith(prefix))
    return None


def _holds_embedding(anatomy: Anatomy, name: str) -> bool:
    embedding = anatomy.input_embedding
    if embedding is None:
        return False
    return any(
        module.class_name == name and embedding.startswith(f"{module.path}.") for module in anatomy.modules
    )


def _under(anatomy: Anatomy, classes: Sequence[str]) -> tuple[str, ...]:
    """Return the path prefixes of everything inside modules of the classes."""
    return tuple(f"{m.path}." for m in anatomy.modules if m.class_name in classes and m.path)


def _coverage(lint: LintContext, anatomy: Anatomy, named: list[str], fix: dict[str, Any]) -> None:
    roots = _under(anatomy, named)
    if not roots or not anatomy.total_parameters or set(named) == set(anatomy.wrap.classes):
        return
    covered = sum(parameter.numel for parameter in anatomy.parameters if parameter.fqn.startswith(roots))
    best = _under(anatomy, anatomy.wrap.classes)
    possible = sum(
        parameter.numel for parameter in anatomy.parameters if best and parameter.fqn.startswith(best)
    )
    if covered < 0.7 * possible:
        lint.report_value(
            "FSD408",
            f"{','.join(named)} cover {covered:,} of {anatomy.total_parameters:,} parameters; "
            f"{','.join(anatomy.wrap.classes)} would cover {possible:,}",
            "wrap_classes",
            **fix,
        )


def _containers(lint: LintContext, anatomy: Anatomy) -> None:
    threshold = lint.get("min_num_params") or 0
    first = lint.get("fsdp_version") == 1  # whose policy passes containers by
    for module in anatomy.modules:
        if module.forwards or not module.path:
            continue
        prefix = f"{module.path}."
        size = sum(parameter.numel for parameter in anatomy.parameters if parameter.fqn.startswith(prefix))
        if size >= threshold > 0:
            lint.report_value(
                "FSD409",
                f"{module.path} ({module.class_name}) holds {size:,} parameters, more than {threshold:,}"
                + (", which fails under version 2" if first else ""),
                "wrap_policy",
                severity="info" if first else None,
            )
            return


def _buffers(lint: LintContext, anatomy: Anatomy) -> None:
    persistent = [buffer.fqn for buffer in anatomy.buffers if buffer.persistent]
    if not lint.get("cpu_ram_efficient_loading") or not persistent or lint.consumer.name == "fsdptool":
        return
    entry = lint.at("cpu_ram_efficient_loading")
    message = f"{anatomy.spec.model_class} has {len(persistent)} persistent buffers ({persistent[0]}, ...)"
    if lint.get("fsdp_version") == 1:  # broadcasts modules, buffers included, and no state dict of DTensors
        lint.report_value("FSD404", f"{message}, which fail under version 2", entry, severity="info")
        return
    if entry is not None:
        edits = lint.editor.replace(entry.node, False)
    else:
        holder = lint.root.get("fsdp_config")
        edits = lint.editor.add(
            holder.node if holder else None, holder, {"fsdp_cpu_ram_efficient_loading": False}
        )
    lint.report_value(
        "FSD404",
        message,
        entry,
        edits=edits,
        safe=False,
        fix="write fsdp_cpu_ram_efficient_loading: false",
        changes={"cpu_ram_efficient_loading": False},
    )


def _ties(lint: LintContext, anatomy: Anatomy) -> None:
    if lint.consumer.name == "fsdptool":
        return
    first = lint.get("fsdp_version") == 1
    units = lint.get("wrap_classes") or () if lint.get("wrap_policy") == "transformer" else ()
    apart = first and any(_used_outside(anatomy, name) is not None for name in units)
    for names in anatomy.ties:
        if len(names) > 2:
            message = f"{names[0]} is shared by {len(names)} modules: {', '.join(names[1:4])}, ..."
            lint.report(
                "FSD405",
                f"{message} This fails under version 2" if first and not apart else message,
                severity="info" if first and not apart else None,
            )
        elif f"{anatomy.input_embedding}.weight" in names:
            _tied_embeddings(lint, anatomy)


def _tied_embeddings(lint: LintContext, anatomy: Anatomy) -> None:
    """Only accelerate 1.14 divides tied embeddings over two units, which torch refuses since 2.12."""
    consumer = lint.consumer
    version = consumer.version if consumer.name == "accelerate" else consumer.version_of("accelerate")
    torch = dict(consumer.beside).get("torch")
    affected = not is_before(version, 1, 14) and is_before(version, 1, 15)
    if lint.get("fsdp_version") != 2 or not affected or (torch is not None and is_before(torch, 2, 12)):
        return
    refused = not is_before(consumer.version_of("torch"), 2, 12)
    lint.report(
        "FSD412",
        f"accelerate {version} puts the tied embeddings of {anatomy.spec.model_class} into two units; torch"
        f" {torch or '2.12 and 2.13'} refuse{'s' if torch else ''} that",
        severity="error" if refused else "warning",
    )


def _context(lint: LintContext, anatomy: Anatomy) -> None:
    if (lint.get("cp") or 1) <= 1:
        return
    from fsdptool.modeling.context_parallel import MASKED_KINDS, attention_kinds

    kinds = attention_kinds(anatomy.spec.config)
    if lint.consumer.name == "fsdptool":
        kinds = [kind for kind in kinds if kind not in MASKED_KINDS]
    if kinds:
        lint.report_value(
            "FSD407", f"{anatomy.spec.model_class} has attention layers of type {', '.join(kinds)}", "cp"
        )


def _ignored(lint: LintContext, anatomy: Anatomy) -> None:
    pattern = lint.get("ignored_modules")
    if not pattern:
        return
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        lint.report_value(
            "FSD206", f"fsdp_ignored_modules is not a valid regular expression: {error}", "ignored_modules"
        )
        return
    prefixes = tuple(f"{module.path}." for module in anatomy.modules if compiled.fullmatch(module.path))
    trainable = [p.fqn for p in anatomy.parameters if prefixes and p.fqn.startswith(prefixes) and p.trainable]
    if trainable and lint.consumer.name != "fsdptool":
        lint.report_value(
            "FSD411",
            f"{len(trainable)} trainable parameters are ignored ({trainable[0]}, ...)",
            "ignored_modules",
        )


def _uneven(lint: LintContext, anatomy: Anatomy) -> None:
    """What only some ranks use in a step; fsdptool's trainer keeps its ranks in step."""
    if lint.consumer.name == "fsdptool":
        return
    from fsdptool.inspection.hazards import expert_modules, optional_towers

    if experts := expert_modules(anatomy):
        lint.report_value(
            "FSD413", f"{len(experts)} lists of experts that are modules ({experts[0]}, ...)", "wrap_policy"
        )
    if towers := optional_towers(anatomy):
        lint.report_value("FSD414", f"a batch of text alone skips {', '.join(towers)}", "wrap_policy")


_STATES = 16
"""Bytes per trainable parameter with AdamW and fp32 masters: parameter, gradient, two moments."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a run needs on a GPU.

    Attributes:
        needed: Bytes per GPU, at least; None where that is unknown.
        usable: Bytes that can be used.
        batch: The batch that was predicted, in words.
    """

    needed: int | None
    usable: int | None
    batch: str


Fit = Callable[[SourceText, FsdpSettings, Layout, int, int], Need | None]
"""What the run of a file needs: the one that the file describes, else the smallest one of a given model.

Takes the file, its settings, the layout, the number of GPUs and of machines. Returns None where neither is
known, and raises FsdptoolError where the run cannot be predicted. Predicting belongs to a later room, so the
caller hands it in.
"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a file is judged against besides its consumer.

    Attributes:
        gpu: The GPU, or None.
        gpus: Number of GPUs over all machines, or None.
        host_memory: Bytes of host memory per machine, or None.
        anatomy: The model, or None.
        fit: Predicts the run of a file on the GPU, or None.
    """

    gpu: Gpu | None = None
    gpus: int | None = None
    host_memory: int | None = None
    anatomy: Anatomy | None = None
    fit: Fit | None = None


def check_hardware(lint: LintContext, hardware: Hardware) -> None:
    """Report where the settings do not suit the hardware."""
    if hardware.gpu is not None:
        _precision(lint, hardware.gpu)
    _count(lint, hardware)
    _offload(lint, hardware)
    if hardware.gpu is not None and hardware.fit is not None:
        _fit(lint, hardware, hardware.gpu, hardware.fit)


def _precision(lint: LintContext, gpu: Gpu) -> None:
    precision = lint.get("mixed_precision")
    entry = lint.at("mixed_precision")
    if precision == "bf16" and not gpu.native_bf16:
        edits = lint.editor.replace(entry.node, "fp16") if entry is not None else None
        lint.report_value(
            "FSD501",
            f"{gpu.name} does not compute in bfloat16 natively",
            entry,
            edits=edits if lint.dialect.name == "accelerate" else None,
            safe=False,
            fix="write fp16",
            changes={"mixed_precision": "fp16"},
        )
    if precision == "fp8" and not gpu.native_fp8:
        lint.report_value("FSD505", f"{gpu.name} does not compute in fp8", entry)


def _count(lint: LintContext, hardware: Hardware) -> None:
    processes = lint.get("num_processes")
    if hardware.gpus is not None and isinstance(processes, int) and processes != hardware.gpus:
        ours = f"{processes} process{'' if processes == 1 else 'es'}"
        gpus = f"{hardware.gpus} GPU{'' if hardware.gpus == 1 else 's'}"
        lint.report_value("FSD504", f"{ours} for {gpus}", "num_processes")


def _offload(lint: LintContext, hardware: Hardware) -> None:
    if not lint.get("cpu_offload") or hardware.host_memory is None or hardware.anatomy is None:
        return
    machines = lint.get("num_machines") or 1
    trainable = sum(p.numel for p in hardware.anatomy.parameters if p.trainable)
    copies = lint.get("dp_replicate") or 1
    needed = trainable * _STATES * copies // machines
    if needed > hardware.host_memory:
        lint.report(
            "FSD502",
            f"offload needs about {amount(needed)} of host memory per machine, but only "
            f"{amount(hardware.host_memory)} are available (AdamW, fp32 masters)",
            "cpu_offload",
        )


def _fit(lint: LintContext, hardware: Hardware, gpu: Gpu, fit: Fit) -> None:
    """Report a run that does not fit: the whole file's, or the smallest one, without which nothing fits."""
    processes = lint.get("num_processes")
    total = hardware.gpus or (processes if isinstance(processes, int) else None)
    if total is None:
        if hardware.anatomy is not None:
            lint.report("FSD506", "the number of GPUs is unknown: give --gpus")
        return
    settings = settings_from({key: fact.value for key, fact in lint.facts.items()})
    layout: Layout = "native" if lint.consumer.name == "fsdptool" else "accelerate"
    try:
        need = fit(lint.source, settings, layout, total, lint.get("num_machines") or 1)
    except FsdptoolError as error:
        lint.report("FSD506", f"could not check whether the run fits: {error.message}")
        return
    if need is None:
        return
    if need.needed is None or need.usable is None:
        lint.report("FSD506", "could not check whether the run fits")
    elif need.needed > need.usable:
        lint.report(
            "FSD503",
            f"the run needs {amount(need.needed)} of the {amount(need.usable)} that are usable on {gpu.name},"
            f" at {need.batch}",
            lint.root.get("fsdp_config"),
        )
