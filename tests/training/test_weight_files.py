"""The weights that training and export read from a folder are those that ``from_pretrained`` loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LLAMA, MOE, SD3, UNET
from safetensors.torch import load_file, save_file

from fsdptool.distributed.weights import open_weights
from fsdptool.errors import ConfigError, FsdptoolError, StorageError
from fsdptool.inspection.build import build
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import ModelChoice
from fsdptool.source import resolve

Tensors = dict[str, torch.Tensor]


def model_of(config: dict[str, Any], seed: int) -> Any:
    """Build the library's own model with random weights, all of them."""
    torch.manual_seed(seed)
    if "_class_name" in config:
        import diffusers

        model = getattr(diffusers, config["_class_name"]).from_config(config)
    else:
        import transformers

        cls = getattr(transformers, config["architectures"][0])
        model = cls(
            cls.config_class(**{key: value for key, value in config.items() if key != "architectures"})
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def save(folder: Path, config: dict[str, Any], seed: int, **options: Any) -> None:
    model_of(config, seed).save_pretrained(folder, **options)


def loaded(folder: Path, config: dict[str, Any], **options: Any) -> Tensors:
    """Return what the library loads from the folder."""
    if "_class_name" in config:
        import diffusers

        model = getattr(diffusers, config["_class_name"]).from_pretrained(folder, **options)
    else:
        import transformers

        model = getattr(transformers, config["architectures"][0]).from_pretrained(folder, **options)
    return dict(model.named_parameters(remove_duplicate=False))


def read(spec: ModelSpec, **choice: Any) -> Tensors:
    """Return what fsdptool trains from."""
    model = build(spec)
    weights = open_weights(spec, ModelChoice(spec.reference.id, **choice), model)
    assert weights is not None
    return {
        name: weights.rows(name, tuple(parameter.shape), (0, parameter.shape[0] if parameter.dim() else 1))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def beside(folder: Path, source: Path, rename: Callable[[str], str]) -> None:
    """Copy the weights of another folder under other names."""
    for file in source.glob("*.safetensors"):
        save_file(load_file(file), folder / rename(file.name), metadata={"format": "pt"})


def stale_single(folder: Path, config: dict[str, Any], other: Path) -> None:
    save(folder, config, 1)
    beside(folder, other, lambda name: name.replace(".safetensors", "_old.safetensors"))


def earlier_count(folder: Path, config: dict[str, Any], other: Path) -> None:
    """Shards of an earlier save, in more files, beside an index of fewer."""
    save(folder, config, 1, max_shard_size="12KB")
    (stem,) = {file.name.partition("-0")[0] for file in folder.glob("*-of-*")}
    for number, file in enumerate(sorted(other.glob("*.safetensors")), 1):
        save_file(load_file(file), folder / f"{stem}-{number:05d}-of-00099.safetensors")


def single_and_index(folder: Path, config: dict[str, Any], other: Path) -> None:
    """transformers takes the single file, diffusers the index."""
    save(folder, config, 1, max_shard_size="12KB")
    beside(folder, other, str)


def single_and_stale_shards(folder: Path, config: dict[str, Any], other: Path) -> None:
    save(folder, config, 1)
    beside(folder, other, lambda name: name.replace(".safetensors", "-00001-of-00001.safetensors"))


def two_formats(folder: Path, config: dict[str, Any], other: Path) -> None:
    save(folder, config, 1)
    beside(folder, other, lambda name: "consolidated.safetensors")
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin", "consolidated.00.pth", "weights.gguf"):
        (folder / name).write_bytes(b"not read")


def variants(folder: Path, config: dict[str, Any], other: Path) -> None:
    save(folder, config, 1)
    save(folder, config, 2, variant="fp16")
    save(folder, config, 3, variant="ema", max_shard_size="12KB")


def an_adapter(folder: Path, config: dict[str, Any], other: Path) -> None:
    save(folder, config, 1)
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")
    save_file({"unet.x": torch.zeros(2)}, folder / "pytorch_lora_weights.safetensors")


FOLDERS = (
    stale_single,
    earlier_count,
    single_and_index,
    single_and_stale_shards,
    two_formats,
    variants,
    an_adapter,
)
MODELS = {"llama": LLAMA, "experts": MOE, "sd3": SD3, "unet": UNET}


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("fill", FOLDERS, ids=lambda fill: fill.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_what_the_library_loads(
    tmp_path: Path, name: str, fill: Callable[[Path, dict[str, Any], Path], None]
) -> None:
    config, other, folder = MODELS[name], tmp_path / "other", tmp_path / "model"
    save(other, config, 2)
    fill(folder, config, other)
    spec = resolve(str(folder))
    ours, theirs = read(spec), loaded(folder, config)
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key
    (finding,) = (item for item in spec.diagnostics if item.code == "DET116")
    left = {path.name for path in folder.iterdir()} - {Path(file).name for file in spec.weights}
    assert any(name in finding.message for name in left)


@pytest.mark.parametrize("name", ["llama", "sd3"])
@pytest.mark.parametrize("variant", ["fp16", "ema"])
def test_a_variant_is_read_when_it_is_asked_for(tmp_path: Path, name: str, variant: str) -> None:
    config = MODELS[name]
    variants(tmp_path, config, tmp_path)
    ours, theirs = read(resolve(str(tmp_path), variant=variant)), loaded(tmp_path, config, variant=variant)
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    plain = loaded(tmp_path, config)
    assert any(not torch.equal(ours[key], tensor) for key, tensor in plain.items())


@pytest.mark.parametrize("name", ["llama", "sd3"])
def test_a_variant_alone_is_named_and_not_taken(tmp_path: Path, name: str) -> None:
    config = MODELS[name]
    save(tmp_path, config, 1, variant="fp16")
    with pytest.raises(OSError, match="no file named"):
        loaded(tmp_path, config)
    message, advice = refusal(tmp_path)
    assert "variant fp16 only" in message
    assert advice == "set model.variant: fp16"
    message, _ = refusal(tmp_path, variant="bf16")
    assert "no weights of the variant bf16" in message


def test_components_of_a_pipeline_are_read_like_the_library_reads_them(tmp_path: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    listing = {
        "_class_name": "StableDiffusion3Pipeline",
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(listing))
    save(tmp_path / "other", SD3, 2)
    save(tmp_path / "transformer", SD3, 1)
    beside(tmp_path / "transformer", tmp_path / "other", lambda name: f"z_{name}")
    # A single-file checkpoint beside the components is nobody's.
    beside(tmp_path, tmp_path / "other", lambda name: "sd3_medium.safetensors")
    config = CLIPTextConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    encoder = CLIPTextModel(config)
    encoder.save_pretrained(tmp_path / "text_encoder")
    CLIPTextModel(config).save_pretrained(tmp_path / "text_encoder", variant="fp16")
    beside(tmp_path / "text_encoder", tmp_path / "text_encoder", lambda name: f"z_{name}")
    denoiser = read(resolve(str(tmp_path)))
    theirs = loaded(tmp_path / "transformer", SD3)
    assert all(torch.equal(denoiser[key], tensor) for key, tensor in theirs.items())
    text = read(resolve(str(tmp_path), component="text_encoder"))
    assert all(torch.equal(text[key], tensor) for key, tensor in encoder.named_parameters())


def refusal(folder: Path, **options: Any) -> tuple[str, str]:
    """Return the one line with which both ``auto`` and ``pretrained`` are refused; ``random`` is not."""
    spec = resolve(str(folder), **options)
    assert spec.weights == ()
    assert [item.severity for item in spec.diagnostics if item.code == "DET117"] == ["warning"]
    model = build(spec)
    said = set()
    for weights in ("auto", "pretrained"):
        with pytest.raises(ConfigError) as caught:
            open_weights(spec, ModelChoice(str(folder), weights=weights), model)
        said.add((caught.value.message, caught.value.help or ""))
    assert open_weights(spec, ModelChoice(str(folder), weights="random"), model) is None
    (line,) = said
    return line


def sharded(folder: Path) -> dict[str, Any]:
    save(folder, LLAMA, 1, max_shard_size="12KB")
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    torch.save(model_of(LLAMA, 1).state_dict(), tmp_path / "pytorch_model.bin")
    for extra in ("training_args.bin", "optimizer.pt", "rng_state.pth"):
        (tmp_path / extra).write_bytes(b"")
    message, advice = refusal(tmp_path)
    assert message == (
        f"{tmp_path} has its weights in pytorch_model.bin: pickles can run code and are not read"
    )
    assert "save_pretrained" in advice


def test_states_of_an_optimizer_are_not_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "optimizer.bin"):
        (tmp_path / name).write_bytes(b"")
    assert resolve(str(tmp_path)).diagnostics == ()


def test_other_formats_and_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "a" / "consolidated.safetensors").write_bytes(b"")
    message, _ = refusal(tmp_path / "a")
    assert "no model.safetensors or its index; consolidated.safetensors is not" in message
    sharded(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors.index.json").unlink()
    message, _ = refusal(tmp_path / "b")
    assert "no model.safetensors.index.json; model-00001-of-" in message


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    message, advice = refusal(tmp_path)
    assert f"of which 1 is missing: {lost.name}" in message
    assert "complete the download" in advice


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../x.safetensors"])
def test_an_index_that_leads_outside_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    index = sharded(folder)
    save(tmp_path / "other", LLAMA, 2)
    first = next(iter(index["weight_map"]))
    write_index(folder, {**index, "weight_map": {**index["weight_map"], first: name}})
    message, _ = refusal(folder)
    assert f"names {name!r}, which is outside of its folder" in message


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {}}])
def test_a_bad_index_is_one_line(tmp_path: Path, index: Any) -> None:
    sharded(tmp_path)
    write_index(tmp_path, index)
    message, _ = refusal(tmp_path)
    assert "model.safetensors.index.json" in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder", "link to nothing"])
