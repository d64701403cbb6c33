"""Making a plan: resolve and inspect the model, evaluate the request, search around it, give a verdict.

A plan is a document, too (``schemas/plan.schema.json``), which is read back here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, PlanError
from fsdptool.files.values import check, read_object
from fsdptool.formatting import amount, count
from fsdptool.inspection.micro_batch import planned_batch, sample_size
from fsdptool.modeling.resolve import on_ranks, resolve_run
from fsdptool.planning.advice.diagnostics import advise, advise_lengths, ended_early
from fsdptool.planning.advice.mesh_choice import mesh_choice
from fsdptool.planning.advice.offers import describe_offers
from fsdptool.planning.advice.shortfall import find_shortfall, leanest
from fsdptool.planning.advice.suggestions import avoid_fragmentation, improve, suggest
from fsdptool.planning.candidate.assembly import is_refused
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.point import at_point, files_of, point_flags, point_of
from fsdptool.planning.candidate.verdict import HEADROOM
from fsdptool.planning.clusters import describe
from fsdptool.planning.hardware import expands
from fsdptool.planning.lengths import plan_lengths
from fsdptool.planning.pipeline import NOTE as PIPELINE_NOTE
from fsdptool.planning.pipeline import pipeline_flags, plan_pipeline, stage_cluster
from fsdptool.planning.request.file_run import bound_of
from fsdptool.planning.request.followed_loop import suited
from fsdptool.planning.request.inputs import Request
from fsdptool.planning.request.options import declared
from fsdptool.planning.request.recipe import check_sizes
from fsdptool.planning.search.batch_sizes import largest_batch
from fsdptool.planning.search.bounds import is_bounded
from fsdptool.planning.search.choice import SearchResult
from fsdptool.planning.search.search import run_search
from fsdptool.planning.time.expert_time import exchange_sizes
from fsdptool.records.advice import Suggestion
from fsdptool.records.anatomy import Anatomy, ModelSpec
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.diagnostic import Diagnostic, digest, envelope
from fsdptool.records.plan import BESIDE_TP, Candidate, Plan, PlanInputs, SampleSize, SearchPoint, Verdict
from fsdptool.records.plan_details import ExpertRouting, LargestBatch, PlanDetails, PlannedModel
from fsdptool.records.recipe import Recipe
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Component
from fsdptool.tensor.sites import experts_of

_ENVELOPE = ("schema", "schema_version", "tool_version", "libraries", "inputs_digest")
_DETAILS = frozenset(item.name for item in fields(PlanDetails))


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON document that ``emit-config``, ``train`` and ``--check`` accept."""
    body = to_json(plan)
    diagnostics, unknowns = body.pop("diagnostics"), body.pop("unknowns")
    document = envelope("plan", plan.inputs, body)
    document["diagnostics"], document["unknowns"] = diagnostics, unknowns
    return document


def read_plan(path: Path) -> Plan:
    """Return the plan a document contains.

    Raises:
        ConfigError: The file cannot be read, or breaks the schema.
        PlanError: The file is not a plan.
    """
    return plan_from(read_object(path), where=str(path))


def plan_from(data: Mapping[str, Any], *, where: str) -> Plan:
    """Return the plan a parsed document contains.

    Raises:
        ConfigError: It breaks the schema; the message names the place.
        PlanError: It is not a plan.
    """
    if data.get("schema") != "plan":
        raise PlanError(
            f"{where} is not a plan (its schema is {data.get('schema')!r})",
            help="fsdptool plan ... -o plan.json writes one",
        )
    check(data, "plan", where=where)
    body = {key: value for key, value in data.items() if key not in _ENVELOPE}
    # Nothing rests on the details: those of another version, and what --check adds, are left out.
    body["details"] = {key: value for key, value in data["details"].items() if key in _DETAILS}
    try:
        return from_json(Plan, body, where=where)
    except ConfigError as error:
        raise PlanError(error.message, help="create a new plan with fsdptool plan") from error


def own_plan(document: Mapping[str, Any]) -> Plan:
    """Return the plan of a document that this version made; its schema is not checked again."""
    return from_json(Plan, {key: value for key, value in document.items() if key not in _ENVELOPE})


