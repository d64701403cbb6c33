"""Recognises the known failures of distributed runs in logs. Torch-free.

The signatures are data (:mod:`fsdptool.rules`). What ended the run is told from what other ranks report of
it, from what the program recovered from, and from what an earlier attempt of the launcher ended with.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fsdptool.advisories.catalogue import Versions, advisories, affected_version, fixed_in
from fsdptool.advisories.locks import exact_versions
from fsdptool.records.diagnosis import (
    Cause,
    CollectiveCall,
    Divergence,
    FailureDiagnosis,
    FailurePhase,
    RecognisedFailure,
    RequestedMemory,
    Signature,
)
from fsdptool.rules import signatures
from fsdptool.runs.logs import (
    LINE_LENGTH,
    LogText,
    TextIndex,
    ended_well,
    facts,
    rank_of,
    ranks_named,
    recovered,
    split_prefix,
)
from fsdptool.runs.unexplained import COUNTED, FIRST_FAILURE, RESTART, unexplained

_CONTEXT_LINES = 200
"""Lines before a match in which its context or traceback is looked for."""

_CONTEXTS = 40
"""Matches of a signature whose context is looked for."""

_WINDOW = 700
"""Characters before and after a text in which a pattern is looked for."""

_SEARCHED = 100_000
"""Characters that are searched for the pattern of one signature."""

_PLACEHOLDER = re.compile(r"\.\.\.|\{[^}]*\}|'[^' ]*'")
"""What differs between messages of one bug, as advisories write it."""

_SPECIFIC = 20
"""Characters of the longest part of a message by which a bug is known."""

_ALSO = 3
"""Further lines of a failure that are shown."""

_NEAR_BEFORE, _NEAR_AFTER = 14, 8
"""Lines before and after a match in which lines that belong to it are looked for."""

_MEMORY = ("RUN001", "RUN002")
_OTHER_PROCESS, _SAME_GPU = "RUN003", "RUN015"
_TIMEOUTS = ("RUN008", "RUN009", "RUN010")
_DIVERGED = "RUN011"
_BEHIND = "RUN164"
_WARNING = 4
"""Depth of what libraries only warn of."""

_LASTING = (Cause.HARDWARE, Cause.NETWORK, Cause.NUMERICS)
"""Causes that a run may survive for a while and still end by."""

_NAMED_PHASE = re.compile(rf"(?:rank \d+: )?out of memory in ({'|'.join(FailurePhase)})\b")
"""How a worker of ``fsdptool train`` reports a lack of memory (``training/worker.py``)."""

_FRAMES = (
    (FailurePhase.SAVE, r"in (?:save_state|save_model|save_fsdp|save_checkpoint|_save|get_state_dict)"),
    (FailurePhase.LOAD, r"in (?:from_pretrained|load_state_dict|fsdp2_load_full_state_dict|load_checkpoint)"),
    (FailurePhase.EVALUATION, r"in (?:evaluate|evaluation_loop|prediction_step|validate)"),
    (FailurePhase.OPTIMIZER, r"torch/optim/|in (?:optimizer_step|_optimizer_step)|in clip_grad_norm_"),
    (FailurePhase.BACKWARD, r"torch/autograd/|in backward\b"),
    (FailurePhase.FORWARD, r"in (?:forward|_call_impl|compute_loss)\b"),
)
"""Frames of a traceback that tell the phase, in order: a backward contains recomputed forwards."""

_ACTIVITIES = (
    (
        FailurePhase.SAVE,
        re.compile(
            r"Saving (?:model|current state|FSDP|the |checkpoint|optimizer)|[Ss]aving checkpoint|Saving to "
        ),
    ),
    (
        FailurePhase.EVALUATION,
        re.compile(
            r"\*\*\*\*\* Running (?:Evaluation|Prediction)|[Rr]unning (?:validation|evaluation|eval)\b"
            r"|\b[Ee]valuating\b"
            r"|[Ss]tart(?:ing)? (?:of )?(?:validation|evaluation)|\b[Vv]alidat(?:ing|ion)(?::| +\d)"
        ),
    ),
    (
        FailurePhase.LOAD,
        re.compile(r"Loading checkpoint shards|Loading (?:the )?(?:model|weights|checkpoint)|Downloading"),
    ),
    (
        FailurePhase.DATA,
        re.compile(
            r"[Tt]okeniz(?:ing|er on)|[Tt]okenising|\bMap(?: \(num_proc=\d+\))?:|\bFilter(?: \([^)]*\))?:"
            r"|Generating \w+ split|[Pp]reprocess(?:ing|ed)\b|[Pp]acking (?:train|eval)?|Grouping texts"
        ),
    ),
)
"""What programs print when they begin something that takes long."""

_STEP = re.compile(r"['\"]loss['\"]: |\bloss[:=] ?\d|\bstep[: =]{1,2}\d")
_ACTIVITY_LINES = 60


@dataclass(frozen=True, slots=True)
class _Compiled:
    signature: Signature
    pattern: re.Pattern[str] | None
    context: re.Pattern[str] | None
    around: re.Pattern[str] | None


@cache
def _table() -> tuple[_Compiled, ...]:
    def compiled(text: str | None) -> re.Pattern[str] | None:
        return re.compile(text) if text else None

    return tuple(
        _Compiled(item, compiled(item.pattern), compiled(item.context), compiled(item.around))
        for item in signatures()
    )


@cache
def _signature(code: str) -> _Compiled:
    return next(item for item in _table() if item.signature.code == code)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A known failure in one log: the lines that show it, by index."""

    item: _Compiled
    log: LogText
    lines: tuple[int, ...]


