"""Training on samples of your own code: on one rank, on two, and after a death between two checkpoints."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import recipe_runs
from cases import LLAMA
from pool import Pool

from fsdptool.runs.events import read_lines
from fsdptool.runs.manifest import list_checkpoints, read_manifest

pytestmark = pytest.mark.distributed

CODE = """\
import random
import numpy as np
import torch


def sample(length=16):
    ids = torch.randint(0, 200, (length,)) + random.randint(0, 5) + int(np.random.randint(5))
    return {"input_ids": ids, "labels": ids}


class Table(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, number):
        return {**sample(), "name": f"text {number}"}


def batches(epoch):
    for size in (3, 1, 4, 3):
        yield {name: torch.stack([sample()[name] for _ in range(size)]) for name in ("input_ids", "labels")}
"""
RECIPE = """\
model: {reference: model, weights: random}
data: {source: python, path: "own_samples:batches", packing: false,
  options: {start_method: fork, shuffle_buffer: 4}}
batch: {micro_batch: 2, global_batch: 4, sequence_length: 16}
steps: 8
checkpoints: {every_steps: 2, keep_last: 10}
evaluation: {every_steps: 4, batches: 1,
  data: {source: python, path: "own_samples:Table", packing: false, options: {start_method: fork}}}
"""
TWO_PROCESSES = Path(__file__).parents[2] / "examples" / "configs" / "two_cpu_processes.yaml"


def trained(folder: str, stop_at: int | None = None) -> dict[str, Any]:
    """Train on a rank of the pool, which is a daemon, and those may not start loading processes."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return recipe_runs.work_in(folder, stop_at, trusted=True)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def test_ranks_and_deaths_change_nothing(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 262}))
    (tmp_path / "own_samples.py").write_text(CODE)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    one = tmp_path / "one_process.yaml"
    one.write_text(TWO_PROCESSES.read_text().replace("num_processes: 2", "num_processes: 1"))
    written = recipe_runs.write_folder(tmp_path / "whole", recipe, one, trusted=True)
    assert written.data.options["samples"] == 11, "counted once, before the ranks start"
    pool.run(trained, 1, str(tmp_path / "whole"))
    folder = tmp_path / "killed"
    recipe_runs.write_folder(folder, recipe, TWO_PROCESSES, trusted=True)
    pool.run(trained, 2, str(folder), 5)
    # A death would not have left the last one, and the steps since the one before are done again.
    newest = list_checkpoints(folder / "checkpoints")[0]
    assert read_manifest(newest).step > 2
    shutil.rmtree(newest)
    recipe_runs.write_folder(folder, recipe, TWO_PROCESSES, resume="auto", trusted=True)
    pool.run(trained, 2, str(folder))
    assert len(losses(folder)) == 8
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert len(set(losses(folder))) == 8
