"""Four streams whose selectivities flip mid-run: static orders degrade, planned ones recover (paper 001, Figure 8a).

Before the flip nearly no key has a row of `b`, and `d` has many rows of each; after it, the other way round.  As in the
paper the new tuples meet the new selectivities at once: they speak of other keys than the old ones.  With `same_keys`
they also meet the old rows, until these are forgotten: for a while both `b` and `d` have many, results swell, and no
order is good.  Rows are forgotten after WINDOW epochs (a TTL by a scripted clock).

    static        the best orders before the flip, for ever
    dp_pick       starts from the same orders and re-chooses every PERIOD epochs; the flip comes when a period begins
    dp_pick mid   the same an epoch out of step, so that the flip comes in the middle of a period
    oracle        the best orders after the flip, from the start: what is attainable in the second half

Best is found, not assumed: six runs under fixed orders, each driver going once through all its orders, tell the counted
work of every order in every epoch.  *Work* is lookups and tuples at one price list for all contestants.  The prices are
measured anew in every run of the benchmark, so compare within a run only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks import one_key_join
from benchmarks.one_key_join import Ran
from benchmarks.report import Part, table
from benchmarks.without_spark import QUERY
from plait.config import Config
from plait.order.cost import Coefficients
from plait.order.orders import Orders
from plait.share.planner import Planner

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STREAMS = ("a", "b", "c", "d")
WINDOW = 5
"""Number of epochs in which a row is visible, its own included."""
PERIOD = 2
"""T of the planned contestant, in epochs."""
NEAR = 1.10
"""A contestant has recovered when its work is within 10 % of that of the best orders."""
COLOURS = {"static": "#b5541c", "dp_pick": "#0b6e4f", "dp_pick mid": "#3b6ea5", "oracle": "#7a7a7a"}
PLANNED = ("dp_pick", "dp_pick mid")
SHARES = {"few": 0.002, "some": 0.4, "many": 1.0}
"""Share of a stream's rows that have one of the keys that all streams know; the others match nothing."""
ROLES = (("some", "few", "some", "many"), ("some", "many", "some", "few"))
"""The roles of a, b, c and d: before the flip and after it."""


def drift(
    scratch: Path,
    *,
    quick: bool = False,
    rows: int | None = None,
    epochs: int | None = None,
    repeat: int | None = None,
    probe: str = "iterative",
    same_keys: bool = False,
) -> dict[str, Any]:
    """Run all contestants; `rows` arrive per stream and epoch.  A contestant with wrong results is an error."""
    rows = rows or (1000 if quick else 20_000)
    epochs = epochs or (20 if quick else 40)
    repeat = repeat or (1 if quick else 3)
    flip = epochs // 2
    arrivals = [_arrived(epoch, rows, after=epoch >= flip, same_keys=same_keys) for epoch in range(epochs)]
    results = one_key_join.expected(arrivals, epochs_kept=WINDOW)
    config = Config(tasks=1, sync=False, probe=probe, replan_epochs=PERIOD, history=epochs, orderer="fixed")

    def planner(orders: Orders, orderer: str) -> Planner:
        relations = one_key_join.relations(STREAMS, ttl_us=WINDOW * 1_000_000)
        graphs = {QUERY: one_key_join.graph(STREAMS)}
        return Planner(graphs, relations, replace(config, orderer=orderer), orders={QUERY: orders})

    def run(planners: Mapping[str, Planner]) -> dict[str, list[Ran]]:
        return one_key_join.side_by_side(scratch, planners, arrivals, results)

    # The first run compiles; it does not count.
    one_key_join.run(scratch, planner(_nth_orders(0), "fixed"), arrivals[:WINDOW], results[:WINDOW])
    fixed = [*run({str(n): planner(_nth_orders(n), "fixed") for n in range(math.factorial(len(STREAMS) - 1))}).values()]
    coefficients = Coefficients().fitted(d.counts for ran in fixed for epoch in ran for d in epoch.driven)
    before = _best_orders(fixed, range(WINDOW, flip), coefficients)
    after = _best_orders(fixed, range(flip + WINDOW, epochs), coefficients)
    contestants = {"static": (before, "fixed"), "dp_pick": (before, "dp_pick"), "oracle": (after, "fixed")}
    runs: dict[str, list[list[Ran]]] = {who: [] for who in COLOURS}
    switches: dict[str, list[dict[str, Any]]] = {}
    nothing = {stream: one_key_join.table(np.empty(0, np.int64)) for stream in STREAMS}
    for _ in range(repeat):
        planners = {who: planner(*how) for who, how in contestants.items()}
        for who, ran in run(planners).items():
            runs[who].append(ran)
        # An empty epoch before all others puts the periods out of step.
        planners["dp_pick mid"] = planner(before, "dp_pick")
        ran = one_key_join.run(scratch, planners["dp_pick mid"], [nothing, *arrivals], [0, *results])
        runs["dp_pick mid"].append(ran[1:])
        for who, ahead in zip(PLANNED, (0, 1), strict=True):
            found = [replace(s, epoch=s.epoch - ahead) for s in planners[who].switches]
            switches.setdefault(who, [{**asdict(s), "text": str(s)} for s in found])
    series = {
        who: {
            "work": [statistics.median(ran[e].work(coefficients) for ran in of) for e in range(epochs)],
            "seconds": [statistics.median(ran[e].seconds for ran in of) for e in range(epochs)],
        }
        for who, of in runs.items()
    }
    works = {who: [[epoch.work(coefficients) for epoch in ran] for ran in runs[who]] for who in PLANNED}
    return {
        "title": f"Drift: selectivities flip mid-run, {'the same' if same_keys else 'other'} keys after the flip, "
        f"{probe} probing (the shape of paper 001, Figure 8a)",
        "probe": probe,
        "same_keys": same_keys,
        "rows_per_epoch": rows,
        "epochs": epochs,
        "repeat": repeat,
        "flip": flip,
        "window": WINDOW,
        "period": PERIOD,
        "results": sum(results),
        "equal": True,
        "coefficients": asdict(coefficients),
        "orders": {"before": before, "after": after},
        "contestants": series,
        "switches": switches,
        "summary": _summary(series, works, flip, epochs),
    }


