"""The query generator of paper 004 (AJoin, its Section 7 and Figure 14), its streams, and a plain count of results.

Streams A to D have six attributes, uniform in 0..500, and an event time; all have the same rate, and an epoch is one
second of event time.  A query is a chain of two or three streams with one selection per stream, and a window of 1, 2 or
3 seconds between neighbours; attributes, comparison, value and window are drawn uniformly.

Query similarity is ComS · ComSJA ÷ AllS² (Equation 3): sources in common with the pattern query, times join attributes
in common, over the squared number of sources.  At 50 % a 2-way query has both sources of the pattern and one of its two
join attributes, so there are 11 join structures.  Of a 3-way query ComS · ComSJA would be 4.5: with two sources in
common it has two attributes in common (44 %), with three sources one or two (33 or 67 %).

The paper's windows are cut at full seconds.  Here two rows are in a window if they are at most so far apart, which is
what SQL over streams can say, and what queries with windows of different length can share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.graph import Alias, Equality, JoinGraph, Output, Window
from plait.query.relation import ColumnDef, Relation

ATTRIBUTES = tuple(f"a{i}" for i in range(6))
TIME = "ts"
STREAMS = ("A", "B", "C", "D")
ATR_MAX = 500
"""Attributes are 0..ATR_MAX, both included."""
WINDOWS = (1, 2, 3)
COMPARISONS = ("=", "<", ">", "<=", ">=")
SECOND_US = 1_000_000
START_US = 1_700_000_000 * SECOND_US
COLUMNS = (*((name, "bigint") for name in ATTRIBUTES), (TIME, "timestamp"))

Joins = tuple[tuple[int, int], ...]
PATTERNS: dict[int, Joins] = {2: ((0, 1),), 3: ((0, 1), (2, 3))}
"""By the number of streams, the join attributes of the pattern query, pair by pair of neighbours."""
Rows = Mapping[str, pa.Table]
"""The rows of every stream."""
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Selection:
    """`attribute comparison value`, over one stream."""

    attribute: int
    comparison: str
    value: int

    @property
    def sql(self) -> str:
        """The condition as it is pushed down.

        >>> Selection(2, "<=", 40).sql
        'a2 <= 40'
        """
        return f"{ATTRIBUTES[self.attribute]} {self.comparison} {self.value}"

    @property
    def expr(self) -> Expr:
        """The condition as tasks evaluate it."""
        column = ColumnRef("", ATTRIBUTES[self.attribute], "bigint")
        return Call(self.comparison, (column, Literal(self.value, "bigint")), "boolean")

    def passing(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows meet it."""
        column = rows.column(ATTRIBUTES[self.attribute]).to_numpy()
        found: npt.NDArray[np.bool_] = {
            "=": np.equal,
            "<": np.less,
            ">": np.greater,
            "<=": np.less_equal,
            ">=": np.greater_equal,
        }[self.comparison](column, self.value)
        return found


@dataclass(frozen=True)
class SetQuery:
    """A chain of streams: neighbours are equal in two attributes and at most `window` seconds apart."""

    name: str
    streams: tuple[str, ...]
    joins: Joins
    """Per pair of neighbours, the attribute of the left and that of the right."""
    selections: tuple[Selection | None, ...]
    window: int

    @property
    def structure(self) -> tuple[tuple[str, ...], Joins]:
        """What queries have in common that differ in selections and window only."""
        return self.streams, self.joins

    @property
    def sql(self) -> str:
        """The template of the paper's Figure 14; its `*` is written out, as names must differ."""
        where = [
            f"{left}.{ATTRIBUTES[i]} = {right}.{ATTRIBUTES[j]} AND {left}.{TIME} BETWEEN "
            f"{right}.{TIME} - INTERVAL {self.window} SECONDS AND {right}.{TIME} + INTERVAL {self.window} SECONDS"
            for left, right, (i, j) in self._pairs
        ]
        where += [f"{s}.{of.sql}" for s, of in zip(self.streams, self.selections, strict=True) if of is not None]
        columns = ", ".join(f"{s}.{c} AS {s}_{c}" for s in self.streams for c, _ in COLUMNS)
        return f"SELECT {columns} FROM {', '.join(self.streams)} WHERE {' AND '.join(where)}"

    @property
    def graph(self) -> JoinGraph:
        """The same join without Spark; of every stream one attribute is selected, so that rows are cheap to make."""
        columns = tuple(ColumnDef(name, f"`{name}`", kind) for name, kind in COLUMNS)
        span = self.window * SECOND_US
        return JoinGraph(
            self.sql,
            tuple(
                Alias(s, s, None if of is None else of.sql, columns, condition=None if of is None else of.expr)
                for s, of in zip(self.streams, self.selections, strict=True)
            ),
            tuple(
                Equality(ColumnRef(left, ATTRIBUTES[i], "bigint"), ColumnRef(right, ATTRIBUTES[j], "bigint"))
                for left, right, (i, j) in self._pairs
            ),
            tuple(
                Output(f"{s}_{ATTRIBUTES[0]}", "bigint", ref, str(ref), (ref,))
                for s in self.streams
                for ref in [ColumnRef(s, ATTRIBUTES[0], "bigint")]
            ),
            tuple(
                Window(ColumnRef(left, TIME, "timestamp"), ColumnRef(right, TIME, "timestamp"), -span, span)
                for left, right, _ in self._pairs
            ),
        )

    @cached_property
    def _pairs(self) -> list[tuple[str, str, tuple[int, int]]]:
        return list(zip(self.streams, self.streams[1:], self.joins, strict=False))


