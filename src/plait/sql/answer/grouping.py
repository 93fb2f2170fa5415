"""An aggregate right above a join as the join's tasks make it, if they can: Catalyst's expressions, translated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.query.expr import Expr
from plait.query.grouping import COUNT, MAX, MIN, SUM, Grouping, GroupKey, GroupValue
from plait.query.types import FLOATS, INTEGRAL, TIMES, digits, has_plain_equality, is_native
from plait.sql.catalyst.expressions import Node
from plait.sql.catalyst.maintain import Maintained, Part
from plait.sql.join.graph_rules import Draft
from plait.sql.join.output_expressions import output_expr
from plait.sql.join.task_expressions import Translator

_FUNCTIONS = {"Count": COUNT, "Sum": SUM, "Min": MIN, "Max": MAX}
_ORDERED = (*INTEGRAL, "date", *TIMES)
"""Types of which Arrow's least and greatest values are Spark's, beside decimals."""


def grouping_of(kept: Maintained, draft: Draft) -> Grouping | None:
    """What tasks make of joined rows, in the columns of partial rows; None if that needs Spark."""
    if any(condition.expr is None for condition in draft.conditions):
        return None
    # A join that nothing is read of has an output all the same.
    known = dict(zip(kept.input_ids, draft.join.outputs, strict=False))
    there = {ref for output in draft.outputs for ref in output.refs}
    plain = Translator(draft.column, may_fail=True)
    # A column that sources compute is there as such, and what it is made of may not be.
    sources = {id(node): o.source for node, o in zip(draft.join.outputs, draft.outputs, strict=False)}

    def read_node(jvm: Any) -> Node:
        return kept.logical.read(jvm, known)

    def translate(node: Node) -> Expr | None:
        source = sources.get(id(node))
        if source is not None:
            return source if is_native(source.type) else None
        return plain(node) or output_expr(node, draft.column)

    keys = [translate(read_node(jvm)) for jvm in kept.groupings]
    values = [_value(f"p{i}", part, read_node, translate) for i, part in enumerate(kept.parts)]
    whole = [key for key in keys if key is not None and _is_key(key.type)]
    made = [value for value in values if value is not None]
    if len(whole) < len(keys) or len(made) < len(values):
        return None
    found = Grouping(tuple(map(GroupKey, kept.keys, whole)), tuple(made))
    return found if found.columns <= there else None


def _value(
    name: str, part: Part, read_node: Callable[[Any], Node], translate: Callable[[Node], Expr | None]
) -> GroupValue | None:
    made = _FUNCTIONS.get(part.function)
    only = None if made is None else part.argument
    if made is None or only is None:
        return None
    node = read_node(only)
    if made == COUNT and node.name == "Literal" and node.value is not None:
        return GroupValue(name, COUNT, None, part.type)
    argument = translate(node)
    if argument is None or not _is_same(made, argument.type, part.type):
        return None
    return GroupValue(name, made, argument, part.type)


def _is_key(kind: str) -> bool:
    """Whether Arrow tells values of this type apart exactly where Spark does: it takes -0.0 and 0.0 for two."""
    return has_plain_equality(kind) and kind != "binary"


def _is_same(function: str, argument: str, result: str) -> bool:
    """Whether Arrow's function over such an argument is Spark's: of NaN, least and greatest are not."""
    if function == COUNT:
        return True
    if function in (MIN, MAX):
        return argument == result and (argument in _ORDERED or digits(argument) is not None)
    if argument in INTEGRAL:
        return result == "bigint"
    if argument in FLOATS:
        return result == "double"
    mine, theirs = digits(argument), digits(result)
    return mine is not None and theirs is not None and mine.scale == theirs.scale
