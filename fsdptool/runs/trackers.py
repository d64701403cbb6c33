"""Trackers: experiment services that receive the steps of a run besides ``metrics.jsonl``. Rank 0 only.

accelerate talks to the services (1.15, tracking.py). This module decides what a recipe calls them and where
their files lie.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.records.codec import to_json
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import Metrics

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

TRACKERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow-skinny",
}
"""The distribution that each tracker needs, by its name in ``tracking.backends``. The distribution's module,
accelerate's tracker and fsdptool's extra have that name, too."""


def check_trackers(recipe: Recipe) -> None:
    """Refuse trackers that are not installed, before anything starts.

    Raises:
        ConfigError: The message names the tracker and what to install.
    """
    for name in recipe.tracking.backends:
        if find_spec(name) is None:
            package = TRACKERS[name]
            raise ConfigError(
                f"tracking backend {name}: {package} is not installed", help=f"pip install {package}"
            )


def open_trackers(folder: Path, recipe: Recipe) -> list[GeneralTracker]:
    """Start the recipe's trackers; a service gets the recipe, and its local files lie in the run folder."""
    if not recipe.tracking.backends:
        return []
    from accelerate.state import PartialState

    # accelerate's loggers and trackers read the rank from this state; with cpu=True it touches no GPU.
    PartialState(cpu=True)
    trackers = [_tracker(name, folder, recipe) for name in recipe.tracking.backends]
    for tracker in trackers:
        tracker.start()
        if tracker.name == "mlflow":  # the others take the recipe when they start, or have no place for it
            tracker.store_init_configuration(flatten(to_json(recipe), "."))
    return trackers


def _tracker(name: str, folder: Path, recipe: Recipe) -> GeneralTracker:
    """Return accelerate's tracker, not started yet; ``tracking.options`` win over the defaults."""
    from accelerate import tracking

    if name == "tensorboard":
        return tracking.TensorBoardTracker("tensorboard", folder)
    options = {"project": "fsdptool", "name": folder.name, **recipe.tracking.options}
    project = options.pop("project")
    if name == "mlflow":
        _choose_mlflow_server(folder, options.get("tracking_uri"))
        return tracking.MLflowTracker(project, run_name=options["name"])
    options = {"config": to_json(recipe), **options}
    if name == "trackio":
        return tracking.TrackioTracker(project, **options)
    return tracking.WandBTracker(project, **{"dir": str(folder), **options})


def _choose_mlflow_server(folder: Path, server: str | None) -> None:
    """Choose ``server``, else that of ``MLFLOW_TRACKING_URI``, else files in the run folder."""
    # MLflow reports usage to its makers unless it is told not to (3.17, telemetry/utils.py).
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    server = server or os.environ.get("MLFLOW_TRACKING_URI")
    if server is None:
        # MLflow refuses its file store without this (3.17, store/tracking/file_store.py); its other local
        # store needs a database library.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        server = (folder / "mlruns").absolute().as_uri()
    import_module("mlflow").set_tracking_uri(server)


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
