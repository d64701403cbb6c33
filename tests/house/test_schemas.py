"""The committed schemas are what the records say; a document is described once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest

from fsdptool.cli.schema import write_schemas
from fsdptool.records import schema
from fsdptool.records.annotations import Keywords
from fsdptool.records.run import Metrics
from fsdptool.records.schema import FORMATS, DocumentFormat, generate

COMMITTED = Path(__file__).parents[2] / "schemas"


def differing(committed: Path, generated: Path) -> list[str]:
    """Return the schemas that are missing on one side or differ by a byte."""
    names = {path.name for folder in (committed, generated) for path in folder.glob("*.schema.json")}
    return sorted(
        name
        for name in names
        if not (committed / name).is_file()
        or not (generated / name).is_file()
        or (committed / name).read_bytes() != (generated / name).read_bytes()
    )


def test_the_committed_schemas_are_generated(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    assert not differing(COMMITTED, tmp_path), "run: fsdptool schema --write schemas"


def test_a_field_that_a_record_alone_has_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Wider(Metrics):
        planted: int = 0

    monkeypatch.setattr("fsdptool.records.run.Metrics", Wider)
    write_schemas(tmp_path)
    assert differing(COMMITTED, tmp_path) == ["metrics.schema.json"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(generate(name))


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf."""

    class_: str
    size: Annotated[int, Keywords(minimum=1)] | None = None
    """Its size."""


def test_types_keywords_and_documentation_become_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdptool.records.run.Leaf", Leaf, raising=False)
    monkeypatch.setattr(
        schema, "FORMATS", {"leaf": DocumentFormat("run.Leaf", "Leaf", "input", envelope=False)}
    )
    made: dict[str, Any] = json.loads(json.dumps(generate("leaf")))
    assert made["description"] == "A leaf."
    assert (made["required"], made["additionalProperties"]) == (["class"], False)
    assert made["properties"] == {
        "class": {"type": "string"},
        "size": {
            "type": ["integer", "null"],
            "minimum": 1,
            "description": "Its size.",
            "default": None,
        },
    }
