"""``fsdptool plan``: per-rank memory before a GPU is rented, and the fastest settings that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fsdptool.cli.options import (
    RowFormat,
    check_output,
    command_line_options,
    ended_by_interrupt,
    has_pair,
    override_values,
    print_document,
    refuse,
    say,
    show_progress,
    takes,
    write_file,
)
from fsdptool.errors import ExitCode
from fsdptool.planning.request.options import Options, declared
from fsdptool.scripts import SCRIPTS

if TYPE_CHECKING:
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.plan import Plan

_ANSWER = "Answer"


@takes(Options, argument="reference")
def command(
    context: typer.Context,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            help="Recompute a saved plan; exit with 1 if anything has changed.",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            help="Plan every value of a numeric option: seq-len=4096,8192 (repeatable).",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show the limiting factor and every candidate.", rich_help_panel=_ANSWER
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write plan.json, .html, .svg or .csv (rows of candidates); a sweep: .json, .csv or .svg.",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file.", rich_help_panel=_ANSWER)
    ] = False,
    format: Annotated[
        RowFormat,
        typer.Option(
            "--format",
            help="Output format; tsv and csv print one row per candidate.",
            rich_help_panel=_ANSWER,
        ),
    ] = RowFormat.TEXT,
    **options: Any,
) -> int:
    """Predict the memory of every rank and the step time, and find the fastest configuration that fits.

    Needs no GPU and no weights. Exit status: 0 fits, 1 does not fit, 5 unknown.

    Examples:

      fsdptool plan llama3:8b --gpu H100-80GB-SXM --gpus 8 --seq-len 4096 --micro-batch 1 -o plan.json

      fsdptool plan train.yaml --gpu A100-80GB-SXM --gpus 4

      fsdptool plan --gpu A100-80GB-SXM --gpus 4 -- trl sft --model_name_or_path Qwen/Qwen3-8B

      fsdptool plan train.py --gpu A100-80GB-SXM --gpus 4 -- --batch-size 2

      fsdptool plan --recipe recipe.yaml --config accelerate.yaml --profile cpu-gloo

      fsdptool plan llama3:8b --gpu H100-80GB-SXM --gpus 8 --sweep seq-len=4096,8192,16384 -o sweep.svg

      fsdptool plan --check plan.json
    """
    if check is not None:
        others = (
            name
            for name in command_line_options(context)
            if name not in ("check", "format", "trust_remote_code")
        )
        reason = "not allowed with --check, which uses the inputs of the saved plan"
        refuse(context, sorted(others), reason, "leave it out")
        return check_saved(check, format, trust_remote_code=options["trust_remote_code"])
    from fsdptool.planning.sweep import read_sweep

    values = read_sweep(sweep or ())
    check_output(output, force, _SWEEP_SUFFIXES if values else _PLAN_SUFFIXES)
    from fsdptool.planning.plan import make_plan
    from fsdptool.planning.request.inputs import read_request

    # A flag without its opposite (--max-batch) is left out where it is not given.
    off = {name for name, value in options.items() if value is False and not has_pair(declared()[name])}
    options = {n: v for n, v in options.items() if v is not None and n not in off}
    if options.get("overrides"):
        options["overrides"] = override_values(options["overrides"])
    described = _described(options, context.args) if context.args else None
    if values and described is None:
        return answer_sweep(cast("Options", options), values, output, force=force, format=format)
    if values:
        refuse(context, ["sweep"], "not allowed with a command line", "write the command line to a file")
    with show_progress() as progress, ended_by_interrupt() as stop:
        plan = make_plan(read_request(cast("Options", options), described), progress=progress, stop=stop)
    # A command line ends the options: none can follow it.
    repeated = repeated_command(context) if described is None else None
    answer(plan, output, force=force, format=format, explain=explain, command=repeated)
    return int(exit_code(plan))


def _described(options: dict[str, Any], words: list[str]) -> DescribedRun:
    """Return the run of a script with its arguments, or of a command line, whose first word is an option."""
    from fsdptool.config.described import describe_command
    from fsdptool.planning.request.file_run import read_file_run

    script = read_file_run(options["reference"], words) if options["reference"].endswith(SCRIPTS) else None
    return script or describe_command([options.pop("reference"), *words])[1]


def exit_code(plan: Plan) -> ExitCode:
    """Return the status a verdict leaves with."""
    codes = {"fits": ExitCode.CLEAN, "does_not_fit": ExitCode.FINDINGS, "unknown": ExitCode.INCOMPLETE}
    return codes[plan.verdict]


def answer_sweep(
    options: Options,
    values: Mapping[str, Sequence[float]],
    output: Path | None,
    *,
    force: bool,
    format: RowFormat,
) -> int:
    """Plan every combination, print the rows, write the output file, and return the exit status.

    The status is 0 where every combination fits, 5 where none is worse than unknown, else 1.
    """
    import json

    from fsdptool.planning.sweep import sweep
    from fsdptool.records.diagnostic import envelope
    from fsdptool.report.console.plan import print_sweep, print_sweep_rows, sweep_csv
    from fsdptool.report.page.plan import sweep_svg

    with show_progress() as progress:
        result = sweep(options, values, progress=progress)
    document = envelope("sweep", {"options": result.options, "values": dict(values)}, result)
    if output is not None:
        writers = {".csv": sweep_csv, ".svg": sweep_svg}
        text = writers[output.suffix](result) if output.suffix in writers else ""
        write_file(output, text or json.dumps(document, indent=1, ensure_ascii=False) + "\n", force=force)
    if format is RowFormat.JSON:
        print_document(document)
    elif format is RowFormat.TEXT:
        print_sweep(result)
    else:
        print_sweep_rows(result, "tsv" if format is RowFormat.TSV else "csv")
    if output is not None:
        say(f"wrote {output}")
    verdicts = {row.verdict for row in result.rows}
    if verdicts <= {"fits"}:
        return int(ExitCode.CLEAN)
    return int(ExitCode.INCOMPLETE if verdicts <= {"fits", "unknown"} else ExitCode.FINDINGS)


_OUTPUT_ONLY = ("output", "force", "format", "explain", "search", "quick", "max_batch")


def repeated_command(context: typer.Context) -> list[str]:
    """Return the command that was given, without the options that only concern output or search."""
    from fsdptool.source.references import is_import

    words = ["fsdptool", "plan"]
    given = command_line_options(context)
    reference = str(context.params.get("reference") or "")
    imports = reference.endswith(".py") or is_import(reference)
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        if name not in given or name in _OUTPUT_ONLY:
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            spelled = parameter.opts[-1 if imports and name == "trust_remote_code" else 0]
            words.append(spelled if value else parameter.secondary_opts[0])
        else:
            several = value if isinstance(value, list | tuple) else [value]
            words += [part for item in several for part in (parameter.opts[0], str(item))]
    return words


def answer(
    plan: Plan,
    output: Path | None,
    *,
    force: bool,
    format: RowFormat,
    explain: bool,
    command: Sequence[str] | None = None,
) -> None:
    """Print the plan and write it to the output file."""
    import json

    from fsdptool.planning.plan import plan_document
    from fsdptool.report.console.plan import candidates_csv, print_candidates, print_plan

    document = plan_document(plan)
    if output is not None and output.suffix == ".json":
        write_file(output, json.dumps(document, indent=1, ensure_ascii=False) + "\n", force=force)
    elif output is not None and output.suffix == ".csv":
        write_file(output, candidates_csv(plan), force=force)
    elif output is not None:
        from fsdptool.report.page.plan import plan_file

        write_file(output, plan_file(plan, output.suffix), force=force)
    if format is RowFormat.JSON:
        print_document(document)
    elif format is RowFormat.TEXT:
        print_plan(plan, explain=explain, command=command)
    else:
        print_candidates(plan, "tsv" if format is RowFormat.TSV else "csv")
    if output is not None:
        say(f"wrote {output}")


def check_saved(path: Path, format: RowFormat, *, trust_remote_code: bool = False) -> int:
    """Recompute a saved plan, print what changed and return the exit status."""
    from fsdptool.planning.compare import check_plan
    from fsdptool.planning.plan import plan_document
    from fsdptool.report.console.plan import print_changes

    with show_progress() as progress:
        after, changes = check_plan(path, trust_remote_code=trust_remote_code, progress=progress)
    if format is RowFormat.JSON:
        document = plan_document(after)
        document["details"]["changes"] = [
            {"what": change.what, "before": change.before, "after": change.after} for change in changes
        ]
        print_document(document)
    else:
        print_changes(str(path), [(c.what, c.before, c.after) for c in changes])
    return int(ExitCode.FINDINGS if changes else exit_code(after))


_PLAN_SUFFIXES = {"a plan": (".json", ".html", ".svg", ".csv")}
_SWEEP_SUFFIXES = {"a sweep": (".json", ".csv", ".svg")}
