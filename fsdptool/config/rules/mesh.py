"""Rules on the device mesh: sizes, HSDP, context and tensor parallelism."""

from __future__ import annotations

from typing import Any

from fsdptool.config.dialects.protocol import LintContext
from fsdptool.config.programs import PROGRAMS, is_before
from fsdptool.config.rules.examples import FSDP1, FSDP2, added, sizes
from fsdptool.records.diagnostic import Example, Rule
from fsdptool.records.mesh import DIMENSIONS

MESH = (
    Rule("FSD305", "context parallelism without FSDP2", "error",
         "accelerate 1.15 shards the sequence on the mesh that FSDP2 builds; with FSDP1, DDP or no FSDP "
         "the run stops or ignores it. SimpleTuner 4.8 runs replicas although its documentation says that "
         "it refuses; axolotl supports it without FSDP, which is a note only.",
         "Set fsdp_version to 2, or the context-parallel size to 1.",
         example=Example(FSDP1 + sizes(cp=2), FSDP2 + sizes(dp_shard=4, cp=2))),
    Rule("FSD306", "context-parallel size against process count", "error",
         "The size must be a whole number of at least 1 that divides the number of processes.",
         "Choose a divisor of the process count.",
         example=added(sizes(cp=3), sizes(dp_shard=4, cp=2))),
    Rule("FSD307", "unknown context-parallel rotation", "error",
         "accelerate 1.15 knows `allgather` and `alltoall`.",
         "Write one of the two (--fix where the spelling is clear).", "safe",
         example=added(sizes(dp_shard=4, cp=2, cp_comm_strategy="ring"),
                       sizes(dp_shard=4, cp=2, cp_comm_strategy="alltoall"))),
    Rule("FSD308", "mesh does not multiply to the process count", "error",
         "accelerate 1.15: `ParallelismConfig total_size (...) does not match num_processes (...)`. Sizes "
         "that are not written are 1, never filled in.",
         "Make dp_replicate x dp_shard x cp x sp x tp equal to num_processes.",
         example=added(sizes(dp_shard=3), sizes(dp_shard=8))),
    Rule("FSD309", "mesh that only replicates", "error",
         "With dp_shard 1 and cp 1, FSDP2 cannot shard over any dimension: `FSDP is enabled but the "
         "parallelism config has no dimension for FSDP to shard across`.",
         "Give dp_shard a size above 1, or use MULTI_GPU for plain data parallelism.",
         example=added(sizes(dp_replicate=8), sizes(dp_replicate=2, dp_shard=4))),
    Rule("FSD310", "tensor parallelism over all processes", "error",
         "With tp_size equal to the process count, no dimension is left for FSDP2; accelerate 1.15 stops.",
         "Lower tp_size, or launch without FSDP.",
         example=added(sizes(tp=8), sizes(dp_shard=4, tp=2))),
    Rule("FSD311", "context and sequence parallelism together", "error",
         "accelerate 1.15: Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive.",
         "Set one of the two sizes to 1.",
         example=added(sizes(cp=2, sp=2), sizes(dp_shard=4, cp=2))),
    Rule("FSD312", "sequence parallelism without effect", "error",
         "SP in accelerate 1.15 is DeepSpeed's Ulysses. Under FSDP2 it is accepted, no sequence is split, "
         "and the parameters shard over the whole world.",
         "Set sp_size to 1, or use context parallelism (cp_size).",
         example=added(sizes(dp_shard=4, sp=2), sizes(dp_shard=4, cp=2))),
    Rule("FSD313", "replication next to tensor or context parallelism without sharding", "error",
         "accelerate 1.15: Tensor/Context parallelism cannot be used with pure data parallelism "
         "(dp_replicate_size > 1 and dp_shard_size == 1).",
         "Give dp_shard a size above 1, or set dp_replicate to 1.",
         example=added(sizes(dp_replicate=4, tp=2), sizes(dp_replicate=2, dp_shard=2, tp=2))),
    Rule("FSD328", "processes do not divide over the machines", "error",
         "In accelerate, `num_processes` is the total over all machines: the launcher starts num_processes "
         "// num_machines on each machine and drops the remainder.",
         "Make num_processes a multiple of num_machines.",
         example=added("num_machines: 3\n", "num_machines: 2\n")),
    Rule("FSD334", "hybrid sharding without a mesh", "error",
         "Under FSDP2 hybrid sharding is a mesh of dp_replicate x dp_shard, written in "
         "`parallelism_config`; the strategy name alone shards over all ranks.",
         "Write the mesh: replicate over machines, shard within. --unsafe-fixes writes it where "
         "num_processes and num_machines are written, and `fsdptool migrate` does so for FSDP1.", "unsafe",
         example=added("  fsdp_sharding_strategy: HYBRID_SHARD\n", sizes(dp_replicate=2, dp_shard=4),
                       to="num_machines: 2\n" + FSDP2)),
    Rule("FSD342", "parallelism block outside FSDP2", "error",
         "accelerate 1.15 accepts the block for FSDP2, multi-device and DeepSpeed runs only; with FSDP1 it "
         "fails when it builds the accelerator.",
         "Set fsdp_version to 2 or remove the block.",
         example=Example(FSDP1 + sizes(dp_shard=8), FSDP2 + sizes(dp_shard=8))),
    Rule("FSD343", "parallelism block without effect", "warning",
         "All sizes are 1 (or no key is read): accelerate 1.15 does not build a mesh and shards over all "
         "processes, as without the block. fsdptool's own trainer refuses a mesh that does not multiply to "
         "the process count.",
         "Give dp_shard_size the number of processes, or remove the block (--unsafe-fixes "
         "removes it).", "unsafe",
         example=added(sizes(dp_shard=1), sizes(dp_shard=8))),
    Rule("FSD347", "context parallelism on this device", "error",
         "On CPU torch 2.13 has no sharding strategy for the attention kernel (`Operator "
         "aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy "
         "registered`); MPS and ROCm were never supported.",
         "Set the context-parallel size to 1 on this device, or train with `fsdptool train`, whose "
         "attention over gathered keys and values also runs there (consumer fsdptool).",
         example=added("use_cpu: true\n", to=FSDP2 + sizes(dp_shard=4, cp=2))),
    Rule("FSD356", "tensor parallelism fails to start", "warning",
         "accelerate 1.10 to 1.15 (`Accelerator._prepare_tp`) imports a class that transformers has not had "
         "since 5.1: `cannot import name 'ReplicateParallel'`. Up to accelerate 1.12 that stops every model "
         "(an error). From 1.13 on it stops models whose parameters are DTensors, as those that transformers "
         "5.16 and newer divides; preparation skips any other model, and the ranks of the tp dimension "
         "repeat each other's work.",
         "Set tp_size to 1 and give the processes to dp_shard_size, train with `fsdptool train`, or use "
         "accelerate 1.13 or newer with transformers 5.0.",
         example=added(sizes(dp_shard=4, tp=2), sizes(dp_shard=8),
                       options="--target accelerate==1.15,transformers==5.23")),
    Rule("FSD361", "dimension that fsdptool's settings do not have", "info",
         "torchtitan splits models over pipeline stages and experts over ranks; an accelerate YAML can "
         "express neither. The file is explained, but its settings cannot be planned from or migrated.",
         "Set the degree to 1, and give `fsdptool plan` --pp or --ep instead.",
         example=added("8\n", "1\n", to="[model]\nname = 'm'\n[parallelism]\nexpert_parallel_degree = ")),
    Rule("FSD363", "tensor parallelism that accelerate does not see", "warning",
         "transformers 5.1 to 5.15 divides the layers of a model loaded with `tp_plan` as plain tensors. "
         "accelerate 1.13 to 1.15 then skips its preparation (`The model parameters are not sharded by "
         "DTensor`), and FSDP2 takes one rank's part for the whole parameter: gradient norms, clipping and "
         "the full state dicts that it gathers lack the other ranks of the tp dimension. Without `tp_plan` "
         "those ranks repeat each other's work.",
         "Set tp_size to 1 and give the processes to dp_shard_size, or train with `fsdptool train`.",
         example=added(sizes(dp_shard=4, tp=2), sizes(dp_shard=8),
                       options="--target accelerate==1.14,transformers==5.12")),
    Rule("FSD364", "tensor parallelism needs a model loaded for it", "info",
         "accelerate builds the mesh and divides no layer. Unless the script loads the model with "
         "`tp_plan` and the `tp` dimension of the mesh, the ranks of that dimension repeat each other's "
         "work.",
         "Load the model with `from_pretrained(..., tp_plan=\"auto\", device_mesh=mesh[\"tp\"])`.",
         example=added(sizes(dp_shard=4, tp=2), sizes(dp_shard=8),
                       options="--target accelerate==1.12,transformers==5.0")),
)  # fmt: skip