_Indexed = Sequence[tuple[LogText, TextIndex]]

_DUMPED = "Last enqueued NCCL work: "
_COLLECTIVE_TEXT = "WorkNCCL(SeqNum="
_STRUCTURE = (_DUMPED, _COLLECTIVE_TEXT, RESTART, FIRST_FAILURE)


def diagnose_logs(
    target: str, logs: Sequence[LogText], versions: Mapping[str, str] | None = None
) -> FailureDiagnosis:
    """Recognise known failures in logs that were read before.

    Args:
        target: What the answer is about.
        logs: One or several logs of the same run.
        versions: Versions of the run's libraries, if they are known apart from the logs.
    """
    said = facts(logs)
    texts = {*_STRUCTURE, *(text for item in _table() for text in item.signature.texts)}
    indexed = [(log, TextIndex(log.lines, texts)) for log in logs]
    seen = _beside_others([each for log, index in indexed for each in _matches(log, index)])
    divergence, odd = _divergence(indexed)
    behind = _behind(indexed) if odd is None else None
    notes: list[str] = []
    ended = _over(indexed, seen, notes)
    found = [_recognised(each) for each in seen if each not in ended]
    merged = _ordered([*found, *(each for each in (odd, behind) if each is not None)], logs)
    depths = {item.code: _signature(item.code).signature.depth for item in merged}
    explained = {code for code in depths if depths.keys() & {*_signature(code).signature.explained_by}}
    least = min((depth for code, depth in depths.items() if code not in explained), default=0)
    # Summaries, timeouts and lost connections are reported of any failure: the exception itself says more.
    known = [set[int]().union(*(each.lines for each in seen if each.log is log)) for log in logs]
    raised = unexplained(indexed, known, beside=not least and bool(merged))
    exception = raised if least or not merged else None
    well = exception is None and not {0, 1, 3} & {*depths.values()} and any(map(ended_well, logs))
    failed = not well and (exception is not None or (bool(merged) and least < _WARNING))
    if exception is not None:
        least = 0
    failures = [
        replace(item, consequence=depths[item.code] > least or item.code in explained)
        for item in merged
        if (depths[item.code] < _WARNING) == failed or not (failed or well)
    ]
    failures.sort(key=lambda item: item.consequence)
    if divergence is None and behind is None:
        notes += _absent_ranks(logs, failures)
    notes += _known_bugs(logs, exact_versions({**said.versions, **(versions or {})}))
    return FailureDiagnosis(
        target=target,
        failures=tuple(failures),
        exception=raised if failed else None,
        failed=failed,
        read_bytes=sum(log.read_bytes for log in logs),
        total_bytes=sum(log.total_bytes for log in logs),
        notes=tuple(notes),
        run=None,
        memory=None,
        divergence=divergence,
        ended_well=well,
        facts=said,
    )


