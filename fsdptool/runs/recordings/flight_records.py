"""Reads what torch's flight recorder writes of collectives: pickles, and the same as JSON. Torch-free.

A record becomes lines as NCCL's watchdog prints them, so that logs and records are compared with each other.
The format is that of torch 2.5 to 2.13 (``torch/csrc/distributed/c10d/FlightRecorder.hpp``, 2.5 to 2.10).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.pickles import is_pickle, read_pickle
from fsdptool.files.text import UnreadableError, is_file, read_beginning
from fsdptool.files.values import count, read_json
from fsdptool.formatting import printable
from fsdptool.runs.logs import LogText

_BEGINNING = 1 << 16
_LIMIT = 256 << 20
_LINE = 600
_RANK = re.compile(r"(\d{1,6})(?:\.[a-z]{1,8}){0,3}$")
"""The rank at the end of a file's name; the records do not hold it."""

_OPERATIONS: Mapping[str, str] = {
    "all_reduce": "ALLREDUCE", "allreduce_coalesced": "ALLREDUCE_COALESCED", "all_gather": "ALLGATHER",
    "_all_gather_base": "_ALLGATHER_BASE", "all_to_all": "ALLTOALL", "all_to_all_single": "ALLTOALL_BASE",
    "all_reduce_barrier": "BARRIER",
}  # fmt: skip
"""Names of the recorder, and those of the watchdog where they are not the same in capitals."""


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """What one rank recorded.

    Attributes:
        log: Its calls as lines of the watchdog.
        members: The ranks of the group of all ranks; empty where the record does not name them.
    """

    log: LogText
    members: frozenset[int]


def is_flight_record(path: Path) -> bool:
    """Say whether a file looks like a record of torch's flight recorder.

    Raises:
        StorageError: It cannot be read.
    """
    if not is_file(path):
        # What a shell substitutes can be read only once.
        return False
    try:
        head = read_beginning(path, _BEGINNING)
    except UnreadableError as error:
        raise StorageError(f"{path}: {error.message}") from error
    if is_pickle(head):
        return b"pg_config" in head or b"collective_seq_id" in head
    return head.startswith(b"{") and b'"entries"' in head and b'"collective_seq_id"' in head


def read_flight_record(path: Path, *, name: str | None = None) -> FlightRecord:
    """Read the record of one rank.

    Args:
        path: The file; its name ends with the rank, as torch writes it.
        name: What it is called in answers.

    Raises:
        StorageError: It cannot be read, or a pickle holds anything but plain values.
        ConfigError: It is not a flight record.
    """
    try:
        head = read_beginning(path, _BEGINNING)
        content = read_pickle(path, limit=_LIMIT) if is_pickle(head) else read_json(path, limit=_LIMIT)
    except UnreadableError as error:
        raise StorageError(f"{path}: {error.message}") from error
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path} is not a flight record", help="give the files that torch's recorder wrote")
    found = _RANK.search(path.name)
    if found is None:
        raise ConfigError(f"{path}: the name does not end with a rank", help="keep the names that torch gave")
    rank = int(found[1])
    calls = [entry for entry in entries if isinstance(entry, dict) and entry.get("is_p2p") is not True]
    lines = [*_calls(calls, rank), *_standings(calls, content.get("pg_status"), rank)]
    version = content.get("comm_lib_version") or content.get("nccl_version")
    if isinstance(version, str) and version:
        lines.insert(0, f"NCCL version {printable(version[:_LINE])}")
    text = "\n".join(lines)
    return FlightRecord(
        LogText(name or str(path), text, len(text), len(text), rank, recorded=True),
        _members(content.get("pg_config")),
    )


def absent_ranks(records: Iterable[FlightRecord]) -> list[int]:
    """Return the ranks that records name as members of the run, and of which none is given."""
    records = list(records)
    members = frozenset().union(*(record.members for record in records))
    return sorted(members - {record.log.rank for record in records})


