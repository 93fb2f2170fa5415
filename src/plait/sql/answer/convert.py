"""A converted plan becomes sources for the engine and a recipe for Spark.

What is maintained, and what is made anew for every answer:

    a multi-way join of streams              maintained, by the engine's join
    an aggregate right above one, or above   maintained: partial rows per epoch (`maintain.py`), if its functions allow
      a single stream
    the same above semi and anti joins       maintained, if these look at nothing but the aggregate's groups
    everything else                          recomputed by Spark over what is maintained
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from plait.query.expr import Call, ColumnRef
from plait.query.semi_join import OTHER, OWN, Partners, key_of
from plait.query.types import has_plain_equality
from plait.sql.answer.group_filter import among, having
from plait.sql.answer.residual import Asked, Operator, Recipe, Rows, Source, Split
from plait.sql.catalyst.expressions import Column, Node, conjuncts
from plait.sql.catalyst.handles import (
    attribute_id,
    canonical_text,
    input_of,
    is_same_plan,
    join_type,
    line_of,
    output_columns,
    output_of,
    read_ids,
    reads_attributes,
    type_of,
)
from plait.sql.catalyst.logical import WITH_SUBQUERIES, Logical, Rewrite
from plait.sql.catalyst.maintain import Maintained, maintained
from plait.sql.catalyst.refusals import not_a_stream, refused_subquery
from plait.sql.join.multiway import (
    CONSTANT,
    MULTI_JOIN,
    Known,
    Leaf,
    MultiwayJoin,
    PlanNode,
    Question,
    connected_streams,
    leaf_of,
    multiway_join,
)
from plait.sql.join.task_expressions import Translator

_IDS = re.compile(r"#\d+L?")


@dataclass
class Converter:
    """Takes a converted plan apart, root first."""

    name: str
    logical: Logical
    order: dict[int, int]
    known: list[str]
    sources: list[Source] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _made: list[tuple[Callable[[], Any], tuple[int, ...], Source]] = field(default_factory=list)
    """Parts of the plan, which of their columns are kept, and as what."""
    _read: dict[int, MultiwayJoin] = field(default_factory=dict)

    def recipe(self, node: PlanNode, needed: frozenset[int] | None = None) -> Recipe:
        """How the rows of a node are made; `needed` are the columns that are read of them, None if all are."""
        if node.kind == "Aggregate" and not node.subqueries and (kept := self._maintained(node)) is not None:
            return kept
        if node.kind == MULTI_JOIN:
            join = self._join(node)
            return self._rows(node, join, needed) if join.is_whole else self._split(node, join)
        if node.stream is not None:
            return self._rows(node, scan(node, self.logical.to_seq), needed)
        if not node.inputs and node.kind not in CONSTANT:
            raise not_a_stream(node.kind, None, self.known)
        if node.subqueries and node.kind not in WITH_SUBQUERIES:
            raise refused_subquery(node.kind, said(node))
        read = needed_below(node, needed)
        inputs = tuple(self.recipe(below, read) for below in node.inputs)
        if node.kind == "Filter" and isinstance(inputs[0], Rows):
            inputs = (having(inputs[0], node.mirror.expressions[0][1], self.logical.to_seq),)
        return Operator(node.jvm, inputs, tuple(self.recipe(below) for below in node.subqueries))

    def _join(self, node: PlanNode) -> MultiwayJoin:
        """What a multi-way join says; read once, since reading costs."""
        if id(node) not in self._read:
            self._read[id(node)] = multiway_join(node, self.order, self.logical.to_seq)
        return self._read[id(node)]

    def _maintained(self, node: PlanNode) -> Rows | None:
        (below,) = node.inputs
        if below.kind == MULTI_JOIN:
            join = self._join(below)
        elif below.stream is not None:
            join = scan(below, self.logical.to_seq)
        else:
            self.notes.append(f"{said(node)} is recomputed: below it is {below.kind}")
            return None
        if any(leaf.stream is None for leaf in join.leaves):
            self.notes.append(f"{said(node)} is recomputed: not all inputs of the join below it are streams")
            return None
        found = maintained(node.jvm, self.logical)
        if isinstance(found, str):
            self.notes.append(f"{said(node)} is recomputed: {found}")
            return None
        questions = self._asked_of_groups(found, below, join) if join.questions else ()
        if questions is None:
            self.notes.append(f"{said(node)} is recomputed: a semi or anti join below it looks at more than its groups")
            return None
        join = replace(join, questions=())
        # Two uses of an aggregate may differ in what is made of its values: what is kept of it is the same.
        source = self._source(lambda: found.partial(input_of(node.jvm)), (), join, found)
        return Rows(source, output_of(node.jvm), found, questions, among(questions))

    def _asked_of_groups(self, found: Maintained, below: PlanNode, join: MultiwayJoin) -> tuple[Asked, ...] | None:
        """Questions about rows as questions about groups, if all that they look at is the same in all rows of a group.

        Then all rows of a group have a partner, or none has, and it does not matter when that is asked.
        """
        outputs = dict(zip((id for id, _, _ in below.mirror.output), join.outputs, strict=True))
        columns: dict[Column, Any] = {}
        for grouping, slot in zip(found.groupings, found.slots, strict=False):
            id = attribute_id(grouping)
            if id is not None and has_plain_equality(type_of(slot)):
                column = outputs[id].column
                if column is not None:
                    columns.update(dict.fromkeys(equal_columns(join, column), slot))
        looked_at = {c for question in join.questions if question.condition for c in question.condition.columns}
        if not found.groupings or not looked_at <= columns.keys():
            return None
        slots = {join.leaves[c.leaf].columns.ids[c.index]: slot for c, slot in columns.items()}

        def of_group(expression: Any) -> Any:
            id = attribute_id(expression)
            return None if id is None else slots.get(id)

        # Spark asks about both sides of an equality: about a group that is one question.
        asked: dict[str, Question] = {}
        for question in join.questions:
            condition = None if question.condition is None else self.logical.rewritten(question.condition.jvm, of_group)
            groups = found.partial(below.jvm)
            whole = self.logical.join_like(question.join, groups, question.right.jvm, condition)
            asked.setdefault(canonical_text(whole), question)
        return tuple(self._asked(question, of_group) for question in asked.values())

    def _asked(self, question: Question, rewrite: Rewrite, left: Rows | None = None) -> Asked:
        """A question with other columns on its left; `left` are the rows that it is asked about, as they are kept."""
        kind = join_type(question.join).lower()
        self.notes.append(f"a {kind} join is recomputed: rows on its right may still come")
        condition = question.condition
        conditions = () if condition is None else tuple(conjuncts(condition))
        equal = []
        for conjunct in conditions:
            sides = conjunct.args
            if conjunct.name == "EqualTo" and bool(sides[0].leaves) != bool(sides[1].leaves):
                mine, theirs = sides if sides[0].leaves else (sides[1], sides[0])
                if reads_attributes(theirs.jvm) and not any(n.column is None and not n.args for n in mine.walk()):
                    equal.append((self.logical.rewritten(mine.jvm, rewrite), theirs.jvm))
        stated = None if condition is None else self.logical.rewritten(condition.jvm, rewrite)
        right = self.recipe(question.right)
        partners = None if left is None else _partners(left, right, conditions, wanted=kind == "left semi")
        return Asked(question.join, stated, right, tuple(equal), partners)

    def _rows(self, node: PlanNode, join: MultiwayJoin, needed: frozenset[int] | None) -> Rows:
        """Rows that are kept, without the columns that nobody reads."""
        ids = [id for id, _, _ in node.mirror.output]
        columns = tuple(i for i, id in enumerate(ids) if needed is None or id in needed)
        join = replace(join, outputs=tuple(join.outputs[i] for i in columns))
        source = self._source(lambda: node.jvm, columns, join, None)
        return Rows(source, output_columns(node.jvm, columns), None)

    def _source(
        self, plan: Callable[[], Any], columns: tuple[int, ...], join: MultiwayJoin, kept: Maintained | None
    ) -> Source:
        """A source for this part of the plan; one that is there already for an equal part serves both."""
        for other, others_columns, source in self._made:
            if others_columns == columns and is_same_plan(other(), plan()):
                return source
        self._made.append((plan, columns, self._new(join, kept)))
        return self.sources[-1]

    def _split(self, node: PlanNode, join: MultiwayJoin) -> Split:
        """Streams that equalities connect are joined by the engine; the rest of the join is Spark's."""
        others = [leaf for leaf in join.leaves if leaf.stream is None]
        if others:
            kinds = ", ".join(dict.fromkeys(leaf.node.kind for leaf in others))
            self.notes.append(f"a join is recomputed: not a stream, but {kinds} is one of its inputs")
        parts = connected_streams(join)
        rest = [n for n in join.conjuncts if not any(_is_over(n, part) for part in parts)]
        inputs: list[Recipe] = [self._piece(node, [join.leaves[i] for i in sorted(part)]) for part in parts]
        inputs += [self.recipe(leaf.node) for leaf in others]
        only = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Rows) else None
        questions = tuple(self._asked(question, lambda _: None, only) for question in join.questions)
        outputs = tuple(zip((n.jvm for n in join.outputs), output_of(node.jvm), strict=True))
        return Split(tuple(inputs), tuple(n.jvm for n in rest), questions, outputs)

    def _piece(self, node: PlanNode, leaves: list[Leaf]) -> Rows:
        """The join of some of the streams, with the columns that the rest of the join reads."""
        # Read once more, with these streams numbered first: a graph knows no others.
        join = multiway_join(node, {leaf.id: i for i, leaf in enumerate(leaves)}, self.logical.to_seq)
        part = frozenset(range(len(leaves)))
        own = tuple(n for n in join.conjuncts if _is_over(n, part))
        wanted = [*join.outputs, *(q.condition for q in join.questions), *(n for n in join.conjuncts if n not in own)]
        columns = dict.fromkeys(c for n in wanted if n is not None for c in n.columns if c.leaf in part)
        outputs = tuple(join.leaves[c.leaf].columns[c.index] for c in columns)
        source = self._new(MultiwayJoin(join.leaves[: len(leaves)], own, (), outputs), None)
        return Rows(source, tuple(output.jvm for output in outputs), None)

    def _new(self, join: MultiwayJoin, kept: Maintained | None) -> Source:
        if not join.outputs:
            # Rows without columns cannot be counted in a file.
            join = replace(join, outputs=join.leaves[0].columns[:1])
        self.sources.append(Source(f"{self.name}.{len(self.sources) + 1}", join, kept))
        return self.sources[-1]


