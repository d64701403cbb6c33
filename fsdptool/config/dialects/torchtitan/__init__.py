"""torchtitan's job configuration in TOML, as torchtitan up to 0.2.2 reads it (0.3 configures in Python).

Sources: torchtitan 0.2.0 ``config/job_config.py`` (keys, defaults), ``config/manager.py`` (unknown keys),
``distributed/parallel_dims.py`` (mesh), ``models/llama3/infra/parallelize.py:apply_fsdp``, ``train.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import ACCELERATE_ONLY, LAUNCH, MESH, check_expressible
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.programs import Program, ProgramLoop, is_before
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, Node, to_python
from fsdptool.records.diagnostic import EffectiveDtypes

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.diagnostic import Edit
    from fsdptool.records.sharding import FsdpSettings

_DEGREES = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
}
_OTHER_DEGREES = ("pipeline_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree")
_KEYS: dict[str, str] = {
    "job": (
        "config_file dump_folder description print_config>=0.2 custom_config_module>=0.2 "
        "save_config_file>=0.2.1 use_for_integration_test<0.2 print_args<0.2"
    ),
    "profiling": (
        "enable_profiling save_traces_folder profile_freq profiler_active>=0.2 profiler_warmup>=0.2 "
        "enable_memory_snapshot save_memory_snapshot_folder"
    ),
    "metrics": (
        "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks "
        "enable_wandb"
    ),
    "model": (
        "name flavor hf_assets_path>=0.2 tokenizer_path converters print_after_conversion"
    ),
    "optimizer": (
        "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward"
    ),
    "lr_scheduler": (
        "warmup_steps decay_ratio decay_type min_lr_factor>=0.2 total_steps>=0.2.2 lr_min<0.2"
    ),
    "training": (
        "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps "
        "enable_cpu_offload dtype>=0.2 mixed_precision_param mixed_precision_reduce gc_freq gc_debug "
        "seed<0.2.1 deterministic<0.2.1 debug_moe_force_load_balance>=0.2<0.2.1 compile<0.2"
    ),
    "parallelism": (
        "data_parallel_replicate_degree enable_compiled_autograd<0.2.1 data_parallel_shard_degree "
        "fsdp_reshard_after_forward tensor_parallel_degree disable_loss_parallel "
        "enable_async_tensor_parallel pipeline_parallel_degree module_fqns_per_model_part>=0.2 "
        "pipeline_parallel_first_stage_less_layers>=0.2 pipeline_parallel_last_stage_less_layers>=0.2 "
        "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
        "pipeline_parallel_microbatch_size context_parallel_degree context_parallel_rotate_method "
        "expert_parallel_degree>=0.2 expert_tensor_parallel_degree>=0.2 "
        "pipeline_parallel_expert_parallel_overlap>=0.2.1 expert_parallel_comm_backend>=0.2.1 "
        "context_parallel_load_balancer>=0.2.2 pipeline_parallel_split_points<0.2"
    ),
    "checkpoint": (
        "enable>=0.2 enable_ft_dataloader_checkpoints>=0.2 folder interval initial_load_path "
        "initial_load_model_only>=0.2 initial_load_in_hf>=0.2 initial_load_in_hf_quantized>=0.2 "
        "last_save_model_only>=0.2 last_save_in_hf>=0.2 export_dtype async_mode keep_latest_k "
        "load_step exclude_from_loading enable_first_step_checkpoint>=0.2 create_seed_checkpoint "
        "load_only>=0.2 enable_checkpoint<0.2 initial_load_model_weights_only<0.2 "
        "last_save_model_weights_only<0.2"
    ),
    "activation_checkpoint": (
        "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns>=0.2 early_stop>=0.2 "
        "memory_budget>=0.2 visualize_memory_budget_pareto>=0.2 preserve_rng_state>=0.2.1 "
        "determinism_check>=0.2.1 debug>=0.2.1"
    ),
    "float8": (
        "enable_fsdp_float8_all_gather<0.2 precompute_float8_dynamic_scale_for_fsdp<0.2 "
        "force_recompute_fp8_weight_in_bwd<0.2 recipe_name<0.2 filter_fqns<0.2 emulate<0.2"
    ),
    "mx": (
        "use_fp8_dim1_cast_triton_kernel<0.2 recipe_name<0.2 filter_fqns<0.2"
    ),
    "comm": (
        "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder>=0.2 "
        "save_traces_file_prefix>=0.2 mode>=0.2.1"
    ),
    "memory_estimation": (
        "enable>=0.2 disable_fake_mode enabled<0.2"
    ),
    "fault_tolerance": (
        "enable process_group>=0.2 process_group_timeout_ms>=0.2 replica_id group_size "
        "min_replica_size semi_sync_method sync_steps<0.2 should_quantize<0.2 fragment_sync_delay<0.2 "
        "fragment_update_alpha<0.2"
    ),
    "experimental": (
        "custom_import custom_args_module"
    ),
    "compile": (
        "enable>=0.2 components>=0.2 backend>=0.2"
    ),
    "quantize.linear.float8": (
        "enable_fsdp_float8_all_gather>=0.2 precompute_float8_dynamic_scale_for_fsdp>=0.2 "
        "recipe_name>=0.2 filter_fqns>=0.2 emulate>=0.2"
    ),
    "quantize.linear.mx": (
        "mxfp8_dim1_cast_kernel_choice>=0.2 recipe_name>=0.2 filter_fqns>=0.2"
    ),
    "quantize.grouped_mm.float8": (
        "fqns>=0.2"
    ),
    "quantize.grouped_mm.mx": (
        "recipe_name>=0.2 fqns>=0.2"
    ),
    "validation": (
        "enable>=0.2 dataset>=0.2 dataset_path>=0.2 local_batch_size>=0.2 seq_len>=0.2 freq>=0.2 "
        "steps>=0.2"
    ),
    "training.dataloader": (
        "num_workers>=0.2.1 persistent_workers>=0.2.1 pin_memory>=0.2.1 prefetch_factor>=0.2.1"
    ),
    "validation.dataloader": (
        "num_workers>=0.2.1 persistent_workers>=0.2.1 pin_memory>=0.2.1 prefetch_factor>=0.2.1"
    ),
    "debug": (
        "seed>=0.2.1 deterministic>=0.2.1 deterministic_warn_only>=0.2.1 "
        "moe_force_load_balance>=0.2.1"
    ),
}  # fmt: skip
"""Section to its keys; ``>=0.2`` and ``<0.2.1`` name the versions that have one of them.

