"""A log as text: its lines and who wrote them, the exceptions in it, what it says of itself. Torch-free.

Logs are untrusted and may be huge: a bounded part is read, as bytes that need not be text, and nothing in
them is executed or followed. The work grows with the length of the text, whatever it contains.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import BinaryIO

from fsdptool.errors import StorageError
from fsdptool.files.text import UnreadableError, read_ends
from fsdptool.records.diagnosis import LogFacts, RankLine

_HEAD_BYTES, _TAIL_BYTES = 8 << 20, 24 << 20
"""Bytes of a log that are read: what started it, and how it ended."""

LINE_LENGTH = 300
"""Characters of a line that are shown."""

_PIECE, _OVERLAP = 2000, 400
"""Characters of a line that are looked at together, and those that two such pieces share."""

_PREFIX_LENGTH = 500
"""Characters at the begin of a line in which progress and ranks are looked for."""

_SURVIVED = 3
"""Lines of progress of one writer that prove that a run went on."""

_RANK_DIGITS = 6
_RANK = re.compile(
    r"\[(?:rank|Rank |RANK:)(\d{1,9})\]|\[PG (?:ID \d{1,18} PG GUID )?0 ?(?:\(default_pg\) )?Rank (\d{1,9})\]"
    r"|\brank (\d{1,9})(?:: | \(process )|\brank=(\d{1,9})\b"
)
_LOCAL_RANK = re.compile(r"\[default(\d{1,9})\]")
"""What torchrun can put in front of a line: a rank within a machine."""

_ANSI = re.compile(
    r"\x1b\[[0-9;?]{0,20}[A-Za-z]|\x1b\][^\x07\n]{0,200}\x07|\[(?:0|[1-9]\d?)(?:;\d{1,3}){0,4}m"
)
"""Colours and titles of terminals; also without the escape character, which copying loses."""

_PREFIX = re.compile(
    r"(?:\[[^\[\]]{0,200}\]:?"
    r"|\([^()]{0,100}\bpid=\d{1,9}[^()]{0,200}\)"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S{0,40}"
    r"|\d\d[/-]\d\d(?:[/-]\d{2,4})?[ T-]\d\d:\d\d:\d\d\S{0,20}"
    r"|[A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d\S{0,10}"
    r"|\d\d:\d\d:\d\d[.,\d]{0,10}"
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d\.\d{1,9} \d{1,9} [^\]\s]{1,200}\]"
    r"|std(?:out|err) [FP]\b"
    r"|(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b ?:?"
    r"|(?:kern|user|daemon) {0,4}:\w{1,8} {0,4}:"
    r"|\d{1,5}:(?= |$)"
    r"|[\w.@-]{1,100} {0,20}\|"
    r"|-(?= )|[\w.-]{1,100} -(?= )|\|(?= )"
    r"|(?![\w.]{0,100}(?:Error|Exception|Interrupt|Exit|Warning)\b)[a-z][\w-]{0,60}(?:\[\d{1,9}\])?:(?= )"
    r"|(?=[\w.]{0,60}[\d-])[a-z][\w.-]{0,60}(?= )"
    r") ?"
)
"""One part of what schedulers, containers, loggers and launchers put in front of a line."""

_EXCEPTION = re.compile(
    r"(?:^|[\]:>)] |Uncaught )"
    r"((?:[A-Za-z_]\w{0,80}\.){0,8}(?:_?[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit)|Exception)"
    r"(?:: .|:?$).*)"
)
_RAISED = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80})(?::(?: .*)?)?$")
"""The line that ends a traceback, whatever the exception is called."""

_SHORTEST = 5
"""Characters of the shortest line that can end in an exception: a capital letter and ``Exit``."""

_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

_RECOVERED = re.compile(
    r"Decreasing batch size to|\b[Rr]etry(?:ing)?\b"
    r"|\b[Ff]all(?:ing|s)? ?back\b|\b[Cc]ontinuing\b|\b[Ss]kipping\b"
    r"|[Tt]rying again|[Ii]gnoring\b|not fatal|non-fatal"
)
_PROGRESS = re.compile(
    r"['\"]loss['\"]: |\bloss[:=] ?\d|\bstep[: =/]{1,2}\d|(?:it/s|s/it)[\],]"
    r"|\b[Ee]poch[: =]{0,2}\d|\biteration +\d"
)


def _may_be_progress(text: str) -> bool:
    """Say whether a text contains a word that every line with progress contains. It is asked of each line."""
    return (
        "loss" in text
        or "step" in text
        or "it/s" in text
        or "s/it" in text
        or "poch" in text
        or "iteration" in text
    )


_ENDED = re.compile(
    r"\btrain_runtime\b|[Tt]raining (?:is |has )?(?:been )?(?:completed?|finished|done|ended)\b"
    r"|[Ff]inished training|exit (?:status|code):? 0\b|exited with (?:code|status) 0\b|Model saved (?:to|in)"
    r"|COMPLETED\b|[Tt]raining successfully|Run summary:|Done\. Exiting|Saved final"
)
"""What programs print when they have done all that they were asked for."""


@dataclass(frozen=True)
class LogText:
    """A log as it was read.

    Attributes:
        name: What it is called in answers.
        text: Beginning and end.
        total_bytes, read_bytes: Its size, and how much of it was read.
        rank: The rank that wrote it, if it belongs to one.
        recorded: Whether its lines are made from a flight record.
    """

    name: str
    text: str
    total_bytes: int
    read_bytes: int
    rank: int | None = None
    recorded: bool = False

    @cached_property
    def lines(self) -> list[str]:
        """The lines without colours; of a very long one pieces that overlap."""
        return self._pieces[0]

    @cached_property
    def _pieces(self) -> tuple[list[str], list[int]]:
        text = _ANSI.sub("", self.text) if "m" in self.text or "\x1b" in self.text else self.text
        lines = text.split("\n")
        if max(map(len, lines)) <= _PIECE:
            return lines, []
        pieces, numbers = [], []
        for number, line in enumerate(lines, 1):
            for begin in range(0, max(len(line) - _OVERLAP, 1), _PIECE - _OVERLAP):
                pieces.append(line[begin : begin + _PIECE])
                numbers.append(number)
        return pieces, numbers

    @cached_property
    def last_progress(self) -> tuple[int, int]:
        """The indices of the last line with progress, and of the last one that two of its writer follow."""
        last, steps = -1, dict[str, int]()
        if not _may_be_progress(self.text):
            return -1, -1
        for index in range(len(self.lines) - 1, -1, -1):
            line = self.lines[index]
            if _may_be_progress(line) and _PROGRESS.search(line, 0, _PREFIX_LENGTH):
                last = max(last, index)
                writer = _writer(split_prefix(line)[0])
                steps[writer] = steps.get(writer, 0) + 1
                if steps[writer] == _SURVIVED:
                    return last, index
        return last, -1

    @cached_property
    def last_end(self) -> int:
        """The index of the last line that reports the end of all work, among the last lines; -1 without."""
        last = range(len(self.lines) - 1, max(len(self.lines) - _LAST_LINES, 0) - 1, -1)
        return next((index for index in last if _ENDED.search(self.lines[index])), -1)

    def number(self, index: int) -> int:
        """Return the number of a line in the text that was read, from 1."""
        numbers = self._pieces[1]
        return numbers[index] if numbers else index + 1

    def rank_at(self, index: int) -> int | None:
        """Return the rank that wrote a line, as far as it or the log says."""
        return rank_of(self.lines[index]) if self.rank is None else self.rank

    def ranks_at(self, indices: Iterable[int]) -> set[int]:
        """Return the ranks that wrote some lines, as far as they or the log say."""
        if self.rank is not None:
            return {self.rank}
        lines = self.lines
        return {rank for index in indices if (rank := rank_of(lines[index])) is not None}


def read_log(path: Path, *, name: str | None = None, rank: int | None = None) -> LogText:
    """Read the beginning and the end of a log.

    Raises:
        StorageError: It cannot be read, or is not a file.
    """
    try:
        head, tail, size = read_ends(path, head=_HEAD_BYTES, tail=_TAIL_BYTES)
    except UnreadableError as error:
        raise StorageError(f"{path}: {error.message}", help="give a log file or a run folder") from error
    read = len(head) + len(tail)
    data = head + (b"\n" if read < size else b"") + tail
    text = data.decode("utf-8", errors="replace").replace("\r", "\n")
    return LogText(name or str(path), text, max(size, read), read, rank)


def read_stream(stream: BinaryIO, name: str) -> LogText:
    """Read the beginning and the end of a log that comes through a pipe, as :func:`read_log` does."""
    head, tail, size = stream.read(_HEAD_BYTES), bytearray(), 0
    while block := stream.read(1 << 20):
        size += len(block)
        tail += block
        if len(tail) > 2 * _TAIL_BYTES:
            del tail[:-_TAIL_BYTES]
    tail = tail[-_TAIL_BYTES:]
    data = head + (b"\n" if len(tail) < size else b"") + tail
    text = data.decode("utf-8", errors="replace").replace("\r", "\n")
    return LogText(name, text, len(head) + size, len(head) + len(tail))


_BETWEEN_WORDS = bytes(
    code if code < 0x80 and (chr(code).isalnum() or chr(code) in "_\n") else 0x20 for code in range(256)
)
"""Table that replaces all characters outside of words."""


_KEY_WORDS, _KEY_LENGTH = 3, 3
"""How many words find a text, and the length below which one is not used beside others."""

_SHORT = 16
"""Characters of a line whose words are remembered."""


class TextIndex:
    """Finds the lines that contain known texts, in one pass over the words of a log.

    A text is found where its first word begins a word. Only the lines that contain its longest whole words
    are searched for it.

    Args:
        lines: The log.
        texts: All texts that will be asked for.
    """

    def __init__(self, lines: Sequence[str], texts: Iterable[str]) -> None:
        self._lines = lines
        self._words = {text: key_words(text) for text in texts}
        wanted = frozenset(word for words in self._words.values() for word in words)
        self._places: dict[bytes, list[int]] = defaultdict(list)
        self._sets: dict[bytes, set[int]] = {}
        self._text = "\n".join(lines)
        data = self._text.encode("utf-8", "replace").translate(_BETWEEN_WORDS)
        shortest = min(map(len, wanted), default=0)
        short: dict[bytes, Set[bytes]] = {}
        for index, line in enumerate(data.split(b"\n")):
            if len(line) >= shortest:
                # The text may be millions of short lines, most of which were seen before.
                if (words := short.get(line)) is None:
                    words = wanted.intersection(line.split())
                    if len(line) <= _SHORT:
                        short[line] = words
                for word in words:
                    self._places[word].append(index)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((len(line) + 1 for line in self._lines), initial=0))

    def lines_with(self, text: str, most: int) -> list[int]:
        """Return the indices of the lines that contain a text, in order, ``most`` at most."""
        words = self._words[text]
        if not words:
            return list(islice(self._containing(text), most))
        lines = self._lines
        return list(islice((index for index in self._with_words(words) if text in lines[index]), most))

    def _with_words(self, words: Sequence[bytes]) -> Sequence[int]:
        if any(word not in self._places for word in words):
            return ()
        if len(words) == 1:
            return self._places[words[0]]
        return sorted(set.intersection(*sorted(map(self._set, words), key=len)))

    def _set(self, word: bytes) -> set[int]:
        """Return the lines with a word as a set: the cost of intersecting sets is that of the smallest."""
        if word not in self._sets:
            self._sets[word] = set(self._places[word])
        return self._sets[word]

    def _containing(self, text: str) -> Iterator[int]:
        """Yield the indices of the lines with a text that has no whole word."""
        at = self._text.find(text)
        while at >= 0:
            index = bisect_right(self._starts, at) - 1
            yield index
            at = self._text.find(text, self._starts[index + 1])


@cache
def key_words(text: str) -> tuple[bytes, ...]:
    """Return the longest of the words that every line with a text contains as such.

    The first word of the text counts as whole, unless it begins with an underscore; the last one counts where
    something follows it.
    """
    words = text.encode("utf-8").translate(_BETWEEN_WORDS).split()
    begin = 1 if text.startswith("_") else 0
    end = len(words) - 1 if text[-1:].isalnum() or text.endswith("_") else len(words)
    longest = sorted(set(words[begin:end]), key=len)[-_KEY_WORDS:]
    return tuple(word for word in longest if len(word) >= _KEY_LENGTH) or tuple(longest)


def rank_of(line: str) -> int | None:
    """Return the rank that a line names as its own."""
    if line.startswith("[rank") and (digits := line[5 : line.find("]", 5, 5 + _RANK_DIGITS + 1)]).isdecimal():
        return int(digits)
    if "ank" not in line and "RANK" not in line and "default" not in line:
        return None
    match = _RANK.search(line, 0, _PREFIX_LENGTH) or _LOCAL_RANK.search(line, 0, _PREFIX_LENGTH)
    return rank_in(match) if match else None


def rank_in(match: re.Match[str]) -> int | None:
    """Return the rank that one of the groups of a match holds."""
    digits = match[match.lastindex or 0]
    return int(digits) if len(digits) <= _RANK_DIGITS else None


def ranks_named(log: LogText) -> set[int]:
    """Return all ranks that wrote a line of a log."""
    return log.ranks_at(range(len(log.lines)))


def split_prefix(line: str) -> tuple[str, str]:
    """Return what schedulers, containers and loggers put in front of a line, and the line itself."""
    at = 0
    for _ in range(16):
        match = _PREFIX.match(line, at)
        if match is None or match.end() == at:
            break
        at = match.end()
    return line[:at], line[at:]


_WRITER = re.compile(r"\(([^()]{0,100}\bpid=\d{1,9})|^(\d{1,5}): ")


def _writer(prefix: str) -> str:
    """Return who wrote a line: a rank, a process of Ray or a task of Slurm; empty where nothing says so."""
    rank = rank_of(prefix)
    if rank is not None:
        return f"rank {rank}"
    match = _WRITER.search(prefix)
    return match[1] or match[2] if match else ""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that a log prints: the index of its line, its text, who wrote it, and its chain.

    Attributes:
        index: Of the line.
        text: Name and message.
        writer: A rank, a process or a task; empty where the log does not tell.
        chained: Whether it was raised while the one before it was handled.
        logged: Whether a logger printed it as a warning.
    """

    index: int
    text: str
    writer: str
    chained: bool
    logged: bool


