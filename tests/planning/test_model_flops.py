"""The FLOPs a plan says a step needs, against the closed form and against torch's own counter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdptool.inspection import inspect
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning import load_gpu, predict
from fsdptool.planning.clusters import make_cluster
from fsdptool.records.plan import Candidate
from fsdptool.records.recipe import Batch, Lora, Method, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source import resolve

LAYERS, HIDDEN, INNER, VOCABULARY = 7, 32, 64, 262
SAMPLES, LENGTH, ACCUMULATION, RANKS = 2, 32, 3, 2
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


def candidate(folder: Path, gpu: str | None, checkpointing: bool, wrap: tuple[str, ...]) -> Candidate:
    (folder / "config.json").write_text(json.dumps(MODEL))
    spec = resolve(str(folder))
    recipe = Recipe(
        model=ModelChoice(str(folder), weights="random", attention="eager"),
        batch=Batch(micro_batch=SAMPLES, sequence_length=LENGTH, accumulation=ACCUMULATION),
        steps=1,
    )
    settings = FsdpSettings(
        wrap_policy="transformer" if wrap else "none",
        wrap_classes=wrap,
        use_cpu=gpu is None,
        mixed_precision="no" if gpu is None else "bf16",
        num_processes=RANKS,
        activation_checkpointing=checkpointing,
    )
    cluster = make_cluster(load_gpu(gpu), RANKS) if gpu is not None else None
    profile = "cuda" if gpu is not None else "cpu-gloo"
    return predict(
        spec,
        inspect(spec),
        resolve_run(recipe, settings, ranks=cluster.world_size if cluster is not None else None),
        cluster=cluster,
        profile=profile,
    )


def planned(folder: Path, *, gpu: str | None = None, checkpointing: bool = False) -> tuple[float, float]:
    """Return the step's FLOPs and one device's peak, 0 where there is none."""
    found = candidate(folder, gpu, checkpointing, ("LlamaDecoderLayer",))
    assert found.step_flops is not None
    if found.mfu is not None:
        assert found.step_seconds is not None
        assert found.peak_flops is not None
        # The plan's own utilisation is the same arithmetic over the estimated time.
        expected = found.step_flops / (RANKS * found.peak_flops * found.step_seconds)
        assert found.mfu == pytest.approx(expected)
    return found.step_flops, found.peak_flops or 0.0


@pytest.mark.slow
def test_a_steps_flops_are_the_closed_form_and_what_torch_counts(tmp_path: Path) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in MODEL.items() if k != "architectures"})
    config._attn_implementation = "eager"
    tokens = torch.zeros((SAMPLES, LENGTH), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        LlamaForCausalLM(config)(tokens, labels=tokens).loss.backward()
    # Per token: q and o, k and v at half the width, three MLP matrices, scores and values; the head.
    block = 3 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * LENGTH * HIDDEN
    products = LAYERS * block + HIDDEN * VOCABULARY
    closed = 3 * 2 * products * SAMPLES * LENGTH  # forward once, backward twice
    steps = RANKS * ACCUMULATION
    assert counter.get_total_flops() == closed
    assert planned(tmp_path) == (closed * steps, 0.0)
    assert planned(tmp_path, checkpointing=True) == (closed * steps, 0.0), "recomputation is not counted"


@pytest.mark.slow
def test_a_gpus_peak_is_the_catalogues_in_the_compute_dtype(tmp_path: Path) -> None:
    flops, peak = planned(tmp_path, gpu="H100-80GB-SXM")
    assert peak == load_gpu("H100-80GB-SXM").flops["bfloat16"]
    assert flops == planned(tmp_path)[0]


@pytest.mark.slow
def test_the_time_to_compute_does_not_depend_on_what_is_wrapped(tmp_path: Path) -> None:
    """Blocks that were not traced count in whichever unit holds them."""
    gpu = "H100-80GB-SXM"
    wraps = ((), ("LlamaDecoderLayer",), ("LlamaMLP",), ("LlamaAttention", "LlamaMLP"))
    compute = [candidate(tmp_path, gpu, False, wrap).seconds["compute"] for wrap in wraps]
    # What differs is only what each wrapping copies around its collectives: microseconds here.
    assert compute == pytest.approx([compute[0]] * len(wraps), rel=1e-3)


@pytest.mark.slow
def test_experts_count_the_tokens_that_were_routed_to_them(tmp_path: Path) -> None:
    """Forward, and twice in backward: the gradient of grouped weights, too, sums over tokens once."""
    experts, chosen, inner, tokens = 8, 2, 16, SAMPLES * LENGTH
    model = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "head_dim": 8,
        "max_position_embeddings": 64,
    } | {key: MODEL[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    model |= {"num_key_value_heads": 4, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    spec = resolve(str(tmp_path))
    recipe = Recipe(
        model=ModelChoice(str(tmp_path), weights="random", attention="eager"),
        batch=Batch(micro_batch=SAMPLES, sequence_length=LENGTH),
        steps=1,
    )
    settings = FsdpSettings(wrap_classes=("Qwen3MoeDecoderLayer",), use_cpu=True, num_processes=1)
    found = predict(spec, inspect(spec), resolve_run(recipe, settings), cluster=None, profile="cpu-gloo")
    block = 4 * HIDDEN * HIDDEN + HIDDEN * experts + 2 * LENGTH * HIDDEN + 3 * chosen * HIDDEN * inner
    closed = 3 * 2 * (2 * block + HIDDEN * VOCABULARY) * tokens
    # Balancing the load counts one-hot choices by a product or two of its own.
    assert found.step_flops == pytest.approx(closed, rel=0.02)


@pytest.mark.slow
def test_recomputation_inside_custom_functions_is_not_counted(tmp_path: Path) -> None:
    """A quantised base computes its products inside an autograd function, whose forward has no grad mode."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    spec = resolve(str(tmp_path))
    recipe = Recipe(
        model=ModelChoice(str(tmp_path), weights="random", attention="eager"),
        method=Method("lora", Lora(rank=4, base="int8")),
        batch=Batch(micro_batch=SAMPLES, sequence_length=LENGTH),
        steps=1,
    )
    cluster = make_cluster(load_gpu("H100-80GB-SXM"), RANKS)
    planned = [
        predict(
            spec,
            inspect(spec),
            resolve_run(
                recipe,
                FsdpSettings(
                    wrap_classes=("LlamaDecoderLayer",), num_processes=RANKS, activation_checkpointing=again
                ),
            ),
            cluster=cluster,
        )
        for again in (False, True)
    ]
    assert planned[0].step_flops == planned[1].step_flops
    assert planned[0].seconds["compute"] < planned[1].seconds["compute"]
