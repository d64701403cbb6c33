"""The search space: every configuration worth evaluating, in one fixed order.

What changes the numbers a run computes (precision, reduce dtype, layout, objective) is never
searched; what only changes memory and speed is. Combinations that another one beats by construction
are left out, each by a rule below that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from fsdptool.records.anatomy import Anatomy
from fsdptool.records.cluster import Cluster
from fsdptool.records.plan import SearchPoint
from fsdptool.records.recipe import GradientAccumulation, Implementation
from fsdptool.records.sharding import WrapPolicy

T = TypeVar("T")

LONG_SEQUENCE = 16384
"""Tokens from which sharing a sequence between ranks is worth evaluating."""


def enumerate_space(
    start: SearchPoint,
    cluster: Cluster,
    anatomy: Anatomy,
    *,
    fixed: Sequence[str],
    wide: bool,
    sequence_length: int | None,
    hardware: bool,
    kernels: Sequence[str],
    tensor: Sequence[int] = (),
) -> Iterator[SearchPoint]:
    """Yield every configuration to evaluate on one cluster, ``start`` first, each once.

    Args:
        start: Where the person stands on this cluster.
        cluster: The hardware.
        anatomy: The model, for wrap choices.
        fixed: Search dimensions that keep their value.
        wide: Include what seldom wins (other wrap choices, optimizer implementations, ...).
        sequence_length: Tokens per sample, or None.
        hardware: Whether the run is on GPUs.
        kernels: Those of the optimizer.
        tensor: Tensor-parallel sizes; empty: that of ``start``.
    """
    yield start
    seen = {start}
    axes = (
        _batches(start, fixed, max(tensor, default=start.tp)),
        _checkpointing(start, fixed, wide),
        _meshes(start, cluster, fixed, sequence_length, hardware, tensor or (start.tp,)),
        _reshards(start, cluster, fixed, wide),
        _wraps(start, anatomy, fixed, wide),
        _flag(start.cpu_offload, (False, True), "cpu_offload" in fixed or not hardware),
        _flag(
            start.prefetch,
            (1, 2, 3) if wide else (1, 2),
            "prefetch" in fixed or start.layout != "native",
        ),
        _implementations(start, fixed, wide, kernels),
        _gradients(start, fixed, wide),
    )
    for batch, checkpointing, mesh, reshard, wrap, offload, prefetch, implementation, gradients in product(
        *axes
    ):
        samples = start.global_batch
        replicate, shard, cp, tp = mesh
        if samples % (batch * replicate * shard):
            continue
        point = replace(
            start,
            micro_batch=batch,
            accumulation=samples // (batch * replicate * shard),
            checkpointing=checkpointing,
            dp_replicate=replicate,
            dp_shard=shard,
            cp=cp,
            tp=tp,
            reshard_after_forward=reshard,
            wrap_policy=wrap[0],
            wrap_classes=wrap[1],
            cpu_offload=offload,
            prefetch=prefetch,
            optimizer_implementation=implementation,
            gradients=gradients,
        )
        if point not in seen and _worth(point, start):
            seen.add(point)
            yield point


def _worth(point: SearchPoint, start: SearchPoint) -> bool:
    """Leave out what another configuration beats by construction."""
    ranks = point.dp_shard * point.cp
    if ranks * point.tp % point.ep:
        return False  # experts are shared out among the ranks of one copy of the model
    if point.ep > 1 and not isinstance(point.reshard_after_forward, bool):
        return False  # experts are sharded over fewer ranks than an integer assumes
    if point.gradients != start.gradients and point.accumulation == 1:
        return False  # nothing is accumulated: both are the same run
    if point.layout == "accelerate" and point.wrap_policy == "none" and point.checkpointing != "none":
        return False  # accelerate 1.15 crashes on it
    if ranks == 1 and (point.reshard_after_forward is not True or point.prefetch > 1):
        return False  # one rank gathers nothing
    if point.cpu_offload and (point.prefetch > 1 or point.reshard_after_forward is not True):
        return False  # offload is for lack of memory: keeping units gathered undoes it
    if point.reshard_after_forward is False and point.prefetch > 1 and point.accumulation == 1:
        return False  # backward gathers nothing, and forward's gathers are hidden by one unit ahead
    if not isinstance(point.reshard_after_forward, bool):
        return ranks % point.reshard_after_forward == 0 and 1 < point.reshard_after_forward < ranks
    return True


def tensor_sizes(start: SearchPoint, cluster: Cluster, fixed: Sequence[str]) -> list[int]:
    """Tensor-parallel sizes worth evaluating besides that of ``start``.

    Groups stay inside a node: every layer waits for its sums, and links between nodes are slower by an order
    of magnitude (Megatron-LM, arXiv:2104.04473, section 3.2). Only the native layout divides layers. At least
    two ranks remain to shard over, without which accelerate and ``fsdptool train`` refuse FSDP.
    """
    if "tp" in fixed or cluster.gpu is None or start.layout != "native":
        return []
    if "mesh" in fixed:
        return []  # the given sizes leave no ranks
    return [
        size
        for size in (1, 2, 4, 8)
        if cluster.gpus_per_node % size == 0 and size < cluster.world_size and size != start.tp
    ]


def expert_sizes(
    start: SearchPoint, cluster: Cluster, fixed: Sequence[str], experts: int | None
) -> list[int]:
    """Expert-parallel sizes worth evaluating besides that of ``start``, in the order to try them.

    First the ranks of a node: tokens travel over its links, and each rank gathers only its own experts. A
    smaller group sends hardly less and gathers more. Then groups of two, four and eight nodes, which gather
    still less and send most tokens between nodes.
    """
    if "ep" in fixed or experts is None or cluster.gpu is None or start.layout != "native":
        return []
    sizes = [cluster.gpus_per_node * nodes for nodes in (1, 2, 4, 8)]
    return [n for n in sizes if 1 < n <= experts and cluster.world_size % n == 0 and n != start.ep]


def _batches(start: SearchPoint, fixed: Sequence[str], tensor: int) -> list[int]:
    """Micro-batches that divide a rank's share of the global batch, which grows where ranks share samples."""
    if "micro_batch" in fixed:
        return [start.micro_batch]
    share = start.micro_batch * start.accumulation * max(tensor // start.tp, 1)
    powers = {1 << bits for bits in range(share.bit_length())}
    return sorted({size for size in powers | {start.micro_batch, share} if share % size == 0 and size <= 256})


def _checkpointing(start: SearchPoint, fixed: Sequence[str], wide: bool) -> list[str]:
    if "checkpointing" in fixed:
        return [start.checkpointing]
    known = ["none", "selective", "full"] if start.layout == "native" else ["none", "full"]
    if wide and start.layout == "native":
        known = ["none", "selective", "every_2", "full"]
    return known if start.checkpointing in known else [*known, start.checkpointing]


def _meshes(
    start: SearchPoint,
    cluster: Cluster,
    fixed: Sequence[str],
    length: int | None,
    hardware: bool,
    tensor: Sequence[int],
) -> list[tuple[int, int, int, int]]:
    """``(dp_replicate, dp_shard, cp, tp)``: sharding over all ranks, over nodes, one node, or less."""
    world = cluster.world_size
    shared = [start.cp]
    if "cp" not in fixed and hardware and length is not None and length >= LONG_SEQUENCE:
        shared = [size for size in (1, 2, 4, 8) if world % size == 0 and length % (2 * size) == 0]
    meshes = {(start.dp_replicate, start.dp_shard, start.cp, start.tp)} if start.tp in tensor else set()
    for cp, tp in product(shared, tensor):
        if world % (cp * tp):
            continue
        ranks = world // (cp * tp)
        copies = {1}
        if cluster.nodes > 1:
            copies |= {n for n in _powers(cluster.nodes) if cluster.nodes % n == 0} | {cluster.nodes}
        elif ranks >= 4:
            copies |= {2}
        copies = copies if "mesh" not in fixed else {start.dp_replicate}
        meshes |= {(copy, ranks // copy, cp, tp) for copy in copies if ranks % copy == 0}
    return sorted(meshes)


def _reshards(start: SearchPoint, cluster: Cluster, fixed: Sequence[str], wide: bool) -> list[bool | int]:
    if "reshard_after_forward" in fixed:
        return [start.reshard_after_forward]
    choices: list[bool | int] = [True, False]
    if start.layout == "native":
        if cluster.nodes > 1:
            choices.append(cluster.gpus_per_node)
        elif wide and cluster.gpus_per_node >= 4:
            choices += [2, 4]
    elif not isinstance(start.reshard_after_forward, bool):
        choices.append(start.reshard_after_forward)
    return choices


def _wraps(
    start: SearchPoint, anatomy: Anatomy, fixed: Sequence[str], wide: bool
) -> list[tuple[WrapPolicy, tuple[str, ...]]]:
    """The requested wrap choice; in a wide search also each detected class alone."""
    base: tuple[WrapPolicy, tuple[str, ...]] = (start.wrap_policy, start.wrap_classes)
    if "wrap" in fixed or not wide or start.wrap_policy != "transformer":
        return [base]
    detected = start.wrap_classes or anatomy.wrap.classes
    names = detected if len(detected) > 1 else ()
    alone: list[tuple[WrapPolicy, tuple[str, ...]]] = [("transformer", (name,)) for name in names]
    return [base, *alone, ("none", ())]


def _implementations(
    start: SearchPoint, fixed: Sequence[str], wide: bool, kernels: Sequence[str]
) -> list[Implementation]:
    given = start.optimizer_implementation
    if "optimizer_implementation" in fixed or not wide:
        return [given]
    other: Implementation = "foreach" if given in ("auto", "fused") else "fused"
    return [given, other] if other in kernels else [given]


def _gradients(start: SearchPoint, fixed: Sequence[str], wide: bool) -> list[GradientAccumulation]:
    if "gradients" in fixed or not wide:
        return [start.gradients]
    return ["sharded", "unsharded"]


def _flag(start: T, choices: tuple[T, ...], closed: bool) -> list[T]:
    return [start] if closed else list(dict.fromkeys([start, *choices]))


def _powers(limit: int) -> list[int]:
    return [1 << bits for bits in range(limit.bit_length()) if 1 << bits <= limit]
