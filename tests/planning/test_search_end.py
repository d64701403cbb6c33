"""Searches that end early: at the first configuration that fits, or when they are told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest

from fsdptool.cli.options import ended_by_interrupt
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.records.plan import Plan

TINY = {"reference": "qwen3:tiny", "gpu": "H100-80GB-SXM", "gpus": 2, "sequence_length": 64}


def planned(*, progress: Callable[[str], None] | None = None, **options: Any) -> Plan:
    stop = options.pop("stop", None)
    request = read_request(cast("Options", {**TINY, "compile": False, **options}))
    return make_plan(request, stop=stop, progress=progress)


def ends(plan: Plan) -> list[tuple[str, str]]:
    return [(item.severity, item.message) for item in plan.diagnostics if item.code == "PLN018"]


@pytest.mark.slow
def test_a_quick_search_ends_at_the_first_configuration_that_fits() -> None:
    whole, quick = planned(), planned(quick=True)
    assert (quick.verdict, quick.chosen) == ("fits", "requested")
    assert len(quick.candidates) == 1 < len(whole.candidates)
    count = len(whole.candidates)
    message = "the search ended at the first configuration that fits, after 1 of up to"
    assert [(severity, said.partition(f" {count}")[0]) for severity, said in ends(quick)] == [
        ("info", message)
    ]
    assert not ends(whole)
    # The first answer is the answer: nothing else is traced for advice.
    assert quick.next_steps == () and whole.next_steps


def test_a_search_tells_what_it_does_before_the_first_answer() -> None:
    told: list[str] = []
    planned(quick=True, progress=told.append)
    assert told[:2] == [
        "building the model without weights",
        "tracing a step of Qwen3ForCausalLM with 10.2 M parameters",
    ]


def test_nothing_is_searched_where_only_one_configuration_is_asked_for() -> None:
    assert not ends(planned(quick=True, search=False))


def test_a_search_that_is_told_to_end_answers_with_the_best_so_far() -> None:
    asked = iter(range(1, 100))
    plan = planned(stop=lambda: next(asked) >= 3)
    assert len(plan.candidates) == 3 and plan.verdict == "fits"
    assert [severity for severity, _ in ends(plan)] == ["warning"]


@pytest.mark.slow
def test_what_was_not_evaluated_may_fit() -> None:
    plan = planned(reference="llama3:8b", gpus=1, stop=lambda: True)
    assert (plan.verdict, plan.chosen, len(plan.candidates)) == ("unknown", None, 1)


def test_the_first_interrupt_ends_a_search_and_the_next_one_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), ended_by_interrupt() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        assert "Ctrl-C" in capsys.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
