"""A model and its micro-batch on fake tensors: the conditions of a trace, and the values that are known.

Some models decide shapes by value: they cut captions to their masks' lengths or lay out windows from an
image's grid. The batch spec fixes those values, as synthetic training draws them. While
:class:`KnownValues` is entered, every small tensor that follows from them alone is computed for real
beside its fake, and the operators that ask for a value (``item``, ``nonzero``, a Boolean index) are
answered from it. Whatever depends on weights or activations stays unknown, and asking for it fails as
before, unless values are to be drawn for it: how many tokens a router sends to each expert is then as
random as in a model that has just been initialised.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from fsdptool.records.run import RunPhase
from fsdptool.records.trace import Profile

if TYPE_CHECKING:
    from fsdptool.families.protocol import TensorSpec


@dataclass(frozen=True, slots=True)
class MicroBatchConditions:
    """How a micro-batch is computed.

    Attributes:
        profile: Whose kernels to assume.
        compute: ``param_dtype`` of the sharding, or None for the tensors' own.
        autocast: What autocast computes in, where nothing is gathered in another dtype.
        output: ``output_dtype`` of the sharding.
        inputs: What the model's floating inputs are cast to, or None.
        exact: Arguments of forward left out of that cast.
        teacher: Forward without gradients only.
        off_step: Forward without gradients as in validation or sampling, on the model that is trained.
        sharing: Ranks that share a sequence; rank 0 of them is traced, which sees it to its end.
        ring: Whether ranks that share a sequence pass keys and values round.
        uncast: Parameters FSDP does not manage: they keep the dtype they are stored in.
        flash: Whether GPUs have flash attention.
        recipe: What traces share that differ in their micro-batch only, or in how many ranks divide layers
            or share out experts; empty where it is not known.
    """

    profile: Profile
    compute: torch.dtype | None
    output: torch.dtype | None = None
    inputs: torch.dtype | None = None
    exact: tuple[str, ...] = ()
    teacher: bool = False
    uncast: frozenset[str] = frozenset()
    off_step: RunPhase | None = None
    sharing: int = 1
    ring: bool = False
    flash: bool = True
    recipe: str = ""
    autocast: torch.dtype | None = None


def materialise(model: nn.Module, mode: Any, conditions: MicroBatchConditions) -> None:
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


def _computed(fqn: str, parameter: torch.Tensor, conditions: MicroBatchConditions) -> torch.dtype:
    if not parameter.is_floating_point():
        return parameter.dtype
    if fqn in conditions.uncast or conditions.compute is None:
        return parameter.dtype
    return conditions.compute


def fake_batch(specs: Sequence[TensorSpec], mode: Any) -> dict[str, torch.Tensor]:
    """Return a micro-batch of fake tensors of the given shapes and dtypes.

    FSDP casts floating inputs itself (``cast_forward_inputs``), so they come as the data has them.
    """
    with mode:
        return {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
            for spec in specs
        }


class FollowedValues(Enum):
    """Which values a trace follows.

    Attributes:
        NONE: None: shapes only.
        FIXED: Those that follow from the batch spec.
        DRAWN: These, and random ones for small tensors that depend on weights or activations.
    """

    NONE = "none"
    FIXED = "fixed"
    DRAWN = "drawn"


LARGEST = 1 << 20
"""Elements up to which a value is followed: index tensors are small, attention masks need no values."""

BY_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
_CONSTANTS = frozenset({"arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros"})
_FILLED = {"zeros_like": 0, "new_zeros": 0, "ones_like": 1, "new_ones": 1}
_FIXED = ("mask", "constant", "positions")
_ATTRIBUTE = "_fsdptool_value"


class _Listing(TorchFunctionMode):
    """Lets ``torch.tensor`` and formatted text take known scalars, which they read past dispatch modes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Turn scalars into numbers."""
        if func is torch.Tensor.__format__ and args and _is_scalar(args[0]):
            return format(args[0].item(), *args[1:])
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            args = (tree_map(_number, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _number(leaf: Any) -> Any:
    return leaf.item() if _is_scalar(leaf) else leaf


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) and not leaf.dim()


_NOT_COMPUTED = ("empty", "new_empty", "_varlen_attn", "_scaled_dot_product")
"""How operators begin whose values are unknown, or whose kernels only GPUs have."""


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows known values; enter it above the ``FakeTensorMode`` and below whatever records.

    Args:
        batch: The fake micro-batch.
        specs: What it is: integers, masks and constants are known, embeddings and noise are not.
        draw: Whether small floating-point tensors that depend on weights get values from a normal
            distribution. A router then sends tokens to experts at random, about as many to each. The
            draws depend on the operator and the shape only, so that equal layers, and a layer that is
            recomputed, draw alike.
    """

    def __init__(
        self, batch: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], *, draw: bool = False
    ) -> None:
        from fsdptool.families.synthetic import synthesise

        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw
        self._stale: dict[int, Any] = {}
        self._listing = _Listing()
        fixed = [spec for spec in specs if spec.fill in _FIXED or not batch[spec.name].is_floating_point()]
        with no_dispatch():
            drawn = synthesise(fixed, torch.Generator().manual_seed(0))
        for name, value in drawn.items():
            _attach(batch[name], value)

    def __enter__(self) -> KnownValues:
        """Follow values from here on."""
        self._listing.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        _LISTS.add(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        """Stop."""
        _LISTS.remove(self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._listing.__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on fakes, and on values where all of its tensors have one."""
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = func._overloadpacket.__name__
        known = (bool(inputs) or name in _CONSTANTS) and all(self.value(item) is not None for item in inputs)
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_NOT_COMPUTED):
            known = False
        try:
            out = func(*args, **kwargs)
        except BY_VALUE:
            if known or (self._draw and all(self._drawn(item) for item in inputs)):
                return tree_map(_imitated, self._computed(func, args, kwargs))
            if name == "bincount" and (length := kwargs.get("minlength", args[2] if len(args) > 2 else 0)):
                return args[0].new_empty(length, dtype=torch.long)
            indices = self._positions(args[1]) if name == "index" else None
            if indices is None:
                raise
            return func(args[0], indices)
        if known and _small(out):
            values = self._computed(func, args, kwargs)
            for fake, value in zip(_tensors(out), _tensors(values), strict=True):
                _attach(fake, value)
        else:
            if func._schema.is_mutable:
                self._forget(func, args, kwargs)
            if name in _FILLED or name in ("full_like", "new_full"):
                self._fill(name, args, kwargs, out)
            elif self._draw:
                for fake in _tensors(out):
                    _attach_drawn(fake, name)
        return out

    def _drawn(self, tensor: torch.Tensor) -> bool:
        """Give a tensor without a value a drawn one, and say whether it has a value now."""
        if self.value(tensor) is None:
            _attach_drawn(tensor, "")
        return self.value(tensor) is not None

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what a tensor holds, or None if that is not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" and tensor.numel() <= LARGEST else None
        value: torch.Tensor | None = getattr(tensor, _ATTRIBUTE, None)
        if value is not None and value.untyped_storage()._cdata in self._stale:
            return None
        return value

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(leaf: Any) -> Any:
            return self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf

        real_args, real_kwargs = tree_map(real, (args, kwargs))
        with no_dispatch():
            return func(*real_args, **real_kwargs)

    def _positions(self, indices: Sequence[Any]) -> list[Any] | None:
        """Return indices with Boolean ones turned into the positions they select; None if unknown."""
        positions: list[Any] = []
        for index in indices:
            if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
                continue
            value = self.value(index)
            if value is None:
                return None
            with no_dispatch():
                columns = value.nonzero().unbind(1)
            positions += [_imitated(column) for column in columns]
        return positions

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Let go of every value that shares memory with a tensor that something unknown is written to."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = kwargs.get(argument.name, args[position] if position < len(args) else None)
            for tensor in _tensors(written):
                value = self.value(tensor)
                if value is not None:
                    # The storage is kept so that no other can take its address.
                    self._stale[value.untyped_storage()._cdata] = value.untyped_storage()

    def _fill(self, name: str, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        """Note the value of a tensor that copies another's shape, not its contents."""
        if not _small(out):
            return
        value = _FILLED.get(name)
        if value is None:
            value = kwargs.get("fill_value", args[2 if name == "new_full" else 1])
        with no_dispatch():
            _attach(out, torch.full(tuple(out.shape), value, dtype=out.dtype))


class _Lists:
    """Lists known values at once while they are followed: torch asks for each element by its own operators.

    ``FakeTensor.tolist`` belongs to the whole process. It is replaced by the first of several traces that
    overlap, nested or in threads, and restored by the last.
    """

    def __init__(self) -> None:
        self._entered: list[KnownValues] = []
        self._before = FakeTensor.tolist

    def add(self, known: KnownValues) -> None:
        """Count the values of one more trace."""

        def tolist(fake: FakeTensor) -> Any:
            return self._listed(fake)

        if not self._entered:
            self._before = FakeTensor.tolist
            FakeTensor.tolist = tolist  # type: ignore[method-assign, assignment]
        self._entered.append(known)

    def remove(self, known: KnownValues) -> None:
        """Count them no longer."""
        self._entered.remove(known)
        if not self._entered:
            FakeTensor.tolist = self._before  # type: ignore[method-assign]

    def _listed(self, fake: FakeTensor) -> Any:
        """Return the elements of a tensor; a value counts until any trace writes something else over it."""
        values = [known.value(fake) for known in self._entered]
        value = values[0] if values else None
        if value is None or any(other is None for other in values):
            return self._before(fake)
        with no_dispatch():
            return value.tolist()


_LISTS = _Lists()


def _attach(fake: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(fake, FakeTensor):
        setattr(fake, _ATTRIBUTE, value)


def _attach_drawn(fake: torch.Tensor, operator: str) -> None:
    """Draw a value for a small floating-point tensor; leave any other without."""
    if not fake.is_floating_point() or fake.numel() > LARGEST:
        return
    shape, strides = tuple(fake.shape), fake.stride()
    seed = zlib.crc32(f"{operator} {shape}".encode())
    with no_dispatch():
        value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(fake.dtype)
        if not any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True)):
            # The layout decides which views there may be.
            value = torch.empty_strided(shape, strides, dtype=fake.dtype).copy_(value)
        _attach(fake, value)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def _small(tree: Any) -> bool:
    return all(_held(tensor) <= LARGEST and tensor.device.type == "cpu" for tensor in _tensors(tree))


def _held(tensor: torch.Tensor) -> int:
    """Return the elements that a tensor holds: those that it repeats (``expand``) count once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sides if stride or not size)


def _imitated(value: Any) -> Any:
    """Return a fake of a tensor that holds its value; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    _attach(fake, value)
    return fake
