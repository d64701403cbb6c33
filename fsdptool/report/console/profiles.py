"""Where the time of steps went, by traces of torch's profiler, in terminals and pipes. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from statistics import fmean

from fsdptool.formatting import amount
from fsdptool.records.profile import GpuTime, Profile, RankProfile, RanksCompared
from fsdptool.report.console.tables import print_line, print_table
from fsdptool.report.plan_words import duration

_SHOWN = 12
"""Rows of a table of one rank."""


def print_profile(profile: Profile) -> None:
    """Print the times of all ranks, then the collectives and units of one of them."""
    parts = ("compute", "exposed communication", "exposed copies", "idle")
    rows = [
        (_name(trace, index), duration(time.seconds), *_shares(time), duration(time.communication_seconds))
        for index, trace in enumerate(profile.traces)
        for time in (_mean(trace),)
    ]
    steps = all(trace.steps for trace in profile.traces)
    heads = ("trace", "step" if steps else "time", *parts, "in collectives")
    print_table(heads, rows, numeric=range(1, len(heads)), optional=(4, 6))
    if len(profile.traces) == 1 and len(profile.traces[0].steps) > 1:
        print_line("")
        print_table(
            ("step", "time", *parts),
            [
                (step.name, duration(step.time.seconds), *_shares(step.time))
                for step in profile.traces[0].steps[:_SHOWN]
            ],
            numeric=range(1, 6),
        )
    for line in _sentences(profile):
        print_line(line)
    _print_rank(profile)
    if profile.planned:
        print_line("")
        print_table(
            ("per step", "planned", "measured"),
            [
                (
                    row.part.replace("_", " "),
                    duration(row.planned_seconds) if row.planned_seconds is not None else "",
                    duration(row.measured_seconds),
                )
                for row in profile.planned
            ],
            numeric=(1, 2),
        )


def _name(trace: RankProfile, index: int) -> str:
    return f"rank {trace.rank}" if trace.rank is not None else PurePath(trace.file).name or str(index)


def _mean(trace: RankProfile) -> GpuTime:
    """Return the mean of the steps, or the whole trace without any."""
    times = [step.time for step in trace.steps]
    if not times:
        return trace.total
    return GpuTime(*(fmean(getattr(time, name) for time in times) for name in GpuTime.__dataclass_fields__))


def _shares(time: GpuTime) -> tuple[str, ...]:
    parts = (
        time.compute_seconds,
        time.exposed_communication_seconds,
        time.exposed_copy_seconds,
        time.idle_seconds,
    )
    return tuple(f"{duration(part)} ({100 * part / (time.seconds or 1.0):.0f} %)" for part in parts)


_HOST_BOUND = 0.3
"""Share of a step in which the GPU waits for the host that is worth a sentence."""


def _sentences(profile: Profile) -> Iterator[str]:
    if profile.compared is not None:
        yield from _comparison(profile.compared)
    for index, trace in enumerate(profile.traces):
        if not trace.complete:
            yield f"warning: {_name(trace, index)}: the trace is cut off or damaged; its end is missing"
    times = [_mean(trace) for trace in profile.traces]
    idle = fmean(time.idle_seconds / (time.seconds or 1.0) for time in times)
    if idle >= _HOST_BOUND:
        yield (
            f"the GPU waits for the host in {100 * idle:.0f} % of the time: look at the loading of data, at"
            " synchronisations (.item(), printing) and at small kernels (torch.compile, larger micro-batches)"
        )


def _comparison(compared: RanksCompared) -> Iterator[str]:
    if not compared.collectives:
        yield "the traces share no collective: they are of different steps, groups or runs"
        return
    if compared.late_rank is not None:
        late = next(rank for rank in compared.ranks if rank.rank == compared.late_rank)
        others = [rank.seconds for rank in compared.ranks if rank.rank != late.rank]
        least, most = duration(min(others)), duration(max(others))
        whole = f"the others, which wait for it, for {least}" + (f" to {most}" if most != least else "")
        yield (
            f"rank {late.rank} is late: it is in collectives for {duration(late.seconds)}, {whole};"
            f" it arrives last in {late.shortest} of {compared.collectives}"
        )
    else:
        yield f"no rank is clearly late in the {compared.collectives} collectives that all traces share"
    ends = duration(compared.end_spread_seconds)
    if compared.clocks == "disagree":
        yield (
            f"the clocks of the ranks disagree, or the traces are of different steps: ends of one collective"
            f" differ by up to {ends}"
        )
    else:
        shifted = " after their clocks are set right" if compared.clocks == "shifted" else ""
        yield f"the ranks begin one collective up to {duration(compared.start_spread_seconds)} apart{shifted}"


def _print_rank(profile: Profile) -> None:
    """Print the collectives and the units of the late rank's trace, or of the first one."""
    late = profile.compared.late_rank if profile.compared is not None else None
    index, trace = next(
        (
            (index, trace)
            for index, trace in enumerate(profile.traces)
            if late is not None and trace.rank == late
        ),
        (0, profile.traces[0]),
    )
    steps = max(len(trace.steps), 1)
    of = f" of {_name(trace, index)}" if len(profile.traces) > 1 else ""
    if trace.operations:
        print_line("")
        print_table(
            (f"collectives{of}", "calls", "time", "exposed", "overlapped"),
            [
                (
                    item.operation,
                    str(item.calls),
                    duration(item.seconds),
                    duration(item.exposed_seconds),
                    f"{100 * item.overlap:.0f} %",
                )
                for item in trace.operations
            ],
            numeric=range(1, 5),
        )
    if trace.messages:
        print_line("")
        rows = [
            (
                item.operation,
                amount(item.bytes),
                str(item.group_size),
                str(item.calls),
                *map(duration, (item.shortest_seconds, item.median_seconds, item.longest_seconds)),
                f"{item.bus_bytes_per_second / 1e9:.3g} GB/s" if item.bus_bytes_per_second else "",
            )
            for item in trace.messages[:_SHOWN]
        ]
        heads = ("messages", "size", "ranks", "calls", "shortest", "median", "longest", "bus bandwidth")
        print_table(heads, rows, numeric=range(1, 8), optional=(6, 4))
        _more(trace.messages)
    if trace.units:
        print_line("")
        print_table(
            (
                "unit, per step",
                "forward",
                "backward",
                *("all-gather", "exposed"),
                *("reduce-scatter", "exposed"),
            ),
            [
                (
                    item.unit,
                    *(
                        duration(seconds / steps)
                        for seconds in (
                            item.forward_seconds,
                            item.backward_seconds,
                            item.all_gather_seconds,
                            item.exposed_all_gather_seconds,
                            item.reduce_scatter_seconds,
                            item.exposed_reduce_scatter_seconds,
                        )
                    ),
                )
                for item in trace.units[:_SHOWN]
            ],
            numeric=range(1, 7),
        )
        _more(trace.units)


def _more(rows: Sequence[object]) -> None:
    if len(rows) > _SHOWN:
        print_line(f"and {len(rows) - _SHOWN} more; --format json lists all", style="dim")
