"""The losses of programs whose heads compute logits in parts. fsdptool never trains with them.

TRL's takes tiles of tokens by entries of the vocabulary (TRL 1.16.0 ``kernels/chunked_logprob.py`` and
``trainer/utils.py:add_fused_lm_head``). Forward keeps statistics of each token; backward computes each tile
again, turns it into its gradient in place, and adds up the gradients of states and weight in fp32.
torchtune's takes parts of rows (torchtune 0.6.1 ``modules/transformer.py:chunked_output``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fsdptool.families.objectives.common import IGNORED
from fsdptool.records.anatomy import LogitTail
from fsdptool.records.fused_loss import LossTiles

_STATISTICS = 7
"""fp32 numbers of each token that forward holds: maximum, sums, the target's logit."""

_ON_CPU = {"forward": (3, 1), "backward": (7, 1)}
"""Tensors of a tile's size, in fp32 and in bool, that live at once where no Triton kernel folds a tile."""


class TiledLoss:
    """Computes the loss of a head as TRL does.

    Args:
        tiles: Tokens and entries of the vocabulary of a tile.
        triton: Whether a Triton kernel works on a tile in place, as on GPUs.
        summed: Whether the objective takes the sum over all tokens, or the loss of each.
        gathers: Whether the head's weight is sharded until the loss gathers it.
    """

    def __init__(self, tiles: LossTiles, *, triton: bool, summed: bool = True, gathers: bool = False) -> None:
        self.tiles, self.triton, self.summed, self.gathers = tiles, triton, summed, gathers

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, _: int, tail: LogitTail
    ) -> Tensor:
        """Return a stand-in for the loss, summed or [batch, positions - 1].

        Args:
            hidden: [batch, positions, width].
            weight: [vocabulary, width].
            bias: [vocabulary], or None.
            targets: [batch, positions]; the last position of a row has none.
            tail: What is done to the logits: part of the kernel that folds a tile.
        """
        # The last state of a row predicts nothing and is cut off, which copies the others.
        states = hidden[:, :-1].reshape(-1, hidden.shape[-1])
        aims = targets[:, :-1].clamp(min=0).reshape(-1)
        if self.gathers:
            weight, bias = weight.clone(), bias.clone() if bias is not None else None
        result: Tensor = _Tiled.apply(states, weight, bias, aims, self)  # type: ignore[no-untyped-call]
        return result.sum() if self.summed else result.view(hidden.shape[0], -1)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss: TiledLoss
    ) -> Tensor:
        count = hidden.shape[0]
        statistics = [hidden.new_zeros(count, dtype=torch.float32) for _ in range(_STATISTICS)]
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.compute = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        buffer = _buffer(hidden, loss, ctx.compute)
        for tile, _, states, rows in _tiles(buffer, hidden, weight, loss):
            torch.mm(states, rows.to(ctx.compute).t(), out=tile)
            if not loss.triton:
                _fold(tile, "forward")
        found, normaliser, entropy = (statistics[0] - statistics[1] for _ in range(3))
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.loss = loss
        return found

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, _targets, _normaliser, _entropy = ctx.saved_tensors
        loss: TiledLoss = ctx.loss
        of_states, of_weight, of_bias = (
            torch.zeros_like(value, dtype=torch.float32) if needed and value is not None else None
            for value, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        buffer = _buffer(hidden, loss, ctx.compute)
        for tile, (first, start), states, part in _tiles(buffer, hidden, weight, loss):
            rows = part.to(ctx.compute)
            torch.mm(states, rows.t(), out=tile)
            if not loss.triton:
                _fold(tile, "backward")
            if of_states is not None:
                _add_product(of_states[first : first + tile.shape[0]], tile, rows, loss)
            if of_weight is not None:
                _add_product(of_weight[start : start + tile.shape[1]], tile.t(), states, loss)
        del buffer, tile
        return (
            of_states.to(hidden.dtype) if of_states is not None else None,
            of_weight.to(weight.dtype) if of_weight is not None else None,
            of_bias.to(hidden.dtype) if of_bias is not None else None,
            None,
            None,
        )


def _buffer(hidden: Tensor, loss: TiledLoss, dtype: torch.dtype) -> Tensor:
    # As wide as a tile may be, though the vocabulary is smaller.
    return hidden.new_empty(min(hidden.shape[0], loss.tiles.tokens), loss.tiles.vocabulary, dtype=dtype)


def _tiles(
    buffer: Tensor, hidden: Tensor, weight: Tensor, loss: TiledLoss
) -> Iterator[tuple[Tensor, tuple[int, int], Tensor, Tensor]]:
    """Yield each tile of the logits, where it begins, and the rows of states and weight that make it."""
    for first in range(0, hidden.shape[0], loss.tiles.tokens):
        states = hidden[first : first + loss.tiles.tokens].to(buffer.dtype)
        for start in range(0, weight.shape[0], loss.tiles.vocabulary):
            rows = weight[start : start + loss.tiles.vocabulary]
            yield buffer[: states.shape[0], : rows.shape[0]], (first, start), states, rows


def _fold(tile: Tensor, phase: str) -> None:
    wide, narrow = _ON_CPU[phase]
    held = [tile.new_empty(tile.shape, dtype=torch.float32) for _ in range(wide)]
    held += [tile.new_empty(tile.shape, dtype=torch.bool) for _ in range(narrow)]
    del held


def _add_product(total: Tensor, a: Tensor, b: Tensor, loss: TiledLoss) -> None:
    if total.dtype == a.dtype or not loss.triton:
        total.addmm_(a.float(), b.float())
    else:
        # The kernel reads 16 bits and adds in fp32 (``addmm`` with ``out_dtype``): nothing is allocated.
        # Here a part of the total receives the product, which costs as much.
        torch.mm(a, b, out=total.view(a.dtype)[:, : total.shape[1]])


def loss_of_chunks(
    chunks: int,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    _: int,
    _tail: LogitTail,
) -> Tensor:
    """Return the summed loss of logits that are made part by part of each row, and all kept.

    Args:
        chunks: Parts.
        hidden: [batch, positions, width].
        weight: [vocabulary, width].
        bias: [vocabulary], or None.
        targets: [batch, positions], ``-100`` where there is none.
    """
    logits = [functional.linear(part, weight, bias) for part in hidden.chunk(chunks, dim=1)]
    aims = targets.chunk(chunks, dim=1)
    losses = [
        functional.cross_entropy(
            part.flatten(0, 1).float(), aim.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        for part, aim in zip(logits, aims, strict=True)
    ]
    return torch.stack(losses).sum()
