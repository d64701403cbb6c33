"""What the codes of ``fsdptool doctor`` mean."""

from fsdptool.records.diagnostic import Rule

RULES = (
    Rule("DOC001", "GPU memory is taken", "warning",
         "Less than nine tenths of a GPU's memory are free.",
         "See who holds it with nvidia-smi."),
    Rule("DOC002", "cache cannot be written", "warning",
         "Every answer is derived afresh.",
         "Set FSDPTOOL_CACHE to a folder that can be written."),
    Rule("DOC003", "FSDP2 does not shard here", "error",
         "A probe of two processes that shard a small model failed: runs of more than one process will, too.",
         "Read the reason in the message."),
    Rule("DOC004", "library version not tested", "warning",
         "fsdptool uses internals of torch and exact behaviour of the model libraries. This version is "
         "outside the range that was tested: it may work, fail, or shard differently.",
         "Install a tested version if something fails."),
)  # fmt: skip
