"""From a reference, as a person types it, to a :class:`~fsdptool.records.model.ModelSpec`. Torch-free."""

from fsdptool.source.resolve import resolve

__all__ = ["resolve"]
