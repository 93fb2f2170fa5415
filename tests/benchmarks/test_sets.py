"""The benchmark `sets`, at tiny sizes: the generator, the plain count against DuckDB, counted work, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from matplotlib.figure import Figure

from benchmarks.sets import work as measuring
from benchmarks.sets.report import REPORT, gain, over
from benchmarks.sets.throughput import Result, _figure
from benchmarks.sets.throughput import Size as ThroughputSize
from benchmarks.sets.work import Size, ran, work
from benchmarks.sets.workload import PATTERNS, WINDOWS, arrivals, expected, queries, together, unfiltered


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return work(2, tmp_path_factory.mktemp("sets"), Size((1, 12), 60, 1, 1))


@pytest.mark.parametrize("ways", [2, 3])
def test_oracle_the_plain_count_is_duckdbs(ways: int) -> None:
    rows = together(arrivals(300, 4))
    asked = queries(25, ways)
    found = 0
    with duckdb.connect() as connection:
        for stream, table in rows.items():
            connection.register(stream, table)
        for query in (*asked, *unfiltered(asked)[:3]):
            row = connection.execute(f"SELECT count(*) FROM ({query.sql})").fetchone()
            assert row is not None
            assert expected(query, rows) == row[0], query.sql
            found += row[0]
    assert found > 1000


def test_two_way_queries_keep_one_join_attribute_of_the_pattern() -> None:
    asked = queries(500, 2)
    (left, right) = PATTERNS[2][0]
    assert all(joins[0][0] == left or joins[0][1] == right for joins in (q.joins for q in asked))
    assert len({q.structure for q in asked}) == 11
    assert {q.window for q in asked} == set(WINDOWS)


def test_three_way_queries_are_half_like_the_pattern_on_average() -> None:
    asked = queries(500, 3)
    pattern = [a for pair in PATTERNS[3] for a in pair]
    similar = []
    for query in asked:
        assert query.streams[1] == "B", "neighbours are those of the pattern"
        sources = sum(a == b for a, b in zip(query.streams, "ABC", strict=True))
        own = [s for pair in ((0, 1), (1, 2)) for s in pair]
        mine = [a for pair in query.joins for a in pair]
        common = sum(m == p and query.streams[s] in "ABC" for m, p, s in zip(mine, pattern, own, strict=True))
        assert common >= (2 if sources == 2 else 1)
        similar.append(sources)
    assert {*similar} == {2, 3}


def test_a_longer_list_of_queries_begins_with_the_shorter() -> None:
    assert queries(100, 3)[:10] == queries(10, 3)


def test_the_baseline_has_one_query_per_structure_with_the_widest_window() -> None:
    asked = queries(100, 2)
    wide = unfiltered(asked)
    assert len(wide) == len({q.structure for q in asked}) == 11
    for query in wide:
        assert query.window == max(q.window for q in asked if q.structure == query.structure)
        assert set(query.selections) == {None}


def test_shared_queries_do_no_more_lookups_than_alone_or_unfiltered(measured: dict[str, Any]) -> None:
    assert measured["equal"]
    one, many = measured["figures"]
    assert one["shared"]["lookups"] == one["alone"]["lookups"]
    assert many["shared"]["lookups"] < many["alone"]["lookups"]
    assert many["shared"]["lookups"] <= many["widest"]["lookups"]
    assert many["shared"]["results"] == many["alone"]["results"]


def test_a_query_with_other_results_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "expected", lambda query, rows: expected(query, rows) + (query.name == "q1"))
    epochs = arrivals(40, 4)
    assert ran(tmp_path, queries(3, 2), epochs, together(epochs))[1] == 1
    assert list(tmp_path.iterdir()) == []


def test_throughput_is_summed_over_queries_and_a_wrong_or_failed_run_is_told() -> None:
    rows, asked = together(arrivals(50, 2)), queries(4, 2)
    size = ThroughputSize((4,), 50, 2, 2, "1g")
    right = {query.name: expected(query, rows) for query in asked}
    figure = _figure(asked, [Result(1.0, [0.5, 0.5], right)], size, rows)
    assert figure["throughput"] == 4 * 2 * 50 / 0.5
    assert figure["wrong"] == 0
    assert _figure(asked, [Result(1.0, [0.5], {**right, "q2": right["q2"] + 1}), None], size, rows)["wrong"] == 2
    assert _figure(asked, [None], size, rows)["throughput"] is None


def test_the_report_tells_ratios_and_goals(measured: dict[str, Any]) -> None:
    part = json.loads(json.dumps(measured))
    part["figures"][1]["queries"] = 100
    figures = [
        {"queries": n, "structures": 1, "seconds": s, "throughput": t, "registered": 1.0, "results": 7}
        | {"steps": {"join": 0.1}, "tasks": {"probe": 0.05}, "trigger": {"queryPlanning": 0.02}, "wrong": 0}
        for n, s, t in ((1, 0.2, 10_000.0), (100, 0.4, 500_000.0), (500, None, None))
    ]
    rate = part | {"part": "throughput2", "kind": "throughput", "figures": figures, "wrong": 1}
    document = {"parts": [part, rate]}
    text = "\n".join(REPORT.lines(part, document))
    assert f"| {over(part['figures'][1], 'shared', 'widest', 'lookups'):.3f} |" in text
    assert "lookups at most 1.05 ×" in text
    text = "\n".join(REPORT.lines(rate, document))
    assert gain(rate, 100) == 50
    assert "50.0 × (met)" in text
    assert "NOT EQUAL" in text
    assert "| failed |" in text
    figure = Figure()
    REPORT.draw(document, figure)
    assert len(figure.axes) == 4
