"""Objectives of text models against transformers' own losses and against first principles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.families.objectives import CausalLM, MaskedLM, Seq2Seq
from fsdptool.families.protocol import Objective
from fsdptool.families.registry import load_registry
from fsdptool.families.synthetic import shrink
from fsdptool.modeling.objective import add_validation_loss
from fsdptool.report.console.train import validation_text


def _small(
    family: str, flavour: str | None = None, *, dtype: torch.dtype = torch.float64, **changes: Any
) -> tuple[nn.Module, dict[str, Any]]:
    shipped = load_registry().get(family)
    chosen = shipped.flavours()[flavour] if flavour else next(iter(shipped.flavours().values()))
    config = {**shrink(shipped, chosen.config, chosen.model_class), **changes}
    torch.manual_seed(0)
    return shipped.build(config, model_class=chosen.model_class).to(dtype).eval(), config


def _tokens(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, (rows, columns), generator=torch.Generator().manual_seed(seed))


def _mean(objective: Objective, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return objective.loss(objective.predict(model, batch), batch) / objective.weight(batch)


def test_causal_loss_is_transformers() -> None:
    model, _ = _small("llama3")
    tokens = _tokens(2, 24)
    labels = tokens.clone()
    labels[0, :9] = -100
    batch = {"input_ids": tokens, "labels": labels}
    theirs = model(input_ids=tokens, labels=labels).loss
    assert _mean(CausalLM(chunk=5), model, batch).item() == pytest.approx(theirs.item(), rel=1e-6)
    assert CausalLM().weight(batch).item() == 23 + 24 - 9


def test_labels_already_shifted_are_taken_as_they_are() -> None:
    model, _ = _small("qwen3")
    tokens = _tokens(1, 12)
    shifted = torch.cat((tokens[:, 1:], torch.full((1, 1), -100)), dim=1)
    one = _mean(CausalLM(), model, {"input_ids": tokens, "labels": tokens})
    two = _mean(CausalLM(), model, {"input_ids": tokens, "shift_labels": shifted})
    assert one.item() == two.item()


@pytest.mark.parametrize("family", ["llama3", "gemma3", "gpt2", "phi3", "opt", "falcon", "gpt-neo", "gptj"])
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    """Two documents packed into one row cost what they cost apart, also behind sliding windows."""
    model, _ = _small(family)
    one, two = _tokens(1, 10, seed=1), _tokens(1, 14, seed=2)
    packed = torch.cat((one, two), dim=1)
    labels = packed.clone()
    labels[0, 10] = -100
    places = torch.cat((torch.arange(10), torch.arange(14))).unsqueeze(0)
    objective = CausalLM(auxiliary=0.0)
    batch = {"input_ids": packed, "labels": labels, "position_ids": places}
    together = objective.loss(objective.predict(model, batch), batch)
    apart = sum(
        objective.loss(objective.predict(model, document), document)
        for document in ({"input_ids": part, "labels": part} for part in (one, two))
    )
    assert together.item() == pytest.approx(float(apart), rel=1e-6)
    seeing = CausalLM(document_mask=False, auxiliary=0.0)
    assert seeing.loss(seeing.predict(model, batch), batch).item() != pytest.approx(float(apart), rel=1e-6)


def test_masks_do_not_look_at_values() -> None:
    """A single document under the mask costs what it costs without: the mask's making is not by value."""
    from transformers import masking_utils

    from fsdptool.families.objectives.language import masks

    places = torch.arange(8).unsqueeze(0)
    original = masking_utils.find_packed_sequence_indices
    with masks(nn.Identity(), places):
        indices = masking_utils.find_packed_sequence_indices(places)
        assert indices is not None and not indices.any()
    with masks(nn.Identity(), None):
        assert masking_utils.find_packed_sequence_indices(torch.zeros(1, 8, dtype=torch.int64)) is None
    assert masking_utils.find_packed_sequence_indices is original