def drift_lines(part: Part) -> list[str]:
    """The table of all contestants, who recovered when, and the switches, in Markdown."""
    flip, window, period, found = part["flip"], part["window"], part["period"], part["summary"]
    measures = ("work_before", "work_after", "work_after_ratio", "seconds_before", "seconds_after")
    rows = [
        (who, *(f"{c[m] if m == 'work_after_ratio' else 1e3 * c[m]:.2f}" for m in measures))
        for who, c in found["contestants"].items()
    ]
    columns = ("work per epoch, ms: before", "after", "after ÷ best", "time per epoch, ms: before", "after")
    lines = [
        f"{part['rows_per_epoch']:,} rows per stream and epoch, {part['epochs']} epochs, flip in epoch {flip}; rows "
        f"are forgotten after {window} epochs, T = {period} epochs.  {part['results']:,} results, in every epoch and "
        f"for every contestant those of a plain count.  Work is counted; seconds are those of probing, medians of "
        f"{part['repeat']} interleaved run(s).",
        "",
        *table(("contestant", *columns), rows),
        "",
        f"Before is epochs {window} to {flip - 1}, after is epochs {flip + window} to {part['epochs'] - 1}, when the "
        "state holds nothing from before the flip.",
        "",
        f"The static orders cost {found['degrades']:.1f} times the best orders after the flip, and "
        f"{found['against_itself']:.1f} times what they cost before it.  {_recovery_said(part)}",
    ]
    for who in PLANNED:
        lines += ["", f"Switches of {who}:", "", *(f"- {switch['text']}" for switch in part["switches"][who])]
    return lines


