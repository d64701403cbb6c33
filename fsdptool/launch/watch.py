"""Follows the events and metrics of a run while it writes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdptool.runs.folder import EVENTS, METRICS


class Follower:
    """Reads what was appended since the last look. Starts at the files' ends: older starts are history."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {path: path.stat().st_size for path in self._files()}

    def _files(self) -> list[Path]:
        files = sorted((self._folder / EVENTS).glob("rank-*.jsonl"))
        metrics = self._folder / METRICS
        return [*files, metrics] if metrics.exists() else files

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield new events, oldest first; steps as events of kind ``step`` with the metrics in them.

        What cannot be read now is left for the next look: a file that another machine replaces while it is
        read answers with ``ESTALE`` on a network file system.
        """
        found: list[dict[str, Any]] = []
        files: list[Path] = []
        with contextlib.suppress(OSError):
            files = self._files()
        for path in files:
            with contextlib.suppress(OSError):
                found.extend(self._tail(path))
        yield from sorted(found, key=lambda record: record.get("time") or 0.0)

    def _tail(self, path: Path) -> Iterator[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        if path.stat().st_size < offset:
            # The metrics were rewound to the step the run continues from.
            self._offsets[path] = path.stat().st_size
            return
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read()
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = offset + whole
        for line in data[:whole].splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            yield {"kind": "step", **record} if path.name == METRICS else record
