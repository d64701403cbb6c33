"""What a command line makes of its flags and of the files that it names: the tree that a dialect reads.

Sources: accelerate 1.15 ``commands/launch.py:_validate_launch_command`` (which flags override the file),
transformers 5.23 ``hf_argparser.py`` and ``training_args.py`` (flags of a script), TRL 1.16
``scripts/utils.py:TrlParser``, torchtitan 0.2 ``config/manager.py``, torchtune 0.6.1 ``config/_parse.py``.
Nothing is run: variables stay unresolved, and only regular files with a configuration's ending are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects import detect_dialect, load_registry
from fsdptool.config.dialects.accelerate.keys import DETAILS as PARALLELISM_DETAILS
from fsdptool.config.dialects.accelerate.keys import FSDP_KEYS, PARALLELISM_KEYS
from fsdptool.config.dialects.protocol import parse_source
from fsdptool.config.dialects.simpletuner import OWN_FLAGS
from fsdptool.config.here_documents import here_documents, written_name
from fsdptool.config.shell import (
    MOST,
    Command,
    configures,
    find_commands,
    is_variable,
    parse_command,
    parse_environment,
    plain,
)
from fsdptool.config.shell_variables import substituted
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.files.tree import Document, Entry, Included, Node, ParseError, parse_json_source, walk

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext

ENDINGS = (".yaml", ".yml", ".json", ".toml")

_MODULES = {
    "axolotl.cli.train": "axolotl",
    "axolotl.cli.main": "axolotl",
    "torchtitan.train": "torchtitan",
    "llamafactory.cli": "llamafactory",
    "llamafactory.launcher": "llamafactory",
    "swift.cli.sft": "swift",
    "swift.cli.pt": "swift",
    "swift.cli.rlhf": "swift",
    "verl": "verl",
    "openrlhf": "openrlhf",
    "oumi": "oumi",
    "nemo_automodel": "automodel",
    "fsdptool": "fsdptool",
}
"""Modules (or their packages) and scripts by whose path a program is known."""
_PROGRAMS = {
    "llamafactory-cli": "llamafactory",
    "lmf": "llamafactory",
    "tune": "torchtune",
    "megatron": "swift",
}
_TITLES = {
    "swift": "ms-swift",
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "oumi": "oumi",
    "automodel": "NeMo AutoModel",
    "xtuner": "XTuner",
    "litgpt": "LitGPT",
    "fsdptool": "fsdptool",
}
"""Programs with command lines of their own that no dialect reads."""

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
_TRUTHS = frozenset([
    "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing", "save_only_model",
    "load_best_model_at_end",
])  # fmt: skip
"""Arguments that ``hf_argparser.string_to_bool`` reads."""
_WHOLE = frozenset([
    "num_processes", "num_machines", "machine_rank", "main_process_port", "fsdp_version",
    "fsdp_min_num_params",
])  # fmt: skip
_DECIDE = {name: name for name in ("fsdp", *sorted(_TRUTHS))} | dict.fromkeys(
    ("bf16", "fp16"), "mixed_precision"
)
"""Arguments of the Trainer by which a run with FSDP is judged, and the settings that they decide."""
_TOP = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
    "mixed_precision",
)  # fmt: skip
_CANONICAL = {**FSDP_KEYS, **PARALLELISM_KEYS, **PARALLELISM_DETAILS}
_KINDS = {
    "use_fsdp": "FSDP",
    "multi_gpu": "MULTI_GPU",
    "use_deepspeed": "DEEPSPEED",
    "tpu": "XLA",
    "use_megatron_lm": "MEGATRON_LM",
}
"""Flags that decide what is launched, whatever ``distributed_type`` of the file says."""


ALLOWED: ContextVar[Callable[[Path], bool] | None] = ContextVar("ALLOWED", default=None)
"""Which files a text may have read, where not everything is: set by what serves others, as the web does."""


def _allowed(path: Path) -> bool:
    allows = ALLOWED.get()
    return allows is None or allows(path)


def _on_disk(path: Path) -> SourceText | None:
    return read_source(path) if path.is_file() else None


_ENTERS = re.compile(
    r"""(?:^|[;&|({])[ \t]*(?:cd|pushd)[ \t]+(?:--[ \t]+)?("[^"\n]+"|'[^'\n]+'|[^\s;&|)]+)""", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """Where the files that a text names are looked for, and which of them may be read.

    Attributes:
        folders: What a relative name is relative to; the first folder that has the file counts.
        allowed: Whether a file may be read at all.
        text: Returns the text of a file, or None where there is none.
        texts: Files that no folder holds, by name: what a script writes before its command; None where that
            is not known.
        entered: Folders that the script changes to.
    """

    folders: tuple[Path, ...] = (Path(),)
    allowed: Callable[[Path], bool] = _allowed
    text: Callable[[Path], SourceText | None] = _on_disk
    texts: Mapping[str, str | None] = field(default_factory=dict)
    entered: tuple[str, ...] = ()

    def read(self, name: str, endings: tuple[str, ...] = ENDINGS) -> SourceText | str:
        """Return a file's text, or why it is not read.

        Args:
            name: As the text names it.
            endings: Of the files that are read.

        Raises:
            UnreadableError: It is there, and does not contain text of a configuration's size.
        """
        if written_name(name) in self.texts:
            return self._written(written_name(name), name)
        if any(mark in name for mark in "$`*{"):
            return "holds a variable"
        if "://" in name or name.startswith("~"):
            return "is not a path in the project"
        if not name.lower().endswith(endings):
            return f"does not end in {', '.join(endings)}"
        outside = False
        for folder in self.folders:
            path = folder / name
            try:
                if not self.allowed(path):
                    outside = True
                elif (found := self.text(path)) is not None:
                    return found
            except (OSError, ValueError):
                return "is not a path"
        # What stands at an absolute path, where the script changes to the folder above it, or to none.
        ends = f"/{written_name(name)}"
        above = [at for at in self.texts if at.startswith("/") and at.endswith(ends)]
        if len(above) == 1 and self._is_entered(above[0].removesuffix(ends)):
            return self._written(above[0], name)
        return "is outside the folders that may be read" if outside else "is not found"

    def _written(self, at: str, name: str) -> SourceText | str:
        text = self.texts[at]
        return SourceText(text, name) if text is not None else "is written more than once, or edited"

    def _is_entered(self, folder: str) -> bool:
        tried = (written_name(name) for name in self.entered)
        return not self.entered or any(folder == name or folder.endswith(f"/{name}") for name in tried)

    def within_project(self) -> NamedFiles:
        """Return these files without those outside the folders, and the repositories that they are in."""
        roots = [_root_of(folder.absolute().resolve()) for folder in self.folders]
        return replace(self, allowed=partial(_below, tuple(roots), self.allowed))

    def with_written(self, script: str, substituted: str, *, plain_names: bool = False) -> NamedFiles:
        """Return these files and those that a script writes with here-documents.

        Args:
            script: Its text.
            substituted: Its text with the values of its variables.
            plain_names: Whether its command is read without these values.
        """
        written = here_documents(script, substituted, plain_names=plain_names)
        if not written:
            return self
        entered = tuple(found[1].strip("\"'") for found in _ENTERS.finditer(substituted))
        return replace(self, texts={**self.texts, **written}, entered=(*self.entered, *entered))


def _root_of(folder: Path) -> Path:
    """Return the repository that a folder is in, or the folder."""
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), folder)


