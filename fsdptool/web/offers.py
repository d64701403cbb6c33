"""Offers of hardware as forms: the fields of a cluster file, several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from fsdptool.errors import FsdptoolError
from fsdptool.planning.clusters import cluster_from_data
from fsdptool.planning.hardware import all_entries
from fsdptool.records.cluster import Cluster, ClusterFile, Gpu
from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.web.forms import Field, parse_record, record_fields, with_error

MOST = 6
"""Offers that are shown side by side."""


@dataclass(frozen=True, slots=True)
class OfferForm:
    """One offer as it is entered.

    Attributes:
        number: Its place, from 1; fields are called ``NUMBER.FIELD``.
        fields: Its fields with what is wrong beside them.
        cluster: What it describes; None where something is wrong.
        data: The same as the data of a cluster file.
        findings: What was assumed to read it.
        error: What is wrong with it as a whole.
    """

    number: int
    fields: tuple[Field, ...]
    cluster: Cluster | None = None
    data: Mapping[str, Any] | None = None
    findings: tuple[Diagnostic, ...] = ()
    error: FsdptoolError | None = None

    @property
    def yaml(self) -> str:
        """The text of the cluster file."""
        return yaml.safe_dump(dict(self.data or {}), sort_keys=False, allow_unicode=True)

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``plan`` that describe the same hardware."""
        data = self.data or {}
        return {option: data[field] for field, option in _OPTIONS.items() if field in data}


_OPTIONS = {
    "gpu": "gpu",
    "gpus_per_node": "gpus",
    "nodes": "nodes",
    "inter_node_bandwidth": "network",
    "host_memory": "host_memory",
    "price_per_gpu_hour": "price",
}
"""Field of a cluster file to option of ``plan``."""


def read_offers(values: Mapping[str, str]) -> tuple[OfferForm, ...]:
    """Return the offers that parameters ``1.gpu``, ``1.gpus_per_node``, ``2.gpu``, … describe.

    Args:
        values: Texts by name. Offers without any are left out; the first one is always there.
    """
    numbers = {int(name.partition(".")[0]) for name, text in values.items() if text and _numbered(name)}
    return tuple(_read(place, number, values) for place, number in enumerate(sorted(numbers) or [1], 1))


def empty_offer(number: int) -> OfferForm:
    """Return an offer to fill in."""
    return OfferForm(number, tuple(replace(field, name=f"{number}.{field.name}") for field in _fields({})))


_NUMBERS = frozenset(str(number) for number in range(1, MOST + 1))


def _numbered(name: str) -> bool:
    number, dot, _ = name.partition(".")
    return bool(dot) and number in _NUMBERS


def _read(place: int, number: int, values: Mapping[str, str]) -> OfferForm:
    own = {name.partition(".")[2]: text for name, text in values.items() if name.startswith(f"{number}.")}
    record, fields = parse_record(ClusterFile, _fields(own))
    named = tuple(replace(field, name=f"{place}.{field.name}") for field in fields)
    if not any(own.values()):
        return empty_offer(place)
    if record is None:
        return OfferForm(place, named)
    data = {key: value for key, value in to_json(record).items() if value not in (None, {})}
    try:
        offer = cluster_from_data(data, name=f"offer {place}")
    except FsdptoolError as error:
        marked, found = with_error(fields, error)
        named = tuple(replace(field, name=f"{place}.{field.name}") for field in marked)
        return OfferForm(place, named, error=None if found else error)
    return OfferForm(place, named, offer.cluster, data, offer.diagnostics)


def _fields(values: Mapping[str, str]) -> Iterable[Field]:
    fields = record_fields(ClusterFile, values, leave_out=("environment",))
    for field in sorted(fields, key=lambda field: field.name != "gpu"):
        yield replace(field, suggestions=gpu_names()) if field.name == "gpu" else field


@cache
def gpu_names() -> tuple[str, ...]:
    """Return the names of the catalogue, in its order."""
    return tuple(entry.gpu.name for entry in all_entries())


def catalogue() -> tuple[Gpu, ...]:
    """Return the GPUs of the catalogue, in its order."""
    return tuple(entry.gpu for entry in all_entries())
