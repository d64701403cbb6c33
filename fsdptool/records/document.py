"""The envelope every JSON document begins with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.schema import Digest

SCHEMA_VERSION = 1
_LIBRARIES = ("torch", "accelerate", "transformers", "diffusers", "peft")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every document begins with.

    Attributes:
        schema: Name of the schema the document follows.
        schema_version: Version of the schema.
        tool_version: Version of fsdptool.
        libraries: Versions of the libraries the answer depends on.
        inputs_digest: Digest of what the document was derived from.
        diagnostics: Findings that belong to the document.
        unknowns: What could not be derived, one sentence each.
    """

    schema: str
    schema_version: int
    tool_version: str
    libraries: Mapping[str, str]
    inputs_digest: Digest
    diagnostics: tuple[Diagnostic, ...]
    unknowns: tuple[str, ...]


def tool_version() -> str:
    """Return fsdptool's own version, from package metadata."""
    return metadata.version("fsdptool")


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries an answer depends on; reads metadata, imports nothing."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def digest(value: Any) -> str:
    """Return the SHA-256 of ``value``'s canonical JSON, as ``sha256:<hex>``."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def envelope(
    schema: str,
    inputs: Any,
    body: object,
    *,
    diagnostics: Iterable[Diagnostic] = (),
    unknowns: Iterable[str] = (),
) -> dict[str, Any]:
    """Return a complete document: the common head, then ``body``.

    Args:
        schema: Name of the schema in ``schemas/`` the document validates against.
        inputs: What the document was derived from; only its digest is kept.
        body: The document's own fields: the record of its format, or plain data in the record's form.
        diagnostics: Findings that belong to the document.
        unknowns: What could not be derived, one sentence each.
    """
    head = Envelope(
        schema=schema,
        schema_version=SCHEMA_VERSION,
        tool_version=tool_version(),
        libraries=library_versions(),
        inputs_digest=digest(inputs),
        diagnostics=tuple(diagnostics),
        unknowns=tuple(unknowns),
    )
    return {**to_json(head), **to_json(body)}
