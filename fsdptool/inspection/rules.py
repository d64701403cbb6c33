"""What the codes of inspecting a model mean."""

from fsdptool.records.diagnostic import Rule

RULES = (
    Rule("DET120", "misspelt configuration key", "warning",
         "The class does not know the key and knows one like it. The library silently drops it and "
         "uses the default.",
         "Write the key that was meant."),
    Rule("DET121", "configuration keys that are not read", "info",
         "The class does not know these keys.",
         "No action, unless one of them is a size."),
    Rule("DET122", "class differs from the configuration", "warning",
         "`_class_name` names a class other than the one that was built.",
         "Correct the configuration."),
    Rule("DET123", "model type differs from the configuration", "warning",
         "`model_type` names a type other than the one that the class reads.",
         "Correct the configuration."),
    Rule("DET130", "module tree with a cycle", "error",
         "A module contains itself. Units need a tree, and most walks over modules do not end on a cycle.",
         "Keep the back reference in a list or a weakref, outside nn.Module's registration."),
    Rule("DET201", "persistent buffers", "warning",
         "accelerate 1.15 crashes on persistent buffers while `fsdp_cpu_ram_efficient_loading` is on, "
         "which is its launcher's default: `AttributeError: 'Tensor' object has no attribute "
         "'device_mesh'`.",
         "Set fsdp_cpu_ram_efficient_loading to false (FSD404 reports it in a file)."),
    Rule("DET202", "grouping that torch refuses", "warning",
         "With the selected classes, torch refuses accelerate 1.15's grouping: a tie across units, or a "
         "wrapped class that holds the input embedding.",
         "Train with fsdptool's native layout, or select other classes."),
    Rule("DET203", "`_no_split_modules` names absent classes", "warning",
         "accelerate 1.15 fails with `Could not find the transformer layer class` unless the file names "
         "classes.",
         "Write fsdp_transformer_layer_cls_to_wrap (FSD410 reports it in a file)."),
    Rule("DET204", "`_no_split_modules` is empty", "warning",
         "Without classes in the file accelerate 1.15 silently wraps no class and gathers the whole "
         "model at once.",
         "Write fsdp_transformer_layer_cls_to_wrap (FSD406 reports it in a file)."),
    Rule("DET205", "torch refuses the grouping by `_no_split_modules`", "warning",
         "With the current `_no_split_modules`, torch refuses accelerate's grouping.",
         "Write fsdp_transformer_layer_cls_to_wrap."),
    Rule("DET206", "no class to wrap", "warning",
         "No repeated block was found: every parameter outside the embeddings is in one unit, gathered as a "
         "whole.",
         "Set NO_WRAP explicitly and disable activation checkpointing; or select classes with "
         "--wrap."),
    Rule("DET207", "trainable parameters of several dtypes", "warning",
         "FSDP2 expects one dtype in each unit.",
         "Set mixed_precision to bf16, which makes masters float32, or load the model in one dtype."),
    Rule("DET208", "tied embeddings", "info",
         "Input and output embedding are one tensor. accelerate 1.15 keeps it gathered from forward to "
         "backward.",
         "No action: this is expected, and `plan` accounts for it."),
    Rule("DET209", "other shared tensors", "info",
         "Several modules share a tensor. All of its owners must be in one unit.",
         "fsdptool's native layout ensures this; accelerate handles ties of two tensors only (FSD405)."),
    Rule("DET210", "wrap class inside another", "info",
         "Correct, but each level has collectives of its own.",
         "--exclude one of the classes if the inner units are small."),
    Rule("DET211", "size-based wrapping reaches a container", "info",
         "SIZE_BASED_WRAP would wrap a ModuleList, which fully_shard refuses.",
         "Wrap by class (FSD409 reports it in a file)."),
    Rule("DET212", "fused experts", "info",
         "Experts are one three-dimensional tensor, sharded by expert. Ranks beyond their number hold "
         "no part of them, and LoRA targets by module name do not match them.",
         "`--world-size` shows each rank's share."),
    Rule("DET213", "transformers' own plan does not match", "info",
         "Rules of the model's FSDP plan in transformers refer to modules that do not exist.",
         "Do not rely on DistributedConfig(fsdp_plan=...): it shards fewer modules than expected."),
    Rule("DET214", "`_no_split_modules` leaves out blocks", "warning",
         "Without classes in the file these blocks stay in the root unit.",
         "Write fsdp_transformer_layer_cls_to_wrap."),
    Rule("DET215", "scalar parameters", "warning",
         "fully_shard refuses parameters without dimensions, and accelerate 1.15 has no setting for it.",
         "Reshape them to one element before prepare; fsdptool replicates them on every rank."),
)  # fmt: skip
