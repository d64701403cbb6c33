"""How the processes of a run meet: through files on one machine, at one address on several.

torchrun's own back ends (torch 2.13, elastic/rendezvous/c10d_rendezvous_backend.py and
static_tcp_rendezvous.py) and ``env://`` (distributed/rendezvous.py:_create_c10d_store) start a
``TCPStore``. It listens on every interface, takes keys from anybody, and torchrun unpickles one of
them: whoever reaches the port runs code. So on one machine nothing listens: the launcher keeps its
state to itself, and the ranks share a file in a folder that only the user can open. On several
machines the store listens on the address by which the others reach this one, and on no other.

Runs as ``python -m fsdptool.distributed.rendezvous LAUNCHER ARGUMENTS``, where LAUNCHER is
``torchrun`` or ``accelerate``: it makes both back ends known and hands over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import WorkerError
from fsdptool.garbage import collect_seldom

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

LOCAL = "fsdptool-local"
"""Rendezvous back end for one machine."""

NODES = "fsdptool-nodes"
"""Rendezvous back end for several machines."""

FOLDER = "FSDPTOOL_RENDEZVOUS"
"""Variable: the folder in which the ranks of one machine meet."""

LISTEN = "FSDPTOOL_LISTEN"
"""Variable: the address node 0 listens on for the other machines."""

_TIMEOUT_SECONDS = 600.0

_MANY_RANKS = 256
"""Above this, ranks connect to one another when they first need to."""


def join(backend: str, *, timeout: timedelta | None = None, device: torch.device | None = None) -> None:
    """Initialise the default process group of this worker.

    Args:
        backend: As ``torch.distributed.init_process_group`` takes it.
        timeout: How long its collectives may take; None is torch's default.
        device: The GPU to bind the group to, or None.

    Raises:
        WorkerError: Node 0 cannot listen on its address.
    """
    import torch.distributed as dist

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if device is not None:
        options["device_id"] = device
    _allow_connections(world_size)
    store = _worker_store(rank, world_size, timeout)
    if store is None:
        dist.init_process_group(backend, **options)
        return
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)


def _allow_connections(world_size: int) -> None:
    """Let this process hold a connection to each other rank, several times over.

    Gloo connects every rank with every other one, once for each group over the world, as soon as the group
    is made; the usual soft limit of 1,024 open files is reached at about 500 ranks. Many ranks connect when
    they first speak (``TORCH_GLOO_LAZY_INIT``, torch 2.13, ProcessGroupGloo.cpp): most pairs never do.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Not above what the system allows; macOS names no limit and has one.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if world_size > _MANY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _worker_store(rank: int, world_size: int, timeout: timedelta | None) -> dist.Store | None:
    """Return the store of this round's workers, or None if the launcher's own has to do."""
    import torch.distributed as dist

    timeout = timeout or timedelta(seconds=_TIMEOUT_SECONDS)
    # A relaunched worker must not read the addresses of the dead.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if folder := os.environ.get(FOLDER):
        # Without a number of users the file is never removed by one of them: the folder goes as a whole.
        store: dist.Store = dist.FileStore(str(Path(folder) / f"workers-{attempt}"))
        store.set_timeout(timeout)
        return store
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore() if world_size == 1 else None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or LISTEN not in os.environ:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("GROUP_RANK") == "0":
        # Rank 0 is on this machine, whose own name may mean a loopback address here.
        host = os.environ[LISTEN]
    return _tcp_store(host, port, hosting=rank == 0, timeout=timeout)


def _tcp_store(host: str, port: int, *, hosting: bool, timeout: timedelta) -> dist.TCPStore:
    """Return a store at ``host:port``; who hosts it listens on the address in :data:`LISTEN` alone.

    ``TCPStore`` itself binds to every interface (torch 2.13, TCPStoreLibUvBackend.cpp), but takes a
    socket that listens already.
    """
    from torch.distributed import TCPStore

    if not hosting:
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    address = os.environ.get(LISTEN) or host
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        raise WorkerError(
            f"cannot listen on {address}:{port}: {error.strerror or error}",
            help="choose another port with --rendezvous, or end what uses it",
        ) from error
    return TCPStore(
        address,
        port,
        None,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def register_backends() -> None:
    """Make :data:`LOCAL` and :data:`NODES` known to torchrun in this process."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(LOCAL, _local_handler)
    rendezvous_handler_registry.register(NODES, _nodes_handler)


def _local_handler(parameters: Any) -> Any:
    """Return a rendezvous of one launcher with itself, whose store is its own memory."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class LocalRendezvous(RendezvousHandler):
        def get_backend(self) -> str:
            return LOCAL

        def next_rendezvous(self) -> RendezvousInfo:
            # The ranks meet at FOLDER; the address only fills the variables torchrun sets.
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Nobody else can connect."""

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return str(parameters.run_id)

        def shutdown(self) -> bool:
            return True

    return LocalRendezvous()


def _nodes_handler(parameters: Any) -> Any:
    """Return torchrun's dynamic rendezvous over a store that listens on one address."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    class NodesBackend(C10dRendezvousBackend):
        @property
        def name(self) -> str:
            return NODES

    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=29400)
    seconds = float(parameters.get_as_int("read_timeout", int(_TIMEOUT_SECONDS)) or _TIMEOUT_SECONDS)
    store = _tcp_store(
        host,
        port,
        hosting=bool(parameters.get_as_bool("is_host", False)),
        timeout=timedelta(seconds=seconds),
    )
    return create_handler(store, NodesBackend(store, parameters.run_id), parameters)


def main(arguments: list[str]) -> None:
    """Run ``torchrun`` or ``accelerate launch`` with both back ends registered."""
    launcher, *rest = arguments
    collect_seldom()
    register_backends()
    if FOLDER in os.environ or LOCAL not in rest:
        _launch(launcher, rest)
        return
    with tempfile.TemporaryDirectory(prefix="fsdptool-rendezvous-") as folder:
        os.environ[FOLDER] = folder
        _launch(launcher, rest)


def _launch(launcher: str, arguments: list[str]) -> None:
    if launcher == "accelerate":
        from accelerate.commands import launch

        sys.argv = ["accelerate launch", *arguments]
        launch.main()
        return
    from torch.distributed import run

    run.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
