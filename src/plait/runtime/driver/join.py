"""The steps `join` and `finish`: the one Spark job of an epoch, and what Spark alone can evaluate of its rows."""

from __future__ import annotations

from plait.runtime.driver.collect import collected
from plait.runtime.driver.driver import Epoch
from plait.runtime.faults import reached
from plait.runtime.spark.frames import planned
from plait.runtime.task.exchange import SCHEMA, exchange
from plait.runtime.task.hops import every_hop, first_hop, later_hop


def join(epoch: Epoch) -> None:
    """Exchange, append, probe and materialise: one Spark job, one exchange per hop."""
    assert epoch.task is not None
    task, tables = epoch.task, epoch.driver.services.tables
    batches, session = epoch.driver.feedback.batches, epoch.buckets.sparkSession
    batches.for_sources(session)
    buckets = planned(epoch.buckets)
    batches.for_buckets(session)
    if epoch.number in tables:
        buckets = buckets.union(tables[epoch.number])
    rows = exchange(buckets, task.tasks)
    if task.tasks == 1:
        rows = rows.mapInArrow(every_hop(task), SCHEMA)
    else:
        rows = rows.mapInArrow(first_hop(task), SCHEMA)
        for hop in range(2, task.plan.hops + 1):
            rows = exchange(rows, task.tasks).mapInArrow(later_hop(task, hop), SCHEMA)
    notes = [bytes(row.payload) for row in rows.collect()]
    reached("commit.1", epoch.number)
    epoch.account = collected(notes, task.plan)
    batches.saw(epoch.account.row_bytes)


def finish(epoch: Epoch) -> None:
    """Spark's part: what only Spark can evaluate of this epoch's rows; now and then, merging what queries keep."""
    account, sources, rows = epoch.account, epoch.driver.services.sources, epoch.driver.now.rows
    for query in epoch.plan.queries:
        kept = sources.source(query.name)
        if kept is not None:
            residual, source = kept
            account.results += sources.merged(rows, residual, source)
        elif query.select or query.where:
            candidates = [file for file in account.results if file.query == query.name]
            others = [file for file in account.results if file.query != query.name]
            finished = rows.finished(query, candidates, {file.path for file in others})
            account.results = others + finished
            account.rows_out[query.name] = sum(file.rows for file in finished)
        else:
            continue
        reached("finish", epoch.number)