def _known_bugs(logs: Sequence[LogText], versions: Versions) -> Iterator[str]:
    """Yield the advisories of the run's versions whose message is in the logs."""
    for advisory in advisories():
        error, version = advisory.database_specific.error, affected_version(advisory, versions)
        if error is None or version is None:
            continue
        parts = [part for piece in _PLACEHOLDER.split(error) if len(part := piece.strip()) > 3]
        message = re.compile(r".{0,200}?".join(map(re.escape, parts)))
        if max(map(len, parts), default=0) >= _SPECIFIC and any(
            all(part in log.text for part in parts) and message.search(log.text) for log in logs
        ):
            repaired = fixed_in(advisory, version)
            until = f"fixed in {repaired}" if repaired is not None else "no repaired release is known"
            yield (
                f"{advisory.package} {version} has a known bug with this message ({advisory.id}, {until}):"
                f" {advisory.database_specific.change}; see {advisory.references[0].url}"
            )


def _beside_others(seen: Sequence[_Seen]) -> list[_Seen]:
    """Return what was seen without what counts only beside another failure that was not."""
    codes = {each.item.signature.code for each in seen}
    return [each for each in seen if not each.item.signature.beside or codes & {*each.item.signature.beside}]


def _ordered(found: Sequence[RecognisedFailure], logs: Sequence[LogText]) -> list[RecognisedFailure]:
    """Join what several logs say of one failure, and order by depth, then by line."""
    place = {log.name: number for number, log in enumerate(logs)}
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
                also=tuple(dict.fromkeys((*known.also, *item.also)))[:_ALSO],
            )
        )
    return sorted(
        merged.values(),
        key=lambda item: (_signature(item.code).signature.depth, place[item.file], item.line),
    )


def _matches(log: LogText, index: TextIndex) -> Iterator[_Seen]:
    """Yield the known failures of a log, each with the lines that show it."""
    places: dict[str, list[int]] = {}
    for item in _table():
        lines = _lines_of(log, index, item) if item.signature.code != _BEHIND else []
        if lines:
            places[item.signature.code] = lines
    _whose_memory(log, places)
    replaced: dict[str, set[int]] = defaultdict(set)
    for item in _table():
        for code in item.signature.over:
            replaced[code].update(places.get(item.signature.code, ()))
    for item in _table():
        hidden = replaced[item.signature.code]
        if lines := [at for at in places.get(item.signature.code, ()) if at not in hidden]:
            yield _Seen(item, log, tuple(lines))


def _lines_of(log: LogText, index: TextIndex, item: _Compiled) -> list[int]:
    """Return the indices of the lines that a signature matches, in order."""
    found = {at: text for text in reversed(item.signature.texts) for at in index.lines_with(text, COUNTED)}
    lines = sorted(found)
    if item.pattern is not None:
        lines = [at for at, window in _windows(log, lines, found) if item.pattern.search(window)]
    if item.signature.code == "RUN002":
        lines = [at for at in lines if _is_fragmented(log.lines[at])]
    if item.context is not None:
        half = _CONTEXTS // 2
        tried = lines if len(lines) <= _CONTEXTS else [*lines[:half], *lines[-half:]]
        lines = [at for at in tried if item.context.search(_before(log, at))]
    return lines


