"""What is known of a process that ended: from its own last event, or from the operating system."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a start of the run ended.

    Attributes:
        rank: Who, or None if no rank had announced itself.
        message: One line.
        help: What to do next.
        exit_code: Exit status the run should end with.
        retryable: Whether another start could help.
        fields: The failing rank's ``failure`` event, or empty.
    """

    rank: int | None
    message: str
    help: str | None = None
    exit_code: int = 4
    retryable: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


def told(event: Mapping[str, Any]) -> Failure:
    """Return what a rank said of its own end."""
    return Failure(
        rank=event["rank"],
        message=f"rank {event['rank']}: {event['message']}",
        help=event.get("help"),
        exit_code=int(event.get("exit_code", 4)),
        retryable=bool(event.get("retryable", True)),
        fields=event,
    )


def running(pid: int) -> bool:
    """Say whether a process runs; one that has ended but was not collected yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in ("Z", "X")


def signal_name(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
