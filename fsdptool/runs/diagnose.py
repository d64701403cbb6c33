"""Recognises the known failures of distributed runs in logs and run folders. Torch-free.

The signatures are data (``failures.json``). Logs are untrusted and may be huge: a bounded part is read, as
bytes that need not be text, and nothing in them is executed or followed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import UnreadableError, is_file, is_folder, read_ends
from fsdptool.files.values import moment
from fsdptool.records.codec import from_json
from fsdptool.records.diagnosis import (
    FailureDiagnosis,
    FailurePhase,
    LastException,
    RecognisedFailure,
    Signature,
)
from fsdptool.records.run import RunView
from fsdptool.runs.events import ranks_in, tail_events
from fsdptool.runs.folder import LOGS, RUN, read_json
from fsdptool.runs.progress import phase_text
from fsdptool.runs.view import read_view

_HEAD_BYTES, _TAIL_BYTES = 8 << 20, 24 << 20
"""Bytes of a log that are read: what started it, and how it ended."""

_LINE_LENGTH = 300
"""Characters of a line that are shown."""

_CONTEXT_LINES = 200
"""Lines before a match in which its context or traceback is looked for."""

_COUNTED = 1000
_RANK_DIGITS = 6
_TIMEOUTS = ("RUN008", "RUN009", "RUN010")
_SILENT_SECONDS = 60.0

_RANK = re.compile(r"\[(?:rank|Rank |default)(\d+)\]|\brank (\d+): ")
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


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the table of known failures, by code."""
    table = json.loads(Path(__file__).with_name("failures.json").read_text(encoding="utf-8"))
    return tuple(from_json(Signature, entry, where="failures.json") for entry in table)


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


def diagnose(target: Path) -> FailureDiagnosis:
    """Recognise what went wrong in a log file or in a run folder of ``fsdptool train``.

    Raises:
        ConfigError: The folder is not a run folder.
        StorageError: The log cannot be read.
    """
    if is_folder(target):
        return _diagnose_run(target)
    return diagnose_logs(str(target), (read_log(target),))


def diagnose_logs(target: str, logs: Sequence[LogText]) -> FailureDiagnosis:
    """Recognise known failures in logs that were read before.

    Args:
        target: What the answer is about.
        logs: One or several logs of the same run.
    """
    found = [failure for log in logs for failure in _matches(log)]
    depths = {signature.code: signature.depth for signature in signatures()}
    merged = _merge(found)
    merged.sort(key=lambda failure: depths[failure.code])
    least = min((depths[failure.code] for failure in merged), default=0)
    failures = tuple(replace(item, consequence=depths[item.code] > least) for item in merged)
    # Summaries and lost connections are reported of any failure: the exception itself says more.
    exception = _last_exception(logs) if least >= 2 or not failures else None
    return FailureDiagnosis(
        target=target,
        failures=failures,
        exception=exception,
        failed=bool(failures) or exception is not None,
        read_bytes=sum(log.read_bytes for log in logs),
        total_bytes=sum(log.total_bytes for log in logs),
        notes=tuple(_absent_ranks(logs, failures)),
        run=None,
        memory=None,
    )


def _absent_ranks(logs: Sequence[LogText], failures: Sequence[RecognisedFailure]) -> Iterator[str]:
    """Name the ranks that the logs mention and that report no timeout although others do."""
    waited = {rank for item in failures if item.code in _TIMEOUTS for rank in item.ranks}
    if not waited:
        return
    named = {
        rank for log in logs for match in _RANK.finditer(log.text) if (rank := _number(match)) is not None
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
        at, line = lines[0]
        ranks = {rank for _, each in lines if (rank := _rank_of(each)) is not None}
        if log.rank is not None:
            ranks = {log.rank}
        memory = signature.code in ("RUN001", "RUN002")
        yield RecognisedFailure(
            code=signature.code,
            title=signature.title,
            cause=signature.cause,
            consequence=False,
            file=log.name,
            line=log.text.count("\n", 0, at) + 1,
            text=line.strip()[:_LINE_LENGTH],
            occurrences=len(lines),
            ranks=tuple(sorted(ranks)),
            phase=_phase_of(log.text, at) if memory else None,
            why=signature.why,
            change=signature.change,
            source=signature.source,
        )


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


_SIZE = r"([\d.]+) ([KMGT]iB|bytes)"
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
    match = _RANK.search(line)
    return _number(match) if match else None


def _number(match: re.Match[str]) -> int | None:
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
        failed=failed,
        run=view,
        notes=(*answer.notes, *_notes(view)) if failed else tuple(_notes(view)),
        memory=_memory_account(folder) if failed else None,
    )


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
        account = read_json(folder / LOGS / "out-of-memory.json")
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
        yield f"the newest checkpoint is that of step {view.last_checkpoint}"
