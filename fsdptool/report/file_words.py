"""What a plan took from a file, and what it leaves out, in lines for the console and the HTML page."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.records.described_run import DescribedRun
from fsdptool.records.plan import NotPlanned, Plan
from fsdptool.report.plan_words import shown

NOT_PLANNED: Mapping[NotPlanned, str] = {
    "autocast": "fp32 copies of what autocast runs in fp32 (layer normalization, softmax)",
    "outputs": "logits that a script holds during backward with the model's outputs (--loss kept)",
    "fused_loss": "fused losses such as Liger's, which hold less (--loss liger, cce)",
    "whole_loss": "losses that hold whole logits (--loss whole)",
    "stored_dtype": "the dtype that the weights are loaded in (--dtype)",
    "embedding_backward": "the embedding, which is gathered in backward, too",
    "encoders": "text encoders and VAE that are loaded beside the model",
    "forwards": "the time of further forward passes without gradients (reference, KL)",
}
"""What a plan of another program's loop leaves out."""


def loop(plan: Plan) -> list[str]:
    """Return whose training loop is planned, if not fsdptool's own, and what is left out, in lines."""
    planned = plan.inputs.loop
    if planned.program == "fsdptool":
        if "encoders" in planned.not_planned:
            return ["not included: text encoders and VAE; fsdptool precompute runs them before training"]
        return []
    settings = shown(plan).settings
    chunk = plan.inputs.recipe.objective.options.get("chunk")
    parts = [f"{settings.layout} layout", f"{settings.gradients} gradients between micro-batches"]
    if planned.own_loss:
        parts.append("the model's own loss")
    elif planned.loss_in_forward:
        logits = "whole logits" if chunk == 0 else "logits in chunks"
        parts.append(f"loss in the model's forward, over {logits}")
    elif chunk == 0:
        parts.append("loss after the forward, over whole logits")
    lines = [f"training loop of {planned.program}: {', '.join(parts)}"]
    if planned.not_planned:
        lines.append(f"not included: {'; '.join(NOT_PLANNED[name] for name in planned.not_planned)}")
    return lines


def described_in_short(run: DescribedRun, accumulation: int | None) -> str:
    """Return the program, the method and the main settings of a described run in one line."""
    version = f" {run.program_version}" if run.program_version else ""
    method = run.method or "full"
    parts = [
        f"{method}, rank {run.lora_rank}" if run.lora_rank and method != "full" else method,
        run.objective or "",
        run.optimizer or "",
        f"gradient checkpointing {run.gradient_checkpointing}" if run.gradient_checkpointing else "",
        f"accumulation {accumulation}" if accumulation is not None else "",
    ]
    return f"run described for {run.program}{version}: {', '.join(part for part in parts if part)}"


def described(plan: Plan) -> list[str]:
    """Return the run that another program's file describes, and what of it is not planned, in lines."""
    run = plan.inputs.run
    if run is None:
        return []
    lines = [described_in_short(run, plan.inputs.recipe.batch.accumulation)]
    if run.fsdp == "none":
        lines.append("it does not use FSDP: every rank holds a copy of the model")
    elif run.fsdp == 1:
        lines.append("it uses FSDP1, which is planned as FSDP2 with the same units")
    lines += [f"{run.program} refuses it, or it cannot be read whole: {problem}" for problem in run.problems]
    keys = run.keys
    inert = len(keys.no_effect)
    have = "has" if inert == 1 else "have"
    counted = f"used {len(keys.used)} keys; {inert} {have} no effect on memory or speed"
    if keys.not_modelled:
        listed = keys.unmodelled_by_section()
        named = ", ".join(f"{keys.placed(item.key)} (changes {item.changes})" for item in listed)
        counted += f"; cannot model {len(keys.not_modelled)}: {named}"
    lines.append(counted)
    if taken := len(run.defaults):
        which = "1 value is a default" if taken == 1 else f"{taken} values are defaults"
        lines.append(f"{which} of {run.program} (explain lists them)")
    return lines + [f"not planned: {limit.what} ({_SIDES[limit.side]})" for limit in plan.inputs.limits]


_SIDES: Mapping[str | None, str] = {
    "less": "the run needs less than is planned",
    "more": "the run needs more than is planned",
    None: "the run may need more or less than is planned",
}


def unread(plan: Plan) -> list[str]:
    """Return the keys of the configuration file that change memory and were not read, in a line."""
    keys = plan.unread
    if keys is None:
        return []
    named = ", ".join(keys.keys)
    whole = f"fsdptool plan {keys.file} plans the whole run of a training file"
    advice = f"; else give them as options: {', '.join(keys.options)}" if keys.options else ""
    return [f"not read from {keys.file}: {named}; {whole}{advice}"]
