"""Settings that Hydra and OmegaConf give to a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdptool.config.described import describe_path, describe_run
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText, read_source
from fsdptool.records.described_run import DescribedRun
from fsdptool.scripts.hydra_files import resolved

TRAIN = """
import hydra, torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

HEAD
    model = AutoModelForCausalLM.from_pretrained(cfg.model.name)
    args = TrainingArguments(
        "o", per_device_train_batch_size=cfg.training.rows, gradient_accumulation_steps=cfg.training.steps,
        **OmegaConf.to_container(cfg.extra, resolve=True),
    )
    Trainer(model, args).train()

main()
"""
HYDRA = """@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:"""
LOADED = """def main():
    cfg = OmegaConf.merge(OmegaConf.load("conf/whole.yaml"), OmegaConf.from_cli())"""
FILES = {
    "conf/config.yaml": "defaults: [{model: small}, base, {override hydra/launcher: x}]\n"
    "training: {rows: 3}\n",
    "conf/base.yaml": "training: {rows: 1, steps: 5}\nextra: {optim: adafactor, seed: '${training.steps}'}\n",
    "conf/model/small.yaml": "name: Qwen/Qwen3-0.6B\n",
    "conf/model/large.yaml": "defaults: [small]\nname: Qwen/Qwen3-32B\n",
    "conf/whole.yaml": "rows: 3\nmodel: {name: Qwen/Qwen3-0.6B}\n"
    "training: {rows: '${rows}', steps: 5}\nextra: {optim: adafactor}\n",
}


def described(folder: Path, head: str, *words: str) -> DescribedRun:
    """Return the run of a script beside its files."""
    (folder / ".git").mkdir(exist_ok=True)
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    script = folder / "train.py"
    script.write_text(TRAIN.replace("HEAD", head), encoding="utf-8")
    run = describe_run(read_source(script), words=words)
    assert run is not None
    return run


@pytest.mark.parametrize("head", [HYDRA, LOADED])
@pytest.mark.parametrize(
    ("words", "rows", "steps"),
    [((), 3, 5), (("training.rows=8", "+training.new=1"), 8, 5), (("training.steps=2",), 3, 2)],
)
def test_files_and_overrides_are_composed(
    tmp_path: Path, head: str, words: tuple[str, ...], rows: int, steps: int
) -> None:
    run = described(tmp_path, head, *words)
    assert (run.model, run.micro_batch, run.accumulation) == ("Qwen/Qwen3-0.6B", rows, steps)
    assert (run.optimizer, run.problems) == ("adafactor", ())


def test_a_word_chooses_the_file_of_a_group(tmp_path: Path) -> None:
    assert described(tmp_path, HYDRA, "model=large").model == "Qwen/Qwen3-32B"
    start = tmp_path / "start.sh"
    start.write_text("torchrun --nproc_per_node 4 train.py model=large model.name=gpt2\n", encoding="utf-8")
    run = describe_path(start)
    assert run is not None
    assert (run.model, run.processes, run.micro_batch) == ("gpt2", 4, 3)


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    head = HYDRA.replace('"config"', '"other"')
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/other.yaml").write_text("defaults: [base, {model: huge}]\n", encoding="utf-8")
    run = described(tmp_path, head)
    assert run.micro_batch == 1
    assert any("model/huge" in problem for problem in run.problems)


def test_a_file_that_lists_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/loop.yaml").write_text("defaults: [loop, base]\na: '${a}'\n", encoding="utf-8")
    assert described(tmp_path, HYDRA.replace('"config"', '"loop"')).accumulation == 5


def test_references_that_multiply_end(tmp_path: Path) -> None:
    lines = [f"a{index}: '" + f"${{a{index + 1}}}" * 40 + "'" for index in range(11)]
    nested = [f"b{index}: [" + f"'${{b{index + 1}}}', " * 40 + "1]" for index in range(11)]
    text = "\n".join(("defaults: [base]", *lines, "a11: x", *nested, "b11: y", "c: '${c}'"))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/many.yaml").write_text(text + "\n", encoding="utf-8")
    assert described(tmp_path, HYDRA.replace('"config"', '"many"')).micro_batch == 1


def test_a_reference_that_a_text_repeats_is_looked_up_once() -> None:
    data = {"a": list(range(3000)), "b": "x${a}" * 2000, "c": "${d}", "d": 4}
    assert resolved(data)["c"] == 4


def test_what_set_defaults_adds_is_an_argument() -> None:
    text = """
