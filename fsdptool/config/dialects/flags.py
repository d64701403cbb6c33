"""Command lines: ``accelerate launch`` flags, or SimpleTuner's, in forgiving spellings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import LEGACY_DEFAULTS, MESH, STRATEGY_NAMES, check_expressible
from fsdptool.config.context import LintContext
from fsdptool.config.dialects import accelerate
from fsdptool.config.dialects.accelerate.keys import DETAILS, FSDP_KEYS, PARALLELISM_KEYS
from fsdptool.config.dialects.accelerate.launch import read_details, report_size
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.dialects.simpletuner import reader as simpletuner
from fsdptool.config.shell import parse_flags, sniff
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, to_python
from fsdptool.records.sharding import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document, Node
    from fsdptool.records.sharding import FsdpSettings

CANNOT = ("ignored_modules", "use_cpu")
_SIMPLETUNER = frozenset([
    "fsdp_enable", "context_parallel_size", "context_parallel_comm_strategy", "fsdp_cpu_offload",
    "model_family",
])  # fmt: skip


NAME = "flags"

_TOP = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "mixed_precision", "gpu_ids", "rdzv_backend", "debug",
)  # fmt: skip
KEYS: dict[str, str] = {
    **FSDP_KEYS,
    **PARALLELISM_KEYS,
    **DETAILS,
    **{key: key for key in _TOP},
    "use_fsdp": "use_fsdp",
    "use_parallelism_config": "use_parallelism_config",
    "use_deepspeed": "use_deepspeed",
    "multi_gpu": "multi_gpu",
    "cpu": "cpu",
    "config_file": "config_file",
}
_BOOLEAN_FLAGS = ("use_fsdp", "use_parallelism_config", "use_deepspeed", "multi_gpu", "cpu", "debug")
DEFAULTS: dict[str, Any] = {
    "fsdp_version": 1,
    "wrap_policy": "none",
    "wrap_classes": (),
    "min_num_params": None,
    "state_dict_type": None,
    "cpu_offload": False,
    "cpu_ram_efficient_loading": True,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "mixed_precision": "no",
    "num_processes": None,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "rdzv_backend": "static",
    "gpu_ids": None,
    "debug": False,
}
"""accelerate 1.15 ``launch_command_parser``; a state_dict_type of None follows the version."""


def read_accelerate(lint: LintContext) -> None:
    """Read the flags of ``accelerate launch`` into facts."""
    lint.names = {canonical: key for key, canonical in KEYS.items()}
    chosen = simpletuner.collect(lint, KEYS)
    details = {name: chosen.pop(key) for key, name in DETAILS.items() if key in chosen}
    parsed = {name: _value(lint, key, name, chosen[key]) for key, name in KEYS.items() if key in chosen}
    fsdp = any(key.startswith("fsdp_") for key in chosen)
    if parsed.get("use_deepspeed") and (parsed.get("use_fsdp") or fsdp):
        lint.report("FSD304", "FSDP and DeepSpeed cannot be enabled simultaneously.", chosen["use_deepspeed"])
    if not parsed.get("use_fsdp"):
        if not fsdp:
            lint.runs_fsdp = False
            lint.configures_fsdp = False
            lint.report("FSD113", "the command line does not configure FSDP")
            return
        first = next(chosen[key] for key in chosen if key.startswith("fsdp_"))
        if "config_file" not in chosen:
            lint.report(
                "FSD330",
                "FSDP flags have no effect without --use_fsdp",
                first,
                severity="warning",
                help="add --use_fsdp",
            )
    version = parsed.get("fsdp_version") or 1
    defaults = _defaults(parsed, version)
    by_name = {name: chosen[key] for key, name in KEYS.items() if key in chosen}
    mesh = bool(parsed.get("use_parallelism_config"))
    lint.parallelism_block = lint.root if mesh else None
    for name in MESH:
        defaults[name] = 1 if mesh or name != "dp_shard" else None
        if not mesh and name in by_name:
            lint.ignore(by_name[name], "read with --use_parallelism_config only")
            parsed.pop(name)
    defaults["cp_comm_strategy"] = "allgather"
    _record(lint, parsed, by_name, version)
    for name, value in defaults.items():
        if name not in lint.facts:
            lint.set(name, value)
    lint.set("use_cpu", bool(parsed.get("cpu")))
    if mesh:
        read_details(lint, details, written_in="flags")
    for entry in () if mesh else details.values():
        lint.ignore(entry, "read with --use_parallelism_config only")


def _record(lint: LintContext, parsed: dict[str, Any], by_name: dict[str, Entry], version: int) -> None:
    for name, value in parsed.items():
        if (name in _BOOLEAN_FLAGS and name != "debug") or name == "config_file":
            continue
        if name in (LEGACY_DEFAULTS if version == 2 else ("reshard_after_forward",)):
            lint.ignore(by_name[name], "not read under this version")
            continue
        if name == "min_num_params" and parsed.get("wrap_policy") != "size":
            lint.ignore(by_name[name], "read with SIZE_BASED_WRAP only")
            continue
        lint.set(name, value, entry=by_name[name])


def _defaults(parsed: dict[str, Any], version: int) -> dict[str, Any]:
    defaults = dict(DEFAULTS)
    defaults["state_dict_type"] = "sharded" if version == 2 else "full"
    if parsed.get("wrap_policy") == "size":
        defaults["min_num_params"] = 100_000_000
    if version == 2:
        defaults["reshard_after_forward"] = True
    else:
        defaults.update(LEGACY_DEFAULTS)
    return defaults


def _value(lint: LintContext, key: str, name: str, entry: Entry) -> Any:
    value = to_python(entry.node)
    if name == "sharding_strategy":
        strategy = spelling.choice(value, spelling.STRATEGIES)
        if strategy is None:
            lint.report_value("FSD206", f"{key} {value!r} is not one of {', '.join(STRATEGY_NAMES)}", entry)
        return strategy or "full_shard"
    if name == "backward_prefetch":
        text = str(value).upper()
        return None if text in ("NO_PREFETCH", "NONE") else text
    if name in ("reshard_after_forward",) and spelling.boolean(value) is None:
        strategy = spelling.choice(value, spelling.STRATEGIES)
        meant = {"full_shard": True, "shard_grad_op": False}.get(strategy or "")
        lint.report_value(
            "FSD322",
            f"{key} must be true or false, not {value!r}",
            entry,
            str(meant).lower() if meant is not None else None,
        )
        return meant if meant is not None else True
    if name == "config_file":
        return value
    if name in MESH:
        size = spelling.integer(value)
        if size is None or size < 1:
            report_size(lint, key, name, entry)
            return 1
        return size
    return simpletuner.read_value(lint, key, name, entry)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if not text or any(character.isspace() or character in "'\"\\#" for character in text):
        raise ConfigError(f"{NAME} cannot express the value {text!r}")
    return text


class Flags(Dialect):
    """A command line; SimpleTuner's are told by the flags that only it has."""

    name = "flags"
    consumers = ("accelerate", "fsdptool", "simpletuner")
    cannot = CANNOT
    in_place = False

    def sniff(self, text: str) -> bool:
        """Whether the text is a command line."""
        return sniff(text) == "flags"

    def parse(self, source: SourceText) -> Document:
        """Read the flags."""
        return parse_flags(source.text)

    def consumer_of(self, root: Node) -> str:
        """Return ``simpletuner`` for its flags."""
        names = {str(entry.key).lstrip("-").replace("-", "_").lower() for entry in root.entries}
        return "simpletuner" if names & _SIMPLETUNER and "use_fsdp" not in names else "accelerate"

    def read(self, lint: LintContext) -> None:
        """Read the flags into facts."""
        from fsdptool.config.dialects.simpletuner import reader as simpletuner

        if lint.consumer.name == "simpletuner":
            lint.migration_refusal = "change the command line to --fsdp_version 2 by hand"
        if self.consumer_of(lint.root) == "simpletuner":
            simpletuner.read(lint)
        else:
            read_accelerate(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return ``accelerate launch`` flags, one per line.

        Raises:
            ConfigError: accelerate has no flag for a setting.
        """
        check_expressible(settings, NAME, CANNOT)
        document = accelerate.mapping(settings)
        lines = ["--use_fsdp"]
        for key, value in document["fsdp_config"].items():
            lines.append(f"--{key} {_word(value)}")
        mesh = document.get("parallelism_config")
        if mesh:
            lines.append("--use_parallelism_config")
            lines.extend(f"--{key} {_word(value)}" for key, value in mesh.items())
        for key in (
            "mixed_precision",
            "num_processes",
            "num_machines",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "gpu_ids",
            "rdzv_backend",
        ):
            if key in document:
                lines.append(f"--{key} {_word(document[key])}")
        if settings.debug:
            lines.append("--debug")
        return " \\\n".join(lines) + "\n"
