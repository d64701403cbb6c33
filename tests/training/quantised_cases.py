"""LoRA on a quantised base: models with rows long enough for every format, and what ranks do with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cases
import ranks
import torch
from cases import CASES, LLAMA, MOE, SD3, Case, inputs_for
from host_memory import growth

from fsdptool.distributed.session import open_session
from fsdptool.modeling.methods.quantised_layers import quantised_layers
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Recipe
from fsdptool.training.trainer import assemble

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 192}
# Rows that neither two nor four ranks divide evenly (24, 6 and 130), and two layers nf4 has to leave.
UNEVEN = {**LLAMA, "hidden_size": 64, "intermediate_size": 130, "num_key_value_heads": 1, "head_dim": 6}
FLOW = {**SD3, "attention_head_dim": 16, "caption_projection_dim": 64}
EXPERTS = {**MOE, "hidden_size": 64}

QUANTISED = {
    case.name: case
    for case in (
        Case("wide", WIDE, ("LlamaDecoderLayer",), "causal_lm", ("q_proj", "v_proj", "down_proj")),
        Case("uneven", UNEVEN, ("LlamaDecoderLayer",), "causal_lm", ("q_proj", "up_proj")),
        Case("denoiser", FLOW, ("JointTransformerBlock",), "flow_matching", ("to_q", "to_v")),
        Case("moe", EXPERTS, ("Qwen3MoeDecoderLayer",), "causal_lm", ("q_proj",)),
    )
}


def quantised_recipe(name: str, folder: Path, base: str, **changes: Any) -> tuple[Recipe, Path]:
    """Write the model and return a LoRA recipe with this base."""
    case = QUANTISED[name]
    method = changes.pop("method", "lora")
    recipe = cases.recipe_for(case, cases.write_model(folder / "model", case.config), method, **changes)
    assert recipe.method.lora is not None
    lora = dataclasses.replace(recipe.method.lora, base=base)
    return dataclasses.replace(recipe, method=dataclasses.replace(recipe.method, lora=lora)), folder


@contextmanager
def installed(name: str) -> Iterator[None]:
    """Let the plain loop and the ranks find a case of this file by its name."""
    before = CASES.get(name)
    CASES[name] = QUANTISED[name]
    try:
        yield
    finally:
        del CASES[name]
        if before is not None:
            CASES[name] = before


def train(name: str, *arguments: Any) -> dict[str, Any]:
    """Train a case on the pool's ranks."""
    with installed(name):
        return ranks.train(name, *arguments)


def decoded(name: str, folder: Path, recipe: Recipe, mesh: ParallelDims | None = None) -> dict[str, Any]:
    """Assemble a case; return whole weights by peft's names, with quantised ones decoded, and local bytes."""
    inputs = inputs_for(QUANTISED[name], folder, recipe, mesh=mesh)
    assembled = assemble(inputs, open_session(inputs.settings))
    layers = quantised_layers(assembled.model)
    found = ranks.weights_of(assembled)
    return {
        "weights": plain_weights(found, layers),
        "layers": sorted(layers),
        "bytes": assembled.proof["local_bytes"],
        "proof": assembled.proof,
    }


def plain_weights(found: dict[str, torch.Tensor], layers: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Replace codes and scales by the weight they stand for."""
    from fsdptool.modeling.methods.quantised_formats import decode

    made = dict(found)
    for path, layer in layers.items():
        codes, scales = made.pop(f"{path}.codes"), made.pop(f"{path}.scales")
        made[f"{path}.weight"] = decode(layer.format, codes, scales, layer.plain_dtype)
    return made


def load_big(folder: Path, recipe: Recipe, small: Recipe) -> dict[str, int]:
    """Assemble a pretrained run; return how far this process's own memory grew, and what it ends with.

    A small run first: what libraries take when they are first used is not the model's.
    """
    session = open_session(inputs_for(QUANTISED["wide"], folder, small).settings)
    assemble(inputs_for(QUANTISED["wide"], folder, small), session)
    return growth(inputs_for(QUANTISED["wide"], folder, recipe), session)
