"""Join graphs and driver views for the tests of orderers: by hand, and at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from plait.order.cost import DriverView
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph

NAMES = "abcdefghijkl"


def graph(*equalities: str) -> JoinGraph:
    """`graph("a.k = b.k", …)`; aliases in alphabetical order, each over a relation of its own name."""
    sides = [[ColumnRef(*side.split("."), "int") for side in text.split(" = ")] for text in equalities]
    names = sorted({ref.alias for pair in sides for ref in pair})
    return JoinGraph("", tuple(Alias(n, n, None, ()) for n in names), tuple(Equality(*pair) for pair in sides), ())


def clique(size: int) -> JoinGraph:
    """All on one attribute: any two can meet directly."""
    return graph(*(f"a.k = {n}.k" for n in NAMES[1:size]))


def pairwise_clique(size: int) -> JoinGraph:
    """Every two aliases meet on an attribute of their own."""
    names = NAMES[:size]
    return graph(*(f"{x}.{x}{y} = {y}.{x}{y}" for i, x in enumerate(names) for y in names[i + 1 :]))


def star(size: int) -> JoinGraph:
    """The first meets each other on an attribute of their own."""
    return graph(*(f"a.{n} = {n}.a" for n in NAMES[1:size]))


def star_with_tail(size: int) -> JoinGraph:
    """Three around the first on one attribute, the rest one behind the other."""
    ring = [f"a.k = {n}.k" for n in NAMES[1 : min(size, 4)]]
    return graph(*ring, *(f"{NAMES[i - 1]}.t{i} = {NAMES[i]}.t{i}" for i in range(4, size)))


def chain(size: int) -> JoinGraph:
    """Each meets the next."""
    return graph(*(f"{NAMES[i - 1]}.t{i} = {NAMES[i]}.t{i}" for i in range(1, size)))


def cycle(size: int) -> JoinGraph:
    """A chain whose ends meet."""
    ends = [f"{NAMES[size - 1]}.z = a.z"] if size > 2 else []
    return graph(*(f"{NAMES[i - 1]}.t{i} = {NAMES[i]}.t{i}" for i in range(1, size)), *ends)


SHAPES = {
    "clique": clique,
    "pairwise clique": pairwise_clique,
    "star": star,
    "star with tail": star_with_tail,
    "chain": chain,
    "cycle": cycle,
}


@st.composite
def graphs(draw: st.DrawFn, most: int = 6, shapes: Sequence[str] = (*SHAPES, "any")) -> JoinGraph:
    """A graph of a known shape, or any connected one over few attributes (so that keys are shared and composite)."""
    shape = draw(st.sampled_from(shapes))
    if shape in SHAPES:
        # Enumerating a clique of six takes too long for many examples.
        return SHAPES[shape](draw(st.integers(2, most - 1 if "clique" in shape else most)))
    size = draw(st.integers(2, most - 1))
    choose = random.Random(draw(st.integers(0, 2**32 - 1)))
    pairs = [(choose.randrange(i), i) for i in range(1, size)]
    pairs += [tuple(sorted(choose.sample(range(size), 2))) for _ in range(choose.randrange(3))]
    attributes = "klm"[: choose.randint(1, 3)]
    return graph(*(f"{NAMES[x]}.{(t := choose.choice(attributes))} = {NAMES[y]}.{t}" for x, y in pairs))


def view(
    join: JoinGraph,
    driver: str,
    gamma: Mapping[str, float],
    mu: Mapping[str, float] | None = None,
    *,
    lookup: Mapping[str, float] | float = 1.0,
    rows: Mapping[str, float] | None = None,
    model: str = "factorised",
    alpha_m: float = 1.0,
    alpha_x: float = 10.0,
    checked: str = "",
) -> DriverView:
    """A view in which success rates and matches are independent."""
    names = tuple(a.name for a in join.aliases)
    mu = mu or {}
    alive, width = [1.0] * (1 << len(names)), [1.0] * (1 << len(names))
    for joined in range(1 << len(names)):
        for i, name in enumerate(names):
            if joined >> i & 1:
                alive[joined] *= 1.0 if name == driver else gamma[name]
                width[joined] *= mu.get(name, 1.0)
    return DriverView(
        graph=join,
        driver=names.index(driver),
        names=names,
        alive=alive,
        width=width,
        mu=[mu.get(n, 1.0) for n in names],
        rows=[(rows or {}).get(n, 1000.0) for n in names],
        lookup_ns=[lookup if isinstance(lookup, float) else lookup[n] for n in names],
        alpha_m=alpha_m,
        alpha_x=alpha_x,
        model=model,
        checked={i: n in checked for i, n in enumerate(names)},
    )


def random_view(join: JoinGraph, driver: int, seed: int, model: str) -> DriverView:
    """Any set functions that can be: one partner more never brings a key back; some keys and prices are 0."""
    choose = random.Random(seed)
    size = 1 << len(join.aliases)
    alive = [1.0] * size
    for joined in range(1, size):
        parts = [joined ^ 1 << i for i in range(len(join.aliases)) if joined >> i & 1]
        least = min(alive[p] for p in parts)
        only_driver = joined == 1 << driver
        alive[joined] = least * (1.0 if only_driver else choose.choice((0.0, 1.0, *[choose.random()] * 8)))
    return DriverView(
        graph=join,
        driver=driver,
        names=tuple(a.name for a in join.aliases),
        alive=alive,
        width=[choose.uniform(0.1, 20) for _ in range(size)],
        mu=[choose.uniform(1, 9) for _ in join.aliases],
        rows=[choose.choice((0.0, 10.0, 1e6)) for _ in join.aliases],
        lookup_ns=[choose.choice((0.0, choose.uniform(1, 50))) for _ in join.aliases],
        alpha_m=choose.choice((0.0, choose.uniform(1, 20))),
        alpha_x=choose.choice((0.0, choose.uniform(1, 200))),
        model=model,
        exchange_ns=choose.choice((0.0, choose.uniform(1, 900))),
        checked={i: choose.random() < 0.3 for i in range(len(join.aliases))},
    )
