"""Reads a run from a file or a command line: the keys that are read count as used.

A program's table (:class:`RunKeys`) lists its keys; its dialect decides the facts (:meth:`Dialect.describe`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal

from fsdptool.config.key_history import default_of, has_key, known_versions
from fsdptool.records.described_run import (
    ChangedThing,
    DescribedMesh,
    DescribedRun,
    FileKeys,
    Side,
    TakenDefault,
    UnmodelledKey,
)
from fsdptool.source.known_models import family_of_name, model_class_of

DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32", "no": "fp32",
    "fp8": "fp8",
}  # fmt: skip
"""What programs write for a dtype, and the word of :class:`DescribedRun`."""


def area_of(sides: Iterable[int]) -> int | None:
    """Return the pixels of the largest of several square sizes."""
    return max((side * side for side in sides), default=None)


_WIDTH = {"bf16": 16, "fp16": 16, "fp32": 32}
_INACTIVE = (None, False, 0, "", "none", "None", "no", "false", "False")
_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_LARGEST = 1e18
_DEPTH = 5
"""Interpolations that are followed one after another."""
_VARIABLE = re.compile(r"\$[A-Za-z0-9_{(]|\{\{")
_HUB_ID = re.compile(
    r"(?!(?:models|checkpoints|ckpts|outputs?|weights)/)\w[\w.-]*/[\w.-]+"
    r"(?<!\.safetensors)(?<!\.ckpt)(?<!\.gguf)(?<!\.pt)(?<!\.pth)(?<!\.bin)"
)
_TRUE, _FALSE = (
    frozenset({"true", "yes", "y", "t", "1", "on"}),
    frozenset({"false", "no", "n", "f", "0", "off"}),
)


@dataclass(frozen=True, slots=True)
class Learned:
    """The key of something that decides what is learnt and neither memory nor speed.

    Attributes:
        key: The program's key, with dots between sections; a number is a place in a list. Empty: it has none.
        default: What counts without the key, or a function of the run that returns it; None: nothing.
        also: Further keys that are read, and not written.
        words: The program's words by ours; empty: they are the same.
    """

    key: str
    default: Any = None
    also: tuple[str, ...] = ()
    words: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of a program's files, as far as :meth:`Dialect.describe` does not ask for them itself.

    Keys of sections are joined by dots. A name that ends with ``*`` stands for every key that begins so.

    Attributes:
        program: Name of the program.
        version: Version whose source the table follows.
        defaults: Key to the value that counts without it, and the place in the source.
        no_effect: Keys that change neither memory nor speed.
        memory: Keys that change memory and are not modelled, and whether a run needs less or more for them;
            None where that depends on the value.
        time: Keys that change only the time of a step and are not modelled.
        numbers: Keys that change only what is learnt.
        unknown: What the program does with keys that it does not know; ``script``: they belong to the script
            that is run, whose source decides.
        learning: The keys of :attr:`DescribedRun.learning`, by its names.
        earlier: Key to the name that an earlier version has for it, which is read where the key is absent.
    """

    program: str
    version: str
    defaults: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()
    memory: Mapping[str, Side | None] = field(default_factory=dict)
    time: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    unknown: Literal["dropped", "refused", "script"] = "dropped"
    learning: Mapping[str, Learned] = field(default_factory=dict)
    earlier: Mapping[str, str] = field(default_factory=dict)


def names(text: str) -> frozenset[str]:
    """Return the names of a text, separated by blanks."""
    return frozenset(text.split())


def sides(*, less: str = "", more: str = "", either: str = "") -> dict[str, Side | None]:
    """Return a table of keys that change memory from lists of names, separated by blanks."""
    table: dict[str, Side | None] = dict.fromkeys(less.split(), "less")
    return table | dict.fromkeys(more.split(), "more") | dict.fromkeys(either.split(), None)


