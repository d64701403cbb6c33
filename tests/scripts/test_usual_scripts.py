"""Constructs that many training scripts share: checks of arguments, templates, joined texts, float8."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdptool.api.explain import explain
from fsdptool.config.described import describe_path, describe_run
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun

LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for step, batch in enumerate(DataLoader(rows, batch_size=2)):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
"""
HEAD = """
import argparse
import torch
from accelerate import Accelerator, DistributedType
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
"""


def described(text: str, *words: str) -> DescribedRun:
    """Return the run of a script that starts one."""
    run = describe_run(SourceText(text, "train.py"), words=words)
    assert run is not None
    return run


OWN = """
from dataclasses import dataclass, field
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import BASE
from trl import SFTTrainer

@dataclass
class Own(BASE):
    base: str = field(default="Qwen/Qwen3-8B")
    max_length: int = 4096

own = HfArgumentParser(Own).parse_args_into_dataclasses()[0]
SFTTrainer(model=own.base, args=own).train()
"""


def test_a_class_that_extends_the_arguments_of_a_trainer_holds_them() -> None:
    run = described(OWN.replace("BASE", "SFTConfig"), "--per_device_train_batch_size", "2", "--bf16", "True")
    assert (run.model, run.sequence_length, run.micro_batch) == ("Qwen/Qwen3-8B", 4096, 2)
    assert run.problems == ()


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ('raise ValueError("a data set is missing")', ()),
        ("sys.exit(1)", ()),
        ('raise ValueError("a data set is missing")', ("--data", "d")),
    ],
)
def test_a_check_of_what_is_given_does_not_end_a_run_that_is_described(
    check: str, words: tuple[str, ...]
) -> None:
    run = described(
        f"""{HEAD}
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=None)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    if args.data is None:
        {check}
    return args

args = parse()
accelerator = Accelerator(gradient_accumulation_steps=args.steps)
model = AutoModelForCausalLM.from_pretrained("gpt2")
{LOOP}""",
        *words,
    )
    assert (run.model, run.accumulation, run.micro_batch) == ("gpt2", 4, 2)


def test_a_list_of_layers_may_be_one_word_with_commas() -> None:
    text = """
import argparse
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--layers", default=None)
args = parser.parse_args()
layers = args.layers.split(",") if args.layers else ["q_proj"]
SFTTrainer("gpt2", SFTConfig("o"), peft_config=LoraConfig(target_modules=layers)).train()
"""
    assert described(text).lora_targets == ("q_proj",)
    assert described(text, "--layers", "c_attn,c_proj").lora_targets == ("c_attn", "c_proj")


def test_a_template_gives_the_model_back_and_bitsandbytes_stores_bytes() -> None:
    run = described("""
import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import ORPOConfig, ORPOTrainer, setup_chat_format
if torch.cuda.get_device_capability()[0] >= 8:
    attention = "flash_attention_2"
else:
    attention = "eager"
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained("gpt2", quantization_config=four, attn_implementation=attention)
model, tokenizer = setup_chat_format(model, AutoTokenizer.from_pretrained("gpt2"))
model = prepare_model_for_kbit_training(model)
ORPOTrainer(model, ORPOConfig("o", max_prompt_length=9), peft_config=LoraConfig(r=4)).train()
""")
    assert (run.model, run.method, run.attention) == ("gpt2", "qlora", "flash_attention_2")
    assert run.quantisation == "bnb nf4, no double quantisation, storage uint8"


@pytest.mark.parametrize(
    ("how", "compiled"),
    [
        ("dynamo_backend='inductor'", True),
        ("dynamo_plugin=TorchDynamoPlugin(backend='inductor', use_regional_compilation=True)", True),
        ("dynamo_plugin=TorchDynamoPlugin()", False),
        ("dynamo_backend='no'", False),
    ],
)
def test_accelerate_compiles_and_trains_in_float8_as_it_is_told(how: str, compiled: bool) -> None:
    head = f"{HEAD}from accelerate.utils import AORecipeKwargs, TorchDynamoPlugin\n"
    run = described(f"""{head}
accelerator = Accelerator({how}, kwargs_handlers=[AORecipeKwargs()])
model = AutoModelForCausalLM.from_pretrained("gpt2")
{LOOP}""")
    assert run.compile is compiled
    assert "AORecipeKwargs" in {item.key for item in run.keys.not_modelled if item.changes == "memory"}


