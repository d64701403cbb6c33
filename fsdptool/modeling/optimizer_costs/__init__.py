"""Every optimizer a recipe may name: what it stores, what its update needs, and the class that builds it.

One row per optimizer. The memory model, the time model, the search, the preflight and the trainer ask it;
nothing else tests an optimizer's name. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.modeling.optimizer_costs.adafactor import adafactor_states, adafactor_temporaries
from fsdptool.modeling.optimizer_costs.elementwise import (
    adamw_states,
    adamw_temporaries,
    eight_bit_states,
    no_temporaries,
    sgd_states,
)
from fsdptool.modeling.optimizer_costs.muon import check_muon, muon_states, muon_temporaries, muon_work
from fsdptool.modeling.optimizer_costs.tensors import Trained, TrainedTensor, UpdateWork
from fsdptool.records.recipe import Optimizer


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """One optimizer.

    Attributes:
        name: ``optimizer.name``.
        builder: ``module:class`` of the :class:`~fsdptool.training.optimizers.sharded.ShardedOptimizer`.
        kernels: What ``optimizer.implementation`` may name; ``auto`` is the first, ``own`` is not named.
        states: Bytes of each state of a tensor, for (recipe, tensor, kernel, whether on CUDA).
        temporaries: Bytes of what is alive at the worst moment of an update besides states and gradients,
            for (recipe, trained tensors, kernel, whether on CUDA).
        update_bytes: Bytes an update moves per element in fp32, by kernel: gradient, weight and states are
            read, weight and states written.
        passes: Kernels per tensor where each operation is one.
        work: Matrix products and communication of an update, for (recipe, trained tensors).
        elementwise: Whether it changes every element by itself, with states of the parameter's shape.
        library: Python module it needs besides torch, or None.
        check: Raises ``ConfigError`` for options the optimizer cannot use.
    """

    name: str
    builder: str
    kernels: tuple[str, ...]
    states: Callable[[Optimizer, TrainedTensor, str, bool], list[int]]
    temporaries: Callable[[Optimizer, Trained, str, bool], list[int]]
    update_bytes: Mapping[str, int]
    passes: int
    work: Callable[[Optimizer, Trained], UpdateWork] = field(default=lambda optimizer, trained: UpdateWork())
    elementwise: bool = True
    library: str | None = None
    check: Callable[[Optimizer], None] = field(default=lambda optimizer: None)

    def kernel(self, implementation: str) -> str:
        """Return the kernel an ``optimizer.implementation`` means.

        Raises:
            ConfigError: The optimizer has no such kernel.
        """
        if implementation == "auto":
            return self.kernels[0]
        if implementation not in self.kernels:
            raise ConfigError(
                f"optimizer.implementation: {self.name} has no {implementation} kernel",
                help="leave it at auto",
            )
        return implementation

    def operators(self, kernel: str, tensors: int) -> int:
        """Return how many kernels an update of ``tensors`` tensors launches."""
        if kernel == "for_loop":
            return tensors * self.passes
        # Multi-tensor kernels take about a hundred tensors at a time (``ForeachUtils.h``, torch 2.13).
        return -(-tensors // 100) * (self.passes if kernel == "foreach" else 1)


_TORCH_KERNELS = ("fused", "foreach", "for_loop")

OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec(
            name="adamw",
            builder="fsdptool.training.optimizers.sharded:AdamW",
            kernels=_TORCH_KERNELS,
            states=adamw_states,
            temporaries=adamw_temporaries,
            update_bytes={"fused": 28, "foreach": 84, "for_loop": 84},
            passes=12,
        ),
        OptimizerSpec(
            name="adamw8bit",
            builder="fsdptool.training.optimizers.sharded:EightBitAdamW",
            elementwise=False,
            kernels=("fused",),
            states=eight_bit_states,
            temporaries=no_temporaries,
            update_bytes={"fused": 16},
            passes=1,
            library="bitsandbytes",
        ),
        OptimizerSpec(
            name="adafactor",
            builder="fsdptool.training.optimizers.adafactor:Adafactor",
            elementwise=False,
            kernels=("own", "for_loop"),
            states=adafactor_states,
            temporaries=adafactor_temporaries,
            # The update is computed twice: once for its size, once to be applied.
            update_bytes={"own": 32, "for_loop": 32},
            passes=20,
        ),
        OptimizerSpec(
            name="sgd",
            builder="fsdptool.training.optimizers.sharded:Sgd",
            kernels=_TORCH_KERNELS,
            states=sgd_states,
            temporaries=no_temporaries,
            update_bytes={"fused": 12, "foreach": 20, "for_loop": 20},
            passes=3,
        ),
        OptimizerSpec(
            name="muon",
            builder="fsdptool.training.optimizers.muon:MuonOptimizer",
            elementwise=False,
            kernels=_TORCH_KERNELS,
            states=muon_states,
            temporaries=muon_temporaries,
            # The momentum is mixed, read again and cast, the rows are copied out and added.
            update_bytes={"fused": 48, "foreach": 48, "for_loop": 48},
            passes=12,
            work=muon_work,
            check=check_muon,
        ),
    )
}
"""By name; a test holds it equal to the recipe's choices and to docs/reference/optimizers.md."""


def optimizer_spec(optimizer: Optimizer) -> OptimizerSpec:
    """Return the row of a recipe's optimizer."""
    return OPTIMIZERS[optimizer.name]


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse what cannot be built here.

    Raises:
        ConfigError: The optimizer has no such kernel, or needs a library that is not installed.
    """
    spec = optimizer_spec(optimizer)
    spec.kernel(optimizer.implementation)
    spec.check(optimizer)
    if spec.library is not None and find_spec(spec.library) is None:
        raise ConfigError(
            f"optimizer {spec.name} needs {spec.library}, which is not installed",
            help=f"pip install {spec.library}, or use adamw",
        )


def optimizer_class(spec: OptimizerSpec) -> Any:
    """Return the class that builds an optimizer; imports torch."""
    module, _, name = spec.builder.partition(":")
    return getattr(import_module(module), name)
