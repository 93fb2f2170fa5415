"""The block cache: never heavier than its limit, and what was used last stays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from plait.state.segments.block_cache import LOOKED, Cache


def test_what_was_used_last_stays() -> None:
    cache = Cache(30)
    for name in "abc":
        cache.put(name, name.upper(), 10)
    assert cache.get("a") == "A"
    cache.put("d", "D", 10)
    assert [cache.get(name) for name in "abcd"] == ["A", None, "C", "D"]
    assert cache.bytes == 30


def test_a_thing_put_again_weighs_what_it_weighs_now() -> None:
    cache = Cache(30)
    cache.put("a", 1, 20)
    cache.put("a", 2, 5)
    assert (cache.get("a"), cache.bytes) == (2, 5)


def test_a_thing_too_heavy_is_not_kept_and_drives_nothing_out() -> None:
    cache = Cache(30)
    cache.put("a", 1, 20)
    cache.put("b", 2, 31)
    assert (cache.get("a"), cache.get("b"), cache.bytes) == (1, None, 20)
    cache.put("a", 3, 31)
    assert (cache.get("a"), cache.bytes) == (None, 0)


def test_a_smaller_limit_drives_out_what_was_used_first() -> None:
    cache = Cache(30)
    for name in "abc":
        cache.put(name, name, 10)
    cache.resize(15)
    assert [cache.get(name) for name in "abc"] == [None, None, "c"]
    cache.resize(0)
    assert (cache.get("c"), cache.bytes) == (None, 0)


STEPS = st.lists(st.tuples(st.sampled_from(("get", "put", "resize")), st.integers(0, 5), st.integers(0, 40)))


@given(STEPS)
def test_oracle_the_cache_is_a_list_by_last_use(steps: list[tuple[str, int, int]]) -> None:
    cache, model, limit = Cache(50), OrderedDict[int, int](), 50
    for do, key, weight in steps:
        if do == "get":
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        elif do == "resize":
            limit = weight
            cache.resize(limit)
        else:
            cache.put(key, weight, weight)
            model.pop(key, None)
            if weight <= limit:
                model[key] = weight
        while sum(model.values()) > limit:
            model.popitem(last=False)
        assert cache.bytes == sum(model.values()) <= cache.limit
        assert list(cache._values._held) == list(model)


def test_a_cache_that_finds_nothing_gives_memory_up_and_takes_it_back_when_it_would_find_something() -> None:
    cache = Cache(80)

    def ask(keys: Iterable[int]) -> int:
        found = 0
        for key in keys:
            found += cache.get(key) is not None
            cache.put(key, key, 1)
        return found

    assert ask(range(2 * LOOKED)) == 0
    assert cache.bytes == 10
    cache.resize(160)
    assert cache.bytes <= 20
    # A hundred things again and again: too many for what it keeps, but not for what it could keep.
    rounds = [number % 100 for number in range(10_000, 10_000 + 3 * LOOKED)]
    found = ask(rounds)
    assert cache.bytes == 160 - 60
    assert LOOKED < found < 3 * LOOKED
