"""The catalog: which streams, tables and queries live on a checkpoint, and the layout that serves them, at one version.

Contract.  A catalog is a frozen value; `with_query`, `without_query` and the like give another one.  Versions are files
`catalog/<n>`, put-if-absent (`state/log/catalog_versions.py`); the manifest of an epoch names the version it ran with.
Epoch *e* runs with the newest version there was when it began, so after any crash a query is wholly in an epoch or
wholly not.

Ids are given once.  A query of the first version has its name as id; one that comes later is called `name@version`,
and so is a store.  Result files, receipts and folders carry the id: what was committed under an old text stays apart
from what is committed under a new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from plait.query.budget import Budget
from plait.query.layout import Layout
from plait.query.relation import Relation

PROGRAM = "program"
"""The origin of a query that the program defines: it must be there again at the next start."""


@dataclass(frozen=True)
class StreamEntry:
    """A stream or table that was registered."""

    name: str
    columns: tuple[tuple[str, str], ...]
    time_column: str | None = None
    delay_ms: int | None = None
    ttl_us: int | None = None
    needed: str | None = None
    keep: str = "used"
    table: bool = False
    since: int = 0
    """The first epoch that it was there."""

    @staticmethod
    def of(relation: Relation, table: bool, since: int) -> StreamEntry:
        """As it is registered now."""
        return StreamEntry(
            relation.name,
            relation.columns,
            relation.time_column,
            relation.delay_ms,
            relation.ttl_us,
            relation.needed,
            relation.keep,
            table,
            since,
        )


@dataclass(frozen=True)
class QueryEntry:
    """A query that was admitted."""

    id: str
    name: str
    sql: str
    digest: str
    """Of its join graphs: the same text can be read in another way, by another Spark or under other settings."""
    joins: tuple[str, ...]
    """What plans call its joins."""
    since: str
    mode: str
    floors: Mapping[str, Mapping[str, int]]
    """By join and alias: the first epoch of birth whose rows it sees."""
    admitted: int
    """The first epoch after its admission."""
    live_since: int | None
    """The first epoch that has results of it; None while a store is built for it."""
    sink: Mapping[str, Any] | None = None
    """Kind and options, where they can be written down; None if it has none, or a function."""
    stores: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    """By join and alias: the stores that it may be looked up in."""
    origin: str = PROGRAM
    complete_us: int | None = None
    """Of an aggregate by event time that began with rows at rest: groups that begin at or before this lack some."""
    budget: Budget = field(default_factory=Budget)

    @property
    def status(self) -> str:
        """`building` or `live`."""
        return "building" if self.live_since is None else "live"


@dataclass(frozen=True)
class Catalog:
    """Streams, queries and layout at one version; −1 is before the first start."""

    version: int = -1
    streams: Mapping[str, StreamEntry] = field(default_factory=dict)
    queries: Mapping[str, QueryEntry] = field(default_factory=dict)
    """By name."""
    layout: Layout = field(default_factory=Layout)
    positions: tuple[str, ...] | None = None
    """The streams that are sources of the streaming query, where Spark knows them by position; None: all, by name."""

    def with_query(self, entry: QueryEntry) -> Catalog:
        """With one more query, or another one under its name."""
        return replace(self, queries={**self.queries, entry.name: entry})

    def without_query(self, name: str) -> Catalog:
        """Without a query; one that is not there changes nothing."""
        return replace(self, queries={n: q for n, q in self.queries.items() if n != name})

    def with_stream(self, entry: StreamEntry) -> Catalog:
        """With one more stream, or another definition of it."""
        return replace(self, streams={**self.streams, entry.name: entry})

    def without_stream(self, name: str) -> Catalog:
        """Without a stream; one that is not there changes nothing."""
        return replace(self, streams={n: s for n, s in self.streams.items() if n != name})

    def with_layout(self, layout: Layout) -> Catalog:
        """On another layout."""
        return replace(self, layout=layout)

    def next_id(self, name: str) -> str:
        """The id of a query that comes with the next version."""
        return name if self.version < 0 else f"{name}@{self.version + 1}"

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `from_json` gives an equal catalog back."""
        return {
            "version": self.version,
            "streams": [asdict(s) for s in self.streams.values()],
            "queries": [asdict(q) for q in self.queries.values()],
            "layout": json.loads(self.layout.to_json()),
            "positions": self.positions,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Catalog:
        """The inverse of `to_json`."""
        streams = [
            StreamEntry(**{**s, "columns": tuple((name, kind) for name, kind in s["columns"])})
            for s in value["streams"]
        ]
        queries = [
            QueryEntry(**{**q, "joins": tuple(q["joins"]), "budget": Budget.from_json(q.get("budget"))})
            for q in value["queries"]
        ]
        return Catalog(
            version=value["version"],
            streams={s.name: s for s in streams},
            queries={q.name: q for q in queries},
            layout=Layout.from_json(json.dumps(value["layout"])),
            positions=None if value["positions"] is None else tuple(value["positions"]),
        )
