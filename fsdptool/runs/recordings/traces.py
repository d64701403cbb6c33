"""Reads traces of torch's profiler (Kineto, in Chrome's format), event by event. Torch-free.

Traces are untrusted and may be huge: of an expanded text only one event is held at a time, and of an event
only what the analysis uses.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import UnreadableError, open_regular, read_beginning, unpacked
from fsdptool.files.values import count, number

_BLOCK = 1 << 20
_EXPANDED = 2 << 30
"""Characters of an expanded trace that are read at most."""

_ONE_VALUE = 4 << 20
"""Characters of one event, or of one other value of the document, at most."""

_KEPT = 6_000_000
"""Kernels, copies, launches and annotations that are kept at most."""

_NAME = 300
_SPACE = re.compile(r"[ \t\r\n]*")
_DTYPES: Mapping[str, int] = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "UInt32"), 4),
    **dict.fromkeys(("Long", "Double", "UInt64", "ComplexFloat"), 8),
}
"""Bytes of an element, by c10's name of its type (c10/core/ScalarType.h)."""


class GpuWork(NamedTuple):
    """One kernel or copy on the GPU. Times are microseconds of the trace's clock.

    Attributes:
        start, end: When it ran.
        kind: ``kernel``, ``collective`` or ``copy``.
        launch: Number that its launch on the host has, or None.
        operation: Of a collective; else empty.
        group: Name of the process group, where the trace says it.
        group_size: Ranks of the group, where the trace says it.
        bytes: Of the larger of input and output of a collective, or of a copy, where the trace says them.
        within: Whether it is a copy within the GPU.
    """

    start: float
    end: float
    kind: str
    launch: int | None
    operation: str = ""
    group: str = ""
    group_size: int | None = None
    bytes: int | None = None
    within: bool = False


class Product(NamedTuple):
    """An operator of the host that multiplies matrices, with the sizes that the trace says.

    Attributes:
        start, end, thread: When and where it ran on the host.
        flops: Two for each multiplication.
        half: Whether its operands are bf16 or fp16.
    """

    start: float
    end: float
    thread: str
    flops: float
    half: bool


@dataclass(frozen=True, slots=True)
class HostRange:
    """A named stretch of a thread of the host: a step of the profiler, or a hook of FSDP."""

    start: float
    end: float
    thread: str
    name: str


@dataclass
class KinetoTrace:
    """What is kept of one trace.

    Attributes:
        file: The file.
        rank, world_size, gpu: What the trace says of them.
        gpus: GPUs that the process saw.
        device: Number of the GPU that ran the first kernel.
        base: Nanoseconds since 1970 at which the trace's clock begins.
        work: Kernels and copies, by start.
        launches: When and on which thread each launch took place, by its number.
        products: Products of matrices of which the trace says the sizes (``record_shapes``).
        steps, hooks: Annotations of steps and of FSDP's hooks, by start.
        complete: Whether the file could be read to its end.
    """

    file: str
    rank: int | None = None
    world_size: int | None = None
    gpu: str | None = None
    gpus: int = 0
    device: int | None = None
    base: int = 0
    work: list[GpuWork] = field(default_factory=list)
    launches: dict[int, tuple[float, str]] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    steps: list[HostRange] = field(default_factory=list)
    hooks: list[HostRange] = field(default_factory=list)
    complete: bool = True


class _MalformedError(Exception):
    """From here on the text is not JSON, or it is too large."""


_BEGINNING = 1 << 18


