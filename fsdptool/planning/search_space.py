"""The search space: every configuration worth weighing, in one fixed order.

What changes the numbers a run computes (precision, reduce dtype, layout, objective) is never
turned; what only changes memory and speed is. Combinations that another one beats by construction
are left out, each by a rule below that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from fsdptool.planning.search_point import Accumulating, Implementation, Knobs
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.cluster import Cluster

T = TypeVar("T")

LONG_SEQUENCE = 16384
"""Tokens from which sharing a sequence between ranks is worth weighing."""


def enumerate_space(
    asked: Knobs,
    cluster: Cluster,
    anatomy: Anatomy,
    *,
    fixed: Sequence[str],
    wide: bool,
    sequence_length: int | None,
    hardware: bool,
) -> Iterator[Knobs]:
    """Yield every configuration to weigh on one cluster, ``asked`` first, each once.

    Args:
        asked: Where the person stands on this cluster.
        cluster: The hardware.
        anatomy: The model, for wrap choices.
        fixed: Knobs that keep the asked value.
        wide: Weigh also what seldom wins (other wrap choices, optimizer implementations, ...).
        sequence_length: Tokens per sample, or None.
        hardware: Whether the run is on GPUs.
    """
    yield asked
    seen = {asked}
    axes = (
        _batches(asked, fixed),
        _checkpointing(asked, fixed, wide),
        _meshes(asked, cluster, fixed, sequence_length, hardware),
        _reshards(asked, cluster, fixed, wide),
        _wraps(asked, anatomy, fixed, wide),
        _flag(asked.cpu_offload, (False, True), "cpu_offload" in fixed or not hardware),
        _flag(asked.prefetch, (1, 2, 3) if wide else (1, 2), "prefetch" in fixed or asked.layout != "native"),
        _implementations(asked, fixed, wide),
        _gradients(asked, fixed, wide),
    )
    for batch, checkpointing, mesh, reshard, wrap, offload, prefetch, implementation, gradients in product(
        *axes
    ):
        samples = asked.global_batch
        replicate, shard, cp = mesh
        if samples % (batch * replicate * shard):
            continue
        knobs = replace(
            asked,
            micro_batch=batch,
            accumulation=samples // (batch * replicate * shard),
            checkpointing=checkpointing,
            dp_replicate=replicate,
            dp_shard=shard,
            cp=cp,
            reshard_after_forward=reshard,
            wrap_policy=wrap[0],
            wrap_classes=wrap[1],
            cpu_offload=offload,
            prefetch=prefetch,
            optimizer_implementation=implementation,
            gradients=gradients,
        )
        if knobs not in seen and _worth(knobs, asked):
            seen.add(knobs)
            yield knobs


def _worth(knobs: Knobs, asked: Knobs) -> bool:
    """Leave out what another configuration beats by construction."""
    ranks = knobs.dp_shard * knobs.cp
    if knobs.gradients != asked.gradients and knobs.accumulation == 1:
        return False  # nothing is accumulated: both are the same run
    if ranks == 1 and (knobs.reshard_after_forward is not True or knobs.prefetch > 1):
        return False  # one rank gathers nothing
    if knobs.cpu_offload and (knobs.prefetch > 1 or knobs.reshard_after_forward is not True):
        return False  # offload is for want of memory: keeping units gathered undoes it
    if knobs.reshard_after_forward is False and knobs.prefetch > 1 and knobs.accumulation == 1:
        return False  # backward gathers nothing, and forward's gathers are hidden by one unit ahead
    if not isinstance(knobs.reshard_after_forward, bool):
        return ranks % knobs.reshard_after_forward == 0 and 1 < knobs.reshard_after_forward < ranks
    return True


def _batches(asked: Knobs, fixed: Sequence[str]) -> list[int]:
    """Micro-batches that divide one rank's share of the global batch."""
    if "micro_batch" in fixed:
        return [asked.micro_batch]
    share = asked.micro_batch * asked.accumulation
    powers = {1 << bits for bits in range(share.bit_length())}
    return sorted({size for size in powers | {asked.micro_batch, share} if share % size == 0 and size <= 256})


def _checkpointing(asked: Knobs, fixed: Sequence[str], wide: bool) -> list[str]:
    if "checkpointing" in fixed:
        return [asked.checkpointing]
    known = ["none", "selective", "full"] if asked.layout == "native" else ["none", "full"]
    if wide and asked.layout == "native":
        known = ["none", "selective", "every_2", "full"]
    return known if asked.checkpointing in known else [*known, asked.checkpointing]


def _meshes(
    asked: Knobs, cluster: Cluster, fixed: Sequence[str], length: int | None, hardware: bool
) -> list[tuple[int, int, int]]:
    """``(dp_replicate, dp_shard, cp)``: sharding over everything, over nodes, over one node, over less."""
    world = cluster.world_size
    shared = [asked.cp]
    if "cp" not in fixed and hardware and length is not None and length >= LONG_SEQUENCE:
        shared = [size for size in (1, 2, 4, 8) if world % size == 0 and length % (2 * size) == 0]
    meshes = {(asked.dp_replicate, asked.dp_shard, asked.cp)}
    for cp in shared:
        ranks = world // cp
        copies = {1}
        if cluster.nodes > 1:
            copies |= {n for n in _powers(cluster.nodes) if cluster.nodes % n == 0} | {cluster.nodes}
        elif ranks >= 4:
            copies |= {2}
        copies = copies if "mesh" not in fixed else {asked.dp_replicate}
        meshes |= {(copy, ranks // copy, cp) for copy in copies if ranks % copy == 0}
    return sorted(meshes)


def _reshards(asked: Knobs, cluster: Cluster, fixed: Sequence[str], wide: bool) -> list[bool | int]:
    if "reshard_after_forward" in fixed:
        return [asked.reshard_after_forward]
    choices: list[bool | int] = [True, False]
    if asked.layout == "native":
        if cluster.nodes > 1:
            choices.append(cluster.gpus_per_node)
        elif wide and cluster.gpus_per_node >= 4:
            choices += [2, 4]
    elif not isinstance(asked.reshard_after_forward, bool):
        choices.append(asked.reshard_after_forward)
    return choices


def _wraps(
    asked: Knobs, anatomy: Anatomy, fixed: Sequence[str], wide: bool
) -> list[tuple[str, tuple[str, ...]]]:
    """The asked wrap choice; widely also each detected class alone."""
    base = (asked.wrap_policy, asked.wrap_classes)
    if "wrap" in fixed or not wide or asked.wrap_policy != "transformer":
        return [base]
    detected = asked.wrap_classes or anatomy.wrap.classes
    alone = [("transformer", (name,)) for name in detected] if len(detected) > 1 else []
    return [base, *alone, ("none", ())]


def _implementations(asked: Knobs, fixed: Sequence[str], wide: bool) -> list[Implementation]:
    asked_one = asked.optimizer_implementation
    if "optimizer_implementation" in fixed or not wide:
        return [asked_one]
    other: Implementation = "foreach" if asked_one in ("auto", "fused") else "fused"
    return [asked_one, other]


def _gradients(asked: Knobs, fixed: Sequence[str], wide: bool) -> list[Accumulating]:
    if "gradients" in fixed or not wide:
        return [asked.gradients]
    return ["sharded", "unsharded"]


def _flag(asked: T, choices: tuple[T, ...], closed: bool) -> list[T]:
    return [asked] if closed else list(dict.fromkeys([asked, *choices]))


def _powers(limit: int) -> list[int]:
    return [1 << bits for bits in range(limit.bit_length()) if 1 << bits <= limit]
