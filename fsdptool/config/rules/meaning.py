"""Rules on what settings do by themselves, and how FSDP1 becomes FSDP2; others have files of their own."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import LEGACY, MESH, RESHARD_OF_STRATEGY, WRITTEN, hybrid_mesh
from fsdptool.config.dialects.protocol import LintContext, Rewriter, Target, parse_source
from fsdptool.config.edits import NotEditableError, edits_between
from fsdptool.config.rules.examples import FSDP1, FSDP2, TRAINER, TRL, added, classes, simpletuner
from fsdptool.config.rules.mesh import check_mesh, check_processes, launched_by_accelerate
from fsdptool.config.rules.model import Hardware, check_hardware, check_model
from fsdptool.config.rules.versions import check_versions
from fsdptool.records.diagnostic import Edit, Example, Rule

if TYPE_CHECKING:
    from fsdptool.config.rules.model import Hardware
    from fsdptool.records.anatomy import Anatomy

MEANING = (
    Rule("FSD301", "FSDP1 runs", "warning",
         "accelerate 1.15 takes a missing `fsdp_version` as 1. FSDP1 is deprecated in torch and leaves "
         "transformers after 5.23; FSDP2 does not have most of its keys.",
         "Migrate: `fsdptool migrate FILE` (or --unsafe-fixes) writes the equivalent FSDP2 settings, "
         "including every default that differs.", "unsafe",
         example=Example(FSDP1, FSDP2)),
    Rule("FSD302", "FSDP1 key without effect under version 2", "warning",
         "accelerate 1.15 ignores it under version 2 when it comes from a file. FSDP2 does by itself what "
         "this value requests. All such keys of a file are one finding; where FSDP1 runs (FSD301) they are "
         "a note, because migrating removes them.",
         "Remove them (--fix: the run stays the same).", "safe",
         example=added("  fsdp_use_orig_params: true\n")),
    Rule("FSD303", "FSDP1 setting lost under version 2", "error",
         "The key is ignored under version 2, and the run differs from what it requests: SHARD_GRAD_OP "
         "becomes full sharding, HYBRID_SHARD full sharding over all ranks, forward prefetch is off.",
         "Write the FSDP2 equivalent (--unsafe-fixes: the run changes), or remove the key.", "unsafe",
         example=added("  fsdp_sharding_strategy: SHARD_GRAD_OP\n", "  fsdp_reshard_after_forward: false\n")),
    Rule("FSD304", "FSDP and DeepSpeed together", "error",
         "Only one of them can shard the model. accelerate 1.15 uses the one that `distributed_type` names "
         "and ignores the other block (with a third type both have no effect, FSD330); TrainingArguments and "
         "SimpleTuner stop.",
         "Keep one of the two.",
         example=added("deepspeed_config:\n  zero_stage: 3\n")),
    Rule("FSD314", "FSDP on CPU through accelerate", "error",
         "accelerate 1.15 starts FSDP on accelerators only: on CPU the run continues unsharded, as "
         "independent processes or DDP, with exit code 0. fsdptool's own trainer shards on CPU.",
         "Train with `fsdptool train`, and add the comment `# fsdptool: consumer=fsdptool` to the file.",
         example=Example(FSDP2 + "use_cpu: true\n",
                         "# fsdptool: consumer=fsdptool\n" + FSDP2 + "use_cpu: true\n")),
    Rule("FSD315", "nothing is wrapped", "warning",
         "accelerate 1.15 reads a missing `fsdp_auto_wrap_policy` as NO_WRAP: one unit holds the whole "
         "model, which is gathered at once. SIZE_BASED_WRAP with a threshold of 0 does the same, and "
         "TrainingArguments pass 0 when no threshold is written.",
         "Write `fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP` (--unsafe-fixes), or NO_WRAP if that is "
         "intended.", "unsafe",
         example=added("", "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n")),
    Rule("FSD316", "activation checkpointing without wrapping", "error",
         "Under version 2 accelerate 1.15 checkpoints the units that are wrapped; with NO_WRAP or no policy "
         "it crashes: `TypeError: 'NoneType' object is not callable`. Under version 1 it checkpoints every "
         "module by itself, and the finding is a warning.",
         "Wrap the blocks (TRANSFORMER_BASED_WRAP), or disable activation checkpointing.",
         example=added("NO_WRAP\n", "TRANSFORMER_BASED_WRAP\n",
                       to=FSDP2 + "  fsdp_activation_checkpointing: true\n  fsdp_auto_wrap_policy: ")),
    Rule("FSD317", "two kinds of activation checkpointing", "error",
         "FSDP's activation checkpointing and `gradient_checkpointing` recompute the same blocks twice; "
         "the transformers Trainer raises an error for the combination.",
         "Keep FSDP's own (--unsafe-fixes disables gradient_checkpointing).", "unsafe",
         example=added("gradient_checkpointing: true\n", to=TRAINER + "  activation_checkpointing: true\n")),
    Rule("FSD318", "activation offload without its requirements", "error",
         "accelerate 1.15: `activation_checkpointing_offload=True` requires "
         "`activation_checkpointing=True`, and `fsdp_version=2`.",
         "Enable activation checkpointing, or disable its offload.",
         example=added("", "  fsdp_activation_checkpointing: true\n",
                       to=FSDP2 + "  fsdp_activation_checkpointing_offload: true\n")),
    Rule("FSD319", "RAM-efficient loading without wrap units", "warning",
         "Without wrapping, one unit holds the whole model: every step gathers all of it, and FSDP1 builds "
         "all of it on every GPU before sharding. The option saves host memory, but GPU memory runs out.",
         "Wrap the blocks, or set fsdp_cpu_ram_efficient_loading to false.",
         example=added("NO_WRAP\n", "TRANSFORMER_BASED_WRAP\n",
                       to=FSDP2 + "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_auto_wrap_policy: ")),
    Rule("FSD320", "setting left to a default that differs between programs", "info",
         "The default depends on the FSDP version or on the program: FULL_STATE_DICT under version 1 and "
         "in TrainingArguments, SHARDED_STATE_DICT in accelerate under version 2; RAM-efficient loading is "
         "true in accelerate launch and false in TrainingArguments.",
         "Write the setting (--fix writes the value in effect).", "safe",
         example=added("",
                       "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_cpu_ram_efficient_loading: true\n")),
    Rule("FSD321", "fsdp_sync_module_states false stops the launch", "error",
         "FSDP2 ignores the key, but accelerate 1.15's launcher refuses the file while RAM-efficient "
         "loading is true or not written (a value of false or an empty text; other text passes): When using "
         "`--fsdp_cpu_ram_efficient_loading` set `--fsdp_sync_module_states` to `True`.",
         "Remove the key under version 2 (--fix).", "safe",
         example=added("  fsdp_sync_module_states: false\n")),
    Rule("FSD322", "reshard_after_forward as a strategy name or number", "error",
         "Under version 2, accelerate 1.15 requires a boolean: `invalid truth value full_shard`. `1` is "
         "read as true; `2` fails.",
         "Write true or false (--fix: FULL_SHARD is true, SHARD_GRAD_OP false).", "safe",
         example=added("  fsdp_reshard_after_forward: FULL_SHARD\n", "  fsdp_reshard_after_forward: true\n")),
    Rule("FSD323", "sharding strategy as a number", "info",
         "torch's enum numbers: 1 FULL_SHARD, 2 SHARD_GRAD_OP, 3 NO_SHARD, 4 HYBRID_SHARD, 5 "
         "_HYBRID_SHARD_ZERO2. `accelerate to-fsdp2` copies the numbers unchanged, and 2 then fails.",
         "Write the name, or migrate.",
         example=added("  fsdp_sharding_strategy: 2\n", "  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
                       to=FSDP1)),
    Rule("FSD324", "size-based wrapping", "warning",
         "Under FSDP2 accelerate 1.15 hands every module above the threshold to fully_shard, which refuses "
         "containers (ModuleList); torch's FSDP1 policy skips them. Which modules are wrapped depends on "
         "the size of the model.",
         "Wrap by class (`fsdptool detect` lists the classes).",
         example=added("  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n",
                       "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n")),
    Rule("FSD325", "unused size threshold", "warning",
         "`fsdp_min_num_params` is read with SIZE_BASED_WRAP only.",
         "Remove it (--fix: the run stays the same).", "safe",
         example=added("  fsdp_min_num_params: 1000000\n")),
    Rule("FSD326", "process count missing", "warning",
         "accelerate 1.15: You need to manually pass in `--num_processes` using this config yaml.",
         "Write num_processes, or pass --num_processes at every launch.",
         example=Example(FSDP2.replace("num_processes: 8\n", ""), FSDP2)),
    Rule("FSD327", "FSDP over a single process", "warning",
         "There is no other process to shard with: FSDP adds cost without saving memory.",
         "Start more processes, or train without FSDP.",
         example=Example(FSDP2.replace("processes: 8", "processes: 1"), FSDP2)),
    Rule("FSD329", "rendezvous address missing", "warning",
         "Several machines need `main_process_ip` and `main_process_port`; otherwise accelerate 1.15 waits "
         "for a host called None. Both can be given on the command line.",
         "Write main_process_ip and main_process_port, or pass both at launch.",
         example=added("num_machines: 2\n",
                       "num_machines: 2\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n")),
    Rule("FSD330", "FSDP block under another distributed_type", "error",
         "accelerate 1.15 accepts the block and never starts FSDP.",
         "Write `distributed_type: FSDP` (--unsafe-fixes: the run changes), or remove the block.", "unsafe",
         example=Example(FSDP2.replace("type: FSDP", "type: MULTI_GPU"), FSDP2)),
    Rule("FSD331", "GPU ids do not match the processes", "warning",
         "With more processes than ids, several ranks share one GPU; a single id with MULTI_GPU is refused.",
         "List as many ids as processes per machine.",
         example=added("gpu_ids: 0,1\n", "gpu_ids: 0,1,2,3,4,5,6,7\n")),
    Rule("FSD332", "NO_SHARD has no FSDP2 equivalent", "error",
         "NO_SHARD is plain data parallelism. `accelerate to-fsdp2` turns it into reshard false, which "
         "shards the parameters.",
         "Use `distributed_type: MULTI_GPU` (DDP).",
         example=added("  fsdp_sharding_strategy: NO_SHARD\n", "  fsdp_sharding_strategy: FULL_SHARD\n",
                       to=FSDP1)),
    Rule("FSD333", "LOCAL_STATE_DICT is not supported", "error",
         "accelerate 1.15: FSDP2 does not support LOCAL_STATE_DICT.",
         "Use SHARDED_STATE_DICT: each rank writes its shard, and the checkpoint can be read with a "
         "different number of ranks.",
         example=added("  fsdp_state_dict_type: LOCAL_STATE_DICT\n",
                       "  fsdp_state_dict_type: SHARDED_STATE_DICT\n")),
    Rule("FSD335", "suspicious wrap class", "warning",
         "The class is a leaf layer, an embedding, a pooler, a head or a whole model, judging by its name: "
         "this gives far too many units, or one.",
         "Name the repeated block (`fsdptool detect REF` finds it).",
         example=classes("Linear", options="")),
    Rule("FSD336", "strategy under the wrong key for FSDP1", "error",
         "Under version 1 accelerate 1.15 always exports FSDP_SHARDING_STRATEGY (FULL_SHARD unless "
         "`fsdp_sharding_strategy` is written), which wins: a strategy written in "
         "`fsdp_reshard_after_forward`, as `accelerate config` does, has always run as FULL_SHARD. The "
         "same happens to the strategy that TrainingArguments pass, in `fsdp` or `reshard_after_forward`: "
         "the plugin first fills its own field from FSDP_SHARDING_STRATEGY or with FULL_SHARD.",
         "Migrate, and decide which of the two is intended.",
         example=added("  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
                       "  fsdp_sharding_strategy: SHARD_GRAD_OP\n", to=FSDP1)),
    Rule("FSD337", "text tested for truth", "error",
         "The program tests this value without parsing it: transformers 5.23 enables offload for "
         "`cpu_offload: \"false\"`, and accelerate 1.15 runs on the CPU with `use_cpu: \"false\"`. "
         "SimpleTuner 4.8 skips the text \"false\", so that a default of true stays.",
         "Write a plain boolean (--unsafe-fixes: the run changes to what is written).", "unsafe",
         example=added("use_cpu: \"false\"\n", "use_cpu: false\n")),
    Rule("FSD338", "FSDP version left to the installed transformers", "warning",
         "Without a version TrainingArguments ran FSDP1 before transformers 5.10 and runs FSDP2 since.",
         "Write `\"version\": 2` (--fix writes the version in effect).", "safe",
         example=Example(TRAINER.replace("version: 2", "cpu_offload: true"), TRAINER)),
    Rule("FSD339", "legacy `fsdp` text or list", "info",
         "transformers 5.23 still understands `full_shard`, `shard_grad_op`, `offload` and `auto_wrap` in "
         "lower case separated by spaces, but has deprecated them; anything else raises an error.",
         "No action is needed before transformers removes them. The new form is `fsdp: true` with the "
         "options in `fsdp_config` (--fix).", "safe",
         example=Example(TRAINER.replace("true", "full_shard auto_wrap"), TRAINER)),
    Rule("FSD340", "save_only_model with a sharded state dict, or with the best model", "error",
         "transformers 5.23's Trainer refuses save_only_model with SHARDED_STATE_DICT, and under FSDP with "
         "load_best_model_at_end.",
         "Use FULL_STATE_DICT without load_best_model_at_end, or save_only_model false.",
         example=added("SHARDED_STATE_DICT\n", "FULL_STATE_DICT\n",
                       to="save_only_model: true\n" + TRAINER + "  state_dict_type: ")),
    Rule("FSD341", "setting taken from the environment", "info",
         "The file does not contain the setting, accelerate launch does not export it, and the variable is "
         "set in this environment: the variable decides.",
         "Write the setting in the file, or unset the variable.",
         example=Example("FSDP_STATE_DICT_TYPE=FULL_STATE_DICT accelerate launch --use_fsdp train.py\n",
                         "accelerate launch --use_fsdp --fsdp_state_dict_type FULL_STATE_DICT train.py\n")),
    Rule("FSD345", "optimizer that does not work on sharded parameters", "warning",
         "SimpleTuner replaces optimi-*, bnb-* and soap optimizers under FSDP2; elsewhere they fail in the "
         "first step. bitsandbytes 0.50 takes sharded parameters for plain tensors. axolotl 0.19 refuses "
         "adamw_8bit and adamw_bnb_8bit under FSDP2, and muon under FSDP1.",
         "Choose an optimizer that works on DTensors (adamw).", "unsafe",
         example=Example(simpletuner('"optimizer": "optimi-adamw"'),
                         simpletuner('"optimizer": "adamw_bf16"'))),
    Rule("FSD346", "precision incompatible with sharding", "error",
         "SimpleTuner refuses quanto-quantised base models with FSDP2 (torchao int8 passes). axolotl 0.19 "
         "refuses RAM-efficient loading with load_in_4bit under FSDP2: only rank 0 would quantise, and the "
         "scatter deadlocks. 8-bit weights of bitsandbytes lose their scales when FSDP2 shards them, and "
         "4-bit weights that are stored as uint8 are not sharded.",
         "In SimpleTuner, choose another base_model_precision; in axolotl, set cpu_ram_efficient_loading "
         "to false (--unsafe-fixes). Elsewhere, load the base in 4 bits, with bnb_4bit_quant_storage "
         "bfloat16.", "unsafe",
         example=Example(simpletuner('"base_model_precision": "int8-quanto"'),
                         simpletuner('"base_model_precision": "int8-torchao"'))),
    Rule("FSD348", "dotted path as wrap policy", "error",
         "Programs do not accept a dotted path as a policy (accelerate 1.15: `Invalid auto wrap policy`), "
         "and a configuration must not name code to import.",
         "Use TRANSFORMER_BASED_WRAP with class names.",
         example=added("  fsdp_auto_wrap_policy: my.policy\n",
                       "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n")),
    Rule("FSD349", "EMA on CPU with sharded parameters", "error",
         "SimpleTuner refuses ema_cpu_only with FSDP2.",
         "Keep the moving average on the device.",
         example=Example(simpletuner('"use_ema": true, "ema_cpu_only": true'),
                         simpletuner('"use_ema": true'))),
    Rule("FSD350", "offload incompatible with the optimizer", "error",
         "SimpleTuner refuses fsdp_cpu_offload with optimizer_release_gradients on optimi optimizers and "
         "with optimizer_cpu_offload_method=torchao; axolotl 0.19 refuses offload_params with 8-bit "
         "optimizers under FSDP1.",
         "Use one of the two.",
         example=Example(simpletuner('"fsdp_cpu_offload": true, "optimizer_cpu_offload_method": "torchao"'),
                         simpletuner('"fsdp_cpu_offload": true'))),
    Rule("FSD352", "mixed precision not written", "info",
         "accelerate 1.15 trains in the model's own dtype when the setting is missing.",
         "Write mixed_precision (--fix writes 'no').", "safe",
         example=added("", "mixed_precision: bf16\n")),
    Rule("FSD353", "activation offload key that is not read", "warning",
         "accelerate calls it `fsdp_activation_checkpointing_offload` (1.15, version 2, with activation "
         "checkpointing); TrainingArguments 5.23 reads neither.",
         "Use accelerate's key in the accelerate YAML.",
         example=added("  activation_cpu_offload: true\n", to=TRAINER)),
    Rule("FSD355", "settings nested one level too deep for --fsdp_config", "warning",
         "The file holds `fsdp` and `fsdp_config` and nothing else. Parsed as TrainingArguments it works; "
         "given as the file of --fsdp_config, transformers 5.23 looks for its keys one level higher, finds "
         "none and runs on defaults. (ms-swift unwraps the shape itself.)",
         "For --fsdp_config, keep what is inside `fsdp_config` and pass --fsdp on the command line.",
         example=Example('{"fsdp": true, "fsdp_config": {"version": 2}}\n',
                         '{"version": 2, "cpu_offload": false}\n')),
    Rule("FSD357", "compilation that is not regional", "info",
         "With `dynamo_config`, accelerate 1.15 (`Accelerator._prepare_fsdp2`) compiles the whole model, "
         "whose compile time grows with the number of layers. With `dynamo_use_regional_compilation` it "
         "compiles one repeated block and reuses the result (`utils/other.py:compile_regions_fsdp2`). "
         "Before 1.14 the regional form wrapped the blocks in modules that bypass the hooks of FSDP2, so "
         "that parameters are not gathered per block: that is an error.",
         "Write `dynamo_use_regional_compilation: true` (--unsafe-fixes: the run changes).", "unsafe",
         example=added("", "  dynamo_use_regional_compilation: true\n",
                       to=FSDP2 + "dynamo_config:\n  dynamo_backend: INDUCTOR\n")),
    Rule("FSD358", "RAM-efficient loading with CPU offload in an older accelerate", "error",
         "accelerate 1.7 to 1.12 (`fsdp2_load_full_state_dict`) leaves the loaded shards on the GPU. torch's "
         "FSDP2 stops in the first forward: FSDP parameters should be materialized on CPU when enabling "
         "CPU offloading. accelerate 1.13 moves them back to the CPU.",
         "Use accelerate 1.13 or newer, or set fsdp_cpu_ram_efficient_loading to false.",
         example=added("true\n", "false\n",
                       to=FSDP2 + "  fsdp_offload_params: true\n  fsdp_cpu_ram_efficient_loading: ",
                       options="--target accelerate==1.12")),
    Rule("FSD359", "Liger kernel that the trainer refuses", "error",
         "TRL 1.16's SFT, DPO, KTO and GRPO trainers replace the head of the model themselves and refuse "
         "`fused_linear_cross_entropy: true` in `liger_kernel_config`. Before TRL 1.0 (seen in 0.24, "
         "`trainer/dpo_trainer.py`) DPO computes with Liger only the losses sigmoid, apo_zero, apo_down, "
         "sppo_hard and nca_pair.",
         "Leave the option out; with an older TRL, use one of these losses, or no Liger kernel.",
         example=added("use_liger_kernel: true\nloss_type: ipo\n", "use_liger_kernel: true\n", to=TRL,
                       options="--target trl==0.24")),
    Rule("FSD360", "batch that does not divide", "error",
         "TRL 1.16 (`trainer/grpo_config.py`) refuses a `generation_batch_size` that is not a multiple of "
         "per_device_train_batch_size x num_processes, and of num_generations. torchtitan 0.2 (`train.py`) "
         "refuses a `global_batch_size` that is not a multiple of local_batch_size x data-parallel ranks.",
         "Choose a multiple.",
         example=added("generation_batch_size: 32\n", "generation_batch_size: 48\n",
                       to=TRL + "num_processes: 3\n")),
    Rule("FSD362", "sharding depends on the recipe that is run", "info",
         "torchtune reads the same file for single-device and for distributed recipes, and only the latter "
         "shard. The file has no key that only a distributed recipe reads.",
         "No action is needed; `fsdp_reshard_after_forward: true` states the intention.",
         example=added("", "fsdp_reshard_after_forward: true\n",
                       to="model:\n  _component_: torchtune.models.llama3.llama3_8b\n")),
    Rule("FSD370", "settings that axolotl refuses together", "error",
         "axolotl 0.19 validates a file before it loads anything, and stops. The rule covers what its "
         "validators say of quantisation (`load_in_4bit` without an adapter, 4 or 8 bits with DPO under "
         "FSDP2), adapters (kernels of LoRA under FSDP1, ReLoRA with FSDP), precision (`fp32_norms`, the "
         "float8 all-gather) and optimizers (polora, q_galore_adamw8bit and flash_* need FSDP2).",
         "Change one of the settings that the message names.",
         example=added("", "adapter: qlora\n", to="base_model: m\ndatasets: []\nload_in_4bit: true\n")),
    Rule("FSD376", "known bug of the named versions", "warning",
         "--target names versions of libraries, and the file's run meets a known bug of one of them. "
         "`fsdptool audit` gives the consequence in full, and also names bugs that may apply.",
         "Install the repaired version, or make the change that the finding names.",
         example=Example(FSDP2 + "  fsdp_activation_checkpointing: true\n",
                         FSDP2 + "  fsdp_activation_checkpointing: true\n",
                         "--target accelerate==1.14", "--target accelerate==1.15")),
)  # fmt: skip


_LEAVES = frozenset([
    "Linear", "Conv1d", "Conv2d", "Conv3d", "LayerNorm", "RMSNorm", "GroupNorm", "Dropout", "Embedding",
    "Identity", "SiLU", "GELU",
])  # fmt: skip
_ONCE = ("Pooler", "Pooling", "Head")
_WHOLE = (
    "ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification", "ForMaskedLM",
    "ForTokenClassification", "ForQuestionAnswering", "LMHeadModel", "Pipeline",
)  # fmt: skip


def check_meaning(
    lint: LintContext, *, model: Anatomy | None = None, hardware: Hardware | None = None
) -> None:
    """Report what the facts of a file mean together.

    Args:
        lint: A file whose dialect has been read.
        model: The model, for the family ``model``.
        hardware: GPUs and hosts, for the family ``hardware``.
    """
    check_versions(lint)
    if not lint.configures_fsdp:
        return
    _conflicts(lint)
    if not lint.runs_fsdp:
        return
    _version(lint)
    check_mesh(lint)
    _wrapping(lint)
    _checkpointing(lint)
    _loading(lint)
    _compilation(lint)
    check_processes(lint)
    _defaults(lint)
    lint.withhold_dependent_fixes()
    if model is not None:
        check_model(lint, model)
    if hardware is not None:
        check_hardware(lint, hardware)


def _conflicts(lint: LintContext) -> None:
    kind, block = lint.distributed_type, lint.fsdp_block
    filled = block is not None and bool(block.entries)
    if lint.deepspeed and (lint.runs_fsdp or (filled and kind in ("FSDP", "DEEPSPEED", None))):
        lint.report(
            "FSD304",
            "FSDP and DeepSpeed cannot be enabled simultaneously.",
            lint.root.get("deepspeed_config") or lint.root.get("deepspeed"),
        )
    elif filled and kind not in ("FSDP", None):
        entry = lint.root.get("distributed_type")
        edits = None
        if entry is not None and kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
            edits = lint.editor.replace(entry.node, "FSDP")
        lint.report_value(
            "FSD330",
            f"the FSDP settings have no effect: distributed_type is {kind}",
            entry,
            edits=edits,
            safe=False,
            fix="write FSDP",
            changes={"*": "FSDP"},
        )


def _version(lint: LintContext) -> None:
    if lint.get("fsdp_version") != 1:
        if lint.get("state_dict_type") == "local":
            lint.report_value("FSD333", "LOCAL_STATE_DICT is not supported by FSDP2", "state_dict_type")
        return
    migrated = MigrationEdits(None) if lint.trial else migration(lint)
    state = "is 1" if lint.written("fsdp_version") else "is not written"
    what = f"{lint.name('fsdp_version')} {'is not read' if lint.version_unread else state}"
    severity: Any = "error" if lint.consumer.name in ("fsdptool", "simpletuner") else "warning"
    if lint.consumer.name == "fsdptool":
        what += "; fsdptool supports FSDP2 only"
    place = lint.at("fsdp_version") or lint.fsdp_entry or lint.root.get("fsdp_config")
    lint.report(
        "FSD301",
        f"{what}: the run uses FSDP1",
        place,
        severity=severity,
        help=migrated.refusal or "fsdptool migrate FILE writes the equivalent FSDP2 settings",
        edits=migrated.edits,
        safe=False,
        fix="migrate to FSDP2",
        changes=migrated.changes,
    )
    if lint.get("sharding_strategy") == "no_shard":
        lint.report_value(
            "FSD332", "NO_SHARD has no FSDP2 equivalent", "sharding_strategy", severity="warning"
        )
    if lint.get("state_dict_type") == "local":
        lint.report_value(
            "FSD333", "LOCAL_STATE_DICT is not supported by FSDP2", "state_dict_type", severity="warning"
        )


def _wrapping(lint: LintContext) -> None:
    policy = lint.get("wrap_policy")
    if policy == "none" and not lint.written("wrap_policy") and launched_by_accelerate(lint):
        origin = lint.facts["wrap_policy"].origin if "wrap_policy" in lint.facts else ""
        if not origin.startswith("environment"):
            block = lint.root.get("fsdp_config")
            edits = lint.editor.add(
                block.node if block else None, block, {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
            )
            lint.report(
                "FSD315",
                "fsdp_auto_wrap_policy is not written: the whole model is one unit",
                block,
                edits=edits,
                safe=False,
                fix="write TRANSFORMER_BASED_WRAP",
                changes={"wrap_policy": "transformer"},
            )
    if policy == "size" and lint.wraps_nothing and lint.consumer.name != "fsdptool":
        # accelerate 1.15 set_auto_wrap_policy: "If zero, we silently ignore it."
        lint.report_value(
            "FSD315",
            f"{lint.name('min_num_params')} is 0: no module is wrapped, and the whole model is one unit",
            lint.at("min_num_params", "wrap_policy"),
            help="write a threshold, or wrap by class",
        )
    elif policy == "size":
        # torch's FSDP1 policy passes containers by; accelerate's FSDP2 policy counts parameters only.
        first = lint.get("fsdp_version") == 1
        lint.report_value(
            "FSD324",
            f"size-based wrapping fails {'under version 2 ' if first else ''}on models whose layer list "
            "exceeds the threshold",
            "wrap_policy",
            severity="info" if first else None,
        )
    classes = lint.at("wrap_classes")
    if policy != "transformer" and classes is not None:
        lint.ignore(classes, "read with TRANSFORMER_BASED_WRAP only")
        lint.overridden["wrap_classes"] = []
    for class_name in lint.get("wrap_classes") or ():
        if policy != "transformer":
            break
        what = None
        if class_name in _LEAVES:
            what = "a layer inside the blocks, not a block"
        elif class_name.endswith(("Embedding", "Embeddings")):
            what = "an embedding, judging by its name"
        elif class_name.endswith(_ONCE):
            what = "a part that the model has once, judging by its name"
        elif class_name.endswith(_WHOLE) or (class_name.endswith("Model") and len(class_name) > 5):
            what = "a whole model, judging by its name"
        if what is not None:
            lint.report_value("FSD335", f"{class_name} is {what}", "wrap_classes")


def _checkpointing(lint: LintContext) -> None:
    on = bool(lint.get("activation_checkpointing"))
    offload = bool(lint.get("activation_checkpointing_offload"))
    if on and lint.wraps_nothing and lint.consumer.name != "fsdptool":
        # FSDP1 passes no policy to torch's apply_activation_checkpointing, which then takes every module.
        first = lint.get("fsdp_version") == 1
        lint.report(
            "FSD316",
            "without wrapped blocks activation checkpointing takes every module, and crashes under version 2"
            if first
            else "activation checkpointing crashes without wrapped blocks",
            "activation_checkpointing",
            severity="warning" if first else None,
        )
    if offload and (not on or lint.get("fsdp_version") != 2):
        need = "activation checkpointing" if not on else "fsdp_version 2"
        lint.report("FSD318", f"activation offload requires {need}", "activation_checkpointing_offload")
    entry = lint.gradient_checkpointing
    if on and entry is not None:
        lint.report(
            "FSD317",
            f"{entry.key} and FSDP's activation checkpointing are both enabled",
            entry,
            edits=lint.editor.replace(entry.node, False),
            safe=False,
            fix=f"write {entry.key}: false",
            changes={"gradient_checkpointing": False},
        )
    only = lint.save_only_model
    sharded = lint.get("state_dict_type") == "sharded"
    if only is not None and (sharded or lint.loads_best_model):
        other = "SHARDED_STATE_DICT" if sharded else "load_best_model_at_end under FSDP"
        lint.report("FSD340", f"save_only_model cannot be combined with {other}", only)


def _loading(lint: LintContext) -> None:
    consumer = lint.consumer
    if lint.load_in_8bit is not None and lint.get("fsdp_version") == 2:
        # bitsandbytes 0.50.2 under torch 2.13: 'Parameter' object has no attribute 'CB' in the first forward.
        message = "8-bit weights of bitsandbytes lose their scales when FSDP2 shards them"
        lint.report("FSD346", message, lint.load_in_8bit, help="load the base in 4 bits, or in 16")
    if (
        consumer.name == "accelerate"
        and lint.get("fsdp_version") == 2
        and lint.get("cpu_ram_efficient_loading")
        and lint.get("cpu_offload")
        and not consumer.before(1, 7)
        and consumer.before(1, 13)
    ):
        # fsdp2_load_full_state_dict has its argument cpu_offload since accelerate 1.13.0; 1.12.0 leaves the
        # shards on the GPU, and torch's FSDPParamGroup._validate_cpu_offload_params refuses them.
        entry = lint.at("cpu_offload", "cpu_ram_efficient_loading")
        lint.report(
            "FSD358", f"{consumer} loads the shards to the GPU, where CPU offload refuses them", entry
        )
    # Where no policy is written at all, FSD315 names the cause, and mending that mends this.
    if not lint.get("cpu_ram_efficient_loading") or lint.get("wrap_policy") != "none":
        return
    if lint.written("wrap_policy"):
        entry = lint.at("cpu_ram_efficient_loading") or lint.at("wrap_policy")
        lint.report("FSD319", "RAM-efficient loading without wrapped modules", entry)


def _compilation(lint: LintContext) -> None:
    """Judge ``dynamo_config`` as accelerate 1.15's ``Accelerator._prepare_fsdp2`` applies it."""
    block = lint.root.get("dynamo_config")
    if block is None or block.node.kind != "map" or lint.consumer.name != "accelerate":
        return
    # The launcher adds the prefix dynamo_ where it is missing (commands/launch.py).
    entries = {f"dynamo_{str(item.key).removeprefix('dynamo_')}": item for item in block.node.entries}
    backend, regional = entries.get("dynamo_backend"), entries.get("dynamo_use_regional_compilation")
    if backend is None or str(backend.node.value).lower() in ("no", "none", "false"):
        return
    if lint.get("fsdp_version") != 2:
        return
    if regional is not None and spelling.boolean(regional.node.value):
        if lint.consumer.before(1, 14):
            lint.report(
                "FSD357",
                f"{lint.consumer} compiles the blocks so that FSDP2's hooks on them never run",
                regional,
                severity="error",
                help="use accelerate 1.14 or newer, or write dynamo_use_regional_compilation: false",
            )
        return
    key = "dynamo_use_regional_compilation"
    edits = (
        lint.editor.add(block.node, block, {key: True})
        if regional is None
        else lint.editor.replace(regional.node, True)
    )
    lint.report(
        "FSD357",
        "the whole model is compiled at once, not block by block",
        backend,
        edits=edits,
        fix=f"write {key}: true",
    )


