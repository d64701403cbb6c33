"""Models that cannot be built or understood: one clear diagnostic each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdptool.cli.app import run
from fsdptool.families import registry
from fsdptool.families.protocol import Family, Flavour, Match, Objective, TensorSpec
from fsdptool.records.recipe import Recipe
from fsdptool.testing.families import assert_conforms


class Inside(nn.Module):
    """A module that is its own grandchild."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.child = nn.Module()
        self.child.parent = self


class Raises(nn.Module):
    """A constructor that fails with two lines."""

    def __init__(self) -> None:
        super().__init__()
        raise KeyError("first\nsecond")


class Endless(nn.Module):
    """A constructor that recurses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Endless()


class Nothing(nn.Module):
    """A model without parameters."""


class Greedy(nn.Module):
    """A tensor beyond what 64 bits can count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2**40, 2**40))


CLASSES: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Inside, Raises, Endless, Nothing, Greedy)
}


class BadFamily(Family):
    """Builds each of them; a flavour per class."""

    name = "bad"
    library = "own"
    default_objective = "causal_lm"

    def flavours(self) -> Mapping[str, Flavour]:
        return {name.lower(): Flavour(name.lower(), {}, name) for name in CLASSES}

    def match(self, config: Mapping[str, Any]) -> Match | None:
        return None

    def model_class(self, config: Mapping[str, Any]) -> str:
        return "Nothing"

    def build(self, config: Mapping[str, Any], *, model_class: str, **_: Any) -> nn.Module:
        return CLASSES[model_class]()

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        return ()

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        return {}


@pytest.fixture
def bad_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "bad_models", sys.modules[__name__])
    entry = EntryPoint("bad", "bad_models:BadFamily", registry.GROUP)
    # Only of this group: what imports the function meanwhile keeps it.
    of_group = {registry.GROUP: [entry]}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: of_group.get(group, []))
    registry.load_registry.cache_clear()
    assert registry.load_registry().diagnostics == ()
    yield
    registry.load_registry.cache_clear()


@pytest.mark.parametrize(
    ("flavour", "words"),
    [
        ("inside", "contains itself"),
        ("raises", "cannot be built: KeyError"),
        ("endless", "recurses infinitely"),
        ("nothing", "has no parameters"),
        ("greedy", "cannot be built"),
    ],
)
def test_one_line_each(
    bad_family: None, capsys: pytest.CaptureFixture[str], flavour: str, words: str
) -> None:
    assert run(["detect", f"bad:{flavour}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert [line.partition(":")[0] for line in shown.err.splitlines()] == ["error", "help"]


def test_ties_in_a_circle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two names that point at each other are one tensor, or one clear line; never a hang."""
    from transformers import LlamaForCausalLM

    from fsdptool.errors import ModelError
    from fsdptool.inspection.api import describe
    from fsdptool.inspection.build import build
    from fsdptool.source import resolve

    spec = resolve("llama3:8b", overrides={"num_hidden_layers": 2, "tie_word_embeddings": True})
    circle = {
        "lm_head.weight": "model.embed_tokens.weight",
        "model.embed_tokens.weight": "lm_head.weight",
    }
    kept = LlamaForCausalLM._tied_weights_keys
    try:
        LlamaForCausalLM._tied_weights_keys = circle
        anatomy = describe(build(spec), spec)
    except ModelError as error:
        assert "\n" not in error.message
        assert error.help
    else:
        assert len(anatomy.ties) <= 1
    finally:
        LlamaForCausalLM._tied_weights_keys = kept


def test_remote_code_never_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mystery", "auto_map": {"AutoModel": "modeling_mystery.Mystery"}}'
    )
    assert run(["detect", str(tmp_path)]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "64"}, "expected int, got str"),
        ({"hidden_act": "nonsense"}, "nonsense"),
        ({"pad_token_id": 10**6}, "Padding_idx"),
        ({"quantization_config": "x"}, "LlamaForCausalLM"),
        ({"architectures": ["pipeline"]}, "pipeline is not the class of a model"),
        ({"architectures": ["AutoModel"]}, "AutoModel is not the class of a model"),
        ({"architectures": ["os.system"]}, "has no class 'os.system'"),
        ({"_class_name": "DDPMScheduler"}, "DDPMScheduler is not the class of a model"),
        ({"_class_name": "FluxTransformer2DModel", "num_layers": "many"}, "FluxTransformer2DModel"),
    ],
)
def test_a_refused_value_is_told_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.json"
    base = {} if "_class_name" in change else {"model_type": "llama", "hidden_size": 64}
    path.write_text(json.dumps({**base, **change}))
    assert run(["detect", str(path), "--no-cache"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    error, advice = shown.err.splitlines()
    assert error.startswith(f"error: {path}: ") and words in error
    assert advice.startswith("help: ")


def test_zero_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["detect", "llama3:8b", "--override", "num_hidden_layers=0", "--format", "json"]) == 0
    shown = capsys.readouterr().out
    assert "DET101" in shown
    assert "DET206" in shown


def test_the_conformance_test_names_every_problem() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_conforms(BadFamily())
    problems = str(caught.value)
    for name in ("bad:inside", "bad:raises", "bad:greedy"):
        assert name in problems
    assert "default objective 'causal_lm' is not among []" in problems


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["llama3:8b", "flux.1:schnell"])
def test_the_conformance_test_passes_what_ships(reference: str) -> None:
    family, _, flavour = reference.partition(":")
    (verdict,) = assert_conforms(registry.load_registry().get(family), flavours=[flavour])
    assert verdict.problems == ()
    assert verdict.wrap


@pytest.mark.parametrize("package", ["torchaudio", "not_a_package"])
def test_a_class_whose_package_is_missing_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    """transformers puts a stand-in of its own kind in the place of a class whose packages are missing."""
    import transformers
    from transformers.utils.import_utils import DummyObject

    name = "HiggsAudioV2TokenizerModel"
    stand_in = DummyObject(name, (), {"_backends": ["torch", package]})
    monkeypatch.setattr(sys.modules["fsdptool.families.bases.families"], "find_spec", absent(package))
    monkeypatch.setitem(vars(transformers), name, stand_in)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "higgs_audio_v2_tokenizer", "architectures": [name]}))
    assert run(["detect", str(path), "--no-cache"]) == 2
    said = capsys.readouterr().err
    assert f"{name} needs {package}, which is not installed" in said
    assert f"pip install {package}" in said


def absent(package: str) -> Callable[[str], Any]:
    return lambda name: None if name == package else object()
