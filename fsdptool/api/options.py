"""The options of ``detect``, ``emit-config``, ``export`` and ``migrate``, as commands and as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from fsdptool.options import COMPONENT, DIALECT, REVISION, TRUST, Option
from fsdptool.records.plan import Plan


class InspectionOptions(TypedDict, total=False):
    """Every option of ``detect`` that says which model is read, and how."""

    # fmt: off
    wrap: Annotated[Sequence[str], Option("Wrap these classes instead, for example A,B.", default=())]
    exclude: Annotated[Sequence[str], Option("Never wrap these classes.", default=())]
    revision: Annotated[str | None, REVISION]
    component: Annotated[str | None, COMPONENT]
    overrides: Annotated[Mapping[str, Any] | None, Option(
        "Replace a configuration value: KEY=JSON (repeatable).", flags=("--override",))]
    trust_remote_code: Annotated[bool, TRUST]
    refresh: Annotated[bool, Option("Ignore and overwrite the cached result.", default=False)]
    # fmt: on


class DivisionOptions(TypedDict, total=False):
    """Every option of ``detect`` that says how ranks divide the model that is shown."""

    # fmt: off
    world_size: Annotated[int | None, Option(
        "Ranks that share the parameters: list those that shard unevenly.", minimum=1)]
    layout: Annotated[str, Option(
        "List the FSDP units of this layout", choices=("native", "accelerate"), default="native")]
    tp: Annotated[int | None, Option("Show how N tensor-parallel ranks divide the model.", minimum=1)]
    sequence_parallel: Annotated[bool, Option(
        "With --tp: also divide the hidden states along the sequence.", default=False)]
    ep: Annotated[int | None, Option("Show how N expert-parallel ranks divide the experts.", minimum=1)]
    # fmt: on


class DetectionOptions(InspectionOptions, DivisionOptions, total=False):
    """Every option of ``detect`` but those that say what is shown, and where."""


class MigrationOptions(TypedDict, total=False):
    """Every option of ``migrate`` that says what a file becomes."""

    # fmt: off
    to: Annotated[str | None, Option(
        "Write for another program (axolotl, trl, ...) or in a dialect (accelerate, env, ...).")]
    dialect: Annotated[str | None, DIALECT]
    # fmt: on


class EmissionOptions(TypedDict, total=False):
    """Every option of ``emit-config`` but those that say where the text goes."""

    # fmt: off
    reference: Annotated[str | None, Option(
        "Model: family:flavour, Hugging Face id or folder; or a training file of another program.")]
    plan: Annotated[str | Path | Plan | None, Option("Plan written by `fsdptool plan -o`.")]
    candidate: Annotated[str | None, Option("Candidate of the plan; default: the selected one.")]
    to: Annotated[str | None, Option(
        "Write the plan's whole run for a program (axolotl, trl, ...) instead of accelerate's settings.")]
    preset: Annotated[str | None, Option(
        "Start from a preset; default for a model: single-node.", flags=("--preset", "--from"))]
    wrap: Annotated[Sequence[str], Option("Wrap this class (repeatable).", default=())]
    exclude: Annotated[Sequence[str], Option("Never wrap this class (repeatable).", default=())]
    processes: Annotated[int | None, Option(
        "Total number of processes.", flags=("--processes", "--gpus"))]
    nodes: Annotated[int | None, Option("Number of nodes.")]
    precision: Annotated[str | None, Option("Mixed precision", choices=("no", "fp16", "bf16", "fp8"))]
    cpu: Annotated[bool, Option("Train on the CPU.", default=False)]
    tp: Annotated[int | None, Option("Tensor-parallel ranks; a divisor of the number of processes.")]
    layout: Annotated[str, Option(
        "FSDP unit layout", choices=("native", "accelerate"), default="native")]
    revision: Annotated[str | None, REVISION]
    component: Annotated[str | None, COMPONENT]
    trust_remote_code: Annotated[bool, TRUST]
    # fmt: on


class ExportOptions(TypedDict, total=False):
    """Every option of ``export`` but the run and the folder to write."""

    # fmt: off
    checkpoint: Annotated[str | None, Option("Checkpoint folder; default: the newest valid one.")]
    merge: Annotated[bool, Option("Merge LoRA adapters into the base.", default=False)]
    ema: Annotated[bool, Option("Export the moving average of the weights.", default=False)]
    dtype: Annotated[str | None, Option(
        "dtype of the weights", choices=("float32", "bfloat16", "float16", "float64"))]
    max_shard_size: Annotated[str | int, Option(
        "Maximum size of a file, for example 5GB or 500MB.", default="5GB")]
    force: Annotated[bool, Option("Replace an existing export.", default=False)]
    trust_remote_code: Annotated[bool, TRUST]
    # fmt: on
