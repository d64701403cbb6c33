"""Where text and rows come from: files, folders, CPython's own help texts, the datasets library."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, open_regular, read_blocks, read_csv, read_ends, read_lines
from fsdptool.files.values import load_json
from fsdptool.records.codec import to_json
from fsdptool.records.recipe import Data
from fsdptool.source.references import check_code

Row = Mapping[str, Any]

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text")
_BLOCK = 1 << 20
"""Characters of a text file that are read at once."""


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Rows that can be read again and again.

    Attributes:
        identity: Changes when the content does: file names, sizes and times, or a fingerprint.
        located: Starts a new reading: each row with where it is, as messages name it (``file:line``). A row
            of text may carry ``continues: True``: its document goes on.
        place: What to call it in a message.
        count: Estimates the number of rows, for progress; None where that takes reading all of them.
        size: Bytes of all rows where they are text and nothing else, for progress by bytes; else None.
    """

    identity: str
    located: Callable[[], Iterator[tuple[str, Row]]]
    place: str
    count: Callable[[], int | None] = lambda: None
    size: int | None = None

    def rows(self) -> Iterator[Row]:
        """Start a new reading of the rows alone."""
        return (row for _, row in self.located())

    def where(self, is_bad: Callable[[Row], bool]) -> str:
        """Return where the first row is that a mistake is about: read again, on failure only."""
        return next((place for place, row in self.located() if is_bad(row)), self.place)


def open_source(data: Data) -> SampleSource:
    """Return the rows a recipe's data section names.

    Raises:
        ConfigError: The place is missing, empty or unreadable.
    """
    if data.source == "text":
        return _text(data)
    if data.source == "jsonl":
        return _table(data, (".jsonl", ".json", ".ndjson", ".csv", ".tsv"), _read_table)
    if data.source == "parquet":
        return _table(data, (".parquet",), _read_parquet)
    if data.source == "dataset":
        return _dataset(data)
    raise ConfigError(
        f"data.source {data.source} does not provide rows of text",
        help="use text, jsonl, parquet or dataset for language models",
    )


def check_place(data: Data) -> None:
    """Check that a recipe's data are there, without reading more than the first row.

    Raises:
        ConfigError: The place is missing, empty or unreadable.
    """
    if data.source in ("text", "jsonl", "parquet"):
        source = open_source(data)
        if next(source.rows(), None) is None:
            raise ConfigError(f"data.path {source.place} has no rows", help="name another file or folder")
    elif data.source == "python":
        check_code(path_of(data))
    elif data.source in ("images", "latents") and not Path(path_of(data)).expanduser().exists():
        raise ConfigError(f"data.path {data.path} does not exist", help="check the spelling")


def path_of(data: Data) -> str:
    """Return the data's path.

    Raises:
        ConfigError: The recipe gives none.
    """
    if not data.path:
        raise ConfigError(
            f"data.source {data.source} needs data.path", help="name the file or folder in data.path"
        )
    return data.path


def identity_of(files: list[Path]) -> str:
    """Return a text that changes when one of the files does (name, size, time of change)."""
    marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps(marks)


def places_of(files: list[Path]) -> str:
    """Return a text that is different for every set of files: as :func:`identity_of`, with where they are.

    The time of the last change of any kind cannot be set back, so it tells a file that was replaced by one
    of equal size and time.
    """
    marks = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns, f.stat().st_ctime_ns) for f in files]
    return json.dumps(marks)


