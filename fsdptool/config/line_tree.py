"""Environment files and command lines as the same node tree, so that every place and edit works alike."""

from __future__ import annotations

import re

from fsdptool.config.tree import Document, Entry, Node, ParseError

_ASSIGNMENT = re.compile(
    r"^[ \t]*(?:export[ \t]+|set[ \t]+|ENV[ \t]+|-e[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=", re.MULTILINE
)
_VARIABLES = re.compile(
    r"^[ \t]*(?:export[ \t]+|set[ \t]+|ENV[ \t]+)?(?:FSDP|ACCELERATE|PARALLELISM_CONFIG)_[A-Z_]+=",
    re.MULTILINE,
)
_FLAG = re.compile(r"--?([A-Za-z][A-Za-z0-9_.\-]*)")
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


def parse_env(text: str) -> Document:
    """Parse ``NAME=value`` lines (``export``, ``set`` and ``ENV`` may stand in front)."""
    root = Node("map", 0, len(text), flow=False)
    for match in _ASSIGNMENT.finditer(text):
        key = Node("scalar", match.start(1), match.end(1), match.group(1), raw=match.group(1))
        node = _word(text, match.end())
        root.entries.append(Entry(match.group(1), key, node))
        if len(root.entries) > _LIMIT:
            raise ParseError("FSD105", f"more than {_LIMIT:,} assignments", match.start())
    return Document(root if root.entries else None, "env")


def parse_flags(text: str) -> Document:
    """Parse a command line: ``--key value``, ``--key=value``, bare ``--key``; a continuation is a blank."""
    root = Node("map", 0, len(text), flow=False)
    index = 0
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
            index = max(_word(text, index).end, index + 1)
        if len(root.entries) > _LIMIT:
            raise ParseError("FSD105", f"more than {_LIMIT:,} flags", index)
    return Document(root if root.entries else None, "flags")


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
        if bare or after is None:
            node = Node("scalar", index, index, True, raw="")
        else:
            node = _word(text, start)
    root.entries.append(Entry(name, key, node))
    return node.end if node.end > node.start else index


def _word(text: str, index: int) -> Node:
    """Read one shell word: quotes group, a backslash escapes; the value is text."""
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
    return Node("scalar", start, index, text[start:index], raw=text[start:index])
