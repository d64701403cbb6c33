"""Packed documents stay apart in every decoder that says it keeps them apart; the others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdptool.cli.app import run
from fsdptool.errors import ConfigError
from fsdptool.families.objectives import CausalLM
from fsdptool.families.registry import load_registry
from fsdptool.records.recipe import Batch, Data, ModelChoice, Recipe
from fsdptool.testing.families import small_model, small_spec
from fsdptool.training.data import build_batches

DECODERS = {
    flavour.model_class: (family.name, flavour.name)
    for family in load_registry().all()
    for flavour in family.flavours().values()
    if flavour.model_class.endswith(("CausalLM", "LMHeadModel"))
    and family.objective_for(flavour.config) == "causal_lm"
}
LEAKING = {
    *("FalconMambaForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM", "MambaForCausalLM"),
    *("Mamba2ForCausalLM", "MptForCausalLM", "Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM"),
    *("FalconH1ForCausalLM", "Lfm2ForCausalLM", "NemotronHForCausalLM"),
    "Lfm2MoeForCausalLM",
}


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_the_second_document_does_not_change_with_the_first(name: str) -> None:
    family_name, flavour = DECODERS[name]
    family = load_registry().get(family_name)
    small = small_model(family, family.flavours()[flavour])
    assert ("position_ids" not in small.batch) == (name in LEAKING)
    tokens = small.batch["input_ids"]
    length = tokens.shape[1]
    half = length // 2
    places = torch.cat([torch.arange(half), torch.arange(length - half)]).expand_as(tokens)
    if name in LEAKING:
        return
    model = small.model.eval()
    changed = tokens.clone()
    changed[:, :half] = (changed[:, :half] + 1) % tokens.max()
    with torch.no_grad():
        one, two = (
            CausalLM(auxiliary=0.0).predict(
                model, {"input_ids": ids, "labels": tokens, "position_ids": places.contiguous()}
            )["prediction"]
            for ids in (tokens, changed)
        )
    assert not torch.equal(one[:, :half], two[:, :half])
    torch.testing.assert_close(one[:, half:], two[:, half:], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_model_that_carries_a_state_is_refused_unless_it_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = load_registry().get("mamba")
    spec = small_spec(family, next(iter(family.flavours().values())))
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 200)
    recipe = Recipe(
        ModelChoice("mamba"),
        data=Data("text", str(tmp_path / "text.txt"), tokenizer="bytes"),
        batch=Batch(sequence_length=32),
    )
    with pytest.raises(ConfigError, match="cannot separate documents") as caught:
        build_batches(recipe, spec, cache=tmp_path / "cache")
    assert "document_mask: false" in str(caught.value.help)
    for accepted in ({"document_mask": False}, {"packing": False}):
        allowed = replace(recipe, data=replace(recipe.data, **accepted))  # type: ignore[arg-type]
        assert next(build_batches(allowed, spec, cache=tmp_path / "cache"))
    file = tmp_path / "recipe.yaml"
    (tmp_path / "config.json").write_text(json.dumps({**spec.config, "architectures": [spec.model_class]}))
    text = f"""\
model: {{reference: {tmp_path / "config.json"}, weights: random}}
data: {{source: text, path: {tmp_path / "text.txt"}, tokenizer: bytes}}
batch: {{sequence_length: 32}}
steps: 1
"""
    for content, warned in ((text, True), (text.replace("bytes}", "bytes, document_mask: false}"), False)):
        file.write_text(content)
        arguments = [
            "plan",
            "--recipe",
            str(file),
            "--profile",
            "cpu-gloo",
            "--processes",
            "2",
            "--no-search",
        ]
        assert run([*arguments, "--format", "json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert ("PLN012" in {item["code"] for item in plan["diagnostics"]}) == warned
