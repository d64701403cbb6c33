"""The functions of ``import fsdptool``: signatures, unknown keywords, short texts and notebook pages."""

from __future__ import annotations

import csv
import inspect
import json
import math
import pickle
import re
import runpy
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

import fsdptool
from fsdptool.cli.app import build_app, run
from fsdptool.errors import ConfigError, PlanError, StorageError
from fsdptool.launch.options import StartOptions
from fsdptool.options import declared
from fsdptool.planning.clusters import make_cluster
from fsdptool.planning.hardware import load_gpu
from fsdptool.planning.request.inputs import read_request
from fsdptool.planning.request.options import Options, read_options

ROOT = Path(__file__).parents[2]
FSDP1 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD  # as before
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
num_processes: 4
"""

RENAMED = {
    "override": "overrides",
    "no_cache": "use_cache",
    "cluster": "clusters",
    "lora_target": "lora_targets",
}
ELSEWHERE = {
    "format", "output", "force", "strict", "check", "sweep", "explain",
    "dry_run", "tolerance", "leaves", "tree", "where", "world_size", "layout", "help", "recipe_output",
    "into", "list_presets", "tp", "ep", "sequence_parallel",
}  # fmt: skip
"""What a function leaves to its caller (files, exit status) or to a method of the record it returns."""


def command_options(name: str) -> set[str]:
    """Return the names of a command's parameters."""
    commands = typer.main.get_command(build_app(name)).commands  # type: ignore[attr-defined]
    return {parameter.name for parameter in commands[name].params}


@pytest.mark.parametrize(
    "name", ["plan", "detect", "emit-config", "train", "export", "precompute", "compare"]
)
def test_a_function_has_the_options_of_its_command(name: str) -> None:
    function = getattr(fsdptool, name.replace("-", "_"))
    taken = set(inspect.signature(function).parameters)
    wanted = {RENAMED.get(option, option) for option in command_options(name) - ELSEWHERE}
    assert wanted <= taken, wanted - taken
    assert all(option in (function.__doc__ or "") for option in wanted), "help() documents each"


def test_train_has_the_defaults_of_its_command() -> None:
    commands = typer.main.get_command(build_app("train")).commands  # type: ignore[attr-defined]
    defaults = {parameter.name: parameter.default for parameter in commands["train"].params}
    function = inspect.signature(fsdptool.train).parameters
    for name, item in declared(StartOptions).items():
        assert function[name].default == defaults[name] == item.option.default, name


