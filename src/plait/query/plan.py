"""The plan: stores, and probe trees with labelled edges.  Frozen and serialisable; planner and runtime meet here.

Words (paper 001): a *store* keeps one relation partitioned by one attribute; a *probe tree* says where the new
tuples of one relation travel; an *edge* is a labelled connection along which buckets travel.  One query is the
case of one: queries with equal beginnings of their probe orders share the nodes of a tree.

Inside a tree, joined tuples are addressed by *slot*: slot 0 is the driving tuple, slot i what the i-th probe on
the path added.  Expressions in `Step.checks` use the slot number as alias name, so that two queries that call
the same thing differently still share it.

Query sets (paper 004): the *members* of a tree are the queries that share it, each by one driving alias; member i is
bit i of a set.  A joined tuple belongs to a set of members.  Whatever differs between them, filters, floors, windows
and other conditions, takes those for whom it does not hold out of the set; a tuple whose set is empty is dropped.

The rank rule (exactly once): a step looks into all earlier epochs, and into this epoch's segment of the probed
relation if and only if the probed alias ranks below the driving one: `Step.sees_current`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plait.query import expr as expressions
from plait.query.expr import Call, ColumnRef, Expr, Literal, columns_of
from plait.query.graph import JoinGraph, is_exact_key
from plait.query.grouping import Grouping, GroupKey, GroupValue
from plait.query.packed import Packed
from plait.query.relation import ColumnDef

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
class SlotColumn:
    """A column of a joined tuple, addressed by slot."""

    slot: int
    column: str


@dataclass(frozen=True, slots=True)
class Zone:
    """A window as a bound on the stored rows' event times: `lower ≤ theirs − by ≤ upper`; None is unbounded."""

    by: SlotColumn
    lower_us: int | None
    upper_us: int | None


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows that some members of a tree see: those that pass a filter, and were born in an epoch or later."""

    filter: int | None
    """The id of the filter; None where all rows pass."""
    floor: int | None
    """The first epoch of birth; None where there are no older rows."""
    members: int
    """The set of members."""


@dataclass(frozen=True, slots=True)
class Check:
    """A condition over joined tuples that some members have: where it is not true they leave the tuple's set."""

    condition: Expr
    members: int | None = None
    """The set of members; None for all that come here."""


@dataclass(frozen=True, slots=True)
class Span:
    """Windows of several lengths over the same two event times, as `lower ≤ left − right ≤ upper` for some members."""

    left: SlotColumn
    right: SlotColumn
    bounds: tuple[tuple[int | None, int | None, int], ...]
    """(lower, upper, the set of members), in microseconds; None is unbounded."""


@dataclass(frozen=True, slots=True)
class Step:
    """One probe: look `key` up in `store`, then apply what members see and check."""

    store: str
    key: tuple[SlotColumn, ...]
    hop: int
    """After how many exchanges this probe happens; steps of one hop are on one key, in one task."""
    exact: bool
    """The hash alone decides; otherwise the key's columns are compared as well."""
    sees_current: bool
    seen: tuple[Seen, ...] = ()
    """Which rows of the store each member sees."""
    checks: tuple[Check, ...] = ()
    spans: tuple[Span, ...] = ()
    zone: Zone | None = None
    """Which segments need not be opened, by their event times; checks and spans hold the windows themselves."""
    below: int | None = None
    """Of a MIR, the set of its members that rank below the driver: no other may be new in a row of this epoch."""
    stays: bool = False
    """Tuples are where their key's owner is already, and only wait for their hop."""

    @property
    def floor(self) -> int:
        """Rows born before this epoch are seen by no member."""
        return min((seen.floor or 0 for seen in self.seen), default=0)

    @property
    def judges(self) -> bool:
        """Whether whole tuples must be looked at."""
        return bool(self.checks or self.spans)

    @property
    def varies(self) -> bool:
        """Whether members may differ in what they make of a tuple here."""
        return len(self.seen) > 1 or bool(self.spans) or any(check.members is not None for check in self.checks)

    def judged(self) -> Iterator[SlotColumn]:
        """The columns that checks and spans read."""
        for check in self.checks:
            yield from (SlotColumn(int(ref.alias), ref.column) for ref in columns_of(check.condition))
        for span in self.spans:
            yield from (span.left, span.right)


