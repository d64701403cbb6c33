"""Rows for the public collection: what plans the run and what it measured, and nothing that names anyone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fsdptool.cli.app import run
from fsdptool.errors import StorageError
from fsdptool.files.values import load_schema
from fsdptool.runs.reported import read_reported

TITAN = """
[job]
dump_folder = "/home/alice/secret-project/outputs"
description = "Alice's run"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "/home/alice/assets"
[optimizer]
name = "AdamW"
[training]
local_batch_size = 1
seq_len = 8192
dataset = "alice_private_c4"
[activation_checkpoint]
mode = "full"
"""
STEP = (
    "step: {n}  loss: 9.2  grad_norm:  4.0  memory: {gib}GiB(52.18%)  tps: {tps}  tflops: 324.6  mfu: 32.8%\n"
)
TITAN_LOG = "host gpu-node-17.alice.internal user alice\n" + "".join(
    f"[rank0]:[titan] 2025-11-01 10:00:0{n},000 - root - INFO - " + STEP.format(n=n, gib=gib, tps=tps)
    for n, gib, tps in (
        (1, "48.10", "1,200"),
        (2, "49.59", "5,000"),
        (3, "49.59", "5,605"),
        (4, "49.5", "5,611"),
    )
)
ROOT = Path(__file__).parents[2]
PRIVATE = ("alice", "secret", "/home", "internal", "gpu-node", "c4", "assets", "outputs")


def shared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["share", *arguments]) == 0, capsys.readouterr().err
    row: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(row, load_schema("shared-row"))
    return row


@pytest.fixture
def titan(tmp_path: Path) -> list[str]:
    folder = tmp_path / "secret-project"
    folder.mkdir()
    config, log = folder / "titan.toml", folder / "alice.log"
    config.write_text(TITAN)
    log.write_text(TITAN_LOG)
    return [str(log), "--config", str(config), "--gpu", "NVIDIA H100 80GB HBM3", "--gpus", "8"]


def test_a_log_and_its_configuration_make_a_row_without_names(
    titan: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    row = shared(capsys, *titan)
    assert (row["program"], row["gpu"], row["gpus"], row["model"]) == (
        *("torchtitan", "H100-80GB-SXM", 8, "llama3:8b"),
    )
    assert row["published"] == {
        "tokens_per_second_and_gpu": 5608.0,
        "samples_per_second_and_gpu": None,
        "peak_gib": 49.59,
        "peak_kind": "reserved",
    }
    assert row["options"]["checkpointing"] == "full"
    assert row["recipe"]["batch"]["sequence_length"] == 8192
    assert row["recipe"]["sharding"]["compile"] is False
    assert not [word for word in PRIVATE if word in json.dumps(row).lower()]


def test_a_run_folder_makes_a_row_without_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "alice-secret-run"
    folder.mkdir()
    from fsdptool.inspection import inspect
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.modeling.units import plan_units
    from fsdptool.records.diagnostic import envelope
    from fsdptool.records.recipe import Batch, Data, Lora, Method, ModelChoice, Recipe
    from fsdptool.records.run import Start, Summary
    from fsdptool.records.sharding import FsdpSettings
    from fsdptool.runs.folder import RunInputs, environment, write_inputs, write_json, write_start
    from fsdptool.source import resolve_choice

    recipe = Recipe(
        model=ModelChoice("qwen3:tiny", weights="random", overrides={"num_hidden_layers": 3}),
        method=Method("lora", Lora(rank=4, targets=("q_proj", "alice_layer"))),
        data=Data(source="jsonl", path="/home/alice/secret/c4.jsonl"),
        batch=Batch(micro_batch=2, sequence_length=64),
        steps=4,
    )
    settings, spec = FsdpSettings(), resolve_choice(recipe.model)
    units = plan_units(inspect(spec), resolve_run(recipe, settings, ranks=2))
    inputs = RunInputs(folder, recipe, settings, spec, units)
    write_inputs(inputs)
    write_json(folder / "environment.json", {**environment(), "machine": "gpu-node-17.alice.internal"})
    write_start(folder, Start(2, "cuda", argv=("fsdptool", "train", "/home/alice/recipe.yaml")), {})
    line = {"step": 4, "memory_allocated_peak_bytes": 2**30, "memory_reserved_peak_bytes": None}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    summary = Summary(
        status="completed",
        exit_code=0,
        resumable=False,
        steps=4,
        world_size=2,
        mesh={"dp_replicate": 1, "dp_shard": 2},
        units=3,
        sharding_proof={},
        predicted_peak_bytes=None,
        measured_peak_bytes=(2**30, 2**29),
        instrument="a test",
        error_percent=None,
        throughput={"tokens_per_second": 1000.0},
        last_checkpoint=None,
        last_good_step=None,
        export=None,
        restarts=0,
        failure=None,
        memory_report=None,
    )
    (folder / "summary.json").write_text(json.dumps(envelope("summary", summary, summary)))
    row = shared(capsys, str(folder), "--gpu", "A100-80GB-SXM")
    assert row["published"]["tokens_per_second_and_gpu"] == 500.0
    assert (row["published"]["peak_gib"], row["published"]["peak_kind"]) == (1.0, "allocated")
    assert row["recipe"]["model"]["overrides"] == {"num_hidden_layers": 3}
    assert row["recipe"]["method"]["lora"] == {"rank": 4, "base": "unchanged", "adapters": "sharded"}
    assert row["left_out"] == ["method.lora.targets"]
    assert set(row["libraries"]) >= {"torch", "transformers"}
    assert not [word for word in PRIVATE if word in json.dumps(row).lower()]


def test_the_lines_of_every_program_are_read(tmp_path: Path) -> None:
    lines = {
        "automodel": "step 20 | epoch 0 | loss 1.2 | mem 45.12 GiB | tps 12,345.60(1543.20/gpu) | labels 9\n",
        "trainer": "{'train_runtime': 9.0, 'train_samples_per_second': 16.0, 'train_loss': 1.0}\n",
        "axolotl": "{'memory/max_allocated (GiB)': 20.5, 'tokens/train_per_sec_per_gpu': 2100.5}\n",
    }
    path = tmp_path / "log"
    path.write_text(lines["automodel"])
    program, figures = read_reported(path, 8)
    assert (program, figures.tokens_per_second_and_gpu, figures.peak_gib) == ("automodel", 1543.2, 45.12)
    path.write_text(lines["trainer"])
    program, figures = read_reported(path, 8)
    assert (program, figures.samples_per_second_and_gpu) == ("trainer", 2.0)
    path.write_text(lines["axolotl"] + lines["trainer"])
    program, figures = read_reported(path, 8)
    assert (program, figures.tokens_per_second_and_gpu, figures.peak_gib) == ("axolotl", 2100.5, 20.5)
    path.write_bytes(b"\xff\x00 nothing\n")
    with pytest.raises(StorageError, match="no line with the speed"):
        read_reported(path, 8)


def test_a_log_needs_its_configuration(titan: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["share", titan[0], "--gpu", "H100"]) == 2
    assert "--config FILE --gpus 8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_row_joins_the_collection_once(titan: list[str], tmp_path: Path) -> None:
    row, collection = tmp_path / "row.json", tmp_path / "rows.jsonl"
    collection.write_text("")
    assert run(["share", *titan, "-o", str(row)]) == 0

    def add(*more: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "benchmarks" / "planning" / "add_row.py"
        command = [sys.executable, str(script), str(row), "--collection", str(collection), *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert add("--source", "no address").returncode == 2
    assert add("--source", "https://example.org/thread").returncode == 0
    (added,) = map(json.loads, collection.read_text().splitlines())
    assert added["published"]["throughput"] == {"tokens_per_s_gpu": 5608.0}
    again = add("--source", "https://example.org/thread")
    assert (again.returncode, len(collection.read_text().splitlines())) == (2, 1)
    row.write_text(row.read_text().replace('"gpus": 8', '"gpus": 8, "host": "alice"'))
    assert add("--source", "https://example.org/thread").returncode == 2
