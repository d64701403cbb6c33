"""Pretrained weights, read from safetensors files a slice at a time.

A key of a checkpoint may be an older name of a parameter, or one of several tensors a parameter is
made of (experts that transformers 5 fuses). Renaming and fusing follow transformers' own mapping
(``transformers/conversion_mapping.py``, 5.23), applied to one parameter at a time.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdptool.errors import ModelError, StorageError
from fsdptool.files.safetensors_writer import open_safetensors
from fsdptool.modeling.methods.lora import saved_keys
from fsdptool.runs.watchdog import beat
from fsdptool.source.weight_files import check_weights

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import ModelChoice


_SHOWN = 3
"""Names of missing parameters a note gives."""


@dataclass(slots=True)
class _Source:
    """Where a parameter comes from: one key, or several through a converter."""

    keys: list[tuple[str, str | None]] = field(default_factory=list)
    converter: Any = None
    target: str = ""


class FolderWeights:
    """The tensors of a folder, by the model's parameter names.

    Args:
        files: safetensors files of one model.
        model: The model (on meta) before any adapter is injected; its own renaming rules apply.
        named: Returns the parameter that each key of the files is, where that needs no rules.

    Raises:
        StorageError: A file cannot be read, is not a safetensors file, or holds a tensor of another one.
    """

    def __init__(
        self,
        files: Iterable[str],
        model: nn.Module,
        named: Callable[[Collection[str]], Mapping[str, str]] | None = None,
    ) -> None:
        self._files: dict[str, Any] = {}
        self._model = model
        where: dict[str, str] = {}
        for name in files:
            for key in self._open(name).keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                if key in where:
                    raise StorageError(
                        f"{Path(name)} and {Path(where[key]).name} both hold the tensor {key}",
                        help="remove the file that does not belong to the model, or save the model again",
                    )
                where[key] = name
        self._where = where
        if named is None:
            self._sources = _match(where, model)
        else:
            self._sources = {name: _Source([(key, None)]) for key, name in named(where).items()}

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError

        if name not in self._files:
            try:
                self._files[name] = open_safetensors(name)
            except (OSError, SafetensorError) as error:
                raise StorageError(
                    f"{Path(name)} cannot be read as safetensors: {error}",
                    help="the file is damaged or incomplete: download it again",
                ) from error
        return self._files[name]

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def rows(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int],
        window: tuple[int, int, int] | None = None,
    ) -> torch.Tensor:
        """Return rows ``[rows[0], rows[1])`` of a parameter in the dtype of the file.

        Args:
            name: The parameter.
            shape: Its whole shape.
            rows: Of dimension 0.
            window: A further dimension, and start and length in it, of which no more is read; or None.

        Raises:
            ModelError: The checkpoint's tensor has another shape.
        """
        source = self._sources[name]
        beat()
        if source.converter is None:
            key = source.keys[0][0]
            file = self._open(self._where[key])
            view = file.get_slice(key)
            _check(name, shape, tuple(view.get_shape()))
            # safetensors 0.8 cannot slice what has no dimensions.
            part: torch.Tensor = view[_slices(rows, window)] if shape else file.get_tensor(key)
            # Slices may be views of the file's map: a parameter must own its memory.
            return part.clone(memory_format=torch.contiguous_format)
        whole = self._convert(name, source)
        _check(name, shape, tuple(whole.shape))
        return (whole[_slices(rows, window)] if shape else whole).clone()

    def _convert(self, name: str, source: _Source) -> torch.Tensor:
        converter = copy.deepcopy(source.converter)
        for key, pattern in source.keys:
            converter.add_tensor(source.target, key, pattern, self._reader(key))
        converted = converter.convert(
            source.target, model=self._model, config=getattr(self._model, "config", None)
        )
        value = converted[name]
        return value[0] if isinstance(value, list) else value  # type: ignore[no-any-return]

    def _reader(self, key: str) -> Any:
        return lambda: self._open(self._where[key]).get_tensor(key)

    def close(self) -> None:
        """Let go of the files (and their memory maps)."""
        self._files.clear()


def _slices(rows: tuple[int, int], window: tuple[int, int, int] | None) -> tuple[slice, ...]:
    first = slice(*rows)
    if window is None:
        return (first,)
    dim, start, length = window
    return (first, *[slice(None)] * (dim - 1), slice(start, start + length))


def _check(name: str, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if tuple(expected) != tuple(shape):
        raise ModelError(
            f"the checkpoint's {name} has shape {list(shape)}, the model's {list(expected)}",
            help="the configuration and the weights belong to different models",
        )


def _match(where: dict[str, str], model: nn.Module) -> dict[str, _Source]:
    names = dict(model.named_parameters(remove_duplicate=False))
    names.update(dict(model.named_buffers(remove_duplicate=False)))  # type: ignore[arg-type]
    exact = {key: _Source([(key, None)]) for key in where if key in names}
    rest = [key for key in where if key not in names]
    if not rest or not hasattr(model, "base_model_prefix"):
        return exact
    return _match_renamed(rest, names, exact, model)


def _match_renamed(
    keys: list[str], names: dict[str, Any], found: dict[str, _Source], model: Any
) -> dict[str, _Source]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    converters = [item for item in mapping if isinstance(item, WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    groups: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for key in sorted(keys, key=_natural):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        groups[target].append((key, pattern))
    for target, members in groups.items():
        pattern = members[0][1]
        converter = by_pattern[pattern] if pattern is not None else None
        targets = [target]
        if converter is not None:
            first = converter.target_patterns[0]
            targets = [target.replace(first, other) for other in converter.target_patterns]
        for name in targets:
            if name in names and name not in found:
                found[name] = _Source(members, converter, target)
    return found


def _natural(key: str) -> list[tuple[int, int | str]]:
    """Sort ``experts.10`` after ``experts.9``: fused experts are stacked in this order."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]


