"""Query groups (paper 004, section 4): queries of one structure share a group where that costs less than going apart.

A *query set* says to which queries a row belongs.  From sampled query sets the cost of a group is that of Equation 2,
over cardinalities of possibly overlapping sets (Equation 1: a row that several of its queries want is one row):

    COST(S1 ⋈ S2) = b1 · Crd(S1) + b2 · Crd(S2) + Min(DistKey S1, DistKey S2) + bm · Crd(S1 ⋈ S2)
                    ╰──────── indexing ───────╯   ╰── index set intersection ─╯   ╰ materialisation ╯

Indexing and intersecting are never dearer together.  What sharing can cost is in the last term: a group joins the union
of its queries' rows, so it also finds the pairs of one query's left row with another query's right row, which nobody
wants.  Here bm is 1 for every probe, not only at the sink: whatever a probe finds is read, since its query sets have to
be intersected.

Contract.  Pure functions of the samples.  To find the best groups is NP-hard; here a query joins the group that it
saves most with, if it saves anything, and founds one otherwise.  The result depends on nothing but the arguments,
unless the time is over.  Cost: one pass over the sample per query and kind of stream, for all groups at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]

MOST_GROUPS = 32
"""Groups of one structure: a query that no group saves with goes where it costs least, once there are as many."""
ROUNDS = 3
"""How often every query is taken out and put where it saves most."""


def never() -> bool:
    """A deadline that does not come."""
    return False


@dataclass(frozen=True, slots=True)
class Prices:
    """What the terms of Equation 2 cost.  The paper adds rows and keys as they are."""

    index: float = 1.0
    """Per row that is indexed."""
    intersect: float = 1.0
    """Per key that both sides have."""
    materialise: float = 1.0
    """Per pair of rows that is found."""
    group: float = 0.0
    """Per group, whatever is in it."""


PAPER = Prices()


@dataclass(frozen=True, eq=False)
class Sampled:
    """Rows of one stream: those with the same key and query set are counted together."""

    keys: npt.NDArray[np.int64]
    """In ascending order."""
    rows: Numbers
    members: Flags
    """[kinds of rows, queries]: the query sets."""

    @staticmethod
    def of(rows: Iterable[tuple[int, Collection[int], float]], queries: int) -> Sampled:
        """From (key, numbers of the queries that want the rows, how many rows)."""
        found = sorted(rows, key=lambda row: row[0])
        members = np.zeros((len(found), queries), np.bool_)
        for number, (_, wanting, _) in enumerate(found):
            members[number, list(wanting)] = True
        return Sampled(
            np.array([key for key, _, _ in found], np.int64), np.array([n for _, _, n in found], np.float64), members
        )

    def in_union(self, groups: Flags) -> Flags:
        """[kinds, groups]: which rows some query of each group wants; `groups` is [queries, groups]."""
        wanted: Flags = self.members.astype(np.float32) @ groups.astype(np.float32) > 0
        return wanted

    def cardinality(self, union: Flags) -> Numbers:
        """Crd by group: Equation 1 counts what is in several sets once."""
        found: Numbers = self.rows @ union
        return found

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where a key begins."""
        return np.flatnonzero(np.r_[True, self.keys[1:] != self.keys[:-1]]) if len(self.keys) else np.empty(0, np.int64)

    def by_key(self, union: Flags) -> Numbers:
        """[keys, groups]: rows of each key."""
        found: Numbers = np.add.reduceat(self.rows[:, None] * union, self.starts, axis=0)
        return found


