"""SimpleTuner's flags, from its ``config.json`` or from a command line.

SimpleTuner 4.8.0 was run for the rules: ``mapping_to_cli_args``, which makes arguments of a file, its parser
and ``Trainer._load_fsdp_plugin``. Its page promises forgiving spellings; its parser refuses most of them, so
that they are findings with a fix when SimpleTuner itself will read the file.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import (
    ACCELERATE_ONLY,
    LAUNCH,
    MESH,
    WRITTEN,
    check_expressible,
    values_written,
)
from fsdptool.config.dialects.accelerate.plugin import is_class_name, whole
from fsdptool.config.dialects.protocol import Dialect, LintContext
from fsdptool.config.rules.mesh import refuse_context_size
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, effective_entries, to_python

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext, Rewriter, Target
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document, Node
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.sharding import FsdpSettings

NAME = "simpletuner"

KEYS = {
    "fsdp_enable": "enable",
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_state_dict_type": "state_dict_type",
    "fsdp_cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "fsdp_cpu_offload": "cpu_offload",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "fsdp_limit_all_gathers": "limit_all_gathers",
    "fsdp_auto_wrap_policy": "wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap": "wrap_classes",
    "context_parallel_size": "cp",
    "context_parallel_comm_strategy": "cp_comm_strategy",
    "num_processes": "num_processes",
    "num_machines": "num_machines",
    "mixed_precision": "mixed_precision",
}
OWN_FLAGS = frozenset([
    "fsdp_enable", "context_parallel_size", "context_parallel_comm_strategy", "fsdp_cpu_offload",
    "model_family",
])  # fmt: skip
"""Flags that no other program has."""
DEFAULTS: dict[str, Any] = {
    "fsdp_version": 2,
    "reshard_after_forward": True,
    "state_dict_type": "sharded",
    "cpu_ram_efficient_loading": False,
    "cpu_offload": False,
    "activation_checkpointing": False,
    "wrap_policy": "transformer",
    "wrap_classes": (),
    "cp": 1,
    "cp_comm_strategy": "allgather",
    "num_processes": None,
    "num_machines": 1,
    "mixed_precision": "bf16",
}
WITHOUT = tuple(name for name in MESH if name not in ("dp_replicate", "dp_shard", "cp"))
"""Dimensions that SimpleTuner does not have."""
CANNOT = (
    *ACCELERATE_ONLY, "dp_replicate", *WITHOUT, "min_num_params",
    *(name for name in LAUNCH if name != "num_processes"),
)  # fmt: skip

SPELLINGS = {
    "state_dict_type": spelling.STATE_DICT_TYPES,
    "wrap_policy": spelling.WRAP_POLICIES,
    "cp_comm_strategy": spelling.ROTATIONS,
    "mixed_precision": spelling.PRECISIONS,
}
"""Settings with choices, and what people write for each."""


def mapping(settings: FsdpSettings) -> dict[str, Any]:
    """Return the settings as SimpleTuner's flags.

    Raises:
        ConfigError: SimpleTuner has no flag for a setting.
    """
    check_expressible(settings, NAME, CANNOT)
    mesh = settings.mesh
    if mesh.cp > 1 and (settings.num_processes is None) != (mesh.dp_shard is None):
        raise ConfigError(f"{NAME} cannot express dp_shard = {mesh.dp_shard} without num_processes")
    if (
        mesh.cp > 1
        and settings.num_processes is not None
        and mesh.cp * (mesh.dp_shard or 1) != settings.num_processes
    ):
        raise ConfigError(f"{NAME} cannot express dp_shard = {mesh.dp_shard}: it is what cp leaves")
    if mesh.cp == 1 and mesh.dp_shard is not None:
        raise ConfigError(f"{NAME} cannot express dp_shard = {mesh.dp_shard}: all processes shard")
    written = {key: name for key, name in KEYS.items() if name != "num_machines"}
    return {"fsdp_enable": True, **values_written(settings, written)}


class SimpleTuner(Dialect):
    """SimpleTuner's ``config.json``."""

    name = "simpletuner"
    consumers = ("simpletuner",)
    cannot = CANNOT

    def parse(self, source: SourceText) -> Document | None:
        """Read JSON whatever the file is called."""
        from fsdptool.files.tree import parse_json_source

        return parse_json_source(source) if source.text.lstrip()[:1] == "{" else None

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is SimpleTuner's."""
        keys = {str(entry.key).lstrip("-").replace("-", "_").lower() for entry in root.entries}
        own = {"model_flavour", "data_backend_config", "model_type", "lora_rank"}
        if "model_family" in keys and keys & own:
            return 1.0
        return 0.95 if keys & {"fsdp_enable", "context_parallel_comm_strategy"} else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        read(lint)

    def describes(self, root: Node) -> float:
        """Return :meth:`matches`, and whether the variables are those of versions before 2.0.

        The first versions trained whole models alone, and had no ``MODEL_TYPE``.
        """
        keys = {str(entry.key) for entry in root.entries}
        old = {"MODEL_TYPE", "RESOLUTION_TYPE"} & keys and {"MODEL_NAME", "TRAIN_BATCH_SIZE"} <= keys
        return 1.0 if old or {"MODEL_TYPE", "TRAIN_BATCH_SIZE"} <= keys else self.matches(root)

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line starts SimpleTuner."""
        if launch.program == "simpletuner" or launch.script.startswith("simpletuner."):
            return 1.0
        return 1.0 if "model_family" in names and names & {"model_type", "data_backend_config"} else 0.0

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the run of a file or a command line."""
        from fsdptool.config.dialects.simpletuner.run import describe

        return describe(file)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the FSDP part of SimpleTuner's ``config.json``.

        Raises:
            ConfigError: As :func:`mapping`.
        """
        return json.dumps(mapping(settings), indent=2) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Write version 2 and what version 1 meant."""
        for key, value in (
            ("fsdp_version", 2),
            ("fsdp_reshard_after_forward", target.reshard),
            ("fsdp_state_dict_type", WRITTEN["state_dict_type"][target.state_dict]),
        ):
            dashed = f"--{key}" if steps.root.get(f"--{key}") is not None else key
            steps.put(None, dashed, value)
        return {}


