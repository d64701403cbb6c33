"""What is known of failures of distributed runs, and what was recognised in a log or a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fsdptool.records.annotations import Count, Positive
from fsdptool.records.run import RunView


class Cause(StrEnum):
    """Why a run failed. Values are those of the JSON."""

    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    SHARED_MEMORY = "shared_memory"
    HOST_LIMITS = "host_limits"
    STORAGE = "storage"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    DIVERGED_RANKS = "diverged_ranks"
    HANG = "hang"
    PEER_ENDED = "peer_ended"
    GPU_ASSIGNMENT = "gpu_assignment"
    RENDEZVOUS = "rendezvous"
    NETWORK = "network"
    HARDWARE = "hardware"
    SHAPES = "shapes"
    DTYPES = "dtypes"
    CHECKPOINTING = "checkpointing"
    CHECKPOINT = "checkpoint"
    LOADING = "loading"
    CONFIGURATION = "configuration"
    INSTALLATION = "installation"
    DATA = "data"
    NUMERICS = "numerics"
    ACCESS = "access"
    STOPPED = "stopped"


class FailurePhase(StrEnum):
    """What a run was doing when it failed, as the traceback or the run folder tells."""

    LOAD = "load"
    DATA = "loading data"
    TRAINING = "training"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class PhaseAdvice:
    """What a failure means, and what to do about it, where its phase is known."""

    why: str
    change: str


@dataclass(frozen=True, slots=True)
class Signature:
    """A known failure: how it is recognised, what it means and what to change.

    Attributes:
        code: Stable code (``fsdptool rule CODE``).
        title: The failure in a few words.
        cause: Kind of cause.
        texts: A line that contains one of these is a candidate.
        pattern: Regular expression that the line must contain as well, or None.
        context: Regular expression that a line shortly before must contain, or None.
        depth: 0 for a cause, 1 for what other ranks report of it, 2 for lost connections, 3 for summaries,
            4 for warnings, which count only where nothing failed.
        over: Codes that this one replaces on the same line.
        explained_by: Codes of which this one is a consequence, wherever they are found.
        beside: Codes of which one has to be found as well, or none.
        around: Regular expression of further lines nearby that belong to the answer, or None.
        why: What happens.
        change: What to do.
        source: Where the message comes from: library, version and file, or a public thread.
        by_phase: What replaces ``why`` and ``change`` in a phase; in phases that are not named nothing does.
        examples: Texts of which each is recognised, as programs print them, with what the context needs.
        others: Lines that look similar and are not recognised.
    """

    code: str
    title: str
    cause: Cause
    texts: tuple[str, ...]
    pattern: str | None
    context: str | None
    depth: int
    over: tuple[str, ...]
    why: str
    change: str
    source: str
    by_phase: Mapping[str, PhaseAdvice] = field(default_factory=dict)
    explained_by: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    around: str | None = None
    examples: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestedMemory:
    """What PyTorch tried to allocate.

    Attributes:
        bytes: The figure of the log.
        within_bytes: By how much rounding may have changed it: half of its last decimal.
    """

    bytes: Count
    within_bytes: Count


class TensorWidth(StrEnum):
    """What a row of an activation is as wide as: logits, hidden states, or the inside of a feed-forward."""

    VOCABULARY = "vocabulary"
    HIDDEN = "hidden"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True, slots=True)
class AllocatedTensor:
    """A tensor with the size of a failed allocation.

    Attributes:
        width: What a row is as wide as.
        elements: Elements of a row.
        micro_batch: Sequences of one forward, two of each pair of texts; null without the run's file.
        sequence_length: Tokens of a sequence on one rank; null without the run's file.
        tokens: Rows; without the run's file the multiple of 1024 that the size is that of.
        dtype: ``float32`` or ``bfloat16`` (as large as ``float16``).
        bytes: Its exact size.
    """

    width: TensorWidth
    elements: Positive
    micro_batch: Positive | None
    sequence_length: Positive | None
    tokens: Positive
    dtype: str
    bytes: Count


@dataclass(frozen=True, slots=True)
class Allocation:
    """A failed allocation, compared with the tensors of a run.

    Attributes:
        requested: What the log says.
        tensors: Tensors of that size; empty where none has it.
        fused: Whether the run's file already fuses the head with the loss, or computes it in chunks.
        switch: The setting with which its program does so, or null.
    """

    requested: RequestedMemory
    tensors: tuple[AllocatedTensor, ...]
    fused: bool
    switch: str | None


@dataclass(frozen=True, slots=True)
class RecognisedFailure:
    """A known failure in a log.

    Attributes:
        code: Of the rule.
        title: The failure in a few words.
        cause: Kind of cause.
        consequence: Whether another failure in the same logs explains this one.
        file: The log.
        line: Line of the first occurrence; in the part that was read, if the log is large.
        text: That line, shortened.
        occurrences: How often it was seen; counting ends at 1000.
        ranks: Ranks that reported it, as far as the lines name them.
        phase: For a lack of memory and a killed process: the phase, or null.
        why: What happens.
        change: What to do.
        source: Where the message comes from.
        also: Further lines that say more of it, shortened.
        requested: What PyTorch tried to allocate, where the first line says it.
    """

    code: str
    title: str
    cause: Cause
    consequence: bool
    file: str
    line: Positive
    text: str
    occurrences: Positive
    ranks: tuple[Count, ...]
    phase: FailurePhase | None
    why: str
    change: str
    source: str
    also: tuple[str, ...] = ()
    requested: RequestedMemory | None = None


@dataclass(frozen=True, slots=True)
class LastException:
    """An exception that no known failure explains: of a chain the first one.

    Attributes:
        file, line: Where the log has it.
        text: Its type and message.
        frame: File, line and function of the innermost frame outside of installed libraries, else of the
            innermost one; null where the log has no traceback.
    """

    file: str
    line: Positive
    text: str
    frame: str | None = None


@dataclass(frozen=True, slots=True)
class RankLine:
    """The last line that a rank wrote."""

    rank: Count
    file: str
    line: Positive
    text: str


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What logs say of themselves.

    Attributes:
        programs: Launchers and training programs that are named, by name.
        versions: Of libraries, by name, where lines tell.
        ranks: Ranks that wrote a line.
        last_lines: The last line of each rank, at most of 16.
    """

    programs: tuple[str, ...]
    versions: Mapping[str, str]
    ranks: tuple[Count, ...]
    last_lines: tuple[RankLine, ...]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective as the ranks that called it report it.

    Attributes:
        operation: NCCL's name of it.
        elements_in, elements_out: Elements per rank; null where torch's version does not report them.
        ranks: Who called it.
        odd: Whether most of the ranks that report called another one, or no majority did the same.
        dtype: Type of the elements, as torch names it; null where logs alone are given.
    """

    operation: str
    elements_in: Count | None
    elements_out: Count | None
    ranks: tuple[Count, ...]
    odd: bool
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Different collectives at one place in the sequence of a process group.

    Attributes:
        sequence: The sequence number.
        group: The process group, or null for the one of all ranks (and where the log does not name it).
        group_ranks: Whether the ranks count within the group: the log does not name the run's ranks.
        calls: What was called, by most ranks first.
    """

    sequence: Count
    group: str | None
    group_ranks: bool
    calls: tuple[CollectiveCall, ...]


