"""The run that a script describes: defaults of its arguments, lines, what cannot be read; nothing is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdptool.cli.app import run as fsdptool
from fsdptool.config.described import describe_run
from fsdptool.config.script_classes import absent_classes
from fsdptool.config.script_runs import script_settings
from fsdptool.config.translation import translate
from fsdptool.errors import PlanError
from fsdptool.files.text import SourceText
from fsdptool.inspection import inspect
from fsdptool.planning.request.file_run import bound_of, file_run, read_file_run
from fsdptool.records.described_run import DescribedRun
from fsdptool.source import resolve

TRL = """
import argparse
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--lora-r", type=int, default=0)
    parser.add_argument("--qlora", action="store_true")
    parser.add_argument("--lr", type=float, required=True)
    args = parser.parse_args()
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if args.qlora else None
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, quantization_config=quantised
    )
    adapter = LoraConfig(r=args.lora_r, target_modules="all-linear") if args.lora_r > 0 else None
    config = SFTConfig(
        "out",
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.lr,
        max_length=2**12,
        fsdp="full_shard",
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"},
    )
    SFTTrainer(model=model, args=config, peft_config=adapter).train()

if __name__ == "__main__":
    main()
"""

LOOP = """
import os
from dataclasses import dataclass, field
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

MODEL = os.environ.get("MODEL", "meta-llama/Llama-3.1-8B")

@dataclass
class Settings:
    seq_len: int = 4096
    batch_size: int = 2
    names: list = field(default_factory=lambda: ["a"])
    grad_accum_steps: int = 4

def build():
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mp_policy=policy)

settings = Settings()
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
loader = DataLoader(samples(settings.seq_len), batch_size=settings.batch_size)
for number, batch in enumerate(loader):
    (model(**batch).loss / settings.grad_accum_steps).backward()
"""

FSDP1 = """
import functools, sys
import torch
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

def train(batch_size, model_name="meta-llama/Llama-2-7b-hf"):
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    half = MixedPrecision(torch.bfloat16, torch.bfloat16)
    model = FSDP(
        AutoModelForCausalLM.from_pretrained(model_name),
        auto_wrap_policy=wrap,
        mixed_precision=half,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=True),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 32000, (batch_size, 1024))

train(int(sys.argv[1]))
"""

ACCELERATE = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "Qwen/Qwen2.5-7B"
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Qwen2DecoderLayer"])
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin)
tokenizer = AutoTokenizer.from_pretrained(NAME)

def tokenize(sample):
    return tokenizer(sample["text"], max_length=2048, padding="max_length")

data = load().map(tokenize)
model = AutoModelForCausalLM.from_pretrained(NAME)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
"""


def described(text: str, *words: str) -> DescribedRun:
    """Return the run of a script that is started with some arguments."""
    found = describe_run(SourceText(text, "train.py"), words=words)
    assert found is not None
    return found


def facts(run: DescribedRun, names: str) -> list[object]:
    """Return facts of a run."""
    return [getattr(run, name) for name in names.split()]


def test_defaults_count_where_nobody_says_otherwise() -> None:
    run = described(TRL)
    names = "program family method micro_batch sequence_length stored_dtype compute_dtype fsdp"
    assert facts(run, names) == ["trl", "qwen3:8b", "full", 2, 4096, "fp32", "bf16", 2]
    assert run.wrap_classes == ("Qwen3DecoderLayer",)
    assert run.keys.lines["per_device_train_batch_size"] == 23
    assert "learning_rate" in run.keys.no_effect
    assert run.problems == ()
    given = described(TRL, "--qlora", "--lora-r", "8", "--batch-size=4", "--model", "meta-llama/Llama-3.1-8B")
    assert facts(given, "family method lora_rank lora_targets micro_batch quantisation") == [
        "llama3.1:8b", "qlora", 8, "all-linear", 4, "bnb nf4, no double quantisation, storage uint8",
    ]  # fmt: skip
    assert described(TRL, "--batches", "4").problems == ("the script has no option --batches",)


def test_lines_and_origins_of_settings() -> None:
    rows = {item.key: (item.value, item.origin) for item in script_settings(SourceText(TRL, "train.py"))}
    assert rows["per_device_train_batch_size"] == (2, "line 23, default of --batch-size")
    assert rows["max_length"] == (4096, "line 25")
    assert rows["learning_rate"] == (None, "line 24, not read: --lr, which has no default")
    assert rows["fsdp_config.version"] == (2, "line 27")


