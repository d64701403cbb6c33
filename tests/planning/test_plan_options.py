"""The options of a plan are declared once: the command, the function and the request follow it."""

from __future__ import annotations

import inspect
from typing import Any, cast, get_args, get_type_hints

import pytest

import fsdptool
from fsdptool.cli.plan import command
from fsdptool.errors import ConfigError, PlanError
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning.request.inputs import read_request
from fsdptool.planning.request.options import Options, declared, read_options
from fsdptool.records.plan import SearchPoint
from fsdptool.records.recipe import Data, Lora, Method, ModelChoice, Objective, Optimizer, Recipe, Sharding

PYTHON_ONLY = {"dp_replicate", "dp_shard"}
"""The command says both by ``--hsdp``."""
COMMAND_ONLY = {"context", "check", "sweep", "explain", "output", "force", "format"}


def test_the_command_and_the_function_take_what_is_declared() -> None:
    command_names = set(inspect.signature(command).parameters)
    assert command_names == (set(declared()) - PYTHON_ONLY) | COMMAND_ONLY
    function = inspect.signature(fsdptool.plan)
    assert list(function.parameters) == list(declared())
    for name, item in declared().items():
        assert function.parameters[name].annotation == item.hint
        assert item.option.help


@pytest.mark.parametrize(
    ("option", "record", "field"),
    [
        ("optimizer", Optimizer, "name"),
        ("optimizer_implementation", Optimizer, "implementation"),
        ("lora_base", Lora, "base"),
        ("adapters", Lora, "adapters"),
        ("dtype", ModelChoice, "dtype"),
        ("attention", ModelChoice, "attention"),
        ("layout", Sharding, "layout"),
        ("gradients", Sharding, "accumulation"),
    ],
)
def test_choices_are_those_of_the_record_and_stand_in_the_help(option: str, record: type, field: str) -> None:
    choices = get_args(get_type_hints(record)[field])
    assert declared()[option].option.allowed() == choices
    text = declared()[option].option.text()
    assert all(choice in text for choice in choices)
    with pytest.raises(PlanError, match="is not supported") as refused:
        read_options({option: "magic"})  # type: ignore[misc]  # any option's name
    assert refused.value.help == f"choose one of: {', '.join(choices)}"
    assert read_options({option: choices[0].upper()}) == {option: choices[0]}  # type: ignore[misc]


def test_qlora_is_lora_with_a_base_in_nf4() -> None:
    assert set(declared()["method"].option.allowed()) == {*get_args(get_type_hints(Method)["name"]), "qlora"}
    options = Options(reference="gpt2:small", gpu="L4-24GB", method="qlora", lora_rank=4)
    assert read_request(options).inputs.recipe.method == Method("lora", lora=Lora(rank=4, base="nf4"))
    with pytest.raises(PlanError, match="stores the base in nf4, --lora-base asks for int8"):
        read_request(Options(**options, lora_base="int8"))


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({}, "float32"),
        ({"method": "lora"}, "bfloat16"),
        ({"method": "lora", "precision": "fp16"}, "float16"),
        ({"method": "lora", "precision": "no"}, "float32"),
        ({"method": "lora", "dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_frozen_base_is_stored_as_it_computes_unless_a_dtype_is_given(
    changes: dict[str, str], stored: str
) -> None:
    inputs = read_request(Options(reference="gpt2:small", gpu="L4-24GB", **changes)).inputs  # type: ignore[typeddict-item]
    assert resolve_run(inputs.recipe, inputs.settings).recipe.model.dtype == stored


@pytest.mark.parametrize(
    ("given", "loss", "kept"),
    [
        ({}, "whole", {"chunk": 0}),
        ({"chunk": 512, "auxiliary": 0.1}, "whole", {"chunk": 0, "auxiliary": 0.1}),
        ({"chunk": 0}, "chunked", {}),
        ({"chunk": 512}, "chunked", {"chunk": 512}),
    ],
)
def test_what_the_loss_keeps_is_the_chunk_of_its_objective(
    given: dict[str, float], loss: str, kept: dict[str, float]
) -> None:
    recipe = Recipe(ModelChoice("gpt2:small"), objective=Objective(options=given))
    inputs = read_request(Options(recipe=recipe, gpu="L4-24GB", loss=loss)).inputs
    assert inputs.recipe.objective.options == kept


@pytest.mark.parametrize(
    ("tokens", "said"), [("8", ": expected int, got str '8'"), (0, " must be at least 1, not 0")]
)
def test_a_recipe_made_in_python_is_checked_as_a_file_is(tokens: Any, said: str) -> None:
    wrong = Recipe(ModelChoice("gpt2:small"), data=Data(options={"sample_tokens": tokens}))
    with pytest.raises(ConfigError, match=rf"recipe\.data\.options\.sample_tokens{said}"):
        read_request(Options(recipe=wrong, gpu="L4-24GB"))


def test_closed_dimensions_are_those_of_a_search_point() -> None:
    dimensions = {dimension for item in declared().values() for dimension in item.option.closes}
    assert dimensions - {"mesh", "wrap"} <= set(SearchPoint.__dataclass_fields__)


@pytest.mark.parametrize("given", [{"dp_shard": 4}, {"dp_replicate": 1}])
def test_a_mesh_that_is_given_twice_and_differs_is_refused(given: Options) -> None:
    (name,) = given
    with pytest.raises(PlanError, match=f"--hsdp 2x2 contradicts .*{name.replace('_', '-')}"):
        read_request(Options(reference="gpt2:small", gpu="L4-24GB", gpus=4, hsdp="2x2", **given))
    same = Options(reference="gpt2:small", gpu="L4-24GB", gpus=4, hsdp="2x2", dp_shard=2)
    assert read_request(same).inputs.settings.mesh.dp_replicate == 2


def test_options_reach_the_records_they_set() -> None:
    options = Options(
        reference="gpt2:small",
        gpu="L4-24GB",
        gpus=4,
        hsdp="2x2",
        reshard="false",
        precision="fp32",
        reduce_dtype="param",
        checkpointing="every_2",
        offload=False,
        ema=0.99,
        overrides={"n_layer": 2},
        lora_targets=["c_attn"],
        adapters="Replicated",
        wrap=["GPT2Block"],
    )
    inputs = read_request(options).inputs
    assert (inputs.settings.mesh.dp_replicate, inputs.settings.mesh.dp_shard) == (2, 2)
    assert inputs.settings.reshard_after_forward is False
    assert inputs.settings.mixed_precision == "no"
    assert inputs.settings.activation_checkpointing is True
    assert inputs.settings.wrap_classes == inputs.wrap == ("GPT2Block",)
    assert inputs.recipe.sharding.reduce_dtype is None
    assert inputs.recipe.sharding.checkpointing is not None
    assert inputs.recipe.sharding.checkpointing.every_n == 2
    assert inputs.recipe.ema.decay == 0.99
    assert inputs.recipe.model.overrides == {"n_layer": 2}
    assert inputs.recipe.method.name == "lora"
    assert inputs.recipe.method.lora is not None
    assert (inputs.recipe.method.lora.targets, inputs.recipe.method.lora.adapters) == (
        ("c_attn",),
        "replicated",
    )
    assert inputs.fixed == ("checkpointing", "cpu_offload", "mesh", "reshard_after_forward", "wrap")


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("gpuz", "did you mean gpu?"),
        ("seq_len", "did you mean sequence_length?"),
        ("no_offload", "did you mean offload?"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(word: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"plan has no option '{word}'") as refused:
        fsdptool.plan("gpt2:small", **cast("Any", {word: 4}))
    assert refused.value.__notes__ == [f"help: {advice}"]
