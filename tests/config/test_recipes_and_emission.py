"""Recipes by their record, and what emit-config writes for a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsdptool_diffusion
import jsonschema
import pytest
import yaml
from accelerate_oracle import check_explained
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdptool.training
from fsdptool.api.emit_config import PRESETS
from fsdptool.cli.app import run
from fsdptool.config import read_settings
from fsdptool.config.migrate import repair
from fsdptool.config.recipe import _OTHER_NAMES, dump_recipe, read_recipe
from fsdptool.errors import ConfigError
from fsdptool.files.values import load_schema
from fsdptool.inspection import inspect
from fsdptool.modeling.context_parallel import attention_kinds
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import DataOptions, Recipe
from fsdptool.records.schema import generate
from fsdptool.source import resolve

MINIMAL = "model:\n  reference: llama3:8b\n"
WRONG = {
    "optimzer: {}\n": ("recipe:3:1: unknown key 'optimzer'", "did you mean optimizer?"),
    "lr: 1.0e-4\n": ("unknown key 'lr'", "write optimizer.learning_rate"),
    "learning_rate: 1.0e-4\n": ("unknown key 'learning_rate'", "write it under optimizer:"),
    "optimizer:\n  learning_rate: 1e-4\n": ("recipe:4:18", "write 0.0001"),
    "optimizer:\n  scale_learning_rate: no\n": ("not one of none, linear, sqrt", "'none'"),
    "mixed_precision: bf16\n": ("belongs in the accelerate YAML", "mixed_precision"),
    "fsdp_version: 2\n": ("belongs in the accelerate YAML", "fsdp_config.fsdp_version"),
    "sharding:\n  cpu_offload: true\n": ("sharding.cpu_offload belongs", "fsdp_offload_params"),
    "data:\n  messages_column: chat\n": ("key 'data.messages_column'", "write it under data.options:"),
    "sharding:\n  layout: natve\n": ("not one of native, accelerate", "did you mean native?"),
    "batch:\n  micro_batch: 0\n": ("must be at least 1", None),
    "batch:\n  accumulation: 2\n  global_batch: 8\n": ("determine each other", "keep one"),
    "checkpoints:\n  every_steps: 0\n": ("checkpoints.every_steps must be at least 1", "leave it out"),
    "evaluation:\n  every_steps: -1\n": ("evaluation.every_steps must be at least 1", "leave it out"),
    "optimizer:\n  learning_rate: .nan\n": ("must be a finite number, not .nan", None),
    "optimizer:\n  betas: [0.9, 1.5]\n": ("recipe:4:16: optimizer.betas must be at least 0", None),
    "method:\n  name: lora\n  lora: {rank: 0}\n": ("method.lora.rank must be from 1 to 65536, not 0", None),
    "method:\n  lora: {rank: 4}\n": ("recipe:4:3: method.lora is given, but method.name is full", "leave"),
    "method:\n  name: distillation\n": ("recipe:3:1: method distillation requires a teacher", "name one"),
    "evaluation:\n  every_steps: 2\n": ("without data to evaluate on", "evaluation.holdout"),
    "steps: inf\n": ("steps must be a whole number", None),
    "seed: 1\nseed: 2\n": ("written again on line 4", "keep one"),
    "tracking:\n  backends: wandb\n": ("must be a list", None),
    "steps:\n  - 1\n": ("must be a whole number", None),
    "data:\n  options: {mask_shar: 0.2}\n": ("key 'data.options.mask_shar'", "did you mean mask_share?"),
    "data:\n  options: {packing: warp}\n": ("data.options.packing is 'warp'", "did you mean wrap?"),
    "data:\n  options: {prompts: A tale}\n": ("recipe:4:22: data.options.prompts must be a list", None),
    "data:\n  options: {temperature: -1}\n": ("data.options.temperature must be at least 0", "leave it"),
    "data:\n  options: {buckets: [64]}\n": ("data.options.buckets[0] must be a list", None),
    "data:\n  options: {buckets: []}\n": ("data.options.buckets must not be an empty list", "leave it"),
    "data:\n  options: {assistant_turns: ['', b]}\n": ("turns must not be an empty text", None),
    "data:\n  options: {data_files: {train: 3}}\n": ("data_files.train must be text or a list, not 3", None),
    "data:\n  options: {text_column: a}\n": ("key 'data.options.text_column'", "write it under data:"),
    "data:\n  options: {fps: slow}\n": ("data.options.fps must be a number or spread, not 'slow'", None),
    "model2: [\n": ("not YAML", None),
}  # fmt: skip


@pytest.mark.parametrize("extra", WRONG)
def test_mistakes_are_one_line_with_their_place(extra: str) -> None:
    message, advice = WRONG[extra]
    with pytest.raises(ConfigError) as caught:
        read_recipe(MINIMAL + extra)
    assert message in caught.value.message and "\n" not in caught.value.message
    assert advice is None or advice in (caught.value.help or "")


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(
            "model:\n  refrence: llama3:8b\nlr: 3\nbatch: {micro_batch: x, acumulation: 2}\nsteps: -3\n"
        )
    said = [(error.message, error.help) for error in (caught.value, *caught.value.others)]
    assert [message.partition(" ")[0] for message, _ in said] == [
        "recipe:2:3:",
        "recipe:3:1:",
        "recipe:4:22:",
        "recipe:4:25:",
        "recipe:5:8:",
    ]
    assert said[0] == ("recipe:2:3: unknown key 'model.refrence'", "did you mean reference?")
    assert said[1] == ("recipe:3:1: unknown key 'lr'", "write optimizer.learning_rate")
    with pytest.raises(ConfigError) as caught:
        read_recipe("model: {reference: a:b}\nbatch: {micro_batch: -1}\nsteps: -3\n")
    assert len(caught.value.others) == 1


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("model: {_component_: torchtune.models.llama3.llama3_8b}\nbatch_size: 2\n", "torchtune"),
        ("[training]\nseq_len = 8192\n\n[parallelism]\ntensor_parallel_degree = 1\n", "torchtitan"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", "accelerate"),
    ],
)
def test_a_configuration_is_not_taken_for_a_recipe(text: str, dialect: str) -> None:
    with pytest.raises(ConfigError, match=rf"not a recipe but a configuration \({dialect}\)") as caught:
        read_recipe(text)
    assert not caught.value.others


def test_every_name_of_other_trainers_leads_to_a_field() -> None:
    properties = generate("recipe")
    for name, field in _OTHER_NAMES.items():
        node = properties
        assert name not in node["properties"]
        for part in field.split("."):
            reference = node.get("$ref") or next(
                (option["$ref"] for option in node.get("anyOf", ()) if "$ref" in option), None
            )
            node = properties["$defs"][reference.rpartition("/")[2]] if reference else node
            node = node["properties"][part]


SCHEMA = generate("recipe")
OUTSIDE: dict[str, Callable[[float], float]] = {
    "minimum": lambda bound: bound - 1,
    "exclusiveMinimum": lambda bound: bound,
    "maximum": lambda bound: bound + 1,
    "exclusiveMaximum": lambda bound: bound,
}


def recipes_out_of_bounds(node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and data of each value of a schema with one number just outside one of its bounds."""
    for option in node.get("anyOf", ()):
        yield from recipes_out_of_bounds(option)
    if "$ref" in node:
        yield from recipes_out_of_bounds(SCHEMA["$defs"][node["$ref"].rpartition("/")[2]])
    for keyword, outside in OUTSIDE.items():
        if keyword in node:
            yield (), outside(node[keyword])
    if "items" in node:
        yield from ((path, [data]) for path, data in recipes_out_of_bounds(node["items"]))
    if "prefixItems" in node:
        count = len(node["prefixItems"])
        yield from ((path, [data] * count) for path, data in recipes_out_of_bounds(node["prefixItems"][0]))
    samples = {"model": {"reference": "a:b"}, "teacher": {"reference": "a:b"}, "reference": "a:b", "count": 1}
    needed = {name: samples[name] for name in node.get("required", ())}
    for name, inner in node.get("properties", {}).items():
        for path, data in recipes_out_of_bounds(inner):
            yield (name, *path), {**needed, name: data}


