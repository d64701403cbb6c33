"""Every test runs offline, with its own cache folder, and with one thread per process."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
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
        "XDG_STATE_HOME": str(Path(_SCRATCH.name, "state")),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
    }
)
# Without bytecode every process that a test starts compiles the same modules again, for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# After them: importing the package must not import a library first.
from fsdptool.garbage import collect_seldom  # noqa: E402

collect_seldom()


@pytest.fixture(scope="session", autouse=True)
def scratch_folders() -> Iterator[None]:
    """Remove the scratch folders when the session ends."""
    yield
    _SCRATCH.cleanup()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Let Ctrl-C reach the tests also where a shell started them in its background and has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def eager_by_default() -> Iterator[frozenset[str]]:
    """Plan eager blocks for GPUs where a test does not say otherwise: to compile them takes seconds a trace.

    Programs that tests start decide as they do for users.

    Yields:
        The objectives for which blocks are compiled by default (``compiled_by_default`` puts them back).
    """
    from fsdptool.modeling import compilation

    tested = compilation._TESTED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "_TESTED", frozenset())
        yield tested


@pytest.fixture
def compiled_by_default(eager_by_default: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide which blocks are compiled as users get it."""
    from fsdptool.modeling import compilation

    monkeypatch.setattr(compilation, "_TESTED", eager_by_default)


SHARED = ("pool", "seen", "watched_run", "watched_doctor", "undisturbed", "qlora")
"""Fixtures that start processes for several tests. Each worker that runs such a test makes its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs sweeps, too."""
    parser.addoption("--sweeps", action="store_true", help="run the tests that are marked as sweeps, too")


# First, because xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that share an expensive fixture on one worker, and mark them as distributed.

    Two pools would only take turns on two cores, and two workers would make the same runs twice.
    """
    for item in items:
        shared = next((name for name in SHARED if name in getattr(item, "fixturenames", ())), None)
        if shared is not None:
            item.add_marker(pytest.mark.xdist_group("ranks" if shared == "pool" else shared))
            item.add_marker(pytest.mark.distributed)
    # Who names tests wants these, and all of their parameters.
    named = bool(config.getoption("keyword")) or any("::" in word for word in config.args)
    _sample(items, sweeps=not named)
    if not config.getoption("sweeps"):
        swept = [item for item in items if item.get_closest_marker("sweep")]
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=swept)


def _sample(items: list[pytest.Item], *, sweeps: bool) -> None:
    """Mark the parameters of sampled tests that a quick run omits as slow, and those of sweeps as sweeps."""
    seen: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % sampled.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            if sweeps and seen[name] % sampled.kwargs.get("whole", 1):
                item.add_marker(pytest.mark.sweep)
            seen[name] += 1
