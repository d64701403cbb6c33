"""The rules on the device mesh: sizes against processes, and combinations that do not work."""

from __future__ import annotations

from typing import Any

from fsdptool.config.draft import Draft


def judge_mesh(draft: Draft) -> None:
    """Report what accelerate 1.15's ``ParallelismConfig`` would refuse, ignore or run differently.

    Sources: ``parallelism_config.py:__post_init__`` and ``_validate_accelerator``; SimpleTuner 4.8.0's
    context-parallel checks.
    """
    sizes = {key: draft.get(key) or 1 for key in ("dp_replicate", "dp_shard", "cp", "tp", "sp")}
    if sizes["cp"] > 1 and draft.get("fsdp_version") == 1:
        draft.report("FSD305", "Context parallelism requires FSDP2.", draft.at("cp"))
        return
    block = draft.extras.get("parallelism_block")
    if block is not None and draft.get("fsdp_version") == 1:
        draft.report(
            "FSD342", "parallelism_config needs fsdp_version 2", draft.root.get("parallelism_config")
        )
        return
    open_shard = draft.get("dp_shard") is None
    processes = draft.get("num_processes")
    if sizes["cp"] > 1 and refuse_context_size(draft, sizes["cp"], processes):
        return
    if block is None and open_shard and all(size == 1 for size in sizes.values()):
        return
    if _combinations(draft, sizes, open_shard):
        return
    before = len(draft.findings)
    _products(draft, sizes, open_shard, processes, block)
    if sizes["tp"] > 1 and draft.consumer.name == "accelerate" and len(draft.findings) == before:
        draft.report(
            "FSD356",
            f"tp {sizes['tp']}: accelerate 1.15 cannot prepare it with transformers 5.23",
            draft.at("tp"),
            value=True,
        )


def refuse_context_size(draft: Draft, size: int, processes: Any) -> bool:
    """Report a context-parallel size above 1 that the processes, where they are known, do not divide by."""
    if not isinstance(processes, int) or processes % size == 0:
        return False
    how = "cannot exceed" if size > processes else "must evenly divide"
    message = f"Context parallel size ({size}) {how} process count ({processes})."
    draft.report("FSD306", message, draft.at("cp"), value=True)
    return True


def _combinations(draft: Draft, sizes: dict[str, int], open_shard: bool) -> bool:
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        draft.report(
            "FSD311",
            f"cp {sizes['cp']} and sp {sizes['sp']} exclude each other",
            draft.at("sp", "cp"),
            value=True,
        )
        return True
    if sizes["sp"] > 1:
        draft.report(
            "FSD312",
            f"sp {sizes['sp']} does nothing under FSDP2: the sequence is not split",
            draft.at("sp"),
            value=True,
        )
        return True
    split = sizes["cp"] > 1 and draft.consumer.name != "fsdptool"
    beside = (sizes["tp"] > 1 or split) and sizes["dp_replicate"] > 1
    if beside and sizes["dp_shard"] == 1 and not open_shard:
        draft.report(
            "FSD313",
            "tp or cp with dp_replicate above 1 and dp_shard 1 is refused",
            draft.at("dp_replicate"),
            value=True,
        )
        return True
    return False


def _products(draft: Draft, sizes: dict[str, int], open_shard: bool, processes: Any, block: Any) -> None:
    total = 1
    for size in sizes.values():
        total *= size
    place = draft.at("dp_shard", "dp_replicate", "tp", "cp") or draft.root.get("parallelism_config")
    known = isinstance(processes, int)
    if total == 1 and not open_shard:
        edits = None
        entry = draft.root.get("parallelism_config")
        if block is not None and entry is not None:
            edits = draft.editor.remove(draft.root, entry)
        refused = draft.consumer.name == "fsdptool" and known and processes > 1
        draft.report(
            "FSD343",
            f"all mesh sizes are 1: not {processes} processes"
            if refused
            else "all mesh sizes are 1: accelerate builds no mesh and shards over all processes",
            entry,
            severity="error" if refused else "warning",
            edits=edits,
            safe=False,
            fix="remove parallelism_config",
            changes={"dp_shard": None},
        )
        return
    if open_shard:
        if known and processes % total:
            draft.report(
                "FSD308",
                f"mesh sizes multiply to {total}, which does not divide {processes} processes",
                place,
            )
            return
        if not known or processes // total > 1:
            return
    elif known and total != processes:
        shown = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
        draft.report("FSD308", f"the mesh {shown} has {total} places for {processes} processes", place)
        return
    if sizes["dp_shard"] == 1 and sizes["cp"] == 1:
        if sizes["tp"] > 1 and sizes["dp_replicate"] == 1:
            draft.report(
                "FSD310",
                f"tp {sizes['tp']} takes all processes: nothing is left to shard across",
                draft.at("tp"),
                value=True,
            )
        else:
            draft.report(
                "FSD309",
                "the mesh only replicates: nothing is sharded",
                draft.at("dp_replicate"),
                value=True,
            )
