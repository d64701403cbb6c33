"""Modules of its project that a training script imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdptool.config.described import describe_path, describe_run
from fsdptool.files.text import read_source
from fsdptool.records.described_run import DescribedRun

TRAIN = """
from transformers import Trainer, TrainingArguments
IMPORTS
args = TrainingArguments("o", per_device_train_batch_size=ROWS, gradient_accumulation_steps=3, bf16=True)
Trainer(model=MODEL, args=args, train_dataset=rows).train()
"""
MODEL = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from IMPORTED import NAME, ADAPTER

def build(name=NAME, rank=None):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)
    return get_peft_model(model, LoraConfig(**ADAPTER))

if __name__ == "__main__":
    NAME = "gpt2"
    build()
"""
SETTINGS = 'NAME = "Qwen/Qwen3-8B"\nROWS = 6\nADAPTER = {"r": 48, "target_modules": ["q_proj"]}\n'


def written(folder: Path, files: dict[str, str]) -> Path:
    """Write files into a repository; return the first one."""
    (folder / ".git").mkdir()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / next(iter(files))


def described(path: Path, *words: str) -> DescribedRun:
    """Return the run of a script in a folder."""
    source = read_source(path)
    run = describe_run(source, words=words)
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("script", "imports", "rows", "model", "folder", "imported"),
    [
        ("train.py", "import config\nfrom model import build", "config.ROWS", "build()", "", "config"),
        ("train.py", "from config import *\nimport model as m", "ROWS", "m.build()", "", "config"),
        ("a/train.py", "from lib import config, model", "config.ROWS", "model.build()", "lib/", ".config"),
        ("a/train.py", "import lib.config\nimport lib.model", "6", "lib.model.build()", "lib/", "lib.config"),
        ("a/b/train.py", "from lib.model import build, NAME", "6", "build(NAME)", "lib/", ".config"),
    ],
)
def test_settings_and_models_of_other_modules_are_read(
    tmp_path: Path, script: str, imports: str, rows: str, model: str, folder: str, imported: str
) -> None:
    files = {
        script: TRAIN.replace("IMPORTS", imports).replace("ROWS", rows).replace("MODEL", model),
        f"{folder}model.py": MODEL.replace("IMPORTED", imported),
        f"{folder}config.py": SETTINGS,
        f"{folder}__init__.py": "",
    }
    run = described(written(tmp_path, files))
    assert (run.model, run.method, run.lora_rank) == ("Qwen/Qwen3-8B", "lora", 48)
    assert (run.micro_batch, run.accumulation, run.base_dtype) == (6, 3, "bf16")
    assert run.problems == ()
    assert max(run.keys.lines.values()) <= 6


def test_classes_of_arguments_may_lie_in_another_module(tmp_path: Path) -> None:
    script = """
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer
from arguments import ModelArguments, Own
model_args, args = HfArgumentParser((ModelArguments, Own)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(model_args.name)
Trainer(model=model, args=args).train()
"""
    arguments = """
from dataclasses import dataclass, field
import train
import transformers

@dataclass
class ModelArguments:
    name: str = field(default="facebook/opt-1.3b")

@dataclass
class Own(transformers.TrainingArguments):
    optim: str = field(default="adafactor")
"""
    path = written(tmp_path, {"train.py": script, "arguments.py": arguments})
    run = described(path, "--per_device_train_batch_size", "5")
    assert (run.model, run.micro_batch, run.optimizer) == ("facebook/opt-1.3b", 5, "adafactor")


def test_a_script_that_hands_everything_on_starts_the_run_of_the_other_module(tmp_path: Path) -> None:
    main = 'import sys\nfrom run import train\nif __name__ == "__main__":\n    train(rows=int(sys.argv[1]))\n'
    run = "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n" + (
        "def train(rows, name='gpt2'):\n"
        "    args = TrainingArguments('o', per_device_train_batch_size=rows)\n"
        "    Trainer(AutoModelForCausalLM.from_pretrained(name), args).train()\n"
    )
    start = "torchrun --nproc_per_node 4 code/main.py 7\n"
    path = written(tmp_path, {"start.sh": start, "code/main.py": main, "code/run.py": run})
    found = describe_path(path)
    assert found is not None
    assert (found.model, found.micro_batch, found.processes) == ("gpt2", 7, 4)


def test_modules_outside_the_repository_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(SETTINGS, encoding="utf-8")
    inner = tmp_path / "inner"
    inner.mkdir()
    script = TRAIN.replace("IMPORTS", "from config import ROWS, NAME").replace("MODEL", "NAME")
    run = described(written(inner, {"train.py": script}))
    assert run.micro_batch is None
    assert any("ROWS" in problem for problem in run.problems)
