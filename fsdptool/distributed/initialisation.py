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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from fsdptool.distributed.recording import DRAWS, SMALL, InitialisationRecorder, Note, derive_seed, fill_slice
from fsdptool.errors import ModelError
from fsdptool.families.registry import family_of
from fsdptool.runs.watchdog import beat

if TYPE_CHECKING:
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import ModelChoice


@dataclass(slots=True)
class Blueprint:
    """Notes by parameter, values of parameters that were kept, and the model's buffers.

    ``values`` and ``buffers`` are CPU tensors by fully qualified name, ties under each name. ``loose``
    are attributes that hold tensors without being registered (Qwen-Image's rotary tables, diffusers
    0.42): a build on meta leaves them there, and no ``to`` moves them.
    """

    notes: dict[str, list[Note]] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    loose: dict[str, Any] = field(default_factory=dict)


@contextmanager
def _parameters_on_meta(
    keep: Callable[[nn.Module], bool], small: dict[int, tuple[nn.Parameter, torch.Tensor]]
) -> Iterator[None]:
    """Move each parameter to meta as its module registers it, unless ``keep(module)``.

    The values of small ones are noted in ``small``, by the identity of what takes their place: transformers
    leaves some as their constructor made them (the coefficients of xIELU in Apertus, the biases of OpenAI
    GPT, 5.23).

    Parameters without dimensions (CLIP's temperature) stay: they weigh nothing, and transformers 5.23
    leaves what their constructor gave them.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.dim() and not parameter.is_meta and not keep(module):
            # Behind the recorder's back: its notes would keep the real tensor alive for the whole run.
            with _disable_current_modes():
                stand_in = torch.empty_like(parameter, device="meta")
                value = _constructed(parameter.detach())
            parameter = nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
            if value is not None:
                small[id(parameter)] = (parameter, value)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _constructed(value: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a parameter's value that takes little memory, or None if there is none."""
    if value.numel() <= SMALL:
        return value.clone()
    if value.dim() == 1 and bool((value == value[0]).all()):
        return value[:1].clone().expand(value.shape)
    return None


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