def test_a_loop_with_fully_shard() -> None:
    run = described(LOOP)
    names = (
        "program family fsdp stored_dtype compute_dtype reduce_dtype micro_batch accumulation sequence_length"
        " optimizer gradient_checkpointing reshard cpu_offload objective"
    )
    assert facts(run, names) == [
        "torch", "llama3.1:8b", 2, "fp32", "bf16", "fp32", 2, 4, 4096, "adamw_torch_fused", "full", False,
        False, "sft",
    ]  # fmt: skip
    assert run.keys.not_modelled == ()
    offloaded = LOOP.replace("reshard_after_forward=False", "offload_policy=CPUOffloadPolicy()")
    assert facts(described(offloaded), "cpu_offload reshard") == [True, True]
    one = LOOP.replace("fully_shard(layer, mp_policy=policy, reshard_after_forward=False)", "pass")
    (whole,) = described(one).keys.not_modelled
    assert (whole.key, whole.changes, whole.side) == ("fully_shard", "memory", "more")


def test_a_loop_with_fsdp1_and_an_argument_that_is_not_given() -> None:
    run = described(FSDP1, "8")
    assert run.wrap_classes == ("LlamaDecoderLayer",)
    names = "fsdp reshard cpu_offload stored_dtype compute_dtype micro_batch sequence_length optimizer"
    assert facts(run, names) == [1, False, True, "checkpoint", "bf16", 8, 1024, "SGD"]
    open_run = described(FSDP1)
    assert open_run.micro_batch is None
    (item,) = open_run.keys.not_modelled
    assert "micro_batch" in (item.decides or ())
    assert open_run.problems == (
        "line 21: torch.randint.size is not read: it is argument 1, which has no default",
    )
    assert bound_of(file_run(open_run, None, "train.py", 8).limits) == "open"
    decided = file_run(open_run, None, "train.py", 8, decided=("micro_batch", "global_batch"))
    assert bound_of(decided.limits) == "exact"


def test_a_loop_that_accelerate_prepares() -> None:
    run = described(ACCELERATE)
    assert run.wrap_classes == ("Qwen2DecoderLayer",)
    names = "program fsdp stored_dtype compute_dtype micro_batch accumulation sequence_length full_rows"
    assert facts(run, names) == ["accelerate", 2, "fp32", "bf16", 4, 2, 2048, True]
    without = described(ACCELERATE.replace(", fsdp_plugin=plugin", ""))
    assert without.fsdp is None


def test_arguments_of_dataclasses() -> None:
    text = """
from dataclasses import dataclass
import transformers
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer

@dataclass
class ModelArguments:
    model_name_or_path: str = "facebook/opt-1.3b"

@dataclass
class TrainingArguments(transformers.TrainingArguments):
    model_max_length: int = 512
    bf16: bool = True

parser = HfArgumentParser((ModelArguments, TrainingArguments))
model_args, training_args = parser.parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
Trainer(model=model, args=training_args).train()
"""
    run = described(text, "--per_device_train_batch_size", "4", "--fsdp", "full_shard auto_wrap")
    assert facts(run, "program model compute_dtype micro_batch fsdp sequence_length") == [
        "trainer", "facebook/opt-1.3b", "bf16", 4, 2, 512,
    ]  # fmt: skip


def test_a_value_that_the_script_does_not_hold_leaves_its_facts_open() -> None:
    run = described(LOOP.replace("MODEL, dtype=torch.float32", "MODEL, dtype=helpers.choose()"))
    (item,) = run.keys.not_modelled
    assert {"stored_dtype", "base_dtype"} <= set(item.decides or ())
    assert run.stored_dtype is None
    assert run.problems[0].startswith("line 19: from_pretrained.dtype is not read: it is helpers.choose()")


def test_a_class_of_the_script_is_imported_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

