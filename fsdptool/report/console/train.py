"""What a person sees of a run: progress on standard error, the closing summary on standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from fsdptool.formatting import amount, printable, printable_lines
from fsdptool.records.plan import Candidate
from fsdptool.records.run import Summary
from fsdptool.report.plan_words import WITH_ALL_ABOVE
from fsdptool.runs.work import Countdown, left_text


class Progress:
    """Renders worker events: a bar in a terminal, one line per ``every`` steps otherwise."""

    def __init__(self, total: int | None, *, every: int = 10, stream: TextIO | None = None) -> None:
        self._total = total
        self._every = max(every, 1)
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._countdown = Countdown(total)
        self._bar: Any = None
        self._task: Any = None
        if self._stream.isatty():
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(file=self._stream),
        )
        self._bar.start()
        self._task = self._bar.add_task("starting", total=self._total, figures="")

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        kind = str(event.get("kind"))
        show = getattr(self, f"_on_{kind}", None)
        if show is None:
            return
        try:
            show(event)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # `watch` shows events that somebody else may have written, without what its kind has.
            self.say(kind.replace("_", " "))

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Write one line."""
        self.show(printable(text))

    def show(self, text: str) -> None:
        """Write a text of several lines."""
        text = printable_lines(text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
            return
        self._stream.write(text + "\n")
        self._stream.flush()

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        if event["rank"] != 0:
            return
        name = f"{event['model']}: {event['name']}" if "model" in event else event["name"]
        if self._bar is not None:
            self._bar.update(self._task, description=name)
            return
        self.say(f"{time.monotonic() - self._began:7.1f}s  {name}")

    def _on_proof(self, event: Mapping[str, Any]) -> None:
        self.say(f"sharding proven: {proof_text(event)}")
        if event.get("quantised"):
            self.say(str(event["quantised"]))

    def _on_length(self, event: Mapping[str, Any]) -> None:
        self._total = self._countdown.total = int(event["steps"])
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        moment = float(event.get("time") or time.time())
        # The first step compiles and allocates, so the pace is counted from its end.
        left = left_text(self._countdown.left(step, moment))
        figures = step_text(event)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description="training", figures=figures)
            return
        if step == 1 or step % self._every == 0 or step == self._total:
            of = f"/{self._total}" if self._total else ""
            self.say(f"step {step}{of}  {figures}{left.replace(', ', '  ')}")

    def _on_evaluation(self, event: Mapping[str, Any]) -> None:
        self.say(f"step {event['step']}  validation loss {validation_text(event)}")

    def _on_checkpoint(self, event: Mapping[str, Any]) -> None:
        self.say(f"step {event['step']}  checkpoint written in {event['seconds']:.1f} s")

    def _on_checkpoint_damaged(self, event: Mapping[str, Any]) -> None:
        self.say(f"warning: {event['path']} is damaged ({event['reason']}); using the previous one")

    def _on_checkpoint_superseded(self, event: Mapping[str, Any]) -> None:
        self.say(
            f"the run continues from step {event['step']}; what was saved after it is now {event['path']}"
        )

    def _on_resumed(self, event: Mapping[str, Any]) -> None:
        self.say(f"continuing from step {event['step']} ({event['path']})")

    def _on_nonfinite(self, event: Mapping[str, Any]) -> None:
        self.say(f"warning: step {event['step']}: the {event['what']} is not finite ({event['policy']})")

    def _on_stop_requested(self, event: Mapping[str, Any]) -> None:
        self.say(
            f"{event['signal']}: all ranks will finish their step, save and stop;"
            " a second signal ends the run at once"
        )

    def _on_restarted(self, event: Mapping[str, Any]) -> None:
        self.say(f"restart {event['attempt']}: {event['failure']}")

    def _on_warning(self, event: Mapping[str, Any]) -> None:
        self.say(f"warning: {event['message']}")


def step_text(event: Mapping[str, Any]) -> str:
    """Return the figures of one step."""
    parts = [f"loss {_loss_text(event.get('loss'))}"]
    if event.get("grad_norm") is not None:
        parts.append(f"grad norm {event['grad_norm']:.3f}")
    parts.append(f"lr {event['lr']:.2e}")
    seconds = event.get("step_seconds")
    if seconds:
        if event.get("tokens") is not None:
            parts.append(f"{event['tokens'] / seconds:,.0f} tokens/s")
        else:
            parts.append(f"{event['samples'] / seconds:,.1f} samples/s")
    if event.get("memory_allocated_peak_bytes") is not None:
        parts.append(f"peak {amount(event['memory_allocated_peak_bytes'])}")
    return "  ".join(parts)


