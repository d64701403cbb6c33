"""Reads memory snapshots, as ``torch.cuda.memory._dump_snapshot`` writes them. Torch-free.

A snapshot has the segments and blocks at its end (``segments``) and, where the history was recorded, the last
entries of each GPU (``device_traces``; ``TraceEntry`` in c10/cuda/CUDACachingAllocator.h). The state before
the first entry follows by undoing the entries backwards from the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fsdptool.errors import StorageError
from fsdptool.files.pickles import is_pickle, read_pickle
from fsdptool.files.text import UnreadableError, is_file, read_beginning
from fsdptool.records.plan import Candidate
from fsdptool.records.snapshot import (
    AllocatingLine,
    AllocatingStack,
    BlockActivations,
    Change,
    FailedRequest,
    InactiveMemory,
    MeasuredComponent,
    MemoryChange,
    MemoryPoint,
    MemorySnapshot,
    Reason,
)
from fsdptool.records.trace import Component
from fsdptool.runs.recordings.blocks import activations_by_block
from fsdptool.runs.recordings.flight_records import is_flight_record
from fsdptool.runs.recordings.stacks import Stacks

_ROUNDING = 512
_SMALL = 1 << 20
_LIMIT = 1 << 50
_POINTS, _LINES, _STACKS = 600, 100, 300
_GROWS, _SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_ACTIONS = ("alloc", "free_completed", *_GROWS, *_SHRINKS, "oom")


@dataclass(slots=True)
class RecordedBlock:
    """A block in use.

    Attributes:
        size: Bytes, rounded by the allocator; of a block that was freed its request, rounded to 512 bytes.
        frames: The stack that allocated it.
        freed: The stack that freed it; None while it is kept.
    """

    size: int
    frames: Any
    freed: Any = None


@dataclass(slots=True)
class TraceEntry:
    """One entry of a trace that changes memory.

    Attributes:
        action: ``alloc``, ``free_completed``, ``segment_alloc``, ``segment_map``, ``segment_free``,
            ``segment_unmap`` or ``oom``.
        address: Where; of an ``oom`` the free bytes of the GPU.
        size: Bytes, as they were asked for.
        stream: The stream.
        micros: When, in microseconds; 0 where that was not recorded.
        frames: The stack.
        block: The block that the entry makes or frees.
    """

    action: str
    address: int
    size: int
    stream: int
    micros: int
    frames: Any
    block: RecordedBlock | None = None


@dataclass(slots=True)
class Recording:
    """The memory of one GPU: its state at the end, its entries, and the state before them.

    Attributes:
        device: The GPU.
        segments: The segments at the end, with their blocks in order of address.
        entries: The entries, the oldest first.
        start: Blocks in use before the first entry, by address.
        end: Blocks in use at the end, by address.
        reserved_start, reserved_end: Bytes of segments.
        ignored, contradictions: As in :class:`MemorySnapshot`.
    """

    device: int
    segments: list[dict[str, Any]]
    entries: list[TraceEntry]
    start: dict[int, RecordedBlock] = field(default_factory=dict)
    end: dict[int, RecordedBlock] = field(default_factory=dict)
    reserved_start: int = 0
    reserved_end: int = 0
    ignored: int = 0
    contradictions: int = 0


def is_snapshot(path: Path) -> bool:
    """Say whether a file is to be read as a memory snapshot: any pickle but a flight record.

    Raises:
        StorageError: It cannot be read.
    """
    if not is_file(path):
        # What a shell substitutes can be read only once.
        return False
    try:
        head = read_beginning(path, 8)
    except UnreadableError as error:
        raise StorageError(f"{path}: {error.message}") from error
    return is_pickle(head) and not is_flight_record(path)


def _is_snapshot(value: Any) -> bool:
    """Say whether what a pickle holds has the form of today, or the earlier list of segments."""
    if isinstance(value, dict):
        return isinstance(value.get("segments"), list)
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "blocks" in value[0]


def read_recordings(path: Path) -> list[Recording]:
    """Return what a snapshot holds of each GPU, the one with the most reserved memory first.

    Raises:
        StorageError: The file cannot be read, holds more than plain values, or is not a memory snapshot.
    """
    value = read_pickle(path)
    if not _is_snapshot(value):
        raise StorageError(f"{path} is not a memory snapshot", help="give what _dump_snapshot wrote")
    return recordings_in(value)


def recordings_in(value: Any) -> list[Recording]:
    """Return what a parsed snapshot holds of each GPU, the one with the most reserved memory first."""
    segments = value["segments"] if isinstance(value, dict) else value
    traces = value.get("device_traces") if isinstance(value, dict) else None
    by_device: dict[int, list[dict[str, Any]]] = {}
    ignored = 0
    for segment in segments:
        if isinstance(segment, dict) and isinstance(segment.get("blocks"), list):
            by_device.setdefault(_number(segment, "device") or 0, []).append(segment)
        else:
            ignored += 1
    lists = traces if isinstance(traces, list) else []
    for device, entries in enumerate(lists):
        if isinstance(entries, list) and entries:
            by_device.setdefault(device, [])
    found = []
    for device, owned in by_device.items():
        entries = lists[device] if device < len(lists) and isinstance(lists[device], list) else []
        found.append(_recording(device, owned, entries, ignored))
    found.sort(key=lambda recording: (-recording.reserved_end, -len(recording.entries), recording.device))
    return found or [Recording(0, [], [], ignored=ignored)]


def _number(item: Mapping[str, Any], key: str) -> int | None:
    """Return a size or an address; None for anything that is none."""
    value = item.get(key)
    return value if type(value) is int and 0 <= value < 1 << 64 else None


def _recording(device: int, segments: list[dict[str, Any]], entries: list[Any], ignored: int) -> Recording:
    recording = Recording(device, [], [], ignored=ignored)
    for segment in segments:
        total, address = _number(segment, "total_size"), _number(segment, "address")
        if total is None or total > _LIMIT or address is None:
            recording.ignored += 1
            continue
        recording.segments.append({**segment, "blocks": list(_blocks(recording, segment, address))})
        recording.reserved_end += total
    for entry in entries:
        if (read := _entry(entry)) is not None:
            recording.entries.append(read)
        elif not isinstance(entry, dict) or entry.get("action") in _ACTIONS:
            recording.ignored += 1
    _undo(recording)
    return recording


def _blocks(recording: Recording, segment: dict[str, Any], address: int) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a segment with their addresses; those in use become a part of the end's state."""
    for block in segment["blocks"]:
        size = _number(block, "size") if isinstance(block, dict) else None
        if size is None or size > _LIMIT:
            recording.ignored += 1
            continue
        place = _number(block, "address") or address
        address = place + size
        used = str(block.get("state")).startswith("active")
        if used:
            recording.end[place] = RecordedBlock(size, _frames(block))
        yield {"address": place, "size": size, "used": used}


