"""The part of SARIF 2.1.0 that a producer like ours must keep to, written from the OASIS text.

Strict: properties that section 3 of the standard does not define for an object are refused.
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


_TEXT = {"type": "string", "minLength": 1}
_MESSAGE = _object(["text"], {"text": _TEXT, "markdown": _TEXT, "id": _TEXT})
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_POSITION = {"type": "integer", "minimum": 1}
_REGION = _object(
    ["startLine"],
    {"startLine": _POSITION, "startColumn": _POSITION, "endLine": _POSITION, "endColumn": _POSITION},
)
_ARTIFACT = _object([], {"uri": {"type": "string", "format": "uri-reference"}, "uriBaseId": _TEXT})
_PHYSICAL = _object(["artifactLocation"], {"artifactLocation": _ARTIFACT, "region": _REGION})
_REPLACEMENT = _object(
    ["deletedRegion"],
    {"deletedRegion": _REGION, "insertedContent": _object([], {"text": {"type": "string"}})},
)
_CHANGE = _object(
    ["artifactLocation", "replacements"],
    {"artifactLocation": _ARTIFACT, "replacements": {"type": "array", "minItems": 1, "items": _REPLACEMENT}},
)
_FIX = _object(
    ["artifactChanges"],
    {"description": _MESSAGE, "artifactChanges": {"type": "array", "minItems": 1, "items": _CHANGE}},
)
_RESULT = _object(
    ["message"],
    {
        "ruleId": _TEXT,
        "ruleIndex": {"type": "integer", "minimum": -1},
        "level": _LEVEL,
        "message": _MESSAGE,
        "locations": {"type": "array", "items": _object([], {"physicalLocation": _PHYSICAL})},
        "fixes": {"type": "array", "items": _FIX},
    },
)
_RULE = _object(
    ["id"],
    {
        "id": _TEXT,
        "shortDescription": _MESSAGE,
        "fullDescription": _MESSAGE,
        "help": _MESSAGE,
        "defaultConfiguration": _object([], {"level": _LEVEL}),
        "properties": {"type": "object"},
    },
)
_DRIVER = _object(
    ["name"],
    {"name": _TEXT, "version": _TEXT, "rules": {"type": "array", "uniqueItems": True, "items": _RULE}},
)
_RUN = _object(
    ["tool"],
    {
        "tool": _object(["driver"], {"driver": _DRIVER}),
        "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
        "results": {"type": "array", "items": _RESULT},
    },
)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **_object(
        ["version", "runs"],
        {"$schema": _TEXT, "version": {"const": "2.1.0"}, "runs": {"type": "array", "items": _RUN}},
    ),
}
