"""Groups that end: an aggregate by windows of event time, or by event time itself.

Once the watermark is far enough past the end of a group's window, no row can come to it any more: the group is closed,
and its values are final.  That is what Spark's output mode `append` hands over.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from plait.query.relation import Relation
from plait.sql.answer.maintain import Maintained
from plait.sql.catalyst.logical import Logical
from plait.sql.catalyst.plan_reader import SKIPPED
from plait.sql.join.expressions import Node
from plait.sql.join.multiway import MultiwayJoin, items

_INTERNAL = "PreciseTimestampConversion"
"""Catalyst's own, in what it makes of `window(…)`; nobody can write it, and it cannot be printed as SQL."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Which key of an aggregate says until when a group has rows."""

    key: int
    field: str | None
    """Of a window, the field with its end; None: the key is the time itself."""
    alias: str
    """Whose event time it is."""


def readable_windows(plan: Any, logical: Logical) -> tuple[Any, frozenset[int]]:
    """The plan with its windows in words that SQL has, and the columns that are windows, by expression id."""
    if _INTERNAL.lower() not in str(plan.toString()):
        return plan, frozenset()
    found: set[int] = set()

    def plain(expression: Any) -> Any:
        if expression.nodeName() != _INTERNAL:
            return None
        made = {"bigint": logical.unix_micros, "timestamp": logical.timestamp_micros}
        types = {str(kind.catalogString()) for kind in (expression.fromType(), expression.toType())}
        if types != made.keys():
            return None
        return made[str(expression.toType().catalogString())](logical.rewritten(expression.child(), plain))

    def rebuilt(operator: Any) -> Any:
        children = [rebuilt(child) for child in items(operator.children())]
        if operator.nodeName() != "Project":
            return logical.with_children(operator, children) if children else operator
        columns = list(items(operator.projectList()))
        found.update(column.exprId().id() for column in columns if _is_window(column))
        return logical.project([logical.rewritten(column, plain) for column in columns], children[0])

    return rebuilt(plan), frozenset(found)


def _is_window(column: Any) -> bool:
    """Whether a column is what Catalyst makes of a tumbling `window(…)` of instants."""
    if column.nodeName() != "Alias" or column.child().nodeName() != "CreateNamedStruct":
        return False
    if str(column.dataType().catalogString()) != "struct<start:timestamp,end:timestamp>":
        return False
    ends = [column.child().children().apply(i) for i in (1, 3)]
    return all((end.child() if end.nodeName() in SKIPPED else end).nodeName() == _INTERNAL for end in ends)


def _is_of_column(window: Node) -> bool:
    """Whether it is a window of the column itself: that of `ts - INTERVAL 1 HOUR` ends before its rows have come."""
    return all(node.args[0].column is not None for node in window.walk() if node.name == "UnixMicros")


def closing_of(
    kept: Maintained,
    join: MultiwayJoin,
    names: tuple[str, ...],
    relations: Mapping[str, Relation],
    windows: Container[int],
) -> Closing | None:
    """The key that closes groups; None if none does."""
    attributes = items(kept.aggregate.child().output())
    known = {a.exprId().id(): node for a, node in zip(attributes, join.outputs, strict=False)}
    for number, grouping in enumerate(kept.groupings):
        if grouping.nodeName() != "AttributeReference":
            continue
        id = grouping.exprId().id()
        node = known[id]
        if len(node.columns) != 1:
            continue
        (column,) = node.columns
        relation = relations[join.leaves[column.leaf].relation]
        if relation.delay_ms is None or relation.time_column != column.name:
            continue
        if node.column is not None and node.type == "timestamp":
            return Closing(number, None, names[column.leaf])
        if id in windows and _is_of_column(node):
            return Closing(number, "end", names[column.leaf])
    return None
