"""A fast stream and three slow ones whose join suddenly becomes tiny (paper 001, Figure 8b).

R(a) ⋈ S(a, b) ⋈ T(b, c) ⋈ U(c).  R brings far more rows than the others.  Before the change each row of S meets several
of T, and each of T several of U: their join is large, and keeping it would cost more than it saves.  Then the
new rows of T and U hardly meet any more.  Rows are forgotten after WINDOW epochs (a TTL by a scripted clock).

    static    the orders that were best before the change, for ever, and nothing kept in between
    orders    orders are re-chosen every PERIOD epochs (`sharing="naive"`)
    ilp       so are intermediate results that are kept (`sharing="ilp"`)

Every epoch of every contestant must have as many results as a plain count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.report import Part, table
from benchmarks.without_spark import rewired_engine
from plait.config import Config
from plait.errors import PlaitError
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.relation import ColumnDef, Relation
from plait.testing import Clock, LocalEngine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = {"r": ("a",), "s": ("a", "b"), "t": ("b", "c"), "u": ("c",)}
EQUALITIES = (("r", "s", "a"), ("s", "t", "b"), ("t", "u", "c"))
WINDOW = 5
"""Number of epochs in which a row is visible, its own included."""
PERIOD = 2
FAST = 25
"""Rows of R for each row of a slow stream."""
FANOUT = 6
"""Rows of T that a row of S meets before the change, and of U that one of T meets."""
SHARE = 0.3
"""Of the rows of R, those that meet rows of S."""
APART = 2000
"""Times fewer of U that a row of T meets after the change."""
CONTESTANTS: Mapping[str, Mapping[str, Any]] = {
    "static": {"sharing": "naive", "replan_epochs": 0},
    "orders": {"sharing": "naive"},
    "ilp": {"sharing": "ilp", "sharing_seconds": 10.0},
}
COLOURS = {"static": "#b5541c", "orders": "#3b6ea5", "ilp": "#0b6e4f"}
NAMES = {"static": "static", "orders": "orders re-chosen", "ilp": "ilp: orders and intermediate results"}
Numbers = npt.NDArray[np.int64]
Arrived = Mapping[str, Mapping[str, Numbers]]


@dataclass(slots=True)
class _Series:
    """One contestant, epoch by epoch."""

    seconds: list[float]
    lookups: list[int]
    tuples: list[int]
    kept: list[str]
    """Intermediate results that the epoch's plan has, as text."""


def rewiring(
    scratch: Path, *, quick: bool = False, rows: int | None = None, epochs: int | None = None, repeat: int | None = None
) -> dict[str, Any]:
    """Run all contestants; `rows` arrive per slow stream and epoch.  Wrong results are an error."""
    rows = rows or (200 if quick else 4000)
    epochs = epochs or (20 if quick else 40)
    repeat = repeat or (1 if quick else 3)
    flip = epochs // 2
    arrivals = [arrived(epoch, rows, after=epoch >= flip) for epoch in range(epochs)]
    results = expected(arrivals)
    # The first run compiles; it does not count.
    _side_by_side(scratch, arrivals[:WINDOW], results[:WINDOW])
    runs = [_side_by_side(scratch, arrivals, results) for _ in range(repeat)]
    contestants = {
        who: {
            "seconds": [statistics.median(run[who].seconds[e] for run in runs) for e in range(epochs)],
            "lookups": runs[0][who].lookups,
            "tuples": runs[0][who].tuples,
            "kept": runs[0][who].kept,
        }
        for who in CONTESTANTS
    }
    return {
        "title": "Rewiring: the join of three slow streams becomes tiny, the fourth is fast (paper 001, Figure 8b)",
        "rows_per_epoch": {"r": FAST * rows, **dict.fromkeys("stu", rows)},
        "epochs": epochs,
        "repeat": repeat,
        "flip": flip,
        "window": WINDOW,
        "period": PERIOD,
        "results": sum(results),
        "equal": True,
        "contestants": contestants,
        "summary": {who: _summary(of, flip) for who, of in contestants.items()},
    }


