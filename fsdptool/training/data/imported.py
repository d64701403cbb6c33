"""Samples of your own code: ``data.source: python``, ``data.path: package.module:name``.

The name is that of a dataset with ``__getitem__`` and ``__len__``, of an iterable, or of a function or class
that returns either; a function ``batches()`` may be a generator. Samples are dictionaries of tensors, arrays
or numbers under the names of the model's inputs. A stream may also yield micro-batches of any size, whose
tensors have one dimension more; they are divided into samples.

The code runs in loading processes, where random numbers are drawn from (seed, epoch, sample) alone, or in a
stream from (seed, epoch). The samples of a step therefore do not depend on the number of processes, and a
resumed run continues with the samples that it would have seen.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import random
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np

from fsdptool.errors import ConfigError, ModelError
from fsdptool.families.protocol import TensorSpec
from fsdptool.records.recipe import SHUFFLE_BUFFER, Data
from fsdptool.runs.work import LongWork
from fsdptool.source.imports import import_named
from fsdptool.source.references import IMPORT_FLAG, split_code
from fsdptool.training.data.loader import Array, Opened, Sample, Stack
from fsdptool.training.data.order import PlainOrder, WindowOrder, mix
from fsdptool.training.data.sources import path_of

_NUMPY_SEEDS = 1 << 32
_HELD_OUT_BITS = 1 << 63
_END = object()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What samples must have: the tensors of one sample, and those among them that all samples share."""

    tensors: Mapping[str, TensorSpec]
    shared: Collection[str]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in a sample."""
        shape = self.tensors[name].shape
        return shape if name in self.shared else shape[1:]


def open_imported(
    data: Data, wanted: Wanted, *, seed: int, part: str, holdout: float, trusted: bool
) -> Opened:
    """Return the samples of one part (``train``, ``held_out``, ``all``).

    Raises:
        ConfigError: The code may not be imported, fails, or returns something else.
    """
    named = _Named(*_place(data, trusted=trusted), seed)
    if named.is_stream():
        if part != "all" and holdout > 0.0:
            raise ConfigError(
                f"evaluation.holdout cannot divide the stream {named.reference}",
                help="set evaluation.data, or give the dataset __getitem__ and __len__",
            )
        window = _positive(data, "shuffle_buffer", SHUFFLE_BUFFER) if data.shuffle else 1
        count = _positive(data, "samples", 0) or _count(named, wanted)
        stream = Streamed(named, wanted, count=count, window=window)
        return Opened(stream, WindowOrder(count, window=window, seed=seed), OwnStack(wanted))
    samples = Indexed(named, wanted, part=part, holdout=holdout)
    return Opened(samples, PlainOrder(len(samples), seed=seed, shuffle=data.shuffle), OwnStack(wanted))


def count_stream(data: Data, wanted: Wanted, *, seed: int, trusted: bool) -> int | None:
    """Read a stream once and return its samples; None for datasets, or where the number is given.

    Raises:
        ConfigError: As :func:`open_imported`.
    """
    named = _Named(*_place(data, trusted=trusted), seed)
    return _count(named, wanted) if not _positive(data, "samples", 0) and named.is_stream() else None


def _count(named: _Named, wanted: Wanted) -> int:
    work = LongWork(f"count the samples of {named.reference}", None, "samples")
    count = 0
    for _ in StreamReader(named, wanted, 0):
        count += 1
        work.advance(count)
    if count == 0:
        raise ConfigError(f"{named.reference} yields no samples", help="yield dictionaries of tensors")
    return count


def _place(data: Data, *, trusted: bool) -> tuple[str | None, str]:
    folder, reference = split_code(path_of(data))
    if not trusted:
        raise ConfigError(
            f"data.path {reference} names code, which is imported only with {IMPORT_FLAG}",
            help=f"read that code, then give {IMPORT_FLAG} (in Python: trust_remote_code=True)",
        )
    return folder, reference


def _positive(data: Data, name: str, default: int) -> int:
    value = data.options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (name in data.options and value < 1):
        raise ConfigError(f"data.options.{name} is {value}", help="give a number of samples, at least 1")
    return value


@dataclass(frozen=True, slots=True)
class _Named:
    """What a reference names, imported in each process where it is needed."""

    folder: str | None
    reference: str
    seed: int

    def dataset(self) -> Any:
        """Return the dataset or iterable; for a function of a stream, what it returns in epoch 0."""
        return _dataset(self)

    def is_stream(self) -> bool:
        return not _is_indexed(self.dataset())

    def stream(self, epoch: int) -> Iterator[Any]:
        """Start to read the epoch."""
        value = _value(self)
        if _is_maker(value) and not inspect.isclass(value):
            value = self.call(value, epoch=epoch)
        else:
            value = self.dataset()
            set_epoch = getattr(value, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return iter(value)

    def call(self, value: Callable[..., Any], **known: int) -> Any:
        """Call a function or class with the arguments it takes among ``epoch`` and ``seed``."""
        taken = inspect.signature(value).parameters
        offered = {"epoch": 0, "seed": self.seed, **known}
        return value(**{name: item for name, item in offered.items() if name in taken})


def _value(named: _Named) -> Any:
    try:
        return import_named(named.reference, named.folder)
    except ModelError as error:
        raise ConfigError(f"data.path {error.message}", help=error.help) from error


@lru_cache(maxsize=8)
def _dataset(named: _Named) -> Any:
    value = _value(named)
    if not _is_maker(value) and _is_used_up(value):
        raise ConfigError(
            f"data.path {named.reference} can be read only once", help="name the function that returns it"
        )
    if _is_maker(value):
        with _named_errors(named.reference), _Random(mix(named.seed, 21)):
            value = named.call(value)
    if isinstance(value, Mapping) or not (_is_indexed(value) or hasattr(value, "__iter__")):
        raise ConfigError(
            f"data.path {named.reference} is of type {type(value).__name__}, not a dataset",
            help="name an iterable of dictionaries of tensors, a dataset with __getitem__ and __len__, or a"
            " function that returns one",
        )
    return value


def _is_maker(value: Any) -> bool:
    return callable(value) and (inspect.isclass(value) or not _is_dataset(value))


def _is_dataset(value: Any) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def _is_used_up(value: Any) -> bool:
    """Say whether an iterable is an iterator, which ends for good."""
    return hasattr(value, "__next__")


def _is_indexed(value: Any) -> bool:
    from torch.utils.data import IterableDataset

    # torch's base class has a __getitem__ that raises, for streams as well.
    return (
        not isinstance(value, IterableDataset) and hasattr(value, "__getitem__") and hasattr(value, "__len__")
    )


class Indexed:
    """Samples by number. Each is read with random numbers of its own, and put back afterwards.

    Attributes:
        digest: Changes with the reference, the number of samples and, if it is the same whenever it is read,
            the first sample.
    """

    def __init__(self, named: _Named, wanted: Wanted, *, part: str, holdout: float) -> None:
        self._named = named
        self._wanted = wanted
        with _named_errors(named.reference):
            count = len(named.dataset())
        rows = np.arange(count, dtype=np.int64)
        if part != "all" and holdout > 0.0:
            held = np.array(
                [mix(number, 31) < int(holdout * _HELD_OUT_BITS) for number in range(count)], bool
            )
            rows = rows[held] if part == "held_out" else rows[~held]
        if len(rows) == 0:
            raise ConfigError(
                f"{named.reference} has {count} samples, and none of them are to "
                + ("evaluate on" if part == "held_out" else "train on"),
                help="give it samples, or change evaluation.holdout",
            )
        self._rows = rows
        self.digest = _digest(named, part, len(rows), lambda: self.sample(0, 0))

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int, epoch: int) -> Sample:
        """Return one sample.

        Raises:
            ConfigError: The dataset fails, or the sample is not one of the model's.
        """
        row = int(self._rows[index])
        place = f"{self._named.reference}, sample {row}"
        with _named_errors(place), _Random(mix(self._named.seed, epoch, row)):
            item = self._named.dataset()[row]
        return _checked(item, self._wanted, place)


class Streamed:
    """Samples of a stream, which is read on to the window of the sample that is wanted, or anew.

    Every process reads the whole stream and keeps its share.
    """

    def __init__(self, named: _Named, wanted: Wanted, *, count: int, window: int) -> None:
        self._named = named
        self._wanted = wanted
        self._count = count
        self._window = window
        self._reading: StreamReader | None = None
        self._held: tuple[int, int, Sequence[Sample]] = (-1, -1, ())
        self.digest = _digest(named, "stream", count, lambda: next(StreamReader(named, wanted, 0)))

    def __getstate__(self) -> dict[str, Any]:
        # A loading process begins at its own place.
        return {**self.__dict__, "_reading": None, "_held": (-1, -1, ())}

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        """Return one sample.

        Raises:
            ConfigError: The stream fails or ends too early, or the sample is not one of the model's.
        """
        number, inside = divmod(index, self._window)
        if self._held[:2] != (epoch, number):
            self._held = (epoch, number, self._read(epoch, number * self._window))
        return self._held[2][inside]

    def _read(self, epoch: int, start: int) -> Sequence[Sample]:
        reading = self._reading
        if reading is None or reading.epoch != epoch or reading.position > start:
            reading = self._reading = StreamReader(self._named, self._wanted, epoch)
        for _ in itertools.islice(reading, start - reading.position):
            pass
        size = min(self._window, self._count - start)
        held = list(itertools.islice(reading, size))
        if len(held) < size:
            raise ConfigError(
                f"{self._named.reference} ended after {reading.position} samples of epoch {epoch}, and an"
                f" epoch has {self._count}",
                help="yield as many in every epoch, or lower data.options.samples",
            )
        return held


class StreamReader:
    """An iterator over the samples of a stream in one epoch; batches are divided.

    Attributes:
        epoch: The epoch.
        position: Samples that were read.
    """

    def __init__(self, named: _Named, wanted: Wanted, epoch: int) -> None:
        self.epoch = epoch
        self.position = 0
        self._named = named
        self._wanted = wanted
        self._random = _Random(mix(named.seed, epoch, 22))
        self._items: Iterator[Any] | None = None
        self._parts: Iterator[Sample] = iter(())
        self._number = 0

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> Sample:
        while (sample := next(self._parts, None)) is None:
            place = f"{self._named.reference}, item {self._number}"
            with _named_errors(place), self._random:
                if self._items is None:
                    self._items = self._named.stream(self.epoch)
                item = next(self._items, _END)
            if item is _END:
                raise StopIteration
            self._number += 1
            self._parts = iter(_divided(item, self._wanted, place))
        self.position += 1
        return sample


def _divided(item: Any, wanted: Wanted, place: str) -> list[Sample]:
    """Return the samples of what a stream yields: one, or a batch."""
    own = [name for name in wanted.tensors if name not in wanted.shared]
    if not isinstance(item, Mapping) or not own or own[0] not in item:
        return [_checked(item, wanted, place)]
    batch = {name: _array(item[name], name, place) for name in wanted.tensors if name in item}
    if batch[own[0]].ndim != len(wanted.shape(own[0])) + 1:
        return [_checked(batch, wanted, place)]
    sizes = {name: len(batch[name]) if batch[name].ndim else 0 for name in own if name in batch}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{place}: the tensors of a batch have different numbers of samples: {counts}",
            help="give every tensor the samples as its first dimension",
        )
    return [
        _checked(
            {name: v if name in wanted.shared else v[number] for name, v in batch.items()}, wanted, place
        )
        for number in range(sizes[own[0]])
    ]


def _checked(item: Any, wanted: Wanted, place: str) -> Sample:
    """Return a sample with the model's inputs alone, in their dtypes."""
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"{place} is of type {type(item).__name__}, not a dictionary of tensors",
            help=f"return the model's inputs by name: {', '.join(wanted.tensors)}",
        )
    missing = [name for name in wanted.tensors if name not in item]
    if missing:
        advice = f"it has {', '.join(map(str, item)) or 'nothing'}"
        if missing == ["position_ids"]:
            advice += "; set data.packing: false unless documents are packed"
        raise ConfigError(f"{place} has no {' and no '.join(missing)}", help=advice)
    return {name: _fitted(_array(item[name], name, place), name, wanted, place) for name in wanted.tensors}


