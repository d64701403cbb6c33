"""Runs that files and commands of programs for image and video models describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdptool.config.described import describe_path, describe_run
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun


def described(text: str) -> DescribedRun:
    """Return the run of a text, which is one."""
    run = describe_run(SourceText(text))
    assert run is not None
    return run


def in_file(folder: Path, name: str, text: str, **beside: str) -> DescribedRun:
    """Return the run of a file, beside others."""
    for other, content in beside.items():
        (folder / other.replace("__", ".")).write_text(content)
    (folder / name).write_text(text)
    run = describe_path(folder / name)
    assert run is not None
    return run


def memory_of(run: DescribedRun) -> dict[str, str | None]:
    """Return the keys that change memory and are not planned, with the side."""
    return {item.key: item.side for item in run.keys.not_modelled if item.changes == "memory"}


SHELL = """\
export MODEL_TYPE='lora'
export FLUX=true
export MODEL_NAME="black-forest-labs/FLUX.1-dev"
export MAX_NUM_STEPS=100
export NUM_EPOCHS=0
export TRAIN_BATCH_SIZE=2
export USE_BITFIT=true
export PURE_BF16=true
export TRAINING_NUM_PROCESSES=2 # per machine
"""


def test_a_shell_file_of_simpletuner_adds_to_its_own_flags(tmp_path: Path) -> None:
    more = (
        'export TRAINER_EXTRA_ARGS="--lora_rank=24"\n'
        'export TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --base_model_precision=int4-quanto"\n'
    )
    run = in_file(tmp_path, "config.env", SHELL + more)
    assert (run.lora_rank, run.quantisation, run.processes) == (24, "int4", 2)
    assert memory_of(run) == {"layer_freeze_strategy": "less"}


@pytest.mark.parametrize(
    ("more", "rank"),
    [
        ("export TRAINER_EXTRA_ARGS='--lora_rank=16'\nTRAINER_EXTRA_ARGS+=' --lora_rank=32'\n", 32),
        ("export TRAINER_EXTRA_ARGS='--lora_rank=16'\nexport TRAINER_EXTRA_ARGS+=' --lora_rank=32'\n", 32),
    ],
)
def test_a_shell_file_of_simpletuner_appends(tmp_path: Path, more: str, rank: int) -> None:
    run = in_file(tmp_path, "config.env", SHELL + more)
    assert (run.lora_rank, run.problems) == (rank, ())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('export TRAINER_EXTRA_ARGS="$MORE"\n', "TRAINER_EXTRA_ARGS: $MORE"),
        ('export TRAINER_EXTRA_ARGS="$(cat flags.txt)"\n', "TRAINER_EXTRA_ARGS: ${TRAINER_EXTRA_ARGS}"),
        ('export TRAINER_EXTRA_ARGS="$UNKNOWN --lora_rank=64"\n', "TRAINER_EXTRA_ARGS: $UNKNOWN"),
        ("if false; then\n  export TRAIN_BATCH_SIZE=16\nfi\n", "train_batch_size: ${TRAIN_BATCH_SIZE}"),
    ],
)
def test_what_a_shell_file_of_simpletuner_leaves_open_is_told(tmp_path: Path, more: str, said: str) -> None:
    run = in_file(tmp_path, "config.env", SHELL + more)
    assert run.unresolved == (f"{said} is a variable, which is not resolved",)
    assert run.micro_batch == (None if "TRAIN_BATCH_SIZE" in said else 2)


def test_a_shell_file_of_simpletuner_sets_variables_for_others(tmp_path: Path) -> None:
    more = 'export TRAINER_EXTRA_ARGS=""\nexport ACCELERATE_EXTRA_ARGS="--multi_gpu --num_processes=6"\n'
    run = in_file(tmp_path, "config.env", SHELL + more)
    assert (run.problems, run.processes) == ((), 6)
    assert any("drops unknown keys: pure_bf16" in note for note in run.notes)


@pytest.mark.parametrize(
    ("keys", "family"),
    [
        ({"model_family": "sdxl", "pretrained_model_name_or_path": "/m/cartoon_v3.safetensors"}, "sdxl:unet"),
        ({"model_family": "sdxl", "pretrained_model_name_or_path": "org/mine"}, None),  # the Hub knows it
        ({"model_family": "sdxl", "pretrained_model_name_or_path": "models/mine"}, "sdxl:unet"),
        ({"model_family": "sdxl", "pretrained_model_name_or_path": "some/mine.gguf"}, "sdxl:unet"),
        ({"model_family": "sdxl", "pretrained_model_name_or_path": ""}, None),
        ({"model_family": "sd3", "pretrained_model_name_or_path": "/m/mine"}, None),  # two sizes
        (
            {"model_family": "sd3", "model_flavour": "large", "pretrained_model_name_or_path": "/m/mine"},
            "sd3.5:large",
        ),
        ({"model_family": "ltxvideo2"}, "ltx-2:2.0-19b"),
    ],
)
def test_the_family_says_the_size_where_the_name_does_not(keys: dict[str, str], family: str | None) -> None:
    run = described(json.dumps({"model_type": "lora", "data_backend_config": "b.json", **keys}))
    assert run.family == family
    named = "pretrained_model_name_or_path" in keys and family is not None
    assert named == any("by model_family" in note for note in run.notes)


def test_newer_flags_of_simpletuner_are_known() -> None:
    keys = {
        "model_family": "wan", "model_type": "lora", "data_backend_config": "b.json",
        "context_parallel_size": 4, "context_parallel_comm_strategy": "alltoall", "text_cache_ondemand": True,
        "gradient_checkpointing_backend": "unsloth", "gradient_checkpointing_interval": 3,
        "trust_remote_code": True, "wan_validation_load_other_stage": True,
    }  # fmt: skip
    run = described(json.dumps(keys))
    assert not any("refuses" in problem for problem in run.problems)
    assert (run.processes, run.mesh.cp, run.global_batch) == (None, 4, None)
    assert memory_of(run) == {
        "gradient_checkpointing_backend": None,
        "gradient_checkpointing_interval": "more",
    }
    keys |= {"gradient_checkpointing_backend": "torch", "gradient_checkpointing_interval": 1}
    assert memory_of(described(json.dumps(keys))) == {}


TOOLKIT = """\
job: extension
config:
  name: n
  process:
  - type: {type}
    {network}
    datasets: [{{folder_path: d, resolution: 768}}]
    train: {{steps: 9, dtype: bf16, batch_size: 2, optimizer: adamw8bit{train}}}
    model: {{name_or_path: {model}, quantize: true{arch}}}
