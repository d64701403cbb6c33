"""Each rule about TrainingArguments, next to what transformers 5.23 really does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from trainer_oracle import check_explained, run_trainer

from fsdptool.config import read_settings
from fsdptool.config.migrate import repair
from fsdptool.files.text import SourceText

# code, fsdp, fsdp_config, what transformers does: an error's text, or settings.
CASES: dict[str, tuple[Any, dict[str, Any], str | dict[str, Any]]] = {
    "FSD216": (True, {"version": 2, "offload_params": True}, {"cpu_offload": False}),
    "FSD202": (True, {"version": 2, "cpu_offlod": True}, {"cpu_offload": False}),
    "FSD302": (True, {"version": 2, "use_orig_params": True}, {"fsdp_version": 2}),
    "FSD303": (True, {"version": 2, "sharding_strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": True}),
    "FSD336": ("shard_grad_op", {"version": 1}, {"sharding_strategy": "full_shard"}),
    "FSD336-key": (
        True,
        {"version": 1, "reshard_after_forward": "hybrid_shard"},
        {"sharding_strategy": "full_shard"},
    ),
    "FSD301-state": (True, {"version": 1, "state_dict_type": None}, {"state_dict_type": "full"}),
    "FSD315": (True, {"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP"}, {"min_num_params": 0}),
    "FSD301-sync": (
        True,
        {"version": 1, "sync_module_states": False, "cpu_ram_efficient_loading": True},
        {"sync_module_states": True},
    ),
    "FSD301-one": (1, {"version": 1}, {"fsdp_version": 1}),
    "FSD206-number": ("1", {"version": 1}, "Unknown `fsdp` option"),
    "FSD206-short": (True, {"version": 1, "reshard_after_forward": "full"}, "KeyError: 'FULL'"),
    "FSD337": (True, {"version": 2, "cpu_offload": "false"}, {"cpu_offload": True}),
    "FSD338": (True, {"reshard_after_forward": True}, {"fsdp_version": 2}),
    "FSD339": ("full_shard auto_wrap", {"version": 2}, {"reshard_after_forward": True}),
    "FSD339-offload": (
        "shard_grad_op offload",
        {"version": 2},
        {"reshard_after_forward": False, "cpu_offload": True},
    ),
    "FSD334": ("hybrid_shard", {"version": 2}, "only available with FSDP1"),
    "FSD332": ("no_shard", {"version": 2}, "only available with FSDP1"),
    "FSD206-upper": ("FULL_SHARD", {"version": 2}, "only available with FSDP1"),
    "FSD206-comma": ("full_shard,auto_wrap", {"version": 2}, "Unknown `fsdp` option"),
    "FSD206-true": ("true", {"version": 2}, "Unknown `fsdp` option"),
    "FSD206-policy": (True, {"version": 2, "auto_wrap_policy": "no_wrap"}, "must be one of"),
    "FSD206-state": (True, {"version": 2, "state_dict_type": "full"}, "KeyError: 'FULL'"),
    "FSD207": (True, {"version": 2, "activation_checkpointing": "True"}, {"activation_checkpointing": True}),
    "FSD215": (
        True,
        {"version": 2, "reshard_after_forward": True, "fsdp_reshard_after_forward": False},
        {"reshard_after_forward": False},
    ),
    "FSD301": (True, {"version": 1}, {"fsdp_version": 1, "sharding_strategy": "full_shard"}),
    "FSD322": (True, {"version": 2, "reshard_after_forward": "full_shard"}, "invalid truth value"),
    "FSD325": (True, {"version": 2, "min_num_params": 5}, {"wrap_policy": "transformer"}),
    "FSD214": (True, {"version": 2, "transformer_layer_cls_to_wrap": "A, B"}, {"wrap_classes": ("A", " B")}),
    "FSD213": (
        True,
        {"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "1e8"},
        "TypeError",
    ),
    "FSD333": (
        True,
        {"version": 2, "state_dict_type": "LOCAL_STATE_DICT"},
        "does not support LOCAL_STATE_DICT",
    ),
    "FSD353": (True, {"version": 2, "activation_cpu_offload": True}, {"activation_checkpointing": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_does_we_say(case: str, tmp_path: Path) -> None:
    switch, config, wanted = CASES[case]
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "out", "fsdp": switch, "fsdp_config": config}, indent=2))
    reading = read_settings(path)
    assert case[:6] in {item.code for item in reading.diagnostics}, [d.message for d in reading.diagnostics]
    outcome = run_trainer(switch, dict(config))
    if isinstance(wanted, str):
        assert isinstance(outcome, str) and wanted.lower() in outcome.lower(), outcome
    else:
        assert not isinstance(outcome, str), outcome
        assert {key: outcome[key] for key in wanted} == wanted
    check_explained(path)
    # After all fixes transformers runs what we explain.
    path.write_text(repair(reading, unsafe=True).after.text)
    check_explained(path)


def test_the_bare_form_is_read_alike(tmp_path: Path) -> None:
    for case, (switch, config, _) in CASES.items():
        if switch is True:
            path = tmp_path / "fsdp_config.json"
            path.write_text(json.dumps(config, indent=2))
            reading = read_settings(path, dialect="trainer")
            assert case[:6] in {item.code for item in reading.diagnostics}, case
            check_explained(path)


def test_a_misspelt_version_is_not_lost_to_the_default(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"output_dir": "o",\n "fsdp": true,\n "fsdp_config": {"versoin": 1}}')
    path.write_text(repair(read_settings(path), unsafe=True, only=frozenset({"FSD202", "FSD338"})).after.text)
    outcome = run_trainer(True, json.loads(path.read_text())["fsdp_config"])
    assert isinstance(outcome, dict) and outcome["fsdp_version"] == 1


def test_a_version_is_missing_without_fsdp_config_too() -> None:
    text = "output_dir: o\nfsdp: full_shard\n"
    reading = read_settings(text)
    assert "FSD338" in {item.code for item in reading.diagnostics}
    assert read_settings(repair(reading).after.text).status == "ok"
    assert "FSD338" not in {
        item.code for item in read_settings(text + "fsdp_config: other.json\n").diagnostics
    }


def test_a_switch_that_is_off_leaves_fsdp_off(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"output_dir": "o", "fsdp": false, "fsdp_config": {"version": 2}}')
    reading = read_settings(path)
    assert reading.settings is None and "FSD330" in {item.code for item in reading.diagnostics}
    assert run_trainer(False, {"version": 2}) == {}


def test_an_older_transformers_runs_fsdp1() -> None:
    text = '{"transformer_layer_cls_to_wrap": "B",\n "activation_checkpointing": true}\n'
    assert read_settings(text, dialect="trainer").version == 2
    assert read_settings(text, dialect="trainer", target="transformers==5.9").version == 1


def test_the_environment_can_switch_offload_on() -> None:
    text = '{"version": 2,\n "activation_checkpointing": true}\n'
    reading = read_settings(text, dialect="trainer", environment={"FSDP_OFFLOAD_PARAMS": "true"})
    assert reading.facts["cpu_offload"] is True and "FSD341" in {item.code for item in reading.diagnostics}


def test_both_kinds_of_checkpointing_raise() -> None:
    text = (
        "output_dir: o\ngradient_checkpointing: true\nfsdp: true\nfsdp_config:\n  version: 2\n"
        "  activation_checkpointing: true\n"
    )
    assert "FSD317" in {item.code for item in read_settings(text).errors}


@pytest.mark.parametrize(
    ("kind", "best", "said"),
    [
        ("SHARDED_STATE_DICT", False, "not compatible with FSDP state dict type"),
        ("FULL_STATE_DICT", True, "along with `load_best_model_at_end`"),
        ("FULL_STATE_DICT", False, ""),
    ],
)
def test_saving_only_the_model_beside_the_trainers_own_check(
    kind: str, best: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSD340: the Trainer's method runs for real; only its Accelerator is a stand-in."""
    from types import SimpleNamespace

    import transformers.trainer
    from torch.distributed.fsdp import StateDictType

    text = (
        f"output_dir: o\nsave_only_model: true\nload_best_model_at_end: {str(best).lower()}\n"
        f"fsdp: true\nfsdp_config:\n  version: 2\n  state_dict_type: {kind}\n"
    )
    assert ("FSD340" in {item.code for item in read_settings(text).errors}) is bool(said)
    plugin = SimpleNamespace(state_dict_type=StateDictType[kind], activation_checkpointing=False)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None), gather_for_metrics=lambda x: x
    )
    monkeypatch.setattr(transformers.trainer, "Accelerator", lambda **_: accelerator)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), save_only_model=True, use_cpu=True)
    arguments.load_best_model_at_end = best
    trainer = SimpleNamespace(args=arguments, _build_accelerator_args=lambda **_: {})
    try:
        transformers.Trainer.create_accelerator_and_postprocess(trainer)
        found = ""
    except ValueError as error:
        found = str(error)
    assert said in found and bool(said) == bool(found)


