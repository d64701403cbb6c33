"""``fsdptool.validate``: judging files, alone or against a model and hardware."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, Unpack

from fsdptool.config.dialects import known_programs
from fsdptool.config.lint_settings import Baseline, LintSettings, find_settings, keep, read_baseline
from fsdptool.config.reader import judged_or_failed, read_comments
from fsdptool.config.result import Conditions, Reading, Verdict
from fsdptool.config.rules import file_rules
from fsdptool.config.rules.model import Hardware, Need
from fsdptool.errors import ConfigError, PlanError
from fsdptool.files.text import is_file, is_folder
from fsdptool.options import (
    DIALECT,
    EXCLUDE,
    ISOLATED,
    SKIP_UNKNOWN,
    TARGET,
    TRUST,
    Option,
    takes,
    with_defaults,
)
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.sharding import Layout
from fsdptool.scripts import SCRIPTS, mentions_fsdp
from fsdptool.spelling import suggest_keywords

if TYPE_CHECKING:
    from fsdptool.files.text import SourceText
    from fsdptool.records.anatomy import Anatomy
    from fsdptool.records.cluster import Gpu
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.sharding import FsdpSettings


_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True, slots=True, repr=False)
class ShownVerdict(Verdict):
    """A :class:`~fsdptool.config.result.Verdict` that shows itself."""

    def html(self) -> str:
        """Return the findings as a page, file by file."""
        from fsdptool.report.page.parts import verdict_page

        return verdict_page(self.readings)

    def __repr__(self) -> str:
        """Return the number of findings and the most severe ones, in a few lines."""
        from fsdptool.report.summaries import verdict_lines

        return "\n".join(verdict_lines(self.readings))

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own."""
        from fsdptool.report.page.parts import frame

        return frame("fsdptool validate", self.html(), height=420)


class LintOptions(TypedDict, total=False):
    """Every option of ``validate`` that says how files are judged."""

    # fmt: off
    consumer: Annotated[str | None, Option(
        "Program that reads the files: accelerate, fsdptool, trainer, ...")]
    target: Annotated[str | None, TARGET]
    dialect: Annotated[str | None, DIALECT]
    model: Annotated[str | None, Option("Also check against this model.")]
    gpu: Annotated[str | None, Option("Also check against this GPU.")]
    gpus: Annotated[int | None, Option("Total number of GPUs.")]
    host_memory: Annotated[str | int | None, Option("Host memory per node, for example '512 GiB'.")]
    select: Annotated[Sequence[str] | None, Option("Codes or their beginnings to report: FSD3,FSD201.")]
    ignore: Annotated[Sequence[str] | None, Option("Codes or their beginnings not to report.")]
    exclude: Annotated[Sequence[str] | None, EXCLUDE]
    baseline: Annotated[str | Path | None, Option("File of accepted findings, which are not reported.")]
    skip_unknown: Annotated[bool, SKIP_UNKNOWN]
    isolated: Annotated[bool, ISOLATED]
    trust_remote_code: Annotated[bool, TRUST]
    # fmt: on


@suggest_keywords()
@takes(LintOptions)
def validate(
    files: str | PathLike[str] | Iterable[str | PathLike[str]], **options: Unpack[LintOptions]
) -> ShownVerdict:
    """Judge configurations as the program that reads them will. Nothing is written.

    Args:
        files: A file or a folder, or several.
        **options: The options of ``fsdptool validate``. ``select`` replaces what the project's settings
            select and ignore; ``ignore`` and ``exclude`` add to what they name.

    Returns:
        One reading per file: effective settings with their origins, what is ignored, and findings.
        ``document()`` gives the JSON document ``validate``, ``exit_code()`` the command's status.

    Raises:
        ConfigError: An argument names something unknown, or a folder holds no configuration. What is wrong
            with a file is a finding.
        ReferenceError, ModelError: The model cannot be resolved or built.
    """
    paths = [files] if isinstance(files, str | PathLike) else list(files)
    against, linter = conditions(options), Linter.of(options)
    files = linter.expand(map(Path, paths))
    return ShownVerdict(tuple(linter.judge(path, named, against) for path, named in files.items()))


