"""Files that are translated to other programs, beside what those programs' own loaders make of them.

    python benchmarks/config/written_files.py FOLDER ... [--made N] [-o FILE]

Every file below the folders that describes a run is translated to each program, and so are files that are
made of random keys and values. What is written is given to the program's own loader; the values are compared
with what we read of the same file. TRL comes with the tests' requirements, the other programs with
``pip install --no-deps axolotl==0.19.0 addict llamafactory==0.9.5 fire termcolor torchtitan==0.2.2 tyro
docstring_parser typeguard triton==3.5.1 nemo-automodel==0.5.0 torchao torchdata verl==0.9.1 hydra-core
omegaconf==2.3.0 antlr4-python3-runtime==4.9.3``. The results name no file: they count, by program.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from fsdptool.config.described import describe_path
from fsdptool.config.translation import Translation, translate
from fsdptool.errors import ConfigError
from fsdptool.records.codec import to_json

program_loaders: Any = import_module("program_loaders")
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "bf16": "bf16",
    "fp32": "fp32",
    "auto": "bf16",
}
_ENDINGS = (".yaml", ".yml", ".json", ".toml", ".args", ".env")


def torchtitan(path: Path) -> dict[str, Any]:
    """Return facts from torchtitan's ``ConfigManager``."""
    manager = import_module("torchtitan.config.manager")
    loaded = manager.ConfigManager().parse_args(["--job.config_file", str(path)])
    training, mesh = loaded.training, loaded.parallelism
    return {
        "model": f"{loaded.model.name} {loaded.model.flavor}",
        "sequence_length": training.seq_len,
        "micro_batch": training.local_batch_size,
        "steps": training.steps,
        "stored_dtype": _DTYPES[training.dtype],
        "compute_dtype": _DTYPES[training.mixed_precision_param],
        "optimizer": loaded.optimizer.name.lower(),
        "cpu_offload": training.enable_cpu_offload,
        # What we call compiled is the model; torchtitan can compile the loss alone.
        "compile": loaded.compile.enable and "model" in loaded.compile.components,
        "gradient_checkpointing": loaded.activation_checkpoint.mode,
        "learning": {
            "learning_rate": loaded.optimizer.lr,
            "weight_decay": loaded.optimizer.weight_decay,
            "warmup_steps": loaded.lr_scheduler.warmup_steps,
            "scheduler": loaded.lr_scheduler.decay_type,
        },
        "mesh": {
            "dp_replicate": mesh.data_parallel_replicate_degree,
            "dp_shard": mesh.data_parallel_shard_degree,
            "cp": mesh.context_parallel_degree,
            "tp": mesh.tensor_parallel_degree,
            "ep": mesh.expert_parallel_degree,
            "pp": mesh.pipeline_parallel_degree,
        },
    }


def automodel(path: Path) -> dict[str, Any]:
    """Return facts from AutoModel's loader."""
    facts: dict[str, Any] = program_loaders.automodel(yaml.safe_load(path.read_text(encoding="utf-8")))
    return facts


def verl(path: Path) -> dict[str, Any]:
    """Return facts from what Hydra composes of the file and verl's defaults; it refuses unknown keys."""
    hydra = import_module("hydra")
    found = find_spec("verl")
    assert found is not None and found.submodule_search_locations is not None
    place = Path(next(iter(found.submodule_search_locations))) / "trainer" / "config"
    with hydra.initialize_config_dir(str(path.parent), version_base=None):
        # verl itself needs Ray to be imported; only its folder of defaults is needed here.
        loaded = hydra.compose(path.stem, overrides=[f"hydra.searchpath=[file://{place}]"])
    rewarded = "actor_rollout_ref" in loaded
    actor = loaded.actor_rollout_ref.actor if rewarded else loaded
    model = loaded.actor_rollout_ref.model if rewarded else loaded.model
    engine = actor.fsdp_config if rewarded else loaded.engine
    data = loaded.data
    length = data.max_prompt_length + data.max_response_length if rewarded else data.max_length
    return {
        "model": model.path,
        "sequence_length": length,
        "micro_batch": actor.ppo_micro_batch_size_per_gpu if rewarded else data.micro_batch_size_per_gpu,
        "steps": loaded.trainer.total_training_steps,
        "epochs": loaded.trainer.total_epochs,
        "stored_dtype": _DTYPES[engine.model_dtype],
        "lora_rank": model.lora_rank or None,
        "cpu_offload": engine.offload_policy,
        "reshard": engine.reshard_after_forward,
        "recomputes": model.enable_gradient_checkpointing,
        "learning": {"learning_rate": actor.optim.lr, "weight_decay": actor.optim.weight_decay},
        "mesh": {
            "cp": actor.ulysses_sequence_parallel_size if rewarded else engine.ulysses_sequence_parallel_size
        },
    }


