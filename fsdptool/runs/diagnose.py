"""Recognises the known failures of distributed runs in logs and run folders. Torch-free.

The signatures are data (:mod:`fsdptool.rules`). Logs are untrusted and may be huge: a bounded part is read,
as bytes that need not be text, and nothing in them is executed or followed.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import UnreadableError, is_file, is_folder, read_ends
from fsdptool.files.values import moment, read_own_json
from fsdptool.records.diagnosis import (
    CollectiveCall,
    Divergence,
    FailureDiagnosis,
    FailurePhase,
    LastException,
    RecognisedFailure,
    Signature,
)
from fsdptool.records.run import RunView
from fsdptool.rules import signatures
from fsdptool.runs.events import STARTUP, WorkerPhase, ranks_in, tail_events
from fsdptool.runs.folder import LOGS, RUN
from fsdptool.runs.view import read_view
from fsdptool.runs.watchdog import phase_text

_HEAD_BYTES, _TAIL_BYTES = 8 << 20, 24 << 20
"""Bytes of a log that are read: what started it, and how it ended."""

_LINE_LENGTH = 300
"""Characters of a line that are shown."""

_CONTEXT_LINES = 200
"""Lines before a match in which its context or traceback is looked for."""

_COUNTED = 1000
_RANK_DIGITS = 6
_TIMEOUTS = ("RUN008", "RUN009", "RUN010")
_DIVERGED = "RUN011"
_WARNING = 4
"""Depth of what libraries only warn of."""
_SILENT_SECONDS = 60.0

_RANK = re.compile(
    r"\[(?:rank|Rank )(\d+)\]|\[PG (?:ID \d+ PG GUID )?0 ?(?:\(default_pg\) )?Rank (\d+)\]"
    r"|\brank (\d+)(?:: | \(process )"
)
_LOCAL_RANK = re.compile(r"\[default(\d+)\]")
"""What torchrun can put in front of a line: a rank within a machine."""
_EXCEPTION = re.compile(r"(?:^|[\]:] )((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b:? .*)")

_NAMED_PHASE = re.compile(rf"(?:rank \d+: )?out of memory in ({'|'.join(FailurePhase)})\b")
"""How a worker of ``fsdptool train`` reports a lack of memory (``training/worker.py``)."""

_PHASES = (
    (FailurePhase.SAVE, r"in (?:save_state|save_model|save_fsdp|save_checkpoint|_save|get_state_dict)"),
    (FailurePhase.LOAD, r"in (?:from_pretrained|load_state_dict|fsdp2_load_full_state_dict|load_checkpoint)"),
    (FailurePhase.EVALUATION, r"in (?:evaluate|evaluation_loop|prediction_step|validate)"),
    (FailurePhase.OPTIMIZER, r"torch/optim/|in (?:optimizer_step|_optimizer_step)|in clip_grad_norm_"),
    (FailurePhase.BACKWARD, r"torch/autograd/|in backward\b"),
    (FailurePhase.FORWARD, r"in (?:forward|_call_impl|compute_loss)\b"),
)
"""Frames of a traceback that tell the phase, in order: a backward contains recomputed forwards."""


@dataclass(frozen=True, slots=True)
class LogText:
    """A log as it was read.

    Attributes:
        name: What it is called in answers.
        text: Beginning and end.
        total_bytes, read_bytes: Its size, and how much of it was read.
        rank: The rank that wrote it, if it belongs to one.
    """

    name: str
    text: str
    total_bytes: int
    read_bytes: int
    rank: int | None = None


def read_log(path: Path, *, name: str | None = None, rank: int | None = None) -> LogText:
    """Read the beginning and the end of a log.

    Raises:
        StorageError: It cannot be read, or is not a file.
    """
    try:
        head, tail, size = read_ends(path, head=_HEAD_BYTES, tail=_TAIL_BYTES)
    except UnreadableError as error:
        raise StorageError(f"{path}: {error.message}", help="give a log file or a run folder") from error
    read = len(head) + len(tail)
    data = head + (b"\n" if read < size else b"") + tail
    text = data.decode("utf-8", errors="replace").replace("\r", "\n")
    return LogText(name or str(path), text, max(size, read), read, rank)


def read_stream(stream: BinaryIO, name: str) -> LogText:
    """Read the beginning and the end of a log that comes through a pipe, as :func:`read_log` does."""
    head, tail, size = stream.read(_HEAD_BYTES), bytearray(), 0
    while block := stream.read(1 << 20):
        size += len(block)
        tail += block
        if len(tail) > 2 * _TAIL_BYTES:
            del tail[:-_TAIL_BYTES]
    tail = tail[-_TAIL_BYTES:]
    data = head + (b"\n" if len(tail) < size else b"") + tail
    text = data.decode("utf-8", errors="replace").replace("\r", "\n")
    return LogText(name, text, len(head) + size, len(head) + len(tail))


def diagnose(target: Path | Sequence[Path]) -> FailureDiagnosis:
    """Recognise what went wrong in a run folder of ``fsdptool train``, or in the logs of one run.

    Args:
        target: A run folder, a log, or several logs, such as one of each rank.

    Raises:
        ConfigError: A folder is not a run folder, or is one of several targets.
        StorageError: A log cannot be read.
    """
    targets = [target] if isinstance(target, Path) else list(target)
    if len(targets) == 1 and is_folder(targets[0]):
        return _diagnose_run(targets[0])
    if folder := next((path for path in targets if is_folder(path)), None):
        raise ConfigError(f"{folder} is a folder", help="give one run folder, or logs of one run")
    return diagnose_logs(" ".join(map(str, targets)), tuple(map(read_log, targets)))


def diagnose_logs(target: str, logs: Sequence[LogText]) -> FailureDiagnosis:
    """Recognise known failures in logs that were read before.

    Args:
        target: What the answer is about.
        logs: One or several logs of the same run.
    """
    found = [failure for log in logs for failure in _matches(log)]
    divergence, seen = _divergence(logs)
    if seen is not None:
        found.append(seen)
    depths = {signature.code: signature.depth for signature in signatures()}
    merged = _merge(found)
    merged.sort(key=lambda failure: depths[failure.code])
    least = min((depths[failure.code] for failure in merged), default=0)
    # Summaries and lost connections are reported of any failure: the exception itself says more.
    exception = _last_exception(logs) if least >= 2 or not merged else None
    warned = [item for item in merged if depths[item.code] == _WARNING]
    if exception is not None and any(
        (item.file, item.line) == (exception.file, exception.line) for item in warned
    ):
        exception = None
    failed = (least < _WARNING and bool(merged)) or exception is not None
    kept = [item for item in merged if item not in warned] if failed else merged
    failures = tuple(replace(item, consequence=depths[item.code] > least) for item in kept)
    return FailureDiagnosis(
        target=target,
        failures=failures,
        exception=exception,
        failed=failed,
        read_bytes=sum(log.read_bytes for log in logs),
        total_bytes=sum(log.total_bytes for log in logs),
        notes=() if divergence is not None else tuple(_absent_ranks(logs, failures)),
        run=None,
        memory=None,
        divergence=divergence,
    )


_COLLECTIVE = re.compile(
    r"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w+), (?:NumelIn=(\d{1,18}), NumelOut=(\d{1,18}), )?"
)
"""A collective as torch 1.13 to 2.13 print it; the sizes since 2.1."""

_GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?([^\s()\]]+) ?(?:\(([^)]*)\) )?Rank (\d{1,6})\]")
"""The process group of a line: since torch 2.3 by number, since 2.4 with a description."""

_PAIRWISE = frozenset(("SEND", "RECV", "RECVANYSOURCE", "COALESCED", "UNKNOWN"))
"""What differs between ranks by its nature."""

_SIZES: Mapping[str, tuple[bool, bool]] = {
    **dict.fromkeys(("ALLTOALL", "ALLTOALL_BASE", "GATHER", "SCATTER"), (False, False)),
    **dict.fromkeys(("ALLGATHER", "ALLGATHER_COALESCED"), (False, True)),
    "REDUCE_SCATTER": (True, False),
}
"""Whether elements in and out are the same on all ranks; of what is not named both are."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective that a line reports, and the line."""

    group: str | None
    sequence: int
    rank: int
    global_rank: bool
    operation: str
    sizes: tuple[int | None, int | None]
    log: LogText
    at: int

    @property
    def compared(self) -> tuple[str, int | None, int | None]:
        """What has to be the same on all ranks."""
        whole_in, whole_out = _SIZES.get(self.operation, (True, True))
        return self.operation, self.sizes[0] if whole_in else None, self.sizes[1] if whole_out else None


