"""Every optimizer a recipe may name: what it stores, what its update needs, and the class that builds it.

One row per optimizer. The memory model, the time model, the search, the preflight and the trainer ask it;
nothing else tests an optimizer's name. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Optimizer

_EIGHT_BIT_BLOCK = 256
"""Elements per quantisation block of 8-bit AdamW (bitsandbytes 0.50)."""
_EIGHT_BIT_FROM = 4096
"""Elements from which bitsandbytes quantises a tensor's states (``Optimizer2State.init_state``)."""


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """A trained parameter as one rank stores it.

    Attributes:
        fqn: Its name.
        shape: Global shape.
        rows: Shape of this rank's shard, padded as every rank allocates it.
        width: Bytes per stored element.
        ranks: Ranks that share it; 1 where it is whole.
    """

    fqn: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    width: int
    ranks: int = 1

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return prod(self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of the shard."""
        return self.numel * self.width


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """What an update does besides moving states through memory.

    Attributes:
        flops: Matrix products of one rank, in bfloat16.
        exchanged: Bytes one rank sends to those that share a copy.
        operators: Kernels of these products.
    """

    flops: float = 0.0
    exchanged: float = 0.0
    operators: int = 0


Trained = Sequence[TrainedTensor]


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
        update_bytes: Bytes an update moves per element, by kernel: gradient, weight and states are read,
            weight and states written.
        passes: Kernels per tensor where each operation is one.
        work: Matrix products and communication of an update, for (recipe, trained tensors).
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


def _adamw_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    """Two moments, and a step count that is a tensor on the device (fused) or on a CPU (torch 2.13)."""
    return [tensor.bytes, tensor.bytes, *([4] if kernel == "fused" or not cuda else [])]


def _eight_bit_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    if tensor.numel < _EIGHT_BIT_FROM:
        return [tensor.numel * 4] * 2
    return [tensor.numel, tensor.numel, *[-(-tensor.numel // _EIGHT_BIT_BLOCK) * 4] * 2]


def _adafactor_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    """A row and a column mean for matrices, else a full second moment; and a step count."""
    if len(tensor.rows) < 2:
        return [tensor.bytes, 4]
    rows = prod(tensor.rows[:-1])
    columns = prod(tensor.rows[:-2]) * tensor.rows[-1]
    return [rows * tensor.width, columns * tensor.width, 4]


def _sgd_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    return [tensor.bytes] if optimizer.momentum else []


def _no_temporaries(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    return []


def _adamw_temporaries(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """foreach AdamW holds the square roots of a parameter group's second moments (``_multi_tensor_adam``)."""
    if kernel == "fused" or not trained:
        return []
    if kernel == "foreach":
        return max(_groups(trained), key=sum)
    return _two_of_one(optimizer, trained, kernel, cuda)


def _two_of_one(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """Two temporaries of one parameter and one of the parameter before it.

    The previous parameter's denominator is still bound while the next one's is computed
    (``_single_tensor_adam``, torch 2.13; ``training/optimizers/adafactor.py``).
    """
    worst = [
        (size, size, before)
        for group in _groups(trained)
        for before, size in zip([0, *group], group, strict=False)
    ]
    return [size for size in max(worst, key=sum, default=()) if size]


def _groups(trained: Trained) -> list[list[int]]:
    """Sizes by parameter group: matrices, which decay, are one, everything else the other."""
    return [[t.bytes for t in trained if (len(t.rows) >= 2) is wide] for wide in (True, False)]


_TORCH_KERNELS = ("fused", "foreach", "for_loop")

OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec(
            name="adamw",
            builder="fsdptool.training.optimizers.sharded:AdamW",
            kernels=_TORCH_KERNELS,
            states=_adamw_states,
            temporaries=_adamw_temporaries,
            update_bytes={"fused": 28, "foreach": 84, "for_loop": 84},
            passes=12,
        ),
        OptimizerSpec(
            name="adamw8bit",
            builder="fsdptool.training.optimizers.eight_bit:EightBitAdamW",
            kernels=("fused",),
            states=_eight_bit_states,
            temporaries=_no_temporaries,
            update_bytes={"fused": 16},
            passes=1,
            library="bitsandbytes",
        ),
        OptimizerSpec(
            name="adafactor",
            builder="fsdptool.training.optimizers.adafactor:Adafactor",
            kernels=("own", "for_loop"),
            states=_adafactor_states,
            temporaries=_two_of_one,
            update_bytes={"own": 20, "for_loop": 20},
            passes=20,
        ),
        OptimizerSpec(
            name="sgd",
            builder="fsdptool.training.optimizers.sharded:Sgd",
            kernels=_TORCH_KERNELS,
            states=_sgd_states,
            temporaries=_no_temporaries,
            update_bytes={"fused": 12, "foreach": 20, "for_loop": 20},
            passes=3,
        ),
    )
}
"""By name; a test holds it equal to the recipe's choices and to docs/training.md."""


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
