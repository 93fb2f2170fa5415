"""Plan → text, JSON or DOT: the join graph, stores and their attributes, probe orders, exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from plait.catalog.catalog import Catalog
from plait.errors import ConfigError
from plait.explain_forest import forest
from plait.explain_picture import picture
from plait.explain_sharing import Measured, kept_for_ever, savings
from plait.query.graph import JoinGraph
from plait.query.layout import relations_of
from plait.query.plan import Plan
from plait.query.progress import OptimiserReport
from plait.query.relation import Relation
from plait.query.store import UNTIL, Store
from plait.share.store_choice import left_out

if TYPE_CHECKING:
    from plait.sql.catalyst.read_query import ReadQuery

FORMATS = ("text", "json", "dot")


def explain(
    plan: Plan,
    graphs: Mapping[str, JoinGraph],
    relations: Mapping[str, Relation],
    format: str,
    optimiser: OptimiserReport | None = None,
    catalog: Catalog | None = None,
    measured: Measured | None = None,
) -> str:
    """What the engine will do, for people (`text`), programs (`json`) or Graphviz (`dot`).

    `optimiser` is the planner's report; the text shows what it has learnt, if anything, and what was `measured`.
    """
    if format == "json":
        return plan.to_json()
    if format == "dot":
        return "\n".join(picture(plan)) + "\n"
    if format != "text":
        raise ConfigError("EXPLAIN_FORMAT", f"there is no format {format!r}", f"use one of: {', '.join(FORMATS)}")
    lines = [*_text(plan, graphs, relations), *savings(plan, measured or Measured())]
    lines += [*_catalog_text(catalog), *_optimiser_text(optimiser)]
    return "\n".join(lines) + "\n"


def _text(plan: Plan, graphs: Mapping[str, JoinGraph], relations: Mapping[str, Relation]) -> Iterator[str]:
    yield f"Plan: {_many(len(plan.queries), 'query', 'queries')}, {_many(len(plan.stores), 'store')}, " + (
        f"{_many(plan.hops, 'exchange')} per epoch"
    )
    for name, graph in graphs.items():
        yield ""
        yield f"Query {name}"
        yield from _graph_text(graph)
        query = plan.query_by_name[name]
        if len(query.orders) > 1:
            yield "  probe orders"
        for alias, order in sorted(query.orders, key=lambda o: [a for a, _ in query.relations].index(o[0])):
            if order:
                yield f"    {alias} → {' → '.join(order)}"
    yield ""
    yield "Streams (lowest driver rank first)"
    for source in (plan.input_by_relation[name] for name in plan.ranks):
        relation = relations[source.relation]
        parts = [f"columns {', '.join(c.name for c in source.columns)}"]
        if relation.time_column:
            parts.append(f"event time {relation.time_column}, delay {(relation.delay_ms or 0) / 1000:g} s")
        if source.ttl_us is not None:
            unless = "" if source.needed is None else f" unless {source.needed}"
            parts.append(f"TTL {source.ttl_us / 1e6:g} s{unless}")
        yield f"  {source.relation}: {'; '.join(parts)}"
        for f in source.filters:
            if f.text is not None or len(source.filters) > 1:
                yield f"    filter{'' if len(source.filters) == 1 else f' {f.id}'}: {f.text or 'every row'}" + (
                    f", not late by the watermark of {_streams(f.marks)}"
                    if len({g.marks for g in source.filters}) > 1
                    else ""
                )
    yield ""
    yield "Stores"
    for store in plan.stores:
        yield f"  {store.id}: {_store_text(plan, store)}"
    there = {(store.relation, store.key.columns) for store in plan.stores}
    for left in dict.fromkeys(one for graph in graphs.values() for one in left_out(graph)):
        if (left.relation, left.key) not in there:
            key, other = (", ".join(c.removeprefix("=") for c in columns) for columns in (left.key, left.instead))
            how = (
                "is searched, in every task and with an index of its merged rows: that costs less"
                if left.searched
                else "stands for it, behind what brings the rest"
            )
            yield f"  no {left.relation}[{key}]: {left.relation}[{other}] {how}"
    yield from kept_for_ever(plan, graphs, relations)
    yield ""
    yield "Probe trees"
    yield from forest(plan)


def _streams(marks: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(mark.partition(":")[0] for mark in marks)) or "nobody"


def _catalog_text(catalog: Catalog | None) -> Iterator[str]:
    """What differs from a checkpoint whose queries were all there from the beginning."""
    if catalog is None:
        return
    late = [q for q in catalog.queries.values() if q.admitted or q.status != "live"]
    if late:
        yield ""
        yield f"Queries that came later (catalog version {catalog.version})"
    for query in late:
        live = "waits for a store" if query.live_since is None else f"live since epoch {query.live_since}"
        floors = [f"{a} from epoch {f} on" for of in query.floors.values() for a, f in of.items()]
        yield f"  {query.name} (since={query.since}): {live}; sees rows of {', '.join(floors)}"
    for build in catalog.layout.builds:
        yield f"  building {build.store} from {build.source}: rows that arrived before epoch {build.before}"


def _optimiser_text(report: OptimiserReport | None) -> Iterator[str]:
    """Estimates against actuals, and the history of switches.  Nothing before the first period has ended."""
    if report is None or not report.estimates:
        return
    yield ""
    yield f"Optimiser ({report.orderer}, drivers by {report.policy})"
    yield f"  {report.said}"
    yield "  estimates for the next period (counted in the last)"
    for e in report.estimates:
        counted = "not probed so far"
        if e.gamma_counted is not None and e.mu_counted is not None:
            counted = f"{e.gamma_counted:.3f}, {e.mu_counted:.2f}"
        yield (
            f"    {e.query}.{e.driver} probes {e.target}: success {e.gamma:.3f}, "
            f"rows per success {e.mu:.2f} ({counted})"
        )
    prices = report.coefficients
    yield (
        f"  measured: {prices['alpha_q']:.1f} ns per run looked into, {prices['alpha_m']:.1f} ns per tuple, "
        f"{prices['alpha_x']:.1f} ns per tuple that travels"
    )
    yield "  switches" if report.switches else "  no order was switched"
    for switch in report.switches:
        yield f"    {switch}"


def explain_stages(name: str, query: ReadQuery) -> str:
    """How the plan of a query was converted (TSC), and how its answer is kept up to date."""
    lines = [f"Query {name}", "", "Plan before", *_indented(query.stages.before)]
    lines += ["", "Plan after: trees of binary joins as multi-way joins", *_indented(query.stages.after)]
    if query.stages.left_binary:
        lines += ["", "Joins left binary", *(f"  {why}" for why in query.stages.left_binary)]
    lines += ["", "Kept from epoch to epoch"]
    if query.residual is None:
        lines.append("  joined rows are the answer (append)")
    for source in () if query.residual is None else query.residual.sources:
        assert source.graph is not None
        what = f"{source.name}: {' ⋈ '.join(a.name for a in source.graph.aliases)}"
        if source.maintained is None:
            lines.append(f"  {what}, its rows")
        else:
            where = "by Spark" if source.graph.grouping is None else "by the join's tasks"
            lines.append(f"  {what}, as an aggregate that is maintained incrementally: rows are grouped {where}")
    if query.residual is not None:
        lines += ["", f"Recomputed for every answer ({' or '.join(query.residual.modes)})"]
        lines += [f"  {note}" for note in dict.fromkeys(query.residual.notes)] or ["  only what is above"]
    return "\n".join(lines) + "\n"


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _many(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _graph_text(graph: JoinGraph) -> Iterator[str]:
    for alias in graph.aliases:
        yield f"  {alias.name}" + (f" = {alias.relation}" if alias.relation != alias.name else "")
    for attribute in graph.attributes:
        yield f"  join on {' = '.join(map(str, attribute))}"
    for window in graph.windows:
        yield f"  window {window}"
    for condition in graph.conditions:
        yield f"  condition {condition.sql}" + ("" if condition.expr is not None else "  (evaluated by Spark)")
    for output in graph.outputs:
        source = str(output.source) if output.source is not None else f"{output.sql}  ({_evaluated_by(graph)})"
        yield f"  output {output.name}: {source}"


def _evaluated_by(graph: JoinGraph) -> str:
    return "computed by the join's tasks" if graph.computes_outputs else "evaluated by Spark"


def _store_text(plan: Plan, store: Store) -> str:
    kept = "kept for ever" if store.keep_us is None else f"kept {store.keep_us / 1e6:g} s past its event time"
    if store.mir is not None and store.mir.until:
        kept = "kept until the first of its rows cannot be reached any more"
    if store.ttl_us is not None:
        kept += f", at most {store.ttl_us / 1e6:g} s"
        inputs = [plan.input_by_relation[name] for name in relations_of(store)]
        kept += "" if all(source.needed is None for source in inputs) else " unless needed"
    columns = ", ".join(c.name for c in store.columns if c.name != UNTIL) or "no columns"
    key = "hash is key" if store.key.exact else "key compared"
    return f"partitioned by {store.key} ({key}); {columns}; {kept}"
