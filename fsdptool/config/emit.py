"""The emitted file: settings as accelerate YAML, with a head that says what it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdptool.config.write import MODELINE, write_settings
from fsdptool.records.settings import FsdpSettings


def emit_yaml(
    settings: FsdpSettings,
    *,
    layout: str = "native",
    reference: str | None = None,
    plan_digest: str | None = None,
    differences: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Return the accelerate YAML for a run.

    Args:
        settings: What to write; an open ``dp_shard`` next to other mesh sizes is resolved first.
        layout: The layout the settings were planned for (``native`` or ``accelerate``).
        reference: The model, as the person named it.
        plan_digest: Digest of the plan it came from.
        differences: What a plain accelerate script will do differently, one sentence each.
        notes: Further comment lines.
    """
    head = [
        "Written by fsdptool emit-config."
        if reference is None
        else f"Written by fsdptool emit-config for {reference}."
    ]
    head.append(f"fsdptool: layout={layout}" + (f" plan={plan_digest}" if plan_digest else ""))
    if settings.use_cpu:
        head.append("fsdptool: consumer=fsdptool")
        head.append("FSDP on CPU shards with `fsdptool train`; accelerate 1.15 would run it unsharded.")
    head.extend(notes)
    if differences:
        head.append("")
        head.append("A plain accelerate script on this file differs from the plan:")
        head.extend(f"- {line}" for line in differences)
    return MODELINE + "\n" + write_settings(resolved(settings), header=head)


def resolved(settings: FsdpSettings) -> FsdpSettings:
    """Return the settings with an open ``dp_shard`` filled in where accelerate needs it written."""
    mesh = settings.mesh
    others = mesh.dp_replicate * mesh.cp * mesh.tp * mesh.sp
    if others == 1 or mesh.dp_shard is not None or settings.num_processes is None:
        return settings
    return replace(settings, mesh=mesh.resolve(settings.num_processes))
