"""The words and the curve of a plan, shared by the console and the HTML page. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from fsdptool.formatting import amount
from fsdptool.records.advice import ShortfallKind, Suggestion, SuggestionKind
from fsdptool.records.command_documents import SweepRow
from fsdptool.records.compilation import CompileReason
from fsdptool.records.fused_loss import FusedLossReason
from fsdptool.records.mesh import PLANNED
from fsdptool.records.plan import (
    Candidate,
    Moment,
    Plan,
    RejectionKind,
    SampleSize,
    SearchPoint,
    Verdict,
)
from fsdptool.records.plan_details import (
    CommunicationWaits,
    MeshAlternative,
    MeshGroup,
    PlannedOffer,
    TriedSettings,
)
from fsdptool.records.recipe import Lora
from fsdptool.records.run import RunPhase
from fsdptool.records.trace import ColourGroup

VERDICTS = {"fits": "fits", "does_not_fit": "does not fit", "unknown": "unknown"}
MARKS = {"exact": "exact", "estimated": "estimate", "unknown": "unknown"}
REJECTIONS = {kind: kind.replace("_", " ") for kind in RejectionKind}
REJECTIONS[RejectionKind.CPU_OFFLOAD] = "CPU offload"
"""What each kind of rejection is called."""
FITS = {True: "fits", False: "does not fit", None: "unknown"}
"""Whether a suggestion fits."""
WITH_ALL_ABOVE = ", with all changes above"
"""What follows the change of a suggestion that holds those before it, too."""
ACTIVATIONS = "activations: "
"""How a plan's unknowns begin that say why activations are unknown."""


def duration(seconds: float | None, like: float | None = None) -> str:
    """Return seconds with three digits; None is unknown.

    Args:
        seconds: The time.
        like: A time in whose unit to write it, so that both ends of a range have one; None: its own.
    """
    if seconds is None:
        return "unknown"
    measure = seconds if like is None else like
    if measure >= 7200:
        hours = seconds / 3600
        return f"{hours:.1f} h" if measure < 72 * 3600 else f"{hours / 24:.1f} days"
    if measure >= 120:
        return f"{seconds / 60:.1f} min"
    value, unit = (seconds, "s") if measure >= 0.1 else (seconds * 1000, "ms")
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def rate(value: float | None, like: float | None = None) -> str:
    """Return a count per second with three digits, in the unit of ``like`` where that is given."""
    if value is None:
        return "unknown"
    measure = value if like is None else like
    for size, unit in ((1e6, " M"), (1e4, " k")):
        if measure >= size:
            scaled = value / (1e3 if unit == " k" else 1e6)
            return f"{scaled:.3g}{unit}" if scaled < 1000 else f"{scaled:.0f}{unit}"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def share(size: int | None, total: int) -> str:
    """Return a share of the total in percent; empty if either is unknown."""
    return f"{size / total:.1%}" if total and size is not None else ""


def reason(candidate: Candidate) -> str:
    """Return why a candidate was not chosen: the kind and the detail; empty where it may be chosen."""
    rejection = candidate.rejected_by
    return f"{REJECTIONS[rejection.kind]}: {rejection.detail}" if rejection else ""


def find(plan: Plan, id: str | None) -> Candidate | None:
    """Return the candidate called ``id``, or None."""
    return next((item for item in plan.candidates if item.id == id), None)


def shown(plan: Plan) -> Candidate:
    """Return the candidate an answer is about: the chosen one, else the requested one."""
    return find(plan, plan.chosen) or plan.candidates[0]


def start_of_changes(plan: Plan) -> Candidate:
    """Return the candidate that the suggestions change; plans of earlier versions do not tell it."""
    return find(plan, plan.details.changes_from) or shown(plan)


def change_words(step: Suggestion) -> str:
    """Return the change of a suggestion in words, below the suggestions before it."""
    return step.change + (WITH_ALL_ABOVE if step.with_all_above else "")


def mesh(settings: SearchPoint | MeshAlternative) -> str:
    """Return the mesh in words."""
    sizes = [(item, getattr(settings, item.name)) for item in PLANNED]
    return " x ".join(f"{item.word} {size}" for item, size in sizes if size > 1 or item.name == "dp_shard")


