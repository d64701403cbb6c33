"""Where a step waits for its device, and what the loop loses by launching the next step first: nothing."""

from __future__ import annotations

import dataclasses
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, inputs_for, prepare_case
from pool import Pool
from ranks import share, weights_of
from sweeps import kept
from test_steps import Memory, looped
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptool.distributed.session import open_session
from fsdptool.distributed.shard import local
from fsdptool.errors import WorkerError
from fsdptool.records.recipe import Ema as EmaChoice
from fsdptool.records.recipe import Evaluation, Optimizer, Recipe, Sharding
from fsdptool.training.trainer import assemble

pytestmark = pytest.mark.distributed

OPERATORS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "bincount", "equal", "_unique2"}
"""Operators that read a result on the host on CUDA (torch 2.13)."""

CALLS = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.new_tensor, torch.tensor, torch.as_tensor}
"""What reads a tensor, or copies a number from pageable memory, on CUDA; no operator shows it on a CPU."""

ALLOWED = {
    # Messages between CPUs, which no device takes part in.
    "session.py:begin_most",
    "session.py:answer",
    "collective_order.py:_exchange",
    # The sizes of messages between experts: once per layer, and again where a layer is recomputed.
    "expert_parallel.py:_counted",
}


def place() -> str:
    """Return the innermost function of the project that is running now."""
    for frame in reversed(traceback.extract_stack()):
        if frame.name.startswith("<"):
            continue  # a list or a lambda, inside of something that has a name
        if "/fsdptool" in frame.filename or "/transformers/" in frame.filename:
            return f"{Path(frame.filename).name}:{frame.name}"
    return "outside"


