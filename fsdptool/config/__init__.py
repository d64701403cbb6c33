"""Configuration files: every dialect, what it really means, fixes, migration. Torch-free."""

from fsdptool.config.consumers import Consumer
from fsdptool.config.reader import read_settings
from fsdptool.config.result import Ignored, Reading, Setting
from fsdptool.config.writer import write_settings

__all__ = ["Consumer", "Ignored", "Reading", "Setting", "read_settings", "write_settings"]
