"""Adafactor (Shazeer and Stern 2018) on rows of sharded parameters.

torch 2.13's own cannot step DTensors (``aten.pow_`` on a partial norm raises). The mathematics and
the defaults are those of ``torch/optim/_adafactor.py`` (2.13); what spans ranks (column means,
norms) is summed over the ranks that share a copy, in three messages a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdptool.distributed.shard import sharded_dimension
from fsdptool.modeling.optimizer_costs.adafactor import ADAFACTOR_PIECE
from fsdptool.training.optimizers.sharded import Groups, Pairs, ShardedOptimizer

if TYPE_CHECKING:
    from fsdptool.records.recipe import Optimizer

_BETA2_DECAY = -0.8
_LEAST_SCALE = 1e-3
_THRESHOLD = 1.0


@dataclass(frozen=True, slots=True)
class _Whole:
    """How a parameter lies over ranks: its global shape, the sharded dimension, the ranks (None: whole)."""

    shape: tuple[int, ...]
    cut: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def spans_rows(self) -> bool:
        """Whether the rows of a matrix, or of each of a stack, are spread over ranks."""
        return self.cut == len(self.shape) - 2


class Adafactor(ShardedOptimizer):
    """Adafactor over each rank's own rows."""

    def _make(self, options: Optimizer, groups: Groups, pairs: Pairs, rate: float) -> torch.optim.Optimizer:
        return RowAdafactor(groups, rate, {stand_in: _whole(parameter) for parameter, stand_in in pairs})

    @property
    def skips_on_device(self) -> bool:
        """Whether the update reads on the device whether to change anything."""
        return True


def _whole(parameter: nn.Parameter) -> _Whole:
    if not isinstance(parameter, DTensor):
        return _Whole(tuple(parameter.shape))
    mesh = parameter.device_mesh
    return _Whole(tuple(parameter.shape), sharded_dimension(parameter), mesh.get_group(mesh.ndim - 1))


