"""Catalyst expressions as Python sees them: nodes read from the JVM once, and printed as canonical SQL text.

A `Node` mirrors a JVM expression whose attributes have been resolved down to columns of the streams: names that
sub-queries gave are substituted, wrappers that only help Spark's code generator are skipped.  In the JVM every column
is renamed to a token that no SQL text contains, so one call of `sql()` yields a template from which both renderings
are made: over a stream's own columns (`upper(s)`), and over joined rows, where the column `s` of alias `b` is the one
back-quoted name `b.s`.

Cost: a handful of py4j calls (about 0.1 ms each) per node.  Nothing here imports pyspark; JVM objects are `Any`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from plait.errors import QueryError

_MARK = "\ue000"
_TOKEN = re.compile(f"`{_MARK}(\\d+)\\.(\\d+)`")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Classes whose `sql()` is known to parse back to the same; others are read back once before they are trusted.
_FAITHFUL = frozenset((
    "AttributeReference", "Literal", "And", "Or", "Not", "IsNull", "IsNotNull", "EqualTo", "EqualNullSafe",
    "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "In", "Cast", "Coalesce", "Upper", "Lower",
    "Length", "Substring", "StartsWith", "EndsWith", "Contains", "Year", "Month", "DayOfMonth", "Hour", "Minute",
    "Second",
))  # fmt: skip
_COMPARING = ("EqualTo", "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual")

# Wrappers that tell Spark's code generator something and change no value that a join could see.
SKIPPED = frozenset((
    "Alias", "KnownFloatingPointNormalized", "NormalizeNaNAndZero", "KnownNotNull", "KnownNullable",
    "KnownNotContainsNull", "PromotePrecision", "TempResolvedColumn",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the `leaf`-th stream occurrence in the plan; `index` is its place in the stream's schema."""

    leaf: int
    index: int
    name: str


@dataclass(frozen=True, eq=False)
class Node:
    """A resolved expression: its Catalyst class name, its arguments, and the JVM object."""

    name: str
    args: tuple[Node, ...]
    jvm: Any = field(repr=False)
    column: Column | None = None

    @cached_property
    def type(self) -> str:
        """Spark's simple type string, never abbreviated."""
        return str(self.jvm.dataType().catalogString())

    @cached_property
    def template(self) -> str:
        """SQL text with a token in place of every column."""
        return str(self.jvm.sql())

    @cached_property
    def leaves(self) -> frozenset[int]:
        """The stream occurrences whose columns are read."""
        return frozenset(c.leaf for c in self.columns)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns read, first use first."""
        return tuple(dict.fromkeys(n.column for n in self.walk() if n.column is not None))

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for arg in self.args:
            yield from arg.walk()


def read(jvm: Any, known: Mapping[int, Node], to_seq: Any) -> Node:
    """Mirror a JVM expression; `known` defines its attributes by expression id, `to_seq` makes Scala sequences."""
    name = str(jvm.nodeName())
    if name == "AttributeReference":
        return known[jvm.exprId().id()]
    children = jvm.children()
    args = tuple(read(children.apply(i), known, to_seq) for i in range(children.size()))
    if name in SKIPPED:
        return args[0]
    if args:
        jvm = jvm.withNewChildren(to_seq([arg.jvm for arg in args]))
    return Node(name, args, jvm)


def column_node(attribute: Any, column: Column, nil: Any) -> Node:
    """The node of a stream's column; in the JVM it is called by a token."""
    named = attribute.withQualifier(nil).withName(f"{_MARK}{column.leaf}.{column.index}")
    return Node("AttributeReference", (), named, column)


def conjuncts(node: Node) -> Iterator[Node]:
    """The conditions that AND ties together at the top."""
    if node.name == "And":
        for arg in node.args:
            yield from conjuncts(arg)
    else:
        yield node


def prints_faithfully(node: Node) -> bool:
    """Whether the node's text certainly means the node; `t + INTERVAL` prints bare, which is safe in a comparison."""
    return node.name in _FAITHFUL and all(
        prints_faithfully(arg)
        or (node.name in _COMPARING and arg.name == "TimestampAddInterval" and all(map(prints_faithfully, arg.args)))
        for arg in node.args
    )


def quote(name: str) -> str:
    """A back-quoted identifier.

    >>> quote("a.k"), quote("odd`name")
    ('`a.k`', '`odd``name`')
    """
    return "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True)
class Printer:
    """Prints nodes; knows what the aliases and their columns are called, and which words need quotes."""

    aliases: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    reserved: frozenset[str]

    def over_stream(self, node: Node) -> str:
        """Text over the columns of the one stream the node reads."""
        return self._render(node, lambda leaf, name: self.identifier(name))

    def over_join(self, node: Node) -> str:
        """Text over joined rows, whose columns are called `alias.column`."""
        return self._render(node, lambda leaf, name: quote(f"{self.aliases[leaf]}.{name}"))

    def identifier(self, name: str) -> str:
        """A column name as it may stand in SQL: plain where it can be, back-quoted where it must be."""
        return name if _PLAIN.fullmatch(name) and name.upper() not in self.reserved else quote(name)

    def _render(self, node: Node, name_of: Any) -> str:
        def one(match: re.Match[str]) -> str:
            leaf, index = int(match[1]), int(match[2])
            return str(name_of(leaf, self.columns[leaf][index]))

        text = _TOKEN.sub(one, node.template)
        if _MARK in text:
            raise unprintable(re.sub(f"{_MARK}(\\d+)\\.(\\d+)", one, text))
        return text


def unprintable(text: str) -> QueryError:
    """The refusal of an expression that Catalyst cannot write back as SQL."""
    return QueryError(
        "UNSUPPORTED",
        f"Catalyst rewrote an expression to {text}, which cannot be written back as SQL",
        "compute it as a column of the stream's DataFrame before registering the stream, or on the results",
    )
