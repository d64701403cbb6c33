"""Which files of a folder hold a model's weights: those that the model's own library loads.

The rules are those of ``from_pretrained`` (transformers 5.23, ``modeling_utils.py``:
``_get_resolved_checkpoint_files``; diffusers 0.42, ``models/modeling_utils.py``). transformers prefers
``model.safetensors`` to its index, diffusers an index to the single file. Pickles are never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.errors import ReferenceError as BadReference
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.recipe import ModelChoice
from fsdptool.source.config_checks import library_source, transformers_model_types
from fsdptool.source.references import read_config

LEFT_OUT = "DET116"
UNREADABLE = "DET117"

_STEMS = {"transformers": ("model",), "diffusers": ("diffusion_pytorch_model",)}
_EITHER = ("model", "diffusion_pytorch_model")
"""For a family whose library is its own, which has no rule that is known here."""

_PICKLES = ("pytorch_model*.bin", "diffusion_pytorch_model*.bin", "*model*.pt", "*.pth", "*.ckpt")
_FORMATS = (
    "*.safetensors",
    *_PICKLES,
    "adapter_model*.bin",
    "*.gguf",
    "tf_model*.h5",
    "flax_model*.msgpack",
    "*.flashpack",
)
_NOT_WEIGHTS = ("rng_state*", "scheduler*", "optimizer*", "scaler*")
"""What the Trainer and accelerate write beside weights, in files of the same kinds."""

_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors\Z")
_NUMBERED = re.compile(r"-\d{5}-of-\d{5}")
_VARIANT = re.compile(r"[\w-]+(\.[\w-]+)*\Z")
_LARGEST_INDEX = 256 * 1024 * 1024
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of a folder.

    Attributes:
        files: Paths of what is read, sorted.
        findings: What is left out (:data:`LEFT_OUT`), or why nothing can be read (:data:`UNREADABLE`).
    """

    files: tuple[str, ...] = ()
    findings: tuple[Diagnostic, ...] = ()


