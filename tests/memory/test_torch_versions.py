"""What versions of torch do differently: each form gives the same record, or the same model."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, _common_utils, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import flop_registry

from fsdptool.distributed.shard import accept_integers
from fsdptool.memory.tracing.fake_tensors import KnownValues
from fsdptool.memory.tracing.module_hooks import grad_tensors, with_grad_tensors
from fsdptool.memory.tracing.operators import operation_of


class Pair(NamedTuple):
    """A nested output."""

    first: Any
    second: Any


@pytest.mark.parametrize("helpers", ["present", "absent"])
def test_tensors_with_gradients_are_found_and_replaced(helpers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if helpers == "absent":  # torch 2.11
        monkeypatch.delattr(_common_utils, "collect_grad_tensors", raising=False)
        monkeypatch.delattr(_common_utils, "replace_grad_tensors", raising=False)
    with_grad = [torch.ones(1, requires_grad=True) for _ in range(3)]
    tree = ({"a": with_grad[0], "b": torch.ones(1)}, Pair(with_grad[1], [with_grad[2], "text"]))
    found = grad_tensors(tree)
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in with_grad]
    substitutes = [tensor + 1 for tensor in found]
    replaced = with_grad_tensors(tree, iter(substitutes))
    assert replaced[0]["a"] is substitutes[0] and replaced[0]["b"] is tree[0]["b"]
    assert isinstance(replaced[1], Pair) and replaced[1].second == [substitutes[2], "text"]


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_counts_what_torch_counts_for_equal_heads(kernel: str) -> None:
    """torch 2.11's own formula refuses grouped queries; where it applies, both agree."""
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
    query, key = torch.empty(2, 4, 6, 16, device="meta"), torch.empty(2, 4, 10, 16, device="meta")
    value = torch.empty(2, 4, 10, 8, device="meta")
    out = torch.empty(2, 4, 6, 8, device="meta")
    shapes: list[Any] = [tensor.shape for tensor in (query, key, value)]
    for operator, arguments, shaped in (
        (forward, [query, key, value], shapes),
        (backward, [out, query, key, value], [out.shape, *shapes]),
    ):
        counted = operation_of(operator.default, arguments, {}, out, 0)
        formula: Any = flop_registry[operator]
        assert counted is not None
        assert counted.flops == getattr(formula, "__wrapped__", formula)(*shaped, out_val=out)


def test_grouped_queries_cost_what_equal_heads_do() -> None:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.empty(1, 8, 32, 16, device="meta")
    grouped, full = (torch.empty(1, heads, 32, 16, device="meta") for heads in (2, 8))
    few = operation_of(kernel, [query, grouped, grouped], {}, query, 0)
    many = operation_of(kernel, [query, full, full], {}, query, 0)
    assert few is not None and many is not None
    assert few.flops == many.flops == 4 * 8 * 32 * 32 * 16


def test_a_count_of_known_length_needs_no_values() -> None:
    """transformers counts the tokens of each expert; their number decides the length, not the tokens."""
    mode = FakeTensorMode()
    with mode:
        chosen = torch.empty(64, dtype=torch.long)
    with mode, KnownValues({}, []):
        counts = torch.bincount(chosen, minlength=8)
    assert counts.shape == (8,) and counts.dtype == torch.long


class Quantised(nn.Module):
    """A product whose weight is made of a trained part and a frozen part of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(16, dtype=torch.int8).view(8, 2), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(8, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert (self.codes.dtype, self.weight.dtype) == (torch.int8, torch.bfloat16)
        assert self.codes.flatten().tolist() == list(range(16))
        return inputs @ (self.weight * self.codes.to(inputs.dtype)).T


@pytest.mark.parametrize("version", [torch.__version__, "2.11.0"])
def test_integer_parameters_are_sharded_and_never_cast(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Set to what they are, so that what torch 2.11 needs is undone after the test.
    monkeypatch.setattr(_fsdp_param, "nn", _fsdp_param.nn)
    monkeypatch.setattr(_fsdp_param.FSDPParam, "init_dtype_attrs", _fsdp_param.FSDPParam.init_dtype_attrs)
    monkeypatch.setattr(torch, "__version__", version)
    accept_integers()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        made = fully_shard(Quantised(), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        assert isinstance(made, FSDPModule)
        model: Any = made
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
    finally:
        dist.destroy_process_group()
    codes, weight = (model.get_parameter(name) for name in ("codes", "weight"))
    assert codes.dtype == torch.int8 and not codes.requires_grad and codes.grad is None
    assert weight.grad is not None and weight.grad.dtype == torch.float32
