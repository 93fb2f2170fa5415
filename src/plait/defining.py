"""Reading a query: SQL text in, a checked definition out.  Nothing of the engine changes, so any thread may do it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from plait.errors import QueryError, RecomputationWarning
from plait.queries import RegisteredQuery
from plait.query.graph import JoinGraph
from plait.query.relation import Relation
from plait.runtime.answers.answer import Answer, output_mode
from plait.runtime.driver.sinks import Keep
from plait.share.retention import final_us, with_ttls
from plait.sql.answer.residual import Residual
from plait.sql.catalyst.read_query import ReadQuery, read_query


@dataclass(frozen=True)
class World:
    """What a query is read against."""

    spark: SparkSession
    relations: Mapping[str, Relation]
    tables: frozenset[str]
    frames: Mapping[str, DataFrame]
    graphs: Mapping[str, JoinGraph]
    """The joins of all registered queries."""


def read_definition(
    world: World, id: str, name: str, sql: str, asked_mode: str | None, since: str | None
) -> RegisteredQuery:
    """The query with this text; refused, with the reason, if it cannot be run."""
    schemas = {stream: df.schema for stream, df in world.frames.items()}
    read = read_query(world.spark, world.relations, schemas, id, sql)
    _refuse_tables_only(world, name, read)
    with_ttls({**world.graphs, **read.graphs}, world.relations)
    mode = output_mode(name, read.residual, asked_mode)
    if read.residual is not None and len(read.residual.sources) > 1 and since == "now":
        raise QueryError(
            "SINCE",
            f"query {name!r} asks what is not there (a semi, anti or outer join, or several sources), so all its "
            "streams must begin at one time",
            'use since="new", or since="state"',
        )
    made = RegisteredQuery(id, name, sql, read, mode, since)
    if read.residual is not None:
        wait_us = _final_us(world, name, read.residual) if mode == "append" else 0
        made.answer = Answer(id, read.residual, mode, Keep(), wait_us)
        _warn_of_recomputation(name, read.residual)
    return made


def _refuse_tables_only(world: World, name: str, read: ReadQuery) -> None:
    used = {alias.relation for graph in read.graphs.values() for alias in graph.aliases}
    if used <= world.tables:
        raise QueryError("NO_STREAM", f"query {name!r} reads tables only", "ask Spark: its answer never changes")


def _final_us(world: World, name: str, residual: Residual) -> int:
    """How far the watermark has to be past a group's end until it is final; refused if that is never."""
    aggregate = residual.only_source
    assert aggregate is not None
    assert aggregate.graph is not None
    assert aggregate.closing is not None
    alias = aggregate.closing.alias
    found = final_us(aggregate.graph, world.relations, alias, world.tables)
    if found is None:
        raise QueryError(
            "OUTPUT_MODE",
            f"no group of query {name!r} is ever final: rows of {alias} can be joined with later rows without end",
            f"bound the event times of all other streams by that of {alias}, or use update or complete",
        )
    return found


def _warn_of_recomputation(name: str, residual: Residual) -> None:
    """Says once that answers take longer and longer, and why."""
    kept = [source for source in residual.sources if source.maintained is None and source.graph is not None]
    if not kept:
        return
    streams = "; ".join(", ".join(a.name for a in s.graph.aliases) for s in kept if s.graph is not None)
    warnings.warn(
        f"[RECOMPUTED] every answer of query {name!r} reads all rows of {streams} again, and they are kept for ever: "
        f"{'; '.join(dict.fromkeys(residual.notes)) or 'nothing above them is an aggregate'}",
        RecomputationWarning,
        # The line that called Engine.query.
        stacklevel=6,
    )
