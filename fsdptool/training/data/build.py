"""From a recipe to the batches of one rank."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.cache import cache_folder
from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.inspection import micro_batch
from fsdptool.modeling.objective import objective_for
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import SYNTHETIC_SAMPLES, Data, Recipe
from fsdptool.training.data.encoded import encoded_data
from fsdptool.training.data.imported import Wanted, count_stream, open_imported
from fsdptool.training.data.labelled import open_labelled
from fsdptool.training.data.language import open_language
from fsdptool.training.data.loader import Loader, Opened, RankShare, Stack
from fsdptool.training.data.order import PlainOrder, mix

if TYPE_CHECKING:
    import torch


class Synthetic:
    """``count`` different samples, each drawn from (seed, index) alone, again the same every epoch.

    Labels of the shape of the tokens repeat the tokens, so that there is something to learn.

    Args:
        spec: The tensors of a micro-batch of one sample.
        shared: Names of those without a sample dimension (a table of image positions).
        count: Samples of an epoch.
        seed: The run's seed.
    """

    def __init__(self, spec: Sequence[TensorSpec], *, shared: frozenset[str], count: int, seed: int) -> None:
        if count < 1:
            raise ConfigError(f"data.options.samples is {count}", help="give at least 1")
        self._own = tuple(item for item in spec if item.name not in shared)
        self._common = tuple(item for item in spec if item.name in shared)
        self._count = count
        self._seed = seed
        self.digest = hashlib.blake2b(repr((tuple(spec), count, seed)).encode(), digest_size=20).hexdigest()

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one sample; ``epoch`` changes nothing."""
        import torch

        from fsdptool.families.synthetic import synthesise

        own = synthesise(self._own, torch.Generator().manual_seed(mix(self._seed, index, 7)))
        sample = {name: tensor[0] for name, tensor in own.items()}
        tokens, labels = sample.get("input_ids"), sample.get("labels")
        if tokens is not None and labels is not None and tokens.shape == labels.shape:
            high = next(item.high for item in self._own if item.name == "labels")
            sample["labels"] = tokens % high if high else tokens.clone()
        sample |= synthesise(self._common, torch.Generator().manual_seed(mix(self._seed, 8)))
        return sample


def split_spec(one: Sequence[TensorSpec], two: Sequence[TensorSpec]) -> frozenset[str]:
    """Return the tensors that do not grow with the micro-batch, given the specs for one sample and two."""
    sizes = {item.name: item.shape for item in two}
    return frozenset(item.name for item in one if sizes.get(item.name) == item.shape)


def for_micro_batch(recipe: Any, size: int) -> Any:
    """Return the recipe with another micro-batch."""
    return dataclasses.replace(recipe, batch=dataclasses.replace(recipe.batch, micro_batch=size))


def build_batches(
    recipe: Recipe,
    spec: ModelSpec,
    *,
    rank: int = 0,
    world: int = 1,
    cache: Path | None = None,
    device: torch.device | None = None,
) -> Loader:
    """Return the training data of one rank, at its beginning.

    Args:
        recipe: The run's recipe.
        spec: The model.
        rank, world: Data rank and their number: ranks that share one sequence (context parallel)
            count as one.
        cache: Folder for token tables; :func:`data_cache` by default.
        device: Where micro-batches are to be; None leaves them on the CPU.

    Raises:
        ConfigError: The recipe's data cannot be used, or its sizes do not divide.
        StorageError: The cache cannot be written.
    """
    share = share_of(recipe, rank=rank, world=world)
    opened = _open(recipe, spec, recipe.data, cache or data_cache(), part="train")
    return Loader(
        opened.samples,
        opened.collate,
        opened.order,
        share,
        workers=_processes(recipe.data),
        start_method=recipe.data.options.get("start_method", "forkserver"),
        device=device,
    )