def _defaults(lint: LintContext) -> None:
    """Write out what another program or version would fill in differently."""
    if lint.dialect.name != "accelerate":
        return
    pending = lint.pending()
    unwritten = not lint.written("mixed_precision") and "mixed_precision" not in pending
    if lint.consumer.name == "accelerate" and unwritten:
        lint.report(
            "FSD352",
            "mixed_precision is not written; the default is 'no'",
            edits=lint.editor.add(lint.root, None, {"mixed_precision": "no"}),
            fix="write mixed_precision: 'no'",
        )
    block = lint.root.get("fsdp_config")
    keys = [("fsdp_state_dict_type", "state_dict_type")]
    if lint.get("fsdp_version") == 2:
        keys.append(("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading"))
    for key, canonical in keys:
        fact = lint.facts.get(canonical)
        if fact is None or fact.entry is not None or fact.origin.startswith("environment"):
            continue
        if canonical in pending:
            continue
        value = WRITTEN.get(canonical, {}).get(fact.value, fact.value)
        edits = lint.editor.add(block.node if block else None, block, {key: value})
        lint.report(
            "FSD320",
            f"{key} is not written; the default is {str(value).lower() if value is True else value}",
            block,
            edits=edits,
            fix=f"write {key}: {str(value).lower() if value is True else value}",
        )


