"""Admission: the program's definitions and what rests on the checkpoint become the next epoch's catalog and plan.

    catalog, definitions ──changed──► catalog ──allocate──► layout, floors, builds ──plan──► the next epoch's plan

`admitted` is pure; `Admission` keeps the result while the engine runs, and writes a new version whenever it changes:
at the start, and when a store that a query waits for has been built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.catalog.catalog import Catalog, QueryEntry
from plait.catalog.changes import Definition, changed
from plait.config import KEY_GROUPS, Config
from plait.query.graph import JoinGraph
from plait.query.layout import StoreHistory, shown
from plait.query.plan import Plan
from plait.query.progress import CatalogInForce, OptimiserReport, QueryStatus
from plait.query.relation import Relation
from plait.query.store import NO_KEY, IngestEdge, key_of, watermark_ms
from plait.share.allocate import Allocation, Wanted, allocate
from plait.share.mirs import CannotKeep, Joins, Keep, keeps_of, with_mirs
from plait.share.planner import Planner
from plait.share.regroup import eager_owner, owner_of
from plait.share.retention import complete_us, keep_us, with_ttls
from plait.share.steps import FirstLook
from plait.share.store_choice import StoreKey, chosen, searched_instead, stored_by
from plait.state.log import catalog_versions as catalogs
from plait.state.log.checkpoint import Checkpoint
from plait.state.log.manifest import LiveState


@dataclass(frozen=True)
class Asked:
    """What the program asks for."""

    relations: Mapping[str, Relation]
    tables: frozenset[str]
    definitions: Mapping[str, Definition]
    """By name."""
    dropped: frozenset[str] = frozenset()
    anew: frozenset[str] = frozenset()
    """Tables that are dropped and registered again: nothing of the old ones stays."""
    on_missing: str = "refuse"
    stores: str = "auto"
    """As in `Config`."""


@dataclass(frozen=True)
class Admitted:
    """A catalog, the stores that its queries run on, and which of them run."""

    catalog: Catalog
    allocation: Allocation
    graphs: Mapping[str, JoinGraph]
    """The joins of all queries, by id."""

    @property
    def running(self) -> dict[str, JoinGraph]:
        """The joins of queries that are live."""
        live = {join for q in self.catalog.queries.values() if q.live_since is not None for join in q.joins}
        return {name: graph for name, graph in self.graphs.items() if name in live}


def admitted(before: Catalog, asked: Asked, live: LiveState, policy: str = "min", sharing: str = "naive") -> Admitted:
    """What the next epoch runs with; the same version if nothing changes."""
    epoch = live.epoch + 1
    catalog = changed(
        before,
        asked.relations,
        asked.tables,
        asked.definitions,
        asked.dropped,
        asked.anew,
        epoch=epoch,
        on_missing=asked.on_missing,
    )
    return _allocated(before, catalog, asked, live, policy, apart=sharing == "independent")


def _allocated(
    before: Catalog,
    catalog: Catalog,
    asked: Asked,
    live: LiveState,
    policy: str,
    *,
    apart: bool,
    graphs: Mapping[str, JoinGraph] | None = None,
    owners: Mapping[str, str] | None = None,
) -> Admitted:
    """Stores for all queries of a catalog; those that wait for nothing any more become live.

    `graphs` are the joins with the keys by which they are stored, where these are decided already; `owners` are the
    groups of joins, None: those that they are in.
    """
    epoch = live.epoch + 1
    graphs = graphs or _stored(catalog, asked, live)
    if owners is None:
        owners = {} if apart else _owners(catalog, asked, graphs)
    wanted: dict[str, Wanted] = {}
    for name, entry in catalog.queries.items():
        definition = asked.definitions[name]
        for join in definition.graphs:
            wanted[join] = Wanted(
                graph=graphs[join],
                query=entry.id,
                floors=entry.floors.get(join),
                since=entry.since,
                one_floor=definition.one_floor,
                live=entry.live_since is not None,
                stores=frozenset(store for of in entry.stores.get(join, {}).values() for store in of),
                by_alias={alias: frozenset(of) for alias, of in entry.stores.get(join, {}).items()},
                owner=owners.get(join, ""),
            )
    allocation = allocate(
        catalog.layout.without(asked.anew),
        wanted,
        asked.relations,
        epoch=epoch,
        version=before.version + 1,
        history=history(live),
        tables=asked.tables,
        # Intermediate results are for all that can use them: who shares nothing keeps none.
        keeps=() if apart else keeps_of(catalog.layout, [join for join, w in wanted.items() if w.live]),
        apart=apart,
    )
    for entry in catalog.queries.values():
        waits = any(join in allocation.waiting for join in entry.joins)
        since = entry.live_since if entry.live_since is not None else None if waits else epoch
        floors = {join: dict(allocation.floors[join]) for join in entry.joins}
        stores = {join: _stores_of(allocation, join) for join in entry.joins}
        begun = replace(entry, floors=floors, live_since=since, stores=stores)
        if entry.live_since is None and since is not None:
            begun = replace(begun, complete_us=_complete_us(begun, allocation, asked, live, policy))
        catalog = catalog.with_query(begun)
    catalog = catalog.with_layout(allocation.layout)
    if catalog != before:
        catalog = replace(catalog, version=before.version + 1)
    return Admitted(catalog, allocation, graphs)


def _owners(catalog: Catalog, asked: Asked, graphs: Mapping[str, JoinGraph]) -> dict[str, str]:
    """The group of every join: by the stores that it has, or, of a new one, by those of its like."""
    known = catalog.layout.store_by_id
    found: dict[str, str] = {}
    new: list[str] = []
    for entry in catalog.queries.values():
        for join in entry.joins:
            ids = [id for of in entry.stores.get(join, {}).values() for id in of]
            there = [known[id] for id in ids if id in known and known[id].relation not in asked.tables]
            if there:
                found[join] = owner_of(there)
            elif entry.floors.get(join) is None:
                new.append(join)
    running = {join: (graphs[join], owner) for join, owner in found.items()}
    return found | {join: eager_owner(graphs[join], running) for join in new}


def _regrouped(now: Admitted, asked: Asked, live: LiveState, policy: str, owners: Mapping[str, str]) -> Admitted | None:
    """With joins in these groups, whose stores begin to be filled, or are used by now; None if that cannot be."""
    found = _allocated(now.catalog, now.catalog, asked, live, policy, apart=False, owners=owners)
    waits = found.allocation.waiting - now.allocation.waiting
    loads = any(s.relation in asked.tables and s.since == live.epoch + 1 for s in found.allocation.layout.stores)
    if waits or loads or found.allocation.floors != now.allocation.floors:
        return None
    return found


def _stored(catalog: Catalog, asked: Asked, live: LiveState) -> dict[str, JoinGraph]:
    """The joins of all queries, each with the keys by which its aliases are stored.

    A query that is admitted has the stores that it has, or fewer: one more would have to be built first.  Those that
    feed MIRs stay.
    """
    graphs: dict[str, JoinGraph] = {}
    for name, entry in catalog.queries.items():
        for join, graph in asked.definitions[name].graphs.items():
            there = entry.stores.get(join, {})
            known = catalog.layout.store_by_id
            keys = {a: frozenset(known[s].key.columns for s in of if s in known) for a, of in there.items()}
            graphs[join] = stored_by(graph, keys) if there and len(graph.aliases) > 1 else graph
    if asked.stores == "all":
        return graphs
    fixed = _feeding(catalog)
    rows = {
        relation: float(max(sum(i.rows for i in live.segments.get(s.id, ())) for s in stores))
        for relation in asked.relations
        if (stores := [s for s in catalog.layout.stores if s.relation == relation and s.key != NO_KEY])
    }
    return graphs | chosen({join: g for join, g in graphs.items() if join not in fixed}, rows, _kept(graphs, fixed))


def _feeding(catalog: Catalog) -> set[str]:
    """The joins that have a part in an intermediate result."""
    return {use.query for store in catalog.layout.mirs if store.mir is not None for use in store.mir.uses}


def _kept(graphs: Mapping[str, JoinGraph], fixed: set[str]) -> frozenset[StoreKey]:
    """The stores of some joins."""
    return frozenset(
        (alias.relation, key_of(graph, alias.name, key).columns)
        for join, graph in graphs.items()
        if join in fixed
        for alias in graph.aliases
        for key in graph.keys_of(alias.name)
    )


def _thinned(now: Admitted, asked: Asked, live: LiveState, policy: str, planner: Planner) -> Admitted | None:
    """Without the stores that epochs have shown to cost more than searching others; None if all are worth keeping."""
    uses = planner.store_uses()
    waits = any(query.live_since is None for query in now.catalog.queries.values())
    if uses is None or waits or now.catalog.layout.builds:
        return None
    fixed = _feeding(now.catalog)
    free = {join: graph for join, graph in now.graphs.items() if join not in fixed}
    fewer = searched_instead(free, uses, planner.tasks, _kept(now.graphs, fixed))
    if fewer == free:
        return None
    return _allocated(now.catalog, now.catalog, asked, live, policy, apart=False, graphs={**now.graphs, **fewer})


def _completed(now: Admitted, asked: Asked, done: set[str], live: LiveState, policy: str) -> Admitted:
    """Some builds are complete: those who waited for them only are live.

    Stores and edges stay: the sources of a run go on cutting the buckets that they cut when it started.
    """
    catalog, allocation = now.catalog, now.allocation
    left = tuple(build for build in catalog.layout.builds if build.store not in done)
    layout = replace(catalog.layout, builds=left)
    building = {build.store for build in left}
    for entry in catalog.queries.values():
        used = {store for of in entry.stores.values() for stores in of.values() for store in stores}
        # Rows of a table that is read by itself come with a start.
        scans = any(
            len(now.graphs[join].aliases) == 1 and now.graphs[join].aliases[0].relation in asked.tables
            for join in entry.joins
        )
        if entry.live_since is None and not used & building and not scans:
            lacks = _complete_us(entry, allocation, asked, live, policy)
            catalog = catalog.with_query(replace(entry, live_since=live.epoch + 1, complete_us=lacks))
    catalog = replace(catalog.with_layout(layout), version=catalog.version + 1)
    waiting = frozenset(j for q in catalog.queries.values() if q.live_since is None for j in q.joins)
    return Admitted(catalog, replace(allocation, layout=layout, waiting=waiting), now.graphs)


def _complete_us(entry: QueryEntry, allocation: Allocation, asked: Asked, live: LiveState, policy: str) -> int | None:
    """The event time at or before which groups lack rows, of an aggregate that begins with what is there.

    Rows are gone that its windows would have let go by now, and those that were born before a floor, or before a TTL:
    of these nobody knows more than that they are no younger than the youngest of their stream.
    """
    definition = asked.definitions[entry.name]
    if definition.closing is None or entry.since != "state":
        return None
    join, name = definition.closing
    graph = definition.graphs[join]
    relations = with_ttls({j: g for d in asked.definitions.values() for j, g in d.graphs.items()}, asked.relations)
    at = watermark_ms(allocation.marks[join], live.marks_ms, policy)
    missing: dict[str, int] = {}
    for alias, kept_us in keep_us(graph, relations).items():
        relation = relations[graph.alias(alias).relation]
        if relation.name in asked.tables:
            continue
        gone = [at * 1000 - kept_us] if at is not None and kept_us is not None else []
        if entry.floors[join][alias] > 0 or relation.ttl_us is not None:
            marks = [ms for key, ms in live.marks_ms.items() if key.rpartition(":")[0] == relation.name]
            gone += [(ms + (relation.delay_ms or 0) + 1) * 1000 for ms in marks]
        if gone:
            missing[alias] = max(gone)
    return complete_us(graph, name, missing)


def _keeping(now: Admitted, asked: Asked, keeps: Sequence[Keep], epoch: int) -> Admitted:
    """With other MIRs, as far as they can be kept.  Sources go on as they are: MIRs are fed by probes."""
    allocation, running = now.allocation, now.running
    before = allocation.layout
    bare = replace(before, stores=tuple(store for store in before.stores if store.mir is None))
    relations = with_ttls(now.graphs, asked.relations)
    joins = Joins(running, relations, allocation.floors, allocation.filters, allocation.marks, epoch)
    possible: list[Keep] = []
    layout = bare
    for keep in keeps:
        try:
            layout = with_mirs(bare, before, [*possible, keep], joins)
            possible.append(keep)
        except CannotKeep:
            continue
    catalog = replace(now.catalog.with_layout(layout), version=now.catalog.version + 1)
    return Admitted(catalog, replace(allocation, layout=layout), now.graphs)


def _stores_of(allocation: Allocation, join: str) -> dict[str, list[str]]:
    """By alias."""
    found: dict[str, list[str]] = {}
    for (name, alias, _), store in allocation.stores.items():
        if name == join:
            found.setdefault(alias, []).append(store)
    for (name, alias), to_come in allocation.prepared.items():
        if name == join:
            found.setdefault(alias, []).extend(store for store in to_come if store not in found.get(alias, ()))
    return found


def _all_stores(now: Admitted, entry: QueryEntry) -> frozenset[str]:
    """What the joins of a query look up, and the MIRs that are kept for them."""
    found = {store for of in entry.stores.values() for stores in of.values() for store in stores}
    mirs = ((store.id, store.mir) for store in now.catalog.layout.mirs)
    return frozenset(found | {id for id, mir in mirs if mir and any(use.query in entry.joins for use in mir.uses)})


def history(live: LiveState) -> dict[str, StoreHistory]:
    """What allocation must know of the rows at rest."""
    names = {*live.segments, *live.let_go}
    spans = {
        name: tuple((i.min_born, i.max_born) for i in live.segments.get(name, ()) if not i.has_born) for name in names
    }
    return {name: StoreHistory(spans[name], live.let_go.get(name, -1)) for name in names}


def first_looks(now: Admitted, asked: Asked, live: LiveState, policy: str) -> dict[str, FirstLook]:
    """The joins whose first epoch is the next one, and which begin with what is there."""
    epoch = live.epoch + 1
    if not epoch:
        return {}
    relations = with_ttls(now.graphs, asked.relations)
    found: dict[str, FirstLook] = {}
    for entry in now.catalog.queries.values():
        for join in entry.joins:
            graph = now.graphs[join]
            streams = [a for a in graph.aliases if a.relation not in asked.tables]
            begins = entry.live_since == epoch and len(graph.aliases) > 1
            if not begins or (streams and entry.since != "state") or (not streams and _loads(now, join, epoch)):
                continue
            at = watermark_ms(now.allocation.marks[join], live.marks_ms, policy)
            kept = keep_us(graph, relations)
            above = {a: at * 1000 - kept_us for a, kept_us in kept.items() if at is not None and kept_us is not None}
            first = min(streams or graph.aliases, key=lambda a: _rows(now, join, a.name, live))
            found[join] = FirstLook(first.name, above)
    return found


def _in_force(now: Admitted, planner: Planner) -> Snapshot:
    return Snapshot(now.catalog, planner.plan, planner.graphs, planner.report())


def loaded(now: Admitted, epoch: int) -> dict[str, tuple[IngestEdge, ...]]:
    """By table that is read with an epoch, the edges on which its rows travel.

    Those to its stores that are new in this epoch, unless they are built from another store, and the one for a new
    query that reads the table by itself.
    """
    layout = now.allocation.layout
    building = {build.store for build in layout.builds}
    new: set[str | None] = {s.id for s in layout.stores if s.since == epoch and s.id not in building}
    begin = {j for q in now.catalog.queries.values() if q.live_since == epoch for j in q.joins}
    scans = {now.graphs[j].aliases[0].relation for j in begin if len(now.graphs[j].aliases) == 1}
    found = {}
    for source in layout.inputs:
        asked = new | ({None} if source.relation in scans else set())
        edges = tuple(edge for edge in source.edges if edge.store in asked)
        if source.table and edges:
            found[source.relation] = edges
    return found


def _loads(now: Admitted, join: str, epoch: int) -> bool:
    """Whether rows of a table are loaded for a join in an epoch: then they drive."""
    stores = [store for (j, _, _), store in now.allocation.stores.items() if j == join]
    return any(now.allocation.layout.store_by_id[store].since == epoch for store in stores)


def _rows(now: Admitted, join: str, alias: str, live: LiveState) -> int:
    mine = {store for (j, a, _), store in now.allocation.stores.items() if (j, a) == (join, alias)}
    return min((sum(i.rows for i in live.segments.get(store, ())) for store in mine), default=0)


@dataclass(frozen=True)
class Snapshot:
    """What an engine tells of itself: catalog, plan and the optimiser's reasons, all of one moment."""

    catalog: Catalog
    plan: Plan
    graphs: Mapping[str, JoinGraph]
    """The joins that the plan runs, by id."""
    optimiser: OptimiserReport
    """The planner's report."""


