"""Traces a model of like blocks at a few reduced depths, where these predict its full depth exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from torch import nn

from fsdptool.memory.tracing.compiled_blocks import UncompiledBlockError
from fsdptool.memory.tracing.early_cut import Described, Make, make_cut
from fsdptool.memory.tracing.fake_tensors import BY_VALUE, FollowedValues, MicroBatchConditions
from fsdptool.memory.tracing.growth import GrowthRule
from fsdptool.memory.tracing.layer_extrapolation import (
    Shortened,
    inner,
    lengthened,
    missing_periods,
    repeats,
    shortened_to,
    verified,
)
from fsdptool.memory.tracing.micro_batch import run_trace
from fsdptool.modeling.objective import MicroLoss
from fsdptool.records.trace import Trace

if TYPE_CHECKING:
    from fsdptool.families.protocol import TensorSpec


_SHALLOW, _DEEP, _DEEPER = 3, 4, 6
"""Periods that are traced; the deepest one only where something outside the blocks grows with depth."""

_WORTH_A_RULE = 4
"""Missing periods from which on it costs less to learn how a trace grows than to trace the full depth."""

INNER: Final = "inner"
"""A deeper trace was predicted by repeating an earlier block than the last but one (:func:`inner`)."""

Extrapolation = bool | GrowthRule | Literal["inner"]

_extrapolates: dict[tuple[MicroBatchConditions, FollowedValues], Extrapolation] = {}
"""Whether a shallower trace predicted a deeper one by repeating its blocks, or the rule by which it did."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    trace: Trace
    shortened: tuple[Shortened, ...]


class _Attempts:
    """Traces one micro-batch at any depth. See :func:`trace_at_depth`.

    A model is built once: each run is given the blocks of its depth, and leaves the model as it was.
    """

    def __init__(
        self,
        make: Make,
        micro_loss: MicroLoss,
        specs: Sequence[TensorSpec],
        conditions: MicroBatchConditions,
        values: FollowedValues,
        whole: Mapping[str, Described] | None,
    ) -> None:
        self._make = make
        self._whole = whole
        self._micro_loss = micro_loss
        self._specs = specs
        self._conditions = conditions
        self._values = values
        self._built: nn.Module | None = None
        self._cut: tuple[nn.Module, tuple[Shortened, ...]] | None = None
        if whole is None:
            self._built = make(None)
            self.repeats = repeats(self._built)
        else:
            model, cuts = self._cut = make_cut(make, _DEEP, whole)
            self._built = None if cuts else model
            self.repeats = bool(cuts)

    def at(self, periods: int | None) -> _Attempt:
        """Trace at a depth; None is the full depth."""
        try:
            return self._run(periods, fine=True)
        except RuntimeError as error:
            if "view" not in str(error) or ("in-place" not in str(error) and "inplace" not in str(error)):
                raise
            # A module edits its input in place, which hooks inside blocks forbid.
            return self._run(periods, fine=False)

    def _run(self, periods: int | None, *, fine: bool) -> _Attempt:
        with self._lent(periods) as (model, shortened):
            traced = run_trace(
                model, self._micro_loss, self._specs, self._conditions, fine=fine, values=self._values
            )
        return _Attempt(traced, shortened)

    @contextmanager
    def _lent(self, periods: int | None) -> Iterator[tuple[nn.Module, tuple[Shortened, ...]]]:
        """Yield a model of so many periods; None is the full depth."""
        if self._whole is not None and periods is not None:
            cut, self._cut = self._cut, None
            yield cut if cut is not None and periods == _DEEP else make_cut(self._make, periods, self._whole)
            return
        # After a failure a run may have left anything.
        model, self._built = self._built or self._make(None), None
        with shortened_to(model, periods) as cuts:
            yield model, cuts
        self._built = model


def trace_at_depth(
    make: Make,
    micro_loss: MicroLoss,
    specs: Sequence[TensorSpec],
    conditions: MicroBatchConditions,
    *,
    values: FollowedValues,
    whole: Mapping[str, Described] | None = None,
) -> Trace:
    """Trace at reduced depths where these predict a greater one exactly, else at full depth.

    Two depths suffice where only blocks repeat. Where something outside them grows with their number, a
    third depth shows how (:class:`fsdptool.memory.tracing.growth.GrowthRule`). What holds for one
    micro-batch is a matter of the model's code: other micro-batches of the same recipe are traced at one
    depth, or at two, in the same process.

    Args:
        make: Builds the model as it will be trained.
        micro_loss: The method's loss.
        specs: The micro-batch.
        conditions: How it is computed.
        values: Which values to follow.
        whole: The parameters at full depth, if models are to be cut while they are built; else one is built.
    """
    attempts = _Attempts(make, micro_loss, specs, conditions, values, whole)
    if not attempts.repeats:
        return attempts.at(None).trace
    known = _extrapolates.get((conditions, values))
    if known is False:
        return attempts.at(None).trace
    try:
        shallow = attempts.at(_SHALLOW) if known is None or isinstance(known, GrowthRule) else None
        deep = attempts.at(_DEEP)
        if known is None and shallow is not None:
            known = _learn(attempts, shallow, deep)
        grown = None
        if isinstance(known, GrowthRule) and shallow is not None:
            known, grown = _apply(known, attempts, shallow, deep)
    except (*BY_VALUE, UncompiledBlockError):
        raise
    except Exception:
        # The model counts on its depth (an index from the configuration, skips between blocks).
        return attempts.at(None).trace
    if conditions.recipe and known is not None:
        _extrapolates[conditions, values] = known
    if known == INNER:
        return lengthened(deep.trace, inner(deep.shortened))
    if known is True:
        return lengthened(deep.trace, deep.shortened)
    return attempts.at(None).trace if grown is None else grown


def _learn(attempts: _Attempts, shallow: _Attempt, deep: _Attempt) -> Extrapolation:
    """Return whether the blocks of the deeper trace repeat, or by which rule the trace grows; else False."""
    if verified(lengthened(shallow.trace, shallow.shortened, deep.shortened), deep.trace):
        return True
    missing = missing_periods(deep.shortened)
    if missing is None or missing < _WORTH_A_RULE:
        return False
    deeper = attempts.at(_DEEPER)
    predicted = lengthened(deep.trace, inner(deep.shortened), deeper.shortened, periods=_DEEPER - _DEEP)
    if verified(predicted, deeper.trace):
        return INNER
    return _rule(deeper, shallow, deep) or False


def _apply(
    rule: GrowthRule, attempts: _Attempts, shallow: _Attempt, deep: _Attempt
) -> tuple[GrowthRule, Trace | None]:
    """Return the trace at full depth by a rule, or by one learnt anew, with that rule; None if neither does.

    The loss of another micro-batch may take another number of chunks, which moves what blocks insert.
    """
    missing = missing_periods(deep.shortened)
    if missing is None:
        return rule, None
    periods = _DEEP - _SHALLOW + missing
    grown = rule.apply(shallow.trace, deep.trace, periods)
    if grown is not None:
        return rule, grown
    other = rule.carried(shallow.trace, deep.trace) or _rule(attempts.at(_DEEPER), shallow, deep)
    return (rule, None) if other is None else (other, other.apply(shallow.trace, deep.trace, periods))


def _rule(deeper: _Attempt, shallow: _Attempt, deep: _Attempt) -> GrowthRule | None:
    paths = [item.path for item in deep.shortened]
    return GrowthRule.learn(shallow.trace, deep.trace, deeper.trace, _DEEPER - _SHALLOW, paths)