def _array(value: Any, name: str, place: str) -> Array:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    try:
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{place}: {name} is of type {type(value).__name__}, not a tensor",
            help="return tensors, arrays or numbers",
        ) from error


def _fitted(value: Array, name: str, wanted: Wanted, place: str) -> Array:
    import torch

    shape = wanted.shape(name)
    if value.ndim != len(shape) or any(size > most for size, most in zip(value.shape, shape, strict=True)):
        raise ConfigError(
            f"{place}: {name} has the shape {tuple(value.shape)}, and the run is planned for {shape}",
            help="return samples of at most that size, or change the sizes in the recipe or example_inputs",
        )
    dtype = getattr(torch, wanted.tensors[name].dtype)
    if value.dtype.is_floating_point and not dtype.is_floating_point:
        raise ConfigError(
            f"{place}: {name} is of {str(value.dtype).removeprefix('torch.')}, and the model takes"
            f" {wanted.tensors[name].dtype}",
            help="return integers",
        )
    high = wanted.tensors[name].high
    if high is not None and value.numel() and int(value.max()) >= high:
        raise ConfigError(
            f"{place}: {name} has the value {int(value.max())}, and the model knows 0 to {high - 1}",
            help="check the tokenizer or the labels",
        )
    return value.to(dtype)


class OwnStack(Stack):
    """Stacks samples whose shapes are those of your own code."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(shared=wanted.shared)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Array]:
        """Return a micro-batch.

        Raises:
            ConfigError: The shapes differ.
        """
        for name in samples[0]:
            shapes = sorted({tuple(sample[name].shape) for sample in samples})
            if len(shapes) > 1:
                raise ConfigError(
                    f"samples of a micro-batch differ in the shape of {name}: {shapes[0]} and {shapes[-1]}",
                    help="pad them to one shape, or set batch.micro_batch: 1",
                )
        return super().__call__(samples)


def _digest(named: _Named, part: str, count: int, first: Callable[[], Sample]) -> str:
    digest = hashlib.blake2b(repr((named.reference, part, count)).encode(), digest_size=20)
    contents = [_content(first()) for _ in range(2)]
    if contents[0] == contents[1]:
        digest.update(contents[0])
    return digest.hexdigest()


def _content(sample: Sample) -> bytes:
    import torch

    digest = hashlib.blake2b(digest_size=20)
    for name, value in sample.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


@dataclass(slots=True)
class _Random:
    """Random numbers of your own while entered, of Python, numpy and torch; each entry goes on with them."""

    key: int
    _inside: tuple[Any, ...] | None = None
    _outside: list[tuple[Any, ...]] = field(default_factory=list)

    def __enter__(self) -> None:
        import torch

        self._outside.append(_states())
        if self._inside is not None:
            _restore(self._inside)
            return
        random.seed(self.key)
        np.random.seed(self.key % _NUMPY_SEEDS)
        torch.default_generator.manual_seed(self.key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = _states()
        _restore(self._outside.pop())


def _states() -> tuple[Any, ...]:
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, ...]) -> None:
    import torch

    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextmanager
def _named_errors(place: str) -> Iterator[None]:
    """Turn what other people's code raises into one line that names it and its innermost line.

    Raises:
        ConfigError: Always.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        from fsdptool.families.bases.families import one_line

        frames = traceback.extract_tb(error.__traceback__)[1:]
        line = f", line {frames[-1].lineno} of {frames[-1].filename.rpartition('/')[2]}" if frames else ""
        raise ConfigError(
            f"{place}: {type(error).__name__}: {one_line(error)}{line}",
            help="correct the code that data.path names",
        ) from error
