"""The run that a training file or a command line describes, whichever program it is for.

Nothing is imported or executed: files are parsed, variables and interpolations stay unresolved and are named.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdptool.config.command_lines import NamedFiles, default_files
from fsdptool.config.dialects import CERTAIN, run_formats, sniff_dialect
from fsdptool.config.dialects.launches import on_ranks, set_by_accelerate, with_ranks
from fsdptool.config.dialects.protocol import RunFormat, parse_source
from fsdptool.config.dialects.run_reader import Launch, RunFile, may_shard, state_bits
from fsdptool.config.dialects.trainer.run import shipped
from fsdptool.config.dialects.trainer.run_keys import script_of
from fsdptool.config.shell import (
    Command,
    find_commands,
    parse_command,
    parse_environment,
    plain,
    without_lists,
    words_of,
)
from fsdptool.config.shell_variables import assigned, environments, step_of_srun, substituted
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText, UnreadableError
from fsdptool.files.tree import Node, ParseError, to_python, walk
from fsdptool.records.described_run import NOT_FACTS, DescribedRun, UnmodelledKey
from fsdptool.scripts import SCRIPTS
from fsdptool.scripts.notebooks import commands_of
from fsdptool.source.known_models import STORED_IN_FP32, family_of_name, format_of_name
from fsdptool.spelling import integer

_CONFIG_FLAGS = ("config", "job.config_file", "config_file", "c")
_HYDRA = re.compile(r"\+{0,2}~?([A-Za-z_][\w./@]*)=(.*)", re.DOTALL)
_ADDED = re.compile(r"\+{1,2}([A-Za-z_][\w.]*)=")
_EXTENDING = frozenset({"extends", "include", "includes", "_base_", "base_config", "inherit_from", "imports"})
"""Keys with which programs and people take settings from another file."""
_COMMENT = re.compile(r"^\s*#(.*)$", re.MULTILINE)
_EXPORT = re.compile(r"^export [A-Z_]+=", re.MULTILINE)
_STAND_INS = (1, 2, True, False, "float32", "bfloat16", "eager", "sdpa", "adamw_8bit", "muon", "selective")
"""What stands in turn for a value that cannot be read, to find the facts that change with it."""
_NEGATES = ("trl", "trainer", "ms-swift", "llamafactory")
"""Programs whose parser makes ``--no_KEY`` of a switch that is on (transformers ``hf_argparser.py``)."""
_TRAINS = re.compile(r"train|tun(?:e|ing)|sft|dpo|grpo|orpo|kto|rloo|ppo|gkd|reward|(?:^|_)run(?:_|$)|^main$")
"""What the name of a script that trains contains."""
_OTHER_WORK = re.compile(
    r"(?:^|_)(?:infer|inference|eval\w*|merge\w*|export|generat\w+|preprocess\w*|prepare\w*|serve\w*|deploy|chat"
    r"|convert\w*|quanti[sz]e\w*|rollout|predict\w*|benchmark\w*|upload\w*|download\w*|vllm_serve)(?:_|$)"
)
"""What the name of a script contains that uses a model, or prepares data, and does not train."""
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})
_SINGLE = frozenset([
    "nproc_per_node", "nnodes", "node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_conf",
    "master_port", "master_addr", "local_addr", "max_restarts",
])  # fmt: skip
"""Flags of ``torchrun`` that take one value: what follows it is another word."""
_OF_TRL = re.compile(r"(?:^|[^a-z])(?:sft|dpo|kto|grpo|orpo|cpo|ppo|rloo|reward|rm)(?:[^a-z]|$)")
"""Names of scripts that say which trainer of TRL they start."""
_ASSIGNED = re.compile(r"\w=[\"']?$")
_NAMED_AS = re.compile(r"\.(?:ya?ml|json|toml)$", re.IGNORECASE)


def describe_run(
    source: SourceText,
    *,
    program: str | None = None,
    files: NamedFiles | None = None,
    words: Sequence[str] = (),
    version: tuple[str, str] | None = None,
) -> DescribedRun | None:
    """Return the run that a text describes; None where no program's file is recognised.

    Args:
        source: A file, a training script, or the text of a command line.
        program: Name of the program; None recognises it by the content.
        files: Where the files that the text names are looked for.
        words: Arguments that a script is started with.
        version: A program and its version, whose defaults count for its files.

    Raises:
        ConfigError: The text cannot be parsed, or two programs claim it; one line says where and what.
    """
    if (source.path or "").endswith(SCRIPTS):
        from fsdptool.config.script_runs import describe_script

        files = files or default_files(source.path)
        run = describe_script(source, words, load=loader(files)) or _of_notebook(source, files)
        return _with_family(run) if run is not None else None
    return describe_written(source, program=program, files=files, version=version).run


def _of_notebook(source: SourceText, files: NamedFiles) -> DescribedRun | None:
    """Return the run that a command in a cell of a notebook starts; None without one, and for a script."""
    commands = commands_of(source.text) if (source.path or "").endswith(".ipynb") else ""
    if not find_commands(commands):
        return None
    try:
        found = describe_written(SourceText(commands, source.path), files=files)
    except ConfigError:
        return None
    if found.run is None or not found.further:
        return found.run
    told = f"the notebook starts {found.further + 1} trainings: the first that is read is described"
    return replace(found.run, notes=(*found.run.notes, told))


@dataclass(frozen=True, slots=True)
class DescribedText:
    """A run with the text that describes it.

    Attributes:
        run: The run, or None.
        keys: The keys that describe it, as they are written; flags replace those of the file they name.
        launch: What starts the program, where the text is a command line; None for a file.
        further: How many commands behind the one that is read train as well.
    """

    run: DescribedRun | None
    keys: Mapping[str, Any] = field(default_factory=dict)
    launch: Launch | None = None
    further: int = 0


def describe_written(
    source: SourceText,
    *,
    program: str | None = None,
    files: NamedFiles | None = None,
    version: tuple[str, str] | None = None,
) -> DescribedText:
    """Return the run that a text describes, and how the text says it.

    Arguments and errors are those of :func:`describe_run`. Without a run of a program there are no keys.
    """
    files = files or default_files(source.path)
    form = sniff_dialect(source.text)
    # Variables of FSDP before a command do not hide what the command trains.
    starts = form is not None and form.name == "env" and any(map(_may_train, find_commands(source.text)))
    if form is None or form.name == "flags" or starts:
        text = substituted(source.text, files)
        files = files.with_written(source.text, text)
        if text != source.text:
            form = form or sniff_dialect(text)
            if starts or (form is not None and form.name == "flags"):
                source = replace(source, text=text)
    flags = starts or (form is not None and form.name == "flags")
    found = (_of_command if flags else _of_file)(source, files, program)
    own = None
    if flags and program is None and (found is None or _may_be_own(*found)):
        own = _of_own_script(source.text, files)
    if found is None or own is not None:
        return DescribedText(_with_family(own) if own is not None else None)
    reader, file = found
    if version is not None and reader.name == version[0]:
        file = replace(file, version=version[1])
    run = reader.describe(file)
    launch = file.launch if flags else None
    if run is None:
        return DescribedText(None, file.data, launch)
    if run.nodes is None and run.processes == file.launch.processes:
        run = replace(run, nodes=file.launch.nodes)
    if file.unread is not None:
        # Without the file every other fact would be a default that the file may well override.
        said = (file.unread,)
        known = file.launch.processes
        unread = DescribedRun(
            run.program, run.program_version, processes=known, problems=said, unresolved=said
        )
        return DescribedText(unread, file.data, launch)
    if form is None:
        run = _with_hidden(run, file.hidden)
    run = replace(run, keys=replace(run.keys, not_modelled=tuple(_with_facts(run, reader, file))))
    if run.fsdp == "none" and may_shard(file.launch.unread):
        run = replace(run, fsdp=None, cpu_offload=None)
    trainings = {_what_trains(command) for command in find_commands(source.text)} - {None} if flags else set()
    further = max(len(trainings) - 1, 0)
    return DescribedText(_with_family(run), file.data, launch, further)


def _may_train(command: Command) -> bool:
    if not (command.flags or command.arguments or command.words):
        return False
    script = str(command.script.value) if command.script is not None else command.verb
    name = re.sub(r"\.py$", "", script).replace("/", ".").replace("-", "_").rpartition(".")[2].lower()
    return _TRAINS.search(name) is not None or _OTHER_WORK.search(name) is None


def _what_trains(command: Command) -> tuple[str, ...] | None:
    """Return what tells a training from others of a text, or None for a command that may do something else.

    A text can hold one command several times: in a variable, in what ``echo`` prints, and where it runs.
    """
    if command.script is None and command.program in _LAUNCHERS:
        return None
    name = str(command.script.value) if command.script is not None else command.verb
    word = re.sub(r"\.py$", "", name).rpartition("/")[2].replace("-", "_").lower()
    launched = command.program in _LAUNCHERS and _OTHER_WORK.search(word) is None
    if not launched and (_TRAINS.search(word) is None or not _may_train(command)):
        return None
    flags = sorted(f"{plain(entry)}={entry.node.value}" for entry in command.arguments)
    return (word, *flags, *(str(node.value) for node in command.words))


def _with_family(run: DescribedRun) -> DescribedRun:
    """Return the run with the size and the format that its model's name stands for."""
    if run.model is None:
        return run
    run = _as_stored(run)
    if run.model is None or run.family is not None:
        return run
    family, note = family_of_name(run.model)
    run = replace(run, family=family, notes=(*run.notes, note) if note else run.notes)
    if (family or "").partition(":")[0] in STORED_IN_FP32:
        run = _as_published(run)
    return run


