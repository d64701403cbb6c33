"""What ``fully_shard`` leaves alone: parameters without dimensions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, inputs_for, recipe_for, write_model
from pool import Pool
from ranks import replica_hash, weights_of

from fsdptool.distributed.session import open_session
from fsdptool.records.recipe import Optimizer, Recipe
from fsdptool.training.trainer import assemble

pytestmark = pytest.mark.distributed

PART = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP = Case(
    "clip",
    {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 12,
        "logit_scale_init_value": 1.5,
        "text_config": {
            **PART,
            "vocab_size": 40,
            "max_position_embeddings": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        "vision_config": {**PART, "image_size": 8, "patch_size": 4},
    },
    ("CLIPEncoderLayer",),
    "contrastive",
    (),
)
SGD = Optimizer(name="sgd", learning_rate=0.1, momentum=0.0, weight_decay=0.0, clip_grad_norm=None)
STEPS = 3


def pairs(step: int, index: int) -> dict[str, torch.Tensor]:
    """Return one micro-batch of image-text pairs."""
    generator = torch.Generator().manual_seed(100 * step + index)
    return {
        "input_ids": torch.randint(3, 40, (3, 6), generator=generator),
        "pixel_values": torch.randn(3, 3, 8, 8, generator=generator),
    }


def run_pairs(folder: Path, recipe: Recipe) -> dict[str, Any]:
    torch.manual_seed(recipe.seed)
    inputs = inputs_for(CLIP, folder, recipe)
    session = open_session(inputs.settings)
    made = assemble(inputs, session)
    before = weights_of(made)
    for step in range(STEPS):
        made.stepper.run([pairs(step, session.rank)], rate=0.1)
    after = weights_of(made)
    return {
        "before": before,
        "after": after,
        "proof": made.proof,
        "hash": replica_hash([after[name] for name in sorted(after)]),
        "whole": [parameter.fqn for parameter in inputs.units.ignored],
    }


@pytest.mark.parametrize("weights", ["random", "pretrained"])
def test_a_scalar_stays_whole_and_follows_every_ranks_gradient(
    pool: Pool, tmp_path: Path, weights: str
) -> None:
    from transformers import AutoConfig, CLIPModel

    reference = write_model(tmp_path / "model", CLIP.config)
    torch.manual_seed(0)
    plain: Any = CLIPModel(AutoConfig.from_pretrained(reference))
    if weights == "pretrained":
        plain.logit_scale.data.fill_(0.75)
        plain.save_pretrained(reference)
    recipe = recipe_for(CLIP, reference, "full", optimizer=SGD)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, weights=weights))
    first, second = pool.run(run_pairs, 2, tmp_path, recipe)
    assert first["whole"] == ["logit_scale"]
    assert first["proof"]["placements"]["['whole']"] == 1
    assert first["hash"] == second["hash"]
    # transformers leaves a random model's temperature at what the configuration says.
    assert float(first["before"]["logit_scale"]) == (0.75 if weights == "pretrained" else 1.5)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(first["before"][name])
    plain.train()
    for step in range(STEPS):
        plain.zero_grad()
        for rank in range(2):
            scores = plain(**pairs(step, rank)).logits_per_text
            target = torch.arange(3)
            both = torch.nn.functional.cross_entropy(scores, target, reduction="sum")
            both = both + torch.nn.functional.cross_entropy(scores.t(), target, reduction="sum")
            (both / 2 / 6).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
    assert first["after"]["logit_scale"] != first["before"]["logit_scale"]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(first["after"][name], parameter.detach(), rtol=1e-4, atol=1e-5)
