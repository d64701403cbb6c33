"""Runs that a launch, an earlier version or a name completes: ranks, renamed keys, stored formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_described_runs import AXOLOTL, described

from fsdptool import plan
from fsdptool.config import read_settings
from fsdptool.config.described import describe_path, describe_run
from fsdptool.config.migrate import migrate_file
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText

SWIFT = "swift sft --model Qwen/Qwen3-8B --dataset d --max_length 1024 --per_device_train_batch_size 2"
ONE, FOUR = "CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=0,1,2,3"
FACTORY = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: d\n"


@pytest.mark.parametrize(
    ("command", "processes", "nodes"),
    [
        ("CUDA_VISIBLE_DEVICES=2,3,5 llamafactory-cli train run.yaml", 3, 1),
        ("CUDA_VISIBLE_DEVICES=2 llamafactory-cli train run.yaml", 1, 1),
        ("export CUDA_VISIBLE_DEVICES=0,1\nNNODES=4 llamafactory-cli train run.yaml", 8, 4),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=2 llamafactory-cli train run.yaml", 2, 1),
        ("llamafactory-cli train run.yaml", None, None),
        ("NPROC_PER_NODE=8 NNODES=$WORLD llamafactory-cli train run.yaml", None, None),
        ("python -m llamafactory.cli train run.yaml", None, None),
        ("CUDA_VISIBLE_DEVICES=0,1 python -m llamafactory.cli train run.yaml", 2, 1),
        ("CUDA_VISIBLE_DEVICES=0,1 python src/train.py run.yaml", 1, 1),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed src/train.py run.yaml", 2, 1),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 1 src/train.py run.yaml", 1, 1),
        ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node=gpu --nnodes=2 src/train.py run.yaml", 6, 2),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch src/train.py run.yaml", 2, 1),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 1 src/train.py run.yaml", 1, None),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file a.yaml src/train.py run.yaml", None, None),
        (f"{FOUR} llamafactory-cli train run.yaml\n{ONE} llamafactory-cli export e.yaml", 4, 1),
        (f"{ONE} python prep.py\nllamafactory-cli train run.yaml", None, None),
        (f'if [ -n "$DEBUG" ]; then {ONE} llamafactory-cli train run.yaml; fi', 1, 1),
        (
            f'export {FOUR}\nif [ "$1" = one ]; then export {ONE}; fi\nllamafactory-cli train run.yaml',
            None,
            None,
        ),
        (f'export {FOUR}\nif [ -n "$1" ]; then export {ONE}; fi\nllamafactory-cli train run.yaml', 4, 1),
        (f"export {ONE}; unset CUDA_VISIBLE_DEVICES\nllamafactory-cli train run.yaml", None, None),
        (f"(export {ONE}; python prep.py)\n{FOUR} llamafactory-cli train run.yaml", 4, 1),
        (f"one() {{ export {ONE}; }}\n{FOUR} llamafactory-cli train run.yaml", 4, 1),
        (f"one() {{ export {ONE}; }}\none\nllamafactory-cli train run.yaml", 1, 1),
        (f"export {FOUR}\nexport NPROC_PER_NODE=$1\nllamafactory-cli train run.yaml $X", None, None),
        (f"export {FOUR}; export NPROC_PER_NODE=$N\nllamafactory-cli train run.yaml", None, None),
        ("NPROC_PER_NODE=8 NNODES=-2 llamafactory-cli train run.yaml", None, None),
        (f"export {FOUR}\ntorchrun --nnodes $NODES --nproc_per_node gpu src/train.py run.yaml", None, None),
        (f"{FOUR} NNODES=3 torchrun --nproc_per_node gpu src/train.py run.yaml", 4, 1),
        (f"{FOUR} accelerate launch --multi_gpu --num_machines 2 src/train.py run.yaml", 4, 2),
        (f"{FOUR} NNODES=2 accelerate launch src/train.py run.yaml", 4, 1),
        (f"{FOUR} accelerate launch $ACC_ARGS src/train.py run.yaml", None, None),
        (f"{FOUR} accelerate launch --cpu src/train.py run.yaml", None, None),
        (f"{FOUR} deepspeed -i localhost:0,1 src/train.py run.yaml", 2, 1),
        (f"{FOUR} deepspeed -e localhost:0 src/train.py run.yaml", None, 1),
        (f"{FOUR} deepspeed --num_nodes 2 src/train.py run.yaml", None, 2),
        ("CUDA_VISIBLE_DEVICES=YOUR_GPUS llamafactory-cli train run.yaml", None, None),
        ("CUDA_VISIBLE_DEVICES=0-7 llamafactory-cli train run.yaml", None, None),
        ("CUDA_VISIBLE_DEVICES=0,1,-1,3 llamafactory-cli train run.yaml", None, None),
        ("CUDA_VISIBLE_DEVICES=GPU-8932f937,MIG-1a llamafactory-cli train run.yaml", 2, 1),
    ],
)
def test_the_gpus_that_a_script_shows_to_a_launcher_are_its_ranks(
    tmp_path: Path, command: str, processes: int | None, nodes: int | None
) -> None:
    (tmp_path / "run.yaml").write_text(FACTORY)
    script = tmp_path / "run.sh"
    script.write_text(f"{command}\n")
    run = describe_path(script)
    assert run is not None
    assert (run.processes, run.nodes) == (processes, nodes)


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--num-processes 4", 4),
        ("--launcher torchrun -- --nproc_per_node=2 --nnodes=3", 6),
        ("--launcher torchrun -- --nproc_per_node=2 --nnodes=$NN", None),
        ("--launcher torchrun", 1),
        ("--launcher python", 1),
        ("--use_ray true --ray_num_workers 4", 4),
        ("", 5),
    ],
)
def test_axolotl_hands_flags_of_its_launcher_on(tmp_path: Path, flags: str, processes: int | None) -> None:
    (tmp_path / "run.yaml").write_text(AXOLOTL)
    script = tmp_path / "run.sh"
    script.write_text(f"CUDA_VISIBLE_DEVICES=0,1,2,3,4 axolotl train run.yaml {flags}\n")
    run = describe_path(script)
    assert run is not None
    assert run.processes == processes
    assert not any("num_processes" in note or "launcher" in note for note in run.notes)


def test_swift_without_ranks_divides_the_layers_of_one_process() -> None:
    one = described(f"CUDA_VISIBLE_DEVICES=0,1 {SWIFT}\n")
    assert (one.processes, one.accumulation) == (1, 8)
    assert [item.side for item in one.keys.not_modelled if item.key == "CUDA_VISIBLE_DEVICES"] == ["less"]
    two = described(f"CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 {SWIFT}\n")
    assert two.processes == 2
    assert not any(item.key == "CUDA_VISIBLE_DEVICES" for item in two.keys.not_modelled)
    other = described(f"{FOUR} NPROC_PER_NODE=4 {SWIFT}\nCUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 swift deploy\n")
    assert other.processes == 4
    assert not any(item.key == "CUDA_VISIBLE_DEVICES" for item in other.keys.not_modelled)


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        (f"{FOUR} NPROC_PER_NODE=$(nvidia-smi -L | wc -l)", None),
        (f"NNODES=$N NPROC_PER_NODE=8 {ONE}", None),
        ("NNODES=2 NPROC_PER_NODE=8", 16),
        ("NNODES=2", 2),
        ("NNODES=-2 NPROC_PER_NODE=8", None),
    ],
)
def test_the_ranks_of_swift_are_open_where_a_variable_is(variables: str, processes: int | None) -> None:
    assert described(f"{variables} {SWIFT}\n").processes == processes


def test_names_that_only_swift_2_has_are_read_as_it_reads_them() -> None:
    run = described(
        "swift sft --model_type qwen-7b-chat --dataset x --batch_size 2 --lora_target_modules ALL\n"
    )
    assert (run.program_version, run.micro_batch, run.lora_targets) == ("2.x", 2, "all-linear")
    file = described(
        "model_id_or_path: org/m\nbatch_size: 2\ndataset: d\nmax_length: 64\nlora_rank: 4\ndtype: bf16\n"
        "num_train_epochs: 1\ntorch_dtype: bfloat16\n"
    )
    assert (file.program_version, file.micro_batch) == ("2.x", 2)


@pytest.mark.parametrize("module", ["swift/cli/_megatron/sft.py", "-m swift.cli._megatron.sft"])
def test_megatron_swift_is_known_behind_other_launchers(module: str) -> None:
    run = described(f"torchrun --nproc_per_node 4 {module} --model org/m --micro_batch_size 2 --lr 1e-5\n")
    assert (run.micro_batch, run.processes) == (2, 4)
    assert any("Megatron is out of scope" in note for note in run.notes)


def test_a_list_is_no_model_of_swift() -> None:
    assert described("model: [a, b]\ntuner_type: lora\ndataset: d\n").model is None


def test_keys_of_earlier_versions_of_swift_decide_the_same() -> None:
    run = described(
        "python llm_sft.py --model_type llama3-8b-instruct --sft_type lora --dtype AUTO --batch_size 2"
        " --quantization_bit 4 --lora_target_modules ALL --lora_dropout_p 0.1 --use_flash_attn true"
        " --train_dataset_sample 500 --dataset d\n"
    )
    assert (run.program, run.program_version, run.method) == ("ms-swift", "2.x", "qlora")
    assert (run.micro_batch, run.lora_targets, run.lora_dropout) == (2, "all-linear", 0.1)
    assert (run.sequence_length, run.attention, run.problems) == (2048, "flash_attention_2", ())
    assert {"batch_size", "quantization_bit", "lora_target_modules"} <= {*run.keys.used}
    third = described(f"{SWIFT} --train_type full --use_liger true --enable_cache true\n")
    assert (third.program_version, third.fused_loss, third.problems) == ("3.x", "liger", ())


@pytest.mark.parametrize(
    ("flags", "objective"),
    [
        ("--task_type seq_cls --num_labels 3", "classification"),
        ("--task_type embedding", "embedding"),
        ("--task_type generative_reranker", "reranker"),
        ("--task_type causal_lm", "sft"),
    ],
)
def test_the_task_of_swift_is_the_objective(flags: str, objective: str) -> None:
    assert described(f"{SWIFT} {flags}\n").objective == objective


def test_an_accelerate_file_that_is_only_called_fsdp2_is_not_swifts() -> None:
    run = described(
        f"accelerate launch --config_file my/fsdp2.json swift/cli/{SWIFT[6:].replace('sft', 'sft.py', 1)}\n"
    )
    assert run.fsdp is None
    assert any("my/fsdp2.json is not read" in item for item in run.problems)


@pytest.mark.parametrize(
    ("model", "method", "quantisation"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "lora", "awq int4"),
        ("org/Meta-Llama-3-8B-Instruct-GPTQ-Int8", "lora", "gptq int8"),
        ("unsloth/llama-3-8b-Instruct-bnb-4bit", "qlora", "bnb nf4"),
        ("/data/models/Qwen3-8B-FP8/", "lora", "fp8"),
        ("Qwen/Qwen2.5-7B-Instruct", "lora", "none"),
    ],
)
def test_a_name_says_that_its_checkpoint_is_quantised(model: str, method: str, quantisation: str) -> None:
    run = described(FACTORY.replace("Qwen/Qwen3-8B", model))
    assert (run.method, run.quantisation) == (method, quantisation)
    assert any("stored in" in note for note in run.notes) == (quantisation != "none")
    full = described(FACTORY.replace("Qwen/Qwen3-8B", model).replace("lora", "full"))
    assert full.quantisation == "none"


def test_arguments_in_a_variable_that_is_not_known_are_told_and_no_value() -> None:
    run = described(f'{SWIFT} --lora_rank 4 "${{MORE[@]}}" --num_train_epochs 2 $EXTRA_ARGS\n')
    assert (run.model, run.lora_rank, run.epochs) == ("Qwen/Qwen3-8B", 4, 2.0)
    assert [item.partition(":")[0] for item in run.unresolved] == ["${MORE[@]}", "$EXTRA_ARGS"]
    held = described(f"{SWIFT} --model_kwargs $MODEL_ARGS\n")
    assert held.unresolved == ()


def test_what_llamafactory_reads_elsewhere_is_known() -> None:
    ray = described(
        f"{FACTORY}ray_num_workers: 4\nplacement_strategy: PACK\nresources_per_worker: {{GPU: 1}}\n"
    )
    assert (ray.processes, ray.problems) == (4, ())
    assert described(f"{FACTORY}predict_with_generate: true\ngeneration_max_length: 9\n").problems == ()
    saved = described(f"{FACTORY}additional_target: embed_tokens,lm_head\n")
    assert saved.lora_modules_to_save == ("embed_tokens", "lm_head")
    hqq = described(f"{FACTORY}quantization_bit: 4\nquantization_method: hqq\n")
    assert hqq.quantisation == "hqq int4"
    assert "quantization_method" in {item.key for item in hqq.keys.not_modelled}
    mesh = described(
        f"{FACTORY}tensor_model_parallel_size: 2\nsequence_parallel: true\nmoe_grouped_gemm: true\n"
    )
    assert (mesh.mesh.tp, mesh.problems) == (2, ())
    assert "tensor_model_parallel_size" in {item.key for item in mesh.keys.not_modelled}


@pytest.mark.parametrize(
    ("keys", "method", "quantisation", "told"),
    [
        ("peft_config: {name: freeze, freeze_trainable_layers: 2}", "freeze", "none", "peft_config"),
        ("dist_config: {name: fsdpturbo, ep_size: 4, ep_dispatcher: eager}", "full", "none",
         "dist_config.ep_modules"),
        ("mtp_config: {name: mtp, num_layers: 1}", "full", "none", "mtp_config"),
        ("peft_config: {name: lora, r: 8}\nquant_config: {name: bnb, quantization_bit: 8}",
         "lora8bit", "bnb int8", None),
        ("peft_config: {name: null}", "full", "none", None),
        ("dist_config: {name: deepspeed, config_file: z3.json}", "full", "none", "dist_config.config_file"),
    ],
)  # fmt: skip
def test_files_of_llamafactory_v1_tell_their_method(
    keys: str, method: str, quantisation: str, told: str | None
) -> None:
    run = described(f"model: Qwen/Qwen3-8B\nmodel_class: llm\ncutoff_len: 512\ntrain_dataset: d\n{keys}\n")
    assert (run.method, run.quantisation, run.problems) == (method, quantisation, ())
    assert [item.key for item in run.keys.not_modelled] == ([told] if told else [])


@pytest.mark.parametrize(
    ("command", "keys", "objective"),
    [
        ("llamafactory-cli sft", "model_class: llm", "sft"),
        ("lmf dpo", "model_class: llm", "dpo"),
        ("llamafactory-cli rm", "model_class: llm", "reward"),
        ("llamafactory-cli train", "model_class: cls", "reward"),
    ],
)
def test_commands_of_llamafactory_v1_are_its_objectives(
    tmp_path: Path, command: str, keys: str, objective: str
) -> None:
    (tmp_path / "v1.yaml").write_text(f"model: org/model\n{keys}\ntrain_dataset: d\ncutoff_len: 64\n")
    script = tmp_path / "run.sh"
    script.write_text(f"USE_V1=1 CUDA_VISIBLE_DEVICES=0,1 {command} v1.yaml\n")
    run = describe_path(script)
    assert run is not None
    assert (run.objective, run.processes) == (objective, 2)


def test_files_of_megatron_swift_are_read_as_its_command_is() -> None:
    text = "model: org/model\ntuner_type: full\nmicro_batch_size: 2\nglobal_batch_size: 16\nlr: 1e-5\n"
    run = described(f"{text}max_length: 64\ntensor_model_parallel_size: 2\n")
    assert (run.program, run.micro_batch, run.global_batch, run.mesh.tp) == ("ms-swift", 2, 16, 2)
    assert run.problems == ()
    role = "train: {gpus: 4, tuner_type: lora, pipeline_model_parallel_size: 2}\nrollout: {gpus: 4}\n"
    ray = described(text.replace("tuner_type: full", "rlhf_type: grpo") + role)
    assert (ray.objective, ray.method, ray.mesh.pp, ray.processes) == ("grpo", "lora", 2, 4)


def test_the_workers_of_ray_are_the_ranks_of_axolotl() -> None:
    assert described(f"{AXOLOTL}use_ray: true\nray_num_workers: 4\n").processes == 4
    assert described(f"{AXOLOTL}ray_num_workers: 4\n").processes is None


def test_a_teacher_and_gradients_of_every_micro_batch_are_told_of_axolotl() -> None:
    run = described(
        f"{AXOLOTL}gkd_trainer: true\ngkd_teacher: org/teacher\ngkd_lmbda: 1.0\n"
        "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"
    )
    assert run.objective == "distillation"
    assert {"gkd_teacher", "accelerator_config"} <= {item.key for item in run.keys.not_modelled}
    plain = described(f"{AXOLOTL}accelerator_config: {{split_batches: false}}\nrl: ipo\n")
    assert "accelerator_config" in plain.keys.no_effect
    assert plain.objective == "dpo"


def test_parts_of_a_model_that_torchtune_freezes_are_told() -> None:
    text = (
        "model: {_component_: torchtune.models.llama3_2_vision.%s, decoder_trainable: %s,"
        " encoder_trainable: %s, use_dora: true}\n"
        "optimizer: {_component_: torch.optim.AdamW}\nbatch_size: 1\n"
        "tokenizer: {_component_: t, max_seq_len: 512}\n"
    )
    whole = described(text % ("llama3_2_vision_11b", "false", "true"))
    assert {item.key: item.side for item in whole.keys.not_modelled} == {
        "model.decoder_trainable": "less", "model.use_dora": "more",
    }  # fmt: skip
    lora = described(text % ("lora_llama3_2_vision_11b", "frozen", "full"))
    assert {item.key: item.side for item in lora.keys.not_modelled} == {
        "model.decoder_trainable": "less", "model.use_dora": "more",
    }  # fmt: skip
    assert any("encoder_trainable: full stops torchtune" in problem for problem in lora.problems)


def test_a_settings_file_that_a_script_writes_keeps_the_lines_of_its_values(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "STAMP=$(date +%s)\nRANK=8\nFILE=/tmp/run-${STAMP}.yaml\n"
        'DATA="  - path: a\n    type: alpaca"\n'
        "cat > $FILE <<EOF\n# it's a comment with one quote\nbase_model: org/Llama-3.1-8B (mine)\n"
        "datasets:\n$DATA\nadapter: lora\nlora_r: ${RANK}\nmicro_batch_size: $((RANK / 4))\nEOF\n"
        "axolotl train $FILE\n"
    )
    run = describe_path(script)
    assert run is not None
    assert (run.model, run.lora_rank, run.micro_batch) == ("org/Llama-3.1-8B (mine)", 8, 2)
    assert {item.code for item in read_settings(script).diagnostics} == {"FSD113"}


@pytest.mark.parametrize("recipe", ["full_finetune_distributed", "-m mine.full_finetune_distributed"])
def test_a_recipe_of_torchtune_counts_the_nodes_of_its_command(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {_component_: torchtune.models.qwen2_5.qwen2_5_3b}\n"
        "optimizer: {_component_: torch.optim.AdamW}\nbatch_size: 2\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        "srun tune run --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d"
        f" {recipe} --config run.yaml dtype=bf16\n"
    )
    run = describe_path(script)
    assert run is not None
    assert (run.processes, run.fsdp, run.global_batch) == (16, 2, 32)
    assert not any("unknown keys" in note for note in run.notes)


@pytest.mark.parametrize(
    ("flags", "processes", "nodes"),
    [
        ("--nnodes $NNODES --nproc_per_node 8", None, None),
        ("--nnodes 1:2 --nproc_per_node 8", 16, 2),
        ("--nnodes 2 --nproc_per_node gpu", 4, 2),
        ("--nnodes=2 --nproc_per_node 4 --local_addr here", 8, 2),
    ],
)
def test_torchtune_takes_the_values_of_torchrun(
    tmp_path: Path, flags: str, processes: int | None, nodes: int | None
) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {_component_: torchtune.models.qwen2_5.qwen2_5_3b}\n"
        "optimizer: {_component_: torch.optim.AdamW}\nbatch_size: 2\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        f"CUDA_VISIBLE_DEVICES=0,1 tune run {flags} full_finetune_distributed --config run.yaml\n"
    )
    run = describe_path(script)
    assert run is not None
    assert (run.processes, run.nodes) == (processes, nodes)
    assert not any("unknown keys" in note for note in run.notes)
    assert not any("must be" in problem for problem in run.problems)


@pytest.mark.parametrize(
    ("variables", "flags", "processes"),
    [
        ("USE_RAY=1 CUDA_VISIBLE_DEVICES=0,1", "--ray_num_workers 8", 8),
        ("CUDA_VISIBLE_DEVICES=0,1", "--ray_num_workers 8", 2),
        ("USE_RAY=1 CUDA_VISIBLE_DEVICES=0,1", "--ray_num_workers $W", None),
    ],
)
def test_ray_alone_decides_where_its_variable_switches_it_on(
    variables: str, flags: str, processes: int | None
) -> None:
    text = "llamafactory-cli train --stage sft --do_train --model_name_or_path Qwen/Qwen2.5-7B --dataset x"
    assert described(f"{variables} {text} --finetuning_type full {flags}\n").processes == processes


def test_problems_name_the_key_as_it_is_written() -> None:
    run = described("model_id_or_path: org/m\nsft_type: lora\ndataset: d\nbatch_size: two\n")
    assert any(problem.startswith("batch_size must be") for problem in run.problems)
    assert "batch_size" in {item.key for item in run.keys.not_modelled}


def test_comments_of_an_array_open_no_quote() -> None:
    run = described(
        "CMD=(\n  swift/cli/sft.py\n  --model Qwen/Qwen3-8B --dataset a#5  # it's small\n"
        "  # the tool's ``delete``\n  --tuner_type lora --lora_rank 4\n)\n"
        "printf '%s ' now\ntorchrun --nproc_per_node 2 \"${CMD[@]}\" $RESUME_ARGS\n"
    )
    assert (run.program, run.lora_rank, run.processes, run.unresolved) == ("ms-swift", 4, 2, ())


@pytest.mark.parametrize(
    ("flags", "compute", "stops"),
    [
        ("", "bf16", False),
        ("--torch_dtype float32", "fp16", False),
        ("--torch_dtype float32 --fp16 false", "fp32", False),
        ("--torch_dtype float32 --bf16 true --fp16 false", "bf16", False),
        ("--torch_dtype float16 --bf16 false", "fp16", False),
        ("--torch_dtype bfloat16 --fp16 true", "fp16", True),
    ],
)
def test_switches_of_swift_decide_beside_the_dtype_of_weights(flags: str, compute: str, stops: bool) -> None:
    run = described(f"{SWIFT} {flags}\n")
    assert run.compute_dtype == compute
    assert any("both on" in item for item in run.problems) == stops


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"{FACTORY}freeze_vision_tower: %s\n", "freeze_vision_tower"),
        (f"{SWIFT} --tuner_type lora --freeze_vit %s\n", "freeze_vit"),
    ],
)
def test_a_frozen_tower_of_a_model_that_is_trained_whole_is_told(text: str, key: str) -> None:
    def told(model: str, switch: str | None, method: str = "full") -> bool:
        line = next(part for part in (f"{key}: %s", f"--{key} %s") if part in text)
        written = text.replace(line, "" if switch is None else line % switch)
        run = described(written.replace("Qwen/Qwen3-8B", model).replace("lora", method))
        return key in {item.key for item in run.keys.not_modelled}

    seeing, text_only, unknown = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-8B", "org/own-model"
    assert told(seeing, "true")
    assert told(seeing, None)
    assert told(unknown, "true")
    assert not told(seeing, "false")
    assert not told(seeing, "true", "lora")
    assert not told(unknown, None)
    assert not any(told(text_only, switch) for switch in ("true", "false", None))


def test_a_check_of_a_variable_is_no_key_of_yaml() -> None:
    text = """set -euo pipefail
