"""TSC, the Two-Step Convert of paper 002: the trees of binary joins in a plan become multi-way joins.

    two_step_convert               Algorithm 1
      create_multi_join_groups     step 1, Algorithm 2: breadth first, a node joins the group its outputs are in
      get_multi_join_node          step 2, Algorithm 3: a group becomes one node, with its members' outside inputs

A group's members are inner joins and the projections and filters between them and above their inputs.  Semi and anti
joins only ask a question about each row that passes, so a group goes on through their left side; the question is put
off until the group's inputs are joined.  Anything else (outer joins, aggregates, unions, limits, expressions that are
not deterministic or hold a sub-query) ends a group and stays as it is around it.  The plan of a sub-query is converted
like the plan itself.

In goes Catalyst's optimised plan, mirrored by `PlanNode`s; nothing of the binary tree's shape is left inside a node
that comes out, and the order of probing is chosen by others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from plait.sql.catalyst.expressions import Column, Node, column_node, conjuncts, live, resolve
from plait.sql.catalyst.handles import has_deterministic_expressions, is_deterministic, output_columns
from plait.sql.catalyst.plan_reader import MirroredPlan, PlanMirror
from plait.sql.catalyst.refusals import not_a_stream

MULTI_JOIN = "MultiJoin"
CONSTANT = ("LocalRelation", "OneRowRelation", "Range", "EmptyRelation")
"""Leaves whose rows the plan itself knows."""
_INNER = ("INNER", "CROSS")
_ASKING = ("LEFT SEMI", "LEFT ANTI")


@dataclass(eq=False)
class PlanNode:
    """A node of the execution plan: its Catalyst operator, what it reads, and what reads it."""

    mirror: PlanMirror
    kind: str
    inputs: list[PlanNode]
    subqueries: list[PlanNode]
    """The plans of scalar sub-queries in its expressions."""
    outputs: list[PlanNode] = field(default_factory=list)
    group: MultiJoinGroup | None = None
    deterministic: bool = False
    """Whether it certainly is, with all below it."""

    @staticmethod
    def of(plan: MirroredPlan) -> PlanNode:
        """The nodes of a plan."""
        return PlanNode._of(plan.root, plan.deterministic)

    @staticmethod
    def _of(mirror: PlanMirror, deterministic: bool) -> PlanNode:
        # Spark's word covers all below: only below what is not deterministic it is asked again.
        deterministic = deterministic or is_deterministic(mirror.jvm)
        inputs = [PlanNode._of(child, deterministic) for child in mirror.children]
        subqueries = [PlanNode._of(plan, deterministic) for plan in mirror.subqueries]
        node = PlanNode(mirror, mirror.kind, inputs, subqueries, deterministic=deterministic)
        for below in inputs:
            below.outputs.append(node)
        return node

    @property
    def jvm(self) -> Any:
        """The operator itself, as the JVM has it."""
        return self.mirror.jvm

    @property
    def join_type(self) -> str | None:
        """`INNER`, `LEFT OUTER` …; None if it is no join."""
        return self.mirror.join_type if self.kind == "Join" else None

    @property
    def stream(self) -> str | None:
        """The stream it stands for, if it is one."""
        # Rows that the optimiser has proved away carry the stream's marks still: a relation without rows.
        return None if self.inputs or self.kind in CONSTANT else self.mirror.stream

    @cached_property
    def why_not_member(self) -> str | None:
        """What keeps it out of any group; None if nothing does."""
        if self.kind not in ("Join", "Project", "Filter"):
            return f"{self.kind} is no join"
        if self.join_type not in (None, *_INNER, *_ASKING):
            return f"{_a(str(self.join_type).lower())} join keeps rows without a partner"
        if self.subqueries:
            return "its condition holds a sub-query"
        if not self.deterministic and not has_deterministic_expressions(self.jvm):
            return "its condition is not deterministic"
        return None

    def walk(self) -> Iterator[PlanNode]:
        """This node and all below it, those of sub-queries included."""
        yield self
        for below in (*self.subqueries, *self.inputs):
            yield from below.walk()


@dataclass(eq=False)
class MultiJoinGroup:
    """Nodes that together are one multi-way join; `root` is the one whose rows leave it."""

    root: PlanNode
    members: list[PlanNode] = field(default_factory=list)

    @property
    def inputs(self) -> list[PlanNode]:
        """What the members read that is not a member."""
        return [below for member in self.members for below in member.inputs if below.group is not self]


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def two_step_convert(root: PlanNode) -> PlanNode:
    """Algorithm 1: the plan with multi-way joins in place of its trees of binary joins."""
    create_multi_join_groups(root)
    return get_multi_join_node(root, {})


def create_multi_join_groups(root: PlanNode) -> None:
    """Algorithm 2: every node that can be a member joins its outputs' group, or founds one."""
    for node in get_ordered_nodes(root):
        if not can_be_multi_join_group_member(node):
            continue
        group = can_be_in_same_group_without_outputs(node)
        if group is None:
            if node.join_type in _ASKING:
                continue
            group = MultiJoinGroup(node)
        group.members.append(node)
        node.group = group


