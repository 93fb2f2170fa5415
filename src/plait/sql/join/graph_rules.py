"""From a multi-way join to a JoinGraph: every rule takes from the pending conjuncts what it understands.

    push_filters         over one alias            → its filter, evaluated before the exchange
    take_equalities      column = column           → keys; widening integer casts are dropped, the hash is the same
    take_windows         bounds on event times     → windows
    take_conditions      whatever is left          → conditions, native where a task can evaluate them
    reconnect_constants  a.x = 5 AND b.y = 5       → the key that constant propagation hid
    filter_twin_keys     a.x = b.k AND a.y = b.k   → a filter x = y, since an alias carries a key once
    take_outputs         the SELECT list

A rule leaves the draft in a valid state, so their order is the order of reading, and only that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from plait.errors import QueryError
from plait.query.expr import Call, ColumnRef, Expr, columns_of, may_fail
from plait.query.graph import Alias, Condition, Equality, JoinGraph, Output, Window
from plait.query.relation import ColumnDef, Relation
from plait.query.types import INTEGRAL
from plait.sql.catalyst.expressions import Node, Printer, quote
from plait.sql.catalyst.refusals import always_false
from plait.sql.join import windows
from plait.sql.join.column_types import refuse_type
from plait.sql.join.multiway import MultiwayJoin
from plait.sql.join.output_expressions import output_expr
from plait.sql.join.task_expressions import COMPARISONS, Translator, is_total, literal, widens


@dataclass
class Draft:
    """A graph in the making."""

    join: MultiwayJoin
    names: tuple[str, ...]
    output_names: tuple[str, ...]
    relations: Mapping[str, Relation]
    printer: Printer
    pending: list[Node]
    filters: list[dict[str, Node | None]]
    ttls: Mapping[str, int] = field(default_factory=dict)
    equalities: dict[Equality, Node | None] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    conditions: list[Condition] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    columns: dict[ColumnRef, tuple[ColumnDef, Node]] = field(default_factory=dict)
    left_to_spark: list[Node] = field(default_factory=list)
    computes: bool = False
    """Whether tasks compute outputs: joined rows are the query's answer, and nothing else reads them."""

    def column(self, node: Node) -> ColumnRef:
        """The physical column of a node over one alias; a constant is put on the first alias."""
        leaf = min(node.leaves, default=0)
        refuse_type(node.type, self.printer.over_join(node))
        if node.column is not None:
            # Catalyst shows a user-defined type as what it is stored as; the schema still knows it.
            refuse_type(self.relations[self.join.leaves[leaf].relation].type_of(node.column.name), node.column.name)
            name, sql = node.column.name, quote(node.column.name)
        else:
            sql = self._guarded(leaf, node)
            name = "=" + sql
        ref = ColumnRef(self.names[leaf], name, node.type)
        self.columns[ref] = ColumnDef(name, sql, node.type), node
        return ref

    def _guarded(self, leaf: int, node: Node) -> str:
        """A computation that may fail is made only for rows that pass the alias's filter.

        Other aliases and queries may let more rows of the same stream through.
        """
        guards = {text: n for text, n in self.filters[leaf].items() if n is not None and n.name != "IsNotNull"}
        text = self.printer.over_stream(node)
        return text if is_total(node) or not guards else f"if({conjunction(guards)}, {text}, NULL)"

    def is_at_hand(self, node: Node) -> bool:
        """Whether a node over one alias is, or may become, a physical column: it cannot fail, or it is a key anyway."""
        return len(node.leaves) <= 1 and (
            is_total(node) or any(self.column(node) in (e.left, e.right) for e in self.equalities)
        )

    def base_columns(self, node: Node) -> tuple[ColumnRef, ...]:
        """The streams' own columns that a node reads."""
        return tuple(self.column(self.join.leaves[c.leaf].columns[c.index]) for c in node.columns)

    @property
    def streams(self) -> dict[str, Relation]:
        """The relations by alias, with the TTLs of the query's hints."""
        found = {name: self.relations[leaf.relation] for name, leaf in zip(self.names, self.join.leaves, strict=True)}
        return {name: replace(r, ttl_us=self.ttls.get(name, r.ttl_us)) for name, r in found.items()}


def push_filters(draft: Draft) -> None:
    """Conjuncts over one alias are its filter; those over none hold for every row or for none."""
    for node in draft.pending:
        if not node.leaves and node.name == "Literal" and node.value is not True:
            raise always_false()
        if len(node.leaves) <= 1 and node.name != "Literal":
            draft.filters[min(node.leaves, default=0)][draft.printer.over_stream(node)] = node
            draft.left_to_spark.append(node)
    draft.pending = [node for node in draft.pending if len(node.leaves) > 1]


