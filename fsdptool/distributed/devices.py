"""The GPUs of a machine: which there are, which of them this process may use, and what tells them apart.

Nothing here opens a CUDA context, and torch is imported only where a driver is loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Read by CUDA and by HIP: indices, or UUIDs and ids of MIG instances, in the order of the ranks."""

_HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
"""The same for AMD's GPUs, where torch prefers it (2.13, ``torch/cuda/__init__.py``)."""


class Driver(StrEnum):
    """Whose driver a machine has loaded. Values are what messages call the GPUs."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"
    WINDOWS = "Windows (WSL2)"
    INTEL = "Intel"


DRIVER_FILES: Mapping[Driver, tuple[str, ...]] = {
    Driver.NVIDIA: ("/proc/driver/nvidia", "/dev/nvidiactl"),
    Driver.AMD: ("/dev/kfd",),
    Driver.WINDOWS: ("/dev/dxg",),
}
"""What the drivers show that torch.cuda can work with; WSL2 passes on the GPUs of Windows."""

_DRIVER = Path("/proc/driver/nvidia/gpus")
_RENDERERS = Path("/sys/class/drm")
_INTEL = "0x8086"
_LISTING_SECONDS = 60.0


def drivers() -> tuple[Driver, ...]:
    """Return whose drivers are loaded; Intel's only where there is no other."""
    found = tuple(name for name, files in DRIVER_FILES.items() if any(Path(path).exists() for path in files))
    return found or ((Driver.INTEL,) if _has_intel() else ())


def _has_intel() -> bool:
    for path in sorted(_RENDERERS.glob("renderD*/device/vendor")):
        with suppress(OSError):
            if path.read_text(encoding="ascii").strip() == _INTEL:
                return True
    return False


