"""A row for the public collection from a run folder, or from a log with the configuration it ran.

Nothing is copied that could name a person, a machine, a project or data: a row holds numbers, flags, and
strings of closed lists. The model becomes a model of the catalogue with other sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.families.registry import load_registry
from fsdptool.files.values import read_own_json
from fsdptool.inspection import inspect
from fsdptool.modeling.compilation import decide_compilation
from fsdptool.modeling.fused_loss import decide_fused_loss
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning.candidate.point import point_of
from fsdptool.planning.compare import read_summary
from fsdptool.planning.hardware import find_gpu
from fsdptool.planning.request.inputs import read_request
from fsdptool.planning.request.options import Options
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.codec import to_json
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.shared_row import SharedFigures, SharedProgram, SharedRow
from fsdptool.runs.events import largest_peak, read_lines
from fsdptool.runs.folder import is_run_folder, read_inputs, read_start
from fsdptool.runs.reported import read_reported
from fsdptool.source import resolve, resolve_choice

_GIB = 2**30
_TARGETS = frozenset(
    {
        *("all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("qkv_proj", "gate_up_proj", "c_attn", "c_proj", "c_fc", "query", "key", "value", "dense"),
        *("to_q", "to_k", "to_v", "to_out.0", "qkv", "fc1", "fc2", "proj"),
    }
)
"""Names of layers that libraries give, of which a row may name targets of LoRA."""

_VERSION = re.compile(r"\d{1,4}(?:\.\d{1,4}){1,3}")


def share(
    source: Path, *, gpu: str, gpus: int | None = None, nodes: int = 1, config: Path | None = None
) -> SharedRow:
    """Return the row of a run.

    Args:
        source: A run folder, or the log of a program.
        gpu: Name of the GPU it ran on, however it is spelled.
        gpus: GPUs of a node; None takes the number that the run folder says.
        nodes: Number of nodes.
        config: The configuration that the log's run was started with.

    Raises:
        PlanError: Something is missing, or the model is none of the catalogue's architectures.
        StorageError: The source cannot be read.
    """
    name = find_gpu(gpu).gpu.name
    if is_run_folder(source):
        return _of_folder(source, name, gpus, nodes)
    if config is None or gpus is None:
        raise PlanError(
            f"{source} is a log, which does not say what it ran",
            help="give its configuration and its GPUs: --config FILE --gpus 8",
        )
    total = gpus * nodes
    program, figures = read_reported(source, total)
    options = Options(reference=str(config), gpu=name, gpus=gpus, nodes=nodes, search=False)
    inputs = read_request(options).inputs
    run = resolve_run(inputs.recipe, inputs.settings, ranks=total, loop=inputs.loop)
    spec = resolve_choice(run.recipe.model)
    return _row(program, name, total, gpus, spec, run, figures, {})


def _of_folder(folder: Path, gpu: str, gpus: int | None, nodes: int) -> SharedRow:
    inputs, start, summary = read_inputs(folder), read_start(folder), read_summary(folder)
    per_node = gpus or max(start.world_size // nodes, 1)
    if per_node * nodes != start.world_size:
        raise PlanError(
            f"{folder} ran on {start.world_size} processes, not on {nodes} x {per_node}",
            help="give --gpus and --nodes as the run had them",
        )
    run = resolve_run(inputs.recipe, inputs.settings, ranks=start.world_size)
    speeds, metrics = summary.get("throughput", {}), list(read_lines(folder / "metrics.jsonl"))
    reserved = [
        line["memory_reserved_peak_bytes"] for line in metrics if line.get("memory_reserved_peak_bytes")
    ]
    peak = max(reserved) if reserved else largest_peak(summary.get("measured_peak_bytes", ()), metrics)

    def each(name: str) -> float | None:
        value = speeds.get(name)
        return round(value / start.world_size, 4) if isinstance(value, (int, float)) else None

    figures = SharedFigures(
        tokens_per_second_and_gpu=each("tokens_per_second"),
        samples_per_second_and_gpu=each("samples_per_second"),
        peak_gib=round(peak / _GIB, 3) if peak else None,
        peak_kind=("reserved" if reserved else "allocated") if peak else None,
    )
    if figures.tokens_per_second_and_gpu is None and figures.samples_per_second_and_gpu is None:
        raise PlanError(f"{folder} has measured no throughput", help="share a run that took a few steps")
    environment = read_own_json(folder / "environment.json") if (folder / "environment.json").exists() else {}
    libraries = environment.get("libraries", {}) if isinstance(environment, dict) else {}
    return _row("fsdptool", gpu, start.world_size, per_node, inputs.spec, run, figures, libraries)


def _row(
    program: SharedProgram,
    gpu: str,
    gpus: int,
    per_node: int,
    spec: ModelSpec,
    run: ResolvedRun,
    figures: SharedFigures,
    libraries: Mapping[str, Any],
) -> SharedRow:
    model, overrides, left_out = _model(spec)
    anatomy = inspect(spec)
    run = decide_fused_loss(anatomy, decide_compilation(anatomy, run)[0])[0]
    recipe, settings, point = run.recipe, run.settings, point_of(run)
    method: dict[str, Any] = {"name": recipe.method.name}
    if recipe.method.lora is not None:
        lora = recipe.method.lora
        method["lora"] = {"rank": lora.rank, "base": lora.base, "adapters": lora.adapters}
        targets = (lora.targets,) if isinstance(lora.targets, str) else lora.targets or ()
        if targets and set(targets) <= _TARGETS:
            method["lora"]["targets"] = lora.targets if isinstance(lora.targets, str) else list(targets)
        elif targets:
            left_out.append("method.lora.targets")
    batch = {key: value for key, value in to_json(recipe.batch).items() if value is not None}
    shared = {
        "model": {"reference": model, "overrides": overrides, "weights": "random"},
        "method": method,
        "data": {
            "source": "synthetic",
            "packing": recipe.data.packing,
            "document_mask": recipe.data.document_mask,
        },
        "objective": {
            "fused": bool(recipe.objective.fused),
            "options": {
                key: value
                for key, value in recipe.objective.options.items()
                if isinstance(value, (bool, int))
            },
        },
        "batch": batch,
        "optimizer": {"name": recipe.optimizer.name, "implementation": recipe.optimizer.implementation},
        "sharding": {
            "layout": point.layout,
            "reduce_dtype": point.reduce_dtype,
            "accumulation": point.gradients,
            "compile": bool(recipe.sharding.compile),
        },
    }
    if recipe.method.distillation is not None:
        raise PlanError("runs with a teacher are not shared", help="share a run of another method")
    options: dict[str, Any] = {
        "precision": settings.mixed_precision,
        "checkpointing": point.checkpointing,
        "reshard": point.reshard_after_forward,
        "hsdp": f"{point.dp_replicate}x{point.dp_shard}",
        **{name: getattr(point, name) for name in ("cp", "tp", "ep") if getattr(point, name) > 1},
        "offload": point.cpu_offload,
        "prefetch": point.prefetch,
    }
    return SharedRow(
        program=program,
        gpu=gpu,
        gpus=gpus,
        gpus_per_node=per_node,
        model=model,
        parameters=anatomy.total_parameters,
        recipe=shared,
        options=options,
        published=figures,
        libraries={
            name: match[0]
            for name, version in libraries.items()
            if name in ("torch", "transformers", "diffusers", "peft", "accelerate")
            and (match := _VERSION.match(str(version))) is not None
        },
        left_out=tuple(sorted(left_out)),
    )


def _model(spec: ModelSpec) -> tuple[str, dict[str, Any], list[str]]:
    """Return a model of the catalogue, what its sizes are replaced by, and keys of other differences.

    Raises:
        PlanError: No model of the catalogue has the class.
    """
    registry = load_registry()
    names = (
        list(registry.get(spec.family).flavours()) if spec.family in {f.name for f in registry.all()} else []
    )
    names = [spec.flavour] if spec.flavour in names else names
    for flavour in names:
        base = resolve(f"{spec.family}:{flavour}")
        if base.model_class == spec.model_class:
            break
    else:
        raise PlanError(
            f"no model of the catalogue is a {spec.model_class}",
            help="share runs of the models that `fsdptool families` lists",
        )
    overrides: dict[str, Any] = {}
    left_out = []
    for key, ours in base.config.items():
        value = spec.config.get(key, ours)
        if value == ours or key.endswith("_token_id"):
            continue
        if isinstance(value, (bool, int, float)) and isinstance(ours, (bool, int, float)):
            overrides[key] = value
        elif not key.startswith("_") and key not in ("architectures", "transformers_version", "torch_dtype"):
            left_out.append(f"model.{key}")
    return f"{spec.family}:{flavour}", overrides, left_out


def row_text(row: SharedRow) -> str:
    """Return a row as the text of its file."""
    return json.dumps(to_json(row), indent=1) + "\n"
