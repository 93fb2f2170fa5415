"""How long rows are kept, against all chains of windows by brute force."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Window
from plait.query.relation import Relation
from plait.share.retention import keep_us, upper_bounds

NAMES = "abcd"
TIMED = {n: Relation(n, (("k", "int"), ("ts", "timestamp")), "ts", 1000) for n in NAMES}

Bounds = tuple[int | None, int | None]


def joined(windows: dict[tuple[str, str], Bounds], names: str = NAMES) -> JoinGraph:
    return JoinGraph(
        "",
        tuple(Alias(n, n, None, ()) for n in names),
        tuple(Equality(ColumnRef(names[0], "k", "int"), ColumnRef(n, "k", "int")) for n in names[1:]),
        (),
        tuple(
            Window(ColumnRef(x, "ts", "timestamp"), ColumnRef(y, "ts", "timestamp"), *bounds)
            for (x, y), bounds in windows.items()
        ),
    )


def test_a_row_is_kept_until_the_other_side_can_no_longer_reach_it() -> None:
    # a − b in [−10, 5]: a row of b waits 5 for later a's, a row of a waits 10 for later b's.
    assert keep_us(joined({("a", "b"): (-10, 5)}, "ab"), TIMED) == {"a": 10, "b": 5}


def test_a_bound_on_one_side_bounds_one_side() -> None:
    assert keep_us(joined({("a", "b"): (-10, None)}, "ab"), TIMED) == {"a": 10, "b": None}


def test_a_row_that_must_be_later_is_gone_before_its_time() -> None:
    assert keep_us(joined({("a", "b"): (5, 10)}, "ab"), TIMED) == {"a": -5, "b": 10}


def test_windows_add_up_along_a_chain() -> None:
    kept = keep_us(joined({("a", "b"): (-1, 2), ("b", "c"): (-10, 20)}, "abc"), TIMED)
    assert kept == {"a": 11, "b": 10, "c": 22}


def test_an_alias_no_window_reaches_keeps_the_others_for_ever() -> None:
    kept = keep_us(joined({("a", "b"): (-1, 2)}, "abc"), TIMED)
    assert kept == {"a": None, "b": None, "c": None}


def test_a_stream_without_event_time_keeps_everything_for_ever() -> None:
    relations = {**TIMED, "b": Relation("b", (("k", "int"), ("ts", "timestamp")))}
    assert keep_us(joined({("a", "b"): (-1, 2)}, "ab"), relations) == {"a": None, "b": None}


SPANS = st.tuples(st.none() | st.integers(-9, 0), st.none() | st.integers(0, 9))
PAIRS = [(x, y) for i, x in enumerate(NAMES) for y in NAMES[i + 1 :]]


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(st.dictionaries(st.sampled_from(PAIRS), SPANS))
def test_the_bound_between_two_aliases_is_the_tightest_of_all_chains(windows: dict[tuple[str, str], Bounds]) -> None:
    direct: dict[tuple[str, str], int] = {}
    for (x, y), (lower, upper) in windows.items():
        direct |= {} if upper is None else {(x, y): upper}
        direct |= {} if lower is None else {(y, x): -lower}
    found = upper_bounds(joined(windows))
    for z, x in permutations(NAMES, 2):
        others = [n for n in NAMES if n not in (z, x)]
        chains = [(z, *middle, x) for r in range(3) for middle in permutations(others, r)]
        sums = [
            sum(direct[step] for step in pairwise(c)) for c in chains if all(step in direct for step in pairwise(c))
        ]
        assert found.get((z, x)) == min(sums, default=None)
