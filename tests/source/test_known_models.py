"""Names of models, and the sizes of the catalogue that they stand for."""

from __future__ import annotations

import pytest

from fsdptool.families.registry import load_registry
from fsdptool.source.known_models import family_of_name, layer_classes_of


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3.1:8b"),
        ("NousResearch/Meta-Llama-3.1-8B", "llama3.1:8b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama3.1:8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-moe:30b-a3b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5:7b"),
        ("user/qwen-2.5-3b-instruct-multiturn-sft", "qwen2.5:3b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl:7b"),
        ("black-forest-labs/FLUX.1-Krea-dev", "flux.1:dev"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl:unet"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5:7b"),
        ("models/bigscience_bloom-3b", "bloom:3b"),
        ("gpt2", "gpt2:small"),
    ],
)
def test_a_name_stands_for_a_size(name: str, family: str) -> None:
    assert family_of_name(name)[0] == family


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-7B",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "meta-llama/Llama-3.2-3B",
        "./qwen",
        "org/Qwen2.5-7B-eagle3",
        "org/my-gpt2-large-clone-of-something-vision",
        "",
    ],
)
def test_other_shapes_are_not_guessed(name: str) -> None:
    assert family_of_name(name)[0] is None


def test_every_published_id_of_a_language_model_is_known_without_a_note() -> None:
    llama = load_registry().get("llama3.1")
    for flavour in llama.flavours().values():
        assert flavour.hub_id is not None
        assert family_of_name(flavour.hub_id) == (f"llama3.1:{flavour.name}", None)


def test_layers_are_named_as_recorded_or_as_transformers_names_them() -> None:
    assert layer_classes_of("wan2.1:t2v-1.3b") == ("WanTransformerBlock",)
    assert layer_classes_of("qwen2.5:7b") == ("Qwen2DecoderLayer",)
    assert layer_classes_of(None) == ()
