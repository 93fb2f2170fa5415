"""Which queries of one structure run together, decided from the query sets that tasks have sampled (paper 004).

    samples ──Shares──► groups (share/groups.py) ──owners──► trees at once, stores when they are built (admission.py)

Queries of a group have probe trees of their own, and, once they are filled, stores of their own that only their rows
reach.  A query without an owner shares trees and stores with all others of its structure.

Groups replace those in force only where that is expected to pay by `replan_gain`, and what it takes to fill their
stores is gained within `HORIZON_EPOCHS`.  Two stores that have different rows cannot be made one without reading their
source again, so groups with stores of their own are only split further, unless the streams are kept whole
(`keep="all"`).

Contract.  Pure, but for the clock that ends the search.  Who is in which group never changes an answer: floors, filters
and windows are judged in every tree alike, and a store is used only where it is complete for the query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from plait.config import Config
from plait.order.cost import Coefficients
from plait.query.graph import JoinGraph
from plait.query.layout import Layout, shown
from plait.query.observed import SetRow, SetSample
from plait.query.progress import GroupsReport
from plait.query.store import Store, key_of
from plait.share.allocate import Allocation
from plait.share.groups import JoinSample, Prices, Sampled, Shares, changed_share, holistic, regrouped
from plait.share.step_cost import StorePrices
from plait.share.structure import Group, alike_groups, structure_of

HORIZON_EPOCHS = 32
"""Epochs within which what it costs to fill the stores of groups must be gained."""
FEWEST_ROWS = 64
"""Sampled rows of every stream below which nothing is concluded."""
STORE_NS = 1e6
"""What a store costs per epoch however little arrives: a file, its entry in the manifest.  Assumed, not fitted."""
KEPT_SHARE = 0.75
"""Members that a group must keep to go on with its stores."""
RUNS = 4.0
"""Sorted runs per store that a lookup visits."""
GROUP = "group "
"""What owners of groups begin with: no query's id does when it owns stores by itself."""

Kinds = dict[tuple[int, int], float]
"""Rows by (hash of the key, query set)."""


@dataclass(frozen=True)
class Regrouped:
    """Groups from now on, and why."""

    owners: Mapping[str, str]
    """By join; those that share everything are left out."""
    reports: tuple[GroupsReport, ...] = ()
    basis: frozenset[str] = frozenset()
    """The joins of when groups were last computed from scratch."""


@dataclass(frozen=True)
class Known:
    """What groups are decided from."""

    graphs: Mapping[str, JoinGraph]
    groups: Mapping[str, Group]
    """As they run, by lead."""
    allocation: Allocation
    samples: Mapping[int, SetSample]
    """By ingest edge."""
    rows: Mapping[str, float]
    """At rest, by store."""
    coefficients: Coefficients
    config: Config
    kept_whole: frozenset[str] = frozenset()
    """Streams that are kept whole."""

    @property
    def layout(self) -> Layout:
        """The layout that they run on."""
        return self.allocation.layout

    @cached_property
    def prices(self) -> Prices:
        """Equation 2 in nanoseconds of this engine."""
        of, c = StorePrices(), self.coefficients
        return Prices(of.write_ns + of.merge_ns + c.alpha_x, c.alpha_q * RUNS, c.alpha_m)

    def store(self, join: str, alias: str, attributes: tuple[int, ...]) -> Store:
        """In which an alias is looked up."""
        key = key_of(self.graphs[join], alias, attributes)
        return self.layout.store_by_id[self.allocation.stores[join, alias, key.columns]]


