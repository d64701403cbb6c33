"""Search: evaluate many configurations on each cluster, and settle which one to choose."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdptool.errors import ConfigError
from fsdptool.formatting import elapsed
from fsdptool.modeling.optimizer_costs import optimizer_spec
from fsdptool.planning.candidate.assembly import refused
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.verdict import HEADROOM
from fsdptool.planning.search.bounds import Bounds
from fsdptool.planning.search.checkpointing import optimal_candidates
from fsdptool.planning.search.choice import EarlyEnd, SearchResult, choose, merit, roomy
from fsdptool.planning.search.space import enumerate_space, expert_sizes, tensor_sizes
from fsdptool.records.plan import Candidate, PlanInputs, Rejection, RejectionKind, SearchPoint
from fsdptool.records.trace import ColourGroup, Component
from fsdptool.runs.work import Countdown
from fsdptool.tensor.sites import experts_of

Progress = Callable[[str], None]

_POLICIES = 3
"""Configurations for which a checkpointing policy is made: each takes several traces."""

_FRONT, _REPLAYS = 4, 40
"""Members of the Pareto front whose allocator is replayed, and the most replays (about a second each): only
where one choice after the other turns out too tight are there more than a handful."""


_FIRST_SHARE = 0.05
"""Share of a search after which its remaining time is told: the first configurations wait for traces."""

_PROGRESS_SECONDS = 0.5
"""Least time between two lines of progress."""


Part = tuple[int, str, int]
"""A part of a search: the cluster, what is divided, and over how many ranks."""


@dataclass(slots=True)
class Watch:
    """Tells how a search gets on, and ends it early.

    Configurations are counted over all parts of the search. Whether a part is needed is known when those
    before it have been evaluated, so the total is the most that it can be, until the last part.

    Attributes:
        progress: Called with a line of progress from time to time.
        stop: Asked after each configuration whether to end the search.
        first: Whether to end it at the first configuration that fits and leaves headroom.
        prefer: What the best configuration is chosen by.
        ended: How it was ended.
    """

    progress: Progress | None = None
    stop: Callable[[], bool] | None = None
    first: bool = False
    prefer: str = "speed"
    ended: EarlyEnd | None = None
    _best: Candidate | None = None
    _told: float = field(default_factory=time.monotonic)
    _ahead: dict[Part, int] = field(default_factory=dict)
    _finished: int = 0
    _size: int = 0
    _countdown: Countdown = field(default_factory=lambda: Countdown(None))

    def expect(self, parts: Mapping[Part, int]) -> None:
        """Take note of the parts that there may be, in their order, and their numbers of configurations."""
        self._ahead = dict(parts)

    def begin(self, part: Part, size: int) -> None:
        """Take note that a part begins: those that were to come before it are left out."""
        if part in self._ahead:
            passed = list(self._ahead).index(part) + 1
            self._ahead = dict(list(self._ahead.items())[passed:])
        self._finished += self._size
        self._size = size
        self._countdown.total = self._total

    @property
    def _total(self) -> int:
        return self._finished + self._size + sum(self._ahead.values())

    def evaluating(self, number: int) -> None:
        """Say which configuration of the part is evaluated, and how good the best one is so far."""
        done, total = self._finished + number, self._total
        left = self._countdown.left(done)
        if done < _FIRST_SHARE * total:
            left = None
        if self.progress is None or time.monotonic() - self._told < _PROGRESS_SECONDS:
            return
        self._told = time.monotonic()
        verdict = ""
        if self._best is not None:
            step = self._best.step_seconds
            pace = elapsed(step) if step is None or step >= 60 else f"{step:.3g} s"
            verdict = f"fits, best so far {pace} per step: "
        bound, most = ("up to ", "at most ") if self._ahead else ("", "")
        time_left = f", {most}{elapsed(left)} left" if left is not None else ""
        self.progress(f"{verdict}evaluated {done} of {bound}{total} configurations{time_left}")

    def ends(self, candidate: Candidate, number: int) -> bool:
        """Return whether the search ends with a candidate, the ``number``-th of its part."""
        fits = candidate.rejected_by is None and roomy(candidate)
        if fits and self._best is None:
            self._told = -math.inf  # The first verdict does not wait for its turn.
        if fits and (self._best is None or merit(candidate, self.prefer) > merit(self._best, self.prefer)):
            self._best = candidate
        interrupted = self.stop is not None and self.stop()
        if interrupted or (self.first and fits):
            self.ended = EarlyEnd(interrupted, self._finished + number, self._total)
        return self.ended is not None


def run_search(
    estimator: Estimator,
    inputs: PlanInputs,
    requested: Sequence[SearchPoint],
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    bounded: bool = True,
) -> SearchResult:
    """Evaluate the requested configuration and, if a search is requested, every one around it.

    Args:
        estimator: Evaluates one configuration.
        inputs: The canonical inputs.
        requested: The search point of the requested configuration on each cluster.
        progress: Called with a line of progress from time to time.
        stop: Asked after each configuration whether to end the search with what is known.
        bounded: Whether configurations that cannot fit are left out before they are simulated.
    """
    candidates: list[Candidate] = []
    requested_ids: list[str] = []
    # A policy is made for what would be the fastest, whether it fits or not.
    bounds = Bounds(estimator, inputs, active=bounded and not inputs.optimal_checkpointing)
    replays: _Replays = {}
    watch = Watch(progress, stop, first=inputs.search == "first", prefer=inputs.prefer)
    watch.expect(_parts(estimator, inputs, requested))
    for point in requested:
        name = "requested" if len(requested) == 1 else f"requested{point.cluster}"
        requested_ids.append(name)
        before = len(candidates)
        watched = watch, (point.cluster, "nothing", 1)
        own = _evaluate(bounds, inputs, point, (name, before), watched=watched)
        if inputs.search != "none" and watch.ended is None:
            divided = _divide(bounds, inputs, point, own, before + len(own), watch)
            if not divided and watch.ended is None:
                # A replay may take away the reason not to divide: the best estimate does not fit after all.
                _settle(estimator, inputs, own, [name], replays)
                divided = _divide(bounds, inputs, point, own, before + len(own), watch)
            own += divided
        candidates += own
    if inputs.optimal_checkpointing and watch.ended is None:
        candidates += _optimal(estimator, inputs, candidates, progress)
    # Each offer has its best row, whose allocator is replayed as the chosen one's is.
    best = []
    for index in range(len(requested)):
        own = [c for c in candidates if c.settings.cluster == requested[index].cluster]
        best.append(_settle(estimator, inputs, own, [requested_ids[index]], replays))
        settled = {candidate.id: candidate for candidate in own}
        candidates = [settled.get(candidate.id, candidate) for candidate in candidates]
    among = {name for name in best if name is not None}
    if not among:
        # What is said of the lack of memory, and of what would help, is said of the leanest.
        resident = [c for c in candidates if not c.settings.cpu_offload]
        for part in (resident, candidates):
            bounds.find_leanest(part)
            simulated = {c.id: c for c in part}
            candidates = [simulated.get(c.id, c) for c in candidates]
    result = choose(candidates, requested_ids, prefer=inputs.prefer, among=among)
    return replace(result, best=tuple(best), ended=watch.ended)


def _evaluate(
    bounds: Bounds,
    inputs: PlanInputs,
    point: SearchPoint,
    names: tuple[str, int],
    tensor: Sequence[int] = (),
    *,
    without: Collection[str] = (),
    watched: tuple[Watch, Part],
) -> list[Candidate]:
    """Evaluate the configurations around a point.

    Args:
        bounds: Evaluates one configuration.
        inputs: The canonical inputs.
        point: The requested configuration of a cluster.
        names: What the point is called (empty: numbered like the others), and how many candidates there are
            already.
        tensor: Tensor-parallel sizes other than the point's, which is then left out; empty: the point's.
        without: Checkpointing policies to leave out.
        watched: Who is told of each configuration and may end the search, and which part of it this is.
    """
    estimator, cluster = bounds.estimator, inputs.clusters[point.cluster]
    machine = inputs.machines[point.cluster]
    space = [s for s in _space(estimator, inputs, point, tensor) if s.checkpointing not in without]
    watch, part = watched
    watch.begin(part, len(space))
    name, before = names
    failed: set[tuple[int, int]] = set()
    found: dict[int, Candidate] = {}
    # The requested one comes first, whatever it needs: others are bounded by what its trace shows.
    order = [place for place in range(len(space)) if name and space[place] == point]
    order += [place for place in bounds.order(space) if place not in order]
    for number, place in enumerate(order):
        option = space[place]
        if (option.cp, option.tp) in failed:
            continue
        watch.evaluating(number + 1)
        try:
            if name and option == point:
                found[place] = estimator.candidate(name, option, cluster, machine)
            else:
                found[place] = bounds.candidate(option)
        except ConfigError:
            # Sequences that cannot be split are not candidates; a request to split them is an error.
            if (option.cp, option.tp) == (point.cp, point.tp):
                raise
            failed.add((option.cp, option.tp))
            continue
        if watch.ends(found[place], number + 1) and number + 1 < len(order):
            break
    ordered = [found[place] for place in sorted(found)]
    return [
        replace(candidate, id=name if name and candidate.settings == point else f"c{before + count:04d}")
        for count, candidate in enumerate(ordered)
    ]


def _space(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, tensor: Sequence[int] = ()
) -> list[SearchPoint]:
    """Return the configurations around a point, which has itself alone where nothing is searched."""
    if inputs.search == "none":
        return [point]
    cluster = inputs.clusters[point.cluster]
    around = enumerate_space(
        point,
        cluster,
        estimator.anatomy,
        fixed=inputs.fixed,
        wide=inputs.search == "wide",
        sequence_length=inputs.recipe.batch.sequence_length,
        hardware=cluster.gpu is not None,
        kernels=optimizer_spec(inputs.recipe.optimizer).kernels,
        tensor=tensor,
    )
    return [option for option in around if not tensor or option.tp in tensor]


def _parts(estimator: Estimator, inputs: PlanInputs, requested: Sequence[SearchPoint]) -> Mapping[Part, int]:
    """Return the parts that a search may have, in their order, and the most configurations of each."""
    parts: dict[Part, int] = {}
    count = experts_of(estimator.anatomy.parameters)
    for point in requested:
        index, cluster = point.cluster, inputs.clusters[point.cluster]
        parts[index, "nothing", 1] = len(_space(estimator, inputs, point))
        if inputs.search == "none":
            continue
        for size in expert_sizes(point, cluster, inputs.fixed, count):
            divided = _with_experts(point, size, inputs.fixed)
            parts[index, "experts", size] = len(_space(estimator, inputs, divided))
        if sizes := tensor_sizes(point, cluster, inputs.fixed):
            whole = point if "ep" in inputs.fixed else replace(point, ep=1)
            parts[index, "layers", 0] = len(_space(estimator, inputs, whole, sizes))
    return parts


EXPOSED = 0.1
"""Part of a step's time that waits for links or the host, from which dividing layers is worth evaluating."""


