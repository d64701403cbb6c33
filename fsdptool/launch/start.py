"""A start of a run, from its inputs to its summary: checked, locked, supervised, summed up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.launch.command import LaunchCommand, build_command
from fsdptool.launch.create import check_folder, check_unlocked, lock_run, wait_for_run, write_run
from fsdptool.launch.machine import claim_gpus
from fsdptool.launch.prepare import Prepared, place_nodes, prepare
from fsdptool.runs.folder import ACCELERATE
from fsdptool.runs.signals import StopSignals, handle_stop_signals

if TYPE_CHECKING:
    from fsdptool.launch.outcome import Outcome, OutOfMemory
    from fsdptool.records.run import Summary

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
    prepared: Prepared
    command_line: LaunchCommand
    stops: StopSignals
    max_restarts: int
    leads: bool

    def supervise(self, on_event: OnEvent) -> Outcome:
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

    def conclude(self, outcome: Outcome) -> Conclusion:
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
    account: OutOfMemory | None
    unwritten: OSError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """How a run is started, with the defaults of :func:`fsdptool.train` and ``fsdptool train``.

    Attributes:
        output: Run folder; None is ``runs/RECIPE``.
        resume: ``auto`` (the newest valid checkpoint) or a checkpoint folder.
        start_over: Whether ``auto`` starts over if the run has made steps and has no checkpoint.
        force: Replace an existing run in the folder.
        processes: Total number of processes; must agree with the configuration.
        cpu: Train on the CPU, whatever the configuration says.
        launcher: ``torchrun`` or ``accelerate``.
        max_restarts: Restarts from the newest valid checkpoint before giving up.
        timeout: Timeout of a collective, in seconds.
        grace: Time that workers have to save after a signal, in seconds.
        node_rank: Rank of this node.
        rendezvous: ``HOST:PORT`` of node 0, for several nodes.
        launch_id: The same on all nodes, unique per launch.
        predict: Predict memory before the run starts.
        trust_remote_code: Whether the model's own code may run.
    """

    output: Path | None = None
    resume: str | None = None
    start_over: bool = False
    force: bool = False
    processes: int | None = None
    cpu: bool = False
    launcher: str = "torchrun"
    max_restarts: int = 0
    timeout: float = 600.0
    grace: int = 600
    node_rank: int | None = None
    rendezvous: str | None = None
    launch_id: str | None = None
    predict: bool = True
    trust_remote_code: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> StartOptions:
        """Return the options among the arguments of a function that has all of them."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})


def run_folder(recipe: Path, output: Path | None) -> Path:
    """Return the folder of a run: the requested one, or that of the recipe."""
    return (output or Path("runs") / recipe.stem).absolute()


def _check_folder(folder: Path, options: StartOptions) -> int:
    return check_folder(folder, resume=options.resume, force=options.force, start_over=options.start_over)


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
    if options.launcher not in ("torchrun", "accelerate"):
        raise ConfigError(
            f"launcher {options.launcher!r} is not supported", help="choose torchrun or accelerate"
        )
    folder = run_folder(recipe, options.output)
    first = not options.node_rank
    with handle_stop_signals("the run was started", "start it again with --resume auto") as stops:
        if first:
            check_unlocked(folder)
            _check_folder(folder, options)
        prepared = prepare(
            recipe,
            config,
            processes=options.processes,
            cpu=options.cpu,
            with_prediction=options.predict and first and not dry_run,
            with_data=first and not dry_run,
            dry_run=dry_run,
            trust_remote_code=options.trust_remote_code,
        )
        nodes = place_nodes(
            prepared.settings, options.node_rank, options.rendezvous, options.launch_id, dry_run=dry_run
        )
        if nodes.count > 1 and options.rendezvous is None and not prepared.settings.main_process_ip:
            prepared = replace(prepared, unchecked=(*prepared.unchecked, "rendezvous"))
        if options.rendezvous is not None:
            # The command line gives the rendezvous, so the finding about the file does not apply.
            remaining = tuple(item for item in prepared.diagnostics if item.code != "FSD329")
            prepared = replace(prepared, diagnostics=remaining)
        command_line = build_command(
            folder,
            prepared.settings,
            processes=prepared.per_machine,
            device=prepared.device,
            launcher="accelerate" if options.launcher == "accelerate" else "torchrun",
            nodes=nodes,
            max_restarts=options.max_restarts,
            grace_seconds=options.grace,
            timeout_seconds=options.timeout,
            config=folder / ACCELERATE,
            trust_remote_code=options.trust_remote_code,
        )
        ready = ReadyRun(folder, prepared, command_line, stops, options.max_restarts, first)
        if dry_run:
            yield ready
            return
        if not first:
            wait_for_run(folder, options.launch_id)
            with claim_gpus(prepared.settings, prepared.device, folder):
                yield ready
            return
        with lock_run(folder), claim_gpus(prepared.settings, prepared.device, folder):
            # Again: another start may have come and gone while this one prepared.
            number = _check_folder(folder, options)
            write_run(
                folder,
                prepared,
                resume=options.resume,
                number=number,
                argv=sys.argv,
                force=options.force,
                launch_id=options.launch_id,
            )
            yield ready
