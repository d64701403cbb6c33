"""Keeps the inputs of checkpointed blocks in host memory between forward and backward.

torch's ``save_on_cpu`` copies on the stream that computes (2.13, ``torch/autograd/graph.py``), so nothing
hides its copies. Here a stream of its own copies a block's inputs while the next block computes, and
fetches them while the block behind it computes backward. The last two blocks of a forward stay on the
device: backward begins there. Page-locked memory comes from torch's cache, which hands freed buffers out
again once their copies are done (2.13, ``ATen/core/CachingHostAllocator.h``). CPU tensors take the same
way without a stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class ActivationOffload:
    """Knows in which order the checkpointed blocks of a model ran."""

    def __init__(self) -> None:
        self._last: weakref.ref[_Block] | None = None

    def block(self, inputs: Iterable[object]) -> saved_tensors_hooks:
        """Begin a block's forward; what autograd saves while the result is entered may leave the device.

        Args:
            inputs: The block's arguments. Tensors that the block before it also got stay on the device, as
                do parameters and tensors that repeat their elements.
        """
        before = self._last() if self._last is not None else None
        block = _Block(inputs, before)
        if before is not None:
            before.send(block)
        self._last = weakref.ref(block)
        return saved_tensors_hooks(block.pack, block.unpack)


class _Block:
    """The inputs of one call of a block. The autograd graph keeps it alive.

    Args:
        inputs: Its arguments.
        before: The call before it.
    """

    def __init__(self, inputs: Iterable[object], before: _Block | None) -> None:
        self._before = weakref.ref(before) if before is not None else None
        self._returning = False
        self.inputs: list[_Kept] = []
        for tensor in inputs:
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter):
                continue
            if tensor.nbytes <= tensor.untyped_storage().nbytes() and self.find(tensor) is None:
                shared = before.find(tensor) if before is not None else None
                self.inputs.append(shared or _Kept(tensor.detach()))

    def send(self, following: _Block) -> None:
        """Copy the inputs to the host, and let go of those of the block before, whose copies are done."""
        for kept in self.inputs:
            if kept not in following.inputs:
                kept.send()
        before = self._before() if self._before is not None else None
        for kept in before.inputs if before is not None else ():
            if kept not in self.inputs:
                kept.leave()

    def pack(self, tensor: torch.Tensor) -> _Kept | torch.Tensor:
        """Return what autograd holds instead of an input."""
        return self.find(tensor) or tensor

    def unpack(self, packed: _Kept | torch.Tensor) -> torch.Tensor:
        """Return an input on its device; fetch the inputs of the block before, which is next in backward."""
        if not isinstance(packed, _Kept):
            return packed
        before = self._before() if self._before is not None else None
        if not self._returning:
            self._returning = True
            for block in (self, before):
                for kept in block.inputs if block is not None else ():
                    kept.fetch()
        tensor = packed.arrive()
        if before is None or packed not in before.inputs:
            packed.leave()
        return tensor

    def find(self, tensor: torch.Tensor) -> _Kept | None:
        return next((kept for kept in self.inputs if kept.holds(tensor)), None)


class _Kept:
    """A tensor on its device, in host memory, or both.

    Args:
        tensor: Detached from the graph that is to hold it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._device = tensor.device
        self._host: torch.Tensor | None = None
        self._copied: torch.Event | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is this one, on the device."""
        own = self._tensor
        return own is not None and _place(own) == _place(tensor) and self._version == tensor._version

    def send(self) -> None:
        """Begin to copy it to the host."""
        if self._host is None:
            self._host, self._copied = to_host(self._unchanged())

    def leave(self) -> None:
        """Let go of it on the device, if the host has it."""
        if self._host is not None:
            self._wait()
            self._tensor = None

    def fetch(self) -> None:
        """Begin to copy it to the device."""
        if self._tensor is None:
            assert self._host is not None
            self._tensor, self._copied = to_device(self._host, self._device)
            self._version = self._tensor._version

    def arrive(self) -> torch.Tensor:
        """Return it on the device; what computes next waits for it."""
        self.fetch()
        self._wait()
        return self._unchanged()

    def _unchanged(self) -> torch.Tensor:
        assert self._tensor is not None
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"an input of a checkpointed block, of shape {list(self._tensor.shape)}, was changed in place"
                " after the block read it; clone it before the change"
            )
        return self._tensor

    def _wait(self) -> None:
        if self._copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def __del__(self) -> None:
        # The memory of a copy that is under way must not be given to what computes next.
        self._wait()


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """Return a copy in host memory, page-locked for a GPU, and what says that it is complete."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host, _copy(host, tensor, tensor.device)


def to_device(host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Event | None]:
    """Return a copy on ``device``, allocated by the stream that computes, and its event."""
    tensor = torch.empty_like(host, device=device)
    return tensor, _copy(tensor, host, device)


@cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _copy(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.Event | None:
    if device.type == "cpu":
        target.copy_(source)
        return None
    stream = _stream(device)
    # Its tensor is computed, and earlier users of the memory that it fills are done.
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        target.copy_(source, non_blocking=True)
    return stream.record_event()
