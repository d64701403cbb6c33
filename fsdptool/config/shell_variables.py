"""The variables of a shell script, as far as its own assignments say their values.

Nothing is run. A value is known where the script, or a file of assignments that it sources, assigns text, a
default (``${NAME:-8}``), arithmetic or an array to it before its command. What a branch, a loop or another
program decides stays a variable: a plan names it. A script is read as it is called without arguments.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fsdptool.config.here_documents import settings_written
from fsdptool.config.shell import enclosed, parse_environment, requoted, spans_of, words_of
from fsdptool.config.shell_arithmetic import computed
from fsdptool.files.text import SourceText, UnreadableError
from fsdptool.files.tree import Node

_KNOWN = {"HOME": "~", "PWD": "."}
"""Variables of every shell, as paths that need no variable."""
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=", re.DOTALL)
_ELEMENT = re.compile(rf"({_NAME})\[[^\]]*\]\+?=")
"""An assignment to one element of an array."""
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_SKIPPED = frozenset({"then", "do", "time", "!"})
_WHOLE_LIST = re.compile(
    rf'"\$\{{({_NAME})\[[@*]\]\}}"|"?\$\{{({_NAME})\[@\]\+"?\$\{{\2\[@\]\}}"?\}}"?'
    r'|"(?:\$[@*]|\$\{@(?::\d+)?\})"|\$[@*]|\$\{@(?::\d+)?\}'
)
"""A list of which each element is one word; without a name: the script's own arguments."""
_PARAMETER = re.compile(rf"({_NAME}|\d)(?:\[(\d+|[@*])\])?(.*)", re.DOTALL)
_PLAIN = re.compile(rf"\$({_NAME}|\d)")
_EMPTY = re.compile(rf'\[+\s*-(z|n)\s+"?\$\{{?({_NAME}|\d)(?::?-)?\}}?"?\s*\]+')
_EQUAL = re.compile(
    rf'\[+\s*(?P<left>"?\$(?:{_NAME}|\{{{_NAME}(?P<other>:?-[^{{}}"]*)?\}})"?)\s*(?P<sign>==?|!=|-(?:eq|ne|gt|ge|lt|le)\b)'
    r'\s*["\']?(?P<right>[\w.\-/]*)["\']?\s*\]+'
)
_TRUTH = re.compile(rf'"?\$\{{?({_NAME})\}}?"?')
"""A condition that is a variable alone: the command ``true`` or ``false``."""
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip
_EXPR = re.compile(r"\s*expr\s+(.+)", re.DOTALL)
_BEFORE = re.compile(r"^\s*(?:(?:then|do|else|time|nohup|exec|sudo|env|!|\{)\s+)+")
_SIGNS = ("+", "-", "*", "/", "%")
_SIGNED = re.compile(r"(?!^)[-+*/%]")
"""``expr`` computes only what stands in words of its own: ``expr 8/2`` prints ``8/2``."""
_FIELDS = r"awk\s+-F\s*[\"']?,[\"']?\s+'\{\s*print\s+NF\s*\}'"
_COUNTED = re.compile(
    rf"""\s*(?:(?:echo|(?P<bare>printf)\s+["']?%s["']?)\s+(?P<piped>"[^"]*"|[^\s|]+)\s*\|\s*"""
    rf"""(?:(?P<ends>tr\s+["']?,["']?\s+["']?\\n["']?\s*\|\s*wc\s+-l)|{_FIELDS})"""
    rf"""|{_FIELDS}\s*<<<\s*(?P<given>.+?))\s*""",
    re.DOTALL,
)
"""Ways in which scripts count the parts of a list with commas, as that of the visible GPUs."""
_SPLIT = re.compile(rf"""IFS=["']?(\S)["']?\s+read\s+(?:-r\s+)?-r?a\s+({_NAME})\s*<<<\s*(.+)""", re.DOTALL)
_ARRAY_LINES = re.compile(r"^[^#\n]*\b\w+\+?=\([ \t]*\n(?:(?![ \t]*\)).*\n)*", re.MULTILINE)
_COMMENT = re.compile(
    r"""^((?:[^"'#\n\\]|\\.|"[^"\n]*"|'[^'\n]*'|(?<=\S)#)*?)(?:(?<=\s)|^)#.*$""", re.MULTILINE
)
"""Comments within an array of several lines: an apostrophe there opens no quote."""
_LENGTH = re.compile(rf"#({_NAME})\[[@*]\]")
_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_BATCH_OPTION = re.compile(
    r"(?:^|(?<=\s))(?:--(nodes|ntasks|ntasks-per-node|gpus-per-node|gres|cpus-per-task)[=\s]\s*([\w:.,-]{1,100})"
    r"|-([Nnc])\s*(\d[\d-]{0,16}))"
)
_OF_BATCH = re.compile(r"\\?\$(?:\{(SLURM_\w+)(?::?-[^{}]*)?\}|(SLURM_\w+)\b)")
_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task"}
_LONGEST = 20_000
"""Characters of a value: nobody writes more."""
_SHELL, _SOURCED = (".sh", ".bash", ".env"), 20
"""What the files that are sourced end in, and how many of them are read at most."""
_MOST = 2_000_000
"""Characters of a script, and of what becomes of it: a longer one stays as it is."""