@pytest.mark.parametrize(
    ("name", "word", "advice"),
    [
        ("plan", "seq_len", "did you mean sequence_length?"),
        ("detect", "override", "did you mean overrides?"),
        ("detect", "no_cache", "did you mean use_cache?"),
        ("validate", "gpuss", "did you mean gpus?"),
        ("emit_config", "process", "did you mean processes?"),
        ("migrate", "too", "did you mean to?"),
        ("train", "max_restart", "did you mean max_restarts?"),
        ("export", "max_shard", "did you mean max_shard_size?"),
        ("precompute", "devices", "did you mean device?"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(name: str, word: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"{name} has no option '{word}'") as refused:
        getattr(fsdptool, name)("x", **{word: 1})
    assert refused.value.__notes__ == [f"help: {advice}"]


@pytest.mark.parametrize(
    ("options", "message", "advice"),
    [
        ({}, "no GPU is given", "give gpu=H100-80GB-SXM gpus=8, or clusters=FILE; on CPU: profile cpu-gloo"),
        ({"gpu": "L4", "gpus": 0}, "0 GPUs per node: at least 1 is required", "give gpus=1 or more"),
        ({"gpu": "L4", "method": "x"}, "method='x' is not supported", "choose one of: full, lora, qlora"),
        ({"gpu": "L4", "sequence_length": "512"}, "sequence_length must be a number, not the text '512'", ""),
        ({"gpu": "L4", "gpus": 2.5}, "gpus must be a whole number, not 2.5", ""),
        ({"gpu": "L4", "micro_batch": True}, "micro_batch must be a whole number, not True", ""),
        ({"gpu": "L4", "micro_batch": np.int64(0)}, "micro_batch must be at least 1, not 0", ""),
        ({"gpu": "L4", "ema": np.float32(5)}, "ema must be at least 0 and below 1, not 5.0", ""),
        ({"gpu": "L4", "price": [1]}, "price must be a number, not [1]", ""),
        ({"gpu": "L4", "price": True}, "price must be a number, not True", ""),
        ({"gpu": "L4", "price": 10**400}, "price must be a number below 1e308", ""),
        ({"gpu": 8}, "gpu must be a text, not 8", ""),
        ({"gpu": "L4", "checkpointing": True}, "checkpointing must be a text, not True", ""),
        ({"gpu": "L4", "precision": 5}, "precision must be a text, not 5", ""),
        ({"gpu": "L4", "method": ["full"]}, "method must be a text, not ['full']", ""),
        ({"gpu": "L4", "host_memory": [1]}, "host_memory must be a text or a whole number, not [1]", ""),
        ({"gpu": "L4", "network": [1]}, "network must be a text or a number, not [1]", ""),
        ({"gpu": "L4", "compile": 1}, "compile must be true or false, not 1", ""),
        ({"gpu": "L4", "recipe": 1}, "recipe must be a text, a path or a Recipe, not 1", ""),
        ({"gpu": "L4", "lora_targets": b"ab"}, "lora_targets must be a list, not b'ab'", ""),
        ({"gpu": "L4", "wrap": {"A": 1}}, "wrap must be a list, not {'A': 1}", ""),
        ({"gpu": "L4", "wrap": [1]}, "wrap must be a text, not 1", ""),
        ({"gpu": "L4", "assume": 5}, "assume must be a text, not 5", ""),
        ({"gpu": "L4", "assume": {"nope"}}, "assume='nope' is not supported", "choose one of: compile"),
        ({"gpu": "L4", "assume": iter(["nope"])}, "assume='nope' is not supported", "choose one of: compile"),
        ({"gpu": "L4", "overrides": "n_layer=2"}, "overrides must be a mapping of keys to values", ""),
        ({"gpu": "L4", "assume": "nope"}, "assume='nope' is not supported", "choose one of: compile"),
        ({"gpu": "L4", "reshard": 0}, "reshard=0 is not supported", "write true, false or a number"),
        ({"gpu": "L4", "host_memory": 0}, "the host memory must be positive, not 0", ""),
        ({"gpu": "L4", "host_memory": float("inf")}, "host_memory must be a finite number, not inf", ""),
        ({"gpu": "L4", "prefer": "price"}, "a cluster has no price", "set price_per_gpu_hour"),
        (
            {"gpu": "L4", "method": "full", "lora_rank": 8},
            "lora_rank is for lora, and the method is full",
            "",
        ),
        ({"gpu": "L4", "teacher": "gpt2:medium", "lora_rank": 8}, "teacher is for distillation, and", ""),
        (
            {"gpu": "L4", "accumulation": 2, "global_batch": 8},
            "both accumulation and global_batch are given",
            "",
        ),
        ({"gpu": "L4", "pp": 2, "search": True}, "search is not supported beside pp", "leave one"),
        ({"gpu": "L4", "pp_virtual": 2}, "pp_virtual needs pipeline stages", "give pp=2 or more"),
        ({"gpu": "L4", "profile": "cpu-gloo"}, "profile cpu-gloo has no GPU", "leave gpu out"),
        ({"profile": "cpu-gloo", "expandable_segments": True}, "expandable_segments is for GPUs", ""),
        (
            {"profile": "cpu-gloo", "checkpointing": "optimal"},
            "checkpointing optimal needs GPUs",
            "name the GPU",
        ),
    ],
)
def test_messages_of_plan_name_arguments(options: dict[str, object], message: str, advice: str) -> None:
    with pytest.raises(PlanError) as refused:
        fsdptool.plan("gpt2:small", **options)  # type: ignore[arg-type]
    assert refused.value.message.startswith(message)
    assert (refused.value.help or "").startswith(advice)


def test_one_item_stands_for_a_list_of_one() -> None:
    cluster = make_cluster(load_gpu("L4"), 4)
    assert read_request({"reference": "gpt2:small", "clusters": cluster}).inputs.clusters == (cluster,)  # type: ignore[typeddict-item]
    request = read_request(
        {"reference": "gpt2:small", "gpu": "L4", "wrap": "GPT2Block", "lora_targets": "c_attn"}
    )
    assert request.inputs.wrap == ("GPT2Block",)
    assert request.inputs.recipe.method.lora is not None
    assert request.inputs.recipe.method.lora.targets == ("c_attn",)


class Precision(Enum):
    HALF = "bf16"


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("micro_batch", np.int64(2), 2),
        ("ema", np.float32(0.5), 0.5),
        ("price", 2, 2),
        ("host_memory", 2e12, 2e12),
        ("precision", Precision.HALF, "bf16"),
        ("machine", Path("table.json"), Path("table.json")),
        ("reference", Path("train.yaml"), "train.yaml"),
        ("reshard", 2, 2),
        ("wrap", iter(["A", "B"]), ("A", "B")),
        ("wrap", {"B", "A"}, ("A", "B")),
    ],
)
def test_a_value_is_read_in_the_declared_type(name: str, value: object, read: object) -> None:
    given = read_options({name: value})[name]  # type: ignore[misc,literal-required]
    assert (given, type(given)) == (read, type(read))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("emit_config", {"processes": "8"}, "--processes must be a number, not the text '8'"),
        ("emit_config", {"tp": 2.5}, "--tp must be a whole number, not 2.5"),
        ("detect", {"overrides": "n_layer=2"}, "--override must be a mapping of keys to values"),
        ("validate", {"gpu": "L4", "gpus": "8"}, "--gpus must be a number, not the text '8'"),
        ("train", {"config": "a.yaml", "max_restarts": -1}, "--max-restarts must be at least 0, not -1"),
        ("train", {"config": "a.yaml", "timeout": 0}, "--timeout must be at least 1, not 0"),
        ("train", {"config": "a.yaml", "timeout": math.nan}, "--timeout must be at least 1, not nan"),
        ("train", {"config": "a.yaml", "timeout": math.inf}, "--timeout must be a finite number, not inf"),
        ("train", {"config": "a.yaml", "grace": -1}, "--grace must be at least 0, not -1"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        getattr(fsdptool, name)("a.yaml", **options)
    assert refused.value.message.startswith(message)


def test_one_pattern_leaves_out_what_it_names_and_one_code_selects_its_rules(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(FSDP1)
    left = fsdptool.validate(tmp_path, exclude="a.*").readings
    assert [Path(str(reading.path)).name for reading in left] == ["b.yaml"]
    selected = fsdptool.validate(tmp_path, select="FSD301").readings
    assert {item.code for reading in selected for item in reading.diagnostics} == {"FSD301"}


def test_type_checkers_read_the_same_declaration() -> None:
    """With ``Unpack`` of it, mypy refuses ``plan("x", seq_len=1)``, and editors complete the names."""
    assert fsdptool.plan.__annotations__["options"] == "Unpack[Options]"
    parameters = inspect.signature(fsdptool.plan).parameters
    assert list(parameters) == list(Options.__annotations__)
    assert all(option in (fsdptool.plan.__doc__ or "") for option in parameters)


def test_the_import_is_light_and_has_a_version() -> None:
    loaded = "sorted({'torch', 'rich', 'typer'} & set(sys.modules))"
    script = f"import sys, fsdptool; print(fsdptool.__version__, {loaded})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [fsdptool.__version__, "[]"]
    assert "__version__" in dir(fsdptool)


@pytest.mark.slow
def test_records_print_in_a_few_lines_and_show_a_page(tmp_path: Path) -> None:
    detection = fsdptool.detect("gpt2:small")
    assert repr(detection).splitlines()[:2] == [
        "gpt2:small: GPT2LMHeadModel, 124,439,808 parameters (exact)",
        "wrap: GPT2Block",
    ]
    options: dict[str, Any] = {"gpu": "L4-24GB", "gpus": 4, "search": False}
    plans = [fsdptool.plan("gpt2:small", sequence_length=n, **options) for n in (128, 256)]
    assert repr(plans[0]).splitlines()[0] == "gpt2:small on 4 L4-24GB: fits"
    compared = fsdptool.compare(*plans)
    assert "gpt2:small (requested) and gpt2:small (requested)" in repr(compared)
    (tmp_path / "a.yaml").write_text(FSDP1)
    verdict = fsdptool.validate(tmp_path / "a.yaml")
    assert "FSD301" in repr(verdict)
    for record in (detection, plans[0], compared, verdict):
        assert len(repr(record).splitlines()) < 12, "a few lines"
        assert len(repr(record)) < 1500
        shown = record._repr_html_()
        assert shown.startswith("<iframe")
        assert "<script" not in shown
    assert len(repr(plans[0].candidates[0])) < 4000
    assert pickle.loads(pickle.dumps(detection)) == detection
    (tmp_path / "plan.json").write_text(json.dumps(plans[0].document()))
    assert fsdptool.read_plan(tmp_path / "plan.json") == plans[0]


@pytest.mark.slow
def test_a_plan_is_a_table_of_its_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in Python, a table of pandas, the printed rows and the written file are one."""
    options = ("--gpu", "L4-24GB", "--gpus", "2", "--seq-len", "64", "--micro-batch", "1", "--no-search")
    file = tmp_path / "plan.csv"
    assert run(["plan", "gpt2:small", *options, "--format", "csv", "-o", str(file)]) == 0
    assert file.read_text() == capsys.readouterr().out
    (written,) = csv.DictReader(file.read_text().splitlines())
    plan = fsdptool.plan("gpt2:small", gpu="L4-24GB", gpus=2, sequence_length=64, micro_batch=1, search=False)
    (row,) = plan.rows()
    assert {name: "" if value is None else str(value) for name, value in row.items()} == written
    assert row["device_total_bytes"] == plan.candidates[0].device_total_bytes
    table = plan.to_pandas()
    assert list(table.columns) == list(row)
    assert table["device_total_bytes"].tolist() == [row["device_total_bytes"]]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pandas is not installed"):
        plan.to_pandas()


@pytest.mark.slow
def test_detect_and_compare_write_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "detection.html"
    assert run(["detect", "gpt2:small", "--world-size", "7", "-o", str(page)]) == 0
    text = page.read_text()
    assert "GPT2Block" in text
    assert "do not divide evenly over 7 ranks" in text
    shown = text.replace("<wbr>", "")
    assert re.search(r">transformer\.h\.\*</th><td[^>]*>12</td>", shown), "equal units are one row"
    assert "transformer.h.3.mlp" not in shown
    assert "site-packages" not in shown
    assert run(["detect", "gpt2:small", "-o", str(page)]) == 2, "an existing file needs --force"
    assert run(["detect", "gpt2:small", "-o", str(tmp_path / "x.txt")]) == 2
    for length in ("128", "256"):
        words = ["plan", "gpt2:small", "--gpu", "L4-24GB", "--seq-len", length, "--no-search"]
        assert run([*words, "-o", str(tmp_path / f"{length}.json")]) == 0
    sides = [str(tmp_path / "128.json"), str(tmp_path / "256.json")]
    assert run(["compare", *sides, "-o", str(tmp_path / "both.html")]) == 0
    assert "allocated peak" in (tmp_path / "both.html").read_text()
    assert run(["compare", *sides, "-o", str(tmp_path / "both.json"), "--format", "json"]) == 0
    capsys.readouterr()


def test_names_of_strangers_stay_text_on_a_page() -> None:
    from fsdptool.records.detection import Detection
    from fsdptool.records.diagnostic import read_answer
    from fsdptool.report.page.detection import detection_page

    document = fsdptool.detect("gpt2:small").document()
    document["classes"][0]["name"] = "<script>alert(1)</script>"
    document["units"][0]["id"] = '"><img src=x>'
    text = detection_page(read_answer(Detection, document))
    assert "<script" not in text
    assert "<img" not in text


def test_migrate_returns_the_text_and_writes_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(FSDP1)
    (result,) = fsdptool.migrate(file)
    assert result.changed
    assert "fsdp_version: 2" in (result.after or "")
    assert len(repr(result)) < 300
    assert file.read_text() == FSDP1
    fsdptool.migrate([file], write=True)
    assert file.read_text() == result.after
    (other,) = fsdptool.migrate(file, to="env")
    assert "FSDP_" in (other.after or "")
    with pytest.raises(StorageError, match="not replaced by another dialect"):
        fsdptool.migrate(file, to="env", write=True)


def test_an_explained_file_prints_in_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(FSDP1)
    (tmp_path / "b.yaml").write_text("base_model: gpt2\nadapter: lora\nlora_r: 4\nmicro_batch_size: 1\n")
    configuration, training = fsdptool.explain([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    first, second, *findings = repr(configuration).splitlines()
    assert (first.split(": ")[1][:37], second) == (
        "accelerate file, read by accelerate 1",
        "FSDP version 1 runs",
    )
    assert findings[0].startswith("warning FSD")
    assert "run described for axolotl" in repr(training)
    assert "lora, rank 4" in repr(training)


def test_train_and_export_refuse_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        fsdptool.train(tmp_path / "recipe.yaml", tmp_path / "fsdp.yaml", output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="is not a run folder"):
        fsdptool.export(tmp_path)
    with pytest.raises(ConfigError):
        fsdptool.precompute(tmp_path / "recipe.yaml")


def test_the_page_of_python_says_what_a_session_answers() -> None:
    """The answers that need no model are compared; the others are captured by the same script."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "python" / "capture.py"))
    page = "".join(path.read_text(encoding="utf-8") for path in script["PAGES"])
    blocks = {match["name"]: match["body"] for match in script["BLOCK"].finditer(page)}
    assert set(blocks) == {"errors", "records", "files", "proof", "refusal"}
    assert script["replay"](blocks["errors"], {}) == blocks["errors"]
    listed = set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE))
    assert listed | {"ProofCallback", "ProofTracker"} == set(fsdptool.__all__)
