"""A start of a run, from its inputs to its summary: checked, locked, supervised, summed up.

It creates, continues or replaces the run folder, and keeps two runs from sharing one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import UnreadableError, private_folder
from fsdptool.files.values import read_json
from fsdptool.launch.command import LaunchCommand, build_command
from fsdptool.launch.machine import claim_gpus
from fsdptool.launch.options import StartOptions
from fsdptool.launch.prepare import PreparedRun, place_nodes, prepare
from fsdptool.options import with_defaults
from fsdptool.records.codec import to_json
from fsdptool.records.run import Start
from fsdptool.runs.folder import (
    ACCELERATE,
    CHECKPOINTS,
    ENVIRONMENT,
    EVENTS,
    EXPORT,
    LOCK,
    LOGS,
    METRICS,
    PREDICTION,
    RUN,
    SUMMARY,
    RunInputs,
    default_folder,
    environment,
    is_run_folder,
    read_start,
    write_inputs,
    write_json,
    write_start,
    write_text,
)
from fsdptool.runs.manifest import lost_steps, read_manifest
from fsdptool.runs.signals import StopSignals, handle_stop_signals

if TYPE_CHECKING:
    from fsdptool.launch.outcome import OutOfMemoryReport, RunOutcome
    from fsdptool.records.run import Summary


_OURS = (CHECKPOINTS, EVENTS, LOGS, EXPORT, METRICS, SUMMARY, RUN)


def check_folder(folder: Path, *, resume: str | None, force: bool, start_over: bool = False) -> int:
    """Check that ``folder`` may be written; return how often the run was started before.

    Raises:
        ConfigError: There is a run already and neither ``resume`` nor ``force`` says what to do with it,
            ``resume`` is not a checkpoint that can be resumed, or ``resume`` is ``auto``, the run has no
            checkpoint, and ``start_over`` does not accept that its steps are lost.
    """
    if resume and force:
        raise ConfigError("--resume and --force cannot be combined", help="use only one of them")
    if start_over and resume != "auto":
        raise ConfigError("--start-over says what --resume auto may do", help="add --resume auto")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", help="choose another folder with --output")
    if resume and resume != "auto":
        advice = "--resume auto takes the newest complete checkpoint of the run"
        read_manifest(Path(resume), otherwise=advice)
    others = (folder / RUN).exists() and not _has_own_record(folder)
    if (folder / RUN).exists() and (resume or not others):
        if resume:
            if resume == "auto" and not start_over:
                check_loss(folder)
            return read_start(folder).number + 1
        if not force:
            raise ConfigError(
                f"{folder} already contains a run",
                help="continue it with --resume auto, replace it with --force, or choose another --output",
            )
        return 0
    # With our lock in it, it is left from a start that ended before the folder was complete.
    if folder.is_dir() and any(folder.iterdir()) and (others or not (folder / LOCK).exists()):
        raise ConfigError(
            f"{folder} is not empty and does not contain a run",
            help="choose an empty or new folder with --output",
        )
    return 0


def check_loss(folder: Path) -> None:
    """Refuse to continue a run without a checkpoint: somebody has to decide that its steps are lost.

    Raises:
        ConfigError: The folder has a run that has made steps and has no checkpoint.
    """
    if (folder / RUN).exists() and (lost := lost_steps(folder)):
        origin = read_start(folder).resume
        again = f"continue from {origin} again with --resume, " if origin not in (None, "auto") else ""
        raise ConfigError(
            f"no checkpoint exists in {folder}: {lost} step{'s are' if lost > 1 else ' is'} lost",
            help=f"{again}start over with --resume auto --start-over, or choose another folder with --output",
        )


def wait_for_run(folder: Path, launch_id: str | None, *, seconds: float = 600.0) -> None:
    """Wait on the other nodes until the first has written the folder for this launch.

    Raises:
        ConfigError: It did not, or the file system is not shared.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ConfigError):
            if read_start(folder).launch_id == launch_id:
                return
        time.sleep(0.5)
    raise ConfigError(
        f"{folder} was not written for launch {launch_id!r} within {seconds:.0f} s",
        help="start the same command with --node-rank 0, on a file system that all machines share",
    )


