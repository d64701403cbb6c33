"""How far a rank's own memory grows while it assembles a run."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fsdptool.distributed.session import Session
from fsdptool.runs.folder import RunInputs
from fsdptool.training.trainer import assemble


def anonymous_bytes() -> int:
    """Return the memory only this process has; pages of a mapped file are the kernel's to drop."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


_M_MMAP_THRESHOLD = -3
"""The C library's name for the size from which an allocation has pages of its own (glibc, malloc.h)."""


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Make the C library return freed memory to the kernel at once.

    By default glibc keeps freed blocks in its heap, up to 32 MiB each once it has freed one of that size,
    and how many of them it reuses differs from run to run: the same load grew a process by 30 to 63 MiB.
    """
    library = ctypes.CDLL(None)
    set_option = getattr(library, "mallopt", None)
    if set_option is None:
        yield
        return
    library.malloc_trim(0)
    set_option(_M_MMAP_THRESHOLD, 2**16)
    try:
        yield
    finally:
        set_option(_M_MMAP_THRESHOLD, 2**25)


def growth(inputs: RunInputs, session: Session) -> dict[str, int]:
    """Assemble a run; return how far this process's own memory grew at most, and its shards' bytes."""
    with freed_at_once():
        return _growth(inputs, session)


def _growth(inputs: RunInputs, session: Session) -> dict[str, int]:
    before = anonymous_bytes()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    assembled = assemble(inputs, session)
    done.set()
    thread.join()
    return {"grown": peak[0] - before, "shards": assembled.proof["local_bytes"][session.rank]}
