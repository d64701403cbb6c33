"""The first stage for classes that read images or sound: how a small model is called, and one step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import inputs
from classes import Subject

from fsdptool.families.synthetic import synthesise

BATCH = 2
ATTEMPTS = 24
"""Ways of calling a class that are tried at most."""


def tried(subject: Subject, model: Any) -> dict[str, Any]:
    """Call a model as each candidate says; return the first that yields a loss and its gradients.

    Raises:
        ValueError: None does; the message is that of the last attempt.
    """
    errors = []
    for listing in itertools.islice(ways(subject, model), ATTEMPTS):
        try:
            return step(model, listing)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}")
        model.zero_grad(set_to_none=True)
    # The likeliest way comes first: its message is the one that tells.
    raise ValueError(errors[0] if errors else "no inputs are known")


def ways(subject: Subject, model: Any) -> Iterator[inputs.Listing]:
    """Yield the candidates of a class."""
    seen: list[inputs.Listing] = []
    for listing in inputs.candidates(subject.name, model):
        if listing not in seen:
            seen.append(listing)
            yield listing


def step(model: Any, listing: inputs.Listing) -> dict[str, Any]:
    """Run a forward and a backward, with a target of the output's shape if the class returns no loss."""
    import torch

    from fsdptool.families.bases.batches import listed_inputs
    from fsdptool.families.objectives import ModuleLoss

    def run(listing: inputs.Listing) -> Any:
        objective = ModuleLoss(inputs=listing)
        batch = synthesise(listed_inputs(listing, BATCH), torch.Generator().manual_seed(0))
        prediction = objective.predict(model, batch)
        output = prediction["prediction"]
        if output.numel() == 1 or "target" in listing:
            return objective.loss(prediction, batch), listing
        if output.shape[0] != BATCH:
            raise ValueError(f"the output has {output.shape[0]} rows for {BATCH} samples")
        return None, {**listing, "target": inputs.floats(*output.shape[1:])}

    loss, listing = run(listing)
    if loss is None:
        loss, listing = run({key: item for key, item in listing.items() if key != "labels"})
        if loss is None:
            loss, listing = run(listing)
    loss.backward()
    value = float(loss)
    if not math.isfinite(value):
        raise ValueError(f"the loss is {value}")
    if not any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError("no parameter has a gradient")
    return {"loss": round(value, 4), "inputs": listing}
