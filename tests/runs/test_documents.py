"""What an undisturbed run leaves: documents that validate, a proof, memory near the plan's, an export."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from real_runs import STEPS, Run, Work, digests, losses
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from fsdptool.cli.app import run as fsdptool
from fsdptool.files.values import load_schema
from fsdptool.runs.events import read_lines
from fsdptool.runs.folder import read_json
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
    with monkeypatch.context() as during:
        plain = adapters.write_shards

        def stopped(*given: Any, **options: Any) -> None:
            plain(*given, **options)
            os.kill(os.getpid(), signal.SIGTERM)

        during.setattr(adapters, "write_shards", stopped)
        assert fsdptool([*arguments, "--force"]) == 75
        assert "SIGTERM was received before the export was complete" in capsys.readouterr().err
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


def test_a_doctor_shards_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    assert fsdptool(["doctor", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(load_schema("doctor")).validate(document)
    (probe,) = document["probes"]
    assert (probe["device"], probe["backend"]) == ("cpu", "gloo")
    assert probe["sharded"]
    assert probe["equal"]
    assert {plugin["family"] for plugin in document["plugins"]} >= {"generic"}


def test_accelerates_launcher_gives_the_same_run(work: Work, undisturbed: Run) -> None:
    run = work.start("by-accelerate", "--launcher", "accelerate")
    assert run.end() == 0, run.said()
    assert run.summary()["world_size"] == 2
    assert losses(run.folder) == losses(undisturbed.folder)
    assert digests(run.folder) == digests(undisturbed.folder)
