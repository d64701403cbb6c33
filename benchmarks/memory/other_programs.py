"""Real peaks of other programs on CPUs, beside the plans of their files.

    python benchmarks/memory/other_programs.py [--only TEXT] [--torchtune PYTHON] [-o FILE]

Each row writes a file (or a command line) of a program, runs that program on it with one process, or with two
over gloo (FSDP2, or DDP: plain data parallelism), and plans the same file with ``fsdptool plan``. A small
Llama with random weights, a tokenizer of whole words and texts that are all longer than the sequence length
are made first. The programs are Hugging Face's Trainer in a script of a few lines, ``trl sft``, ``dpo``,
``kto`` and ``reward``, and the recipes of torchtune for full fine-tuning. torchtune 0.6.1 needs torchao 0.9,
so it is run by the interpreter of another environment, and left out without ``--torchtune``. Its distributed
recipe does not run on CPUs: it asks for the memory statistics of a GPU.

Instrument: torch's CPU allocator events (``torch.profiler`` with ``profile_memory``), summed from before the
model exists; the peak is that of the last step, from one update of the optimizer to the next.

Rows of one length have no padding, and transformers drops a mask of ones: SDPA then repeats no keys and
values, and keeps no mask. A plan takes rows of several lengths for granted; ``--lengths`` tells it that all
have one. Rows that are named ``padded`` have two, and meet in each batch; so do those of ``trl reward``. A
measured peak holds the next batch, too, which is on the host where ranks have GPUs.

On one process, parameters stay views of the file that they were read from, so that a head of the file that
rewards do not use stays in memory, too: the file holds the trained weights alone.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from planned_peaks import compare, measured_peaks, parser, plan_document

RESULT = Path(__file__).parents[1] / "results" / "memory_other_programs.json"
SEQUENCE = 256
STEPS = 3
WORDS = 8000
TRAINING: dict[str, Any] = {
    "model_name_or_path": "model", "output_dir": "out", "max_steps": STEPS, "per_device_train_batch_size": 2,
    "learning_rate": 1e-4, "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    "dataloader_num_workers": 0,
}  # fmt: skip
TORCHTUNE: dict[str, Any] = {
    "output_dir": "out", "tokenizer": {"_component_": "rows.Tokenizer", "max_seq_len": SEQUENCE},
    "dataset": {"_component_": "rows.Rows", "packed": False},
    "model": {
        "_component_": "torchtune.models.llama3_1.llama3_1", "vocab_size": WORDS, "num_layers": 4,
        "num_heads": 8, "num_kv_heads": 4, "embed_dim": 256, "intermediate_dim": 768, "max_seq_len": 1024,
        "rope_base": 10000,
    },
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "model",
        "checkpoint_files": ["model.safetensors"], "recipe_checkpoint": None, "output_dir": "out",
        "model_type": "LLAMA3",
    },
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "out/logs"},
    "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False}, "seed": 0,
    "shuffle": False, "resume_from_checkpoint": False, "batch_size": 2, "epochs": 1,
    "max_steps_per_epoch": STEPS, "gradient_accumulation_steps": 1, "optimizer_in_bwd": False,
    "clip_grad_norm": None, "compile": False, "device": "cpu", "dtype": "fp32",
    "enable_activation_checkpointing": False, "enable_activation_offloading": False, "log_every_n_steps": 1,
    "log_peak_memory_stats": False,
}  # fmt: skip
ROWS_OF_TORCHTUNE = """\
import torch


class Tokenizer:
    pad_id = 0

    def __init__(self, max_seq_len):
        self.max_seq_len = max_seq_len


class Rows(torch.utils.data.Dataset):
    def __init__(self, tokenizer, packed):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(5, 8000, (64, tokenizer.max_seq_len), generator=generator).tolist()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"tokens": self.rows[index], "labels": self.rows[index]}
"""
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "no",
    "num_machines": 1, "num_processes": 2, "use_cpu": True,
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": False,
    },
}  # fmt: skip
REPLICATED = {name: value for name, value in ACCELERATE.items() if name != "fsdp_config"}
REPLICATED["distributed_type"] = "MULTI_CPU"
SCRIPT = """\
import torch, transformers
from dataclasses import dataclass

