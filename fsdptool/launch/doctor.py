"""Checks this machine: versions, devices, plugins, cache, and whether FSDP2 shards on it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from fsdptool.advisories.catalogue import advisories, affected_version, fixed_in
from fsdptool.advisories.locks import installed
from fsdptool.distributed.devices import count_gpus, local_id, uuid_of, visible_ids, why_unused
from fsdptool.distributed.rendezvous import FOLDER, LOCAL
from fsdptool.errors import ConfigError
from fsdptool.files.values import read_json
from fsdptool.launch.machine import live_claims, register_claim
from fsdptool.records.codec import from_json
from fsdptool.records.command_documents import CacheState, Device, Health, Host, InstalledFamily, Probe
from fsdptool.records.diagnostic import Diagnostic, tool_version
from fsdptool.records.measurements import MEASURED, Measurements, RankMeasurements
from fsdptool.records.run import DeviceType
from fsdptool.runs.trackers import TRACKERS
from fsdptool.torch_private import lacking
from fsdptool.versions import TESTED, untested_versions

LIBRARIES = (
    *(library.package for library in TESTED),
    "datasets",
    "safetensors",
    "huggingface_hub",
    *TRACKERS.values(),
)
_PROBE = "fsdptool.distributed.probe"
PROBE_SECONDS = 180.0
_MEASURING = "fsdptool.training.measuring"
MEASURING_SECONDS = 600.0
"""Twice what a busy machine needs; a GPU takes less than two minutes."""


def examine(*, with_probe: bool = True) -> tuple[Health, tuple[Diagnostic, ...]]:
    """Return the state of the machine and findings; nothing is changed outside the temporary folder.

    Args:
        with_probe: Start two processes on the CPU, and up to two on GPUs, and really shard (several seconds).
    """
    diagnostics: list[Diagnostic] = [*untested_versions(), *_private_names(), *_repaired_bugs()]
    probes: list[Probe] = []
    if with_probe:
        # Before this process looks at the devices, which opens a context on each of them.
        probes = [_probe("cpu", 2)]
        if gpus := count_gpus():
            # One GPU shows whether CUDA, NCCL and the kernels work, if not whether ranks reach each other.
            probes.append(_probe("cuda", min(gpus, 2)))
    devices = _devices(diagnostics)
    if probes:
        for probe in probes:
            if not probe.ok:
                diagnostics.append(
                    Diagnostic(
                        "DOC003",
                        "error",
                        f"FSDP2 sharding failed on {probe.device} (processes: {probe.processes}):"
                        f" {probe.reason}",
                        help="runs on such processes will fail on this machine",
                    )
                )
    health = Health(
        versions=_versions(),
        machine=_machine(),
        devices=tuple(devices),
        plugins=tuple(_plugins(diagnostics)),
        cache=_cache(diagnostics),
        probes=tuple(probes),
    )
    return health, tuple(diagnostics)


def _private_names() -> Iterator[Diagnostic]:
    found = Version(metadata.version("torch"))
    missing = lacking(found.release)
    if missing:
        yield Diagnostic(
            "DOC006",
            "warning",
            f"torch {found} lacks what fsdptool uses: {', '.join(map(str, missing))}",
            help="install a tested version of torch; what needs these names may fail",
        )


def _repaired_bugs() -> Iterator[Diagnostic]:
    """Yield a finding for every installed library of whose known bugs a newer release repairs some."""
    versions = installed()
    repaired: dict[str, list[str]] = {}
    for advisory in advisories():
        version = affected_version(advisory, versions)
        if version is not None and fixed_in(advisory, version) is not None:
            repaired.setdefault(f"{advisory.package} {version}", []).append(advisory.id)
    for library, names in repaired.items():
        bugs = "1 known bug" if len(names) == 1 else f"{len(names)} known bugs"
        yield Diagnostic(
            "DOC007",
            "info",
            f"{library} has {bugs} that a newer release repairs: {', '.join(names)}",
            help="fsdptool audit FILE names those that affect a run",
        )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"fsdptool": tool_version(), "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _machine() -> Host:
    import psutil

    from fsdptool.launch.command import available_cores

    shared = Path("/dev/shm")
    return Host(
        platform=platform.platform(),
        cores=available_cores(),
        memory_bytes=psutil.virtual_memory().total,
        memory_available_bytes=psutil.virtual_memory().available,
        shared_memory_free_bytes=shutil.disk_usage(shared).free if shared.exists() else None,
    )


def _devices(diagnostics: list[Diagnostic]) -> list[Device]:
    if (reason := why_unused()) is not None:
        diagnostics.append(
            Diagnostic("DOC005", "warning", reason, help="runs use the CPU until torch can use these GPUs")
        )
    if not count_gpus():
        return []
    import torch

    ids = visible_ids()
    claimed = {gpu: run for gpus, run in live_claims() for gpu in gpus}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        uuid = uuid_of(ids[index]) if index < len(ids) else None
        devices.append(
            Device(
                id=str(index),
                name=properties.name,
                memory_bytes=total,
                memory_free_bytes=free,
                capability=f"{properties.major}.{properties.minor}",
                uuid=uuid,
                run=claimed.get(local_id(uuid) if uuid is not None else str(index)),
            )
        )
        if free < 0.9 * total:
            diagnostics.append(
                Diagnostic(
                    "DOC001",
                    "warning",
                    f"GPU {index} has only {free / total:.0%} of its memory free",
                    help="another process uses the rest; find it with nvidia-smi",
                )
            )
    return devices


def _plugins(diagnostics: list[Diagnostic]) -> list[InstalledFamily]:
    from fsdptool.families.registry import load_registry

    registry = load_registry()
    diagnostics.extend(registry.diagnostics)
    return [
        InstalledFamily(family.name, family.library, str(registry.origin(family.name)))
        for family in registry.all()
    ]


def _cache(diagnostics: list[Diagnostic]) -> CacheState:
    from fsdptool.cache import Store

    store = Store()
    entries = store.entries()
    folder = store.folder
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(nearest, os.W_OK)
    if not writable:
        diagnostics.append(
            Diagnostic(
                "DOC002",
                "warning",
                f"the cache folder {folder} is not writable; every result is recomputed",
                help="set FSDPTOOL_CACHE to a writable folder",
            )
        )
    return CacheState(str(folder), writable, len(entries), sum(entry.bytes for entry in entries))


def measure(*, cpu: bool = False, kernels: bool = False) -> Measurements:
    """Measure this machine's GPUs: what plans assume, and whether the trainer's paths work.

    Args:
        cpu: Rehearse on two processes of the CPU, with small sizes.
        kernels: Time operators by size instead of trying the trainer's paths.

    Raises:
        ConfigError: There are no GPUs, or a live run uses one of them.
    """
    processes = 2 if cpu else count_gpus()
    if not processes:
        raise ConfigError(
            f"GPUs are measured but {why_unused() or 'this machine has none'}",
            help="run it on a machine with GPUs, or rehearse it with --cpu",
        )
    began = time.monotonic()
    device: DeviceType = "cpu" if cpu else "cuda"
    # Beside a run both would be slower, and the probe may find no memory.
    with (
        tempfile.TemporaryDirectory(prefix="fsdptool-measuring-") as folder,
        register_claim(frozenset() if cpu else frozenset(visible_ids()), Path(folder)),
    ):
        probe = _probe(device, min(processes, 2))
        options = ("kernels",) if kernels else ()
        error = _start(_MEASURING, device, processes, Path(folder), MEASURING_SECONDS, options)
        path = Path(folder) / MEASURED
        ranks = from_json(RankMeasurements, read_json(path)) if path.exists() else None
    versions = {**_versions(), **_gpu_versions()}
    return Measurements(device, versions, probe, ranks, error, time.monotonic() - began)


def _gpu_versions() -> dict[str, str | None]:
    """Return what torch was built with."""
    import torch

    cudnn: Any = torch.backends.cudnn.version  # not annotated in torch 2.13
    nccl: Any = torch.cuda.nccl.version
    built = torch.version.cuda is not None
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": str(cudnn()) if built else None,
        "nccl": ".".join(map(str, nccl())) if built else None,
    }


def _start(
    module: str,
    device: DeviceType,
    processes: int,
    folder: Path,
    seconds: float,
    options: tuple[str, ...] = (),
) -> str | None:
    """Run a module on processes of one machine, with a folder, the device and further options as arguments.

    Returns:
        Why it failed, or None.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", FOLDER: str(folder)}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    argv = [sys.executable, "-P", "-m", "fsdptool.distributed.rendezvous", "torchrun", "--nnodes", "1"]
    argv += ["--nproc-per-node", str(processes), "--rdzv-backend", LOCAL, "--module", module]
    try:
        done = subprocess.run(
            [*argv, str(folder), device, *options],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no result within {seconds:.0f} s"
    if done.returncode == 0:
        return None
    return _reason(done.stderr) or f"exit status {done.returncode}"


_REASONS = (
    re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b(?!: *$).*)"),
    re.compile(r"^ *what\(\): *(.+)"),
    # torchrun ends the other workers with SIGTERM.
    re.compile(r"^ *traceback *: (Signal (?!15 )\d+ .*)"),
)
"""What exceptions of Python and C++ and signals look like in the output of torchrun and its workers."""


