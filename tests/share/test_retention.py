"""How long rows are kept, against all chains of windows by brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import QueryError
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Window
from plait.query.relation import Relation
from plait.share.retention import complete_us, keep_us, upper_bounds, with_ttls

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
            if bounds != (None, None)
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


# ---------------------------------------------------------------- TTLs by hint


def hinted(read: dict[str, str], **ttls: int) -> JoinGraph:
    """A join of aliases that read these streams; some have a TTL by hint."""
    names = list(read)
    return JoinGraph(
        "",
        tuple(Alias(name, stream, None, (), ttls.get(name)) for name, stream in read.items()),
        tuple(Equality(ColumnRef(names[0], "k", "int"), ColumnRef(n, "k", "int")) for n in names[1:]),
        (),
    )


OWN = {**TIMED, "b": replace(TIMED["b"], ttl_us=7)}


def settled(graphs: dict[str, JoinGraph]) -> dict[str, int | None]:
    return {name: relation.ttl_us for name, relation in with_ttls(graphs, OWN).items()}


def test_a_hint_gives_its_stream_a_ttl_and_leaves_the_others_theirs() -> None:
    graph = hinted({"x": "a", "y": "b", "z": "c"}, x=5)
    assert settled({"q": graph}) == {"a": 5, "b": 7, "c": None, "d": None}


def test_queries_and_aliases_that_agree_share_one_ttl() -> None:
    one, other = hinted({"x": "a", "y": "a"}, x=5, y=5), hinted({"x": "a", "z": "b"}, x=5, z=7)
    assert settled({"q": one, "r": other})["a"] == 5
    assert settled({"r": other})["b"] == 7


@pytest.mark.parametrize(
    ("graphs", "words"),
    [
        ([hinted({"x": "a", "y": "b"}, y=8)], "stream 'b' is shared, but its TTL is 7e-06 s by its ttl= and 8e-06 s"),
        ([hinted({"x": "a", "y": "a"}, x=5)], "5e-06 s for alias x of query 'q0' and none for alias y of query 'q0'"),
        ([hinted({"x": "a", "y": "c"}, x=5), hinted({"x": "a", "y": "d"}, x=6)], "alias x of query 'q1'"),
        ([hinted({"x": "a", "y": "c"}), hinted({"x": "a", "y": "d"}, x=6)], "none for alias x of query 'q0'"),
        ([hinted({"x": "a", "y": "c"}, x=6), hinted({"x": "a", "y": "d"})], "none for alias x of query 'q1'"),
    ],
)
def test_those_who_share_a_stream_must_agree_on_its_ttl(graphs: list[JoinGraph], words: str) -> None:
    with pytest.raises(QueryError) as caught:
        settled({f"q{i}": graph for i, graph in enumerate(graphs)})
    assert caught.value.code == "TTL_CONFLICT"
    assert words in caught.value.cause
    assert "engine.stream(" in caught.value.remedy


def test_a_result_is_complete_above_what_any_of_its_streams_may_lack() -> None:
    # a at most 5 before or after b; c at most 3 after b, and nothing says how much before.
    graph = joined({("a", "b"): (-5, 5), ("c", "b"): (None, 3)}, "abc")
    assert complete_us(graph, "a", {}) is None
    assert complete_us(graph, "a", {"a": 100}) == 100
    assert complete_us(graph, "a", {"a": 100, "b": 98}) == 103
    assert complete_us(graph, "b", {"a": 100, "b": 98}) == 105
    # A partner may be any time older: no result would ever be known to be complete.
    assert complete_us(graph, "a", {"c": 1000}) is None
