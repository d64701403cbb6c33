"""Expert parallelism: each rank of a group holds whole experts, and tokens travel to them.

Every routed token is sent to the rank that holds its expert, once for each of its experts, and its result
comes back (GShard, arXiv:2006.16668). No expert has a capacity: as many tokens are sent as the router
chose. The experts' own code computes on what arrived, with local indices and weights of one; results are
weighted where the token came from, so weights need no message. Backward sends the gradients the same ways
back: an expert's gradient holds the tokens of its whole group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fsdptool.modeling.tensor_group import ALONE, collect, divide

if TYPE_CHECKING:
    from fsdptool.modeling.tensor_group import TensorGroup


def _exchange(rows: Tensor, sent: Sequence[int], came: Sequence[int], group: TensorGroup) -> Tensor:
    """Return the rows that come when ``sent`` of ours go to each rank of a group, in the order of ranks."""
    exchange: Any = _Exchange
    result: Tensor = exchange.apply(rows, sent, came, group)
    return result


class _Exchange(torch.autograd.Function):
    """Sends rows to each rank of a group in forward, and their gradients back in backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], came: Sequence[int], group: TensorGroup
    ) -> Tensor:
        ctx.sent, ctx.came, ctx.group = sent, came, group
        return _send(rows, sent, came, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(gradient, ctx.came, ctx.sent, ctx.group), None, None, None


def _send(rows: Tensor, sent: Sequence[int], came: Sequence[int], group: TensorGroup) -> Tensor:
    rows = rows.contiguous()
    # By its name a trace tells an all-to-all from other collectives.
    result = rows.new_empty_strided((sum(came), *rows.shape[1:]), rows.stride())
    if group.process_group is not None:
        dist.all_to_all_single(result, rows, list(came), list(sent), group=group.process_group)
    return result


def spread(module: nn.Module, count: int, group: TensorGroup, alike: TensorGroup = ALONE) -> None:
    """Let a module of fused experts compute for its whole group; it holds a part of the experts already.

    Args:
        module: Its forward takes hidden states [tokens, width], and each token's experts and their weights
            [tokens, choices] (transformers 5, ``integrations/moe.py``).
        count: Experts of the whole model.
        group: The ranks that hold the others. Without a process group (the memory tracer), as many tokens
            arrive as are sent, what a balanced router would bring, or those of all ranks
            (:attr:`~fsdptool.modeling.tensor_group.TensorGroup.worst_routing`).
        alike: The ranks of a tensor-parallel group that hold the same tokens: each sends a part of them, and
            all gather the results.
    """
    compute: Callable[..., Tensor] = module.forward
    signature = inspect.signature(compute)
    held = count // group.size

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights = signature.bind(*args, **kwargs).args
        if alike.size == 1:
            return routed(hidden, index, weights)
        tokens = hidden.shape[0]
        hidden, index, weights = (_even(value, alike.size) for value in (hidden, index, weights))
        parts = divide(hidden, alike, 0), alike.part(index, 0), divide(weights, alike, 0)
        results = collect(routed(*parts), alike, 0)
        # A copy, because what an FSDP unit returns must not be a view.
        return results[:tokens].clone() if len(results) > tokens else results

    def routed(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        flat, choices = index.reshape(-1), index.shape[-1]
        order = flat.argsort(stable=True)
        if group.process_group is None:
            sent = _parts(flat.numel(), group.size)
            most = hidden.shape[0] * min(choices, held) * group.size
            came = _parts(most if group.worst_routing else flat.numel(), group.size)
            local = torch.zeros(sum(came), dtype=flat.dtype, device=flat.device)
        else:
            sent, came, local = _counted(flat, (count, held), group.process_group)
        # Nothing here keeps the rows that were sent, or came, longer than the experts need them.
        results = _exchange(hidden[order // choices], sent, came, group)
        results = _compute(compute, results, local, weights)
        results = _exchange(results, came, sent, group)
        # Back in the order of tokens and their choices.
        results = results[order.argsort()]
        shaped = results.view(*index.shape, hidden.shape[-1])
        output: Tensor = (shaped * weights.unsqueeze(-1)).sum(-2).to(hidden.dtype)
        return output

    object.__setattr__(module, "forward", forward)


def _even(rows: Tensor, size: int) -> Tensor:
    """Return rows that ``size`` ranks divide evenly: further ones are zero, and weigh nothing."""
    short = -rows.shape[0] % size
    return F.pad(rows, (0, 0, 0, short)) if short else rows


def _parts(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


def _counted(
    chosen: Tensor, experts: tuple[int, int], group: dist.ProcessGroup
) -> tuple[list[int], list[int], Tensor]:
    """Return how many rows go to and come from each rank of a group, and the local expert of each that comes.

    Args:
        chosen: The expert of every row.
        experts: How many there are, and how many each rank holds.
        group: The ranks.
    """
    count, held = experts
    # How many rows each expert gets from here, and then how many each expert of ours gets from each rank.
    # Not `bincount`, which reads the smallest and the largest number on the host (torch 2.13, SummaryOps.cu).
    ones = chosen.new_ones(()).expand_as(chosen)
    mine = chosen.new_zeros(count).scatter_add_(0, chosen, ones).view(-1, held)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    # The sizes of messages are known to the host: the only time it waits for the device.
    sent, came = torch.stack((mine.sum(1), theirs.sum(1))).tolist()
    local = torch.arange(held, device=chosen.device).repeat(len(came))
    local = local.repeat_interleave(theirs.reshape(-1), output_size=sum(came))
    return sent, came, local


def _compute(compute: Callable[..., Tensor], rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what the experts' own code makes of rows, each for one expert."""
    length = rows.shape[0]
    if length == 0:
        # Without a row, no gradient would reach the experts here, and FSDP would wait for it elsewhere.
        rows, index = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), index.new_zeros(1)
    ones = weights.new_ones((rows.shape[0], 1))
    return compute(rows, index.unsqueeze(-1), ones).narrow(0, 0, length)
