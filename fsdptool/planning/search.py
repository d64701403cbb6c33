"""Search: evaluate many configurations, choose one, and give each of the others its rejection."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from fsdptool.errors import ConfigError
from fsdptool.formatting import amount
from fsdptool.modeling.optimizers import optimizer_spec
from fsdptool.planning.assembly import refused
from fsdptool.planning.checkpointing import optimal_candidates
from fsdptool.planning.estimator import Estimator
from fsdptool.planning.search_point import changed_settings
from fsdptool.planning.search_space import enumerate_space, tensor_sizes
from fsdptool.planning.verdict import HEADROOM
from fsdptool.records.plan import Candidate, PlanInputs, Rejection, RejectionKind, SearchPoint
from fsdptool.runs.work import Countdown, left_text

Progress = Callable[[str], None]

_POLICIES = 3
"""Configurations for which a checkpointing policy is made: each takes several traces."""

_FRONT, _REPLAYS = 4, 40
"""Members of the Pareto front whose allocator is replayed, and the most replays (about a second each): only
where one choice after the other turns out too tight are there more than a handful."""

SAME = 0.02
"""Relative difference in speed (or price) below which two configurations count as equally good."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Every candidate that was evaluated, and what became of it.

    Attributes:
        candidates: All of them; of each cluster the requested one first.
        chosen: Id of the chosen candidate; None where none fits.
        front: Ids of the Pareto front of speed and allocated memory.
        requested: Id of the requested candidate of each cluster.
        best: Id of the best candidate of each cluster; None where none fits.
    """

    candidates: tuple[Candidate, ...]
    chosen: str | None
    front: tuple[str, ...]
    requested: tuple[str, ...]
    best: tuple[str | None, ...] = ()


def run_search(
    estimator: Estimator,
    inputs: PlanInputs,
    requested: Sequence[SearchPoint],
    *,
    progress: Progress | None = None,
) -> SearchResult:
    """Evaluate the requested configuration and, if a search is requested, every one around it.

    Args:
        estimator: Evaluates one configuration.
        inputs: The canonical inputs.
        requested: The search point of the requested configuration on each cluster.
        progress: Called with a line of progress from time to time.
    """
    candidates: list[Candidate] = []
    requested_ids: list[str] = []
    for point in requested:
        name = "requested" if len(requested) == 1 else f"requested{point.cluster}"
        requested_ids.append(name)
        own = _evaluate(estimator, inputs, point, (name, len(candidates)), progress=progress)
        candidates += own
        sizes = tensor_sizes(point, inputs.clusters[point.cluster], inputs.fixed)
        if sizes and inputs.search != "none" and _calls_for_dividing(own, inputs):
            divisible = []
            for size in sizes:
                divided = _divided(point, size)
                reason = _indivisible(estimator, inputs, divided)
                if reason is None:
                    divisible.append(size)
                else:
                    candidates.append(refused(f"c{len(candidates):04d}", divided, reason))
            if divisible:
                label = (name, len(candidates))
                candidates += _evaluate(estimator, inputs, point, label, divisible, progress=progress)
    if inputs.optimal_checkpointing:
        candidates += _optimal(estimator, inputs, candidates, progress)
    # Each offer has its best row, whose allocator is replayed as the chosen one's is.
    best = []
    for index in range(len(requested)):
        own = [c for c in candidates if c.settings.cluster == requested[index].cluster]
        chosen, settled = _settle(estimator, inputs, own, [requested_ids[index]])
        best.append(chosen)
        candidates = [settled.get(candidate.id, candidate) for candidate in candidates]
    among = {name for name in best if name is not None}
    result = choose(candidates, requested_ids, prefer=inputs.prefer, among=among)
    return replace(result, best=tuple(best))


def _evaluate(
    estimator: Estimator,
    inputs: PlanInputs,
    point: SearchPoint,
    names: tuple[str, int],
    tensor: Sequence[int] = (),
    *,
    progress: Progress | None,
) -> list[Candidate]:
    """Evaluate the configurations around a point.

    Args:
        estimator: Evaluates one configuration.
        inputs: The canonical inputs.
        point: The requested configuration of a cluster.
        names: What it is called, and how many candidates there are already.
        tensor: Tensor-parallel sizes other than the point's, which is then left out; empty: the point's.
        progress: Called with a line of progress from time to time.
    """
    cluster, machine = inputs.clusters[point.cluster], inputs.machines[point.cluster]
    space = [point]
    if inputs.search != "none":
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
        space = [option for option in around if not tensor or option.tp in tensor]
    name, before = names
    failed: set[tuple[int, int]] = set()
    countdown = Countdown(len(space))
    candidates: list[Candidate] = []
    for number, option in enumerate(space):
        if (option.cp, option.tp) in failed:
            continue
        count = before + len(candidates)
        label = name if option == point else f"c{count:04d}"
        if progress is not None and count % 100 == 99:
            left = left_text(countdown.left(number))
            progress(f"evaluated {number + 1} of {len(space)} configurations{left}")
        try:
            candidates.append(estimator.candidate(label, option, cluster, machine, detail=label == name))
        except ConfigError:
            # Sequences that cannot be split are not candidates; a request to split them is an error.
            if (option.cp, option.tp) == (point.cp, point.tp):
                raise
            failed.add((option.cp, option.tp))
    return candidates


EXPOSED = 0.1
"""Part of a step's time that waits for links or the host, from which dividing layers is worth evaluating."""


