"""What axolotl's own validation refuses: settings of FSDP, quantisation, adapters and optimizers together.

Source: axolotl 0.19.0 ``utils/schemas/peft.py``, ``validation.py`` and ``config.py``; each row names the
validator. What FSDP settings alone decide is judged where they are read (``refuse`` in ``__init__.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects.protocol import LintContext
from fsdptool.files.tree import effective_entries, to_python

_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
_UNTRAINED = (
    "lora_modules_to_save", "unfrozen_parameters", "peft_use_dora", "peft_trainable_token_indices",
    "lisa_step_interval", "reward_model", "process_reward_model",
)  # fmt: skip
_RATES = ("loraplus_lr_ratio", "lr_groups", "embedding_lr", "embedding_lr_scale")
_BUILT_IN = ("lora", "qlora", "llama-adapter")


class WrittenValues:
    """The values of a file, as the validators ask for them.

    Attributes:
        version: FSDP version as text; ``1`` where none is written.
        fsdp: Whether FSDP is configured, by either key.
        optimizer: Its name, or empty.
        adapter: The adapter, or None.
    """

    def __init__(self, lint: LintContext) -> None:
        self._values = {str(entry.key): to_python(entry.node) for entry in effective_entries(lint.root)}
        block = self.get("fsdp_config")
        self.block: dict[str, Any] = {}
        if isinstance(block, dict):
            self.block = {str(key).removeprefix("fsdp_"): value for key, value in block.items()}
        written = self.get("fsdp_version") or self.block.get("version") or 1
        self.raw_version = written
        self.version = str(written)
        self.fsdp = bool(self.get("fsdp") or block)
        self.optimizer = str(self.get("optimizer") or "")
        self.adapter = self.get("adapter")

    def get(self, key: str) -> Any:
        """Return a value at the top, or None."""
        return self._values.get(key)

    def on(self, *keys: str) -> bool:
        """Whether one of the switches is on."""
        return any(self.get(key) and spelling.boolean(self.get(key)) is not False for key in keys)

    def inner(self, key: str, name: str) -> Any:
        """Return a value of a mapping, or None."""
        holder = self.get(key)
        return holder.get(name) if isinstance(holder, dict) else None

    @property
    def bits(self) -> bool:
        """Whether the base model is loaded in 4 or 8 bits."""
        return bool(self.get("load_in_8bit") or self.get("load_in_4bit"))

    @property
    def lora(self) -> bool:
        """Whether the adapter is LoRA or QLoRA."""
        return self.adapter in ("lora", "qlora")

    @property
    def one(self) -> bool:
        """Whether FSDP1 is configured."""
        return self.fsdp and self.version != "2"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal.

    Attributes:
        validator: Its name in axolotl.
        keys: Where it is reported: at the first of them that the file writes.
        when: Whether it strikes.
        words: What is refused.
        help: What to do.
    """

    validator: str
    keys: tuple[str, ...]
    when: Callable[[WrittenValues], object]
    words: str
    help: str