def _calls(log: LogText) -> Iterator[_Call]:
    """Yield the collectives that the lines of a log report, with the rank that called each."""
    for match in _COLLECTIVE.finditer(log.text):
        if match[2] in _PAIRWISE:
            continue
        begin = max(log.text.rfind("\n", 0, match.start()) + 1, match.start() - 2000)
        before = log.text[begin : match.start()]
        group = next(reversed(list(_GROUP.finditer(before))), None)
        rank = log.rank if log.rank is not None else _rank_of(before)
        known = rank is not None
        if rank is None and group is not None:
            rank = int(group[3])
        if rank is None:
            continue
        yield _Call(
            _group_name(group),
            int(match[1]),
            rank,
            known,
            match[2],
            (int(match[3]), int(match[4])) if match[3] else (None, None),
            log,
            begin,
        )


def _group_name(match: re.Match[str] | None) -> str | None:
    """Return the name of a process group; None for that of all ranks, which older lines do not name."""
    if match is None or match[1] == "0" or match[2] == "default_pg":
        return None
    return f"{match[1]} ({match[2]})" if match[2] else match[1]


def _divergence(logs: Sequence[LogText]) -> tuple[Divergence | None, RecognisedFailure | None]:
    """Return where ranks called different collectives, as NCCL's watchdog shows, and the failure."""
    places: dict[tuple[str | None, int], dict[int, _Call]] = defaultdict(dict)
    for log in logs:
        for call in _calls(log):
            places[call.group, call.sequence].setdefault(call.rank, call)
    parted = {
        key: ranks for key, ranks in places.items() if len({call.compared for call in ranks.values()}) > 1
    }
    if not parted:
        return None, None
    # Where most ranks tell, and there the first.
    (group, sequence), ranks = min(parted.items(), key=lambda item: (-len(item[1]), item[0][1]))
    kinds: dict[tuple[str, int | None, int | None], list[_Call]] = defaultdict(list)
    for _, call in sorted(ranks.items()):
        kinds[call.compared].append(call)
    ordered = sorted(kinds.values(), key=len, reverse=True)
    tie = len(ordered[0]) == len(ordered[1])
    odd = [call for calls in (ordered if tie else ordered[1:]) for call in calls]
    divergence = Divergence(
        sequence,
        group,
        group is not None and not all(call.global_rank for call in ranks.values()),
        tuple(
            CollectiveCall(
                calls[0].operation,
                *calls[0].sizes,
                tuple(call.rank for call in calls),
                tie or calls is not ordered[0],
            )
            for calls in ordered
        ),
    )
    signature = next(item for item in signatures() if item.code == _DIVERGED)
    first = min(odd, key=lambda call: call.rank)
    failure = _recognised(signature, first.log, first.at, (call.rank for call in odd), len(odd))
    return divergence, failure