def _below(roots: tuple[Path, ...], allowed: Callable[[Path], bool], path: Path) -> bool:
    place = path.resolve()
    return any(place.is_relative_to(root) for root in roots) and allowed(path)


def default_files(path: str | None) -> NamedFiles:
    """Return the working directory and the folder of the file that names others."""
    beside = () if path is None else (Path(path).parent,)
    return NamedFiles(tuple(dict.fromkeys((Path(), *beside))))


@dataclass(slots=True)
class Line:
    """One command as it is read.

    Attributes:
        document: The tree.
        dialect: Name of the dialect that reads it; None: that of flags.
        consumer: The program that reads the settings, or None: the dialect's own answer.
        findings: Code, message, node and advice of what is known before the dialect reads.
        replaced: Entries of a file that a flag overrides.
        known: Whether every file that decides about FSDP was read.
        launcher: What ``accelerate launch`` sets before the Trainer reads ``document``.
        environment: Variables that the text assigns.
        files: The files that were read.
        refused: Whether nothing is judged: the findings say why.
        open: Settings that flags make a variable of the shell.
    """

    document: Document
    dialect: str | None = None
    consumer: str | None = None
    findings: list[tuple[str, str, Node, str | None]] = field(default_factory=list)
    replaced: list[Entry] = field(default_factory=list)
    known: bool = True
    launcher: Line | None = None
    environment: dict[str, str] = field(default_factory=dict)
    refused: bool = False
    files: tuple[str, ...] = ()
    open: dict[str, Entry] = field(default_factory=dict)


