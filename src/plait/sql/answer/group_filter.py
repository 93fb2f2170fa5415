"""What the operators above a maintained aggregate say of its groups, as far as that can be told without Spark.

HAVING, and semi joins with another aggregate, often leave few of many groups.  They stay part of the recipe; what is
found here only spares Spark the groups that would not pass (`query/group_filter.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from plait.query.expr import Call, ColumnRef
from plait.query.group_filter import Among, Narrowing
from plait.query.types import has_plain_equality
from plait.sql.answer.residual import Asked, Operator, Recipe, Rows
from plait.sql.catalyst.expressions import Node, conjuncts, live, resolve
from plait.sql.catalyst.handles import attribute_id, id_of, join_type, kind_of, name_of, type_of
from plait.sql.catalyst.plan_reader import Written
from plait.sql.join.task_expressions import Translator


def having(rows: Rows, condition: Written, to_seq: Any) -> Rows:
    """The groups of an aggregate below a filter."""
    if rows.maintained is None:
        return rows
    known = {id_of(a): live(a) for a in rows.attributes}

    def column(node: Node) -> ColumnRef | None:
        return rows.group_column(node.jvm)

    translate = Translator(column, may_fail=True)
    told = map(translate, conjuncts(resolve(condition, known, to_seq)))
    narrowing = rows.narrowing
    # Catalyst adds `isnotnull` to what it is implied by.
    more = tuple(e for e in told if isinstance(e, Call) and e.op != "isnotnull")
    return replace(rows, narrowing=replace(narrowing, having=narrowing.having + more))


def among(questions: Iterable[Asked]) -> Narrowing:
    """The groups that semi joins may keep."""
    return Narrowing(among=tuple(found for question in questions if (found := _among(question)) is not None))


def _among(question: Asked) -> Among | None:
    below: Recipe = question.right
    while isinstance(below, Operator) and kind_of(below.jvm) in ("Project", "Filter"):
        (below,) = below.inputs
    if join_type(question.join) != "LEFT SEMI" or not isinstance(below, Rows):
        return None
    for mine, theirs in question.equal:
        other = below.group_column(theirs)
        if other is None or attribute_id(mine) is None or not has_plain_equality(other.type):
            continue
        if type_of(mine) == other.type:
            return Among(name_of(mine), below.source.name, other.column, below.narrowing)
    return None
