"""What detect says: anatomies of real models, hazards, misspelt keys, the cache, the command."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator
from torch import nn

import fsdptool
from fsdptool.cli.app import run
from fsdptool.errors import ModelError
from fsdptool.files.values import load_schema
from fsdptool.inspection import build, examine, inspect
from fsdptool.inspection.api import decode, encode
from fsdptool.inspection.census import uneven
from fsdptool.inspection.hazards import expert_modules, optional_towers
from fsdptool.records.anatomy import Anatomy, NoSplitStatus, Parameter, WrapConcern, WrapReason
from fsdptool.source import resolve

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


def codes(anatomy: Anatomy) -> set[str]:
    return {finding.code for finding in anatomy.diagnostics}


def config(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return str(path)


def document(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert run(["detect", *arguments, "--format", "json"]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    Draft202012Validator(load_schema("detect")).validate(result)
    return result


@pytest.mark.parametrize(
    "reference", ["llama3:8b", "t5:small", "sdxl:unet", "qwen2-vl:2b", "bert:base-uncased"]
)
def test_records_agree_with_torch(reference: str) -> None:
    """Names, order, ties, buffers and the modules accelerate looks at, against torch and accelerate."""
    from accelerate.utils.fsdp_utils import _find_final_norm

    spec = resolve(reference)
    model = build(spec)
    anatomy = examine(spec, use_cache=False).anatomy
    named = list(model.named_parameters())
    assert [p.fqn for p in anatomy.parameters] == [name for name, _ in named]
    assert [p.shape for p in anatomy.parameters] == [tuple(p.shape) for _, p in named]
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    assert sorted(map(sorted, names.values())) == sorted(sorted(p.names) for p in anatomy.parameters)
    assert [b.fqn for b in anatomy.buffers] == [name for name, _ in model.named_buffers()]
    saved = set(model.state_dict())
    assert all((buffer.fqn in saved) == buffer.persistent for buffer in anatomy.buffers)
    assert [m.path for m in anatomy.modules] == [path for path, _ in model.named_modules()]
    paths = {id(module): path for path, module in model.named_modules()}
    norm = _find_final_norm(model)
    assert anatomy.final_norm == (paths[id(norm)] if norm is not None else None)
    for getter, result in (
        ("get_input_embeddings", anatomy.input_embedding),
        ("get_output_embeddings", anatomy.output_embedding),
    ):
        wanted = getattr(model, getter)() if hasattr(model, getter) else None
        assert result == (paths[id(wanted)] if wanted is not None else None)
    assert decode(json.loads(json.dumps(encode(anatomy))), spec) == anatomy


@pytest.mark.parametrize(
    ("reference", "present"),
    [
        ("deepseek-v3:671b", {"DET201", "DET212"}),
        ("bart:base", {"DET201", "DET202", "DET209"}),
        ("bert:base-uncased", {"DET202", "DET205", "DET208"}),
        ("t5:small", {"DET202", "DET209"}),
        ("llava:1.5-7b", {"DET203", "DET219"}),
        ("distilbert:base-uncased", {"DET204"}),
        ("albert:base-v2", {"DET206"}),
        ("clip:vit-base-patch32", {"DET215"}),
        ("llama3:8b", {"DET211"}),
        ("mixtral:8x7b", {"DET212"}),
        ("gpt2:small", {"DET208", "DET213"}),
    ],
)
def test_hazards(reference: str, present: set[str]) -> None:
    anatomy = examine(resolve(reference)).anatomy
    assert present <= codes(anatomy)
    assert all(finding.help for finding in anatomy.diagnostics), "each names what avoids it"


class Loop(nn.Module):
    """A mixture by another name: a router beside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))


