"""Latents and text embeddings: what the pipeline itself makes, once, resumable, the same for all ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import jsonschema
import pytest
import safetensors.torch
import tiny_material
import torch
import yaml
from fsdptool_diffusion.encoders import TEXT_OUTPUTS
from fsdptool_diffusion.latents import INDEX
from fsdptool_diffusion.precompute import plan_work, run_work
from safetensors.torch import load_file
from tiny_material import recipe_of

from fsdptool.cli.app import run as fsdptool
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.values import load_schema
from fsdptool.records.recipe import Recipe
from fsdptool.source import resolve
from fsdptool.training.data import build_batches, build_evaluation, prepare
from fsdptool.training.data.images import Bucket, buckets_of, nearest

Recipes = Callable[..., Recipe]


@pytest.mark.slow
def test_every_known_pipeline_exists_with_the_outputs_we_name() -> None:
    """The table follows diffusers' source: each return of ``encode_prompt`` has as many entries."""
    import ast

    root = Path(diffusers.__file__).parent / "pipelines"
    classes = {
        node.name: node
        for file in root.rglob("pipeline_*.py")
        if any(f"class {name}(" in (text := file.read_text(encoding="utf-8")) for name in TEXT_OUTPUTS)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name in TEXT_OUTPUTS
    }
    assert set(classes) == set(TEXT_OUTPUTS)
    for name, outputs in TEXT_OUTPUTS.items():
        (method,) = [node for node in classes[name].body if getattr(node, "name", "") == "encode_prompt"]
        values = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)]
        assert values
        for value in values:
            entries = [ast.unparse(entry) for entry in value.elts] if isinstance(value, ast.Tuple) else []
            assert len(entries) == len(outputs), name
            for entry, ours in zip(entries, outputs, strict=True):
                if ours is not None:
                    same = {ours, ours.replace("prompt_attention_mask", "prompt_embeds_mask")}
                    assert entry in same, f"{name}: {entry} is taken for {ours}"


