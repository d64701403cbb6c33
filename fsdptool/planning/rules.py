"""What the codes of planning mean."""

from fsdptool.records.diagnostic import Rule

RULES = (
    Rule("PLN001", "a GPU's name fits several", "info",
         "The name fits several entries of the catalogue; the message says which one was taken.",
         "Name it in full to choose another; the message lists them."),
    Rule("PLN002", "precision without units", "warning",
         "The GPU has no tensor cores for this precision: it is emulated, at fp32 speed or slower.",
         "Use a precision the GPU has (FSD501 and FSD505 find it in a file)."),
    Rule("PLN003", "fits within the estimate's error", "warning",
         "What stays free is less than the error of the estimate.",
         "Let --search find room, or try one step before renting more."),
    Rule("PLN004", "what was asked does not fit", "info",
         "The configuration as asked does not fit; another candidate does and was chosen.",
         "--no-search judges exactly what was asked."),
    Rule("PLN005", "network between nodes assumed", "info",
         "No bandwidth was named, so a common one is assumed (docs/plan.md); step times depend on it.",
         "Give --network, or inter_node_bandwidth in the cluster file."),
    Rule("PLN010", "one GPU shards nothing", "info",
         "On a single GPU FSDP adds its own copies and saves nothing.",
         "Train without FSDP, or give two GPUs or more."),
    Rule("PLN011", "FSDP is not needed", "info",
         "The whole run fits one GPU, with DDP's buckets. DDP communicates a third less.",
         "Use DDP, or FSDP for larger batches or models."),
    Rule("PLN012", "packed documents cannot be kept apart", "warning",
         "Recurrent and convolutional layers carry a state over the border between packed documents, whatever"
         " the attention mask says; some models take no positions to find the border by.",
         "Set data.document_mask: false to accept it, or data.packing: false."),
    Rule("PLN013", "size of a sample assumed", "info",
         "Neither options nor recipe say how long or large a sample is, so the family's own size is planned"
         " (512 tokens of text). Memory and time follow that size.",
         "Give --seq-len, --height, --width or --frames, or write them under batch: in the recipe."),
)  # fmt: skip
