"""How long a row can still be reached: the bound behind every removal from state.

The windows of a query are difference constraints `z − x ≤ d` between event times; their shortest paths give the
tightest implied bound between *any* two aliases, also those that no window names together.  A row of x with event
time t can meet a future row of z only while z's time may still be at most t + d(z, x); rows of z at or below the
watermark are dropped as late.  So once the watermark reaches t + d(z, x) for every other alias z, the row of x can
take part in no further result.  An alias that no chain of windows bounds, or that has no watermark, keeps it for ever.

A TTL is simpler: it belongs to the stream.  A query may give it by the hint STATE_TTL instead of `ttl=`, but rows rest
once for all queries, so whoever reads the stream has to agree.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from itertools import product

from plait.errors import QueryError
from plait.query.graph import Alias, JoinGraph
from plait.query.relation import Relation

Bounds = dict[tuple[str, str], int]


def upper_bounds(graph: JoinGraph) -> Bounds:
    """`(z, x) → d` such that every result has time(z) − time(x) ≤ d microseconds (Floyd–Warshall)."""
    names = [alias.name for alias in graph.aliases]
    bounds: Bounds = {(name, name): 0 for name in names}

    def tighten(z: str, x: str, bound: int) -> None:
        bounds[z, x] = min(bound, bounds.get((z, x), bound))

    for window in graph.windows:
        if window.upper_us is not None:
            tighten(window.left.alias, window.right.alias, window.upper_us)
        if window.lower_us is not None:
            tighten(window.right.alias, window.left.alias, -window.lower_us)
    for middle, z, x in product(names, repeat=3):
        if (z, middle) in bounds and (middle, x) in bounds:
            tighten(z, x, bounds[z, middle] + bounds[middle, x])
    return bounds


def keep_us(graph: JoinGraph, relations: Mapping[str, Relation]) -> dict[str, int | None]:
    """For every alias, microseconds after its event time during which a row is needed; None is for ever."""
    bounds = upper_bounds(graph)
    return {alias.name: _reach(graph, relations, bounds, alias, graph.aliases) for alias in graph.aliases}


def unbounded(graph: JoinGraph, relations: Mapping[str, Relation], name: str) -> str:
    """Why rows of an alias can always be reached by new rows; empty if they cannot, or if nothing is joined."""
    alias, bounds = graph.alias(name), upper_bounds(graph)
    if len(graph.aliases) < 2 or _reach(graph, relations, bounds, alias, graph.aliases) is not None:
        return ""
    untimed = [a.relation for a in graph.aliases if relations[a.relation].time_column is None]
    if untimed:
        return f"{', '.join(dict.fromkeys(untimed))} {'has' if len(set(untimed)) == 1 else 'have'} no watermark"
    late = [other.name for other in graph.aliases if other.name != name and (other.name, name) not in bounds]
    return f"no window ends how much later than {name} rows of {', '.join(late)} may be"


def final_us(graph: JoinGraph, relations: Mapping[str, Relation], name: str, tables: Container[str]) -> int | None:
    """Microseconds that the watermark must be past an event time of an alias until no result with it can come.

    None is never.  Tables come with the epoch that first needs them, so nothing is waited for there.
    """
    coming = [alias for alias in graph.aliases if alias.relation not in tables]
    reach = _reach(graph, relations, upper_bounds(graph), graph.alias(name), coming)
    return None if reach is None else max(0, reach)


def complete_us(graph: JoinGraph, name: str, missing_us: Mapping[str, int]) -> int | None:
    """The event time of an alias above which no result lacks a row; None if none does.

    `missing_us` says for each alias up to which event time rows of it may be gone.  A result with
    time(name) > missing(x) + d(name, x) has a row of x above missing(x).  Where nothing says how much older a partner
    may be, no result would ever be known to be complete: that alias is left out.
    """
    bounds = upper_bounds(graph)
    return max((gone + bounds[name, x] for x, gone in missing_us.items() if (name, x) in bounds), default=None)


def _reach(
    graph: JoinGraph, relations: Mapping[str, Relation], bounds: Bounds, alias: Alias, coming: Iterable[Alias]
) -> int | None:
    """How far after a row of an alias the rows of those that are still coming can lie; None is without end."""
    others = [other for other in coming if other.name != alias.name]
    reaches = [bounds.get((other.name, alias.name)) for other in others]
    timed = all(relations[a.relation].time_column is not None for a in (*others, alias))
    known = [reach for reach in reaches if reach is not None]
    return max(known, default=0) if timed and len(known) == len(reaches) else None


def with_ttls(graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation]) -> dict[str, Relation]:
    """The relations with the TTLs that hints give them; refused unless all that read a stream mean the same."""
    meant: dict[str, dict[int | None, str]] = {}
    for query, graph in graphs.items():
        for alias in graph.aliases:
            own = relations[alias.relation].ttl_us
            found = meant.setdefault(alias.relation, {} if own is None else {own: "by its ttl="})
            ttl = own if alias.ttl_us is None else alias.ttl_us
            found.setdefault(ttl, f"for alias {alias.name} of query {query!r}")
    for stream, found in meant.items():
        if len(found) > 1:
            said = [f"{'none' if us is None else f'{us / 1e6:g} s'} {by}" for us, by in list(found.items())[:2]]
            raise QueryError(
                "TTL_CONFLICT",
                f"the state of stream {stream!r} is shared, but its TTL is {' and '.join(said)}",
                f"give the TTL once, by engine.stream({stream!r}, …, ttl=…), or the same hint wherever it is read",
            )
    settled = {stream: next(iter(found)) for stream, found in meant.items()}
    return {name: replace(r, ttl_us=settled.get(name, r.ttl_us)) for name, r in relations.items()}