def read_lines(source: SourceText, files: NamedFiles | None = None) -> list[Line]:
    """Return the commands of a text that may configure FSDP, or the first that starts a training."""
    commands = find_commands(source.text)
    chosen = [item for item in commands if configures(item)]
    strong = [item for item in chosen if _states(item)]
    files = files or default_files(source.path)
    values = substituted(source.text, files)
    reader = _Reader(source, files.with_written(source.text, values, plain_names=True))
    if not commands:
        return [reader.line(parse_command(source.text))]
    lines = [reader.line(command) for command in strong or chosen or commands[:1]]
    if len(commands) == MOST:
        message = f"the first {MOST} commands are judged"
        lines[0].findings.append(
            ("FSD117", message, _at(commands[-1]), "check the others in a file of their own")
        )
    return lines


def _states(command: Command) -> bool:
    """Whether a command names a file for FSDP or flags of it, and not just any file."""
    names = {plain(entry) for entry in (*command.flags, *command.arguments)}
    own = command.program not in ("accelerate", "torchrun", "deepspeed", "python", "")
    return own or bool(names - {"config"} and configures(replace(command, words=[])))


class _Reader:
    """Turns the commands of one text into trees."""

    def __init__(self, source: SourceText, files: NamedFiles) -> None:
        self.source = source
        self.files = files
        self.environment = self._assigned()
        self.findings: list[tuple[str, str, Node, str | None]] = []
        self.known = True
        self.replaced: list[Entry] = []
        self.read_files: list[str] = []

    def line(self, command: Command) -> Line:
        """Return what one command is read as."""
        self.findings, self.known, self.replaced, self.read_files = [], True, [], []
        line = self._line(command)
        line.findings, line.known, line.replaced = self.findings, self.known, self.replaced
        line.environment, line.files = self.environment, tuple(self.read_files)
        return line

    def _line(self, command: Command) -> Line:
        program = _PROGRAMS.get(command.program, command.program)
        script = _program_of(command.script)
        names = {plain(entry).lower() for entry in command.arguments}
        if program == "":
            own = {plain(entry) for entry in command.flags}
            if own & {"fsdp", "fsdp_config"} and "use_fsdp" not in own:
                return self._trainer(command, command.flags, None)
            return self._launcher(command)
        if program == "simpletuner" or (names & OWN_FLAGS and "use_fsdp" not in names):
            return self._of(None, command, command.arguments, "simpletuner")
        front = program if program not in _LAUNCHERS else script
        trains = bool(names & {"fsdp", "fsdp_config"})
        if (
            front is not None
            and front not in _LAUNCHERS
            and (program != "accelerate" or trains or front not in _TITLES)
        ):
            line = self._front_end(front, command)
            if line is not None:
                return line
        layer = self._launcher(command) if program == "accelerate" else None
        if trains:
            return self._trainer(command, command.arguments, layer)
        if layer is not None and (layer.dialect == "accelerate" or not self.known or _switched(command)):
            return layer
        return self._own_file(command) or layer or self._of(None, command, [], None)

    def _of(self, dialect: str | None, command: Command, entries: list[Entry], consumer: str | None) -> Line:
        return Line(Document(self._root(command, entries), "flags"), dialect, consumer)

    def _root(self, command: Command, entries: Iterable[Entry] = ()) -> Node:
        return Node("map", command.start, command.end, entries=list(entries))

    def _assigned(self) -> dict[str, str]:
        """Return what the text assigns to variables of accelerate, before its command or in its own line."""
        root = parse_environment(self.source.text).root
        entries = root.entries if root is not None else []
        found = {str(entry.key): str(entry.node.value) for entry in entries}
        wanted = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")
        return {key: value for key, value in found.items() if key.startswith(wanted) and "$" not in value}

    def _read(
        self, at: Node, what: str, dialect: str | None = None, *, json: bool = False
    ) -> Document | None:
        """Return the tree of a named file; None: it is not read, which is said."""
        name = str(at.value)
        try:
            source = self.files.read(name)
        except UnreadableError as error:
            self.findings.append((error.code, f"{name}: {error.message}", at, None))
            self.known = False
            return None
        if isinstance(source, str):
            self.findings.append(("FSD116", f"{what} {name} is not read: it {source}", at, None))
            self.known = False
            return None
        reader = load_registry().get(dialect) if dialect is not None else None
        try:
            document = parse_json_source(source) if json else parse_source(source, reader)
        except ParseError as error:
            where = f", line {source.place(error.index)[0]}" if error.index is not None else ""
            self.findings.append((error.code, f"{source.path}{where}: {error.message}", at, None))
            self.known = False
            return None
        if document.root is None or document.root.kind != "map":
            self.findings.append(
                ("FSD107", f"{source.path}: it does not contain `key: value` pairs", at, None)
            )
            self.known = False
            return None
        if Path(source.path or "") not in (Path(name), self.files.folders[0] / name):
            advice = "the program looks in its working directory: run the command where the file is found"
            self.findings.append(("FSD117", f"{what} {name} is read from {source.path}", at, advice))
        _mark(document.root, Included(source, at))
        self.read_files.append(str(source.path))
        return document

    # accelerate launch

    def _launcher(self, command: Command) -> Line:
        """Return the settings of ``accelerate launch``: its flags, over those of the file."""
        entry = next((item for item in reversed(command.flags) if plain(item) == "config_file"), None)
        line = self._of(None, command, command.flags, None)
        if entry is None:
            if command.program == "accelerate":
                self.findings.append(
                    ("FSD117", "accelerate's default file, if there is one, is not read", _at(command), None)
                )
            return line
        document = self._read(entry.node, "the configuration file", "accelerate")
        if document is None or document.root is None:
            return line
        merged, opened = self._merged(command, document.root)
        return Line(Document(merged, "flags"), "accelerate", open=opened)

    def _merged(self, command: Command, root: Node) -> tuple[Node, dict[str, Entry]]:
        """Return the file with what the command line overrides, as ``_validate_launch_command`` merges.

        What a variable overrides is neither there any more: these settings come with their flags.
        """
        opened: dict[str, Entry] = {}
        flags = {plain(entry).lower(): entry for entry in command.flags}
        kind = next((key for key in _KINDS if key in flags and flags[key].node.value is not False), None)
        environment = root.get("compute_environment")
        local = environment is None or environment.node.value == "LOCAL_MACHINE"
        if kind is not None:
            root = self._put(root, ["distributed_type"], flags[kind], _KINDS[kind])
        mesh = root.get("parallelism_config")
        filled = mesh is not None and bool(mesh.node.entries)
        uses_mesh = "use_parallelism_config" in flags if kind is not None else filled
        if "use_parallelism_config" in flags and "use_fsdp" not in flags:
            message = "--use_parallelism_config needs --use_fsdp and --fsdp_version 2 on the command line"
            self.findings.append(
                (
                    "FSD212",
                    message,
                    flags["use_parallelism_config"].key_node,
                    "add them, or leave it out: the file decides",
                )
            )
        for name, entry in flags.items():
            block = None
            if name in FSDP_KEYS and local:
                block = "fsdp_config"
            elif name in (*PARALLELISM_KEYS, *PARALLELISM_DETAILS) and local and uses_mesh:
                block = "parallelism_config"
            if (block or name in _TOP or name in ("debug", "rdzv_backend")) and is_variable(entry.node):
                opened[_CANONICAL.get(name, name)] = entry
                root = self._drop(root, [block, name] if block else [name])
            elif name in _TOP:
                self._choice(name, entry)
                root = self._put(root, [name], entry)
            elif block is not None:
                root = self._put(root, [block, name], entry)
            elif name in ("debug", "cpu"):
                root = self._put(root, ["use_cpu" if name == "cpu" else name], entry, True)
            elif name == "rdzv_backend":
                root = self._put(root, [name], entry)
            elif name.startswith(("fsdp_", "parallelism_config_")) and name not in _MESH_AND_FSDP:
                self.findings.append(("FSD201", f"unknown flag {entry.key}", entry.key_node, "remove it"))
        if filled and not uses_mesh and mesh is not None:
            self.replaced.append(mesh)
            root = replace(root, entries=[item for item in root.entries if item is not mesh])
        return root, opened

    def _choice(self, name: str, entry: Entry) -> None:
        choices = ("no", "fp16", "bf16", "fp8")
        if name == "mixed_precision" and entry.node.value not in choices:
            words = f"--mixed_precision {entry.node.value!r} is not one of {', '.join(choices)}"
            self.findings.append(("FSD206", words, entry.node, None))

    def _drop(self, root: Node, path: list[str]) -> Node:
        """Return a mapping without what a flag overrides."""
        key, *rest = path
        old = root.get(key)
        if rest:
            if old is None or old.node.kind != "map":
                return root
            inner = replace(old, node=self._drop(old.node, rest))
            return replace(root, entries=[inner if item is old else item for item in root.entries])
        gone = [item for item in root.entries if item.key in (key, key.removeprefix("fsdp_"))]
        self.replaced.extend(gone)
        return replace(root, entries=[item for item in root.entries if item not in gone])

    def _put(self, root: Node, path: list[str], entry: Entry, value: Any = None) -> Node:
        """Return a mapping with a flag in the place of what it overrides; maps on the way are copied."""
        key, *rest = path
        old = root.get(key)
        if rest:
            inner = old.node if old is not None and old.node.kind == "map" else self._root_at(entry)
            node = self._put(inner, rest, entry, value)
            new = Entry(key, old.key_node if old is not None else entry.key_node, node)
        else:
            names = {key, key.removeprefix("fsdp_")} if key.startswith("fsdp_") else {key}
            gone = [item for item in root.entries if item.key in names]
            self.replaced.extend(item for item in gone if item.key_node.file is not None)
            root = replace(root, entries=[item for item in root.entries if item not in gone])
            node = _typed(entry.node, key) if value is None else replace(entry.node, value=value)
            new, old = Entry(key, entry.key_node, node), None
        kept = [item for item in root.entries if item.key != key] if rest else root.entries
        return replace(root, entries=[*kept, new])

    def _root_at(self, entry: Entry) -> Node:
        return Node("map", entry.node.start, entry.node.end)

    # A script that takes TrainingArguments

    def _trainer(self, command: Command, flags: list[Entry], layer: Line | None) -> Line:
        entries, opened = [], {}
        for entry in flags:
            name = plain(entry)
            if len(name) > len("fsdp_") and "fsdp_config".startswith(name):
                name = "fsdp_config"  # argparse takes an unambiguous beginning
            json = str(entry.node.value).lstrip().startswith("{")
            if name in _DECIDE and is_variable(entry.node) and not json:
                opened[_DECIDE[name]] = entry
            else:
                entries.append(Entry(name, entry.key_node, self._argument(name, entry)))
        line = replace(
            self._of("trainer", command, entries, "trainer"), open=opened, refused="fsdp" in opened
        )
        line.launcher = layer if self.known else None
        return line

    def _argument(self, name: str, entry: Entry) -> Node:
        node, value = entry.node, entry.node.value
        if name in _TRUTHS and isinstance(value, str):
            word = value.lower()
            if word not in (*_TRUE, *_FALSE):
                words = f"--{name} must be true or false, not {value!r}"
                self.findings.append(("FSD206", words, node, None))
            return replace(node, value=word in _TRUE)
        if name != "fsdp_config" or not isinstance(value, str):
            return node
        if value.lstrip().startswith("{"):
            return self._json(node, value)
        document = self._read(node, "fsdp_config", json=True)
        return document.root if document is not None and document.root is not None else node

    def _json(self, node: Node, text: str) -> Node:
        """Return the object that a flag holds; transformers makes numbers and booleans of its texts."""
        source = SourceText(text, "--fsdp_config")
        try:
            root = parse_json_source(source).root
        except ParseError as error:
            self.findings.append((error.code, f"--fsdp_config: {error.message}", node, None))
            self.known = False
            return node
        assert root is not None
        _mark(root, Included(source, node))
        for item in walk(root):
            if item.kind == "scalar" and isinstance(item.value, str):
                item.value = _typed(item, "").value
        return root

    # Programs with command lines of their own

    def _front_end(self, program: str, command: Command) -> Line | None:
        if program in _TITLES:
            message = f"a command line of {_TITLES[program]}, which has flags of its own"
            self.findings.append(("FSD110", message, _at(command), None))
            return replace(self._of(None, command, [], None), refused=True)
        named: Node | None = None
        overrides: list[tuple[list[str], Entry]] = []
        if program == "torchtitan":
            entry = command.flag("job.config_file")
            named = entry.node if entry is not None else None
            overrides = [(plain(item).split("."), item) for item in command.arguments if item is not entry]
        else:
            entry = command.flag("config") if program in ("trl", "torchtune") else None
            named = entry.node if entry is not None else _first_file(command)
            overrides = [([plain(item)], item) for item in command.arguments if item is not entry]
            overrides += list(_assignments(command.words))
        if named is None:
            if program in ("trl", "llamafactory"):
                return self._from_root(program, self._root(command), overrides)
            return None
        document = self._read(named, "the configuration file", program)
        if document is None or document.root is None:
            line = self._of(None, command, [], None)
            line.refused = True
            return line
        return self._from_root(program, document.root, overrides)

    def _from_root(self, program: str, root: Node, overrides: list[tuple[list[str], Entry]]) -> Line:
        for path, entry in overrides:
            if program != "torchtitan" or len(path) > 1:
                root = self._put(root, path, entry)
        nested = root.get("fsdp_config")
        if program in ("trl", "llamafactory") and nested is not None and isinstance(nested.node.value, str):
            node = self._argument("fsdp_config", nested)
            root = replace(root, entries=[item for item in root.entries if item is not nested])
            root.entries.append(Entry("fsdp_config", nested.key_node, node))
        launched = root.get("accelerate_config")
        if program == "trl" and launched is not None and root.get("fsdp") is None:
            name = launched.node.value
            if isinstance(name, str) and name.lower().endswith(ENDINGS):
                document = self._read(launched.node, "the accelerate file", "accelerate")
                if document is not None and document.root is not None:
                    return self._launched(root, document.root)
        return Line(Document(root, "flags"), program)

    def _launched(self, own: Node, root: Node) -> Line:
        """Return what ``trl`` hands on to ``accelerate launch``: its file, and keys that no trainer knows."""
        for key in _TOP[:5]:
            entry = own.get(key)
            if entry is not None:
                root = self._put(root, [key], entry)
        return Line(Document(root, "flags"), "accelerate")

    def _own_file(self, command: Command) -> Line | None:
        """Return the reading of the file that a script takes as its only word, or as ``--config``."""
        entry = next((item for item in command.arguments if plain(item) in ("config", "config_file")), None)
        named = entry.node if entry is not None else _first_file(command)
        if named is None or not str(named.value).lower().endswith(ENDINGS):
            return None
        before = len(self.findings)
        document = self._read(named, "the configuration file")
        if document is None or document.root is None:
            return None
        dialect, _ = detect_dialect(document.root)
        if dialect is None:
            del self.findings[before:]
            message = f"{named.value} is not a configuration of a known kind: it is not judged"
            self.findings.append(("FSD117", message, named, "no action is needed if it is the script's own"))
            return None
        return Line(Document(document.root, "flags"), dialect.name, dialect.consumer_of(document.root))


