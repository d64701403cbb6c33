"""The accelerate layout against the groups accelerate 1.15's own preparation makes of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from fsdptool.errors import ConfigError
from fsdptool.inspection.walk import walk
from fsdptool.layout import group, resolve_sharding
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import TrainedModel, plan_units
from fsdptool.records.anatomy import Anatomy, ModelSpec, Reference, WrapChoice
from fsdptool.records.fused_loss import LossTiles
from fsdptool.records.plan import TrainingLoop
from fsdptool.records.recipe import ModelChoice, Objective, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings

COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen3": COMMON,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "gemma3_text": COMMON,
    "gpt_neox": COMMON,
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_moe": {**COMMON, "num_experts": 4, "moe_intermediate_size": 16},
    "jamba": {**COMMON, "num_hidden_layers": 8, "mamba_dt_rank": 4, "num_experts": 2},
    "bert": COMMON,
    "t5": {"d_model": 32, "d_ff": 48, "num_layers": 3, "num_heads": 4, "d_kv": 8},
}
AUTO = {
    "bert": AutoModelForSequenceClassification,
    "bert_masked": AutoModelForMaskedLM,
    "t5": AutoModelForSeq2SeqLM,
}


def build(kind: str, **changes: Any) -> nn.Module:
    """Build a small model of an architecture on the meta device."""
    architecture = kind.removesuffix("_masked")
    config = CONFIG_MAPPING[architecture](vocab_size=96, **{**SMALL[architecture], **changes})
    with torch.device("meta"):
        model: nn.Module = AUTO.get(kind, AutoModelForCausalLM).from_config(config)
    return model


def describe(model: nn.Module) -> Anatomy:
    """Return the anatomy of a live model, without a wrap choice."""
    walked = walk(model)
    spec = ModelSpec(Reference("config", "test"), "generic", None, "transformers", type(model).__name__, {})
    return Anatomy(
        spec=spec,
        parameters=walked.parameters,
        buffers=walked.buffers,
        modules=walked.modules,
        wrap=WrapChoice((), ()),
        input_embedding=walked.input_embedding,
        output_embedding=walked.output_embedding,
        final_norm=walked.final_norm,
        no_split_modules=walked.no_split_modules,
    )


@pytest.fixture(scope="module", autouse=True)
def fake_ranks() -> Iterator[None]:
    """Let this process be rank 0 of two whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def prepare(model: nn.Module, settings: FsdpSettings) -> nn.Module:
    """Run accelerate's own FSDP2 preparation on the model."""
    policy = {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy=policy[settings.wrap_policy],
        transformer_cls_names_to_wrap=list(settings.wrap_classes) or None,
        min_num_params=settings.min_num_params,
        reshard_after_forward=settings.reshard_after_forward,
        cpu_ram_efficient_loading=False,
        ignored_modules=settings.ignored_modules,
        activation_checkpointing=settings.activation_checkpointing,
    )
    if settings.mixed_precision != "no":
        plugin.set_mixed_precision(settings.mixed_precision)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=["dp_shard"]),
        mixed_precision=settings.mixed_precision,
        is_main_process=True,
        device=torch.device("meta"),
    )
    if settings.activation_checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
    return fsdp2_prepare_model(accelerator, model)


