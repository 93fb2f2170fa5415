"""Aggregates that are kept up to date from epoch to epoch, without the rows they were made from.

Over rows that are only ever added, count, sum, avg, min and max of everything are those functions of their values over
parts.  So an aggregate splits in three:

    partial   over the rows of some epochs: one row per group, columns g0, g1 … (the keys) and p0, p1 … (values so far)
    merged    over the partial rows of any epochs: the same columns; merging merged rows is the same again
    final     over merged rows: the columns of the aggregate itself

Both the rows of the last epochs and the merged rows of those before are committed with their epoch, so the state of an
aggregate is recovered like everything else (`runtime/answers/answer.py`).

Cost: for an answer as many rows as there are groups, and the rows of the epochs that are not merged yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plait.sql.catalyst.handles import canonical_text, id_of, kind_of, name_of, output_of, place_of, type_of
from plait.sql.catalyst.logical import Logical
from plait.sql.catalyst.scala import items

_MERGING = {"Sum": "sum", "Count": "sum", "Min": "min", "Max": "max"}


@dataclass(frozen=True, eq=False)
class Part:
    """One value per group: how it comes from rows, and by which function from values of parts."""

    expression: Any
    """An AggregateExpression over the aggregate's input."""
    merge: str
    type: str

    @property
    def function(self) -> str:
        """Catalyst's class of the function."""
        return kind_of(self.expression.aggregateFunction())

    @property
    def argument(self) -> Any:
        """The function's only argument; None if it has more or fewer, or a FILTER clause."""
        arguments = self.expression.aggregateFunction().children()
        is_plain = arguments.size() == 1 and not self.expression.filter().isDefined()
        return arguments.apply(0) if is_plain else None

    def merging(self, column: str) -> str:
        """SQL that merges a column of such values."""
        text = f"CAST({self.merge}({column}) AS {self.type})"
        return f"coalesce({text}, 0L)" if self.expression.aggregateFunction().prettyName() == "count" else text


@dataclass(frozen=True, eq=False)
class Maintained:
    """An aggregate in three stages."""

    logical: Logical
    aggregate: Any
    groupings: tuple[Any, ...]
    parts: tuple[Part, ...]
    places: dict[str, tuple[int, ...]]
    """By the text of an aggregate expression: its parts."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the group."""
        return tuple(f"g{i}" for i in range(len(self.groupings)))

    @cached_property
    def input(self) -> tuple[Any, ...]:
        """The columns of the aggregate's input, as attributes."""
        return output_of(self.aggregate.child())

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The expression ids of the columns of the aggregate's input."""
        return tuple(map(id_of, self.input))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types of partial and merged rows."""
        keys = [(name, type_of(e)) for name, e in zip(self.keys, self.groupings, strict=True)]
        return (*keys, *((f"p{i}", part.type) for i, part in enumerate(self.parts)))

    def merging(self) -> list[str]:
        """SQL of the p-columns of merged rows."""
        return [f"{part.merging(f'p{i}')} AS p{i}" for i, part in enumerate(self.parts)]

    @cached_property
    def _values(self) -> list[Any]:
        """Keys and parts, over the aggregate's input."""
        keys = [self.logical.alias(e, name) for e, name in zip(self.groupings, self.keys, strict=True)]
        return keys + [self.logical.alias(part.expression, f"p{i}") for i, part in enumerate(self.parts)]

    @cached_property
    def slots(self) -> list[Any]:
        """The columns of partial and merged rows, as a plan above knows them."""
        return [value.toAttribute() for value in self._values]

    def partial(self, rows: Any) -> Any:
        """The partial rows of a plan that gives input rows."""
        return self.logical.aggregate(self.groupings, self._values, rows)

    def final(self, merged: Any, more: Sequence[Any] = ()) -> Any:
        """The aggregate's own columns, from a plan that gives merged rows as `slots`, and `more` of the plan's own."""
        return self.logical.project([*self._outputs, *more], merged)

    @cached_property
    def _outputs(self) -> list[Any]:
        keys, parts = self.slots[: len(self.groupings)], self.slots[len(self.groupings) :]

        def replaced(expression: Any) -> Any:
            for grouping, key in zip(self.groupings, keys, strict=True):
                if expression.semanticEquals(grouping):
                    return key
            if expression.getClass().getSimpleName() != "AggregateExpression":
                return None
            mine = [parts[i] for i in self.places[canonical_text(expression)]]
            return mine[0] if len(mine) == 1 else self._average(expression.aggregateFunction(), mine)

        columns = []
        for column in items(self.aggregate.aggregateExpressions()):
            value = column.child() if column.getClass().getSimpleName() == "Alias" else column
            columns.append(self.logical.named(self.logical.rewritten(value, replaced), column.toAttribute()))
        return columns

    def slot_of(self, output: int) -> str | None:
        """The column of merged rows that one of the aggregate's own columns is; None if it is computed from some."""
        value = self._outputs[output].child()
        place = place_of(value, self.slots)
        return None if place is None else name_of(self.slots[place])

    def _average(self, function: Any, values: list[Any]) -> Any:
        """Spark's own way from sum and count to the average, over our columns."""
        buffers = list(items(function.aggBufferAttributes()))

        def replaced(expression: Any) -> Any:
            for buffer, value in zip(buffers, values, strict=True):
                if expression.semanticEquals(buffer):
                    return value
            return None

        return self.logical.rewritten(function.evaluateExpression(), replaced)


