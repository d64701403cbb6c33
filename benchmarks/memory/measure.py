"""Measure what one setting allocates on the CPU: one process, or one rank of several.

Instrument: torch's own allocator events. The CPU allocator reports every allocation and free to
the profiler (``[memory]`` events with bytes, ``torch.profiler`` with ``profile_memory=True``); their
running sum, started before the model exists, is the number of bytes alive. The peak is taken over step 2.

``fake``: one process acts as rank 0 of N over torch's ``fake`` process group: collectives do nothing,
everything else is real. ``gloo``: real ranks.

Run as ``python benchmarks/memory/measure.py SETTING_JSON OUT_JSON``; under gloo once per rank, with
``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from settings import Setting, inputs_of, read_setting
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from fsdptool.distributed.session import open_session
from fsdptool.distributed.shard import reshard_all
from fsdptool.families.registry import family_of
from fsdptool.families.synthetic import synthesise
from fsdptool.modeling.methods import Teacher, method_of
from fsdptool.modeling.objective import objective_for
from fsdptool.records.run import RunPhase
from fsdptool.runs.folder import RunInputs
from fsdptool.training.memory_meter import settled_collectives
from fsdptool.training.optimizers.sharded import build_optimizer
from fsdptool.training.step import Stepper
from fsdptool.training.trainer import build_sharded

STEPS = 2
SETTLED = 4
"""Steps, if ``reshard_after_forward`` is a number: it counts as soon as the order of units is settled."""


class Undaunted(Stepper):
    """Takes every step: over ``fake`` ranks, gathered values are whatever memory contained.

    Such ranks say nothing, either: they need what this one needs.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if dist.get_backend() == "fake":
            ranks = self.session.world_size
            self.order._exchange = lambda wanted: [wanted] * ranks  # type: ignore[method-assign]

    def _sum(self, total: Any, sums: Any) -> Any:
        return torch.ones_like(super()._sum(total, sums))


def measure(setting: Setting, inputs: RunInputs | None = None) -> dict[str, Any]:
    """Run the setting's steps and return the peak of the last one with the levels around it.

    Args:
        setting: The row.
        inputs: What ``inputs_of`` returns for it, if a caller has it already.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if setting.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.ranks)
    with (
        settled_collectives(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
    ):
        _run(setting, inputs or inputs_of(setting))
    return _read(profiler, steps_of(setting))


def steps_of(setting: Setting) -> int:
    """Return how many steps a setting takes, of which the last one is measured."""
    whole = not isinstance(setting.reshard, bool)
    return SETTLED if whole and setting.backend == "gloo" else STEPS


def _run(setting: Setting, inputs: RunInputs) -> None:
    session = open_session(inputs.settings)
    spec, recipe, plan = inputs.spec, inputs.recipe, inputs.units
    objective = objective_for(recipe, spec)
    model = build_sharded(spec, recipe.model, plan, inputs.settings, session, recipe=recipe, seed=0)[0]
    _own_storage(model)
    teacher: Teacher | None = None
    if inputs.teacher_spec is not None and inputs.teacher_units is not None:
        distillation = recipe.method.distillation
        assert distillation is not None
        frozen = build_sharded(
            inputs.teacher_spec,
            distillation.teacher,
            inputs.teacher_units,
            inputs.settings,
            session,
            recipe=None,
            seed=0,
        )[0]
        _own_storage(frozen)
        teacher = Teacher(frozen, objective_for(recipe, inputs.teacher_spec), reshard_all)
    optimizer = build_optimizer(recipe.optimizer, list(model.named_parameters()), rate=1e-4)
    stepper = Undaunted(
        model,
        method_of(recipe).micro_loss(recipe, objective, teacher),
        optimizer,
        session,
        clip=recipe.optimizer.clip_grad_norm,
        unsharded=recipe.sharding.accumulation == "unsharded",
    )
    stepper.moment = lambda phase: record_function(f"PHASE {phase}")
    specs = family_of(spec).batch_spec(spec.config, recipe)
    generator = torch.Generator().manual_seed(session.rank)
    gc.disable()
    for step in range(steps_of(setting)):
        batches = [synthesise(specs, generator) for _ in range(recipe.batch.accumulation)]
        for batch in batches if setting.padded else ():
            if "attention_mask" in batch:
                batch["attention_mask"][0, -1] = 0
        gc.collect()
        with record_function(f"STEP {step}"):
            stepper.run(batches, rate=1e-4)
        del batches


def _own_storage(model: torch.nn.Module) -> None:
    """Give every shard its own memory.

    On the CPU a shard cut from a whole initial value is a view of it until a first checkpoint is
    loaded; on a GPU the copy to the device cuts it. The figures are to stand for training, not for that.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            shard = parameter._local_tensor
            if shard.untyped_storage().nbytes() > shard.numel() * shard.element_size():
                parameter._local_tensor = shard.clone()


def _read(profiler: Any, steps: int) -> dict[str, Any]:
    changes, spans = [], {}
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(("STEP ", "PHASE ")):
            # Of a phase, the last one counts: it is of the last step.
            spans[name] = (event.start_ns(), event.start_ns() + event.duration_ns())
    changes.sort(key=lambda change: change[0])
    begin, end = spans[f"STEP {steps - 1}"]
    backward = spans[f"PHASE {RunPhase.BACKWARD}"][0]
    level = peak = resting = saved = when = 0
    for time, size in changes:
        level += size
        if time <= begin:
            resting = level
        if time <= backward:
            saved = level
        if begin <= time <= end and level > peak:
            peak, when = level, time
    return {
        "peak_bytes": peak,
        "resting_bytes": resting,
        "backward_bytes": saved,
        "peak_at": (when - begin) / max(end - begin, 1),
        "events": len(changes),
    }


def main() -> None:
    """Measure the setting named on the command line."""
    setting = read_setting(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    result = measure(setting)
    result["rank"] = int(os.environ.get("RANK", "0"))
    if result["rank"] == 0:
        Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
