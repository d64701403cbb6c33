"""Optimizers over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptool.errors import ConfigError
from fsdptool.training.shard import local

if TYPE_CHECKING:
    from fsdptool.records.recipe import Optimizer

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def decays(parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices and larger, not to norms and biases."""
    return parameter.dim() >= 2


class Update:
    """An optimizer that works on each rank's own rows.

    AdamW and SGD change every element by itself, so a rank's rows are plain tensors to them: no
    DTensor dispatch (which costs seconds at the first step and microseconds per tensor later), and
    every kernel there is (fused SGD has no sharding rule in torch 2.13). Adafactor looks at whole
    rows and columns and gets the DTensors.

    Attributes:
        torch_optimizer: The optimizer itself.
    """

    def __init__(
        self, wanted: Optimizer, named: NamedParameters, *, rate: float, device: torch.device
    ) -> None:
        self._names = {name: p for name, p in named if p.requires_grad}
        if not self._names:
            raise ConfigError("nothing to train: every parameter is frozen", help="check method and targets")
        self._by_rows = wanted.name != "adafactor"
        self._stand_ins = {
            name: nn.Parameter(local(p).detach()) if self._by_rows else p for name, p in self._names.items()
        }
        groups = _groups(wanted, [(p, self._stand_ins[name]) for name, p in self._names.items()])
        self.torch_optimizer = _make(wanted, groups, rate, device)

    def step(self, rate: float) -> None:
        """Change the parameters by their gradients at learning rate ``rate``."""
        for group in self.torch_optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._by_rows:
            for name, parameter in self._names.items():
                stand_in = self._stand_ins[name]
                # FSDP pads uneven shards into new storage at the first forward (torch 2.13).
                stand_in.data = local(parameter).detach()
                stand_in.grad = None if parameter.grad is None else local(parameter.grad)
        self.torch_optimizer.step()
        if self._by_rows:
            for stand_in in self._stand_ins.values():
                stand_in.grad = None

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for parameter in self._names.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return every optimizer state tensor as ``<fqn>/<state>``, live; made if there are none yet.

        States as large as the rows come as DTensors with their parameter's placements.
        """
        if not self.torch_optimizer.state:
            self._create_states()
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._names.items():
            for key, value in self.torch_optimizer.state[self._stand_ins[name]].items():
                if isinstance(value, torch.Tensor):
                    found[f"{name}/{key}"] = _as_sharded(value, parameter)
        return found

    def _create_states(self) -> None:
        """Make every state exist, without changing a parameter.

        States come into being at the first step (torch 2.13), and a checkpoint is loaded into live
        tensors. A step with zero gradients at rate zero makes them; what it does to them is undone.
        """
        optimizer = self.torch_optimizer
        saved = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        for stand_in in self._stand_ins.values():
            stand_in.grad = torch.zeros_like(stand_in)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, (rate, decay) in zip(optimizer.param_groups, saved, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    local(value).zero_()


def build_optimizer(
    wanted: Optimizer, named: NamedParameters, *, rate: float, device: torch.device
) -> Update:
    """Return the optimizer of a run over its trainable parameters.

    Args:
        wanted: The recipe's choice.
        named: Names and parameters, each parameter once.
        rate: Base learning rate; the loop gives the scheduled one with each step.
        device: Where shards live (``cpu`` under offload): kernels follow it.

    Raises:
        ConfigError: The optimizer needs a library that is not installed, or a kernel this device lacks.
    """
    return Update(wanted, named, rate=rate, device=device)


def _as_sharded(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != local(parameter).shape or value.dim() == 0:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _groups(wanted: Optimizer, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> list[dict[str, Any]]:
    """Group stand-ins by weight decay, and DTensors apart from plain tensors.

    A kernel call takes DTensors or plain tensors, not both (torch 2.13, fused and foreach alike).
    """
    groups = []
    for decay in (True, False):
        for sharded in (True, False):
            chosen = [s for p, s in pairs if decays(p) is decay and isinstance(s, DTensor) is sharded]
            if chosen:
                groups.append({"params": chosen, "weight_decay": wanted.weight_decay if decay else 0.0})
    return groups


def _make(
    wanted: Optimizer, groups: list[dict[str, Any]], rate: float, device: torch.device
) -> torch.optim.Optimizer:
    if wanted.name == "adamw8bit":
        return _adamw8bit(wanted, groups, rate, device)
    kernels = _kernels(wanted, device)
    if wanted.name == "adafactor":
        # torch's own takes epsilons of another meaning; its defaults are the paper's.
        return torch.optim.Adafactor(groups, lr=rate, foreach=kernels["foreach"])
    if wanted.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=wanted.momentum, **kernels)
    return torch.optim.AdamW(groups, lr=rate, betas=wanted.betas, eps=wanted.epsilon, **kernels)


def _kernels(wanted: Optimizer, device: torch.device) -> dict[str, bool]:
    """Name the implementation outright: torch's own default differs between devices."""
    chosen = wanted.implementation
    if wanted.name == "adafactor":
        if chosen == "fused":
            raise ConfigError("optimizer.implementation: adafactor has no fused kernel", help="use foreach")
        return {"foreach": chosen == "foreach"}
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
