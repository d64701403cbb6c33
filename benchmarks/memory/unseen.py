"""Measure and predict models that nobody tuned the memory model on: odd sizes, odd numbers of ranks.

The matrix (``matrix.py``) was measured while the memory model was written. These architectures were cut
small and measured afterwards, with widths, vocabularies, experts and sequences that the ranks do not divide.

``python benchmarks/memory/unseen.py [--only TEXT] [--again]`` measures the missing rows, predicts every row
that was measured, and writes ``benchmarks/results/memory_unseen.json`` row by row and, without ``--only``,
the table between the marks in ``docs/explanation/memory-accuracy.md``. ``--again`` predicts every row again.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kept_rows import read_document, row_options, write_between, write_document
from settings import Setting

from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import library_versions

RESULTS = Path(__file__).parent.parent / "results" / "memory_unseen.json"
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "memory-accuracy.md"
NOTABLE = 0.1
"""Percent. Rows that miss by more are measured without oneDNN, too."""
BEGIN, END = "<!-- unseen: begin (benchmarks/memory/unseen.py) -->", "<!-- unseen: end -->"

ODD_TEXT = {"sequence_length": 125, "micro_batch": 3}
SHORT_TEXT = {"sequence_length": 24, "micro_batch": 2}
IMAGE = {"height": 208, "width": 240, "micro_batch": 1}
VIDEO = {"height": 96, "width": 160, "frames": 9, "micro_batch": 1}
GROUPED = {"num_hidden_layers": 5, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "mixtral": (
        "MoE, top 2",
        "mixtral:8x7b",
        {
            **GROUPED,
            "hidden_size": 256,
            "num_attention_heads": 8,
            "intermediate_size": 448,
            "num_local_experts": 6,
            "vocab_size": 3001,
        },
        {"sequence_length": 250, "micro_batch": 2},
    ),
    "mixtral-even": (
        "MoE, 16 experts",
        "mixtral:8x7b",
        {
            **GROUPED,
            "hidden_size": 256,
            "num_attention_heads": 8,
            "intermediate_size": 896,
            "num_local_experts": 16,
            "vocab_size": 3200,
        },
        {"sequence_length": 64, "micro_batch": 1},
    ),
    "granitemoe": (
        "MoE, top 3, scaled logits",
        "granitemoe:3.0-1b-a400m",
        {
            **GROUPED,
            "intermediate_size": 104,
            "num_local_experts": 10,
            "num_experts_per_tok": 3,
            "vocab_size": 2999,
        },
        ODD_TEXT,
    ),
    "gpt-oss": (
        "MoE with biases, windows, sinks",
        "gpt-oss:20b",
        {
            **GROUPED,
            "intermediate_size": 160,
            "head_dim": 32,
            "num_local_experts": 7,
            "num_experts_per_tok": 2,
            "vocab_size": 2501,
            "layer_types": None,
        },
        ODD_TEXT,
    ),
    "deepseek-v2": (
        "MoE, latent attention",
        "deepseek-v2:lite",
        {
            **GROUPED,
            "num_key_value_heads": 6,
            "intermediate_size": 520,
            "moe_intermediate_size": 72,
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "vocab_size": 3100,
        },
        ODD_TEXT,
    ),
    "qwen2-moe": (
        "MoE with a shared expert",
        "qwen2-moe:1.5-a2.7b",
        {
            **GROUPED,
            "moe_intermediate_size": 104,
            "shared_expert_intermediate_size": 300,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "vocab_size": 2700,
            "layer_types": None,
        },
        ODD_TEXT,
    ),
    "cohere": (
        "parallel attention, scaled logits",
        "cohere:aya-23-8b",
        {
            **GROUPED,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "intermediate_size": 1000,
            "vocab_size": 20000,
        },
        {"sequence_length": 130, "micro_batch": 3},
    ),
    "falcon": (
        "parallel attention, one key head",
        "falcon:7b",
        {"num_hidden_layers": 5, "hidden_size": 192, "num_attention_heads": 6, "vocab_size": 3001},
        ODD_TEXT,
    ),
    "gptj": (
        "parallel attention",
        "gptj:6b",
        {"n_layer": 5, "n_embd": 192, "n_head": 6, "rotary_dim": 16, "vocab_size": 3003},
        ODD_TEXT,
    ),
    "granite": (
        "scaled logits",
        "granite:3.1-2b",
        {**GROUPED, "intermediate_size": 500, "vocab_size": 3001},
        ODD_TEXT,
    ),
    "mamba2": (
        "state space",
        "mamba2:2.7b",
        {
            "num_hidden_layers": 5,
            "hidden_size": 160,
            "num_heads": 10,
            "head_dim": 32,
            "state_size": 24,
            "chunk_size": 16,
            "vocab_size": 2003,
        },
        {"sequence_length": 50, "micro_batch": 2},
    ),
    "jamba": (
        "hybrid of attention and Mamba, MoE",
        "jamba:v0.1",
        {
            "num_hidden_layers": 8,
            "hidden_size": 160,
            "intermediate_size": 304,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "num_experts": 6,
            "mamba_dt_rank": 10,
            "vocab_size": 2003,
        },
        SHORT_TEXT,
    ),
    "qwen3-next": (
        "hybrid of attention and delta rule, MoE",
        "qwen3-next:80b-a3b",
        {
            **GROUPED,
            "num_hidden_layers": 4,
            "intermediate_size": 300,
            "moe_intermediate_size": 72,
            "shared_expert_intermediate_size": 72,
            "num_experts": 9,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "vocab_size": 2003,
            "layer_types": None,
        },
        {"sequence_length": 70, "micro_batch": 2},
    ),
    "bart": (
        "seq2seq",
        "bart:base",
        {
            "encoder_layers": 3,
            "decoder_layers": 3,
            "d_model": 192,
            "encoder_ffn_dim": 500,
            "decoder_ffn_dim": 500,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "vocab_size": 3001,
        },
        ODD_TEXT,
    ),
    "modernbert": (
        "encoder, windows",
        "modernbert:base",
        {
            "num_hidden_layers": 5,
            "hidden_size": 192,
            "intermediate_size": 300,
            "num_attention_heads": 6,
            "vocab_size": 3001,
            "pad_token_id": 0,
            "layer_types": None,
        },
        ODD_TEXT,
    ),
    "siglip": (
        "two encoders, contrastive",
        "siglip:base-patch16-224",
        {
            "text_config": {
                "num_hidden_layers": 3,
                "hidden_size": 120,
                "intermediate_size": 250,
                "num_attention_heads": 6,
                "vocab_size": 3001,
                "projection_size": 120,
            },
            "vision_config": {
                "num_hidden_layers": 3,
                "hidden_size": 120,
                "intermediate_size": 250,
                "num_attention_heads": 6,
            },
        },
        {"sequence_length": 60, "micro_batch": 3},
    ),
    "wav2vec2": (
        "audio",
        "wav2vec2:base",
        {"num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 500, "num_attention_heads": 6},
        {"micro_batch": 1},
    ),
    "pixart-sigma": (
        "PixArt",
        "pixart-sigma:xl-1024",
        {
            "num_layers": 5,
            "num_attention_heads": 5,
            "attention_head_dim": 40,
            "cross_attention_dim": 200,
            "caption_channels": 300,
        },
        IMAGE,
    ),
    "auraflow": (
        "AuraFlow",
        "auraflow:v0.3",
        {
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 4,
            "num_attention_heads": 3,
            "attention_head_dim": 64,
            "joint_attention_dim": 300,
            "caption_projection_dim": 192,
        },
        IMAGE,
    ),
    "cogvideox": (
        "CogVideoX, video",
        "cogvideox:2b",
        {
            "num_layers": 4,
            "num_attention_heads": 3,
            "attention_head_dim": 64,
            "text_embed_dim": 300,
            "time_embed_dim": 100,
        },
        VIDEO,
    ),
    "sd3": (
        "SD3, odd sizes",
        "sd3:medium",
        {
            "num_layers": 5,
            "num_attention_heads": 5,
            "joint_attention_dim": 500,
            "caption_projection_dim": 320,
            "pooled_projection_dim": 250,
        },
        IMAGE,
    ),
    "gemma3": (
        "windows, tied embeddings",
        "gemma3:1b",
        {**GROUPED, "intermediate_size": 500, "head_dim": 32, "vocab_size": 5003, "layer_types": None},
        ODD_TEXT,
    ),
    "bloom": (
        "ALiBi",
        "bloom:560m",
        {"n_layer": 5, "hidden_size": 192, "n_head": 6, "vocab_size": 3001},
        ODD_TEXT,
    ),
    "recurrentgemma": (
        "hybrid of attention and recurrence",
        "recurrentgemma:2b",
        {
            "num_hidden_layers": 6,
            "hidden_size": 160,
            "lru_width": 160,
            "intermediate_size": 600,
            "num_attention_heads": 5,
            "vocab_size": 3001,
        },
        SHORT_TEXT,
    ),
    "deberta-v3": (
        "encoder, disentangled attention",
        "deberta-v3:base",
        {
            "num_hidden_layers": 5,
            "hidden_size": 192,
            "intermediate_size": 500,
            "num_attention_heads": 6,
            "vocab_size": 3001,
            "pooler_hidden_size": 192,
        },
        ODD_TEXT,
    ),
    "pegasus": (
        "seq2seq",
        "pegasus:large",
        {
            "encoder_layers": 3,
            "decoder_layers": 3,
            "d_model": 192,
            "encoder_ffn_dim": 500,
            "decoder_ffn_dim": 500,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "vocab_size": 3001,
        },
        ODD_TEXT,
    ),
    "clip": (
        "two encoders, contrastive",
        "clip:vit-base-patch32",
        {
            "projection_dim": 100,
            "text_config": {
                "num_hidden_layers": 3,
                "hidden_size": 120,
                "intermediate_size": 250,
                "num_attention_heads": 6,
                "vocab_size": 3001,
                "eos_token_id": 3000,
            },
            "vision_config": {
                "num_hidden_layers": 3,
                "hidden_size": 120,
                "intermediate_size": 250,
                "num_attention_heads": 6,
            },
        },
        {"sequence_length": 60, "micro_batch": 3},
    ),
    "dit": (
        "DiT",
        "dit:xl-2-256",
        {"num_layers": 5, "num_attention_heads": 5, "attention_head_dim": 40},
        {"height": 208, "width": 208, "micro_batch": 3},
    ),
    "sana": (
        "Sana, linear attention",
        "sana:0.6b",
        {
            "num_layers": 5,
            "num_attention_heads": 5,
            "attention_head_dim": 40,
            "num_cross_attention_heads": 5,
            "cross_attention_head_dim": 40,
            "cross_attention_dim": 200,
            "caption_channels": 300,
        },
        {"height": 224, "width": 256, "micro_batch": 1},
    ),
}
"""Name to (kind in the tables, reference, overrides, micro-batch)."""

_FAKE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mixtral", {"ranks": 16, "checkpointing": "full", "reshard": False}),
    ("mixtral", {"ranks": 4}),
    ("mixtral-even", {"ranks": 16}),
    ("granitemoe", {"ranks": 3}),
    ("gpt-oss", {"ranks": 5, "checkpointing": "full"}),
    ("deepseek-v2", {"ranks": 6, "reshard": False}),
    ("qwen2-moe", {"ranks": 7, "precision": "bf16r", "accumulation": 2}),
    ("cohere", {"ranks": 3}),
    ("cohere", {"ranks": 7, "checkpointing": "full", "accumulation": 2}),
    ("falcon", {"ranks": 3, "precision": "fp32"}),
    ("gptj", {"ranks": 5, "checkpointing": "selective"}),
    ("granite", {"ranks": 9, "accumulation": 2, "held": "unsharded"}),
    ("mamba2", {"ranks": 3}),
    ("jamba", {"ranks": 5}),
    ("qwen3-next", {"ranks": 6, "checkpointing": "full"}),
    ("bart", {"ranks": 5, "optimizer": "sgd", "implementation": "foreach"}),
    ("bart", {"ranks": 5, "optimizer": "sgd", "implementation": "foreach", "padded": True}),
    ("modernbert", {"ranks": 7, "reshard": False}),
    ("modernbert", {"ranks": 7, "reshard": False, "padded": True}),
    ("siglip", {"ranks": 3, "precision": "fp32"}),
    ("siglip", {"ranks": 3, "precision": "fp32", "padded": True}),
    ("wav2vec2", {"ranks": 3}),
    ("pixart-sigma", {"ranks": 3}),
    ("auraflow", {"ranks": 5, "checkpointing": "full"}),
    ("cogvideox", {"ranks": 3, "method": "lora"}),
    ("gemma3", {"ranks": 3}),
    ("bloom", {"ranks": 2}),
    ("recurrentgemma", {"ranks": 3}),
    ("deberta-v3", {"ranks": 3, "padded": True}),
    ("pegasus", {"ranks": 3, "padded": True}),
    ("clip", {"ranks": 2, "precision": "fp32", "padded": True}),
    ("dit", {"ranks": 3}),
    ("sana", {"ranks": 2}),
)
_GLOO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sd3", {"ranks": 2}),
    ("mixtral", {"ranks": 3}),
    ("auraflow", {"ranks": 2, "precision": "fp32"}),
)


def rows() -> Iterator[Setting]:
    """Yield every row; a name says what differs from bf16 with resharding and AdamW."""
    for backend, choices in (("fake", _FAKE), ("gloo", _GLOO)):
        for name, change in choices:
            _, reference, overrides, batch = MODELS[name]
            words = ", ".join(f"{key} {value}" for key, value in change.items())
            row = Setting(f"{backend} {name}: {words}", name, reference, overrides, backend=backend)
            yield replace(row, batch=batch, kept_aside=True, **change)


def main() -> None:
    """Measure and predict the missing rows, and write the table."""
    options = row_options(__doc__)
    document = read_document(RESULTS)
    document |= {"benchmark": "memory/unseen", "libraries": library_versions()}
    for setting in rows():
        if options.only not in setting.name:
            continue
        row = document["rows"].setdefault(setting.name, {})
        if row.get("setting") != to_json(setting):
            row.clear()
        if "measured_bytes" not in row:
            row |= _measured(setting)
            _write(document)
        if "measured_bytes" in row and (options.again or "predicted_bytes" not in row):
            row |= _predicted(setting, row["measured_bytes"])
        if abs(row.get("error_percent", 0)) > NOTABLE and setting.backend == "fake":
            _compare_without_onednn(setting, row)
        print(setting.name, {key: value for key, value in row.items() if key != "setting"}, flush=True)
        _write(document)
    if not options.only:
        write_between(PAGE, BEGIN, END, _table(document["rows"]))


def _write(document: dict[str, Any]) -> None:
    document["summary"] = _summary(document["rows"])
    write_document(RESULTS, document)


def _measured(setting: Setting) -> dict[str, Any]:
    import measure  # noqa: F401 - imported before the fork, so that every row starts alike
    from run import measured

    result = measured(setting)
    if "error" in result:
        return {"setting": to_json(setting), "error": result["error"]}
    return {"setting": to_json(setting), "measured_bytes": result["peak_bytes"]}


def _predicted(setting: Setting, measured: int) -> dict[str, Any]:
    from report import predict

    predicted = predict(setting)
    if predicted.allocated_peak_bytes is None:
        return {"predicted_bytes": None, "unknown": "; ".join(predicted.unknowns)}
    return {
        "predicted_bytes": predicted.allocated_peak_bytes,
        "error_percent": round(100 * (predicted.allocated_peak_bytes / measured - 1), 3),
    }


def _compare_without_onednn(setting: Setting, row: dict[str, Any]) -> None:
    """Measure a miss again without oneDNN, whose scratch memory for convolutions only CPUs need."""
    if "measured_bytes_without_onednn" not in row:
        with torch.backends.mkldnn.flags(enabled=False):
            row["measured_bytes_without_onednn"] = _measured(setting)["measured_bytes"]
    measured = row["measured_bytes_without_onednn"]
    row["error_percent_without_onednn"] = round(100 * (row["predicted_bytes"] / measured - 1), 3)


def _summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    with_onednn = [abs(row["error_percent"]) for row in rows.values() if "error_percent" in row]
    errors = {
        name: abs(row.get("error_percent_without_onednn", row["error_percent"]))
        for name, row in rows.items()
        if "error_percent" in row
    }
    return {
        "settings": len(errors),
        "architectures": len({rows[name]["setting"]["family"] for name in errors}),
        "median_percent": round(statistics.median(errors.values()), 3) if errors else None,
        "worst_percent": max(errors.values(), default=None),
        "worst_percent_with_onednn": max(with_onednn, default=None),
        "not_predicted": [name for name, row in rows.items() if row.get("predicted_bytes") is None],
    }


def _table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | setting | measured | predicted | error | without oneDNN |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        model, _, setting = name.partition(": ")
        kind = MODELS[model.partition(" ")[2]][0]
        measured = f"{row['measured_bytes']:,}" if "measured_bytes" in row else ""
        figures = f"{measured} | {'unknown' if 'unknown' in row else 'failed'} | |"
        if "error_percent" in row:
            figures = (
                f"{row['measured_bytes']:,} | {row['predicted_bytes']:,} | {row['error_percent']:+.2f} % |"
            )
        without = row.get("error_percent_without_onednn")
        figures += f" {without:+.2f} % |" if without is not None else " |"
        lines.append(f"| {model} ({kind}) | {setting} | {figures}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
