"""Plans for other programs' loops: what follows from the program, what is said of the rest, sizes assumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdptool.planning.plan import make_plan, plan_document, read_plan
from fsdptool.planning.request.inputs import read_request
from fsdptool.planning.request.options import Options
from fsdptool.records.plan import PlanInputs
from fsdptool.records.recipe import ModelChoice, Recipe, Sharding
from fsdptool.report import file_words
from fsdptool.report import plan_words as words

SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500}
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
"""
ARGUMENTS = """
bf16: true
fsdp: full_shard
fsdp_config:
  version: 2
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
TRAINER = "output_dir: out\nlearning_rate: 1.0e-5\nper_device_train_batch_size: 4\n" + ARGUMENTS
TRL = (
    """
model_name_or_path: org/model
dataset_name: org/data
max_length: 2048
gradient_accumulation_steps: 8
packing: true
gradient_checkpointing: true
"""
    + ARGUMENTS
)
LLAMA_FACTORY = (
    "model_name_or_path: org/model\nstage: sft\nfinetuning_type: lora\ncutoff_len: 4096\n" + ARGUMENTS
)
AXOLOTL = """
base_model: org/model
adapter: lora
lora_r: 16
lora_modules_to_save: [embed_tokens]
sequence_len: 8192
micro_batch_size: 2
gradient_checkpointing: true
optimizer: adamw_torch_8bit
bf16: true
fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: GPT2Block
"""
TORCHTITAN = """
[training]
local_batch_size = 8
seq_len = 8192
mixed_precision_param = "bfloat16"

[parallelism]
data_parallel_shard_degree = -1
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3.llama3_8b
dtype: bf16
batch_size: 2
fsdp_cpu_offload: false
"""


def inputs_of(tmp_path: Path, text: str | None = None, name: str = "file.yaml", **options: Any) -> PlanInputs:
    """Return the inputs of a request, with what the model decides of them."""
    from fsdptool.planning.request.followed_loop import suited
    from fsdptool.source import resolve_choice

    if text is not None:
        (tmp_path / name).write_text(text)
        options["config"] = tmp_path / name
    given: dict[str, Any] = {"reference": "gpt2:small", "gpu": "L4-24GB", "gpus": 4, **options}
    inputs = read_request(Options(**given)).inputs
    return suited(resolve_choice(inputs.recipe.model), inputs)


@pytest.mark.parametrize(
    ("text", "name", "program", "layout", "gradients", "chunk", "inside"),
    [
        (TRAINER, "file.yaml", "trainer", "accelerate", "unsharded", 0, True),
        (TRL, "file.yaml", "trl", "accelerate", "unsharded", None, True),
        (LLAMA_FACTORY, "file.yaml", "llamafactory", "accelerate", "unsharded", 0, True),
        (AXOLOTL, "file.yaml", "axolotl", "accelerate", "unsharded", 0, True),
        (TORCHTITAN, "file.toml", "torchtitan", "native", "sharded", 0, False),
        (TORCHTUNE, "file.yaml", "torchtune", "native", "sharded", None, False),
    ],
)
def test_a_file_is_planned_as_the_loop_of_the_program_that_reads_it(
    tmp_path: Path,
    text: str,
    name: str,
    program: str,
    layout: str,
    gradients: str,
    chunk: int | None,
    inside: bool,
) -> None:
    inputs = inputs_of(tmp_path, text, name)
    sharding = inputs.recipe.sharding
    assert (inputs.loop.program, sharding.layout, sharding.accumulation) == (program, layout, gradients)
    assert (inputs.recipe.objective.options.get("chunk"), inputs.loop.loss_in_forward) == (chunk, inside)
    assert not inputs.loop.marks_last
    assert "gradients" in inputs.fixed


AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 4, local_batch_size: 1}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: org/model
  torch_dtype: bf16
distributed: {strategy: fsdp2}
dataset: {seq_length: 64}
optimizer:
  _target_: transformer_engine.pytorch.optimizers.fused_adam.FusedAdam
  exp_avg_dtype: torch.float32
"""