def files_under(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the file, or the folder's files with one of the suffixes, sorted by path.

    Raises:
        ConfigError: There is nothing.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not place.exists():
        raise ConfigError(
            f"data.path {path} does not exist",
            help="check the spelling; a relative path is looked up in the recipe's folder, then in the"
            " working directory",
        )
    files = sorted(file for file in place.rglob("*") if file.is_file() and file.suffix.lower() in suffixes)
    if not files:
        raise ConfigError(
            f"data.path {path} contains no file that ends in {', '.join(suffixes)}",
            help="name the right folder, or another data.source",
        )
    return files


def _unreadable(file: Path, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ConfigError(f"{file} cannot be read: {reason}", help="repair the file or take it out of data.path")


def _text(data: Data) -> SampleSource:
    path = path_of(data)
    if path == "pydoc":
        return SampleSource("pydoc:" + _python_version(), _pydoc, "pydoc")
    files = files_under(path, TEXT_SUFFIXES)
    unit = data.options.get("document", "file")

    def located() -> Iterator[tuple[str, Row]]:
        for file in files:
            try:
                for row in _documents(file, unit, data.text_column):
                    yield str(file), row
            except (OSError, UnreadableError) as error:
                raise _unreadable(file, error) from error

    size = sum(file.stat().st_size for file in files)
    return SampleSource(places_of(files) + unit, located, path, size=size)


def _python_version() -> str:
    import platform

    return platform.python_version()


def _pydoc() -> Iterator[tuple[str, Row]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"pydoc:{name}", {"text": topics[name]}


def _documents(file: Path, unit: str, column: str) -> Iterator[Row]:
    """A file, and a paragraph in it, may be larger than memory: both are read in blocks."""
    if unit == "line":
        yield from ({column: line.rstrip("\n")} for line in read_lines(file) if line.strip())
        return
    if unit == "file":
        yield from _in_blocks(read_blocks(file, size=_BLOCK), column)
        return
    lines = read_lines(file)
    for line in lines:
        if line.strip():
            paragraph = itertools.chain([line], itertools.takewhile(str.strip, lines))
            yield from _in_blocks(paragraph, column)


def _in_blocks(parts: Iterable[str], column: str) -> Iterator[Row]:
    """Yield a document as rows of about one block, cut where a line ends, or else before a word."""
    pending, begun = io.StringIO(), False
    blocks = (part[at : at + _BLOCK] for part in parts for at in range(0, len(part), _BLOCK))
    for block in blocks:
        pending.write(block)
        if pending.tell() < _BLOCK:
            continue
        text = pending.getvalue()
        cut = text.rfind("\n") + 1 or max(text.rfind(" "), 0) or len(text)
        yield {column: text[:cut], "continues": True}
        pending, begun = io.StringIO(), True
        pending.write(text[cut:])
    if (rest := pending.getvalue()) or begun:
        yield {column: rest}


def _table(
    data: Data, suffixes: tuple[str, ...], read: Callable[[Path], Iterator[tuple[str, Row]]]
) -> SampleSource:
    path = path_of(data)
    files = files_under(path, suffixes)

    def located() -> Iterator[tuple[str, Row]]:
        for file in files:
            try:
                yield from read(file)
            except (OSError, UnreadableError, csv.Error) as error:
                raise _unreadable(file, error) from error

    count = _parquet_count if suffixes == (".parquet",) else _line_count
    return SampleSource(places_of(files), located, path, lambda: count(files))


def _line_count(files: list[Path]) -> int | None:
    """Estimate the lines of all files from the first block of the first one."""
    try:
        block, _, _ = read_ends(files[0], head=_BLOCK, tail=0)
    except UnreadableError:
        return None
    return sum(file.stat().st_size for file in files) * block.count(b"\n") // max(len(block), 1) or None


def _parquet_count(files: list[Path]) -> int | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def rows_of(file: Path) -> int:
        with open_regular(file) as stream:
            return int(pq.read_metadata(stream).num_rows)

    try:
        return sum(rows_of(file) for file in files)
    except (OSError, UnreadableError, pa.ArrowException):
        return None


def _read_table(file: Path) -> Iterator[tuple[str, Row]]:
    if file.suffix.lower() in (".csv", ".tsv"):
        yield from ((f"{file}:{number}", record) for number, record in read_csv(file))
        return
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        try:
            row = load_json(line)
        except ValueError as error:
            raise ConfigError(
                f"{file}:{number}: not a JSON object: {error}", help="one JSON object per line"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{file}:{number}: expected a JSON object, got {type(row).__name__}",
                help="one JSON object per line",
            )
        yield f"{file}:{number}", row


def _read_parquet(file: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(file) as stream:
            # Values that are stored once stay so: a column of a few bytes can stand for gigabytes.
            repeated = _repeated_columns(pq.read_metadata(stream))
            with pq.ParquetFile(stream, read_dictionary=repeated) as table:
                number = 0
                for group in range(table.num_row_groups):
                    size = table.metadata.row_group(group).total_byte_size
                    rows = max(table.metadata.row_group(group).num_rows, 1)
                    most = max(min(_BATCH_ROWS, rows * _BATCH_BYTES // max(size, 1)), 1)
                    for batch in table.iter_batches(batch_size=most, row_groups=[group]):
                        for place in range(batch.num_rows):
                            number += 1
                            values = (column[place].as_py() for column in batch.columns)
                            yield f"{file}, row {number}", dict(zip(batch.schema.names, values, strict=True))
    except pa.ArrowException as error:
        raise _unreadable(file, error) from error


_BATCH_ROWS, _BATCH_BYTES = 1024, 64 << 20
"""The most rows and bytes of a Parquet file that are decoded at once."""


def _repeated_columns(metadata: Any) -> list[str]:
    """Return the columns of text in a Parquet file of which a part is stored as a dictionary."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(metadata.num_columns)]
    return sorted(
        {
            column.path_in_schema
            for column in columns
            if column.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in name for name in column.encodings)
        }
    )


def _dataset(data: Data) -> SampleSource:
    """A folder saved by ``save_to_disk``, a folder or script-free id that ``load_dataset`` knows."""
    import datasets

    path = path_of(data)
    # As JSON has them: the library takes lists of files, and no tuples, from a mapping.
    wanted = ("name", "data_files", "revision")
    options = {key: to_json(value) for key, value in data.options.items() if key in wanted}
    try:
        if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(path)
            table = dataset[data.split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            table = datasets.load_dataset(path, split=data.split, **options)
    except Exception as error:  # the datasets library raises its own, OSError, ValueError, KeyError
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"dataset {path} (split {data.split}) cannot be loaded: {line}",
            help="check data.path, data.split and data.options.name",
        ) from error

    def located() -> Iterator[tuple[str, Row]]:
        for number, row in enumerate(table, 1):
            yield f"{path}, row {number}", row

    return SampleSource(str(table._fingerprint), located, path, lambda: getattr(table, "num_rows", None))
