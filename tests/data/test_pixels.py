"""Pixels of a denoiser: the size that ``init`` writes, its steps, and the VAE that makes latents of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import diffusers
import pytest
import tiny_material
import torch
from fsdptool_diffusion.autoencoder import ImageEncoding
from fsdptool_diffusion.base import Denoiser
from fsdptool_diffusion.latents import open_latents
from fsdptool_diffusion.precompute import plan_work, run_work
from tiny_material import recipe_of

from fsdptool.api.starter import look_at, starting_pixels
from fsdptool.cli.app import run
from fsdptool.config.recipe import read_recipe
from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of, load_registry
from fsdptool.inspection.micro_batch import batch_spec
from fsdptool.modeling.objective import objective_for
from fsdptool.records.recipe import ModelChoice, Recipe
from fsdptool.source import resolve
from fsdptool.source.vae import vae_factor


@pytest.fixture
def shallow(pipelines: Mapping[str, Path], tmp_path: Path) -> Path:
    """Stable Diffusion with a VAE of two levels, which makes one latent of 2 x 2 pixels."""
    folder = copytree(pipelines["sd15"], tmp_path / "shallow")
    torch.manual_seed(0)
    diffusers.AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
    ).save_pretrained(str(folder / "vae"))
    return folder


@pytest.mark.parametrize(
    ("reference", "changes", "step", "size"),
    [
        ("sd1.5:unet", {}, 64, 512),
        ("sd1.5:unet", {"down_block_types": ["DownBlock2D"] * 2, "sample_size": 8}, 16, 64),
        ("sd2:unet-2.1", {}, 64, 768),
        ("sdxl:unet", {}, 32, 1024),
        ("sd3:medium", {"patch_size": 4}, 32, 1024),
        ("pixart-sigma:xl-1024", {"sample_size": 64}, 16, 512),
        ("dit:xl-2-256", {}, 16, 256),
        ("auraflow:v0.3", {}, 16, 1024),
        ("flux.1:dev", {}, 16, 1024),
        ("stable-cascade:stage-b", {}, 64, 1024),
        ("deepfloyd-if:i-medium-400m", {}, 8, 64),
    ],
)
def test_steps_and_sizes_follow_from_the_configuration(
    reference: str, changes: dict[str, Any], step: int, size: int
) -> None:
    spec = resolve(reference)
    family = load_registry().get(spec.family)
    assert isinstance(family, Denoiser)
    config = {**spec.config, **changes}
    assert (family.pixel_step(config), family.native_size(config)) == (step, (size, size))
    if not changes:
        # What the families say of the published models, whatever their configurations say.
        full = family.full(config)
        assert family.own_geometry(full) == family.geometry_for(full)


@pytest.mark.parametrize("name", ["sd15", "flux2", "sana"])
def test_the_factor_of_a_vae_is_what_it_does(name: str, pipelines: Mapping[str, Path]) -> None:
    encoded = ImageEncoding(pipelines[name], device="cpu").encode(torch.zeros(3, 1, 64, 64), frames=False)
    assert vae_factor(pipelines[name]) == 64 // encoded["latents"].shape[-1]


@pytest.mark.slow
def test_init_precompute_and_batches_of_a_pipeline_with_another_vae(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_material.pictures(tmp_path / "images", [(80, 70)] * 3 + [(24, 24)])
    assert run(["init", "shallow", "--data", "images"]) == 0
    recipe, spec = read_recipe("recipe.yaml"), resolve("shallow")
    # 16 latents of 2 pixels, each way.
    assert (recipe.batch.height, recipe.batch.width) == (32, 32)
    # As many tokens as the pipeline's tokenizer fills captions up to: the published model has 77.
    planned = {item.name: item.shape for item in batch_spec(spec, recipe)}
    assert planned["encoder_hidden_states"][1] == 16
    work = plan_work(recipe, spec, tmp_path / "c")
    run_work(work, rank=0, world=1, device="cpu")
    opened = open_latents(recipe, spec, recipe.data, work.folder, "all")
    batch = opened.collate([opened.samples.sample(number, 0) for number in range(2)])
    assert tuple(batch["latents"].shape[1:]) == planned["latents"][1:] == (4, 16, 16)


def test_a_vae_that_changes_changes_what_is_planned(
    shallow: Path, pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    recipe = recipe_of(shallow, tmp_path)
    before = batch_spec(resolve(str(shallow)), recipe)[0].shape
    copytree(pipelines["sd15"] / "vae", shallow / "vae", dirs_exist_ok=True)
    after = batch_spec(resolve(str(shallow)), recipe)[0].shape
    assert (before[2:], after[2:]) == ((32, 32), (8, 8))


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        # The step of this UNet is 16 pixels, and it was trained at 128.
        ([(400, 300)], (128, 128)),
        ([(80, 70)] * 2 + [(500, 500)], (64, 64)),
        ([(96, 300)], (96, 96)),
        ([(10, 10)], (16, 16)),
        ([], (128, 128)),
    ],
)
def test_a_start_has_no_more_pixels_than_the_pictures(
    sizes: list[tuple[int, int]], chosen: tuple[int, int], pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    spec = resolve(str(pipelines["sd15"]))
    objective = objective_for(Recipe(ModelChoice(spec.reference.id)), spec)
    look = look_at(str(tiny_material.pictures(tmp_path / "images", sizes)), objective) if sizes else None
    assert starting_pixels(spec, look) == chosen


def test_another_pipelines_vae_is_refused_before_anything_is_encoded(
    shallow: Path, pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    images = tiny_material.pictures(tmp_path / "images", [(64, 64)])
    spec = resolve(str(pipelines["sd15"]))
    with pytest.raises(
        ConfigError, match="makes a latent of 2 x 2 pixels, memory is planned for one of 8 x 8"
    ):
        plan_work(recipe_of(shallow, images), spec, tmp_path / "c")


@pytest.mark.parametrize("text", ["[]", "{", '{"_class_name": "AutoencoderKL", "block_out_channels": 3}'])
def test_a_vae_that_says_nothing_leaves_the_familys_own(text: str, shallow: Path) -> None:
    (shallow / "vae" / "config.json").write_text(text)
    spec = resolve(str(shallow))
    family: Any = family_of(spec)
    assert family.own_geometry(family.full(spec.config)).spatial == 8
