"""dpPick: the probe order that costs least (paper 000, section 4.2).

The paper's Algorithm 3 prices every probe sequence of the join graph, remembers the price of every *sub-sequence*, and
takes the cheapest; Algorithm 4, `probe_sequences`, enumerates them.  Their number grows like a factorial: 4 relations
in a clique have 24 orders, 12 have 479 million.

`dp_pick` finds the same minimum by remembering less.  What a sub-sequence costs depends on what was joined before it
only through the share of keys still alive, the tuples per key, and the key at which they stand (order/cost.py), and
those are functions of the *set* joined before, whatever its order.  So of all ways to reach a set (standing at one key)
the cheapest rest is the same, and one number per set replaces one per sub-sequence: 2^(n−1) sets of at most n targets.
Every sequence is still considered, none is priced twice, and the minimum over all of them is the one returned;
`tests/order/test_dp_pick.py` checks it against the enumeration.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.order.cost import DriverView
from plait.query.graph import JoinGraph

ProbePair = tuple[str, str]
"""⟨l, r⟩: l has joined already and carries the attribute by which r is looked up."""


def dp_pick(view: DriverView) -> tuple[tuple[str, ...], float]:
    """The cheapest order and its cost per key of the driver."""
    rest: dict[tuple[int, tuple[int, ...] | None], tuple[float, int]] = {}
    everything = (1 << len(view.names)) - 1

    def cheapest(joined: int, here: tuple[int, ...] | None) -> float:
        """costDict and subMemo in one: the least that is still to pay after `joined`, and by which probe."""
        if joined == everything:
            return 0.0
        known = rest.get((joined, here))
        if known is not None:
            return known[0]
        best, chosen = float("inf"), -1
        for target in view.following(joined):
            cost, key = view.step(joined, target, here)
            # A probe that is dearer by itself than the best whole rest need not be followed.
            if cost < best:
                cost += cheapest(joined | 1 << target, key)
                if cost < best:
                    best, chosen = cost, target
        if chosen < 0:
            # All are infinite (or not a number): any order is as good.
            chosen = view.following(joined)[0]
        rest[joined, here] = best, chosen
        return best

    joined, here = 1 << view.driver, None
    total = cheapest(joined, here)
    order: list[str] = []
    while joined != everything:
        if (joined, here) not in rest:
            cheapest(joined, here)
        target = rest[joined, here][1]
        here = view.place(target, view.key(joined, target, here))
        joined |= 1 << target
        order.append(view.names[target])
    return tuple(order), total


def probe_sequences(graph: JoinGraph) -> Iterator[tuple[ProbePair, ...]]:
    """Paper 000's Algorithm 4: every sequence of probe pairs that visits the whole graph, from every start.

    Two sequences that differ only in which of several carriers of one attribute is named are two here, as in the
    paper; they are the same probes.
    """
    names = [alias.name for alias in graph.aliases]
    edges = [(one, other) for one in names for other in names if one != other and graph.shared(one, other)]

    def from_visited(visited: frozenset[str], sequence: tuple[ProbePair, ...]) -> Iterator[tuple[ProbePair, ...]]:
        if len(visited) == len(names):
            yield sequence
            return
        for start, end in edges:
            if start in visited and end not in visited:
                yield from from_visited(visited | {end}, (*sequence, (start, end)))

    for name in names:
        yield from from_visited(frozenset({name}), ())