if __name__ == "__main__":
    net = Net()
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
"""
    (tmp_path / "own_net.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    run = read_file_run("own_net.py")
    assert run is not None
    assert run.model == "own_net:Net"
    with pytest.raises(PlanError, match="a class of its own") as caught:
        file_run(run, None, "own_net.py", 2)
    assert "--allow-import" in str(caught.value.help)
    choice = file_run(run, None, "own_net.py", 2, trusted=True).recipe.model
    assert (choice.reference, choice.trust_remote_code) == ("own_net:Net", True)


def lacking(text: str, model: str | None = None) -> list[tuple[str, int | None]]:
    """Return what is said of classes in the policies of a script that the model lacks."""
    anatomy = inspect(resolve(model)) if model is not None else None
    return [(item.message, item.line) for item in absent_classes(SourceText(text, "train.py"), anatomy)]


def test_a_policy_names_layers_of_another_model() -> None:
    qwen = FSDP1.replace("model_name)", '"Qwen/Qwen3-8B")')
    assert lacking(qwen) == [("Qwen/Qwen3-8B has no LlamaDecoderLayer: its layers are Qwen3DecoderLayer", 15)]
    assert lacking(qwen.replace("policy=wrap,", "policy=wrap,  # noqa: FSD401")) == []
    assert lacking(FSDP1.replace("model_name)", '"meta-llama/Llama-2-7b-hf")')) == []
    both = "from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer" + qwen
    assert lacking(both.replace("{LlamaDecoderLayer}", "{LlamaDecoderLayer, Qwen3DecoderLayer}")) == []
    assert lacking(qwen.replace("Qwen/Qwen3-8B", "someone/unknown")) == []
    assert lacking(qwen.replace("Qwen/Qwen3-8B", "llava-hf/llava-1.5-7b-hf")) == []
    trainer = TRL.replace("Qwen3DecoderLayer", "Qwen2DecoderLayer")
    assert lacking(trainer) == []
    named = trainer.replace("args.model,", '"Qwen/Qwen3-8B",')
    assert lacking(named) == [
        ("Qwen/Qwen3-8B has no Qwen2DecoderLayer: its layers are Qwen3DecoderLayer", 27)
    ]


def test_a_policy_is_compared_with_the_model_that_is_given() -> None:
    assert lacking(FSDP1, "llama3:tiny") == []
    assert lacking(FSDP1.replace("LlamaDecoderLayer", "LlamaDecoderLayr"), "llama3:tiny") == [
        ("LlamaForCausalLM has no LlamaDecoderLayr: did you mean LlamaDecoderLayer?", 15)
    ]


def test_a_module_that_starts_no_run(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def add(one, two):\n    return one + two\n")
    assert describe_run(SourceText(path.read_text(), str(path))) is None
    with pytest.raises(PlanError, match="starts no training run"):
        read_file_run(str(path))


def test_explain_shows_settings_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRL)
    assert fsdptool(["explain", str(path), "--format", "json", "--", "--batch-size", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["micro_batch"] == 3
    assert document["run"]["keys"]["lines"]["max_length"] == 25
    assert {"key": "max_length", "value": 4096, "origin": "line 25", "line": 25} in document["effective"]
    assert fsdptool(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "line 23, default of --batch-size" in shown
    assert "FSDP does not run" not in shown


def test_a_model_that_arguments_name_is_asked_for_first() -> None:
    """The reason is the model's, not that of adapters, which are not read either; the command is offered."""
    text = (
        "from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config\n"
        "training_args, model_args = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()\n"
        "trainer = SFTTrainer(\n"
        "    model=model_args.model_name_or_path,\n"
        "    args=training_args,\n"
        "    peft_config=get_peft_config(model_args),\n"
        ")\n"
        "trainer.train()\n"
    )
    run = described(text)
    assert len(run.problems) == 2
    with pytest.raises(PlanError) as refused:
        file_run(run, None, "sft.py", 2)
    reason = "line 4: the model is model_args.model_name_or_path, which is not read"
    assert refused.value.message == f"sft.py names no model: {reason}"
    assert "fsdptool plan -- python sft.py" in (refused.value.help or "")


def test_a_model_of_sizes_in_the_script_must_be_given() -> None:
    sized = LOOP.replace(
        "AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)",
        "LlamaForCausalLM(LlamaConfig(hidden_size=512, num_hidden_layers=4))",
    ).replace("import AutoModelForCausalLM", "import LlamaConfig, LlamaForCausalLM")
    run = described(sized)
    assert run.problems == ("line 19: the model is LlamaConfig, a model of the script's own sizes",)
    assert [item.key for item in run.keys.not_modelled] == [
        "LlamaConfig.hidden_size",
        "LlamaConfig.num_hidden_layers",
    ]
    with pytest.raises(PlanError, match="names no model: line 19"):
        file_run(run, None, "train.py", 8)
    given = file_run(run, "llama3:tiny", "train.py", 8, decided=("model",))
    assert bound_of(given.limits) == "exact"
    made = described(
        LOOP.replace("AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)", "make()")
    )
    assert made.problems == ("line 19: the model is make(), which is not read",)


