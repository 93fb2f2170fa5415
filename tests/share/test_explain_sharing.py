"""What explain says of sharing, and of streams that are kept for ever, without Spark."""

from __future__ import annotations

from dataclasses import replace

from plait.config import Config
from plait.explain_sharing import Measured, kept_for_ever, savings
from plait.query.observed import EdgeCount
from plait.query.relation import Relation
from plait.share.planner import Planner
from tests.share.streams import joined, streams

GRAPHS = {"one": joined("a.k = b.k", "b.k = c.k"), "two": joined("a.k = b.k", "b.k = d.k")}


def test_a_probe_that_two_queries_share_is_one_and_two_alone() -> None:
    plan = Planner(GRAPHS, streams("abcd"), Config()).plan
    counts = {node.id: EdgeCount(lookups=10) for node in plan.nodes()}
    sizes = {store.id: (5, 100) for store in plan.stores}
    text = "\n".join(savings(plan, Measured(sizes, counts)))
    nodes = len(list(plan.nodes()))
    assert nodes < 12
    assert f"probes: {nodes} instead of 12; keys looked up in the last epoch: {10 * nodes} instead of 120" in text
    assert "stores of streams: 4 instead of 6; 20 rows in 400 bytes instead of 30 in 600" in text


def test_a_query_alone_saves_nothing_and_queries_apart_neither() -> None:
    assert list(savings(Planner({"one": GRAPHS["one"]}, streams("abc"), Config()).plan, Measured())) == []
    text = "\n".join(savings(Planner(GRAPHS, streams("abcd"), Config(sharing="independent")).plan, Measured()))
    assert "probes: 12 instead of 12\n" in text
    assert "stores of streams: 6 instead of 6" in text


def test_a_stream_kept_for_ever_is_named_with_the_query_and_the_stream_that_make_it_so() -> None:
    relations: dict[str, Relation] = streams("abcd")
    plan = Planner(GRAPHS, relations, Config()).plan
    (line,) = (line for line in kept_for_ever(plan, GRAPHS, relations) if line.startswith("  c "))
    assert line == "  c is kept for ever, because in one a, b, c have no watermark; a TTL of c would end it"
    ending = {name: replace(relation, ttl_us=1_000_000) for name, relation in relations.items()}
    assert list(kept_for_ever(Planner(GRAPHS, ending, Config()).plan, GRAPHS, ending)) == []


def test_with_watermarks_the_window_that_is_missing_is_named() -> None:
    timed = {n: replace(r, time_column=r.columns[0][0], delay_ms=0) for n, r in streams("abc").items()}
    graphs = {"one": GRAPHS["one"]}
    lines = list(kept_for_ever(Planner(graphs, timed, Config()).plan, graphs, timed))
    assert any("no window ends how much later than a rows of b, c may be" in line for line in lines)
