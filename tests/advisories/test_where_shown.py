"""Known bugs of versions show beside ``audit``: in findings, before a run, in a log and in a plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import fsdptool
from fsdptool.advisories.facts import own_facts
from fsdptool.advisories.matching import diagnostics, findings
from fsdptool.launch.doctor import examine
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.recipe import Batch, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.diagnose import diagnose

LAUNCH = """\
distributed_type: FSDP
num_processes: 4
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: true
"""
QLORA = """\
accelerate launch --use_fsdp --fsdp_version 2 --mixed_precision bf16 --num_processes 4 \
-m trl.scripts.sft --model_name_or_path some/model --dataset_name d --output_dir out \
--use_peft --load_in_4bit --lora_target_modules all-linear --max_length 128 {more}
"""
MIXED = (
    "AssertionError: FSDP expects uniform original parameter dtype but got {torch.float32, torch.bfloat16}\n"
)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("accelerate==1.14", True),
        ("1.14", True),
        ("accelerate==1.14,peft==0.19.1", True),
        ("accelerate==1.15", False),
        (None, False),
    ],
)
def test_validate_names_bugs_of_the_target(tmp_path: Path, target: str | None, found: bool) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(LAUNCH, encoding="utf-8")
    (reading,) = fsdptool.validate(file, target=target).readings
    bugs = [item for item in reading.diagnostics if item.code == "FSD376"]
    assert [item.severity for item in bugs] == (["warning"] if found else [])
    assert all("accelerate-checkpointing-of-children" in item.message for item in bugs)


def test_a_known_bug_is_silenced_by_a_comment_and_not_repeated_beside_its_rule(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text("# fsdptool: ignore[FSD376]\n" + LAUNCH, encoding="utf-8")
    (reading,) = fsdptool.validate(file, target="accelerate==1.14.0").readings
    assert "FSD376" not in [item.code for item in reading.diagnostics]
    assert "FSD376" in [item.code for item in reading.suppressed]
    offload = "  fsdp_offload_params: true\n  fsdp_cpu_ram_efficient_loading: true\n"
    file.write_text(LAUNCH + offload, encoding="utf-8")
    (reading,) = fsdptool.validate(file, target="accelerate==1.12.0").readings
    assert "FSD358" in [item.code for item in reading.diagnostics]
    assert not [
        item for item in reading.diagnostics if "accelerate-ram-loading-with-cpu-offload" in item.message
    ]


@pytest.mark.parametrize(("accumulation", "verdicts"), [(2, ["may_apply"]), (1, [])])
def test_a_run_of_the_own_trainer_is_compared(accumulation: int, verdicts: list[str]) -> None:
    recipe = Recipe(ModelChoice("llama3:tiny"), batch=Batch(accumulation=accumulation))
    facts = own_facts(resolve_run(recipe, FsdpSettings(num_processes=2), ranks=2))
    found = findings(facts, {"torch": (Version("2.13.0"),), "accelerate": (Version("1.13.0"),)})
    assert not [item for item in found if item.package == "accelerate"], "it runs no accelerate"
    assert [item.verdict for item in found if item.id == "torch-unused-unit-accumulation"] == verdicts
    assert not list(diagnostics(facts, {"torch": (Version("2.13.0"),)}, None)), (
        "what may apply is not reported"
    )


def test_doctor_names_what_a_newer_release_repairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bugs() -> list[str]:
        _, findings = examine(with_probe=False)
        return [item.message for item in findings if item.code == "DOC007"]

    assert not [message for message in bugs() if message.startswith("accelerate")]
    folder = tmp_path / "accelerate-1.13.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.13.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (message,) = (message for message in bugs() if message.startswith("accelerate"))
    assert message.startswith("accelerate 1.13.0 has ")
    assert "accelerate-fp32-masters-lost" in message


@pytest.mark.parametrize(
    ("banner", "found"),
    [
        ("accelerate==1.13.0", True),
        ("- `Accelerate` version: 1.13.0", True),
        ("accelerate                1.13.0", True),
        ("accelerate==1.14.0", False),
        ("Accelerate is used", False),
    ],
)
def test_a_log_with_message_and_version_names_the_bug(tmp_path: Path, banner: str, found: bool) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"{banner}\n{MIXED}", encoding="utf-8")
    notes = [note for note in diagnose(log).notes if "accelerate-mixed-trainable-dtypes" in note]
    assert len(notes) == found
    assert all("fixed in 1.14.0" in note for note in notes)
    log.write_text(f"{banner}\nRuntimeError: another\n", encoding="utf-8")
    assert not diagnose(log).notes


@pytest.mark.slow
@pytest.mark.parametrize(("more", "found"), [("", True), ("--bnb_4bit_quant_storage bfloat16", False)])
def test_a_plan_says_what_a_whole_base_adds(tmp_path: Path, more: str, found: bool) -> None:
    file = tmp_path / "train.sh"
    file.write_text(QLORA.format(more=more), encoding="utf-8")
    plan = fsdptool.plan(str(file), model="llama3:tiny", gpu="A100-80GB-SXM", gpus=4)
    messages = [item.message for item in plan.diagnostics if item.code == "PLN017"]
    assert len(messages) == found
    assert all("does not shard a 4-bit base" in message and " per GPU" in message for message in messages)
    assert json.dumps(plan.document())
