"""Muon: torch's own on whole matrices, however many ranks the rows are cut over, and resumed on others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import CASES, FEW, MICRO_BATCHES, prepare_case
from pool import Pool
from ranks import train, weights_of
from test_steps import Data, Log, opened, parts_of
from variants import HYBRID

from fsdptool.errors import ConfigError
from fsdptool.modeling.optimizer_costs import check_optimizer
from fsdptool.modeling.optimizer_costs.muon import is_hidden_matrix
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Checkpoints, Muon, Optimizer, Recipe
from fsdptool.runs.events import EventLog
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.optimizers.sharded import build_optimizer
from fsdptool.training.trainer import Trainer

MUON = Optimizer(name="muon", learning_rate=2e-3, betas=(0.9, 0.99), epsilon=1e-6, weight_decay=0.01)
STEPS = 8
PLAIN_RUNS: dict[tuple[Any, ...], tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}
distributed = pytest.mark.distributed


def plain(options: Optimizer, vocabulary: int) -> Any:
    """Return what makes torch.optim.Muon for matrices of blocks and AdamW for the rest."""
    muon = options.muon or Muon()

    class Both(torch.optim.Optimizer):
        def __init__(self, groups: list[dict[str, Any]]) -> None:
            super().__init__(groups, {})
            wide = groups[0]["params"]
            hidden = [p for p in wide if p.dim() == 2 and vocabulary not in p.shape]
            # Experts one by one: each is a view of the stack.
            self.stacks = [p for p in wide if p.dim() == 3]
            self.experts = [[torch.nn.Parameter(e) for e in p.detach().unbind()] for p in self.stacks]
            rest = [p for p in wide if vocabulary in p.shape]
            self.muon = torch.optim.Muon(
                [*hidden, *(expert for stack in self.experts for expert in stack)],
                lr=options.learning_rate,
                weight_decay=options.weight_decay,
                momentum=muon.momentum,
                nesterov=muon.nesterov,
                ns_steps=muon.newton_schulz_steps,
                adjust_lr_fn=muon.adjust_learning_rate,
            )
            self.adamw = torch.optim.AdamW(
                [{"params": rest, "weight_decay": options.weight_decay}, groups[1]],
                lr=muon.adamw_learning_rate or options.learning_rate,
                betas=options.betas,
                eps=options.epsilon,
                foreach=False,
            )

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for stack, experts in zip(self.stacks, self.experts, strict=True):
                for expert, gradient in zip(experts, stack.grad.unbind(), strict=True):
                    expert.grad = gradient
            self.muon.step()
            self.adamw.step()

    return Both


def hold(
    results: list[dict[str, Any]], name: str, recipe: Recipe, steps: int, count: int = MICRO_BATCHES
) -> tuple[float, float]:
    """Return the worst relative loss error and the relative weight difference to the plain loop."""
    vocabulary = CASES[name].config["vocab_size"]
    before = results[0]["before"]
    key = (name, recipe.optimizer, steps, count)
    # The plain loop knows nothing of ranks and meshes: it runs once for all that start alike.
    if key not in PLAIN_RUNS:
        options = {"steps": steps, "count": count, "optimizer_of": plain(recipe.optimizer, vocabulary)}
        PLAIN_RUNS[key] = (before, reference.run(name, recipe, before, {}, **options))
    start, expected = PLAIN_RUNS[key]
    assert all(torch.equal(before[parameter], tensor) for parameter, tensor in start.items())
    assert len({result["hash"] for result in results}) == 1
    assert results[0]["losses"][-1] != results[0]["losses"][0]
    return reference.compare(results[0], expected)[:2]


@distributed
@pytest.mark.parametrize(
    ("world", "mesh", "settings", "muon"),
    [
        (1, None, {}, None),
        (2, None, {}, None),
        (3, None, {}, Muon(adjust_learning_rate="original", nesterov=False, adamw_learning_rate=1e-3)),
        (4, HYBRID, {}, None),
        (2, None, {"cpu_offload": True}, None),
    ],
    ids=["1 rank", "2 ranks", "3 ranks and other options", "hybrid", "offload"],
)
def test_steps_equal_a_plain_loop(
    pool: Pool, tmp_path: Path, world: int, mesh: ParallelDims | None, settings: Any, muon: Muon | None
) -> None:
    """In double precision: a rounding of the gradient does not become another bfloat16 number."""
    recipe, folder = prepare_case(
        CASES["causal"], tmp_path, "full", optimizer=dataclasses.replace(MUON, muon=muon)
    )
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dtype="float64"))
    # Twelve micro-batches divide by every number of ranks.
    results = pool.run(train, world, "causal", folder, recipe, mesh, STEPS, 12, settings)
    losses, weights = hold(results, "causal", recipe, STEPS, 12)
    assert losses <= 1e-5
    assert weights <= 1e-5


@distributed
@pytest.mark.parametrize("world", [1, 2, 4])
def test_fused_experts_are_stepped_one_by_one(pool: Pool, tmp_path: Path, world: int) -> None:
    recipe, folder = prepare_case(CASES["moe"], tmp_path, "full", optimizer=MUON)
    losses, weights = hold(pool.run(train, world, "moe", folder, recipe, None, FEW), "moe", recipe, FEW)
    # In single precision a rounding of a gradient can become another bfloat16 number.
    assert losses <= 1e-3
    assert weights <= 1e-3


def test_each_expert_is_stepped_as_a_matrix_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.nn.Parameter(torch.randn(5, 48, 32, generator=generator))
    single = [torch.nn.Parameter(expert.clone()) for expert in experts.detach()]
    ours = build_optimizer(MUON, {"layers.0.experts.up": experts}.items(), rate=2e-3)
    torchs = torch.optim.Muon(single, lr=2e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        experts.grad = torch.randn(experts.shape, generator=generator)
        for expert, gradient in zip(single, experts.grad, strict=True):
            expert.grad = gradient.clone()
        ours.step(2e-3)
        torchs.step()
    assert torch.equal(experts, torch.stack(single))


def run_resumed(folder: Path, recipe: Recipe, resume: str | None) -> Any:
    """Take two steps and save, or continue from there; then two more."""
    assembled, session = opened(folder, recipe)
    events = EventLog(folder, session.rank, 0)
    saver = RunCheckpointer(
        folder / "checkpoints", Checkpoints(), kind="sharded", events=events, resume=resume
    )
    trainer = Trainer(recipe, assembled, Data(session), None, parts_of(Log()), session)
    saver.load(trainer.state)
    if resume is None:
        for _ in range(2):
            trainer.step(10)
        saver.save(trainer.state, wait=True)
    losses = [trainer.step(10).loss for _ in range(2)]
    return {"losses": losses, "weights": weights_of(assembled)}


@distributed
def test_momenta_continue_on_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", optimizer=MUON)
    through = pool.run(run_resumed, 2, folder, recipe, None)[0]
    same = pool.run(run_resumed, 2, folder, recipe, "auto")[0]
    assert same["losses"] == through["losses"]
    assert all(torch.equal(same["weights"][name], tensor) for name, tensor in through["weights"].items())
    other = pool.run(run_resumed, 4, folder, recipe, "auto")[0]
    assert other["losses"] == pytest.approx(through["losses"], rel=1e-4)


@pytest.mark.parametrize(
    ("fqn", "shape", "hidden"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 128, 64), True),
        ("transformer_blocks.3.attn.to_q.weight", (64, 64), True),
        ("model.layers.0.input_layernorm.weight", (64,), False),
        ("model.embed_tokens.weight", (256, 64), False),
        ("lm_head.weight", (256, 64), False),
        ("layers.0.mixer.conv1d.weight", (64, 1, 4), False),
        ("down_blocks.0.resnets.0.conv1.weight", (64, 64, 3, 3), False),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 8), False),
    ],
)
def test_hidden_matrices_are_those_of_blocks(fqn: str, shape: tuple[int, ...], hidden: bool) -> None:
    assert is_hidden_matrix(fqn, shape) is hidden


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Muon(momentum=1.0), "muon.momentum is 1.0"),
        (Muon(newton_schulz_steps=0), "must be from 1 to 99"),
        (Muon(epsilon=0.0), "must be above 0"),
    ],
)
def test_options_that_no_run_can_have_are_refused(options: Muon, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_optimizer(dataclasses.replace(MUON, muon=options))