def maintained(aggregate: Any, logical: Logical) -> Maintained | str:
    """The three stages of a Catalyst aggregate, or why it has none."""
    groupings = tuple(items(aggregate.groupingExpressions()))
    parts: list[Part] = []
    places: dict[str, tuple[int, ...]] = {}
    for expression in _aggregate_expressions(aggregate):
        text = canonical_text(expression)
        if text in places:
            continue
        found = _parts(expression, logical)
        if isinstance(found, str):
            return found
        places[text] = tuple(range(len(parts), len(parts) + len(found)))
        parts += found
    return Maintained(logical, aggregate, groupings, tuple(parts), places)


def _parts(expression: Any, logical: Logical) -> list[Part] | str:
    function = expression.aggregateFunction()
    name = kind_of(function)
    if expression.isDistinct():
        return f"{function.prettyName()}(DISTINCT …) needs all values again"
    if name in ("Sum", "Average") and (why := _may_hide_overflow(function, name)) is not None:
        return why
    if name in _MERGING:
        return [Part(expression, _MERGING[name], type_of(function))]
    if name != "Average":
        return f"{function.prettyName()} cannot be put together from parts"
    made = []
    buffers = list(items(function.aggBufferAttributes()))
    argument = function.child()
    if "decimal" not in type_of(argument):
        argument = logical.cast(argument, buffers[0].dataType())
    total = logical.aggregates.Sum(argument)
    count = logical.aggregates.Count(logical.to_seq([function.child()]))
    for part in (total, count):
        whole = part.toAggregateExpression(False, expression.filter())
        made.append(Part(whole, "sum", type_of(part)))
    return made


def _may_hide_overflow(function: Any, name: str) -> str | None:
    """A sum that becomes NULL where it overflows is lost among parts, which ignore NULLs."""
    mode = str((function.evalContext().evalMode() if name == "Sum" else function.evalMode()).toString())
    if mode == "TRY" or (mode != "ANSI" and "decimal" in type_of(function)):
        return f"{function.prettyName()} gives NULL where it overflows, which parts cannot tell"
    return None


def _aggregate_expressions(aggregate: Any) -> list[Any]:
    found: list[Any] = []

    def collect(expression: Any) -> None:
        if kind_of(expression) == "AggregateExpression":
            found.append(expression)
            return
        for child in items(expression.children()):
            collect(child)

    for column in items(aggregate.aggregateExpressions()):
        collect(column)
    return found
