"""What a start changes in a catalog: the program's definitions against what lives on the checkpoint.

Refused is what would lose something by a forgotten line: a query or stream that lives and is neither defined nor
dropped, and a query that is defined with another text without `replace`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plait.catalog.catalog import PROGRAM, Catalog, QueryEntry, StreamEntry
from plait.errors import CheckpointError
from plait.query.budget import Budget
from plait.query.codec import encode
from plait.query.expr import to_json
from plait.query.graph import JoinGraph
from plait.query.relation import Relation


@dataclass(frozen=True)
class Definition:
    """A query as the program defines it."""

    id: str
    name: str
    sql: str
    graphs: Mapping[str, JoinGraph]
    mode: str
    since: str | None
    """None is `now`, or, for queries that need the same past in all their streams, `new`."""
    one_floor: bool
    sink: Mapping[str, Any] | None
    origin: str = PROGRAM
    closing: tuple[str, str] | None = None
    """In append mode of an aggregate: the join and alias whose event time ends its groups."""
    budget: Budget = field(default_factory=Budget)

    @property
    def digest(self) -> str:
        """Of what its text means."""
        texts = [_graph_text(self.graphs[name]) for name in sorted(self.graphs)]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]

    @property
    def starts(self) -> str:
        """Which past it begins with."""
        return self.since or ("new" if self.one_floor else "now")


def _graph_text(graph: JoinGraph) -> str:
    """What a graph joins, without the text that it was read from."""
    parts = {
        "aliases": [[a.name, a.relation, a.filter, encode(a.columns), a.ttl_us] for a in graph.aliases],
        "equalities": [str(e) for e in graph.equalities],
        "windows": [str(w) for w in graph.windows],
        "conditions": [
            [c.sql, to_json(c.expr) if c.expr is not None and c.is_digested else None] for c in graph.conditions
        ],
        "outputs": [[o.name, o.type, o.sql] for o in graph.outputs],
    }
    return json.dumps(parts, sort_keys=True)


def same_text(one: str, other: str) -> bool:
    """Whether two texts differ in white space only."""
    return one.split() == other.split()


def refuse_another_text(before: QueryEntry, sql: str) -> None:
    """Raises if a query that lives is defined anew without saying so."""
    if not same_text(before.sql, sql):
        raise CheckpointError(
            "QUERY_EXISTS",
            f"query {before.name!r} lives on this checkpoint with another text; {_old_and_new(before.sql, sql)}",
            f"call engine.replace({before.name!r}, …) to run the new text instead of the old one, or use another name",
        )


def changed(
    before: Catalog,
    relations: Mapping[str, Relation],
    tables: Collection[str],
    definitions: Mapping[str, Definition],
    dropped: Collection[str],
    anew: Collection[str] = (),
    *,
    epoch: int,
    on_missing: str,
) -> Catalog:
    """The catalog that the program asks for, on the layout of before: queries that are new have no floors yet."""
    after = _changed_streams(before, relations, tables, dropped, anew, epoch, on_missing)
    for name, entry in before.queries.items():
        if name in definitions:
            _refuse_reading_anew(entry, definitions[name], anew)
            after = _kept_or_replaced(after, entry, definitions[name], epoch)
        elif name in dropped or on_missing == "drop":
            after = after.without_query(name)
        else:
            raise CheckpointError(
                "QUERY_MISSING",
                f"query {name!r} lives on this checkpoint, but the program does not define it; its text: {entry.sql}",
                f"define it again, or call engine.drop({name!r}) to end it "
                '(Config(on_missing_query="drop") ends all that are not defined)',
            )
    for name, definition in definitions.items():
        if name not in before.queries:
            after = after.with_query(_entry(definition, epoch))
    return after


def _kept_or_replaced(after: Catalog, entry: QueryEntry, definition: Definition, epoch: int) -> Catalog:
    if definition.id != entry.id:
        return after.without_query(entry.name).with_query(_entry(definition, epoch))
    if definition.digest != entry.digest:
        raise CheckpointError(
            "QUERY_READ_DIFFERENTLY",
            f"query {entry.name!r} has the same text as before, but Spark reads it as another query: a stream has "
            "other types, or a setting of the session has changed",
            f"restore the setting or the stream, or call engine.replace({entry.name!r}, …) to begin anew",
        )
    return after.with_query(replace(entry, sink=definition.sink, mode=definition.mode, budget=definition.budget))


def _entry(definition: Definition, epoch: int) -> QueryEntry:
    return QueryEntry(
        id=definition.id,
        name=definition.name,
        sql=definition.sql,
        digest=definition.digest,
        joins=tuple(definition.graphs),
        since=definition.starts,
        mode=definition.mode,
        floors={},
        admitted=epoch,
        live_since=None,
        sink=definition.sink,
        origin=definition.origin,
        budget=definition.budget,
    )


def _changed_streams(
    before: Catalog,
    relations: Mapping[str, Relation],
    tables: Collection[str],
    dropped: Collection[str],
    anew: Collection[str],
    epoch: int,
    on_missing: str,
) -> Catalog:
    after = before
    for name, old in before.streams.items():
        if name in anew:
            after = after.without_stream(name)
        elif name in relations:
            _refuse_other_columns(old, relations[name])
            if old.table != (name in tables):
                was, now = ("table", "stream") if old.table else ("stream", "table")
                raise CheckpointError(
                    "SCHEMA_CHANGED",
                    f"{name!r} was a {was} and is a {now}",
                    "register it as it was, or under another name",
                )
        elif name not in dropped and on_missing != "drop":
            raise CheckpointError(
                "STREAM_MISSING",
                f"{'table' if old.table else 'stream'} {name!r} is part of this checkpoint, but the program does not "
                "register it",
                f"register it again, or call engine.drop({name!r}) to end it",
            )
        else:
            after = after.without_stream(name)
    for name, relation in relations.items():
        known = None if name in anew else before.streams.get(name)
        after = after.with_stream(StreamEntry.of(relation, name in tables, epoch if known is None else known.since))
    return after


def _refuse_reading_anew(entry: QueryEntry, definition: Definition, anew: Collection[str]) -> None:
    """A query that goes on has results of the old rows of a table: with new ones it would be another query."""
    read = {alias.relation for graph in definition.graphs.values() for alias in graph.aliases} & set(anew)
    if definition.id == entry.id and read:
        raise CheckpointError(
            "STREAM_IN_USE",
            f"query {entry.name!r} lives on this checkpoint and reads {', '.join(sorted(read))}, which the program "
            "drops and registers again",
            f"call engine.drop({entry.name!r}) before the query is defined: it begins anew with the new rows",
        )


def _refuse_other_columns(old: StreamEntry, new: Relation) -> None:
    """A stream may gain columns, and nothing else: rows at rest have the others."""
    known = dict(new.columns)
    if any(known.get(name) != kind for name, kind in old.columns) or old.time_column not in (None, new.time_column):
        was = ", ".join(f"{name} {kind}" for name, kind in old.columns) + f"; event time {old.time_column}"
        now = ", ".join(f"{name} {kind}" for name, kind in new.columns) + f"; event time {new.time_column}"
        raise CheckpointError(
            "SCHEMA_CHANGED",
            f"stream {old.name!r} differs from what this checkpoint was made for; {_old_and_new(was, now)}",
            "restore the old definition (columns may only be added), or register it under another name",
        )


def _old_and_new(old: str, new: str) -> str:
    """Both; of long texts only the part that differs, with a little around it."""
    if len(old) + len(new) > 800:
        match = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        first = next((op for op in match if op[0] != "equal"), match[0])
        old, new = ("… " + t[max(0, i - 60) : i + 340] + " …" for t, i in ((old, first[1]), (new, first[3])))
    return f"old: {old}; new: {new}"