@dataclass(frozen=True, slots=True)
class MigrationEdits:
    """What migrating a file takes: edits and the settings they change, or why it is refused."""

    edits: tuple[Edit, ...] | None
    changes: Mapping[str, Any] = field(default_factory=dict)
    refusal: str | None = None


def migration(lint: LintContext) -> MigrationEdits:
    """Return how an FSDP1 file becomes FSDP2, in its own dialect."""
    refusal = _refusal(lint)
    if refusal is not None:
        return MigrationEdits(None, refusal=refusal)
    strategy = lint.get("sharding_strategy") or "full_shard"
    mesh = {}
    if strategy.startswith("hybrid"):
        mesh = hybrid_mesh(lint.get("num_processes"), lint.get("num_machines"))
    target = Target(RESHARD_OF_STRATEGY[strategy], lint.get("state_dict_type") or "full", mesh)
    if not lint.dialect.in_place:
        return MigrationEdits(
            None, refusal=f"rewrite the file: fsdptool migrate --to {lint.dialect.name} FILE"
        )
    try:
        steps = Rewriter(lint.source, partial(parse_source, dialect=lint.dialect))
        further = lint.dialect.migrate(steps, lint, target)
    except NotEditableError as error:
        return MigrationEdits(None, refusal=f"the form of the file does not allow it: {error}")
    changes: dict[str, Any] = {"fsdp_version": 2, "reshard_after_forward": target.reshard, **mesh, **further}
    changes.update(dict.fromkeys(LEGACY))
    if mesh:
        changes |= {name: 1 for name in MESH if name not in mesh}
    return MigrationEdits(edits_between(lint.source.text, steps.source.text), changes)