"""
NETWORK = "network: {type: lora, linear: 4, rank: 12}"


def toolkit(**parts: str) -> DescribedRun:
    """Return the run of a job."""
    usual = {"type": "sd_trainer", "network": NETWORK, "train": "", "model": "/m/mine", "arch": ""}
    return described(TOOLKIT.format(**{**usual, **parts}))


@pytest.mark.parametrize(
    ("arch", "family", "key"),
    [
        (", is_xl: true", "sdxl:unet", "model.is_xl"),
        (", is_flux: true", "flux.1:dev", "model.is_flux"),
        (", arch: 'wan21:14b'", "wan2.1:t2v-14b", "model.arch"),
        (", arch: 'zimage:turbo'", "z-image:turbo", "model.arch"),
        (", arch: somebodys", None, None),
        ("", "sd1.5:unet", "the default of model.arch"),
    ],
)
def test_the_architecture_of_a_job_says_the_size(arch: str, family: str | None, key: str | None) -> None:
    run = toolkit(arch=arch)
    assert (run.family, run.lora_rank) == (family, 12)  # the old name of the rank wins
    assert any(note.endswith(f") by {key}") for note in run.notes) == (key is not None)


@pytest.mark.parametrize(
    ("network", "note"),
    [
        ("adapter: {type: redux, train: true}", "adapter: the model stays frozen"),
        ("embedding: {trigger: t, tokens: 4}", "embedding: the model stays frozen"),
    ],
)
def test_a_job_that_trains_something_beside_the_model_keeps_it_frozen(network: str, note: str) -> None:
    run = toolkit(network=network)
    assert run.base_dtype == "float8 e4m3 (quanto qfloat8)"
    assert any(note in found for found in run.notes)
    assert memory_of(run).keys() == {network.partition(":")[0]}


def test_keys_of_a_job_that_change_memory_are_told() -> None:
    train = ", do_paramiter_swapping: true, do_cfg: true, short_and_long_captions: true"
    assert memory_of(toolkit(train=train)) == {
        "train.do_paramiter_swapping": "less",
        "train.do_cfg": "more",
        "train.short_and_long_captions": "more",
    }
    assert memory_of(toolkit(type="somebodys_trainer")) == {"type": None}


@pytest.mark.parametrize(
    ("sizes", "area"),
    [
        ("[512, 512], [640, 768]", 640 * 768),
        ("[512, -512]", 512 * 512),
        ("[512, 1000000000000000000000000000000]", 512 * 512),
        ("[true, true]", 512 * 512),
    ],
)
def test_a_slider_trains_on_sizes_of_its_own(sizes: str, area: int) -> None:
    text = TOOLKIT.replace("    datasets: [{{folder_path: d, resolution: 768}}]\n", "")
    text += f"    slider: {{{{resolutions: [{sizes}]}}}}\n"
    run = described(text.format(type="slider", network=NETWORK, train="", model="a/b", arch=""))
    assert run.pixel_area == area


def launched(script: str, flags: str) -> DescribedRun:
    """Return the run of a command of diffusers."""
    named = "" if "pretrained" in flags else "--pretrained_model_name_or_path org/name "
    return described(f"accelerate launch {script}.py {named}--output_dir o {flags}\n")


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("train_dreambooth_lora_flux_kontext", {"proj_mlp", "ff.net.2"}),
        ("train_control_lora_flux", {"x_embedder", "attn.to_k"}),
        ("train_dreambooth_lora_hidream", {"to_out"}),
        ("train_dreambooth_lora_krea2", {"to_gate", "ff.up"}),
        ("train_dreambooth_lora_lumina2", {"to_out.0"}),
        ("train_lcm_distill_lora_sdxl_wds", {"conv_shortcut", "time_emb_proj"}),
    ],
)
def test_a_script_of_diffusers_chooses_the_layers(script: str, more: set[str]) -> None:
    run = launched(script, "--train_batch_size 1")
    assert run.method == "lora"
    assert isinstance(run.lora_targets, tuple)
    assert more <= {*run.lora_targets}


def test_a_distilled_model_is_named_by_its_teacher() -> None:
    flags = "--pretrained_teacher_model stabilityai/stable-diffusion-xl-base-1.0 --train_batch_size 2"
    run = launched("train_lcm_distill_lora_sdxl", flags)
    assert (run.family, run.lora_rank, run.height) == ("sdxl:unet", 64, 1024)
    assert launched("train_lcm_distill_lora_sdxl", f"{flags} --lora_rank 8").lora_rank == 8
    assert memory_of(run) == {}
    assert memory_of(launched("train_lcm_distill_sdxl_wds", flags)).keys() == {
        "train_lcm_distill_sdxl_wds.py"
    }


def test_pairs_train_adapters_and_twice_the_images() -> None:
    flags = "--pretrained_model_name_or_path /m/mine --dataset_name d --train_batch_size 4 --rank 8"
    run = launched("train_diffusion_dpo_sdxl", flags)
    assert (run.method, run.lora_rank, run.family) == ("lora", 8, "sdxl:unet")
    assert memory_of(run) == {"train_diffusion_dpo_sdxl.py": "more"}


def test_a_network_without_text_has_epochs_of_its_own() -> None:
    flags = "--pretrained_model_name_or_path a/b --train_data_dir d"
    assert launched("train_unconditional", flags).epochs == 100
    run = launched("train_unconditional", f"{flags} --num_epochs 7")
    assert (run.epochs, run.height, run.micro_batch) == (7, 64, 16)


ODD = (
    "[]",
    '{"load_in_4bit": "false"}',
    '{"load_in_4bit": true, "bnb_4bit_quant_type": null}',
    '{"load_in_8bit": 1}',
)


@pytest.mark.parametrize(
    ("options", "base", "quantisation"),
    [
        ('{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}', "nf4 (bitsandbytes)", "nf4"),
        ('{"load_in_8bit": true}', "int8 (bitsandbytes)", "int8"),
        ('{"load_in_4bit": true}', "fp4 (bitsandbytes)", "fp4"),
        ("{}", "bf16", "none"),
        *((odd, "bf16", "none") for odd in ODD),
    ],
)
def test_a_file_of_bitsandbytes_quantises_the_base(
    tmp_path: Path, options: str, base: str, quantisation: str
) -> None:
    line = (
        "accelerate launch train_dreambooth_lora_hidream.py --pretrained_model_name_or_path a/b"
        " --bnb_quantization_config_path bnb.json --mixed_precision bf16 --instance_data_dir d\n"
    )
    run = in_file(tmp_path, "run.sh", line, bnb__json=options)
    assert (run.base_dtype, run.quantisation) == (base, quantisation)
    assert ("bnb_quantization_config_path" in memory_of(run)) == (options in ODD)


def test_the_optimizer_of_a_control_network() -> None:
    assert launched("train_controlnet_flux", "--use_adafactor --resolution 512").optimizer == "adafactor"


@pytest.mark.parametrize("flag", ["--optimizer_type adafactor", "--save_model_as safetensors"])
def test_commands_of_sd_scripts_are_none_of_diffusers(flag: str) -> None:
    flags = f"--pretrained_model_name_or_path a.safetensors --train_data_dir d --resolution 512 {flag}"
    assert describe_run(SourceText(f"accelerate launch flux_train.py {flags}\n")) is None


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_text_classifier", "bert-base --train_batch_size 8 --train_data_dir d --max_length 128"),
        ("train_lora", "gpt2 --output_dir o --train_batch_size 4 --lr_scheduler cosine"),
        ("train_lora", "/m/mine --output_dir o --train_batch_size 4 --lr_scheduler cosine"),
        ("train_clip", "a/b --train_batch_size 8 --image_column image --resolution 224"),
        ("train_mine", "gpt2 --instance_prompt p --resolution 224 --train_batch_size 1"),
    ],
)
def test_commands_of_other_programs_are_none_of_diffusers(script: str, flags: str) -> None:
    text = f"accelerate launch {script}.py --pretrained_model_name_or_path {flags}\n"
    run = describe_run(SourceText(text))
    assert run is None or run.program != "diffusers"


@pytest.mark.parametrize(("part", "other"), [("prior", "decoder"), ("decoder", "prior")])
def test_a_model_of_two_networks_is_named_by_the_one_that_trains(part: str, other: str) -> None:
    flags = f"--pretrained_{other}_model_name_or_path a/other --pretrained_{part}_model_name_or_path a/mine"
    run = launched(f"train_text_to_image_{part}", f"{flags} --resolution 768 --train_batch_size 1")
    assert run.model == "a/mine"


def test_deepspeed_of_a_script_is_out_of_scope(tmp_path: Path) -> None:
    line = (
        "accelerate launch --config_file ds.yaml train_dreambooth_flux.py"
        " --pretrained_model_name_or_path a/b --instance_data_dir d --resolution 512\n"
    )
    run = in_file(tmp_path, "run.sh", line, ds__yaml="distributed_type: DEEPSPEED\nnum_processes: 2\n")
    assert any("DeepSpeed is out of scope" in note for note in run.notes)
    assert memory_of(run) == {"use_deepspeed": "less"}


@pytest.mark.parametrize(
    ("keys", "classes"),
    [
        ({}, ("the model's _no_split_modules", "root")),
        ({"--fsdp_auto_wrap_policy": "NO_WRAP"}, ("root",)),
        ({"--fsdp_transformer_layer_cls_to_wrap": "FluxTransformerBlock"}, ("FluxTransformerBlock", "root")),
    ],
)
def test_simpletuner_shards_the_blocks_that_the_model_names(
    keys: dict[str, str], classes: tuple[str, ...]
) -> None:
    data = {"--model_family": "flux", "--model_type": "full", "--fsdp_enable": True, **keys}
    assert described(json.dumps(data)).wrap_classes == classes


WRITTEN = """cd /workspace/ai-toolkit
cat << 'EOF' > {at}
job: extension
config:
  process:
    - type: sd_trainer
      train: {{batch_size: 3}}
      model: {{name_or_path: black-forest-labs/FLUX.1-dev, arch: flux}}
