"""Grouping: which parameters form which FSDP unit, and how each is resharded. Torch-free."""

from fsdptool.layout.group import compute_dtype, group, resolve_sharding

__all__ = ["compute_dtype", "group", "resolve_sharding"]
