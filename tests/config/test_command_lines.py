"""Command lines and the files that they name, as accelerate, transformers and others read them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from accelerate_oracle import exported, run_accelerate
from trainer_oracle import run_trainer

from fsdptool.config import read_settings
from fsdptool.config.command_lines import NamedFiles
from fsdptool.config.migrate import migrate_file, repair
from fsdptool.config.result import Reading

FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
machine_rank: 0
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: false
"""
FSDP1 = FSDP2.replace("version: 2", "version: 1").replace("after_forward: true", "after_forward: FULL_SHARD")
CP = (
    FSDP2
    + """\
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 1
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
"""
)
BARE = FSDP2.replace("  fsdp_", "  ").replace("  version: 2\n", "  fsdp_version: 2\n")
FILES = {
    "fsdp2": FSDP2,
    "fsdp1": FSDP1,
    "cp": CP,
    "bare": BARE,
    "gpus": FSDP2.replace(": FSDP", ": MULTI_GPU"),
}

ADDRESS = "--main_process_ip 1.2.3.4 --main_process_port 29999"

# What transformers' own distributed tests launch, in our words, and what else people override.
LAUNCHES = [
    ("fsdp2", "--num_processes 2"),
    ("fsdp2", "--num_processes 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
    ("fsdp2", "--num_processes=2 --fsdp_state_dict_type FULL_STATE_DICT"),
    ("fsdp2", "--num_processes 2 --fsdp_reshard_after_forward false"),
    ("fsdp2", "--num_processes 2 --fsdp_offload_params true --fsdp_activation_checkpointing true"),
    ("fsdp2", "--num_processes 2 --mixed_precision fp16 --debug"),
    ("fsdp2", f"--num_processes 4 --num_machines 2 --machine_rank 1 {ADDRESS}"),
    ("fsdp2", "--num_processes 2 --fsdp_version 1 --fsdp_sharding_strategy SHARD_GRAD_OP"),
    ("fsdp2", "--num_processes 2 --fsdp-transformer-layer-cls-to-wrap Qwen2DecoderLayer,Other"),
    ("fsdp2", "--num_processes 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 2000"),
    ("fsdp2", "--num_processes 2 --use_fsdp"),
    ("fsdp2", "--num_processes 2 --multi_gpu"),
    ("fsdp2", "--num_processes 2 --rdzv_backend c10d --gpu_ids 0,1"),
    ("fsdp1", "--num_processes 2"),
    ("fsdp1", "--num_processes 2 --fsdp_version 2 --fsdp_reshard_after_forward true"),
    ("fsdp1", "--num_processes 2 --fsdp_backward_prefetch BACKWARD_POST --fsdp_use_orig_params false"),
    ("cp", "--num_processes 2"),
    ("cp", "--num_processes 2 --parallelism_config_cp_comm_strategy allgather"),
    ("cp", "--num_processes 4 --parallelism_config_dp_shard_size 2"),
    ("cp", "--num_processes 2 --use_fsdp --fsdp_version 2"),
    ("bare", "--num_processes 2 --fsdp_state_dict_type FULL_STATE_DICT"),
    ("gpus", "--num_processes 2"),
    ("gpus", "--num_processes 2 --use_fsdp --fsdp_version 2"),
    ("fsdp2", "--num_processes 2 --parallelism_config_cp_size 2"),
]  # fmt: skip
REFUSED = [
    ("fsdp2", "--num_processes 2 --fsdp_version v2"),
    ("fsdp2", "--num_processes two"),
    ("fsdp2", "--num_processes 2 --mixed_precision BF16"),
    ("fsdp2", "--num_processes 2 --fsdp_state_dict_type FULL"),
    ("fsdp2", "--num_processes 2 --fsdp_offload_params enabled"),
    ("fsdp2", "--num_processes 2 --use_parallelism_config"),
    ("fsdp2", "--num_processes 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 1e8"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def written(folder: Path, text: str, name: str = "run.sh") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def codes(reading: Reading, severity: str = "error") -> list[str]:
    return [item.code for item in reading.diagnostics if item.severity == severity]


def explained(reading: Reading) -> dict[str, Any]:
    return {item.key: item.value for item in reading.effective}


@pytest.mark.parametrize(("name", "flags"), LAUNCHES)
def test_a_file_and_flags_are_merged_as_accelerate_merges_them(folder: Path, name: str, flags: str) -> None:
    path = written(
        folder, f"accelerate launch --config_file {name}.yaml {flags} train.py --bf16 --fsdp_x 1\n"
    )
    reading = read_settings(path)
    outcome = run_accelerate(folder / f"{name}.yaml", *shlex.split(flags))
    assert outcome.error is None, outcome.error
    if not outcome.fsdp:
        assert reading.version is None
        return
    ours = explained(reading) | {"gpu_ids": explained(reading)["gpu_ids"] or "all"}
    theirs = {
        key: list(value) if isinstance(value, tuple) else value for key, value in outcome.settings.items()
    }
    # The oracle uses a port of its own on one machine.
    theirs["main_process_port"] = ours["main_process_port"]
    assert {key: ours.get(key) for key in theirs} == theirs
    assert reading.named == (f"{name}.yaml",)
    assert "FSD301" not in [item.code for item in reading.diagnostics] or theirs["fsdp_version"] == 1


@pytest.mark.parametrize(("name", "flags"), REFUSED)
def test_what_accelerate_refuses_beside_a_file_is_an_error(folder: Path, name: str, flags: str) -> None:
    path = written(folder, f"accelerate launch --config_file {name}.yaml {flags} train.py\n")
    assert codes(read_settings(path))
    with pytest.raises((SystemExit, AssertionError)):
        assert run_accelerate(folder / f"{name}.yaml", *shlex.split(flags)).error is None


def test_the_answer_says_which_file_and_which_line(folder: Path) -> None:
    path = written(folder, "accelerate launch --config_file fsdp2.yaml --fsdp_version 2 train.py\n")
    origins = {item.key: (item.origin, item.line) for item in read_settings(path).effective}
    assert origins["wrap_classes"] == ("fsdp2.yaml, line 9", None)
    assert origins["fsdp_version"] == ("line 1", 1)
    ignored = {item.key: (item.line, item.reason) for item in read_settings(path).ignored}
    assert ignored["fsdp_version"] == (None, "fsdp2.yaml, line 7: the command line decides")


def test_a_finding_in_the_file_points_to_where_it_is_named(folder: Path) -> None:
    written(folder, FSDP2.replace("SHARDED_STATE_DICT", "FULLY"), "bad.yaml")
    line = "accelerate launch \\\n  --config_file bad.yaml --num_processes 2 train.py\n"
    reading = read_settings(written(folder, line))
    assert [(item.code, item.line, item.column, item.fix) for item in reading.errors] == [
        ("FSD206", 2, 17, None)
    ]
    assert reading.errors[0].message.startswith("bad.yaml, line 10: ")
    # What the line overrides is not judged; a comment in the file counts.
    assert not read_settings(
        line.replace("bad.yaml", "bad.yaml --fsdp_state_dict_type FULL_STATE_DICT")
    ).errors
    text = FSDP2.replace("SHARDED_STATE_DICT", "FULLY # fsdptool: ignore[FSD206]")
    written(folder, text, "bad.yaml")
    assert not read_settings(line).errors


def test_files_are_found_beside_the_line_and_that_is_said(folder: Path) -> None:
    written(folder, FSDP2, "scripts/near.yaml")
    path = written(
        folder, "accelerate launch --config_file near.yaml --num_processes 2 t.py\n", "scripts/run.sh"
    )
    reading = read_settings(path)
    assert reading.version == 2 and reading.named == (str(folder / "scripts/near.yaml"),)
    assert [item.message for item in reading.diagnostics if item.code == "FSD117"] == [
        f"the configuration file near.yaml is read from {folder / 'scripts/near.yaml'}"
    ]
    # The working directory comes first, as for the launcher.
    written(folder, FSDP1, "near.yaml")
    assert read_settings(path).version == 1


@pytest.mark.parametrize(
    "name",
    ["absent.yaml", "$CONFIG", "${DIR}/a.yaml", "~/a.yaml", "https://x/y.yaml", "/etc/passwd", "a.txt"],
)
def test_a_file_that_is_not_read_is_said_and_nothing_is_made_up(folder: Path, name: str) -> None:
    written(folder, "secret: 1\n", "a.txt")
    for line in (
        f"accelerate launch --config_file {name} --num_processes 2 train.py\n",
        f"torchrun --nproc_per_node 2 train.py --fsdp --fsdp_config {name}\n",
    ):
        reading = read_settings(written(folder, line))
        assert [(item.code, item.severity) for item in reading.diagnostics] == [("FSD116", "warning")]
        assert name in reading.diagnostics[0].message
        assert reading.settings is None and not any("default" in item.origin for item in reading.effective)
    # What is written is judged all the same.
    wrong = f"accelerate launch --config_file {name} --fsdp_version 3 train.py\n"
    assert codes(read_settings(written(folder, wrong)))


def test_only_files_that_may_be_read_are(folder: Path) -> None:
    written(folder, FSDP2, "outside/a.yaml")
    inside = folder / "inside"
    line = "accelerate launch --config_file ../outside/a.yaml --num_processes 2 train.py\n"
    path = written(folder, line, "inside/run.sh")
    within = NamedFiles((inside,), lambda item: item.resolve().is_relative_to(inside))
    reading = read_settings(path, files=within)
    assert reading.settings is None and reading.named == ()
    assert "outside the folders" in reading.diagnostics[0].message
    (inside / "link.yaml").symlink_to(folder / "outside/a.yaml")
    path.write_text(line.replace("../outside/a.yaml", "link.yaml"))
    assert read_settings(path, files=within).settings is None
    assert read_settings(path, files=NamedFiles((inside,))).settings is not None


def test_accelerates_default_file_is_mentioned_and_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = folder / "home"
    written(home, FSDP1, "accelerate/default_config.yaml")
    monkeypatch.setenv("HF_HOME", str(home))
    for line in ("accelerate launch train.py", "accelerate launch --use_fsdp --fsdp_version 2 train.py"):
        reading = read_settings(line + "\n")
        assert "FSD117" in codes(reading, "info") and reading.version != 1
    assert "FSD117" not in [
        item.code for item in read_settings("--use_fsdp \\\n--fsdp_version 2\n").diagnostics
    ]


# A script that takes TrainingArguments.

CONFIG = {
    "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    "version": 2,
    "state_dict_type": "SHARDED_STATE_DICT",
}
LAUNCHERS = [
    "torchrun --nproc-per-node 8",
    "torchrun --standalone --nnodes=1 --nproc_per_node=8",
    "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2",
    "python -m torch.distributed.run --nproc_per_node 2",
    "python3 -u -m torch.distributed.launch --use_env --nproc_per_node=2",
    "deepspeed --num_gpus 2",
    "srun --ntasks-per-node=1 torchrun --nnodes $SLURM_NNODES --rdzv_backend c10d",
    "uv run torchrun",
    "env NCCL_DEBUG=INFO nohup torchrun --nproc_per_node 2",
    "python",
    "/opt/conda/bin/python3.11 -u",
    "accelerate launch --multi_gpu --num_processes 2",
    "python -m accelerate.commands.launch --num_processes 2",
    "accelerate-launch --num_processes 2",
    "torchrun $DISTRIBUTED_ARGS",
    "time conda run -n env torchrun --nproc_per_node 2",
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_scripts_flags_are_training_arguments(folder: Path, launcher: str) -> None:
    written(folder, json.dumps(CONFIG), "conf/fsdp.json")
    switch = '--fsdp="full_shard auto_wrap"'
    line = f"{launcher} train/sft.py --bf16=True {switch} \\\n  --fsdp_config=conf/fsdp.json\n"
    for text in (line, "#!/bin/bash\nset -e\n# don't stop\nexport WANDB=off\ncd x\n" + line + "echo done\n"):
        reading = read_settings(written(folder, text))
        assert (reading.consumer.name, reading.dialect, codes(reading)) == ("trainer", "flags", [])
        theirs = run_trainer("full_shard auto_wrap", dict(CONFIG))
        assert isinstance(theirs, dict)
        ours = explained(reading)
        for key in set(ours) & set(theirs):
            expected = list(theirs[key]) if isinstance(theirs[key], tuple) else theirs[key]
            assert ours[key] == expected, key
        assert ours["mixed_precision"] == "bf16" and ours["wrap_classes"] == ["Qwen2DecoderLayer"]
        assert reading.named == ("conf/fsdp.json",)


@pytest.mark.parametrize(
    ("flags", "switch", "config"),
    [
        ("--fsdp", True, {}),
        ("--fsdp --fsdp_config {}", True, CONFIG),
        (
            "--fsdp-config={} --fsdp 'shard_grad_op auto_wrap offload'",
            "shard_grad_op auto_wrap offload",
            CONFIG,
        ),
        ("--fsdp full_shard --fsdp_conf {}", "full_shard", CONFIG),
        ("--fsdp '{\"a\"' ", '{"a"', {}),
        ("--fsdp true", "true", {}),
        ("--fsdp hybrid_shard", "hybrid_shard", {}),
        (
            '--fsdp --fsdp_config \'{"version": 2, "cpu_offload": "false"}\'',
            True,
            {"version": 2, "cpu_offload": False},
        ),
        ("--fsdp --fsdp_config {}", True, {"version": 1, "reshard_after_forward": "full_shard"}),
        ("--fsdp --fsdp_config {}", True, {"state_dict_type": "BOGUS"}),
    ],
)
def test_the_spellings_of_fsdp_are_transformers(
    folder: Path, flags: str, switch: Any, config: dict[str, Any]
) -> None:
    written(folder, json.dumps(config), "f.json")
    reading = read_settings(f"torchrun train.py {flags.replace('{}', 'f.json')} --output_dir o\n")
    theirs = run_trainer(switch, dict(config))
    assert reading.consumer.name == "trainer"
    if isinstance(theirs, str):
        assert codes(reading)
        return
    assert not codes(reading)
    ours = explained(reading)
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in theirs.items()}
    assert {key: plain[key] for key in set(ours) & set(plain)} == {
        key: ours[key] for key in set(ours) & set(plain)
    }


def test_fixes_of_a_line_write_what_argparse_reads(folder: Path) -> None:
    path = written(folder, "torchrun t.py --fsdp 'full_shard auto_wrap' --output_dir o\n")
    repaired = repair(read_settings(path))
    assert repaired.after.text == "torchrun t.py --fsdp --output_dir o\n"
    assert repaired.reading.version == 2


@pytest.mark.parametrize("value", ["maybe", "2", "TRUE!"])
def test_a_truth_that_argparse_refuses_is_an_error(value: str) -> None:
    assert codes(read_settings(f"torchrun t.py --fsdp --bf16 {value}\n")) == ["FSD206"]


def test_older_arguments_belong_to_older_versions(folder: Path) -> None:
    line = (
        'torchrun t.py --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer\n'
    )
    assert codes(read_settings(line)) == ["FSD211"]
    older = read_settings(line, target="transformers==4.40")
    assert codes(older) == [] and explained(older)["wrap_classes"] == ["LlamaDecoderLayer"]


@pytest.mark.parametrize("config", [{}, {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}, CONFIG])
@pytest.mark.parametrize(
    "more", ["", "  fsdp_offload_params: true\n", "  fsdp_activation_checkpointing: true\n"]
)
@pytest.mark.parametrize("first", [FSDP1, FSDP2], ids=["fsdp1", "fsdp2"])
def test_the_trainer_overrides_what_accelerate_sets(
    folder: Path, first: str, more: str, config: dict[str, Any]
) -> None:
    """Both layers: accelerate exports first, then TrainingArguments pass a plugin of their own."""
    path = written(folder, first + more, "a.yaml")
    written(folder, json.dumps(config), "g.json")
    launcher = "accelerate launch --config_file a.yaml --num_processes 2"
    reading = read_settings(f"{launcher} t.py --fsdp full_shard --fsdp_config g.json\n")
    assert reading.consumer.name == "trainer" and not codes(reading)
    assert set(codes(reading, "warning")) <= {"FSD338"}  # nothing is said of what the Trainer overrides
    assert reading.named == ("a.yaml", "g.json")
    theirs = run_trainer("full_shard", dict(config), exported(path, "--num_processes", "2"))
    assert isinstance(theirs, dict)
    ours = explained(reading)
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in theirs.items()}
    assert {key: ours.get(key) for key in plain} == plain
    assert ours["mixed_precision"] == "bf16" and ours["num_processes"] == 2  # the launcher's


def test_accelerate_launches_a_trainer_without_flags_of_fsdp(folder: Path) -> None:
    reading = read_settings(
        "accelerate launch --config_file fsdp2.yaml --num_processes 2 t.py --bf16 --output_dir o\n"
    )
    assert reading.consumer.name == "accelerate" and reading.version == 2


# Programs with command lines of their own.

AXOLOTL = """\
base_model: m
datasets: [{path: a, type: alpaca}]
fsdp_version: 2
fsdp_config:
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: true
"""
TRL = "model_name_or_path: m\ndataset_name: d\npacking: true\n"
TITAN = (
    "[model]\nname = 'llama3'\n[training]\nlocal_batch_size = 2\n"
    "[parallelism]\ndata_parallel_replicate_degree = 2\n"
)
TUNE = "model:\n  _component_: torchtune.models.llama3.llama3_8b\ndtype: bf16\nfsdp_cpu_offload: false\n"
FACTORY = "stage: sft\nfinetuning_type: full\ntemplate: qwen\ncutoff_len: 10\n"
NAMED = {
    "axolotl.yaml": AXOLOTL,
    "trl.yaml": TRL,
    "titan.toml": TITAN,
    "tune.yaml": TUNE,
    "factory.yaml": FACTORY + "fsdp: full_shard auto_wrap\nfsdp_config: g.json\n",
    "factory2.yaml": FACTORY,
    "g.json": '{"version": 2, "cpu_offload": true}',
    "args.json": '{"output_dir": "o", "bf16": true, "fsdp": true, "fsdp_config": {"version": 2}}',
}
TUNED = "tune run --nproc_per_node 4 full_finetune_distributed --config tune.yaml"
TITANIC = "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file titan.toml"
REPLICAS = "--parallelism.data_parallel_replicate_degree 4"
LAUNCHED = "accelerate launch --config_file fsdp2.yaml --num_processes 2"
# The command, who reads what it names, and settings that it has.
FRONT: list[tuple[str, str, dict[str, Any]]] = [
    ("axolotl train axolotl.yaml", "axolotl", {"fsdp_version": 2, "reshard_after_forward": True}),
    ("axolotl train axolotl.yaml --launcher torchrun -- --nproc_per_node 8", "axolotl", {"fsdp_version": 2}),
    ("accelerate launch -m axolotl.cli.train axolotl.yaml", "axolotl", {"state_dict_type": "full"}),
    ("python -m axolotl.cli.train axolotl.yaml", "axolotl", {"wrap_classes": ["LlamaDecoderLayer"]}),
    ("torchrun --nproc_per_node 8 -m axolotl.cli.train axolotl.yaml", "axolotl", {"fsdp_version": 2}),
    ("trl sft --config trl.yaml --accelerate_config fsdp2", "trl", {"num_processes": 8}),
    (
        "trl sft --config trl.yaml --accelerate_config fsdp2.yaml --num_processes 4",
        "accelerate",
        {"num_processes": 4, "mixed_precision": "bf16"},
    ),
    ("trl dpo --config trl.yaml --fsdp --fsdp_config g.json", "trl", {"cpu_offload": True}),
    ("llamafactory-cli train factory.yaml", "llamafactory", {"cpu_offload": True}),
    (
        "FORCE_TORCHRUN=1 llamafactory-cli train factory.yaml bf16=true",
        "llamafactory",
        {"mixed_precision": "bf16"},
    ),
    ("torchrun --nproc_per_node 2 src/train.py factory.yaml", "llamafactory", {"fsdp_version": 2}),
    (TUNED, "torchtune", {"cpu_offload": False}),
    (f"{TUNED} fsdp_cpu_offload=True", "torchtune", {"cpu_offload": True}),
    (TITANIC, "torchtitan", {"dp_replicate": 2}),
    (
        f"torchrun torchtitan/train.py --job.config_file=titan.toml {REPLICAS}",
        "torchtitan",
        {"dp_replicate": 4},
    ),
    (
        f"NGPU=8 CONFIG_FILE=titan.toml ./run_train.sh {REPLICAS}",
        "torchtitan",
        {"dp_replicate": 4},
    ),
    (f"{LAUNCHED} src/train.py factory2.yaml", "accelerate", {"fsdp_version": 2}),
    ("torchrun train.py args.json", "trainer", {"fsdp_version": 2}),
    (f"{LAUNCHED} train.py --fsdp_enable=true --model_family=flux", "simpletuner", {"fsdp_version": 2}),
    ("simpletuner train --fsdp_enable --model_family flux", "simpletuner", {"fsdp_version": 2}),
]


@pytest.mark.parametrize(("line", "consumer", "settings"), FRONT)
def test_the_files_of_other_programs_are_read(
    folder: Path, line: str, consumer: str, settings: dict[str, Any]
) -> None:
    for name, text in NAMED.items():
        written(folder, text, name)
    reading = read_settings(written(folder, line + "\n"))
    assert (reading.consumer.name, codes(reading)) == (consumer, []), reading.diagnostics
    ours = explained(reading)
    assert {key: ours.get(key) for key in settings} == settings


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("swift sft --model m --fsdp fsdp2", "ms-swift"),
        ("NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo", "ms-swift"),
        ("torchrun swift/cli/sft.py --model m --fsdp fsdp2", "ms-swift"),
        ("python3 -m verl.trainer.main_ppo actor.fsdp_config.param_offload=False", "verl"),
        ("oumi train -c c.yaml", "oumi"),
        ("automodel finetune llm -c c.yaml", "NeMo AutoModel"),
    ],
)
def test_other_command_lines_are_refused_by_name(line: str, title: str) -> None:
    reading = read_settings(line + "\n")
    assert [(item.code, item.severity) for item in reading.diagnostics] == [("FSD110", "error")]
    assert title in reading.diagnostics[0].message