def _partners(left: Rows, right: Recipe, conditions: tuple[Node, ...], wanted: bool) -> Partners | None:
    """A question as one about kept rows, on both sides; None if they are not kept, or it needs Spark."""
    if not isinstance(right, Rows) or right.maintained is not None:
        return None
    sides = {OWN: left, OTHER: right}

    def column(node: Node) -> ColumnRef | None:
        return next((ref for side, rows in sides.items() if (ref := rows.column(node.jvm, side))), None)

    translate = Translator(column)
    told = [expression for expression in map(translate, conditions) if expression is not None]
    keys = [(place, key) for place, expression in enumerate(told) if (key := key_of(expression)) is not None]
    if not keys or len(told) < len(conditions):
        return None
    first, key = keys[0]
    rest = [expression for place, expression in enumerate(told) if place != first]
    both = reduce(lambda a, b: Call("and", (a, b), "boolean"), rest) if rest else None
    return Partners(right.source.name, key, both, wanted)


def equal_columns(join: MultiwayJoin, column: Column) -> set[Column]:
    """The columns that the join makes equal to one, and itself."""
    sides = [[side.column for side in node.args] for node in join.conjuncts if node.name == "EqualTo"]
    pairs = [{one, other} for one, other in sides if one is not None and other is not None]
    found = {column}
    while more := [pair for pair in pairs if pair & found and not pair <= found]:
        found = found.union(*more)
    return found