@dataclass
class ModelArguments:
    model_name_or_path: str = ""
    model_max_length: int = 512

parser = transformers.HfArgumentParser((ModelArguments, transformers.TrainingArguments))
model_args, args = parser.parse_args_into_dataclasses()
model = transformers.AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, use_cache=False)
row = torch.randint(5, 8000, (64, model_args.model_max_length), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in row]
transformers.Trainer(model=model, args=args, train_dataset=data).train()
"""


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        program: ``trainer``, ``torchtune``, or a command of TRL.
        processes: One or two.
        keys: What its file says beside :data:`TRAINING` or :data:`TORCHTUNE`.
        sharded: Whether two processes use FSDP2, and not DDP.
        padded: Whether rows have two lengths, so that each batch is padded and has a mask.
    """

    program: str
    processes: int
    keys: dict[str, Any] = field(default_factory=dict)
    sharded: bool = True
    padded: bool = False


DATA = {"sft": "texts", "dpo": "pairs", "kto": "judged", "reward": "short_pairs"}
"""Commands of TRL, and the data that each trains on."""
PADDED_DATA = {"sft": "short_texts", "dpo": "short_pairs", "kto": "short_judged", "reward": "short_pairs"}
"""The same with rows of two lengths, of which the longer is the sequence length."""
_JUDGE = {"model_name_or_path": "judge"}
_SEQUENTIAL = {"train_sampling_strategy": "sequential"}
"""So that a longer and a shorter row of :data:`PADDED_DATA` meet in each batch."""
_EAGER = {"attn_implementation": "eager"}
_ADAPTERS = {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "trainer": {
        "": {}, "accumulation": {"gradient_accumulation_steps": 2},
        "recomputed": {"gradient_checkpointing": True}, "sgd": {"optim": "sgd"}, "autocast": {"bf16": True},
        "autocast, accumulation": {"bf16": True, "gradient_accumulation_steps": 2},
    },
    "sft": {
        "": {"packing": False}, "autocast": {"packing": False, "bf16": True},
        "autocast, accumulation": {"bf16": True, "gradient_accumulation_steps": 2},
        "packed": {"packing": True, "packing_strategy": "wrapped"}, "lora": _ADAPTERS,
        "lora, autocast": {**_ADAPTERS, "bf16": True}, "lora, bf16 base": {**_ADAPTERS, "dtype": "bfloat16"},
        "lora, bf16 base, autocast": {**_ADAPTERS, "dtype": "bfloat16", "bf16": True},
        "lora, autocast, recomputed": {**_ADAPTERS, "bf16": True, "gradient_checkpointing": True},
    },
    "dpo": {
        "": {}, "autocast": {"bf16": True}, "lora": _ADAPTERS, "lora, autocast": {**_ADAPTERS, "bf16": True},
        "lora, autocast, recomputed": {**_ADAPTERS, "bf16": True, "gradient_checkpointing": True},
    },
    "kto": {
        "": {}, "lora, autocast": {**_ADAPTERS, "bf16": True},
        "lora, autocast, recomputed": {**_ADAPTERS, "bf16": True, "gradient_checkpointing": True},
    },
    "reward": {"": _JUDGE, "autocast": {**_JUDGE, "bf16": True}},
    "torchtune": {
        "": {}, "accumulation": {"gradient_accumulation_steps": 2},
        "recomputed": {"enable_activation_checkpointing": True},
    },
}  # fmt: skip
ROWS = {
    ", ".join(filter(None, (program, f"{count} process" + "es" * (count > 1), name))): Row(
        program, count, keys
    )
    for program, variants in VARIANTS.items()
    for name, keys in variants.items()
    for count in ((1,) if program == "torchtune" else (1, 2))
}
_REPLICATED_ROWS = {
    "trainer": ("", "accumulation", "autocast", "autocast, accumulation"),
    "sft": ("autocast", "lora, autocast", "lora, autocast, recomputed"),
    "dpo": ("lora, autocast",),
}
_PADDED_ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "": _SEQUENTIAL,
        "eager": {**_SEQUENTIAL, **_EAGER},
        "lora": {**_SEQUENTIAL, **_ADAPTERS},
        "lora, eager": {**_SEQUENTIAL, **_ADAPTERS, **_EAGER},
        "lora, autocast, recomputed": {
            **_SEQUENTIAL, **_ADAPTERS, "bf16": True, "gradient_checkpointing": True,
        },
    },
    "dpo": {
        "": {},
        "eager": _EAGER,
        "lora": _ADAPTERS,
        "lora, eager": {**_ADAPTERS, **_EAGER},
        "lora, autocast, recomputed": {**_ADAPTERS, "bf16": True, "gradient_checkpointing": True},
    },
    "kto": {"": {}},
}  # fmt: skip
ROWS |= {
    ", ".join(filter(None, (program, f"{count} process" + "es" * (count > 1), "padded", name))): Row(
        program, count, keys, padded=True
    )
    for program, variants in _PADDED_ROWS.items()
    for name, keys in variants.items()
    for count in (1, 2)
}
ROWS |= {
    ", ".join(filter(None, (program, "2 processes, DDP", name))): Row(
        program, 2, VARIANTS[program][name], sharded=False
    )
    for program, names in _REPLICATED_ROWS.items()
    for name in names
}