def _absent_ranks(logs: Sequence[LogText], failures: Sequence[RecognisedFailure]) -> Iterator[str]:
    """Name the ranks that the logs mention and that report no timeout although others do."""
    waited = {rank for item in failures if item.code in _TIMEOUTS for rank in item.ranks}
    if not waited:
        return
    named = {
        rank
        for log in logs
        for match in (*_RANK.finditer(log.text), *_LOCAL_RANK.finditer(log.text))
        if (rank := _rank_in(match)) is not None
    }
    absent = sorted(named - waited)
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        some = f"ranks {shown} do" if len(absent) > 1 else f"rank {shown} does"
        yield f"{some} not report a timeout: look there first"


def _matches(log: LogText) -> Iterator[RecognisedFailure]:
    """Yield each known failure of a log once, at its first occurrence."""
    places: dict[str, tuple[int, list[tuple[int, str]]]] = {}
    for signature in signatures():
        lines = list(_lines_of(log.text, signature))
        if lines:
            places[signature.code] = (lines[0][0], lines)
    replaced = {
        (code, at)
        for signature in signatures()
        if signature.code in places
        for code in signature.over
        for at, _ in places[signature.code][1]
    }
    for signature in signatures():
        lines = [
            (at, line)
            for at, line in places.get(signature.code, (0, []))[1]
            if (signature.code, at) not in replaced
        ]
        if not lines:
            continue
        at = lines[0][0]
        ranks = {rank for _, each in lines if (rank := _rank_of(each)) is not None}
        if log.rank is not None:
            ranks = {log.rank}
        seen = _recognised(signature, log, at, ranks, len(lines))
        memory = signature.code in ("RUN001", "RUN002")
        yield _in_phase(seen, _phase_of(log.text, at)) if memory else seen


