"""Read every key with good and bad spellings of its values, and compare with the program itself.

    python benchmarks/config/grids.py [PROGRAM ...] [-o RESULT.json]

Each case is one file, command line or environment in which one key has one spelling; everything around it is
good. The program's own code reads the same text in this process (``tests/config/*_oracle.py``); only the
question for a CUDA device is answered with yes. A case

- ``agrees`` when the program stops and fsdptool reports an error, or when it runs, no error is reported and
  every setting is equal;
- is ``by definition`` when the program runs, but not what is written, which the rule that fsdptool reports
  calls an error (``BY_DEFINITION``);
- is ``not judged`` when the program needs a package that is missing here (fp8);
- is ``wrong`` otherwise; every wrong case is named in the result.

SimpleTuner is not a dependency: give the folder of its unpacked wheel (4.8.0) in FSDPTOOL_SIMPLETUNER.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import shlex
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "config"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import accelerate_oracle  # noqa: E402
import simpletuner_oracle  # noqa: E402
import trainer_oracle  # noqa: E402

from fsdptool.config import Reading, read_settings  # noqa: E402
from fsdptool.config.dialects.environment import KEYS as VARIABLES  # noqa: E402

BY_DEFINITION: Mapping[str | tuple[str, str], str] = {
    ("FSD205", "machine_rank"): "no machine has a negative rank, and torchrun waits for rank 0",
    "FSD214": "the model has no class of that name: SimpleTuner drops the name with a warning",
    ("FSD110", "xla"): "transformers starts torch_xla's FSDP",
    ("FSD206", "version"): "the version is true, of which transformers makes 1",
    ("FSD206", "fsdp_version"): "the plugin does not know the version and takes neither one's path whole",
    "FSD303": "the strategy or prefetch that is written does not run under version 2",
    "FSD309": "the mesh replicates only",
    "FSD312": "sequence parallelism does not split sequences under FSDP2",
    "FSD314": "accelerate starts the processes on CPU without sharding them",
    "FSD330": "FSDP settings are written, and FSDP does not start",
    "FSD332": "NO_SHARD is written, and the parameters are sharded",
    "FSD334": "hybrid sharding is written, and all ranks shard",
    "FSD336": "a strategy is written, and FULL_SHARD runs",
    "FSD337": "text or a number is tested for truth, and means the opposite of what it says",
}
"""Rules (with a key, where it is this key's case alone) that call an error what the program runs, and why."""

TRUTH = (
    "true", "false", "True", "FALSE", "yes", "no", "on", "Off", "y", "n", "t", "f", "1", "0", "2", "1.0", "",
    "None", "null", "~", "enabled", "disabled", "maybe", " true", "false ",
)  # fmt: skip
POLICIES = (
    "TRANSFORMER_BASED_WRAP", "transformer_based_wrap", "Size_Based_Wrap", "SIZE_BASED_WRAP", "NO_WRAP",
    "no_wrap", "TRANSFORMER", "size", "None", "none", "null", "", "NO-WRAP", "my.mod.policy", "0", "true",
    "auto_wrap", "TRANSFORMER_BASED_WRAP ",
)  # fmt: skip
CLASSES = (
    "A", "A,B", "A, B", "A B", "A;B", "[A,B]", "['A','B']", '["A", "B"]', "A,,B", "A,", ",A", "None", "none",
    "null", "", "a.b.A", "5", "true", "True",
)  # fmt: skip
COUNTS = (
    "0", "5", "2000", "1e8", "1.0e8", "100_000_000", "-5", "", "None", "null", "2000.0", "2,000", "0x10",
    " 5", "true", "many", "+5", "007",
)  # fmt: skip
STATE_DICTS = (
    "SHARDED_STATE_DICT", "full_state_dict", "Local_State_Dict", "FULL_STATE_DICT", "LOCAL_STATE_DICT",
    "FULL", "sharded", "1", "2", "3", "4", "0", "", "None", "none", "null", "dcp", "true",
    "SHARDED-STATE-DICT", "-1",
)  # fmt: skip
STRATEGIES = (
    "FULL_SHARD", "full_shard", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2",
    "_HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5", "6", "0", "-1", "ZERO3", "full", "", "None", "null",
    "true", "FULL-SHARD", "NO_RESHARD", "Full_Shard", "TRANSFORMER_BASED_WRAP",
)  # fmt: skip
PREFETCHES = (
    "BACKWARD_PRE", "backward_post", "NO_PREFETCH", "no_prefetch", "NONE", "None", "none", "null", "", "1",
    "2", "3", "0", "-1", "true", "false", "PRE", "TRANSFORMER_BASED_WRAP",
)  # fmt: skip
VERSIONS = ("1", "2", "3", "0", "v2", "2.0", "", "None", "null", "true", "-1", "02", " 2", "fsdp2", "2e0")
PRECISIONS = (
    "no", "fp16", "bf16", "fp8", "fp32", "BF16", "No", "", "None", "null", "false", "true", "float16", "16",
)  # fmt: skip
SIZES = ("1", "2", "8", "0", "-1", "2.0", "", "None", "null", "two", "2e0", "true", " 2", "0_2", "+2")
PORTS = ("29501", "0", "65535", "65536", "70000", "-1", "", "None", "null", "29501x", "2.5", "true")
PROCESSES = (
    "8", "1", "0", "-1", "-2", "gpu", "auto", "cpu", "8.0", "", "None", "null", "eight", "true", "0x8",
)  # fmt: skip
MACHINES = ("1", "2", "0", "-1", "1.0", "", "None", "null", "one", "true")
RANKS = ("0", "1", "-1", "0.0", "", "None", "null", "zero", "true")
GPU_IDS = ("all", "0,1,2,3,4,5,6,7", "0", "", "None", "null", "0,1", "true")
ROTATIONS = ("allgather", "alltoall", "ALLGATHER", "all_gather", "", "None", "null", "ring", "true")
IGNORED = ("", "None", "null", ".*lm_head", "[", "a|b", "5", "true")


@dataclass(frozen=True)
class Case:
    """One text in which ``key`` is written as ``value``; all else in it is good.

    Attributes:
        program: Who reads it.
        form: ``yaml``, ``quoted``, ``env``, ``flags``, ``json``.
        context: What stands around the key, in a word or two.
        key, value: What is tried.
        text: The whole text.
        name: Name of the file.
    """

    program: str
    form: str
    context: str
    key: str
    value: str
    text: str
    name: str

    def __str__(self) -> str:
        return f"{self.program} {self.form} ({self.context}) {self.key}={self.value!r}"


@dataclass(frozen=True)
class Answer:
    """How a case ended: ``agrees``, ``by definition``, ``not judged`` or ``wrong``, and why."""

    case: Case
    kind: str
    why: str = ""


FSDP_VALUES: Mapping[str, tuple[str, ...]] = {
    "fsdp_version": VERSIONS, "fsdp_auto_wrap_policy": POLICIES,
    "fsdp_transformer_layer_cls_to_wrap": CLASSES, "fsdp_min_num_params": COUNTS,
    "fsdp_state_dict_type": STATE_DICTS, "fsdp_sharding_strategy": STRATEGIES,
    "fsdp_reshard_after_forward": tuple(dict.fromkeys((*TRUTH, *STRATEGIES))),
    "fsdp_backward_prefetch": PREFETCHES, "fsdp_ignored_modules": IGNORED,
    **dict.fromkeys(
        (
            "fsdp_offload_params", "fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing",
            "fsdp_activation_checkpointing_offload", "fsdp_forward_prefetch", "fsdp_use_orig_params",
            "fsdp_sync_module_states",
        ),
        TRUTH,
    ),
}  # fmt: skip
TOP_VALUES: Mapping[str, tuple[str, ...]] = {
    "mixed_precision": PRECISIONS,
    "num_processes": PROCESSES,
    "num_machines": MACHINES,
    "machine_rank": RANKS,
    "main_process_port": PORTS,
    "main_process_ip": ("10.0.0.1", "", "None", "null", "5"),
    "gpu_ids": GPU_IDS,
    "use_cpu": ("true", "false", "null", "", "no", "1", "0", "maybe"),
    "debug": ("true", "false", "null", "", "no", "1", "0", "maybe"),
}
MESH_VALUES: Mapping[str, tuple[str, ...]] = {
    "parallelism_config_dp_replicate_size": SIZES,
    "parallelism_config_dp_shard_size": SIZES,
    "parallelism_config_tp_size": SIZES,
    "parallelism_config_cp_size": SIZES,
    "parallelism_config_sp_size": SIZES,
    "parallelism_config_cp_comm_strategy": ROTATIONS,
    "parallelism_config_cp_backend": ("torch", "Torch", "deepspeed", "", "None", "null"),
    "parallelism_config_sp_backend": ("deepspeed", "torch", "", "None", "null"),
}
GOOD = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": "1",
    "num_processes": "8",
}
BLOCK = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
}
MESH = {
    "parallelism_config_dp_replicate_size": {"parallelism_config_dp_shard_size": "4"},
    "parallelism_config_dp_shard_size": {"parallelism_config_dp_replicate_size": "4"},
    "parallelism_config_tp_size": {"parallelism_config_dp_shard_size": "4"},
    "parallelism_config_cp_size": {"parallelism_config_dp_shard_size": "4"},
    "parallelism_config_sp_size": {"parallelism_config_dp_shard_size": "4"},
    "parallelism_config_cp_comm_strategy": {
        "parallelism_config_dp_shard_size": "4",
        "parallelism_config_cp_size": "2",
    },
    "parallelism_config_cp_backend": {"parallelism_config_dp_shard_size": "8"},
    "parallelism_config_sp_backend": {"parallelism_config_dp_shard_size": "8"},
}