class Own(nn.Module):
    """Blocks, and a tower of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Loop() for _ in range(2))
        self.audio_encoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


class Plain(nn.Module):
    """A gate and lists that are no mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.shared_expert = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("name", "experts", "towers"),
    [
        ("Own", ("layers.0.branches", "layers.1.branches"), ("audio_encoder",)),
        ("Plain", (), ()),
    ],
)
def test_parts_of_a_module_of_ones_own_that_only_some_samples_use(
    name: str, experts: tuple[str, ...], towers: tuple[str, ...]
) -> None:
    anatomy = examine(resolve(f"test_detect:{name}", trust_remote_code=True), use_cache=False).anatomy
    assert expert_modules(anatomy) == experts
    assert optional_towers(anatomy) == towers
    assert {"DET218", "DET219"} & codes(anatomy) == ({"DET218", "DET219"} if experts else set())


@pytest.mark.parametrize(
    ("model_type", "architecture", "code"),
    [
        ("switch_transformers", "SwitchTransformersForConditionalGeneration", "DET218"),
        ("nllb-moe", "NllbMoeForConditionalGeneration", "DET218"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "DET219"),
        ("idefics3", "Idefics3ForConditionalGeneration", "DET219"),
        ("internvl", "InternVLForConditionalGeneration", "DET219"),
    ],
)
def test_mixtures_and_towers_of_transformers(
    tmp_path: Path, model_type: str, architecture: str, code: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    assert code in codes(examine(resolve(str(path)), use_cache=False).anatomy)


@pytest.mark.parametrize("reference", ["clip:vit-base-patch32", "whisper:tiny", "mixtral:8x7b"])
def test_what_every_sample_uses_is_no_hazard(reference: str) -> None:
    assert not {"DET218", "DET219"} & codes(examine(resolve(reference)).anatomy)


def test_a_plain_llama_triggers_nothing_but_size_wrapping() -> None:
    assert codes(examine(resolve("llama3:8b")).anatomy) == {"DET211"}


def test_misspelt_keys_are_findings(tmp_path: Path) -> None:
    values = {**LLAMA, "hidden_sizes": 128, "wholly_foreign": 1}
    del values["hidden_size"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    anatomy = examine(resolve(str(path))).anatomy
    results = {finding.message for finding in anatomy.diagnostics if finding.code == "DET120"}
    assert results == {"LlamaConfig does not know the key hidden_sizes; it knows hidden_size"}
    unread = [finding.message for finding in anatomy.diagnostics if finding.code == "DET121"]
    assert unread == ["LlamaConfig does not know: wholly_foreign"]
    path.write_text(
        json.dumps({"_class_name": "FluxTransformer2DModel", "num_layer": 2, "num_single_layers": 1})
    )
    anatomy = examine(resolve(str(path))).anatomy
    assert any(f.code == "DET120" and "num_layers" in f.message for f in anatomy.diagnostics)


def test_misspelt_keys_of_a_nested_configuration_are_findings(tmp_path: Path) -> None:
    spec = resolve("llava:1.5-7b")
    text = {"model_type": "llama", "num_hiden_layers": 3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**spec.config, "model_type": "llava", "text_config": text}))
    results = [f.message for f in examine(resolve(str(path))).anatomy.diagnostics if f.code == "DET120"]
    assert any("text_config.num_hiden_layers" in message for message in results)


@pytest.mark.parametrize(
    "reference", ["llama3:8b", "qwen2-vl:2b", "bert:base-uncased", "gpt2:small", "clip:vit-base-patch32"]
)
def test_files_the_library_writes_itself_have_no_misspelt_keys(tmp_path: Path, reference: str) -> None:
    model = build(resolve(reference))
    model.config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    result = examine(resolve(str(tmp_path))).anatomy
    assert "DET120" not in codes(result)


def test_another_class_than_the_file_says_is_a_finding(tmp_path: Path) -> None:
    anatomy = examine(resolve(config(tmp_path, architectures=["MistralForCausalLM"]))).anatomy
    assert "DET123" in codes(anatomy)


