"""The next step is read while the current one runs: order, position, failures and ends."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

from fsdptool.errors import ConfigError
from fsdptool.training.data.loader import Loader, RankShare, Stack
from fsdptool.training.data.order import PlainOrder


class Numbers:
    """Samples that are their own index; ``read`` lists them as they are read, ``broken`` cannot be read."""

    digest = "numbers"

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken
        self.read: list[int] = []
        self.progress = threading.Condition()

    def __len__(self) -> int:
        return 100

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        if index == self.broken:
            raise ConfigError(f"sample {index} cannot be read")
        with self.progress:
            self.read.append(index)
            self.progress.notify_all()
        return {"x": np.asarray(index)}

    def wait_for(self, count: int) -> bool:
        """Wait until this many samples have been read."""
        with self.progress:
            return self.progress.wait_for(lambda: len(self.read) >= count, timeout=60)


def loader_of(samples: Numbers, *, workers: int = 0, steps: int | None = None) -> Loader:
    """Return a loader of steps of two micro-batches with one sample each."""
    order = PlainOrder(len(samples), seed=0, shuffle=False)
    share = RankShare(0, 1, 1, 2)
    return Loader(samples, Stack(), order, share, workers=workers, start_method="fork", steps=steps)


def taken(loader: Loader, steps: int) -> list[list[int]]:
    """Take steps and return their samples."""
    return [[int(batch["x"]) for batch in step] for step in itertools.islice(loader, steps)]


def reading_threads() -> set[threading.Thread]:
    """Return the threads that read ahead in this process, those of loaders that other tests left included."""
    return {thread for thread in threading.enumerate() if thread.name == "read-ahead"}


class Mixed(Numbers):
    """Samples of several arrays, none of which ends where the next one may begin."""

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        values = np.arange(index, index + 70)
        kinds = (np.uint8, np.float64, np.bool_, np.int16, np.float32)
        return {
            f"{kind.__name__} {size}": values[:size].astype(kind) for kind in kinds for size in (1, 7, 70)
        }


def test_processes_send_arrays_as_they_are() -> None:
    alone, sent = (
        list(itertools.islice(loader_of(Mixed(), workers=workers, steps=2), 2)) for workers in (0, 1)
    )
    for expected, found in zip(itertools.chain(*alone), itertools.chain(*sent), strict=True):
        assert expected.keys() == found.keys() and len(found) == 15
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_one_step_is_read_ahead_and_not_two() -> None:
    samples = Numbers()
    loader = loader_of(samples)
    assert taken(loader, 1) == [[0, 1]]
    assert samples.wait_for(4), "nothing was read ahead"
    with samples.progress:
        assert not samples.progress.wait_for(lambda: len(samples.read) > 4, timeout=0.2)
    assert taken(loader, 1) == [[2, 3]]
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_read_ahead_is_not_in_the_position(workers: int) -> None:
    loader = loader_of(Numbers(), workers=workers)
    assert taken(loader, 3) == [[0, 1], [2, 3], [4, 5]]
    state = loader.state_dict()
    assert state["samples"] == loader.samples == 6
    resumed = loader_of(Numbers(), workers=workers)
    resumed.load_state_dict(state)
    assert taken(resumed, 2) == taken(loader, 2) == [[6, 7], [8, 9]]
    # Back in the middle of a run, as a rollback goes back.
    loader.load_state_dict(state)
    assert taken(loader, 1) == [[6, 7]]
    loader.close()
    resumed.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_is_raised_at_its_own_step(workers: int) -> None:
    loader = loader_of(Numbers(broken=5), workers=workers)
    assert taken(loader, 2) == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match="sample 5 cannot be read"):
        next(loader)
    assert loader.samples == 4
    # Asked again, it is read again.
    with pytest.raises(ConfigError, match="sample 5 cannot be read"):
        next(loader)


def test_an_error_of_the_program_reaches_the_main_thread() -> None:
    samples = Numbers()
    samples.read = None  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="append"):
        next(loader_of(samples))


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_read_beyond_the_end_and_each_pass_is_whole(workers: int) -> None:
    samples = Numbers()
    loader = loader_of(samples, workers=workers, steps=2)
    for _ in range(2):
        assert taken(iter(loader), 5) == [[0, 1], [2, 3]]
    assert set(samples.read) <= {0, 1, 2, 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_ends_the_thread_and_the_processes(workers: int) -> None:
    others = reading_threads()
    loader = loader_of(Numbers(), workers=workers)
    taken(loader, 1)
    (thread,) = reading_threads() - others
    processes = loader._processes.processes if loader._processes is not None else ()
    assert len(processes) == workers
    loader.close()
    assert not thread.is_alive()
    assert not any(process.is_alive() for process in processes)


def test_a_loader_that_is_let_go_takes_its_thread_with_it() -> None:
    others = reading_threads()
    loader = loader_of(Numbers())
    taken(loader, 1)
    (thread,) = reading_threads() - others
    del loader
    thread.join(10)
    assert not thread.is_alive()
