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
        (
            "a/train.py",
            "import lib.config\nimport lib.model",
            "lib.config.ROWS",
            "lib.model.build()",
            "lib/",
            "lib.config",
        ),
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


@pytest.mark.parametrize(
    ("imports", "rows", "files", "expected"),
    [
        ("import config, build\nconfig.BS = 8", "build.rows()", {}, 8),
        ("import config\nconfig.BS = 8", "config.rows()", {}, 8),
        ("import config\nfor key, value in given():\n    setattr(config, key, value)", "config.BS", {}, None),
        ("import config\nBS = 4\nconfig.init()", "BS", {}, 4),
        ("import config\nconfig.init()", "config.BS", {}, 64),
        ("from lib.model import rows", "rows()", {"lib/config.py": "BS = 5"}, 5),
        ("from lib.model import rows", "rows()", {}, None),
        ("from config import BS", "BS", {"config/__init__.py": "BS = 3"}, 3),
        (
            "import sys\nsys.path.insert(0, 'src')\nfrom config import BS",
            "BS",
            {"src/config.py": "BS = 7"},
            7,
        ),
        ("from lib.main import BS", "BS", {"lib/main.py": "BS = 1\nif __name__ != '__main__':\n  BS = 9"}, 9),
    ],
)
def test_names_of_modules_are_those_of_python(
    tmp_path: Path, imports: str, rows: str, files: dict[str, str], expected: int | None
) -> None:
    files = {
        "train.py": TRAIN.replace("IMPORTS", imports).replace("ROWS", rows).replace("MODEL", '"gpt2"'),
        "config.py": "BS = 2\ndef init():\n    global BS\n    BS = 64\ndef rows():\n    return BS\n",
        "build.py": "import config\ndef rows():\n    return config.BS\n",
        "lib/__init__.py": "",
        "lib/model.py": "def rows():\n    from .config import BS\n    return BS\n",
        **files,
    }
    run = described(written(tmp_path, files))
    assert (run.micro_batch, run.accumulation) == (expected, 3)


UNSLOTH = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=8)
SFTTrainer(model=model, args=SFTConfig("o", per_device_train_batch_size=2)).train()
"""


def test_a_checkout_of_a_known_library_does_not_hide_what_it_means(tmp_path: Path) -> None:
    own = (
        "class FastLanguageModel:\n    @staticmethod\n    def from_pretrained(*a):\n        return load(a)\n"
    )
    run = described(written(tmp_path, {"examples/train.py": UNSLOTH, "unsloth/__init__.py": own}))
    assert (run.model, run.method, run.lora_rank) == ("unsloth/Llama-3.2-1B", "qlora", 8)


LOOP = """
import torch
from helpers import NAMES
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2")
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, batch_size=2):
    model(**batch).loss.backward()
    optimizer.step()
"""
HELPERS = """
max_length = 128
gradient_accumulation_steps = 7
def evaluate(model, block_size=333):
    pass
def log(text):
    print(text)
evaluate(None)
"""


@pytest.mark.parametrize(
    ("names", "expected"), [("log", (None, 1)), ("log, gradient_accumulation_steps", (None, 7))]
)
def test_names_that_a_script_does_not_import_say_nothing_of_it(
    tmp_path: Path, names: str, expected: tuple[int | None, int]
) -> None:
    files = {"train.py": LOOP.replace("NAMES", names), "helpers.py": HELPERS}
    run = described(written(tmp_path, files))
    assert (run.sequence_length, run.accumulation) == expected


def test_arguments_that_an_imported_module_makes_do_not_hide_a_command(tmp_path: Path) -> None:
    script = """
import config, typer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
app = typer.Typer()
@app.command()
def train(rows: int = 2):
    args = TrainingArguments("o", per_device_train_batch_size=rows)
    Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), args).train()
app()
"""
    config = "from transformers import TrainingArguments\nDEFAULT = TrainingArguments('x', bf16=True)\n"
    run = described(written(tmp_path, {"train.py": script, "config.py": config}))
    assert (run.model, run.micro_batch) == ("gpt2", 2)


def test_a_command_may_hand_its_arguments_to_another_module(tmp_path: Path) -> None:
    script = "import run, typer\napp = typer.Typer()\n\n"
    script += "@app.command()\ndef main(rows: int = 3):\n    run.train(rows)\n"
    train = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n" + (
        "def train(rows):\n"
        "    args = TrainingArguments('o', per_device_train_batch_size=rows)\n"
        "    Trainer(AutoModelForCausalLM.from_pretrained('gpt2'), args).train()\n"
    )
    assert described(written(tmp_path, {"main.py": script, "run.py": train})).micro_batch == 3


@pytest.mark.parametrize("kind", ["names", "dots", "deep"])
@pytest.mark.timeout(20)
def test_imports_without_end_take_no_time_without_end(tmp_path: Path, kind: str) -> None:
    names = ", ".join(f"a{index}" for index in range(3000))
    imports = {
        "names": f"from x import {names}",
        "dots": f"from {'.' * 50_000}x import y",
        "deep": f"from {'.' * 2000}x import {names}",
    }
    script = TRAIN.replace("IMPORTS", imports[kind]).replace("ROWS", "6").replace("MODEL", '"gpt2"')
    assert described(written(tmp_path, {"train.py": script})).micro_batch == 6


def test_what_a_loop_of_another_module_deletes_is_not_known(tmp_path: Path) -> None:
    loop = """
import torch
def train(model, loader, optimizer):
    for batch in loader:
        output = model(batch["x"])
        logits = output.logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, 10), batch["y"].view(-1))
        del output, logits
        loss.backward()
        optimizer.step()
"""
    script = LOOP.replace("from helpers import NAMES", "from run import train").partition("for batch")[0]
    script += "train(model, DataLoader(rows, batch_size=2), optimizer)\n"
    run = described(written(tmp_path, {"train.py": script, "run.py": loop}))
    assert (run.micro_batch, run.keeps_logits) == (2, None)