def test_texts_that_are_joined_fill_rows() -> None:
    text = f"""{HEAD}
accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2")
seq_len = 512
def tokenize(sample):
    return tokenizer(sample["text"], truncation=True, max_length=seq_len)
def group_texts(samples):
    joined = sum(samples["input_ids"], [])
    return {{"input_ids": [joined[at : at + seq_len] for at in range(0, len(joined), seq_len)]}}
rows = load_dataset("d").map(tokenize).map(group_texts, batched=True)
{LOOP}"""
    run = described(text)
    assert (run.sequence_length, run.packing, run.documents_joined) == (512, True, True)
    assert described(text.replace(".map(group_texts, batched=True)", "")).packing is False


def test_a_guard_of_the_step_decides_the_accumulation_before_names_do() -> None:
    run = described(f"""{HEAD}
LARGEST = 16
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("gpt2")
gradient_accumulation_steps, size = 1, 32
if size > LARGEST and accelerator.distributed_type != DistributedType.XLA:
    gradient_accumulation_steps = size // LARGEST
    size = LARGEST
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for step, batch in enumerate(DataLoader(rows, batch_size=size)):
    accelerator.backward(model(**batch).loss)
    if step % gradient_accumulation_steps == 0:
        optimizer.step()
""")
    assert (run.micro_batch, run.accumulation) == (16, 2)


def test_a_policy_that_asks_for_bfloat16_beside_nccl_is_that_of_a_gpu() -> None:
    run = described("""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from transformers import AutoModelForCausalLM
half = MixedPrecision(torch.bfloat16, torch.bfloat16)
ready = torch.version.cuda and torch.cuda.is_bf16_supported() and dist.is_nccl_available()
policy = half if ready else None
model = FSDP(AutoModelForCausalLM.from_pretrained("gpt2"), mixed_precision=policy)
optimizer = torch.optim.AdamW(model.parameters())
for batch in data:
    model(**batch).loss.backward()
    optimizer.step()
""")
    assert (run.compute_dtype, run.reduce_dtype) == ("bf16", "bf16")


@pytest.mark.parametrize(("size", "version"), [(4, 2), (1, None)])
def test_the_plugin_depends_on_the_mesh(size: int, version: int | None) -> None:
    run = described(f"""{HEAD}
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
mesh = ParallelismConfig(dp_shard_size={size})
plugin = None
if mesh.dp_shard_enabled or mesh.cp_enabled:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["GPT2Block"])
accelerator = Accelerator(parallelism_config=mesh, fsdp_plugin=plugin)
model = AutoModelForCausalLM.from_pretrained("gpt2")
{LOOP}""")
    assert (run.fsdp, run.wrap_classes) == (version, ("GPT2Block",) if version else None)


def test_old_arguments_mean_the_first_fsdp_and_weights_alone_the_dtype_of_products() -> None:
    text = """
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTTrainer
args = TrainingArguments("o", fsdp="full_shard auto_wrap", bf16=HALF)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", torch_dtype=torch.bfloat16)
SFTTrainer(model=model, args=args, max_seq_length=512).train()
"""
    run = described(text.replace("HALF", "True"))
    assert (run.fsdp, run.stored_dtype, run.compute_dtype) == (1, "fp32", "bf16")
    run = described(text.replace("HALF", "False"))
    assert (run.stored_dtype, run.compute_dtype, run.reduce_dtype) == ("bf16", "bf16", "bf16")


def test_variables_of_fsdp_before_a_command_do_not_hide_its_script(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("BASE", "SFTConfig"))
    line = "ACCELERATE_USE_FSDP=1 FSDP_CPU_RAM_EFFICIENT_LOADING=1 torchrun --nproc_per_node=4 ./own.py"
    (tmp_path / "run.sh").write_text(f"{line} --per_device_train_batch_size 3\n")
    run = describe_path(tmp_path / "run.sh")
    assert run is not None and (run.model, run.micro_batch, run.processes) == ("Qwen/Qwen3-8B", 3, 4)


