"""Micro-batches of denoisers from cached samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdptool.errors import ConfigError
from fsdptool.families.bases.batches import time
from fsdptool.families.registry import load_registry
from fsdptool.families.synthetic import shrink
from fsdptool.records.recipe import Batch, ModelChoice, Objective, Recipe

UNIFORM = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)


def test_times_rise_with_the_draw_and_stay_inside() -> None:
    for options in ({}, {"timestep_sampling": "uniform"}, {"shift": 3.0}, {"logit_mean": 1.0}):
        times = time(UNIFORM, options)
        assert bool((times[1:] > times[:-1]).all())
        assert 0 < times[0] < times[-1] < 1


def test_logit_normal_has_its_moments() -> None:
    logits = torch.logit(time(UNIFORM, {"logit_mean": 0.5, "logit_std": 0.7}))
    assert logits.mean().item() == pytest.approx(0.5, abs=1e-6)
    assert logits.std().item() == pytest.approx(0.7, abs=0.01)


def test_shift_moves_the_middle_as_the_paper_says() -> None:
    half = torch.tensor(0.5, dtype=torch.float64)
    assert time(half, {"timestep_sampling": "uniform", "shift": 3.0}).item() == pytest.approx(0.75)


@pytest.mark.parametrize("options", [{"timestep_sampling": "cosine"}, {"shift": 0}, {"logit_std": -1}])
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        time(UNIFORM, options)
    assert next(iter(options)) in str(error.value)


def _sample(number: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    sample = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    sample["uniform"] = torch.rand((), generator=generator, dtype=torch.float64)
    sample["size"] = torch.tensor([100 + number, 120, 3, 4, 64, 64])
    return sample


@pytest.mark.parametrize("name", ["sd3", "flux.1", "sdxl", "cogview4"])
def test_cached_samples_train(name: str) -> None:
    family = load_registry().get(name)
    flavour = next(iter(family.flavours().values()))
    config = shrink(family, flavour.config, flavour.model_class)
    recipe = Recipe(
        model=ModelChoice(name), batch=Batch(micro_batch=2, sequence_length=8, height=64, width=64)
    )
    specs = {spec.name: spec for spec in family.batch_spec(config, recipe)}
    latents = specs["latents"].shape[1:]
    shapes = {"latents": latents, "noise": latents}
    shapes["prompt_embeds"] = specs["encoder_hidden_states"].shape[1:]
    for pooled in ("pooled_projections", "text_embeds"):
        if pooled in specs:
            shapes["pooled_prompt_embeds"] = specs[pooled].shape[1:]
    samples = [_sample(number, **shapes) for number in range(2)]
    batch = family.assemble(config, recipe, samples)  # type: ignore[attr-defined]
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    if "time_ids" in batch:
        assert batch["time_ids"].tolist() == [[100, 120, 3, 4, 64, 64], [101, 120, 3, 4, 64, 64]]
    if "original_size" in batch:
        assert batch["original_size"].tolist() == [[100, 120], [101, 120]]
        assert batch["crop_coords"].tolist() == [[3, 4], [3, 4]]
    again = family.assemble(config, recipe, samples)  # type: ignore[attr-defined]
    assert all(bool((batch[key] == again[key]).all()) for key in batch)
    torch.manual_seed(0)
    model = family.build(config, model_class=flavour.model_class)
    objective = family.objectives()[family.default_objective]()
    loss = objective.loss(objective.predict(model, batch), batch)
    loss.backward()
    assert torch.isfinite(loss)


def test_a_sample_without_text_is_named() -> None:
    family = load_registry().get("sd3")
    flavour = next(iter(family.flavours().values()))
    config = shrink(family, flavour.config, flavour.model_class)
    recipe = Recipe(model=ModelChoice("sd3"), batch=Batch(micro_batch=1, height=64, width=64))
    sample = _sample(0, latents=(16, 8, 8), noise=(16, 8, 8))
    with pytest.raises(ConfigError, match="has no prompt_embeds"):
        family.assemble(config, recipe, [sample])  # type: ignore[attr-defined]


def test_epsilon_draws_steps_alike_unless_told() -> None:
    family = load_registry().get("sd1.5")
    flavour = next(iter(family.flavours().values()))
    config = shrink(family, flavour.config, flavour.model_class)
    recipe = Recipe(
        model=ModelChoice("sd1.5"), batch=Batch(micro_batch=1, sequence_length=8, height=64, width=64)
    )
    sample = _sample(0, latents=(4, 8, 8), noise=(4, 8, 8), prompt_embeds=(8, 32))
    sample["uniform"] = torch.tensor(0.9, dtype=torch.float64)
    assert family.assemble(config, recipe, [sample])["timestep"].tolist() == [900]  # type: ignore[attr-defined]
    shifted = replace(recipe, objective=Objective(options={"shift": 2.0}))
    result = family.assemble(config, shifted, [sample])["timestep"].tolist()  # type: ignore[attr-defined]
    assert result == [int(1000 * 1.8 / 1.9)]