@pytest.fixture(scope="module")
def cached(
    pipelines: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """SDXL latents of 23 pictures of three shapes: pipeline, images, cache."""
    root = tmp_path_factory.mktemp("cached")
    sizes = [(64, 64)] * 11 + [(24, 48)] * 7 + [(48, 24)] * 5
    images = tiny_material.pictures(root / "images", sizes)
    recipe = recipe_of(pipelines["sdxl"], images, buckets=[[64, 64], [32, 64], [64, 32]], shard_size=5)
    run_work(plan_work(recipe, resolve(str(pipelines["sdxl"])), root / "c"), rank=0, world=1, device="cpu")
    return pipelines["sdxl"], images, root / "c"


def bucketed(cached: tuple[Path, Path, Path], **fields: Any) -> Recipe:
    pipeline, images, _ = cached
    return recipe_of(pipeline, images, buckets=[[64, 64], [32, 64], [64, 32]], shard_size=5, **fields)


@pytest.mark.slow
def test_draws_and_buckets_do_not_depend_on_ranks(cached: tuple[Path, Path, Path]) -> None:
    spec = resolve(str(cached[0]))

    def line(world: int, steps: int, start: dict[str, Any] | None = None) -> list[dict[str, torch.Tensor]]:
        recipe = bucketed(
            cached, micro=2, global_batch=8, objective={"caption_dropout": 0.3}, posterior="draw", seed=3
        )
        ranks = [build_batches(recipe, spec, rank=r, world=world, cache=cached[2]) for r in range(world)]
        if start is not None:
            for rank in ranks:
                rank.load_state_dict(start)
        found: list[dict[str, torch.Tensor]] = []
        for _ in range(steps):
            turns = zip(*(next(rank) for rank in ranks), strict=True)
            found += [dict(batch) for turn in turns for batch in turn]
        states.append(ranks[0].state_dict())
        return found

    states: list[dict[str, Any]] = []
    alone = line(1, 9)
    for world in (2, 4):
        for expected, found in zip(alone, line(world, 9), strict=True):
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)
    line(2, 4)
    for expected, found in zip(alone[16:], line(4, 5, states[-1]), strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    shapes = {tuple(batch["latents"].shape[1:]) for batch in alone}
    assert shapes == {(4, 8, 8), (4, 4, 8), (4, 8, 4)}
    for batch in alone:
        assert (batch["time_ids"][:, 4:] == torch.tensor(batch["latents"].shape[2:]) * 8).all()


@pytest.mark.slow
def test_noise_is_new_every_epoch_and_every_sample(cached: tuple[Path, Path, Path]) -> None:
    loader = build_batches(bucketed(cached, micro=1), resolve(str(cached[0])), cache=cached[2])
    samples = loader._samples
    one, same, later, other = (samples.sample(*place) for place in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert torch.equal(one["noise"], same["noise"])
    assert torch.equal(one["latents"], later["latents"])
    for different in (later, other):
        assert not torch.equal(one["noise"], different["noise"])
        assert one["uniform"] != different["uniform"]
    noise = torch.stack([samples.sample(index, epoch)["noise"] for index in range(11) for epoch in range(9)])
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02


@pytest.mark.slow
def test_dropped_captions_are_the_empty_ones(cached: tuple[Path, Path, Path]) -> None:
    spec = resolve(str(cached[0]))
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(cached[0])
    with torch.no_grad():
        empty = pipeline.encode_prompt(prompt="", do_classifier_free_guidance=False)[0][0]
    recipe = bucketed(cached, micro=1, objective={"caption_dropout": 0.25}, evaluation={"holdout": 0.3})
    samples = build_batches(recipe, spec, cache=cached[2])._samples
    dropped = [
        torch.allclose(samples.sample(index, epoch)["prompt_embeds"], empty, atol=1e-5)
        for index in range(len(samples))
        for epoch in range(40)
    ]
    assert 0.2 < sum(dropped) / len(dropped) < 0.3
    validation = build_evaluation(recipe, spec, cache=cached[2])
    assert validation is not None
    assert len(samples) + len(validation._samples) == 23
    shown = [
        validation._samples.sample(index, 0)["prompt_embeds"] for index in range(len(validation._samples))
    ]
    assert not any(torch.allclose(embeds, empty, atol=1e-5) for embeds in shown)


@pytest.mark.distributed
def test_a_kill_or_a_stop_loses_nothing_that_was_finished(
    pipelines: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through the command: of two processes the parent is killed, then one is stopped, then it ends."""
    images = tiny_material.pictures(tmp_path / "images", [(64, 64)] * 24)
    recipe = {
        "model": {"reference": str(pipelines["flux"])},
        "data": {
            "source": "images",
            "path": "images",
            "options": {"shard_size": 2, "latents": str(tmp_path / "latents")},
        },
        "batch": {"height": 64, "width": 64, "sequence_length": 16},
        "steps": 1,
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    arguments = ["precompute", str(file), "--format", "json"]
    first = subprocess.Popen(
        [sys.executable, "-m", "fsdptool", *arguments, "--processes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 600
    while len(list((tmp_path / "latents").glob("text-0*"))) < 3 and time.monotonic() < deadline:
        assert first.poll() is None, first.communicate()[1].decode()
        time.sleep(0.005)
    first.kill()
    first.communicate(timeout=60)  # its children hold the pipes until they end, too
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "latents").glob("*-0*.safetensors")}
    assert len(kept) >= 3
    assert not (tmp_path / "latents" / INDEX).exists()
    with pytest.raises(ConfigError, match="does not contain finished latents"):
        spec = resolve(str(pipelines["flux"]))
        recipe_record = recipe_of(pipelines["flux"], images, shard_size=2, latents=str(tmp_path / "latents"))
        prepare(recipe_record, spec, cache=tmp_path / "c")
    plain = safetensors.torch.save_file

    for number, status, said in (
        (signal.SIGTERM, 75, "SIGTERM was received before all shards were encoded"),
        (signal.SIGINT, 130, ""),
    ):

        def stopped(*given: Any, number: signal.Signals = number) -> None:
            plain(*given)
            os.kill(os.getpid(), number)

        with monkeypatch.context() as during:
            during.setattr(safetensors.torch, "save_file", stopped)
            assert fsdptool(arguments) == status
        assert said in capsys.readouterr().err
    assert not list((tmp_path / "latents").glob(f"*.{os.getpid()}.part")), "nothing half-written stays"
    assert fsdptool(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, load_schema("precompute"))
    assert (document["pictures"], document["shards"], document["finished"]) == (24, 12, True)
    for name, stamp in kept.items():
        assert (tmp_path / "latents" / name).stat().st_mtime_ns == stamp, (
            "what was finished is not made again"
        )
    # The same as made by one process at once.
    fresh = recipe_of(pipelines["flux"], images, shard_size=2, latents=str(tmp_path / "fresh"))
    done = run_work(plan_work(fresh, spec, tmp_path / "c"), rank=0, world=1, device="cpu")
    assert done.made == 12
    for path in done.folder.glob("*.safetensors"):
        ours, theirs = load_file(path), load_file(tmp_path / "latents" / path.name)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    again = recipe_of(pipelines["flux"], images, shard_size=2, latents=str(tmp_path / "latents"))
    assert run_work(plan_work(again, spec, tmp_path / "c"), rank=0, world=1, device="cpu").made == 0


def complaint(action: Callable[[], Any]) -> str:
    with pytest.raises(FsdptoolError) as caught:
        action()
    assert "\n" not in caught.value.message
    return f"{caught.value.message} | {caught.value.help}"


@pytest.mark.slow
def test_pictures_and_pipelines_that_cannot_be_used(
    pipelines: Mapping[str, Path], cached: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    flux, spec = pipelines["flux"], resolve(str(pipelines["flux"]))

    def plan(images: Path, **fields: Any) -> Any:
        return plan_work(recipe_of(flux, images, **fields), spec, tmp_path / "c")

    def made_of(name: str, images: Path, **fields: Any) -> Recipe:
        recipe = recipe_of(pipelines[name], images, **fields)
        work = plan_work(recipe, resolve(str(pipelines[name])), tmp_path / "c")
        run_work(work, rank=0, world=1, device="cpu")
        return recipe

    def make(images: Path, **fields: Any) -> Any:
        return run_work(plan(images, **fields), rank=0, world=1, device="cpu")

    (tmp_path / "none").mkdir()
    assert "contains no images" in complaint(lambda: plan(tmp_path / "none"))
    assert "is not a folder" in complaint(lambda: plan(tmp_path / "nowhere"))
    bare = tiny_material.pictures(tmp_path / "bare", [(32, 32)])
    (bare / "000.txt").unlink()
    assert "has no captions" in complaint(lambda: plan(bare))
    torn = tiny_material.pictures(tmp_path / "torn", [(32, 32)])
    (torn / "000.png").write_bytes((torn / "000.png").read_bytes()[:900])
    assert "000.png" in complaint(lambda: make(torn))
    good = tiny_material.pictures(tmp_path / "good", [(32, 32)])
    assert "not a multiple of 16 pixels" in complaint(lambda: plan(good, size=(64, 60)))
    assert "has more pixels than batch.height" in complaint(lambda: plan(good, buckets=[[128, 64]]))
    assert "does not take frames" in complaint(
        lambda: make(tiny_material.clips(tmp_path / "v", 1, 5, (32, 32)), frames=5)
    )
    videos = tiny_material.clips(tmp_path / "videos", 2, 5, (32, 32))
    (videos / "a.mp4").write_bytes(b"")
    assert "a.mp4 cannot be read" in complaint(lambda: plan(videos, frames=5))
    assert "data.options.fps: expected float, got str 'slow'" in complaint(lambda: plan(good, fps="slow"))
    assert "makes captions of 16 tokens, memory is planned for 8" in complaint(
        lambda: made_of("sd15", good, length=8)
    )
    for name, why in (
        ("LTXImageToVideoPipeline", "first image"),
        ("WanImageToVideoPipeline", "a time of its own"),
        ("AmusedPipeline", "not known here"),
    ):
        other = tmp_path / name
        shutil.copytree(flux, other)
        index = json.loads((other / "model_index.json").read_text(encoding="utf-8"))
        (other / "model_index.json").write_text(
            json.dumps({**index, "_class_name": name, "expand_timesteps": True}), encoding="utf-8"
        )
        recipe = recipe_of(other, good)
        assert why in complaint(partial(plan_work, recipe, spec, tmp_path / "c"))
    assert "data.options.buckets: 'no' is not one of" in complaint(lambda: plan(good, buckets="no"))
    make(good, latents=str(tmp_path / "taken"))
    other = tiny_material.pictures(tmp_path / "other", [(40, 40)])
    assert "contains latents of other images" in complaint(
        lambda: make(other, latents=str(tmp_path / "taken"))
    )
    # A model that does not belong to the pipeline.
    wan = resolve(str(pipelines["wan"]))
    recipe = recipe_of(flux, good, latents=str(tmp_path / "taken"))
    assert complaint(lambda: prepare(recipe, wan, cache=tmp_path / "c"))
    # A damaged shard.
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "taken", broken)
    (broken / "pixels-00000.safetensors").write_bytes(b"\0" * 20)
    recipe = recipe_of(flux, good, latents=str(broken))
    assert "pixels-00000.safetensors cannot be read" in complaint(
        lambda: prepare(recipe, spec, cache=tmp_path / "c")
    )


def test_metadata_names_captions_as_the_datasets_library_reads_them(
    pipelines: Mapping[str, Path], tmp_path: Path
) -> None:
    import datasets

    images = tiny_material.pictures(tmp_path / "images", [(32, 32)] * 3)
    for file in images.glob("*.txt"):
        file.unlink()
    rows = [{"file_name": f"{number:03d}.png", "text": f"dog {number}"} for number in range(3)]
    (images / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    theirs = datasets.load_dataset("imagefolder", data_dir=str(images), split="train")
    work = plan_work(recipe_of(pipelines["flux"], images), resolve(str(pipelines["flux"])), tmp_path / "c")
    assert [picture.caption for picture in work.pictures] == theirs["text"][:]


def test_aspect_buckets_stay_within_the_planned_size() -> None:
    buckets = buckets_of(1024, 1024, 1, {"buckets": "aspect"}, step=64)
    assert Bucket(1024, 1024) in buckets
    assert all(bucket.height * bucket.width <= 1024 * 1024 for bucket in buckets)
    assert all(bucket.height % 64 == 0 and bucket.width % 64 == 0 for bucket in buckets)
    assert all(0.5 <= bucket.height / bucket.width <= 2 for bucket in buckets)
    assert min(bucket.height * bucket.width for bucket in buckets) > 0.85 * 1024 * 1024
    assert buckets[nearest(1.0, buckets)] == Bucket(1024, 1024)
    tall = buckets[nearest(16 / 9, buckets)]
    assert 1.6 < tall.height / tall.width < 1.95
