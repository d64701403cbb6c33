"""SARIF 2.1.0 as far as we emit it, after the schema of the OASIS committee specification.

No package index that this project uses carries that schema as a file, so this page was written beside
its text, ``sarif-schema-2.1.0.json`` of errata 01, definition by definition. For every property that we
emit it asks what the official schema asks: type, enumeration, minimum, ``minItems``, ``uniqueItems``,
``format``, required properties and alternatives. Each object is closed to the properties that we emit,
so it is stricter than the official one: a new property fails here until its definition has been added.
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _array(items: dict[str, Any], *, least: int = 0, unique: bool = False) -> dict[str, Any]:
    return {"type": "array", "minItems": least, "uniqueItems": unique, "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/definitions/{name}"}


_STRING = {"type": "string"}
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_PLACE = {"type": "integer", "minimum": 1}
_INDEX = {"type": "integer", "minimum": -1}

_DEFINITIONS: dict[str, Any] = {
    "artifactChange": _object(
        ["artifactLocation", "replacements"],
        {
            "artifactLocation": _ref("artifactLocation"),
            "replacements": _array(_ref("replacement"), least=1),
        },
    ),
    "artifactContent": _object([], {"text": _STRING}),
    "artifactLocation": _object([], {"uri": {**_STRING, "format": "uri-reference"}}),
    "fix": _object(
        ["artifactChanges"],
        {
            "description": _ref("message"),
            "artifactChanges": _array(_ref("artifactChange"), least=1, unique=True),
        },
    ),
    "location": _object([], {"physicalLocation": _ref("physicalLocation")}),
    # The official text asks for ``text`` or ``id``; we have no message table, so for ``text``.
    "message": _object(["text"], {"text": _STRING}),
    "multiformatMessageString": _object(["text"], {"text": _STRING}),
    # The official text asks for ``address`` or ``artifactLocation``; files have no address.
    "physicalLocation": _object(
        ["artifactLocation"], {"artifactLocation": _ref("artifactLocation"), "region": _ref("region")}
    ),
    "propertyBag": {"type": "object", "properties": {"tags": _array(_STRING, unique=True)}},
    # The official text asks for ``startLine``, ``charOffset`` or ``byteOffset``; we write lines.
    "region": _object(
        ["startLine"], {"startLine": _PLACE, "startColumn": _PLACE, "endLine": _PLACE, "endColumn": _PLACE}
    ),
    "replacement": _object(
        ["deletedRegion"],
        {"deletedRegion": _ref("region"), "insertedContent": _ref("artifactContent")},
    ),
    "reportingConfiguration": _object([], {"level": _LEVEL}),
    "reportingDescriptor": _object(
        ["id"],
        {
            "id": _STRING,
            "shortDescription": _ref("multiformatMessageString"),
            "fullDescription": _ref("multiformatMessageString"),
            "help": _ref("multiformatMessageString"),
            "defaultConfiguration": _ref("reportingConfiguration"),
            "properties": _ref("propertyBag"),
        },
    ),
    "result": _object(
        ["message"],
        {
            "ruleId": _STRING,
            "ruleIndex": _INDEX,
            "level": _LEVEL,
            "message": _ref("message"),
            "locations": _array(_ref("location")),
            "fixes": _array(_ref("fix"), unique=True),
        },
    ),
    "run": _object(
        ["tool"],
        {
            "tool": _ref("tool"),
            "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
            "results": _array(_ref("result")),
        },
    ),
    "tool": _object(["driver"], {"driver": _ref("toolComponent")}),
    "toolComponent": _object(
        ["name"],
        {"name": _STRING, "version": _STRING, "rules": _array(_ref("reportingDescriptor"), unique=True)},
    ),
}
SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": _DEFINITIONS,
    **_object(
        ["version", "runs"],
        {
            "$schema": {**_STRING, "format": "uri"},
            "version": {"enum": ["2.1.0"]},
            "runs": _array(_ref("run")),
        },
    ),
}