@pytest.mark.parametrize(
    "ranks", ["dist.get_world_size()", 'int(os.environ["WORLD_SIZE"])', "Accelerator().num_processes"]
)
def test_the_accumulation_follows_from_the_ranks_of_the_launch(tmp_path: Path, ranks: str) -> None:
    (tmp_path / "own.py").write_text(f"""
import os
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained("gpt2")
config._attn_implementation = "flash_attention_2"
model = fully_shard(AutoModelForCausalLM.from_config(config))
B, T = 4, 512
world_size = {ranks}
grad_accum_steps = 524288 // (B * T * world_size)
rows = OwnLoader(B=B, T=T)
optimizer = torch.optim.AdamW(model.parameters())
for batch in rows:
    model(**batch).loss.backward()
    optimizer.step()
""")
    (tmp_path / "run.sh").write_text("torchrun --nnodes 2 --nproc_per_node=8 own.py\n")
    run = describe_path(tmp_path / "run.sh")
    assert run is not None and run.attention == "flash_attention_2"
    assert (run.micro_batch, run.sequence_length, run.accumulation) == (4, 512, 16)
    alone = describe_path(tmp_path / "own.py")
    assert alone is not None and alone.accumulation is None
    told = explain(tmp_path / "run.sh")[0].reading
    assert told.version == 2 and "FSD113" not in {item.code for item in told.diagnostics}


def test_an_adapter_of_its_own_files_has_no_rank_here() -> None:
    run = described("""
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
base = AutoModelForCausalLM.from_pretrained("gpt2")
model = PeftModel.from_pretrained(base, "sft", is_trainable=True)
other = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("gpt2"), "sft")
DPOTrainer(model, ref_model=other, args=DPOConfig("o")).train()
""")
    told = {item.key: item for item in run.keys.not_modelled}
    assert (run.model, run.method, run.lora_rank, run.lora_targets) == ("gpt2", "lora", None, None)
    assert told["PeftModel.lora_r"].decides == ("lora_rank",) and told["DPOTrainer.ref_model"].side == "more"


def test_unsloth_keeps_four_bits_in_bytes_and_grpo_has_no_length_of_its_own() -> None:
    run = described("""
from unsloth import FastLanguageModel
from trl import GRPOConfig, GRPOTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen2.5-7B", max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=8)
args = GRPOConfig("o", max_prompt_length=256, max_completion_length=768)
GRPOTrainer(model=model, reward_funcs=[reward], args=args).train()
""")
    assert (run.sequence_length, run.problems) == (1024, ())
    assert run.quantisation == "bnb nf4, double quantisation, storage uint8"


NANO = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 1024
exec(open("configurator.py").read())
if int(os.environ.get("RANK", -1)) != -1:
    gradient_accumulation_steps //= int(os.environ["WORLD_SIZE"])
model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained("gpt2"))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    for _ in range(gradient_accumulation_steps):
        model(**batch(batch_size, block_size)).loss.backward()
    optimizer.step()
"""


def test_a_script_that_executes_its_configurator_takes_flags_for_its_variables(tmp_path: Path) -> None:
    (tmp_path / "nano.py").write_text(NANO)
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node=8 nano.py --batch_size=16\n")
    run = describe_path(tmp_path / "run.sh")
    assert run is not None and (run.micro_batch, run.accumulation, run.global_batch) == (16, 5, 640)
    alone = describe_path(tmp_path / "nano.py")
    assert alone is not None and (alone.micro_batch, alone.accumulation) == (12, None)


def test_flags_reach_a_configuration_through_keywords() -> None:
    text = """
import fire
import torch
from dataclasses import dataclass
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
@dataclass
class Own:
    model_name: str = "gpt2"
    enable_fsdp: bool = False
    batch_size_training: int = 4
def update(config, **kwargs):
    for name, value in kwargs.items():
        if hasattr(config, name):
            setattr(config, name, value)
def main(**kwargs):
    config = Own()
    update(config, **kwargs)
    model = AutoModelForCausalLM.from_pretrained(config.model_name)
    if config.enable_fsdp:
        model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in DataLoader(rows, batch_size=config.batch_size_training):
        model(**batch).loss.backward()
        optimizer.step()
fire.Fire(main)
"""
    run = described(text)
    assert (run.model, run.fsdp, run.micro_batch) == ("gpt2", "none", 4)
    run = described(text, "--enable_fsdp", "--model_name=a/b", "--batch_size_training", "2", "--other", "1")
    assert (run.model, run.fsdp, run.micro_batch) == ("a/b", 1, 2)


def test_fields_that_a_script_adds_to_arguments_are_its_own() -> None:
    run = described("""
