"""Trackers: experiment services that receive the steps of a run besides ``metrics.jsonl``. Rank 0 only.

A tracker is one class in :data:`TRACKERS` and its name in ``records/recipe.py:TrackerName``; an optional
dependency of the same name belongs in ``pyproject.toml``. ``fsdptool doctor``, the preflight and the recipe's
schema read the table.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from fsdptool.errors import ConfigError
from fsdptool.records.codec import to_json
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import Metrics

_MLFLOW_PARAMETERS = 100
"""Parameters that one request to MLflow may carry (3.17, utils/validation.py)."""


class Tracker(ABC):
    """One experiment service.

    Attributes:
        name: What ``tracking.backends`` calls it, and the name of fsdptool's extra.
        package: The distribution that it needs.
        module: The module that this distribution must provide.

    Args:
        folder: The run folder; local files of the service belong in it.
        recipe: The run's recipe; ``tracking.options`` are the service's own.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    module: ClassVar[str]

    @abstractmethod
    def __init__(self, folder: Path, recipe: Recipe) -> None: ...

    @abstractmethod
    def log(self, metrics: Metrics) -> None:
        """Record one step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is buffered and end the tracking of this run."""


class TensorBoard(Tracker):
    """Event files in the run folder's ``tensorboard``."""

    name = "tensorboard"
    package = "tensorboard"
    module = "tensorboard"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, metrics: Metrics) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics.step, walltime=metrics.time)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Weights & Biases; its files lie in the run folder."""

    name = "wandb"
    package = "wandb"
    module = "wandb"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._client: Any = import_module(self.module)
        self._client.init(**_init_options(folder, recipe, dir=str(folder)))

    def log(self, metrics: Metrics) -> None:
        self._client.log(scalars(metrics), step=metrics.step)

    def close(self) -> None:
        self._client.finish()


class Trackio(WeightsAndBiases):
    """trackio, whose interface is that of Weights & Biases without a folder of its own."""

    name = "trackio"
    package = "trackio"
    module = "trackio"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._client = import_module(self.module)
        self._client.init(**_init_options(folder, recipe))


class MLflow(Tracker):
    """MLflow: ``tracking_uri`` or ``MLFLOW_TRACKING_URI`` names the server, else files in the run folder.

    Options: ``tracking_uri``, ``project`` (the experiment) and ``name`` (the run).
    """

    name = "mlflow"
    package = "mlflow-skinny"
    module = "mlflow"

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        # MLflow reports usage to its makers unless it is told not to (3.17, telemetry/utils.py).
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        options = _init_options(folder, recipe)
        server = options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:
            # MLflow refuses its file store without this (3.17, store/tracking/file_store.py); its other
            # local store needs a database library.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            server = (folder / "mlruns").absolute().as_uri()
        entities = import_module("mlflow.entities")
        self._metric, parameter = entities.Metric, entities.Param
        self._client: Any = import_module(self.module).MlflowClient(tracking_uri=server)
        known = self._client.get_experiment_by_name(options["project"])
        experiment = known.experiment_id if known else self._client.create_experiment(options["project"])
        self._run = self._client.create_run(experiment, run_name=options["name"]).info.run_id
        parameters = [parameter(key, str(value)) for key, value in flatten(options["config"], ".").items()]
        for start in range(0, len(parameters), _MLFLOW_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _MLFLOW_PARAMETERS])

    def log(self, metrics: Metrics) -> None:
        milliseconds = round(1000 * metrics.time)
        values = scalars(metrics).items()
        batch = [self._metric(name, value, milliseconds, metrics.step) for name, value in values]
        self._client.log_batch(self._run, metrics=batch)

    def close(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS: Mapping[str, type[Tracker]] = {
    tracker.name: tracker for tracker in (TensorBoard, WeightsAndBiases, Trackio, MLflow)
}
"""Every tracker by name."""


def check_trackers(recipe: Recipe) -> None:
    """Refuse trackers that are not installed, before anything starts.

    Raises:
        ConfigError: The message names the tracker and what to install.
    """
    for name in recipe.tracking.backends:
        tracker = TRACKERS[name]
        if find_spec(tracker.module) is None:
            raise ConfigError(
                f"tracking backend {name}: {tracker.package} is not installed",
                help=f"pip install {tracker.package}",
            )


def open_trackers(folder: Path, recipe: Recipe) -> list[Tracker]:
    """Open the recipe's trackers."""
    return [TRACKERS[name](folder, recipe) for name in recipe.tracking.backends]


def scalars(metrics: Metrics) -> dict[str, float]:
    """Return the known numbers of a step by name; nested extras as ``extra/a/b``."""
    values = flatten({**to_json(metrics), "step": None, "time": None}, "/").items()
    return {
        name: float(value)
        for name, value in values
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def flatten(data: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Return the values of nested mappings by joined names."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}{separator}{name}": item for name, item in flatten(value, separator).items()}
        else:
            flat[key] = value
    return flat


def _init_options(folder: Path, recipe: Recipe, **defaults: Any) -> dict[str, Any]:
    """Return the arguments of a service's ``init``: the recipe's options win over the defaults."""
    usual = {"project": "fsdptool", "name": folder.name, "config": to_json(recipe), **defaults}
    return {**usual, **recipe.tracking.options}
