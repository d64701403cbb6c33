"""Rules on the version that a file is judged for: which keys it has, and whether anybody looked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fsdptool.config.dialects.accelerate.keys import DETAILS, PARALLELISM_KEYS
from fsdptool.config.dialects.protocol import LintContext
from fsdptool.config.key_history import groups, has_key, known_versions, versions_with
from fsdptool.config.rules.examples import FSDP2
from fsdptool.files.tree import Entry, Node, effective_entries, to_python
from fsdptool.records.diagnostic import Example, Rule, Severity

_IGNORED = FSDP2 + "  fsdp_ignored_modules: visual\n"

VERSIONS = (
    Rule("FSD344", "setting that the target version does not have", "error",
         "The version of accelerate, transformers, TRL or axolotl for which the file is judged does not have "
         "the key yet, or no longer, by its own source (`benchmarks/config/keys_by_version.py`): it refuses "
         "the file or does not read the key.",
         "Install a version that has it, or leave the setting out.",
         example=Example(_IGNORED, _IGNORED, "--target accelerate==1.9", "--target accelerate==1.15")),
    Rule("FSD354", "version that is not known", "info",
         "The keys and defaults of accelerate 1.6 to 1.15, transformers 4.50 to 5.24, TRL 0.18 to 1.16 and "
         "axolotl 0.10 to 0.21 are known. For other versions the rules are a best guess.",
         "No action is needed.",
         example=Example(FSDP2, FSDP2, "--target accelerate==1.99", "--target accelerate==1.14")),
)  # fmt: skip

_PACKAGES = {
    "accelerate": "accelerate",
    "trainer": "transformers",
    "llamafactory": "transformers",
    "trl": "trl",
    "axolotl": "axolotl",
}
"""Program to the package whose versions have its keys."""
_VARIABLES = {
    "ignored_modules": ("FSDP_IGNORED_MODULES", None),
    "activation_checkpointing_offload": ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", False),
}
"""Setting of accelerate's plugin that not every version reads, with its variable and its default."""
_SAID = frozenset({"FSD201", "FSD202", "FSD203", "FSD210", "FSD211", "FSD216", "FSD353"})
"""Findings on keys that are not read."""


def check_versions(lint: LintContext) -> None:
    """Report keys that the version in question does not have, and a version that is not known."""
    consumer = lint.consumer
    package = _PACKAGES.get(consumer.name)
    if not consumer.checked:
        known = known_versions(package) if package is not None else ()
        span = f"; known are {package} {known[0]} to {known[-1]}" if known else ""
        lint.report("FSD354", f"{consumer} is not a version that the rules were checked against{span}")
    if package is None or not consumer.judged:
        return
    if package == "accelerate":
        _accelerate(lint)
        return
    arguments = lint.root.get("fsdp") or lint.root.get("fsdp_config")
    block = lint.root if arguments is None and package == "transformers" else _block(lint)
    if block is not lint.root:
        if package == "trl":
            _trl(lint)
        else:
            names = ("arguments", "integrations") if package == "axolotl" else ("arguments",)
            _check(
                lint,
                package,
                names,
                _entries(lint.root),
                severity="warning" if package == "axolotl" else None,
            )
    if package != "trl":
        _check(lint, package, ("fsdp_config",), _entries(block), dropped=True)


def _block(lint: LintContext) -> Node | None:
    entry = lint.root.get("fsdp_config")
    return entry.node if entry is not None and entry.node.kind == "map" else None


