"""Which optimizer a recipe means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.training.optimizers.update import NamedParameters, Update

if TYPE_CHECKING:
    from fsdptool.records.recipe import Optimizer


def build_optimizer(wanted: Optimizer, named: NamedParameters, *, rate: float) -> Update:
    """Return the optimizer of a run over its trainable parameters.

    Args:
        wanted: The recipe's choice.
        named: Names and parameters, each parameter once.
        rate: Base learning rate; the loop gives the scheduled one with each step.

    Raises:
        ConfigError: The optimizer needs a library that is not installed, or has no such kernel.
    """
    if wanted.name == "adamw8bit":
        from fsdptool.training.optimizers.eight_bit import EightBitUpdate

        return EightBitUpdate(wanted, named, rate=rate)
    return Update(wanted, named, rate=rate)
