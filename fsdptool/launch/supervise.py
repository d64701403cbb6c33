"""Starts and watches the workers, forwards stop requests, and reports which worker failed. Torch-free.

torchrun (torch 2.13) polls its children every 0.1 s; after a failure it sends the others SIGTERM and,
30 s later, SIGKILL, and it names ranks only in its log. This supervisor watches the same processes by
their announced ids, so that the bound is ours and the message says who and why.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from fsdptool.distributed.rendezvous import FOLDER, LOCAL
from fsdptool.files.text import UnreadableError, open_for_writing, read_ends
from fsdptool.files.values import load_json
from fsdptool.launch.command import LaunchCommand
from fsdptool.launch.outcome import Failure, RunOutcome, failure_of_event
from fsdptool.records.run import RunStatus
from fsdptool.runs.events import STDERR_MARK, SUPERVISOR, Follower
from fsdptool.runs.folder import LOGS
from fsdptool.runs.signals import SIGNALS, signal_name
from fsdptool.runs.watchdog import describe_silence, is_running, is_stopped, read_progress, silent_ranks

POLL_SECONDS = 0.1
FAILURE_GRACE_SECONDS = 5.0
"""How long the other ranks may take to notice that one has gone before they are killed."""

FATAL_GRACE_SECONDS = 0.5
"""How long the last events may take if a restart cannot help: torchrun must not restart the workers."""

REMOTE_SECONDS = 30.0
"""How long the last events of other machines may take to be seen here (NFS caches attributes)."""

KILL_SECONDS = 5.0
"""How long killed processes may take to end: the kernel frees their memory first, and may be busy."""

_LOG_TAIL_BYTES = 1 << 17
"""Bytes at the end of a rank's log that are searched for NCCL's last words."""

_TORCHRUN_FAILURE = re.compile(r"exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


@dataclass(slots=True)
class _Rank:
    pid: int
    local: bool
    node: str
    state: str = "running"
    seen_dead: float | None = None


class Supervisor:
    """Runs one launch command to its end.

    Args:
        folder: The run folder.
        command: What to start.
        max_restarts: The number of relaunches torchrun may make.
        signals: The stop signals this process has received; the signal handler appends to it.
        on_event: Called with every event, in order.
    """

    def __init__(
        self,
        folder: Path,
        command: LaunchCommand,
        *,
        max_restarts: int = 0,
        signals: Sequence[int] = (),
        on_event: Callable[[Mapping[str, Any]], None] = lambda _event: None,
    ) -> None:
        self._folder = folder
        self._command = command
        self._max_restarts = max_restarts
        self._on_event = on_event
        self._follower = Follower(folder)
        self._ranks: dict[int, _Rank] = {}
        self._attempt = 0
        self._failures: list[Mapping[str, Any]] = []
        self._deaths: list[int] = []
        self._exit_codes: dict[int, int] = {}
        self._finished: dict[int, Mapping[str, Any]] = {}
        self._failed_since: float | None = None
        self._silent: dict[int, str] = {}
        self._world_size = 0
        self._signals = signals
        self._stop_forwarded = False
        self._stepped = False
        self._killed = False
        self._output_tail: deque[str] = deque(maxlen=40)
        self._stderr_events: deque[dict[str, Any]] = deque()

    def run(self) -> RunOutcome:
        """Start the workers and return when the last process has ended."""
        # Here, not in the launcher: a killed process cannot clean up.
        with tempfile.TemporaryDirectory(prefix="fsdptool-rendezvous-") as meeting:
            place = {FOLDER: meeting} if LOCAL in self._command.argv else {}
            return self._run({**os.environ, **place, **self._command.environment})

    def _run(self, environment: dict[str, str]) -> RunOutcome:
        environment[SUPERVISOR] = str(os.getpid())
        # A session of its own: Ctrl-C in the terminal must reach the parent alone, which asks the
        # workers to save; torchrun would otherwise forward it as their second signal.
        process = subprocess.Popen(
            self._command.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                self._poll(process)
                time.sleep(POLL_SECONDS)
            reader.join(timeout=2.0)
            self._poll(process)
            self._record_deaths()
            if process.returncode == 0:
                self._await_remote_events(process)
        finally:
            self._kill_all(process)
        return self._outcome(process.returncode)

    def _await_remote_events(self, process: subprocess.Popen[str]) -> None:
        """Give the other machines' last events time to appear on the shared file system."""
        deadline = time.monotonic() + REMOTE_SECONDS
        while self._unreported_remote_ranks() and not self._signals and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._poll(process)

    def _unreported_remote_ranks(self) -> list[int]:
        """Return the ranks on other nodes that have not reported how they ended."""
        return [n for n, rank in self._ranks.items() if not rank.local and rank.state == "running"]

    def _forward_stop(self) -> None:
        """Ask every rank to save and stop; ranks that start later are asked when they start."""
        self._stop_forwarded = True
        self._notify({"kind": "stop_requested", "signal": signal.Signals(self._signals[0]).name})
        for rank in self._ranks.values():
            self._request_stop(rank)

    def _notify(self, event: Mapping[str, Any]) -> None:
        """Pass an event to the display; without a terminal or pipe, the run continues silently."""
        try:
            self._on_event(event)
        except OSError:
            self._on_event = lambda _event: None

    def _request_stop(self, rank: _Rank) -> None:
        if rank.local and rank.state == "running":
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)

    def _read(self, stream: IO[str]) -> None:
        path = self._folder / LOGS / "launcher.log"
        log: IO[bytes] | None = None
        # Without the log torchrun's pipe is read all the same: what ranks say when the disk is full is in it.
        with contextlib.suppress(OSError):
            log = os.fdopen(open_for_writing(path, append=True), "ab", buffering=0)
        for line in stream:
            if line.startswith(STDERR_MARK):
                with contextlib.suppress(ValueError):
                    self._stderr_events.append(load_json(line.removeprefix(STDERR_MARK)))
                continue
            self._output_tail.append(line.rstrip())
            for code, _, pid in _TORCHRUN_FAILURE.findall(line):
                self._exit_codes[int(pid)] = int(code)
            if log is not None:
                with contextlib.suppress(OSError):
                    log.write(line.encode())
        if log is not None:
            log.close()

    def _poll(self, process: subprocess.Popen[str]) -> None:
        for event in self._follower.news():
            self._record(event)
            self._notify(event)
        while self._stderr_events:
            event = self._stderr_events.popleft()
            self._record(event)
            self._notify(event)
        self._check_alive()
        if self._signals and not self._stop_forwarded:
            self._forward_stop()
        if len(self._signals) > 1 and not self._killed:
            self._kill_all(process)
        if self._failed_since is None or self._killed:
            return
        waited = time.monotonic() - self._failed_since
        if waited > FATAL_GRACE_SECONDS and not self._cause().retryable:
            self._kill_all(process)
        elif waited > FAILURE_GRACE_SECONDS:
            self._kill_ranks()
            if not self._may_restart():
                self._kill_all(process)

    def _record(self, event: Mapping[str, Any]) -> None:
        kind, rank = event.get("kind"), event.get("rank")
        if kind == "started" and isinstance(rank, int):
            if event["attempt"] > self._attempt:
                self._start_attempt(int(event["attempt"]))
            # By its parent, too: containers of one machine, or two nodes tried out on it, share a name.
            local = (event.get("node"), event.get("supervisor")) == (os.uname().nodename, os.getpid())
            self._ranks[rank] = _Rank(int(event["pid"]), local, str(event.get("node")))
            self._world_size = int(event.get("world_size", 0))
            if self._stop_forwarded:
                self._request_stop(self._ranks[rank])
        elif kind == "step":
            self._stepped = True
        elif kind == "failure" and isinstance(rank, int):
            self._failures.append(event)
            if rank in self._ranks:
                self._ranks[rank].state = "failed"
            self._fail()
        elif kind == "finished" and isinstance(rank, int):
            self._finished[rank] = event
            if rank in self._ranks:
                self._ranks[rank].state = "finished"

    def _start_attempt(self, attempt: int) -> None:
        # torchrun may start the next attempt before a death has been seen twice.
        self._record_deaths()
        self._notify({"kind": "restarted", "attempt": attempt, "failure": self._cause().message})
        self._attempt = attempt
        self._ranks.clear()
        self._failures.clear()
        self._deaths.clear()
        self._exit_codes.clear()
        self._finished.clear()
        self._failed_since = None
        self._silent.clear()
        self._stepped = False

    def _check_alive(self) -> None:
        now = time.monotonic()
        for number, rank in self._ranks.items():
            if not rank.local or rank.state != "running" or is_running(rank.pid):
                continue
            if rank.seen_dead is None:
                # Its last words may still be on their way from its event file.
                rank.seen_dead = now
            elif now - rank.seen_dead > 2 * POLL_SECONDS:
                rank.state = "died"
                self._deaths.append(number)
                self._fail()

    def _record_deaths(self) -> None:
        """Record the ranks that have ended without reporting, in the order in which that was seen."""
        seen = sorted(self._ranks.items(), key=lambda item: item[1].seen_dead or math.inf)
        for number, rank in seen:
            if rank.local and rank.state == "running" and not is_running(rank.pid):
                rank.state = "died"
                self._deaths.append(number)

    def _fail(self) -> None:
        if self._failed_since is None:
            self._failed_since = time.monotonic()
            # Before the stacks are asked for, and before torchrun ends anybody.
            self._silent = self._describe_silent()
            self._dump_stacks()

    def _describe_silent(self) -> dict[int, str]:
        """Return the ranks that those which failed first may have waited for, and what is known of each."""
        now = time.time()
        progress = {rank: read_progress(self._folder, rank) for rank in range(self._world_size)}
        if len(self._ranks) < self._world_size:
            progress |= {rank: None for rank in progress if rank not in self._ranks}
        stopped = [n for n, rank in self._ranks.items() if rank.local and is_stopped(rank.pid)]
        reporters = [n for n, rank in self._ranks.items() if rank.state != "running"]
        silent = silent_ranks(progress, reporters=reporters, stopped=stopped, now=now)
        return {n: describe_silence(progress[n], stopped=n in stopped, now=now) for n in silent}

    def _name_silent(self, seen: Failure) -> Failure:
        """Blame a timeout on the rank that was waited for, where that is known."""
        own = next((event for event in self._failures if event["rank"] in self._silent), None)
        if not self._silent or seen.rank in self._silent:
            return seen
        if own is not None and not own.get("secondary"):
            return failure_of_event(own)
        first, *rest = self._silent
        more = f" (and {len(rest)} other ranks)" if rest else ""
        return replace(
            seen,
            rank=first,
            message=f"rank {first}{more}: {self._silent[first]}; rank {seen.rank} gave up waiting for it",
            help=f"read the stacks and rank-{first:05d}.log in {self._folder / LOGS}",
        )

    def _dump_stacks(self) -> None:
        """Ask every live rank for its stack (logs/rank-N.stacks), also one that has just failed."""
        for rank in self._ranks.values():
            if rank.local and rank.state in ("running", "failed") and is_running(rank.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGUSR2)

    def _may_restart(self) -> bool:
        return self._attempt < self._max_restarts and self._cause().retryable and not self._signals

    def _kill_ranks(self) -> None:
        for rank in self._ranks.values():
            if rank.local and rank.state == "running" and is_running(rank.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _kill_all(self, process: subprocess.Popen[str]) -> None:
        self._killed = True
        self._kill_ranks()
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._await_ends()

    def _await_ends(self) -> None:
        """Wait until no rank of this machine runs any more, so that the next run finds its memory free."""
        deadline = time.monotonic() + KILL_SECONDS
        pids = [rank.pid for rank in self._ranks.values() if rank.local]
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)

    def _cause(self) -> Failure:
        """Return the root cause: a rank's own error, else a killed rank, else a symptom of either."""
        primary = [event for event in self._failures if not event.get("secondary")]
        if primary:
            first = min(primary, key=lambda event: (event.get("timeout", False), event["time"]))
            seen = failure_of_event(first)
            return self._name_silent(seen) if first.get("timeout") else seen
        if self._deaths:
            seen = self._describe_death(self._deaths[0])
            return self._name_silent(seen) if self._timed_out(self._deaths[0]) else seen
        if self._failures:
            seen = failure_of_event(min(self._failures, key=lambda event: event["time"]))
            gone = self._unreported_remote_ranks()
            if not gone:
                return seen
            where = ", ".join(f"rank {number} on {self._ranks[number].node}" for number in gone)
            return replace(
                seen,
                rank=gone[0],
                message=f"{where} ended without reporting an error; {seen.message}",
                help="check that node, then restart all nodes with a new --launch-id",
            )
        last = next((line for line in reversed(self._output_tail) if line.strip()), "no output")
        return Failure(None, f"the workers failed to start: {last}", f"read {self._folder / LOGS}")

    def _describe_death(self, number: int) -> Failure:
        pid = self._ranks[number].pid
        code = self._exit_codes.get(pid)
        how = "ended without reporting an error"
        if code is not None:
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
        return Failure(
            number,
            f"rank {number} (process {pid}) {how}",
            f"read {self._folder / LOGS / f'rank-{number:05d}.log'}",
        )

    def _timed_out(self, number: int) -> bool:
        """Say whether NCCL's own watchdog ended a rank: it aborts the process (torch 2.13, NCCLUtils)."""
        log = self._folder / LOGS / f"rank-{number:05d}.log"
        with contextlib.suppress(UnreadableError):
            _, end, _ = read_ends(log, tail=_LOG_TAIL_BYTES)
            return b"Watchdog caught collective operation timeout" in end
        return False

    def _outcome(self, returncode: int) -> RunOutcome:
        if len(self._signals) > 1:
            return RunOutcome("interrupted", None, self._attempt, self._finished)
        statuses = {event.get("status") for event in self._finished.values()}
        # torchrun leaves with 0 only after the agents of all machines have met at its exit barrier.
        unreported = self._unreported_remote_ranks() if returncode == 0 else []
        complete = bool(self._finished) and len(self._finished) + len(unreported) == len(self._ranks)
        if complete and not self._failures and not self._deaths:
            status: RunStatus = "stopped" if "stopped" in statuses else "completed"
            return RunOutcome(status, None, self._attempt, self._finished)
        stop_requested = self._signals or any(-code in SIGNALS for code in self._exit_codes.values())
        if stop_requested and not self._stepped and all(event.get("secondary") for event in self._failures):
            # Slurm signals every process of a step: torchrun, or a rank that has not come to its handlers,
            # may end of it. Nothing was done yet, so nothing is lost, and the run can go on.
            return RunOutcome("stopped", None, self._attempt, self._finished)
        return RunOutcome("failed", self._cause(), self._attempt, self._finished)
