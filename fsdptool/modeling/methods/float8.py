"""float8 training of whole weights (``mixed_precision: fp8``): torchao's layers, before sharding.

Weights stay what they were: names, masters, checkpoints and exports are those of a bf16 run. A converted
layer rounds its input, its weight and the gradient of its output to float8, each with one scale per tensor
that is computed each time, and multiplies those. Of a weight that several ranks share, each rounds its own
rows, and FSDP2 gathers them in float8 (:func:`fsdptool.distributed.shard.gather_in_float8`).
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fsdptool.errors import ConfigError
from fsdptool.families.bases.families import quiet
from fsdptool.layout.group import FLOAT8_MULTIPLE
from fsdptool.modeling.methods import method_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdptool.records.recipe import Recipe
    from fsdptool.records.sharding import FsdpSettings, UnitPlan

EMULATE = "FSDPTOOL_EMULATE_FLOAT8"
"""Set to 1 in the environment, layers round to float8 and multiply in wider numbers, on any device."""

PLANNED = (
    "fp8 is planned as bf16, but for weights that are gathered in float8, in memory and, unless blocks are"
    " compiled, in time; float8 copies of one layer's input, and of its weight if that is gathered in bf16,"
    " are added while that layer computes"
)
"""What a plan says of fp8."""

_CAPABILITY = (8, 9)
"""First compute capability with float8 tensor cores (Ada)."""


def convert_layers(
    model: nn.Module, recipe: Recipe, settings: FsdpSettings, plan: UnitPlan, device: torch.device
) -> int:
    """Replace the linear layers whose weights the plan lists by torchao's, where the file asks for fp8.

    Args:
        model: On meta, the method applied, not yet sharded.
        recipe: Gives the method.
        settings: Gives ``mixed_precision``.
        plan: Gives the weights.
        device: Where it will train.

    Returns:
        How many layers were converted; 0 unless the precision is fp8.

    Raises:
        ConfigError: The device, the method or an absent library rules float8 out.
    """
    if settings.mixed_precision != "fp8":
        return 0
    method_of(recipe).check(recipe, settings)
    emulate = os.environ.get(EMULATE) == "1"
    _check_device(device, emulate)
    chosen = {name.removesuffix(".weight") for name in plan.float8}
    if not chosen:
        raise ConfigError(
            f"mixed_precision fp8: no layer in the blocks of {type(model).__name__} can be converted",
            help=f"rows and columns must be multiples of {FLOAT8_MULTIPLE}; use bf16",
        )
    with quiet("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    # Tokens of a micro-batch are the inner dimension of the weight's gradient: padded to what kernels take.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda _module, path: path in chosen, config=config)
    return len(chosen)


def _check_device(device: torch.device, emulate: bool) -> None:
    if not emulate:
        _check_units(device)
    if find_spec("torchao") is None:
        raise ConfigError(
            "mixed_precision fp8 needs torchao, which is not installed",
            help="pip install torchao, or use bf16",
        )


def _check_units(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"mixed_precision fp8 needs float8 hardware, which this device ({device.type}) does not have",
            help="use bf16; fp8 needs a GPU of compute capability 8.9 or later",
        )
    import torch

    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        raise ConfigError(
            f"mixed_precision fp8 needs compute capability 8.9 or later and"
            f" {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}",
            help="use bf16",
        )
