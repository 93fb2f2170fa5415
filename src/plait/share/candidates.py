"""Candidates of the joint optimisation (paper 001, section V): MIRs, probe orders, partitionings of stores.

    pieces            what a probe can join at once: a relation, or a MIR, a connected sub-join that is kept in a store
    construct_rec     Algorithm 1: the probe orders of a query from one starting relation, by any pieces
    partitionings     by store, the keys by which it can be partitioned: for every relation outside of it that some
                      query joins with it, the attributes that they share
    options           a probe by each partitioning of the store that is probed, with its price

A probe order is a sequence of sets of members: the driving one, then one piece after another.  A query with
`MOST_WITH_MIRS` connected sub-joins or more is planned without MIRs; one with `MOST_SETS` by one order per driver.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from plait.share.step_cost import Kept, Once, Place, Price, Probe, Standing, StepCost
from plait.share.subjoins import Column, Leaf, Part, Parts, SubJoin, bits, count_connected, moved
from plait.share.workload import Workload

MOST_WITH_MIRS = 40
"""Connected sub-joins below which MIRs are considered: a chain of eight relations has 36, a clique of five 31."""
MOST_SETS = 256
"""Connected sub-joins below which all orders are considered: a clique of eight relations has 255."""

Key = tuple[Column, ...]
"""Columns of a store's rows by which it is partitioned; of equal columns the first."""
Head = tuple[int, ...]
"""The beginning of a probe order: sets of members of a sub-join."""


@dataclass(frozen=True, slots=True)
class Store:
    """The rows of a relation (one member without filter: filters share a store) or of a MIR, by one key."""

    of: SubJoin
    key: Key

    def __str__(self) -> str:
        of = self.of
        names = [f"{of.leaves[i]}.{c}" if len(of.leaves) > 1 else c for i, c in self.key]
        return f"{' ⋈ '.join(map(str, of.leaves))}[{', '.join(names)}]"


