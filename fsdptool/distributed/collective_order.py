"""Makes all ranks run the collectives of the same units in the same order, whatever each rank uses itself.

FSDP2 gathers a unit where its forward or backward begins and reduces those gradients that exist, by their
position (torch 2.13, ``_fsdp_param_group.py``). Ranks whose samples take other paths through the model
(experts that are modules, a vision tower that text skips, dropped layers) would then average the gradients of
different parameters, or join different collectives.

Here a rank that reduces a unit fills in zeros where it has no gradient. A rank that does not come to a
collective *stands in*: it contributes its shard to a gather and zeros to a reduction. Sums do not change by
that, so a run equals that of one rank. Which collective comes next is

- agreed by messages on the CPU, collective by collective, until two micro-batches of a kind in a row have
  had the same order on all ranks, with every unit in it;
- from then on that order, without any message. A rank that leaves a unit out stands in for it. One that
  needs a collective that the order lacks stops with an error before it calls it.

Where ranks differed, they agree for the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fsdptool.distributed.shard import sharded_modules
from fsdptool.errors import WorkerError
from fsdptool.torch_private import fsdp_groups, fsdp_state

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.distributed.session import Session

_GATHER, _GATHER_AGAIN, _REDUCE = range(3)
"""A gather of the forward, one of the backward, a reduction."""
_WHAT = {_GATHER: "gather", _GATHER_AGAIN: "gather for the backward", _REDUCE: "reduce the gradients of"}


class _Collective(NamedTuple):
    kind: int
    unit: int

    @property
    def natural(self) -> tuple[bool, int, int]:
        """Forward before backward, by the order of registration, and the reverse of it in the backward."""
        backward = self.kind != _GATHER
        return backward, -self.unit if backward else self.unit, self.kind


_Order = tuple[_Collective, ...]


class _Unit:
    """One FSDP parameter group, whose two collectives are announced before they begin.

    ``gather`` and ``reduce`` are FSDP's own functions.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.group, self.name = group, name
        self._near = group.post_forward_mesh_info
        self.gather: Callable[..., None] = group.unshard
        self.reduce: Callable[..., None] = group.post_backward

    @property
    def trained(self) -> list[Any]:
        return [item for item in self.group.fsdp_params if item.sharded_param.requires_grad]

    @property
    def spread(self) -> bool:
        """Whether it is sharded over more than one rank: otherwise a gather is a copy."""
        mesh: Any = self.group.mesh_info
        group = getattr(mesh, "shard_process_group", None)
        return group is not None and group.size() > 1

    def share_near(self, near: bool) -> None:
        """Let an integer ``reshard_after_forward`` count, or not: who leaves a unit out has no part of it."""
        group = self.group
        if group.post_forward_mesh_info is not None:
            group.post_forward_mesh_info = self._near if near else group.mesh_info

    @property
    def kind_of_gather(self) -> int | None:
        """What ``unshard`` would begin now; None if nothing."""
        group, name = self.group, self.group._training_state.name
        if group._all_gather_result is not None or group.is_unsharded or not self.spread:
            return None
        if name != "PRE_BACKWARD":
            return _GATHER
        return _GATHER_AGAIN if group.unshard_in_backward else None

    @property
    def alone(self) -> bool:
        """Whether no other rank has a part or a copy of it: a reduction is a copy, too."""
        mesh: Any = self.group.mesh_info
        return bool(mesh.mesh.size() == 1)

    @property
    def has_gradients(self) -> bool:
        """Whether ``post_backward`` has something to reduce."""
        # HSDP's sums that wait for their all-reduce are held by all ranks alike.
        waiting = self.group.all_reduce_grads and self.group._partial_reduce_output is not None
        return waiting or any(map(_has_gradient, self.trained))

    def prepare(self, *, zeros: bool) -> set[int]:
        """Make gradients ready to be reduced: of one dtype, and zeros for parameters without one.

        Args:
            zeros: Whether other ranks may have a gradient of these.

        Returns:
            The parameters with a gradient of this rank, by ``id``.
        """
        trained = self.trained
        used = [item for item in trained if _has_gradient(item)]
        # From torch 2.15 on a parameter's own gradient is the sum, and FSDP joins dtypes as it reduces.
        apart = any(hasattr(item, "accumulate_unsharded_grad_if_needed") for item in trained)
        # Before, sums that wait unsharded are in the reduction's dtype, new gradients in the compute dtype.
        wide = apart and any(item.unsharded_accumulated_grad is not None for item in trained)
        for item in used if apart else ():
            item.accumulate_unsharded_grad_if_needed()
            if wide:
                item.to_accumulated_grad_if_needed()
        for item in trained:
            if zeros and not _has_gradient(item):
                parameter = item._unsharded_param
                # torch 2.13 has no dtype of gradients; 2.15 accepts zeros of this one only.
                dtype = item.reduce_dtype if wide else None if apart else parameter.grad_dtype
                # Weights in float8 have no ``zeros_like`` (torchao 0.18).
                made = torch.zeros(parameter.shape, dtype=dtype or parameter.dtype, device=parameter.device)
                if wide:
                    item.unsharded_accumulated_grad = made
                else:
                    parameter.grad = made
        return {id(item.sharded_param) for item in used}

    def stand_in(self, kind: int) -> set[int]:
        """Join a collective of the others; returns the parameters whose gradients of ours it took along."""
        if kind != _REDUCE:
            self._stand_in_gather(kind)
            return set()
        if not all(hasattr(item, "_unsharded_param") for item in self.group.fsdp_params):
            self._stand_in_gather(_GATHER)  # of one rank: nobody hears of it
        used, group = self.prepare(zeros=True), self.group
        kept = group._training_state, group.reshard_after_backward
        group.reshard_after_backward = False
        self.reduce()
        group._training_state, group.reshard_after_backward = kept
        return used

    def _stand_in_gather(self, kind: int) -> None:
        group = self.group
        if group.is_unsharded or group._all_gather_result is not None:
            self._give_shard()
            return
        with group.use_training_state(type(group._training_state).IDLE):
            self.gather(False)
            group.wait_for_unshard()
        # As after a forward of our own: the backward may gather over fewer ranks.
        if kind == _GATHER and group._use_post_forward_mesh:
            group._to_sharded_post_forward()
        else:
            group._to_sharded()

    def _give_shard(self) -> None:
        """Join a gather while the unit is gathered here, or about to be; what we hold stays as it is."""
        group = self.group
        sharded = type(group._sharded_state).SHARDED
        pending, state = group._all_gather_result, group._sharded_state
        states = [item.sharded_state for item in group.fsdp_params]
        group._all_gather_result, group._sharded_state = None, sharded
        for item in group.fsdp_params:
            item.sharded_state = sharded
        with group.use_training_state(type(group._training_state).IDLE):
            self.gather(False)
        result = group._all_gather_result
        if isinstance(result.all_gather_work, dist.distributed_c10d.Work):
            result.all_gather_work.wait()
        # A function of the shared context from torch 2.15 on.
        wait = getattr(group.comm_ctx, "wait_all_gather_streams_on_event", None)
        (wait or group._wait_all_gather_streams_on_event)(result.all_gather_event)
        group._all_gather_result, group._sharded_state = pending, state
        for item, before in zip(group.fsdp_params, states, strict=True):
            item.sharded_state = before

    def rest(self) -> None:
        """End a reduction that came after this rank's own last backward: its device waits for it."""
        group = self.group
        group.finalize_backward()
        # Every reduction has been waited for. torch 2.11 keeps one input, until the next reduction.
        getattr(group.comm_ctx, "reduce_scatter_states", []).clear()