def _as_stored(run: DescribedRun) -> DescribedRun:
    """Return a run of adapters with the format of a checkpoint that its name says is quantised.

    transformers loads such layers as they are stored, whatever else is asked for (5.24
    ``quantizers/auto.py``: the configuration of the checkpoint counts).
    """
    words = format_of_name(run.model or "")
    if words is None or run.quantisation != "none" or run.method not in ("lora", "dora"):
        return run
    method = {"bnb nf4": "qlora", "bnb int8": "lora8bit"}.get(words, run.method)
    note = f"the name says that the checkpoint is stored in {words}: adapters train beside layers in it"
    return replace(run, method=method, quantisation=words, notes=(*run.notes, note))


def _with_facts(run: DescribedRun, reader: RunFormat, file: RunFile) -> Iterator[UnmodelledKey]:
    """Yield the keys that are not modelled; those whose values cannot be read with the facts they decide.

    These facts are found by reading the file again with several values in the place of such a value.
    """
    for item in run.keys.not_modelled:
        if item.decides is None:
            yield item
            continue
        others: list[dict[str, Any]] = []
        for value in _STAND_INS:
            data = dict(file.data)
            _put(data, item.key.split("."), value)
            other = reader.describe(replace(file, data=data))
            if other is None:
                continue
            unread = {key.key for key in other.keys.not_modelled if key.decides is not None}
            if item.key not in unread:
                others.append(_facts(other))
        changed = (name for name in _facts(run) if len({repr(facts[name]) for facts in others}) > 1)
        yield replace(item, decides=tuple(changed))