def _members(groups: object) -> frozenset[int]:
    """Return the ranks of the largest group that a record describes."""
    found: list[frozenset[int]] = [frozenset()]
    for group in groups.values() if isinstance(groups, dict) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, str):
            found.append(frozenset(int(each) for each in re.findall(r"\b\d{1,6}\b", ranks)))
    return max(found, key=len)


def _group(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and description of a call's process group."""
    named = entry.get("process_group")
    if isinstance(named, list | tuple) and len(named) == 2:
        name, description = (re.sub(r"[\s()\[\]]", "_", printable(str(each)[:80])) for each in named)
        return name or "0", description
    return "0", "default_pg"


def _prefix(group: tuple[str, str], rank: int) -> str:
    return f"[PG ID 0 PG GUID {group[0]}({group[1]}) Rank {rank}]"


def _calls(entries: Sequence[Mapping[str, Any]], rank: int) -> Iterator[str]:
    for entry in entries:
        sequence, name = count(entry.get("collective_seq_id")), entry.get("profiling_name")
        if sequence is None or not isinstance(name, str):
            continue
        operation = name.partition(":")[2].partition(" ")[0]
        operation = _OPERATIONS.get(operation, operation.upper())
        sizes = [_elements(entry.get(f"{side}_sizes")) for side in ("input", "output")]
        elements = f"NumelIn={sizes[0]}, NumelOut={sizes[1]}, " if None not in sizes else ""
        line = (
            f"{_prefix(_group(entry), rank)} WorkNCCL(SeqNum={sequence}, OpType={operation}, {elements}"
            f"{_dtype(entry)}state={entry.get('state')}){_caller(entry.get('frames'))}"
        )
        yield printable(line)[:_LINE]


def _elements(sizes: object) -> int | None:
    """Return the elements of all tensors of a call; None where the record does not hold their sizes."""
    if not isinstance(sizes, list | tuple):
        return None
    total = 0
    for shape in sizes:
        if (
            not isinstance(shape, list | tuple)
            or any(count(size) is None for size in shape)
            or len(shape) > 64
        ):
            return None
        total += prod(shape)
    return total if total < 1 << 53 else None


def _dtype(entry: Mapping[str, Any]) -> str:
    """Return the type of a call's tensors, if all of them have the same one."""
    names = {
        name
        for side in ("input", "output")
        for each in (entry.get(f"{side}_dtypes"),)
        if isinstance(each, list | tuple)
        for name in each
        if isinstance(name, str) and name.isalnum()
    }
    return f"dtype={names.pop()}, " if len(names) == 1 else ""


def _caller(frames: object) -> str:
    """Return the innermost line outside of torch that made a call."""
    for frame in frames if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            file = str(frame.get("filename"))
            if "/torch/" not in file:
                return f" called at {file[-200:]}:{frame.get('line')} in {str(frame.get('name'))[:80]}"
    return ""


def _standings(entries: Sequence[Mapping[str, Any]], status: object, rank: int) -> Iterator[str]:
    """Yield how far each group has come, the group of all ranks last."""
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in entries:
        sequence = count(entry.get("collective_seq_id"))
        if sequence is None:
            continue
        group, place = _group(entry), entry.get("pg_id")
        known = status.get(str(place)) if isinstance(status, dict) else None
        if known is None and isinstance(status, dict) and count(place) is not None:
            known = status.get(place)
        known = known if isinstance(known, dict) else {}
        done = sequence if entry.get("state") == "completed" or entry.get("retired") is True else 0
        before = newest.get(group, (0, 0))
        newest[group] = (
            max(before[0], sequence, count(known.get("last_enqueued_collective")) or 0),
            max(before[1], done, count(known.get("last_completed_collective")) or 0),
        )
    for group, (enqueued, completed) in sorted(newest.items(), key=lambda item: item[0][0] == "0"):
        counts = f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}"
        yield f"{_prefix(group, rank)} {counts}"
