"""float8 training of whole weights (``mixed_precision: fp8``): torchao's layers, before sharding.

Weights stay what they were: names, masters, checkpoints and exports are those of a bf16 run, and FSDP2
gathers bf16. A converted layer rounds its input, its weight and the gradient of its output to float8,
each with one scale per tensor that is computed each time, and multiplies those.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.bases.families import quiet
from fsdptool.modeling.methods import method_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdptool.records.recipe import Recipe
    from fsdptool.records.sharding import FsdpSettings

EMULATE = "FSDPTOOL_EMULATE_FLOAT8"
"""Set to 1 in the environment, layers round to float8 and multiply in wider numbers, on any device."""

PLANNED = (
    "fp8 is planned as bf16, in memory and, unless blocks are compiled, in time; float8 copies of one layer's"
    " input and weight are added while that layer computes"
)
"""What a plan says of fp8."""

_MULTIPLE = 16
"""Rows and columns ``torch._scaled_mm`` takes (torch 2.13)."""

_CAPABILITY = (8, 9)
"""First compute capability with float8 tensor cores (Ada)."""


def convert_layers(model: nn.Module, recipe: Recipe, settings: FsdpSettings, device: torch.device) -> int:
    """Replace the trained linear layers of the blocks by torchao's, where the file asks for fp8.

    Args:
        model: On meta, the method applied, not yet sharded.
        recipe: Gives the method.
        settings: Gives ``mixed_precision``.
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
    chosen = _layers(model)
    if not chosen:
        raise ConfigError(
            f"mixed_precision fp8: no layer in the blocks of {type(model).__name__} can be converted",
            help=f"rows and columns must be multiples of {_MULTIPLE}; use bf16",
        )
    with quiet("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    # Tokens of a micro-batch are the inner dimension of the weight's gradient: padded to what kernels take.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda module, path: path in chosen, config=config)
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


def _layers(model: Any) -> set[str]:
    from torch import nn

    from fsdptool.modeling.methods.quantised_layers import in_blocks

    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {
        path
        for path, module in in_blocks(model)
        if type(module) is nn.Linear
        and module.weight.requires_grad
        and shared[id(module.weight)] == 1
        and not module.in_features % _MULTIPLE
        and not module.out_features % _MULTIPLE
    }