_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "composer", "colossalai", "launch_torchtitan")
_MESH_AND_FSDP = frozenset((*FSDP_KEYS, *PARALLELISM_KEYS, *PARALLELISM_DETAILS))


def _switched(command: Command) -> bool:
    return any(plain(entry).startswith(("use_fsdp", "fsdp_")) for entry in command.flags)


def _at(command: Command) -> Node:
    return Node("scalar", command.start, command.start + max(len(command.program), 1))


def _program_of(script: Node | None) -> str | None:
    """Return the program whose module or script this is, or None."""
    if script is None:
        return None
    module = re.sub(r"\.py$", "", str(script.value)).replace("/", ".").lstrip(".")
    for name, program in _MODULES.items():
        if module == name or module.startswith(f"{name}.") or module.endswith(f".{name}"):
            return program
    return None


def _first_file(command: Command) -> Node | None:
    return next((word for word in command.words if "=" not in str(word.value)), None)


_PAIR = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def _assignments(words: Iterable[Node]) -> Iterator[tuple[list[str], Entry]]:
    """Yield ``key=value`` words as overrides."""
    for word in words:
        pair = _PAIR.fullmatch(str(word.value))
        if pair is not None:
            cut = word.start + len(pair.group(1))
            key = Node("scalar", word.start, cut, pair.group(1), raw=pair.group(1))
            value = Node("scalar", min(cut + 1, word.end), word.end, pair.group(2), raw=pair.group(2))
            yield pair.group(1).split("."), Entry(pair.group(1), key, value)