def is_plain(settings: SearchPoint) -> bool:
    """Whether the mesh is sharding over all ranks and nothing else."""
    return all(getattr(settings, item.name) == 1 for item in PLANNED if item.name != "dp_shard")


def wrapping(settings: SearchPoint, detected: Sequence[str] = ()) -> str:
    """Return the wrap choice in words; ``detected`` are the classes where the settings name none."""
    if settings.wrap_policy != "transformer":
        return "root only" if settings.wrap_policy == "none" else "by size"
    return ", ".join(settings.wrap_classes or detected) or "detected classes"


def resharding(value: bool | int) -> str:
    """Return the reshard setting in words."""
    if value is True:
        return "yes"
    return "no" if value is False else f"to {value} ranks"


PHASES = {
    "load": "the weights are loaded shard by shard",
    "first step": "the first step: optimizer states are created",
    "forward": "forward of every later step, with the loss",
    "backward": "backward of every later step",
    "optimizer": "the optimizer step, with gradients allocated",
    "average": "the EMA update",
    "evaluation": "validation, without gradients",
    "sampling": "sample generation",
    "save": "a checkpoint is written",
    "export": "fsdptool export, as a separate process",
}
"""What happens in each phase of a run."""


def phases(candidate: Candidate) -> list[tuple[str, str, str, str, str]]:
    """Return a row per phase of the run: name, what happens, device, host, basis."""
    rows = []
    for item in candidate.phases:
        host, first = item.host_bytes_per_rank, item.host_bytes_rank_0
        parts = [amount(host)] if host else []
        parts += (
            [f"{amount(first)} on rank 0" if item.name is not RunPhase.EXPORT else amount(first)]
            if first
            else []
        )
        device = "none" if item.allocated_bytes == 0 else amount(item.allocated_bytes)
        rows.append(
            (item.name.value, PHASES[item.name], device, " + ".join(parts) or "none", MARKS[item.basis])
        )
    return rows


def batch(settings: SearchPoint) -> str:
    """Return the batch's sizes: per forward, forwards per step, total."""
    return (
        f"{settings.micro_batch} x {settings.accumulation} x {settings.data_parallel} ranks"
        f" = {settings.global_batch}"
    )


def configuration(plan: Plan, settings: SearchPoint) -> list[tuple[str, str]]:
    """Return a candidate's configuration as pairs for a table."""
    return [
        ("batch", batch(settings)),
        ("mesh", mesh(settings)),
        ("layout", settings.layout),
        ("wrap", wrapping(settings, plan.details.wrap_classes)),
        ("reshard after forward", resharding(settings.reshard_after_forward)),
        ("activation checkpointing", settings.checkpointing.replace("_", " ")),
        ("prefetch", _units(settings.prefetch)),
        ("CPU offload", "yes" if settings.cpu_offload else "no"),
        ("reduce dtype", settings.reduce_dtype or "the parameters' dtype"),
        ("accumulated gradients", settings.gradients),
        ("optimizer kernel", settings.optimizer_implementation),
    ]


def brief(settings: SearchPoint) -> str:
    """Return a configuration in a few words: what differs between candidates."""
    words = [
        f"micro-batch {settings.micro_batch}",
        f"checkpointing {settings.checkpointing.replace('_', ' ')}",
        f"reshard {resharding(settings.reshard_after_forward)}",
    ]
    if not is_plain(settings):
        words.append(mesh(settings))
    if settings.sequence_parallel:
        words.append("sequence parallel")
    if settings.prefetch > 1:
        words.append(f"prefetch {settings.prefetch}")
    if settings.cpu_offload:
        words.append("offload")
    if settings.gradients == "unsharded" and settings.accumulation > 1:
        words.append("unsharded gradients")
    if settings.wrap_policy != "transformer" or settings.wrap_classes:
        words.append(f"wrap {wrapping(settings)}")
    if settings.optimizer_implementation not in ("auto", "fused"):
        words.append(settings.optimizer_implementation)
    return ", ".join(words)


def verdict(name: Verdict, share: float | None) -> str:
    """Return the verdict, with the share of published runs that agree where they do not all.

    Args:
        name: The verdict by the planned figure.
        share: :attr:`~fsdptool.records.plan.Candidate.fit_share` of the shown candidate.
    """
    tenths = 10 if share is None else round(share * 10)
    if name == "fits" and tenths < 10:
        return f"{'probably fits' if tenths >= 5 else 'may fit'} ({tenths} of 10)"
    if name == "does_not_fit" and share is not None and tenths > 0:
        return f"{'probably does not fit' if tenths <= 5 else 'may fit'} ({tenths} of 10)"
    return VERDICTS[name]


