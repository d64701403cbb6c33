"""The stages of the breadth sweep, for one class each.

1. ``plain``: transformers itself builds the class and runs one forward and backward on synthetic token ids.
2. ``plan``: fsdptool resolves the saved ``config.json``, chooses wrap classes, traces and simulates a step.
3. ``step``: fsdptool's trainer takes two steps on two gloo ranks; the allocator's peak in the second one is
   the measured memory.
4. ``scratch``: the same without oneDNN, whose bf16 kernels allocate scratch on the CPU that no plan contains.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))

import media
from classes import LENGTH, TEXT_GROUPS, Subject, small_config
from settings import Setting, inputs_of

from fsdptool.errors import ConfigError
from fsdptool.families.bases.batches import vocabulary
from fsdptool.memory import footprint, trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.runs.folder import RunInputs

RANKS = 2
BATCH = 2
LARGEST = 30_000_000
"""Parameters above which a configuration does not count as small."""


def configuration(subject: Subject) -> Any:
    """Return the small transformers configuration of a class."""
    import transformers

    raw = small_config(subject)
    cls = getattr(transformers, subject.name).config_class
    config = cls(**{key: value for key, value in raw.items() if key not in ("architectures", "model_type")})
    config.architectures = [subject.name]
    return config


def plain(subject: Subject) -> dict[str, Any]:
    """Train the class one step with transformers alone."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = configuration(subject)
    with torch.device("meta"):
        size = sum(p.numel() for p in getattr(transformers, subject.name)._from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"the reduced configuration has {size:,} parameters")
    model = getattr(transformers, subject.name)._from_config(config).train()
    if subject.group not in TEXT_GROUPS:
        return {"parameters": size, **media.tried(subject, model)}
    ids = torch.randint(5, vocabulary(config) - 1, (BATCH, LENGTH))
    arguments: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if subject.group == "causal-lm":
        arguments["use_cache"] = False
    else:
        arguments["attention_mask"] = torch.ones_like(ids)
    loss = model(**arguments).loss
    if loss is None:
        raise ValueError("the class returns no loss for token ids and labels")
    loss.mean().backward()
    value = float(loss.mean())
    if not math.isfinite(value):
        raise ValueError(f"the loss is {value}")
    return {"parameters": size, "loss": round(value, 4)}


def setting_of(subject: Subject, folder: str, precision: str, inputs: Any = None) -> Setting:
    """Save the small configuration as a user would and return the recipe on two gloo ranks.

    Args:
        subject: The class.
        folder: Where to save.
        precision: ``bf16`` or ``fp32``.
        inputs: The tensors of a micro-batch, of classes that read images or sound.
    """
    configuration(subject).save_pretrained(folder)
    return Setting(
        objective="module" if inputs else None,
        objective_options={"inputs": inputs} if inputs else {},
        name=subject.name,
        family=subject.group,
        reference=folder,
        backend="gloo",
        ranks=RANKS,
        precision=precision,
        batch={"micro_batch": BATCH, "sequence_length": LENGTH},
        padded=True,
    )


def plan(subject: Subject, inputs: Any = None) -> dict[str, Any]:
    """Detect, trace and simulate; in fp32 if the model cannot run in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        row = _plan(setting_of(subject, folder, "bf16", inputs))
        if row["good"]:
            return row
        return {**_plan(setting_of(subject, folder, "fp32", inputs)), "bf16": row["unknowns"]}


def _plan(setting: Setting) -> dict[str, Any]:
    inputs = inputs_of(setting)
    try:
        traced = trace(inputs.spec, resolve_run(inputs.recipe, inputs.settings), use_cache=False)
    except ConfigError as error:  # of a forward that converts its parameters
        return {"good": False, "unknowns": [error.message]}
    predicted = footprint(
        traced,
        inputs.units,
        inputs.settings.mesh.resolve(setting.ranks),
        inputs.recipe,
        profile="cpu-gloo",
    )
    return {
        "objective": inputs.recipe.objective.name or inputs.spec.objective,
        "units": len(inputs.units.units),
        "precision": setting.precision,
        "good": traced.known and predicted.allocated_peak_bytes is not None,
        "predicted_bytes": predicted.allocated_peak_bytes,
        "unknowns": list(predicted.unknowns),
    }


def step(
    subject: Subject, run: Callable[..., list[Any]], precision: str, onednn: bool = True, inputs: Any = None
) -> dict[str, Any]:
    """Measure two steps on two ranks; ``run`` calls a function on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_of(subject, folder, precision, inputs)
        results = run(_measure, RANKS, setting, inputs_of(setting), onednn, timeout=300.0)
    return {
        "measured_bytes": [result["peak_bytes"] for result in results],
        "rank_cpu_seconds": round(max(result["cpu_seconds"] for result in results), 2),
    }


def _measure(setting: Setting, inputs: RunInputs, onednn: bool) -> dict[str, Any]:
    import torch
    from measure import measure

    begun = time.process_time()
    with torch.backends.mkldnn.flags(enabled=onednn):
        return {**measure(setting, inputs), "cpu_seconds": time.process_time() - begun}


def row_of(stage: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run a stage and return what it found, or its error in one line."""
    begun = time.process_time()
    try:
        result = {"good": True, **stage(*arguments)}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:]]
        # A rank that fails sends its traceback: the last line says what happened.
        text = next(reversed(str(error).strip().splitlines()), "")
        result = {"good": False, "error": f"{type(error).__name__}: {text[-400:]}", "where": where}
    return {**result, "cpu_seconds": round(time.process_time() - begun, 2)}
