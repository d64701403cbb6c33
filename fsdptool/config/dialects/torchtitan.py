"""torchtitan's job configuration in TOML, as torchtitan up to 0.2 reads it (0.3 configures in Python).

Sources: torchtitan 0.2.0 ``config/job_config.py`` (keys, defaults), ``config/manager.py`` (unknown keys),
``distributed/parallel_dims.py`` (mesh), ``models/llama3/infra/parallelize.py:apply_fsdp``, ``train.py``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import ACCELERATE_ONLY, LAUNCH, MESH, check_expressible
from fsdptool.config.dialects.protocol import Dialect, Program, ProgramLoop
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, Node
from fsdptool.records.diagnostic import EffectiveDtypes

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document
    from fsdptool.records.sharding import FsdpSettings

_SECTIONS = (
    "job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism",
    "checkpoint", "activation_checkpoint", "compile", "quantize", "comm", "memory_estimation",
    "fault_tolerance", "experimental", "validation",
)  # fmt: skip
_HEADER = re.compile(rf"^\[({'|'.join(_SECTIONS)})(?:\.[\w.]+)?\][ \t]*(?:#.*)?$", re.MULTILINE)

_DEGREES = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
}
_OTHER_DEGREES = ("pipeline_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree")
_KNOWN = {
    "parallelism": frozenset([
        *_DEGREES, *_OTHER_DEGREES, "enable_compiled_autograd", "fsdp_reshard_after_forward",
        "disable_loss_parallel", "enable_async_tensor_parallel", "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size",
        "context_parallel_rotate_method",
    ]),
    "training": frozenset([
        "dataset", "dataset_path", "local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps",
        "enable_cpu_offload", "dtype", "mixed_precision_param", "mixed_precision_reduce", "gc_freq",
        "gc_debug", "seed", "deterministic", "debug_moe_force_load_balance",
    ]),
    "activation_checkpoint": frozenset([
        "mode", "selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop",
        "memory_budget", "visualize_memory_budget_pareto",
    ]),
}  # fmt: skip
_CHOICES: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "reshard_after_forward": (
        "parallelism", "fsdp_reshard_after_forward", {"default": True, "always": True, "never": False}, True,
    ),
    "cp_comm_strategy": (
        "parallelism", "context_parallel_rotate_method",
        {"allgather": "allgather", "alltoall": "alltoall"}, "allgather",
    ),
    "mixed_precision": (
        "training", "mixed_precision_param", {"bfloat16": "bf16", "float32": "no"}, "bf16",
    ),
    "activation_checkpointing": (
        "activation_checkpoint", "mode",
        {"full": True, "none": False, "selective": False, "memory_budget": False}, False,
    ),
}  # fmt: skip
"""Setting to its section, its key, what its values mean, and what counts where nothing is written."""


_LOOP = ProgramLoop(
    layout="native",
    gradients="sharded",
    loss="whole",
    loss_in_forward=False,
    source="torchtitan train.py (forward_backward_step, train_step), components/loss.py",
    not_planned=("fused_loss", "embedding_backward"),
)


class Torchtitan(Dialect):
    """torchtitan's job configuration."""

    name = "torchtitan"
    consumers = ("torchtitan",)
    programs = (Program("torchtitan", "torchtitan", "torchtitan", "0.2.0", loop=_LOOP),)
    cannot = (
        "wrap_policy", "wrap_classes", "min_num_params", "state_dict_type", "cpu_ram_efficient_loading",
        *ACCELERATE_ONLY, *(name for name in MESH if name not in _DEGREES.values()), *LAUNCH,
    )  # fmt: skip
    in_place = False

    def sniff(self, text: str) -> bool:
        """Whether the text has two of torchtitan's sections, one of which says how to train."""
        found = {match.group(1) for match in _HEADER.finditer(text)}
        return len(found) > 1 and bool(found & _KNOWN.keys())

    def parse(self, source: SourceText) -> Document:
        """Read the text as TOML."""
        from fsdptool.files.toml_tree import parse_toml

        return parse_toml(source.text)

    def read(self, lint: LintContext) -> None:
        """Read the sections on training, mesh and checkpointing into facts."""
        lint.names = {canonical: key for key, canonical in _DEGREES.items()}
        lint.names |= {name: key for name, (_, key, _, _) in _CHOICES.items()}
        lint.names |= {"cpu_offload": "enable_cpu_offload"}
        _report_unknown(lint)
        for name, (section, key, meanings, default) in _CHOICES.items():
            _choice(lint, name, _entry(lint, section, key), meanings, default)
        _offload(lint, _entry(lint, "training", "enable_cpu_offload"))
        for key, name in _DEGREES.items():
            _degree(lint, name, key, _entry(lint, "parallelism", key))
        for name, value in (
            ("fsdp_version", 2),
            ("wrap_policy", "transformer"),
            ("wrap_classes", ()),
            ("state_dict_type", "sharded"),
            ("cpu_ram_efficient_loading", False),
            ("sp", 1),
        ):
            lint.set(name, value)
        _selective(lint)
        _judge_batch(lint)
        _judge_dimensions(lint)

    def dtypes(self, lint: LintContext) -> EffectiveDtypes:
        """Return ``training.dtype`` and its mixed precision; outputs are not cast, checkpoints neither."""

        def written(key: str, default: str) -> str:
            entry = _entry(lint, "training", key)
            return str(entry.node.value) if entry is not None else default

        stored = written("dtype", "float32")
        computed = written("mixed_precision_param", "bfloat16")
        reduced = written("mixed_precision_reduce", "float32")
        return EffectiveDtypes(stored, computed, computed, reduced, computed, stored)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the sections on training, mesh and checkpointing.

        Raises:
            ConfigError: torchtitan cannot express a setting.
        """
        check_expressible(settings, self.name, self.cannot)
        if settings.mixed_precision not in ("bf16", "no"):
            raise ConfigError(f"{self.name} cannot express mixed_precision = {settings.mixed_precision!r}")
        mesh = settings.mesh
        lines = [*(f"# {line}" if line else "#" for line in header), "[training]"]
        precision = "bfloat16" if settings.mixed_precision == "bf16" else "float32"
        lines += [f'mixed_precision_param = "{precision}"']
        lines += [f"enable_cpu_offload = {str(settings.cpu_offload).lower()}", "", "[parallelism]"]
        sizes = {name: getattr(mesh, name) for name in _DEGREES.values()}
        lines += [f"{key} = {-1 if sizes[name] is None else sizes[name]}" for key, name in _DEGREES.items()]
        reshard = "default" if settings.reshard_after_forward else "never"
        lines += [f'fsdp_reshard_after_forward = "{reshard}"']
        lines += [f'context_parallel_rotate_method = "{settings.cp_comm_strategy}"', ""]
        mode = "full" if settings.activation_checkpointing else "none"
        return "\n".join([*lines, "[activation_checkpoint]", f'mode = "{mode}"']) + "\n"


def _section(lint: LintContext, name: str) -> Node | None:
    entry = lint.root.get(name)
    return entry.node if entry is not None and entry.node.kind == "map" else None


def _entry(lint: LintContext, section: str, key: str) -> Entry | None:
    node = _section(lint, section)
    return node.get(key) if node is not None else None


def _report_unknown(lint: LintContext) -> None:
    """``_dict_to_dataclass`` refuses unknown keys, unless the job names a module that may add keys."""
    if _entry(lint, "job", "custom_config_module") or _entry(lint, "experimental", "custom_args_module"):
        return
    for section, known in {"": frozenset(_SECTIONS), **_KNOWN}.items():
        node = _section(lint, section) if section else lint.root
        for entry in node.entries if node is not None else ():
            if entry.key in known:
                continue
            lint.ignore(entry, "unknown: torchtitan refuses the file")
            near = spelling.nearest(entry.key, known, cutoff=0.75)
            words = f"{entry.key} is not a key of {section or 'a job'}: torchtitan refuses the file"
            if near is not None and node is not None and node.get(near) is None:
                lint.report_renamed("FSD201", words, entry, near, changes={"*": near})
            else:
                lint.report("FSD201", words, entry)


def _choice(
    lint: LintContext, name: str, entry: Entry | None, meanings: dict[str, Any], default: Any
) -> None:
    if entry is None:
        lint.set(name, default)
        return
    value = entry.node.value
    known = isinstance(value, str) and value in meanings
    lint.set(name, meanings[value] if known else default, entry=entry)
    if not known:
        words = f"{entry.key} must be one of {', '.join(meanings)}, not {value!r}"
        near = spelling.nearest(value, meanings, cutoff=0.75)
        changes = {name: meanings[near]} if near is not None else {}
        lint.report_value("FSD206", words, entry, near, safe=False, changes=changes)


def _offload(lint: LintContext, entry: Entry | None) -> None:
    value = entry.node.value if entry is not None else False
    lint.set("cpu_offload", value is True, entry=entry)
    if not isinstance(value, bool):
        lint.report_value("FSD205", f"enable_cpu_offload must be true or false, not {value!r}", entry)


def _degree(lint: LintContext, name: str, key: str, entry: Entry | None) -> None:
    value = entry.node.value if entry is not None else (-1 if name == "dp_shard" else 1)
    rest = name == "dp_shard" and value == -1
    whole = isinstance(value, int) and not isinstance(value, bool)
    good = rest or (whole and value >= 1)
    fallback = None if name == "dp_shard" else 1
    lint.set(name, fallback if rest or not good else value, entry=entry)
    if not good:
        words = "at least 1, or -1 for the remaining ranks" if name == "dp_shard" else "at least 1"
        lint.report_value("FSD206", f"{key} must be a whole number of {words}, not {value!r}", entry)


def _selective(lint: LintContext) -> None:
    """The default ``selective`` recomputes a part of each block: no canonical setting expresses it."""
    entry = _entry(lint, "activation_checkpoint", "mode")
    mode = entry.node.value if entry is not None else "selective"
    if mode in ("selective", "memory_budget"):
        origin = f"{mode} checkpointing recomputes a part of a block only"
        if entry is not None:
            lint.ignore(entry, f"{origin}: see sharding.checkpointing of the recipe")
        lint.set("activation_checkpointing", False, origin=origin)


def _judge_batch(lint: LintContext) -> None:
    """The assertion of ``train.py``, where the file says how many ranks share the batch."""
    entry, local = (_entry(lint, "training", key) for key in ("global_batch_size", "local_batch_size"))
    total = entry.node.value if entry is not None else -1
    each = local.node.value if local is not None else 8
    shard = lint.get("dp_shard")
    if not all(isinstance(item, int) and item > 0 for item in (total, each, shard)):
        return
    ranks = shard * lint.get("dp_replicate")
    if total % (each * ranks):
        words = f"{total} is not a multiple of {each} x {ranks} (local_batch_size x data-parallel ranks)"
        lint.report_value("FSD360", f"global_batch_size {words}", entry)


def _judge_dimensions(lint: LintContext) -> None:
    for key in _OTHER_DEGREES[:2]:
        entry = _entry(lint, "parallelism", key)
        size = entry.node.value if entry is not None else 1
        if isinstance(size, int) and size > 1:
            lint.configures_fsdp = False
            lint.report_value(
                "FSD361", f"{key} {size}: fsdptool's settings do not have this dimension", entry
            )
    if lint.get("dp_shard") == 1 and lint.get("cp") == 1 and lint.configures_fsdp:
        lint.runs_fsdp = lint.configures_fsdp = False
        entry = lint.at("dp_shard")
        lint.report("FSD113", "the file does not configure FSDP: data_parallel_shard_degree is 1", entry)
