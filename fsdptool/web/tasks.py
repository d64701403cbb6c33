"""What pages need PyTorch for: functions that the child process runs, by their names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fsdptool.inspection.document import View, describe
from fsdptool.planning.request.options import Options
from fsdptool.records.sharding import Layout


def detect(
    progress: Callable[[str], None],
    *,
    reference: str,
    wrap: Sequence[str],
    world_size: int | None,
    layout: Layout,
    revision: str | None,
    component: str | None,
    stamp: object,
) -> dict[str, Any]:
    """Return the document of ``detect`` with every view, and the classes that are detected without ``wrap``.

    Args:
        progress: Takes texts of progress.
        reference: Model reference.
        wrap: Classes to wrap; empty takes the detected ones.
        world_size: Ranks that share the parameters, or None.
        layout: Whose FSDP units to list.
        revision, component: As for ``detect``.
        stamp: State of the reference's files, so that a changed file is another question.
    """
    from fsdptool.families.registry import load_registry
    from fsdptool.inspection import examine
    from fsdptool.modeling.units import detected
    from fsdptool.source import resolve

    progress("resolving the reference")
    spec = resolve(reference, revision=revision, component=component, catalogue=True)
    progress("building the model without weights")
    views: tuple[View, ...] = ("leaves", "tree", "where")
    inspection = plain = examine(spec)
    if wrap:
        inspection = examine(spec, wrap=tuple(wrap))
    inspection, published = detected(inspection)
    answer = describe(
        inspection,
        world_size=world_size,
        layout=layout,
        views=views,
        published=published,
        diagnostics=load_registry().diagnostics,
    )
    return {"document": answer.document(), "detected": list(plain.anatomy.wrap.classes)}


def make_plan(
    progress: Callable[[str], None], *, options: Mapping[str, Any], stamps: object
) -> dict[str, Any]:
    """Return the document of ``plan``.

    Args:
        progress: Takes texts of progress.
        options: Of ``fsdptool plan``; files are absolute paths.
        stamps: State of the files that the options name, so that a changed file is another question.
    """
    from fsdptool.planning.plan import make_plan, plan_document
    from fsdptool.planning.request.inputs import read_request

    progress("reading the question")
    return plan_document(make_plan(read_request(cast("Options", dict(options))), progress=progress))


def emit(
    progress: Callable[[str], None],
    *,
    plan: Mapping[str, Any] | None = None,
    plan_file: str | None = None,
    candidate: str | None = None,
    options: Mapping[str, Any] | None = None,
    stamps: object = None,
) -> dict[str, Any]:
    """Return the document of ``emit-config``, and the recipe of a plan as text.

    Where nothing fits, ``unfit`` is the plan instead: nobody has chosen what to write.

    Args:
        progress: Takes texts of progress.
        plan: Document of a plan.
        plan_file: Absolute path of such a document instead.
        candidate: Candidate of the plan; None takes the chosen one.
        options: For a model or a preset: the keyword arguments of ``prepare_emission``.
        stamps: State of the files that are named, so that a changed file is another question.
    """
    from fsdptool.api.emit_config import prepare_emission
    from fsdptool.api.options import EmissionOptions
    from fsdptool.config.recipe import dump_recipe
    from fsdptool.planning.plan import plan_from, read_plan
    from fsdptool.records.codec import to_json

    progress("choosing the wrap classes")
    planned = None
    if plan_file is not None:
        planned = read_plan(Path(plan_file))
    elif plan is not None:
        planned = plan_from(plan, where="the plan")
    if planned is None:
        emission = prepare_emission(cast("EmissionOptions", options or {}))
    elif planned.chosen is None and candidate is None:
        return {"unfit": to_json(planned)}
    else:
        emission = prepare_emission(EmissionOptions(plan=planned, candidate=candidate))
    recipe = dump_recipe(emission.recipe) if planned is not None and emission.recipe is not None else None
    return {"document": emission.document(emission.text(), None), "recipe": recipe}


def examine_machine(progress: Callable[[str], None], *, probe: bool) -> dict[str, Any]:
    """Return the document of ``doctor``.

    Args:
        progress: Is told what happens.
        probe: Whether to start two processes and test that FSDP2 shards.
    """
    from fsdptool.launch.doctor import examine as examine_machine
    from fsdptool.records.diagnostic import envelope

    progress("sharding a small model on two processes" if probe else "reading versions and devices")
    health, diagnostics = examine_machine(with_probe=probe)
    return envelope("doctor", health, health, diagnostics=diagnostics)


def dry_run(
    progress: Callable[[str], None], *, recipe: str, config: str, output: str | None, cpu: bool, version: Any
) -> dict[str, Any]:
    """Check a run without starting it.

    Args:
        progress: Takes what is done.
        recipe, config, output, cpu: As ``fsdptool train`` takes them.
        version: State of the files: the answer is out of date when they change.
    """
    from fsdptool.launch.options import StartOptions
    from fsdptool.launch.start import open_run
    from fsdptool.records.codec import to_json

    progress("checking the recipe, the configuration, the model and the data")
    place = Path(output) if output is not None else None
    # The folder is checked when the run joins the queue; here it may exist.
    options = StartOptions(output=place, force=True, cpu=cpu)
    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(open_run(Path(recipe), Path(config), options, dry_run=True))
    prepared = ready.prepared
    return {
        "shell": ready.command_line.shell(),
        "device": prepared.device,
        "processes": prepared.world_size,
        "units": len(prepared.units.units),
        "findings": to_json(prepared.diagnostics),
        "notes": list(prepared.notes),
        "unchecked": list(prepared.unchecked),
    }


def export(
    progress: Callable[[str], None], *, run: str, merge: bool, ema: bool, force: bool, number: float
) -> dict[str, Any]:
    """Export the newest checkpoint of a run.

    Args:
        progress: Takes what is done.
        run, merge, ema, force: As ``fsdptool export`` takes them.
        number: Tells a request from an earlier one.
    """
    from fsdptool.api.runs import export as export_run

    progress("writing the model")
    exported = export_run(run, merge=merge, ema=ema, force=force)
    return {"folder": str(exported.folder)}
