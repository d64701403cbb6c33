"""How a model initialises itself, recorded instead of run, and replayed slice by slice.

A second copy of the model is built with real buffers and meta parameters while a dispatch mode
notes what the constructors and ``_init_weights`` do to each parameter. Replaying the notes makes
any slice of any parameter, so that no rank ever holds the model, and buffers that a meta build
leaves empty (rotary frequencies, masks) are at hand with the values their constructors computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdptool.errors import ModelError
from fsdptool.training.pulse import beat
from fsdptool.training.random_values import derive_seed, fill_slice

aten = torch.ops.aten
_OVERWRITES = {
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.normal_.default,
    aten.uniform_.default,
    aten.copy_.default,
}
_DRAWS = {aten.normal_.default, aten.uniform_.default}
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


@dataclass(slots=True)
class Note:
    """One in-place operation on a parameter, or on a view of it (``views``: how to get there)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    recorder: Recorder | None = None

    @property
    def sliceable(self) -> bool:
        """Whether it acts on every element alone."""
        plain = not any(isinstance(a, torch.Tensor) and a.dim() > 0 for a in self.args)
        return self.func in _ELEMENTWISE and not self.views and plain


@dataclass(slots=True)
class Blueprint:
    """Notes by parameter, values of parameters that were kept, and the model's buffers.

    ``values`` and ``buffers`` are CPU tensors by fully qualified name, ties under each name.
    """

    notes: dict[str, list[Note]] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in-place operations on meta tensors, following views back to the tensor they show."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes: dict[int, list[Note]] = {}
        self._views: dict[int, tuple[int, tuple[Callable[[torch.Tensor], torch.Tensor], ...]]] = {}
        self._made: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any], int | None]] = {}
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
                self._made[id(output)] = (func, args, kwargs, index if output is not out else None)
                self._alive.append((args, output))

    def value_of(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """Compute a meta tensor that constructors derived from constants, on the CPU.

        Raises:
            ModelError: It depends on a parameter.
        """
        if not tensor.is_meta:
            return tensor
        key, views = self._key(tensor)
        if key not in self._made:
            raise ModelError(
                "the model initialises a parameter from another one, which cannot be done shard by shard",
                help="train from pretrained weights (model.weights)",
            )
        func, args, kwargs, index = self._made[key]
        real = [self.value_of(a, seed) if isinstance(a, torch.Tensor) else a for a in args]
        named = {n: self.value_of(a, seed) if isinstance(a, torch.Tensor) else a for n, a in kwargs.items()}
        if "device" in named:
            named["device"] = torch.device("cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, key == id(tensor), func))
            made = func(*real, **named)
        value = made if index is None else made[index]
        for note in self._notes.get(key, []):
            target = value
            for view in note.views:
                target = view(target)
            operands = [self.value_of(a, seed) if isinstance(a, torch.Tensor) else a for a in note.args]
            note.func(target, *operands, **note.kwargs)
        for view in views:
            value = view(value)
        return value  # type: ignore[no-any-return]

    def _note(self, target: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key, views = self._key(target)
        kept = {name: value for name, value in kwargs.items() if name != "generator"}
        note = Note(func, tuple(args[1:]), kept, views, self)
        self._alive.append(target)
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


@contextmanager
def _parameters_on_meta(keep: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Move each parameter to meta as its module registers it, unless ``keep(module)``.

    Parameters without dimensions (CLIP's temperature) stay: they weigh nothing, and transformers 5.23
    leaves what their constructor gave them.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.dim() and not parameter.is_meta and not keep(module):
            # Behind the recorder's back: its notes would keep the real tensor alive for the whole run.
            with _disable_current_modes():
                stand_in = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextmanager
def _truncated_normals_noted() -> Iterator[None]:
    """Draw truncated normals of meta tensors by inverting their distribution function.

    torch 2.13 draws them by rejection and skips meta tensors altogether (``torch/nn/init.py``,
    ``_no_grad_trunc_normal_``), which leaves nothing to note. The inverse is the same distribution,
    element by element.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    def draw(
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not tensor.is_meta:
            return original(tensor, mean, std, a, b, generator)
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (a, b))
        with torch.no_grad():
            tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


def draw_blueprint(build: Callable[[], nn.Module], *, seed: int, library: str) -> Blueprint:
    """Build a model without its parameters and return how they would have been initialised.

    Args:
        build: Builds the model on the current device (``Family.build``).
        seed: Seed of whatever the constructors draw themselves.
        library: ``transformers`` models initialise every parameter after construction, so none is
            kept; elsewhere a module without ``reset_parameters`` (scale tables, position tables)
            sets its parameters in its constructor, and their values are kept.
    """

    def keep(module: nn.Module) -> bool:
        return library != "transformers" and not hasattr(type(module), "reset_parameters")

    recorder = Recorder()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(derive_seed(seed, "constructors"))
        with recorder, _parameters_on_meta(keep), _truncated_normals_noted():
            model = build()
    blueprint = Blueprint(buffers=dict(model.named_buffers(remove_duplicate=False)))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            blueprint.notes[name] = recorder.notes_of(parameter)
        else:
            blueprint.values[name] = parameter.detach()
    return blueprint


def note_initialisation(act: Callable[[], None], parameters: Mapping[str, nn.Parameter]) -> Blueprint:
    """Return what ``act`` does to meta ``parameters`` (adapters initialise themselves when injected)."""
    recorder = Recorder()
    with torch.no_grad(), recorder:
        act()
    return Blueprint(notes={name: recorder.notes_of(parameter) for name, parameter in parameters.items()})


def replay(
    blueprint: Blueprint,
    name: str,
    shape: torch.Size,
    rows: tuple[int, int],
    *,
    dtype: torch.dtype,
    seed: int,
    key: str,
) -> torch.Tensor:
    """Return rows ``[rows[0], rows[1])`` of a freshly initialised parameter, on the CPU.

    Args:
        blueprint: Where the notes are.
        name: The parameter's name there.
        shape: Its whole shape.
        rows: Range of dimension 0.
        dtype: dtype of the result. Drawing happens in fp32 (fp64 for fp64), so that a bf16 model is
            the rounded fp32 one.
        seed: The run's seed.
        key: What the values depend on besides the seed; equal for all names of a tied parameter.

    Raises:
        ModelError: The model does not say how the parameter starts.
    """
    beat()
    first, last = rows
    if name in blueprint.values:
        value = blueprint.values[name]
        return (value[first:last] if shape else value.clone()).to(dtype)
    notes = blueprint.notes.get(name)
    if not notes:
        raise ModelError(
            f"the model does not initialise {name}", help="train from pretrained weights (model.weights)"
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numel, per_row = math.prod(shape), math.prod(shape[1:])
    if shape and all(note.sliceable for note in notes):
        tensor = torch.empty((last - first, *shape[1:]), dtype=wide)
        for draw, note in enumerate(notes):
            _apply(note, tensor, first * per_row, numel, (seed, key, draw))
        return tensor.to(dtype)
    whole = torch.empty(shape, dtype=wide)
    for draw, note in enumerate(notes):
        _apply(note, whole, 0, numel, (seed, key, draw))
    return (whole[first:last] if shape else whole).to(dtype)


def _apply(note: Note, tensor: torch.Tensor, start: int, numel: int, key: tuple[object, ...]) -> None:
    if note.func in _DRAWS and not note.views:

        def draw(block: torch.Tensor, generator: torch.Generator) -> None:
            note.func(block, *note.args, **note.kwargs, generator=generator)

        fill_slice(tensor, start, numel, key, draw)
        return
    target = tensor
    for view in note.views:
        target = view(target)
    if note.func in _DRAWS:
        generator = torch.Generator().manual_seed(derive_seed(*key))
        note.func(target, *note.args, **note.kwargs, generator=generator)
        return
    note.func(target, *_operands(note, derive_seed(*key)), **note.kwargs)


def _operands(note: Note, seed: int) -> list[Any]:
    """Return the note's arguments with constants that were derived on meta computed for real."""
    if note.recorder is None:
        return list(note.args)
    return [note.recorder.value_of(a, seed) if isinstance(a, torch.Tensor) else a for a in note.args]