import transformers
from dataclasses import dataclass
from transformers import Trainer
@dataclass
class TrainingArguments(transformers.TrainingArguments):
    model_max_length: int = 256
args, = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = transformers.AutoModelForCausalLM.from_pretrained("gpt2")
Trainer(model=model, args=args).train()
""")
    assert run.sequence_length == 256 and not any("only the script" in note for note in run.notes)


TRAINED = 'Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), ARGS).train()\n'


def trained(before: str, arguments: str, *words: str) -> DescribedRun:
    """Return the run of a Trainer with arguments that some lines before it prepare."""
    head = "import argparse, sys\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
    made = f"TrainingArguments({arguments})"
    return described(f"{head}{before}\n{TRAINED.replace('ARGS', made)}", *words)


@pytest.mark.parametrize("ends", ["sys.exit(0)", "sys.exit()", "raise SystemExit", "raise SystemExit(0)"])
def test_a_branch_that_trains_and_exits_is_the_run(ends: str) -> None:
    run = described(f"""
import argparse, sys
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--stage", default="sft")
stage = parser.parse_args().stage
if stage == "sft":
    SFTTrainer("gpt2", args=SFTConfig("o", max_length=512, per_device_train_batch_size=2)).train()
    {ends}
DPOTrainer("gpt2", args=DPOConfig("o", max_length=1024, per_device_train_batch_size=4)).train()
""")
    assert (run.objective, run.sequence_length, run.micro_batch) == ("sft", 512, 2)


def test_a_script_that_prints_how_it_is_used_is_described() -> None:
    run = trained(
        "if len(sys.argv) < 2:\n    print('use')\n    sys.exit()", "'o', per_device_train_batch_size=2"
    )
    assert run.micro_batch == 2


@pytest.mark.parametrize(
    ("before", "size"),
    [
        ("p = argparse.ArgumentParser()\np.add_argument('--n', default=4)\np.set_defaults(n=3)", 3),
        ("p = argparse.ArgumentParser()\np.set_defaults(n=3)\np.add_argument('--n', default=4)", 4),
        ("p = argparse.ArgumentParser()\np.set_defaults(n=3)\np.add_argument('--n')", 3),
    ],
)
def test_the_last_default_of_an_argument_counts(before: str, size: int) -> None:
    run = trained(f"{before}\nn = p.parse_args().n", "'o', per_device_train_batch_size=n")
    assert run.micro_batch == size


@pytest.mark.parametrize(("default", "compute"), [(", default=True", "bf16"), ("", "fp32")])
def test_a_switch_may_be_on_by_default(default: str, compute: str) -> None:
    before = f"p = argparse.ArgumentParser()\np.add_argument('--bf16', action='store_true'{default})"
    assert trained(f"{before}\na = p.parse_args()", "'o', bf16=a.bf16").compute_dtype == compute


@pytest.mark.parametrize(
    "before",
    [
        "kw = dict(output_dir='o')\nkw.setdefault('per_device_train_batch_size', 4)",
        "kw = dict(per_device_train_batch_size=4)\nkw.setdefault('per_device_train_batch_size', 2)",
        "kw = dict(output_dir='o')\nkw.update(per_device_train_batch_size=4)",
        "kw = dict(output_dir='o')\nkw.update({'per_device_train_batch_size': 4})",
        "class Own:\n  @classmethod\n  def of(cls, n):\n    c = cls()\n    c.n = n\n    return c\n"
        "kw = {'per_device_train_batch_size': Own.of(4).n}",
        "for n in (1, 4, 8):\n    if n == 4:\n        break\nkw = {'per_device_train_batch_size': n}",
        "for n in (1, 8, 4):\n    if n == 8:\n        continue\nkw = {'per_device_train_batch_size': n}",
    ],
)
def test_what_python_makes_of_keywords_and_loops(before: str) -> None:
    run = trained(before, "**kw")
    assert (run.micro_batch, run.problems) == (4, ())


def test_loops_over_dictionaries_in_one_another_are_not_too_long_to_follow() -> None:
    names = {f"name{number}": number for number in range(28)}
    run = trained(
        f"names = {names}\nfor k, v in names.items():\n  for l, w in names.items():\n"
        "    for q in ['x', 'y', 'z']:\n      print(k, l, q, v + w, f'{k} {l} {v}', k == l, v * w + 3)",
        "'o', per_device_train_batch_size=2",
    )
    assert run.micro_batch == 2


def test_arguments_decide_one_another_once_they_are_filled() -> None:
    run = described("""
