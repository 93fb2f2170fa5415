"""The join graph of one query: what is joined, on what, within which time, and what comes out.

A `JoinGraph` validates itself: once built it is a connected inner join of its aliases (or one stream by itself), its
keys have types that hash and compare as Spark compares them, and its output names are distinct.  It is frozen, plain
data; nothing in it refers to Spark.

Equalities are kept as *attributes*: classes of columns that the query makes equal (`a.k = b.k AND b.k = c.k`
is one attribute with three members), so a tuple of `a` may probe `c` directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from plait.errors import QueryError
from plait.query.expr import ColumnRef, Expr
from plait.query.grouping import Grouping
from plait.query.relation import ColumnDef
from plait.query.types import is_exact_key, is_key_type


@dataclass(frozen=True, slots=True)
class Alias:
    """One occurrence of a relation in FROM, with its pushed-down filter and the columns the query needs of it."""

    name: str
    relation: str
    filter: str | None
    columns: tuple[ColumnDef, ...]
    ttl_us: int | None = None
    """The TTL that the hint STATE_TTL gives; None is what the stream has."""
    condition: Expr | None = None
    """The filter as join tasks evaluate it, over the stream's columns; None if they cannot."""


@dataclass(frozen=True, slots=True)
class Equality:
    """`left = right`, columns of two different aliases."""

    left: ColumnRef
    right: ColumnRef

    def __str__(self) -> str:
        return f"{self.left} = {self.right}"


@dataclass(frozen=True, slots=True)
class Window:
    """`lower ≤ left − right ≤ upper` in microseconds of event time; None is unbounded, but not both are.

    So a row without event time is in no window.
    """

    left: ColumnRef
    right: ColumnRef
    lower_us: int | None
    upper_us: int | None

    def __post_init__(self) -> None:
        assert (self.lower_us, self.upper_us) != (None, None), "a window without bounds would still drop NULLs"

    def __str__(self) -> str:
        low = "-∞" if self.lower_us is None else f"{self.lower_us / 1e6:g} s"
        high = "∞" if self.upper_us is None else f"{self.upper_us / 1e6:g} s"
        return f"{self.left} − {self.right} in [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition over several aliases that is neither equality nor window.

    `expr` is set when a join task can evaluate it; otherwise Spark does, from `sql`, in which the column
    `c` of alias `a` is called `a.c` (one back-quoted name).  `refs` are the columns it reads.
    """

    sql: str
    refs: tuple[ColumnRef, ...]
    expr: Expr | None = None
    is_digested: bool = True
    """Whether `expr` is part of the query's digest; not where earlier releases left the condition to Spark."""


@dataclass(frozen=True, slots=True)
class Output:
    """One output column: a physical column (`source`), or SQL over joined rows.

    `expr` is set when a join task can compute it from the streams' own columns (`refs`) and its value, and the rows on
    which it fails, are exactly Spark's; otherwise Spark evaluates `sql`.  What it means is what `sql` means: the digest
    of a query does not hold it.
    """

    name: str
    type: str
    source: ColumnRef | None
    sql: str
    refs: tuple[ColumnRef, ...]
    expr: Expr | None = None