@pytest.mark.parametrize(
    ("masters", "dtype", "side"),
    [
        ("", "bfloat16", "more"),
        ("  master_weights: true\n", "float32", "more"),
        ("  master_weights: true\n  store_param_remainders: true\n", "float32", "less"),
    ],
)
def test_masters_of_an_optimizer_stand_for_the_weights(
    tmp_path: Path, masters: str, dtype: str, side: str
) -> None:
    """16 bits of a weight and the remainder of its master are as many bytes as an fp32 weight."""
    path = tmp_path / "file.yaml"
    path.write_text(AUTOMODEL + masters)
    inputs = inputs_of(tmp_path, reference=str(path), model="gpt2:small")
    assert inputs.recipe.model.dtype == dtype
    assert inputs.settings.mixed_precision == ("bf16" if dtype == "float32" else "no")
    assert [limit.side for limit in inputs.limits if "16 bits" in limit.what] == [side]
    assert not [limit for limit in inputs.limits if "optimizer transformer_engine" in limit.what]


def test_only_fsdp2_of_a_trainer_looks_for_a_final_norm_inside_adapters(tmp_path: Path) -> None:
    for version in (1, 2):
        path = tmp_path / f"{version}.yaml"
        path.write_text(LLAMA_FACTORY.replace("version: 2", f"version: {version}"))
        loop = inputs_of(tmp_path, reference=str(path), model="gpt2:small", sequence_length=64).loop
        assert loop.wraps_adapters == (version == 2)
    assert not inputs_of(tmp_path, ACCELERATE, layout="accelerate").loop.wraps_adapters


def test_accelerates_layout_means_accelerates_loop_with_and_without_its_file(tmp_path: Path) -> None:
    for text in (None, ACCELERATE):
        inputs = inputs_of(tmp_path, text, layout="accelerate")
        assert inputs.loop.program == "accelerate"
        assert inputs.recipe.sharding.accumulation == "unsharded"
        assert inputs.loop.loss_in_forward


def test_fsdptools_own_trainer_keeps_its_own_loop(tmp_path: Path) -> None:
    own = inputs_of(tmp_path, ACCELERATE)
    recipe = Recipe(ModelChoice("gpt2:small"), sharding=Sharding(layout="accelerate"))
    trained = inputs_of(tmp_path, ACCELERATE, recipe=recipe, reference=None)
    for inputs in (own, trained):
        assert inputs.loop.program == "fsdptool"
        assert inputs.loop.marks_last
        assert not inputs.loop.loss_in_forward
        assert inputs.recipe.sharding.accumulation == "sharded"
        assert "chunk" not in inputs.recipe.objective.options


def test_options_decide_what_would_follow_from_the_program(tmp_path: Path) -> None:
    options: Options = {
        "gradients": "sharded",
        "loss": "chunked",
        "loss_in_forward": False,
        "layout": "native",
    }
    inputs = inputs_of(tmp_path, TRAINER, **options)
    assert inputs.recipe.sharding.accumulation == "sharded"
    assert inputs.recipe.sharding.layout == "native"
    assert "chunk" not in inputs.recipe.objective.options
    assert not inputs.loop.loss_in_forward
    assert inputs.loop.program == "trainer"


def test_torchtune_stores_weights_in_the_dtype_of_its_file_and_keeps_the_head_in_the_root(
    tmp_path: Path,
) -> None:
    inputs = inputs_of(tmp_path, TORCHTUNE)
    assert inputs.recipe.model.dtype == "bfloat16"
    assert (inputs.recipe.sharding.grouping.embedding, inputs.recipe.sharding.grouping.head) == (
        "root",
        "root",
    )


def test_a_denoiser_has_its_loss_after_the_forward_and_its_encoders_are_mentioned(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path, reference="sd3:medium", layout="accelerate")
    assert not inputs.loop.loss_in_forward
    assert "encoders" in inputs.loop.not_planned
    assert "chunk" not in inputs.recipe.objective.options
    assert inputs_of(tmp_path, reference="sd3:medium").loop.not_planned == ("encoders",)
    assert "encoders" not in inputs_of(tmp_path, layout="accelerate").loop.not_planned


