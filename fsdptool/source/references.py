"""What a person may write for a model, a configuration file or a pipeline folder, and in a recipe for a path.

A recipe's relative path is looked up in the folder of the recipe, so that the recipe means the same wherever
it is started from, and then in the working directory. References to code on the Python path
(``package.module:Class``) are recognised and located, never imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdptool.errors import (
    ConfigError,
    ReferenceError,  # noqa: A004 - a reference names a model here
)
from fsdptool.files.text import UnreadableError, exists, is_file, read_bytes
from fsdptool.records.anatomy import ModelSpec, Reference
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.recipe import Data, ModelChoice, Recipe
from fsdptool.spelling import nearest

REPEATED_KEY = "DET104"
_SHOWN = 8
_LARGEST = 16 * 1024 * 1024


def read_config(path: Path, *, largest: int = _LARGEST) -> tuple[Mapping[str, Any], tuple[Diagnostic, ...]]:
    """Return the JSON object in ``path``, and a finding for each key that it writes again.

    Args:
        path: The file.
        largest: Bytes that are read at most.

    Raises:
        ReferenceError: Unreadable, not UTF-8, not JSON, not an object, or far too large for a
            configuration; the message names the file and, for bad JSON, the line.
    """
    try:
        content = read_bytes(path, limit=largest)
    except UnreadableError as error:
        what = f": {error.message}"
        if error.code == "FSD102":
            what = f" is too large for a configuration file{what}"
        elif exists(path) and not is_file(path):
            what = " is not a file"
        raise ReferenceError(f"{path}{what}", help="give the model's config.json or its folder") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReferenceError(
            f"{path} is not UTF-8 text (byte {error.start})",
            help="give the model's config.json or its folder",
        ) from error
    repeated: dict[str, None] = {}

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        status = dict(pairs)
        if len(status) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated.update({key: None for key, count in counts.items() if count > 1})
        return status

    try:
        loaded = json.loads(text, object_pairs_hook=collect)
    except json.JSONDecodeError as error:
        raise ReferenceError(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}", help="repair the file"
        ) from error
    except RecursionError as error:
        raise ReferenceError(
            f"{path}: nested too deeply for a configuration", help="give the model's config.json"
        ) from error
    except ValueError as error:
        raise ReferenceError(f"{path}: invalid JSON: {error}", help="repair the file") from error
    if not isinstance(loaded, dict):
        raise ReferenceError(
            f"{path} holds a JSON {type(loaded).__name__}, not an object", help="give the model's config.json"
        )
    return loaded, tuple(_repetitions(path, text, list(repeated)[:_SHOWN])) if repeated else ()


def _repetitions(path: Path, text: str, keys: list[str]) -> Iterator[Diagnostic]:
    """Say where keys are written again; JSON's readers, transformers and diffusers too, take the last."""
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import ParseError, duplicates, parse_json, walk

    places: dict[str, tuple[int, int]] = {}
    source = SourceText(text)
    try:
        root = parse_json(text).root
        assert root is not None
        for node in walk(root):
            for loser, winner in duplicates(node):
                first, last = (source.place(entry.key_node.start)[0] for entry in (loser, winner))
                places.setdefault(str(loser.key), (first, last))
    except ParseError:  # longer than a configuration of settings may be; the keys are known all the same
        pass
    for key in keys:
        place = places.get(key)
        line = place[0] if place else None
        again = f"is set again on line {place[1]}" if place else "is set more than once"
        yield Diagnostic(
            code=REPEATED_KEY,
            severity="warning",
            message=f"{path}{f':{line}' if line else ''}: {key} {again}; the last value is used",
            help="keep one of the entries",
            path=str(path),
            line=line,
        )


_LONGEST = 120


def short(text: str) -> str:
    """Return ``text`` as a message can quote it."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def expanded(text: str) -> Path:
    """Return the path ``text`` names, a leading ``~`` resolved where there is such a home."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:  # ~user, unknown to the system
        return path


