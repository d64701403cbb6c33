"""Environment variables: what accelerate's plugin and ParallelismConfig read when no launcher sets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import LAUNCH, LEGACY_DEFAULTS, MESH, WRITTEN, check_expressible
from fsdptool.config.dialects.accelerate import plugin
from fsdptool.config.dialects.accelerate.keys import DETAILS, FSDP_KEYS, IN_PYTHON, PARALLELISM_KEYS
from fsdptool.config.dialects.accelerate.launch import (
    read_details,
    read_rotation,
    report_size,
)
from fsdptool.config.dialects.protocol import Dialect, LintContext
from fsdptool.config.shell import is_variable, parse_environment, sniff
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, effective_entries
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.sharding import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document
    from fsdptool.records.sharding import FsdpSettings

CANNOT = tuple(name for name in LAUNCH if name not in ("use_cpu", "debug"))


NAME = "env"

KEYS = {
    **{
        "FSDP_TRANSFORMER_CLS_TO_WRAP" if name == "wrap_classes" else key.upper(): name
        for key, name in FSDP_KEYS.items()
    },
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
}
SIZES = {key.upper(): name for key, name in PARALLELISM_KEYS.items() if name in MESH}
_DETAILS = {key.upper(): name for key, name in DETAILS.items()}
SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_DEEPSPEED")


def _unknown(lint: LintContext, chosen: dict[str, Entry]) -> None:
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
        lint.ignore(entry, "programs do not read it")
        lint.report(
            "FSD202",
            f"{key} is not read" + (f": did you mean {near}?" if near else ""),
            entry,
            edits=lint.editor.rename(entry, near) if near and near not in chosen else None,
            safe=False,
            fix=f"write {near}",
            changes={"*": near},
            help=f"remove it; {IN_PYTHON[key.lower()]}" if key.lower() in IN_PYTHON else None,
        )


def _default(lint: LintContext, name: str, version: int) -> None:
    """Record what the plugin takes where a variable is not set."""
    if (name in LEGACY_DEFAULTS and version == 2) or (name == "reshard_after_forward" and version == 1):
        return
    defaults: dict[str, Any] = {
        "reshard_after_forward": True,
        "wrap_policy": "none",
        "wrap_classes": (),
        "min_num_params": 0 if lint.get("wrap_policy") == "size" else None,
        "state_dict_type": "full" if version == 1 else "sharded",
        "sharding_strategy": "full_shard",
        "backward_prefetch": None,
        "ignored_modules": None,
    }
    lint.set(name, defaults.get(name, False))


def _precision(lint: LintContext, entry: Entry | None) -> None:
    """Read what ``AcceleratorState`` takes as it stands: the plugin knows fp32 besides, and no upper case."""
    text = "no" if entry is None else str(entry.node.value)
    if text == "fp32":
        lint.set("mixed_precision", "no", entry=entry)
        lint.report_value("FSD217", "fp32 computes in float32 throughout: no mixed precision", entry)
    elif text in spelling.PRECISIONS:
        lint.set("mixed_precision", text, entry=entry)
    else:
        meant = spelling.choice(text, spelling.PRECISIONS)
        lint.set("mixed_precision", meant or "no", entry=entry)
        message = f"ACCELERATE_MIXED_PRECISION {text!r} is not one of no, fp16, bf16, fp8"
        lint.report_value("FSD206", message, entry, meant)


def _boolean(lint: LintContext, key: str, name: str, entry: Entry | None) -> None:
    if entry is None:
        lint.set(name, False)
    else:
        plugin.read_boolean(lint, key, name, entry)


def _sizes(lint: LintContext, chosen: dict[str, Entry], active: bool) -> None:
    for key, name in SIZES.items():
        entry = chosen.get(key)
        lint.set(name, 1 if active or name != "dp_shard" else None)
        if entry is None:
            continue
        if not active:
            lint.ignore(entry, "ACCELERATE_USE_PARALLELISM_CONFIG is not true")
            continue
        size = plugin.whole(entry.node.value)
        if size is not None and size >= 1:
            lint.set(name, size, entry=entry)
        else:
            report_size(lint, key, name, entry)
    rotation = chosen.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY")
    lint.set("cp_comm_strategy", "allgather")
    if rotation is not None:
        read_rotation(lint, rotation.node.value, rotation)
    if active:
        lint.parallelism_block = lint.root
        details = {name: chosen[key] for key, name in _DETAILS.items() if key in chosen}
        read_details(lint, details, written_in="environment")


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


class Environment(Dialect):
    """What accelerate's plugin reads where no launcher sets it."""

    name = "env"
    consumers = ("accelerate", "fsdptool")
    cannot = CANNOT
    in_place = False

    def sniff(self, text: str) -> bool:
        """Whether the text is a list of assignments."""
        return sniff(text) == "env"

    def parse(self, source: SourceText) -> Document:
        """Read the assignments."""
        return parse_environment(source.text)

    def read(self, lint: LintContext) -> None:
        """Read assignments into facts, as the plugin built without arguments would."""
        lint.names = {canonical: key for key, canonical in (*KEYS.items(), *SIZES.items())}
        chosen = {str(entry.key): entry for entry in effective_entries(lint.root)}
        _unknown(lint, chosen)
        for key in [key for key, entry in chosen.items() if is_variable(entry.node)]:
            name = KEYS.get(key) or SIZES.get(key, key)
            lint.open[name] = chosen.pop(key)

        def on(key: str) -> bool:
            return key in chosen and bool(plugin.word_of_truth(chosen[key].node.value))

        if on("ACCELERATE_USE_DEEPSPEED") and on("ACCELERATE_USE_FSDP"):
            lint.report(
                "FSD304",
                "FSDP and DeepSpeed cannot be enabled simultaneously.",
                chosen["ACCELERATE_USE_DEEPSPEED"],
            )
        if not on("ACCELERATE_USE_FSDP"):
            first = lint.root.entries[0]
            lint.report(
                "FSD330",
                "ACCELERATE_USE_FSDP is not true: accelerate does not start FSDP",
                first,
                severity="warning",
                help="set ACCELERATE_USE_FSDP=true, or launch with an accelerate file",
            )
        by_name = {name: chosen[key] for key, name in KEYS.items() if key in chosen}
        plugin.read_plugin(lint, by_name, lint.root, _default)
        _precision(lint, by_name.get("mixed_precision"))
        for name in ("use_cpu", "debug"):
            _boolean(lint, lint.name(name), name, by_name.get(name))
        _sizes(lint, chosen, on("ACCELERATE_USE_PARALLELISM_CONFIG"))

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
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
        if mesh != ParallelDims() or settings.cp_comm_strategy != "allgather":
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
