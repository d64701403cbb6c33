"""Command lines: those of ``accelerate launch``, and SimpleTuner's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import MESH, STRATEGY_NAMES, WRITTEN, check_expressible
from fsdptool.config.dialects import accelerate, simpletuner
from fsdptool.config.dialects.accelerate import plugin
from fsdptool.config.dialects.accelerate.keys import DETAILS, FSDP_KEYS, PARALLELISM_KEYS
from fsdptool.config.dialects.accelerate.launch import read_details, read_rotation, read_top, report_size
from fsdptool.config.dialects.protocol import Dialect, LintContext
from fsdptool.config.dialects.simpletuner import OWN_FLAGS
from fsdptool.config.shell import is_variable, parse_flags, sniff
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, effective_entries
from fsdptool.records.sharding import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document, Node
    from fsdptool.records.sharding import FsdpSettings

CANNOT = ("ignored_modules", "use_cpu")
NAME = "flags"

_WHOLE = (
    "num_processes", "num_machines", "machine_rank", "main_process_port", "fsdp_min_num_params",
    *(key for key, name in PARALLELISM_KEYS.items() if name in MESH),
)  # fmt: skip
"""Flags of ``accelerate launch`` (1.15) with ``type=int``."""
_CHOICES = {
    "fsdp_version": ("1", "2"),
    "mixed_precision": ("no", "fp16", "bf16", "fp8"),
    "parallelism_config_cp_backend": ("torch",),
    "parallelism_config_sp_backend": ("deepspeed",),
}
_SWITCHES = ("use_fsdp", "use_parallelism_config", "use_deepspeed", "multi_gpu", "cpu", "tpu", "debug")
"""Flags with ``action="store_true"``."""
_TEXTS = ("main_process_ip", "gpu_ids", "rdzv_backend", "config_file")
_FSDP = {key: name for key, name in FSDP_KEYS.items() if name != "ignored_modules"}
KEYS: dict[str, str] = {
    **_FSDP,
    **PARALLELISM_KEYS,
    **DETAILS,
    **{key: key for key in (*_WHOLE[:4], "mixed_precision", *_TEXTS, *_SWITCHES)},
}
_LAUNCH: dict[str, Any] = {
    "num_machines": 1,
    "num_processes": None,
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "rdzv_backend": "static",
    "gpu_ids": None,
    "mixed_precision": "no",
}
"""What ``accelerate launch`` takes for the flags that are not given."""


def read_accelerate(lint: LintContext) -> None:
    """Read the flags of ``accelerate launch`` into facts: argparse first, then as its files are read."""
    lint.names = {canonical: key for key, canonical in KEYS.items()}
    written = _collect(lint)
    fsdp = [entry for key, entry in written.items() if key.startswith("fsdp_")]
    switched = _switches(lint, written, bool(fsdp))
    parsed = {key: _parsed(lint, key, entry) for key, entry in written.items()}
    chosen = {key: entry for key, entry in parsed.items() if entry is not None}
    if "use_fsdp" not in switched:
        if not fsdp:
            lint.runs_fsdp = False
            lint.configures_fsdp = False
            lint.report("FSD113", "the command line does not configure FSDP")
            return
        if "config_file" not in written:
            lint.report(
                "FSD330",
                "FSDP flags have no effect without --use_fsdp",
                fsdp[0],
                severity="warning",
                help="add --use_fsdp",
            )
    plugin.read_plugin(
        lint, {name: chosen[key] for key, name in _FSDP.items() if key in chosen}, lint.root, plugin.default
    )
    for key, default in _LAUNCH.items():
        entry = chosen.get(key)
        if entry is None:
            lint.set(key, default, entry=written.get(key))
        elif key == "mixed_precision":
            lint.set(key, entry.node.value, entry=entry)
        elif key == "rdzv_backend":
            lint.set(key, str(entry.node.value), entry=entry)
        else:
            read_top(lint, key, entry, int(entry.node.value) if key in _WHOLE else entry.node.value)
    if (lint.get("num_machines") or 1) > 1 and not written.keys() & {"machine_rank", "config_file"}:
        lint.report(
            "FSD205",
            "several machines without --machine_rank; the launcher stops with a TypeError",
            "num_machines",
            help="give --machine_rank on every machine, 0 on the first",
        )
    lint.set("debug", "debug" in switched)
    lint.set("use_cpu", "cpu" in switched)
    _mesh(lint, chosen, "use_parallelism_config" in switched)


def _mesh(lint: LintContext, chosen: dict[str, Entry], active: bool) -> None:
    lint.parallelism_block = lint.root if active else None
    for key, name in PARALLELISM_KEYS.items():
        entry = chosen.get(key)
        if name == "cp_comm_strategy":
            lint.set(name, "allgather")
        else:
            lint.set(name, 1 if active or name != "dp_shard" else None)
        if entry is None:
            continue
        if not active:
            lint.ignore(entry, "read with --use_parallelism_config only")
        elif name == "cp_comm_strategy":
            read_rotation(lint, entry.node.value, entry)
        elif int(entry.node.value) >= 1:
            lint.set(name, int(entry.node.value), entry=entry)
        else:
            report_size(lint, key, name, entry)
    details = {name: chosen[key] for key, name in DETAILS.items() if key in chosen}
    if active:
        read_details(lint, details, written_in="flags")
    for entry in () if active else details.values():
        lint.ignore(entry, "read with --use_parallelism_config only")


def _collect(lint: LintContext) -> dict[str, Entry]:
    """Return the entries by flag, spelled as accelerate's parser takes them: all ``_``, or all ``-``."""
    chosen: dict[str, Entry] = {}
    for entry in effective_entries(lint.root):
        written = str(entry.key)
        key = written.replace("-", "_").lower()
        if key in KEYS and written in (key, key.replace("_", "-")):
            chosen[key] = entry
        elif key in KEYS or key.startswith(("fsdp", "context_parallel", "parallelism_config")):
            simpletuner.report_unknown(lint, entry, key if key in KEYS else _meant(key, entry, chosen))
    return chosen