def _recognised(
    signature: Signature, log: LogText, at: int, ranks: Iterable[int], occurrences: int
) -> RecognisedFailure:
    """Return a failure whose first line begins at a place of a log."""
    end = log.text.find("\n", at)
    line = log.text[at : end if end >= 0 else len(log.text)]
    shown = next((text for text in signature.texts if text in line), None)
    # A long line is shown from where it says something.
    start = line.find(shown) if shown is not None else 0
    start = start if start > 2000 else 0
    return RecognisedFailure(
        code=signature.code,
        title=signature.title,
        cause=signature.cause,
        consequence=False,
        file=log.name,
        line=log.text.count("\n", 0, at) + 1,
        text=line[start:].strip()[:_LINE_LENGTH],
        occurrences=occurrences,
        ranks=tuple(sorted(ranks)),
        phase=None,
        why=signature.why,
        change=signature.change,
        source=signature.source,
    )


def _in_phase(failure: RecognisedFailure, phase: FailurePhase | None) -> RecognisedFailure:
    """Return a failure with its phase, and with what is known of it in that phase."""
    if phase is None:
        return failure
    signature = next(item for item in signatures() if item.code == failure.code)
    advice = signature.by_phase.get(phase)
    if advice is None:
        return replace(failure, phase=phase)
    return replace(failure, phase=phase, why=advice.why, change=advice.change)


def _lines_of(text: str, signature: Signature) -> Iterator[tuple[int, str]]:
    """Yield place and text of the lines that a signature matches, in order."""
    starts: dict[int, str] = {}
    for literal in signature.texts:
        at = text.find(literal)
        while at >= 0 and len(starts) < _COUNTED:
            begin = text.rfind("\n", 0, at) + 1
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            starts.setdefault(begin, text[max(begin, at - 2000) : min(end, at + 2000)])
            at = text.find(literal, end)
    pattern = re.compile(signature.pattern) if signature.pattern else None
    context = re.compile(signature.context) if signature.context else None
    for begin in sorted(starts):
        line = starts[begin]
        if pattern is not None and not pattern.search(line):
            continue
        if signature.code == "RUN002" and not _is_fragmented(line):
            continue
        if context is not None and not context.search(_before(text, begin)):
            continue
        yield begin, line


_SIZE = r"(?<![\d.])(\d+(?:\.\d+)?) ([KMGT]iB|bytes)"
_FACTORS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WANTED = re.compile(rf"Tried to allocate {_SIZE}")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


def _is_fragmented(line: str) -> bool:
    """Say whether the allocator held more unused memory than it was asked for."""
    wanted, unused = _WANTED.search(line), _UNUSED.search(line)
    if wanted is None or unused is None:
        return False
    sizes = [float(match[1]) * _FACTORS[match[2]] for match in (wanted, unused)]
    return sizes[1] >= sizes[0]