def _calls_for_dividing(candidates: Sequence[Candidate], inputs: PlanInputs) -> bool:
    """Return whether tensor parallelism may pay: nothing leaves headroom, or the best one waits for long."""
    fitting = [c for c in candidates if c.rejected_by is None and roomy(c)]
    best = max(fitting, key=lambda c: _merit(c, inputs.prefer), default=None)
    if best is None or inputs.search == "wide":
        return True
    waiting = sum(best.seconds.get(name, 0.0) for name in ("exposed_communication", "offload"))
    return waiting > EXPOSED * (best.step_seconds or 0.0)


def _divided(point: SearchPoint, size: int) -> SearchPoint:
    """Return a point of the search space with another tensor-parallel size, all other ranks sharding."""
    ranks = point.ranks // (point.cp * size)
    return replace(point, tp=size, dp_replicate=1, dp_shard=ranks)


def _indivisible(estimator: Estimator, inputs: PlanInputs, point: SearchPoint) -> str | None:
    """Return why the model cannot be divided as a point says, or None."""
    try:
        estimator.units_of(point, inputs.clusters[point.cluster])
    except ConfigError as error:
        return error.message
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
        best[group] = max(best.get(group, 0.0), _merit(candidate, inputs.prefer))
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


def _settle(
    estimator: Estimator, inputs: PlanInputs, candidates: list[Candidate], requested: list[str]
) -> tuple[str | None, dict[str, Candidate]]:
    """Choose on one cluster, replaying the caching allocator for what matters: the choice and the front.

    A replay may show that the choice does not fit after all, or leaves too little free; then the next
    one is looked at. What is chosen in the end has been replayed, and has its timeline.
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
        candidates[place[name]] = estimator.candidate(
            name, point, cluster, machine, detail=detail, replay=True
        )
        replayed.add(name)
        detailed |= {name} if detail else set()
        result = choose(candidates, requested, prefer=inputs.prefer, among=replayed if left == 0 else None)
    return result.chosen, {candidate.id: candidate for candidate in candidates}


def choose(
    candidates: Sequence[Candidate],
    requested: Sequence[str],
    *,
    prefer: str = "speed",
    among: Collection[str] | None = None,
) -> SearchResult:
    """Choose the fastest (or cheapest) candidate that fits with headroom; deterministic.

    Differences below :data:`SAME` are within the time model's error: among those the least memory
    wins, then what changes the fewest settings, then the earlier candidate. CPU offload is chosen only where
    nothing else fits or where it is faster by more than that error: it moves the optimizer to the host, whose
    speed and memory are known least. Without any that leave headroom, the others are eligible.

    Args:
        candidates: Everything that was evaluated.
        requested: Ids of the requested candidates.
        prefer: ``speed`` or ``price``.
        among: Ids that may be chosen; None: any.
    """
    fitting = [c for c in candidates if c.rejected_by is None]
    front = pareto(fitting)
    allowed = [c for c in fitting if among is None or c.id in among]
    eligible = [c for c in allowed if roomy(c)] or allowed
    if not eligible:
        return SearchResult(tuple(candidates), None, front, tuple(requested))
    best = max(_merit(candidate, prefer) for candidate in eligible)
    resident = [c for c in eligible if not c.settings.cpu_offload]
    if any(_merit(c, prefer) >= best * (1 - SAME) for c in resident):
        eligible = resident
    near = [c for c in eligible if _merit(c, prefer) >= best * (1 - SAME)]
    start = {c.settings.cluster: c.settings for c in candidates if c.id in requested}
    place = {candidate.id: index for index, candidate in enumerate(candidates)}
    chosen = min(near, key=lambda c: (*_thrift(c, start[c.settings.cluster]), place[c.id]))
    explained = tuple(_reject(candidate, chosen, prefer) for candidate in candidates)
    return SearchResult(explained, chosen.id, front, tuple(requested))


def roomy(candidate: Candidate) -> bool:
    """Return whether the headroom stays free (always on hosts, where nothing is known of others)."""
    if candidate.slack_bytes is None or candidate.usable_bytes is None:
        return True
    return candidate.slack_bytes >= HEADROOM * candidate.usable_bytes


def pareto(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return the ids no other candidate beats in both speed and allocated memory, fastest first.

    Allocated, because it is known of all alike; reserved memory is replayed for few.
    """
    known = [c for c in candidates if c.samples_per_second and c.allocated_peak_bytes is not None]
    known.sort(key=lambda c: (-(c.samples_per_second or 0), c.allocated_peak_bytes or 0))
    front: list[str] = []
    least: int | None = None
    for candidate in known:
        if least is None or (candidate.allocated_peak_bytes or 0) < least:
            front.append(candidate.id)
            least = candidate.allocated_peak_bytes
    return tuple(front)


