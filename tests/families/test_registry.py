"""Plugins that work, break, collide or speak another protocol."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fsdptool.errors import ReferenceError as BadReference
from fsdptool.families.registry import FamilyRegistry, family_digest, load_registry, read_registry

PLUGIN = """
from fsdptool.families.protocol import Family, Flavour, Match

class Base(Family):
    library = "own"
    default_objective = "causal_lm"
    def flavours(self):
        return {"small": Flavour("small", {"model_type": "toy"}, "Toy")}
    def match(self, config):
        return Match(1.0, "toy") if config.get("model_type") == self.name else None
    def model_class(self, config):
        return "Toy"
    def build(self, config, **_):
        raise NotImplementedError
    def batch_spec(self, config, recipe):
        return ()
    def objectives(self):
        return {}

class Toy(Base):
    name = "toy"

class Rival(Base):
    name = "toy"

class Twin(Base):
    name = "twin"
    def match(self, config):
        return Match(1.0, "twin") if config.get("model_type") == "toy" else None

class Old(Base):
    name = "old"
    api_version = 99

class Nameless(Base):
    pass

class Colon(Base):
    name = "a:b"

class Raises(Base):
    name = "raises"
    def match(self, config):
        raise KeyError("boom")

def several():
    yield Toy()
    yield Twin()

def explodes():
    raise RuntimeError("two\\nlines")

def leaves():
    raise SystemExit(3)

number = 7
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "registry_plugin.py"
    path.write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop("registry_plugin", None)


def registry(*values: str) -> FamilyRegistry:
    return read_registry(EntryPoint(f"e{i}", value, "fsdptool.families") for i, value in enumerate(values))


@pytest.mark.parametrize("value", ["registry_plugin:Toy", "registry_plugin:several"])
def test_classes_and_callables_are_families(plugin: Path, value: str) -> None:
    families = registry(value)
    assert families.diagnostics == ()
    assert families.get("toy").name == "toy"
    assert families.flavour("toy", "small").model_class == "Toy"


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("registry_plugin:explodes", "DET001", "RuntimeError: two lines"),
        ("registry_plugin:leaves", "DET001", "SystemExit"),
        ("registry_plugin:missing", "DET001", "AttributeError"),
        ("no_such_plugin_module:x", "DET001", "ModuleNotFoundError"),
        ("registry_plugin:number", "DET001", "names a int"),
        ("registry_plugin:Nameless", "DET001", "has no name"),
        ("registry_plugin:Colon", "DET001", "colon"),
        ("registry_plugin:Old", "DET002", "protocol 99"),
    ],
)
def test_a_broken_plugin_is_one_finding_and_others_live(
    plugin: Path, value: str, code: str, words: str
) -> None:
    families = registry(value, "registry_plugin:Twin")
    assert [finding.code for finding in families.diagnostics] == [code]
    assert words in families.diagnostics[0].message
    assert "\n" not in families.diagnostics[0].message
    assert [family.name for family in families.all()] == ["twin"]


def test_two_plugins_with_one_name_are_both_named_and_neither_is_used(plugin: Path) -> None:
    families = registry("registry_plugin:Toy", "registry_plugin:Rival")
    assert [finding.code for finding in families.diagnostics] == ["DET003", "DET003"]
    assert families.all() == ()
    with pytest.raises(BadReference, match=r"registered by .*Toy.* and .*Rival"):
        families.get("toy")


def test_equal_claims_are_an_error(plugin: Path) -> None:
    families = registry("registry_plugin:several")
    with pytest.raises(BadReference, match="matched equally by 'toy'"):
        families.match({"model_type": "toy"})
    with pytest.raises(BadReference, match="no installed family matches a configuration with model_type 'x'"):
        families.match({"model_type": "x"})


def test_a_match_that_raises_is_reported_once(plugin: Path) -> None:
    families = registry("registry_plugin:Raises", "registry_plugin:Toy")
    for _ in range(2):
        assert families.match({"model_type": "toy"}).name == "toy"
    assert [finding.code for finding in families.diagnostics] == ["DET001"]


def test_near_misses_are_suggested_and_never_taken() -> None:
    loaded = load_registry()
    for wrong, right in (("lama3", "llama3"), ("LLAMA3", "llama3"), ("flux", "flux.1")):
        with pytest.raises(BadReference) as caught:
            loaded.get(wrong)
        assert right in (caught.value.help or "")
    with pytest.raises(BadReference) as caught:
        loaded.flavour("llama3", "8B")
    assert "llama3:8b" in (caught.value.help or "")
    with pytest.raises(BadReference, match="'xyzzy'"):
        loaded.get("xyzzy")


def test_what_ships_loads_without_findings() -> None:
    loaded = load_registry()
    assert loaded.diagnostics == ()
    assert len([family for family in loaded.all() if family.flavours()]) >= 117
    assert sum(len(family.flavours()) for family in loaded.all()) >= 225


def test_the_digest_follows_the_plugins_files(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdptool.families import registry as module

    families = registry("registry_plugin:Toy")
    monkeypatch.setattr(module, "load_registry", lambda: families)
    module._package_digest.cache_clear()
    before = family_digest("toy")
    plugin.write_text(PLUGIN + "\n# edited\n")
    module._package_digest.cache_clear()
    assert family_digest("toy") != before
