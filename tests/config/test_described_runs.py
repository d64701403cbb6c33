"""Runs that files of other programs describe: facts, defaults, and what becomes of every key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import training_corpus as corpus

from fsdptool.api.explain import explain_one
from fsdptool.config.described import describe_path, describe_run
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun


def described(text: str) -> DescribedRun:
    """Return the run of a text, which is one."""
    run = describe_run(SourceText(text))
    assert run is not None
    return run


if corpus.folder() is not None:

    @pytest.mark.parametrize("entry", corpus.entries(), ids=lambda entry: entry["file"])
    def test_a_real_file_is_read_as_the_index_has_it(entry: dict[str, object]) -> None:
        assert list(corpus.differences(entry)) == []


AXOLOTL = """
base_model: org/Llama-3.1-8B-Instruct-mine
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_target_linear: true
datasets: [{path: a, type: alpaca}]
micro_batch_size: 4
sample_packing: true
liger_rope: true
neftune_noise_alpha: 5
learning_rate: 2e-4
lr: 3
"""


def test_every_key_is_used_or_told() -> None:
    run = described(AXOLOTL)
    assert (run.program, run.family, run.method, run.lora_targets) == (
        "axolotl", "llama3.1:8b", "qlora", "all-linear",
    )  # fmt: skip
    assert (run.sequence_length, run.micro_batch, run.accumulation) == (512, 4, 1)
    assert {item.key: (item.changes, item.side) for item in run.keys.not_modelled} == {
        "liger_rope": ("memory", "less"),
        "neftune_noise_alpha": ("numbers", None),
    }
    assert "learning_rate" in run.keys.no_effect
    assert "axolotl 0.19.0 drops unknown keys: lr" in run.notes
    assert any(item.key == "sequence_len" and item.value == 512 for item in run.defaults)
    told = {*run.keys.used, *run.keys.no_effect, *(item.key for item in run.keys.not_modelled)}
    assert told == {line.partition(":")[0] for line in AXOLOTL.split("\n") if line}


def test_a_value_of_the_wrong_type_is_a_problem_and_no_fact() -> None:
    run = described(AXOLOTL.replace("micro_batch_size: 4", "micro_batch_size: many"))
    assert run.micro_batch is None
    assert run.problems == ("micro_batch_size must be a whole number, not 'many'",)


def test_what_the_program_refuses_is_said_and_the_run_is_described_all_the_same() -> None:
    run = described(AXOLOTL.replace("learning_rate: 2e-4\n", "").replace("adapter: qlora\n", ""))
    assert run.problems == (
        "learning_rate is missing: axolotl stops",
        "load_in_8bit and load_in_4bit need an adapter",
    )
    assert (run.method, run.micro_batch) == ("full", 4)


def test_an_old_word_decides_the_version_whose_defaults_count() -> None:
    new = described("model_name_or_path: a/b\ndataset_name: c\npacking: false\noutput_dir: d\n")
    old = described("model_name_or_path: a/b\ndataset_name: c\npacking: false\nmax_seq_length: 512\n")
    assert (new.program_version, new.gradient_checkpointing, new.fused_loss) == ("1.16.0", "full", "chunked")
    assert (old.program_version, old.gradient_checkpointing, old.fused_loss) == ("0.18.0", "none", "none")


def test_a_command_line_is_read_like_a_file() -> None:
    run = described(
        "torchrun --nproc_per_node=4 --nnodes=2 -m verl.trainer.fsdp_sft_trainer \\\n"
        "  data.train_batch_size=64 data.micro_batch_size_per_gpu=2 \\\n"
        "  model.partial_pretrain=Qwen/Qwen3-8B ulysses_sequence_parallel_size=2\n"
    )
    assert (run.program, run.family, run.processes, run.mesh.cp) == ("verl", "qwen3:8b", 8, 2)
    assert (run.micro_batch, run.accumulation, run.global_batch) == (2, 8, 64)


def test_flags_with_several_values_and_a_file_under_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(AXOLOTL)
    line = tmp_path / "run.sh"
    line.write_text(
        "axolotl train run.yaml --micro-batch-size 8 --lora-target-modules q_proj v_proj"
        " --lora-mlp-kernel True\n"
    )
    run = describe_path(line)
    assert run is not None
    assert run.fused_kernels == ("fused_glu",)
    assert (run.micro_batch, run.lora_rank, run.method) == (8, 16, "qlora")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("extends: other.yaml", "extends: other.yaml is not read"),
        ("gradient_accumulation_steps: ${oc.env:STEPS}", "is a variable, which is not resolved"),
        ("optimizer: !include optimizer.yaml", "!include"),
    ],
)
def test_what_stands_elsewhere_is_named_and_not_guessed(change: str, problem: str) -> None:
    run = described(f"{AXOLOTL}{change}\n")
    assert any(problem in item for item in run.problems)


def test_the_facts_that_an_unreadable_value_decides_are_found() -> None:
    run = described(f"{AXOLOTL}gradient_accumulation_steps: ${{oc.env:STEPS}}\noptimizer: !include a.yaml\n")
    found = {item.key: item.decides for item in run.keys.not_modelled if item.decides is not None}
    assert found == {
        "gradient_accumulation_steps": ("accumulation",),
        "optimizer": ("optimizer", "optimizer_state_bits"),
    }
    variable = "gradient_accumulation_steps: ${oc.env:STEPS} is a variable, which is not resolved"
    assert run.unresolved[1:] == (variable,)
    assert "!include" in run.unresolved[0]


def test_a_section_that_is_none_leaves_open_what_it_would_say() -> None:
    run = described(f"{AXOLOTL}fsdp_config: 3\n")
    assert run.fsdp is None
    assert run.problems == ("fsdp_config must be a section, not '3'",)


def test_an_interpolation_within_the_file_is_followed() -> None:
    model = "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\ndtype: bf16\n"
    text = f"{model}batch_size: ${{size}}\nsize: 3\n"
    run = described(f"{text}optimizer: {{_component_: torch.optim.AdamW}}\nfsdp_cpu_offload: true\n")
    assert (run.micro_batch, run.family, run.cpu_offload) == (3, "llama3.1:8b", True)


def test_the_policy_of_ppo_is_the_model_of_the_run() -> None:
    text = (
        "tokenizer: {max_seq_len: 512}\npolicy_model: {_component_: torchtune.models.mistral.mistral_7b}\n"
        "reward_and_value_model: {_component_: torchtune.models.mistral.mistral_classifier}\ndtype: bf16\n"
        "batch_size: 64\nppo_batch_size: 32\ngradient_accumulation_steps: 4\nmax_generated_tokens: 58\n"
        "optimizer: {_component_: torch.optim.AdamW}\nloss: {_component_: torchtune.rlhf.loss.PPOLoss}\n"
    )
    run = described(text)
    assert (run.objective, run.family, run.micro_batch, run.sequence_length) == (
        "ppo",
        "mistral:7b-v0.1",
        8,
        570,
    )
    more = {item.key for item in run.keys.not_modelled if item.side == "more"}
    assert more == {"reward_and_value_model._component_"}
    sizes = "".join(f"  {key}: 2\n" for key in ("_component_", "num_layers", "num_heads"))
    keys = described(
        f"{text.partition('reward')[0]}{text[text.index('dtype') :]}reward_and_value_model:\n{sizes}"
    ).keys
    assert [item.key for item in keys.unmodelled_by_section()] == ["reward_and_value_model.*"]


def test_grpo_of_torchtune_passes_all_completions_at_once() -> None:
    text = (
        "tokenizer: {max_seq_len: 512}\nmodel: {_component_: torchtune.models.qwen2_5.qwen2_5_3b}\n"
        "dtype: bf16\nbatch_size: 2\ngrpo_samples: 8\nmax_generated_tokens: 64\nforward_batch_size: 1\n"
        "optimizer: {_component_: torch.optim.AdamW}\nloss: {_component_: torchtune.dev.rl.loss.GRPOLoss}\n"
    )
    run = described(text)
    assert (run.objective, run.fsdp, run.reshard) == ("grpo", 2, False)
    assert (run.micro_batch, run.accumulation, run.sequence_length) == (16, 1, 576)


def test_pictures_and_texts_of_automodel_are_packed_by_keys_of_their_own() -> None:
    head = (
        "recipe: FinetuneRecipeForVLM\nstep_scheduler: {local_batch_size: 1, global_batch_size: 8}\n"
        "model: {_target_: nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained,"
        " pretrained_model_name_or_path: google/gemma-3-4b-it}\ndistributed: {strategy: fsdp2}\n"
    )
    packed = described(f"{head}packed_sequence: {{pretokenize: true, max_length: 300, pack_size: 512}}\n")
    below = described(f"{head}dataset: {{_target_: a.b, packing: {{enabled: true, pack_size: 256}}}}\n")
    plain = described(f"{head}dataset: {{_target_: a.b, packing: {{enabled: false, pack_size: 256}}}}\n")
    found = [(run.packing, run.sequence_length) for run in (packed, below, plain)]
    assert found == [(True, 512), (True, 256), (False, None)]


def test_accelerate_shards_what_axolotl_starts_under_it(tmp_path: Path) -> None:
    """Its environment counts where the file has no FSDP of its own, and it casts what trains to fp32."""
    text = "base_model: org/Llama-3.1-8B\ndatasets: [{path: a}]\nlearning_rate: 1e-4\nbf16: true\n"
    (tmp_path / "train.yaml").write_text(text)
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2,"
        " fsdp_offload_params: true, fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer}\n"
    )
    found = []
    for file in ("fsdp.yaml", "nowhere.yaml"):
        line = tmp_path / "run.sh"
        line.write_text(f"accelerate launch --config_file {file} -m axolotl.cli.train train.yaml\n")
        found.append(describe_path(line))
    sharded, open_ = found
    assert sharded is not None and open_ is not None
    assert (sharded.fsdp, sharded.stored_dtype, sharded.cpu_offload, sharded.processes) == (
        2,
        "fp32",
        True,
        4,
    )
    assert sharded.wrap_classes == ("LlamaDecoderLayer",)
    assert open_.fsdp is None


@pytest.mark.parametrize(
    "where", [">> log.txt 2>&1 &", "> 'a b' ", "2>err &>all", ">$HOME/x", "> >(tee -a o) 2> >(tee e >&2)"]
)
def test_where_a_command_writes_to_is_no_value_of_its_flags(where: str) -> None:
    line = "trl sft --model_name_or_path org/Llama-3.1-8B --dataset_name d --bf16"
    run = described(f"{line} {where}\n")
    assert run.compute_dtype == "bf16"
    assert run == described(f"{line}\n")
    after = described(f"trl sft {where} --model_name_or_path org/Llama-3.1-8B --dataset_name d --bf16\n")
    assert after == run or where.endswith("&")


@pytest.mark.parametrize("held", ['"${LAUNCH[@]}"', "$LAUNCH", "${LAUNCH}"])
def test_a_variable_before_a_module_holds_what_starts_it(held: str) -> None:
    """Which of two interpreters a branch chooses changes nothing of the run."""
    text = "LAUNCH=(python3)\nif command -v uv; then LAUNCH=(uv run python3); fi\nMODEL=Qwen/Qwen3-8B\n"
    run = described(f"{text}{held} -m verl.trainer.sft_trainer model.path=$MODEL data.max_length=64\n")
    assert (run.program, run.model, run.sequence_length) == ("verl", "Qwen/Qwen3-8B", 64)


def test_the_rows_of_pairs_are_explained() -> None:
    run = described("trl reward --model_name_or_path org/Llama-3.1-8B --dataset_name d\n")
    assert "a pair is planned as two rows of the micro-batch; --micro-batch counts rows" in run.notes


def test_the_gpus_that_deepspeed_includes_are_counted() -> None:
    flags = "--model_name_or_path org/Llama-3.1-8B --output_dir o --deepspeed ds.json"
    run = described(f"deepspeed --include localhost:0,3,5 run_clm.py {flags}\n")
    assert run.processes == 3


@pytest.mark.parametrize(
    ("family", "more", "expected"),
    [
        ("flux", {}, ("to_out.0", "add_k_proj")),
        ("flux", {"flux_lora_target": "tiny"}, ("single_transformer_blocks.20.proj_out",)),
        ("flux", {"peft_lora_target_modules": ["x_embedder"]}, ("x_embedder",)),
        ("sdxl", {}, ("to_out.0",)),
        ("auraflow", {}, ("to_add_out",)),
    ],
)
def test_simpletuner_chooses_layers_by_the_family(
    family: str, more: dict[str, object], expected: tuple[str, ...]
) -> None:
    keys = {"model_family": family, "model_type": "lora", "data_backend_config": "b.json", **more}
    targets = described(json.dumps(keys)).lora_targets
    assert isinstance(targets, tuple)
    assert {*expected} <= {*targets}
    assert ("add_k_proj" in targets) == (family != "sdxl" and not more)


_TOOLKIT = (
    "job: extension\nconfig:\n  name: n\n  process:\n  - type: sd_trainer\n"
    "    network: {{type: lora, linear: 4{}}}\n"
    "    datasets: [{{folder_path: d, control_path: c}}]\n    train: {{steps: 2}}\n"
    "    model: {{name_or_path: {}, arch: {}{}}}\n"
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (_TOOLKIT.format("", "a/b", "qwen_image_edit", ""), {"datasets.control_path": "more"}),
        (_TOOLKIT.format("", "a/b", "flux2_klein_9b", ""), {"datasets.control_path": "more"}),
        (_TOOLKIT.format("", "a/b", "'qwen_image_edit_plus:2511'", ""), {"datasets.control_path": "more"}),
        (_TOOLKIT.format("", "a/b", "qwen_image", ""), {}),
        (_TOOLKIT.format("", "a/b", "'qwen_image:2512'", ""), {}),
        (
            _TOOLKIT.format(
                ", network_kwargs: {ignore_if_contains: [ff_i]}", "a/b", "hidream",
                ", model_kwargs: {llama_model_path: c/d}",
            ),
            {"network.network_kwargs": "less"},
        ),
        (
            _TOOLKIT.format(", network_kwargs: {lokr_full_rank: true}", "a/b", "hidream", ""),
            {"network.network_kwargs": None},
        ),
        (
            '{"model_family": "flux", "model_flavour": "kontext", "model_type": "lora",'
            ' "data_backend_config": "b.json"}',
            {"conditioning_data": "more"},
        ),
        ('{"model_family": "flux", "model_type": "lora", "data_backend_config": "b.json"}', {}),
        (  # further channels of the same patches
            '{"model_family": "kandinsky5-image", "model_flavour": "i2i-lite-sft", "model_type": "lora",'
            ' "data_backend_config": "b.json"}',
            {},
        ),
        (
            "accelerate launch train_dreambooth_lora_flux_kontext.py --pretrained_model_name_or_path m/n"
            " --output_dir o --dataset_name d --image_column a --cond_image_column b\n",
            {"cond_image_column": "more"},
        ),
    ],
)  # fmt: skip
def test_images_that_are_edited_lengthen_the_sequence(text: str, told: dict[str, str | None]) -> None:
    memory = {item.key: item.side for item in described(text).keys.not_modelled if item.changes == "memory"}
    assert memory == told


def test_the_first_shell_files_of_simpletuner_train_whole_models(tmp_path: Path) -> None:
    file = tmp_path / "config.env"
    file.write_text(
        "export MODEL_NAME=stabilityai/stable-diffusion-2-1\nexport RESOLUTION=768\n"
        "export RESOLUTION_TYPE=pixel\nexport TRAIN_BATCH_SIZE=15\nexport GRADIENT_ACCUMULATION_STEPS=10\n"
    )
    run = describe_path(file)
    assert run is not None
    assert (run.program, run.method, run.height, run.global_batch) == ("simpletuner", "full", 768, 150)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "model_name_or_path: org/m\nstage: sft\ndo_train: true\nfinetuning_type: full\ntemplate: qwen\n"
            "dataset: d\n",
            "lora_rank: 8\nlora_target: all\nlora_dropout: 0.1\npref_loss: sigmoid\n",
        ),
        (
            "model: org/m\ntuner_type: full\ndataset: d\nmax_length: 64\n",
            "lora_rank: 8\nlora_dropout: 0.1\ntarget_modules: all-linear\nlora_dtype: bfloat16\n",
        ),
        (
            "base_model: org/m\ndatasets: [{path: a}]\nlearning_rate: 1e-4\n",
            "lora_r: 8\nlora_dropout: 0.1\nlora_target_linear: true\n",
        ),
        (
            '{"model_family": "sdxl", "model_type": "full", "data_backend_config": {}, "train_batch_size": 1',
            ', "lora_rank": 8, "lora_dropout": 0.1, "lora_init_type": "default"}',
        ),
    ],
)
def test_keys_of_adapters_are_known_where_nothing_is_adapted(text: str, left: str) -> None:
    """Many files of full fine-tuning keep them: their program takes them without effect."""
    run = described(text + left)
    assert run.method == "full"
    assert not any("lora" in told or "pref" in told for told in (*run.problems, *run.notes))


def test_a_list_without_items_changes_nothing() -> None:
    full = described(f"{AXOLOTL}lora_target_parameters: [mlp.experts.gate_up_proj]\n").keys
    empty = described(f"{AXOLOTL}lora_target_parameters: []\n").keys
    assert "lora_target_parameters" in {item.key for item in full.not_modelled}
    assert "lora_target_parameters" in empty.no_effect


def test_the_keys_of_two_programs_are_refused_by_both_names() -> None:
    with pytest.raises(ConfigError, match="axolotl and llamafactory"):
        describe_run(SourceText(f"{AXOLOTL}stage: sft\nmodel_name_or_path: a/b\nfinetuning_type: lora\n"))


def test_a_file_of_nobody_describes_no_run() -> None:
    assert describe_run(SourceText("hello: world\nand: more\n")) is None


@pytest.mark.parametrize(
    "value", ["[]", "{}", "-1", "1e400", ".nan", "true", "'x y'", "[[1]]", "{a: {b: c}}"]
)
def test_no_value_makes_a_reader_stop(value: str) -> None:
    for line in AXOLOTL.strip().split("\n"):
        key = line.partition(":")[0]
        run = described(AXOLOTL.replace(line, f"{key}: {value}"))
        assert run.micro_batch is None or isinstance(run.micro_batch, int)


def test_explain_carries_the_run_and_a_file_of_another_program_is_no_error() -> None:
    process = "{type: sd_trainer, train: {batch_size: 2}, model: {name_or_path: a/FLUX.1-dev}}"
    explained = explain_one(SourceText(f"job: extension\nconfig: {{process: [{process}]}}\n"))
    document = explained.document()
    assert document["run"]["program"] == "ai-toolkit"
    assert document["run"]["family"] == "flux.1:dev"
    assert explained.exit_code() == 0


def test_a_recipe_describes_a_run_as_well() -> None:
    run = described("model: {reference: 'llama3:8b'}\nmethod: {name: lora, lora: {rank: 4, base: nf4}}\n")
    assert (run.program, run.family, run.method, run.lora_rank) == ("fsdptool", "llama3:8b", "qlora", 4)


def test_a_command_line_whose_file_is_not_here_gives_no_facts() -> None:
    run = described("torchrun --nproc_per_node=8 -m axolotl.cli.train nowhere.yaml --micro-batch-size 2\n")
    assert (run.program, run.processes, run.micro_batch, run.method) == ("axolotl", 8, None, None)
    assert "nowhere.yaml is not read here" in run.problems[0]


def test_an_accelerate_file_that_is_not_here_leaves_sharding_open() -> None:
    text = "sft.py --model_name_or_path gpt2 --dataset_name d --output_dir o\n"
    assert described(f"accelerate launch --config_file cluster.yaml {text}").fsdp is None
    assert described(f"accelerate launch --config_file multi_gpu.yaml {text}").fsdp == "none"


@pytest.mark.parametrize(
    ("config", "wrapped"),
    [('{"version": 1, "transformer_layer_cls_to_wrap": "A,B"}', ("A", "B")), ("{", None)],
)
def test_a_flag_may_hold_the_settings_themselves(config: str, wrapped: tuple[str, ...] | None) -> None:
    run = described(
        "torchrun --nproc_per_node=2 t.py --model_name_or_path gpt2 --output_dir o"
        f" --fsdp full_shard --fsdp_config '{config}'\n"
    )
    assert (run.wrap_classes, run.fsdp) == (wrapped, 1 if wrapped else 2)


def test_an_example_of_transformers_is_the_trainers() -> None:
    run = described(
        "torchrun --nproc_per_node=2 run_clm.py --model_name_or_path gpt2 --dataset_name d --output_dir o"
        " --torch_dtype bfloat16 --gradient_checkpointing --block_size 256 --per_device_train_batch_size 4\n"
    )
    assert (run.program, run.sequence_length, run.micro_batch) == ("trainer", 256, 4)


def test_the_usual_method_of_quantisation_leaves_nothing_open() -> None:
    text = "model_name_or_path: gpt2\nstage: sft\nfinetuning_type: lora\nquantization_bit: 4\ntemplate: x\n"
    assert described(f"{text}quantization_method: bnb\n").keys.not_modelled == ()
    assert [item.key for item in described(f"{text}quantization_method: hqq\n").keys.not_modelled] == [
        "quantization_method"
    ]


def test_llamafactory_takes_the_switches_of_trainer_for_liger_and_its_own_for_float8() -> None:
    text = "model_name_or_path: gpt2\nstage: sft\nfinetuning_type: full\ntemplate: x\ndo_train: true\n"
    for switch in ("true", "'true'"):
        run = described(f"{text}use_liger_kernel: true\nfp8: {switch}\n")
        assert (run.fused_loss, run.compute_dtype) == ("liger", "bf16")
    assert (described(text).fused_loss, described(text).compute_dtype) == ("none", "fp32")


@pytest.mark.parametrize(
    ("adapter", "targets", "told"),
    [
        ("exclude_modules: ['*lm_head*', '*router*', '*.gate']", "all-linear", []),
        ("exclude_modules: ['*vision_tower*', '*lm_head*']", "all-linear", ["peft.exclude_modules"]),
        ("exclude_modules: ['*attention.output.dense']", "all-linear", ["peft.exclude_modules"]),
        ("exclude_modules: ['*output_proj*']", "all-linear", ["peft.exclude_modules"]),
        ("alpha: 8", ("*_proj",), []),
        ("target_modules: '*.q_proj'", ("*.q_proj",), []),
    ],
)
def test_automodel_adapts_every_layer_that_is_not_excluded(
    adapter: str, targets: tuple[str, ...] | str, told: list[str]
) -> None:
    run = described(
        "recipe: TrainFinetuneRecipeForNextTokenPrediction\nstep_scheduler: {local_batch_size: 1}\nmodel:\n"
        "  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
        "  pretrained_model_name_or_path: gpt2\n  dtype: float32\npeft:\n"
        f"  _target_: nemo_automodel.components._peft.lora.PeftConfig\n  dim: 8\n  {adapter}\n"
        "distributed: {strategy: fsdp2}\n"
    )
    assert (run.lora_targets, run.base_dtype) == (targets, "fp32")
    assert [item.key for item in run.keys.not_modelled] == told


def test_a_base_that_later_versions_of_axolotl_quantise_needs_less() -> None:
    text = f"{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_linear: true\n"
    text += "peft: {weight_dtype: int4, loftq_config: {loftq_bits: 4}}\n"
    for version, sides in (
        (None, {"peft.weight_dtype": "less", "peft.loftq_config": None}),
        ("0.20.0", {"peft.weight_dtype": "less", "peft.loftq_config": None}),
        ("0.19.0", {"peft.loftq_config": None}),
    ):
        run = describe_run(SourceText(text), version=("axolotl", version) if version else None)
        assert run is not None
        told = {item.key: item.side for item in run.keys.not_modelled if item.key.startswith("peft")}
        assert told == sides
        assert ("peft.weight_dtype" in run.keys.no_effect) == (version == "0.19.0")


def test_dropout_of_adapters_is_the_programs_default() -> None:
    text = "model_name_or_path: gpt2\ndataset_name: d\nuse_peft: true\nlora_r: 4\nmax_length: 64\n"
    assert described(text).lora_dropout == 0.05
    assert described(f"{text}lora_dropout: 0\n").lora_dropout == 0


def test_float8_of_torchtitan_needs_its_converter() -> None:
    text = "[job]\ndump_folder = 'o'\n[model]\nname = 'llama3'\nflavor = '8B'\nconverters = {}\n"
    text += "[training]\nseq_len = 64\nlocal_batch_size = 1\n"
    text += "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n"
    key = "quantize.linear.float8.enable_fsdp_float8_all_gather"
    without, with_it = (described(text.format(value)) for value in ("[]", "['quantize.linear.float8']"))
    assert key in without.keys.no_effect
    assert key in {item.key for item in with_it.keys.not_modelled}


@pytest.mark.parametrize(
    ("script", "side", "batch"),
    [
        ("text_to_image_sdxl", 1024, 16),
        ("dreambooth_lora_sdxl", 1024, 4),
        ("instruct_pix2pix_sdxl", 256, 16),
        ("dreambooth_lora_sd3", 512, 4),
    ],
)
def test_scripts_of_diffusers_have_defaults_of_their_own(script: str, side: int, batch: int) -> None:
    data = "--instance_data_dir d --instance_prompt p" if "dreambooth" in script else "--dataset_name d"
    run = described(
        f"accelerate launch train_{script}.py --pretrained_model_name_or_path m/n {data} --output_dir o\n"
    )
    assert (run.program, run.height, run.width, run.micro_batch) == ("diffusers", side, side, batch)


def test_small_flavours_of_torchtitans_deepseek_are_those_of_its_second_version() -> None:
    text = "[job]\ndump_folder = 'o'\n[model]\nname = 'deepseek_v3'\nflavor = '16B'\n"
    text += "[training]\nseq_len = 64\n[activation_checkpoint]\nmode = 'full'\n"
    assert described(text).family == "deepseek-v2:lite"
