"""What ``fsdptool share`` writes: a measured run for the public collection, without names and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdptool.records.annotations import Positive, Text

SharedProgram = Literal["fsdptool", "torchtitan", "automodel", "trainer", "axolotl"]
PeakKind = Literal["allocated", "reserved"]


@dataclass(frozen=True, slots=True)
class SharedFigures:
    """What the run measured; null is unknown.

    Attributes:
        tokens_per_second_and_gpu, samples_per_second_and_gpu: Median over the steps after the first ones, or
            what the program reports of the whole run.
        peak_gib, peak_kind: Largest peak of memory that was reported, and of which kind.
    """

    tokens_per_second_and_gpu: float | None = None
    samples_per_second_and_gpu: float | None = None
    peak_gib: float | None = None
    peak_kind: PeakKind | None = None


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A measured run and what plans it. Strings come from closed lists: nothing is copied from paths, or from
    names of data sets, hosts or people.

    Attributes:
        program: What trained.
        gpu: Name in the catalogue.
        gpus: All of them.
        gpus_per_node: Of one node.
        model: Model of the catalogue whose architecture it is; ``recipe.model.overrides`` has its sizes.
        parameters: Of the model, without adapters.
        recipe: Recipe of a plan.
        options: Further options of a plan.
        published: What was measured.
        libraries: Versions of the libraries that the run had, where a run folder says them.
        left_out: What the configuration says and the row does not, as keys.
        version: Of this format.
    """

    program: SharedProgram
    gpu: Text
    gpus: Positive
    gpus_per_node: Positive
    model: Text
    parameters: Positive
    recipe: Mapping[str, Any]
    options: Mapping[str, Any]
    published: SharedFigures
    libraries: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    version: Literal[1] = 1
