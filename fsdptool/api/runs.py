"""``train``, ``export`` and ``precompute`` as functions; the commands call the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from fsdptool.api.notebooks import shown
from fsdptool.api.options import ExportOptions
from fsdptool.errors import ConfigError, WorkerError
from fsdptool.launch.options import StartOptions
from fsdptool.options import takes, with_defaults
from fsdptool.records.run import Summary
from fsdptool.spelling import suggest_keywords

if TYPE_CHECKING:
    from fsdptool.launch.start import OnEvent
    from fsdptool.training.data.encoded import Done, Work
    from fsdptool.training.export.api import Exported


@dataclass(frozen=True, slots=True, repr=False)
class ShownSummary(Summary):
    """A :class:`~fsdptool.records.run.Summary` that prints in a few lines."""

    def __repr__(self) -> str:
        """Return how the run ended, its memory and speed, in a few lines."""
        from fsdptool.report.summaries import run_lines

        return "\n".join(run_lines(self))


def _ignore(what: object) -> None:
    """Do nothing: the caller did not ask for progress."""


@suggest_keywords(on_progress="on_event", no_predict="predict")
@takes(StartOptions)
def train(
    recipe: str | PathLike[str],
    config: str | PathLike[str],
    *,
    on_event: OnEvent | None = None,
    **options: Unpack[StartOptions],
) -> ShownSummary:
    """Train a recipe with the processes, mesh and wrapping of a configuration, and wait for the end.

    The workers are processes of their own, so this also works in a notebook. A stop signal (Ctrl-C) lets
    them save a checkpoint first.

    Args:
        recipe: The recipe (YAML).
        config: The accelerate YAML, or another dialect.
        on_event: Called with every event of the workers, for example to show progress.
        **options: The options of ``fsdptool train``.

    Returns:
        The summary of the run, completed or stopped. Its folder holds everything else.

    Raises:
        FsdptoolError: A mistake in the inputs, in one line.
        WorkerError: The run failed; the message names the rank. ``summary.json`` is written before.
    """
    from fsdptool.launch.start import open_run

    with open_run(Path(recipe), Path(config), options) as ready:
        outcome = ready.supervise(on_event or _ignore)
        summary = ready.conclude(outcome).summary
    if outcome.failure is not None:
        raise WorkerError(outcome.failure.message, help=outcome.failure.help)
    return shown(ShownSummary, summary)


@suggest_keywords()
@takes(ExportOptions)
def export(
    run: str | PathLike[str],
    output: str | PathLike[str] | None = None,
    **options: Unpack[ExportOptions],
) -> Exported:
    """Write the trained model of a run for transformers, diffusers or peft.

    Args:
        run: The run folder.
        output: Folder to write; None is ``RUN/export``.
        **options: The options of ``fsdptool export``.

    Raises:
        ConfigError: There is no usable checkpoint, or the options do not suit the run.
        StorageError: The folder exists and may not be replaced, or it cannot be written.
    """
    from fsdptool.runs.folder import RUN
    from fsdptool.training.export.api import export_run

    folder, options = Path(run), with_defaults(ExportOptions, options)
    if not (folder / RUN).exists():
        raise ConfigError(f"{folder} is not a run folder", help="give the folder that fsdptool train wrote")
    dtype = options["dtype"]
    if dtype not in (None, "float32", "bfloat16", "float16", "float64"):
        raise ConfigError(
            f"dtype {dtype!r} is not supported", help="choose float32, bfloat16, float16 or float64"
        )
    exported = export_run(
        folder,
        Path(output) if output is not None else None,
        checkpoint=options["checkpoint"],
        merge=options["merge"],
        average=options["ema"],
        dtype=dtype,  # type: ignore[arg-type]  # one of the four above
        shard_bytes=shard_size(options["max_shard_size"]),
        force=options["force"],
        trust_remote_code=options["trust_remote_code"],
    )
    _note_in_summary(folder, exported.folder)
    return exported


def shard_size(text: str | int) -> int:
    """Return bytes from ``5GB``, ``500MB``, ``2GiB`` or a plain number.

    Raises:
        ConfigError: It is not a size.
    """
    import re

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(text), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"max_shard_size {text!r} is not a size", help="write it as 5GB or 500MB")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _note_in_summary(run: Path, folder: Path) -> None:
    """Name the export in the run's summary, if there is one."""
    import contextlib

    from fsdptool.files.values import read_own_json
    from fsdptool.runs.folder import SUMMARY, write_json

    path = run / SUMMARY
    if path.exists():
        with contextlib.suppress(OSError):
            inside = folder.is_relative_to(run)
            write_json(
                path, read_own_json(path) | {"export": str(folder.relative_to(run) if inside else folder)}
            )


@suggest_keywords()
def precompute(
    recipe: str | PathLike[str],
    *,
    processes: int = 1,
    device: str | None = None,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = _ignore,
) -> Done:
    """Encode the images and captions of a diffusion recipe with the pipeline's VAE and text encoders.

    Continues where an earlier call stopped. Training finds the result automatically.

    Args:
        recipe: The recipe (YAML), with ``data.source: images``.
        processes: Processes on this machine; those of torchrun and Slurm are detected.
        device: ``cpu``, ``cuda`` or ``cuda:N``; None: one GPU per process, or the CPU without GPUs.
        trust_remote_code: Whether the model's own code may run.
        tell: Called with lines of progress.

    Raises:
        ConfigError: The recipe names no images, sizes or pipeline, or they do not fit together.
        WorkerError: A process died; what it finished is kept.
    """
    from fsdptool.training.data.encoded import run_processes

    return run_processes(
        prepare_precompute(Path(recipe), trust_remote_code=trust_remote_code),
        processes=processes,
        device=device,
        tell=tell,
    )


def prepare_precompute(recipe: Path, *, trust_remote_code: bool = False) -> Work:
    """Return what :func:`precompute` will do for a recipe; errors as there."""
    from fsdptool.config.recipe import read_recipe
    from fsdptool.source import consented, resolve_choice, with_places
    from fsdptool.training.data import data_cache
    from fsdptool.training.data.encoded import encoded_data

    read = with_places(read_recipe(recipe), recipe.parent)
    read = consented(read, recipe, trust_remote_code=trust_remote_code)
    if read.data.source != "images":
        raise ConfigError(
            f"data.source is {read.data.source}: there is nothing to precompute",
            help="only data.source images has pictures to encode",
        )
    spec = resolve_choice(read.model, recipe.parent)
    return encoded_data(spec).plan(read, spec, data_cache())