_MOST_LINES = 1000
"""Lines with exceptions or tracebacks that are looked at: the last ones, and as many of the first ones."""


def exceptions(log: LogText) -> list[Raised]:
    """Return the exceptions that a log prints, in order."""
    candidates, headers, joints = [], [], []
    for index, line in enumerate(log.lines):
        if len(line) < _SHORTEST:
            continue
        if "rror" in line or "xception" in line or "nterrupt" in line or "Exit" in line:
            candidates.append(index)
            if "above exception" in line and any(text in line for text in _CHAINED):
                joints.append(index)
        elif _TRACEBACK in line:
            headers.append(index)
    found: dict[int, tuple[str, str, bool]] = {}
    for index in _ends(candidates):
        prefix, content = split_prefix(log.lines[index])
        match = _EXCEPTION.search(content)
        if match is not None and "Exception ignored in" not in content:
            found[index] = (match[1], _writer(prefix), "WARN" in prefix)
    for header in _ends(headers):
        if (end := _end_of_traceback(log.lines, header)) is not None:
            found.setdefault(end[0], end[1:])
    order = sorted(found)
    joined = {
        index for last, index in pairwise(order) if bisect_left(joints, index) > bisect_right(joints, last)
    }
    return [
        Raised(index, text, writer, index in joined, logged)
        for index in order
        for text, writer, logged in (found[index],)
    ]


