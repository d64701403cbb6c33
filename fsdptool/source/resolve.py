"""Resolves references. Reads names, JSON files and directory listings; imports no model library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from fsdptool.errors import ConfigError, ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.families.protocol import Family
from fsdptool.families.registry import load_registry
from fsdptool.files.text import exists, reachable
from fsdptool.formatting import by_size
from fsdptool.records.anatomy import ModelSpec, Reference, ReferenceKind
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.recipe import ModelChoice
from fsdptool.source.adapters import read_adapter
from fsdptool.source.config_checks import (
    check_known,
    check_quantization,
    check_sizes,
    diffusers_classes,
    transformers_model_types,
)
from fsdptool.source.hub import HubFiles, UnreachableError, fetch_code, hint_for, looks_like_id
from fsdptool.source.known_models import family_of_name
from fsdptool.source.references import (
    CATALOGUE,
    CLASS_MISMATCH,
    components,
    expanded,
    import_spec,
    is_import,
    locate,
    pick,
    read_config,
    refuse_pages,
    short,
)
from fsdptool.source.weight_files import WeightFiles, find_weights
from fsdptool.spelling import nearest

_DEEPEST = 4
"""Adapters of adapters that are followed."""
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_CONFIG, _INDEX, _ADAPTER = "config.json", "model_index.json", "adapter_config.json"


class _CircleError(Exception):
    """Adapters refer to one another in a circle; the message is the path at which it was noticed."""


class _Files(Protocol):
    """Where the JSON files of a reference come from: a folder or the Hub."""

    def find(self, name: str) -> Path | None: ...


class _Folder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.is_file() else None


class _Hub:
    def __init__(self, files: HubFiles) -> None:
        self.files = files

    def find(self, name: str) -> Path | None:
        return self.files.fetch(name)


def resolve(
    text: str,
    *,
    revision: str | None = None,
    component: str | None = None,
    variant: str | None = None,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    catalogue: bool = False,
) -> ModelSpec:
    """Resolve a reference to everything needed to build the model.

    Args:
        text: ``family:flavour``, a path (folder, ``config.json``, pipeline or adapter folder), a
            Hugging Face id, or ``package.module:Class`` on the Python path. An existing path wins, then a
            registered family, then a module, then the Hub.
        revision: Branch, tag or commit of a Hub id.
        component: Pipeline component to take instead of the denoiser.
        variant: Variant of the weights to take (``fp16``), as ``from_pretrained`` does.
        trust_remote_code: Whether code that the reference contains or names may run when the model is built.
        overrides: Configuration values that replace those read (nested mappings are merged).
        catalogue: Whether a Hub id whose configuration is out of reach stands for the size of the catalogue
            that has its name. What needs weights must not ask for it.

    Raises:
        ReferenceError: The reference cannot be resolved; the message says what and what next.
        ModelError: Its configuration has sizes no model can have.
    """
    text = text.strip()
    if not text:
        raise ReferenceError(
            "the reference is empty", help="give family:flavour, a path or a Hugging Face id"
        )
    options = _Options(revision, component, trust_remote_code, variant, catalogue=catalogue)
    refuse_pages(text)
    path = expanded(text)
    if exists(path) or text.startswith(("./", "../", "/", "~")):
        try:
            spec = _from_path(text, path, options)
        except OSError as error:
            raise ReferenceError(
                f"{text} cannot be read: {error.strerror or error}", help="check the path and its permissions"
            ) from error
    elif ":" in text:
        spec = _from_flavour(text, options)
    else:
        spec = _from_hub(text, options)
    spec = replace(spec, diagnostics=(*options.findings, *spec.diagnostics))
    return _checked(spec, overrides or {})


def resolve_choice(choice: ModelChoice, folder: Path | None = None, *, catalogue: bool = False) -> ModelSpec:
    """Resolve a recipe's model or teacher.

    Args:
        choice: What the recipe, a plan or a saved run says of the model.
        folder: Where a relative path is looked up first, usually the recipe's folder; see
            :func:`~fsdptool.source.references.locate`.
        catalogue: As for :func:`resolve`.

    Raises:
        ReferenceError: The reference cannot be resolved; the message says what and what next.
        ModelError: Its configuration has sizes no model can have.
    """
    return resolve(
        locate(choice.reference, folder),
        revision=choice.revision,
        component=choice.component,
        variant=choice.variant,
        trust_remote_code=choice.trust_remote_code,
        overrides=choice.overrides,
        catalogue=catalogue,
    )


@dataclass(slots=True)
class _Options:
    revision: str | None
    component: str | None
    trust: bool
    variant: str | None = None
    depth: int = 0
    """How many adapters led here: an adapter of an adapter of itself must end."""
    catalogue: bool = False
    findings: list[Diagnostic] = field(default_factory=list)
    """About the files that were read on the way."""

    def read(self, path: Path) -> Mapping[str, Any]:
        data, findings = read_config(path)
        self.findings += findings
        return data


def _from_flavour(text: str, options: _Options) -> ModelSpec:
    name, _, flavour_name = text.partition(":")
    registry = load_registry()
    if name not in registry and is_import(text):
        if options.revision is not None or options.component is not None:
            raise ReferenceError(
                f"{text} is code on the Python path",
                help="--revision and --component apply to published models",
            )
        return import_spec(text, trust_remote_code=options.trust)
    if options.revision is not None:
        raise ReferenceError(
            f"{text} is a registered flavour and has no revisions",
            help="--revision applies to Hugging Face ids only",
        )
    family = registry.get(name)
    flavour = registry.flavour(name, flavour_name)
    if options.component is not None and options.component != flavour.component:
        have = f"only {flavour.component}" if flavour.component else "no components"
        raise ReferenceError(f"{text} has {have}", help="omit --component, or use a pipeline folder")
    return ModelSpec(
        reference=Reference("flavour", text),
        family=family.name,
        flavour=flavour.name,
        library=family.library,
        model_class=flavour.model_class,
        config=dict(flavour.config),
        objective=family.objective_for(flavour.config),
        component=flavour.component,
        trust_remote_code=options.trust,
    )


def _from_path(text: str, path: Path, options: _Options) -> ModelSpec:
    if options.revision is not None:
        raise ReferenceError(
            f"{text} is a path and has no revisions", help="--revision applies to Hugging Face ids only"
        )
    if not reachable(path):
        raise ReferenceError(f"{text} is outside the folders that may be read", help="name a model in one")
    if not exists(path):
        raise ReferenceError(f"there is no file or folder {text}", help="check the path")
    if path.is_dir():
        return _from_files(text, _Folder(path), path, options)
    if path.name in (_INDEX, _ADAPTER):
        return _from_files(text, _Folder(path.parent), path.parent, options)
    config = options.read(path)
    if "peft_type" in config:
        return _adapter(text, config, path.parent, options)
    if isinstance(config.get("_class_name"), str) and components(config):
        return _pipeline(text, _Folder(path.parent), path, options)
    folder = path.parent if path.name == _CONFIG else None
    return _plain(text, "config", config, path, folder, options)


def _from_hub(text: str, options: _Options) -> ModelSpec:
    registry = load_registry()
    if text in registry:
        flavours = by_size(registry.get(text).flavours())
        example = (
            f"one of: {', '.join(f'{text}:{name}' for name in flavours)}"
            if flavours
            else "a Hub id or a path"
        )
        raise ReferenceError(f"{text!r} is a family, not a model", help=f"give {example}")
    if not looks_like_id(text):
        raise ReferenceError(
            f"{short(text)!r} is neither a path, a registered family:flavour nor a Hugging Face id",
            help="`fsdptool families` lists the shipped families",
        )
    known, note = family_of_name(text) if options.catalogue and options.revision is None else (None, None)
    if known is not None and options.component not in (None, _component_of(known)):
        known = None
    at, why = _missed.get(text, (-_ASKED_AGAIN, ""))
    if known is not None and monotonic() - at < _ASKED_AGAIN:
        return _from_catalogue(text, known, note, why, options)
    files = HubFiles(text, options.revision, hint_for(text))
    try:
        spec = _from_files(text, _Hub(files), None, options)
    except UnreachableError as error:
        if known is None:
            raise
        if len(_missed) >= _REMEMBERED:
            _missed.clear()
        _missed[text] = monotonic(), error.why
        return _from_catalogue(text, known, note, error.why, options)
    return replace(spec, reference=replace(spec.reference, revision=files.commit or options.revision))


_ASKED_AGAIN = 15.0
"""Seconds until the Hub is asked again for what was out of reach: a plan resolves its model several times."""
_REMEMBERED = 64
_missed: dict[str, tuple[float, str]] = {}


def _component_of(known: str) -> str | None:
    name, _, size = known.partition(":")
    return load_registry().flavour(name, size).component


def _from_catalogue(text: str, known: str, note: str | None, why: str, options: _Options) -> ModelSpec:
    """Return a size of the catalogue in the place of a Hub id; it has no weights."""
    finding = Diagnostic(
        code=CATALOGUE,
        severity="warning",
        message=f"the configuration of {text} cannot be fetched: {why}; that of {known} is taken"
        + (", by the model's name" if note else ""),
        help="give its config.json if the model differs",
    )
    spec = _from_flavour(known, options)
    return replace(spec, reference=Reference("hub", text), flavour=None, diagnostics=(finding,))


def _from_files(text: str, files: _Files, folder: Path | None, options: _Options) -> ModelSpec:
    """Tell a pipeline, an adapter and a model apart by the files there are."""
    if isinstance(files, _Hub):
        # A cached file answers at once; only then is the Hub asked, in the order of likelihood.
        config = files.files.cached(_CONFIG)
        index = files.files.cached(_INDEX)
        adapter = files.files.cached(_ADAPTER)
        if not (config or index or adapter):
            config = files.find(_CONFIG)
            index = files.find(_INDEX) if config is None else None
            adapter = files.find(_ADAPTER) if config is None and index is None else None
        kind: ReferenceKind = "hub"
    else:
        config, index, adapter = files.find(_CONFIG), files.find(_INDEX), files.find(_ADAPTER)
        kind = "folder"
    path = index or adapter or config
    if path is None:
        raise ReferenceError(f"{text} contains none of {_CONFIG}, {_INDEX}, {_ADAPTER}", help=_beside(folder))
    folder = path.parent
    if index is not None:
        return _pipeline(text, files, index, options)
    if adapter is not None and not (config is not None and _is_complete(folder, config)):
        return _adapter(text, options.read(adapter), folder, options)
    if options.component is not None:
        raise ReferenceError(f"{text} is one model, not a pipeline", help="omit --component")
    assert config is not None
    values = options.read(config)
    if options.trust and isinstance(files, _Hub):
        fetch_code(files.files, values)
    return _plain(text, kind, values, config, folder, options)


def _is_complete(folder: Path, config: Path) -> bool:
    """Say whether a folder holds a model beside an adapter, and not the configuration of its base alone."""
    return bool(find_weights(folder, "transformers", read_config(config)[0]).files)


def _beside(folder: Path | None) -> str:
    """Name subfolders that do hold a configuration."""
    if folder is None:
        return "give a repository that holds a transformers or diffusers model"
    try:
        near = sorted(str(path.parent) for path in folder.glob(f"*/{_CONFIG}"))[:4]
    except OSError:
        near = []
    return (
        f"did you mean {' or '.join(near)}?" if near else "give the folder that holds the model's config.json"
    )


def _pipeline(text: str, files: _Files, index: Path, options: _Options) -> ModelSpec:
    listing = options.read(index)
    part, diagnostics = pick(listing, options.component, text)
    path = files.find(f"{part.name}/{_CONFIG}")
    if path is None:
        raise ReferenceError(
            f"{text}: component {part.name} has no {part.name}/{_CONFIG}", help="complete the pipeline folder"
        )
    config = options.read(path)
    spec = _plain(text, "pipeline", config, path, path.parent, options)
    named = part.class_name.removeprefix("FlashPack")
    if part.library == "transformers":
        spec = replace(spec, model_class=named)
    elif config.get("_class_name") != named:
        diagnostics += (
            Diagnostic(
                code=CLASS_MISMATCH,
                severity="warning",
                message=f"{index.name} says {part.name} is a {named}, {part.name}/{_CONFIG} says"
                f" {config.get('_class_name')!r}; the latter is used",
                help="diffusers builds either without a warning: correct the wrong one",
                path=str(path),
            ),
        )
    return replace(
        spec,
        reference=Reference("pipeline", text),
        component=part.name,
        diagnostics=spec.diagnostics + diagnostics,
    )


def _adapter(text: str, adapter: Mapping[str, Any], folder: Path, options: _Options) -> ModelSpec:
    base = adapter.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ReferenceError(
            f"{text}: {_ADAPTER} names no base_model_name_or_path",
            help="write the base model's id or path into it",
        )
    if options.depth >= _DEEPEST:
        raise _CircleError(text)
    base_path = expanded(base)
    local_base = folder / base
    inner = replace(options, revision=adapter.get("revision"), depth=options.depth + 1)
    local = replace(inner, revision=None)
    try:
        if exists(base_path) or (base_path.is_absolute() and not reachable(base_path)):
            spec = _from_path(base, base_path, local)
        elif not base_path.is_absolute() and _is_beside(local_base):
            spec = _from_path(str(local_base), local_base, local)
        elif ":" in base and not looks_like_id(base):
            spec = _from_flavour(base, local)
        else:
            spec = _from_hub(base, inner)
    except _CircleError as error:
        if options.depth:
            raise
        raise ReferenceError(
            f"{text}: adapters refer to one another in a circle, at {error}",
            help="set base_model_name_or_path to a base model",
        ) from None
    except ReferenceError as error:
        raise ReferenceError(f"{text} adapts {base}: {error.message}", help=error.help) from error
    if spec.adapter is not None:
        raise ReferenceError(
            f"{text} adapts {base}, which is an adapter itself",
            help=f"merge {base} into its base first, and name that as base_model_name_or_path",
        )
    read_adapter(adapter, text)
    weights = (folder / name for name in _ADAPTER_WEIGHTS)
    return replace(
        spec,
        reference=Reference("adapter", text, spec.reference.revision),
        adapter=dict(adapter),
        adapter_weights=next((str(path) for path in weights if path.is_file()), None),
    )


def _is_beside(path: Path) -> bool:
    """Say whether a relative path of an adapter leads to something, also if that may not be read here."""
    return exists(path) or (not reachable(path) and (".." in path.parts or os.path.lexists(path)))


def _plain(
    text: str,
    kind: ReferenceKind,
    config: Mapping[str, Any],
    path: Path,
    folder: Path | None,
    options: _Options,
) -> ModelSpec:
    known: tuple[Diagnostic, ...] = ()
    family = _claim(config, str(path))
    if family.precedence < 0 or config.get("model_type") in transformers_model_types():
        known = check_known(config, str(path), trust_remote_code=options.trust)
    check_sizes(config, str(path))
    library = "diffusers" if isinstance(config.get("_class_name"), str) else family.library
    # A snapshot in the Hub's cache may hold JSON files alone, of a single model or of a pipeline.
    weights = (
        find_weights(folder, library, config, variant=options.variant, downloaded="snapshots" in folder.parts)
        if folder is not None
        else WeightFiles()
    )
    return ModelSpec(
        reference=Reference(kind, text),
        family=family.name,
        flavour=None,
        library=library,
        model_class=family.model_class(config),
        config=dict(config),
        objective=family.objective_for(config),
        folder=str(folder) if folder is not None else None,
        weights=weights.files,
        trust_remote_code=options.trust,
        diagnostics=known + check_quantization(config, str(path)) + weights.findings,
    )


def _claim(config: Mapping[str, Any], where: str) -> Family:
    try:
        return load_registry().match(config)
    except ReferenceError as error:
        raise ReferenceError(f"{where}: {error.message}", help=error.help) from error


def _checked(spec: ModelSpec, overrides: Mapping[str, Any]) -> ModelSpec:
    base = dict(spec.config)
    if "num_labels" in overrides and "id2label" not in overrides:
        # The names of the labels would win over their number (transformers 5.23, ``configuration_utils.py``).
        base = {key: value for key, value in base.items() if key not in ("id2label", "label2id")}
    config = _merged(base, overrides)
    findings = check_sizes(config, spec.reference.id)
    spec = replace(spec, config=config, overrides=overrides, diagnostics=spec.diagnostics + findings)
    return _with_class(spec, overrides)


def _with_class(spec: ModelSpec, overrides: Mapping[str, Any]) -> ModelSpec:
    """Take the class of the model from an override, as from the file."""
    key = "_class_name" if spec.library == "diffusers" else "architectures"
    if key not in overrides or spec.library not in ("transformers", "diffusers"):
        return spec
    value = overrides[key]
    name = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if not isinstance(name, str) or not name.isidentifier():
        example = '["LlamaForCausalLM"]' if key == "architectures" else "FluxTransformer2DModel"
        raise ConfigError(
            f"the override {key} is not the name of one class", help=f"for example {key}={example}"
        )
    if key == "_class_name" and (known := diffusers_classes()) and name not in known:
        near = nearest(name, known)
        raise ConfigError(
            f"diffusers has no class {name!r}", help=f"did you mean {near}?" if near else "check its spelling"
        )
    family = load_registry().get(spec.family)
    if spec.flavour is None or key == "_class_name":
        family = _claim({**spec.config, key: value}, spec.reference.id)
    objective = family.objective_for({**spec.config, key: value})
    return replace(spec, family=family.name, model_class=name, objective=objective)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = (
            _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return result
