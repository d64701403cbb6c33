"""Optimizers over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.training.shard import local

if TYPE_CHECKING:
    from fsdptool.records.recipe import Optimizer

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def decays(parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices and larger, not to norms and biases."""
    return parameter.dim() >= 2


def build_optimizer(
    wanted: Optimizer, named: NamedParameters, *, rate: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of a run over its trainable parameters.

    Args:
        wanted: The recipe's choice.
        named: Names and parameters, each parameter once.
        rate: Base learning rate; the loop sets the scheduled one before each step.
        device: Where shards live (``cpu`` under offload): fused and foreach kernels follow it.

    Raises:
        ConfigError: The optimizer needs a library that is not installed, or a kernel this device lacks.
    """
    trainable = [parameter for _, parameter in named if parameter.requires_grad]
    if not trainable:
        raise ConfigError("nothing to train: every parameter is frozen", help="check method and targets")
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if decays(p)], "weight_decay": wanted.weight_decay},
        {"params": [p for p in trainable if not decays(p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if wanted.name == "adamw8bit":
        return _adamw8bit(wanted, groups, rate, device)
    if wanted.name == "adafactor":
        # torch's own (2.5 on) takes epsilons of another meaning; its defaults are the paper's.
        return torch.optim.Adafactor(groups, lr=rate, foreach=_kernels(wanted, device)["foreach"])
    if wanted.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=wanted.momentum, **_kernels(wanted, device))
    return torch.optim.AdamW(
        groups, lr=rate, betas=wanted.betas, eps=wanted.epsilon, **_kernels(wanted, device)
    )


def _kernels(wanted: Optimizer, device: torch.device) -> dict[str, bool]:
    """Name the implementation outright: torch's own default differs between devices."""
    chosen = wanted.implementation
    if wanted.name == "adafactor":
        if chosen == "fused":
            raise ConfigError("optimizer.implementation: adafactor has no fused kernel", help="use foreach")
        return {"foreach": chosen != "for_loop" and device.type == "cuda", "fused": False}
    if chosen == "auto":
        chosen = "fused"
    return {"fused": chosen == "fused", "foreach": chosen == "foreach"}


def _adamw8bit(
    wanted: Optimizer, groups: list[dict[str, Any]], rate: float, device: torch.device
) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "optimizer adamw8bit needs bitsandbytes, which is not installed",
            help="pip install bitsandbytes, or use adamw",
        ) from error
    if device.type != "cuda":
        raise ConfigError("optimizer adamw8bit needs CUDA", help="use adamw")
    made: torch.optim.Optimizer = AdamW8bit(groups, lr=rate, betas=wanted.betas, eps=wanted.epsilon)
    return made


def create_states(optimizer: torch.optim.Optimizer) -> None:
    """Make every optimizer state exist, without changing a parameter.

    States come into being at the first step (torch 2.13); a checkpoint is loaded into live tensors.
    A step with zero gradients at rate zero makes them; what it did to them (moments stay zero, step
    counts rise) is undone.
    """
    saved = [(group, group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr, decay in saved:
        group["lr"] = lr
        if "weight_decay" in group:
            group["weight_decay"] = decay
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                local(value).zero_()


def state_tensors(optimizer: torch.optim.Optimizer, named: NamedParameters) -> dict[str, torch.Tensor]:
    """Return every optimizer state tensor as ``<fqn>/<state>``, live."""
    names = {id(parameter): name for name, parameter in named}
    found = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{names[id(parameter)]}/{key}"] = value
    return found
