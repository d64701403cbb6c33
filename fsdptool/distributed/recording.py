"""Records how constructors initialise meta tensors, and draws random values one slice at a time.

Random values depend on the parameter's name and the element, never on the rank that asks. They come in
blocks, each from a generator seeded with (seed, name, draw, block), so any rank can make any slice of a
parameter without making the rest, and every number of ranks gets the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptool.errors import ModelError

BLOCK = 1 << 16
"""Elements per block: long enough that seeding a generator (about 10 us) does not count."""


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def fill_slice(
    target: torch.Tensor,
    start: int,
    numel: int,
    key: tuple[object, ...],
    draw: Callable[[torch.Tensor, torch.Generator], object],
) -> None:
    """Fill ``target`` with elements ``[start, start + target.numel())`` of a flat random tensor.

    Args:
        target: Contiguous CPU tensor.
        start: Flat position of its first element in the whole tensor.
        numel: Elements of the whole tensor.
        key: What the values depend on: run seed, parameter name, number of the draw.
        draw: Fills a block in place from a generator (``normal_``, ``uniform_``).
    """
    flat = target.view(-1)
    end = start + flat.numel()

    def fill(index: int) -> None:
        first = index * BLOCK
        length = min(BLOCK, numel - first)
        generator = torch.Generator()
        generator.manual_seed(derive_seed(*key, index))
        lower, upper = max(start - first, 0), min(end - first, length)
        piece = flat[first + lower - start : first + upper - start]
        if lower == 0 and upper == length:
            draw(piece, generator)
        else:
            block = torch.empty(length, dtype=flat.dtype)
            draw(block, generator)
            piece.copy_(block[lower:upper])

    def fill_all(some: range) -> None:
        for index in some:
            fill(index)

    blocks = range(start // BLOCK, -(-end // BLOCK))
    threads = min(torch.get_num_threads(), len(blocks))
    if threads <= 1:
        return fill_all(blocks)
    # Blocks do not depend on each other, and torch draws one without the interpreter's lock. One thread takes
    # 41 s for 8 billion normals.
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill_all, (blocks[first::threads] for first in range(threads))))


aten = torch.ops.aten
_OVERWRITES = {
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.normal_.default,
    aten.uniform_.default,
    aten.copy_.default,
}
DRAWS = {aten.normal_.default, aten.uniform_.default}
_ELEMENTWISE = {
    *_OVERWRITES,
    aten.erfinv_.default,
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.add_.Tensor,
    aten.add_.Scalar,
    aten.div_.Tensor,
    aten.clamp_.default,
} - {aten.copy_.default}
_SHAPE_ONLY = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""Operations that take only the shape of a tensor, which may have no values yet."""
_VIEWS = {
    aten.select.int,
    aten.slice.Tensor,
    aten.view.default,
    aten.detach.default,
    aten.alias.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.split.Tensor,
    aten.chunk.default,
    aten._unsafe_view.default,
}


SMALL = 64
"""Elements of a parameter up to which the value that its constructor gave it is kept. Longer vectors keep
theirs if all elements are equal, as those of most biases are."""


@dataclass(slots=True)
class Note:
    """One in-place operation on a parameter, or on a view of it (``views``: how to get there)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    recorder: InitialisationRecorder | None = None

    @property
    def sliceable(self) -> bool:
        """Whether it acts on every element alone."""
        plain = not any(isinstance(a, torch.Tensor) and a.dim() > 0 for a in self.args)
        return self.func in _ELEMENTWISE and not self.views and plain


@dataclass(frozen=True, slots=True)
class _Origin:
    """The operation that made a tensor (``index``: which of its outputs), and its inputs' history then."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    history: Mapping[int, Sequence[Note]]


class InitialisationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in-place operations on meta tensors, following views back to the tensor they show."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes: dict[int, list[Note]] = {}
        self._views: dict[int, tuple[int, tuple[Callable[[torch.Tensor], torch.Tensor], ...]]] = {}
        self._made: dict[int, _Origin] = {}
        # Values that parameters got in their constructors, by id.
        self.constructed: dict[int, torch.Tensor] = {}
        # Tensors that were noted and are nobody's view, in the order they were met.
        self._bases: dict[int, torch.Tensor] = {}
        # Keys are ids, so nothing that was seen may die while the recorder lives.
        self._alive: list[Any] = []

    def notes_of(self, tensor: torch.Tensor) -> list[Note]:
        """Return what was done to ``tensor``, oldest first."""
        return self._notes.get(self._key(tensor)[0], [])

    def _key(self, tensor: torch.Tensor) -> tuple[int, tuple[Callable[[torch.Tensor], torch.Tensor], ...]]:
        return self._views.get(id(tensor), (id(tensor), ()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kept = func is aten.empty.memory_format and (out.numel() <= SMALL or out.dim() == 1)
        if kept and out.is_floating_point():
            out.fill_(torch.nan)  # so that a parameter that nobody sets is recognised
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None or not target.is_meta:
            self._remember(func, args, kwargs, out)
            return out
        if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            self._note(target, func, args, kwargs)
        elif func in _VIEWS:
            self._follow(target, func, args, kwargs, out)
        else:
            self._remember(func, args, kwargs, out)
        return out

    def _remember(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        outputs = out if isinstance(out, list | tuple) else [out]
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.is_meta:
                place = index if output is not out else None
                self._made[id(output)] = _Origin(func, args, kwargs, place, self._history(args))
                self._alive.append((args, output))

    def _history(self, args: tuple[Any, ...]) -> dict[int, tuple[Note, ...]]:
        """Return what was done to each tensor so far: a parameter may be copied from a multiple of itself."""
        keys = [self._key(a)[0] for a in args if isinstance(a, torch.Tensor) and a.is_meta]
        return {key: tuple(self._notes.get(key, ())) for key in keys}

    def value_of(
        self, tensor: torch.Tensor, seed: int, history: Mapping[int, Sequence[Note]] = MappingProxyType({})
    ) -> torch.Tensor:
        """Compute a meta tensor that constructors derived from constants or made at random, on the CPU.

        The same tensor gets the same values however often it is asked for.

        Args:
            tensor: Seen by this recorder.
            seed: The run's seed.
            history: What had been done to a tensor, by its key, at the time that matters; else all counts.

        Raises:
            ModelError: It depends on a tensor nobody gave values.
        """
        if not tensor.is_meta:
            return tensor
        key, views = self._key(tensor)
        with torch.random.fork_rng(devices=[]):
            value = self._begin(key, key == id(tensor), seed)
            for number, note in enumerate(history.get(key, self._notes.get(key, ()))):
                target = value
                for view in note.views:
                    target = view(target)
                operands = [self.value_of(a, seed) if isinstance(a, torch.Tensor) else a for a in note.args]
                torch.manual_seed(derive_seed(seed, "derived", self._number(key), number))
                note.func(target, *operands, **note.kwargs)
        for view in views:
            value = view(value)
        return value

    def _begin(self, key: int, whole: bool, seed: int) -> torch.Tensor:
        """Return what a tensor was before anything was done to it in place."""
        if key not in self._made:
            if key in self.constructed:
                return self.constructed[key].clone()
            base = self._bases.get(key)
            if base is None:
                raise ModelError(
                    "the model initialises a parameter from one that has no values yet",
                    help="train from pretrained weights (model.weights)",
                )
            return torch.empty(base.shape, dtype=base.dtype)
        made = self._made[key]

        def real(argument: Any) -> Any:
            if not isinstance(argument, torch.Tensor):
                return argument
            if made.func in _SHAPE_ONLY:
                return torch.empty(argument.shape, dtype=argument.dtype)
            return self.value_of(argument, seed, made.history)

        args = [real(argument) for argument in made.args]
        named = {name: real(argument) for name, argument in made.kwargs.items()}
        if "device" in named:
            named["device"] = torch.device("cpu")
        torch.manual_seed(derive_seed(seed, whole, made.func))
        value = made.func(*args, **named)
        return value if made.index is None else value[made.index]  # type: ignore[no-any-return]

    def _number(self, key: int) -> int:
        return next((number for number, known in enumerate(self._bases) if known == key), -1)

    def twin(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor seen here that ``parameter`` shares its storage and layout with, if any.

        ``nn.Parameter(tensor)`` makes another object of it without a call a dispatch mode sees: weight
        normalisation (torch 2.13, ``parametrizations.weight_norm``) registers its direction and its
        length, computed from the layer's own weight, in this way.
        """
        storage = parameter.untyped_storage()._cdata
        for entry in self._alive:
            for tensor in entry if isinstance(entry, tuple) else (entry,):
                if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
                    continue
                if tensor.is_meta and tensor.untyped_storage()._cdata == storage:
                    return tensor
        return None

    def _note(self, target: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key, views = self._key(target)
        kept = {name: value for name, value in kwargs.items() if name != "generator"}
        note = Note(func, tuple(args[1:]), kept, views, self)
        self._alive.append(target)
        if not views:
            self._bases.setdefault(key, target)
        if func in _OVERWRITES and not views:
            self._notes[key] = [note]
        else:
            self._notes.setdefault(key, []).append(note)

    def _follow(
        self, target: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        key, views = self._key(target)
        outputs = out if isinstance(out, list | tuple) else [out]
        for index, output in enumerate(outputs):
            step = _view_step(func, args[1:], kwargs, index if isinstance(out, list | tuple) else None)
            self._views[id(output)] = (key, (*views, step))
            self._alive.append((target, output))


def _view_step(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        out = func(tensor, *args, **kwargs)
        return out if index is None else out[index]  # type: ignore[no-any-return]

    return step