def reserved_range(candidate: Candidate) -> str:
    """Return the range of reserved memory and what it rests on, to follow the figure; empty if unknown."""
    if (ends := candidate.reserved_range_bytes) is None:
        return ""
    basis = candidate.reserved_range_basis
    by = f", by {basis.rows} published runs, {basis.alike} of them alike" if basis is not None else ""
    return f" (P10 to P90: {amount(ends[0])} to {amount(ends[1])}{by})"


def time_range(candidate: Candidate) -> str:
    """Return the range of step time and throughput, to follow their estimates; empty if unknown."""
    seconds, tokens = candidate.step_seconds_range, candidate.tokens_per_second_range
    if seconds is None:
        return ""
    # Both ends in the unit of the estimate between them.
    time, speed = candidate.step_seconds, candidate.tokens_per_second
    text = f"; P10 to P90: {duration(seconds[0], time)} to {duration(seconds[1], time)}"
    if tokens is not None:
        text += f", {rate(tokens[0], speed)} to {rate(tokens[1], speed)} tokens/s"
    if (basis := candidate.range_basis) is None:
        return text
    alike = f"{basis.alike} of them alike" if basis.alike else "none of them on such a GPU"
    return f"{text}, by {basis.rows} published runs, {alike}"


BOUND_BY_HOST = (
    "most of the step, GPUs wait for the host to launch kernels: larger micro-batches or compiled blocks"
    " (sharding.compile) use them better"
)


def bound(candidate: Candidate) -> str:
    """Return what a step waits for where that is the host; empty elsewhere."""
    return BOUND_BY_HOST if candidate.bound == "host" else ""


def speed(candidate: Candidate | Suggestion | SweepRow | TriedSettings) -> str:
    """Return throughput in the unit people use for the model."""
    if candidate.tokens_per_second is not None:
        return f"{rate(candidate.tokens_per_second)} tokens/s"
    if candidate.samples_per_second is not None:
        return f"{rate(candidate.samples_per_second)} samples/s"
    return "unknown"


def headline(plan: Plan) -> str:
    """Return the verdict in one line."""
    candidate = shown(plan)
    where = plan.details.clusters[candidate.settings.cluster]
    found = f"{plan.inputs.model.reference} on {where}: {verdict(plan.verdict, candidate.fit_share)}"
    return f"{found}{assumptions(plan)}"


def assumptions(plan: Plan) -> str:
    """Return what nobody gave, sizes and ranks, as it follows a verdict; empty where all is given."""
    size, assumed = assumed_size(plan.sample), plan.inputs.assumed_ranks
    said = [f"at {size}"] if size else []
    for cluster in plan.inputs.clusters[:1]:  # a document may have none
        named = {"processes": (cluster.world_size, "process", "es"), "nodes": (cluster.nodes, "node", "s")}
        said += [f"on {n} {word}{more * (n > 1)}" for n, word, more in map(named.__getitem__, assumed)]
    return f", {', '.join(said)} (assumed)" if said else ""


def assumed_size(sample: SampleSize) -> str:
    """Return the sizes of a sample that nobody gave; empty where all are given."""
    assumed = sample.assumed
    if not assumed:
        shapes = sample.tensors.items()
        return ", ".join(f"{name} of {' x '.join(map(str, shape))}" for name, shape in shapes)
    words = [f"{sample.sequence_length} tokens"] if "sequence_length" in assumed else []
    if "height" in assumed or "width" in assumed:
        words.append(f"{sample.width} x {sample.height} pixels")
    if "frames" in assumed:
        words.append(f"{sample.frames} frames")
    return ", ".join(words)


def compilation(candidate: Candidate) -> str:
    """Return whether blocks are compiled on GPUs, and why; empty where nobody would expect it."""
    decision = candidate.compilation
    if decision is None or decision.reason in (CompileReason.CPU, CompileReason.OTHER_PROGRAM):
        return ""
    return decision.text


_USUAL_HEADS = frozenset({
    FusedLossReason.CPU, FusedLossReason.OTHER_PROGRAM, FusedLossReason.OBJECTIVE,
    FusedLossReason.NOTHING_SAVED, FusedLossReason.UNTESTED,
})  # fmt: skip


