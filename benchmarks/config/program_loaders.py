"""What we read of training files, beside what their programs' own loaders make of them.

    python benchmarks/config/program_loaders.py FOLDER ... [-o benchmarks/results/program_loaders.json]

Every file below the folders that is for a program whose loader can be imported is given to both, and so are
files that are made of random keys and values. TRL and transformers come with the tests' requirements;
axolotl needs ``pip install --no-deps axolotl==0.19.0 addict``, LLaMA-Factory
``pip install --no-deps llamafactory==0.9.5 omegaconf antlr4-python3-runtime fire termcolor``, torchtune
``pip install --no-deps torchtune==0.6.1 torchao==0.9.0 omegaconf antlr4-python3-runtime blobfile
sentencepiece tiktoken kagglehub``. torchtune's builders make the model of each file on the meta device: its
parameters and the layers that have adapters are compared, too (models with pictures need torchvision).
ms-swift needs an environment of its own: ``pip install ms-swift==4.6.0 torch==2.13.0``. NeMo AutoModel needs
what ``written_files.py`` names; its loader imports what a file names, and refuses files of other versions.
The results name no file: they count facts that differ, by program and key.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdptool.config.described import describe_path
from fsdptool.errors import ConfigError
from fsdptool.families.registry import load_registry
from fsdptool.records.codec import to_json

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "config"))


def axolotl(data: dict[str, Any]) -> dict[str, Any]:
    """Return facts from the values that axolotl's own schema accepts."""
    import axolotl_oracle

    with axolotl_oracle._without_extras():
        schema = importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig
        loaded = schema(**{key: value for key, value in data.items() if key != "plugins"})
    adapter = loaded.adapter
    recomputes = loaded.gradient_checkpointing not in (None, False)
    return {
        "model": loaded.base_model,
        "sequence_length": loaded.sequence_len,
        "micro_batch": loaded.micro_batch_size,
        "accumulation": loaded.gradient_accumulation_steps,
        "optimizer": getattr(loaded.optimizer, "value", loaded.optimizer),
        "epochs": loaded.num_epochs,
        "steps": loaded.max_steps,
        "attention": loaded.attn_implementation or "sdpa",
        "packing": bool(loaded.sample_packing),
        "lora_rank": loaded.lora_r if adapter else None,
        "objective": getattr(loaded.rl, "value", loaded.rl),
        "compile": loaded.torch_compile not in (None, False),
        "recomputes": recomputes or bool((loaded.fsdp_config or {}) and _of(loaded.fsdp_config)),
        "mesh": {"tp": loaded.tensor_parallel_size or 1, "cp": loaded.context_parallel_size or 1},
    }


def _of(block: Any) -> bool:
    return bool(getattr(block, "activation_checkpointing", False))


def _arguments(loaded: Any) -> dict[str, Any]:
    return {
        "micro_batch": loaded.per_device_train_batch_size,
        "accumulation": loaded.gradient_accumulation_steps,
        "optimizer": getattr(loaded.optim, "value", loaded.optim),
        "epochs": loaded.num_train_epochs,
        "steps": loaded.max_steps if loaded.max_steps > 0 else None,
        "compile": bool(loaded.torch_compile),
        "recomputes": bool(
            loaded.gradient_checkpointing or getattr(loaded, "activation_checkpointing", False)
        ),
        "compute_dtype": "bf16" if loaded.bf16 else "fp16" if loaded.fp16 else "fp32",
    }


def trl(data: dict[str, Any], path: Path | None = None) -> dict[str, Any]:
    """Return facts from TRL's own parser, with the configuration of the trainer that the file is for.

    Args:
        data: The keys.
        path: The file, to be given by ``--config``; None gives its keys as arguments.
    """
    from trl import DPOConfig, GRPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    kind = GRPOConfig if "num_generations" in data else DPOConfig if "beta" in data else SFTConfig
    parser = TrlParser(dataclass_types=[ScriptArguments, kind, ModelConfig])
    words = [f"--{key}={_word(value)}" for key, value in data.items() if value is not None and key != "env"]
    if path is not None:
        words = ["--config", str(path)]
    script, config, model, *left = parser.parse_args_and_config(
        [*words, "--use_cpu=true"], return_remaining_strings=True
    )
    del script
    return {
        **_arguments(config),
        "model": model.model_name_or_path,
        "sequence_length": getattr(config, "max_length", None),
        "packing": bool(getattr(config, "packing", False)),
        "lora_rank": model.lora_r if model.use_peft else None,
        "base_dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(
            model.dtype or "float32"
        ),
        "attention": model.attn_implementation or "sdpa",
        "unread": sorted(word.partition("=")[0].lstrip("-") for word in left[0] if word.startswith("--")),
    }


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def trainer(data: dict[str, Any]) -> dict[str, Any]:
    """Return facts from transformers' TrainingArguments."""
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    (loaded,) = parser.parse_dict({"output_dir": "out", **data, "use_cpu": True}, allow_extra_keys=True)
    return _arguments(loaded)


