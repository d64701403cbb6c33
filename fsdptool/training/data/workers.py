"""Loading processes of one rank.

Worker ``w`` of ``n`` makes the micro-batches ``w``, ``w + n``, ``w + 2n``, ... and writes each to its
own pipe; the trainer reads the pipes in turn. So the order is the same with any number of workers,
nothing has to be asked for, and a full pipe holds a worker back.

torch's DataLoader is not used: when one of its workers dies, torch 2.13 raises from a signal handler,
anywhere in the trainer's code, or from the passing of a file descriptor, as a dozen kinds of error
(torch/utils/data/_utils/signal_handling.py, torch/multiprocessing/reductions.py). Here a death is an
end of file where the next batch is read.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdptool import errors
from fsdptool.errors import FsdptoolError, WorkerError

if TYPE_CHECKING:
    from torch import Tensor

Make = Callable[[int], Mapping[str, Any]]
"""Returns the micro-batch of a number counted from the loading's start. Picklable."""

_ALIGNMENT = 16
_PATIENCE = 2.0


class Workers:
    """An endless iterator over micro-batches made by processes.

    Args:
        make: Makes the micro-batch of a number.
        count: Number of processes.
        start_method: How they start. A fork of a process that runs collectives and a checkpoint
            thread may inherit a lock that nobody frees, so the default asks a fork server.
    """

    def __init__(self, make: Make, count: int, *, start_method: str = "forkserver") -> None:
        context: Any = get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(["fsdptool.training.data.build"])
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._next = 0
        # What interrupts a wait: to close a pipe that another thread reads would hand its number to a file.
        self._wake, self._waker = context.Pipe(duplex=False)
        for number in range(count):
            mine, theirs = context.Pipe(duplex=False)
            inherited = [*self._pipes, mine] if start_method == "fork" else []
            process = context.Process(
                target=_work,
                args=(make, number, count, theirs, inherited),
                name=f"data-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        # At exit multiprocessing sends daemons SIGTERM, which ours ignore, and waits: end them before.
        self._end = Finalize(self, _end, args=(self._pipes, self._processes), exitpriority=100)

    @property
    def processes(self) -> tuple[BaseProcess, ...]:
        """The loading processes."""
        return tuple(self._processes)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        """Return the next micro-batch.

        Raises:
            StopIteration: The wait was interrupted.
            WorkerError: The process that makes it is dead.
            FsdptoolError: It cannot be made; as in the loading process.
        """
        number = self._next % len(self._pipes)
        try:
            if self._pipes[number] not in wait([self._pipes[number], self._wake]):
                raise StopIteration
            message = self._pipes[number].recv_bytes()
        except (EOFError, OSError) as error:
            process = self._processes[number]
            process.join(_PATIENCE)
            raise WorkerError(
                f"data loading process {number} (pid {process.pid}) {_end_of(process.exitcode)}",
                help="if it was killed for memory, lower data.workers",
            ) from error
        self._next += 1
        return _unpack(message)

    def interrupt(self) -> None:
        """End the wait of another thread, and every later one."""
        self._waker.close()

    def close(self) -> None:
        """End the processes; nobody may read any more."""
        self.interrupt()
        self._end()


def _end(pipes: list[Connection], processes: list[BaseProcess]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(_PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()


def _end_of(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _work(make: Make, number: int, count: int, pipe: Connection, inherited: list[Connection]) -> None:
    """Make micro-batches until the trainer closes its end of the pipe, or dies."""
    for other in inherited:
        other.close()
    # A stop is sent to the whole process group; the data must outlive the trainer's last step.
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(sent, signal.SIG_IGN)
    _use_one_thread()
    turn = number
    try:
        while True:
            try:
                message = _pack(make(turn))
            except FsdptoolError as error:
                message = _pack_error(error)
            pipe.send_bytes(message)
            turn += count
    except BrokenPipeError:
        # Nobody reads any more. Leave without the interpreter's own flush of inherited streams.
        os._exit(0)


def _use_one_thread() -> None:
    """Loading processes share the cores with the trainer; torch is only told if it is there already."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _pack(batch: Mapping[str, Any]) -> bytearray:
    entries: list[Any] = []
    parts: list[memoryview] = []
    offset = 0
    for name, array in batch.items():
        kind = str(array.dtype).removeprefix("torch.")
        data = _bytes_of(array)
        entries.append((name, kind, tuple(array.shape), offset, len(data)))
        parts.append(data)
        offset += -(-len(data) // _ALIGNMENT) * _ALIGNMENT
    return _framed({"tensors": entries}, parts, offset)


def _bytes_of(array: Any) -> memoryview:
    if not isinstance(array, np.ndarray):
        # numpy has no bfloat16: the bytes are taken as they are.
        array = array.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _pack_error(error: FsdptoolError) -> bytearray:
    return _framed({"error": [type(error).__name__, error.message, error.help]}, [], 0)


def _framed(header: Mapping[str, Any], parts: list[memoryview], size: int) -> bytearray:
    head = json.dumps(header).encode()
    head += b" " * (-(len(head) + 8) % _ALIGNMENT)
    message = bytearray(8 + len(head) + size)
    message[:8] = struct.pack("<q", len(head))
    message[8 : 8 + len(head)] = head
    at = 8 + len(head)
    for part in parts:
        message[at : at + len(part)] = part
        at += -(-len(part) // _ALIGNMENT) * _ALIGNMENT
    return message


def _unpack(received: bytes) -> dict[str, Tensor]:
    import torch

    message = bytearray(received)
    (size,) = struct.unpack_from("<q", message)
    header = json.loads(bytes(message[8 : 8 + size]))
    if "error" in header:
        kind, text, advice = header["error"]
        raise getattr(errors, kind, FsdptoolError)(text, help=advice)
    tensors: dict[str, Tensor] = {}
    for name, kind, shape, offset, length in header["tensors"]:
        dtype = getattr(torch, kind)
        if length == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        flat = torch.frombuffer(
            message, dtype=dtype, count=length // dtype.itemsize, offset=8 + size + offset
        )
        tensors[name] = flat.reshape(shape)
    return tensors
