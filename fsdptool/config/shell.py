"""Environment files and command lines as the same node tree, so that every place and edit works alike."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

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
_TRUTH = re.compile(r"(?:true|false|yes|no|on|off|[01])(?=\s|$)", re.IGNORECASE)
_OVER = re.compile(rf"[;&]+(?=$|{_NAMED})")
_VARIABLE = re.compile(r"\$[A-Za-z0-9_{(]")
_WRITES = re.compile(r"""(?:\d|&)?>>?(?:&[\d-]|[ \t]*(?:>?\([^()\n]*\)|"[^"\n]*"|'[^'\n]*'|[^\s;|&"'])+)?""")
"""Where a command writes to: a file, or another command (``> >(tee log)``). ``<`` is not read: people write
``<your model>`` for what is to be filled in."""
_ARRAY = re.compile(r"\w\+?=$")
_ESCAPED = re.compile(r"\\([\"\\`])")
"""What a backslash escapes within double quotes."""
_JOINED = re.compile(r"(?<!\\)\\\r?\n")
"""A backslash at the end of a line within double quotes, which the shell drops with the line's end."""
_BRACKET, _DEEPEST = 20_000, 30
"""Characters between brackets, and brackets within brackets, at most: others are text."""
_HOLDS = r"(?:\w*_)?(?:ARGS?|OPTS?|OPTIONS?|FLAGS?|EXTRAS?|PARAMS?)(?:_\w*)?"
_LIST = re.compile(rf"\$(?:{_HOLDS}|\{{{_HOLDS}\}}|\{{\w+\[[@*]\].*\}})", re.IGNORECASE | re.DOTALL)
"""A variable that holds several arguments, by its form or its name."""
_RESUMES = re.compile(r"\$\{?\w*RESUM\w*(?:\[[@*]\].*)?\}?", re.IGNORECASE | re.DOTALL)
_LIMIT = 5000
MOST = 50
_NEST = 4
"""How deep quotes are looked into: ``srun bash -c "torchrun ..."``."""

_SWITCHES = frozenset([
    "cpu", "debug", "downcast_bf16", "dynamo_use_dynamic", "dynamo_use_fullgraph",
    "dynamo_use_regional_compilation", "enable_cpu_affinity", "fp8_use_autocast_during_eval", "m", "module",
    "multi_gpu", "no_python", "no_tpu_cluster", "q", "quiet", "same_network", "tpu", "tpu_cluster",
    "tpu_use_sudo", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config",
])  # fmt: skip
"""Flags of ``accelerate launch`` (1.15) that take no value: what follows one may be the script."""
_LAUNCHER_SWITCHES = _SWITCHES | frozenset([
    "standalone", "run_path", "virtual_local_rank", "use_env",  # torchrun
    "force_multi", "no_local_rank", "no_ssh", "no_ssh_check", "save_pid", "elastic_training",
    "bind_cores_to_rank",  # deepspeed
])  # fmt: skip

_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.elastic.run": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_COMMANDS = {
    "accelerate": ("launch",),
    "axolotl": ("train",),
    "llamafactory-cli": ("train", "sft", "dpo", "rm"),
    "lmf": ("train", "sft", "dpo", "rm"),
    "trl": ("sft", "dpo", "grpo", "kto", "reward", "rloo", "orpo", "cpo", "gkd", "nash_md", "online_dpo"),
    "tune": ("run",),
    "swift": ("sft", "pt", "rlhf"),
    "megatron": ("sft", "pt", "rlhf"),
    "simpletuner": ("train",),
    "oumi": ("train", "distributed"),
    "automodel": ("finetune", "pretrain", "benchmark"),
    "xtuner": ("train",),
    "colossalai": ("run",),
    "litgpt": ("pretrain", "finetune", "finetune_full", "finetune_lora"),
}
"""Programs with commands of their own, and those that train."""
_CONFIGURES = re.compile(r"\.ya?ml$")
_ALONE = frozenset({"torchrun", "accelerate-launch", "deepspeed", "composer", "launch_torchtitan"})
_PYTHON = re.compile(r"(?:python|pypy)(?:\d+(?:\.\d+)*)?(?:\.exe)?")
_PYTHON_VARIABLE = re.compile(r"\$\{?\w*PY(?:THON)?(?:_?(?:BIN|EXE|PATH|CMD))?\}?", re.IGNORECASE)
"""A variable that holds the interpreter: ``$PYTHON_BIN``."""
_HELD = re.compile(r'"?\$(?:\w+|\{\w+(?:\[[@*]\])?\})"?')
"""A variable or an array; before ``-m MODULE`` it holds an interpreter: ``"${LAUNCH[@]}"``."""
_NOT_RUN = frozenset([
    "pip", "pip3", "conda", "apt", "apt-get", "echo", "printf", "cat", "cd", "git", "which", "type", "ls",
    "command", "mkdir", "rm", "cp", "mv", "source", ".", "module", "ln", "touch", "alias", "pkill", "kill",
    "killall", "brew", "if", "[", "[[", "test", "grep", "sed", "awk", "help", "man",
])  # fmt: skip
"""What mentions the name of a program without starting it."""
_HINT = re.compile(
    r"\b(?:accelerate|torchrun|deepspeed|python\d*|axolotl|llamafactory-cli|lmf|trl|tune|swift|megatron"
    r"|simpletuner|oumi|automodel|xtuner|colossalai|litgpt|composer|uv|run_train\.sh)\b|\s-m\s"
)
_NO_COMMAND = re.compile(
    r"""[{\[<]|---|-\s|["']?[\w.\-/ ]+["']?[ \t]*:(?:\s|$)|[\w.\-"' ]+[ \t]=|"(?!\$)|'"""
)
"""How YAML, JSON and TOML begin, and no shell script does."""