class Files(Protocol):
    """What reads the files that a script sources (:class:`fsdptool.config.command_lines.NamedFiles`)."""

    def read(self, name: str, endings: tuple[str, ...] = ...) -> SourceText | str:
        """Return a file's text, or why it is not read."""


Value = str | tuple[str, ...] | None
"""A text, an array, or None for what is not known."""


@dataclass(slots=True)
class _Block:
    """A compound command: what its present branch (``scope``) and those before it assign.

    ``runs`` is whether the present branch runs, None where that is not known; ``ran``: one is known to run;
    ``asks``: the words that follow belong to its condition. ``kind`` is the word that opens it, or ``group``,
    ``maybe``, ``subshell`` and ``function``, which has a ``name``; what it sets to other values than these,
    or for itself alone, is in ``open``.
    """

    kind: str
    scope: dict[str, Value] = field(default_factory=dict)
    before: dict[str, Value] = field(default_factory=dict)
    runs: bool | None = None
    ran: bool = False
    asks: bool = False
    name: str = ""
    open: set[str] = field(default_factory=set)


def substituted(text: str, files: Files | None = None) -> str:
    """Return a script with its variables replaced by what it assigned to them; others stay.

    Args:
        text: The script.
        files: Where the files that it sources are looked for; None reads none.
    """
    if ("$" not in text and "`" not in text) or len(text) > _MOST:
        return text
    batch = batch_variables(text)
    text = _ARRAY_LINES.sub(lambda found: _COMMENT.sub(r"\1", found[0]), text)
    script = _Script(files, batch)
    pieces: list[str] = []
    size = 0
    for part, is_text in _parts(text):
        if is_text:  # of a file of settings: no command, and quotes are characters
            pieces.append(script.document(part))
            continue
        last = 0
        for start, end in spans_of(part):
            between = part[last:start]
            piece = script.read(part[start:end], between)
            pieces += (between, piece)
            last, size = end, size + len(piece)
            if size > _MOST:
                return text
        pieces.append(part[last:])
    whole = "".join(pieces)
    # What is quoted for another shell (``bash -c '...'``): Slurm exports its variables.
    known = {name: value for name, value in batch.items() if re.search(rf"\b{name}\+?=", text) is None}
    return _OF_BATCH.sub(lambda found: known.get(found[1] or found[2], found[0]), whole) if known else whole


def environments(text: str, starts: Sequence[int], files: Files | None = None) -> list[dict[str, str]]:
    """Return the variables that a script gives to each of its commands.

    What is not known, as what a branch decides, stands as ``$NAME``. What is assigned counts as exported.

    Args:
        text: The script, with its known values (:func:`substituted`).
        starts: Where the commands begin, in their order.
        files: Where the files that it sources are looked for.
    """
    found: list[dict[str, str]] = []
    if len(text) > _MOST:
        return [{} for _ in starts]
    script = _Script(files, {})
    at = 0
    for part, is_text in _parts(text):
        last = 0
        for start, end in () if is_text else spans_of(part):
            words = part[start:end]
            seen = script.read(words, part[last:start]) if words.strip() else ""
            last = end
            while len(found) < len(starts) and starts[len(found)] < at + end:
                found.append(script.environment() | _prefixed(text[at + start : starts[len(found)]]))
            if seen.split(None, 1)[:1] in (["ENV"], ["set"]):
                script.written |= _prefixed(words)
        at += len(part)
    return [*found, *({} for _ in starts[len(found) :])]


