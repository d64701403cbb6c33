"""Constructs that many training scripts share: checks of arguments, templates, joined texts, float8."""

from __future__ import annotations

from pathlib import Path

import pytest

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