@contextmanager
def _listed_values_noted() -> Iterator[None]:
    """Make tensors of listed values on the CPU before they go to meta, where the recorder sees the copy.

    ``torch.tensor([...], device="meta")`` drops the values before any dispatch mode is asked (torch 2.13).
    RWKV's mixing weights start as powers of such a list (transformers 5.23).
    """
    original = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "meta":
            return original(data, device=device, **options)
        return original(data, device="cpu", **options).to("meta")

    torch.tensor = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor = original


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

    recorder = InitialisationRecorder()
    small: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(derive_seed(seed, "constructors"))
        with (
            recorder,
            _parameters_on_meta(keep, small),
            _truncated_normals_noted(),
            _listed_values_noted(),
        ):
            model = build()
    # transformers pads the bias of a tied output layer, which makes another tensor of a parameter.
    recorder.constructed = {key: value for key, (_, value) in small.items() if not value.isnan().any()}
    # A buffer that a constructor derives from a parameter is on meta, as that is.
    buffers = {
        name: recorder.value_of(buffer, seed) for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    blueprint = Blueprint(buffers=buffers, loose=dict(loose_tensors(model)))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            blueprint.notes[name] = recorder.notes_of(parameter)
            twin = None if blueprint.notes[name] else recorder.twin(parameter)
            if twin is not None:
                blueprint.values[name] = recorder.value_of(twin, seed)
            elif not blueprint.notes[name] and id(parameter) in small:
                value = small[id(parameter)][1]
                if not value.isnan().any():
                    blueprint.values[name] = value
        else:
            blueprint.values[name] = parameter.detach()
    return blueprint


def model_blueprint(spec: ModelSpec, choice: ModelChoice, *, seed: int) -> Blueprint:
    """Return how a model of a run would have been initialised (:func:`draw_blueprint`)."""
    family = family_of(spec)
    return draw_blueprint(
        lambda: family.build(
            spec.config,
            model_class=spec.model_class,
            dtype=choice.dtype,
            attention=choice.attention,
            folder=spec.folder,
            trust_remote_code=spec.trust_remote_code,
        ),
        seed=seed,
        library=spec.library,
    )


def loose_tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that hold tensors, alone or in lists, and are not parameters or buffers."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in list(vars(module).items()):
            if name.startswith("_") or not isinstance(value, torch.Tensor | list | tuple | dict):
                continue
            tensors = [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]
            if tensors and not any(isinstance(leaf, nn.Parameter) for leaf in tensors):
                yield f"{path}.{name}" if path else name, value


def note_initialisation(act: Callable[[], None], parameters: Mapping[str, nn.Parameter]) -> Blueprint:
    """Return what ``act`` does to meta ``parameters`` (adapters initialise themselves when injected)."""
    recorder = InitialisationRecorder()
    with torch.no_grad(), recorder:
        act()
    return Blueprint(notes={name: recorder.notes_of(parameter) for name, parameter in parameters.items()})


def replay(
    blueprint: Blueprint,
    name: str,
    shape: torch.Size,
    rows: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    key: str,
    *,
    window: tuple[int, int, int] | None = None,
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
        window: A further dimension, and start and length in it, of which no more is returned; or None.

    Raises:
        ModelError: The model does not say how the parameter starts.
    """
    beat()
    first, last = rows
    if name in blueprint.values:
        value = blueprint.values[name]
        # A vector of equal elements is kept as one element that is expanded. Fused optimizers write through
        # the pointer, past the end of such a storage (torch 2.13, ``_fused_adamw_``).
        return _cut(value[first:last] if shape else value.clone(), window).to(dtype).contiguous()
    notes = blueprint.notes.get(name)
    if not notes:
        raise ModelError(
            f"the model does not initialise {name}", help="train from pretrained weights (model.weights)"
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numel, per_row = math.prod(shape), math.prod(shape[1:])
    if shape and all(note.sliceable for note in notes):
        if window is None or window[0] != 1 or len(shape) < 3:
            tensor = torch.empty((last - first, *shape[1:]), dtype=wide)
            for draw, note in enumerate(notes):
                _apply(note, tensor, first * per_row, numel, (seed, key, draw))
            return _cut(tensor, window).to(dtype).contiguous()
        # A window of a stack's matrices is one run of elements in each: the rest is not drawn.
        _, start, length = window
        tensor = torch.empty((last - first, length, *shape[2:]), dtype=wide)
        for draw, note in enumerate(notes):
            for row, part in enumerate(tensor, first):
                _apply(note, part, row * per_row + start * math.prod(shape[2:]), numel, (seed, key, draw))
        return tensor.to(dtype)
    whole = torch.empty(shape, dtype=wide)
    for draw, note in enumerate(notes):
        _apply(note, whole, 0, numel, (seed, key, draw))
    return _cut(whole[first:last] if shape else whole, window).to(dtype).contiguous()


def _cut(values: torch.Tensor, window: tuple[int, int, int] | None) -> torch.Tensor:
    return values if window is None else values.narrow(*window)


def _apply(note: Note, tensor: torch.Tensor, start: int, numel: int, key: tuple[object, ...]) -> None:
    if note.func in DRAWS and not note.views:

        def draw(block: torch.Tensor, generator: torch.Generator) -> None:
            note.func(block, *note.args, **note.kwargs, generator=generator)

        fill_slice(tensor, start, numel, key, draw)
        return
    target = tensor
    for view in note.views:
        target = view(target)
    if note.func in DRAWS:
        generator = torch.Generator().manual_seed(derive_seed(*key))
        note.func(target, *note.args, **note.kwargs, generator=generator)
        return
    note.func(target, *_operands(note, derive_seed(*key)), **note.kwargs)


def _operands(note: Note, seed: int) -> list[Any]:
    """Return the note's arguments with constants that were derived on meta computed for real."""
    if note.recorder is None:
        return list(note.args)
    return [note.recorder.value_of(a, seed) if isinstance(a, torch.Tensor) else a for a in note.args]
