"""The layout: which stores there are, and how rows of each stream get there.  Frozen, serialisable, between two epochs.

Identity is given, never counted: stores, edges and filters get their ids when they are first needed, keep them as long
as somebody uses them, and no id is given twice in the life of a checkpoint.  `share/allocate.py` makes one layout from
another.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from plait.query.codec import decode, encode
from plait.query.store import IngestEdge, Input, Mark, Store


@dataclass(frozen=True, slots=True)
class Build:
    """A store that is being filled from another one, beside the epochs that append to it already.

    Rows born before epoch `before` are copied, key group by key group of the source; the manifests say how far.
    """

    store: str
    source: str
    before: int


@dataclass(frozen=True, slots=True)
class StoreHistory:
    """What allocation must know of the rows that rest in a store."""

    spans: tuple[tuple[int, int], ...] = ()
    """First and last birth in each segment that cannot tell its rows' births apart."""
    let_go: int = -1
    """The latest birth of a row that was let expire; −1 if there was none."""


@dataclass(frozen=True)
class Layout:
    """Inputs and stores, and how to find them."""

    inputs: tuple[Input, ...] = ()
    stores: tuple[Store, ...] = ()
    builds: tuple[Build, ...] = ()
    next_edge: int = 0
    next_filter: int = 0
    tables: frozenset[str] = field(default_factory=frozenset)
    """Relations that do not change: their rows come once, and are seen by every query."""

    @cached_property
    def store_by_id(self) -> dict[str, Store]:
        """Stores by their id."""
        return {store.id: store for store in self.stores}

    @cached_property
    def input_by_relation(self) -> dict[str, Input]:
        """Inputs by their relation's name."""
        return {i.relation: i for i in self.inputs}

    @cached_property
    def edge_by_store(self) -> dict[str, IngestEdge]:
        """The edge on which new tuples travel to a store."""
        return {edge.store: edge for i in self.inputs for edge in i.edges if edge.store is not None}

    @property
    def mirs(self) -> tuple[Store, ...]:
        """The stores of intermediate results."""
        return tuple(store for store in self.stores if store.mir is not None)

    def fills(self, epoch: int) -> frozenset[str]:
        """The MIRs that an epoch is the first to feed, and that had a past by then: it fills them."""
        return frozenset(store.id for store in self.mirs if store.first < store.since == epoch)

    @cached_property
    def marks(self) -> dict[str, tuple[Input, Mark]]:
        """Marks by their key."""
        return {mark.key: (i, mark) for i in self.inputs for mark in i.marks}

    def without(self, relations: Collection[str]) -> Layout:
        """Without all that serves these relations; ids that were given to it are not given again."""
        gone = {store.id for store in self.stores if not set(relations).isdisjoint(relations_of(store))}
        return replace(
            self,
            inputs=tuple(i for i in self.inputs if i.relation not in relations),
            stores=tuple(store for store in self.stores if store.id not in gone),
            builds=tuple(build for build in self.builds if build.store not in gone),
            tables=self.tables - frozenset(relations),
        )

    def to_json(self) -> str:
        """Text that `from_json` turns back into an equal layout."""
        values = [self.inputs, self.stores, [[b.store, b.source, b.before] for b in self.builds]]
        return json.dumps(
            {
                "inputs": encode(values[0]),
                "stores": encode(values[1]),
                "builds": values[2],
                "next_edge": self.next_edge,
                "next_filter": self.next_filter,
                "tables": sorted(self.tables),
            },
            sort_keys=True,
        )

    @staticmethod
    def from_json(text: str) -> Layout:
        """The inverse of `to_json`."""
        value = json.loads(text)
        return Layout(
            inputs=decode(value["inputs"]),
            stores=decode(value["stores"]),
            builds=tuple(Build(*build) for build in value["builds"]),
            next_edge=value["next_edge"],
            next_filter=value["next_filter"],
            tables=frozenset(value["tables"]),
        )


def relations_of(store: Store) -> tuple[str, ...]:
    """The relations whose rows are in a store."""
    return (store.relation,) if store.mir is None else store.mir.relations


def shown(id: str) -> str:
    """A query or join as people call it: without what tells it from earlier ones of that name.

    >>> shown("orders"), shown("orders@12"), shown("orders@12.1")
    ('orders', 'orders', 'orders.1')
    """
    name, _, rest = id.partition("@")
    return name + rest.lstrip("0123456789")
