"""Which stores can serve a need, from which epoch of birth on, and which have to be added.

Contract.  A store covers a need from epoch *f* on if every row born since then that the need is about is in it, with
the columns it needs, and can be told from older ones: its *eras* say what was stored, its history what was let go.

Invariant.  `Stores.floor` gives no floor that `Stores.use` cannot serve, by a store that is there or one built from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plait.query.expr import columns_of
from plait.query.layout import Layout, StoreHistory
from plait.query.relation import Relation
from plait.query.store import NO_KEY, Era, Filter, Key, Reach, Store, store_id
from plait.share.needs import Need

RAW = Reach((), None)
"""Rows of a stream that is kept whole are needed by nobody in particular."""


@dataclass
class Draft:
    """A store while it is being allocated."""

    id: str
    relation: str
    key: Key
    before: Store | None
    source: Store | None = None
    """The store that it is to be filled from."""
    owner: str = ""
    """The group, or the only query, that uses it; empty: any."""
    needs: list[Need] = field(default_factory=list)
    floors: set[int] = field(default_factory=set)


@dataclass
class Stores:
    """The stores that are there, and those that are added to them."""

    before: Layout
    epoch: int
    version: int
    history: Mapping[str, StoreHistory]
    tables: frozenset[str]
    relations: Mapping[str, Relation]
    drafts: dict[str, Draft] = field(default_factory=dict)
    relation_of: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By join and alias."""

    def floor(self, needs: Iterable[Need], relation: str, least: int) -> int:
        """The lowest floor from `least` on that an alias can have, by all its keys.

        Each key has a store that is there, or one that can be built from it.
        """
        mine = [s for s in self.before.stores if s.relation == relation]
        floor, before = least, -1
        while floor != before:
            before = floor
            for need in needs:
                here = [self.usable(store, need, floor) for store in mine if _may_use(store, need)]
                built = [self.usable(store, need, floor, need.key) for store in mine if not self._is_building(store)]
                floor = min([*here, *built], default=self.epoch)
        return floor

    def usable(self, store: Store, need: Need, floor: int, key: Key | None = None) -> int:
        """The lowest floor from `floor` on that a store can serve: it has the rows, and can tell their births apart."""
        floor = max(floor, self.covered(store, need, key))
        for first, last in sorted(self.history.get(store.id, StoreHistory()).spans):
            if first < floor <= last:
                floor = last + 1
        return min(floor, self.epoch)

    def covered(self, store: Store, need: Need, key: Key | None = None) -> int:
        """The epoch of birth from which on a store has all rows that a need is about.

        With a `key`, whether another store could be filled from it.
        """
        # By the same key its hashes are taken over.
        rehashed = key is not None and key.columns != store.key.columns
        columns = need.columns | (frozenset(key.columns) if key is not None and rehashed else frozenset())
        floor = self.epoch
        own = frozenset(store.key.columns) if key is not None else frozenset()
        for era in reversed(store.eras):
            if not (
                columns <= set(era.columns)
                and (frozenset(era.required) | own) <= need.required
                and self.admits(store.relation, era, need.filter)
            ):
                break
            floor = era.since
        floor = max(floor, store.lowest)
        past = self.history.get(store.id, StoreHistory())
        ends = [*(era.since for era in store.eras[1:]), self.epoch + 1]
        newer = [era for era, end in zip(store.eras, ends, strict=True) if end > floor]
        kept = store.id in need.mine or all(_outlives(era.reach, need.reach) for era in newer)
        if floor < self.epoch and not kept:
            floor = max(floor, past.let_go + 1)
        return min(floor, self.epoch)

    def admits(self, relation: str, era: Era, wanted: Filter) -> bool:
        """Whether all rows that pass a filter are in an era, and can be told from the others."""
        texts = {f.id: f.text for f in self.before.input_by_relation[relation].filters}
        there = {texts[f] for f in era.filters if f in texts}
        if wanted.text in there:
            return True
        known = wanted.expr is not None and {ref.column for ref in columns_of(wanted.expr)} <= set(era.columns)
        return None in there and known

    def _is_building(self, store: Store) -> bool:
        return any(build.store == store.id for build in self.before.builds)

    def use(self, needs: Iterable[Need], floor: int, waits: bool) -> Iterator[str]:
        """The stores in which an alias with this floor is looked up, by its needs: those that are there, or new ones.

        A query that does not wait uses no store that has to be built first; of a table, one that is loaded instead.
        Either all stores of an alias of a table are loaded in this epoch, or none is: a row that was there by one key
        and came by another would be old and new at once.
        """
        needs = list(needs)
        fit = [self._fit(need, floor, waits) for need in needs]
        sources = [self._sources(need, floor) if waits else [] for need in needs]
        relation = self.relation_of[needs[0].join, needs[0].alias] if needs else ""
        lacking = any(not here and not built for here, built in zip(fit, sources, strict=True))
        loads = lacking and relation in self.tables and not needs[0].live
        for need, here, built in zip(needs, fit, sources, strict=True):
            if here and not loads:
                old = here[0]
                draft = self.drafts.setdefault(old.id, Draft(old.id, relation, need.key, old, owner=old.owner))
            else:
                draft = self._new(need, relation, floor, () if loads else built)
            draft.needs.append(need)
            draft.floors.add(floor)
            yield draft.id

    def prepare(self, needs: Iterable[Need], floor: int) -> Iterator[str]:
        """Stores that a running query goes over to once they are filled: its owner's, where it uses others.

        Where one of them is complete it uses that already; where none can be filled it stays where it is.
        """
        for need in needs:
            relation = self.relation_of[need.join, need.alias]
            own = [s for s in self.before.stores if (s.relation, s.key, s.owner) == (relation, need.key, need.owner)]
            fit = [s for s in own if self._fits(s, need, floor)]
            if relation in self.tables or floor >= self.epoch or any(not self._is_building(s) for s in fit):
                continue
            sources = [s for s in self.before.stores if s.relation == relation and not self._is_building(s)]
            sources = [s for s in sources if self._can_fill(s, need, floor)]
            if fit:
                old = fit[0]
                draft = self.drafts.setdefault(old.id, Draft(old.id, relation, need.key, old, owner=old.owner))
            elif sources:
                # One that is kept whole fills a store for all of a group.
                whole = [s for s in sources if s.key == NO_KEY]
                draft = self._new(need, relation, floor, whole or sources)
            else:
                continue
            draft.needs.append(need)
            draft.floors.add(floor)
            yield draft.id

    def _can_fill(self, store: Store, need: Need, floor: int) -> bool:
        """Whether a store has all that a running query's own would have to be filled with."""
        has_used = store.id in need.mine and store.key == need.key
        return has_used or self.usable(store, need, floor, need.key) <= floor

    def _fit(self, need: Need, floor: int, waits: bool) -> list[Store]:
        """The stores that are there and serve a need, the best first."""
        relation = self.relation_of[need.join, need.alias]
        there = [s for s in self.before.stores if s.relation == relation and _may_use(s, need)]
        # The newest that is complete, so that older ones fall out of use; of a table the one whose rows were seen.
        table = relation in self.tables
        there.sort(
            key=lambda s: (bool(need.owner) and s.owner == need.owner, table and s.id in need.mine, s.since, -s.first),
            reverse=True,
        )
        waits = waits and floor < self.epoch
        return [s for s in there if self._fits(s, need, floor) and (waits or not self._is_building(s))]

    def _fits(self, store: Store, need: Need, floor: int) -> bool:
        if store.relation in self.tables:
            return self.covered(store, need) <= store.since
        # It has been kept complete for those who use it since their admission.
        return store.id in need.mine or self.usable(store, need, floor) <= floor

    def _sources(self, need: Need, floor: int) -> list[Store]:
        """The stores from which one that serves a need can be built."""
        relation = self.relation_of[need.join, need.alias]
        there = [s for s in self.before.stores if s.relation == relation and not self._is_building(s)]
        if floor >= self.epoch:
            return []
        if relation in self.tables:
            return [s for s in there if self.covered(s, need, need.key) <= s.since]
        return [s for s in there if self.usable(s, need, floor, need.key) <= floor]

    def _new(self, need: Need, relation: str, floor: int, sources: Sequence[Store]) -> Draft:
        """A store that is added: built from one of the sources, or empty where there is none.

        Needs share one only if it is filled alike for both: otherwise one would wait for, or miss, a past.
        """
        name = store_id(relation, need.key) + (f" of {need.owner}" if need.owner else "")
        assert sources or floor >= self.epoch or relation in self.tables, f"{name} has no past from {floor} on"
        same = relation, need.key, need.owner
        new = [d for d in self.drafts.values() if d.before is None and (d.relation, d.key, d.owner) == same]
        for draft in new:
            if draft.source in sources if draft.source is not None else not sources:
                return draft
        id = (name if not self.version else f"{name}@{self.version}") + (f".{len(new)}" if new else "")
        source = min(sources, key=lambda s: (len(s.columns), s.id), default=None)
        return self.drafts.setdefault(id, Draft(id, relation, need.key, None, source, owner=need.owner))

    def raw(self, relation: Relation, filters: tuple[Filter, ...]) -> None:
        """The store of all rows of a stream, as they are."""
        everything = frozenset(name for name, _ in relation.columns)
        whole = next(f for f in filters if (f.text, f.marks) == (None, ()))
        need = Need("", "", NO_KEY, everything, frozenset(), whole, RAW)
        there = [s for s in self.before.stores if s.relation == relation.name and s.key == NO_KEY]
        name = store_id(relation.name, NO_KEY)
        new = name if not self.version else f"{name}@{self.version}"
        found = there[-1] if there else None
        draft = self.drafts.setdefault(found.id if found else new, Draft(new, relation.name, NO_KEY, found))
        draft.id = found.id if found else new
        draft.needs.append(need)


def _may_use(store: Store, need: Need) -> bool:
    """Whether a store is by the key of a need, and its query's own, or shared as its query is.

    Who lives goes on with the stores it has, whatever `sharing` is from now on.
    """
    return store.key == need.key and (store.owner == need.owner or store.id in need.mine)


def _outlives(kept: Iterable[Reach], needed: Reach) -> bool:
    """Whether rows were kept at least as long as a query would have kept them."""
    known = {reach.marks: reach.keep_us for reach in kept}
    if None in known.values() or not known:
        return True
    mine = known.get(needed.marks)
    return mine is not None and needed.keep_us is not None and mine >= needed.keep_us
