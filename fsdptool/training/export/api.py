"""``export_run``: a folder that ``from_pretrained`` loads, from a run's checkpoint. Needs no GPU."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdptool.errors import ConfigError, FsdptoolError, StorageError
from fsdptool.modeling.methods import method_of
from fsdptool.records.diagnostic import tool_version
from fsdptool.runs.folder import EXPORT, write_json
from fsdptool.runs.manifest import publish
from fsdptool.training.export.adapters import SHARD_BYTES

if TYPE_CHECKING:
    import torch

    from fsdptool.runs.folder import RunInputs

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
    from fsdptool.training.export.values import open_saved

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
        from fsdptool.training.export.values import Values, check_suits

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
        self.values = Values(inputs, self.trained, self.base, saved, average=average, held=quantised)
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
        import torch

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
        from fsdptool.training.export.values import original_entries, plain_entries

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
        from fsdptool.training.export.values import plain_entries

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
