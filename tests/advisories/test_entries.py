"""Each advisory holds for its affected example, and not for the other one or with the repaired version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fsdptool.advisories.catalogue import ENTRIES, advisories, ranges
from fsdptool.advisories.facts import read_facts
from fsdptool.advisories.matching import finding
from fsdptool.config.canonical import COMMON, LEGACY
from fsdptool.config.command_lines import NamedFiles
from fsdptool.files.text import SourceText
from fsdptool.files.values import load_schema
from fsdptool.records.advisory import Advisory, AdvisoryExamples, AuditFinding, ExampleRun, FactTest
from fsdptool.records.described_run import DescribedMesh, DescribedRun

EVERY = pytest.mark.parametrize("advisory", advisories(), ids=lambda advisory: advisory.id)
FACTS = {*DescribedRun.__dataclass_fields__} | {f"mesh.{name}" for name in DescribedMesh.__dataclass_fields__}
FACTS |= {f"settings.{name}" for name in (*COMMON, *LEGACY)}


def examples(advisory: Advisory) -> AdvisoryExamples:
    assert advisory.database_specific.examples is not None
    return advisory.database_specific.examples


def judged(advisory: Advisory, example: ExampleRun, versions: Mapping[str, str]) -> AuditFinding | None:
    known = {name: (Version(version),) for name, version in versions.items()}

    def named(path: Path) -> SourceText | None:
        return SourceText(example.files[path.name], path.name) if path.name in example.files else None

    files = NamedFiles(text=named)
    return finding(advisory, read_facts(SourceText(example.text), known, files), known)


@EVERY
def test_the_affected_example_is_found(advisory: Advisory) -> None:
    example = examples(advisory).affected
    found = judged(advisory, example, example.versions)
    assert found is not None
    assert found.installed == str(Version(example.versions[advisory.package]))
    assert (found.verdict == "may_apply") is bool(found.unknown)
    assert found.unknown[len(found.unknown) - len(advisory.database_specific.unseen) :] == tuple(
        f"whether {clause}" for clause in advisory.database_specific.unseen
    )


@EVERY
def test_the_other_example_is_not_found(advisory: Advisory) -> None:
    example = examples(advisory).not_affected
    assert judged(advisory, example, example.versions) is None


@EVERY
def test_the_affected_example_is_not_found_outside_of_the_range(advisory: Advisory) -> None:
    example = examples(advisory).affected
    for begin, end in ranges(advisory):
        # A development release comes before every other one of its version.
        before = {**example.versions, advisory.package: f"{begin}.dev0"}
        assert begin == Version("0") or judged(advisory, example, before) is None
        if end is not None:
            repaired = {**example.versions, advisory.package: str(end)}
            assert judged(advisory, example, repaired) is None
    for package in advisory.database_specific.also or ():
        without = {name: version for name, version in example.versions.items() if name != package}
        assert judged(advisory, example, without) is None


@EVERY
def test_an_entry_is_well_formed(advisory: Advisory) -> None:
    file = ENTRIES / f"{advisory.id}.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(load_schema("advisory")).validate(written)
    assert file.read_text(encoding="utf-8") == json.dumps(written, indent=1, ensure_ascii=False) + "\n"
    assert advisory.id.startswith(f"{advisory.package}-")
    assert all(reference.url.startswith("https://") for reference in advisory.references)
    assert advisory.references
    assert ranges(advisory)
    effect = advisory.database_specific
    for specifiers in (effect.also or {}).values():
        assert all(SpecifierSet(item) for item in specifiers)
    assert effect.condition
    for tests in effect.condition:
        assert tests
        for name, test in tests.items():
            assert name in FACTS or name.startswith("keys."), name
            assert asked(test) == 1, f"{name} must be compared in one way"


def asked(test: FactTest) -> int:
    """Return in how many ways a test compares."""
    values = (test.equals is not None, bool(test.any_of), bool(test.none_of))
    return sum((*values, test.greater is not None, test.present is not None))


def test_there_are_entries_and_nothing_else() -> None:
    assert {path.stem for path in Path(ENTRIES).iterdir()} == {advisory.id for advisory in advisories()}
    assert len(advisories()) >= 110
