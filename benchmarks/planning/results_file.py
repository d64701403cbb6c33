"""The head that the results of the benchmarks of planning share."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from fsdptool.records.diagnostic import library_versions, tool_version


def write_results(path: Path, benchmark: str, results: list[dict[str, Any]], **facts: Any) -> None:
    """Write results with the machine and the versions they were measured on.

    Args:
        path: Where to.
        benchmark: Script, without its suffix.
        results: One object per case.
        facts: What else holds for all cases.
    """
    document = {
        "benchmark": f"planning/{benchmark}",
        "hardware": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "load_average": round(os.getloadavg()[0], 1),
        "fsdptool": tool_version(),
        "libraries": library_versions(),
        **facts,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
