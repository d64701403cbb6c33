"""Which entries of the queue may start: sets that overlap never run together, and their order is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdptool.records.queue import Needs, Wait


def conflict(needs: Needs, other: Needs, *, queued: bool) -> Wait | None:
    """Return why a run cannot start next to another one because of its folder or its GPUs, or None.

    Args:
        needs: What the run needs.
        other: What the other one occupies.
        queued: Whether the other one waits itself.
    """
    if needs.folder == other.folder:
        return Wait("folder", (), other.folder, queued)
    if shared := sorted(needs.gpus & other.gpus):
        return Wait("gpus", tuple(shared), other.folder, queued)
    return None


def find_waits(waiting: Sequence[Needs], occupied: Iterable[Needs], slots: int) -> tuple[Wait | None, ...]:
    """Return for every waiting run why it cannot start now, or None if it can.

    A run also waits for an earlier one that needs the same GPUs, folder or process slots and cannot start.
    Otherwise small runs would overtake a large one for ever. A run on the CPU that needs more slots than
    the machine has starts when no other one uses any.

    Args:
        waiting: The runs in the order in which they should start.
        occupied: What live runs occupy.
        slots: Process slots of the machine.
    """
    taken = list(occupied)
    blocked: list[Needs] = []
    waits: list[Wait | None] = []
    for needs in waiting:
        wait = _find_wait(needs, taken, blocked, slots)
        waits.append(wait)
        (taken if wait is None else blocked).append(needs)
    return tuple(waits)


def _find_wait(needs: Needs, taken: Sequence[Needs], blocked: Sequence[Needs], slots: int) -> Wait | None:
    for others, queued in ((taken, False), (blocked, True)):
        for other in others:
            if wait := conflict(needs, other, queued=queued):
                return wait
    if not needs.slots:
        return None
    users = [other for other in taken if other.slots]
    if users and sum(other.slots for other in users) + needs.slots > slots:
        return Wait("slots", (), users[0].folder, False)
    if earlier := next((other for other in blocked if other.slots), None):
        return Wait("slots", (), earlier.folder, True)
    return None
