"""What a memory snapshot says, in terminals and pipes. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from fsdptool.formatting import amount, count, shortened
from fsdptool.records.snapshot import BlockActivations, InactiveMemory, MeasuredComponent, MemorySnapshot
from fsdptool.report.console.tables import print_line, print_table

_SHOWN = 10

_CHANGES = {
    "expandable_segments": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: pieces become usable again",
    "fused_loss": "compute the loss in chunks, or by a fused kernel",
    "checkpointing": "checkpoint activations, or take a smaller micro-batch",
    "shard_optimizer": "shard the optimizer's state over more ranks, keep it in 8 bits, or offload it",
    "free_gradients": "zero_grad(set_to_none=True) before the peak, or shard over more ranks",
}
_REASONS = {
    "fits": "would have served the request",
    "too_small": "every piece is smaller than the request",
    "other_stream": "belongs to another stream",
    "private_pool": "belongs to a private pool, such as a CUDA graph's",
    "other_pool": "belongs to the pool of other sizes",
    None: "",
}


def print_snapshot(snapshot: MemorySnapshot) -> None:
    """Print the figures, the components and lines of the moment, and what was free and unused."""
    for line in snapshot_lines(snapshot):
        print_line(line)
    total = max(snapshot.moment_bytes, 1)
    planned = snapshot.planned_peak_bytes is not None
    print_line("")
    heads = (moment_title(snapshot), "bytes", "share", "blocks", *(["planned"] if planned else []))
    print_table(
        heads,
        [
            (
                item.name,
                amount(item.bytes),
                f"{100 * item.bytes / total:.0f} %",
                count(item.blocks),
                *([amount(item.planned_bytes) if item.planned_bytes is not None else ""] if planned else []),
            )
            for item in shown_components(snapshot)
        ],
        numeric=range(1, len(heads)),
    )
    if snapshot.activations:
        print_line("")
        print_table(
            ("activations", "bytes", "blocks", "called by"),
            [(*row[:3], shortened(row[3], 60)) for row in activation_rows(snapshot)],
            numeric=(1, 2),
        )
    if snapshot.lines:
        print_line("")
        print_table(
            ("allocated by", "function", "bytes", "blocks"),
            [
                (shortened(f"{item.file}:{item.line}", 60), shortened(item.function, 30), amount(item.bytes),
                 count(item.blocks))
                for item in snapshot.lines[:_SHOWN]
            ],
            numeric=(2, 3),
        )  # fmt: skip
    if snapshot.inactive:
        print_line("")
        print_table(
            ("free but reserved", "bytes", "pieces", "largest", "why not used"),
            [
                (pool_name(item), amount(item.bytes), count(item.pieces), amount(item.largest_bytes),
                 reason_text(item))
                for item in snapshot.inactive[:_SHOWN]
            ],
            numeric=(1, 2, 3),
        )  # fmt: skip
    changes = list(change_lines(snapshot))
    if changes:
        print_line("")
    for line in changes:
        print_line(line)


def shown_components(snapshot: MemorySnapshot) -> list[MeasuredComponent]:
    """Return the components that hold anything at the moment, or should."""
    return [item for item in snapshot.components if item.bytes or item.planned_bytes]


def activation_rows(snapshot: MemorySnapshot) -> Iterator[tuple[str, str, str, str]]:
    """Yield what, bytes, blocks of memory and line of each group; calls that hold the same share a row."""

    def alike(item: BlockActivations) -> tuple[object, ...]:
        alone = item.call if item.part != "block" else None
        return item.part, item.file, item.line, item.bytes, item.blocks, alone

    for _, group in groupby(snapshot.activations, alike):
        items = list(group)
        first, last = items[0], items[-1]
        each = " each" if len(items) > 1 else ""
        name = _PARTS.get(first.part) or f"call {first.call}"
        name += f" to {last.call}" if each and first.part == "block" else ""
        yield (
            name,
            amount(first.bytes) + each,
            count(first.blocks) + each,
            f"{first.file}:{first.line} {first.function}",
        )


_PARTS = {"before": "before the blocks", "after": "after the blocks"}


def moment_title(snapshot: MemorySnapshot) -> str:
    """Return what the tables describe."""
    if snapshot.moment == "failure":
        return "at the failure"
    return "at the allocated peak" if snapshot.entries else "in use"


def snapshot_lines(snapshot: MemorySnapshot) -> Iterator[str]:
    """Yield the figures as sentences."""
    over = snapshot.reserved_peak_bytes / max(snapshot.allocated_peak_bytes, 1)
    failed = snapshot.failed
    if failed is not None:
        at = f" at {failed.line}" if failed.line is not None else ""
        yield (
            f"a request of {amount(failed.bytes)} failed{at}: the GPU had {amount(failed.device_free_bytes)}"
            f" left, and {amount(snapshot.moment_bytes)} were allocated"
        )
    if snapshot.entries:
        yield (
            f"GPU {snapshot.device}: allocated peak {amount(snapshot.allocated_peak_bytes)}, reserved peak"
            f" {amount(snapshot.reserved_peak_bytes)} ({over:.2f} times), {count(snapshot.entries)} entries"
        )
    else:
        yield (
            f"GPU {snapshot.device}: {amount(snapshot.allocated_bytes)} allocated,"
            f" {amount(snapshot.reserved_bytes)} reserved; the snapshot has no history, so it does not say"
            " how it came to this (torch.cuda.memory._record_memory_history)"
        )
    if snapshot.other_devices:
        names = ", ".join(map(str, snapshot.other_devices))
        yield f"the snapshot also has GPU {names}, with less reserved memory"
    if snapshot.ignored:
        yield f"warning: {count(snapshot.ignored)} entries or blocks make no sense and were left out"
    if snapshot.contradictions:
        yield f"warning: {count(snapshot.contradictions)} entries or blocks contradict the others"
    if snapshot.planned_peak_bytes is not None:
        more = snapshot.moment_bytes - snapshot.planned_peak_bytes
        side = "more" if more >= 0 else "less"
        planned = amount(snapshot.planned_peak_bytes)
        yield f"{amount(abs(more))} {side} than the plan's allocated peak of {planned}"
        unplanned = [item for item in shown_components(snapshot) if item.planned_bytes == 0]
        if unplanned:
            named = ", ".join(f"{item.name} ({amount(item.bytes)})" for item in unplanned[:4])
            yield f"the plan did not expect {named}"


def change_lines(snapshot: MemorySnapshot) -> Iterator[str]:
    """Yield what would free memory, as sentences."""
    for change in snapshot.changes:
        enough = {True: ", enough for the request", False: ", not enough alone", None: ""}[change.enough]
        yield f"frees up to {amount(change.bytes)}{enough}: {_CHANGES[change.change]}"


def reason_text(item: InactiveMemory) -> str:
    """Return why free memory was not used."""
    return _REASONS[item.reason]


def pool_name(item: InactiveMemory) -> str:
    """Return a stream and pool in words."""
    private = "private " if item.private else ""
    return f"stream {item.stream}, {private}{item.pool} blocks"
