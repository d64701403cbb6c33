"""Anatomies as compact JSON for the cache: tables instead of thousands of objects.

A hit has to answer in well under half a second; the general codec spends 0.1 s on a 126-layer model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fsdptool.records.anatomy import Anatomy, Buffer, Module, Parameter
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.model import ModelSpec, Reference

_TABLES = ("spec", "parameters", "buffers", "modules")
_NOBODY = ModelSpec(Reference("config", ""), "", None, "", "", {})


def encode(anatomy: Anatomy) -> dict[str, Any]:
    """Return the anatomy as JSON data, without its spec: whoever reads it back supplies that."""
    kinds: dict[tuple[Any, ...], int] = {}
    modules = []
    for module in anatomy.modules:
        kind = (module.class_name, module.bases, module.listed, module.embedding, module.forwards)
        modules.append([module.path, kinds.setdefault(kind, len(kinds)), list(module.aliases)])
    rest = {f.name: to_json(getattr(anatomy, f.name)) for f in fields(Anatomy) if f.name not in _TABLES}
    return {
        "kinds": [[name, list(bases), *flags] for name, bases, *flags in kinds],
        "modules": modules,
        "parameters": [
            [p.fqn, list(p.shape), p.dtype, p.trainable, list(p.aliases)] for p in anatomy.parameters
        ],
        "buffers": [[b.fqn, list(b.shape), b.dtype, b.persistent] for b in anatomy.buffers],
        "rest": rest,
    }


def decode(data: Mapping[str, Any], spec: ModelSpec) -> Anatomy:
    """Return the anatomy that :func:`encode` was given, with ``spec``.

    Raises:
        ConfigError, KeyError, TypeError, ValueError: ``data`` has another shape.
    """
    kinds: list[Any] = [(name, tuple(bases), *flags) for name, bases, *flags in data["kinds"]]
    empty: dict[str, list[Any]] = {name: [] for name in _TABLES[1:]}
    anatomy = from_json(Anatomy, {**data["rest"], **empty, "spec": to_json(_NOBODY)})
    return replace(
        anatomy,
        spec=spec,
        modules=tuple(_module(path, kinds[kind], aliases) for path, kind, aliases in data["modules"]),
        parameters=tuple(
            Parameter(fqn, tuple(shape), dtype, trainable, tuple(aliases))
            for fqn, shape, dtype, trainable, aliases in data["parameters"]
        ),
        buffers=tuple(
            Buffer(fqn, tuple(shape), dtype, persistent) for fqn, shape, dtype, persistent in data["buffers"]
        ),
    )


def _module(path: str, kind: tuple[Any, ...], aliases: list[str]) -> Module:
    name, bases, listed, embedding, forwards = kind
    return Module(path, name, bases, listed, embedding, forwards, tuple(aliases))
