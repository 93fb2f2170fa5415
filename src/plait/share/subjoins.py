"""Sub-joins under one name: which parts of two queries are the same, whatever their aliases are called.

A `SubJoin` is a set of relations with the filters, equalities, windows and conditions that hold among them: a whole
query, a materialisable intermediate result (MIR, paper 001, section V) or a single relation.  Its members are numbered
in a *canonical* order, so two sub-joins are equal as values if and only if they are the same join: alias names, the
order of FROM and of WHERE, and the direction in which an equality or a window is written leave no trace.

Equalities are classes of equal columns, as in `JoinGraph`: of `a.k = b.k AND b.k = c.k` the sub-join of a and c has
`a.k = c.k`.  Windows are the tightest bounds that the query implies between two members, also those that it does not
write down: rows outside of them are in no result.

Different relations have one canonical order.  Members that are the same relation with the same filter are told apart
by what they are joined with, and where that does not decide, by trying their permutations.  Those that lead to the
same form are the *automorphisms*: the ways in which members can change places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, permutations, product

from plait.query.expr import Call, ColumnRef, Expr, Literal
from plait.query.graph import JoinGraph
from plait.share.retention import upper_bounds

MOST_PERMUTATIONS = 720
"""Orders of equal members that are tried.  Beyond that equal sub-joins may be missed, so that less is shared."""

Column = tuple[int, str]
"""A column of a member, by the member's position."""
Bound = tuple[int, int, int]
"""(z, x, d): the event time of member z is at most d microseconds after that of member x."""
Condition = tuple[str, tuple[int, ...]]
"""A condition's text, in which {0}, {1} … stand for the members at these positions."""
Shape = tuple[tuple[tuple[Column, ...], ...], tuple[Bound, ...], tuple[Condition, ...]]


@dataclass(frozen=True, slots=True, order=True)
class Leaf:
    """A relation with the filter that is pushed down to it; "" is no filter."""

    relation: str
    filter: str = ""

    def __str__(self) -> str:
        return f"σ({self.filter}) {self.relation}" if self.filter else self.relation


@dataclass(frozen=True)
class SubJoin:
    """Relations and what holds among them, in canonical order.  Sets of members are masks: bit i is member i."""

    leaves: tuple[Leaf, ...]
    attributes: tuple[tuple[Column, ...], ...] = ()
    """Classes of equal columns of at least two members."""
    bounds: tuple[Bound, ...] = ()
    conditions: tuple[Condition, ...] = ()
    automorphisms: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)
    """Other orders of the members (new position by old) that give the same form; without the order as it is."""
    _hash: int = field(default=0, init=False, compare=False, repr=False)
    _parts: dict[int, Part] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Parts that were asked for, by `Parts`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.leaves, self.attributes, self.bounds, self.conditions)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        repeated = len(set(self.leaves)) < len(self.leaves)
        names = [f"{leaf}#{i}" if repeated else str(leaf) for i, leaf in enumerate(self.leaves)]
        equal = [" = ".join(f"{names[i]}.{column}" for i, column in members) for members in self.attributes]
        return " ⋈ ".join(names) + (f" on {', '.join(equal)}" if equal else "")

    @property
    def everything(self) -> int:
        """The set of all members."""
        return (1 << len(self.leaves)) - 1

    @cached_property
    def is_distinct(self) -> bool:
        """Whether no two members are the same relation with the same filter."""
        return len(set(self.leaves)) == len(self.leaves)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """By member: the set of those with which it shares an attribute."""
        found = [0] * len(self.leaves)
        for members in self.attributes:
            mask = 0
            for i, _ in members:
                mask |= 1 << i
            for i, _ in members:
                found[i] |= mask & ~(1 << i)
        return tuple(found)

    @cached_property
    def attribute_of(self) -> dict[Column, int]:
        """By column the attribute that it belongs to; columns that are in none are missing."""
        return {column: number for number, members in enumerate(self.attributes) for column in members}

    @cached_property
    def attribute_masks(self) -> tuple[int, ...]:
        """By attribute: the set of members that carry it."""
        return tuple(mask_of(i for i, _ in members) for members in self.attributes)

    def around(self, members: int) -> int:
        """The set of those outside that share an attribute with a member."""
        found = 0
        for i, near in enumerate(self.neighbours):
            if members >> i & 1:
                found |= near
        return found & ~members

    @cached_property
    def connected(self) -> tuple[int, ...]:
        """All connected sets of at least one member, small ones first.  There can be 2^n; see `count_connected`."""
        return tuple(sorted(_connected(self), key=lambda mask: (mask.bit_count(), mask)))


