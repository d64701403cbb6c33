"""Steps beyond the plain case: precision, non-finite values, validation, averages, saved states."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, LLAMA, inputs_for, micro_batch, prepare_case
from pool import Pool
from ranks import share, weights_of
from torch.distributed.tensor import DTensor

from fsdptool.distributed.session import Session, open_session, resolve_dims
from fsdptool.distributed.shard import local
from fsdptool.errors import ConfigError, PlanError, WorkerError
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Ema as EmaChoice
from fsdptool.records.recipe import Evaluation, Lora, Method, Optimizer, Recipe, Schedule, Sharding
from fsdptool.records.sharding import FsdpSettings
from fsdptool.training.evaluate import evaluate
from fsdptool.training.optimizers.sharded import base_rate, rate
from fsdptool.training.state import Assembled
from fsdptool.training.step import LossScaler
from fsdptool.training.trainer import Trainer, assemble

ADAM = Optimizer(learning_rate=2e-3, epsilon=1e-6, weight_decay=0.0)


class Data:
    """Micro-batches of the causal case, with a position; ``poison`` is a step whose loss is NaN."""

    samples_per_epoch = 64

    def __init__(self, session: Session, poison: int = -1, steps: int | None = None) -> None:
        self.session, self.poison, self.steps, self.at = session, poison, steps, 0

    @property
    def samples(self) -> int:
        return 8 * self.at

    @property
    def epoch(self) -> float:
        return self.samples / self.samples_per_epoch

    def __iter__(self) -> Data:
        self.at = 0 if self.steps is not None else self.at
        return self

    def __next__(self) -> list[dict[str, Any]]:
        if self.steps is not None and self.at == self.steps:
            raise StopIteration
        self.at += 1
        return share(self.session, self.at - 1, "causal", 4, torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def close(self) -> None:
        """Nothing to end."""


class Memory:
    """A checkpointer that keeps one checkpoint in memory."""

    def __init__(self, every: int | None = None) -> None:
        self.every, self.saves = every, 0
        self.kept: tuple[Any, Any, Any] | None = None

    def due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def save(self, state: Any, *, wait: bool = False) -> None:
        self.saves += 1
        tensors = {name: local(tensor).clone() for name, tensor in state.tensors().items()}
        self.kept = (tensors, state.progress(), state.rank_tensors())

    def poll(self) -> None:
        """Nothing in flight."""

    def load(self, state: Any) -> None:
        return None

    def rollback(self, state: Any) -> int | None:
        if self.kept is None:
            return None
        tensors, progress, own = self.kept
        for name, tensor in state.tensors().items():
            local(tensor).copy_(tensors[name])
        state.restore(progress, own)
        return progress["step"]

    def close(self) -> None:
        """Nothing to wait for."""


class Log:
    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def memory(self, moments: dict[str, int]) -> None:
        """Nothing is measured here."""

    def step(self, metrics: Any) -> None:
        self.steps.append(metrics)


class Unmeasured:
    instrument = "none"

    def step(self, step: int) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def moment(self, name: str) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def last(self) -> tuple[None, None]:
        return None, None

    def moments(self) -> dict[str, int]:
        return {}


def opened(folder: Path, recipe: Recipe, **settings: Any) -> tuple[Assembled, Session]:
    torch.manual_seed(recipe.seed)
    inputs = inputs_for(CASES["causal"], folder, recipe, **settings)
    session = open_session(inputs.settings)
    return assemble(inputs, session), session


def looped(
    folder: Path,
    recipe: Recipe,
    checkpointer: Memory,
    *,
    poison: int = -1,
    stop_at: int | None = None,
    **settings: Any,
) -> tuple[Trainer, Log]:
    """Assemble a loop; ``poison`` makes one step's loss NaN on the last rank alone."""
    assembled, session = opened(folder, recipe, **settings)
    log, data = Log(), Data(session)
    inner = assembled.stepper.micro_loss

    class Poisoned:
        objective = inner.objective

        def __call__(self, model: Any, batch: Any, *observer: Any) -> Any:
            loss, extra = inner(model, batch, *observer)
            bad = data.at - 1 == poison and session.rank == session.world_size - 1
            return loss * (math.nan if bad else 1.0), extra

    assembled.stepper.micro_loss = Poisoned()  # type: ignore[assignment]

    class Stop:
        @property
        def requested(self) -> int:
            return 15 if data.at - 1 == stop_at and session.rank == session.world_size - 1 else 0

    parts = SimpleNamespace(events=log, stop=Stop(), checkpointer=checkpointer, meter=Unmeasured())
    return Trainer(recipe, assembled, data, Data(session, steps=2), parts, session), log