TRUTH = [True, False, "true", "False", "yes", "off", 1, 0, "maybe", None, "1"]
VALUES: dict[str, list[Any]] = {
    "version": [1, 2, "2", "1", 3, "v2", None, 2.0],
    "cpu_offload": [*TRUTH, {}, {"device": "cpu"}],
    "auto_wrap_policy": [
        "TRANSFORMER_BASED_WRAP",
        "SIZE_BASED_WRAP",
        "NO_WRAP",
        "no_wrap",
        "transformer",
        None,
    ],
    "min_num_params": [0, 5, 1000, "1e8", None, 1.5, "100"],
    "transformer_layer_cls_to_wrap": ["A", ["A"], ["A", "B"], "A,B", "A, B", None, [], "", ["A,B"], 5],
    "cpu_ram_efficient_loading": TRUTH,
    "state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "full", None, "1"],
    "activation_checkpointing": TRUTH,
    "reshard_after_forward": [*TRUTH, "full_shard", "SHARD_GRAD_OP", "hybrid_shard", "FULL_SHARD"],
    "forward_prefetch": TRUTH,
    "backward_prefetch": ["BACKWARD_PRE", "backward_post", "NO_PREFETCH", "none", None],
    "use_orig_params": TRUTH,
    "sync_module_states": TRUTH,
    "limit_all_gathers": TRUTH,
    "sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", 1],
    "offload_params": TRUTH,
}
SWITCHES: list[Any] = [
    *[True] * 6, "full_shard", "full_shard auto_wrap", "shard_grad_op offload", "offload", "auto_wrap",
    "hybrid_shard", "no_shard", "FULL_SHARD", ["full_shard", "auto_wrap"], ["offload"],
    "full_shard, auto_wrap", "true", 1, "1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_combination_means_what_transformers_makes_of_it(seed: int, tmp_path: Path) -> None:
    """Values and combinations nobody would write: refused where transformers refuses, else the same run."""
    choose = random.Random(seed)
    path = tmp_path / "args.json"
    for _ in range(100):
        keys = choose.sample(list(VALUES), choose.randint(0, 6))
        config = {
            ("fsdp_" if choose.random() < 0.3 else "") + key: choose.choice(VALUES[key]) for key in keys
        }
        if choose.random() < 0.7:
            config.setdefault("version", choose.choice([1, 2]))
        arguments = {"output_dir": "o", "fsdp": choose.choice(SWITCHES), "fsdp_config": config}
        path.write_text(json.dumps(arguments, indent=1))
        check_explained(path)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        (
            "t.yaml",
            "fsdp: fsdp2\nfsdp_config: {version: 2}\n",
            "full_shard, shard_grad_op, offload, auto_wrap",
        ),
        (
            "t.yaml",
            "fsdp: zero9 auto_wrap\nfsdp_config: {version: 2}\n",
            "full_shard, shard_grad_op, offload",
        ),
        ("t.json", '{"version": 1, "reshard_after_forward": "most"}', "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"),
        (
            "a.yaml",
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_sharding_strategy: most}\n",
            "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD",
        ),
        (
            "a.sh",
            "accelerate launch --use_fsdp --fsdp_version 1 --fsdp_sharding_strategy most x.py\n",
            "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD",
        ),
    ],
)
def test_a_refused_word_comes_with_the_words_there_are(
    tmp_path: Path, name: str, text: str, values: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    messages = [item.message for item in read_settings(path).diagnostics if item.code == "FSD206"]
    assert any(f"is one of {values}" in item or f"is not one of {values}" in item for item in messages), (
        messages
    )


def test_fsdp2_as_a_word_is_told_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("fsdp: fsdp2\nfsdp_config: {version: 2}\n")
    (finding,) = (item for item in read_settings(path).diagnostics if item.code == "FSD206")
    assert (finding.help or "").startswith("write fsdp: true")


@pytest.mark.parametrize("lines", ["load_in_8bit: true\n", "load_in_4bit: true\n", "optim: adamw_bnb_8bit\n"])
def test_what_bitsandbytes_cannot_do_with_sharded_parameters_is_named(lines: str) -> None:
    fsdp = "model_name_or_path: m\ndataset_name: d\noutput_dir: out\nfsdp: true\nfsdp_config:\n  version: "
    found = {item.code for item in read_settings(SourceText(f"{lines}{fsdp}2\n"), dialect="trl").diagnostics}
    assert found & {"FSD345", "FSD346"}
    stored = lines + "bnb_4bit_quant_storage: bfloat16\n" if "in_4bit" in lines else "optim: adamw_torch\n"
    others = (
        read_settings(SourceText(f"{stored}{fsdp}2\n"), dialect="trl"),
        read_settings(SourceText(f"{lines}{fsdp}1\n"), dialect="trl"),
    )
    assert not {item.code for reading in others for item in reading.diagnostics} & {"FSD345", "FSD346"}


def test_the_version_is_not_read_before_transformers_5() -> None:
    text = "output_dir: out\nfsdp: true\nfsdp_config:\n  version: 2\n"
    assert read_settings(SourceText(text)).version == 2
    before = read_settings(SourceText(text), target="transformers==4.57.6")
    assert before.version == 1
    assert [key.key for key in before.ignored] == ["version"]
    said = {item.code: item.message for item in before.diagnostics}
    assert said["FSD301"] == "version is not read: the run uses FSDP1"