def _frames(block: dict[str, Any]) -> Any:
    """Return the stack of a block, which earlier versions of torch kept in a history."""
    history = block.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict):
        block = history[0]
    return block.get("frames")


def _entry(entry: Any) -> TraceEntry | None:
    if not isinstance(entry, dict):
        return None
    action = entry.get("action")
    if action not in _ACTIONS:
        return None
    get = entry.get
    address = get("device_free" if action == "oom" and "device_free" in entry else "addr")
    size, stream, micros = get("size"), get("stream", 0), get("time_us", 0)
    if (
        type(address) is not int
        or type(size) is not int
        or type(stream) is not int
        or type(micros) is not int
    ):
        return None
    if not (0 <= address < 1 << 64 and 0 <= size < _LIMIT and abs(micros) < 1 << 62):
        return None
    return TraceEntry(action, address, size, stream, micros, get("frames"))


def _undo(recording: Recording) -> None:
    """Find the state before the first entry, and give each entry its block."""
    live = dict(recording.end)
    reserved = recording.reserved_end
    for entry in reversed(recording.entries):
        action = entry.action
        if action == "alloc":
            block = live.pop(entry.address, None)
            if block is None:
                recording.contradictions += 1
                block = RecordedBlock(rounded(entry.size), None)
            block.frames = entry.frames
            entry.block = block
        elif action == "free_completed":
            if entry.address in live:
                recording.contradictions += 1
            entry.block = live[entry.address] = RecordedBlock(rounded(entry.size), None, entry.frames or [])
        elif action in _GROWS:
            reserved -= entry.size
        elif action in _SHRINKS:
            reserved += entry.size
    if reserved < 0:
        recording.contradictions += 1
    recording.start, recording.reserved_start = live, max(reserved, 0)