def check_mesh(lint: LintContext) -> None:
    """Report what accelerate 1.15's ``ParallelismConfig`` would refuse, ignore or run differently.

    Sources: ``parallelism_config.py:__post_init__`` and ``_validate_accelerator``; SimpleTuner 4.8.0's
    context-parallel checks.
    """
    sizes = {key: lint.get(key) or 1 for key in DIMENSIONS}
    if sizes["cp"] > 1 and lint.get("fsdp_version") == 1:
        lint.report("FSD305", "Context parallelism requires FSDP2.", "cp")
        return
    block = lint.parallelism_block
    if block is not None and lint.get("fsdp_version") == 1:
        lint.report("FSD342", "parallelism_config needs fsdp_version 2", lint.root.get("parallelism_config"))
        return
    open_shard = lint.get("dp_shard") is None
    processes = lint.get("num_processes")
    if sizes["cp"] > 1 and refuse_context_size(lint, sizes["cp"], processes):
        return
    if block is None and open_shard and all(size == 1 for size in sizes.values()):
        return
    if _combinations(lint, sizes, open_shard):
        return
    before = len(lint.findings)
    _products(lint, sizes, open_shard, processes, block)
    if sizes["tp"] > 1 and lint.consumer.name == "accelerate" and len(lint.findings) == before:
        _tensor_parallel(lint, sizes["tp"])


