"""Builds models on the meta device: shapes without storage."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fsdptool.errors import FsdptoolError, ModelError
from fsdptool.families.registry import family_of
from fsdptool.inspection.keys import Watched, check_overrides
from fsdptool.records.anatomy import ModelSpec
from fsdptool.versions import refuse_old, torch_is

if TYPE_CHECKING:
    from torch import nn


def build(
    spec: ModelSpec, *, dtype: str | None = None, attention: str | None = None, initialise: bool = True
) -> nn.Module:
    """Build the model of ``spec`` on the meta device.

    ``torch.device("meta")`` is used and nothing else: accelerate 1.15's ``init_empty_weights`` loses
    transformers 5.23's ties and allocates fused experts for real.

    Args:
        spec: What to build.
        dtype: torch dtype name of the parameters; None is ``float32``.
        attention: Attention implementation, or None for the library's choice.
        initialise: False skips drawing values, which meta tensors cannot hold anyway; for shapes alone.

    Raises:
        ModelError: The configuration cannot be built; one line.
        ConfigError: The model does not read an override.
    """
    _quieten()
    refuse_old()
    import torch

    if not torch_is(2, 9):
        # Operators on meta need it, and cannot load it themselves there (torch 2.8).
        import torch._dynamo

    family = family_of(spec)
    config = Watched.of(spec)
    try:
        with torch.device("meta"), nullcontext() if initialise else _without_values():
            model = family.build(
                config,
                model_class=spec.model_class,
                dtype=dtype or "float32",
                attention=attention,
                folder=spec.folder,
                trust_remote_code=spec.trust_remote_code,
            )
        check_overrides(spec, model, config)
        return model
    except ModelError as error:
        # The family knows the class and the value, not where the configuration lies.
        where = "" if spec.reference.id in error.message else f"{spec.reference.id}: "
        usual = "correct that value, or use the value of a published configuration"
        raise ModelError(f"{where}{error.message}", help=error.help or usual) from error
    except FsdptoolError:
        raise
    except RecursionError as error:
        raise ModelError(
            f"{spec.model_class} of {spec.reference.id} recurses infinitely while it is built",
            help="its constructor or its ties refer to themselves",
        ) from error
    except Exception as error:
        # Constructors of third parties raise anything; whatever it is, this model cannot be built.
        text = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{spec.model_class} of {spec.reference.id} cannot be built: {type(error).__name__}: {text}",
            help="check the configuration against the class, or the plugin that builds it",
        ) from error


@contextmanager
def _without_values() -> Iterator[None]:
    """Make torch's initialisers return their tensor untouched.

    On meta, ``uniform_`` alone loads torch's decompositions and costs more than the rest of the build
    (0.2 of 0.3 CPU seconds for Wan 1.3B, torch 2.13). Ties are made elsewhere and stay.
    """
    from torch.nn import init

    names = [name for name in dir(init) if name.endswith("_") and not name.startswith("_")]
    kept = {name: getattr(init, name) for name in names}
    known = set(sys.modules)
    try:
        for name in names:
            setattr(init, name, _untouched)
        yield
    finally:
        for name, function in kept.items():
            setattr(init, name, function)
        _give_back(kept, [module for key, module in list(sys.modules.items()) if key not in known])


def _give_back(kept: dict[str, Any], modules: list[Any]) -> None:
    """Restore the initialisers in modules that were imported meanwhile and kept the replacements.

    transformers.initialization keeps them in a table at import (transformers 5.23); every later
    model of the process would start from uninitialised memory.
    """
    for module in modules:
        namespace = getattr(module, "__dict__", {})
        for name in [name for name, value in namespace.items() if value is _untouched and name in kept]:
            setattr(module, name, kept[name])
        table = namespace.get("TORCH_INIT_FUNCTIONS")
        if isinstance(table, dict):
            table.update({name: kept[name] for name in table if name in kept})


def _untouched(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


def _quieten() -> None:
    # Read once, at import (transformers 5.23): without it valid models print warnings to stderr.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
