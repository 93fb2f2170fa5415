"""The steps `replan` and `observe`: what an epoch means for the next one, and what people are told of it."""

from __future__ import annotations

import time
from dataclasses import replace

from plait.config import KEY_GROUPS
from plait.query.layout import shown
from plait.query.observed import KeyCount, Observed
from plait.query.progress import CatalogInForce, Progress, Replanned, ScalingReport
from plait.runtime.driver.driver import Epoch, Services
from plait.runtime.driver.scaling import Scaling
from plait.runtime.driver.troubled import store_bytes
from plait.runtime.driver.watermarks import watermarks_ms
from plait.runtime.task.passes import arriving
from plait.state.log.checkpoint import collect_garbage
from plait.state.log.events import add_event
from plait.state.log.manifest import LiveState
from plait.state.log.passes import forget_passes
from plait.state.segments.tiers import choose_merges, runs_per_lookup


def replan(epoch: Epoch) -> None:
    """The next epoch's catalog and plan: builds that are complete make queries live, statistics may change orders."""
    driver, begun = epoch.driver, time.perf_counter()
    lookups = {node: count.lookups for node, count in epoch.account.edges.items()}
    now = replace(driver.now, arriving=arriving(epoch.plan, lookups))
    changes, planner = driver.services.changes, driver.feedback.planner
    if planner is not None:
        planner.looked()
        planner.observe(_observed(epoch), time.monotonic())
        if (learnt := planner.memory()) is not None:
            driver.services.checkpoint.put_statistics(learnt)
        if changes is not None and (next_planner := changes.after(now.live)) is not None:
            planner = driver.feedback.planner = next_planner
            now = replace(now, catalog=changes.catalog_in_force)
        if planner.plan is not now.plan:
            now = now.with_plan(planner.plan)
        now = replace(now, samples=planner.samples)
        epoch.replanned = Replanned(planner.report(), time.perf_counter() - begun)
    driver.now = now
    driver.feedback.scaling = driver.feedback.scaling.after(epoch.account.load)


def observe(epoch: Epoch) -> None:
    """What the epoch did, for people; old files are collected."""
    driver, services = epoch.driver, epoch.driver.services
    checkpoint, live, config = services.checkpoint, driver.now.live, services.config
    report = _progress(epoch)
    driver.feedback.progress.append(report)
    add_event(checkpoint.files, report.json)
    if any(tree.replays for tree in epoch.plan.trees):
        forget_passes(checkpoint.files)
    driver.feedback.state.shrink(checkpoint.home, live)
    if epoch.number % config.snapshot_every == 0:
        grace, now = config.gc_grace_seconds, time.time()
        collect_garbage(checkpoint, live, services.sources.live.kept(now - grace), grace, now)
        driver.now.rows.known.intersection_update(services.sources.live.paths())


def _observed(epoch: Epoch) -> Observed:
    """The epoch as the optimiser sees it."""
    account, live = epoch.account, epoch.driver.now.live
    arrived: dict[str, int] = {}
    for info in account.added:
        if info.tier == 0 and info.epoch == epoch.number:
            arrived[info.store] = arrived.get(info.store, 0) + info.keys
    stores = {}
    for store in epoch.plan.stores:
        infos = live.segments.get(store.id, ())
        stores[store.id] = KeyCount(
            keys=account.keys.get(store.id, float(sum(i.keys for i in infos))) if infos else 0.0,
            arrived=arrived.get(store.id, 0),
            rows=sum(i.rows for i in infos),
            runs=runs_per_lookup(infos),
        )
    return Observed(
        epoch=epoch.number,
        rows_in=account.rows_in,
        rows_out=account.rows_out,
        edges=account.edges,
        stores=stores,
        samples=account.samples,
        sets=account.sets,
        max_event_ms=live.max_event_ms,
        exchanged=epoch.task is None or epoch.task.tasks > 1,
    )


def _told(services: Services, catalog: CatalogInForce, live: LiveState) -> CatalogInForce:
    """The catalog as people see it: every query with its share of the state, a parked one says why."""
    shares = catalog.state_shares(store_bytes(live))
    queries = {name: replace(query, state_bytes=round(shares[name])) for name, query in catalog.queries.items()}
    for record in services.parking.records:
        if record.name in queries:
            queries[record.name] = replace(
                queries[record.name], status=record.status, error=str(record.error), missed_since=record.since
            )
    return replace(catalog, queries=queries)


def _scaling(scaling: Scaling) -> ScalingReport:
    return ScalingReport(scaling.bounds, round(scaling.skew, 3), scaling.reason)


def _progress(epoch: Epoch) -> Progress:
    assert epoch.task is not None
    driver, account, plan, task = epoch.driver, epoch.account, epoch.plan, epoch.task
    services, live = driver.services, driver.now.live
    infos = [info for found in live.segments.values() for info in found]
    # Those that are begun or due after this epoch.
    merges = choose_merges(live.segments, services.config.fan_in, task.tasks)
    remote = services.checkpoint.home.remote is not None
    watermarks = watermarks_ms(plan, live.marks_ms, services.watermark_policy)
    return Progress(
        epoch=epoch.number,
        batch=epoch.batch,
        timestamp=time.time(),
        clock=task.clock_us / 1e6,
        rows_in=account.rows_in,
        rows_out={shown(query): rows for query, rows in account.rows_out.items()},
        rows_late=account.rows_late,
        rows_null_key=account.rows_null_key,
        rows_corrupt=account.rows_corrupt,
        rows_future=account.rows_future,
        state_rows=sum(info.rows for info in infos),
        state_bytes=sum(info.live_bytes for info in infos),
        state=driver.feedback.state.report(live, account, epoch.number, merges, remote),
        segments={store: len(found) for store, found in sorted(live.segments.items())},
        watermark_ms=live.watermark_ms,
        watermarks={shown(query): at for query, at in watermarks.items()},
        catalog=_told(services, driver.now.catalog, live),
        changes=driver.feedback.changes,
        builds={store: groups / KEY_GROUPS for store, groups in live.builds.items()},
        tasks=task.tasks,
        scaling=_scaling(driver.feedback.scaling),
        seconds=epoch.seconds,
        task_seconds={name: account.seconds[name] for name in sorted(account.seconds)},
        edges=account.edges,
        driven=account.driven,
        ranks=list(plan.ranks),
        orders={shown(q.name): {alias: list(order) for alias, order in q.orders} for q in plan.queries},
        optimiser=epoch.replanned,
    )