def _around(key: str, value: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the settings of FSDP among which a key is tried, and what to call them."""
    yield "", BLOCK
    if key == "fsdp_min_num_params":
        yield "by size, ", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    if key == "fsdp_activation_checkpointing":
        yield "nothing wrapped, ", {"fsdp_auto_wrap_policy": "NO_WRAP"}
    if key == "fsdp_activation_checkpointing_offload":
        yield "checkpointing, ", {**BLOCK, "fsdp_activation_checkpointing": "true"}
    if key == "fsdp_sync_module_states":
        yield "no RAM-efficient loading, ", {**BLOCK, "fsdp_cpu_ram_efficient_loading": "false"}
    if key in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        yield "nothing wrapped, ", {"fsdp_auto_wrap_policy": "NO_WRAP"}
    if key == "fsdp_backward_prefetch":
        yield "no policy, ", {}
    if key == "fsdp_reshard_after_forward":
        yield "with a strategy, ", {**BLOCK, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}


def accelerate_cases() -> Iterator[Case]:
    """Yield every key of accelerate in a file, in a file with quotes, in the environment and as a flag."""
    for version in ("1", "2"):
        for key, values in FSDP_VALUES.items():
            for value in values:
                for context, around in _around(key, value):
                    block = {"fsdp_version": version, **around, key: value}
                    yield from _forms(f"{context}version {version}", key, value, GOOD, block, {})
        for key, values in TOP_VALUES.items():
            for value in values:
                block = {"fsdp_version": version, **BLOCK}
                yield from _forms(f"version {version}", key, value, {**GOOD, key: value}, block, {})
                if key in ("num_processes", "machine_rank", "main_process_port"):
                    several = {
                        **GOOD,
                        "num_machines": "2",
                        "main_process_ip": "10.0.0.1",
                        "machine_rank": "1",
                    }
                    context = f"two machines, version {version}"
                    yield from _forms(context, key, value, {**several, key: value}, block, {})
    for key, values in MESH_VALUES.items():
        for value in values:
            block = {"fsdp_version": "2", **BLOCK}
            yield from _forms("mesh", key, value, GOOD, block, {**MESH[key], key: value})


NO_FLAG = ("fsdp_ignored_modules", "use_cpu", "debug")


def _forms(
    context: str, key: str, value: str, top: dict[str, str], block: dict[str, str], mesh: dict[str, str]
) -> Iterator[Case]:
    def yaml(quoted: bool) -> str:
        def lines(values: Mapping[str, str], indent: str) -> list[str]:
            return [
                f"{indent}{name}: "
                + (f"'{text.replace(chr(39), chr(39) * 2)}'" if quoted and name == key else text)
                for name, text in values.items()
            ]

        parts = [*lines(top, ""), "fsdp_config:", *lines(block, "  ")]
        if mesh:
            parts += ["parallelism_config:", *lines(mesh, "  ")]
        return "\n".join(parts) + "\n"

    for form in ("yaml", "quoted"):
        yield Case("accelerate", form, context, key, value, yaml(form == "quoted"), "fsdp.yaml")
    variable = {name: text for text, name in VARIABLES.items()}.get(
        {"fsdp_transformer_layer_cls_to_wrap": "wrap_classes"}.get(key, key), key.upper()
    )
    if key in block or key in mesh or variable in VARIABLES:
        known = {"ACCELERATE_USE_FSDP": "true"}
        for name, text in {**block, **mesh}.items():
            named = "FSDP_TRANSFORMER_CLS_TO_WRAP" if name.endswith("cls_to_wrap") else name.upper()
            known[named] = text
        if mesh:
            known["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        if variable == "ACCELERATE_MIXED_PRECISION":
            known[variable] = value
        if key not in ("use_cpu", "debug"):
            text = "".join(f"export {name}={_quoted(word)}\n" for name, word in known.items())
            yield Case("accelerate", "env", context, key, value, text, "fsdp.env")
    if key in NO_FLAG:
        return
    words = ["--use_fsdp", *(["--use_parallelism_config"] if mesh else [])]
    for name, text in {**block, **mesh, **top}.items():
        if name != "distributed_type":
            words += [f"--{name}", _quoted(text)]
    line = "accelerate launch " + " ".join(words) + " train.py\n"
    yield Case("accelerate", "flags", context, key, value, line, "fsdp.args")


def _quoted(text: str) -> str:
    """Return a shell word in one pair of quotes, or without."""
    return f'"{text}"' if "'" in text else shlex.quote(text)


def judge_accelerate(case: Case, folder: Path) -> Answer:
    """Read a case here and run it through accelerate."""
    if case.form in ("yaml", "quoted"):
        path = folder / case.name
        path.write_text(case.text, encoding="utf-8")
        reading = read_settings(path)
        unsaid = any(item.code == "FSD326" for item in reading.diagnostics)
        # accelerate asks for --num_processes then, as fsdptool says.
        flags = ("--num_processes", "8") if unsaid else ()
        outcome = accelerate_oracle.run_accelerate(path, *flags, prepare=True)
    elif case.form == "env":
        reading = read_settings(case.text, dialect="env")
        outcome = accelerate_oracle.run_environment(case.text)
    else:
        reading = read_settings(case.text, dialect="flags")
        outcome = accelerate_oracle.run_flags(case.text)
    if case.value == "fp8":
        return Answer(case, "not judged", "no backend for fp8 is installed")
    stopped = None if outcome.error is None else f"{outcome.stage}: {outcome.error}"
    return compare(case, reading, stopped, outcome.settings if outcome.fsdp else {})


def compare(case: Case, reading: Reading, stopped: str | None, settings: Mapping[str, Any]) -> Answer:
    """Return the answer for a program that stopped, or that runs with ``settings`` (none: without FSDP)."""
    errors = reading.errors
    if stopped is not None:
        return Answer(case, "agrees") if errors else Answer(case, "wrong", f"missed: {stopped[:160]}")
    if errors:
        why = "; ".join(f"{item.code} {item.message}" for item in errors)
        key = case.key if case.program == "accelerate" else case.key.removeprefix("fsdp_")
        if all(item.code in BY_DEFINITION or (item.code, key) in BY_DEFINITION for item in errors):
            return Answer(case, "by definition", ", ".join(sorted({item.code for item in errors})))
        return Answer(case, "wrong", f"false error: {why}")
    if not settings:
        runs = reading.version is not None
        return Answer(case, "wrong", "FSDP does not start") if runs else Answer(case, "agrees")
    explained = {item.key: item.value for item in reading.effective}
    if reading.version is None:
        return Answer(case, "wrong", "FSDP starts")
    taken = {
        name: _meant(name, value)
        for name, value in settings.items()
        if name in explained and not _unsaid(name, value, explained[name])
    }
    different = accelerate_oracle.differences(explained, taken)
    why = "; ".join(f"{name} is {value!r}, shown {explained[name]!r}" for name, value in different.items())
    return Answer(case, "wrong", why) if different else Answer(case, "agrees")


def _meant(name: str, value: Any) -> Any:
    """Return a setting as it acts: fp32 turns mixed precision off, and a size of true is 1."""
    if name == "mixed_precision":
        return {"fp32": "no"}.get(value, value)
    return int(value) if name == "min_num_params" and isinstance(value, bool) else value


def _unsaid(name: str, value: Any, shown: Any) -> bool:
    """Whether neither says anything: all GPUs, a count from the command line, a rank for one machine."""
    nothing = {"gpu_ids": (None, "all"), "num_processes": (None,), "machine_rank": (None,)}.get(name, ())
    return bool(nothing) and (shown in nothing or value in nothing)


JSON_TRUTH: tuple[Any, ...] = (
    True, False, "true", "false", "True", "FALSE", "yes", "no", "on", "off", "y", "f", "1", "0", 1, 0, 2, "2",
    1.0, None, "", "None", "null", "maybe", [], {}, {"a": 1}, ["x"], " true",
)  # fmt: skip
FSDP_CONFIG: Mapping[str, tuple[Any, ...]] = {
    "version": (1, 2, "1", "2", 3, 0, "v2", 2.0, "2.0", None, "", True, " 2", "02", [2]),
    "reshard_after_forward": (*JSON_TRUTH, *STRATEGIES), "auto_wrap_policy": (*POLICIES, None, 0, True, []),
    "transformer_layer_cls_to_wrap": (
        *CLASSES, None, ["A"], ["A", "B"], ["A,B"], ["A, B"], [], [""], ["None"], 5, True, [5], ["a.b.A"],
    ),
    "min_num_params": (0, 5, 2000, -5, "2000", "1e8", None, "", 1.5, 2000.0, -1.5, True, False, "None", [1]),
    "state_dict_type": (*STATE_DICTS, None, 1, 2, 3, 4, 0, True, 1.0, []), "forward_prefetch": JSON_TRUTH,
    "backward_prefetch": (*PREFETCHES, None, 1, 2, True, False, []),
    "sharding_strategy": (*STRATEGIES, None, 1, 2), "xla": JSON_TRUTH,
    "xla_fsdp_v2": (True, False, "false", None), "xla_fsdp_grad_ckpt": (True, False, "false", None),
    **dict.fromkeys(
        (
            "cpu_offload", "cpu_ram_efficient_loading", "activation_checkpointing", "use_orig_params",
            "sync_module_states", "limit_all_gathers",
        ),
        JSON_TRUTH,
    ),
}  # fmt: skip
SWITCH: tuple[Any, ...] = (
    True, False, None, "", "true", "false", 1, 0, "1", [], {}, "full_shard", "shard_grad_op", "hybrid_shard",
    "hybrid_shard_zero2", "no_shard", "offload", "auto_wrap", "full_shard auto_wrap", "full_shard offload",
    "shard_grad_op auto_wrap offload", "full_shard,auto_wrap", "FULL_SHARD", "Full_Shard", "bogus", "None",
    ["full_shard"], ["full_shard", "auto_wrap"], ["hybrid_shard"], ["bogus"], ["full_shard auto_wrap"],
    "auto_wrap full_shard shard_grad_op", "zero3", "offload shard_grad_op",
)  # fmt: skip


def trainer_cases() -> Iterator[Case]:
    """Yield every key of ``fsdp_config`` and every value of ``fsdp``, and both precisions."""

    def case(context: str, key: str, value: Any, arguments: dict[str, Any]) -> Case:
        text = json.dumps({"output_dir": "out", **arguments}, indent=1)
        return Case("trainer", "json", context, key, repr(value), text, "args.json")

    for version in (1, 2, None):
        stated = {} if version is None else {"version": version}
        named = "no version" if version is None else f"version {version}"
        for key, values in FSDP_CONFIG.items():
            for value in values:
                if key == "version" and version is not None:
                    continue
                for context, around in _around_trainer(key):
                    for prefix in ("", "fsdp_"):
                        block = {**stated, "transformer_layer_cls_to_wrap": ["A"], **around}
                        block.pop(key, None)
                        block[prefix + key] = value
                        yield case(
                            f"{context}{named}", prefix + key, value, {"fsdp": True, "fsdp_config": block}
                        )
        for value in SWITCH:
            yield case(named, "fsdp", value, {"fsdp": value, "fsdp_config": {**stated}})
    for first, second in itertools.product(PRECISION, PRECISION):
        arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}
        arguments |= {name: value for name, value in (("bf16", first), ("fp16", second)) if value is not None}
        yield case("version 2", "bf16, fp16", (first, second), arguments)


PRECISION: tuple[Any, ...] = (None, True, False, "true", "false", 1, 0, "no", "")


def _around_trainer(key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", {}
    if key == "min_num_params":
        yield "by size, ", {"auto_wrap_policy": "SIZE_BASED_WRAP"}
    if key in ("activation_checkpointing", "transformer_layer_cls_to_wrap"):
        yield "nothing wrapped, ", {"auto_wrap_policy": "NO_WRAP"}
    if key == "sync_module_states":
        yield "RAM-efficient loading, ", {"cpu_ram_efficient_loading": True}


def judge_trainer(case: Case, folder: Path) -> Answer:
    """Read a case here and run it through TrainingArguments and the plugin."""
    path = folder / case.name
    path.write_text(case.text, encoding="utf-8")
    reading = read_settings(path, dialect="trainer")
    data = json.loads(case.text)
    stopped, settings = None, dict[str, Any]()
    try:
        precision = trainer_oracle.precision_of(data.get("bf16"), data.get("fp16"))
    except ValueError as error:
        return compare(case, reading, str(error), {})
    outcome = trainer_oracle.run_trainer(data["fsdp"], data["fsdp_config"], prepare=True)
    if isinstance(outcome, str):
        stopped = outcome
    elif outcome:
        settings = {**outcome, "mixed_precision": precision}
    return compare(case, reading, stopped, settings)


TUNER: Mapping[str, tuple[Any, ...]] = {
    "fsdp_version": (1, 2, "1", "2", 3, 0, "v2", 2.0, "2.0", None, "", True, False, " 2", "02", [2], "false"),
    "fsdp_state_dict_type": (*STATE_DICTS, None, 1, True, [], " SHARDED_STATE_DICT "),
    "fsdp_auto_wrap_policy": (*POLICIES, None, 0, True, False, []),
    "fsdp_transformer_layer_cls_to_wrap": (
        *CLASSES, None, ["A"], ["A", "B"], ["A,B"], [], [""], 5, True, False, {}, "Nope", "false",
    ),
    "context_parallel_size": (
        1, 2, 4, 3, 0, -1, "2", 2.0, "2.0", None, "", "two", True, False, " 2", [2], "None",
    ),
    "context_parallel_comm_strategy": (*ROTATIONS, None, True, " alltoall"),
    "mixed_precision": ("no", "fp16", "bf16", "fp8", "fp32", "BF16", None, "", False, True, "None", " bf16"),
    "num_processes": (1, 8, 0, "8", 8.0, None, "", "eight", True, "8.0"),
    "num_machines": (1, 2, "1", None, "", 1.0, "one"),
    **dict.fromkeys(
        (
            "fsdp_enable", "fsdp_reshard_after_forward", "fsdp_cpu_ram_efficient_loading", "fsdp_cpu_offload",
            "fsdp_activation_checkpointing", "fsdp_limit_all_gathers",
        ),
        JSON_TRUTH,
    ),
}  # fmt: skip


def simpletuner_cases() -> Iterator[Case]:
    """Yield every key of FSDP in ``config.json``, and as a flag."""
    base = {"model_family": "sdxl", "model_type": "full", "fsdp_enable": True, "num_processes": 8}
    for key, values in TUNER.items():
        for value in values:
            data = {**base, key: value}
            text = json.dumps(data, indent=1)
            yield Case("simpletuner", "json", "", key, repr(value), text, "config.json")
            if not isinstance(value, str):
                continue
            words = [f"--{name}={word}" for name, word in base.items() if name != key]
            line = f"simpletuner train {' '.join(words)} --{key}={_quoted(value)}\n"
            yield Case("simpletuner", "flags", "", key, repr(value), line, "run.args")
        flag = f"simpletuner train --model_family=sdxl --fsdp_enable --{key}\n"
        yield Case("simpletuner", "flags", "bare", key, "", flag, "run.args")


def judge_simpletuner(case: Case, folder: Path) -> Answer:
    """Read a case here and run it through SimpleTuner's parser and plugin."""
    if "fp8" in case.value:
        return Answer(case, "not judged", "SimpleTuner asks the device for fp8")
    dialect = "simpletuner" if case.form == "json" else "flags"
    reading = read_settings(case.text, dialect=dialect, consumer="simpletuner")
    outcome = simpletuner_oracle.run_simpletuner(case.text)
    if isinstance(outcome, str):
        return compare(case, reading, outcome, {})
    return compare(case, reading, None, outcome)


PROGRAMS = {
    "accelerate": (accelerate_cases, judge_accelerate),
    "trainer": (trainer_cases, judge_trainer),
    "simpletuner": (simpletuner_cases, judge_simpletuner),
}


def judge(program: str, *, every: int = 1, first: int = 0) -> list[Answer]:
    """Judge a program's cases, or each of so many from the ``first``."""
    cases, judged = PROGRAMS[program]
    logging.disable(logging.WARNING)  # the programs warn of what is tried here
    try:
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [judged(case, Path(name)) for case in itertools.islice(cases(), first, None, every)]
    finally:
        logging.disable(logging.NOTSET)


def summary(answers: list[Answer]) -> dict[str, Any]:
    """Return the counts of a program, the reasons of what is right by definition, and every wrong case."""
    kinds = Counter(answer.kind for answer in answers)
    forms = Counter((answer.case.form, answer.kind) for answer in answers)
    return {
        "cases": len(answers),
        **{kind.replace(" ", "_"): kinds[kind] for kind in KINDS},
        "forms": {
            form: {kind.replace(" ", "_"): forms[form, kind] for kind in KINDS if forms[form, kind]}
            for form in dict.fromkeys(answer.case.form for answer in answers)
        },
        "definitions": dict(sorted(Counter(a.why for a in answers if a.kind == "by definition").items())),
        "wrong_cases": [f"{answer.case}: {answer.why}" for answer in answers if answer.kind == "wrong"],
    }


KINDS = ("agrees", "by definition", "not judged", "wrong")


def main() -> int:
    """Judge the programs and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program", nargs="*", help=f"of {', '.join(PROGRAMS)}; default: all that are here")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    here = [name for name in PROGRAMS if name != "simpletuner" or simpletuner_oracle.folder()]
    programs = {name: summary(judge(name)) for name in options.program or here}
    result = {
        "benchmark": "config-grids",
        "python": platform.python_version(),
        "versions": {
            **{name: metadata.version(name) for name in ("accelerate", "transformers", "torch", "PyYAML")},
            **({"simpletuner": "4.8.0"} if simpletuner_oracle.folder() else {}),
        },
        "programs": programs,
        "by_definition": {
            code if isinstance(code, str) else f"{code[0]} {code[1]}": why
            for code, why in BY_DEFINITION.items()
        },
    }
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return 1 if any(item["wrong"] for item in programs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
