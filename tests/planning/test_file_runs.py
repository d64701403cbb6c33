"""Whole training files of other programs: planned as the run that they describe, and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import fsdptool
from fsdptool.cli.app import run
from fsdptool.config import read_settings
from fsdptool.errors import ConfigError, PlanError
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.planning.request.file_run import bound_of, file_run, read_file_run
from fsdptool.planning.request.followed_loop import suited
from fsdptool.records.plan import Plan, PlanLimit
from fsdptool.records.recipe import Lora
from fsdptool.report import file_words
from fsdptool.source import resolve

AXOLOTL = """
base_model: org/model
adapter: lora
lora_r: 4
lora_target_linear: true
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
bf16: true
gradient_checkpointing: true
flash_attention: true
sample_packing: true
datasets: [{path: org/data, type: alpaca}]
fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: true
"""
LLAMA_FACTORY = """
model_name_or_path: org/model
stage: sft
do_train: true
finetuning_type: full
dataset: alpaca
template: llama3
cutoff_len: 64
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
output_dir: out
bf16: true
flash_attn: fa2
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: t
  max_seq_len: 64
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: true
optimizer:
  _component_: torch.optim.AdamW
  fused: true
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
batch_size: 3
gradient_accumulation_steps: 1
epochs: 1
device: cuda
dtype: bf16
enable_activation_checkpointing: true
fsdp_cpu_offload: false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    further = {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    path.write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **further})
    )
    return str(path)


def planned(path: Path, text: str, model: str | None, **options: Any) -> Plan:
    path.write_text(text)
    chosen = {"gpu": "H100-80GB-SXM", "gpus": 2, "search": False, **options}
    if model is not None:
        chosen["model"] = model
    return make_plan(read_request(cast("Options", {"reference": str(path), **chosen})))


@pytest.mark.slow
def test_a_file_is_planned_as_its_run(model: str, tmp_path: Path) -> None:
    plan = planned(tmp_path / "train.yaml", AXOLOTL, model)
    recipe, point = plan.inputs.recipe, plan.candidates[0].settings
    assert recipe.method.lora == Lora(rank=4, targets="all-linear")
    assert (point.micro_batch, point.accumulation, point.checkpointing) == (2, 4, "full")
    assert recipe.batch.sequence_length == 64
    assert plan.inputs.loop.program == "axolotl"
    assert plan.inputs.run is not None
    assert plan.inputs.run.method == "lora"
    by_hand = make_plan(
        read_request(
            Options(
                recipe=recipe,
                config=plan.inputs.settings,
                gpu="H100-80GB-SXM",
                gpus=2,
                search=False,
                layout="accelerate",
                gradients="unsharded",
                loss="whole",
                loss_in_forward=True,
            )
        )
    )
    # fsdptool's trainer copies the inputs of the next step while one runs: 4 micro-batches of 2 rows of 64
    # tokens and labels, in int64.
    ahead = 4 * 2 * 64 * 2 * 8
    peak = by_hand.candidates[0].allocated_peak_bytes
    assert peak is not None
    assert plan.candidates[0].allocated_peak_bytes == peak - ahead
    assert file_words.described(plan)[0].startswith("run described for axolotl")
    # The file alone, where a configuration goes: the same run.
    alone = Options(config=str(tmp_path / "train.yaml"), model=model, gpu="H100-80GB-SXM", gpus=2)
    assert read_request(alone).inputs.run == plan.inputs.run


