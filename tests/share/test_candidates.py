"""Which sub-joins are the same, and which probe orders and partitionings there are (paper 001, section V)."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest

from plait.query.expr import Call, ColumnRef
from plait.query.graph import Condition, Equality, JoinGraph, Window
from plait.share.candidates import Candidates, construct_rec, materialisable, probe_orders
from plait.share.ilp_paper import apply_partitioning
from plait.share.step_cost import EngineCost, PaperCost, Standing, StorePrices
from plait.share.subjoins import Leaf, Parts, SubJoin, bits, count_connected, whole
from plait.share.workload import ASSUMED_ROWS, Sizes, workload
from plait.stats.counters import QueryForecast, StoreForecast
from tests.share.natural_joins import graph, natural, random_graph, random_workload, sized

FIGURE_3 = {"q1": natural("R(b), S(b,c), T(c)"), "q2": natural("S(c), T(c,d), U(d)")}


def letters(join: SubJoin, mask: int) -> str:
    return "".join(join.leaves[i].relation for i in bits(mask))


def orders_of(candidates: Candidates, join: SubJoin) -> dict[str, set[tuple[str, ...]]]:
    return {
        join.leaves[driver].relation: {tuple(letters(join, piece) for piece in order) for order in orders}
        for driver, orders in probe_orders(candidates, join).items()
    }


# ---------------------------------------------------------------- Figure 3


def test_figure_3_the_intermediate_results() -> None:
    candidates = Candidates(sized(FIGURE_3, 100), PaperCost())
    found = {"".join(leaf.relation for leaf in mir.leaves) for mir in materialisable(candidates)}
    assert found == {"RS", "ST", "TU"}


def test_figure_3_the_candidate_probe_orders() -> None:
    candidates = Candidates(sized(FIGURE_3, 100), PaperCost())
    q1, q2 = (query.join for query in candidates.workload.queries)
    assert orders_of(candidates, q1) == {
        "R": {("R", "S", "T"), ("R", "ST")},
        "S": {("S", "T", "R"), ("S", "R", "T")},
        "T": {("T", "S", "R"), ("T", "RS")},
    }
    assert orders_of(candidates, q2) == {
        "S": {("S", "T", "U"), ("S", "TU")},
        "T": {("T", "S", "U"), ("T", "U", "S")},
        "U": {("U", "T", "S"), ("U", "ST")},
    }
    for mir in materialisable(candidates):
        one, other = (leaf.relation for leaf in mir.leaves)
        assert orders_of(candidates, mir) == {one: {(one, other)}, other: {(other, one)}}


def test_figure_3_the_probe_orders_of_r_with_partitionings() -> None:
    candidates = Candidates(sized(FIGURE_3, 100), PaperCost())
    q1 = candidates.workload.queries[0].join
    heads = construct_rec(q1, (0b001,), candidates.pieces(q1))
    decorated = [order for head in heads for order in apply_partitioning(candidates, q1, head)]
    assert {tuple(str(option.store) for option in order) for order in decorated} == {
        ("S[b]", "T[c]"),
        ("S[c]", "T[c]"),
        ("S[b]", "T[d]"),
        ("S[c]", "T[d]"),
        ("S ⋈ T[S.b]",),
        ("S ⋈ T[T.d]",),
    }


def test_an_attribute_that_joins_nothing_outside_is_no_partitioning() -> None:
    """The paper's example: R ⋈ S of R(a), S(a,b), T(b) is partitioned by b, never by a."""
    candidates = Candidates(sized({"q": natural("R(a), S(a,b), T(b)")}, 100), PaperCost())
    keys = {str(of): keys for of, keys in candidates.partitionings.items()}
    assert keys["R ⋈ S on R.a = S.a"] == (((1, "b"),),)


def test_a_probe_is_routed_if_the_tuples_carry_the_key_and_broadcast_if_not() -> None:
    candidates = Candidates(sized(FIGURE_3, 100), PaperCost(parallelism=5))
    q1 = candidates.workload.queries[0].join
    options = candidates.options(q1, 0, 0b001, Standing(), 0b010, prune=False)
    assert [(str(o.store), o.routed, o.price.cost) for o in options] == [("S[b]", True, 100), ("S[c]", False, 500)]


# ---------------------------------------------------------------- one form for one join


def join_of(found: JoinGraph) -> SubJoin:
    return whole(found)[0]


def test_alias_names_and_the_order_of_writing_leave_no_trace() -> None:
    first = natural("R(a), S(a,b), T(b)")
    other = graph(
        [("z", "T"), ("y", "R"), ("x", "S")],
        [
            Equality(ColumnRef("x", "b", "bigint"), ColumnRef("z", "b", "bigint")),
            Equality(ColumnRef("y", "a", "bigint"), ColumnRef("x", "a", "bigint")),
        ],
    )
    assert whole(first) == (join_of(other), ("R", "S", "T"))
    assert whole(other)[1] == ("y", "x", "z")


