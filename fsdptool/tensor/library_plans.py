"""Compares what a library's own tensor-parallel plan says with what the model is made of. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fsdptool.records.anatomy import Parameter
from fsdptool.records.tensor_plan import SplitModule
from fsdptool.tensor.placements import split_dim
from fsdptool.tensor.projections import Layers

_FROM_END = {"colwise": 2, "packed_colwise": 2, "rowwise": 1, "packed_rowwise": 1}
"""Divided dimension of a weight by transformers' and diffusers' styles, counted from the last (1)."""
_VOCABULARY = frozenset({"embedding_rowwise", "colwise_gather_output", "colwise_rep", "colwise"})


def compare(
    stated: Mapping[str, str], layers: Layers, modules: Sequence[SplitModule]
) -> tuple[tuple[SplitModule, ...], tuple[str, ...]]:
    """Return the split modules with their origin, and findings about the library's plan.

    A rule that divides the same dimension makes the library the origin. Findings are rules that match
    nothing, that divide another dimension or what stays whole here, and layers that the plan leaves out.

    Args:
        stated: The library's plan: style by pattern.
        layers: The model.
        modules: What is split here.
    """
    if not stated:
        return tuple(modules), ()
    ours = {module.path: module for module in modules}
    parameters = {name: parameter for held in layers.held.values() for name, parameter in held}
    agreed: set[str] = set()
    notes: list[str] = []
    unmatched: list[str] = []
    for pattern, style in stated.items():
        matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        paths = [path for path in layers.modules if path and matching.fullmatch(path)]
        paths += [name for name in parameters if matching.fullmatch(name)]
        if not paths:
            unmatched.append(pattern)
            continue
        notes += _judge(pattern, style.partition(":")[0], paths, ours, parameters, agreed)
    left_out = {_folded(path) for path in ours if path not in agreed and not _named(path, stated)}
    if unmatched:
        notes.append(f"rules of the library's plan that match nothing in this model: {', '.join(unmatched)}")
    if left_out:
        notes.append(f"divided here, left whole by the library's plan: {', '.join(sorted(left_out))}")
    return (
        tuple(
            replace(m, origin="library") if m.path in agreed and m.origin != "family" else m for m in modules
        ),
        tuple(notes),
    )


def _judge(
    pattern: str,
    style: str,
    paths: Sequence[str],
    ours: Mapping[str, SplitModule],
    parameters: Mapping[str, Parameter],
    agreed: set[str],
) -> Iterator[str]:
    """Yield what is wrong with one rule; paths that it divides as here are added to ``agreed``."""
    dim = _FROM_END.get(style)
    for path in paths:
        module = ours.get(path)
        weight = parameters.get(path) or parameters.get(f"{path}.weight")
        if module is not None and module.style == "vocabulary":
            agreed.update({path} if style in _VOCABULARY else ())
        elif dim is None or weight is None:
            continue
        elif module is None:
            yield f"the library's plan divides {pattern} ({style}); it stays whole here"
            return
        elif len(weight.shape) < 2 or split_dim(weight, path, module) == len(weight.shape) - dim:
            agreed.add(path)
        else:
            yield f"the library's plan has {pattern} as {style}, which contradicts its shape here"
            return


def _named(path: str, stated: Mapping[str, str]) -> bool:
    return _folded(path) in stated or path in stated


def _folded(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