class Operators(TorchDispatchMode):
    """Counts operators that wait, by place."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in OPERATORS:
            self.found[place()] += 1
        return function(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Counts calls that wait, by place."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in CALLS:
            self.found[place()] += 1
        return function(*args, **(kwargs or {}))


def waits(name: str, folder: Path, recipe: Recipe, settings: dict[str, Any]) -> Counter[str]:
    """Take three steps and return the waits of the launches, by place."""
    torch.manual_seed(0)
    inputs = inputs_for(CASES[name], folder, recipe, **settings)
    session = open_session(inputs.settings, recipe.sharding.expert_parallel)
    assembled = assemble(inputs, session)
    found: Counter[str] = Counter()
    for step in range(3):
        batches = share(session, step, name, 4, torch.float32)
        with Operators(found), Calls(found):
            launched = assembled.stepper.launch(batches, rate=assembled.rate)
            if assembled.ema is not None:
                assembled.ema.update(launched.skipped)
        assert assembled.stepper.settle(launched).finite
    return found


CLIPPED: dict[str, Any] = {"learning_rate": 2e-3, "epsilon": 1e-6, "clip_grad_norm": 0.3}
WAYS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "full": ("causal", "full", {}, {}),
    "checkpointing": ("causal", "full", {}, {"activation_checkpointing": True}),
    "lora": ("causal", "lora", {"optimizer": Optimizer(**CLIPPED)}, {}),
    "unsharded": ("causal", "full", {"sharding": Sharding(accumulation="unsharded")}, {}),
    "average": ("causal", "full", {"optimizer": Optimizer(**CLIPPED), "ema": EmaChoice(decay=0.9)}, {}),
    "experts": ("qwen3 moe", "full", {"sharding": Sharding(expert_parallel=2)}, {}),
    "muon": ("causal", "full", {"optimizer": Optimizer(name="muon", **CLIPPED)}, {}),
    "adafactor": ("causal", "full", {"optimizer": Optimizer(name="adafactor", **CLIPPED)}, {}),
    "sgd": ("causal", "full", {"optimizer": Optimizer(name="sgd", momentum=0.9, **CLIPPED)}, {}),
    "noise schedule": ("epsilon", "full", {}, {}),
    "noise": ("flow", "full", {}, {}),
}


@pytest.mark.parametrize(
    "way",
    kept(WAYS, "full", "adafactor", "unsharded", "average", "experts", "muon", "noise"),
)
def test_a_launched_step_does_not_wait_for_its_device(pool: Pool, tmp_path: Path, way: str) -> None:
    name, method, changes, settings = WAYS[way]
    recipe, folder = prepare_case(CASES[name], tmp_path, method, **changes)
    for found in pool.run(waits, 2, name, folder, recipe, settings):
        assert {where: count for where, count in found.items() if where not in ALLOWED} == {}
        # Three steps of two micro-batches through two layers.
        assert found["expert_parallel.py:_counted"] == (12 if way == "experts" else 0)


def left_out(folder: Path, recipe: Recipe, steps: list[int], poisoned: int) -> dict[str, Tensor]:
    """Train on the named steps and return all states; one has gradients that are NaN on the last rank."""
    torch.manual_seed(0)
    inputs = inputs_for(CASES["causal"], folder, recipe)
    session = open_session(inputs.settings)
    assembled = assemble(inputs, session)
    last = session.rank == session.world_size - 1
    for step in steps:
        hooks = []
        if step == poisoned and last:
            for parameter in assembled.model.parameters():
                hooks.append(
                    parameter.register_post_accumulate_grad_hook(lambda p: local(p.grad).fill_(torch.nan))
                )
        launched = assembled.stepper.launch(share(session, step, "causal", 4, torch.float32), rate=2e-3)
        assert assembled.ema is not None
        assembled.ema.update(launched.skipped)
        for hook in hooks:
            hook.remove()
        assert assembled.stepper.settle(launched).finite == (step != poisoned)
    states = assembled.optimizer.state_tensors() | assembled.ema.tensors()
    return weights_of(assembled) | {f"state {name}": local(value).clone() for name, value in states.items()}


OPTIMIZERS = {
    "adamw": Optimizer(weight_decay=0.1, clip_grad_norm=0.3),
    "adamw, foreach": Optimizer(weight_decay=0.1, implementation="foreach"),
    "sgd": Optimizer(name="sgd", momentum=0.9, weight_decay=0.0),
    "muon": Optimizer(name="muon", weight_decay=0.1),
    "adafactor": Optimizer(name="adafactor", weight_decay=0.1),
}


@pytest.mark.parametrize(
    "optimizer",
    kept(OPTIMIZERS, "adamw", "muon", "adafactor"),
)
def test_a_step_that_is_not_finite_leaves_no_trace(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    """Neither in the parameters nor in the moments, counts and averages; also as the first step."""
    recipe, folder = prepare_case(
        CASES["causal"], tmp_path, "full", optimizer=OPTIMIZERS[optimizer], ema=EmaChoice(decay=0.9)
    )
    for poisoned in (0, 2):
        through = pool.run(left_out, 2, folder, recipe, [0, 1, 2, 3], poisoned)
        without = pool.run(left_out, 2, folder, recipe, [s for s in range(4) if s != poisoned], poisoned)
        for found, expected in zip(through, without, strict=True):
            assert found.keys() == expected.keys()
            assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def run_ahead(folder: Path, recipe: Recipe, ahead: bool, poison: int, stop_at: int | None) -> dict[str, Any]:
    """Run a whole loop, with or without launching steps before the last one is settled."""
    checkpointer = Memory(every=2)
    loop, log = looped(folder, recipe, checkpointer, poison=poison, stop_at=stop_at)
    loop.ahead = ahead
    flying, most = 0, 0
    stepper: Any = loop.assembled.stepper
    launch, settle = stepper.launch, stepper.settle

    def launched(*args: Any, **options: Any) -> Any:
        nonlocal flying, most
        flying += 1
        most = max(flying, most)
        return launch(*args, **options)

    def settled(step: Any) -> Any:
        nonlocal flying
        flying -= 1
        return settle(step)

    stepper.launch, stepper.settle = launched, settled
    try:
        ended: Any = loop.run()
    except WorkerError as error:
        ended = error.message
    found: dict[str, Any] = {
        "ended": ended if isinstance(ended, str) else dataclasses.asdict(ended),
        "saves": checkpointer.saves,
        "kept": None if checkpointer.kept is None else checkpointer.kept[1],
        "skipped": loop.state.skipped,
        "tokens": loop.state.tokens,
        "metrics": [(m.step, m.loss, m.grad_norm, m.lr, m.epoch, m.tokens, dict(m.extra)) for m in log.steps],
        "events": log.events,
    }
    if not isinstance(ended, str):
        found |= {"at": loop.batches.state_dict()["at"], "weights": weights_of(loop.assembled)}
    return {"found": found, "most": most}


@pytest.mark.parametrize(
    ("policy", "poison", "stop_at"),
    [("stop", -1, None), ("stop", 2, None), ("skip", 2, None), ("rollback", 4, None), ("stop", -1, 4)],
    ids=["plain", "stop", "skip", "rollback", "signal"],
)
def test_a_loop_that_runs_ahead_does_the_same(
    pool: Pool, tmp_path: Path, policy: str, poison: int, stop_at: int | None
) -> None:
    recipe, folder = prepare_case(
        CASES["causal"],
        tmp_path,
        "full",
        on_nonfinite=policy,
        steps=8,
        evaluation=Evaluation(every_steps=4),
        ema=EmaChoice(decay=0.9),
    )
    plain = pool.run(run_ahead, 2, folder, recipe, False, poison, stop_at)
    ahead = pool.run(run_ahead, 2, folder, recipe, True, poison, stop_at)
    assert {rank["most"] for rank in plain} == {1}
    assert {rank["most"] for rank in ahead} == {2 if policy != "rollback" else 3}
    for one, other in zip(plain, ahead, strict=True):
        expected, found = one["found"], other["found"]
        ours, theirs = found.pop("weights", {}), expected.pop("weights", {})
        assert repr(found) == repr(expected)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
