"""Explains the size of an allocation that failed by the sizes of the model and of the run.

A figure of a log is compared with every activation that has a row for each token. PyTorch asks the driver for
whole multiples of 2 MiB from 10 MiB on (``get_allocation_size``, c10/cuda/CUDACachingAllocator.cpp), prints
that size with two decimals, and takes smaller requests from segments of one size, which say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.records.described_run import TOKEN_OBJECTIVES, DescribedRun
from fsdptool.records.diagnosis import (
    AllocatedTensor,
    Allocation,
    FailureDiagnosis,
    RequestedMemory,
    TensorWidth,
)

_LARGE, _ROUNDED = 10 << 20, 2 << 20
_BYTES = {"float32": 4, "bfloat16": 2}
_KEYS: Mapping[TensorWidth, tuple[str, ...]] = {
    TensorWidth.VOCABULARY: ("vocab_size", "n_vocab"),
    TensorWidth.HIDDEN: ("hidden_size", "d_model", "n_embd"),
    TensorWidth.INTERMEDIATE: ("intermediate_size", "d_ff", "ffn_dim", "n_inner"),
}
"""Keys of configurations of transformers for each width."""
_SWITCHES = {
    "axolotl": "plugins: [axolotl.integrations.liger.LigerPlugin] and liger_fused_linear_cross_entropy: true",
    "llamafactory": "enable_liger_kernel: true",
    "trainer": "use_liger_kernel: true",
    "trl": "use_liger_kernel: true",
    "fsdptool": "objective.fused: true",
}
"""What makes each program fuse the head with the loss. See the readers in ``config/dialects``."""
_PAIRED = ("dpo", "orpo", "simpo", "reward")
"""Objectives that put the chosen and the rejected text of a sample into one forward."""
_WHOLE_TOKENS, _WINDOW = 1024, 64
"""Without the sizes of a run, tokens are taken for a multiple of the first; the rounding of the log may leave
at most the second open, so that few figures match by chance."""


@dataclass(frozen=True, slots=True)
class AllocationSizes:
    """What tensors of a run are made of; None is not known.

    Attributes:
        widths: Widths of the model's tensors, in elements.
        micro_batch: Sequences of one forward.
        sequence_length: Tokens of a sequence on one rank.
        fused: Whether the run already computes its loss without whole logits.
        switch: The setting that makes its program do so.
    """

    widths: Mapping[TensorWidth, int]
    micro_batch: int | None = None
    sequence_length: int | None = None
    fused: bool = False
    switch: str | None = None


def explain_allocation(
    diagnosis: FailureDiagnosis, config: Path | None, model: str | None, *, trusted: bool = False
) -> Allocation:
    """Return what a log's failed allocation is, in terms of the file and the model of its run.

    Args:
        diagnosis: Of the log.
        config: The training file or recipe of the run; None: only the model is known.
        model: Its model; None takes the one that the file names.
        trusted: Whether code of the model may be run.

    Raises:
        ConfigError: The log has no failed allocation, the file describes no run, or no model is known.
        ReferenceError: The model cannot be resolved.
    """
    requested = next((item.requested for item in diagnosis.failures if item.requested is not None), None)
    if requested is None:
        raise ConfigError(
            f'{diagnosis.target} has no "Tried to allocate" of PyTorch to explain',
            help="leave --config and --model out",
        )
    sizes = _sizes(config, model, trusted)
    return Allocation(
        requested, tuple(matching_tensors(requested, sizes)), fused=sizes.fused, switch=sizes.switch
    )


def matching_tensors(requested: RequestedMemory, sizes: AllocationSizes) -> Iterator[AllocatedTensor]:
    """Yield the tensors whose bytes PyTorch prints as this figure."""
    batch, length = sizes.micro_batch, sizes.sequence_length
    for width, elements in sizes.widths.items():
        for dtype, size in _BYTES.items():
            row = elements * size
            if batch is None or length is None:
                open_tokens = 2 * (requested.within_bytes + _ROUNDED) / row
                tokens = round(requested.bytes / row / _WHOLE_TOKENS) * _WHOLE_TOKENS
                if open_tokens > _WINDOW:
                    continue
            else:
                tokens = batch * length
            if _printed_as(tokens * row, requested):
                yield AllocatedTensor(width, elements, batch, length, tokens, dtype, tokens * row)


def _printed_as(size: int, requested: RequestedMemory) -> bool:
    allocated = -(-size // _ROUNDED) * _ROUNDED
    return size >= _LARGE and abs(allocated - requested.bytes) <= requested.within_bytes


def _sizes(config: Path | None, model: str | None, trusted: bool) -> AllocationSizes:
    from fsdptool.config.described import describe_path

    if config is None:
        return AllocationSizes(_widths(str(model), trusted))
    run = describe_path(config)
    if run is None:
        return _sizes_of_recipe(config, model, trusted)
    known = model or run.family
    if known is None and run.model is not None and Path(run.model).expanduser().exists():
        known = run.model
    if known is None:
        what = f"trains {run.model}, whose sizes are not known here" if run.model else "names no model"
        raise ConfigError(f"{config} {what}", help="name a model of its sizes: --model MODEL")
    tokens = run.objective in TOKEN_OBJECTIVES
    return AllocationSizes(
        _widths(known, trusted),
        _sequences(run),
        _local(run.sequence_length, run.mesh.cp),
        fused=run.fused_loss not in (None, "none"),
        switch=_SWITCHES.get(run.program) if tokens and run.objective not in _PAIRED else None,
    )


def _sizes_of_recipe(config: Path, model: str | None, trusted: bool) -> AllocationSizes:
    from fsdptool.config.recipe import read_recipe

    recipe = read_recipe(config)
    return AllocationSizes(
        _widths(model or recipe.model.reference, trusted),
        recipe.batch.micro_batch * (2 if recipe.objective.name in _PAIRED else 1),
        recipe.batch.sequence_length,
        fused=bool(recipe.objective.fused),
        switch=_SWITCHES["fsdptool"],
    )


def _sequences(run: DescribedRun) -> int | None:
    if run.micro_batch is None:
        return None
    return run.micro_batch * (2 if run.objective in _PAIRED else 1)


def _local(length: int | None, cp: int | None) -> int | None:
    return -(-length // cp) if length is not None and cp else length


def _widths(model: str, trusted: bool) -> Mapping[TensorWidth, int]:
    """Return the widths that a model's configuration names, at least one.

    Raises:
        ConfigError: It names none.
    """
    from fsdptool.families.bases.batches import text_config
    from fsdptool.families.registry import family_of
    from fsdptool.source import resolve

    spec = resolve(model, trust_remote_code=trusted)
    family: Any = family_of(spec)
    config: Any = SimpleNamespace(**spec.config)
    # A configuration leaves out what its class has as a default.
    if hasattr(family, "config_object"):
        config = family.config_object(spec.config, spec.model_class)
    text = text_config(config)
    found: dict[TensorWidth, int] = {}
    for width, keys in _KEYS.items():
        sizes = (getattr(text, key, None) for key in keys)
        size = next((size for size in sizes if isinstance(size, int) and size > 0), None)
        if size is not None:
            found[width] = size
    if not found:
        raise ConfigError(
            f"the configuration of {model} has no vocabulary and no hidden size",
            help="sizes of allocations are explained for models of text; leave --config and --model out",
        )
    return found
