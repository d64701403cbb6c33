"""The options of ``emit-config`` and ``export``, as commands and as functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from fsdptool.options import REVISION, TRUST, Option
from fsdptool.records.plan import Plan


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
    component: Annotated[str | None, Option("Component of a pipeline.")]
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