def _meant(key: str, entry: Entry, chosen: dict[str, Entry]) -> str | None:
    """Return the flag that an unknown one stands for: by its value, where only another flag takes that."""
    owners = [flag for flag, table in _OWN_VALUES.items() if str(entry.node.value).upper() in table]
    if owners:
        return next((flag for flag in owners if flag not in chosen), None)
    return spelling.nearest(key, KEYS, cutoff=0.7)


_OWN_VALUES = {
    "fsdp_auto_wrap_policy": frozenset(plugin.POLICIES),
    "fsdp_state_dict_type": frozenset(WRITTEN["state_dict_type"].values()),
    "fsdp_sharding_strategy": frozenset(STRATEGY_NAMES),
    "fsdp_backward_prefetch": frozenset({"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"}),
}
"""Values that belong to one flag alone."""


def _switches(lint: LintContext, written: dict[str, Entry], fsdp: bool) -> set[str]:
    """Return the switches that are given, and report those that exclude each other."""
    given = {key for key in _SWITCHES if key in written}
    kinds = [key for key in ("use_fsdp", "use_deepspeed", "multi_gpu", "cpu", "tpu") if key in given]
    if "use_deepspeed" in given and ("use_fsdp" in given or fsdp):
        lint.report(
            "FSD304", "FSDP and DeepSpeed cannot be enabled simultaneously.", written["use_deepspeed"]
        )
    elif len(kinds) > 1:
        names = " and ".join(f"--{key}" for key in kinds)
        lint.report("FSD206", f"{names} exclude each other; the launcher stops", written[kinds[1]])
    if "use_parallelism_config" in given and "use_fsdp" not in given:
        place = written["use_parallelism_config"]
        lint.report("FSD342", "--use_parallelism_config needs --use_fsdp and --fsdp_version 2", place)
    return given


def _parsed(lint: LintContext, key: str, entry: Entry) -> Entry | None:
    """Return an entry as argparse lets it pass: with what was meant where that is clear, or None."""
    value, bare = entry.node.value, entry.node.end == entry.node.start
    if key in _SWITCHES:
        if not bare:
            lint.report_value("FSD206", f"{key} takes no value; accelerate stops at {value!r}", entry)
        return entry
    if bare:
        lint.report("FSD206", f"{key} needs a value; accelerate's parser stops", entry)
        return None
    if is_variable(entry.node):
        lint.open[KEYS[key]] = entry
        return None
    if key in _CHOICES and value not in _CHOICES[key]:
        code, must = "FSD206", f"be one of {', '.join(_CHOICES[key])}"
        meant: Any = spelling.choice(value, spelling.PRECISIONS)
        meant = meant if key == "mixed_precision" else str(spelling.integer(value))
        meant = meant if meant in _CHOICES[key] else None
    elif key in _WHOLE and plugin.whole(value) is None:
        code, must = _CODES.get(key, "FSD205"), "be a whole number"
        meant = spelling.integer(value)
    else:
        return entry
    lint.report_value(code, f"{key} must {must}, not {value!r}", entry, meant)
    return None if meant is None else replace(entry, node=replace(entry.node, value=str(meant)))


_CODES = {"fsdp_min_num_params": "FSD213", "parallelism_config_cp_size": "FSD306"}


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
        return "simpletuner" if names & OWN_FLAGS and "use_fsdp" not in names else "accelerate"

    def read(self, lint: LintContext) -> None:
        """Read the flags into facts."""
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