def make_inputs(folder: Path) -> None:
    """Write a model, its tokenizer, and data for each program into a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    # On one process parameters are views of the file that was read, so that it must hold nothing else.
    judge = LlamaConfig(**{**config.to_diff_dict(), "num_labels": 1, "pad_token_id": 0})
    LlamaForSequenceClassification(judge).save_pretrained(folder / "judge")
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(WORDS - 4))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    for name in ("model", "judge"):
        fast.save_pretrained(folder / name)

    def text(start: int, count: int) -> str:
        return " ".join(f"w{(start * 37 + i * 11) % (WORDS - 4)}" for i in range(count))

    texts = [{"text": text(i, 2 * SEQUENCE)} for i in range(64)]
    pairs = [
        {
            "prompt": text(i, 16) + " ",
            "chosen": text(i + 1, 2 * SEQUENCE),
            "rejected": text(i + 2, 2 * SEQUENCE),
        }
        for i in range(64)
    ]
    judged = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    # TRL trains rewards on no row that is longer than the sequence length. The rejected ones are shorter, so
    # that the batch has padding and a mask, as in practice.
    short = [
        {
            "prompt": pair["prompt"],
            "chosen": text(i + 1, SEQUENCE - 17),
            "rejected": text(i + 2, SEQUENCE - 49),
        }
        for i, pair in enumerate(pairs)
    ]
    named: dict[str, list[Any]] = {"texts": texts, "pairs": pairs, "short_pairs": short, "judged": judged}
    named["short_texts"] = [{"text": text(i, 2 * SEQUENCE if i % 2 else SEQUENCE // 2)} for i in range(64)]
    named["short_judged"] = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in short
        for side in ("chosen", "rejected")
    ]
    for name, rows in named.items():
        (folder / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "train.jsonl").write_text(lines, encoding="utf-8")


def command_of(row: Row, folder: Path) -> list[str]:
    """Write the row's files into a folder and return its program's command line, relative to the folder."""
    import yaml

    launch = ["--config_file", "launch.yaml"] if row.processes > 1 else []
    started = ACCELERATE if row.sharded else REPLICATED
    (folder / "launch.yaml").write_text(yaml.safe_dump(started), encoding="utf-8")
    if row.program == "torchtune":
        (folder / "rows.py").write_text(ROWS_OF_TORCHTUNE, encoding="utf-8")
        (folder / "full.yaml").write_text(yaml.safe_dump({**TORCHTUNE, **row.keys}), encoding="utf-8")
        return ["tune", "run", "full_finetune_single_device", "--config", "full.yaml"]
    if row.program == "trainer":
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        given = {**TRAINING, "model_max_length": SEQUENCE, **row.keys}
        flags = [part for key, value in given.items() for part in (f"--{key}", str(value))]
        return [*(("accelerate", "launch", *launch) if launch else ("python",)), "train.py", *flags]
    given = {
        **TRAINING,
        "dataset_name": (PADDED_DATA if row.padded else DATA)[row.program],
        "max_length": SEQUENCE,
        **row.keys,
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    if not launch:
        return ["trl", row.program, "--config", "train.yaml"]
    return [
        "accelerate",
        "launch",
        *launch,
        "-m",
        f"trl.scripts.{row.program}",
        "--config",
        "train.yaml",
    ]


def measured(row: Row, command: list[str], folder: Path, python: str) -> list[int]:
    """Run a row's program and return the peak of each rank in bytes."""
    programs = {"train.py", "full_finetune_single_device"}
    programs |= {word for name in DATA for word in (name, f"trl.scripts.{name}")}
    start = next(i for i, word in enumerate(command) if word in programs)
    environment = {}
    if row.processes > 1:
        environment["ACCELERATE_USE_CPU"] = "true"
    if row.processes > 1 and row.sharded:
        environment["ACCELERATE_USE_FSDP"] = "true"
        environment |= {name.upper(): str(value) for name, value in ACCELERATE["fsdp_config"].items()}
        named = ACCELERATE["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"]
        environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] = named
    module = "train.py" if row.program == "trainer" else f"trl.scripts.{row.program}"
    if row.program == "torchtune":
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        place = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
        module = f"{place.stdout.strip()}/recipes/{command[start]}.py"
    arguments = [__file__, "--worker", module, *command[start + 1 :]]
    return measured_peaks(arguments, folder, row.processes, python=python, **environment)


