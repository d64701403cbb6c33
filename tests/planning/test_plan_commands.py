"""plan, compare and calibrate as a person runs them, on models small enough to trace in a second."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fsdptool.cli.app import run
from fsdptool.files.values import load_schema
from fsdptool.formatting import amount
from fsdptool.planning.calibrate import SUSTAINED
from fsdptool.planning.hardware import load_gpu, machine_for
from fsdptool.records.command_documents import Probe
from fsdptool.records.diagnostic import envelope
from fsdptool.records.measurements import (
    CollectiveRate,
    CopyRate,
    Measurements,
    ProductRate,
    RankMeasurements,
)
from fsdptool.records.run import Summary
from fsdptool.runs.events import largest_peak

HARDWARE = ["--gpu", "RTX-4090-24GB", "--gpus", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def document(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*arguments, "--format", "json"]) == status, capsys.readouterr().err
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.slow
def test_a_plan_is_a_valid_document_and_says_what_it_knows(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = document(capsys, ["plan", model, *HARDWARE, "--seq-len", "128", "--no-search"])
    jsonschema.validate(plan, load_schema("plan"))
    assert plan["verdict"] == "fits"
    assert plan["chosen"] == "requested"
    asked = plan["candidates"][0]
    known = {item["name"]: item for item in asked["components"]}
    assert known["parameters"]["basis"] == "exact"
    assert known["activations"]["basis"] == "estimated"
    # One each for the threads of forward and backward (torch's CublasHandlePool.cpp, before Hopper).
    assert known["workspaces"] == {"name": "workspaces", "bytes": 2 * 8_519_680, "basis": "estimated"}
    # The lines add up to what the driver would report.
    assert sum(item["bytes"] for item in asked["components"]) == asked["device_total_bytes"]
    assert asked["slack_bytes"] == asked["usable_bytes"] - asked["device_total_bytes"]
    assert asked["usable_bytes"] < 24 * 10**9 * 1.08
    assert asked["peak"]["live"] == sorted(asked["peak"]["live"], key=lambda item: -item["bytes"])
    assert max(moment["allocated_bytes"] for moment in asked["timeline"]) <= asked["allocated_peak_bytes"]
    # The highest phase of the run is the peak.
    assert asked["allocated_peak_bytes"] == max(phase["allocated_bytes"] for phase in asked["phases"])
    assert {"load", "forward", "backward", "optimizer", "save"} <= {p["name"] for p in asked["phases"]}


@pytest.mark.slow
def test_a_small_model_is_told_that_it_needs_no_fsdp(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, ["plan", model, *HARDWARE, "--seq-len", "128", "--no-search"])
    (told,) = plan["diagnostics"]
    assert told["code"] == "PLN011", "every size was given"
    alone = document(capsys, ["plan", model, *HARDWARE[:2], "--gpus", "1", "--seq-len", "128", "--no-search"])
    (asked,) = alone["candidates"]
    kept = alone["details"]["states"]["gradients"]
    assert f"({amount(asked['device_total_bytes'] + kept)} of" in told["message"], "DDP's buckets are whole"
    assumed = document(capsys, ["plan", model, *HARDWARE, "--no-search"])["diagnostics"]
    assert any(item["code"] == "PLN013" and "input_ids 512" in item["message"] for item in assumed)


@pytest.mark.parametrize(
    ("model", "sizes", "said"),
    [
        ("gpt2:small", {"height": 512, "width": 512}, ["--height and --width change nothing"]),
        ("gpt2:small", {"frames": 5}, ["--frames changes nothing"]),
        ("sd3:medium", {"height": 512, "width": 512}, []),
    ],
)
def test_sizes_that_a_model_does_not_read_are_told(
    model: str, sizes: dict[str, int], said: list[str]
) -> None:
    from fsdptool.planning.advice.diagnostics import _unread_sizes
    from fsdptool.records.recipe import Batch, ModelChoice, Recipe
    from fsdptool.source import resolve

    found = _unread_sizes(resolve(model), Recipe(ModelChoice(model), batch=Batch(**sizes)))
    assert [item.message.partition(":")[0] for item in found] == said


@pytest.mark.slow
def test_experts_are_said_to_need_the_same_however_they_are_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = document(capsys, ["plan", str(tmp_path), *HARDWARE, "--seq-len", "64", "--no-search"])
    told = plan["details"]["routing"]
    peak = plan["candidates"][0]["allocated_peak_bytes"]
    assert (told["experts"], told["balanced_bytes"], told["worst_case_bytes"]) == (6, peak, peak)
    assert any(note.startswith("6 experts: ") for note in plan["details"]["notes"])


@pytest.mark.slow
def test_what_does_not_fit_gets_suggestions(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "gpus.yaml"
    card.write_text(
        "gpus: [{name: Tiny, memory_bytes: 900000000, flops: {float32: 1.0e13, bfloat16: 1.0e14},"
        " memory_bandwidth: 1.0e12, link_bandwidth: 1.0e10, source: test}]\n"
    )
    arguments = ["plan", model, "--gpu", "tiny", "--gpus", "2", "--gpus-file", str(card), "--seq-len", "512"]
    plan = document(capsys, [*arguments, "--micro-batch", "64", "--no-search"], status=1)
    jsonschema.validate(plan, load_schema("plan"))
    assert plan["verdict"] == "does_not_fit"
    assert plan["chosen"] is None
    assert plan["candidates"][0]["rejected_by"]["kind"] == "device_memory"
    changes = [step["change"] for step in plan["next_steps"]]
    assert "full activation checkpointing" in changes
    assert "micro-batch 32, accumulation 2" in changes
    fitting = [step for step in plan["next_steps"] if step["fits"]]
    assert fitting
    # What a suggestion is said to need is what a plan of it says.
    suggestion = next(
        step for step in plan["next_steps"] if step["change"] == "selective activation checkpointing"
    )
    same = [*arguments, "--micro-batch", "64", "--no-search", "--checkpointing", "selective"]
    (asked,) = document(capsys, same, status=0 if suggestion["fits"] else 1)["candidates"]
    assert asked["device_total_bytes"] == suggestion["device_total_bytes"]
    # A suggestion that is said to fit does fit when it is requested.
    suggestion = next(step for step in fitting if step["change"].startswith("micro-batch"))
    sizes = suggestion["settings"]
    again = [*arguments, "--micro-batch", str(sizes["micro_batch"]), "--no-search"]
    assert document(capsys, [*again, "--accumulation", str(sizes["accumulation"])])["verdict"] == "fits"


@pytest.mark.slow
def test_a_search_is_deterministic_and_every_candidate_but_one_has_a_reason(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", model, *HARDWARE, "--seq-len", "64", "--global-batch", "8", "--search"]
    first, second = document(capsys, arguments), document(capsys, arguments)
    assert first == second
    jsonschema.validate(first, load_schema("plan"))
    assert len(first["candidates"]) > 100
    assert len({item["id"] for item in first["candidates"]}) == len(first["candidates"])
    without = [item["id"] for item in first["candidates"] if item["rejected_by"] is None]
    assert without == [first["chosen"]]
    for item in first["candidates"]:
        settings = item["settings"]
        ranks = settings["dp_replicate"] * settings["dp_shard"]
        assert settings["micro_batch"] * settings["accumulation"] * ranks == 8
        assert settings["reduce_dtype"] == "float32", "a search never turns what changes the numbers"
    front = [item for item in first["candidates"] if item["id"] in first["details"]["front"]]
    for item in front:
        better = [
            other
            for other in first["candidates"]
            if other["samples_per_second"] > item["samples_per_second"]
            and other["allocated_peak_bytes"] < item["allocated_peak_bytes"]
        ]
        assert not better


@pytest.mark.slow
def test_given_settings_are_not_searched(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", model, *HARDWARE, "--seq-len", "64", "--checkpointing", "full", "--reshard", "true"]
    plan = document(capsys, arguments)
    assert {item["settings"]["checkpointing"] for item in plan["candidates"]} == {"full"}
    assert {item["settings"]["reshard_after_forward"] for item in plan["candidates"]} == {True}


@pytest.mark.slow
def test_offers_are_compared_by_price(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, gpu, price in (("fast", "H100-80GB-SXM", 90.0), ("cheap", "RTX-3090-24GB", 0.2)):
        text = f"gpu: {gpu}\ngpus_per_node: 2\nprice_per_gpu_hour: {price}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    clusters = ["--cluster", str(tmp_path / "fast.yaml"), "--cluster", str(tmp_path / "cheap.yaml")]
    arguments = ["plan", model, *clusters, "--seq-len", "64", "--no-search"]
    assert document(capsys, [*arguments, "--prefer", "price"])["chosen"] == "requested1"
    plan = document(capsys, [*arguments, "--prefer", "speed", "--steps", "1000"])
    offers = plan["details"]["offers"]
    assert [offer["name"] for offer in offers] == ["fast", "cheap"]
    assert [offer["candidate"] for offer in offers] == ["requested0", "requested1"]
    assert [offer["price_per_hour"] for offer in offers] == [180.0, 0.4]
    for offer, item in zip(offers, plan["candidates"], strict=True):
        assert offer["run_seconds"] == pytest.approx(1000 * item["step_seconds"])
        tokens = 1000 * 64 * item["settings"]["dp_shard"]
        assert offer["price_per_run"] == pytest.approx(offer["run_seconds"] * offer["price_per_hour"] / 3600)
        assert offer["price_per_million_tokens"] == pytest.approx(1e6 * offer["price_per_run"] / tokens)
        assert item["price_per_million_samples"] == pytest.approx(64 * offer["price_per_million_tokens"])
    capsys.readouterr()
    assert run([*arguments, "--steps", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "price per hour" in shown
    assert "price of run" in shown
    assert "cheap (chosen)" in shown or "fast (chosen)" in shown
    # The page of one offer has the price and the duration of the run, too.
    page = tmp_path / "plan.html"
    asked = ["--gpu", "RTX-3090-24GB", "--price", "2.5", "--seq-len", "64", "--steps", "1000", "--no-search"]
    assert run(["plan", model, *asked, "-o", str(page)]) == 0
    (price,) = re.findall(r"the whole run takes .*, price (\S+) \(estimate\)", capsys.readouterr().out)
    assert f"price {price}, 1,000 steps, estimate" in page.read_text()
    rates = {item["id"]: item["samples_per_second"] for item in plan["candidates"]}
    assert rates[plan["chosen"]] >= 0.98 * max(rates.values())


def test_a_saved_plan_checks_and_says_what_changed(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert run(["plan", model, *HARDWARE, "--seq-len", "64", "--no-search", "-o", str(path)]) == 0
    assert run(["plan", "--check", str(path)]) == 0
    saved = json.loads(path.read_text())
    saved["libraries"]["torch"] = "1.0"
    saved["candidates"][0]["allocated_peak_bytes"] += 1
    path.write_text(json.dumps(saved))
    capsys.readouterr()
    assert run(["plan", "--check", str(path)]) == 1
    told = capsys.readouterr().out
    assert re.search(r"^libraries.torch +1\.0 ", told, re.MULTILINE)
    assert "requested allocated_peak_bytes" in told


@pytest.mark.slow
def test_a_check_notices_a_changed_model(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path(model, "config.json").read_text())
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    path = tmp_path / "plan.json"
    assert run(["plan", str(folder), *HARDWARE, "--seq-len", "64", "--no-search", "-o", str(path)]) == 0
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 192}))
    capsys.readouterr()
    assert run(["plan", "--check", str(path)]) == 1
    assert "model.config_digest" in capsys.readouterr().out


def test_a_model_that_cannot_be_traced_is_unknown_and_never_zero(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdptool.inspection import inspect
    from fsdptool.memory.tracing.make_trace import without_activations
    from fsdptool.records.resolved_run import ResolvedRun

    def untraceable(spec: Any, run: ResolvedRun, **_: Any) -> Any:
        return without_activations(inspect(spec), run.recipe, "cuda", "no example inputs")

    exact = document(capsys, ["plan", model, *HARDWARE, "--seq-len", "64", "--no-search"])
    monkeypatch.setattr("fsdptool.memory.tracing.tracer.trace", untraceable)
    arguments = ["plan", model, *HARDWARE, "--seq-len", "64", "--no-search"]
    plan = document(capsys, arguments, status=5)
    jsonschema.validate(plan, load_schema("plan"))
    assert plan["verdict"] == "unknown"
    assert any("no example inputs" in text for text in plan["unknowns"])
    asked, known = plan["candidates"][0], exact["candidates"][0]
    assert asked["device_total_bytes"] is None
    assert asked["step_seconds"] is None
    assert asked["rejected_by"] == {
        "kind": "unknown_activations",
        "detail": "the activations are unknown",
    }
    states = {item["name"]: item for item in asked["components"]}
    for name in ("parameters", "optimizer"):
        expected = next(item for item in known["components"] if item["name"] == name)
        assert states[name] == expected
    assert states["activations"] == {"name": "activations", "bytes": None, "basis": "unknown"}
    assert run(arguments) == 5
    told = capsys.readouterr().out
    assert f"{model} on 2 RTX-4090-24GB: unknown" in told
    assert re.search("^activations +unknown", told, re.MULTILINE)


@pytest.mark.slow
def test_plans_on_cpu_are_judged_by_the_hosts_memory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", model, "--profile", "cpu-gloo", "--processes", "2", "--seq-len", "64"]
    plan = document(capsys, [*arguments, "--host-memory", "4 GiB"])
    asked = plan["candidates"][0]
    assert asked["usable_bytes"] == 2 * 2**30
    assert asked["device_total_bytes"] == asked["allocated_peak_bytes"]
    assert asked["step_seconds"] is None
    assert document(capsys, [*arguments, "--host-memory", "1 MiB"], status=1)["verdict"] == "does_not_fit"


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_the_next_does_not(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "gpus.yaml"
    card.write_text(
        "gpus: [{name: Tiny, memory_bytes: 1000000000, flops: {float32: 1.0e13, bfloat16: 1.0e14},"
        " memory_bandwidth: 1.0e12, link_bandwidth: 1.0e10, source: test}]\n"
    )
    arguments = ["plan", model, "--gpu", "tiny", "--gpus", "2", "--gpus-file", str(card), "--seq-len", "512"]
    arguments += ["--checkpointing", "none", "--reshard", "true"]
    plan = document(capsys, [*arguments, "--max-batch"])
    size = plan["candidates"][0]["settings"]["micro_batch"]
    tried = plan["details"]["max_batch"][0]["tried"]
    room = 0.95 * 1_000_000_000
    assert tried[str(size)] <= room < tried[str(size + 1)]


@pytest.mark.slow
def test_two_plans_are_compared_moment_by_moment(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for size in ("1", "2"):
        paths.append(str(tmp_path / f"{size}.json"))
        arguments = ["plan", model, *HARDWARE, "--seq-len", "64", "--no-search", "--micro-batch", size]
        assert run([*arguments, "-o", paths[-1]]) == 0
    found = document(capsys, ["compare", *paths])
    jsonschema.validate(found, load_schema("compare"))
    rows = {row["what"]: row for row in found["rows"]}
    assert (rows["micro_batch"]["left"], rows["micro_batch"]["right"]) == (1, 2)
    assert rows["activations"]["percent"] > 0
    assert all(row["left"] is not None and row["right"] is not None for row in found["moments"])
    assert run(["compare", *paths]) == 0
    brief = capsys.readouterr().out
    assert "phase backward" in brief and "forward root" not in brief and "--explain" in brief
    assert run(["compare", *paths, "--explain"]) == 0
    assert "forward root" in capsys.readouterr().out
    assert run(["compare", paths[0]]) == 2, "a plan alone has nothing to be compared with"


def run_folder(folder: Path, candidate: dict[str, Any], *, factor: float, reserved: int | None) -> Path:
    """A finished run, in the files and fields ``train`` writes."""
    folder.mkdir()
    measured = int(candidate["allocated_peak_bytes"] * factor)
    summary = Summary(
        status="completed",
        exit_code=0,
        resumable=False,
        steps=2,
        world_size=2,
        mesh={"dp_replicate": 1, "dp_shard": 2},
        units=3,
        sharding_proof={},
        predicted_peak_bytes=candidate["allocated_peak_bytes"],
        measured_peak_bytes=(measured, measured - 512),
        instrument="a test",
        error_percent=None,
        throughput={
            "step_seconds_median": (candidate["step_seconds"] or 1.0) * 2,
            "samples_per_second": 1.0,
        },
        last_checkpoint=None,
        last_good_step=None,
        export=None,
        restarts=0,
        failure=None,
        memory_report=None,
    )
    (folder / "summary.json").write_text(json.dumps(envelope("summary", summary, summary)))
    (folder / "prediction.json").write_text(json.dumps(candidate))
    line = {"step": 2, "memory_allocated_peak_bytes": measured, "memory_reserved_peak_bytes": reserved}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def test_the_largest_peak_is_that_of_all_starts_and_none_before_a_step() -> None:
    before_the_resume = {"memory_allocated_peak_bytes": 900}
    assert largest_peak([None, 800], [before_the_resume, {"memory_allocated_peak_bytes": None}]) == 900
    assert largest_peak([950, None], [before_the_resume]) == 950
    assert largest_peak([950], [{"memory_allocated_peak_bytes": None}]) is None, "loading is not a step"


def test_a_run_is_held_against_its_plan(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert run(["plan", model, *HARDWARE, "--seq-len", "64", "--no-search", "-o", str(path)]) == 0
    candidate = json.loads(path.read_text())["candidates"][0]
    folder = run_folder(tmp_path / "run", candidate, factor=1.25, reserved=None)
    found = document(capsys, ["compare", str(path), str(folder)])
    jsonschema.validate(found, load_schema("compare"))
    assert found["error_percent"] == pytest.approx(-20.0, abs=0.01)
    assert [row["what"] for row in found["moments"]] == ["rank 0", "rank 1", "step 2"]
    assert run(["compare", str(path), str(folder), "--tolerance", "25"]) == 0
    assert run(["compare", str(path), str(folder), "--tolerance", "10"]) == 1
    with (folder / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 3, "memo')
    with (folder / "metrics.jsonl").open("a") as more:
        more.write('\n{"step": 3, "memory_allocated_peak_bytes": 1}\n')
    found = document(capsys, ["compare", str(folder)])
    assert [row["what"] for row in found["moments"]][-1] == "step 2", "only the fullest step is named"
    assert run(["compare", str(path), str(tmp_path)]) == 2
    assert run(["compare", str(path), str(path), "--tolerance", "10"]) == 2
    unknown = json.loads((folder / "prediction.json").read_text()) | {"allocated_peak_bytes": None}
    (folder / "prediction.json").write_text(json.dumps(unknown))
    assert run(["compare", str(folder), str(folder), "--tolerance", "10"]) == 5


def test_calibration_makes_a_table_that_plan_reads(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", model, *HARDWARE, "--seq-len", "64", "--no-search"]
    before = document(capsys, arguments)["candidates"][0]
    reserved = int(before["allocated_peak_bytes"] * 1.5)
    folder = run_folder(tmp_path / "run", before, factor=1.0, reserved=reserved)
    table = tmp_path / "machine.json"
    calibrate = ["calibrate", str(folder), "--gpu", "4090", "--context", "100 MiB", "-o", str(table)]
    assert run(calibrate) == 0
    row = json.loads(table.read_text())["machines"][0]
    assert row["measured"] is True
    assert row["reserved_ratio"] == pytest.approx(1.5, rel=1e-3)
    # The run took twice the predicted step, so achieved rates are about half.
    assert row["matmul_efficiency"] == pytest.approx(
        machine_for(load_gpu("4090")).matmul_efficiency / 2, rel=0.1
    )
    after = document(capsys, [*arguments, "--machine", str(table)])["candidates"][0]
    context = {item["name"]: item["bytes"] for item in after["components"]}["context"]
    assert context == 100 * 2**20
    assert run(["calibrate", "--gpu", "4090"]) == 2


def test_what_doctor_measured_changes_a_plan(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = load_gpu("4090")
    ranks = RankMeasurements(
        *("NVIDIA GeForce RTX 4090", "8.9", gpu.memory_bytes, 2, "nccl"),
        context_bytes=100 * 2**20,
        communicator_bytes=50 * 2**20,
        kernel_latency=1e-4,
        # Half of the peak, a quarter of the bandwidth, a tenth of the link.
        products=(ProductRate("bfloat16", 4096, 4096, 4096, 4 * 4096**3 / gpu.flops["bfloat16"]),),
        copies=(CopyRate("device", 2**30, 8 * 2**30 / gpu.memory_bandwidth),),
        collectives=(
            CollectiveRate("all_gather", 2, 2**16, 2e-5),
            CollectiveRate("all_gather", 2, 2**30, 5 * 2**30 / gpu.link_bandwidth),
        ),
    )
    probe = Probe("cuda", "nccl", 2, sharded=True, equal=True, difference=0.0, ok=True, reason=None)
    measured = Measurements("cuda", {"torch": "2.13.0"}, probe, ranks, None, 60.0)
    path, table = tmp_path / "measured.json", tmp_path / "machine.json"
    path.write_text(json.dumps(envelope("measurements", measured, measured)))
    assert run(["calibrate", "--measured", str(path), "-o", str(table)]) == 0
    row = json.loads(table.read_text())["machines"][0]
    assert row["match"] == gpu.name
    assert row["matmul_efficiency"] == pytest.approx(SUSTAINED / 2)
    assert row["memory_efficiency"] == pytest.approx(0.88 / 4)
    assert (row["link_efficiency"], row["link_latency"]) == (pytest.approx(0.1), pytest.approx(2e-5))
    arguments = ["plan", model, *HARDWARE, "--seq-len", "64", "--no-search"]
    before, after = (
        document(capsys, [*arguments, *more])["candidates"][0] for more in ([], ["--machine", str(table)])
    )
    components = {item["name"]: item["bytes"] for item in after["components"]}
    assert (components["context"], components["communicators"]) == (100 * 2**20, 50 * 2**20)
    # Twenty times the launch time, on a model whose kernels are tiny.
    assert after["step_seconds"] > 5 * before["step_seconds"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": None}, "is empty: nothing was measured"),
        ({"ranks": None, "error": "no GPU"}, "is empty: no GPU"),
        ({"device": "cpu"}, "is a rehearsal on the CPU"),
        ({"error": "a rank was lost"}, "ended early: a rank was lost"),
        (
            {"collectives": [{"kind": "all_gather", "ranks": 1, "bytes": 8, "seconds": 1.0}]},
            "0.ranks: 1 is less",
        ),
        (
            {"collectives": [{"kind": "all_gather", "ranks": 2, "bytes": 8, "seconds": 0}]},
            "0.seconds: 0 is less",
        ),
        ({"products": [{"dtype": "bfloat16", "m": 1, "k": 1, "n": 1, "seconds": 0}]}, "0.seconds: 0 is less"),
        (
            {"copies": [{"kind": "device", "bytes": 1, "seconds": math.nan}]},
            "0.seconds is not a finite number",
        ),
    ],
)
def test_measurements_without_figures_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = RankMeasurements("NVIDIA GeForce RTX 4090", "8.9", 24 << 30, 2, "nccl")
    probe = Probe("cuda", "nccl", 2, sharded=True, equal=True, difference=0.0, ok=True, reason=None)
    measured = Measurements("cuda", {"torch": "2.13.0"}, probe, ranks, None, 60.0)
    data = json.loads(json.dumps(envelope("measurements", measured, measured)))
    for name, value in changes.items():
        (data if name in data else data["ranks"])[name] = value
    (tmp_path / "measured.json").write_text(json.dumps(data))
    assert run(["calibrate", "--measured", str(tmp_path / "measured.json")]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_the_function_returns_the_record_with_a_notebook_representation(model: str) -> None:
    import fsdptool

    plan = fsdptool.plan(model, gpu="4090", gpus=2, sequence_length=64, search=False)
    assert plan.verdict == "fits"
    shown = plan._repr_html_()
    assert shown.startswith("<iframe")
    assert "<script" not in shown


@pytest.mark.slow
def test_what_a_plan_holds_is_enough_to_run_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdptool.planning import chosen_run, read_plan

    path = tmp_path / "plan.json"
    arguments = [
        "plan",
        model,
        *HARDWARE,
        "--seq-len",
        "64",
        "--global-batch",
        "8",
        "--checkpointing",
        "every_2",
    ]
    assert run([*arguments, "-o", str(path)]) == 0
    recipe, settings, cluster = chosen_run(read_plan(path))
    assert recipe.model.reference == model
    assert recipe.sharding.checkpointing is not None
    assert recipe.sharding.checkpointing.every_n == 2
    assert settings.activation_checkpointing is True
    assert settings.num_processes == cluster.world_size == 2
    ranks = settings.mesh.dp_replicate * (settings.mesh.dp_shard or 0)
    assert recipe.batch.micro_batch * recipe.batch.accumulation * ranks == 8


@pytest.mark.slow
def test_ranks_that_share_a_sequence_hold_less_and_talk_more(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", model, *HARDWARE, "--seq-len", "512", "--micro-batch", "2", "--no-search"]
    alone, shared = (document(capsys, [*arguments, "--cp", size]) for size in ("1", "2"))
    before, after = alone["candidates"][0], shared["candidates"][0]
    assert shared["unknowns"] == []
    assert after["settings"]["cp"] == 2
    held = [{part["name"]: part["bytes"] for part in one["components"]} for one in (before, after)]
    assert held[0]["parameters"] == held[1]["parameters"]
    assert held[0]["activations"] > held[1]["activations"] > held[0]["activations"] // 2
    assert after["seconds"]["communication"] > before["seconds"]["communication"]
    assert any("context parallelism on GPUs is unverified" in note for note in shared["details"]["notes"])


@pytest.mark.slow
def test_sequences_that_cannot_be_split_are_no_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "max_position_embeddings": 16384,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), "--gpu", "H100-80GB-SXM", "--gpus", "4", "--seq-len", "16384"]
    plan = document(capsys, arguments)
    assert {candidate["settings"]["cp"] for candidate in plan["candidates"]} == {1}
    assert run([*arguments, "--cp", "2"]) == 2
    assert "cannot split Gemma2Attention: it caps its attention scores" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100", "--gpus", "0"], "0 GPUs"),
        (["--gpu", "h100", "--gpus", "-3"], "-3 GPUs"),
        (["--gpu", "h100", "--nodes", "0"], "0 nodes"),
        (["--gpu", "H100-81GB"], "unknown GPU"),
        ([*HARDWARE, "--seq-len", "4096"], "beyond the 512 positions"),
        ([*HARDWARE, "--micro-batch", "3", "--global-batch", "100"], "does not divide the global batch"),
        ([*HARDWARE, "--hsdp", "3x3"], "does not multiply to 2"),
        ([*HARDWARE, "--hsdp", "2by2"], "is not a mesh shape"),
        ([*HARDWARE, "--seq-len", "99999999999999"], "too large for memory arithmetic"),
        ([*HARDWARE, "--micro-batch", "99999999999", "--seq-len", "512"], "too large for memory arithmetic"),
        ([*HARDWARE, "--micro-batch", "0"], "micro-batch must be at least 1"),
        ([*HARDWARE, "--reshard", "maybe"], "is not supported"),
        ([*HARDWARE, "--micro-batch", "1000000", "--seq-len", "512"], "too many for one rank"),
        ([*HARDWARE, "--reshard", "2"], "is not a proper divisor of the 2 ranks"),
        ([*HARDWARE, "--ema", "nan"], "--ema must be at least 0 and below 1, not nan"),
        ([*HARDWARE, "--network", "0"], "bandwidth between nodes must be positive"),
        ([*HARDWARE, "--price", "nan"], "--price must be a finite number, not nan"),
        ([*HARDWARE, "--price", "-1"], "price per GPU hour must be 0 or more"),
        ([*HARDWARE, "--checkpointing", "some"], "is not supported"),
        ([*HARDWARE, "--optimizer", "magic"], "--optimizer 'magic' is not supported"),
        ([*HARDWARE, "--lora-rank", "0"], "--lora-rank must be at least 1"),
        ([*HARDWARE, "--lora-rank", "100000000"], "larger than the width of any layer"),
        ([*HARDWARE, "--method", "distillation"], "needs a teacher"),
        ([*HARDWARE, "-o", "plan.pdf"], "written as .json, .html, .svg or .csv"),
        ([*HARDWARE, "--override", "hidden_size"], "is not KEY=VALUE"),
        ([*HARDWARE, "--cluster", "x.yaml"], "both --cluster and --gpu"),
        (["--profile", "cpu-gloo", "--gpu", "h100"], "has no GPU"),
        ([], "no GPU is given"),
    ],
)
def test_bad_input_is_one_clear_line(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["plan", model, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) <= 2


def test_a_length_that_the_configuration_refuses_is_told_before_the_model_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The heads of this model cannot be built."""
    sizes = {"hidden_size": 64, "num_attention_heads": 7, "num_hidden_layers": 1, "vocab_size": 64}
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    for length, told in (("256", "beyond the 128 positions"), ("128", "not a multiple of the number")):
        assert run(["plan", str(tmp_path), *HARDWARE, "--seq-len", length]) == 2
        assert told in capsys.readouterr().err
