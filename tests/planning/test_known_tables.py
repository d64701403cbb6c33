"""The rules of thumb everybody knows come out of the planner, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

import fsdptool
from fsdptool.planning.plan import chosen_candidate

MB = 10**6
GB = 10**9


def kept(reference: str, gpus: int, **options: Any) -> dict[str, int]:
    plan = fsdptool.plan(
        reference, gpu="B200", gpus=gpus, sequence_length=32, search=False, dtype="float32", **options
    )
    states = dict(plan.details.states)
    components = {item.name: item.bytes or 0 for item in chosen_candidate(plan).components}
    return {**states, "optimizer": components["optimizer"]}


@pytest.mark.parametrize(("gpus", "share"), [(1, 1), (4, 4)])
def test_124_million_parameters_in_fp32(gpus: int, share: int) -> None:
    """496 MB of parameters, 496 MB of gradients, 992 MB of AdamW, a quarter each on four GPUs.

    The tables count 124 million parameters; GPT-2 has 124,439,808.
    """
    states = kept("gpt2:small", gpus, precision="fp32")
    exact = 124_439_808 * 4
    # Four bytes a parameter for each; what a row does not divide by is padded.
    assert states["parameters"] == pytest.approx(exact / share, rel=1e-4)
    assert states["gradients"] == pytest.approx(exact / share, rel=1e-4)
    assert states["optimizer"] == pytest.approx(2 * exact / share, rel=1e-3)
    assert states["parameters"] == pytest.approx(496 * MB / share, rel=5e-3)
    assert states["optimizer"] == pytest.approx(992 * MB / share, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "total"), [(1, 112 * GB), (8, 14 * GB)])
def test_7_billion_parameters_in_fp32(gpus: int, total: int) -> None:
    """28 + 28 + 56 = 112 GB when every rank holds all, 14 GB each on eight; scaled to what 7B models have."""
    states = kept("llama2:7b", gpus, precision="fp32")
    whole = 6_738_415_616
    assert sum(states.values()) == pytest.approx(total * whole / 7e9, rel=2e-3)
