"""What an undisturbed run leaves: documents that validate, a proof, memory near the plan's, an export."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from jsonschema import Draft202012Validator
from real_runs import STEPS, Run, Work, digests, losses
from recorded_steps import recorded
from sockets import LOOPBACK, listening
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import LlamaConfig, LlamaForCausalLM

import fsdptool as fsdp
from fsdptool.cli.app import run as fsdptool
from fsdptool.errors import StorageError
from fsdptool.files.values import load_schema
from fsdptool.files.values import read_own_json as read_json
from fsdptool.runs.events import read_lines
from fsdptool.runs.manifest import list_checkpoints
from fsdptool.training.export import adapters

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_every_document_validates(undisturbed: Run) -> None:
    for name in ("run", "summary"):
        Draft202012Validator(load_schema(name)).validate(read_json(undisturbed.folder / f"{name}.json"))
    planned = read_json(undisturbed.folder / "prediction.json")["step_flops"]
    assert planned > 0
    lines = list(read_lines(undisturbed.folder / "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        Draft202012Validator(load_schema("metrics")).validate(line)
        # No peak is catalogued for a CPU: what is achieved is still said, from the plan's FLOPs.
        assert line["mfu"] is None
        assert line["extra"]["flops_per_second"] * line["step_seconds"] == pytest.approx(planned)


def test_a_snapshot_stands_beside_what_the_run_predicted(
    undisturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.zeros(2, 32, dtype=torch.int64)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(undisturbed.folder.parent / "model"))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorded(lambda: None, lambda: model(input_ids=ids))))
    assert fsdptool(["diagnose", str(path), "--run", str(undisturbed.folder), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    predicted = read_json(undisturbed.folder / "prediction.json")
    expected = {item["name"]: item["bytes"] for item in predicted["components"]}
    rows = {row["name"]: row for row in document["components"]}
    assert document["planned_peak_bytes"] == predicted["allocated_peak_bytes"]
    assert rows["optimizer"] == {
        **{"name": "optimizer", "bytes": 0, "blocks": 0},
        "planned_bytes": expected["optimizer"],
    }
    assert rows["activations"]["bytes"] > 0
    assert rows["activations"]["planned_bytes"] == expected["activations"]


def test_the_closing_summary_proves_sharding_and_compares_memory(undisturbed: Run) -> None:
    summary = undisturbed.summary()
    assert summary["status"] == "completed"
    proof = summary["sharding_proof"]
    assert proof["proven"]
    assert set(proof["placements"]) == {"[Shard(dim=0)]"}
    assert summary["units"] == proof["units"]
    measured = summary["measured_peak_bytes"]
    assert len(measured) == 2
    assert all(isinstance(value, int) for value in measured)
    assert "CPU allocator events" in summary["instrument"]
    predicted = summary["predicted_peak_bytes"]
    assert predicted is not None
    # A model of under a megabyte: what lives beside it (token tables, position caches) weighs as much
    # as the error at real sizes, which benchmarks/memory measures.
    assert abs(predicted - max(measured)) < 0.05 * max(measured) + 256 * 1024, (predicted, measured)
    error = 100.0 * (predicted - max(measured)) / max(measured)
    assert summary["error_percent"] == pytest.approx(error)
    said = Path(undisturbed.answer.name).read_text()
    for word in ("sharding", "loss", "predicted", "rank 1 measured", "instrument", "checkpoint"):
        assert word in said
    lines = list(read_lines(undisturbed.folder / "metrics.jsonl"))
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_the_export_is_the_checkpoint_and_loads(
    undisturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "exported"
    arguments = ["export", str(undisturbed.folder), "-o", str(target), "--max-shard-size", "40KB"]
    assert fsdptool([*arguments, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(load_schema("export")).validate(document)
    assert "model.safetensors.index.json" in document["files"]
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight, "ties are kept"
    # torch reads the checkpoint on its own: nothing of ours between it and the file.
    wanted = {f"model/{name}": torch.empty_like(p) for name, p in model.named_parameters()}
    newest = list_checkpoints(undisturbed.folder / "checkpoints")[0]
    load(wanted, storage_reader=HuggingFaceStorageReader(str(newest)), no_dist=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.data, wanted[f"model/{name}"]), name
    text = "The 3th sentence"
    assert AutoTokenizer.from_pretrained(target)(text)["input_ids"] == list(text.encode())
    assert fsdptool(arguments) == 2
    assert "already exists" in capsys.readouterr().err
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    plain = adapters.write_shards
    for number, status, said in (
        (signal.SIGTERM, 75, "SIGTERM was received before the export was complete"),
        (signal.SIGINT, 130, ""),
    ):

        def stopped(*given: Any, number: signal.Signals = number, **options: Any) -> None:
            plain(*given, **options)
            os.kill(os.getpid(), number)

        with monkeypatch.context() as during:
            during.setattr(adapters, "write_shards", stopped)
            assert fsdptool([*arguments, "--force"]) == status
        assert said in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before
    assert list(tmp_path.iterdir()) == [target], "nothing half-written stays"
    assert fsdptool([*arguments, "--force"]) == 0, "an export may be replaced"


def test_dry_run_prints_what_would_run_and_writes_nothing(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fsdptool([*work.arguments("dry"), "--dry-run", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(load_schema("launch")).validate(document)
    node = document["nodes"][0]
    assert node["argv"][1:5] == ["-P", "-m", "fsdptool.distributed.rendezvous", "torchrun"]
    assert node["argv"][-2:] == ["fsdptool.training.worker", str(work.folder / "dry")]
    assert node["environment"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert not (work.folder / "dry").exists()


def test_a_real_run_is_watched_listed_and_reported(
    undisturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fsdptool(["watch", str(undisturbed.folder), "--format", "json"]) == 0
    view = json.loads(capsys.readouterr().out)
    Draft202012Validator(load_schema("watch")).validate(view)
    assert (view["state"], view["step"], view["total_steps"]) == ("completed", STEPS, STEPS)
    known = {
        phase["name"] for phase in view["memory"] if phase["predicted_bytes"] and phase["measured_bytes"]
    }
    assert known >= {"load", "forward", "backward", "optimizer", "save"}
    assert [rank["rank"] for rank in view["ranks"]] == [0, 1]
    assert f"step {STEPS}/{STEPS}" in undisturbed.said()
    assert "s left" in undisturbed.said()
    assert fsdptool(["report", str(undisturbed.folder), "-o", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    assert page.count("<polyline") == 4
    assert "checkpoint written in" in page
    assert fsdptool(["diagnose", str(undisturbed.folder)]) == 0
    assert "the run has not failed" in capsys.readouterr().out


def test_a_doctor_shards_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    assert fsdptool(["doctor", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(load_schema("doctor")).validate(document)
    (probe,) = document["probes"]
    assert (probe["device"], probe["backend"]) == ("cpu", "gloo")
    assert probe["sharded"]
    assert probe["equal"]
    assert {plugin["family"] for plugin in document["plugins"]} >= {"generic"}


def test_python_and_a_notebook(work: Work, undisturbed: Run, tmp_path: Path) -> None:
    """From a model to an export without a command line; accelerate's launcher listens on loopback alone."""
    files = (work.folder / "recipe.yaml", work.folder / "accelerate.yaml")
    detection = fsdp.detect(str(work.folder / "model"))
    assert detection.wrap.classes == ("LlamaDecoderLayer",)
    plan = fsdp.plan(recipe=files[0], config=files[1], search=False)
    assert plan.verdict == "fits"
    (tmp_path / "plan.json").write_text(json.dumps(plan.document()))
    assert fsdp.read_plan(tmp_path / "plan.json") == plan
    emitted = tmp_path / "fsdp.yaml"
    emitted.write_text(fsdp.emit_config(plan=plan))
    assert "no findings" in repr(fsdp.validate(emitted))

    places: set[tuple[str, int]] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.15):
            places.update(listening(psutil.Process()))

    looking = threading.Thread(target=look)
    looking.start()
    events: list[str] = []
    folder = tmp_path / "run"
    try:
        summary = fsdp.train(
            files[0],
            emitted,
            output=folder,
            launcher="accelerate",
            predict=False,
            on_event=lambda event: events.append(str(event["kind"])),
        )
    finally:
        ended.set()
        looking.join(60)
    assert places, "gloo's ranks listen for one another"
    assert not [place for place in places if not place[0].startswith(LOOPBACK)]
    assert (summary.status, summary.world_size, events.count("step")) == ("completed", 2, STEPS)
    assert repr(summary).splitlines()[0] == f"completed: {STEPS} steps on 2 ranks"
    assert "last checkpoint: checkpoints/step-" in repr(summary)
    assert losses(folder) == losses(undisturbed.folder)
    assert digests(folder) == digests(undisturbed.folder)

    compared = fsdp.compare(plan, folder)
    assert "allocated peak" in repr(compared)
    exported = fsdp.export(folder, tmp_path / "export")
    assert exported.notes == ()
    with pytest.raises(StorageError) as refused:
        fsdp.export(folder, tmp_path / "export")
    assert refused.value.__notes__ == ["help: set force to replace it, or give another output folder"]
    for shown in (detection, plan, compared):
        assert len(repr(shown)) < 1500
        assert shown._repr_html_().startswith("<iframe")
