"""Runs joins on one key without Spark: the engine's own tasks, state and commit, in this process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from plait.admission import Admission, Asked, admitted
from plait.catalog.catalog import Catalog
from plait.catalog.changes import Definition
from plait.config import Config
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.relation import ColumnDef, Relation
from plait.runtime.driver.sinks import Noop
from plait.runtime.task.join_task import Work
from plait.share.planner import Planner
from plait.state.log.checkpoint import Checkpoint
from plait.testing import Clock, LocalEngine

QUERY = "q"
"""The name of the only query."""


def join_graph(
    sql: str,
    aliases: Mapping[str, tuple[str, Sequence[str]]],
    centre: str,
    outputs: Iterable[tuple[str, ColumnRef]],
) -> JoinGraph:
    """The join of all aliases with `centre`, on the first of the columns that are read of each; all are bigint.

    `aliases` maps an alias to its stream and columns, `outputs` are names and columns.
    """
    keys = {alias: ColumnRef(alias, columns[0], "bigint") for alias, (_, columns) in aliases.items()}
    return JoinGraph(
        sql,
        tuple(
            Alias(alias, stream, None, tuple(ColumnDef(c, c, "bigint") for c in columns))
            for alias, (stream, columns) in aliases.items()
        ),
        tuple(Equality(keys[centre], key) for alias, key in keys.items() if alias != centre),
        tuple(Output(name, "bigint", column, str(column), (column,)) for name, column in outputs),
    )


def bigint_relations(columns: Mapping[str, Sequence[str]]) -> dict[str, Relation]:
    """Streams by name, of which all columns are bigint."""
    return {stream: Relation(stream, tuple((c, "bigint") for c in names)) for stream, names in columns.items()}


@contextmanager
def local_engine(
    folder: Path, planner: Planner, *, replans: bool = True, work: type[Work] = Work
) -> Iterator[LocalEngine]:
    """An engine that drops its results, on a checkpoint in `folder` that is removed afterwards; time is scripted."""
    checkpoint = tempfile.mkdtemp(prefix="checkpoint-", dir=folder)
    follows = planner if replans else None
    try:
        with LocalEngine(checkpoint, planner.plan, planner.config, clock=Clock(), planner=follows, work=work) as engine:
            engine.change(sinks={QUERY: Noop()})
            yield engine
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)


@contextmanager
def rewired_engine(
    folder: Path, graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation], config: Config, clock: Clock
) -> Iterator[LocalEngine]:
    """An engine of several queries that drops their results; intermediate results come and go as its planner wishes."""
    path = tempfile.mkdtemp(prefix="checkpoint-", dir=folder)
    definitions = {n: Definition(n, n, n, {n: g}, "append", None, False, None) for n, g in graphs.items()}
    asked = Asked(relations, frozenset(), definitions, stores=config.stores)
    try:
        with Checkpoint(path, config).open() as checkpoint:
            before, live = Catalog(), checkpoint.log.live()
            now = admitted(before, asked, live, "min", config.sharing)
            admission = Admission(checkpoint, config, asked, now)
            planner = admission.begin(live, None)
            admission.put(before)
        with LocalEngine(path, planner.plan, config, clock=clock, planner=planner, changes=admission) as engine:
            admission.checkpoint = engine.checkpoint
            engine.change(sinks={join: Noop() for join in planner.graphs})
            yield engine
    finally:
        shutil.rmtree(path, ignore_errors=True)
