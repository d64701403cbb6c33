"""Compare the planned with the measured step time of the CPU trainer, after a probe of the same CPU.

    python benchmarks/planning/cpu_time.py [--case NAME ...] [-o benchmarks/results/planning_cpu_time.json]

The process times the kernels that ``calibrate --probe --cpu`` times. Then it plans each case with them, as
``plan --machine`` does, and takes the trainer's own steps on random weights and synthetic samples, on one
thread. Seconds are processor time. Cores that others use are not always as fast: before and after every
kernel and every step, the same small product and sum are timed, and a time counts as what it would have been
at the median speed of these (``raw_ratio``: without that). Dropout is off: a CPU draws random numbers as
slowly as it multiplies, a GPU does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results_file import write_results

if TYPE_CHECKING:
    from fsdptool.distributed.session import Session
    from fsdptool.records.cluster import KernelTime
    from fsdptool.records.plan import Candidate
    from fsdptool.records.recipe import Recipe
    from fsdptool.records.sharding import FsdpSettings

STEPS, WARM = 9, 2
_QWEN = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 5, "vocab_size": 6000}
_QWEN |= {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64}
_UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "Llama 22 M": {
        "reference": "llama3:tiny",
        "overrides": {
            **{"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "vocab_size": 4096},
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
        },
        "batch": {"sequence_length": 256, "micro_batch": 2},
    },
    "Llama 3 M, odd sizes": {
        "reference": "llama3:tiny",
        "overrides": {
            **{"hidden_size": 216, "intermediate_size": 580, "num_hidden_layers": 4, "vocab_size": 1999},
            **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 36},
        },
        "batch": {"sequence_length": 173, "micro_batch": 3},
    },
    "Qwen3 25 M, LoRA": {
        "reference": "qwen3:tiny",
        "overrides": _QWEN,
        "batch": {"sequence_length": 192, "micro_batch": 2},
        "lora": 16,
    },
    "Qwen3 25 M, checkpointing": {
        "reference": "qwen3:tiny",
        "overrides": _QWEN,
        "batch": {"sequence_length": 128, "micro_batch": 2, "accumulation": 2},
        "settings": {"activation_checkpointing": True},
    },
    "BERT 9 M": {
        "reference": "bert:base-uncased",
        "overrides": {
            **{"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 3000},
            **{"num_attention_heads": 6, **_UNDROPPED},
        },
        "batch": {"sequence_length": 128, "micro_batch": 4},
    },
    "GPT-2 10 M": {
        "reference": "gpt2:small",
        "overrides": {
            **{"n_embd": 360, "n_layer": 5, "n_head": 6, "vocab_size": 5000},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        "batch": {"sequence_length": 200, "micro_batch": 3},
    },
    "ViT 8 M": {
        "reference": "vit:base-patch16-224",
        "overrides": {
            **{"hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": 6},
            **{"num_attention_heads": 5, **_UNDROPPED},
        },
        "batch": {"micro_batch": 2},
    },
    "ViT 20 M, LoRA": {
        "reference": "vit:base-patch16-224",
        "overrides": {
            **{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6},
            **{"num_attention_heads": 8, **_UNDROPPED},
        },
        "batch": {"micro_batch": 2},
        "lora": 8,
    },
    "T5 12 M": {
        "reference": "t5:small",
        "overrides": {
            **{"d_model": 320, "d_ff": 1280, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 5},
            **{"vocab_size": 4000, "dropout_rate": 0.0},
        },
        "batch": {"sequence_length": 160, "micro_batch": 3},
    },
    "Gemma 19 M": {
        "reference": "gemma3:270m",
        "overrides": {
            **{"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8000},
            **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
        },
        "batch": {"sequence_length": 224, "micro_batch": 2},
    },
}


class Speed:
    """Times the same product and sum again and again."""

    def __init__(self) -> None:
        import torch

        self._factors = torch.randn(384, 384), torch.randn(384, 384)
        self._terms = torch.randn(512, 512), torch.randn(512, 512)
        self.seen: list[float] = []
        self._last = self._now()

    def _now(self) -> float:
        began = time.process_time()
        for _ in range(10):
            _ = self._factors[0] @ self._factors[1]
            _ = self._terms[0] * self._terms[1] + self._terms[0]
        return time.process_time() - began

    def around(self) -> float:
        """Return the mean of the last two timings, one of which is made now."""
        before, self._last = self._last, self._now()
        self.seen.append((before + self._last) / 2)
        return self.seen[-1]


Timed = tuple[float, float]
"""Seconds, and those of the same small product and sum around them."""


def probe(speed: Speed) -> tuple[float, list[tuple[KernelTime, float]]]:
    """Return the launch of an operator, and the kernels with the speed around each."""
    import torch

    from fsdptool.training.kernel_times import measure_kernels
    from fsdptool.training.measuring import kernel_latency

    cpu = torch.device("cpu")
    latency = kernel_latency(cpu)
    speed.around()
    return latency, [(item, speed.around()) for item in measure_kernels(cpu)]


def records_of(name: str) -> tuple[Recipe, FsdpSettings]:
    """Return the recipe and the settings of a case."""
    from fsdptool.records.recipe import Batch, Data, Lora, Method, ModelChoice, Recipe
    from fsdptool.records.sharding import FsdpSettings

    case = CASES[name]
    recipe = Recipe(
        model=ModelChoice(case["reference"], overrides=case["overrides"], weights="random"),
        data=Data(source="synthetic"),
        batch=Batch(**case["batch"]),
        method=Method(name="lora", lora=Lora(rank=case["lora"])) if "lora" in case else Method(),
        steps=STEPS,
    )
    return recipe, FsdpSettings(use_cpu=True, mixed_precision="no", **case.get("settings", {}))


def train(name: str, speed: Speed, session: Session) -> list[Timed]:
    """Return the times of a case's steps, and the speed around each."""
    from fsdptool.inspection import inspect
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.modeling.units import plan_units
    from fsdptool.runs.folder import RunInputs
    from fsdptool.source import resolve_choice
    from fsdptool.training.data.build import build_batches
    from fsdptool.training.trainer import assemble

    recipe, settings = records_of(name)
    spec = resolve_choice(recipe.model)
    units = plan_units(inspect(spec), resolve_run(recipe, settings, ranks=1))
    with tempfile.TemporaryDirectory() as folder:
        parts = assemble(RunInputs(Path(folder), recipe, settings, spec, units), session)
        batches = build_batches(recipe, spec, rank=0, world=1)
        speed.around()
        steps = []
        for _ in range(STEPS):
            batch = next(batches)
            began = time.process_time()
            parts.stepper.run(batch, rate=1e-4)
            steps.append((time.process_time() - began, speed.around()))
    return steps[WARM:]


