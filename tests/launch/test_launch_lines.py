"""Argument lists are held against torch's, accelerate's and bash's own parsers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from fsdptool.cli.app import run
from fsdptool.errors import ConfigError
from fsdptool.files.values import load_schema
from fsdptool.launch.command import Nodes, build_command, interface_towards, reachable_name
from fsdptool.launch.job import MultiNodeJob, node_lines
from fsdptool.launch.machine import gpu_set, live_claims, register_claim, requested_gpus
from fsdptool.launch.prepare import count_processes, place_nodes
from fsdptool.launch.processes import identify
from fsdptool.launch.slurm import slurm_script
from fsdptool.records.cluster import ALLOCATOR_VARIABLES, EXPANDABLE
from fsdptool.records.sharding import FsdpSettings

RECIPE = "model: {reference: 'llama:tiny', weights: random}\nbatch: {sequence_length: 16}\nsteps: 2\n"
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_reshard_after_forward: true
"""
CLUSTER = (
    "gpu: H100-80GB-SXM\ngpus_per_node: 8\nnodes: 2\nenvironment: {NCCL_IB_HCA: mlx5, NCCL_DEBUG: WARN}\n"
)


def test_torchrun_parses_what_we_give_it(tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    made = build_command(
        tmp_path,
        FsdpSettings(),
        processes=4,
        device="cuda",
        nodes=Nodes(2, 1, "head:29500", "job"),
        max_restarts=3,
    )
    assert made.argv[1:5] == ("-P", "-m", "fsdptool.distributed.rendezvous", "torchrun")
    parsed = get_args_parser().parse_args(made.argv[5:])
    assert (parsed.nnodes, parsed.nproc_per_node) == ("2", "4")
    assert parsed.rdzv_conf == "is_host=0", "node 0 hosts the rendezvous, whatever its name resolves to"
    assert (parsed.max_restarts, parsed.rdzv_endpoint, parsed.rdzv_id) == (3, "head:29500", "job")
    assert parsed.module
    assert (parsed.training_script, parsed.training_script_args) == (
        "fsdptool.training.worker",
        [str(tmp_path)],
    )
    assert "SIGUSR1" in parsed.signals_to_handle
    assert made.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"


def test_a_machine_says_how_the_others_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    first, second = Nodes(2, 0, "127.0.0.1:1", "x"), Nodes(2, 1, "127.0.0.1:1", "x")
    assert reachable_name(first) == reachable_name(second) == "127.0.0.1"
    assert interface_towards(first) == interface_towards(second) == "lo"
    assert reachable_name(Nodes(2, 0, "[fd00::1]:29500")) == "fd00::1"
    assert reachable_name(Nodes(2, 0, "head.invalid")) == "head.invalid", "as the others reach it"
    lost = Nodes(2, 1, "head.invalid:1", "x")
    assert reachable_name(lost) is None
    made = build_command(tmp_path, FsdpSettings(), processes=1, device="cpu", nodes=lost)
    assert "--local-addr" not in made.argv
    assert "GLOO_SOCKET_IFNAME" not in made.environment


def test_accelerate_parses_what_we_give_it(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    config = tmp_path / "accelerate.yaml"
    made = build_command(
        tmp_path, FsdpSettings(), processes=2, device="cuda", launcher="accelerate", config=config
    )
    assert made.argv[1:5] == ("-P", "-m", "fsdptool.distributed.rendezvous", "accelerate")
    parsed = launch_command_parser().parse_args(made.argv[5:])
    assert (parsed.config_file, parsed.num_processes, parsed.module) == (str(config), 2, True)
    assert parsed.training_script == "fsdptool.training.worker"


def test_gpu_ids_become_visible_devices_and_cpu_runs_see_none(tmp_path: Path) -> None:
    gpus = build_command(tmp_path, FsdpSettings(gpu_ids="2,3"), processes=2, device="cuda")
    assert gpus.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (
        build_command(tmp_path, FsdpSettings(), processes=2, device="cpu").environment["CUDA_VISIBLE_DEVICES"]
        == ""
    )


def test_an_exported_variable_wins_over_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    made = build_command(
        tmp_path,
        FsdpSettings(),
        processes=1,
        device="cuda",
        variables={"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"},
    )
    assert "NCCL_DEBUG" not in made.environment
    assert made.environment["NCCL_IB_HCA"] == "mlx5"


def test_workers_on_gpus_leave_their_flight_record_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("NCCL_SOCKET_IFNAME", "TORCH_FR_DUMP_TEMP_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    nodes = Nodes(2, 1, "127.0.0.1:1", "x")
    made = build_command(
        tmp_path / "run", FsdpSettings(), processes=1, device="cuda", nodes=nodes
    ).environment
    assert made["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "run" / "logs" / "nccl-trace-rank-")
    assert made["NCCL_SOCKET_IFNAME"] == made["GLOO_SOCKET_IFNAME"] == "lo", "the way to the other machine"
    chosen = {"NCCL_SOCKET_IFNAME": "ib0"}
    again = build_command(
        tmp_path, FsdpSettings(), processes=1, device="cuda", nodes=nodes, variables=chosen
    ).environment
    assert again["NCCL_SOCKET_IFNAME"] == "ib0"
    assert not set(names) & set(
        build_command(tmp_path, FsdpSettings(), processes=1, device="cpu", nodes=nodes).environment
    )


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpus_get_expandable_segments_unless_the_allocator_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def variables(device: str, **cluster: str) -> dict[str, str]:
        made = build_command(tmp_path, FsdpSettings(), processes=1, device=device, variables=cluster)
        return {key: made.environment[key] for key in ALLOCATOR_VARIABLES if key in made.environment}

    assert variables("cuda") == EXPANDABLE
    assert variables("cpu") == {}
    assert variables("cuda", **{name: "max_split_size_mb:64"}) == {name: "max_split_size_mb:64"}
    monkeypatch.setenv(name, "backend:native")
    assert variables("cuda") == {}, "what is exported reaches the workers by itself"


def test_attention_is_the_kernel_that_plans_assume_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    monkeypatch.delenv(name, raising=False)

    def variable(device: str, **cluster: str) -> str | None:
        made = build_command(tmp_path, FsdpSettings(), processes=1, device=device, variables=cluster)
        return made.environment.get(name)

    assert variable("cuda") == "1"
    assert variable("cpu") is None
    assert variable("cuda", **{name: "0"}) == "0"
    monkeypatch.setenv(name, "0")
    assert variable("cuda") is None, "what is exported reaches the workers by itself"


def job(**changes: object) -> MultiNodeJob:
    fields: dict[str, object] = {
        "recipe": Path("/data/my recipe.yaml"),
        "config": Path("/data/a.yaml"),
        "output": Path("/data/run"),
        "nodes": 2,
        "per_node": 8,
        "gpus": True,
        "variables": {"NCCL_IB_HCA": "mlx5_0,mlx5_1"},
    }
    return MultiNodeJob(**{**fields, **changes})  # type: ignore[arg-type]


def test_every_node_has_a_line_that_a_shell_reads_as_meant() -> None:
    lines = node_lines(job(), "10.0.0.1", "first")
    assert len(lines) == 2
    words = shlex.split(lines[1])
    assert words[:4] == ["NCCL_IB_HCA=mlx5_0,mlx5_1", "fsdptool", "train", "/data/my recipe.yaml"]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--rendezvous") + 1] == "10.0.0.1:29500"


def test_a_slurm_script_runs_with_slurms_own_variables(tmp_path: Path) -> None:
    script = slurm_script(job(), name="tiny", time="24:00:00", setup=["true"])
    # Nobody is there to ask when Slurm starts a job again.
    assert "--resume auto --start-over" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --signal=USR1@300\n" in script
    assert "#SBATCH --output=%x-%j.out\n" in script
    # Slurm's commands are replaced by ones that show what they were asked; bash itself is real.
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in {
        "scontrol": 'if [ "$1" = show ]; then echo head; echo other; else echo "scontrol $*"; fi',
        "srun": 'shift; "$@"',
        "fsdptool": 'printf "%s\\n" "$@"; exit 75',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "42", "SLURM_NODEID": "1"}
    environment["SLURM_JOB_NODELIST"] = "nodes"
    done = subprocess.run(
        ["bash"], input=script, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    said = done.stdout.splitlines()
    assert done.returncode == 75, done.stderr
    assert said[said.index("--rendezvous") + 1] == "head:29542", "jobs that share a node do not meet"
    assert said[said.index("--node-rank") + 1] == "1"
    assert re.fullmatch(r"42\.0\.[0-9a-f]{16}", said[said.index("--launch-id") + 1])
    assert said[1] == "/data/my recipe.yaml"
    assert said[-1] == "scontrol requeue 42", "a stopped run goes back into the queue"


def test_a_job_is_named_after_its_recipe() -> None:
    assert "#SBATCH --job-name=mine\n" in slurm_script(job(recipe=Path("/data/mine.yaml")))


def test_a_value_slurm_could_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="two words"):
        slurm_script(job(), name="two words")


@pytest.mark.parametrize("time", ["3x", "1:2:3:4", "1-", "-5", "5", "4:59", "0:05:00", "0-0:5"])
def test_a_time_limit_leaves_time_to_train(time: str) -> None:
    with pytest.raises(ConfigError, match=f"--time .*{time}"):
        slurm_script(job(), name="tiny", time=time)


@pytest.mark.parametrize("time", ["0", "6", "5:01", "0:05:01", "1-0", "0-1:0", "2-00:00:00"])
def test_a_time_limit_is_written_as_it_was_given(time: str) -> None:
    assert f"#SBATCH --time={time}\n" in slurm_script(job(), name="tiny", time=time)


def write(folder: Path, **files: str) -> dict[str, Path]:
    paths = {name: folder / f"{name}.yaml" for name in files}
    for name, text in files.items():
        paths[name].write_text(text)
    return paths


def test_launch_prints_lines_and_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path, recipe=RECIPE, config=CONFIG, cluster=CLUSTER)
    arguments = [
        "launch",
        str(paths["recipe"]),
        "--config",
        str(paths["config"]),
        "-o",
        str(tmp_path / "run"),
    ]
    assert run([*arguments, "--cluster", str(paths["cluster"]), "--slurm", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(load_schema("launch")).validate(document)
    assert len(document["nodes"]) == 2
    assert document["nodes"][0]["environment"] == {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"}
    assert document["nodes"][1]["argv"][:2] == ["fsdptool", "train"]
    assert document["script"].startswith("#!/bin/bash\n#SBATCH")
    assert not (tmp_path / "run").exists(), "nothing is started or written"


def test_a_cluster_of_another_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = CLUSTER.replace("nodes: 2", "nodes: 1")
    paths = write(tmp_path, recipe=RECIPE, config=CONFIG, cluster=small)
    arguments = ["launch", str(paths["recipe"]), "--config", str(paths["config"])]
    assert run([*arguments, "--cluster", str(paths["cluster"])]) == 2
    assert "16 processes on 2 machines, the cluster has 8 on 1" in capsys.readouterr().err


def test_a_config_for_more_processes_than_the_launch_has(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    with pytest.raises(ConfigError, match="is for 8 processes and the launch has 2"):
        count_processes(FsdpSettings(num_processes=8, use_cpu=True), "cpu", 2, config)
    with pytest.raises(ConfigError, match="cannot be divided equally among 3 machines"):
        count_processes(FsdpSettings(num_processes=8, num_machines=3, use_cpu=True), "cpu", None, config)
    assert count_processes(
        FsdpSettings(num_processes=8, num_machines=2, use_cpu=True), "cpu", None, config
    ) == (8, 4)


def test_several_machines_need_a_place_to_meet() -> None:
    settings = FsdpSettings(num_machines=2, machine_rank=1)
    with pytest.raises(ConfigError, match="does not set a rendezvous endpoint"):
        place_nodes(settings, None, None, None)
    with pytest.raises(ConfigError, match="--node-rank 2"):
        place_nodes(settings, 2, "head:1", None)
    assert place_nodes(settings, None, "head:1", "x") == Nodes(2, 1, "head:1", "x")
    assert place_nodes(FsdpSettings(), None, None, None) == Nodes()


def test_gpu_sets_overlap_as_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    assert gpu_set("1,0") == gpu_set("0, 1") == requested_gpus(FsdpSettings(gpu_ids="0,1"))
    with register_claim(gpu_set("0,1"), tmp_path / "first"):
        with (
            pytest.raises(ConfigError, match=r"GPU 1 is in use by the run in .*first"),
            register_claim(gpu_set("1"), tmp_path),
        ):
            pass
        with register_claim(gpu_set("2,3"), tmp_path / "second"):
            pass
    with register_claim(gpu_set("1"), tmp_path):
        pass


def test_a_claim_dies_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait(timeout=60)
    (tmp_path / f"{ended.pid}.json").write_text('{"gpus": ["0"], "run": "old", "start": 1, "boot": ""}')
    with register_claim(gpu_set("0"), tmp_path):
        assert not (tmp_path / f"{ended.pid}.json").exists()


def test_a_claim_is_not_that_of_a_later_process_with_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path))
    live = tmp_path / f"{os.getppid()}.json"
    parent = identify(os.getppid())
    assert parent is not None
    own = {"start": parent.start, "boot": parent.boot}
    for changed, alive in (({}, True), ({"start": parent.start - 1}, False), ({"boot": "earlier"}, False)):
        live.write_text(json.dumps({"gpus": ["0"], "run": "old", **own, **changed}))
        assert live_claims() == ([(gpu_set("0"), "old")] if alive else [])
    with register_claim(gpu_set("0"), tmp_path):
        assert not live.exists()