Progress = Callable[[str], None]


def make_plan(
    request: Request,
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    model: tuple[ModelSpec, Anatomy] | None = None,
) -> Plan:
    """Return the plan of canonical inputs.

    Args:
        request: The inputs and what was noticed while reading them.
        progress: Called with a line of progress from time to time.
        stop: Asked after each configuration of a search whether to answer with the best so far.
        model: What :func:`inspect_model` returned for these inputs; None inspects the model here.

    Raises:
        PlanError: The inputs contradict each other.
    """
    inputs = request.inputs
    check_sizes(inputs.recipe)
    runs = _requested_runs(inputs)  # contradictions between sizes are reported before anything is built
    if progress is not None:
        progress("building the model without weights")
    spec, anatomy = model if model is not None else inspect_model(inputs)
    _check_model(spec, anatomy, inputs.recipe)
    noticed = [*request.diagnostics, *_serious(spec.diagnostics), *_serious(anatomy.diagnostics)]
    decided = replace(inputs.recipe, model=runs[0].recipe.model, method=runs[0].recipe.method)
    inputs = suited(spec, replace(inputs, recipe=decided, model=describe_model(spec, anatomy)))
    run = replace(
        runs[0], recipe=replace(runs[0].recipe, objective=inputs.recipe.objective), loop=inputs.loop
    )
    estimator = Estimator(spec, anatomy, run, profile=inputs.profile)
    requested = [point_of(run, index) for index, run in enumerate(runs)]
    if inputs.pipeline.ranks > 1:
        plan = _plan_stages(estimator, inputs, requested[0], noticed)
    else:
        tried: tuple[LargestBatch, ...] = ()
        if inputs.max_batch:
            requested, tried = largest_batch(estimator, inputs, requested, progress=progress)
        if progress is not None:
            progress(
                f"tracing a step of {spec.model_class} with {count(anatomy.total_parameters)} parameters"
            )
        result = run_search(estimator, inputs, requested, progress=progress, stop=stop)
        plan = _conclude(estimator, inputs, requested, result, noticed, tried, progress)
    return replace(plan, unread=request.unread, verdict=_certain(plan))


_KEPT = (Component.PARAMETERS, Component.OPTIMIZER, Component.EMA, Component.REPLICATED, Component.BUFFERS)


def _certain(plan: Plan) -> Verdict:
    """Return the verdict, or unknown where what is not planned of a described run could turn it."""
    limits, verdict = plan.inputs.limits, plan.verdict
    bound = bound_of(limits)
    if verdict == "does_not_fit" and all(limit.side == "more" or limit.passing for limit in limits):
        # Whatever passes: no configuration has room for what is kept between steps.
        # What was not simulated shards its states as something that was, or needs more for them alone.
        simulated = [c for c in plan.candidates if not is_bounded(c)]
        kept = (sum(item.bytes or 0 for item in c.components if item.name in _KEPT) for c in simulated)
        if all(size > (c.usable_bytes or size) for size, c in zip(kept, simulated, strict=True)):
            return verdict
    certain = {"exact": True, "upper": verdict == "fits", "lower": verdict == "does_not_fit", "open": False}
    return verdict if certain[bound] else "unknown"


def _requested_runs(inputs: PlanInputs) -> list[ResolvedRun]:
    """Return the requested run on each cluster; further clusters size the sharded dimension themselves."""
    first, *others = (stage_cluster(inputs.pipeline, cluster).world_size for cluster in inputs.clusters)
    run = resolve_run(inputs.recipe, inputs.settings, ranks=first, loop=inputs.loop)
    free = replace(inputs.settings.mesh, dp_shard=None)
    return [run, *(on_ranks(run, inputs.recipe.batch, free, ranks) for ranks in others)]


