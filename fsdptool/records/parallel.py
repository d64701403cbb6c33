"""How a model is split over the ranks of a tensor-parallel or expert-parallel group, parameter by parameter.

Tensor parallelism divides single layers (Megatron-LM, arXiv:1909.08053): a *column* layer holds a part of its
output features, the *row* layer behind it the same part of its input features, and the sum over the group of
what the row layers return is the whole layer's output. Between them lies a *region*: a module whose input is
equal on all ranks of the group and whose inside is divided. Gradients that leave a region through its input,
and gradients of parameters that stay whole inside it (norms of queries and keys), are summed over the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fsdptool.records.schema import Count, Positive

SplitStyle = Literal["column", "row", "vocabulary", "experts"]
"""How a module is split.

``column``: output features, so weight rows and the bias. ``row``: input features; the bias stays whole and is
added once, after the sum. ``vocabulary``: rows of an embedding table, and output features of the head, whose
logits stay divided. ``experts``: whole experts of fused expert tensors (dimension 0).
"""

WholeReason = Literal[
    "norm",  # a norm, whose input is not divided or whose weight is shared by all heads
    "router",  # a mixture's router: every rank needs the scores of all experts
    "after_sum",  # the bias of a row layer, added once after the sum
    "latent",  # a low-rank projection in front of divided ones: dividing it would need another collective
    "embedding",  # a table that is not divided (positions, types, or a vocabulary that does not divide)
    "head",  # an output layer that is not divided
    "state",  # a recurrence or convolution along the sequence: its channels are mixed
    "unknown",  # neither the library nor the structure tells how to divide it
    "overridden",  # the family keeps it whole
]

PlanOrigin = Literal["library", "structure", "family"]
"""Who says how a module is split: the library's own plan, the structure of the model, or its family."""


@dataclass(frozen=True, slots=True)
class SplitModule:
    """One module whose parameters are split.

    Attributes:
        path: Module path in the published model.
        style: How it is split.
        sections: Sizes of the parts of the divided dimension that are cut separately, in global elements: a
            fused query, key and value projection has three. They add up to the dimension; empty means one.
        transposed: Whether the weight is stored as (in, out), as transformers' ``Conv1D`` does.
        origin: Who says so.
    """

    path: str
    style: SplitStyle
    sections: tuple[int, ...] = ()
    transposed: bool = False
    origin: PlanOrigin = "structure"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one parameter lies on a tensor-parallel group.

    Attributes:
        fqn: Name in the model as it is trained.
        shape: Global shape.
        dim: The divided dimension, or None where the parameter is whole on every rank.
        sections: Parts of that dimension that are cut separately, in global elements; one at least.
        partial_gradient: Whether the ranks' gradients must be summed over the group: the parameter is whole
            and its input or output divided.
        reason: Why it is whole; None where it is divided.
    """

    fqn: str
    shape: tuple[int, ...]
    dim: int | None = None
    sections: tuple[int, ...] = ()
    partial_gradient: bool = False
    reason: WholeReason | None = None

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape on one of ``size`` ranks."""
        if self.dim is None:
            return self.shape
        return tuple(n // size if at == self.dim else n for at, n in enumerate(self.shape))

    def pieces(self, size: int, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the rank's tensor, offset in the whole one, length) along ``dim``, in order."""
        inside = whole = 0
        for section in self.sections:
            length = section // size
            yield inside, whole + rank * length, length
            inside += length
            whole += section


@dataclass(frozen=True, slots=True)
class Indivisible:
    """A size that the group does not divide.

    Attributes:
        what: What is counted: ``attention heads``, ``key and value heads``, ``experts``, ...
        where: Path of the module, or of the first of several alike.
        count: How many there are.
        valid: Group sizes nearest to the requested one that divide it, ascending.
    """

    what: str
    where: str
    count: Count
    valid: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one model is split over ``size`` ranks.

    Attributes:
        size: Ranks of the tensor-parallel group.
        regions: Paths of modules whose input is whole and whose inside is divided. No region lies in another.
            A column layer outside all regions is a region by itself.
        modules: Every split module.
        heads: Numbers of heads that attributes of attention modules name, in global terms, by path of the
            region: they are divided with the layers.
        indivisible: What the group does not divide; empty where the model can be split.
        notes: Findings about the library's own plan: entries that match nothing, or contradict the modules.
    """

    size: Positive
    regions: tuple[str, ...] = ()
    modules: tuple[SplitModule, ...] = ()
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    indivisible: tuple[Indivisible, ...] = ()
    notes: tuple[str, ...] = ()