UNSLOTH = """
from transformers import TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel, is_bfloat16_supported

length = 4096
name = "unsloth/mistral-7b-v0.3"
model, tokenizer = FastLanguageModel.from_pretrained(name, max_seq_length=length, dtype=None)
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=16, lora_dropout=0)
SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=data, max_seq_length=length, packing=False,
    args=TrainingArguments(
        "out", per_device_train_batch_size=2, fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(),
        optim="adamw_8bit",
    ),
).train()
"""


def test_a_model_that_unsloth_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = described(UNSLOTH)
    assert (run.family, run.method, run.lora_rank, run.sequence_length) == (
        "mistral:7b-v0.3",
        "qlora",
        32,
        4096,
    )
    assert run.lora_targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (run.base_dtype, run.stored_dtype, run.compute_dtype) == ("bf16", "fp32", "bf16")
    assert run.quantisation is not None and run.quantisation.startswith("bnb nf4, double")
    assert (run.gradient_checkpointing, run.fused_loss, run.optimizer_state_bits) == ("offload", "chunked", 8)
    assert [(item.key, item.side) for item in run.keys.not_modelled] == [("unsloth's kernels", "less")]
    assert not run.unresolved
    assert any("bf16 = True (on a GPU with bfloat16)" in note for note in run.notes)
    plain = described(UNSLOTH.replace("dtype=None", "load_in_4bit=False, use_gradient_checkpointing=False"))
    assert (plain.method, plain.quantisation, plain.gradient_checkpointing) == ("lora", "none", "offload")
    whole = UNSLOTH.replace("dtype=None", "full_finetuning=True, use_gradient_checkpointing=True").replace(
        "model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=16, lora_dropout=0)", ""
    )
    full = described(whole)
    assert (full.method, full.stored_dtype, full.gradient_checkpointing) == ("full", "bf16", "full")
    # unsloth gives the trainer the argument back that transformers 5 has no more.
    path = tmp_path / "train.py"
    path.write_text(UNSLOTH)
    assert fsdptool(["validate", str(path)]) == 0
    path.write_text(UNSLOTH.replace("from unsloth import", "from other import"))
    assert fsdptool(["validate", str(path)]) == 1
    assert "FSD610" in capsys.readouterr().out


FROZEN = """
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased")
teacher = AutoModelForSequenceClassification.from_pretrained("bert-large-uncased")
STATEMENT
Trainer(model=model, args=TrainingArguments("out"), train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (
            "for name, weight in model.named_parameters():\n    weight.requires_grad = 'classifier' in name",
            True,
        ),
        ("for weight in model.bert.parameters():\n    weight.requires_grad = False", True),
        ("model.bert.encoder.requires_grad_(False)", True),
        ("for weight in model.bert.parameters():\n    weight.requires_grad_(False)", True),
        ("model.freeze_feature_encoder()", True),
        ("teacher.requires_grad_(False)", False),
        ("model.requires_grad_(True)", False),
        ("for weight in model.parameters():\n    weight.requires_grad = True", False),
    ],
)
def test_weights_that_a_script_freezes_are_told(statement: str, told: bool) -> None:
    run = described(FROZEN.replace("STATEMENT", statement))
    assert [(item.key, item.side) for item in run.keys.not_modelled] == [("requires_grad", "less")] * told


DISTILLED = """
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-7B-Instruct")
teacher = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct", dtype=torch.bfloat16).to("cuda")
student = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B-Instruct", dtype=torch.bfloat16).to("cuda")
for layer in student.model.layers:
    fully_shard(layer)
fully_shard(student)
optimizer = torch.optim.AdamW(student.parameters())
def collate(rows):
    return tokenizer(rows, truncation=True, max_length=768, padding="max_length")
for step, batch in enumerate(DataLoader(data, batch_size=4, collate_fn=collate)):
    with torch.no_grad():
        wanted = teacher(**batch).logits
    F.kl_div(student(**batch).logits.log_softmax(-1), wanted.softmax(-1)).backward()
    if (step + 1) % 8 == 0:
        optimizer.step()
