"""Planning: the hardware catalogue, estimates of configurations, the search, suggestions. Torch-free."""

from fsdptool.planning.compare import check_plan
from fsdptool.planning.estimator import predict
from fsdptool.planning.hardware import load_gpu
from fsdptool.planning.options import Options
from fsdptool.planning.plan import (
    chosen_candidate,
    chosen_run,
    make_plan,
    plan,
    plan_document,
    read_plan,
    search,
)
from fsdptool.planning.request import read_request
from fsdptool.records.plan import PlanInputs

__all__ = [
    "Options",
    "PlanInputs",
    "check_plan",
    "chosen_candidate",
    "chosen_run",
    "load_gpu",
    "make_plan",
    "plan",
    "plan_document",
    "predict",
    "read_plan",
    "read_request",
    "search",
]
