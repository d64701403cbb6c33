"""Grouping: which parameters form which FSDP unit, and how each is resharded. Torch-free."""

from fsdptool.layout.group import group

__all__ = ["group"]
