"""Trackers: one table that the recipe, the extras, ``doctor`` and the documentation agree with."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from fsdptool.errors import ConfigError
from fsdptool.launch.doctor import LIBRARIES
from fsdptool.records.recipe import ModelChoice, Recipe, TrackerName, Tracking
from fsdptool.records.run import Metrics
from fsdptool.runs.events import EventLog, event_path, read_lines
from fsdptool.runs.trackers import TRACKERS, check_trackers, open_trackers

ROOT = Path(__file__).parents[2]


def recipe_with(*names: Any, **options: Any) -> Recipe:
    return Recipe(ModelChoice("llama3:tiny"), tracking=Tracking(names, options=options))


def track(folder: Path, recipe: Recipe, *steps: int) -> None:
    """Send steps with a loss of 0.5 / step to the recipe's trackers, as a run does."""
    events = EventLog(folder, 0, 0)
    events.add_trackers(open_trackers(folder, recipe))
    for step in steps:
        events.step(Metrics(step, 0.0, 0.0, 0.5 / step, 1.0, 1e-3, 8, 2, 0.1, 0.0, None, None, None, {}))
    events.close()
    assert list(read_lines(event_path(folder, 0))) == []


@pytest.fixture(autouse=True)
def _state_of_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what trackers leave in the process: accelerate's state and MLflow's server."""
    from accelerate.state import PartialState
    from mlflow import set_tracking_uri

    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(variable, "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    yield
    PartialState._reset_state()
    set_tracking_uri("")


@pytest.mark.slow
def test_every_tracker_is_a_choice_an_extra_a_doctor_s_row_and_documented() -> None:
    assert tuple(TRACKERS) == get_args(TrackerName)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    section = (ROOT / "docs" / "how-to" / "track.md").read_text(encoding="utf-8")
    for name, package in TRACKERS.items():
        assert package in LIBRARIES
        assert f"`{name}`" in section
        (requirement,) = project["optional-dependencies"][name]
        assert re.match(r"[\w-]+", requirement)[0] == package  # type: ignore[index]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # MLflow imports modules of its own while the state of this process is undone, so it is back before that.
    with monkeypatch.context() as without, pytest.raises(ConfigError) as caught:
        without.setitem(sys.modules, name, None)
        check_trackers(recipe_with(name))
    assert re.search(f"tracking backend {name}: .* is not installed", str(caught.value))
    assert caught.value.help == f"pip install {TRACKERS[name]}"


def test_tensorboard_has_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(tmp_path, recipe_with("tensorboard"), 1, 2)
    written = EventAccumulator(str(tmp_path / "tensorboard"))
    written.Reload()
    assert [(event.step, event.value) for event in written.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


def test_mlflow_has_every_step_and_the_recipe(tmp_path: Path) -> None:
    """The real client writes to its file store; the files are read as they lie."""
    folder = tmp_path / "my run"
    for start in (1, 3):  # the second start of a run finds the experiment
        track(folder, recipe_with("mlflow", project="shapes", name=f"from {start}"), start, start + 1)
    (experiment,) = [
        path.parent for path in (folder / "mlruns").glob("*/meta.yaml") if path.parent.name != "0"
    ]
    assert "name: shapes" in (experiment / "meta.yaml").read_text()
    runs = {
        (path.parent / "tags" / "mlflow.runName").read_text(): path.parent
        for path in experiment.glob("*/meta.yaml")
    }
    assert set(runs) == {"from 1", "from 3"}
    for start in (1, 3):
        run = runs[f"from {start}"]
        lines = [line.split() for line in (run / "metrics" / "loss").read_text().splitlines()]
        assert [(int(step), float(value)) for _, value, step in lines] == [
            (step, 0.5 / step) for step in (start, start + 1)
        ]
        assert (run / "params" / "model.reference").read_text() == "llama3:tiny"
        assert "end_time: null" not in (run / "meta.yaml").read_text()


def test_mlflow_asks_the_server_that_is_named(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException, match="nowhere"):
        open_trackers(tmp_path, recipe_with("mlflow", tracking_uri="nowhere://else"))
    assert list(tmp_path.iterdir()) == []