: "${DATA:?give DATA}"
trl sft --model_name_or_path Qwen/Qwen3-8B --dataset_name "$DATA" --max_length 3072
"""
    run = describe_run(SourceText(text, "start.sh"))
    assert run is not None
    assert (run.model, run.sequence_length) == ("Qwen/Qwen3-8B", 3072)


@pytest.mark.parametrize(
    ("flags", "length", "told"),
    [
        ("--model_name_or_path lmsys/vicuna-7b-v1.5 --data_path a.json", 512, set()),
        ("--model_id Qwen/Qwen2.5-VL-7B-Instruct --data_path a.json --freeze_llm True", None, {"freeze_llm"}),
        ("--model_name_or_path a/b --tune_mm_mlp_adapter True", 512, {"tune_mm_mlp_adapter"}),
        ("--model_name_or_path a/b --freeze_backbone False --vision_tower c/d", 512, {"vision_tower"}),
    ],
)
def test_scripts_of_others_have_no_length_but_tell_what_they_freeze(
    flags: str, length: int | None, told: set[str]
) -> None:
    text = f"torchrun --nproc_per_node 2 other/train.py {flags} --bf16 True --output_dir o"
    run = describe_run(SourceText(f"{text} --per_device_train_batch_size 1 --learning_rate 1e-5", "start.sh"))
    assert run is not None
    assert run.sequence_length == length
    assert {item.key for item in run.keys.not_modelled} == told


def test_a_variable_beside_a_file_of_accelerate_is_not_judged(tmp_path: Path) -> None:
    file = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nnum_machines: 1\n"
    (tmp_path / "acc.yaml").write_text(f"{file}fsdp_config: {{fsdp_version: 2}}\n", encoding="utf-8")
    start = tmp_path / "start.sh"
    ranks = "--num_machines $N --num_processes $((N * 4)) --machine_rank $R"
    start.write_text(f"accelerate launch --config_file acc.yaml {ranks} t.py\n", encoding="utf-8")
    codes = {finding.code for finding in read_settings(start).diagnostics}
    assert "FSD205" not in codes
    start.write_text("accelerate launch --config_file acc.yaml --num_machines two t.py\n", encoding="utf-8")
    assert "FSD205" in {finding.code for finding in read_settings(start).diagnostics}


@pytest.mark.parametrize(
    ("words", "length"), [("max_length: null", None), ("max_length: 64", 64), ("", 1024)]
)
def test_a_length_of_null_cuts_nothing_in_trl(words: str, length: int | None) -> None:
    file = "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: d\npacking: false\nuse_peft: false\n"
    run = describe_run(SourceText(f"{file}{words}\n", "sft.yaml"), program="trl")
    assert run is not None
    assert run.sequence_length == length


ACCELERATE = """distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: bf16
num_processes: 8
num_machines: 1
"""


def started(folder: Path, flags: str, file: str = ACCELERATE) -> Path:
    (folder / "acc.yaml").write_text(file, encoding="utf-8")
    start = folder / "start.sh"
    start.write_text(f"accelerate launch {flags} train.py\n", encoding="utf-8")
    return start


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--num_machines $N", "num_machines"),
        ("--num_processes $((8*N))", "num_processes"),
        ("--machine_rank $R", "machine_rank"),
        ("--mixed_precision $MP", "mixed_precision"),
        ("--fsdp_version $V", "fsdp_version"),
        ("--fsdp_offload_params $O", "cpu_offload"),
        ("--fsdp_reshard_after_forward $R", "reshard_after_forward"),
        ("--fsdp_auto_wrap_policy $W", "wrap_policy"),
        ("--fsdp_state_dict_type $S", "state_dict_type"),
    ],
)
@pytest.mark.parametrize("before", ["--config_file acc.yaml", "--use_fsdp"])
def test_what_a_flag_makes_a_variable_is_open(tmp_path: Path, before: str, flag: str, key: str) -> None:
    start = started(tmp_path, f"{before} {flag}")
    reading = read_settings(start)
    assert not reading.errors
    assert key not in {item.key for item in reading.effective}
    assert set(reading.open) == {key}
    with pytest.raises(ConfigError, match=f"{key} is .* not known here"):
        reading.require()
    migrated = migrate_file(start, to="accelerate")
    assert migrated.after is None
    assert "not known here" in str(migrated.refusal)


def test_variables_of_several_machines_count_as_given_and_those_of_the_file_as_text(tmp_path: Path) -> None:
    ranks = "--num_machines 2 --num_processes 16 --machine_rank $R --main_process_ip $H"
    reading = read_settings(started(tmp_path, f"--config_file acc.yaml {ranks} --main_process_port 29500"))
    assert not {"FSD205", "FSD329"} & {item.code for item in reading.diagnostics}
    file = ACCELERATE.replace("num_processes: 8", "num_processes: $RANKS")
    codes = {item.code for item in read_settings(started(tmp_path, "--config_file acc.yaml", file)).errors}
    assert codes == {"FSD205"}


def test_a_plan_asks_for_the_ranks_that_are_variables(tmp_path: Path) -> None:
    start = started(tmp_path, "--config_file acc.yaml --num_machines $N --num_processes $((8*N))")
    with pytest.raises(ConfigError, match=r"num_machines is .* and num_processes is") as refused:
        plan("gpt2:small", config=start, gpu="H100-80GB-SXM", search=False)
    assert refused.value.help == "give gpus and nodes"


@pytest.mark.parametrize(("word", "known"), [("$FSDP", False), ("full_shard", True)])
def test_fsdp_that_a_variable_switches_on_is_not_a_fact(tmp_path: Path, word: str, known: bool) -> None:
    start = tmp_path / "start.sh"
    flags = f'--model_name_or_path gpt2 --output_dir out --bf16 --fsdp "{word}"'
    start.write_text(f"torchrun --nproc_per_node 2 run_clm.py {flags}\n", encoding="utf-8")
    reading, run = read_settings(start), describe_path(start)
    assert run is not None
    assert (run.fsdp, run.stored_dtype) == ((2, "fp32") if known else (None, None))
    assert known or (not reading.errors and reading.version is None)