def get_ordered_nodes(root: PlanNode) -> list[PlanNode]:
    """All nodes, breadth first: outputs before what they read."""
    found, waiting = [], deque([root])
    while waiting:
        node = waiting.popleft()
        found.append(node)
        waiting.extend([*node.inputs, *node.subqueries])
    return found


def can_be_multi_join_group_member(node: PlanNode) -> bool:
    """The pattern: joins of rows that both sides must have, and what only passes rows of such a tree on."""
    return node.why_not_member is None and _ends_in_joins_or_streams(node)


def _ends_in_joins_or_streams(node: PlanNode) -> bool:
    """Whether a chain of projections, filters and questions leads to an inner join or to a stream."""
    while node.join_type not in _INNER and node.stream is None:
        if node.why_not_member is not None:
            return False
        node = node.inputs[0]
    return node.stream is not None or node.why_not_member is None


def can_be_in_same_group_without_outputs(node: PlanNode) -> MultiJoinGroup | None:
    """The group that all outputs of a node are in; a question's right side is never in the group."""
    groups = {output.group for output in node.outputs}
    if len(groups) != 1 or any(o.join_type in _ASKING and o.inputs[1] is node for o in node.outputs):
        return None
    return groups.pop()


def get_multi_join_node(node: PlanNode, done: dict[int, PlanNode]) -> PlanNode:
    """Algorithm 3: the node as it is in the new plan; `done` are those converted already."""
    if id(node) not in done:
        if node.group is not None and node.group.root is node:
            done[id(node)] = create_multi_join_node_by_group(node.group, done)
        else:
            inputs = [get_multi_join_node(below, done) for below in node.inputs]
            subqueries = [get_multi_join_node(below, done) for below in node.subqueries]
            done[id(node)] = PlanNode(node.mirror, node.kind, inputs, subqueries, deterministic=node.deterministic)
    return done[id(node)]


def create_multi_join_node_by_group(group: MultiJoinGroup, done: dict[int, PlanNode]) -> PlanNode:
    """One node for a group."""
    inputs = [get_multi_join_node(below, done) for below in group.inputs]
    return PlanNode(group.root.mirror, MULTI_JOIN, inputs, [], group=group)


@dataclass(frozen=True, eq=False)
class Columns(Sequence[Node]):
    """The columns of an input."""

    leaf: int
    plan: PlanMirror
    to_seq: Any
    """Makes Scala sequences; None leaves the columns' names as they are, for the right side of a question."""
    _made: dict[int, Node] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the columns are called."""
        return tuple(name for _, name, _ in self.plan.output)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Their expression ids."""
        return tuple(id for id, _, _ in self.plan.output)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not 0 <= index < len(self.plan.output):
            raise IndexError(index)
        if index not in self._made:
            self._made[index] = self._node(index)
        return self._made[index]

    def _node(self, index: int) -> Node:
        _, name, kind = self.plan.output[index]

        def attribute() -> Any:
            return output_columns(self.plan.jvm, [index])[0]

        if self.to_seq is None:
            return live(attribute())
        column = Column(self.leaf, index, name)
        return column_node(attribute, column, kind, self.to_seq)

    def __len__(self) -> int:
        return len(self.plan.output)

    def __iter__(self) -> Iterator[Node]:
        return (self[index] for index in range(len(self)))


class Known(dict[int, Node]):
    """What attributes stand for, by expression id; those of inputs are made when they are first met."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, tuple[Columns, int]] = {}

    def add(self, columns: Columns) -> None:
        """One more input."""
        self.inputs.update({id: (columns, index) for index, id in enumerate(columns.ids)})

    def __missing__(self, id: int) -> Node:
        columns, index = self.inputs[id]
        self[id] = columns[index]
        return self[id]


@dataclass(frozen=True, eq=False)
class Leaf:
    """An input: one occurrence of a stream, or (`stream` is None) the rows of another part of the plan."""

    id: int
    """The expression id of its first column."""
    stream: str | None
    columns: Columns
    node: PlanNode

    @property
    def relation(self) -> str:
        """The stream, of an input that is one."""
        assert self.stream is not None, "the engine joins streams only"
        return self.stream


@dataclass(frozen=True, eq=False)
class Question:
    """A semi or anti join that was put off: which rows of `right` are asked for, by which condition."""

    join: Any
    """The join as Catalyst has it."""
    condition: Node | None
    right: PlanNode


@dataclass(frozen=True, eq=False)
class MultiwayJoin:
    """All that a group says: inputs, conditions that all hold, questions asked afterwards, outputs."""

    leaves: tuple[Leaf, ...]
    conjuncts: tuple[Node, ...]
    questions: tuple[Question, ...]
    outputs: tuple[Node, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it joins nothing but streams, and asks nothing."""
        return not self.questions and all(leaf.stream is not None for leaf in self.leaves)


