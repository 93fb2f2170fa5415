"""The queries of the benchmark `sharing`: joins over TPC-H's tables, made as paper 001 makes them (section VII-A).

A query begins with a random table; joins are added one after the other, each drawn from those that lead from a table
of the query to one that is not in it, until the query has the size that was drawn.  Joins are by primary and foreign
keys, or by columns whose types and some of whose values are the same.  There are no filters and no windows: all rows
are kept for ever.

`QUERIES` are the first ten different queries of seed 3 that have 1,000 to 10⁸ results at scale factor 1.  The paper
shows five queries of its own in a figure, which its text does not repeat.  Seed 3 is the first whose queries overlap
as much as the paper's must: kept by each query alone, their tables have at least 3.1 times (five) and 5.3 times
(ten) the rows that they have when kept once.  The queries that were left out are `LEFT_OUT`.

The tables of a query are written in the order in which Spark's chain of binary joins has the fewest rows in between
(counted at scale factor 0.1): Spark joins streams in the written order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.tpch.queries import SCHEMAS
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.relation import ColumnDef, Relation

KEY_JOINS = (
    "n_regionkey = r_regionkey",
    "s_nationkey = n_nationkey",
    "c_nationkey = n_nationkey",
    "o_custkey = c_custkey",
    "l_orderkey = o_orderkey",
    "l_partkey = p_partkey",
    "l_suppkey = s_suppkey",
    "ps_partkey = p_partkey",
    "ps_suppkey = s_suppkey",
)
"""A foreign key and the primary key that it refers to."""
COMPATIBLE_JOINS = (
    "c_custkey = n_nationkey",
    "s_suppkey = n_nationkey",
    "s_suppkey = r_regionkey",
    "p_partkey = n_nationkey",
    "o_orderkey = n_nationkey",
    "c_custkey = s_suppkey",
    "p_partkey = s_suppkey",
    "o_custkey = s_suppkey",
    "o_orderkey = p_partkey",
    "c_nationkey = s_nationkey",
    "c_nationkey = r_regionkey",
    "l_partkey = ps_partkey",
)
"""Columns of one type that have some values in common.