EOF
{more}python run.py config/x.yaml
"""


@pytest.mark.parametrize(
    ("at", "more", "found"),
    [
        ("/workspace/ai-toolkit/config/x.yaml", "", True),
        ("/workspace/ai-toolkit/other_config/x.yaml", "", False),
        ("/tmp/elsewhere/config/x.yaml", "", False),
        ("/data/run/config/x.yaml", "cd run\n", True),
        (
            "/workspace/ai-toolkit/config/x.yaml",
            "cat << 'EOF' > /workspace/old/config/x.yaml\njob: extension\nEOF\n",
            False,
        ),
    ],
)
def test_a_file_written_below_a_folder_is_read_from_there(at: str, more: str, found: bool) -> None:
    run = describe_run(SourceText(WRITTEN.format(at=at, more=more)))
    assert (run is not None and run.micro_batch == 3) is found


FUN = "--pretrained_model_name_or_path m/FLUX.1-dev --train_data_dir d --train_data_meta d/m.json"
TOKENS = "--random_hw_adapt --training_with_video_token_length --token_sample_size=640"


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("", (512, 512, 17)),
        ("--video_sample_size=256 --image_sample_size=1024 --video_sample_n_frames=81", (256, 256, 81)),
        (f"--video_sample_size=256 --image_sample_size=1024 {TOKENS}", (640, 640, 17)),
        (f"--video_sample_size=256 --image_sample_size=480 {TOKENS}", (480, 480, 17)),
        ("--enable_bucket --fix_sample_size 480 832 --video_sample_n_frames=49", (480, 832, 49)),
        ("--enable_bucket --fix_sample_size 488 839 --video_sample_n_frames=49", (480, 832, 49)),
    ],
)
def test_sizes_of_video_fun_have_names_of_their_own(flags: str, sizes: tuple[int, int, int]) -> None:
    run = launched("scripts/wan2.1/train", f"{FUN} {flags}")
    assert (run.height, run.width, run.frames or 1) == sizes
    assert run.micro_batch == 16


@pytest.mark.parametrize("folder", ["flux", "qwenimage", "z_image_fun"])
@pytest.mark.parametrize(("flags", "side"), [("--image_sample_size=1328", 1328), ("", 512)])
def test_scripts_of_video_fun_for_images_have_no_frames(folder: str, flags: str, side: int) -> None:
    run = launched(f"scripts/{folder}/train_lora", f"{FUN} {flags}")
    assert (run.height, run.width, run.frames) == (side, side, None)


@pytest.mark.parametrize(
    ("sides", "unresolved"),
    [("$H $W", True), ("512.5 512", False), ("384 abc", False), ("0 -5", False), (f"{10**23} 512", False)],
)
def test_sizes_that_are_no_sizes_are_told(sides: str, unresolved: bool) -> None:
    run = launched("scripts/wan2.1/train_lora", f"{FUN} --enable_bucket --fix_sample_size {sides}")
    assert run.height is None or run.width is None
    assert "fix_sample_size" in memory_of(run)
    assert any(said.startswith("fix_sample_size") for said in run.problems)
    assert bool(run.unresolved) == unresolved


@pytest.mark.parametrize(("image", "told"), [(1024, True), (512, False)])
def test_images_that_are_larger_than_the_clips_are_told(image: int, told: bool) -> None:
    flags = f"--video_sample_size=256 --image_sample_size={image} --video_sample_n_frames=17"
    run = launched("scripts/wan2.1/train_lora", f"{FUN} {flags}")
    assert (run.height, run.frames) == (256, 17)
    assert memory_of(run) == ({"image_sample_size": "more"} if told else {})


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("wan2.1/train_model_lora", False),
        ("wan2.1/train_node_lora", False),
        ("wan2.1/train_ode_lora", True),
        ("wan2.1_vace/train_lora", True),
        ("fantasytalking/train_lora", True),
        ("z_image_fun/train_control_lora", True),
        ("qwenimage/train_edit_lora", True),
    ],
)
def test_scripts_of_video_fun_that_hold_more_are_told(script: str, more: bool) -> None:
    run = launched(f"scripts/{script}", FUN)
    assert any(item.key.startswith("train_") for item in run.keys.not_modelled) is more


@pytest.mark.parametrize(
    ("script", "flags", "launch", "stored"),
    [
        ("scripts/flux/train_lora", FUN, "--mixed_precision fp16", "fp16"),
        ("scripts/flux/train_lora", FUN, "--mixed_precision bf16", "bf16"),
        ("train_dreambooth_lora_flux", "--instance_data_dir d", "--mixed_precision fp16", "fp32"),
        ("train_dreambooth_lora_flux", "--instance_data_dir d", "--mixed_precision bf16", "bf16"),
        (
            "train_dreambooth_lora_flux",
            "--instance_data_dir d",
            "--use_fsdp --fsdp_version 2 --mixed_precision bf16",
            "fp32",
        ),
        ("scripts/flux/train_lora", FUN, "--use_fsdp --fsdp_version 2 --mixed_precision bf16", "fp32"),
    ],
)
def test_sharded_adapters_are_stored_in_fp32(script: str, flags: str, launch: str, stored: str) -> None:
    named = "" if "pretrained" in flags else "--pretrained_model_name_or_path org/name"
    run = described(f"accelerate launch {launch} {script}.py {named} {flags}\n")
    assert (run.method, run.stored_dtype) == ("lora", stored)
    assert run.optimizer_state_bits == (32 if stored == "fp32" else 16)


def test_video_fun_trains_weights_in_the_dtype_of_the_computation() -> None:
    flags = f"{FUN} --trainable_modules . --mixed_precision bf16 --use_came"
    run = launched("scripts/flux/train", flags)
    assert (run.method, run.stored_dtype, run.optimizer, run.epochs) == ("full", "bf16", "came", 100)
    sharded = described(f"accelerate launch --use_fsdp scripts/flux/train.py {flags}\n")
    assert sharded.stored_dtype == "fp32"
    assert memory_of(run) == {}
    part = launched("scripts/flux/train_distill", f"{FUN} --trainable_modules attn ff --train_mode i2v")
    assert memory_of(part) == {
        "train_distill.py": "more", "train_mode": "more", "trainable_modules": "less",
    }  # fmt: skip


def test_adapters_of_video_fun() -> None:
    run = launched("scripts/flux/train_lora", FUN)
    assert (run.method, run.lora_rank, run.lora_targets) == ("lora", 128, "linear layers of the transformer")
    run = launched("scripts/flux/train_lora", f"{FUN} --rank=64 --target_name to_q,to_k")
    assert (run.lora_rank, run.lora_targets) == (64, ("to_q", "to_k"))


def test_a_copy_without_a_size_has_its_own() -> None:
    flags = "--instance_data_dir d --train_batch_size 1"
    assert launched("train_2k", flags).height is None
    run = launched("train_2k", f"{flags} --height 480 --width 832 --num_frames 49")
    assert (run.height, run.width, run.frames) == (480, 832, 49)
    assert launched("train_dreambooth_flux", flags).height == 512
