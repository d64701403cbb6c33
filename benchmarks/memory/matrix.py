"""The matrix: families, methods, precisions, checkpointing, resharding, ranks, accumulation, optimizers.

Every family is measured with a selection of settings, rotated so that each pair of values occurs somewhere.
Further rows change one setting at a time on a small llama. Every fifth row was held out while the model was
tuned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from settings import Setting

Models = dict[str, tuple[str, str, dict[str, Any], dict[str, int]]]
"""Row name to (kind in the tables, reference, overrides, micro-batch)."""

FAMILIES: Models
UNSEEN: Models
FAMILIES, UNSEEN = yaml.safe_load(
    Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")
).values()

_METHODS = ("full", "full", "lora", "full", "distillation")
_PRECISIONS = ("fp32", "bf16", "bf16r")
_CHECKPOINTING = ("none", "full", "selective")
_RESHARD: tuple[bool | int, ...] = (True, False, 2)
_RANKS = (8, 2, 64, 4)
_OPTIMIZERS = (("adamw", "fused"), ("adamw", "foreach"), ("adamw", "for_loop"), ("sgd", "foreach"))
_PER_FAMILY = 4


def rows() -> Iterator[Setting]:
    """Yield every setting over ``fake``, then over ``gloo``, then quantised bases and context parallelism."""
    fake = list(_fake())
    for index, row in enumerate(fake):
        yield replace(row, kept_aside=index % 5 == 3)
    for index, row in enumerate(_gloo()):
        yield replace(row, kept_aside=index % 5 == 3)
    for index, row in enumerate(_quantised()):
        yield replace(row, kept_aside=index % 5 == 3)
    for index, row in enumerate(_context()):
        yield replace(row, kept_aside=index % 5 == 3)


def _base(name: str) -> Setting:
    _, reference, overrides, batch = FAMILIES[name]
    return Setting(name, name, reference, overrides, batch=batch)


def _fake() -> Iterator[Setting]:
    index = 0
    for position, name in enumerate(FAMILIES):
        base = _base(name)
        for turn in range(_PER_FAMILY):
            ranks = _RANKS[(position + turn) % 4]
            reshard = _RESHARD[(position + 2 * turn) % 3]
            optimizer = _OPTIMIZERS[(index + position) % 4]
            row = replace(
                base,
                ranks=ranks,
                method=_METHODS[(position + turn) % 5],
                precision=_PRECISIONS[(position + turn) % 3],
                checkpointing=_CHECKPOINTING[(position // 2 + turn) % 3],
                reshard=_divisor(reshard, ranks),
                accumulation=1 + (index % 3 == 2),
                optimizer=optimizer[0],
                implementation=optimizer[1],
            )
            yield replace(row, name=_name(row))
            index += 1
    yield from _one_by_one()


def _one_by_one() -> Iterator[Setting]:
    base = replace(_base("llama"), ranks=8)
    for change in (
        {},
        {"precision": "fp32"},
        {"checkpointing": "full"},
        {"checkpointing": "every_n"},
        {"checkpointing": "selective"},
        {"reshard": False},
        {"reshard": 4},
        {"ranks": 1},
        {"ranks": 512},
        {"replicate": 2},
        {"replicate": 2, "accumulation": 2},
        {"accumulation": 3, "held": "unsharded"},
        {"prefetch": 2},
        {"layout": "accelerate"},
        {"layout": "accelerate", "checkpointing": "full", "accumulation": 2},
        {"method": "lora-replicated"},
        {"optimizer": "adafactor", "implementation": "auto"},
    ):
        row = replace(base, **change)
        yield replace(row, name="single " + _name(row))


def _gloo() -> Iterator[Setting]:
    for position, name in enumerate(FAMILIES):
        for turn in range(2):
            ranks = (2, 4)[(position + turn) % 2]
            row = replace(
                _base(name),
                backend="gloo",
                ranks=ranks,
                method=_METHODS[(position + 2 * turn) % 5],
                precision=_PRECISIONS[(position + turn) % 3],
                checkpointing=_CHECKPOINTING[(position + turn) % 3],
                reshard=_divisor(_RESHARD[(position + turn) % 3], ranks),
                accumulation=1 + (position + turn) % 2,
            )
            yield replace(row, name=_name(row))


def _quantised() -> Iterator[Setting]:
    for name, base, change in (
        ("llama", "nf4", {}),
        ("llama", "int8", {"ranks": 2, "checkpointing": "full", "reshard": False}),
        ("llama", "float8", {"ranks": 64, "accumulation": 2}),
        ("qwen3", "nf4", {"ranks": 4, "checkpointing": "selective", "reshard": 2}),
        ("qwen3", "int8", {"precision": "fp32"}),
        ("qwen3-moe", "nf4", {"ranks": 4}),
        ("flux", "nf4", {"checkpointing": "full"}),
        ("flux", "int8", {"ranks": 2, "accumulation": 2, "held": "unsharded"}),
        ("llama", "nf4", {"backend": "gloo", "ranks": 2, "checkpointing": "full"}),
        ("llama", "int8", {"backend": "gloo", "ranks": 4}),
        ("flux", "nf4", {"backend": "gloo", "ranks": 4, "accumulation": 2}),
    ):
        row = replace(_base(name), method=f"lora-{base}", **change)
        yield replace(row, name="quantised " + _name(row))


def _context() -> Iterator[Setting]:
    """Yield context parallelism: two and four ranks, grouped heads, experts, windows, every method."""
    for name, change in (
        ("llama", {"context": 2}),
        ("llama", {"context": 4, "checkpointing": "full", "precision": "fp32"}),
        ("llama", {"context": 8, "checkpointing": "selective", "accumulation": 2}),
        ("llama", {"context": 2, "batch": {"sequence_length": 1024, "micro_batch": 2}}),
        ("qwen3", {"context": 2, "method": "lora", "checkpointing": "full"}),
        ("qwen3", {"context": 4, "method": "distillation", "reshard": False}),
        ("qwen3-moe", {"context": 2, "ranks": 4}),
        ("qwen3", {"context": 2, "batch": {"sequence_length": 2048, "micro_batch": 1}}),
        ("llama", {"backend": "gloo", "ranks": 2, "context": 2}),
        ("llama", {"backend": "gloo", "ranks": 4, "context": 2, "checkpointing": "full"}),
        ("qwen3", {"backend": "gloo", "ranks": 2, "context": 2, "precision": "fp32"}),
        ("qwen3-moe", {"backend": "gloo", "ranks": 2, "context": 2, "method": "lora"}),
        ("llama", {"context": 2, "packed": False}),
        ("qwen3", {"context": 4, "packed": False, "checkpointing": "full", "precision": "fp32"}),
        ("llama", {"backend": "gloo", "ranks": 2, "context": 2, "packed": False}),
        ("llama", {"context": 4, "packed": False, "exchange": "alltoall"}),
        ("qwen3", {"context": 2, "packed": False, "exchange": "alltoall", "checkpointing": "full"}),
        ("llama", {"backend": "gloo", "ranks": 2, "context": 2, "packed": False, "exchange": "alltoall"}),
        ("qwen3", {"backend": "gloo", "ranks": 4, "context": 4, "packed": False, "exchange": "alltoall"}),
    ):
        row = replace(_base(name), **change)
        yield replace(row, name=f"context {_name(row)} s{row.batch['sequence_length']}")


def _divisor(reshard: bool | int, ranks: int) -> bool | int:
    """Return a group size that is smaller than the number of ranks and divides it."""
    return True if not isinstance(reshard, bool) and ranks <= reshard else reshard


def _name(row: Setting) -> str:
    parts = [row.family, row.method, row.precision, f"ac-{row.checkpointing}", f"reshard-{row.reshard}"]
    parts += [f"n{row.ranks}", f"acc{row.accumulation}", f"{row.optimizer}-{row.implementation}"]
    if row.replicate > 1:
        parts.append(f"hsdp{row.replicate}")
    if row.context > 1:
        parts.append(f"cp{row.context}" + (f" {row.exchange}" if row.exchange != "allgather" else ""))
    if not row.packed:
        parts.append("unpacked")
    if row.held != "sharded":
        parts.append(row.held)
    if row.prefetch > 1:
        parts.append(f"prefetch{row.prefetch}")
    if row.layout != "native":
        parts.append(row.layout)
    return " ".join([row.backend, *parts])
