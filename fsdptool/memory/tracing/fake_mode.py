"""torch's fake mode, as a trace needs it: nothing compiled, no symbols, the same operators over and over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def _uncached() -> frozenset[Any] | None:
    """Return what torch answers without its cache (most are questions about a tensor), or None if unknown.

    torch 2.11 to 2.15 keep these operators under two private names.
    """
    handlers = getattr(fake_tensor, "_DISPATCH_META_HANDLERS", None)
    direct = getattr(fake_tensor, "_DISPATCH_HANDLE_DIRECTLY", None)
    return None if handlers is None or direct is None else frozenset((*handlers, *direct))


_UNCACHED = _uncached()

_ATEN = torch.ops.aten
_UNSAFE_VIEW, _VIEW = _ATEN._unsafe_view.default, _ATEN.view.default
_SLICE, _SELECT = _ATEN.slice.Tensor, _ATEN.select.int

_RELATIVE_VIEWS = frozenset(
    {
        _SLICE,
        _SELECT,
        _VIEW,
        _UNSAFE_VIEW,
        _ATEN.alias.default,
        _ATEN.detach.default,
        _ATEN.expand.default,
        _ATEN.permute.default,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.t.default,
        _ATEN.transpose.int,
        _ATEN.unsqueeze.default,
    }
)
"""Views that begin where their argument begins in its memory, or a fixed number of elements later."""


@dataclass(slots=True)
class KnownCall:
    """What one operator returns for one set of arguments, whichever tensors these are.

    Attributes:
        operator: The operator, which is kept so that its address stays its own.
        outputs: What torch's cache says of each output, and where a view begins in its argument's memory.
        several: Whether it returns a tuple.
        costs: What whoever records the call has computed from the same arguments.
    """

    operator: Any
    outputs: tuple[tuple[Any, int], ...]
    several: bool
    costs: dict[Any, Any] = field(default_factory=dict)


class TracingMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that finds torch's cached answers by keys that cost less.

    torch 2.13 describes each argument by 17 properties, several of them computed in Python
    (``TensorMetadata``); on a hit that costs more than the answer. Most of these properties follow from the
    few that are read here, so equal arguments here are equal there, and the key made for the first call
    serves the others, of later traces too. Calls with anything unusual (sparse or complex tensors, constants,
    real tensors) go to torch unchanged.
    """

    _known_keys: ClassVar[dict[tuple[Any, ...], Any]] = {}
    _answers: ClassVar[dict[tuple[Any, ...], KnownCall | None]] = {}
    _kept: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap each call in a guard against its compiler.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run one operator on fake tensors."""
        if func is _UNSAFE_VIEW:
            # What it returns shares the memory, as a view does; torch 2.13 keeps the answers of views alone.
            func = _VIEW
        if _UNCACHED is None or func in _UNCACHED or not self.cache_enabled:
            return self.dispatch(func, types, args, kwargs or {})
        return self._cached_dispatch_impl(func, types, args, kwargs or {})

    def asked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, int] | None:
        """Return what the answer to a call depends on, and by how many elements a view begins later.

        Where tensors begin in their memory decides where their views do, and nothing else: the chunks of a
        loop have one answer, where torch's cache has one for each.

        Returns:
            A key for :meth:`recall` and :meth:`note`, and the elements; None where only torch can tell.
        """
        if _UNCACHED is None or not self.cache_enabled:
            return None
        kept = self._kept.get(id(func))
        if kept is None:
            usual = func not in _UNCACHED and (not func.is_view or func in _RELATIVE_VIEWS)
            kept = self._kept[id(func)] = func if usual else _UNCACHED
        if kept is _UNCACHED:
            return None
        later = 0
        if func is _SLICE or func is _SELECT:
            relative = _from_the_first(func, args)
            if relative is None:
                return None
            args, later = relative
        key = self._short(func, args, kwargs, placed=False)
        return None if key is None else (key, later)

    def recall(self, key: Any) -> KnownCall | None:
        """Return the answer to a call of :meth:`asked` if it was noted."""
        return self._answers.get(key)

    def note(self, key: Any, later: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the answer to a call that torch has just given, if it describes tensors of the usual kind.

        Args:
            key, later: Of :meth:`asked`, before the call.
            func, args, kwargs: The call.
        """
        if key in self._answers:
            return
        short = self._short(_VIEW if func is _UNSAFE_VIEW else func, args, kwargs)
        torchs = self._known_keys.get(short) if short is not None else None
        entry: Any = FakeTensorMode.cache.get(torchs) if torchs is not None else None
        found = getattr(entry, "output_infos", ())
        if not found or not all(self._is_usual(output) for output in found):
            self._answers[key] = None
            return
        outputs = tuple(
            (output, 0)
            if output.view_idx is None
            else (output, output.metadata.storage_offset - args[output.view_idx].storage_offset() - later)
            for output in found
        )
        self._answers[key] = KnownCall(func, outputs, entry.is_output_tuple)

    def answered(self, answer: KnownCall, later: int, args: Sequence[Any]) -> Any:
        """Return what an operator returns, without calling it."""
        made = [
            self._made(
                found,
                args,
                begin if found.view_idx is None else args[found.view_idx].storage_offset() + begin + later,
            )
            for found, begin in answer.outputs
        ]
        return tuple(made) if answer.several else made[0]

    def _short(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, placed: bool = True
    ) -> tuple[Any, ...] | None:
        """Return what torch's key of a call follows from, or None; ``placed``: with where tensors begin."""
        # The address of an operator: torch computes the hash of one in Python.
        parts: list[Any] = [
            id(func),
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        if not self._describe(parts, args, placed):
            return None
        if kwargs:
            if not self._describe(parts, kwargs.values(), placed):
                return None
            parts.extend(kwargs)
        return tuple(parts)

    def _is_usual(self, entry: Any) -> bool:
        found = entry.metadata
        if entry.inplace_idx is not None:
            return True
        return (
            found is not None
            and found.layout is torch.strided
            and not found.is_conj
            and not found.is_neg
            and self.shape_env is None
        )

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        short = self._short(func, args, kwargs)
        if short is None:
            return super()._cache_key(state, func, args, kwargs)
        key = self._known_keys.get(short)
        if key is None:
            key = self._known_keys[short] = super()._cache_key(state, func, args, kwargs)
        return key

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, *call: Any) -> Any:
        """Make the output that an answer describes, in one step where torch 2.13 takes several.

        ``call`` is the operator and its arguments; torch 2.15 passes the arguments alone.
        """
        if not self._is_usual(entry):
            return super()._get_output_tensor_from_cache_entry(state, entry, key, *call)
        return self._made(entry, call[-1], 0 if entry.metadata is None else entry.metadata.storage_offset)

    def _made(self, entry: Any, args: Sequence[Any], begin: int) -> Any:
        """Return the output that torch's cache describes; a view begins at element ``begin`` of its memory.

        Apart from its device, every new fake tensor has the same attributes: those of the first one are
        copied.
        """
        if entry.inplace_idx is not None:
            return args[entry.inplace_idx]
        found = entry.metadata
        shape, stride = found.shape, found.stride
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(
                shape, stride, dtype=found.dtype, device="meta", requires_grad=found.requires_grad
            )
            if entry.view_idx is not None:
                # A view is of its argument's memory.
                empty.set_(args[entry.view_idx].untyped_storage(), begin, shape, stride)
        attributes = self._attributes.get(found.device)
        if attributes is None:
            output = FakeTensor(self, empty, found.device)
            self._attributes[found.device] = dict(vars(output))
            return output
        output = torch.Tensor._make_subclass(
            FakeTensor,
            empty,
            found.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=found.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(output)
        output.__dict__.update(attributes)
        return output

    def _describe(self, parts: list[Any], arguments: Iterable[Any], placed: bool) -> bool:
        """Append what tells arguments apart; return whether that is all there is to say of them."""
        for argument in arguments:
            kind = type(argument)
            if kind is FakeTensor:
                dtype = argument.dtype
                if (
                    argument.fake_mode is not self
                    or argument.constant is not None
                    or argument.layout is not torch.strided
                    or dtype.is_complex
                    or argument.is_neg()
                    or argument.is_inference()
                ):
                    return False
                parts += (
                    kind,
                    dtype,
                    argument.shape,
                    argument.stride(),
                    argument.storage_offset() if placed else None,
                    argument.untyped_storage().nbytes(),
                    argument.requires_grad,
                    argument.fake_device,
                )
            elif kind in _PLAIN:
                parts += (kind, argument)
            elif kind is list or kind is tuple:
                parts += (kind, len(argument))
                if not self._describe(parts, argument, placed):
                    return False
            else:
                return False
        return True


def _from_the_first(func: Any, args: Sequence[Any]) -> tuple[Sequence[Any], int] | None:
    """Return what a slice or selection takes but for where it begins, and the elements before that.

    None for anything but whole numbers and a step of 1.
    """
    tensor, dim = args[0], args[1] if len(args) > 1 else 0
    size, stride = tensor.shape[dim], tensor.stride(dim)
    if func is _SELECT:
        index = args[2]
        if type(index) is not int or not -size <= index < size:
            return None
        return (tensor, dim), index % size * stride
    start, end = (args[place] if len(args) > place else None for place in (2, 3))
    if not {type(start), type(end)} <= {int, type(None)} or len(args) > 4:
        return None
    first, last, _ = slice(start, end).indices(size)
    return (tensor, dim, max(last - first, 0)), first * stride
