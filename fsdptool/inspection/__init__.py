"""Builds a model on the meta device and says what it is made of and what to wrap, with reasons."""

from fsdptool.inspection.api import Inspection, examine, inspect
from fsdptool.inspection.build import build

__all__ = ["Inspection", "build", "examine", "inspect"]
