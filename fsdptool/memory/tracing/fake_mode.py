"""torch's fake mode, as a trace needs it: nothing compiled, no symbols, the same operators over and over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)

_UNSAFE_VIEW, _VIEW = torch.ops.aten._unsafe_view.default, torch.ops.aten.view.default


class TracingMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that finds torch's cached answers by keys that cost less.

    torch 2.13 describes each argument by 17 properties, several of them computed in Python
    (``TensorMetadata``); on a hit that costs more than the answer. Most of these properties follow from the
    few that are read here, so equal arguments here are equal there, and the key made for the first call
    serves the others. Calls with anything unusual (sparse or complex tensors, constants, real tensors) go to
    torch unchanged.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known_keys: dict[tuple[Any, ...], Any] = {}

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
        return self.dispatch(func, types, args, kwargs or {})

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
