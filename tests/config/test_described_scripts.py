"""Scripts and files as people write them: which command trains, what it is started with, what it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdptool.config.described import describe_path, describe_run
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedMesh, DescribedRun

AXOLOTL = """
base_model: org/Llama-3.1-8B
adapter: lora
lora_target_linear: true
lora_r: 8
datasets: [{path: a, type: alpaca}]
learning_rate: 1e-4
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-4B
step_scheduler: {global_batch_size: 32, local_batch_size: 2}
distributed: {strategy: fsdp2}
dataset: {seq_length: 512}
"""
TRL = """
model_name_or_path: org/Qwen3-4B
dataset_name: d
beta: 0.1
max_length: 512
per_device_train_batch_size: 2
output_dir: o
"""
TITAN = """
[job]
[model]
name = "llama3"
flavor = "8B"
[training]
[optimizer]
[metrics]
"""


def described(text: str) -> DescribedRun:
    """Return the run of a text, which is one."""
    run = describe_run(SourceText(text))
    assert run is not None
    return run


def script(folder: Path, text: str) -> DescribedRun | None:
    """Return the run of a script beside four training files."""
    files = {"axolotl.yml": AXOLOTL, "automodel.yaml": AUTOMODEL, "trl.yaml": TRL, "titan.toml": TITAN}
    for name, content in files.items():
        (folder / name).write_text(content)
    path = folder / "run.sh"
    path.write_text(text)
    return describe_path(path)


def test_the_facts_are_those_of_the_values_that_a_script_assigns() -> None:
    run = described("""
PY=${PY:-python3}
MODEL=${MODEL:-Qwen/Qwen3-8B}
LEN=$((1024 * 2))
ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2   # the second version
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.ppo_mini_batch_size=16
)
ray job submit --working-dir . -- "$PY" -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.max_prompt_length=512 data.max_response_length=$((LEN - 512)) \\
    actor_rollout_ref.rollout.max_num_batched_tokens=$((LEN * 4)) \\
    actor_rollout_ref.model.path="$MODEL" "${ACTOR[@]}" \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. +own_switch=1 \\
    actor_rollout_ref.rollout.n=4 trainer.nnodes=2 trainer.total_epochs=3 "$@"
