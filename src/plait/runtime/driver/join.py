"""The steps `join` and `finish`: the one Spark job of an epoch, and what Spark alone can evaluate of its rows."""

from __future__ import annotations

from dataclasses import replace

from plait.query.plan import QueryPlan
from plait.runtime.driver.collect import collected
from plait.runtime.driver.driver import Epoch
from plait.runtime.faults import reached
from plait.runtime.spark.frames import planned
from plait.runtime.task.exchange import SCHEMA, exchange
from plait.runtime.task.hops import every_hop, first_hop, later_hop
from plait.state.log.manifest import ResultFile


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
    services, first_pass = epoch.driver.services, epoch.driver.first_pass
    tag = f"plait-{services.checkpoint.id[:8]}-{services.checkpoint.token}"
    with first_pass.under_way(services.spark, epoch.plan, tag):
        first_pass.check()
        notes = [bytes(row.payload) for row in rows.collect()]
    reached("commit.1", epoch.number)
    epoch.account = collected(notes, task.plan)
    batches.saw(epoch.account.row_bytes)


def finish(epoch: Epoch) -> None:
    """Spark's part: what only Spark can evaluate of this epoch's rows; now and then, merging what queries keep."""
    services, account, rows = epoch.driver.services, epoch.account, epoch.driver.now.rows
    merged = _merged_together(epoch)
    for query in epoch.plan.queries:
        kept = services.sources.source(query.name)
        if query.name in merged or (kept is None and not (query.select or query.where)):
            continue
        id = query.name if kept is None else query.name.partition(".")[0]
        record = services.parking.of(id)
        try:
            if record is not None and not record.asked:
                _leave_raw(epoch, query)
            elif kept is not None:
                account.results += services.sources.merged(rows, *kept)
            else:
                _finish(epoch, query)
        except Exception as error:
            before = services.sources.live.marks_ms if epoch.ran(id) else None
            services.parking.take(id, epoch.number, error, services.queries, before)
            _leave_raw(epoch, query)
        reached("finish", epoch.number)


def _merged_together(epoch: Epoch) -> set[str]:
    """Merges what aggregates have in the same files; the names of those for which that was enough."""
    services, rows, found = epoch.driver.services, epoch.driver.now.rows, set[str]()
    seen: set[tuple[str, ...]] = set()
    for query in epoch.plan.queries:
        sharing = services.sources.sharing(epoch.plan, query.name) if query.grouping is not None else ()
        if not sharing or sharing in seen:
            continue
        seen.add(sharing)
        # Of a parked query nothing is touched.
        able = tuple(name for name in sharing if services.parking.of(name.partition(".")[0]) is None)
        files = services.sources.merged_together(rows, able) if len(able) > 1 else None
        if files is not None:
            epoch.account.results += files
            found.update(able)
            reached("finish", epoch.number)
    return found


def _finish(epoch: Epoch, query: QueryPlan) -> None:
    """Spark's part of a query: of this epoch's rows, and of those that waited while it was parked."""
    account, rows = epoch.account, epoch.driver.now.rows
    waited: dict[int, list[ResultFile]] = {}
    for file in epoch.driver.services.sources.live.files.get(query.name, ()):
        if file.raw:
            # The first epoch that it missed is the last one committed, as long as no other is.
            waited.setdefault(epoch.driver.now.live.epoch if file.held is None else file.held, []).append(file)
    missed = {held: rows.finished(query, files, {f.path for f in files}) for held, files in waited.items()}
    candidates = [file for file in account.results if file.query == query.name]
    others = [file for file in account.results if file.query != query.name]
    finished = rows.finished(query, candidates, {file.path for file in others})
    keeps = epoch.driver.services.sinks[query.name].keeps_rows
    for held, files in missed.items():
        account.merged_results += [replace(f, passing=False, held=None if keeps else held) for f in files]
    account.replaced += [(query.name, file.path) for files in waited.values() for file in files]
    account.results = others + finished
    account.rows_out[query.name] = sum(file.rows for file in finished)


def _leave_raw(epoch: Epoch, query: QueryPlan) -> None:
    """Joined rows wait for Spark's part, unless they are a source of an answer: that reads them as they are."""
    if epoch.driver.services.sources.source(query.name) is None:
        results = epoch.account.results
        results[:] = [replace(file, raw=True) if file.query == query.name else file for file in results]
