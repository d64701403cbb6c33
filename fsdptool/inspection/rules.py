"""What the codes of inspecting a model mean."""

from fsdptool.records.diagnostic import Rule

RULES = (
    Rule("DET120", "misspelt configuration key", "warning",
         "The class does not know the key and knows one like it. The library drops it in silence and "
         "uses the default.",
         "Write the key that was meant."),
    Rule("DET121", "configuration keys that are not read", "info",
         "The class does not know these keys.",
         "Nothing, unless a size hides among them."),
    Rule("DET122", "another class than the configuration names", "warning",
         "`_class_name` names another class than the one that was built.",
         "Repair the configuration."),
    Rule("DET123", "another model type than the configuration names", "warning",
         "`model_type` names another type than the one the built class reads.",
         "Repair the configuration."),
    Rule("DET130", "module tree with a cycle", "error",
         "A module contains itself. Units need a tree, and most walks over modules do not end on a cycle.",
         "Keep the back reference out of nn.Module's registration: in a list or a weakref."),
    Rule("DET201", "persistent buffers", "warning",
         "accelerate 1.15 crashes on persistent buffers while `fsdp_cpu_ram_efficient_loading` is on, "
         "which is its launcher's default: `AttributeError: 'Tensor' object has no attribute "
         "'device_mesh'`.",
         "Set fsdp_cpu_ram_efficient_loading to false (FSD404 finds it in a file)."),
    Rule("DET202", "grouping that torch refuses", "warning",
         "With the chosen classes accelerate 1.15's grouping is refused by torch: a tie across units, or a "
         "wrapped class that holds the input embedding.",
         "Train with fsdptool's native layout, or choose other classes."),
    Rule("DET203", "`_no_split_modules` names absent classes", "warning",
         "accelerate 1.15 stops with `Could not find the transformer layer class` unless the file names "
         "classes.",
         "Write fsdp_transformer_layer_cls_to_wrap (FSD410 finds it in a file)."),
    Rule("DET204", "`_no_split_modules` is empty", "warning",
         "Without classes in the file accelerate 1.15 wraps nothing, in silence, and gathers the whole "
         "model at once.",
         "Write fsdp_transformer_layer_cls_to_wrap (FSD406 finds it in a file)."),
    Rule("DET205", "grouping by `_no_split_modules` is refused", "warning",
         "With `_no_split_modules` as it is, torch refuses accelerate's grouping.",
         "Write fsdp_transformer_layer_cls_to_wrap."),
    Rule("DET206", "no class to wrap", "warning",
         "No repeated block was found: every parameter outside the embeddings is one unit, gathered whole.",
         "Write NO_WRAP, which says so, and leave activation checkpointing off with it; or name classes with "
         "--wrap."),
    Rule("DET207", "trainable parameters of several dtypes", "warning",
         "FSDP2 expects one dtype in each unit.",
         "Set mixed_precision to bf16, which makes masters float32, or load the model in one dtype."),
    Rule("DET208", "tied embeddings", "info",
         "Input and output embedding are one tensor. accelerate 1.15 keeps it gathered from forward to "
         "backward.",
         "Nothing: expected for such models, and `plan` counts it."),
    Rule("DET209", "other shared tensors", "info",
         "Several modules share a tensor. All of its owners must lie in one unit.",
         "fsdptool's native layout sees to it; accelerate handles a tie of two only (FSD405)."),
    Rule("DET210", "wrap class inside another", "info",
         "Correct, but each level gathers by itself.",
         "--exclude one of the classes if the inner units are small."),
    Rule("DET211", "size-based wrapping reaches a container", "info",
         "SIZE_BASED_WRAP would wrap a ModuleList, which fully_shard refuses.",
         "Wrap by class (FSD409 finds it in a file)."),
    Rule("DET212", "fused experts", "info",
         "Experts are one three-dimensional tensor, sharded by expert: ranks beyond their number hold "
         "nothing of them, and LoRA by module name does not reach them.",
         "`--world-size` shows what each rank holds."),
    Rule("DET213", "transformers' own plan matches nothing", "info",
         "Rules of the model's FSDP plan in transformers name modules that do not exist.",
         "Do not rely on DistributedConfig(fsdp_plan=...): it shards less than it seems to."),
    Rule("DET214", "`_no_split_modules` leaves out blocks", "warning",
         "Without classes in the file these blocks stay in the root unit.",
         "Write fsdp_transformer_layer_cls_to_wrap."),
    Rule("DET215", "scalar parameters", "warning",
         "fully_shard refuses parameters without dimensions, and accelerate 1.15 has no setting for it.",
         "Reshape them to one element before prepare; fsdptool keeps them whole on every rank."),
)  # fmt: skip
