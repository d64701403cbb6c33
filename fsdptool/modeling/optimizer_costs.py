"""Every optimizer a recipe may name: what it stores, what its update needs, and the class that builds it.

One row per optimizer. The memory model, the time model, the search, the preflight and the trainer ask it;
nothing else tests an optimizer's name. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.records.annotations import bounds_text, fields_of, permits
from fsdptool.records.recipe import Optimizer

_EIGHT_BIT_BLOCK = 256
"""Elements per quantisation block of 8-bit AdamW (bitsandbytes 0.50)."""
ADAFACTOR_PIECE = 1 << 22
"""Elements whose squares Adafactor sums at a time."""
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
    def spans_rows(self) -> bool:
        """Whether the rows of a matrix, or of each of fused experts, are spread over ranks."""
        return self.ranks > 1 and (len(self.shape) == 2 or self.rows[-2] < self.shape[-2])

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


def _adafactor_temporaries(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """One parameter's update, its copy in fp32 where it is narrower, and the squares of a piece of that."""
    if not trained:
        return []
    worst = max(trained, key=lambda tensor: tensor.numel)
    wide = max(worst.width, 4)
    copies = [worst.numel * wide] if worst.width < wide else []
    return [worst.bytes, *copies, min(worst.numel, ADAFACTOR_PIECE) * wide]


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
    (``_single_tensor_adam``, torch 2.13).
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


_EXPERT_ELEMENTS = 1 << 26
"""Elements of fused experts that Muon orthogonalises at once: 128 MiB in bfloat16."""


def is_hidden_matrix(fqn: str, shape: tuple[int, ...]) -> bool:
    """Return whether Muon updates a parameter: a matrix, or fused experts, inside a list of blocks.

    Embeddings, heads, norms and biases lie outside such a list or have another shape. An embedding inside
    a block (T5's relative positions) has its own name. transformers 5 calls every fused mixture ``experts``;
    other three-dimensional weights are convolutions.
    """
    *path, _ = parts = fqn.split(".")
    if not any(part.isdecimal() for part in path):
        return False
    if any("embed" in part or part.endswith("_bias") for part in parts):
        return False
    return min(shape[-2:], default=0) > 1 and (len(shape) == 2 or (len(shape) == 3 and "experts" in path))


