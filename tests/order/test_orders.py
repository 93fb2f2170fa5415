"""The fixed orderer: written order, as far as the graph allows."""

from __future__ import annotations

from plait.order.orders import fixed
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph


def graph(*equalities: str) -> JoinGraph:
    """`graph("a.k = b.k", …)`; aliases in alphabetical order."""
    sides = [[ColumnRef(*side.split("."), "int") for side in text.split(" = ")] for text in equalities]
    names = sorted({ref.alias for pair in sides for ref in pair})
    return JoinGraph("", tuple(Alias(n, n, None, ()) for n in names), tuple(Equality(*pair) for pair in sides), ())


def test_a_star_is_probed_in_written_order() -> None:
    assert fixed(graph("a.k = b.k", "a.k = c.k")) == {"a": ("b", "c"), "b": ("a", "c"), "c": ("a", "b")}


def test_a_chain_is_probed_outwards_from_its_driver() -> None:
    orders = fixed(graph("a.x = b.x", "b.y = c.y", "c.z = d.z"))
    assert orders == {"a": ("b", "c", "d"), "b": ("a", "c", "d"), "c": ("b", "a", "d"), "d": ("c", "b", "a")}


def test_an_attribute_shared_by_all_lets_any_two_meet_directly() -> None:
    assert fixed(graph("a.k = b.k", "b.k = c.k"))["c"] == ("a", "b")


def test_every_next_alias_shares_an_attribute_with_one_already_joined() -> None:
    join = graph("a.x = d.x", "b.y = d.y", "c.z = b.z", "e.x = a.x")
    for driver, order in fixed(join).items():
        joined = [driver]
        for alias in order:
            assert any(join.shared(alias, other) for other in joined), (driver, order)
            joined.append(alias)
        assert sorted(joined) == ["a", "b", "c", "d", "e"]
