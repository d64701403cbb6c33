"""How the rules on scripts are written: a table with examples, and a check that reports by code."""

from __future__ import annotations

import ast
from typing import Protocol

from fsdptool.records.diagnostic import Example, Rule, Safety, Severity
from fsdptool.scripts.spans import Change


class Report(Protocol):
    """Takes a code, a place, a message, and what would repair it."""

    def __call__(self, code: str, node: ast.AST, message: str, change: Change | None = None, /) -> None:
        """Take a finding."""


SHARD = "from torch.distributed.fsdp import fully_shard\n"
WRAP = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
TORCH = "import torch\n"
DIST = "import torch.distributed as dist\n"
STATE = "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
BLOCKS = "    for block in model.blocks:\n        fully_shard(block)\n    fully_shard(model)\n"


def rule(
    number: int,
    name: str,
    severity: Severity,
    why: str,
    fix: str,
    head: str,
    fails: str,
    passes: str,
    options: str = "",
    safety: Safety = "none",
) -> Rule:
    """Return a rule on scripts; its examples begin alike."""
    return Rule(
        f"FSD{number}", name.replace("-", " "), severity, why, fix, safety,
        example=Example(head + fails, head + passes, options),
    )  # fmt: skip
