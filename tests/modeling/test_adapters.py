"""A PEFT adapter is the model that peft makes of it: what it holds, what is trained, how it is grouped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_table import CASES, LLAMA, MOE, QV, TABLES, TIED, library_model, write_adapter

from fsdptool.errors import ConfigError, ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.inspection import inspect
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import TrainedModel, plan_units, with_adapter
from fsdptool.records.recipe import Lora, Method, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings, UnitPlan
from fsdptool.source import adapted, check_continues, resolve

PREFIX = "base_model.model."


def ours(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> TrainedModel:
    spec = resolve(str(write_adapter(folder, config, settings)))
    return with_adapter(inspect(spec, use_cache=False), use_cache=False)


@pytest.mark.sampled(every=8, whole=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_an_adapter_has_the_parameters_that_peft_gives_it(name: str, tmp_path: Path) -> None:
    """Names, shapes and what is trained equal those of ``get_peft_model``."""
    from peft import PeftConfig, get_peft_model

    config, settings = CASES[name]
    found = ours(tmp_path, config, settings).anatomy
    with torch.device("meta"):
        model = library_model(config)
        peft_model: Any = get_peft_model(model, PeftConfig.from_pretrained(str(tmp_path / "adapter")))
    theirs = {n.removeprefix(PREFIX): p for n, p in peft_model.named_parameters()}
    if "_class_name" in config:
        theirs = {
            n: p for n, p in theirs.items() if n in {q.fqn for q in found.parameters} or p.requires_grad
        }
    assert {p.fqn: p.shape for p in found.parameters} == {n: tuple(p.shape) for n, p in theirs.items()}
    trained = {p.fqn for p in found.parameters if p.trainable}
    assert trained == {n for n, p in theirs.items() if p.requires_grad}
    assert trained
    assert found.total_parameters == sum(p.numel() for p in theirs.values())


def units_of(found: TrainedModel) -> UnitPlan:
    recipe = adapted(Recipe(ModelChoice("adapter", dtype="float32")), found.anatomy.spec)
    return plan_units(found, resolve_run(recipe, FsdpSettings(num_processes=2, mixed_precision="no")))


BIG = {"vocab_size": 4000}


def test_a_saved_table_is_a_unit_of_its_own_and_what_it_stands_for_is_never_gathered(tmp_path: Path) -> None:
    """The copies are grouped as the plain table and head; the originals are apart, in no root."""
    plain = units_of(ours(tmp_path / "plain", LLAMA | BIG, QV)).units
    assert [(unit.kind, unit.modules) for unit in plain if unit.kind != "block"] == [
        ("embedding", ("model.embed_tokens",)),
        ("tail", ("model.norm", "lm_head")),
        ("root", ("",)),
    ]
    saved = units_of(ours(tmp_path / "saved", LLAMA | BIG, QV | TABLES)).units
    assert [(unit.kind, unit.modules) for unit in saved if unit.kind != "block"] == [
        ("embedding", ("model.embed_tokens.original_module",)),
        ("embedding", ("lm_head.original_module",)),
        ("embedding", ("model.embed_tokens.modules_to_save.default",)),
        ("tail", ("model.norm", "lm_head.modules_to_save.default")),
        ("root", ("",)),
    ]
    assert saved[-1].parameters == ()
    copy = next(unit for unit in saved if unit.id == "model.embed_tokens.modules_to_save.default")
    assert not copy.unshard_in_backward and copy.parameters[0].trainable


@pytest.mark.parametrize(
    ("settings", "outside"),
    [
        (
            TABLES,
            {
                "model.embed_tokens.original_module+lm_head.original_module": 1,
                "model.embed_tokens.modules_to_save.default": 1,
                "model.norm+lm_head.modules_to_save.default": 2,
                "root": 0,
            },
        ),
        # One table still serves the other module, or the copies share one: the root holds what is shared.
        (
            TABLES | {"ensure_weight_tying": True},
            {"model.embed_tokens.original_module+lm_head.original_module": 1, "root": 2},
        ),
        (
            {"modules_to_save": ["lm_head"]},
            {"model.norm+lm_head.modules_to_save.default": 2, "root": 1},
        ),
        ({"trainable_token_indices": [1, 2]}, {"root": 3}),
    ],
)
def test_tables_of_a_tied_model(settings: dict[str, Any], outside: dict[str, int], tmp_path: Path) -> None:
    units = units_of(ours(tmp_path, TIED | BIG, QV | settings)).units
    assert {unit.id: len(unit.parameters) for unit in units if unit.kind != "block"} == outside


@pytest.mark.parametrize(
    ("settings", "unit"),
    [
        ({"trainable_token_indices": [1, 2]}, "model.embed_tokens"),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "model.embed_tokens"),
        ({"target_modules": ["embed_tokens"]}, "model.embed_tokens.base_layer"),
    ],
)
def test_a_table_whose_weight_is_read_is_gathered_by_what_reads_it(
    settings: dict[str, Any], unit: str, tmp_path: Path
) -> None:
    units = units_of(ours(tmp_path, LLAMA | BIG, QV | settings)).units
    assert [item.id for item in units if item.kind == "embedding"] == [unit]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": kind}, f"of type {kind}, and of these only LORA")
        for kind in (
            "LOHA",
            "LOKR",
            "ADALORA",
            "IA3",
            "OFT",
            "VERA",
            "PROMPT_TUNING",
            "PREFIX_TUNING",
            "XLORA",
        )
    ]
    + [
        ({"init_lora_weights": start}, "init_lora_weights")
        for start in ("pissa", "pissa_niter_4", "olora", "loftq", 3)
    ]
    + [
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"r": 0}, "r is 0, not from 1"),
        ({"r": "eight"}, "r: expected int"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern.* is -1"),
        ({"lora_dropout": 1.5}, "lora_dropout is 1.5"),
        ({"target_modules": [1, 2]}, r"adapter_config.json: target_modules\[0\]: expected str"),
        ({"modules_to_save": "lm_head"}, "modules_to_save: expected a list"),
        ({"bias": "some"}, "bias: 'some' is not one of"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Where the reference is read, so by every command; the help names the base."""
    adapter = write_adapter(tmp_path, LLAMA, QV | settings)
    with pytest.raises(ReferenceError, match=message) as caught:
        resolve(str(adapter))
    assert caught.value.help