@dataclass(frozen=True, eq=False)
class JoinSample:
    """Two streams, sampled by the same keys."""

    left: Sampled
    right: Sampled
    weight: float = 1.0
    """What one sampled row stands for."""

    @cached_property
    def both(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The places of the keys that both sides have."""
        mine, its = self.left.keys[self.left.starts], self.right.keys[self.right.starts]
        _, left, right = np.intersect1d(mine, its, assume_unique=True, return_indices=True)
        return left, right

    def costs(self, left: Flags, right: Flags, prices: Prices) -> Numbers:
        """Intersection and materialisation, by group, from the unions of both sides."""
        one, other = self.both
        if not len(one):
            return np.zeros(left.shape[1])
        mine, its = self.left.by_key(left)[one], self.right.by_key(right)[other]
        keys = np.minimum((mine > 0).sum(axis=0), (its > 0).sum(axis=0))
        pairs = np.einsum("kg,kg->g", mine, its)
        found: Numbers = self.weight * (prices.intersect * keys + prices.materialise * pairs)
        return found


@dataclass(frozen=True, eq=False)
class Shares:
    """What some queries of one structure have in common, as far as samples tell."""

    queries: tuple[str, ...]
    indexed: tuple[tuple[Sampled, float], ...]
    """The streams that are indexed (b = 1), and what one sampled row of each stands for."""
    joins: tuple[JoinSample, ...]
    prices: Prices = PAPER

    @cached_property
    def streams(self) -> tuple[Sampled, ...]:
        """All samples, each once."""
        found = [s for s, _ in self.indexed] + [s for join in self.joins for s in (join.left, join.right)]
        return tuple({id(s): s for s in found}.values())

    @cached_property
    def place(self) -> dict[int, int]:
        """By identity of a sample, its number."""
        return {id(s): number for number, s in enumerate(self.streams)}

    def costs(self, unions: Sequence[Flags]) -> Numbers:
        """By group, from the unions of all `streams`."""
        found = np.full(unions[0].shape[1] if unions else 0, self.prices.group)
        for sampled, weight in self.indexed:
            found += self.prices.index * weight * sampled.cardinality(unions[self.place[id(sampled)]])
        for join in self.joins:
            found += join.costs(unions[self.place[id(join.left)]], unions[self.place[id(join.right)]], self.prices)
        return found

    def only(self, queries: Sequence[str]) -> Shares:
        """The same, of some of the queries."""
        at = [self.queries.index(query) for query in queries]
        cut = {id(s): Sampled(s.keys, s.rows, s.members[:, at]) for s in self.streams}
        joins = tuple(JoinSample(cut[id(j.left)], cut[id(j.right)], j.weight) for j in self.joins)
        indexed = tuple((cut[id(sampled)], weight) for sampled, weight in self.indexed)
        return Shares(tuple(queries), indexed, joins, self.prices)

    def cost(self, group: Collection[str]) -> float:
        """What some queries cost together."""
        return self.total([group])

    def total(self, groups: Sequence[Collection[str]]) -> float:
        """What groups cost, each by itself."""
        flags = np.array([[query in group for group in groups] for query in self.queries], np.bool_)
        flags = flags.reshape(len(self.queries), len(groups))
        return float(self.costs([stream.in_union(flags) for stream in self.streams]).sum()) if groups else 0.0


class _Groups:
    """Groups while they change: their members, unions and costs."""

    def __init__(self, shares: Shares, groups: Iterable[Collection[str]]) -> None:
        self.shares = shares
        self.number = {query: i for i, query in enumerate(shares.queries)}
        self.members = [{self.number[query] for query in group} for group in groups]
        self.alone = shares.costs([stream.members for stream in shares.streams])
        """What each query costs by itself."""
        flags = np.zeros((len(shares.queries), len(self.members)), np.bool_)
        for at, group in enumerate(self.members):
            flags[list(group), at] = True
        self.unions = [stream.in_union(flags) for stream in shares.streams]
        self.costs = shares.costs(self.unions) if self.members else np.zeros(0)

    def put(self, query: int) -> None:
        """Into the group that it saves most with; into one of its own if it saves nothing."""
        if self.members:
            more = self._with(query)
            saved = self.costs + self.alone[query] - more
            best = int(np.argmax(saved))
            if saved[best] > 0 or len(self.members) >= MOST_GROUPS:
                self._change(best, self.members[best] | {query}, float(more[best]))
                return
        self.members.append({query})
        self.unions = [
            np.c_[union, stream.members[:, [query]]]
            for union, stream in zip(self.unions, self.shares.streams, strict=True)
        ]
        self.costs = np.r_[self.costs, self.alone[query]]

    def take(self, query: int) -> None:
        """Out of its group."""
        at = self.group_of(query)
        left = self.members[at] - {query}
        if left:
            self._change(at, left, None)
        else:
            self._drop(at)

    def group_of(self, query: int) -> int:
        """The group that a query is in."""
        return next(at for at, group in enumerate(self.members) if query in group)

    def saved_by_leaving(self, query: int) -> float:
        """What the others save if a query goes away, less what it costs where it would go."""
        at = self.group_of(query)
        if len(self.members[at]) == 1 and len(self.members) == 1:
            return 0.0
        before, members = float(self.costs.sum()), [set(group) for group in self.members]
        unions, costs = list(self.unions), self.costs.copy()
        self.take(query)
        self.put(query)
        saved = before - float(self.costs.sum())
        self.members, self.unions, self.costs = members, unions, costs
        return saved

    def merge_some(self, gain: float) -> bool:
        """Puts two groups together where that saves most; whether any were."""
        best, pair = 0.0, None
        for at in range(len(self.members) - 1):
            others = range(at + 1, len(self.members))
            unions = [union[:, [at]] | union[:, at + 1 :] for union in self.unions]
            apart = self.costs[at] + self.costs[at + 1 :]
            saved = apart - self.shares.costs(unions)
            saved[saved <= gain * apart] = 0.0
            if float(saved.max()) > best:
                best, pair = float(saved.max()), (at, others[int(np.argmax(saved))])
        if pair is None:
            return False
        at, other = pair
        self._change(at, self.members[at] | self.members[other], None)
        self._drop(other)
        return True

    def named(self) -> tuple[tuple[str, ...], ...]:
        """The groups, in the order of their first queries."""
        names = self.shares.queries
        return tuple(tuple(names[i] for i in group) for group in sorted(sorted(members) for members in self.members))

    def _with(self, query: int) -> Numbers:
        """What each group would cost with one more query."""
        streams = zip(self.unions, self.shares.streams, strict=True)
        return self.shares.costs([union | stream.members[:, [query]] for union, stream in streams])

    def _change(self, at: int, members: set[int], cost: float | None) -> None:
        self.members[at] = members
        self.unions = [union.copy() for union in self.unions]
        for union, stream in zip(self.unions, self.shares.streams, strict=True):
            union[:, at] = stream.members[:, list(members)].any(axis=1)
        self.costs = self.costs.copy()
        self.costs[at] = self.shares.costs([u[:, [at]] for u in self.unions])[0] if cost is None else cost

    def _drop(self, at: int) -> None:
        del self.members[at]
        self.unions = [np.delete(union, at, axis=1) for union in self.unions]
        self.costs = np.delete(self.costs, at)


def holistic(shares: Shares, *, late: Callable[[], bool] = never) -> tuple[tuple[str, ...], ...]:
    """Groups from scratch.

    The queries that cost most go first.  The first two are compared as the paper compares pairs; whoever comes later is
    checked against every group there is, groups of one among them.
    """
    groups = _Groups(shares, ())
    for query in sorted(range(len(shares.queries)), key=lambda i: (-groups.alone[i], i)):
        groups.put(query)
    return _settled(groups, range(len(shares.queries)), 0.0, late)


def incremental(
    shares: Shares, before: Sequence[Collection[str]], gain: float = 0.0, *, late: Callable[[], bool] = never
) -> tuple[tuple[str, ...], ...]:
    """Groups from those before: new queries are placed, and who is there goes elsewhere only where it saves `gain`.

    Queries that are gone leave their groups; a group that nobody is in is none.
    """
    known = set(shares.queries)
    kept = [mine for group in before if (mine := [query for query in group if query in known])]
    groups = _Groups(shares, kept)
    there = {query for group in kept for query in group}
    for number, query in enumerate(shares.queries):
        if query not in there:
            groups.put(number)
    return _settled(groups, [groups.number[query] for query in shares.queries if query in there], gain, late)


def _settled(
    groups: _Groups, queries: Iterable[int], gain: float, late: Callable[[], bool]
) -> tuple[tuple[str, ...], ...]:
    """Moves single queries, then puts whole groups together, while that saves enough."""
    queries = list(queries)
    for _ in range(ROUNDS):
        moved = False
        for query in queries:
            if late():
                return groups.named()
            if groups.saved_by_leaving(query) > max(gain * groups.alone[query], 1e-9 * groups.costs.sum()):
                groups.take(query)
                groups.put(query)
                moved = True
        while not late() and groups.merge_some(max(gain, 1e-9)):
            moved = True
        if not moved:
            break
    return groups.named()


def regrouped(
    shares: Shares,
    before: Sequence[Collection[str]],
    basis: Collection[str],
    *,
    share: float = 0.5,
    gain: float = 0.0,
    late: Callable[[], bool] = never,
) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """The groups from now on, and whether they were computed from scratch.

    They are where more than a `share` of all queries came or went since then; `basis` are the queries of that time.
    """
    if changed_share(shares.queries, basis) > share:
        return holistic(shares, late=late), True
    return incremental(shares, before, gain, late=late), False


def changed_share(queries: Collection[str], basis: Collection[str]) -> float:
    """Queries that came or went since `basis`, by queries that are there."""
    return len(set(queries) ^ set(basis)) / max(1, len(queries))
