"""Muon (Jordan 2024): momentum orthogonalised by Newton-Schulz for hidden matrices, AdamW for the rest.

The mathematics and the defaults are those of ``torch.optim.Muon`` (torch 2.13, ``torch/optim/_muon.py``),
which takes whole matrices only. Here a matrix is cut in rows over the ranks that share a copy. Matrices go
in rounds of one per rank: an all-to-all gives each rank one whole update, which it orthogonalises, and a
second one returns the rows. Each product is computed once, and no rank holds more than one whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdptool.distributed.shard import sharded_dimension
from fsdptool.errors import ConfigError
from fsdptool.modeling.optimizer_costs.muon import expert_chunk, is_hidden_matrix, rounds_of
from fsdptool.records.recipe import Muon as MuonOptions
from fsdptool.training.optimizers.sharded import Groups, Pairs, ShardedOptimizer, torch_kernel

if TYPE_CHECKING:
    from fsdptool.records.recipe import Optimizer


class MuonOptimizer(ShardedOptimizer):
    """Muon over hidden matrices and fused experts, AdamW over every other parameter."""

    def _make(self, options: Optimizer, groups: Groups, pairs: Pairs, rate: float) -> torch.optim.Optimizer:
        matrices = {
            self._stand_ins[name]: _Matrix.of(parameter)
            for name, parameter in self._names.items()
            if is_hidden_matrix(name, tuple(parameter.shape))
        }
        if not matrices:
            raise ConfigError(
                "optimizer muon: no hidden matrix is trained (2-D weights and fused experts of blocks)",
                help="use adamw",
            )
        others = [
            {**group, "params": rest}
            for group in groups
            if (rest := [stand_in for stand_in in group["params"] if stand_in not in matrices])
        ]
        return MuonAndAdamW(matrices, others, options, rate)

    @property
    def skips_on_device(self) -> bool:
        """Whether AdamW's part has a kernel that skips; Muon's does."""
        optimizer = self.torch_optimizer
        assert isinstance(optimizer, MuonAndAdamW)
        return optimizer.adamw is None or bool(optimizer.adamw.defaults["fused"])


@dataclass(frozen=True, slots=True)
class _Matrix:
    """How a parameter lies over ranks.

    Attributes:
        shape: Of the matrix, or of each of fused experts: rows and columns.
        rows: Rows of a matrix on each rank that holds a part of it.
        group: These ranks; None where a rank holds whole matrices.
    """

    shape: tuple[int, int]
    rows: tuple[int, ...]
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Matrix:
        total, columns = parameter.shape[-2:]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            ranks = mesh.size(mesh.ndim - 1)
            if ranks > 1 and sharded_dimension(parameter) == parameter.dim() - 2:
                chunk = -(-total // ranks)
                ends = [min(rank * chunk, total) for rank in range(ranks + 1)]
                rows = tuple(end - start for start, end in pairwise(ends))
                return cls((total, columns), rows, mesh.get_group(mesh.ndim - 1))
        return cls((total, columns), (total,), None)


_Cut = tuple[nn.Parameter, int | slice]
"""A matrix whose rows are spread over ranks: a parameter, or one of its fused experts."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon's groups first, then those of an AdamW whose states and groups are shared with this one.

    Args:
        matrices: Rows of each matrix on this rank, and how they lie.
        others: Parameter groups of AdamW.
        options: The recipe's choice.
        rate: Learning rate.

    Attributes:
        found_inf: 1.0 on the device if nothing is to change, as torch's fused optimizers have it.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: dict[nn.Parameter, _Matrix],
        others: Groups,
        options: Optimizer,
        rate: float,
    ) -> None:
        groups = [{"params": list(matrices), "weight_decay": options.weight_decay}]
        super().__init__(groups, {"lr": rate})
        self._matrices = matrices
        self._options = options.muon or MuonOptions()
        self.adamw: Any = None
        if others:
            self.adamw = torch.optim.AdamW(
                others, lr=rate, betas=options.betas, eps=options.epsilon, **torch_kernel(options)
            )
            self.adamw.state = self.state
            self.param_groups += self.adamw.param_groups
        own = self._options.adamw_learning_rate
        self._adamw_ratio = 1.0 if own is None else own / options.learning_rate

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change the rows by their gradients."""
        group = self.param_groups[0]
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        present = [parameter for parameter in group["params"] if parameter.grad is not None]
        cut: dict[dist.ProcessGroup, list[_Cut]] = {}
        for parameter in present:
            group_of = self._matrices[parameter].group
            if group_of is not None:
                parts = [slice(None)] if parameter.dim() == 2 else range(len(parameter))
                cut.setdefault(group_of, []).extend((parameter, part) for part in parts)
            elif parameter.numel():
                self._step_whole(parameter, rate, decay)
            else:
                self._update(parameter)  # a rank without experts has the state, too: it is saved
        for ranks, matrices in cut.items():
            sizes = [math.prod(self._matrices[parameter].shape) for parameter, _ in matrices]
            for places in rounds_of(sizes, ranks.size()):
                self._step_round([matrices[place] for place in places], rate, decay)
        if self.adamw is not None:
            for other in self.adamw.param_groups:
                other["lr"] *= self._adamw_ratio
            self.adamw.found_inf = self.found_inf
            self.adamw.step()

    def _step_whole(self, parameter: nn.Parameter, rate: float, decay: float) -> None:
        """Step a whole matrix, or whole experts a few at a time."""
        parts: Sequence[int | slice] = [slice(None)]
        if parameter.dim() == 3:
            chunk = expert_chunk(tuple(parameter.shape), parameter.is_cuda)
            starts = range(0, len(parameter), chunk)
            parts = starts if chunk == 1 else [slice(start, start + chunk) for start in starts]
        for part in parts:
            self._apply(parameter, self._orthogonalise(self._update(parameter, part)), rate, decay, part)

    def _step_round(self, cut: Sequence[_Cut], rate: float, decay: float) -> None:
        """Step one matrix per rank: rows to the rank that owns the update, its result back as rows."""
        matrices = [self._matrices[parameter] for parameter, _ in cut]
        group = matrices[0].group
        assert group is not None
        me, ranks = group.rank(), group.size()
        mine = matrices[me] if me < len(matrices) else None
        # Bytes, because gloo exchanges no bfloat16 (torch 2.13).
        rows = [2 * matrix.rows[me] * matrix.shape[1] for matrix in matrices]
        rows += [0] * (ranks - len(rows))
        whole = [2 * count * mine.shape[1] for count in mine.rows] if mine is not None else [0] * ranks
        device = cut[0][0].device
        sent = torch.empty(sum(rows) // 2, dtype=torch.bfloat16, device=device)
        messages = torch.split(sent, [size // 2 for size in rows])[: len(cut)]
        for (parameter, part), message in zip(cut, messages, strict=True):
            message.copy_(self._update(parameter, part, dtype=None).view(-1))
        gathered = torch.empty(sum(whole) // 2, dtype=torch.bfloat16, device=device)
        _exchange(gathered, whole, sent, rows, group)
        if mine is not None:
            gathered = self._orthogonalise(gathered.view(mine.shape)).view(-1)
        _exchange(sent, rows, gathered, whole, group)
        for (parameter, part), message in zip(cut, messages, strict=True):
            if parameter.numel():
                self._apply(parameter, message.view_as(parameter[part]), rate, decay, part)

    def _update(
        self,
        parameter: nn.Parameter,
        part: int | slice = slice(None),
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> Tensor:
        """Take in the gradient and return the momentum to orthogonalise, rows as they lie on this rank."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, buffer = parameter.grad[part], state["momentum_buffer"][part]
        if self.found_inf is not None:
            # Mixed with itself, the momentum stays as it is.
            torch.where(self.found_inf.bool(), buffer, gradient, out=gradient)
        momentum = self._options.momentum
        buffer.lerp_(gradient, 1.0 - momentum)
        update = gradient.lerp(buffer, momentum) if self._options.nesterov else buffer
        return update if dtype is None else update.to(dtype, copy=True)

    def _orthogonalise(self, update: Tensor) -> Tensor:
        """Return the nearest semi-orthogonal matrix of each [rows, columns]; ``update`` is overwritten.

        Five products per iteration in buffers made once: two of the matrix's size and two of the smaller
        side's square. A single matrix is multiplied as ``torch.optim.Muon`` does it, strides included, so
        that each product is equal to the bit: a bfloat16 product into a transposed result is rounded
        otherwise on many CPUs.
        """
        a, b, c = self._options.newton_schulz_coefficients
        tall = update.shape[-2] > update.shape[-1]
        x = update.mT if tall else update
        if x.dim() == 2:
            x.div_(x.norm().clamp(min=self._options.epsilon))
        else:
            norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
            x.div_(norms.clamp(min=self._options.epsilon))
        product, fused = (torch.mm, torch.addmm) if x.dim() == 2 else (torch.bmm, torch.baddbmm)
        # The momentum's own memory is a row-major buffer, too, as soon as the first product has read it.
        result, spare = x.new_empty(x.shape), update.view(x.shape)
        gram = x.new_empty((*x.shape[:-1], x.shape[-2]))
        polynomial = torch.empty_like(gram)
        for _ in range(self._options.newton_schulz_steps):
            product(x, x.mT, out=gram)
            fused(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            fused(x, polynomial, x, beta=a, out=result)
            x, result, spare = result, spare, result
        return result.view(update.shape).copy_(x.mT) if tall else x

    def _apply(
        self,
        parameter: nn.Parameter,
        update: Tensor,
        rate: float,
        decay: float,
        part: int | slice = slice(None),
    ) -> None:
        rows, columns = self._matrices[parameter].shape
        if self._options.adjust_learning_rate == "original":
            ratio = math.sqrt(max(1.0, rows / columns))
        else:
            ratio = 0.2 * math.sqrt(max(rows, columns))
        target = parameter[part]
        kept = 1.0 - rate * decay
        if self.found_inf is None:
            target.mul_(kept)
        else:
            if decay:
                torch.where(self.found_inf.bool(), target, target * kept, out=target)
            update.mul_(1.0 - self.found_inf)
        target.add_(update, alpha=-rate * ratio)


def _exchange(
    output: Tensor, output_bytes: list[int], input: Tensor, input_bytes: list[int], group: dist.ProcessGroup
) -> None:
    dist.all_to_all_single(
        output.view(torch.uint8), input.view(torch.uint8), output_bytes, input_bytes, group=group
    )
