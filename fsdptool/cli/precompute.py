"""``fsdptool precompute``: compute the latents and text embeddings of a diffusion recipe once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, TrustOption, answer_line, print_document, say


def command(
    recipe: Annotated[
        Path, typer.Argument(help="The recipe (YAML), with data.source: images.", metavar="RECIPE")
    ],
    processes: Annotated[
        int,
        typer.Option(
            "--processes", help="Processes on this machine; those of torchrun and Slurm are detected."
        ),
    ] = 1,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="cpu, cuda or cuda:N; default: one GPU per process, or the CPU without GPUs."
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Encode the images and captions of RECIPE with the pipeline's VAE and text encoders.

    Continues where an earlier call stopped. Training finds the result automatically.
    """
    from fsdptool.api.runs import prepare_precompute
    from fsdptool.runs.signals import handle_stop_signals
    from fsdptool.training.data.encoded import precompute_report, run_processes

    with handle_stop_signals(
        "all shards were encoded", "run the command again: it continues with the missing shards"
    ):
        work = prepare_precompute(recipe, trust_remote_code=trust_remote_code)
        done = run_processes(work, processes=processes, device=device, tell=say)
    body = precompute_report(done, device or "auto")
    if format is Format.JSON:
        from fsdptool.records.diagnostic import envelope

        print_document(envelope("precompute", {"key": work.key}, body))
        return 0
    answer_line(f"{done.pictures} pictures in {done.shards} shards, {done.made} encoded now")
    for bucket, count in done.buckets:
        frames = f" x {bucket.frames} frames" if bucket.frames > 1 else ""
        answer_line(f"  {bucket.height} x {bucket.width}{frames}: {count}")
    state = "complete" if done.finished else "incomplete: other processes are still encoding shards"
    answer_line(f"{state}: {done.folder}")
    return 0
