"""Denoisers fed from the cache, held against their own pipelines.

Each pipeline runs on one of our cached latents and its caption, with a scheduler that hands latents on
unchanged. What it tells the scheduler must be what the family's ``denoise`` returns for the cached
sample, and what it gives the VAE to decode must be what the VAE made of the picture: encoders,
templates, lengths, masks, packing, positions, time, signs and normalisation are compared at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny_material
import torch
from fsdptool_diffusion.precompute import plan_work, run_work
from PIL import Image
from tiny_material import recipe_of
from tiny_pipelines import PIPELINES, VIDEO

from fsdptool.families.registry import family_of
from fsdptool.source import resolve
from fsdptool.training.data import build_batches

pytestmark = pytest.mark.slow

LENGTHS = {"flux2": 48, "hunyuanvideo": 32, "kolors": 256, "lumina2": 48, "qwenimage": 48, "sd3": 32}
FRAMES = {"mochi": 7}
UNGUIDED = {"zimage": 0.0}
CAPTIONS = ("a red cat", "the small blue dog on a big mat")


class Decoded(Exception):
    """Ends a pipeline where it would decode."""


def material(name: str, folder: Path) -> list[torch.Tensor]:
    """Write two pictures or clips with captions; return their pixels, [channels, frames, 64, 64]."""
    frames = frames_of(name)
    if frames:
        tiny_material.clips(folder, 2, frames, (64, 64), stills=True)
    else:
        tiny_material.pictures(folder, [(64, 64)] * 2)
    results = []
    for number, caption in enumerate(CAPTIONS):
        place = folder / str(number) if frames else folder / f"{number:03d}.png"
        place.with_suffix(".txt").write_text(caption, encoding="utf-8")
        files = sorted(place.iterdir()) if frames else [place]
        values = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
        results.append(torch.from_numpy(values).permute(3, 0, 1, 2).float() / 127.5 - 1)
    return results


def frames_of(name: str) -> int | None:
    return FRAMES.get(name, 9) if name in VIDEO else None


def packed(name: str, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    """Lay latents out as the pipeline hands them to its scheduler."""
    if name in ("flux", "chroma", "qwenimage"):
        packed_latents: torch.Tensor = pipeline._pack_latents(latents, *latents.shape)
    elif name == "flux2":
        packed_latents = pipeline._pack_latents(latents)
    elif name == "ltx":
        packed_latents = pipeline._pack_latents(latents, 1, 1)
    elif name == "cogvideox":
        packed_latents = latents.transpose(1, 2)
    else:
        packed_latents = latents
    return packed_latents


def watch(name: str, pipeline: Any, latents: torch.Tensor, **given: Any) -> dict[str, Any]:
    """Run a pipeline on latents; return what its scheduler and its VAE are given at the last step."""
    seen: dict[str, Any] = {}

    def step(output: torch.Tensor, timestep: Any, sample: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        seen.update(output=output, time=float(timestep))
        return (sample,)

    def decode(latents: torch.Tensor, *_: Any, **__: Any) -> None:
        seen["decoded"] = latents
        raise Decoded

    pipeline.set_progress_bar_config(disable=True)
    if name == "hidream":  # it scales every size to this many pixels
        pipeline.default_sample_size = 8
    if name == "chroma":
        # Its mask is a number that attention adds (diffusers 0.42.1, issue 12116): nothing would be masked.
        extended = pipeline._prepare_attention_mask

        def masked(**given: Any) -> Any:
            extended_batch = extended(**given)
            return None if extended_batch is None else extended_batch.bool()

        pipeline._prepare_attention_mask = masked
    pipeline.scheduler.step, pipeline.vae.decode = step, decode
    wanted = {
        "height": 64,
        "width": 64,
        "num_frames": frames_of(name),
        "num_inference_steps": 2,
        "guidance_scale": UNGUIDED.get(name, 1.0),
        "true_cfg_scale": 1.0,
        "use_resolution_binning": False,
        "latents": latents if name == "flux2" else packed(name, pipeline, latents),
        "output_type": "pt",
        **given,
    }
    known = inspect.signature(type(pipeline).__call__).parameters
    with pytest.raises(Decoded):
        pipeline(**{key: value for key, value in wanted.items() if key in known})
    return seen


def opened(folder: Path) -> Any:
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(str(folder))
    if isinstance(pipeline.scheduler, diffusers.EulerDiscreteScheduler):
        # It scales what the denoiser sees; noise prediction is trained on unit variance.
        pipeline.scheduler = diffusers.DDIMScheduler.from_config(pipeline.scheduler.config)
    return pipeline


@pytest.mark.sampled(every=2, whole=2)
@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_a_family_is_fed_what_its_pipeline_feeds_it(
    name: str, pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    pixels = material(name, tmp_path / "data")
    length = LENGTHS.get(name, 16)
    recipe = recipe_of(pipelines[name], tmp_path / "data", frames=frames_of(name), length=length)
    spec = resolve(str(pipelines[name]))
    family: Any = family_of(spec)
    done = run_work(plan_work(recipe, spec, tmp_path / "c"), rank=0, world=1, device="cpu")
    assert (done.finished, done.pictures, done.made) == (True, 2, 1)
    loader = build_batches(recipe, spec, cache=tmp_path / "c")
    batch = loader._collate([loader._samples.sample(number, 0) for number in range(2)])
    wanted = {item.name: item for item in family.batch_spec(spec.config, recipe)}
    assert {key: (tuple(value.shape), str(value.dtype)) for key, value in batch.items()} == {
        key: (item.shape, f"torch.{item.dtype}") for key, item in wanted.items()
    }

    pipeline = opened(pipelines[name])
    model = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
    outputs = []
    for number, caption in enumerate(CAPTIONS):
        raw = (
            pixels[number][None] if frames_of(name) or name == "qwenimage" else pixels[number].transpose(0, 1)
        )
        with torch.no_grad():
            encoded = pipeline.vae.encode(raw)
        mean = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
        still = ((pixels[number][:, 0].permute(1, 2, 0) + 1) * 127.5).round().numpy().astype(np.uint8)
        seen = watch(
            name,
            opened(pipelines[name]),
            batch["latents"][number : number + 1],
            prompt=caption,
            image=Image.fromarray(still) if name == "wan-i2v" else None,
            max_sequence_length=length - 16 if name == "sd3" else length,
        )
        torch.testing.assert_close(seen["decoded"], mean, atol=1e-4, rtol=1e-4)
        outputs.append(seen["output"])
    reverse = getattr(pipeline.scheduler.config, "invert_sigmas", False)  # Mochi counts towards the video
    if spec.objective == "flow_matching":
        time = torch.full((2,), seen["time"] / 1000)
        time = 1 - time if reverse else time
    else:
        time = torch.full((2,), int(seen["time"]))
    with torch.no_grad():
        ours = family.denoise(model, batch["latents"], time, batch)
    for number, output in enumerate(outputs):
        packed_batch = packed(name, pipeline, ours[number : number + 1])
        torch.testing.assert_close(-packed_batch if reverse else packed_batch, output, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(outputs[0], outputs[1])

    trained = family.build(spec.config, model_class=spec.model_class)
    objective = family.objectives()[spec.objective](**recipe.objective.options)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    before = {key: value.detach().clone() for key, value in trained.named_parameters()}
    for _ in range(2):
        (trained_on,) = next(loader)
        loss = objective.loss(objective.predict(trained, trained_on), trained_on)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)
    still_there = [key for key, value in trained.named_parameters() if torch.equal(value, before[key])]
    assert all(key.startswith(family.untouched(spec.config)) for key in still_there), still_there
