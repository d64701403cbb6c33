"""Weights: independent of the number of ranks, streamed from files, never whole on a rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, MOE, SD3, T5, TIED, UNET, anatomy_of, inputs_for, prepare_case
from host_memory import growth
from pool import Pool
from ranks import weights_of
from reference import plain_model
from safetensors.torch import load_file, save_file

from fsdptool.distributed.proof import prove
from fsdptool.distributed.recording import BLOCK, fill_slice
from fsdptool.distributed.session import open_session
from fsdptool.distributed.shard import local, sharded_modules
from fsdptool.errors import ModelError, WorkerError
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import plan_units
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.folder import RunInputs
from fsdptool.source import resolve
from fsdptool.training.trainer import assemble

pytestmark = pytest.mark.distributed

MAMBA = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 24,
    "state_size": 4,
    "num_hidden_layers": 2,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 32,
}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
MODELS = {
    "tied": (TIED, ("LlamaDecoderLayer",)),
    "moe": (MOE, ("Qwen3MoeDecoderLayer",)),
    "t5": (T5, ("T5Block",)),
    "mamba": (MAMBA, ("MambaBlock",)),
    "deepseek": (DEEPSEEK, ("DeepseekV3DecoderLayer",)),
    "gemma": (GEMMA, ("Gemma3DecoderLayer",)),
    "sd3": (SD3, ("JointTransformerBlock",)),
    "unet": (UNET, ("BasicTransformerBlock", "ResnetBlock2D")),
}


def inputs_of(folder: Path, config: dict[str, Any], wrap: tuple[str, ...], weights: str) -> RunInputs:
    case = dataclasses.replace(CASES["causal"], config=config, wrap=wrap)
    if "_class_name" in config:
        case = dataclasses.replace(case, objective="epsilon")
    elif config["model_type"] == "t5":
        case = dataclasses.replace(case, objective="seq2seq")
    recipe = Recipe(model=dataclasses.replace(_recipe(case, folder).model, weights=weights), seed=3)
    recipe = dataclasses.replace(recipe, objective=_recipe(case, folder).objective)
    spec = resolve(recipe.model.reference)
    settings = FsdpSettings(wrap_classes=wrap, use_cpu=True, mixed_precision="no")
    return RunInputs(
        folder, recipe, settings, spec, plan_units(anatomy_of(spec, wrap), resolve_run(recipe, settings))
    )


def _recipe(case: Any, folder: Path) -> Recipe:
    from cases import recipe_for, write_model

    reference = folder / "model"
    if not reference.exists():
        write_model(reference, case.config)
    return recipe_for(case, str(reference), "full")


def materialised(folder: Path, config: dict[str, Any], wrap: tuple[str, ...], weights: str) -> dict[str, Any]:
    inputs = inputs_of(folder, config, wrap, weights)
    session = open_session(inputs.settings)
    assembled = assemble(inputs, session)
    weights_here = weights_of(assembled)  # gathering takes every rank
    return {
        "weights": weights_here if session.is_main else {},
        "buffers": dict(assembled.model.named_buffers()),
        "notes": assembled.notes,
    }


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_do_not_depend_on_the_ranks(pool: Pool, tmp_path: Path, name: str) -> None:
    config, wrap = MODELS[name]
    _recipe(dataclasses.replace(CASES["causal"], config=config), tmp_path)
    one = pool.run(materialised, 1, tmp_path, config, wrap, "random")[0]
    three = pool.run(materialised, 3, tmp_path, config, wrap, "random")[0]
    torch.manual_seed(5)
    real = plain_model(CASES["causal"], config, torch.float32)
    assert set(one["weights"]) == {n for n, _ in real.named_parameters(remove_duplicate=False)}
    for key, parameter in real.named_parameters(remove_duplicate=False):
        mine = one["weights"][key]
        assert torch.equal(mine, three["weights"][key]), key
        # Drawn from the distribution the library itself draws from; few numbers tell little of it.
        if parameter.numel() > 32:
            assert float(mine.mean()) == pytest.approx(
                float(parameter.mean()),
                abs=6 * float(parameter.std(correction=0)) / parameter.numel() ** 0.5 + 1e-6,
            ), key
        if parameter.numel() > 256:
            assert float(mine.std()) == pytest.approx(float(parameter.std()), rel=0.2, abs=1e-7), key
    for key, buffer in real.named_buffers():
        assert torch.equal(one["buffers"][key], buffer), key


def _save(config: dict[str, Any], folder: Path, **options: Any) -> torch.nn.Module:
    torch.manual_seed(11)
    model = plain_model(CASES["causal"], config, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(folder / "model", **options)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_pretrained_weights_stream_into_shards(pool: Pool, tmp_path: Path, name: str) -> None:
    config, wrap = MODELS[name]
    model = _save(config, tmp_path, max_shard_size="30KB")
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1
    found = pool.run(materialised, 3, tmp_path, config, wrap, "pretrained")[0]
    assert found["notes"] == ()
    for key, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(found["weights"][key], parameter), key
    for key, buffer in model.named_buffers():
        assert torch.equal(found["buffers"][key], buffer), key


def named_weights(folder: Path, config: dict[str, Any], wrap: tuple[str, ...]) -> Any:
    try:
        return materialised(folder, config, wrap, "pretrained")["notes"]
    except ModelError as error:
        return error.message


def test_what_a_checkpoint_lacks_is_said_and_a_foreign_one_refused(pool: Pool, tmp_path: Path) -> None:
    config, wrap = MODELS["gemma"]
    _save(config, tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if "q_norm" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    (note,) = pool.run(named_weights, 2, tmp_path, config, wrap)[1]
    assert note.startswith("2 parameters are missing from the weights of")
    assert note.endswith(": model.layers.0.self_attn.q_norm.weight, model.layers.1.self_attn.q_norm.weight")
    assert "start at random" in note
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    refusals = pool.run(named_weights, 2, tmp_path, config, wrap)
    assert all("contain no parameter of Gemma3ForCausalLM" in refusal for refusal in refusals)


def test_slices_of_random_values_agree_with_the_whole() -> None:
    numel = 2 * BLOCK + 1234

    def make(start: int, length: int) -> torch.Tensor:
        target = torch.empty(length)
        fill_slice(target, start, numel, (0, "w", 0), lambda block, g: block.normal_(generator=g))
        return target

    everything = make(0, numel)
    for start, length in ((0, 10), (BLOCK - 3, 7), (BLOCK, BLOCK), (2 * BLOCK - 1, 1235), (5, numel - 5)):
        assert torch.equal(make(start, length), everything[start : start + length])
    assert float(everything.std()) == pytest.approx(1.0, rel=0.01)


def big(folder: Path, config: dict[str, Any], wrap: tuple[str, ...], weights: str) -> dict[str, int]:
    """Measure how far a rank's own memory grows while it materialises, and what it ends with."""
    inputs = inputs_of(folder, config, wrap, weights)
    return growth(inputs, open_session(inputs.settings))