def bits(mask: int) -> Iterator[int]:
    """The members of a set, ascending.

    >>> list(bits(0b1101))
    [0, 2, 3]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_of(members: Iterable[int]) -> int:
    """The set of these members."""
    found = 0
    for i in members:
        found |= 1 << i
    return found


def moved(mask: int, order: Sequence[int]) -> int:
    """The set after its members have changed places."""
    return mask_of(order[i] for i in bits(mask))


def _connected(join: SubJoin) -> Iterator[int]:
    """Every connected set once: grown from its lowest member by neighbours above it."""
    for start in range(len(join.leaves)):
        closed = (1 << start) - 1
        grown = {1 << start}
        while grown:
            yield from grown
            grown = {mask | 1 << i for mask in grown for i in bits(join.around(mask) & ~closed)}


def count_connected(join: SubJoin, most: int) -> int:
    """The number of connected sets, or `most` if there are at least as many; costs no more than `most` steps."""
    return sum(1 for _ in islice(_connected(join), most))


# ---------------------------------------------------------------- canonical form


def canonical(
    leaves: Sequence[Leaf],
    attributes: Iterable[Iterable[Column]],
    bounds: Iterable[Bound],
    conditions: Iterable[Condition],
) -> tuple[SubJoin, tuple[int, ...]]:
    """The sub-join of these members in canonical order, and by canonical position the member that stands there."""
    given = (
        tuple(tuple(members) for members in attributes),
        tuple(bounds),
        tuple(conditions),
    )
    ranked = sorted(range(len(leaves)), key=lambda i: leaves[i])
    if len(set(leaves)) == len(leaves):
        return SubJoin(tuple(leaves[i] for i in ranked), *_placed(given, _inverse(ranked))), tuple(ranked)
    best: Shape | None = None
    orders: list[tuple[int, ...]] = []
    for order in islice(_orders(leaves, given), MOST_PERMUTATIONS):
        shape = _placed(given, _inverse(order))
        if best is None or shape < best:
            best, orders = shape, [order]
        elif shape == best:
            orders.append(order)
    assert best is not None
    place = _inverse(orders[0])
    others = tuple(tuple(place[member] for member in order) for order in orders[1:])
    return SubJoin(tuple(leaves[i] for i in orders[0]), *best, automorphisms=others), orders[0]


def _orders(leaves: Sequence[Leaf], shape: Shape) -> Iterator[tuple[int, ...]]:
    """Orders of the members that a canonical form may have: by colour, those of one colour in every order."""
    colours = _colours(leaves, shape)
    groups = [[i for i in range(len(leaves)) if colours[i] == colour] for colour in sorted(set(colours))]
    for choice in product(*(permutations(group) for group in groups)):
        yield tuple(i for group in choice for i in group)


def _colours(leaves: Sequence[Leaf], shape: Shape) -> list[int]:
    """A number for each member: equal leaves get different ones if their surroundings differ."""
    attributes, bounds, conditions = shape
    colours = _ranks(list(leaves))
    for _ in leaves:
        described = [
            (
                colours[i],
                sorted(
                    (sorted(c for j, c in members if j == i), sorted((colours[j], c) for j, c in members))
                    for members in attributes
                    if any(j == i for j, _ in members)
                ),
                sorted((z == i, colours[x if z == i else z], d) for z, x, d in bounds if i in (z, x)),
                sorted((text, at.index(i), [colours[j] for j in at]) for text, at in conditions if i in at),
            )
            for i in range(len(leaves))
        ]
        finer = _ranks(described)
        if finer == colours:
            break
        colours = finer
    return colours


def _ranks(values: Sequence[object]) -> list[int]:
    ranked = {repr(value): 0 for value in values}
    for number, text in enumerate(sorted(ranked)):
        ranked[text] = number
    return [ranked[repr(value)] for value in values]


def _inverse(order: Sequence[int]) -> list[int]:
    place = [0] * len(order)
    for position, member in enumerate(order):
        place[member] = position
    return place


def _placed(shape: Shape, place: Sequence[int]) -> Shape:
    attributes, bounds, conditions = shape
    return (
        tuple(sorted(tuple(sorted((place[i], c) for i, c in members)) for members in attributes)),
        tuple(sorted((place[z], place[x], d) for z, x, d in bounds)),
        tuple(sorted((text, tuple(place[i] for i in at)) for text, at in conditions)),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A sub-join within another one."""

    join: SubJoin
    places: tuple[int, ...]
    """By position in `join`: the position in the whole."""

    @property
    def members(self) -> int:
        """The set of members of the whole that it has."""
        return mask_of(self.places)

    def mask(self, members: int) -> int:
        """The set of positions in `join` of these members of the whole."""
        found = 0
        for position, member in enumerate(self.places):
            found |= (members >> member & 1) << position
        return found


