"""What a recording of torch's allocator says: the memory of one GPU over time, and where it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdptool.records.annotations import Count, Positive

Reason = Literal["fits", "too_small", "other_stream", "private_pool", "other_pool"]
Part = Literal["before", "block", "after"]
Change = Literal["expandable_segments", "fused_loss", "checkpointing", "shard_optimizer", "free_gradients"]


@dataclass(frozen=True, slots=True)
class MeasuredComponent:
    """Live bytes of one kind.

    Attributes:
        name: A component of plans as far as stacks tell it; ``not attributed`` for stacks that name none, and
            ``before the recording`` for blocks without a stack.
        bytes: Of its blocks.
        blocks: How many there are.
        planned_bytes: What the plan expects at its peak; null without a plan.
    """

    name: str
    bytes: Count
    blocks: Count
    planned_bytes: Count | None = None


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Live activations of one call of a block, or of a line of the model outside of the blocks.

    Which call it is follows from the order of the recorded lines.

    Attributes:
        part: Whether the model made them before its blocks, in one of them, or after them.
        call: Which call of one forward pass, from 0; null outside of the blocks.
        file, line, function: The line that calls the blocks, or the model's own line outside of them.
        bytes: Of the live activations.
        blocks: How many blocks of memory they are.
    """

    part: Part
    call: Count | None
    file: str
    line: Count
    function: str
    bytes: Count
    blocks: Count


@dataclass(frozen=True, slots=True)
class AllocatingLine:
    """A line of Python that made live blocks: the innermost one outside of torch.

    Attributes:
        file, line, function: The place, as the recording names it.
        bytes: Of the live blocks that it made.
        blocks: How many there are.
    """

    file: str
    line: Count
    function: str
    bytes: Count
    blocks: Count


@dataclass(frozen=True, slots=True)
class AllocatingStack:
    """The lines outside of torch that led to live blocks, the outermost first."""

    lines: tuple[str, ...]
    bytes: Count


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """The largest moment of a stretch of the recording.

    Attributes:
        entry: Its place among the entries.
        seconds: Since the first entry; null where entries carry no time.
        allocated_bytes: Blocks in use, also those that a stream still has to finish with.
        reserved_bytes: Segments.
        components: Bytes of each of the recording's components, in their order.
    """

    entry: Count
    seconds: float | None
    allocated_bytes: Count
    reserved_bytes: Count
    components: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class InactiveMemory:
    """Reserved bytes at the end that hold nothing, of one stream and pool.

    Attributes:
        stream: The stream whose requests can use them.
        pool: ``small`` for requests of up to 1 MiB, else ``large``.
        private: Whether they belong to a CUDA graph or another private pool.
        bytes, pieces, largest_bytes: Of all free blocks.
        whole_segment_bytes: Of segments without a live block, which torch gives back before it fails.
        reason: Why the request that failed was not served from them; null where none failed.
    """

    stream: int
    pool: Literal["small", "large"]
    private: bool
    bytes: Count
    pieces: Positive
    largest_bytes: Count
    whole_segment_bytes: Count
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The last request that the GPU could not serve.

    Attributes:
        bytes: Asked for.
        device_free_bytes: What the driver had left.
        stream: The stream it was made on.
        line: The line of Python outside of torch that asked; null without a stack.
    """

    bytes: Count
    device_free_bytes: Count
    stream: int
    line: str | None


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """A change that frees memory at the moment that is described.

    Attributes:
        change: Its name.
        bytes: The most that it frees.
        enough: Whether the request that failed would have been served; null where none failed.
    """

    change: Change
    bytes: Count
    enough: bool | None


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """What `fsdptool diagnose --format json` prints of a memory snapshot.

    Attributes:
        file: The snapshot.
        device: The GPU that is described: the one with the most reserved memory.
        other_devices: Further GPUs that the snapshot knows.
        entries: Entries of the recording; 0 for a snapshot without history.
        ignored: Entries and blocks that make no sense, which were left out.
        contradictions: Entries that do not fit the state that the end and the later entries imply.
        seconds: From the first to the last entry; null where entries carry no time.
        expandable_segments: Whether any segment is expandable.
        allocated_peak_bytes, reserved_peak_bytes: Largest values during the recording.
        allocated_bytes, reserved_bytes: Values at its end.
        moment: What components, lines and stacks describe: the failure, or the allocated peak without one.
        moment_bytes: Allocated then.
        planned_peak_bytes: Allocated peak of the plan; null without a plan.
        components: Live bytes then, the largest first.
        activations: Those of the component ``activations``, by the block that made them; at most 1000, none
            where no line calls blocks.
        lines, stacks: Where they were allocated, the largest first; at most 100 and 300.
        timeline: At most 600 points.
        inactive: Free blocks at the end.
        failed: The request that failed; null where none did.
        changes: What would free memory, the most effective first.
    """

    file: str
    device: Count
    other_devices: tuple[Count, ...]
    entries: Count
    ignored: Count
    contradictions: Count
    seconds: float | None
    expandable_segments: bool
    allocated_peak_bytes: Count
    reserved_peak_bytes: Count
    allocated_bytes: Count
    reserved_bytes: Count
    moment: Literal["peak", "failure"]
    moment_bytes: Count
    planned_peak_bytes: Count | None
    components: tuple[MeasuredComponent, ...]
    activations: tuple[BlockActivations, ...]
    lines: tuple[AllocatingLine, ...]
    stacks: tuple[AllocatingStack, ...]
    timeline: tuple[MemoryPoint, ...]
    inactive: tuple[InactiveMemory, ...]
    failed: FailedRequest | None
    changes: tuple[MemoryChange, ...]