Facts of torchtitan 0.1.0, 0.2.0, 0.2.1 and 0.2.2.
"""
_VERSIONS = ("0.1", "0.2.0", "0.2.1", "0.2.2")

_MOVED = {
    **{
        (section, key): ("parallelism", key)
        for section in ("training", "experimental")
        for key in (
            *_DEGREES, "pipeline_parallel_degree", "fsdp_reshard_after_forward", "disable_loss_parallel",
            "enable_async_tensor_parallel", "enable_compiled_autograd", "context_parallel_rotate_method",
            "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
            "pipeline_parallel_microbatch_size",
        )
    },
    ("training", "data_parallel_degree"): ("parallelism", "data_parallel_shard_degree"),
    ("training", "compile"): ("compile", "enable"),
    ("training", "batch_size"): ("training", "local_batch_size"),
    ("training", "warmup_steps"): ("lr_scheduler", "warmup_steps"),
    ("training", "decay_type"): ("lr_scheduler", "decay_type"),
    ("optimizer", "warmup_steps"): ("lr_scheduler", "warmup_steps"),
    ("lr_scheduler", "lr_min"): ("lr_scheduler", "min_lr_factor"),
    ("checkpoint", "enable_checkpoint"): ("checkpoint", "enable"),
    ("checkpoint", "model_weights_only"): ("checkpoint", "last_save_model_only"),
    ("checkpoint", "last_save_model_weights_only"): ("checkpoint", "last_save_model_only"),
    ("checkpoint", "initial_load_model_weights_only"): ("checkpoint", "initial_load_model_only"),
    ("memory_estimation", "enabled"): ("memory_estimation", "enable"),
    ("job", "print_args"): ("job", "print_config"),
    ("", "float8"): ("", "quantize.linear.float8"),
    ("", "mx"): ("", "quantize.linear.mx"),
    ("training", "seed"): ("debug", "seed"),
    ("training", "deterministic"): ("debug", "deterministic"),
    ("training", "debug_moe_force_load_balance"): ("debug", "moe_force_load_balance"),
}  # fmt: skip
"""Where a key or section of an older torchtitan is today."""


@cache
def keys_of(version: str) -> dict[str, frozenset[str]]:
    """Return the keys of every section in a version of torchtitan."""
    found: dict[str, frozenset[str]] = {}
    for section, written in _KEYS.items():
        keys = set()
        for word in written.split():
            name, since, until = _WORD.fullmatch(word).groups()  # type: ignore[union-attr]
            if not (since and is_before(version, *_parts(since))) and not (
                until and not is_before(version, *_parts(until))
            ):
                keys.add(name)
        if keys:
            found[section] = frozenset(keys)
    return found


_WORD = re.compile(r"(\w+)(?:>=([\d.]+))?(?:<([\d.]+))?")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


_SECTIONS = tuple(dict.fromkeys(section.partition(".")[0] for section in _KEYS))
_HEADER = re.compile(rf"^\[({'|'.join(_SECTIONS)})(?:\.[\w.]+)?\][ \t]*(?:#.*)?$", re.MULTILINE)

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
        return len(found) > 1 and bool(found & {"parallelism", "training", "activation_checkpoint"})

    def parse(self, source: SourceText) -> Document:
        """Read the text as TOML."""
        from fsdptool.files.tree import parse_toml

        return parse_toml(source.text)

    def describes(self, root: Node) -> float:
        """Return how surely the mapping holds torchtitan's sections."""
        sections = {str(entry.key) for entry in root.entries if entry.node.kind == "map"}
        return 1.0 if {"model", "training"} <= sections and len(sections & set(_SECTIONS)) > 3 else 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line starts torchtitan."""
        own = launch.program == "torchtitan" or launch.script.startswith("torchtitan.")
        return 1.0 if own or "job.config_file" in names else 0.0

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the run of a file."""
        from fsdptool.config.dialects.torchtitan.run import describe

        return describe(file)

    def write_run(self, to: RunWriter) -> None:
        """Set the keys of a file."""
        from fsdptool.config.dialects.torchtitan.write import write

        write(to)

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


