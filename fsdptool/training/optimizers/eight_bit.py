"""AdamW with moments in 8 bits (bitsandbytes), whose states belong to the rank that made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fsdptool.errors import ConfigError
from fsdptool.modeling.methods.quantised_formats import load_kernels
from fsdptool.training.optimizers.sharded import Groups, Pairs, ShardedOptimizer

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.records.recipe import Optimizer

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
                " blocks cannot be divided again",
                help="resume on as many ranks as before, or start a run from its exported weights",
            )
        for name, state in self._states():
            for key in _STATES:
                if key in state:
                    state[key].copy_(saved[f"optimizer/{name}/{key}"])
            state["step"] = int(saved[f"optimizer/{name}/step"])

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every parameter's states; made if there are none yet."""
        optimizer: Any = self.torch_optimizer
        for number, group in enumerate(optimizer.param_groups):
            for index, stand_in in enumerate(group["params"]):
                if not optimizer.state[stand_in]:
                    optimizer.init_state(group, stand_in, number, index)
        for name in self._names:
            yield name, optimizer.state[self._stand_ins[name]]
