"""Measures a rank's memory over a step, and says with which instrument."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROFILED_STEPS = 3
"""Steps of a start that the CPU meter profiles. Optimizer states are made in the first one, so the
second is the first whole one (DESIGN decision 5); the third shows whether it repeats."""


_SETTLE_SECONDS = 0.003
"""Far longer than a gloo thread needs after its work is done, on a busy machine, too."""


class CudaMeter:
    """The caching allocator's own counters: exact, free, reset at every step."""

    instrument = "torch.cuda.max_memory_allocated and max_memory_reserved, reset every step"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[int | None, int | None] = (None, None)
        self._peaks: tuple[int | None, int | None] = (None, None)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure one step."""
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        allocated = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        self._last = (allocated, reserved)
        self._peaks = (max(allocated, self._peaks[0] or 0), max(reserved, self._peaks[1] or 0))

    def last(self) -> tuple[int | None, int | None]:
        """Return allocated and reserved peak bytes of the last step."""
        return self._last

    def peaks(self) -> tuple[int | None, int | None]:
        """Return allocated and reserved peak bytes over all steps."""
        return self._peaks


class CpuMeter:
    """torch's CPU allocator events over a step, on top of the tensors that were alive before it.

    The profiler reports every allocation and release of the CPU allocator (torch 2.13,
    c10/core/CPUAllocator.cpp), gloo's staging tensors included; what existed before it started is
    counted from the live storages. Profiling costs time, so the first steps of a start are measured.
    Collectives are let settle, or releases by gloo's threads would be missed and add up.
    """

    instrument = "torch.profiler CPU allocator events on top of live storages, first steps of the start"

    def __init__(self) -> None:
        self._measured = 0
        self._last: int | None = None
        self._peak: int | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure one of the first steps; later ones run untouched."""
        self._last = None
        if self._measured >= PROFILED_STEPS:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        before = live_bytes()
        with (
            settled_collectives(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            yield
        self._measured += 1
        self._last = before + highest(profiler)
        self._peak = max(self._last, self._peak or 0)

    def last(self) -> tuple[int | None, int | None]:
        """Return the allocated peak bytes of the last step if it was measured; nothing is reserved."""
        return self._last, None

    def peaks(self) -> tuple[int | None, int | None]:
        """Return the allocated peak bytes over the measured steps."""
        return self._peak, None


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Give gloo's threads time to let go of a collective's tensors before its waiter goes on.

    The profiler sees the releases of threads that carry its state only. A gloo thread that drops
    the last reference after its work is done does not (torch 2.13, ``ProcessGroupGloo::runLoop``),
    so every such race would count a buffer as alive to the end.
    """
    from torch.distributed import Work

    original = Work.wait

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        time.sleep(_SETTLE_SECONDS)
        return result

    Work.wait = wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Work.wait = original  # type: ignore[method-assign]


def live_bytes() -> int:
    """Return the bytes of all CPU storages that live tensors hold, each storage once."""
    import torch

    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        # Not isinstance: lazy modules answer to it by importing themselves.
        if not issubclass(type(item), torch.Tensor):
            continue
        for tensor in _plain(item):
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    try:
        gradient = inner.grad if inner.is_leaf else None
    except RuntimeError:
        # A view made without autograd whose base changed since (torch 2.13 refuses to say what it
        # is): not a parameter, so it has no gradient.
        gradient = None
    return [inner] if gradient is None or isinstance(gradient, DTensor) else [inner, gradient]


def highest(profiler: Any) -> int:
    """Return the highest running sum of the allocation events of a finished profile, in bytes."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    current = top = 0
    for event in events:
        current += event.nbytes()
        top = max(top, current)
    return top
