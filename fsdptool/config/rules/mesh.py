"""Rules on the device mesh: sizes, HSDP, context and tensor parallelism."""

from __future__ import annotations

from fsdptool.records.diagnostic import Rule

MESH = (
    Rule("FSD305", "context parallelism without FSDP2", "error",
         "accelerate 1.15 shards the sequence on the mesh that FSDP2 builds; with FSDP1, DDP or no FSDP "
         "the run stops or ignores it. SimpleTuner 4.8 runs replicas although its documentation says that "
         "it refuses; axolotl supports it without FSDP, which is a note only.",
         "Set fsdp_version to 2, or the context-parallel size to 1."),
    Rule("FSD306", "context-parallel size against process count", "error",
         "The size must be a whole number of at least 1 that divides the number of processes.",
         "Choose a divisor of the process count."),
    Rule("FSD307", "unknown context-parallel rotation", "error",
         "accelerate 1.15 knows `allgather` and `alltoall`.",
         "Write one of the two (--fix where the spelling is clear).", "safe"),
    Rule("FSD308", "mesh does not multiply to the process count", "error",
         "accelerate 1.15: `ParallelismConfig total_size (...) does not match num_processes (...)`. Sizes "
         "that are not written are 1, never filled in.",
         "Make dp_replicate x dp_shard x cp x sp x tp equal to num_processes."),
    Rule("FSD309", "mesh that only replicates", "error",
         "With dp_shard 1 and cp 1, FSDP2 cannot shard over any dimension: `FSDP is enabled but the "
         "parallelism config has no dimension for FSDP to shard across`.",
         "Give dp_shard a size above 1, or use MULTI_GPU for plain data parallelism."),
    Rule("FSD310", "tensor parallelism over all processes", "error",
         "With tp_size equal to the process count, no dimension is left for FSDP2; accelerate 1.15 stops.",
         "Lower tp_size, or launch without FSDP."),
    Rule("FSD311", "context and sequence parallelism together", "error",
         "accelerate 1.15: Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive.",
         "Set one of the two sizes to 1."),
    Rule("FSD312", "sequence parallelism without effect", "error",
         "SP in accelerate 1.15 is DeepSpeed's Ulysses. Under FSDP2 it is accepted, no sequence is split, "
         "and the parameters shard over the whole world.",
         "Set sp_size to 1, or use context parallelism (cp_size)."),
    Rule("FSD313", "replication next to tensor or context parallelism without sharding", "error",
         "accelerate 1.15: Tensor/Context parallelism cannot be used with pure data parallelism "
         "(dp_replicate_size > 1 and dp_shard_size == 1).",
         "Give dp_shard a size above 1, or set dp_replicate to 1."),
    Rule("FSD328", "processes do not divide over the machines", "error",
         "In accelerate, `num_processes` is the total over all machines: the launcher starts num_processes "
         "// num_machines on each machine and drops the remainder.",
         "Make num_processes a multiple of num_machines."),
    Rule("FSD334", "hybrid sharding without a mesh", "error",
         "Under FSDP2 hybrid sharding is a mesh of dp_replicate x dp_shard, written in "
         "`parallelism_config`; the strategy name alone shards over all ranks.",
         "Write the mesh: replicate over machines, shard within. --unsafe-fixes writes it where "
         "num_processes and num_machines are written, and `fsdptool migrate` does so for FSDP1.", "unsafe"),
    Rule("FSD342", "parallelism block outside FSDP2", "error",
         "accelerate 1.15 accepts the block for FSDP2, multi-device and DeepSpeed runs only; with FSDP1 it "
         "fails when it builds the accelerator.",
         "Set fsdp_version to 2 or remove the block."),
    Rule("FSD343", "parallelism block without effect", "warning",
         "All sizes are 1 (or no key is read): accelerate 1.15 does not build a mesh and shards over all "
         "processes, as without the block. fsdptool's own trainer refuses a mesh that does not multiply to "
         "the process count.",
         "Give dp_shard_size the number of processes, or remove the block (--unsafe-fixes "
         "removes it).", "unsafe"),
    Rule("FSD347", "context parallelism on this device", "error",
         "On CPU torch 2.13 has no sharding strategy for the attention kernel (`Operator "
         "aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy "
         "registered`); MPS and ROCm were never supported.",
         "Set the context-parallel size to 1 on this device, or train with `fsdptool train`, whose "
         "attention over gathered keys and values also runs there (consumer fsdptool)."),
    Rule("FSD356", "tensor parallelism fails to start", "warning",
         "accelerate 1.10 to 1.15 (`Accelerator._prepare_tp`) imports a class that transformers has not had "
         "since 5.1: `cannot import name 'ReplicateParallel'`. Up to accelerate 1.12 that stops every model "
         "(an error). From 1.13 on it stops models whose parameters are DTensors, as those that transformers "
         "5.16 and newer divides; preparation skips any other model, and the ranks of the tp dimension "
         "repeat each other's work.",
         "Set tp_size to 1 and give the processes to dp_shard_size, train with `fsdptool train`, or use "
         "accelerate 1.13 or newer with transformers 5.0."),
    Rule("FSD361", "dimension that fsdptool's settings do not have", "info",
         "torchtitan splits models over pipeline stages and experts over ranks; an accelerate YAML can "
         "express neither. The file is explained, but its settings cannot be planned from or migrated.",
         "Set the degree to 1, and give `fsdptool plan` --pp or --ep instead."),
    Rule("FSD363", "tensor parallelism that accelerate does not see", "warning",
         "transformers 5.1 to 5.15 divides the layers of a model loaded with `tp_plan` as plain tensors. "
         "accelerate 1.13 to 1.15 then skips its preparation (`The model parameters are not sharded by "
         "DTensor`), and FSDP2 takes one rank's part for the whole parameter: gradient norms, clipping and "
         "the full state dicts that it gathers lack the other ranks of the tp dimension. Without `tp_plan` "
         "those ranks repeat each other's work.",
         "Set tp_size to 1 and give the processes to dp_shard_size, or train with `fsdptool train`."),
    Rule("FSD364", "tensor parallelism needs a model loaded for it", "info",
         "accelerate builds the mesh and divides no layer. Unless the script loads the model with "
         "`tp_plan` and the `tp` dimension of the mesh, the ranks of that dimension repeat each other's "
         "work.",
         "Load the model with `from_pretrained(..., tp_plan=\"auto\", device_mesh=mesh[\"tp\"])`."),
)  # fmt: skip