def _reason(output: str) -> str | None:
    """Return why a worker ended: what it said itself before what torchrun says of it."""
    lines = [line for line in output.splitlines() if "ChildFailedError" not in line]
    for pattern in _REASONS:
        for line in lines:
            if match := pattern.match(line):
                return match[1].strip()
    return None


def _probe(device: DeviceType, processes: int) -> Probe:
    with tempfile.TemporaryDirectory(prefix="fsdptool-probe-") as folder:
        reason = _start(_PROBE, device, processes, Path(folder), PROBE_SECONDS)
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    if reason is None and len(reports) != processes:
        reason = f"{len(reports)} of {processes} processes reported"
    return _verdict(device, processes, reports, reason)


def _verdict(device: DeviceType, processes: int, reports: list[dict[str, Any]], reason: str | None) -> Probe:
    sharded = bool(reports) and all(item["sharded"] for item in reports)
    equal = bool(reports) and all(item["equal"] for item in reports)
    if reason is None and not sharded:
        reason = "parameters are not sharded by rows"
    if reason is None and not equal:
        worst = max(item["difference"] for item in reports)
        reason = f"weights after three steps differ from those of an unsharded loop by {worst:.1e}"
    return Probe(
        device=device,
        backend=reports[0]["backend"] if reports else None,
        processes=processes,
        sharded=sharded,
        equal=equal,
        difference=max((item["difference"] for item in reports), default=None),
        ok=reason is None,
        reason=reason,
    )
