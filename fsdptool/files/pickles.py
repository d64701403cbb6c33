"""Pickles of plain values, as torch writes them of memory and collectives, read without running it.

A machine for the opcodes of Python's pickle (``pickletools``, protocols 0 to 5) knows plain containers only.
Nothing is imported and nothing is called: an opcode that would do so is refused by the name it asks for.
Python's own reader is ten times as fast, but trusts sizes and numbers of memo entries, and hashes whatever
becomes a key. It is given only what a scan found to be made of a few harmless opcodes, as torch's files are.
"""

from __future__ import annotations

import gc
import gzip
import io
import pickle
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsdptool.errors import StorageError
from fsdptool.files.text import UnreadableError, open_regular, read_bytes
from fsdptool.formatting import printable

SIZE_LIMIT = 256 << 20
"""Bytes of a pickle, decompressed."""

_OPERATIONS = 40_000_000
_CONTAINERS = 4_000_000
_EXPANDED = 50_000_000
"""Values that a walk over the result meets: what is referred to a second time counts twice."""

_DEPTH = 100
_KEYS = frozenset((str, bytes, int, float, bool, type(None)))
_GZIP = b"\x1f\x8b"


class _RefusedError(Exception):
    """Why a pickle is not read, as the end of a sentence that begins with the file's name."""


def is_pickle(head: bytes) -> bool:
    """Say whether a file that begins so is a pickle of protocol 2 or later; gzip is to be undone before."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def read_pickle(path: Path, *, limit: int = SIZE_LIMIT) -> Any:
    """Return the plain value that a pickle holds; gzip is undone.

    Args:
        path: The file.
        limit: The most bytes of it, and of what it decompresses to.

    Returns:
        Dicts, lists, tuples, sets, text, bytes, numbers, booleans and None. It refers to itself nowhere, is
        at most 100 levels deep, and a walk over it meets at most 50 million values.

    Raises:
        StorageError: The file cannot be read, is too large, is damaged, or holds anything else.
    """
    try:
        return _plain(_content(path, limit))
    except (UnreadableError, _RefusedError) as error:
        raise StorageError(
            f"{path}: {error}", help="give a file as torch wrote it: nothing in it was run"
        ) from error


def _content(path: Path, limit: int) -> bytes:
    with open_regular(path) as stream:
        if stream.peek(2)[:2] == _GZIP:
            try:
                data = gzip.GzipFile(fileobj=stream).read(limit + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise _RefusedError(f"the compressed file is damaged ({error})") from error
            if len(data) > limit:
                raise _RefusedError(f"it decompresses to more than {limit:,} bytes, which are not read")
            return data
    return read_bytes(path, limit=limit)


def _plain(data: bytes) -> Any:
    """Return what a pickle holds.

    Raises:
        _RefusedError: It is damaged, too large, or holds more than plain values.
    """
    try:
        value = _load(data) if _harmless(data) else _run(data)
    except (
        pickle.UnpicklingError,
        EOFError,
        IndexError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        struct.error,
    ) as error:
        raise _RefusedError("it is not a pickle, or is cut off or damaged") from error
    _measure(value)
    return value


def _load(data: bytes) -> Any:
    """Load what was found harmless; without looking for cycles meanwhile, which takes as long as loading."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    finally:
        if collecting:
            gc.enable()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        raise _RefusedError(f"it is refused: it imports {module}.{name}")


_LONGS = b"|".join(bytes([size]) + b".{%d}" % size for size in range(10))
_FIXED = (
    rb"h.|\x94|[(ue}\]asN\x88\x89]|(?:K.|M..){2}\x86|K.|\x8a(?:"
    + _LONGS
    + rb")|J.{4}|j.{4}|M..|G.{8}|\x95.{8}"
)
_RUN = re.compile(rb"(?:" + _FIXED + rb"){0,500}", re.DOTALL)
"""Opcodes of fixed length that make and fill lists and dicts of scalars and of pairs of small numbers."""

_MEMOISED = 10_000_000


def _harmless(data: bytes) -> bool:
    """Say whether a pickle has only opcodes that Python's own reader can be trusted with."""
    if len(data) < 3 or data[0] != 0x80:
        return False
    # Bytes of arguments count, too: then the slow way decides.
    if (
        data.count(b"}") + data.count(b"]") + data.count(b"\x86") > _CONTAINERS
        or data.count(b"\x94") > _MEMOISED
    ):
        return False
    position, match = 2, _RUN.match
    size = len(data)
    while position < size:
        found = match(data, position)
        end = found.end() if found is not None else position
        code = data[end] if end < size else 0
        if code == 0x8C and end + 1 < size:  # SHORT_BINUNICODE
            position = end + 2 + data[end + 1]
        elif code == 0x58:  # BINUNICODE
            position = end + 5 + int.from_bytes(data[end + 1 : end + 5], "little")
        elif end > position:
            position = end
        else:
            return code == 0x2E and end == size - 1  # STOP
    return False