@dataclass(frozen=True)
class Alike:
    """All queries of one structure, however they are grouped."""

    known: Known
    leads: tuple[tuple[str, tuple[str, ...]], ...]
    """The leads of their groups, each with its aliases in the structure's order."""
    queries: tuple[str, ...] = field(init=False)
    aliases: Mapping[str, tuple[str, ...]] = field(init=False)
    """By query, in that order too."""

    def __post_init__(self) -> None:
        found = {}
        for lead, aliases in self.leads:
            for query, called in self.known.groups[lead].members.items():
                found[query] = tuple(called[alias] for alias in aliases)
        object.__setattr__(self, "aliases", found)
        object.__setattr__(self, "queries", tuple(q for q in self.known.graphs if q in found))

    @property
    def streams(self) -> tuple[str, ...]:
        """The relations, in the structure's order."""
        lead, aliases = self.leads[0]
        return tuple(self.known.graphs[lead].alias(alias).relation for alias in aliases)

    @cached_property
    def keyed(self) -> list[tuple[int, tuple[int, ...], list[int]]]:
        """(alias by number, attributes of a key, aliases that can be looked up by it), in the first lead's words."""
        lead, aliases = self.leads[0]
        graph = self.known.graphs[lead]
        return [
            (i, key, [j for j, other in enumerate(aliases) if j != i and key in graph.keys_of(other)])
            for i, alias in enumerate(aliases)
            for key in graph.keys_of(alias)
        ]

    def stores(self, number: int, key: tuple[int, ...]) -> list[Store]:
        """Those of all groups for an alias by a key."""
        lead, aliases = self.leads[0]
        columns = key_of(self.known.graphs[lead], aliases[number], key).columns
        found = []
        for other, theirs in self.leads:
            id = self.known.allocation.stores.get((other, theirs[number], columns))
            found += [] if id is None else [self.known.layout.store_by_id[id]]
        return list({store.id: store for store in found}.values())

    def shares(self) -> Shares | None:
        """What the samples say that they have in common; None as long as too little is known."""
        indexed: list[tuple[Sampled, float]] = []
        joins: list[JoinSample] = []
        for number, key, others in self.keyed:
            samples = [
                self.known.samples.get(edge.id)
                for store in self.stores(number, key)
                if (edge := self.known.layout.edge_by_store.get(store.id)) is not None
            ]
            there = [sample for sample in samples if sample is not None]
            if len(there) < len(samples) or not there or len({sample.filters for sample in there}) > 1:
                return None
            limit = min(sample.limit for sample in there)
            mine = _within([sample.rows for sample in there], limit)
            if sum(mine.values()) < FEWEST_ROWS:
                return None
            left = self._sampled(mine, there[0].filters, number)
            if left is None:
                return None
            sampled = sum(sum(_within([sample.rows], limit).values()) for sample in there)
            weight = sum(sample.arrived for sample in there) / max(sampled, 1.0)
            indexed.append((left, weight))
            for other in others:
                ids = {store.id for store in self.stores(other, key)}
                met = [m for sample in there for m in sample.met if m[0] in ids]
                if len({filters for _, filters, _ in met}) > 1:
                    return None
                right = self._sampled(_within([rows for _, _, rows in met], limit), met[0][1] if met else (), other)
                if right is not None:
                    joins.append(JoinSample(left, right, weight))
        prices = self.known.prices
        return Shares(
            self.queries,
            tuple(indexed),
            tuple(joins),
            Prices(prices.index, prices.intersect, prices.materialise, STORE_NS * len(self.keyed)),
        )

    def _sampled(self, kinds: Kinds, filters: tuple[int, ...], number: int) -> Sampled | None:
        """Rows with the queries that want them as this alias; None if some query's filter is too new."""
        place = {filter: i for i, filter in enumerate(filters)}
        wanted = [self.known.allocation.filters[query, self.aliases[query][number]] for query in self.queries]
        if not all(filter in place for filter in wanted):
            return None
        rows = sorted(kinds.items())
        size = -(-max(1, len(filters)) // 8)
        packed = b"".join(passed.to_bytes(size, "little") for (_, passed), _ in rows)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(rows), size), axis=1, bitorder="little")
        members = bits[:, [place[filter] for filter in wanted]].astype(np.bool_)
        # Half the hash: it fits a signed number.
        keys = np.array([key >> 1 for (key, _), _ in rows], np.int64)
        return Sampled(keys, np.array([count for _, count in rows], np.float64), members)

    def held(self, shares: Shares) -> float:
        """What indexing costs that other queries' stores need anyway, if these go to stores of their own."""
        found = 0.0
        for (sampled, weight), (number, key, _) in zip(shares.indexed, self.keyed, strict=True):
            ids = {store.id for store in self.stores(number, key) if not store.owner}
            others = {join for (join, _, _), store in self.known.allocation.stores.items() if store in ids}
            if others - set(self.queries):
                found += shares.prices.index * weight * float(sampled.rows.sum())
        return found

    @property
    def building(self) -> float:
        """Nanoseconds to fill stores of their own with what rests in those that they have."""
        of = StorePrices()
        ids = {store.id for number, key, _ in self.keyed for store in self.stores(number, key)}
        return sum(self.known.rows.get(id, 0.0) for id in ids) * (of.write_ns + self.known.coefficients.alpha_m)


def _within(samples: Sequence[tuple[SetRow, ...]], limit: int) -> Kinds:
    """Rows up to a hash; a row that several edges or stores have is one row."""
    found: Kinds = {}
    for rows in samples:
        for key, passed, count in rows:
            if key <= limit:
                found[key, passed] = max(count, found.get((key, passed), 0.0))
    return found


def owner_of(stores: Sequence[Store]) -> str:
    """The group of a query that has these stores: that of the newest, which it may still have to wait for."""
    newest = max(stores, key=lambda store: (store.since, store.id), default=None)
    return newest.owner if newest is not None and newest.owner.startswith(GROUP) else ""


