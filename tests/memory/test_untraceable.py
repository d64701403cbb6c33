"""Models that decide shapes by value: states stay exact, and the family says what stands in the way."""

from __future__ import annotations

import pytest

from fsdptool.families.registry import load_registry
from fsdptool.memory import trace
from fsdptool.records.sharding import FsdpSettings
from fsdptool.testing.families import small_batch, small_spec

UNTRACEABLE = [
    family.name for family in load_registry().all() if family.flavours() and family.untraceable({})
]


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_the_familys_reason_is_told_instead_of_torchs(name: str) -> None:
    family = load_registry().get(name)
    spec = small_spec(family, next(iter(family.flavours().values())))
    recipe, _ = small_batch(family, spec)
    made = trace(spec, recipe, FsdpSettings(), use_cache=False)
    assert not made.known
    reason = family.untraceable(spec.config)
    assert made.unknowns == (
        f"activations: {spec.model_class} cannot be traced on fake tensors: it {reason}",
    )
