"""Measures a rank's memory over a step, and says with which instrument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CudaMeter:
    """The caching allocator's own counters: exact, free, reset at every step."""

    instrument = "torch.cuda.max_memory_allocated / max_memory_reserved"

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


class NoMeter:
    """Measures nothing, and says so."""

    instrument = "none"

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Do nothing."""
        yield

    def last(self) -> tuple[int | None, int | None]:
        """Return unknowns."""
        return None, None

    def peaks(self) -> tuple[int | None, int | None]:
        """Return unknowns."""
        return None, None
