"""What Plait does not join is refused by name, on the analysed plan, before the optimiser can hide it.

`LIMIT 0` would be optimised to an empty relation and `current_timestamp()` to a constant; both mean something else on
a stream that never ends.  Outer joins are judged after optimisation (`multiway.py`), since a later condition may turn
them into inner ones.
"""

from __future__ import annotations

import re
from typing import Any

from plait.errors import QueryError

_CLASS = re.compile(r'"class":"org\.apache\.spark\.sql\.([\w.$]+)"')
_OPERATORS = "catalyst.plans.logical."
_WELCOME = frozenset((
    "Project", "Filter", "Join", "LateralJoin", "SubqueryAlias", "View", "ResolvedHint", "LocalRelation",
    "OneRowRelation", "Range",
))  # fmt: skip
_NO_STATE = "Plait joins streams and keeps no other state; do it on the results, in q.results() or the sink"
_SELECT = "write a SELECT that joins registered streams"
_EARLIER = "apply it in the stream's DataFrame before registering the stream"

# Class name → (code, what people call it, remedy); expressions first, since they name the construct best.
_REFUSED: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(
        ("PythonUDF", "PythonUDAF", "PythonUDTF", "PythonFuncExpression"), ("PYTHON_UDF", "a Python function", _EARLIER)
    ),
    "ScalarSubquery": ("SUBQUERY", "a scalar sub-query", "join the sub-query's stream instead"),
    **dict.fromkeys(
        ("ListQuery", "InSubquery"), ("JOIN_TYPE", "IN (SELECT …), a semi or anti join", "write an inner join")
    ),
    "Exists": ("JOIN_TYPE", "EXISTS (SELECT …), a semi or anti join", "write an inner join"),
    **dict.fromkeys(
        ("CurrentTimestamp", "CurrentDate", "Now", "LocalTimestamp", "CurrentTime", "CurrentBatchTimestamp"),
        ("NON_DETERMINISTIC", "the current time", "add it as a column of the stream's DataFrame, or in the sink"),
    ),
    **dict.fromkeys(("Window", "WithWindowDefinition"), ("UNSUPPORTED", "a window function", _NO_STATE)),
    "Aggregate": ("AGGREGATE", "an aggregate or GROUP BY", _NO_STATE),
    **dict.fromkeys(("Distinct", "Deduplicate"), ("AGGREGATE", "DISTINCT", _NO_STATE)),
    **dict.fromkeys(("Pivot", "Unpivot", "Expand"), ("AGGREGATE", "PIVOT or grouping sets", _NO_STATE)),
    "Sort": ("UNSUPPORTED", "ORDER BY or SORT BY", "a stream has no end to sort at; sort the results"),
    **dict.fromkeys(("GlobalLimit", "LocalLimit", "Offset", "Tail"), ("UNSUPPORTED", "LIMIT or OFFSET", _NO_STATE)),
    "Union": ("UNSUPPORTED", "UNION", "unite the DataFrames before registering the stream, or run two queries"),
    "Intersect": ("UNSUPPORTED", "INTERSECT", _NO_STATE),
    "Except": ("UNSUPPORTED", "EXCEPT", _NO_STATE),
    "Generate": ("UNSUPPORTED", "explode or another generator", _EARLIER),
    "Sample": ("UNSUPPORTED", "TABLESAMPLE", _EARLIER),
    **dict.fromkeys(
        ("RepartitionByExpression", "Repartition", "RebalancePartitions"),
        ("UNSUPPORTED", "DISTRIBUTE BY or a repartition hint", "leave it out; Plait places rows itself"),
    ),
}


def refuse_constructs(analysed: Any) -> None:
    """Raise a QueryError for the first construct in the analysed plan that is not an inner join of streams."""
    classes = [found.split("$")[0] for found in _CLASS.findall(analysed.toJSON())]
    names = {found.rsplit(".", 1)[-1] for found in classes}
    for name, reason in _REFUSED.items():
        if name in names:
            raise refusal(reason)
    if any(name.endswith("Command") for name in names):
        raise refusal(("UNSUPPORTED", "a command", _SELECT))
    operators = {found.removeprefix(_OPERATORS) for found in classes if found.startswith(_OPERATORS)}
    for name in sorted(operators - _WELCOME):
        raise refusal_of(name)
    if not analysed.deterministic():
        raise QueryError(
            "NON_DETERMINISTIC",
            "the query calls a function that gives another value each time, such as rand() or uuid()",
            _EARLIER,
        )


def refusal_of(operator: str) -> QueryError:
    """The refusal of a logical operator by its class name."""
    return refusal(_REFUSED.get(operator, ("UNSUPPORTED", operator, _SELECT)))


def refusal(reason: tuple[str, str, str]) -> QueryError:
    """The error for one entry of the table."""
    code, construct, remedy = reason
    return QueryError(code, f"the query contains {construct}, which Plait does not run", remedy)


def refuse_join_type(kind: str) -> QueryError:
    """The refusal of a join that is still not an inner join after optimisation."""
    return QueryError(
        "JOIN_TYPE",
        f"the query contains a {kind.lower()} join; only inner joins are run",
        "write an inner join; rows without a partner are never certain while a stream still runs",
    )


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


def always_false() -> QueryError:
    """The refusal of a query that the optimiser proved empty."""
    return QueryError("EMPTY", "the WHERE clause is never true, so the query has no result", "correct the condition")
