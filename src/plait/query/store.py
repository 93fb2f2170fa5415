"""What rests, and how it gets there: stores, their keys, filters and eras; the inputs that feed them.

A *store* keeps one relation, or one intermediate result, partitioned by one attribute (paper 001); an *edge* is a
labelled connection along which buckets travel to it.  `query/plan.py` says who looks into stores, and when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.query.codec import decode, encode, known
from plait.query.expr import Expr
from plait.query.graph import JoinGraph
from plait.query.packed import Packed
from plait.query.relation import ColumnDef
from plait.query.types import is_exact_key

HASH = "#h"
"""Column with the 64-bit hash of the edge's or store's key; rows are sorted by it."""

MASK = "#mask"
"""Column with one bit per filter of a relation that several aliases filter differently (query sets).

More than `MASK_BITS` filters need further columns: `mask_columns`.
"""

MASK_BITS = 62
"""Bits of a query set in one column of signed 64-bit integers."""

SET_BITS = 64
"""Members of a tree in one word of the sets that joined tuples carry inside and between tasks."""

SET = "#set"
"""Columns, one per word, with the set of members that a travelling tuple belongs to."""

BORN = "#born"
"""Column with the epoch in which a row arrived, kept where rows of one segment are of both sides of a floor."""

ARRIVED = "#at"
"""Column with the epoch's clock in microseconds, kept where a relation has a TTL; FOREVER in rows still needed.

Where the TTL has changed since the store was made, the clock is shifted by the difference: a row lives as long as the
TTL of its arrival says, and the store adds the TTL that it was made with.
"""

NEW = "#new"
"""Column of a MIR's rows with one bit per member that arrived in the epoch in which the row was completed.

Nobody asks for it in later epochs, so merges leave it out.
"""

UNTIL = "#until"
"""Column of a MIR's rows with the event time, in microseconds, at which a watermark makes them unreachable."""

CORRUPT = "#corrupt"
"""Column that says which rows a permissive reader could not parse."""

NEEDED = "#needed"
"""Column that says, on the way to ARRIVED, for which rows the relation's predicate `needed` is true."""

FOREVER = 1 << 62
"""An arrival that no TTL ends; a TTL is shorter, so that their sum still fits 64 bits."""


@dataclass(frozen=True, slots=True)
class Key:
    """A partition attribute of a relation: one or more physical columns, with their types."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    exact: bool
    """Equal hashes are equal keys (a single fixed-width column); otherwise keys are compared after lookup."""

    def __str__(self) -> str:
        return ", ".join(c.removeprefix("=") for c in self.columns)


NO_KEY = Key((), (), True)
"""Of an edge on which rows travel to any task: a stream that is read by itself."""


def key_of(graph: JoinGraph, alias: str, attributes: tuple[int, ...]) -> Key:
    """The columns by which an alias carries these attributes."""
    refs = [ref for attribute in attributes if (ref := graph.column_of(alias, attribute)) is not None]
    types = tuple(ref.type for ref in refs)
    return Key(tuple(ref.column for ref in refs), types, exact=len(types) == 1 and is_exact_key(types[0]))


def store_id(relation: str, key: Key) -> str:
    """How the store of a relation by a key is called."""
    return f"{relation}[{key}]"


def mask_columns(filters: int) -> tuple[str, ...]:
    """The columns that hold a query set of so many filters.

    >>> mask_columns(1), mask_columns(63)
    (('#mask',), ('#mask', '#mask1'))
    """
    return tuple(f"{MASK}{word or ''}" for word in range(-(-filters // MASK_BITS)))


@dataclass(frozen=True, slots=True)
class Filter:
    """What lets rows of a stream into some aliases: a condition, and that they are not late for their queries."""

    id: int
    """Given once in the life of a checkpoint."""
    text: str | None
    """SQL over the stream's columns; None lets all rows pass."""
    marks: tuple[str, ...] = ()
    """The marks that the watermark of these queries is made of; a row at or below it is late.  None: never late."""
    expr: Expr | None = None
    """The condition as tasks evaluate it, on rows that arrived before the filter was known; None if they cannot."""
    like: tuple[int, ...] = ()
    """Filters with the same text that were there before: rows that arrived then carry their bits."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Rows of a stream whose latest event time, less the stream's delay, goes into the watermark of some queries."""

    key: str
    texts: tuple[str | None, ...]
    """A row counts if it meets one of these conditions,"""
    required: tuple[str, ...]
    """and has a value in all of these columns."""


