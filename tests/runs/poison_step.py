"""Loaded as ``sitecustomize`` by the workers of one test: rank 1 sees a NaN in one step's loss.

Only while the file in ``POISON_WHILE`` exists, so that the resumed run takes the same step unharmed.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


class Poisoner(importlib.abc.MetaPathFinder):
    """Patches ``Stepper.launch`` when the training loop is first imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "fsdptool.training.trainer":
            return None
        sys.meta_path.remove(self)
        from fsdptool.training.step import Stepper

        plain = Stepper.launch
        taken = {"steps": 0}

        def launch(stepper: Any, micro_batches: Any, **options: Any) -> Any:
            taken["steps"] += 1
            bad = taken["steps"] == int(os.environ["POISON_STEP"]) and os.environ.get("RANK") == "1"
            if bad and Path(os.environ["POISON_WHILE"]).exists():
                for parameter in stepper.model.parameters():
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    local.data.fill_(float("nan"))
            return plain(stepper, micro_batches, **options)

        Stepper.launch = launch  # type: ignore[method-assign, assignment]
        return importlib.util.find_spec(name)


if "POISON_STEP" in os.environ:
    sys.meta_path.insert(0, Poisoner())
