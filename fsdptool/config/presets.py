"""Starting points for people who have no plan yet: ``fsdptool emit-config --preset NAME``."""

from __future__ import annotations

from dataclasses import dataclass

from fsdptool import spelling
from fsdptool.errors import ConfigError
from fsdptool.records.settings import FsdpSettings, Mesh


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings with a name and the situation they are for."""

    name: str
    purpose: str
    settings: FsdpSettings


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("single-node", "one machine with 8 GPUs, full sharding, bf16", FsdpSettings(num_processes=8)),
        Preset(
            "single-node-zero2",
            "the model fits unsharded during a step: parameters stay after forward",
            FsdpSettings(num_processes=8, reshard_after_forward=False),
        ),
        Preset(
            "single-node-checkpointing",
            "activations dominate: recompute every block in backward",
            FsdpSettings(num_processes=8, activation_checkpointing=True),
        ),
        Preset(
            "single-node-offload",
            "parameters and optimizer states live in host memory",
            FsdpSettings(num_processes=8, activation_checkpointing=True, cpu_offload=True),
        ),
        Preset(
            "two-nodes-hybrid",
            "2 machines with 8 GPUs: shard within, replicate across (HSDP)",
            FsdpSettings(num_processes=16, num_machines=2, mesh=Mesh(2, 8), rdzv_backend="c10d"),
        ),
        Preset(
            "long-context",
            "8 GPUs share every sequence, 4 by 2 (context parallel)",
            FsdpSettings(num_processes=8, activation_checkpointing=True, mesh=Mesh(1, 4, cp=2)),
        ),
        Preset(
            "cpu",
            "two processes over gloo, for trying things out with fsdptool train",
            FsdpSettings(num_processes=2, use_cpu=True, mixed_precision="no"),
        ),
    )
}


def find_preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
        ConfigError: There is none; the help names the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = spelling.nearest(name, PRESETS, cutoff=0.5)
    advice = f"did you mean {near}?" if near else f"choose one of: {', '.join(PRESETS)}"
    raise ConfigError(f"there is no preset {name!r}", help=advice)