Joins of two tables with more than 10⁸ results at scale factor 1 are not among them, as `l_linestatus = o_orderstatus`,
the paper's own example, or `l_suppkey = ps_suppkey`: every new row would have thousands or millions of partners.
"""
JOINS = (*KEY_JOINS, *COMPATIBLE_JOINS)
SIZES = (3, 4, 5)
"""Tables of a query."""
SEED = 3
FEWEST_RESULTS, MOST_RESULTS = 1_000, 100_000_000
"""Results of a query at scale factor 1."""
QUERIES = (
    (
        "part orders lineitem supplier partsupp",
        ("l_partkey = p_partkey", "l_suppkey = s_suppkey", "ps_partkey = p_partkey", "o_orderkey = p_partkey"),
    ),
    (
        "part orders customer lineitem",
        ("o_custkey = c_custkey", "l_orderkey = o_orderkey", "o_orderkey = p_partkey"),
    ),
    (
        "part nation lineitem supplier customer",
        ("l_partkey = p_partkey", "l_suppkey = s_suppkey", "p_partkey = n_nationkey", "c_nationkey = s_nationkey"),
    ),
    (
        "supplier partsupp lineitem",
        ("ps_suppkey = s_suppkey", "l_partkey = ps_partkey"),
    ),
    (
        "customer region orders lineitem partsupp",
        ("o_custkey = c_custkey", "l_orderkey = o_orderkey", "c_nationkey = r_regionkey", "l_partkey = ps_partkey"),
    ),
    (
        "orders nation lineitem customer",
        ("c_nationkey = n_nationkey", "l_orderkey = o_orderkey", "o_orderkey = n_nationkey"),
    ),
    (
        "part orders customer nation supplier",
        ("c_nationkey = n_nationkey", "o_custkey = c_custkey", "s_suppkey = n_nationkey", "o_orderkey = p_partkey"),
    ),
    (
        "part supplier partsupp orders",
        ("ps_partkey = p_partkey", "p_partkey = s_suppkey", "o_custkey = s_suppkey"),
    ),
    (
        "customer region nation part",
        ("c_nationkey = n_nationkey", "p_partkey = n_nationkey", "c_nationkey = r_regionkey"),
    ),
    (
        "supplier region partsupp customer",
        ("ps_suppkey = s_suppkey", "s_suppkey = r_regionkey", "c_nationkey = s_nationkey"),
    ),
)
LEFT_OUT = {
    ("c_nationkey = n_nationkey", "o_custkey = c_custkey", "ps_suppkey = s_suppkey", "s_suppkey = n_nationkey"): (
        115_230_240
    ),
    ("c_custkey = n_nationkey", "o_orderkey = n_nationkey", "c_custkey = s_suppkey"): 7,
    ("ps_partkey = p_partkey", "o_orderkey = n_nationkey", "p_partkey = s_suppkey", "o_custkey = s_suppkey"): 0,
    ("s_nationkey = n_nationkey", "ps_partkey = p_partkey", "ps_suppkey = s_suppkey", "c_nationkey = s_nationkey"): (
        4_800_033_120
    ),
}
"""Queries that were drawn as well, with their results at scale factor 1."""
OUTPUTS = {
    "region": ("r_regionkey", "r_name"),
    "nation": ("n_nationkey", "n_name"),
    "supplier": ("s_suppkey", "s_acctbal"),
    "customer": ("c_custkey", "c_acctbal"),
    "part": ("p_partkey", "p_retailprice"),
    "partsupp": ("ps_partkey", "ps_suppkey", "ps_supplycost"),
    "orders": ("o_orderkey", "o_totalprice"),
    "lineitem": ("l_orderkey", "l_linenumber", "l_extendedprice"),
}
"""What queries select of a table: its key and a value."""
TYPES = {
    table: dict(column.strip().split(" ", 1) for column in text.replace("15,2", "15;2").split(","))
    for table, text in SCHEMAS.items()
}
TABLE_OF = {column: table for table, columns in TYPES.items() for column in columns}


@dataclass(frozen=True)
class SharingQuery:
    """A join of tables, each of which is in it once."""

    name: str
    tables: tuple[str, ...]
    joins: tuple[str, ...]

    @property
    def sql(self) -> str:
        """The query as text."""
        columns = ", ".join(column for table in self.tables for column in OUTPUTS[table])
        return f"SELECT {columns} FROM {', '.join(self.tables)} WHERE {' AND '.join(self.joins)}"

    @property
    def graph(self) -> JoinGraph:
        """The same join without Spark."""
        refs = [_ref(column) for table in self.tables for column in OUTPUTS[table]]
        return JoinGraph(
            self.sql,
            tuple(Alias(table, table, None, _columns(table)) for table in self.tables),
            tuple(Equality(*(_ref(column) for column in join.split(" = "))) for join in self.joins),
            tuple(Output(ref.column, ref.type, ref, str(ref), (ref,)) for ref in refs),
        )


def queries(count: int) -> list[SharingQuery]:
    """The first `count` of the queries.

    >>> queries(2)[1].tables
    ('part', 'orders', 'customer', 'lineitem')
    """
    return [
        SharingQuery(f"q{number + 1}", tuple(tables.split()), joins)
        for number, (tables, joins) in enumerate(QUERIES[:count])
    ]


def tables_of(asked: Sequence[SharingQuery]) -> tuple[str, ...]:
    """The tables that some of these queries join."""
    return tuple(table for table in SCHEMAS if any(table in query.tables for query in asked))


def used_columns(table: str) -> tuple[str, ...]:
    """The columns of a table that queries join or select."""
    joined = {column for join in JOINS for column in join.split(" = ")}
    return tuple(column for column in TYPES[table] if column in joined or column in OUTPUTS[table])


def relations(tables: tuple[str, ...]) -> dict[str, Relation]:
    """The tables as streams, with the columns that are used."""
    return {table: Relation(table, tuple((c, _type(c)) for c in used_columns(table))) for table in tables}


def drawn(count: int, seed: int = SEED) -> list[tuple[str, ...]]:
    """The joins of `count` random queries, whatever their results."""
    random = np.random.default_rng(seed)
    return [_drawn(random) for _ in range(count)]


def _drawn(random: np.random.Generator) -> tuple[str, ...]:
    size = int(random.choice(SIZES))
    tables = {str(random.choice(list(SCHEMAS)))}
    joins: list[str] = []
    while len(tables) < size:
        join = str(random.choice([join for join in JOINS if len(tables & _tables(join)) == 1]))
        joins.append(join)
        tables |= _tables(join)
    return tuple(sorted(joins, key=JOINS.index))


def _tables(join: str) -> set[str]:
    return {TABLE_OF[column] for column in join.split(" = ")}


def _type(column: str) -> str:
    return TYPES[TABLE_OF[column]][column].replace(";", ",")


def _ref(column: str) -> ColumnRef:
    return ColumnRef(TABLE_OF[column], column, _type(column))


def _columns(table: str) -> tuple[ColumnDef, ...]:
    return tuple(ColumnDef(column, f"`{column}`", _type(column)) for column in used_columns(table))
