"""SimpleTuner's flags, from its ``config.json`` or from a command line, in forgiving spellings.

Read, not run: SimpleTuner 4.8.0. Its page promises forgiving spellings; its parser refuses most of
them, so that they are findings with a fix when SimpleTuner itself will read the file.
"""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import MESH, WRITTEN
from fsdptool.config.checks.mesh import refuse_context_size
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.simpletuner import _TABLES, _TEXTS, DEFAULTS, KEYS, WITHOUT
from fsdptool.files.tree import Entry, effective_entries, to_python


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
        if entry is not None:
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
    if enabled and entry is not None and to_python(entry.node):
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


def read_value(lint: LintContext, key: str, name: str, entry: Entry) -> Any:
    """Read one flag in any spelling; what was changed is a finding."""
    value = to_python(entry.node)
    shown: Any
    if name == "cp":
        return _context_size(lint, key, entry, value)
    if name in (
        "fsdp_version",
        "num_processes",
        "num_machines",
        "min_num_params",
        "machine_rank",
        "main_process_port",
        *MESH,
    ):
        result: Any = spelling.integer(value)
        shown = result
        exact = isinstance(value, int) or str(value) == str(result)
        if name == "fsdp_version" and result not in (1, 2):
            result = None
        choices = "1 or 2" if name == "fsdp_version" else "a whole number"
    elif name == "wrap_classes":
        result = spelling.classes(value)
        shown = ",".join(result) if result else None
        exact = result is not None and (not result or value == shown or "".join(str(value).split()) == shown)
        choices = "class names"
    elif name in _TABLES:
        result = spelling.choice(value, _TABLES[name])
        shown = WRITTEN.get(name, {}).get(result, result) if result else None
        exact = value == shown
        choices = ", ".join(WRITTEN[name].values() if name in WRITTEN else _TABLES[name])
    elif name in _TEXTS:
        return None if value is None else str(value)
    else:
        result = spelling.boolean(True if value is None else value)
        shown = result
        exact = result is not None
        choices = "true or false"
    if result is None:
        return _refused(lint, key, name, entry, value, choices)
    if not exact:
        strict = lint.consumer.name == "simpletuner"
        written = shown if lint.document.language != "flags" else str(shown)
        lint.report_value(
            "FSD206" if strict else "FSD217",
            f"{key} {value!r} means {shown}"
            + ("; SimpleTuner 4.8.0 refuses this spelling" if strict else ""),
            entry,
            edits=lint.editor.replace(entry.node, written),
            fix=f"write {shown}",
        )
    return result


def _context_size(lint: LintContext, key: str, entry: Entry, value: Any) -> int:
    size = spelling.integer(value)
    if size is None:
        lint.report_value("FSD306", f"Context parallel size must be an integer, got {value!r}.", entry)
        return 1
    if size < 1:
        lint.report_value("FSD306", "Context parallel size must be greater than 0 when specified.", entry)
        return 1
    return size


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