def _before(text: str, at: int) -> str:
    """Return the lines before a place."""
    begin = at
    for _ in range(_CONTEXT_LINES):
        if begin <= 0:
            break
        begin = text.rfind("\n", 0, begin - 1) + 1
    return text[max(begin, at - 64 * _LINE_LENGTH * 4) : at]


def _phase_of(text: str, at: int) -> FailurePhase | None:
    """Return the phase that the line at a place names, or the frames of the traceback before it tell."""
    if named := _NAMED_PHASE.match(text, at):
        return FailurePhase(named[1])
    frames = _before(text, at)
    start = frames.rfind("Traceback (most recent call last)")
    frames = frames[start:] if start >= 0 else ""
    return next((phase for phase, pattern in _PHASES if re.search(pattern, frames)), None)


def _rank_of(line: str) -> int | None:
    match = _RANK.search(line) or _LOCAL_RANK.search(line)
    return _rank_in(match) if match else None


def _rank_in(match: re.Match[str]) -> int | None:
    digits = next(group for group in match.groups() if group)
    return int(digits) if len(digits) <= _RANK_DIGITS else None


def _merge(found: Sequence[RecognisedFailure]) -> list[RecognisedFailure]:
    """Join what several logs say of one failure: the first log shows it, the ranks of all are named."""
    merged: dict[str, RecognisedFailure] = {}
    for item in found:
        known = merged.get(item.code)
        merged[item.code] = (
            item
            if known is None
            else replace(
                known,
                ranks=tuple(sorted({*known.ranks, *item.ranks})),
                occurrences=known.occurrences + item.occurrences,
                phase=known.phase or item.phase,
            )
        )
    return list(merged.values())


def _last_exception(logs: Sequence[LogText]) -> LastException | None:
    for log in reversed(logs):
        lines = log.text.splitlines()
        for number in range(len(lines), 0, -1):
            line = lines[number - 1]
            if len(line) < 4000 and (match := _EXCEPTION.search(line)) and "ChildFailedError" not in line:
                return LastException(log.name, number, match[1].strip()[:_LINE_LENGTH])
    return None


def _diagnose_run(folder: Path) -> FailureDiagnosis:
    if not is_file(folder / RUN):
        raise ConfigError(
            f"{folder} is not a run folder: {RUN} is missing",
            help="give a log file, or a folder that `fsdptool train` wrote",
        )
    view = read_view(folder)
    logs = tuple(_run_logs(folder, view))
    answer = diagnose_logs(str(folder), logs)
    failed = view.state in ("failed", "dead")
    if not failed:
        # A run that goes on or ended well logs warnings that look like failures.
        answer = replace(answer, failures=(), exception=None)
    return replace(
        answer,
        failures=tuple(_in_phase(item, item.phase or _phase_of_run(view, item)) for item in answer.failures),
        failed=failed,
        run=view,
        notes=(*answer.notes, *_notes(view)) if failed else tuple(_notes(view)),
        memory=_memory_account(folder) if failed else None,
    )


_RUN_PHASES: Mapping[str, FailurePhase] = {
    **dict.fromkeys((*STARTUP, WorkerPhase.RESTORING), FailurePhase.LOAD),
    WorkerPhase.LOADING_DATA: FailurePhase.DATA,
    WorkerPhase.TRAINING: FailurePhase.TRAINING,
    WorkerPhase.SAVING: FailurePhase.SAVE,
    **dict.fromkeys((WorkerPhase.EVALUATING, WorkerPhase.SAMPLING), FailurePhase.EVALUATION),
}


def _phase_of_run(view: RunView, failure: RecognisedFailure) -> FailurePhase | None:
    """Return what the rank that failed was doing, if the advice depends on it and the ranks agree."""
    if not next(item for item in signatures() if item.code == failure.code).by_phase:
        return None
    first = view.failure.rank if view.failure is not None else None
    ranks = (first,) if first is not None else failure.ranks
    phases = {_RUN_PHASES.get(seen.phase) for seen in view.ranks if seen.rank in ranks or not ranks}
    return phases.pop() if len(phases) == 1 else None


