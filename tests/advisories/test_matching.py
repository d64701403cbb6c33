"""A condition is true, false or open, and an open one is named only where something speaks for it."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from fsdptool.advisories.catalogue import advisories, affected_version, fixed_in, ranges
from fsdptool.advisories.facts import RunFacts
from fsdptool.advisories.matching import finding
from fsdptool.records.advisory import Advisory
from fsdptool.records.codec import from_json, to_json

VERSIONS = {"accelerate": (Version("1.12.0"),)}


def advisory(*condition: dict[str, Any], events: tuple[dict[str, str], ...] = (), **effect: Any) -> Advisory:
    """Return an entry of the list with another condition and other versions."""
    data = to_json(next(item for item in advisories() if item.package == "accelerate"))
    data["affected"][0]["ranges"][0]["events"] = list(events) or [{"introduced": "1.10"}, {"fixed": "1.13"}]
    given = {"unseen": (), "also": None, "condition": condition}
    data["database_specific"] |= given | effect
    return from_json(Advisory, data)


def verdict(entry: Advisory, values: dict[str, Any], *, is_launch: bool = False, **keys: Any) -> str | None:
    found = finding(entry, RunFacts(values, keys, is_launch), VERSIONS)
    return None if found is None else found.verdict


@pytest.mark.parametrize(
    ("test", "value", "expected"),
    [
        ({"equals": 2}, 2, "applies"),
        ({"equals": 2}, 1, None),
        ({"equals": True}, "true", "applies"),
        ({"any_of": ["lora", "qlora"]}, "qlora", "applies"),
        ({"any_of": ["embed_tokens"]}, ("q_proj", "embed_tokens"), "applies"),
        ({"any_of": ["embed_tokens"]}, ("q_proj",), None),
        ({"none_of": ["axolotl"]}, "trl", "applies"),
        ({"none_of": ["axolotl"]}, "axolotl", None),
        ({"none_of": ["axolotl"]}, None, "applies"),
        ({"greater": 1}, 2, "applies"),
        ({"greater": 1}, 1, None),
        ({"greater": 1}, -1, None),
        ({"present": True}, "x", "applies"),
        ({"present": True}, (), None),
        ({"present": False}, (), "applies"),
    ],
)
def test_a_test_compares_a_fact(test: dict[str, Any], value: Any, expected: str | None) -> None:
    assert verdict(advisory({"fact": test}), {"fact": value}) == expected


@pytest.mark.parametrize(
    ("test", "keys", "is_launch", "expected"),
    [
        ({"present": True}, {"key": 1}, False, "applies"),
        ({"present": True}, {}, False, None),
        ({"present": False}, {}, False, "applies"),
        ({"present": True}, {}, True, "may_apply"),
        ({"equals": "uint8", "default": "uint8"}, {}, False, "applies"),
        ({"equals": "uint8", "default": "uint8"}, {"key": "bfloat16"}, False, None),
        ({"equals": "uint8"}, {}, False, None),
        ({"none_of": ["uint8"]}, {}, False, "applies"),
    ],
)
def test_a_key_that_is_not_written_is_unknown_only_where_it_may_be_elsewhere(
    test: dict[str, Any], keys: dict[str, Any], is_launch: bool, expected: str | None
) -> None:
    entry = advisory({"fsdp": {"equals": 2}, "keys.key": test})
    assert verdict(entry, {"fsdp": 2}, is_launch=is_launch, **keys) == expected


def test_a_key_of_the_launcher_is_not_elsewhere() -> None:
    entry = advisory({"fsdp": {"equals": 2}, "keys.dynamo_use_regional_compilation": {"equals": True}})
    assert verdict(entry, {"fsdp": 2}, is_launch=True) is None


def test_something_must_speak_for_an_open_condition() -> None:
    open_condition = {"method": {"equals": "lora"}, "fsdp": {"equals": 2}, "program": {"equals": "trl"}}
    assert verdict(advisory(open_condition), {"fsdp": 2, "program": "trl"}) == "may_apply"
    assert verdict(advisory(open_condition), {"program": "trl"}) is None
    assert verdict(advisory(open_condition), {"fsdp": 2}, is_launch=True) is None
    excluded = {"method": {"equals": "lora"}, "objective": {"none_of": ["dpo"]}}
    assert verdict(advisory(excluded), {"objective": "sft"}) is None


def test_without_a_repair_the_file_must_show_the_condition() -> None:
    condition = {"fsdp": {"equals": 2}, "optimizer": {"equals": "adamw_bnb_8bit"}}
    entry = advisory(condition, events=({"introduced": "1.10"},))
    assert verdict(entry, {"fsdp": 2}) is None
    assert verdict(entry, {"fsdp": 2, "optimizer": "adamw_bnb_8bit"}) == "applies"
    unseen = advisory(condition, events=({"introduced": "1.10"},), unseen=("a run is resumed",))
    assert verdict(unseen, {"fsdp": 2, "optimizer": "adamw_bnb_8bit"}) == "may_apply"


def test_one_of_several_conditions_is_enough() -> None:
    entry = advisory({"fsdp": {"equals": 1}}, {"mesh.tp": {"greater": 1}})
    assert verdict(entry, {"fsdp": 2, "mesh.tp": 2}) == "applies"
    assert verdict(entry, {"fsdp": 2, "mesh.tp": 1}) is None


def test_what_is_unknown_is_named() -> None:
    entry = advisory({"fsdp": {"equals": 2}, "method": {"equals": "lora"}}, unseen=("a run is resumed",))
    found = finding(entry, RunFacts({"fsdp": 2}, {}, True), VERSIONS)
    assert found is not None
    assert found.unknown == ("whether adapters or a quantised base are trained", "whether a run is resumed")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.9.9", None),
        ("1.10", "1.12"),
        ("1.11.1+cu128", "1.12"),
        ("1.12.0", None),
        ("1.14", None),
        ("1.15", "1.16"),
    ],
)
def test_a_package_may_have_several_ranges(version: str, expected: str | None) -> None:
    events = ({"introduced": "1.10"}, {"fixed": "1.12"}, {"introduced": "1.15"}, {"fixed": "1.16"})
    entry = advisory({"fsdp": {"equals": 2}}, events=events)
    installed = Version(version)
    assert (affected_version(entry, {"accelerate": (installed,)}) is not None) is (expected is not None)
    assert fixed_in(entry, installed) == expected


def test_further_packages_must_be_affected_too() -> None:
    entry = advisory({"fsdp": {"equals": 2}}, also={"torch": ["<2.7", ">=2.12"]})
    for torch, expected in (("2.6.0+cu124", True), ("2.9.1", False), ("2.13.0", True)):
        versions = {**VERSIONS, "torch": (Version(torch),)}
        assert (affected_version(entry, versions) is not None) is expected
    assert affected_version(entry, VERSIONS) is None


@pytest.mark.parametrize(
    "events",
    [
        ({"fixed": "1.0"},),
        ({"introduced": "1.0"}, {"introduced": "2.0"}),
        ({"introduced": "2.0"}, {"fixed": "1.0"}),
    ],
)
def test_events_that_are_no_range_are_refused(events: tuple[dict[str, str], ...]) -> None:
    with pytest.raises(ValueError, match=r"must alternate|before it begins"):
        ranges(advisory({"fsdp": {"equals": 2}}, events=events))