def build_evaluation(
    recipe: Recipe,
    spec: ModelSpec,
    *,
    rank: int = 0,
    world: int = 1,
    cache: Path | None = None,
    device: torch.device | None = None,
) -> Loader | None:
    """Return the validation data of one rank, or None if the recipe asks for none.

    Every pass gives the same samples under the same draws: at most ``evaluation.batches`` global
    batches. Data smaller than one global batch is repeated to fill it, on any number of ranks alike.

    Raises:
        ConfigError: The recipe's data cannot be used, or nothing is held out.
        StorageError: The cache cannot be written.
    """
    evaluation = recipe.evaluation
    if evaluation.data is None and evaluation.holdout <= 0.0:
        return None
    share = share_of(recipe, rank=rank, world=world)
    data = evaluation.data if evaluation.data is not None else recipe.data
    part = "all" if evaluation.data is not None else "held_out"
    fixed = dataclasses.replace(data, shuffle=False)
    opened = _open(recipe, spec, fixed, cache or data_cache(), part=part)
    steps = max(1, min(evaluation.batches, opened.order.samples // share.global_batch))
    return Loader(
        opened.samples,
        opened.collate,
        opened.order,
        share,
        workers=_processes(data),
        start_method=data.options.get("start_method", "forkserver"),
        steps=steps,
        device=device,
    )


def prepare(recipe: Recipe, spec: ModelSpec, *, cache: Path | None = None) -> dict[str, Any]:
    """Do once what all ranks need (tokenise, pack), and prove that the data can be used.

    The parent calls it before it starts workers, so that a mistake is one line and not one per rank.

    Returns:
        ``samples`` of an epoch, ``tokens`` of a sample or None, and ``held_out`` samples or None.

    Raises:
        ConfigError: The recipe's data cannot be used.
        StorageError: The cache cannot be written.
    """
    place = cache or data_cache()
    opened = _open(recipe, spec, recipe.data, place, part="train")
    opened.collate([opened.samples.sample(*opened.order.places(0, 1)[0])])
    held_out = None
    if recipe.evaluation.data is not None or recipe.evaluation.holdout > 0.0:
        data = recipe.evaluation.data or recipe.data
        part = "all" if recipe.evaluation.data is not None else "held_out"
        held_out = _open(recipe, spec, data, place, part=part).order.samples
    return {
        "samples": opened.order.samples,
        "tokens": recipe.batch.sequence_length,
        "held_out": held_out,
        "digest": opened.samples.digest,
    }


def data_cache() -> Path:
    """Return the folder token tables and latents are kept in."""
    named = os.environ.get("FSDPTOOL_DATA_CACHE")
    return Path(named).expanduser() if named else cache_folder() / "data"


def share_of(recipe: Recipe, *, rank: int, world: int) -> RankShare:
    """Return how this recipe's global batches are split.

    Raises:
        ConfigError: ``batch.global_batch`` is not a multiple of ranks times micro-batch.
    """
    batch = recipe.batch
    if batch.global_batch is None:
        return RankShare(rank, world, batch.micro_batch, batch.accumulation)
    each = world * batch.micro_batch
    if batch.global_batch < 1 or batch.global_batch % each:
        raise ConfigError(
            f"batch.global_batch {batch.global_batch} is not a multiple of {world} ranks "
            f"x micro_batch {batch.micro_batch}",
            help=f"the nearest multiples are {max(batch.global_batch // each, 1) * each} "
            f"and {(batch.global_batch // each + 1) * each}",
        )
    return RankShare(rank, world, batch.micro_batch, batch.global_batch // each)


def _processes(data: Data) -> int:
    """Return the loading processes of a rank: at least one where other people's code draws random numbers."""
    return max(data.workers, 1) if data.source == "python" else data.workers


def _open(recipe: Recipe, spec: ModelSpec, data: Data, cache: Path, *, part: str) -> Opened:
    if data.source == "synthetic":
        return _synthetic(recipe, spec, data, part)
    if data.source == "python":
        return _imported(recipe, spec, data, part)
    objective = objective_for(recipe, spec)
    if data.source == "images" and objective.samples == "labelled":
        return _labelled(recipe, spec, data, part)
    if data.source in ("images", "latents"):
        return encoded_data(spec).open_samples(recipe, spec, data, cache, part)
    samples, collate = open_language(objective, recipe, spec, data, cache, part)
    return Opened(samples, PlainOrder(len(samples), seed=recipe.seed, shuffle=data.shuffle), collate)


def with_counts(recipe: Recipe, spec: ModelSpec) -> Recipe:
    """Return a recipe that says how many samples the streams of your own code have, so that no rank counts.

    Raises:
        ConfigError: The recipe's data cannot be used.
    """

    def counted(data: Data) -> Data:
        if data.source != "python":
            return data
        count = count_stream(
            data, _wanted(recipe, spec), seed=recipe.seed, trusted=recipe.model.trust_remote_code
        )
        return (
            data if count is None else dataclasses.replace(data, options={**data.options, "samples": count})
        )

    evaluation = recipe.evaluation
    if evaluation.data is not None:
        evaluation = dataclasses.replace(evaluation, data=counted(evaluation.data))
    return dataclasses.replace(recipe, data=counted(recipe.data), evaluation=evaluation)


def _wanted(recipe: Recipe, spec: ModelSpec) -> Wanted:
    one, shared = _one_sample(recipe, spec)
    if spec.reference.kind == "import":
        # The largest number of an example is not a bound.
        one = tuple(dataclasses.replace(item, high=None) for item in one)
    return Wanted({item.name: item for item in one}, shared)


def _imported(recipe: Recipe, spec: ModelSpec, data: Data, part: str) -> Opened:
    return open_imported(
        data,
        _wanted(recipe, spec),
        seed=recipe.seed,
        part=part,
        holdout=recipe.evaluation.holdout,
        trusted=recipe.model.trust_remote_code,
    )


def _one_sample(recipe: Recipe, spec: ModelSpec) -> tuple[Sequence[TensorSpec], frozenset[str]]:
    """Return the tensors of a micro-batch of one, and the names of those that all samples share."""
    one = micro_batch.batch_spec(spec, for_micro_batch(recipe, 1))
    try:
        return one, split_spec(one, micro_batch.batch_spec(spec, for_micro_batch(recipe, 2)))
    except ConfigError:  # it takes one sample at a time
        return one, frozenset()


def _synthetic(recipe: Recipe, spec: ModelSpec, data: Data, part: str) -> Opened:
    one, shared = _one_sample(recipe, spec)
    count = data.options.get("samples", SYNTHETIC_SAMPLES)
    # Held-out samples are further draws, not a share of the training ones.
    seed = recipe.seed if part == "train" else mix(recipe.seed, 11)
    samples = Synthetic(one, shared=shared, count=count, seed=seed)
    return Opened(samples, PlainOrder(count, seed=recipe.seed, shuffle=data.shuffle), Stack(shared=shared))


def _labelled(recipe: Recipe, spec: ModelSpec, data: Data, part: str) -> Opened:
    batch_spec = {item.name: item for item in micro_batch.batch_spec(spec, recipe)}
    if "pixel_values" not in batch_spec:
        raise ConfigError(
            f"{spec.model_class} does not take images under objective classification",
            help="choose another data.source, or synthetic",
        )
    samples = open_labelled(data, spec, batch_spec, part=part, holdout=recipe.evaluation.holdout)
    return Opened(samples, PlainOrder(len(samples), seed=recipe.seed, shuffle=data.shuffle), Stack())