"""


def test_a_second_model_that_the_script_runs_is_told() -> None:
    run = described(DISTILLED)
    assert run.family == "qwen2.5:1.5b"
    assert [(item.key, item.side) for item in run.keys.not_modelled] == [("second model", "more")]
    assert run.keys.lines["second model"] == 8
    unused = DISTILLED.replace("wanted = teacher(**batch).logits", "wanted = batch['logits']")
    assert described(unused).keys.not_modelled == ()
    # One that runs after training takes no memory of a step; one that only generates does.
    assert described(f"{unused}\nteacher(batch)\n").keys.not_modelled == ()
    generating = described(DISTILLED.replace("teacher(**batch).logits", "teacher.generate(**batch)"))
    assert [item.key for item in generating.keys.not_modelled] == ["second model"]


def test_a_loader_calls_what_makes_its_batches() -> None:
    run = described(DISTILLED)
    assert (run.sequence_length, run.full_rows, run.micro_batch, run.accumulation) == (768, True, 4, 8)
    # A class that makes batches, and one that makes samples.
    for before, name, argument in (
        ("collate(rows):\n    return tokenizer(", "__call__", "collate_fn=Made()"),
        ("collate(rows):\n    return tokenizer(", "__getitem__", "dataset=Made()"),
    ):
        body = before.replace("collate(rows)", f"{name}(self, rows)").replace("\n    ", "\n        ")
        text = DISTILLED.replace(f"def {before}", f"class Made:\n    def {body}")
        first = "" if "dataset" in argument else "data, "
        text = text.replace("data, batch_size=4, collate_fn=collate", f"{first}batch_size=4, {argument}")
        assert described(text).sequence_length == 768


DIFFUSION = """
import argparse
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, UNet2DConditionModel
from peft import LoraConfig
parser = argparse.ArgumentParser()
parser.add_argument("--resolution", type=int, default=768)
args = parser.parse_args()
accelerator = Accelerator(mixed_precision="bf16")
vae = AutoencoderKL.from_pretrained("stabilityai/stable-diffusion-xl-base-1.0", subfolder="vae")
unet = UNet2DConditionModel.from_pretrained("stabilityai/stable-diffusion-xl-base-1.0", subfolder="unet")
weight_dtype = torch.float32
if accelerator.mixed_precision == "fp16":
    weight_dtype = torch.float16
elif accelerator.mixed_precision == "bf16":
    weight_dtype = torch.bfloat16
unet.to(accelerator.device, dtype=weight_dtype)
unet.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k"]))
unet.enable_gradient_checkpointing()
optimizer = torch.optim.AdamW([one for one in unet.parameters() if one.requires_grad])
unet, optimizer = accelerator.prepare(unet, optimizer)
for batch in loader:
    unet(vae.encode(batch).latent_dist.sample(), 1, None).sample.mean().backward()
"""


def test_a_loop_over_a_model_of_diffusers() -> None:
    run = described(DIFFUSION)
    assert (run.family, run.objective, run.height, run.width) == ("sdxl:unet", "diffusion", 768, 768)
    assert (run.base_dtype, run.stored_dtype, run.gradient_checkpointing) == ("bf16", "fp32", "full")
    assert run.keys.not_modelled == ()  # plans of diffusion models say that the VAE is left out
    # diffusers loads fp32 where nothing else is said, whatever the files hold.
    cast = "unet.to(accelerator.device, dtype=weight_dtype)"
    assert described(DIFFUSION.replace(cast, "")).base_dtype == "fp32"
    # What the launcher decides stays open.
    left = described(DIFFUSION.replace('mixed_precision="bf16"', ""))
    assert left.base_dtype is None and any("weight_dtype" in item for item in left.problems)


LIGHTNING = """
import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

class Lit(L.LightningModule):
    def __init__(self, name, lr=1e-5):
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(self.hparams.name, dtype=torch.bfloat16)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(rows, batch_size=2)

