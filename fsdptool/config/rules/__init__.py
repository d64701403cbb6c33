"""The rules on configuration files and scripts, for the findings, ``fsdptool rule`` and ``docs/rules.md``."""

from __future__ import annotations

from functools import cache

from fsdptool.config.rules.examples import FSDP2, TRAINER, added, classes, sizes
from fsdptool.config.rules.meaning import MEANING
from fsdptool.config.rules.mesh import MESH
from fsdptool.config.rules.model import HARDWARE, MODEL
from fsdptool.config.rules.versions import VERSIONS
from fsdptool.records.diagnostic import Example, Rule

PARSE = (
    Rule("FSD101", "file cannot be read", "error",
         "The file does not exist, is a folder, or may not be opened.",
         "Check the path and its permissions."),
    Rule("FSD102", "file too large", "error",
         "A configuration has a few kilobytes. Files over 1 MiB are refused before they are parsed, so "
         "that a wrong path (a checkpoint, a log) or a hostile file does no harm.",
         "Give the configuration file itself."),
    Rule("FSD103", "file is not UTF-8", "error",
         "accelerate 1.15 and transformers 5.23 open configuration files as UTF-8 and stop with a "
         "UnicodeDecodeError.",
         "Save the file as UTF-8."),
    Rule("FSD104", "file does not parse", "error",
         "The text is not YAML (PyYAML, YAML 1.1) or, for a name that ends in .json, not JSON. The "
         "consumer stops with the parser's own traceback.",
         "Repair the text at the marked place.",
         example=Example("distributed_type: [FSDP\n", FSDP2)),
    Rule("FSD105", "file nested too deeply, or too large when expanded", "error",
         "Nesting beyond 64 levels, aliases that contain themselves, and aliases that expand to more than "
         "20,000 values are refused: configurations do not need them, and they can exhaust memory.",
         "Write the values out plainly.",
         example=added("again: &again [*again]\n")),
    Rule("FSD106", "several documents in one file", "error",
         "PyYAML's safe_load, which accelerate 1.15 uses, raises a ComposerError at the second document.",
         "Keep one document per file; remove the other `---` parts.",
         example=added("---\ndebug: false\n")),
    Rule("FSD107", "file does not contain a mapping", "error",
         "An empty file gives accelerate 1.15 `AttributeError: 'NoneType' object has no attribute 'get'`; "
         "a list or a bare word fails in the same way.",
         "Write `key: value` pairs.",
         example=Example("- distributed_type\n- FSDP\n", FSDP2)),
    Rule("FSD108", "duplicate key", "warning",
         "PyYAML and json keep the last value of a repeated key and do not report it. A person who reads "
         "the file may believe the first.",
         "Remove the entries that do not take effect (--fix does this: the run stays the same).", "safe",
         example=added("  fsdp_version: 2\n")),
    Rule("FSD109", "unknown kind of configuration", "error",
         "Nothing in the file identifies the program that reads it: it has neither accelerate's "
         "`distributed_type` nor TrainingArguments' `fsdp_config` keys, nor the keys of axolotl, "
         "LLaMA-Factory or SimpleTuner.",
         "Name the dialect with --dialect, or give the file that holds the FSDP settings.",
         example=Example("hello: world\nand: more\n", FSDP2)),
    Rule("FSD110", "another program's format", "error",
         "The file configures something else (XLA FSDP, Amazon SageMaker, oumi, NeMo, a job description, a "
         "file nested under another key). fsdptool does not guess what its keys would mean as FSDP2.",
         "Extract the FSDP settings, or write them with `fsdptool emit-config`.",
         example=Example("model:\n  model_name: m\ntraining:\n  steps: 1\n", FSDP2)),
    Rule("FSD111", "invalid value", "error",
         "The value has a tag that SafeLoader refuses (`!!python/...`), or looks like a date or number "
         "that cannot exist; PyYAML raises a ConstructorError or ValueError.",
         "Write a plain value, in quotes if it is text.",
         example=added("  fsdp_min_num_params: !!python/name:os.sep\n")),
    Rule("FSD112", "comment not understood", "warning",
         "A `# fsdptool:` comment names a code that does not exist, or is neither `ignore[CODE]` nor "
         "`consumer=NAME`. A comment that is not understood does not silence any finding.",
         "Use a code that `fsdptool rule` lists, in brackets.",
         example=Example("# fsdptool: ignore[FSD999]\n" + FSDP2, "# fsdptool: ignore[FSD352]\n" + FSDP2)),
    Rule("FSD113", "file does not configure FSDP", "info",
         "The file is a known kind of configuration, but it does not configure FSDP: there is nothing to "
         "check.",
         "If you want FSDP, write its settings into this file (see `fsdptool emit-config --into`).",
         example=added("", "fsdp_version: 2\nfsdp_config:\n  offload_params: false\n",
                       to="base_model: m\ndatasets: []\n")),
    Rule("FSD114", "file not read by this consumer", "error",
         "A file is checked for the program that will read it. The program that --consumer, --target or "
         "the file's own `# fsdptool: consumer=` comment names does not read files of this kind, so its "
         "rules do not apply.",
         "Check the file for the program that reads it, or migrate it to a dialect that this one reads.",
         example=Example("# fsdptool: consumer=trainer\n" + FSDP2,
                         "# fsdptool: consumer=fsdptool\n" + FSDP2)),
    Rule("FSD115", "dialect plugin left out", "warning",
         "An installed package registers a dialect that cannot be used: it does not load, implements "
         "another version of the protocol, raises an exception while a file is recognised, or has a "
         "name that another package also registers. Files are read without it.",
         "Repair, update or uninstall the package that the message names."),
    Rule("FSD116", "file named on a command line is not read", "warning",
         "The program reads a file that the command line names, and fsdptool does not: it is not there, "
         "relative to the working directory or beside the file that holds the line, its name holds a "
         "variable, or it does not end in .yaml, .yml, .json or .toml. What the file decides is not judged.",
         "Run the command where the program is started, or check the named file itself.",
         example=Example("accelerate launch --config_file absent.yaml train.py\n",
                         "accelerate launch --use_fsdp train.py\n")),
    Rule("FSD117", "another file decides, too", "info",
         "A file outside of the command line takes part: one found beside the file that holds the line "
         "instead of in the working directory, one of an unknown kind, or accelerate's default file. "
         "Without `--config_file`, accelerate 1.15 fills in what the flags leave open from "
         "`accelerate/default_config.yaml` in the cache of Hugging Face, if it exists on the machine. "
         "fsdptool does not read it: it belongs to the person who validates, not to the run.",
         "Name the file with --config_file, so that every machine reads the same.",
         example=Example("accelerate launch --use_fsdp --fsdp_version 2 train.py\n", FSDP2)),
)  # fmt: skip


