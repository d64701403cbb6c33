"""What an export writes: a state dict in files of a limited size, and LoRA adapters alone or merged."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.files.safetensors_writer import TensorEntry, write_stream
from fsdptool.files.text import exists
from fsdptool.modeling.methods.lora import (
    ADAPTER,
    adapter_config,
    base_name,
    is_adapter,
    is_copy,
    original_name,
    saved_keys,
    trained_rows,
)
from fsdptool.runs.folder import write_json
from fsdptool.runs.work import LongWork

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdptool.families.protocol import Family
    from fsdptool.runs.folder import RunInputs


SHARD_BYTES = 5 * 10**9
"""transformers' and diffusers' own default is near this (5 GB and 10 GB in 5.23 and 0.42)."""


def write_shards(
    folder: Path, stem: str, entries: Sequence[TensorEntry], *, limit: int = SHARD_BYTES
) -> list[str]:
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


def _told(entry: TensorEntry, work: LongWork, number: int) -> Callable[[], torch.Tensor | None]:
    def value() -> torch.Tensor | None:
        work.advance(number)
        return entry.value()

    return value


def _split(entries: Sequence[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    groups: list[list[TensorEntry]] = [[]]
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
    base = spec.folder or (spec.adapter or {}).get("base_model_name_or_path") or spec.reference.id
    if exists(Path(base)):
        base = str(Path(base).absolute())  # whoever loads the adapters may do so in another folder
    config |= {"inference_mode": True, "base_model_name_or_path": base}
    config["revision"] = spec.reference.revision
    if spec.library == "transformers":
        config["task_type"] = _task(spec.model_class, config["modules_to_save"] or ())
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    keys = saved_keys(model)
    # diffusers takes the first safetensors file it finds in a folder (0.42, lora_base.py), so for its
    # models peft's format has a folder of its own.
    apart = spec.library == "diffusers"
    place = folder / "peft" if apart else folder
    place.mkdir(exist_ok=True)
    _write(place / PEFT_FILE, "base_model.model.", model, keys, fetch, {"format": "pt"})
    write_json(place / "adapter_config.json", json.loads(json.dumps(plain, default=str)))
    # diffusers' own format holds the matrices of adapters and nothing else.
    if not apart or not all(is_adapter(name) for name in keys.values()):
        return
    component = f"{spec.component or 'transformer'}."
    packed = {f"{component}{key}": value for key, value in plain.items()}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(packed, default=str, sort_keys=True)}
    _write(folder / DIFFUSERS_FILE, component, model, keys, fetch, metadata)


def _write(
    path: Path,
    prefix: str,
    model: nn.Module,
    keys: Mapping[str, str],
    fetch: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    there = dict(model.named_parameters(remove_duplicate=False))
    entries = [
        TensorEntry(prefix + key, there[name].dtype, tuple(there[name].shape), partial(fetch, name))
        for key, name in keys.items()
    ]
    write_stream(path, entries, metadata)


def _task(model_class: str, saved: Collection[str]) -> str | None:
    """Return peft's name for a task; one that has peft look for a head only where the head is saved."""
    endings = {
        "ForCausalLM": ("CAUSAL_LM", None),
        "ForConditionalGeneration": ("SEQ_2_SEQ_LM", None),
        "ForSequenceClassification": ("SEQ_CLS", ("classifier", "score")),
        "ForTokenClassification": ("TOKEN_CLS", ("classifier", "score")),
        "ForQuestionAnswering": ("QUESTION_ANS", ("qa_outputs",)),
    }
    task, heads = next(
        (item for ending, item in endings.items() if model_class.endswith(ending)), (None, None)
    )
    return task if heads is None or not set(heads).isdisjoint(saved) else None