class _UnreadableError(Exception):
    """The weights that the library would load cannot be read."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.message = message
        self.help = help


def find_weights(
    folder: Path,
    library: str,
    config: Mapping[str, Any],
    *,
    variant: str | None = None,
    downloaded: bool = False,
) -> WeightFiles:
    """Return the files that ``library`` loads a model from, and findings about those that it does not.

    Args:
        folder: A model's folder, or a component's in a pipeline.
        library: ``transformers``, ``diffusers``, or a family's own.
        config: Its configuration.
        variant: As ``from_pretrained`` takes it: ``fp16`` reads ``model.fp16.safetensors``.
        downloaded: The folder is a snapshot in the cache of the Hub, which may hold JSON files alone.
    """
    present = sorted(_weights_in(folder))
    try:
        files = _chosen(folder, library, config, variant, present, downloaded)
    except _UnreadableError as error:
        return WeightFiles(findings=(_finding(UNREADABLE, "warning", error.message, error.help, folder),))
    read = {Path(file).name for file in files}
    left = [name for name in present if name not in read]
    if not files or not left:
        return WeightFiles(files)
    message = f"{folder}: {_listed(left)} {_are(left)} not read; the weights are in {_listed(sorted(read))}"
    move = "no action if that is what you mean; otherwise move the files that you want into another folder"
    return WeightFiles(files, (_finding(LEFT_OUT, "info", message, move, folder),))


def check_weights(spec: ModelSpec, choice: ModelChoice) -> None:
    """Refuse to train on a model whose pretrained weights exist, or must, and cannot be read.

    Raises:
        ConfigError: There are none although they are wanted, or the finding of :func:`find_weights` says why.
    """
    if choice.weights == "random" or spec.weights:
        return
    for finding in spec.diagnostics:
        if finding.code == UNREADABLE:
            raise ConfigError(finding.message, help=finding.help)
    if choice.weights == "pretrained":
        raise ConfigError(
            f"{spec.reference.id} has no safetensors weights on this machine",
            help="download it first, or set model.weights: random",
        )


def weights_left_out(spec: ModelSpec, choice: ModelChoice) -> tuple[str, ...]:
    """Say which files beside those that are read a run leaves out."""
    if choice.weights == "random":
        return ()
    return tuple(finding.message for finding in spec.diagnostics if finding.code == LEFT_OUT)


def _finding(code: str, severity: Any, message: str, help: str, folder: Path) -> Diagnostic:
    return Diagnostic(code=code, severity=severity, message=message, help=help, path=str(folder))


def _weights_in(folder: Path) -> Iterator[str]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:  # its files may be read all the same, by their names
        return
    for name in names:
        if any(fnmatch(name, form) for form in _FORMATS) and not any(fnmatch(name, x) for x in _NOT_WEIGHTS):
            yield name


def _chosen(
    folder: Path,
    library: str,
    config: Mapping[str, Any],
    variant: str | None,
    present: Sequence[str],
    downloaded: bool,
) -> tuple[str, ...]:
    """Raise :class:`_UnreadableError` where the library finds nothing to load, and there are weights."""
    if variant is not None and not _VARIANT.match(variant):
        raise _UnreadableError(
            f"{variant!r} is not the name of a variant of weights", "give a name such as fp16"
        )
    if library == "transformers":
        if any(_DISTRIBUTED.match(name) for name in present):
            raise _UnreadableError(
                f"{folder} holds a distributed checkpoint of transformers (shard-*.safetensors)",
                "load it with from_pretrained and save it with save_pretrained into another folder",
            )
        named = config.get("transformers_weights")
        if isinstance(named, str):
            return _named(folder, named)
    stems = _STEMS.get(library, _EITHER)
    for stem in stems:
        single, index = _with_variant(f"{stem}.safetensors", variant), f"{stem}.safetensors.index.json"
        indexes = [_with_variant(index, variant)]
        if library == "diffusers" and variant is not None:
            indexes.append(f"{stem}.safetensors.{variant}.index.json")  # before diffusers 0.30
        order = [*indexes, single] if library == "diffusers" else [single, *indexes]
        for name in order:
            if _there(folder / name):
                return _read_by_name(folder, name, config, library, downloaded)
    own = [name for name in present if name.endswith(".safetensors")]
    if library not in _STEMS and variant is None and len(own) == 1:
        return (str(_regular(folder / own[0])),)
    if present or variant is not None:
        raise _nothing(folder, stems, variant, present)
    return ()


def _named(folder: Path, name: str) -> tuple[str, ...]:
    """Return what ``transformers_weights`` of a configuration names."""
    if not name.endswith((".safetensors", ".safetensors.index.json")) or not _inside(name):
        raise _UnreadableError(
            f"{folder}: transformers_weights names {name!r}, which is not a safetensors file of the folder",
            "correct it in config.json",
        )
    return _read_by_name(folder, name, {}, "transformers", downloaded=False)


def _read_by_name(
    folder: Path, name: str, config: Mapping[str, Any], library: str, downloaded: bool
) -> tuple[str, ...]:
    if name.endswith(".json"):
        files = _shards(folder, name, downloaded)
    else:
        files = (str(_regular(folder / name)),)
    if library == "transformers" and files:
        further = [folder / extra for extra in _extra_files(config) if _there(folder / extra)]
        files += tuple(str(_regular(path)) for path in further if str(path) not in files)
    return files


def _shards(folder: Path, index: str, downloaded: bool) -> tuple[str, ...]:
    """Return the files that an index names; none of a model of which only the JSON files were downloaded."""
    try:
        table = read_config(_regular(folder / index), largest=_LARGEST_INDEX)[0].get("weight_map")
    except BadReference as error:
        raise _UnreadableError(error.message, error.help or "repair the file") from None
    names = set(table.values()) if isinstance(table, Mapping) and _all_text(table.values()) else set()
    if not names:
        raise _UnreadableError(
            f"{folder / index} has no weight_map from tensors to files", "download it again"
        )
    for name in sorted(names):
        if not _inside(name):
            raise _UnreadableError(
                f"{folder / index} names {name!r}, which is outside of its folder",
                "correct it, or download the model again from a source that you trust",
            )
    missing = sorted(name for name in names if not _there(folder / name))
    if missing and downloaded and len(missing) == len(names):
        return ()
    if missing:
        raise _UnreadableError(
            f"{folder / index} names {len(names)} files, of which {len(missing)} {_are(missing)} missing:"
            f" {_listed(missing)}",
            "complete the download, or set model.weights: random",
        )
    return tuple(sorted(str(_regular(folder / name)) for name in names))


def _all_text(values: Any) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def _there(path: Path) -> bool:
    """Say whether there is an entry of this name, of whatever kind."""
    try:
        return path.is_symlink() or path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _regular(path: Path) -> Path:
    """Return the path of a regular file: opening a FIFO would wait for ever."""
    try:
        regular = S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise _UnreadableError(
            f"{path} cannot be read: {error.strerror or error}", "download it again"
        ) from None
    if not regular:
        raise _UnreadableError(f"{path} is not a regular file", "replace it by the model's file")
    return path


def _with_variant(name: str, variant: str | None) -> str:
    stem, _, suffix = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def _extra_files(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the further files that a configuration class of transformers lists (5.23, ``extra_files``)."""
    kind = config.get("model_type")
    if kind not in transformers_model_types():
        return ()
    text = library_source("transformers", f"models/{kind}/configuration_{kind}.py")
    listed = re.search(r"^    extra_files\b[^=\n]*= *\(([^)]*)\)", text, flags=re.MULTILINE)
    return tuple(re.findall(r'"([\w.-]+)"', listed[1])) if listed else ()


