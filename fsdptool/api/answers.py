"""``plan``, ``detect`` and ``compare`` for Python.

Their records print in a few lines and show a page in a notebook.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from fsdptool.api.notebooks import notebook_progress, shown
from fsdptool.api.options import DivisionOptions, InspectionOptions
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.options import takes, with_defaults
from fsdptool.planning.request.options import Options, as_arguments
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.command_documents import Comparison
from fsdptool.records.plan import Plan
from fsdptool.spelling import suggest_keywords

if TYPE_CHECKING:
    from fsdptool.inspection.document import View
    from fsdptool.records.detection import Detection
    from fsdptool.records.diagnostic import Answer
    from fsdptool.records.sharding import Layout


@dataclass(frozen=True, slots=True, repr=False)
class ShownPlan(Plan):
    """A :class:`~fsdptool.records.plan.Plan` that shows itself."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document of ``plan -o plan.json``."""
        from fsdptool.planning.plan import plan_document

        return plan_document(self)

    def html(self) -> str:
        """Return the page of ``plan -o plan.html``."""
        from fsdptool.report.page.plan import plan_page

        return plan_page(self)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each candidate, with the columns of ``plan --format csv``.

        Figures are in bytes and seconds; None stands for what is unknown.
        """
        from fsdptool.report.console.plan import candidate_rows

        names, rows = candidate_rows(self)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def to_pandas(self) -> Any:
        """Return :meth:`rows` as a ``pandas.DataFrame``.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError("pandas is not installed", help="pip install pandas, or use rows()") from None
        return pandas.DataFrame(self.rows())

    def __repr__(self) -> str:
        """Return the verdict, the shown configuration and what it needs, in a few lines."""
        from fsdptool.report.summaries import plan_lines

        return "\n".join(plan_lines(self))

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own."""
        from fsdptool.report.page.parts import frame

        return frame("fsdptool plan", self.html())


@dataclass(frozen=True, slots=True, repr=False)
class ShownAnatomy(Anatomy):
    """An :class:`~fsdptool.records.anatomy.Anatomy` that shows itself."""

    @takes(DivisionOptions)
    def document(self, *, views: Iterable[View] = (), **options: Unpack[DivisionOptions]) -> dict[str, Any]:
        """Return the JSON document of ``detect --format json``.

        Args:
            views: Further tables: ``leaves``, ``tree`` and ``where``.
            **options: The options of ``fsdptool detect`` on how ranks divide the model.

        Raises:
            ConfigError: The layout does not support this model, or ``sequence_parallel`` without ``tp``.
        """
        return self._answer(views=views, **options).document()

    def _answer(self, *, views: Iterable[View] = (), **options: Unpack[DivisionOptions]) -> Answer[Detection]:
        from fsdptool.inspection import Inspection
        from fsdptool.inspection.document import describe

        asked = with_defaults(DivisionOptions, options)
        return describe(
            Inspection(self, cached=False),
            world_size=asked["world_size"],
            layout=cast("Layout", asked["layout"]),
            views=views,
            tensor_parallel=asked["tp"],
            sequence_parallel=asked["sequence_parallel"],
            expert_parallel=asked["ep"],
        )

    def html(self, *, world_size: int | None = None, layout: Layout = "native") -> str:
        """Return the page of ``detect -o detection.html``; arguments and errors as :meth:`document`."""
        from fsdptool.report.page.detection import detection_page

        return detection_page(self._answer(world_size=world_size, layout=layout))

    def __repr__(self) -> str:
        """Return class, size and wrap classes, in a few lines."""
        from fsdptool.report.summaries import detection_lines

        return "\n".join(detection_lines(self._answer()))

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own."""
        from fsdptool.report.page.parts import frame

        return frame("fsdptool detect", self.html())


