"""The plan's page: one file, nothing fetched, nothing run, names never become markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from fsdptool.formatting import amount
from fsdptool.records.advice import Suggestion, SuggestionKind
from fsdptool.records.cluster import Cluster
from fsdptool.records.plan import (
    Candidate,
    ComponentBytes,
    Holding,
    Moment,
    Peak,
    Plan,
    PlanInputs,
    Rejection,
    RejectionKind,
    SearchPoint,
)
from fsdptool.records.plan_details import PlanDetails, PlannedModel
from fsdptool.records.recipe import ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import ColourGroup, Component
from fsdptool.report.console.plan import print_plan
from fsdptool.report.page.parts import breaking, cards
from fsdptool.report.page.plan import plan_page, plan_picture
from fsdptool.report.plan_words import curve, time_range

NASTY = '<script>alert("x")</script>'
GIB = 2**30


def candidate(name: str, total: int, *, rejected: Rejection | None = None, samples: float = 3.0) -> Candidate:
    settings = SearchPoint(
        cluster=0,
        layout="native",
        wrap_policy="transformer",
        wrap_classes=(NASTY,),
        micro_batch=1,
        accumulation=2,
        checkpointing="every_2",
        reshard_after_forward=4,
        dp_replicate=2,
        dp_shard=4,
        cp=1,
        cpu_offload=False,
        optimizer_implementation="auto",
        prefetch=2,
        reduce_dtype=None,
        gradients="sharded",
    )
    return Candidate(
        id=name,
        settings=settings,
        allocated_peak_bytes=total,
        reserved_peak_bytes=None,
        device_total_bytes=total,
        usable_bytes=80 * GIB,
        slack_bytes=80 * GIB - total,
        host_bytes_per_node=GIB,
        components=(
            ComponentBytes(Component.PARAMETERS, total // 2, "exact"),
            ComponentBytes(Component.ACTIVATIONS, total - total // 2, "estimated"),
            ComponentBytes(Component.TEMPORARIES, None, "unknown"),
        ),
        peak=Peak(NASTY, (Holding(Component.ACTIVATIONS, total // 2),)),
        timeline=(Moment("forward a", GIB), Moment(NASTY, total), Moment("backward a", GIB)),
        step_seconds=0.5,
        tokens_per_second=1000.0,
        rejected_by=rejected,
        samples_per_second=samples,
        mfu=0.4,
        seconds={"compute": 0.4, "exposed_communication": 0.1},
    )


@pytest.fixture
def plan() -> Plan:
    return Plan(
        verdict="fits",
        confidence="verified",
        chosen="asked",
        candidates=(
            candidate("asked", 40 * GIB),
            candidate("c0001", 90 * GIB, rejected=Rejection(RejectionKind.DEVICE_MEMORY, NASTY)),
            candidate("c0002", 30 * GIB, rejected=Rejection(RejectionKind.SPEED, "slower"), samples=2.0),
        ),
        next_steps=(Suggestion(NASTY, {}, 10, True, NASTY, SuggestionKind.RESHARD),),
        inputs=PlanInputs(
            recipe=Recipe(ModelChoice(NASTY)),
            settings=FsdpSettings(),
            clusters=(Cluster(None, 8, name=NASTY),),
            machines=(),
            profile="cuda",
            model=PlannedModel(reference=NASTY, class_=NASTY, parameters=1),
        ),
        unknowns=(NASTY,),
        details=PlanDetails(clusters=(NASTY,), front=("asked", "c0002"), asked=("asked",), notes=(NASTY,)),
    )


def changed(plan: Plan, number: int, **values: Any) -> Plan:
    """The plan with other values in one candidate."""
    candidates = list(plan.candidates)
    candidates[number] = replace(candidates[number], **values)
    return replace(plan, candidates=tuple(candidates))


class Reader(HTMLParser):
    """Collects tags, and checks that they close in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_and_runs_nothing(plan: Plan) -> None:
    page = plan_page(plan)
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    tags = {tag for tag, _ in reader.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "form"}
    for _, attributes in reader.seen:
        assert not {"src", "href"} & set(attributes) or attributes.get("href", "").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page
    assert {"svg", "table", "details"} <= tags


def test_the_page_can_be_read_without_seeing_and_without_a_mouse(plan: Plan) -> None:
    reader = Reader()
    reader.feed(plan_page(plan))
    for tag, attributes in reader.seen:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-labelledby"]
        if attributes.get("class", "") and "scroll" in (attributes["class"] or ""):
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
    tables = sum(tag == "table" for tag, _ in reader.seen)
    assert tables == sum(tag == "caption" for tag, _ in reader.seen)


def test_every_candidate_and_its_reason_is_on_the_page(plan: Plan) -> None:
    page = plan_page(plan)
    for text in ("asked (chosen)", "c0001", "device memory: &lt;script", "speed: slower"):
        assert text in page


def test_a_pipe_gets_whole_rows(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan, explain=True)
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "…" not in told
    assert NASTY in told
    rows = [re.split(" {2,}", line) for line in told.splitlines() if line.startswith(("asked ", "c000"))]
    assert len(rows) == 3
    assert {len(row) for row in rows} == {6}


def test_names_of_classes_break_only_where_nothing_has_room_for_them() -> None:
    assert breaking("LlamaDecoderLayer") == "LlamaDecoderLayer"
    assert breaking("model.layers") == "model.<wbr>layers"
    assert breaking("CombinedTimestepGuidanceTextProjEmbeddings").count("<wbr>") == 5
    assert "class=small>" in cards([("wrap", "LlamaDecoderLayer", "")])
    assert "twice" in cards([("wrap", "FluxSingleTransformerBlock", "")])


