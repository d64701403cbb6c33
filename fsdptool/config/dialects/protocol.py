"""What a dialect must offer, and the reading that it takes part in: facts with origins, findings with fixes.

Authors subclass :class:`Dialect` (docs/how-to/add-a-dialect.md).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fsdptool.config.canonical import LEGACY
from fsdptool.config.edits import Editor, NotEditableError, Rewriter
from fsdptool.config.programs import Consumer, Program
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.files.tree import Document, Entry, Node
from fsdptool.records.diagnostic import Diagnostic, Edit, EffectiveDtypes, Fix, IgnoredKey, Rule, Severity
from fsdptool.records.sharding import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.records.config_documents import Loss
    from fsdptool.records.described_run import DescribedRun

__all__ = [
    "API_VERSION",
    "Dialect",
    "DialectFinding",
    "Fact",
    "LintContext",
    "Program",
    "Rewriter",
    "RunFormat",
    "Target",
    "parse_source",
]  # fmt: skip

API_VERSION = 1


class RunFormat(ABC):
    """The files and command lines of one program, as descriptions of whole runs.

    Attributes:
        name: The program's name.
    """

    name: str

    def describes(self, root: Node) -> float:
        """Return how surely a mapping is a run of this program, from 0 to 1; at 0.9 it is taken for one."""
        return 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line starts this program, from 0 to 1.

        Args:
            launch: The command.
            names: Its flags and overrides, without dashes.
        """
        return 1.0 if self.name in (launch.program, launch.script.partition(".")[0]) else 0.0

    def describe(self, file: RunFile) -> DescribedRun | None:
        """Return the whole run that a file or a command line describes; None: it cannot be told.

        Args:
            file: The keys, and what starts the program. A mistake in it is a problem of the result.
        """
        return None

    def write_run(self, to: RunWriter) -> None:
        """Set the keys of a file that describes ``to.run``; a program that leaves this out is only read.

        The file is read back by :meth:`describe`: facts that come out otherwise are told with the reasons
        that :meth:`RunWriter.lose` gives.

        Raises:
            ConfigError: The program has no counterpart of such runs, or its runs are only read.
        """
        raise ConfigError(f"runs are not written for {self.name}")

    def keep_flags(self, to: RunWriter, given: Mapping[str, Any], launch: Launch) -> tuple[Loss, ...]:
        """Put the flags of one of this program's command lines into its file, as they are.

        Args:
            to: Holds the keys that the run itself needs.
            given: The flags with their values.
            launch: What starts the program.

        Returns:
            The flags that the file does not hold, with the reason.

        Raises:
            ConfigError: The program's command lines do not become files.
        """
        raise ConfigError(f"command lines of {self.name} do not become files")


