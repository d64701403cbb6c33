"""What accelerate 1.15 and torch 2.13 do with this model, and the setting that avoids it. Torch-free.

Each rule was reproduced on those versions (docs/detect.md says how).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fsdptool.inspection.census import Census
from fsdptool.inspection.walk import Walked
from fsdptool.inspection.witnesses import holds_embedding
from fsdptool.records.anatomy import Parameter, WrapChoice
from fsdptool.records.diagnostic import Diagnostic

PERSISTENT_BUFFERS = "DET201"
MANY_WAY_TIE = "DET202"
ABSENT_NAMES = "DET203"
EMPTY_NAMES = "DET204"
NAMES_HOLD_EMBEDDING = "DET205"
NOTHING_TO_WRAP = "DET206"
MIXED_DTYPES = "DET207"
TWO_WAY_TIE = "DET208"
SHARED_BETWEEN_BLOCKS = "DET209"
NESTED_CLASSES = "DET210"
WRAP_HOLDS_EMBEDDING = "DET211"
FUSED_EXPERTS = "DET212"
LIBRARY_PLAN = "DET213"
UNLISTED_BLOCKS = "DET214"


BY_CHOICE = frozenset({NOTHING_TO_WRAP, NESTED_CLASSES, WRAP_HOLDS_EMBEDDING})
"""Codes that depend on the wrap choice alone."""


def class_hazards(census: Census, choice: WrapChoice) -> tuple[Diagnostic, ...]:
    """Return the hazards of a wrap choice itself."""
    return tuple(_classes(census, choice))


def hazards(walked: Walked, census: Census, choice: WrapChoice) -> tuple[Diagnostic, ...]:
    """Return every hazard this model triggers under its wrap choice."""
    return (
        *_buffers(walked),
        *_ties(walked, census, choice),
        *_names(walked, census, choice),
        *_classes(census, choice),
        *_dtypes(walked),
        *_experts(walked),
        *_plan(walked),
    )


def _buffers(walked: Walked) -> Iterator[Diagnostic]:
    persistent = [buffer.fqn for buffer in walked.buffers if buffer.persistent]
    if persistent:
        yield _warn(
            PERSISTENT_BUFFERS,
            f"{_some(persistent, 'persistent buffer')}: accelerate 1.15 crashes on them when"
            " fsdp_cpu_ram_efficient_loading is on, which is the launcher's default",
            "set fsdp_cpu_ram_efficient_loading: false",
        )


def _ties(walked: Walked, census: Census, choice: WrapChoice) -> Iterator[Diagnostic]:
    many: list[Parameter] = []
    two: list[Parameter] = []
    for parameter in walked.parameters:
        if not parameter.aliases:
            continue
        owners = {name.rpartition(".")[0] for name in parameter.names}
        ends = {f"{path}.weight" for path in (walked.input_embedding, walked.output_embedding) if path}
        # accelerate 1.15 puts a tied input and output embedding into one group; every other tie
        # between modules of different groups makes torch 2.13 stop.
        (two if len(owners) == 2 and set(parameter.names) <= ends else many).append(parameter)
    if many:
        worst = max(many, key=lambda parameter: len(parameter.names))
        listed = ", ".join(worst.names[:4]) + (", ..." if len(worst.names) > 4 else "")
        yield _warn(
            MANY_WAY_TIE,
            f"{len(many)} tied parameter(s) beyond one input and output embedding ({listed}):"
            " accelerate 1.15 may put the owners into different FSDP groups, which torch refuses",
            "train with fsdptool's native layout, which keeps all owners in one unit, or untie them",
        )
    if two:
        size = sum(parameter.numel for parameter in two)
        yield _info(
            TWO_WAY_TIE,
            f"input and output embedding are one tensor of {size:,} parameters: accelerate 1.15 keeps it"
            " gathered from forward to backward",
            "expected for tied models; plan counts it",
        )
    blocks = {path: name for name in choice.classes for path in census.by_class.get(name, ())}
    shared = [p.fqn for p in many if len({_block(name, blocks) for name in p.names} - {None}) > 1]
    if shared:
        yield _warn(
            SHARED_BETWEEN_BLOCKS,
            f"{_some(shared, 'parameter')} shared between blocks: accelerate 1.15 wraps each block by itself"
            " and torch refuses the second",
            "train with fsdptool's native layout, which makes shared parameters one unit",
        )


def _block(name: str, blocks: dict[str, str]) -> str | None:
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in blocks:
            return path
    return None


def _names(walked: Walked, census: Census, choice: WrapChoice) -> Iterator[Diagnostic]:
    explicit = (
        f"set fsdp_transformer_layer_cls_to_wrap: {','.join(choice.classes)}"
        if choice.classes
        else "set fsdp_auto_wrap_policy: NO_WRAP"
    )
    names = walked.no_split_modules
    absent = [name for name in names if name not in census.by_class]
    if absent:
        yield _warn(
            ABSENT_NAMES,
            f"_no_split_modules names {', '.join(absent)}, absent from the model: accelerate 1.15 stops"
            " with 'Could not find the transformer layer class' unless classes are given",
            explicit,
        )
    if not names and choice.classes:
        yield _warn(
            EMPTY_NAMES,
            "_no_split_modules is empty: without explicit classes accelerate 1.15 wraps nothing, in"
            " silence, and gathers the whole model at once",
            explicit,
        )
    holders = [
        name
        for name in names
        if name not in choice.classes
        and any(holds_embedding(census, p) for p in census.by_class.get(name, ()))
    ]
    if holders:
        yield _warn(
            NAMES_HOLD_EMBEDDING,
            f"_no_split_modules names {', '.join(holders)}, which holds an embedding: accelerate 1.15 wraps"
            " it and then shards the embedding again, which fails",
            explicit,
        )
    missed = [name for name in choice.classes if names and name not in names]
    if missed and not absent:
        yield _warn(
            UNLISTED_BLOCKS,
            f"_no_split_modules leaves out {', '.join(missed)}: without explicit classes these blocks stay"
            " in the root unit",
            explicit,
        )


def _classes(census: Census, choice: WrapChoice) -> Iterator[Diagnostic]:
    if not choice.classes:
        yield _warn(
            NOTHING_TO_WRAP,
            "no class to wrap: every parameter is in one unit, gathered whole",
            "fsdp_auto_wrap_policy: NO_WRAP says so plainly; leave fsdp_activation_checkpointing off with it",
        )
    paths = {path: name for name in choice.classes for path in census.by_class.get(name, ())}
    nested = next(
        (path for path in paths if _block(f"{path}.x", {p: n for p, n in paths.items() if p != path})), None
    )
    if nested:
        yield _info(
            NESTED_CLASSES,
            f"{paths[nested]} is wrapped inside another wrapped block ({nested})",
            "correct, but each level gathers separately; --exclude one of the classes",
        )
    holding = [
        name for name in choice.classes if any(holds_embedding(census, p) for p in census.by_class[name])
    ]
    if holding:
        yield _warn(
            WRAP_HOLDS_EMBEDDING,
            f"the wrap class {', '.join(holding)} holds an embedding: accelerate 1.15 shards an input"
            " embedding a second time, which fails",
            "wrap a class below it, or train with fsdptool's native layout",
        )


def _dtypes(walked: Walked) -> Iterator[Diagnostic]:
    dtypes = sorted({parameter.dtype for parameter in walked.parameters if parameter.trainable})
    if len(dtypes) > 1:
        yield _warn(
            MIXED_DTYPES,
            f"trainable parameters have {' and '.join(dtypes)}: FSDP2 expects one dtype per unit",
            "set mixed_precision: bf16 (masters become float32), or load the model in one dtype",
        )


def fused_experts(parameters: Iterable[Parameter]) -> tuple[str, ...]:
    """Return the names of fused expert tensors: three-dimensional parameters below an ``experts`` module."""
    return tuple(
        parameter.fqn
        for parameter in parameters
        if len(parameter.shape) == 3 and "expert" in parameter.fqn.rpartition(".")[0].lower()
    )


def _experts(walked: Walked) -> Iterator[Diagnostic]:
    fused = set(fused_experts(walked.parameters))
    if not fused:
        return
    held = [parameter for parameter in walked.parameters if parameter.fqn in fused]
    share = sum(parameter.numel for parameter in held) / max(sum(p.numel for p in walked.parameters), 1)
    counts = sorted({parameter.shape[0] for parameter in held})
    yield _info(
        FUSED_EXPERTS,
        f"{len(held)} fused expert tensors hold {share:.1%} of the parameters; FSDP2 shards them by expert"
        f" ({', '.join(map(str, counts))}), the largest is {max(p.numel for p in held):,}",
        "ranks beyond the number of experts hold nothing of them (--world-size shows it); LoRA by module"
        " name does not reach them",
    )


def _plan(walked: Walked) -> Iterator[Diagnostic]:
    if walked.fsdp_plan_unmatched:
        yield _info(
            LIBRARY_PLAN,
            f"transformers' own FSDP plan has rules that match nothing here:"
            f" {', '.join(walked.fsdp_plan_unmatched[:6])}",
            "a script that relies on DistributedConfig(fsdp_plan=...) shards less than it seems",
        )


def _some(names: list[str], noun: str) -> str:
    plural = noun if len(names) == 1 else f"{noun}s"
    return f"{len(names)} {plural} ({names[0]}{', ...' if len(names) > 1 else ''})"


def _warn(code: str, message: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, severity="warning", message=message, help=help)


def _info(code: str, message: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, severity="info", message=message, help=help)
