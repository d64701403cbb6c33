"""Rejections, suggestions, costs, components, verdicts and bases: every value through every reader."""

from __future__ import annotations

import dataclasses
import json
import re
from html import escape
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from fsdptool.files.values import load_schema
from fsdptool.planning import Options, chosen_candidate, make_plan, plan_document, read_plan, read_request
from fsdptool.planning.compare import changes_between, compare
from fsdptool.planning.request.inputs import Request
from fsdptool.records.advice import Cost, CostKind, Suggestion, SuggestionKind
from fsdptool.records.plan import ComponentBytes, Plan, Rejection, RejectionKind, Verdict
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Basis, ColourGroup, Component
from fsdptool.report import plan_words
from fsdptool.report.console.plan import print_changes, print_comparison, print_plan
from fsdptool.report.page.plan import plan_page

# All on one worker: another would make the same plan again.
pytestmark = pytest.mark.xdist_group("plan-enums")

CLOSED = ("accumulation", "checkpointing", "cp", "cpu_offload", "mesh", "micro_batch", "prefetch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 6,
        "vocab_size": 8000,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def plan(model: str) -> Plan:
    """A plan whose requested configuration fits, but keeps units gathered for no gain in speed."""
    options = Options(
        reference=model,
        config=FsdpSettings(reshard_after_forward=False),
        gpu="A100-80GB-SXM",
        gpus=2,
        sequence_length=2048,
        micro_batch=4,
    )
    inputs = read_request(options).inputs
    return make_plan(Request(dataclasses.replace(inputs, search="open", fixed=CLOSED)))


@pytest.mark.slow
def test_a_plan_whose_request_fits_never_says_that_it_does_not(plan: Plan) -> None:
    requested = plan.candidates[0]
    assert requested.slack_bytes is not None
    assert requested.slack_bytes > 0
    assert plan.verdict == "fits"
    assert plan.chosen != requested.id
    assert requested.rejected_by is not None
    assert requested.rejected_by.kind is RejectionKind.MEMORY_FOR_SPEED
    assert not requested.rejected_by.kind.does_not_fit
    assert "PLN004" not in [item.code for item in plan.diagnostics]
    assert all(step.fits for step in plan.next_steps)


def changed(plan: Plan, **candidate: Any) -> Plan:
    """The plan with other values in its chosen candidate, as if that were the requested one."""
    chosen = dataclasses.replace(chosen_candidate(plan), **{"fit_share": None, **candidate})
    details = dataclasses.replace(plan.details, asked=(chosen.id,))
    return dataclasses.replace(plan, candidates=(chosen,), details=details)


def tabbed(text: str) -> str:
    """Aligned columns with one tab between cells."""
    return re.sub(" {2,}", "\t", text)


def read(plan: Plan, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, str, str]:
    """Put a plan through every reader; returns the console's, page's, check's and comparison's text."""
    document = plan_document(plan)
    jsonschema.validate(document, load_schema("plan"))
    path, other = folder / "plan.json", folder / "other.json"
    path.write_text(json.dumps(document))
    assert plan_document(read_plan(path)) == document
    before = changed(plan, rejected_by=None, components=())
    other.write_text(json.dumps(plan_document(before)))
    capsys.readouterr()
    print_plan(plan, explain=True)
    console = tabbed(capsys.readouterr().out)
    changes = changes_between(document, before, plan)
    print_changes(str(path), [(item.what, item.before, item.after) for item in changes])
    check = tabbed(capsys.readouterr().out)
    print_comparison(dataclasses.replace(compare(path, other), left="a", right="b"))
    return console, plan_page(plan), check, tabbed(capsys.readouterr().out)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("kind", RejectionKind)
def test_every_rejection_through_every_reader(
    kind: RejectionKind, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rejected = dataclasses.replace(
        changed(plan, rejected_by=Rejection(kind, "the detail")), chosen=None, verdict="does_not_fit"
    )
    console, page, check, comparison = read(rejected, tmp_path, capsys)
    assert f"rejected candidates by reason: {plan_words.REJECTIONS[kind]} 1" in console
    assert "the detail" in plan_words.reason(rejected.candidates[0])
    assert f"rejected_by\tnone\t{kind.value}" in check
    assert f"rejected by\t{kind.value}" in comparison
    several = dataclasses.replace(rejected, candidates=rejected.candidates * 2)
    assert f"{plan_words.REJECTIONS[kind]}: the detail" in plan_page(several)
    assert page


@pytest.mark.slow
def test_every_suggestion_through_every_reader(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tuple(Cost(cost, f"costs {cost.value}") for cost in CostKind)
    suggestions = tuple(
        Suggestion(f"change {kind.value}", {}, 10, fits, "the cost", kind, costs)
        for kind in SuggestionKind
        for fits in (True, False, None)
    )
    console, page, _, _ = read(dataclasses.replace(changed(plan), next_steps=suggestions), tmp_path, capsys)
    for item in suggestions:
        assert f"{item.change}\t10 B\t{plan_words.FITS[item.fits]}\tthe cost" in console
        assert item.change in page


def test_every_suggestion_has_its_costs_by_kind() -> None:
    from fsdptool.planning.advice.suggestions import COSTS

    computed = {CostKind.STEP_TIME, CostKind.HOST_MEMORY}
    assert {cost.kind for cost in COSTS.values()} | computed == set(CostKind)


@pytest.mark.slow
@pytest.mark.parametrize("basis", get_args(Basis))
def test_every_component_through_every_reader(
    basis: Basis, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = None if basis == "unknown" else 2**20
    components = tuple(ComponentBytes(component, size, basis) for component in Component)
    console, page, _, comparison = read(changed(plan, components=components), tmp_path, capsys)
    for component in Component:
        line = next(x for x in console.splitlines() if x.startswith(f"{component.value}\t"))
        assert line.endswith(plan_words.MARKS[basis])
        assert f"{component.value}</th>" in page
        assert f"\n{component.value}\t" in comparison
    for group in ColourGroup:
        assert escape(group.legend) in page


@pytest.mark.slow
@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_every_verdict_through_every_reader(
    verdict: Verdict, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdptool.cli.plan import exit_code

    judged = dataclasses.replace(changed(plan), verdict=verdict)
    console, page, _, comparison = read(judged, tmp_path, capsys)
    assert plan_words.VERDICTS[verdict] in console.splitlines()[0]
    assert plan_words.VERDICTS[verdict] in page
    assert f"verdict\t{verdict}" in comparison
    assert exit_code(judged) == {"fits": 0, "does_not_fit": 1, "unknown": 5}[verdict]