def _ends(indices: list[int]) -> list[int]:
    return indices if len(indices) <= 2 * _MOST_LINES else [*indices[:_MOST_LINES], *indices[-_MOST_LINES:]]


_TRACEBACK_LINES = 300


def _end_of_traceback(lines: Sequence[str], header: int) -> tuple[int, str, str, bool] | None:
    """Return the line that ends a traceback: index, text, writer, whether it was logged as a warning."""
    prefix, _ = split_prefix(lines[header])
    writer = _writer(prefix)
    ignored = header and "Exception ignored in" in lines[header - 1]
    for index in range(header + 1, min(header + _TRACEBACK_LINES, len(lines))):
        before, content = split_prefix(lines[index])
        if content[:1] in ("", " ", "\t") or _writer(before) != writer:
            continue
        if _TRACEBACK in content or ignored:
            return None
        match = _RAISED.match(content)
        if match is not None:
            return index, content, writer, "WARN" in prefix
        if not content.startswith(("[", "During handling", "The above exception")):
            return None
    return None


_FRAME = re.compile(
    r'File "([^"\n]{1,400})", line (\d{1,9}), in ([^\s]{1,100})'
    r"|^[│|] {0,4}(/[^│:\n]{1,400}):(\d{1,9}) in ([\w<>.]{1,100})"
)
"""A frame as Python prints it, or as rich does."""

