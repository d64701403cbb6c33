"""Whether the head computes the loss: each reason once, alike in a plan, a dry run and a run folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdptool.errors import ConfigError
from fsdptool.inspection import inspect
from fsdptool.launch.prepare import prepare
from fsdptool.launch.start import write_run
from fsdptool.memory.tracing.make_trace import make_trace
from fsdptool.modeling.fused_loss import decide_fused_loss
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.records.fused_loss import IMPOSSIBLE, FusedLossReason
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import OWN_LOOP, TrainingLoop
from fsdptool.records.recipe import Batch, Distillation, Lora, Method, ModelChoice, Objective, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.folder import read_inputs
from fsdptool.source import resolve

_SMALL = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SMALL},
    "bert": {"architectures": ["BertForMaskedLM"], "model_type": "bert", **_SMALL},
    # Adds a bias to what its head returns.
    "bart": {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "vocab_size": 256,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    },
}

_Case = tuple[str, dict[str, Any], dict[str, Any], TrainingLoop]
"""A model, what the recipe and the file of settings change, and whose loop trains it."""

_LONG = {"batch": Batch(micro_batch=4, sequence_length=256)}
_ASKED = {"objective": Objective(fused=True)}
TORCHTITAN = TrainingLoop(program="torchtitan")
CASES: dict[FusedLossReason, list[_Case]] = {
    FusedLossReason.AUTOMATIC: [
        ("llama", _LONG, {}, OWN_LOOP),
        # A frozen head has no gradient that waits.
        ("llama", {"method": Method("lora", lora=Lora()), "batch": Batch(sequence_length=256)}, {}, OWN_LOOP),
    ],
    FusedLossReason.REQUESTED: [
        ("llama", _ASKED, {"use_cpu": True}, OWN_LOOP),
        ("llama", _ASKED, {}, TORCHTITAN),
        (
            "llama",
            {**_ASKED, "method": Method("lora", lora=Lora(modules_to_save=("lm_head",)))},
            {},
            OWN_LOOP,
        ),
    ],
    FusedLossReason.DECLINED: [("llama", {**_LONG, "objective": Objective(fused=False)}, {}, OWN_LOOP)],
    FusedLossReason.CPU: [("llama", _LONG, {"use_cpu": True}, OWN_LOOP)],
    FusedLossReason.OTHER_PROGRAM: [("llama", _LONG, {}, TORCHTITAN)],
    FusedLossReason.OBJECTIVE: [
        ("bert", _LONG, {}, OWN_LOOP),
        ("llama", {**_LONG, "objective": Objective("orpo")}, {}, OWN_LOOP),
        (
            "llama",
            {**_LONG, "method": Method("distillation", distillation=Distillation(ModelChoice("teacher")))},
            {},
            OWN_LOOP,
        ),
    ],
    FusedLossReason.UNKNOWN_HEAD: [("bart", _LONG, {}, OWN_LOOP)],
    FusedLossReason.ADAPTED_HEAD: [
        ("llama", {**_LONG, "method": Method("lora", lora=Lora(targets=("q_proj", "lm_head")))}, {}, OWN_LOOP)
    ],
    FusedLossReason.TENSOR_PARALLEL: [
        ("llama", {**_LONG, **_ASKED}, {"mesh": ParallelDims(dp_shard=2, tp=2)}, OWN_LOOP)
    ],
    FusedLossReason.WHOLE_LOGITS: [
        ("llama", {**_LONG, "objective": Objective(options={"chunk": 0})}, {}, OWN_LOOP),
        ("llama", {**_LONG, **_ASKED}, {}, replace(OWN_LOOP, own_loss=True)),
    ],
    FusedLossReason.NOTHING_SAVED: [("llama", {"batch": Batch(sequence_length=8)}, {}, OWN_LOOP)],
    FusedLossReason.UNTESTED: [],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in _MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return {name: str(folder / name / "config.json") for name in _MODELS}


def _run(models: dict[str, str], case: _Case) -> Any:
    name, changes, settings, loop = case
    recipe = replace(Recipe(ModelChoice(models[name]), batch=Batch(sequence_length=64)), **changes)
    options = {"chunk": 16, **recipe.objective.options}
    recipe = replace(recipe, objective=replace(recipe.objective, options=options))
    return inspect(resolve(models[name])), resolve_run(
        recipe, replace(FsdpSettings(mixed_precision="bf16"), **settings), loop=loop
    )


@pytest.mark.parametrize("reason", [reason for reason in FusedLossReason if CASES[reason]])
def test_every_reason_decides_once(reason: FusedLossReason, models: dict[str, str]) -> None:
    for case in CASES[reason]:
        decided, found = decide_fused_loss(*_run(models, case))
        assert found.reason is reason
        assert decided.recipe.objective.fused is found.fused
        assert found.fused is (reason in (FusedLossReason.AUTOMATIC, FusedLossReason.REQUESTED))
        assert found.text.endswith(reason.text)


@pytest.mark.parametrize("reason", sorted(IMPOSSIBLE))
def test_what_the_model_rules_out_cannot_be_asked_for(
    reason: FusedLossReason, models: dict[str, str]
) -> None:
    name, changes, settings, loop = CASES[reason][0]
    objective = replace(changes.get("objective", Objective()), fused=True)
    asked = _run(models, (name, {**changes, "objective": objective}, settings, loop))
    with pytest.raises(ConfigError, match=reason.text):
        decide_fused_loss(*asked)


def test_code_of_the_models_own_is_untested(models: dict[str, str]) -> None:
    anatomy, run = _run(models, ("llama", _LONG, {}, OWN_LOOP))
    own = replace(anatomy, spec=replace(anatomy.spec, trust_remote_code=True))
    assert decide_fused_loss(own, run)[1].reason is FusedLossReason.UNTESTED


@pytest.mark.slow
def test_a_plan_a_dry_run_and_its_folder_decide_alike(models: dict[str, str], tmp_path: Path) -> None:
    """The folder holds the decision, so that no rank and no resumed run decides again."""
    config = tmp_path / "gpus.yaml"
    config.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nnum_machines: 1\n"
        "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    )
    for length, reason in ((256, FusedLossReason.AUTOMATIC), (8, FusedLossReason.NOTHING_SAVED)):
        recipe = tmp_path / f"{length}.yaml"
        recipe.write_text(
            f"model: {{reference: {models['llama']}, weights: random}}\ndata: {{source: synthetic}}\n"
            f"batch: {{sequence_length: {length}}}\nobjective: {{options: {{chunk: 16}}}}\nsteps: 1\n"
        )
        options = Options(recipe=str(recipe), config=str(config), gpu="H100-80GB-SXM", gpus=2, search=False)
        planned = make_plan(read_request(options)).candidates[0]
        prepared = prepare(recipe, config, dry_run=True)
        assert prepared.prediction is not None
        assert planned.fused_loss == prepared.prediction.fused_loss
        assert planned.fused_loss is not None
        assert planned.fused_loss.reason is reason
        assert (planned.fused_loss.text in prepared.notes) is planned.fused_loss.fused
        folder = tmp_path / f"run-{length}"
        write_run(folder, prepared, resume=None, number=0, argv=[], force=False)
        assert read_inputs(folder).recipe.objective.fused is planned.fused_loss.fused


@pytest.mark.parametrize("method", ["full", "lora"])
def test_nothing_is_computed_twice(models: dict[str, str], method: str) -> None:
    """The products are those of a loss after the head; they only run in forward."""
    counts = []
    for given in (False, True):
        recipe = Recipe(
            ModelChoice(models["llama"]),
            method=Method("lora", lora=Lora(targets=("q_proj",))) if method == "lora" else Method(),
            objective=Objective(options={"chunk": 16}, fused=given),
            batch=Batch(sequence_length=256),
        )
        run = resolve_run(recipe, FsdpSettings(mixed_precision="bf16"))
        trace = make_trace(resolve(models["llama"]), run, "cuda")
        assert trace.known, trace.unknowns
        counts.append(sum(sum(segment.flops.values()) for segment in trace.segments))
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_the_default_takes_less_memory_where_it_is_taken(models: dict[str, str]) -> None:
    """The rule against the traces: on either side of its border."""
    for length, saves in ((256, True), (16, False)):
        peaks = {}
        for given in (False, True):
            options = Options(
                reference=models["llama"], gpu="H100-80GB-SXM", gpus=1, sequence_length=length,
                precision="bf16", fused_loss=given, search=False,
            )  # fmt: skip
            peaks[given] = make_plan(read_request(options)).candidates[0].allocated_peak_bytes or 0
        assert (peaks[True] < peaks[False]) is saves