import argparse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def train(args):
    arguments = TrainingArguments("o", per_device_train_batch_size=args.rows, num_train_epochs=args.epochs)
    Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), arguments).train()

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=3)
parser.add_argument("--epochs", type=int, required=True)
parser.set_defaults(func=train)
args = parser.parse_args()
args.func(args)
"""
    run = describe_run(SourceText(text, "train.py"))
    assert run is not None
    assert (run.micro_batch, run.epochs, run.problems) == (3, None, ())


def test_all_layers_but_the_last_are_resharded() -> None:
    text = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2")
for index, layer in enumerate(model.transformer.h):
    fully_shard(layer, reshard_after_forward=index < len(model.transformer.h) - 1)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, batch_size=2):
    model(**batch).loss.backward()
    optimizer.step()
"""
    run = describe_run(SourceText(text, "train.py"))
    assert run is not None
    assert (run.fsdp, run.reshard, run.problems) == (2, True, ())


COMPOSED = """
import hydra
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    LINE
    args = TrainingArguments(
        "o", per_device_train_batch_size=cfg.training.rows, gradient_accumulation_steps=cfg.training.steps
    )
    Trainer(AutoModelForCausalLM.from_pretrained(cfg.model.name), args).train()
main()
"""
BASE = "training: {rows: 3, steps: 5}\n"
LARGE, SMALL = "Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"


def composed(folder: Path, files: dict[str, str], *words: str, line: str = "pass") -> DescribedRun:
    """Return the run of a script beside files for Hydra."""
    (folder / ".git").mkdir(exist_ok=True)
    models = {"conf/model/small.yaml": f"name: {SMALL}\n", "conf/model/large.yaml": f"name: {LARGE}\n"}
    for name, text in (models | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    script = folder / "train.py"
    script.write_text(COMPOSED.replace("LINE", line), encoding="utf-8")
    run = describe_run(read_source(script), words=words)
    assert run is not None
    return run


PLAIN = f"defaults: [{{model: small}}, _self_]\n{BASE}"
EXPERIMENT = "# @package _global_\ndefaults:\n  - override /model: large\ntraining: {rows: 1}\n"
WITH_EXPERIMENT = f"defaults: [{{model: small}}, _self_, {{experiment: null}}]\n{BASE}"


@pytest.mark.parametrize(
    ("config", "others", "words", "expected"),
    [
        (WITH_EXPERIMENT, {"experiment/big": EXPERIMENT}, ["experiment=big"], (LARGE, 1, 5)),
        (PLAIN, {"experiment/big": EXPERIMENT}, ["+experiment=big"], (LARGE, 1, 5)),
        (PLAIN, {"experiment/big": EXPERIMENT}, ["training.rows=9", "+experiment=big"], (LARGE, 9, 5)),
        (PLAIN, {"experiment/big": EXPERIMENT}, ["+experiment=big", "model=small"], (SMALL, 1, 5)),
        (PLAIN, {"experiment/big": BASE}, ["+experiment=big", "training.rows=1"], (SMALL, 1, 5)),
        (
            f"defaults: [{{model: small}}, _self_, {{setup: big}}]\n{BASE}",
            {"setup/big": "# @package _global_\ntraining: {steps: 64}\n"},
            [],
            (SMALL, 3, 64),
        ),
        (
            f"defaults: [{{model: small}}, _self_, {{setup: big}}]\n{BASE}",
            {"setup/big": "# what it is for\n# @package _global_\ntraining: {steps: 64}\n"},
            [],
            (SMALL, 3, 5),
        ),
        (
            f"defaults: [{{model: small}}, _self_, {{setup: big}}]\n{BASE}",
            {"setup/big": "# @package training\nsteps: 64\n"},
            [],
            (SMALL, 3, 64),
        ),
        (f"defaults: [model/large, _self_]\n{BASE}", {}, [], (LARGE, 3, 5)),
        (f"defaults: [{{other@model: x}}, _self_]\n{BASE}", {"other/x": "name: a/b\n"}, [], ("a/b", 3, 5)),
        (
            f"defaults: [{{kind/deep@_here_: x}}, {{model: small}}, _self_]\n{BASE}",
            {"kind/deep/x": "y: 1\n"},
            [],
            (SMALL, 3, 5),
        ),
        (
            "defaults: [{a/b: x}, {model: small}, _self_]\n",
            {"a/b/x": "defaults: [{c@_global_.training: y}]\n", "a/b/c/y": "rows: 2\nsteps: 7\n"},
            [],
            (SMALL, 2, 7),
        ),
        (
            f"defaults: [{{model@teacher: small}}, {{model@model: small}}, _self_]\n{BASE}",
            {},
            ["model@model=large"],
            (LARGE, 3, 5),
        ),
        (
            "defaults: [{model: small}, {setup: '${model}'}, _self_]\n",
            {"setup/large": f"# @package _global_\n{BASE}"},
            ["model=large"],
            (LARGE, 3, 5),
        ),
        (
            f"defaults: [{{model: small}}, {{optional local: x}}, empty, _self_]\n{BASE}",
            {"empty": "# none\n"},
            [],
            (SMALL, 3, 5),
        ),
        (f"defaults: [{{'': x}}, {{'  ': y}}, {{model: small}}, _self_]\n{BASE}", {}, [], (SMALL, 3, 5)),
        (
            PLAIN,
            {"big": PLAIN.replace("3", "7")},
            ["--config-name", "big", "training.steps=8"],
            (SMALL, 7, 8),
        ),
        (PLAIN, {"../conf2/config": f"model: {{name: a/b}}\n{BASE}"}, ["--config-path=conf2"], ("a/b", 3, 5)),
    ],
)
def test_groups_packages_and_overrides_are_composed_as_hydra_does(
    tmp_path: Path,
    config: str,
    others: dict[str, str],
    words: list[str],
    expected: tuple[str, int, int],
) -> None:
    files = {f"conf/{name}.yaml": text for name, text in {"config": config, **others}.items()}
    run = composed(tmp_path, files, *words)
    assert (run.model, run.micro_batch, run.accumulation) == expected
    assert run.problems == ()


@pytest.mark.parametrize(
    ("config", "words", "expected", "said"),
    [
        (PLAIN, ["~training.rows"], (SMALL, None, 5), "per_device_train_batch_size is not read"),
        (PLAIN, ["~model"], (None, 3, 5), "from_pretrained is not read"),
        (PLAIN, ["model=small,large"], (None, 3, 5), "model/small,large is not found in conf"),
        (
            "defaults: [{model: small}]\ntraining: {n: 7, rows: '${.n}', steps: '${..k}'}\nk: 4\n",
            [],
            (SMALL, None, None),
            "${.n} is a variable, which is not resolved",
        ),
        (
            "defaults: [{model: small}]\ntraining: {rows: 2, steps: '${hydra.job.num}'}\n",
            [],
            (SMALL, 2, None),
            "${hydra.job.num} is a variable, which is not resolved",
        ),
        ("defaults: [_self_, config, config]\n" + BASE, [], (None, None, None), "conf holds too many files"),
    ],
)
def test_what_hydra_composes_is_open_where_it_is_not_known(
    tmp_path: Path,
    config: str,
    words: list[str],
    expected: tuple[str | None, int | None, int | None],
    said: str,
) -> None:
    run = composed(tmp_path, {"conf/config.yaml": config}, *words)
    assert (run.model, run.micro_batch, run.accumulation) == expected
    assert [problem for problem in run.problems if said in problem]
    assert len(run.problems) == len(set(run.problems)) <= 6


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("cfg.training.rows = 64", 64),
        ("cfg['training']['rows'] = 64", 64),
        ("OmegaConf.update(cfg, 'training.rows', 64)", 64),
        ("OmegaConf.update(cfg, other(), 64)", None),
        ("setattr(cfg.training, 'rows', 64)", 64),
        ("cfg.training.rows = 64 if other() else 32", None),
        ("if other():\n        cfg.training.rows = 64", None),
    ],
)
def test_what_a_script_sets_in_its_configuration_counts(tmp_path: Path, line: str, rows: int | None) -> None:
    assert composed(tmp_path, {"conf/config.yaml": PLAIN}, line=line).micro_batch == rows