def read(lint: LintContext) -> None:
    """Read a ``config.json`` into facts."""
    read_flags(lint, collect(lint, KEYS))


def collect(lint: LintContext, known: dict[str, str]) -> dict[str, Entry]:
    """Return the entries by normalised flag name; unknown FSDP-like names become findings."""
    chosen: dict[str, Entry] = {}
    strict = lint.consumer.name == "simpletuner"
    for entry in effective_entries(lint.root):
        written = str(entry.key)
        key = written.lstrip("-").replace("-", "_").lower()
        if key in known:
            chosen[key] = entry
            if written.lstrip("-") != key:
                lint.report(
                    "FSD206" if strict else "FSD217",
                    f"{written} means {key}"
                    + ("; SimpleTuner 4.8.0 refuses this spelling" if strict else ""),
                    entry,
                    edits=_rename(lint, entry, key),
                    fix=f"write {key}",
                )
        elif key.startswith(("fsdp", "context_parallel", "parallelism_config")):
            near = spelling.nearest(key, known, cutoff=0.7)
            prefixes = [name for name in known if name.startswith(key)]
            meant = prefixes[0] if len(prefixes) == 1 else near
            if len(prefixes) == 1 and meant is not None:
                # argparse takes unambiguous prefixes.
                chosen[meant] = entry
                lint.report(
                    "FSD217",
                    f"{written} means {meant}",
                    entry,
                    edits=_rename(lint, entry, meant),
                    fix=f"write {meant}",
                )
                continue
            report_unknown(lint, entry, meant if meant not in chosen else None)
    return chosen


def report_unknown(lint: LintContext, entry: Entry, meant: str | None) -> None:
    """Report a flag that the program's parser refuses; ``meant`` is the one to write instead, or None."""
    lint.ignore(entry, "unknown flag")
    lint.report(
        "FSD201",
        f"unknown flag {entry.key}" + (f": did you mean {meant}?" if meant else ""),
        entry,
        edits=_rename(lint, entry, meant) if meant else None,
        safe=False,
        fix=f"write {meant}",
        changes={"*": to_python(entry.node)},
    )


