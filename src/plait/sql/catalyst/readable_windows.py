"""Windows of event time in words that SQL has: what Catalyst makes of `window(…)` cannot be printed as SQL."""

from __future__ import annotations

from typing import Any

from plait.sql.catalyst.handles import id_of, kind_of, type_of
from plait.sql.catalyst.logical import Logical
from plait.sql.catalyst.plan_reader import SKIPPED
from plait.sql.catalyst.scala import items

_INTERNAL = "PreciseTimestampConversion"
"""Catalyst's own, in what it makes of `window(…)`; nobody can write it, and it cannot be printed as SQL."""


def readable_windows(plan: Any, logical: Logical) -> tuple[Any, frozenset[int]]:
    """The plan with its windows in words that SQL has, and the columns that are windows, by expression id."""
    if _INTERNAL.lower() not in str(plan.toString()):
        return plan, frozenset()
    found: set[int] = set()

    def plain(expression: Any) -> Any:
        if kind_of(expression) != _INTERNAL:
            return None
        made = {"bigint": logical.unix_micros, "timestamp": logical.timestamp_micros}
        types = {str(kind.catalogString()) for kind in (expression.fromType(), expression.toType())}
        if types != made.keys():
            return None
        return made[str(expression.toType().catalogString())](logical.rewritten(expression.child(), plain))

    def rebuilt(operator: Any) -> Any:
        children = [rebuilt(child) for child in items(operator.children())]
        if kind_of(operator) != "Project":
            return logical.with_children(operator, children) if children else operator
        columns = list(items(operator.projectList()))
        found.update(id_of(column) for column in columns if _is_window(column))
        return logical.project([logical.rewritten(column, plain) for column in columns], children[0])

    return rebuilt(plan), frozenset(found)


def _is_window(column: Any) -> bool:
    """Whether a column is what Catalyst makes of a tumbling `window(…)` of instants."""
    if kind_of(column) != "Alias" or kind_of(column.child()) != "CreateNamedStruct":
        return False
    if type_of(column) != "struct<start:timestamp,end:timestamp>":
        return False
    ends = [column.child().children().apply(i) for i in (1, 3)]
    return all(kind_of(end.child() if kind_of(end) in SKIPPED else end) == _INTERNAL for end in ends)
