"""Sweeps: further settings of what tests hold at a few. ``test.sh --sweeps`` runs them, before a release."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def kept(cases: Iterable[Any], *always: Any) -> list[Any]:
    """Return a test's parameters, of which only some run without ``--sweeps``.

    Args:
        cases: Every case: a name, or a tuple of arguments.
        always: The cases that each run of the tests takes.

    Raises:
        ValueError: One of ``always`` is not a case.
    """
    every = list(cases)
    if unknown := [case for case in always if case not in every]:
        raise ValueError(f"not among the cases: {unknown}")
    made = []
    for case in every:
        values = case if isinstance(case, tuple) else (case,)
        made.append(pytest.param(*values, marks=() if case in always else pytest.mark.sweep))
    return made
