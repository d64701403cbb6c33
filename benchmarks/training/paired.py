"""Shared by benchmarks of paired ratios: bounds, the header of a result, the files of a tiny run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"
ACCELERATE = """\
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: RANKS
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_reshard_after_forward: true
"""


def llama(width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """Return a Llama's configuration."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 16 * 16,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": 512,
    }


def write_run(folder: Path, config: dict[str, Any], *, ranks: int, steps: int, length: int) -> list[str]:
    """Write a model, a recipe and a YAML; return the arguments of ``fsdptool train`` without its output."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "accelerate.yaml").write_text(ACCELERATE.replace("RANKS", str(ranks)))
    (folder / "recipe.yaml").write_text(
        f"model: {{reference: {folder / 'model'}, weights: random}}\n"
        "data: {source: synthetic}\n"
        f"batch: {{micro_batch: 1, sequence_length: {length}}}\n"
        "checkpoints: {at_end: false}\n"
        f"steps: {steps}\n"
    )
    return ["train", str(folder / "recipe.yaml"), "--config", str(folder / "accelerate.yaml")]


def parser(description: str | None, result: str) -> argparse.ArgumentParser:
    """Return a parser with the option that every such benchmark has; ``result`` is a name in ``results``."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, default=RESULTS / f"{result}.json")
    return made


def write(document: dict[str, Any], output: Path, *shown: str) -> None:
    """Write a result, and print what it has under some keys."""
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: document[key] for key in shown}, indent=2))


def bounds(ratios: list[float], rounds: int = 4000) -> dict[str, float]:
    """Return the median of paired ratios with its bootstrap 95 % bounds."""
    draws = torch.randint(0, len(ratios), (rounds, len(ratios)), generator=torch.Generator().manual_seed(0))
    medians = torch.tensor(ratios).take(draws).median(dim=1).values.sort().values
    low, high = (float(medians[int(share * rounds)]) for share in (0.025, 0.975))
    return {"median": statistics.median(ratios), "low": low, "high": high}


def head(benchmark: str, **settings: Any) -> dict[str, Any]:
    """Return the header of a result: its name, the machine and the library versions."""
    from fsdptool.records.diagnostic import library_versions

    return {
        "benchmark": benchmark,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average": os.getloadavg(),
        "versions": {"python": platform.python_version(), **library_versions()},
        "settings": settings,
    }


def turns(pairs: int, rivals: tuple[str, str]) -> list[tuple[str, str]]:
    """Return who goes first in each pair: A B, B A, A B, ..."""
    return [rivals if index % 2 == 0 else (rivals[1], rivals[0]) for index in range(pairs)]
