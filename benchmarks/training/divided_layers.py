"""Compare tensor and expert parallelism with a plain loop in one process, and their memory with the plan.

Each row trains a small model for twenty steps on two or four ranks over one mesh: data parallelism beside
tensor parallelism, context parallelism beside both, or experts shared out over the ranks of any of them. It
holds losses and weights against a plain loop that shares no code with the engine. It also holds the measured
peak of a wider copy of the model (sixteen times the widths) against the planned one; experts that are shared
out get equally many tokens there, as plans suppose. Rows that are not asked for stay in the result as they
are.

    python benchmarks/training/divided_layers.py
    python benchmarks/training/divided_layers.py --names causal,gpt2 --meshes "tp 2;dp 2, tp 2"
    python benchmarks/training/divided_layers.py --sequence   # sequence parallelism
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))

import context_cases
import reference
import torch
from cases import CASES, Case, inputs_for, prepare_case
from paired import head
from pool import Pool
from ranks import train

from fsdptool.errors import ConfigError
from fsdptool.memory import footprint, trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Sharding

STEPS = 20
BOUND = 1e-5
NAMES = ("causal", "qwen3 tied", "gpt2", "seq2seq", "qwen3 moe", "mixtral", "deepseek", "flow")
METHODS = ("full", "lora")
MESHES = (
    ("tp 2", 2, ParallelDims(dp_shard=1, tp=2), 1),
    ("tp 4", 4, ParallelDims(dp_shard=1, tp=4), 1),
    ("dp 2, tp 2", 4, ParallelDims(dp_shard=2, tp=2), 1),
    ("cp 2, tp 2", 4, ParallelDims(dp_shard=1, cp=2, tp=2), 1),
    ("dp 2, ep 2", 2, ParallelDims(dp_shard=2), 2),
    ("dp 4, ep 2", 4, ParallelDims(dp_shard=4), 2),
    ("dp 4, ep 4", 4, ParallelDims(dp_shard=4), 4),
    ("cp 2, ep 2", 2, ParallelDims(dp_shard=1, cp=2), 2),
    ("dp 2, cp 2, ep 4", 4, ParallelDims(dp_shard=2, cp=2), 4),
    ("tp 2, ep 2", 2, ParallelDims(dp_shard=1, tp=2), 2),
    ("tp 4, ep 2", 4, ParallelDims(dp_shard=1, tp=4), 2),
    ("dp 2, tp 2, ep 2", 4, ParallelDims(dp_shard=2, tp=2), 2),
    ("dp 2, tp 2, ep 4", 4, ParallelDims(dp_shard=2, tp=2), 4),
    ("cp 2, tp 2, ep 2", 4, ParallelDims(dp_shard=1, cp=2, tp=2), 2),
)
SEQUENCE_NAMES = ("causal", "qwen3 tied", "gpt2", "qwen3 moe")
SEQUENCE_MESHES = ("dp 2, tp 2",)
_WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "n_embd", "d_model", "d_kv",
    "d_ff", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "attention_head_dim", "caption_projection_dim",
)  # fmt: skip
_WIDER = 16


def wider(case: Case) -> Case:
    """Return a case whose tensors are large beside the step's own scalars."""
    config = {key: value * _WIDER if key in _WIDTHS else value for key, value in case.config.items()}
    return dataclasses.replace(case, config=config)


def rows(names: list[str], meshes: list[str], *, sequence: bool) -> Iterator[dict[str, Any]]:
    """Yield the results of every case, method and mesh; a mesh that is refused says why."""
    pool = Pool()
    for name in names:
        for method in METHODS:
            for mesh in (item for item in MESHES if item[0] in meshes):
                sys.stderr.write(f"{name}, {method}, {mesh[0]}\n")
                sharding = Sharding(expert_parallel=mesh[3], sequence_parallel=sequence)
                row = _row(pool, name, method, mesh, sharding)
                yield {"case": name, "method": method, "mesh": mesh[0], **row}
    pool.close()