def take_equalities(draft: Draft) -> None:
    """`l = r` is a key where either side reads one alias, and not the same."""
    rest = []
    for node in draft.pending:
        sides = [_without_widening(arg) for arg in node.args] if node.name == "EqualTo" else []
        if len(sides) == 2 and all(len(s.leaves) == 1 for s in sides) and sides[0].leaves != sides[1].leaves:
            left, right = sorted(sides, key=lambda side: min(side.leaves))
            for side in (left, right):
                _refuse_collation(draft, side)
            draft.equalities.setdefault(Equality(draft.column(left), draft.column(right)), node)
        else:
            rest.append(node)
    draft.pending = rest


def _without_widening(node: Node) -> Node:
    if node.name == "Cast" and widens(node.args[0].type, node.type):
        return _without_widening(node.args[0])
    return node


def _refuse_collation(draft: Draft, key: Node) -> None:
    if any(n.name == "CollationKey" or " collate " in n.type for n in key.walk()):
        raise QueryError(
            "KEY_TYPE",
            f"a key in the alias {draft.names[min(key.leaves)]} has a collation that is not binary",
            "join on COLLATE UTF8_BINARY strings, for example a column with lower(…) computed in the DataFrame",
        )


def take_windows(draft: Draft) -> None:
    """Comparisons of event times are windows; bounds in calendar days are widened and checked again by Spark."""
    found, others, rest = [], [], []
    for node in draft.pending:
        bound, is_exact = _bound(draft, node)
        if bound is not None and windows.is_window(bound, draft.streams):
            found.append(bound)
            if is_exact:
                continue
        elif bound is not None:
            others.append(bound)
        rest.append(node)
    windows.refuse_missing_watermarks(others, draft.streams)
    for node in filter(None, draft.equalities.values()):
        bound, _ = _bound(draft, node)
        if bound is not None and windows.is_window(bound, draft.streams):
            found.append(bound)
    draft.windows = windows.merge(found)
    draft.pending = rest


def _bound(draft: Draft, node: Node) -> tuple[windows.Bound | None, bool]:
    """The bound that a conjunct states, and whether it says all that the conjunct says."""
    for loose in (False, True) if node.name in COMPARISONS else ():
        expr = Translator(draft.column, loose_days=loose)(node)
        bound = windows.read_bound(expr, draft.names) if expr is not None else None
        if bound is not None:
            return (bound.widened(windows.LOOSE_US) if loose else bound), not loose
    return None, False


def take_conditions(draft: Draft) -> None:
    """All other conjuncts over several aliases."""
    translate = Translator(draft.column)
    for node in {node.template: node for node in draft.pending}.values():
        expr = translate(node)
        refs = draft.base_columns(node) if expr is None else columns_of(expr)
        late = None
        if expr is None:
            draft.left_to_spark.append(node)
            late = _total(output_expr(node, draft.column)) if draft.computes else None
        draft.conditions.append(Condition(draft.printer.over_join(node), refs, expr or late, late is None))
    draft.pending = []


def _total(expr: Expr | None) -> Expr | None:
    """A condition is checked as soon as its columns have been joined: on rows that may not become results."""
    return None if expr is None or may_fail(expr) else expr


def reconnect_constants(draft: Draft) -> None:
    """Where equalities leave aliases apart, filters `x = c` and `y = c` with the same constant say `x = y`."""
    first: dict[tuple[str, object], ColumnRef] = {}
    parts = {name: name for name in draft.names}
    for equality in draft.equalities:
        _unite(parts, equality.left.alias, equality.right.alias)
    for leaf_filters in draft.filters:
        for node in leaf_filters.values():
            if node is None or node.name != "EqualTo" or not node.leaves:
                continue
            side, constant = sorted(node.args, key=lambda arg: arg.name == "Literal")
            value = literal(constant) if constant.name == "Literal" else None
            if value is None or value.value is None:
                continue
            side = _without_widening(side)
            kind = "integral" if side.type in INTEGRAL else side.type
            other = first.setdefault((kind, value.value), ref := draft.column(side))
            if parts[other.alias] != parts[ref.alias]:
                draft.equalities[Equality(other, ref)] = None
                _unite(parts, other.alias, ref.alias)


def _unite(parts: dict[str, str], one: str, other: str) -> None:
    gone, kept = parts[other], parts[one]
    for name, part in parts.items():
        if part == gone:
            parts[name] = kept