def groups_of(model: nn.Module) -> dict[frozenset[str], dict[str, Any]]:
    """Return the live FSDP groups: their parameters' names, and how each behaves."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name.replace("_checkpoint_wrapped_module.", ""))
    results: dict[frozenset[str], dict[str, Any]] = {}
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        for param_group in state._fsdp_param_groups:
            if id(param_group) in seen:
                continue
            seen.add(id(param_group))
            key = frozenset(names[id(p.sharded_param)] for p in param_group.fsdp_params)
            results[key] = {
                "reshard": param_group._reshard_after_forward,
                "automatic": state._auto_reshard_after_forward,
                "dtypes": [
                    None if dtype is None else str(dtype).removeprefix("torch.")
                    for dtype in (
                        param_group.mp_policy.param_dtype,
                        param_group.mp_policy.reduce_dtype,
                        param_group.mp_policy.output_dtype,
                    )
                ],
            }
    return results


PLAIN = FsdpSettings(mixed_precision="no")
CASES = [
    ("llama", PLAIN, {}),
    ("llama", replace(PLAIN, wrap_classes=("LlamaDecoderLayer",), reshard_after_forward=False), {}),
    ("llama", replace(PLAIN, wrap_classes=("LlamaMLP", "LlamaDecoderLayer")), {}),
    ("llama", replace(PLAIN, mixed_precision="bf16"), {"tie_word_embeddings": True}),
    ("llama", replace(PLAIN, wrap_policy="none"), {}),
    ("llama", replace(PLAIN, activation_checkpointing=True), {}),
    ("llama", replace(PLAIN, ignored_modules=r"model\.layers\.0\.mlp"), {}),
    ("qwen3", replace(PLAIN, mixed_precision="fp16"), {}),
    ("gpt2", PLAIN, {}),
    ("gemma3_text", replace(PLAIN, mixed_precision="bf16"), {}),
    ("gpt_neox", PLAIN, {}),
    ("opt", PLAIN, {}),
    ("qwen3_moe", replace(PLAIN, wrap_classes=("Qwen3MoeExperts", "Qwen3MoeDecoderLayer")), {}),
    ("jamba", PLAIN, {}),
    ("bert", replace(PLAIN, wrap_classes=("BertLayer",)), {}),
]


@pytest.mark.parametrize(("kind", "settings", "changes"), CASES)
def test_the_accelerate_layout_is_what_accelerate_does(
    kind: str, settings: FsdpSettings, changes: dict[str, Any]
) -> None:
    model = build(kind, **changes)
    planned = group(describe(model), resolve_sharding(settings, layout="accelerate"))
    canonical = {name: p.fqn for p in describe(model).parameters for name in p.names}
    live = groups_of(prepare(model, settings))
    real = {frozenset(canonical[name] for name in key): value for key, value in live.items()}

    assert {frozenset(p.fqn for p in unit.parameters) for unit in planned.units if unit.parameters} == set(
        real
    )
    for unit in planned.units:
        if unit.parameters:
            behaviour = real[frozenset(p.fqn for p in unit.parameters)]
            assert behaviour["automatic"] == (unit.reshard_after_forward is None)
            if unit.reshard_after_forward is not None:
                assert behaviour["reshard"] == unit.reshard_after_forward
            assert behaviour["dtypes"] == [planned.param_dtype, planned.reduce_dtype, planned.output_dtype]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_inside_one_of_pefts_has_no_final_norm(tied: bool) -> None:
    """The head is then a unit of its own, which stays sharded where the loss does not call it."""
    model = build("llama", tie_word_embeddings=tied)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    anatomy = describe(wrapped.base_model.model)
    trainer = TrainingLoop(program="trl", wraps_adapters=True, tiles=LossTiles(4096, 32768))
    recipe = Recipe(
        ModelChoice("config"), objective=Objective(fused=True), sharding=Sharding(layout="accelerate")
    )
    settings = replace(PLAIN, wrap_classes=("LlamaDecoderLayer",))
    run = resolve_run(recipe, settings, ranks=2, loop=trainer)
    planned = plan_units(TrainedModel(anatomy, published=anatomy), run).units
    real = groups_of(prepare(wrapped, settings))
    expected = {frozenset(name.removeprefix("base_model.model.") for name in names) for names in real}
    assert {frozenset(p.fqn for p in unit.parameters) for unit in planned if unit.parameters} == expected
    assert [unit.id for unit in planned if not unit.called] == ([] if tied else ["lm_head"])


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("bert", replace(PLAIN, wrap_classes=("BertEmbeddings",)), "BertEmbeddings"),
        ("llama", replace(PLAIN, wrap_classes=("LlamaDecoderLayers",)), "LlamaDecoderLayers"),
        ("llama", replace(PLAIN, wrap_policy="size", min_num_params=1000), "ModuleList"),
        ("llama", replace(PLAIN, wrap_policy="none", activation_checkpointing=True), "NO_WRAP"),
    ],
)
def test_what_accelerate_refuses_is_refused_with_the_reason(
    kind: str, settings: FsdpSettings, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        group(describe(build(kind)), resolve_sharding(settings, layout="accelerate"))
    with pytest.raises((ValueError, TypeError, RuntimeError, AssertionError)):
        prepare(build(kind), settings)


@pytest.mark.parametrize(("kind", "block"), [("t5", "T5Block"), ("bert_masked", "BertLayer")])
def test_ties_that_fail_in_accelerate_work_in_ours(kind: str, block: str) -> None:
    settings = replace(PLAIN, wrap_classes=(block,))
    anatomy = describe(build(kind))
    with pytest.raises(ConfigError, match="shared parameter"):
        group(anatomy, resolve_sharding(settings, layout="accelerate"))

    # accelerate itself prepares the model and fails at the first forward.
    model = prepare(build(kind), settings).to_empty(device="cpu")
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="managed by another FSDP group"):
        model(input_ids=tokens, labels=tokens)

    plan = group(anatomy, resolve_sharding(settings, layout="native"))
    shared = {p.fqn for p in anatomy.parameters if p.aliases}
    assert shared
    assert shared <= {p.fqn for p in plan.units[-1].parameters}
    assert {unit.kind for unit in plan.units[:-1]} <= {"block", "embedding"}
    owned = [p.fqn for unit in plan.units for p in unit.parameters]
    assert sorted(owned) == sorted(p.fqn for p in anatomy.parameters)
