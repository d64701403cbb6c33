"""Which sample comes when. Pure arithmetic on (seed, epoch, position): no state, no ranks.

A global batch is the next ``global_batch`` places of one endless line of samples; epochs follow one
another in it, also within a batch, so nothing is dropped at an epoch's end. Ranks then take their
share of the batch. Whatever the number of ranks, the line is the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, int]
"""A sample's index and the epoch it is seen in."""

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return 63 well-mixed bits of the integers: the seed of one sample's own random draws.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014), chained. It is written out, and not
    taken from numpy, so that a position means the same samples under every numpy version.
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 30
        state = state * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
        state = (state + 0x9E3779B97F4A7C15) & _MASK
    return state >> 1


def _scores(count: int, key: int) -> NDArray[np.uint64]:
    z = np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (z + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=4)
def permutation(count: int, key: int) -> NDArray[np.int64]:
    """Return a permutation of ``range(count)`` that depends on ``key`` alone (8 bytes per sample)."""
    return np.argsort(_scores(count, key), kind="stable").astype(np.int64)


class Order(Protocol):
    """An endless line of samples."""

    samples: int
    """Samples of one epoch."""

    def places(self, start: int, count: int) -> list[Place]:
        """Return the ``count`` places from ``start`` on."""
        ...


class PlainOrder:
    """Every sample once per epoch, in an order drawn from (seed, epoch), or as they are."""

    def __init__(self, samples: int, *, seed: int, shuffle: bool) -> None:
        self.samples = samples
        self._seed = seed
        self._shuffle = shuffle

    def places(self, start: int, count: int) -> list[Place]:
        """Return the ``count`` places from ``start`` on."""
        places: list[Place] = []
        while count > 0:
            epoch, offset = divmod(start, self.samples)
            take = min(count, self.samples - offset)
            if self._shuffle:
                line = permutation(self.samples, mix(self._seed, epoch))
                places += [(int(index), epoch) for index in line[offset : offset + take]]
            else:
                places += [(index, epoch) for index in range(offset, offset + take)]
            start += take
            count -= take
        return places


class WindowOrder:
    """The order of a stream: every sample once per epoch, shuffled within windows of consecutive samples.

    A reader that holds one window can therefore read on, and never has to go back within an epoch.
    """

    def __init__(self, samples: int, *, window: int, seed: int) -> None:
        self.samples = samples
        self._window = window
        self._seed = seed

    def places(self, start: int, count: int) -> list[Place]:
        """Return the ``count`` places from ``start`` on."""
        places: list[Place] = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, self.samples)
            number, inside = divmod(offset, self._window)
            first = number * self._window
            size = min(self._window, self.samples - first)
            places.append((first + int(permutation(size, mix(self._seed, epoch, number, 5))[inside]), epoch))
        return places


class BucketOrder:
    """Samples of several shapes, in chunks of ``chunk`` samples of one shape.

    Each bucket is its own endless line; a chunk that an epoch cannot fill is finished by the next
    epoch, so no sample is lost or repeated. Within an epoch the chunks of all buckets are mixed by
    (seed, epoch). The line depends on the chunk size (a rank's micro-batch), not on the ranks.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], *, chunk: int, seed: int, shuffle: bool) -> None:
        self._buckets = [np.asarray(bucket, dtype=np.int64) for bucket in buckets if len(bucket)]
        self._chunk = chunk
        self._seed = seed
        self._shuffle = shuffle
        self.samples = sum(len(bucket) for bucket in self._buckets)

    def _chunks_before(self, epoch: int) -> int:
        return sum(epoch * len(bucket) // self._chunk for bucket in self._buckets)

    def _epoch_of(self, chunk: int) -> int:
        epoch = chunk * self._chunk // self.samples
        while self._chunks_before(epoch + 1) <= chunk:
            epoch += 1
        return epoch

    def _chunk_at(self, chunk: int) -> list[Place]:
        epoch = self._epoch_of(chunk)
        first = self._chunks_before(epoch)
        offset = chunk - first
        if self._shuffle:
            offset = int(
                permutation(self._chunks_before(epoch + 1) - first, mix(self._seed, epoch, 1))[offset]
            )
        for number, bucket in enumerate(self._buckets):
            begun = epoch * len(bucket) // self._chunk
            ended = (epoch + 1) * len(bucket) // self._chunk
            if offset < ended - begun:
                line = PlainOrder(len(bucket), seed=mix(self._seed, number, 2), shuffle=self._shuffle)
                places = line.places((begun + offset) * self._chunk, self._chunk)
                return [(int(bucket[index]), seen) for index, seen in places]
            offset -= ended - begun
        raise AssertionError("a chunk lies in one of its epoch's buckets")

    def places(self, start: int, count: int) -> list[Place]:
        """Return the ``count`` places from ``start`` on."""
        first, skipped = divmod(start, self._chunk)
        places: list[Place] = []
        while len(places) < skipped + count:
            places += self._chunk_at(first)
            first += 1
        return places[skipped : skipped + count]


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
        pieces: list[Piece] = []
        while start < stop:
            begin = int(self.ends[number - 1]) if number else 0
            end = min(stop, int(self.ends[number]))
            pieces.append((int(self.documents[number]), start - begin, end - begin))
            start = end
            number += 1
        return pieces


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
