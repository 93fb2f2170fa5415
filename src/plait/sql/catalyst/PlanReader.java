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
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.unsafe.types.UTF8String;
import scala.collection.Iterator;
import scala.collection.immutable.Seq;

/**
 * Walks a Catalyst plan inside of the JVM and writes down, as JSON, what Plait looks at (see plan_reader.py).
 *
 * Compiled by Janino, which knows no generics to speak of and no lambdas.  Names between @ are put in by plan_reader.py.
 */
public class PlanReader {
  private static final HashSet SKIPPED = new HashSet(Arrays.asList("@SKIPPED@".split(" ")));
  // An answer of more than 8 KB leaves the JVM in two packets, and the second one waits 40 ms for the first to be
  // acknowledged.  Every character is one byte, two where py4j escapes it.
  private static final int PIECE = @PIECE@;
  // The texts of all parts of a very deep expression would be too long together: the longest are left out.
  private static final int MOST_TEXT = 1000000;
  private final ArrayList objects = new ArrayList();
  private final StringBuilder out = new StringBuilder();
  private final TreeSet names = new TreeSet();
  private boolean outline;
  private int told;

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
    out.append("]}");
    return more();
  }

  public String expression(Expression expression) {
    out.setLength(0);
    write(clean(expression));
    return more();
  }

  /** Catalyst's own JSON of a plan or an expression, in ASCII. */
  public String json(TreeNode tree) {
    String whole = tree.toJSON();
    for (int i = 0; i < whole.length(); i++) ascii(whole.charAt(i));
    return more();
  }

  /** The next piece of what was read; only the last one is shorter than PIECE. */
  public String more() {
    int end = Math.min(out.length(), told + PIECE);
    String piece = out.substring(told, end);
    told = end;
    return piece;
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
      else ascii(c);
    }
    out.append('"');
  }

  private void ascii(char c) {
    if (c >= ' ' && c <= '~') { out.append(c); return; }
    String hex = Integer.toHexString(c);
    out.append("\\u").append("0000".substring(hex.length())).append(hex);
  }
}