def watermark_ms(marks: Sequence[str], seen_ms: Mapping[str, int], policy: str) -> int | None:
    """The watermark that follows from some marks: the least of them, or, by the policy `max`, the greatest.

    None until all of them were seen (by `max`: one of them).

    >>> watermark_ms(("a", "b"), {"a": 5, "b": 3}, "min"), watermark_ms(("a", "b"), {"a": 5}, "min")
    (3, None)
    """
    known = [seen_ms[mark] for mark in marks if mark in seen_ms]
    if not known or (policy == "min" and len(known) < len(marks)):
        return None
    return min(known) if policy == "min" else max(known)


@dataclass(frozen=True, slots=True)
class Reach:
    """How long after its event time a row can still be reached by some queries, by their watermark; None: for ever."""

    marks: tuple[str, ...]
    keep_us: int | None


@dataclass(frozen=True, slots=True)
class Era:
    """What a store has of the rows that were born in some epochs: those from `since` on, up to the next era."""

    since: int
    columns: tuple[str, ...]
    filters: tuple[int, ...]
    """Rows had to pass one of these, of which only those still in use are listed."""
    required: tuple[str, ...]
    """Rows without a value in one of these columns are not there."""
    reach: tuple[Reach, ...] = ()
    """How long rows were kept while this was the newest era."""


@dataclass(frozen=True, slots=True)
class Use:
    """A part of a query that is a MIR: by member of the MIR, the alias that it is there."""

    query: str
    aliases: tuple[str, ...]
    filter: int
    """What tells the rows of this part from those of other uses: like a filter of a stream, by a bit of their sets.

    Uses that ask the same of the members have the same one.
    """


@dataclass(frozen=True, slots=True)
class Mir:
    """A materialised intermediate result (paper 001, section V): a connected part of some queries, kept as a store.

    Its *members* are numbered.  Column `c` of member i is called `i.c`.  A row belongs to a use if it is a result of
    that part of that query, with its filters, floors, windows and conditions: all are judged before the row is kept.
    """

    relations: tuple[str, ...]
    """By member."""
    uses: tuple[Use, ...]
    feeds: tuple[tuple[int, ...], ...]
    """By driving member, the order in which its new tuples look the others up."""
    until: tuple[tuple[int, str, int], ...] = ()
    """(member, its event time, how long after it the longest use can reach a row), of which the first ends a row."""

    @property
    def feeding(self) -> tuple[Use, ...]:
        """The first use of each filter: what it feeds is complete for the others."""
        first = {use.filter: use for use in reversed(self.uses)}
        return tuple(use for use in self.uses if first[use.filter] is use)

    @property
    def filters(self) -> tuple[Filter, ...]:
        """The bits of its rows."""
        return tuple(Filter(use.filter, f"{use.query}({', '.join(use.aliases)})") for use in self.feeding)


@dataclass(frozen=True, slots=True)
class Store:
    """The state of one relation, or of one MIR, partitioned by one attribute."""

    id: str
    relation: str
    """Of a MIR, the relations of its members."""
    key: Key
    columns: tuple[ColumnDef, ...]
    """What a segment holds beside the hash (and MASK, ARRIVED where used)."""
    masked: bool
    time_column: str | None
    keep_us: int | None
    """How long after its event time a row can still be reached; None is for ever."""
    ttl_us: int | None
    """The TTL that the stream had when it got one: ARRIVED is relative to it."""
    reach: tuple[Reach, ...] = ()
    """The same as `keep_us`, query by query."""
    since: int = 0
    """The epoch from which on rows are appended."""
    eras: tuple[Era, ...] = ()
    """Oldest first."""
    floors: tuple[int, ...] = ()
    """Births that must be told apart: some query sees rows from this epoch on, and not those before."""
    lowest: int = 0
    """The lowest floor: rows that were born before it serve nobody."""
    first: int = 0
    """The first epoch whose rows it has, or had."""
    mixed: bool = False
    """Whether it has, or had, rows that were let in by other filters than those of today."""
    mir: Mir | None = None
    owner: str = ""
    """The group of queries, or with `sharing="independent"` the only query, that may use it; empty: any."""
    searched: tuple[Key, ...] = ()
    """Other keys that it is looked up by, because there is no store by them: merged segments have indexes."""

    def filters(self, inputs: Mapping[str, Input]) -> tuple[Filter, ...]:
        """What lets rows in, given the inputs by relation."""
        return self.mir.filters if self.mir is not None else inputs[self.relation].filters


