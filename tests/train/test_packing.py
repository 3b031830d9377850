"""Groups of any size become batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lachesis_train.api.packing import Sized, pack

sizes = st.lists(st.integers(1, 9), max_size=9)


def groups(of: list[int]) -> list[Sized]:
    return [Sized(size, 0) for size in of]


@given(sizes, st.integers(1, 20), st.booleans())
@example([4, 3, 4], 8, True)
def test_a_batch_has_the_right_number_of_sequences_if_any_set_with_the_oldest_group_has(found, batch_size, first):
    fits = any(
        sum(chosen) + found[0] == batch_size for count in range(len(found)) for chosen in combinations(found[1:], count)
    )
    chosen = pack(groups(found), batch_size, oldest_first=first)
    assert (chosen is not None) is fits
    if chosen is not None:
        assert chosen[0] == 0
        assert sum(found[at] for at in chosen) == batch_size


@given(
    st.lists(st.builds(Sized, st.integers(1, 5), st.sampled_from([0, 1, 2, None])), min_size=1, max_size=8),
    st.integers(1, 16),
    st.dictionaries(st.integers(0, 2), st.integers(0, 10), min_size=1),
    st.booleans(),
)
@example([Sized(*of) for of in [(1, 1), (4, 0), (5, 0), (3, 0), (4, 0), (4, 1), (5, 1)]], 11, {1: 6}, False)
def test_a_batch_with_all_shares_is_found_if_there_is_one(queue, batch_size, least, oldest_first):
    takes_oldest = oldest_first or sum(least.values()) < batch_size or queue[0].env_id in least

    def fits(chosen: Sequence[int]) -> bool:
        shares = {each: sum(queue[at].sequences for at in chosen if queue[at].env_id == each) for each in least}
        whole = sum(queue[at].sequences for at in chosen) == batch_size and (0 in chosen or not takes_oldest)
        return whole and all(shares[each] >= least[each] for each in least)

    if any(fits(chosen) for count in range(1, len(queue) + 1) for chosen in combinations(range(len(queue)), count)):
        chosen = pack(queue, batch_size, least, oldest_first=oldest_first)
        assert chosen is not None and fits(chosen) and len({*chosen}) == len(chosen)


@given(sizes.filter(len), st.integers(1, 20))
def test_no_group_waits_for_ever(found, batch_size):
    """Whatever the sizes, a queue of enough sequences gives a batch with the oldest group, as full as it can be."""
    chosen = pack(groups(found), batch_size, exact=False)
    if sum(found) < batch_size:
        assert chosen is None
        return
    assert chosen is not None and chosen[0] == 0
    total = sum(found[at] for at in chosen)
    if found[0] > batch_size:
        assert chosen == [0]
    else:
        reachable = [found[0] + sum(others) for count in range(len(found)) for others in combinations(found[1:], count)]
        assert total == max(sum_ for sum_ in reachable if sum_ <= batch_size)


@given(
    st.lists(st.builds(Sized, st.integers(1, 9), st.sampled_from([0, 1, None])), min_size=1, max_size=9),
    st.integers(1, 16),
    st.dictionaries(st.integers(0, 1), st.integers(0, 10)),
    st.booleans(),
)
def test_the_oldest_group_can_go_before_all_shares(queue, batch_size, least, exact):
    chosen = pack(queue, batch_size, least, exact=exact, oldest_first=True)
    if chosen is not None:
        total = sum(queue[at].sequences for at in chosen)
        assert chosen[0] == 0 and len({*chosen}) == len(chosen)
        assert total == batch_size if exact else (total <= batch_size or chosen == [0])


def test_shares_hold_when_the_oldest_group_does_not_fit_beside_them():
    queue = [Sized(size, env_id) for size, env_id in [(9, 0), (9, 1), (9, 1), (9, 1), (3, 0)]]
    assert pack(queue, 32, {1: 27, 0: 5}) is None
    assert pack(queue, 32, {1: 27, 0: 5}, exact=False) == [1, 2, 3, 4]
    assert pack(queue, 32, {1: 27, 0: 5}, exact=False, oldest_first=True) == [0, 1, 2, 4]
    assert pack([Sized(4, 0), Sized(9, 1), Sized(4, 0)], 8, {1: 4, 0: 4}, exact=False) == [1], "the share of env 1"


def test_the_older_groups_go_first():
    assert pack(groups([2] * 8), 8) == [0, 1, 2, 3]
    assert pack(groups([3, 4, 4, 1, 2, 2]), 8) == [0, 1, 3]
    assert pack(groups([3, 3, 3]), 8) is None
    assert pack(groups([3, 3, 3]), 8, exact=False) == [0, 1]


def test_an_environment_gets_its_share_or_the_batch_waits():
    mixed = [Sized(4, 0), Sized(4, 0), Sized(4, 1), Sized(4, 0)]
    assert pack(mixed, 8, {1: 4}) == [0, 2]
    assert pack(mixed, 8, {2: 4}) is None
    assert pack(mixed, 8, {1: 6}) is None


def test_thousands_of_groups_are_packed():
    assert len(pack(groups([1, 3, 7] * 1000), 4096) or []) > 1000
    queue = [Sized(3, 0), *(Sized(2 + at % 2, at % 3) for at in range(6000))]
    assert sum(queue[at].sequences for at in pack(queue, 4095, {1: 1500, 2: 1001}) or []) == 4095


def drained(sizes: Sequence[tuple[int, int]], batch_size: int, least: dict[int, int]) -> list[list[int]]:
    """All batches of a queue of (environment, sequences), each with the oldest, with a wait for an exact one before."""
    queue = [Sized(size, env_id) for env_id, size in sizes]
    batches = []
    while (chosen := pack(queue, batch_size, least, oldest_first=True)) or (
        chosen := pack(queue, batch_size, least, exact=False, oldest_first=True)
    ):
        batches.append([queue[at].sequences for at in chosen])
        queue = [group for at, group in enumerate(queue) if at not in chosen]
    return batches


@pytest.mark.parametrize(
    ("sizes", "batch_size", "least", "batches"),
    [
        ([(0, 3)] * 3, 4, {0: 4}, [[3], [3]]),
        ([(0, 9), (1, 2), (1, 2)], 8, {0: 4}, [[9]]),
        ([(1, 8), (0, 2), (0, 2), (0, 2), (0, 2)], 8, {0: 4}, [[8], [2, 2, 2, 2]]),
        ([(0, 4), (1, 6), (0, 4), (1, 6), (0, 4)], 8, {0: 4, 1: 4}, [[4, 4], [6], [6]]),
        ([(0, 1)] * 3000, 3000, {}, [[1] * 3000]),
    ],
)
def test_shares_and_sizes_that_do_not_fit_hold_nothing_up(
    sizes: list[tuple[int, int]], batch_size: int, least: dict[int, int], batches: list[list[int]]
) -> None:
    assert drained(sizes, batch_size, least) == batches
