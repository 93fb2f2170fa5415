"""TSC, the two-step conversion of paper 002: a tree of binary joins becomes one multi-way join.

Step 1 finds the group: every Join, Project and Filter from the root down to the streams is a member; anything else is
refused.  Step 2 dissolves the group into one `MultiwayJoin`: its inputs, the conjuncts of all its conditions, and its
outputs, each expression resolved down to columns of the inputs.  In goes Catalyst's optimised plan (a JVM object);
nothing of the binary tree's shape is left in what comes out, and the order of probing is chosen by others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plait.sql.expressions import Column, Node, column_node, conjuncts, read
from plait.sql.refusals import always_false, not_a_stream, refusal_of, refuse_join_type

STREAM_KEY = "plait.stream"
COLUMN_KEY = "plait.column"


@dataclass(frozen=True)
class Leaf:
    """An input: one occurrence of a stream.  `id` is the expression id of its first column."""

    id: int
    stream: str
    columns: tuple[Node, ...]


@dataclass(frozen=True)
class MultiwayJoin:
    """All that a tree of binary inner joins says: inputs, conditions that all hold, and outputs."""

    leaves: tuple[Leaf, ...]
    conjuncts: tuple[Node, ...]
    outputs: tuple[Node, ...]


def two_step_convert(plan: Any, order: dict[int, int], to_seq: Any) -> MultiwayJoin:
    """The multi-way join of an optimised plan; `order` ranks the inputs by the id of their first column."""
    group = list(multi_join_group(plan))
    return multi_join_node(plan, group, order, to_seq)


def multi_join_group(plan: Any) -> Iterator[tuple[str, Any]]:
    """Step 1: the members of the group and its inputs, children first."""
    name = str(plan.getClass().getSimpleName())
    if name == "Join" and plan.joinType().sql() not in ("INNER", "CROSS"):
        raise refuse_join_type(plan.joinType().sql())
    if name in ("Join", "Project", "Filter"):
        for child in items(plan.children()):
            yield from multi_join_group(child)
    elif name in ("LocalRelation", "EmptyRelation"):
        raise always_false()
    elif stream_of(plan) is None:
        raise refusal_of(name)
    yield name, plan


def multi_join_node(plan: Any, group: list[tuple[str, Any]], order: dict[int, int], to_seq: Any) -> MultiwayJoin:
    """Step 2: one node instead of the group."""
    known: dict[int, Node] = {}
    found: list[Node] = []
    inputs = [member for name, member in group if name not in ("Join", "Project", "Filter")]
    inputs.sort(key=lambda leaf: order.get(first_id(leaf), len(order)))
    leaves = tuple(_leaf(number, leaf, known, to_seq) for number, leaf in enumerate(inputs))
    for name, member in group:
        if name == "Project":
            for expression in items(member.projectList()):
                known[expression.exprId().id()] = read(expression, known, to_seq)
        elif name == "Filter":
            found += conjuncts(read(member.condition(), known, to_seq))
        elif name == "Join" and member.condition().isDefined():
            found += conjuncts(read(member.condition().get(), known, to_seq))
    return MultiwayJoin(leaves, tuple(found), tuple(read(attr, known, to_seq) for attr in items(plan.output())))


def _leaf(number: int, leaf: Any, known: dict[int, Node], to_seq: Any) -> Leaf:
    nil = to_seq([])
    columns = []
    for index, attribute in enumerate(items(leaf.output())):
        column = Column(number, index, str(attribute.metadata().getString(COLUMN_KEY)))
        columns.append(column_node(attribute, column, nil))
        known[attribute.exprId().id()] = columns[-1]
    return Leaf(first_id(leaf), str(stream_of(leaf)), tuple(columns))


def written_inputs(analysed: Any, known: list[str]) -> list[tuple[int, str]]:
    """(id, name) of every input of an analysed plan, left to right.

    An input's name is the outermost alias that covers it and nothing else: what the text around it calls it.
    """
    kind = str(analysed.getClass().getSimpleName())
    if kind == "LateralJoin":
        return written_inputs(analysed.left(), known) + written_inputs(analysed.right().plan(), known)
    children = list(items(analysed.children()))
    if not children:
        stream = stream_of(analysed)
        if stream is None:
            raise not_a_stream(kind, None, known)
        return [(first_id(analysed), stream)]
    if kind != "SubqueryAlias":
        return [found for child in children for found in written_inputs(child, known)]
    alias = str(analysed.alias())
    below = list(items(children[0].children())) if children[0].getClass().getSimpleName() == "View" else children
    if not list(items(below[0].children())) and stream_of(below[0]) is None:
        raise not_a_stream(below[0].getClass().getSimpleName(), alias, known)
    inputs = written_inputs(children[0], known)
    return [(inputs[0][0], alias)] if len(inputs) == 1 else inputs


def stream_of(leaf: Any) -> str | None:
    """The stream a leaf stands for, by the mark on its first column; None if it is some other table."""
    output = leaf.output()
    if not output.size() or not output.apply(0).metadata().contains(STREAM_KEY):
        return None
    return str(output.apply(0).metadata().getString(STREAM_KEY))


def first_id(leaf: Any) -> int:
    """The expression id of the first column; it tells two occurrences of one stream apart."""
    return int(leaf.output().apply(0).exprId().id())


def items(sequence: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    return (sequence.apply(i) for i in range(sequence.size()))
