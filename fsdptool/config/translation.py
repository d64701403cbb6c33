"""A run that is described for one program, as the file of another.

What is written is read back as the other program would read it. Every fact that comes out otherwise is told,
with what the other program does instead, whatever a writer forgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fsdptool.config.command_lines import NamedFiles
from fsdptool.config.described import describe_run
from fsdptool.config.dialects import run_writers
from fsdptool.config.dialects.protocol import RunFormat
from fsdptool.config.dialects.run_reader import Launch
from fsdptool.config.dialects.run_writer import PLACEHOLDER, RunWriter, optimizer_word, word_of
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.formatting import printable
from fsdptool.records.config_documents import Loss
from fsdptool.records.described_run import NOT_FACTS, DescribedMesh, DescribedRun
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings

_OPEN = frozenset({"sequence_length", "micro_batch", "accumulation", "lora_dropout"})
"""Facts that matter also where the source leaves them open and the other program does not."""
_SAME_ATTENTION = {"flex": "flex_attention"}
_UNKNOWN = "no key of the file says so"
_REASONS = {
    "full_rows": "samples that are not packed are padded to the longest of a micro-batch",
    "compiled_loss": "the loss is not compiled",
    "nodes": "given at the launch (torchrun --nnodes, accelerate launch --num_machines)",
    "momentum": "its files set no momentum",
    "optimizer_masters": "the optimizer keeps no masters beside weights of 16 bits",
}
"""Why programs lack what only one of them has."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A run as another program's file.

    Attributes:
        program: The program that the file is for.
        text: The file.
        losses: What has no counterpart there.
        beside: Texts of files that belong beside it, by what follows the stem of its name.
        run: The run that the file describes.
    """

    program: str
    text: str = field(repr=False)
    losses: tuple[Loss, ...]
    beside: dict[str, str] = field(repr=False)
    run: DescribedRun


def translate(
    run: DescribedRun,
    to: str,
    *,
    header: tuple[str, ...] = (),
    given: Mapping[str, Any] | None = None,
    launch: Launch | None = None,
) -> Translation:
    """Return a run as the file of a program, and what has no counterpart there.

    Args:
        run: The run, as its own program's file describes it.
        to: Name of the program.
        header: Comment lines (without ``#``) to put first.
        given: The flags of a command line of the same program, to be written as they are: the writer adds
            what the file would otherwise leave open.
        launch: What starts that command line.

    Raises:
        ConfigError: The program's files are not written, or it has no counterpart of such runs.
    """
    form = writer_of(to)
    writer = RunWriter(run, to)
    form.write_run(writer)
    kept = form.keep_flags(writer, given, launch or Launch()) if given is not None else ()
    text = writer.rendered(tuple(map(printable, header)))
    back = _read_back(text, form, writer)
    keys = _keys(run) if given is None else ()
    told = {loss.name for loss in kept}
    found = (*_facts(run, back, writer), *_learning(run, back, writer), *keys)
    losses = (*kept, *(loss for loss in found if loss.name not in told))
    return Translation(to, text, losses, writer.beside, back)


_PLANNED = (
    *("sequence_length", "micro_batch", "accumulation", "global_batch", "gradient_checkpointing"),
    *("reshard", "cpu_offload", "fsdp", "mesh", "processes"),
)
"""Facts that a plan chooses, or that its options set."""


def planned_run(recipe: Recipe, settings: FsdpSettings, described: DescribedRun | None) -> DescribedRun:
    """Return the run that a plan chose.

    Args:
        recipe, settings: Recipe and settings of the chosen candidate.
        described: The run of the training file that was planned, or None: the rest is the recipe's.
    """
    from fsdptool.config.recipe import dump_recipe
    from fsdptool.config.writer import resolved, write_settings

    files = NamedFiles(folders=(), texts={"run.accelerate.yaml": write_settings(resolved(settings))})
    chosen = describe_run(SourceText(dump_recipe(recipe), "run.yaml"), program="fsdptool", files=files)
    assert chosen is not None
    if described is None:
        return chosen
    return replace(described, **{name: getattr(chosen, name) for name in _PLANNED})


def writer_of(program: str) -> RunFormat:
    """Return what writes runs of a program.

    Raises:
        ConfigError: There is none.
    """
    known = run_writers()
    if program not in known:
        raise ConfigError(
            f"runs are not written for {program}", help=f"choose one of: {', '.join(sorted(known))}"
        )
    return known[program]


def keeps_flags(program: str) -> bool:
    """Return whether command lines of a program become files of the same program."""
    form = run_writers().get(program)
    return form is not None and type(form).keep_flags is not RunFormat.keep_flags


def _read_back(text: str, form: RunFormat, writer: RunWriter) -> DescribedRun:
    files = NamedFiles(folders=(), texts={f"run{suffix}": beside for suffix, beside in writer.beside.items()})
    back = describe_run(SourceText(text, "run.yaml"), program=form.name, files=files)
    if back is None:  # pragma: no cover
        raise ConfigError(f"what was written for {form.name} is not read back")
    return back


def _facts(run: DescribedRun, back: DescribedRun, writer: RunWriter) -> Iterator[Loss]:
    for name, wanted, got in differing(run, back):
        yield Loss(name, word_of(wanted), word_of(got), writer.cannot.get(name, _REASONS.get(name, _UNKNOWN)))


def differing(run: DescribedRun, back: DescribedRun) -> Iterator[tuple[str, object, object]]:
    """Yield the facts that two descriptions differ in: the name, and both values.

    Facts that the first leaves open do not count, but for those of :data:`_OPEN`.
    """
    for item in fields(DescribedRun):
        name = item.name
        if name in NOT_FACTS or name == "mesh":
            continue
        wanted, got = getattr(run, name), getattr(back, name)
        if not _same(name, wanted, got):
            yield name, wanted, got
    for item in fields(DescribedMesh):
        sizes = getattr(run.mesh, item.name), getattr(back.mesh, item.name)
        if item.name == "dp_shard":
            left = run.fsdp == "none" or sizes[0] is None or (sizes[0] < 0 and (sizes[1] or -1) < 0)
            same = left or _ranks_that_share(run) == _ranks_that_share(back)
        else:
            same = _same_size(item.name, run, *sizes)
        if not same:
            yield f"mesh.{item.name}", *sizes
    if (run.nodes or 1) != (back.nodes or 1) and run.nodes is not None:
        yield "nodes", run.nodes, back.nodes


def _same(name: str, wanted: object, got: object) -> bool:
    if wanted == got:
        return True
    if wanted is False and got is None:
        return True
    if name == "base_dtype" and got is None:
        return True  # nothing is frozen
    if name in ("lora_dropout", "momentum") and {wanted, got} == {None, 0.0}:
        return True
    if name == "optimizer_masters" and {wanted, got} == {None, "none"}:
        return True
    if wanted is None or wanted == ():
        return name not in _OPEN
    if name == "optimizer":
        return optimizer_word(str(wanted)) == optimizer_word(str(got))
    if name in ("base_dtype", "stored_dtype", "compute_dtype", "reduce_dtype"):
        # The checkpoints of models are stored in 16 bits, where nothing else is known of them.
        return {wanted, got} == {"checkpoint", "bf16"}
    if name == "attention":
        return _SAME_ATTENTION.get(str(wanted), wanted) == _SAME_ATTENTION.get(str(got), got)
    if name == "optimizer_state_bits":
        return got is None and wanted == 16  # the states follow weights whose dtype is the checkpoint's
    return False


def _same_size(name: str, run: DescribedRun, wanted: int | None, got: int | None) -> bool:
    if name.startswith("dp_") and (run.fsdp == "none" or wanted is None):
        return True  # every rank holds a copy, or the file leaves it to the launch
    return (wanted or 1) == (got or 1)


def _ranks_that_share(run: DescribedRun) -> int:
    """Return the ranks that share a copy; -1 where the launch decides."""
    mesh = run.mesh
    if mesh.dp_shard is not None and mesh.dp_shard > 0:
        return mesh.dp_shard
    others = max(mesh.dp_replicate or 1, 1) * (mesh.cp or 1) * (mesh.tp or 1) * (mesh.pp or 1)
    return run.processes // others if run.processes is not None else -1


def _learning(run: DescribedRun, back: DescribedRun, writer: RunWriter) -> Iterator[Loss]:
    for name, value in run.learning.items():
        got = back.learning.get(name)
        told = f"learning.{name}"
        if got != value or (name == "dataset" and told in writer.cannot):
            if value in (False, 0) and got is None:
                continue
            yield Loss(told, word_of(value), word_of(got), writer.cannot.get(told, _UNKNOWN))
    for name, (placeholder, why) in writer.asked.items():
        yield Loss(name, None, placeholder, why)
    if "dataset" not in run.learning and back.learning.get("dataset") == PLACEHOLDER:
        yield Loss("learning.dataset", None, PLACEHOLDER, writer.cannot["learning.dataset"])


def _keys(run: DescribedRun) -> Iterator[Loss]:
    """Yield the keys of the source that no plan takes into account, and that are not carried over."""
    for item in run.keys.not_modelled:
        if item.key not in run.keys.learning:
            yield Loss(item.key, None, None, f"changes {item.changes}, and is not translated")
    for key in run.keys.no_effect:
        if key not in run.keys.learning and not key.endswith("_target_"):
            yield Loss(key, None, None, "changes neither memory nor speed, and is not translated")