@dataclass(frozen=True, slots=True)
class Launch:
    """What starts a program: its command line, ``accelerate launch`` or ``torchrun`` before it, or nothing.

    Attributes:
        program: The program's own command (``trl``, ``swift``, ``accelerate``, ``torchrun``, ``python``);
            empty for a file.
        verb: What follows that name (``sft`` of ``trl sft``).
        script: Script or module that is started, with dots for slashes and without ``.py``; or empty.
        processes: Number of ranks, or None where the command does not say.
        nodes: Number of machines that they are on, or None where the command does not say.
        mixed_precision: accelerate's ``mixed_precision``, or None.
        fsdp: FSDP version that the launcher sets, or None.
        wrap_classes: Classes to wrap that the launcher sets.
        reshard: Whether parameters are resharded after forward; None without FSDP.
        cpu_offload: Whether the launcher offloads parameters.
        checkpointing: Whether the launcher checkpoints activations.
        deepspeed: Whether the launcher starts DeepSpeed.
        compiles: Whether the launcher compiles the model (accelerate's ``dynamo_backend``).
        mesh: Sizes of the mesh that the launcher's file sets; None without.
        unread: Name of the launcher's file, where it was not read: it may switch FSDP on.
        problems: Files that the command names and that were not read; one line each.
        flags: Flags of the launcher, as argparse names them; empty where it is the program itself.
    """

    program: str = ""
    verb: str = ""
    script: str = ""
    processes: int | None = None
    nodes: int | None = None
    mixed_precision: str | None = None
    fsdp: Literal[1, 2] | None = None
    wrap_classes: tuple[str, ...] | None = None
    reshard: bool | None = None
    cpu_offload: bool = False
    checkpointing: bool = False
    deepspeed: bool = False
    compiles: bool = False
    mesh: DescribedMesh | None = None
    unread: str | None = None
    problems: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunFile:
    """What describes a run: the keys of a file, or the flags of a command line over those of its file.

    Attributes:
        data: The keys with their values; sections are mappings.
        launch: What starts the program.
        path: The file, or None for text.
        hints: The comments of the text and the name of its file: where a program's file does not say what
        reads
            it, they may.
        version: Version of the program to judge for, or None for that of the program's table.
        environment: Variables that a script assigns before its command.
        beside: Reads a file that the keys name, as plain data; None where it cannot be read.
        hidden: Keys of the file whose values lie elsewhere and are not read.
        unread: What is said of the file that holds the keys, where it was not read.
        added: Keys that a command line adds to the program's own (``+key=value`` of Hydra).
        groups: Configurations of Hydra's groups that a command line chooses for a section of which it also
            sets keys (``data=mine data.max_length=512``).
    """

    data: Mapping[str, Any]
    launch: Launch = Launch()
    path: str | None = None
    hints: str = ""
    version: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: Callable[[str], Any] = lambda name: None
    hidden: tuple[str, ...] = ()
    unread: str | None = None
    added: tuple[str, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)


_NO_FSDP = ("multi_gpu", "single_gpu", "ddp", "cpu", "deepspeed", "zero", "ds_")
"""How the names of accelerate files begin that do not configure FSDP, as in TRL's and diffusers' examples."""


def may_shard(unread: str | None) -> bool:
    """Whether an accelerate file of this name that was not read may switch FSDP on; None: there is none."""
    return unread is not None and not PurePath(unread).name.startswith(_NO_FSDP)


def beside(file: RunFile, *names: str | None) -> Any:
    """Return the first of several files that can be read, as plain data, or None.

    A name is looked for as it is written, then without its folders beside the file that names it.
    """
    for name in names:
        for place in (name, name.rpartition("/")[2]) if name else ():
            found = file.beside(place)
            if found is not None:
                return found
    return None


def dtype_word(value: object) -> str | None:
    """Return the word for a dtype of a file, or None if it is not one."""
    return DTYPES.get(str(value).strip().lower())


def state_bits(optimizer: str | None, stored: str | None) -> int | None:
    """Return the bits of an optimizer state, by the name of the optimizer; None: not known.

    States follow the dtype of the parameters, but for those of bitsandbytes and torchao (their names say the
    bits). transformers 5.24 ``training_args.py:OptimizerNames`` lists the names.
    """
    name = (optimizer or "").lower()
    if not name:
        return None
    if "4bit" in name:
        return 4
    if "8bit" in name or name in ("adam8bit", "lion8bit", "came_8bit"):
        return 8
    if "32bit" in name or name.startswith("paged") or "pagedadam" in name:
        return 32
    return _WIDTH.get(stored or "")


