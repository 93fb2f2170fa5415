"""Catalyst's plans as inert values: one call of the JVM reads a whole plan.

Asked node by node, a plan of three joins costs nine hundred calls of 0.1 ms; Catalyst's own `toJSON` is one call, but
looks every field up by reflection and takes longer still (and leaves out metadata and evaluation modes).  So a small
Java class walks the plan in the JVM and writes down what Plait looks at.  Spark's own compiler (Janino, which compiles
the code that Spark generates) compiles it, once for a JVM.

Objects stay in the JVM, numbered; one that has to be put into another plan is fetched by its number when that happens.
In the SQL text of an expression, every attribute is a back-quoted token with its expression id; wrappers that only help
Spark's code generator are left out.  Nothing here imports pyspark; JVM objects are `Any`.

Cost: about half a second for the first plan of a JVM, then 0.2 ms and a few microseconds per node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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
UNKNOWN: Any = object()
"""The value of a constant that only the JVM can hold."""

_JAVA = r"""
package plait;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashSet;
import java.util.List;
import java.util.TreeSet;
import org.apache.spark.api.python.PythonUtils;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.plans.logical.Join;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.SubqueryAlias;
import org.apache.spark.unsafe.types.UTF8String;
import scala.collection.Iterator;
import scala.collection.immutable.Seq;

public class PlanReader {
  private static final HashSet SKIPPED = new HashSet(Arrays.asList("@SKIPPED@".split(" ")));
  // The texts of all parts of a very deep expression would be too long together: the longest are left out.
  private static final int MOST_TEXT = 1000000;
  private final ArrayList objects = new ArrayList();
  private final StringBuilder out = new StringBuilder();
  private final TreeSet names = new TreeSet();
  private boolean outline;

  public PlanReader fresh() { return new PlanReader(); }

  public Object get(int place) { return objects.get(place); }

  /** A plan with its expressions; of an outline, the names of all expressions' classes only. */
  public String plan(LogicalPlan plan, boolean outline) {
    this.outline = outline;
    out.setLength(0);
    out.append("{\"plan\":");
    write(plan);
    out.append(",\"deterministic\":").append(plan.deterministic()).append(",\"names\":[");
    int place = 0;
    for (java.util.Iterator i = names.iterator(); i.hasNext(); place++) {
      if (place > 0) out.append(',');
      text((String) i.next());
    }
    return out.append("]}").toString();
  }

  public String expression(Expression expression) {
    out.setLength(0);
    write(clean(expression));
    return out.toString();
  }

  private void write(LogicalPlan plan) {
    out.append("{\"kind\":");
    text(plan.nodeName());
    out.append(",\"class\":");
    text(plan.getClass().getName());
    keep(plan);
    Seq children = plan.children();
    if (plan instanceof Join) {
      Object kind = ((Join) plan).joinType();
      // EXISTS (…) below an OR: a column that says whether there is a partner.  It has no name in SQL.
      boolean exists = kind.toString().startsWith("ExistenceJoin");
      out.append(",\"join\":");
      text(exists ? "EXISTENCE" : ((Join) plan).joinType().sql());
    }
    if (plan instanceof SubqueryAlias) {
      out.append(",\"alias\":");
      text(((SubqueryAlias) plan).alias());
    }
    output(plan, children.isEmpty());
    expressions(plan);
    plans(",\"children\":[", children);
    plans(",\"subqueries\":[", plan.subqueries());
    out.append('}');
  }

  private void plans(String label, Seq plans) {
    if (plans.isEmpty()) return;
    String between = label;
    for (Iterator i = plans.iterator(); i.hasNext(); between = ",") {
      out.append(between);
      write((LogicalPlan) i.next());
    }
    out.append(']');
  }

  private void output(LogicalPlan plan, boolean leaf) {
    Seq output = plan.output();
    String between = "";
    out.append(",\"output\":[");
    for (Iterator i = output.iterator(); i.hasNext(); between = ",") {
      Attribute attribute = (Attribute) i.next();
      out.append(between).append('[').append(attribute.exprId().id()).append(',');
      text(attribute.name());
      out.append(',');
      text(outline ? "" : attribute.dataType().catalogString());
      out.append(']');
    }
    out.append(']');
    if (leaf && !output.isEmpty()) {
      Attribute first = (Attribute) output.head();
      if (first.metadata().contains("@STREAM_KEY@")) {
        out.append(",\"stream\":");
        text(first.metadata().getString("@STREAM_KEY@"));
      }
    }
  }