@dataclass(frozen=True)
class JoinGraph:
    """One query, ready to be planned.  `aliases` are in written order."""

    sql: str
    aliases: tuple[Alias, ...]
    equalities: tuple[Equality, ...]
    outputs: tuple[Output, ...]
    windows: tuple[Window, ...] = ()
    conditions: tuple[Condition, ...] = ()
    grouping: Grouping | None = None
    """The aggregate right above the join, if tasks can make it of the rows they join; it reads outputs only."""
    stored: frozenset[tuple[str, tuple[int, ...]]] | None = None
    """(alias, key): the keys by which aliases are stored; None: all that a probe order may use.  By the others all rows
    of a store are searched.  No part of what the query means: `share/store_choice.py` decides it."""

    def __post_init__(self) -> None:
        names = [a.name for a in self.aliases]
        if len(set(names)) != len(names):
            raise QueryError("DUPLICATE_ALIAS", f"aliases are not distinct: {', '.join(names)}", "rename one")
        for equality in self.equalities:
            for ref in (equality.left, equality.right):
                if not is_key_type(ref.type):
                    raise QueryError(
                        "KEY_TYPE",
                        f"{ref} has type {ref.type}, which cannot be a join key",
                        "join on integers, strings, binary, booleans, dates, timestamps, decimals, floats or doubles",
                    )
        self._refuse_duplicate_names()
        self._refuse_cross_products(names)
        if self.stored is not None:
            known = {(name, key) for name in names for key in self.every_key_of(name)}
            assert self.stored <= known, f"no alias is looked up by {self.stored - known}"
            assert len(names) == 1 or all(self.keys_of(name) for name in names), "every alias is stored by some key"

    def _refuse_duplicate_names(self) -> None:
        seen: set[str] = set()
        for output in self.outputs:
            if output.name.lower() in seen:
                raise QueryError(
                    "DUPLICATE_COLUMN",
                    f"two output columns are called {output.name!r}",
                    f"name them apart, for example {output.sql} AS {output.name}_2",
                )
            seen.add(output.name.lower())

    def _refuse_cross_products(self, names: list[str]) -> None:
        reached = {names[0]}
        while more := {n for n in names if n not in reached and any(self.shared(n, r) for r in reached)}:
            reached |= more
        if len(reached) < len(names):
            apart = ", ".join(n for n in names if n not in reached)
            raise QueryError(
                "CROSS_PRODUCT",
                f"no equality connects {apart} with {', '.join(n for n in names if n in reached)}",
                "add an equality condition between them; cross products of streams grow without bound",
            )

    @cached_property
    def attributes(self) -> tuple[tuple[ColumnRef, ...], ...]:
        """Classes of equal columns, in order of first mention; index into this tuple is an attribute's number."""
        classes: list[list[ColumnRef]] = []
        for equality in self.equalities:
            left = next((c for c in classes if equality.left in c), None)
            right = next((c for c in classes if equality.right in c), None)
            if left is None and right is None:
                classes.append([equality.left, equality.right])
            elif left is None and right is not None:
                right.append(equality.left)
            elif right is None and left is not None:
                left.append(equality.right)
            elif left is not right and left is not None and right is not None:
                left.extend(right)
                classes.remove(right)
        return tuple(tuple(c) for c in classes)

    def column_of(self, alias: str, attribute: int) -> ColumnRef | None:
        """The column by which `alias` carries an attribute (the first, where it has several)."""
        return next((ref for ref in self.attributes[attribute] if ref.alias == alias), None)

    def attributes_of(self, aliases: Iterable[str]) -> frozenset[int]:
        """The attributes that at least one of these aliases carries."""
        return frozenset[int]().union(*(self._attributes_by_alias[alias] for alias in aliases))

    @cached_property
    def _attributes_by_alias(self) -> dict[str, frozenset[int]]:
        carried = {
            a.name: {i for i, c in enumerate(self.attributes) for r in c if r.alias == a.name} for a in self.aliases
        }
        return {alias: frozenset(attributes) for alias, attributes in carried.items()}

    def shared(self, one: str, other: str) -> frozenset[int]:
        """The attributes on which two aliases meet."""
        return self.attributes_of([one]) & self.attributes_of([other])

    def keys_of(self, alias: str) -> tuple[tuple[int, ...], ...]:
        """The keys by which an alias is stored, whatever the probe order; widest first."""
        return self._stored_keys_by_alias[alias]

    def every_key_of(self, alias: str) -> tuple[tuple[int, ...], ...]:
        """The keys by which an alias could be looked up: what it shares with each other alias.

        Widest first; of those as wide, first the ones whose hash decides.  They follow from the equalities alone.
        """
        return self._keys_by_alias[alias]

    def searched_keys_of(self, alias: str) -> tuple[tuple[int, ...], ...]:
        """The keys by which an alias is not stored, nor by a wider one: what all rows are searched by, widest first."""
        stored = [set(key) for key in self.keys_of(alias)]
        found: list[tuple[int, ...]] = []
        for key in self.every_key_of(alias):
            if not any(set(key) <= wider for wider in (*stored, *map(set, found))):
                found.append(key)
        return tuple(found)

    @cached_property
    def _stored_keys_by_alias(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        stored = self.stored
        if stored is None:
            return self._keys_by_alias
        return {a: tuple(key for key in keys if (a, key) in stored) for a, keys in self._keys_by_alias.items()}

    def can_look_up(self, joined: Iterable[str], target: str) -> bool:
        """Whether joined tuples carry a key by which `target` is stored."""
        carried = self.attributes_of(joined)
        return any(carried.issuperset(key) for key in self.keys_of(target))

    def can_search(self, joined: Iterable[str], target: str) -> bool:
        """Whether joined tuples carry a key of `target`, be it stored by that or not."""
        carried = self.attributes_of(joined)
        return any(carried.issuperset(key) for key in self.every_key_of(target))

    def is_stored_by(self, alias: str, key: tuple[int, ...]) -> bool:
        """Whether there is a store of an alias by this key."""
        return self.stored is None or (alias, key) in self.stored

    @cached_property
    def _keys_by_alias(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        for alias in self.aliases:
            pairs = {tuple(sorted(self.shared(alias.name, a.name))) for a in self.aliases if a.name != alias.name}
            ranked = sorted((-len(key), not self._hash_decides(alias.name, key), key) for key in pairs if key)
            found[alias.name] = tuple(key for _, _, key in ranked)
        return found

    def _hash_decides(self, alias: str, key: tuple[int, ...]) -> bool:
        refs = [self.column_of(alias, attribute) for attribute in key]
        return len(refs) == 1 and refs[0] is not None and is_exact_key(refs[0].type)

    def lookup_key(self, joined: Iterable[str], target: str, here: tuple[int, ...] | None) -> tuple[int, ...]:
        """By which key joined tuples look `target` up: the widest they carry; `here`, where they are, if as wide.

        One by which it is stored, if they carry such a one.  What else they share with `target` becomes a check.
        """
        carried = self.attributes_of(joined)
        possible = [key for key in self.keys_of(target) if carried.issuperset(key)]
        possible = possible or [key for key in self.every_key_of(target) if carried.issuperset(key)]
        widest = [key for key in possible if len(key) == len(possible[0])]
        return here if here is not None and here in widest else widest[0]

    @cached_property
    def needs_spark_after(self) -> bool:
        """Whether conditions or outputs are left that only Spark can evaluate, on the joined rows."""
        return any(c.expr is None for c in self.conditions) or any(
            o.source is None and o.expr is None for o in self.outputs
        )

    @property
    def computes_outputs(self) -> bool:
        """Whether join tasks compute outputs from the columns that they join."""
        return not self.needs_spark_after and any(o.expr is not None for o in self.outputs)

    def required(self, alias: str) -> frozenset[str]:
        """Columns of an alias that a result can never have NULL: its keys and window bounds."""
        pairs: list[Equality | Window] = [*self.equalities, *self.windows]
        return frozenset(ref.column for pair in pairs for ref in (pair.left, pair.right) if ref.alias == alias)

    def alias(self, name: str) -> Alias:
        """The alias of that name."""
        return next(a for a in self.aliases if a.name == name)