_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|/torch/_|\bimportlib\b")


def own_frame(log: LogText, index: int) -> str | None:
    """Return the innermost frame of a traceback outside of installed libraries, or the innermost one of all.

    Args:
        log: The log.
        index: Of the line that ends the traceback.

    Returns:
        ``FILE:LINE in FUNCTION``; None without a traceback.
    """
    writer = _writer(split_prefix(log.lines[index])[0])
    innermost = None
    for at in range(index - 1, max(index - _TRACEBACK_LINES, -1), -1):
        prefix, content = split_prefix(log.lines[at])
        if _writer(prefix) != writer:
            continue
        if _TRACEBACK in content or "above exception" in content:
            break
        if match := _FRAME.search(content):
            file, line, name = (each for each in match.groups() if each is not None)
            if not _INSTALLED.search(file):
                return f"{file}:{line} in {name}"
            innermost = innermost or f"{file}:{line} in {name}"
    return innermost


_LEAD, _TRAIL = 3, 12
"""Lines before a traceback and after its last one that say more of the same exception."""


def belongs_to(log: LogText, index: int, others: Sequence[int]) -> bool:
    """Say whether one of other lines is a part of the traceback that a line ends, or right beside it.

    Args:
        log: The log.
        index: Of the line that ends a traceback.
        others: Indices of the other lines, in order.
    """
    begin = index
    while begin > max(index - _TRACEBACK_LINES, 0) and _TRACEBACK not in log.lines[begin]:
        begin -= 1
    if _TRACEBACK not in log.lines[begin]:
        begin = index
    end = index + 1
    while end < min(index + _TRAIL, len(log.lines)) and _TRACEBACK not in log.lines[end]:
        end += 1
    first = bisect_left(others, begin - _LEAD)
    return first < len(others) and others[first] < end


