"""Reserved peaks that earlier plans found by replaying the caching allocator, kept beside the traces."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fsdptool.cache import Store, source_digest
from fsdptool.inspection.api import cache_parts
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.codec import to_json
from fsdptool.records.plan import Footprint
from fsdptool.records.resolved_run import ResolvedRun

if TYPE_CHECKING:
    from fsdptool.memory.simulation.simulate import PreparedSimulation
    from fsdptool.planning.candidate.stage_cut import VirtualStage
    from fsdptool.records.trace import Trace

KIND = "reserved"


@dataclass(slots=True)
class ReservedPeaks:
    """Footprints of one model, each of whose replays happens once for all plans.

    Args:
        anatomy: The model.
        part: Which of its blocks, if a pipeline's stage is planned as if it were a model of its own.
    """

    anatomy: Anatomy
    part: VirtualStage | None = None
    _store: Store = field(default_factory=Store)
    _model: dict[str, Any] | None = None

    def foresee(
        self,
        trace: Trace,
        rank: PreparedSimulation,
        run: ResolvedRun,
        *,
        traced: tuple[str, bool],
        timeline: bool,
        reserved: bool,
        expandable: bool,
        workspaces: tuple[int, ...],
    ) -> Footprint:
        """Return what ``fsdptool.memory.foresee`` does, with a reserved peak from the cache if it has one.

        Args:
            trace, rank, timeline, reserved, expandable, workspaces: As there.
            run: Mesh, batch, optimizer and loop, and what the units follow from.
            traced: What the trace depends on beside the model, as text, and whether it routes at worst.
        """
        from fsdptool.memory import foresee

        key, peak = "", None
        loop = replace(run.loop, loading=run.loading)
        # A teacher is a model of its own, which the key does not tell.
        if reserved and trace.known and rank.teacher is None:
            key = self._store.key(
                {
                    "model": self._described(),
                    "part": to_json(self.part),
                    "trace": traced,
                    "run": to_json(run),
                    "device": [to_json(rank.rank.device), expandable, workspaces],
                }
            )
            peak = self._kept(key)
        footprint = foresee(
            trace,
            rank,
            run.mesh,
            run.recipe,
            saves=run.settings.state_dict_type,
            timeline=timeline,
            reserved=reserved,
            reserved_peak=peak,
            expandable=expandable,
            workspaces=workspaces,
            loop=loop,
        )
        if key and peak is None and footprint.reserved_peak_bytes is not None:
            spec = self.anatomy.spec
            about = f"{spec.model_class} of {spec.reference.id}"
            self._store.put(KIND, key, footprint.reserved_peak_bytes, about=about)
        return footprint

    def _kept(self, key: str) -> int | None:
        kept, _ = self._store.get(KIND, key)
        return kept if isinstance(kept, int) else None

    def _described(self) -> dict[str, Any]:
        """Return what tells the model, its FSDP units and the code that makes plans of them."""
        if self._model is None:
            self._model = {
                **cache_parts(self.anatomy.spec),
                "wrap": to_json(self.anatomy.wrap),
                "no_split_modules": to_json(self.anatomy.no_split_modules),
                "tool": source_digest("fsdptool.planning.candidate.estimator"),
            }
        return self._model
