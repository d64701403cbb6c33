"""Where the machines of a run meet, and under which address and interface this one reaches the others."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass

_ANYWHERE = "192.0.2.1"
"""An address of nobody's (RFC 5737): the way to it is the default route."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the machines of a run meet.

    Attributes:
        count: Machines.
        rank: This machine's number, or None when the launcher's rendezvous decides.
        endpoint: ``host:port`` of the rendezvous; needed for more than one machine.
        id: Name of the rendezvous: the same on every machine, new for every launch.
    """

    count: int = 1
    rank: int | None = None
    endpoint: str | None = None
    id: str | None = None

    @property
    def host(self) -> str:
        """The host of the endpoint, without its port."""
        endpoint = self.endpoint or ""
        return (endpoint.rpartition(":")[0] or endpoint).strip("[]")


def name_for_others(nodes: Nodes) -> str | None:
    """Return the name or address by which the other machines reach this one, or None if it is unknown.

    Node 0 is reached as the endpoint says; another machine has its address on the way there.
    """
    if nodes.rank == 0:
        return nodes.host
    return _own_address(nodes.host)


def interface_towards(nodes: Nodes) -> str | None:
    """Return the name of the network interface on the way to the other machines, or None if it is unknown.

    gloo would take the one whose address this host's own name resolves to, often the loopback interface.
    """
    import psutil

    own = _own_address(nodes.host)
    if own is not None and _loopback(own) and not _is_loopback_name(nodes.host):
        # Node 0's own name, which means the loopback interface on node 0 alone.
        own = _own_address(_ANYWHERE) or _only_address()
    found = psutil.net_if_addrs().items()
    return next((name for name, parts in found if any(part.address == own for part in parts)), None)


def _own_address(target: str) -> str | None:
    """Return this host's address on the way to ``target``; nothing is sent, so any port will do."""
    try:
        found = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def _only_address() -> str | None:
    """Return this host's address if it has but one besides loopback."""
    import psutil

    parts = [part for parts in psutil.net_if_addrs().values() for part in parts]
    found = [p.address for p in parts if p.family == socket.AF_INET and not _loopback(p.address)]
    return found[0] if len(found) == 1 else None


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_loopback_name(host: str) -> bool:
    """Say whether the endpoint itself is meant to stay on one machine."""
    try:
        return _loopback(host)
    except ValueError:
        return host == "localhost"