def chosen_run(plan: Plan) -> tuple[Recipe, FsdpSettings, Cluster]:
    """Return recipe, settings and cluster of the chosen candidate, or of the requested one if none is.

    What ``emit-config`` writes and ``train`` runs.

    Raises:
        PlanError: The plan has what is planned only: pipeline stages, or another loop's way to compute.
    """
    inputs = plan.inputs
    beside = [name for name in inputs.loop.assumed if name in BESIDE_TP]
    if beside:
        raise PlanError(
            f"this plan has --assume {beside[0]}: it is planned only, and no training run does"
            " it beside tensor parallelism",
            help="plan the run without --assume",
        )
    if inputs.pipeline.ranks > 1:
        raise PlanError(
            f"this plan has --pp {inputs.pipeline.ranks}: pipeline parallelism is planned only, and no"
            " configuration or training run has it",
            help="plan the run without --pp",
        )
    candidate = chosen_candidate(plan)
    cluster = inputs.clusters[candidate.settings.cluster]
    ranks = stage_cluster(inputs.pipeline, inputs.clusters[0]).world_size
    run = resolve_run(inputs.recipe, inputs.settings, ranks=ranks, loop=inputs.loop)
    return *files_of(at_point(run, candidate.settings, cluster)), cluster


def chosen_candidate(plan: Plan) -> Candidate:
    """Return the chosen candidate, or the requested one if none is."""
    if not plan.candidates:
        raise PlanError("the plan has no candidates", help="create a new plan with fsdptool plan")
    for candidate in plan.candidates:
        if candidate.id == plan.chosen:
            return candidate
    return plan.candidates[0]


