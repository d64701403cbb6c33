"""Cuts like blocks away before a method adds parameters to a model: adapters are then made for few blocks.

A trace builds the model several times, and peft wraps every block each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from fsdptool.memory.tracing.layer_extrapolation import Shortened, shorten

Described = tuple[tuple[int, ...], str, bool]
"""Shape, dtype and whether it is trained."""
Cut = Callable[[nn.Module], None]
Make = Callable[[Cut | None], nn.Module]
"""Builds a model as it will be trained; may call the cut on the bare model, with recomputation applied."""


def described(model: nn.Module) -> dict[str, Described]:
    """Return what is to be known of every parameter of a model, by name."""
    return {
        name: (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
        for name, p in model.named_parameters()
    }


def make_cut(
    make: Make, periods: int, whole: Mapping[str, Described]
) -> tuple[nn.Module, tuple[Shortened, ...]]:
    """Build a model of so many periods; see :func:`layer_extrapolation.shorten`.

    The bare model is cut if ``make`` lets it and the method does the same to the blocks that are kept as to
    those that are not, by the parameters they then have.

    Args:
        make: Builds the model.
        periods: How many are kept of each list of like blocks.
        whole: The parameters at full depth.
    """
    early: list[Shortened] = []
    model = make(lambda bare: early.extend(shorten(bare, periods)))
    if not early:
        return model, shorten(model, periods)
    if not _stands_for(described(model), early, whole):
        model = make(None)
        return model, shorten(model, periods)
    return model, tuple(early)


def _stands_for(
    kept: Mapping[str, Described], cuts: Sequence[Shortened], whole: Mapping[str, Described]
) -> bool:
    """Say whether every parameter at full depth is like the one that stands for it, and no other is kept."""
    by_path: dict[str, list[Shortened]] = {}
    for item in cuts:
        by_path.setdefault(item.path, []).append(item)
    standing = {name: _standing(name, by_path) for name in whole}
    return {*standing.values()} == {*kept} and all(
        kept[standing[name]] == parameter for name, parameter in whole.items()
    )


def _standing(name: str, cuts: Mapping[str, Sequence[Shortened]]) -> str:
    """Return the name of the parameter that stands for ``name`` in the shortened model."""
    for path, items in cuts.items():
        if name.startswith(f"{path}."):
            index, _, rest = name[len(path) + 1 :].partition(".")
            return f"{path}.{_kept_index(int(index), items)}.{rest}"
    return name


def _kept_index(index: int, cuts: Sequence[Shortened]) -> int:
    """Return where a block, or the one a whole number of periods before it, is after the cuts."""
    before = 0
    for item in cuts:
        missing = item.total - item.traced
        if item.cut <= index < item.cut + missing:
            return item.cut - item.period + (index - item.cut) % item.period - before
        before += missing if index >= item.cut else 0
    return index - before


def recomputed(model: nn.Module) -> Iterator[str]:
    """Yield the modules whose forward was replaced."""
    return (path for path, module in model.named_modules() if "forward" in vars(module))
