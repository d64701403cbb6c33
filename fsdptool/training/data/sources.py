"""Where text and rows come from: files, folders, CPython's own help texts, the datasets library."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, read_lines
from fsdptool.files.values import load_json
from fsdptool.records.recipe import Data

Row = Mapping[str, Any]

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text")
_BLOCK = 1 << 20
"""Characters of a text file that are read at once."""


@dataclass(frozen=True, slots=True)
class Source:
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


def open_source(data: Data) -> Source:
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


def _text(data: Data) -> Source:
    path = path_of(data)
    if path == "pydoc":
        return Source("pydoc:" + _python_version(), _pydoc, "pydoc")
    files = files_under(path, TEXT_SUFFIXES)
    unit = str(data.options.get("document", "file"))
    if unit not in ("file", "paragraph", "line"):
        raise ConfigError(f"data.options.document {unit!r} is not one of file, paragraph, line")

    def located() -> Iterator[tuple[str, Row]]:
        for file in files:
            try:
                for row in _documents(file, unit, data.text_column):
                    yield str(file), row
            except (OSError, UnicodeDecodeError) as error:
                raise _unreadable(file, error) from error

    size = sum(file.stat().st_size for file in files)
    return Source(places_of(files) + unit, located, path, size=size)


def _python_version() -> str:
    import platform

    return platform.python_version()


def _pydoc() -> Iterator[tuple[str, Row]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"pydoc:{name}", {"text": topics[name]}


def _documents(file: Path, unit: str, column: str) -> Iterator[Row]:
    """A file may be larger than memory: it is read in blocks, cut where a line ends."""
    if unit == "line":
        yield from ({column: line.rstrip("\n")} for line in read_lines(file) if line.strip())
        return
    if unit == "paragraph":
        lines: list[str] = []
        for line in read_lines(file):
            if line.strip():
                lines.append(line)
            elif lines:
                yield {column: "".join(lines)}
                lines = []
        if lines:
            yield {column: "".join(lines)}
        return
    with file.open(encoding="utf-8") as stream:
        pending, begun = "", False
        while block := stream.read(_BLOCK):
            pending += block
            cut = pending.rfind("\n") + 1
            if cut and len(pending) >= _BLOCK:
                yield {column: pending[:cut], "continues": True}
                pending, begun = pending[cut:], True
        if pending or begun:
            yield {column: pending}


def _table(
    data: Data, suffixes: tuple[str, ...], read: Callable[[Path], Iterator[tuple[str, Row]]]
) -> Source:
    path = path_of(data)
    files = files_under(path, suffixes)

    def located() -> Iterator[tuple[str, Row]]:
        for file in files:
            try:
                yield from read(file)
            except (OSError, UnicodeDecodeError, UnreadableError, csv.Error) as error:
                raise _unreadable(file, error) from error

    count = _parquet_count if suffixes == (".parquet",) else _line_count
    return Source(places_of(files), located, path, lambda: count(files))


def _line_count(files: list[Path]) -> int | None:
    """Estimate the lines of all files from the first block of the first one."""
    with files[0].open("rb") as stream:
        block = stream.read(_BLOCK)
    return sum(file.stat().st_size for file in files) * block.count(b"\n") // max(len(block), 1) or None


def _parquet_count(files: list[Path]) -> int | None:
    import pyarrow.parquet as pq

    return sum(int(pq.read_metadata(file).num_rows) for file in files)


def _read_table(file: Path) -> Iterator[tuple[str, Row]]:
    if file.suffix.lower() in (".csv", ".tsv"):
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream, delimiter="\t" if file.suffix.lower() == ".tsv" else ",")
            for record in reader:
                yield f"{file}:{reader.line_num}", record
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
        with pq.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except pa.ArrowInvalid as error:
        raise _unreadable(file, error) from error


def _dataset(data: Data) -> Source:
    """A folder saved by ``save_to_disk``, a folder or script-free id that ``load_dataset`` knows."""
    import datasets

    path = path_of(data)
    options = {key: data.options[key] for key in ("name", "data_files", "revision") if key in data.options}
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

    return Source(str(table._fingerprint), located, path, lambda: getattr(table, "num_rows", None))