def _facts(run: DescribedRun) -> dict[str, Any]:
    facts = {item.name: getattr(run, item.name) for item in fields(run) if item.name not in NOT_FACTS}
    mesh = facts.pop("mesh")
    return facts | {f"mesh.{item.name}": getattr(mesh, item.name) for item in fields(mesh)}


def _as_published(run: DescribedRun) -> DescribedRun:
    """Return a run with the dtype of its checkpoint, which is fp32."""
    names = ("base_dtype", "stored_dtype", "compute_dtype", "reduce_dtype")
    dtypes: dict[str, Any] = {name: "fp32" for name in names if getattr(run, name) == "checkpoint"}
    run = replace(run, **dtypes)
    bits = run.optimizer_state_bits or state_bits(run.optimizer, run.stored_dtype)
    return replace(run, optimizer_state_bits=bits)


def _of_file(source: SourceText, files: NamedFiles, program: str | None) -> tuple[RunFormat, RunFile] | None:
    variables: dict[str, str] = {}
    try:
        if len(_EXPORT.findall(source.text)) > 2:
            variables = assigned(source.text, files)
            source = replace(source, text=substituted(source.text, files))
            document = parse_environment(source.text)
        else:
            document = parse_source(source, sniff_dialect(source.text))
    except ParseError as error:
        where = f":{source.place(error.index)[0]}" if error.index is not None else ""
        raise ConfigError(f"{source.path or 'the text'}{where}: {error.message}") from error
    root = document.root
    if root is None or root.kind != "map":
        return None
    reader = _chosen({form: form.describes(root) for form in run_formats()}, program, source.path)
    if reader is None:
        return None
    hints = f"{source.path or ''}\n{' '.join(_COMMENT.findall(source.text))}"
    elsewhere = tuple(_includes(source, root))
    launch = replace(_launched_beside(source.path, files), problems=tuple(said for _, said in elsewhere))
    hidden = tuple(dict.fromkeys(key for key, _ in elsewhere))
    data = _plain(root)
    data |= {name: value for name, value in variables.items() if name in data}
    return reader, RunFile(data, launch, source.path, hints, beside=partial(_beside, files), hidden=hidden)


