"""The queue of runs on one machine: its entries, what each of them needs, and why one waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from fsdptool.records.annotations import Count, Positive


class EntryState(StrEnum):
    """How an entry of the queue stands. Values are those of the JSON.

    A started entry takes its state from the run folder and from its processes, never from memory.
    """

    WAITING = "waiting"
    HELD = "held"
    STARTING = "starting"
    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DEAD = "dead"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """It has ended, and another start has replaced what the run folder said of it."""

    @property
    def active(self) -> bool:
        """Whether processes of the entry run, or are about to."""
        return self in (EntryState.STARTING, EntryState.RUNNING)

    @property
    def pending(self) -> bool:
        """Whether the entry has not been started."""
        return self in (EntryState.WAITING, EntryState.HELD)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run occupies while it is running.

    Attributes:
        folder: The run folder; two starts never share one.
        gpus: Ids of its GPUs; empty for a run on the CPU.
        slots: Process slots of a run on the CPU; 0 for a run on GPUs.
    """

    folder: str
    gpus: frozenset[str] = frozenset()
    slots: Count = 0


WaitReason = Literal["gpus", "slots", "folder"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Why an entry does not start yet.

    Attributes:
        reason: What is occupied: GPUs, process slots or the run folder.
        gpus: The GPUs that are occupied; empty for another reason.
        holder: The run folder of the run that occupies it, or of the entry before this one that needs it.
        queued: Whether the holder waits itself: entries that need the same start in their order.
    """

    reason: WaitReason
    gpus: tuple[str, ...]
    holder: str
    queued: bool


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A run in the queue. Times are in seconds since 1970.

    Attributes:
        id: Number of the entry; never used again.
        state: Its state.
        recipe: The recipe.
        config: The accelerate YAML, or another dialect.
        folder: The run folder.
        options: Further options of ``fsdptool train``, as they are typed.
        gpus: Ids of its GPUs; empty for a run on the CPU.
        slots: Process slots of a run on the CPU; 0 for a run on GPUs.
        added: When it joined the queue.
        started: When it was started, or null.
        ended: When its end was noticed, or null.
        pid: Process id of its ``fsdptool train`` while that runs, or null.
        wait: Why it waits, or null.
        message: What went wrong, or null.
        log: File with what the command printed, or null before the start.
    """

    id: Positive
    state: EntryState
    recipe: str
    config: str
    folder: str
    options: tuple[str, ...]
    gpus: tuple[str, ...]
    slots: Count
    added: float
    started: float | None = None
    ended: float | None = None
    pid: Positive | None = None
    wait: Wait | None = None
    message: str | None = None
    log: str | None = None

    @property
    def needs(self) -> Needs:
        """What the run occupies."""
        return Needs(self.folder, frozenset(self.gpus), self.slots)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that is requested for the queue.

    Attributes:
        recipe: The recipe (YAML).
        config: The accelerate YAML, or another dialect.
        output: Run folder; default: runs/RECIPE.
        gpus: GPUs of the run (0,1), if the configuration has no gpu_ids.
        cpu: Train on the CPU, whatever the configuration says.
        predict: Predict memory before the run starts.
        max_restarts: Restarts from the newest valid checkpoint before giving up.
        resume: Continue the run in the folder from its newest checkpoint.
        start_over: With resume: start over if the run has no checkpoint; its steps are lost.
        force: Replace an existing run in the folder.
        hold: Do not start it before it is released.
        first: Start it before the entries that wait already.
    """

    recipe: str
    config: str
    output: str | None = None
    gpus: tuple[str, ...] = ()
    cpu: bool = False
    predict: bool = True
    max_restarts: Count = 0
    resume: bool = False
    start_over: bool = False
    force: bool = False
    hold: bool = False
    first: bool = False

    def train_options(self) -> tuple[str, ...]:
        """Return the options of ``fsdptool train`` besides the files and the folder, as they are typed."""
        return (
            *(("--resume", "auto") if self.resume else ()),
            *(("--start-over",) if self.start_over else ()),
            *(("--force",) if self.force else ()),
            *(("--cpu",) if self.cpu else ()),
            *(() if self.predict else ("--no-predict",)),
            *(("--max-restarts", str(self.max_restarts)) if self.max_restarts else ()),
        )

    def command(self) -> tuple[str, ...]:
        """Return the words of the ``fsdptool queue add`` that makes this request."""
        return (
            *("fsdptool", "queue", "add", self.recipe, "--config", self.config),
            *(("--output", self.output) if self.output is not None else ()),
            *(("--gpus", ",".join(self.gpus)) if self.gpus else ()),
            *(word for word in self.train_options() if word != "auto"),
            *(("--hold",) if self.hold else ()),
            *(("--first",) if self.first else ()),
        )


@dataclass(frozen=True, slots=True)
class QueueReport:
    """What `fsdptool queue list --format json` prints.

    Attributes:
        file: The database of the queue.
        slots: Process slots of this machine for runs on the CPU.
        scheduler: Process id of the program that starts the entries; null if none does.
        entries: Every entry: those that run, those that wait in the order in which they start, then those
            that have ended, the latest first.
    """

    file: str
    slots: Positive
    scheduler: Positive | None
    entries: tuple[QueueEntry, ...] = field(default=())