def count_gpus() -> int:
    """Return the GPUs this process may use, without importing torch where no driver is loaded.

    torch asks NVML, and counts by the runtime without a context where that is missing (2.13,
    ``torch/cuda/__init__.py``, ``device_count``). A build for the CPU counts none.
    """
    if not set(drivers()) & set(DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def why_unused() -> str | None:
    """Return why this machine's GPUs cannot be used, to end a sentence; None if they can, or without any."""
    found = drivers()
    if not found or count_gpus():
        return None
    gpus = f"this machine has {' and '.join(found)} GPUs"
    if found == (Driver.INTEL,):
        return f"{gpus}, on which fsdptool does not train"
    if os.environ.get(VISIBLE, "0") in ("", "-1"):
        return f"{VISIBLE} hides the GPUs of this machine"
    import torch

    build, needed = "the CPU only", "ROCm" if found == (Driver.AMD,) else "CUDA"
    if torch.version.cuda is not None:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        build = f"ROCm {torch.version.hip}"
    if not build.startswith(needed):
        return f"{gpus}, and torch {torch.__version__} is built for {build}: install its build for {needed}"
    return f"{gpus} that torch {torch.__version__} for {build} cannot start: {start_error()}"


def start_error() -> str:
    """Return why CUDA does not start, in torch's words; where it does not, asking opens no context."""
    import torch

    initialise: Any = torch.cuda.init  # not annotated in torch 2.13
    try:
        initialise()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() is false"


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU as its driver lists it.

    Attributes:
        name: What the driver calls it.
        uuid: Its UUID, with the prefix ``GPU-``.
        instances: Ids of its MIG instances, in order; empty where MIG is off.
    """

    name: str
    uuid: str
    instances: tuple[str, ...] = ()


def read_listing(text: str) -> tuple[ListedGpu, ...]:
    """Return the GPUs in what ``nvidia-smi -L`` prints, MIG instances included."""
    gpus: list[ListedGpu] = []
    for line in text.splitlines():
        match = re.match(r"(\s*)(?:GPU|MIG)\s+(.*?):?\s+\(UUID:\s*(\S+?)\)\s*$", line)
        if match is None:
            continue
        indent, name, uuid = match.groups()
        if not indent:
            gpus.append(ListedGpu(re.sub(r"^\d+:\s*", "", name), uuid))
        elif gpus:
            last = gpus[-1]
            gpus[-1] = ListedGpu(last.name, last.uuid, (*last.instances, uuid))
    return tuple(gpus)


@cache
def list_gpus() -> tuple[ListedGpu, ...]:
    """Return the GPUs that this process could be given, in CUDA's order; empty if nothing lists them.

    ``nvidia-smi`` lists them by the bus. CUDA numbers GPUs of several kinds by speed unless
    ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``, and AMD's have another tool: then torch is asked, in a process
    of its own, because it opens a context.
    """
    found = drivers()
    if not set(found) & set(DRIVER_FILES):
        return ()
    listed = read_listing(_output(["nvidia-smi", "-L"])) if Driver.AMD not in found else ()
    kinds = {gpu.name for gpu in listed}
    if listed and (len(kinds) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"):
        return listed
    environment = {key: value for key, value in os.environ.items() if key not in (VISIBLE, _HIP_VISIBLE)}
    return read_listing(_output([sys.executable, "-P", "-c", _LIST], environment)) or listed


_LIST = """
import torch
for index in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(index)
    print(f"GPU {index}: {gpu.name} (UUID: GPU-{gpu.uuid})")
"""
"""Prints what ``nvidia-smi -L`` prints."""


def used_by_driver() -> dict[str, int]:
    """Return the bytes in use on each GPU by its UUID, without a context; empty where nothing tells them."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    rows = (line.split(",") for line in _output(query).splitlines())
    return {uuid.strip(): int(mebibytes) << 20 for uuid, mebibytes in rows if mebibytes.strip().isdecimal()}


def _output(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return what a command prints; nothing if it cannot be run."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LISTING_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def split_ids(text: str) -> tuple[str, ...]:
    """Return the ids in a comma list, in their order."""
    return tuple(part for part in re.split(r"[,\s]+", text.strip()) if part)


def visible_ids() -> tuple[str, ...]:
    """Return the ids of the GPUs that this process may use, in the order of their ranks."""
    visible = os.environ.get(VISIBLE)
    if Driver.AMD in drivers():
        visible = os.environ.get(_HIP_VISIBLE, visible)
    if visible is None:
        return tuple(str(index) for index in range(count_gpus()))
    # CUDA ends the list at the first index that is negative.
    ids = split_ids(visible)
    return ids[: ids.index("-1")] if "-1" in ids else ids


def uuid_of(id: str) -> str | None:
    """Return the UUID of what an id of ``CUDA_VISIBLE_DEVICES`` names; None if nothing tells it.

    An id is an index, the beginning of a UUID, or the id of a MIG instance. Of a GPU that is divided CUDA
    uses the first instance (CUDA's programming guide, "CUDA environment variables").
    """
    gpus = list_gpus()
    if id.isdecimal():
        return _used(gpus[int(id)]) if int(id) < len(gpus) else None
    for gpu in gpus:
        if id in gpu.instances:
            return id
    begun = [gpu for gpu in gpus if gpu.uuid.startswith(id)]
    return _used(begun[0]) if len(begun) == 1 else None


def _used(gpu: ListedGpu) -> str:
    return gpu.instances[0] if gpu.instances else gpu.uuid


def uuids_of(ids: Iterable[str]) -> dict[str, str | None]:
    """Return :func:`uuid_of` of every id."""
    return {each: uuid_of(each) for each in ids}


def local_id(uuid: str) -> str:
    """Return the index of a GPU in this process; the UUID of one that it cannot see, and of an instance."""
    for index, gpu in enumerate(list_gpus()):
        if gpu.uuid == uuid:
            return str(index)
    return uuid


def local_ids(gpus: Mapping[str, str | None]) -> frozenset[str]:
    """Return :func:`local_id` of GPUs, given UUIDs by some process's ids; the id of one without a UUID."""
    return frozenset(each if uuid is None else local_id(uuid) for each, uuid in gpus.items())


def driver_gpus() -> tuple[str, ...]:
    """Return the names of this machine's GPUs by the files of NVIDIA's driver; empty without them."""
    names = []
    for path in sorted(_DRIVER.glob("*/information")):
        with suppress(OSError):
            if match := re.search(r"^Model:\s*(\S.*?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE):
                names.append(match[1])
    return tuple(names)


def gpu_name() -> str | None:
    """Return the name of the first GPU that this process may use, or None if nothing tells it.

    NVIDIA's files tell it for nothing where all GPUs are alike; torch would open a context, which costs this
    process half a GiB of the GPU as long as it lives.
    """
    names = driver_gpus()
    if len(set(names)) != 1:
        names = tuple(gpu.name for gpu in list_gpus()) or names
    if len(set(names)) > 1 and (ids := visible_ids()):
        first = uuid_of(ids[0])
        for gpu in list_gpus():
            if first in (gpu.uuid, *gpu.instances):
                return gpu.name
    return names[0] if names else None