def _run_logs(folder: Path, view: RunView) -> Iterator[LogText]:
    """Yield what the ranks and the launcher of the last start said, the rank that failed first in front."""
    ranks = ranks_in(folder, view.world_size)
    for rank, events in tail_events(folder, ranks).items():
        for event in events:
            recent = (moment(event.get("time")) or 0.0) >= view.started - 5.0
            if event.get("kind") == "failure" and recent:
                yield _failure_text(rank, event)
    if view.failure is not None:
        message = view.failure.message
        yield LogText("summary.json", message, len(message), len(message))
    for rank in ranks:
        path = folder / LOGS / f"rank-{rank:05d}.log"
        with contextlib.suppress(StorageError):
            yield read_log(path, name=f"{LOGS}/{path.name}", rank=rank)
    with contextlib.suppress(StorageError):
        yield read_log(folder / LOGS / "launcher.log", name=f"{LOGS}/launcher.log")


def _failure_text(rank: int, event: Mapping[str, Any]) -> LogText:
    lines = event.get("traceback")
    frames = "".join(map(str, lines)) if isinstance(lines, list) else ""
    text = f"{frames}\n{event.get('message', '')}\n"
    return LogText(f"events/rank-{rank:05d}.jsonl", text, len(text), len(text), rank)


def _memory_account(folder: Path) -> Mapping[str, Any] | None:
    with contextlib.suppress(ConfigError):
        account = read_own_json(folder / LOGS / "out-of-memory.json")
        return account if _is_account(account) else None
    return None


def _is_account(account: Any) -> bool:
    """Say whether an account of a lack of memory has what its text shows, in the right types."""
    sizes = dict.fromkeys(("planned_bytes", "peak_bytes"), int | None)
    named = dict.fromkeys(("planned_moment", "peak_moment"), str | None)
    if not _has(account, {"rank": int | None, "seen": dict, "next_steps": list, **sizes, **named}):
        return False
    seen = {"requested_bytes": None, "allocated_bytes": None, "live": [], **account["seen"]}
    asked = {"moment": str, "requested_bytes": int | None, "allocated_bytes": int | None, "live": list}
    step = {"change": str, "cost": str, "device_total_bytes": int | None}
    return (
        _has(seen, asked)
        and all(_has(item, {"name": str, "bytes": int}) for item in seen["live"])
        and all(_has(item, step) for item in account["next_steps"])
    )


def _has(value: Any, kinds: Mapping[str, Any]) -> bool:
    """Say whether a value is an object with these keys and types."""
    return isinstance(value, dict) and all(
        key in value and isinstance(value[key], kinds[key]) for key in kinds
    )


def _notes(view: RunView) -> Iterator[str]:
    """Yield facts of the run that bear on its end."""
    if view.state == "dead":
        yield (
            "the processes are gone without a summary: the machine went down, or the kernel or the job system"
            " ended all of them at once"
        )
    for phase in view.memory:
        planned, seen = phase.predicted_bytes, phase.measured_bytes
        if planned and seen and seen > 1.03 * planned:
            over = 100.0 * (seen - planned) / planned
            yield f"{phase.name} needed {over:.0f} % more memory than planned"
    latest = max((rank.progressed for rank in view.ranks), default=0.0)
    for rank in view.ranks:
        silent = rank.alive - rank.progressed
        if view.state == "running" and silent > _SILENT_SECONDS:
            yield f"rank {rank.rank} has made no progress for {silent:.0f} s ({phase_text(rank)})"
        elif view.state == "dead" and latest - rank.progressed > _SILENT_SECONDS:
            yield f"rank {rank.rank} was last seen {latest - rank.progressed:.0f} s before the others"
    if view.last_checkpoint is not None and view.state != "running":
        yield f"the newest checkpoint is that of step {view.last_checkpoint}: --resume auto continues there"
    elif view.lost_steps:
        yield f"no checkpoint exists: starting again loses the {view.lost_steps} steps of the run"