def _includes(source: SourceText, root: Node) -> Iterator[tuple[str, str]]:
    """Yield what a file takes from elsewhere, with the key: tags like ``!include``, and extended files."""
    for entry in root.entries:
        for node in walk(entry.node):
            if node.error is not None:
                yield entry.key, f"line {source.place(node.start)[0]}: {node.error}"
        if entry.key in _EXTENDING and to_python(entry.node):
            yield entry.key, f"{entry.key}: {to_python(entry.node)} is not read: what it sets is not known"


def _with_hidden(run: DescribedRun, hidden: Sequence[str]) -> DescribedRun:
    """Return a run in which what keys take from elsewhere may change everything."""
    keys = run.keys
    told = {item.key for item in keys.not_modelled if item.changes == "memory"}
    left = tuple(
        UnmodelledKey(key, "memory", decides=None if key in _EXTENDING else ())
        for key in hidden
        if key not in told
    )
    others = tuple(key for key in keys.no_effect if key not in hidden)
    return replace(run, keys=replace(keys, no_effect=others, not_modelled=(*keys.not_modelled, *left)))


def _launched_beside(path: str | None, files: NamedFiles) -> Launch:
    """Return what ``NAME.accelerate.yaml`` beside a file sets: the accelerate file of its launch."""
    if path is None:
        return Launch()
    data = _beside(files, f"{Path(path).stem}.accelerate.yaml")
    return set_by_accelerate(Launch(), {}, data) if isinstance(data, dict) else Launch()


def _of_command(
    source: SourceText, files: NamedFiles, program: str | None
) -> tuple[RunFormat, RunFile] | None:
    text = source.text
    commands = find_commands(text) or (parse_command(text),)
    given = environments(text, [command.start for command in commands], files)
    for command, environment in zip(commands, given, strict=True):
        launch, words = _launch(text, command, files, environment)
        if not words and _ASSIGNED.search(text, max(command.start - 80, 0), command.start):
            continue  # the beginning of a command, which a variable holds
        script = launch.script.rpartition(".")[2].lower()
        if _OTHER_WORK.search(script) and not _TRAINS.search(script):
            continue
        words, open_ended = without_lists(words)
        said = tuple(f"{word}: the arguments that it holds are not known" for word in open_ended)
        launch = replace(launch, problems=(*launch.problems, *said))
        data, overrides, positional = _arguments(words)
        names = frozenset((*data, *(key for key, _ in overrides)))
        reader = _chosen({form: form.starts(launch, names) for form in run_formats()}, program, None)
        flags = (key for key in _CONFIG_FLAGS if isinstance(data.get(key), str))
        named = next((data.pop(key) for key in flags), None)
        named = named or next((word for word in positional if _is_file(word)), None)
        if named is None and launch.program == "torchtitan":
            named = environment.get("CONFIG_FILE", environment.get("CONFIG"))
        if reader is None and named is not None and _TRAINS.search(script):
            reader = _of_named(files, str(named), program)
        if reader is None:
            continue
        base: dict[str, Any] = {}
        unread = None
        if named is not None:
            read = _beside(files, str(named))
            if isinstance(read, dict):
                base = read
            else:
                unread = f"{named} is not read here: the run that it describes is not known"
        if reader.name in _NEGATES:
            data |= {key[3:]: False for key in data if key.startswith("no_") and key != "no_cuda"}
            data = {key: value for key, value in data.items() if key[3:] not in data or key[:3] != "no_"}
        groups = _groups(overrides)
        for key, value in (*data.items(), *overrides):
            if (key, value) not in groups:
                _put(base, key.split("."), value)
        if launch.fsdp is None and launch.program == "accelerate" and not launch.deepspeed:
            launch = _merged(launch, _launched_beside(source.path, files))
        return reader, RunFile(
            base,
            launch,
            source.path,
            hints=" ".join(positional),
            environment=environment,
            beside=partial(_beside, files),
            unread=unread,
            groups=dict(groups),
            added=tuple(found.group(1) for found in map(_ADDED.match, words) if found is not None),
        )
    return None


