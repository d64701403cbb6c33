"""Attention of packed documents by a variable-length kernel: equal to the mask, without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fsdptool.errors import ConfigError
from fsdptool.families.objectives import CausalLM, packed_attention
from fsdptool.families.objectives.packed_attention import BEGINS, LONGEST, describe, with_documents
from fsdptool.memory import trace
from fsdptool.modeling.objective import Task, run_micro_batch
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.recipe import Batch, Data, ModelChoice, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source import resolve

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "pad_token_id": 0,
}
POSITIONS = torch.tensor(
    [
        [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3],
        [*range(14), 0, 1],
        [0, *range(15)],
    ]
)
"""Documents of one token to fifteen; no document continues in the next sequence."""


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor,
    _: torch.Tensor,
    longest: int,
    __: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Attend as ``torch.nn.attention.varlen.varlen_attn`` documents it, one document after the other."""
    assert longest >= int(begins.diff().max())
    parts = []
    for first, last in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        q, k, v = (part[first:last].transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        places = torch.arange(last - first)
        distance = places[:, None] - places[None, :]
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the CPU take the kernel; lists how many documents each call was told of."""
    calls: list[int] = []

    def counted(*args: Any, **named: Any) -> torch.Tensor:
        calls.append(args[3].numel() - 1)
        return reference(*args, **named)

    monkeypatch.setattr(packed_attention, "_KERNEL", counted)
    monkeypatch.setattr(packed_attention, "_kernel_takes", lambda query, key, value: True)
    yield calls
    packed_attention.leave()


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss, _ = run_micro_batch(
        model,
        Task(CausalLM(auxiliary=0.0)),
        batch,
        scale=1.0,
        divisor=torch.ones(()),
        moment=lambda _: torch.enable_grad(),
    )
    return float(loss), [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt_neox"])
def test_documents_attend_as_under_a_mask(kernel: list[int], kind: str, rows: int) -> None:
    model = model_of(kind)
    tokens = torch.randint(1, 96, (rows, 16))
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": POSITIONS[:rows]}
    loss, expected = gradients(model, batch)
    assert not kernel
    again, found = gradients(model, {**batch, **describe(POSITIONS[:rows])})
    assert kernel == [(3, 5, 7)[rows - 1]] * 2
    assert again == pytest.approx(loss, rel=1e-12)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_recomputation_attends_to_the_same_documents(kernel: list[int], kind: str) -> None:
    model = model_of(kind)
    tokens = torch.randint(1, 96, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": POSITIONS[:2], **describe(POSITIONS[:2])}
    loss, expected = gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, found = gradients(model.train(), batch)
    assert len(kernel) == 2 + 4 and again == loss
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_what_the_kernel_does_not_support_gets_the_mask(
    kernel: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(packed_attention, "_kernel_takes", lambda query, key, value: False)
    model = model_of(kind)
    tokens = torch.randint(1, 96, (3, 16))
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": POSITIONS}
    loss, expected = gradients(model, batch)
    again, found = gradients(model, {**batch, **describe(POSITIONS)})
    assert not kernel and again == pytest.approx(loss, rel=1e-12)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_only_a_gpus_batch_is_told_where_documents_begin() -> None:
    batch = {"input_ids": torch.zeros(3, 16, dtype=torch.int64), "position_ids": POSITIONS}
    assert with_documents(batch, torch.device("cpu")) == batch
    told = with_documents(batch, torch.device("cuda"))
    assert told[BEGINS].tolist() == [0, 3, 12, 16, 30, 32, 33, 48]
    assert told[BEGINS].dtype == torch.int32
    assert told[LONGEST].shape == (16, 0), "no more than a sequence"
    long = torch.arange(4096).reshape(1, -1) % 300
    assert describe(long)[LONGEST].shape == (512, 0)


@pytest.mark.parametrize(("packing", "kernels"), [(True, True), (False, False)])
def test_a_plan_for_gpus_holds_no_mask(packing: bool, kernels: bool) -> None:
    spec = resolve("llama3:tiny")
    length = 208
    recipe = Recipe(
        ModelChoice("llama3:tiny"),
        data=Data("text", packing=packing, tokenizer="bytes"),
        batch=Batch(micro_batch=2, sequence_length=length),
    )
    traced = trace(
        spec, resolve_run(recipe, FsdpSettings(mixed_precision="bf16")), profile="cuda", use_cache=False
    )
    assert ("_varlen_attn" in traced.vocabulary) == kernels
    masks = [size for size, name in zip(traced.sizes, traced.names, strict=True) if size == 2 * length**2]
    assert not masks
    attention = [item for item in traced.operations if item.kind == "attention"]
    assert attention and all(item.fused and item.causal and item.queries == length for item in attention)


def test_flash_attention_of_several_sequences_is_refused() -> None:
    """transformers' own looks for documents in a batch of one sequence alone."""
    model = model_of("llama")
    model.config._attn_implementation = "flash_attention_2"
    batch = dict.fromkeys(("input_ids", "labels", "position_ids"), POSITIONS)
    with pytest.raises(ConfigError, match="does not keep the packed documents of several sequences apart"):
        CausalLM().predict(model, batch)


@pytest.mark.slow
def test_a_plan_of_compiled_blocks_keeps_documents_apart_in_one_graph() -> None:
    """Dynamo traces the attention with its documents: a compiled block keeps less than an eager one."""
    recipe = Recipe(
        ModelChoice("llama3:tiny"),
        data=Data("text", packing=True, tokenizer="bytes"),
        batch=Batch(micro_batch=2, sequence_length=208),
    )
    compiled = replace(recipe, sharding=Sharding(compile=True))
    traces = [
        trace(
            resolve("llama3:tiny"),
            resolve_run(one, FsdpSettings(mixed_precision="bf16")),
            profile="cuda",
            use_cache=False,
        )
        for one in (recipe, compiled)
    ]
    assert all("_varlen_attn" in traced.vocabulary for traced in traces)
    eager, fused = (sum(traced.sizes) for traced in traces)
    assert fused < 0.6 * eager