def _rename(lint: LintContext, entry: Entry, key: str) -> Any:
    if lint.document.language == "flags":
        return lint.editor.rename(entry, key)
    written = str(entry.key)
    dashes = written[: len(written) - len(written.lstrip("-"))]
    return lint.editor.rename(entry, dashes + key)


def read_flags(lint: LintContext, chosen: dict[str, Entry]) -> None:
    """Read normalised flags into facts, with SimpleTuner's defaults and checks."""
    lint.names = {canonical: key for key, canonical in KEYS.items()}
    parsed: dict[str, Any] = {}
    for key, name in KEYS.items():
        entry = chosen.get(key)
        if entry is None:
            continue
        if _argument(lint, to_python(entry.node)) is _Passed.SKIPPED:
            _skipped(lint, key, name, entry)
        else:
            parsed[name] = read_value(lint, key, name, entry)
    enabled = bool(parsed.pop("enable", False))
    lint.fsdp_entry = chosen.get("fsdp_enable")
    for name, default in DEFAULTS.items():
        key = next(key for key, canonical in KEYS.items() if canonical == name)
        if name in parsed:
            lint.set(name, parsed[name], entry=chosen[key])
        else:
            lint.set(name, default)
    for name in WITHOUT:
        lint.set(name, 1)
    _deepspeed(lint, enabled)
    if not enabled:
        _without_fsdp(lint, chosen)
        return
    _topology(lint, "dp_shard", "dp_replicate")
    _limits(lint)


def _deepspeed(lint: LintContext, enabled: bool) -> None:
    entry = lint.root.get("deepspeed_config") or lint.root.get("deepspeed") or lint.root.get("use_deepspeed")
    if enabled and entry is not None and to_python(entry.node) not in (None, "", False, "None"):
        lint.deepspeed = True


def _without_fsdp(lint: LintContext, chosen: dict[str, Entry]) -> None:
    lint.runs_fsdp = False
    lint.configures_fsdp = False
    size = lint.get("cp") or 1
    if size > 1:
        _topology(lint, "dp_replicate", "dp_shard")
        if not refuse_context_size(lint, size, lint.get("num_processes")):
            lint.report(
                "FSD305",
                "Context parallelism requires FSDP2.",
                chosen.get("context_parallel_size"),
                severity="warning",
                help="SimpleTuner 4.8.0 runs replicas instead; fsdp_enable shards them",
            )
        return
    entry = chosen.get("fsdp_enable")
    others = [key for key in chosen if key.startswith("fsdp_") and key != "fsdp_enable"]
    if others:
        for key in others:
            lint.ignore(chosen[key], "fsdp_enable is not set")
    lint.report("FSD113", "fsdp_enable is not set: the run does not use FSDP", entry)