def multiway_join(node: PlanNode, order: dict[int, int], to_seq: Any) -> MultiwayJoin:
    """What a converted node says, its expressions resolved down to columns of its inputs.

    `order` ranks the inputs by the id of their first column.
    """
    group = node.group
    assert group is not None
    converted = dict(zip(map(id, group.inputs), node.inputs, strict=True))
    asked = {id(m.inputs[1]): m for m in group.members if m.join_type in _ASKING}
    joined = [below for below in group.inputs if id(below) not in asked]
    joined.sort(key=lambda below: order.get(below.mirror.first_id, len(order)))
    known = Known()
    leaves = tuple(leaf_of(number, below, converted[id(below)], known, to_seq) for number, below in enumerate(joined))
    found: list[Node] = []
    questions: list[Question] = []
    for member in reversed(group.members):
        expressions = member.mirror.expressions
        if member.kind == "Project":
            for expr_id, written in expressions:
                known[expr_id] = resolve(written, known, to_seq)
            continue
        stated = expressions[0][1] if expressions else None
        if member.join_type in _ASKING:
            right = member.inputs[1]
            condition = None if stated is None else resolve(stated, _with_right(known, right), to_seq)
            questions.append(Question(member.jvm, condition, converted[id(right)]))
        elif stated is not None:
            found += conjuncts(resolve(stated, known, to_seq))
    outputs = tuple(known[expr_id] for expr_id, _, _ in group.root.mirror.output)
    return MultiwayJoin(leaves, tuple(found), tuple(questions), outputs)


def _with_right(known: Known, right: PlanNode) -> Known:
    """What attributes stand for in the condition of a question: those of its right side stay as they are."""
    theirs = Known()
    theirs.update(known)
    theirs.inputs.update(known.inputs)
    theirs.add(Columns(-1, right.mirror, None))
    return theirs


def leaf_of(number: int, below: PlanNode, converted: PlanNode, known: Known, to_seq: Any) -> Leaf:
    """An input and its columns, which become `known`."""
    columns = Columns(number, below.mirror, to_seq)
    known.add(columns)
    return Leaf(columns.ids[0] if columns.ids else -1, below.stream, columns, converted)


def connected_streams(join: MultiwayJoin) -> list[frozenset[int]]:
    """The streams in parts that equalities connect, by number of their leaf, in written order."""
    part = {i: frozenset([i]) for i, leaf in enumerate(join.leaves) if leaf.stream is not None}
    for node in join.conjuncts:
        if node.name == "EqualTo" and all(len(side.leaves) == 1 for side in node.args):
            one, other = (min(side.leaves) for side in node.args)
            if one in part and other in part:
                united = part[one] | part[other]
                part.update(dict.fromkeys(united, united))
    return sorted(set(part.values()), key=min)


def written_inputs(analysed: PlanMirror, known: list[str]) -> list[tuple[int, str]]:
    """(id, name) of every input of an analysed plan, left to right; those of sub-queries in conditions come last.

    An input's name is the outermost alias that covers it and nothing else: what the text around it calls it.
    """
    inner = [found for plan in analysed.subqueries for found in written_inputs(plan, known)]
    return _written(analysed, known) + inner


def _written(analysed: PlanMirror, known: list[str]) -> list[tuple[int, str]]:
    children = analysed.children
    if analysed.kind == "LateralJoin":
        return written_inputs(children[0], known) + written_inputs(analysed.subqueries[0], known)
    if not children:
        if analysed.stream is None:
            raise not_a_stream(analysed.kind, None, known)
        return [(analysed.first_id, analysed.stream)]
    if analysed.kind != "SubqueryAlias":
        return [found for child in children for found in written_inputs(child, known)]
    below = children[0].children if children[0].kind == "View" else children
    if not below[0].children and below[0].stream is None:
        raise not_a_stream(below[0].kind, analysed.alias, known)
    inputs = written_inputs(children[0], known)
    return [(inputs[0][0], str(analysed.alias))] if len(inputs) == 1 else inputs
