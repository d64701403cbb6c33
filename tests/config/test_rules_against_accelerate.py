"""Each rule about accelerate, next to what accelerate 1.15 really does with the smallest such file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate_oracle import Outcome, run_accelerate, validate_mesh

from fsdptool.config import Reading, read_settings
from fsdptool.config.migrate import migrate_file, repair

GOOD = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_reshard_after_forward: true
"""


def change(*pairs: tuple[str, str], add: str = "") -> str:
    """Return the good file with lines replaced and text added inside ``fsdp_config``."""
    text = GOOD
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text + add


def both(text: str, tmp_path: Path, name: str = "f.yaml", **environment: str) -> tuple[Reading, Outcome]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    return read_settings(path, environment=environment), run_accelerate(path, environment=environment)


def codes(reading: Reading) -> set[str]:
    return {item.code for item in reading.diagnostics}


def test_compilation_and_loading_depend_on_the_version() -> None:
    compiled = GOOD + "dynamo_config:\n  backend: inductor\n  use_regional_compilation: {}\n"
    offload = change(("loading: false", "loading: true"), add="  fsdp_offload_params: true\n")

    def found(text: str, version: str) -> list[tuple[str, str]]:
        reading = read_settings(text, target=f"accelerate=={version}")
        return [
            (item.code, item.severity) for item in reading.diagnostics if item.code in ("FSD357", "FSD358")
        ]

    assert found(compiled.format("true"), "1.15") == [] == found(offload, "1.13")
    assert found(compiled.format("false"), "1.15") == [("FSD357", "info")]
    assert found(compiled.format("true"), "1.13") == [("FSD357", "error")]
    assert found(compiled.format("true").replace("inductor", "'no'"), "1.13") == []
    assert found(offload, "1.12") == [("FSD358", "error")]
    assert found(offload.replace("loading: true", "loading: false"), "1.12") == []


def test_a_good_file_is_clean(tmp_path: Path) -> None:
    reading, outcome = both(GOOD, tmp_path)
    assert not reading.diagnostics and reading.status == "ok"
    assert outcome.error is None and outcome.settings["wrap_classes"] == ("LlamaDecoderLayer",)