blocks = {LlamaDecoderLayer}
strategy = FSDPStrategy(auto_wrap_policy=blocks, activation_checkpointing_policy=blocks)
trainer = L.Trainer(
    devices=8, num_nodes=2, strategy=strategy, precision="bf16-mixed", max_steps=100,
    accumulate_grad_batches=4,
)
trainer.fit(Lit("meta-llama/Llama-3.2-3B"), datamodule=Data())
"""


def test_a_module_of_lightning() -> None:
    run = described(LIGHTNING)
    assert (run.program, run.family, run.fsdp, run.reshard) == ("lightning", "llama3.2:3b", 1, True)
    assert (run.processes, run.nodes, run.micro_batch, run.accumulation, run.steps) == (16, 2, 2, 4, 100)
    assert (run.wrap_classes, run.gradient_checkpointing) == (("LlamaDecoderLayer",), "full")
    # Mixed precision of Lightning casts what FSDP gathers and reduces, and no stored weight.
    assert (run.stored_dtype, run.compute_dtype, run.reduce_dtype) == ("bf16", "bf16", "bf16")
    assert not run.unresolved
    # In full precision, the default, FSDP's plugin casts the weights whatever they were loaded in.
    for full in (
        LIGHTNING.replace("bf16-mixed", "32-true"),
        LIGHTNING.replace('precision="bf16-mixed", ', ""),
    ):
        run = described(full)
        assert (run.stored_dtype, run.compute_dtype, run.reduce_dtype) == ("fp32", "fp32", "fp32")
    odd = described(LIGHTNING.replace("bf16-mixed", "transformer-engine"))
    assert [(item.key, item.side) for item in odd.keys.not_modelled] == [("Trainer.precision", None)]


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [
        ('devices="0,1", num_nodes=2', 4),
        ("devices=[0, 1, 2]", 3),
        ("devices=-1", None),
        ('devices="auto"', None),
        (f'devices="{"9" * 5000}"', None),
        ("devices=8, num_nodes=True", None),
    ],
    ids=["text", "list", "all", "auto", "long", "truth"],
)
def test_devices_of_lightning(arguments: str, processes: int | None) -> None:
    assert described(LIGHTNING.replace("devices=8, num_nodes=2", arguments)).processes == processes


def test_the_mesh_of_lightnings_strategies() -> None:
    run = described(LIGHTNING.replace("strategy=strategy", "strategy=ModelParallelStrategy()"))
    assert (run.mesh.dp_shard, run.mesh.tp) == (2, 8)  # a node is one tensor-parallel group
    sized = described(
        LIGHTNING.replace("strategy=strategy", "strategy=ModelParallelStrategy(8, tensor_parallel_size=2)")
    )
    assert sized.mesh.tp == 2
    hybrid = described(
        LIGHTNING.replace("auto_wrap_policy=blocks", "device_mesh=(2, 8), limit_all_gathers=True")
    )
    assert (hybrid.mesh.dp_replicate, hybrid.mesh.dp_shard) == (2, 8)
    assert "FSDPStrategy.limit_all_gathers" in hybrid.keys.no_effect


@pytest.mark.parametrize(
    ("strategy", "fsdp", "offload", "sides"),
    [
        ('"fsdp_cpu_offload"', 1, True, ["more"]),
        ('"ddp_find_unused_parameters_true"', "none", False, []),
        ('"deepspeed_stage_3"', "none", False, [None]),
        ("FSDPStrategy(cpu_offload=True)", 1, True, ["more"]),
    ],
)
def test_strategies_of_lightning(strategy: str, fsdp: object, offload: bool, sides: list[str | None]) -> None:
    run = described(LIGHTNING.replace("strategy=strategy", f"strategy={strategy}"))
    assert (run.fsdp, run.cpu_offload) == (fsdp, offload)
    # Without a policy the model is one unit, which needs more than a unit for each block.
    assert [(item.key, item.side) for item in run.keys.not_modelled] == [
        ("Trainer.strategy", side) for side in sides
    ]


FABRIC = """
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