def _merit(candidate: Candidate, prefer: str) -> float:
    """Samples per second, or per unit of money."""
    price = candidate.price_per_million_samples
    if prefer == "price" and price:
        return 1 / price
    return candidate.samples_per_second or 0.0


def _thrift(candidate: Candidate, start: SearchPoint) -> tuple[int, int]:
    """Memory in steps of 64 MiB, and how many settings differ from what was requested."""
    changed = len(changed_settings(start, candidate.settings))
    return (candidate.allocated_peak_bytes or 0) // (64 * 2**20), changed


def _reject(candidate: Candidate, chosen: Candidate, prefer: str) -> Candidate:
    if candidate.id == chosen.id or candidate.rejected_by is not None:
        return candidate
    return replace(candidate, rejected_by=_rejection(candidate, chosen, prefer))


def _rejection(candidate: Candidate, chosen: Candidate, prefer: str) -> Rejection:
    """Return why a candidate that fits was not chosen."""
    if not roomy(candidate) and roomy(chosen):
        free = f"leaves only {amount(candidate.slack_bytes)} free; the search keeps {HEADROOM:.0%} free"
        return Rejection(RejectionKind.HEADROOM, free)
    merit, best = _merit(candidate, prefer), _merit(chosen, prefer)
    by_price = prefer == "price"
    if merit < best:
        factor = best / merit - 1 if merit else float("inf")
        if by_price:
            return Rejection(RejectionKind.PRICE, f"{factor:.1%} more expensive per sample than {chosen.id}")
        return Rejection(RejectionKind.SPEED, f"{factor:.1%} slower than {chosen.id}")
    extra = (candidate.allocated_peak_bytes or 0) - (chosen.allocated_peak_bytes or 0)
    if candidate.settings.cpu_offload and not chosen.settings.cpu_offload:
        gain = f"at most {SAME:.0%} {'cheaper' if by_price else 'faster'} than {chosen.id}"
        return Rejection(RejectionKind.CPU_OFFLOAD, f"{gain}, which runs the optimizer on the GPUs")
    if extra > 0:
        better = "cheaper per sample" if by_price else "faster"
        clear = best and merit > best * 1.0005
        gain = f"only {merit / best - 1:.1%} {better}" if clear else f"not {better}"
        detail = f"{gain} than {chosen.id} and needs {amount(extra)} more memory"
        return Rejection(RejectionKind.MEMORY_FOR_SPEED, detail)
    detail = f"equivalent to {chosen.id}, which changes fewer of your settings"
    return Rejection(RejectionKind.MORE_CHANGES, detail)