def planned(name: str, latency: float, kernels: Sequence[KernelTime]) -> Candidate:
    """Return the plan of a case with a machine table of these kernels."""
    from fsdptool.inspection import inspect
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.planning.calibrate import calibrate
    from fsdptool.planning.candidate.estimator import predict
    from fsdptool.records.command_documents import Probe
    from fsdptool.records.measurements import Measurements, RankMeasurements
    from fsdptool.source import resolve_choice

    recipe, settings = records_of(name)
    ranks = RankMeasurements(
        "this CPU", None, None, 1, "gloo", kernel_latency=latency, kernels=tuple(kernels)
    )
    sharded = Probe("cpu", "gloo", 1, True, True, 0.0, True, None)
    machine = calibrate(None, [], measured=Measurements("cpu", {}, sharded, ranks, None, 0.0))
    spec = resolve_choice(recipe.model)
    run = resolve_run(recipe, settings, ranks=1)
    return predict(spec, inspect(spec), run, profile="cpu-gloo", machine=machine)


def compare(
    name: str, latency: float, timed: Sequence[tuple[KernelTime, float]], steps: Sequence[Timed], usual: float
) -> dict[str, Any]:
    """Return a case's row; ``usual`` is the speed that times count at."""
    candidate = planned(name, latency, [replace(k, seconds=k.seconds * usual / at) for k, at in timed])
    plain = planned(name, latency, [kernel for kernel, _ in timed])
    taken = statistics.median(seconds * usual / around for seconds, around in steps)
    raw = statistics.median(seconds for seconds, _ in steps)
    assert candidate.step_seconds is not None
    assert plain.step_seconds is not None
    return {
        "case": name,
        "planned_seconds": round(candidate.step_seconds, 4),
        "measured_seconds": round(taken, 4),
        "ratio": round(candidate.step_seconds / taken, 3),
        "raw_ratio": round(plain.step_seconds / raw, 3),
        "parts": {part: round(value, 4) for part, value in candidate.seconds.items() if value},
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median error and the 10th and 90th percentile of measured over planned throughput."""
    ratios = sorted(item["ratio"] for item in results)
    cuts = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
    errors = [abs(item["ratio"] - 1) for item in results]
    return {
        "median_error": round(statistics.median(errors), 3),
        "largest_error": round(max(errors), 3),
        "median_error_raw": round(statistics.median(abs(item["raw_ratio"] - 1) for item in results), 3),
        "p10": round(cuts[0], 3),
        "p90": round(cuts[-1], 3),
    }


def main() -> None:
    """Run the cases that are named, or all, print each and save them among the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--case", choices=list(CASES), action="append")
    arguments = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**alone, "MASTER_PORT": "29687", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    import torch

    torch.set_num_threads(1)
    from fsdptool.distributed.session import close_session, open_session

    speed = Speed()
    latency, timed = probe(speed)
    print(f"timed {len(timed)} kernels", flush=True)
    session = open_session(records_of(next(iter(CASES)))[1])
    results: list[dict[str, Any]] = []
    for name in arguments.case or CASES:
        steps = train(name, speed, session)
        results.append(compare(name, latency, timed, steps, statistics.median(speed.seen)))
        print(results[-1], flush=True)
        if arguments.output:
            usual = statistics.median(speed.seen)
            spread = [round(min(speed.seen) / usual, 2), round(max(speed.seen) / usual, 2)]
            write_results(arguments.output, "cpu_time", results, summary=summary(results), speed_range=spread)
    close_session()
    print(summary(results))


if __name__ == "__main__":
    main()
