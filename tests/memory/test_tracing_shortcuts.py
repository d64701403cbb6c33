"""What makes a trace cheaper changes nothing in it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import kept
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptool.errors import ConfigError
from fsdptool.memory.simulation.program import program
from fsdptool.memory.tracing import fake_mode, reduced_depth
from fsdptool.memory.tracing.fake_mode import TracingMode
from fsdptool.memory.tracing.growth import GrowthRule
from fsdptool.memory.tracing.layer_extrapolation import _pattern
from fsdptool.memory.tracing.micro_batch import run_trace
from fsdptool.memory.tracing.recorder import SegmentRecorder
from fsdptool.memory.tracing.tracer import trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Batch, Lora, Method, ModelChoice, Objective, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Segment, Trace
from fsdptool.source import resolve

SETTINGS = FsdpSettings(mixed_precision="bf16", activation_checkpointing=True)


def traced(micro_batch: int) -> Trace:
    recipe = Recipe(ModelChoice("qwen3:tiny"), batch=Batch(micro_batch=micro_batch, sequence_length=32))
    return trace(resolve("qwen3:tiny"), resolve_run(recipe, SETTINGS), use_cache=False)


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reduced_depth, "_extrapolates", {})
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_known")
def test_a_further_micro_batch_is_traced_at_one_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = run_trace

    def counted(*args: Any, **kwargs: Any) -> Trace:
        runs.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(reduced_depth, "run_trace", counted)
    alone = traced(2)
    both = len(runs)
    reduced_depth._extrapolates.clear()
    traced(1)
    runs.clear()
    assert traced(2) == alone
    assert alone.repeats and (both, len(runs)) == (2, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_known")
def test_shortcuts_find_what_torchs_own_cache_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = traced(1)
    replacements = {
        "_cache_key": FakeTensorMode._cache_key,
        "_get_output_tensor_from_cache_entry": FakeTensorMode._get_output_tensor_from_cache_entry,
        "asked": lambda *_: None,
    }
    for name, replacement in replacements.items():
        with monkeypatch.context() as patch:
            patch.setattr(TracingMode, name, replacement)
            assert traced(1) == ours


@pytest.mark.slow
def test_repeated_answers_are_torchs_own_wherever_tensors_begin() -> None:
    def recorded(*, repeated: bool) -> tuple[list[Any], Trace]:
        draw, seen = random.Random(0), []
        mode = TracingMode()
        with mode:
            base = torch.empty(10, 12, dtype=torch.bfloat16)
        with mode, SegmentRecorder([base], fake=mode if repeated else None) as recorder:
            part = base[2:, 1:]
            for _ in range(60):
                whole = draw.choice([base, part, base.t(), part[:, ::2], part.unsqueeze(1).squeeze(1)])
                dim = draw.choice([0, 1, -1])
                size = whole.shape[dim]
                start, end = (draw.choice([None, draw.randint(-size - 2, size + 2)]) for _ in range(2))
                cut = torch.ops.aten.slice.Tensor(whole, dim, start, end)
                row = whole.select(dim, draw.randrange(-size, size))
                found = [
                    cut,
                    row,
                    cut.float(),
                    cut + cut,
                    cut.reshape(-1),
                    row.expand(2, *row.shape),
                    cut.mul_(2),
                ]
                seen += [(*map(tuple, (t.shape, t.stride())), t.storage_offset(), t.dtype) for t in found]
        return seen, recorder.trace(profile="cuda", compute_dtype="bfloat16")

    TracingMode._answers.clear()
    torchs = recorded(repeated=False)
    assert not TracingMode._answers
    assert recorded(repeated=True) == torchs == recorded(repeated=True)
    # Far fewer than there are calls: one for all places where a slice may begin.
    assert 20 < sum(answer is not None for answer in TracingMode._answers.values()) < 300


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_known")
def test_a_torch_without_the_private_names_gives_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = traced(1)
    with monkeypatch.context() as patch:
        patch.delattr(fake_tensor, "_DISPATCH_META_HANDLERS", raising=False)
        assert fake_mode._uncached() is None
    monkeypatch.setattr(fake_mode, "_UNCACHED", None)
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


SMALL_EXPERTS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "num_experts_per_tok": 2,
}
MIXTURES: dict[str, tuple[str, dict[str, Any], bool, str]] = {
    "qwen3-moe": ("qwen3-moe:30b-a3b", {"num_experts": 8, "moe_intermediate_size": 48}, True, "full"),
    "mixtral": ("mixtral:8x7b", {}, False, "full"),
    "granite": ("granitemoe:3.0-1b-a400m", {"num_local_experts": 8}, True, "full"),
    "gpt-oss, LoRA": ("gpt-oss:20b", {"num_local_experts": 8}, True, "lora"),
    "mixtral, divided sequences": ("mixtral:8x7b", {}, True, "full"),
}


def comparable(trace: Trace) -> Trace:
    """Return a trace with its names in full: the order of the vocabulary does not matter."""
    return replace(trace, vocabulary=(), names=tuple(trace.vocabulary[name] for name in trace.names))  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize(
    "name",
    kept(MIXTURES, "mixtral"),
)
def test_a_loss_over_all_layers_is_that_of_the_full_depth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, sizes, checkpointing, method = MIXTURES[name]
    overrides = {**SMALL_EXPERTS, **sizes, "num_hidden_layers": 20}
    divided = name.endswith("sequences")
    mesh = ParallelDims(tp=2) if divided else ParallelDims()
    settings = replace(SETTINGS, activation_checkpointing=checkpointing, mesh=mesh)
    spec = resolve(reference, overrides=overrides)
    depths: list[int] = []
    real = run_trace

    def noted(model: Any, *args: Any, **kwargs: Any) -> Trace:
        depths.append(sum(1 for path, _ in model.named_modules() if re.fullmatch(r".*layers\.\d+", path)))
        return real(model, *args, **kwargs)

    monkeypatch.setattr(reduced_depth, "run_trace", noted)

    def at(micro_batch: int) -> Trace:
        recipe = Recipe(
            ModelChoice(reference, overrides=overrides),
            method=Method(method),
            objective=Objective(options={"chunk": 64}),
            batch=Batch(micro_batch=micro_batch, sequence_length=64),
            sharding=Sharding(sequence_parallel=divided),
        )
        return trace(spec, resolve_run(recipe, settings), use_cache=False)

    first = at(2)
    depths.clear()
    second = at(4)
    # Its loss takes four chunks, not two: the rule is carried to it.
    assert len(depths) == 2
    assert max(depths) < 20
    assert any(isinstance(known, GrowthRule) for known in reduced_depth._extrapolates.values())
    assert not first.repeats and not second.repeats
    monkeypatch.setattr(reduced_depth, "_extrapolates", {})
    monkeypatch.setattr(reduced_depth, "_learn", lambda *_: False)
    assert comparable(at(2)) == comparable(first)
    assert comparable(at(4)) == comparable(second)


LTX: dict[str, Any] = {
    "num_layers": 12,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "caption_channels": 24,
    "in_channels": 8,
    "out_channels": 8,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
}


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_known")
def test_gradients_summed_over_all_blocks_do_not_need_the_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """In LTX-2 the second sum of such a gradient takes other memory than the third and later ones."""
    settings = replace(SETTINGS, activation_checkpointing=False)
    spec = resolve("ltx-2:2.0-19b", overrides=LTX)
    recipe = Recipe(ModelChoice("ltx-2:2.0-19b", overrides=LTX), batch=Batch(height=64, width=64, frames=9))

    def pieces(made: Trace) -> list[Any]:
        blocks = frozenset({"", *(f"transformer_blocks.{index}" for index in range(12))})
        cut = program(made, blocks, 1)
        return [
            (piece.marker, piece.path, piece.body.net, piece.body.peak, sorted(piece.gradients))
            for piece in cut
        ]

    reduced = trace(spec, resolve_run(recipe, settings), use_cache=False)
    assert reduced.repeats
    assert reduced_depth.INNER in reduced_depth._extrapolates.values()
    monkeypatch.setattr(reduced_depth, "_extrapolates", {})
    monkeypatch.setattr(reduced_depth, "_learn", lambda *_: False)
    full = trace(spec, resolve_run(recipe, settings), use_cache=False)
    assert not full.repeats
    assert pieces(reduced) == pieces(full)


def stack(layers: int, size: Callable[[int], int], chunks: int = 0) -> Trace:
    """Return a trace of chunks, of layers that each keep a tensor, and of a stack that ``size`` measures."""
    segments, sizes, events = [Segment("start", ""), *[Segment("loss", "")] * chunks], [], []
    for layer in range(layers):
        sizes.append(64)
        segments.append(Segment("enter", f"layers.{layer}", (len(sizes),)))
        events.append(-len(sizes))
    sizes.append(size(layers))
    segments.append(Segment("end", "", (len(sizes), *events, -len(sizes)), bytes_moved=size(layers)))
    return Trace(
        profile="cuda",
        compute_dtype="bfloat16",
        segments=tuple(segments),
        sizes=tuple(sizes),
        kinds=(0,) * len(sizes),
        names=(0,) * len(sizes),
        vocabulary=("stack",),
    )


def test_what_grows_linearly_is_predicted_and_nothing_else() -> None:
    linear, quadratic = [
        [stack(layers, size) for layers in (3, 4, 6, 40)] for size in (lambda n: 64 * n, lambda n: 64 * n * n)
    ]
    first, second, third, last = linear
    rule = GrowthRule.learn(first, second, third, 3, ["layers"])
    assert rule is not None
    assert rule.apply(first, second, 37) == last
    assert rule.apply(first, replace(second, segments=second.segments[:-1]), 37) is None
    assert rule.carried(first, second) == rule
    shallow, deep, further = [stack(layers, lambda n: 32 * n, chunks=5) for layers in (3, 4, 40)]
    carried = rule.carried(shallow, deep)
    assert rule.apply(shallow, deep, 37) is None and carried is not None
    assert carried.apply(shallow, deep, 37) == further
    twice = [replace(trace, segments=(*trace.segments, *trace.segments[1:-1])) for trace in (shallow, deep)]
    assert rule.carried(*twice) is None
    others = [replace(trace, kinds=(1,) * len(trace.kinds)) for trace in (shallow, deep)]
    assert rule.carried(*others) is None  # A period inserts as much, but tensors of another kind.
    first, second, third, last = quadratic
    assert GrowthRule.learn(first, second, third, 3, ["layers"]) is None


def test_what_is_refused_is_kept_as_a_trace_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path))
    spec = resolve("qwen3:tiny")

    def refused(target: str) -> str:
        method = Method("lora", lora=Lora(rank=4, targets=(target,)))
        recipe = Recipe(ModelChoice("qwen3:tiny"), method=method, batch=Batch(sequence_length=32))
        with pytest.raises(ConfigError) as caught:
            trace(spec, resolve_run(recipe, SETTINGS))
        return f"{caught.value.message} {caught.value.help}"

    first = refused("nowhere")
    assert "nowhere" in first
    with monkeypatch.context() as patched:
        # Not to be reached: what was refused is known.
        patched.setattr("fsdptool.memory.tracing.make_trace.make_trace", None)
        assert refused("nowhere") == first
    assert "elsewhere" in refused("elsewhere")