def refuse_pages(text: str) -> None:
    """Refuse web addresses.

    Raises:
        ReferenceError: ``text`` is one; the advice is the id in it.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return
    host, *parts = rest.split("/")
    name = "/".join(parts[:2]) if host == "huggingface.co" and len(parts) > 1 else "organisation/name"
    raise ReferenceError(f"{short(text)} is a web address, not a model", help=f"use its id: {name}")


SECOND_DENOISER = "DET110"
CATALOGUE = "DET105"
CLASS_MISMATCH = "DET111"

_DENOISERS = ("transformer", "unet", "prior", "decoder", "transformer_2", "unet_2")
"""Attribute names of what diffusers pipelines train (0.42), the first present is taken."""

_NOT_MODELS = ("Tokenizer", "Scheduler", "Processor", "FeatureExtractor", "Processing", "Guider")


@dataclass(frozen=True, slots=True)
class PipelineComponent:
    """One entry of ``model_index.json``."""

    name: str
    library: str
    class_name: str


def components(index: Mapping[str, Any]) -> tuple[PipelineComponent, ...]:
    """Return the components of a pipeline that are models, in file order.

    Raises:
        ReferenceError: A component's name leads out of the pipeline's folder.
    """
    models = []
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        library, class_name = value
        named = isinstance(library, str) and isinstance(class_name, str)
        if Path(name).name != name or "\0" in name:
            raise ReferenceError(
                f"model_index.json names a component {short(repr(name))}, which does not name a folder in it",
                help="correct the pipeline's model_index.json",
            )
        if named and not any(word in class_name for word in _NOT_MODELS):
            models.append(PipelineComponent(name, library, class_name))
    return tuple(models)


def pick(
    index: Mapping[str, Any], wanted: str | None, where: str
) -> tuple[PipelineComponent, tuple[Diagnostic, ...]]:
    """Return the component to inspect: ``wanted``, else the denoiser.

    Raises:
        ReferenceError: The component does not exist, or none that looks like a denoiser.
    """
    have = {component.name: component for component in components(index)}
    listed = ", ".join(have) or "none that is a model"
    if wanted is not None:
        if wanted in have:
            return have[wanted], ()
        near = nearest(wanted, have, cutoff=0.6)
        raise ReferenceError(
            f"{where} has no model component {wanted!r}",
            help=f"did you mean {near}? it has: {listed}" if near else f"it has: {listed}",
        )
    present = [name for name in _DENOISERS if name in have]
    if not present:
        raise ReferenceError(
            f"{where} has no transformer or unet among its components",
            help=f"give --component: {listed}" if have else "give a pipeline folder that names its models",
        )
    diagnostics: tuple[Diagnostic, ...] = ()
    if len(present) > 1:
        diagnostics = (
            Diagnostic(
                code=SECOND_DENOISER,
                severity="info",
                message=f"{where} also has {' and '.join(present[1:])}; this result covers {present[0]} only",
                help=f"use --component {present[1]} to inspect the other",
            ),
        )
    return have[present[0]], diagnostics


Change = Callable[[str], str]


def locate(text: str, folder: Path | None) -> str:
    """Return a path that a file in ``folder`` names: as found in that folder, else as it is written.

    Texts that are not paths (``llama3:8b``, a Hub id) stay.
    """
    if folder is None or folder == Path() or not text or not exists(folder / expanded(text)):
        return text
    return str(folder / expanded(text))


def located(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe of ``folder`` with paths that work from the working directory."""
    return _change_data(
        _change_models(recipe, lambda text: locate(text, folder)), lambda t: locate(t, folder)
    )


