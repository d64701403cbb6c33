"""Where steps go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio. Rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fsdptool.errors import ConfigError
from fsdptool.records.codec import to_json
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import Metrics

BACKENDS = ("tensorboard", "wandb", "trackio")


class Tracker(Protocol):
    """Takes every logged step; ``name`` is its backend's."""

    name: str

    def log(self, metrics: Metrics) -> None:
        """Record one step."""
        ...

    def close(self) -> None:
        """Flush and leave."""
        ...


def check_backends(recipe: Recipe) -> None:
    """Refuse tracking backends that are unknown or not installed, before anything starts.

    Raises:
        ConfigError: The message names the backend and what to install.
    """
    for name in recipe.tracking.backends:
        if name not in BACKENDS:
            raise ConfigError(
                f"there is no tracking backend {name!r}", help=f"choose from {', '.join(BACKENDS)}"
            )
        if find_spec(name) is None:
            raise ConfigError(f"tracking backend {name} is not installed", help=f"pip install {name}")


def open_trackers(folder: Path, recipe: Recipe) -> list[Tracker]:
    """Open the recipe's backends; every ``log_every``-th step goes to each."""
    opened: list[Tracker] = []
    for name in recipe.tracking.backends:
        inner: Tracker
        if name == "tensorboard":
            inner = _TensorBoard(folder / "tensorboard")
        else:
            inner = _Client(name, folder, recipe)
        opened.append(_Thinned(inner, max(recipe.tracking.log_every, 1)))
    return opened


def scalars(metrics: Metrics) -> dict[str, float]:
    """Return the known numbers of a step by name; nested extras as ``extra/a/b``."""
    found: dict[str, float] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                collect(f"{prefix}/{key}" if prefix else str(key), item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix] = float(value)

    collect("", to_json(metrics))
    for name in ("step", "time"):
        found.pop(name, None)
    return found


class _Thinned:
    """Passes on every n-th step."""

    def __init__(self, inner: Tracker, every: int) -> None:
        self.name = inner.name
        self._inner = inner
        self._every = every

    def log(self, metrics: Metrics) -> None:
        if metrics.step % self._every == 0:
            self._inner.log(metrics)

    def close(self) -> None:
        self._inner.close()


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, metrics: Metrics) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics.step, walltime=metrics.time)

    def close(self) -> None:
        self._writer.close()


class _Client:
    """wandb and trackio, whose interfaces agree (``init``, ``log``, ``finish``)."""

    def __init__(self, name: str, folder: Path, recipe: Recipe) -> None:
        from importlib import import_module

        self.name = name
        self._module: Any = import_module(name)
        options = dict(recipe.tracking.options)
        options.setdefault("project", "fsdptool")
        options.setdefault("name", folder.name)
        options.setdefault("config", to_json(recipe))
        if name == "wandb":
            # Beside the run, not wherever the command was started.
            options.setdefault("dir", str(folder))
        self._module.init(**options)

    def log(self, metrics: Metrics) -> None:
        self._module.log(scalars(metrics), step=metrics.step)

    def close(self) -> None:
        self._module.finish()
