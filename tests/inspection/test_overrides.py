"""An override counts, or it is refused: none is accepted and dropped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run
from fsdptool.errors import FsdptoolError
from fsdptool.inspection import inspect
from fsdptool.inspection.build import build
from fsdptool.source import resolve

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LABELLED = {
    **LLAMA,
    "architectures": ["LlamaForSequenceClassification"],
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
}
ROTATED = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 2, "n_head": 2}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
BART = {
    "model_type": "bart",
    "architectures": ["BartForConditionalGeneration"],
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 64,
}
GEMMA = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        **{key: value for key, value in LLAMA.items() if key != "architectures"},
        "model_type": "gemma3_text",
        "head_dim": 8,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}
FLAT = {
    **LLAMA,
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "vision_config": {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 24},
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]},
}
SD3 = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 8,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
}
FILES = {
    "llama": LLAMA,
    "labelled": LABELLED,
    "rotated": ROTATED,
    "gpt2": GPT2,
    "bert": BERT,
    "bart": BART,
    "gemma": GEMMA,
    "flat": FLAT,
    "sd3": SD3,
}


def reference(folder: Path, name: str) -> str:
    """Return a folder of a file above, or a registered flavour as it is."""
    if name not in FILES:
        return name
    (folder / "config.json").write_text(json.dumps(FILES[name]))
    return str(folder)


def built(folder: Path, name: str, overrides: dict[str, Any]) -> Any:
    return build(resolve(reference(folder, name), overrides=overrides), initialise=False)


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "beta_fast": 32.0}
LAYERS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}

COUNTS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("llama", {"hidden_size": 32}, "hidden_size", 32),
    ("llama", {"attention_bias": True}, "attention_bias", True),
    ("llama", {"head_dim": 8}, "head_dim", 8),
    ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings", True),
    ("llama", {"rope_theta": 5e5}, "rope_parameters.rope_theta", 5e5),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.factor", 2.0),
    ("llama", {"rope_parameters": YARN}, "rope_parameters.beta_fast", 32.0),
    ("rotated", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta", 5e5),
    ("labelled", {"num_labels": 5}, "num_labels", 5),
    ("labelled", {"id2label": {"0": "x", "1": "y", "2": "z", "3": "w"}}, "num_labels", 4),
    ("gpt2", {"n_embd": 32}, "hidden_size", 32),
    ("gpt2", {"hidden_size": 32, "num_hidden_layers": 3}, "n_embd", 32),
    ("bert", {"hidden_dropout_prob": 0.0}, "hidden_dropout_prob", 0.0),
    ("bart", {"encoder_layerdrop": 0.0, "dropout": 0.0}, "dropout", 0.0),
    ("gemma", {"text_config": {"num_hidden_layers": 3}}, "text_config.num_hidden_layers", 3),
    ("gemma", {"vision_config": {"num_hidden_layers": 1}}, "vision_config.num_hidden_layers", 1),
    ("gemma", {"text_config": {"rope_parameters": LAYERS}}, "text_config.sliding_window", 4096),
    ("flat", {"num_hidden_layers": 3}, "text_config.num_hidden_layers", 3),
    ("flat", {"rope_scaling": {"mrope_section": [1, 2, 3]}}, "text_config.num_hidden_layers", 2),
    ("sd3", {"num_layers": 1}, "num_layers", 1),
    ("sd3", {"_class_name": "SD3Transformer2DModel"}, "num_layers", 2),
    ("qwen3:0.6b", {"num_hidden_layers": 2}, "num_hidden_layers", 2),
    ("qwen3:0.6b", {"sliding_window": 128, "use_sliding_window": True}, "sliding_window", 128),
    ("whisper:tiny", {"encoder_layers": 2}, "encoder_layers", 2),
]


@pytest.mark.parametrize(("name", "overrides", "key", "value"), COUNTS)
def test_what_is_accepted_counts(
    tmp_path: Path, name: str, overrides: dict[str, Any], key: str, value: Any
) -> None:
    live = built(tmp_path, name, overrides).config
    for part in key.split("."):
        live = live[part] if hasattr(live, "keys") else getattr(live, part)
    assert live == value


DROPPED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_sise": 32}, "did you mean hidden_size?"),
    ("llama", {"nothing_like_it": 1}, "leave it out"),
    ("llama", {"hidden_dropout_prob": 0.1}, "leave it out"),
    ("llama", {"sliding_window": 4}, "leave it out"),
    ("llama", {"max_length": 5}, "leave it out"),
    ("llama", {"dtype": "bfloat16"}, "set model.dtype"),
    ("llama", {"torch_dtype": "bfloat16"}, "set model.dtype"),
    ("llama", {"model_type": "qwen3"}, "architectures="),
    ("llama", {"quantization_config": {"load_in_4bit": True}}, "method.lora.base"),
    ("llama", {"_class_name": "FluxTransformer2DModel"}, "architectures="),
    ("llama", {"rope_scaling": {"rope_type": "default", "factr": 2.0}}, "did you mean rope_scaling.factor?"),
    ("llama", {"architectures": ["LlamaForSequenceClasification"]}, "did you mean LlamaForSequenceClass"),
    ("llama", {"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "for example architectures="),
    ("llama", {"architectures": []}, "for example architectures="),
    ("rotated", {"rope_theta": 5e5}, "override rope_parameters.rope_theta"),
    ("gpt2", {"rope_theta": 1e4}, "leave it out"),
    ("bert", {"rope_theta": 1e4}, "leave it out"),
    ("bart", {"decoder_layerdrop": 0.1}, "without LayerDrop"),
    ("gemma", {"num_hidden_layers": 3}, "did you mean text_config.num_hidden_layers?"),
    ("gemma", {"image_size": 56}, "did you mean vision_config.image_size?"),
    ("gemma", {"text_config": {"num_hiden_layers": 3}}, "did you mean text_config.num_hidden_layers?"),
    ("flat", {"depth": 1}, "did you mean vision_config.depth?"),
    ("flat", {"vision_config": {"dept": 1}}, "did you mean vision_config.depth?"),
    ("sd3", {"num_layer": 1}, "did you mean num_layers?"),
    ("sd3", {"hidden_size": 1}, "leave it out"),
    ("sd3", {"architectures": ["FluxTransformer2DModel"]}, "_class_name="),
    ("sd3", {"_class_name": "SD3Transformer2DModell"}, "did you mean SD3Transformer2DModel?"),
    ("qwen3:0.6b", {"num_hidden_layrs": 2}, "did you mean num_hidden_layers?"),
    ("qwen3:0.6b", {"sliding_window": 128}, "another key of the configuration decides it"),
    ("flux.1:dev", {"num_layer": 2}, "did you mean num_layers?"),
]


@pytest.mark.parametrize(("name", "overrides", "advice"), DROPPED)
def test_what_would_be_dropped_is_refused(
    tmp_path: Path, name: str, overrides: dict[str, Any], advice: str
) -> None:
    with pytest.raises(FsdptoolError) as caught:
        built(tmp_path, name, overrides)
    assert advice in (caught.value.help or "")
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["llama", "qwen3:0.6b"])
def test_the_class_is_chosen_by_its_name(tmp_path: Path, name: str) -> None:
    wanted = "LlamaForSequenceClassification" if name == "llama" else "Qwen3ForSequenceClassification"
    spec = resolve(reference(tmp_path, name), overrides={"architectures": [wanted], "num_labels": 4})
    assert spec.objective == "classification"
    anatomy = inspect(spec)
    assert anatomy.modules[0].class_name == spec.model_class == wanted
    (head,) = (item for item in anatomy.parameters if item.fqn == "score.weight")
    assert head.shape[0] == 4


def test_a_diffusers_class_is_chosen_by_its_name(tmp_path: Path) -> None:
    flux = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**flux, "_class_name": "ChromaTransformer2DModel"}))
    assert resolve(str(tmp_path)).model_class == "ChromaTransformer2DModel"
    spec = resolve(str(tmp_path), overrides={"_class_name": "FluxTransformer2DModel"})
    assert (spec.model_class, spec.family) == ("FluxTransformer2DModel", "flux.1")


def test_the_cache_does_not_answer_for_an_override(tmp_path: Path) -> None:
    """A key in a file that nobody reads is a finding; the same key as an override is refused."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "nothing_like_it": 1}))
    assert [item.code for item in inspect(resolve(str(tmp_path))).diagnostics if item.code == "DET121"]
    with pytest.raises(FsdptoolError, match="nothing_like_it"):
        inspect(resolve(str(tmp_path), overrides={"nothing_like_it": 1}))


