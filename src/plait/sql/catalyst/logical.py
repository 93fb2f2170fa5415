"""Catalyst's logical operators and expressions, made from Python: what it takes to put a changed plan together.

Operators find their columns by expression id, not by name: a part of a plan can be exchanged for another one that
gives columns of the same ids.  Nothing here imports pyspark; JVM objects are `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, reduce
from typing import Any

from plait.sql.catalyst.expressions import Node, resolve
from plait.sql.catalyst.plan_reader import PlanReader
from plait.sql.catalyst.scala import items

Rewrite = Callable[[Any], Any]
"""What an expression becomes; None leaves it to its arguments."""
WITH_SUBQUERIES = ("Filter", "Project", "Join", "Aggregate")
"""Operators whose sub-queries can be exchanged."""


class Logical:
    """Makes operators in one JVM."""

    def __init__(self, jvm: Any) -> None:
        # Every step down the JVM's packages is a call of its own.
        sql = jvm.org.apache.spark.sql
        self._joins = sql.catalyst.plans
        self._plans = self._joins.logical
        self._expressions = sql.catalyst.expressions
        self.aggregates = self._expressions.aggregate
        self.types = sql.types
        self.sessions = jvm.SparkSession
        self.to_seq = jvm.PythonUtils.toSeq
        self._none = jvm.scala.Option.empty()
        self._some = jvm.scala.Some
        self._hint = self._plans.JoinHint.NONE()
        self.reader = PlanReader(jvm)

    def read(self, expression: Any, known: Mapping[int, Node]) -> Node:
        """An expression as a node; `known` defines its attributes by expression id."""
        return resolve(self.reader.expression(expression), known, self.to_seq)

    def alias(self, expression: Any, name: str, expr_id: Any = None) -> Any:
        """`expression AS name`, with a given id or a new one."""
        if expr_id is None:
            expr_id = self._expressions.NamedExpression.newExprId()
        nil = self.to_seq([])
        return self._expressions.Alias(expression, name, expr_id, nil, self._none, nil)

    def named(self, expression: Any, attribute: Any) -> Any:
        """`expression` as the column that `attribute` stands for."""
        is_itself = expression.getClass() == attribute.getClass() and expression.exprId().equals(attribute.exprId())
        return attribute if is_itself else self.alias(expression, str(attribute.name()), attribute.exprId())

    def cast(self, expression: Any, kind: Any) -> Any:
        """`CAST(expression AS kind)`; an expression of that type is left as it is."""
        return expression if expression.dataType() == kind else self._expressions.Cast(expression, kind, self._none)

    def unix_micros(self, time: Any) -> Any:
        """Microseconds since 1970."""
        return self._expressions.UnixMicros(time)

    def timestamp_micros(self, number: Any) -> Any:
        """The instant so many microseconds after 1970."""
        return self._expressions.MicrosToTimestamp(number)

    def project(self, columns: Iterable[Any], child: Any) -> Any:
        """SELECT."""
        return self._plans.Project(self.to_seq(list(columns)), child)

    def filter(self, conditions: list[Any], child: Any) -> Any:
        """WHERE all of them."""
        return self._plans.Filter(reduce(self._expressions.And, conditions), child) if conditions else child

    def cross(self, left: Any, right: Any) -> Any:
        """Every row with every row; Spark's optimiser makes conditions above it part of it."""
        return self._plans.Join(left, right, self._joins.JoinType.apply("inner"), self._none, self._hint)

    def join_like(self, join: Any, left: Any, right: Any, condition: Any) -> Any:
        """A join of the same type."""
        stated = self._none if condition is None else self._some(condition)
        return self._plans.Join(left, right, join.joinType(), stated, self._hint)

    def semi(self, left: Any, right: Any, same: Iterable[tuple[Any, Any]]) -> Any:
        """The rows of `left` that have a partner in `right`, of which all these pairs are equal."""
        whole = reduce(self._expressions.And, [self._expressions.EqualTo(one, other) for one, other in same])
        return self._plans.Join(left, right, self._joins.JoinType.apply("leftsemi"), self._some(whole), self._hint)

    def aggregate(self, groupings: Iterable[Any], columns: Iterable[Any], child: Any) -> Any:
        """GROUP BY."""
        return self._plans.Aggregate(self.to_seq(list(groupings)), self.to_seq(list(columns)), child, self._none)

    def with_children(self, operator: Any, children: Iterable[Any]) -> Any:
        """The same operator over other inputs."""
        return operator.withNewChildren(self.to_seq(list(children)))

    def widened(self, operator: Any, child: Any, more: Iterable[Any]) -> Any:
        """The same projection or filter over another input, with `more` columns of that."""
        if str(operator.nodeName()) == "Project":
            return self.project([*items(operator.projectList()), *more], child)
        return self.with_children(operator, [child])

    def with_subqueries(self, operator: Any, plans: list[Any]) -> Any:
        """The same operator with other plans in its scalar sub-queries, in the order of `operator.subqueries()`."""
        waiting = iter(plans)

        def renewed(expression: Any) -> Any:
            is_subquery = expression.nodeName() == "ScalarSubquery"
            return expression.withNewPlan(next(waiting)) if is_subquery else None

        kind = str(operator.nodeName())
        if kind == "Filter":
            return self._plans.Filter(self.rewritten(operator.condition(), renewed), operator.child())
        if kind == "Project":
            columns = [self.rewritten(e, renewed) for e in items(operator.projectList())]
            return self._plans.Project(self.to_seq(columns), operator.child())
        if kind == "Join":
            condition = self.rewritten(operator.condition().get(), renewed)
            return self.join_like(operator, operator.left(), operator.right(), condition)
        if kind == "Aggregate":
            groupings = [self.rewritten(e, renewed) for e in items(operator.groupingExpressions())]
            columns = [self.rewritten(e, renewed) for e in items(operator.aggregateExpressions())]
            return self.aggregate(groupings, columns, operator.child())
        raise LookupError(kind)

    def rewritten(self, expression: Any, rewrite: Rewrite) -> Any:
        """The expression with every part for which `rewrite` has another replaced by that, outermost first."""
        found = rewrite(expression)
        if found is not None:
            return found
        children = list(items(expression.children()))
        changed = [self.rewritten(child, rewrite) for child in children]
        if all(new is old for new, old in zip(changed, children, strict=True)):
            return expression
        return expression.withNewChildren(self.to_seq(changed))


@lru_cache(maxsize=2)
def logical_of(jvm: Any) -> Logical:
    """The operators of a JVM; looked up once, since every step down its packages is a call."""
    return Logical(jvm)