@dataclass(slots=True)
class Linter:
    """Reads files as their project's settings say.

    Attributes:
        select, ignore, exclude, baseline, skip_unknown, isolated: As for :func:`validate`.
        with_baseline: Whether a baseline counts.
        held_back: Number of findings of each file that a baseline suppressed, when it was judged last.
        suffixes: Endings of the files that a folder stands for.
    """

    select: Iterable[str] | None = None
    ignore: Iterable[str] | None = None
    exclude: Iterable[str] | None = None
    baseline: Path | None = None
    skip_unknown: bool = False
    isolated: bool = False
    with_baseline: bool = True
    held_back: dict[Path, int] = field(default_factory=dict)
    suffixes: tuple[str, ...] = _CONFIGURATIONS
    _found: dict[Path, LintSettings] = field(default_factory=dict)
    _settings: dict[Path, LintSettings] = field(default_factory=dict)
    _baselines: dict[Path, Baseline] = field(default_factory=dict)

    @classmethod
    def of(cls, options: LintOptions) -> Linter:
        """Return the linter that options describe."""
        options = with_defaults(LintOptions, options)
        baseline = options["baseline"]
        return cls(
            select=options["select"],
            ignore=options["ignore"],
            exclude=options["exclude"],
            baseline=Path(baseline) if baseline else None,
            skip_unknown=options["skip_unknown"],
            isolated=options["isolated"],
            suffixes=(*_CONFIGURATIONS, *SCRIPTS),
        )

    def settings(self, path: Path) -> LintSettings:
        """Return the settings for a file (or a folder): the nearest ones, with the command line's.

        Raises:
            ConfigError: The file that holds them is wrong.
        """
        return self._settings_in(Path() if str(path) == "-" else path if is_folder(path) else path.parent)

    def _settings_in(self, folder: Path) -> LintSettings:
        if folder not in self._settings:
            found = LintSettings() if self.isolated else find_settings(folder, self._found)
            self._settings[folder] = found.but(select=self.select, ignore=self.ignore, exclude=self.exclude)
        return self._settings[folder]

    def expand(self, paths: Iterable[Path]) -> dict[Path, bool]:
        """Return the files to read, as :func:`expand` does, without those that are excluded.

        With ``skip_unknown``, the files of run folders are left out even where they are named: a hook names
        every file of a commit.
        """
        chosen = [path for path in paths if str(path) == "-" or not self._is_passed_over(path)]
        return expand(chosen, lambda path: self._settings_in(path.parent).excludes(path), self.suffixes)

    def _skips_unknown(self, path: Path) -> bool:
        return self.skip_unknown or self.settings(path).skip_unknown

    def _is_passed_over(self, path: Path) -> bool:
        if not self._skips_unknown(path):
            return False
        from fsdptool.runs.folder import is_run_folder

        return any(is_run_folder(folder) for folder in path.absolute().parents)

    def judge(
        self, path: Path, named: bool, conditions: Conditions, source: SourceText | None = None
    ) -> Reading:
        """Return the reading of a file, with the findings that count.

        Args:
            path: The file.
            named: Whether it was named itself, and not found in a folder.
            conditions: What it is judged by.
            source: Its text, where it does not come from the file.
        """
        reading = _with_known_bugs(judged_or_failed(path if source is None else source, conditions))
        found = not named or self._skips_unknown(path)
        return self.sift(as_found(reading) if found else reading, path)

    def sift(self, reading: Reading, path: Path) -> Reading:
        """Return a reading with the findings that the settings and the baseline leave."""
        settings = self._settings_in(path.parent)
        reading = keep(reading, lambda item: settings.reports(item, path))
        baseline = self.baseline_file(settings)
        if baseline is None or not self.with_baseline:
            return reading
        if baseline not in self._baselines:
            self._baselines[baseline] = read_baseline(baseline)
        left = self._baselines[baseline].without(reading)
        self.held_back[path] = len(reading.diagnostics) - len(left.diagnostics)
        return left

    @property
    def accepted(self) -> int:
        """Number of findings that a baseline suppresses."""
        return sum(self.held_back.values())

    def codes(self, path: Path) -> frozenset[str]:
        """Return the codes that are reported in a file."""
        settings = self.settings(path)
        findings = (Diagnostic(rule.code, "warning", rule.title) for rule in file_rules().values())
        return frozenset(item.code for item in findings if settings.reports(item, path))

    def baseline_file(self, settings: LintSettings) -> Path | None:
        """Return the baseline that counts for files with these settings, or None."""
        if self.baseline is not None:
            return self.baseline
        return settings.root / settings.baseline if settings.baseline is not None else None


