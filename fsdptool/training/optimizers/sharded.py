"""The optimizer of a run over each rank's own rows, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptool.distributed.shard import grads_by_dtype, local, sharded_dimension, sharded_like
from fsdptool.errors import ConfigError
from fsdptool.modeling.methods.quantised_formats import load_kernels
from fsdptool.modeling.optimizer_costs import check_optimizer, optimizer_class, optimizer_spec
from fsdptool.records.recipe import Optimizer, Schedule

if TYPE_CHECKING:
    from fsdptool.records.recipe import Optimizer, Recipe
    from fsdptool.training.data.loader import Loader


def rate(schedule: Schedule, step: int, total: int | None) -> float:
    """Return the factor on the learning rate at ``step``.

    Args:
        schedule: Name, warm-up and floor.
        step: Optimizer steps already taken; 0 at the first.
        total: Steps of the whole run, or None when it has no end (then nothing decays).

    Linear warm-up reaches 1 after ``warmup_steps`` steps; the first step of a warm-up is not at
    zero, which would waste it. ``cosine`` is half a period down to ``minimum_ratio``.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant" or total is None:
        return 1.0
    span = max(total - schedule.warmup_steps, 1)
    done = min(max((step - schedule.warmup_steps) / span, 0.0), 1.0)
    falling = 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.minimum_ratio + (1.0 - schedule.minimum_ratio) * falling


def total_steps(recipe: Recipe, batches: Loader, samples_per_step: int) -> int:
    """Return the optimizer steps of the run.

    Raises:
        ConfigError: The recipe names neither ``steps`` nor ``epochs``.
    """
    if recipe.steps is not None:
        return recipe.steps
    if recipe.epochs is None:
        raise ConfigError("the recipe sets neither steps nor epochs", help="set one of them")
    return max(math.ceil(recipe.epochs * batches.samples_per_epoch / samples_per_step), 1)


def base_rate(optimizer: Optimizer, data_ranks: int) -> float:
    """Return the learning rate before the schedule, scaled with the ranks if the recipe asks for it."""
    factor = {"none": 1.0, "linear": float(data_ranks), "sqrt": math.sqrt(data_ranks)}
    return optimizer.learning_rate * factor[optimizer.scale_learning_rate]


NamedParameters = Iterable[tuple[str, nn.Parameter]]
Groups = list[dict[str, Any]]
Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]


