"""The page of hardware: offers side by side, the catalogue of GPUs, and cluster files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlencode

import psutil
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import create_file
from fsdptool.planning.clusters import describe
from fsdptool.records.cluster import Cluster
from fsdptool.web.changes import target_of
from fsdptool.web.offers import MOST, OfferForm, catalogue, empty_offer, read_offers
from fsdptool.web.page import Page, error_page, render, return_address, services

page = Page("Hardware", "/hardware", "Offers of GPUs side by side, and the catalogue they come from.")


def show(request: Request) -> Response:
    """Answer ``/hardware?1.gpu=…&1.gpus_per_node=…&2.gpu=…``."""
    offers = read_offers(request.query_params)
    extra = len(offers) < MOST and "another" in request.query_params
    if extra:
        offers = (*offers, empty_offer(len(offers) + 1))
    known = [offer for offer in offers if offer.cluster is not None]
    saved = request.query_params.getlist("saved")
    return render(
        request,
        "hardware.html",
        page=page,
        offers=offers,
        rows=_rows([offer.cluster for offer in known if offer.cluster is not None]),
        known=known,
        catalogue=catalogue(),
        machine=_machine(),
        most=MOST,
        saved=saved,
        plan=f"/plan?{urlencode({'clusters': ','.join(saved)})}",
        address=f"/hardware?{urlencode([*_parameters(offers), *(('saved', name) for name in saved)])}",
        command=_command(known),
        link=lambda offer: f"/plan?{urlencode(offer.options)}",
        add=lambda name: f"/hardware?{urlencode(_with(offers, name))}",
        without=lambda offer: f"/hardware?{urlencode(_parameters([o for o in offers if o is not offer]))}",
        own=f"/hardware?{urlencode(_own(offers))}",
        file=lambda offer: f"{next(iter(services(request).roots.folders))}/{_file_name(offer)}",
        flops=flops,
        rate=rate,
        text=lambda offer: f"/hardware/cluster.yaml?{urlencode(_parameters([offer]))}",
    )


def download(request: Request) -> Response:
    """Return the cluster file of an offer."""
    offer = _only(request.query_params)
    headers = {"content-disposition": f'attachment; filename="{_file_name(offer)}"'}
    return Response(offer.yaml, media_type="application/yaml", headers=headers)


async def save(request: Request) -> Response:
    """Write an offer as a cluster file below a root; a file that exists stays."""
    received = await request.form()
    form = {name: str(value) for name, value in received.items()}
    try:
        offer = _only(form)
        roots = services(request).roots
        path = target_of(roots, form.get("path", ""))
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"{form['path']} is not a YAML file", help="use a name that ends in .yaml")
        create_file(path, offer.yaml.encode())
    except FsdptoolError as error:
        return error_page(request, error)
    back = return_address(received)
    query = urlencode({"saved": roots.name_of(path)})
    return RedirectResponse(f"{back}{'&' if '?' in back else '?'}{query}", 303)


def _only(values: Mapping[str, str]) -> OfferForm:
    """Return the one offer of a request.

    Raises:
        ConfigError: It is not complete.
    """
    offer = read_offers(values)[0]
    if offer.error is not None:
        raise offer.error
    if offer.cluster is None:
        wrong = next((field for field in offer.fields if field.error), None)
        reason = f"{wrong.label}: {wrong.error}" if wrong is not None else "it is empty"
        raise ConfigError(f"the offer is not complete: {reason}", help="fill it in first")
    return offer


def _parameters(offers: Sequence[OfferForm]) -> list[tuple[str, str]]:
    """Return what an address says of offers, numbered from 1."""
    return [
        (f"{place}.{field.name.partition('.')[2]}", field.value)
        for place, offer in enumerate(offers, 1)
        for field in offer.fields
        if field.value
    ]


def _with(offers: Sequence[OfferForm], gpu: str, count: int = 8, **more: str) -> list[tuple[str, str]]:
    """Return the offers and one more, which replaces the last where there are too many."""
    given = [offer for offer in offers if any(field.value for field in offer.fields)][: MOST - 1]
    new = {"gpu": gpu, "gpus_per_node": str(count), **more}
    return [*_parameters(given), *((f"{len(given) + 1}.{name}", value) for name, value in new.items())]


def _own(offers: Sequence[OfferForm]) -> list[tuple[str, str]]:
    """Return the offers and this machine."""
    machine = _machine()
    names = machine["gpus"]
    return _with(offers, names[0] if names else "", len(names), host_memory=str(machine["memory_bytes"]))


def _command(offers: Sequence[OfferForm]) -> list[str]:
    if len(offers) == 1:
        words = ["fsdptool", "plan", "MODEL"]
        for option, value in offers[0].options.items():
            words += [f"--{option.replace('_', '-')}", str(value)]
        return words
    files = [word for offer in offers for word in ("--cluster", _file_name(offer))]
    return ["fsdptool", "plan", "MODEL", *files] if files else []


def _file_name(offer: OfferForm) -> str:
    cluster = offer.cluster
    name = (offer.data or {}).get("name") or (describe(cluster) if cluster is not None else "cluster")
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.").lower()[:80] + ".yaml"


def _rows(clusters: Sequence[Cluster]) -> list[tuple[str, list[str]]]:
    """Return what offers come to, a row per figure."""
    from fsdptool.formatting import amount
    from fsdptool.report.plan_words import money

    def memory(cluster: Cluster) -> str:
        return amount(cluster.gpu.memory_bytes if cluster.gpu is not None else cluster.host_memory_bytes)

    def total(cluster: Cluster) -> str:
        gpu = cluster.gpu
        return amount(gpu.memory_bytes * cluster.world_size) if gpu is not None else ""

    def price(cluster: Cluster) -> str:
        hour = cluster.price_per_gpu_hour
        return money(hour * cluster.world_size) if hour is not None else "not given"

    figures = {
        "hardware": describe,
        "ranks": lambda cluster: str(cluster.world_size),
        "memory of a rank": memory,
        "memory of all GPUs": total,
        "bf16 of all GPUs": lambda c: flops(c.gpu.flops.get("bfloat16"), c.world_size) if c.gpu else "",
        "link within a node": lambda c: f"{c.gpu.link}, {rate(c.gpu.link_bandwidth)}" if c.gpu else "",
        "network per GPU": lambda cluster: rate(cluster.inter_node_bandwidth),
        "host memory per node": lambda cluster: amount(cluster.host_memory_bytes),
        "price per hour": price,
    }
    return [(name, [figure(cluster) for cluster in clusters]) for name, figure in figures.items()]


def rate(value: float | None) -> str:
    """Return bytes per second as text."""
    return "not given" if value is None else f"{value / 1e9:,.4g} GB/s"


def flops(value: float | None, count: int = 1) -> str:
    """Return a rate of computation as text; ``count`` devices together."""
    if value is None:
        return "none"
    whole = value * count
    return f"{whole / 1e15:,.3g} PFLOP/s" if whole >= 1e15 else f"{whole / 1e12:,.3g} TFLOP/s"


@cache
def _machine() -> dict[str, Any]:
    """Return what this machine has: its GPUs by the driver's files, and its memory."""
    from fsdptool.distributed.devices import driver_gpus

    return {"gpus": driver_gpus(), "memory_bytes": psutil.virtual_memory().total}


routes = [
    Route("/hardware", show),
    Route("/hardware/save", save, methods=["POST"]),
    Route("/hardware/cluster.yaml", download),
]