class Dialect(RunFormat):
    """One way to write FSDP settings: how such files are recognised, read, written and migrated.

    Every installed dialect is asked whether a file is its own, so importing the module that holds the
    class should cost little: import the code that reads and writes inside the methods.

    Attributes:
        name: What ``--dialect`` calls it; the entry point has the same name.
        consumers: The programs that read such files, by name; the first unless somebody says otherwise.
        programs: Those of ``consumers`` that fsdptool does not know.
        cannot: Canonical settings (``canonical.COMMON``) that the dialect cannot express.
        base: Settings that every file of the dialect can say, where those are not the defaults.
        in_place: Whether FSDP1 becomes FSDP2 by edits of the text (:meth:`migrate`); otherwise the file is
            written again.
    """

    api_version: int = API_VERSION
    name: str
    consumers: tuple[str, ...]
    programs: tuple[Program, ...] = ()
    cannot: tuple[str, ...] = ()
    base: FsdpSettings | None = None
    in_place: bool = True

    def sniff(self, text: str) -> bool:
        """Whether a text that is neither YAML nor JSON is of this dialect."""
        return False

    def parse(self, source: SourceText) -> Document | None:
        """Return the text's tree; None: it is JSON if its name ends in ``.json``, else YAML.

        Raises:
            ParseError: The text cannot be parsed.
        """
        return None

    def matches(self, root: Node) -> float:
        """Return how surely a mapping is of this dialect, from 0 to 1; at 0.9 it is taken for one."""
        return 0.0

    def describes(self, root: Node) -> float:
        """Return :meth:`matches`: a file whose settings can be read describes a run of the program."""
        return self.matches(root)

    def consumer_of(self, root: Node) -> str:
        """Return the program that a file is for unless somebody says otherwise."""
        return self.consumers[0]

    @abstractmethod
    def read(self, lint: LintContext) -> None:
        """Read a tree into canonical settings, as the consumer would, and report what it would not take.

        Every setting of ``canonical.COMMON`` that the consumer knows is set, with its entry where the
        file writes it and without where a default counts. What is written and not used is ignored
        explicitly (``lint.ignore``). A mistake is a finding, never an exception.
        """

    @abstractmethod
    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return settings as a file that :meth:`read` reads back to the same settings.

        Args:
            settings: What to write. Defaults that programs read differently are written out.
            header: Comment lines (without ``#``) to put first, where the dialect has comments.

        Raises:
            ConfigError: A setting cannot be expressed; the message names it.
        """

    def dtypes(self, lint: LintContext) -> EffectiveDtypes | None:
        """Return the dtypes of the run that the file configures; None: not known.

        Called after :meth:`read`. By default they follow ``mixed_precision`` as accelerate has it.
        """
        return consumer_dtypes(lint)

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> Mapping[str, Any]:
        """Turn an FSDP1 file into FSDP2 by edits; return what changes besides ``target``.

        Raises:
            NotEditableError: The form of the text does not allow it.
        """
        raise NotEditableError(f"{self.name} files are not migrated in place")


def parse_source(source: SourceText, dialect: Dialect | None) -> Document:
    """Return the tree of a text: by its dialect, else by the file's name.

    Raises:
        ParseError: The text cannot be parsed.
    """
    from fsdptool.files.tree import parse_json_source, parse_toml
    from fsdptool.files.yaml_tree import parse_yaml

    document = dialect.parse(source) if dialect is not None else None
    if document is not None:
        return document
    name = (source.path or "").lower()
    if name.endswith(".toml"):
        return parse_toml(source.text)
    return parse_json_source(source) if name.endswith(".json") else parse_yaml(source.text)


@dataclass(frozen=True, slots=True)
class Target:
    """What the FSDP2 form of a file must say.

    Attributes:
        reshard: ``reshard_after_forward``.
        state_dict: ``sharded`` or ``full``: what FSDP1 did.
        mesh: ``dp_replicate`` and ``dp_shard`` of hybrid sharding, or empty.
    """

    reshard: bool
    state_dict: str
    mesh: Mapping[str, int]


_MISWRITTEN = frozenset({"FSD201", "FSD202", "FSD203", "FSD210", "FSD211", "FSD216"})
"""Findings about keys that do not count, for their spelling or their place."""

OF_ABSENCE = frozenset({"FSD113", "FSD330", "FSD338", "FSD341"})
"""Findings about what is not written."""

LAUNCH = frozenset({
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
    "rdzv_backend", "debug",
})  # fmt: skip
"""Settings of a launch that no setting of FSDP hangs on."""

_DEPENDENT = {"wrap_policy": ("FSD315", "FSD325"), "fsdp_version": ("FSD301", "FSD302", "FSD303", "FSD338")}
"""Fixes that are right only while a setting stays as it runs now."""


_OPTION = re.compile(r"--(?:unsafe-)?fix")
_ASIDE = re.compile(r" \([^()]*--(?:unsafe-)?fix[^()]*\)")


def advice(rule: Rule) -> str | None:
    """Return what a rule says to do, without what it says of options.

    Which option applies a fix depends on the finding, and is said with the fix.
    """
    clauses = re.split(r"(?<=[.;]) ", _ASIDE.sub("", rule.fix))
    left = " ".join(clause for clause in clauses if not _OPTION.search(clause))
    return left.rstrip(";.") + "." if left else None


@dataclass(slots=True)
class Fact:
    """One canonical setting as the consumer would have it."""

    value: Any
    origin: str
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class DialectFinding:
    """A diagnostic, the settings its fix changes, its index in the text and the key that it is about.

    ``elsewhere`` is the place in another file, where the text that was read only names that file.
    """

    diagnostic: Diagnostic
    changes: Mapping[str, Any]
    order: int
    key: str | None = None
    elsewhere: tuple[SourceText, int] | None = None


def _elsewhere(at: Entry | Node | int | None, value: bool) -> tuple[Node, SourceText, int] | None:
    """Return where a file is named, its text and the line in it, for what another file holds."""
    if at is None or isinstance(at, int):
        return None
    node = at if isinstance(at, Node) else (at.node if value else at.key_node)
    file = node.file or (at.key_node.file if isinstance(at, Entry) else None)
    return None if file is None else (file.at, file.source, file.source.place(node.start)[0])


@dataclass(slots=True)
class LintContext:
    """Everything a dialect and the checks share while a file is read.

    Attributes:
        source: The text.
        document: Its tree.
        consumer: The program it is read for.
        dialect: The dialect it is written in.
        rules: Every rule, by its code.
        environment: Variables the program would inherit.
        facts: Canonical settings (:mod:`fsdptool.config.canonical`), as the consumer would have them.
        findings: What was reported.
        ignored: What is written and not used.
        overridden: Canonical setting to what is in effect instead of the value that the file writes.
        names: Canonical setting to the key that the dialect writes it with.
        open: Canonical setting to the entry that makes it a variable, whose value is not known.
        runs_fsdp: Whether the consumer would start FSDP.
        configures_fsdp: Whether the file holds FSDP settings at all; if not, nothing more is checked.
        distributed_type: accelerate's ``distributed_type``.
        deepspeed: Whether DeepSpeed is configured, too.
        fsdp_block: accelerate's ``fsdp_config``.
        parallelism_block: Mapping that holds the mesh, or None where no mesh is written.
        fsdp_entry: The entry that switches FSDP on, for findings on what it lacks.
        config_path: File that ``fsdp_config`` names instead of holding the settings.
        gradient_checkpointing: The program's own checkpointing, where it is switched on.
        save_only_model: The Trainer's ``save_only_model``, where it is switched on.
        loads_best_model: Whether the Trainer loads the best model at the end.
        load_in_4bit: Whether the base model is quantised while it is loaded.
        load_in_8bit: The entry that quantises the base model to 8 bits with bitsandbytes.
        migration_refusal: Why this file cannot become FSDP2, or None.
        version_unread: Whether the consumer has no key for FSDP's version, which the file writes.
        trial: Whether a fix is being tried: only the findings count, and no migration is worked out.
    """

    source: SourceText
    document: Document
    consumer: Consumer
    dialect: Dialect
    rules: Mapping[str, Rule]
    environment: Mapping[str, str] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    findings: list[DialectFinding] = field(default_factory=list)
    ignored: list[IgnoredKey] = field(default_factory=list)
    overridden: dict[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    open: dict[str, Entry] = field(default_factory=dict)
    runs_fsdp: bool = True
    configures_fsdp: bool = True
    distributed_type: str | None = None
    deepspeed: bool = False
    fsdp_block: Node | None = None
    parallelism_block: Node | None = None
    fsdp_entry: Entry | None = None
    config_path: str | None = None
    gradient_checkpointing: Entry | None = None
    save_only_model: Entry | None = None
    loads_best_model: bool = False
    load_in_4bit: bool = False
    load_in_8bit: Entry | None = None
    migration_refusal: str | None = None
    version_unread: bool = False
    trial: bool = False

    @property
    def root(self) -> Node:
        """The document's root mapping."""
        root = self.document.root
        assert root is not None
        return root

    @property
    def editor(self) -> Editor:
        """Makes edits of the text that was read."""
        return Editor(self.source, self.document)

    def get(self, key: str) -> Any:
        """Return a fact's value, or None."""
        fact = self.facts.get(key)
        return None if fact is None else fact.value

    def written(self, key: str) -> bool:
        """Whether the file itself writes the setting."""
        fact = self.facts.get(key)
        return fact is not None and fact.entry is not None

    def at(self, *keys: str) -> Entry | None:
        """Return the entry of the first setting of ``keys`` that the file writes, or None."""
        entries = (fact.entry for fact in map(self.facts.get, keys) if fact is not None)
        return next((entry for entry in entries if entry is not None), None)

    def name(self, key: str) -> str:
        """Return what the dialect calls a canonical setting."""
        return self.names.get(key, key)

    @property
    def wraps_nothing(self) -> bool:
        """Whether no module is wrapped: by the policy, or by a size threshold of 0."""
        policy = self.get("wrap_policy")
        return bool(policy == "none" or (policy == "size" and self.get("min_num_params") == 0))

    def set(self, key: str, value: Any, *, entry: Entry | None = None, origin: str | None = None) -> None:
        """Record a setting. Without ``origin`` it came from ``entry``'s line."""
        if origin is None:
            origin = self.where(entry) if entry is not None else f"default of {self.consumer}"
        self.facts[key] = Fact(value, origin, entry)

    def line(self, entry: Entry) -> int:
        """Return the line of an entry's key, in the file that holds it."""
        file = entry.key_node.file
        return (self.source if file is None else file.source).place(entry.key_node.start)[0]

    def where(self, entry: Entry) -> str:
        """Return the place of an entry in words: its line, and its file if that is another one."""
        file = entry.key_node.file
        return f"line {self.line(entry)}" if file is None else f"{file.source.path}, line {self.line(entry)}"

    def ignore(self, entry: Entry, reason: str, *, key: str | None = None) -> None:
        """Record something written that the consumer does not use."""
        value = entry.node.value if entry.node.kind == "scalar" else f"<{entry.node.kind}>"
        line: int | None = self.line(entry)
        if entry.key_node.file is not None:
            line, reason = None, f"{self.where(entry)}: {reason}"
        self.ignored.append(IgnoredKey(key or str(entry.key), value, line, reason))

    def leave_open(self) -> None:
        """Take back what the reading made of settings that are variables: a default, and what follows.

        Without the launch's own settings FSDP can be judged; without another nothing is that hangs on it.
        """
        for key, entry in self.open.items():
            self.ignore(entry, "a variable of the shell: its value is not known here")
            self.facts.pop(key, None)
        if self.open.keys() - LAUNCH:
            self.configures_fsdp = False
            self.findings = [item for item in self.findings if item.diagnostic.code not in OF_ABSENCE]
        if "fsdp_version" in self.open:
            self.findings = [item for item in self.findings if item.diagnostic.code < "FSD3"]
            self.ignored = [item for item in self.ignored if "under version" not in item.reason]
            self.facts = {key: fact for key, fact in self.facts.items() if fact.entry and key not in LEGACY}

    def report(
        self,
        code: str,
        message: str,
        at: Entry | Node | int | str | None = None,
        *,
        value: bool = False,
        help: str | None = None,
        severity: Severity | None = None,
        edits: tuple[Edit, ...] | None = None,
        safe: bool | None = None,
        fix: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a finding.

        Args:
            code: A rule's code.
            message: One line.
            at: What it is about: an entry (its key, or its value with ``value``), a node, an index, or the
                setting whose entry it is.
            help: What to do; the rule's own text otherwise.
            severity: Where it differs from the rule's.
            edits: The repair, or None when there is none.
            safe: Whether the run stays the same; the rule's safety otherwise.
            fix: The repair in words.
            changes: Canonical settings that the repair changes, with their new values.
        """
        rule = self.rules[code]
        at = self.at(at) if isinstance(at, str) else at
        elsewhere = _elsewhere(at, value)
        if elsewhere is not None:
            # The place is where the text names the file; fixes are for that file itself.
            named, source, line = elsewhere
            message, edits = f"{source.path}, line {line}: {message}", None
            start, end = self._span(named, False)
        else:
            start, end = self._span(at, value)
        place = self.source.place(start) if start is not None else (None, None)
        last = self.source.place(end) if end is not None else (None, None)
        repair = None
        if edits is not None:
            is_safe = rule.safety == "safe" if safe is None else safe
            repair = Fix(is_safe, fix or rule.title, edits)
        diagnostic = Diagnostic(
            code,
            severity or rule.severity,
            message,
            help if help is not None else advice(rule),
            self.source.path,
            place[0],
            place[1],
            last[0],
            last[1],
            repair,
        )
        order, key = start if start is not None else -1, str(at.key) if isinstance(at, Entry) else None
        there = elsewhere[1:] if elsewhere is not None else None
        self.findings.append(DialectFinding(diagnostic, dict(changes or {}), order, key, there))

    def report_value(
        self, code: str, message: str, at: Entry | Node | str | None, meant: Any = None, **more: Any
    ) -> None:
        """Report a value, with the fix that writes what was meant; None: that cannot be told.

        ``at`` and ``more`` are as for :meth:`report`.
        """
        if isinstance(at, Entry) and meant is not None:
            words = str(meant).lower() if isinstance(meant, bool) else str(meant)
            more = {"edits": self.editor.replace(at.node, meant), "fix": f"write {words}", **more}
        self.report(code, message, at, value=True, **more)

    def report_renamed(self, code: str, message: str, entry: Entry, key: str, **more: Any) -> None:
        """Report a key that does not count, with the unsafe fix that renames it to ``key``.

        ``more`` is as for :meth:`report`.
        """
        repair = {"edits": self.editor.rename(entry, key), "fix": f"rename {entry.key} to {key}"}
        self.report(code, message, entry, **{"safe": False, **repair, **more})

    def report_removable(
        self,
        code: str,
        message: str,
        entry: Entry,
        parent: Node | None,
        *,
        key: str | None = None,
        **more: Any,
    ) -> None:
        """Report an entry of ``parent``, with the fix that removes it.

        Args:
            code, message, more: As for :meth:`report`.
            entry: What it is about.
            parent: The mapping that holds it.
            key: What the fix calls it; None: as it is written.
        """
        edits = self.editor.remove(parent, entry)
        self.report(code, message, entry, edits=edits, fix=f"remove {key or entry.key}", **more)

    def _span(self, at: Entry | Node | int | None, value: bool) -> tuple[int | None, int | None]:
        if at is None:
            return None, None
        if isinstance(at, int):
            return at, min(at + 1, len(self.source.text))
        node = at
        if isinstance(at, Entry):
            node = at.node if value and at.node.end > at.node.start else at.key_node
        assert isinstance(node, Node)
        line_end = self.source.text.find("\n", node.start)
        stop = node.end if line_end < 0 else min(node.end, max(line_end, node.start + 1))
        return node.start, stop

    def pending(self) -> frozenset[str]:
        """Return the settings that unsafe fixes found so far would let begin to count.

        A misspelt key, or one in the wrong place: a default that is written out before would stand in
        its way, and what the author wrote would be lost.
        """
        names: set[str] = set()
        for finding in self.findings:
            fix = finding.diagnostic.fix
            if finding.diagnostic.code in _MISWRITTEN and fix is not None and not fix.safe:
                names.update(finding.changes)
                names.add(str(finding.changes.get("*")))
        return frozenset(names)

    def withhold_dependent_fixes(self) -> None:
        """Withdraw the fixes that rely on a setting which is about to take effect."""
        pending = self.pending()
        codes = {code for name, codes in _DEPENDENT.items() if name in pending for code in codes}
        for index, finding in enumerate(self.findings):
            if finding.diagnostic.code in codes:
                bare = replace(finding.diagnostic, fix=None)
                self.findings[index] = replace(finding, diagnostic=bare, changes={})

    def has(self, *codes: str, severity: Severity | None = None) -> bool:
        """Whether a finding with one of the codes (and the severity, if given) was recorded."""
        return any(
            finding.diagnostic.code in codes and severity in (None, finding.diagnostic.severity)
            for finding in self.findings
        )


COMPUTED = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""dtype of ``mixed_precision`` (accelerate 1.15, ``set_mixed_precision``: fp8 layers aside, bfloat16)."""

_NOT_UPCAST = frozenset({"axolotl"})
"""Programs that replace ``fsdp2_prepare_model``, in some versions by one that does not upcast."""


def consumer_dtypes(lint: LintContext) -> EffectiveDtypes:
    """Return what accelerate makes of ``mixed_precision``, or ``fsdptool train`` where it reads the file.

    accelerate 1.15: one dtype for parameters, reduction and outputs (``set_mixed_precision``); trained
    parameters are upcast to fp32 and saved so (``fsdp2_prepare_model``; under version 1
    ``prepare_model``). Under version 1 nothing casts the fp32 outputs of ``convert_outputs_to_fp32`` back.
    """
    computed = COMPUTED.get(lint.get("mixed_precision") or "no")
    if lint.consumer.name == "fsdptool":
        return EffectiveDtypes("float32", computed or "float32", *_native(computed))
    if computed is None:
        return EffectiveDtypes(None, None, None, None, None, None)
    stored = None if lint.consumer.name in _NOT_UPCAST else "float32"
    outputs = computed if lint.get("fsdp_version") == 2 else "float32"
    return EffectiveDtypes(stored, computed, computed, computed, outputs, stored)


def _native(computed: str | None) -> tuple[str, str, str, str]:
    """``fsdptool train`` reduces in fp32 unless the recipe says otherwise, and casts no outputs."""
    return computed or "float32", "float32", computed or "float32", "float32"
