"""Measure the error of a denoiser's prediction when its time is rounded to bfloat16.

Each family's small model, with random weights, predicts at one noise level in fp32 and twice in bfloat16:
with every floating-point input cast, as FSDP2's root (``cast_forward_inputs``) and therefore accelerate do,
and with times left in fp32, as the trainer does (``Family.exact_inputs``). The error is the norm of the
difference from the fp32 prediction, divided by the norm of that prediction.

    python benchmarks/training/exact_times.py
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from paired import head, parser
from torch import nn
from torch.distributed.utils import _apply_to_tensors

from fsdptool.families.protocol import Family, Objective
from fsdptool.families.registry import load_registry
from fsdptool.testing.families import small_model

SIGMA = 0.9371


def main() -> None:
    """Compare and write the result."""
    options = parser(__doc__, "training_exact_times")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    results = {}
    for family in load_registry().all():
        if family.exact_inputs and (errors := compare(family)) is not None:
            results[family.name] = errors
            sys.stdout.write(f"{family.name}: {json.dumps(errors)}\n")
            sys.stdout.flush()
    document = {
        **head("error of a bf16 prediction over the fp32 one's norm", sigma=SIGMA),
        "families": results,
    }
    chosen.output.write_text(json.dumps(document, indent=2) + "\n")


def compare(family: Family) -> dict[str, float] | None:
    """Return both errors of a family's first flavour, or None if they cannot be compared."""
    flavour = next(iter(family.flavours().values()), None)
    small = small_model(family, flavour) if flavour is not None else None
    if small is None or "sigma" not in small.batch:
        return None
    batch = {**small.batch, "sigma": torch.full_like(small.batch["sigma"], SIGMA)}
    model = small.model.eval()
    exact = predict(model, small.objective, batch)
    if not exact.any():  # its last layer begins at zero
        return None
    errors = {}
    for name, kept in (("rounded", ()), ("exact", family.exact_inputs)):
        predicted = predict(lowered(model, kept), small.objective, batch)
        errors[name] = float((predicted - exact).norm() / exact.norm())
    return errors


def lowered(model: nn.Module, kept: Collection[str]) -> nn.Module:
    """Return a copy with bf16 parameters, unchanged buffers, that casts its inputs except ``kept``."""
    duplicate = copy.deepcopy(model)
    for parameter in duplicate.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        left = {name: value for name, value in kwargs.items() if name in kept}
        return _apply_to_tensors(cast, args), {**_apply_to_tensors(cast, kwargs), **left}

    duplicate.register_forward_pre_hook(hook, with_kwargs=True)
    return duplicate


@torch.no_grad()
def predict(model: nn.Module, objective: Objective, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the prediction in fp32."""
    return objective.predict(model, batch)["prediction"].float()


if __name__ == "__main__":
    main()
