"""The families we ship: complete as data, cheap to list, and each conforms as anybody's must."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdptool.errors import ConfigError, ModelError
from fsdptool.families.protocol import Family
from fsdptool.families.registry import load_registry
from fsdptool.inspection.build import build
from fsdptool.memory.tracing.fake_tensors import FollowedValues, MicroBatchConditions
from fsdptool.memory.tracing.micro_batch import run_trace
from fsdptool.modeling.objective import Task
from fsdptool.records.recipe import Batch, ModelChoice, Recipe
from fsdptool.testing.families import assert_conforms, small_batch, small_spec

FAMILIES = [family.name for family in load_registry().all() if family.flavours()]


def test_everything_promised_is_there() -> None:
    flavours = [flavour for name in FAMILIES for flavour in load_registry().get(name).flavours().values()]
    assert len(FAMILIES) >= 137
    assert len(flavours) >= 286
    assert len({flavour.model_class for flavour in flavours}) >= 110
    for flavour in flavours:
        assert flavour.parameters, flavour
        assert flavour.facts["source"], flavour
        difference = flavour.facts.get("published_difference")
        assert not difference or flavour.facts["published_why"], flavour


def test_listing_imports_no_library() -> None:
    program = (
        "import json, sys\n"
        "from fsdptool.families.registry import load_registry\n"
        "families = load_registry().all()\n"
        "flavours = sum(len(family.flavours()) for family in families)\n"
        "match = load_registry().match({'model_type': 'llama'}).name\n"
        "names = [load_registry().get('generic').model_class({'model_type': 'afmoe'})]\n"
        "heavy = [n for n in ('torch', 'transformers', 'diffusers', 'numpy') if n in sys.modules]\n"
        "print(json.dumps([flavours, match, names, heavy]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    flavours, match, names, heavy = json.loads(done.stdout)
    assert flavours >= 227
    assert match == "llama"
    assert names == ["AfmoeForCausalLM"]
    assert heavy == []


def test_every_flavours_own_configuration_finds_a_family_of_its_kind() -> None:
    """A downloaded config.json is claimed by the family whose class would build it."""
    registry = load_registry()
    for name in FAMILIES:
        for flavour in registry.get(name).flavours().values():
            owner = registry.match(flavour.config)
            assert owner.precedence == 0, (name, flavour.name)
            assert owner.library == registry.get(name).library
            assert owner.model_class(flavour.config) == flavour.model_class


@pytest.mark.parametrize(
    ("family", "flavour", "owner"),
    [
        ("sdxl", "unet", "sdxl"),
        ("kolors", "unet", "kolors"),
        ("sd1.5", "unet", "sd1.5"),
        ("sd2", "unet-2.1", "sd2"),
        ("llama3.1", "8b", "llama"),
        ("wan2.2", "ti2v-5b", "wan2.1"),
        ("kimi-k2", "instruct", "deepseek-v3"),
        ("deepfloyd-if", "i-large-900m", "deepfloyd-if"),
        ("stable-cascade", "stage-b", "stable-cascade"),
        ("cosmos3", "super-t2i", "cosmos3"),
    ],
)
def test_the_most_specific_family_claims_a_configuration(family: str, flavour: str, owner: str) -> None:
    registry = load_registry()
    assert registry.match(registry.flavour(family, flavour).config).name == owner


def _one_of_each_class() -> dict[str, list[str]]:
    """Return sizes by family: one of each class that an objective trains, whatever the families are named."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for name in FAMILIES:
        family: Family = load_registry().get(name)
        for flavour in family.flavours().values():
            key = (flavour.model_class, family.objective_for(flavour.config))
            found.setdefault(key, (name, flavour.name))
    cases: dict[str, list[str]] = {}
    for name, size in found.values():
        cases.setdefault(name, []).append(size)
    return cases


@pytest.mark.slow
@pytest.mark.sampled(every=2, whole=3)
@pytest.mark.parametrize(("name", "sizes"), _one_of_each_class().items())
def test_conforms(name: str, sizes: list[str]) -> None:
    assert_conforms(load_registry().get(name), flavours=sizes)


@pytest.mark.sampled(every=9, whole=3)
@pytest.mark.parametrize(
    "name",
    [
        *("llama3", "gpt2", "qwen3-moe", "deepseek-v3", "mamba", "bert", "t5", "whisper", "vit", "clip"),
        *("llava", "paligemma", "gemma3-vlm", "llama4", "mllama", "qwen3-vl", "qwen3.5-moe", "gemma4"),
        *("flux.1", "sd3", "sdxl", "wan2.1", "qwen-image", "qwen-image-2.1", "cosmos", "cosmos3", "svd"),
        *("ltx-2", "minimax-h3", "minimax-music-3", "krea-2", "ideogram-4", "flux.3"),
        *("stable-cascade", "deepfloyd-if"),
    ],
)
def test_the_same_objective_runs_on_fake_tensors(name: str) -> None:
    """What ``train`` runs is what ``plan`` traces: it may look only at values that the batch spec fixes."""
    family = load_registry().get(name)
    spec = small_spec(family, next(iter(family.flavours().values())))
    _, tensors = small_batch(family, spec)
    objective = family.objectives()[spec.objective or ""]()
    half = torch.bfloat16
    conditions = MicroBatchConditions("cpu", half, inputs=half, exact=family.exact_inputs)
    traced = run_trace(build(spec), Task(objective), tensors, conditions, values=FollowedValues.FIXED)
    assert traced.known and traced.gradients


