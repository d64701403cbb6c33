"""A language model of gated convolutions, registered as a family of fsdptool."""

from fsdptool_gatedconv.family import GatedConvFamily

__all__ = ["GatedConvFamily"]
