"""Tensors that a module keeps without registering them are real before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recipe_runs
import torch
import yaml
from pool import Pool

from fsdptool.distributed.initialisation import draw_blueprint, loose_tensors
from fsdptool.families.registry import load_registry
from fsdptool.testing.families import small_batch, small_spec


def test_they_are_found_with_their_values() -> None:
    family = load_registry().get("qwen-image-2.1")
    spec = small_spec(family, family.flavours()["default"])
    drawn = draw_blueprint(
        lambda: family.build(spec.config, model_class=spec.model_class), seed=0, library="diffusers"
    )
    with torch.device("meta"):
        hollow = dict(loose_tensors(family.build(spec.config, model_class=spec.model_class)))
    assert set(hollow) == set(drawn.loose) == {"pos_embed.freqs"}
    assert all(table.is_meta for table in hollow["pos_embed.freqs"])
    real = family.build(spec.config, model_class=spec.model_class)
    for ours, theirs in zip(drawn.loose["pos_embed.freqs"], real.pos_embed.freqs, strict=True):  # type: ignore[union-attr, arg-type]
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "flavour"), [("qwen-image", "20b"), ("qwen-image-2.1", "default"), ("cosmos3", "nano")]
)
def test_such_denoisers_train(pool: Pool, tmp_path: Path, name: str, flavour: str) -> None:
    """Cosmos 3 has none; its micro-batch cannot be two samples, which the data room asks about."""
    family = load_registry().get(name)
    spec = small_spec(family, family.flavours()[flavour])
    sizes, _ = small_batch(family, spec)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(spec.config))
    batch = {
        key: getattr(sizes.batch, key)
        for key in ("micro_batch", "sequence_length", "height", "width", "frames")
    }
    recipe = {
        "model": {"reference": str(model), "weights": "random"},
        "data": {"source": "synthetic"},
        "batch": batch,
        "steps": 1,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    config = Path(__file__).parents[2] / "examples" / "configs" / "two_cpu_processes.yaml"
    recipe_runs.write_folder(tmp_path / "run", tmp_path / "recipe.yaml", config)
    ended = pool.run(recipe_runs.work_in, 2, str(tmp_path / "run"))
    assert [(item["status"], item["step"]) for item in ended] == [("completed", 1)] * 2