def horizon_us(reach: Sequence[Reach], seen_ms: Mapping[str, int], policy: str) -> int | None:
    """The event time up to which no query can reach a row any more; None while some query can reach all."""
    bounds: list[int] = []
    for one in reach:
        watermark = watermark_ms(one.marks, seen_ms, policy)
        if one.keep_us is None or watermark is None:
            return None
        bounds.append(watermark * 1000 - one.keep_us)
    return min(bounds, default=None)


@dataclass(frozen=True, slots=True)
class IngestEdge:
    """A bucket's way from a source to the tasks: hashed by `key`; appended to `store` if it names one."""

    id: int
    """Given once in the life of a checkpoint."""
    key: Key
    store: str | None
    ttl_us: int | None = None
    """The TTL that the store was made with: `Store.ttl_us`."""
    columns: tuple[str, ...] | None = None
    """Those that travel to a store of one query alone; None: all that leave the source."""
    filters: tuple[int, ...] | None = None
    """Rows that pass one of these travel to a store of one query alone; None: all that leave the source."""


@dataclass(frozen=True)
class Input(Packed):
    """What Spark computes of one stream before the exchange: filter, columns, query-set bits."""

    relation: str
    columns: tuple[ColumnDef, ...]
    """All physical columns, keys included: the select list."""
    travelling: tuple[str, ...]
    """Those that leave the source; a key that is only hashed stays behind."""
    filters: tuple[Filter, ...]
    """What lets rows into aliases; a row travels if one does.  MASK has bit i for filter i if there are several."""
    required: tuple[str, ...]
    """Columns in which NULL rules a row out for every alias: dropped at the source."""
    time_column: str | None
    delay_ms: int | None
    ttl_us: int | None
    edges: tuple[IngestEdge, ...]
    needed: str | None = None
    """SQL over the stream's columns: rows for which it is true when they arrive outlive the TTL."""
    marks: tuple[Mark, ...] = ()
    """Whose latest event times are wanted."""
    corrupt: str | None = None
    """The column in which a permissive reader leaves what it could not parse."""
    table: bool = False
    """Whether its rows come once, and stay what they are."""

    @cached_property
    def texts(self) -> tuple[str | None, ...]:
        """The distinct conditions of filters and marks: what Spark evaluates, one bit each if there are several."""
        used = [f.text for f in self.filters] + [text for mark in self.marks for text in mark.texts]
        return tuple(dict.fromkeys(used))

    @property
    def masked(self) -> bool:
        """Whether rows carry a query set."""
        return len(self.filters) > 1

    def position(self, filter: int) -> int:
        """The bit of a filter in the query sets of this epoch's rows."""
        return next(i for i, f in enumerate(self.filters) if f.id == filter)

    def implied(self, filter: int) -> bool:
        """Whether every row that travels passes a filter."""
        mine = self.filters[self.position(filter)]
        return not self.masked or (mine.text is None and all(f.marks == mine.marks for f in self.filters))

    def to_json(self) -> str:
        """Text that `from_json` turns back into an equal input."""
        return json.dumps(encode(self))

    @staticmethod
    def from_json(text: str) -> Input:
        """The inverse of `to_json`."""
        found = decode(json.loads(text))
        assert isinstance(found, Input)
        return found

    def travels_whole(self, tasks: int) -> bool:
        """Whether rows leave the source once, unsorted, for all edges: one task owns all keys."""
        return tasks == 1 and len(self.edges) > 1 and not self.table


known(ColumnDef, Key, Filter, Mark, Reach, Era, Use, Mir, Store, IngestEdge, Input)