def validation_text(event: Mapping[str, Any]) -> str:
    """Return a validation loss, and what of it is the load-balancing loss of the routers, if any is."""
    loss, routers = event.get("loss"), (event.get("metrics") or {}).get("auxiliary_loss")
    if loss is None or routers is None:
        return _loss_text(loss)
    return f"{_loss_text(loss)}, of which {_loss_text(routers)} is the routers' load-balancing loss"


def proof_text(proof: Mapping[str, Any]) -> str:
    """Return the sharding proof in one line."""
    kinds = ", ".join(f"{count} × {name}" for name, count in (proof.get("placements") or {}).items())
    local = proof.get("local_bytes") or []
    share = ", ".join(amount(value) for value in local)
    return f"{proof.get('units')} units, {proof.get('parameters')} parameters ({kinds}); per rank {share}"


def _loss_text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def closing_text(summary: Summary, folder: str, losses: list[float | None]) -> str:
    """Return the closing summary."""
    steps, ranks = (
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((summary.steps, "step"), (summary.world_size, "rank"))
    )
    lines = [f"{summary.status}: {steps} on {ranks}"]
    proof = summary.sharding_proof
    if proof:
        lines.append(f"  sharding     {proof_text(proof)}")
        if proof.get("quantised"):
            lines.append(f"               {proof['quantised']}")
        for example in (proof.get("examples") or [])[:2]:
            shards = " + ".join("×".join(map(str, shape)) for shape in example["local_shapes"])
            whole = "×".join(map(str, example["shape"]))
            placed = ", ".join(example["placements"])
            lines.append(f"               {example['fqn']} {whole} as {shards} [{placed}]")
    finite = [loss for loss in losses if loss is not None]
    if finite:
        lines.append(f"  loss         {finite[0]:.4f} -> {finite[-1]:.4f}")
    lines.append(f"  peak memory  predicted {amount(summary.predicted_peak_bytes)} per rank")
    # Ranks that were killed report neither their peaks nor the instrument; their steps are written down.
    reported = any(value is not None for value in summary.measured_peak_bytes)
    for rank, value in enumerate(summary.measured_peak_bytes if reported else ()):
        lines.append(f"               rank {rank} measured {amount(value)}")
    if summary.error_percent is not None:
        by_steps = "" if reported else ", by the steps of rank 0: no rank reported its peak"
        lines.append(f"               error {round(summary.error_percent, 2) + 0.0:+.2f} %{by_steps}")
    if reported:
        lines.append(f"  instrument   {summary.instrument}")
    rates = summary.throughput
    if rates.get("step_seconds_median") is not None:
        tokens = rates.get("tokens_per_second")
        rate = (
            f"{tokens:,.0f} tokens/s"
            if tokens is not None
            else f"{rates['samples_per_second']:,.2f} samples/s"
        )
        median, p95 = rates["step_seconds_median"], rates["step_seconds_p95"]
        lines.append(f"  throughput   {rate}, step {median:.3f} s median, {p95:.3f} s p95")
    if summary.last_checkpoint:
        lines.append(f"  checkpoint   {folder}/{summary.last_checkpoint}")
    if summary.export:
        lines.append(f"  export       {folder}/{summary.export}")
    if summary.restarts:
        lines.append(f"  restarts     {summary.restarts}")
    return "\n".join(lines) + "\n"


def memory_text(account: Mapping[str, Any]) -> str:
    """Return the account of a rank that ran out of memory."""
    seen = account["seen"]
    lines = [f"rank {account['rank']} ran out of memory in {seen['moment']}"]
    requested = seen.get("requested_bytes")
    if requested is not None:
        allocated = amount(seen.get("allocated_bytes"))
        lines[0] += f": {amount(requested)} more were requested with {allocated} allocated"
    lines += [f"  {amount(item['bytes']):>12}  {item['name']}" for item in seen.get("live", [])]
    if account["planned_moment"]:
        planned = amount(account["planned_bytes"])
        lines.append(f"  the plan expected {planned} at that moment ({account['planned_moment']})")
    if account["peak_moment"]:
        peak = amount(account["peak_bytes"])
        lines.append(f"  the plan's peak is {peak}, in {account['peak_moment']}")
    for step in account["next_steps"][:3]:
        total = step["device_total_bytes"]
        gives = f": {amount(total)} per rank" if total is not None else ""
        above = WITH_ALL_ABOVE if step.get("with_all_above") is True else ""
        lines.append(f"  next step: {step['change']}{above}{gives} (costs: {step['cost']})")
    return "\n".join(lines)


def plan_text(prediction: Candidate | None) -> str:
    """Return what the plan says before the run, in one line."""
    if prediction is None or prediction.allocated_peak_bytes is None:
        return "predicted peak per rank: unknown"
    return f"predicted peak per rank: {amount(prediction.allocated_peak_bytes)} allocated"