@pytest.mark.parametrize(
    ("named", "attention"),
    [
        ("attn_implementation: flash_attention_3", "flash_attention_3"),
        ("attn_implementation: kernels-community/vllm-flash-attn3", "flash_attention_3"),
        ("flex_attention: true", "flex_attention"),
        ("attn_implementation: eager", "eager"),
        ("", "sdpa"),
    ],
)
def test_the_attention_of_a_file_is_planned(model: str, tmp_path: Path, named: str, attention: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(AXOLOTL.replace("flash_attention: true", named))
    run = read_file_run(str(path))
    assert run is not None
    made = file_run(run, model, "train.yaml", 2, fused=True)
    assert made.recipe.model.attention == attention
    # A recipe for our own trainer, and a run whose ranks share sequences, take no fused attention.
    for given in ({}, {"fused": True, "decided": ("cp",)}):
        other = file_run(run, model, "train.yaml", 2, **cast("Any", given)).recipe.model.attention
        assert other == ("eager" if attention == "eager" else "sdpa")


@pytest.mark.parametrize(
    ("named", "given", "packing", "mask"),
    [
        ("flash_attention_2", None, True, False),
        ("flash_attention_2", "sdpa", False, True),
        ("flash_attention_2", "flash_attention_3", True, False),
        ("sdpa", "flash_attention_2", True, False),
        ("sdpa", None, False, True),
    ],
)
def test_the_attention_that_is_planned_decides_whether_rows_are_padded(
    model: str, tmp_path: Path, named: str, given: str | None, packing: bool, mask: bool
) -> None:
    path = tmp_path / "run.sh"
    line = "trl sft --model_name_or_path org/model --output_dir o --bf16 true --max_length 64"
    path.write_text(f"{line} --attn_implementation {named}\n")
    asked = Options(reference=str(path), model=model, gpu="A100-80GB-SXM", search=False)
    recipe = read_request(asked if given is None else asked | Options(attention=given)).inputs.recipe
    assert (recipe.data.packing, recipe.data.document_mask) == (packing, mask)
    assert recipe.model.attention == (given or named)


@pytest.mark.slow
def test_dropout_of_adapters_keeps_an_input_for_each(model: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    plain = AXOLOTL.replace("gradient_checkpointing: true", "gradient_checkpointing: false")
    plan, dropped = (planned(path, plain + text, model) for text in ("", "lora_dropout: 0.1\n"))
    assert dropped.inputs.recipe.method.lora == Lora(rank=4, targets="all-linear", dropout=0.1)
    assert dropped.inputs.run is not None
    assert "lora_dropout" in dropped.inputs.run.keys.used
    before, after = (item.candidates[0].allocated_peak_bytes for item in (plan, dropped))
    assert before is not None
    assert after is not None
    assert after > before


@pytest.mark.slow
def test_options_override_the_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    plan = planned(path, AXOLOTL, model)
    longer = planned(path, AXOLOTL, model, sequence_length=128, micro_batch=1, checkpointing="none")
    assert longer.candidates[0].settings.micro_batch == 1
    assert longer.candidates[0].settings.checkpointing == "none"
    assert longer.inputs.recipe.batch.sequence_length == 128
    assert longer.inputs.recipe.method == plan.inputs.recipe.method


@pytest.mark.slow
def test_an_option_decides_what_the_file_leaves_open(model: str, tmp_path: Path) -> None:
    path, text = tmp_path / "train.yaml", TORCHTUNE.replace("\nbatch_size: 3", "")
    assert planned(path, text, model).verdict == "unknown"
    assert planned(path, text, model, micro_batch=2).verdict == "fits"


@pytest.mark.slow
def test_an_option_decides_what_a_variable_leaves_open(model: str, tmp_path: Path) -> None:
    text = AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: ${MB}")
    text = text.replace("gradient_accumulation_steps: 4", "gradient_accumulation_steps: ${STEPS}")
    path = tmp_path / "train.yaml"
    left = planned(path, text, model)
    one = planned(path, text, model, micro_batch=2)
    both = planned(path, text, model, micro_batch=2, accumulation=4)
    assert [[item.what for item in plan.inputs.limits] for plan in (left, one, both)] == [
        [
            "micro_batch_size",
            "gradient_accumulation_steps",
            "the micro-batch, which is left open: 1 is planned",
        ],
        ["gradient_accumulation_steps"],
        [],
    ]
    assert [plan.verdict for plan in (left, one, both)] == ["unknown", "unknown", "fits"]


@pytest.mark.slow
def test_adapters_of_no_rank_leave_no_certain_verdict(model: str, tmp_path: Path) -> None:
    path, text = tmp_path / "train.yaml", AXOLOTL.replace("lora_r: 4", "lora_r: 0")
    assert planned(path, text, model).verdict == "unknown"
    assert planned(path, text, model, lora_rank=4).verdict == "fits"


def test_a_run_without_fsdp_holds_a_copy_on_every_rank(model: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    two, four = (planned(path, LLAMA_FACTORY, model, gpus=count) for count in (2, 4))
    for plan, copies in ((two, 2), (four, 4)):
        assert plan.candidates[0].settings.dp_replicate == copies
        assert plan.candidates[0].settings.dp_shard == 1
    states = [plan.details.states for plan in (two, four)]
    assert states[0] == states[1]
    assert any("does not use FSDP" in line for line in file_words.described(two))
    # fp32 masters have fp32 gradients and as many bytes of buckets; nothing is gathered.
    sizes_of = {str(component.name): component.bytes for component in two.candidates[0].components}
    for name in ("all-reduce buffers", "replicated parameters"):
        assert sizes_of[name] == pytest.approx(states[0]["gradients"], rel=0.01)
    assert not sizes_of.get("unsharded parameters")
    # What is written from it is trained with FSDP2.
    path.write_text(LLAMA_FACTORY.replace("org/model", model))
    assert "ignored_modules" not in fsdptool.emit_config(str(path), processes=2)


@pytest.mark.slow
def test_copies_become_shards_where_a_search_or_an_option_shards_them(model: str, tmp_path: Path) -> None:
    """What no rank shards is not what FSDP ignores: with ranks that share, each holds its part."""
    line = "llamafactory-cli train --stage sft --do_train --cutoff_len 64 --gradient_checkpointing true\n"
    own = {"gpus": 4, "max_batch": False}
    copies = planned(tmp_path / "run.sh", line, model, **own)
    shards = planned(tmp_path / "run.sh", line, model, hsdp="1x4", **own)

    for name, held in copies.details.states.items():
        assert shards.details.states[name] == pytest.approx(held / 4, rel=0.02)
    assert not any("a copy on every rank" in item.what for item in shards.inputs.limits)
    assert "--hsdp 1x4" in " ".join(shards.details.flags)
    fixed = {"checkpointing": "full", "micro_batch": 1, "accumulation": 1, "offload": False}
    found = planned(tmp_path / "run.sh", line, model, search=True, **fixed, **own)
    assert {item.settings.dp_shard for item in found.candidates} == {1, 2, 4}


@pytest.mark.slow
def test_copies_that_are_trained_as_they_are_stored_have_the_buckets_of_their_gradients(
    tmp_path: Path,
) -> None:
    """A step of the message that fsdptool's trainer sends instead would hold four times the weights."""
    sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 128, "num_attention_heads": 4}
    config, path = tmp_path / "config.json", tmp_path / "train.args"
    config.write_text(
        json.dumps(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, "num_hidden_layers": 1}
        )
    )
    gpus = tmp_path / "gpus.yaml"
    gpus.write_text(
        "gpus: [{name: Tiny, memory_bytes: 1200000000, flops: {float32: 1.0e13, bfloat16: 1.0e14},"
        " memory_bandwidth: 1.0e12, link_bandwidth: 1.0e11, source: test}]"
    )
    words_of_run = (
        "NPROC_PER_NODE=2 swift sft --train_type full --torch_dtype bfloat16 --optim sgd --max_length 64"
    )
    plan = planned(path, words_of_run + " --packing true", str(config), gpu="Tiny", gpus_file=gpus)
    sizes_of = {str(component.name): component.bytes for component in plan.candidates[0].components}
    assert sizes_of["all-reduce buffers"] == sizes_of["replicated parameters"]
    assert plan.shortfall is not None
    assert plan.shortfall.kind == "states"


@pytest.mark.slow
def test_modules_saved_beside_adapters_are_cast_where_nothing_is_sharded(model: str, tmp_path: Path) -> None:
    """Their fp32 copies meet a base in 16 bits, which autocast allows."""
    head, _, _ = AXOLOTL.partition("fsdp_version")
    saved = head + "lora_modules_to_save: [embed_tokens, lm_head]\n"
    plans = [planned(tmp_path / "train.yaml", text, model) for text in (head, saved)]
    assert [plan.verdict for plan in plans] == ["fits", "fits"]
    assert all(any("does not use FSDP" in line for line in file_words.described(plan)) for plan in plans)
    gradients = [plan.details.states["gradients"] for plan in plans]
    assert gradients[1] - gradients[0] >= 2 * 512 * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("python run_glue.py --task_name mrpc --do_train --max_seq_length 32", 8),
        ("trl reward --dataset_name d --max_length 32", 16),
    ],
)
def test_texts_that_are_labelled_have_a_head_of_classes(
    model: str, tmp_path: Path, line: str, rows: int
) -> None:
    """The two rows of a pair are rows of one micro-batch."""
    text = f"{line} --model_name_or_path org/model --output_dir o\n"
    plan = planned(tmp_path / "run.sh", text, model, gpus=1)
    assert plan.candidates[0].device_total_bytes is not None
    assert plan.inputs.recipe.model.overrides["architectures"] == ["LlamaForSequenceClassification"]
    assert (plan.verdict, plan.inputs.recipe.batch.micro_batch) == ("fits", rows)


