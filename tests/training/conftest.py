"""The pool of ranks, once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks that stay up between tests."""
    ranks = Pool()
    yield ranks
    ranks.close()
