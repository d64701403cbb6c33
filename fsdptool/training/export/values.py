"""The trained model's tensors one at a time, in the names and forms of its library's own checkpoints.

A tensor comes from the checkpoint, or from where it began. transformers 5 fuses experts and renames
modules when it loads; ``save_pretrained`` reverts that (``core_model_loading.revert_weight_conversion``,
5.23) on the whole state dict. Here it is applied to one module at a time, with the shapes found on meta
first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdptool.distributed.initialisation import Blueprint, model_blueprint, replay
from fsdptool.distributed.weights import open_weights
from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.safetensors_writer import Entry, open_safetensors
from fsdptool.modeling.methods.lora import base_name
from fsdptool.modeling.methods.quantised_formats import Format, decode, encode
from fsdptool.runs.folder import CHECKPOINTS
from fsdptool.runs.manifest import Manifest, check_checkpoint, newest_good, read_manifest, tensor_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdptool.runs.folder import RunInputs


Fetch = Callable[[str], "torch.Tensor"]


def original_entries(
    model: nn.Module, like: Mapping[str, torch.Tensor], fetch: Fetch, dtype: torch.dtype | None
) -> list[Entry]:
    """Return the entries of a transformers checkpoint.

    Args:
        model: On meta.
        like: Meta tensors by the names in ``model``, in order.
        fetch: Returns a tensor's value by that name.
        dtype: Convert floating tensors to this; None keeps each.
    """
    from transformers.core_model_loading import revert_weight_conversion

    def revert(part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(revert_weight_conversion(model, dict(part)))

    whole = revert(like)
    groups = _by_module(like)
    reverted = [revert({name: like[name] for name in group}) for group in groups]
    original = {name: tensor for part in reverted for name, tensor in part.items()}
    if _shapes(original) != _shapes(whole):
        # A conversion reaches across modules: give it everything at once.
        groups, reverted = [list(like)], [whole]
    entries = []
    for group, part in zip(groups, reverted, strict=True):
        batch = _Batch(group, revert, fetch, dtype)
        for name, tensor in part.items():
            entries.append(
                Entry(name, cast(tensor.dtype, dtype), tuple(tensor.shape), partial(batch.get, name))
            )
    return entries


def plain_entries(like: Mapping[str, torch.Tensor], fetch: Fetch, dtype: torch.dtype | None) -> list[Entry]:
    """Return entries under the model's own names."""

    def value(name: str) -> torch.Tensor:
        tensor = fetch(name)
        return tensor.to(cast(tensor.dtype, dtype))

    return [
        Entry(name, cast(tensor.dtype, dtype), tuple(tensor.shape), partial(value, name))
        for name, tensor in like.items()
    ]


def cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype a tensor is written in."""
    return wanted if wanted is not None and own.is_floating_point else own


@dataclass(slots=True)
class _Batch:
    """The reverted tensors of one module, made when the first is asked for and dropped with the last."""

    names: list[str]
    revert: Callable[[Mapping[str, Any]], dict[str, Any]]
    fetch: Fetch
    dtype: torch.dtype | None
    made: dict[str, Any] | None = None

    def get(self, name: str) -> torch.Tensor:
        if self.made is None:
            self.made = self.revert({source: self.fetch(source) for source in self.names})
        value: torch.Tensor = self.made.pop(name)
        if not self.made:
            self.made = None
        return value.to(cast(value.dtype, self.dtype))


def _by_module(like: Mapping[str, Any]) -> list[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in like:
        groups[name.rpartition(".")[0]].append(name)
    return list(groups.values())


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class Saved:
    """The tensors of one checkpoint, put together from its shards on demand.

    Args:
        folder: A checkpoint whose files were checked against its manifest.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._parts: dict[str, list[tuple[Any, str, list[int]]]] = {}
        for name in sorted(manifest.files):
            stream: Any = open_safetensors(folder / name)
            offsets = json.loads((stream.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for key in stream.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                where = offsets.get(key, {}).get("saved_offsets")
                self._parts.setdefault(tensor_name(key), []).append((stream, key, where))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def names(self, prefix: str) -> Iterator[str]:
        """Yield what follows ``prefix`` in the names that begin with it."""
        return (name.removeprefix(prefix) for name in self._parts if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one whole tensor."""
        chunks = [(stream.get_slice(key).get_shape(), where) for stream, key, where in self._parts[name]]
        dimensions = range(len(chunks[0][0]))
        return tuple(max(size[d] + (where[d] if where else 0) for size, where in chunks) for d in dimensions)

    def get(self, name: str) -> torch.Tensor:
        """Return one whole tensor."""
        parts = self._parts[name]
        if len(parts) == 1 and not any(parts[0][2] or ()):
            return parts[0][0].get_tensor(parts[0][1])  # type: ignore[no-any-return]
        chunks = [(stream.get_tensor(key), where) for stream, key, where in parts]
        shape = [max(w[d] + c.shape[d] for c, w in chunks) for d in range(chunks[0][0].dim())]
        whole = torch.empty(shape, dtype=chunks[0][0].dtype)
        for chunk, where in chunks:
            window = tuple(slice(start, start + size) for start, size in zip(where, chunk.shape, strict=True))
            whole[window] = chunk
        return whole


def check_suits(saved: Saved, model: nn.Module) -> None:
    """Refuse a checkpoint of another model; what it lacks would be exported as it was before training.

    Args:
        saved: The checkpoint.
        model: As it was trained, on meta.

    Raises:
        ConfigError: A trained parameter is missing, or a tensor has another name or shape.
    """
    known: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))
    for name in saved.names("model/"):
        shape, like = saved.shape(f"model/{name}"), known.get(name)
        if like is None or tuple(like.shape) != shape:
            what = "does not have" if like is None else f"has as {tuple(like.shape)}"
            raise ConfigError(
                f"the checkpoint is of another model: it holds {name} {shape}, which this one {what}",
                help="export the run that wrote it",
            )
    there = {id(known[name]) for name in saved.names("model/")}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in there:
            raise ConfigError(
                f"the checkpoint is of another model: it lacks {name}", help="export the run that wrote it"
            )


def open_saved(run: Path, checkpoint: str | None) -> tuple[Saved, Manifest, Path]:
    """Open a run's newest good checkpoint, or the one named.

    Raises:
        ConfigError: There is none, or the named one is damaged.
        StorageError: It cannot be opened; a run that still trains may just have removed it.
    """
    if checkpoint is None:
        newest = newest_good(run / CHECKPOINTS)
        if newest is None:
            raise ConfigError(f"{run} has no complete checkpoint", help="train it, or resume it, first")
        path, manifest = newest
    else:
        path = Path(checkpoint)
        manifest = read_manifest(path)
        if reason := check_checkpoint(path, manifest):
            raise ConfigError(f"checkpoint {path} is damaged: {reason}", help="export another one")
    try:
        return Saved(path, manifest), manifest, path
    except OSError as error:
        raise StorageError(
            f"checkpoint {path} cannot be opened: {error}",
            help="a running job removes old checkpoints: export again, or export another one",
        ) from error


class Values:
    """Every tensor of the trained model by its name in ``model``.

    Trained parameters come from the checkpoint; frozen ones, which checkpoints leave out, from the
    pretrained weights or from the seed they were drawn with.

    Args:
        inputs: The run.
        model: As it was trained (adapters injected), on meta.
        base: The same before any adapter was injected, on meta.
        saved: The checkpoint.
        average: Take the moving average where there is one.
        held: Base weights that were trained on in a quantised format: they come rounded to it, so that
            a merged model computes what was trained.
    """

    def __init__(
        self,
        inputs: RunInputs,
        model: nn.Module,
        base: nn.Module,
        saved: Saved,
        *,
        average: bool,
        held: Mapping[str, Format] | None = None,
    ) -> None:
        self._inputs = inputs
        self._saved = saved
        self._average = average
        self._held = held or {}
        self._weights = open_weights(inputs.spec, inputs.recipe.model, base)
        self._drawn: Blueprint | None = None
        self._base = base
        self.model = model

    def get(self, name: str, *aliases: str) -> torch.Tensor:
        """Return one whole tensor in the dtype it is stored in.

        Raises:
            ConfigError: It is neither in the checkpoint nor can it be made again.
        """
        names = (name, *aliases)
        for prefix in ("ema/", "model/") if self._average else ("model/",):
            for candidate in names:
                if prefix + candidate in self._saved:
                    return self._saved.get(prefix + candidate)
        return self._rounded([base_name(candidate) for candidate in names])

    def _rounded(self, names: list[str]) -> torch.Tensor:
        value = self._begin(names)
        stored = self._held.get(names[0])
        return value if stored is None else decode(stored, *encode(stored, value), value.dtype)

    def _begin(self, names: list[str]) -> torch.Tensor:
        like = self._like(names)
        total = like.shape[0] if like.dim() else 1
        if self._weights is not None:
            for name in names:
                if name in self._weights:
                    return self._weights.rows(name, tuple(like.shape), (0, total)).to(like.dtype)
        blueprint = self._blueprint()
        for name in names:
            if blueprint.notes.get(name) or name in blueprint.values:
                return replay(
                    blueprint,
                    name,
                    like.shape,
                    (0, total),
                    dtype=like.dtype,
                    seed=self._inputs.recipe.seed,
                    key=min(names),
                )
            if name in blueprint.buffers:
                return blueprint.buffers[name].detach()
        raise ConfigError(f"{names[0]} is not in the checkpoint", help="export another checkpoint")

    def _like(self, names: list[str]) -> torch.Tensor:
        known = dict(self._base.named_parameters(remove_duplicate=False))
        buffers = dict(self._base.named_buffers(remove_duplicate=False))
        for name in names:
            if name in known:
                return known[name]
            if name in buffers:
                return buffers[name]
        raise ConfigError(f"{names[0]} is not a tensor of the model")

    def _blueprint(self) -> Blueprint:
        if self._drawn is None:
            recipe = self._inputs.recipe
            self._drawn = model_blueprint(self._inputs.spec, recipe.model, seed=recipe.seed)
        return self._drawn