def queries(count: int, ways: int, seed: int = 4) -> list[SetQuery]:
    """The first `count` queries of the generator, 50 % similar to the pattern query of that many streams.

    >>> [str(q.structure) for q in queries(2, 2)]
    ["(('A', 'B'), ((0, 4),))", "(('A', 'B'), ((0, 4),))"]
    """
    random = np.random.default_rng([seed, ways])
    return [_drawn(f"q{number}", ways, random) for number in range(count)]


def _drawn(name: str, ways: int, random: np.random.Generator) -> SetQuery:
    pattern = PATTERNS[ways]
    streams = list(STREAMS[:ways])
    # The places of join attributes: (pair of neighbours, side).
    places = [(pair, side) for pair in range(ways - 1) for side in (0, 1)]
    if ways == 2:
        common = 1
    elif random.integers(3) < 2:
        # ComS = 1 cannot have 4.5 attributes in common, so that of the three equally likely ComS two become 2.
        common = 2
        other = int(random.integers(2)) * 2
        streams[other] = STREAMS[ways]
        places = [(pair, side) for pair, side in places if pair + side != other]
    else:
        common = int(random.integers(1, 3))
    kept = {places[i] for i in random.choice(len(places), common, replace=False)}
    joins = tuple(
        (_attribute((pair, 0) in kept, left, random), _attribute((pair, 1) in kept, right, random))
        for pair, (left, right) in enumerate(pattern)
    )
    selections = tuple(
        Selection(
            int(random.integers(len(ATTRIBUTES))),
            COMPARISONS[int(random.integers(len(COMPARISONS)))],
            int(random.integers(ATR_MAX + 1)),
        )
        for _ in streams
    )
    return SetQuery(name, tuple(streams), joins, selections, WINDOWS[int(random.integers(len(WINDOWS)))])


def _attribute(kept: bool, pattern: int, random: np.random.Generator) -> int:
    drawn = int(random.integers(len(ATTRIBUTES)))
    return pattern if kept else drawn


def unfiltered(asked: Sequence[SetQuery]) -> list[SetQuery]:
    """One query per join structure: without selections, with the widest window of those that have it."""
    widest: dict[tuple[tuple[str, ...], Joins], SetQuery] = {}
    for query in asked:
        found = widest.get(query.structure)
        if found is None or found.window < query.window:
            widest[query.structure] = query
    return [
        replace(query, name=f"w{number}", selections=(None,) * len(query.streams))
        for number, query in enumerate(widest.values())
    ]


def relations() -> dict[str, Relation]:
    """The streams; no row is late, since event times grow from epoch to epoch."""
    return {stream: Relation(stream, COLUMNS, TIME, 0) for stream in STREAMS}


def arrivals(rows: int, epochs: int, seed: int = 4) -> list[dict[str, pa.Table]]:
    """So many rows of every stream in every epoch of a second, at equal distances, attributes uniform."""
    found: list[dict[str, pa.Table]] = []
    randoms = {stream: np.random.default_rng([seed, number]) for number, stream in enumerate(STREAMS)}
    for epoch in range(epochs):
        # Inside the second, so that no epoch begins at the watermark of the one before.
        times = START_US + epoch * SECOND_US + (np.arange(1, rows + 1) * (SECOND_US - 1)) // (rows + 1)
        columns = {TIME: pa.array(times, pa.timestamp("us", "UTC"))}
        found.append(
            {
                stream: pa.table(
                    {name: pa.array(random.integers(0, ATR_MAX + 1, rows)) for name in ATTRIBUTES} | columns
                )
                for stream, random in randoms.items()
            }
        )
    return found


def together(parts: Sequence[Rows]) -> dict[str, pa.Table]:
    """The rows of several epochs."""
    return {stream: pa.concat_tables([part[stream] for part in parts]) for stream in parts[0]}


def expected(query: SetQuery, rows: Rows) -> int:
    """The number of results over all these rows: for each row, its partners to the left times those to the right.

    Partners are counted by two searches in the neighbour's rows, sorted by attribute and time.
    """
    tables = [
        rows[stream] if of is None else rows[stream].filter(pa.array(of.passing(rows[stream])))
        for stream, of in zip(query.streams, query.selections, strict=True)
    ]
    weights: Numbers = np.ones(tables[0].num_rows, np.int64)
    for left, right, (i, j) in zip(tables, tables[1:], query.joins, strict=False):
        sides = (_codes(left, i), _codes(right, j))
        order = np.argsort(sides[0])
        codes, sums = sides[0][order], np.concatenate([[0], np.cumsum(weights[order])])
        span = query.window * SECOND_US
        weights = (
            sums[np.searchsorted(codes, sides[1] + span, "right")]
            - sums[np.searchsorted(codes, sides[1] - span, "left")]
        )
    return int(weights.sum())


def _codes(rows: pa.Table, attribute: int) -> Numbers:
    """Attribute and time in one number: rows of two attributes are never a window apart."""
    times = rows.column(TIME).cast(pa.int64()).to_numpy() - START_US
    codes: Numbers = rows.column(ATTRIBUTES[attribute]).to_numpy() * (1 << 40) + times
    return codes