def eager_owner(graph: JoinGraph, running: Mapping[str, tuple[JoinGraph, str]]) -> str:
    """The group that a new query is put in before anything is known of its rows (paper 004, Figure 5).

    Of the queries of its structure, by (graph, owner), one that filters as it does, or the group of most.
    """
    if not any(owner for _, owner in running.values()):
        return ""
    form, aliases = structure_of(graph)
    filters = [graph.alias(alias).filter for alias in aliases]
    votes: list[tuple[bool, str]] = []
    for other, owner in running.values():
        theirs, called = structure_of(other)
        if theirs == form:
            votes.append(([other.alias(alias).filter for alias in called] == filters, owner))
    best = [owner for same, owner in votes if same] or [owner for _, owner in votes]
    return max(dict.fromkeys(best), key=best.count, default="")


def regroup(known: Known, before: Regrouped, late: Callable[[], bool]) -> Regrouped:
    """Groups of all structures from now on; those in force where nothing is known or nothing else pays."""
    joins = frozenset(query for group in known.groups.values() for query in group.members)
    anew = changed_share(joins, before.basis) > known.config.regroup_share
    owners = {query: owner for query, owner in before.owners.items() if query in joins}
    reports = []
    for leads in alike_groups(known.groups, known.graphs):
        alike = Alike(known, tuple(leads))
        if len(alike.queries) < 2:
            continue
        shares = alike.shares()
        if shares is None:
            anew = False
            reports += [r for r in before.reports if set(r.streams) == set(alike.streams)][:1]
            continue
        mine = {query: owners.get(query, "") for query in alike.queries}
        chosen, report = _decided(alike, shares, mine, before.basis, late)
        reports.append(report)
        for query in alike.queries:
            owners.pop(query, None)
        owners |= {query: owner for query, owner in chosen.items() if owner}
    return Regrouped(owners, tuple(reports), joins if anew else before.basis)


def _decided(
    alike: Alike, shares: Shares, owners: Mapping[str, str], basis: frozenset[str], late: Callable[[], bool]
) -> tuple[Mapping[str, str], GroupsReport]:
    """By query its owner from now on, and why."""
    config = alike.known.config
    before = _parted(owners)
    current = shares.total(before) + (alike.held(shares) if any(owners.values()) else 0.0)
    together, apart = shares.cost(alike.queries), shares.total([(query,) for query in alike.queries])
    settled = any(owners.values()) and not alike.known.kept_whole.issuperset(alike.streams)
    chosen, after = dict(owners), current
    found: Sequence[Sequence[str]]
    if len(before) == 1:
        found, how = holistic(shares, late=late), "computed anew"
    elif settled:
        # Of a store several can be made, but not one of several.
        found = [part for group in before for part in holistic(shares.only(group), late=late)]
        how = "only split: stores that have different rows cannot become one"
    else:
        share, gain = config.regroup_share, config.replan_gain
        found, anew = regrouped(shares, before, basis, share=share, gain=gain, late=late)
        how = "computed anew" if anew else "adapted"
    cost = shares.total(found) + (alike.held(shares) if len(found) > 1 else 0.0)
    saved, building = current - cost, alike.building
    if {frozenset(group) for group in found} == {frozenset(group) for group in before}:
        said = f"nothing else is cheaper ({how})"
    elif saved <= config.replan_gain * current:
        said = f"other groups would not be cheaper by {config.replan_gain:.0%} ({how})"
    elif saved * HORIZON_EPOCHS <= building:
        said = f"other groups would not pay for filling their stores ({building / 1e6:.3g} ms)"
    else:
        chosen, after = _named(alike, found, owners), cost
        said = f"{how}; filling their stores takes {building / 1e6:.3g} ms"
    parts = [(o, tuple(q for q in alike.queries if chosen[q] == o)) for o in dict.fromkeys(chosen.values())]
    shown_parts = tuple((owner, tuple(shown(query) for query in queries)) for owner, queries in parts)
    return chosen, GroupsReport(alike.streams, shown_parts, current, after, together, apart, said)


def _parted(owners: Mapping[str, str]) -> list[list[str]]:
    """Queries by owner."""
    found: dict[str, list[str]] = {}
    for query, owner in owners.items():
        found.setdefault(owner, []).append(query)
    return list(found.values())


def _named(alike: Alike, groups: Sequence[Sequence[str]], before: Mapping[str, str]) -> dict[str, str]:
    """Owners of groups: those before where they keep most of their members; nobody where all are together.

    A store that has lost most of its queries would go on holding their old rows.
    """
    if len(groups) == 1:
        return dict.fromkeys(groups[0], "")
    taken: set[str] = set()
    known = {store.owner for store in alike.known.layout.stores} | set(before.values())
    found: dict[str, str] = {}
    for group in sorted(groups, key=lambda group: -len(group)):
        votes = [before[query] for query in group if before[query] and before[query] not in taken]
        owner = max(dict.fromkeys(votes), key=votes.count, default="")
        if not owner or votes.count(owner) < KEPT_SHARE * list(before.values()).count(owner):
            number = 0
            while (owner := f"{GROUP}{group[0]}{f'.{number}' if number else ''}") in known | taken:
                number += 1
        taken.add(owner)
        found |= dict.fromkeys(group, owner)
    return found