def _optimizers() -> Iterator[Refusal]:
    name = "optimizer"
    deepspeed = "DeepSpeed is not supported with this optimizer"
    two = "this optimizer needs FSDP2"
    rows = (
        ("check_muon_deepspeed_fsdp", lambda v: v.optimizer == "muon" and v.get("deepspeed"), deepspeed),
        (
            "check_polora",
            lambda v: v.optimizer == "polora" and not v.lora,
            "polora needs adapter lora or qlora",
        ),
        ("check_polora", lambda v: v.optimizer == "polora" and v.get("deepspeed"), deepspeed),
        (
            "check_polora",
            lambda v: v.optimizer == "polora" and (v.get("tensor_parallel_size") or 1) > 1,
            "polora is not supported with tensor parallelism",
        ),
        ("check_polora", lambda v: v.optimizer == "polora" and v.one, two),
        (
            "check_polora",
            lambda v: v.optimizer == "polora" and any(map(v.get, _UNTRAINED)),
            "polora trains the factors of LoRA only, and the file adds other parameters",
        ),
        (
            "check_polora",
            lambda v: v.optimizer == "polora" and any(map(v.get, _RATES)),
            "polora sets its own step sizes, and the file sets learning rates per group",
        ),
        (
            "check_polora",
            lambda v: v.optimizer == "polora" and v.get("relora_steps"),
            "polora is not supported with relora",
        ),
        (
            "check_qgalore",
            lambda v: v.optimizer == "q_galore_adamw8bit" and v.adapter,
            "q_galore_adamw8bit trains whole parameters, not an adapter",
        ),
        ("check_qgalore", lambda v: v.optimizer == "q_galore_adamw8bit" and v.get("deepspeed"), deepspeed),
        ("check_qgalore", lambda v: v.optimizer == "q_galore_adamw8bit" and v.one, two),
        (
            "check_qgalore",
            lambda v: (
                v.optimizer == "q_galore_adamw8bit"
                and v.fsdp
                and v.version == "2"
                and v.block.get("use_orig_params") is not True
            ),
            "q_galore_adamw8bit needs use_orig_params: true in fsdp_config",
        ),
        (
            "check_flashoptim_deepspeed_fsdp",
            lambda v: v.optimizer.startswith("flash_") and v.get("deepspeed"),
            deepspeed,
        ),
        ("check_flashoptim_deepspeed_fsdp", lambda v: v.optimizer.startswith("flash_") and v.one, two),
    )
    for validator, when, words in rows:
        yield Refusal(
            validator, (name,), when, words, "choose another optimizer, or change the other setting"
        )


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "validate_adapter", ("load_in_4bit", "load_in_8bit"),
        lambda v: v.bits and not v.adapter and not v.get("inference"),
        "load_in_4bit and load_in_8bit need an adapter",
        "write adapter: qlora (4 bits) or adapter: lora (8 bits), or turn the quantisation off",
    ),
    Refusal(
        "validate_adapter", ("adapter",),
        lambda v: v.adapter and v.adapter not in _BUILT_IN and not v.get("plugins"),
        "the adapter is not built in, and no plugin is named", "write lora or qlora, or name the plugin",
    ),
    Refusal(
        "validate_qlora", ("load_in_8bit",), lambda v: v.adapter == "qlora" and v.on("load_in_8bit"),
        "qlora is not loaded in 8 bits", "write load_in_4bit: true instead",
    ),
    Refusal(
        "validate_qlora", ("gptq",), lambda v: v.adapter == "qlora" and v.on("gptq"),
        "qlora is not loaded from GPTQ", "use adapter: lora",
    ),
    Refusal(
        "validate_qlora", ("adapter",),
        lambda v: v.adapter == "qlora" and not v.on("load_in_4bit") and not v.on("merge_lora"),
        "qlora needs load_in_4bit: true", "write load_in_4bit: true, or adapter: lora",
    ),
    Refusal(
        "validate_qlora", ("merge_lora",),
        lambda v: v.adapter == "qlora" and v.on("merge_lora") and v.on("load_in_4bit"),
        "qlora is not merged while it is loaded in 4 bits", "leave merge_lora out of the file",
    ),
    Refusal(
        "validate_lora_target_parameters_dropout", ("lora_dropout",),
        lambda v: v.get("lora_target_parameters") and v.get("lora_dropout"),
        "lora_dropout must be 0 with lora_target_parameters", "write lora_dropout: 0",
    ),
    Refusal(
        "check_fp8_config", ("fp8_config",),
        lambda v: v.get("fp8_config") is not None and not v.get("fp8"),
        "fp8_config needs fp8: true", "write fp8: true, or remove fp8_config",
    ),
    Refusal(
        "check_fp8_config", ("fp8_enable_fsdp_float8_all_gather",),
        lambda v: (
            v.get("fp8_enable_fsdp_float8_all_gather")
            and (v.inner("fp8_config", "recipe") or "tensorwise") != "tensorwise"
        ),
        "the float8 all-gather needs the tensorwise recipe", "write fp8_enable_fsdp_float8_all_gather: false",
    ),
    Refusal(
        "check_fp8_config", ("fp8_enable_fsdp_float8_all_gather",),
        lambda v: v.get("fp8_enable_fsdp_float8_all_gather") and v.raw_version != 2,
        "the float8 all-gather needs fsdp_version: 2", "write fsdp_version: 2",
    ),
    Refusal(
        "check_lr_groups", ("lr_groups",),
        lambda v: v.get("lr_groups") and v.get("loraplus_lr_ratio"),
        "lr_groups and loraplus_lr_ratio exclude each other", "remove one of the two",
    ),
    Refusal(
        "check_frozen", ("unfrozen_parameters",),
        lambda v: v.adapter and v.get("peft_layers_to_transform") and v.get("unfrozen_parameters"),
        "unfrozen_parameters cannot be combined with peft_layers_to_transform", "remove one of the two",
    ),
    Refusal(
        "check_peft_layers_pattern", ("peft_layers_pattern",),
        lambda v: v.get("peft_layers_pattern") and not v.get("peft_layers_to_transform"),
        "peft_layers_pattern needs peft_layers_to_transform", "write peft_layers_to_transform",
    ),
    Refusal(
        "check_fused_lora", ("flash_attn_fuse_mlp",), lambda v: v.lora and v.on("flash_attn_fuse_mlp"),
        "fused modules cannot be combined with LoRA", "write flash_attn_fuse_mlp: false",
    ),
    Refusal(
        "check_onebitllms_lora", ("use_onebitllms",), lambda v: v.lora and v.on("use_onebitllms"),
        "use_onebitllms cannot be combined with LoRA", "remove the adapter, or use_onebitllms",
    ),
    Refusal(
        "check_lora_kernels_8bit", _KERNELS,
        lambda v: any(map(v.get, _KERNELS)) and v.adapter == "lora" and v.get("load_in_8bit"),
        "the kernels of LoRA cannot be combined with load_in_8bit", "remove the kernels, or use qlora",
    ),
    Refusal(
        "check_lora_kernels_trust_remote_code", _KERNELS,
        lambda v: any(map(v.get, _KERNELS)) and v.get("trust_remote_code"),
        "the kernels of LoRA cannot be combined with trust_remote_code", "remove one of the two",
    ),
    Refusal(
        "check_multigpu_lora_kernels", (*_KERNELS, "lora_embedding_kernel"),
        lambda v: (
            any(map(v.get, (*_KERNELS, "lora_embedding_kernel")))
            and v.get("fsdp_config") is not None
            and v.version != "2"
        ),
        "the kernels of LoRA need FSDP2 on several GPUs", "write fsdp_version: 2, or remove the kernels",
    ),
    Refusal(
        "check_rl_config_gradient_checkpointing", ("gradient_checkpointing_kwargs",),
        lambda v: (
            v.fsdp and v.get("rl") and v.get("gradient_checkpointing")
            and v.inner("gradient_checkpointing_kwargs", "use_reentrant")
            and v.get("load_in_4bit") and v.adapter == "qlora"
        ),
        "use_reentrant: true cannot be combined with rl and qlora on several GPUs",
        "write use_reentrant: false",
    ),
    Refusal(
        "check_fsdp2_base_model_quant_rl", ("load_in_8bit", "load_in_4bit"),
        lambda v: v.raw_version == 2 and v.get("rl") in ("dpo", "kto", "orpo", "ipo") and v.bits,
        "a base model in 4 or 8 bits cannot be combined with this rl under FSDP2",
        "turn the quantisation off, or write fsdp_version: 1",
    ),
    Refusal(
        "check_model_quantization_config_vs_bnb", ("model_quantization_config",),
        lambda v: v.get("model_quantization_config") and v.bits,
        "model_quantization_config cannot be combined with load_in_4bit or load_in_8bit",
        "remove one of the two",
    ),
    Refusal(
        "check_gpt_oss_fsdp_loading", ("model_quantization_config",),
        lambda v: (
            v.get("model_quantization_config") == "Mxfp4Config"
            and v.block.get("cpu_ram_efficient_loading") is True
        ),
        "Mxfp4Config cannot be combined with cpu_ram_efficient_loading",
        "write cpu_ram_efficient_loading: false",
    ),
    Refusal(
        "check_gptq_w_revision", ("revision_of_model",),
        lambda v: v.get("gptq") and v.get("revision_of_model"),
        "a revision cannot be named for a GPTQ model", "download the revision and name its folder",
    ),
    Refusal(
        "check_falcon_fsdp", ("fsdp",),
        lambda v: v.get("fsdp") and "falcon" in str(v.get("base_model") or "").lower(),
        "the fsdp list is not supported for falcon models", "remove the list; fsdp_config enables FSDP",
    ),
    Refusal(
        "check_relora", ("relora",), lambda v: v.on("relora") and not v.get("jagged_restart_steps"),
        "relora needs jagged_restart_steps", "write jagged_restart_steps",
    ),
    Refusal(
        "check_relora", ("relora",), lambda v: v.on("relora") and not v.adapter,
        "relora needs an adapter", "write adapter: lora or adapter: qlora",
    ),
    Refusal(
        "check_relora", ("relora",), lambda v: v.on("relora") and v.fsdp,
        "relora cannot be combined with FSDP", "remove relora, or the settings of FSDP",
    ),
    Refusal(
        "check_fp32_norms", ("fp32_norms",),
        lambda v: v.on("fp32_norms") and (v.get("fsdp_config") is None or v.version != "2"),
        "fp32_norms needs FSDP2", "write fsdp_version: 2 and fsdp_config",
    ),
    Refusal(
        "check_ple_cpu_offload", ("ple_cpu_offload",),
        lambda v: (
            v.get("ple_cpu_offload") and (v.get("fsdp_config") is not None or v.get("fsdp") is not None)
        ),
        "ple_cpu_offload cannot be combined with FSDP", "remove ple_cpu_offload",
    ),
    Refusal(
        "check_ple_cpu_offload", ("ple_cpu_offload",),
        lambda v: (
            v.get("ple_cpu_offload")
            and not (v.adapter == "qlora" and v.get("load_in_4bit"))
            and not (v.adapter == "lora" and v.get("load_in_8bit"))
        ),
        "ple_cpu_offload needs qlora in 4 bits, or lora in 8 bits", "remove ple_cpu_offload",
    ),
    Refusal(
        "check_quantize_moe_experts", ("quantize_moe_experts",),
        lambda v: v.get("quantize_moe_experts") and v.get("lora_target_linear"),
        "quantize_moe_experts cannot be combined with lora_target_linear",
        "name the experts in lora_target_parameters",
    ),
    Refusal(
        "check_quantize_moe_experts", ("quantize_moe_experts",),
        lambda v: v.get("quantize_moe_experts") and not v.lora,
        "quantize_moe_experts needs adapter lora or qlora", "write adapter: lora or adapter: qlora",
    ),
    Refusal(
        "check_quantize_moe_experts", ("quantize_moe_experts",),
        lambda v: v.get("quantize_moe_experts") and not v.bits,
        "quantize_moe_experts needs load_in_4bit or load_in_8bit", "write load_in_4bit: true",
    ),
    *_optimizers(),
)  # fmt: skip
"""Every refusal that a file can cause by itself."""


def report_refusals(lint: LintContext) -> None:
    """Report what axolotl refuses, whether or not the file configures FSDP."""
    values = WrittenValues(lint)
    said: set[str] = set()
    for row in REFUSALS:
        entry = next((found for key in row.keys if (found := lint.root.get(key)) and values.get(key)), None)
        if entry is None or not row.when(values) or row.words in said:
            continue
        said.add(row.words)
        lint.report("FSD370", f"axolotl refuses the file: {row.words}", entry, help=row.help)
