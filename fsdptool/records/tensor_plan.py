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

from fsdptool.records.annotations import Count, Positive

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
    "state",  # a recurrence along the sequence, whose projections serve all channels at once
    "spanned",  # a layer whose output goes through a norm over the divided width
    "stream",  # between the regions: patches, conditions and modulations that act on the whole residual
    "coupled",  # its code treats all heads at once: positions made for all of them, a layout for other parts
    "unknown",  # neither the library nor the structure tells how to divide it
    "overridden",  # the family keeps it whole
]

PlanOrigin = Literal["library", "structure", "family"]
"""Who says how a module is split: the library's own plan, the structure of the model, or its family."""


@dataclass(frozen=True, slots=True)
class SplitModule:
    """One module whose parameters are split.

    The dimension of outputs is the first of a matrix and the second of a stack of matrices ([experts, out,
    in]), that of inputs the last; ``transposed`` exchanges the two. A vector, and a parameter whose name ends
    in ``bias``, is divided along its last dimension under ``column`` and stays whole under ``row``.

    Attributes:
        path: Module path in the published model, or the full name of a parameter that no layer of its own
            holds (fused experts, attention sinks).
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
    """Where one parameter lies on a tensor-parallel or an expert-parallel group.

    Attributes:
        fqn: Name in the model as it is trained.
        shape: Global shape.
        dim: The divided dimension, or None where the parameter is whole on every rank.
        sections: Parts of that dimension that are cut separately, in global elements; one at least.
        partial_gradient: Whether the ranks' gradients must be summed over the group: the parameter is whole
            and its input or output divided.
        reason: Why it is whole; None where it is divided.
        aliases: Further names of the same tensor (ties).
        experts: Whether it is divided over an expert-parallel group instead.
    """

    fqn: str
    shape: tuple[int, ...]
    dim: int | None = None
    sections: tuple[int, ...] = ()
    partial_gradient: bool = False
    reason: WholeReason | None = None
    aliases: tuple[str, ...] = ()
    experts: bool = False

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
        where: Path of the module, or of the first of several similar ones.
        count: How many there are.
        valid: Group sizes nearest to the requested one that divide the whole model, ascending.
    """

    what: str
    where: str
    count: Count
    valid: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Where the ranks of a group divide hidden states along the sequence (Megatron-LM, arXiv:2205.05198).

    From the input of the first block to the output of the norm behind the last, each rank holds a part of
    every sequence. Regions in between gather it at their entry and scatter what they sum at their exit.

    Attributes:
        blocks: Path of the list of blocks.
        end: Path of the norm behind the last block: what it returns is gathered.
    """

    blocks: str
    end: str

    def covers(self, name: str) -> bool:
        """Return whether a module or a parameter computes with a part of each sequence, or lies in a region
        of a module that does."""
        return name.startswith((f"{self.blocks}.", f"{self.end}."))


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one model is split over ``size`` ranks.

    Attributes:
        size: Ranks of the tensor-parallel group.
        regions: Paths of modules whose input is whole and whose inside is divided. No region lies in another.
            A column layer outside all regions is a region by itself.
        modules: Every split module.
        heads: Heads of queries, and of keys and values, in global terms, by path of the attention module.
        attributes: Integer attributes by module path, with their global values: each is divided by ``size``
            in the local model, because the module's code computes with it. ``config.x`` is attribute ``x`` of
            the module's configuration, of which the module needs a copy of its own.
        sums: Paths of modules whose output is summed over the group: row layers, and modules that own the
            parameters of a row split themselves (fused experts).
        shared: Names of whole parameters that every rank adds before the sum (the biases of experts' second
            product): each rank computes with the value divided by ``size``, and its gradient is partial.
        divided_arguments: Names of a region's arguments that arrive divided already: their gradients are not
            summed (T5's ``position_bias``, which the first layer makes for all).
        whole: Why parameters of the published model stay whole, by every name of theirs.
        indivisible: What the group does not divide; empty where the model can be split.
        notes: Findings about the library's own plan: entries that match no module, or contradict the modules.
        sequence: Where hidden states are divided along the sequence; None: they are whole between regions.
    """

    size: Positive
    regions: tuple[str, ...] = ()
    modules: tuple[SplitModule, ...] = ()
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sums: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    divided_arguments: tuple[str, ...] = ()
    whole: Mapping[str, WholeReason] = field(default_factory=dict)
    indivisible: tuple[Indivisible, ...] = ()
    notes: tuple[str, ...] = ()
    sequence: SequenceSpan | None = None
