"""Configuration files: every dialect, what it really means, fixes, migration. Torch-free."""

from fsdptool.config.programs import Consumer
from fsdptool.config.reader import read_settings
from fsdptool.config.result import Reading
from fsdptool.config.writer import write_settings

__all__ = ["Consumer", "Reading", "read_settings", "write_settings"]
