"""Samples of your own code: what may be named, how streams are divided and shuffled, and what is refused."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdptool.api.starter import look_at
from fsdptool.config.recipe import dump_recipe, read_recipe
from fsdptool.errors import ConfigError
from fsdptool.families.objectives.features import ModuleLoss
from fsdptool.records.anatomy import ModelSpec, Reference
from fsdptool.records.recipe import Batch, Data, DataOptions, Evaluation, ModelChoice, Objective, Recipe
from fsdptool.source import rebased, with_places
from fsdptool.training.data import build_batches, build_evaluation, prepare
from fsdptool.training.data.build import with_counts

CODE = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

def item(number):
    return {"x": torch.full((2,), float(number)), "labels": number % 3}

class Table(Dataset):
    def __len__(self):
        return 10
    def __getitem__(self, number):
        return {**item(number), "noise": 1}

class Drawn(Table):
    def __getitem__(self, number):
        return {"x": np.random.rand(2), "labels": int(torch.randint(0, 3, ()))}

class Stream(IterableDataset):
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        return (item(number + 100 * self.epoch) for number in range(10))

def batches():
    for sizes in (range(4), range(4, 5), range(5, 10)):
        rows = [item(number) for number in sizes]
        yield {"x": torch.stack([row["x"] for row in rows]), "labels": [row["labels"] for row in rows]}

def by_epoch(epoch, seed):
    yield from (item(number + 100 * epoch + 1000 * seed) for number in range(10))

def table():
    return [item(number) for number in range(10)]

loaded = DataLoader(Table(), batch_size=4)
listed = table()
used = iter(listed)
number = 3
parts = {"train": listed}

def endless():
    while True:
        yield item(0)

def shrinking(epoch):
    yield from listed[:10 - epoch]

def broken():
    yield item(0)
    raise RuntimeError("no such\\nfile")

def nothing():
    yield from ()

def large():
    yield {"x": torch.zeros(3), "labels": 0}

def decimal():
    yield {"x": torch.zeros(2), "labels": 0.5}

def bare():
    yield torch.zeros(2)

def missing():
    yield {"x": torch.zeros(2)}

def uneven():
    yield {"x": torch.zeros(2, 2), "labels": torch.zeros(3, dtype=int)}
"""
INPUTS = {"x": {"shape": [2]}, "labels": {"shape": [], "dtype": "int64", "high": 3}}
SPEC = ModelSpec(
    Reference("import", "some.net:Net"), "python", None, "torch", "some.net:Net", {}, "module",
    trust_remote_code=True,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own_samples_code.py").write_text(CODE)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("own_samples_code", None)


def recipe_of(folder: Path, name: str, *, evaluation: Evaluation | None = None, **data: Any) -> Recipe:
    options = DataOptions(start_method="fork") | data.pop("options", DataOptions())
    return Recipe(
        ModelChoice("some.net:Net", trust_remote_code=True),
        objective=Objective("module", options={"inputs": INPUTS}),
        data=Data(source="python", path=f"{folder}/own_samples_code:{name}", options=options, **data),
        batch=Batch(micro_batch=1, global_batch=4),
        evaluation=evaluation or Evaluation(),
        steps=1,
    )


def read(recipe: Recipe, steps: int, *, world: int = 1, start: dict[str, Any] | None = None) -> list[float]:
    """Return the first numbers of the samples of some steps, in the order of the global batches."""
    recipe = with_counts(recipe, SPEC)
    seen: list[list[list[float]]] = []
    for rank in range(world):
        loader = build_batches(recipe, SPEC, rank=rank, world=world)
        if start is not None:
            loader.load_state_dict(start)
        seen.append([[float(batch["x"][0, 0]) for batch in next(loader)] for _ in range(steps)])
        loader.close()
    return [number for step in zip(*seen, strict=True) for turn in zip(*step, strict=True) for number in turn]


def drawn() -> tuple[float, ...]:
    """Return numbers of this process's generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seed_all() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Table", "Stream", "batches", "by_epoch", "table", "listed", "loaded", "Drawn"]
)
def test_ranks_workers_and_restarts_see_the_same_samples(folder: Path, name: str) -> None:
    recipe = recipe_of(folder, name, options={"shuffle_buffer": 4})
    seed_all()
    before = drawn()
    seed_all()
    whole = read(recipe, 6)
    assert drawn() == before, "the code draws from generators of its own"
    assert read(recipe, 6, world=2) == whole
    assert read(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, workers=2)), 6) == whole
    counted = with_counts(recipe, SPEC)
    loader = build_batches(counted, SPEC)
    for _ in range(3):
        next(loader)
    state = loader.state_dict()
    loader.close()
    assert (state["samples"], state["samples_per_epoch"]) == (12, 10)
    assert read(counted, 3, world=2, start=state) == whole[12:]
    first, second = whole[:10], whole[10:20]
    if name == "Drawn":
        assert len(set(whole)) == 24
        return
    assert sorted(first) == list(range(10))
    assert sorted(second) == [number + (100 if name in ("Stream", "by_epoch") else 0) for number in range(10)]
    assert first != sorted(first)
    if name not in ("Table", "table", "listed"):
        assert sorted(first[:4]) == [0, 1, 2, 3], "a stream is shuffled within its windows"
    assert read(recipe_of(folder, name, shuffle=False), 2) == list(range(8))


def test_a_share_of_a_dataset_is_held_out(folder: Path) -> None:
    recipe = recipe_of(folder, "Table", evaluation=Evaluation(holdout=0.3, batches=1))
    trained = set(read(recipe, 6))
    loader = build_evaluation(recipe, SPEC)
    assert loader is not None
    held = {float(batch["x"][0, 0]) for step in loader for batch in step}
    assert held and not held & trained and held | trained <= set(range(10))
    assert len(held) < 5 < len(trained)
    assert prepare(recipe, SPEC)["samples"] == len(trained)


def test_a_checkpoint_of_other_samples_is_refused(folder: Path) -> None:
    loader = build_batches(recipe_of(folder, "listed"), SPEC)
    for name in ("Table", "Drawn"):
        with pytest.raises(ConfigError, match="not the data the checkpoint"):
            build_batches(recipe_of(folder, name), SPEC).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("missing_name", {}, "missing_name does not exist"),
        ("Tabel", {}, "Tabel does not exist"),
        ("used", {}, "can be read only once"),
        ("number", {}, "is of type int, not a dataset"),
        ("parts", {}, "is of type dict, not a dataset"),
        ("broken", {}, r"item 1: RuntimeError: no such file, line \d+ of own_samples_code.py"),
        ("nothing", {}, "yields no samples"),
        ("large", {}, r"item 0: x has the shape \(3,\), and the run is planned for \(2,\)"),
        ("decimal", {}, "labels is of float64, and the model takes int64"),
        ("bare", {}, "item 0 is of type Tensor, not a dictionary of tensors"),
        ("missing", {}, "item 0 has no labels"),
        ("uneven", {}, "different numbers of samples: x 2, labels 3"),
        ("listed", {"shuffle_buffer": 0}, None),
        ("batches", {"shuffle_buffer": 0}, "shuffle_buffer is 0"),
        ("batches", {"samples": 12}, "ended after 10 samples of epoch 0, and an epoch has 12"),
    ],
)
def test_what_code_may_not_be(folder: Path, name: str, options: dict[str, int], words: str | None) -> None:
    recipe = recipe_of(folder, name, options=options)
    if words is None:
        assert prepare(with_counts(recipe, SPEC), SPEC)["samples"] == 10
        return
    with pytest.raises(ConfigError, match=words) as caught:
        prepare(with_counts(recipe, SPEC), SPEC)
    assert "\n" not in caught.value.message


def test_an_endless_stream_says_its_epoch_and_a_shrinking_one_ends(folder: Path) -> None:
    assert read(recipe_of(folder, "endless", options={"samples": 3}), 2) == [0.0] * 8
    with pytest.raises(ConfigError, match="ended after 9 samples of epoch 1"):
        read(recipe_of(folder, "shrinking"), 6)


def test_nothing_is_imported_without_consent(folder: Path) -> None:
    recipe = recipe_of(folder, "Table")
    recipe = dataclasses.replace(recipe, model=ModelChoice("some.net:Net"))
    with pytest.raises(ConfigError, match="imported only with --allow-import"):
        prepare(recipe, SPEC)
    assert "own_samples_code" not in sys.modules


@pytest.mark.slow
def test_code_is_found_beside_the_recipe_and_in_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = dataclasses.replace(
        recipe_of(folder, "Table"), data=Data(source="python", path="own_samples_code:Table")
    )
    for here in (folder, folder.parent):
        monkeypatch.chdir(here)
        assert with_places(plain, folder).data.path == f"{folder}/own_samples_code:Table"
    assert with_places(plain, folder.parent).data.path == "own_samples_code:Table", "it is nowhere there"
    monkeypatch.chdir(folder)
    (folder / "jobs").mkdir()
    moved = rebased(plain, folder / "jobs")
    assert moved.data.path == "../own_samples_code:Table"
    (folder / "jobs" / "recipe.yaml").write_text(dump_recipe(moved))
    again = with_places(read_recipe(folder / "jobs" / "recipe.yaml"), folder / "jobs")
    assert read(dataclasses.replace(again, **{
        name: getattr(recipe_of(folder, "Table"), name) for name in ("model", "objective", "batch")
    }), 1)  # fmt: skip
    for path in ("own_samples_code", "own_samples_code.py:Table.x:y", "own rows:Table"):
        with pytest.raises(ConfigError, match="does not name code"):
            with_places(dataclasses.replace(plain, data=Data(source="python", path=path)), folder)


def test_init_takes_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    look = look_at("own_samples_code:Table", ModuleLoss())
    assert (look.kind, look.data.source, look.data.path) == ("code", "python", "own_samples_code:Table")
    assert "own_samples_code" not in sys.modules
