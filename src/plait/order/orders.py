"""Orderers: in which order the new tuples of one alias probe the others.

    fixed               the written order, for ever
    selectivity_first   next is the stream of which a tuple matches the smallest share (MJoin, GrubJoin)
    greedy              next is the probe that costs least (MultiStream)
    dp_pick             the order that costs least as a whole (paper 000; order/dp_pick.py)

All but `fixed` choose from the same view of the same forecasts (order/cost.py), so that they differ in nothing else.
A probe order is a value, chosen anew for every plan.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.order.cost import DriverView
from plait.order.dp_pick import dp_pick
from plait.query.graph import JoinGraph

Order = tuple[str, ...]
Orders = dict[str, Order]
"""For every driving alias, the aliases it probes, first to last."""

Orderer = Callable[[DriverView, Order], Order]
"""Chooses an order, given what is known and the order so far."""


def fixed(graph: JoinGraph) -> Orders:
    """Written order, as far as the graph allows: aliases that are stored by no key that was joined come last."""
    names = [alias.name for alias in graph.aliases]
    orders: Orders = {}
    for driver in names:
        joined, order = [driver], []
        while len(joined) < len(names):
            near = [n for n in names if n not in joined and graph.can_search(joined, n)]
            following = next((n for n in near if graph.can_look_up(joined, n)), near[0])
            joined.append(following)
            order.append(following)
        orders[driver] = tuple(order)
    return orders


def selectivity_first(view: DriverView) -> Order:
    """Always the stream of which a tuple matches the smallest share: γ·μ over its rows."""

    def selectivity(joined: int, target: int, _here: tuple[int, ...] | None) -> float:
        success = view.alive[joined | 1 << target] / view.alive[joined] if view.alive[joined] else 0.0
        return success * view.mu[target] / max(view.rows[target], 1.0)

    return _one_by_one(view, selectivity)


def greedy(view: DriverView) -> Order:
    """Always the probe that is cheapest by itself, its matches included."""
    return _one_by_one(view, lambda joined, target, here: view.step(joined, target, here)[0])


def _one_by_one(view: DriverView, price: Callable[[int, int, tuple[int, ...] | None], float]) -> Order:
    joined, here, order = 1 << view.driver, None, []
    while following := view.following(joined):
        target = min(following, key=lambda t: price(joined, t, here))
        here = view.place(target, view.key(joined, target, here))
        joined |= 1 << target
        order.append(view.names[target])
    return tuple(order)


ORDERERS: dict[str, Orderer] = {  # the names are `config.ORDERERS`
    "fixed": lambda _view, order: order,
    "selectivity_first": lambda view, _order: selectivity_first(view),
    "greedy": lambda view, _order: greedy(view),
    "dp_pick": lambda view, _order: dp_pick(view)[0],
}
