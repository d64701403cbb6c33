"""Whether blocks are compiled: each reason once, and the same in a plan, a dry run and a run folder."""

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
from fsdptool.modeling import compilation
from fsdptool.modeling.compilation import decide_compilation
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.records.compilation import CompileReason
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import OWN_LOOP, TrainingLoop
from fsdptool.records.recipe import Batch, Data, Lora, Method, ModelChoice, Objective, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.folder import read_inputs
from fsdptool.source import resolve

pytestmark = pytest.mark.usefixtures("compiled_by_default")

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SMALL},
    "bert": {"architectures": ["BertForMaskedLM"], "model_type": "bert", **_SMALL},
    "classifier": {"architectures": ["BertForSequenceClassification"], "model_type": "bert", **_SMALL},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_key_value_heads": 2,
        **_SMALL,
    },
    # Two classes, of which one contains the other.
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    },
}

_Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
"""A model, what the recipe and the file of settings change, and where it runs."""

TORCHTITAN = TrainingLoop(program="torchtitan")
_OFFLOADED = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
CASES: dict[CompileReason, list[_Case]] = {
    CompileReason.AUTOMATIC: [("llama", {}, {}, {}), ("bert", {}, {}, {})],
    CompileReason.REQUESTED: [
        ("llama", {"sharding": Sharding(compile=True)}, {"use_cpu": True}, {}),
        ("llama", {"sharding": Sharding(compile=True)}, {}, {"loop": TORCHTITAN}),
        ("mixtral", {"sharding": Sharding(compile=True)}, {}, {}),
        ("llama", {"sharding": Sharding(compile=True)}, {"mesh": ParallelDims(dp_shard=2, tp=2)}, {}),
    ],
    CompileReason.DECLINED: [("llama", {"sharding": Sharding(compile=False)}, {}, {})],
    CompileReason.CPU: [("llama", {}, {"use_cpu": True}, {})],
    CompileReason.NO_COMPILER: [("llama", {}, {}, {"here": True})],
    CompileReason.OTHER_PROGRAM: [("llama", {}, {}, {"loop": TORCHTITAN})],
    CompileReason.TENSOR_PARALLEL: [("llama", {}, {"mesh": ParallelDims(dp_shard=2, tp=2)}, {})],
    CompileReason.CONTEXT_PARALLEL: [("llama", {}, {"mesh": ParallelDims(dp_shard=2, cp=2)}, {})],
    CompileReason.EXPERTS: [("mixtral", {}, {}, {})],
    CompileReason.QUANTISED_BASE: [("llama", {"method": Method(lora=Lora(base="nf4"))}, {}, {})],
    CompileReason.ACTIVATION_OFFLOAD: [("llama", {}, _OFFLOADED, {})],
    CompileReason.VARYING_LENGTHS: [("llama", {"data": Data(packing=False, padding="longest")}, {}, {})],
    CompileReason.NESTED_UNITS: [
        ("llama", {}, {"wrap_policy": "size", "min_num_params": 100}, {}),
        ("llama", {}, {"wrap_classes": ("LlamaDecoderLayer", "LlamaMLP")}, {}),
    ],
    CompileReason.TORCH_VERSION: [("llama", {}, {}, {"torch": "2.12.1+cu130"})],
    CompileReason.UNTESTED: [
        ("t5", {}, {}, {}),
        ("classifier", {"objective": Objective(name="classification")}, {}, {}),
    ],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in _MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return {name: str(folder / name / "config.json") for name in _MODELS}


@pytest.mark.parametrize("reason", CompileReason)
def test_every_reason_decides_once(
    reason: CompileReason, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by TORCH_COMPILE_DISABLE: torch reads it once, and later tests of this process would not compile.
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    for name, changes, settings, where in CASES[reason]:
        monkeypatch.setattr(compilation, "version", {"torch": where.get("torch", "2.13.0")}.__getitem__)
        recipe = replace(Recipe(ModelChoice(models[name]), batch=Batch(sequence_length=16)), **changes)
        chosen = replace(FsdpSettings(mixed_precision="bf16"), **settings)
        run = resolve_run(recipe, chosen, loop=where.get("loop", OWN_LOOP))
        decided, found = decide_compilation(
            inspect(resolve(models[name])), run, on_this_machine="here" in where
        )
        assert decided.recipe.sharding.compile is found.compiled
        assert found.reason is reason
        assert found.compiled is (reason in (CompileReason.AUTOMATIC, CompileReason.REQUESTED))
        assert found.text.endswith(reason.text)


@pytest.mark.slow
def test_a_plan_a_dry_run_and_its_folder_decide_alike(models: dict[str, str], tmp_path: Path) -> None:
    """The folder holds the decision, so that no rank and no resumed run decides again."""
    config = tmp_path / "gpus.yaml"
    config.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nnum_machines: 1\n"
        "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    )
    for name, reason in (("llama", CompileReason.AUTOMATIC), ("mixtral", CompileReason.EXPERTS)):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(
            f"model: {{reference: {models[name]}, weights: random}}\ndata: {{source: synthetic}}\n"
            "batch: {sequence_length: 16}\nsteps: 1\n"
        )
        options = Options(recipe=str(recipe), config=str(config), gpu="H100-80GB-SXM", gpus=2, search=False)
        planned = make_plan(read_request(options)).candidates[0]
        prepared = prepare(recipe, config, dry_run=True)
        assert prepared.prediction is not None
        assert planned.compilation == prepared.prediction.compilation
        assert planned.compilation is not None
        assert planned.compilation.reason is reason
        assert planned.compilation.text in prepared.notes
        folder = tmp_path / name
        write_run(folder, prepared, resume=None, number=0, argv=[], force=False)
        assert read_inputs(folder).recipe.sharding.compile is planned.compilation.compiled


@pytest.mark.parametrize(
    ("name", "compile", "said"),
    [("llama", False, "sharding.compile is false"), ("mixtral", None, "changes with every batch")],
)
def test_float8_in_eager_blocks_is_refused_on_gpus(
    name: str, compile: bool | None, said: str, models: dict[str, str]
) -> None:
    anatomy = inspect(resolve(models[name]))
    recipe = Recipe(ModelChoice(models[name]), sharding=Sharding(compile=compile))
    settings = FsdpSettings(mixed_precision="fp8")
    with pytest.raises(ConfigError, match=f"fp8 is slower than bf16 unless blocks are compiled.*{said}"):
        decide_compilation(anatomy, resolve_run(recipe, settings))
    assert not decide_compilation(anatomy, resolve_run(recipe, replace(settings, use_cpu=True)))[1].compiled
    compiled = replace(recipe, sharding=Sharding(compile=True))
    assert decide_compilation(anatomy, resolve_run(compiled, settings))[1].compiled
