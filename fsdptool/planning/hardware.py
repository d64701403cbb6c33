"""The hardware a plan assumes: the GPU catalogue and the machine table (docs/reference/hardware.md).

Both are data with a source. Names of GPUs are forgiving, and files extend either. A machine's row is what no
trace can see (context, communicators, efficiencies): the shipped values are assumptions;
``fsdptool calibrate`` replaces them by measurements in a file that is only read when named
(``--machine``), so that equal inputs give equal plans everywhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.files.values import read_data
from fsdptool.records.cluster import ALLOCATOR_VARIABLES, AttentionRate, Cluster, Gpu, Machine
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.plan import OWN_LOOP, TrainingLoop
from fsdptool.spelling import all_near

_GPUS = Path(__file__).parent / "data" / "gpus.json"
_NOISE = frozenset(
    {"nvidia", "amd", "geforce", "tesla", "quadro", "instinct", "gpu", "tensor", "core", "hbm2", "hbm2e"}
)
_SPELLINGS = {
    "sxm4": "sxm",
    "sxm5": "sxm",
    "sxm2": "sxm",
    "sxm6": "sxm",
    "hbm3": "sxm",
    "hbm3e": "sxm",
    "oam": "",
    "workstation": "",
    "server": "",
    "edition": "",
    "generation": "",
    "blackwell": "",
}


@dataclass(frozen=True, slots=True)
class CatalogueGpu:
    """One catalogue entry: the GPU, and the further names people use for it."""

    gpu: Gpu
    aliases: tuple[str, ...]
    memory_source: str


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a name was taken for. ``diagnostic`` says so aloud when others would have matched too."""

    gpu: Gpu
    diagnostic: Diagnostic | None = None


def load_gpu(name: str) -> Gpu:
    """Return the catalogue's GPU called ``name``, however it is spelled.

    Raises:
        PlanError: There is none; the message names the nearest.
    """
    return find_gpu(name).gpu


def find_gpu(name: str, *, gpus_file: Path | None = None) -> Resolution:
    """Return the GPU called ``name``; entries of ``gpus_file`` come before the catalogue's own.

    Names forgive case, separators, vendor words and what the driver adds (``NVIDIA H100 80GB HBM3``).
    A name that fits several entries takes the first in catalogue order and says so.

    Raises:
        PlanError: No entry fits; the message names the nearest. Or ``gpus_file`` cannot be used.
    """
    entries = all_entries(gpus_file)
    tokens = _tokens(name)
    if not tokens:
        raise PlanError("an empty GPU name", help="name one, for example --gpu H100-80GB-SXM")
    exact = [entry for entry in entries if tokens in (_tokens(n) for n in (entry.gpu.name, *entry.aliases))]
    if len(exact) == 1 or (exact and exact[0].gpu.name == name):
        return Resolution(exact[0].gpu)
    matches = exact or [entry for entry in entries if _fits(tokens, entry)]
    if not matches:
        raise PlanError(f"unknown GPU {name!r}", help=_nearest(name, entries))
    chosen = matches[0]
    others = [entry.gpu.name for entry in matches[1:]]
    if not others:
        return Resolution(chosen.gpu)
    return Resolution(
        chosen.gpu,
        Diagnostic(
            "PLN001",
            "info",
            f"GPU {name!r} is taken as {chosen.gpu.name}",
            help=f"it could also be {', '.join(others)}; name it in full to choose",
        ),
    )


def all_entries(gpus_file: Path | None = None) -> tuple[CatalogueGpu, ...]:
    """Return every entry, those of ``gpus_file`` first and instead of ours of the same name.

    Raises:
        ConfigError: The file cannot be read or does not follow ``schemas/gpus.schema.json``.
    """
    shipped = _shipped_gpus()
    if gpus_file is None:
        return shipped
    own = _read(gpus_file)
    names = {entry.gpu.name for entry in own}
    return own + tuple(entry for entry in shipped if entry.gpu.name not in names)


@cache
def _shipped_gpus() -> tuple[CatalogueGpu, ...]:
    return tuple(_entry(item) for item in read_data(_GPUS)["gpus"])


def _read(path: Path) -> tuple[CatalogueGpu, ...]:
    from fsdptool.files.values import read_object

    data = read_object(path, "gpus")
    return tuple(_entry(item) for item in data["gpus"])