@dataclass(frozen=True, slots=True)
class Option:
    """A probe of one store."""

    piece: int
    store: Store
    routed: bool
    price: Price
    name: tuple[Hashable, ...]
    """Equal for equal steps of whatever queries: what has joined, for whose new rows, what is probed and how."""
    tuples: float
    """Tuples that probe, per epoch."""
    places: tuple[int, ...] | None = None
    """Of a MIR whose members can change places: which of them stands at each place of the store's rows."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of a workload under a cost model."""

    workload: Workload
    cost: StepCost
    mirs: bool = True
    """Whether intermediate results may be kept."""
    copies: bool = True
    """Whether a store may be kept by several keys; the paper has one."""
    nested: bool = True
    """Whether MIRs may be computed from other MIRs."""
    stored: frozenset[tuple[str, tuple[str, ...]]] | None = None
    """(relation, columns): the stores of relations that there are; None: any."""
    parts: Parts = field(default_factory=Parts, compare=False, repr=False)
    partitionings: Mapping[SubJoin, tuple[Key, ...]] = field(init=False)
    _pieces: dict[SubJoin, tuple[int, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _kept: dict[Store, tuple[float, tuple[Once, ...]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "partitionings", _partitionings(self))

    def explodes(self, join: SubJoin) -> bool:
        """Whether a query has more orders than can be looked at."""
        return count_connected(join, MOST_SETS) == MOST_SETS

    def considers_mirs(self, join: SubJoin) -> bool:
        """Whether a query is small enough for MIRs."""
        return count_connected(join, MOST_WITH_MIRS) < MOST_WITH_MIRS

    def pieces(self, join: SubJoin) -> tuple[int, ...]:
        """What a probe of this sub-join can join at once: each relation, and each MIR but the whole."""
        found = self._pieces.get(join)
        if found is None:
            # The orders of a query compute a MIR too if that joins the same.
            nested = self.nested or any(query.join == join for query in self.workload.queries)
            if self.mirs and nested and self.considers_mirs(join):
                found = tuple(mask for mask in join.connected if mask != join.everything)
            else:
                found = tuple(1 << i for i in range(len(join.leaves)))
            self._pieces[join] = found
        return found

    def store_of(self, part: Part) -> SubJoin:
        """Whose rows a store holds that serves this part: a MIR's, or a relation's without regard to filters."""
        join = part.join
        return join if len(join.leaves) > 1 else SubJoin((Leaf(join.leaves[0].relation),))

    def options(
        self, join: SubJoin, driver: int, joined: int, standing: Standing, piece: int, *, prune: bool = True
    ) -> list[Option]:
        """The ways to probe a piece, one per partitioning of its store; without dominated ones if `prune`.

        With copies, a way is dominated if another leads to the same place and costs no more even if it pays for its
        store all by itself: whoever wants the first can take the second, and all together pay no more.
        """
        part, before = self.parts.part(join, piece), self.parts.part(join, joined)
        after = self.parts.part(join, joined | piece)
        sizes, leaf = self.workload.sizes, join.leaves[driver]
        of, rows = self.store_of(part), sizes.rows(part.join)
        tuples = sizes.tuples(before.join, before.places.index(driver))
        found = sizes.tuples(after.join, after.places.index(driver))
        drafts = []
        for key in self.partitionings[of]:
            place, routed, order = self._place(join, part, key, joined)
            edge, rate = None, 0.0
            if joined == 1 << driver:
                edge = leaf.relation, _carried_by(join, driver, place) if routed else ()
                rate = self._relations[leaf.relation].arriving
            price = self.cost.step(Probe(joined.bit_count(), tuples, found, rows, routed, place, edge, rate), standing)
            drafts.append(_Draft(Store(of, key), routed, price, order))
        if prune and self.copies and len(drafts) > 1:
            drafts = self._undominated(drafts)
        name = self._name(join, driver, joined, standing, part, after)
        return [Option(piece, d.store, d.routed, d.price, (*name, d.store.key), tuples, d.places) for d in drafts]

    def kept(self, store: Store) -> tuple[float, tuple[Once, ...]]:
        """The price of keeping a store."""
        price = self._kept.get(store)
        if price is None:
            price = self._kept[store] = self.cost.store(self._contents(store))
        return price

    def _contents(self, store: Store) -> Kept:
        sizes, of = self.workload.sizes, store.of
        if len(of.leaves) > 1:
            arriving = sum(sizes.tuples(of, driver) for driver in range(len(of.leaves)))
            return Kept(arriving, sizes.rows(of), None)
        return replace(self._relations[of.leaves[0].relation], edge=(of.leaves[0].relation, _names(store.key)))

    @cached_property
    def _relations(self) -> dict[str, Kept]:
        """By relation: the rows that pass any filter, taken as those of the weakest."""
        sizes = self.workload.sizes
        found: dict[str, Kept] = {}
        for leaf in {leaf for query in self.workload.queries for leaf in query.join.leaves}:
            so_far = found.get(leaf.relation, Kept(0.0, 0.0, None))
            found[leaf.relation] = Kept(
                max(so_far.arriving, sizes.rate(leaf)), max(so_far.rows, sizes.at_rest(leaf)), None
            )
        return found

    def _undominated(self, drafts: list[_Draft]) -> list[_Draft]:
        kept: list[_Draft] = []
        for draft in sorted(drafts, key=lambda d: d.price.cost):
            if not any(self._with_store(better) <= draft.price.cost for better in kept if _replaces(better, draft)):
                kept.append(draft)
        return kept

    def _with_store(self, draft: _Draft) -> float:
        """The most that a probe can cost, leaving out what every way to make it needs: the MIR itself."""
        cost, needs = self.kept(draft.store)
        return draft.price.cost + cost + sum(once.cost for once in {*needs, *draft.price.needs})

    def _place(self, join: SubJoin, part: Part, key: Key, joined: int) -> tuple[Place, bool, tuple[int, ...] | None]:
        """A store's key as attributes of the whole join, whether the joined members carry them, and how it lies there.

        The members of a MIR may change places (self-joins): of its ways to lie in the join one by which the probe is
        routed, if there is one.
        """
        for order in (None, *part.join.automorphisms):
            columns = [(part.places[i if order is None else order[i]], column) for i, column in key]
            place: Place = frozenset(join.attribute_of.get(column, column) for column in columns)
            if all(isinstance(at, int) and join.attribute_masks[at] & joined for at in place):
                return place, True, order
        return frozenset(join.attribute_of.get((part.places[i], c), (part.places[i], c)) for i, c in key), False, None

    def _name(
        self, join: SubJoin, driver: int, joined: int, standing: Standing, part: Part, after: Part
    ) -> tuple[Hashable, ...]:
        """The same for the same probe in other queries: positions within what is joined after it."""
        position = {member: i for i, member in enumerate(after.places)}
        piece = after.mask(part.members)
        stands = None if standing.place is None else _columns(join, standing.place, joined, position)
        names = [(position[driver], piece, stands)]
        for order in after.join.automorphisms:
            elsewhere = None if stands is None else _moved(after.join, stands, order, piece)
            names.append((order[position[driver]], moved(piece, order), elsewhere))
        first = min(names, key=repr) if len(names) > 1 else names[0]
        return ("step", after.join, *first, standing.hop)


@dataclass(frozen=True, slots=True)
class _Draft:
    """An option without its name."""

    store: Store
    routed: bool
    price: Price
    places: tuple[int, ...] | None


def _names(key: Key) -> tuple[str, ...]:
    return tuple(sorted(column for _, column in key))


def _replaces(better: _Draft, option: _Draft) -> bool:
    """Whether an option leads where another leads, without an exchange that the other does not have."""
    mine = {once.name for once in option.price.needs}
    return better.price.after == option.price.after and all(
        once.name in mine or once.name[0] == "edge" for once in better.price.needs
    )


def _carried_by(join: SubJoin, driver: int, place: Place) -> tuple[str, ...]:
    """The columns in which a member carries attributes of the join."""
    columns = (next(c for i, c in join.attributes[at] if i == driver) for at in place if isinstance(at, int))
    return tuple(sorted(columns))


def _columns(join: SubJoin, place: Place, joined: int, position: Mapping[int, int]) -> tuple[Column, ...]:
    """Attributes as columns of what has joined, by new positions: of equal columns the first."""
    found = []
    for at in place:
        if isinstance(at, int):
            found.append(min((position[i], c) for i, c in join.attributes[at] if joined >> i & 1))
        else:
            assert isinstance(at, tuple)
            found.append((position[at[0]], at[1]))
    return tuple(sorted(found))


def _moved(join: SubJoin, columns: tuple[Column, ...], order: tuple[int, ...], piece: int) -> tuple[Column, ...]:
    """Columns after members have changed places; of equal columns outside of the piece the first."""
    found = []
    for i, column in columns:
        moved_to = (order[i], column)
        attribute = join.attribute_of.get(moved_to)
        equal = [moved_to] if attribute is None else join.attributes[attribute]
        found.append(min(c for c in equal if c == moved_to or not moved(piece, order) >> c[0] & 1))
    return tuple(sorted(found))


# ---------------------------------------------------------------- Algorithm 1


def joinable(join: SubJoin, joined: int, pieces: Iterable[int]) -> Iterator[int]:
    """The pieces that can be probed next: disjoint from what has joined, and sharing an attribute with it."""
    around = join.around(joined)
    return (piece for piece in pieces if not piece & joined and piece & around)


def construct_rec(join: SubJoin, head: Head, pieces: tuple[int, ...]) -> list[Head]:
    """Paper 001, Algorithm 1: all probe orders that begin with `head` and join everything."""
    joined = 0
    for piece in head:
        joined |= piece
    if joined == join.everything:
        return [head]
    result: list[Head] = []
    for piece in joinable(join, joined, pieces):
        result += construct_rec(join, (*head, piece), pieces)
    return result


def probe_orders(candidates: Candidates, join: SubJoin) -> dict[int, list[Head]]:
    """By driving member, the candidate probe orders of a query or MIR."""
    pieces = candidates.pieces(join)
    return {driver: construct_rec(join, (1 << driver,), pieces) for driver in range(len(join.leaves))}


def materialisable(candidates: Candidates) -> tuple[SubJoin, ...]:
    """The MIRs of all queries: each distinct connected sub-join that some probe could use, small ones first."""
    found: dict[SubJoin, None] = {}
    for query in candidates.workload.queries:
        for mask in candidates.pieces(query.join):
            if mask.bit_count() > 1:
                found[candidates.parts.part(query.join, mask).join] = None
    return tuple(sorted(found, key=lambda join: len(join.leaves)))


def _partitionings(candidates: Candidates) -> dict[SubJoin, tuple[Key, ...]]:
    found: dict[SubJoin, set[Key]] = {}
    for query in candidates.workload.queries:
        join = query.join
        for mask in candidates.pieces(join):
            part = candidates.parts.part(join, mask)
            keys = found.setdefault(candidates.store_of(part), set())
            for outside in bits(join.around(mask)):
                keys.add(_key(join, mask, part, outside))
    return {of: tuple(sorted(_stored(candidates, of, keys))) for of, keys in found.items()}


def _stored(candidates: Candidates, of: SubJoin, keys: set[Key]) -> set[Key]:
    """Of the keys of a relation those by which it is stored."""
    if candidates.stored is None or len(of.leaves) > 1:
        return keys
    return {key for key in keys if (of.leaves[0].relation, _names(key)) in candidates.stored} or keys


def _key(join: SubJoin, mask: int, part: Part, outside: int) -> Key:
    """The columns of a part that a relation outside of it is joined with, in one form for all automorphisms."""
    position = {member: i for i, member in enumerate(part.places)}
    shared = [
        members
        for carriers, members in zip(join.attribute_masks, join.attributes, strict=True)
        if carriers & mask and carriers >> outside & 1
    ]
    orders: list[Callable[[int], int]] = [lambda i: i, *(order.__getitem__ for order in part.join.automorphisms)]
    return min(
        tuple(sorted(min((place(position[i]), c) for i, c in members if i in position) for members in shared))
        for place in orders
    )
