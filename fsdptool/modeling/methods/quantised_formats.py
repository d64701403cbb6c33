"""Formats of a frozen weight: codes and scales by row, so that any cut between rows is exact.

FSDP2 cuts parameters along dimension 0. Every format here keeps the scales of a row in that row, so
a shard's scales are its own and no block of weights straddles two ranks. Both parts are stored as
integers: torch 2.13 casts floating parameters to the policy's dtype when it gathers them
(``FSDPParam.init_dtype_attrs``), which would round scales, and leaves integers alone.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fsdptool.errors import ConfigError
from fsdptool.families.bases.families import quiet

Format = Literal["nf4", "int8", "float8"]

BLOCK = 64
"""Weights that share a scale in nf4 (Dettmers et al. 2023, QLoRA, section 3)."""

_LARGEST = {"int8": 127.0, "float8": 448.0}
"""Largest code: symmetric int8, and ``float8_e4m3fn``."""

_AT_ONCE = {"cpu": 1 << 16}
_AT_ONCE_ELSEWHERE = 1 << 22
"""Weights encoded at a time: encoders make several fp32 and int32 copies. Pieces are small on the CPU,
where the C allocator keeps holes that larger ones leave between the codes."""

Part = tuple[tuple[int, ...], torch.dtype]

_LIBRARY: Any = torch.library.Library("fsdptool", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("decode_nf4(Tensor codes, Tensor scales, SymInt[] shape, ScalarType dtype) -> Tensor")


@torch.library.impl(_LIBRARY, "decode_nf4", "Meta")
def _decoded_shape(
    codes: torch.Tensor, scales: torch.Tensor, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Answer for bitsandbytes' kernel on tensors without values, so that a plan does not need the library."""
    return torch.empty(shape, dtype=dtype, device="meta")


def suits(format: Format, columns: int) -> bool:
    """Return whether rows of this length can be held in the format."""
    return columns % BLOCK == 0 if format == "nf4" else columns > 0


def parts(format: Format, rows: int, columns: int) -> tuple[Part, Part]:
    """Return shape and dtype of the codes and of the scales of a ``rows`` x ``columns`` weight.

    nf4: two codes to a byte, one scale for each 64 weights of a row: 4.5 bits per weight. int8 and
    float8: one byte per weight, one scale per row. Scales are the bits of fp32 numbers, as int32
    (no collective backend of torch 2.13 sends 16-bit integers).
    """
    if format == "nf4":
        return ((rows, columns // 2), torch.uint8), ((rows, columns // BLOCK), torch.int32)
    return ((rows, columns), torch.int8 if format == "int8" else torch.uint8), ((rows,), torch.int32)


def empty_parts(
    format: Format, rows: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised codes and scales."""
    codes, scales = parts(format, rows, columns)
    return (
        torch.empty(codes[0], dtype=codes[1], device=device),
        torch.empty(scales[0], dtype=scales[1], device=device),
    )


def encode(
    format: Format, weight: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows of a weight where they are.

    Args:
        format: A format that suits the rows' length.
        weight: (rows, columns), floating.
        into: Codes and scales to fill, on the weight's device; None makes them.

    Returns:
        Codes and scales, as :func:`parts` says. nf4 rounds to the nearest of its sixteen levels times
        the block's largest magnitude; int8 and float8 to the nearest multiple of, or float8 number
        times, the row's largest magnitude over 127 or 448, rounded up to bf16.
    """
    rows, columns = weight.shape
    codes, scales = into if into is not None else empty_parts(format, rows, columns, weight.device)
    step = max(_AT_ONCE.get(weight.device.type, _AT_ONCE_ELSEWHERE) // max(columns, 1), 1)
    for first in range(0, rows, step):
        some = weight[first : first + step].float()
        encoded = _encode_blocks(some) if format == "nf4" else _encode_rows(format, some)
        codes[first : first + step] = encoded[0]
        scales[first : first + step] = encoded[1]
    return codes, scales


def decode(format: Format, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of whole codes and scales in ``dtype``; the only memory it takes is the result's.

    (But for fp64 from nf4, which passes through fp32: bitsandbytes 0.50 has no fp64 kernel.)
    """
    if format == "nf4":
        return _decode_blocks(codes, scales, dtype)
    factors = scales.view(torch.float32).to(dtype).unsqueeze(1)
    if format == "int8":
        # One pass: integers are promoted to the factors' dtype inside the kernel.
        return torch.mul(codes, factors)
    return codes.view(torch.float8_e4m3fn).to(dtype).mul_(factors)


def _encode_rows(format: Format, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = _LARGEST[format]
    exact = weight.abs().amax(dim=1) / largest
    # A scale is a bf16 number, exact in every dtype the product may have, and rounded up, so that no
    # code exceeds the largest: one bit pattern further is the next larger positive number.
    near = exact.to(torch.bfloat16).view(torch.int16)
    scales = (near + (near.view(torch.bfloat16).float() < exact)).view(torch.bfloat16).float()
    scaled = weight / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
    if format == "int8":
        return scaled.round_().to(torch.int8), scales.view(torch.int32)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.int32)


def _encode_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_format("nf4")
    load_kernels()
    rows, columns = weight.shape
    codes, scales = torch.ops.bitsandbytes.quantize_4bit(weight.contiguous(), BLOCK, "nf4", torch.uint8)
    return codes.view(rows, columns // 2), scales.view(rows, columns // BLOCK).view(torch.int32)


def _decode_blocks(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shape = (codes.shape[0], codes.shape[1] * 2)
    kernel = torch.float32 if dtype == torch.float64 else dtype
    flat = scales.view(torch.float32).view(-1)
    weight: torch.Tensor
    if codes.is_meta or isinstance(codes, FakeTensor):
        weight = torch.ops.fsdptool.decode_nf4(codes, flat, shape, kernel)
    else:
        check_format("nf4")
        load_kernels()
        weight = torch.ops.bitsandbytes.dequantize_4bit(codes, flat, BLOCK, "nf4", shape, kernel)
    return weight.to(dtype)


def check_format(base: str) -> None:
    """Refuse the format of a base whose kernels are not installed.

    Raises:
        ConfigError: nf4 without bitsandbytes. The other formats need torch alone.
    """
    if base == "nf4" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            "method.lora.base: nf4 needs bitsandbytes, which is not installed",
            help="pip install bitsandbytes, or use int8 or float8, which need torch alone",
        )


@cache
def load_kernels() -> None:
    """Register bitsandbytes' operators, which importing it does; nothing where it is not installed.

    Call it before peft is imported, which imports bitsandbytes, too: on CPUs 0.50 logs a line that asks
    for another package's inference kernel, and this leaves it out.
    """
    if find_spec("bitsandbytes") is None:
        return
    with quiet("bitsandbytes"):
        import bitsandbytes  # noqa: F401
