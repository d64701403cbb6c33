"""The line of samples: complete, the same for any number of ranks, exact after a resume."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptool.training.data.loader import RankShare
from fsdptool.training.data.order import BucketOrder, PlainOrder, mix, permutation


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 5))
def test_every_epoch_holds_every_sample_once(count: int, seed: int, epoch: int) -> None:
    order = PlainOrder(count, seed=seed, shuffle=True)
    places = order.places(epoch * count, count)
    assert sorted(index for index, _ in places) == list(range(count))
    assert {seen for _, seen in places} == {epoch}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(0, 300), st.integers(0, 300), st.integers(0, 99))
def test_a_line_is_the_same_however_it_is_read(count: int, start: int, length: int, seed: int) -> None:
    order = PlainOrder(count, seed=seed, shuffle=True)
    whole = order.places(0, start + length)
    assert order.places(start, length) == whole[start:]


def test_epochs_and_seeds_differ_and_the_order_is_pinned() -> None:
    order = PlainOrder(1000, seed=1, shuffle=True)
    assert order.places(0, 1000) != [(i, 0) for i, _ in order.places(1000, 1000)]
    assert order.places(0, 20) != PlainOrder(1000, seed=2, shuffle=True).places(0, 20)
    # Pinned: a position in a checkpoint must mean the same samples in every later version.
    assert permutation(10, mix(0, 0)).tolist() == PINNED
    assert mix(1, 2, 3) == 6915406620160914355


PINNED = [5, 2, 1, 8, 0, 3, 6, 9, 4, 7]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=5).filter(any),
    st.integers(1, 6),
    st.integers(0, 99),
    st.booleans(),
)
def test_buckets_lose_and_repeat_nothing(sizes: list[int], chunk: int, seed: int, shuffle: bool) -> None:
    buckets, first = [], 0
    for size in sizes:
        buckets.append(range(first, first + size))
        first += size
    order = BucketOrder(buckets, chunk=chunk, seed=seed, shuffle=shuffle)
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    epochs = 3 * chunk
    line = order.places(0, epochs * first)
    # Whole multiples of the chunk per bucket: after chunk epochs every sample was seen equally often.
    assert len(line) == epochs * first
    assert set(Counter(line).values()) == {1}, "a sample comes once per epoch"
    assert Counter(index for index, _ in line) == Counter(dict.fromkeys(bucket_of, epochs))
    for start in range(0, len(line), chunk):
        assert len({bucket_of[index] for index, _ in line[start : start + chunk]}) == 1
    assert order.places(chunk + 1, 7) == order.places(0, chunk + 8)[chunk + 1 :]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_ranks_split_a_global_batch_without_rest(world: int, micro: int, accumulation: int) -> None:
    order = PlainOrder(50, seed=3, shuffle=True)
    shares = [RankShare(rank, world, micro, accumulation) for rank in range(world)]
    places = order.places(0, shares[0].global_batch)
    # In the order of turns, then ranks, the parts are the line itself.
    parts = [place for turn in range(accumulation) for share in shares for place in share.mine(places, turn)]
    assert parts == places
