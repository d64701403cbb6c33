"""Trackers: experiment services that receive the steps of a run besides ``metrics.jsonl``. Rank 0 only.

A tracker is one class in :data:`TRACKERS` and its name in ``records/recipe.py:TrackerName``; an optional
dependency of the same name belongs in ``pyproject.toml``. ``fsdptool doctor``, the preflight and the recipe's
schema read the table.
"""

from __future__ import annotations

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


TRACKERS: Mapping[str, type[Tracker]] = {
    tracker.name: tracker for tracker in (TensorBoard, WeightsAndBiases, Trackio)
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
    values: dict[str, float] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                collect(f"{prefix}/{key}" if prefix else str(key), item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            values[prefix] = float(value)

    collect("", to_json(metrics))
    for name in ("step", "time"):
        values.pop(name, None)
    return values


def _init_options(folder: Path, recipe: Recipe, **defaults: Any) -> dict[str, Any]:
    """Return the arguments of a service's ``init``: the recipe's options win over the defaults."""
    usual = {"project": "fsdptool", "name": folder.name, "config": to_json(recipe), **defaults}
    return {**usual, **recipe.tracking.options}