def main(devices=4, micro_batch_size=2, max_seq_length=1024):
    fabric = Fabric(devices=devices, strategy="ddp", precision="bf16-true")
    model = fabric.setup(AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", dtype=torch.float32))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    for step, batch in enumerate(fabric.setup_dataloaders(DataLoader(rows, batch_size=micro_batch_size))):
        fabric.backward(model(**batch).loss)
        if (step + 1) % 16 == 0:
            optimizer.step()

main()
"""


def test_a_loop_with_fabric() -> None:
    run = described(FABRIC)
    assert (run.program, run.family, run.fsdp, run.processes) == ("lightning", "qwen2.5:7b", "none", 4)
    assert (run.sequence_length, run.micro_batch, run.accumulation) == (1024, 2, 16)
    assert (run.base_dtype, run.stored_dtype, run.compute_dtype) == ("bf16", "bf16", "bf16")


ND = """
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM
sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=2)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
accelerator = Accelerator(mixed_precision="bf16", parallelism_config=sizes, fsdp_plugin=plugin)
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
"""


def test_a_mesh_of_accelerate() -> None:
    run = described(ND)
    assert (run.mesh.dp_replicate, run.mesh.dp_shard, run.mesh.cp, run.mesh.tp) == (2, 4, 1, 2)
    assert run.processes == 16 and not run.unresolved
    # A size that is decided at run time leaves its axis open, and Ulysses is not planned.
    left = described(ND.replace("dp_shard_size=4", "dp_shard_size=torch.cuda.device_count()"))
    assert (left.mesh.dp_shard, left.mesh.tp, left.processes) == (None, 2, None)
    for sizes in ("", "dp_shard_size=-1, dp_replicate_size=2", "dp_shard_size=0"):
        other = described(ND.replace("dp_replicate_size=2, dp_shard_size=4, tp_size=2", sizes))
        assert other.processes is None
    ulysses = described(ND.replace("tp_size=2", "sp_size=2"))
    assert [item.key for item in ulysses.keys.not_modelled] == ["Accelerator.parallelism_config"]


def test_peft_prepares_a_quantised_model_to_be_recomputed() -> None:
    prepared = TRL.replace(
        "adapter = LoraConfig", "model = prepare_model_for_kbit_training(model)\n    adapter = LoraConfig"
    )
    prepared = prepared.replace("import LoraConfig", "import LoraConfig, prepare_model_for_kbit_training")
    prepared = prepared.replace("learning_rate=args.lr,", "gradient_checkpointing=False,")
    assert described(prepared).gradient_checkpointing == "full"
    told = prepared.replace("training(model)", "training(model, use_gradient_checkpointing=False)")
    assert described(told).gradient_checkpointing == "none"


HELD = """
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for batch in loader:
STATEMENTS
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("statements", "inside", "held"),
    [
        ("    loss = model(**batch).loss", True, False),
        ("    outputs = model(**batch)\n    loss = outputs.loss", True, True),
        ("    logits = model(batch).logits\n    loss = F.cross_entropy(logits, batch)", False, True),
        ("    loss = F.cross_entropy(model(batch).logits, batch)", False, False),
        # What a name holds cannot be told.
        ("    loss, logits = model(input_ids=batch, labels=batch, return_dict=False)", True, None),
        ("    outputs = model(**batch)\n    loss = outputs.loss\n    del outputs", True, None),
        ("    loss = model(**batch)\n    loss = loss.loss", True, None),
        (
            "    with torch.no_grad():\n        model(**batch).logits\n    loss = model(**batch).loss",
            True,
            False,
        ),
        ("    F.cross_entropy(model(batch).logits, batch)\n    loss = model(**batch).loss", None, None),
    ],
)
def test_who_computes_the_loss_and_what_a_name_holds(
    statements: str, inside: bool | None, held: bool | None
) -> None:
    run = described(HELD.replace("STATEMENTS", statements))
    assert (run.loss_in_forward, run.keeps_logits, run.momentum) == (inside, held, 0.9)
    given = file_run(run, "qwen3:0.6b", "train.py", 8, decided=("sequence_length", "micro_batch"))
    assert given.recipe.optimizer.momentum == 0.9
    assert given.options.get("loss_in_forward") is inside
    # Without a dtype, products are in that of the checkpoint.
    assert (run.base_dtype, run.compute_dtype) == ("checkpoint", "checkpoint")


def test_a_loop_without_any_sharding_is_a_run() -> None:
    plain = HELD.replace("STATEMENTS", "    loss = model(**batch).loss").replace("fully_shard", "print")
    run = described(plain.replace("from torch.distributed.fsdp import print\n", ""))
    assert (run.fsdp, run.family, run.optimizer) == ("none", "qwen3:0.6b", "SGD")


def test_only_the_branch_that_updates_says_the_accumulation() -> None:
    told = "    if (step + 1) % 8 == 0:\n        optimizer.step()"
    other = "    if step % 100 == 0:\n        print(step)\n    else:\n        optimizer.step()"
    left = "    if (step + 1) % 8 != 0:\n        continue\n    optimizer.step()"
    assert told in DISTILLED
    assert described(DISTILLED.replace(told, other)).accumulation == 1
    assert described(DISTILLED.replace(told, left)).accumulation == 8


def test_unsloth_with_other_trainers() -> None:
    orpo = UNSLOTH.replace("SFTTrainer", "ORPOTrainer").replace(" max_seq_length=length, packing=False,", "")
    run = described(orpo)
    assert (run.objective, run.fused_loss, run.gradient_checkpointing) == ("orpo", "none", "offload")
    plain = UNSLOTH.replace("from trl import SFTTrainer", "from transformers import Trainer").replace(
        "SFTTrainer(", "Trainer("
    )
    run = described(plain)
    assert (run.program, run.gradient_checkpointing, run.stored_dtype) == ("trainer", "offload", "fp32")
    left = described(UNSLOTH.replace("lora_dropout=0", "finetune_vision_layers=False"))
    assert ("finetune_vision_layers", "less") in [(item.key, item.side) for item in left.keys.not_modelled]