""")
    assert (run.model, run.family, run.objective, run.fsdp) == ("Qwen/Qwen3-8B", "qwen3:8b", "grpo", 2)
    assert (run.sequence_length, run.micro_batch, run.global_batch, run.processes) == (2048, 2, 64, 16)
    assert (run.epochs, run.problems) == (3.0, ())


@pytest.mark.parametrize("prefix", ["", "CUDA_VISIBLE_DEVICES=0 ", "srun --nodes 2 "])
@pytest.mark.parametrize("interpreter", ["$LAUNCH", "python"])
def test_a_variable_that_a_later_line_starts_is_not_a_command(interpreter: str, prefix: str) -> None:
    held = f'X="{interpreter} -m trl.scripts.sft"\n'
    run = described(f"{held}echo $X\n{prefix}$X --model_name_or_path gpt2 --output_dir o\n")
    assert (run.program, run.model) == ("trl", "gpt2")
    run = described(f'{held[:-2]} --model_name_or_path gpt2 --output_dir o"\neval "$X"\n')
    assert (run.program, run.model) == ("trl", "gpt2")


@pytest.mark.parametrize(
    ("mention", "start"),
    [
        ("echo $CMD", 'sbatch --wrap="$CMD"'),
        ("echo Running: $CMD", 'ssh node --command="$CMD"'),
        ("echo $CMD > log", 'sbatch --wrap="$CMD"'),
        ("DRY=1 echo $CMD", 'sbatch --wrap="$CMD"'),
        ("", "echo $CMD > log"),
    ],
)
def test_a_line_that_prints_a_command_does_not_start_it(mention: str, start: str) -> None:
    held = 'CMD="trl sft --model_name_or_path gpt2 --output_dir o --max_length 64"\n'
    run = described(f"{held}{mention}\n{start}\n")
    assert (run.program, run.model, run.sequence_length) == ("trl", "gpt2", 64)


def test_megatron_is_out_of_scope_and_its_mesh_is_told() -> None:
    run = described(
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer actor_rollout_ref.model.path=a/b"
        " actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 trainer.nnodes=2"
        " actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 data.train_batch_size=8"
        " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
        " actor_rollout_ref.actor.ppo_mini_batch_size=8\n"
    )
    assert (run.fsdp, run.mesh.tp, run.mesh.pp, run.accumulation) == ("none", 4, 2, 4)
    assert any("Megatron is out of scope" in note for note in run.notes)
    assert "config_name" in {item.key for item in run.keys.not_modelled if item.changes == "memory"}


def test_megatron_swift_is_told_and_not_planned() -> None:
    run = described(
        "NPROC_PER_NODE=8 \\\nmegatron rlhf --rlhf_type dpo --load org/Qwen3-4B"
        " --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2"
        " --micro_batch_size 1 --global_batch_size 8 --max_length 512\n"
    )
    assert (run.program, run.family, run.fsdp, run.objective) == ("ms-swift", "qwen3:4b", "none", "dpo")
    assert (run.mesh.tp, run.mesh.pp, run.processes, run.accumulation) == (2, 2, 8, 4)
    assert [item.changes for item in run.keys.not_modelled] == ["memory"]


@pytest.mark.parametrize(
    ("flags", "packing", "joined"),
    [
        ("--packing false", False, False),
        ("--packing False --stage pt", False, False),
        ("--packing true", True, True),
        ("--neat_packing false", False, False),
        ("--neat_packing false --stage pt", True, True),
        ("--packing false --neat_packing true", True, False),
    ],
)
def test_llamafactory_packs_as_the_words_of_a_command_line_say(
    flags: str, packing: bool, joined: bool
) -> None:
    run = described(f"llamafactory-cli train --do_train true --model_name_or_path gpt2 {flags}\n")
    assert (run.packing, run.documents_joined) == (packing, joined)


@pytest.mark.parametrize("word", ["true", "false", "False"])
@pytest.mark.parametrize(
    ("command", "fact", "when_true", "when_false"),
    [
        ("axolotl train axolotl.yml --fsdp_version 2 --fsdp_config.reshard_after_forward", "reshard",
         True, False),
        ("axolotl train axolotl.yml --fsdp_config.offload_params", "cpu_offload", True, False),
        ("axolotl train axolotl.yml --fsdp_config.activation_checkpointing", "gradient_checkpointing",
         "full", "none"),
        ("automodel finetune llm -c automodel.yaml --distributed.reshard_after_forward", "reshard",
         True, False),
        ("trl dpo --model_name_or_path gpt2 --use_peft --lora_dropout 0.1 --disable_dropout", "lora_dropout",
         0.0, 0.1),
        ("llamafactory-cli train --do_train true --model_name_or_path gpt2 --quantization_bit 4"
         " --double_quantization", "quantisation", "bnb nf4, double quantisation, storage = compute dtype",
         "bnb nf4, no double quantisation, storage = compute dtype"),
    ],
)  # fmt: skip
def test_false_on_a_command_line_switches_off(
    tmp_path: Path, word: str, command: str, fact: str, when_true: object, when_false: object
) -> None:
    run = script(tmp_path, f"{command} {word}\n")
    assert getattr(run, fact) == (when_true if word == "true" else when_false)


def test_a_switch_may_be_negated() -> None:
    line = "trl sft --model_name_or_path gpt2 --dataset_name d --no_gradient_checkpointing --use_peft"
    run = described(f"{line} --no_remove_unused_columns\n")
    assert (run.gradient_checkpointing, run.lora_targets, run.problems) == ("none", ("c_attn",), ())


def test_notes_behind_backslashes_do_not_end_a_command() -> None:
    run = described(
        "accelerate launch --num_processes 2 \\  # how many\n  train_cogvideox_lora.py \\ # the script\n"
        "  --pretrained_model_name_or_path org/CogVideoX-2b \\\n  --mixed_precision bf16 --output_dir o\n"
    )
    assert (run.family, run.processes, run.compute_dtype) == ("cogvideox:2b", 2, "bf16")
    assert (run.height, run.width, run.frames) == (480, 720, 49)


def test_the_ranks_of_a_mesh_with_replicas_are_its_product() -> None:
    sizes = "fsdp_config: {version: 2}\ndp_shard_size: 4\ntensor_parallel_size: 2\n"
    assert described(f"{AXOLOTL}{sizes}").processes is None
    assert described(f"{AXOLOTL}{sizes}dp_replicate_size: 2\n").processes == 16


def test_a_trainer_of_reinforcement_is_one_without_its_keys() -> None:
    run = described("poetry run python -m verl.trainer.main_ppo data=my_group trainer.nnodes=1\n")
    assert run.objective == "ppo"
    assert run.problems[0] == "data: my_group is a group of configurations, which is not read"
    sft = described(
        "torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer engine=megatron model.path=a/b\n"
    )
    assert (sft.fsdp, [item.key for item in sft.keys.not_modelled]) == ("none", ["engine"])


@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch -m axolotl.cli.inference axolotl.yml",
        "python -m axolotl.cli.merge_lora axolotl.yml --lora_model_dir out",
        "python scripts/evaluate_model.py --config trl.yaml",
        "swift export --adapters out --merge_lora true",
        "python run_summarization.py --model_name_or_path t5-base --do_predict --output_dir o",
        "python -m verl.trainer.main_generation model.path=a/b data.path=c",
    ],
)
def test_what_uses_or_merges_a_model_is_no_training(tmp_path: Path, line: str) -> None:
    assert script(tmp_path, f"{line}\n") is None


@pytest.mark.parametrize(
    ("line", "program", "processes"),
    [
        ("python -m axolotl.cli.preprocess axolotl.yml\naccelerate launch -m axolotl.cli.train axolotl.yml",
         "axolotl", None),
        ("accelerate launch --num_processes 4 scripts/finetune.py axolotl.yml", "axolotl", 4),
        ("torchrun --nproc-per-node=8 examples/llm_finetune/finetune.py --config automodel.yaml",
         "automodel", 8),
        ("automodel automodel.yaml --nproc-per-node 4", "automodel", 4),
        ("automodel finetune llm -c automodel.yaml", "automodel", None),
        ("!accelerate launch --num_processes 2 run_dpo.py trl.yaml", "trl", 2),
        ("srun --job-name test torchrun --nproc_per_node 2 dpo.py --config trl.yaml", "trl", 2),
        ("accelerate launch --num_processes 2 dpo_5.py --dataset_name=d --model_name_or_path=org/Qwen3-4B",
         "trl", 2),
        ("NGPU=4 CONFIG_FILE=titan.toml ./run_train.sh --training.seq_len 64", "torchtitan", 4),
        ("uv run --with trl dpo.py --config trl.yaml", "trl", None),
        ('"$PYTHON_BIN" -m axolotl.cli.train axolotl.yml', "axolotl", 1),
    ],
)  # fmt: skip
def test_a_launcher_may_name_the_file_in_many_ways(
    tmp_path: Path, line: str, program: str, processes: int | None
) -> None:
    run = script(tmp_path, f"{line}\n")
    assert run is not None
    assert (run.program, run.processes) == (program, processes)
    assert run.family is not None


def test_an_accelerate_file_that_trl_ships_is_known_by_its_name() -> None:
    line = "grpo_vlm.py --model_name_or_path gpt2 --dataset_name d --output_dir o --torch_dtype bfloat16\n"
    run = described(
        f"accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml {line}"
    )
    assert (run.objective, run.compute_dtype, run.processes, run.fsdp) == ("grpo", "bf16", 8, "none")
    assert not run.problems


@pytest.mark.parametrize(
    ("hint", "objective"),
    [("# ORPOTrainer arguments", "orpo"), ("# KTO config", "kto"), ("# DPOTrainer", "dpo"), ("", "dpo")],
)
def test_comments_tell_trainers_of_pairs_apart(hint: str, objective: str) -> None:
    assert described(f"{hint}\n{TRL}").objective == objective


@pytest.mark.parametrize(
    ("script_name", "objective", "length", "joined", "full"),
    [
        ("run_summarization.py --train_file a.json", "sft", 1024, False, False),
        ("run_translation.py --max_source_length 96", "sft", 96, False, False),
        ("run_glue.py --task_name sst2", "classification", 128, False, True),
        ("2b_run_glue.py --pad_to_max_length false", "classification", 128, False, False),
        ("run_clm.py --train_file a.txt", "pretrain", 1024, True, False),
        ("run_mlm.py --line_by_line", "pretrain", 512, False, False),
        ("run_speech_recognition_ctc.py", "sft", None, False, False),
    ],
)
def test_an_example_of_transformers_has_its_own_length_and_objective(
    script_name: str, objective: str, length: int | None, joined: bool, full: bool
) -> None:
    run = described(f"python {script_name} --model_name_or_path a/b --do_train --output_dir o\n")
    assert (run.objective, run.sequence_length) == (objective, length)
    assert (run.packing, run.full_rows) == (joined, full)


def test_flags_of_older_trainers_decide() -> None:
    line = "python run_glue.py --model_name_or_path a/b --output_dir o --do_train"
    assert described(f"{line} --adafactor\n").optimizer == "adafactor"
    run = described(f"{line} --apply_lora --lora_r 16\n")
    assert (run.method, run.lora_rank) == ("lora", 16)
    pictures = described("python run_image_classification.py --dataset_name d --output_dir o --do_train\n")
    assert pictures.family == "vit:base-patch16-224"


def test_a_script_that_trains_beside_the_model_is_not_planned_as_the_model() -> None:
    run = described(
        "accelerate launch train_controlnet.py --pretrained_model_name_or_path org/stable-diffusion-v1-5"
        " --output_dir o --mixed_precision fp16 --resolution 512\n"
    )
    assert (run.base_dtype, run.stored_dtype) == ("fp16", "fp32")
    assert [item.key for item in run.keys.not_modelled] == ["train_controlnet.py"]


def test_the_targets_of_adapters_follow_the_script() -> None:
    flags = "--instance_data_dir d --instance_prompt p --output_dir o --resolution 512"
    run = described(f"accelerate launch train_dreambooth_lora_sd3.py {flags}\n")
    assert "attn.add_q_proj" in (run.lora_targets or ())
    assert described(f"accelerate launch train_dreambooth_lora_sana.py {flags}\n").lora_targets == (
        "to_k", "to_q", "to_v",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("parallelizer: {activation_checkpointing: true}", ("full", None)),
        ("distributed_config: {activation_checkpointing: selective}", ("selective", None)),
        ("flow_matching: {}\noptim: {learning_rate: 1e-4}", ("full", "adamw")),
    ],
)
def test_older_forms_of_automodel_are_read(lines: str, expected: tuple[str, str | None]) -> None:
    text = AUTOMODEL.replace("dataset: {seq_length: 512}", "")
    run = described(f"{text}{lines}\n".replace("distributed: {strategy: fsdp2}", "fsdp: {dp_size: 8}"))
    assert (run.gradient_checkpointing, run.optimizer) == expected


def test_a_mesh_of_the_first_torchtitan_is_read() -> None:
    run = described("""