def arrived(epoch: int, rows: int, *, after: bool) -> dict[str, dict[str, Numbers]]:
    """The rows of one epoch."""
    random = np.random.default_rng([rows, epoch])
    known = rows * WINDOW
    keys = known // FANOUT
    wide = keys * (APART if after else 1)

    def some(count: int, domain: int) -> Numbers:
        return random.integers(0, max(domain, 1), count)

    return {
        "r": {"a": some(FAST * rows, int(known / SHARE))},
        "s": {"a": random.permutation(known)[:rows], "b": some(rows, keys)},
        "t": {"b": some(rows, keys), "c": some(rows, wide)},
        "u": {"c": some(rows, wide)},
    }


def graph() -> JoinGraph:
    """The chain, which selects a column of each stream."""
    return JoinGraph(
        "SELECT r.a, s.b, t.c, u.c FROM r, s, t, u WHERE r.a = s.a AND s.b = t.b AND t.c = u.c",
        tuple(
            Alias(name, name, None, tuple(ColumnDef(c, c, "bigint") for c in names)) for name, names in COLUMNS.items()
        ),
        tuple(Equality(ColumnRef(x, c, "bigint"), ColumnRef(y, c, "bigint")) for x, y, c in EQUALITIES),
        tuple(
            Output(f"{name}_{names[-1]}", "bigint", ref, str(ref), (ref,))
            for name, names in COLUMNS.items()
            for ref in [ColumnRef(name, names[-1], "bigint")]
        ),
    )


def expected(arrivals: Sequence[Arrived]) -> list[int]:
    """The number of results of every epoch: of all rows that are visible, less those that were joined before.

    >>> one = {s: {c: np.array([1]) for c in columns} for s, columns in COLUMNS.items()}
    >>> expected([one] * 3)
    [1, 15, 65]
    """
    found = []
    for epoch in range(len(arrivals)):
        visible = range(max(0, epoch - WINDOW + 1), epoch + 1)
        found.append(_joined([arrivals[e] for e in visible]) - _joined([arrivals[e] for e in visible[:-1]]))
    return found


def _joined(parts: Sequence[Arrived]) -> int:
    """The number of rows of the whole join, counted from U to R."""
    if not parts:
        return 0

    def column(stream: str, name: str) -> Numbers:
        return np.concatenate([part[stream][name] for part in parts])

    weights = np.ones(len(column("u", "c")), np.int64)
    for left, right, name in reversed(EQUALITIES):
        keys, places = np.unique(column(right, name), return_inverse=True)
        sums = np.bincount(places, weights, len(keys))
        mine = column(left, name)
        at = np.minimum(np.searchsorted(keys, mine), len(keys) - 1)
        weights = np.where(keys[at] == mine, sums[at], 0)
    return round(float(weights.sum()))


def _side_by_side(scratch: Path, arrivals: Sequence[Arrived], results: Sequence[int]) -> dict[str, _Series]:
    """All contestants, epoch by epoch; each is the first in its turn."""
    found = {who: _Series([], [], [], []) for who in CONTESTANTS}
    streams = {
        name: Relation(name, tuple((c, "bigint") for c in names), ttl_us=WINDOW * 1_000_000)
        for name, names in COLUMNS.items()
    }
    with ExitStack() as opened:
        engines, clocks = {}, {}
        for who, settings in CONTESTANTS.items():
            config = Config(**{"tasks": 1, "sync": False, "replan_epochs": PERIOD, **settings})
            clocks[who] = Clock()
            engine = rewired_engine(scratch, {"q": graph()}, streams, config, clocks[who])
            engines[who] = opened.enter_context(engine)
        for number, (rows, wanted) in enumerate(zip(arrivals, results, strict=True)):
            new = {name: pa.table(dict(columns)) for name, columns in rows.items()}
            turn = number % len(engines)
            for who in [*engines][turn:] + [*engines][:turn]:
                clocks[who].advance(1.0)
                _epoch(engines[who], new, wanted, found[who])
    return found


