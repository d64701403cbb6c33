"""Watches a model run on fake tensors: every allocation and free, between module boundaries.

Storages are followed by weak reference, so a tensor is freed in the record exactly when the last
reference to its memory goes, whoever held it (Python, autograd's saved tensors, the engine's
input buffers). torch 2.13 keeps the Python object of a storage as long as the storage lives,
which makes that reliable (``torch/distributed/_tools/mem_tracker.py`` rests on the same).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fsdptool.memory.tracing.gradient_sums import GradientSums
from fsdptool.memory.tracing.operators import check_factors, copied_bytes, launches, operation_of, traffic
from fsdptool.records.checkpointing import selector_name
from fsdptool.records.trace import KINDS, Marker, Operation, Profile, RecomputedCall, Segment, Trace

if TYPE_CHECKING:
    from fsdptool.memory.tracing.fake_mode import KnownCall, TracingMode

_DEVICE = torch.ops.prim.device.default
_LOGSUMEXP = torch.ops.aten.logsumexp
_KIND = {name: index for index, name in enumerate(KINDS)}


@dataclass(slots=True)
class _Call:
    """What a call is and costs.

    Attributes:
        name: Of the operator.
        launches: Whether it runs a kernel where it returns new or changed memory.
        mutable: Whether it writes to an argument.
        copied: Bytes that its kernel allocates and frees again.
        work: Bytes it moves, and the product or attention kernel it is; None where nobody has asked.
    """

    name: str
    launches: bool
    mutable: bool
    copied: int
    work: tuple[int, Operation | None] | None = None


class SegmentRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records segments while it is entered; enter it above the ``FakeTensorMode``.

    Args:
        known: Tensors that exist already.
        profile: Whose kernels are meant.
        fake: The mode right below, whose answers to repeated calls are taken without calling it; None
            calls whatever is below.
    """

    def __init__(
        self, known: Iterable[torch.Tensor], profile: Profile = "cuda", fake: TracingMode | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._profile = profile
        self._fake = fake
        self._seen: dict[int, weakref.ref[Any]] = {}
        self.sizes: list[int] = []
        self.kinds: list[int] = []
        self.names: list[int] = []
        self._vocabulary: dict[str, int] = {}
        self._segments: list[tuple[Marker, str]] = []
        self._events: list[list[int]] = []
        self._flops: list[dict[str, float]] = []
        self._traffic: list[list[int]] = []
        self._again: list[float] = []
        self._operations: dict[Operation, int] = {}
        self._costly: list[list[int]] = []
        self.recomputing = 0
        self._calls: list[list[RecomputedCall]] = []
        self._group_sums: list[list[int]] = []
        self._group_gathers: list[list[int]] = []
        self._counts: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._phase = "temporary"
        self.gradients: dict[str, int] = {}
        self._held: set[int] = set()
        self._final: set[int] = set()
        self._sums = GradientSums()
        self._summed: tuple[int, int] | None = None
        for tensor in known:
            storage = tensor.untyped_storage()
            self._seen[storage._cdata] = weakref.ref(storage, self._forget(storage._cdata))
        self.mark("start", "")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let blocks be compiled while this records: what the compiler does is not part of a step."""
        return True

    def mark(self, marker: Marker, path: str) -> None:
        """Open a new segment."""
        self._segments.append((marker, path))
        self._events.append([])
        self._flops.append({})
        self._traffic.append([0, 0])
        self._again.append(0.0)
        self._costly.append([])
        self._calls.append([])
        self._group_sums.append([])
        self._group_gathers.append([])

    def exchanged(self, size: int, *, summed: bool) -> None:
        """Note that ``size`` bytes are summed over the tensor-parallel group, or gathered or scattered."""
        (self._group_sums if summed else self._group_gathers)[-1].append(size)

    def phase(self, kind: str) -> None:
        """Set the kind of tensors created from now on, until more is known about them."""
        self._phase = kind

    def keep(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Let tensors outlive the record: their end is not noted."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.kinds[number] = _KIND[kind]
                self._held.add(number)

    def relabel(self, tensor: torch.Tensor, kind: str, *, final: bool = False) -> None:
        """Correct what an allocated tensor is; ``final``: also if forward frees it."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self.kinds[number] = _KIND[kind]
            if final:
                self._final.add(number)

    def gradient(self, fqn: str, gradient: torch.Tensor) -> None:
        """Note that ``gradient`` now belongs to parameter ``fqn``; the sharding decides when it goes."""
        number = self._numbers.get(gradient.untyped_storage()._cdata)
        if number is None or fqn in self.gradients:
            return
        self.gradients[fqn] = number
        self.kinds[number] = _KIND["gradient"]
        self.names[number] = self._word(fqn)
        self._held.add(number)

    def release_gradients(self) -> None:
        """From now on gradients are not freed: the trace ends with them alive."""
        self._held.update(self.gradients.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in a trace; torch would wrap each call in a guard against its compiler.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and note what it allocated, computed and moved."""
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            # More than half of all calls, from C++; what follows would find nothing to note.
            return args[0].fake_device
        before = self._sums.reusable(func, args)
        self._summed = None
        kwargs = kwargs or {}
        out, answer = self._ask(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            outputs: list[torch.Tensor] = [out]
        else:
            outputs = [leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)]
        known = self._known(answer, func, args)
        selector = self._count(func)
        if func._overloadpacket is _LOGSUMEXP:
            # One operator here, but its kernels hold the exponentials (torch 2.13, ``logsumexp_out_impl``).
            self._fleeting(args[0].numel() * max(args[0].itemsize, 4), "logsumexp")
        if known.copied and before is not None:
            self._fleeting(known.copied, known.name)  # a real run has no output beside it
        fresh = False
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                fresh = True
                self._track(storage, known.name)
        if known.copied and before is None:
            self._fleeting(known.copied, known.name)
        if known.launches and (fresh or known.mutable):
            if known.work is None:
                size = traffic(func, args, kwargs, outputs)
                check_factors(func, args)
                known.work = size, operation_of(func, args, kwargs, out, size)
            size, operation = known.work
            moved = self._traffic[-1]
            moved[0] += size
            moved[1] += 1
            number = self._compute(operation) if operation is not None else None
            if selector and fresh:
                kept = sum(tensor.untyped_storage().nbytes() for tensor in outputs)
                self._calls[-1].append(RecomputedCall(selector, kept, size, number))
        if before is not None:
            self._summed = (before.untyped_storage()._cdata, out.untyped_storage()._cdata)
        return out

    def _ask(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, KnownCall | None]:
        """Return what an operator returns, and the answer of the fake mode if it is a repeated one."""
        fake = self._fake
        asked = fake.asked(func, args, kwargs) if fake is not None else None
        if fake is None or asked is None:
            return func(*args, **kwargs), None
        answer = fake.recall(asked[0])
        if answer is not None:
            return fake.answered(answer, asked[1], args), answer
        out = func(*args, **kwargs)
        fake.note(*asked, func, args, kwargs)
        return out, None

    def _known(self, answer: KnownCall | None, func: Any, args: Sequence[Any]) -> _Call:
        """Return what a call costs: of a repeated one, what was computed before."""
        known: _Call | None = answer.costs.get(self._profile) if answer is not None else None
        if known is None:
            known = _Call(
                func._overloadpacket.__name__,
                launches=launches(func),
                mutable=func._schema.is_mutable,
                copied=copied_bytes(func, args, self._profile),
            )
            if answer is not None:
                answer.costs[self._profile] = known
        return known

    def _compute(self, operation: Operation) -> int:
        number = self._operations.setdefault(operation, len(self._operations))
        self._costly[-1].append(number)
        flops = self._flops[-1]
        flops[operation.dtype] = flops.get(operation.dtype, 0.0) + operation.flops
        # Inside a custom autograd function grad mode is off, in its forward too.
        if self._phase == "temporary" and (self.recomputing or torch.is_grad_enabled()):
            self._again[-1] += operation.flops
        return number

    def _count(self, func: Any) -> str:
        """Return the selector of a recomputed call, counted as the policy counts a block's forward."""
        if not self.recomputing or self._phase != "temporary":
            self._counts.clear()
            return ""
        name = selector_name(str(func))
        self._counts[name] = self._counts.get(name, 0) + 1
        return f"{name}#{self._counts[name]}"

    def _track(self, storage: torch.UntypedStorage, name: str) -> None:
        key = storage._cdata
        number = len(self.sizes)
        kind = self._phase
        # Autograd runs backward without grad mode; checkpointing enters it to run forward again.
        if kind == "temporary" and torch.is_grad_enabled():
            kind = "recomputed"
        self.sizes.append(storage.nbytes())
        self.kinds.append(_KIND[kind])
        self.names.append(self._word(name))
        self._seen[key] = weakref.ref(storage, self._farewell(key))
        self._numbers[key] = number
        self._sums.made(storage)
        self._events[-1].append(number + 1)

    def _fleeting(self, size: int, name: str) -> None:
        """Note memory inside an operator that nothing else shows."""
        number = len(self.sizes)
        self.sizes.append(size)
        self.kinds.append(_KIND["temporary"])
        self.names.append(self._word(name))
        self._events[-1] += [number + 1, -(number + 1)]

    def _farewell(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._seen.pop(key, None)
            number = self._numbers.pop(key)
            if number in self._held or self._reused(key, number):
                return
            self._events[-1].append(-(number + 1))
            # What forward frees again was never kept for backward.
            if (
                self.kinds[number] == _KIND["activation"]
                and self._phase != "temporary"
                and number not in self._final
            ):
                self.kinds[number] = _KIND["temporary"]

        return gone

    def _reused(self, key: int, number: int) -> bool:
        """Undo the allocation of a sum if what it was added to ends with it: it was added in place."""
        if self._summed is None or self._summed[0] != key:
            return False
        sum_key = self._summed[1]
        last = len(self.sizes) - 1
        if self._numbers.get(sum_key) != last or self._events[-1][-1:] != [last + 1]:
            return False
        self._events[-1].pop()
        for column in (self.sizes, self.kinds, self.names):
            column.pop()
        self._numbers[sum_key] = number
        return True

    def _forget(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            # A buffer that forward replaces: what is allocated in its place is no longer known.
            self._seen.pop(key, None)

        return gone

    def _word(self, text: str) -> int:
        return self._vocabulary.setdefault(text, len(self._vocabulary))

    def detach(self) -> None:
        """Stop listening to storages that outlive the record."""
        self._seen.clear()

    def trace(self, **fields: Any) -> Trace:
        """Return the record; ``fields`` are the remaining ones of :class:`Trace`."""
        segments = tuple(
            Segment(
                marker,
                path,
                tuple(events),
                flops,
                moved[0],
                moved[1],
                again,
                tuple(costly),
                tuple(calls),
                tuple(summed),
                tuple(gathered),
            )
            for (marker, path), events, flops, moved, again, costly, calls, summed, gathered in zip(
                self._segments,
                self._events,
                self._flops,
                self._traffic,
                self._again,
                self._costly,
                self._calls,
                self._group_sums,
                self._group_gathers,
                strict=True,
            )
        )
        return Trace(
            segments=segments,
            sizes=tuple(self.sizes),
            kinds=tuple(self.kinds),
            names=tuple(self.names),
            vocabulary=tuple(self._vocabulary),
            gradients=dict(self.gradients),
            operations=tuple(self._operations),
            **fields,
        )
