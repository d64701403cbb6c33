"""The rules of findings that are not about a configuration file, and the known failures of runs.

They stand apart from the code that finds them, so that ``fsdptool rule`` shows them without importing it. The
rules on configuration files are in ``fsdptool.config.rules``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.files.values import read_data
from fsdptool.records.diagnostic import Rule

if TYPE_CHECKING:
    from fsdptool.records.diagnosis import Signature

FAILURES = Path(__file__).with_name("failures.json")

RULES = (
    # families/registry.py
    Rule("DET001", "plugin ignored", "warning",
         "A family plugin failed to load, or its entry point yields something that is not a family. Every "
         "other plugin is used.",
         "Fix or uninstall the named distribution."),
    Rule("DET002", "plugin of another protocol version", "warning",
         "The family uses a different version of the protocol than this fsdptool, and is ignored.",
         "Install compatible versions of the two."),
    Rule("DET003", "family name registered twice", "warning",
         "Two plugins register one name. Neither is used, because the winner would depend on the order of "
         "installation.",
         "Uninstall one of them, or rename its family."),
    # source/config_checks.py
    Rule("DET101", "a model without layers", "warning",
         "The configuration sets a number of layers to 0: nothing can be wrapped, and FSDP2 would gather the "
         "whole model at once.",
         "Set the number of layers of the model."),
    Rule("DET102", "remote code not used", "info",
         "`auto_map` refers to code that comes with the model. transformers has the model type itself, and "
         "its own class is used. Code that comes with the model is not run.",
         "No action, or use --trust-remote-code to run that code."),
    Rule("DET103", "quantisation ignored", "info",
         "Shapes and totals are those of the unquantised model: quantised tensors are packed, and FSDP2 "
         "shards what training holds.",
         "No action is needed."),
    Rule("DET104", "duplicate key in a model's file", "warning",
         "A JSON object contains a key more than once. transformers, diffusers and peft silently use the "
         "last value; a reader of the file may expect the first.",
         "Keep one of the entries."),
    # source/resolve.py
    Rule("DET105", "catalogue instead of the Hub", "warning",
         "The configuration of a Hub id cannot be fetched: the Hub is out of reach, or the model is gated. "
         "The catalogue's model of that name is inspected and planned. Training needs the model itself.",
         "Log in with `hf auth login`, or give a config.json if that of the model differs."),
    Rule("DET110", "pipeline with a second denoiser", "info",
         "The pipeline contains two trainable denoisers. The result covers the first one only.",
         "Select the other with --component."),
    Rule("DET111", "pipeline index and component disagree", "warning",
         "`model_index.json` and the component's own config.json name different classes; diffusers builds "
         "either without a warning. The component's own class is used.",
         "Correct the wrong one."),
    # source/weight_files.py
    Rule("DET116", "weights that are not read", "info",
         "A model's folder holds weights beside those that its library loads: another format, a variant, the "
         "shards of an earlier save, an adapter. fsdptool reads what `from_pretrained` reads: for "
         "transformers `model.safetensors`, else the files of `model.safetensors.index.json`; for diffusers "
         "the files of `diffusion_pytorch_model.safetensors.index.json`, else "
         "`diffusion_pytorch_model.safetensors`.",
         "No action, or move the weights that you mean into a folder of their own; `model.variant` in a "
         "recipe selects a variant."),
    Rule("DET117", "weights that cannot be read", "warning",
         "A model's folder holds weights, and none that can be read: pickles, a variant that was not asked "
         "for, an index that names missing files or files outside of the folder, a link to something that "
         "is not a file. Training on them is refused.",
         "Follow the help of the finding, or set model.weights: random."),
    # inspection/hazards.py
    Rule("DET120", "misspelt configuration key", "warning",
         "The class does not know the key, but knows a similar one. The library silently drops the key and "
         "uses the default.",
         "Write the similar key, if that is what was meant."),
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
    Rule("DET140", "model that a group of ranks does not divide", "error",
         "Tensor parallelism gives every rank the same number of heads and features, expert parallelism the "
         "same number of experts. Keys and values are not repeated over ranks.",
         "Use a group size that divides the numbers in the message."),
    Rule("DET141", "hidden states that cannot be divided along the sequence", "error",
         "Sequence parallelism needs one list of blocks that a norm follows, and blocks whose whole modules "
         "compute position by position.",
         "Leave sequence parallelism out; tensor parallelism alone divides the layers."),
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
    Rule("DET216", "empty parameters", "warning",
         "torch refuses to reduce the gradients of an FSDP unit that holds a parameter without elements: "
         "`_chunk_cat expects non-empty tensor`.",
         "Check the sizes in the configuration; fsdptool keeps empty parameters out of the units."),
    Rule("DET217", "blocks that run without FSDP2's hooks", "warning",
         "The model calls `forward` of these blocks itself, or runs them inside an autograd function of its "
         "own. FSDP2 gathers a unit in a hook of its call, and once more in a hook of its backward: as units "
         "these blocks would be used while they are sharded.",
         "Leave these classes out of the wrap classes; their parameters then stay in the root unit."),
    Rule("DET218", "experts that are modules", "warning",
         "The experts of a mixture are modules of their own. Many models call only those that a token chose; "
         "the others have no gradient. FSDP2 reduces only gradients that exist, by their position: if rank 0 "
         "used expert 0 and rank 1 expert 1, the two are averaged with each other without an error, and with "
         "unequal numbers or sizes the job stops or hangs.",
         "Train with `fsdptool train`, which gives unused experts zero gradients; elsewhere call every "
         "expert on every rank (with no rows, added as zero), or call torch 2.13's "
         "`set_reduce_scatter_unused_params(True)`."),
    Rule("DET219", "towers that some batches skip", "warning",
         "An encoder of pictures or sound runs only for batches that have them. Ranks whose batch is text "
         "alone do not gather its units nor reduce its gradients: they join other collectives, and the job "
         "hangs, stops or computes with wrong parameters.",
         "Train with `fsdptool train`, whose ranks stand in for units that they skip; elsewhere give every "
         "rank a picture in each batch, or run the tower on an empty one."),
    # planning/advice/diagnostics.py
    Rule("PLN001", "ambiguous GPU name", "info",
         "The name matches several entries of the catalogue; the message says which one is used.",
         "Use a full name to choose another one; the message lists them."),
    Rule("PLN002", "precision without hardware support", "warning",
         "The GPU has no tensor cores for this precision: it is emulated, at fp32 speed or slower.",
         "Use a precision the GPU has (FSD501 and FSD505 find it in a file)."),
    Rule("PLN003", "fits within the error of the estimate", "warning",
         "The free memory is less than the error of the estimate.",
         "Use --search to find more headroom, or run one step before renting more GPUs."),
    Rule("PLN004", "the requested configuration does not fit", "info",
         "The requested configuration does not fit; another candidate does and was chosen.",
         "Use --no-search to evaluate only the requested configuration."),
    Rule("PLN005", "network between nodes assumed", "info",
         "No bandwidth is given, so a common one is assumed (docs/explanation/time.md); step times depend on"
         " it.",
         "Give --network, or inter_node_bandwidth in the cluster file."),
    Rule("PLN006", "host memory not checked", "info",
         "The run needs host memory (offloaded states, staged checkpoints, loading), but the plan does not"
         " know how much each node has. With CPU offload this is a warning.",
         "Give --host-memory, or host_memory in the cluster file."),
    Rule("PLN007", "fragmentation may exceed the memory", "warning",
         "Without expandable segments, what the caching allocator reserves depends on fragmentation. The"
         " 90th percentile of what published runs reserved, beside our plans of them, does not fit.",
         "Set PYTORCH_ALLOC_CONF=expandable_segments:True, under environment: in the cluster file."),
    Rule("PLN010", "nothing to shard on one GPU", "info",
         "On a single GPU, FSDP adds its own copies and saves no memory.",
         "Train without FSDP, or give two GPUs or more."),
    Rule("PLN011", "FSDP is not needed", "info",
         "The whole run fits on one GPU, including DDP's buckets. DDP communicates a third less.",
         "Use DDP, or FSDP for larger batches or models."),
    Rule("PLN012", "packed documents cannot be separated", "warning",
         "Recurrent and convolutional layers carry a state across the boundary between packed documents,"
         " whatever the attention mask says; some models take no positions, which would mark the boundary.",
         "Set data.document_mask: false to accept it, or data.packing: false."),
    Rule("PLN013", "sample size assumed", "info",
         "Neither the options nor the recipe give the sample size, so the default of the family is planned"
         " (512 tokens of text). Memory and time follow that size.",
         "Give --seq-len, --height, --width or --frames, or write them under batch: in the recipe."),
    Rule("PLN014", "reserved memory grows as lengths vary", "warning",
         "Micro-batches of other lengths leave free blocks in segments of fixed size that later micro-batches"
         " cannot use. The plan gives the reserved memory of steps of one length; a run can need more.",
         "Use expandable segments or packing."),
    Rule("PLN015", "fewer rows than ranks", "warning",
         "FSDP2 shards the first dimension of each parameter, and fused experts have one row for each expert."
         " On more ranks than experts, the native layout shards the rows of every expert instead, if they"
         " divide evenly among the ranks. The accelerate layout, tensor parallelism and resharding to a"
         " number of ranks do not. Some ranks then hold a whole expert and others nothing, so that more ranks"
         " do not lower the memory of rank 0.",
         "Use the native layout and a number of ranks that divides the rows of an expert, or give --hsdp with"
         " as many shards as there are experts."),
    Rule("PLN016", "adapter settings of a file are not read", "warning",
         "The configuration of another program asks for LoRA. A plan reads its sharding and not its"
         " training method, so that full fine-tuning is planned.",
         "Give --method lora with --lora-rank and --lora-target, or a recipe with the method."),
    Rule("PLN017", "4-bit base that accelerate does not shard", "warning",
         "accelerate 1.14 and newer (`fsdp2_prepare_model`) leaves the parameters of a 4-bit base out of "
         "sharding if they are stored in an integer dtype: every GPU holds the whole base. Earlier versions "
         "shard it and lose its quantisation state. uint8 is the default of TRL and transformers. The plan "
         "shards the base; the message says how much more a GPU needs.",
         "Set bnb_4bit_quant_storage to the dtype in which the run computes, such as bfloat16."),
    Rule("PLN018", "the search ended early", "info",
         "--quick ends a search at the first configuration that fits and leaves headroom, and Ctrl-C ends it "
         "after the configuration that is being evaluated. The answer is the best of those.",
         "Leave out --quick, or let the search finish."),
    # launch/doctor.py
    Rule("DOC001", "GPU memory is in use", "warning",
         "Less than 90% of a GPU's memory is free.",
         "Find the process that uses it with nvidia-smi."),
    Rule("DOC002", "cache is not writable", "warning",
         "Every result is recomputed.",
         "Set FSDPTOOL_CACHE to a writable folder."),
    Rule("DOC003", "FSDP2 sharding failed", "error",
         "A probe in which one or two processes shard a small model failed. Runs on that device will fail, "
         "too.",
         "Read the reason in the message and repair the installation."),
    Rule("DOC004", "library version not tested", "warning",
         "fsdptool uses internals of torch and exact behaviour of the model libraries. This version is "
         "outside the range that was tested: it may work, fail, or shard differently.",
         "Install a tested version if something fails."),
    Rule("DOC005", "torch cannot use the GPUs", "warning",
         "A driver is loaded and torch counts no GPU: torch is built for other GPUs or for the CPU, its CUDA "
         "does not start, or CUDA_VISIBLE_DEVICES hides them.",
         "Install the build of torch that the message names."),
    Rule("DOC006", "torch lacks what fsdptool uses", "warning",
         "fsdptool uses private names of torch, which may change from one version to the next. The installed "
         "torch lacks one that its version should have.",
         "Install a tested version of torch, or report the names."),
    Rule("DOC007", "installed version with repaired bugs", "info",
         "Advisories list bugs of library versions that change FSDP runs. A newer release repairs some that "
         "the installed version has. Which of them affect a run depends on its settings.",
         "`fsdptool audit FILE` names those that affect the run of a file."),
    # cache.py
    Rule("CACHE001", "cache not usable", "warning",
         "The folder is not writable, or the disk is full. Results are returned, but not stored.",
         "Set FSDPTOOL_CACHE to a writable folder, or free space with `fsdptool cache prune`."),
    Rule("CACHE002", "corrupt cache entry", "warning",
         "An entry's checksum is wrong. The entry was set aside and the result computed again.",
         "No action is needed; `fsdptool cache verify` checks the other entries."),
)  # fmt: skip


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the table of known failures, by code."""
    from fsdptool.records.codec import from_json
    from fsdptool.records.diagnosis import Signature

    return tuple(from_json(Signature, entry, where=FAILURES.name) for entry in _failures())


def failure_rules() -> list[Rule]:
    """Return the known failures as rules."""
    return [
        Rule(item["code"], item["title"], "error", f"{item['why']} Source: {item['source']}.", item["change"])
        for item in _failures()
    ]


def _failures() -> list[dict[str, Any]]:
    failures: list[dict[str, Any]] = read_data(FAILURES)
    return failures