@pytest.mark.parametrize("weights", ["random", "pretrained"])
def test_no_rank_ever_holds_the_model(pool: Pool, tmp_path: Path, weights: str) -> None:
    config = {
        **TIED,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "vocab_size": 512,
    }
    total = 4 * sum(p.numel() for p in plain_model(CASES["causal"], config, torch.float32).parameters())
    if weights == "pretrained":
        _save(config, tmp_path)
    else:
        # Written once, before several ranks look for it.
        _recipe(dataclasses.replace(CASES["causal"], config=config), tmp_path)
    for found in pool.run(big, 4, tmp_path, config, ("LlamaDecoderLayer",), weights):
        assert found["shards"] <= total / 4 + 2**16
        # Its quarter, one parameter in flight, and what building on meta itself needs.
        assert found["grown"] <= total / 4 + 16 * 2**20 < total / 3


def broken(folder: Path, recipe: Recipe, fault: str) -> str:
    inputs = inputs_for(CASES["causal"], folder, recipe, mesh=ParallelDims(dp_replicate=2, dp_shard=1))
    session = open_session(inputs.settings)
    assembled = assemble(inputs, session)
    if fault == "moved":
        first, second, *rest = inputs.units.units
        wrong = dataclasses.replace(first, parameters=(*first.parameters, second.parameters[0]))
        short = dataclasses.replace(second, parameters=second.parameters[1:])
        plan = dataclasses.replace(inputs.units, units=(wrong, short, *rest))
    elif fault == "untied":
        first, *rest = inputs.units.units
        one, other, *further = first.parameters
        one = dataclasses.replace(one, aliases=(other.fqn,))
        first = dataclasses.replace(first, parameters=(one, other, *further))
        plan = dataclasses.replace(inputs.units, units=(first, *rest))
    elif fault in ("kept", "dtype"):
        plan = inputs.units
        for module in sharded_modules(assembled.model):
            if fault == "kept":
                module.set_reshard_after_forward(False)
            else:
                group = module._get_fsdp_state()._fsdp_param_group
                if group is not None:
                    group.mp_policy = dataclasses.replace(group.mp_policy, param_dtype=torch.float16)
    else:
        plan = inputs.units
        if session.rank == 1:
            local(next(assembled.model.parameters()))[0] += 1
    try:
        prove(assembled.model, plan, session)
    except WorkerError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("moved", "in a unit of their own, found them"),
        ("drifted", "replicas of shard"),
        ("kept", "planned freed after forward, found kept after forward"),
        ("dtype", "found compute in float16"),
        ("untied", "found 2 tensors"),
    ],
)
def test_the_proof_finds_what_is_not_as_planned(pool: Pool, tmp_path: Path, fault: str, words: str) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full")
    for message in pool.run(broken, 2, folder, recipe, fault):
        assert words in message