@dataclass(slots=True)
class Command:
    """One command that starts a training.

    Attributes:
        program: Its name, without folder: ``accelerate``, ``torchrun``, ``python``, ``trl``, ...; empty for
            flags alone.
        verb: The program's own command (``sft`` of ``trl sft``), or empty.
        flags: Flags of the program itself.
        script: The script or module that it starts, or None.
        arguments: Flags behind the script.
        words: Words behind the script (or the verb) that are not flags.
        start, end: Characters of the text that it takes.
        cut: Where reading stopped at too many flags, or None.
    """

    program: str
    verb: str
    start: int
    end: int
    flags: list[Entry] = field(default_factory=list)
    script: Node | None = None
    arguments: list[Entry] = field(default_factory=list)
    words: list[Node] = field(default_factory=list)
    cut: int | None = None

    def flag(self, *names: str) -> Entry | None:
        """Return the last flag of one of the names, with hyphens or underscores, wherever it stands."""
        found = [entry for entry in (*self.flags, *self.arguments) if plain(entry) in names]
        return found[-1] if found else None


def plain(entry: Entry) -> str:
    """Return a flag's name as Python's argparse stores it."""
    return str(entry.key).lstrip("-").replace("-", "_")


def sniff(text: str) -> str | None:
    """Return ``env`` or ``flags`` when the text is an environment file or a command line, else None."""
    head = "\n".join(
        line for line in text.splitlines()[:200] if line.strip() and not line.lstrip().startswith("#")
    )
    first = head.lstrip()[:400]
    if first.startswith("--") and not first.startswith(("---", "--\n")):
        return "flags"
    commands = () if _NO_COMMAND.match(first) and not text.startswith("#!") else find_commands(text)
    assigned = _VARIABLES.search(head) and not re.search(r"^[A-Za-z_]+:\s", head, re.MULTILINE)
    if assigned and not any(map(configures, commands)):
        return "flags" if " --" in head and "launch" in head and not commands else "env"
    return "flags" if commands else None


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
    """Parse command lines: ``--key value``, ``--key=value``, bare ``--key``; a continuation is a blank.

    The tree holds the flags of the first command that configures FSDP. Of ``accelerate launch ... script.py
    ...`` these are the launcher's own: what stands behind the script is the script's, and may bear the same
    names. Flags alone are a command, too.
    """
    commands = find_commands(text) or (parse_command(text),)
    cut = next((item.cut for item in commands if item.cut is not None), None)
    if cut is not None:
        raise ParseError("FSD105", f"more than {_LIMIT:,} flags", cut)
    command = next(filter(configures, commands), commands[0])
    entries = command.flags if command.program in ("accelerate", "") else command.arguments
    root = Node("map", 0, len(text), entries=entries)
    return Document(root if entries or command.program else None, "flags")


