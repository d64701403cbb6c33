"""Whole runs in the files of other programs: what is written is read back, and what is lost is told."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import training_corpus as corpus
import yaml

import fsdptool
from fsdptool.cli.app import run
from fsdptool.config.described import describe_path, describe_run
from fsdptool.config.dialects import run_writers
from fsdptool.config.translation import Translation, translate
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import NOT_FACTS, DescribedMesh, DescribedRun

TARGETS = sorted(run_writers())
FACTS = [item.name for item in fields(DescribedRun) if item.name not in {"mesh", *NOT_FACTS}]
SAME: dict[str, Any] = {
    "adamw_torch_fused": "adamw", "adamw_torch": "adamw", "adamw_hf": "adamw", "adamw": "adamw",
    "adam": "adamw", "adamw_bnb_8bit": "adamw8bit", "adamw8bit": "adamw8bit", "adamw_8bit": "adamw8bit",
    "pagedadamw": "paged_adamw_32bit", "checkpoint": "bf16", "flex": "flex_attention",
}  # fmt: skip
"""Words of programs for one thing; checkpoints are stored in 16 bits unless their names say more."""


def described(text: str) -> DescribedRun:
    """Return the run of a text, which is one."""
    found = describe_run(SourceText(text))
    assert found is not None
    return found


def unlike(run: DescribedRun, made: Translation) -> set[str]:
    """Return the facts of a run that the written file does not say, compared without the tool's own help."""
    found = set()
    for name in FACTS:
        wanted, got = getattr(run, name), getattr(made.run, name)
        if wanted in (None, (), False) and name not in ("sequence_length", "micro_batch"):
            continue  # the source leaves it open, or is without it
        if name == "optimizer_state_bits" and got is None:
            continue
        if name == "base_dtype" and got is None and made.run.method == "full":
            continue  # nothing is frozen
        if _plain(wanted) != _plain(got):
            found.add(name)
    for item in fields(DescribedMesh):
        size = getattr(run.mesh, item.name)
        if size is not None and size > 1 and size != getattr(made.run.mesh, item.name):
            every = item.name == "dp_shard" and size == run.processes == made.run.processes
            found |= set() if every else {f"mesh.{item.name}"}  # all ranks share, without a size
    return found | {f"learning.{k}" for k, v in run.learning.items() if v and made.run.learning.get(k) != v}


def _plain(value: Any) -> Any:
    return SAME.get(value.rpartition(".")[2].lower(), value) if isinstance(value, str) else value


def check(run: DescribedRun, to: str) -> Translation | None:
    """Translate a run: every fact is equal or told with a reason, and the program refuses nothing."""
    try:
        made = translate(run, to)
    except ConfigError as error:
        assert str(run.objective) in error.message or "model" in error.message, error.message
        return None
    told = {loss.name for loss in made.losses}
    missing = unlike(run, made) - told
    if run.fsdp == "none":
        missing -= {"mesh.dp_replicate", "mesh.dp_shard"}  # every rank holds a copy
    assert missing == set()
    assert [loss for loss in made.losses if "no key of the file" in loss.why] == []
    left = [problem for problem in made.run.problems if "variable" not in problem]
    assert left == []
    return made


if corpus.folder() is not None:

    @pytest.mark.parametrize("entry", corpus.entries(), ids=lambda entry: entry["file"])
    def test_a_real_file_is_translated_or_its_losses_are_told(entry: dict[str, object]) -> None:
        place = corpus.folder()
        assert place is not None
        try:
            found = describe_path(place / str(entry["file"]))
        except ConfigError:
            assert "hugolamarrephd" in str(entry["file"])  # no YAML
            return
        assert found is not None
        for to in TARGETS:
            check(found, to)


AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
adapter: qlora
load_in_4bit: true
lora_r: 24
lora_alpha: 48
lora_dropout: 0.1
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [lm_head]
datasets: [{path: tatsu-lab/alpaca, type: chat_template}]
sequence_len: 4096
sample_packing: true
micro_batch_size: 3
gradient_accumulation_steps: 5
max_steps: 77
num_epochs: 2
optimizer: adamw_bnb_8bit
learning_rate: 3e-4
weight_decay: 0.02
lr_scheduler: linear
warmup_steps: 11
max_grad_norm: 0.5
seed: 7
output_dir: out
bf16: true
attn_implementation: flash_attention_2
gradient_checkpointing: true
torch_compile: true
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_fused_linear_cross_entropy: true
fsdp_version: 2
fsdp_config:
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: false
  offload_params: true
