"""``export_run``: a folder that ``from_pretrained`` loads, from a run's checkpoint. Needs no GPU.

Tensors are read one at a time, from the checkpoint or from where they began, and get the names and forms of
their library's own checkpoints. transformers 5 fuses experts and renames modules when it loads;
``save_pretrained`` reverts that (``core_model_loading.revert_weight_conversion``, 5.23) on the whole state
dict. Here it is applied to one module at a time, with the shapes found on meta first.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fsdptool.distributed.initialisation import Blueprint, model_blueprint, replay
from fsdptool.distributed.weights import open_weights
from fsdptool.errors import ConfigError, FsdptoolError, StorageError
from fsdptool.files.safetensors_writer import TensorEntry, open_safetensors
from fsdptool.modeling.methods import method_of
from fsdptool.modeling.methods.lora import base_name
from fsdptool.modeling.methods.quantised_formats import Format, decode, encode
from fsdptool.records.diagnostic import tool_version
from fsdptool.runs.folder import CHECKPOINTS, EXPORT, write_json
from fsdptool.runs.manifest import (
    Manifest,
    check_checkpoint,
    newest_good,
    publish,
    read_manifest,
    tensor_name,
)
from fsdptool.training.export.adapters import SHARD_BYTES

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.runs.folder import RunInputs


Fetch = Callable[[str], torch.Tensor]


def original_entries(
    model: nn.Module, like: Mapping[str, torch.Tensor], fetch: Fetch, dtype: torch.dtype | None
) -> list[TensorEntry]:
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
                TensorEntry(name, cast(tensor.dtype, dtype), tuple(tensor.shape), partial(batch.get, name))
            )
    return entries


def plain_entries(
    like: Mapping[str, torch.Tensor], fetch: Fetch, dtype: torch.dtype | None
) -> list[TensorEntry]:
    """Return entries under the model's own names."""

    def value(name: str) -> torch.Tensor:
        tensor = fetch(name)
        return tensor.to(cast(tensor.dtype, dtype))

    return [
        TensorEntry(name, cast(tensor.dtype, dtype), tuple(tensor.shape), partial(value, name))
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
        advice = "leave the checkpoint out: the newest complete one of the run is taken"
        manifest = read_manifest(path, otherwise=advice)
        if reason := check_checkpoint(path, manifest):
            raise ConfigError(f"checkpoint {path} is damaged: {reason}", help="export another one")
    try:
        return Saved(path, manifest), manifest, path
    except OSError as error:
        raise StorageError(
            f"checkpoint {path} cannot be opened: {error}",
            help="a running job removes old checkpoints: export again, or export another one",
        ) from error


class ExportedTensors:
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


MARK = "fsdptool-export.json"
"""Says where an export came from; ``force`` replaces nothing without it."""

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export left.

    Attributes:
        folder: Where.
        kind: ``transformers``, ``diffusers``, ``adapter`` or the library's name.
        step: The checkpoint's step.
        checkpoint: Its folder.
        files: Names of the files, relative to ``folder``.
        bytes: Their total size.
        notes: What is missing, one line each.
    """

    folder: Path
    kind: str
    step: int
    checkpoint: Path
    files: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...] = ()


def export_run(
    run: Path,
    output: Path | None = None,
    *,
    checkpoint: str | None = None,
    merge: bool = False,
    average: bool = False,
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    trust_remote_code: bool = False,
) -> Exported:
    """Write the trained model of a run so that its own library loads it.

    Tensors are put together and written one module at a time, so host memory stays near the largest.

    Args:
        run: The run folder.
        output: Where to; None is ``RUN/export``.
        checkpoint: Checkpoint folder; None takes the newest good one.
        merge: LoRA: merge the adapters into the base instead of writing them alone.
        average: Write the moving average of the weights, where the run kept one.
        dtype: Convert floating tensors to this; None keeps what was trained.
        shard_bytes: Largest size of one file.
        force: Replace an older export (or fill an empty folder); anything else is left alone.
        trust_remote_code: Whether the model's own code may run.

    Raises:
        ConfigError: There is no usable checkpoint, or the options do not suit the run.
        StorageError: The folder exists and may not be replaced, or it cannot be written; nothing
            half-written stays.
    """
    from fsdptool.runs.folder import read_inputs

    target = output or run / EXPORT
    _check_target(target, force=force)
    inputs = read_inputs(run, trust_remote_code=trust_remote_code)
    adapters = method_of(inputs.recipe).adds_parameters
    if merge and not adapters:
        raise ConfigError(
            "merge applies to LoRA runs, and this run trained the weights themselves", help="leave merge out"
        )
    saved, manifest, path = open_saved(run, checkpoint)
    if average and not any(True for _ in saved.names("ema/")):
        raise ConfigError("the run did not keep a moving average of its weights", help="leave ema out")
    # A name of nobody else's: what lies beside the target is not ours to remove.
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        kind, notes = _Export(inputs, saved, average, dtype, shard_bytes).write(
            aside, separate=adapters and not merge
        )
        mark = {
            "tool_version": tool_version(),
            "kind": kind,
            "run": run.absolute().name,
            "step": manifest.step,
        }
        write_json(aside / MARK, mark)
        publish(aside, target)
    except OSError as error:
        raise StorageError(
            f"{target} cannot be written: {error.strerror or error}",
            help="free space or choose another output folder",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    files = sorted(item for item in target.rglob("*") if item.is_file())
    return Exported(
        folder=target,
        kind=kind,
        step=manifest.step,
        checkpoint=path,
        files=tuple(str(item.relative_to(target)) for item in files),
        bytes=sum(item.stat().st_size for item in files),
        notes=tuple(notes),
    )


def _check_target(target: Path, *, force: bool) -> None:
    """Refuse to replace what is not ours to replace."""
    if target.is_symlink():
        raise StorageError(
            f"{target} is a link", help="give the folder that it names, or another output folder"
        )
    if not target.exists():
        return
    if not force:
        raise StorageError(
            f"{target} already exists", help="set force to replace it, or give another output folder"
        )
    if not target.is_dir() or (any(target.iterdir()) and not (target / MARK).exists()):
        raise StorageError(
            f"{target} is not an fsdptool export ({MARK} is missing) and is not replaced",
            help="give another output folder, or remove this one yourself",
        )


def _home_of(pipeline: Path) -> Path:
    """Return the folder that all of a pipeline's files are in: its own, or the Hub's cache of its repository.

    The cache's snapshots are links to ``blobs`` beside them (huggingface_hub 1.0, file_download.py).
    """
    pipeline = pipeline.resolve()
    return pipeline.parent.parent if pipeline.parent.name == "snapshots" else pipeline


def _copy_folder(source: Path, target: Path, home: Path) -> None:
    target.mkdir()
    for item in sorted(source.iterdir()):
        if item.is_dir() and not item.is_symlink():
            _copy_folder(item, target / item.name, home)
        else:
            _copy_file(item, target / item.name, home)


def _copy_file(source: Path, target: Path, home: Path) -> None:
    """Copy a regular file of the pipeline's; a link that leads elsewhere would export somebody's secrets."""
    if not source.resolve().is_relative_to(home) or not source.is_file():
        raise ConfigError(
            f"{source} is not a file of the pipeline {home}",
            help="remove it, or replace the link by its file",
        )
    shutil.copy2(source, target)


class _Export:
    def __init__(
        self, inputs: RunInputs, saved: Any, average: bool, dtype: Dtype | None, shard_bytes: int
    ) -> None:
        from fsdptool.families.registry import family_of
        from fsdptool.inspection.build import build

        choice = inputs.recipe.model
        self.inputs = inputs
        self.family = family_of(inputs.spec)
        self.base = build(inputs.spec, dtype=choice.dtype, attention=choice.attention)
        self.trained = build(inputs.spec, dtype=choice.dtype, attention=choice.attention)
        method = method_of(inputs.recipe)
        recipe = method.unquantised(inputs.recipe)
        method.prepare(self.trained, recipe, self.family, inputs.spec.config)
        check_suits(saved, self.trained)
        quantised = method.quantised_weights(self.trained, inputs.recipe)
        self.values = ExportedTensors(inputs, self.trained, self.base, saved, average=average, held=quantised)
        self.dtype = dtype
        self.shard_bytes = shard_bytes

    def write(self, folder: Path, *, separate: bool) -> tuple[str, list[str]]:
        from fsdptool.training.export.adapters import write_adapters

        if separate:
            write_adapters(folder, self.inputs, self.family, self.trained, self.fetch)
            return "adapter", [*self.write_tokenizer(folder), *self.base_notes()]
        if self.inputs.spec.library == "diffusers":
            return "diffusers", self.write_diffusers(folder)
        return self.inputs.spec.library, self.write_model(folder)

    def base_notes(self) -> list[str]:
        """Say so where nobody can load the base that the adapters were trained on."""
        spec, choice = self.inputs.spec, self.inputs.recipe.model
        if choice.weights != "random" and (spec.weights or spec.reference.kind == "hub"):
            return []
        return [
            f"the adapters were trained on random weights of {spec.reference.id}, which peft cannot load: "
            "export the whole model instead (--merge, or merge=True in Python)"
        ]

    def fetch(self, name: str) -> torch.Tensor:
        return self.values.get(name, *self._aliases().get(name, ()))

    def _aliases(self) -> dict[str, list[str]]:
        groups: dict[int, list[str]] = {}
        for name, parameter in self.trained.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        return {name: group for group in groups.values() if len(group) > 1 for name in group}

    def torch_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.dtype) if self.dtype else None

    def base_fetch(self) -> Any:
        if not method_of(self.inputs.recipe).adds_parameters:
            return self.fetch
        from fsdptool.training.export.adapters import merged_fetch

        return merged_fetch(self.trained, self.fetch)

    def like(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint of the base model holds: parameters once, and persistent buffers."""
        tensors: dict[str, torch.Tensor] = dict(self.base.named_parameters())
        state = self.base.state_dict()
        tensors |= {name: state[name] for name, _ in self.base.named_buffers() if name in state}
        return {name: tensor.to("meta") for name, tensor in tensors.items()}

    def write_model(self, folder: Path) -> list[str]:
        from fsdptool.training.export.adapters import write_shards

        like, fetch = self.like(), self.base_fetch()
        if hasattr(self.base, "base_model_prefix"):
            entries = original_entries(self.base, like, fetch, self.torch_dtype())
        else:
            entries = plain_entries(like, fetch, self.torch_dtype())
        write_shards(folder, "model", entries, limit=self.shard_bytes)
        self.write_config(folder)
        return self.write_tokenizer(folder)

    def write_config(self, folder: Path) -> None:
        config = getattr(self.base, "config", None)
        if config is None or not hasattr(config, "save_pretrained"):
            write_json(folder / "config.json", dict(self.inputs.spec.config))
            return
        config.architectures = [type(self.base).__name__]
        config.dtype = self.dtype or self.inputs.recipe.model.dtype
        config.save_pretrained(str(folder))
        generation = getattr(self.base, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(folder))

    def write_diffusers(self, folder: Path) -> list[str]:
        from fsdptool.training.export.adapters import write_shards

        component = self._pipeline(folder)
        target = folder / component if component else folder
        target.mkdir(exist_ok=True)
        entries = plain_entries(self.like(), self.base_fetch(), self.torch_dtype())
        write_shards(target, "diffusion_pytorch_model", entries, limit=self.shard_bytes)
        model: Any = self.base
        model.save_config(str(target))
        if component:
            return []
        return ["the other components of the pipeline are not available: only the denoiser was exported"]

    def _pipeline(self, folder: Path) -> str | None:
        """Copy the rest of the pipeline the model came from; returns the folder name of its component."""
        spec = self.inputs.spec
        root = Path(spec.folder) if spec.folder else None
        if root is None or spec.component is None:
            return None
        if Path(spec.component).name != spec.component or spec.component == "..":
            raise ConfigError(f"component {spec.component!r} is not the name of a folder")
        root = root if (root / "model_index.json").exists() else root.parent
        if not (root / "model_index.json").exists():
            return None
        _copy_file(root / "model_index.json", folder / "model_index.json", _home_of(root))
        for item in sorted(root.iterdir()):
            if item.is_dir() and item.name != spec.component and not item.name.startswith("."):
                _copy_folder(item, folder / item.name, _home_of(root))
        return spec.component

    def write_tokenizer(self, folder: Path) -> list[str]:
        from fsdptool.training.data.tokenizer import load_tokenizer

        if self.inputs.spec.library != "transformers":
            return []
        try:
            load_tokenizer(self.inputs.recipe.data, self.inputs.spec).save(folder)
        except FsdptoolError as error:
            if self.inputs.recipe.data.source == "synthetic":
                return [f"no tokenizer was written: {error.message}"]
            raise
        return []