def _topology(lint: LintContext, rest: str, other: str) -> None:
    """The sizes SimpleTuner derives: what context parallelism leaves of the processes goes to ``rest``."""
    size, processes = lint.get("cp") or 1, lint.get("num_processes")
    lint.set(other, 1)
    lint.set(rest, None)
    if isinstance(processes, int) and 1 < size <= processes and processes % size == 0:
        lint.set(rest, processes // size)


class _Passed(Enum):
    """What becomes of a value on its way to the parser, other than text."""

    SKIPPED = "the file's loader leaves the key out"
    BARE = "the flag stands alone"


_WHOLE = ("fsdp_version", "cp", "num_processes", "num_machines")
"""Flags with ``type=int``; all others take truths, choices or class names."""
_TRUE, _FALSE = frozenset({"1", "true", "yes", "y", "on"}), frozenset({"0", "false", "no", "n", "off"})


def _argument(lint: LintContext, value: Any) -> str | _Passed:
    """Return the text that the parser sees, as ``mapping_to_cli_args`` makes it of a value in JSON."""
    if lint.document.language == "flags":
        return value if isinstance(value, str) else _Passed.BARE
    if isinstance(value, bool):
        return _Passed.BARE if value else "false"
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return _Passed.BARE if value.strip().lower() == "true" else _Passed.SKIPPED
    if isinstance(value, list):  # one argument for each; the last one counts
        items = [text for text in (str(item).strip() for item in value) if text]
        return items[-1] if items else _Passed.SKIPPED
    text = "" if value is None or isinstance(value, dict) else str(value).strip()
    return text or _Passed.SKIPPED


def _taken(name: str, argument: str | _Passed) -> Any:
    """Return what the parser makes of an argument, or None where it refuses it."""
    if isinstance(argument, _Passed):
        return True if name not in (*_WHOLE, *SPELLINGS, "wrap_classes") else None
    if name in _WHOLE:
        number = whole(argument)
        return None if name == "fsdp_version" and number not in (1, 2) else number
    if name in SPELLINGS:
        written = WRITTEN.get(name, {})
        choice = next((choice for choice in SPELLINGS[name] if written.get(choice, choice) == argument), None)
        return None if choice == "local" else choice
    word = argument.strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def read_value(lint: LintContext, key: str, name: str, entry: Entry) -> Any:
    """Read one flag as SimpleTuner's parser does, or as it was meant; what was changed is a finding."""
    value = to_python(entry.node)
    argument = _argument(lint, value)
    if name == "wrap_classes" and isinstance(argument, str):
        return _classes(lint, key, entry, value, argument)
    taken = _taken(name, argument)
    if name == "cp" and (taken is None or taken < 1):
        return _context_size(lint, entry, value, taken)
    if taken is not None:
        return taken
    result, shown, choices = _meant(name, value)
    if result is None:
        return _refused(lint, key, name, entry, value, choices)
    _report_spelling(lint, key, entry, value, shown)
    return result


def _report_spelling(lint: LintContext, key: str, entry: Entry, value: Any, shown: Any) -> None:
    strict = lint.consumer.name == "simpletuner"
    lint.report_value(
        "FSD206" if strict else "FSD217",
        f"{key} {value!r} means {shown}" + ("; SimpleTuner 4.8.0 refuses this spelling" if strict else ""),
        entry,
        edits=lint.editor.replace(entry.node, shown if lint.document.language != "flags" else str(shown)),
        fix=f"write {shown}",
    )


def _meant(name: str, value: Any) -> tuple[Any, Any, str]:
    """Return the only setting that a refused value can mean, how it is written, and the choices."""
    if name in _WHOLE:
        number = spelling.integer(value)
        version = name == "fsdp_version"
        good = number if number in (1, 2) or not version else None
        return good, good, "1 or 2" if version else "a whole number"
    if name in SPELLINGS:
        written = WRITTEN.get(name, {})
        choice = spelling.choice(value, SPELLINGS[name])
        choice = None if choice == "local" or isinstance(value, bool) else choice
        choices = [written.get(item, item) for item in SPELLINGS[name] if item != "local"]
        return choice, written.get(choice or "", choice), ", ".join(choices)
    if name == "wrap_classes":
        return None, None, "class names"
    truth = spelling.boolean(value)
    return truth, truth, "true or false"


def _skipped(lint: LintContext, key: str, name: str, entry: Entry) -> None:
    """A key that the loader leaves out, so that the default stays: null, blank text, and the text false."""
    value = to_python(entry.node)
    default = DEFAULTS.get(name, name == "limit_all_gathers")
    lint.ignore(entry, "SimpleTuner skips a key with this value: the default stays")
    if isinstance(value, str) and value.strip() and default is not False:
        shown = str(default).lower() if default is True else default
        lint.report_value(
            "FSD337",
            f"{key} {value!r} is text, which SimpleTuner skips: the default, {shown}, stays",
            entry,
            False if default is True else None,
            safe=False,
            changes={name: False},
        )


def _classes(lint: LintContext, key: str, entry: Entry, value: Any, argument: str) -> tuple[str, ...]:
    """Split at commas, trimmed; a name that the model lacks is dropped later with a warning."""
    taken = tuple(dict.fromkeys(filter(None, (part.strip() for part in argument.split(",")))))
    taken = () if argument in ("", "None") else taken
    meant = spelling.classes(value)
    if meant == taken and all(map(is_class_name, taken)):
        return taken
    shown = ",".join(meant or ())
    strict = lint.consumer.name == "simpletuner"
    edits = lint.editor.replace_entry(entry, shown) if meant else None
    if not meant:
        on_line = lint.document.language == "flags"
        edits = lint.editor.replace(entry.node, "None") if on_line else lint.editor.remove(lint.root, entry)
    lint.report_value(
        "FSD214" if strict else "FSD217",
        f"{key} {value!r} means {shown or 'no class'}"
        + (f"; SimpleTuner 4.8.0 looks for {' and '.join(map(repr, taken)) or 'none'}" if strict else ""),
        entry,
        edits=edits,
        fix=f"write {shown}" if shown else f"remove {key}",
    )
    return meant or ()


def _context_size(lint: LintContext, entry: Entry, value: Any, taken: int | None) -> int:
    if taken is None:
        meant = spelling.integer(value)
        meant = meant if meant is not None and meant >= 1 else None
        message = f"Context parallel size must be an integer, got {value!r}."
        if meant is not None and lint.consumer.name != "simpletuner":
            return meant
        lint.report_value("FSD306", message, entry, meant, safe=True)
        return meant or 1
    lint.report_value("FSD306", "Context parallel size must be greater than 0 when specified.", entry)
    return 1


def _refused(lint: LintContext, key: str, name: str, entry: Entry, value: Any, choices: str) -> Any:
    if name == "cp_comm_strategy":
        lint.report_value(
            "FSD307",
            f"Unsupported context parallel rotation {value!r}. Valid options are 'allgather' and 'alltoall'.",
            entry,
        )
    elif name == "wrap_policy" and "." in str(value):
        lint.report_value("FSD348", f"{key} {value!r} is a dotted path, which programs do not import", entry)
    else:
        empty = value in ("", None) or str(value).strip() == ""
        edits = None
        if empty and lint.document.language != "flags":
            edits = lint.editor.remove(lint.root, entry)
        lint.report_value(
            "FSD206", f"{key} {value!r} is not {choices}", entry, edits=edits, fix=f"remove {key}"
        )
    return DEFAULTS.get(name)


def _limits(lint: LintContext) -> None:
    """What SimpleTuner 4.8.0 refuses or swaps under FSDP2."""
    root = lint.root

    def text(key: str) -> str:
        entry = root.get(key) or root.get(f"--{key}")
        return "" if entry is None else str(to_python(entry.node)).lower()

    def on(key: str) -> bool:
        return bool(spelling.boolean(text(key)) if text(key) else False)

    optimizer = text("optimizer")
    if optimizer.startswith(("optimi-", "bnb-")) or optimizer == "soap":
        lint.report_value(
            "FSD345",
            f"SimpleTuner swaps {optimizer} for adamw_schedulefree under FSDP2",
            root.get("optimizer"),
        )
    if "quanto" in text("base_model_precision"):
        lint.report_value(
            "FSD346", "quanto precision and FSDP2 cannot be combined", root.get("base_model_precision")
        )
    if on("ema_cpu_only") and on("use_ema"):
        lint.report("FSD349", "ema_cpu_only cannot be used with FSDP2", root.get("ema_cpu_only"))
    if lint.get("cpu_offload"):
        if on("optimizer_release_gradients") and optimizer.startswith("optimi"):
            lint.report(
                "FSD350",
                "fsdp_cpu_offload cannot be combined with optimizer_release_gradients",
                root.get("optimizer_release_gradients"),
            )
        if text("optimizer_cpu_offload_method") == "torchao":
            lint.report_value(
                "FSD350",
                "fsdp_cpu_offload cannot be combined with optimizer_cpu_offload_method=torchao",
                root.get("optimizer_cpu_offload_method"),
            )
