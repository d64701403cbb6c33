"""Loaded as ``sitecustomize`` by the workers of some tests: data loading waits for a file that never comes.

The ranks in ``BLOCK_RANKS`` open a FIFO nobody writes to, as a file server that went away would leave
them, when they load step ``BLOCK_STEP``, in the starts that ``BLOCK_ATTEMPTS`` numbers.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


class Blocker(importlib.abc.MetaPathFinder):
    """Wraps ``Loader.__next__`` before the loop is first imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "fsdptool.training.trainer":
            return None
        sys.meta_path.remove(self)
        from fsdptool.training.data.loader import Loader

        plain = Loader.__next__
        taken = {"steps": 0}

        def wait_for_file(loader: Any) -> Any:
            taken["steps"] += 1
            here = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") in os.environ["BLOCK_ATTEMPTS"].split(",")
            if here and taken["steps"] == int(os.environ["BLOCK_STEP"]):
                Path(os.environ["BLOCK_FILE"]).read_bytes()
            return plain(loader)

        if os.environ["RANK"] in os.environ["BLOCK_RANKS"]:
            Loader.__next__ = wait_for_file  # type: ignore[method-assign, assignment]
        return importlib.util.find_spec(name)


if "BLOCK_STEP" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, Blocker())