def open_weights(spec: ModelSpec, choice: ModelChoice, model: nn.Module) -> FolderWeights | None:
    """Open the pretrained weights a choice asks for, or return None for random ones.

    Raises:
        ConfigError: Pretrained weights are wanted and there are none, or none that can be read.
        ModelError: The files contain no parameter of this model.
    """
    check_weights(spec, choice)
    if choice.weights == "random" or not spec.weights:
        return None
    weights = FolderWeights(spec.weights, model)
    if not any(name in weights for name, _ in model.named_parameters(remove_duplicate=False)):
        raise ModelError(
            f"the weights of {spec.reference.id} contain no parameter of {spec.model_class}",
            help="name another model class or other files, or set model.weights: random",
        )
    return weights


_PEFT_PREFIX = "base_model.model."


def open_adapter(spec: ModelSpec, choice: ModelChoice, model: nn.Module) -> FolderWeights | None:
    """Open the weights of an adapter that training continues from, or return None where there are none.

    Args:
        spec: Of an adapter, or of a model.
        choice: Where weights come from.
        model: On meta, with the adapter injected.

    Raises:
        StorageError: The file is not a safetensors file.
        ModelError: It does not hold this adapter.
    """
    if spec.adapter_weights is None or choice.weights == "random":
        return None
    own, there = saved_keys(model), dict(model.named_parameters(remove_duplicate=False))

    def named(keys: Collection[str]) -> dict[str, str]:
        plain = {key: key.removeprefix(_PEFT_PREFIX) for key in keys}
        # A table that was adapted is saved with its adapter, under its own name.
        found = {key: own.get(name, name) for key, name in plain.items()}
        filled = {id(there[name]) for name in found.values() if name in there}
        unknown = [key for key, name in found.items() if name not in there]
        missing = [key for key, name in own.items() if id(there[name]) not in filled]
        for keys, what in ((unknown, "has no place for"), (missing, "are missing")):
            if keys:
                shown = ", ".join(keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")
                tensors = f"{len(keys)} tensors {'that it ' if keys is unknown else ''}{what}"
                raise ModelError(
                    f"{spec.adapter_weights} does not fit the adapter that its configuration describes:"
                    f" {tensors}: {shown}",
                    help="load the adapter with the installed peft and save it again, or set model.weights:"
                    " random to train a new one",
                )
        return found

    return FolderWeights([spec.adapter_weights], model, named)


def random_start_notes(
    spec: ModelSpec, choice: ModelChoice, missing: list[str], *, pretrained: bool
) -> tuple[str, ...]:
    """Say which weights start at random although a person may expect trained ones."""
    name, notes = spec.reference.id, list[str]()
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        notes.append(
            f"{len(missing)} parameters are missing from the weights of {name} and start at random: {shown}"
        )
    if not pretrained and choice.weights == "auto" and spec.reference.kind in ("hub", "folder", "adapter"):
        base = f"the base of {name}" if spec.adapter is not None else name
        notes.append(f"{base} has no safetensors weights on this machine: it starts at random")
    if spec.adapter is not None and spec.adapter_weights is None and choice.weights == "auto":
        notes.append(f"{name} has no weights of its own on this machine: training starts with a new adapter")
    return tuple(notes)
