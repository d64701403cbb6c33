"""Small models under recipes, traced, simulated and observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fsdp_oracle import Observation, observe
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdptool.memory.tracing.make_trace as building
from fsdptool.families.objectives.packed_attention import under_masks
from fsdptool.families.registry import family_of
from fsdptool.inspection import inspect
from fsdptool.memory.simulation.collective_bytes import DEVICES
from fsdptool.memory.simulation.simulate import prepare, simulate
from fsdptool.modeling.objective import objective_for
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import plan_units
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import OWN_LOOP, TrainingLoop
from fsdptool.records.recipe import Batch, Method, ModelChoice, Objective, Optimizer, Recipe, Sharding
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.sharding import FsdpSettings, UnitPlan
from fsdptool.records.trace import Component, Trace
from fsdptool.source import resolve

LLAMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def allocation_peak(run: Callable[[], object]) -> int:
    """Return the most bytes that are alive at once beyond those before, by allocator events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    level = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    return highest


class Mixture(nn.Module):
    """A block of experts, of which a micro-batch reaches only the first ones."""

    def __init__(self, width: int, experts: int, reached: int) -> None:
        super().__init__()
        self.lin, self.reached = nn.Linear(width, width), reached
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the experts say."""
        hidden = self.lin(x)
        for expert in list(self.experts)[: self.reached]:
            x = x + expert(hidden)
        return x


class Reached(nn.Module):
    """Mixtures behind one another."""

    def __init__(self, width: int = 128, experts: int = 6, reached: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(width, experts, reached) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A recipe on a small model."""

    reference: str = "llama3:8b"
    overrides: Mapping[str, Any] | None = None
    ranks: int = 8
    mesh: ParallelDims = field(default_factory=ParallelDims)
    batch: Mapping[str, int] | None = None
    sharding: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    method: Method = field(default_factory=Method)
    objective: Objective = field(default_factory=Objective)
    step: bool = False
    loop: TrainingLoop = OWN_LOOP

    def spec(self) -> ModelSpec:
        """Return the resolved model."""
        return resolve(self.reference, overrides=self._overrides(), trust_remote_code=":" in self.own)

    @property
    def own(self) -> str:
        """A module of this folder, or nothing."""
        return self.reference if self.reference.startswith("memory_cases:") else ""

    def _overrides(self) -> Mapping[str, Any]:
        return LLAMA if self.overrides is None else self.overrides

    def recipe(self) -> Recipe:
        """Return the recipe."""
        return self.run().recipe

    def run(self) -> ResolvedRun:
        """Return the run."""
        recipe = Recipe(
            model=ModelChoice(self.reference, overrides=self._overrides()),
            method=self.method,
            objective=self.objective,
            batch=Batch(**{"sequence_length": 64, **(self.batch or {})}),
            sharding=Sharding(**(self.sharding or {})),
            optimizer=Optimizer(**(self.optimizer or {})),
        )
        return resolve_run(recipe, self.yaml(), loop=self.loop)

    def yaml(self) -> FsdpSettings:
        """Return the settings."""
        return FsdpSettings(num_processes=self.ranks, use_cpu=True, mesh=self.mesh, **(self.settings or {}))

    def plan(self) -> UnitPlan:
        """Return the units."""
        return plan_units(inspect(self.spec(), use_cache=False), self.run())

    def trace(self) -> Trace:
        """Return the trace, made afresh, as a GPU would compute."""
        with under_masks() if self.loop.masked else nullcontext():
            return building.make_trace(self.spec(), self.run(), "cuda")

    def observe(self) -> Observation:
        """Ask the oracle."""
        spec, run, settings, plan = self.spec(), self.run(), self.yaml(), self.plan()
        recipe = run.recipe
        return observe(
            lambda: building.trained_model(spec, run, plan),
            plan,
            objective_for(recipe, spec),
            family_of(spec).batch_spec(spec.config, recipe),
            recipe,
            settings,
            world_size=self.ranks,
            step=self.step,
            loop=self.loop,
        )

    def simulate(self, trace: Trace | None = None) -> tuple[int, dict[Component, int]]:
        """Return the simulated peak, optimizer states left out unless stepping, and its components."""
        mesh, recipe = self.mesh.resolve(self.ranks), self.recipe()
        rank = prepare(self.plan(), mesh, recipe, device=replace(DEVICES["cuda"], grain=1))
        made = simulate(trace or self.trace(), rank, mesh, recipe, loop=self.loop)
        live = dict(zip(Component, made.ledger.at_best, strict=True))
        peak = made.ledger.best
        return peak if self.step else peak - live[Component.OPTIMIZER], live