@pytest.mark.slow
def test_accelerates_accumulation_holds_whole_gradients(tmp_path: Path) -> None:
    """Between micro-batches every rank holds the gradients of the whole model, in bf16."""
    common: dict[str, Any] = {
        "reference": "gpt2:small",
        "overrides": SMALL,
        "gpu": "L4-24GB",
        "gpus": 4,
        "sequence_length": 32,
        "accumulation": 4,
        "search": False,
    }
    (tmp_path / "file.yaml").write_text(ACCELERATE)
    config = {"config": tmp_path / "file.yaml", "layout": "accelerate"}
    plan = make_plan(read_request(Options(**common, **config)))
    sharded = make_plan(read_request(Options(**common, **config, gradients="sharded")))
    held = {item.name: item.bytes or 0 for item in plan.candidates[0].components}
    parameters = plan.inputs.model.parameters
    assert held["unsharded gradients"] >= 2 * parameters
    more = (plan.candidates[0].allocated_peak_bytes or 0) - (sharded.candidates[0].allocated_peak_bytes or 0)
    assert more > parameters
    assert "training loop of accelerate" in file_words.loop(plan)[0]
    assert file_words.loop(make_plan(read_request(Options(**common)))) == []


@pytest.mark.parametrize(
    ("text", "name", "options", "keys"),
    [
        (TRAINER, "f.yaml", {}, ("per_device_train_batch_size",)),
        (TRAINER, "f.yaml", {"micro_batch": 4}, None),
        (TRL, "f.yaml", {}, ("max_length", "gradient_accumulation_steps", "gradient_checkpointing")),
        (TRL, "f.yaml", {"sequence_length": 512, "accumulation": 2}, ("gradient_checkpointing",)),
        (LLAMA_FACTORY, "f.yaml", {}, ("finetuning_type", "cutoff_len")),
        (
            AXOLOTL,
            "f.yaml",
            {"method": "lora", "lora_rank": 16, "checkpointing": "full"},
            ("lora_modules_to_save", "sequence_len", "micro_batch_size", "optimizer"),
        ),
        (TORCHTITAN, "f.toml", {}, ("local_batch_size", "seq_len")),
        (TORCHTUNE, "f.yaml", {}, ("batch_size",)),
        (ACCELERATE, "f.yaml", {}, None),
    ],
)
def test_keys_that_change_memory_and_are_not_read_are_named(
    tmp_path: Path, text: str, name: str, options: dict[str, Any], keys: tuple[str, ...] | None
) -> None:
    (tmp_path / name).write_text(text)
    given: dict[str, Any] = {"reference": "gpt2:small", "gpu": "L4-24GB", "gpus": 4, **options}
    unread = read_request(Options(**given, config=tmp_path / name)).unread
    assert (unread.keys if unread is not None else None) == keys


def test_the_unread_keys_stand_beside_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(TRL)
    options: dict[str, Any] = {
        "reference": "gpt2:small",
        "gpu": "L4-24GB",
        "overrides": SMALL,
        "search": False,
    }
    plan = make_plan(read_request(Options(**options, config=tmp_path / "f.yaml")))
    (line,) = file_words.unread(plan)
    assert line.startswith(f"not read from {tmp_path / 'f.yaml'}: max_length, gradient_accumulation_steps, ")
    assert line.endswith("give them as options: --seq-len, --accumulation, --checkpointing")
    from fsdptool.report.page.plan import plan_page

    assert "max_length" in plan_page(plan)


@pytest.mark.parametrize(
    ("reference", "options", "said"),
    [
        ("gpt2:small", {}, "at 512 tokens (assumed)"),
        ("gpt2:small", {"sequence_length": 64}, None),
        ("vit:base-patch16-224", {}, "at 224 x 224 pixels (assumed)"),
        ("sd3:medium", {}, "at 1024 x 1024 pixels (assumed)"),
        ("sd3:medium", {"height": 512}, "at 1024 x 512 pixels (assumed)"),
        ("sd3:medium", {"height": 512, "width": 512}, None),
        ("wan2.1:t2v-1.3b", {"height": 64, "width": 64}, "at 81 frames (assumed)"),
    ],
)
def test_the_first_line_says_which_size_is_assumed(
    tmp_path: Path, reference: str, options: dict[str, Any], said: str | None
) -> None:
    from fsdptool.inspection.micro_batch import sample_size
    from fsdptool.source import resolve_choice

    given: dict[str, Any] = {"reference": reference, "gpu": "L4-24GB", **options}
    inputs = read_request(Options(**given)).inputs
    size = words.assumed_size(sample_size(resolve_choice(inputs.recipe.model), inputs.recipe))
    assert (f"at {size} (assumed)" if size else None) == said


