"""One rank's place among the others: process group, device and device mesh."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdptool.distributed.devices import Driver, drivers, start_error
from fsdptool.distributed.rendezvous import join
from fsdptool.errors import ConfigError, WorkerError
from fsdptool.families.objectives.context import Context, use
from fsdptool.modeling.tensor_group import ALONE, TensorGroup
from fsdptool.records.mesh import TRAINED, ParallelDims
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.watchdog import collective_timeout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


BIND = "FSDPTOOL_NUMA_BINDING"
"""Set to 0 in the environment, workers run on any core and not only on those beside their GPU."""

_BEAT_SECONDS = 1.0
"""Between two signs of life of a rank in a :class:`LongWait`."""


@dataclass(frozen=True, slots=True)
class Session:
    """The place of this process in the run.

    Attributes:
        rank, world_size, local_rank: As torchrun set them.
        device: Where parameters live and forward runs.
        dims: The sizes of the mesh, every one filled in.
        mesh: The whole mesh: ``dp_shard``, and those of ``dp_replicate``, ``cp``, ``tp`` with several ranks.
        shard_mesh: What ``fully_shard`` gets: one dimension, or replicate x shard (HSDP). Context
            parallel ranks shard parameters too (as accelerate 1.15 does).
        ring: Whether ranks that share a sequence pass keys and values round (``alltoall``).
        expert_mesh: What ``fully_shard`` gets for the experts of an expert-parallel group, or None.
        expert_group: The ranks that share out the experts, or None.
        data_group: The ranks with other data that hold the same part of each divided layer; None is all.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    dims: ParallelDims
    mesh: DeviceMesh
    shard_mesh: DeviceMesh
    ring: bool = False
    data_group: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None
    expert_group: dist.ProcessGroup | None = None

    @property
    def data_rank(self) -> int:
        """Which share of a global batch is ours; ranks of one ``cp`` or ``tp`` group share theirs."""
        return self.dims.data_rank(self.rank)

    @property
    def data_ranks(self) -> int:
        """How many shares a global batch is split into."""
        return self.dims.data_ranks

    @property
    def context(self) -> Context | None:
        """The ranks this one shares its sequences with, or None."""
        if self.dims.cp == 1:
            return None
        return Context(
            self.dims.cp, self.mesh.get_local_rank("cp"), self.mesh.get_group("cp"), ring=self.ring
        )

    @property
    def tensor(self) -> TensorGroup:
        """The ranks that hold the other parts of our layers, with those that hold the other experts."""
        layers, experts = ALONE, self.expert_group
        if self.dims.tp > 1:
            layers = TensorGroup(self.dims.tp, self.mesh.get_local_rank("tp"), self.mesh.get_group("tp"))
        if experts is not None:
            layers = replace(layers, experts=TensorGroup(self.dims.ep, experts.rank(), experts))
        return layers

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` over all ranks in place and return them.

        What ranks of one ``tp`` group compute alike counts once: divide it by ``dims.tp`` first.
        """
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def most(self, value: int) -> int:
        """Return the largest ``value`` of all ranks, agreed on the CPU: no rank waits for its device."""
        return self.begin_most(value)()[0]

    def begin_most(self, *values: int) -> Callable[[], list[int]]:
        """Begin to agree on the largest of each value over all ranks, on the CPU.

        Returns:
            What waits for the answer and returns it.
        """
        largest = torch.tensor([int(value) for value in values])
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True) if self.world_size > 1 else None

        def answer() -> list[int]:
            if work is not None:
                work.wait()
            return [int(value) for value in largest.tolist()]

        return answer


def device_of_rank(settings: FsdpSettings, local_rank: int) -> torch.device:
    """Return the device of this rank: CUDA where there is one and the file does not ask for the CPU.

    Raises:
        ConfigError: The file asks for more processes on this machine than there are GPUs, or torch cannot
            use the ones there are.
    """
    if settings.use_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        _check_no_gpu()
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this machine shows {torch.cuda.device_count()}",
            help="lower num_processes, or set use_cpu: true",
        )
    return torch.device("cuda", local_rank)


def _check_no_gpu() -> None:
    """Refuse a machine whose GPUs torch cannot start: on the CPU this rank would never meet the others."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    present = bool({*drivers()} - {Driver.INTEL})
    is_built: Any = torch.backends.cuda.is_built  # not annotated in torch 2.13
    if hidden or not present or not is_built():
        return
    raise ConfigError(
        f"this machine has GPUs that torch cannot use: {start_error()}",
        help="install a driver that suits this build of torch, or set use_cpu: true",
    )


def bind_to_gpu(gpu: Any, root: Path = Path("/sys/bus/pci/devices")) -> frozenset[int] | None:
    """Keep this process on the processor cores beside its GPU, if it may run there.

    Copies through pinned memory and kernel launches take longer from the other socket. ``torchrun
    --numa-binding`` does the same with an external program (torch 2.13, ``numa/binding.py``).

    Args:
        gpu: What ``torch.cuda.get_device_properties`` returns.
        root: Where the kernel lists PCI devices.

    Returns:
        The cores, or None if they are unknown, or nothing would change.
    """
    if not hasattr(os, "sched_setaffinity") or os.environ.get(BIND) == "0":
        return None
    name = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    beside: set[int] = set()
    try:
        for part in (root / name / "local_cpulist").read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            beside.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return None
    allowed = os.sched_getaffinity(0)
    cores = frozenset(beside & allowed)
    if not cores or cores == allowed:
        return None
    os.sched_setaffinity(0, cores)
    return cores


def open_session(settings: FsdpSettings, expert_parallel: int = 1) -> Session:
    """Join the process group, build the mesh, and share sequences over it where the file says so.

    Reads ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` (torchrun); without them the run is a single
    process. An existing process group is used as it is.

    Args:
        settings: What the accelerate YAML says.
        expert_parallel: Ranks that share out the experts (the recipe's ``sharding.expert_parallel``).

    Raises:
        ConfigError: The mesh does not multiply to the world size, or needs what this device lacks.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    dims = resolve_dims(settings, world_size).with_experts(expert_parallel)
    device = device_of_rank(settings, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        bind_to_gpu(torch.cuda.get_device_properties(device))
    if not dist.is_initialized():
        _join(device)
    # Each dimension costs process groups, with a thread each under NCCL: those of one rank are left out.
    names = tuple(name for name in TRAINED if dims.size(name) > 1 or name == "dp_shard")
    mesh = init_device_mesh(device.type, tuple(dims.size(name) for name in names), mesh_dim_names=names)
    ring = settings.cp_comm_strategy == "alltoall"
    shard_mesh, data_group = _parameter_mesh(mesh, dims), None
    if dims.tp > 1:
        sizes = (world_size // dims.tp, dims.tp)
        data_group = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "tp")).get_group("data")
    experts, expert_group = _expert_mesh(device, dims) if dims.ep > 1 else (None, None)
    groups = [*mesh.get_all_groups(), *shard_mesh.get_all_groups()]
    groups += experts.get_all_groups() if experts is not None else []
    groups += [group for group in (data_group, expert_group) if group is not None]
    limit_collectives(groups)
    session = Session(
        rank,
        world_size,
        local_rank,
        device,
        dims,
        mesh,
        shard_mesh,
        ring,
        data_group,
        experts,
        expert_group,
    )
    use(session.context)
    return session


def _join(device: torch.device) -> None:
    timeout = timedelta(seconds=collective_timeout())
    if device.type == "cpu":
        join("gloo", timeout=timeout)
        return
    # A device makes NCCL connect at once, so that a machine without a connection says so here, and lets the
    # groups of a mesh split from the first one. They need gloo, too, which splits in later versions of torch.
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout)
    bound = device if getattr(alone, "supports_splitting", False) else None
    # Gloo beside NCCL: asynchronous checkpoints and offloaded shards talk between CPUs.
    join("cpu:gloo,cuda:nccl", timeout=timeout, device=bound)