def test_a_translation_keeps_momentum_or_tells_that_it_is_lost() -> None:
    run = described(HELD.replace("STATEMENTS", "    loss = model(**batch).loss"))
    own = translate(run, "fsdptool")
    assert own.run.momentum == 0.9 and "momentum" not in [item.name for item in own.losses]
    assert "momentum" in [item.name for item in translate(run, "trl").losses]


PAIRS = """
from transformers import AutoModelForCausalLM, TrainingArguments
from peft import LoraConfig
from trl import DPOTrainer, TrlParser
length = 1512
model = AutoModelForCausalLM.from_pretrained("google-t5/t5-base", dtype="bfloat16")
args = ARGUMENTS
if args.gradient_checkpointing:
    model.gradient_checkpointing_enable()
trainer = DPOTrainer(
    model, args=args, peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"), train_dataset=data,
    max_length=length, max_prompt_length=1024,
)
trainer.train()
"""


@pytest.mark.parametrize(
    ("arguments", "recomputes"),
    [
        ("TrlParser(TrainingArguments).parse_args_and_config()[0]", "none"),
        ("TrainingArguments('o', gradient_checkpointing=True)", "full"),
        ("TrainingArguments('o', gradient_checkpointing=False)", "none"),
    ],
)
def test_the_first_trainers_of_pairs_took_lengths_themselves(arguments: str, recomputes: str) -> None:
    run = described(PAIRS.replace("ARGUMENTS", arguments))
    assert (run.program_version, run.sequence_length, run.gradient_checkpointing) == (
        "0.18.0",
        1512,
        recomputes,
    )
    assert run.lora_targets == ("q", "v")


GUARDED = """
import torch
from dataclasses import dataclass
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Own:
    gradient_checkpointing: bool = True
SETTINGS
model = AutoModelForCausalLM.from_pretrained("gpt2")
if own.gradient_checkpointing:
    model.gradient_checkpointing_enable()
"""
LOOPED = """
optimizer = torch.optim.AdamW(model.parameters())
for batch in data:
    model(**batch).loss.backward()
    optimizer.step()
"""
TRAINED = (
    "Trainer(model, args=TrainingArguments('o', gradient_checkpointing={}), train_dataset=data).train()\n"
)
PARSED = "own = HfArgumentParser(Own).parse_args_into_dataclasses()[0]"
LOADED = "own = OmegaConf.load('own.yaml')"


@pytest.mark.parametrize(
    ("settings", "training", "recomputes"),
    [
        (PARSED, TRAINED.format(False), "full"),
        (LOADED, LOOPED, None),
        (LOADED, TRAINED.format(False), None),
        (LOADED, TRAINED.format(True), "full"),
        ("own = TrainingArguments('o')", "Trainer(model, args=own, train_dataset=data).train()\n", "none"),
    ],
)
def test_only_the_arguments_of_a_trainer_decide_what_a_guard_asks_them(
    settings: str, training: str, recomputes: str | None
) -> None:
    run = described(GUARDED.replace("SETTINGS", settings) + training)
    assert run.gradient_checkpointing == recomputes
    told = [item.decides for item in run.keys.not_modelled]
    assert told == ([] if recomputes else [("gradient_checkpointing",)])
    assert any("own.gradient_checkpointing" in item for item in run.unresolved) == (recomputes is None)


def test_layers_that_peft_adapts_follow_from_the_model() -> None:
    run = described("""
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
model = get_peft_model(AutoModelForCausalLM.from_pretrained("gpt2"), LoraConfig(r=4))
optimizer = torch.optim.AdamW(model.parameters())
for batch in data:
    model(**batch).loss.backward()
    optimizer.step()
""")
    assert run.lora_targets == ("c_attn",)


def test_a_policy_of_two_branches_is_told_where_it_is_given() -> None:
    run = described("""
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from transformers import AutoModelForCausalLM
policy = MixedPrecision(param_dtype=torch.bfloat16) if torch.version.cuda >= "11" else None
model = FSDP(AutoModelForCausalLM.from_pretrained("gpt2"), mixed_precision=policy)
optimizer = torch.optim.AdamW(model.parameters())
for batch in data:
    model(**batch).loss.backward()
    optimizer.step()
""")
    assert "line 6: MixedPrecision is not read: it is policy" in run.problems
    assert run.compute_dtype is None