def run_policy(folder: Path, recipe: Recipe, poison: int) -> dict[str, Any]:
    loop, log = looped(folder, recipe, Memory(every=2), poison=poison)
    try:
        ended = loop.run()
    except WorkerError as error:
        return {"error": error.message}
    return {
        "status": ended.status,
        "step": ended.step,
        "at": loop.batches.state_dict()["at"],
        "skipped": loop.state.skipped,
        "losses": [metrics.loss for metrics in log.steps],
        "evaluated": [fields["step"] for kind, fields in log.events if kind == "evaluation"],
        "weights": weights_of(loop.assembled),
    }


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_nan_on_one_rank_is_every_ranks_decision(pool: Pool, tmp_path: Path, policy: str) -> None:
    recipe, folder = prepare_case(
        CASES["causal"], tmp_path, "full", on_nonfinite=policy, steps=6, evaluation=Evaluation(every_steps=2)
    )
    first, second = pool.run(run_policy, 2, folder, recipe, 3)
    if policy == "stop":
        assert first["error"] == second["error"] == "step 4: the loss is not finite"
        return
    assert first["status"] == second["status"] == "completed"
    assert first["evaluated"] == [2, 4, 6]
    assert all(torch.isfinite(tensor).all() for tensor in first["weights"].values())
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    if policy == "skip":
        assert (first["step"], first["skipped"], first["at"]) == (6, 1, 6)
        assert math.isnan(first["losses"][3])
    else:
        # Back to step 2, and on with the data after the bad batch.
        assert (first["step"], first["skipped"], first["at"]) == (6, 0, 8)


def run_stop(folder: Path, recipe: Recipe) -> dict[str, Any]:
    checkpointer = Memory()
    loop, _ = looped(folder, recipe, checkpointer, stop_at=2)
    ended = loop.run()
    return {"ended": dataclasses.asdict(ended), "saves": checkpointer.saves}


