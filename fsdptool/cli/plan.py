"""``fsdptool plan``: per-rank memory before a GPU is rented, and the fastest settings that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import (
    Format,
    command_line_options,
    hsdp_shape,
    override_values,
    refuse,
    reshard_value,
)
from fsdptool.cli.plan_answer import answer, check_output, check_saved, exit_code, progress

_HARDWARE, _MODEL, _RECIPE, _BATCH, _SHARDING, _ANSWER = (
    "Hardware",
    "Model",
    "Recipe",
    "Batch",
    "Sharding",
    "Answer",
)


def command(
    context: typer.Context,
    reference: Annotated[
        str | None, typer.Argument(help="Model: family:flavour, hub id, folder or config.json.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU, for example H100-80GB-SXM.", rich_help_panel=_HARDWARE)
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", "--processes", help="GPUs (or CPU processes) per node.", rich_help_panel=_HARDWARE
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes.", rich_help_panel=_HARDWARE)] = None,
    cluster: Annotated[
        list[Path] | None,
        typer.Option(
            "--cluster", help="Cluster file (repeatable: offers are compared).", rich_help_panel=_HARDWARE
        ),
    ] = None,
    gpus_file: Annotated[
        Path | None, typer.Option(help="Further GPUs, as data.", rich_help_panel=_HARDWARE)
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(help="Table written by fsdptool calibrate.", rich_help_panel=_HARDWARE)
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Between nodes, per GPU: '400 Gbit/s', '50 GB/s'.", rich_help_panel=_HARDWARE),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory per node: '2 TiB'.", rich_help_panel=_HARDWARE)
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price per GPU hour.", rich_help_panel=_HARDWARE)
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Whose memory: cuda, cpu-gloo or cpu-fake.", rich_help_panel=_HARDWARE),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe file.", rich_help_panel=_RECIPE)] = None,
    config: Annotated[
        Path | None, typer.Option(help="accelerate YAML (any dialect).", rich_help_panel=_RECIPE)
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="full, lora or distillation.", rich_help_panel=_RECIPE)
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="LoRA rank.", rich_help_panel=_RECIPE)] = None,
    lora_target: Annotated[
        list[str] | None, typer.Option(help="Module LoRA adapts (repeatable).", rich_help_panel=_RECIPE)
    ] = None,
    lora_base: Annotated[
        str | None, typer.Option(help="Frozen base: unchanged, nf4, int8 or float8.", rich_help_panel=_RECIPE)
    ] = None,
    adapters: Annotated[
        str | None, typer.Option(help="Adapters: sharded or replicated.", rich_help_panel=_RECIPE)
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Teacher of a distillation.", rich_help_panel=_RECIPE)
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="Training objective.", rich_help_panel=_RECIPE)
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adamw8bit, adafactor or sgd.", rich_help_panel=_RECIPE)
    ] = None,
    optimizer_implementation: Annotated[
        str | None, typer.Option(help="auto, fused, foreach or for_loop.", rich_help_panel=_RECIPE)
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16 or fp8.", rich_help_panel=_RECIPE)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Stored parameters: float32, bfloat16, ...", rich_help_panel=_RECIPE)
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="sdpa, eager or flash_attention_2.", rich_help_panel=_RECIPE)
    ] = None,
    ema: Annotated[
        float | None, typer.Option(help="Decay of a moving average of weights.", rich_help_panel=_RECIPE)
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", "--sequence-length", help="Tokens per sample.", rich_help_panel=_BATCH),
    ] = None,
    height: Annotated[int | None, typer.Option(help="Pixels.", rich_help_panel=_BATCH)] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.", rich_help_panel=_BATCH)] = None,
    frames: Annotated[int | None, typer.Option(help="Video frames.", rich_help_panel=_BATCH)] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Samples per rank and forward.", rich_help_panel=_BATCH)
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Forwards per optimizer step.", rich_help_panel=_BATCH)
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Samples per step over all ranks.", rich_help_panel=_BATCH)
    ] = None,
    max_batch: Annotated[
        bool,
        typer.Option("--max-batch", help="Find the largest micro-batch that fits.", rich_help_panel=_BATCH),
    ] = False,
    layout: Annotated[
        str | None, typer.Option(help="native or accelerate.", rich_help_panel=_SHARDING)
    ] = None,
    wrap: Annotated[
        list[str] | None, typer.Option(help="Wrap this class (repeatable).", rich_help_panel=_SHARDING)
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Never wrap this class (repeatable).", rich_help_panel=_SHARDING)
    ] = None,
    reshard: Annotated[
        str | None,
        typer.Option(help="After forward: true, false or a number of ranks.", rich_help_panel=_SHARDING),
    ] = None,
    checkpointing: Annotated[
        str | None, typer.Option(help="none, selective, every_N or full.", rich_help_panel=_SHARDING)
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="CPU offload.", rich_help_panel=_SHARDING)
    ] = None,
    hsdp: Annotated[
        str | None, typer.Option(help="Replicate x shard, for example 2x8.", rich_help_panel=_SHARDING)
    ] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks.", rich_help_panel=_SHARDING)] = None,
    prefetch: Annotated[
        int | None, typer.Option(help="Units gathered ahead.", rich_help_panel=_SHARDING)
    ] = None,
    reduce_dtype: Annotated[
        str | None,
        typer.Option(help="Gradients are reduced in: float32, bfloat16, param.", rich_help_panel=_SHARDING),
    ] = None,
    gradients: Annotated[
        str | None, typer.Option(help="Accumulated: sharded or unsharded.", rich_help_panel=_SHARDING)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of a hub reference.", rich_help_panel=_MODEL)
    ] = None,
    component: Annotated[
        str | None, typer.Option(help="Component of a pipeline.", rich_help_panel=_MODEL)
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(help="Replace a configuration value: KEY=JSON (repeatable).", rich_help_panel=_MODEL),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the reference's code.", rich_help_panel=_MODEL)
    ] = False,
    search: Annotated[
        bool | None,
        typer.Option(
            "--search/--no-search",
            help="Search widely; or judge exactly what is asked. Default: search what nobody set.",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    prefer: Annotated[str | None, typer.Option(help="speed or price.", rich_help_panel=_ANSWER)] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check", help="Derive this plan anew; exit 1 if anything changed.", rich_help_panel=_ANSWER
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Say which constraint bound, and show every candidate.", rich_help_panel=_ANSWER
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write plan.json or plan.html.", rich_help_panel=_ANSWER),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file.", rich_help_panel=_ANSWER)
    ] = False,
    format: Annotated[
        Format, typer.Option("--format", help="How the answer is printed.", rich_help_panel=_ANSWER)
    ] = Format.TEXT,
) -> int:
    """Predict per-rank memory and step time, and find the fastest configuration that fits.

    Needs no GPU and no weights. Exit status: 0 fits, 1 does not fit, 5 unknown.

    Examples:

      fsdptool plan llama3:8b --gpu H100-80GB-SXM --gpus 8 --seq-len 4096 --micro-batch 1 -o plan.json

      fsdptool plan --recipe recipe.yaml --config accelerate.yaml --profile cpu-gloo

      fsdptool plan --check plan.json
    """
    if check is not None:
        others = (
            name
            for name in command_line_options(context)
            if name not in ("check", "format", "trust_remote_code")
        )
        refuse(
            context, others, "not beside --check, which derives a plan from its own inputs", "leave it out"
        )
        return check_saved(check, format, trust_remote_code=trust_remote_code)
    check_output(output, force)
    from fsdptool.planning.plan import make_plan
    from fsdptool.planning.request import Options, read_request

    replicate, shard = hsdp_shape(hsdp)
    options = Options(
        reference=reference,
        recipe=recipe,
        config=config,
        revision=revision,
        component=component,
        trust_remote_code=True if trust_remote_code else None,
        overrides=override_values(override or []),
        wrap=tuple(wrap or ()),
        exclude=tuple(exclude or ()),
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        clusters=tuple(cluster or ()),
        gpus_file=gpus_file,
        machine=machine,
        network=network,
        host_memory=host_memory,
        price=price,
        profile=profile,
        method=method,
        lora_rank=lora_rank,
        lora_targets=tuple(lora_target) if lora_target else None,
        lora_base=lora_base,
        adapters=adapters,
        teacher=teacher,
        objective=objective,
        precision=precision,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        attention=attention,
        optimizer=optimizer,
        optimizer_implementation=optimizer_implementation,
        micro_batch=micro_batch,
        accumulation=accumulation,
        global_batch=global_batch,
        sequence_length=seq_len,
        height=height,
        width=width,
        frames=frames,
        checkpointing=checkpointing,
        layout=layout,
        reshard=reshard_value(reshard),
        offload=offload,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        prefetch=prefetch,
        gradients=gradients,
        ema=ema,
        search=search,
        max_batch=max_batch,
        prefer=prefer,
    )
    made = make_plan(read_request(options), progress=progress)
    answer(made, output, force=force, format=format, explain=explain)
    return int(exit_code(made))
