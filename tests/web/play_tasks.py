"""The child process of the web interface with tasks of its own: quick, endless, failing, dying.

With a path as its argument, it is ready when that file exists.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.web import worker


def play(progress: Callable[[str], None], *, act: str, **arguments: Any) -> Any:
    """Do what is asked; ``wait`` ends only when it is cancelled, ``deaf`` not even then."""
    progress(f"{act} begins")
    print("a library prints this")
    if act == "wait":
        # Not signal.pause(): a signal just before it would be handled only after another one.
        for _ in range(50_000):
            time.sleep(0.02)
    if act == "lose":
        with suppress(KeyboardInterrupt):
            time.sleep(1000)
        time.sleep(1000)
    if act == "import":
        sys.path.insert(0, arguments["folder"])
        return {"pid": os.getpid(), "value": importlib.import_module("imported_once").VALUE}
    if act == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        time.sleep(1000)
    if act == "fail":
        raise PlanError("no such GPU", help="choose another")
    if act == "crash":
        raise RuntimeError("unexpected\nlines")
    if act == "die":
        os._exit(9)
    return {"pid": os.getpid(), "torch": "torch" in sys.modules, **arguments}


def load() -> None:
    """Wait for the file of the command line."""
    while len(sys.argv) > 1 and not Path(sys.argv[1]).exists():
        time.sleep(0.02)


if __name__ == "__main__":
    worker.load_task = lambda name: play
    worker.main(load)
