"""Every test runs offline, with its own cache folder, and with one thread per process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read by libraries at import, so they are set before anything else is imported.
_SCRATCH = tempfile.TemporaryDirectory(prefix="fsdptool-tests-")
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(Path(_SCRATCH.name, "hf")),
        "XDG_CACHE_HOME": str(Path(_SCRATCH.name, "cache")),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
    }
)


@pytest.fixture(scope="session", autouse=True)
def scratch_folders() -> Iterator[None]:
    """Remove the scratch folders when the session ends."""
    yield
    _SCRATCH.cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the pool of ranks, and keep them on one worker.

    Two pools would only take turns on two cores.
    """
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
            item.add_marker(pytest.mark.distributed)