def merged_fetch(model: nn.Module, fetch: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Return a fetch by the base model's names, whose values have the adapters merged in.

    peft's own layers compute the change, one layer at a time, so that every kind of layer it adapts
    is merged as it merges it. Trained copies of modules take their place, and trained rows theirs.

    Args:
        model: With adapters injected, on meta.
        fetch: Returns a tensor's value by its name in ``model``.

    Raises:
        ConfigError: The base has no place for what was trained.
    """
    owners, tables = _owners(model), trained_rows(model)
    _check_mergeable(model, owners, tables)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    names = {base_name(name): name for name in tensors if not is_copy(name)}
    names |= {base_name(name): name for name in tensors if is_copy(name)}

    def merged(name: str) -> torch.Tensor:
        inner = names[name]
        value = fetch(inner)
        for path, layer in owners.get(inner, ()):
            value = _merged_value(path, layer, fetch, value, bias=inner.endswith(".bias"))
        if inner in tables:
            rows, indices = tables[inner]
            value = value.clone()
            value[list(indices)] = fetch(rows).to(value.dtype)
        return value

    return merged


def _check_mergeable(
    model: nn.Module,
    changed: Collection[str],
    tables: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Refuse to merge what the tensors of the base cannot hold.

    Args:
        model: With adapters injected, on meta.
        changed: Tensors of the base that adapters change, by name.
        tables: What :func:`trained_rows` found.
    """
    tied: dict[int, list[str]] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        tied.setdefault(id(parameter), []).append(name)
    for name, parameter in named.items():
        group = tied[id(parameter)]
        if is_copy(name):
            kept = tied[id(named[original_name(name)])]
            copies = {original_name(other) for other in group}
            apart = [other for other in kept if other not in copies]
        elif name in tables:
            apart = [other for other in group if tables.get(other) != tables[name]]
        else:
            apart = [other for other in group if other != name] if name in changed else []
        if apart:
            raise ConfigError(
                f"{base_name(name)} is tied to {', '.join(map(base_name, apart))} in the base and was trained"
                " apart from it: no merged model of this class holds both",
                help="export the adapter alone, or train with method.lora.ensure_weight_tying",
            )
    for path, layer in model.named_modules():
        biased = getattr(layer, "lora_bias", None)
        if isinstance(biased, dict) and biased.get(ADAPTER) and layer.get_base_layer().bias is None:
            raise ConfigError(
                f"{path} has no bias that the one of its adapter (method.lora.lora_bias) could be added to",
                help="export the adapter alone",
            )


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
        if module.lora_bias.get(ADAPTER):
            owners.setdefault(f"{prefix}.bias", []).insert(0, (path, module))
    return owners


def _merged_value(
    path: str, layer: Any, fetch: Callable[[str], torch.Tensor], value: torch.Tensor, *, bias: bool
) -> torch.Tensor:
    """Give one layer its adapter's values, let it merge them into ``value``, and take them away again."""
    import torch
    from torch import nn

    own = {name: p for name, p in layer.named_parameters() if is_adapter(name) and "base_layer" not in name}
    for name in own:
        _put(layer, name, nn.Parameter(fetch(f"{path}.{name}"), requires_grad=False))
    # peft's wrapper of a parameter moves the change to the device of the base parameter, which is meta here;
    # DoRA's takes the norm of the base's weight.
    leaf = getattr(layer, "parameter_name", "weight")
    base = layer.get_base_layer()
    on_meta = None if bias else base._parameters.get(leaf)
    if on_meta is not None:
        base.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    try:
        with torch.no_grad():
            if bias:
                merged = value + layer.lora_B[ADAPTER].bias * layer.scaling[ADAPTER]
            elif ADAPTER in layer.lora_variant:
                merged = layer.lora_variant[ADAPTER].merge_safe(layer, ADAPTER, value)
            else:
                merged = value + layer.get_delta_weight(ADAPTER).to(value.dtype)
    finally:
        for name, parameter in own.items():
            _put(layer, name, parameter)
        if on_meta is not None:
            base.register_parameter(leaf, on_meta)
    return merged.to(value.dtype)  # type: ignore[no-any-return]


def _put(module: Any, name: str, parameter: Any) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path).register_parameter(leaf, parameter)