def _run(data: bytes) -> Any:
    machine = _Machine(data)
    for _ in range(_OPERATIONS):
        code = machine.take(1)[0]
        if code == _STOP:
            if machine.marks or len(machine.stack) != 1:
                raise _RefusedError("it is damaged")
            return machine.stack[0]
        work = _WORK.get(code)
        if work is None:
            raise _RefusedError(_refusal(code, machine))
        work(machine)
        if machine.containers > _CONTAINERS:
            raise _RefusedError(f"it holds more than {_CONTAINERS:,} containers")
        if len(machine.marks) > _DEPTH:
            raise _RefusedError(f"it is nested more than {_DEPTH} levels deep")
    raise _RefusedError(f"it has more than {_OPERATIONS:,} operations")


class _Machine:
    """The stack, the marks and the memo of a pickle that is read, and its bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.containers = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        end = self.position + size
        if end > len(self.data):
            raise _RefusedError("it is not a pickle, or is cut off or damaged")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.position)
        return self.take(end + 1 - self.position)[:-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def make(self, value: Any) -> None:
        self.containers += 1
        self.stack.append(value)

    def items(self) -> list[Any]:
        """Return what is above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def top(self, kind: type) -> Any:
        """Return what is to be filled, on top of the stack."""
        target = self.stack[-1]
        if type(target) is not kind:
            raise _RefusedError("it is damaged")
        return target

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.items()

    def last(self, size: int) -> None:
        if len(self.stack) < size:
            raise _RefusedError("it is damaged")
        self.stack[-size:] = [tuple(self.stack[-size:])]
        self.containers += 1

    def append(self) -> None:
        item = self.stack.pop()
        self.top(list).append(item)

    def extend(self) -> None:
        items = self.items()
        self.top(list).extend(items)

    def insert(self) -> None:
        item, key = self.stack.pop(), self.stack.pop()
        self.top(dict)[_hashable([key])[0]] = item

    def update(self) -> None:
        items = self.items()
        self.top(dict).update(_pairs(items))

    def unite(self) -> None:
        items = self.items()
        self.top(set).update(_hashable(items))


def _hashable(items: list[Any]) -> list[Any]:
    if not _KEYS.issuperset(map(type, items)):
        raise _RefusedError("it has a key, or an entry of a set, that is neither text nor a number")
    return items


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(_hashable(items[::2]), items[1::2], strict=True))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _latin(data: bytes) -> str:
    return data.decode("latin-1")


def _long(data: bytes) -> int:
    if len(data) > 9:
        raise _RefusedError("it holds an integer of more than 64 bits")
    return int.from_bytes(data, "little", signed=True)


def _integer(line: bytes) -> int:
    if len(line) > 21:
        raise _RefusedError("it holds an integer of more than 64 bits")
    return int(line)


def _integer_or_truth(line: bytes) -> int:
    return line == b"01" if line in (b"00", b"01") else _integer(line)


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise _RefusedError("it is damaged")
    return line[1:-1].decode("latin-1")