def limit_collectives(groups: Iterable[dist.ProcessGroup]) -> None:
    """Give every group of the mesh the timeout of the run.

    ``DeviceMesh`` makes groups of fewer ranks than the world with torch's default (torch 2.13,
    ``device_mesh.py``: 30 minutes beside gloo), after which NCCL would write no flight record: the run is
    ended before.
    """
    timeout = timedelta(seconds=collective_timeout())
    for group in {id(group): group for group in groups}.values():
        if dist.get_backend(group) != "fake":
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _parameter_mesh(mesh: DeviceMesh, dims: ParallelDims) -> DeviceMesh:
    sizes = dims.parameter_mesh()
    names = tuple(sizes)
    if dims.cp == 1:
        return mesh[names]
    # A mesh of its own: torch 2.13 deprecates slicing a flattened dimension out of the root mesh.
    shape = (*sizes.values(), dims.tp)
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=(*names, "tp"))[names]


def _expert_mesh(device: torch.device, dims: ParallelDims) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Return the mesh that shards a rank's experts, and the group that shares out all of them."""
    sizes = dims.parameter_mesh(experts=True)
    names = tuple(sizes)
    mesh = init_device_mesh(device.type, (*sizes.values(), dims.ep), mesh_dim_names=(*names, "ep"))
    return mesh[names], mesh.get_group("ep")


