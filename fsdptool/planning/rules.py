"""What the codes of planning mean."""

from fsdptool.records.diagnostic import Rule

RULES = (
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
         "No bandwidth is given, so a common one is assumed (docs/plan.md); step times depend on it.",
         "Give --network, or inter_node_bandwidth in the cluster file."),
    Rule("PLN010", "nothing to shard on one GPU", "info",
         "On a single GPU, FSDP adds its own copies and saves no memory.",
         "Train without FSDP, or give two GPUs or more."),
    Rule("PLN011", "FSDP is not needed", "info",
         "The whole run fits on one GPU, including DDP's buckets. DDP communicates a third less.",
         "Use DDP, or FSDP for larger batches or models."),
    Rule("PLN012", "packed documents cannot be separated", "warning",
         "Recurrent and convolutional layers carry a state over the border between packed documents, whatever"
         " the attention mask says; some models take no positions to find the border by.",
         "Set data.document_mask: false to accept it, or data.packing: false."),
    Rule("PLN013", "sample size assumed", "info",
         "Neither the options nor the recipe give the sample size, so the default of the family is planned"
         " (512 tokens of text). Memory and time follow that size.",
         "Give --seq-len, --height, --width or --frames, or write them under batch: in the recipe."),
)  # fmt: skip