def _calls_for_dividing(candidates: Sequence[Candidate], inputs: PlanInputs) -> bool:
    """Return whether dividing layers may pay: nothing leaves headroom, the best one offloads to the CPU,
    which is for lack of memory, or it waits for long."""
    fitting = [c for c in candidates if c.rejected_by is None and roomy(c)]
    best = max(fitting, key=lambda c: merit(c, inputs.prefer), default=None)
    if best is None or inputs.search == "wide":
        return True
    if best.settings.cpu_offload and "cpu_offload" not in inputs.fixed:
        return True
    waiting = sum(best.seconds.get(name, 0.0) for name in ("exposed_communication", "offload"))
    return waiting > EXPOSED * (best.step_seconds or 0.0)


def _divide(
    bounds: Bounds,
    inputs: PlanInputs,
    point: SearchPoint,
    whole: Sequence[Candidate],
    before: int,
    watch: Watch,
) -> list[Candidate]:
    """Evaluate groups that share out experts and then, if that is not enough, groups that divide layers.

    Args:
        bounds: Evaluates one configuration.
        inputs: The canonical inputs.
        point: The requested configuration of a cluster.
        whole: What was evaluated around it.
        before: How many candidates there are already.
        watch: Told of each configuration; may end the search.
    """
    estimator, cluster = bounds.estimator, inputs.clusters[point.cluster]
    added: list[Candidate] = []
    count = experts_of(estimator.anatomy.parameters)
    best: tuple[bool, float] | None = None
    around = inputs
    if _promise(whole, inputs)[0]:
        # CPU offload is for lack of memory, and experts of other ranks leave more of it.
        around = replace(inputs, fixed=(*inputs.fixed, "cpu_offload"))
    sizes = expert_sizes(point, cluster, inputs.fixed, count)
    for size in sizes:
        if not _calls_for_dividing([*whole, *added], inputs):
            break
        divided = _with_experts(point, size, inputs.fixed)
        kind = RejectionKind.INDIVISIBLE if count and count % size else RejectionKind.UNSUPPORTED
        refusal = _refusal(estimator, inputs, divided, kind)
        if refusal is not None:
            added.append(refused(f"c{before + len(added):04d}", divided, refusal))
            continue
        names = "", before + len(added)
        outgrown = _outgrown(whole, around)
        part = watch, (point.cluster, "experts", size)
        found = _evaluate(bounds, around, divided, names, without=outgrown, watched=part)
        added += found
        if watch.ended is not None:
            return added
        promise = _promise(found, inputs)
        if not promise[0] and len(sizes) > 1:
            # Of groups that do not fit, how much more the leanest needs says whether a larger one may.
            bounds.find_leanest(found)
            added[len(added) - len(found) :] = found
            promise = _promise(found, inputs)
        if best is not None and promise <= best:
            break  # a larger group sends more tokens between nodes, for gathers that hardly shrink any more
        best = promise
    spread = any(c.rejected_by is None and roomy(c) for c in added)
    if not _calls_for_dividing([*whole, *added], inputs) or (spread and inputs.search != "wide"):
        return added  # dividing the small layers of a mixture sums whole hidden states
    divisible: dict[bool, list[int]] = {}
    point = point if "ep" in inputs.fixed else replace(point, ep=1)
    for size in tensor_sizes(point, cluster, inputs.fixed):
        for sequence in _sequences(inputs):
            divided = replace(_divided(point, size), sequence_parallel=sequence and size > 1)
            refusal = _refusal(estimator, inputs, divided, RejectionKind.INDIVISIBLE)
            if refusal is None:
                divisible.setdefault(divided.sequence_parallel, []).append(size)
                break
        else:
            assert refusal is not None
            added.append(refused(f"c{before + len(added):04d}", divided, refusal))
    for sequence, sizes in divisible.items():
        names = "", before + len(added)
        start = replace(point, sequence_parallel=sequence)
        part = watch, (point.cluster, "layers", 0)
        added += _evaluate(bounds, inputs, start, names, sizes, watched=part)
        if watch.ended is not None:
            break
    return added


