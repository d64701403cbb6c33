"""What the pool's ranks see of a model's inputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from cases import CASES, MICRO_BATCHES, inputs_for
from ranks import share
from torch import nn

from fsdptool.distributed.session import open_session
from fsdptool.records.recipe import Recipe
from fsdptool.training.trainer import assemble


def arrived(folder: Path, recipe: Recipe, mixed_precision: str) -> list[dict[str, Any]]:
    """Take a step; return what time and latents were when they came to the layers that embed them."""
    inputs = inputs_for(CASES["flow"], folder, recipe, mixed_precision=mixed_precision)
    session = open_session(inputs.settings)
    assembled = assemble(inputs, session)
    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[name] = (str(args[0].dtype), args[0].double().flatten()[:4].tolist())

        return hook

    assembled.model.get_submodule("time_text_embed.time_proj").register_forward_pre_hook(note("time"))
    assembled.model.get_submodule("pos_embed").register_forward_pre_hook(note("latents"))
    batches = share(session, 0, "flow", MICRO_BATCHES, torch.float32)
    last = batches[-1]["sigma"].double() * 1000
    outcome = assembled.stepper.run(batches, rate=1e-3)
    return [{**seen, "wanted": last.flatten()[:4].tolist(), "loss": outcome.loss}]


def with_dtype(recipe: Recipe, dtype: str, teacher: str | None = None) -> Recipe:
    """Build the model, and its teacher, in other dtypes."""
    method = recipe.method
    if method.distillation is not None and teacher is not None:
        choice = dataclasses.replace(method.distillation.teacher, dtype=teacher)
        method = dataclasses.replace(
            method, distillation=dataclasses.replace(method.distillation, teacher=choice)
        )
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dtype=dtype), method=method)
