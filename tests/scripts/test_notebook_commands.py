"""Commands in the cells of notebooks."""

from __future__ import annotations

import json

import pytest

from fsdptool.config.described import describe_run
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun

TRAIN = """import torch
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B")
SFTTrainer(model, args=SFTConfig("o", per_device_train_batch_size=3, max_length=900)).train()
"""


def described(*cells: str) -> DescribedRun | None:
    """Return the run of a notebook with these cells."""
    made = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": cell.splitlines(keepends=True)}
        for cell in cells
    ]
    text = json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made})
    return describe_run(SourceText(text, "train.ipynb"))


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