@pytest.mark.timeout(30)
def test_settings_that_are_composed_again_and_again_take_no_time_without_end(tmp_path: Path) -> None:
    many = f"defaults: [_self_]\nlong: [{', '.join(['1'] * 3000)}]\n"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/many.yaml").write_text(many, encoding="utf-8")
    head = HYDRA.replace('"config"', '"many"').replace("def main", "def again") + "\n    pass\n"
    calls = "again()\n" * 2000
    (tmp_path / "train.py").write_text(TRAIN.replace("HEAD", f"{head}{calls}{HYDRA}"), encoding="utf-8")
    (tmp_path / ".git").mkdir()
    with pytest.raises(ConfigError, match="too long to follow"):
        describe_run(read_source(tmp_path / "train.py"))


@pytest.mark.parametrize(
    "made", ["OmegaConf.create(plain)", "OmegaConf.merge(plain, {'new': 1})", "dict(plain)"]
)
def test_settings_that_are_made_of_others_are_new_ones(made: str) -> None:
    text = f"""
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
plain = {{"training": {{"rows": 3}}}}
new = {made}
new["training"]["rows"] = 9
args = TrainingArguments("o", per_device_train_batch_size=plain["training"]["rows"])
Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), args).train()
"""
    run = describe_run(SourceText(text, "train.py"))
    assert run is not None
    assert run.micro_batch == (9 if made.startswith("dict") else 3)
