"""Measures whole SQL queries over streams, against Spark.

Plait and Spark take turns, each in a process of its own that runs all queries; medians over the rounds.  Answers after
the last epoch and after two in between must equal DuckDB's over the same files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

from benchmarks import jobs
from benchmarks.options import Options, chosen, scale_factor
from benchmarks.report import publish
from benchmarks.tpch import data
from benchmarks.tpch.contestants import CONTESTANTS, TpchJob, contest
from benchmarks.tpch.queries import QUERIES, SCHEMAS
from benchmarks.tpch.report import REPORT
from plait.errors import ConfigError

PAPER = (2, 3, 5, 7, 8, 9, 10, 11, 15, 18, 21)
"""The queries of paper 002, Table 3."""
HEAP = "8g"
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in."""

    sf: float
    epochs: int
    queries: tuple[int, ...]
    who: tuple[str, ...]
    repeat: int
    memory: str

    @property
    def checked(self) -> tuple[int, ...]:
        """The epochs after which answers are compared."""
        return tuple(sorted({self.epochs // 3, 2 * self.epochs // 3, self.epochs - 1}))


def settle(options: Options) -> Setup:
    """Fill in the defaults; parts are queries by number, or `all`.

    >>> settle(Options(parts=("3", "5"))).queries, settle(Options(quick=True)).sf
    ((3, 5), 0.01)
    """
    default = (3, 11) if options.quick else PAPER
    named = chosen("query", options.parts, ("all", *map(str, QUERIES)), tuple(map(str, default)))
    return Setup(
        sf=scale_factor(options, full=0.1, quick=0.01),
        epochs=options.epochs or (3 if options.quick else 10),
        queries=tuple(QUERIES) if "all" in named else tuple(map(int, named)),
        who=chosen("contestant", options.who, tuple(CONTESTANTS), ("plait", "spark")),
        repeat=options.repeat or (1 if options.quick else 3),
        memory=options.memory or HEAP,
    )


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0 if all answers are right."""
    setup = settle(options)
    parts = publish("tpch", setup, measured(out, setup, console), REPORT, out, console)
    return 0 if all(part["equal"] for part in parts) else 1


def measured(out: Path, setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    """The only part: all queries, contestants by turns."""
    folder = data.ensure(out / "data", setup.sf, setup.epochs)
    expected = {query: expected_answers(folder, query, setup.checked) for query in setup.queries}

    def contested(who: str) -> dict[int, dict[str, Any]]:
        console.print(f"  {who} …", highlight=False)
        job = TpchJob(who, list(setup.queries), str(folder), setup.epochs, setup.memory, list(setup.checked))
        outcome = jobs.run(contest, job, out / "scratch")
        if not outcome.finished:
            raise ConfigError("BENCH_RUN", f"{who} does not run: {outcome.failure}", "see the message")
        found = {query: outcome.result[str(query)] for query in setup.queries}
        for query, mine in found.items():
            answers = mine.pop("answers")
            mine["equal"] = all(same_rows(answers.get(str(epoch)), rows) for epoch, rows in expected[query].items())
            differs = "" if mine["equal"] else ", NOT EQUAL to DuckDB's answer"
            console.print(f"    Q{query}: {mine['seconds']:.1f} s{differs}", highlight=False)
        return found

    rounds = jobs.by_turns(setup.who, setup.repeat, contested)
    queries = {
        str(query): {who: _summary([found[query] for found in of]) for who, of in rounds.items()}
        for query in setup.queries
    }
    yield {
        "part": "queries",
        "title": "TPC-H over streams: an answer after every epoch",
        "rows": {str(query): _rows_read(query, folder, setup.epochs) for query in setup.queries},
        "rows_in": sum(_count(folder, table, setup.epochs) for table in SCHEMAS),
        "queries": queries,
        "equal": all(one["equal"] for of in queries.values() for one in of.values()),
    }


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median run of a query, with the seconds of all."""
    return jobs.median_run(runs, lambda run: float(run["seconds"])) | {
        "all_seconds": [run["seconds"] for run in runs],
        "equal": all(run["equal"] for run in runs),
    }


def expected_answers(folder: Path, query: int, epochs: tuple[int, ...]) -> dict[int, list[tuple[Any, ...]]]:
    """DuckDB's answers after each of some epochs."""
    import duckdb

    found = {}
    for epoch in epochs:
        with duckdb.connect() as connection:
            for table in SCHEMAS:
                files = data.prefix(folder, table, epoch)
                connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet({files})")
            found[epoch] = connection.execute(QUERIES[query]).fetchall()
    return found


def same_rows(found: list[list[Any]] | None, expected: list[tuple[Any, ...]]) -> bool:
    """Whether two answers are the same, up to the order of rows and the last digits of averages.

    >>> same_rows([["b", "2.00"], ["a", None]], [("a", None), ("b", 2.0)])
    True
    """
    if found is None or len(found) != len(expected):
        return False
    mine, theirs = (sorted(([_plain(v) for v in row] for row in rows), key=str) for rows in (found, expected))
    return all(_same(a, b) for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=True))


def _plain(value: Any) -> Any:
    """A value as JSON leaves it comparable: numbers as floats, everything else as text."""
    if value is None:
        return None
    try:
        return round(float(value), 6)
    except (TypeError, ValueError):
        return str(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= max(_TOLERANCE * abs(one), 2e-6)
    return bool(one == other)


def _count(folder: Path, table: str, epochs: int) -> int:
    return sum(pq.read_metadata(file).num_rows for file in data.prefix(folder, table, epochs - 1))


def _rows_read(query: int, folder: Path, epochs: int) -> int:
    """The number of rows of the tables that a query names."""
    text = QUERIES[query].lower()
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
    return sum(_count(folder, table, epochs) for table in SCHEMAS if table in words)
