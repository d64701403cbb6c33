"""Rules on what settings do to a model."""

from __future__ import annotations

from fsdptool.records.diagnostic import Rule

MODEL = (
    Rule("FSD401", "wrap class absent from the model", "error",
         "accelerate 1.15 stops in prepare: `Could not find the transformer layer class X in the model.`",
         "Use the classes that `fsdptool detect` chooses (--unsafe-fixes writes them).", "unsafe"),
    Rule("FSD402", "wrap class is the whole model", "warning",
         "Wrapping the model's own class puts everything in one unit: the whole model is gathered at once, "
         "which sharding is meant to avoid.",
         "Wrap the repeated blocks (--unsafe-fixes writes them).", "unsafe"),
    Rule("FSD403", "wrap class contains the input embedding", "error",
         "accelerate 1.15 groups the input embedding separately; when a wrapped class contains it, "
         "fully_shard fails: `TypeError: Invariant encountered: value was None when it should not be`. "
         "FSDP1 trains such a unit unless a module outside of it uses the same weight; otherwise this is a "
         "note there.",
         "Wrap the repeated blocks only (--unsafe-fixes writes them).", "unsafe"),
    Rule("FSD404", "RAM-efficient loading with persistent buffers", "error",
         "accelerate 1.15 broadcasts the state dict as DTensors; a persistent buffer is a plain tensor: "
         "`AttributeError: 'Tensor' object has no attribute 'device_mesh'` (accelerate issue 3898). FSDP1 "
         "loads them; there this is a note.",
         "Set fsdp_cpu_ram_efficient_loading to false (--unsafe-fixes: every rank then loads "
         "the weights).", "unsafe"),
    Rule("FSD405", "parameter shared by more than two modules", "error",
         "accelerate 1.15 handles a tie of two (input and output embedding); a third name fails: `Parameter "
         "'shared.weight' is shared with a parameter already managed by another FSDP group`. Under FSDP1 "
         "this is a note unless a wrapped class holds one of the names.",
         "Train it with fsdptool's own trainer, which keeps tied parameters in one unit."),
    Rule("FSD406", "model without wrap classes", "error",
         "The file does not name a class, and the model's `_no_split_modules` are empty: accelerate 1.15 "
         "does not wrap any module and does not warn; the whole model is one unit.",
         "Name the classes that `fsdptool detect` chooses (--unsafe-fixes writes them).", "unsafe"),
    Rule("FSD407", "model does not support context parallelism", "error",
         "accelerate 1.15 and torch's context parallelism handle full causal attention through SDPA only; "
         "it refuses sliding, chunked and linear attention layers: `Context parallelism does not support "
         "attention layers of type [...]`.",
         "Set cp_size to 1, or train a model with full attention; `fsdptool train` also supports windows "
         "and chunks (consumer fsdptool)."),
    Rule("FSD408", "wrap classes leave most parameters in the root", "warning",
         "Parameters outside the wrap classes stay in the root unit, which is gathered before the first "
         "layer and kept until backward ends.",
         "Wrap the classes that hold the parameters (--unsafe-fixes writes detect's choice).", "unsafe"),
    Rule("FSD409", "size-based wrapping of a container", "error",
         "When a ModuleList exceeds the threshold, fully_shard refuses it: `fully_shard does not support "
         "containers that do not implement forward: ModuleList`. torch's FSDP1 policy passes containers by; "
         "there this is a note.",
         "Wrap by class instead (--unsafe-fixes writes detect's choice).", "unsafe"),
    Rule("FSD410", "`_no_split_modules` names a class the model lacks", "error",
         "The file does not name a class, so accelerate 1.15 takes the model's `_no_split_modules`; some "
         "of their names are absent from this model and preparation stops.",
         "Name the classes explicitly (--unsafe-fixes writes detect's choice).", "unsafe"),
    Rule("FSD411", "ignored modules hold trainable parameters", "warning",
         "Ignored parameters stay plain tensors that accelerate 1.15 does not synchronise: after three "
         "steps the ranks hold different weights. RAM-efficient loading silently shards them anyway.",
         "Freeze them, or leave them sharded."),
    Rule("FSD412", "tied embeddings with accelerate 1.14", "error",
         "accelerate 1.14 puts the input embedding into a unit with the last norm and leaves the tied output "
         "embedding in the root unit. torch 2.12 and 2.13 stop at the first forward: `Parameter "
         "'model.embed_tokens.weight' is shared with a parameter already managed by another FSDP group`. "
         "accelerate 1.15 keeps both in one unit, and 1.13 and older both in the root.",
         "Use accelerate 1.15 or newer, or a torch below 2.12 if the shard ranks divide the vocabulary "
         "(else the last rows are not trained). With `--target accelerate==1.14,torch==2.11` the file is "
         "judged for both."),
    Rule("FSD413", "experts that are modules", "warning",
         "Where the model calls only the experts that a token chose, the others have no gradient. FSDP2 "
         "reduces only gradients that exist, by their position: those of different experts are averaged, "
         "without an error, or the job hangs (DET218).",
         "Train with `fsdptool train`, call every expert on every rank, or use a class with fused experts."),
    Rule("FSD414", "tower that some batches skip", "warning",
         "Ranks whose batch is text alone skip an encoder of pictures or sound, and call other collectives "
         "than the ranks that run it: the job hangs or stops (DET219).",
         "Train with `fsdptool train`, or give every rank a picture or sound in each batch."),
)  # fmt: skip
