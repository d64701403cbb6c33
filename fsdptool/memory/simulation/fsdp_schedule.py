"""FSDP2's schedule over one micro-batch, as torch 2.13 runs it.

Mirrors ``_fsdp_state.py``, ``_fsdp_param_group.py`` and ``_fsdp_collectives.py`` in
``torch/distributed/fsdp/_fully_shard``; ``tests/memory/fsdp_oracle.py`` holds it against the real code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdptool.memory.simulation.collective_bytes import (
    Reduction,
    gradient_block,
    reduction,
    rounded,
    widened,
)
from fsdptool.memory.simulation.groups import (
    FORWARD,
    IDLE,
    POST_BACKWARD,
    POST_FORWARD,
    PRE_BACKWARD,
    UNSHARDED_STATE,
    Group,
    Rank,
    Unshard,
    make_groups,
)
from fsdptool.memory.simulation.ledger import ALL_REDUCE, REDUCE, Block, Ledger
from fsdptool.memory.simulation.program import Piece
from fsdptool.modeling.objective import GradientSync
from fsdptool.records.run import RunPhase
from fsdptool.records.trace import Trace


class FsdpSchedule(Unshard):
    """One rank's units over a step; :meth:`micro_batch` plays the trace through them.

    Args:
        rank: The units.
        replicate: Copies of them (HSDP).
        ledger: Where bytes are counted.
        trace: What is played.
        logits: What a loss computes from and another training loop holds until backward ends.
        loss_in_forward: Whether the root's forward computes the loss, instead of the loop after it.
        completes: Whether parameters without a gradient get zeros where others of their unit have one
            (``distributed/collective_order.py``).
    """

    def __init__(
        self,
        rank: Rank,
        replicate: int,
        ledger: Ledger,
        trace: Trace,
        *,
        logits: Block | None = None,
        loss_in_forward: bool = False,
        completes: bool = False,
    ) -> None:
        super().__init__(rank, ledger)
        self.replicate = replicate
        self.plan = rank.plan
        self.trace = trace
        self.groups = make_groups(rank)
        called = [group for group in self.groups if group.unit.called]
        self.by_module = {path: group for group in called for path in group.unit.modules}
        self.root = self.by_module.get("")
        self._reducing: list[Block] = []
        self._visited: list[Group] = []
        self._replicated: dict[str, Block] = {}
        self._called: list[Group] = []
        self._last = self._backward = True
        self._logits = logits
        self.loss_in_forward = loss_in_forward
        self._completes = completes

    def micro_batch(
        self,
        pieces: Sequence[Piece],
        sync: GradientSync | None = None,
        *,
        teacher_output: Block | None = None,
    ) -> None:
        """Play one forward and backward.

        Args:
            pieces: The trace's program.
            sync: What happens to its gradients (``set_requires_gradient_sync``,
                ``set_is_last_backward``): only in a step's last micro-batch are buffers in flight given
                back. None for a forward without gradients; :meth:`reshard` ends such a pass.
            teacher_output: A teacher's prediction, which the loss takes over.
        """
        self._last, self._backward = sync is None or sync.last, sync is not None
        reduce = sync is None or sync.reduce
        self._order(pieces)
        ledger = self.ledger
        ledger.source = self.trace
        for piece in pieces:
            self._border(piece, reduce)
            if teacher_output is not None and piece.marker == "loss":
                ledger.drop(teacher_output)
            ledger.run(piece.body, piece.copy)
            for name, size in piece.gradients:
                self._own_gradient(name, size)
        if sync is None:
            self._visited.clear()
            for group in self.groups:
                group.order.clear()

    def reshard(self) -> None:
        """Reshard what forwards without a backward left gathered, as ``reshard_all`` of the trainer does.

        ``to_sharded`` keeps what an integer reshard left until it is next replaced (torch 2.13,
        ``_fsdp_param.py``).
        """
        for group in self.groups:
            if group.state == UNSHARDED_STATE:
                self._to_sharded(group)

    def forget(self) -> None:
        """Free what an integer reshard left, too: the next forward, not played here, replaces it."""
        for group in self.groups:
            self._to_sharded(group)

    def _border(self, piece: Piece, reduce: bool) -> None:
        marker, path = piece.marker, piece.path
        group = self.by_module.get(path)
        if marker == "start":
            self.ledger.note("batch")
        elif marker == "enter":
            if group is not None:
                self.ledger.note(f"forward {group.name}")
                self._enter(group, path)
        elif marker == "leave":
            if group is not None and not (group is self.root and self.loss_in_forward):
                self._leave(group, path)
        elif marker == "loss":
            self.ledger.note("loss")
        elif marker == "backward":
            self._begin_backward()
        elif marker == "grad_enter":
            if group is not None and group.hooked == path:
                self.ledger.note(f"backward {group.name}")
                self._pre_backward(group)
        elif marker == "grad_leave":
            if group is not None and group.entered == path:
                self._post_backward(group, reduce)
        elif marker == "end":
            self._end(reduce)

    def _begin_backward(self) -> None:
        self._leave_with_loss()
        self.ledger.note("backward of the loss")
        self.ledger.begin(RunPhase.BACKWARD)
        if self.root is not None and self.loss_in_forward and self._backward:
            # Its hook is on every output that requires a gradient, and the loss is the first to have one
            # (``_register_pre_backward_hook``).
            self._pre_backward(self.root)
        if self._logits is not None and self._backward:
            # The loss has just freed its own copy, whose place this one takes.
            self.ledger.add(self._logits)

    def _end(self, reduce: bool) -> None:
        if not self._backward:
            self._leave_with_loss()
            return
        self.ledger.note("end of backward")
        self._final(reduce)
        if self._logits is not None:
            self.ledger.drop(self._logits)

    def _leave_with_loss(self) -> None:
        """Leave the root, whose forward has computed the loss."""
        if self.root is not None and self.loss_in_forward and self.root.training == FORWARD:
            self._leave(self.root, "")

    def _order(self, pieces: Sequence[Piece]) -> None:
        """Order units by their first call, and chain them as explicit prefetching does
        (``distributed/shard.py:_set_prefetch``)."""
        if self._called:
            return
        first: dict[int, Group] = {} if self.root is None else {id(self.root): self.root}
        for piece in pieces:
            group = self.by_module.get(piece.path) if piece.marker == "enter" else None
            if group is not None:
                first.setdefault(id(group), group)
        chain = [group for group in first.values() if group.weights and group is not self.root]
        self._called = [*first.values(), *(group for group in self.groups if id(group) not in first)]
        depth = self.plan.prefetch
        if depth <= 1:
            return
        for index, group in enumerate(chain):
            group.ahead = tuple(chain[index + 1 : index + 1 + depth])
            group.behind = tuple(reversed(chain[max(index - depth, 0) : index]))

    def _own_gradient(self, name: str, size: int) -> None:
        block = gradient_block(size)
        place = self.rank.home.get(name)
        gradients = self._replicated if place is None else self.groups[place].gradients
        if name in gradients:
            # AccumulateGrad adds in place and drops the new one.
            self.ledger.drop(block)
        else:
            gradients[name] = block

    # Forward ---------------------------------------------------------------------------------

    def _enter(self, group: Group, path: str) -> None:
        if not group.to_run:
            group.to_run = set(group.unit.modules)
        first = group.training != FORWARD
        group.training = FORWARD
        if not group.weights:
            return
        self._unshard(group, FORWARD)
        self._wait(group, FORWARD)
        if first:
            group.entered = path
            for other in group.ahead:
                self._unshard(other, FORWARD)

    def _leave(self, group: Group, path: str) -> None:
        group.to_run.discard(path)
        if not group.to_run:
            self._complete(group, path)
        if group is self.root:
            for other in reversed(self.groups):
                if other is not group and other.to_run and other.training == FORWARD:
                    self._complete(other, path)
            if self._gathered is not None:
                self.ledger.drop(self._gathered)
                self._gathered = None

    def _complete(self, group: Group, path: str) -> None:
        group.to_run.clear()
        group.training = IDLE
        group.hooked = path
        if not group.weights:
            return
        if group.reshard is not False and group.state == UNSHARDED_STATE:
            smaller = group.sizes.smaller
            if smaller is not None:
                self.ledger.add(smaller)
                self.ledger.drop(group.sizes.whole)
                group.state = POST_FORWARD
            else:
                self._to_sharded(group)
        group.order.append(len(self._visited))
        self._visited.append(group)

    # Backward --------------------------------------------------------------------------------

    def _pre_backward(self, group: Group) -> None:
        if group.training != PRE_BACKWARD and group.weights:
            group.training = PRE_BACKWARD
            self._unshard(group, PRE_BACKWARD)
            self._wait(group, PRE_BACKWARD)
            if not group.behind and group.order:
                index = group.order.pop()
                if index > 0:
                    self._unshard(self._visited[index - 1], PRE_BACKWARD)
        for other in group.behind:
            self._unshard(other, PRE_BACKWARD)

    def _post_backward(self, group: Group, reduce: bool) -> None:
        if not group.weights:
            return
        group.training = POST_BACKWARD
        for name in [name for name in group.gradients if name in group.accumulated]:
            self.ledger.drop(group.gradients.pop(name))
        if not reduce:
            self._to_sharded(group)
            self._keep_unsharded(group)
            return
        gradients = {**group.accumulated, **group.gradients}
        accumulated = bool(group.accumulated)
        group.accumulated, group.gradients = {}, {}
        if gradients and self._completes:
            gradients |= self._zeros(group, gradients, accumulated)
        self._to_sharded(group)
        while self._reducing:
            self.ledger.drop(self._reducing.pop(0))
        if gradients:
            self._reduce(group, gradients, accumulated)

    def _zeros(self, group: Group, present: dict[str, Block], accumulated: bool) -> dict[str, Block]:
        """Return the gradients of what no sample of this rank used."""
        made: dict[str, Block] = {}
        for name, weights in group.share.by_name.items():
            if weights.trainable and name not in present:
                size = rounded(weights.parameter.numel * weights.computed, self.grain)
                wide = widened(weights, self.plan, self.grain) if accumulated else None
                made[name] = wide or gradient_block(size)
                self.ledger.add(made[name])
        return made

    def _keep_unsharded(self, group: Group) -> None:
        for name, block in list(group.gradients.items()):
            wide = widened(group.share.by_name[name], self.plan, self.grain)
            if wide is not None:
                self.ledger.add(wide)
                self.ledger.drop(block)
                del group.gradients[name]
                group.accumulated[name] = wide

    def _reduce(self, group: Group, gradients: dict[str, Block], accumulated: bool) -> None:
        ledger = self.ledger
        # The same group's earlier all-reduce buffer goes first (``_wait_for_post_backward``).
        if group.all_reduce is not None:
            ledger.drop(group.all_reduce)
            group.all_reduce = None
        weights = [w for name, w in group.share.by_name.items() if name in gradients]
        gradients, chunked = self._order_by_rank(group, gradients)
        buffers = group.share.reduction
        if accumulated or len(weights) < sum(w.trainable for w in group.weights):
            buffers = reduction(weights, self.plan, self.device, accumulated=accumulated)
        ledger.add(buffers.input)
        if buffers.copies is not None:
            ledger.add(buffers.copies)
            ledger.drop(buffers.copies)
        # In ``foreach_reduce``, the variable of a loop over the gradients keeps the last one until the
        # function returns. On one rank the loop does not run.
        early = [gradients[name] for name in group.share.by_name if name in gradients]
        late = [early.pop()] if group.share.ranks > 1 else []
        for block in early:
            ledger.drop(block)
        self._scatter(group, buffers)
        for block in (*late, *chunked):
            ledger.drop(block)

    def _order_by_rank(
        self, group: Group, gradients: dict[str, Block]
    ) -> tuple[dict[str, Block], list[Block]]:
        """Copy the gradients that are not sharded along dimension 0 into the order of ranks.

        In ``foreach_reduce`` a copy takes its gradient's place in the list of gradients, and the gradient
        lives until the next one is cut: the variable of its chunks keeps it, the last one until the end.

        Returns:
            The gradients in the order of the unit's parameters, and what the variable keeps.
        """
        ordered: dict[str, Block] = {}
        kept: list[Block] = []
        for name, weights in group.share.by_name.items():
            if name not in gradients:
                continue
            block = ordered[name] = gradients[name]
            if not weights.dimension:
                continue
            while kept:
                self.ledger.drop(kept.pop())
            ordered[name] = replace(block, kind=REDUCE)
            self.ledger.add(ordered[name])
            kept.append(block)
        return ordered, kept

    def _scatter(self, group: Group, buffers: Reduction) -> None:
        ledger = self.ledger
        ledger.add(buffers.output)
        self._exchange(buffers.input, group.share.ranks)
        if group.share.ranks == 1 and self.replicate > 1:
            # The factor is set, and where nothing is scattered divides out of place (``foreach_reduce``).
            scaled = Block(REDUCE, buffers.input.total, buffers.input.sizes)
            ledger.add(scaled)
            ledger.drop(scaled)
        self._reducing.append(buffers.input)
        if self.replicate > 1 and not self._last:
            # HSDP between micro-batches: only reduce-scattered, in the reduce dtype.
            if group.partial is None:
                group.partial = buffers.output
            else:
                ledger.drop(buffers.output)
            return
        if group.partial is not None:
            ledger.drop(group.partial)
            group.partial = None
        kept = buffers.output
        if buffers.stored is not None:
            ledger.add(buffers.stored)
            kept = buffers.stored
            ledger.drop(buffers.output)
            if self.replicate > 1:
                group.all_reduce = replace(buffers.output, kind=ALL_REDUCE)
                ledger.add(group.all_reduce)
        if group.sharded_gradient is None and not self.plan.cpu_offload:
            group.sharded_gradient = kept
        elif self.replicate > 1 and buffers.stored is None:
            # The reduced buffer itself is held until backward ends.
            group.all_reduce = kept
        else:
            # Added to what is there or, under offload, copied to the host (``foreach_reduce``).
            ledger.drop(kept)

    def _final(self, reduce: bool) -> None:
        """Run ``_root_post_backward_final_callback``: what had no gradient of its inputs, then cleanup.

        torch goes through modules in the order of their registration (``_FSDPState._lazy_init``), for which
        the order of their calls stands: the root, embeddings, blocks. Between micro-batches the input of the
        last reduction stays, so with frozen embeddings that of a block does.
        """
        for group in self._called:
            if group.training != POST_BACKWARD:
                self.ledger.note(f"end of backward: {group.name}")
                self._post_backward(group, reduce)
            group.training = IDLE
            group.hooked = group.entered = None
            if self._last:
                self._finalize(group)
        if self._last:
            while self._reducing:
                self.ledger.drop(self._reducing.pop())
            self._visited.clear()

    def _finalize(self, group: Group) -> None:
        group.order.clear()
        if group.all_reduce is not None:
            self.ledger.drop(group.all_reduce)
            group.all_reduce = None
        if group.pending:
            # Prefetched, and never needed.
            group.pending = False
            if group.sizes.gather is not None:
                self.ledger.drop(group.sizes.gather)

    # Between steps ---------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Free every gradient (``zero_grad(set_to_none=True)``)."""
        for group in self.groups:
            if group.sharded_gradient is not None:
                self.ledger.drop(group.sharded_gradient)
                group.sharded_gradient = None
        for block in self._replicated.values():
            self.ledger.drop(block)
        self._replicated.clear()