# code, text, what accelerate says (a part of its error)
REFUSED = {
    "FSD104": (": [\n", "yaml"),
    "FSD106": (GOOD + "---\na: 1\n", "ComposerError"),
    "FSD107": ("", "'NoneType' object has no attribute 'get'"),
    "FSD111": (GOOD + "  fsdp_ignored_modules: !!python/name:os.system x\n", "ConstructorError"),
    "FSD201": (GOOD + "bogus: 1\n", "had unknown keys (['bogus'])"),
    "FSD205": (
        GOOD + "parallelism_config:\n  parallelism_config_sp_size: '2'\n",
        "'>' not supported between instances of 'str' and 'int'",
    ),
    "FSD205-machines": (change(("num_machines: 1", "num_machines:")), "'NoneType' and 'int'"),
    "FSD205-rank": (
        change(("num_machines: 1", "num_machines: 2\nmachine_rank:\nmain_process_ip: 10.0.0.1")),
        "not 'NoneType'",
    ),
    "FSD206-version": (change(("fsdp_version: 2", "fsdp_version: 2.0")), "invalid literal for int()"),
    "FSD206-version-3": (change(("fsdp_version: 2", "fsdp_version: 3")), "KeyError: 'TRUE'"),
    "FSD206-policy": (change(("TRANSFORMER_BASED_WRAP", "BOGUS")), "Invalid auto wrap policy: BOGUS"),
    "FSD206-state": (change(("SHARDED_STATE_DICT", "sharded")), "KeyError: 'SHARDED'"),
    "FSD206-bool": (GOOD + "  fsdp_offload_params: maybe\n", "invalid truth value maybe"),
    "FSD206-precision": (change(("bf16", "fp32")), "Unknown mixed_precision mode: fp32"),
    "FSD206-kind": (change((": FSDP\n", ": FSDP2\n")), "'FSDP2' is not a valid DistributedType"),
    "FSD206-prefetch": (GOOD + "  fsdp_backward_prefetch: NONE\n", "KeyError: 'NONE'"),
    "FSD208": (change(("bf16", "no")), "'bool' object has no attribute 'lower'"),
    "FSD210": (GOOD + "fsdp_offload_params: false\n", "had unknown keys (['fsdp_offload_params'])"),
    "FSD212": (change(("distributed_type: FSDP\n", "")), "A `distributed_type` must be specified"),
    "FSD213": (
        change(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"), add="  fsdp_min_num_params: 1e8\n"),
        "invalid literal for int()",
    ),
    "FSD218": (change(("LOCAL_MACHINE", "local_machine")), "ValueError"),
    "FSD219": (GOOD + "gpu_ids: 0\n", "'int' object has no attribute 'split'"),
    "FSD318": (
        GOOD + "  fsdp_activation_checkpointing_offload: true\n",
        "requires `activation_checkpointing=True`",
    ),
    "FSD321": (
        GOOD.replace("  fsdp_cpu_ram_efficient_loading: false\n", "") + "  fsdp_sync_module_states: false\n",
        "set `--fsdp_sync_module_states` to `True`",
    ),
    "FSD322": (change(("forward: true", "forward: FULL_SHARD")), "invalid truth value full_shard"),
    "FSD326": (change(("num_processes: 8\n", "")), "You need to manually pass in `--num_processes`"),
    "FSD333": (change(("SHARDED_STATE_DICT", "LOCAL_STATE_DICT")), "FSDP2 does not support LOCAL_STATE_DICT"),
    "FSD348": (
        change(("TRANSFORMER_BASED_WRAP", "my.mod.policy")),
        "Invalid auto wrap policy: my.mod.policy",
    ),
    "FSD311": (
        GOOD + "parallelism_config:\n  parallelism_config_dp_shard_size: 2\n"
        "  parallelism_config_cp_size: 2\n  parallelism_config_sp_size: 2\n",
        "mutually exclusive",
    ),
    "FSD313": (
        GOOD + "parallelism_config:\n  parallelism_config_dp_replicate_size: 4\n"
        "  parallelism_config_cp_size: 2\n",
        "cannot be used with pure data parallelism",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_accelerate_refuses_we_report(case: str, tmp_path: Path) -> None:
    text, said = REFUSED[case]
    reading, outcome = both(text, tmp_path)
    assert case[:6] in codes(reading), [item.message for item in reading.diagnostics]
    assert outcome.error is not None and said.lower() in outcome.error.lower(), outcome


# What accelerate accepts and drops or turns into something else: code, text, the proof in its settings.
SILENT: dict[str, tuple[str, dict[str, Any]]] = {
    "FSD108": (GOOD + "  fsdp_version: 1\n", {"fsdp_version": 1}),
    "FSD202": (GOOD + "  fsdp_offload_parms: true\n", {"cpu_offload": False}),
    "FSD203": (GOOD + "parallelism_config:\n  dp_shard_size: 8\n", {"dp_shard": 1}),
    "FSD204": (change(("fsdp_state_dict", "state_dict")), {"state_dict_type": "sharded"}),
    "FSD207": (change(("loading: false", "loading: 'false'")), {"cpu_ram_efficient_loading": False}),
    "FSD211": (GOOD + "  fsdp_transformer_cls_names_to_wrap: X\n", {"wrap_classes": ("LlamaDecoderLayer",)}),
    "FSD214": (
        change(("LlamaDecoderLayer", "[LlamaDecoderLayer, Other]")),
        {"wrap_classes": ("['LlamaDecoderLayer'", " 'Other']")},
    ),
    "FSD214-space": (
        change(("DecoderLayer", "DecoderLayer, B")),
        {"wrap_classes": ("LlamaDecoderLayer", " B")},
    ),
    "FSD215": (GOOD + "  reshard_after_forward: false\n", {"reshard_after_forward": False}),
    "FSD217": (change(("SHARDED_STATE_DICT", "sharded_state_dict")), {"state_dict_type": "sharded"}),
    "FSD301": (change(("  fsdp_version: 2\n", "")), {"fsdp_version": 1, "sharding_strategy": "full_shard"}),
    "FSD302": (GOOD + "  fsdp_use_orig_params: true\n", {"fsdp_version": 2}),
    "FSD303": (
        GOOD.replace("  fsdp_reshard_after_forward: true\n", "  fsdp_sharding_strategy: SHARD_GRAD_OP\n"),
        {"reshard_after_forward": True},
    ),
    "FSD315": (change(("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", "")), {"wrap_policy": "none"}),
    "FSD320": (change(("  fsdp_state_dict_type: SHARDED_STATE_DICT\n", "")), {"state_dict_type": "sharded"}),
    "FSD325": (GOOD + "  fsdp_min_num_params: 5\n", {"wrap_policy": "transformer"}),
    "FSD334": (
        change(("num_machines: 1", "num_machines: 2"), add="  fsdp_sharding_strategy: HYBRID_SHARD\n"),
        {"reshard_after_forward": True},
    ),
    "FSD336": (
        change(("fsdp_version: 2", "fsdp_version: 1"), ("forward: true", "forward: SHARD_GRAD_OP")),
        {"sharding_strategy": "full_shard"},
    ),
    "FSD343": (GOOD + "parallelism_config:\n  parallelism_config_tp_size: 1\n", {"dp_shard": 1, "tp": 1}),
}


@pytest.mark.parametrize("case", SILENT)
def test_what_accelerate_does_in_silence_we_report(case: str, tmp_path: Path) -> None:
    text, proof = SILENT[case]
    reading, outcome = both(text, tmp_path)
    assert case[:6] in codes(reading), [item.message for item in reading.diagnostics]
    assert outcome.error is None, outcome
    assert {key: outcome.settings.get(key) for key in proof} == proof


@pytest.mark.parametrize("case", sorted({*REFUSED, *SILENT}))
def test_fixes_lead_to_what_accelerate_runs(case: str, tmp_path: Path) -> None:
    """After all fixes accelerate runs exactly what we explain, or both still refuse."""
    from accelerate_oracle import check_explained

    text = (REFUSED | SILENT)[case][0]
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    reading = read_settings(path)
    if reading.dialect is None or reading.source is None:
        return
    fixed = repair(reading, unsafe=True)
    path.write_text(fixed.after.text, encoding="utf-8")
    check_explained(path)


def test_version_1_reads_what_the_launcher_exports(tmp_path: Path) -> None:
    """``accelerate config`` writes FSDP1 strategies where its own launcher never reads them."""
    text = change(("fsdp_version: 2", "fsdp_version: 1"), ("forward: true", "forward: SHARD_GRAD_OP"))
    reading, outcome = both(text, tmp_path)
    assert outcome.settings["sharding_strategy"] == reading.facts["sharding_strategy"] == "full_shard"


def test_the_environment_fills_what_the_launcher_leaves_out(tmp_path: Path) -> None:
    text = change(("  fsdp_state_dict_type: SHARDED_STATE_DICT\n", ""))
    reading, outcome = both(text, tmp_path, FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")
    assert outcome.settings["state_dict_type"] == "full" == reading.facts["state_dict_type"]
    assert "FSD341" in codes(reading)
    origin = next(item.origin for item in reading.effective if item.key == "state_dict_type")
    assert origin == "environment variable FSDP_STATE_DICT_TYPE"


def test_a_distributed_type_without_fsdp_never_starts_it(tmp_path: Path) -> None:
    reading, outcome = both(change((": FSDP\n", ": MULTI_GPU\n")), tmp_path)
    assert not outcome.fsdp and "FSD330" in codes(reading) and reading.settings is None


def test_deepspeed_and_fsdp_refuse_each_other(tmp_path: Path) -> None:
    reading, _ = both(GOOD + "deepspeed_config:\n  zero_stage: 3\n", tmp_path)
    assert "FSDP and DeepSpeed cannot be enabled simultaneously." in [d.message for d in reading.errors]


MESHES = {
    "FSD305": ("fsdp_version: 1", {"cp": 2}),
    "FSD306": ("fsdp_version: 2", {"cp": 3}),
    "FSD308": ("fsdp_version: 2", {"dp_replicate": 2, "dp_shard": 2}),
    "FSD309": ("fsdp_version: 2", {"dp_replicate": 8}),
    "FSD310": ("fsdp_version: 2", {"tp": 8}),
    "FSD312": ("fsdp_version: 2", {"dp_shard": 4, "sp": 2}),
    "FSD342": ("fsdp_version: 1", {"dp_shard": 8}),
}


@pytest.mark.parametrize("code", MESHES)
def test_meshes_against_accelerates_own_check(code: str, tmp_path: Path) -> None:
    """ParallelismConfig is built for real and validated against an accelerator of 8 FSDP2 processes."""
    version, sizes = MESHES[code]
    lines = "".join(f"  parallelism_config_{key}_size: {value}\n" for key, value in sizes.items())
    text = change(("fsdp_version: 2", version), add="parallelism_config:\n" + lines)
    reading, _ = both(text, tmp_path)
    assert code in codes(reading), [item.message for item in reading.diagnostics]
    problem = accelerator_refuses(sizes, fsdp2=version.endswith("2"), processes=8)
    if code == "FSD312":
        assert problem is None, "SP under FSDP2 is accepted, and that is the trap"
    else:
        assert problem is not None
    if code == "FSD305":
        assert "Context parallelism requires FSDP2." in [item.message for item in reading.errors]


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 8},
        {"dp_replicate": 2, "dp_shard": 4},
        {"cp": 8},
        {"dp_shard": 4, "cp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    ],
)
def test_good_meshes_are_good_for_both(sizes: dict[str, int], tmp_path: Path) -> None:
    lines = "".join(f"  parallelism_config_{key}_size: {value}\n" for key, value in sizes.items())
    reading, outcome = both(GOOD + "parallelism_config:\n" + lines, tmp_path)
    assert not reading.errors and outcome.error is None
    assert accelerator_refuses(sizes, fsdp2=True, processes=8) is None


def accelerator_refuses(sizes: dict[str, int], *, fsdp2: bool, processes: int) -> str | None:
    """Run ``ParallelismConfig`` and its check of the accelerator; return what it says."""
    from accelerate import ParallelismConfig

    try:
        mesh = ParallelismConfig(**{f"{key}_size": value for key, value in sizes.items()})
        validate_mesh(mesh, fsdp2, processes)
    except ValueError as error:
        return str(error)
    return None


def test_activation_checkpointing_without_wrapping_crashes_accelerate() -> None:
    """FSD316: the plugin's policy is None, and preparation calls what it made of it."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="NO_WRAP", activation_checkpointing=True
    )
    policy = fsdp2_prepare_auto_wrap_policy(plugin, torch.nn.Linear(2, 2))
    assert policy is None
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        policy(torch.nn.Linear(2, 2))  # type: ignore[misc]
    reading = read_settings(
        change(
            ("TRANSFORMER_BASED_WRAP", "NO_WRAP"),
            ("  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n", ""),
            add="  fsdp_activation_checkpointing: true\n",
        )
    )
    assert "FSD316" in codes(reading)


def test_fsdp_on_cpu_is_an_error_for_accelerate_and_fine_for_our_trainer(tmp_path: Path) -> None:
    text = GOOD + "use_cpu: true\n"
    reading, outcome = both(text, tmp_path)
    assert "FSD314" in codes(reading) and outcome.error is None, "accelerate launches it without a word"
    ours = read_settings("# fsdptool: consumer=fsdptool\n" + text)
    assert ours.consumer.name == "fsdptool" and not ours.errors


OURS = {
    "FSD319": change(("TRANSFORMER_BASED_WRAP", "NO_WRAP"), ("loading: false", "loading: true"),
                     ("  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n", "")),
    "FSD324": change(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"), add="  fsdp_min_num_params: 100000\n"),
    "FSD327": change(("num_processes: 8", "num_processes: 1")),
    "FSD328": change(("num_machines: 1", "num_machines: 3")),
    "FSD329": change(("num_machines: 1", "num_machines: 2")),
    "FSD331": GOOD + "gpu_ids: '0,1'\n",
    "FSD332": change(("forward: true", "forward: NO_SHARD")),
    "FSD335": change(("LlamaDecoderLayer", "LlamaForCausalLM")),
    "FSD347": GOOD + "use_cpu: true\nparallelism_config:\n  parallelism_config_dp_shard_size: 4\n"
    "  parallelism_config_cp_size: 2\n",
    "FSD209": GOOD + "rdzv_backend: c10d\n",
    "FSD220": GOOD + "  _note: hello\n",
    "FSD307": GOOD + "parallelism_config:\n  parallelism_config_cp_size: 8\n"
    "  parallelism_config_cp_comm_strategy: ring\n",
    "FSD323": change(("fsdp_version: 2", "fsdp_version: 1"), add="  fsdp_sharding_strategy: 2\n"),
}  # fmt: skip


@pytest.mark.parametrize("code", OURS)
def test_the_remaining_rules_find_their_smallest_case(code: str) -> None:
    assert code in codes(read_settings(OURS[code]))


def test_targets_know_what_did_not_exist_yet() -> None:
    older = read_settings(GOOD, target="accelerate==1.5")
    assert {"FSD344", "FSD354"} <= codes(older)
    assert older.consumer.version == "1.5" and not older.consumer.checked
    assert not read_settings(GOOD, target="accelerate==1.15.0").diagnostics


def test_suppressions_silence_a_line_or_the_file() -> None:
    text = GOOD.replace("num_processes: 8", "num_processes: 1")
    assert "FSD327" in codes(read_settings(text))
    on_line = text.replace("num_processes: 1", "num_processes: 1  # fsdptool: ignore[FSD327]")
    assert "FSD327" not in codes(read_settings(on_line))
    assert [item.code for item in read_settings(on_line).suppressed] == ["FSD327"]
    assert "FSD327" not in codes(read_settings("# fsdptool: ignore[FSD327]\n" + text))
    assert "FSD112" in codes(read_settings("# fsdptool: ignore[FSD999]\n" + text))


def test_text_slips_past_the_launcher_and_the_plugin_decides(tmp_path: Path) -> None:
    """sync_module_states in text under version 1, and a rank of null on one machine."""
    text = change(
        ("version: 2", "version: 1"),
        ("  fsdp_reshard_after_forward: true\n", ""),
        ("loading: false", "loading: true"),
        ("num_machines: 1", "num_machines: 1\nmachine_rank:"),
        add='  fsdp_sync_module_states: "off"\n',
    )
    reading, outcome = both(text, tmp_path)
    assert outcome.settings["sync_module_states"] is True and not reading.errors
    explained = {item.key: item.value for item in reading.effective}
    assert explained["sync_module_states"] is True and explained["machine_rank"] is None


def test_containers_stop_size_based_wrapping_under_version_2_only(tmp_path: Path) -> None:
    """FSD324: torch's FSDP1 policy passes a ModuleList by; accelerate's FSDP2 policy takes it."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    by_size = change(
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"),
        ("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer", "fsdp_min_num_params: 5"),
    )
    first = by_size.replace("version: 2", "version: 1").replace("  fsdp_reshard_after_forward: true\n", "")
    said = {
        text: {item.code: item.severity for item in read_settings(text).diagnostics}["FSD324"]
        for text in (by_size, first)
    }
    assert said == {by_size: "warning", first: "info"}
    path = tmp_path / "f.yaml"
    path.write_text(first)
    assert any("FSD324" in note for note in migrate_file(path).notes)

    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    assert not size_based_auto_wrap_policy(layers, False, 40, min_num_params=5)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=5
    )
    model = torch.nn.Sequential(layers)
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert callable(policy) and policy(layers)


def test_tensor_parallelism_does_not_start_with_this_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSD356: a model with DTensors, given to accelerate's own preparation."""
    import logging
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    text = GOOD + (
        "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2\n"
    )
    assert [item.code for item in read_settings(text).diagnostics] == ["FSD356"]
    assert not read_settings(text.replace("tp_size: 2", "tp_size: 1").replace("4", "8")).diagnostics

    def prepare(model: torch.nn.Module) -> object:
        accelerator = SimpleNamespace(
            is_fsdp2=True, torch_device_mesh=mesh, _get_named_parameters=lambda *_, **__: {}
        )
        return Accelerator._prepare_tp(accelerator, model)

    # accelerate's own logger wants a started Accelerator.
    monkeypatch.setattr("accelerate.accelerator.logger", logging.getLogger("accelerate"))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        model = torch.nn.Linear(4, 4)
        assert prepare(model) == [model], "skipped, with a warning"
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(ImportError, match="ReplicateParallel"):
            prepare(model)
    finally:
        dist.destroy_process_group()


def test_tensor_parallelism_depends_on_accelerate_and_transformers() -> None:
    text = GOOD + (
        "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2\n"
    )

    def found(accelerate: str, transformers: str) -> list[tuple[str, str]]:
        reading = read_settings(text, target=f"accelerate=={accelerate},transformers=={transformers}")
        return [(item.code, item.severity) for item in reading.diagnostics if item.code != "FSD354"]

    assert found("1.12", "5.1.0") == found("1.10.1", "5.23") == [("FSD356", "error")]
    assert found("1.15", "5.16.0") == found("1.13", "5.23.0") == [("FSD356", "warning")]
    assert found("1.13", "5.1.0") == found("1.15", "5.15.1") == [("FSD363", "warning")]
    assert found("1.10", "5.0.0") == found("1.15", "4.57.6") == [("FSD364", "info")]


def test_a_hybrid_strategy_without_counts_says_what_is_missing() -> None:
    text = change(("num_processes: 8\n", ""), ("num_machines: 1\n", ""), add="  fsdp_sharding_strategy: 4\n")
    found = {item.code: item for item in read_settings(text).errors}
    assert found["FSD334"].help is not None and "write num_processes and num_machines" in found["FSD334"].help