def _typed(node: Node, key: str) -> Node:
    """Return a flag's text as the value that a file would write; anything but a number stays text."""
    value = node.value
    if not isinstance(value, str):
        return node
    word = value.strip().lower()
    if word in ("true", "false"):
        return replace(node, value=word == "true")
    number = re.fullmatch(r"[+-]?\d{1,18}", value.strip())
    texts = ("gpu_ids", "main_process_ip", "rdzv_backend", "fsdp_transformer_layer_cls_to_wrap")
    if number is not None and key not in texts:
        return replace(node, value=int(value))
    return node


def _mark(root: Node, file: Included) -> None:
    """Say of every node that it is another file's."""
    for node in walk(root):
        node.file = file
        for entry in node.entries:
            entry.key_node.file = file


_EXPORTED = {
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "wrap_classes": "FSDP_TRANSFORMER_CLS_TO_WRAP",
}


def export(launcher: LintContext) -> dict[str, str]:
    """Return the variables that ``accelerate launch`` sets and that the Trainer's plugin may fall back to."""
    if not launcher.runs_fsdp:
        return {}
    exported = {}
    for name, variable in _EXPORTED.items():
        value = launcher.get(name)
        if value is not None and value != ():
            exported[variable] = ",".join(value) if isinstance(value, tuple) else str(value).lower()
    if "FSDP_SHARDING_STRATEGY" in exported:
        exported["FSDP_SHARDING_STRATEGY"] = exported["FSDP_SHARDING_STRATEGY"].upper()
    return exported