dp_replicate_size: 2
dp_shard_size: 4
tensor_parallel_size: 2
"""
FULL = """
base_model: Qwen/Qwen3-8B
datasets: [{path: trl-lib/ultrafeedback_binarized, type: chat_template.dpo}]
rl: dpo
rl_beta: 0.3
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1e-6
bf16: true
chunked_cross_entropy: true
attn_implementation: flash_attention_2
context_parallel_size: 2
"""
LLAMAFACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 12
lora_alpha: 36
lora_dropout: 0.05
lora_target: all
quantization_bit: 4
double_quantization: false
dataset: alpaca_en
cutoff_len: 3072
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 3
num_train_epochs: 2.0
optim: paged_adamw_8bit
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
disable_gradient_checkpointing: true
flash_attn: fa2
enable_liger_kernel: true
output_dir: out
"""
TRL = """
model_name_or_path: Qwen/Qwen3-8B
dataset_name: trl-lib/Capybara
dtype: bfloat16
use_peft: true
load_in_4bit: true
use_bnb_nested_quant: true
bnb_4bit_quant_storage: bfloat16
lora_r: 20
lora_alpha: 10
lora_dropout: 0.2
lora_target_modules: all-linear
max_length: 1536
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
num_processes: 4
num_train_epochs: 2
max_steps: 9
optim: adamw_torch_fused
gradient_checkpointing: false
activation_offloading: true
attn_implementation: flash_attention_2
learning_rate: 1.0e-4
lr_scheduler_type: constant
warmup_steps: 3
output_dir: out
"""
TORCHTITAN = """
[job]
dump_folder = "out"
[model]
name = "qwen3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 0.0003
weight_decay = 0.02
[lr_scheduler]
warmup_steps = 50
decay_type = "cosine"
[training]
dataset = "c4"
local_batch_size = 2
global_batch_size = 64
seq_len = 4096
steps = 300
dtype = "bfloat16"
mixed_precision_param = "bfloat16"
max_norm = 0.7
enable_cpu_offload = true
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
context_parallel_degree = 2
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 48, local_batch_size: 3, max_steps: 50, num_epochs: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
  torch_dtype: bfloat16
  attn_implementation: sdpa
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  target_modules: ["*.q_proj", "*.v_proj"]
  dim: 12
  alpha: 24
  dropout: 0.1
distributed:
  strategy: fsdp2
  dp_size: 8
  dp_replicate_size: 2
  tp_size: 2
  cp_size: 2
  activation_checkpointing: true
loss_fn: {_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy}
dataset:
  _target_: nemo_automodel.components.datasets.llm.ChatDataset
  path_or_dataset_id: trl-lib/Capybara
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.03}
lr_scheduler: {lr_decay_style: cosine, lr_warmup_steps: 5}
compile: {enabled: true}
rng: {seed: 5}
"""
VERL_SFT = """
data:
  train_files: train.parquet
  train_batch_size: 128
  micro_batch_size_per_gpu: 2
  max_length: 3072
  use_dynamic_bsz: false
model:
  path: Qwen/Qwen3-8B
  lora_rank: 16
  lora_alpha: 48
  target_modules: all-linear
  enable_gradient_checkpointing: false
engine:
  strategy: fsdp2
  model_dtype: bf16
  reshard_after_forward: false
  offload_policy: true
  fsdp_size: 4
  ulysses_sequence_parallel_size: 2
optim:
  lr: 2.0e-5
  weight_decay: 0.05
  betas: [0.9, 0.98]
  lr_scheduler_type: cosine
  lr_warmup_steps_ratio: 0.1
trainer: {total_epochs: 3, total_training_steps: 90, seed: 3, default_local_dir: out}
"""
VERL_GRPO = """
data: {train_files: t.parquet, train_batch_size: 64, max_prompt_length: 600, max_response_length: 900}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, enable_gradient_checkpointing: false, use_fused_kernels: true}
  actor:
    strategy: fsdp2
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 4
    ulysses_sequence_parallel_size: 2
    grad_clip: 0.3
    optim: {lr: 3.0e-6}
    fsdp_config: {model_dtype: bf16, reshard_after_forward: false, offload_policy: true}
  rollout: {n: 5}
trainer: {n_gpus_per_node: 4, nnodes: 1, total_epochs: 2}
"""
OWN = {
    "axolotl": (AXOLOTL, FULL), "llamafactory": (LLAMAFACTORY,), "trl": (TRL,),
    "torchtitan": (TORCHTITAN,), "automodel": (AUTOMODEL,), "verl": (VERL_SFT, VERL_GRPO),
}  # fmt: skip
"""Files that set every fact their program has a word for, to other values than its defaults."""