@pytest.mark.parametrize(
    ("line", "objective", "method", "open_points"),
    [
        ("trl kto", "apo_zero_unpaired", "distillation", 0),
        ("trl kto --use_peft", None, "lora", 0),
        ("trl dpo --use_peft", "orpo", "lora", 0),
        ("llamafactory-cli train --stage kto --finetuning_type lora --lora_target all", None, "lora", 1),
    ],
)
def test_the_reference_of_preferences(
    model: str, tmp_path: Path, line: str, objective: str | None, method: str, open_points: int
) -> None:
    """It is a frozen model beside the trained one, or the base of adapters."""
    path = tmp_path / "run.sh"
    path.write_text(f"{line} --model_name_or_path org/model --output_dir o --bf16 true\n")
    inputs = read_request(Options(reference=str(path), model=model, gpu="A100-80GB-SXM", search=False)).inputs
    assert (inputs.recipe.objective.name, inputs.recipe.method.name) == (objective, method)
    assert sum("reference" in limit.what for limit in inputs.limits or ()) == open_points


@pytest.mark.parametrize(
    ("line", "told"),
    [("trl kto", True), ("trl dpo --use_peft", True), ("trl dpo", False), ("trl sft", False)],
)
def test_the_time_of_forwards_that_are_not_planned_is_told(
    model: str, tmp_path: Path, line: str, told: bool
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{line} --model_name_or_path org/model --output_dir o --bf16 true\n")
    inputs = read_request(Options(reference=str(path), model=model, gpu="A100-80GB-SXM", search=False)).inputs
    assert ("forwards" in suited(resolve(model), inputs).loop.not_planned) == told


@pytest.mark.slow
def test_autocast_narrows_a_frozen_base_where_nothing_is_gathered(tmp_path: Path) -> None:
    """GPT-2's Conv1D takes no input of another dtype than its weight."""
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 512}
    gpt2 = tmp_path / "config.json"
    gpt2.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}))
    head = "model_name_or_path: org/model\ndataset_name: d\noutput_dir: o\nuse_peft: true\nlora_r: 4\n"
    rows = "lora_target_modules: [c_attn]\nmax_length: 512\nper_device_train_batch_size: 8\n"
    narrow, wide = (
        planned(tmp_path / "train.yaml", f"{head}{rows}bf16: {on}\n", str(gpt2)).candidates[0]
        for on in ("true", "false")
    )
    assert narrow.allocated_peak_bytes is not None and wide.allocated_peak_bytes is not None
    assert narrow.allocated_peak_bytes < 0.7 * wide.allocated_peak_bytes