  private void expressions(LogicalPlan plan) {
    String between = ",\"expressions\":[";
    boolean any = false;
    for (Iterator i = plan.expressions().iterator(); i.hasNext(); any = true) {
      Expression expression = (Expression) i.next();
      if (outline) { name(expression); continue; }
      out.append(between).append('[');
      out.append(expression instanceof NamedExpression ? ((NamedExpression) expression).exprId().id() : -1L);
      out.append(',');
      write(clean(expression));
      out.append(']');
      between = ",";
    }
    if (any && !outline) out.append(']');
  }

  private void name(Expression expression) {
    names.add(expression.nodeName());
    for (Iterator i = expression.children().iterator(); i.hasNext(); ) name((Expression) i.next());
  }

  private Expression clean(Expression expression) {
    if (expression instanceof AttributeReference) {
      AttributeReference attribute = (AttributeReference) expression;
      Seq nobody = PythonUtils.toSeq(new ArrayList());
      return (Expression) attribute.withQualifier(nobody).withName("@ID_MARK@" + attribute.exprId().id());
    }
    Seq children = expression.children();
    if (SKIPPED.contains(expression.nodeName())) return clean((Expression) children.head());
    if (children.isEmpty()) return expression;
    List cleaned = new ArrayList();
    for (Iterator i = children.iterator(); i.hasNext(); ) cleaned.add(clean((Expression) i.next()));
    return (Expression) expression.withNewChildren(PythonUtils.toSeq(cleaned));
  }

  private void write(Expression expression) {
    out.append("{\"name\":");
    text(expression.nodeName());
    keep(expression);
    if (expression instanceof AttributeReference) {
      out.append(",\"id\":").append(((AttributeReference) expression).exprId().id()).append('}');
      return;
    }
    out.append(",\"type\":");
    text(typeOf(expression));
    if (expression instanceof Literal) value(((Literal) expression).value());
    String sql = out.length() < MOST_TEXT ? sqlOf(expression) : null;
    if (sql != null) {
      out.append(",\"sql\":");
      text(sql);
    }
    String between = ",\"args\":[";
    boolean any = false;
    for (Iterator i = expression.children().iterator(); i.hasNext(); between = ",", any = true) {
      out.append(between);
      write((Expression) i.next());
    }
    out.append(any ? "]}" : "}");
  }

  private String typeOf(Expression expression) {
    // Not every part of a window has a type.
    try { return expression.dataType().catalogString(); } catch (Throwable nothing) { return ""; }
  }

  private String sqlOf(Expression expression) {
    try { return expression.sql(); } catch (Throwable nothing) { return null; }
  }

  private void value(Object value) {
    if (value == null) out.append(",\"value\":null");
    else if (value instanceof UTF8String || value instanceof Double) {
      out.append(",\"value\":");
      text(value.toString());
    }
    else if (value instanceof Boolean || value instanceof Integer || value instanceof Long || value instanceof Short
        || value instanceof Byte) out.append(",\"value\":").append(value.toString());
  }

  private void keep(Object object) {
    out.append(",\"at\":").append(objects.size());
    objects.add(object);
  }

  private void text(String text) {
    out.append('"');
    for (int i = 0; i < text.length(); i++) {
      char c = text.charAt(i);
      if (c == '"' || c == '\\') out.append('\\').append(c);
      else if (c < ' ' || Character.isSurrogate(c)) {
        String hex = Integer.toHexString(c);
        out.append("\\u").append("0000".substring(hex.length())).append(hex);
      }
      else out.append(c);
    }
    out.append('"');
  }
}
"""


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
        return _written(json.loads(reader.expression(expression)), reader)

    def _plan(self, plan: Any, outline: bool) -> MirroredPlan:
        reader = self._reader.fresh()
        found = json.loads(reader.plan(plan, outline))
        return MirroredPlan(_mirror(found["plan"], reader), found["deterministic"], frozenset(found["names"]))


@lru_cache(maxsize=2)
def _compiled(jvm: Any) -> Any:
    """The Java class in this JVM: an object that makes readers."""
    source = _JAVA.replace("@SKIPPED@", " ".join(sorted(SKIPPED)))
    source = source.replace("@STREAM_KEY@", STREAM_KEY).replace("@ID_MARK@", ID_MARK)
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader())
    compiler.cook(source)
    return compiler.getClassLoader().loadClass("plait.PlanReader").newInstance()


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
