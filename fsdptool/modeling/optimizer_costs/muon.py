"""Which parameters Muon updates, its states, temporaries, products and messages. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fsdptool.errors import ConfigError
from fsdptool.modeling.optimizer_costs.elementwise import adamw_states, adamw_temporaries
from fsdptool.modeling.optimizer_costs.tensors import Trained, TrainedTensor, UpdateWork
from fsdptool.records.annotations import bounds_text, fields_of, permits
from fsdptool.records.recipe import Optimizer

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


def muon_states(optimizer: Optimizer, tensor: TrainedTensor, kernel: str, cuda: bool) -> list[int]:
    """The momentum of a hidden matrix; AdamW's states of anything else."""
    if is_hidden_matrix(tensor.fqn, tensor.shape):
        return [tensor.bytes]
    return adamw_states(optimizer, tensor, kernel, cuda)


def muon_temporaries(optimizer: Optimizer, trained: Trained, kernel: str, cuda: bool) -> list[int]:
    """Newton-Schulz in bfloat16: two buffers of the matrix and two of its smaller side's square.

    Before it, rows wait in the send buffer while one matrix's momentum is mixed in the stored dtype.
    """
    others = [tensor for tensor in trained if not is_hidden_matrix(tensor.fqn, tensor.shape)]
    worst = [adamw_temporaries(optimizer, others, kernel, cuda)]
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


def muon_work(optimizer: Optimizer, trained: Trained) -> UpdateWork:
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


def check_muon(optimizer: Optimizer) -> None:
    """Refuse options outside of their bounds.

    Raises:
        ConfigError: Names the option and its bounds.
    """
    options = optimizer.muon
    if options is None:
        return
    for name, option in fields_of(type(options)).items():
        value, bounds = getattr(options, name), option.annotation.bounds
        if isinstance(value, int | float) and not permits(bounds, value):
            raise ConfigError(f"optimizer.muon.{name} is {value}; it must be {bounds_text(bounds)}")
    if options.adamw_learning_rate is not None and not optimizer.learning_rate:
        raise ConfigError("optimizer.muon.adamw_learning_rate needs a learning_rate above 0")