def test_unknown_is_said_and_never_zero(capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
    print_plan(plan)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("temporaries"))
    assert line.split()[1:] == ["unknown", "unknown"]


def test_amounts_read_well() -> None:
    assert [amount(value) for value in (0, 1023, 1536, 79 * GIB, -GIB, None)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "79.0 GiB",
        "-1.00 GiB",
        "unknown",
    ]


def test_both_ends_of_a_range_have_the_unit_of_the_estimate() -> None:
    item = replace(
        candidate("c", GIB),
        step_seconds=111.0,
        step_seconds_range=(90.0, 130.0),
        tokens_per_second=12_000.0,
        tokens_per_second_range=(9_000.0, 14_000.0),
    )
    assert time_range(item) == "; P10 to P90: 90 s to 130 s, 9 k to 14 k tokens/s"


def test_a_curve_keeps_the_peak_and_adds_up() -> None:
    moments = [Moment("", 3, groups={"states": 2, "passing": 1}) for _ in range(1000)]
    moments[500] = Moment("", 9, groups={"states": 2, "passing": 7})
    rows, top = curve(replace(candidate("asked", 9), peak=None, timeline=tuple(moments)), 64)
    assert top == 9
    assert {len(levels) for _, levels in rows} == {64}
    whole, *groups = [levels for _, levels in rows]
    assert len(groups) == 2
    assert max(whole) == 9
    assert whole == [sum(parts) for parts in zip(*groups, strict=True)]


def test_the_curve_of_the_page_is_stacked_by_group(plan: Plan) -> None:
    assert 'polygon class="area"' in plan_page(plan)
    timeline = tuple(
        replace(moment, groups={"states": GIB // 2, "passing": moment.allocated_bytes - GIB // 2})
        for moment in plan.candidates[0].timeline
    )
    page = plan_page(changed(plan, 0, timeline=timeline))
    assert 'polygon class="area"' not in page
    edges = [
        re.findall(rf'polygon class="g-{name}" points="([^"]*)"', page)[0] for name in ("states", "passing")
    ]
    lower, upper = ([point.split(",") for point in edge.split()] for edge in edges)
    assert lower[: len(timeline)] == upper[: len(timeline) - 1 : -1]


def test_the_peak_is_on_the_curve(plan: Plan) -> None:
    page = plan_page(changed(plan, 0, allocated_peak_bytes=44 * GIB))
    assert page.count('class="peak"') == 2, "for a wide screen and for a narrow one"
    for chart in re.findall(r'<svg [^>]*class="timeline-.*?</svg>', page):
        outline = re.findall(r'polyline class="stroke" points="([^"]*)"', chart)[0]
        points = [point.split(",") for point in outline.split()]
        ((x, y),) = re.findall(r'class="peak" cx="([^"]*)" cy="([^"]*)"', chart)
        assert [x, y] in points
        assert float(y) == min(float(point[1]) for point in points)
        assert "44.0 GiB</text>" in chart


def test_candidates_that_do_not_fit_have_a_strip_of_their_own(plan: Plan) -> None:
    plan = changed(plan, 1, device_total_bytes=600 * GIB)
    for chart in re.findall(r'<svg [^>]*class="scatter-.*?</svg>', plan_page(plan)):
        assert "1 does not fit: 600.0 GiB" in chart
        ticks = [float(text) for text in re.findall(r">(\d+) GiB</text>", chart)]
        assert ticks == [0, 20, 40, 60, 80][1:]
        heights = [float(y) for y in re.findall(r'class="p-(?:on|chosen)" cx="[^"]*" cy="([^"]*)"', chart)]
        (over,) = re.findall(r'class="p-over" cx="[^"]*" cy="([^"]*)"', chart)
        assert float(over) < min(heights)
        assert max(heights) - min(heights) > 25
        assert "tokens per second (estimate)" in chart


def test_the_page_names_the_classes_that_are_wrapped(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(plan, details=replace(plan.details, wrap_classes=("LlamaDecoderLayer",)))
    plan = changed(plan, 0, settings=replace(plan.candidates[0].settings, wrap_classes=()))
    assert "<td>LlamaDecoderLayer</td>" in plan_page(plan)
    print_plan(plan, explain=True)
    assert "LlamaDecoderLayer" in capsys.readouterr().out


def test_a_picture_is_one_image_and_names_never_become_markup(plan: Plan) -> None:
    from xml.etree import ElementTree

    picture = plan_picture(plan)
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    tags = {element.tag.rsplit("}", 1)[1] for element in root.iter()}
    assert tags <= {"svg", "title", "style", "rect", "text", "line", "polygon", "polyline", "circle"}
    assert "<script" not in picture


def test_a_plan_is_one_screen_and_the_rest_is_explained(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--micro-batch", "1", "--reshard", "4", "--no-offload")
    plan = replace(plan, details=replace(plan.details, flags=flags))
    print_plan(plan, command=["fsdptool", "plan", "a b", "--gpus", "8", "--reshard", "4"])
    short = capsys.readouterr().out
    print_plan(plan, explain=True)
    whole = capsys.readouterr().out
    assert len(short.splitlines()) < 40 < len(whole.splitlines()) + 20
    assert (
        "command: fsdptool plan 'a b' --gpus 8 --reshard 4 --micro-batch 1 --no-offload --no-search" in short
    )
    assert "flags: --micro-batch 1 --reshard 4 --no-offload" in whole
    assert "phase of the run" not in short


def test_every_component_has_a_colour_that_the_page_defines(plan: Plan) -> None:
    from fsdptool.report.page.parts import STYLE

    assert {component.group for component in Component} == set(ColourGroup)
    assert all(f".k-{group}" in STYLE and group.legend for group in ColourGroup)
