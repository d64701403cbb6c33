"""Whether a run compiles its blocks, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CompileReason(StrEnum):
    """Why blocks are compiled, or run eagerly."""

    REQUESTED = "requested"
    DECLINED = "declined"
    AUTOMATIC = "automatic"
    CPU = "cpu"
    NO_COMPILER = "no_compiler"
    OTHER_PROGRAM = "other_program"
    TENSOR_PARALLEL = "tensor_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    EXPERTS = "experts"
    QUANTISED_BASE = "quantised_base"
    ACTIVATION_OFFLOAD = "activation_offload"
    VARYING_LENGTHS = "varying_lengths"
    NESTED_UNITS = "nested_units"
    UNTESTED = "untested"
    TORCH_VERSION = "torch_version"

    @property
    def text(self) -> str:
        """The reason as a clause that follows a colon."""
        return _TEXTS[self]


_TEXTS = {
    CompileReason.REQUESTED: "sharding.compile is true",
    CompileReason.DECLINED: "sharding.compile is false",
    CompileReason.AUTOMATIC: "the default on GPUs",
    CompileReason.CPU: "the default on CPUs",
    CompileReason.NO_COMPILER: "this machine lacks Triton or a C compiler, or TORCH_COMPILE_DISABLE is set",
    CompileReason.OTHER_PROGRAM: "the training loop is another program's",
    CompileReason.TENSOR_PARALLEL: "the default with tensor parallelism",
    CompileReason.CONTEXT_PARALLEL: "context parallelism exchanges keys and values inside them",
    CompileReason.EXPERTS: "the number of tokens of each expert changes with every batch",
    CompileReason.QUANTISED_BASE: "the weights of a quantised base are decoded inside them",
    CompileReason.ACTIVATION_OFFLOAD: "activation checkpointing moves their inputs to the host",
    CompileReason.VARYING_LENGTHS: "data.padding: longest changes the length from step to step",
    CompileReason.NESTED_UNITS: "they contain further FSDP units",
    CompileReason.TORCH_VERSION: "their memory was not measured on the installed version of torch",
    CompileReason.UNTESTED: "this kind of model was not tested with compiled blocks",
}


@dataclass(frozen=True, slots=True)
class Compilation:
    """Whether the blocks of a run are compiled.

    Attributes:
        compiled: Whether they are.
        reason: Why.
    """

    compiled: bool
    reason: CompileReason

    @property
    def text(self) -> str:
        """The decision and the reason in one line."""
        return f"blocks are {'compiled' if self.compiled else 'not compiled'}: {self.reason.text}"