@dataclass
class Admission:
    """The catalog in force, while an engine runs.

    The driver's thread changes it between two epochs.  All other threads read `in_force`, a frozen value that is
    replaced as a whole once the new catalog is durable: whoever asks waits for no epoch, and sees no half of a change.
    """

    checkpoint: Checkpoint
    config: Config
    asked: Asked
    now: Admitted
    policy: str = "min"
    planner: Planner | None = None
    in_force: Snapshot | None = None
    """None before `begin`."""
    stores_judged: bool = False
    """Whether it was asked, after a first period, which stores are worth keeping."""
    refused: Mapping[str, str] | None = None
    """Groups that no stores could be allocated for."""

    @property
    def version(self) -> int:
        """Of the catalog."""
        return self.now.catalog.version

    @property
    def catalog_in_force(self) -> CatalogInForce:
        """The catalog, as far as epochs and reports must know it."""
        queries = {
            shown(q.id): QueryStatus(
                q.status, q.live_since, q.joins, q.floors, stores=_all_stores(self.now, q), budget=q.budget
            )
            for q in self.now.catalog.queries.values()
        }
        return CatalogInForce(self.version, self.now.catalog.layout.builds, queries)

    def begin(self, live: LiveState, learnt: Mapping[str, Any] | None) -> Planner:
        """The planner of the next epoch."""
        return self._run_with(self.now, live, learnt)

    def _run_with(self, now: Admitted, live: LiveState, learnt: Mapping[str, Any] | None) -> Planner:
        looks = first_looks(now, self.asked, live, self.policy)
        fills = now.allocation.layout.fills(live.epoch + 1)
        planner = Planner(now.running, self.asked.relations, self.config, now.allocation, looks, fills=fills)
        if learnt is not None:
            planner.recall(learnt)
        if self.planner is not None:
            planner.goes_on_from(self.planner)
        self.now, self.planner, self.in_force = now, planner, _in_force(now, planner)
        return planner

    def as_if_built(self, live: LiveState) -> Admission:
        """The same once all of its builds are complete."""
        done = {build.store for build in self.now.catalog.layout.builds}
        now = _completed(self.now, self.asked, done, live, self.policy) if done else self.now
        return Admission(self.checkpoint, self.config, self.asked, now, self.policy, self.planner)

    def put(self, before: Catalog) -> None:
        """Makes the catalog durable, if it is a new version."""
        self._put(before, self.now.catalog)

    def _put(self, before: Catalog, catalog: Catalog) -> None:
        if catalog.version != before.version:
            catalogs.put(self.checkpoint.files, catalog.version, catalog.to_json())

    def after(self, live: LiveState) -> Planner | None:
        """Queries whose stores are built become live, and MIRs and groups come and go as the planner wishes.

        None if nothing changes but what the planner has learnt.
        """
        done = {
            build.store for build in self.now.catalog.layout.builds if live.builds.get(build.store, 0) >= KEY_GROUPS
        }
        wishes = None if self.planner is None else self.planner.wishes
        moves = self._moves(done)
        fewer = None if done or wishes is not None or moves is not None else self._fewer_stores(live)
        if not done and wishes is None and moves is None and fewer is None:
            if self.planner is not None:
                self.in_force = _in_force(self.now, self.planner)
            return None
        now = _completed(self.now, self.asked, done, live, self.policy) if done else fewer or self.now
        if moves is not None:
            now = self._regrouped(now, live, moves)
        if wishes is not None:
            now = _keeping(now, self.asked, wishes, live.epoch + 1)
        self.checkpoint.check_fence()
        self._put(self.now.catalog, now.catalog)
        return self._run_with(now, live, None if self.planner is None else self.planner.knowledge())

    def _fewer_stores(self, live: LiveState) -> Admitted | None:
        """What goes on without the stores that are not worth keeping: judged once, after the first period of a run."""
        may = self.config.stores == "auto" and self.config.sharing != "independent"
        if not may or self.stores_judged or self.planner is None or self.planner.store_uses() is None:
            return None
        self.stores_judged = True
        return _thinned(self.now, self.asked, live, self.policy, self.planner)

    def _moves(self, done: set[str]) -> Mapping[str, str] | None:
        """Groups for which stores must be allocated anew: others than before, or stores that are filled by now."""
        if self.planner is None or self.config.sharing == "independent":
            return None
        wanted, there = self.planner.grouped.owners, self.now.allocation.owners
        running = {join: owner for join, owner in there.items() if join in self.planner.graphs}
        filled = any(not done.isdisjoint(stores) for stores in self.now.allocation.prepared.values())
        if not filled and (wanted == running or wanted == self.refused):
            return None
        return {**{join: owner for join, owner in there.items() if join not in self.planner.graphs}, **wanted}

    def _regrouped(self, now: Admitted, live: LiveState, owners: Mapping[str, str]) -> Admitted:
        """Other groups cost or save time only: where they cannot be, everything stays as it is."""
        assert self.planner is not None
        try:
            found = _regrouped(now, self.asked, live, self.policy, owners)
        except Exception as error:
            self.planner.failures += 1
            self.planner.said = f"groups are kept: stores could not be allocated ({type(error).__name__}: {error})"
            found = None
        if found is None:
            self.refused = self.planner.grouped.owners
            return now
        return found
