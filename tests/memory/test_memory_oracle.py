"""The simulated schedule against ``fully_shard`` itself, on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
from memory_cases import LLAMA, Case
from sweeps import kept

from fsdptool.records.checkpointing import Checkpointing, read_policy
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Lora, Method, Objective
from fsdptool.records.sharding import Grouping

pytestmark = pytest.mark.slow

SELECTIVE: dict[str, Any] = {"sharding": {"checkpointing": Checkpointing("selective")}}
EVERY_SECOND: dict[str, Any] = {"sharding": {"checkpointing": Checkpointing("every_n", every_n=2)}}
RECOMPUTE: dict[str, Any] = {"activation_checkpointing": True}
TO_HOST = {**RECOMPUTE, "activation_checkpointing_offload": True}
LONG = {"sequence_length": 512, "micro_batch": 4}


def policy(text: str) -> dict[str, Any]:
    """Return the sharding of a checkpointing policy."""
    return {"sharding": {"checkpointing": read_policy(text)}}


GPT2 = {"n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 1000}
QWEN_MOE = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
}
BERT = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
T5 = {
    "num_layers": 3,
    "num_decoder_layers": 3,
    "d_model": 128,
    "d_ff": 256,
    "num_heads": 4,
    "vocab_size": 1024,
}
SD3 = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "joint_attention_dim": 128,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 64,
}
UNET = {
    "block_out_channels": [32, 64],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 1],
    "attention_head_dim": [2, 4],
    "cross_attention_dim": 64,
}
REACHED: dict[str, Any] = {
    "reference": "memory_cases:Reached",
    "overrides": {},
    "objective": Objective(
        "module",
        {"inputs": {"x": {"shape": [128]}, "labels": {"shape": [], "dtype": "int64", "high": 4}}},
    ),
    "settings": {"wrap_classes": ("Mixture",)},
}
WAN = {"num_layers": 3, "num_attention_heads": 2, "ffn_dim": 256, "text_dim": 128}

WIDE = LLAMA | {"vocab_size": 8000}
FUSED = Objective(options={"chunk": 128}, fused=True)
QWEN3 = WIDE | {"head_dim": 32}
DEEP = LLAMA | {"num_hidden_layers": 9}

CASES: dict[str, Case] = {
    "2 ranks": Case(ranks=2),
    "a reduction of one large gradient": Case(
        overrides=LLAMA | {"vocab_size": 20000, "num_hidden_layers": 1},
        ranks=2,
        batch={"sequence_length": 8, "micro_batch": 1},
    ),
    "2 ranks, a short odd length": Case(ranks=2, batch={"sequence_length": 24, "micro_batch": 4}),
    "64 ranks": Case(ranks=64),
    "512 ranks, most shards padded": Case(ranks=512),
    "one rank": Case(ranks=1),
    "deep enough to be shortened": Case(overrides=DEEP),
    "deep, nothing wrapped": Case(overrides=DEEP, settings={"wrap_policy": "none"}),
    "deep, parts of blocks wrapped": Case(
        overrides=DEEP, settings={"wrap_classes": ("LlamaAttention", "LlamaMLP")}
    ),
    "deep, recomputed": Case(overrides=DEEP, settings=RECOMPUTE),
    "fp32": Case(settings={"mixed_precision": "no"}),
    "bf16 reduction": Case(sharding={"reduce_dtype": "bfloat16"}),
    "recomputed": Case(settings=RECOMPUTE),
    "inputs in host memory": Case(settings=TO_HOST, batch=LONG),
    "inputs in host memory, deep, accumulation": Case(
        overrides=DEEP, settings=TO_HOST, batch={**LONG, "accumulation": 2}
    ),
    "inputs in host memory, adapters": Case(
        method=Method("lora", lora=Lora(rank=4)), settings=TO_HOST, batch=LONG
    ),
    "inputs in host memory, two stacks": Case("flan-t5:base", T5, ranks=2, settings=TO_HOST, batch=LONG),
    "selective": Case(settings=RECOMPUTE, **SELECTIVE),
    "every second": Case(settings=RECOMPUTE, **EVERY_SECOND),
    "every second matmul": Case(settings=RECOMPUTE, **policy("selective:every-2-matmuls")),
    "three policies, shortened": Case(
        overrides=LLAMA | {"num_hidden_layers": 16},
        settings=RECOMPUTE,
        **policy("5*full+6*selective:attention,matmul#5+5*none"),
    ),
    "kept after forward": Case(settings={"reshard_after_forward": False}),
    "a peak in forward": Case(
        "sd3:medium",
        SD3 | {"num_attention_heads": 6, "caption_projection_dim": 384},
        batch={"height": 64, "width": 64, "micro_batch": 1},
        method=Method("lora", lora=Lora(rank=4)),
        settings=RECOMPUTE | {"mixed_precision": "no"},
    ),
    "outside the blocks in the root, last block gathered": Case(
        sharding={"grouping": Grouping("root", "root", "gathered")}
    ),
    "resharded to two": Case(sharding={"reshard_after_forward": 2}),
    "two ahead": Case(sharding={"prefetch": 2}),
    "two ahead, in another order than that of the modules": Case(
        "sdxl:unet", UNET, batch={"height": 64, "width": 64}, sharding={"prefetch": 2}
    ),
    "accumulation": Case(batch={"accumulation": 3}),
    "accumulation, unsharded": Case(batch={"accumulation": 3}, sharding={"accumulation": "unsharded"}),
    "accumulation, unsharded fp32": Case(
        batch={"accumulation": 2}, sharding={"accumulation": "unsharded"}, settings={"mixed_precision": "no"}
    ),
    "hybrid": Case(mesh=ParallelDims(dp_replicate=2)),
    "hybrid, accumulation": Case(mesh=ParallelDims(dp_replicate=2), batch={"accumulation": 2}),
    "hybrid, bf16 masters": Case(mesh=ParallelDims(dp_replicate=2), settings={"mixed_precision": "no"}),
    "accelerate's layout": Case(sharding={"layout": "accelerate"}),
    "accelerate's layout, recomputed": Case(sharding={"layout": "accelerate"}, settings=RECOMPUTE),
    "adapters": Case(method=Method("lora", lora=Lora(rank=4))),
    "adapters, accumulation": Case(
        ranks=2,
        method=Method("lora", lora=Lora(rank=64)),
        batch={"accumulation": 3, "sequence_length": 8, "micro_batch": 1},
    ),
    "adapters, recomputed": Case(method=Method("lora", lora=Lora(rank=4)), settings=RECOMPUTE),
    "adapters, replicated": Case(method=Method("lora", lora=Lora(rank=4, adapters="replicated"))),
    "adapters, tables saved": Case(
        overrides=WIDE, method=Method("lora", lora=Lora(rank=4, modules_to_save=("embed_tokens", "lm_head")))
    ),
    "adapters, tables saved, recomputed": Case(
        overrides=WIDE,
        ranks=2,
        method=Method("lora", lora=Lora(rank=4, modules_to_save=("embed_tokens", "lm_head"))),
        settings=RECOMPUTE,
        batch={"accumulation": 2},
    ),
    "adapters, tied tables saved together": Case(
        "qwen3:0.6b",
        QWEN3,
        method=Method(
            "lora",
            lora=Lora(rank=4, modules_to_save=("embed_tokens", "lm_head"), ensure_weight_tying=True),
        ),
    ),
    "adapters, tied tables saved apart": Case(
        "qwen3:0.6b",
        QWEN3,
        method=Method("lora", lora=Lora(rank=4, modules_to_save=("embed_tokens", "lm_head"))),
    ),
    "adapters, DoRA": Case(method=Method("lora", lora=Lora(rank=4, use_dora=True))),
    "adapters, DoRA, recomputed": Case(
        method=Method("lora", lora=Lora(rank=4, use_dora=True)), settings=RECOMPUTE
    ),
    "adapters, DoRA of a table and a head": Case(
        overrides=WIDE,
        method=Method("lora", lora=Lora(rank=4, use_dora=True, targets=("embed_tokens", "lm_head"))),
    ),
    "adapters, ranks by pattern": Case(
        method=Method(
            "lora", lora=Lora(rank=4, use_rslora=True, rank_pattern={"q_proj": 32, "layers.1.*v_proj": 64})
        )
    ),
    "adapters in some blocks": Case(
        overrides=LLAMA | {"num_hidden_layers": 9},
        method=Method("lora", lora=Lora(rank=32, layers_to_transform=(0, 4, 8))),
    ),
    "adapters, rows": Case(
        overrides=WIDE, method=Method("lora", lora=Lora(rank=4, trainable_token_indices=(1, 7, 900)))
    ),
    "adapters, rows of a tied table": Case(
        "qwen3:0.6b",
        QWEN3,
        method=Method("lora", lora=Lora(rank=4, trainable_token_indices=(1, 7, 900))),
    ),
    "adapters, a module of the blocks saved, base in nf4": Case(
        method=Method("lora", lora=Lora(rank=4, modules_to_save=("down_proj",), base="nf4"))
    ),
    "adapters, biases": Case(
        "gpt2:small", GPT2, method=Method("lora", lora=Lora(rank=4, bias="all", lora_bias=True))
    ),
    "adapters of a denoiser, its output saved": Case(
        "sd3:medium",
        SD3,
        batch={"height": 64, "width": 64},
        method=Method("lora", lora=Lora(rank=4, modules_to_save=("proj_out",))),
        settings={"mixed_precision": "no"},
    ),
    "loss in the head": Case(overrides=WIDE, batch=LONG, objective=FUSED),
    "loss in the head, fp32": Case(
        overrides=WIDE, batch=LONG, objective=FUSED, settings={"mixed_precision": "no"}
    ),
    "loss in the head, recomputed": Case(overrides=WIDE, batch=LONG, objective=FUSED, settings=RECOMPUTE),
    "loss in the head, accumulation, unsharded": Case(
        overrides=WIDE,
        ranks=2,
        batch={**LONG, "accumulation": 2},
        objective=FUSED,
        sharding={"accumulation": "unsharded"},
    ),
    "loss in a tied head": Case("qwen3:0.6b", QWEN3, batch=LONG, objective=FUSED),
    "loss in a frozen head": Case(
        overrides=WIDE, batch=LONG, objective=FUSED, method=Method("lora", lora=Lora(rank=4))
    ),
    "loss in a saved head": Case(
        overrides=WIDE,
        batch=LONG,
        objective=FUSED,
        method=Method("lora", lora=Lora(rank=4, modules_to_save=("lm_head",))),
    ),
    "loss in the head of two stacks": Case("flan-t5:base", T5, ranks=2, batch=LONG, objective=FUSED),
    "base in nf4": Case(method=Method("lora", lora=Lora(rank=4, base="nf4"))),
    "base in nf4, resharded to two": Case(
        method=Method("lora", lora=Lora(rank=4, base="nf4")), sharding={"reshard_after_forward": 2}
    ),
    "base in nf4, recomputed, uneven": Case(
        ranks=3, method=Method("lora", lora=Lora(rank=4, base="nf4")), settings=RECOMPUTE
    ),
    "base in int8, selective": Case(
        method=Method("lora", lora=Lora(rank=4, base="int8")), settings=RECOMPUTE, **SELECTIVE
    ),
    "base in int8, one rank": Case(ranks=1, method=Method("lora", lora=Lora(rank=4, base="int8"))),
    "base in float8, fp32": Case(
        method=Method("lora", lora=Lora(rank=4, base="float8")), settings={"mixed_precision": "no"}
    ),
    "optimizer, fused": Case(ranks=1, step=True),
    "optimizer, foreach": Case(ranks=1, step=True, optimizer={"implementation": "foreach"}),
    "optimizer, loop": Case(ranks=1, step=True, optimizer={"implementation": "for_loop"}),
    "tied": Case("gpt2:small", GPT2),
    "tied, accelerate's layout": Case("gpt2:small", GPT2, sharding={"layout": "accelerate"}),
    "experts, uneven": Case("qwen3-moe:30b-a3b", QWEN_MOE, ranks=4),
    "experts, fewer than ranks": Case("qwen3-moe:30b-a3b", QWEN_MOE, ranks=16),
    "experts, fewer than ranks, accumulation": Case(
        "qwen3-moe:30b-a3b",
        QWEN_MOE,
        ranks=16,
        batch={"accumulation": 2},
        settings={"reshard_after_forward": False},
    ),
    "experts, fewer than ranks, resharded to four": Case(
        "qwen3-moe:30b-a3b", QWEN_MOE, ranks=16, sharding={"reshard_after_forward": 4}
    ),
    "experts, most of them not reached": Case(**REACHED),
    "experts, most of them not reached, accumulation": Case(
        **REACHED, batch={"accumulation": 3}, sharding={"accumulation": "unsharded"}
    ),
    "experts, most of them not reached, one rank": Case(**REACHED, ranks=1),
    "encoder": Case("bert:base-uncased", BERT),
    "two stacks": Case("flan-t5:base", T5, ranks=2),
    "diffusion": Case("sd3:medium", SD3, batch={"height": 128, "width": 128}),
    "video": Case("wan2.1:t2v-1.3b", WAN, batch={"height": 64, "width": 64, "frames": 5}),
}


@pytest.mark.parametrize(
    "name",
    kept(
        CASES,
        "2 ranks",
        "512 ranks, most shards padded",
        "deep enough to be shortened",
        "fp32",
        "inputs in host memory",
        "selective",
        "every second matmul",
        "kept after forward",
        "resharded to two",
        "two ahead",
        "accumulation, unsharded",
        "hybrid, accumulation",
        "accelerate's layout, recomputed",
        "adapters, recomputed",
        "adapters, DoRA",
        "adapters, rows of a tied table",
        "adapters, a module of the blocks saved, base in nf4",
        "loss in the head, recomputed",
        "loss in a frozen head",
        "base in nf4, recomputed, uneven",
        "base in float8, fp32",
        "optimizer, fused",
        "optimizer, loop",
        "tied",
        "experts, fewer than ranks",
        "experts, most of them not reached, accumulation",
        "two stacks",
        "video",
    ),
)
def test_simulation_and_oracle_agree_on_the_peak(name: str) -> None:
    """Peak bytes of step 2 within 0.5 %."""
    case = CASES[name]
    trace = case.trace()
    assert trace.known, trace.unknowns
    peak, live = case.simulate(trace)
    seen = case.observe()
    assert peak == pytest.approx(seen.peak, rel=0.005), (live, seen)


def test_an_oracle_that_disagreed_would_be_noticed() -> None:
    """The same trace simulated under another reshard setting is off by far more than the tolerance."""
    kept: dict[str, Any] = {"reshard_after_forward": False}
    seen = Case(settings=kept).observe()
    peak, _ = Case().simulate()
    assert abs(peak / seen.peak - 1) > 0.02