def _epoch(engine: LocalEngine, new: Mapping[str, pa.Table], wanted: int, series: _Series) -> None:
    kept = [store.id for store in engine.plan.stores if store.mir is not None]
    begun = time.perf_counter()
    engine.run(new)
    seconds = time.perf_counter() - begun
    progress = engine.progress[-1]
    if sum(progress["rows_out"].values()) != wanted:
        raise PlaitError(
            "BENCH_RESULTS",
            f"epoch {progress['epoch']} gave {progress['rows_out']} results instead of {wanted}",
            "this is an error of the engine or of the benchmark: no figure of this run counts",
        )
    # Planning is not what a row waits for: it comes after the epoch is committed.
    series.seconds.append(seconds - progress["optimiser"].get("seconds", 0.0))
    series.lookups.append(sum(count["lookups"] for count in progress["edges"].values()))
    series.tuples.append(sum(count["tuples"] for count in progress["edges"].values()))
    series.kept.append(", ".join(kept))


def _summary(of: Mapping[str, Any], flip: int) -> dict[str, Any]:
    settled, changed = slice(WINDOW, flip), slice(flip + WINDOW, None)
    return {
        "before": statistics.median(of["seconds"][settled]),
        "after": statistics.median(of["seconds"][changed]),
        "lookups_before": statistics.median(of["lookups"][settled]),
        "lookups_after": statistics.median(of["lookups"][changed]),
        "kept_before": next((kept for kept in of["kept"][:flip] if kept), ""),
        "first_kept": next((e for e in range(flip, len(of["kept"])) if of["kept"][e]), None),
        "kept": of["kept"][-1],
    }


def rewiring_lines(part: Part) -> list[str]:
    """The table of all contestants, and what is kept since when, in Markdown."""
    rates, flip = part["rows_per_epoch"], part["flip"]
    rows = [
        (
            NAMES[who],
            f"{1e3 * of['before']:.0f}",
            f"{1e3 * of['after']:.0f}",
            f"{of['lookups_before']:,.0f}",
            f"{of['lookups_after']:,.0f}",
            of["kept_before"] or "nothing",
            of["kept"] or "nothing",
        )
        for who, of in part["summary"].items()
    ]
    columns = (
        "contestant",
        "ms per epoch: before",
        "after",
        "lookups per epoch: before",
        "after",
        "keeps",
        "keeps now",
    )
    lines = [
        f"{rates['r']:,} rows of R and {rates['s']:,} of S, T and U per epoch, {part['epochs']} epochs, change in "
        f"epoch {flip}; rows are forgotten after {part['window']} epochs, T = {part['period']} epochs.  "
        f"{part['results']:,} results, in every epoch and for every contestant those of a plain count.  Seconds are "
        f"of whole epochs without planning, one task, without Spark; medians of {part['repeat']} interleaved run(s).",
        "",
        *table(("contestant", *columns), rows, "lrrrrll"),
        "",
        f"Before is epochs {part['window']} to {flip - 1}, after is from epoch {flip + part['window']} on.",
    ]
    first = part["summary"]["ilp"]["first_kept"]
    if first is None:
        return [*lines, "", "No intermediate result was kept after the change: the goal is **missed**."]
    faster = part["summary"]["ilp"]["after"] < min(part["summary"]["ilp"]["before"], part["summary"]["orders"]["after"])
    return [
        *lines,
        "",
        f"ilp keeps an intermediate result from epoch {first} on, {first - flip} epochs after the change; its epochs "
        f"are then faster than before, and than with orders alone: {'yes' if faster else '**no**'}.",
    ]


def draw_rewiring(part: Part, axes: Axes) -> None:
    """Draw the seconds per epoch of all contestants, the change, and where intermediate results come."""
    for who, of in part["contestants"].items():
        axes.plot([1e3 * s for s in of["seconds"]], "o-", ms=3, color=COLOURS[who], label=NAMES[who])
    flip = part["flip"]
    axes.axvline(flip, color="#333333", linestyle=":", label="change")
    axes.axvspan(flip, flip + part["window"] - 1, color="#eeeeee", label="old rows still in the state")
    kept = part["contestants"]["ilp"]["kept"]
    changes = [e for e in range(1, len(kept)) if kept[e] != kept[e - 1]]
    seconds = part["contestants"]["ilp"]["seconds"]
    axes.plot(
        changes, [1e3 * seconds[e] for e in changes], "v", color="#c9a227", ms=9, label="other intermediate results"
    )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("ms per epoch")
    axes.set_title(part["title"], fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