CASES = [(name, number) for name, texts in OWN.items() for number in range(len(texts))]


@pytest.mark.parametrize(("program", "number"), CASES)
def test_a_program_loses_nothing_of_its_own_files(program: str, number: int) -> None:
    run_ = described(OWN[program][number])
    assert run_.program == program
    made = check(run_, program)
    assert made is not None
    assert made.losses == ()


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(("program", "number"), CASES)
def test_what_another_program_cannot_say_is_told(program: str, number: int, to: str) -> None:
    check(described(OWN[program][number]), to)


@pytest.mark.parametrize(
    ("to", "nodes"), [("trl", 2), ("fsdptool", 2), ("axolotl", None), ("llamafactory", None)]
)
def test_nodes_are_written_where_a_file_says_them_and_told_elsewhere(to: str, nodes: int | None) -> None:
    launch = "torchrun --nnodes 2 --nproc_per_node 4 -m trl.scripts"
    line = f"{launch}.sft --model_name_or_path org/model"
    source = described(f"{line} --dataset_name org/data --output_dir out --max_length 64 --bf16\n")
    assert (source.processes, source.nodes) == (8, 2)
    made = translate(source, to)
    assert made.run.nodes == nodes
    # Eight ranks would fit into one node, which verl's file says of them otherwise.
    online = described(f"{launch}.grpo --model_name_or_path org/model --max_completion_length 8\n")
    assert translate(online, "verl").run.nodes == 2
    told = [loss.why for loss in made.losses if loss.name == "nodes"]
    assert told == (
        [] if nodes else ["given at the launch (torchrun --nnodes, accelerate launch --num_machines)"]
    )


def test_a_fact_that_a_writer_forgets_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdptool.config.dialects.run_writer import RunWriter

    put = RunWriter.put
    monkeypatch.setattr(RunWriter, "put", lambda to, key, value: key != "lora_r" and put(to, key, value))
    losses = {loss.name: loss for loss in translate(described(AXOLOTL), "trl").losses}
    assert (losses["lora_rank"].value, losses["lora_rank"].becomes) == ("24", "16")


def test_defaults_of_the_source_are_written_out() -> None:
    text = "base_model: Qwen/Qwen3-8B\ndatasets: [{path: a/b, type: alpaca}]\nlearning_rate: 1e-4\n"
    made = translate(described(text), "trl")
    run_ = made.run
    assert (run_.micro_batch, run_.sequence_length, run_.gradient_checkpointing) == (1, 512, "none")
    assert (run_.epochs, run_.learning["scheduler"], run_.stored_dtype) == (1.0, "cosine", "bf16")
    assert run_.learning["dataset"] == "a/b"
    assert run_.learning["warmup_ratio"] == 0.03
    titan = translate(described(text + "max_steps: 200\n"), "torchtitan")
    assert (titan.run.learning["warmup_steps"], titan.run.steps) == (6, 200)


def test_what_no_run_says_is_a_placeholder_that_is_told() -> None:
    losses = {loss.name: loss for loss in translate(described(VERL_GRPO), "trl").losses}
    assert losses["reward_funcs"].becomes == "YOUR-REWARD"
    assert losses["learning.dataset"].becomes == "YOUR-DATASET"
    assert "template" in {loss.name for loss in translate(described(FULL), "llamafactory").losses}


