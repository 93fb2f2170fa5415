"""The step `park_troubled`: queries that cannot go on with an epoch are parked before it is committed.

Contract.  A query leaves an epoch here for one of three reasons: tasks could not compute one of its outputs (an
overflow, a division by zero), it gave more rows than it may, or its share of the state is larger than it may be.  All
others keep what the epoch gave them.  Of an output that cannot be computed no rows are left, now or when somebody
resumes the query, so it is `failed`; a query that is over a limit keeps its rows like any other that is parked.

A failed query is left out by the tasks of the epochs that follow (`EpochTask.left_out`): nobody will ask for its rows.
"""

from __future__ import annotations

from collections.abc import Collection

from plait.errors import QueryError
from plait.query.layout import shown
from plait.runtime.driver.driver import Epoch, Services
from plait.runtime.driver.parking import SKIP
from plait.runtime.faults import reached
from plait.runtime.task.notes import CUT
from plait.state.log.manifest import LiveState
from plait.state.log.parked import FAILED


def left_out(services: Services, joins: Collection[str]) -> frozenset[str]:
    """Of these joins, those of queries of which nothing is wanted until they are resumed without what they missed."""
    failed = {r.query for r in services.parking.records if r.status == FAILED and r.asked != SKIP}
    return frozenset(join for join in joins if failed and _id(join) in failed)


def store_bytes(live: LiveState) -> dict[str, int]:
    """By store the bytes that its live segments hold."""
    return {store: sum(info.live_bytes for info in infos) for store, infos in live.segments.items()}


def park_troubled(epoch: Epoch) -> None:
    """Parks the queries that cannot go on, or raises where that is to end the run; others are resumed with this."""
    services, task = epoch.driver.services, epoch.task
    assert task is not None
    for skipped in [record.query for record in services.parking.records if record.asked == SKIP]:
        # It goes on with this epoch, or, where tasks have left it out, with the next.
        if not any(_id(join) == skipped for join in task.left_out):
            services.parking.caught_up(skipped)
    for join in list(epoch.account.failed):
        if join in epoch.account.failed:
            _park_failed(epoch, _id(join))
    _park_over_budget(epoch)
    if services.parking.records:
        reached("troubled", epoch.number)


def _park_failed(epoch: Epoch, query: str) -> None:
    """Tasks did not give all of its rows."""
    services, account = epoch.driver.services, epoch.account
    joins = [join for join in account.rows_out if _id(join) == query]
    error = next(account.failed[join] for join in joins if join in account.failed)
    assert query not in services.sources.answers, "what an answer is made of is computed by Spark"
    cut = error.code == CUT
    # Rows that its sink does not want are no loss.
    gone = not cut or services.sinks[query].reads_rows
    if cut:
        error = _over_budget(epoch, query) or error
    services.parking.take(
        query,
        epoch.number,
        error,
        services.queries,
        gone="its rows of this epoch are gone" if gone else "",
        asked_for=cut,
    )
    account.results = [file for file in account.results if file.query not in joins]
    for join in joins:
        account.failed.pop(join, None)
        account.rows_out[join] = 0 if gone else account.rows_out[join]


def _park_over_budget(epoch: Epoch) -> None:
    driver = epoch.driver
    queries = driver.now.catalog.queries
    if all(query.budget.rows is None and query.budget.state_bytes is None for query in queries.values()):
        return
    for id in sorted({_id(query.name) for query in epoch.plan.queries}):
        if driver.services.parking.of(id) is None and (error := _over_budget(epoch, id)) is not None:
            before = driver.now.live.marks_ms if epoch.ran(id) else None
            services = driver.services
            services.parking.take(id, epoch.number, error, services.queries, before, asked_for=True)


def _over_budget(epoch: Epoch, id: str) -> QueryError | None:
    catalog = epoch.driver.now.catalog
    known = catalog.queries.get(shown(id))
    if known is None:
        return None
    rows = sum(epoch.account.rows_out.get(join, 0) for join in known.joins)
    share = 0.0
    if known.budget.state_bytes is not None:
        share = catalog.state_shares(store_bytes(epoch.driver.now.live))[shown(id)]
    return known.budget.exceeded(rows, share)


def _id(join: str) -> str:
    return join.partition(".")[0]
