"""Catalyst's plans as inert values: one call of the JVM reads a whole plan.

Asked node by node, a plan of three joins costs nine hundred calls of 0.1 ms; Catalyst's own `toJSON` is one call, but
leaves out types, metadata, evaluation modes and the expressions' SQL text.  So a small Java class, `PlanReader.java`,
walks the plan in the JVM and writes down what Plait looks at.  Spark's own compiler (Janino, for the code that
Spark generates) compiles it once for a JVM.  A long answer is fetched in pieces: py4j's answers of more than 8 KB take
40 ms each.

Objects stay in the JVM, numbered; one that has to be put into another plan is fetched by its number when that happens.
In the SQL text of an expression, every attribute is a back-quoted token with its expression id; wrappers that only help
Spark's code generator are left out.  Nothing here imports pyspark; JVM objects are `Any`.

Cost: up to a second for the first plan of a JVM, then about a millisecond per plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import Any

STREAM_KEY = "plait.stream"
"""Metadata of a stub's columns: the stream that the stub stands for."""
ID_MARK = "\ue001"
"""Begins the token that stands for an attribute; its expression id follows."""
SKIPPED = frozenset((
    "Alias", "KnownFloatingPointNormalized", "NormalizeNaNAndZero", "KnownNotNull", "KnownNullable",
    "KnownNotContainsNull", "PromotePrecision", "TempResolvedColumn",
))  # fmt: skip
"""Wrappers that tell Spark's code generator something and change no value that a join could see."""
PIECE = 4000
"""Characters of an answer that come in one call."""
UNKNOWN: Any = object()
"""The value of a constant that only the JVM can hold."""


@dataclass(eq=False)
class Written:
    """An expression as it stands in a plan: its class, type and text, and where the JVM keeps it."""

    name: str
    type: str
    sql: str | None
    args: tuple[Written, ...]
    id: int | None
    """Of an attribute: its expression id."""
    value: Any
    """Of a constant: UNKNOWN if only the JVM can hold it."""
    fetch: Callable[[], Any] = field(repr=False)

    @cached_property
    def jvm(self) -> Any:
        """The expression itself, its attributes called by their tokens."""
        return self.fetch()


@dataclass(eq=False)
class PlanMirror:
    """An operator of a plan, with what it reads."""

    kind: str
    class_name: str
    output: tuple[tuple[int, str, str], ...]
    """Expression id, name and type of its columns."""
    stream: str | None
    """Of a leaf: the stream that it stands for."""
    join_type: str | None
    """`INNER`, `LEFT OUTER` …; None if it is no join."""
    alias: str | None
    expressions: tuple[tuple[int, Written], ...]
    """With the expression id of each that has a name, else −1."""
    children: tuple[PlanMirror, ...]
    subqueries: tuple[PlanMirror, ...]
    fetch: Callable[[], Any] = field(repr=False)

    @cached_property
    def jvm(self) -> Any:
        """The operator itself."""
        return self.fetch()

    @property
    def first_id(self) -> int:
        """The expression id of its first column; it tells two uses of one stream apart.  −1 if it has none."""
        return self.output[0][0] if self.output else -1

    def walk(self) -> Iterator[PlanMirror]:
        """This operator and all below it, those of sub-queries included."""
        yield self
        for below in (*self.children, *self.subqueries):
            yield from below.walk()


@dataclass(eq=False)
class MirroredPlan:
    """A whole plan."""

    root: PlanMirror
    deterministic: bool
    names: frozenset[str]
    """Of an outline: the classes of all expressions in it."""


class PlanReader:
    """Reads plans of one JVM."""

    def __init__(self, jvm: Any) -> None:
        self._reader = _compiled(jvm)

    def outline(self, plan: Any) -> MirroredPlan:
        """A plan without its expressions: only their classes are told."""
        return self._plan(plan, True)

    def plan(self, plan: Any) -> MirroredPlan:
        """A plan with its expressions."""
        return self._plan(plan, False)

    def expression(self, expression: Any) -> Written:
        """An expression by itself."""
        reader = self._reader.fresh()
        return _written(json.loads(_whole(reader, reader.expression(expression))), reader)

    def json(self, tree: Any) -> str:
        """Catalyst's own JSON of a plan or an expression."""
        reader = self._reader.fresh()
        return _whole(reader, reader.json(tree))

    def _plan(self, plan: Any, outline: bool) -> MirroredPlan:
        reader = self._reader.fresh()
        found = json.loads(_whole(reader, reader.plan(plan, outline)))
        return MirroredPlan(_mirror(found["plan"], reader), found["deterministic"], frozenset(found["names"]))


@lru_cache(maxsize=2)
def _compiled(jvm: Any) -> Any:
    """The Java class in this JVM: an object that makes readers."""
    source = files("plait.sql.catalyst").joinpath("PlanReader.java").read_text(encoding="utf-8")
    put_in = {"@SKIPPED@": " ".join(sorted(SKIPPED)), "@STREAM_KEY@": STREAM_KEY, "@ID_MARK@": ID_MARK}
    put_in["@PIECE@"] = str(PIECE)
    for name, text in put_in.items():
        source = source.replace(name, text)
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader())
    compiler.cook(source)
    return compiler.getClassLoader().loadClass("plait.PlanReader").newInstance()


def _whole(reader: Any, first: str) -> str:
    """All pieces of an answer."""
    pieces = [first]
    while len(pieces[-1]) == PIECE:
        pieces.append(reader.more())
    return "".join(pieces)


def _mirror(found: dict[str, Any], reader: Any) -> PlanMirror:
    place = found["at"]
    return PlanMirror(
        kind=found["kind"],
        class_name=found["class"],
        output=tuple((id, name, kind) for id, name, kind in found["output"]),
        stream=found.get("stream"),
        join_type=found.get("join"),
        alias=found.get("alias"),
        expressions=tuple((id, _written(e, reader)) for id, e in found.get("expressions", ())),
        children=tuple(_mirror(below, reader) for below in found.get("children", ())),
        subqueries=tuple(_mirror(below, reader) for below in found.get("subqueries", ())),
        fetch=lambda: reader.get(place),
    )


def _written(found: dict[str, Any], reader: Any) -> Written:
    place, value = found["at"], found.get("value", UNKNOWN)
    kind = found.get("type", "")
    if kind == "double" and isinstance(value, str):
        value = float(value)
    return Written(
        name=found["name"],
        type=kind,
        sql=found.get("sql"),
        args=tuple(_written(arg, reader) for arg in found.get("args", ())),
        id=found.get("id"),
        value=value,
        fetch=lambda: reader.get(place),
    )