def _entries(node: Node | None) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of a mapping by their keys."""
    for entry in effective_entries(node) if node is not None else ():
        yield str(entry.key), entry


def _accelerate(lint: LintContext) -> None:
    version = lint.consumer.version
    # accelerate release notes: FSDP2 came with 1.6.0, which is the oldest version of the table.
    if lint.runs_fsdp and lint.get("fsdp_version") == 2 and lint.consumer.before(1, 6):
        lint.report("FSD344", f"fsdp_version 2 does not exist in {lint.consumer}", "fsdp_version")
    if lint.document.language not in ("flags", "env"):
        _check(lint, "accelerate", ("file",), _entries(lint.root))
    elif lint.parallelism_block is not None and not has_key(
        "accelerate", ("file",), "parallelism_config", version
    ):
        lint.report(
            "FSD344",
            f"parallelism_config does not exist in {lint.consumer}",
            lint.root.get("parallelism_config"),
        )
    if not lint.runs_fsdp:
        return
    for name, (variable, default) in _VARIABLES.items():
        entry = lint.at(name)
        if (
            entry is None
            or lint.get(name) == default
            or has_key("accelerate", ("variables",), variable, version)
        ):
            continue
        _report(lint, "accelerate", ("variables",), variable, entry)
        lint.overridden[name] = default
    if has_key("accelerate", ("file",), "parallelism_config", version):
        block = lint.root.get("parallelism_config")
        sizes = [
            item
            for item in _entries(block.node if block else None)
            if item[0] in {**PARALLELISM_KEYS, **DETAILS}
        ]
        _check(lint, "accelerate", ("launch",), sizes, dropped=True)
    if lint.get("fsdp_version") == 2 and lint.get("state_dict_type") == "full" and lint.consumer.before(1, 7):
        # dataclasses.py of 1.6.0: FSDP2 only supports SHARDED_STATE_DICT for now.
        lint.report(
            "FSD344",
            f"FSDP2 has no FULL_STATE_DICT in {lint.consumer}: new in 1.7",
            "state_dict_type",
            value=True,
        )
    if (
        lint.get("wrap_policy") == "size"
        and not lint.written("min_num_params")
        and lint.consumer.before(1, 13)
    ):
        # launch.py has the float 1e8 as its default, of which the plugin makes int("100000000.0").
        lint.report(
            "FSD212",
            f"SIZE_BASED_WRAP without fsdp_min_num_params stops {lint.consumer} with a ValueError",
            "wrap_policy",
            help="write fsdp_min_num_params, or wrap by class",
        )


def _trl(lint: LintContext) -> None:
    """Check TRL's own keys; those that TrainingArguments have, too, come from there in other versions."""
    beside = dict(lint.consumer.beside).get("transformers")
    newest = known_versions("transformers")[-1]
    own, inherited = [], []
    for key, entry in _entries(lint.root):
        found = has_key("transformers", ("arguments",), key, beside or newest)
        if found is None:
            own.append((key, entry))
        elif not found and not has_key("trl", groups("trl"), key, lint.consumer.version):
            inherited.append((key, entry))
    _check(lint, "trl", groups("trl"), own)
    if beside is not None:
        _check(lint, "transformers", ("arguments",), inherited, version=beside)
        _check(lint, "transformers", ("fsdp_config",), _entries(_block(lint)), version=beside, dropped=True)


def _check(
    lint: LintContext,
    package: str,
    names: tuple[str, ...],
    entries: Iterable[tuple[str, Entry]],
    *,
    version: str | None = None,
    dropped: bool = False,
    severity: Severity | None = None,
) -> None:
    """Report the keys that a version does not have and another one has.

    Args:
        lint: The file.
        package: Whose versions.
        names: Groups of keys, any of which may have it.
        entries: The keys with their entries.
        version: The version; that of the consumer where it is left out.
        dropped: Whether the program drops keys that it does not know: null and false then change nothing.
        severity: Where it differs from the rule's.
    """
    for key, entry in entries:
        bare = key.removeprefix("fsdp_") if dropped else key
        if has_key(package, names, bare, version or lint.consumer.version) is not False:
            continue
        inert = (dropped or severity is not None) and to_python(entry.node) in (None, False)
        start = entry.key_node.start
        said = any(item.order == start and item.diagnostic.code in _SAID for item in lint.findings)
        if not inert and not said:
            _report(lint, package, names, bare, entry, version=version, severity=severity)


def _report(
    lint: LintContext,
    package: str,
    names: tuple[str, ...],
    key: str,
    entry: Entry,
    *,
    version: str | None = None,
    severity: Severity | None = None,
) -> None:
    first, last = versions_with(package, names, key)
    known = known_versions(package)
    judged = version or lint.consumer.version
    place = known.index(last)
    when = f"new in {first}"
    if place + 1 < len(known) and not has_key(package, names, key, known[-1]):
        when = f"removed in {known[place + 1]}" if first == known[0] else f"only {first} to {last} have it"
    lint.report("FSD344", f"{package} {judged} does not have {entry.key}: {when}", entry, severity=severity)
