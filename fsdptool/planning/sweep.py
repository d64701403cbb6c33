"""Sweeps: one plan for every combination of values of numeric options, as rows of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

from fsdptool.errors import PlanError
from fsdptool.options import Declared
from fsdptool.planning.advice.offers import describe_offers
from fsdptool.planning.plan import Progress, chosen_candidate, inspect_model, make_plan
from fsdptool.planning.request.inputs import read_request
from fsdptool.planning.request.options import Options, declared
from fsdptool.records.command_documents import Sweep, SweepRow
from fsdptool.records.plan import Plan
from fsdptool.runs.work import Countdown, left_text
from fsdptool.spelling import nearest

MAX_PLANS = 1000
"""More combinations than anyone waits for: a typing error rather than a sweep."""


def read_sweep(texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the values of each swept option by its name, from texts like ``seq-len=4096,8192``.

    Raises:
        PlanError: An option is unknown, is not numeric or is named twice, or a value is not a number.
    """
    values: dict[str, tuple[float, ...]] = {}
    for text in texts:
        flag, equals, listed = text.partition("=")
        if not equals:
            raise PlanError(f"--sweep {text!r} is not OPTION=VALUES", help="for example seq-len=4096,8192")
        item = _option(flag.strip())
        if item.name in values:
            raise PlanError(f"--sweep names {item.flags[0]} twice", help="list all of its values at once")
        values[item.name] = tuple(dict.fromkeys(_number(part, item) for part in listed.split(",")))
    if math.prod(len(item) for item in values.values()) > MAX_PLANS:
        raise PlanError(f"--sweep has more than {MAX_PLANS} combinations", help="give fewer values")
    return values


def _option(flag: str) -> Declared:
    name = flag.removeprefix("--")
    numeric = {
        spelled.removeprefix("--"): item
        for item in declared().values()
        if {int, float} & set(item.types) and not {bool, str} & set(item.types)
        for spelled in (*item.flags, item.name)
    }
    if name not in numeric:
        near = nearest(name, list(numeric))
        shown = ", ".join(dict.fromkeys(item.flags[0].removeprefix("--") for item in numeric.values()))
        raise PlanError(
            f"--sweep {name!r} is not a numeric option of plan",
            help=f"did you mean {near}?" if near else f"choose one of: {shown}",
        )
    return numeric[name]


def _number(text: str, item: Declared) -> float:
    try:
        return int(text) if int in item.types else float(text)
    except ValueError as error:
        kind = "a whole number" if int in item.types else "a number"
        raise PlanError(f"--sweep {item.flags[0]}: {text.strip()!r} is not {kind}") from error


def sweep(
    options: Options, values: Mapping[str, Sequence[float]], *, progress: Progress | None = None
) -> Sweep:
    """Return one row per combination of values, the last option varying fastest.

    A combination that contradicts itself (a sequence beyond the model's positions, a global batch that does
    not divide) is a row that says so.

    Args:
        options: The other options.
        values: Of every swept option, by name.
        progress: Called with a line of progress before each plan.

    Raises:
        PlanError: A swept option is given as well, or no combination can be planned.
    """
    twice = [declared()[name].flags[0] for name in values if name in options]
    if twice:
        raise PlanError(f"{twice[0]} is given, and swept as well", help="leave one of the two out")
    rows: list[SweepRow] = []
    models: dict[Any, Any] = {}
    failure: PlanError | None = None
    combinations = list(product(*values.values()))
    countdown = Countdown(len(combinations))
    for number, combination in enumerate(combinations, 1):
        swept = dict(zip(values, combination, strict=True))
        if progress is not None:
            shown = ", ".join(f"{name} {value:g}" for name, value in swept.items())
            left = left_text(countdown.left(number - 1))
            progress(f"planning {number} of {len(combinations)}{left}: {shown}")
        try:
            request = read_request(cast("Options", {**options, **swept}))
            key = repr((request.inputs.recipe.model, request.inputs.wrap, request.inputs.exclude))
            if key not in models:
                models[key] = inspect_model(request.inputs)
            rows.append(_row(swept, make_plan(request, model=models[key])))
        except PlanError as error:
            failure = failure or error
            rows.append(SweepRow(values=swept, verdict=None, reason=error.message))
    if failure is not None and all(row.verdict is None for row in rows):
        raise failure
    return Sweep(options=tuple(values), rows=tuple(rows))


def _row(swept: Mapping[str, float], plan: Plan) -> SweepRow:
    candidate = chosen_candidate(plan)
    inputs = plan.inputs
    place = candidate.settings.cluster
    (offer,) = describe_offers(
        replace(inputs, clusters=(inputs.clusters[place],)), plan.candidates, (candidate.id,)
    )
    rejection = candidate.rejected_by
    return SweepRow(
        values=swept,
        verdict=plan.verdict,
        reason=rejection.detail if rejection is not None and plan.verdict != "fits" else None,
        settings=candidate.settings,
        global_batch=candidate.settings.global_batch,
        device_total_bytes=candidate.device_total_bytes,
        usable_bytes=candidate.usable_bytes,
        host_bytes_per_node=candidate.host_bytes_per_node,
        step_seconds=candidate.step_seconds,
        samples_per_second=candidate.samples_per_second,
        tokens_per_second=candidate.tokens_per_second,
        mfu=candidate.mfu,
        price_per_million_tokens=offer.price_per_million_tokens,
        price_per_run=offer.price_per_run,
        fit_share=candidate.fit_share,
    )