def test_selection_is_checked_against_the_live_model() -> None:
    spec = resolve("flux.1:dev")
    only = inspect(spec, exclude=["FluxSingleTransformerBlock"])
    assert only.wrap.classes == ("FluxTransformerBlock",)
    assert only.wrap.origin == "person"
    assert only.wrap.concern_code in get_args(WrapConcern)
    chosen = inspect(spec, wrap=["FluxTransformerBlock", "FluxAttention"])
    assert "DET210" in codes(chosen)
    for wrong, words in (
        (["FluxTransfomerBlock"], "does not contain FluxTransfomerBlock"),
        (["FluxTransformer2DModel"], "is the whole model"),
        (["ModuleList"], "refuses containers"),
    ):
        with pytest.raises(ModelError, match=words):
            inspect(spec, wrap=wrong)
    with pytest.raises(ModelError, match="in both"):
        inspect(spec, wrap=["FluxTransformerBlock"], exclude=["FluxTransformerBlock"])


def test_uneven_parameters_are_padded_like_torch_chunks_them() -> None:
    import torch

    for dim0 in (1, 3, 5, 7, 8, 60):
        for ranks in (1, 2, 4, 7, 16):
            uneven_parameters = uneven([Parameter("w", (dim0, 10), "bfloat16")], ranks)
            chunks = torch.chunk(torch.empty(dim0, 10), ranks)
            padding = (chunks[0].shape[0] * ranks - dim0) * 10 * 2
            assert sum(item.padding_bytes for item in uneven_parameters) == (padding if dim0 % ranks else 0)
            assert sum(item.empty_ranks for item in uneven_parameters) == (
                ranks - len(chunks) if dim0 % ranks else 0
            )


@pytest.mark.slow
def test_reasons_are_closed_lists() -> None:
    for reference in ("sdxl:unet", "albert:base-v2", "mllama:11b-vision", "hidream:i1-full", "svd:xt"):
        choice = examine(resolve(reference)).anatomy.wrap
        assert {item.reason_code for item in choice.candidates} <= set(get_args(WrapReason))
        assert {entry.status for entry in choice.no_split_modules} <= set(get_args(NoSplitStatus))
        assert choice.concern_code is None or choice.concern_code in get_args(WrapConcern)


def test_the_public_function() -> None:
    anatomy = fsdptool.detect("wan2.1:t2v-1.3b")
    assert anatomy.wrap.classes == ("WanTransformerBlock",)
    assert anatomy.total_parameters == 1_418_996_800


def test_documents_validate_and_count_each_parameter_once(capsys: pytest.CaptureFixture[str]) -> None:
    answer = document(capsys, "mixtral:8x7b", "--world-size", "16", "--tree", "--leaves", "--where")
    listed = [fqn for unit in answer["units"] for fqn in unit["fqns"]]
    assert len(listed) == len(set(listed))
    assert sum(unit["parameters"] for unit in answer["units"]) == answer["parameters"]["total"]
    assert sum(part["parameters"] for part in answer["parts"]) == answer["parameters"]["total"]
    assert sum(leaf["parameters_total"] for leaf in answer["leaves"]) == answer["parameters"]["total"]
    assert answer["tree"]["parameters_each"] == answer["parameters"]["total"]
    assert answer["experts"]["counts"] == [8]
    experts = [item for item in answer["uneven"] if "experts" in item["fqn"]]
    assert {item["empty_ranks"] for item in experts} == {8}, "8 experts over 16 ranks"
    where = {place["name"]: place for place in answer["where"]}
    line = where["MixtralDecoderLayer"]["line"]
    assert (
        "class MixtralDecoderLayer"
        in Path(where["MixtralDecoderLayer"]["file"]).read_text().splitlines()[line - 1]
    )
    assert answer["unknowns"] == []


def test_parts_of_a_multimodal_model(capsys: pytest.CaptureFixture[str]) -> None:
    answer = document(capsys, "llava:1.5-7b")
    assert {part["path"] for part in answer["parts"]} >= {
        "model.vision_tower",
        "model.multi_modal_projector",
        "model.language_model",
    }
    assert sum(part["parameters"] for part in answer["parts"]) == answer["parameters"]["total"]
    assert answer["unknowns"]


