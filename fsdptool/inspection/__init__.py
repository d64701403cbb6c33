"""Builds a model on the meta device and says what it is made of and what to wrap, with reasons."""

from fsdptool.inspection.api import Inspection, detect, examine, inspect, without_gc
from fsdptool.inspection.build import build

__all__ = ["Inspection", "build", "detect", "examine", "inspect", "without_gc"]
