"""How a unit's parameters come and go: gather, wait, copy out, free. As torch 2.13 does it.

Mirrors the unsharding half of ``_fsdp_param_group.py`` and ``_fsdp_collectives.py`` in
``torch/distributed/fsdp/_fully_shard``; ``fsdp_schedule.py`` says when each of these happens.
"""

from __future__ import annotations

from fsdptool.memory.simulation.groups import (
    FORWARD,
    POST_FORWARD,
    PRE_BACKWARD,
    SHARDED,
    UNSHARDED_STATE,
    Group,
    Rank,
)
from fsdptool.memory.simulation.ledger import GATHER, Block, Ledger
from fsdptool.memory.simulation.sizes import rounded


class Unshard:
    """One rank's unsharding, and the buffers that outlive it.

    Args:
        rank: What it holds.
        ledger: Where bytes are counted.
    """

    def __init__(self, rank: Rank, ledger: Ledger) -> None:
        self.rank = rank
        self.ledger = ledger
        self.device = rank.device
        self.grain = rank.device.grain
        self._gathered: Block | None = None

    def _unshard(self, group: Group, training: int) -> None:
        if not group.weights or group.pending or group.state == UNSHARDED_STATE:
            return
        if training == PRE_BACKWARD and not group.unit.unshard_in_backward:
            return
        group.pending = True
        sizes = group.sizes
        if sizes.gather is None:
            return
        cast = sizes.cast
        if group.state == POST_FORWARD:
            cast = sizes.smaller_cast
        elif sizes.offloaded is not None:
            cast = sizes.offloaded
        if cast is not None:
            self.ledger.add(cast)
        self.ledger.add(sizes.gather)
        if cast is not None:
            self.ledger.drop(cast)

    def _wait(self, group: Group, training: int) -> None:
        if not group.pending:
            return
        group.pending = False
        sizes = group.sizes
        previous = self._gathered if training == FORWARD else None
        self._copy_out(group)
        if previous is not None:
            # ``wait_for_unshard`` lets go of the previous result before it copies out, but a local
            # variable holds it until the function returns (torch 2.13, ``prev_all_gather_state``).
            self.ledger.drop(previous)
            self._gathered = None
        if sizes.gather is not None:
            # FSDP lets go at once of what is still under way when it comes to wait (``async_op``).
            if training == FORWARD and not self.device.direct:
                self._gathered = sizes.gather
            else:
                self.ledger.drop(sizes.gather)
        if group.state == POST_FORWARD and sizes.smaller is not None:
            self.ledger.drop(sizes.smaller)
        group.state = UNSHARDED_STATE

    def _copy_out(self, group: Group) -> None:
        if self.rank.degree > 1:
            self.ledger.add(group.sizes.whole)
            return
        # One rank: each shard is cast and copied by itself (``wait_for_unshard``).
        largest = max((w.shard * w.computed for w in group.weights if w.casts), default=0)
        self.ledger.add(group.sizes.whole)
        if largest:
            spike = Block(GATHER, rounded(largest, self.grain), (largest,))
            self.ledger.add(spike)
            self.ledger.drop(spike)

    def _to_sharded(self, group: Group) -> None:
        if group.state == UNSHARDED_STATE:
            self.ledger.drop(group.sizes.whole)
        elif group.state == POST_FORWARD and group.sizes.smaller is not None:
            self.ledger.drop(group.sizes.smaller)
        group.state = SHARDED