@dataclass
class Parts:
    """Remembers the parts of sub-joins, which are asked for again and again; one object per distinct sub-join."""

    known: dict[SubJoin, SubJoin] = field(default_factory=dict)

    def part(self, join: SubJoin, members: int) -> Part:
        """The sub-join of some members: every predicate that names only them."""
        part = join._parts.get(members)
        if part is None:
            part = join._parts[members] = self._restricted(join, members)
        return part

    def _restricted(self, join: SubJoin, members: int) -> Part:
        chosen = tuple(bits(members))
        place = {member: i for i, member in enumerate(chosen)}
        attributes = []
        for mask, columns in zip(join.attribute_masks, join.attributes, strict=True):
            # A class of one member's own columns is no join predicate.
            if (mask & members).bit_count() > 1:
                attributes.append(tuple((place[i], c) for i, c in columns if i in place))
        bounds = tuple((place[z], place[x], d) for z, x, d in join.bounds if z in place and x in place)
        conditions = tuple(
            (text, tuple(place[i] for i in at)) for text, at in join.conditions if all(i in place for i in at)
        )
        leaves = tuple(join.leaves[i] for i in chosen)
        if join.is_distinct:
            # Members, and so columns, bounds and conditions, stay in their order; attributes may begin later.
            found = SubJoin(leaves, tuple(sorted(attributes)), bounds, conditions)
            return Part(self.known.setdefault(found, found), chosen)
        found, order = canonical(leaves, attributes, bounds, conditions)
        return Part(self.known.setdefault(found, found), tuple(chosen[i] for i in order))


def whole(graph: JoinGraph) -> tuple[SubJoin, tuple[str, ...]]:
    """The sub-join that a query is, and by position the name of its alias.

    Conditions that only Spark can evaluate come after the join; they tell no two joins apart.
    """
    names = [alias.name for alias in graph.aliases]
    number = {name: i for i, name in enumerate(names)}
    bounds = upper_bounds(graph)
    join, order = canonical(
        [Leaf(alias.relation, alias.filter or "") for alias in graph.aliases],
        ([(number[ref.alias], ref.column) for ref in members] for members in graph.attributes),
        ((number[z], number[x], d) for (z, x), d in bounds.items() if z != x),
        (_condition(c.expr, number) for c in graph.conditions if c.expr is not None),
    )
    return join, tuple(names[i] for i in order)


def _condition(expr: Expr, number: dict[str, int]) -> Condition:
    seen: list[int] = []
    return _text(expr, number, seen), tuple(seen)


def _text(expr: Expr, number: dict[str, int], seen: list[int]) -> str:
    """The text of an expression without alias names: members are numbered as they are first mentioned."""
    if isinstance(expr, ColumnRef):
        if number[expr.alias] not in seen:
            seen.append(number[expr.alias])
        return f"{{{seen.index(number[expr.alias])}}}.{expr.column}"
    if isinstance(expr, Literal):
        return f"{expr.value!r}:{expr.type}"
    assert isinstance(expr, Call)
    return f"{expr.op}({', '.join(_text(arg, number, seen) for arg in expr.args)}):{expr.type}"