def scan(node: PlanNode, to_seq: Any) -> MultiwayJoin:
    """A stream by itself, as a join of one."""
    leaf = leaf_of(0, node, node, Known(), to_seq)
    return MultiwayJoin((leaf,), (), (), tuple(leaf.columns))


def needed_below(node: PlanNode, needed: frozenset[int] | None) -> frozenset[int] | None:
    """The columns that an operator reads of its input, by id; None if it may be all."""
    if node.kind in ("Project", "Aggregate"):
        return read_ids(node.jvm)
    if node.kind == "Filter" and needed is not None:
        return needed | read_ids(node.jvm)
    return None


def _is_over(condition: Node, part: frozenset[int]) -> bool:
    return bool(condition.leaves) and condition.leaves <= part


def left_binary(root: PlanNode) -> Iterator[str]:
    """Why joins of the converted plan are not part of a multi-way join."""
    for node in root.walk():
        if node.kind == "Join" and (why := node.why_not_member) is not None:
            yield f"{said(node)}: {why}"
        elif node.kind == "Join":
            yield f"{said(node)}: it asks whether rows have a partner, and nothing above it is a multi-way join"


def said(node: PlanNode) -> str:
    """An operator in a line, without expression ids."""
    return _IDS.sub("", line_of(node.jvm))


def drawn(node: PlanNode, depth: int = 0) -> Iterator[str]:
    """The converted plan as an indented tree."""
    pad = "   " * depth + ("+- " if depth else "")
    if node.kind == MULTI_JOIN:
        assert node.group is not None
        questions = [m for m in node.group.members if m.join_type is not None and m.join_type.startswith("LEFT")]
        streams = [
            below.stream or "…"
            for below in node.inputs
            if all(below.mirror is not q.inputs[1].mirror for q in questions)
        ]
        asked = "".join(f", then {str(q.join_type).lower()} join" for q in reversed(questions))
        yield f"{pad}{'Scan' if len(streams) == 1 else MULTI_JOIN} [{', '.join(streams)}]{asked}"
    elif node.stream is not None:
        yield f"{pad}Scan [{node.stream}]"
    else:
        yield pad + said(node)
    for below in node.subqueries:
        yield "   " * (depth + 1) + "sub-query"
        yield from drawn(below, depth + 2)
    for below in node.inputs:
        if node.kind != MULTI_JOIN or below.stream is None:
            yield from drawn(below, depth + 1)