[job]
dump_folder = "o"
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 2
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
[experimental]
context_parallel_degree = 2
[checkpoint]
enable_checkpoint = false
[float8]
enable_float8_linear = true
""")
    assert (run.mesh.dp_replicate, run.mesh.dp_shard, run.mesh.cp, run.problems) == (2, 4, 2, ())
    assert [item.key for item in run.keys.not_modelled] == ["float8.enable_float8_linear"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--quant_method bnb", "quant_method needs quant_bits"),
        ("--rlhf_type orpo --sequence_parallel_size 2", "orpo has no sequence_parallel_size"),
        ("--packing true --attn_impl sdpa", "packing and padding_free need flash attention"),
        ("--padding_free true", "packing and padding_free need flash attention"),
        ("--packing true --attn_impl flash_attn --quant_method bnb --quant_bits 4", None),
    ],
)
def test_what_stops_ms_swift_is_told(flags: str, problem: str | None) -> None:
    run = described(f"swift rlhf --model Qwen/Qwen3-4B --dataset d {flags}")
    assert [item.partition(" (")[0] for item in run.problems] == ([problem] if problem else [])


def test_what_a_script_writes_and_sources_is_read(tmp_path: Path) -> None:
    """The file that its command trains with, the file of its launch, and the variables in both."""
    (tmp_path / "env.sh").write_text("export WORK=/w RANKS=4\n")
    launch = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: $RANKS\n"
    start = "accelerate launch --config_file $WORK/acc.yaml -m trl.scripts.sft --config run.yaml"
    text = f"source env.sh\ncat > run.yaml <<EOF{TRL}EOF\ncat <<E > $WORK/acc.yaml\n{launch}E\n{start}\n"
    run = script(tmp_path, text)
    assert run is not None
    assert (run.program, run.model) == ("trl", "org/Qwen3-4B")
    assert (run.fsdp, run.processes, run.problems) == (2, 4, ())


@pytest.mark.parametrize("order", [1, -1])
def test_a_group_of_hydra_is_told_wherever_it_stands(order: int) -> None:
    words = ["data=mine", "data.max_length=512", "data.train_batch_size=64", "engine=fsdp"][::order]
    words += ["engine.fsdp_size=4", "model.path=Qwen/Qwen3-4B"]
    run = described(f"python -m verl.trainer.sft_trainer {' '.join(words)}")
    assert (run.sequence_length, run.global_batch, run.mesh.dp_shard) == (512, 64, 4)
    assert run.problems == ("data: mine is a group of configurations, which is not read",)


@pytest.mark.parametrize(
    ("script", "flags", "sides"),
    [
        ("train_text_to_image_lora_sdxl", "", (1024, 1024)),
        ("train_text_to_image_lora_sdxl", "--resolution 768", (768, 768)),
        ("train_text_to_image_lora", "", (512, 512)),
        ("SDXL/train_text_to_image_lora_sdxl", "--height=832 --width=1216", (832, 1216)),
    ],
)
def test_the_size_of_pictures_follows_the_script(script: str, flags: str, sides: tuple[int, int]) -> None:
    run = described(f"accelerate launch {script}.py --pretrained_model_name_or_path $MODEL {flags}")
    assert (run.height, run.width) == sides
    assert run.problems == ("pretrained_model_name_or_path: $MODEL is a variable, which is not resolved",)


LOOP = """
import argparse, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=1)
    args = p.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2PRECISION)
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B")
    loader = DataLoader(dataset(), batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()

main()
"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
"""
TRAINER = """
import sys
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B")
args = TrainingArguments(output_dir="o", per_device_train_batch_size=4, bf16=True)
Trainer(model=model, args=args, train_dataset=None).train()
"""


@pytest.mark.parametrize(
    ("precision", "compute"),
    [("", "bf16"), (', mixed_precision="no"', "fp32"), (", mixed_precision=None", "bf16")],
)
def test_a_command_starts_a_persons_own_loop(tmp_path: Path, precision: str, compute: str) -> None:
    """The launcher shards, and the script's own arguments decide."""
    (tmp_path / "loop.py").write_text(LOOP.replace("PRECISION", precision))
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    start = tmp_path / "start.sh"
    start.write_text("B=4\naccelerate launch --config_file acc.yaml loop.py --batch-size $B\n")
    run = describe_path(start)
    assert run is not None
    assert (run.program, run.family, run.processes, run.fsdp) == ("accelerate", "qwen2.5:1.5b", 8, 2)
    assert (run.micro_batch, run.accumulation, run.global_batch) == (4, 2, 64)
    assert (run.compute_dtype, run.reshard, run.gradient_checkpointing) == (compute, False, "full")
    assert run.wrap_classes == ("Qwen2DecoderLayer",)
    assert run.unresolved == ()
    alone = describe_path(tmp_path / "loop.py")
    assert alone is not None
    assert (alone.micro_batch, alone.fsdp) == (1, None), "the launcher decides"
    start.write_text("accelerate launch --config_file absent.yaml --mixed_precision bf16 loop.py\n")
    unread = describe_path(start)
    assert unread is not None
    assert unread.fsdp is None and unread.unresolved, "what the launcher's file says is not known"


def test_a_batch_script_starts_a_persons_own_trainer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TRAINER)
    (tmp_path / "eval_base.py").write_text(TRAINER)
    job = tmp_path / "job.sbatch"
    job.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=8\npython eval_base.py\n"
        "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE mine.py --unknown 3\n"
    )
    run = describe_path(job)
    assert run is not None
    assert (run.processes, run.nodes, run.fsdp, run.micro_batch, run.global_batch) == (16, 2, "none", 4, 64)


