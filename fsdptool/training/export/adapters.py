"""What an export writes: a state dict in files of a limited size, and LoRA adapters alone or merged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.files.safetensors_writer import Entry, write_stream
from fsdptool.modeling.methods.lora import ADAPTER, adapter_config, base_name, is_adapter
from fsdptool.runs.folder import write_json
from fsdptool.runs.work import LongWork

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdptool.families.protocol import Family
    from fsdptool.runs.folder import RunInputs


SHARD_BYTES = 5 * 10**9
"""transformers' and diffusers' own default is near this (5 GB and 10 GB in 5.23 and 0.42)."""


def write_shards(folder: Path, stem: str, entries: Sequence[Entry], *, limit: int = SHARD_BYTES) -> list[str]:
    """Write ``entries`` as ``stem.safetensors``, or as numbered files and ``stem.safetensors.index.json``.

    Args:
        folder: Existing folder.
        stem: ``model`` or ``diffusion_pytorch_model``.
        entries: What to write; each value is asked for once, in order.
        limit: Bytes a file may have (a single larger tensor has a file of its own).

    Returns:
        The names of the files.

    Raises:
        OSError: The folder cannot be written.
    """
    groups = _split(entries, limit)
    names = [
        f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        for i in range(len(groups))
    ]
    work, done = LongWork(f"writing {stem}", len(entries), "tensors"), 0
    for name, group in zip(names, groups, strict=True):
        told = [replace(entry, value=_told(entry, work, done + n)) for n, entry in enumerate(group, 1)]
        write_stream(folder / name, told, {"format": "pt"})
        done += len(group)
    if len(groups) > 1:
        where = {entry.name: name for name, group in zip(names, groups, strict=True) for entry in group}
        total = sum(entry.bytes for entry in entries)
        write_json(
            folder / f"{stem}.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))},
        )
    return names


def _told(entry: Entry, work: LongWork, number: int) -> Callable[[], torch.Tensor | None]:
    def value() -> torch.Tensor | None:
        work.advance(number)
        return entry.value()

    return value


def _split(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    return groups


PEFT_FILE = "adapter_model.safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"


def write_adapters(
    folder: Path, inputs: RunInputs, family: Family, model: nn.Module, fetch: Callable[[str], torch.Tensor]
) -> None:
    """Write the adapters alone: peft's format, and diffusers' own beside it for its models.

    Args:
        folder: Existing folder.
        inputs: The run.
        family: Its family.
        model: With adapters injected, on meta.
        fetch: Returns a tensor's value by its name in ``model``.

    Raises:
        OSError: The folder cannot be written.
    """
    spec = inputs.spec
    config = adapter_config(inputs.recipe, family, spec.config).to_dict()
    config |= {"inference_mode": True, "base_model_name_or_path": spec.folder or spec.reference.id}
    config["revision"] = spec.reference.revision
    if spec.library == "transformers":
        config["task_type"] = _task(spec.model_class)
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    named = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    # diffusers takes the first safetensors file it finds in a folder (0.42, lora_base.py), so for its
    # models peft's format has a folder of its own.
    apart = spec.library == "diffusers"
    place = folder / "peft" if apart else folder
    place.mkdir(exist_ok=True)
    _write(place / PEFT_FILE, "base_model.model.", named, fetch, {"format": "pt"})
    write_json(place / "adapter_config.json", json.loads(json.dumps(plain, default=str)))
    if not apart:
        return
    component = f"{spec.component or 'transformer'}."
    packed = {f"{component}{key}": value for key, value in plain.items()}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(packed, default=str, sort_keys=True)}
    _write(folder / DIFFUSERS_FILE, component, named, fetch, metadata)


def _write(
    path: Path,
    prefix: str,
    named: Mapping[str, torch.Tensor],
    fetch: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    entries = [
        Entry(prefix + name.replace(f".{ADAPTER}", ""), like.dtype, tuple(like.shape), partial(fetch, name))
        for name, like in named.items()
    ]
    write_stream(path, entries, metadata)


def _task(model_class: str) -> str | None:
    endings = {
        "ForCausalLM": "CAUSAL_LM",
        "ForConditionalGeneration": "SEQ_2_SEQ_LM",
        "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS",
    }
    return next((task for ending, task in endings.items() if model_class.endswith(ending)), None)


def merged_fetch(model: nn.Module, fetch: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Return a fetch by the base model's names, whose values have the adapters merged in.

    peft's own layers compute the change, one layer at a time, so that every kind of layer it adapts
    is merged as it merges it.

    Args:
        model: With adapters injected, on meta.
        fetch: Returns a tensor's value by its name in ``model``.
    """
    names = {base_name(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {base_name(name): name for name, _ in model.named_buffers(remove_duplicate=False)}
    owners = _owners(model)

    def merged(name: str) -> torch.Tensor:
        inner = names[name]
        value = fetch(inner)
        for path, layer in owners.get(inner, ()):
            value = value + _delta(path, layer, fetch, value)
        return value

    return merged


def _owners(model: nn.Module) -> dict[str, list[tuple[str, Any]]]:
    """Map each adapted base parameter to the layers that adapt it, innermost first."""
    from peft.tuners.lora import LoraLayer

    owners: dict[str, list[tuple[str, Any]]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer) or ADAPTER not in module.r:
            continue
        leaf = getattr(module, "parameter_name", "weight")
        base, prefix = module.base_layer, f"{path}.base_layer"
        while hasattr(base, "base_layer"):
            base, prefix = base.base_layer, f"{prefix}.base_layer"
        owners.setdefault(f"{prefix}.{leaf}", []).insert(0, (path, module))
    return owners


def _delta(path: str, layer: Any, fetch: Callable[[str], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """Give one layer its adapter's values, let it compute its change, and take the values away again."""
    import torch
    from torch import nn

    own = {name: p for name, p in layer.named_parameters() if is_adapter(name) and "base_layer" not in name}
    for name in own:
        _put(layer, name, nn.Parameter(fetch(f"{path}.{name}"), requires_grad=False))
    # peft's wrapper of a parameter moves the change to the device of the base parameter, which is meta here.
    leaf = getattr(layer, "parameter_name", None)
    base = layer.get_base_layer()
    on_meta = getattr(base, leaf) if leaf else None
    if leaf:
        base.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    try:
        with torch.no_grad():
            change: torch.Tensor = layer.get_delta_weight(ADAPTER)
    finally:
        for name, parameter in own.items():
            _put(layer, name, parameter)
        if leaf:
            base.register_parameter(leaf, on_meta)
    return change.to(value.dtype)


def _put(module: Any, name: str, parameter: Any) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path).register_parameter(leaf, parameter)