def test_right_padding_changes_nothing() -> None:
    model, _ = _small("llama3")
    tokens = _tokens(1, 12)
    padded = torch.cat((tokens, torch.zeros(1, 6, dtype=torch.int64)), dim=1)
    labels = torch.cat((tokens, torch.full((1, 6), -100)), dim=1)
    one = _mean(CausalLM(), model, {"input_ids": tokens, "labels": tokens})
    two = _mean(CausalLM(), model, {"input_ids": padded, "labels": labels})
    assert one.item() == pytest.approx(two.item(), rel=1e-9)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_load_balance_is_transformers(family: str) -> None:
    model, _ = _small(family, dtype=torch.float32)  # torch 2.13 has no grouped product in fp64
    tokens = _tokens(2, 16)
    batch = {"input_ids": tokens, "labels": tokens}
    outputs = model(input_ids=tokens, output_router_logits=True, use_cache=False)
    objective = CausalLM(auxiliary=0.5)
    prediction = objective.predict(model, batch)
    assert prediction["auxiliary"].item() == pytest.approx(0.5 * outputs.aux_loss.item(), rel=1e-5)
    plain = CausalLM(auxiliary=0.0)
    without = plain.loss(plain.predict(model, batch), batch)
    total = objective.loss(prediction, batch)
    extra = 0.5 * outputs.aux_loss.item() * objective.weight(batch).item()
    assert (total - without).item() == pytest.approx(extra, rel=1e-4)
    metrics = objective.metrics(prediction, batch)
    layers, top = len(outputs.router_logits), model.config.num_experts_per_tok
    assert metrics["expert_load"].sum().item() == 32 * layers * top
    assert not metrics["expert_load"].requires_grad
    assert plain.metrics(plain.predict(model, batch), batch) == {}
    validation = torch.zeros(2, dtype=torch.float64)
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        add_validation_loss(model, objective, batch, validation, sums)
    items = validation[1].item()
    loss, part = validation[0].item() / items, sums["auxiliary_loss"].item() / items
    said = validation_text({"loss": loss, "metrics": {"auxiliary_loss": part}})
    assert said.startswith(f"{loss:.4f}, of which {0.5 * outputs.aux_loss.item():.4f} is the routers'")
    assert loss - part == pytest.approx(without.item() / items, rel=1e-4)
    assert validation_text({"loss": loss, "metrics": {}}) == f"{loss:.4f}"


def test_routers_learn_from_the_load_balance() -> None:
    model, _ = _small("mixtral", dtype=torch.float32)
    tokens = _tokens(1, 16)
    prediction = CausalLM(auxiliary=1.0).predict(model, {"input_ids": tokens, "labels": tokens})
    prediction["auxiliary"].backward()
    gates = [p.grad for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")]
    assert gates and all(grad is not None and bool(grad.any()) for grad in gates)


@pytest.mark.parametrize("family", ["t5", "bart", "pegasus", "m2m100"])
def test_seq2seq_loss_is_transformers(family: str) -> None:
    model, config = _small(family)
    if getattr(model.config, "decoder_start_token_id", None) is None:
        # T5's own path from labels refuses without it.
        model.config.decoder_start_token_id = config.get("pad_token_id", 0)
    source, target = _tokens(2, 10), _tokens(2, 7, seed=5)
    target[1, 4:] = -100
    batch = {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}
    theirs = model(**batch).loss
    assert _mean(Seq2Seq(), model, batch).item() == pytest.approx(theirs.item(), rel=1e-6)
    assert Seq2Seq().weight(batch).item() == 11


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "distilbert", "esm2"])
def test_masked_loss_is_transformers(family: str) -> None:
    model, config = _small(family)
    tokens = _tokens(2, 12) % (config["vocab_size"] - 4) + 3
    labels = torch.full_like(tokens, -100)
    labels[:, ::4] = tokens[:, ::4]
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    theirs = model(**batch).loss
    assert _mean(MaskedLM(), model, batch).item() == pytest.approx(theirs.item(), rel=1e-5)


def test_distillation_of_equal_models_is_zero_and_else_positive() -> None:
    model, _ = _small("llama3")
    other, _ = _small("llama3", hidden_act="gelu")
    batch = {"input_ids": _tokens(1, 9), "labels": _tokens(1, 9)}
    objective = CausalLM()
    ours, theirs = objective.predict(model, batch), objective.predict(other, batch)
    assert objective.distance(ours, ours, batch, 2.0).item() == pytest.approx(0.0, abs=1e-6)
    assert objective.distance(ours, theirs, batch, 2.0).item() > 0


def test_different_vocabularies_are_refused() -> None:
    batch = {"labels": _tokens(1, 4)}
    with pytest.raises(ConfigError, match="predict 7 and 9 tokens"):
        CausalLM().distance(
            {"prediction": torch.zeros(1, 4, 7)}, {"prediction": torch.zeros(1, 4, 9)}, batch, 1.0
        )


@pytest.mark.parametrize("chunk", [-1, 2.5, True])
def test_a_chunk_is_a_number_of_tokens(chunk: Any) -> None:
    with pytest.raises(ConfigError, match="chunk"):
        CausalLM(chunk=chunk)


def test_a_batch_without_labels_is_named() -> None:
    with pytest.raises(ConfigError, match="'labels'"):
        MaskedLM().weight({"input_ids": _tokens(1, 4)})