def rounded(size: int) -> int:
    """Return a request's size as the allocator rounds it."""
    return -(-size // _ROUNDING) * _ROUNDING or _ROUNDING


def describe_snapshot(path: Path, planned: Candidate | None = None) -> MemorySnapshot:
    """Return what a snapshot says of the GPU with the most reserved memory.

    Args:
        path: The snapshot.
        planned: What its peak is compared with.

    Raises:
        StorageError: As :func:`read_recordings`.
    """
    recordings = read_recordings(path)
    snapshot = describe(str(path), recordings[0], tuple(other.device for other in recordings[1:]))
    return snapshot if planned is None else _compared(snapshot, planned)


def _compared(snapshot: MemorySnapshot, planned: Candidate) -> MemorySnapshot:
    """Put the plan's peak beside the measured one, a component that only one of them has included."""
    expected = {str(item.name): item.bytes for item in planned.components if item.name not in _OUTSIDE}
    components = [
        replace(item, planned_bytes=expected.pop(item.name, 0 if item.name in set(Component) else None))
        for item in snapshot.components
    ]
    components += [MeasuredComponent(name, 0, 0, size) for name, size in expected.items() if size]
    return replace(snapshot, components=tuple(components), planned_peak_bytes=planned.allocated_peak_bytes)


_OUTSIDE = (Component.ALLOCATOR_SLACK, Component.CONTEXT, Component.COMMUNICATORS)
"""Components of a plan that torch's allocator does not allocate."""


def describe(name: str, recording: Recording, others: tuple[int, ...] = ()) -> MemorySnapshot:
    """Return what is known of the memory of one GPU."""
    entries = recording.entries
    allocated, reserved = _levels(recording)
    failure = next(
        (index for index in range(len(entries) - 1, -1, -1) if entries[index].action == "oom"), None
    )
    peak = max(range(len(allocated)), key=allocated.__getitem__)
    at = peak if failure is None else failure + 1
    names, components, timeline, live = _walk(recording, allocated, reserved, at)
    stacks = Stacks()
    failed = _failed(entries[failure], stacks) if failure is not None else None
    inactive = _inactive(recording, failed)
    measured = [MeasuredComponent(key, *components[key]) for key in names if components.get(key)]
    lines, paths = _places(live, stacks)
    times = [entry.micros for entry in entries if entry.micros]
    return MemorySnapshot(
        file=name,
        device=recording.device,
        other_devices=others,
        entries=len(entries),
        ignored=recording.ignored,
        contradictions=recording.contradictions,
        seconds=(times[-1] - times[0]) / 1e6 if times else None,
        expandable_segments=any(segment.get("is_expandable") is True for segment in recording.segments),
        allocated_peak_bytes=allocated[peak],
        reserved_peak_bytes=max(reserved),
        allocated_bytes=allocated[-1],
        reserved_bytes=recording.reserved_end,
        moment="peak" if failed is None else "failure",
        moment_bytes=allocated[at],
        planned_peak_bytes=None,
        components=tuple(measured),
        activations=_activations(recording, live),
        lines=lines,
        stacks=paths,
        timeline=tuple(timeline),
        inactive=inactive,
        failed=failed,
        changes=_changes(measured, inactive, failed, recording),
    )


def _levels(recording: Recording) -> tuple[list[int], list[int]]:
    """Return allocated and reserved bytes before the first entry and after each one."""
    allocated = [sum(block.size for block in recording.start.values())]
    reserved = [recording.reserved_start]
    now, held = allocated[0], reserved[0]
    for entry in recording.entries:
        if entry.action == "alloc":
            now += entry.block.size if entry.block is not None else 0
        elif entry.action == "free_completed":
            now -= entry.block.size if entry.block is not None else 0
        elif entry.action in _GROWS:
            held += entry.size
        elif entry.action in _SHRINKS:
            held -= entry.size
        allocated.append(max(now, 0))
        reserved.append(max(held, 0))
    return allocated, reserved


def _walk(
    recording: Recording, allocated: list[int], reserved: list[int], at: int
) -> tuple[list[str], dict[str, tuple[int, int]], list[MemoryPoint], list[RecordedBlock]]:
    """Return the components, what they hold at a moment, points of them, and the blocks of the moment."""
    entries = recording.entries
    step = -(-len(allocated) // (_POINTS - 1))
    shown = {
        max(range(begin, min(begin + step, len(allocated))), key=allocated.__getitem__)
        for begin in range(0, len(allocated), step)
    }
    shown.add(at)
    stacks = Stacks()
    python_only = _python_only(recording)
    kinds: dict[int, str] = {}
    totals: Counter[str] = Counter()
    live = dict(recording.start)
    for block in live.values():
        kind = kinds[id(block)] = stacks.component(block.frames, block.freed, python_only=False)
        totals[kind] += block.size
    points: list[tuple[int, dict[str, int]]] = []
    moment: list[RecordedBlock] = []
    first = next((entry.micros for entry in entries if entry.micros), 0)
    for index in range(len(entries) + 1):
        entry = entries[index - 1] if index else None
        if entry is not None and entry.block is not None:
            block = entry.block
            if entry.action == "alloc":
                kind = stacks.component(block.frames, block.freed, python_only=python_only)
                kinds[id(block)] = kind
                totals[kind] += block.size
                live[entry.address] = block
            elif (freed := kinds.pop(id(block), None)) is not None:
                totals[freed] -= block.size
                live.pop(entry.address, None)
        if index in shown:
            points.append((index, dict(totals)))
        if index == at:
            moment = list(live.values())
    held = Counter[str]()
    blocks = Counter[str]()
    after = {id(block): block for block in moment}
    for block in after.values():
        kind = kinds.get(id(block)) or stacks.component(block.frames, block.freed, python_only=python_only)
        held[kind] += block.size
        blocks[kind] += 1
    order = [*(name for name, _ in held.most_common()), *(name for name in totals if name not in held)]
    timeline = [
        MemoryPoint(
            index,
            _seconds(entries, index, first),
            allocated[index],
            reserved[index],
            tuple(max(now.get(name, 0), 0) for name in order),
        )
        for index, now in points
    ]
    return order, {name: (held[name], blocks[name]) for name in order}, timeline, moment


def _seconds(entries: list[TraceEntry], index: int, first: int) -> float | None:
    micros = entries[index - 1].micros if index else first
    return max(micros - first, 0) / 1e6 if micros else None


def _python_only(recording: Recording) -> bool:
    """Say whether stacks have lines of Python and no C++ frames."""
    stacked = [entry.frames for entry in recording.entries if entry.frames and type(entry.frames) is list][
        :200
    ]
    return bool(stacked) and not any(
        isinstance(frame, dict) and "::" in str(frame.get("name")) for frames in stacked for frame in frames
    )


def _failed(entry: TraceEntry, stacks: Stacks) -> FailedRequest:
    lines = stacks.lines(entry.frames)
    return FailedRequest(entry.size, entry.address, entry.stream, _shown(lines[0]) if lines else None)


def _shown(line: tuple[str, int, str]) -> str:
    return f"{line[0]}:{line[1]} {line[2]}"


def _places(
    live: list[RecordedBlock], stacks: Stacks
) -> tuple[tuple[AllocatingLine, ...], tuple[AllocatingStack, ...]]:
    sizes: Counter[tuple[str, int, str]] = Counter()
    numbers: Counter[tuple[str, int, str]] = Counter()
    paths: Counter[tuple[str, ...]] = Counter()
    for block in live:
        lines = stacks.lines(block.frames)
        if lines:
            sizes[lines[0]] += block.size
            numbers[lines[0]] += 1
            paths[tuple(map(_shown, reversed(lines[:40])))] += block.size
    return (
        tuple(AllocatingLine(*line, size, numbers[line]) for line, size in sizes.most_common(_LINES)),
        tuple(AllocatingStack(path, size) for path, size in paths.most_common(_STACKS)),
    )


def _activations(recording: Recording, live: list[RecordedBlock]) -> tuple[BlockActivations, ...]:
    """Return the live activations by the call of a block that made them."""
    stacks = Stacks()
    python_only = _python_only(recording)
    sizes = {
        id(block): block.size
        for block in live
        if stacks.component(block.frames, block.freed, python_only=python_only) == Component.ACTIVATIONS
    }
    if not sizes:
        return ()
    made = ((id(entry.block), entry.frames) for entry in recording.entries if entry.action == "alloc")
    return activations_by_block(made, sizes, stacks)


def _inactive(recording: Recording, failed: FailedRequest | None) -> tuple[InactiveMemory, ...]:
    """Return the free blocks at the end by stream and pool, the most bytes first."""
    free: dict[tuple[int, Literal["small", "large"], bool], list[tuple[int, bool]]] = {}
    for segment in recording.segments:
        stream = segment.get("stream")
        kind: Literal["small", "large"] = "small" if segment.get("segment_type") == "small" else "large"
        pool = segment.get("segment_pool_id")
        private = isinstance(pool, (tuple, list)) and any(type(part) is int and part for part in pool)
        whole = not any(block["used"] for block in segment["blocks"])
        for block in segment["blocks"]:
            if not block["used"] and block["size"]:
                key = (stream if type(stream) is int else 0, kind, private)
                free.setdefault(key, []).append((block["size"], whole))
    found = [
        InactiveMemory(
            *key,
            bytes=sum(size for size, _ in pieces),
            pieces=len(pieces),
            largest_bytes=max(pieces)[0],
            whole_segment_bytes=sum(size for size, whole in pieces if whole),
            reason=_reason(*key, max(pieces)[0], failed) if failed is not None else None,
        )
        for key, pieces in free.items()
    ]
    return tuple(sorted(found, key=lambda item: -item.bytes))


def _reason(stream: int, pool: str, private: bool, largest: int, failed: FailedRequest) -> Reason:
    if private:
        return "private_pool"
    if stream != failed.stream:
        return "other_stream"
    if (pool == "small") != (rounded(failed.bytes) <= _SMALL):
        return "other_pool"
    return "fits" if largest >= failed.bytes else "too_small"


_CHANGES: tuple[tuple[Change, tuple[str, ...]], ...] = (
    ("fused_loss", (Component.LOSS,)),
    ("checkpointing", (Component.ACTIVATIONS,)),
    ("shard_optimizer", (Component.OPTIMIZER,)),
    ("free_gradients", (Component.GRADIENTS,)),
)


def _changes(
    components: list[MeasuredComponent],
    inactive: tuple[InactiveMemory, ...],
    failed: FailedRequest | None,
    recording: Recording,
) -> tuple[MemoryChange, ...]:
    """Return what frees at least 2 % of the reserved bytes, or what the failed request lacks."""
    missing = max(failed.bytes - failed.device_free_bytes, 0) if failed is not None else None
    sizes: dict[Change, int] = {
        change: sum(item.bytes for item in components if item.name in names) for change, names in _CHANGES
    }
    if not any(segment.get("is_expandable") is True for segment in recording.segments):
        sizes["expandable_segments"] = sum(
            item.bytes - item.whole_segment_bytes
            for item in inactive
            if item.pool == "large" and not item.private and (failed is None or item.stream == failed.stream)
        )
    least = min(0.02 * recording.reserved_end, missing if missing is not None else _LIMIT)
    found = [
        MemoryChange(change, size, None if missing is None else size >= missing)
        for change, size in sizes.items()
        if size and size >= least
    ]
    return tuple(sorted(found, key=lambda item: -item.bytes))