def _sequences(inputs: PlanInputs) -> tuple[bool, ...]:
    """Return whether tensor-parallel ranks divide the sequence, too, in the order to try it.

    It moves the same bytes, a sum being a reduction to parts and a gather of them, and what lies between
    layers takes less memory (Megatron-LM, arXiv:2205.05198, section 4.2.2).
    """
    asked = inputs.recipe.sharding.sequence_parallel
    return (asked,) if "sequence_parallel" in inputs.fixed else (True, False)


def _outgrown(candidates: Sequence[Candidate], inputs: PlanInputs) -> set[str]:
    """Return the checkpointing policies whose activations fit beside the states on no expert-parallel mesh.

    Groups of experts shrink what is gathered. What a micro-batch keeps for backward stays as it is while
    routing is balanced, and states take the least where one copy is sharded over all ranks.
    """
    shards: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for candidate in candidates:
        point = candidate.settings
        if candidate.peak is None or candidate.usable_bytes is None or point.cp * point.tp * point.ep > 1:
            continue
        if point.cpu_offload and "cpu_offload" in inputs.fixed:
            continue
        live = candidate.peak.live
        states = sum(h.bytes for h in live if h.name in (Component.PARAMETERS, Component.OPTIMIZER))
        kept = sum(h.bytes for h in live if h.name.group in (ColourGroup.ACTIVATIONS, ColourGroup.OUTSIDE))
        sizes = kept, states, candidate.usable_bytes
        shards.setdefault((point.checkpointing, point.micro_batch), []).append(sizes)
    beyond = {
        key: max(kept for kept, _, _ in rows) + min(states for _, states, _ in rows) > rows[0][2]
        for key, rows in shards.items()
    }
    return {policy for policy, _ in beyond if all(out for key, out in beyond.items() if key[0] == policy)}