def test_shapes_that_a_recipe_gives_are_not_assumed() -> None:
    from fsdptool.inspection.micro_batch import sample_size
    from fsdptool.records.plan import SampleSize
    from fsdptool.records.recipe import ModelChoice, Objective, Recipe
    from fsdptool.source import resolve_choice

    choice = ModelChoice(
        "torch.nn:Linear", trust_remote_code=True, overrides={"in_features": 4, "out_features": 2}
    )
    recipe = Recipe(choice, objective=Objective(options={"inputs": {"input": {"shape": [3, 4]}}}))
    assert words.assumed_size(sample_size(resolve_choice(choice), recipe)) == ""
    assert words.assumed_size(SampleSize(tensors={"x": (3, 32, 32)})) == "x of 3 x 32 x 32"


@pytest.mark.parametrize(
    ("launch", "given", "assumed"),
    [
        ("python train.py", {}, ("processes",)),
        ("python train.py", {"nodes": 2}, ("processes",)),
        ("python train.py", {"gpus": 4}, ()),
        ("torchrun --nproc_per_node 4 train.py", {}, ()),
        ("accelerate launch --num_processes 4 train.py", {}, ("nodes",)),
        ("accelerate launch --num_processes 4 --num_machines 1 train.py", {}, ()),
    ],
)
def test_ranks_that_nothing_says_are_assumed(
    tmp_path: Path, launch: str, given: dict[str, Any], assumed: tuple[str, ...]
) -> None:
    path = tmp_path / "run.sh"
    line = "--model_name_or_path org/model --dataset_name d --use_peft --max_length 64 --output_dir o\n"
    path.write_text(f"{launch.replace('train.py', '-m trl.scripts.sft')} {line}")
    options: dict[str, Any] = {"reference": str(path), "model": "gpt2:small", "gpu": "L4-24GB", **given}
    assert read_request(Options(**options)).inputs.assumed_ranks == assumed


def test_the_assumed_size_is_in_the_document_its_page_and_the_command(tmp_path: Path) -> None:
    from fsdptool.report.page.plan import plan_page

    options: dict[str, Any] = {
        "reference": "gpt2:small",
        "gpu": "L4-24GB",
        "overrides": SMALL,
        "search": False,
    }
    plan = make_plan(read_request(Options(**options)))
    document = plan_document(plan)
    assert document["sample"]["assumed"] == ["sequence_length"]
    assert words.headline(plan).endswith(", at 512 tokens (assumed)")
    assert "at 512 tokens (assumed)" in plan_page(plan)
    alone = replace(plan, inputs=replace(plan.inputs, assumed_ranks=("processes",)))
    assert words.headline(alone).endswith(", at 512 tokens, on 1 process (assumed)")
    flags = document["details"]["flags"]
    assert flags[flags.index("--seq-len") + 1] == "512"
    given = make_plan(read_request(Options(**options, sequence_length=512)))
    assert given.candidates[0].allocated_peak_bytes == plan.candidates[0].allocated_peak_bytes
    assert words.headline(given).endswith(": fits")


def test_a_plan_of_an_earlier_version_is_still_read(tmp_path: Path) -> None:
    import json

    options: dict[str, Any] = {
        "reference": "gpt2:small",
        "gpu": "L4-24GB",
        "overrides": SMALL,
        "search": False,
    }
    document = plan_document(make_plan(read_request(Options(**options))))
    for key in ("sample", "unread"):
        document.pop(key)
    for key in ("flags", "routing", "states"):
        document["details"].pop(key)
    document["details"]["of_another_version"] = 1
    for key in ("program", "loss_in_forward", "own_loss", "whole_logits", "marks_last", "not_planned"):
        document["inputs"]["loop"].pop(key)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    plan = read_plan(tmp_path / "plan.json")
    assert plan.sample.assumed == ()
    assert words.headline(plan).endswith(": fits")
