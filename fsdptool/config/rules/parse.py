"""Rules of the family ``parse``: what stops a file from being read at all."""

from fsdptool.records.diagnostic import Rule

PARSE = (
    Rule("FSD101", "file cannot be read", "error",
         "The file does not exist, is a folder, or may not be opened.",
         "Check the path and its permissions."),
    Rule("FSD102", "file too large", "error",
         "A configuration has a few kilobytes. Files over 1 MiB are refused before they are parsed, so "
         "that a wrong path (a checkpoint, a log) or a hostile file costs nothing.",
         "Give the configuration file itself."),
    Rule("FSD103", "file is not UTF-8", "error",
         "accelerate 1.15 and transformers 5.23 open configuration files as UTF-8 and stop with a "
         "UnicodeDecodeError.",
         "Save the file as UTF-8."),
    Rule("FSD104", "file does not parse", "error",
         "The text is not YAML (PyYAML, YAML 1.1) or, for a name that ends in .json, not JSON. The "
         "consumer stops with the parser's own traceback.",
         "Repair the text at the marked place."),
    Rule("FSD105", "file nested too deeply or too large when expanded", "error",
         "Nesting beyond 64 levels, aliases that contain themselves, and aliases that expand to more than "
         "20,000 values are refused: no configuration needs them, and they can exhaust memory.",
         "Write the values out plainly."),
    Rule("FSD106", "several documents in one file", "error",
         "PyYAML's safe_load, which accelerate 1.15 uses, raises a ComposerError at the second document.",
         "Keep one document per file; remove the other `---` parts."),
    Rule("FSD107", "file holds no mapping", "error",
         "An empty file gives accelerate 1.15 `AttributeError: 'NoneType' object has no attribute 'get'`; a "
         "list or a bare word fails in the same way.",
         "Write `key: value` pairs."),
    Rule("FSD108", "duplicate key", "warning",
         "PyYAML and json keep the last value of a repeated key and say nothing. The reader of the file may "
         "believe the first.",
         "Remove the entries that do not count. `--fix` does: the run stays the same.", "safe"),
    Rule("FSD109", "not a known kind of configuration", "error",
         "Nothing in the file tells whose it is: it has neither accelerate's `distributed_type` nor "
         "TrainingArguments' `fsdp_config` keys, nor the keys of axolotl, LLaMA-Factory or SimpleTuner.",
         "Name the dialect with --dialect, or give the file that holds the FSDP settings."),
    Rule("FSD110", "another program's format", "error",
         "The file configures something else (XLA FSDP, oumi, torchtune, a job description, a file nested "
         "under another key). Guessing what its keys would mean as FSDP2 would be worse than saying no.",
         "Extract the FSDP settings, or write them with `fsdptool emit-config`."),
    Rule("FSD111", "value cannot be made", "error",
         "The value carries a tag that SafeLoader refuses (`!!python/...`), or looks like a date or number "
         "that cannot exist; PyYAML raises a ConstructorError or ValueError.",
         "Write a plain value, in quotes if it is text."),
    Rule("FSD112", "comment that is not understood", "warning",
         "A `# fsdptool:` comment names a code that does not exist, or is neither `ignore[CODE]` nor "
         "`consumer=NAME`. What is not understood silences nothing.",
         "Use a code that `fsdptool rule` lists, in brackets."),
    Rule("FSD113", "file without FSDP settings", "info",
         "The file is a known kind of configuration and valid as far as it goes, but it does not configure "
         "FSDP: there is nothing here to judge.",
         "If FSDP was meant, write its settings into this file (see `fsdptool emit-config --into`)."),
    Rule("FSD114", "file that this consumer does not read", "error",
         "A file is judged for the program that will read it. The one that --consumer, --target or the "
         "file's own `# fsdptool: consumer=` comment names does not read files of this kind, so none of its "
         "rules would mean anything.",
         "Judge it for the program that reads it, or migrate it to what this one reads."),
)  # fmt: skip
