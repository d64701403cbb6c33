"""Samples of a sharded model: two real ranks under fully_shard write what one plain process computes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_material
import torch
from fsdptool_diffusion.autoencoder import ImageEncoding
from fsdptool_diffusion.precompute import plan_work, run_work
from PIL import Image

from fsdptool.errors import ConfigError
from fsdptool.families.objectives import Classification
from fsdptool.records.codec import from_json
from fsdptool.records.recipe import Recipe
from fsdptool.source import resolve
from fsdptool.training.sampling import continue_text, denoise

_RANK = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from fsdptool.families.registry import family_of
from fsdptool.records.codec import from_json
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source import resolve
from fsdptool.training.data import build_batches
from fsdptool.training.sampling import open_sampler
from fsdptool.distributed.session import close_session, open_session

folder = Path(sys.argv[1])
jobs = json.loads((folder / "jobs.json").read_text())
session = open_session(FsdpSettings(num_processes=2, use_cpu=True))
for name, job in jobs.items():
    recipe = from_json(Recipe, job["recipe"])
    spec = resolve(recipe.model.reference, overrides=recipe.model.overrides or None)
    family = family_of(spec)
    torch.manual_seed(0)
    model = family.build(spec.config, model_class=spec.model_class)
    blocks = [m for m in model.modules() if type(m).__name__ in job["wrap"]]
    assert blocks
    for number, block in enumerate(blocks):
        fully_shard(block, reshard_after_forward=bool(number % 2))
    fully_shard(model)
    kind = recipe.objective.name or spec.objective
    objective = family.objectives()[kind](**recipe.objective.options)
    loader = build_batches(recipe, spec, rank=session.data_rank, world=session.data_ranks, cache=folder / "c")
    sampler = open_sampler(recipe, spec, objective, session, folder / name, loader)
    files = sampler.write(sampler.make(model), 7)
    assert bool(files) == session.is_main
    batch = next(loader)[0]
    objective.loss(objective.predict(model, batch), batch).backward()
    if job.get("full_disk"):
        (folder / name / "samples" / "step-00000008").write_text("a file in the way")
        try:
            sampler.write(sampler.make(model), 8)
        except Exception as error:
            assert type(error).__name__ == "StorageError", error
        else:
            raise AssertionError("rank 0 failed alone")
    if job.get("slow"):
        # Rank 0 writes for longer than a collective may take.
        samples, whole = sampler.make(model), sampler._write_all
        sampler._write_all = lambda *arguments: (time.sleep(11), whole(*arguments))[1]
        limit, usual = dist.distributed_c10d._set_pg_timeout, timedelta(seconds=600)
        limit(timedelta(seconds=8), dist.group.WORLD)
        assert bool(sampler.write(samples, 9)) == session.is_main
        limit(usual, dist.group.WORLD)
close_session()
print("done", flush=True)
"""


def _recipe(reference: str, **sections: Any) -> dict[str, Any]:
    return {"model": {"reference": reference, "weights": "random"}, "evaluation": {"samples": 2}, **sections}