def test_other_relations_columns_or_filters_are_another_join() -> None:
    joins = [
        natural("R(a), S(a)"),
        natural("R(b), S(b)"),
        natural("R(a), T(a)"),
        natural("R(a,b), S(a,b)"),
        natural("R(a), S(a)", filters={"R": "a > 1"}),
        natural("R(a), S(a)", filters={"S": "a > 1"}),
    ]
    assert len({join_of(found) for found in joins}) == len(joins)


def test_what_follows_from_two_equalities_joins_the_outer_two() -> None:
    found, parts = join_of(natural("R(a), S(a), T(a)")), Parts()
    assert parts.part(found, 0b101).join == join_of(natural("R(a), T(a)"))


def timed(*windows: tuple[str, str, int | None, int | None]) -> tuple[Window, ...]:
    return tuple(
        Window(ColumnRef(one, "f", "timestamp"), ColumnRef(other, "f", "timestamp"), low, high)
        for one, other, low, high in windows
    )


def test_a_window_is_the_same_in_both_directions_and_another_one_is_not() -> None:
    there = natural("R(a), S(a)", windows=timed(("R", "S", -5, 10)))
    back = natural("R(a), S(a)", windows=timed(("S", "R", -10, 5)))
    longer = natural("R(a), S(a)", windows=timed(("S", "R", -10, 6)))
    assert join_of(there) == join_of(back)
    assert len({join_of(there), join_of(longer), join_of(natural("R(a), S(a)"))}) == 3


def test_windows_that_follow_from_others_count_as_written() -> None:
    text = "R(a), S(a), T(a)"
    short = timed(("S", "R", 0, 5), ("T", "S", 0, 5))
    written = natural(text, windows=(*short, *timed(("T", "R", 0, 10))))
    assert join_of(natural(text, windows=short)) == join_of(written)


def test_conditions_tell_joins_apart_and_alias_names_in_them_do_not() -> None:
    def with_condition(found: JoinGraph, op: str, one: str, other: str) -> SubJoin:
        refs = ColumnRef(one, "e", "bigint"), ColumnRef(other, "e", "bigint")
        return join_of(replace(found, conditions=(Condition("", refs, Call(op, refs, "boolean")),)))

    plain, renamed = natural("R(a), S(a)"), natural("y:S(a), x:R(a)")
    assert with_condition(plain, "<", "R", "S") == with_condition(renamed, "<", "x", "y")
    assert with_condition(plain, "<", "R", "S") != with_condition(plain, "<", "S", "R")
    assert with_condition(plain, "<", "R", "S") != with_condition(plain, "<=", "R", "S")


def test_a_self_join_is_recognised_whichever_occurrence_is_written_first() -> None:
    def chain(names: str) -> JoinGraph:
        x, y, z = names
        refs = [ColumnRef(n, c, "bigint") for n, c in ((x, "a"), (y, "b"), (y, "a"), (z, "b"))]
        pairs = [Equality(refs[0], refs[1]), Equality(refs[2], refs[3])]
        return graph([(n, "R") for n in sorted(names)], pairs)

    forms = {join_of(chain("".join(names))) for names in permutations("xyz")}
    assert len(forms) == 1
    assert not next(iter(forms)).automorphisms
    assert join_of(natural("x:R(a), y:R(a)")).automorphisms == ((1, 0),)


@pytest.mark.parametrize("seed", range(60))
def test_a_join_written_in_any_way_has_one_form(seed: int) -> None:
    draw = random.Random(seed)
    written = random_graph(draw, draw.randint(2, 6))
    names = [alias.name for alias in written.aliases]
    new = dict(zip(names, draw.sample([f"n{i}" for i in range(20)], len(names)), strict=True))

    def ref(old: ColumnRef) -> ColumnRef:
        return replace(old, alias=new[old.alias])

    equalities = [Equality(*draw.sample([ref(e.left), ref(e.right)], 2)) for e in written.equalities]
    again = replace(
        written,
        aliases=tuple(replace(a, name=new[a.name]) for a in draw.sample(written.aliases, len(names))),
        equalities=tuple(draw.sample(equalities, len(equalities))),
        windows=tuple(replace(w, left=ref(w.left), right=ref(w.right)) for w in written.windows),
        outputs=(),
    )
    assert join_of(written) == join_of(again)


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_parts_are_parts(seed: int) -> None:
    draw = random.Random(seed)
    join, parts = join_of(random_graph(draw, 5)), Parts()
    for larger in join.connected:
        for smaller in join.connected:
            if smaller & ~larger == 0:
                outer = parts.part(join, larger)
                assert parts.part(outer.join, outer.mask(smaller)).join == parts.part(join, smaller).join


