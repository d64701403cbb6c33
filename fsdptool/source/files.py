"""Paths a person may write for a model, configuration files and pipeline folders."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.errors import ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.files.text import UnreadableError, exists, is_file, read_bytes
from fsdptool.records.diagnostic import Diagnostic
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
    from fsdptool.files.json_tree import parse_json
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import ParseError, duplicates, walk

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
CLASS_MISMATCH = "DET111"

_DENOISERS = ("transformer", "unet", "prior", "decoder", "transformer_2", "unet_2")
"""Attribute names of what diffusers pipelines train (0.42), the first present is taken."""

_NOT_MODELS = ("Tokenizer", "Scheduler", "Processor", "FeatureExtractor", "Processing", "Guider")


@dataclass(frozen=True, slots=True)
class Component:
    """One entry of ``model_index.json``."""

    name: str
    library: str
    class_name: str


def components(index: Mapping[str, Any]) -> tuple[Component, ...]:
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
            models.append(Component(name, library, class_name))
    return tuple(models)


def pick(
    index: Mapping[str, Any], wanted: str | None, where: str
) -> tuple[Component, tuple[Diagnostic, ...]]:
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