@pytest.mark.parametrize("named", ["/absent/mine.py", "absent.py", "$SCRIPT"])
def test_a_script_that_is_not_there_starts_no_known_run(tmp_path: Path, named: str) -> None:
    (tmp_path / "mine.py").write_text(TRAINER)
    (tmp_path / "start.sh").write_text(f"torchrun --nproc_per_node 2 {named}\n")
    assert describe_path(tmp_path / "start.sh") is None


CLASSES = """
import sys
from transformers import AutoModelForCausalLM
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser
PARSED
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
SFTTrainer(model=model, args=args, train_dataset=None).train()
"""


@pytest.mark.parametrize(
    ("parsed", "words"),
    [
        ("args, model_args = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()", "--config c.yaml"),
        (
            "args, model_args = HfArgumentParser((SFTConfig, ModelConfig)).parse_yaml_file(sys.argv[1])",
            "c.yaml",
        ),
        (
            "args, model_args = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()",
            "--dataset_config ds.json --config c.yaml",
        ),
    ],
)
def test_a_script_fills_its_classes_from_the_file_of_its_command(
    tmp_path: Path, parsed: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(
        CLASSES.replace("PARSED", parsed).replace("import Auto", "import HfArgumentParser, Auto")
    )
    (tmp_path / "c.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-1.5B\nmax_length: 2048\nper_device_train_batch_size: 4\n"
        "bf16: true\nmodel_init_kwargs:\nreport_to: []\nrun_name: --mine\n"
    )
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": "auto"}, "max_length": 1}')
    start = tmp_path / "start.sh"
    more = " --per_device_train_batch_size 2" if "--config" in words else ""
    start.write_text(f"torchrun --nproc_per_node 2 mine.py {words}{more}\n")
    run = describe_path(start)
    assert run is not None
    assert (run.family, run.sequence_length, run.compute_dtype) == ("qwen2.5:1.5b", 2048, "bf16")
    assert (run.micro_batch, run.processes, run.unresolved) == (2 if more else 4, 2, ())


LOADED = """
import argparse, json, os, yaml
from omegaconf import OmegaConf
from pathlib import Path
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--cfg", default="c.yaml")
args = parser.parse_args()
LOAD
model = AutoModelForCausalLM.from_pretrained(NAME)
args = TrainingArguments(output_dir="o", per_device_train_batch_size=SIZE, **cfg["extra"])
Trainer(model=model, args=args, train_dataset=None).train()
"""


@pytest.mark.parametrize(
    ("load", "name", "size"),
    [
        (
            'cfg = yaml.safe_load(open(os.path.join("sub", args.cfg)))',
            'cfg["model"]["name"]',
            "cfg['train']['size']",
        ),
        (
            "cfg = yaml.safe_load((Path('sub') / args.cfg).open())",
            'cfg["model"]["name"]',
            "cfg['train']['size']",
        ),
        ("cfg = yaml.safe_load(open(args.cfg))", 'cfg["model"]["name"]', 'cfg["train"]["size"]'),
        (
            "with open(args.cfg) as f:\n    cfg = yaml.safe_load(f)",
            'cfg["model"]["name"]',
            "cfg['train']['size']",
        ),
        ("cfg = OmegaConf.load(args.cfg)", "cfg.model.name", "cfg.train.size"),
        (
            "cfg = yaml.load(Path(args.cfg).read_text(), yaml.Loader)",
            'cfg["model"]["name"]',
            'cfg["train"].get("size", 1)',
        ),
    ],
)
def test_a_script_loads_its_settings_from_a_file(tmp_path: Path, load: str, name: str, size: str) -> None:
    text = LOADED.replace("LOAD", load).replace("NAME", name).replace("SIZE", size)
    (tmp_path / "mine.py").write_text(text)
    written = "model: {name: Qwen/Qwen2.5-1.5B}\ntrain: {size: 4}\nextra: {bf16: true}\n"
    (tmp_path / "sub").mkdir()
    right, other = (tmp_path / "sub" / "big.yaml", tmp_path / "big.yaml")
    for path, text in zip(
        (right, other) if "sub" in load else (other, right), (written, "model: {}"), strict=True
    ):
        path.write_text(text)
    (tmp_path / "start.sh").write_text("torchrun --nproc_per_node 2 mine.py --cfg big.yaml\n")
    for run in (
        describe_path(tmp_path / "start.sh"),
        describe_path(tmp_path / "mine.py", words=["--cfg", "big.yaml"]),
    ):
        assert run is not None
        assert (run.family, run.micro_batch, run.compute_dtype) == ("qwen2.5:1.5b", 4, "bf16")
        assert run.unresolved == ()
    absent = describe_path(tmp_path / "mine.py")
    assert absent is not None
    assert absent.family is None, "c.yaml is not there: nothing is assumed"


DRAFT = """
recipe: TrainEagle3Recipe
recipe_args: {target_model_name_or_path: meta-llama/Llama-3.2-1B, seq_length: 1024, micro_batch_size: 2}
optimizer: {lr: 1e-4}
"""
RERANKER = AUTOMODEL.replace("TrainFinetuneRecipeForNextTokenPrediction", "TrainCrossEncoderRecipe").replace(
    "dataset: {seq_length: 512}",
    "dataloader: {dataset: {n_passages: 5}, collate_fn: {rerank_max_length: 256}}",
)
WHOLE_DPO = """
model: {_component_: torchtune.models.llama3_2.llama3_2_3b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}
optimizer: {_component_: torch.optim.AdamW}
loss: {_component_: torchtune.rlhf.loss.DPOLoss}
batch_size: 1
gradient_accumulation_steps: 4
dtype: bf16
"""
FORK = """
[job]
[model]
name = "wan"
flavor = "own"
[training]
local_batch_size = 1
img_size = 256
[encoder]
t5_encoder = "google/t5-v1_1-xxl"
[parallelism]
[activation_checkpoint]
"""


def test_a_recipe_that_trains_a_draft_or_a_reranker_is_read_as_what_it_trains() -> None:
    draft = described(DRAFT)
    assert (draft.program, draft.family, draft.objective) == ("automodel", "llama3.2:1b", "distillation")
    assert (draft.sequence_length, draft.micro_batch, draft.fsdp) == (1024, 2, "none")
    assert [(item.key, item.changes) for item in draft.keys.not_modelled] == [("recipe", "memory")]
    text = DRAFT.replace("{lr: 1e-4}", "{_target_: bitsandbytes.optim.AdamW8bit, lr: 1e-4}")
    chosen = described(text.replace("_batch_size: 2", "_batch_size: 2, draft_layers: 3"))
    assert (draft.optimizer, draft.optimizer_state_bits) == ("adamw", 16)
    assert (chosen.optimizer, chosen.optimizer_state_bits) == ("adamw8bit", 8)
    assert ("recipe_args.draft_layers", "memory", None) in {
        (item.key, item.changes, item.side) for item in chosen.keys.not_modelled
    }
    assert describe_run(SourceText("recipe: TrainEagle3Recipe\nrecipe_args: hello\n")) is None
    reranker = described(RERANKER)
    assert (reranker.objective, reranker.sequence_length) == ("classification", 256)
    assert ("dataloader.dataset.n_passages", "more") in {
        (item.key, item.side) for item in reranker.keys.not_modelled
    }


def test_dpo_of_a_whole_model_has_a_distributed_recipe_only() -> None:
    run = described(WHOLE_DPO)
    assert (run.objective, run.fsdp, run.processes) == ("dpo", 2, None)
    adapters = WHOLE_DPO.replace("llama3_2_3b", "lora_llama3_2_3b")
    assert described(adapters).fsdp == "none"


def test_a_forks_model_beside_text_encoders_is_trained_as_diffusion() -> None:
    run = described(FORK)
    assert (run.objective, run.height, run.sequence_length) == ("diffusion", 256, None)
    assert run.wrap_classes is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model_name_or_path: a/b\nstage: grpo\nfinetuning_type: lora\ntemplate: t\ndo_train: true\n",
         "LLaMA-Factory has no stage grpo: it takes pt, sft, rm, ppo, dpo, kto"),
        (f"{TRL}load_in_4bit: true\nuse_peft: false\n",
         "quantised weights without use_peft: transformers refuses to train them"),
        (f"{TRL}torch_dtype: bf16\n",
         "TRL refuses the dtype 'bf16': it takes auto, bfloat16, float16, float32"),
    ],
)  # fmt: skip
def test_words_that_stop_their_program_are_told(text: str, problem: str) -> None:
    assert problem in described(text).problems


