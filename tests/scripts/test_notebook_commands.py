"""Commands in the cells of notebooks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdptool.config.described import describe_path, describe_run
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun

TRAIN = """import torch
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B")
SFTTrainer(model, args=SFTConfig("o", per_device_train_batch_size=3, max_length=900)).train()
"""


def notebook(*cells: str) -> str:
    """Return a notebook with these cells."""
    made = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": cell.splitlines(keepends=True)}
        for cell in cells
    ]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made})


def described(*cells: str) -> DescribedRun | None:
    """Return the run of a notebook with these cells."""
    return describe_run(SourceText(notebook(*cells), "train.ipynb"))


@pytest.mark.parametrize(
    "cells",
    [
        ("%%writefile own.py\n" + TRAIN, "!accelerate launch --num_processes 4 own.py"),
        ("%%file own.py\n" + TRAIN, "%%bash\ntorchrun --nproc_per_node=4 own.py"),
        (
            "%%bash\ncat > own.py <<'EOF'\n" + TRAIN + "EOF",
            "N = 4  # ranks",
            "!torchrun --nproc_per_node {N} own.py",
        ),
        (
            "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0,1,2,3'\nNAME = 'Qwen/Qwen3-4B'",
            "!llamafactory-cli train --stage sft --do_train True --finetuning_type full \\\n"
            "  --model_name_or_path {NAME} --dataset d --cutoff_len 900 --output_dir o \\\n"
            "  --per_device_train_batch_size 3",
        ),
        (
            "%env CUDA_VISIBLE_DEVICES=0,1,2,3",
            "!NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-4B --train_type full --dataset d \\\n"
            "    --max_length 900 --per_device_train_batch_size 3",
        ),
    ],
)
def test_a_command_of_a_cell_starts_the_run(cells: tuple[str, ...]) -> None:
    run = described("!pip install -q trl", *cells)
    assert run is not None
    assert (run.model, run.micro_batch, run.sequence_length) == ("Qwen/Qwen3-4B", 3, 900)
    assert run.processes == 4


CLM = "!torchrun --nproc_per_node 2 run_clm.py --output_dir o --bf16 --model_name_or_path "


@pytest.mark.parametrize(
    ("before", "rows"),
    [
        ("bs = 4\nbs *= 2", None),
        ("bs = 4\nbs = bs * 2", None),
        ("bs = 3\nfor bs in (16, 32):\n    print(bs)", None),
        ("bs = 4\na, bs = 1, 16", None),
        ("bs = 4\nbs: int = 8", 8),
        ("bs = 4\ndel bs", None),
        ("bs = 4\nfrom settings import bs", None),
        ("bs = 4\nif large:\n    bs = 32", None),
        ("bs = 4\nlarge = False\nif large:\n    bs = 32\nelse:\n    bs = 16", 16),
        ("bs = 4\ndict(\nbs = 2\n)", 4),
        ("bs = 4\ntext = '''\nbs = 99\n'''", 4),
        ("bs = 4\nfiles = !ls", 4),
        ("bs = 4\nbs = !cat size", None),
        ("a = bs = 4", 4),
        ("bs = 4\ndef later():\n    bs = 8", 4),
    ],
)
def test_a_name_counts_until_it_is_bound_anew(before: str, rows: int | None) -> None:
    for command in ("{bs}", "'{bs}'", "$bs"):
        run = described(before, f"{CLM}gpt2 --per_device_train_batch_size {command}")
        assert run is not None
        assert run.micro_batch == rows, command
        assert (run.model, run.processes) == ("gpt2", 2)
        assert any("per_device_train_batch_size" in problem for problem in run.problems) == (rows is None)


@pytest.mark.parametrize(
    ("before", "rows"),
    [
        ("%set_env BS = 2", 2),
        ("%env BS=2", 2),
        ("import os\nos.environ['BS'] = '2'", 2),
        ("import os\nsize = 2\nos.environ['BS'] = size", 2),
        ("import os\nos.environ['BS'] = '2'\nif False:\n    os.environ['BS'] = '1'", 2),
        ("import os\nos.environ['BS'] = '2'\nif small:\n    os.environ['BS'] = '1'", None),
        ("import os\nos.environ['BS'] = '2'\nos.environ['BS'] = str(n)", None),
    ],
)
def test_variables_of_the_environment_are_those_of_the_cells(before: str, rows: int | None) -> None:
    run = described(before, f"%%bash\n{CLM[1:]}gpt2 --per_device_train_batch_size $BS")
    assert run is not None
    assert run.micro_batch == rows


def test_expressions_in_a_command_are_not_read() -> None:
    run = described(
        "n = 2\ncfg = {'len': 512}",
        f"{CLM}gpt2 --block_size {{cfg['len']}} --per_device_train_batch_size {{n*2}} --fp16 {{n > 1}}",
    )
    assert run is not None
    assert (run.model, run.sequence_length, run.micro_batch) == ("gpt2", None, None)
    assert not any("must be" in problem for problem in run.problems)


def test_json_between_braces_is_text() -> None:
    run = described("model = 'gpt2'", f"{CLM}gpt2 --fsdp full_shard --fsdp_config '{{\"fsdp_version\": 2}}'")
    assert run is not None
    assert (run.fsdp, run.model) == (2, "gpt2")


def test_of_two_branches_that_train_none_is_described() -> None:
    branches = f"if small:\n    {CLM}gpt2\nelse:\n    {CLM}gpt2-xl"
    assert described(branches) is None
    run = described(f"small = True\n{branches}")
    assert run is not None
    assert run.model == "gpt2"
    alone = described(f"if go:\n    {CLM}gpt2-xl")
    assert alone is not None
    assert alone.model == "gpt2-xl"


def test_several_trainings_are_counted_and_texts_are_none() -> None:
    run = described(f"{CLM}gpt2", f"text = '''\n{CLM}gpt2-large\n'''", f"{CLM}gpt2-xl")
    assert run is not None
    assert run.model == "gpt2"
    assert "the notebook starts 2 trainings: the first that is read is described" in run.notes
    assert described(f"text = '''\n{CLM}gpt2-large\n'''") is None


def test_what_prepares_prints_or_looks_is_no_training_more() -> None:
    run = described(
        "!python -m pip install trl\n!python data/tokenize.py --out d",
        f'%%bash\nCMD="{CLM[1:]}gpt2"\necho "$CMD"\nbash -c "$CMD"',
        "!python -m pip list\n!python plot.py --log x",
    )
    assert run is not None
    assert run.model == "gpt2"
    assert not any("trainings" in note for note in run.notes)


def test_a_file_that_a_cell_appends_to_is_read_whole() -> None:
    whole = "base_model: gpt2\nmicro_batch_size: 1\nsequence_len: 64\n"
    run = described(
        f"%%writefile a.yaml\n{whole}",
        "%%writefile -a a.yaml\nadapter: lora\nlora_r: 8\n",
        "!axolotl train a.yaml",
    )
    assert run is not None
    assert (run.method, run.micro_batch) == ("lora", 1)


def test_a_file_on_disk_is_not_taken_for_one_that_cells_write_twice(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_model: gpt2\nmicro_batch_size: 64\nsequence_len: 32\n")
    cells = [f"%%writefile a.yaml\nbase_model: gpt2\nmicro_batch_size: {size}" for size in (1, 2)]
    (tmp_path / "train.ipynb").write_text(notebook(*cells, "!axolotl train a.yaml"))
    run = describe_path(tmp_path / "train.ipynb")
    assert run is not None
    assert run.micro_batch is None
    assert any("a.yaml is not read here" in problem for problem in run.problems)


def test_a_notebook_without_a_command_that_trains_has_no_run() -> None:
    assert described("!pip install trl", "print(1)", "!ls -la", "%%html\n<p>") is None


def test_a_timed_cell_is_python() -> None:
    run = described(*TRAIN.split("SFTTrainer(")[:1], "%%time\nSFTTrainer(" + TRAIN.split("SFTTrainer(")[1])
    assert run is not None
    assert (run.model, run.micro_batch) == ("Qwen/Qwen3-4B", 3)


def test_the_launcher_of_notebooks_starts_ranks_with_arguments() -> None:
    loop = """import torch
from accelerate import Accelerator, notebook_launcher
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

def loop(rows=1):
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in DataLoader(data, batch_size=rows):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
"""
    run = described(loop, "notebook_launcher(loop, (6,), num_processes=2)")
    assert run is not None
    assert (run.micro_batch, run.processes) == (6, 2)