def _promise(candidates: Sequence[Candidate], inputs: PlanInputs) -> tuple[bool, float]:
    """Return how good the best candidate is: whether it leaves headroom, and its merit or its free memory."""
    fitting = [c for c in candidates if c.rejected_by is None and roomy(c)]
    if fitting:
        return True, max(merit(c, inputs.prefer) for c in fitting)
    return False, max((c.slack_bytes for c in candidates if c.slack_bytes is not None), default=float("-inf"))


def _divided(point: SearchPoint, size: int) -> SearchPoint:
    """Return a point of the search space with another tensor-parallel size, all other ranks sharding."""
    ranks = point.ranks // (point.cp * size)
    return replace(point, tp=size, dp_replicate=1, dp_shard=ranks)


def _with_experts(point: SearchPoint, size: int, fixed: Sequence[str]) -> SearchPoint:
    """Return a point with another expert-parallel size; other settings stay where they were requested."""
    cp, tp = (getattr(point, name) if name in fixed else 1 for name in ("cp", "tp"))
    ranks = point.ranks // (cp * tp)
    replicate = point.dp_replicate if "mesh" in fixed else 1
    reshard = point.reshard_after_forward
    free = "reshard_after_forward" not in fixed and not isinstance(reshard, bool)
    return replace(
        point,
        ep=size,
        cp=cp,
        tp=tp,
        dp_replicate=replicate,
        dp_shard=ranks // replicate,
        accumulation=max(point.global_batch // (point.micro_batch * ranks), 1),
        reshard_after_forward=True if free else reshard,
    )


def _refusal(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, kind: RejectionKind
) -> Rejection | None:
    """Return why the model cannot be divided as a point says, or None."""
    try:
        estimator.units_of(point, inputs.clusters[point.cluster])
    except ConfigError as error:
        return Rejection(kind, error.message)
    return None


def _optimal(
    estimator: Estimator, inputs: PlanInputs, candidates: Sequence[Candidate], progress: Progress | None
) -> list[Candidate]:
    """Return candidates with checkpointing policies made for them, for the most promising configurations.

    Those that would be the fastest if nothing had to be recomputed.
    """
    best: dict[SearchPoint, float] = {}
    for candidate in candidates:
        group = replace(candidate.settings, checkpointing="full")
        best[group] = max(best.get(group, 0.0), merit(candidate, inputs.prefer))
    added: list[Candidate] = []
    for point in sorted(best, key=lambda group: -best[group])[:_POLICIES]:
        if progress is not None:
            progress(f"looking for the checkpointing policy of micro-batch {point.micro_batch}")
        evaluated = optimal_candidates(
            estimator,
            point,
            inputs.clusters[point.cluster],
            inputs.machines[point.cluster],
            room=_headroom,
            known=[*candidates, *added],
        )
        seen = {candidate.settings for candidate in (*candidates, *added)}
        for candidate in evaluated:
            if candidate.settings not in seen:
                name = f"c{len(candidates) + len(added):04d}"
                added.append(replace(candidate, id=name))
    return added


def _headroom(candidate: Candidate) -> int | None:
    """Return the bytes that a candidate leaves beyond the headroom; negative if it does not fit."""
    if candidate.slack_bytes is None or candidate.usable_bytes is None:
        return None
    free = candidate.slack_bytes - int(HEADROOM * candidate.usable_bytes)
    return free if candidate.rejected_by is None else min(free, -1)


_Replays = dict[tuple[str, bool], Candidate]
"""Candidates whose allocator was replayed, by their id and whether with a timeline."""


def _settle(
    estimator: Estimator,
    inputs: PlanInputs,
    candidates: list[Candidate],
    requested: list[str],
    replays: _Replays,
) -> str | None:
    """Choose on one cluster, replaying the caching allocator for what matters: the choice and the front.

    A replay may show that the choice does not fit after all, or leaves too little free; then the next
    one is looked at. What is chosen in the end has been replayed, and has its timeline. ``candidates`` are
    changed in place.
    """
    replayed, detailed = set(requested), set(requested)
    place = {candidate.id: index for index, candidate in enumerate(candidates)}
    result = choose(candidates, requested, prefer=inputs.prefer)
    for left in range(_REPLAYS, -1, -1):
        if left == 0:
            result = choose(candidates, requested, prefer=inputs.prefer, among=replayed)
        pending = [name for name in (result.chosen,) if name and name not in detailed]
        pending += [name for name in result.front[:_FRONT] if name not in replayed]
        if not pending or (left == 0 and pending[0] != result.chosen):
            break
        name = pending[0]
        point = candidates[place[name]].settings
        cluster, machine = inputs.clusters[point.cluster], inputs.machines[point.cluster]
        detail = name == result.chosen
        if (name, detail) not in replays:
            replays[name, detail] = estimator.candidate(
                name, point, cluster, machine, detail=detail, replay=True
            )
        candidates[place[name]] = replays[name, detail]
        replayed.add(name)
        detailed |= {name} if detail else set()
        result = choose(candidates, requested, prefer=inputs.prefer, among=replayed if left == 0 else None)
    return result.chosen
