"""``fsdptool init``: a starter recipe and an accelerate YAML for a model, a method and data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import (
    Format,
    FormatOption,
    TrustOption,
    answer_line,
    check_free,
    print_document,
    say,
    show_progress,
    write_file,
)
from fsdptool.errors import ExitCode

if TYPE_CHECKING:
    from fsdptool.api.starter import Starter

_KINDS = {
    "chat": "conversations: the chat template is applied",
    "prompts": "prompts and answers: the loss covers the answers",
    "text": "text",
    "labels": "texts with labels",
    "pairs": "pairs of texts",
    "images": "images",
    "code": "code of your own, which was not run",
    "unread": "a dataset, which was not read: check its columns",
}


def command(
    reference: Annotated[
        str,
        typer.Argument(
            help="Model: family:flavour, Hugging Face id or folder; or a training file of another program."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Training data: file or folder, or the Hugging Face id of a dataset."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help="Method: full, lora or qlora (default: full, lora for an adapter)."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="GPU; default: this machine's GPU, or its CPU if it has none.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs per node.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes.")] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", help="Tokens per sample; default: the longest sample that was read."),
    ] = None,
    height: Annotated[int | None, typer.Option("--height", help="Image height in pixels.")] = None,
    width: Annotated[int | None, typer.Option("--width", help="Image width in pixels.")] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for recipe.yaml and accelerate.yaml.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    trust_remote_code: TrustOption = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Inspect a model and its data, plan the run, and write a recipe and a configuration for it."""
    from fsdptool.api.starter import prepare_starter
    from fsdptool.errors import ConfigError

    if method not in (None, "full", "lora", "qlora"):
        raise ConfigError(f"--method {method!r} is not supported here", help="choose full, lora or qlora")
    paths = (output / "recipe.yaml", output / "accelerate.yaml")
    for path in paths:
        check_free(path, force=force)
    options = {
        **{"reference": reference, "method": method, "gpu": gpu, "gpus": gpus, "nodes": nodes},
        **{"sequence_length": seq_len, "height": height, "width": width},
    }
    with show_progress() as progress:
        starter = prepare_starter(
            options, data=data, folder=output, trust_remote_code=trust_remote_code, progress=progress
        )
    if starter.recipe is None or starter.config is None:
        say(f"nothing was written: {reference} does not fit; `fsdptool plan` with the same options says why")
    else:
        write_file(paths[0], starter.recipe, force=force)
        write_file(paths[1], starter.config, force=force)
    if format is Format.JSON:
        print_document(_document(starter, paths))
    elif starter.recipe is not None:
        _print(starter, paths, reference, trust_remote_code)
    return int(ExitCode.CLEAN if starter.recipe is not None else ExitCode.FINDINGS)


def _print(starter: Starter, paths: tuple[Path, Path], reference: str, trusted: bool) -> None:
    from fsdptool.report.plan_words import brief, headline, need, shown, spare_memory, speed
    from fsdptool.source.references import is_import

    recipe, config = (shlex.quote(str(path)) for path in paths)
    named = is_import(reference) or (starter.look is not None and starter.look.kind == "code")
    flag = "" if not trusted else " --allow-import" if named else " --trust-remote-code"
    plan = starter.plan
    candidate = shown(plan)
    answer_line(headline(plan))
    answer_line(need(candidate))
    answer_line(f"configuration: {brief(candidate.settings)}")
    if candidate.step_seconds is not None:
        answer_line(f"estimated speed: {speed(candidate)}")
    for line in spare_memory(plan):
        answer_line(line)
    if starter.look is not None:
        columns = f"; columns {', '.join(starter.look.columns)}" if starter.look.columns else ""
        answer_line(f"data: {_KINDS[starter.look.kind]}{columns}")
    answer_line(f"wrote {recipe} and {config}")
    answer_line("next:")
    if starter.look is None:
        answer_line(f"  name your data under data: in {recipe}")
    elif starter.latents:
        answer_line(f"  fsdptool precompute {recipe}{flag}")
    answer_line(f"  fsdptool train {recipe} --config {config}{flag} --dry-run")
    answer_line(f"  fsdptool train {recipe} --config {config}{flag}")
    if starter.on_cpu:
        say("note: no GPU is named and this machine has none, so the files are for its CPU; --gpu names one")
    if not starter.has_weights:
        source = f"give {starter.hub_id}" if starter.hub_id else "give a Hub id or a folder"
        say(f"note: {reference} has no weights, so training starts at random; {source} to start from weights")


def _document(starter: Starter, paths: tuple[Path, Path]) -> dict[str, object]:
    from fsdptool.records.command_documents import StarterReport
    from fsdptool.records.diagnostic import envelope

    written = starter.recipe is not None
    look = starter.look
    report = StarterReport(
        recipe=str(paths[0]) if written else None,
        config=str(paths[1]) if written else None,
        verdict=starter.plan.verdict,
        data=look.kind if look is not None else None,
        columns=look.columns if look is not None else (),
        weights=starter.has_weights,
        cpu=starter.on_cpu,
    )
    return envelope("init", report, report)