def _windows(log: LogText, lines: Sequence[int], texts: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Yield lines, or of long ones what is around their texts, until enough was searched."""
    left = _SEARCHED
    for at in lines:
        line = log.lines[at]
        if len(line) > 2 * _WINDOW:
            begin = max(line.find(texts[at]) - _WINDOW, 0)
            line = line[begin : begin + 2 * _WINDOW + len(texts[at])]
        yield at, line
        left -= len(line)
        if left < 0:
            return


def _recognised(seen: _Seen) -> RecognisedFailure:
    """Return a failure as its lines show it."""
    signature, log = seen.item.signature, seen.log
    failure = _shown(seen.item, log, seen.lines, log.ranks_at(seen.lines))
    phase = _phase_of(log, seen.lines[0]) if signature.code in _MEMORY else None
    if phase is None and signature.by_phase:
        phase = _activity(log, seen.lines[0])
    return in_phase(failure, phase)


def _shown(item: _Compiled, log: LogText, lines: Sequence[int], ranks: Iterable[int]) -> RecognisedFailure:
    signature, at = item.signature, lines[0]
    texts = [_excerpt(signature, log.lines[at])]
    shapes = {_shape(texts[0])}
    for index in (*_nearby(item, log, lines), *lines[1:_CONTEXTS]):
        text = _excerpt(signature, log.lines[index])
        if (shape := _shape(text)) not in shapes:
            texts.append(text)
            shapes.add(shape)
        if len(texts) > _ALSO:
            break
    return RecognisedFailure(
        code=signature.code,
        title=signature.title,
        cause=signature.cause,
        consequence=False,
        file=log.name,
        line=log.number(at),
        text=texts[0],
        occurrences=len(lines),
        ranks=tuple(sorted(ranks)),
        phase=None,
        why=signature.why,
        change=signature.change,
        source=signature.source,
        also=tuple(texts[1:]),
        requested=_requested(log.lines[at]),
    )


def _excerpt(signature: Signature, line: str) -> str:
    """Return a line, shortened; a long one from where it says something."""
    shown = next((text for text in signature.texts if text in line), None)
    start = line.find(shown) if shown is not None else 0
    start = start if start + (len(shown) if shown else 0) > LINE_LENGTH - 60 else 0
    return line[start:].strip()[:LINE_LENGTH]


def _shape(text: str) -> str:
    """Return what lines that differ only in numbers, ranks and prefixes have in common."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "0", split_prefix(text)[1])[:80]


def _nearby(item: _Compiled, log: LogText, lines: Sequence[int]) -> Iterator[int]:
    """Yield the indices of further lines that belong to a failure, near its first line."""
    if item.around is None:
        return
    first = lines[0]
    for index in range(max(first - _NEAR_BEFORE, 0), min(first + _NEAR_AFTER, len(log.lines))):
        if index not in lines and item.around.search(log.lines[index]):
            yield index


def in_phase(failure: RecognisedFailure, phase: FailurePhase | None) -> RecognisedFailure:
    """Return a failure with its phase, and with what is known of it in that phase."""
    if phase is None:
        return failure
    advice = _signature(failure.code).signature.by_phase.get(phase)
    if advice is None:
        return replace(failure, phase=phase)
    return replace(failure, phase=phase, why=advice.why, change=advice.change)


_SIZE = r"(?<![\d.])(\d+(?:\.\d+)?) ([KMGT]iB|bytes)"
_FACTORS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WANTED = re.compile(rf"Tried to allocate {_SIZE}")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_USED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_TOTAL = re.compile(rf"total capacity of {_SIZE}")
_OTHER = re.compile(rf"Process (\d{{1,9}}) has {_SIZE} memory in use")
_GPU = re.compile(r"\. GPU (\d{1,4}) has a total capacity")


def _bytes(match: re.Match[str] | None) -> float | None:
    return (
        float(match[match.lastindex - 1]) * _FACTORS[match[match.lastindex]]
        if match and match.lastindex
        else None
    )


_MOST_BYTES = 2**62
"""No device has more: a larger figure is not one that PyTorch printed."""


def _requested(line: str) -> RequestedMemory | None:
    """Return what a line says that PyTorch tried to allocate."""
    match = _WANTED.search(line)
    wanted = _bytes(match)
    if match is None or wanted is None or wanted > _MOST_BYTES:
        return None
    decimals, factor = min(len(match[1].partition(".")[2]), 9), _FACTORS[match[2]]
    return RequestedMemory(round(wanted), int(factor * 0.5 / 10**decimals))


def _is_fragmented(line: str) -> bool:
    """Say whether the allocator held more unused memory than it was asked for."""
    wanted, unused = _bytes(_WANTED.search(line)), _bytes(_UNUSED.search(line))
    return wanted is not None and unused is not None and unused >= wanted


_OTHERS_SHARE = 0.2
"""Share of a GPU that other processes have to hold to be the cause of a lack of memory."""


def _whose_memory(log: LogText, places: dict[str, list[int]]) -> None:
    """Move lines on a lack of memory to the failure that their numbers show: other processes hold the GPU.

    If they hold GPU 0 and several ranks want memory on it, these are the other processes.
    """
    taken = [at for code in _MEMORY for at in places.get(code, ()) if _others_hold(log.lines[at])]
    if not taken:
        return
    first = {rank for at in taken if (rank := log.rank_at(at)) is not None and _gpu(log.lines[at]) == "0"}
    code = _SAME_GPU if len(first) > 1 else _OTHER_PROCESS
    places[code] = sorted({*places.get(code, ()), *taken})
    for memory in _MEMORY:
        if memory in places:
            places[memory] = [at for at in places[memory] if at not in taken]


def _gpu(line: str) -> str | None:
    match = _GPU.search(line)
    return match[1] if match else None


def _others_hold(line: str) -> bool:
    """Say whether torch names other processes that hold much of the GPU. In containers one is its own."""
    total, used = _bytes(_TOTAL.search(line)), _bytes(_USED.search(line))
    sizes = [size for match in _OTHER.finditer(line) if (size := _bytes(match)) is not None]
    if total is None or used is None or not sizes:
        return False
    if "this process has" not in line:
        sizes.remove(min(sizes, key=lambda size: abs(size - used)))
    return sum(sizes) >= _OTHERS_SHARE * total


def _before(log: LogText, at: int) -> str:
    """Return the lines before a place."""
    return "\n".join(line[: 4 * LINE_LENGTH] for line in log.lines[max(at - _CONTEXT_LINES, 0) : at])


def _phase_of(log: LogText, at: int) -> FailurePhase | None:
    """Return the phase that a line names, or the frames of the traceback before it or what was begun tell."""
    if named := _NAMED_PHASE.match(log.lines[at]):
        return FailurePhase(named[1])
    frames = _before(log, at)
    start = frames.rfind("Traceback (most recent call last)")
    frames = frames[start:] if start >= 0 else ""
    return next((phase for phase, pattern in _FRAMES if re.search(pattern, frames)), None)


def _activity(log: LogText, at: int) -> FailurePhase | None:
    """Return what the program had begun before a line and not yet left, as its own lines say."""
    for index in range(at, max(at - _ACTIVITY_LINES, -1), -1):
        line = log.lines[index]
        for phase, pattern in _ACTIVITIES:
            if pattern.search(line):
                return None if "100%" in line else phase
        if index < at and _STEP.search(line):
            return None
    return None


def _over(indexed: _Indexed, seen: Sequence[_Seen], notes: list[str]) -> list[_Seen]:
    """Return what did not end the run: the program recovered, or the launcher started again after it."""
    ended: list[_Seen] = []
    for log, index in indexed:
        mine = [each for each in seen if each.log is log]
        restarts = list(index.lines_with(RESTART, COUNTED))
        last = restarts[-1] if restarts else -1
        if restarts and any(each.lines[-1] > last and each.item.signature.depth == 0 for each in mine):
            for each in mine:
                if each.lines[-1] <= last and each.item.signature.depth == 0:
                    ended.append(each)
                    attempt = 1 + sum(at < each.lines[0] for at in restarts)
                    notes.append(
                        f"attempt {attempt} of {len(restarts) + 1} ended otherwise, and the launcher"
                        f" started again: {_named(each)}"
                    )
        for each in mine:
            if (
                each in ended
                or each.item.signature.depth == _WARNING
                or each.item.signature.cause in _LASTING
            ):
                continue
            after = each.lines[-1]
            if ended_well(log, after + 1) or recovered(log, after, survived=len(each.lines) <= _CONTEXTS):
                ended.append(each)
                if each.item.signature.depth == 0:
                    notes.append(f"the program went on after: {_named(each)}")
    return ended


def _named(seen: _Seen) -> str:
    signature = seen.item.signature
    return f"{signature.title} [{signature.code}], line {seen.log.number(seen.lines[0])}"


def _absent_ranks(logs: Sequence[LogText], failures: Sequence[RecognisedFailure]) -> Iterator[str]:
    """Name the ranks that the logs mention and that report no timeout although others do."""
    waited = {rank for item in failures if item.code in _TIMEOUTS for rank in item.ranks}
    if not waited:
        return
    absent = sorted({rank for log in logs for rank in ranks_named(log)} - waited)
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        some = f"ranks {shown} do" if len(absent) > 1 else f"rank {shown} does"
        yield f"{some} not report a timeout: look there first"


_ENQUEUED = re.compile(r"Last enqueued NCCL work: (\d{1,18}), last completed NCCL work: (\d{1,18})")


def _behind(indexed: _Indexed) -> RecognisedFailure | None:
    """Return the ranks that called fewer collectives than others of their group, as their dumps show."""
    groups: dict[str | None, dict[int, tuple[int, LogText, int]]] = defaultdict(dict)
    for log, index in indexed:
        for at in index.lines_with(_DUMPED, COUNTED):
            rank, line = log.rank_at(at), log.lines[at]
            match, named = _ENQUEUED.search(line), next(reversed(list(_GROUP.finditer(line))), None)
            if match is not None and rank is not None:
                groups[_group_name(named)].setdefault(rank, (int(match[1]), log, at))
    for group, counts in sorted(groups.items(), key=lambda item: item[0] or ""):
        most = max(count for count, _, _ in counts.values())
        late = sorted(rank for rank, (count, _, _) in counts.items() if count < most)
        if late and 2 * len(late) <= len(counts):
            return _late(indexed, group, late, counts[late[0]], most)
    return None


def _late(
    indexed: _Indexed, group: str | None, late: Sequence[int], first: tuple[int, LogText, int], most: int
) -> RecognisedFailure:
    """Return the failure of ranks that are behind, with the call that the first of them has not made."""
    count, log, at = first
    failure = _shown(_signature(_BEHIND), log, [at], late)
    missed = f"{most - count} collective{'s' if most - count > 1 else ''}"
    of_group = f" of process group {group}" if group is not None else ""
    waiting = next(
        (
            call.log.lines[call.at]
            for other, index in indexed
            for call in _calls(other, index)
            if (call.group, call.sequence) == (group, count + 1) and call.rank not in late
        ),
        None,
    )
    return replace(
        failure,
        text=_ENQUEUED.search(log.lines[at])[0],  # type: ignore[index]
        why=f"Rank {late[0]} is {missed}{of_group} behind: it has called {count}, others wait in {most}."
        f" {failure.why}",
        also=failure.also if waiting is None else (f"missing: {waiting[:LINE_LENGTH]}", *failure.also),
    )


_COLLECTIVE = re.compile(
    r"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w+), (?:NumelIn=(\d{1,18}), NumelOut=(\d{1,18}), )?"
    r"(?:dtype=(\w+), )?"
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
    dtype: str | None
    log: LogText
    at: int

    @property
    def compared(self) -> tuple[str, int | None, int | None, str | None]:
        """What has to be the same on all ranks."""
        whole_in, whole_out = _SIZES.get(self.operation, (True, True))
        sizes = self.sizes[0] if whole_in else None, self.sizes[1] if whole_out else None
        return self.operation, *sizes, self.dtype


def _calls(log: LogText, index_of: TextIndex) -> Iterator[_Call]:
    """Yield the collectives that the lines of a log report, with the rank that called each."""
    for index in index_of.lines_with(_COLLECTIVE_TEXT, len(log.lines)):
        line = log.lines[index]
        match = _COLLECTIVE.search(line)
        if match is None or match[2] in _PAIRWISE:
            continue
        before = line[: match.start()]
        group = next(reversed(list(_GROUP.finditer(before))), None)
        rank = log.rank if log.rank is not None else rank_of(before)
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
            match[5],
            log,
            index,
        )


def _group_name(match: re.Match[str] | None) -> str | None:
    """Return the name of a process group; None for that of all ranks, which older lines do not name."""
    if match is None or match[1] == "0" or match[2] == "default_pg":
        return None
    return f"{match[1]} ({match[2]})" if match[2] else match[1]


def _divergence(
    logs: Sequence[tuple[LogText, TextIndex]],
) -> tuple[Divergence | None, RecognisedFailure | None]:
    """Return where ranks called different collectives, as NCCL's watchdog shows, and the failure."""
    places: dict[tuple[str | None, int], dict[int, _Call]] = defaultdict(dict)
    # The names of operations and sizes of a record are not all those of the watchdog's lines.
    for log, index in [each for each in logs if each[0].recorded] or logs:
        for call in _calls(log, index):
            places[call.group, call.sequence].setdefault(call.rank, call)
    parted = {
        key: ranks for key, ranks in places.items() if len({call.compared for call in ranks.values()}) > 1
    }
    if not parted:
        return None, None
    # Where most ranks tell, and there the first.
    (group, sequence), ranks = min(parted.items(), key=lambda item: (-len(item[1]), item[0][1]))
    kinds: dict[tuple[str, int | None, int | None, str | None], list[_Call]] = defaultdict(list)
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
                calls[0].dtype,
            )
            for calls in ordered
        ),
    )
    first = min(odd, key=lambda call: call.rank)
    failure = _shown(_signature(_DIVERGED), first.log, [first.at], (call.rank for call in odd))
    return divergence, replace(failure, occurrences=len(odd))