def _may_be_own(reader: RunFormat, file: RunFile) -> bool:
    """Say whether a command is taken for one of TrainingArguments, or of TRL, by some flags alone."""
    script = file.launch.script
    if reader.name == "trl":
        return bool(script) and not file.launch.verb and not _OF_TRL.search(script.lower())
    return reader.name == "trainer" and script_of(script) is None


def _of_own_script(text: str, files: NamedFiles) -> DescribedRun | None:
    """Return the run of a script that belongs to no program, and that a command line starts."""
    from fsdptool.config.script_runs import describe_script
    from fsdptool.scripts.defaults import OF_CLASSES

    inside = files.within_project()
    for command in find_commands(text):
        if command.script is None:
            continue
        name = str(command.script.value)
        launch, words = _launch(text, command, files, {})
        kind = launch.script.rpartition(".")[2].lower()
        if _OTHER_WORK.search(kind) and not _TRAINS.search(kind):
            continue
        module = re.fullmatch(r"[\w.]+", name) is not None and not name.endswith(SCRIPTS)
        try:
            script = inside.read(f"{name.replace('.', '/')}.py" if module else name, SCRIPTS)
            if not isinstance(script, SourceText):
                continue
            if any(method in script.text for method in OF_CLASSES[1:]):
                words = _with_file(words, files)
            run = describe_script(script, words, launch, loader(files))
        except (UnreadableError, ConfigError):  # the text beside it still says what it says
            continue
        if run is not None:
            problems = (*run.problems, *launch.problems)
            return replace(
                run, nodes=launch.nodes, problems=problems, unresolved=(*run.unresolved, *launch.problems)
            )
    return None


