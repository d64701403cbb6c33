"""The order in which a model is changed before it is sharded, for the tracer and the trainer alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.modeling.activation_checkpointing import checkpoint_units
from fsdptool.modeling.methods import method_of
from fsdptool.modeling.methods.float8 import convert_layers
from fsdptool.modeling.tensor_group import TensorGroup
from fsdptool.modeling.tensor_parallel import split

if TYPE_CHECKING:
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Recipe
    from fsdptool.records.sharding import FsdpSettings, UnitPlan

Change = Callable[[nn.Module], None]
"""Changes a model in place, or looks at it."""

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def prepare_model(
    model: nn.Module,
    spec: ModelSpec,
    recipe: Recipe | None,
    settings: FsdpSettings,
    plan: UnitPlan,
    group: TensorGroup,
    *,
    float8_device: torch.device | None,
    after_method: Change | None = None,
    head: Change | None = None,
    compile: Change | None = None,
    shorten: Change | None = None,
) -> None:
    """Change a model that was just built into the one that ``fully_shard`` is called on.

    Args:
        model: On meta, as published; changed in place.
        spec: The model's family and configuration.
        recipe: Gives the training method; None freezes the model (a teacher).
        settings: Say what activation checkpointing moves to the host, and whether layers train in float8.
        plan: The model's units, and how ranks divide its layers.
        group: This rank's groups of tensor and expert parallelism.
        float8_device: Where float8 layers will train. None leaves layers as they are: a trace plans them as
            bf16, because torchao's layers need a GPU's kernels.
        after_method: Called when the parameters are those of the run, still under their own names and whole;
            float8 layers are made after it.
        head: Lets the head compute the loss; None leaves the model its logits.
        compile: Compiles the blocks; None leaves them eager.
        shorten: For a trace of a plan that divides no layer: removes like blocks. It comes before the method,
            which then adds parameters to few blocks, and after activation checkpointing, because the plan
            lists the modules of every block.

    Raises:
        ConfigError: The method, the plan or float8 does not suit the model.
    """
    offload = settings.activation_checkpointing_offload
    if shorten is not None:
        assert plan.tensor is None and plan.experts is None
        checkpoint_units(model, plan, offload=offload)
        shorten(model)
    # Method: it decides which parameters exist and which are trained; all that follows counts them.
    if recipe is None:
        model.requires_grad_(False)
        model.eval()
    else:
        method_of(recipe).prepare(model, recipe, family_of(spec), spec.config)
        model.train()
    if after_method is not None:
        after_method(model)
    if recipe is not None and float8_device is not None:
        convert_layers(model, recipe, settings, plan, float8_device)
    # Tensor and expert parallelism before anything that looks at parameters or wraps modules: what follows
    # sees a model of smaller layers.
    split(model, plan, group)
    # Master dtype before `fully_shard`, which fixes each parameter's storage.
    store_masters(model, plan)
    # Activation checkpointing inside FSDP's hooks: a unit is gathered before it is recomputed.
    if shorten is None:
        checkpoint_units(model, plan, offload=offload)
    if head is not None:
        head(model)
    # Compilation after it, so that the graph contains the recomputation, and before FSDP, whose hooks
    # (gather, reduce) stay outside the graph. Block by block: equal blocks share one compilation.
    if compile is not None:
        compile(model)


def store_masters(model: nn.Module, plan: UnitPlan) -> None:
    """Store every trainable parameter in the plan's master dtype; ``model`` is on meta."""
    dtype = to_dtype(plan.master_dtype)
    if dtype is None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def to_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of ``name``; None stays None.

    Raises:
        ConfigError: It is not a training dtype.
    """
    if name is None:
        return None
    if name not in _DTYPES:
        raise ConfigError(f"{name!r} is not a training dtype", help=f"choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