def row_of(row: Row, python: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Write, plan and run the files of a row in a folder."""
    make_inputs(folder)
    command = command_of(row, folder)
    model = row.keys.get("model_name_or_path", TRAINING["model_name_or_path"])
    words = ["--gpus", str(row.processes), "--model", model]
    if not row.padded and row.program != "reward":
        # All rows are as long as the sequence, which no file says.
        (folder / "lengths.csv").write_text(f"{SEQUENCE},64\n", encoding="utf-8")
        words += ["--lengths", "lengths.csv"]
    plan = plan_document([*words, "--", *command], folder)
    return {"command": " ".join(command)}, plan, measured(row, command, folder, python)


class ShardsOnCpu:
    """accelerate's kinds of runs, with CPU processes in the place of a device that accelerate shards on."""

    def __init__(self, real: Any) -> None:
        self.real, self.MULTI_MLU = real, real.MULTI_CPU

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def broadcast_each(group: Any, tensors: list[Any], _: int, source: int = 0, *__: Any) -> None:
    """Send a model's tensors one by one, each waited for."""
    import torch.distributed as dist

    for tensor in tensors:
        dist.broadcast(tensor, source, group=group)


def worker(module: str, arguments: list[str]) -> None:
    """Run a program's main module in this process and write the peak of its last step."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.profiler import ProfilerActivity, profile, record_function

    from fsdptool.training.memory_meter import settled_collectives

    def mark(*_: Any) -> None:
        with record_function("UPDATED"):
            pass

    register_optimizer_step_post_hook(mark)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "ACCELERATE_USE_FSDP" in os.environ:
        import accelerate.state

        accelerate.state.DistributedType = ShardsOnCpu(accelerate.state.DistributedType)
    # DDP's own copies the model into buffers that threads of gloo free, which the profiler does not see.
    dist._broadcast_coalesced = broadcast_each  # type: ignore[assignment]
    sys.argv = [module, *arguments]
    sys.path.insert(0, "")
    with (
        suppress(SystemExit),
        settled_collectives(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
    ):
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    events = list(profiler.profiler.kineto_results.events())
    begin, end = sorted(e.start_ns() for e in events if e.name() == "UPDATED")[-2:]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    level = peak = 0
    for time, size in changes:
        level += size
        if begin <= time <= end:
            peak = max(peak, level)
    path = Path(f"peak-{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(peak), encoding="utf-8")


def main() -> int:
    """Measure and plan every row; returns 1 if one is more than 2 % apart."""
    made = parser(__doc__, RESULT)
    made.add_argument("--torchtune", metavar="PYTHON", help="interpreter of an environment with torchtune")
    options = made.parse_args()
    import trl

    pythons = {"torchtune": options.torchtune}
    rows = {
        name: partial(row_of, row, python)
        for name, row in ROWS.items()
        if (python := pythons.get(row.program, sys.executable)) is not None
    }
    return compare("memory/other_programs", rows, options, trl=trl.__version__)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
        sys.exit(0)
    sys.exit(main())
