"""A clock that jumps ahead ends no TTL; one that is put right is believed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.config import Config
from plait.order.orders import fixed
from plait.runtime.driver.steady_clock import SteadyClock, counter, system_clock
from plait.share.probe_trees import build_plan
from plait.testing import Clock, LocalEngine
from tests.share.streams import joined, rows, streams

DAY_US = 86_400_000_000
YEAR = 365 * 86_400


@pytest.fixture
def wall() -> Clock:
    return Clock()


@pytest.fixture
def passed() -> Clock:
    return Clock(0)


def both(seconds: float, *clocks: Clock) -> None:
    for clock in clocks:
        clock.advance(seconds)


def test_a_clock_that_runs_as_it_should_is_believed(wall: Clock, passed: Clock) -> None:
    clock = SteadyClock(DAY_US, wall, passed)
    for seconds in (0, 1, 10 * 86_400, 0.5):
        both(seconds, wall, passed)
        assert clock() == wall.now_us
    # It may be put right by less than the bound, forward and back.
    wall.advance(86_400)
    assert clock() == wall.now_us
    wall.advance(-7_200)
    assert clock() == wall.now_us


def test_a_jump_is_not_believed_until_the_clock_is_put_right(wall: Clock, passed: Clock) -> None:
    clock = SteadyClock(DAY_US, wall, passed)
    begin = clock()
    wall.advance(YEAR)
    both(10, wall, passed)
    assert clock() == begin + 10_000_000
    both(10, wall, passed)
    assert clock() == begin + 20_000_000
    wall.advance(-YEAR)
    both(10, wall, passed)
    assert clock() == wall.now_us == begin + 30_000_000


def test_without_a_bound_every_jump_is_believed(wall: Clock, passed: Clock) -> None:
    clock = SteadyClock(None, wall, passed)
    clock()
    wall.advance(YEAR)
    assert clock() == wall.now_us


def test_the_first_reading_is_taken_as_it_is(wall: Clock, passed: Clock) -> None:
    wall.advance(YEAR)
    assert SteadyClock(DAY_US, wall, passed)() == wall.now_us


def test_the_machine_has_both_clocks() -> None:
    assert SteadyClock(DAY_US)() <= system_clock()
    assert 0 < counter() <= counter()


@pytest.mark.parametrize(("most_us", "found"), [(DAY_US, 1), (None, 0)])
def test_a_jump_of_the_clock_lets_no_state_expire(
    tmp_path: Path, wall: Clock, passed: Clock, most_us: int | None, found: int
) -> None:
    graph = joined("a.k = b.k")
    plan = build_plan({"q": graph}, streams("ab", ttl_us=3600 * 1_000_000), {"q": fixed(graph)}, ("a", "b"))
    clock = SteadyClock(most_us, wall, passed)
    with LocalEngine(tmp_path, plan, Config(tasks=1, sync=False), clock=clock) as engine:
        engine.run({"a": rows(1)})
        wall.advance(YEAR)
        both(60, wall, passed)
        engine.run({})
        wall.advance(-YEAR)
        both(60, wall, passed)
        assert engine.run({"b": rows(1)})["q"].num_rows == found
        assert engine.progress[-1]["clock"] * 1e6 == clock() or most_us is None
        # The TTL itself goes on.
        both(3600, wall, passed)
        assert engine.run({"b": rows(1)})["q"].num_rows == 0