def _with_file(words: Sequence[str], files: NamedFiles) -> list[str]:
    """Return the arguments of a script that fills classes from a file: those of the file, then the others.

    Flags replace what the file says (TRL 1.16 ``trl_parser.py``).
    """
    named = [index > 0 and words[index - 1].lstrip("-") in _CONFIG_FLAGS for index in range(len(words))]
    at = next((i for i, word in enumerate(words) if _is_file(word) and (i == 0 or named[i])), None)
    data = _beside(files, words[at]) if at is not None else None
    if at is None or not isinstance(data, dict):
        return list(words)
    found: list[str] = []
    for key, value in data.items():
        if isinstance(value, list):
            found += (f"--{key}", *map(_word, value)) if value else ()
        elif value is not None:
            found.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else _word(value)}")
    return [*found, *words[: at - named[at]], *words[at + 1 :]]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _groups(overrides: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Return the choices of Hydra's groups: ``data=mine`` beside ``data.max_length=512``, in any order."""
    pairs = list(overrides)
    sections = {key.partition(".")[0] for key, _ in pairs if "." in key}
    return [(key, value) for key, value in pairs if key in sections and isinstance(value, str)]


def _of_named(files: NamedFiles, name: str, program: str | None) -> RunFormat | None:
    """Return the program whose run a file describes that a script of another name is given."""
    try:
        source = files.read(name)
        root = parse_source(source, None).root if not isinstance(source, str) else None
    except (UnreadableError, ParseError):
        return None
    if root is None or root.kind != "map":
        return None
    return _chosen({form: form.describes(root) for form in run_formats()}, program, name)


def _chosen(scores: Mapping[RunFormat, float], program: str | None, path: str | None) -> RunFormat | None:
    if program is not None:
        return next((form for form in scores if form.name == program), None)
    best = max(scores.values(), default=0.0)
    winners = [form for form, score in scores.items() if score == best]
    if best < CERTAIN:
        return None
    if len(winners) > 1:
        names = " and ".join(form.name for form in winners)
        raise ConfigError(
            f"{path or 'the text'}: {names} claim it equally: it holds the keys of two programs",
            help="keep the keys of one; fsdptool explain --dialect NAME reads the file as one program's",
        )
    return winners[0]


def _plain(root: Node) -> dict[str, Any]:
    """Return a tree as plain data, without the values that nobody constructs (``!include file``)."""
    for node in walk(root):
        if node.error is not None:
            node.value = None
    value = to_python(root)
    return {str(key): item for key, item in value.items()}


def loader(files: NamedFiles) -> Callable[[str], object]:
    """Return what reads the files of settings that a script loads, within its project, as plain data.

    Of a file in Python it returns the tree.
    """
    from fsdptool.config.script_runs import loaded

    inside = files.within_project()
    return lambda name: loaded(name, inside, _beside)


def _beside(files: NamedFiles, name: str) -> Any:
    """Return a named file as plain data, or None where it cannot be read or parsed."""
    try:
        source = files.read(name)
        if isinstance(source, str):
            return None
        form = sniff_dialect(source.text)
        root = parse_source(source, None if form is None or form.name == "flags" else form).root
    except (UnreadableError, ParseError):
        return None
    return to_python(root) if root is not None else None


def _is_file(value: object) -> bool:
    return isinstance(value, str) and _NAMED_AS.search(value) is not None


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, last = path
    for section in sections:
        inner = data.get(section)
        data[section] = inner = dict(inner) if isinstance(inner, dict) else {}
        data = inner
    data[last] = value


def _arguments(words: Iterable[str]) -> tuple[dict[str, Any], list[tuple[str, Any]], list[str]]:
    """Return the flags, the ``key=value`` overrides and the other words of a program.

    A flag without a value is True, with several values a list; of two flags of one name the last counts.
    """
    data: dict[str, Any] = {}
    overrides: list[tuple[str, Any]] = []
    positional: list[str] = []
    current: str | None = None
    for word in words:
        pair = _HYDRA.fullmatch(word)
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name if "." in name else name.replace("-", "_")
            data[name] = value if equals else True
            current = None if equals else name
        elif pair is not None and (current is None or data[current] is not True or "." in pair.group(1)):
            overrides.append((pair.group(1).replace("/", "."), _value(pair.group(2))))
        elif current is None:
            positional.append(word)
        elif data[current] is True:
            data[current] = word
            current = None if current in _SINGLE else current
        else:
            before = data[current]
            data[current] = [*before, word] if isinstance(before, list) else [before, word]
    return data, overrides, positional


def _value(text: str) -> Any:
    """Return a value of a Hydra override; anything but a number, a truth or a list stays text."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("null", "none", ""):
        return None
    if re.fullmatch(r"[+-]?\d{1,18}", word):
        return int(word)
    if re.fullmatch(r"[+-]?\d*\.?\d+(?:[eE][+-]?\d+)?", word):
        return float(word)
    if word.startswith("[") and word.endswith("]"):
        inner = word[1:-1].strip()
        return [_value(part.strip().strip("'\"")) for part in inner.split(",")] if inner else []
    return text.strip("'\"")


def _launch(
    text: str, command: Command, files: NamedFiles, environment: Mapping[str, str]
) -> tuple[Launch, list[str]]:
    """Return what starts the program, and the words that are the program's own."""
    words = list(words_of(text, command.start, command.end))
    script = command.script
    if script is not None:
        own = [word for word in words if word.start >= script.end]
    else:
        skipped = 1 + (1 if command.verb else 0)
        own = words[skipped:] if command.program else words
    flags = {plain(entry).lower(): entry.node.value for entry in command.flags}
    launch = Launch(
        program=command.program,
        verb=command.verb,
        script=re.sub(r"\.py$", "", str(script.value)).replace("/", ".").strip(".")
        if script is not None
        else "",
    )
    values = {entry.node.start for entry in command.flags}
    before = (word for word in words[1:] if script is None or word.end <= script.start)
    held = any(word.raw.lstrip('"').startswith("$") and word.start not in values for word in before)
    if command.program == "accelerate":
        launch = _accelerate(launch, flags, files)
    elif command.program == "torchrun":
        launch = on_ranks(launch, flags, "nproc_per_node", "nnodes")
    elif command.program == "deepspeed":
        named = str(flags.get("include") or flags.get("i") or "")
        if re.fullmatch(r"localhost:\d+(?:,\d+)*", named):
            flags["num_gpus"] = named.count(",") + 1
        launch = on_ranks(replace(launch, deepspeed=True), flags, "num_gpus", "num_nodes")
    elif command.program == "python" and script is not None and command.verb == "":
        step = step_of_srun(text, command.start)
        processes, nodes = (1, 1) if step is None else step
        launch = replace(launch, processes=processes, nodes=nodes)
    elif command.program == "torchtitan":  # run_train.sh: NGPU=${NGPU:-"8"}
        launch = replace(launch, processes=integer(environment.get("NGPU", 8)))
    launch = with_ranks(launch, flags, environment, open_ended=held)
    if command.program in ("accelerate", "torchrun", "deepspeed"):
        launch = replace(launch, flags=flags)
    return launch, [str(word.value) for word in own]


def _accelerate(launch: Launch, flags: Mapping[str, Any], files: NamedFiles) -> Launch:
    """Return what ``accelerate launch`` sets: its flags over those of its file."""
    data: dict[str, Any] = {}
    named = flags.get("config_file")
    if named is not None:
        read = _beside(files, str(named))
        if not isinstance(read, dict):
            read = shipped(str(named))
        if isinstance(read, dict):
            data = read
        else:
            said = f"accelerate's file {named} is not read: what it sets is not known"
            launch = replace(launch, unread=str(named), problems=(said,))
    return set_by_accelerate(launch, flags, data, named is not None)


def _merged(launch: Launch, other: Launch) -> Launch:
    """Return a launch with what its accelerate file adds to it."""
    names = ("fsdp", "wrap_classes", "reshard", "cpu_offload", "checkpointing")
    return replace(
        launch,
        processes=launch.processes or other.processes,
        nodes=launch.nodes or other.nodes,
        mixed_precision=launch.mixed_precision or other.mixed_precision,
        deepspeed=launch.deepspeed or other.deepspeed,
        compiles=launch.compiles or other.compiles,
        **{name: getattr(other, name) for name in names},
    )


def describe_path(
    path: str | Path,
    *,
    program: str | None = None,
    files: NamedFiles | None = None,
    words: Sequence[str] = (),
) -> DescribedRun | None:
    """Return the run of a file, as :func:`describe_run`.

    Raises:
        ConfigError: The file cannot be read or parsed.
    """
    from fsdptool.files.text import read_source

    try:
        source = read_source(path)
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    return describe_run(source, program=program, files=files, words=words)


def describe_command(words: Sequence[str]) -> tuple[SourceText, DescribedRun]:
    """Return the words of a command line as a text, and the run that it describes.

    Raises:
        ConfigError: They start no program that is known.
    """
    source = SourceText(shlex.join(words))
    run = describe_run(source)
    if run is None:
        raise ConfigError(
            f"'{' '.join(words[:2])} ...' is not the command line of a training program that is known here",
            help="name one model or file; a command line begins after --: fsdptool plan -- trl sft ...",
        )
    return source, run