def is_trace(path: Path) -> bool:
    """Say whether a file looks like a trace of torch's profiler.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        text = read_beginning(path, _BEGINNING).lstrip()
    except UnreadableError as error:
        raise StorageError(f"{path}: {error.message}") from error
    if text.startswith(b"{"):
        return b'"traceEvents"' in text or (b'"schemaVersion"' in text and b'"deviceProperties"' in text)
    return text.startswith(b"[") and b'"ph"' in text[:_NAME]


def read_trace(path: Path) -> KinetoTrace:
    """Read a trace, plain or compressed by gzip.

    A trace whose end is missing or damaged is read as far as it goes.

    Raises:
        StorageError: The file cannot be read.
        ConfigError: It does not contain work of a GPU, or contains more than is read.
    """
    trace = KinetoTrace(str(path))
    try:
        with open_regular(path) as stream:
            for name, value in _members(_Text(stream)):
                _take(trace, name, value)
    except UnreadableError as error:
        raise StorageError(f"{path}: {error.message}", help="give a trace of torch's profiler") from error
    except (OSError, EOFError, zlib.error, RecursionError, _MalformedError):
        trace.complete = False
    if not trace.work:
        damaged = "" if trace.complete else ", and it is damaged"
        raise ConfigError(
            f"{path}: the trace does not contain work of a GPU{damaged}",
            help="record with torch.profiler.ProfilerActivity.CUDA, and write it with export_chrome_trace",
        )
    for entries in (trace.work, trace.steps, trace.hooks):
        entries.sort(key=lambda entry: entry.start)
    return trace


class _Text:
    """A text of which only a part is held.

    Attributes:
        held: That part.
        at: Index of the next character in it.
    """

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = unpacked(stream)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = json.JSONDecoder().raw_decode
        self._read = 0
        self._ended = False
        self.held = ""
        self.at = 0

    def _more(self) -> bool:
        """Hold another block; false at the end."""
        if self._ended:
            return False
        block = self._stream.read(_BLOCK)
        self._read += len(block)
        self._ended = not block
        if self._read > _EXPANDED:
            raise _MalformedError
        self.held = self.held[self.at :] + self._decoder.decode(block, final=self._ended)
        self.at = 0
        return True

    def next(self) -> str:
        """Return the next character after spaces, without passing it; empty at the end."""
        if self.at < len(self.held) and self.held[self.at] > " ":
            return self.held[self.at]
        while True:
            self.at = _SPACE.match(self.held, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.held):
                return self.held[self.at]
            if not self._more():
                return ""

    def skip(self, expected: str) -> None:
        """Pass one character."""
        if self.next() != expected:
            raise _MalformedError
        self.at += 1

    def value(self) -> Any:
        """Return the next JSON value, and pass it."""
        self.next()
        while True:
            try:
                value, end = self._decode(self.held, self.at)
            except ValueError:
                end = -1
            # A number that ends where the block does may go on.
            if end >= 0 and (end < len(self.held) or self._ended):
                self.at = end
                return value
            if len(self.held) - self.at > _ONE_VALUE or not self._more():
                raise _MalformedError


def _members(text: _Text) -> Iterator[tuple[str, Any]]:
    """Yield the members of the document; of its list of events each event, as ``event``."""
    if text.next() == "[":
        yield from _events(text)
        return
    text.skip("{")
    while text.next() != "}":
        name = text.value()
        text.skip(":")
        if name == "traceEvents" and text.next() == "[":
            yield from _events(text)
        else:
            yield str(name), text.value()
        if text.next() == ",":
            text.skip(",")
        elif text.next() != "}":
            raise _MalformedError


def _events(text: _Text) -> Iterator[tuple[str, Any]]:
    text.skip("[")
    while text.next() != "]":
        yield "event", text.value()
        if text.next() == ",":
            text.skip(",")
    text.skip("]")


def _take(trace: KinetoTrace, name: str, value: Any) -> None:
    """Keep what the analysis uses of one member of the document."""
    if name == "event":
        if isinstance(value, dict) and value.get("ph") == "X":
            _take_event(trace, value)
    elif name == "distributedInfo" and isinstance(value, dict):
        trace.rank, trace.world_size = count(value.get("rank")), count(value.get("world_size")) or None
    elif name == "deviceProperties" and isinstance(value, list) and value and isinstance(value[0], dict):
        gpu, trace.gpus = value[0].get("name"), len(value)
        trace.gpu = _clean(gpu) if isinstance(gpu, str) else None
    elif name == "baseTimeNanoseconds":
        trace.base = count(value) or (int(value) if isinstance(value, str) and value.isdecimal() else 0)


def _clean(text: str) -> str:
    """Return a name that can be written: without halves of surrogate pairs, and not too long."""
    return text[:_NAME].encode("utf-8", "replace").decode()


_LARGEST_TIME = 1e16
_KINDS: Mapping[str, str] = {
    "user_annotation": "annotation",
    **dict.fromkeys(("kernel", "Kernel"), "kernel"),
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), "copy"),
    **dict.fromkeys(("cpu_op", "Operator"), "operator"),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "xpu_runtime"), "launch"),
}
"""What the categories of events are, of torch 1.8 to 2.13."""


def _take_event(trace: KinetoTrace, event: Mapping[str, Any]) -> None:
    category, name = event.get("cat"), event.get("name")
    kind = _KINDS.get(category) if isinstance(category, str) else None
    if kind is None or not isinstance(name, str) or (kind == "operator" and name not in _PRODUCTS):
        return
    start, length = number(event.get("ts")), number(event.get("dur"))
    if start is None or length is None or not (0 <= start < _LARGEST_TIME and 0 <= length < _LARGEST_TIME):
        return
    kept = (trace.work, trace.launches, trace.hooks, trace.steps, trace.products)
    if sum(map(len, kept)) >= _KEPT:
        raise ConfigError(
            f"{trace.file}: the trace contains more than {_KEPT:,} kernels, launches and annotations",
            help="record fewer steps: torch.profiler.schedule(wait=1, warmup=1, active=3)",
        )
    if kind == "annotation":
        if name.startswith("ProfilerStep#"):
            trace.steps.append(HostRange(start, start + length, _thread(event), _clean(name)))
        elif name.startswith("FSDP::"):
            trace.hooks.append(HostRange(start, start + length, _thread(event), _clean(name)))
        return
    arguments = event.get("args")
    known = arguments if isinstance(arguments, dict) else {}
    launch = count(known.get("correlation"))
    if kind == "kernel" and trace.device is None:
        trace.device = count(known.get("device"))
    if kind == "launch":
        if launch is not None:
            trace.launches[launch] = start, _thread(event)
        return
    if kind == "operator":
        if (flops := _flops(_PRODUCTS[name], known.get("Input Dims"))) is not None:
            half = str(known.get("Input type")).count("BFloat16") + str(known.get("Input type")).count("Half")
            trace.products.append(Product(start, start + length, _thread(event), flops, half >= 2))
        return
    if kind == "copy":
        size = count(known.get("bytes"))
        trace.work.append(GpuWork(start, start + length, kind, launch, bytes=size, within="DtoD" in name))
        return
    if "nccl" not in name.lower():
        trace.work.append(GpuWork(start, start + length, kind, launch))
        return
    size = count(known.get("Group size")) or None
    elements = [count(known.get(f"{side} msg nelems")) for side in ("In", "Out")]
    width = _DTYPES.get(str(known.get("dtype")))
    whole = max(elements) * width if None not in elements and width is not None else None  # type: ignore[type-var, operator]
    group = known.get("Process Group Name")
    trace.work.append(
        GpuWork(
            start,
            start + length,
            "collective",
            launch,
            _operation(name, known.get("Collective name")),
            _clean(group) if isinstance(group, str) else "",
            size,
            whole,
        )
    )


_PRODUCTS: Mapping[str, int] = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that launch the kernels of products, and the place of their first factor among the inputs."""