_STOP = 0x2E
_WORK: dict[int, Callable[[_Machine], object]] = {
    # Numbers and constants.
    0x4B: lambda it: it.push(it.number(1)),
    0x4D: lambda it: it.push(it.number(2)),
    0x4A: lambda it: it.push(_long(it.take(4))),
    0x8A: lambda it: it.push(_long(it.take(it.number(1)))),
    0x8B: lambda it: it.push(_long(it.take(it.number(4)))),
    0x47: lambda it: it.push(struct.unpack(">d", it.take(8))[0]),
    0x4E: lambda it: it.push(None),
    0x88: lambda it: it.push(True),
    0x89: lambda it: it.push(False),
    0x49: lambda it: it.push(_integer_or_truth(it.line())),
    0x4C: lambda it: it.push(_integer(it.line().removesuffix(b"L"))),
    0x46: lambda it: it.push(float(it.line())),
    # Text and bytes.
    0x8C: lambda it: it.push(_text(it.take(it.number(1)))),
    0x58: lambda it: it.push(_text(it.take(it.number(4)))),
    0x8D: lambda it: it.push(_text(it.take(it.number(8)))),
    0x43: lambda it: it.push(it.take(it.number(1))),
    0x42: lambda it: it.push(it.take(it.number(4))),
    0x8E: lambda it: it.push(it.take(it.number(8))),
    0x55: lambda it: it.push(_latin(it.take(it.number(1)))),
    0x54: lambda it: it.push(_latin(it.take(it.number(4)))),
    0x56: lambda it: it.push(it.line().decode("raw-unicode-escape")),
    0x53: lambda it: it.push(_quoted(it.line())),
    # Containers.
    0x7D: lambda it: it.make({}),
    0x5D: lambda it: it.make([]),
    0x8F: lambda it: it.make(set()),
    0x29: lambda it: it.make(()),
    0x74: lambda it: it.make(tuple(it.items())),
    0x6C: lambda it: it.make(it.items()),
    0x64: lambda it: it.make(_pairs(it.items())),
    0x91: lambda it: it.make(frozenset(_hashable(it.items()))),
    0x85: lambda it: it.last(1),
    0x86: lambda it: it.last(2),
    0x87: lambda it: it.last(3),
    0x61: _Machine.append,
    0x65: _Machine.extend,
    0x73: _Machine.insert,
    0x75: _Machine.update,
    0x90: _Machine.unite,
    # The stack and the memo.
    0x28: _Machine.mark,
    0x30: _Machine.pop,
    0x31: _Machine.items,
    0x94: lambda it: it.memo.__setitem__(len(it.memo), it.stack[-1]),
    0x71: lambda it: it.memo.__setitem__(it.number(1), it.stack[-1]),
    0x72: lambda it: it.memo.__setitem__(it.number(4), it.stack[-1]),
    0x70: lambda it: it.memo.__setitem__(_integer(it.line()), it.stack[-1]),
    0x68: lambda it: it.push(it.memo[it.number(1)]),
    0x6A: lambda it: it.push(it.memo[it.number(4)]),
    0x67: lambda it: it.push(it.memo[_integer(it.line())]),
    0x80: lambda it: it.take(1),
    0x95: lambda it: it.take(8),
}
"""What an opcode does to a machine."""


def _refusal(code: int, machine: _Machine) -> str:
    """Say why an opcode that makes more than a plain value is refused: by the name that it imports."""
    stack = machine.stack
    if code in b"ci":  # GLOBAL, INST
        name = ".".join(map(_latin, machine.data[machine.position :][:500].split(b"\n")[:2]))
    elif code == 0x93 and [str, str] == list(map(type, stack[-2:])):  # STACK_GLOBAL
        name = f"{stack[-2]}.{stack[-1]}"
    elif 0x82 <= code <= 0x84:
        name = "an entry of copyreg's registry"
    elif code in b"RobPQ\x81\x92\x93\x96\x97":
        return "it is refused: it makes objects, and only plain containers are read"
    else:
        return "it is not a pickle, or is cut off or damaged"
    return f"it is refused: it imports {printable(name[:200])}, and only plain containers are read"


_KINDS = frozenset((dict, list, tuple))


def _measure(value: Any) -> None:
    """Refuse what refers to itself, is too deep, or means more values than can be walked over."""
    sizes: dict[int, int] = {}
    open_: set[int] = set()
    parents: list[tuple[Any, Iterator[Any], int]] = []
    if type(value) not in _KINDS:
        return
    current, left, count = value, _parts(value), len(value)
    open_.add(id(value))
    while True:
        for part in left:
            if type(part) not in _KINDS:
                continue
            size = sizes.get(id(part)) or _known_size(part, sizes)
            if size is not None:
                sizes[id(part)] = size
                count += size
                continue
            if id(part) in open_:
                raise _RefusedError("it refers to itself")
            if len(parents) >= _DEPTH:
                raise _RefusedError(f"it is nested more than {_DEPTH} levels deep")
            parents.append((current, left, count))
            current, left, count = part, _parts(part), len(part)
            open_.add(id(part))
            break
        else:
            if count > _EXPANDED:
                raise _RefusedError(f"it stands for more than {_EXPANDED:,} values")
            sizes[id(current)] = count
            open_.discard(id(current))
            if not parents:
                return
            current, left, outer = parents.pop()
            count += outer


def _known_size(value: Any, sizes: dict[int, int]) -> int | None:
    """Return how many values a container stands for that holds plain values, or only known containers.

    Dictionaries of plain values, the frames of stacks, become known on the way.
    """
    parts = value.values() if type(value) is dict else value
    kinds = set(map(type, parts))
    if kinds.isdisjoint(_KINDS):
        return len(value)
    if not kinds <= _KINDS:
        return None
    if kinds == {dict}:
        for part in parts:
            if id(part) not in sizes:
                if not _KINDS.isdisjoint(map(type, part.values())):
                    return None
                sizes[id(part)] = len(part)
    known = list(map(sizes.get, map(id, parts)))
    return None if None in known else len(value) + sum(known)  # type: ignore[arg-type]


def _parts(value: Any) -> Iterator[Any]:
    return iter(value.values()) if type(value) is dict else iter(value)
