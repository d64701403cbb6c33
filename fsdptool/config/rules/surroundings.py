"""Rules of the family ``model``: judged with ``--model REF``."""

from __future__ import annotations

from fsdptool.records.diagnostic import Rule

MODEL = (
    Rule("FSD401", "wrap class absent from the model", "error",
         "accelerate 1.15 stops in prepare: `Could not find the transformer layer class X in the model.`",
         "Use the classes that `fsdptool detect` chooses (--unsafe-fixes writes them).", "unsafe"),
    Rule("FSD402", "the whole model as wrap class", "warning",
         "Wrapping the model's own class makes one unit of everything: the whole model is gathered at once, "
         "which is what sharding was to avoid.",
         "Wrap the repeated blocks (--unsafe-fixes writes them).", "unsafe"),
    Rule("FSD403", "wrap class holds the embedding", "error",
         "accelerate 1.15 groups the input embedding separately; when a wrapped class contains it, "
         "fully_shard fails: `TypeError: Invariant encountered: value was None when it should not be`.",
         "Wrap the repeated blocks only (--unsafe-fixes writes them).", "unsafe"),
    Rule("FSD404", "RAM-efficient loading with persistent buffers", "error",
         "accelerate 1.15 broadcasts the state dict as DTensors; a persistent buffer is a plain tensor: "
         "`AttributeError: 'Tensor' object has no attribute 'device_mesh'` (accelerate issue 3898).",
         "Set fsdp_cpu_ram_efficient_loading to false (--unsafe-fixes: every rank then loads the weights).",
         "unsafe"),
    Rule("FSD405", "parameter shared by more than two modules", "error",
         "accelerate 1.15 handles a tie of two (input and output embedding); a third name fails: `Parameter "
         "'shared.weight' is shared with a parameter already managed by another FSDP group`.",
         "Train it with fsdptool's own trainer, which keeps tied parameters in one unit."),
    Rule("FSD406", "no wrap class is left", "error",
         "No class is named and the model's `_no_split_modules` are empty: accelerate 1.15 wraps nothing and "
         "says nothing; the whole model is one unit.",
         "Name the classes that `fsdptool detect` chooses (--unsafe-fixes writes them).", "unsafe"),
    Rule("FSD407", "context parallelism on a model that cannot", "error",
         "accelerate 1.15 and torch's context parallelism handle full causal attention through SDPA only; it "
         "refuses sliding, chunked and linear attention layers: `Context parallelism does not support "
         "attention layers of type [...]`.",
         "Set cp_size to 1, or train a model with full attention; `fsdptool train` takes windows and chunks, "
         "too (consumer fsdptool)."),
    Rule("FSD408", "wrap classes leave most parameters in the root", "warning",
         "What no wrap class covers stays in the root unit, is gathered before the first layer and kept "
         "until backward ends.",
         "Wrap the classes that hold the parameters (--unsafe-fixes writes detect's choice).", "unsafe"),
    Rule("FSD409", "size-based wrapping meets a container", "error",
         "When a ModuleList exceeds the threshold, fully_shard refuses it: `fully_shard does not support "
         "containers that do not implement forward: ModuleList`.",
         "Wrap by class instead (--unsafe-fixes writes detect's choice).", "unsafe"),
    Rule("FSD410", "`_no_split_modules` names a class the model lacks", "error",
         "No class is named in the file, so accelerate 1.15 takes the model's `_no_split_modules`; some of "
         "their names are absent from this model and preparation stops.",
         "Name the classes explicitly (--unsafe-fixes writes detect's choice).", "unsafe"),
    Rule("FSD411", "ignored modules hold trainable parameters", "warning",
         "Ignored parameters stay plain tensors that accelerate 1.15 does not synchronise: after three steps "
         "the ranks hold different weights. RAM-efficient loading silently shards them anyway.",
         "Freeze them or leave them sharded."),
)  # fmt: skip


HARDWARE = (
    Rule("FSD501", "bf16 is not native on this GPU", "warning",
         "The GPU's tensor cores do not compute in bfloat16; torch emulates it slowly.",
         "Use fp16 on this GPU, or another GPU (--unsafe-fixes writes fp16).", "unsafe"),
    Rule("FSD502", "offload needs more host memory than there is", "error",
         "CPU offload keeps parameters, gradients and optimizer states of all ranks of a node in host "
         "memory.",
         "Use more nodes, a smaller optimizer, or no offload."),
    Rule("FSD503", "does not fit", "error",
         "The predicted peak exceeds what the GPU can give (see `fsdptool plan` for the ladder).",
         "Follow the next steps that `fsdptool plan` prints."),
    Rule("FSD504", "process count and GPU count differ", "error",
         "The file asks for another number of processes than GPUs were named.",
         "Make num_processes equal to the number of GPUs in all."),
    Rule("FSD505", "fp8 is not native on this GPU", "error",
         "fp8 needs tensor cores of compute capability 8.9 or newer.",
         "Use bf16 on this GPU."),
    Rule("FSD506", "hardware could not be judged", "warning",
         "The rules of this family were not judged.",
         "See the message; `fsdptool plan` says more."),
)  # fmt: skip
