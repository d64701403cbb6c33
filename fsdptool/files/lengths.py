"""Lengths of a data set's samples in tokens, from the files in which people keep them.

- ``.json``: an object of length to count, or an array of lengths;
- ``.jsonl``: a row per sample with ``input_ids`` (an array) or ``length``;
- a folder that ``train`` or ``precompute`` has written with tokenised text (``input_ids.ends.npy``);
- any other file: a line per sample with its length, or ``length,count`` (or with a tab between them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, is_file, is_folder, read_lines, read_source
from fsdptool.files.values import load_json

LONGEST = 1 << 24
"""Tokens of a sample beyond which a file is taken for something else."""

_MOST_SAMPLES = 1 << 40
_JSON_LIMIT = 64 << 20
_TABLE_LIMIT = 1 << 30
_HELP = (
    "write one length per line, length,count per line, a JSON object of length to count,"
    " or JSON Lines with input_ids or length"
)


def read_lengths(path: str | Path) -> dict[int, int]:
    """Return how many samples of each length a file has, the shortest first; empty samples are left out.

    Raises:
        ConfigError: The file cannot be read, or contains something else; names the file and the line.
    """
    path = Path(path)
    counts: Counter[int] = Counter()
    try:
        if is_folder(path):
            rows = _table(path)
        elif path.suffix == ".json":
            rows = _object(path)
        else:
            rows = _lines(path)
        for where, length, count in rows:
            if not 0 <= length <= LONGEST:
                raise _wrong(where, f"{length} is not a length of 1 to {LONGEST:,} tokens")
            if not 0 <= count <= _MOST_SAMPLES:
                raise _wrong(where, f"{count} is not a number of samples")
            counts[length] += count
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}", help=_HELP) from error
    lengths = {length: counts[length] for length in sorted(counts) if length and counts[length]}
    if not lengths:
        raise ConfigError(f"{path} has no lengths", help=_HELP)
    return lengths


def _wrong(where: str, message: str) -> ConfigError:
    return ConfigError(f"{where}: {message}", help=_HELP)


def _whole(value: Any, where: str) -> int:
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    shown = str(value)[:40]
    raise _wrong(where, f"{shown!r} is not a whole number")


def _object(path: Path) -> Iterator[tuple[str, int, int]]:
    text = read_source(path, limit=_JSON_LIMIT).text
    try:
        data = load_json(text)
    except ValueError as error:
        raise _wrong(str(path), f"not JSON: {error}") from error
    if isinstance(data, Mapping):
        for length, count in data.items():
            yield str(path), _whole(length, str(path)), _whole(count, str(path))
    elif isinstance(data, list):
        for place, length in enumerate(data):
            where = f"{path}, entry {place}"
            yield where, _whole(length, where), 1
    else:
        raise _wrong(str(path), "neither an object of length to count nor an array of lengths")


def _lines(path: Path) -> Iterator[tuple[str, int, int]]:
    rows = path.suffix in (".jsonl", ".ndjson")
    for number, line in enumerate(read_lines(path), 1):
        where, line = f"{path}:{number}", line.strip().removeprefix("\ufeff")
        if not line:
            continue
        if rows:
            yield where, _row_length(line, where), 1
            continue
        cells = [cell.strip() for cell in line.replace("\t", ",").split(",")]
        if number == 1 and cells[0].strip('"').lower() == "length":
            continue
        if len(cells) > 2:
            raise _wrong(where, f"{len(cells)} columns; a length and a count are expected")
        yield where, _whole(cells[0], where), _whole(cells[1], where) if len(cells) == 2 else 1


def _row_length(line: str, where: str) -> int:
    try:
        row = load_json(line)
    except ValueError as error:
        raise _wrong(where, f"not JSON: {error}") from error
    if isinstance(row, Mapping):
        tokens = row.get("input_ids")
        if isinstance(tokens, list):
            return len(tokens)
        if "length" in row:
            return _whole(row["length"], where)
    raise _wrong(where, "the row has neither input_ids (an array) nor length")


def _table(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the rows of a tokenised table (``training/data/ragged.py``), by length."""
    ends = path / "input_ids.ends.npy"
    if not is_file(ends):
        raise ConfigError(f"{path} is not a folder of tokenised text: it has no {ends.name}", help=_HELP)
    import numpy as np

    try:
        if ends.stat().st_size > _TABLE_LIMIT:
            raise ValueError("too large")
        values = np.load(ends, allow_pickle=False, mmap_mode="r")
        lengths, counts = np.unique(np.diff(values, prepend=0), return_counts=True)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{ends} cannot be read: it is not an array of numbers", help=_HELP) from error
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        yield str(ends), _whole(length, str(ends)), count