_MODELS = frozenset(("llama3", "llama4", "deepseek_v3", "qwen3", "flux", "gpt_oss"))


def _section(lint: LintContext, name: str) -> Node | None:
    entry = lint.root.get(name)
    return entry.node if entry is not None and entry.node.kind == "map" else None


def _entry(lint: LintContext, section: str, key: str) -> Entry | None:
    node = _section(lint, section)
    return node.get(key) if node is not None else None


def _report_unknown(lint: LintContext) -> None:
    """``_dict_to_dataclass`` refuses unknown keys, unless the job names a module that may add keys.

    The keys of experiments (``torchtitan/experiments``) are in such modules, which their command lines name.
    """
    if _entry(lint, *_extension(lint)):
        return
    _judge_keys(lint, lint.root, "", keys_of(lint.consumer.version))


def _extension(lint: LintContext) -> tuple[str, str]:
    """Return the section and the key that name a module which adds keys."""
    old = lint.consumer.before(0, 2)
    return ("experimental", "custom_args_module") if old else ("job", "custom_config_module")


def _is_experiment(lint: LintContext) -> bool:
    """Say whether the model is not one of torchtitan's own (``torchtitan/models``, 0.1 to 0.2.2)."""
    entry = _entry(lint, "model", "name")
    return entry is not None and isinstance(entry.node.value, str) and entry.node.value not in _MODELS