from dataclasses import dataclass
from trl import SFTConfig, SFTTrainer
@dataclass
class Own(SFTConfig):
    fast: bool = True
    def __post_init__(self):
        if self.fast:
            self.per_device_train_batch_size = 16
            self.gradient_checkpointing = False
        super().__post_init__()
SFTTrainer("gpt2", args=Own(output_dir="o")).train()
""")
    assert (run.micro_batch, run.gradient_checkpointing, run.problems) == (16, "none", ())


def test_small_letters_and_numbers_below_one_are_no_size() -> None:
    text = """
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
model = fully_shard(AutoModelForCausalLM.from_pretrained("gpt2"))
optimizer = torch.optim.AdamW(model.parameters())
NUMBERS
for ids in rows:
    model(ids, labels=ids).loss.backward()
    optimizer.step()
"""
    for numbers in ("b, t = 4, 512", "b = 4\nt = 0", "B = 4\nT = 0", "batch_size = 0\nmax_length = -1"):
        run = described(text.replace("NUMBERS", numbers))
        assert (run.micro_batch, run.sequence_length) == (None, None), numbers


@pytest.mark.parametrize(("ranks", "size"), [(1, 8), (2, 2)])
def test_a_launch_of_one_rank_is_one(tmp_path: Path, ranks: int, size: int) -> None:
    (tmp_path / "own.py").write_text(f"""
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
size = 8 if dist.get_world_size() == 1 else 2
{TRAINED.replace("ARGS", "TrainingArguments('o', per_device_train_batch_size=size)")}""")
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node {ranks} own.py\n")
    run = describe_path(tmp_path / "run.sh")
    assert run is not None and run.micro_batch == size


@pytest.mark.parametrize("parser", ["argparse", "TrlParser"])
def test_a_persons_own_script_is_followed_before_its_flags_are_guessed_at(
    tmp_path: Path, parser: str
) -> None:
    parsed = {
        "argparse": 'p = argparse.ArgumentParser()\np.add_argument("--model_name_or_path")\n'
        'p.add_argument("--per_device_train_batch_size", type=int)\na = p.parse_args()\n'
        'args = SFTConfig("o", per_device_train_batch_size=a.per_device_train_batch_size)\n',
        "TrlParser": "args, a = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()\n",
    }[parser]
    (tmp_path / "own.py").write_text(f"""
import argparse
from peft import LoraConfig
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser
{parsed}
SFTTrainer(a.model_name_or_path, args=args, peft_config=LoraConfig(r=32)).train()
""")
    flags = "--model_name_or_path gpt2 --output_dir o --per_device_train_batch_size 2"
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 4 own.py {flags}\n")
    run = describe_path(tmp_path / "run.sh")
    assert run is not None and (run.program, run.method, run.lora_rank) == ("trl", "lora", 32)
    assert (run.micro_batch, run.processes, run.sequence_length) == (2, 4, 1024)
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 4 absent.py {flags}\n")
    unseen = describe_path(tmp_path / "run.sh")
    assert unseen is not None and (unseen.program, unseen.micro_batch) == ("trainer", 2)


def test_a_configurator_takes_files_before_flags(tmp_path: Path) -> None:
    (tmp_path / "nano.py").write_text(NANO)
    (tmp_path / "small.py").write_text(
        "import time\nbatch_size = 4\nblock_size = 2 * 128\nname = str(time.time())\n"
    )
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node=8 nano.py small.py --batch_size=16\n")
    run = describe_path(tmp_path / "run.sh")
    assert run is not None and (run.micro_batch, run.sequence_length, run.problems) == (16, 256, ())
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node=8 nano.py absent.py\n")
    unread = describe_path(tmp_path / "run.sh")
    assert unread is not None
    assert unread.unresolved == ("absent.py is not read: what it sets is not known",)


GROWING = {
    "a list as an index": "d = rows[sys.argv[1:]]\nx = {'a': 1}[A.columns]\nx = {A.columns: 1}",
    "a list that holds itself": "x = [1]\nx.append(x)",
    "lists that share": "x = [1]\n" + "x = [x, x]\n" * 40,
    "texts": "x = 'ab'\n" + "x = f'{x}{x}'\n" * 40,
    "numbers": "x = 12345\n" + "x = x * x\n" * 40,
    "sums": "x = 12345 ** 20\n" + "x = x * x + x - 1\n" * 40,
    "functions": "x = 1\n" + "".join(f"def f{n}():\n    f{n + 1}()\n" for n in range(1500)),
}
COLUMNS = """
from dataclasses import dataclass, field
from transformers import HfArgumentParser
@dataclass
class Own:
    columns: list[str] = field(default_factory=list)
