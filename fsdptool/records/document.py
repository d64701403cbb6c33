"""The envelope every JSON document begins with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import Diagnostic

SCHEMA_VERSION = 1
_LIBRARIES = ("torch", "accelerate", "transformers", "diffusers", "peft")


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
    body: Mapping[str, Any],
    *,
    diagnostics: Iterable[Diagnostic] = (),
    unknowns: Iterable[str] = (),
) -> dict[str, Any]:
    """Return a complete document: the common head, then ``body``.

    Args:
        schema: Name of the schema in ``schemas/`` the document validates against.
        inputs: What the document was derived from; only its digest is kept.
        body: The document's own fields.
        diagnostics: Findings that belong to the document.
        unknowns: What could not be derived, one sentence each.
    """
    return {
        "schema": schema,
        "schema_version": SCHEMA_VERSION,
        "tool_version": tool_version(),
        "libraries": library_versions(),
        "inputs_digest": digest(inputs),
        "diagnostics": [to_json(item) for item in diagnostics],
        "unknowns": list(unknowns),
        **to_json(body),
    }
