"""AdamW with 8-bit moments: the plain optimizer's steps, and states that survive a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import CASES, prepare_case
from pool import Pool
from ranks import train, weights_of
from test_steps import Data, Log, opened, parts_of

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Checkpoints, Optimizer, Recipe
from fsdptool.runs.events import EventLog
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.trainer import Trainer

pytestmark = pytest.mark.distributed
pytest.importorskip("bitsandbytes")

EIGHT_BIT = Optimizer(name="adamw8bit", learning_rate=2e-3, betas=(0.9, 0.99), epsilon=1e-6, weight_decay=0.0)


def run_eight_bit(folder: Path, recipe: Recipe, resume: str | None) -> Any:
    """Take two steps and save, or continue from there; then two more."""
    assembled, session = opened(folder, recipe)
    events = EventLog(folder, session.rank, 0)
    saver = RunCheckpointer(
        folder / "checkpoints", Checkpoints(), kind="sharded", events=events, resume=resume
    )
    loop = Trainer(recipe, assembled, Data(session), None, parts_of(Log()), session)
    try:
        saver.load(loop.state)
    except ConfigError as error:
        return error.message
    if resume is None:
        for _ in range(2):
            loop.step(10)
        saver.save(loop.state, wait=True)
    losses = [loop.step(10).loss for _ in range(2)]
    packed = [name for name, tensor in loop.state.rank_tensors().items() if tensor.dtype == torch.uint8]
    return {"losses": losses, "weights": weights_of(assembled), "packed": packed}


def test_eight_bit_states_continue_bit_for_bit_on_as_many_ranks(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["long list"], tmp_path, "full", optimizer=EIGHT_BIT)
    through = pool.run(run_eight_bit, 2, folder, recipe, None)[0]
    resumed = pool.run(run_eight_bit, 2, folder, recipe, "auto")[0]
    assert "optimizer/model.embed_tokens.weight/state1" in through["packed"]
    assert resumed["losses"] == through["losses"]
    assert all(torch.equal(resumed["weights"][name], tensor) for name, tensor in through["weights"].items())
    (refusal,) = pool.run(run_eight_bit, 1, folder, recipe, "auto")
    assert "saved on another number of ranks" in refusal


def test_one_rank_steps_as_the_plain_optimizer_does(pool: Pool, tmp_path: Path) -> None:
    from bitsandbytes.optim import AdamW8bit

    recipe, folder = prepare_case(CASES["long list"], tmp_path, "full", optimizer=EIGHT_BIT)
    (found,) = pool.run(train, 1, "long list", folder, recipe, None, 6)
    expected = reference.run(
        "long list",
        recipe,
        found["before"],
        {},
        steps=6,
        optimizer_of=lambda groups: AdamW8bit(groups, lr=2e-3, betas=(0.9, 0.99), eps=1e-6),
    )
    losses, weights, _ = reference.compare(found, expected)
    assert losses <= 1e-5
    assert weights <= 1e-5


def waits_of_steps(folder: Path, recipe: Recipe) -> tuple[int, int]:
    """Return how often two steps, and one of bitsandbytes' own, wait for the device."""
    import bitsandbytes.optim.optimizer as library

    assembled, session = opened(folder, recipe)
    loop = Trainer(recipe, assembled, Data(session), None, parts_of(Log()), session)
    waited: list[torch.Tensor] = []
    library.sync_gpu, kept = waited.append, library.sync_gpu
    try:
        for _ in range(2):
            loop.step(10)
        ours = len(waited)
        optimizer = assembled.optimizer.torch_optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        library.sync_gpu = kept
    return ours, len(waited) - ours


def test_a_step_does_not_wait_after_every_parameter(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", optimizer=EIGHT_BIT)
    ((ours, theirs),) = pool.run(waits_of_steps, 1, folder, recipe)
    assert theirs > 1
    assert ours == 0
