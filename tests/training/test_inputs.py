"""Inputs follow the model's compute dtype, but for the times a denoiser embeds in fp32."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cases import CASES, prepare_case
from input_cases import arrived, with_dtype
from pool import Pool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("method", "dtype", "teacher", "mixed_precision"),
    [
        ("full", "float32", None, "bf16"),
        ("full", "bfloat16", None, "no"),
        ("lora", "bfloat16", None, "no"),
        ("distillation", "bfloat16", "float32", "no"),
        ("distillation", "float32", "bfloat16", "no"),
    ],
)
def test_latents_are_cast_and_times_are_not(
    pool: Pool, tmp_path: Path, method: str, dtype: str, teacher: str | None, mixed_precision: str
) -> None:
    recipe, folder = prepare_case(CASES["flow"], tmp_path, method)
    recipe = with_dtype(recipe, dtype, teacher)
    compute = "torch.bfloat16" if mixed_precision == "bf16" else f"torch.{dtype}"
    for (seen,) in pool.run(arrived, 2, folder, recipe, mixed_precision):
        assert seen["latents"][0] == compute
        assert seen["time"][0] == "torch.float32"
        assert seen["time"][1] == pytest.approx(seen["wanted"], rel=1e-6)
        assert math.isfinite(seen["loss"])