def test_connected_sets_are_counted_no_further_than_asked() -> None:
    clique = join_of(natural(", ".join(f"R{n}(a)" for n in range(13))))
    assert count_connected(clique, 100) == 100
    chain = join_of(natural("R(a), S(a,b), T(b,c), U(c)"))
    assert count_connected(chain, 100) == len(chain.connected) == 10


# ---------------------------------------------------------------- sizes


def test_a_join_is_as_large_as_its_relations_and_selectivities_say() -> None:
    given = sized({"q": natural("R(a), S(a,b), T(b)")}, 100, {"S.b = T.b": 0.015})
    join, parts = given.queries[0].join, Parts()
    sizes = [given.sizes.rows(parts.part(join, mask).join) for mask in (0b011, 0b110, 0b111)]
    assert sizes == pytest.approx([100, 150, 150])


def test_of_three_equal_columns_two_equalities_count_the_weakest_ones() -> None:
    given = sized({"q": natural("R(a), S(a), T(a)")}, 100, {"R.a = S.a": 0.1, "S.a = T.a": 0.2, "R.a = T.a": 0.001})
    assert given.sizes.rows(given.queries[0].join) == pytest.approx(100**3 * 0.1 * 0.2)


def test_new_rows_meet_what_is_stored() -> None:
    r, s = Leaf("R"), Leaf("S")
    join = join_of(natural("R(a), S(a)"))
    sizes = Sizes({r: 10.0, s: 1.0}, {r: 5000.0, s: 1000.0}, {((r, "a"), (s, "a")): 0.01})
    assert (sizes.tuples(join, 0), sizes.tuples(join, 1)) == (100, 50)


def test_without_statistics_all_relations_are_alike() -> None:
    given = workload({"q": natural("R(a), S(a,b), T(b)")})
    assert given.sizes.rows(given.queries[0].join) == pytest.approx(ASSUMED_ROWS)


def test_sizes_come_from_forecasts() -> None:
    found = natural("R(a), S(a)")
    forecast = QueryForecast(
        aliases=("R", "S"),
        gamma={("R", "S"): 0.5, ("S", "R"): 0.0},
        mu={("R", "S"): 4.0, ("S", "R"): 0.0},
        keys={"R": 10.0, "S": 8.0},
        tuples_per_key={"R": 3.0, "S": 1.0},
        stores={"R[a]": StoreForecast(100, 500, 1), "S[a]": StoreForecast(100, 200, 1)},
        together={},
        wider={},
    )
    sizes = workload({"q": found}, {"q": forecast, "gone": None}, {"R": 7.0}).sizes
    assert (sizes.rate(Leaf("R")), sizes.at_rest(Leaf("S"))) == (30, 200)
    # R finds γ·μ = 2 of 200; S found none of 8 keys, which is taken as one in ten of 500.
    assert sizes.selectivity == {((Leaf("R"), "a"), (Leaf("S"), "a")): pytest.approx((2 / 200 + 0.1 / 500) / 2)}


def test_a_query_of_one_stream_joins_nothing() -> None:
    assert workload({"q": graph([("r", "R")], [])}).queries == ()


# ---------------------------------------------------------------- dominated options


def first_probes(cost: PaperCost | EngineCost, *, copies: bool = True) -> list[str]:
    candidates = Candidates(sized(FIGURE_3, 100), cost, copies=copies)
    q1 = candidates.workload.queries[0].join
    return [str(option.store) for option in candidates.options(q1, 0, 0b001, Standing(), 0b010)]


def test_a_broadcast_is_dropped_where_a_copy_is_for_nothing() -> None:
    assert first_probes(PaperCost(parallelism=4)) == ["S[b]"]


def test_of_two_partitionings_that_cost_the_same_one_is_left() -> None:
    """With one partition a broadcast is as good as a routed probe."""
    assert len(first_probes(PaperCost(parallelism=1))) == 1


def test_a_broadcast_stays_where_there_are_no_copies() -> None:
    assert first_probes(PaperCost(parallelism=4), copies=False) == ["S[b]", "S[c]"]


def test_a_broadcast_stays_where_stores_cost() -> None:
    assert sorted(first_probes(EngineCost(prices=StorePrices(write_ns=1e9)))) == ["S[b]", "S[c]"]


@pytest.mark.parametrize("seed", range(10))
def test_equal_steps_have_equal_prices_in_all_queries(seed: int) -> None:
    """What a step costs follows from its name; otherwise it could not be shared."""
    for cost in (PaperCost(parallelism=3), EngineCost(parallelism=3)):
        candidates = Candidates(random_workload(seed, most=4), cost)
        prices: dict[object, float] = {}
        for query in candidates.workload.queries:
            for heads in probe_orders(candidates, query.join).values():
                for head in heads:
                    for order in apply_partitioning(candidates, query.join, head):
                        for option in order:
                            assert prices.setdefault(option.name, option.price.cost) == pytest.approx(option.price.cost)