def rounds_of(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return places of matrices in rounds of one per rank, largest first, so that rounds are even."""
    order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    return [order[start : start + ranks] for start in range(0, len(order), ranks)]


def expert_chunk(shape: tuple[int, ...], cuda: bool) -> int:
    """Return how many experts of a rank are orthogonalised at once.

    On a CPU one, as torch's Muon does: there, batches save nothing and can be rounded otherwise.
    """
    return max(_EXPERT_ELEMENTS // (shape[1] * shape[2]), 1) if cuda else 1


def _by_muon(trained: Trained) -> list[TrainedTensor]:
    return [tensor for tensor in trained if is_hidden_matrix(tensor.fqn, tensor.shape)]


def _muon_rounds(trained: Trained) -> list[list[TrainedTensor]]:
    """Return the matrices of each exchange, each of fused experts by itself.

    Experts that a group shares out are cut over fewer ranks than other matrices, and exchanged apart.
    """
    cut: dict[int, list[TrainedTensor]] = {}
    for tensor in _by_muon(trained):
        if tensor.spans_rows:
            matrix = replace(tensor, shape=tensor.shape[-2:], rows=tensor.rows[-2:])
            cut.setdefault(tensor.ranks, []).extend([matrix] * prod(tensor.shape[:-2]))
    return [
        [matrices[place] for place in places]
        for ranks, matrices in cut.items()
        for places in rounds_of([prod(t.shape) for t in matrices], ranks)
    ]


def _muon_whole(trained: Trained, cuda: bool) -> list[tuple[TrainedTensor, int]]:
    """Return what a rank orthogonalises without an exchange, and how many matrices of it at once."""
    own = [t for t in _by_muon(trained) if not t.spans_rows and t.numel]
    return [(t, min(expert_chunk(t.rows, cuda), t.rows[0]) if len(t.shape) == 3 else 1) for t in own]


def _muon_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    if is_hidden_matrix(tensor.fqn, tensor.shape):
        return [tensor.bytes]
    return _adamw_states(optimizer, tensor, kernel, cuda)


def _muon_temporaries(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """Newton-Schulz in bfloat16: two buffers of the matrix and two of its smaller side's square.

    Before it, rows wait in the send buffer while one matrix's momentum is mixed in the stored dtype.
    """
    others = [tensor for tensor in trained if not is_hidden_matrix(tensor.fqn, tensor.shape)]
    worst = [_adamw_temporaries(optimizer, others, kernel, cuda)]
    for places in _muon_rounds(trained):
        send = 2 * sum(tensor.numel for tensor in places)
        largest = places[0]
        worst.append([send, max(tensor.bytes for tensor in places)])
        worst.append([send, *_newton_schulz_bytes(largest.shape, 1, cuda)])
    for tensor, count in _muon_whole(trained, cuda):
        worst.append([count * prod(tensor.shape[-2:]) * tensor.width, 2 * count * prod(tensor.shape[-2:])])
        worst.append(_newton_schulz_bytes(tensor.shape[-2:], count, cuda))
    return max(worst, key=sum)


def _newton_schulz_bytes(shape: tuple[int, ...], count: int, cuda: bool) -> list[int]:
    """On a CPU, oneDNN also accumulates a bfloat16 product in float32 (torch 2.13)."""
    matrix, square = count * prod(shape), count * min(shape) ** 2
    return [2 * matrix] * 2 + [2 * square] * 2 + ([] if cuda else [4 * matrix])


def _muon_work(optimizer: Optimizer, trained: Trained) -> UpdateWork:
    """The slowest rank's products: the first matrix of every round, and its own experts."""
    steps = 5 if optimizer.muon is None else optimizer.muon.newton_schulz_steps

    def flops(shape: tuple[int, ...]) -> float:
        small, large = sorted(shape)
        return steps * (4.0 * small * small * large + 2.0 * small**3)

    rounds, whole = _muon_rounds(trained), _muon_whole(trained, cuda=True)
    total = sum(flops(places[0].shape) for places in rounds)
    batches = 0
    for tensor, count in whole:
        matrices = tensor.rows[0] if len(tensor.shape) == 3 else 1
        total += matrices * flops(tensor.shape[-2:])
        batches += -(-matrices // count)
    sent = sum(2 * 2 * tensor.numel for places in rounds for tensor in places)
    return UpdateWork(total, sent, (len(rounds) + batches) * (3 * steps + 6) + 4 * len(_by_muon(trained)))


def _check_muon(optimizer: Optimizer) -> None:
    options = optimizer.muon
    if options is None:
        return
    for name, option in fields_of(type(options)).items():
        value, bounds = getattr(options, name), option.annotation.bounds
        if isinstance(value, int | float) and not permits(bounds, value):
            raise ConfigError(f"optimizer.muon.{name} is {value}; it must be {bounds_text(bounds)}")
    if options.adamw_learning_rate is not None and not optimizer.learning_rate:
        raise ConfigError("optimizer.muon.adamw_learning_rate needs a learning_rate above 0")


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
            builder="fsdptool.training.optimizers.sharded:EightBitAdamW",
            elementwise=False,
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
            elementwise=False,
            kernels=("own", "for_loop"),
            states=_adafactor_states,
            temporaries=_adafactor_temporaries,
            # The update is computed twice: once for its size, once to be applied.
            update_bytes={"own": 32, "for_loop": 32},
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
        OptimizerSpec(
            name="muon",
            builder="fsdptool.training.optimizers.muon:MuonOptimizer",
            elementwise=False,
            kernels=_TORCH_KERNELS,
            states=_muon_states,
            temporaries=_muon_temporaries,
            # The momentum is mixed, read again and cast, the rows are copied out and added.
            update_bytes={"fused": 48, "foreach": 48, "for_loop": 48},
            passes=12,
            work=_muon_work,
            check=_check_muon,
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