def _refusal(lint: LintContext) -> str | None:
    strategy = lint.get("sharding_strategy")
    if strategy == "no_shard":
        return "NO_SHARD is plain data parallelism: use distributed_type MULTI_GPU (DDP) instead of FSDP"
    if lint.get("state_dict_type") == "local":
        return "LOCAL_STATE_DICT is not supported by FSDP2: use SHARDED_STATE_DICT"
    if lint.migration_refusal:
        return lint.migration_refusal
    if lint.get("activation_checkpointing") and lint.wraps_nothing and lint.consumer.name != "fsdptool":
        return "activation checkpointing crashes under FSDP2 where nothing is wrapped: wrap the blocks first"
    if lint.has("FSD336", severity="error"):
        return "decide which strategy you want: the one in the file has never run (FULL_SHARD has)"
    if strategy is not None and strategy.startswith("hybrid"):
        machines, processes = lint.get("num_machines"), lint.get("num_processes")
        if "dp_replicate" in lint.dialect.cannot:
            return (
                f"hybrid sharding is a mesh under FSDP2, which {lint.dialect.name} files cannot express: "
                "fsdptool migrate --to accelerate"
            )
        if isinstance(machines, int) and machines > 1 and not hybrid_mesh(processes, machines):
            return "hybrid sharding requires num_processes, a multiple of num_machines, for its mesh"
    entries = (fact.entry for fact in lint.facts.values() if fact.entry is not None)
    named = next((entry.key_node.file for entry in entries if entry.key_node.file is not None), None)
    if named is not None:
        return f"the settings are in another file: fsdptool migrate {shlex.quote(str(named.source.path))}"
    return None
