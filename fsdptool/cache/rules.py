"""What the store's codes mean."""

from fsdptool.records.diagnostic import Rule

RULES = (
    Rule("CACHE001", "cache cannot be used", "warning",
         "The folder cannot be written, or the disk is full. The answer is derived and given all the same.",
         "Set FSDPTOOL_CACHE to a folder that can be written, or `fsdptool cache prune`."),
    Rule("CACHE002", "corrupt cache entry", "warning",
         "An entry's checksum is wrong. It was set aside and derived again.",
         "Nothing; `fsdptool cache verify` checks the others."),
)  # fmt: skip
