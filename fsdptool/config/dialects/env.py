"""Environment variables: what accelerate's plugin and ParallelismConfig read when no launcher sets them."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects import accelerate_values as values
from fsdptool.config.dialects.accelerate_keys import DETAILS
from fsdptool.config.dialects.accelerate_mesh import read_details, read_rotation, report_size
from fsdptool.config.dialects.accelerate_top import read_precision
from fsdptool.config.draft import Draft
from fsdptool.config.expressible import check_expressible
from fsdptool.config.facts import BOOLEANS, LAUNCH, LEGACY_DEFAULTS, WRITTEN
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, effective_entries
from fsdptool.records.settings import FsdpSettings, Mesh

NAME = "env"

KEYS = {
    "FSDP_VERSION": "fsdp_version",
    "FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward",
    "FSDP_AUTO_WRAP_POLICY": "wrap_policy",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "wrap_classes",
    "FSDP_MIN_NUM_PARAMS": "min_num_params",
    "FSDP_STATE_DICT_TYPE": "state_dict_type",
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "cpu_ram_efficient_loading",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation_checkpointing",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "activation_checkpointing_offload",
    "FSDP_IGNORED_MODULES": "ignored_modules",
    "FSDP_SHARDING_STRATEGY": "sharding_strategy",
    "FSDP_BACKWARD_PREFETCH": "backward_prefetch",
    "FSDP_FORWARD_PREFETCH": "forward_prefetch",
    "FSDP_USE_ORIG_PARAMS": "use_orig_params",
    "FSDP_SYNC_MODULE_STATES": "sync_module_states",
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
}
SIZES = {
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "dp_replicate",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "dp_shard",
    "PARALLELISM_CONFIG_TP_SIZE": "tp",
    "PARALLELISM_CONFIG_CP_SIZE": "cp",
    "PARALLELISM_CONFIG_SP_SIZE": "sp",
}
_DETAILS = {key.upper(): name for key, name in DETAILS.items()}
SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_DEEPSPEED")
CANNOT = tuple(name for name in LAUNCH if name not in ("use_cpu", "debug"))


def read(draft: Draft) -> None:
    """Read assignments into facts, as the plugin built without arguments would."""
    draft.extras["names"] = {canonical: key for key, canonical in (*KEYS.items(), *SIZES.items())}
    chosen = {str(entry.key): entry for entry in effective_entries(draft.root)}
    _unknown(draft, chosen)

    def on(key: str) -> bool:
        return key in chosen and bool(values.word_of_truth(chosen[key].node.value))

    if on("ACCELERATE_USE_DEEPSPEED") and on("ACCELERATE_USE_FSDP"):
        draft.report(
            "FSD304",
            "FSDP and DeepSpeed cannot be enabled simultaneously.",
            chosen["ACCELERATE_USE_DEEPSPEED"],
        )
    if not on("ACCELERATE_USE_FSDP"):
        first = next(iter(chosen.values()))
        draft.report(
            "FSD330",
            "ACCELERATE_USE_FSDP is not true: accelerate does not start FSDP",
            first,
            severity="warning",
            help="set ACCELERATE_USE_FSDP=true, or launch with an accelerate file",
        )
    values.read_version(draft, chosen.get("FSDP_VERSION"))
    version = draft.get("fsdp_version")
    for key, name in KEYS.items():
        if key == "FSDP_VERSION":
            continue
        _read(draft, key, name, chosen.get(key), version)
    _sizes(draft, chosen, on("ACCELERATE_USE_PARALLELISM_CONFIG"))


def _unknown(draft: Draft, chosen: dict[str, Entry]) -> None:
    known = {
        *KEYS,
        *SIZES,
        *SWITCHES,
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        *_DETAILS,
        "FSDP_CPU_OFFLOAD_PIN_MEMORY",
    }
    for key, entry in chosen.items():
        if key in known or not key.startswith(("FSDP_", "PARALLELISM_CONFIG_")):
            continue
        near = spelling.nearest(key, known, cutoff=0.75)
        near = next((item for item in known if item.lower() == (near or "").lower()), None)
        draft.ignore(entry, "no program reads it")
        draft.report(
            "FSD202",
            f"{key} is not read" + (f": did you mean {near}?" if near else ""),
            entry,
            edits=draft.editor.rename(entry, near) if near and near not in chosen else None,
            safe=False,
            fix=f"write {near}",
            changes={"*": near},
        )


def _read(draft: Draft, key: str, name: str, entry: Entry | None, version: int) -> None:
    unread = _unread(name, version)
    if unread is not None:
        if entry is not None:
            draft.ignore(entry, unread)
        return
    if entry is None:
        _default(draft, name, version)
        return
    if name == "sharding_strategy":
        draft.set(
            name,
            spelling.choice(entry.node.value, spelling.STRATEGIES) or "full_shard",
            entry=entry,
        )
    elif name == "backward_prefetch":
        text = str(entry.node.value).upper()
        draft.set(name, None if text == "NO_PREFETCH" else text, entry=entry)
    elif name == "reshard_after_forward":
        values.read_reshard(draft, entry, key)
    elif name == "wrap_classes":
        values.read_classes(draft, entry, draft.root)
    elif name in ("wrap_policy", "state_dict_type"):
        table = values.POLICIES if name == "wrap_policy" else values.STATE_DICTS
        values.read_choice(draft, key, name, entry, table, version)
    elif name == "mixed_precision":
        read_precision(draft, entry)
    elif name == "min_num_params":
        _threshold(draft, entry)
    elif name in BOOLEANS:
        truth = values.word_of_truth(entry.node.value)
        draft.set(name, bool(truth), entry=entry)
        if truth is None:
            draft.report(
                "FSD206", f"{key} must be true or false, not {entry.node.value!r}", entry, value=True
            )
    else:
        draft.set(name, entry.node.value, entry=entry)


def _unread(name: str, version: int) -> str | None:
    if name in LEGACY_DEFAULTS and version == 2:
        return "FSDP1 only; not read under version 2"
    if name == "reshard_after_forward" and version == 1:
        return "FSDP_SHARDING_STRATEGY decides under version 1"
    return None


def _threshold(draft: Draft, entry: Entry) -> None:
    if draft.get("wrap_policy") != "size":
        draft.ignore(entry, "read with SIZE_BASED_WRAP only")
        return
    try:
        draft.set("min_num_params", int(entry.node.value), entry=entry)
    except ValueError:
        meant = spelling.integer(entry.node.value)
        draft.set("min_num_params", meant or 0, entry=entry)
        draft.report(
            "FSD213",
            f"{entry.key} {entry.node.value!r} is not an integer",
            entry,
            value=True,
            edits=draft.editor.replace(entry.node, str(meant)) if meant is not None else None,
            fix=f"write {meant}",
        )


def _default(draft: Draft, name: str, version: int) -> None:
    defaults: dict[str, Any] = {
        "reshard_after_forward": True,
        "wrap_policy": "none",
        "wrap_classes": (),
        "min_num_params": 0 if draft.get("wrap_policy") == "size" else None,
        "state_dict_type": "full" if version == 1 else "sharded",
        "mixed_precision": "no",
        "sharding_strategy": "full_shard",
        "backward_prefetch": None,
        "ignored_modules": None,
    }
    draft.set(name, defaults.get(name, False))


def _sizes(draft: Draft, chosen: dict[str, Entry], active: bool) -> None:
    for key, name in SIZES.items():
        entry = chosen.get(key)
        draft.set(name, 1 if active or name != "dp_shard" else None)
        if entry is None:
            continue
        if not active:
            draft.ignore(entry, "ACCELERATE_USE_PARALLELISM_CONFIG is not true")
            continue
        size = spelling.integer(entry.node.value) if str(entry.node.value).isdecimal() else None
        if size is not None and size >= 1:
            draft.set(name, size, entry=entry)
        else:
            report_size(draft, key, name, entry)
    rotation = chosen.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY")
    draft.set("cp_comm_strategy", "allgather")
    if rotation is not None:
        read_rotation(draft, rotation.node.value, rotation)
    if active:
        draft.extras["parallelism_block"] = draft.root
        details = {name: chosen[key] for key, name in _DETAILS.items() if key in chosen}
        read_details(draft, details, written_in="environment")


def write(settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
    """Return ``export`` lines.

    Raises:
        ConfigError: No variable expresses a setting.
    """
    check_expressible(settings, NAME, CANNOT)
    lines = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    for key, name in KEYS.items():
        if name in LEGACY_DEFAULTS or name == "fsdp_version":
            continue
        value = getattr(settings, name)
        if value is None or value == () or (name in ("use_cpu", "debug") and not value):
            continue
        lines[key] = _text(name, value)
    mesh = settings.mesh
    if mesh != Mesh() or settings.cp_comm_strategy != "allgather":
        if mesh.dp_shard is None:
            raise ConfigError(
                f"{NAME} cannot express an open dp_shard next to other mesh sizes",
                help="resolve the mesh for the process count first",
            )
        lines["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        for key, name in SIZES.items():
            lines[key] = str(getattr(mesh, name))
        lines["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] = settings.cp_comm_strategy
    head = [f"# {line}" if line else "#" for line in header]
    return "\n".join([*head, *(f"export {key}={value}" for key, value in lines.items())]) + "\n"


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    text = str(WRITTEN.get(name, {}).get(value, value))
    if not text or any(character.isspace() or character in "'\"\\$`" for character in text):
        if "'" in text or "\n" in text:
            raise ConfigError(f"{NAME} cannot express {name} = {text!r}")
        return f"'{text}'"
    return text
