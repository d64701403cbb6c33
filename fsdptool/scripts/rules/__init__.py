"""The rules on training scripts, by code; their checks are in the same modules."""

from __future__ import annotations

from fsdptool.records.diagnostic import Rule
from fsdptool.scripts.rules import arguments, loading, loop, order, processes, saving, sharded

GROUPS = (order, arguments, sharded, loading, saving, loop, processes)
RULES: tuple[Rule, ...] = tuple(rule for group in GROUPS for rule in group.RULES)