def write_run(
    folder: Path,
    prepared: PreparedRun,
    *,
    resume: str | None,
    number: int,
    argv: Sequence[str],
    force: bool,
    launch_id: str | None = None,
) -> None:
    """Write everything the workers read; ``run.json`` last.

    Raises:
        StorageError: The folder cannot be written; nothing that was there is lost unless ``force``.
    """
    start = Start(
        prepared.world_size,
        prepared.device,
        resume,
        number,
        tuple(argv),
        launch_id,
        time.time(),
        os.path.relpath(prepared.recipe_path, folder),
    )
    inputs = RunInputs(
        folder,
        prepared.recipe,
        prepared.settings,
        prepared.spec,
        prepared.units,
        prepared.teacher_spec,
        prepared.teacher_units,
    )
    try:
        if force:
            _clear(folder)
        for name in (CHECKPOINTS, EVENTS, LOGS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, text in prepared.files.items():
            write_text(folder / name, text)
        write_inputs(inputs)
        write_json(folder / PREDICTION, to_json(prepared.prediction))
        write_json(folder / ENVIRONMENT, environment())
        write_start(folder, start, [inputs.recipe, inputs.settings, inputs.spec, inputs.units])
    except OSError as error:
        raise StorageError(
            f"the run folder {folder} cannot be written: {error.strerror or error}",
            help="free disk space, or choose another folder with --output",
        ) from error


def _clear(folder: Path) -> None:
    for name in _OURS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_unlocked(folder: Path) -> None:
    """Refuse a folder in which a run is live, before anything is prepared.

    Raises:
        ConfigError: Another process trains in this folder.
    """
    if (folder / LOCK).exists():
        with lock_run(folder):
            pass


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock the run for this process; the lock file stays in the folder and marks it as fsdptool's.

    Raises:
        ConfigError: Another process trains in this folder.
        StorageError: The folder cannot be made.
    """
    from filelock import FileLock, Timeout

    try:
        private_folder(folder)
    except OSError as error:
        raise StorageError(
            f"the run folder {folder} cannot be made: {error.strerror or error}",
            help="choose another folder with --output",
        ) from error
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process trains in {folder}", help="wait for it, or choose another --output"
        ) from None
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        # Never unlinked: a process that has it open would hold a lock that the next one does not see.
        lock.release()


OnEvent = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """A run whose folder is written and locked, and whose workers can be started.

    Attributes:
        folder: The run folder.
        prepared: What the preflight found.
        command_line: Command and environment of the workers on this machine.
        stops: The stop signals that arrive meanwhile.
        max_restarts: Restarts from the newest valid checkpoint before giving up.
        leads: Whether this is the first machine, which writes the folder and sums up.
    """

    folder: Path
    prepared: PreparedRun
    command_line: LaunchCommand
    stops: StopSignals
    max_restarts: int
    leads: bool

    def supervise(self, on_event: OnEvent) -> RunOutcome:
        """Start the workers and wait until the run has ended.

        Args:
            on_event: Called with every event of the workers (``docs/reference/run-folder.md``).
        """
        from fsdptool.launch.supervise import Supervisor

        # From here on a signal has somebody to reach; once they have ended, it changes nothing.
        self.stops.collect()
        return Supervisor(
            self.folder,
            self.command_line,
            max_restarts=self.max_restarts,
            signals=self.stops.taken,
            on_event=on_event,
        ).run()

    def conclude(self, outcome: RunOutcome) -> Conclusion:
        """Sum up a run that has ended and write ``summary.json``."""
        from fsdptool.launch.outcome import account_for_memory, summarise, write_report, write_summary

        mesh = asdict(self.prepared.settings.mesh.resolve(self.prepared.world_size))
        summary = summarise(self.folder, outcome, units=len(self.prepared.units.units), mesh=mesh)
        failure = outcome.failure
        account = account_for_memory(self.prepared, failure) if failure is not None else None
        try:
            if account is not None:
                summary = replace(summary, memory_report=write_report(self.folder, account))
            return Conclusion(summary, write_summary(self.folder, summary), account)
        except OSError as error:
            return Conclusion(summary, asdict(summary), account, error)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """How a run ended.

    Attributes:
        summary: What ``summary.json`` holds.
        document: The same as a document.
        account: The report on running out of memory, where that ended the run.
        unwritten: Why ``summary.json`` could not be written, or None.
    """

    summary: Summary
    document: dict[str, Any]
    account: OutOfMemoryReport | None
    unwritten: OSError | None = None


def run_folder(recipe: Path, output: str | Path | None) -> Path:
    """Return the folder of a run: the requested one, or that of the recipe, by :func:`default_folder`."""
    return default_folder(recipe, Path("runs")) if output is None else Path(output).absolute()


def has_other_run(folder: Path, options: StartOptions) -> bool:
    """Return whether the folder contains a run that the options neither continue nor replace."""
    chosen = options["resume"] or options["force"] or options["start_over"]
    return not chosen and (is_run_folder(folder) or has_damaged_record(folder))


def has_damaged_record(folder: Path) -> bool:
    """Return whether a folder's ``run.json`` cannot be parsed, or is one of ours that cannot be read."""
    if not _has_own_record(folder):
        return False
    try:
        read_start(folder)
    except ConfigError:
        return True
    return False


def _has_own_record(folder: Path) -> bool:
    """Return whether there is a ``run.json`` that another program did not write, as far as it can be read."""
    if not (folder / RUN).exists():
        return False
    try:
        document = read_json(folder / RUN)
    except UnreadableError:
        return True
    return isinstance(document, dict) and document.get("schema") == "run"


def _check_folder(folder: Path, options: StartOptions) -> int:
    return check_folder(
        folder, resume=options["resume"], force=options["force"], start_over=options["start_over"]
    )


@contextmanager
def open_run(
    recipe: Path,
    config: Path,
    options: StartOptions,
    *,
    dry_run: bool = False,
) -> Iterator[ReadyRun]:
    """Check the inputs, write the run folder and hold its lock.

    Args:
        recipe: The recipe (YAML).
        config: The accelerate YAML, or another dialect.
        options: How the run is started.
        dry_run: Only prepare the command line: nothing is written or locked.

    Raises:
        FsdptoolError: A mistake in the inputs, in one line.
    """
    options = with_defaults(StartOptions, options)
    if options["launcher"] not in ("torchrun", "accelerate"):
        raise ConfigError(
            f"launcher {options['launcher']!r} is not supported", help="choose torchrun or accelerate"
        )
    folder = run_folder(recipe, options["output"])
    first = not options["node_rank"]
    with handle_stop_signals("the run was started", "start it again with --resume auto") as stops:
        # A dry run writes nothing: that the folder has a run already does not matter to it.
        if first and not (dry_run and has_other_run(folder, options)):
            check_unlocked(folder)
            _check_folder(folder, options)
        prepared = prepare(
            recipe,
            config,
            processes=options["processes"],
            cpu=options["cpu"],
            with_prediction=options["predict"] and first and not dry_run,
            with_data=first and not dry_run,
            dry_run=dry_run,
            trust_remote_code=options["trust_remote_code"],
        )
        nodes = place_nodes(
            prepared.settings,
            options["node_rank"],
            options["rendezvous"],
            options["launch_id"],
            dry_run=dry_run,
        )
        if nodes.count > 1 and options["rendezvous"] is None and not prepared.settings.main_process_ip:
            prepared = replace(prepared, unchecked=(*prepared.unchecked, "rendezvous"))
        if options["rendezvous"] is not None:
            # The command line gives the rendezvous, so the finding about the file does not apply.
            remaining = tuple(item for item in prepared.diagnostics if item.code != "FSD329")
            prepared = replace(prepared, diagnostics=remaining)
        command_line = build_command(
            folder,
            prepared.settings,
            processes=prepared.per_machine,
            device=prepared.device,
            launcher="accelerate" if options["launcher"] == "accelerate" else "torchrun",
            nodes=nodes,
            max_restarts=options["max_restarts"],
            grace_seconds=options["grace"],
            timeout_seconds=options["timeout"],
            config=folder / ACCELERATE,
            trust_remote_code=options["trust_remote_code"],
        )
        ready = ReadyRun(folder, prepared, command_line, stops, options["max_restarts"], first)
        if dry_run:
            yield ready
            return
        if not first:
            wait_for_run(folder, options["launch_id"])
            with claim_gpus(prepared.settings, prepared.device, folder):
                yield ready
            return
        with lock_run(folder), claim_gpus(prepared.settings, prepared.device, folder):
            # Again: another start may have come and gone while this one prepared.
            number = _check_folder(folder, options)
            write_run(
                folder,
                prepared,
                resume=options["resume"],
                number=number,
                argv=sys.argv,
                force=options["force"],
                launch_id=options["launch_id"],
            )
            yield ready
