"""The curve of a step, for terminals and pages alike."""

from __future__ import annotations

from itertools import pairwise

from fsdptool.records.plan import Candidate, Moment
from fsdptool.records.trace import ColourGroup


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