def _tensor_parallel(lint: LintContext, size: int) -> None:
    """Report what becomes of tensor parallelism with this accelerate and this transformers.

    Read in the sources of accelerate 1.10 to 1.15 (``Accelerator._prepare_tp``) and transformers 5.0 to 5.23
    (``integrations/tensor_parallel.py``, ``distributed/tensor_parallel.py``): the class that accelerate
    imports is in no transformers from 5.1 on; parameters of models that transformers divides are DTensors up
    to 5.0 and from 5.16 on; accelerate leaves models without DTensors alone from 1.13 on.
    """
    consumer, version = lint.consumer, lint.consumer.version_of("transformers")
    pair = f"tp {size}: {consumer} with transformers {version}"
    old = is_before(version, 5, 1)
    if not old and consumer.before(1, 13):
        lint.report_value("FSD356", f"{pair} cannot prepare any model", "tp", severity="error")
    elif not old and not is_before(version, 5, 16):
        lint.report_value("FSD356", f"{pair} cannot prepare a divided model", "tp")
    elif not old:
        lint.report_value("FSD363", f"{pair} takes one rank's part for the whole model", "tp")
    else:
        lint.report("FSD364", f"{pair} divides only a model that was loaded with tp_plan", "tp")


def refuse_context_size(lint: LintContext, size: int, processes: Any) -> bool:
    """Report a context-parallel size above 1 that the processes, where they are known, do not divide by."""
    if not isinstance(processes, int) or processes % size == 0:
        return False
    how = "cannot exceed" if size > processes else "must evenly divide"
    message = f"Context parallel size ({size}) {how} process count ({processes})."
    lint.report_value("FSD306", message, "cp")
    return True


def _combinations(lint: LintContext, sizes: dict[str, int], open_shard: bool) -> bool:
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        lint.report_value(
            "FSD311", f"cp {sizes['cp']} and sp {sizes['sp']} exclude each other", lint.at("sp", "cp")
        )
        return True
    if sizes["sp"] > 1:
        lint.report_value(
            "FSD312", f"sp {sizes['sp']} has no effect under FSDP2: sequences are not split", "sp"
        )
        return True
    split = sizes["cp"] > 1 and lint.consumer.name != "fsdptool"
    beside = (sizes["tp"] > 1 or split) and sizes["dp_replicate"] > 1
    # A program that a dialect brings builds its own mesh, and not accelerate's.
    if beside and lint.consumer.name in PROGRAMS and sizes["dp_shard"] == 1 and not open_shard:
        lint.report_value(
            "FSD313", "accelerate refuses tp or cp with dp_replicate above 1 and dp_shard 1", "dp_replicate"
        )
        return True
    return False