def is_variable(node: Node) -> bool:
    """Say whether a value depends on a variable of the shell; within single quotes the shell reads none."""
    return isinstance(node.value, str) and node.style != "'" and _VARIABLE.search(node.value) is not None


def parse_command(text: str) -> Command:
    """Return a text that starts no known program as flags alone."""
    return _parsed(text, Command("", "", 0, len(text)), 0)


def configures(command: Command) -> bool:
    """Whether a command may say how FSDP runs: by flags, by a file that it names, by its own program."""
    if command.program not in ("accelerate", "torchrun", "deepspeed", "python", ""):
        return True
    names = {plain(entry) for entry in (*command.flags, *command.arguments)}
    return bool(
        names & {"config_file", "use_fsdp", "model_family"}
        or any(name.startswith("fsdp") for name in names)
        or (command.words and not command.arguments)
    )


@lru_cache(maxsize=4)
def find_commands(text: str) -> tuple[Command, ...]:
    """Return the commands of a shell script (or of one line) that start a training, in their order.

    There are ``MOST`` of them at most: nobody writes a longer script.
    """
    if not _HINT.search(text):
        return ()
    first = text.lstrip()[:1]
    spans = [(0, len(text))] if first == "-" else _spans(text, 0, len(text))
    return tuple(islice(_found(text, spans, _NEST), MOST))


def _found(text: str, spans: list[tuple[int, int]], depth: int) -> Iterator[Command]:
    lines = sorted(line.strip() for span in spans for line in _lines(text, *span))
    for start, end in spans:
        if not _HINT.search(text, start, end):
            continue
        words = list(words_of(text, start, end))
        command = _command(text, words, end)
        if command is not None:
            yield command
            continue
        for word in words:
            inside = _inside(text, word)
            if depth and inside is not None and _HINT.search(text, *inside):
                if text[inside[0] - 2 : inside[0] - 1] == "=" and _begins(
                    lines, text[slice(*inside)].strip()
                ):
                    continue  # a variable, and the line that starts what it holds says the rest
                yield from _found(text, _spans(text, *inside), depth - 1)


def _lines(text: str, start: int, end: int) -> Iterator[str]:
    """Yield a line, and what it starts behind assignments or another program: ``srun --nodes 2 torchrun``.

    A line that only mentions a program starts nothing: ``echo torchrun``.
    """
    yield text[start:end]
    program = _HINT.search(text, start, end)
    if program is not None:
        begin = program.start()
        while begin > start and not text[begin - 1].isspace():
            begin -= 1
        before = list(words_of(text, start, begin))
        if before and not any(_only_mentions(before, at) for at in range(len(before))):
            yield text[begin:end]


def _begins(lines: list[str], words: str) -> bool:
    """Say whether one of some sorted lines begins with words."""
    after = bisect_left(lines, words)
    line = lines[after] if after < len(lines) else ""
    return line.startswith(words) and not line[len(words) : len(words) + 1].strip()


def _inside(text: str, word: Node) -> tuple[int, int] | None:
    """Return the span between the quotes of a word with blanks in it: perhaps a command of its own."""
    quote = next((at for at in range(word.start, word.end) if text[at] in "'\""), None)
    if quote is None or text[word.end - 1] != text[quote] or word.end - quote < 3:
        return None
    return (quote + 1, word.end - 1) if any(char.isspace() for char in text[quote : word.end]) else None


