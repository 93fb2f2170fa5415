"""Success rates and correlations from a sample, against counting the sampled keys one by one."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.query.observed import Sample
from plait.stats.sketch import correlation, fresh_share, pair

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=80)
STORES = (("own[k]", ()), ("b[k]", ()), ("c[k]", (0,)), ("c[k]", (0, 1)), ("d[k]", (2,)))

Rows = list[tuple[int, ...]]
"""Per key of the input, how many rows each store has of it."""

KEYS = st.lists(st.tuples(*[st.integers(0, 3)] * len(STORES)), max_size=30)


def sample_of(keys: Rows) -> Sample:
    sample = Sample(1, (), STORES, tuples=len(keys))
    for counts in keys:
        pattern = sum(1 << i for i, rows in enumerate(counts) if rows)
        sample.add(Sample(1, (), STORES, {pattern: [1, *counts]}))
    return sample


@QUICK
@given(KEYS, st.integers(1, len(STORES) - 1))
def test_oracle_a_pair_is_successes_over_lookups_and_rows_over_successes(keys: Rows, place: int) -> None:
    found = pair(sample_of(keys), STORES[place])
    if not keys:
        assert found is None
        return
    hits = [counts[place] for counts in keys if counts[place]]
    assert found == pytest.approx((len(hits) / len(keys), sum(hits) / len(hits) if hits else 1.0))


def test_a_store_that_was_not_asked_tells_nothing() -> None:
    sample = sample_of([(1, 1, 1, 1, 1)])
    assert pair(sample, ("e[k]", ())) is None
    assert pair(sample, ("b[k]", (0,))) is None
    # The first store is the input's own, before this epoch: not a partner.
    assert pair(sample, STORES[0]) is None


def test_an_input_joined_with_itself_is_a_partner_of_its_own() -> None:
    sample = Sample(1, (), (("a[k]", ()), ("a[k]", ())), {0: [1, 0, 0], 3: [1, 2, 4], 2: [2, 0, 2]})
    assert pair(sample, ("a[k]", ())) == (3 / 4, 6 / 3)
    assert fresh_share(sample) == 3 / 4


@QUICK
@given(KEYS)
def test_oracle_fresh_keys_are_those_the_own_store_did_not_have(keys: Rows) -> None:
    fresh = [counts for counts in keys if not counts[0]]
    assert fresh_share(sample_of(keys)) == pytest.approx(len(fresh) / len(keys) if keys else 1.0)


ASKED = st.lists(st.sampled_from([None, ("e[k]", ()), *STORES[1:]]), max_size=5)


@QUICK
@given(KEYS, ASKED)
def test_oracle_correlation_is_joint_success_over_the_product_of_successes(
    keys: Rows, asked: list[tuple[str, tuple[int, ...]] | None]
) -> None:
    found = correlation(sample_of(keys), asked)
    assert len(found) == 1 << len(asked)
    places = [STORES.index(s) if s in STORES else None for s in asked]

    def share(members: list[int]) -> float:
        inside = [c for c in keys if all(places[i] is None or c[places[i] or 0] for i in members)]
        # Half a key more than was seen.
        return (len(inside) + 0.5) / (len(keys) + 0.5)

    for joined, value in enumerate(found):
        members = [i for i in range(len(asked)) if joined >> i & 1]
        expected = share(members) / prod(share([i]) for i in members) if keys else 1.0
        assert value == pytest.approx(expected), members


@QUICK
@given(KEYS, ASKED)
def test_one_store_alone_and_none_at_all_correlate_with_nothing(
    keys: Rows, asked: list[tuple[str, tuple[int, ...]] | None]
) -> None:
    found = correlation(sample_of(keys), asked)
    assert found[0] == 1.0
    assert [found[1 << i] for i in range(len(asked))] == pytest.approx([1.0] * len(asked))


def test_streams_that_exclude_each_other_are_rare_together_and_not_impossible() -> None:
    keys = [(0, 1, 0, 0, 0)] * 50 + [(0, 0, 1, 0, 0)] * 50
    together = correlation(sample_of(keys), [STORES[1], STORES[2]])[3]
    assert 0 < together < 0.03


def test_streams_with_the_same_keys_correlate_by_one_over_their_share() -> None:
    keys = [(0, 1, 1, 0, 0)] * 100 + [(0, 0, 0, 0, 0)] * 300
    assert correlation(sample_of(keys), [STORES[1], STORES[2]])[3] == pytest.approx(4.0, rel=0.01)


@QUICK
@given(KEYS, KEYS)
def test_samples_of_two_epochs_add_up_and_survive_json(one: Rows, other: Rows) -> None:
    both = sample_of(one)
    before = sample_of(other)
    both.add(before)
    assert both == sample_of(one + other)
    assert before == sample_of(other)
    assert Sample.from_json(both.to_json()) == both
