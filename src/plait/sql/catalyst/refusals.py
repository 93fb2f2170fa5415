"""What cannot be kept correct on streams is refused by name, on the analysed plan, before the optimiser can hide it.

`current_timestamp()` would be optimised to a constant, which means something else on a stream that never ends.  A
refusal shows the text and position of the construct, where Spark still knows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plait.errors import QueryError
from plait.sql.catalyst.plan_reader import MirroredPlan

_OPERATORS = "org.apache.spark.sql.catalyst.plans.logical."
_WELCOME = frozenset((
    "Project", "Filter", "Join", "LateralJoin", "SubqueryAlias", "View", "ResolvedHint", "LocalRelation",
    "OneRowRelation", "Range", "Aggregate", "Distinct", "Sort", "SortOrder", "GlobalLimit", "LocalLimit", "Offset",
    "Union", "Intersect", "Except", "Window", "WithWindowDefinition", "Expand", "Pivot", "Unpivot", "Generate",
    "WithCTE", "CTERelationDef", "CTERelationRef", "JoinHint", "UnresolvedHaving",
))  # fmt: skip
SUBQUERIES = ("Exists", "ListQuery", "ScalarSubquery", "LateralSubquery")
SELECT = "write a SELECT over registered streams"
_EARLIER = "apply it in the stream's DataFrame before registering the stream"

# Class name → (code, what people call it, remedy); expressions first, since they name the construct best.
_REFUSED: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(
        ("PythonUDF", "PythonUDAF", "PythonUDTF", "PythonFuncExpression"), ("PYTHON_UDF", "a Python function", _EARLIER)
    ),
    **dict.fromkeys(
        ("CurrentTimestamp", "CurrentDate", "Now", "LocalTimestamp", "CurrentTime", "CurrentBatchTimestamp"),
        ("NON_DETERMINISTIC", "the current time", "add it as a column of the stream's DataFrame, or in the sink"),
    ),
    "Deduplicate": ("UNSUPPORTED", "dropDuplicates", "write SELECT DISTINCT"),
    "Tail": ("UNSUPPORTED", "TAIL", "write ORDER BY … DESC LIMIT"),
    "Sample": ("UNSUPPORTED", "TABLESAMPLE", _EARLIER),
    **dict.fromkeys(
        ("RepartitionByExpression", "Repartition", "RebalancePartitions"),
        ("UNSUPPORTED", "DISTRIBUTE BY or a repartition hint", "leave it out; Plait places rows itself"),
    ),
}


_BY_ARRIVAL = ("First", "Last", "AnyValue")
"""Aggregates that Spark calls deterministic, though they are not over rows in any order."""


def refuse_constructs(analysed: Any, outline: MirroredPlan) -> None:
    """Raise a QueryError for the first construct in the analysed plan that has no meaning on streams."""
    operators = list(outline.root.walk())
    names = outline.names | {operator.kind for operator in operators}
    for name, reason in _REFUSED.items():
        if name in names:
            raise refusal(reason, _place(analysed, name))
    if any(name.endswith("Command") for name in names):
        raise refusal(("UNSUPPORTED", "a command", SELECT))
    for operator in operators:
        if operator.class_name.startswith(_OPERATORS) and operator.kind not in _WELCOME:
            raise refusal_of(operator.kind)
    # Asking node by node takes long: most queries need not be looked at closer.
    if not outline.deterministic or names & {"GlobalLimit", *_BY_ARRIVAL}:
        for node in _plans(analysed):
            _refuse_arbitrary(node)


def _refuse_arbitrary(node: Any) -> None:
    """What gives another answer each time it is asked, though nothing has arrived."""
    for expression in _items(node.expressions()):
        for part in () if expression.deterministic() else _expressions(expression):
            # What is wrong with a sub-query is found when its own plan is looked at.
            if part.nodeName() in SUBQUERIES or part.deterministic():
                continue
            if all(child.deterministic() for child in _items(part.children())):
                raise QueryError(
                    "NON_DETERMINISTIC",
                    f"the query calls {part.prettyName()}, which gives another value each time or depends on the order "
                    f"in which rows arrive{_at(part)}",
                    _EARLIER,
                )
    for expression in _items(node.expressions()) if node.nodeName() == "Aggregate" else ():
        for part in _expressions(expression):
            if part.getClass().getSimpleName() in _BY_ARRIVAL:
                raise QueryError(
                    "NON_DETERMINISTIC",
                    f"the query calls {part.prettyName()}, which depends on the order in which rows arrive{_at(part)}",
                    "use min, max, or max_by with a column that decides",
                )
    if node.nodeName() == "GlobalLimit":
        below = node.child()
        while below.nodeName() in ("LocalLimit", "Offset", "Project", "SubqueryAlias"):
            below = below.child()
        # SORT BY orders rows within a partition only.
        if below.nodeName() != "Sort" or not getattr(below, "global")():
            raise QueryError(
                "UNSUPPORTED",
                f"the query contains LIMIT without ORDER BY, which may give other rows in every epoch{_at(node)}",
                "add ORDER BY, so that it is certain which rows are meant",
            )


def _plans(plan: Any) -> Iterator[Any]:
    """All operators, those of sub-queries included."""
    yield plan
    for below in (*_items(plan.children()), *_items(plan.subqueries())):
        yield from _plans(below)


def _expressions(expression: Any) -> Iterator[Any]:
    yield expression
    for child in _items(expression.children()):
        yield from _expressions(child)


def _items(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(i) for i in range(sequence.size()))


def _place(analysed: Any, name: str) -> str:
    """Where the first thing of that class stands in the text."""
    for plan in _plans(analysed):
        for node in (plan, *(part for e in _items(plan.expressions()) for part in _expressions(e))):
            if node.getClass().getSimpleName() == name:
                return _at(node)
    return ""


def _at(node: Any) -> str:
    """`: rand() at line 1, column 8`, as far as Spark knows."""
    origin = node.origin()
    if not origin.line().isDefined():
        return ""
    place = f"line {origin.line().get()}, column {origin.startPosition().get() + 1}"
    if not (origin.sqlText().isDefined() and origin.startIndex().isDefined() and origin.stopIndex().isDefined()):
        return f" ({place})"
    text = str(origin.sqlText().get())[origin.startIndex().get() : origin.stopIndex().get() + 1]
    return f": {' '.join(text.split())[:80]} ({place})"


def refusal_of(operator: str) -> QueryError:
    """The refusal of a logical operator by its class name."""
    return refusal(_REFUSED.get(operator, ("UNSUPPORTED", operator, SELECT)))


def refusal(reason: tuple[str, str, str], place: str = "") -> QueryError:
    """The error for one entry of the table."""
    code, construct, remedy = reason
    return QueryError(code, f"the query contains {construct}, which Plait does not run{place}", remedy)


_NAMELESS = {
    "LocalRelation": "an inline table (VALUES)",
    "OneRowRelation": "a SELECT without FROM",
    "Range": "range(…)",
}


def not_a_stream(operator: str, name: str | None, known: list[str]) -> QueryError:
    """The refusal of a table that was not registered; `operator` is its class name."""
    called = _NAMELESS.get(operator, name or operator)
    return QueryError(
        "NOT_A_STREAM",
        f"{called} is not a registered stream",
        f"register its rows with engine.stream(…); known streams: {', '.join(known) or 'none'}",
    )


def unknown_stream(name: str, known: list[str]) -> QueryError:
    """The refusal of a name that no registered stream or table has."""
    return QueryError(
        "UNKNOWN_STREAM",
        f"no stream is called {name}",
        f"register it with engine.stream(…), or use one of: {', '.join(known) or 'none registered yet'}",
    )


def refused_subquery(operator: str, text: str) -> QueryError:
    """The refusal of a sub-query where it cannot be kept up to date."""
    return QueryError(
        "UNSUPPORTED",
        f"the query contains a sub-query inside {operator}, which Plait does not run: {text}",
        "select the sub-query's value as a column first, in a sub-query in FROM",
    )


def always_false() -> QueryError:
    """The refusal of a query that the optimiser proved empty."""
    return QueryError("EMPTY", "the WHERE clause is never true, so the query has no result", "correct the condition")