def test_text_is_plain_rows_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--leaves"], ["--tree"], ["--where", "--world-size", "7"]):
        assert run(["detect", "flux.1:dev", *options]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        assert "\x1b" not in shown.out
        assert "11,901,408,320 parameters (exact)" in shown.out
    assert run(["detect", "flux.1:dev"]) == 0
    row = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("FluxTransformerBlock ")
    )
    assert row.split()[1] == "19"


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["detect", "bert:base-uncased"]) == 0
    assert run(["detect", "bert:base-uncased", "--strict"]) == 1
    assert run(["detect", "bert:nothing"]) == 2
    assert run(["detect", "llama3:8b", "--wrap", "Nothing"]) == 2
    assert run(["detect", "llama3:8b", "--override", "hidden_size"]) == 2
    assert run(["detect", "t5:small", "--layout", "accelerate"]) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert len(shown.err.splitlines()) == 8, "two lines for each refusal"


@pytest.mark.slow
def test_a_hit_needs_no_torch_and_an_edit_is_a_miss(tmp_path: Path) -> None:
    path = config(tmp_path)
    assert not examine(resolve(path)).cached
    assert examine(resolve(path)).cached
    assert not examine(resolve(path), refresh=True).cached
    assert not examine(resolve(path), use_cache=False).cached
    code = """if True:
        import sys
        from fsdptool.cli.app import run
        assert run(['detect', sys.argv[1]]) == 0
        sys.stderr.write(str(sorted({'torch', 'transformers', 'diffusers', 'numpy'} & set(sys.modules))))
    """
    shown = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert "(cached)" in shown.stdout
    assert shown.stderr == "[]"
    first = examine(resolve(path)).anatomy.total_parameters
    config(tmp_path, num_hidden_layers=3)
    edited = examine(resolve(path))
    assert not edited.cached
    assert edited.anatomy.total_parameters > first


def test_upgrading_a_library_or_a_plugin_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fsdptool.inspection import api

    spec = resolve(config(tmp_path))
    before = api.cache_parts(spec)
    monkeypatch.setattr(api, "library_versions", lambda: {"transformers": "99"})
    assert api.cache_parts(spec) != before
    monkeypatch.undo()
    monkeypatch.setattr(api, "family_digest", lambda name: "edited")
    assert api.cache_parts(spec) != before
    monkeypatch.undo()
    assert api.cache_parts(spec) == before
    assert api.cache_parts(resolve(config(tmp_path), trust_remote_code=True)) != before


def test_a_corrupt_cache_is_reported_and_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path / "cache"))
    path = config(tmp_path)
    first = document(capsys, path)
    entry = next((tmp_path / "cache").rglob("*.json"))
    entry.write_bytes(entry.read_bytes()[:-10])
    second = document(capsys, path)
    assert [finding["code"] for finding in second["diagnostics"] if finding["code"] == "CACHE002"]
    assert second["parameters"] == first["parameters"]
    assert document(capsys, path)["cached"]
    monkeypatch.setenv("FSDPTOOL_CACHE", path)
    third = document(capsys, path)
    assert [finding["code"] for finding in third["diagnostics"] if finding["code"] == "CACHE001"]
    assert third["parameters"] == first["parameters"]


def test_the_garbage_collector_is_back_afterwards(tmp_path: Path) -> None:
    """It stays away while a model is built, also from a build that fails, and nobody's choice is changed."""
    seen = config(tmp_path)
    examine(resolve(seen), use_cache=False)
    assert gc.isenabled()
    with pytest.raises(ModelError):
        examine(resolve(config(tmp_path, hidden_size=10**15)), use_cache=False)
    assert gc.isenabled()
    gc.disable()
    try:
        examine(resolve(config(tmp_path)), use_cache=False)
        assert not gc.isenabled()
    finally:
        gc.enable()
