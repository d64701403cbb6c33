"""No fix is in the way of what was meant, and any combination means what its program makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate_oracle
import axolotl_oracle
import pytest
import yaml
from accelerate_oracle import run_accelerate
from test_rules_against_accelerate import change

from fsdptool.config import read_settings
from fsdptool.config.migrate import repair

MISWRITTEN = {
    "a top-level key": (("mixed_precision:", "mixed_precison:"), {"mixed_precision": "bf16"}),
    "a key in the wrong place": (
        ("mixed_precision: bf16\n", ""),
        ("version: 2\n", "version: 2\n  mixed_precision: bf16\n"),
        {"mixed_precision": "bf16"},
    ),
    "a state dict": (("_type: SHARDED", "_typ: FULL"), {"state_dict_type": "full"}),
    "loading": (("efficient_loading", "eficient_loading"), {"cpu_ram_efficient_loading": False}),
    "a policy": (
        ("auto_wrap_policy: TRANSFORMER_BASED", "auto_wrap_polcy: SIZE_BASED"),
        ("transformer_layer_cls_to_wrap: LlamaDecoderLayer", "min_num_params: 5"),
        {"wrap_policy": "size"},
    ),
    "the version": (
        ("fsdp_version: 2", "fsdp_versoin: 2"),
        ("fsdp_reshard_after_forward: true", "fsdp_sharding_strategy: FULL_SHARD"),
        {"fsdp_version": 2, "reshard_after_forward": True},
    ),
    "a port": (
        ("num_machines: 1\n", "num_machines: 1\nmain_training_port: 0\n"),
        {"main_process_port": 0},
    ),
    "a state dict under version 1": (
        ("version: 2\n", "version: 1\n"),
        ("  fsdp_reshard_after_forward: true\n", ""),
        ("state_dict_type: SHARDED", "state_dict_typ: SHARDED"),
        {"state_dict_type": "sharded", "fsdp_version": 2},
    ),
}


@pytest.mark.parametrize("case", MISWRITTEN)
def test_no_default_is_written_in_the_place_of_what_was_meant(case: str, tmp_path: Path) -> None:
    """A misspelt setting begins to count with --unsafe-fixes, whatever other fixes there are."""
    *pairs, wanted = MISWRITTEN[case]
    text = change(*pairs)  # type: ignore[arg-type]
    path = tmp_path / "f.yaml"
    path.write_text(text)
    for first in (False, True):
        reading = read_settings(path)
        fixed = repair(repair(reading).reading if first else reading, unsafe=True)
        path.write_text(fixed.after.text)
        outcome = run_accelerate(path)
        assert outcome.error is None
        assert {key: outcome.settings[key] for key in wanted} == wanted
        path.write_text(text)


TRUTH = [True, False, "true", "False", "yes", "off", 1, 0, "maybe", None]
SHARED: dict[str, list[Any]] = {
    "offload_params": TRUTH,
    "cpu_ram_efficient_loading": TRUTH,
    "activation_checkpointing": TRUTH,
    "reshard_after_forward": TRUTH,
    "forward_prefetch": TRUTH,
    "use_orig_params": TRUTH,
    "sync_module_states": TRUTH,
    "limit_all_gathers": TRUTH,
    "auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "no_wrap", None],
    "min_num_params": [0, 5, 1000, "1e8", None, 1.5, "100"],
    "transformer_layer_cls_to_wrap": ["A", ["A"], "A,B", "A, B", None, ""],
    "state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "full", None],
    "backward_prefetch": ["BACKWARD_PRE", "backward_post", "none", None],
    "sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"],
}
AROUND: dict[str, dict[str, list[Any]]] = {
    "accelerate": {
        "mixed_precision": ["no", "bf16", "BF16", False, "fp32", None],
        "num_processes": [1, 2, "4", "gpu", -1, None],
        "num_machines": [1, 2, None, "1"],
        "machine_rank": [0, None],
        "debug": [True, None],
        "gpu_ids": ["all", "0,1", None],
    },
    "axolotl": {
        "fsdp": [
            ["full_shard"],
            ["shard_grad_op"],
            ["offload", "full_shard"],
            ["hybrid_shard"],
            "full_shard",
        ],
        "optimizer": ["adamw_torch", "adamw_8bit", "paged_adamw_8bit", "muon"],
        "gradient_checkpointing": [True, False, None],
    },
}
HEADS: dict[str, dict[str, Any]] = {
    "accelerate": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8},
    "axolotl": {
        "base_model": "a/b", "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1,
        "learning_rate": 0.0001, "bf16": True, "sequence_len": 64,
        "datasets": [{"path": "a", "type": "alpaca"}],
    },
}  # fmt: skip


def combination(choose: random.Random, dialect: str) -> dict[str, Any]:
    """Return a file of a dialect with values and combinations nobody would write."""
    block = {
        ("fsdp_" if choose.random() < 0.5 else "") + key: choose.choice(SHARED[key])
        for key in choose.sample(list(SHARED), choose.randint(1, 6))
    }
    around = AROUND[dialect]
    data = dict(HEADS[dialect])
    data.update(
        {key: choose.choice(around[key]) for key in choose.sample(list(around), choose.randint(0, 2))}
    )
    version = choose.choice([None, 1, 2, 2])
    if version is not None:
        (block if dialect == "accelerate" else data)["fsdp_version"] = version
    return {**data, "fsdp_config": block}


def compare(dialect: str, seed: int, count: int, check: Callable[[Path], object], folder: Path) -> None:
    """Write ``count`` combinations and hold each against its program."""
    choose = random.Random(seed)
    path = folder / "f.yml"
    for _ in range(count):
        path.write_text(yaml.safe_dump(combination(choose, dialect), sort_keys=False))
        check(path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_combination_means_what_accelerate_makes_of_it(seed: int, tmp_path: Path) -> None:
    compare("accelerate", seed, 60, accelerate_oracle.check_explained, tmp_path)


if axolotl_oracle.AVAILABLE:

    def test_any_combination_means_what_axolotl_makes_of_it(tmp_path: Path) -> None:
        compare("axolotl", 0, 200, axolotl_oracle.check_explained, tmp_path)