def trl(path: Path) -> dict[str, Any]:
    """Return facts from TRL's parser, which is given the file by ``--config``."""
    facts: dict[str, Any] = program_loaders.trl(yaml.safe_load(path.read_text(encoding="utf-8")), path)
    return facts


def llamafactory(path: Path) -> dict[str, Any]:
    """Return facts from LLaMA-Factory's argument classes."""
    facts: dict[str, Any] = program_loaders.llamafactory(yaml.safe_load(path.read_text(encoding="utf-8")))
    return facts


def axolotl(path: Path) -> dict[str, Any]:
    """Return facts from axolotl's schema, after its whole validation has accepted the file."""
    import axolotl_oracle

    stopped = axolotl_oracle.run_axolotl(path.read_text(encoding="utf-8"))
    if isinstance(stopped, str):
        raise ValueError(stopped)
    facts: dict[str, Any] = program_loaders.axolotl(yaml.safe_load(path.read_text(encoding="utf-8")))
    return facts


LOADERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "axolotl": axolotl,
    "llamafactory": llamafactory,
    "trl": trl,
    "torchtitan": torchtitan,
    "automodel": automodel,
    "verl": verl,
}


def differences(made: Translation, theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the facts that a program's loader and our reading of the same file differ in."""
    ours = to_json(made.run)
    ours["recomputes"] = ours["gradient_checkpointing"] != "none"
    found = []
    for name, value in theirs.items():
        if isinstance(value, dict):
            inner = ours[name]
            found += [
                (f"{name}.{key}", item, inner.get(key))
                for key, item in value.items()
                if item is not None and inner.get(key) is not None and inner[key] != item
            ]
        elif name in ours and value is not None and ours[name] is not None and value != ours[name]:
            found.append((name, value, ours[name]))
    return found


def main() -> None:
    """Translate, load, compare, print what differs and write the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--made", type=int, default=0, help="files that are made for each source program")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    place = Path(tempfile.mkdtemp())
    paths = [p for folder in options.folders for p in sorted(folder.rglob("*")) if p.suffix in _ENDINGS]
    for program in program_loaders.MADE:
        paths += program_loaders.made(program, options.made, place)
    counts: dict[str, Counter[str]] = {program: Counter() for program in LOADERS}
    for number, path in enumerate(paths):
        try:
            run = describe_path(path)
        except ConfigError:
            continue
        if run is None or run.model is None or "$" in run.model:
            continue
        for program, loader in LOADERS.items():
            count = counts[program]
            try:
                made = translate(run, program)
            except ConfigError:
                count["without_a_counterpart"] += 1
                continue
            target = place / f"written-{number}.{'toml' if program == 'torchtitan' else 'yaml'}"
            target.write_text(made.text, encoding="utf-8")
            count["written"] += 1
            try:
                found = differences(made, loader(target))
            except ModuleNotFoundError as error:
                count["not_loaded_here"] += 1
                print(f"{program} cannot be imported: {error}")
                continue
            except (Exception, SystemExit) as error:
                count["refused"] += 1
                print(f"{path.name} for {program}: refused: {' '.join(str(error).split())[:300]}")
                continue
            count["equal"] += not found
            for name, theirs, ours in found:
                count[f"differs: {name}"] += 1
                print(f"{path.name} for {program}: {name}: {theirs!r} by its loader, {ours!r} read")
    print(json.dumps(counts, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
