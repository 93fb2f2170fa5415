"""By which keys streams are stored: as few as every driver can do with."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import Config
from plait.order.orders import fixed
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.relation import ColumnDef
from plait.query.store import key_of
from plait.share.store_choice import StoreUse, chosen, is_executable, left_out, searched_instead, stored_by
from tests.random_joins import Case, cases, thinned


def joined(*equalities: str) -> JoinGraph:
    """`joined("a.k = b.k", …)`: streams called like their aliases."""
    sides = [[ColumnRef(*side.split("."), "bigint") for side in text.split(" = ")] for text in equalities]
    names = list(dict.fromkeys(ref.alias for pair in sides for ref in pair))
    columns: dict[str, dict[str, ColumnDef]] = {name: {} for name in names}
    for ref in (ref for pair in sides for ref in pair):
        columns[ref.alias][ref.column] = ColumnDef(ref.column, f"`{ref.column}`", "bigint")
    first = sides[0][0]
    return JoinGraph(
        "SELECT …",
        tuple(Alias(name, name, None, tuple(columns[name].values())) for name in names),
        tuple(Equality(*pair) for pair in sides),
        (Output("out", "bigint", first, str(first), (first,)),),
    )


def keys(graph: JoinGraph, alias: str) -> set[tuple[str, ...]]:
    return {key_of(graph, alias, key).columns for key in graph.keys_of(alias)}


Q9 = joined(
    "supplier.sk = lineitem.sk",
    "partsupp.sk = lineitem.sk",
    "partsupp.pk = lineitem.pk",
    "part.pk = lineitem.pk",
    "orders.ok = lineitem.ok",
    "supplier.nk = nation.nk",
)
Q5 = joined(
    "customer.ck = orders.ck", "lineitem.ok = orders.ok", "lineitem.sk = supplier.sk", "customer.nk = supplier.nk"
)


def test_a_fact_stream_is_not_kept_by_parts_of_a_wider_key() -> None:
    found = chosen({"q9": Q9})["q9"]
    assert {len(key) for key in keys(found, "lineitem")} == {1, 2}
    assert ("ok",) in keys(found, "lineitem")
    assert ("pk",) not in keys(found, "lineitem")
    assert ("sk",) not in keys(found, "lineitem")
    assert len(keys(found, "partsupp")) == 3, "new parts and suppliers look it up first"
    assert {(left.relation, left.key) for left in left_out(found)} == {("lineitem", ("pk",)), ("lineitem", ("sk",))}
    assert all("partsupp" in order[: order.index("lineitem")] for d, order in fixed(found).items() if d == "part")


def test_sizes_that_are_known_decide_which_stream_is_kept_by_fewer_keys() -> None:
    sizes = {"supplier": 1.0, "lineitem": 10.0, "partsupp": 1e6, "part": 1.0, "orders": 1.0, "nation": 1.0}
    found = chosen({"q9": Q9}, sizes)["q9"]
    assert len(keys(found, "partsupp")) == 1
    assert len(keys(found, "lineitem")) == 4


def test_no_key_is_left_out_that_only_a_way_round_could_replace() -> None:
    assert chosen({"q5": Q5})["q5"].stored is None


def test_a_store_that_another_query_needs_is_kept_for_all() -> None:
    found = chosen({"q9": Q9, "p": joined("part.pk = lineitem.pk")})
    assert ("pk",) in keys(found["q9"], "lineitem")
    assert ("sk",) not in keys(found["q9"], "lineitem")
    kept = chosen({"q9": Q9}, there=frozenset({("lineitem", ("sk",))}))["q9"]
    assert ("sk",) in keys(kept, "lineitem")


USE = StoreUse(rows_in=600_000.0)
"""Of a large stream, by a key that nobody looks it up by."""


def test_a_store_goes_if_searching_another_costs_less() -> None:
    few = USE.with_step(lookups=1000.0, found=500.0)
    many = USE.with_step(lookups=600_000.0, found=600_000.0)
    begins = replace(few, driving=600_000.0)
    uses = {("lineitem", ("sk",)): few, ("lineitem", ("ok",)): many, ("lineitem", ("pk",)): begins}
    found = searched_instead({"q9": Q9}, uses, tasks=1)["q9"]
    assert keys(found, "lineitem") == {("sk", "pk"), ("ok",), ("pk",)}
    assert [(left.key, left.searched) for left in left_out(found)] == [(("sk",), False)], "a wider one stands for it"


def test_what_is_not_stored_by_a_wider_key_is_searched() -> None:
    uses = {("lineitem", key): USE for key in (("sk",), ("pk",), ("sk", "pk"))}
    found = searched_instead({"q9": Q9}, uses, tasks=2)["q9"]
    assert keys(found, "lineitem") == {("ok",)}
    assert all(left.searched and left.instead == ("ok",) for left in left_out(found))
    (wide,) = found.searched_keys_of("lineitem")
    assert len(wide) == 2, "one index, by the widest key"
    assert not is_executable(found)
    assert fixed(found)["part"] == ("partsupp", "supplier", "nation", "lineitem", "orders"), "a search comes last"


def test_every_stream_keeps_a_store_and_those_of_others_stay() -> None:
    uses = dict.fromkeys([("lineitem", key) for key in (("ok",), ("sk",), ("pk",), ("sk", "pk"))], USE)
    assert len(keys(searched_instead({"q9": Q9}, uses, 1)["q9"], "lineitem")) == 1
    there = frozenset({("lineitem", ("sk",))})
    assert ("sk",) in keys(searched_instead({"q9": Q9}, uses, 1, there)["q9"], "lineitem")
    assert searched_instead({"q9": Q9}, {}, 1)["q9"] is Q9


def test_what_was_chosen_is_found_again_by_the_columns_that_are_stored() -> None:
    found = chosen({"q9": Q9})["q9"]
    names = [alias.name for alias in Q9.aliases]
    assert stored_by(Q9, {name: frozenset(keys(found, name)) for name in names}) == found
    assert stored_by(Q9, {name: frozenset(keys(Q9, name)) for name in names}) == Q9
    assert stored_by(Q9, {}) == Q9, "too few: all"


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(cases(kinds=("integral",), most_aliases=6, most_queries=3, rows=(0,), shapes=("cycle", "tree")), st.randoms())
def test_every_driver_reaches_all_others_whatever_it_takes_first(case: Case, choose: random.Random) -> None:
    assert all(is_executable(graph) for graph in chosen(case.graphs).values())
    searching = [thinned(graph, choose) for graph in case.graphs.values()]
    for graph in [*chosen(case.graphs).values(), *searching]:
        can_reach = graph.can_search if graph in searching else graph.can_look_up
        for driver in (alias.name for alias in graph.aliases):
            reached, left = [driver], [a.name for a in graph.aliases if a.name != driver]
            while left:
                near = [name for name in left if can_reach(reached, name)]
                assert near, f"{driver} is stuck after {reached}"
                reached.append(choose.choice(near))
                left.remove(reached[-1])


def test_the_setting_is_checked() -> None:
    assert Config().stores == "auto"
    assert Config(stores="all").stores == "all"
