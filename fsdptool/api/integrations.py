"""Proofs of sharding by a callback of transformers' Trainer and by a tracker of accelerate."""

from __future__ import annotations

from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.tracking import GeneralTracker
from transformers import TrainerCallback

from fsdptool.api.prove import FILE, Proof, prove
from fsdptool.records.plan import Plan
from fsdptool.records.sharding import FsdpSettings, Layout

if TYPE_CHECKING:
    from torch import nn


class ProofCallback(TrainerCallback):  # type: ignore[misc]  # untyped base
    """Proves the model of a ``Trainer`` (or of TRL's) before its first step and measures its steps.

    Writes ``fsdptool-proof.json`` into the output folder when training ends.

    Args:
        planned: A plan or a configuration, as for :func:`fsdptool.prove`.
        folder: Folder of the document; None is the trainer's ``output_dir``.
        layout: Who shards the model, as for :func:`fsdptool.prove`.

    Attributes:
        proof: The proof, once training has begun.
    """

    def __init__(
        self,
        planned: Plan | FsdpSettings | str | PathLike[str],
        *,
        folder: str | PathLike[str] | None = None,
        layout: Layout = "accelerate",
    ) -> None:
        self.proof: Proof | None = None
        self._planned, self._folder, self._layout = planned, folder, layout
        self._step = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Prove the model: Trainer has prepared it by now (transformers 5.23, ``trainer.py``)."""
        self.proof = prove(model, self._planned, layout=self._layout)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to measure an optimizer step."""
        if self.proof is not None:
            self._step.enter_context(self.proof.step())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the measurement of an optimizer step."""
        self._step.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the proof with the measured peaks."""
        self._step.close()
        if self.proof is not None:
            self.proof.write(Path(self._folder or args.output_dir) / FILE)


class ProofTracker(GeneralTracker):  # type: ignore[misc]  # untyped base
    """An accelerate tracker that proves a model and measures memory between two calls of ``log``.

    Give it to ``Accelerator(log_with=tracker)`` and call :meth:`prove` once the model is prepared.
    ``accelerator.end_training()`` writes ``fsdptool-proof.json``.

    Args:
        planned: A plan or a configuration, as for :func:`fsdptool.prove`.
        folder: Folder of the document.
        layout: Who shards the model, as for :func:`fsdptool.prove`.

    Attributes:
        proof: The proof, once :meth:`prove` was called.
    """

    name = "fsdptool"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self,
        planned: Plan | FsdpSettings | str | PathLike[str],
        folder: str | PathLike[str] = ".",
        *,
        layout: Layout = "accelerate",
    ) -> None:
        self.proof: Proof | None = None
        self._planned, self._folder, self._layout = planned, folder, layout
        self._step = ExitStack()
        super().__init__()

    @property
    def tracker(self) -> Proof | None:
        """The proof, as accelerate's ``get_tracker(..., unwrap=True)`` returns it."""
        return self.proof

    def prove(self, model: nn.Module) -> Proof:
        """Prove the prepared model on every rank and begin to measure; errors as :func:`fsdptool.prove`."""
        self.proof = prove(model, self._planned, layout=self._layout)
        self._step.enter_context(self.proof.step())
        return self.proof

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep nothing: the plan holds the configuration."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """End the measurement of a step, and begin that of the next one."""
        if self.proof is not None:
            self._step.close()
            self._step.enter_context(self.proof.step())

    def finish(self) -> None:
        """Write the proof with the measured peaks; a collective."""
        if self.proof is not None:
            self._step.close()
            self.proof.write(Path(self._folder) / FILE)
