"""What makes a trace cheaper changes nothing in it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptool.memory.tracing import make_trace as tracing
from fsdptool.memory.tracing.fake_mode import TracingMode
from fsdptool.memory.tracing.layer_extrapolation import _pattern
from fsdptool.memory.tracing.tracer import trace
from fsdptool.records.recipe import Batch, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Trace
from fsdptool.source import resolve

SETTINGS = FsdpSettings(mixed_precision="bf16", activation_checkpointing=True)


def traced(micro_batch: int) -> Trace:
    recipe = Recipe(ModelChoice("qwen3:tiny"), batch=Batch(micro_batch=micro_batch, sequence_length=32))
    return trace(resolve("qwen3:tiny"), recipe, SETTINGS, use_cache=False)


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tracing, "_EXTRAPOLATES", set())
    yield


@pytest.mark.usefixtures("nothing_known")
def test_a_further_micro_batch_is_traced_at_one_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = tracing.run_trace

    def counted(*args: Any, **kwargs: Any) -> Trace:
        runs.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(tracing, "run_trace", counted)
    alone = traced(2)
    both = len(runs)
    tracing._EXTRAPOLATES.clear()
    traced(1)
    runs.clear()
    assert traced(2) == alone
    assert alone.repeats and (both, len(runs)) == (2, 1)


@pytest.mark.usefixtures("nothing_known")
def test_cheap_keys_find_what_torchs_own_find(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = traced(1)
    with monkeypatch.context() as patch:
        patch.setattr(TracingMode, "_cache_key", FakeTensorMode._cache_key)
        assert traced(1) == ours


def test_calls_that_differ_are_told_apart() -> None:
    with TracingMode():
        base = torch.empty(4, 6)
        same = [base + 1, base + 1.0, base.t() + 1, base[1:] + 1, base.int() + 1, base.int() + 1.0]
    assert [(t.shape, t.stride(), t.dtype) for t in same] == [
        (torch.Size([4, 6]), (6, 1), torch.float32),
        (torch.Size([4, 6]), (6, 1), torch.float32),
        (torch.Size([6, 4]), (1, 6), torch.float32),
        (torch.Size([3, 6]), (6, 1), torch.float32),
        (torch.Size([4, 6]), (6, 1), torch.int32),
        (torch.Size([4, 6]), (6, 1), torch.float32),
    ]


def brute_force(signatures: Sequence[int]) -> tuple[int, int, int] | None:
    best: tuple[int, tuple[int, int, int]] | None = None
    count = len(signatures)
    for period in range(1, min(12, count // 2) + 1):
        for prefix in range(min(8, count) + 1):
            end = prefix + period
            while end < count and signatures[end] == signatures[end - period]:
                end += 1
            length = end - prefix
            kept = count - (length // period - 4) * period
            if length // period > 4 and (best is None or kept < best[0]):
                best = kept, (prefix, period, length)
    return best[1] if best else None


def test_patterns_are_those_of_a_comparison_of_all_blocks() -> None:
    draw = random.Random(0)
    seen = 0
    for _ in range(300):
        body = [draw.randrange(3) for _ in range(draw.randrange(1, 4))] * draw.randrange(1, 12)
        signatures = [draw.randrange(3) for _ in range(draw.randrange(6))] + body + [9] * draw.randrange(3)
        found = _pattern(signatures)
        expected = brute_force(signatures)
        seen += expected is not None
        assert (found and (found.prefix, found.period, found.length)) == expected
    assert seen > 100
