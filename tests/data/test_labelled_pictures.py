"""Image classifiers from a folder per class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.records.codec import from_json
from fsdptool.records.recipe import Recipe
from fsdptool.source import resolve
from fsdptool.training.data import build_batches, build_evaluation

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "vit"
    folder.mkdir()
    config = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": 16,
        "patch_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_labels": 3,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    statistics = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(statistics), encoding="utf-8")
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for name, colour in COLOURS.items():
        (root / name / "more").mkdir(parents=True)
        for number in range(4):
            place = root / name / ("more" if number % 2 else "")
            Image.new("RGB", (24 + number, 32), colour).save(place / f"{number}.png")
    return root


def recipe_of(model: Path, images: Path, *, holdout: float = 0.0, **options: Any) -> Recipe:
    document: Mapping[str, Any] = {
        "model": {"reference": str(model)},
        "data": {"source": "images", "path": str(images), "options": options},
        "batch": {"micro_batch": 4},
        "evaluation": {"holdout": holdout},
    }
    return from_json(Recipe, document)


def test_a_classifier_learns_from_folders(model: Path, images: Path) -> None:
    spec = resolve(str(model))
    loader = build_batches(recipe_of(model, images), spec)
    family = family_of(spec)
    wanted = {item.name: item for item in family.batch_spec(spec.config, recipe_of(model, images))}
    (batch,) = next(loader)
    assert {key: (tuple(value.shape), str(value.dtype)) for key, value in batch.items()} == {
        key: (item.shape, f"torch.{item.dtype}") for key, item in wanted.items()
    }
    for picture, label in zip(batch["pixel_values"], batch["labels"].tolist(), strict=True):
        colour = np.asarray(list(COLOURS.values())[label]) / 255
        expected = (colour - [0.4, 0.5, 0.6]) / [0.2, 0.25, 0.5]
        assert np.allclose(picture.mean(dim=(1, 2)).numpy(), expected, atol=1e-5)
    torch.manual_seed(0)
    trained = family.build(spec.config, model_class=spec.model_class)
    objective = family.objectives()["classification"]()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        (batch,) = next(loader)
        loss = objective.loss(objective.predict(trained, batch), batch) / objective.weight(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_validation_is_kept_apart_and_labels_may_be_ordered(model: Path, images: Path) -> None:
    spec = resolve(str(model))
    recipe = recipe_of(model, images, holdout=0.4, labels=["red", "green", "blue"])
    train, validation = build_batches(recipe, spec), build_evaluation(recipe, spec)
    assert validation is not None
    samples: Any = train._samples
    shown, hidden = set(samples._files), set(cast("Any", validation)._samples._files)
    assert len(shown) + len(hidden) == 12 and not shown & hidden
    for file, label in zip(samples._files, samples._labels, strict=True):
        assert ("red", "green", "blue")[label] in file.parts


def test_pictures_that_cannot_be_used_are_named(model: Path, images: Path, tmp_path: Path) -> None:
    spec = resolve(str(model))

    def complaint(path: Path, **options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            build_batches(recipe_of(model, path, **options), spec)
        return f"{error.value} {error.value.help}"

    assert "is not a folder" in complaint(tmp_path / "nowhere")
    assert "differ in yellow" in complaint(images, labels=["blue", "green", "red", "yellow"])
    (tmp_path / "flat").mkdir()
    assert "contains no images in folders" in complaint(tmp_path / "flat")
    assert "leaves none to train on" in complaint(images, holdout=1.0)
    (images / "white").mkdir()
    Image.new("RGB", (8, 8)).save(images / "white" / "0.png")
    assert "4 classes" in (said := complaint(images)) and "num_labels: 4" in said


def test_a_picture_is_turned_as_the_camera_noted(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "one" / "a"
    place.mkdir(parents=True)
    half = np.zeros((16, 16, 3), dtype=np.uint8)
    half[:, 8:] = 255  # the right half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned clockwise by a quarter: the right half comes to lie below
    Image.fromarray(half).save(place / "0.png", exif=exif)
    samples = build_batches(recipe_of(model, tmp_path / "one"), resolve(str(model)))._samples
    pixels = samples.sample(0, 0)["pixel_values"]
    assert pixels[:, 8:].min() > pixels[:, :8].max()
