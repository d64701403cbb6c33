"""Training files that are wrong, hostile or not whole: one clear line each, and nothing imported or run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fsdptool.cli.app import run

AXOLOTL = """\
base_model: org/model
adapter: lora
lora_r: 4
lora_target_linear: true
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
bf16: true
datasets: [{path: org/data, type: alpaca}]
learning_rate: 0.0002
"""
TWO = (
    AXOLOTL
    + """\
model_name_or_path: org/model
stage: sft
finetuning_type: lora
template: llama3
cutoff_len: 64
dataset: x
"""
)
HYDRA = """\
actor_rollout_ref:
  model: {path: "${oc.env:MODEL}"}
  actor: {ppo_mini_batch_size: "${data.train_batch_size}", strategy: fsdp}
  rollout: {name: vllm}
data: {train_batch_size: "${nothing.here}", max_prompt_length: 12}
trainer: {n_gpus_per_node: 8, nnodes: 1}
algorithm: {adv_estimator: grpo}
"""
TITAN = "[model]\nname = 'llama3'\n[training\nlocal_batch_size = 1\n"
PYTHON = "x: !!python/object/apply:os.system ['touch ran']\n"
SCRIPT = "accelerate launch $(touch ran) sft.py --model_name_or_path `touch ran` --output_dir o\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1 if level else str()}'] * 10)}]\n" for level in range(9)
)

REFUSED = {
    "two.yaml": (TWO, "axolotl and llamafactory claim it equally: it holds the keys of two programs"),
    "hydra.yaml": (HYDRA, "${oc.env:MODEL} is a variable, which is not resolved"),
    "big.yaml": (AXOLOTL + "#" * 50_000_000, "more than 1,048,576 are not read"),
    "bomb.yaml": (AXOLOTL + BOMB, "aliases expand to more than 20,000 values"),
    "deep.yaml": (AXOLOTL + "d: " + "[" * 5000 + "]" * 5000, "nested deeper than 64 levels"),
    "broken.toml": (TITAN, "not TOML: "),
    "unknown.yaml": ("model: org/x\nmy_batch: 4\n", "a training file of a program that is known here"),
    "code.yaml": (AXOLOTL.replace("org/model", "THUDM/chatglm3-6b"), "whose classes are code of its own"),
    "run.sh": (SCRIPT, "names no model"),
    "own.sh": ("torchrun own.py --x 1\n", "own.py:1: the script does not parse"),
    "gone.sh": ("torchrun gone.py --x 1\n", "it starts gone.py, which is not found"),
}
"""Files that cannot be planned, and what is said of them."""

UNCERTAIN = {
    "list.yaml": (
        AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: [a, b]"),
        "micro_batch_size must be",
    ),
    "word.yaml": (AXOLOTL.replace("lora_r: 4", "lora_r: many"), "lora_r must be a whole number"),
    "map.yaml": (AXOLOTL.replace("lora_r: 4", "lora_r: {x: 1}"), "lora_r must be a whole number"),
    "huge.yaml": (AXOLOTL.replace("sequence_len: 64", "sequence_len: 1.0e+30"), "sequence_len must be"),
    "variable.yaml": (AXOLOTL.replace("_size: 2", "_size: ${env:MB}"), "${env:MB} is a variable"),
    "include.yaml": (AXOLOTL + "peft: !include other.yaml\n", "!include names something that is not loaded"),
    "python.yaml": (AXOLOTL + PYTHON, "os.system names something that is not loaded"),
    "extends.yaml": (AXOLOTL + "extends: base.yaml\n", "base.yaml is not read: what it sets is not known"),
    "several.yaml": (AXOLOTL + "extends: [a.yaml, b.yaml]\n", "what it sets is not known"),
}
"""Files that are planned without a certain verdict, and why."""

HARDWARE = ["--gpu", "H100-80GB-SXM", "--gpus", "2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    further = {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **further}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "own.py").write_text("def main(:\n")
    return tmp_path


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_planned_is_one_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = REFUSED[name]
    (folder / name).write_text(text)
    modules = set(sys.modules)
    assert run(["plan", name, *HARDWARE]) == 2
    streams = capsys.readouterr()
    errors = [line for line in streams.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0] and not streams.out
    assert run(["check", name, *HARDWARE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 2 and lines[0].startswith(name) and ": not planned: " in lines[0] and said in lines[0]
    )
    for command in ("explain", "validate"):
        assert run([command, name]) in (0, 1)
        assert "internal error" not in "".join(capsys.readouterr())
    assert not (folder / "ran").exists()
    assert not {"other", "base"} & (set(sys.modules) - modules)


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_cannot_be_read_leaves_no_certain_verdict(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = UNCERTAIN[name]
    (folder / name).write_text(text)
    (folder / "base.yaml").write_text("micro_batch_size: 1000000\n")
    model = ["--model", "config.json"]
    assert run(["plan", name, *HARDWARE, *model, "--no-search"]) == 5
    assert said in " ".join(capsys.readouterr().out.split())
    assert run(["check", name, *HARDWARE, *model]) == 0
    assert f"{name}: unknown: needs " in capsys.readouterr().out
    assert run(["explain", name]) in (0, 1)
    assert said in " ".join(capsys.readouterr().out.split())
    assert run(["validate", name, *HARDWARE]) in (0, 1)
    assert "FSD503" not in capsys.readouterr().out
    assert not (folder / "ran").exists()


def test_a_command_line_is_explained_as_it_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trl", "sft", "--model_name_or_path", "Qwen/Qwen3-8B", "--max_length", "4096"]
    assert run(["explain", "--format", "json", "--", *words]) == 0
    described = json.loads(capsys.readouterr().out)["run"]
    assert (described["program"], described["family"]) == ("trl", "qwen3:8b")
    assert described["sequence_length"] == 4096
    assert run(["explain", "one.yaml", "two.yaml"]) == 2
    assert "'one.yaml two.yaml ...' is not the command line of a training program" in capsys.readouterr().err
