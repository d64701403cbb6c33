"""The programs that read configuration files: their training loops, and the version that one is judged at."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fsdptool.records.fused_loss import LossTiles
    from fsdptool.records.plan import NotPlanned
    from fsdptool.records.recipe import GradientAccumulation
    from fsdptool.records.sharding import Layout


@dataclass(frozen=True, slots=True)
class ProgramLoop:
    """What the training loop of a program does in a step, as far as its memory depends on it.

    Attributes:
        layout: Whose FSDP units and dtypes it has (docs/reference/layouts.md).
        gradients: How it accumulates gradients.
        loss: Logits that its loss over tokens holds: of all of them, or of a chunk at a time.
        loss_in_forward: Whether the model's own forward computes the loss (``labels=``).
        tiles: Tiles in which a chunked loss computes logits; None: as fsdptool's loss does.
        head_chunks: Parts of each row whose logits a chunked loss makes one by one, and all keeps.
        marks_last: Whether it calls ``set_is_last_backward``.
        outside_in_root: Whether embedding and head belong to the root, in the native layout.
        wraps_adapters: Whether ``peft.get_peft_model`` puts a model with adapters into one of its own.
        masked_from_rows: Number of rows of a forward from which on the model gets a mask of their padding,
            where rows are not packed. 2: rows are padded to the longest. 1: a row alone is filled up, too.
            0: the model gets no mask.
        not_planned: What a plan of it leaves out.
        source: Where this can be read.
    """

    layout: Layout
    gradients: GradientAccumulation
    loss: Literal["whole", "chunked"]
    loss_in_forward: bool
    source: str
    tiles: LossTiles | None = None
    head_chunks: int = 0
    marks_last: bool = False
    outside_in_root: bool = False
    wraps_adapters: bool = False
    masked_from_rows: int = 0
    not_planned: tuple[NotPlanned, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A program that reads configuration files.

    Attributes:
        name: What ``--consumer`` calls it.
        title: What it is, for people.
        package: Distribution whose version counts and which ``--target PACKAGE==VERSION`` names.
        assumed: Version to judge for where the program need not be installed here; None: the installed one.
        checked: Version that the rules were checked against by running it, or None.
        loop: What its training loop does, where that differs from ``fsdptool train``; None: not known.
    """

    name: str
    title: str
    package: str
    assumed: str | None = None
    checked: str | None = None
    loop: ProgramLoop | None = None


ACCELERATE_LOOP = ProgramLoop(
    layout="accelerate",
    gradients="unsharded",
    loss="whole",
    loss_in_forward=True,
    source="accelerate 1.15 accelerator.py (no_sync, accumulate, prepare_model), utils/fsdp_utils.py;"
    " transformers 5.23 data/data_collator.py (attention_mask)",
    masked_from_rows=2,
    not_planned=("autocast", "outputs", "stored_dtype", "encoders"),
)
"""A loop that prepares its model with accelerate, accumulates with it and gives the model its labels."""


TRAINER_LOOP = replace(
    ACCELERATE_LOOP,
    source="transformers 5.23 trainer.py (no_sync but for the last micro-batch; compute_loss drops outputs)",
    wraps_adapters=True,
    not_planned=("autocast", "fused_loss", "stored_dtype"),
)
"""transformers' Trainer, and the programs that are built on it."""


_FILLS_UP = replace(
    TRAINER_LOOP,
    source=f"{TRAINER_LOOP.source}; pad_to_multiple_of of axolotl 0.19 core/builders/causal.py and of"
    " LLaMA-Factory 0.9 train/sft/workflow.py",
    masked_from_rows=1,
)


_AFTER_FORWARD = replace(
    ACCELERATE_LOOP,
    loss_in_forward=False,
    source="diffusers 0.40 examples (the loss is computed from what the denoiser returns)",
    not_planned=("autocast", "encoders"),
)