def _spans(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return where each command begins and ends: at a line's end, ``;``, ``&``, ``|`` and parentheses.

    A line that begins with a flag belongs to the command before it, as people paste them.
    """
    spans: list[tuple[int, int]] = []
    index = begin = start
    while index < end:
        character = text[index]
        if character == "\\":
            noted = _CONTINUES.match(text, index, end)
            index = noted.end() if noted is not None else index + 2
        elif character in "'\"":
            index = _quoted(text, index, end)
        elif character == "#" and (index == start or text[index - 1].isspace()):
            line = text.find("\n", index, end)
            index = end if line < 0 else line
        elif character == "\n":
            blank = _BLANK.match(text, index, end)
            after = blank.end() if blank is not None else index + 1
            if _FLAG_LINE.match(text, after, end) is None:
                spans.append((begin, index))
                begin = after
            index = after
        elif character == "(" and _is_word(text, index) and (closed := enclosed(text, index, end)):
            index = closed
        elif character in ";|()" or (character == "&" and _separates(text, index)):
            spans.append((begin, index))
            index = begin = index + 1
        else:
            index += 1
    spans.append((begin, end))
    return [span for span in spans if text[span[0] : span[1]].strip()]


def spans_of(text: str) -> list[tuple[int, int]]:
    """Return where each command of a script begins and ends."""
    return _spans(text, 0, len(text))


def _is_word(text: str, index: int) -> bool:
    """Whether an opening bracket is part of a word: ``$(``, ``${``, ``$[``, ``NAME=(``, ``>(``."""
    before = text[max(0, index - 3) : index]
    array = text[index] == "(" and (before.endswith(">") or _ARRAY.search(before) is not None)
    return before.endswith("$") or array


def enclosed(text: str, index: int, end: int) -> int | None:
    """Return where the bracket at ``index`` is closed, or None where it is not; quotes hide brackets."""
    opening = text[index]
    closing = {"(": ")", "{": "}", "[": "]"}[opening]
    depth, end = 0, min(end, index + _BRACKET)
    while index < end:
        character = text[index]
        if character == "\\":
            index += 2
            continue
        if character in "'\"":
            index = _quoted(text, index, end)
            continue
        if character == "#" and opening == "(" and text[index - 1].isspace():
            line = text.find("\n", index, end)
            index = end if line < 0 else line
            continue
        depth += (character == opening) - (character == closing)
        index += 1
        if depth == 0:
            return index
        if depth > _DEEPEST:
            break
    return None


def _separates(text: str, index: int) -> bool:
    """Whether ``&`` ends a command; it does not in ``2>&1`` and ``&>``."""
    return text[index - 1 : index] != ">" and text[index + 1 : index + 2] != ">"


_CONTINUES = re.compile(r"\\(?:[ \t]+#[^\n]*|[ \t]*\r?)\n")
"""A backslash at a line's end. A note may stand behind it: bash would end the command, but people mean it."""
_BLANK = re.compile(r"\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*")
_FLAG_LINE = re.compile(r"[ \t]*--?[A-Za-z]")


def _quoted(text: str, index: int, end: int) -> int:
    """Return where a quoted part ends; a quote that is never closed is an apostrophe."""
    quote = text[index]
    at = index + 1
    while at < end:
        if text[at] == "\\" and quote == '"':
            at += 2
        elif text[at] == quote:
            return at + 1
        else:
            at += 1
    return index + 1


def words_of(text: str, start: int, end: int) -> Iterator[Node]:
    """Yield the words of a command, with what quotes and backslashes make of them; not where it writes to."""
    index = start
    while index < end:
        if text[index].isspace():
            index += 1
        elif text[index] == "\\" and (noted := _CONTINUES.match(text, index, end)):
            index = noted.end()
        elif text[index] == "\\" and text[index + 1 : index + 2] in ("\r", ""):
            index += 2
        elif text[index] == "#" and (index == start or text[index - 1].isspace()):
            line = text.find("\n", index, end)
            index = end if line < 0 else line
        elif written := _WRITES.match(text, index, end):
            index = written.end()
        else:
            node = _shell_word(text, index, end)
            yield node
            index = node.end


def _shell_word(text: str, start: int, end: int) -> Node:
    value: list[str] = []
    index = start
    while index < end and not text[index].isspace():
        character = text[index]
        if character in "'\"":
            stop = _quoted(text, index, end)
            closed = stop > index + 1
            inner = text[index + 1 : stop - 1] if closed else character
            joined = _JOINED.sub("", inner)
            value.append(_ESCAPED.sub(r"\1", joined) if closed and character == '"' else inner)
            index = stop
        elif character in "({[" and _is_word(text, index) and (stop := enclosed(text, index, end) or 0):
            value.append(text[index:stop])
            index = stop
        elif character == "\\" and index + 1 < end:
            if text[index + 1] in "\r\n":
                break
            value.append(text[index + 1])
            index += 2
        else:
            value.append(character)
            index += 1
    style = text[start] if text[start] in "'\"" else ""
    return Node("scalar", start, index, "".join(value), style=style, raw=text[start:index])


def _base(word: Node) -> str:
    """Return the name of what is started: without its folder, and without the ``!`` of notebooks."""
    name = str(word.value).replace("\\", "/").rsplit("/", 1)[-1].removeprefix("!")
    return "python" if _PYTHON_VARIABLE.fullmatch(name) else name


def _only_mentions(words: list[Node], at: int) -> bool:
    """Say whether a word is a program that mentions the name of another without starting it."""
    if _base(words[at]) not in _NOT_RUN or (at > 0 and words[at - 1].raw.startswith("-")):
        return False  # ``srun --job-name test torchrun ...``
    return at + 1 == len(words) or words[at + 1].value != "run"


def _command(text: str, words: list[Node], end: int) -> Command | None:
    """Return the command that a program among the words begins, whatever starts that program."""
    for at, word in enumerate(words):
        name = _base(word)
        after = words[at + 1] if at + 1 < len(words) else None
        if _only_mentions(words, at):
            return None
        if name == "automodel" and after is not None and _CONFIGURES.search(str(after.value)):
            return _parsed(text, Command(name, "", word.start, end), word.end)
        if name == "uv" and after is not None and after.value == "run":
            script = next((item for item in words[at + 2 :] if str(item.value).endswith(".py")), None)
            begun = zip(words[at + 1 :], words[at + 2 : words.index(script)], strict=False) if script else ()
            others = (
                _HINT.fullmatch(_base(item)) and not before.raw.startswith("-") for before, item in begun
            )
            if script is not None and not any(others):
                return _parsed(text, Command("python", "", word.start, end, script=script), script.end)
        if name in _ALONE and (after is not None or name == "torchrun"):
            program = "accelerate" if name == "accelerate-launch" else name
            return _parsed(text, Command(program, "", word.start, end), word.end)
        if after is not None and after.value in _COMMANDS.get(name, ()):
            verb = "" if name == "accelerate" else str(after.value)
            return _parsed(text, Command(name, verb, word.start, end), after.end)
        if _PYTHON.fullmatch(name) or (
            after is not None and after.value == "-m" and _HELD.fullmatch(word.raw)
        ):
            return _python(text, words[at:], end)
        if name == "run_train.sh":
            return _torchtitan(text, words[:at], word, end)
    return None


def _torchtitan(text: str, before: list[Node], script: Node, end: int) -> Command:
    """Return what torchtitan's own script starts: the job that CONFIG_FILE names."""
    command = _parsed(text, Command("torchtitan", "", script.start, end), script.end)
    for word in before:
        name, equals, value = str(word.value).partition("=")
        if name == "CONFIG_FILE" and equals:
            key = Node("scalar", word.start, word.start + len(name), name, raw=name)
            node = Node("scalar", word.start + len(name) + 1, word.end, value, raw=value)
            command.arguments.append(Entry("job.config_file", key, node))
    return command


def _python(text: str, words: list[Node], end: int) -> Command | None:
    """Return what ``python`` starts: a launcher held in a module, a script, or a module."""
    start = words[0].start
    for at, word in enumerate(words[1:], 1):
        value = str(word.value)
        if value == "-m" and at + 1 < len(words):
            module = words[at + 1]
            program = _MODULES.get(str(module.value))
            if program is not None:
                begin = module.end
                if str(module.value).endswith("accelerate_cli"):
                    begin = words[at + 2].end if at + 2 < len(words) else module.end
                return _parsed(text, Command(program, "", start, end), begin)
            return _parsed(text, Command("python", "", start, end, script=module), module.end)
        if value.startswith("-c"):
            return None
        if value.startswith("-"):
            continue
        if value.endswith(".py") or "$" in value or at + 1 < len(words):
            if _base(word) in ("launch.py", "run.py") and "torch/distributed" in value:
                return _parsed(text, Command("torchrun", "", start, end), word.end)
            return _parsed(text, Command("python", "", start, end, script=word), word.end)
        return None
    return None


_SCRIPTS = ("accelerate", "torchrun", "deepspeed", "composer", "colossalai")
"""Programs that start a script, whose flags stand behind it."""
_TRAINING = frozenset({"fsdp", "fsdp_config", "output_dir", "model_name_or_path"})


def _parsed(text: str, command: Command, index: int) -> Command:
    """Read the flags and words from ``index`` to the end of a command into it."""
    launches = command.program in _SCRIPTS
    open_ = not (launches or command.program == "")
    count, variable, end = 0, None, command.end
    while index < end:
        character = text[index]
        if character.isspace() or character == "\\":
            index += 1
        elif character == "#" and (index == 0 or text[index - 1].isspace()):
            line = text.find("\n", index, end)
            index = end if line < 0 else line
        elif written := _WRITES.match(text, index, end):
            index = written.end()
        elif character == "-" and (match := _FLAG.match(text, index, end)):
            own = launches and command.script is None
            if own and variable is not None and match.group(1).replace("-", "_") in _TRAINING:
                command.script, own = variable, False  # a variable held the script
            entry, index = _flag(text, match, end, launcher=own or command.program == "")
            (command.arguments if open_ or (not own and command.program) else command.flags).append(entry)
        else:
            word = _shell_word(text, index, end)
            index = max(word.end, index + 1)
            if launches and command.script is None:
                if "$" not in word.raw or command.program != "accelerate":
                    command.script = word
                else:  # a variable may hold more flags
                    variable = word
            elif (
                launches and "$" in str(command.script and command.script.raw) and word.value.endswith(".py")
            ):
                command.script = word  # the variable held flags of the launcher
            else:
                command.words.append(word)
        count += 1
        if count > _LIMIT:
            command.cut = index
            break
    return command


def _flag(text: str, match: re.Match[str], limit: int, *, launcher: bool) -> tuple[Entry, int]:
    name = match.group(1)
    key = Node("scalar", match.start(), match.end(), name, raw=name)
    index = match.end()
    if text.startswith("=", index):
        node = _value(text, index + 1, limit)
    else:
        after = re.compile(r"(?:[ \t]|\\\r?\n)+").match(text, index, limit)
        start = after.end() if after else index
        bare = start >= limit or text[start] in "\r\n#" or _FLAG.match(text, start) is not None
        bare = bare or _WRITES.match(text, start) is not None
        switch = launcher and name.replace("-", "_").lower() in _LAUNCHER_SWITCHES
        if bare or after is None or (switch and _TRUTH.match(text, start) is None):
            node = Node("scalar", index, index, True, raw="")
        else:
            node = _value(text, start, limit)
    return Entry(name, key, node), node.end if node.end > node.start else index


def _value(text: str, index: int, limit: int) -> Node:
    """Read a flag's value; the quotes of a JSON object may stand inside others."""
    if text[index : index + 1] in ("'", '"'):
        node = _shell_word(text, index, limit)
        if node.raw.count(text[index]) == 2 and node.raw.endswith(text[index]):
            return Node("scalar", node.start, node.end, node.value, style=node.style, raw=str(node.value))
        return node
    if text[index : index + 1] == "[":
        node = _word(text, index)
        return node if node.end <= limit else _shell_word(text, index, limit)
    return _shell_word(text, index, limit)


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


def without_lists(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command without the variables that hold further arguments, and these."""
    kept: list[str] = []
    left: list[str] = []
    for word in words:
        is_value = bool(kept) and re.fullmatch(r"--?[A-Za-z][\w.-]*", kept[-1]) is not None
        if _RESUMES.fullmatch(word) is not None and not is_value:
            continue  # where a run is resumed from changes nothing
        is_list = _LIST.fullmatch(word) is not None and ("[" in word or not is_value)
        (left if is_list else kept).append(word)
    return kept, left


def requoted(value: str, double: bool, splits: bool) -> str:
    """Return text that a shell reads as the value: within double quotes, as words, or as one word."""
    if double:
        return re.sub(r'(["\\`])', r"\\\1", value)
    blank = " " if splits else r"\\ "
    escaped = re.sub(r"([^\w\s./:=,@%+\-\[\]{}~$^*?!])", r"\\\1", value)
    return re.sub(r"\s+", blank, escaped)