def _row(
    pool: Pool, name: str, method: str, mesh: tuple[str, int, ParallelDims, int], sharding: Sharding
) -> dict[str, Any]:
    _, world, dims, _ = mesh
    changes = {"sharding": sharding} if sharding != Sharding() else {}
    with tempfile.TemporaryDirectory() as folder:
        recipe, path = prepare_case(CASES[name], Path(folder), method, **changes)
        try:
            inputs_for(CASES[name], path, recipe, mesh=dims, num_processes=world)
            results = pool.run(train, world, name, path, recipe, dims, STEPS, timeout=900.0)
        except ConfigError as error:
            return {"refused": error.message}
        except AssertionError as error:
            refusal = next((line for line in str(error).splitlines() if "ConfigError: " in line), None)
            if refusal is None:
                raise
            return {"refused": refusal.partition("ConfigError: ")[2]}
        expected = reference.run(name, recipe, results[0]["before"], {}, None, steps=STEPS)
    losses, weights, _ = reference.compare(results[0], expected)
    row = {
        "loss_error": losses,
        "weights_error": weights,
        "within": max(losses, weights) <= BOUND and len({result["hash"] for result in results}) == 1,
    }
    planned, measured = _memory(pool, name, method, mesh, changes)
    return {
        **row,
        "planned_peak_bytes": planned,
        "measured_peak_bytes": measured,
        "memory_error": planned / measured - 1,
    }


def _memory(
    pool: Pool, name: str, method: str, mesh: tuple[str, int, ParallelDims, int], changes: dict[str, Any]
) -> tuple[int, int]:
    """Return the planned and the measured peak of the wider case, bytes per rank."""
    _, world, dims, _ = mesh
    wide, count = wider(CASES[name]), 4
    with tempfile.TemporaryDirectory() as folder:
        recipe, path = prepare_case(wide, Path(folder), method, **changes)
        accumulation = count // dims.resolve(world).data_ranks
        recipe = dataclasses.replace(
            recipe, batch=dataclasses.replace(recipe.batch, accumulation=accumulation, height=64, width=64)
        )
        inputs = inputs_for(wide, path, recipe, mesh=dims, num_processes=world)
        traced = trace(inputs.spec, resolve_run(recipe, inputs.settings), use_cache=False)
        mesh_sizes = dims.resolve(world).with_experts(recipe.sharding.expert_parallel)
        planned = footprint(traced, inputs.units, mesh_sizes, recipe, profile="cpu-gloo").allocated_peak_bytes
        measured: int = pool.run(
            context_cases.measured, world, path, recipe, dims, name, mesh[3] > 1, timeout=900.0
        )[0]
    assert planned is not None, traced.unknowns
    return planned, measured


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    """Return where a row stands in the result."""
    meshes = [mesh[0] for mesh in MESHES]
    return NAMES.index(row["case"]), METHODS.index(row["method"]), meshes.index(row["mesh"])


def main() -> int:
    """Run the rows and write the result; return 1 if a row exceeds its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names")
    parser.add_argument("--meshes")
    parser.add_argument(
        "--sequence", action="store_true", help="divide hidden states along the sequence, too"
    )
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    what = "sequences" if chosen.sequence else "layers"
    output: Path = chosen.output or Path(f"benchmarks/results/training_divided_{what}.json")
    names = chosen.names.split(",") if chosen.names else list(SEQUENCE_NAMES if chosen.sequence else NAMES)
    usual = SEQUENCE_MESHES if chosen.sequence else tuple(mesh[0] for mesh in MESHES)
    meshes = chosen.meshes.split(";") if chosen.meshes else list(usual)
    # The ranks compute with one thread each, and so does the loop that they are held against.
    torch.set_num_threads(1)
    known = json.loads(output.read_text())["rows"] if output.exists() else []
    placed = {_place(row): row for row in known}
    for row in rows(names, meshes, sequence=chosen.sequence):
        placed[_place(row)] = row
        results = [placed[key] for key in sorted(placed)]
        trained = [item for item in results if "within" in item]
        errors = [abs(item["memory_error"]) for item in trained if "memory_error" in item]
        document = {
            **head(
                "relative errors against a plain loop, and planned peaks against measured ones", steps=STEPS
            ),
            "bound": BOUND,
            "rows_trained": len(trained),
            "rows_outside": sum(not item["within"] for item in trained),
            "memory_settings": len(errors),
            "memory_error_median": statistics.median(errors) if errors else None,
            "memory_error_worst": max(errors, default=None),
            "rows": results,
        }
        # After every row: a sweep that is stopped keeps what it has.
        output.write_text(json.dumps(document, indent=2) + "\n")
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    return 1 if document["rows_outside"] else 0


if __name__ == "__main__":
    sys.exit(main())