# Texts that hold several commands, or none.


def test_every_command_of_a_script_is_judged(folder: Path) -> None:
    text = (
        "#!/usr/bin/env bash\nset -euo pipefail\npip install accelerate torchrun\n"
        "python prepare.py --out data\n"
        'if [ -n "$X" ]; then\n  accelerate launch --config_file fsdp2.yaml --num_processes 2 a.py\nfi\n'
        "for i in 1 2; do accelerate launch --config_file fsdp2.yaml --num_processes 2 \\\n"
        "  --fsdp_state_dict_type BOGUS b.py; done\n"
    )
    reading = read_settings(written(folder, text))
    assert reading.version == 2 and explained(reading)["state_dict_type"] == "sharded"
    assert [(item.code, item.line) for item in reading.errors] == [("FSD206", 9)]


@pytest.mark.parametrize(
    "text",
    [
        'srun bash -c "accelerate launch --config_file fsdp2.yaml --num_processes 2 t.py"\n',
        'LAUNCHER="accelerate launch --config_file fsdp2.yaml --num_processes 2"\n$LAUNCHER t.py --fsdp_x\n',
        "docker run -v $PWD i accelerate launch --config_file=fsdp2.yaml --num_processes 2 t.py | tee l\n",
        "accelerate launch \\\n  --config_file fsdp2.yaml \\\n  # ranks\n  --num_processes 2 \\\n  t.py\n",
        "accelerate launch\n  --config_file fsdp2.yaml\n  --num_processes 2\n  t.py\n",
        "accelerate launch --config_file 'fsdp2.yaml' --num_processes 2 t.py >log 2>&1 &\nwait\n",
        "accelerate launch $ARGS --config_file fsdp2.yaml --num_processes 2 t.py\r\n",
    ],
)
def test_the_forms_of_a_script(folder: Path, text: str) -> None:
    reading = read_settings(written(folder, text))
    assert (reading.version, codes(reading), reading.named) == (2, [], ("fsdp2.yaml",))


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("run: |\n  accelerate launch --config_file fsdp2.yaml t.py\nfsdp_config: {version: 2}\n", "trainer"),
        ("export FSDP_VERSION=2\nexport ACCELERATE_USE_FSDP=true\ntorchrun t.py --lr 1\n", "env"),
        ("export ACCELERATE_USE_FSDP=true FSDP_VERSION=2\n", "env"),
    ],
)
def test_other_texts_are_no_command_lines(folder: Path, text: str, dialect: str) -> None:
    assert read_settings(written(folder, text, "x.yaml")).dialect == dialect