def llamafactory(data: dict[str, Any]) -> dict[str, Any]:
    """Return facts from LLaMA-Factory's own argument classes (v0), before it decides what is upcast."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    from transformers import HfArgumentParser

    homes = {"model": "Model", "data": "Data", "training": "Training", "finetuning": "Finetuning"}
    classes = [
        getattr(importlib.import_module(f"llamafactory.hparams.{home}_args"), f"{name}Arguments")
        for home, name in homes.items()
    ]
    parser = HfArgumentParser(classes)
    model, texts, training, method = parser.parse_dict({**data, "use_cpu": True}, allow_extra_keys=True)
    packed = texts.packing if texts.packing is not None else method.stage == "pt"
    compute = "bf16" if training.bf16 or method.pure_bf16 else "fp16" if training.fp16 else "fp32"
    facts = _arguments(training)
    if any(key.startswith("use_") and value is True for key, value in data.items()):
        del facts["optimizer"]  # GaLore and its like replace it later
    return {
        **facts,
        "model": model.model_name_or_path,
        "recomputes": not model.disable_gradient_checkpointing,
        # Where packing is written, one token is taken away that padding to a multiple of 8 gives back.
        "sequence_length": texts.cutoff_len + bool(texts.packing),
        "packing": bool(packed),
        "lora_rank": method.lora_rank if method.finetuning_type == "lora" else None,
        "compute_dtype": compute,
    }


def torchtune(data: dict[str, Any]) -> dict[str, Any]:
    """Return facts from torchtune's own instantiation of the components, on the meta device."""
    import torch

    loaded = importlib.import_module("omegaconf").OmegaConf.create(data)
    lora = importlib.import_module("torchtune.modules.peft").LoRALinear
    with torch.device("meta"):
        instantiate = importlib.import_module("torchtune.config").instantiate
        model = instantiate(loaded.get("policy_model") or loaded.model)
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, lora)]
    ppo = "policy_model" in data
    batch = loaded.ppo_batch_size // loaded.gradient_accumulation_steps if ppo else loaded.batch_size
    return {
        "parameters": sum(
            value.numel()
            for name, value in model.named_parameters()
            if not re.search("lora_|magnitude", name)
        ),
        "lora_targets": sorted({name.rpartition(".")[2] for name, _ in adapted}) or None,
        "lora_rank": adapted[0][1].rank if adapted else None,
        "micro_batch": batch,
        "accumulation": loaded.gradient_accumulation_steps,
        "epochs": None if ppo else loaded.epochs,
        "steps": loaded.get("max_steps_per_epoch"),
        "optimizer": loaded.optimizer._component_,
        "compile": bool(loaded.compile),
        "packing": bool(loaded.dataset.get("packed", False)),
    }


def ms_swift(data: dict[str, Any]) -> dict[str, Any]:
    """Return facts from ms-swift's argument classes, given a small model instead of the one that it names."""
    arguments = importlib.import_module("swift.arguments")
    folder = Path(tempfile.mkdtemp())
    # ms-swift reads the configuration of the model, which is not at hand.
    (folder / "config.json").write_text(json.dumps(_QWEN), encoding="utf-8")
    own = {"model": str(folder), "model_type": "qwen2", "template": "chatml", "output_dir": str(folder)}
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump({**data, **own, "use_cpu": True}), encoding="utf-8")
    variables = {str(name): str(value) for name, value in (data.get("ENV") or {}).items()}
    ranks = int(variables.get("NPROC_PER_NODE", 1)) * int(variables.get("NNODES", 1))
    before = dict(os.environ)
    os.environ["_PATCH_WORLD_SIZE"] = str(ranks)  # what torchrun would set, read by ms-swift itself
    try:
        words = [str(file)]
        importlib.import_module("swift.cli.main").parse_yaml_args(words)
        kind = arguments.RLHFArguments if "rlhf_type" in data else arguments.SftArguments
        loaded, _ = importlib.import_module("swift.utils").parse_args(kind, words)
    finally:
        os.environ.clear()
        os.environ.update(before)
    facts = _arguments(loaded.training_args)
    if not variables and "gradient_accumulation_steps" not in data:
        del facts["accumulation"]  # the number of processes is not in the file
    adapted = loaded.tuner_type == "lora"
    bits = loaded.quant_bits if loaded.quant_method else None
    return {
        **facts,
        "method": "qlora" if adapted and bits == 4 else loaded.tuner_type,
        "objective": getattr(loaded, "rlhf_type", None) or "sft",
        "sequence_length": loaded.max_length if "max_length" in data else None,
        "packing": bool(loaded.packing),
        "lora_rank": loaded.lora_rank if adapted else None,
        "attention": {"flash_attn": "flash_attention_2"}.get(loaded.attn_impl, loaded.attn_impl or "sdpa"),
        "mesh": {"cp": loaded.sequence_parallel_size},
    }


_QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "vocab_size": 512,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


def automodel(data: dict[str, Any]) -> dict[str, Any]:
    """Return facts from AutoModel's loader, which imports what ``_target_`` names, and its mesh parser."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "run.yaml"
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        loaded = importlib.import_module("nemo_automodel.components.config.loader").load_yaml_config(
            str(path)
        )
    dtypes = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "auto": "bf16"}

    def told(section: str, key: str) -> Any:
        node = loaded.get(section, None)
        return node.get(key, None) if node is not None else None

    facts = {
        "model": told("model", "pretrained_model_name_or_path"),
        "micro_batch": told("step_scheduler", "local_batch_size"),
        "global_batch": told("step_scheduler", "global_batch_size"),
        "steps": told("step_scheduler", "max_steps"),
        "stored_dtype": dtypes.get(str(told("model", "torch_dtype")).removeprefix("torch.")),
        "lora_rank": told("peft", "dim"),
        "learning": {
            "learning_rate": told("optimizer", "lr"),
            "weight_decay": told("optimizer", "weight_decay"),
        },
    }
    target = told("optimizer", "_target_")
    if target is not None:
        facts["optimizer"] = target.__name__.lower()
    if (distributed := loaded.get("distributed", None)) is not None:
        parse = importlib.import_module("nemo_automodel.recipes._dist_utils").parse_distributed_section
        mesh = parse(distributed.to_dict())
        facts["mesh"] = {name: mesh[f"{name}_size"] or 1 for name in ("cp", "tp", "ep", "pp")}
    return facts


LOADERS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "axolotl": axolotl, "llamafactory": llamafactory, "trl": trl, "trainer": trainer,
    "torchtune": torchtune, "ms-swift": ms_swift, "automodel": automodel,
}  # fmt: skip


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "per_device_train_batch_size": (1, 3, 16), "gradient_accumulation_steps": (1, 4),
    "num_train_epochs": (1, 2.5), "max_steps": (-1, 100),
    "optim": ("adamw_torch", "paged_adamw_8bit", "adafactor"), "gradient_checkpointing": (True, False),
    "bf16": (True, False), "torch_compile": (False,), "learning_rate": (1e-4,), "weight_decay": (0.1,),
    "logging_steps": (5,),
}  # fmt: skip
MADE: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "axolotl": (
        {"base_model": "org/model", "datasets": [{"path": "a", "type": "alpaca"}], "learning_rate": 1e-4},
        {
            "sequence_len": (512, 4096), "sample_packing": (True, False), "micro_batch_size": (1, 4),
            "gradient_accumulation_steps": (1, 8), "num_epochs": (1, 3), "max_steps": (100,),
            "optimizer": ("adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit"),
            "gradient_checkpointing": (True, False), "flash_attention": (True, False),
            "sdp_attention": (True,), "attn_implementation": ("eager", "sdpa"), "bf16": (True, "auto"),
            "torch_compile": (True, False), "adapter": ("lora",), "lora_r": (8, 32), "lora_alpha": (16,),
            "lora_target_linear": (True,), "load_in_8bit": (True, False),
            "pad_to_sequence_len": (True, False),
        },
    ),
    "llamafactory": (
        {
            "model_name_or_path": "org/model", "stage": "sft", "do_train": True, "dataset": "d",
            "output_dir": "o",
        },
        {
            **_ARGUMENTS, "stage": ("pt", "sft"), "finetuning_type": ("full", "lora"),
            "cutoff_len": (1024, 8192), "packing": (True, False), "lora_rank": (8, 64),
            "disable_gradient_checkpointing": (True, False), "pure_bf16": (True, False),
            "flash_attn": ("fa2", "sdpa"),
        },
    ),
    "trl": (
        {"model_name_or_path": "org/model", "dataset_name": "d", "output_dir": "o", "max_length": 512},
        {
            **_ARGUMENTS, "max_length": (256, 4096), "packing": (True, False), "use_peft": (True, False),
            "lora_r": (4, 64), "dtype": ("bfloat16", "float32"),
            "attn_implementation": ("flash_attention_2", "sdpa"),
        },
    ),
    "ms-swift": (
        {"model": "org/model", "dataset": ["org/data#500"], "output_dir": "o", "tuner_type": "lora"},
        {
            **{key: values for key, values in _ARGUMENTS.items() if key not in ("bf16", "torch_compile")},
            "tuner_type": ("lora", "full"),
            "ENV": ({"NPROC_PER_NODE": 4}, {"NPROC_PER_NODE": 8, "NNODES": 2}), "max_length": (1024, 8192),
            "lora_rank": (4, 64), "torch_dtype": ("bfloat16", "float16", "float32"),
            "attn_impl": ("flash_attn", "sdpa", "eager"), "quant_method": ("bnb",), "quant_bits": (4, 8),
            "sequence_parallel_size": (1, 2), "rlhf_type": ("dpo", "kto", "orpo"),
        },
    ),
    "trainer": (
        {"output_dir": "o", "per_device_train_batch_size": 2, "save_strategy": "no"}, dict(_ARGUMENTS),
    ),
}  # fmt: skip
"""What files that are made hold: always, and at times."""


def made(program: str, count: int, folder: Path) -> Iterator[Path]:
    """Yield files of random keys and values, the same in every run."""
    always, at_times = MADE[program]
    chooser = random.Random(program)
    for number in range(count):
        chosen = {key: chooser.choice(values) for key, values in at_times.items() if chooser.random() < 0.5}
        path = folder / f"{program}-{number}.yaml"
        path.write_text(yaml.safe_dump({**always, **chosen}), encoding="utf-8")
        yield path


def files_of(folders: list[Path]) -> Iterator[Path]:
    """Yield the YAML and JSON files below folders."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
                yield path


