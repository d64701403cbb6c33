"""From a reference, as a person types it, to a :class:`~fsdptool.records.model.ModelSpec`. Torch-free."""

from fsdptool.source.resolve import locate, resolve, resolve_choice

__all__ = ["locate", "resolve", "resolve_choice"]