class RowAdafactor(torch.optim.Optimizer):
    """Adafactor whose parameters are each rank's rows.

    Args:
        groups: torch parameter groups of rows.
        rate: Learning rate.
        wholes: How each parameter lies over ranks.

    Attributes:
        found_inf: 1.0 on the device if nothing is to change, as torch's fused optimizers have it.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: Iterable[dict[str, Any]], rate: float, wholes: Mapping[nn.Parameter, _Whole]
    ) -> None:
        super().__init__(groups, {"lr": rate, "weight_decay": 0.0})
        self._wholes = wholes

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change the rows by their gradients."""
        work = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for _, parameter in work:
            self._prepare(parameter)
        spans = [self._wholes[parameter].group for _, parameter in work]
        firsts = [self._first_sums(parameter) for _, parameter in work]
        _reduce([tensor for pair in firsts for tensor in pair], [s for span in spans for s in (span, span)])
        rows = [
            self._row_sum(parameter, columns)
            for (_, parameter), (columns, _) in zip(work, firsts, strict=True)
        ]
        _reduce(rows, spans)
        # Each update is computed twice: all of them at once would take the memory of all gradients.
        sizes = [
            _squares(self._update(parameter, row)) for (_, parameter), row in zip(work, rows, strict=True)
        ]
        _reduce(sizes, spans)
        for (group, parameter), (_, squares), row, size in zip(work, firsts, rows, sizes, strict=True):
            if group["weight_decay"]:
                kept = 1.0 - float(group["lr"]) * group["weight_decay"]
                self._replace(parameter, parameter * kept)
            self._apply(group, parameter, squares, self._update(parameter, row), size)

    def _prepare(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            if parameter.dim() > 1:
                state["row_var"] = parameter.new_zeros((*parameter.shape[:-1], 1))
                columns = (*parameter.shape[:-2], 1, parameter.shape[-1])
                state["col_var"] = parameter.new_zeros(columns)
            else:
                state["variance"] = torch.zeros_like(parameter)
        state["step"] += 1 if self.found_inf is None else 1.0 - self.found_inf

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """Give ``old`` the values of ``new``, unless nothing is to change."""
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf.bool(), old, new))

    def _mix(self, parameter: nn.Parameter, name: str, fresh: Tensor) -> None:
        """Move a moment towards ``fresh``, by less with every step; 16-bit ones are mixed in fp32."""
        state = self.state[parameter]
        moment, wide = state[name], torch.float64 if fresh.dtype == torch.float64 else torch.float32
        # A skipped first step has no number: its result is thrown away.
        share = state["step"].double().pow(_BETA2_DECAY).to(wide)
        self._replace(moment, torch.lerp(moment.to(wide), fresh.to(wide), share).to(moment.dtype))

    def _first_sums(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Return the sums of squares over rows (matrices cut along their rows only) and of the values."""
        assert parameter.grad is not None
        squares = _squares(parameter)
        if not self._wholes[parameter].spans_rows:
            return parameter.new_zeros(0), squares
        return parameter.grad.square().sum(dim=-2, keepdim=True), squares

    def _row_sum(self, parameter: nn.Parameter, columns: Tensor) -> Tensor:
        """Update the second moments; return the sum of the row moments, which all ranks need."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if parameter.dim() < 2:
            self._mix(parameter, "variance", parameter.grad.square())
            return parameter.new_zeros(0)
        self._mix(parameter, "row_var", parameter.grad.square().mean(dim=-1, keepdim=True))
        if (whole := self._wholes[parameter]).spans_rows:
            self._mix(parameter, "col_var", columns / whole.shape[-2])
            return state["row_var"].sum(dim=-2, keepdim=True)  # type: ignore[no-any-return]
        self._mix(parameter, "col_var", parameter.grad.square().mean(dim=-2, keepdim=True))
        return parameter.new_zeros(0)

    def _update(self, parameter: nn.Parameter, row_sum: Tensor) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        least = torch.finfo(parameter.dtype).eps
        if parameter.dim() < 2:
            estimate = state["variance"].clone()
        else:
            if (whole := self._wholes[parameter]).spans_rows:
                mean = row_sum / whole.shape[-2]
            else:
                mean = state["row_var"].mean(dim=-2, keepdim=True)
            estimate = (state["row_var"] @ state["col_var"]).div_(mean.clamp(min=least))
        return estimate.clamp_(min=least * least).rsqrt_().mul_(parameter.grad)  # type: ignore[no-any-return]

    def _apply(
        self, group: Mapping[str, Any], parameter: nn.Parameter, squares: Tensor, update: Tensor, size: Tensor
    ) -> None:
        """Change a parameter; its scale stays on the device, which the host would otherwise wait for."""
        rate, numel = float(group["lr"]), math.prod(self._wholes[parameter].shape)
        limit = self.state[parameter]["step"].double().rsqrt().clamp(max=rate)
        excess = ((size / numel).sqrt() / _THRESHOLD).clamp(min=1.0)
        scale = (squares / numel).sqrt().clamp(min=_LEAST_SCALE) * limit / excess
        if self.found_inf is not None:
            skipped = self.found_inf.bool()
            update.masked_fill_(skipped, 0.0)
            scale = torch.where(skipped, 0.0, scale)
        parameter.addcmul_(update, scale, value=-1.0)


def _squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares, in fp64, from those of each piece in fp32 (fp64 for fp64).

    A copy of the whole tensor in fp64 would take twice its memory.
    """
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    parts = [piece.square().sum() for piece in torch.split(wide.reshape(-1), ADAFACTOR_PIECE)]
    return torch.stack(parts).double().sum() if parts else tensor.new_zeros((), dtype=torch.float64)


def _reduce(tensors: list[Tensor], spans: list[Any]) -> None:
    """Sum tensors in place over their ranks, one message per group of ranks."""
    for group in {id(span): span for span in spans if span is not None}.values():
        chosen = [t for t, span in zip(tensors, spans, strict=True) if span is group and t.numel()]
        if not chosen:
            continue
        flat = torch.cat([tensor.reshape(-1).double() for tensor in chosen])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(chosen, torch.split(flat, [t.numel() for t in chosen]), strict=True):
            tensor.copy_(part.view_as(tensor))
