"""FSDP1 to FSDP2 within a dialect, by edits that keep the file's own form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdptool.config.canonical import LEGACY, MESH, RESHARD_OF_STRATEGY, hybrid_mesh
from fsdptool.config.dialects.protocol import LintContext, Rewriter, Target, parse_source
from fsdptool.config.edits import NotEditableError, edits_between
from fsdptool.records.diagnostic import Edit


@dataclass(frozen=True, slots=True)
class Migration:
    """What migrating a file takes: edits and the settings they change, or why it is refused."""

    edits: tuple[Edit, ...] | None
    changes: Mapping[str, Any] = field(default_factory=dict)
    refusal: str | None = None


def migration(lint: LintContext) -> Migration:
    """Return how an FSDP1 file becomes FSDP2, in its own dialect."""
    refusal = _refusal(lint)
    if refusal is not None:
        return Migration(None, refusal=refusal)
    strategy = lint.get("sharding_strategy") or "full_shard"
    mesh = {}
    if strategy.startswith("hybrid"):
        mesh = hybrid_mesh(lint.get("num_processes"), lint.get("num_machines"))
    target = Target(RESHARD_OF_STRATEGY[strategy], lint.get("state_dict_type") or "full", mesh)
    if not lint.dialect.in_place:
        return Migration(None, refusal=f"rewrite the file: fsdptool migrate --to {lint.dialect.name} FILE")
    try:
        steps = Rewriter(lint.source, partial(parse_source, dialect=lint.dialect))
        further = lint.dialect.migrate(steps, lint, target)
    except NotEditableError as error:
        return Migration(None, refusal=f"the form of the file does not allow it: {error}")
    changes: dict[str, Any] = {"fsdp_version": 2, "reshard_after_forward": target.reshard, **mesh, **further}
    changes.update(dict.fromkeys(LEGACY))
    if mesh:
        changes |= {name: 1 for name in MESH if name not in mesh}
    return Migration(edits_between(lint.source.text, steps.source.text), changes)


def _refusal(lint: LintContext) -> str | None:
    strategy = lint.get("sharding_strategy")
    if strategy == "no_shard":
        return "NO_SHARD is plain data parallelism: use distributed_type MULTI_GPU (DDP) instead of FSDP"
    if lint.get("state_dict_type") == "local":
        return "LOCAL_STATE_DICT is not supported by FSDP2: use SHARDED_STATE_DICT"
    if lint.migration_refusal:
        return lint.migration_refusal
    if lint.get("activation_checkpointing") and lint.wraps_nothing and lint.consumer.name != "fsdptool":
        return "activation checkpointing crashes under FSDP2 where nothing is wrapped: wrap the blocks first"
    if lint.has("FSD336", severity="error"):
        return "decide which strategy you want: the one in the file has never run (FULL_SHARD has)"
    if strategy is not None and strategy.startswith("hybrid"):
        machines, processes = lint.get("num_machines"), lint.get("num_processes")
        if "dp_replicate" in lint.dialect.cannot:
            return (
                f"hybrid sharding is a mesh under FSDP2, which {lint.dialect.name} files cannot express: "
                "fsdptool migrate --to accelerate"
            )
        if isinstance(machines, int) and machines > 1 and not hybrid_mesh(processes, machines):
            return "hybrid sharding requires num_processes, a multiple of num_machines, for its mesh"
    return None
