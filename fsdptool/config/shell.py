"""Environment files and command lines as the same node tree, so that every place and edit works alike."""

from __future__ import annotations

import re

from fsdptool.files.tree import Document, Entry, Node, ParseError

_NAMED = r"(?:export[ \t]+|set[ \t]+|ENV[ \t]+|env[ \t]+|-e[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)="
_ASSIGNMENT = re.compile(rf"^[ \t]*{_NAMED}", re.MULTILINE)
_FURTHER = re.compile(rf"[ \t;&]+{_NAMED}")
"""Another assignment on the same line: ``export A=1 B=2``, ``A=1; B=2``."""
_VARIABLES = re.compile(
    r"^[ \t]*(?:export[ \t]+|set[ \t]+|ENV[ \t]+)?(?:FSDP|ACCELERATE|PARALLELISM_CONFIG)_[A-Z_]+=",
    re.MULTILINE,
)
_FLAG = re.compile(r"--?([A-Za-z][A-Za-z0-9_.\-]*)")
_LAUNCHER = re.compile(r"\baccelerate(?:\s+|\.commands\.)launch(?=\s|\\)")
_SWITCHES = frozenset([
    "cpu", "debug", "downcast_bf16", "dynamo_use_dynamic", "dynamo_use_fullgraph",
    "dynamo_use_regional_compilation", "enable_cpu_affinity", "fp8_use_autocast_during_eval", "m", "module",
    "multi_gpu", "no_python", "no_tpu_cluster", "q", "quiet", "same_network", "tpu", "tpu_cluster",
    "tpu_use_sudo", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config",
])  # fmt: skip
"""Flags of ``accelerate launch`` (1.15) that take no value: what follows one may be the script."""
_TRUTH = re.compile(r"(?:true|false|yes|no|on|off|[01])(?=\s|$)", re.IGNORECASE)
_OVER = re.compile(rf"[;&]+(?=$|{_NAMED})")
_VARIABLE = re.compile(r"\$[A-Za-z0-9_{(]")
_LIMIT = 5000


def sniff(text: str) -> str | None:
    """Return ``env`` or ``flags`` when the text is an environment file or a command line, else None."""
    head = "\n".join(
        line for line in text.splitlines()[:200] if line.strip() and not line.lstrip().startswith("#")
    )
    first = head.lstrip()[:400]
    if first.startswith("--") and not first.startswith(("---", "--\n")):
        return "flags"
    if (
        re.match(r"(?:accelerate\s+launch|torchrun|python3?|simpletuner\s+train|srun)\s", first)
        and "--" in text
    ):
        return "flags"
    if _VARIABLES.search(head) and not re.search(r"^[A-Za-z_]+:\s", head, re.MULTILINE):
        return "flags" if " --" in head and "launch" in head else "env"
    return None


def parse_environment(text: str) -> Document:
    """Parse ``NAME=value`` lines (``export``, ``set`` and ``ENV`` may stand in front)."""
    root = Node("map", 0, len(text), flow=False)
    for first in _ASSIGNMENT.finditer(text):
        match: re.Match[str] | None = first
        while match is not None:
            key = Node("scalar", match.start(1), match.end(1), match.group(1), raw=match.group(1))
            node = _word(text, match.end(), command=True)
            root.entries.append(Entry(match.group(1), key, node))
            if len(root.entries) > _LIMIT:
                raise ParseError("FSD105", f"more than {_LIMIT:,} assignments", match.start())
            match = _FURTHER.match(text, node.end)
    return Document(root if root.entries else None, "env")


def parse_flags(text: str) -> Document:
    """Parse a command line: ``--key value``, ``--key=value``, bare ``--key``; a continuation is a blank.

    Of ``accelerate launch ... script.py ...`` only the launcher's own part is read: what stands behind
    the script is the script's, and may bear the same names.
    """
    root = Node("map", 0, len(text), flow=False)
    launcher = _LAUNCHER.search(text)
    index = launcher.end() if launcher else 0
    while index < len(text):
        character = text[index]
        if character.isspace() or character == "\\":
            index += 1
        elif character == "#" and (index == 0 or text[index - 1].isspace()):
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
        elif character == "-" and (match := _FLAG.match(text, index)):
            index = _flag(text, match, root)
        else:
            word = _word(text, index)
            if launcher and "$" not in word.raw:  # a variable may hold more flags
                break
            index = max(word.end, index + 1)
        if len(root.entries) > _LIMIT:
            raise ParseError("FSD105", f"more than {_LIMIT:,} flags", index)
    return Document(root if root.entries else None, "flags")


def is_variable(node: Node) -> bool:
    """Whether a value depends on a variable of the shell, which single quotes would keep from being read."""
    return isinstance(node.value, str) and node.style != "'" and _VARIABLE.search(node.value) is not None


def _flag(text: str, match: re.Match[str], root: Node) -> int:
    name = match.group(1)
    key = Node("scalar", match.start(), match.end(), name, raw=name)
    index = match.end()
    if text.startswith("=", index):
        node = _word(text, index + 1)
    else:
        after = re.compile(r"(?:[ \t]|\\\r?\n)+").match(text, index)
        start = after.end() if after else index
        bare = start >= len(text) or text[start] in "\r\n#" or _FLAG.match(text, start) is not None
        switch = name.replace("-", "_").lower() in _SWITCHES and _TRUTH.match(text, start) is None
        if bare or switch or after is None:
            node = Node("scalar", index, index, True, raw="")
        else:
            node = _word(text, start)
    root.entries.append(Entry(name, key, node))
    return node.end if node.end > node.start else index


def _word(text: str, index: int, *, command: bool = False) -> Node:
    """Read one shell word: quotes group; the value is text. In a ``command`` ``;`` and ``&`` end one."""
    start = index
    if text[index : index + 1] in ("'", '"'):
        quote = text[index]
        end = text.find(quote, index + 1)
        if end >= 0 and "\n" not in text[index:end]:
            return Node(
                "scalar", start, end + 1, text[index + 1 : end], style=quote, raw=text[index + 1 : end]
            )
    if text[index : index + 1] == "[":
        # Python and YAML lists are typed unquoted often enough; they end at their bracket.
        end = text.find("]", index)
        if end >= 0 and "\n" not in text[index:end]:
            return Node("scalar", start, end + 1, text[start : end + 1], raw=text[start : end + 1])
    while index < len(text) and not text[index].isspace():
        index += 1
    word = text[start:index]
    if command and (over := _OVER.search(word)):
        word = word[: over.start()]
    return Node("scalar", start, start + len(word), word, raw=word)