def _nothing(
    folder: Path, stems: Sequence[str], variant: str | None, present: Sequence[str]
) -> _UnreadableError:
    """Say why none of the weights in a folder is read, and what would have it read."""
    wanted = _with_variant(f"{stems[0]}.safetensors", variant)
    if variant is not None:
        return _UnreadableError(
            f"{folder} has no weights of the variant {variant} ({wanted} or its index)",
            "correct model.variant, or leave it out",
        )
    variants = sorted(set(filter(None, (_variant_of(name, stems) for name in present))))
    if variants:
        return _UnreadableError(
            f"{folder} has weights of the {'variant' if len(variants) == 1 else 'variants'}"
            f" {_listed(variants)} only, and no {wanted}",
            f"set model.variant: {variants[0]}",
        )
    pickles = [name for name in present if any(fnmatch(name, form) for form in _PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in present):
        return _UnreadableError(
            f"{folder} has its weights in {_listed(pickles)}: pickles can run code and are not read",
            "if you trust them, load them once with from_pretrained and write safetensors with"
            " save_pretrained; or set model.weights: random",
        )
    numbered = [name for name in present if name.startswith(f"{stems[0]}-") and _NUMBERED.search(name)]
    lacks = f"{wanted}.index.json" if numbered else f"{wanted} or its index"
    return _UnreadableError(
        f"{folder} has no {lacks}; {_listed(present)} {_are(present)} not what the library loads",
        "complete the download, or save the model with save_pretrained; or set model.weights: random",
    )


def _variant_of(name: str, stems: Sequence[str]) -> str | None:
    """Return the variant in the name of a safetensors file: ``fp16`` in ``model.fp16-00001-of-00002``."""
    for stem in stems:
        if name.startswith(f"{stem}.") and name.endswith(".safetensors"):
            return _NUMBERED.sub("", name[len(stem) + 1 : -len(".safetensors")]) or None
    return None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