def decays(parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices and larger, not to norms and biases."""
    return parameter.dim() >= 2


class ShardedOptimizer:
    """An optimizer that works on each rank's own rows; a subclass for each row of ``optimizer_costs``.

    AdamW and SGD change every element by itself, so a rank's rows are plain tensors to them: no
    DTensor dispatch (which costs seconds at the first step and microseconds per tensor later), and
    every kernel there is (fused SGD has no sharding rule in torch 2.13). Adafactor sums what spans
    ranks itself.

    Attributes:
        torch_optimizer: The optimizer itself.
    """

    def __init__(self, options: Optimizer, named: NamedParameters, *, rate: float) -> None:
        self._names = {name: p for name, p in named if p.requires_grad}
        if not self._names:
            raise ConfigError("nothing to train: every parameter is frozen", help="check method and targets")
        self._stand_ins = {name: nn.Parameter(local(p).detach()) for name, p in self._names.items()}
        pairs = [(p, self._stand_ins[name]) for name, p in self._names.items()]
        self.torch_optimizer = self._make(options, _groups(options, pairs), pairs, rate)

    def _make(self, options: Optimizer, groups: Groups, pairs: Pairs, rate: float) -> torch.optim.Optimizer:
        """Return the optimizer over the stand-ins."""
        raise NotImplementedError

    def step(
        self, rate: float, *, factor: torch.Tensor | None = None, skip: torch.Tensor | None = None
    ) -> None:
        """Change the parameters by their gradients.

        The host does not wait for ``factor`` and ``skip``, unless the parameters are offloaded to the CPU or
        the kernel cannot skip (:attr:`skips_on_device`).

        Args:
            rate: Learning rate.
            factor: What the gradients are multiplied by first, fp64 without dimensions.
            skip: Whether parameters and states stay as they are, boolean without dimensions.
        """
        for group in self.torch_optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        for name, parameter in self._names.items():
            stand_in = self._stand_ins[name]
            # FSDP pads uneven shards into new storage at the first forward (torch 2.13).
            stand_in.data = local(parameter).detach()
            stand_in.grad = self._gradient(parameter)
        stand_ins = self._stand_ins.values()
        device = next(iter(stand_ins)).device
        if factor is not None:
            _multiply(stand_ins, factor.to(device))
        if skip is None or self._heed(skip.to(device)):
            self._update()
        self._heed(None)
        for stand_in in stand_ins:
            stand_in.grad = None

    def _update(self) -> None:
        self.torch_optimizer.step()

    @property
    def skips_on_device(self) -> bool:
        """Whether the update reads on the device whether to change anything: torch's fused kernels do."""
        return bool(self.torch_optimizer.defaults.get("fused"))

    def _heed(self, skip: torch.Tensor | None) -> bool:
        """Tell the kernel whether it may change something; returns whether to call it."""
        if not self.skips_on_device:
            return not skip  # waits for the device
        # What torch.amp.GradScaler sets for fused optimizers (torch 2.13, ``amp/grad_scaler.py``).
        optimizer: Any = self.torch_optimizer
        optimizer.found_inf = None if skip is None else skip.float()
        return True

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return None if parameter.grad is None else local(parameter.grad)

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for parameter in self._names.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return every optimizer state tensor as ``<fqn>/<state>``, live; made if there are none yet.

        States as large as the rows come as DTensors with their parameter's placements.
        """
        self._create_states()
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._names.items():
            for key, value in self.torch_optimizer.state[self._stand_ins[name]].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = _as_sharded(key, value, parameter)
        return tensors

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return the states that mean something on this rank alone, live, by name."""
        return {}

    def restore_own(self, saved: Mapping[str, torch.Tensor] | None) -> None:
        """Take in what :meth:`own_tensors` gave when it was saved; None: on another number of ranks."""

    def _create_states(self) -> None:
        """Make every state exist, without changing a parameter.

        States come into being at the first step with a gradient (torch 2.13): none are there before the first
        step, nor those of parameters that no sample has used, and a checkpoint is loaded into live tensors. A
        step with zero gradients at rate zero makes them; what it does to them is undone.
        """
        optimizer = self.torch_optimizer
        absent = [stand_in for stand_in in self._stand_ins.values() if not optimizer.state.get(stand_in)]
        if not absent:
            return
        saved = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        for stand_in in absent:
            stand_in.grad = torch.zeros_like(stand_in)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, (rate, decay) in zip(optimizer.param_groups, saved, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        for stand_in in absent:
            for value in optimizer.state[stand_in].values():
                if isinstance(value, torch.Tensor):
                    local(value).zero_()


def _multiply(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply gradients by a number on their device, 16-bit ones in fp32."""
    for dtype, grads in grads_by_dtype(parameters).items():
        if dtype == torch.float64:
            torch._foreach_mul_(grads, factor)
        else:
            # `_foreach_mul_` would round the factor to 16 bits. Whether numbers are finite is known already.
            torch._amp_foreach_non_finite_check_and_unscale_(
                grads, torch.zeros_like(factor, dtype=torch.float32), factor.float()
            )


def _as_sharded(name: str, value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Describe a state that is cut as its parameter's rows are; anything else is equal on all ranks."""
    if not isinstance(parameter, DTensor) or value.dim() == 0:
        return value
    cut = sharded_dimension(parameter)
    # Column moments of a matrix span its rows; those of stacked matrices are cut with the stack.
    if value.dim() != parameter.dim() or (name == "col_var" and cut == parameter.dim() - 2):
        return value
    shape = torch.Size(
        parameter.shape[place] if place == cut else size for place, size in enumerate(value.shape)
    )
    return sharded_like(value, parameter, shape)


def _groups(options: Optimizer, pairs: Pairs) -> Groups:
    chosen = {decay: [s for p, s in pairs if decays(p) is decay] for decay in (True, False)}
    rates = {True: options.weight_decay, False: 0.0}
    return [{"params": members, "weight_decay": rates[decay]} for decay, members in chosen.items() if members]


class AdamW(ShardedOptimizer):
    """torch's AdamW."""

    def _make(self, options: Optimizer, groups: Groups, pairs: Pairs, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups, lr=rate, betas=options.betas, eps=options.epsilon, **torch_kernel(options)
        )


class Sgd(ShardedOptimizer):
    """torch's SGD."""

    def _make(self, options: Optimizer, groups: Groups, pairs: Pairs, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=rate, momentum=options.momentum, **torch_kernel(options))

    def _heed(self, skip: torch.Tensor | None) -> bool:
        # A skipped first step would leave the momentum as the allocator found it (torch 2.13, ``sgd.py``).
        if skip is not None and self.skips_on_device and self.torch_optimizer.defaults["momentum"]:
            for stand_in in self._stand_ins.values():
                state = self.torch_optimizer.state[stand_in]
                if stand_in.grad is not None and not state:
                    state["momentum_buffer"] = torch.zeros_like(stand_in)
        return super()._heed(skip)


def torch_kernel(options: Optimizer) -> dict[str, bool]:
    """Name the implementation outright: torch's own default differs between devices."""
    kernel = optimizer_spec(options).kernel(options.implementation)
    return {"fused": kernel == "fused", "foreach": kernel == "foreach"}


def build_optimizer(options: Optimizer, named: NamedParameters, *, rate: float) -> ShardedOptimizer:
    """Return the optimizer of a run over its trainable parameters.

    Args:
        options: The recipe's choice.
        named: Names and parameters, each parameter once.
        rate: Base learning rate; the loop gives the scheduled one with each step.

    Raises:
        ConfigError: The optimizer needs a library that is not installed, or has no such kernel.
    """
    check_optimizer(options)
    optimizer: ShardedOptimizer = optimizer_class(optimizer_spec(options))(options, named, rate=rate)
    return optimizer


_STATES = ("state1", "state2", "absmax1", "absmax2")
"""Codes and scales; small parameters have fp32 moments and no scales. The tables of codes are constants."""


class EightBitAdamW(ShardedOptimizer):
    """AdamW8bit over each rank's own rows.

    A scale belongs to 256 neighbouring elements of a rank's rows (bitsandbytes 0.50,
    ``Optimizer2State.init_state``). Other ranks' blocks begin elsewhere, so states are saved by rank and
    never divided again.
    """

    def _make(self, options: Optimizer, groups: Groups, pairs: Pairs, rate: float) -> torch.optim.Optimizer:
        load_kernels()
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(
            groups, lr=rate, betas=options.betas, eps=options.epsilon
        )
        return optimizer

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        gradient = super()._gradient(parameter)
        # A rank without rows has nothing to start a kernel for.
        return gradient if gradient is not None and gradient.numel() else None

    @torch.no_grad()
    def _update(self) -> None:
        """Step as bitsandbytes does, but do not wait for the device after every parameter (0.50)."""
        optimizer: Any = self.torch_optimizer
        self._make_states()
        for number, group in enumerate(optimizer.param_groups):
            for index, stand_in in enumerate(group["params"]):
                if stand_in.grad is not None:
                    optimizer.update_step(group, stand_in, number, index)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return nothing: no state is shared by the ranks."""
        return {}

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's states as ``optimizer/<fqn>/<state>``, live, and a copy of the step count."""
        tensors: dict[str, torch.Tensor] = {}
        for name, state in self._states():
            tensors |= {f"optimizer/{name}/{key}": state[key] for key in _STATES if key in state}
            # A number here, and not a tensor as torch's own optimizers have it.
            tensors[f"optimizer/{name}/step"] = torch.tensor(state["step"])
        return tensors

    def restore_own(self, saved: Mapping[str, torch.Tensor] | None) -> None:
        """Continue with saved states.

        Raises:
            ConfigError: They were saved on another number of ranks.
        """
        if saved is None:
            raise ConfigError(
                "the 8-bit states of optimizer adamw8bit were saved on another number of ranks, and their"
                " blocks cannot be resharded",
                help="resume on as many ranks as before, or start a run from its exported weights",
            )
        for name, state in self._states():
            for key in _STATES:
                if key in state:
                    state[key].copy_(saved[f"optimizer/{name}/{key}"])
            state["step"] = int(saved[f"optimizer/{name}/step"])

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every parameter's states; made if there are none yet."""
        self._make_states()
        for name in self._names:
            yield name, self.torch_optimizer.state[self._stand_ins[name]]

    def _make_states(self) -> None:
        optimizer: Any = self.torch_optimizer
        for number, group in enumerate(optimizer.param_groups):
            for index, stand_in in enumerate(group["params"]):
                if not optimizer.state[stand_in]:
                    optimizer.init_state(group, stand_in, number, index)
