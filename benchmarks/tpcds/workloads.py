"""The queries that are measured, over tables of which every epoch brings one Parquet file each."""

from __future__ import annotations

from dataclasses import dataclass

from plait.serve.demo_data import QUERY as FOUR_COLUMNS

TPCDS_TABLES = ("store_returns", "customer", "web_returns", "catalog_returns")
CHAIN_TABLES = ("r1", "r2", "r3", "r4")
ROWS_AT_SF1 = 554_000
"""Number of input rows of the TPC-DS query at scale factor 1; the chain has as many."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A query with a title for people, and the columns it reads of each table; none stands for all."""

    name: str
    title: str
    sql: str
    columns: dict[str, tuple[str, ...]]

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables in FROM order."""
        return tuple(self.columns)


FOUR = Workload(
    "four",
    "TPC-DS returns by address, four output columns",
    FOUR_COLUMNS,
    {
        "store_returns": ("sr_addr_sk", "sr_item_sk"),
        "customer": ("c_current_addr_sk", "c_customer_sk"),
        "web_returns": ("wr_refunded_addr_sk", "wr_item_sk"),
        "catalog_returns": ("cr_refunded_addr_sk", "cr_item_sk"),
    },
)

STAR = Workload(
    "star",
    "TPC-DS returns by address, SELECT *",
    "SELECT *" + FOUR_COLUMNS[FOUR_COLUMNS.index("\nFROM") :],
    dict.fromkeys(TPCDS_TABLES, ()),
)

CHAIN = Workload(
    "chain",
    "four-way chain over three keys",
    """
SELECT r1.x1, r2.x2, r3.x3, r4.x4
FROM r1, r2, r3, r4
WHERE r1.a = r2.a AND r2.b = r3.b AND r3.c = r4.c
""",
    {"r1": ("a", "x1"), "r2": ("a", "b", "x2"), "r3": ("b", "c", "x3"), "r4": ("c", "x4")},
)

COMPUTED = Workload(
    "computed",
    "the chain, with outputs computed over two streams each",
    """
SELECT r1.x1 + r4.x4 AS total, CASE WHEN r2.x2 < r3.x3 THEN r2.x2 ELSE r3.x3 END AS least
FROM r1, r2, r3, r4
WHERE r1.a = r2.a AND r2.b = r3.b AND r3.c = r4.c
""",
    CHAIN.columns,
)

FIXED = Workload("fixed", "fixed cost of an epoch", FOUR.sql, FOUR.columns)

WORKLOADS = {w.name: w for w in (FOUR, STAR, CHAIN, COMPUTED, FIXED)}