def fused_loss(candidate: Candidate) -> str:
    """Return whether the head computes the loss, and why; empty where nobody would expect it."""
    decision = candidate.fused_loss
    return "" if decision is None or decision.reason in _USUAL_HEADS else decision.text


def shortfall(plan: Plan) -> list[str]:
    """Return why nothing fits, in lines; none where something does."""
    cause = plan.shortfall
    if cause is None:
        return []
    needed, available = amount(cause.needed_bytes), amount(cause.available_bytes)
    size, kind, unit = amount(cause.bytes), cause.kind, cause.unit
    if kind == ShortfallKind.HOST_MEMORY:
        return [f"cause: each node needs at least {needed} of host memory and has {available}"]
    share = f"{size} of the {needed} that the leanest candidate ({cause.candidate}) needs"
    if kind == ShortfallKind.STATES:
        lines = [f"cause: parameters, gradients and optimizer take {share}; {available} are usable"]
    elif kind == ShortfallKind.ACTIVATIONS:
        lines = [f"cause: activations and temporary tensors take {share}; {available} are usable"]
    else:
        lines = [f"cause: gathered FSDP units take {share}; {available} are usable"]
    if unit is not None:
        padding = f", of which {amount(unit.padding_bytes)} are padding" if unit.padding_bytes else ""
        lines.append(
            f"the largest unit, {unit.id} ({unit.class_name}), takes {amount(unit.bytes)} when it is"
            f" gathered{padding}; its largest parameter, {unit.parameter}, takes"
            f" {amount(unit.parameter_bytes)}"
        )
    if not cause.more_gpus_help:
        reasons = {
            ShortfallKind.STATES: "the rest does not shrink with the number of GPUs",
            ShortfallKind.GATHERED_UNITS: "every GPU gathers whole units",
            ShortfallKind.ACTIVATIONS: "every GPU holds its own micro-batch",
        }
        lines.append(f"more GPUs of this kind cannot help: {reasons[kind]}")
    if plan.inputs.search == "none":
        lines.append("only this configuration was planned; a search tries others")
    return lines