def draw_drift(part: Part, axes: Axes) -> None:
    """Draw the work per epoch of all contestants, the flip, the time until all old rows are gone, and the switches."""
    epochs = range(part["epochs"])
    styles = {"static": "o-", "dp_pick": "o-", "dp_pick mid": "o-", "oracle": "--"}
    names = {
        "static": "static: best orders before the flip",
        "dp_pick": f"dp_pick, T = {part['period']} epochs",
        "dp_pick mid": "dp_pick, flip in the middle of a period",
        "oracle": "best orders after the flip",
    }
    for who, series in part["contestants"].items():
        work = [1e3 * w for w in series["work"]]
        axes.plot(epochs, work, styles[who], color=COLOURS[who], label=names[who], markersize=3.5)
    flip = part["flip"]
    axes.axvline(flip, color="#333333", linestyle=":", label="flip")
    axes.axvspan(flip, flip + part["window"] - 1, color="#eeeeee", label="old rows still in the state")
    for who in PLANNED:
        # A switch after the last epoch is never in force.
        shown = sorted({s["epoch"] + 1 for s in part["switches"][who] if s["epoch"] + 1 < part["epochs"]})
        work = [1e3 * part["contestants"][who]["work"][e] for e in shown]
        label = "first epoch under switched orders" if who == "dp_pick" else None
        axes.plot(shown, work, "v", color="#c9a227", markersize=9, label=label, zorder=5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("work per epoch, ms")
    axes.set_title(part["title"], fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _arrived(epoch: int, rows: int, *, after: bool, same_keys: bool) -> dict[str, pa.Table]:
    """The rows of one epoch: each has a known key with the probability of its stream's role, else a key of its own."""
    random = np.random.default_rng([rows, epoch])
    known = max(rows * WINDOW // 10, 1)
    first = known if after and not same_keys else 0
    found = {}
    for number, (stream, role) in enumerate(zip(STREAMS, ROLES[after], strict=True)):
        keys = random.integers(first, first + known, rows)
        alone = 2 * known + (epoch * len(STREAMS) + number) * rows + np.arange(rows)
        found[stream] = one_key_join.table(np.where(random.random(rows) < SHARES[role], keys, alone))
    return found


def _nth_orders(n: int) -> Orders:
    """The n-th probe order of every driver."""
    return {driver: list(permutations(s for s in STREAMS if s != driver))[n] for driver in STREAMS}


def _best_orders(fixed: Sequence[Sequence[Ran]], epochs: range, coefficients: Coefficients) -> Orders:
    """For every driver the order with the least work in these epochs, which does not depend on the others' orders."""

    def work(driver: str, n: int) -> float:
        ran = fixed[n]
        return sum(d.work(coefficients) for e in epochs for d in ran[e].driven if d.stream == driver)

    return {s: _nth_orders(min(range(len(fixed)), key=lambda n: work(s, n)))[s] for s in STREAMS}


def _summary(
    series: Mapping[str, Mapping[str, Sequence[float]]],
    works: Mapping[str, Sequence[Sequence[float]]],
    flip: int,
    epochs: int,
) -> dict[str, Any]:
    settled, changed = slice(WINDOW, flip), slice(flip + WINDOW, epochs)
    mean = {
        who: {
            f"{what}_{when}": statistics.fmean(one[what][part])
            for what in ("work", "seconds")
            for when, part in (("before", settled), ("after", changed))
        }
        for who, one in series.items()
    }
    best = mean["oracle"]["work_after"]
    static, oracle = series["static"]["work"], series["oracle"]["work"]
    return {
        "contestants": {who: {**m, "work_after_ratio": m["work_after"] / best} for who, m in mean.items()},
        "degrades": mean["static"]["work_after"] / best,
        "against_itself": mean["static"]["work_after"] / mean["static"]["work_before"],
        # The first epoch in which the state has changed so far that other orders are better by more than 10 %.
        "reached": next((e for e in range(flip, epochs) if static[e] > NEAR * oracle[e]), None),
        "replaced": flip + WINDOW - 1,
        "recovered": {who: [_recovered(work, oracle, flip) for work in of] for who, of in works.items()},
        "late_work": {who: sum(of[0][flip:]) / sum(oracle[flip:]) for who, of in works.items()},
    }


def _recovered(work: Sequence[float], oracle: Sequence[float], flip: int) -> int | None:
    """The first epoch after the flip from which the work stays near the best; None if it does not.

    >>> _recovered([1.0, 5.0, 9.0, 2.0, 1.05], [1.0, 1.0, 1.0, 1.0, 1.0], flip=1)
    4
    """
    far = [e for e in range(flip, len(work)) if work[e] > NEAR * oracle[e]]
    first = max(far) + 1 if far else flip
    return first if first < len(work) else None


def _recovery_said(part: Part) -> str:
    found, period, reached = part["summary"], part["period"], part["summary"]["reached"]
    if reached is None:
        return "No other orders are better by more than 10 % after the flip: there is nothing to recover from."
    said = [
        f"The flip has reached the state in epoch {reached} (other orders are better by more than 10 %) and has "
        f"replaced it in epoch {found['replaced']}."
    ]
    for who in PLANNED:
        if None in found["recovered"][who]:
            said.append(f"{who} does **not** come within 10 % of the best orders again in every run.")
            continue
        last = max(found["recovered"][who])
        since = {"the flip reached the state": (last - reached) / period, "the flip": (last - part["flip"]) / period}
        verdicts = [f"{n:g} periods after {what} ({'yes' if n <= 2 else '**no**'})" for what, n in since.items()]
        said.append(
            f"{who} stays within 10 % of the best orders from epoch {last} on (the latest of all runs): "
            f"{', '.join(verdicts)}; from the flip to the end it does {found['late_work'][who]:.2f} times their work."
        )
    return "  ".join(said) + "  (Yes: recovers within two periods.)"
