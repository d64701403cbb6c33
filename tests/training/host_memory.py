"""How far a rank's own memory grows while it assembles a run."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

from fsdptool.distributed.session import Session
from fsdptool.runs.folder import RunInputs
from fsdptool.training.trainer import assemble


def anonymous_bytes() -> int:
    """Return the memory only this process has; pages of a mapped file are the kernel's to drop."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def growth(inputs: RunInputs, session: Session) -> dict[str, int]:
    """Assemble a run; return how far this process's own memory grew at most, and its shards' bytes."""
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
