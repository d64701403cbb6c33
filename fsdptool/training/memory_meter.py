"""Measures a rank's memory over a step, and says with which instrument."""

from __future__ import annotations

import bisect
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fsdptool.records.run import STEP_PHASES, RunPhase

if TYPE_CHECKING:
    import torch

PROFILED_STEPS = 3
"""Steps of a start that the CPU meter profiles. Optimizer states are made in the first one, so the
second is the first whole one; the third shows whether it repeats."""

_SPAN = "fsdptool moment: "
"""Begins the names of the spans a profile is cut by."""

_PREPARED_WITHIN = 1.0
"""Seconds a profile's preparation may take: half of what kineto allows."""

_SETTLE_SECONDS = 0.01
"""Far longer than a thread of the CPU backend needs after its work is done, on a busy machine, too."""


class CudaMeter:
    """The caching allocator's own counters: exact, free, reset at every moment."""

    instrument = "torch.cuda.max_memory_allocated and max_memory_reserved of every step"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen = (0, 0)
        self._last: tuple[int | None, int | None] = (None, None)
        self._peaks: tuple[int | None, int | None] = (None, None)
        self._moments: dict[str, int] = {}

    def _read(self) -> int:
        """Return the allocated peak since the last reading, and reset it."""
        import torch

        # One look at the allocator: torch.cuda.max_memory_* sorts all of its counters, 0.2 ms each time.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = (
            int(stats[f"{kind}_bytes"]["all"]["peak"]) if stats else 0 for kind in ("allocated", "reserved")
        )
        torch.cuda.reset_peak_memory_stats(self._device)
        self._seen = (max(allocated, self._seen[0]), max(reserved, self._seen[1]))
        self._peaks = (max(allocated, self._peaks[0] or 0), max(reserved, self._peaks[1] or 0))
        return allocated

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure one step."""
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)
        self._seen = (0, 0)
        yield
        self._read()
        self._last = self._seen
        if step == 1:
            self._moments[RunPhase.FIRST_STEP] = self._seen[0]

    @contextmanager
    def moment(self, name: RunPhase) -> Iterator[None]:
        """Measure a part of a step, or what happens between steps."""
        self._read()
        yield
        self._moments[name] = max(self._read(), self._moments.get(name, 0))

    def last(self) -> tuple[int | None, int | None]:
        """Return allocated and reserved peak bytes of the last step."""
        return self._last

    def peaks(self) -> tuple[int | None, int | None]:
        """Return allocated and reserved peak bytes over all steps and moments."""
        return self._peaks

    def moments(self) -> dict[str, int]:
        """Return the allocated peak bytes of every moment seen, by name."""
        return dict(self._moments)


class CpuMeter:
    """torch's CPU allocator events over a step, on top of the tensors that were alive before it.

    The profiler reports every allocation and release of the CPU allocator (torch 2.13,
    c10/core/CPUAllocator.cpp), the CPU backend's staging tensors included; what existed before it started is
    counted from the live storages. Profiling costs time, so the first steps of a start are measured,
    the one after the first save, and every other moment once before and once after it: the copies a
    save makes stay.
    Collectives are let settle, or releases by the backend's threads would be missed and add up.
    """

    instrument = "torch.profiler, CPU allocator events of the first steps and around the first save"

    def __init__(self) -> None:
        self._left = PROFILED_STEPS
        self._profiling = False
        self._last: int | None = None
        self._peak: int | None = None
        self._moments: dict[str, int] = {}
        self._done = set(STEP_PHASES)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure one of the first steps; later ones run untouched."""
        self._last = None
        if self._left <= 0:
            yield
            return
        self._left -= 1
        with self._profiled("step"):
            yield
        self._last = self._moments.pop("step")
        if step == 1:  # of the run: a start from a checkpoint has its optimizer states
            self._moments[RunPhase.FIRST_STEP] = self._last

    @contextmanager
    def moment(self, name: RunPhase) -> Iterator[None]:
        """Measure a part of a step that is measured; between steps, a moment that was not seen yet."""
        from torch.profiler import record_function

        if self._profiling:
            with record_function(f"{_SPAN}{name}"):
                yield
        elif name in self._done:
            yield
        else:
            with self._profiled(name):
                yield
            self._done.add(name)
            if name == RunPhase.SAVE:
                self._left = max(self._left, 1)
                self._done = {*STEP_PHASES, RunPhase.SAVE}

    @contextmanager
    def _profiled(self, name: str) -> Iterator[None]:
        from torch.profiler import record_function

        before = live_bytes()
        self._profiling = True
        try:
            with (
                settled_collectives(),
                allocator_events() as profiler,
                record_function(f"{_SPAN}{name}"),
            ):
                yield
        finally:
            self._profiling = False
        for span, top in highest(profiler).items():
            self._moments[span] = max(before + top, self._moments.get(span, 0))
            self._peak = max(before + top, self._peak or 0)

    def last(self) -> tuple[int | None, int | None]:
        """Return the allocated peak bytes of the last step if it was measured; nothing is reserved."""
        return self._last, None

    def peaks(self) -> tuple[int | None, int | None]:
        """Return the allocated peak bytes over everything measured."""
        return self._peak, None

    def moments(self) -> dict[str, int]:
        """Return the allocated peak bytes of every moment seen, by name."""
        return dict(self._moments)