def test_the_schema_and_the_reader_refuse_the_same_numbers() -> None:
    found = dict(recipes_out_of_bounds(SCHEMA))
    assert found.keys() >= {("steps",), ("batch", "micro_batch"), ("ema", "decay"), ("optimizer", "betas")}
    assert len(found) >= 40
    for path, recipe in recipes_out_of_bounds(SCHEMA):
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(recipe), path
        with pytest.raises(ConfigError, match=rf"^recipe:\d+:\d+: {re.escape('.'.join(path))} must be "):
            read_recipe(yaml.safe_dump(recipe))


def test_an_option_of_the_data_that_is_null_is_left_out() -> None:
    recipe = read_recipe(MINIMAL + "data:\n  options: {latents: , sample_steps: 4, fps: null}\n")
    assert recipe.data.options == {"sample_steps": 4}
    given = {"model": {"reference": "llama3:8b"}, "data": {"options": {"latents": None}}}
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(given)


def test_every_data_option_is_read_and_no_other() -> None:
    reading = re.compile(
        r"(?:(?:data\.options|_options|options)(?:\.get\(|\[)|_positive\(data, )\"(\w+)\""
        r"|wanted = \((\"name\".*?)\)"
    )
    found: set[str] = set()
    training, encoders = (
        Path(package.__file__ or "").parent for package in (fsdptool.training, fsdptool_diffusion)
    )
    files = [*training.glob("data/**/*.py"), training / "sampling.py"]
    files += [encoders / f"{name}.py" for name in ("autoencoder", "encoders", "latents", "precompute")]
    for line in "\n".join(file.read_text(encoding="utf-8") for file in files).splitlines():
        if "objective.options" not in line:
            for one, several in reading.findall(line):
                found |= {one} if one else set(re.findall(r"\w+", several))
    assert found == set(DataOptions.__annotations__)


