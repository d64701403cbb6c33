"""Any class trains on the tensors that a recipe lists, with the loss that it computes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdptool.errors import ConfigError
from fsdptool.families.bases.batches import listed_inputs
from fsdptool.families.objectives import ModuleLoss
from fsdptool.families.registry import family_of
from fsdptool.families.synthetic import synthesise
from fsdptool.memory import trace
from fsdptool.modeling.objective import objective_for
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.anatomy import ModelSpec, Reference
from fsdptool.records.recipe import Batch, ModelChoice, Objective, Recipe
from fsdptool.records.sharding import FsdpSettings

SEGFORMER = {
    **{"model_type": "segformer", "architectures": ["SegformerForSemanticSegmentation"], "num_labels": 3},
    **{"hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "depths": [1, 1, 1, 1]},
    **{"num_attention_heads": [1, 1, 2, 2], "sr_ratios": [1, 1, 1, 1], "mlp_ratios": [1, 1, 1, 1]},
}
INPUTS = {
    "pixel_values": {"shape": [3, 32, 32]},
    "labels": {"shape": [32, 32], "dtype": "int64", "high": 3},
}


@pytest.mark.slow
def test_a_class_of_transformers_trains_with_its_own_loss() -> None:
    reference, name = Reference("config", "segformer"), "SegformerForSemanticSegmentation"
    spec = ModelSpec(reference, "generic", None, "transformers", name, SEGFORMER)
    recipe = Recipe(
        model=ModelChoice("segformer", weights="random", dtype="float32"),
        objective=Objective("module", {"inputs": INPUTS}),
        batch=Batch(micro_batch=2),
    )
    specs = family_of(spec).batch_spec(spec.config, recipe)
    batch = synthesise(specs, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = family_of(spec).build(spec.config, model_class=spec.model_class).eval()
    objective = objective_for(recipe, spec)
    loss = objective.loss(objective.predict(model, batch), batch)
    torch.testing.assert_close(loss, 2 * model(**batch).loss)
    traced = trace(
        spec, resolve_run(recipe, FsdpSettings(mixed_precision="bf16", num_processes=2)), use_cache=False
    )
    assert traced.known, traced.unknowns


class Patches(nn.Module):
    """Takes the patches of all samples one after another, as Qwen-VL does."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 1)

    def forward(self, patches: Tensor, grid: Tensor, **_: Any) -> dict[str, Tensor]:
        """Return a mean."""
        assert patches.shape == (6, 4) and grid.tolist() == [[1, 3], [1, 3]]
        return {"loss": self.proj(patches).mean()}


def test_values_and_flat_samples_reach_the_model_as_listed() -> None:
    listed = {
        "patches": {"shape": [3, 4], "flat": True},
        "grid": {"shape": [2], "dtype": "int64", "values": [1, 3]},
        "target": {"shape": [1]},
    }
    batch = synthesise(listed_inputs(listed, 2), torch.Generator().manual_seed(0))
    objective = ModuleLoss(inputs=listed)
    assert objective.loss(objective.predict(Patches(), batch), batch).dim() == 0
    words = {"ids": {"shape": [9], "dtype": "int64", "low": 5, "high": 7, "values": [9, 9]}}
    ids = synthesise(listed_inputs(words, 3), torch.Generator().manual_seed(0))["ids"]
    assert (ids[:, :2] == 9).all() and int(ids[:, 2:].min()) >= 5 and int(ids[:, 2:].max()) < 7


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"x": {"size": [3]}}, "x is not a tensor"),
        ({"x": {"shape": [3], "values": "12"}}, "values is not a list of numbers"),
        ({"x": {"shape": [3], "dtype": "float3"}}, "no dtype 'float3'"),
        ([], "must map names to tensors"),
    ],
)
def test_a_wrong_list_is_refused_by_name(listed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        listed_inputs(listed, 2)
