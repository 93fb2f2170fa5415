"""The fixed orderer: every input probes the others in written order.

A probe order is a value, chosen anew for every plan; other orderers return the same shape.
"""

from __future__ import annotations

from plait.query.graph import JoinGraph

Orders = dict[str, tuple[str, ...]]
"""For every driving alias, the aliases it probes, first to last."""


def fixed(graph: JoinGraph) -> Orders:
    """Written order, as far as the graph allows: each next alias shares an attribute with one already joined."""
    names = [alias.name for alias in graph.aliases]
    orders: Orders = {}
    for driver in names:
        joined, order = [driver], []
        while len(joined) < len(names):
            reachable = graph.attributes_of(joined)
            following = next(n for n in names if n not in joined and graph.attributes_of([n]) & reachable)
            joined.append(following)
            order.append(following)
        orders[driver] = tuple(order)
    return orders
