"""The table of optimizers: equal to the recipe's choices and the docs, and true to what torch keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from fsdptool.errors import ConfigError
from fsdptool.modeling.optimizer_costs import OPTIMIZERS, optimizer_class
from fsdptool.modeling.optimizer_costs.tensors import TrainedTensor
from fsdptool.records.recipe import Optimizer
from fsdptool.training.memory_meter import _SPAN, allocator_events, highest
from fsdptool.training.optimizers.sharded import ShardedOptimizer, build_optimizer

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md"
CHOICES = get_type_hints(Optimizer)
SHAPES = {"blocks.0.weight": (96, 64), "blocks.0.bias": (96,), "blocks.0.experts.up": (4, 32, 64)}


def test_the_table_has_the_recipes_choices() -> None:
    assert tuple(OPTIMIZERS) == get_args(CHOICES["name"])
    for name, spec in OPTIMIZERS.items():
        assert spec.name == name
        assert issubclass(optimizer_class(spec), ShardedOptimizer)
        assert set(spec.kernels) - {"own"} <= set(get_args(CHOICES["implementation"]))
        assert set(spec.update_bytes) == set(spec.kernels)


def test_the_docs_have_a_row_for_each() -> None:
    table = DOCS.read_text(encoding="utf-8").split("| `optimizer.name` |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert rows == list(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_as_large_as_the_table_says(name: str) -> None:
    spec, options = OPTIMIZERS[name], Optimizer(name=name, momentum=0.9)  # type: ignore[arg-type]
    parameters = {key: nn.Parameter(torch.randn(shape)) for key, shape in SHAPES.items()}
    optimizer = build_optimizer(options, parameters.items(), rate=1e-3)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(1e-3)
    kept: Any = {**optimizer.state_tensors(), **optimizer.own_tensors()}
    for key, shape in SHAPES.items():
        states = spec.states(options, TrainedTensor(key, shape, shape, 4), spec.kernel("auto"), False)
        actual = [t.nbytes for n, t in kept.items() if f"{key}/" in n and not n.endswith("/step")]
        steps = [t.nbytes for n, t in kept.items() if n.endswith(f"{key}/step")]
        assert sorted(states) in (sorted([*actual, *steps]), sorted(actual)), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kernel_the_optimizer_lacks_is_refused_by_the_table_and_the_trainer(name: str) -> None:
    for kernel in get_args(CHOICES["implementation"]):
        options = Optimizer(name=name, implementation=kernel)  # type: ignore[arg-type]
        named = {"blocks.0.weight": nn.Parameter(torch.zeros(4, 4))}
        if kernel == "auto" or kernel in OPTIMIZERS[name].kernels:
            build_optimizer(options, named.items(), rate=1e-3)
            continue
        with pytest.raises(ConfigError, match=f"has no {kernel} kernel"):
            build_optimizer(options, named.items(), rate=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "kernel"), [("adafactor", "auto"), ("adamw", "foreach"), ("adamw", "for_loop"), ("sgd", "fused")]
)
def test_an_update_takes_the_memory_that_the_table_says(name: str, kernel: str, dtype: torch.dtype) -> None:
    """Of many tensors: what is alive at once, not what each of them needs."""
    options = Optimizer(name=name, implementation=kernel, momentum=0.9)  # type: ignore[arg-type]
    shapes = {f"blocks.{index}.weight": (512, 384 + 64 * (index % 3)) for index in range(12)}
    named = [(key, nn.Parameter(torch.randn(shape, dtype=dtype))) for key, shape in shapes.items()]
    optimizer = build_optimizer(options, named, rate=1e-3)
    for step in range(2):
        for _, parameter in named:
            parameter.grad = torch.randn_like(parameter)
        with allocator_events() as events, record_function(f"{_SPAN}{step}"):
            optimizer.step(1e-3)
        optimizer.zero_grad()
    measured = highest(events)["1"]
    tensors = [TrainedTensor(key, shape, shape, dtype.itemsize) for key, shape in shapes.items()]
    spec = OPTIMIZERS[name]
    planned = sum(spec.temporaries(options, tensors, spec.kernel(kernel), False))
    assert abs(measured - planned) <= 0.1 * max(planned, tensors[0].bytes)
