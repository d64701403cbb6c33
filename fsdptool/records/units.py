"""FSDP units: which parameters form which ``fully_shard`` group, and how each behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdptool.records.anatomy import Parameter

UnitKind = Literal["embedding", "block", "shared", "tail", "root"]


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
    """

    id: str
    kind: UnitKind
    modules: tuple[str, ...]
    class_name: str
    parameters: tuple[Parameter, ...]
    reshard_after_forward: bool | int | None = True
    unshard_in_backward: bool = True
    checkpointed: bool = False

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
        layout: ``native`` or ``accelerate`` (docs/layouts.md).
        units: Bottom-up; the root is last and may own no parameter.
        param_dtype, reduce_dtype, output_dtype: FSDP2's ``MixedPrecisionPolicy``; None leaves
            the tensor's own dtype.
        master_dtype: dtype the trainable shards are stored in; None leaves each as built.
        input_dtype: What the model's floating inputs are cast to; None leaves each as it comes.
        exact_inputs: Arguments of forward that are left out of that cast (``Family.exact_inputs``).
        ignored: Parameters left out of sharding, replicated on every rank.
        cpu_offload: ``CPUOffloadPolicy`` instead of device shards.
        prefetch: FSDP units to prefetch; 1 is FSDP2's implicit prefetch.
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
