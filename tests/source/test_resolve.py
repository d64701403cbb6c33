"""References on disk: folders, files, pipelines, adapters, and everything that is wrong with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdptool.errors import FsdptoolError, ModelError
from fsdptool.errors import ReferenceError as BadReference
from fsdptool.records.recipe import ModelChoice
from fsdptool.source import resolve, resolve_choice

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
FLUX = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.0", "num_layers": 1}


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def pipeline(folder: Path) -> Path:
    write(
        folder,
        "model_index.json",
        {
            "_class_name": "FluxPipeline",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "transformer": ["diffusers", "FluxTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKL"],
            "image_encoder": [None, None],
        },
    )
    write(folder, "transformer/config.json", FLUX)
    write(folder, "transformer/diffusion_pytorch_model.safetensors", "")
    write(folder, "vae/config.json", {"_class_name": "AutoencoderKL"})
    write(folder, "text_encoder/config.json", {"model_type": "clip_text_model", "hidden_size": 64})
    return folder


def test_flavours_resolve_to_data() -> None:
    spec = resolve("llama3:8b")
    assert (spec.family, spec.flavour, spec.model_class) == ("llama3", "8b", "LlamaForCausalLM")
    assert (spec.reference.kind, spec.library, spec.objective) == ("flavour", "transformers", "causal_lm")
    assert resolve("flux.1:dev").component == "transformer"


def test_folder_and_file_of_one_model(tmp_path: Path) -> None:
    path = write(tmp_path, "config.json", LLAMA)
    write(tmp_path, "model.safetensors", "")
    folder, file = resolve(str(tmp_path)), resolve(str(path))
    assert (folder.reference.kind, file.reference.kind) == ("folder", "config")
    assert folder.config == file.config == LLAMA
    assert folder.model_class == "LlamaForCausalLM"
    assert folder.weights == (str(tmp_path / "model.safetensors"),)


def test_a_configuration_under_another_name(tmp_path: Path) -> None:
    spec = resolve(str(write(tmp_path, "tiny-llama.json", LLAMA)))
    assert spec.reference.kind == "config"
    assert spec.folder is None
    assert spec.weights == ()


def test_a_key_that_is_written_again_is_a_finding_and_the_last_counts(tmp_path: Path) -> None:
    text = json.dumps({**LLAMA, "rope_scaling": {"factor": 1}}, indent=1)
    twice = text.replace('"factor": 1', '"factor": 2,\n "factor": 4')[:-2] + ',\n "hidden_size": 32\n}'
    path = write(tmp_path, "config.json", twice)
    spec = resolve(str(path))
    assert (spec.config["hidden_size"], spec.config["rope_scaling"]) == (32, {"factor": 4})
    said = [(item.code, item.line, item.message.partition(": ")[2]) for item in spec.diagnostics]
    assert said == [
        ("DET104", 13, "factor is set again on line 14; the last value is used"),
        ("DET104", 6, "hidden_size is set again on line 16; the last value is used"),
    ]
    twice = f'{{"peft_type": "LORA", "r": 8, "r": 4, "base_model_name_or_path": "{tmp_path}"}}'
    adapter = write(tmp_path, "a/adapter_config.json", twice)
    assert [item.code for item in resolve(str(adapter)).diagnostics] == ["DET104"] * 3
    labels = ", ".join(f'"{number}": "label"' for number in range(30_000))
    long = write(tmp_path, "long.json", text[:-2] + f', "id2label": {{{labels}}}, "r": 1, "r": 2}}')
    assert [item.message.partition(": ")[2] for item in resolve(str(long)).diagnostics] == [
        "r is set more than once; the last value is used"
    ]


def test_overrides_are_merged(tmp_path: Path) -> None:
    path = write(tmp_path, "config.json", {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    spec = resolve(str(path), overrides={"num_hidden_layers": 7, "rope_scaling": {"factor": 4.0}})
    assert spec.config["num_hidden_layers"] == 7
    assert spec.config["rope_scaling"] == {"type": "linear", "factor": 4.0}


def test_a_pipeline_gives_its_denoiser_or_what_is_asked_for(tmp_path: Path) -> None:
    folder = pipeline(tmp_path)
    spec = resolve(str(folder))
    assert (spec.reference.kind, spec.component) == ("pipeline", "transformer")
    assert (spec.model_class, spec.library) == ("FluxTransformer2DModel", "diffusers")
    assert [Path(weight).parent.name for weight in spec.weights] == ["transformer"]
    assert resolve(str(folder / "model_index.json")).model_class == "FluxTransformer2DModel"
    assert resolve(str(folder), component="vae").model_class == "AutoencoderKL"
    encoder = resolve(str(folder), component="text_encoder")
    assert (encoder.model_class, encoder.library) == ("CLIPTextModel", "transformers")
    with pytest.raises(BadReference) as caught:
        resolve(str(folder), component="transformr")
    assert "did you mean transformer?" in (caught.value.help or "")
    with pytest.raises(BadReference, match="no model component 'scheduler'"):
        resolve(str(folder), component="scheduler")


def test_a_pipeline_that_contradicts_itself_is_a_finding(tmp_path: Path) -> None:
    folder = pipeline(tmp_path)
    write(folder, "transformer/config.json", {"_class_name": "SD3Transformer2DModel"})
    spec = resolve(str(folder))
    assert spec.model_class == "SD3Transformer2DModel"
    assert [finding.code for finding in spec.diagnostics] == ["DET111"]


def test_two_denoisers_are_mentioned(tmp_path: Path) -> None:
    listing = {"_class_name": "WanPipeline"}
    for name in ("transformer", "transformer_2"):
        listing[name] = ["diffusers", "WanTransformer3DModel"]  # type: ignore[assignment]
        write(tmp_path, f"{name}/config.json", {"_class_name": "WanTransformer3DModel"})
    write(tmp_path, "model_index.json", listing)
    assert [finding.code for finding in resolve(str(tmp_path)).diagnostics] == ["DET110"]
    assert resolve(str(tmp_path), component="transformer_2").diagnostics == ()


@pytest.mark.parametrize("relative", [True, False])
def test_an_adapter_resolves_its_base(
    tmp_path: Path, relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A relative base is looked for from the working directory first, as peft does.
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    write(base, "config.json", LLAMA)
    named = "../base" if relative else str(base)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": named, "r": 8, "target_modules": ["q_proj"]}
    path = write(tmp_path, "adapter/adapter_config.json", adapter)
    for reference in (path, path.parent):
        spec = resolve(str(reference))
        assert spec.reference.kind == "adapter"
        assert spec.model_class == "LlamaForCausalLM"
        assert spec.folder == str(base) or Path(spec.folder or "").resolve() == base.resolve()
        assert spec.adapter == adapter


def test_an_adapter_beside_a_copy_of_its_bases_configuration(tmp_path: Path) -> None:
    write(tmp_path, "config.json", LLAMA)
    write(tmp_path, "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "llama3:8b"})
    assert resolve(str(tmp_path)).flavour == "8b"
    write(tmp_path, "model.safetensors", "")
    assert resolve(str(tmp_path)).reference.kind == "folder"


def test_adapters_in_a_circle_end(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        write(
            tmp_path,
            f"{one}/adapter_config.json",
            {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / other)},
        )
    with pytest.raises(BadReference, match="circle") as caught:
        resolve(str(tmp_path / "a"))
    assert caught.value.message.startswith(f"{tmp_path / 'a'}: adapters refer to one another in a circle")
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": -64}, "hidden_size is -64: a size cannot be negative"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 10**18}, "no model has"),
        ({"hidden_size": 10**18}, "no model has such a size"),
        ({"intermediate_size": 1e18}, "no model has such a size"),
        ({"num_attention_heads": 10**9}, "no model has that many layers"),
        ({"text_config": {"vocab_size": -5}}, "text_config.vocab_size is -5"),
    ],
)
def test_absurd_sizes_are_refused_before_building(tmp_path: Path, change: Any, words: str) -> None:
    path = write(tmp_path, "config.json", {**LLAMA, **change})
    with pytest.raises(ModelError) as caught:
        resolve(str(path))
    assert words in caught.value.message
    assert str(path) in caught.value.message
    with pytest.raises(ModelError):
        resolve("llama3:8b", overrides=change)


def test_zero_layers_are_a_finding(tmp_path: Path) -> None:
    path = write(tmp_path, "config.json", {**LLAMA, "num_hidden_layers": 0})
    assert [finding.code for finding in resolve(str(path)).diagnostics] == ["DET101"]


def test_unset_sizes_and_layers_from_the_end_are_fine(tmp_path: Path) -> None:
    config = {**LLAMA, "pad_token_id": -1, "sliding_window": -1, "max_position_embeddings": 10**7}
    config |= {"vision_feature_layer": -2, "audio_config": {"feature_layer": [-2, -5]}}
    assert resolve(str(write(tmp_path, "config.json", config))).diagnostics == ()


def test_a_json_file_that_is_no_model_is_not_answered_with_plugins(tmp_path: Path) -> None:
    path = write(tmp_path, "zero.json", {"zero_optimization": {"stage": 3}})
    with pytest.raises(FsdptoolError) as error:
        resolve(str(path))
    assert error.value.help == "name the model itself, or the training file or script that uses this file"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "config.json:1:2: not JSON"),
        ('{"a": 1,\n "b" 2}', "config.json:2:6: not JSON"),
        ("[1, 2]", "holds a JSON list"),
        ("", "not JSON"),
        ("{}", "without model_type or _class_name"),
        ('{"model_type": "nobody-knows-it"}', "model_type 'nobody-knows-it' is unknown to transformers"),
        ('{"_class_name": "FluxTransformer3DModel"}', "is not in diffusers"),
        ("[" * 100_000, "nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "invalid JSON"),
        ('{"model_type": "llama", "hidden_size": 0}', "hidden_size is 0: the model would be empty"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads is 0"),
    ],
    ids=[
        *(
            "open",
            "line",
            "list",
            "empty",
            "nothing",
            "type",
            "class",
            "deep",
            "digits",
            "narrow",
            "headless",
        ),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, content: str, words: str) -> None:
    write(tmp_path, "config.json", content)
    with pytest.raises(FsdptoolError) as caught:
        resolve(str(tmp_path))
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.help


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{\x00")
    with pytest.raises(BadReference, match="not UTF-8"):
        resolve(str(path))
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert resolve(str(path)).model_class == "LlamaForCausalLM", "a byte-order mark is harmless"
    with path.open("wb") as stream:
        stream.truncate(17 * 1024 * 1024)
    with pytest.raises(BadReference, match="too large for a configuration file"):
        resolve(str(path))


def test_devices_and_pipes_are_not_read(tmp_path: Path) -> None:
    """``/dev/zero`` has no end, and nobody writes to this pipe."""
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(BadReference, match="is not a file"):
            resolve(path)


def test_what_a_command_prints_can_be_given() -> None:
    """``fsdptool detect <(command)``: the shell gives the path of a pipe."""
    reader, writer = os.pipe()
    os.write(writer, json.dumps(LLAMA).encode())
    os.close(writer)
    assert resolve(f"/dev/fd/{reader}").model_class == "LlamaForCausalLM"


@pytest.mark.parametrize("place", ["folder", "folder/config.json"])
def test_what_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A folder without the right to enter it; root may enter any, so the refusal is made here."""
    write(tmp_path, "folder/config.json", LLAMA)
    real = os.stat

    def stat(path: Any, *rest: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("folder/config.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(BadReference, match="cannot be read: Permission denied"):
        resolve(str(tmp_path / place))


def test_folders_without_a_configuration_name_what_is_near(tmp_path: Path) -> None:
    write(tmp_path, "checkpoint-5/config.json", LLAMA)
    with pytest.raises(BadReference) as caught:
        resolve(str(tmp_path))
    assert "contains none of config.json" in caught.value.message
    assert "checkpoint-5" in (caught.value.help or "")
    with pytest.raises(BadReference, match="there is no file or folder"):
        resolve(str(tmp_path / "nowhere"))
    with pytest.raises(BadReference, match="no revisions"):
        resolve(str(tmp_path), revision="main")


@pytest.mark.parametrize(
    ("reference", "words", "help"),
    [
        ("llama3", "is a family, not a model", "llama3:8b"),
        ("lama3:8b", "unknown family 'lama3'", "llama3"),
        ("llama3:8bb", "no flavour '8bb'", "llama3:8b"),
        ("", "empty", "family:flavour"),
        ("a b c", "neither a path", "fsdptool families"),
        ("../../etc/passwd-not", "no file or folder", "path"),
        ("~nobody-of-that-name/model", "no file or folder", "path"),
        ("a" * 5000, "neither a path", "fsdptool families"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "is a web address", "Qwen/Qwen3-8B"),
        ("https://example.org", "is a web address", "organisation/name"),
    ],
)
def test_names_that_are_nothing(reference: str, words: str, help: str) -> None:
    with pytest.raises(BadReference) as caught:
        resolve(reference)
    assert words in caught.value.message
    assert help in (caught.value.help or "")


def test_remote_code_needs_the_flag(tmp_path: Path) -> None:
    config = {"model_type": "mystery", "auto_map": {"AutoConfig": "configuration_mystery.MysteryConfig"}}
    write(tmp_path, "config.json", {**config, "architectures": ["MysteryForCausalLM"]})
    with pytest.raises(BadReference) as caught:
        resolve(str(tmp_path))
    assert "auto_map" in caught.value.message
    assert "--trust-remote-code" in (caught.value.help or "")
    assert resolve(str(tmp_path), trust_remote_code=True).trust_remote_code
    write(tmp_path, "config.json", {**LLAMA, "auto_map": config["auto_map"]})
    assert [finding.code for finding in resolve(str(tmp_path)).diagnostics] == ["DET102"]


def test_resolving_imports_no_model_library(tmp_path: Path) -> None:
    write(tmp_path, "config.json", LLAMA)
    code = (
        "import sys; from fsdptool.source import resolve; "
        f"resolve('llama3:8b'); resolve({str(tmp_path)!r}); "
        "print(sorted({'torch', 'transformers', 'diffusers', 'peft', 'accelerate'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_hub_ids_offline_answer_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(BadReference) as caught:
        resolve("somebody/some-model", revision="v1.0")
    assert time.monotonic() - started < 5, "no retries (transformers alone would take 23 s)"
    assert "somebody/some-model at revision v1.0" in caught.value.message
    assert "HF_HUB_OFFLINE is set" in caught.value.message
    assert "hf download somebody/some-model" in (caught.value.help or "")
    with pytest.raises(BadReference) as caught:
        resolve("meta-llama/Meta-Llama-3-8B")
    assert "an architecture of the same size ships as llama3:8b" in (caught.value.help or "")


def test_a_published_model_out_of_reach_is_that_of_the_catalogue() -> None:
    spec = resolve("meta-llama/Meta-Llama-3-8B", catalogue=True)
    shipped = resolve("llama3:8b")
    assert (spec.family, spec.model_class, spec.config) == (
        shipped.family,
        shipped.model_class,
        shipped.config,
    )
    assert (spec.reference.kind, spec.reference.id, spec.weights) == ("hub", "meta-llama/Meta-Llama-3-8B", ())
    (finding,) = spec.diagnostics
    assert (finding.code, finding.severity) == ("DET105", "warning")
    assert "cannot be fetched: HF_HUB_OFFLINE is set; that of llama3:8b is taken" in finding.message
    again = resolve("meta-llama/Meta-Llama-3-8B", catalogue=True)
    assert again == spec
    tuned = resolve("somebody/Llama-3.1-8B-Instruct-bnb-4bit", catalogue=True)
    assert tuned.config == resolve("llama3.1:8b").config
    assert "by the model's name" in tuned.diagnostics[0].message
    part = resolve("black-forest-labs/FLUX.1-dev", catalogue=True)
    assert (part.component, part.library) == ("transformer", "diffusers")
    with pytest.raises(BadReference, match="HF_HUB_OFFLINE is set"):
        resolve("black-forest-labs/FLUX.1-dev", component="text_encoder", catalogue=True)


@pytest.mark.parametrize(
    "reference",
    ["somebody/some-model", "somebody/Llama-3.1-8B-pruned", "somebody/Llama-3.2-1B-qlora-adapter"],
)
def test_other_models_out_of_reach_are_not_known(reference: str) -> None:
    with pytest.raises(BadReference, match="HF_HUB_OFFLINE is set"):
        resolve(reference, catalogue=True)
    with pytest.raises(BadReference, match="HF_HUB_OFFLINE is set"):
        resolve("meta-llama/Meta-Llama-3-8B", catalogue=True, revision="main")


@pytest.mark.slow
def test_no_network_is_found_out_at_once(tmp_path: Path) -> None:
    """Not declared offline, but nothing answers: one attempt, one line."""
    code = "from fsdptool.cli.app import run; import sys; sys.exit(run(['detect', 'somebody/some-model']))"
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE" and "proxy" not in k.lower()}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    started = time.monotonic()
    shown = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert shown.returncode == 2
    assert time.monotonic() - started < 15
    assert shown.stderr.startswith("error: somebody/some-model has no configuration in the local cache")
    assert len(shown.stderr.splitlines()) == 2


def test_a_choice_counts_from_its_recipe_and_then_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, recipes = tmp_path / "here", tmp_path / "recipes"
    for folder, layers in (
        (here / "both", 1),
        (here / "far", 4),
        (recipes / "both", 2),
        (recipes / "near", 3),
    ):
        folder.mkdir(parents=True)
        config = {"model_type": "llama", "num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(here)

    def layers_of(reference: str, folder: Path | None, **fields: Any) -> Any:
        return resolve_choice(ModelChoice(reference, **fields), folder).config["num_hidden_layers"]

    assert layers_of("both", recipes) == 2
    assert layers_of("far", recipes) == 4
    assert layers_of("near", recipes) == 3
    assert layers_of(str(recipes / "both"), None) == 2
    assert layers_of("near", recipes, overrides={"num_hidden_layers": 5}) == 5
    with pytest.raises(BadReference, match="there is no file or folder"):
        layers_of("./near", None)
