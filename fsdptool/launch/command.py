"""The exact argument list and environment that start a run's workers on this machine. Torch-free.

Of several machines, that includes the address and the network interface by which they reach one another.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fsdptool.distributed.rendezvous import LISTEN, LOCAL, NODES
from fsdptool.records.cluster import ALLOCATOR_VARIABLES, EXPANDABLE
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.folder import FLIGHT_RECORD, LOGS

Launcher = Literal["torchrun", "accelerate"]

WORKER = "fsdptool.training.worker"

_PYTHON = (sys.executable, "-P", "-m")
"""Python without the working directory on its path: a ``torch.py`` that lies there is not imported."""

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """An argument list, and the variables it adds to or changes in the environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """Return the command and its environment as one shell line."""
        variables = [f"{name}={_quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, *map(_quote, self.argv)])


def _quote(text: str) -> str:
    """Quote a word for a shell; one that is not printable in a form that stays on its line (``$'\\n'``)."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escape, text)) + "'"


def _escape(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def build_command(
    folder: Path,
    settings: FsdpSettings,
    *,
    processes: int,
    device: str,
    launcher: Launcher = "torchrun",
    nodes: Nodes | None = None,
    max_restarts: int = 0,
    grace_seconds: int = 600,
    timeout_seconds: float = 600.0,
    config: Path | None = None,
    variables: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> LaunchCommand:
    """Return the command that starts the workers of ``folder`` on this machine.

    Args:
        folder: A written run folder.
        settings: What the YAML says (GPU ids, rendezvous port).
        processes: Processes on this machine.
        device: ``cpu`` or ``cuda``.
        launcher: ``torchrun`` (elastic: restarts, signals) or ``accelerate``.
        nodes: Rendezvous of several machines.
        max_restarts: How often torchrun relaunches the workers after a failure.
        grace_seconds: How long torchrun waits for workers to save after a signal (its default: 30).
        timeout_seconds: How long a collective may take.
        config: The accelerate YAML, for ``accelerate launch``.
        variables: The cluster's variables (NCCL); a variable the person has exported wins.
        trust_remote_code: Whether the workers may run the model's own code.
    """
    nodes = nodes or Nodes()
    environment = _environment(settings, processes, device, nodes, timeout_seconds, variables or {}, folder)
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace_seconds)
    # torch 2.13 keeps one TCP store over all rounds and gives relaunched workers no prefix of their
    # own (dynamic_rendezvous.py:_bootstrap_store_info, rendezvous.py:_create_c10d_store): they read
    # the addresses of the dead and hang in connectFullMesh. With this, rank 0 hosts a fresh store.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    argv = [*_PYTHON, "fsdptool.distributed.rendezvous", launcher, *_rendezvous(nodes, launcher)]
    if launcher == "accelerate":
        argv += ["--config_file", str(config), "--num_processes", str(processes * nodes.count)]
    else:
        argv += ["--nproc-per-node", str(processes), "--max-restarts", str(max_restarts)]
        argv += ["--signals-to-handle", _SIGNALS]
    argv += ["--module", WORKER, str(folder)]
    if trust_remote_code:
        argv.append("--trust-remote-code")
    return LaunchCommand(tuple(argv), environment)


def _rendezvous(nodes: Nodes, launcher: Launcher) -> list[str]:
    if launcher == "accelerate":
        # Port 0: accelerate would look whether its default port is taken, and fall back to c10d if it is.
        return ["--rdzv_backend", LOCAL, "--main_process_port", "0"] if nodes.count == 1 else []
    if nodes.count == 1:
        return ["--nnodes", "1", "--rdzv-backend", LOCAL]
    arguments = [
        "--nnodes",
        str(nodes.count),
        "--rdzv-backend",
        NODES,
        "--rdzv-endpoint",
        str(nodes.endpoint),
    ]
    if nodes.id is not None:
        arguments += ["--rdzv-id", nodes.id]
    # torchrun would guess both from this host's name, which Debian resolves to a loopback address:
    # then nobody hosts the rendezvous, or rank 0 gives the others a name they cannot use (torch 2.13,
    # rendezvous/utils.py:_matches_machine_hostname, dynamic_rendezvous.py:_NodeDescGenerator).
    arguments += ["--rdzv-conf", f"is_host={int(nodes.rank in (0, None))}"]
    if nodes.rank is not None and (name := reachable_name(nodes)) is not None:
        arguments += ["--local-addr", name]
    return arguments


def _environment(
    settings: FsdpSettings,
    processes: int,
    device: str,
    nodes: Nodes,
    timeout_seconds: float,
    variables: Mapping[str, str],
    folder: Path,
) -> dict[str, str]:
    chosen = dict(variables)
    chosen["FSDPTOOL_COLLECTIVE_TIMEOUT_SECONDS"] = f"{timeout_seconds:g}"
    # torchrun would set 1 and warn; a rank may use its share of the cores.
    chosen["OMP_NUM_THREADS"] = str(max(available_cores() // processes, 1))
    # For the processes those of this command start.
    chosen["PYTHONSAFEPATH"] = "1"
    if nodes.count > 1:
        interface = interface_towards(nodes)
        if (address := listen_address(nodes)) is not None:
            chosen[LISTEN] = address
    else:
        interface = "lo" if sys.platform == "linux" else None
    if interface is not None:
        chosen["GLOO_SOCKET_IFNAME"] = interface
    if device == "cuda":
        if interface is not None:
            # NCCL's bootstrap would take any interface that is up, a container bridge among them.
            chosen.setdefault("NCCL_SOCKET_IFNAME", interface)
        if settings.gpu_ids and settings.gpu_ids != "all":
            chosen["CUDA_VISIBLE_DEVICES"] = settings.gpu_ids
        if not {*ALLOCATOR_VARIABLES} & {*chosen, *os.environ}:
            chosen |= EXPANDABLE
        # On Hopper and B200 torch takes cuDNN's attention first, also with masks (2.13, ``sdp_utils.cpp``:
        # ``check_prefer_cudnn_attention``). It builds a graph per shape, and plans assume the others.
        chosen.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
        # A collective that times out leaves every rank's last collectives behind.
        chosen["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        chosen["TORCH_FR_BUFFER_SIZE"] = "2000"
        # In the user's cache by default, where the next run would overwrite them (torch 2.13).
        chosen["TORCH_FR_DUMP_TEMP_FILE"] = str(folder.absolute() / LOGS / FLIGHT_RECORD)
    else:
        chosen["CUDA_VISIBLE_DEVICES"] = ""
    kept = {"CUDA_VISIBLE_DEVICES", "FSDPTOOL_COLLECTIVE_TIMEOUT_SECONDS", "PYTHONSAFEPATH", LISTEN}
    return {name: value for name, value in chosen.items() if name in kept or name not in os.environ}


def available_cores() -> int:
    """Return the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_ANYWHERE = "192.0.2.1"
"""An address reserved for documentation (RFC 5737): the way to it is the default route."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the machines of a run meet.

    Attributes:
        count: Machines.
        rank: Rank of this node, or None when the launcher's rendezvous decides.
        endpoint: ``host:port`` of the rendezvous; needed for more than one machine.
        id: Name of the rendezvous: identical on all nodes, unique per launch.
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


def reachable_name(nodes: Nodes) -> str | None:
    """Return the name or address by which the other machines reach this one, or None if it is unknown.

    Node 0 is reached as the endpoint says; another machine has its address on the way there.
    """
    if nodes.rank == 0:
        return nodes.host
    return _own_address(nodes.host)


def interface_towards(nodes: Nodes) -> str | None:
    """Return the name of the network interface on the way to the other machines, or None if it is unknown.

    The CPU backend would take the one whose address this host's own name resolves to, often the
    loopback interface.
    """
    import psutil

    own = listen_address(nodes)
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, parts in interfaces if any(part.address == own for part in parts)), None)


def listen_address(nodes: Nodes) -> str | None:
    """Return the address of this machine that the others reach, or None if it is unknown."""
    own = _own_address(nodes.host)
    if own is not None and _loopback(own) and not _is_loopback_name(nodes.host):
        # Node 0's own name, which means the loopback interface on node 0 alone.
        own = _own_address(_ANYWHERE) or _only_address()
    return own


def _own_address(target: str) -> str | None:
    """Return this host's address on the way to ``target``; nothing is sent, so any port will do."""
    try:
        addresses = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def _only_address() -> str | None:
    """Return this host's address if it has only one apart from loopback."""
    import psutil

    parts = [part for parts in psutil.net_if_addrs().values() for part in parts]
    addresses = [p.address for p in parts if p.family == socket.AF_INET and not _loopback(p.address)]
    return addresses[0] if len(addresses) == 1 else None


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_loopback_name(host: str) -> bool:
    """Say whether the endpoint itself is meant to stay on one machine."""
    try:
        return _loopback(host)
    except ValueError:
        return host == "localhost"
