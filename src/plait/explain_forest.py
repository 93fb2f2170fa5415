"""The forest of probe trees as text: which steps are shared by which queries, in the words of those queries.

A step that several queries share is told in the words of the first of them; what only some of them see or check names
those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.query.durations import duration_text
from plait.query.expr import ColumnRef, replaced
from plait.query.layout import shown
from plait.query.plan import Emit, Feed, Node, Plan, ProbeTree, Seen, SlotColumn, Span

Names = Sequence[tuple[str, ...]]
"""By slot the aliases there: several where a MIR was looked up."""

MOST_NAMED = 4
"""Queries that are named; of more, the number is told."""


def forest(plan: Plan) -> Iterator[str]:
    """All trees, lowest driver rank first."""
    for tree in plan.trees:
        yield from _Told(plan, tree).lines()


@dataclass(frozen=True)
class _Told:
    """A tree, while it is told."""

    plan: Plan
    tree: ProbeTree

    def lines(self) -> Iterator[str]:
        tree = self.tree
        everyone = (1 << len(tree.members)) - 1
        alone, *lines = self._seen(tree.seen, everyone)
        if tree.replays is not None:
            yield f"  rows at rest in {tree.replays.store}, once{alone}{self._for(everyone)}"
        else:
            edge = next(e for i in self.plan.inputs for e in i.edges if e.id == tree.edge)
            by = f"exchange by {edge.key}" if edge.key.columns else "spread over the tasks"
            yield f"  new {tree.relation} ⇒ {by} (edge {tree.edge}{alone}){self._for(everyone)}"
        yield from (f"    {line}" for line in lines)
        yield from (f"    {line}" for line in self._results(tree.emits))
        for node in tree.nodes:
            yield from self._node(node, 1, 2, everyone)

    def _node(self, node: Node, hop: int, depth: int, above: int) -> Iterator[str]:
        step = node.step
        pad = "  " * depth
        names = self._names(node)
        if step.by is not None:
            carried = ", ".join(_column(c, names) for c in step.key)
            yield f"{pad}⇒ to every task, with {carried} (edge {node.id})"
        elif step.hop != hop and step.stays:
            yield f"{pad}⇒ wait for hop {step.hop} (edge {node.id})"
        elif step.hop != hop:
            carried = ", ".join(_column(c, names) for c in step.key)
            yield f"{pad}⇒ exchange by {carried} (edge {node.id})"
        epochs = "earlier and this epoch" if step.sees_current else "earlier epochs"
        if step.below:
            held = [name for i, name in enumerate(names[self._slot(node)]) if step.below >> i & 1]
            epochs += f" (new {', '.join(held)} only)" if len(held) < len(names[self._slot(node)]) else ""
        alone, *lines = self._seen(step.seen, node.members)
        how = "probe" if step.by is None else f"search by {', '.join(step.by.columns)} in"
        yield f"{pad}{how} {step.store}, {epochs}{alone}{self._for(node.members) if node.members != above else ''}"
        yield from (f"{pad}  {line}" for line in lines)
        for check in step.checks:
            condition = replaced(check.condition, lambda ref: _renamed(ref, names))
            only = "" if check.members is None else self._for(check.members)
            yield f"{pad}  check {condition}{only}"
        for span in step.spans:
            for lower, upper, members in span.bounds:
                only = self._for(members) if members != node.members else ""
                yield f"{pad}  check {self._window(span, lower, upper, names)}{only}"
        yield from (f"{pad}  {line}" for line in self._results(node.emits))
        yield from (f"{pad}  {line}" for line in self._kept(node.feeds))
        for child in node.children:
            yield from self._node(child, step.hop, depth + 1, node.members)

    def _seen(self, seen: Sequence[Seen], members: int) -> list[str]:
        """What follows the step where all see the same, or nothing and a line for each difference."""
        told = [(_rows(one), one.members) for one in seen]
        if len(told) == 1 and told[0][1] == members:
            return [f", {told[0][0]}" if told[0][0] else ""]
        return ["", *(f"sees {text or 'every row'}{self._for(mine)}" for text, mine in told)]

    def _results(self, emits: Sequence[Emit]) -> Iterator[str]:
        if len(emits) <= MOST_NAMED:
            yield from (f"result of {emit.query}" for emit in emits)
        else:
            yield f"results of {named([emit.query for emit in emits])}"

    def _kept(self, feeds: Sequence[Feed]) -> Iterator[str]:
        for feed in feeds:
            queries = [shown(self.tree.members[member][0]) for member, _ in feed.members]
            yield f"row of {feed.store} for {named(list(dict.fromkeys(queries)))} (edge {feed.id})"

    def _slot(self, node: Node) -> int:
        """The slot that a node adds."""
        return next(depth for top in self.tree.nodes for depth, found in _depths(top, 1) if found is node)

    def _for(self, members: int) -> str:
        """The queries of a set, where the tree is shared at all."""
        if len({query for query, _ in self.tree.members}) == 1:
            return ""
        queries = [shown(query) for i, (query, _) in enumerate(self.tree.members) if members >> i & 1]
        return f", for {named(list(dict.fromkeys(queries)))}"

    def _names(self, node: Node) -> Names:
        """What the first query that goes through a node calls what is in the slots there."""
        return self.tree.paths[(node.members & -node.members).bit_length() - 1]

    def _window(self, span: Span, lower: int | None, upper: int | None, names: Names) -> str:
        left, right = _column(span.left, names), _column(span.right, names)
        if lower is not None and upper is not None:
            return f"{left} BETWEEN {_moved(right, lower)} AND {_moved(right, upper)}"
        if lower is not None:
            return f"{left} >= {_moved(right, lower)}"
        assert upper is not None
        return f"{left} <= {_moved(right, upper)}"


def _depths(node: Node, slot: int) -> Iterator[tuple[int, Node]]:
    yield slot, node
    for child in node.children:
        yield from _depths(child, slot + 1)


def _column(ref: SlotColumn, names: Names) -> str:
    member, column = 0, ref.column
    if len(names[ref.slot]) > 1:
        number, _, column = column.partition(".")
        member = int(number)
    return f"{names[ref.slot][member]}.{column.removeprefix('=')}"


def _renamed(ref: ColumnRef, names: Names) -> ColumnRef:
    alias, _, column = _column(SlotColumn(int(ref.alias), ref.column), names).partition(".")
    return ColumnRef(alias, column, ref.type)


def _moved(column: str, by_us: int) -> str:
    return column if not by_us else f"{column} {'-' if by_us < 0 else '+'} {duration_text(abs(by_us))}"


def _rows(seen: Seen) -> str:
    parts = [] if seen.filter is None else [f"filter {seen.filter}"]
    parts += [] if seen.floor is None else [f"from epoch {seen.floor} on"]
    return ", ".join(parts)


def named(queries: Sequence[str]) -> str:
    """Queries by name; of many, the first and how many more."""
    if len(queries) <= MOST_NAMED:
        return ", ".join(queries)
    return f"{', '.join(queries[: MOST_NAMED - 1])} and {len(queries) - MOST_NAMED + 1} more"