def test_a_python_script_names_the_dtypes_of_torch(tmp_path: Path) -> None:
    """What TRL's own flags take does not bind a script that loads the model itself."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\n"
        'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", dtype=torch.half)\n'
        'SFTTrainer(model, args=SFTConfig("out"), train_dataset=data).train()\n'
    )
    (tmp_path / "start.sh").write_text("accelerate launch mine.py\n")
    for name in ("mine.py", "start.sh"):
        run = describe_path(tmp_path / name)
        assert run is not None and (run.program, run.base_dtype) == ("trl", "fp16")
        assert not any("refuses" in problem for problem in run.problems)
    line = "trl sft --model_name_or_path Qwen/Qwen3-4B --dataset_name d --output_dir o --dtype half\n"
    assert any("refuses the dtype 'half'" in problem for problem in described(line).problems)


@pytest.mark.parametrize(
    ("splits", "told"), [("false", False), ("true", True), ('"false"', False), ('"True"', True)]
)
def test_settings_of_the_loader_count_only_where_they_split_batches(splits: str, told: bool) -> None:
    arguments = '"output_dir": "o", "num_train_epochs": 1, "per_device_train_batch_size": 2'
    loader = f'"accelerator_config": {{"split_batches": {splits}, "even_batches": true}}'
    run = described(f'{{{arguments}, "per_gpu_eval_batch_size": null, {loader}}}')
    assert ("accelerator_config" in {item.key for item in run.keys.not_modelled}) == told
    assert not any("per_gpu_eval" in note for note in run.notes)


def test_the_type_of_a_model_says_its_size_where_its_folder_does_not() -> None:
    line = "swift sft --model_type qwen2_5-7b-instruct --model_id_or_path checkpoints/mine --sft_type full"
    assert described(f"{line} --dataset d\n").family == "qwen2.5:7b"
    named = described(f"{line} --dataset d\n".replace("checkpoints/mine", "Qwen/Qwen2.5-3B"))
    assert named.family == "qwen2.5:3b"


def test_a_variable_is_told_once_and_no_default_beside_it() -> None:
    run = described(
        'python -m verl.trainer.main_ppo actor_rollout_ref.model.path="$1"'
        " actor_rollout_ref.actor.use_dynamic_bsz=True"
        ' actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$2" data.max_prompt_length=8\n'
    )
    assert not any("None" in note or "no model is named" in note for note in run.notes)


def test_eight_bits_are_of_adam_only() -> None:
    line = (
        "accelerate launch train_dreambooth_lora_flux.py --pretrained_model_name_or_path a/b --use_8bit_adam"
    )
    assert described(f"{line}\n").optimizer == "adamw8bit"
    adam = described(f"{line} --optimizer adam\n".replace("dreambooth_lora_flux", "cogvideox_lora"))
    assert adam.optimizer_state_bits == 8
    run = described(f"{line} --optimizer Prodigy --prior_generation_precision bf16\n")
    assert (run.optimizer, run.notes) == ("prodigy", ())


def test_the_epochs_of_a_script_are_known_where_its_steps_count() -> None:
    flags = "--pretrained_model_name_or_path a/b --output_dir o --max_train_steps 5 --num_train_epochs 9"
    run = described(f"accelerate launch train_text_to_image_lora.py {flags}\n")
    assert (run.steps, run.epochs) == (5, None) and not any("num_train_epochs" in note for note in run.notes)


def test_a_script_that_is_given_a_rank_trains_adapters() -> None:
    line = "deepspeed train_own.py --model_name a/llama-2-7b --output_dir o --per_device_train_batch_size 4"
    assert described(f"{line}\n").method == "full"
    run = described(f"{line} --lora_r 8 --lora_dropout 0.1 --flash_attn True\n")
    assert (run.method, run.lora_rank, run.lora_dropout) == ("lora", 8, 0.1)
    assert (run.model, run.attention) == ("a/llama-2-7b", "flash_attention_2")
    assert described(f"{line} --lora_r 8 --lora_enable False\n").method == "full"
    assert described(f"{line} --q_lora True\n").method == "qlora"


def test_the_name_of_a_script_or_a_file_says_what_is_minimised(tmp_path: Path) -> None:
    line = "accelerate launch dpo_tune.py --model_name_or_path a/b --output_dir o"
    assert described(f"{line}\n").objective == "dpo"
    text = "model_name_or_path: a/b\nmax_seq_length: 9\nper_device_train_batch_size: 2\nlearning_rate: 1e-5\n"
    for name, objective in (("dpo.yaml", "dpo"), ("grpo_8b.yaml", "grpo"), ("full.yaml", "sft")):
        folder = tmp_path / "recipes"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text}use_flash_attn: true\n")
        run = describe_path(folder / name)
        assert run is not None and (run.objective, run.attention) == (objective, "flash_attention_2")
    (tmp_path / "sft").mkdir()
    for name, objective in (("dpo.yaml", "dpo"), ("full.yaml", "sft")):
        (tmp_path / "sft" / name).write_text(text)
        run = describe_path(tmp_path / "sft" / name)
        assert run is not None and run.objective == objective, "the name of the file counts first"


def test_megatron_divides_an_sft_run_of_verl_as_its_engine_says() -> None:
    run = described(
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer engine=megatron model.path=Qwen/Qwen3-8B"
        " data.train_batch_size=32 data.micro_batch_size_per_gpu=2 data.use_dynamic_bsz=False"
        " engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2\n"
    )
    assert (run.mesh.tp, run.mesh.pp, run.accumulation, run.wrap_classes) == (2, 2, 8, None)


def test_what_lora_leaves_out_in_verl_is_told() -> None:
    for command, model in (
        (
            "verl.trainer.main_ppo actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.",
        ),
        ("verl.trainer.fsdp_sft_trainer data.micro_batch_size_per_gpu=1", ""),
    ):
        key = f"{model}model.exclude_modules"
        run = described(f"python -m {command} {model}model.lora_rank=8 {key}='.*visual.*'\n")
        assert [item.side for item in run.keys.not_modelled if item.key == key] == ["less"]


def test_optimizers_of_flashoptim_keep_states_of_eight_bits() -> None:
    text = f"{AUTOMODEL}optimizer: {{_target_: flashoptim.FlashAdamW, master_weight_bits: 24}}\n"
    run = described(f"{text}loss_fn: {{fp32_upcast: false}}\n")
    told = {item.key: item.side for item in run.keys.not_modelled}
    assert run.optimizer_state_bits == 8
    assert told["optimizer.master_weight_bits"] == "more" and told["loss_fn.fp32_upcast"] == "less"
    assert described(text.replace("24", "24, quantize: false")).optimizer_state_bits == 16
    told = {
        item.key: item.side for item in described(f"{text}loss_fn: {{fp32_upcast: true}}\n").keys.not_modelled
    }
    assert "loss_fn.fp32_upcast" not in told


def test_a_configuration_of_torchtitan_in_python_leaves_the_run_open() -> None:
    run = described("NGPU=4 MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --training.steps 9\n")
    assert (run.processes, run.micro_batch, run.sequence_length) == (4, None, None)
    assert any("llama3_8b is not read" in problem for problem in run.problems)


def test_trls_script_for_images_cuts_nothing() -> None:
    line = "accelerate launch examples/scripts/sft_vlm.py --model_name_or_path a/b --dataset_name d"
    assert described(f"{line}\n").sequence_length is None
    assert described(f"{line} --max_length 9\n").sequence_length == 9


def test_the_accelerate_file_of_a_trl_file_says_how_it_is_launched(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("""
distributed_type: FSDP
num_processes: 16
num_machines: 2
fsdp_config: {fsdp_version: 2, fsdp_transformer_layer_cls_to_wrap: "A,B", fsdp_activation_checkpointing: true}
parallelism_config: {parallelism_config_dp_shard_size: 8, parallelism_config_cp_size: 2}
""")
    text = f"{TRL}gradient_checkpointing: false\n"
    (tmp_path / "run.yaml").write_text(f"{text}accelerate_config: own.yaml\n")
    run = describe_path(tmp_path / "run.yaml")
    assert run is not None and (run.processes, run.nodes, run.fsdp) == (16, 2, 2)
    assert (run.wrap_classes, run.gradient_checkpointing) == (("A", "B"), "full")
    assert (run.mesh.dp_shard, run.mesh.cp, run.global_batch) == (8, 2, 16)
    assert described(f"{text}accelerate_config: fsdp2\n").processes == 8
    run = described(
        "accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml sft.py --packing\n".replace(
            "--packing", "--model_name_or_path a/b --dataset_name d --output_dir o"
        )
    )
    assert (run.fsdp, run.processes) == (2, 8)


def test_the_launch_compiles_what_accelerate_prepares(tmp_path: Path) -> None:
    line = "accelerate launch --dynamo_backend=inductor run_clm.py --model_name_or_path gpt2 --output_dir o"
    assert described(f"{line}\n").compile is True
    assert described(f"{line}\n".replace("inductor", "no")).compile is False
    named = line.replace("--dynamo_backend=inductor", "--config_file acc.yaml")
    for backend, compiles in (("dynamo_backend: NO", False), ("backend: INDUCTOR", True), ("a: 1", False)):
        (tmp_path / "acc.yaml").write_text(f"dynamo_config: {{{backend}}}\nnum_processes: 4\n")
        (tmp_path / "run.sh").write_text(f"{named}\n")
        run = describe_path(tmp_path / "run.sh")
        assert run is not None and (run.compile, run.processes) == (compiles, 4), backend
    (tmp_path / "own.py").write_text("""
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
own = OmegaConf.create({"model": "gpt2", "steps": 4})
accelerator = Accelerator(gradient_accumulation_steps=own.steps)
model = AutoModelForCausalLM.from_pretrained(own.model)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for batch in rows:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
""")
    (tmp_path / "run.sh").write_text("accelerate launch --num_processes 2 --dynamo_backend inductor own.py\n")
    run = describe_path(tmp_path / "run.sh")
    assert run is not None and (run.model, run.accumulation, run.compile) == ("gpt2", 4, True)


def test_a_script_for_adapters_says_so_by_its_name() -> None:
    line = "--model_name_or_path a/b --output_dir o --per_device_train_batch_size 1"
    run = described(f"torchrun --nproc_per_node 2 -m lora-own {line} --rank 64\n")
    assert (run.method, run.lora_rank) == ("lora", 64)
    assert described(f"python qlora.py {line}\n").method == "qlora"
    assert described(f"python qlora.py {line} --bits 16\n").method == "lora"


def test_verl_shares_a_model_within_groups_and_names_its_optimizer() -> None:
    actor = "actor_rollout_ref.actor"
    run = described(
        f"python -m verl.trainer.main_ppo {actor}.ppo_micro_batch_size_per_gpu=1 trainer.nnodes=2"
        f" {actor}.fsdp_config.fsdp_size=8 {actor}.fsdp_config.model_dtype=bfloat16"
        f" {actor}.optim.optimizer=AdamW8bit {actor}.optim.optimizer_impl=torchao.optim"
        " actor_rollout_ref.model.path=a/b actor_rollout_ref.model.enable_activation_offload=True\n"
    )
    assert (run.mesh.dp_replicate, run.mesh.dp_shard) == (2, 8)
    assert (run.optimizer, run.optimizer_state_bits, run.activation_offloading) == ("adamw8bit", 8, True)
    line = "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer model.path=a/b engine.fsdp_size=4"
    assert described(f"{line}\n").mesh == DescribedMesh(1, 4)


@pytest.mark.parametrize(
    ("size", "ulysses", "mesh"),
    [
        (4, 2, DescribedMesh(2, 2, cp=2)),
        (8, 2, DescribedMesh(1, 4, cp=2)),
        (16, 2, DescribedMesh(1, -1, cp=2)),
        (-1, 4, DescribedMesh(1, -1, cp=4)),
        (2, 4, DescribedMesh(cp=4)),
        (3, 1, DescribedMesh(cp=1)),
    ],
)
def test_the_mesh_of_verl_has_the_ranks_of_the_run(size: int, ulysses: int, mesh: DescribedMesh) -> None:
    actor = "actor_rollout_ref.actor"
    run = described(
        f"python -m verl.trainer.main_ppo {actor}.fsdp_config.fsdp_size={size} trainer.n_gpus_per_node=8"
        f" {actor}.ulysses_sequence_parallel_size={ulysses} {actor}.ppo_micro_batch_size_per_gpu=1\n"
    )
    assert (run.processes, run.mesh) == (8, mesh)
