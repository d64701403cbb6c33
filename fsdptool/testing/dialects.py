"""The conformance test that authors run on their own dialect.

In a plugin's tests::

    from fsdptool.testing.dialects import assert_conforms

    def test_my_dialect() -> None:
        assert_conforms(MyDialect(), fsdp1=["a file that runs FSDP1\n..."], runs=["a whole run\n..."])

Every setting is written and read back; what the dialect says it cannot express must be refused by name; its
files must be recognised, and nobody else's; files with damaged values must be read without an exception, with
every finding and fix at a place that exists; FSDP1 files must become FSDP2 with the same meaning. Files of
whole runs must be described with every key, and what is written of a run must be read back as that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

from fsdptool.config.canonical import BOOLEANS, COMMON
from fsdptool.config.dialects import CERTAIN, load_registry
from fsdptool.config.dialects.protocol import API_VERSION, Dialect, RunFormat, parse_source
from fsdptool.config.dialects.run_reader import RunFile
from fsdptool.config.dialects.run_writer import RunWriter
from fsdptool.config.edits import Editor
from fsdptool.config.migrate import repair
from fsdptool.config.programs import PROGRAMS
from fsdptool.config.reader import read_settings
from fsdptool.config.result import Reading
from fsdptool.config.translation import differing
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.files.tree import Entry, Node, ParseError, to_python
from fsdptool.files.yaml_tree import parse_yaml
from fsdptool.records.described_run import DescribedRun
from fsdptool.records.diagnostic import apply_edits
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.sharding import FsdpSettings

BASE = FsdpSettings(wrap_classes=("DecoderLayer",))
_EIGHT = replace(BASE, num_processes=8)
VARIANTS: dict[str, tuple[FsdpSettings, ...]] = {
    "reshard_after_forward": (replace(BASE, reshard_after_forward=False),),
    "wrap_policy": (
        replace(BASE, wrap_policy="none", wrap_classes=()),
        replace(BASE, wrap_policy="size", wrap_classes=(), min_num_params=1000),
    ),
    "wrap_classes": (replace(BASE, wrap_classes=("Encoder", "Decoder")),),
    "min_num_params": (replace(BASE, wrap_policy="size", wrap_classes=(), min_num_params=12_345),),
    "state_dict_type": (replace(BASE, state_dict_type="full"),),
    "cpu_offload": (replace(BASE, cpu_offload=True),),
    "cpu_ram_efficient_loading": (replace(BASE, cpu_ram_efficient_loading=True),),
    "activation_checkpointing": (replace(BASE, activation_checkpointing=True),),
    "activation_checkpointing_offload": (
        replace(BASE, activation_checkpointing=True, activation_checkpointing_offload=True),
    ),
    "ignored_modules": (replace(BASE, ignored_modules=r"model\.head"),),
    "mixed_precision": tuple(replace(BASE, mixed_precision=name) for name in ("no", "fp16", "fp8")),
    "dp_replicate": (replace(BASE, mesh=ParallelDims(2, 4)), replace(_EIGHT, mesh=ParallelDims(2, 4))),
    "dp_shard": (
        replace(BASE, mesh=ParallelDims(2, 4)),
        replace(_EIGHT, mesh=ParallelDims(2, 4)),
        replace(_EIGHT, mesh=ParallelDims(1, 4, cp=2)),
    ),
    "cp": (replace(BASE, mesh=ParallelDims(1, 4, cp=2)), replace(_EIGHT, mesh=ParallelDims(1, 4, cp=2))),
    "cp_comm_strategy": (
        replace(BASE, mesh=ParallelDims(1, 4, cp=2), cp_comm_strategy="alltoall"),
        replace(_EIGHT, mesh=ParallelDims(1, 4, cp=2), cp_comm_strategy="alltoall"),
    ),
    "tp": (replace(BASE, mesh=ParallelDims(1, 4, tp=2)), replace(_EIGHT, mesh=ParallelDims(1, 4, tp=2))),
    "sp": (replace(BASE, mesh=ParallelDims(1, 4, sp=2)), replace(_EIGHT, mesh=ParallelDims(1, 4, sp=2))),
    "num_processes": (_EIGHT,),
    "num_machines": (replace(BASE, num_machines=2), replace(_EIGHT, num_machines=2)),
    "machine_rank": (replace(BASE, machine_rank=1),),
    "main_process_ip": (replace(BASE, main_process_ip="10.0.0.1"),),
    "main_process_port": (replace(BASE, main_process_port=29501),),
    "rdzv_backend": (replace(BASE, rdzv_backend="c10d"),),
    "use_cpu": (replace(BASE, use_cpu=True),),
    "gpu_ids": (replace(BASE, gpu_ids="0,1"),),
    "debug": (replace(BASE, debug=True),),
}
"""Canonical setting to settings that differ from :data:`BASE` in it."""


def assert_conforms(dialect: Dialect, *, fsdp1: Iterable[str] = (), runs: Iterable[str] = ()) -> None:
    """Check a dialect.

    Args:
        dialect: An instance; it need not be installed.
        fsdp1: Texts of files that run FSDP1 and can become FSDP2.
        runs: Texts of files that describe whole runs, as the program accepts them.

    Raises:
        AssertionError: Lists every problem.
    """
    problems = check_dialect(dialect, fsdp1=fsdp1, runs=runs)
    if problems:
        raise AssertionError("\n".join(f"{getattr(dialect, 'name', '?')}: {problem}" for problem in problems))


def check_dialect(dialect: Dialect, *, fsdp1: Iterable[str] = (), runs: Iterable[str] = ()) -> list[str]:
    """Return what is wrong with a dialect; every exception it raises is a problem."""
    problems = list(_attributes(dialect))
    if problems:
        return problems
    checks = [("writing and reading", _round_trips(dialect)), ("recognising files", _recognition(dialect))]
    checks += [("damaged files", _damaged(dialect))]
    checks += [("migrating FSDP1", _migrates(dialect, text)) for text in fsdp1]
    checks += [("describing a run", _describes(dialect, text)) for text in runs]
    if writes := type(dialect).write_run is not RunFormat.write_run:
        checks += [("writing a run", _writes(dialect, run)) for run in _FOREIGN_RUNS]
    checks += [("writing a run", _writes_again(dialect, text)) for text in runs if writes]
    for what, messages in checks:
        try:
            problems.extend(messages)
        except Exception as error:
            problems.append(f"{what} raised {type(error).__name__}: {error}")
    return problems


def _attributes(dialect: Dialect) -> Iterator[str]:
    if dialect.api_version != API_VERSION:
        yield f"api_version is {dialect.api_version}; this fsdptool implements {API_VERSION}"
    if not isinstance(getattr(dialect, "name", None), str) or not dialect.name.isidentifier():
        yield "name is not an identifier"
    if not getattr(dialect, "consumers", ()):
        yield "consumers is empty: who reads these files?"
    else:
        known = {*PROGRAMS, *(program.name for program in dialect.programs)}
        yield from (
            f"consumer {name!r} is not in programs" for name in dialect.consumers if name not in known
        )
    unknown = [name for name in dialect.cannot if name not in COMMON]
    yield from (f"cannot holds {name!r}, which is not a canonical setting" for name in unknown)


def _write(dialect: Dialect, settings: FsdpSettings) -> str | ConfigError:
    try:
        return dialect.write(settings)
    except ConfigError as error:
        return error


def _variants(dialect: Dialect) -> Iterator[tuple[str, tuple[FsdpSettings, ...]]]:
    """Yield what differs and the settings in which it does, from those that the dialect starts with."""
    start = dialect.base or BASE
    if "wrap_classes" in dialect.cannot:
        start = replace(start, wrap_classes=())
    yield "the defaults", (start,)
    others = (name for name in COMMON if name in BOOLEANS and name not in VARIANTS)
    switched = {name: (replace(BASE, **cast("Any", {name: not getattr(BASE, name)})),) for name in others}
    for name, variants in {**VARIANTS, **switched}.items():
        yield name, tuple(_moved(settings, start) for settings in variants)


def _moved(settings: FsdpSettings, start: FsdpSettings) -> FsdpSettings:
    """Return other settings with the differences that ``settings`` have from :data:`BASE`."""
    names = [
        name for name in FsdpSettings.__dataclass_fields__ if getattr(settings, name) != getattr(BASE, name)
    ]
    return replace(start, **{name: getattr(settings, name) for name in names})


def _texts(dialect: Dialect) -> Iterator[str]:
    """Yield every variant that the dialect can express."""
    for settings in (item for _, variants in _variants(dialect) for item in variants):
        text = _write(dialect, settings)
        if isinstance(text, str):
            yield text


def _round_trips(dialect: Dialect) -> Iterator[str]:
    names = (*COMMON, "mesh")
    for name, variants in _variants(dialect):
        written = 0
        for settings in variants:
            text = _write(dialect, settings)
            if isinstance(text, ConfigError):
                if not any(word in text.message for word in names):
                    yield f"refusing {name} does not name the setting: {text.message}"
                continue
            written += 1
            reading = read_settings(SourceText(text), dialect=dialect)
            if reading.settings != settings:
                yield f"{name} is not read back as it was written: {_difference(reading, settings)}"
            # A rule may judge the settings themselves (sequence parallelism does nothing under FSDP2).
            form = [item for item in reading.errors if item.code.startswith(("FSD1", "FSD2"))]
            if form:
                yield f"{name} is written in a form that is an error: {form[0].code} {form[0].message}"
        if written and name in dialect.cannot:
            yield f"{name} is written, although `cannot` holds it"
        if not written and name not in dialect.cannot:
            yield f"{name} cannot be written in any variant, and `cannot` does not hold it"


def _difference(reading: Reading, settings: FsdpSettings) -> str:
    if reading.settings is None:
        return f"no settings ({'; '.join(item.message for item in reading.diagnostics)})"
    fields = FsdpSettings.__dataclass_fields__
    changed = [name for name in fields if getattr(reading.settings, name) != getattr(settings, name)]
    return ", ".join(f"{name} {getattr(reading.settings, name)!r}" for name in changed)


def _score(dialect: Dialect, text: str) -> float:
    """Return how surely a dialect takes a text for its own."""
    if dialect.sniff(text):
        return 1.0
    try:
        root = parse_yaml(text).root
    except ParseError:
        return 0.0
    return dialect.matches(root) if root is not None and root.kind == "map" else 0.0


def _recognition(dialect: Dialect) -> Iterator[str]:
    if any(_score(dialect, text) < CERTAIN for text in _texts(dialect)):
        yield "does not recognise a file that it wrote"
    if _score(dialect, "nobody: 1\nnothing:\n  known: true\n") > 0:
        yield "claims a file that holds nothing it knows"
    for other in load_registry().all():
        if other.name != dialect.name and any(_score(dialect, t) >= _score(other, t) for t in _texts(other)):
            yield f"claims files of the dialect {other.name} as surely as that does"


def _damaged(dialect: Dialect) -> Iterator[str]:
    damaged_keys: set[object] = set()
    for text in _texts(dialect):
        document = parse_source(SourceText(text), dialect)
        assert document.root is not None
        before = read_settings(SourceText(text), dialect=dialect)
        yield from _misplaced(before, "a file that it wrote")
        for entry in _entries(document.root):
            edits = Editor(SourceText(text), document).replace(entry.node, "bogus-value")
            if edits is None or entry.key in damaged_keys:
                continue
            damaged_keys.add(entry.key)
            damaged = SourceText(apply_edits(text, list(edits)))
            reading = read_settings(damaged, dialect=dialect)
            yield from _misplaced(reading, f"{entry.key}: bogus-value")
            line = damaged.place(entry.key_node.start)[0]
            reported = {item.line for item in reading.diagnostics} | {item.line for item in reading.ignored}
            value = next((item for item in before.effective if item.line == line), None)
            if line not in reported and value is not None and value in reading.effective:
                yield f"{entry.key}: bogus-value is read as {value.value!r} without a finding"
            repaired = repair(reading, unsafe=True)
            if repair(repaired.reading, unsafe=True).after.text != repaired.after.text:
                yield f"{entry.key}: bogus-value: fixing twice changes the file again"


def _entries(node: Node) -> Iterator[Entry]:
    for entry in node.entries:
        if entry.node.kind == "map":
            yield from _entries(entry.node)
        elif entry.node.kind == "scalar" and entry.node.end > entry.node.start:
            yield entry


def _misplaced(reading: Reading, what: str) -> Iterator[str]:
    """Yield findings and fixes whose places are not in the text."""
    source = reading.source
    assert source is not None
    for item in reading.diagnostics:
        if item.line is not None and not 1 <= item.line <= source.line_count:
            yield f"{what}: {item.code} is on line {item.line} of {source.line_count}"
        for edit in item.fix.edits if item.fix is not None else ():
            if not 0 <= edit.start <= edit.end <= len(source.text):
                yield f"{what}: the fix of {item.code} edits {edit.start} to {edit.end} of {len(source.text)}"
    lines = {item.key: item.line for item in reading.effective} | {i.key: i.line for i in reading.ignored}
    for key, line in lines.items():
        if line is not None and not 1 <= line <= source.line_count:
            yield f"{what}: {key} is on line {line} of {source.line_count}"


def _migrates(dialect: Dialect, text: str) -> Iterator[str]:
    reading = read_settings(SourceText(text), dialect=dialect)
    if reading.version != 1:
        yield f"an FSDP1 file is read as version {reading.version}"
        return
    if not dialect.in_place:
        return
    after = repair(reading, unsafe=True, only=frozenset({"FSD301"})).reading
    if after.version != 2:
        why = next((item.help for item in reading.diagnostics if item.code == "FSD301"), "FSD301 is missing")
        yield f"an FSDP1 file does not become FSDP2: {why}"
    elif after.settings != reading.settings and reading.settings is not None:
        yield f"migrating changes the settings: {_difference(after, reading.settings)}"
    comments = [line.strip() for line in text.splitlines() if line.strip().startswith("#")]
    if after.source is not None and any(comment not in after.source.text for comment in comments):
        yield "migrating loses a comment"


_FOREIGN_RUNS = (
    DescribedRun("trl", "1.0", model="org/model", method="full", objective="sft", micro_batch=2, fsdp="none"),
    DescribedRun(
        "axolotl", "1.0", model="org/model", method="qlora", lora_rank=16, quantisation="nf4", objective="dpo"
    ),
    DescribedRun("diffusers", "1.0", model="org/model", method="full", objective="diffusion", height=512),
)
"""Runs of other programs: each is written, or refused."""


def _described(dialect: Dialect, text: str) -> DescribedRun | None:
    """Return the run of a file.

    Raises:
        ParseError: The text cannot be parsed.
    """
    root = parse_source(SourceText(text), dialect).root
    return dialect.describe(RunFile(to_python(root))) if root is not None else None


def _describes(dialect: Dialect, text: str) -> Iterator[str]:
    document = parse_source(SourceText(text), dialect)
    assert document.root is not None
    if dialect.describes(document.root) < CERTAIN:
        yield "does not recognise the file of a run"
    run = _described(dialect, text)
    if run is None:
        yield "does not describe the file of a run"
        return
    if run.program != dialect.name:
        yield f"describes a run of {run.program}, and its name is {dialect.name}"
    yield from (f"the file of a run has a problem: {problem}" for problem in run.problems)
    keys = run.keys
    told = {*keys.used, *keys.no_effect, *keys.learning, *(item.key for item in keys.not_modelled)}
    for entry, path in _paths(document.root):
        parts = path.split(".")
        if not any(".".join(parts[:count]) in told for count in range(1, len(parts) + 1)):
            yield f"{path} is in none of the lists of keys"
        edits = Editor(SourceText(text), document).replace(entry.node, "bogus-value")
        if edits is None:
            continue
        try:
            damaged = _described(dialect, apply_edits(text, list(edits)))
        except Exception as error:
            yield f"{path}: bogus-value raised {type(error).__name__}: {error}"
            continue
        if path in keys.used and damaged == run:
            yield f"{path}: bogus-value neither changes a fact nor is a problem"


def _paths(node: Node, prefix: str = "") -> Iterator[tuple[Entry, str]]:
    """Yield the entries with scalars, and their keys from the root on."""
    for entry in node.entries:
        path = f"{prefix}{entry.key}"
        if entry.node.kind == "map":
            yield from _paths(entry.node, f"{path}.")
        elif entry.node.kind == "scalar":
            yield entry, path


def _writes_again(dialect: Dialect, text: str) -> Iterator[str]:
    run = _described(dialect, text)
    if run is not None:
        yield from _writes(dialect, run)


def _writes(dialect: Dialect, run: DescribedRun) -> Iterator[str]:
    """Yield what is wrong with the file of a run; a refusal is an answer, but for a run of the program."""
    writer = RunWriter(run, dialect.name)
    about = f"a run of {run.program}"
    try:
        dialect.write_run(writer)
    except ConfigError as error:
        if run.program == dialect.name:
            yield f"{about} is refused: {error.message}"
        return
    text = writer.rendered(())
    root = parse_source(SourceText(text), dialect).root
    back = _described(dialect, text)
    if root is None or back is None or dialect.describes(root) < CERTAIN:
        yield f"does not recognise the file that it wrote of {about}"
        return
    yield from (f"the file that it wrote of {about} has a problem: {problem}" for problem in back.problems)
    if run.program != dialect.name:
        return
    for name, wanted, got in differing(run, back):
        if name not in writer.cannot:
            yield f"{name} of {about} is written as {got!r} instead of {wanted!r}, without a reason"
    for name, value in run.learning.items():
        if back.learning.get(name) != value and f"learning.{name}" not in writer.cannot:
            yield f"learning.{name} of {about} is written as {back.learning.get(name)!r}, without a reason"
