"""Whole runs on two gloo ranks: every phase that was measured against its prediction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fsdptool.cli.app import run
from fsdptool.files.values import load_schema

# All on one worker: another would make the same two runs again.
pytestmark = [pytest.mark.xdist_group("run-phases"), pytest.mark.distributed, pytest.mark.slow]

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
machine_rank: 0
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_cpu_ram_efficient_loading: false
"""

PACKED = """\
model: {reference: model, weights: random}
data: {source: jsonl, path: text.jsonl, tokenizer: bytes}
batch: {micro_batch: 2, sequence_length: 128, accumulation: 2}
steps: 4
evaluation: {every_steps: 3, batches: 2, holdout: 0.2}
checkpoints: {every_steps: 3}
ema: {decay: 0.99}
"""

GATHERED = """\
model: {reference: model, weights: random, dtype: bfloat16}
data: {source: jsonl, path: text.jsonl, tokenizer: bytes, document_mask: false}
batch: {micro_batch: 2, sequence_length: 128}
optimizer: {name: muon}
steps: 2
evaluation: {every_steps: 2, batches: 2, holdout: 0.2, samples: 1}
"""

RECIPES = {
    "packed": (PACKED, "  fsdp_reshard_after_forward: true\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"),
    "gathered": (
        GATHERED,
        "  fsdp_reshard_after_forward: false\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
        "  fsdp_activation_checkpointing: true\n",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs: packed documents with staged checkpoints and an average; Muon, everything gathered."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    lines = (
        {"text": " ".join(f"Sentence {n} of {k} says {n * n % 97}." for n in range(1 + k % 9))}
        for k in range(300)
    )
    (folder / "text.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    found = {}
    for name, (recipe, options) in RECIPES.items():
        (folder / f"{name}.yaml").write_text(recipe)
        (folder / f"{name}.accelerate.yaml").write_text(CONFIG + options)
        found[name] = folder / name
        subprocess.run(
            [
                *(sys.executable, "-m", "fsdptool", "train", str(folder / f"{name}.yaml")),
                *("--config", str(folder / f"{name}.accelerate.yaml"), "-o", str(found[name])),
            ],
            check=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=600,
        )
    return found


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        (
            "packed",
            {"first step", "load", "forward", "backward", "optimizer", "average", "evaluation", "save"},
        ),
        (
            "gathered",
            {"first step", "load", "forward", "backward", "optimizer", "evaluation", "sampling", "save"},
        ),
    ],
)
def test_every_phase_of_a_run_was_predicted(runs: dict[str, Path], name: str, phases: set[str]) -> None:
    """Reshard on and off, checkpoints staged and gathered, two optimizers, random weights in two dtypes."""
    summary = read(runs[name] / "summary.json")
    jsonschema.validate(summary, load_schema("summary"))
    predicted = {item["name"]: item for item in read(runs[name] / "prediction.json")["phases"]}
    assert set(summary["measured_moments"]) == phases
    assert phases < set(predicted)
    for phase, measured in summary["measured_moments"].items():
        assert predicted[phase]["allocated_bytes"] == pytest.approx(max(measured), rel=0.03), phase
    assert abs(summary["error_percent"]) < 0.5
    assert summary["predicted_peak_bytes"] == max(item["allocated_bytes"] for item in predicted.values())


def test_the_mask_of_packed_documents_is_in_the_plan(runs: dict[str, Path], tmp_path: Path) -> None:
    """What the trainer measures with documents told apart is what the plan says of them, mask included."""
    from fsdptool.launch.prepare import prepare

    folder = runs["packed"].parent
    plain = folder / "plain.yaml"
    plain.write_text(PACKED.replace("tokenizer: bytes", "tokenizer: bytes, document_mask: false"))
    made = prepare(plain, folder / "packed.accelerate.yaml", cpu=True, with_data=False).prediction
    assert made is not None and made.allocated_peak_bytes is not None
    measured = max(read(runs["packed"] / "summary.json")["measured_peak_bytes"])
    predicted = read(runs["packed"] / "prediction.json")["allocated_peak_bytes"]
    mask = 2 * 256 * 256  # one boolean a pair of tokens, shared by the layers
    assert abs(predicted - measured) < mask / 4
    assert predicted - made.allocated_peak_bytes >= mask


def test_a_run_is_compared_phase_by_phase(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(runs["packed"])
    capsys.readouterr()
    assert run(["compare", folder, folder, "--tolerance", "1", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, load_schema("compare"))
    rows = {row["what"]: row for row in found["moments"]}
    for phase in ("load", "forward", "backward", "optimizer", "average", "evaluation", "save"):
        assert abs(rows[phase]["percent"]) < 3, phase
    assert {"rank 0", "rank 1"} <= set(rows)
    assert len([name for name in rows if name.startswith("step ")]) == 1, "the fullest step"


def test_a_real_run_calibrates_what_it_measured(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on the CPU reserves nothing and has no predicted time: only what is given by hand is fitted."""
    table = tmp_path / "machine.json"
    calibrate = ["calibrate", str(runs["packed"]), "--gpu", "4090", "-o", str(table)]
    assert run(calibrate) == 2
    assert "no measurements to calibrate from" in capsys.readouterr().err
    assert run([*calibrate, "--context", "300 MiB"]) == 0
    row = read(table)["machines"][0]
    assert row["context_bytes"] == 300 * 2**20
    assert "reserved_ratio" in row["source"].partition("not measured")[2]
