"""Which intermediate results are kept: from what a planner wants to stores of a layout (paper 001, section V).

A `Keep` says which aliases of which queries are the members of a MIR, and by which of their columns it is partitioned.
What the queries differ in, filters, windows, conditions and floors, does not matter: uses that differ have bits of
their own in the rows' sets.  A MIR that is there goes on under its id as long as no use is added that asks for other
rows; otherwise it is another store, which the next epoch fills from the members' stores.

Not kept are MIRs with a table among their members, and MIRs that are fed from other MIRs.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.query.expr import ColumnRef, columns_of, replaced
from plait.query.graph import JoinGraph
from plait.query.layout import Layout
from plait.query.relation import ColumnDef, Relation
from plait.query.store import UNTIL, Key, Mir, Reach, Store, Use
from plait.query.types import is_exact_key
from plait.share.joined import member_column
from plait.share.needs import needed_columns
from plait.share.retention import keep_us


@dataclass(frozen=True)
class Keep:
    """A sub-join that is to be kept."""

    uses: tuple[tuple[str, tuple[str, ...]], ...]
    """(query, its aliases by member): the parts of queries that it stands for."""
    key: tuple[tuple[int, str], ...]
    """(member, column): what it is partitioned by."""
    feeds: tuple[tuple[int, ...], ...] = ()
    """By driving member, the order in which it looks the others up; none: as they are connected."""

    def without(self, queries: Collection[str]) -> Keep:
        """The same for fewer queries."""
        return replace(self, uses=tuple(use for use in self.uses if use[0] not in queries))


def keeps_of(layout: Layout, queries: Collection[str]) -> tuple[Keep, ...]:
    """The MIRs of a layout that some of these queries use, as they would be wanted today."""
    found = []
    for store in layout.mirs:
        assert store.mir is not None
        uses = tuple((use.query, use.aliases) for use in store.mir.uses if use.query in queries)
        columns = [name.partition(".") for name in store.key.columns]
        if uses:
            found.append(Keep(uses, tuple((int(member), name) for member, _, name in columns), store.mir.feeds))
    return tuple(found)


class CannotKeep(ValueError):
    """Why a sub-join cannot be kept, in a sentence."""


@dataclass(frozen=True)
class Joins:
    """The joins that run, as far as MIRs depend on them."""

    graphs: Mapping[str, JoinGraph]
    relations: Mapping[str, Relation]
    floors: Mapping[str, Mapping[str, int]]
    filters: Mapping[tuple[str, str], int]
    """By join and alias."""
    marks: Mapping[str, tuple[str, ...]]
    epoch: int


def uses_of(
    graphs: Mapping[str, JoinGraph], query: str, aliases: Sequence[str], key: Sequence[tuple[int, str]] = ()
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The parts of queries that are the same join by equalities as this one, by member, with itself first.

    With a `key`, those that can be looked up by it.  Of aliases that two parts have in common, the first part keeps
    them: parts of one query are disjoint.
    """
    wanted = _equalities(graphs[query], aliases)
    found = {(query, tuple(aliases)): None}
    for name, graph in graphs.items():
        taken = set(aliases) if name == query else set[str]()
        while part := _part(graph, wanted, (), taken):
            taken |= set(part)
            if all(_attribute(graph, part[member], column) is not None for member, column in key):
                found[name, part] = None
    return tuple(found)


def _attribute(graph: JoinGraph, alias: str, column: str) -> int | None:
    """The attribute that a column is; None if it is joined with nothing."""
    by_column = {(ref.alias, ref.column): t for t, refs in enumerate(graph.attributes) for ref in refs}
    return by_column.get((alias, column))


_Equalities = tuple[tuple[str, ...], frozenset[frozenset[tuple[int, str]]]]


def _equalities(graph: JoinGraph, aliases: Sequence[str]) -> _Equalities:
    """The relations by member, and the columns of theirs that are equal."""
    number = {alias: i for i, alias in enumerate(aliases)}
    classes = [
        frozenset((number[ref.alias], ref.column) for ref in refs if ref.alias in number) for refs in graph.attributes
    ]
    relations = tuple(graph.alias(alias).relation for alias in aliases)
    return relations, frozenset(c for c in classes if len({member for member, _ in c}) > 1)


def _part(graph: JoinGraph, wanted: _Equalities, begun: tuple[str, ...], taken: set[str]) -> tuple[str, ...] | None:
    if len(begun) == len(wanted[0]):
        return begun if _equalities(graph, begun) == wanted else None
    for alias in graph.aliases:
        if alias.relation == wanted[0][len(begun)] and alias.name not in taken and alias.name not in begun:
            found = _part(graph, wanted, (*begun, alias.name), taken)
            if found is not None:
                return found
    return None