def money(value: float | None) -> str:
    """Return an amount of money without its currency, which nobody gives; None is unknown."""
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def offers(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the heads and rows of a table of offers; columns that no offer knows are left out."""
    heads = (
        "offer",
        "cluster",
        "memory",
        "speed",
        "price per hour",
        "per million tokens",
        "run",
        "price of run",
    )
    rows: list[tuple[str, ...]] = []
    for offer in plan.details.offers:
        candidate = find(plan, offer.candidate)
        if candidate is None:
            rows.append((offer.name, offer.cluster, "does not fit", *[""] * 5))
            continue
        name = offer.name + (" (chosen)" if offer.candidate == plan.chosen else "")
        run, prices = offer.run_seconds, (offer.price_per_hour, offer.price_per_million_tokens)
        rows.append(
            (
                name,
                offer.cluster,
                amount(candidate.device_total_bytes),
                speed(candidate),
                *("" if price is None else money(price) for price in prices),
                "" if run is None else duration(run),
                "" if offer.price_per_run is None else money(offer.price_per_run),
            )
        )
    known = [index for index in range(len(heads)) if index < 4 or any(row[index] for row in rows)]
    return tuple(heads[i] for i in known), [tuple(row[i] for i in known) for row in rows]


def run_of(plan: Plan) -> PlannedOffer | None:
    """Return the offer of the shown candidate, which says how long a run takes; None where unknown."""
    offers = plan.details.offers
    place = shown(plan).settings.cluster
    return offers[place] if place < len(offers) and offers[place].run_seconds is not None else None


def host(plan: Plan) -> str:
    """Return what the host memory of the shown candidate was compared with."""
    known = plan.inputs.clusters[shown(plan).settings.cluster].host_memory_bytes
    return f"of {amount(known)}" if known is not None else "not checked: its size is not given"


def host_line(plan: Plan) -> str:
    """Return the host memory that the shown candidate needs, in a line."""
    known = plan.inputs.clusters[shown(plan).settings.cluster].host_memory_bytes
    compared = host(plan) if known is not None else f"({host(plan)})"
    return f"host memory per node: {amount(shown(plan).host_bytes_per_node)} {compared}"


def host_decides(plan: Plan) -> bool:
    """Return whether the verdict rests on host memory whose size nobody gave: states are offloaded to it."""
    candidate = shown(plan)
    unknown = plan.inputs.clusters[candidate.settings.cluster].host_memory_bytes is None
    return unknown and candidate.settings.cpu_offload and bool(candidate.host_bytes_per_node)


def mesh_reasons(plan: Plan) -> list[str]:
    """Return why the mesh was chosen, in lines; none where it only shards over all ranks."""
    return [] if is_plain(shown(plan).settings) else [line.strip() for line in mesh_lines(plan)]


def largest_batches(plan: Plan) -> list[str]:
    """Return the largest micro-batch of each cluster where that was asked, in lines."""
    sizes = (item.micro_batch for item in plan.details.max_batch)
    return [f"largest micro-batch that fits: {size if size is not None else 'none'}" for size in sizes]


def duration_of_run(plan: Plan) -> str:
    """Return the duration of the whole run, and its price where hours have one; empty where unknown."""
    offer = run_of(plan)
    if offer is None:
        return ""
    price = f", price {money(offer.price_per_run)}" if offer.price_per_run is not None else ""
    return f"the whole run takes {duration(offer.run_seconds)}{price} (estimate)"


def spare_memory(plan: Plan) -> list[str]:
    """Return what the memory that the chosen configuration leaves free would buy, in lines."""
    return [
        f"spare memory: {change_words(step)} needs {amount(step.device_total_bytes)} and gives {speed(step)}"
        f" instead of {speed(shown(plan))} (estimate)"
        for step in plan.next_steps
        if step.kind == SuggestionKind.LARGER_BATCH
    ]


_SWITCHES = {"use_dora": "DoRA", "use_rslora": "rsLoRA", "lora_bias": "biases of its own"}


def lora_words(lora: Lora) -> str:
    """Return the settings of LoRA that decide what is trained, in one line."""
    words = [f"rank {lora.rank}, alpha {lora.alpha:g}"]
    words += [text for name, text in _SWITCHES.items() if getattr(lora, name)]
    if lora.rank_pattern:
        words.append(f"other ranks for {', '.join(lora.rank_pattern)}")
    targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets or []
    if named := ", ".join([*targets, *lora.target_parameters]):
        words.append(f"on {named}")
    if lora.layers_to_transform is not None:
        words.append(f"in blocks {', '.join(map(str, lora.layers_to_transform))}")
    if lora.modules_to_save:
        words.append(f"trained whole: {', '.join(lora.modules_to_save)}")
    rows = lora.trainable_token_indices
    tables = rows.items() if isinstance(rows, Mapping) else [("the input embedding", rows)] if rows else []
    words += [f"{len(indices)} rows of {table}" for table, indices in tables]
    if lora.bias != "none":
        words.append(f"trained biases: {lora.bias}")
    return "; ".join(words)


def dtypes(plan: Plan) -> str:
    """Return what parameters are stored and computed in; empty where the plan does not say it."""
    known = plan.details.dtypes
    parts = [
        f"{kind} parameters in {' and '.join(names)}"
        for kind, names in (("frozen", known.frozen), ("trained", known.trained))
        if names
    ]
    if not parts:
        return ""
    computed = f"; computed in {known.compute[0]}" if known.compute else ""
    return f"stored: {', '.join(parts)}{computed}"


def need(candidate: Candidate, unknowns: Sequence[str] = ()) -> str:
    """Return need against what there is, and the slack.

    Args:
        candidate: A candidate.
        unknowns: Those of its plan, for why its activations are unknown; without them only that they are.
    """
    total, usable, slack = (candidate.device_total_bytes, candidate.usable_bytes, candidate.slack_bytes)
    if total is None:
        rejection = candidate.rejected_by
        why = next((text for text in unknowns if text.startswith(ACTIVATIONS)), None)
        if why and rejection is not None and rejection.kind is RejectionKind.UNKNOWN_ACTIVATIONS:
            return f"the memory of a rank is unknown: {why.removeprefix(ACTIVATIONS)}"
        return "the memory of a rank is unknown: " + (rejection.detail if rejection else "see below")
    if usable is None or slack is None:
        return f"each rank needs {amount(total)}; the usable memory is unknown"
    free = f"{amount(slack)} ({slack / usable:.0%}) free" if slack >= 0 else f"{amount(-slack)} too much"
    return f"each rank needs {amount(total)} of {amount(usable)} usable: {free}"


def _units(value: int) -> str:
    return "1 unit" if value == 1 else f"{value} units"


_GROUP_NAMES = {**{item.name: item.title for item in PLANNED}, "experts_shard": "sharding of the experts"}
_SHOWN_MESHES = 3
"""Other meshes that are listed."""


def mesh_lines(plan: Plan) -> Iterator[str]:
    """Yield why the chosen mesh won: its groups and nodes, what it waits for, and the next best meshes."""
    choice = plan.details.mesh
    if choice is None:
        return
    step = shown(plan).step_seconds
    inside = [_group(item) for item in choice.groups if item.nodes == 1]
    across = [_group(item, nodes=True) for item in choice.groups if item.nodes > 1]
    places = [f"inside a node: {', '.join(inside)}"] if inside else []
    places += [f"between nodes: {', '.join(across)}"] if across else []
    yield f"mesh: {'; '.join(places)}; {_waits(choice.waits, step)}"
    for other in choice.alternatives[:_SHOWN_MESHES]:
        verdict = "does not fit with the headroom"
        if other.fits and other.relative_speed:
            change = 1 / other.relative_speed - 1
            verdict = (
                f"{change:.0%} slower" if change >= 0 else f"{-change:.0%} faster, but needs more memory"
            )
            verdict += f", {_waits(other.waits, step / other.relative_speed if step else None)}"
        yield f"  {mesh(other)}: {verdict}"


def _group(item: MeshGroup, *, nodes: bool = False) -> str:
    over = f" on {item.nodes} nodes" if nodes else ""
    return f"{_GROUP_NAMES[item.dimension]} ({item.ranks} ranks{over})"


def _waits(waits: CommunicationWaits, step: float | None) -> str:
    parts = [
        f"{seconds / step:.0%} of the step waits for {what}"
        for seconds, what in (
            (waits.group, "sums and all-to-alls"),
            (waits.sharding, "gathers and reductions"),
        )
        if step and seconds / step >= 0.005
    ]
    return " and ".join(parts) if parts else "no communication is exposed"


def moments(candidate: Candidate) -> list[Moment]:
    """Return the moments of a step for a curve, the peak among them.

    The timeline has what is allocated at the end of each event. The peak falls into an event, where more is
    allocated than at its ends, so it goes before the end of the highest event of its name.
    """
    timeline = list(candidate.timeline)
    while timeline and not timeline[0].allocated_bytes:
        del timeline[0]
    peak, value = candidate.peak, candidate.allocated_peak_bytes
    if peak is None or value is None or not timeline:
        return timeline
    levels = [moment.allocated_bytes for moment in timeline]
    if value <= max(levels):
        return timeline
    named = [index for index, moment in enumerate(timeline) if moment.name == peak.moment]
    place = max(named or range(len(levels)), key=lambda index: levels[index])
    groups: dict[str, int] = {}
    if timeline[place].groups:
        for holding in peak.live:
            group = holding.name.group.value
            groups[group] = groups.get(group, 0) + holding.bytes
    live = {holding.name.value: holding.bytes for holding in peak.live}
    moment = Moment(peak.moment, value, groups=groups, components=live)
    return [*timeline[:place], moment, *timeline[place:]]


def curve(candidate: Candidate, width: int) -> tuple[list[tuple[str, list[int]]], int]:
    """Return the levels of each group of components over the step in ``width`` columns, and their top.

    A column is the moment of its share of the events at which most is allocated.
    """
    timeline = moments(candidate)
    if len(timeline) < 2:
        return [], 0
    edges = [index * len(timeline) // width for index in range(width + 1)] if len(timeline) > width else None
    shares = [timeline[a:b] for a, b in pairwise(edges)] if edges else [[moment] for moment in timeline]
    columns = [max(share, key=lambda moment: moment.allocated_bytes) for share in shares]
    rows = [("all", [moment.allocated_bytes for moment in columns])]
    for group in ColourGroup:
        levels = [moment.groups.get(group.value, 0) for moment in columns]
        if any(levels):
            rows.append((group.legend, levels))
    return rows, max(rows[0][1])
