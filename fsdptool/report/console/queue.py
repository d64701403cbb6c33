"""The queue of runs on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptool.formatting import elapsed, printable
from fsdptool.records.queue import QueueEntry, QueueReport
from fsdptool.report.console.tables import print_line, print_table


def print_queue(report: QueueReport, *, now: float) -> None:
    """Print the queue as ``fsdptool queue list --format json`` prints it.

    Args:
        report: A :class:`~fsdptool.records.queue.QueueReport` as a report.
        now: Seconds since 1970.
    """
    entries = report.entries
    if not entries:
        print_line("the queue is empty")
    else:
        print_table(
            ("entry", "state", "needs", "since", "run", "note"),
            [
                (
                    str(entry.id),
                    entry.state,
                    needs_text(entry),
                    elapsed(max(now - (entry.ended or entry.started or entry.added), 0.0)),
                    printable(entry.folder),
                    printable(note_text(entry)),
                )
                for entry in entries
            ],
            numeric=(0,),
            optional=(5,),
        )
    if report.scheduler is None and any(entry.state == "waiting" for entry in entries):
        print_line("no program is running the queue; start one: `fsdptool queue run` or `fsdptool ui`")


def needs_text(entry: QueueEntry) -> str:
    """Return what an entry needs: ``GPUs 0,1`` or ``2 slots``."""
    if entry.gpus:
        return printable(_gpus(entry.gpus))
    return f"{entry.slots} slot{'s' if entry.slots != 1 else ''}"


def _gpus(names: Sequence[str]) -> str:
    return f"GPU{'s' if len(names) > 1 else ''} {','.join(names)}"


def note_text(entry: QueueEntry) -> str:
    """Return why an entry waits, or what went wrong; empty if there is nothing to say."""
    wait = entry.wait
    if wait is None:
        return entry.message or ""
    what = {
        "gpus": f"{_gpus(wait.gpus)} {'is' if len(wait.gpus) == 1 else 'are'} in use",
        "slots": "the process slots are in use",
        "folder": "the run folder is in use",
    }[wait.reason]
    if wait.queued:
        return f"starts after {wait.holder}"
    return f"{what}: {wait.holder}"