def with_mirs(layout: Layout, before: Layout, keeps: Sequence[Keep], joins: Joins) -> Layout:
    """A layout with the stores of these MIRs, of which those that were there before go on."""
    made: dict[str, Store] = {}
    number = layout.next_filter
    for keep in keeps:
        _refuse(keep, layout, joins)
        asked = [_asked(joins, *use) for use in keep.uses]
        going = ((s, _going_on(s, keep, asked, joins)) for s in before.mirs if s.id not in made)
        old, uses = next(((store, uses) for store, uses in going if uses), (None, ()))
        if old is None:
            ids = {what: number + i for i, what in enumerate(dict.fromkeys(asked))}
            number += len(ids)
            filters = [ids[what] for what in asked]
            store = _store(keep, filters, joins, {*made, *(s.id for s in before.mirs)})
        else:
            assert old.mir is not None
            store = replace(old, mir=replace(old.mir, uses=uses), masked=len({use.filter for use in uses}) > 1)
        made[store.id] = _ageing(store, layout, joins)
    return replace(layout, stores=(*layout.stores, *made.values()), next_filter=number)


def _asked(joins: Joins, query: str, aliases: tuple[str, ...]) -> Hashable:
    """All that a use asks of the members: two uses with the same have the same rows."""
    graph, number = joins.graphs[query], {alias: i for i, alias in enumerate(aliases)}

    def numbered(ref: ColumnRef) -> ColumnRef:
        return ColumnRef(str(number[ref.alias]), ref.column, ref.type)

    inside = [w for w in graph.windows if w.left.alias in number and w.right.alias in number]
    ready = [
        c.expr for c in graph.conditions if c.expr is not None and all(r.alias in number for r in columns_of(c.expr))
    ]
    return (
        _equalities(graph, aliases),
        tuple((joins.filters[query, alias], joins.floors[query][alias]) for alias in aliases),
        frozenset((numbered(w.left), numbered(w.right), w.lower_us, w.upper_us) for w in inside),
        frozenset(replaced(expr, numbered) for expr in ready),
    )


def _refuse(keep: Keep, layout: Layout, joins: Joins) -> None:
    if not keep.key:
        raise CannotKeep("a sub-join is kept by some key")
    relations = {tuple(joins.graphs[query].alias(a).relation for a in aliases) for query, aliases in keep.uses}
    if len(relations) != 1:
        raise CannotKeep(f"the parts {keep.uses} are not of the same streams")
    if tables := layout.tables.intersection(*relations):
        raise CannotKeep(f"{', '.join(sorted(tables))} is a table: only joins of streams are kept")
    for query, aliases in keep.uses:
        graph = joins.graphs[query]
        if len(aliases) < 2 or len(aliases) >= len(graph.aliases) or len(set(aliases)) < len(aliases):
            raise CannotKeep(
                f"{', '.join(aliases)} is not a part of {query}: two aliases at least, and not all of them"
            )
        for i, driver in enumerate(aliases):
            feed_order(graph, aliases, driver, [aliases[member] for member in keep.feeds[i]] if keep.feeds else ())
        keys = {key for alias in graph.aliases for key in graph.every_key_of(alias.name)}
        for member, column in keep.key:
            attribute = _attribute(graph, aliases[member], column)
            if attribute is None:
                raise CannotKeep(f"{aliases[member]}.{column} joins nothing in {query}: it is no key")
            # Where all tuples are spread by the one key there is, they need no column of it.
            if not carriers(graph, aliases, attribute) and len(keys) > 1:
                raise CannotKeep(f"{aliases[member]}.{column} is not at rest in the members' stores")


def feed_order(graph: JoinGraph, aliases: Sequence[str], driver: str, wanted: Sequence[str]) -> tuple[str, ...]:
    """How a driving member looks up the others, each connected with those before: as it is wanted, if that is."""
    return _connected(graph, [driver], [*wanted, *(a for a in aliases if a not in wanted and a != driver)])