def _has_gradient(item: Any) -> bool:
    if item.unsharded_accumulated_grad is not None:
        return True
    return hasattr(item, "_unsharded_param") and item._unsharded_param.grad is not None


@dataclass(slots=True)
class _Course:
    """What is known of one kind of micro-batch, equal on all ranks.

    Attributes:
        last: The order of the micro-batch before.
        settled: The order that all ranks follow without messages; None while they agree.
        places: Where the rank that used most units had each collective: the order to agree on.
    """

    last: _Order = ()
    settled: _Order | None = None
    places: dict[_Collective, int] = field(default_factory=dict)


class CollectiveOrder:
    """Keeps the collectives of models in one order on all ranks.

    Args:
        models: The trained model first, all of them sharded; named in errors by their units' paths.
        session: This rank.

    Attributes:
        used: The sharded parameters, by ``id``, whose gradients this rank computed; the step clears them.
    """

    def __init__(self, models: Sequence[nn.Module], session: Session) -> None:
        self._session = session
        self._units: list[_Unit] = []
        self._sets: list[set[int]] = []
        self._roots = [fsdp_state(module) for module in models]
        self.used: set[int] = set()
        self._courses: dict[Hashable, _Course] = {}
        self._differs = False
        self._course: _Course | None = None
        self._at = 0
        self._seen: list[_Collective] = []
        self._own: list[list[_Collective]] = []
        self._even = True
        for model in models:
            self._add(model)

    def _add(self, model: nn.Module) -> None:
        paths = {id(module): path for path, module in model.named_modules()}
        known: set[int] = set()
        added: set[int] = set()
        for module in sharded_modules(model):
            state = id(fsdp_state(module))
            if state in known:
                continue
            known.add(state)
            for group in fsdp_groups(module):
                unit = _Unit(group, paths[id(module)] or type(model).__name__)
                self._announce(unit, len(self._units))
                if unit.spread:
                    added.add(len(self._units))
                self._units.append(unit)
        self._sets.append(added)

    def _announce(self, unit: _Unit, index: int) -> None:
        def unshard(async_op: bool = False) -> None:
            if self._course is not None and (kind := unit.kind_of_gather) is not None:
                self._wait_for(_Collective(kind, index))
            unit.gather(async_op)

        def post_backward(*unused: Any) -> None:
            if unit.group.reduce_grads and unit.has_gradients:
                shared = self._course is not None and not unit.alone
                if shared:
                    self._wait_for(_Collective(_REDUCE, index))
                self.used |= unit.prepare(zeros=shared)
            unit.reduce(*unused)

        unit.group.unshard, unit.group.post_backward = unshard, post_backward

    @contextmanager
    def micro_batch(self, *kind: Hashable) -> Iterator[None]:
        """Keep the order of what runs inside: a forward, or a forward and its backward.

        Args:
            kind: Equal on all ranks. Micro-batches of one kind find units in the same state: FSDP keeps some
                gathered, and gathers some ahead, from one micro-batch to the next.

        Raises:
            WorkerError: This rank needs a collective that the settled order lacks.
        """
        if self._session.world_size == 1:
            yield
            return
        for root in self._roots:
            root._lazy_init()  # before a rank stands in for a model that it has not run
        self._course = self._courses.setdefault(kind, _Course())
        self._at, self._seen, self._even = 0, [], True
        self._own = [[] for _ in range(self._session.world_size)]
        for unit in self._units:
            unit.share_near(self._course.settled is not None)
        try:
            yield
            self._finish(self._course)
        finally:
            self._course = None

    def _wait_for(self, wanted: _Collective) -> None:
        """Stand in for the collectives of others until it is the turn of ours."""
        assert self._course is not None
        if self._course.settled is None:
            self._agree(wanted)
            return
        order = self._course.settled
        if self._at < len(order) and order[self._at] == wanted:
            self._at += 1
            return
        try:
            place = order.index(wanted, self._at)
        except ValueError:
            raise WorkerError(
                f"rank {self._session.rank} would {_WHAT[wanted.kind]} {self._units[wanted.unit].name} where"
                " no rank did in the steps before: which units run, or in which order, depends on the data",
                help="leave the class of this module out of the wrap classes, so that it is gathered together"
                " with the module around it",
            ) from None
        self._stand_in(order[self._at : place])
        self._at = place + 1

    def _stand_in(self, collectives: Sequence[_Collective]) -> None:
        for collective in collectives:
            self.used |= self._units[collective.unit].stand_in(collective.kind)

    def _agree(self, wanted: _Collective | None) -> list[_Collective]:
        """Tell all ranks what this one needs next (None: nothing); returns those it stood in for before."""
        assert self._course is not None
        served: list[_Collective] = []
        while True:
            proposals = self._exchange(wanted)
            chosen = _first(proposals, self._course.places)
            self._even &= len(set(proposals)) == 1
            if chosen is None:
                return served
            self._seen.append(chosen)
            for own, proposal in zip(self._own, proposals, strict=True):
                if proposal == chosen:
                    own.append(chosen)
            if chosen == wanted:
                return served
            self._stand_in([chosen])
            served.append(chosen)

    def _exchange(self, wanted: _Collective | None) -> list[_Collective | None]:
        # On the CPU: no rank waits for its device.
        code = -1 if wanted is None else len(_WHAT) * wanted.unit + wanted.kind
        codes = [torch.empty(1, dtype=torch.int64) for _ in range(self._session.world_size)]
        dist.all_gather(codes, torch.tensor([code]))
        count = len(_WHAT)
        return [None if code < 0 else _Collective(code % count, code // count) for code in map(int, codes)]

    def _finish(self, course: _Course) -> None:
        if course.settled is not None:
            served = list(course.settled[self._at :])
            self._stand_in(served)
        else:
            served = self._agree(None)
            self._learn(course)
        if self._roots[0]._state_ctx.is_last_backward:
            for unit in {collective.unit for collective in served if collective.kind == _REDUCE}:
                self._units[unit].rest()

    def _learn(self, course: _Course) -> None:
        order = tuple(self._seen)
        self._differs |= not self._even
        longest = max(self._own, key=lambda own: len(set(own)))
        if len(set(longest)) > len(course.places):
            course.places = {item: place for place, item in reversed(list(enumerate(longest)))}
        if not self._differs and order == course.last and self._covers(order):
            course.settled = order
        course.last = order

    def _covers(self, order: _Order) -> bool:
        """Whether all units of each model that ran are in an order: others would come as a surprise."""
        ran = {item.unit for item in order}
        return all(units <= ran or not units & ran for units in self._sets)


def _first(proposals: Sequence[_Collective | None], places: dict[_Collective, int]) -> _Collective | None:
    """Return which of the ranks' collectives comes first; any choice is right, a good one saves time."""
    wanted = {proposal for proposal in proposals if proposal is not None}
    if not wanted:
        return None
    if all(item in places for item in wanted):
        return min(wanted, key=lambda item: places[item])
    return min(wanted, key=lambda item: item.natural)
