"""Rules on what settings do by themselves; those on mesh, model and hardware have files of their own."""

from __future__ import annotations

from fsdptool.records.diagnostic import Rule

MEANING = (
    Rule("FSD301", "FSDP1 runs", "warning",
         "accelerate 1.15 takes a missing `fsdp_version` as 1. FSDP1 is deprecated in torch and leaves "
         "transformers after 5.23; FSDP2 does not have most of its keys.",
         "Migrate: `fsdptool migrate FILE` (or --unsafe-fixes) writes the equivalent FSDP2 settings, "
         "including every default that differs.", "unsafe"),
    Rule("FSD302", "FSDP1 key without effect under version 2", "warning",
         "accelerate 1.15 ignores it under version 2 when it comes from a file. FSDP2 does by itself what "
         "this value requests. All such keys of a file are one finding; where FSDP1 runs (FSD301) they are "
         "a note, because migrating removes them.",
         "Remove them (--fix: the run stays the same).", "safe"),
    Rule("FSD303", "FSDP1 setting lost under version 2", "error",
         "The key is ignored under version 2, and the run differs from what it requests: SHARD_GRAD_OP "
         "becomes full sharding, HYBRID_SHARD full sharding over all ranks, forward prefetch is off.",
         "Write the FSDP2 equivalent (--unsafe-fixes: the run changes), or remove the key.", "unsafe"),
    Rule("FSD304", "FSDP and DeepSpeed together", "error",
         "Only one of them can shard the model. accelerate 1.15 uses the one that `distributed_type` names "
         "and ignores the other block (with a third type both have no effect, FSD330); TrainingArguments and "
         "SimpleTuner stop.",
         "Keep one of the two."),
    Rule("FSD314", "FSDP on CPU through accelerate", "error",
         "accelerate 1.15 starts FSDP on accelerators only: on CPU the run continues unsharded, as "
         "independent processes or DDP, with exit code 0. fsdptool's own trainer shards on CPU.",
         "Train with `fsdptool train`, and add the comment `# fsdptool: consumer=fsdptool` to the file."),
    Rule("FSD315", "nothing is wrapped", "warning",
         "accelerate 1.15 reads a missing `fsdp_auto_wrap_policy` as NO_WRAP: one unit holds the whole "
         "model, which is gathered at once. SIZE_BASED_WRAP with a threshold of 0 does the same, and "
         "TrainingArguments pass 0 when no threshold is written.",
         "Write `fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP` (--unsafe-fixes), or NO_WRAP if that is "
         "intended.", "unsafe"),
    Rule("FSD316", "activation checkpointing without wrapping", "error",
         "Under version 2 accelerate 1.15 checkpoints the units that are wrapped; with NO_WRAP or no policy "
         "it crashes: `TypeError: 'NoneType' object is not callable`. Under version 1 it checkpoints every "
         "module by itself, and the finding is a warning.",
         "Wrap the blocks (TRANSFORMER_BASED_WRAP), or disable activation checkpointing."),
    Rule("FSD317", "two kinds of activation checkpointing", "error",
         "FSDP's activation checkpointing and `gradient_checkpointing` recompute the same blocks twice; "
         "the transformers Trainer raises an error for the combination.",
         "Keep FSDP's own (--unsafe-fixes disables gradient_checkpointing).", "unsafe"),
    Rule("FSD318", "activation offload without its requirements", "error",
         "accelerate 1.15: `activation_checkpointing_offload=True` requires "
         "`activation_checkpointing=True`, and `fsdp_version=2`.",
         "Enable activation checkpointing, or disable its offload."),
    Rule("FSD319", "RAM-efficient loading without wrap units", "warning",
         "Without wrapping, one unit holds the whole model: every step gathers all of it, and FSDP1 builds "
         "all of it on every GPU before sharding. The option saves host memory, but GPU memory runs out.",
         "Wrap the blocks, or set fsdp_cpu_ram_efficient_loading to false."),
    Rule("FSD320", "setting left to a default that differs between programs", "info",
         "The default depends on the FSDP version or on the program: FULL_STATE_DICT under version 1 and "
         "in TrainingArguments, SHARDED_STATE_DICT in accelerate under version 2; RAM-efficient loading is "
         "true in accelerate launch and false in TrainingArguments.",
         "Write the setting (--fix writes the value in effect).", "safe"),
    Rule("FSD321", "fsdp_sync_module_states false stops the launch", "error",
         "FSDP2 ignores the key, but accelerate 1.15's launcher refuses the file while RAM-efficient "
         "loading is true or not written (a value of false or an empty text; other text passes): When using "
         "`--fsdp_cpu_ram_efficient_loading` set `--fsdp_sync_module_states` to `True`.",
         "Remove the key under version 2 (--fix).", "safe"),
    Rule("FSD322", "reshard_after_forward as a strategy name or number", "error",
         "Under version 2, accelerate 1.15 requires a boolean: `invalid truth value full_shard`. `1` is "
         "read as true; `2` fails.",
         "Write true or false (--fix: FULL_SHARD is true, SHARD_GRAD_OP false).", "safe"),
    Rule("FSD323", "sharding strategy as a number", "info",
         "torch's enum numbers: 1 FULL_SHARD, 2 SHARD_GRAD_OP, 3 NO_SHARD, 4 HYBRID_SHARD, 5 "
         "_HYBRID_SHARD_ZERO2. `accelerate to-fsdp2` copies the numbers unchanged, and 2 then fails.",
         "Write the name, or migrate."),
    Rule("FSD324", "size-based wrapping", "warning",
         "Under FSDP2 accelerate 1.15 hands every module above the threshold to fully_shard, which refuses "
         "containers (ModuleList); torch's FSDP1 policy skips them. Which modules are wrapped depends on "
         "the size of the model.",
         "Wrap by class (`fsdptool detect` lists the classes)."),
    Rule("FSD325", "unused size threshold", "warning",
         "`fsdp_min_num_params` is read with SIZE_BASED_WRAP only.",
         "Remove it (--fix: the run stays the same).", "safe"),
    Rule("FSD326", "process count missing", "warning",
         "accelerate 1.15: You need to manually pass in `--num_processes` using this config yaml.",
         "Write num_processes, or pass --num_processes at every launch."),
    Rule("FSD327", "FSDP over a single process", "warning",
         "There is no other process to shard with: FSDP adds cost without saving memory.",
         "Start more processes, or train without FSDP."),
    Rule("FSD329", "rendezvous address missing", "warning",
         "Several machines need `main_process_ip` and `main_process_port`; otherwise accelerate 1.15 waits "
         "for a host called None. Both can be given on the command line.",
         "Write both, or pass --main_process_ip and --main_process_port."),
    Rule("FSD330", "FSDP block under another distributed_type", "error",
         "accelerate 1.15 accepts the block and never starts FSDP.",
         "Write `distributed_type: FSDP` (--unsafe-fixes: the run changes), or remove the block.", "unsafe"),
    Rule("FSD331", "GPU ids do not match the processes", "warning",
         "With more processes than ids, several ranks share one GPU; a single id with MULTI_GPU is refused.",
         "List as many ids as processes per machine."),
    Rule("FSD332", "NO_SHARD has no FSDP2 equivalent", "error",
         "NO_SHARD is plain data parallelism. `accelerate to-fsdp2` turns it into reshard false, which "
         "shards the parameters.",
         "Use `distributed_type: MULTI_GPU` (DDP)."),
    Rule("FSD333", "LOCAL_STATE_DICT is not supported", "error",
         "accelerate 1.15: FSDP2 does not support LOCAL_STATE_DICT.",
         "Use SHARDED_STATE_DICT: each rank writes its shard, and the checkpoint can be read with a "
         "different number of ranks."),
    Rule("FSD335", "suspicious wrap class", "warning",
         "The class is a leaf layer, an embedding, a pooler, a head or a whole model, judging by its name: "
         "this gives far too many units, or one.",
         "Name the repeated block (`fsdptool detect REF` finds it)."),
    Rule("FSD336", "strategy under the wrong key for FSDP1", "error",
         "Under version 1 accelerate 1.15 always exports FSDP_SHARDING_STRATEGY (FULL_SHARD unless "
         "`fsdp_sharding_strategy` is written), which wins: a strategy written in "
         "`fsdp_reshard_after_forward`, as `accelerate config` does, has always run as FULL_SHARD. The "
         "same happens to the strategy that TrainingArguments pass, in `fsdp` or `reshard_after_forward`: "
         "the plugin first fills its own field from FSDP_SHARDING_STRATEGY or with FULL_SHARD.",
         "Migrate, and decide which of the two is intended."),
    Rule("FSD337", "text tested for truth", "error",
         "The program tests this value without parsing it: transformers 5.23 enables offload for "
         "`cpu_offload: \"false\"`, and accelerate 1.15 runs on the CPU with `use_cpu: \"false\"`. "
         "SimpleTuner 4.8 skips the text \"false\", so that a default of true stays.",
         "Write a plain boolean (--unsafe-fixes: the run changes to what is written).", "unsafe"),
    Rule("FSD338", "FSDP version left to the installed transformers", "warning",
         "Without a version TrainingArguments ran FSDP1 before transformers 5.10 and runs FSDP2 since.",
         "Write `\"version\": 2` (--fix writes the version in effect).", "safe"),
    Rule("FSD339", "legacy `fsdp` text or list", "info",
         "transformers 5.23 still understands `full_shard`, `shard_grad_op`, `offload` and `auto_wrap` in "
         "lower case separated by spaces, but has deprecated them; anything else raises an error.",
         "No action is needed before transformers removes them. The new form is `fsdp: true` with the "
         "options in `fsdp_config` (--fix).", "safe"),
    Rule("FSD340", "save_only_model with a sharded state dict, or with the best model", "error",
         "transformers 5.23's Trainer refuses save_only_model with SHARDED_STATE_DICT, and under FSDP with "
         "load_best_model_at_end.",
         "Use FULL_STATE_DICT without load_best_model_at_end, or save_only_model false."),
    Rule("FSD341", "setting taken from the environment", "info",
         "The file does not contain the setting, accelerate launch does not export it, and the variable is "
         "set in this environment: the variable decides.",
         "Write the setting in the file, or unset the variable."),
    Rule("FSD344", "setting newer than the target version", "error",
         "The setting does not exist in the accelerate or transformers version named by --target.",
         "Upgrade, or leave the setting out."),
    Rule("FSD345", "optimizer that does not work on sharded parameters", "warning",
         "SimpleTuner replaces optimi-*, bnb-* and soap optimizers under FSDP2; elsewhere they fail in the "
         "first step. axolotl 0.19 refuses adamw_8bit and adamw_bnb_8bit under FSDP2, and muon under FSDP1.",
         "Choose an optimizer that works on DTensors (adamw).", "unsafe"),
    Rule("FSD346", "precision incompatible with sharding", "error",
         "SimpleTuner refuses quanto-quantised base models with FSDP2 (torchao int8 passes). axolotl 0.19 "
         "refuses RAM-efficient loading with load_in_4bit under FSDP2: only rank 0 would quantise, and the "
         "scatter deadlocks.",
         "In SimpleTuner, choose another base_model_precision; in axolotl, set cpu_ram_efficient_loading "
         "to false (--unsafe-fixes).", "unsafe"),
    Rule("FSD348", "dotted path as wrap policy", "error",
         "Programs do not accept a dotted path as a policy (accelerate 1.15: `Invalid auto wrap policy`), "
         "and a configuration must not name code to import.",
         "Use TRANSFORMER_BASED_WRAP with class names."),
    Rule("FSD349", "EMA on CPU with sharded parameters", "error",
         "SimpleTuner refuses ema_cpu_only with FSDP2.",
         "Keep the moving average on the device."),
    Rule("FSD350", "offload incompatible with the optimizer", "error",
         "SimpleTuner refuses fsdp_cpu_offload with optimizer_release_gradients on optimi optimizers and "
         "with optimizer_cpu_offload_method=torchao; axolotl 0.19 refuses offload_params with 8-bit "
         "optimizers under FSDP1.",
         "Use one of the two."),
    Rule("FSD352", "mixed precision not written", "info",
         "accelerate 1.15 trains in the model's own dtype when the setting is missing.",
         "Write mixed_precision (--fix writes 'no').", "safe"),
    Rule("FSD353", "activation offload key that is not read", "warning",
         "accelerate calls it `fsdp_activation_checkpointing_offload` (1.15, version 2, with activation "
         "checkpointing); TrainingArguments 5.23 reads neither.",
         "Use accelerate's key in the accelerate YAML."),
    Rule("FSD354", "checked against another version", "info",
         "The rules were checked by running accelerate 1.15.0 and transformers 5.23.0; for other versions "
         "they are a best guess.",
         "No action is needed."),
    Rule("FSD355", "settings nested one level too deep for --fsdp_config", "warning",
         "The file holds `fsdp` and `fsdp_config` and nothing else. Parsed as TrainingArguments it works; "
         "given as the file of --fsdp_config, transformers 5.23 looks for its keys one level higher, finds "
         "none and runs on defaults. (ms-swift unwraps the shape itself.)",
         "For --fsdp_config, keep what is inside `fsdp_config` and pass --fsdp on the command line."),
    Rule("FSD357", "compilation that is not regional", "info",
         "With `dynamo_config`, accelerate 1.15 (`Accelerator._prepare_fsdp2`) compiles the whole model, "
         "whose compile time grows with the number of layers. With `dynamo_use_regional_compilation` it "
         "compiles one repeated block and reuses the result (`utils/other.py:compile_regions_fsdp2`). "
         "Before 1.14 the regional form wrapped the blocks in modules that bypass the hooks of FSDP2, so "
         "that parameters are not gathered per block: that is an error.",
         "Write `dynamo_use_regional_compilation: true` (--unsafe-fixes: the run changes).", "unsafe"),
    Rule("FSD358", "RAM-efficient loading with CPU offload in an older accelerate", "error",
         "accelerate 1.7 to 1.12 (`fsdp2_load_full_state_dict`) leaves the loaded shards on the GPU. torch's "
         "FSDP2 stops in the first forward: FSDP parameters should be materialized on CPU when enabling "
         "CPU offloading. accelerate 1.13 moves them back to the CPU.",
         "Use accelerate 1.13 or newer, or set fsdp_cpu_ram_efficient_loading to false."),
    Rule("FSD359", "Liger kernel that the trainer refuses", "error",
         "TRL 1.16's SFT, DPO, KTO and GRPO trainers replace the head of the model themselves and refuse "
         "`fused_linear_cross_entropy: true` in `liger_kernel_config`. Before TRL 1.0 (seen in 0.24, "
         "`trainer/dpo_trainer.py`) DPO computes with Liger only the losses sigmoid, apo_zero, apo_down, "
         "sppo_hard and nca_pair.",
         "Leave the option out; with an older TRL, use one of these losses, or no Liger kernel."),
    Rule("FSD360", "batch that does not divide", "error",
         "TRL 1.16 (`trainer/grpo_config.py`) refuses a `generation_batch_size` that is not a multiple of "
         "per_device_train_batch_size x num_processes, and of num_generations. torchtitan 0.2 (`train.py`) "
         "refuses a `global_batch_size` that is not a multiple of local_batch_size x data-parallel ranks.",
         "Choose a multiple."),
    Rule("FSD362", "sharding depends on the recipe that is run", "info",
         "torchtune reads the same file for single-device and for distributed recipes, and only the latter "
         "shard. The file has no key that only a distributed recipe reads.",
         "No action is needed; `fsdp_reshard_after_forward: true` states the intention."),
    Rule("FSD370", "settings that axolotl refuses together", "error",
         "axolotl 0.19 validates a file before it loads anything, and stops. The rule covers what its "
         "validators say of quantisation (`load_in_4bit` without an adapter, 4 or 8 bits with DPO under "
         "FSDP2), adapters (kernels of LoRA under FSDP1, ReLoRA with FSDP), precision (`fp32_norms`, the "
         "float8 all-gather) and optimizers (polora, q_galore_adamw8bit and flash_* need FSDP2).",
         "Change one of the settings that the message names."),
)  # fmt: skip
