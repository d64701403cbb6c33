"""How documents of unequal length fill sequences of one length."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdptool.training.data.order import mix, permutation

Piece = tuple[int, int, int]
"""Document, first token, token after the last."""


@dataclass(frozen=True)
class WrappedPacking:
    """Documents end to end in an order drawn from the seed, cut every ``length`` tokens.

    Nothing is lost: a document that is cut goes on in the next sequence, and only the last sequence
    is shorter than ``length``.

    Attributes:
        documents: Document numbers in packing order.
        ends: Where each of them ends in the line of tokens.
        length: Tokens of a sequence.
    """

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    length: int

    def __len__(self) -> int:
        return -(-int(self.ends[-1]) // self.length) if len(self.ends) else 0

    def pieces(self, index: int) -> list[Piece]:
        """Return the pieces of sequence ``index``, in order."""
        start = index * self.length
        stop = min(start + self.length, int(self.ends[-1]))
        number = int(np.searchsorted(self.ends, start, side="right"))
        found: list[Piece] = []
        while start < stop:
            begin = int(self.ends[number - 1]) if number else 0
            end = min(stop, int(self.ends[number]))
            found.append((int(self.documents[number]), start - begin, end - begin))
            start = end
            number += 1
        return found


@dataclass(frozen=True)
class FittedPacking:
    """Whole documents, several to a sequence; what is longer than ``length`` is cut off.

    Best fit decreasing: the longest document first, each into the fullest sequence that still has
    room (Johnson et al. 1974). For conversations, whose start must not be separated from their end.

    Attributes:
        bins: The documents of each sequence.
        lengths: Tokens of each document, at most ``length``.
    """

    bins: Sequence[Sequence[int]]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bins)

    def pieces(self, index: int) -> list[Piece]:
        """Return the pieces of sequence ``index``, in order."""
        return [(document, 0, int(self.lengths[document])) for document in self.bins[index]]


def wrap(
    lengths: NDArray[np.int64], documents: NDArray[np.int64], *, length: int, seed: int
) -> WrappedPacking:
    """Pack ``documents`` (numbers into ``lengths``) by :class:`WrappedPacking`."""
    order = documents[permutation(len(documents), mix(seed, 3))]
    return WrappedPacking(order, np.cumsum(lengths[order], dtype=np.int64), length)


def fit(lengths: NDArray[np.int64], documents: NDArray[np.int64], *, length: int) -> FittedPacking:
    """Pack ``documents`` by :class:`FittedPacking`, in O(n log n)."""
    capped = np.minimum(lengths, length)
    order = documents[np.argsort(-capped[documents], kind="stable")]
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), sorted
    for document in order.tolist():
        need = int(capped[document])
        at = bisect.bisect_left(rooms, (need, -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = length, len(bins)
            bins.append([])
        bins[number].append(document)
        if room > need:
            bisect.insort(rooms, (room - need, number))
    return FittedPacking(tuple(tuple(members) for members in bins), capped)


def single(lengths: NDArray[np.int64], documents: NDArray[np.int64], *, length: int) -> FittedPacking:
    """Give every document a sequence of its own."""
    return FittedPacking(tuple((int(document),) for document in documents), np.minimum(lengths, length))