@pytest.mark.slow
def test_adapters_that_no_program_widens_are_planned_in_16_bits(model: str, tmp_path: Path) -> None:
    """peft casts adapters to fp32 unless it is told not to; accelerate casts all that trains under FSDP2."""
    head, _, block = AXOLOTL.partition("fsdp_version")
    narrow = head + "peft_autocast_adapter_dtype: false\n"
    texts = (head, narrow, narrow + "fsdp_version" + block)
    plans = [planned(tmp_path / "train.yaml", text, model) for text in texts]
    assert [plan.inputs.loop.adapter_dtype for plan in plans] == [None, "bfloat16", None]
    wide, thin, _ = (plan.details.states for plan in plans)
    assert thin["gradients"] * 2 == wide["gradients"]
    adapters = wide["gradients"] // 4
    assert wide["parameters"] - thin["parameters"] == adapters * 2


@pytest.mark.parametrize(
    ("named", "dtype"), [(None, "bfloat16"), ("float16", "float16"), ("float32", "float32")]
)
def test_a_frozen_base_has_the_dtype_of_its_checkpoint(
    model: str, tmp_path: Path, named: str | None, dtype: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(Path(model).read_text()), "dtype": named}))
    path = tmp_path / "train.yaml"
    path.write_text(LLAMA_FACTORY.replace("finetuning_type: full", "finetuning_type: lora"))
    options = {"reference": str(path), "model": str(config), "gpu": "H100-80GB-SXM", "gpus": 2}
    assert read_request(cast("Options", options)).inputs.recipe.model.dtype == dtype


@pytest.mark.slow
def test_fused_kernels_and_losses_of_a_file_are_planned(model: str, tmp_path: Path) -> None:
    liger = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rms_norm: true\nliger_rope: true\n"
    liger += "liger_fused_linear_cross_entropy: true\nliger_glu_activation: false\n"
    kernels = "lora_mlp_kernel: true\nlora_qkv_kernel: true\nlora_o_kernel: true\n"
    plain, fused = (
        planned(tmp_path / "train.yaml", text, model) for text in (AXOLOTL, AXOLOTL + liger + kernels)
    )
    assert (plain.inputs.loop.assumed, plain.inputs.loop.head_loss) == ((), None)
    assert fused.inputs.loop.assumed == ("fused_norm", "fused_rope", "fused_glu", "fused_lora")
    assert fused.inputs.loop.head_loss == "liger"
    times = [plan.candidates[0].seconds["compute"] for plan in (plain, fused)]
    assert times[1] < times[0]
    text = LLAMA_FACTORY + "enable_liger_kernel: true\n"
    factory = planned(tmp_path / "train.yaml", text, model)
    assert factory.inputs.loop.assumed == ("fused_norm", "fused_rope", "fused_glu")
    assert planned(tmp_path / "train.yaml", text, model, loss="whole").inputs.loop.head_loss is None


def test_the_model_of_a_file_is_known_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    text = AXOLOTL.replace("org/model", "meta-llama/Llama-3.1-8B")
    path.write_text(text)
    request = read_request(Options(reference=str(path), gpu="H100-80GB-SXM", gpus=8, search=False))
    assert request.inputs.recipe.model.reference == "llama3.1:8b"
    with pytest.raises(PlanError, match="trains org/model, whose sizes are not known here"):
        planned(path, AXOLOTL, None)


@pytest.mark.slow
def test_a_program_with_layers_of_its_own_is_planned(model: str, tmp_path: Path) -> None:
    plan = planned(tmp_path / "full.yaml", TORCHTUNE, model)
    recipe = plan.inputs.recipe
    assert (recipe.batch.micro_batch, recipe.batch.sequence_length) == (3, 64)
    assert recipe.model.dtype == "bfloat16"
    assert plan.inputs.settings.mixed_precision == "no"
    assert plan.candidates[0].settings.layout == "native"
    assert plan.candidates[0].settings.checkpointing == "full"