def _flops(first: int, sizes: object) -> float | None:
    """Return the FLOPs of a product, (batches of) m times k and k times n; None where sizes do not tell."""
    if not isinstance(sizes, list) or len(sizes) < first + 2:
        return None
    left, right = sizes[first], sizes[first + 1]
    for shape in (left, right):
        if not isinstance(shape, list) or len(shape) not in (2, 3) or any(not count(size) for size in shape):
            return None
    if len(left) != len(right) or left[-1] != right[-2]:
        return None
    flops = 2.0 * right[-1]
    for size in left:
        flops *= size
    return flops if flops < _LARGEST_TIME else None


def _thread(event: Mapping[str, Any]) -> str:
    return f"{event.get('pid')}/{event.get('tid')}"[:_NAME]


_OPERATIONS = (
    ("reducescatter", "reduce_scatter"), ("allgather", "all_gather"), ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"), ("broadcast", "broadcast"), ("sendrecv", "send_recv"), ("reduce", "reduce"),
    ("send", "send_recv"), ("recv", "send_recv"),
)  # fmt: skip
"""What names of NCCL's kernels and of c10d's collectives contain, and the operation."""


def _operation(kernel: str, collective: object) -> str:
    """Return the operation of a collective, by c10d's name of it or else by its kernel."""
    for name in (collective, kernel):
        plain = str(name).lower().replace("_", "")
        if found := next((operation for text, operation in _OPERATIONS if text in plain), None):
            return found
    return "other"