def _prefixed(text: str) -> dict[str, str]:
    """Return what stands before a command: ``then A=1 B=2 torchrun``."""
    root = parse_environment(_BEFORE.sub("", text)).root
    return {str(e.key): str(e.node.value) for e in (root.entries if root is not None else ())}


def assigned(text: str, files: Files | None = None) -> dict[str, str]:
    """Return the variables that a script leaves with a text; ``${NAME}`` for those whose text is not known.

    Arguments are those of :func:`substituted`.
    """
    if len(text) > _MOST:
        return {}
    script = _Script(files, {})
    last = 0
    for start, end in spans_of(text):
        script.read(text[start:end], text[last:start])
        last = end
    values = script.blocks[0].scope.items()
    return {name: value if isinstance(value, str) else f"${{{name}}}" for name, value in values}


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a script, and whether each is the text of a file of settings that it writes."""
    last = 0
    for start, end in settings_written(text):
        yield text[last:start], False
        yield text[start:end], True
        last = end
    yield text[last:], False


def batch_variables(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets for a batch script, from its ``#SBATCH`` lines.

    Slurm's documentation of ``sbatch`` names them ("output environment variables"). A range of nodes leaves
    open what depends on it. Lines after the first command are comments, as they are for Slurm.
    """
    asked: dict[str, str] = {}
    for line in text.splitlines():
        if (directive := _DIRECTIVE.match(line)) is not None:
            asked |= _batch_options(directive[1])
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    if asked and not asked.keys() & {"nodes", "ntasks"}:
        asked["nodes"] = "1"
    nodes, tasks = _count(asked.get("nodes")), _tasks(asked)
    gpus = re.fullmatch(r"(?:[\w.-]+:)?(\d{1,6})", asked.get("gpus-per-node", ""))
    gpus = gpus or re.search(r"(?:^|,)gpu(?::[\w.-]+)?:(\d{1,6})(?=,|$)", asked.get("gres", ""))
    found = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), tasks),
        "SLURM_NTASKS_PER_NODE": _count(asked.get("ntasks-per-node")),
        "SLURM_GPUS_ON_NODE": int(gpus[1]) if gpus is not None else None,
        "SLURM_GPUS_PER_NODE": _count(asked.get("gpus-per-node")),
        "SLURM_CPUS_PER_TASK": _count(asked.get("cpus-per-task")),
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def step_of_srun(text: str, start: int) -> tuple[int | None, int | None] | None:
    """Return the tasks and the nodes with which ``srun`` starts a command, None for what is not known.

    Options of ``srun`` come before those of the batch script.

    Args:
        text: The script.
        start: Where the command begins.

    Returns:
        None where ``srun`` does not start it.
    """
    begin = next((first for first, last in spans_of(text) if first <= start < last), 0)
    started = re.search(r"(?:^|\s)srun\s(.*)", text[begin:start].replace("\\\n", "  "), re.DOTALL)
    if started is None:
        return None
    batch = batch_variables(text)
    outer = {"nodes": batch.get("SLURM_NNODES"), "ntasks-per-node": batch.get("SLURM_NTASKS_PER_NODE")}
    given = _batch_options(started[1])
    asked = {name: value for name, value in outer.items() if value is not None} | given
    tasks = _tasks(asked) if given else None
    return tasks if tasks is not None else _count(batch.get("SLURM_NTASKS")), _count(asked.get("nodes"))


def _batch_options(text: str) -> dict[str, str]:
    return {found[1] or _SHORT[found[3]]: found[2] or found[4] for found in _BATCH_OPTION.finditer(text)}


def _tasks(asked: Mapping[str, str]) -> int | None:
    nodes, each = _count(asked.get("nodes")), _count(asked.get("ntasks-per-node"))
    total = _count(asked.get("ntasks"))
    return total if total is not None or nodes is None or each is None else nodes * each


def _count(value: str | None) -> int | None:
    return int(value) if value is not None and re.fullmatch(r"[0-9]{1,6}", value) else None


