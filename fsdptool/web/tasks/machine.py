"""Examine this machine, as ``fsdptool doctor`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def examine(progress: Callable[[str], None], *, probe: bool) -> dict[str, Any]:
    """Return the document of ``doctor``.

    Args:
        progress: Is told what happens.
        probe: Whether to start two processes and test that FSDP2 shards.
    """
    from fsdptool.launch.doctor import examine as examine_machine
    from fsdptool.records.diagnostic import envelope

    progress("sharding a small model on two processes" if probe else "reading versions and devices")
    health, diagnostics = examine_machine(with_probe=probe)
    return envelope("doctor", health, health, diagnostics=diagnostics)