OWN = """
import torch
def make(width=4, **options):
    return torch.nn.Sequential(torch.nn.Linear(width, options.get("out", 2)))
"""


def test_a_module_of_ones_own_takes_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_overridden.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spec = resolve("own_overridden:make", trust_remote_code=True, overrides={"width": 8, "out": 3})
    assert [tuple(item.shape) for item in build(spec).parameters()] == [(3, 8), (3,)]
    (tmp_path / "own_strict.py").write_text(
        "import torch\ndef make(width=4):\n    return torch.nn.Linear(width, 1)\n"
    )
    with pytest.raises(FsdptoolError, match="wdith"):
        build(resolve("own_strict:make", trust_remote_code=True, overrides={"wdith": 8}))


def test_a_family_that_reads_some_keys_refuses_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose library is its own declares nothing: what its builder looks at is watched."""
    from dataclasses import replace

    import torch

    class Own:
        def build(self, config: Any, **_: Any) -> torch.nn.Module:
            return torch.nn.Linear(config["width"], config.get("out", 2))

    monkeypatch.setattr(sys.modules[build.__module__], "family_of", lambda spec: Own())
    spec = replace(resolve("llama3:8b"), library="own", config={"width": 4, "hieght": 8})
    good = replace(spec, overrides={"width": 4})
    assert tuple(build(good).weight.shape) == (2, 4)  # type: ignore[arg-type]
    with pytest.raises(FsdptoolError) as caught:
        build(replace(spec, config={"width": 4, "widht": 8}, overrides={"widht": 8}))
    assert caught.value.help == "did you mean width?"


@pytest.mark.parametrize("command", ["detect", "plan"])
def test_commands_refuse_with_status_2(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--profile", "cpu-gloo", "--gpus", "2", "--no-search"] if command == "plan" else []
    words = [command, reference(tmp_path, "llama"), "--override", "num_hiden_layers=1", *more]
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "num_hiden_layers" in said and "num_hidden_layers" in said


def test_overrides_that_contradict_one_another_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = reference(tmp_path, "llama")
    assert run(["detect", where, "--override", "hidden_size=8", "--override", "hidden_size=16"]) == 2
    assert run(["detect", where, "--override", "rope=8", "--override", "rope.factor=16"]) == 2
    assert "is given twice" in capsys.readouterr().err