@pytest.mark.distributed
def test_two_ranks_write_what_one_process_computes(pipelines: Mapping[str, Path], tmp_path: Path) -> None:
    flux = pipelines["flux"]
    images = tiny_material.pictures(tmp_path / "images", [(64, 64)] * 3)
    config = tmp_path / "llama"
    config.mkdir()
    (config / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 300,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 64,
            }
        ),
        encoding="utf-8",
    )
    jobs = {
        "text": {
            "wrap": ["LlamaDecoderLayer"],
            "full_disk": True,
            "slow": True,
            "recipe": _recipe(
                str(config),
                data={
                    "source": "text",
                    "path": "pydoc",
                    "tokenizer": "bytes",
                    "options": {"prompts": ["Once", "The list"], "sample_tokens": 6},
                },
                batch={"sequence_length": 32},
            ),
        },
        "image": {
            "wrap": ["FluxTransformerBlock", "FluxSingleTransformerBlock"],
            "recipe": _recipe(
                str(flux),
                data={
                    "source": "images",
                    "path": str(images),
                    "options": {"sample_steps": 3},
                },
                batch={"height": 64, "width": 64, "sequence_length": 16},
            ),
        },
    }
    (tmp_path / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    recipe = from_json(Recipe, jobs["image"]["recipe"])
    spec = resolve(str(flux))
    run_work(plan_work(recipe, spec, tmp_path / "c"), rank=0, world=1, device="cpu")
    script = tmp_path / "rank.py"
    script.write_text(_RANK, encoding="utf-8")
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
            *(str(script), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert launched.stdout.count("done") == 2

    from fsdptool.families.registry import family_of
    from fsdptool.training.data import build_batches

    text_spec = resolve(str(config))
    torch.manual_seed(0)
    model = family_of(text_spec).build(text_spec.config, model_class=text_spec.model_class).eval()
    for number, prompt in enumerate(("Once", "The list")):
        ids = torch.tensor([list(prompt.encode())])
        with torch.no_grad():
            tokens = continue_text(model, ids, new_tokens=6, temperature=0.0, generator=None)
            theirs = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(tokens, theirs)
        said = bytes(token for token in tokens[0, len(prompt) :].tolist() if token < 256)
        written = (tmp_path / "text/samples/step-00000007" / f"{number}.txt").read_text(encoding="utf-8")
        assert written == f"{prompt}\n---\n{said.decode(errors='replace')}\n"

    family = family_of(spec)
    torch.manual_seed(0)
    model = family.build(spec.config, model_class=spec.model_class).eval()
    objective = family.objectives()["flow_matching"]()
    loader = build_batches(recipe, spec, cache=tmp_path / "c")
    for number in range(2):
        with torch.no_grad():
            latents = denoise(model, objective, loader.example(number), steps=3)
        (expected,) = ImageEncoding(flux, device="cpu").decode(latents[0])
        file = tmp_path / "image/samples/step-00000007" / f"{number}.png"
        values = torch.tensor(list(Image.open(file).tobytes()))
        assert (values - torch.tensor(list(expected.tobytes()))).abs().max() <= 1


class _Perfect:
    """A denoiser that knows the clean latents: every sampler must return exactly them."""

    steps = 1000

    def __init__(self, name: str, clean: torch.Tensor) -> None:
        self.name = name
        self.options: dict[str, Any] = {"shift": 3.0}
        self.clean = clean

    def coefficients(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept = (1 - (batch["timestep"].double() + 1) / 1002).reshape(-1, 1, 1, 1)
        return kept.sqrt(), (1 - kept).sqrt()

    def denoise(self, model: Any, noisy: torch.Tensor, time: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.name == "flow_matching":
            return (noisy - self.clean) / time.reshape(-1, 1, 1, 1)
        signal, spread = self.coefficients({"timestep": time})
        noise = (noisy - signal * self.clean) / spread
        return noise if self.name == "epsilon" else signal * noise - spread * self.clean


@pytest.mark.parametrize("name", ["flow_matching", "epsilon", "v_prediction"])
def test_a_perfect_denoiser_gives_the_clean_latents(name: str) -> None:
    clean = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    batch = {"noise": torch.randn_like(clean)}
    predicted = denoise(None, _Perfect(name, clean), batch, steps=5)
    torch.testing.assert_close(predicted, clean, atol=1e-9, rtol=1e-9)


def test_an_encoded_picture_decodes_to_its_size(pipelines: Mapping[str, Path]) -> None:
    encoding = ImageEncoding(pipelines["flux"], device="cpu")
    latents = encoding.encode(torch.rand(3, 1, 64, 64) * 2 - 1, frames=False)["latents"]
    (image,) = encoding.decode(latents)
    assert image.size == (64, 64)
    # Undone exactly: what the VAE itself decodes from its own, unnormalised latents.
    with torch.no_grad():
        raw = encoding.vae.decode(latents[None] / 0.5 + 0.1).sample[0]
    expected = ((raw.permute(1, 2, 0) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    assert torch.equal(torch.tensor(list(image.tobytes())), expected.flatten().long())


def test_what_cannot_be_sampled_is_refused() -> None:
    from fsdptool.training.sampling import open_sampler

    recipe = from_json(Recipe, _recipe("x"))

    spec: Any = None
    session: Any = None
    loader: Any = None
    with pytest.raises(ConfigError, match="classification has nothing to sample"):
        open_sampler(recipe, spec, Classification(), session, Path(), loader)
    none = dataclasses.replace(recipe, evaluation=dataclasses.replace(recipe.evaluation, samples=0))
    assert open_sampler(none, spec, Classification(), session, Path(), loader) is None
