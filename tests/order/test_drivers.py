"""Driver policies on streams whose statistics are known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import config
from plait.order.drivers import (
    POLICIES,
    StreamStats,
    consumption_rate,
    initial_output_size,
    output_rate,
    registration,
    round_robin,
    timestamp,
)

STREAMS = {
    # Many tuples that find little, few that find much, and something between.
    "many": StreamStats(buffer=1000.0, results=0.5, sigma=0.9, latest_ms=300),
    "few": StreamStats(buffer=2.0, results=100.0, sigma=40.0, latest_ms=100),
    "some": StreamStats(buffer=50.0, results=8.0, sigma=0.1, latest_ms=200),
}


def test_registration_keeps_the_order_of_registration() -> None:
    assert registration(STREAMS, 5) == ("many", "few", "some")


def test_timestamp_puts_the_stream_that_is_behind_first() -> None:
    assert timestamp(STREAMS, 0) == ("few", "some", "many")


def test_streams_without_event_time_go_last_as_they_were_registered() -> None:
    streams = {"x": StreamStats(1, 1, 1), "late": STREAMS["many"], "y": StreamStats(1, 1, 1), "early": STREAMS["few"]}
    assert timestamp(streams, 0) == ("early", "late", "x", "y")


def test_an_event_time_of_zero_is_a_time() -> None:
    streams = {"x": StreamStats(1, 1, 1), "epoch": StreamStats(1, 1, 1, 0), "before": StreamStats(1, 1, 1, -5)}
    assert timestamp(streams, 0) == ("before", "epoch", "x")


def test_round_robin_gives_each_stream_the_first_place_in_turn() -> None:
    rankings = [round_robin(STREAMS, batch) for batch in range(4)]
    assert rankings == [
        ("many", "few", "some"),
        ("few", "some", "many"),
        ("some", "many", "few"),
        ("many", "few", "some"),
    ]


def test_consumption_rate_puts_the_most_selective_stream_first() -> None:
    assert consumption_rate(STREAMS, 0) == ("some", "many", "few")


def test_initial_output_size_puts_the_buffer_with_most_results_first() -> None:
    # 500, 200 and 400 results.
    assert initial_output_size(STREAMS, 0) == ("many", "some", "few")


def test_output_rate_puts_the_tuples_with_most_results_first() -> None:
    assert output_rate(STREAMS, 0) == ("few", "some", "many")


def test_oracle_initial_output_size_is_the_papers_greedy_choice_with_growing_tables() -> None:
    """Paper 003, Figure 4: in each step the largest |buffer|·σ·Π|ht of the others|, the tables grown meanwhile."""
    buffers, tables, sigma = {"a": 5.0, "b": 70.0, "c": 20.0, "d": 1.0}, {"a": 10, "b": 300, "c": 7, "d": 900}, 1e-4

    def found_by(name: str, sizes: dict[str, float]) -> float:
        product = sigma
        for other in sizes:
            product *= 1 if other == name else sizes[other]
        return product

    streams = {n: StreamStats(buffers[n], found_by(n, tables), 0.0) for n in buffers}
    sizes, chosen = dict(tables), []
    while len(chosen) < len(buffers):
        left = [n for n in buffers if n not in chosen]
        chosen.append(max(left, key=lambda n: buffers[n] * found_by(n, sizes)))
        sizes[chosen[-1]] += buffers[chosen[-1]]
    assert initial_output_size(streams, 0) == tuple(chosen)


NUMBERS = st.floats(0, 1e12)
STATS = st.builds(StreamStats, NUMBERS, NUMBERS, NUMBERS, st.none() | st.integers(-(2**40), 2**40))


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(streams=st.dictionaries(st.text(max_size=3), STATS, min_size=1, max_size=6), batch=st.integers(0, 2**40))
def test_every_policy_ranks_every_stream_once(name: str, streams: dict[str, StreamStats], batch: int) -> None:
    before = dict(streams)
    ranking = POLICIES[name](streams, batch)
    assert sorted(ranking) == sorted(streams)
    assert POLICIES[name](streams, batch) == ranking
    assert list(streams.items()) == list(before.items())


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "round_robin"])
def test_streams_that_are_alike_keep_the_order_of_registration(name: str) -> None:
    streams = {n: StreamStats(3.0, 2.0, 1.0, 7) for n in ("z", "a", "m")}
    assert POLICIES[name](streams, 4) == ("z", "a", "m")


def test_the_known_policies_are_those_of_the_configuration() -> None:
    assert tuple(POLICIES) == config.DRIVER_POLICIES