def test_settings_that_mean_nothing_do_not_matter(tmp_path: Path) -> None:
    """Defaults that peft writes for what is not used, and keys that it ignores."""
    unused = {
        **{
            "layer_replication": None,
            "megatron_core": "megatron.core",
            "loftq_config": {},
            "eva_config": None,
        },
        **{"use_qalora": False, "qalora_group_size": 16, "inference_mode": True, "peft_version": "0.21.2"},
    }
    spec = resolve(str(write_adapter(tmp_path, LLAMA, QV | unused)))
    assert adapted(Recipe(ModelChoice("a")), spec).method == Method(
        "lora", Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), exclude_modules=())
    )


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    inner = write_adapter(tmp_path / "one", LLAMA, QV)
    outer = write_adapter(tmp_path / "two", LLAMA, QV | {"base_model_name_or_path": str(inner)})
    with pytest.raises(ReferenceError, match="which is an adapter itself") as caught:
        resolve(str(outer))
    assert "merge" in (caught.value.help or "")


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (LLAMA, {"target_modules": ["c_attn"]}, "c_attn"),
        (LLAMA, {"modules_to_save": ["score"]}, "modules_to_save: LlamaForCausalLM has no score"),
        (LLAMA, TABLES | {"trainable_token_indices": {"embed_tokens": [1]}}, "already marked"),
        (
            TIED,
            {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
            "ensure_weight_tying ties the adapters",
        ),
        (LLAMA, {"target_modules": ".*q_proj", "layers_to_transform": [0]}, "layers_to_transform"),
        (LLAMA, {"target_modules": "(q_proj"}, r"missing \)"),
        (LLAMA, {"rank_pattern": {"[q": 2}}, "character set"),
        (LLAMA, {"modules_to_save": ["layers"]}, "No modules were targeted"),
        (LLAMA, {"modules_to_save": ["q_proj.lora_dropout"]}, "modules_to_save cannot be applied"),
        (LLAMA, {"trainable_token_indices": {"embeddings": [1]}}, "embeddings"),
        (LLAMA, {"trainable_token_indices": [-1]}, "there is no row -1"),
        (LLAMA, {"use_dora": True, "lora_bias": True}, "lora_bias=True is not supported for DoRA"),
        (MOE, {"target_parameters": ["experts.down_proj"], "use_dora": True}, "use_dora=True"),
        (LLAMA, {"trainable_token_indices": [1, 96]}, "trainable_token_indices: there is no row 96"),
    ],
)
def test_an_adapter_that_does_not_suit_its_base_is_refused(
    config: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(tmp_path, config, QV | settings)


def test_what_a_recipe_says_wins_over_the_adapter(tmp_path: Path) -> None:
    spec = resolve(str(write_adapter(tmp_path, LLAMA, QV | {"use_dora": True})))
    plain = Recipe(ModelChoice("a"))
    asked = Recipe(ModelChoice("a"), method=Method("lora", Lora(rank=8, base="int8")))
    lora = adapted(asked, spec).method.lora
    assert lora is not None and (lora.rank, lora.base, lora.use_dora) == (8, "int8", True)
    given = adapted(asked, spec, {"method.lora.use_dora", "method.lora.alpha"}).method.lora
    assert given is not None and (given.use_dora, given.alpha) == (False, 32.0)
    assert adapted(plain, spec).method.name == "lora"
    with pytest.raises(ConfigError, match="method full trains every parameter"):
        adapted(plain, spec, {"method.name"})


def test_settings_that_do_not_fit_an_adapters_weights_are_refused_before_a_run(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, LLAMA, QV)
    recipe = Recipe(ModelChoice("a"), method=Method("lora", Lora(rank=8)))
    check_continues(adapted(recipe, resolve(str(folder))), resolve(str(folder)))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    spec = resolve(str(folder))
    with pytest.raises(ConfigError, match=r"method\.lora\.rank is 8, but the weights .* with 4"):
        check_continues(adapted(recipe, spec), spec)
    check_continues(adapted(Recipe(ModelChoice("a"), method=Method("lora", Lora(alpha=2.0))), spec), spec)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    spec = resolve(str(folder))
    with pytest.raises(ConfigError, match=r"adapter_model\.bin"):
        check_continues(adapted(Recipe(ModelChoice("a")), spec), spec)


@pytest.mark.parametrize(
    "lora",
    [
        Lora(modules_to_save=("lm_head",)),
        Lora(trainable_token_indices=(1,)),
        Lora(use_dora=True),
        Lora(bias="all"),
        Lora(lora_bias=True),
    ],
)
@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_what_ranks_of_a_group_cannot_divide_is_refused_by_name(lora: Lora, kind: str) -> None:
    from fsdptool.modeling.units import check_expert_parallel, check_tensor_parallel
    from fsdptool.records.mesh import ParallelDims
    from fsdptool.records.recipe import Sharding

    recipe = Recipe(ModelChoice("a"), method=Method("lora", lora), sharding=Sharding(expert_parallel=2))
    check = check_tensor_parallel if kind == "tensor" else check_expert_parallel
    names = ("modules_to_save", "trainable_token_indices", "use_dora", "bias", "lora_bias")
    name = next(name for name in names if getattr(lora, name) != getattr(Lora(), name))
    with pytest.raises(ConfigError, match=rf"method\.lora\.{name} "):
        check(resolve_run(recipe, FsdpSettings(num_processes=4, mesh=ParallelDims(tp=2))))


def test_magnitudes_of_a_quantised_base_are_refused() -> None:
    from fsdptool.modeling.methods import method_of

    recipe = Recipe(ModelChoice("a"), method=Method("lora", Lora(use_dora=True, base="int8")))
    with pytest.raises(ConfigError, match="use_dora"):
        method_of(recipe).check(recipe, FsdpSettings())


def test_recipes_and_emitted_recipes_hold_every_setting(tmp_path: Path) -> None:
    from fsdptool.config.recipe import dump_recipe, read_recipe

    lora = Lora(
        targets=r".*\.q_proj",
        exclude_modules=("layers.0",),
        layers_to_transform=(1, 2),
        rank_pattern={"q_proj": 8},
        alpha_pattern={"v_proj": 2.5},
        modules_to_save=("lm_head",),
        trainable_token_indices={"embed_tokens": (1, 2)},
        bias="lora_only",
        use_dora=True,
        init_lora_weights="gaussian",
    )
    for choice in (lora, Lora(targets="all-linear", trainable_token_indices=(3, 4))):
        recipe = Recipe(ModelChoice("a"), method=Method("lora", choice))
        (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
        assert read_recipe(tmp_path / "r.yaml") == recipe


@pytest.mark.slow
def test_commands_answer_for_the_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fsdptool.cli.app import run

    folder = str(write_adapter(tmp_path, LLAMA, QV | TABLES))
    assert run(["detect", folder]) == 0
    text = capsys.readouterr().out
    assert "of them trained" in text
    assert "LoRA adapter: rank 4, alpha 8; on q_proj, v_proj; trained whole: embed_tokens, lm_head" in text
    assert run(["detect", folder, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["lora"]["modules_to_save"] == ["embed_tokens", "lm_head"]
    hardware = ["--gpu", "A100-80GB-SXM", "--gpus", "2", "--seq-len", "32", "--no-search"]
    assert run(["plan", folder, *hardware, "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["inputs"]["recipe"]["method"]["lora"]["rank"] == 4
    # Four bytes of every trained parameter, over two ranks.
    assert plan["details"]["states"]["gradients"] / 2 == pytest.approx(
        document["parameters"]["trainable"], rel=0.05
    )
    assert run(["plan", folder, *hardware]) == 0
    assert "trains the LoRA adapter: rank 4, alpha 8; on q_proj, v_proj; trained" in capsys.readouterr().out
    assert run(["plan", folder, "--method", "full", *hardware]) == 2
    assert "name its base" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a\nadapter: lora\nlora_modules_to_save: [lm_head]\nfsdp_version: 2\n"
        "fsdp_config: {reshard_after_forward: true}\ndatasets: []\n",
        "model_name_or_path: a\nstage: sft\nfinetuning_type: lora\nadditional_target: lm_head\n"
        "do_train: true\nfsdp: full_shard\n",
    ],
)
def test_a_plan_says_that_it_does_not_read_adapters_from_other_programs_files(
    text: str, tmp_path: Path
) -> None:
    from fsdptool.planning.request.inputs import read_request

    (tmp_path / "a.yaml").write_text(text)
    options: Any = {
        "reference": "qwen3:tiny",
        "gpu": "A100-80GB-SXM",
        "gpus": 2,
        "config": tmp_path / "a.yaml",
    }
    codes = [item.code for item in read_request(options).diagnostics]
    assert codes.count("PLN016") == 1
    assert "PLN016" not in [item.code for item in read_request({**options, "method": "lora"}).diagnostics]


@pytest.mark.slow
def test_init_writes_a_recipe_that_trains_the_adapter(tmp_path: Path) -> None:
    from fsdptool.cli.app import run
    from fsdptool.config.recipe import given_keys, read_recipe

    folder = str(write_adapter(tmp_path, LLAMA, QV | TABLES | {"use_dora": True}))
    assert run(["init", folder, "-o", str(tmp_path), "--seq-len", "32"]) == 0
    recipe = read_recipe(tmp_path / "recipe.yaml")
    lora = recipe.method.lora
    assert lora is not None
    assert (lora.rank, lora.use_dora, lora.modules_to_save) == (4, True, ("embed_tokens", "lm_head"))
    # The file gives what the adapter says, so reading it beside the adapter changes nothing.
    assert adapted(recipe, resolve(folder), given_keys(tmp_path / "recipe.yaml")) == recipe