@pytest.mark.slow
def test_what_is_not_planned_leaves_no_certain_verdict(model: str, tmp_path: Path) -> None:
    """An upper bound that fits is certain, and so is a lower bound that does not fit."""
    path = tmp_path / "train.yaml"
    paged = planned(path, AXOLOTL.replace("adamw_torch_fused", "paged_adamw_8bit"), model)
    assert bound_of(paged.inputs.limits) == "upper"
    assert paged.verdict == "fits"
    plan = planned(
        path,
        AXOLOTL.replace("adamw_torch_fused", "paged_adamw_8bit"),
        model,
        gpu="RTX-4090-24GB",
        micro_batch=60_000,
    )
    assert plan.verdict == "unknown"
    text = AXOLOTL + "rl: kto\n"
    assert planned(path, text, model).verdict == "unknown"
    large = planned(path, text, model, gpu="RTX-4090-24GB", micro_batch=60_000)
    assert bound_of(large.inputs.limits) == "lower"
    assert large.verdict == "does_not_fit"
    assert any("kto" in line and "more than is planned" in line for line in file_words.described(large))


@pytest.mark.parametrize(
    ("sides", "bound"),
    [
        ((), "exact"),
        (("less",), "upper"),
        (("more", "more"), "lower"),
        (("less", "more"), "open"),
        ((None,), "open"),
    ],
)
def test_bounds(sides: tuple[Any, ...], bound: str) -> None:
    assert bound_of([PlanLimit("key", side) for side in sides]) == bound


@pytest.mark.slow
def test_rows_that_are_not_packed_may_be_shorter(model: str, tmp_path: Path) -> None:
    path, text = tmp_path / "train.yaml", AXOLOTL.replace("sample_packing: true\n", "")
    small = {"gpu": "RTX-4090-24GB", "micro_batch": 60_000}
    plan = planned(path, text, model, **small)
    assert [item.what for item in plan.inputs.limits] == [
        "rows shorter than 64 tokens: samples are not packed"
    ]
    assert (plan.verdict, planned(path, text, model).verdict) == ("unknown", "fits")
    assert planned(path, f"{text}pad_to_sequence_len: true\n", model, **small).verdict == "does_not_fit"
    assert planned(path, text, model, sequence_length=64, **small).verdict == "does_not_fit"
    # No row is so short that it makes room for the weights.
    assert planned(path, text, "llama3:70b", gpu="RTX-4090-24GB", gpus=1).verdict == "does_not_fit"


def test_a_second_description_of_the_run_is_refused(model: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    with pytest.raises(PlanError, match="describes a whole run: --config would describe another"):
        planned(path, AXOLOTL, model, config=str(path))
    with pytest.raises(PlanError, match="--model names the model of a training file"):
        read_request(Options(reference=model, model=model, gpu="H100-80GB-SXM"))
    path.write_text(AXOLOTL.replace("adapter: lora", "adapter: [lora"))
    with pytest.raises(ConfigError, match=r"train\.yaml:\d+: not YAML"):
        read_request(Options(reference=str(path), model=model, gpu="H100-80GB-SXM", gpus=2))
    with pytest.raises(PlanError, match="leaves the number of processes to its launch"):
        planned(path, AXOLOTL, model, gpus=None)


@pytest.mark.slow
def test_a_file_is_judged_by_its_own_run(model: str, tmp_path: Path) -> None:
    """Not by the smallest full fine-tuning of its model, which is another run."""
    path = tmp_path / "train.yaml"
    for batch, unfit in ((2, False), (60_000, True)):
        path.write_text(AXOLOTL.replace("micro_batch_size: 2", f"micro_batch_size: {batch}"))
        reading = fsdptool.validate(path, model=model, gpu="RTX-4090-24GB", gpus=2).readings[0]
        found = [item.message for item in reading.diagnostics if item.code == "FSD503"]
        assert [message.endswith("at micro-batch 60000 of 64 tokens") for message in found] == [True] * unfit


def test_a_recipe_is_planned_as_a_recipe(model: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{reference: {model}}}\ndata: {{source: synthetic}}\n"
        "batch: {sequence_length: 32}\nsteps: 1\n"
    )
    inputs = read_request(Options(reference=str(path), gpu="H100-80GB-SXM", gpus=2)).inputs
    assert inputs.run is None
    assert inputs.loop.program == "fsdptool"
    assert inputs.recipe.batch.sequence_length == 32
    assert inputs.recipe.model.reference == model