def gpu_from_data(item: dict[str, Any]) -> Gpu:
    """Return the GPU one checked catalogue item describes."""
    return _entry(item).gpu


def _entry(item: dict[str, Any]) -> CatalogueGpu:
    marketing = item.get("marketing_gb")
    gpu = Gpu(
        name=item["name"],
        memory_bytes=int(item["memory_bytes"]),
        flops={key: float(value) for key, value in item["flops"].items()},
        memory_bandwidth=float(item["memory_bandwidth"]),
        link_bandwidth=float(item["link_bandwidth"]),
        link=item.get("link", "pcie"),
        native_bf16=bool(item.get("native_bf16", "bfloat16" in item["flops"])),
        native_fp8=bool(item.get("native_fp8", "float8" in item["flops"])),
        source=item["source"],
        marketing_bytes=int(marketing * 10**9) if marketing is not None else None,
        workspace_bytes=int(item.get("cublas_workspace_bytes", 8_519_680)),
    )
    return CatalogueGpu(gpu, tuple(item.get("aliases", ())), item.get("memory_source", item["source"]))


def _tokens(name: str) -> frozenset[str]:
    """Split a name at separators: ``80``, ``80g``, ``80GB`` and ``80GiB`` are one token, ``3080ti`` two."""
    spaced = re.sub(r"rtx(?=\w)", "rtx ", name.lower())
    spaced = re.sub(r"(\d{4})(ti|d)?(super)?(?![a-z])", r"\1 \2 \3 ", spaced)
    parts = re.findall(r"[a-z0-9]+", spaced)
    words: set[str] = set()
    for part in parts:
        part = re.sub(r"^(\d+(?=g)|\d{2,3})(g|gb|gib)?$", r"\1gb", part)
        glued = re.fullmatch(r"([a-z]+\d+[a-z]*?)(\d+gb?)?(sxm\d?|pcie|nvl)?", part)
        pieces = [piece for piece in glued.groups() if piece] if glued else [part]
        words.update(_SPELLINGS.get(piece, piece) for piece in pieces)
    return frozenset(words - _NOISE - {""})


def _fits(tokens: frozenset[str], entry: CatalogueGpu) -> bool:
    return any(tokens <= _tokens(name) for name in (entry.gpu.name, *entry.aliases))


def _nearest(name: str, entries: tuple[CatalogueGpu, ...]) -> str:
    by_key = {"".join(sorted(_tokens(entry.gpu.name))): entry.gpu.name for entry in entries}
    by_key |= {
        re.sub(r"\W", "", alias.lower()): e.gpu.name for e in entries for alias in (*e.aliases, e.gpu.name)
    }
    keys = all_near(re.sub(r"\W", "", name.lower()), by_key, most=6, cutoff=0.4)
    near = list(dict.fromkeys(by_key[key] for key in keys))[:3] or [entry.gpu.name for entry in entries[:3]]
    return (
        f"nearest: {', '.join(near)}; describe your own in a file: --gpus-file gpus.yaml"
        " (docs/how-to/describe-gpus-and-clusters.md)"
    )


_MACHINES = Path(__file__).parent / "data" / "machines.json"
_ARCHITECTURES = Path(__file__).parent / "data" / "architectures.json"


def machine_for(gpu: Gpu | None, *, table: Path | None = None) -> Machine:
    """Return the figures for a GPU: the named table's first, then the shipped ones.

    The most specific match wins: catalogue name, then link kind, then ``*``. The rates of compute in a
    shipped row are those of the GPU's generation (``data/architectures.json``). A row of a named table takes
    from there what it does not say itself.

    Raises:
        PlanError: ``table`` cannot be used, or its kernels were timed on another device.
    """
    said = _said(table) if table is not None else ()
    own = tuple(row for row, _ in said)
    keys = (gpu.name, gpu.link, "*") if gpu is not None else ("cpu", "*")
    probed = [row.match for row in own if row.kernels]
    if probed and not any(row.match.lower() in {key.lower() for key in keys} for row in own):
        raise PlanError(
            f"{table} was measured on {', '.join(probed)}, and the plan is for {keys[0]}",
            help="measure there, with `fsdptool calibrate --probe`, or leave --machine out",
        )
    for key in keys:
        for row, fields in (*said, *((row, None) for row in _shipped_machines())):
            if row.match.lower() == key.lower():
                return _with_rates(row, gpu, fields)
    raise PlanError("the machine table has no row that matches everything ('*')")  # pragma: no cover


