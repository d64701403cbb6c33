"""Training methods: the registry is the recipe's, and each method says everything that is asked of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.inspection import inspect
from fsdptool.modeling import build_model
from fsdptool.modeling.methods import TRAINING_METHODS, Teacher, TrainingMethod, method_of
from fsdptool.modeling.objective import Task, gradient_syncs, run_micro_batch, unconverted_parameters
from fsdptool.modeling.units import as_trained
from fsdptool.records.recipe import Distillation, Lora, Method, MethodName, ModelChoice, Recipe
from fsdptool.records.run import RunPhase
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source import resolve

LLAMA = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 4, "vocab_size": 128}
BERT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
CHOICE = ModelChoice("llama3:8b", dtype="float32", overrides=LLAMA)
RECIPES: dict[str, Recipe] = {
    "full": Recipe(CHOICE),
    "lora": Recipe(CHOICE, Method("lora", lora=Lora(rank=2, adapters="replicated", base="int8"))),
    "distillation": Recipe(CHOICE, Method("distillation", distillation=Distillation(CHOICE, alpha=0.25))),
}


def test_the_registry_holds_the_recipes_methods() -> None:
    assert set(TRAINING_METHODS) == set(get_args(MethodName)) == set(RECIPES)
    assert [type(method).name for method in TRAINING_METHODS.values()] == list(TRAINING_METHODS)
    assert type(method_of(RECIPES["full"])) is TrainingMethod


@pytest.mark.parametrize("name", RECIPES)
def test_a_method_says_what_it_does_to_a_model(name: str) -> None:
    recipe, spec = RECIPES[name], resolve("llama3:8b", overrides=LLAMA)
    method = method_of(recipe)
    model = build_model(spec, recipe.model, cp=1)
    assert not model.config.use_cache
    before = dict(model.named_parameters())
    method.prepare(model, recipe, family_of(spec), spec.config)
    added = {name for name, _ in model.named_parameters()} - set(before)
    assert bool(added) is method.adds_parameters
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    initialisation = method.initialisation(model, recipe)
    assert trainable == (set(initialisation.parameters) if initialisation else set(before))
    assert set(method.replicated(model, recipe)) == (trainable if name == "lora" else set())
    trained = as_trained(inspect(spec), recipe)
    assert {p.fqn for p in trained.anatomy.parameters if p.trainable} == trainable
    assert trained.replicated == method.replicated(model, recipe)
    plain = build_model(spec, recipe.model, cp=1)
    method.prepare(plain, method.unquantised(recipe), family_of(spec), spec.config)
    quantised = method.quantised_weights(plain, recipe)
    assert bool(quantised) is (name == "lora")
    assert set(quantised) <= set(before)
    assert (method.teacher_choice(recipe) is not None) is (name == "distillation")


def test_methods_refuse_what_they_do_not_support() -> None:
    fp8 = FsdpSettings(mixed_precision="fp8")
    for name, recipe in RECIPES.items():
        if name == "lora":
            with pytest.raises(ConfigError, match="fp8 trains whole weights"):
                method_of(recipe).check(recipe, fp8)
        else:
            method_of(recipe).check(recipe, fp8)
    without = dataclasses.replace(RECIPES["distillation"], method=Method("distillation"))
    with pytest.raises(ConfigError, match="needs a teacher"):
        method_of(without).check(without, FsdpSettings())
    student, encoder = resolve("llama3:8b", overrides=LLAMA), resolve("bert:base-uncased", overrides=BERT)
    with pytest.raises(ConfigError, match="is a model for masked_lm, the student one for causal_lm"):
        method_of(RECIPES["distillation"]).check_teacher(student, encoder)


class Squares:
    """An objective over one linear layer."""

    def predict(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"value": model(batch["x"])}

    def loss(self, prediction: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return prediction["value"].square().sum()

    def distance(
        self,
        prediction: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
        batch: Mapping[str, torch.Tensor],
        temperature: float,
    ) -> torch.Tensor:
        return (prediction["value"] - target["value"]).square().sum() / temperature

    def metrics(self, prediction: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {}


class Watcher:
    """Sees what an observer of a micro-batch sees, and answers for a teacher with ones."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def predicted(self, prediction: Mapping[str, Any], *, distilled: bool = False) -> Mapping[str, Any]:
        self.seen.append("predicted")
        return {key: torch.ones_like(value) for key, value in prediction.items()} if distilled else {}

    def backward(self, loss: torch.Tensor) -> None:
        self.seen.append("backward")
        loss.backward()

    @contextmanager
    def moment(self, phase: RunPhase) -> Iterator[None]:
        self.seen.append(phase)
        yield


def test_trainer_and_observer_run_the_same_loss() -> None:
    recipe, objective = RECIPES["distillation"], Squares()
    torch.manual_seed(0)
    model, frozen = nn.Linear(3, 2), nn.Linear(3, 2)
    released: list[nn.Module] = []
    teacher = Teacher(frozen, objective, released.append)
    batch = {"x": torch.randn(4, 3)}
    loss, metrics = method_of(recipe).micro_loss(recipe, objective, teacher)(model, batch)
    value, target = model(batch["x"]), frozen(batch["x"]).detach()
    task, distance = value.square().sum(), (value - target).square().sum() / 2.0
    assert torch.equal(loss, 0.75 * task + 0.25 * distance)
    assert torch.equal(metrics["task_loss"], task.detach())
    assert released == [frozen]
    watcher = Watcher()
    observed, _ = run_micro_batch(
        model,
        method_of(recipe).micro_loss(recipe, objective),
        batch,
        scale=2.0,
        divisor=torch.tensor(4.0),
        moment=watcher.moment,
        observer=watcher,
    )
    assert watcher.seen == ["forward", "predicted", "backward", "backward"]
    ones = (value - 1).square().sum() / 2.0
    assert torch.equal(observed, (0.75 * task + 0.25 * ones).detach())
    expected = torch.autograd.grad((0.75 * task + 0.25 * ones) / 2, model.weight)[0]
    assert torch.allclose(model.weight.grad, expected)
    plain, _ = run_micro_batch(
        model, Task(objective), batch, scale=1.0, divisor=torch.ones(()), moment=Watcher().moment
    )
    assert torch.equal(plain, task.detach())


def test_gradients_are_reduced_in_every_micro_batch_or_in_the_last() -> None:
    assert [(s.last, s.reduce) for s in gradient_syncs(3, unsharded=False)] == [
        (False, True),
        (False, True),
        (True, True),
    ]
    assert [(s.last, s.reduce) for s in gradient_syncs(2, unsharded=True)] == [(False, False), (True, True)]


class _Converting(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute in fp32, as the routers of Switch Transformers do."""
        self.to(torch.float32)
        return super().forward(states)


def test_parameters_may_not_be_converted_in_forward() -> None:
    states = torch.ones(1, 2)
    with unconverted_parameters():
        assert _Converting(2, 2)(states).shape == (1, 2)
        with pytest.raises(ConfigError, match="_Converting converts its parameters"):
            _Converting(2, 2, dtype=torch.bfloat16)(states)
    assert nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64