def test_settings_of_accelerate_alone_describe_no_run(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    with pytest.raises(PlanError, match="neither a model nor a training file") as caught:
        read_request(Options(reference=str(path), gpu="H100-80GB-SXM", gpus=2))
    assert f"fsdptool plan MODEL --config {path}" in str(caught.value.help)


@pytest.mark.slow
def test_a_command_line_is_planned_like_a_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["trl", "sft", "--model_name_or_path", "org/model", "--max_length", "64", "--bf16", "--use_peft"]
    line += ["--lora_r", "8", "--per_device_train_batch_size", "3", "--dataset_name", "org/data"]
    options = ["--gpu", "H100-80GB-SXM", "--gpus", "2", "--model", model, "--no-search", "--format", "json"]
    assert run(["plan", *options, "--", *line]) == 0
    words = json.loads(capsys.readouterr().out)
    path = tmp_path / "train.sh"
    path.write_text(" ".join(line) + "\n")
    assert run(["plan", str(path), *options]) == 0
    file = json.loads(capsys.readouterr().out)
    assert words["inputs"] == file["inputs"]
    assert words["inputs"]["recipe"]["method"]["lora"]["rank"] == 8
    assert words["inputs"]["recipe"]["batch"]["micro_batch"] == 3


def test_words_that_start_no_program_are_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model, "further", "--gpu", "H100-80GB-SXM"]) == 2
    assert "is not the command line of a training program" in capsys.readouterr().err


def test_pictures_whose_sides_vary_are_planned_as_the_largest_square(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "job: extension\nconfig:\n  name: x\n  process:\n    - type: sd_trainer\n"
        "      network: {type: lora, linear: 16}\n"
        "      datasets: [{folder_path: d, resolution: [512, 768]}]\n"
        "      train: {batch_size: 2, dtype: bf16, optimizer: adamw8bit, ema_config: {use_ema: true}}\n"
        "      model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true}\n"
    )
    inputs = read_request(Options(reference=str(path), gpu="H100-80GB-SXM")).inputs
    batch = inputs.recipe.batch
    assert (batch.micro_batch, batch.height, batch.width) == (2, 768, 768)
    assert inputs.recipe.ema.decay is not None
    assert inputs.limits == ()


@pytest.mark.parametrize(
    ("optimizer", "bound"),
    [
        ("lion_8bit", "upper"),
        ("prodigy", "open"),
        ("adamw_torch_4bit", "upper"),
        ("adamw_torch_fused", "exact"),
    ],
)
def test_an_optimizer_that_is_not_known_is_a_bound_only_where_its_states_are_smaller(
    optimizer: str, bound: str, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(AXOLOTL.replace("adamw_torch_fused", optimizer))
    inputs = read_request(Options(reference=str(path), model=model, gpu="H100-80GB-SXM", gpus=2)).inputs
    assert bound_of(inputs.limits) == bound


def test_copies_follow_the_ranks_of_the_plan(model: str, tmp_path: Path) -> None:
    """Also where cluster files say them, and not the file or an option."""
    path = tmp_path / "train.yaml"
    path.write_text(LLAMA_FACTORY)
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    for file, count in ((one, 1), (two, 2)):
        file.write_text(f"gpu: H100-80GB-SXM\ngpus_per_node: {count}\n")
    for given, copies in ({"clusters": [two]}, 2), ({"gpu": "H100-80GB-SXM", "gpus": 1}, 1):
        inputs = read_request(cast("Options", {"reference": str(path), "model": model, **given})).inputs
        assert (inputs.settings.mesh.dp_replicate, inputs.settings.mesh.dp_shard) == (copies, 1)
        assert [limit.side for limit in inputs.limits] == ["less"] * (copies > 1)
    with pytest.raises(PlanError, match="different numbers of GPUs"):
        read_request(Options(reference=str(path), model=model, clusters=[one, two]))


@pytest.mark.parametrize(
    ("launcher", "given", "nodes"),
    [
        ("torchrun --nnodes 2 --nproc_per_node 4", {}, (2, 4)),
        ("torchrun --nnodes 2 --nproc_per_node 4", {"gpus": 8}, (1, 8)),
        ("accelerate launch --multi_gpu --num_processes 16", {}, (2, 8)),
        ("accelerate launch --multi_gpu --num_processes 12 --num_machines 3", {}, (3, 4)),
        ("accelerate launch --multi_gpu --num_processes 6", {}, (1, 6)),
        ("accelerate launch --multi_gpu --num_processes 12", {}, (2, 6)),
    ],
)
def test_the_nodes_are_those_of_the_launch(
    model: str, tmp_path: Path, launcher: str, given: dict[str, int], nodes: tuple[int, int]
) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"{launcher} -m trl.scripts.sft --model_name_or_path {model} --max_length 64\n")
    options = {"reference": str(path), "gpu": "H100-80GB-SXM", **given}
    (cluster,) = (offer for offer in read_request(cast("Options", options)).inputs.clusters)
    assert (cluster.nodes, cluster.gpus_per_node) == nodes
    if not given:
        settings = read_settings(fsdptool.emit_config(str(path))).require()
        assert (settings.num_machines, settings.num_processes) == (nodes[0], nodes[0] * nodes[1])