def test_migrate_writes_the_file_and_tells_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(AXOLOTL + "wandb_project: p\n", encoding="utf-8")
    assert run(["migrate", "--to", "trl", "train.yaml", "-o", "trl.yaml"]) == 0
    told = capsys.readouterr().err
    assert "lost: mesh.tp: 2 becomes 1 (TrainingArguments hold no mesh)\n" in told
    assert "lost: wandb_project (changes neither memory nor speed, and is not translated)\n" in told
    found = describe_path("trl.yaml")
    assert found is not None
    assert (found.program, found.method, found.lora_rank) == ("trl", "qlora", 24)
    before = Path("trl.yaml").read_bytes()
    assert run(["migrate", "--to", "trl", "train.yaml", "-o", "trl.yaml"]) == 2
    assert Path("trl.yaml").read_bytes() == before
    capsys.readouterr()
    assert run(["migrate", "--to", "llamafactory", "train.yaml", "--format", "json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["files"]
    assert {loss["name"] for loss in answer["losses"]} >= {"mesh.tp", "lora_modules_to_save"}
    (made,) = fsdptool.migrate("train.yaml", to="llamafactory")
    assert made.after == answer["text"]


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        (
            "python sft.py --model_name_or_path org/m --dataset_name org/d --max_length 64 --packing",
            {"dataset_name": "org/d", "max_length": 64, "packing": True},
        ),
        (
            "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 -m trl.scripts.grpo"
            " --model_name_or_path org/m --dataset_name org/d --reward_funcs one two --num_generations 4",
            {"reward_funcs": ["one", "two"], "num_generations": 4, "num_processes": 4},
        ),
        (
            "trl dpo --model_name_or_path org/m --dataset_name org/d --beta=0.2 --learning_rate 5e-7"
            " --eval_strategy steps --warmup_ratio 0.1 --use_peft --lora_target_modules q_proj v_proj",
            {"beta": 0.2, "learning_rate": 5e-7, "eval_strategy": "steps", "warmup_steps": 0.1},
        ),
    ],
)
def test_a_command_line_is_written_as_the_file_that_says_the_same(
    line: str, stated: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(line)
    assert run(["migrate", "--to", "trl", str(path)]) == 0
    text, told = capsys.readouterr()
    assert (told, path.read_text()) == ("", line)
    assert "YOUR-" not in text
    of_line, of_file = described(line), described(text)
    assert (unlike(of_line, Translation("trl", text, (), {}, of_file)), of_file.objective) == (
        set(),
        of_line.objective,
    )
    written = yaml.safe_load(text)
    assert {key: written[key] for key in stated} == stated


def migrated(text: str, folder: Path) -> Any:
    """Return what a command line becomes as a file of TRL."""
    path = folder / "run.sh"
    path.write_text(text, encoding="utf-8")
    (made,) = fsdptool.migrate(path, to="trl")
    return made


BASE = "--model_name_or_path org/m --dataset_name org/d"


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        ("--config_file ds.yaml", "the launch starts DeepSpeed"),
        ("--use_deepspeed --zero_stage 3 --mixed_precision fp16", "the launch starts DeepSpeed"),
        ("--config_file away.yaml", "accelerate's file away.yaml is not read"),
    ],
)
def test_a_launch_that_no_file_says_is_refused(
    launch: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 8\n", encoding="utf-8")
    path = tmp_path / "run.sh"
    path.write_text(f"accelerate launch {launch} sft.py {BASE}\n", encoding="utf-8")
    assert run(["migrate", "--to", "trl", str(path)]) == 1
    text, told = capsys.readouterr()
    assert (text, why in told) == ("", True)


def test_flags_of_a_launch_that_are_not_written_are_told(tmp_path: Path) -> None:
    made = migrated(
        "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_offload_params true --num_processes 16"
        " --fsdp_state_dict_type FULL_STATE_DICT --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
        " --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --mixed_precision fp16"
        f" sft.py {BASE} --max_length 64\n",
        tmp_path,
    )
    assert {loss.name: (loss.value, loss.becomes) for loss in made.losses} == {
        "fsdp_state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        "machine_rank": ("1", None),
        "main_process_ip": ("10.0.0.1", None),
        "mixed_precision": ("fp16", "bf16"),
    }
    written = yaml.safe_load(made.after)
    assert (written["num_processes"], written["num_machines"]) == (16, 2)
    made = migrated(f"torchrun --nproc_per_node 2 --rdzv_endpoint h:1 sft.py {BASE} --max_length 8", tmp_path)
    assert [loss.name for loss in made.losses] == ["rdzv_endpoint"]


def test_texts_stay_texts(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("hub_token: '123'\nmax_length: '64'\n", encoding="utf-8")
    line = f"trl sft --config base.yaml {BASE} --model_revision 5e1234 --dataset_config 001 --seed 7"
    made = migrated(f"{line} --run_name 20260101 --hub_model_id 1234 --packing false", tmp_path)
    assert made.losses == ()
    wanted = {
        "hub_token": "123", "max_length": 64, "model_revision": "5e1234", "dataset_config": "001", "seed": 7,
        "run_name": "20260101", "hub_model_id": "1234", "packing": False,
    }  # fmt: skip
    written = yaml.safe_load(made.after)
    assert {key: written[key] for key in wanted} == wanted


def test_keys_that_trl_refuses_and_variables_are_left_out_and_told(tmp_path: Path) -> None:
    made = migrated(
        f"trl kto {BASE} --no_packing --max_prompt_length 9 --my_own_flag 1 --evaluation_strategy steps"
        " --per_device_train_batch_size $BS --desirable_weight 1.5\n",
        tmp_path,
    )
    written = yaml.safe_load(made.after)
    left = {"packing", "max_prompt_length", "my_own_flag", "evaluation_strategy"}
    assert (left & set(written), written["eval_strategy"], "$" in made.after) == (set(), "steps", False)
    losses = {loss.name: loss.why for loss in made.losses}
    refused = {name for name, why in losses.items() if "refuses it in a file for kto" in why}
    assert refused == left - {"evaluation_strategy"}
    assert "variable" in losses["per_device_train_batch_size"]


@pytest.mark.parametrize("line", ["--model_name_or_path $MODEL --dataset_name org/d", "--config away.yaml"])
def test_a_command_line_whose_model_is_not_known_is_refused_for_that(line: str, tmp_path: Path) -> None:
    made = migrated(f"trl sft {line}", tmp_path)
    assert made.after is None
    assert ("$MODEL" if "$MODEL" in line else "away.yaml is not read here") in made.refusal


def test_a_command_in_a_variable_is_read_and_a_second_one_is_noted(tmp_path: Path) -> None:
    first = f'LAUNCH="trl sft"\n$LAUNCH {BASE} --max_length 64\n'
    made = migrated(first, tmp_path)
    assert (made.dialect, made.refusal, made.notes) == ("flags", None, ())
    two = migrated(f"python prepare_data.py\n{first}trl dpo {BASE}\npython evaluate.py\n", tmp_path)
    assert two.notes == ("the text starts 2 trainings: the first that is read is written",)
    assert two.after == made.after


@pytest.mark.slow
def test_trl_itself_reads_what_command_lines_become(tmp_path: Path) -> None:
    """The keys, their types and their lists, by the parsers of TRL's own scripts."""
    from importlib import import_module

    from fsdptool.config.dialects.trl.flags import is_number, takes, typed

    parsers = {
        name: import_module(f"trl.scripts.{name}").make_parser()
        for name in ("sft", "dpo", "kto", "grpo", "reward")
    }
    for objective, parser in parsers.items():
        actions = [action for action in parser._actions if action.dest != "help"]
        assert [action.dest for action in actions if not takes(objective, action.dest)] == []
        of_numbers = {
            action.dest
            for action in actions
            if action.nargs in (None, "?", 0)
            and getattr(action.type, "__name__", None) in (None, "int", "float", "string_to_bool")
        }
        of_texts = {action.dest for action in actions} - of_numbers
        assert {key for key in of_numbers if not is_number(objective, key)} == set()
        assert {key for key in of_texts if is_number(objective, key)} == set()
        of_lists = {action.dest for action in actions if action.nargs == "+"} - {"debug", "datasets"}
        assert of_lists == {
            action.dest for action in actions if isinstance(typed(objective, action.dest, "1"), list)
        }
    line = f"trl grpo {BASE} --reward_funcs think_format_reward --reward_weights 0.5 --use_peft"
    made = migrated(f"{line} --lora_target_modules q_proj --run_name 007 --learning_rate 1e-5", tmp_path)
    (tmp_path / "run.yaml").write_text(made.after, encoding="utf-8")
    script, config, model, _, left = parsers["grpo"].parse_args_and_config(
        ["--config", str(tmp_path / "run.yaml"), "--use_cpu=true"], return_remaining_strings=True
    )
    assert script.reward_funcs == ["think_format_reward"]
    assert (config.reward_weights, config.run_name, config.learning_rate) == ([0.5], "007", 1e-5)
    # TRL makes one word of a list of one, as it does for the command line.
    (of_line, *_) = parsers["grpo"].parse_args_and_config(
        [*line.split()[2:], "--use_cpu=true"], return_remaining_strings=True
    )
    assert of_line.reward_funcs == script.reward_funcs
    assert (model.lora_target_modules, left) == ("q_proj", [])


def test_a_run_without_a_counterpart_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text("model_name_or_path: a/b\ndataset_name: c/d\nnum_generations: 4\n", encoding="utf-8")
    assert run(["migrate", "--to", "llamafactory", str(path)]) == 1
    assert "llamafactory has no counterpart of a run with the objective grpo" in capsys.readouterr().err


@pytest.mark.slow
def test_a_recipe_and_its_accelerate_file_describe_the_run_and_train_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step on one process, from what an axolotl file became."""
    monkeypatch.chdir(tmp_path)
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 128,
    }  # fmt: skip
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("model")
    text = AXOLOTL.partition("dp_replicate_size")[0].replace("meta-llama/Llama-3.1-8B", "./model")
    for old, new in {
        "adapter: qlora": "adapter: lora", "load_in_4bit: true\n": "", "4096": "16",
        "tatsu-lab/alpaca": "a.jsonl",
        "max_steps: 77": "max_steps: 1", "warmup_steps: 11": "warmup_steps: 0", "offload_params: true": "",
        "adamw_bnb_8bit": "adamw_torch", "torch_compile: true": "", "flash_attention_2": "sdpa",
        "gradient_accumulation_steps: 5": "gradient_accumulation_steps: 1",
    }.items():  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    Path("train.yaml").write_text(text, encoding="utf-8")
    assert run(["migrate", "--to", "fsdptool", "train.yaml"]) == 2  # two files need a name
    assert run(["migrate", "--to", "fsdptool", "train.yaml", "-o", "run.yaml"]) == 0
    found = describe_path("run.yaml")
    assert found is not None
    assert (found.program, found.method, found.lora_rank, found.lora_dropout) == ("fsdptool", "lora", 24, 0.1)
    assert (found.reshard, found.gradient_checkpointing, found.steps) == (False, "full", 1)
    assert translate(found, "fsdptool").losses == ()
    command = [
        "train",
        "run.yaml",
        "--config",
        "run.accelerate.yaml",
        "--cpu",
        "--processes",
        "1",
        "-o",
        "out",
    ]
    assert run(command) == 0
    assert Path("out/metrics.jsonl").read_text(encoding="utf-8").count("\n") >= 1


@pytest.mark.slow
def test_a_plan_is_written_for_a_program_with_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "model_name_or_path: openai-community/gpt2\ndataset_name: a/b\nmax_length: 128\n"
        "learning_rate: 3.0e-4\n"
        "fsdp: true\nfsdp_config: {version: 2}\nper_device_train_batch_size: 2\n"
    )
    Path("train.yaml").write_text(text, encoding="utf-8")
    options = {"gpu": "L4-24GB", "gpus": 4, "search": False}
    plan = fsdptool.plan("train.yaml", **options)  # type: ignore[arg-type]
    assert plan.inputs.run is not None
    for to in ("axolotl", "llamafactory", "trl", "automodel", "verl"):
        found = described(fsdptool.emit_config(plan=plan, to=to, candidate=plan.candidates[0].id))
        assert (found.program, found.model) == (to, "openai-community/gpt2")
        assert (found.micro_batch, found.sequence_length) == (2, 128)
        assert (found.fsdp, found.learning["learning_rate"]) == (2, 3e-4)
    own = fsdptool.plan("gpt2:small", micro_batch=3, **options)  # type: ignore[arg-type]
    made = described(fsdptool.emit_config(plan=own, to="trl", candidate=own.candidates[0].id))
    assert (made.model, made.micro_batch, made.processes) == ("openai-community/gpt2", 3, 4)
    with pytest.raises(ConfigError, match="--to requires --plan"):
        fsdptool.emit_config("gpt2:small", to="trl")
    assert capsys.readouterr().out == ""


def test_a_value_that_is_no_number_is_told_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: a/b\nlearning_rate: abc\nwarmup_ratio: much\n"
        "max_length: long\nnum_train_epochs: 1e400\nseed: .inf\nper_device_train_batch_size: 0\n"
        "num_processes: 8\n",
        encoding="utf-8",
    )
    for to in TARGETS:
        (made,) = fsdptool.migrate(path, to=to)
        if to == "trl":
            continue
        assert made.refusal is None, made.refusal
        assert "learning_rate must be a number, not 'abc'" in made.notes
        assert "seed must be a number, not 'inf'" in made.notes
        found = describe_run(SourceText(made.after or "", "run.yaml"), program=to)
        assert found is not None
        assert "abc" not in found.learning.values()


def test_a_recipe_adapts_the_named_layers() -> None:
    made = translate(described(AXOLOTL), "fsdptool")
    assert "lora_targets" not in {loss.name for loss in made.losses}
    assert "q_proj" in made.text
