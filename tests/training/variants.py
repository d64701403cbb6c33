"""Ways to train one case that all have to give the same run."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdptool.records.checkpointing import Checkpointing, read_policy
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Optimizer, Sharding

CLIPPED = Optimizer(
    learning_rate=2e-3, betas=(0.9, 0.99), epsilon=1e-6, weight_decay=0.01, clip_grad_norm=0.3
)
HYBRID = ParallelDims(dp_replicate=2, dp_shard=2)
CHECKPOINTED = {"activation_checkpointing": True}
MOMENTUM = Optimizer(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.0, clip_grad_norm=0.3)
VARIANTS: dict[str, tuple[int, ParallelDims | None, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, None, {}, {}),
    "three ranks": (3, None, {}, {}),
    "unsharded accumulation": (2, None, {"sharding": Sharding(accumulation="unsharded")}, {}),
    "hybrid": (4, HYBRID, {}, {}),
    "hybrid, unsharded accumulation": (4, HYBRID, {"sharding": Sharding(accumulation="unsharded")}, {}),
    "no reshard": (2, None, {}, {"reshard_after_forward": False}),
    "reshard to two": (4, None, {"sharding": Sharding(reshard_after_forward=2)}, {}),
    "prefetch two": (2, None, {"sharding": Sharding(prefetch=2)}, {}),
    "accelerate's layout": (2, None, {"sharding": Sharding(layout="accelerate")}, {}),
    "no wrapping": (2, None, {}, {"wrap_policy": "none"}),
    "offload": (2, None, {}, {"cpu_offload": True}),
    "checkpointing": (2, None, {}, CHECKPOINTED),
    "checkpointing, inputs offloaded": (
        2,
        None,
        {},
        {**CHECKPOINTED, "activation_checkpointing_offload": True},
    ),
    "checkpointing every second": (
        2,
        None,
        {"sharding": Sharding(checkpointing=Checkpointing(mode="every_n", every_n=2))},
        CHECKPOINTED,
    ),
    "selective checkpointing": (
        2,
        None,
        {"sharding": Sharding(checkpointing=Checkpointing(mode="selective"))},
        CHECKPOINTED,
    ),
    "selective checkpointing by name": (
        2,
        None,
        {"sharding": Sharding(checkpointing=Checkpointing("selective", save_operators=("aten.mm.default",)))},
        CHECKPOINTED,
    ),
    "every second matmul kept, then no checkpointing": (
        2,
        None,
        {"sharding": Sharding(checkpointing=read_policy("1*selective:every-2-matmuls+1*none"))},
        CHECKPOINTED,
    ),
    "foreach": (2, None, {"optimizer": dataclasses.replace(CLIPPED, implementation="foreach")}, {}),
    "adafactor": (2, None, {"optimizer": dataclasses.replace(CLIPPED, name="adafactor")}, {}),
    "adafactor, hybrid": (4, HYBRID, {"optimizer": dataclasses.replace(CLIPPED, name="adafactor")}, {}),
    "for loop": (2, None, {"optimizer": dataclasses.replace(CLIPPED, implementation="for_loop")}, {}),
    "ignored module": (2, None, {}, {"ignored_modules": r"model\.layers\.0\.mlp"}),
}
"""Ranks, mesh, and changes of the recipe and of the settings, by name."""
