"""The form of a rule. The table of this room's rules is :data:`fsdptool.config.rules.RULES`."""

from fsdptool.records.rule import Rule

__all__ = ["Rule"]
