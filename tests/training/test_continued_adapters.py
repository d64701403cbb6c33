"""Training continues from an adapter's own weights, and is what peft's model does in a plain loop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import CASES, prepare_case, recipe_for
from pool import Pool
from ranks import train
from recipe_runs import work_in, write_folder
from sweeps import kept
from torch import nn

from fsdptool.errors import ConfigError, ModelError
from fsdptool.modeling.methods.lora import base_name, is_adapter
from fsdptool.records.recipe import Lora, ModelChoice, Recipe
from fsdptool.runs.manifest import list_checkpoints
from fsdptool.source import adapted, resolve
from fsdptool.training.export.api import export_run, open_saved

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

TABLES = {"modules_to_save": ["embed_tokens", "lm_head"]}
QV: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tables saved": ("causal", QV | TABLES),
    "tied tables saved apart": ("qwen3 tied", QV | TABLES),
    "tied tables saved together": ("qwen3 tied", QV | TABLES | {"ensure_weight_tying": True}),
    "DoRA": ("causal", QV | {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "DoRA of a table and a head": (
        "causal",
        QV | {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    ),
    "DoRA, transposed": ("gpt2", QV | {"use_dora": True, "target_modules": ["c_attn", "c_proj"]}),
    "rsLoRA, ranks and alphas by pattern": (
        "causal",
        QV | {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}},
    ),
    "rows": ("causal", QV | {"trainable_token_indices": [5, 11, 70]}),
    "rows of a tied table": ("qwen3 tied", QV | {"trainable_token_indices": [5, 11, 70]}),
    "a saved norm, an adapted table": (
        "causal",
        QV | {"modules_to_save": ["norm"], "target_modules": ["embed_tokens", "q_proj"]},
    ),
    "biases": ("gpt2", QV | {"bias": "all", "lora_bias": True, "target_modules": ["c_attn"]}),
    "a denoiser": (
        "flow",
        QV | {"target_modules": ["to_q"], "modules_to_save": ["proj_out"], "use_dora": True},
    ),
}


def write_base(folder: Path, config: dict[str, Any]) -> Path:
    """Save a base with weights, as its library does."""
    torch.manual_seed(3)
    model: Any = reference.plain_model(CASES["causal"], config, torch.float32)
    model.save_pretrained(folder / "base")
    if "_class_name" not in config:
        (folder / "base" / "config.json").write_text(json.dumps(config))
    return folder / "base"


def library_base(folder: Path, config: dict[str, Any]) -> nn.Module:
    if "_class_name" in config:
        from diffusers import SD3Transformer2DModel

        return SD3Transformer2DModel.from_pretrained(folder).train()
    import transformers

    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder, dtype=torch.float32)
    return model.train()


def write_adapter(folder: Path, base: Path, config: dict[str, Any], settings: dict[str, Any]) -> Path:
    """Let peft save an adapter that has been trained: every trained value differs from a fresh one."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    model = get_peft_model(library_base(base, config), LoraConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(str(folder / "adapter"))
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    written["base_model_name_or_path"] = str(base)
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(written))
    return folder / "adapter"


def recipe_of(name: str, adapter: Path) -> Recipe:
    """Return the recipe of a case with nothing but the adapter as its model."""
    plain = recipe_for(CASES[name], str(adapter), "full")
    plain = dataclasses.replace(plain, model=ModelChoice(str(adapter)))
    return adapted(plain, resolve(str(adapter)))