A = HfArgumentParser(Own).parse_args_into_dataclasses()[0]
"""


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", GROWING)
def test_values_that_grow_without_bound_are_left_open(kind: str) -> None:
    before = f"{COLUMNS}{GROWING[kind]}\n"
    run = trained(before, "'o', per_device_train_batch_size=2, report_to=x", "--columns", "a", "b")
    assert (run.model, run.micro_batch) == ("gpt2", 2)


def test_the_first_argument_of_a_field_is_its_default() -> None:
    text = """
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

class Own(BaseModel):
    rows: int = Field(5, ge=1)
    steps: int = Field(..., ge=1)

own = Own(steps=2)
args = TrainingArguments("o", per_device_train_batch_size=own.rows, gradient_accumulation_steps=own.steps)
Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), args).train()
"""
    run = described(text)
    assert (run.micro_batch, run.accumulation) == (5, 2)


def test_the_module_below_a_wrapper_that_a_condition_adds_makes_the_optimizer() -> None:
    text = """
import os, torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def optimizer(self, rate):
        return torch.optim.AdamW(self.parameters(), lr=rate, fused=True)

ddp = int(os.environ.get("RANK", -1)) != -1
model = Net()
if ddp:
    model = DDP(model)
raw = model.module if ddp else model
optimizer = raw.optimizer(1e-3)
for batch in loader(batch_size=4):
    model(batch).backward()
    optimizer.step()
"""
    assert described(text).optimizer == "adamw_torch_fused"


def test_the_precision_of_a_plugin_is_read() -> None:
    text = """
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecision
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy=policy))
model = AutoModelForCausalLM.from_pretrained("gpt2")
"""
    run = described(text + LOOP)
    assert (run.fsdp, run.compute_dtype, run.reduce_dtype, run.problems) == (1, "bf16", "fp32", ())


def test_a_script_of_trls_trainers_says_which_one_it_starts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        """
from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
script, args, config = TrlParser((ScriptArguments, KTOConfig, ModelConfig)).parse_args_and_config()
model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path)
KTOTrainer(model, args=args, train_dataset=rows, peft_config=get_peft_config(config)).train()
""",
        encoding="utf-8",
    )
    start = tmp_path / "start.sh"
    words = "--model_name_or_path Qwen/Qwen2.5-7B --dataset_name d --use_peft --lora_r 24 --max_length 512"
    start.write_text(f"accelerate launch --num_processes 8 own.py {words}\n", encoding="utf-8")
    run = describe_path(start)
    assert run is not None
    assert (run.objective, run.processes, run.sequence_length) == ("kto", 8, 512)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ((), ("fp32", "sdpa", "none", "full")),
        (("--dtype", "bfloat16"), ("bf16", "sdpa", "none", "full")),
        (("--attn_implementation", "flash_attention_2"), ("fp32", "flash_attention_2", "none", "full")),
        (
            ("--load_in_4bit", "--use_peft"),
            ("fp32", "sdpa", "bnb nf4, no double quantisation, storage uint8", "qlora"),
        ),
        (("--use_peft",), ("fp32", "sdpa", "none", "lora")),
    ],
)
def test_what_nobody_gives_of_trls_model_arguments_has_trls_defaults(
    words: tuple[str, ...], facts: tuple[str | None, ...]
) -> None:
    run = described(
        """
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config

def main(args, m):
    kept = dict(revision=m.model_revision, attn_implementation=m.attn_implementation, dtype=m.dtype)
    if args.model_init_kwargs is not None:
        kept.update(args.model_init_kwargs)
    args.model_init_kwargs = kept
    SFTTrainer(
        model=m.model_name_or_path, args=args, train_dataset=data,
        quantization_config=get_quantization_config(m), peft_config=get_peft_config(m),
    ).train()

main(*TrlParser((SFTConfig, ModelConfig)).parse_args_and_config())
""",
        *("--model_name_or_path", "gpt2", *words),
    )
    assert (run.base_dtype, run.attention, run.quantisation, run.method) == facts
