"""``fsdptool check``: whether the runs of a repository's training files fit their hardware."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from fsdptool.api.validate import Linter
from fsdptool.config.command_lines import ENDINGS, default_files
from fsdptool.config.described import describe_run
from fsdptool.config.lint_settings import FileHardware
from fsdptool.config.no_run import why_no_run
from fsdptool.errors import ConfigError, ExitCode, FsdptoolError
from fsdptool.files.revisions import Revision, read_revision
from fsdptool.files.text import SourceText, UnreadableError, exists, is_file, read_source
from fsdptool.options import EXCLUDE, ISOLATED, Option, with_defaults
from fsdptool.records.config_documents import CheckedFile, CheckReport, CheckVerdict, EarlierRun
from fsdptool.records.described_run import DescribedRun
from fsdptool.records.plan import Candidate, Plan, RejectionKind

SUFFIXES = (*ENDINGS, ".sh", ".bash", ".slurm", ".sbatch")
"""Endings of the files of a folder that are looked into: configurations, and scripts with command lines."""

_KEY = re.compile(r"""^\s*(?:-\s+)?["']?([A-Za-z_][\w.\-]*)["']?\s*[:=]|--?([A-Za-z][\w.\-]*)|([\w.]+)=""")

Progress = Callable[[str], None]


class CheckOptions(TypedDict, total=False):
    """Every option of ``check``."""

    # fmt: off
    base: Annotated[str | None, Option(
        "Check only what changed since this revision of git (origin/main), and say what the change did.")]
    gpu: Annotated[str | None, Option(
        "GPU of every file, instead of the hardware that the project's settings name.")]
    gpus: Annotated[int | None, Option("GPUs per node.", minimum=1)]
    nodes: Annotated[int | None, Option("Number of nodes.", minimum=1)]
    model: Annotated[str | None, Option("Model of the files, where their own is not known.")]
    exclude: Annotated[Sequence[str] | None, EXCLUDE]
    isolated: Annotated[bool, ISOLATED]
    # fmt: on


def check(files: Iterable[Path], options: CheckOptions, progress: Progress | None = None) -> CheckReport:
    """Return for each training file whether its run fits. Nothing is imported, executed or downloaded.

    Args:
        files: Files and folders.
        options: The options of ``fsdptool check``.
        progress: Called with a line of progress from time to time.

    Raises:
        ConfigError: Nothing says on which GPUs any of the files run, the project's settings are wrong, or the
            revision or a named file does not exist.
        PlanError: No GPU has the given name.
    """
    given = with_defaults(CheckOptions, options)
    files = list(files)
    _check_given(files, given)
    linter = Linter(exclude=given["exclude"], isolated=given["isolated"], suffixes=SUFFIXES)
    checker = _Checker(linter, given, read_revision(given["base"]) if given["base"] else None, progress)
    paths = linter.expand(files)
    report = CheckReport(given["base"], tuple(checker.run(paths)))
    if checker.homeless and not checker.housed:
        raise ConfigError(
            f"nothing says on which GPUs {checker.homeless[0]} runs",
            help="give --gpu H100-80GB-SXM --gpus 8, or name the hardware in [tool.fsdptool.hardware] of"
            " pyproject.toml",
        )
    return report


def _check_given(files: Iterable[Path], given: CheckOptions) -> None:
    """Refuse an unknown GPU, with which no file could be planned, and named files that do not exist."""
    if given["gpu"] is not None:
        from fsdptool.planning.hardware import load_gpu

        load_gpu(given["gpu"])
    # A change since a revision may have removed a file.
    named = (path for path in files if given["base"] is None and str(path) != "-")
    if (lost := next((path for path in named if not exists(path)), None)) is not None:
        raise ConfigError(f"{lost} does not exist", help="check the spelling")


def exit_code(report: CheckReport) -> int:
    """Return 1 where a run certainly does not fit, else 0."""
    return int(_exit(item.verdict for item in report.files))


def _exit(verdicts: Iterable[CheckVerdict]) -> ExitCode:
    return ExitCode.FINDINGS if "does_not_fit" in verdicts else ExitCode.CLEAN


@dataclass(slots=True)
class _Checker:
    """Plans files one after another.

    Attributes:
        linter: Finds the files, and the settings of their project.
        options: The options, with their defaults.
        base: What files are compared with, or None.
        progress: Told what is done.
        homeless: Training files without hardware.
        housed: Whether any settings, or the options, name hardware.
    """

    linter: Linter
    options: CheckOptions
    base: Revision | None
    progress: Progress | None
    homeless: list[Path] = field(default_factory=list)
    housed: bool = False

    def run(self, paths: Mapping[Path, bool]) -> Iterator[CheckedFile]:
        changed = self._changed(paths) if self.base is not None else frozenset()
        for path, named in paths.items():
            checked = self._check(path, named, changed)
            if checked is not None:
                yield checked

    def _changed(self, paths: Iterable[Path]) -> frozenset[Path]:
        """Return the files that differ from the base: of those to check, and all that they may name."""
        assert self.base is not None
        tracked = (self.base.root / name for name in self.base.blobs if name.lower().endswith(ENDINGS))
        every = {path.absolute() for path in (*paths, *tracked)}
        return frozenset(path for path in every if self.base.changed(path))

    def _check(self, path: Path, named: bool, changed: frozenset[Path]) -> CheckedFile | None:
        """Return a file, planned; None where neither it nor what it names has changed."""
        own = path.absolute() in changed
        files, tried = _watched(str(path))
        try:
            source = read_source(path)
            if self.base is not None and not own and not _mentions(source, changed):
                return None
            run = describe_run(source, files=files)
        except (UnreadableError, FsdptoolError) as error:
            return _unplanned(path, error, named or own) if own or self.base is None else None
        except Exception as error:
            return _unplanned(path, _internal(error), named or own)
        cause = path.absolute() if own else next((item for item in tried if item in changed), None)
        if self.base is not None and cause is None:
            return None
        if run is None:
            why = why_no_run(path) if named else None
            reason = ConfigError(why or "it is not a training file of a program that is known here")
            return _unplanned(path, reason, named)
        checked = self._planned(source, run)
        checked = replace(checked, named=True, program=run.program)
        if self.base is None or cause is None:
            return checked
        return self._compared(checked, source, run, cause)

    def _planned(self, source: SourceText, run: DescribedRun) -> CheckedFile:
        path = Path(source.path or "")
        hardware = self._hardware(path)
        if hardware is None:
            self.homeless.append(path)
            return _unplanned(
                path, ConfigError("no hardware is named for it in the project's settings"), True
            )
        return _plan(source, run, hardware, self.progress)

    def _hardware(self, path: Path) -> dict[str, Any] | None:
        """Return the options of a plan that say what a file runs on; None where nothing does."""
        settings = self.linter.settings(path)
        found = settings.hardware_of(path)
        self.housed |= bool(settings.hardware) or self.options["gpu"] is not None
        given = {name: self.options[name] for name in ("gpu", "gpus", "nodes", "model")}
        given = {name: value for name, value in given.items() if value is not None}
        if "gpu" in given:
            return given
        return {**_options_of(found, settings.root), **given} if found is not None else None

    def _compared(
        self, checked: CheckedFile, source: SourceText, run: DescribedRun, cause: Path
    ) -> CheckedFile:
        """Return a file beside what it was before the change."""
        assert self.base is not None
        path = Path(checked.path)
        shown = path if cause == path.absolute() else _beside(cause)
        checked = replace(checked, changed_in=str(shown), line=self._line(source, run, shown))
        try:
            earlier_text = self.base.read(path)
            if earlier_text is None:
                return checked
            files = replace(default_files(str(path)), text=self.base.read)
            earlier = describe_run(earlier_text, files=files)
        except Exception:  # whatever the file was, it is judged as it is now
            earlier = earlier_text = None
        if earlier is None or earlier_text is None:
            return replace(checked, before=EarlierRun("not_planned", None, None, same_run=False))
        if earlier == run and run.program != "fsdptool":
            before = checked
        else:
            before = self._planned(earlier_text, earlier)
        same = earlier == run
        summary = EarlierRun(before.verdict, before.needed_bytes, before.usable_bytes, same)
        return replace(checked, before=summary)

    def _line(self, source: SourceText, run: DescribedRun, shown: Path) -> int | None:
        """Return the changed line that decides a fact of the run, or the first changed one."""
        assert self.base is not None
        try:
            text = source if str(shown) == source.path else read_source(shown)
            lines = self.base.changed_lines(text)
        except UnreadableError:
            return None
        keys = {_last(key) for key in (*run.keys.used, *(item.key for item in run.keys.not_modelled))}
        deciding = (line for line in lines if _keys_of(text.line(line)) & keys)
        return next(deciding, lines[0] if lines else None)


def _watched(path: str) -> tuple[Any, list[Path]]:
    """Return where the files that a text names are found, and a list that fills with those looked for."""
    tried: list[Path] = []
    files = default_files(path)

    def text(read: Callable[[Path], SourceText | None], item: Path) -> SourceText | None:
        tried.append(item.absolute())
        return read(item)

    return replace(files, text=partial(text, files.text)), tried


def _mentions(source: SourceText, changed: Iterable[Path]) -> bool:
    """Whether a text may read one of the files: by its name, or as the accelerate file beside it."""
    beside = f"{Path(source.path or '').stem}.accelerate.yaml"
    return any(item.name == beside or item.name in source.text for item in changed)


def _beside(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _last(key: str) -> str:
    return key.rpartition(".")[2].replace("-", "_").lower()


def _keys_of(line: str) -> set[str]:
    return {_last(next(filter(None, found))) for found in _KEY.findall(line)}


def _options_of(hardware: FileHardware, root: Path) -> dict[str, Any]:
    """Return the options of a plan for what the project's settings say; paths work from here."""
    found: dict[str, Any] = {
        "gpu": hardware.gpu,
        "gpus": hardware.gpus,
        "nodes": hardware.nodes,
        "host_memory": hardware.host_memory,
        "model": hardware.model,
    }
    if hardware.model is not None and is_file(root / hardware.model):
        found["model"] = str(root / hardware.model)
    if hardware.cluster is not None:
        found["clusters"] = [root / hardware.cluster]
    return {name: value for name, value in found.items() if value is not None}


def _plan(
    source: SourceText, run: DescribedRun, hardware: Mapping[str, Any], progress: Progress | None
) -> CheckedFile:
    """Return the plan of a described run, as a line of a report."""
    from fsdptool.planning import make_plan, read_request

    path = Path(source.path or "")
    options, described = {**hardware, "search": False}, None
    try:
        if run.program == "fsdptool":
            from fsdptool.config.recipe import read_recipe
            from fsdptool.source import located

            options["recipe"] = located(read_recipe(source), path.parent)
            options.pop("model", None)
        else:
            options["reference"], described = str(path), run
        plan = make_plan(read_request(cast("Any", options), described), progress=progress)
    except FsdptoolError as error:
        return _unplanned(path, error, named=True)
    except Exception as error:
        return _unplanned(path, _internal(error), named=True)
    return _line_of(path, plan)


def _line_of(path: Path, plan: Plan) -> CheckedFile:
    from fsdptool.planning.clusters import describe

    candidate = plan.candidates[0]
    verdict: CheckVerdict = plan.verdict
    rejection = candidate.rejected_by
    reason = rejection.detail if rejection is not None else None
    if verdict == "unknown" and plan.inputs.limits:
        reason = "what is not planned could turn the answer"
    elif verdict == "does_not_fit":
        memory = (RejectionKind.DEVICE_MEMORY, RejectionKind.HOST_MEMORY)
        if rejection is not None and rejection.kind not in memory:
            verdict = "unknown"
        elif _may_fit(candidate):
            tenths = round(10 * (candidate.fit_share or 0))
            verdict, reason = "unknown", f"it fits with the memory of {tenths} of 10 published runs"
    kept = (item for item in plan.next_steps if plan.chosen is None and item.fits)
    steps = sorted(kept, key=lambda item: bool(item.hardware))
    return CheckedFile(
        path=str(path),
        line=None,
        changed_in=None,
        program=None,
        verdict=verdict,
        reason=reason if verdict != "fits" else None,
        hardware=describe(plan.inputs.clusters[0]),
        needed_bytes=candidate.device_total_bytes,
        usable_bytes=candidate.usable_bytes,
        limits=plan.inputs.limits,
        smallest_change=steps[0] if steps else None,
        fit_share=candidate.fit_share,
    )


def _may_fit(candidate: Candidate) -> bool:
    """Whether a run that is planned to need too much fits with as little memory as published runs had."""
    from fsdptool.planning.candidate.verdict import lowest_total

    rejection, least = candidate.rejected_by, lowest_total(candidate)
    on_device = rejection is not None and rejection.kind is RejectionKind.DEVICE_MEMORY
    return on_device and least is not None and least <= (candidate.usable_bytes or 0)


def _unplanned(path: Path, error: FsdptoolError | UnreadableError, named: bool) -> CheckedFile:
    place = re.match(rf"{re.escape(str(path))}(?::(\d+))?:? ", error.message)
    reason = error.message[place.end() :] if place is not None else error.message
    line = int(place[1]) if place is not None and place[1] else None
    advice = error.help if isinstance(error, FsdptoolError) else None
    shown = str(path)
    return CheckedFile(shown, line, shown if line else None, None, "not_planned", reason, advice, named=named)


def _internal(error: Exception) -> FsdptoolError:
    return FsdptoolError(f"internal error: {type(error).__name__}: {error}")
