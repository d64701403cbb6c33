"""What the codes of reading a reference mean."""

from fsdptool.records.diagnostic import Rule

RULES = (
    Rule("DET101", "a model without layers", "warning",
         "The configuration sets a number of layers to 0: nothing can be wrapped, and FSDP2 would gather the "
         "whole model at once.",
         "Set the real depth."),
    Rule("DET102", "remote code not used", "info",
         "`auto_map` names code in the reference. transformers has the model type itself, and its own "
         "class is used: nothing is run that a reference brings along.",
         "Nothing, or pass --trust-remote-code to run the reference's code."),
    Rule("DET103", "quantisation left out", "info",
         "Shapes and totals are those of the unquantised model: quantised tensors are packed, and FSDP2 "
         "shards what training holds.",
         "Nothing needs to be done."),
    Rule("DET104", "key written again in a model's file", "warning",
         "A JSON object names a key more than once. transformers, diffusers and peft take the last value and "
         "say nothing; the reader of the file may believe the first.",
         "Keep one of them."),
    Rule("DET110", "pipeline with a second denoiser", "info",
         "The pipeline holds two models that are trained; the answer is about the first alone.",
         "Name the other with --component."),
    Rule("DET111", "pipeline index and component disagree", "warning",
         "`model_index.json` and the component's own config.json name different classes; diffusers builds "
         "either without a word. The component's own is used.",
         "Repair the wrong one."),
)  # fmt: skip
