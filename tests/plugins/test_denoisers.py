"""Denoisers against diffusers' own pipelines: layouts, signs and schedules are theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdptool_diffusion.objectives import Epsilon

from fsdptool.errors import ConfigError
from fsdptool.families.registry import load_registry
from fsdptool.records.recipe import Batch, ModelChoice, Recipe
from fsdptool.testing.families import small_batch, small_model, small_spec


def test_cosine_schedule_is_that_of_diffusers() -> None:
    from diffusers import DDPMScheduler

    theirs = DDPMScheduler(beta_schedule="squaredcos_cap_v2").alphas_cumprod.double()
    steps = torch.arange(1000)
    batch = {"latents": torch.zeros(1000, 1, dtype=torch.float64), "timestep": steps}
    signal, spread = Epsilon(denoise=lambda *_: steps, schedule="cosine").coefficients(batch)
    assert torch.allclose(signal.flatten().square(), theirs, rtol=1e-3, atol=1e-7)
    assert torch.allclose(signal.square() + spread.square(), torch.ones(1000, 1, dtype=torch.float64))


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ConfigError, match="scaled_linear, linear or cosine"):
        Epsilon(denoise=lambda *_: torch.zeros(1), schedule="cosinus")


@pytest.mark.parametrize(("text", "frames", "height", "width"), [(7, 7, 4, 6), (3, 12, 8, 4)])
def test_minimax_h3_lays_its_sequence_out_as_the_pipeline_does(
    text: int, frames: int, height: int, width: int
) -> None:
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    sound = 9
    theirs = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(text), frames, height, width, sound, (1, 2, 2), 2, 2, 0
    )
    seen: dict[str, Any] = {}

    def model(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.update(arguments)
        return arguments["hidden_states"], arguments["audio_hidden_states"]

    noisy, audio = torch.randn(1, 4, frames, height, width), torch.randn(1, 2 * sound, 8)
    batch = {"audio": audio, "encoder_hidden_states": torch.randn(1, text, 16)}
    family: Any = load_registry().get("minimax-h3")
    video, heard = family.denoise(model, noisy, torch.tensor([0.25]), batch)
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    for name, expected in zip(names, theirs, strict=False):
        assert torch.allclose(seen[name].double(), expected.double(), rtol=1e-6, atol=1e-4), name
    assert seen["timestep"].tolist() == [0.75]
    assert torch.equal(video, -noisy) and torch.equal(heard, -audio), "tiles come back where they were"


def test_ideogram_4_lays_its_sequence_out_as_the_pipeline_does() -> None:
    from diffusers import Ideogram4Pipeline

    theirs = Ideogram4Pipeline._prepare_ids([5, 5], 2, 3, 5, torch.device("cpu"))
    seen: dict[str, Any] = {}

    def model(**arguments: Any) -> tuple[torch.Tensor]:
        seen.update(arguments)
        return (arguments["hidden_states"],)

    noisy = torch.randn(2, 4, 4, 6)
    family: Any = load_registry().get("ideogram-4")
    denoised = family.denoise(
        model, noisy, torch.tensor([0.25, 0.5]), {"encoder_hidden_states": torch.randn(2, 5, 8)}
    )
    for name, expected in zip(("position_ids", "segment_ids", "indicator"), theirs, strict=True):
        assert torch.equal(seen[name], expected), name
    assert seen["timestep"].tolist() == [0.75, 0.5]
    assert torch.equal(denoised, -noisy)


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 4, 6), (3, 5, 8)])
def test_cosmos_3_packs_its_sequence_as_the_pipeline_does(frames: int, height: int, width: int) -> None:
    from types import SimpleNamespace

    from diffusers import Cosmos3OmniPipeline

    family: Any = load_registry().get("cosmos3")
    small = small_model(family, family.flavours()["nano"])
    config: Any = small.model.config
    pipeline: Any = SimpleNamespace(transformer=small.model, vae_scale_factor_temporal=4)
    noisy = torch.randn(1, config.latent_channel, frames, height, width)
    text = Cosmos3OmniPipeline._prepare_text_segment(pipeline, [5, 9, 11], "cpu")
    vision = Cosmos3OmniPipeline._prepare_vision_segment(
        pipeline, noisy, False, text["vision_start_temporal_offset"], config.base_fps, text["und_len"], "cpu"
    )
    seen: dict[str, Any] = {}

    def model(**arguments: Any) -> tuple[list[torch.Tensor]]:
        seen.update(arguments)
        return ([arguments["vision_tokens"][0]],)

    model.config = config  # type: ignore[attr-defined]
    denoised = family.denoise(model, noisy, torch.tensor([0.25]), {"input_ids": torch.tensor([[5, 9, 11]])})
    assert torch.equal(denoised, noisy)
    for name in ("input_ids", "text_indexes", "vision_sequence_indexes", "vision_mse_loss_indexes"):
        assert torch.equal(seen[name], {**text, **vision}[name]), name
    assert seen["und_len"] == text["und_len"] and seen["vision_token_shapes"] == vision["vision_token_shapes"]
    assert seen["sequence_length"] == text["und_len"] + vision["num_vision_tokens"]
    theirs = torch.cat((text["text_mrope_ids"], vision["vision_mrope_ids"]), dim=1)
    assert torch.equal(seen["position_ids"].double(), theirs.double())
    assert seen["vision_timesteps"].tolist() == [250.0] * vision["num_noisy_vision_tokens"]


def test_qwen_image_2_1_puts_the_image_behind_the_text() -> None:
    from diffusers import QwenImage21Pipeline

    seen: dict[str, Any] = {}

    def model(**arguments: Any) -> tuple[torch.Tensor]:
        seen.update(arguments)
        text = arguments["encoder_hidden_states"]
        return (torch.cat((text[..., :4], arguments["hidden_states"]), dim=1),)

    noisy = torch.randn(2, 4, 4, 6)
    batch = {"encoder_hidden_states": torch.randn(2, 5, 8), "encoder_hidden_states_mask": torch.ones(2, 5)}
    family: Any = load_registry().get("qwen-image-2.1")
    denoised = family.denoise(model, noisy, torch.tensor([0.25, 0.5]), batch)
    assert torch.equal(denoised, noisy)
    assert torch.equal(seen["hidden_states"], QwenImage21Pipeline._pack_latents(noisy, 2, 4, 4, 6))
    assert seen["img_mask"].tolist() == [[False] * 5 + [True] * 6] * 2
    assert seen["img_shapes"] == [[(1, 4, 6)]] * 2
    assert seen["timestep"].tolist() == [0.25, 0.5]


def test_stage_b_of_stable_cascade_is_shown_stage_c_and_is_larger() -> None:
    family = load_registry().get("stable-cascade")
    recipe = Recipe(model=ModelChoice("x"), batch=Batch(height=1024, width=768))
    flavours = family.flavours()
    stage_c, stage_b = (
        {item.name: item.shape for item in family.batch_spec(flavours[name].config, recipe)}
        for name in ("stage-c", "stage-b")
    )
    assert stage_b["effnet"] == stage_c["latents"] == (1, 16, 24, 18)
    assert stage_b["latents"] == (1, 4, 256, 192)


@pytest.mark.parametrize("name", ["ltx-2", "minimax-h3"])
def test_sound_is_trained_with_the_picture(name: str) -> None:
    family = load_registry().get(name)
    small = small_model(family, next(iter(family.flavours().values())))
    prediction = small.objective.predict(small.model, small.batch)
    assert prediction["prediction"].shape == small.batch["latents"].shape
    assert prediction["audio"].shape == small.batch["audio_latents"].shape
    both = small.objective.loss(prediction, small.batch)
    silent = {**prediction, "audio": small.batch["audio_noise"] - small.batch["audio_latents"]}
    assert both > small.objective.loss(silent, small.batch) > 0
    assert small.objective.distance(prediction, prediction, small.batch, 1.0) == 0


def test_the_second_stage_of_deepfloyd_is_shown_the_small_image() -> None:
    family = load_registry().get("deepfloyd-if")
    flavour = family.flavours()["i-medium-400m"]
    spec = small_spec(family, flavour)
    config = {**spec.config, "in_channels": 6, "class_embed_type": "timestep"}
    recipe = Recipe(
        model=ModelChoice("x"), batch=Batch(micro_batch=2, height=64, width=64, sequence_length=8)
    )
    specs = {item.name: item for item in family.batch_spec(config, recipe)}
    assert specs["latents"].shape == specs["condition"].shape == (2, 3, 64, 64)
    assert specs["class_labels"].shape == (2,)
    assert "condition" not in {item.name for item in small_batch(family, spec)[1]}
