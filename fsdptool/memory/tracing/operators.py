"""What one operator costs: its FLOPs, the bytes it moves, and what decides how fast its kernel runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from fsdptool.records.trace import Operation, Profile

_HALF = (torch.float16, torch.bfloat16)

_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
)
"""Operators that allocate and launch no kernel."""

_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})
"""Operators that read as many elements of their first argument as they return."""

_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"})
"""In-place operators that do not read what they write to."""

_ATTENTION = frozenset(
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
)
"""Attention operators: query, key and value come first, in backward after the gradient of the output."""

_VARLEN, _VARLEN_BACKWARD = "_varlen_attn", "_varlen_attn_backward"
"""Attention of packed documents: [tokens, heads, head size], and where documents begin."""


_CONTIGUOUS = {
    "_softmax": 1,
    "_log_softmax": 1,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
    "native_layer_norm": 1,
    "native_layer_norm_backward": 2,
    "_fused_rms_norm": 1,
    "_fused_rms_norm_backward": 2,
    "embedding_dense_backward": 1,
}
"""Operators whose kernels copy their first arguments, of this number, unless they are contiguous."""

_IN_FP32 = frozenset({"mean", "scatter_add", "scatter_add_"})
"""Operators for which the CPU copies a 16-bit first argument to fp32."""

_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "convolution": 0}
"""Place of the first factor of each matrix product or convolution; the second one follows."""


class MixedDtypesError(RuntimeError):
    """A product or convolution whose factors have two dtypes; ``what`` says which of them."""

    def __init__(self, what: str, left: Any, right: Any) -> None:
        super().__init__(f"a {what} of {left} and {right}")
        self.what = what


def check_factors(func: Any, args: Sequence[Any]) -> None:
    """Refuse a product or convolution of two dtypes, as kernels do and fake tensors do not (torch 2.13).

    Raises:
        MixedDtypesError: The factors differ, as where a model computes in fp32 with weights in bfloat16.
    """
    place = _FACTORS.get(func._overloadpacket.__name__)
    if place is None:
        return
    left, right = args[place], args[place + 1]
    if left.dtype != right.dtype:
        what = "convolution" if func._overloadpacket.__name__ == "convolution" else "matrix product"
        raise MixedDtypesError(what, left.dtype, right.dtype)


def launches(func: Any) -> bool:
    """Return whether an operator that returns new or changed memory runs a kernel."""
    return func._overloadpacket.__name__ not in _ALLOCATIONS


def copied_bytes(func: Any, args: Sequence[Any], profile: Profile) -> int:
    """Return the bytes that a kernel allocates besides its results and frees before it returns.

    Fake tensors do not show these copies. In torch 2.13 the kernels of CPUs and of CUDA begin with
    ``contiguous()`` or ``expect_contiguous()`` (``SoftMax.cpp``, ``SoftMax.cu``, ``layer_norm.cpp``,
    ``layer_norm_kernel.cu``, ``Embedding.cpp``, ``Embedding.cu``). The CPU averages and scatters 16-bit
    numbers in fp32, in a copy of what it reads or adds to (``mean`` in ``ReduceOps.cpp``,
    ``create_acc_buffer`` in ``ScatterGatherKernel.cpp``); CUDA converts them one by one.

    Args:
        func: The operator.
        args: Its positional arguments.
        profile: Whose kernels are meant.
    """
    name = func._overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_backward" and profile == "cuda":
        return _flash_workspace(args[1], args[2])
    if name == _VARLEN_BACKWARD and profile == "cuda":
        return _packed_workspace(args[1], args[2], documents=args[6].shape[0] - 1)
    if name in _IN_FP32 and profile != "cuda" and args[0].dtype in _HALF:
        return int(args[0].numel()) * 4
    inputs = args[: _CONTIGUOUS.get(name, 0)]
    return sum(leaf.numel() * leaf.element_size() for leaf in inputs if not leaf.is_contiguous())


def _flash_workspace(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the bytes of flash attention's own buffers in backward.

    The gradient of the queries adds up in fp32, in rounded shapes; so does a number per query; gradients of
    keys and values have all query heads before they are summed over the groups (torch 2.13,
    ``flash_attn/flash_api.cpp``, ``mha_bwd``).

    Args:
        query: [B, heads, positions, D].
        key: [B, key heads, positions, D].
    """
    batch, heads, length, size = query.shape
    rounded = -(-length // 128) * 128
    sums = batch * heads * rounded * (-(-size // 32) * 32 + 1) * 4
    if key.shape[1] == heads:
        return sums
    return sums + 2 * batch * key.shape[2] * heads * size * key.element_size()


def _packed_workspace(query: torch.Tensor, key: torch.Tensor, documents: int) -> int:
    """Return the same for packed documents [tokens, heads, D], each of which may be rounded up
    (``mha_varlen_bwd``)."""
    tokens, heads, size = query.shape
    rounded = tokens + 128 * documents
    sums = heads * rounded * (-(-size // 32) * 32 + 1) * 4
    return sums if key.shape[1] == heads else sums + 2 * key.shape[0] * heads * size * key.element_size()


def operation_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, moved: int
) -> Operation | None:
    """Return the matrix product or attention kernel that an operator is; None for every other.

    FLOPs are those of torch's own formulas, and of our own where it lacks one (``torch/utils/
    flop_counter.py``: none for the CPU's flash kernel and for grouped products in 2.13, and that of
    2.11 refuses grouped-query attention). As there, causal attention counts whole.

    Args:
        func: The operator.
        args, kwargs: Its arguments.
        out: What it returned.
        moved: Bytes it reads and writes.
    """
    packet = func._overloadpacket
    name = packet.__name__
    backward = "backward" in name
    if name in (_VARLEN, _VARLEN_BACKWARD):
        return _packed_operation(args, backward=backward, moved=moved)
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        flops = _grouped(args[0], args[1], out)
    elif name in _ATTENTION:
        flops = _attention(*args[:3])
    elif name.removesuffix("_backward") in _ATTENTION:
        flops = _attention_backward(*args[1:4])
    elif (formula := _formulas().get(packet)) is not None:
        flops = float(formula(*args, **kwargs, out_val=out))
    else:
        return None
    dtype = str(args[0].dtype).removeprefix("torch.") if isinstance(args[0], torch.Tensor) else "float32"
    if "attention" not in name:
        return Operation("product", dtype, flops, moved)
    query = args[1] if backward else args[0]
    lengths = query.shape[-2] if name.startswith("_scaled_dot_product") else query.shape[-3]
    return Operation(
        "attention_backward" if backward else "attention",
        dtype,
        flops,
        moved,
        head_size=query.shape[-1],
        queries=lengths,
        causal=bool(_argument(func, args, kwargs, "is_causal")),
        fused="efficient" not in name,
    )


def _packed_operation(args: Sequence[Any], *, backward: bool, moved: int) -> Operation:
    """Return attention of packed documents as attention of as many equally long sequences."""
    query, key, value = args[1:4] if backward else args[:3]
    rows = args[6 if backward else 3].shape[0] - 1
    # [documents, heads, positions, D], of which only shapes are read.
    shaped = [part.unflatten(0, (rows, -1)).transpose(1, 2) for part in (query, key, value)]
    return Operation(
        "attention_backward" if backward else "attention",
        str(query.dtype).removeprefix("torch."),
        (_attention_backward if backward else _attention)(shaped[0], shaped[1], shaped[2]),
        moved,
        head_size=query.shape[-1],
        queries=query.shape[0] // rows,
        causal=True,
    )


def traffic(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, outputs: Sequence[torch.Tensor]
) -> int:
    """Return the bytes read and written, each tensor's elements counted once.

    Broadcast inputs count as stored; lookups read what they return.
    """
    name = func._overloadpacket.__name__
    written = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
    inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in _LOOKUPS:
        return 2 * written + sum(_stored(leaf) for leaf in inputs[1:])
    if name in _OVERWRITES:
        inputs = inputs[1:]
    return written + sum(_stored(leaf) for leaf in inputs)


def _stored(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[position] if position < len(args) else argument.default_value)
    return None


@cache
def _formulas() -> dict[Any, Any]:
    from torch.utils.flop_counter import flop_registry

    return dict(flop_registry)


def _grouped(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    """Every row meets one group's matrix; of two matrices (weight gradients) the rows are summed over."""
    if left.dim() == right.dim() == 2:
        return 2.0 * left.numel() * right.shape[-1]
    return 2.0 * out.numel() * left.shape[-1]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Two products over heads x queries x keys (Dao et al. 2022)."""
    queries = prod(query.shape[:-1])
    return 2.0 * queries * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Five products: the scores again, then the gradients of scores, values, queries and keys."""
    queries = prod(query.shape[:-1])
    return 2.0 * queries * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])
