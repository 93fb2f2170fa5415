"""By which keys streams are stored: when a query is admitted, and again once its epochs have shown what pays.

A stream could be looked up by every key that it shares with another.  Each of these is a copy of the stream: hashed,
sorted, sent, written and merged.  `chosen` leaves out a key where the stream is also stored by a *wider* one (it has
all columns of the first), and every driver still reaches all others: it joins what carries the rest of the wider key
before.  TPC-H Q9 so keeps `lineitem` by order and by (part, supplier), and neither by part nor by supplier: new parts
look up `partsupp` first.

Invariant.  From every driver there is an order in which each next alias is stored by a key that was joined.  What can
be looked up once, can be looked up later too: so a planner that takes any of these as its next probe never gets stuck.

Later (`searched_instead`) a store also goes that costs more than looking its rows up in another one of the same stream:
tuples then go to all tasks and search there, with an index where rows are merged (`state/segments/searched.py`).  What
a store costs grows with what arrives, and so does a search, as far as rows are not merged yet.

Only wider keys replace a key: to reach a stream in a roundabout way by another key altogether may mean joining streams
that have little in common first (TPC-H Q5: suppliers with customers of their nation), which no saving is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from plait.query.graph import JoinGraph
from plait.query.store import key_of

StoreKey = tuple[str, tuple[str, ...]]
"""A relation and the columns that it is stored by."""

FOREIGN_KEY_FACTOR = 8.0
"""How many times more rows a stream is taken to have per attribute that it carries, where nothing is known of it: each
is a foreign key, and facts refer to dimensions."""


COPY_NS = 200.0
"""Nanoseconds that one store more costs per row that arrives: hashing, sorting, copying, writing, merging.  Like the
others below: from TPC-H Q8 and Q9 at scale factor 1 with and without stores, on two cores."""
INDEX_NS = 40.0
"""What an index costs instead, per row."""
FRESH_EPOCHS = 6.0
"""Epochs whose rows are not merged, and have no index."""
SEARCH_NS = 6.0
"""Per row that is searched."""
SENT_NS = 160.0
"""Per tuple and task that it is sent to, or that has to be sent because it is not where it looks up first."""
FOUND_NS = 50.0
"""Per row found: it is fetched from where it is."""
LEAST_SAVED = 0.1
"""The share of a store's cost that must be saved."""


@dataclass(frozen=True)
class StoreUse:
    """What an epoch does with a store."""

    rows_in: float
    """Rows that arrive."""
    users: int = 0
    """Steps that look rows up."""
    lookups: float = 0.0
    """Keys that they look up, all together,"""
    found: float = 0.0
    """and the rows that these have."""
    driving: float = 0.0
    """Rows that begin where this store is: without it they have to be sent."""

    def with_step(self, lookups: float, found: float) -> StoreUse:
        """One step more."""
        return replace(self, users=self.users + 1, lookups=self.lookups + lookups, found=self.found + found)

    def saved(self, tasks: int) -> float:
        """Nanoseconds per epoch that it saves not to have the store."""
        searching = self.users * SEARCH_NS * FRESH_EPOCHS * self.rows_in + FOUND_NS * self.found
        sending = SENT_NS * (tasks * self.lookups + self.driving)
        return (COPY_NS - INDEX_NS) * self.rows_in - searching - sending


@dataclass(frozen=True)
class LeftOut:
    """A store that could be there, and is not."""

    relation: str
    key: tuple[str, ...]
    instead: tuple[str, ...]
    """The key that stands for it,"""
    searched: bool = False
    """of the store that is searched, if none is wider."""


def chosen(
    graphs: Mapping[str, JoinGraph],
    rows: Mapping[str, float] | None = None,
    there: frozenset[StoreKey] = frozenset(),
) -> dict[str, JoinGraph]:
    """The joins, each with the keys by which its aliases are to be stored.

    `rows` are the sizes of relations, used if all are known; `there` are stores that are kept anyway.
    """
    found = dict(graphs)
    weight = rows if rows and all(relation in rows for relation in _assumed(graphs)) else _assumed(graphs)
    needed = {store for graph in graphs.values() for store in _wanted(graph) - _replaceable(graph)}
    needless = {store for graph in graphs.values() for store in _replaceable(graph)} - needed - there
    for store in sorted(needless, key=lambda s: (-weight[s[0]], s)):
        without = {name: _without(graph, store) for name, graph in found.items() if store in _wanted(graph)}
        if all(graph is not None for graph in without.values()):
            found |= {name: graph for name, graph in without.items() if graph is not None}
    return found