def _serious(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """``detect`` reports everything; a plan repeats what may make it wrong."""
    return [item for item in diagnostics if item.severity != "info"]


def describe_model(spec: ModelSpec, anatomy: Anatomy) -> PlannedModel:
    """Return what a reference resolved to, as far as a plan depends on it."""
    return PlannedModel(
        reference=spec.reference.id,
        kind=spec.reference.kind,
        revision=spec.reference.revision,
        family=spec.family,
        flavour=spec.flavour,
        class_=spec.model_class,
        library=spec.library,
        component=spec.component,
        parameters=anatomy.total_parameters,
        config_digest=digest(spec.config),
    )


def inspect_model(inputs: PlanInputs) -> tuple[ModelSpec, Anatomy]:
    """Resolve and inspect the model of canonical inputs.

    Raises:
        ReferenceError: The model cannot be resolved.
        PlanError: Its configuration names fewer positions than a sample has tokens.
        ModelError: It cannot be built.
    """
    from fsdptool.inspection import inspect
    from fsdptool.source import resolve_choice

    spec = resolve_choice(inputs.recipe.model, catalogue=True)
    _check_length(spec, inputs.recipe)  # before it is built, which takes much longer
    return spec, inspect(spec, wrap=inputs.wrap, exclude=inputs.exclude)


def _check_model(spec: ModelSpec, anatomy: Anatomy, recipe: Recipe) -> None:
    if anatomy.total_parameters >= 1 << 48:
        raise PlanError(
            f"{anatomy.total_parameters:,} parameters are too many for memory arithmetic",
            help="check the sizes in the configuration for a typing error",
        )
    _check_length(spec, recipe)
    # The family knows the rest: positions its configuration class defaults to, sizes images must have.
    planned_batch(spec, recipe)


def _check_length(spec: ModelSpec, recipe: Recipe) -> None:
    length = recipe.batch.sequence_length
    for key in ("max_position_embeddings", "n_positions"):
        positions = spec.config.get(key)
        if length is not None and isinstance(positions, int) and length > positions:
            raise PlanError(
                f"sequence length {length:,} is beyond the {positions:,} positions of {spec.reference.id}",
                help=f"use at most {positions}; to extend the context: --override {key}={length}",
            )


def _decided_flags(inputs: PlanInputs, point: SearchPoint, sample: SampleSize) -> list[str]:
    """Return the flags that fix a point: the four that most runs turn on, others that are not usual, and the
    assumed size of a sample."""
    usual = SearchPoint(
        cluster=point.cluster,
        layout="native",
        wrap_policy="transformer",
        wrap_classes=(),
        micro_batch=1,
        accumulation=1,
        checkpointing="none",
        reshard_after_forward=True,
        dp_replicate=1,
        dp_shard=inputs.clusters[point.cluster].world_size,
        cp=1,
        cpu_offload=False,
        optimizer_implementation="auto",
        prefetch=1,
        reduce_dtype="float32",
        gradients="sharded",
    )
    flags, unset = point_flags(point), point_flags(usual)
    always = ["micro_batch", "checkpointing", "reshard", "offload"]
    if inputs.run is not None and inputs.run.fsdp == "none" and point.dp_shard > 1:
        always.append("hsdp")  # the file says that every rank holds a copy
    sizes = [
        part for name in sample.assumed for part in (declared()[name].flags[0], str(getattr(sample, name)))
    ]
    return sizes + [
        part for name, given in flags.items() if name in always or given != unset.get(name) for part in given
    ]


def _conclude(
    estimator: Estimator,
    inputs: PlanInputs,
    requested: Sequence[SearchPoint],
    result: SearchResult,
    diagnostics: list[Diagnostic],
    tried: tuple[LargestBatch, ...],
    progress: Progress | None,
) -> Plan:
    by_id = {candidate.id: candidate for candidate in result.candidates}
    first = by_id[result.requested[0]]
    chosen = by_id.get(result.chosen) if result.chosen is not None else None
    steps: tuple[Suggestion, ...] = ()
    verdict = "fits"
    if chosen is None:
        evaluated = [c for c in result.candidates if not is_refused(c) and not is_bounded(c)]
        unknown = result.ended is not None or any(c.device_total_bytes is None for c in evaluated)
        verdict = "unknown" if unknown or first.usable_bytes is None else "does_not_fit"
    elif not chosen.timeline:
        # Searches keep timelines for few; the chosen one's is the answer.
        place = chosen.settings.cluster
        full = estimator.candidate(chosen.id, chosen.settings, inputs.clusters[place], inputs.machines[place])
        result = replace(
            result,
            candidates=tuple(full if c.id == chosen.id else c for c in result.candidates),
        )
        chosen = full
    shortfall, start = None, chosen or first
    if verdict == "does_not_fit":
        shortfall = find_shortfall(estimator, inputs, result.candidates)
        # Of those that keep everything on the GPUs: CPU offload is one of the changes.
        resident = [c for c in result.candidates if not c.settings.cpu_offload]
        start = leanest(resident or result.candidates) or first
        steps = suggest(estimator, inputs, start.settings, start)
    elif chosen is not None:
        steps = avoid_fragmentation(estimator, inputs, chosen)
        if inputs.search != "none" and result.ended is None:
            steps += improve(estimator, inputs, chosen)
    diagnostics += advise(estimator, inputs, requested[0], first, chosen)
    shown_point = (chosen or first).settings
    place = shown_point.cluster
    experts = routing(estimator, chosen or first, inputs.clusters[place], inputs.machines[place])
    if experts is not None:
        estimator.notes[routing_note(experts)] = None
    mesh = None
    if chosen is not None and len(result.candidates) > 1:
        mesh = mesh_choice(result.candidates, chosen, inputs.clusters[place], prefer=inputs.prefer)
    lengths = plan_lengths(estimator, inputs, chosen or first, progress=progress)
    if result.ended is not None:
        diagnostics.append(ended_early(result.ended))
    diagnostics += advise_lengths(lengths, expandable=expands(inputs.clusters[place], inputs.loop))
    sample = sample_size(estimator.spec, inputs.recipe)
    details = replace(
        _common_details(estimator, inputs, shown_point, inputs.clusters[place]),
        asked=tuple(result.requested),
        flags=tuple(_decided_flags(inputs, shown_point, sample)),
        front=tuple(result.front),
        offers=describe_offers(inputs, result.candidates, result.best),
        states=estimator.states(shown_point, inputs.clusters[place]),
        searched=len(result.candidates),
        changes_from=start.id,
        max_batch=tried,
        routing=experts,
        mesh=mesh,
    )
    return Plan(
        verdict=verdict,  # type: ignore[arg-type]  # one of the three above
        chosen=chosen.id if chosen is not None else None,
        candidates=result.candidates,
        next_steps=steps,
        inputs=inputs,
        confidence=estimator.confidence,
        diagnostics=tuple(dict.fromkeys(diagnostics)),
        unknowns=tuple(estimator.unknowns),
        shortfall=shortfall,
        lengths=lengths,
        details=details,
        sample=sample,
    )


def _common_details(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, cluster: Cluster
) -> PlanDetails:
    return PlanDetails(
        model=inputs.model,
        clusters=tuple(describe(cluster) for cluster in inputs.clusters),
        notes=estimator.notes_at(point, cluster),
        dtypes=estimator.stored_dtypes(point, cluster),
        wrap_classes=estimator.anatomy.wrap.classes,
        adapter=estimator.spec.adapter is not None,
        headroom=HEADROOM,
    )


def _plan_stages(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, diagnostics: Sequence[Diagnostic]
) -> Plan:
    """Return the plan of a pipeline: one candidate, which no search turns."""
    cluster, machine = inputs.clusters[0], inputs.machines[0]
    candidate, stages = plan_pipeline(estimator, inputs.pipeline, point, cluster, machine)
    estimator.notes[PIPELINE_NOTE] = None
    reason = candidate.rejected_by
    known = candidate.device_total_bytes is not None and candidate.usable_bytes is not None
    chosen = candidate.id if reason is None else None
    sample = sample_size(estimator.spec, inputs.recipe)
    details = replace(
        _common_details(estimator, inputs, point, stage_cluster(inputs.pipeline, cluster)),
        asked=(candidate.id,),
        flags=(*pipeline_flags(inputs.pipeline), *_decided_flags(inputs, point, sample)),
        front=(candidate.id,) if chosen else (),
        offers=describe_offers(inputs, [candidate], [chosen]),
        searched=1,
        changes_from=candidate.id,
        pipeline=stages,
    )
    return Plan(
        verdict="fits" if chosen else "does_not_fit" if known else "unknown",
        chosen=chosen,
        candidates=(candidate,),
        next_steps=(),
        inputs=inputs,
        confidence=estimator.confidence,
        diagnostics=tuple(dict.fromkeys(diagnostics)),
        unknowns=tuple(estimator.unknowns),
        details=details,
        sample=sample,
    )


def routing(
    estimator: Estimator, candidate: Candidate, cluster: Cluster, machine: Machine
) -> ExpertRouting | None:
    """Return the allocated peak under balanced and under the worst routing, and why; None without experts.

    A trace runs without values, so its memory cannot depend on which expert a token goes to: the
    products of all routed tokens are grouped, or every expert has room for a fixed number of them. A
    model that loops over the experts it hits cannot be traced, and both figures are unknown. Over an
    expert-parallel group, routing decides how many tokens come to a rank. The worst case, in which all tokens
    of the group do, is traced, too.
    """
    count = experts_of(estimator.anatomy.parameters)
    if count is None:
        return None
    peak = candidate.allocated_peak_bytes
    if peak is None:
        reason = "the tokens of each expert decide the sizes of its products, which are not known in advance"
        return ExpertRouting(count, None, None, reason)
    point = candidate.settings
    if point.ep == 1:
        reason = "all routed tokens are computed together, in buffers of the same size for every routing"
        return ExpertRouting(count, peak, peak, reason)
    worst = replace(estimator, worst_routing=True, _traces={}, _costs={}, _flops={})
    skewed = worst.candidate("worst", point, cluster, machine, detail=False, replay=False)
    units = estimator.units_of(point, cluster)
    most, least = (
        max(
            (size for ways in exchange_sizes(e.trace_of(point, cluster), units).values() for size in ways[0]),
            default=0,
        )
        for e in (worst, estimator)
    )
    reason = f"the tokens of all {point.ep} expert-parallel ranks may choose experts of one rank"
    return ExpertRouting(count, peak, skewed.allocated_peak_bytes, reason, least, most)


def routing_note(routing: ExpertRouting) -> str:
    """Return :func:`routing` in one line."""
    balanced, worst = amount(routing.balanced_bytes), amount(routing.worst_case_bytes)
    note = (
        f"{routing.experts} experts: the peak is {balanced} allocated with balanced routing and {worst}"
        f" in the worst case: {routing.reason}"
    )
    if routing.all_to_all_bytes is not None:
        least, most = amount(routing.all_to_all_bytes), amount(routing.worst_all_to_all_bytes)
        note += f"; each rank receives {least} to {most} in an all-to-all"
    return note
