"""A training run with every setting decided: what planning, memory and training work from."""

from __future__ import annotations

from dataclasses import dataclass

from fsdptool.records.checkpointing import Checkpointing
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import TrainingLoop
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings, Grouping, Layout, Loading, WrapPolicy


@dataclass(frozen=True, slots=True)
class ResolvedSharding:
    """How parameters are grouped, computed, gathered and recomputed: the file's and the recipe's part in one.

    Attributes:
        layout: Who groups parameters.
        wrap_policy, wrap_classes, min_num_params: What becomes a block.
        ignored_modules: Regular expression of modules that are not sharded, or None.
        grouping: What forms units outside the blocks, in the native layout.
        reshard_after_forward: True, False or a number of ranks.
        checkpointing: What is recomputed in backward; mode ``none`` recomputes nothing.
        compute_dtype: What parameters are cast to for computing; None leaves them as they are stored.
        reduce_dtype, output_dtype: What the recipe asks for; the unit plan says what it comes to.
        cpu_offload: Whether shards, gradients and optimizer states live in host memory.
        prefetch: FSDP units to prefetch.
        trained_dtype: What trained shards are stored in; None: fp32 under mixed precision, else as built.
        float8: Whether FSDP gathers the weights of layers that multiply in float8 in float8, too.
    """

    layout: Layout
    wrap_policy: WrapPolicy
    wrap_classes: tuple[str, ...]
    min_num_params: int | None
    ignored_modules: str | None
    grouping: Grouping
    reshard_after_forward: bool | int
    checkpointing: Checkpointing
    compute_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    cpu_offload: bool
    prefetch: int
    float8: bool = False
    trained_dtype: str | None = None

    @property
    def recomputes(self) -> bool:
        """Whether blocks are recomputed in backward."""
        return self.checkpointing.mode != "none"


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run as ``fsdptool.modeling.resolve_run`` decided it; a search replaces fields of it.

    What file and recipe both have a part of is in ``sharding`` and ``mesh``: nobody reads it from the other
    two again.

    Attributes:
        recipe: The recipe with the dtypes that weights are stored in, and the accumulation of its batch.
        settings: What the file says beside ``sharding`` and ``mesh``.
        sharding: How parameters are grouped, computed, gathered and recomputed.
        mesh: Every size, the experts' included; ``dp_shard`` is open only where the launch decides the ranks.
        loop: Whose training loop it is, and what is assumed about it.
        flash: Whether its GPUs have torch's flash attention: NVIDIA's from Ampere on, and AMD's.
    """

    recipe: Recipe
    settings: FsdpSettings
    sharding: ResolvedSharding
    mesh: ParallelDims
    loop: TrainingLoop
    flash: bool = True

    @property
    def loading(self) -> Loading:
        """How the model is filled on GPUs: as the loop, or else the program that the layout is made for."""
        if self.loop.loading is not None:
            return self.loop.loading
        if self.sharding.layout == "native":
            return "rows"
        return "broadcast" if self.settings.cpu_ram_efficient_loading else "units"
