"""Pickles of strangers: plain values are read as Python reads them, and nothing else is."""

from __future__ import annotations

import datetime
import gzip
import pickle
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from fsdptool.errors import StorageError
from fsdptool.files.pickles import read_pickle

_SHARED = {"name": "forward", "filename": "/home/user/modèle.py", "line": 7}
PLAIN: dict[Any, Any] = {
    "segments": [
        {"address": 0x7F0000000000, "stream": 0, "segment_pool_id": (0, 1), "frames": [_SHARED] * 3}
    ],
    "numbers": [0, -1, 255, 65536, -(2**63), 2**64 - 1, 0.5, True, False, None],
    "nested": (1, (2, [3, {"x": ()}]), b"bytes", "\ud800"),
    "sets": [{1, 2}, frozenset({"a"})],
    "long": "x" * 300,
    1: 2.5,
    None: [[]],
}


def _read(folder: Path, data: bytes) -> Any:
    path = folder / "file.pickle"
    path.write_bytes(data)
    return read_pickle(path)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_values(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps(PLAIN if protocol > 3 else {**PLAIN, "sets": None, "nested": (1, "a")}, protocol)
    assert _read(tmp_path, data) == pickle.loads(data)
    assert _read(tmp_path, gzip.compress(data)) == pickle.loads(data)
    easy = pickle.dumps({"events": [{"addr": 2**47, "frames": [_SHARED, dict(_SHARED)]}] * 5}, protocol)
    assert _read(tmp_path, easy) == pickle.loads(easy)


def test_first_protocol(tmp_path: Path) -> None:
    values = {"a": [1, 2.5, None, True, "x"], "b": (1, 2)}
    assert _read(tmp_path, pickle.dumps(values, 0)) == values


class _Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("1/0",)


def _deep() -> Any:
    value: Any = ()
    for _ in range(300):
        value = (value,)
    return value


def _bomb() -> Any:
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    return value


_ITSELF: list[Any] = []
_ITSELF.append(_ITSELF)

REFUSED: dict[str, tuple[bytes, str]] = {
    "builtin": (pickle.dumps([_Runs()]), r"it imports builtins\.eval"),
    "builtin of protocol 0": (pickle.dumps([_Runs()], 0), r"it imports __builtin__\.eval"),
    "command": (b"cposix\nsystem\n(S'true'\ntR.", r"it imports posix\.system"),
    "class": (pickle.dumps(datetime.date(2026, 1, 1)), r"it imports datetime\.date"),
    "instance": (b"(ios\nsystem\n.", r"it imports os\.system"),
    "registry": (b"\x80\x02\x82\x01.", "copyreg"),
    "call of text": (b"\x80\x02U\x01a)R.", "makes objects"),
    "identifier": (b"\x80\x02Pname\n.", "makes objects"),
    "depth": (pickle.dumps(_deep()), "100 levels"),
    "marks": (b"\x80\x04" + b"(" * 1000 + b".", "100 levels|damaged"),
    "expansion": (pickle.dumps(_bomb()), "stands for more than"),
    "cycle": (pickle.dumps(_ITSELF), "refers to itself"),
    "memo": (b"\x80\x02]r\xff\xff\xff\x7f" + b"j\xff\xff\xff\x3f.", "damaged"),
    "text of 8 exabytes": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.", "cut off"),
    "bytes of 4 gigabytes": (b"\x80\x04B" + struct.pack("<I", 0xFFFFFFFF) + b"a.", "cut off"),
    "large integer": (pickle.dumps(1 << 4000), "64 bits"),
    "tuple as a key": (pickle.dumps({(1, 2, (3,)): 1}), "a key"),
    "empty": (b"", "not a pickle"),
    "text": (b"Traceback (most recent call last)\n", "not a pickle|damaged|refused"),
    "cut": (pickle.dumps(PLAIN)[:-20], "cut off"),
    "more behind": (pickle.dumps([1])[:-1], "cut off"),
    "gzip": (gzip.compress(b"x" * 100)[:-9], "compressed file is damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(StorageError, match=reason):
        _read(tmp_path, data)


def test_expanded_size(tmp_path: Path) -> None:
    path = tmp_path / "zeros.pickle.gz"
    path.write_bytes(gzip.compress(bytes(5_000_000)))
    with pytest.raises(StorageError, match="more than 1,000,000 bytes"):
        read_pickle(path, limit=1_000_000)


def test_damaged_bytes(tmp_path: Path) -> None:
    """Whatever a damaged file holds, it is read or refused; never more than plain values come back."""
    generator = random.Random(1)
    easy = pickle.dumps({"events": [{"addr": 2**47 + index, "frames": [_SHARED]} for index in range(20)]})
    for data in (pickle.dumps(PLAIN), easy):
        for _ in range(300):
            damaged = bytearray(data)
            for _ in range(generator.randrange(1, 4)):
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
            try:
                value = _read(tmp_path, bytes(damaged))
            except StorageError as error:
                assert re.match(r".*file\.pickle: \w", error.message)
            else:
                assert type(value) in (
                    dict,
                    list,
                    tuple,
                    set,
                    frozenset,
                    str,
                    bytes,
                    int,
                    float,
                    bool,
                    type(None),
                )