def test_migrating_a_line_names_the_file_to_migrate(folder: Path) -> None:
    path = written(folder, "accelerate launch --config_file fsdp1.yaml --num_processes 2 t.py\n")
    refused = migrate_file(path)
    assert refused.after is None and refused.refusal == "the settings are in fsdp1.yaml"
    judged = [item.help for item in read_settings(path).diagnostics if item.code == "FSD301"]
    assert judged == ["the settings are in another file: fsdptool migrate fsdp1.yaml"]
    whole = migrate_file(path, to="accelerate")
    assert (
        whole.after is not None and "num_processes: 2" in whole.after and "LlamaDecoderLayer" in whole.after
    )
    assert read_settings(whole.after).version == 2
    (folder / "my fsdp1.yaml").write_text((folder / "fsdp1.yaml").read_text())
    other = written(folder, "accelerate launch --config_file 'my fsdp1.yaml' t.py\n", "other.sh")
    judged = [item.help for item in read_settings(other).diagnostics if item.code == "FSD301"]
    assert judged == ["the settings are in another file: fsdptool migrate 'my fsdp1.yaml'"]
    # The file's own migration makes the line run FSDP2.
    after = migrate_file(folder / "fsdp1.yaml").after
    assert after is not None
    written(folder, after, "fsdp1.yaml")
    assert read_settings(path).version == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torchrun a.py " + "--a [ " * 6000 + "\n", ["FSD105"]),
        ("accelerate launch --config_file fsdp2.yaml --num_processes 2 a.py\n" * 500, ["FSD117"]),
        ("python x.py\n" + "\n" * 100_000, ["FSD113"]),
        ("bash -c \"torchrun x.py 'torchrun " * 5000, None),
    ],
    ids=["flags", "commands", "blanks", "quotes"],
)
def test_endless_scripts_are_bounded_and_harm_no_later_reading(
    folder: Path, text: str, found: list[str] | None
) -> None:
    reading = read_settings(text + "\n")
    assert found is None or [item.code for item in reading.diagnostics] == found
    assert read_settings("torchrun t.py --fsdp\n").dialect == "flags"