_SCRIPT = ProgramLoop(
    layout="native",
    gradients="sharded",
    loss="whole",
    loss_in_forward=True,
    outside_in_root=True,
    masked_from_rows=2,
    source="torch 2.13 distributed/fsdp/_fully_shard (a script that calls fully_shard or FSDP itself)",
    not_planned=("outputs",),
)

RUN_LOOPS: Mapping[str, ProgramLoop] = {
    "ms-swift": TRAINER_LOOP,
    "diffusers": _AFTER_FORWARD,
    "ai-toolkit": _AFTER_FORWARD,
    "verl": replace(
        ACCELERATE_LOOP,
        loss_in_forward=False,
        source="verl 0.6 workers/fsdp_workers.py, utils/fsdp_utils.py (apply_fsdp2)",
        not_planned=("fused_loss",),
    ),
    "automodel": ProgramLoop(
        layout="native",
        gradients="sharded",
        loss="whole",
        loss_in_forward=False,
        source="nemo_automodel 0.2 components/distributed/fsdp2.py",
        not_planned=("fused_loss",),
    ),
    "torch": _SCRIPT,
    "lightning": replace(
        _SCRIPT, source="lightning 2.6 pytorch/strategies/fsdp.py, parallel.py (block_backward_sync)"
    ),
}
"""Loops of programs whose files say more than how a model is sharded, and that no dialect of that reads."""


PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "accelerate",
            "accelerate launch and the plugin it builds",
            "accelerate",
            None,
            "1.15.0",
            ACCELERATE_LOOP,
        ),
        Program("fsdptool", "fsdptool's own trainer, started on an accelerate YAML", "fsdptool"),
        Program("trainer", "transformers' TrainingArguments", "transformers", None, "5.23.0", TRAINER_LOOP),
        Program("axolotl", "axolotl", "axolotl", "0.19.0", loop=_FILLS_UP),
        # Its FSDP keys are transformers'.
        Program("llamafactory", "LLaMA-Factory", "transformers", "5.23.0", "5.23.0", _FILLS_UP),
        Program(
            "simpletuner",
            "SimpleTuner",
            "simpletuner",
            "4.8.0",
            loop=replace(
                ACCELERATE_LOOP,
                loss_in_forward=False,
                source="SimpleTuner 4.8 helpers/training/trainer.py (accumulate; text encoders are unloaded)",
                not_planned=("autocast",),
            ),
        ),
    )
}
"""The programs that the shipped dialects are for, by name; another dialect brings its own."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """The program that will read the file, at a version.

    Attributes:
        name: The program.
        version: Its version.
        checked: False when neither the rules were checked against the version by running it, nor the table of
            keys (:mod:`fsdptool.config.key_history`) has it.
        beside: Versions of other packages that ``--target`` names behind the program's.
        judged: Whether keys are looked up in that table: ``--target`` names the version, or it is another one
            than the rules were checked against.
    """

    name: str
    version: str
    checked: bool = True
    beside: tuple[tuple[str, str], ...] = ()
    judged: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def before(self, *parts: int) -> bool:
        """Whether the version is older than ``parts``."""
        return is_before(self.version, *parts)

    def version_of(self, package: str) -> str:
        """Return the version of a package beside the program: as given, as installed here, or as checked."""
        checked = next((item.checked for item in PROGRAMS.values() if item.package == package), None)
        return dict(self.beside).get(package) or installed_version(package) or checked or "0"


def is_before(version: str, *parts: int) -> bool:
    """Whether a version is older than ``parts``."""
    numbers = []
    for piece in version.split(".")[: len(parts)]:
        digits = "".join(character for character in piece if character.isdecimal())
        numbers.append(int(digits[:9] or 0))
    return tuple(numbers) < parts


@cache
def installed_version(package: str) -> str | None:
    """Return an installed version from the names of metadata folders: reading the metadata costs 50 ms."""
    prefix = f"{package}-"
    for folder in sys.path:
        try:
            names = [path.name for path in Path(folder or ".").iterdir()]
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info") and name.lower().startswith(prefix):
                return name[len(prefix) : -len(".dist-info")]
    return None
