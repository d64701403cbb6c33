"""The exception that ended a run and that no known failure explains. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from fsdptool.records.diagnosis import LastException
from fsdptool.runs.logs import (
    LINE_LENGTH,
    LogText,
    Raised,
    TextIndex,
    belongs_to,
    exceptions,
    own_frame,
    recovered,
    split_prefix,
)

COUNTED = 1000
"""Lines with one text that are looked at."""

RESTART = "will restart worker group"
FIRST_FAILURE = "Root Cause (first observed failure)"
"""What torchrun writes before it starts again, and above the rank that failed first."""

_WRAPPERS = re.compile(
    r"ChildFailedError|CalledProcessError|CheckpointException|ProcessRaisedException|ProcessExitedException"
    r"|RayTaskError|RayActorError|ActorDiedError|WorkerCrashedError|See root cause above|Engine core init"
    r"|EngineDeadError|DatasetGenerationError|RemoteTraceback"
    r"|Caught \w+ in |exited unexpectedly|SystemExit|KeyboardInterrupt|SignalException|non-zero exit status"
    r"| raised:$|DistBackendError|unexpected pos \d+ vs|InternalTorchDynamoError: $"
)
"""Exceptions that report another one."""

_AFTERMATH = re.compile(
    r"BrokenPipeError|Connection(?:Reset|Aborted|Refused)Error|Broken pipe|EOFError|Socket Timeout"
    r"|store->get|watchdog thread terminated|RendezvousClosedError|CancelledError|SIGTERM"
    r"|DistStoreError|DistNetworkError"
)
"""Exceptions of ranks that lost another one."""


def _chains(
    log: LogText, known: Set[int], start: int, *, beside: bool
) -> tuple[dict[str, list[Raised]], Raised | None]:
    """Return the last chain of unknown exceptions of each writer, and the last one that reports another one.

    Args:
        log: The log.
        known: Indices of lines that known failures explain.
        start: Index of the line at which the last attempt began.
        beside: As in :func:`unexplained`.
    """
    wrapper: Raised | None = None
    chains: dict[str, list[Raised]] = {}
    raised = exceptions(log)
    beyond = sorted(known - {item.index for item in raised})
    for item in [item for item in raised if item.index > start] or raised:
        if "ChildFailedError" in item.text:
            continue
        # What is raised while a known failure is handled follows from it.
        follows = beside and item.chained and chains.get(item.writer) == []
        if item.index in known or _WRAPPERS.search(item.text) or _AFTERMATH.search(item.text):
            if item.index not in known:
                wrapper = item
            elif beside:
                chains[item.writer] = []
        elif beside and belongs_to(log, item.index, beyond):
            chains[item.writer] = []
        elif not (follows or item.logged or recovered(log, item.index, survived=True)):
            chain = chains.get(item.writer) if item.chained else None
            chains[item.writer] = [*(chain or ()), item]
    return chains, wrapper


def unexplained(
    indexed: Sequence[tuple[LogText, TextIndex]], known: Sequence[Set[int]], *, beside: bool
) -> LastException | None:
    """Return the exception that ended the run and that no known failure explains.

    Of each rank the last chain counts, and of a chain its first exception. The rank that torchrun names, or
    else the first one in the log, is shown.

    Args:
        indexed: The logs.
        known: For each of them the indices of the lines that known failures explain.
        beside: Whether one of them is a cause: then only a traceback counts that none of them is in.
    """
    fallback: tuple[LogText, Raised] | None = None
    choices: list[tuple[int, int, LogText, Raised]] = []
    for number, (log, index) in enumerate(indexed):
        restarts = list(index.lines_with(RESTART, COUNTED))
        chains, wrapper = _chains(log, known[number], restarts[-1] if restarts else -1, beside=beside)
        if wrapper is not None:
            fallback = log, wrapper
        named = _first_failed(log, index)
        for writer, chain in chains.items():
            order = 0 if writer == named else 1 if writer else 2
            choices += [(order, number, log, first) for first in chain[:1]]
    if choices:
        _, _, log, item = min(choices, key=lambda choice: (choice[0], choice[1], choice[3].index))
    elif fallback is not None and not any(known):
        log, item = fallback
    else:
        return None
    frame = own_frame(log, item.index)
    return LastException(log.name, log.number(item.index), item.text.strip()[:LINE_LENGTH], frame)


_TORCHRUN_RANK = re.compile(r"^\s*rank {1,10}: (\d{1,6})\b")


def _first_failed(log: LogText, index: TextIndex) -> str | None:
    """Return the writer that torchrun names as the first one that failed."""
    for at in list(index.lines_with(FIRST_FAILURE, COUNTED))[-1:]:
        for line in log.lines[at : at + 8]:
            if match := _TORCHRUN_RANK.match(split_prefix(line)[1]) or _TORCHRUN_RANK.match(line):
                return f"rank {match[1]}"
    return None
