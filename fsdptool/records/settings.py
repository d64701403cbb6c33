"""The one canonical form of every FSDP2 option, whatever dialect it was written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdptool.records.parallel_dims import ParallelDims
from fsdptool.records.schema import Count, Positive

WrapPolicy = Literal["transformer", "size", "none"]
StateDictType = Literal["sharded", "full"]
Precision = Literal["no", "fp16", "bf16", "fp8"]
CheckpointingMode = Literal["none", "full", "every_n", "selective"]


@dataclass(frozen=True, slots=True)
class FsdpSettings:
    """Every FSDP2 option. Dialects read into this and write out of it.

    It holds what a configuration file can say; what accelerate's YAML cannot express is the recipe's
    ``sharding`` (:class:`fsdptool.records.recipe.Sharding`).

    Attributes:
        wrap_policy: ``transformer`` wraps ``wrap_classes`` (empty: the model's
            ``_no_split_modules``), ``size`` wraps from ``min_num_params``, ``none`` wraps the root only.
        reshard_after_forward: True frees unsharded parameters after forward.
        state_dict_type: How checkpoints are written.
        cpu_offload: Parameters, gradients and optimizer states live in host memory.
        cpu_ram_efficient_loading: accelerate loads real weights on rank 0 only.
        activation_checkpointing: Recompute each wrapped block in backward.
        activation_checkpointing_offload: Keep the saved block inputs in host memory.
        ignored_modules: Regular expression (full match on module paths), or None.
        mixed_precision: As accelerate names it; ``no`` trains in the model's own dtype.
        cp_comm_strategy: How context parallelism exchanges keys and values.
        num_processes: World size, or None when the file leaves it to the command line.
        num_machines, machine_rank: Nodes of the run, and the rank of this one.
        main_process_ip, main_process_port, rdzv_backend: Rendezvous of the nodes.
        use_cpu: Train on the CPU.
        gpu_ids: ``all``, a comma-separated list, or None.
        debug: accelerate's own checks of collectives.
    """

    wrap_policy: WrapPolicy = "transformer"
    wrap_classes: tuple[str, ...] = ()
    min_num_params: int | None = None
    reshard_after_forward: bool = True
    state_dict_type: StateDictType = "sharded"
    cpu_offload: bool = False
    cpu_ram_efficient_loading: bool = False
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    ignored_modules: str | None = None
    mixed_precision: Precision = "bf16"
    mesh: ParallelDims = ParallelDims()  # noqa: RUF009 - frozen
    cp_comm_strategy: Literal["allgather", "alltoall"] = "allgather"
    num_processes: Positive | None = None
    num_machines: Positive = 1
    machine_rank: Count = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    use_cpu: bool = False
    gpu_ids: str | None = None
    debug: bool = False
