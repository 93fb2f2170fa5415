"""Catalyst expressions as Python sees them: nodes resolved down to columns of the streams, and printed as SQL text.

A `Node` is made of what `plan_reader` has read: names that sub-queries gave are substituted, so that every attribute is
a column of a stream.  In its template, the SQL text, every column is a token that no SQL text contains; both renderings
are made from it: over a stream's own columns (`upper(s)`), and over joined rows, where the column `s` of alias `b` is
the one back-quoted name `b.s`.

Cost: no call of the JVM, unless a node is put into another plan or says what the reader does not write down.  Nothing
here imports pyspark; JVM objects are `Any`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from plait.errors import QueryError
from plait.sql.catalyst.plan_reader import ID_MARK, UNKNOWN, Written

_MARK = "\ue000"
_TOKEN = re.compile(f"`{_MARK}(\\d+)\\.(\\d+)`")
_ID = re.compile(f"`{ID_MARK}(\\d+)`")
_BARE_ID = re.compile(f"{ID_MARK}(\\d+)")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Classes whose `sql()` is known to parse back to the same; others are read back once before they are trusted.
_FAITHFUL = frozenset((
    "AttributeReference", "Literal", "And", "Or", "Not", "IsNull", "IsNotNull", "EqualTo", "EqualNullSafe",
    "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "In", "Cast", "Coalesce", "Upper", "Lower",
    "Length", "Substring", "StartsWith", "EndsWith", "Contains", "Year", "Month", "DayOfMonth", "Hour", "Minute",
    "Second",
))  # fmt: skip
_COMPARING = ("EqualTo", "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the `leaf`-th stream occurrence in the plan; `index` is its place in the stream's schema."""

    leaf: int
    index: int
    name: str


@dataclass(frozen=True, eq=False)
class Node:
    """A resolved expression: its Catalyst class name and its arguments."""

    name: str
    args: tuple[Node, ...]
    make: Callable[[], Any] = field(repr=False)
    """Gives the JVM object."""
    column: Column | None = None
    written: Written | None = field(default=None, repr=False)
    """The expression before it was resolved."""
    text: str | None = field(default=None, repr=False)
    """The template, if it is known without asking the JVM."""
    known_type: str | None = field(default=None, repr=False)

    @cached_property
    def jvm(self) -> Any:
        """The resolved expression in the JVM."""
        return self.make()

    @property
    def unresolved(self) -> Any:
        """An expression in the JVM that differs from this one in its arguments only."""
        return self.jvm if self.written is None else self.written.jvm

    @cached_property
    def value(self) -> Any:
        """Of a constant: its value, as Python has it where it can."""
        if self.written is not None and self.written.value is not UNKNOWN:
            return self.written.value
        value = self.unresolved.value()
        return str(value.toString()) if self.type == "string" and value is not None else value

    @cached_property
    def type(self) -> str:
        """Spark's simple type string, never abbreviated."""
        return self.known_type or str(self.jvm.dataType().catalogString())

    @cached_property
    def template(self) -> str:
        """SQL text with a token in place of every column."""
        return str(self.jvm.sql()) if self.text is None else self.text

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


def resolve(written: Written, known: Mapping[int, Node], to_seq: Any) -> Node:
    """The node of an expression; `known` defines its attributes by expression id, `to_seq` makes Scala sequences."""
    if written.id is not None:
        return known[written.id]
    args = tuple(resolve(arg, known, to_seq) for arg in written.args)

    def make() -> Any:
        return written.jvm.withNewChildren(to_seq([arg.jvm for arg in args])) if args else written.jvm

    text = written.sql
    if text is not None and ID_MARK in text:
        # An expression's text is made of its arguments' texts: what an attribute stands for can be put in its place.
        text = _ID.sub(lambda match: known[int(match[1])].template, text)
        text = _BARE_ID.sub(lambda match: known[int(match[1])].template.strip("`"), text)
    return Node(written.name, args, make, None, written, text, written.type or None)


def live(jvm: Any, column: Column | None = None) -> Node:
    """The node of an attribute that is there in the JVM, as it is called there."""
    return Node("AttributeReference", (), lambda: jvm, column)


def column_node(attribute: Callable[[], Any], column: Column, kind: str, to_seq: Any) -> Node:
    """The node of a stream's column; in the JVM it is called by a token."""
    token = f"{_MARK}{column.leaf}.{column.index}"

    def make() -> Any:
        return attribute().withQualifier(to_seq([])).withName(token)

    return Node("AttributeReference", (), make, column, None, f"`{token}`", kind)


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
