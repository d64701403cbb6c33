"""Modules of your own: ``package.module:Class``, or a function that returns a ``torch.nn.Module``.

The code is imported only for a model that may run it (``--allow-import``), when the model, its inputs or its
loss are needed. Beside the class, or as its attributes, there may be two functions:

* ``example_inputs(micro_batch, ...)`` returns a micro-batch: a dictionary of tensors, or a tuple of the
  arguments of ``forward``. It may take any of the recipe's batch sizes by name.
* ``compute_loss(outputs, batch)`` returns the mean loss of a micro-batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdptool.errors import InputsError, ModelError
from fsdptool.families.bases.batches import described, listed_inputs
from fsdptool.families.bases.families import one_line
from fsdptool.families.protocol import Family, Flavour, Match, Objective, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Recipe

EXAMPLE_INPUTS, COMPUTE_LOSS = "example_inputs", "compute_loss"
_HINT = f"define {EXAMPLE_INPUTS}(micro_batch) next to the class, or set objective.options.inputs"


class ImportedFamily(Family):
    """Serves a class or function on the Python path. Its configuration is the keyword arguments."""

    name = "python"
    title = "A module of your own (package.module:Class, with --allow-import)"
    library = "torch"
    default_objective = "module"
    encoded_data = "fsdptool_diffusion.precompute:LATENTS"
    reference: str | None = None
    folder: str | None = None

    def bind(self, spec: ModelSpec) -> Family:
        """Return the family for one reference, if its code may be imported."""
        if not spec.trust_remote_code:
            return self
        bound = copy(self)
        bound.reference, bound.folder = spec.model_class, spec.folder
        return bound

    def flavours(self) -> Mapping[str, Flavour]:
        """Return none."""
        return {}

    def match(self, config: Mapping[str, Any]) -> Match | None:
        """Claim no configuration: only a reference names code."""
        return None

    def model_class(self, config: Mapping[str, Any]) -> str:
        """Return the reference.

        Raises:
            ModelError: The code may not be imported.
        """
        return self._named()

    def build(
        self,
        config: Mapping[str, Any],
        *,
        model_class: str,
        dtype: str = "float32",
        attention: str | None = None,
        folder: str | None = None,
        trust_remote_code: bool = False,
    ) -> nn.Module:
        """Call the class or function with the configuration as keyword arguments.

        Raises:
            ModelError: The code may not be imported, fails, or returns something else.
        """
        import torch

        if not trust_remote_code:
            raise _refused(model_class)
        make = _load(model_class, folder)
        try:
            model = make(**config)
        except Exception as error:
            raise ModelError(
                f"{model_class}({', '.join(config)}): {type(error).__name__}: {one_line(error)}",
                help="give its arguments as model.overrides (--override NAME=VALUE)",
            ) from error
        if not isinstance(model, torch.nn.Module):
            raise ModelError(f"{model_class} returns a {type(model).__name__}, not a torch.nn.Module")
        return model.to(getattr(torch, dtype)).train()

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return what ``objective.options.inputs`` lists, else what ``example_inputs`` returns.

        Raises:
            ConfigError: The list is not one of tensors.
            InputsError: There is neither.
            ModelError: The function fails.
        """
        listed = recipe.objective.options.get("inputs")
        if listed is not None:
            return listed_inputs(listed, recipe.batch.micro_batch)
        reference = self._named()
        function = _beside(reference, self.folder, EXAMPLE_INPUTS)
        if function is None:
            raise InputsError(f"the inputs of {reference} are not known", help=_HINT)
        sizes = {
            "micro_batch": recipe.batch.micro_batch,
            "sequence_length": recipe.batch.sequence_length or 512,
            **{name: getattr(recipe.batch, name) or 0 for name in ("height", "width", "frames")},
        }
        taken = inspect.signature(function).parameters
        if "self" in taken:
            raise ModelError(
                f"{EXAMPLE_INPUTS} of {reference} is called without an instance and takes self",
                help="make it a static method, or a function next to the class",
            )
        import torch

        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                tensors = function(**{name: size for name, size in sizes.items() if name in taken})
        except Exception as error:
            raise ModelError(f"{EXAMPLE_INPUTS} of {reference}: {one_line(error)}") from error
        return _specs(self._by_name(tensors), reference)

    def _by_name(self, tensors: Any) -> Any:
        """Return the tensors by name; a tuple has the names of forward's parameters."""
        if not isinstance(tensors, tuple | list):
            return tensors
        forward = getattr(_load(self._named(), self.folder), "forward", None)
        names = list(inspect.signature(forward).parameters)[1:] if forward is not None else []
        if len(names) < len(tensors):
            raise ModelError(f"{EXAMPLE_INPUTS} of {self.reference} must return a dictionary of tensors")
        return dict(zip(names, tensors, strict=False))

    def _named(self) -> str:
        if self.reference is None:
            raise _refused("a module of your own")
        return self.reference

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the module's own loss, and the library's losses over its output."""
        from fsdptool_generic.module_objectives import OBJECTIVES

        compute = self._compute_loss if self.reference is not None else None
        return {name: partial(make, compute=compute) for name, make in OBJECTIVES.items()}

    def _compute_loss(self) -> Callable[..., Tensor] | None:
        return _beside(self._named(), self.folder, COMPUTE_LOSS)


def _refused(reference: str) -> ModelError:
    return ModelError(
        f"{reference} is code on the Python path, which fsdptool does not import without permission",
        help="read that code, then give --allow-import (in Python: trust_remote_code=True)",
    )


def _load(reference: str, folder: str | None) -> Callable[..., Any]:
    """Return the class or function that a reference names.

    Raises:
        ModelError: The module cannot be imported, or has no such class or function.
    """
    from torch import nn

    from fsdptool.source.imports import import_named

    value = import_named(reference, folder)
    if isinstance(value, nn.Module) or not callable(value):
        what = "a model that is already built" if isinstance(value, nn.Module) else "not callable"
        raise ModelError(f"{reference} is {what}", help="name a class, or a function that returns the model")
    return value  # type: ignore[no-any-return]


def _beside(reference: str, folder: str | None, name: str) -> Callable[..., Any] | None:
    """Return a function of this name: an attribute of the class, else of the module."""
    target = _load(reference, folder)
    found = getattr(target, name, None) or getattr(sys.modules[reference.partition(":")[0]], name, None)
    return found if callable(found) else None


def _specs(tensors: Any, reference: str) -> tuple[TensorSpec, ...]:
    import torch

    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ModelError(f"{EXAMPLE_INPUTS} of {reference} must return a dictionary of tensors")
    specs = []
    for name, tensor in tensors.items():
        counts = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
        high = int(tensor.max()) + 1 if counts and tensor.numel() and not tensor.is_meta else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(described(str(name), tuple(tensor.shape), dtype, high))
    return tuple(specs)