def _recipe(**sizes: Any) -> Recipe:
    return Recipe(model=ModelChoice("x"), batch=Batch(**sizes))


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("gpt2", {"sequence_length": 2048}, "has 1024 positions"),
        ("bert", {"sequence_length": 513}, "has 512 positions"),
        ("roberta", {"sequence_length": 513}, "has 512 positions"),
        ("clip", {"sequence_length": 78}, "has 77 positions"),
        ("llama3", {"sequence_length": 1}, "at least two tokens"),
        ("sdxl", {"height": 1000}, "multiple of 32 pixels"),
        ("flux.1", {"width": 1025}, "multiple of 16 pixels"),
        ("wan2.1", {"frames": 80}, "multiple of 4 plus 1"),
        ("minimax-h3", {"frames": 121}, "multiple of 17 plus 5"),
        ("minimax-h3", {"micro_batch": 2}, "one sample at a time"),
        ("cosmos3", {"micro_batch": 2}, "one sample at a time"),
        ("cosmos3", {"height": 712}, "multiple of 16 pixels"),
        ("qwen-image-2.1", {"width": 1040}, "multiple of 32 pixels"),
        ("deepfloyd-if", {"height": 60}, "multiple of 8 pixels"),
        ("llava", {"sequence_length": 128}, r"an image takes 576 tokens of it\nhelp: use at least 578$"),
        (
            "qwen2-audio",
            {"sequence_length": 100},
            r"30 seconds of speech take 750 tokens of it\nhelp: use at least 752$",
        ),
        ("qwen2.5-vl", {"sequence_length": 100}, r"takes 256 tokens .*\nhelp: .* or a smaller image"),
        ("wav2vec2", {"sequence_length": 100}, "too short for two frames"),
    ],
)
def test_sizes_that_do_not_suit_are_named(family: str, sizes: dict[str, int], message: str) -> None:
    result = load_registry().get(family)
    flavour = next(iter(result.flavours().values()))
    with pytest.raises(ConfigError, match=message):
        result.batch_spec(flavour.config, _recipe(**sizes))


def test_rotary_models_run_beyond_their_positions() -> None:
    family = load_registry().get("llama3")
    specs = family.batch_spec(family.flavours()["8b"].config, _recipe(sequence_length=131_072))
    assert specs[0].shape == (1, 131_072)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama3", {"hidden_size": "wide"}, "hidden_size"),
        ("llama3", {"num_hidden_layers": -1}, "LlamaForCausalLM|LlamaConfig"),
        ("llama3", {"hidden_size": 10**18}, "LlamaForCausalLM"),
        ("flux.1", {"num_layers": "many"}, "FluxTransformer2DModel"),
    ],
)
def test_bad_values_are_one_line(family: str, change: dict[str, Any], message: str) -> None:
    result = load_registry().get(family)
    flavour = next(iter(result.flavours().values()))
    with torch.device("meta"):
        try:
            result.build({**flavour.config, **change}, model_class=flavour.model_class)
        except ModelError as error:
            assert "\n" not in str(error)
            import re

            assert re.search(message, str(error))
        else:
            assert change == {"num_hidden_layers": -1}, "only a model without layers may build"


def test_an_unknown_class_says_what_to_do() -> None:
    family = load_registry().get("generic")
    with pytest.raises(ModelError, match="has no class 'NoSuchForCausalLM'") as error:
        family.build({"model_type": "nosuch"}, model_class="NoSuchForCausalLM")
    assert error.value.help is not None and "--trust-remote-code" in error.value.help


def test_code_of_the_models_own_needs_the_flag() -> None:
    family = load_registry().get("generic")
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    with pytest.raises(ModelError, match="exists only as code that comes with the model") as error:
        family.build(config, model_class="OwnForCausalLM")
    assert error.value.help is not None and "--trust-remote-code" in error.value.help


def test_dropping_whole_layers_is_off() -> None:
    """A coin toss per layer would make ranks disagree on which units to gather."""
    family = load_registry().get("wav2vec2")
    flavour = family.flavours()["base"]
    with torch.device("meta"):
        model = family.build({**flavour.config, "layerdrop": 0.5}, model_class=flavour.model_class)
    assert model.config.layerdrop == 0  # type: ignore[union-attr]


def test_experts_are_lora_targets_only_where_there_are_experts() -> None:
    family = load_registry().get("gemma4")
    assert family.lora_targets(family.flavours()["26b-a4b"].config).parameters
    assert not family.lora_targets(family.flavours()["31b"].config).parameters


def test_images_change_the_inputs_with_their_size() -> None:
    family = load_registry().get("qwen2.5-vl")
    config = family.flavours()["3b"].config
    small = _recipe(height=224, width=224)
    large = replace(small, batch=Batch(height=448, width=448))
    sizes = [
        {spec.name: spec for spec in family.batch_spec(config, recipe)}["pixel_values"].shape[1]
        for recipe in (small, large)
    ]
    assert sizes[1] == 4 * sizes[0] == 4 * (224 // 14) ** 2