@pytest.mark.parametrize(
    "kind",
    kept(ADAPTERS, "tied tables saved apart", "DoRA", "rsLoRA, ranks and alphas by pattern", "rows"),
)
def test_training_continues_from_an_adapter_as_peft_does(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Eight steps on two ranks against ``PeftModel.from_pretrained`` in one process: weights within 1e-6."""
    from peft import PeftModel

    name, settings = ADAPTERS[kind]
    config = CASES[name].config
    base = write_base(tmp_path, config)
    adapter = write_adapter(tmp_path, base, config, settings)
    recipe = recipe_of(name, adapter)
    found, other = pool.run(train, 2, name, tmp_path, recipe, None, 8)
    assert found["hash"] == other["hash"]
    peft_model: Any = PeftModel.from_pretrained(library_base(base, config), str(adapter), is_trainable=True)
    theirs = peft_model.base_model.model
    start = dict(theirs.named_parameters(remove_duplicate=False))
    assert start.keys() == found["before"].keys()
    for key, value in start.items():
        assert torch.equal(found["before"][key], value.detach()), key
    trained = {key for key, value in start.items() if value.requires_grad}
    expected = reference.run(name, recipe, {}, {}, steps=8, model=theirs)
    losses, weights, _ = reference.compare(found, expected)
    assert losses <= 1e-6
    assert weights <= 1e-6
    moved = {key for key in trained if not torch.equal(found["before"][key], found["after"][key])}
    assert {key.partition("lora_")[0] for key in moved} == {key.partition("lora_")[0] for key in trained}


RUN = """\
model: {{reference: {adapter}}}
data: {{source: synthetic}}
batch: {{micro_batch: 2, sequence_length: 16}}
optimizer: {{learning_rate: 0.01}}
schedule: {{name: constant}}
steps: 3
"""
CONFIG = """\
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""

EXPORTED = {
    "tables saved": False,
    "tied tables saved together": False,
    "tied tables saved apart": True,
    "DoRA of a table and a head": False,
    "DoRA, transposed": False,
    "rows of a tied table": False,
    "rsLoRA, ranks and alphas by pattern": False,
    "biases": False,
}
"""Adapters to export, and whether no model of the base's class holds both of what was trained."""


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(48).reshape(2, 24)
    result: torch.Tensor = model.eval()(input_ids=tokens).logits
    return result


@pytest.mark.parametrize(
    "kind", kept(EXPORTED, "tied tables saved apart", "DoRA, transposed", "rows of a tied table", "biases")
)
def test_peft_loads_an_exported_adapter_with_all_its_settings(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Its logits are those of the checkpoint's values, and so are the merged model's."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    name, settings = ADAPTERS[kind]
    base = write_base(tmp_path, CASES[name].config)
    adapter = write_adapter(tmp_path, base, CASES[name].config, settings)
    (tmp_path / "recipe.yaml").write_text(RUN.format(adapter=adapter))
    (tmp_path / "a.yaml").write_text(CONFIG)
    write_folder(tmp_path / "run", tmp_path / "recipe.yaml", tmp_path / "a.yaml")
    pool.run(work_in, 2, str(tmp_path / "run"))

    exported = export_run(tmp_path / "run", tmp_path / "exported")
    assert exported.kind == "adapter"
    loaded: Any = PeftModel.from_pretrained(library_base(base, CASES[name].config), str(exported.folder))
    expected: Any = PeftModel.from_pretrained(library_base(base, CASES[name].config), str(adapter))
    before = logits(expected)
    put_checkpoint(tmp_path / "run", expected.base_model.model)
    after = logits(expected)
    assert (after - before).abs().max() > 1e-4, "three steps changed something"
    assert torch.equal(logits(loaded), after)
    ours, theirs = (json.loads((f / "adapter_config.json").read_text()) for f in (exported.folder, adapter))
    for key in ("r", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "bias", "lora_bias"):
        assert ours[key] == theirs[key], key
    for key in ("modules_to_save", "trainable_token_indices", "ensure_weight_tying", "lora_alpha"):
        assert ours[key] == theirs[key], key
    assert set(ours["target_modules"]) == set(theirs["target_modules"])

    if EXPORTED[kind]:
        with pytest.raises(ConfigError, match="was trained apart from it"):
            export_run(tmp_path / "run", tmp_path / "merged", merge=True)
        return
    merged = export_run(tmp_path / "run", tmp_path / "merged", merge=True)
    whole = AutoModelForCausalLM.from_pretrained(merged.folder, dtype=torch.float32)
    assert torch.allclose(logits(whole), after, atol=1e-5, rtol=1e-5)


def put_checkpoint(run: Path, model: nn.Module) -> None:
    """Let torch read what a run trained into a model of peft's own making."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    trained = {name: p for name, p in model.named_parameters() if p.dtype.is_floating_point}
    saved = set(trained_names(run))
    wanted = {f"model/{name}": torch.empty_like(p) for name, p in trained.items() if name in saved}
    assert saved == {name.removeprefix("model/") for name in wanted}
    folder = list_checkpoints(run / "checkpoints")[0]
    load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    with torch.no_grad():
        for name, value in wanted.items():
            trained[name.removeprefix("model/")].copy_(value)


def trained_names(run: Path) -> list[str]:
    saved, _, _ = open_saved(run, None)
    return list(saved.names("model/"))


def test_weights_of_another_adapter_are_refused(tmp_path: Path) -> None:
    """A changed rank before a run starts, and a file with other tensors where it is read."""
    from fsdptool.distributed.weights import open_adapter
    from fsdptool.families.registry import family_of
    from fsdptool.inspection.build import build
    from fsdptool.modeling.methods import method_of

    config = CASES["causal"].config
    adapter = write_adapter(tmp_path, write_base(tmp_path, config), config, QV)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": ["q_proj"]}))
    spec = resolve(str(adapter))
    recipe = adapted(Recipe(ModelChoice(str(adapter))), spec)
    model = build(spec)
    method_of(recipe).prepare(model, recipe, family_of(spec), spec.config)
    with pytest.raises(ModelError, match=r"4 tensors .*v_proj\.lora_A"):
        open_adapter(spec, recipe.model, model)
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    spec = resolve(str(adapter))
    recipe = adapted(Recipe(ModelChoice(str(adapter))), spec)
    model = build(spec)
    method_of(recipe).prepare(model, recipe, family_of(spec), spec.config)
    with pytest.raises(ModelError, match=r"are missing: .*lora_magnitude_vector"):
        open_adapter(spec, recipe.model, model)


STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a decoder": (
        "causal",
        {"use_dora": True, "targets": ("q_proj", "embed_tokens"), "modules_to_save": ("lm_head", "norm")},
    ),
    "tied": ("qwen3 tied", {"targets": ("q_proj",), "modules_to_save": ("lm_head",)}),
    "transposed": ("gpt2", {"use_dora": True, "targets": ("c_attn",), "trainable_token_indices": (9, 4)}),
    "a denoiser": ("flow", {"use_dora": True, "targets": ("to_q", "proj"), "modules_to_save": ("proj_out",)}),
}


@pytest.mark.parametrize("kind", STARTS)
def test_a_new_adapter_starts_from_the_base_as_peft_starts_it(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Copies, rows and magnitudes are those that peft makes of the same base; other matrices are random."""
    from peft import LoraConfig, get_peft_model

    name, settings = STARTS[kind]
    case = CASES[name]
    recipe, folder = prepare_case(case, tmp_path, "lora")
    lora = Lora(rank=4, **settings)
    recipe = dataclasses.replace(recipe, method=dataclasses.replace(recipe.method, lora=lora))
    results = pool.run(train, 2, name, folder, recipe, None, 1)
    before = results[0]["before"]
    base: Any = reference.plain_model(case, case.config, torch.float32)
    with torch.no_grad():
        for key, parameter in base.named_parameters(remove_duplicate=False):
            parameter.copy_(next(v for k, v in before.items() if base_name(k) == key and not is_adapter(k)))
    theirs = get_peft_model(
        base,
        LoraConfig(
            r=4,
            target_modules=list(lora.targets or ()),
            modules_to_save=list(lora.modules_to_save) or None,
            trainable_token_indices=list(lora.trainable_token_indices) or None,
            use_dora=lora.use_dora,
        ),
    ).base_model.model
    fresh = dict(theirs.named_parameters(remove_duplicate=False))
    assert fresh.keys() == before.keys()
    random = [key for key in fresh if is_adapter(key) and not key.endswith("vector.default.weight")]
    for key, value in fresh.items():
        if key not in random:
            assert torch.equal(before[key], value.detach()), key
    assert all(results[0]["after"][key].ne(before[key]).any() for key in random if "lora_B" in key)
