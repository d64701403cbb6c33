"""Records real steps on the CPU in the form of torch's memory snapshots, with the stacks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BASE = 1 << 40
STRIDE = 1 << 30


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes an entry for each storage that an operator makes, with the stack of Python at that moment."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[dict[str, Any]] = []
        self.live: dict[int, dict[str, Any]] = {}
        self._seen: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._note((leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        size = -(-storage.nbytes() // 512) * 512
        if not size or self._seen.get(storage._cdata) is storage:
            return
        self._seen[storage._cdata] = storage
        address = BASE + len(self.entries) * STRIDE
        entry = {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": _frames()}
        self.entries.append(entry)
        self.live[address] = entry
        weakref.finalize(storage, self._freed, address, size).atexit = False

    def _freed(self, address: int, size: int) -> None:
        del self.live[address]
        self.entries.append(
            {"action": "free_completed", "addr": address, "size": size, "stream": 0, "frames": _frames()}
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot: each live block has a segment of its own."""
        segments = [
            {
                **{"device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)},
                **{"address": address, "total_size": entry["size"]},
                "blocks": [
                    {
                        **{"address": address, "size": entry["size"], "state": "active_allocated"},
                        "frames": entry["frames"],
                    }
                ],
            }
            for address, entry in self.live.items()
        ]
        return {"segments": segments, "device_traces": [list(self.entries)]}


def _frames() -> list[dict[str, Any]]:
    frame: FrameType | None = sys._getframe(2)
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__:
            found.append({"filename": code.co_filename, "name": code.co_name, "line": frame.f_lineno})
        frame = frame.f_back
    return found


def recorded(before: Callable[[], Any], step: Callable[[], Any]) -> dict[str, Any]:
    """Return the snapshot after a step, whose entries are those of the step alone."""
    with Recorder() as recorder:
        kept = [before()]
        begin = len(recorder.entries)
        kept.append(step())
        snapshot = recorder.snapshot()
    return {**snapshot, "device_traces": [entries[begin:] for entries in snapshot["device_traces"]]}
