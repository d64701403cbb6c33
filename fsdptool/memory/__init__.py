"""Memory: a traced micro-batch, FSDP2's schedule over it, and what a rank therefore holds."""

from fsdptool.memory.footprint import footprint, foresee, prepared
from fsdptool.memory.tracing.tracer import trace

__all__ = ["footprint", "foresee", "prepared", "trace"]