def recovered(log: LogText, index: int, *, survived: bool = False) -> bool:
    """Say whether the program went on after a line.

    It did where the next lines say so and progress follows.

    Args:
        log: The log.
        index: Of the line that reports something.
        survived: Whether several lines of progress prove it, too.
    """
    if index >= log.last_progress[0] or (survived and index < log.last_progress[1]):
        return index < log.last_progress[0]
    writers = (_writer(split_prefix(log.lines[index])[0]), "")
    return any(
        _RECOVERED.search(line) and _writer(split_prefix(line)[0]) in writers
        for line in log.lines[index : index + 6]
    )


_LAST_LINES = 80


def ended_well(log: LogText, since: int = 0) -> bool:
    """Say whether the last lines report that the program did all that it was asked for.

    Args:
        log: The log.
        since: The index of a line after which it has to be reported.
    """
    return log.last_end >= since


_VERSIONS = re.compile(
    r"(?:\b(?P<name>torch|pytorch|PyTorch|[Aa]ccelerate|transformers|trl|peft|deepspeed|datasets|safetensors|axolotl"
    r"|bitsandbytes|flash[-_]attn|vllm|ray|verl|torchtitan|torchtune|diffusers|lightning|triton|torchao|liger[-_]kernel"
    r"|NCCL|nvidia-nccl-cu\d\d|CUDA|Driver|Python)`?"
    r"(?: [Vv]ersion(?: \([^()]{0,20}\))?:? ?|==| {1,40}v?|: v?|/)=?)"
    r"(?P<version>\d{1,3}\.\d{1,4}(?:\.\d{1,4})?(?:[.+-]?[a-z]{1,4}[\w.]{0,20})?)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d\.\d")
_PROGRAMS = (
    "torchrun", "accelerate", "axolotl", "llamafactory", "torchtitan", "torchtune", "trl", "verl", "OpenRLHF",
    "deepspeed", "SimpleTuner", "diffusers", "lightning", "ms-swift", "srun",
)  # fmt: skip
_SHOWN_RANKS = 16
_FACT_LINES, _FACT_LENGTH = 3000, 600
"""Lines at each end of a log, and characters of each, that are asked what they say of the run."""


def facts(logs: Sequence[LogText]) -> LogFacts:
    """Return what logs say of themselves: programs, versions, ranks and the last line of each."""
    versions: dict[str, str] = {}
    last: dict[int, RankLine] = {}
    programs: set[str] = set()
    ranks: set[int] = set()
    for log in logs:
        looked = list(range(len(log.lines)))
        if len(looked) > 2 * _FACT_LINES:
            looked = [*looked[:_FACT_LINES], *looked[-_FACT_LINES:]]
        for index in looked:
            line = log.lines[index][:_FACT_LENGTH]
            for match in _VERSIONS.finditer(line) if _NUMBER.search(line) else ():
                versions.setdefault(match["name"].lower().replace("_", "-"), match["version"])
            programs |= {name for name in _PROGRAMS if name in line}
        for index in reversed(looked):
            rank = log.rank_at(index)
            if rank is not None:
                ranks.add(rank)
                if rank not in last and split_prefix(log.lines[index])[1].strip():
                    text = log.lines[index].strip()[:LINE_LENGTH]
                    last[rank] = RankLine(rank, log.name, log.number(index), text)
    if "pytorch" in versions:
        versions.setdefault("torch", versions.pop("pytorch"))
    return LogFacts(
        tuple(sorted(programs)),
        dict(sorted(versions.items())),
        tuple(sorted(ranks)),
        tuple(line for _, line in sorted(last.items())[:_SHOWN_RANKS]),
    )