@dataclass(frozen=True, slots=True)
class Emit:
    """A complete result of `query`: the columns that are read of it, by slot.

    They are `QueryPlan.columns`, in that order, unless `values` says how these are computed from them.
    """

    query: str
    columns: tuple[SlotColumn, ...]
    values: tuple[Expr, ...] = ()
    """One expression per column of the result, over slots; empty where nothing is computed."""
    member: int = 0
    """The tuple is one of the query if its set has this bit."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Complete tuples of a MIR: they travel to its store by edge `id`, and are appended there before anybody probes."""

    id: int
    store: str
    key: tuple[SlotColumn, ...]
    """Of the store's key; empty where tuples are at its owner already, with its hash."""
    columns: tuple[SlotColumn, ...]
    """Of the store's columns, without UNTIL."""
    new: int
    """The set of the MIR's members that are new in every tuple: the driving one."""
    births: tuple[tuple[int, int], ...] = ()
    """(slot, member) of those that may be new."""
    arrivals: tuple[tuple[SlotColumn, int], ...] = ()
    """(ARRIVED, TTL) of those that have one."""
    until: tuple[tuple[SlotColumn, int], ...] = ()
    """(event time, how long after it a row can be reached)."""
    members: tuple[tuple[int, int], ...] = ()
    """(member of the tree, filter of its use)."""

    def reads(self) -> Iterator[SlotColumn]:
        """The columns that are read of tuples."""
        yield from (*self.key, *self.columns, *(column for column, _ in (*self.arrivals, *self.until)))
        yield from (SlotColumn(slot, BORN) for slot, _ in self.births)


@dataclass(frozen=True, slots=True)
class Node:
    """A step, what follows it, and the results complete after it.  `id` labels the edge that leads here."""

    id: int
    step: Step
    children: tuple[Node, ...]
    emits: tuple[Emit, ...]
    members: int = 1
    """The set of members whose order goes through here."""
    words: int = 0
    """Words of the sets that come with tuples; 0 where every tuple belongs to all members."""
    feeds: tuple[Feed, ...] = ()
    """MIRs whose rows are complete after it."""

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def reads(self) -> tuple[SlotColumn, ...]:
        """The columns that this node and those under it read of joined tuples."""
        found: dict[SlotColumn, None] = {}
        for node in self.walk():
            # An exact key of this very hop travels as the hash alone.
            if not node.step.exact or (node.step.hop > self.step.hop and not node.step.stays):
                found.update(dict.fromkeys(node.step.key))
            found.update(dict.fromkeys(node.step.judged()))
            for emit in node.emits:
                found.update(dict.fromkeys(emit.columns))
            for feed in node.feeds:
                found.update(dict.fromkeys(feed.reads()))
        return tuple(found)

    def needs(self, below: int) -> tuple[SlotColumn, ...]:
        """The columns of slots < `below` that this node and those under it still read: what must travel here."""
        return tuple(sorted((c for c in self.reads() if c.slot < below), key=lambda c: (c.slot, c.column)))


@dataclass(frozen=True, slots=True)
class Replay:
    """Which rows of a store drive once more, for a query that begins with what is there (`since="state"`)."""

    store: str
    above_us: int | None
    """Only rows with an event time above this: the query itself would have let the others expire."""


