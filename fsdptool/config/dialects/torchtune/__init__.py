"""torchtune's YAML, as its distributed recipes read it.

Source: torchtune 0.6.1 ``recipes/full_finetune_distributed.py`` (keys, defaults, what is refused) and
``torchtune/training/_distributed.py:shard_model``, which shards each layer of torchtune's own models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import ACCELERATE_ONLY, LAUNCH, MESH, facts_from
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.programs import Program, ProgramLoop
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Node, to_python
from fsdptool.records.diagnostic import EffectiveDtypes
from fsdptool.records.sharding import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.records.described_run import DescribedRun

_SWITCHES = {
    "fsdp_cpu_offload": ("cpu_offload", False),
    "fsdp_reshard_after_forward": ("reshard_after_forward", True),
    "enable_activation_checkpointing": ("activation_checkpointing", False),
    "enable_activation_offloading": ("activation_checkpointing_offload", False),
}
"""Key to setting and default."""

_DISTRIBUTED = (
    "fsdp_cpu_offload", "fsdp_reshard_after_forward", "custom_sharded_layers", "tensor_parallel_dim",
)  # fmt: skip
"""Keys that single-device recipes do not read."""

_PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}


_LOOP = ProgramLoop(
    layout="native",
    gradients="sharded",
    loss="chunked",
    loss_in_forward=False,
    head_chunks=8,
    source="torchtune 0.6.1 recipes/full_finetune_distributed.py (_loss_step, train), modules/transformer.py"
    " (chunked_output), modules/loss/ce_chunked_output_loss.py (num_output_chunks)",
    outside_in_root=True,
    not_planned=("whole_loss",),
)


class Torchtune(Dialect):
    """torchtune's YAML."""

    name = "torchtune"
    consumers = ("torchtune",)
    programs = (Program("torchtune", "torchtune's distributed recipes", "torchtune", "0.6.1", loop=_LOOP),)
    base = FsdpSettings(mixed_precision="no", state_dict_type="full")
    cannot = (
        "wrap_policy", "wrap_classes", "min_num_params", "cpu_ram_efficient_loading",
        *(name for name in ACCELERATE_ONLY if name != "activation_checkpointing_offload"),
        *MESH, "cp_comm_strategy", *LAUNCH,
    )  # fmt: skip
    in_place = False

    def matches(self, root: Node) -> float:
        """Return 1 for a mapping whose model, or policy (PPO), is one of torchtune's components."""
        entry = root.get("model") or root.get("policy_model")
        component = entry.node.get("_component_") if entry is not None and entry.node.kind == "map" else None
        return 1.0 if component is not None and str(component.node.value).startswith("torchtune.") else 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return 1 for ``tune run``."""
        return 1.0 if launch.program == "tune" else 0.0

    def describe(self, file: RunFile) -> DescribedRun | None:
        """Return the run of a file."""
        from fsdptool.config.dialects.torchtune.run import describe

        return describe(file)

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        root = lint.root
        lint.names = {name: key for key, (name, _) in _SWITCHES.items()}
        lint.names |= {"mixed_precision": "dtype", "tp": "tensor_parallel_dim"}
        lint.set("fsdp_version", 2)
        for key, (name, default) in _SWITCHES.items():
            entry = root.get(key)
            value = default if entry is None else entry.node.value
            lint.set(name, bool(value), entry=entry)
            if not isinstance(value, bool):
                meant = spelling.boolean(value)
                words = f"{key} must be true or false, not {value!r}"
                lint.report_value("FSD205", words, entry, meant, safe=False, changes={name: meant})
        _precision(lint)
        _tensor_parallel(lint)
        for name, value in (
            ("wrap_policy", "transformer"),
            ("wrap_classes", ()),
            ("state_dict_type", "full"),
            ("cpu_ram_efficient_loading", False),
            *((size, 1) for size in MESH if size not in ("dp_shard", "tp")),
            ("dp_shard", None),
        ):
            lint.set(name, value)
        layers = root.get("custom_sharded_layers")
        if layers is not None:
            lint.ignore(layers, "units of their own in torchtune; the layout of a plan decides here")
        if all(root.get(key) is None for key in _DISTRIBUTED):
            lint.report("FSD362", "read as for a distributed recipe; a single-device recipe does not shard")

    def dtypes(self, lint: LintContext) -> EffectiveDtypes:
        """Return ``dtype``, which everything has."""
        entry = lint.root.get("dtype")
        value = _PRECISIONS.get(str(entry.node.value) if entry is not None else "fp32", "float32")
        return EffectiveDtypes(value, value, value, value, value, value)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the part of a file that concerns sharding, precision and checkpointing.

        Raises:
            ConfigError: torchtune cannot express a setting.
        """
        from fsdptool.config.edits import block_lines

        wanted, own = facts_from(settings), facts_from(self.base)
        for name in (*self.cannot, "mixed_precision", "state_dict_type"):
            if wanted[name] != own[name]:
                value = ",".join(wanted[name]) if isinstance(wanted[name], tuple) else repr(wanted[name])
                raise ConfigError(
                    f"{self.name} cannot express {name} = {value}",
                    help="write another dialect (accelerate has every setting)",
                )
        if settings.activation_checkpointing_offload and not settings.activation_checkpointing:
            raise ConfigError("activation_checkpointing_offload requires activation_checkpointing")
        values: dict[str, Any] = {"model": {"_component_": "torchtune.models.MODEL"}, "dtype": "bf16"}
        values |= {key: wanted[name] for key, (name, _) in _SWITCHES.items()}
        return "\n".join([*(f"# {line}" if line else "#" for line in header), *block_lines(values)]) + "\n"


def _precision(lint: LintContext) -> None:
    """``dtype`` is that of parameters, gradients and optimizer states alike: no mixed precision."""
    entry = lint.root.get("dtype")
    lint.set("mixed_precision", "no", entry=entry)
    value = entry.node.value if entry is not None else "fp32"
    if value not in _PRECISIONS:
        words = f"dtype must be bf16 or fp32, not {value!r}"
        lint.report_value(
            "FSD206", words, entry, spelling.nearest(value, _PRECISIONS, cutoff=0.75), safe=False
        )


def _tensor_parallel(lint: LintContext) -> None:
    entry = lint.root.get("tensor_parallel_dim")
    value = entry.node.value if entry is not None else 1
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    lint.set("tp", value if good else 1, entry=entry)
    if not good:
        lint.report_value("FSD206", f"tensor_parallel_dim must be at least 1, not {value!r}", entry)
        return
    plan = lint.root.get("tensor_parallel_plan")
    if value > 1 and (plan is None or to_python(plan.node) is None):
        lint.report("FSD212", "tensor_parallel_dim requires a tensor_parallel_plan", entry)