SCHEMA = (
    Rule("FSD201", "unknown key; the consumer refuses the file", "error",
         "accelerate 1.15 checks top-level keys strictly: `ValueError: The config file at ... had unknown "
         "keys`. The launch stops. torchtitan 0.2 refuses unknown keys in the same way.",
         "Remove or rename the key. Where the nearest known key is clear, --unsafe-fixes "
         "renames it.", "unsafe",
         example=added("number_of_ranks: 8\n")),
    Rule("FSD202", "unknown key, silently ignored", "warning",
         "accelerate 1.15 never looks at the names inside `fsdp_config` and `parallelism_config`: every "
         "key becomes an attribute, and one that is not read is silently dropped. transformers 5.23 does "
         "the same with `fsdp_config`.",
         "Rename it to the intended key (--unsafe-fixes: the setting takes effect), or remove it (--fix, "
         "where no known key is similar: the run stays the same).", "unsafe",
         example=added("  fsdp_reshard_after_forwards: true\n", "  fsdp_reshard_after_forward: true\n")),
    Rule("FSD203", "parallelism key without its prefix", "error",
         "Unlike `fsdp_config`, accelerate 1.15 does not add a prefix to the keys of `parallelism_config`: "
         "`dp_shard_size: 2` is dropped, all sizes stay 1, and the run continues as plain FSDP or stops "
         "with a mesh error.",
         "Add the prefix `parallelism_config_` (--unsafe-fixes: the mesh takes effect).", "unsafe",
         example=added("parallelism_config:\n  dp_shard_size: 8\n", sizes(dp_shard=8))),
    Rule("FSD204", "fsdp_ prefix missing, or not needed", "info",
         "accelerate 1.15 adds a missing prefix when it launches, but `accelerate to-fsdp2` does not; "
         "axolotl 0.19 strips the prefix. Of a key that occurs with and without the prefix, the later one "
         "in the file wins.",
         "No action is needed; --fix writes the key as the program calls it.", "safe",
         example=added("  offload_params: true\n", "  fsdp_offload_params: true\n")),
    Rule("FSD205", "wrong type", "error",
         "The consumer cannot use a value of this type (as PyYAML or json reads it).",
         "Write a value of the type that the message names.",
         example=added("main_process_port: 70000\n", "main_process_port: 29500\n")),
    Rule("FSD206", "value refused by the consumer", "error",
         "The consumer does not accept this value; it stops with an error, often an unrelated one such as "
         "`KeyError: 'BOGUS'` or `invalid truth value`. A flag of a command line is refused by its parser "
         "already.",
         "Use one of the listed values. Where the spelling can mean only one of them, --fix "
         "writes it.", "safe",
         example=added("  fsdp_state_dict_type: BOGUS\n", "  fsdp_state_dict_type: SHARDED_STATE_DICT\n")),
    Rule("FSD207", "boolean written as text", "info",
         "The value is text that the consumer parses (`\"true\"`). This works, but a program that does not "
         "parse the text takes `\"false\"` as true.",
         "Write a plain boolean (--fix: the run stays the same).", "safe",
         example=added("  fsdp_offload_params: \"true\"\n", "  fsdp_offload_params: true\n")),
    Rule("FSD208", "unquoted `no` is a boolean", "error",
         "YAML 1.1 reads `no` as false. accelerate 1.15 loads the file and fails at launch: "
         "`AttributeError: 'bool' object has no attribute 'lower'`.",
         "Write 'no' in quotes (--fix).", "safe",
         example=added("mixed_precision: no\n", "mixed_precision: 'no'\n")),
    Rule("FSD209", "key without effect", "info",
         "accelerate 1.15 accepts the key, but the value never takes effect: `rdzv_backend`, "
         "`same_network` and `enable_cpu_affinity` have command-line defaults that are not None, "
         "`downcast_bf16` is for TPUs, and `main_training_function` is not used by `accelerate launch`.",
         "Pass it on the command line if you need it; otherwise you can leave it.",
         example=added("downcast_bf16: true\n")),
    Rule("FSD210", "key in the wrong place", "error",
         "The key belongs elsewhere. At top level accelerate refuses it; inside a block it is ignored.",
         "Move it (--unsafe-fixes: the setting takes effect).", "unsafe",
         example=added("fsdp_offload_params: true\n", "  fsdp_offload_params: true\n")),
    Rule("FSD211", "removed key, or key that never existed under this name", "warning",
         "Older accelerate versions, or the plugin's own field names, used this key; accelerate 1.15 "
         "ignores it (`fsdp_backward_prefetch_policy` was removed in accelerate 1.0).",
         "Remove it (--fix), or rename it to the key that is read (--unsafe-fixes: it takes "
         "effect).", "unsafe",
         example=added("  fsdp_backward_prefetch_policy: BACKWARD_PRE\n")),
    Rule("FSD212", "required key missing", "error",
         "accelerate 1.15: A `distributed_type` must be specified in the config file. axolotl 0.19 needs "
         "`fsdp_config` in addition to its `fsdp` list, and `min_num_params` with SIZE_BASED_WRAP.",
         "Add `distributed_type: FSDP` (--unsafe-fixes, when the file has an `fsdp_config`).", "unsafe",
         example=Example("compute_environment: LOCAL_MACHINE\nfsdp_config:\n  fsdp_version: 2\n", FSDP2)),
    Rule("FSD213", "number that is text to YAML 1.1", "error",
         "PyYAML reads `1e8` as text and `1.0e8` as a float; accelerate 1.15 then fails with `invalid "
         "literal for int()` when it builds the plugin, long after the launch.",
         "Write a plain integer (--fix).", "safe",
         example=added("1e8\n", "100000000\n",
                       to=FSDP2 + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: ")),
    Rule("FSD214", "malformed list of wrap classes", "error",
         "accelerate 1.15 turns a YAML list into text and splits it at commas, so it looks for a class "
         "called `['Qwen3DecoderLayer'`; a space after a comma, a dotted path, an empty text and the text "
         "`None` (null is unset) fail in the same way: `Could not find the transformer layer class`. "
         "SimpleTuner 4.8 drops such names with a warning, and of a list keeps the last item.",
         "Write class names separated by commas, without spaces (--fix).", "safe",
         example=classes("[LlamaDecoderLayer]", options="")),
    Rule("FSD215", "one setting written twice under two names", "warning",
         "The setting is written with and without its prefix, or under an old and a new name. The consumer "
         "takes one of them, depending on their order in the file.",
         "Remove the one that does not take effect (--fix: the run stays the same).", "safe",
         example=added("  offload_params: true\n  fsdp_offload_params: true\n",
                       "  fsdp_offload_params: true\n")),
    Rule("FSD216", "key of another program", "warning",
         "The consumer does not read this key, but another program reads it under this name: "
         "`offload_params` is accelerate's name for what TrainingArguments calls `cpu_offload`.",
         "Use this consumer's name for it (--unsafe-fixes: the setting takes effect), or remove it where "
         "it asks for the default anyway (--fix: the run stays the same).", "unsafe",
         example=added("  offload_params: true\n", "  cpu_offload: true\n", to=TRAINER)),
    Rule("FSD217", "value in a non-canonical spelling", "info",
         "The consumer understands the value; the message gives its canonical spelling.",
         "No action is needed; --fix writes the canonical spelling.", "safe",
         example=added("  fsdp_auto_wrap_policy: no_wrap\n", "  fsdp_auto_wrap_policy: NO_WRAP\n")),
    Rule("FSD218", "misspelt compute environment", "error",
         "With any value but LOCAL_MACHINE, accelerate 1.15 parses the file as a SageMaker configuration "
         "and reports `fsdp_config` and other keys as errors.",
         "Write `compute_environment: LOCAL_MACHINE` (--fix, where the value is a misspelling of "
         "it).", "safe",
         example=added("compute_environment: LOCAL\n", "compute_environment: LOCAL_MACHINE\n")),
    Rule("FSD219", "malformed list of GPU ids", "error",
         "accelerate 1.15 calls `.split(',')` on `gpu_ids`; an unquoted number crashes the launcher.",
         "Write the ids as text: `gpu_ids: '0,1'` (--fix).", "safe",
         example=added("gpu_ids: 0\n", "gpu_ids: '0'\n")),
    Rule("FSD220", "note in the file", "info",
         "Keys that begin with an underscore are notes in some JSON files; programs do not read them.",
         "No action is needed.",
         example=added("  _note: ours\n")),
)  # fmt: skip

RULES: dict[str, Rule] = {
    rule.code: rule for rule in (*PARSE, *SCHEMA, *MEANING, *VERSIONS, *MESH, *MODEL, *HARDWARE)
}
"""The rules on configuration files, by code."""


@cache
def file_rules() -> dict[str, Rule]:
    """Return the rules on configuration files and on scripts, by code, in the order of the codes.

    Those on scripts are imported here only: they stand with their checks, which no configuration file needs.
    """
    from fsdptool.scripts.rules import RULES as SCRIPTS

    every = sorted((*RULES.values(), *SCRIPTS), key=lambda rule: rule.code)
    return {rule.code: rule for rule in every}