def test_what_is_not_a_regular_file_is_never_opened(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file, elsewhere = tmp_path / "model.safetensors", tmp_path / "elsewhere"
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(elsewhere)
    if kind == "link to a pipe":
        os.mkfifo(elsewhere)
    message, _ = refusal(tmp_path)
    assert message.startswith(f"{file} ")


def test_a_file_that_becomes_a_pipe_is_not_opened(tmp_path: Path) -> None:
    save(tmp_path, LLAMA, 1)
    spec = resolve(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(StorageError, match="not a regular file"):
        read(spec)


def test_two_files_that_hold_one_tensor_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    taken = load_file(first)
    name = sorted(taken)[0]
    save_file({**load_file(second), name: taken[name] + 1}, second, metadata={"format": "pt"})
    with pytest.raises(FsdptoolError) as caught:
        read(resolve(str(tmp_path)))
    assert caught.value.message == f"{second} and {first.name} both hold the tensor {name}"


def test_a_configuration_may_name_the_file(tmp_path: Path) -> None:
    save(tmp_path, LLAMA, 1)
    save(tmp_path / "other", LLAMA, 2)
    beside(tmp_path, tmp_path / "other", lambda name: "named.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": "named.safetensors"}))
    ours, theirs = read(resolve(str(tmp_path))), loaded(tmp_path, LLAMA)
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    outside = {**config, "transformers_weights": "../other/model.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(outside))
    message, _ = refusal(tmp_path)
    assert "transformers_weights" in message


def test_a_snapshot_without_its_weights_starts_at_random(tmp_path: Path) -> None:
    """The Hub's cache may hold the JSON files of a sharded model alone; a part of the shards is an error."""
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    index = sharded(folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    kept = shards[0].read_bytes()
    for shard in shards:
        shard.unlink()
    write_index(folder, index)
    spec = resolve(str(folder))
    assert (spec.weights, spec.diagnostics) == ((), ())
    shards[0].write_bytes(kept)
    message, _ = refusal(folder)
    assert "missing" in message