_OF_WHOLE_RUN = re.compile(
    r"(?:^|[._])(?:(?<!accumulation_)steps|epochs|iterations|gpus_per_node|num_gpus|nodes|nnodes|processes)$"
)
"""Keys that say how long a run is, or on how many GPUs: a plan is for those that its options name."""
_WHOLE = frozenset([
    "lora_rank", "sequence_length", "height", "width", "frames", "pixel_area", "micro_batch", "accumulation",
    "global_batch", "optimizer_state_bits", "processes", "steps",
])  # fmt: skip
"""Facts that are whole numbers."""


class RunReader:
    """The values of one file; a key that is read counts as used.

    Args:
        file: What describes the run.
        keys: The program's table.
    """

    def __init__(self, file: RunFile, keys: RunKeys) -> None:
        self.file = file
        self.keys = keys
        self.data = file.data
        self.used: dict[str, None] = {}
        self.asked: set[str] = set()
        self.unread: set[str] = set()
        self.further: list[UnmodelledKey] = []
        self.wrong: dict[str, None] = {}
        self.taken: dict[str, TakenDefault] = {}
        self.learnt: dict[str, None] = {}
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.unresolved: dict[str, None] = {}
        for said in (file.unread, *file.launch.problems):
            if said is not None:
                self.unread_elsewhere(said)

    def raw(self, key: str) -> Any:
        """Return the value of a key, or None; the key does not count as used.

        ``${other.key}`` is the value of that key, as OmegaConf resolves it.
        """
        self.asked.add(key)
        value = self._at(self._written(key))
        for _ in range(_DEPTH):
            inner = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
            found = self._at(inner.group(1)) if inner is not None else None
            if found is None:
                break
            value = found
        return value

    def _written(self, key: str) -> str:
        """Return the name under which the file holds a key: that of an earlier version, where it has one."""
        earlier = self.keys.earlier.get(key)
        return earlier if earlier is not None and self._at(key) is None else key

    def _at(self, key: str) -> Any:
        value: Any = self.data
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def has(self, key: str) -> bool:
        """Whether the file holds a key with a value."""
        return self.raw(key) is not None

    def value(self, key: str, *others: str) -> Any:
        """Return the value of the first key that has one, else the program's default."""
        for name in (key, *others):
            found = self.raw(name)
            if found is not None:
                self.used.setdefault(self._written(name))
                return found
        if key in self.keys.defaults:
            value, source = self.keys.defaults[key]
            if self.file.version is not None:
                value, source = _default_at(self.keys.program, self.file.version, key, value, source)
            return self.default(key, value, source)
        return None

    def default(self, key: str, value: Any, source: str) -> Any:
        """Note and return what the program takes without the key; None if the key is a variable."""
        if _VARIABLE.search(str(self.raw(key))):
            return None
        plain = value if isinstance(value, str | int | float | bool | type(None)) else str(value)
        self.taken.setdefault(key, TakenDefault(key, plain, source))
        return value

    def text(self, key: str, *others: str) -> str | None:
        """Return a text, or None."""
        value = self.value(key, *others)
        if isinstance(value, Mapping | list):
            self._wrong(key, "a text", value)
            return None
        if isinstance(value, str) and _VARIABLE.search(value):
            self._variable(key, value)
            return None
        return None if value is None else str(value)

    def whole(self, key: str, *others: str) -> int | None:
        """Return a whole number, or None."""
        return self.whole_of(key, self.value(key, *others))

    def whole_of(self, key: str, value: Any) -> int | None:
        """Return a value that a key holds, or an item of it, as a whole number, or None."""
        if isinstance(value, str):
            word = value.strip().replace("_", "")
            if re.fullmatch(r"[+-]?\d{1,18}(\.0*)?", word):
                return int(float(word)) if "." in word else int(word)
            if word.lower() in ("none", "null", ""):
                return None
            if not _VARIABLE.search(value):
                self._wrong(key, "a whole number", value)
                return None
            self._variable(key, value)
            return None
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_whole(value):
            self._wrong(key, "a whole number", value)
            return None
        return int(value)

    def number(self, key: str, *others: str) -> float | None:
        """Return a number, or None."""
        value = self.value(key, *others)
        try:
            number = None if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if number is not None and not math.isfinite(number):
            if isinstance(value, str) and _VARIABLE.search(value):
                self._variable(key, value)
            else:
                self._wrong(key, "a number", value)
            return None
        return number

    def flag(self, key: str, *others: str) -> bool:
        """Return whether a switch is on; without a value it is off."""
        value = self.value(key, *others)
        if isinstance(value, bool) or value is None:
            return bool(value)
        word = str(value).strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        if _VARIABLE.search(word):
            self._variable(key, value)
        elif word not in ("none", "null", ""):
            self._wrong(key, "true or false", value)
        return False

    def switched_on(self, key: str) -> bool:
        """Return whether a switch is on, as a value or as text; the key does not count as used."""
        return str(self.raw(key)).strip().lower() in _TRUE

    def names(self, key: str, *others: str) -> tuple[str, ...] | str | None:
        """Return a list of names; a text with commas or blanks is one, any other text stays."""
        value = self.value(key, *others)
        if isinstance(value, list | tuple):
            return tuple(map(str, value)) or None
        if isinstance(value, str) and re.fullmatch(r"[\w.\-]+(?:\s*[,\s]\s*[\w.\-]+)+", value.strip()):
            return tuple(re.split(r"[,\s]+", value.strip()))
        return None if value is None or value == "" else str(value)

    def use(self, *keys: str) -> None:
        """Count keys as used that the file holds."""
        for key in keys:
            if self.has(key):
                self.used.setdefault(self._written(key))

    def inert(self, *keys: str) -> None:
        """Count keys as without effect: the program does not read them as the rest of the file is."""
        self.unread.update(map(self._written, keys))

    def unmodelled(self, key: str, side: Side | None = None) -> None:
        """Tell a key that changes memory as the file has it and is not modelled, beside the table's."""
        self.further.append(UnmodelledKey(self._written(key), "memory", side))

    def family_by(self, key: str, model: str | None, published: str | None) -> str | None:
        """Return the size that another key chooses, where the model is a path that says none.

        A Hub id has a configuration of its own, which decides.

        Args:
            key: The key that says what kind of model it is.
            model: The name of the model, as it is written.
            published: Hub id of a model of that kind and size, or None.
        """
        if not model or published is None or _HUB_ID.fullmatch(model):
            return None
        if family_of_name(model)[0] is not None:
            return None
        family = family_of_name(published)[0]
        if family is not None:
            self.notes.append(f"{model} is taken for {family} ({published}) by {key}")
        return family

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section; anything else is a problem, and none."""
        value = self.raw(key)
        if isinstance(value, Mapping):
            return value
        if value not in _INACTIVE:
            self._wrong(key, "a section", value)
        return {}

    def unread_elsewhere(self, problem: str) -> None:
        """Note a problem that a file or a variable is, which is not read and may set anything."""
        self.problems.append(problem)
        self.unresolved.setdefault(problem)

    def describe(self, **facts: Any) -> DescribedRun:
        """Return the run of the facts, with what became of every key."""
        for name in _WHOLE & facts.keys():
            value = facts[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                self.problems.append(f"{name}: {str(value)[:60]!r} is not a whole number")
                facts[name] = None
        if facts.get("objective") == "reward":
            self.notes.append("a pair is planned as two rows of the micro-batch; --micro-batch counts rows")
        rank = facts.get("lora_rank")
        if rank is not None and rank < 1:
            self.problems.append(f"the rank of adapters is {rank}: it must be positive")
        described = DescribedRun(self.keys.program, self.file.version or self.keys.version, **facts)
        learning = self._learning(described)
        keys = self._told()
        return replace(
            described,
            learning=learning,
            keys=keys,
            defaults=tuple(self.taken.values()),
            notes=tuple(dict.fromkeys(self.notes)),
            problems=tuple(dict.fromkeys(self.problems)),
            unresolved=tuple(self.unresolved),
        )

    def _learning(self, run: DescribedRun) -> dict[str, str | float | bool]:
        """Return what decides the learning, with the program's defaults."""
        found: dict[str, str | float | bool] = {}
        given: set[str] = set()
        for name, item in self.keys.learning.items():
            value = None
            for key in (item.key, *item.also):
                value = _inside(self.data, key.split(".")) if key and value is None else value
                if value is not None:
                    given.add(name)
                    self.learnt.setdefault(re.split(r"\.\d+(?:\.|$)", key)[0])
                    break
            else:
                value = item.default(run) if callable(item.default) else item.default
            value = next((ours for ours, word in item.words.items() if word == value), value)
            if isinstance(value, str) and (_VARIABLE.search(value) or value.lower() in ("none", "null", "")):
                continue
            number = number_of(value) if isinstance(value, str) and name not in _TEXTS else value
            endless = isinstance(number, float) and not math.isfinite(number)
            if endless or (isinstance(number, str) and name not in _TEXTS):
                self._wrong(item.key, "a number", value)
            elif isinstance(number, str | float | int | bool):
                found[name] = number
        steps = found.get("warmup_steps")
        if isinstance(steps, float) and 0 < steps < 1:  # transformers 5 takes a share there
            found["warmup_ratio"] = found.pop("warmup_steps")
        if "warmup_steps" in given and "warmup_ratio" not in given:
            found.pop("warmup_ratio", None)
        if found.get("warmup_ratio") and not found.get("warmup_steps"):
            found.pop("warmup_steps", None)
        elif "warmup_steps" in found:
            found.pop("warmup_ratio", None)
        return found

    def _variable(self, key: str, value: Any) -> None:
        self.unread_elsewhere(f"{self._written(key)}: {value} is a variable, which is not resolved")
        self._misread(key)

    def _wrong(self, key: str, must: str, value: Any) -> None:
        self.problems.append(_must(self._written(key), must, value))
        self._misread(key)

    def _misread(self, key: str) -> None:
        """Note a key whose value is not known, so that no plan is certain."""
        if not _OF_WHOLE_RUN.search(key):
            self.wrong.setdefault(self._written(key))

    def _told(self) -> FileKeys:
        no_effect: list[str] = []
        not_modelled: list[UnmodelledKey] = []
        unknown: list[str] = []
        effects: tuple[tuple[ChangedThing, Collection[str]], ...] = (
            ("memory", self.keys.memory), ("time", self.keys.time), ("numbers", self.keys.numbers),
        )  # fmt: skip
        not_modelled += (UnmodelledKey(key, "memory", decides=()) for key in self.wrong)
        not_modelled += self.further
        told_already = {*self.wrong, *(item.key for item in self.further)}
        for key, value in self._unread(self.data, ""):
            if key in told_already:
                continue
            if key in self.unread:
                no_effect.append(key)
                continue
            found = next((what for what, names in effects if _covers(names, key)), None)
            inactive = value in _INACTIVE if not isinstance(value, list | dict) else not value
            if found is not None and not inactive:
                side = _side(self.keys.memory, key) if found == "memory" else None
                not_modelled.append(UnmodelledKey(key, found, side))
                continue
            no_effect.append(key)
            if _below(self.file.added, key):
                continue
            told = value is not None or self.keys.unknown == "refused"
            if found is None and told and key not in self.asked and not _covers(self.keys.no_effect, key):
                unknown.append(key)
        if unknown:
            names = ", ".join(unknown)
            if self.keys.unknown == "refused":
                self.problems.append(f"{self.keys.program} {self.keys.version} refuses unknown keys: {names}")
            elif self.keys.unknown == "script":
                self.notes.append(f"only the script knows what these do: {names}")
            else:
                self.notes.append(f"{self.keys.program} {self.keys.version} drops unknown keys: {names}")
        learnt = tuple(key for key in self.learnt if key not in self.used)
        used = tuple(key for key in self.used if key not in self.wrong)
        return FileKeys(used, tuple(no_effect), tuple(not_modelled), learnt)

    def _unread(self, data: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        """Yield the keys that nobody asked for; a section whose keys are known singly yields those."""
        for name, value in data.items():
            key = f"{prefix}{name}"
            if key in self.used:
                continue
            if isinstance(value, Mapping) and value and self._is_section(key):
                yield from self._unread(value, f"{key}.")
            else:
                yield key, value

    def _is_section(self, key: str) -> bool:
        known = (*self.used, *self.keys.defaults, *self.keys.memory, *self.keys.time, *self.keys.numbers)
        return any(name.startswith(f"{key}.") for name in (*known, *self.keys.no_effect))


_GROUPS = {
    "trl": (("trl", "SFTConfig"), ("trl", "ModelConfig"), ("transformers", "arguments")),
    "trainer": (("transformers", "arguments"),),
    "axolotl": (("axolotl", "arguments"),),
}
"""Program to the classes that have its keys, the first of which decides."""


def _default_at(program: str, version: str, key: str, value: Any, source: str) -> tuple[Any, str]:
    """Return the default of a version and where it is from; as given where that class computes it."""
    classes = _GROUPS.get(program, ())
    for package, group in classes:
        own = package == classes[0][0]
        at = version if own else known_versions(package)[-1]
        if has_key(package, (group,), key, at):
            found = default_of(package, group, key, at)
            computed = isinstance(found, dict | list) or (found is None and own)
            return (value, source) if computed else (found, f"{package} {at}, {group}")
    return value, source


_TEXTS = frozenset({"dataset", "output", "scheduler"})
"""What is learnt that a text says."""


def _inside(data: Any, path: list[str]) -> Any:
    """Return the value at a path of keys and places in lists, or None."""
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list | tuple) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def number_of(text: str) -> str | float | bool:
    """Return the number or the truth that a text stands for: ``2e-5`` is a text in YAML."""
    if text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text) else value


