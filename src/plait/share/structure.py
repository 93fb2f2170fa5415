"""The structure of a join: its relations and the equalities between them, whatever filters, windows and outputs it has.

Queries of one structure are planned as one (paper 004: they differ in selections and windows only): they get the same
probe orders, so they share trees, and what their shared probes count belongs to all of them.  The first of them that
was registered *leads*; statistics are kept under its name.

Cost.  Aliases of one relation (self-joins) are tried in every order, up to `MOST_ORDERS`; a query with more keeps them
as they are written, and may then not be recognised as equal to another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, permutations, product
from math import factorial, prod

from plait.order.orders import Orders
from plait.query.graph import JoinGraph
from plait.query.store import key_of

MOST_ORDERS = 720
"""Orders of the aliases of a self-join that are tried."""

Structure = tuple[tuple[str, ...], tuple[tuple[tuple[int, str], ...], ...], tuple[tuple[int, tuple[str, ...]], ...]]
"""The relations, per attribute the (number of the relation, column) pairs that are equal, and the keys by which
relations are stored, if not by all."""


def structure_of(graph: JoinGraph) -> tuple[Structure, tuple[str, ...]]:
    """The structure of a join in its canonical form, and its aliases in the order of that form."""
    found = min((_written(graph, order), order) for order in _orders(graph))
    return found


def _orders(graph: JoinGraph) -> Iterator[tuple[str, ...]]:
    """The aliases by relation; those of one relation in every order."""
    relation = {alias.name: alias.relation for alias in graph.aliases}
    names = sorted(relation, key=lambda name: relation[name])
    alike = [tuple(group) for _, group in groupby(names, key=lambda name: relation[name])]
    if prod(factorial(len(group)) for group in alike) > MOST_ORDERS:
        yield tuple(name for group in alike for name in group)
        return
    for parts in product(*(permutations(group) for group in alike)):
        yield tuple(name for part in parts for name in part)


def _written(graph: JoinGraph, order: tuple[str, ...]) -> Structure:
    number = {name: i for i, name in enumerate(order)}
    classes = [tuple(sorted((number[ref.alias], ref.column) for ref in attribute)) for attribute in graph.attributes]
    stored = [(number[alias], key_of(graph, alias, key).columns) for alias, key in graph.stored or ()]
    return tuple(graph.alias(name).relation for name in order), tuple(sorted(classes)), tuple(sorted(stored))


@dataclass(frozen=True)
class Group:
    """Queries of one structure."""

    lead: str
    members: Mapping[str, Mapping[str, str]]
    """By query: what the lead calls each of its aliases, and what the query calls it."""

    def orders_of(self, query: str, orders: Orders) -> Orders:
        """The lead's orders in the query's words."""
        called = self.members[query]
        return {called[driver]: tuple(called[alias] for alias in order) for driver, order in orders.items()}


def groups_of(graphs: Mapping[str, JoinGraph], owners: Mapping[str, str] | None = None) -> dict[str, Group]:
    """The groups of these queries, by their leads; only joins of one owner are in one group."""
    found: dict[tuple[str, Structure], Group] = {}
    leading: dict[tuple[str, Structure], tuple[str, ...]] = {}
    for name, graph in graphs.items():
        form, aliases = structure_of(graph)
        structure = (owners or {}).get(name, ""), form
        lead = leading.setdefault(structure, aliases)
        mine = {name: dict(zip(lead, aliases, strict=True))}
        before = found.get(structure)
        found[structure] = Group(name, mine) if before is None else Group(before.lead, {**before.members, **mine})
    return {group.lead: group for group in found.values()}


def alike_groups(
    groups: Mapping[str, Group], graphs: Mapping[str, JoinGraph]
) -> list[list[tuple[str, tuple[str, ...]]]]:
    """Groups of the same structure, whoever owns them: their leads, each with its aliases in the structure's order."""
    found: dict[Structure, list[tuple[str, tuple[str, ...]]]] = {}
    for lead in groups:
        form, aliases = structure_of(graphs[lead])
        found.setdefault(form, []).append((lead, aliases))
    return list(found.values())
