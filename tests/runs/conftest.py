"""The folder of the runs, and one undisturbed run to compare with, once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_runs import Run, Work


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """The folder all runs are made in."""
    return Work(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def undisturbed(work: Work) -> Iterator[Run]:
    """A run nobody disturbs, with the memory predicted."""
    run = work.start("undisturbed", "--predict")
    assert run.end() == 0, run.said()
    yield run
