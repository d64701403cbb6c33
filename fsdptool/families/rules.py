"""What the registry's codes mean."""

from fsdptool.records.diagnostic import Rule

RULES = (
    Rule("DET001", "plugin left out", "warning",
         "A family plugin failed to load, or its entry point yields something that is no family. Every other "
         "plugin is used.",
         "Repair or uninstall the named distribution."),
    Rule("DET002", "plugin of another protocol version", "warning",
         "The family speaks another version of the protocol than this fsdptool, and is left out.",
         "Install versions of the two that fit together."),
    Rule("DET003", "family name claimed twice", "warning",
         "Two plugins claim one name. Neither is used: which one won would depend on the order of "
         "installation.",
         "Uninstall one of them, or rename its family."),
)  # fmt: skip
