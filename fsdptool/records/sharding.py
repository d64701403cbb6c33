"""How a run shards a model: its canonical FSDP2 options, and its FSDP units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdptool.records.anatomy import Parameter
from fsdptool.records.annotations import Count, Positive
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.tensor_plan import Placement, TensorPlan

Layout = Literal["native", "accelerate"]
"""Whose rule groups the parameters into FSDP units."""
ALL_MODULES = ".*"
"""``ignored_modules`` of a run whose ranks all hold a copy (DDP, or one process): nothing is sharded."""
WrapPolicy = Literal["transformer", "size", "none"]
StateDictType = Literal["sharded", "full"]
Precision = Literal["no", "fp16", "bf16", "fp8"]
Loading = Literal["rows", "broadcast", "units"]
"""How a training loop fills a model on GPUs (docs/reference/layouts.md).

``rows``: each rank reads or makes its own rows on the host, as ``fsdptool train`` does. ``broadcast``: rank 0
sends one whole parameter after the other, as accelerate does with ``cpu_ram_efficient_loading``. ``units``:
each rank moves whole FSDP units to its GPU, as accelerate does without it.
"""
CheckpointingMode = Literal["none", "full", "every_n", "selective", "per_block"]


@dataclass(frozen=True, slots=True)
class Grouping:
    """How the native layout groups what lies outside the blocks, and whether the last block stays gathered.

    The defaults are the trainer's own. torchtitan put embedding and head into the root and kept the last
    block gathered until its pull request 1094 of 2025, and groups as the defaults do since.

    Attributes:
        embedding: Large untied embeddings are units of their own, or belong to the root.
        head: An untied head and the final norm form a tail that is not resharded, or belong to the root.
        last_block: Whether the last block is resharded after forward as the others are, or stays gathered
            for backward, which begins with it.
    """

    embedding: Literal["unit", "root"] = "unit"
    head: Literal["tail", "root"] = "tail"
    last_block: Literal["resharded", "gathered"] = "resharded"


UnitKind = Literal["embedding", "block", "shared", "tail", "root", "experts"]


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
    mesh: ParallelDims = field(default_factory=ParallelDims)
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


@dataclass(frozen=True, slots=True)
class Unit:
    """One ``fully_shard`` call.

    Attributes:
        id: ``root``, or the first module path joined by ``+`` with the others.
        kind: Role of the unit.
        modules: Module paths passed to ``fully_shard`` together; ``("",)`` is the model itself.
        class_name: Class of the first module.
        parameters: Parameters the unit owns (unique, in the order FSDP2 manages them).
        reshard_after_forward: True, False, a number of ranks, or None for torch's own rule
            (root False, others True: ``_fully_shard.py``).
        unshard_in_backward: False where backward does not need the parameters (embeddings).
        checkpointed: Whether the unit's forward is recomputed in backward.
        save_operators: Selectors of the outputs that recomputation finds saved
            (:func:`fsdptool.records.checkpointing.read_selector`).
        called: False where the modules' forwards never run, so that FSDP gathers nothing: the loop gathers
            the shards itself (``DTensor.full_tensor``), in the dtype that they are stored in.
    """

    id: str
    kind: UnitKind
    modules: tuple[str, ...]
    class_name: str
    parameters: tuple[Parameter, ...]
    reshard_after_forward: bool | int | None = True
    unshard_in_backward: bool = True
    checkpointed: bool = False
    save_operators: tuple[str, ...] = ()
    called: bool = True

    @property
    def numel(self) -> int:
        """Parameters of the unit, by element count."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def signature(self) -> tuple[str, tuple[tuple[tuple[int, ...], str, bool], ...]]:
        """Equal for units that behave alike: class, and shapes, dtypes and trainability in order."""
        return self.class_name, tuple((p.shape, p.dtype, p.trainable) for p in self.parameters)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Every unit of a model, in the order ``fully_shard`` must be called (root last).

    Attributes:
        layout: ``native`` or ``accelerate`` (docs/reference/layouts.md).
        units: Bottom-up; the root is last and may own no parameter.
        param_dtype, reduce_dtype, output_dtype: FSDP2's ``MixedPrecisionPolicy``; None leaves
            the tensor's own dtype.
        master_dtype: dtype the trainable shards are stored in; None leaves each as built.
        input_dtype: What the model's floating inputs are cast to; None leaves each as it comes.
        exact_inputs: Arguments of forward that are left out of that cast (``Family.exact_inputs``).
        ignored: Parameters left out of sharding, replicated on every rank.
        cpu_offload: ``CPUOffloadPolicy`` instead of device shards.
        prefetch: FSDP units to prefetch; 1 is FSDP2's implicit prefetch.
        tensor: How a tensor-parallel or an expert-parallel group divides the model, whose units then list
            local shapes; or None.
        placements: Where each parameter lies on that group; empty without one.
        float8: Names of the weights whose layers multiply in float8 (:meth:`gathers_in_float8`).
    """

    layout: Literal["native", "accelerate"]
    units: tuple[Unit, ...]
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    master_dtype: str | None = None
    input_dtype: str | None = None
    exact_inputs: tuple[str, ...] = ()
    ignored: tuple[Parameter, ...] = ()
    cpu_offload: bool = False
    prefetch: int = 1
    tensor: TensorPlan | None = None
    experts: TensorPlan | None = None
    placements: tuple[Placement, ...] = ()
    float8: tuple[str, ...] = ()

    def gathers_in_float8(self, unit: Unit, parameter: Parameter, ranks: int) -> bool:
        """Return whether a parameter of ``unit`` is gathered in float8 from the ``ranks`` that shard it.

        Each rank casts its own rows, without the padding that torch expects of uneven ones, so the ranks must
        divide the rows. torch 2.13 does not gather a cast again that it resharded to fewer ranks, and rows
        that are offloaded lose theirs where they are copied to the device
        (``_fsdp_param.py:all_gather_inputs``). One rank gathers nothing. The ranks of experts are others than
        those that agree on scales.
        """
        return (
            parameter.fqn in self.float8
            and unit.kind != "experts"
            and ranks > 1
            and parameter.shape[0] % ranks == 0
            and type(unit.reshard_after_forward) is not int
            and not self.cpu_offload
        )

    def shard_dimension(self, unit: Unit, shape: Sequence[int], ranks: int) -> int:
        """Return the dimension along which a parameter of ``unit`` is sharded over ``ranks`` ranks.

        It is dimension 0 but for fused experts ``[experts, rows, columns]`` of which there are fewer than
        ranks: along dimension 0 most ranks would store nothing and the others whole experts. Their matrices
        are cut by rows instead, as torchtitan cuts them (``shard_placement_fn`` of ``fully_shard``). torch
        cuts another dimension than the first only into even parts, reshards it to no smaller group
        (2.13, ``_fsdp_param.py:_init_sharded_param, _init_sharded_post_forward_param_metadata``), and
        accelerate 1.15 passes no such function.
        """
        if self.layout == "accelerate" or type(unit.reshard_after_forward) is int:
            return 0
        if (self.tensor or self.experts) is not None and unit.kind != "experts":
            return 0
        # One row of three dimensions is an expert that its group has alone, or a table of positions.
        least = 1 if unit.kind == "experts" else 2
        fused = len(shape) == 3 and least <= shape[0] < ranks
        return 1 if fused and shape[1] % ranks == 0 else 0
