"""The YAML of an imaginary program, ``minitrain``, as a dialect of fsdptool.

``minitrain: 1`` heads its files, ``gpus`` and ``precision`` stand at top level, and ``sharding`` holds the
rest. ``engine: fsdp1`` is what it ran before; unknown keys under ``sharding`` are silently dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.config.canonical import LAUNCH, MESH
from fsdptool.config.dialects.protocol import Dialect, Program

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext, Rewriter, Target
    from fsdptool.config.dialects.run_reader import RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.files.tree import Entry, Node
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.sharding import FsdpSettings

FLAGS = {
    "free_after_forward": ("reshard_after_forward", True),
    "offload": ("cpu_offload", False),
    "recompute": ("activation_checkpointing", False),
}
"""Keys with a boolean: the canonical setting, and what minitrain does where nothing is written."""


class Minitrain(Dialect):
    """minitrain's YAML."""

    name = "minitrain"
    consumers = ("minitrain",)
    programs = (Program("minitrain", "minitrain, an imaginary program", "minitrain", assumed="1.0"),)
    cannot = (
        "min_num_params",
        "state_dict_type",
        "cpu_ram_efficient_loading",
        "activation_checkpointing_offload",
        "ignored_modules",
        "cp_comm_strategy",
        *MESH,
        *(name for name in LAUNCH if name != "num_processes"),
    )

    def matches(self, root: Node) -> float:
        """The key that heads every file."""
        return 1.0 if root.get("minitrain") is not None else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the file into canonical settings."""
        lint.names = {"fsdp_version": "engine", "wrap_classes": "blocks", "mixed_precision": "precision"}
        self._top(lint)
        holder = lint.root.get("sharding")
        if holder is None or holder.node.kind != "map":
            lint.runs_fsdp = lint.configures_fsdp = False
            lint.report("FSD113", "the file does not configure FSDP: sharding is missing")
            return
        lint.fsdp_entry = holder
        block = holder.node
        engine = block.get("engine")
        version = {"fsdp1": 1, "fsdp2": 2}.get(str(engine.node.value)) if engine is not None else 2
        if version is None and engine is not None:
            lint.report_value(
                "FSD206", f"engine must be fsdp1 or fsdp2, not {engine.node.value!r}", engine, "fsdp2"
            )
        lint.set("fsdp_version", version or 2, entry=engine)
        for key, (name, default) in FLAGS.items():
            self._boolean(lint, block.get(key), name, default)
        if version == 1:
            # Its FSDP1 knew two strategies; the key has meant the same since.
            reshard = lint.facts.pop("reshard_after_forward")
            strategy = "full_shard" if reshard.value else "shard_grad_op"
            lint.set("sharding_strategy", strategy, entry=reshard.entry)
        self._blocks(lint, block.get("blocks"))
        for entry in block.entries:
            if entry.key not in (*FLAGS, "engine", "blocks"):
                lint.ignore(entry, "minitrain does not know this key")
                lint.report_removable("FSD202", f"{entry.key} is not read", entry, block, safe=True)
        defaults = {
            "state_dict_type": "sharded",
            "cpu_ram_efficient_loading": False,
            "cp_comm_strategy": "allgather",
        }
        for name, value in {**defaults, **dict.fromkeys(MESH, 1), "dp_shard": None}.items():
            lint.set(name, value)

    def _top(self, lint: LintContext) -> None:
        gpus, precision = lint.root.get("gpus"), lint.root.get("precision")
        number = gpus.node.value if gpus is not None else None
        if gpus is not None and not (isinstance(number, int) and number >= 1):
            lint.report(
                "FSD205", f"gpus must be a whole number of at least 1, not {number!r}", gpus, value=True
            )
            number = None
        lint.set("num_processes", number, entry=gpus)
        name = str(precision.node.value) if precision is not None else "fp32"
        known = {"fp32": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
        if precision is not None and name not in known:
            lint.report_value(
                "FSD206", f"precision {name!r} is not one of {', '.join(known)}", precision, None
            )
        lint.set("mixed_precision", known.get(name, "no"), entry=precision)

    def _boolean(self, lint: LintContext, entry: Entry | None, name: str, default: bool) -> None:
        value = entry.node.value if entry is not None else default
        if entry is not None and not isinstance(value, bool):
            lint.report("FSD205", f"{entry.key} must be true or false, not {value!r}", entry, value=True)
        lint.set(name, value if isinstance(value, bool) else default, entry=entry)

    def _blocks(self, lint: LintContext, entry: Entry | None) -> None:
        names = tuple(str(item.value) for item in entry.node.items) if entry is not None else ()
        if entry is not None and entry.node.kind != "list":
            lint.report("FSD214", "blocks must be a list of class names", entry, value=True)
        lint.set("wrap_policy", "transformer" if entry is not None else "none", entry=entry)
        lint.set("wrap_classes", names, entry=entry)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the file.

        Raises:
            ConfigError: minitrain has no word for a setting.
        """
        from fsdptool.config.canonical import check_expressible
        from fsdptool.config.edits import block_lines
        from fsdptool.errors import ConfigError

        check_expressible(settings, self.name, self.cannot)
        if settings.wrap_policy == "size":
            raise ConfigError("minitrain cannot express wrap_policy = 'size'", help="wrap by class")
        top: dict[str, Any] = {"minitrain": 1}
        if settings.num_processes is not None:
            top["gpus"] = settings.num_processes
        top["precision"] = "fp32" if settings.mixed_precision == "no" else settings.mixed_precision
        block: dict[str, Any] = {"engine": "fsdp2"}
        block.update({key: getattr(settings, name) for key, (name, _) in FLAGS.items()})
        if settings.wrap_policy == "transformer":
            block["blocks"] = list(settings.wrap_classes)
        top["sharding"] = block
        return "\n".join([*(f"# {line}" if line else "#" for line in header), *block_lines(top)]) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Name the other engine; its keys have kept their meaning."""
        steps.put("sharding", "free_after_forward", target.reshard)
        steps.put("sharding", "engine", "fsdp2")
        return {}

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the whole run of a file."""
        from fsdptool_minitrain.run import describe

        return describe(file)

    def write_run(self, to: RunWriter) -> None:
        """Write a whole run."""
        from fsdptool_minitrain.run import write

        write(to)


__all__ = ["Minitrain"]
