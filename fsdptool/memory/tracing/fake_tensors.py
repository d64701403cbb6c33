"""A model and its micro-batch on fake tensors, and the conditions they are traced under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.records.run import RunPhase
from fsdptool.records.trace import Profile

if TYPE_CHECKING:
    from fsdptool.families.protocol import TensorSpec


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a micro-batch is computed.

    Attributes:
        profile: Whose kernels to assume.
        compute: ``param_dtype`` of the sharding, or None for the tensors' own.
        output: ``output_dtype`` of the sharding.
        inputs: What the model's floating inputs are cast to, or None.
        exact: Arguments of forward left out of that cast.
        teacher: Forward without gradients only.
        off_step: Forward without gradients as in validation or sampling, on the model that is trained.
        sharing: Ranks that share a sequence; rank 0 of them is traced, which sees it to its end.
        staged: Whether the backend of collectives inside the model copies what it sends.
        ring: Whether ranks that share a sequence pass keys and values round.
        uncast: Parameters FSDP does not manage: they keep the dtype they are stored in.
        master: dtype trainable parameters are stored in.
    """

    profile: Profile
    compute: torch.dtype | None
    output: torch.dtype | None = None
    inputs: torch.dtype | None = None
    exact: tuple[str, ...] = ()
    teacher: bool = False
    uncast: frozenset[str] = frozenset()
    master: torch.dtype | None = None
    off_step: RunPhase | None = None
    sharing: int = 1
    staged: bool = False
    ring: bool = False


def materialise(model: nn.Module, mode: Any, conditions: Conditions) -> None:
    """Swap every parameter and buffer for a fake CPU tensor, once per identity.

    ``to_empty`` would lose ties; building inside the fake mode fails on data-dependent
    initialisation (torch 2.13, transformers 5.23). Parameters take the dtype they compute in: the
    sharding's ``param_dtype``, but for those FSDP does not manage.

    Args:
        model: Built on meta, or partly on the CPU (some constructors ignore the device context).
        mode: The ``FakeTensorMode``.
        conditions: Precision.
    """
    fakes: dict[int, torch.Tensor] = {}
    kept = []
    with mode:
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in fakes:
                    fqn = f"{prefix}.{name}" if prefix else name
                    fake = torch.empty(
                        parameter.shape, dtype=_computed(fqn, parameter, conditions), device="cpu"
                    )
                    fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                    kept.append(parameter)
                module._parameters[name] = fakes[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in fakes:
                    fakes[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                    kept.append(buffer)
                module._buffers[name] = fakes[id(buffer)]


def _computed(fqn: str, parameter: torch.Tensor, conditions: Conditions) -> torch.dtype:
    if not parameter.is_floating_point():
        return parameter.dtype
    stored = parameter.dtype
    if parameter.requires_grad and conditions.master is not None:
        stored = conditions.master
    if fqn in conditions.uncast:
        return stored
    return conditions.compute or stored


def fake_batch(specs: Sequence[TensorSpec], mode: Any) -> dict[str, torch.Tensor]:
    """Return a micro-batch of fake tensors of the given shapes and dtypes.

    FSDP casts floating inputs itself (``cast_forward_inputs``), so they come as the data has them.
    """
    with mode:
        return {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
            for spec in specs
        }