def differences(program: str, path: Path, ours: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the facts that differ: their name, the program's and ours; nothing where the program refuses."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    theirs = LOADERS[program](data)
    ours = {
        **ours,
        "recomputes": ours["gradient_checkpointing"] != "none",
        "parameters": _parameters(ours["family"]),
        "lora_targets": sorted(ours["lora_targets"] or ()) or None,
    }
    for name, value in theirs.items():
        if name == "mesh":
            for size, count in value.items():
                if ours["mesh"][size] != count:
                    yield f"mesh.{size}", count, ours["mesh"][size]
        elif name == "learning":
            for key, item in value.items():
                if item is not None and ours["learning"].get(key) != item:
                    yield f"learning.{key}", item, ours["learning"].get(key)
        elif name in ours and value is not None and value != ours[name]:
            yield name, value, ours[name]
    yield "", None, None


def _parameters(family: str | None) -> int | None:
    """Return the parameters of a size of the catalogue."""
    name, _, size = (family or "").partition(":")
    return load_registry().get(name).flavours()[size].parameters if size else None


def _is_v1(path: Path, program: str) -> bool:
    """Whether a file is in LLaMA-Factory's second format, which other classes read."""
    return program == "llamafactory" and "model_name_or_path" not in path.read_text(encoding="utf-8")


def main() -> None:
    """Compare, print the differences and write the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--made", type=int, default=0, help="files that are made for each program")
    parser.add_argument("--program", choices=LOADERS, help="the only program to compare with")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    files: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    same: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {}
    place = Path(tempfile.mkdtemp())
    programs = [options.program] if options.program else list(LOADERS)
    own = [path for name in programs if name in MADE for path in made(name, options.made, place)]
    for path in (*files_of(options.folders), *own):
        try:
            run = describe_path(path)
        except ConfigError:
            continue
        if run is None or run.program not in programs:
            continue
        if (run.program == "trl" and run.program_version != "1.16.0") or _is_v1(path, run.program):
            continue
        files[run.program] += 1
        try:
            listed = list(differences(run.program, path, to_json(run)))[:-1]
        except ModuleNotFoundError as error:
            print(f"{run.program} cannot be imported: {error}")
            continue
        except (Exception, SystemExit) as error:
            if "No module named" in str(error):  # torchtune wraps what its components cannot import
                files[run.program] -= 1
                continue
            refused[run.program] += 1
            print(f"{path.name}: refused by {run.program}: {' '.join(str(error).split())[:110]}")
            continue
        same[run.program] += not listed
        for name, theirs, ours in listed:
            found.setdefault(run.program, Counter())[name] += 1
            print(f"{path.name}: {name}: {theirs!r} by {run.program}, {ours!r} read")
    result = {
        program: {
            "files": count,
            "refused_by_the_program": refused[program],
            "equal": same[program],
            "differences": dict(found.get(program, {})),
        }
        for program, count in files.items()
    }
    print(json.dumps(result, indent=1))
    if options.output is not None:
        before = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
        options.output.write_text(json.dumps({**before, **result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
