"""Every recipe under examples/ trains: read, prepared, written and run as ``fsdptool train`` does it.

One step of each on two real ranks, with a checkpoint, an evaluation and samples where the recipe asks
for them; only torchrun is left out (tests/runs starts it).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import recipe_runs
from jsonschema import Draft202012Validator
from pool import Pool
from sweeps import kept

from fsdptool.files.values import load_schema
from fsdptool.records.recipe import Recipe
from fsdptool.runs.events import event_path, read_lines
from fsdptool.runs.manifest import newest_good

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.stem for path in (EXAMPLES / "recipes").glob("*.yaml"))
OFTEN = (
    "classification_lora",
    "decoder_long_full",
    "moe_full",
    "preference_distillation",
    "sd3_full",
    "summarisation_lora",
    "wan_distillation",
)
"""One of each objective and each method; the others are trained before a release."""
CONFIGS = {"decoder_long_full": "two_cpu_processes_one_sequence.yaml"}
"""What a recipe is run with; the others take two processes with sequences of their own."""
STEPS = 1

pytestmark = pytest.mark.distributed


def shortened(recipe: Recipe) -> Recipe:
    """One step, with everything that the recipe does every few steps done after it."""
    return dataclasses.replace(
        recipe,
        steps=STEPS,
        checkpoints=dataclasses.replace(recipe.checkpoints, every_steps=STEPS),
        evaluation=dataclasses.replace(
            recipe.evaluation, every_steps=STEPS if recipe.evaluation.every_steps else None
        ),
    )


def said(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(event_path(folder, 0)) if event["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", kept(RECIPES, *OFTEN))
def test_a_recipe_trains(name: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # data and models beside the recipe are found from anywhere
    folder = tmp_path / "run"
    path = EXAMPLES / "recipes" / f"{name}.yaml"
    config = EXAMPLES / "configs" / CONFIGS.get(name, "two_cpu_processes.yaml")
    recipe = recipe_runs.write_folder(folder, path, config, changed=shortened)
    ended = pool.run(recipe_runs.work_in, 2, str(folder))
    assert [(item["status"], item["step"]) for item in ended] == [("completed", STEPS)] * 2
    lines = list(read_lines(folder / "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        Draft202012Validator(load_schema("metrics")).validate(line)
        assert line["loss"] is not None
        assert line["grad_norm"] > 0
    (proof,) = said(folder, "proof")
    assert proof["proven"]
    found = newest_good(folder / "checkpoints")
    assert found is not None
    assert found[1].step == STEPS
    wanted = recipe.evaluation
    evaluated = bool(wanted.every_steps)
    assert len(said(folder, "evaluation")) == (evaluated and bool(wanted.holdout or wanted.data))
    samples = said(folder, "samples")
    assert len(samples) == (evaluated and bool(wanted.samples))
    for event in samples:
        assert len(event["files"]) == wanted.samples
        assert all(Path(file).stat().st_size for file in event["files"])