def order_through(graph: JoinGraph, driver: str, steps: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The probe order that looks up these aliases, those of one step in a row: several are the members of a MIR."""
    order: tuple[str, ...] = ()
    for aliases in steps:
        order += _connected(graph, [driver, *order], list(aliases))
    return order


def _connected(graph: JoinGraph, joined: list[str], left: list[str]) -> tuple[str, ...]:
    """Aliases in the first order in which each is connected with those before."""
    begun = len(joined)
    while left:
        near = [alias for alias in left if graph.can_look_up(joined, alias)]
        if not near:
            raise CannotKeep(
                f"{', '.join(left)} and {', '.join(joined)} are not joined with each other, by keys that are stored"
            )
        joined.append(near[0])
        left.remove(near[0])
    return tuple(joined[begun:])


def _going_on(store: Store, keep: Keep, asked: Sequence[Hashable], joins: Joins) -> tuple[Use, ...]:
    """The uses that a MIR that is there has from now on; none if it lacks something that is wanted, of any epoch."""
    assert store.mir is not None
    columns, wanted = {column.name for column in store.columns}, {column.name for column in _columns(keep, joins)}
    if store.key.columns != _key(keep, joins).columns or not wanted <= columns:
        return ()
    # What a use with longer windows could still reach may be gone already.
    ends = {member: kept for member, _, kept in _until(keep, joins)}
    if any(member not in ends or ends[member] > kept for member, _, kept in store.mir.until):
        return ()
    own = {(use.query, use.aliases): use.filter for use in store.mir.uses}
    known = {_asked(joins, use.query, use.aliases): use.filter for use in store.mir.uses if use.query in joins.graphs}
    found = [own.get(use, known.get(what)) for use, what in zip(keep.uses, asked, strict=True)]
    uses = [Use(query, part, f) for (query, part), f in zip(keep.uses, found, strict=True) if f is not None]
    return tuple(uses) if len(uses) == len(keep.uses) else ()


def _key(keep: Keep, joins: Joins) -> Key:
    query, aliases = keep.uses[0]
    graph = joins.graphs[query]
    types = []
    for member, column in keep.key:
        refs = [ref for members in graph.attributes for ref in members]
        types.append(next(r.type for r in refs if (r.alias, r.column) == (aliases[member], column)))
    names = tuple(member_column(member, column) for member, column in keep.key)
    return Key(names, tuple(types), exact=len(types) == 1 and is_exact_key(types[0]))


def _columns(keep: Keep, joins: Joins) -> tuple[ColumnDef, ...]:
    """What any order of any use may read of the members."""
    found: dict[str, ColumnDef] = {}
    for query, aliases in keep.uses:
        for ref in needed_columns(joins.graphs[query]):
            if ref.alias in aliases:
                name = member_column(aliases.index(ref.alias), ref.column)
                found[name] = ColumnDef(name, "", ref.type)
    return tuple(found[name] for name in sorted(found))


def _store(keep: Keep, filters: Sequence[int], joins: Joins, taken: set[str]) -> Store:
    query, aliases = keep.uses[0]
    graph, key, columns = joins.graphs[query], _key(keep, joins), _columns(keep, joins)
    if not key.exact and not {column.name for column in columns}.issuperset(key.columns):
        raise CannotKeep(f"{key} would have to be compared, and is not at rest in the members' stores")
    relations = tuple(graph.alias(alias).relation for alias in aliases)
    uses = tuple(Use(name, part, filter) for (name, part), filter in zip(keep.uses, filters, strict=True))
    orders = []
    for member, alias in enumerate(aliases):
        wanted = [aliases[i] for i in keep.feeds[member]] if keep.feeds else []
        orders.append(tuple(aliases.index(a) for a in feed_order(graph, aliases, alias, wanted)))
    until = _until(keep, joins)
    name = f"{' ⋈ '.join(relations)}[{key}]" + (f"@{joins.epoch}" if joins.epoch else "")
    id = next(i for i in (name, *(f"{name}.{n}" for n in range(1, len(taken) + 2))) if i not in taken)
    floors = [joins.floors[name][alias] for name, part in keep.uses for alias in part]
    return Store(
        id=id,
        relation=" ⋈ ".join(relations),
        key=key,
        columns=(*columns, *([ColumnDef(UNTIL, "", "bigint")] if until else [])),
        masked=len(set(filters)) > 1,
        time_column=UNTIL if until else None,
        keep_us=0 if until else None,
        ttl_us=None,
        since=joins.epoch,
        first=min(joins.epoch, *floors),
        mir=Mir(relations, uses, tuple(orders), until),
    )


def _until(keep: Keep, joins: Joins) -> tuple[tuple[int, str, int], ...]:
    """How long after its event time each member can be reached by any use, of those that all uses let go."""
    found = []
    kept = {query: keep_us(joins.graphs[query], joins.relations) for query, _ in keep.uses}
    for member in range(len(keep.uses[0][1])):
        query, aliases = keep.uses[0]
        time = joins.relations[joins.graphs[query].alias(aliases[member]).relation].time_column
        reaches = [kept[name][part[member]] for name, part in keep.uses]
        known = [reach for reach in reaches if reach is not None]
        if time is not None and len(known) == len(reaches):
            found.append((member, time, max(known)))
    return tuple(found)


def _ageing(store: Store, layout: Layout, joins: Joins) -> Store:
    """The watermarks and TTLs that end rows today: a TTL ends them where a member's store has one."""
    assert store.mir is not None
    reach = tuple(Reach(marks, store.keep_us) for marks in sorted({joins.marks[u.query] for u in store.mir.uses}))
    ttls = any(s.ttl_us is not None for s in layout.stores if s.mir is None and s.relation in store.mir.relations)
    return replace(store, reach=reach, ttl_us=0 if ttls else store.ttl_us)


def carriers(graph: JoinGraph, aliases: Sequence[str], attribute: int) -> list[ColumnRef]:
    """The columns by which members carry an attribute, of those that stores have."""
    at_rest = needed_columns(graph)
    found = [graph.column_of(alias, attribute) for alias in aliases]
    return [ref for ref in found if ref is not None and ref in at_rest]
