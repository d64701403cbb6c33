"""A sequence that is split over ranks (context parallelism): who holds which tokens.

With n ranks a sequence has 2n chunks, and rank r holds chunks r and 2n-1-r: under causal attention
the early one is cheap and the late one dear, so every rank computes the same. The model runs on a
rank's own tokens; only attention (``context_attention``) and load balance need the others'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.common import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

DOCUMENTS = "document_positions"
"""Batch key: the whole sequence's positions where documents are packed, [batch, whole sequence]."""

_SPLIT = frozenset({"input_ids", "labels", "shift_labels", "position_ids"})


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share a sequence, and this one's place among them.

    Attributes:
        size: How many they are.
        rank: Which of them this is.
        group: Their process group; None exchanges nothing, though buffers are made (a trace).
        ring: Whether keys and values are passed round rather than gathered.
    """

    size: int
    rank: int
    group: Any = None
    ring: bool = False

    @property
    def chunks(self) -> tuple[int, int]:
        """The chunks of the sequence this rank holds, of ``2 * size``."""
        return self.rank, 2 * self.size - 1 - self.rank

    def own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a whole sequence, as a copy."""
        import torch

        parts = whole.chunk(2 * self.size, dim)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim)

    def places(self, length: int, device: Any) -> Tensor:
        """Return where this rank's ``length`` tokens stand in the whole sequence, int64 [length]."""
        import torch

        return self.own(torch.arange(length * self.size, device=device), 0)

    def gather(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, [size, *mine.shape]; ``mine`` is contiguous."""
        return gather(mine, self.size, self.group)

    def reduce(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sum of every rank's ``whole`` [size, ...]."""
        return reduce(whole, self.group)

    def rotate(self, mine: Tensor) -> Tensor:
        """Send a flat tensor to the next rank and return what the one before sent."""
        import torch.distributed as dist

        received = mine.new_empty(mine.shape)
        if self.group is not None:
            to, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
            sent, got = (
                [mine.numel() * (rank == other) for rank in range(self.size)] for other in (to, before)
            )
            dist.all_to_all_single(received, mine, got, sent, group=self.group)
        return received


def gather(mine: Tensor, size: int, group: Any) -> Tensor:
    """Return the tensors of all ranks of a group, [size, *mine.shape].

    Args:
        mine: This rank's, contiguous.
        size: Ranks of the group.
        group: Their process group; None exchanges nothing.
    """
    received = mine.new_empty((size, *mine.shape))
    if group is not None:
        _collective("all_gather_single", "all_gather_into_tensor")(
            received.view(-1), mine.view(-1), group=group
        )
    return received


def reduce(whole: Tensor, group: Any) -> Tensor:
    """Return this rank's part of the sum over a group of ``whole`` [size, ...], which is contiguous."""
    mine = whole.new_empty(whole.shape[1:])
    if group is not None:
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(
            mine.view(-1), whole.view(-1), group=group
        )
    return mine


def _collective(name: str, before: str) -> Any:
    """Return a collective by its name, or by the one it had before torch 2.13."""
    import torch.distributed as dist

    return getattr(dist, name, None) or getattr(dist, before)


# Process-wide: recomputation in backward attends long after the forward that began it.
_current: Context | None = None


def current() -> Context | None:
    """Return the ranks this process shares its sequences with, or None."""
    return _current


def use(context: Context | None) -> None:
    """Share every sequence of this process over ``context`` from now on; None: keep them whole."""
    global _current
    _current = context


@contextmanager
def using(context: Context | None) -> Iterator[None]:
    """Share sequences over ``context`` while entered."""
    before = _current
    use(context)
    try:
        yield
    finally:
        use(before)


def share(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return this rank's share of a micro-batch of whole sequences; the batch itself without a context.

    Targets are the next tokens of the whole sequence, so none is lost where a chunk ends. The
    sequence is filled up on the right to a multiple of ``2 * size``; under causal attention no token
    sees that.

    Args:
        batch: ``input_ids`` [B, S], ``labels`` or ``shift_labels`` [B, S], perhaps ``position_ids``.

    Returns:
        ``input_ids``, ``shift_labels`` and ``position_ids`` [B, own tokens], and the whole
        ``position_ids`` under :data:`DOCUMENTS` if the batch had some.

    Raises:
        ConfigError: The batch holds something that is not one value per token.
    """
    context = current()
    if context is None:
        return batch
    import torch
    from torch.nn import functional

    tokens = batch.get("input_ids")
    strange = sorted(set(batch) - _SPLIT)
    if tokens is None or strange or any(value.shape != tokens.shape for value in batch.values()):
        raise ConfigError(
            "context parallelism supports plain text only; this batch has"
            f" {', '.join(strange or sorted(batch))}",
            help="set cp_size to 1",
        )
    targets = batch.get("shift_labels")
    if targets is None:
        targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    length = tokens.shape[1]
    missing = -length % (2 * context.size)
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    # What fills up is a document of its own, within any table of positions.
    beyond = torch.arange(missing, device=tokens.device).expand(tokens.shape[0], -1)
    positions = torch.cat((positions, beyond), dim=1)
    shared = {
        "input_ids": context.own(functional.pad(tokens, (0, missing))),
        "shift_labels": context.own(functional.pad(targets, (0, missing), value=IGNORED)),
        "position_ids": context.own(positions),
    }
    if "position_ids" in batch:
        shared[DOCUMENTS] = positions
    return shared


def documents(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the positions that tell packed documents of a micro-batch apart, over the whole sequence."""
    return batch.get("position_ids" if current() is None else DOCUMENTS)