def _products(lint: LintContext, sizes: dict[str, int], open_shard: bool, processes: Any, block: Any) -> None:
    total = 1
    for size in sizes.values():
        total *= size
    place = lint.at("dp_shard", "dp_replicate", "tp", "cp") or lint.root.get("parallelism_config")
    known = isinstance(processes, int)
    if total == 1 and not open_shard:
        edits = None
        entry = lint.root.get("parallelism_config")
        if block is not None and entry is not None:
            edits = lint.editor.remove(lint.root, entry)
        refused = lint.consumer.name == "fsdptool" and known and processes > 1
        lint.report(
            "FSD343",
            f"all mesh sizes are 1, but there are {processes} processes"
            if refused
            else "all mesh sizes are 1: accelerate does not build a mesh and shards over all processes",
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
            lint.report(
                "FSD308",
                f"mesh sizes multiply to {total}, which does not divide {processes} processes",
                place,
            )
            return
        if not known or processes // total > 1:
            return
    elif known and total != processes:
        shown = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
        lint.report("FSD308", f"the mesh {shown} is for {total} processes, not {processes}", place)
        return
    if sizes["dp_shard"] == 1 and sizes["cp"] == 1:
        if sizes["tp"] > 1 and sizes["dp_replicate"] == 1:
            lint.report_value(
                "FSD310", f"tp {sizes['tp']} uses all processes: no dimension is left to shard over", "tp"
            )
        else:
            lint.report_value(
                "FSD309", "the mesh only replicates: parameters are not sharded", "dp_replicate"
            )


def launched_by_accelerate(lint: LintContext) -> bool:
    """Whether accelerate's own launcher and plugin will read the settings."""
    return lint.consumer.name in ("accelerate", "fsdptool")


def check_processes(lint: LintContext) -> None:
    """Report process counts, machines, addresses and GPU ids that do not go together."""
    processes, machines = lint.get("num_processes"), lint.get("num_machines") or 1
    cpu = lint.get("use_cpu")
    if cpu and lint.consumer.name == "accelerate":
        lint.report("FSD314", "accelerate runs FSDP on CPU without sharding", "use_cpu")
    # Our trainer has an attention of its own for split sequences, on every device.
    if cpu and (lint.get("cp") or 1) > 1 and lint.consumer.name != "fsdptool":
        lint.report("FSD347", "context parallelism does not work on CPU", "cp")
    if not launched_by_accelerate(lint):
        return
    written = lint.at("num_processes")
    if processes is None:
        # The launcher: "You need to manually pass in `--num_processes` using this config yaml."
        unsaid = written is None or (
            written.node.kind == "scalar" and written.node.value in (None, -1)
        )  # else it is a finding of its own
        if unsaid and "num_processes" not in (*lint.dialect.cannot, *lint.open):
            lint.report("FSD326", "num_processes is not written", "num_processes")
    elif isinstance(processes, int):
        if processes % machines:
            lint.report_value(
                "FSD328",
                f"{processes} process{'' if processes == 1 else 'es'} cannot be divided evenly over"
                f" {machines} machines",
                "num_processes",
            )
        elif processes == 1:
            lint.report_value("FSD327", "FSDP over a single process", "num_processes")
    elif machines > 1:
        lint.report_value(
            "FSD205",
            f"num_processes {processes!r} cannot be divided over {machines} machines",
            "num_processes",
        )
    if machines > 1 and not lint.get("main_process_ip") and "main_process_ip" not in lint.open:
        missing = [
            key
            for key in ("main_process_ip", "main_process_port")
            if not lint.get(key) and key not in lint.open
        ]
        lint.report("FSD329", f"several machines without {' and '.join(missing)}", "num_machines")
    _gpu_ids(lint, processes, machines)


def _gpu_ids(lint: LintContext, processes: Any, machines: int) -> None:
    ids = lint.get("gpu_ids")
    if (
        "num_machines" in lint.open
        or not isinstance(ids, str)
        or ids in ("all", "")
        or not isinstance(processes, int)
    ):
        return
    count = len([part for part in ids.split(",") if part.strip()])
    if count != processes // max(machines, 1):
        lint.report_value(
            "FSD331", f"{count} GPU ids for {processes // max(machines, 1)} processes per machine", "gpu_ids"
        )