def test_a_global_batch_that_its_program_refuses_does_not_stop_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        "recipe: TrainFinetuneRecipeForNextTokenPrediction\nmodel:\n"
        "  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
        "  pretrained_model_name_or_path: Qwen/Qwen3-8B\n"
        "step_scheduler: {global_batch_size: 12, local_batch_size: 1}\n"
        "distributed: {strategy: fsdp2, dp_size: 8, dp_replicate_size: 1}\ndataset: {}\n"
        "optimizer: {_target_: torch.optim.AdamW}\n"
    )
    given: dict[str, Any] = {"reference": str(path), "gpu": "H100-80GB-SXM"}
    inputs = read_request(cast("Options", {**given, "gpus": 8})).inputs
    assert (inputs.recipe.batch.accumulation, inputs.recipe.batch.global_batch) == (1, None)
    assert [limit.side for limit in inputs.limits if "global batch of 12" in limit.what] == ["more"]
    inputs = read_request(cast("Options", {**given, "gpus": 5})).inputs
    assert inputs.recipe.batch.global_batch == 12


@pytest.mark.slow
def test_a_launch_that_the_file_does_not_name_may_shard(model: str, tmp_path: Path) -> None:
    """What needs too much memory as copies may fit in shards; what fits as copies fits."""
    from fsdptool.config.described import describe_command

    path = tmp_path / "train.yaml"
    adapters = LLAMA_FACTORY.replace("finetuning_type: full", "finetuning_type: lora")
    assert planned(path, adapters, model).verdict == "fits"
    assert planned(path, LLAMA_FACTORY, "llama3:8b", gpu="RTX4090").verdict == "unknown"
    line = "torchrun --nproc_per_node 2 sft.py --model_name_or_path gpt2 --dataset_name d --output_dir o"
    _, named = describe_command(line.split())
    options = Options(model="llama3:8b", gpu="RTX4090", gpus=2, search=False)
    assert make_plan(read_request(options, named)).verdict == "does_not_fit"


def test_sharding_that_nothing_says_leaves_no_certain_verdict(model: str) -> None:
    from fsdptool.config.described import describe_command

    line = "accelerate launch --config_file nowhere.yaml --num_processes 2 sft.py --model_name_or_path gpt2"
    _, run_open = describe_command([*line.split(), "--dataset_name", "d", "--output_dir", "o"])
    options = Options(model=model, gpu="H100-80GB-SXM", gpus=2)
    assert bound_of(read_request(options, run_open).inputs.limits) == "open"


@pytest.mark.slow
def test_other_commands_take_a_training_file_for_a_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(AXOLOTL.replace("org/model", model))
    saved = ["plan", "train.yaml", "--gpu", "H100-80GB-SXM", "--gpus", "2", "--no-search", "-o", "plan.json"]
    assert run(saved) == 0
    # compare: the file on the hardware of the plan.
    Path("other.yaml").write_text(AXOLOTL.replace("org/model", model).replace("lora_r: 4", "lora_r: 8"))
    compared = {row.what: (row.left, row.right) for row in fsdptool.compare("plan.json", "other.yaml").rows}
    assert compared["recipe.method.lora.rank"] == (4, 8)
    assert compared["verdict"] == ("fits", "fits")
    assert run(["compare", "train.yaml", "other.yaml"]) == 2
    assert "says which GPUs it runs on" in capsys.readouterr().err
    # emit-config: its settings, and its recipe.
    assert (
        run(["emit-config", "train.yaml", "--processes", "4", "-o", "a.yaml", "--recipe-output", "r.yaml"])
        == 0
    )
    settings, recipe = fsdptool.read_settings("a.yaml").settings, fsdptool.read_recipe("r.yaml")
    assert settings is not None
    assert (settings.num_processes, settings.wrap_classes) == (4, ("LlamaDecoderLayer",))
    assert settings.activation_checkpointing
    assert (recipe.batch.micro_batch, recipe.batch.accumulation) == (2, 4)
    assert recipe.method.lora is not None and recipe.method.lora.rank == 4
    with pytest.raises(PlanError, match="leaves the number of processes to its launch"):
        fsdptool.emit_config("train.yaml")
    # init: a recipe and a configuration that fit, in fsdptool's own loop.
    hardware = ["--gpu", "H100-80GB-SXM", "--gpus", "2"]
    assert run(["init", "train.yaml", *hardware, "-o", "started"]) == 0
    started = fsdptool.read_recipe("started/recipe.yaml")
    assert started.method.lora is not None and started.method.lora.rank == 4
    assert (started.batch.sequence_length, started.batch.accumulation) == (64, 4)
    assert started.sharding.layout == "native" and not started.objective.options
    # A run for which no recipe exists is not written as another one.
    Path("dpo.yaml").write_text(AXOLOTL.replace("org/model", model) + "rl: dpo\n")
    assert run(["init", "dpo.yaml", *hardware, "-o", "none"]) == 2
    assert "asks for what init does not write: lora, dpo" in capsys.readouterr().err
    assert run(["emit-config", "dpo.yaml", "--processes", "4", "--recipe-output", "d.yaml"]) == 2
    assert not Path("d.yaml").exists()


