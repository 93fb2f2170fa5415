"""Which intermediate results a layout has: who goes on, who is made anew, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.explain_forest import forest
from plait.order.orders import fixed
from plait.query.expr import ColumnRef
from plait.query.graph import JoinGraph, Window
from plait.query.layout import Layout
from plait.query.plan import Plan, Step
from plait.query.store import Store
from plait.share.allocate import Allocation, Wanted, allocate
from plait.share.mirs import CannotKeep, Keep, order_through, uses_of
from plait.share.probe_trees import build_plan, plan_on
from tests.share.streams import joined, streams

CHAIN = joined("a.k = b.k", "b.m = c.m", "c.k = d.k")
OTHER = joined("b.m = c.m", "b.k = e.k")
GRAPHS = {"q": CHAIN, "p": OTHER}
PART = (("q", ("b", "c")), ("p", ("b", "c")))
KEEP = Keep(PART, ((0, "k"),))


def allocated(
    graphs: dict[str, JoinGraph], keeps: list[Keep], before: Layout | None = None, epoch: int = 0
) -> Allocation:
    live = {} if before is None else {"live": True, "stores": frozenset(s.id for s in before.stores)}
    wanted = {}
    for name, graph in graphs.items():
        floors = None if before is None else {alias.name: 0 for alias in graph.aliases}
        wanted[name] = Wanted(graph, name, floors=floors, **live)  # type: ignore[arg-type]
    return allocate(before or Layout(), wanted, streams("abcde"), epoch=epoch, version=epoch, keeps=keeps)


def only_mir(found: Allocation) -> Store:
    (mir,) = found.layout.mirs
    return mir


def lookups(plan: Plan) -> list[Step]:
    return [node.step for node in plan.nodes() if node.step.below is not None]


def test_the_parts_of_queries_that_are_the_same_join_are_found_whatever_they_are_called() -> None:
    assert set(uses_of(GRAPHS, "q", ("b", "c"))) == set(PART)
    assert set(uses_of(GRAPHS, "q", ("c", "b"))) == {("q", ("c", "b")), ("p", ("c", "b"))}
    assert uses_of(GRAPHS, "q", ("a", "b")) == (("q", ("a", "b")),)
    assert uses_of(GRAPHS, "q", ("b", "c"), [(0, "k")]) == PART
    assert uses_of(GRAPHS, "q", ("b", "c"), [(1, "k")]) == PART[:1]


def test_a_mir_holds_what_any_order_of_its_uses_may_read() -> None:
    mir = only_mir(allocated(GRAPHS, [KEEP]))
    assert {column.name for column in mir.columns} >= {"0.id", "1.id", "0.k", "1.k"}
    assert (mir.since, mir.first) == (0, 0)


def filtered(text: str) -> JoinGraph:
    return replace(OTHER, aliases=tuple(replace(a, filter=text if a.name == "b" else None) for a in OTHER.aliases))


def test_uses_that_ask_the_same_of_the_members_have_one_bit_and_are_fed_once() -> None:
    alike, other = only_mir(allocated(GRAPHS, [KEEP])), {**GRAPHS, "p": filtered("id < 3")}
    assert alike.mir is not None
    assert [use.query for use in alike.mir.feeding] == ["q"]
    assert not alike.masked
    apart = only_mir(allocated(other, [KEEP]))
    assert apart.mir is not None
    assert [use.query for use in apart.mir.feeding] == ["q", "p"]
    assert apart.masked


def test_a_mir_goes_on_with_fewer_uses_and_is_another_one_when_other_rows_are_asked_for() -> None:
    first = allocated(GRAPHS, [KEEP])
    mir = only_mir(first)
    fewer = only_mir(allocated(GRAPHS, [replace(KEEP, uses=PART[:1])], first.layout, 3))
    assert fewer.id == mir.id
    assert fewer.mir is not None
    assert mir.mir is not None
    assert fewer.mir.uses == mir.mir.uses[:1]
    assert not allocated(GRAPHS, [KEEP], first.layout, 3).layout.fills(3)
    alone = allocated(GRAPHS, [replace(KEEP, uses=PART[:1])])
    joined_by = allocated(GRAPHS, [KEEP], alone.layout, 3)
    # The other query asks the same of b and c: its rows are there.
    assert only_mir(joined_by).id == only_mir(alone).id
    assert not joined_by.layout.fills(3)
    graphs = {**GRAPHS, "p": filtered("id < 3")}
    alone = allocated(graphs, [replace(KEEP, uses=PART[:1])])
    more = allocated(graphs, [KEEP], alone.layout, 3)
    assert only_mir(more).id != only_mir(alone).id
    assert more.layout.fills(3) == {only_mir(more).id}
    ids = [f.id for i in more.layout.inputs for f in i.filters] + [
        f.id for s in more.layout.mirs for f in s.filters({})
    ]
    assert len(set(ids)) == len(ids)
    assert allocated(GRAPHS, [], more.layout, 5).layout.mirs == ()


def test_a_query_with_longer_windows_gets_a_mir_that_lets_rows_go_later() -> None:
    timed = {n: replace(relation, time_column="m", delay_ms=0) for n, relation in streams("abc").items()}
    chain = joined("a.k = b.k", "b.k = c.k")

    def within(length_us: int) -> JoinGraph:
        bounds = [("a", "b", length_us), ("b", "c", 5)]
        sides = [(ColumnRef(x, "m", "bigint"), ColumnRef(y, "m", "bigint"), most) for x, y, most in bounds]
        return replace(chain, windows=tuple(Window(x, y, -most, most) for x, y, most in sides))

    def kept(lengths: dict[str, int], uses: str, before: Layout, epoch: int) -> Layout:
        wanted = {n: Wanted(within(most), n, floors=dict.fromkeys("abc", 0), live=True) for n, most in lengths.items()}
        keep = Keep(tuple((name, ("b", "c")) for name in uses), ((0, "k"),))
        return allocate(before, wanted, timed, epoch=epoch, version=epoch, keeps=[keep]).layout

    first = kept({"q": 10, "s": 7, "l": 20}, "q", Layout(), 0)
    shorter = kept({"q": 10, "s": 7, "l": 20}, "qs", first, 3)
    assert shorter.mirs[0].id == first.mirs[0].id
    longer = kept({"q": 10, "s": 7, "l": 20}, "ql", first, 3)
    assert longer.mirs[0].id != first.mirs[0].id
    assert longer.fills(3)


def test_the_same_part_by_two_keys_is_two_mirs() -> None:
    found = allocated(GRAPHS, [KEEP, Keep(PART[:1], ((1, "k"),))])
    assert len({mir.id for mir in found.layout.mirs}) == 2


def test_without_a_stream_its_mirs_go() -> None:
    layout = allocated(GRAPHS, [KEEP]).layout
    assert layout.without(["c"]).mirs == ()
    assert layout.without(["d"]).mirs == layout.mirs


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (Keep((("q", ("b", "c")),), ()), "by some key"),
        (Keep((("q", ("b", "c")), ("p", ("c", "b"))), ((0, "k"),)), "not of the same streams"),
        (Keep((("q", ("b",)),), ((0, "k"),)), "not a part of q"),
        (Keep((("q", ("a", "b", "c", "d")),), ((0, "k"),)), "not a part of q"),
        (Keep((("q", ("a", "d")),), ((0, "k"),)), "not joined with each other"),
        (Keep((("q", ("b", "c")),), ((0, "id"),)), "joins nothing"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_a_reason(keep: Keep, why: str) -> None:
    with pytest.raises(CannotKeep, match=why):
        allocated(GRAPHS, [keep])


def test_an_order_through_mirs_is_an_order_of_aliases_each_connected_with_those_before() -> None:
    assert order_through(CHAIN, "a", [("c", "b"), ("d",)]) == ("b", "c", "d")
    assert order_through(CHAIN, "d", [("b", "c"), ("a",)]) == ("c", "b", "a")
    with pytest.raises(CannotKeep, match="not joined with each other"):
        order_through(CHAIN, "a", [("d", "c"), ("b",)])


def test_a_query_that_waits_for_a_build_uses_no_mir_yet() -> None:
    assert KEEP.without({"p"}).uses == PART[:1]
    first = allocated({"q": CHAIN}, [])
    stores = frozenset(store.id for store in first.layout.stores)
    graph = joined("b.m = c.m", "b.k = e.k", "b.id = e.m")
    wanted = {
        "q": Wanted(CHAIN, "q", floors=first.floors["q"], live=True, stores=stores),
        "p": Wanted(graph, "p", since="now"),
    }
    keep = Keep(uses_of({"q": CHAIN, "p": graph}, "q", ("b", "c")), ((0, "k"),))
    assert len(keep.uses) == 2
    found = allocate(first.layout, wanted, streams("abcde"), epoch=3, version=1, keeps=[keep])
    assert found.waiting == {"p"}
    mir = only_mir(found)
    assert mir.mir is not None
    assert [use.query for use in mir.mir.uses] == ["q"]


def test_a_join_with_a_table_is_not_kept() -> None:
    wanted = {"q": Wanted(CHAIN, "q")}
    with pytest.raises(CannotKeep, match="c is a table"):
        allocate(Layout(), wanted, streams("abcd"), tables=frozenset("c"), keeps=[replace(KEEP, uses=PART[:1])])


def test_one_lookup_into_a_mir_stands_for_those_into_its_members() -> None:
    orders = {"q": {**fixed(CHAIN), "a": ("b", "c", "d")}, "p": fixed(OTHER)}
    plan = build_plan(GRAPHS, streams("abcde"), orders, tuple("abcde"), [KEEP])
    assert {step.store for step in lookups(plan)} == {s.id for s in plan.stores if s.mir is not None}
    by_a = [node for tree in plan.trees if tree.relation == "a" for top in tree.nodes for node in top.walk()]
    # b and c at once, then d.
    assert [node.step.hop for node in by_a] == [1, 2]
    # One by new rows of b, one by those of c.
    assert [feed.new for node in plan.nodes() for feed in node.feeds] == [1, 2]


def test_an_order_that_does_not_go_through_all_members_in_a_row_does_without_the_mir() -> None:
    star = joined("a.k = b.k", "b.m = c.m", "a.k = d.k")
    keep = [Keep((("q", ("b", "c")),), ((0, "k"),))]
    apart = {**fixed(star), "a": ("b", "d", "c"), "d": ("a", "b", "c")}
    plan = build_plan({"q": star}, streams("abcd"), {"q": apart}, tuple("abcd"), keep)
    # The order of d does: a, then both.
    (step,) = lookups(plan)
    assert step.key[0].slot in (0, 1)
    base = allocate(Layout(), {"q": Wanted(star, "q")}, streams("abcd"), keeps=keep)
    assert not lookups(plan_on(base, {"q": star}, {"q": apart}, tuple("abcd"), probes=frozenset()))


def test_explain_tells_who_feeds_a_mir_and_who_waits_for_its_rows() -> None:
    orders = {"q": {**fixed(CHAIN), "a": ("b", "c", "d")}, "p": fixed(OTHER)}
    plan = build_plan({**GRAPHS, "p": filtered("id < 3")}, streams("abcde"), orders, tuple("cdeab"), [KEEP])
    assert {len(feed.members) for node in plan.nodes() for feed in node.feeds} == {2}
    text = "\n".join(forest(plan))
    assert "row of b ⋈ c[0.k] for q, p" in text
    assert "wait for hop 2" in text
    assert "probe b ⋈ c[0.k], earlier and this epoch (new c only)" in text
    assert "exchange by c.k" in text
