"""What SQL text may say at all, decided on the parsed plan, before Spark analyses anything.

Analysing is not innocent: it runs EXECUTE IMMEDIATE, opens tables that are given by path, connects to databases and
loads the classes that `reflect` names.  SQL text is not trusted, so everything that is not known to be a query over
known tables is refused here.  Operators are allowed by name; whatever a later Spark adds is refused until it is known.

The plan comes as JSON in one call.  JSON has no maps: the definitions of a WINDOW clause are asked for by themselves.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

from plait.errors import QueryError
from plait.sql.catalyst.refusals import SELECT, SUBQUERIES, not_a_stream, refusal, refusal_of
from plait.sql.catalyst.scala import items
from plait.sql.catalyst.tree_json import Tree, parse_tree, trees

_EXPRESSIONS = "catalyst.expressions."
_QUERIES = frozenset((
    "Project", "Filter", "Join", "LateralJoin", "SubqueryAlias", "Aggregate", "Distinct", "Sort", "GlobalLimit",
    "LocalLimit", "LimitAll", "Offset", "Union", "Intersect", "Except", "WithWindowDefinition", "Pivot", "Unpivot",
    "Generate", "UnresolvedWith", "UnresolvedHint", "OneRowRelation", "LocalRelation", "Sample",
    "RepartitionByExpression", "Repartition", "RebalancePartitions", "PipeOperator", "UnresolvedRelation",
    "UnresolvedSubqueryColumnAliases", "UnresolvedInlineTable", "UnresolvedHaving", "UnresolvedQualify",
    "UnresolvedTVFAliases", "UnresolvedTableValuedFunction",
))  # fmt: skip
_PARTS_OF_EXPRESSIONS = frozenset((
    "UnresolvedStar", "UnresolvedStarExceptOrReplace", "UnresolvedRegex", "UnresolvedAlias", "UnresolvedAttribute",
    "UnresolvedFunction", "UnresolvedGenerator", "UnresolvedExtractValue", "UnresolvedOrdinal",
    "UnresolvedPipeAggregateOrdinal", "MultiAlias", "NamedParameter", "PosParameter", "UnresolvedSeed",
    "UnresolvedWithinGroup",
))  # fmt: skip
_PACKAGES = ("catalyst.plans.logical.", "catalyst.analysis.")
_NULL_FIELDS = {("Join", "hint"), ("UnresolvedRelation", "options"), ("LocalRelation", "data")}
"""What Catalyst does not write as JSON, of operators that hold no expression or plan in it."""
_WINDOWS = ("WithWindowDefinition", "windowDefinitions")
_REFLECTION = ("reflect", "java_method", "try_reflect")
_IDENTIFIER = ("UNSUPPORTED", "IDENTIFIER(…)", "write the name itself")
_COMMAND = ("UNSUPPORTED", "a command", SELECT)
_REFUSED = {
    "InsertIntoStatement": _COMMAND,
    "PlanWithUnresolvedIdentifier": _IDENTIFIER,
    "ExpressionWithUnresolvedIdentifier": _IDENTIFIER,
    "ScriptTransformation": ("UNSUPPORTED", "a script (TRANSFORM, MAP or REDUCE … USING)", SELECT),
    "RelationTimeTravel": ("UNSUPPORTED", "VERSION or TIMESTAMP AS OF", "leave it out"),
    "NamedStreamingRelation": ("UNSUPPORTED", "STREAM", "write the stream's name only"),
    "UnresolvedEventTimeWatermark": (
        "UNSUPPORTED",
        "WATERMARK",
        "call withWatermark on the stream's DataFrame before registering the stream",
    ),
}


def tables_of_text(spark: Any, sql: str, known: Sequence[str], functions: Container[str]) -> list[str]:
    """The tables that a text names, as a session's settings read it; Spark's ParseException if it cannot be parsed."""
    state = spark._jsparkSession.sessionState()
    parsed = state.sqlParser().parsePlan(sql)
    return tables_read(parsed, known, bool(state.conf().caseSensitiveAnalysis()), functions)


def tables_read(
    parsed: Any, known: Sequence[str], case_sensitive: bool, functions: Container[str] = (), text: str | None = None
) -> list[str]:
    """The tables that a parsed query names, CTEs apart, each once; a QueryError for anything that is not a query.

    `known` are names for error messages, `functions` the table-valued functions that may be called.  The parts of a
    name are joined by `, `, so that no name of several parts can be taken for one of one part.  `text` is the plan's
    JSON, if it is known.
    """
    root = parse_tree(parsed.toJSON() if text is None else text)
    if root.name not in _QUERIES and root.name not in _REFUSED:
        raise refusal(_COMMAND)
    return list(dict.fromkeys(_Text(parsed, known, case_sensitive, functions).tables(root, frozenset())))


def refuse_expression(parsed: Any) -> None:
    """Raise a QueryError if an expression, as it was parsed, looks at more than a row or calls what it must not."""
    root = parse_tree(parsed.toJSON())
    if any(node.name in SUBQUERIES for node in root.walk()):
        raise QueryError("UNSUPPORTED", "it holds a sub-query, but a row is looked at by itself", "")
    for node in root.walk():
        _refuse_node(node)


class _Text:
    """One text while it is looked at."""

    def __init__(self, parsed: Any, known: Sequence[str], case_sensitive: bool, functions: Container[str]) -> None:
        self._parsed = parsed
        self._known = list(known)
        self._case_sensitive = case_sensitive
        self._functions = functions

    def tables(self, node: Tree, ctes: frozenset[str]) -> Iterator[str]:
        """The tables at and below a node, where these CTEs are in scope."""
        _refuse_node(node)
        if node.name == "UnresolvedWith":
            yield from self._with(node, ctes)
            return
        if node.name == "UnresolvedRelation":
            name = _parts(node)
            if self._folded(name) not in ctes:
                yield name
        elif node.name == "UnresolvedTableValuedFunction":
            name = _parts(node)
            if name.lower() not in self._functions:
                raise not_a_stream("", f"{name.replace(', ', '.')}(…)", self._known)
        elif node.name == _WINDOWS[0]:
            for definition in _window_definitions(self._parsed):
                yield from self.tables(definition, ctes)
        for below in (*node.nested(), *node.children):
            yield from self.tables(below, ctes)

    def _with(self, node: Tree, ctes: frozenset[str]) -> Iterator[str]:
        """A CTE is seen by those after it and by the query; with RECURSIVE also by itself."""
        for definition in node.fields["cteRelations"]:
            name = self._folded(str(definition["_1"]))
            if ", " in name:
                raise QueryError(
                    "NAME", f"{name!r} cannot name a sub-query in WITH", "use letters, digits, underscores"
                )
            inner = ctes | {name} if node.fields.get("allowRecursion") else ctes
            for body in trees(definition["_2"]):
                yield from self.tables(body, inner)
            ctes |= {name}
        for below in node.children:
            yield from self.tables(below, ctes)

    def _folded(self, name: str) -> str:
        return name if self._case_sensitive else name.lower()


def _refuse_node(node: Tree) -> None:
    if node.name in _REFUSED:
        raise refusal(_REFUSED[node.name])
    if node.name in ("UnresolvedFunction", "UnresolvedGenerator"):
        called = _parts(node).lower().split(", ")[-1]
        if called in _REFLECTION:
            raise refusal(("UNSUPPORTED", f"{called}(…), a call of a Java method", SELECT))
    if node.kind.startswith(_EXPRESSIONS):
        return
    if not node.kind.startswith(_PACKAGES) or node.name not in _QUERIES | _PARTS_OF_EXPRESSIONS:
        raise refusal_of(node.name)
    # Fail on what cannot be seen.
    for field, value in node.fields.items():
        hidden = value is None or (isinstance(value, list) and None in value)
        if hidden and (node.name, field) not in _NULL_FIELDS and (node.name, field) != _WINDOWS:
            raise refusal_of(f"{node.name} with {field}")


def _parts(node: Tree) -> str:
    """The parts of a name, joined by `, `."""
    for field in ("multipartIdentifier", "nameParts", "name"):
        value = node.fields.get(field)
        if isinstance(value, str):
            return value.removeprefix("[").removesuffix("]")
        if isinstance(value, dict):
            return str(value.get("funcName", ""))
    raise refusal_of(f"{node.name} without a name")


def _window_definitions(parsed: Any) -> list[Tree]:
    """What WINDOW clauses anywhere in a plan define."""
    found = [
        parse_tree(definition.toJSON())
        for plan in _with_windows(parsed)
        for definition in items(plan.windowDefinitions().values().toSeq())
    ]
    # A clause inside of a definition would not be found here.
    if not found or any(node.name == _WINDOWS[0] for definition in found for node in definition.walk()):
        raise refusal(("UNSUPPORTED", "a WINDOW clause inside of another", "write the window's definition after OVER"))
    return found


def _with_windows(plan: Any) -> Iterator[Any]:
    if plan.nodeName() == _WINDOWS[0]:
        yield plan
    for below in (*items(plan.children()), *items(plan.innerChildren())):
        yield from _with_windows(below)
