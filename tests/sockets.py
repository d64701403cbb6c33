"""What processes listen on."""

from __future__ import annotations

import psutil

LOOPBACK = ("127.", "::1")


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the addresses a process and its descendants listen on."""
    found: set[tuple[str, int]] = set()
    try:
        processes = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for one in processes:
        try:
            for connection in one.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
