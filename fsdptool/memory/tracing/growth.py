"""How a trace grows with depth: two depths predict any other exactly, or the full depth is traced.

Where only blocks grow with depth, a trace declares that they repeat (``records/trace.py:Repeat``). Some
models also do something per block outside their blocks: the balance loss of transformers 5.23 loops over
the router logits of all layers (``modeling_qwen3_moe.py:load_balancing_loss_func``). Such a trace is written
as a sequence of tokens. One more period of blocks inserts tokens at certain places, the same ones for
every period, and each number in a token (a size, a layer's index, the place of the tensor that is freed)
changes linearly. Where that is so for one recipe is learnt from three depths, the third of which must be
predicted token by token. It is applied to two depths of any of the recipe's micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any

from fsdptool.records.trace import Operation, RecomputedCall, Segment, Trace

_Token = tuple[tuple[Any, ...], tuple[Any, ...]]
"""What happens, and the numbers of it that may change with depth."""

_NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class _Insertion:
    """Where one more period of blocks adds tokens.

    Attributes:
        place: In the shallow trace; what is inserted there repeats the ``length`` tokens before it.
        shifted: The same place in the trace that is one period deeper.
        length: Tokens per period.
        slack: By how many tokens it could come earlier, by what happens alone.
        back: By how many of these it does.
    """

    place: int
    shifted: int
    length: int
    slack: int = 0
    back: int = 0

    def moved(self, back: int) -> _Insertion:
        """Return the same insertion so many tokens earlier."""
        return replace(self, place=self.place - back, shifted=self.shifted - back, back=back)

    def inserted(self, what: Sequence[Any]) -> Sequence[Any]:
        """Return what a period inserts, of what happens at the smaller depth."""
        return what[self.place - self.length : self.place]


@dataclass(frozen=True, slots=True)
class GrowthRule:
    """Where one more period of blocks adds tokens to the traces of one recipe.

    Attributes:
        lists: Paths of the lists that grow, each with a dot.
        shallow: What happens at the smaller depth, without numbers.
        deep: What happens with one more period.
        insertions: Where they differ, from the front to the back.
    """

    lists: tuple[str, ...]
    shallow: tuple[Any, ...]
    deep: tuple[Any, ...]
    insertions: tuple[_Insertion, ...]

    @classmethod
    def learn(
        cls, shallow: Trace, deep: Trace, deeper: Trace, periods: int, paths: Sequence[str]
    ) -> GrowthRule | None:
        """Return the rule that predicts ``deeper`` token by token, or None.

        Args:
            shallow: The trace at fewer blocks.
            deep: The trace with one more period in each list.
            deeper: The trace with ``periods`` periods more than the shallow one.
            periods: At least 2.
            paths: Lists that grow.
        """
        lists = tuple(f"{path}." for path in dict.fromkeys(paths))
        if not _rest(shallow) == _rest(deep) == _rest(deeper):
            return None
        first, second, expected = (_tokens(trace, lists) for trace in (shallow, deep, deeper))
        keys, more = tuple(key for key, _ in first), tuple(key for key, _ in second)
        insertions: list[_Insertion] = []
        start = at = 0
        for insertion in _insertions(keys, more) or ():
            # It can lie anywhere in what repeats by the tokens. Their numbers tell the first and the last
            # period from the others; in the middle, the ends are far away.
            slack = insertion.slack
            size = insertion.place - start + periods * insertion.length
            region = expected[at : at + size]
            for moved in sorted(range(slack + 1), key=lambda move: abs(2 * move - slack)):
                candidate = insertion.moved(moved)
                if _agree(_grown(first, second, (candidate,), periods, start, insertion.place), region):
                    insertions.append(candidate)
                    break
            else:
                return None
            start, at = insertion.place, at + size
        rule = cls(lists, keys, more, tuple(insertions))
        return rule if list(_grown(first, second, rule.insertions, periods)) == expected else None

    def apply(self, shallow: Trace, deep: Trace, periods: int) -> Trace | None:
        """Return the trace at ``periods`` periods more than ``shallow``, or None if the rule is another's.

        Args:
            shallow: As the rule was learnt, of any micro-batch.
            deep: The same with one more period.
            periods: At least 0.
        """
        if _rest(shallow) != _rest(deep):
            return None
        first, second = _tokens(shallow, self.lists), _tokens(deep, self.lists)
        if tuple(key for key, _ in first) != self.shallow or tuple(key for key, _ in second) != self.deep:
            return None
        return _written(shallow, _grown(first, second, self.insertions, periods))

    def carried(self, shallow: Trace, deep: Trace) -> GrowthRule | None:
        """Return the rule for a micro-batch with other loops outside its blocks, or None if it is another's.

        The loss of a larger micro-batch takes more chunks. A period inserts the same, with the same freedom
        to lie elsewhere, at places that have moved.

        Args:
            shallow: At the depth that the rule was learnt from, of any micro-batch.
            deep: The same with one more period.
        """
        if _rest(shallow) != _rest(deep):
            return None
        keys, more = (tuple(key for key, _ in _tokens(trace, self.lists)) for trace in (shallow, deep))
        found = _insertions(keys, more) or []
        moved = [new.moved(old.back) for new, old in zip(found, self.insertions, strict=False)]
        alike = len(found) == len(self.insertions) and all(
            (new.length, new.slack, new.inserted(keys)) == (old.length, old.slack, old.inserted(self.shallow))
            for new, old in zip(moved, self.insertions, strict=True)
        )
        return GrowthRule(self.lists, keys, more, tuple(moved)) if alike else None


def _rest(trace: Trace) -> Trace:
    """Return what a trace says beside its program."""
    program: dict[str, Any] = dict.fromkeys(("segments", "sizes", "kinds", "names", "vocabulary"), ())
    return replace(trace, gradients={}, operations=(), **program)


def _tokens(trace: Trace, lists: Sequence[str]) -> list[_Token]:
    """Return a trace as tokens: boundaries, memory that comes and goes, operations, calls, gradients."""
    tokens: list[_Token] = []
    births: dict[int, tuple[tuple[Any, ...], int]] = {}
    for segment in trace.segments:
        path, block = _split(segment.path, lists)
        counts = (segment.bytes_moved, segment.kernels, segment.recomputed)
        what = ("segment", segment.marker, path, *segment.flops)
        tokens.append((what, (block, *counts, *segment.flops.values())))
        for event in segment.events:
            if event < 0:
                # Blocks are told apart by what they free: in a row of frees, nothing else would.
                born, at = births[-event - 1]
                tokens.append((born, (at,)))
                continue
            number = event - 1
            name, index = _split(trace.vocabulary[trace.names[number]], lists)
            births[number] = ("free", trace.kinds[number], name, segment.marker, path), len(tokens)
            tokens.append((("allocate", trace.kinds[number], name), (index, trace.sizes[number])))
        for number in segment.operations:
            what, numbers = _operation(trace.operations[number])
            tokens.append((("operation", *what), numbers))
        for call in segment.calls:
            what, numbers = (
                _operation(trace.operations[call.operation]) if call.operation is not None else ((), ())
            )
            tokens.append((("call", call.selector, *what), (call.bytes, call.bytes_moved, *numbers)))
        tokens += [(("sum",), (size,)) for size in segment.summed]
        tokens += [(("gather",), (size,)) for size in segment.gathered]
    for name, number in trace.gradients.items():
        path, index = _split(name, lists)
        tokens.append((("gradient", path), (index, births[number][1])))
    return tokens


def _split(path: str, lists: Sequence[str]) -> tuple[str, int]:
    """Return a path without the index of the block it is in, and that index."""
    for prefix in lists:
        if path.startswith(prefix):
            index, dot, rest = path[len(prefix) :].partition(".")
            if index.isdigit():
                return f"{prefix}{{}}{dot}{rest}", int(index)
    return path, _NO_BLOCK


def _joined(path: str, index: int) -> str:
    return path if index == _NO_BLOCK else path.replace("{}", str(index), 1)


def _operation(operation: Operation) -> _Token:
    kind = (operation.kind, operation.dtype, operation.causal, operation.fused)
    return kind, (operation.flops, operation.bytes_moved, operation.head_size, operation.queries)


def _insertions(shallow: Sequence[Any], deep: Sequence[Any]) -> list[_Insertion] | None:
    """Find where ``deep`` repeats what came just before it once more than ``shallow`` does.

    Returns:
        Every insertion, as far back as it can be; None if there are other differences.
    """
    numbers: dict[Any, int] = {}
    first = [numbers.setdefault(key, len(numbers)) for key in shallow]
    second = [numbers.setdefault(key, len(numbers)) for key in deep]
    insertions: list[_Insertion] = []
    start = place = here = 0
    while True:
        same = _agreement(first, place, second, here)
        place, here = place + same, here + same
        missing = (len(second) - here) - (len(first) - place)
        if not missing and place == len(first):
            return insertions
        # At the end nothing follows that would tell one block from a period of several: take the longest.
        _, length = max(
            (_agreement(first, place, second, here + count), count)
            for count in range(max(min(missing, here), 0) + 1)
            if second[here - count : here] == second[here : here + count]
        )
        if not length:
            return None
        back = length
        while back < here and second[here - back - 1] == second[here - back - 1 + length]:
            back += 1
        insertions.append(_Insertion(place, here, length, min(back - length, place - start)))
        start = place
        here += length


def _agreement(first: Sequence[int], place: int, second: Sequence[int], other: int) -> int:
    """Return for how many tokens two sequences agree from two places on."""
    count = 0
    for one, two in zip(islice(first, place, None), islice(second, other, None), strict=False):
        if one != two:
            break
        count += 1
    return count


def _grown(
    first: Sequence[_Token],
    second: Sequence[_Token],
    insertions: Sequence[_Insertion],
    periods: int,
    start: int = 0,
    end: int | None = None,
) -> Iterator[_Token]:
    """Yield the tokens at ``periods`` periods more than ``first``, from ``start`` to ``end`` of these."""
    shift = insertions[0].shifted - insertions[0].place if insertions else 0
    places = [(insertion.place, insertion.length) for insertion in insertions]
    for place, length in [*places, (len(first) if end is None else end, 0)]:
        for at in range(start, place):
            what, before = first[at]
            yield what, _on_line(before, before, second[at + shift][1], periods)
        bases = []
        for at in range(place - length, place):
            what, before = first[at]
            same, further = second[at + shift][1], second[at + shift + length][1]
            bases.append((what, _on_line(before, before, same, periods), same, further))
        for copy in range(1, periods + 1):
            for what, base, same, further in bases:
                yield what, _on_line(base, same, further, copy)
        start, shift = place, shift + length


def _on_line(
    start: tuple[Any, ...], before: tuple[Any, ...], after: tuple[Any, ...], steps: int
) -> tuple[Any, ...]:
    """Return ``start`` after so many steps like the one from ``before`` to ``after``."""
    if before == after:
        return start
    return tuple(s + steps * (a - b) for s, b, a in zip(start, before, after, strict=True))


def _agree(tokens: Iterator[_Token], expected: Sequence[_Token]) -> bool:
    return all(one == two for one, two in zip_longest(tokens, expected))


def _written(trace: Trace, tokens: Iterable[_Token]) -> Trace:
    """Return the trace that tokens are of; what they do not say is as in ``trace``."""
    heads: list[tuple[Any, ...]] = []
    bodies: list[tuple[list[int], list[int], list[RecomputedCall], list[int], list[int]]] = []
    sizes: list[int] = []
    kinds: list[int] = []
    names: list[int] = []
    births: dict[int, int] = {}
    vocabulary: dict[str, int] = {}
    operations: dict[Operation, int] = {}
    gradients: dict[str, int] = {}

    def operation(what: Sequence[Any], numbers: Sequence[Any]) -> int:
        kind, dtype, causal, fused = what
        flops, moved, head_size, queries = numbers
        made = Operation(kind, dtype, flops, moved, head_size, queries, causal, fused)
        return operations.setdefault(made, len(operations))

    for place, ((what, *kind), numbers) in enumerate(tokens):
        if what == "free":
            bodies[-1][0].append(-(births[numbers[0]] + 1))
        elif what == "allocate":
            births[place] = len(sizes)
            sizes.append(numbers[1])
            kinds.append(kind[0])
            names.append(vocabulary.setdefault(_joined(kind[1], numbers[0]), len(vocabulary)))
            bodies[-1][0].append(len(sizes))
        elif what == "operation":
            bodies[-1][1].append(operation(kind, numbers))
        elif what == "call":
            number = operation(kind[1:], numbers[2:]) if kind[1:] else None
            bodies[-1][2].append(RecomputedCall(kind[0], numbers[0], numbers[1], number))
        elif what == "sum":
            bodies[-1][3].append(numbers[0])
        elif what == "gather":
            bodies[-1][4].append(numbers[0])
        elif what == "gradient":
            gradients[_joined(kind[0], numbers[0])] = births[numbers[1]]
        else:
            marker, path, *dtypes = kind
            index, moved, kernels, again, *flops = numbers
            heads.append(
                (marker, _joined(path, index), dict(zip(dtypes, flops, strict=True)), moved, kernels, again)
            )
            bodies.append(([], [], [], [], []))
    segments = [
        Segment(
            marker,
            path,
            tuple(events),
            flops,
            moved,
            kernels,
            again,
            tuple(costly),
            tuple(calls),
            tuple(sums),
            tuple(gathers),
        )
        for (marker, path, flops, moved, kernels, again), (events, costly, calls, sums, gathers) in zip(
            heads, bodies, strict=True
        )
    ]
    return replace(
        trace,
        segments=tuple(segments),
        sizes=tuple(sizes),
        kinds=tuple(kinds),
        names=tuple(names),
        vocabulary=tuple(vocabulary),
        gradients=gradients,
        operations=tuple(operations),
    )
