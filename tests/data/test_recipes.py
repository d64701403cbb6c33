"""Every recipe under examples/ is read, resolved and grouped; its batches have the right shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdptool.config.recipe import read_recipe
from fsdptool.families.registry import family_of
from fsdptool.inspection import inspect
from fsdptool.modeling.objective import objective_for
from fsdptool.source import resolve_choice, with_places
from fsdptool.training.data import build_batches

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))
METHODS = {"full", "lora", "distillation"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_there_is_a_recipe_per_objective_and_method() -> None:
    wanted = {
        f"{kind}_{method}"
        for kind in ("decoder", "moe", "encoder_masked_lm", "classification", "summarisation")
        for method in METHODS
    }
    wanted |= {f"{kind}_{method}" for kind in ("flux", "sd3", "sdxl", "wan") for method in METHODS}
    assert wanted <= {recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_gives_the_batch_its_family_names(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # data beside the recipe is found from anywhere
    recipe = with_places(read_recipe(path), path.parent)
    spec = resolve_choice(recipe.model, path.parent)
    assert path.stem.endswith(recipe.method.name)
    assert 100_000 < inspect(spec).total_parameters < 10_000_000
    family = family_of(spec)
    objective = objective_for(recipe, spec)
    assert objective.name in family.objectives()
    if recipe.method.distillation is not None:
        teacher = resolve_choice(recipe.method.distillation.teacher, path.parent)
        larger = inspect(teacher).total_parameters > inspect(spec).total_parameters
        assert larger or objective.needs_teacher, "a reference model is the model itself"
    batches = build_batches(recipe, spec, rank=1, world=2, cache=cache)
    step = next(batches)
    batches.close()
    wanted = {item.name: (item.shape, item.dtype) for item in family.batch_spec(spec.config, recipe)}
    for batch in step:
        results = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in batch.items()}
        assert results == wanted
