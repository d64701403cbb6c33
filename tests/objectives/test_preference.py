"""Preference objectives against their papers' formulas, written over plain log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fsdptool.errors import ConfigError
from fsdptool.families.objectives import TRANSFORMERS
from fsdptool.families.registry import family_of
from fsdptool.modeling.methods import Student
from fsdptool.modeling.methods import Teacher as FrozenModel
from fsdptool.modeling.objective import objective_for
from fsdptool.records.recipe import Distillation, Method, ModelChoice, Objective, Recipe
from fsdptool.source import resolve

TINY = ModelChoice("llama3:tiny", overrides={"num_hidden_layers": 1})
SPEC = resolve(TINY.reference, overrides=TINY.overrides)


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return family_of(SPEC).build(SPEC.config, model_class=SPEC.model_class).double()


def pairs() -> dict[str, Tensor]:
    """Three pairs of answers of unequal lengths behind prompts of four tokens, padded on the right."""
    tokens = torch.randint(3, 250, (3, 2, 14), generator=torch.Generator().manual_seed(5))
    tokens[:, 1, :4] = tokens[:, 0, :4]
    labels = tokens.clone()
    labels[:, :, :4] = -100
    for pair, (chosen, rejected) in enumerate(((14, 9), (6, 14), (11, 5))):
        labels[pair, 0, chosen:], labels[pair, 1, rejected:] = -100, -100
    return {"input_ids": tokens, "labels": labels}


def likelihoods(network: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return summed log-probabilities and lengths of chosen and rejected answers, one sequence at a time."""
    sums, lengths = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    for pair in range(3):
        for answer in range(2):
            tokens, labels = batch["input_ids"][pair, answer], batch["labels"][pair, answer]
            known = torch.log_softmax(network(input_ids=tokens[None]).logits[0], -1)
            places = [place for place in range(1, 14) if labels[place] != -100]
            sums[pair, answer] = torch.stack([known[place - 1, tokens[place]] for place in places]).sum()
            lengths[pair, answer] = len(places)
    return sums, lengths


def orpo(sums: Tensor, lengths: Tensor, reference: Tensor) -> Tensor:
    mean = (sums / lengths).exp()
    odds = mean / (1 - mean)
    return -mean[:, 0].log() - 0.1 * torch.sigmoid(torch.log(odds[:, 0] / odds[:, 1])).log()


def simpo(sums: Tensor, lengths: Tensor, reference: Tensor) -> Tensor:
    rewards = 2.0 * sums / lengths
    return -torch.sigmoid(rewards[:, 0] - rewards[:, 1] - 1.0).log()


def dpo(sums: Tensor, lengths: Tensor, reference: Tensor) -> Tensor:
    gains = 0.1 * (sums - reference)
    return -torch.sigmoid(gains[:, 0] - gains[:, 1]).log()


@pytest.mark.parametrize("formula", [orpo, simpo, dpo], ids=lambda formula: formula.__name__)
@pytest.mark.parametrize("chunk", [0, 5])
def test_losses_and_gradients_are_those_of_the_papers(formula: Callable[..., Tensor], chunk: int) -> None:
    batch, network, frozen = pairs(), model(1), model(2)
    objective = TRANSFORMERS[formula.__name__](chunk=chunk)  # type: ignore[call-arg]
    with torch.no_grad():
        reference, _ = likelihoods(frozen, batch)
    sums, lengths = likelihoods(network, batch)
    expected = formula(sums, lengths, reference).sum()
    wanted = torch.autograd.grad(expected, list(network.parameters()), allow_unused=True)
    prediction = objective.predict(network, batch)
    loss = objective.loss(prediction, batch)
    if objective.needs_teacher:
        teacher = FrozenModel(frozen, objective, lambda _: None)
        loss, _ = Student(objective, teacher, Distillation(TINY, alpha=1.0))(network, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for ours, theirs in zip(torch.autograd.grad(loss, list(network.parameters())), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    means = sums / lengths
    assert objective.weight(batch).item() == 3
    assert objective.metrics(prediction, batch)["preferred"] == (means[:, 0] > means[:, 1]).sum()


def test_answers_that_are_judged_one_by_one() -> None:
    """TRL 1.16 ``kto_trainer.py``, ``apo_zero_unpaired``: the loss of KTO with a reference point of zero."""
    two, network, frozen = pairs(), model(1), model(2)
    desirable = torch.tensor([1, 0, 0, 1, 1, 0])
    batch = {name: value.flatten(0, 1) for name, value in two.items()} | {"desirable": desirable}
    objective = TRANSFORMERS["apo_zero_unpaired"]()
    with torch.no_grad():
        reference, _ = likelihoods(frozen, two)
    sums, lengths = likelihoods(network, two)
    shares = torch.sigmoid(0.1 * (sums - reference)).flatten()
    expected = torch.where(desirable == 1, 1 - shares, shares).sum()
    wanted = torch.autograd.grad(expected, list(network.parameters()), retain_graph=True)
    teacher = FrozenModel(frozen, objective, lambda _: None)
    loss, _ = Student(objective, teacher, Distillation(TINY, alpha=1.0))(network, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for ours, theirs in zip(torch.autograd.grad(loss, list(network.parameters())), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    likelihood = -(sums / lengths).flatten()[desirable == 1].sum()
    assert objective.loss(objective.predict(network, batch), batch).item() == pytest.approx(likelihood.item())
    assert objective.weight(batch).item() == 6


@pytest.mark.parametrize("name", ["dpo", "apo_zero_unpaired"])
def test_a_reference_model_is_asked_for(name: str) -> None:
    recipe = Recipe(TINY, objective=Objective(name))
    with pytest.raises(ConfigError, match=f"objective {name} needs a reference model"):
        objective_for(recipe, SPEC)
    assert objective_for(replace(recipe, method=Method("distillation", None, Distillation(TINY))), SPEC)