def filter_twin_keys(draft: Draft) -> None:
    """Two columns of one alias in one attribute must be equal: a filter says so before the exchange."""
    classes: list[set[ColumnRef]] = []
    for equality in draft.equalities:
        touched = [c for c in classes if equality.left in c or equality.right in c]
        classes = [c for c in classes if c not in touched]
        classes.append({equality.left, equality.right}.union(*touched))
    for members in classes:
        for number, name in enumerate(draft.names):
            mine = sorted((draft.columns[ref][0] for ref in members if ref.alias == name), key=lambda c: c.name)
            for twin in mine[1:]:
                draft.filters[number][f"({_plain(draft, mine[0])} = {_plain(draft, twin)})"] = None


def _plain(draft: Draft, column: ColumnDef) -> str:
    return column.sql if column.name.startswith("=") else draft.printer.identifier(column.name)


def take_outputs(draft: Draft) -> None:
    """A single-alias output that cannot fail is a physical column; others are computed from joined rows."""
    for name, node in zip(draft.output_names, draft.join.outputs, strict=True):
        refuse_type(node.type, name)
        if draft.is_at_hand(node):
            source = draft.column(node)
            draft.outputs.append(Output(name, node.type, source, quote(str(source)), (source,)))
        else:
            refs = draft.base_columns(node)
            draft.left_to_spark.append(node)
            expr = output_expr(node, draft.column) if draft.computes else None
            draft.outputs.append(Output(name, node.type, None, draft.printer.over_join(node), refs, expr))


RULES = (
    push_filters,
    take_equalities,
    take_windows,
    take_conditions,
    reconnect_constants,
    filter_twin_keys,
    take_outputs,
)


def build_graph(sql: str, draft: Draft) -> JoinGraph:
    """Run the rules and collect what they found; the graph then validates itself."""
    for rule in RULES:
        rule(draft)
    used: dict[ColumnRef, None] = {}
    for equality in draft.equalities:
        used |= {equality.left: None, equality.right: None}
    for window in draft.windows:
        used |= {window.left: None, window.right: None}
    for condition in draft.conditions:
        used |= dict.fromkeys(condition.refs)
    for output in draft.outputs:
        used |= dict.fromkeys(output.refs)
    draft.left_to_spark += [draft.columns[ref][1] for ref in used]
    keys = {ref for equality in draft.equalities for ref in (equality.left, equality.right)}
    times = {ref for window in draft.windows for ref in (window.left, window.right)}
    required = {draft.columns[ref][1].template for ref in keys | times}
    aliases = tuple(
        Alias(
            name,
            leaf.relation,
            conjunction({text: node for text, node in filters.items() if not _is_implied(node, required)}),
            tuple(draft.columns[r][0] for r in used if r.alias == name),
            draft.ttls.get(name),
            _native_filter(draft, {text: node for text, node in filters.items() if not _is_implied(node, required)}),
        )
        for name, leaf, filters in zip(draft.names, draft.join.leaves, draft.filters, strict=True)
    )
    return JoinGraph(
        sql=sql,
        aliases=aliases,
        equalities=tuple(draft.equalities),
        outputs=tuple(draft.outputs),
        windows=draft.windows,
        conditions=tuple(draft.conditions),
    )


def _native_filter(draft: Draft, filters: Mapping[str, Node | None]) -> Expr | None:
    """A filter as tasks evaluate it, from the stream's own columns; None if there is none, or they cannot."""
    translate = Translator(draft.column)
    found: Expr | None = None
    for node in filters.values():
        expr = None if node is None else translate(node)
        if expr is None or any(ref.column.startswith("=") for ref in columns_of(expr)):
            return None
        found = expr if found is None else Call("and", (found, expr), "boolean")
    return found


def _is_implied(node: Node | None, required: set[str]) -> bool:
    """`key IS NOT NULL`: the join itself demands it; as a filter it would tell equal inputs of two queries apart."""
    return node is not None and node.name == "IsNotNull" and node.args[0].template in required


def conjunction(filters: Mapping[str, Node | None]) -> str | None:
    """Conjuncts tied by AND: first those that cannot fail, sorted; then the others as Spark would evaluate them."""
    safe = sorted(text for text, node in filters.items() if node is None or is_total(node))
    texts = safe + [text for text in filters if text not in safe]
    return " AND ".join(text if _is_parenthesised(text) else f"({text})" for text in texts) or None


def _is_parenthesised(text: str) -> bool:
    """Whether one pair of parentheses spans the whole text, as Catalyst prints comparisons."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return place == len(text) - 1 and place > 0
    return False