@dataclass(frozen=True, slots=True)
class ProbeTree:
    """Where new tuples of `relation` travel, from ingest edge `edge` on."""

    relation: str
    edge: int
    members: tuple[tuple[str, str], ...]
    """The queries that share the tree, each by one driving alias: bit i of a set is the i-th."""
    seen: tuple[Seen, ...]
    """Which of the tuples each member sees."""
    nodes: tuple[Node, ...]
    emits: tuple[Emit, ...] = ()
    """Results that the new tuples are by themselves: of queries that read one stream."""
    replays: Replay | None = None
    """The tuples are not those that arrive, but those that rest in a store: a query's first look at the past."""
    paths: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """By member, the aliases in each slot of its order: several where a MIR is looked up."""

    @property
    def width(self) -> int:
        """Words of a set of members."""
        return -(-len(self.members) // SET_BITS)


@dataclass(frozen=True, slots=True)
class SampleWish:
    """Which stores the sampled new tuples of ingest edge `edge` that pass one of `filters` are looked up in.

    All of `stores` are on the edge's attribute: (store, filters, whether it sees this epoch).  No filters: all rows.
    """

    edge: int
    filters: tuple[int, ...]
    own: str
    stores: tuple[tuple[str, tuple[int, ...], bool], ...]


@dataclass(frozen=True, slots=True)
class IngestEdge:
    """A bucket's way from a source to the tasks: hashed by `key`; appended to `store` if it names one."""

    id: int
    """Given once in the life of a checkpoint."""
    key: Key
    store: str | None
    ttl_us: int | None = None
    """The TTL that the store was made with: `Store.ttl_us`."""


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


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """What becomes of a query's joined rows: `columns` leave the join; `where`/`select` are Spark's part, if any."""

    name: str
    sql: str
    columns: tuple[tuple[str, str], ...]
    where: tuple[str, ...]
    select: tuple[tuple[str, str], ...]
    """(SQL, output name) pairs for Spark; empty when `columns` already are the output."""
    output: tuple[tuple[str, str], ...]
    orders: tuple[tuple[str, tuple[str, ...]], ...]
    """Probe order per driving alias."""
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    """Per driving alias the ids of the nodes its order goes through: where what was observed belongs."""
    relations: tuple[tuple[str, str], ...]
    """(alias, relation) in written order."""
    grouping: Grouping | None = None
    """The aggregate that tasks make of the rows, over `columns`; None keeps the rows themselves."""
    stores: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    """(alias, key columns, store): where each alias is looked up."""
    filters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(alias, filters): its rows, and those of queries of the same structure, pass one of these; none: all rows."""
    marks: tuple[str, ...] = ()
    """What its watermark is made of."""


@dataclass(frozen=True)
class Plan(Packed):
    """Everything an epoch needs to know: inputs, stores, trees, queries, and the ranking of the relations.

    Inputs and stores are those of a layout (`query/layout.py`); trees and ranks may change from epoch to epoch.
    Trees are in ascending rank: the lowest sees only earlier epochs.
    """

    inputs: tuple[Input, ...]
    stores: tuple[Store, ...]
    trees: tuple[ProbeTree, ...]
    queries: tuple[QueryPlan, ...]
    ranks: tuple[str, ...]
    """Relations by driver rank, lowest first."""
    samples: tuple[SampleWish, ...] = ()

    @cached_property
    def hops(self) -> int:
        """Exchanges of an epoch."""
        return max((node.step.hop + bool(node.feeds) for node in self.nodes()), default=1)

    def nodes(self) -> Iterator[Node]:
        """All nodes of all trees."""
        for tree in self.trees:
            for top in tree.nodes:
                yield from top.walk()

    @cached_property
    def feed_by_edge(self) -> dict[int, Feed]:
        """Feeds by the edge that they travel on."""
        return {feed.id: feed for node in self.nodes() for feed in node.feeds}

    @cached_property
    def hop_by_edge(self) -> dict[int, int]:
        """When tuples that travel to a node are needed there: they may have to wait."""
        return {node.id: node.step.hop for node in self.nodes()}

    @cached_property
    def store_by_id(self) -> dict[str, Store]:
        """Stores by their id."""
        return {store.id: store for store in self.stores}

    @cached_property
    def input_by_relation(self) -> dict[str, Input]:
        """Inputs by their relation's name."""
        return {i.relation: i for i in self.inputs}

    @cached_property
    def filter_by_id(self) -> dict[int, Filter]:
        """Filters by their id."""
        of_mirs = {f.id: f for store in self.stores if store.mir is not None for f in store.mir.filters}
        return {f.id: f for i in self.inputs for f in i.filters} | of_mirs

    @cached_property
    def query_by_name(self) -> dict[str, QueryPlan]:
        """Queries by name."""
        return {q.name: q for q in self.queries}

    def to_json(self) -> str:
        """Text that `from_json` turns back into an equal plan."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return json.dumps(encode(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of `to_json`."""
        plan = decode(json.loads(text))
        assert isinstance(plan, Plan)
        return plan

    @cached_property
    def digest(self) -> str:
        """A short name of this very plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


_CLASSES = {
    kind.__name__: kind
    for kind in (
        ColumnDef, Key, Filter, Mark, Reach, Era, Use, Mir, Store, SlotColumn, Zone, Seen, Check, Span, Step, Emit,
        Feed, Node, Replay, ProbeTree, SampleWish, IngestEdge, Input, GroupKey, GroupValue, Grouping, QueryPlan, Plan,
    )
}  # fmt: skip


def encode(value: Any) -> Any:
    """Plan values as JSON values; `decode` gives equal ones back."""
    if isinstance(value, (ColumnRef, Literal, Call)):
        return {"$": "expr", "of": expressions.to_json(value)}
    if dataclasses.is_dataclass(value):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"$": type(value).__name__, **fields}
    return [encode(v) for v in value] if isinstance(value, tuple) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    if value["$"] == "expr":
        return expressions.from_json(value["of"])
    return _CLASSES[value["$"]](**{k: decode(v) for k, v in value.items() if k != "$"})
