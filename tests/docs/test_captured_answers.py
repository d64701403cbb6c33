"""The README says what the committed results say, and pages show what commands print."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from sweeps import kept

from fsdptool.cli.app import run
from fsdptool.records.advice import Suggestion
from fsdptool.records.codec import from_json
from fsdptool.records.plan import Candidate, Plan, PlanInputs
from fsdptool.records.plan_details import PlanDetails, PlannedModel
from fsdptool.records.recipe import ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.report import plan_words

ROOT = Path(__file__).parents[2]
CAPTURE: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "readme" / "capture.py"))


def test_measured_figures_are_the_committed_ones() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme" / "measured.py"))
    lengths = []
    for page in script["PAGES"]:
        _, _, body, _, _ = script["BLOCK"].split(page.read_text(encoding="utf-8"))
        assert body == script["table"](page)
        lengths.append(len(body.splitlines()))
    assert lengths[0] == 5 < lengths[1]


def blocks() -> dict[str, str]:
    """Return the captured text of every block on the pages."""
    found = {}
    for page in CAPTURE["PAGES"]:
        for match in CAPTURE["BLOCK"].finditer(page.read_text(encoding="utf-8")):
            found[match["name"]] = match[0].split("```console\n", 1)[1].rsplit("\n```", 1)[0]
    return found


def test_every_answer_was_captured() -> None:
    shown = blocks()
    assert set(shown) == set(CAPTURE["CAPTURES"])
    for name, (command, starts) in CAPTURE["QUESTIONS"].items():
        first, _, answer = shown[name].partition("\n")
        assert first == f"$ fsdptool {command}"
        assert CAPTURE["paragraphs"](answer, starts) == answer, name
    for text in shown.values():
        assert "\x1b" not in text


def plan_of(figures: dict[str, Any]) -> Plan:
    """Return a plan with the figures that the script kept, and blanks for the others."""
    unknown = ("allocated_peak_bytes", "reserved_peak_bytes", "host_bytes_per_node", "peak")
    blank: dict[str, Any] = {**dict.fromkeys(unknown), "components": [], "timeline": []}
    step = {"settings": {}, "fits": True, "cost": ""}
    reference = figures["inputs"]["model"]["reference"]
    inputs = PlanInputs(
        Recipe(ModelChoice(reference)), FsdpSettings(), (), (), "cuda", model=PlannedModel(reference)
    )
    return Plan(
        verdict=figures["verdict"],
        chosen=figures["chosen"],
        candidates=tuple(from_json(Candidate, {**blank, **item}) for item in figures["candidates"]),
        next_steps=tuple(from_json(Suggestion, {**step, **item}) for item in figures["next_steps"]),
        inputs=inputs,
        confidence="verified",
        details=from_json(PlanDetails, figures["details"]),
    )


@pytest.mark.parametrize("name", CAPTURE["PLANS"])
def test_figures_of_plans_are_the_committed_ones(name: str) -> None:
    """What the script kept of each plan, in the words of today's report."""
    figures = json.loads(CAPTURE["FIGURES"].read_text(encoding="utf-8"))[name]
    command, _ = CAPTURE["QUESTIONS"][name]
    assert figures["command"] == f"fsdptool {command}"
    plan = plan_of(figures)
    answer = blocks()[name]
    text = " ".join(answer.split())
    heads, rows = plan_words.offers(plan)
    for row in rows if len(rows) > 1 else ():
        line = next(line for line in answer.splitlines() if line.startswith(row[0].split(" ")[0]))
        assert all(cell in line for cell in row[1:]), (heads, row)
    if CAPTURE["QUESTIONS"][name][1][0] not in ("llama3", "qwen2.5"):
        # The page leaves the verdict out; its table has the chosen row.
        assert plan_words.speed(plan_words.shown(plan)) in text
        return
    candidate = plan_words.shown(plan)
    step = f"{plan_words.duration(candidate.step_seconds)} per step, {plan_words.speed(candidate)}"
    told = (plan_words.headline(plan), plan_words.need(candidate), step, plan_words.time_range(candidate)[2:])
    for line in (*told, plan_words.duration_of_run(plan), *plan_words.spare_memory(plan)):
        assert line in text, line


@pytest.mark.usefixtures("compiled_by_default")
@pytest.mark.parametrize("name", kept(CAPTURE["QUICK"], *(set(CAPTURE["QUICK"]) - {"out-of-memory"})))
def test_answers_are_what_the_commands_print(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, starts = CAPTURE["QUESTIONS"][name]
    for file, text in CAPTURE["FILES"].items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "96")
    for variable in [key for key in os.environ if key.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.delenv(variable)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    with contextlib.redirect_stdout(terminal):
        assert run(shlex.split(command)) in (0, 1)
    lines = [line.rstrip() for line in CAPTURE["STYLES"].sub("", terminal.getvalue()).strip("\n").split("\n")]
    shown = blocks()[name]
    expected = CAPTURE["paragraphs"]("\n".join(lines), starts)
    assert shown == f"$ fsdptool {command}\n{expected}"
