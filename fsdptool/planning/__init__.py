"""Planning: the hardware catalogue, estimates of configurations, the search, suggestions. Torch-free.

What the package exports is imported at first use: a command line that only asks for the options, such as
``fsdptool --help``, then loads nothing of the search.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdptool.planning.candidate.estimator import predict
    from fsdptool.planning.hardware import load_gpu
    from fsdptool.planning.plan import (
        chosen_candidate,
        chosen_run,
        make_plan,
        plan_document,
        read_plan,
    )
    from fsdptool.planning.request.inputs import read_request
    from fsdptool.planning.request.options import Options

_HOMES = {
    "Options": "fsdptool.planning.request.options",
    "chosen_candidate": "fsdptool.planning.plan",
    "chosen_run": "fsdptool.planning.plan",
    "load_gpu": "fsdptool.planning.hardware",
    "make_plan": "fsdptool.planning.plan",
    "plan_document": "fsdptool.planning.plan",
    "predict": "fsdptool.planning.candidate.estimator",
    "read_plan": "fsdptool.planning.plan",
    "read_request": "fsdptool.planning.request.inputs",
}

__all__ = [
    "Options",
    "chosen_candidate",
    "chosen_run",
    "load_gpu",
    "make_plan",
    "plan_document",
    "predict",
    "read_plan",
    "read_request",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