@dataclass(frozen=True, slots=True)
class FailureDiagnosis:
    """What `fsdptool diagnose --format json` prints.

    Attributes:
        target: The run folder or the logs.
        failures: Known failures: causes first, in the order of their lines, then their consequences.
        exception: The exception that ended the run, where no known failure explains it; null without any.
        failed: Whether anything failed: false for a run that completed or was stopped on request.
        read_bytes: Bytes of logs that were read.
        total_bytes: Bytes of all logs; of a large log the beginning and the end are read.
        notes: Facts from the run folder, one sentence each.
        run: The state of the run, or null for a log.
        memory: The rank's own account of a lack of memory (``logs/out-of-memory.json``), or null.
        divergence: Where ranks report different collectives at one sequence number, or null.
        ended_well: Whether the last lines report that the run did all that was asked, and nothing failed.
        facts: What the logs say of themselves; null for a run folder.
        allocation: What the failed allocation is, where the run's file or its model is given; else null.
    """

    target: str
    failures: tuple[RecognisedFailure, ...]
    exception: LastException | None
    failed: bool
    read_bytes: Count
    total_bytes: Count
    notes: tuple[str, ...]
    run: RunView | None
    memory: Mapping[str, Any] | None
    divergence: Divergence | None = None
    ended_well: bool = False
    facts: LogFacts | None = None
    allocation: Allocation | None = None
