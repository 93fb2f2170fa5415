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

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from plait.query.codec import decode, encode, known
from plait.query.expr import Expr, columns_of
from plait.query.grouping import Grouping, GroupKey, GroupValue
from plait.query.packed import Packed
from plait.query.store import BORN, SET_BITS, Filter, Input, Key, Store


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
    """Tuples have the hash of their key already: they are at its owner and wait for their hop, or go to all."""
    by: Key | None = None
    """A key by which the store is not partitioned: tuples go to every task, and all rows are searched."""

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
    sets: tuple[tuple[str, bool], ...] = ()
    """(store, whether it sees this epoch) where query sets are sampled too: those of all groups of the structure."""


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
    def searches(self) -> frozenset[int]:
        """The hops at which tuples arrive that go to every task."""
        return frozenset(node.step.hop for node in self.nodes() if node.step.by is not None)

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


known(
    SlotColumn, Zone, Seen, Check, Span, Step, Emit, Feed, Node, Replay, ProbeTree, SampleWish, GroupKey, GroupValue,
    Grouping, QueryPlan, Plan,
)  # fmt: skip
