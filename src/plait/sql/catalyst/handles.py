"""Questions about objects of Catalyst, answered in plain values.

Outside of this folder an operator or an expression of Catalyst is a *handle*: a value that is kept, and put into
another plan by `logical.py`, but never called.  What has to be known of one is asked here.  Every question is a few
calls into the JVM, of 0.1 ms each: what all queries need is read with the whole plan instead (`plan_reader.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from plait.sql.catalyst.scala import items

_ATTRIBUTE = re.compile(r"(.*)#(\d+)L?(?:-T\w+)?", re.DOTALL)


def kind_of(handle: Any) -> str:
    """The class of an operator or an expression, as Catalyst calls it."""
    return str(handle.nodeName())


def id_of(attribute: Any) -> int:
    """The expression id of an attribute."""
    return int(attribute.exprId().id())


def name_of(attribute: Any) -> str:
    """What an attribute is called."""
    return str(attribute.name())


def type_of(expression: Any) -> str:
    """Spark's simple type string, never abbreviated."""
    return str(expression.dataType().catalogString())


def attribute_id(expression: Any) -> int | None:
    """The expression id, of an expression that is an attribute."""
    return id_of(expression) if kind_of(expression) == "AttributeReference" else None


def place_of(expression: Any, attributes: Iterable[Any]) -> int | None:
    """Which of these attributes an expression is; None if it is none."""
    wanted = attribute_id(expression)
    if wanted is None:
        return None
    return next((place for place, attribute in enumerate(attributes) if id_of(attribute) == wanted), None)


def attribute_of(column: Any) -> Any:
    """The attribute by which operators above know a named expression."""
    return column.toAttribute()


def output_of(plan: Any) -> tuple[Any, ...]:
    """The columns of an operator, as attributes."""
    return tuple(items(plan.output()))


def output_columns(plan: Any, indices: Iterable[int]) -> tuple[Any, ...]:
    """Some columns of an operator, as attributes."""
    output = plan.output()
    return tuple(output.apply(index) for index in indices)


def input_of(plan: Any) -> Any:
    """The operator below one that has a single input."""
    return plan.child()


def read_ids(plan: Any) -> frozenset[int]:
    """The expression ids of the attributes that an operator's own expressions read."""
    attributes = plan.references().toSeq()
    found = set()
    # In two calls: Spark writes an attribute as `name#id`, with an L after the id of a long.
    for text in str(attributes.mkString("\0")).split("\0") if attributes.size() else ():
        match = _ATTRIBUTE.fullmatch(text)
        assert match is not None, text
        found.add(int(match[2]))
    return frozenset(found)


def reads_attributes(expression: Any) -> bool:
    """Whether an expression reads any attribute."""
    return bool(expression.references().nonEmpty())


def join_type(join: Any) -> str:
    """`LEFT SEMI`, `LEFT ANTI` …, of a join."""
    return str(join.joinType().sql())


def is_deterministic(handle: Any) -> bool:
    """Whether an expression, or an operator with all below it, gives the same for the same rows."""
    return bool(handle.deterministic())


def has_deterministic_expressions(plan: Any) -> bool:
    """Whether an operator's own expressions all are deterministic."""
    return all(is_deterministic(expression) for expression in items(plan.expressions()))


def is_same_plan(one: Any, other: Any) -> bool:
    """Whether two plans are the same up to names and expression ids."""
    return bool(one.canonicalized().equals(other.canonicalized()))


def canonical_text(handle: Any) -> str:
    """A text that equal plans or expressions share, whatever their ids and names are."""
    return str(handle.canonicalized().toString())


def line_of(plan: Any) -> str:
    """An operator in one line; wide ones are cut at 25 fields."""
    return str(plan.simpleString(25))
