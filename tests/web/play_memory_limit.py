"""Loaded as ``sitecustomize`` by workers of one test: rank 1 gets no more memory after its first step."""

import importlib.abc
import importlib.util
import os
import resource
import sys
from pathlib import Path
from typing import Any

SPARE_BYTES = 4 << 20
"""What the allocator of Python may still take; the loss of a step needs more."""


class Limiter(importlib.abc.MetaPathFinder):
    """Patches ``Stepper.launch`` when the training loop is first imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "fsdptool.training.trainer":
            return None
        sys.meta_path.remove(self)
        from fsdptool.training.step import Stepper

        plain = Stepper.launch

        def launch(stepper: Any, micro_batches: Any, **options: Any) -> Any:
            answer = plain(stepper, micro_batches, **options)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + SPARE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return answer

        Stepper.launch = launch  # type: ignore[method-assign, assignment]
        return importlib.util.find_spec(name)


if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Limiter())