def with_places(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe of ``folder`` with absolute paths of data, which a worker finds wherever it starts."""

    def absolute(text: str) -> str:
        place = expanded(locate(text, folder))
        return str(place.absolute()) if text and exists(place) else text

    return _change_data(recipe, absolute)


def rebased(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe whose paths work from the working directory as it is to be written into ``folder``.

    Absolute paths and texts that are not paths of anything that exists stay.
    """
    home = os.path.realpath(folder)
    if home == os.path.realpath("."):
        return recipe

    def relative(text: str) -> str:
        if not text or expanded(text).is_absolute() or not exists(Path(text)):
            return text
        path = os.path.relpath(text, home)
        # A model's name without a separator could be read as something other than a path.
        return path if path.startswith(os.pardir) else f"./{path}"

    return _change_data(_change_models(recipe, relative), relative)


def _change_models(recipe: Recipe, change: Change) -> Recipe:
    def changed(model: ModelChoice) -> ModelChoice:
        return replace(model, reference=change(model.reference))

    distillation = recipe.method.distillation
    if distillation is not None:
        distillation = replace(distillation, teacher=changed(distillation.teacher))
        recipe = replace(recipe, method=replace(recipe.method, distillation=distillation))
    return replace(recipe, model=changed(recipe.model))


def _change_data(recipe: Recipe, change: Change) -> Recipe:
    def changed(data: Data) -> Data:
        options = data.options.copy()
        if "pipeline" in options:
            options["pipeline"] = change(options["pipeline"])
        if "latents" in options:
            options["latents"] = change(options["latents"])
        bundled = data.source == "text" and data.path == "pydoc"
        place = data.path
        if place is not None and data.source == "python":
            place = _changed_code(place, change)
        elif place is not None and not bundled:
            place = change(place)
        return replace(
            data,
            path=place,
            tokenizer=data.tokenizer if data.tokenizer in ("auto", "bytes") else change(data.tokenizer),
            options=options,
        )

    evaluation = recipe.evaluation
    if evaluation.data is not None:
        evaluation = replace(evaluation, data=changed(evaluation.data))
    return replace(recipe, data=changed(recipe.data), evaluation=evaluation)


def _changed_code(text: str, change: Change) -> str:
    """Change the folder of ``[FOLDER/]package.module:name``; without one, that in which the package lies."""
    folder, name = split_code(text)
    if folder is not None:
        return f"{change(folder)}/{name}"
    top = name.partition(":")[0].partition(".")[0]
    for file in (f"{top}.py", top):
        if (place := change(file)) != file and Path(place).name == file:
            return f"{Path(place).parent}/{name}"
    return text


def split_code(text: str) -> tuple[str | None, str]:
    """Return the folder, or None, and the name of ``[FOLDER/]package.module:name``.

    Raises:
        ConfigError: It is not written like that.
    """
    folder, slash, name = text.rpartition("/")
    if _IMPORT.fullmatch(name) is None:
        raise ConfigError(
            f"data.path {text} does not name code",
            help="write package.module:name, for example mydata:batches",
        )
    return folder or slash or None, name


def check_code(text: str) -> None:
    """Check that the module of ``[FOLDER/]package.module:name`` can be found; it is not imported.

    Raises:
        ConfigError: It is on no path.
    """
    folder, name = split_code(text)
    module = name.partition(":")[0]
    if _find(module, folder) is None:
        raise ConfigError(
            f"data.path {text}: there is no module {module}",
            help="it is looked up on the Python path, beside the recipe and in the working directory",
        )


IMPORT_FLAG = "--allow-import"
"""Another name of ``--trust-remote-code`` (``cli/options.py``): one consent, to code that is not ours."""

_NAMES = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_IMPORT = re.compile(rf"({_NAMES}):{_NAMES}")


def is_import(text: str) -> bool:
    """Say whether a reference names code: its module has a package, or is on the Python path or here."""
    if _IMPORT.fullmatch(text) is None:
        return False
    module = text.partition(":")[0]
    return "." in module or _find(module) is not None


def import_spec(text: str, *, trust_remote_code: bool) -> ModelSpec:
    """Return the model that a reference to code means. It is not imported here.

    Raises:
        ReferenceError: The code may not be imported.
    """
    if not trust_remote_code:
        raise ReferenceError(
            f"{text} names code on the Python path, which is imported only with {IMPORT_FLAG}",
            help=f"read that code, then give {IMPORT_FLAG} (in Python: trust_remote_code=True)",
        )
    here = Path.cwd()
    return ModelSpec(
        reference=Reference("import", text),
        family="python",
        flavour=None,
        library="torch",
        model_class=text,
        config={},
        objective="module",
        folder=str(here) if _lies_in(text, here) else None,
        trust_remote_code=True,
    )


def _lies_in(text: str, folder: Path) -> bool:
    """Say whether the top package of a reference's module is in ``folder``."""
    found = _find(text.partition(":")[0], str(folder))
    places = [*(found.submodule_search_locations or ()), found.origin] if found is not None else []
    return any(place is not None and Path(place).resolve().parent == folder.resolve() for place in places)


_LARGEST_MODULE = 16 << 20
"""Bytes of a module that a model may bring along."""


def own_code_digest(spec: ModelSpec) -> str | None:
    """Return a digest of the source files that a model brings along, if they may run; else None.

    Raises:
        ReferenceError: One of them cannot be read.
    """
    if not spec.trust_remote_code:
        return None
    digest = hashlib.sha256()
    for path in sorted(_sources(spec)):
        digest.update(path.name.encode())
        try:
            digest.update(read_bytes(path, limit=_LARGEST_MODULE))
        except UnreadableError as error:
            raise ReferenceError(
                f"{path}: {error.message}", help="take it out of the model's folder"
            ) from error
    return digest.hexdigest()


def _sources(spec: ModelSpec) -> Iterator[Path]:
    if spec.reference.kind != "import":
        yield from Path(spec.folder).glob("*.py") if spec.folder is not None else ()
        return
    found = _find(spec.model_class.partition(":")[0], spec.folder)
    if found is None:
        return
    if found.submodule_search_locations is None:
        yield from (Path(found.origin),) if found.origin else ()
    for folder in found.submodule_search_locations or ():
        yield from Path(folder).rglob("*.py")


def _find(module: str, folder: str | None = None) -> ModuleSpec | None:
    """Find the top package of a module by its name: on the path, then in a folder. This runs no code."""
    top = module.partition(".")[0]
    try:
        found = find_spec(top)
    except (ImportError, ValueError):  # it is half imported, or has no specification (__main__)
        found = None
    return found or PathFinder.find_spec(top, [folder or str(Path.cwd())])
