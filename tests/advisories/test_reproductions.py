"""The reproductions agree with the entries: whoever says "reproduced" has a row that was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from fsdptool.advisories.catalogue import advisories, affected_version, fixed_in
from fsdptool.records.advisory import Advisory

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "advisories.json"


def rows() -> dict[str, dict[str, Any]]:
    return {row["advisory"]: row for row in json.loads(RESULTS.read_text())["rows"]}


def affected(advisory: Advisory, side: dict[str, Any]) -> bool:
    versions = {name: (Version(version),) for name, version in side["versions"].items()}
    installed = json.loads(RESULTS.read_text())["installed"]
    # Packages that a case does not replace are those of the interpreter.
    others = {name: (Version(version),) for name, version in installed.items() if name not in versions}
    return affected_version(advisory, others | versions) is not None


def test_an_entry_is_reproduced_exactly_where_both_sides_were_seen() -> None:
    seen = rows()
    for advisory in advisories():
        row = seen.get(advisory.id)
        shown = row is not None and row["affected"]["seen"] is True
        if row is not None and row["other"] is not None:
            shown = shown and row["other"]["seen"] is False
        assert shown is (advisory.database_specific.evidence == "reproduced"), advisory.id


def test_the_sides_of_a_row_lie_inside_and_outside_of_the_range() -> None:
    by_name = {advisory.id: advisory for advisory in advisories()}
    assert rows().keys() <= by_name.keys()
    for name, row in rows().items():
        advisory = by_name[name]
        assert affected(advisory, row["affected"]), name
        if row["other"] is None:
            assert fixed_in(advisory, Version(row["affected"]["versions"][advisory.package])) is None, name
        else:
            assert not affected(advisory, row["other"]), name


def test_the_number_of_rows_that_were_seen_on_both_sides() -> None:
    document = json.loads(RESULTS.read_text())
    both = [row for row in document["rows"] if row["affected"]["seen"] is True]
    both = [row for row in both if row["other"] is not None and row["other"]["seen"] is False]
    assert document["seen_on_both_sides"] == len(both) >= 40