class _Script:
    """The variables at one place of a script."""

    def __init__(self, files: Files | None, batch: Mapping[str, str]) -> None:
        self.blocks = [_Block("script", dict(batch))]
        self.files = files
        self.sourced = 0
        self.defines = False
        self.last = ""
        self.functions: dict[str, dict[str, Value]] = {}
        self.written: dict[str, str] = {}

    def read(self, span: str, between: str) -> str:
        """Return one command with what is known put in, and take what it assigns."""
        self._enter(between)
        maybe = "||" in between or "&&" in between
        words = list(words_of(span, 0, len(span)))
        self._asks(words)
        at = self._keywords(span, words, maybe)
        rest = words[at:]
        self._run(rest)
        declared = bool(rest) and rest[0].value in _DECLARES
        given = [word for word in (rest[1:] if declared else rest) if not word.raw.startswith("-")]
        if declared and rest[0].value != "export":
            for block in self.blocks:
                block.open |= {word.raw.partition("=")[0].rstrip("+") for word in given}
        for word in given[: next((i for i, w in enumerate(given) if "=" not in w.raw), None)]:
            if (element := _ELEMENT.match(word.raw)) is not None:
                self._set(element[1], None)
        if given and all(_ASSIGNMENT.match(word.raw) or declared for word in given):
            return self._assign(span, given, maybe)
        split = _SPLIT.fullmatch(span.strip())
        if split is not None:
            value = self._word(split[3])
            known = None
            if value is not None and "$" not in value:
                known = tuple(value.removesuffix(split[1]).split(split[1]))
            self._set(split[2], known, maybe)
        elif rest and rest[0].value in ("read", "mapfile", "readarray"):
            for word in rest[1:]:
                self._set(str(word.value), None)
        if len(rest) > 1 and rest[0].value in ("source", "."):
            self._source(self._word(rest[1].raw), maybe)
        return self.text(span)

    def environment(self) -> dict[str, str]:
        """Return the variables that a command is given here."""
        names = {name: None for block in self.blocks for name in block.scope}
        values = {name: _first(self.get(name)[1]) for name in names}
        return self.written | {n: f"${n}" if value is None else value for n, value in values.items()}

    def _enter(self, between: str) -> None:
        """Follow what separates two commands: branches of ``case``, subshells and heads of functions."""
        if ";;" in between and self.blocks[-1].kind == "case":
            self._branch()
        between = re.sub(r"\s+", "", between)
        self.defines = "()" in between
        for character in between.replace("()", ""):
            if character == "(":
                self.blocks.append(_Block("subshell"))
            elif character == ")" and self.blocks[-1].kind == "subshell":
                self.blocks.pop()

    def _run(self, words: list[Node]) -> None:
        """Take what a command does to variables by itself: a function of the script, or ``unset``."""
        name = str(words[0].value) if words else ""
        self.last = name if name != "function" else str(words[1].value) if len(words) > 1 else ""
        for key, value in self.functions.get(name, {}).items():
            self._set(key, value)
        if name == "unset":
            for word in words[1:]:
                name, place, _ = str(word.value).partition("[")
                self._set(name, None) if place else self._unset(name)

    def _unset(self, name: str) -> None:
        certain = all(block.kind in ("script", "group", "subshell") for block in self.blocks)
        if certain and self.blocks[-1].kind != "subshell":
            for block in self.blocks:
                block.scope.pop(name, None)
        elif self.get(name)[0]:
            self._set(name, None)

    def _source(self, name: str | None, maybe: bool) -> None:
        """Take the assignments of a file that the script sources; it is read and not run."""
        if name is None or self.files is None or self.sourced == _SOURCED:
            return
        try:
            found = self.files.read(name, _SHELL)
        except UnreadableError:
            return
        if isinstance(found, str):
            return
        self.sourced += 1
        self.blocks.append(_Block("maybe" if maybe else "group"))
        depth = len(self.blocks)
        last = 0
        for start, end in spans_of(found.text):
            self.read(found.text[start:end], found.text[last:start])
            last = end
        while len(self.blocks) >= depth:
            self._close()

    def get(self, name: str) -> tuple[bool, Value]:
        """Return whether a variable is assigned, and its value."""
        if name.isdecimal() and self._has_arguments():
            return True, None
        for block in reversed(self.blocks):
            if name in block.scope:
                return True, block.scope[name]
        return name in _KNOWN, _KNOWN.get(name)

    def _has_arguments(self) -> bool:
        """Whether the place is in a function that is not called as the script is (``main "$@"``)."""
        return any(block.kind == "function" and block.name != "main" for block in self.blocks)

    def _set(self, name: str, value: Value, maybe: bool = False) -> None:
        if maybe and self.get(name)[1] != value:
            value = None
        self.blocks[-1].scope[name] = value

    # Compound commands

    def _keywords(self, span: str, words: list[Node], maybe: bool) -> int:
        """Follow the words that open, divide and close blocks; return how many words they are."""
        at = 0
        while at < len(words):
            word = words[at].raw
            if word in ("if", "while", "until", "case"):
                block = _Block(word, asks=word == "if")
                self.blocks.append(block)
                condition = span[words[at].end :].strip()
                if word == "if":
                    block.runs = self._holds(condition)
                elif "$#" in condition or condition.startswith("getopts"):
                    block.runs = False  # it reads arguments, and there are none
                return len(words)
            if word == "for":
                self._loop(words[at + 1 :])
                return len(words)
            if word == "{":
                self._group(maybe)
            elif word == "function" and [item.raw for item in words[at + 2 : at + 3]] == ["{"]:
                self.blocks.append(_Block("function", name=words[at + 1].raw))
                at += 2
            elif word in ("elif", "else"):
                self._branch(word == "else")
                if word == "elif":
                    self.blocks[-1].asks = True
                    return len(words)
            elif word in ("fi", "done", "esac", "}"):
                self._close()
            elif word not in _SKIPPED:
                break
            at += 1
        return at

    def _asks(self, words: list[Node]) -> None:
        """Follow the condition of an ``if``: with a further part, whether it holds is not known."""
        block = self.blocks[-1]
        if words and words[0].raw == "then":
            block.asks = False
        elif words and block.asks and not block.ran:
            block.runs = None

    def _group(self, maybe: bool) -> None:
        kind = "function" if self.defines else "maybe" if maybe else "group"
        self.blocks.append(_Block(kind, name=self.last))

    def _loop(self, words: list[Node]) -> None:
        block = _Block("for")
        self.blocks.append(block)
        if len(words) > 1 and words[1].value == "in":
            listed = " ".join(self.text(word.raw) for word in words[2:])
            values = [str(word.value) for word in words_of(listed, 0, len(listed))]
            block.scope[str(words[0].value)] = values[0] if len(values) == 1 else None
            block.runs = None if values else False

    def _branch(self, other: bool = False) -> None:
        block = self.blocks[-1]
        if block.runs is not False:
            block.before |= block.scope
        before = block.runs
        block.ran |= before is True
        block.scope = {}
        block.runs = False if block.ran else True if other and before is False else None

    def _close(self) -> None:
        if len(self.blocks) == 1:
            return
        block = self.blocks.pop()
        if block.kind == "function":
            assigned = {**block.before, **block.scope}
            self.functions[block.name] = {k: None if k in block.open else v for k, v in assigned.items()}
            return
        if block.runs is not False:
            block.before |= block.scope
        for name, value in block.before.items():
            certain = block.kind == "group" or block.ran or block.runs is True
            self.blocks[-1].scope[name] = value if certain or self.get(name)[1] == value else None

    def _holds(self, condition: str) -> bool | None:
        """Return whether a simple condition holds, or None."""
        empty = _EMPTY.fullmatch(condition)
        if empty is not None:
            assigned, value = self.get(empty.group(2))
            if assigned and value is None:
                return None
            return (not value) == (empty.group(1) == "z")
        truth = _TRUTH.fullmatch(condition)
        if truth is not None:
            return {"true": True, "false": False}.get(str(self.get(truth[1])[1]))
        equal = _EQUAL.fullmatch(condition)
        if equal is None:
            return None
        name = re.search(_NAME, equal["left"])
        unset = name is not None and not self.get(name.group())[0] and equal["other"] is None
        value = "" if unset else self._word(equal["left"])
        if value is None or "$" in value:
            return None
        compares = _COMPARED.get(equal["sign"])
        if compares is not None:
            numbers = [_count(word) for word in (value, equal["right"])]
            return None if None in numbers else compares(*numbers)  # type: ignore[arg-type]
        return (value == equal["right"]) == (equal["sign"] != "!=")

    # Assignments

    def _assign(self, span: str, words: list[Node], maybe: bool) -> str:
        """Take assignments; return them with their values as one quoted word each."""
        pieces: list[str] = []
        last = 0
        for word in words:
            match = _ASSIGNMENT.match(word.raw)
            if match is None:
                continue
            known = self.text(word.raw, splits=word.raw[match.end() :].startswith("("))
            name, raw = match.group(1), word.raw[match.end() :]
            value = self._array(raw[1:-1]) if raw.startswith("(") and raw.endswith(")") else self._value(raw)
            if match.group(2):
                value = _joined(self.get(name)[1], value)
            items = value if isinstance(value, tuple) else ()
            itself = any(f"${{{name}[" in item for item in items)
            if itself or sum(map(len, value or ())) + len(items) > _LONGEST:
                value, known = None, word.raw
            self._set(name, value, maybe)
            within = next((block for block in reversed(self.blocks) if block.kind == "function"), None)
            within = None if within is not None and within.name == "main" else within
            if within is not None and ("$" in raw or "`" in raw or match.group(2)):
                within.open.add(name)
            quoted = isinstance(value, str) and "$" not in value and "\n" not in value
            pieces += (span[last : word.start], f"{name}={shlex.quote(str(value))}" if quoted else known)
            last = word.end
        return "".join((*pieces, span[last:]))

    def _value(self, raw: str) -> Value:
        text = self.text(raw, splits=False)
        if _runs(text):
            return None
        return "".join(str(word.value) for word in words_of(text, 0, len(text)))

    def _array(self, raw: str) -> Value:
        text = self.text(raw)
        if _runs(text):
            return None
        items = tuple(str(word.value) for word in words_of(text, 0, len(text)))
        return None if any(item.startswith("[") and "]=" in item for item in items) else items

    # What stands for a value

    def text(self, raw: str, *, splits: bool = True) -> str:
        """Return shell text in which what is known stands for variables."""
        if "$" not in raw and "`" not in raw:
            return raw
        return "".join(self._pieces(raw, splits))

    def document(self, body: str) -> str:
        """Return the text of a here-document with what is known put in as it is."""
        pieces: list[str] = []
        index = 0
        while index < len(body):
            if body[index] in "$`":
                end, value = self._expansion(body, index)
                pieces.append(body[index:end] if value is None else value)
            else:
                escapes = body[index] == "\\" and body[index + 1 : index + 2] in ("$", "`", "\\")
                end = index + 1 + escapes
                pieces.append(body[index + escapes : end])
            index = end
        return "".join(pieces)

    def _pieces(self, raw: str, splits: bool) -> Iterator[str]:
        index, double = 0, False
        while index < len(raw):
            character = raw[index]
            listed = _WHOLE_LIST.match(raw, index) if not double and character in '"$' else None
            if listed is not None:
                known = self._list(listed.group(1) or listed.group(2))
                words = known if splits or known is None else (" ".join(known),)
                yield listed.group() if words is None else " ".join(map(shlex.quote, words))
                index = listed.end()
            elif character == "\\":
                yield raw[index : index + 2]
                index += 2
            elif character == "'" and not double:
                end = raw.find("'", index + 1) + 1 or index + 1
                yield raw[index:end]
                index = end
            elif character == "#" and not double and (index == 0 or raw[index - 1].isspace()):
                end = raw.find("\n", index)
                yield raw[index : end if end >= 0 else len(raw)]
                index = end if end >= 0 else len(raw)
            elif character in "$`":
                end, value = self._expansion(raw, index)
                yield raw[index:end] if value is None else requoted(value, double, splits)
                index = end
            else:
                double ^= character == '"'
                yield character
                index += 1

    def _list(self, name: str | None) -> tuple[str, ...] | None:
        """Return an array; the script's own arguments, which have no name, are none."""
        if name is None:
            return None if self._has_arguments() else ()
        value = self.get(name)[1]
        return (value,) if isinstance(value, str) else value

    def _expansion(self, raw: str, index: int) -> tuple[int, str | None]:
        """Return where an expansion ends, and its value; None: it is not known."""
        if raw[index] == "`":
            end = raw.find("`", index + 1) + 1 or index + 1
            return end, self._output(raw[index + 1 : end - 1])
        following = raw[index + 1 : index + 2]
        if following == "[" and (end := raw.find("]", index)) > 0:  # the form of arithmetic before ``$((``
            return end + 1, self._arithmetic(raw[index + 2 : end])
        if following in ("(", "{"):
            closed = enclosed(raw, index + 1, len(raw))
            if closed is None:
                return index + 1, None
            inner = raw[index + 2 : closed - 1]
            if following == "{":
                return closed, self._parameter(inner)
            if inner.startswith("(") and inner.endswith(")"):
                return closed, self._arithmetic(inner[1:-1])
            return closed, self._output(inner)
        plain = _PLAIN.match(raw, index)
        if plain is None:
            return index + 1, None
        return plain.end(), _first(self.get(plain.group(1))[1])

    def _output(self, command: str) -> str | None:
        """Return what a command prints, where that needs no running: a number, or the script's folder."""
        if (expression := _EXPR.fullmatch(command)) is not None:
            words = [str(word.value) for word in words_of(expression[1], 0, len(expression[1]))]
            apart = all(word in _SIGNS for word in words[1::2]) and not any(map(_SIGNED.search, words[::2]))
            return self._arithmetic(" ".join(words)) if apart else None
        if (counted := _COUNTED.fullmatch(command)) is not None:
            listed = self._word(counted["piped"] or counted["given"])
            # ``wc -l`` counts ends of lines, and only echo writes the last one.
            last = not (counted["bare"] and counted["ends"])
            return None if not listed or "$" in listed else str(listed.count(",") + last)
        return _folder(command)

    def _parameter(self, inner: str) -> str | None:
        if (length := _LENGTH.fullmatch(inner)) is not None:
            value = self.get(length[1])[1]
            return None if value is None else "1" if isinstance(value, str) else str(len(value))
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return None
        name, place, rest = match.groups()
        assigned, value = self.get(name)
        if place is not None and not isinstance(value, str):
            if place in "@*":  # unquoted, each item is split into words
                return None if value is None or rest else " ".join(value)
            listed = value or ()
            value = listed[int(place)] if place.isdecimal() and int(place) < len(listed) else None
        value = _first(value)
        if not rest:
            return value
        if assigned and value is None:
            return None
        sign = re.match(r":?[-=?+]", rest)
        if sign is None:
            return value.rpartition("/")[2] if value is not None and rest == "##*/" else None
        empty = not value if rest.startswith(":") else value is None
        if sign.group()[-1] == "+":
            return "" if empty else self._word(rest[sign.end() :])
        if not empty:
            return value
        if sign.group()[-1] == "?":
            return None
        found = self._word(rest[sign.end() :])
        if sign.group()[-1] == "=":
            self._set(name, found)
        return found

    def _word(self, raw: str) -> str | None:
        value = self._value(raw)
        return value if isinstance(value, str) else None

    def _arithmetic(self, expression: str) -> str | None:
        return computed(self.text(expression), lambda name: _first(self.get(name)[1]))


def _runs(text: str) -> bool:
    """Whether text starts a command whose output is not known."""
    bare = re.sub(r"""\\.|'[^']*'|"'+\"""", "", text, flags=re.DOTALL)
    return "$(" in bare or "`" in bare


def _first(value: Value) -> str | None:
    """Return a text; an array without a place is its first element."""
    return value[0] if isinstance(value, tuple) and value else value if isinstance(value, str) else None


def _joined(old: Value, new: Value) -> Value:
    if isinstance(old, tuple) and isinstance(new, tuple):
        return (*old, *new)
    return old + new if isinstance(old, str) and isinstance(new, str) else new if old == () else None


def _folder(substitution: str) -> str | None:
    """Return ``.`` for the ways in which scripts ask for the folder that they are in."""
    return "." if re.search(r"\bpwd\b|\bdirname\b.*(?:\$0|BASH_SOURCE)", substitution) else None