def test_a_stop_on_one_rank_stops_all_after_the_same_step(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", steps=6)
    for found in pool.run(run_stop, 2, folder, recipe):
        assert (found["ended"]["status"], found["ended"]["step"], found["ended"]["signal"]) == (
            "stopped",
            3,
            15,
        )
        assert found["saves"] == 1


def run_and_draw(folder: Path, recipe: Recipe, tensor: int) -> tuple[int, list[float]]:
    """Take two steps; returns the rank's place among the data and numbers that dropout would draw next."""
    loop, _ = looped(folder, recipe, Memory(), mesh=ParallelDims(tp=tensor))
    loop.run()
    return loop.session.data_rank, torch.rand(4).tolist()


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_with_other_samples_drop_other_elements(pool: Pool, tmp_path: Path, tensor: int) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", steps=2)
    drawn = pool.run(run_and_draw, 2, folder, recipe, tensor)
    by_data = dict(drawn)
    assert len(by_data) == 2 // tensor
    assert all(numbers == by_data[place] for place, numbers in drawn)
    assert len({tuple(numbers) for numbers in by_data.values()}) == len(by_data)


def run_validation(folder: Path, recipe: Recipe, reshard: bool) -> dict[str, Any]:
    import torch.nn.functional as functional

    assembled, session = opened(folder, recipe, reshard_after_forward=reshard)
    loop = Trainer(recipe, assembled, Data(session), Data(session, steps=2), parts_of(Log()), session)
    found = []
    for _ in range(2):
        found.append(loop.validation.evaluate(loop.state.step).loss)
        loop.step(10)
    found.append(loop.validation.evaluate(loop.state.step).loss)
    weights = weights_of(assembled)
    from reference import load, plain_model

    model = plain_model(CASES["causal"], LLAMA, torch.float32).eval()
    load(model, weights)
    total, count = 0.0, 0
    with torch.no_grad():
        for step in range(2):
            for index in range(4):
                batch = micro_batch(CASES["causal"], step, index)
                labels = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
                logits = model(batch["input_ids"]).logits
                total += float(
                    functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                )
                count += int((labels != -100).sum())
    return {"found": found, "expected": total / count}


def parts_of(log: Log) -> Any:
    return SimpleNamespace(
        events=log, stop=SimpleNamespace(requested=0), checkpointer=Memory(), meter=Unmeasured()
    )


@pytest.mark.parametrize("reshard", [True, False])
def test_validation_sees_the_current_weights_under_any_reshard(
    pool: Pool, tmp_path: Path, reshard: bool
) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", optimizer=ADAM)
    for result in pool.run(run_validation, 2, folder, recipe, reshard):
        first, second, third = result["found"]
        assert third == pytest.approx(result["expected"], rel=1e-5)
        assert len({first, second, third}) == 3


def run_without_targets(folder: Path, recipe: Recipe) -> dict[str, Any]:
    assembled, session = opened(folder, recipe)
    batch = {"input_ids": torch.arange(12)[None], "labels": torch.full((1, 12), -100)}
    outcome = assembled.stepper.run([batch], rate=0.0)
    found = evaluate(assembled.model, assembled.objective, [[batch]], session, assembled.stepper.order)
    return {"step": (outcome.weight, outcome.loss, outcome.finite), "validation": (found.items, found.loss)}


def test_nothing_to_predict_is_no_token_and_no_validation_loss(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", optimizer=ADAM)
    for found in pool.run(run_without_targets, 2, folder, recipe):
        assert found["step"] == (0, 0.0, True)
        assert found["validation"][0] == 0
        assert math.isnan(found["validation"][1])


def run_average(folder: Path, recipe: Recipe) -> dict[str, Any]:
    assembled, session = opened(folder, recipe)
    loop = Trainer(recipe, assembled, Data(session), None, parts_of(Log()), session)
    history = [weights_of(assembled)]
    for _ in range(3):
        loop.step(10)
        history.append(weights_of(assembled))
    averages = {n: t.full_tensor().clone() for n, t in assembled.ema.tensors().items()}
    with assembled.ema.swapped():
        swapped = weights_of(assembled)
    return {"history": history, "averages": averages, "swapped": swapped, "after": weights_of(assembled)}


def test_the_average_follows_its_formula_and_swaps_back(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", optimizer=ADAM, ema=EmaChoice(decay=0.9))
    found = pool.run(run_average, 2, folder, recipe)[0]
    for name, average in found["averages"].items():
        expected = found["history"][0][name]
        for weights in found["history"][1:]:
            expected = 0.9 * expected + 0.1 * weights[name]
        assert torch.allclose(average, expected, atol=1e-6), name
        assert torch.equal(found["swapped"][name], average)
        assert torch.equal(found["after"][name], found["history"][-1][name])


def run_utilisation(folder: Path, recipe: Recipe, peak: float | None) -> list[Any]:
    assembled, session = opened(folder, recipe)
    log = Log()
    loop = Trainer(
        recipe, assembled, Data(session), None, parts_of(log), session, step_flops=6e9, peak_flops=peak
    )
    loop.step(10)
    return log.steps


@pytest.mark.parametrize("peak", [None, 2e12])
def test_utilisation_is_the_plans_flops_over_all_devices_peak(
    pool: Pool, tmp_path: Path, peak: float | None
) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", optimizer=ADAM)
    (metrics,) = pool.run(run_utilisation, 2, folder, recipe, peak)[0]
    assert metrics.extra["flops_per_second"] == pytest.approx(6e9 / metrics.step_seconds)
    if peak is None:
        assert metrics.mfu is None
    else:
        assert metrics.mfu == pytest.approx(6e9 / (metrics.step_seconds * 2 * 2e12))


def run_precision(folder: Path, recipe: Recipe, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    assembled, session = opened(folder, recipe, **settings)
    losses, kinds = [], set()
    for step in range(steps):
        outcome = assembled.stepper.run(share(session, step % 2, "causal", 4, torch.float32), rate=2e-3)
        losses.append(outcome.loss)
    for parameter in assembled.model.parameters():
        kinds.add(str(parameter.dtype))
    scale = assembled.scaler.scale if assembled.scaler is not None else None
    return {"losses": losses, "dtypes": sorted(kinds), "scale": scale}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_fp32_masters(pool: Pool, tmp_path: Path, precision: str) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", optimizer=ADAM)
    plain = pool.run(run_precision, 2, folder, recipe, {}, 20)[0]
    mixed = pool.run(run_precision, 2, folder, recipe, {"mixed_precision": precision}, 20)[0]
    assert mixed["dtypes"] == ["torch.float32"]
    assert mixed["losses"][-1] < mixed["losses"][0]
    assert mixed["losses"] == pytest.approx(plain["losses"], rel=0.02)
    assert mixed["losses"] != plain["losses"]
    assert (mixed["scale"] is not None) == (precision == "fp16")


def run_overflow(folder: Path, recipe: Recipe) -> dict[str, Any]:
    assembled, session = opened(folder, recipe, mixed_precision="fp16")
    before = weights_of(assembled)
    assembled.scaler.scale = 2.0**40  # beyond fp16: the first steps must overflow and be skipped
    outcome = assembled.stepper.run(share(session, 0, "causal", 4, torch.float32), rate=2e-3)
    same = all(torch.equal(before[n], t) for n, t in weights_of(assembled).items())
    return {"finite": outcome.finite, "loss": outcome.loss, "same": same, "scale": assembled.scaler.scale}


def test_an_fp16_overflow_skips_the_step_and_halves_the_scale(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", optimizer=ADAM)
    for found in pool.run(run_overflow, 2, folder, recipe):
        assert not found["finite"]
        assert math.isfinite(found["loss"])
        assert found["same"]
        assert found["scale"] == 2.0**39


def run_states(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Save after two steps, go on, go back, go on again: the same two steps must follow."""
    assembled, session = opened(folder, recipe)
    checkpointer = Memory()
    loop = Trainer(recipe, assembled, Data(session), None, parts_of(Log()), session)
    for _ in range(2):
        loop.step(10)
    checkpointer.save(loop.state)
    first = [loop.step(10).loss for _ in range(2)]
    ended = weights_of(assembled)
    checkpointer.rollback(loop.state)
    second = [loop.step(10).loss for _ in range(2)]
    again = weights_of(assembled)
    tensors = loop.state.tensors()
    return {
        "losses": (first, second),
        "equal": all(torch.equal(ended[name], again[name]) for name in ended),
        "kinds": sorted({name.split("/")[0] for name in tensors}),
        "sharded": all(
            isinstance(tensor, DTensor)
            for name, tensor in tensors.items()
            if name.startswith("optimizer/") and not name.endswith("/step")
        ),
        "frozen": [name for name in tensors if name.startswith("model/") and "lora_" not in name],
    }


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_saved_states_continue_bit_for_bit(pool: Pool, tmp_path: Path, method: str, optimizer: str) -> None:
    chosen = Optimizer(name=optimizer, learning_rate=2e-3, momentum=0.9, weight_decay=0.0)
    recipe, folder = prepare_case(
        CASES["causal"], tmp_path, method, optimizer=chosen, ema=EmaChoice(decay=0.9)
    )
    found = pool.run(run_states, 2, folder, recipe)[0]
    assert found["losses"][0] == found["losses"][1]
    assert found["equal"]
    assert found["kinds"] == ["ema", "model", "optimizer"]
    assert found["sharded"] == (optimizer != "adafactor")  # column moments are whole
    assert (found["frozen"] == []) == (method == "lora")


def test_schedules_warm_up_and_fall() -> None:
    cosine = Schedule(name="cosine", warmup_steps=4, minimum_ratio=0.1)
    rates = [rate(cosine, step, 20) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[12] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[20] == pytest.approx(0.1)
    assert rate(Schedule(name="linear"), 5, 20) == pytest.approx(0.75)
    assert rate(Schedule(name="constant"), 999, None) == 1.0
    assert base_rate(Optimizer(learning_rate=1.0, scale_learning_rate="linear"), 8) == 8.0
    assert base_rate(Optimizer(learning_rate=1.0, scale_learning_rate="sqrt"), 16) == 4.0


def test_the_scaler_grows_after_good_steps() -> None:
    scaler = LossScaler(scale=8.0, interval=2)
    scaler.update(False)
    scaler.update(False)
    assert scaler.scale == 16.0
    scaler.update(True)
    again = LossScaler()
    again.load_state_dict(scaler.state_dict())
    assert (again.scale, again.good_steps) == (8.0, 0)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (ParallelDims(sp=2, dp_shard=1), "DeepSpeed"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_with_the_reason(sizes: ParallelDims, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_dims(FsdpSettings(mesh=sizes), 2)


def test_a_file_for_another_number_of_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="for 4 processes and the launch has 2"):
        resolve_dims(FsdpSettings(num_processes=4), 2)
    with pytest.raises(ConfigError, match="does not multiply to 2"):
        resolve_dims(FsdpSettings(mesh=ParallelDims(dp_replicate=3)), 2)


def refused(folder: Path, recipe: Recipe) -> str:
    try:
        opened(folder, recipe)
    except (ConfigError, PlanError) as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sharding": Sharding(reshard_after_forward=3)}, "is not a proper divisor of the 2 ranks"),
        ({"method": Method("lora", lora=Lora(base="nf4", targets=("q_proj",)))}, "nf4"),
        ({"method": Method("lora", lora=Lora(targets=("nowhere",)))}, "LoRA targets do not match"),
        ({"optimizer": Optimizer(name="adafactor", implementation="fused")}, "no fused kernel"),
    ],
)
def test_recipes_that_cannot_run_say_why_in_one_line(
    pool: Pool, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full")
    recipe = dataclasses.replace(recipe, **changes)
    for message in pool.run(refused, 2, folder, recipe):
        assert words in message
        assert "\n" not in message


@pytest.mark.slow
def test_detecting_first_leaves_initialisation_alone(tmp_path: Path) -> None:
    """A fresh interpreter that inspects before anything imports transformers still draws values."""
    import subprocess
    import sys

    from cases import write_model

    code = (
        "import sys; from fsdptool.source import resolve; from fsdptool.inspection import inspect;"
        "spec = resolve(sys.argv[1]); inspect(spec, use_cache=False);"
        "from fsdptool.distributed.initialisation import draw_blueprint;"
        "from fsdptool.families.registry import family_of;"
        "plan = draw_blueprint(lambda: family_of(spec).build(spec.config, model_class=spec.model_class),"
        " seed=0, library=spec.library);"
        "assert all(plan.notes.values()), [n for n, v in plan.notes.items() if not v]"
    )
    reference = write_model(tmp_path / "model", LLAMA)
    done = subprocess.run(
        [sys.executable, "-c", code, reference], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