def test_the_model_is_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        read_recipe("seed: 1\n\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "absent.yaml")


def test_the_committed_schema_is_the_record() -> None:
    assert load_schema("recipe") == json.loads(json.dumps(generate("recipe")))


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.builds(
        Recipe,
        model=st.just(read_recipe(MINIMAL).model),
        steps=st.none() | st.integers(1, 9),
        seed=st.integers(0, 2**31),
        epochs=st.none() | st.floats(0.01, 100),
    )
)
def test_a_recipe_survives_its_yaml(recipe: Recipe) -> None:
    text = dump_recipe(recipe)
    assert read_recipe(text) == recipe
    jsonschema.Draft202012Validator(generate("recipe")).validate(yaml.safe_load(text))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_clean_and_run_as_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fsdp.yaml"
    assert run(["emit-config", "--preset", name, "--wrap", "Block", "-o", str(path)]) == 0
    reading = read_settings(path)
    assert not [item for item in reading.diagnostics if item.severity != "info"]
    assert reading.consumer.name == ("fsdptool" if name == "cpu" else "accelerate")
    assert check_explained(path) is None
    assert run(["emit-config", "--preset", name, "-o", str(path)]) == 2, "an existing file is not replaced"
    assert "already exists" in capsys.readouterr().err


def _tiny(folder: Path, **changes: object) -> Path:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "vocab_size": 512,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        **changes,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_model_gets_its_classes_and_the_differences_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = str(_tiny(tmp_path))
    assert run(["emit-config", reference, "--processes", "4", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(load_schema("emit-config")).validate(data)
    assert data["settings"]["wrap_classes"] == ["LlamaDecoderLayer"]
    assert any("gradients are reduced in bfloat16 instead of float32" in line for line in data["differences"])
    for line in data["differences"]:
        assert f"# - {line}" in data["text"]
    assert "$schema" not in data["text"], "no schema lies beside it"
    assert run(["emit-config", reference, "--layout", "accelerate", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []


def test_a_number_of_machines_below_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["emit-config", "--preset", "single-node", "--wrap", "Block", "--nodes", "0"]) == 2
    assert "the number of machines must be at least 1, not 0" in capsys.readouterr().err


def test_settings_against_a_model(tmp_path: Path) -> None:
    anatomy = inspect(resolve(str(_tiny(tmp_path))))
    good = tmp_path / "good.yaml"
    assert (
        run(["emit-config", "--preset", "single-node", "--wrap", "LlamaDecoderLayer", "-o", str(good)]) == 0
    )
    assert not read_settings(good, model=anatomy).diagnostics
    wrong = {
        "LlamaDecoderLayr": "FSD401",
        "LlamaForCausalLM": "FSD402",
        "LlamaModel": "FSD403",
        "LlamaMLP": "FSD408",
    }
    for name, code in wrong.items():
        text = good.read_text().replace("LlamaDecoderLayer", name)
        reading = read_settings(text, model=anatomy)
        assert code in {item.code for item in reading.diagnostics}, name
        fixed = repair(reading, unsafe=True)
        assert fixed.reading.facts["wrap_classes"] == ("LlamaDecoderLayer",), name
    small = (
        good.read_text()
        .replace("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP")
        .replace("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer", "fsdp_min_num_params: 1000")
    )
    assert "FSD409" in {item.code for item in read_settings(small, model=anatomy).diagnostics}
    ignored = good.read_text() + ""
    ignored = ignored.replace("  fsdp_version: 2\n", "  fsdp_version: 2\n  fsdp_ignored_modules: lm_head\n")
    assert "FSD411" in {item.code for item in read_settings(ignored, model=anatomy).diagnostics}


def test_context_parallelism_on_models_that_cannot(tmp_path: Path) -> None:
    assert attention_kinds({"model_type": "mistral", "sliding_window": 4096}) == ["sliding_attention"]
    assert attention_kinds({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}) == []
    assert attention_kinds({"layer_types": ["full_attention", "linear_attention"]}) == ["linear_attention"]
    assert attention_kinds({"model_type": "llama"}) == []
    (tmp_path / "mistral").mkdir()
    anatomy = inspect(
        resolve(
            str(
                _tiny(
                    tmp_path / "mistral",
                    model_type="mistral",
                    sliding_window=32,
                    architectures=["MistralForCausalLM"],
                )
            )
        )
    )
    path = tmp_path / "long.yaml"
    run(["emit-config", "--preset", "long-context", "--wrap", "MistralDecoderLayer", "-o", str(path)])
    assert "FSD407" in {item.code for item in read_settings(path, model=anatomy).diagnostics}


def test_multi_way_ties_and_empty_hints(tmp_path: Path) -> None:
    (tmp_path / "t5").mkdir()
    t5 = {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 128,
    }
    (tmp_path / "t5" / "config.json").write_text(json.dumps(t5))
    anatomy = inspect(resolve(str(tmp_path / "t5")))
    path = tmp_path / "fsdp.yaml"
    run(["emit-config", "--preset", "single-node", "--wrap", "T5Block", "-o", str(path)])
    assert "FSD405" in {item.code for item in read_settings(path, model=anatomy).diagnostics}
    assert "FSD405" not in {
        item.code for item in read_settings(path, model=anatomy, consumer="fsdptool").diagnostics
    }


def test_settings_against_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fsdp.yaml"
    run(["emit-config", "--preset", "single-node-offload", "--wrap", "LlamaDecoderLayer", "-o", str(path)])
    capsys.readouterr()
    run(["validate", str(path), "--gpu", "V100", "--gpus", "4", "--format", "json"])
    codes = {item["code"] for item in json.loads(capsys.readouterr().out)["files"][0]["findings"]}
    assert {"FSD501", "FSD504"} <= codes
    run(["validate", str(path), "--model", "llama3:8b", "--host-memory", "16GiB", "--format", "json"])
    codes = {item["code"] for item in json.loads(capsys.readouterr().out)["files"][0]["findings"]}
    assert "FSD502" in codes


def test_a_tensor_parallel_file_is_for_the_trainer_and_only_where_the_model_divides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "tp.yaml"
    assert run(["emit-config", "llama3:8b", "--tp", "2", "--processes", "8", "-o", str(path)]) == 0
    reading = read_settings(path)
    assert reading.settings is not None and reading.settings.mesh == ParallelDims(1, 4, tp=2)
    assert reading.consumer.name == "fsdptool" and not reading.errors
    assert "does not divide layers" in path.read_text()
    assert "FSD356" in {item.code for item in read_settings(path, consumer="accelerate").diagnostics}
    for model, size, words in (("llama3:tiny", "2", "5 attention heads"), ("llama3:8b", "8", "no rank")):
        assert run(["emit-config", model, "--tp", size, "--processes", "8"]) == 2
        assert words in capsys.readouterr().err