def _with_known_bugs(reading: Reading) -> Reading:
    """Return a reading with the known bugs of the versions that ``--target`` names."""
    target, source = reading.conditions.target, reading.source
    if target is None or source is None or reading.version is None:
        return reading
    from fsdptool.advisories.facts import read_facts
    from fsdptool.advisories.locks import read_targets
    from fsdptool.advisories.matching import diagnostics

    package = known_programs()[reading.consumer.name].package
    versions = read_targets([target if "==" in target.partition(",")[0] else f"{package}=={target}"])
    try:
        facts = read_facts(source, versions, reading.conditions.files)
    except ConfigError:
        return reading
    named = [_RULES_OF_BUGS.get(item.code, "") for item in reading.diagnostics]
    comments = read_comments(source)
    bugs = list(diagnostics(facts, versions, reading.path, named))
    silenced = [item for item in bugs if comments.silences(item)]
    return replace(
        reading,
        diagnostics=(*reading.diagnostics, *(item for item in bugs if item not in silenced)),
        suppressed=(*reading.suppressed, *silenced),
    )


_RULES_OF_BUGS = {
    "FSD345": "bitsandbytes-8bit-optimizer-fsdp2",
    "FSD358": "accelerate-ram-loading-with-cpu-offload",
}
"""Rules that say the same of a file as an advisory, which is left out beside them."""


def conditions(options: LintOptions) -> Conditions:
    """Return what a file is judged by: its program and dialect, and perhaps a model and hardware.

    Raises:
        PlanError: The GPU is not in the catalogue, a count or size is not positive, or a size is unreadable.
        ReferenceError, ModelError: The model cannot be resolved or built.
    """
    options = with_defaults(LintOptions, options)
    model, gpu, gpus, host_memory = options["model"], options["gpu"], options["gpus"], options["host_memory"]
    hardware = anatomy = None
    if gpu is not None or gpus is not None or host_memory is not None:
        from fsdptool.planning.clusters import check_host_memory, parse_size
        from fsdptool.planning.hardware import load_gpu

        if gpus is not None and gpus < 1:
            raise PlanError(
                f"gpus must be at least 1, not {gpus}", help="give the total number of GPUs, 1 or more"
            )
        device = load_gpu(gpu) if gpu is not None else None
        memory = parse_size(None if host_memory == "" else host_memory)
        check_host_memory(memory)
        hardware = Hardware(device, gpus, memory)
    if model is not None:
        from fsdptool.inspection import inspect
        from fsdptool.source import resolve

        anatomy = inspect(resolve(model, trust_remote_code=options["trust_remote_code"]))
    if hardware is not None:
        hardware = with_model(hardware, anatomy)
    return Conditions(
        model=anatomy,
        hardware=hardware,
        dialect=options["dialect"],
        consumer=options["consumer"],
        target=options["target"],
    )