def resolve_dims(settings: FsdpSettings, world_size: int) -> ParallelDims:
    """Return the sizes of this launch's mesh.

    Raises:
        ConfigError: The file was written for another number of processes, or its mesh has dimensions that
            the trainer lacks.
    """
    if settings.num_processes is not None and settings.num_processes not in (-1, world_size):
        raise ConfigError(
            f"the configuration is for {settings.num_processes} processes and the launch has {world_size}",
            help="start that many processes, or change num_processes",
        )
    try:
        dims = settings.mesh.resolve(world_size)
    except ValueError as error:
        raise ConfigError(str(error), help="change parallelism_config or num_processes") from error
    for name, size, reason in dims.unsupported():
        raise ConfigError(f"{name}_size: {size} is not supported: {reason}", help=f"set {name}_size to 1")
    return dims


class LongWait:
    """Lets ranks wait for one another's work, however long it takes, as long as somebody gets on with it.

    A collective has one limit for all that the slowest rank does before it. Here each rank has a thread that
    meets the others' threads every second at most, so no meeting waits for the work itself.

    Args:
        group: Nothing else may use it until the wait has ended; None is this rank alone.
        patience: Seconds without a report of any rank after which waiting ends.
        beat: Called with each report, and while waiting.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, patience: float, beat: Callable[[], None] = lambda: None
    ) -> None:
        self._group, self._patience, self._beat = group, patience, beat
        self._reports = 0
        self._done = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to meet the other ranks. Collective."""
        if self._group is not None:
            self._thread = threading.Thread(target=self._meet, name="long-wait", daemon=True)
            self._thread.start()

    def report(self) -> None:
        """Report progress."""
        self._reports += 1
        self._beat()

    def wait(self) -> None:
        """Wait until every rank is here.

        Raises:
            WorkerError: No rank has reported progress for too long.
            RuntimeError: A rank has gone.
        """
        self._done = True
        thread = self._thread
        if thread is None:
            return
        while thread.is_alive():
            thread.join(_BEAT_SECONDS)
            self._beat()
        if self._error is not None:
            raise self._error

    def _meet(self) -> None:
        began = since = time.monotonic()
        seen = -1
        try:
            while True:
                # Short work is waited for precisely, long work to one in fifty.
                time.sleep(min(1.0, 0.001 + (time.monotonic() - began) / 50))
                waits = time.monotonic() - since > self._patience
                counts = torch.tensor([not self._done, self._reports, waits], dtype=torch.int64)
                dist.all_reduce(counts, group=self._group)
                missing, reports, impatient = counts.tolist()
                if not missing:
                    return
                if reports != seen:
                    seen, since = reports, time.monotonic()
                elif impatient:
                    # One rank's clock decides for all: the others would meet nobody any more.
                    raise WorkerError(f"no rank has reported progress for {self._patience:.0f} s")
        except BaseException as error:
            self._error = error


def close_session() -> None:
    """Leave the process group; sequences are whole again."""
    use(None)
    if dist.is_initialized():
        dist.destroy_process_group()