def test_a_model_that_megatron_divides_is_refused(model: str, tmp_path: Path) -> None:
    line = "megatron sft --model org/model --tensor_model_parallel_size 2 --max_length 64\n"
    with pytest.raises(PlanError, match="Megatron divides this model"):
        planned(tmp_path / "run.sh", line, model)
    file = (
        "model_name_or_path: org/model\nstage: sft\ndo_train: true\nfinetuning_type: full\ncutoff_len: 64\n"
    )
    with pytest.raises(PlanError, match="Megatron divides this model"):
        planned(tmp_path / "run.yaml", f"{file}pipeline_model_parallel_size: 2\n", model)


@pytest.mark.parametrize(
    ("compile_", "loss"),
    [
        ("enable = true", "compiled"),
        ('enable = true\ncomponents = ["model"]', "whole"),
        ("enable = false", "whole"),
    ],
)
def test_the_loss_that_torchtitan_compiles_makes_no_copy_in_fp32(
    model: str, tmp_path: Path, compile_: str, loss: str
) -> None:
    path = tmp_path / "train.toml"
    sizes = "local_batch_size = 1\nseq_len = 64\nsteps = 1"
    path.write_text(
        f'[job]\n[model]\nname = "llama3"\nflavor = "mine"\n[training]\n{sizes}\n'
        f"[parallelism]\ndata_parallel_shard_degree = -1\n[compile]\n{compile_}\n"
    )
    described = read_file_run(str(path))
    assert described is not None
    assert described.fused_loss == "none"
    assert file_run(described, model, "train.toml", 2).options["loss"] == loss


def test_peft_chooses_by_the_model_that_is_planned(tmp_path: Path) -> None:
    """The name says nothing of its type; the configuration does."""
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16}
    gpt2 = tmp_path / "config.json"
    gpt2.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}))
    path = tmp_path / "run.sh"
    path.write_text("trl sft --model_name_or_path org/mine --dataset_name d --use_peft\n")
    described = read_file_run(str(path))
    assert described is not None
    lora = file_run(described, str(gpt2), "run.sh", 1).recipe.method.lora
    assert lora is not None
    assert lora.targets == ("c_attn",)


def test_adapters_of_experts_are_planned_without_dropout(tmp_path: Path) -> None:
    """peft refuses dropout for fused weights, which were layers in the transformers of many files."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    experts = {"moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}
    config = tmp_path / "config.json"
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config.write_text(json.dumps({**kind, **sizes, **experts}))
    path = tmp_path / "run.yaml"
    path.write_text(f"{LLAMA_FACTORY}lora_dropout: 0.1\n".replace("type: full", "type: lora"))
    described = read_file_run(str(path))
    assert described is not None
    planned = file_run(described, str(config), "run.yaml", 1)
    assert planned.recipe.method.lora is not None and planned.recipe.method.lora.dropout == 0
    assert any("dropout" in item.what and item.side == "more" for item in planned.limits)
    named = replace(described, lora_targets=("q_proj", "v_proj"))
    lora = file_run(named, str(config), "run.yaml", 1).recipe.method.lora
    assert lora is not None and lora.dropout == 0.1


def test_rows_are_planned_whole_where_their_parts_cannot_be(model: str, tmp_path: Path) -> None:
    """Context parallelism is planned of plain text only: of sinks, pictures and states, a bound is."""
    path = tmp_path / "train.yaml"
    path.write_text(f"{AXOLOTL}context_parallel_size: 2\n")
    described = read_file_run(str(path))
    assert described is not None and described.mesh.cp == 2
    assert file_run(described, model, "train.yaml", 4).settings.mesh.cp == 2
    whole = file_run(described, "gpt-oss:20b", "train.yaml", 4)
    assert whole.settings.mesh.cp == 1
    assert [item.side for item in whole.limits if "parallelism of 2" in item.what] == ["less"]
    given = file_run(described, "gpt-oss:20b", "train.yaml", 4, decided=("cp",))
    assert not any("parallelism of 2" in item.what for item in given.limits)


@pytest.mark.parametrize(("samples", "accumulation"), [(4, 1), (8, 2)])
def test_ranks_with_whole_rows_accumulate_as_often_as_the_file_says(
    samples: int, accumulation: int, tmp_path: Path
) -> None:
    """Two ranks to a row are four data-parallel ranks of eight; with whole rows all eight have some."""
    path = tmp_path / "automodel.yaml"
    path.write_text(f"""
recipe: TrainFinetuneRecipeForNextTokenPrediction
model: {{pretrained_model_name_or_path: openai/gpt-oss-20b, attn_implementation: flash_attention_2}}
step_scheduler: {{global_batch_size: {samples}, local_batch_size: 1}}
distributed: {{strategy: fsdp2, cp_size: 2}}
dataset: {{seq_length: 64}}
""")
    described = read_file_run(str(path))
    assert described is not None and described.program == "automodel"
    whole = file_run(described, None, "automodel.yaml", 8, fused=True)
    batch = whole.recipe.batch
    assert (whole.settings.mesh.cp, batch.micro_batch, batch.global_batch) == (1, 1, 8 * accumulation)
    assert whole.recipe.model.attention == "flash_attention_2"