def _with_rates(row: Machine, gpu: Gpu | None, said: frozenset[str] | None) -> Machine:
    """Return a row with the rates of the GPU's generation.

    Args:
        row: Of a table.
        gpu: The GPU.
        said: The fields that the user's table gives, which stay; None for a shipped row.
    """
    if gpu is None or row.architecture:
        return row
    names = _tokens(gpu.name)
    fields = next(item for item in _architectures() if any(_tokens(name) <= names for name in item["gpus"]))
    product: dict[str, Any] = next(
        (item for item in _rates()["products"] if any(_tokens(name) <= names for name in item["gpus"])), {}
    )
    sources = {**fields["sources"], **product.get("sources", {})}
    fields = {**fields, **product}
    changes = {key: value for key, value in fields.items() if key not in ("gpus", "links", "sources")}
    changes["attention"] = tuple(AttentionRate(**rate) for rate in fields["attention"])
    if said is not None:
        return replace(row, **{key: value for key, value in changes.items() if key not in said})
    changes |= fields.get("links", {}).get(gpu.link, {})
    told = "; ".join(f"{key}: {text}" for key, text in sources.items() if key in changes)
    return replace(row, source=f"{row.source}; {told}", **changes)


@cache
def _rates() -> dict[str, Any]:
    rates: dict[str, Any] = read_data(_ARCHITECTURES)
    return rates


@cache
def _architectures() -> tuple[dict[str, Any], ...]:
    """Return the generations, specific names first; the last row matches every GPU."""
    data = _rates()
    every = data["every"]
    return tuple(
        {**every, **item, "sources": {**every["sources"], **item["sources"]}}
        for item in data["architectures"]
    )


def read_table(path: Path) -> tuple[Machine, ...]:
    """Return the rows of a machine table.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    return tuple(row for row, _ in _said(path))


def _said(path: Path) -> tuple[tuple[Machine, frozenset[str]], ...]:
    """Return the rows of a machine table, and the fields that each of them gives."""
    from fsdptool.files.values import read_object

    data = read_object(path, "machine")
    return tuple(
        (from_json(Machine, row, where=f"{path}: machines[{i}]"), frozenset(row))
        for i, row in enumerate(data["machines"])
    )


def write_table(rows: tuple[Machine, ...]) -> str:
    """Return the table as text, in the form :func:`read_table` reads."""
    return json.dumps({"version": 1, "machines": [to_json(row) for row in rows]}, indent=1) + "\n"


@cache
def _shipped_machines() -> tuple[Machine, ...]:
    rows = read_data(_MACHINES)["machines"]
    return tuple(from_json(Machine, row) for row in rows)


_THREADS = 2
"""Threads that multiply matrices: the one that runs forward and autograd's own for the device."""


def expands(cluster: Cluster, loop: TrainingLoop) -> bool:
    """Return whether a run has expandable segments.

    ``fsdptool train`` switches them on unless the environment configures the allocator
    (``launch/command.py``); other programs' loops leave torch's default, which is off.
    """
    values = [
        cluster.environment[name].lower() for name in ALLOCATOR_VARIABLES if name in cluster.environment
    ]
    if not values:
        return loop.program == OWN_LOOP.program
    return any("expandable_segments:true" in value for value in values)


def workspaces(cluster: Cluster) -> tuple[int, ...]:
    """Return the bytes of each workspace cuBLAS keeps: one for every thread that has used it.

    torch takes them from its own allocator at the first product and never gives them back (2.13,
    ``CublasHandlePool.cpp``; cuBLASLt shares them). ``CUBLAS_WORKSPACE_CONFIG``, pairs of KiB and
    count, changes their size.
    """
    if cluster.gpu is None:
        return ()
    pairs = re.findall(r":(\d+):(\d+)", cluster.environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    size = sum(1024 * int(each) * int(count) for each, count in pairs) if pairs else None
    return (cluster.gpu.workspace_bytes if size is None else size,) * _THREADS