@dataclass(frozen=True, slots=True, repr=False)
class ShownComparison(Comparison):
    """A :class:`~fsdptool.records.command_documents.Comparison` that shows itself."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document of ``compare --format json``."""
        return self._answer().document()

    def _answer(self) -> Answer[Comparison]:
        from fsdptool.records.diagnostic import answer

        return answer("compare", [self.left, self.right], self)

    def html(self) -> str:
        """Return the page of ``compare -o comparison.html``."""
        from fsdptool.report.page.plan import comparison_page

        return comparison_page(self._answer())

    def __repr__(self) -> str:
        """Return the figures that differ, in a few lines."""
        from fsdptool.report.summaries import comparison_lines

        return "\n".join(comparison_lines(self))

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own."""
        from fsdptool.report.page.parts import frame

        return frame("fsdptool compare", self.html(), height=560)


@takes(Options, first="reference")
def plan(reference: str | None = None, /, **options: Unpack[Options]) -> ShownPlan:
    """Return the memory of every rank, whether it fits, and which configuration to run.

    Needs no GPU and no weights. In a notebook, a line below the cell shows how far the search is.

    Args:
        reference: The model: ``family:flavour``, a Hugging Face id, a folder or a ``config.json``.
        **options: The options of ``fsdptool plan``, for example ``gpu="H100-80GB-SXM", gpus=8,
            sequence_length=4096, micro_batch=1, search=True``.

    Raises:
        OptionError: An option is unknown; the help names the nearest one.
        PlanError: The options contradict each other; the message names the pair.
        ReferenceError: The model cannot be resolved.
        ConfigError: A recipe or configuration cannot be used.
    """
    from fsdptool.planning.plan import make_plan
    from fsdptool.planning.request.inputs import read_request

    if reference is not None:
        options["reference"] = reference
    try:
        with notebook_progress() as progress:
            return shown(ShownPlan, make_plan(read_request(options), progress=progress))
    except FsdptoolError as error:
        # Messages are written for the command line.
        advice = as_arguments(error.help) if error.help is not None else None
        raise type(error)(as_arguments(error.message), help=advice, others=error.others) from error.__cause__


def read_plan(path: str | PathLike[str]) -> ShownPlan:
    """Return the plan that ``plan -o plan.json`` wrote.

    Raises:
        ConfigError: The file cannot be read, or breaks the schema.
        PlanError: The file is not a plan.
    """
    from fsdptool.planning.plan import read_plan as read

    return shown(ShownPlan, read(Path(path)))


@suggest_keywords(no_cache="use_cache")
@takes(InspectionOptions)
def detect(reference: str, *, use_cache: bool = True, **options: Unpack[InspectionOptions]) -> ShownAnatomy:
    """Resolve a reference and inspect it: wrap classes, totals, ties, hazards, without weights.

    Args:
        reference: ``family:flavour``, a path or a Hugging Face id.
        use_cache: Whether to read and keep cached answers.
        **options: The options of ``fsdptool detect`` on the model.

    Raises:
        OptionError: An argument is unknown; the help names the nearest one.
        ReferenceError: The reference cannot be resolved.
        ModelError: The model cannot be built, or a named class is not in it.
    """
    from fsdptool.inspection import inspect
    from fsdptool.source import resolve

    asked = with_defaults(InspectionOptions, options)
    spec = resolve(
        reference,
        revision=asked["revision"],
        component=asked["component"],
        trust_remote_code=asked["trust_remote_code"],
        overrides=asked["overrides"],
        catalogue=True,
    )
    with notebook_progress():
        anatomy = inspect(
            spec,
            wrap=asked["wrap"],
            exclude=asked["exclude"],
            use_cache=use_cache,
            refresh=asked["refresh"],
        )
    if spec.adapter is not None:
        from fsdptool.modeling.units import with_adapter

        anatomy = with_adapter(anatomy, use_cache=use_cache).anatomy
    return shown(ShownAnatomy, anatomy)


@suggest_keywords()
def compare(left: str | PathLike[str] | Plan, right: str | PathLike[str] | Plan) -> ShownComparison:
    """Compare two plans, or a plan with the measurements of a run.

    Args:
        left, right: A plan (the record or its file) or a run folder. A run folder that is given twice is
            compared with its own prediction.

    Raises:
        PlanError: A side is neither a plan nor a run folder that has measured something.
    """
    from fsdptool.planning.compare import compare as compare_sides

    sides = (side if isinstance(side, Plan) else Path(side) for side in (left, right))
    return shown(ShownComparison, compare_sides(*sides))
