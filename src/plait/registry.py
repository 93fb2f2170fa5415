"""What a program has registered with its engine: streams, tables and queries, and what it has dropped.

Nothing here knows of epochs: what is registered becomes a catalog when it is admitted (`admission.py`).  Names that
differ in case only are refused, because by default Spark does not tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from plait.admission import Asked
from plait.attendant import REQUEST
from plait.catalog.catalog import Catalog
from plait.catalog.changes import refuse_another_text, same_text
from plait.defining import World, read_definition
from plait.errors import QueryError, StreamError
from plait.queries import RegisteredQuery
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.runtime.driver.sinks import Rows, make_sink
from plait.runtime.spark.frames import is_classic
from plait.sql.catalyst.read_query import relation_of, table_of

KEEP = ("used", "all")
SINCE = ("now", "state", "new")

_ANOTHER_NAME = "use another name, which differs in more than upper and lower case"


@dataclass(frozen=True)
class Memento:
    """What was registered at a moment, to go back to."""

    queries: dict[str, RegisteredQuery]
    dropped: frozenset[str]
    relations: dict[str, Relation]
    frames: dict[str, DataFrame]
    tables: frozenset[str]
    anew: frozenset[str]


@dataclass(eq=False)
class Registry:
    """Streams, tables and queries of one program."""

    spark: SparkSession
    catalog: Callable[[], Catalog]
    """The catalog in force."""
    complete_us: Callable[[str], int | None]
    """By id of a query: the event time at or before which its groups lack rows that were gone when it began."""
    frames: dict[str, DataFrame] = field(default_factory=dict)
    relations: dict[str, Relation] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    queries: dict[str, RegisteredQuery] = field(default_factory=dict)
    """By name."""
    dropped: set[str] = field(default_factory=set)
    anew: set[str] = field(default_factory=set)
    """Tables that live on the checkpoint, were dropped, and are registered again."""

    def add_stream(self, name: str, df: DataFrame, ttl: str | None, needed: str | None, keep: str) -> None:
        """One more stream."""
        if not is_classic(df):
            raise StreamError(
                "NOT_STREAMING", f"{name} is not a DataFrame of a classic session", "read it with spark.readStream"
            )
        self._refuse_known(name)
        if keep not in KEEP:
            raise StreamError(
                "KEEP", f"keep={keep!r} of stream {name!r} is not known", f"use one of: {', '.join(KEEP)}"
            )
        self.relations[name] = replace(relation_of(name, df, ttl, needed), keep=keep)
        self.dropped.discard(name)
        self.frames[name] = df

    def add_table(self, name: str, df: DataFrame) -> None:
        """One more table."""
        self._refuse_known(name)
        if not is_classic(df) or df.isStreaming:
            raise StreamError(
                "NOT_A_TABLE", f"{name} is not a batch DataFrame", "read it with spark.read, or use engine.stream(…)"
            )
        self.relations[name] = table_of(name, df)
        self.tables.add(name)
        lives = self.catalog().streams.get(name)
        if name in self.dropped and lives is not None and lives.table:
            self.anew.add(name)
        self.dropped.discard(name)
        self.frames[name] = df

    def define(
        self, name: str, sql: str, output_mode: str | None, since: str | None, replaces: bool
    ) -> RegisteredQuery:
        """One more query, read and checked; with `replaces` instead of the one under its name."""
        made = self.reading(name, sql, output_mode, since, replaces)()
        assert self.register(made, replaces)
        return made

    def reading(
        self, name: str, sql: str, output_mode: str | None, since: str | None, replaces: bool
    ) -> Callable[[], RegisteredQuery]:
        """Refuses what cannot be; what it returns reads and checks the query, whatever is registered meanwhile."""
        self._refuse_duplicate(name, replaces)
        if not (name.isascii() and name.isidentifier()):
            raise QueryError("NAME", f"{name!r} cannot name a query", "use letters, digits and underscores")
        if since is not None and since not in SINCE:
            raise QueryError("SINCE", f"since={since!r} is not known", f"use one of: {', '.join(SINCE)}")
        catalog = self.catalog()
        lives = catalog.queries.get(name)
        if lives is not None and not replaces and name not in self.dropped:
            refuse_another_text(lives, sql)
        world = World(self.spark, dict(self.relations), frozenset(self.tables), dict(self.frames), self.graphs)
        return partial(read_definition, world, self._id(name, sql), name, sql, output_mode, since)

    def register(self, made: RegisteredQuery, replaces: bool) -> bool:
        """A query that was read is there; False if its id is none any more for it, and it must be read again."""
        self._refuse_duplicate(made.name, replaces)
        taken = {q.id for q in self.queries.values()} | {q.id for q in self.catalog().queries.values()}
        if made.id != self._id(made.name, made.sql) and made.id in taken:
            return False
        self.queries[made.name] = made
        if made.answer is not None:
            made.answer.complete_us = partial(self.complete_us, made.id)
        self.dropped.discard(made.name)
        return True

    def _id(self, name: str, sql: str) -> str:
        """Of a query with this text: its own if it lives, else a new one."""
        catalog = self.catalog()
        lives = catalog.queries.get(name)
        goes_on = lives is not None and name not in self.dropped and same_text(lives.sql, sql)
        return lives.id if lives is not None and goes_on else catalog.next_id(name)

    def _refuse_duplicate(self, name: str, replaces: bool) -> None:
        other = same_name(name, self.queries)
        if other is not None and not (replaces and other == name):
            raise QueryError("DUPLICATE_QUERY", f"a query called {other!r} is registered already", _ANOTHER_NAME)

    def drop(self, name: str) -> None:
        """Without what has this name, be it registered or not."""
        readers = [query for query in self._readers(name) if query != name]
        if name in self.relations and readers:
            raise StreamError("STREAM_IN_USE", f"{name!r} is read by {', '.join(readers)}", "drop these queries first")
        self.queries.pop(name, None)
        if name in self.relations:
            del self.relations[name], self.frames[name]
            self.tables.discard(name)
        self.dropped.add(name)
        self.anew.discard(name)

    def restore(self, all_rows: Callable[[str], Rows], sync: bool) -> None:
        """Queries that other processes have added live on: they are defined again from the catalog, with their sinks.

        `all_rows` gives, by name of a query, what its sink may ask for.
        """
        for entry in self.catalog().queries.values():
            if entry.origin != REQUEST or entry.name in self.queries or entry.name in self.dropped:
                continue
            restored = self.define(entry.name, entry.sql, entry.mode, entry.since, replaces=False)
            restored.origin, restored.budget = REQUEST, entry.budget
            if entry.sink is not None:
                kind, options = entry.sink["kind"], entry.sink["options"]
                restored.use(make_sink(kind, entry.name, all_rows(entry.name), options, sync), kind, options)

    def asked(self, on_missing: str, stores: str) -> Asked:
        """All of it, as admission takes it."""
        return Asked(
            relations=dict(self.relations),
            tables=frozenset(self.tables),
            definitions={name: query.definition for name, query in self.queries.items()},
            dropped=frozenset(self.dropped),
            anew=frozenset(self.anew),
            on_missing=on_missing,
            stores=stores,
        )

    def admitted(self) -> None:
        """What was dropped is gone."""
        self.dropped.clear()
        self.anew.clear()

    @property
    def graphs(self) -> dict[str, JoinGraph]:
        """The joins of all queries."""
        return {join: graph for query in self.queries.values() for join, graph in query.graphs.items()}

    def memento(self) -> Memento:
        """All that is registered now."""
        return Memento(
            dict(self.queries),
            frozenset(self.dropped),
            dict(self.relations),
            dict(self.frames),
            frozenset(self.tables),
            frozenset(self.anew),
        )

    def go_back(self, to: Memento) -> None:
        """As if nothing had happened since then."""
        for mine, then in ((self.dropped, to.dropped), (self.tables, to.tables), (self.anew, to.anew)):
            mine.clear()
            mine.update(then)
        self.queries.clear()
        self.queries.update(to.queries)
        self.relations.clear()
        self.relations.update(to.relations)
        self.frames.clear()
        self.frames.update(to.frames)

    def take_back(self, name: str, there: RegisteredQuery | None) -> None:
        """The query under this name is what it was before it was defined."""
        self.queries.pop(name, None)
        if there is not None:
            self.queries[name] = there

    def _readers(self, relation: str) -> list[str]:
        return [
            name
            for name, query in self.queries.items()
            if any(a.relation == relation for graph in query.graphs.values() for a in graph.aliases)
        ]

    def _refuse_known(self, name: str) -> None:
        """Refuses a name that SQL cannot tell from that of a registered stream or table."""
        if (other := same_name(name, self.relations)) is not None:
            raise StreamError("DUPLICATE_STREAM", f"a stream called {other!r} is registered already", _ANOTHER_NAME)


def same_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is this one but for upper and lower case: by default, Spark does not tell them apart."""
    return next((other for other in known if other.lower() == str(name).lower()), None)
