"""The JSON Schema of recipes, generated from the record as the reader is."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdptool.records.codec import to_json
from fsdptool.records.recipe import DATA_OPTIONS, Data, Recipe


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema 2020-12 of recipes, generated from the record."""
    schema = _schema_of(Recipe)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:fsdptool:schema:recipe",
        "title": "fsdptool recipe",
        "description": "How a model is trained. Processes, mesh, wrapping, offload and precision are the "
        "accelerate YAML's.",
        **schema,
    }


def _schema_of(hint: Any) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(option) for option in get_args(hint)]}
    if hint is type(None):
        return {"type": "null"}
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return {"type": "array", "items": _schema_of(items[0])}
        return {
            "type": "array",
            "prefixItems": [_schema_of(item) for item in items],
            "minItems": len(items),
            "maxItems": len(items),
        }
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _object_schema(hint)
    if origin is not None:
        return {"type": "object"}
    return {"type": {int: "integer", float: "number", str: "string", bool: "boolean"}[hint]}


def _object_schema(record: type) -> dict[str, Any]:
    required = [
        field.name
        for field in dataclasses.fields(record)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    properties = {}
    for field in dataclasses.fields(record):
        entry = _schema_of(get_type_hints(record)[field.name])
        if field.default is not dataclasses.MISSING and not dataclasses.is_dataclass(field.default):
            entry = {**entry, "default": to_json(field.default)}
        properties[field.name] = entry
    if record is Data:
        properties["options"]["propertyNames"] = {"enum": list(DATA_OPTIONS)}
    doc = (record.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    body: dict[str, Any] = {"type": "object", "description": " ".join(doc.split()), "properties": properties}
    if required:
        body["required"] = required
    return {**body, "additionalProperties": False}