def with_model(hardware: Hardware, anatomy: Anatomy | None) -> Hardware:
    """Return hardware on which the runs of files can be predicted, of a given model or of their own."""
    if hardware.gpu is None:
        return replace(hardware, anatomy=anatomy)
    return replace(hardware, anatomy=anatomy, fit=partial(_need, anatomy, hardware.gpu))


def _need(
    anatomy: Anatomy | None,
    gpu: Gpu,
    source: SourceText,
    settings: FsdpSettings,
    layout: Layout,
    gpus: int,
    machines: int,
) -> Need | None:
    """Return what the run of a file needs: the whole run that it describes, or a model's smallest one."""
    from fsdptool.config.described import describe_run

    run = describe_run(source)
    model = anatomy.spec.reference.id if anatomy is not None else run.family if run is not None else None
    if model is None:
        return None
    if run is not None and run.micro_batch is not None:
        return _described_run(run, model, gpu, gpus, machines)
    if anatomy is None:
        return None
    needed, usable = _smallest_run(anatomy, gpu, settings, layout, gpus, machines)
    return Need(needed, usable, "micro-batch 1")


def _described_run(run: DescribedRun, model: str, gpu: Gpu, gpus: int, machines: int) -> Need:
    """Return what a described run needs; that is unknown where the plan is not a lower bound of it."""
    from fsdptool.planning import Options, make_plan, read_request
    from fsdptool.planning.candidate.verdict import lowest_total
    from fsdptool.planning.request.file_run import bound_of

    options = Options(gpu=gpu.name, gpus=gpus // machines, nodes=machines, model=model, search=False)
    plan = make_plan(read_request(options, run))
    candidate = plan.candidates[0]
    batch = plan.inputs.recipe.batch
    certain = bound_of(plan.inputs.limits) in ("exact", "lower")
    words = f"micro-batch {batch.micro_batch}"
    if batch.sequence_length is not None:
        words += f" of {batch.sequence_length:,} tokens"
    return Need(lowest_total(candidate) if certain else None, candidate.usable_bytes, words)


def _smallest_run(
    anatomy: Anatomy, gpu: Gpu, settings: FsdpSettings, layout: Layout, gpus: int, machines: int
) -> tuple[int | None, int | None]:
    """Return needed and usable bytes per GPU at micro-batch 1."""
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.planning import predict
    from fsdptool.planning.clusters import make_cluster
    from fsdptool.records.recipe import Batch, ModelChoice, Recipe, Sharding
    from fsdptool.source import adapted

    sharding = Sharding(layout="native") if layout == "native" else Sharding(layout, reduce_dtype=None)
    recipe = Recipe(
        ModelChoice(anatomy.spec.reference.id, revision=anatomy.spec.reference.revision),
        batch=Batch(micro_batch=1, sequence_length=_sequence(anatomy)),
        sharding=sharding,
    )
    recipe = adapted(recipe, anatomy.spec)
    bandwidth = 25e9 if machines > 1 else None
    cluster = make_cluster(gpu, gpus // machines, machines, inter_node_bandwidth=bandwidth)
    run = resolve_run(recipe, settings, ranks=cluster.world_size)
    candidate = predict(anatomy.spec, anatomy, run, cluster=cluster)
    return candidate.device_total_bytes, candidate.usable_bytes


def _sequence(anatomy: Anatomy) -> int | None:
    """Text models are judged at 2,048 tokens or what they have positions for."""
    config = anatomy.spec.config
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    if "vocab_size" not in text:
        return None
    return min(2048, positions) if isinstance(positions, int) else 2048


def expand(
    paths: Iterable[Path],
    excluded: Callable[[Path], bool] = lambda _path: False,
    suffixes: tuple[str, ...] = _CONFIGURATIONS,
) -> dict[Path, bool]:
    """Return the files to read, each once, and whether it was named itself (not found in a folder).

    A folder stands for its files of some kinds; names that begin with a dot are skipped, as are the folders
    of installed packages and of runs, and scripts that do not mention FSDP. A run folder that is named itself
    stands for the recipe and the configuration that the run was started with.

    Args:
        paths: Files and folders.
        excluded: Whether a file or a folder is left out, named or not.
        suffixes: Endings of the files that a folder stands for.

    Raises:
        ConfigError: A folder holds no such file.
    """
    files: dict[Path, bool] = {}
    for path in paths:
        if not is_folder(path):
            if not excluded(path):
                files[path] = True
            continue
        left_out: list[Path] = []
        configurations = sorted(_configurations(path, excluded, left_out, suffixes))
        if not configurations and not left_out:
            raise ConfigError(f"there is no YAML, JSON or TOML file in {path}", help="name the files")
        for item in configurations:
            files.setdefault(item, False)
    return files


def _configurations(
    folder: Path, excluded: Callable[[Path], bool], left_out: list[Path], suffixes: tuple[str, ...]
) -> Iterator[Path]:
    from fsdptool.runs.folder import ACCELERATE, RECIPE, RUN, is_run_folder

    for place, folders, names in os.walk(folder):
        # Not entered at all: a repository's .git holds many times more files than the project.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _INSTALLED]
        base = Path(place)
        if RUN in names and is_run_folder(base):
            left_out.append(base)
            folders.clear()
            # What a run stores is in fsdptool's own form, whatever the file was that it was started with.
            names = [name for name in names if base == folder and name in (RECIPE, ACCELERATE)]
        items = {name: base / name for name in (*folders, *names)}
        out = {name for name, item in items.items() if excluded(item)}
        left_out.extend(items[name] for name in out)
        folders[:] = [name for name in folders if name not in out]
        for name in names:
            known = name.lower().endswith(suffixes) and not name.startswith(".") and name not in _PROJECT
            if not known or name in out or not is_file(items[name]) or not _is_inside(items[name], folder):
                continue
            if not name.endswith(SCRIPTS) or mentions_fsdp(items[name]):
                yield items[name]


def _is_inside(path: Path, folder: Path) -> bool:
    """Say whether a file that was found in a folder lies there: nobody named what a link leads to."""
    return not path.is_symlink() or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


_PROJECT = ("pyproject.toml", "fsdptool.toml")
_INSTALLED = ("node_modules", "site-packages")


def as_found(reading: Reading) -> Reading:
    """Return the reading of a file that nobody named: what is not ours is a note, never an error.

    Files in folders are read like this, and those that a hook passes on (``--skip-unknown``).
    """
    if reading.errors and (reading.dialect is None) and not _looks_like_ours(reading):
        foreign = {item.code for item in reading.diagnostics} & _NOT_OURS
    else:
        foreign = {item.code for item in reading.diagnostics} & _UNKNOWN
    if not foreign:
        return reading
    diagnostics = tuple(
        replace(item, severity="info") if item.code in foreign else item for item in reading.diagnostics
    )
    return replace(reading, diagnostics=diagnostics)


def _looks_like_ours(reading: Reading) -> bool:
    """Whether a text that does not parse was meant as a configuration of FSDP.

    A template of a Helm chart or the documents of a Kubernetes manifest do not parse as one file, either;
    a file that begins with those two keys of Kubernetes is none of ours, whatever it holds.
    """
    text = reading.source.text if reading.source is not None else ""
    return bool(_OURS.search(text)) and not ({"apiVersion", "kind"} <= set(_TOP.findall(text)))


_UNKNOWN = frozenset({"FSD107", "FSD109", "FSD110"})
_NOT_OURS = _UNKNOWN | {"FSD102", "FSD103", "FSD104", "FSD105", "FSD106"}
_OURS = re.compile(r"""^[ {,]*["']?(?:fsdp(?:_\w+)?|distributed_type|parallelism_config)["']?[ ]*:""", re.M)
_TOP = re.compile(r"^(apiVersion|kind)\b", re.M)