def _judge_keys(lint: LintContext, node: Node, section: str, known: Mapping[str, frozenset[str]]) -> None:
    prefix = f"{section}." if section else ""
    tables = {name.removeprefix(prefix).partition(".")[0] for name in known if name.startswith(prefix)}
    for entry in node.entries:
        if entry.key in tables and entry.node.kind == "map":
            _judge_keys(lint, entry.node, f"{prefix}{entry.key}", known)
        elif entry.key not in known.get(section, ()):
            _judge_unknown(lint, node, entry, section, known)


def _judge_unknown(
    lint: LintContext, node: Node, entry: Entry, section: str, known: Mapping[str, frozenset[str]]
) -> None:
    """Report a key that torchtitan refuses: what became of it, or what it may have meant."""
    lint.ignore(entry, "unknown: torchtitan refuses the file")
    words = f"{entry.key} is not a key of {section or 'a job'}: torchtitan refuses the file"
    elsewhere = next((item for item in _VERSIONS[1:] if entry.key in _keys(keys_of(item), section)), None)
    home, key = _MOVED.get((section, str(entry.key)), ("", ""))
    if (home, key) != ("", "") and (key in _keys(known, home) or key in known):
        _report_moved(lint, node, entry, section, home, key)
    elif elsewhere is not None:
        message = f"{entry.key} is a key of torchtitan {elsewhere}: {lint.consumer} refuses the file"
        lint.report("FSD201", message, entry, severity="warning", help="check the file with --target")
    else:
        near = spelling.nearest(entry.key, _keys(known, section), cutoff=0.75)
        if near is not None and node.get(near) is None:
            lint.report_renamed("FSD201", words, entry, near, changes={"*": near})
        elif _is_experiment(lint):
            option = ".".join(_extension(lint))
            lint.report(
                "FSD201",
                f"{entry.key} is not a key of {section or 'a job'} of torchtitan's own: the command line"
                f" must name the module that defines it (--{option})",
                entry,
                severity="warning",
                help=f"set {option} in the file, so that every run of it finds the key",
            )
        else:
            lint.report(
                "FSD201", words, entry, help=None if home else "remove the key, or name what it is now"
            )


def _keys(known: Mapping[str, frozenset[str]], section: str) -> frozenset[str]:
    if section:
        return known.get(section, frozenset())
    return frozenset(name.partition(".")[0] for name in known)


def _report_moved(lint: LintContext, node: Node, entry: Entry, section: str, home: str, key: str) -> None:
    """Report a key of an older version, with the fix that writes it where it is read now."""
    there = f"[{home}] {key}" if home else f"[{key}]"
    words = f"{entry.key} of {section or 'a job'} is {there} now: torchtitan refuses the file"
    target = _section(lint, home) if home else lint.root
    if target is not None and target.get(key) is not None:
        lint.report_removable("FSD201", f"{words}; it is written there, too", entry, node)
        return
    name = _DEGREES.get(key) if home == "parallelism" else None
    changes: dict[str, Any] = {"*": key}
    if name is not None:
        value = entry.node.value
        changes = {name: None if name == "dp_shard" and value == -1 else value}
    edits = lint.editor.rename(entry, key) if home == section else _moved(lint, node, entry, home, key)
    lint.report(
        "FSD201", words, entry, help=f"write it as {there}", edits=edits, safe=False,
        fix=f"move it to {there}", changes=changes,
    )  # fmt: skip


def _moved(lint: LintContext, node: Node, entry: Entry, home: str, key: str) -> tuple[Edit, ...] | None:
    removed = lint.editor.remove(node, entry)
    value = to_python(entry.node)
    target = lint.root.get(home)
    holder = target.node if target is not None else lint.root
    values = {key: value} if target is not None else {home: {key: value}}
    added = lint.editor.add(holder, target, values)
    return (*removed, *added) if removed is not None and added is not None else None


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
