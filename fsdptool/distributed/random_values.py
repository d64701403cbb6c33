"""Random numbers that depend on the parameter's name and the element, never on who asks.

Values come in blocks, each from a generator seeded with (seed, name, draw, block), so any rank can
make any slice of a parameter without making the rest, and every number of ranks gets the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

BLOCK = 1 << 16
"""Elements per block: long enough that seeding a generator (about 10 us) does not count."""


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def fill_slice(
    target: torch.Tensor,
    start: int,
    numel: int,
    key: tuple[object, ...],
    draw: Callable[[torch.Tensor, torch.Generator], object],
) -> None:
    """Fill ``target`` with elements ``[start, start + target.numel())`` of a flat random tensor.

    Args:
        target: Contiguous CPU tensor.
        start: Flat position of its first element in the whole tensor.
        numel: Elements of the whole tensor.
        key: What the values depend on: run seed, parameter name, number of the draw.
        draw: Fills a block in place from a generator (``normal_``, ``uniform_``).
    """
    flat = target.view(-1)
    generator = torch.Generator()
    position, end = start, start + flat.numel()
    while position < end:
        index = position // BLOCK
        first = index * BLOCK
        length = min(BLOCK, numel - first)
        generator.manual_seed(derive_seed(*key, index))
        lower, upper = position - first, min(end - first, length)
        piece = flat[position - start : position - start + upper - lower]
        if lower == 0 and upper == length:
            draw(piece, generator)
        else:
            block = torch.empty(length, dtype=flat.dtype)
            draw(block, generator)
            piece.copy_(block[lower:upper])
        position = first + upper