@contextmanager
def allocator_events() -> Iterator[Any]:
    """Profile what the CPU allocator does.

    kineto refuses a profile, with a line in the log alone, whose preparation takes two seconds of the
    system's clock, and to stop a refused one is a segmentation fault (torch 2.13). A process that waits
    that long for a core, or whose clock is set meanwhile, prepares again: the new one replaces the old. torch
    2.11 refuses to prepare again and profiles after a slow preparation, too.
    """
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    prepared = False
    while True:
        begun = time.time()
        try:
            profiler.prepare_trace()
        except RuntimeError:
            if not prepared:
                raise
            break
        prepared = True
        if 0 <= time.time() - begun < _PREPARED_WITHIN:
            break
    profiler.start_trace()
    try:
        yield profiler
    finally:
        profiler.stop_trace()


Meter = CpuMeter | CudaMeter
"""Measures the memory of one rank; its ``instrument`` says how."""


def open_meter(device: torch.device) -> Meter:
    """Return the meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Give the CPU backend's threads time to let go of a collective's tensors before its waiter goes on.

    The profiler sees the releases of threads that carry its state only. A backend thread that drops
    the last reference after its work is done does not (torch 2.13, ``ProcessGroupGloo::runLoop``),
    so every such race would count a buffer as alive to the end.
    """
    from torch.distributed import Work
    from torch.distributed import _functional_collectives as functional

    def settled(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            time.sleep(_SETTLE_SECONDS)
            return result

        return wait

    # DTensors (a full checkpoint's) wait through the second.
    places: tuple[tuple[Any, str], ...] = ((Work, "wait"), (functional, "wait_tensor"))
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, settled(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def live_bytes() -> int:
    """Return the bytes of all CPU storages that live tensors hold, each storage once."""
    import torch

    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        # Not isinstance: lazy modules answer to it by importing themselves.
        if not issubclass(type(item), torch.Tensor):
            continue
        for tensor in _plain(item):
            storage = tensor.untyped_storage()
            # A fake tensor says "cpu" and has no memory: compiling leaves 288 MiB of them (torch 2.13).
            if storage.device.type == "cpu":
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


def highest(profiler: Any) -> dict[str, int]:
    """Return, per span of a finished profile, the highest running sum of allocations, in bytes.

    Spans of one name count as one; the sum runs from the beginning of the profile.
    """
    changes: list[tuple[int, int]] = []
    spans: list[tuple[int, int, str]] = []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_SPAN):
            start = event.start_ns()
            spans.append((start, start + event.duration_ns(), name.removeprefix(_SPAN)))
    changes.sort(key=lambda change: change[0])
    times = [time for time, _ in changes]
    levels = list(itertools.accumulate((size for _, size in changes), initial=0))
    peaks: dict[str, int] = {}
    for start, end, name in spans:
        # levels[i] is what is alive before change i: a span begins with what it finds.
        first, last = bisect.bisect_left(times, start), bisect.bisect_right(times, end)
        peaks[name] = max(*levels[first : last + 1], peaks.get(name, 0))
    return peaks