def saved_modules(read: RunReader, key: str) -> tuple[str, ...]:
    """Return the modules that are trained whole beside adapters; words for groups of them stay untold."""
    value = read.raw(key)
    listed = value if isinstance(value, list | tuple) else re.split(r"[,\s]+", str(value or "").strip())
    if not all(isinstance(name, str) and re.fullmatch(r"(?!all)[A-Za-z_][\w.]*", name) for name in listed):
        return ()
    read.use(key)
    return tuple(listed)


def told_frozen(
    read: RunReader, model: str | None, keys: Iterable[str], *, full: bool, default: bool = True
) -> None:
    """Tell which parts of a multimodal model stay frozen where the rest is trained whole.

    Args:
        model: The name of the model. One of text alone has no such part; of an unknown one only what is
            written counts.
        keys: The switches that freeze a part.
        full: Whether the rest is trained whole.
        default: What the program does without a switch.
    """
    family = family_of_name(model or "")[0]
    of_text = family is not None and model_class_of(family).endswith(("ForCausalLM", "LMHeadModel"))
    for key in keys:
        frozen = read.switched_on(key) if read.has(key) else default and family is not None
        if full and frozen and not of_text:
            read.unmodelled(key, "less")
        else:
            read.use(key)


def _is_whole(value: float) -> bool:
    return math.isfinite(value) and abs(value) < _LARGEST


def _covers(names: Collection[str], key: str) -> bool:
    if key in names:
        return True
    return any(name.endswith("*") and key.startswith(name[:-1]) for name in names)


def _below(sections: Iterable[str], key: str) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _side(table: Mapping[str, Side | None], key: str) -> Side | None:
    if key in table:
        return table[key]
    return next((side for name, side in table.items() if _covers((name,), key)), None)


def _must(key: str, must: str, value: Any) -> str:
    return f"{key} must be {must}, not {str(value)[:60]!r}"


def global_batch(
    micro_batch: int | None, accumulation: int | None, processes: int | None, mesh: DescribedMesh
) -> int | None:
    """Return the samples of an optimizer step on all ranks, or None where a factor is not known.

    Ranks that divide a sequence, a layer or the depth of the model share their samples.
    """
    if micro_batch is None or accumulation is None or processes is None:
        return None
    shared = (mesh.cp or 1) * (mesh.tp or 1) * (mesh.pp or 1)
    return micro_batch * accumulation * max(1, processes // shared)
