"""torch's fake mode, as a trace needs it: nothing compiled, no symbols, the same operators over and over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

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

_UNSAFE_VIEW, _VIEW = torch.ops.aten._unsafe_view.default, torch.ops.aten.view.default


class TracingMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that finds torch's cached answers by keys that cost less.

    torch 2.13 describes each argument by 17 properties, several of them computed in Python
    (``TensorMetadata``); on a hit that costs more than the answer. Most of these properties follow from the
    few that are read here, so equal arguments here are equal there, and the key made for the first call
    serves the others, of later traces too. Calls with anything unusual (sparse or complex tensors, constants,
    real tensors) go to torch unchanged.
    """

    _known_keys: ClassVar[dict[tuple[Any, ...], Any]] = {}

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

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        parts: list[Any] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        if not (self._describe(parts, args) and self._describe(parts, kwargs.values())):
            return super()._cache_key(state, func, args, kwargs)
        parts.extend(kwargs)
        short = tuple(parts)
        key = self._known_keys.get(short)
        if key is None:
            key = self._known_keys[short] = super()._cache_key(state, func, args, kwargs)
        return key

    def _get_output_tensor_from_cache_entry(
        self, state: Any, entry: Any, key: Any, *call: Any
    ) -> FakeTensor | None:
        """Make the output that an answer describes, in one step where torch 2.13 takes several.

        Apart from its device, every new fake tensor has the same attributes: those of the first one are
        copied. ``call`` is the operator and its arguments; torch 2.15 passes the arguments alone.
        """
        found = entry.metadata
        if (
            entry.inplace_idx is not None
            or found is None
            or found.layout is not torch.strided
            or found.is_conj
            or found.is_neg
            or self.shape_env is not None
        ):
            return super()._get_output_tensor_from_cache_entry(state, entry, key, *call)
        attributes = self._attributes.get(found.device)
        if attributes is None:
            output = super()._get_output_tensor_from_cache_entry(state, entry, key, *call)
            self._attributes[found.device] = dict(vars(output))
            return output
        shape, stride = found.shape, found.stride
        with in_kernel_invocation_manager(self):
            empty = torch.empty_strided(
                shape, stride, dtype=found.dtype, device="meta", requires_grad=found.requires_grad
            )
            if entry.view_idx is not None:
                # A view is of its argument's memory.
                empty.set_(call[-1][entry.view_idx].untyped_storage(), found.storage_offset, shape, stride)
        output = torch.Tensor._make_subclass(
            FakeTensor,
            empty,
            empty.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=found.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(output)
        output.__dict__.update(attributes)
        return output

    def _describe(self, parts: list[Any], arguments: Iterable[Any]) -> bool:
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
                    argument.storage_offset(),
                    argument.untyped_storage().nbytes(),
                    argument.requires_grad,
                    argument.fake_device,
                )
            elif kind in _PLAIN:
                parts += (kind, argument)
            elif kind is list or kind is tuple:
                parts += (kind, len(argument))
                if not self._describe(parts, argument):
                    return False
            else:
                return False
        return True