def searched_instead(
    graphs: Mapping[str, JoinGraph],
    uses: Mapping[StoreKey, StoreUse],
    tasks: int,
    there: frozenset[StoreKey] = frozenset(),
) -> dict[str, JoinGraph]:
    """The joins without the stores that cost more than searching; those that are `there` anyway stay."""
    found = dict(graphs)
    gains = {store: use.saved(tasks) for store, use in uses.items() if store not in there}
    paying = [store for store, gain in gains.items() if gain > LEAST_SAVED * COPY_NS * uses[store].rows_in]
    for store in sorted(paying, key=lambda s: (-gains[s], s)):
        without = {name: _fewer(graph, store) for name, graph in found.items() if store in _wanted(graph)}
        if all(graph is not None for graph in without.values()):
            found |= {name: graph for name, graph in without.items() if graph is not None}
    return found


def stored_by(graph: JoinGraph, keys: Mapping[str, frozenset[tuple[str, ...]]]) -> JoinGraph:
    """The join whose aliases are stored by these columns, and no others; by all if these are too few."""
    every = {(a.name, key) for a in graph.aliases for key in graph.every_key_of(a.name)}
    kept = frozenset((a, key) for a, key in every if key_of(graph, a, key).columns in keys.get(a, frozenset()))
    if kept == every or {alias for alias, _ in kept} != {a.name for a in graph.aliases}:
        return graph
    return replace(graph, stored=kept)


def left_out(graph: JoinGraph) -> Iterator[LeftOut]:
    """The stores that a join does without."""
    for alias in graph.aliases:
        for key in graph.every_key_of(alias.name):
            if key not in graph.keys_of(alias.name):
                keys = graph.keys_of(alias.name)
                wider = next((k for k in keys if set(k) > set(key)), None)
                columns = [key_of(graph, alias.name, k).columns for k in (key, wider or keys[0])]
                yield LeftOut(alias.relation, columns[0], columns[1], searched=wider is None)


def is_executable(graph: JoinGraph) -> bool:
    """Whether every alias can reach all others by the keys that are stored, without a search."""
    names = [alias.name for alias in graph.aliases]
    if len(names) > 1 and not all(graph.keys_of(name) for name in names):
        return False
    for driver in names:
        joined, left = [driver], [name for name in names if name != driver]
        while near := [name for name in left if graph.can_look_up(joined, name)]:
            joined += near
            left = [name for name in left if name not in near]
        if left:
            return False
    return True


def _assumed(graphs: Mapping[str, JoinGraph]) -> dict[str, float]:
    """By relation, a guess of its rows."""
    found: dict[str, float] = {}
    for graph in graphs.values():
        for alias in graph.aliases:
            guess = FOREIGN_KEY_FACTOR ** len(graph.attributes_of([alias.name]))
            found[alias.relation] = max(found.get(alias.relation, 0.0), guess)
    return found


def _wanted(graph: JoinGraph) -> set[StoreKey]:
    return {(a.relation, key_of(graph, a.name, key).columns) for a in graph.aliases for key in graph.keys_of(a.name)}


def _replaceable(graph: JoinGraph) -> set[StoreKey]:
    """The stores of whose keys every alias that has them has a wider one."""
    narrow: set[StoreKey] = set()
    wide: set[StoreKey] = set()
    for alias in graph.aliases:
        keys = graph.keys_of(alias.name)
        for key in keys:
            mine = narrow if any(set(other) > set(key) for other in keys) else wide
            mine.add((alias.relation, key_of(graph, alias.name, key).columns))
    return narrow - wide


def _without(graph: JoinGraph, store: StoreKey) -> JoinGraph | None:
    """The join without a store; None if some order needs it."""
    found = _fewer(graph, store)
    return found if found is not None and is_executable(found) else None


def _fewer(graph: JoinGraph, store: StoreKey) -> JoinGraph | None:
    """The join without a store; None if an alias has no other."""
    kept = frozenset(
        (a.name, key)
        for a in graph.aliases
        for key in graph.keys_of(a.name)
        if (a.relation, key_of(graph, a.name, key).columns) != store
    )
    if {alias for alias, _ in kept} != {a.name for a in graph.aliases}:
        return None
    return replace(graph, stored=kept)
