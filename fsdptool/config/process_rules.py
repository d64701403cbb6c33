"""The rules on processes: their number, the machines, where they meet, and whose GPUs they use."""

from __future__ import annotations

from typing import Any

from fsdptool.config.draft import Draft


def launched_by_accelerate(draft: Draft) -> bool:
    """Whether accelerate's own launcher and plugin will read the settings."""
    return draft.consumer.name in ("accelerate", "fsdptool")


def judge_processes(draft: Draft) -> None:
    """Report process counts, machines, addresses and GPU ids that do not go together."""
    processes, machines = draft.get("num_processes"), draft.get("num_machines") or 1
    cpu = draft.get("use_cpu")
    if cpu and draft.consumer.name == "accelerate":
        draft.report("FSD314", "FSDP on CPU: accelerate runs this unsharded", draft.at("use_cpu"))
    # Our trainer has an attention of its own for split sequences, on every device.
    if cpu and (draft.get("cp") or 1) > 1 and draft.consumer.name != "fsdptool":
        draft.report("FSD347", "context parallelism does not work on CPU", draft.at("cp"))
    if not launched_by_accelerate(draft):
        return
    if processes is None:
        # The launcher: "You need to manually pass in `--num_processes` using this config yaml."
        if draft.dialect != "env":  # which has no word for it
            draft.report("FSD326", "num_processes is not written", draft.at("num_processes"))
    elif isinstance(processes, int):
        if processes == 1:
            draft.report("FSD327", "FSDP over a single process", draft.at("num_processes"), value=True)
        elif processes % machines:
            draft.report(
                "FSD328",
                f"{processes} processes do not divide over {machines} machines",
                draft.at("num_processes"),
                value=True,
            )
    elif machines > 1:
        draft.report(
            "FSD205",
            f"num_processes {processes!r} cannot be divided over {machines} machines",
            draft.at("num_processes"),
            value=True,
        )
    if machines > 1 and not draft.get("main_process_ip"):
        draft.report("FSD329", "several machines and no main_process_ip", draft.at("num_machines"))
    _gpu_ids(draft, processes, machines)


def _gpu_ids(draft: Draft, processes: Any, machines: int) -> None:
    ids = draft.get("gpu_ids")
    if not isinstance(ids, str) or ids in ("all", "") or not isinstance(processes, int):
        return
    count = len([part for part in ids.split(",") if part.strip()])
    if count != processes // max(machines, 1):
        draft.report(
            "FSD331",
            f"{count} GPU ids for {processes // max(machines, 1)} processes per machine",
            draft.at("gpu_ids"),
            value=True,
        )
