"""Whole runs whose ranks get a real stop signal inside a phase that is made to be the one they are in."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import recipe_runs

from fsdptool.runs.signals import SIGNALS, SignalFlag
from fsdptool.training import evaluate, trainer
from fsdptool.training.checkpoint import checkpointer
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.sampling import Sampler

Reached = Callable[[], None]

PHASES: dict[str, tuple[Any, str]] = {
    "loading": (trainer, "materialize"),
    "proving": (trainer, "prove"),
    "restoring": (checkpointer, "load_into"),
    "evaluating": (evaluate, "add_validation_loss"),
    "sampling": (Sampler, "_one"),
    "saving": (RunCheckpointer, "_write"),
}
"""What runs in each phase; all but the save of an asynchronous checkpoint in the main thread."""


def stopped_in(folder: str, phase: str, rank: int, number: int) -> dict[str, Any]:
    """Work until ``rank`` gets the signal in ``phase``; returns the closing event."""
    flag = SignalFlag()
    flag.install()
    sent = threading.Event()

    def reached() -> None:
        if not sent.is_set():
            sent.set()
            os.kill(os.getpid(), number)
            while not flag.requested:
                time.sleep(0.001)

    try:
        if int(os.environ["RANK"]) != rank:
            return recipe_runs.work_in(folder, flag=flag)
        with wrapped(*PHASES[phase], reached), held_until_awaited(sent, hold=phase == "saving"):
            return recipe_runs.work_in(folder, flag=flag) | {"sent": sent.is_set()}
    finally:
        signal.set_wakeup_fd(-1)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def wrapped(owner: Any, name: str, before: Reached) -> Iterator[None]:
    """Call ``before`` ahead of each call of a function."""
    plain = getattr(owner, name)

    def then(*arguments: Any, **options: Any) -> Any:
        before()
        return plain(*arguments, **options)

    setattr(owner, name, then)
    try:
        yield
    finally:
        setattr(owner, name, plain)


@contextmanager
def held_until_awaited(sent: threading.Event, *, hold: bool) -> Iterator[None]:
    """Keep the save that met the signal in flight until the main thread waits for it."""
    if not hold:
        yield
        return
    awaited = threading.Event()

    def landing() -> None:
        if sent.is_set():
            awaited.set()

    def writing() -> None:
        if threading.current_thread() is not threading.main_thread():
            assert awaited.wait(60.0)

    with wrapped(RunCheckpointer, "_land", landing), wrapped(RunCheckpointer, "_prepare", writing):
        yield
