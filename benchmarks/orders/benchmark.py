"""Measures the orderers: paper 000's experiments (its Figures 2 to 5), and a drift.

The query of the paper is written in all 24 orders of its four streams; every orderer starts from the written order and
re-chooses every period T.  Runs go through the engine's own tasks, state and commit in this process (`LocalEngine`),
without Spark's fixed cost per epoch, which is the same for all orders and would only dilute what is compared.

*Work* is counted: lookups and tuples, weighted by nanoseconds that were measured once for all contestants.  It does
not depend on the machine's noise.  Seconds are those of the whole run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.epoch_files import epoch_file
from benchmarks.jobs import by_turns
from benchmarks.options import Options, chosen, scale_factor
from benchmarks.orders.drift import drift
from benchmarks.orders.report import REPORT
from benchmarks.orders.rewiring import rewiring
from benchmarks.report import publish
from benchmarks.tpcds import data
from benchmarks.tpcds.workloads import FOUR
from benchmarks.without_spark import QUERY, bigint_relations, join_graph, local_engine
from plait.config import Config
from plait.order.cost import Coefficients
from plait.query.expr import ColumnRef
from plait.query.graph import JoinGraph
from plait.query.observed import EdgeCount
from plait.share.planner import Planner

SHORT = {"Cu": "customer", "Cr": "catalog_returns", "Wr": "web_returns", "Sr": "store_returns"}
"""The paper's names for the streams."""
ORDERERS = ("fixed", "selectivity_first", "greedy", "dp_pick")
ABLATIONS = ("query_cost_only", "match_cost_only", "no_smoothing")
SWEPT = ("CrWrSrCu", "WrCuCrSr")
"""The two initial orders of the paper's Figures 4 and 5."""
PARTS = ("iterative", "factorised", "ablations", "periods", "lengths", "drift", "rewiring")


@dataclass(frozen=True, slots=True)
class Setup:
    """Options with every default filled in."""

    quick: bool
    sf: float
    epochs: int
    parts: tuple[str, ...]
    repeat: int


def settle(options: Options) -> Setup:
    """Fill in the defaults.

    >>> settle(Options(quick=True, parts=("drift",))).parts, settle(Options()).epochs
    (('drift',), 40)
    """
    return Setup(
        quick=options.quick,
        sf=scale_factor(options, full=1.0, quick=0.01),
        epochs=options.epochs or (8 if options.quick else 40),
        parts=chosen("part", options.parts, PARTS, PARTS),
        repeat=options.repeat or 1,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: its seconds, its rows, and what was counted."""

    seconds: float
    rows: int
    counts: EdgeCount
    planning: float
    """Seconds spent on statistics and planning."""
    switches: int


@dataclass
class Runner:
    """Runs the query over the same rows again and again; all runs have one price list of work."""

    arrivals: list[dict[str, pa.Table]]
    scratch: Path
    coefficients: Coefficients = field(default_factory=Coefficients)

    def run(self, order: str, **settings: Any) -> Measured:
        """Run over the whole input once, starting from a written order such as CuCrWrSr."""
        # No hysteresis, as in the paper: what differs between two runs is the orderer alone.
        config = Config(tasks=1, sync=False, history=len(self.arrivals), replan_gain=0.0, **settings)
        planner = Planner({QUERY: graph(order)}, bigint_relations(FOUR.columns), config)
        with local_engine(self.scratch, planner) as engine:
            begun = time.perf_counter()
            for arrived in self.arrivals:
                engine.run(arrived)
            seconds = time.perf_counter() - begun
            progress = list(engine.progress)
        total = EdgeCount()
        for report in progress:
            for count in report["edges"].values():
                total.add(EdgeCount(**count))
        planning = sum(p["optimiser"]["seconds"] + p["task_seconds"].get("sample", 0.0) for p in progress)
        return Measured(seconds, sum(p["rows_out"][QUERY] for p in progress), total, planning, len(planner.switches))

    def making_rows(self, measured: Measured) -> float:
        """Seconds of work that no order can save: the last probe multiplies out the results themselves."""
        return self.coefficients.alpha_m * measured.rows / 1e9

    def work(self, measured: Measured) -> float:
        """Seconds of work at the common prices."""
        return self.coefficients.work(measured.counts) / 1e9


def graph(order: str) -> JoinGraph:
    """The paper's query with its streams written in this order."""
    names = [order[i : i + 2] for i in range(0, len(order), 2)]
    aliases = {name: (SHORT[name], FOUR.columns[SHORT[name]]) for name in names}
    values = [ColumnRef(name, columns[1], "bigint") for name, (_, columns) in aliases.items()]
    return join_graph(FOUR.sql, aliases, "Cu", [(value.column, value) for value in values])


def run(out: Path, options: Options, console: Console) -> int:
    """Run the benchmark and write its report into `out`; 0 if all runs gave DuckDB's number of rows."""
    setup = settle(options)
    with tempfile.TemporaryDirectory(prefix="orders-", dir=out) as scratch:
        parts = publish("orders", setup, measured(out, Path(scratch), setup, console), REPORT, out, console)
    return 0 if all(part["equal"] for part in parts) else 1


def measured(out: Path, scratch: Path, setup: Setup, console: Console) -> Iterator[dict[str, Any]]:
    """The chosen parts; what is run first compiles, and does not count."""
    folder = data.ensure(FOUR, out / "data", setup.sf, setup.epochs)
    runner = Runner(_arrivals(folder, setup.epochs), scratch)
    expected = data.count_results(FOUR, folder)
    runner.run("CuCrWrSr", probe="iterative")
    for part in setup.parts:
        console.print(f"{part} …", highlight=False)
        found = _MEASURE[part](runner, setup) | {"part": part}
        found["equal"] = set(found.pop("rows", [expected])) == {expected} and found.get("equal", True)
        yield found


def _arrivals(folder: Path, epochs: int) -> list[dict[str, pa.Table]]:
    def read(table: str, epoch: int) -> pa.Table:
        rows = pq.read_table(epoch_file(folder / table, epoch)).select(list(FOUR.columns[table]))
        return rows.cast(pa.schema([(c, pa.int64()) for c in FOUR.columns[table]]))

    return [{t: read(t, e) for t in SHORT.values()} for e in range(epochs)]


def _orders() -> list[str]:
    return ["".join(order) for order in permutations(SHORT)]


def _compared(runner: Runner, probe: str, contestants: Mapping[str, dict[str, Any]], repeat: int) -> dict[str, Any]:
    """Run every contestant from every initial order; contestants take turns, seconds are medians."""
    pairs = [(order, who) for order in _orders() for who in contestants]
    runs = by_turns(pairs, repeat, lambda pair: runner.run(pair[0], probe=probe, **contestants[pair[1]]))
    everything = [m for measured in runs.values() for m in measured]
    # One price list for all: measured over all runs together.
    runner.coefficients = Coefficients().fitted(m.counts for m in everything)
    return {
        "contestants": list(contestants),
        "coefficients": asdict(runner.coefficients),
        "rows": [m.rows for m in everything],
        "runs": {order: {who: _figures(runner, runs[order, who]) for who in contestants} for order in _orders()},
    }


def _figures(runner: Runner, runs: Sequence[Measured]) -> dict[str, float]:
    """The medians of some runs; `choice` is the work without the part that is the same for all orders."""
    return {
        "work": statistics.median(runner.work(m) for m in runs),
        "choice": statistics.median(runner.work(m) - runner.making_rows(m) for m in runs),
        "seconds": statistics.median(m.seconds for m in runs),
        "lookups": runs[0].counts.lookups,
        "tuples": runs[0].counts.tuples,
        "planning": statistics.median(m.planning / m.seconds for m in runs),
        "switches": runs[0].switches,
    }


def _iterative(runner: Runner, setup: Setup) -> dict[str, Any]:
    title = "All 24 initial orders, iterative probing as in the paper (its Figure 2)"
    return {"title": title, **_compared(runner, "iterative", _by_orderer(), setup.repeat)}


def _factorised(runner: Runner, setup: Setup) -> dict[str, Any]:
    title = "The same with the factorised probe, Plait's default"
    return {"title": title, **_compared(runner, "factorised", _by_orderer(), setup.repeat)}


def _ablations(runner: Runner, setup: Setup) -> dict[str, Any]:
    contestants: dict[str, dict[str, Any]] = {"fixed": {"orderer": "fixed"}, "dp_pick": {"orderer": "dp_pick"}}
    contestants |= {variant: {"orderer": "dp_pick", "cost_variant": variant} for variant in ABLATIONS}
    title = "Ablations of dp_pick, iterative probing (Figure 3)"
    return {"title": title, **_compared(runner, "iterative", contestants, setup.repeat)}


def _by_orderer() -> dict[str, dict[str, Any]]:
    return {name: {"orderer": name} for name in ORDERERS}


def _swept(runner: Runner, settings: Mapping[str, Sequence[int]], title: str) -> dict[str, Any]:
    """Run dp_pick under each value of one setting, from the paper's two initial orders."""
    ((name, values),) = settings.items()
    lines: dict[str, list[dict[str, float]]] = {}
    rows = []
    for order in SWEPT:
        base = runner.run(order, probe="iterative", orderer="fixed")
        rows.append(base.rows)
        lines[f"{order} fixed"] = [{"value": v, "work": runner.work(base), "seconds": base.seconds} for v in values]
        found = []
        for value in values:
            one: dict[str, Any] = {"replan_epochs": 1, name: value}
            measured = runner.run(order, probe="iterative", orderer="dp_pick", **one)
            rows.append(measured.rows)
            found.append({"value": value, "work": runner.work(measured), "seconds": measured.seconds})
        lines[f"{order} dp_pick"] = found
    return {"title": title, "setting": name, "lines": lines, "rows": rows}


def _periods(runner: Runner, setup: Setup) -> dict[str, Any]:
    epochs = len(runner.arrivals)
    values = [v for v in (1, 2, 3, 4, 6, 8, 10, 13, 16, 20) if v <= epochs // 2]
    return _swept(runner, {"replan_epochs": values}, "Period T, in epochs (Figure 4)")


def _lengths(runner: Runner, setup: Setup) -> dict[str, Any]:
    values = [v for v in (1, 2, 4, 6, 10, 20, 40, 60, 100) if v <= max(len(runner.arrivals), 10)]
    return _swept(runner, {"history_periods": values}, "Length L of the statistics, T = 1 epoch (Figure 5)")


def _drift(runner: Runner, setup: Setup) -> dict[str, Any]:
    return drift(runner.scratch, quick=setup.quick)


def _rewiring(runner: Runner, setup: Setup) -> dict[str, Any]:
    return rewiring(runner.scratch, quick=setup.quick)


_MEASURE = {
    "iterative": _iterative,
    "factorised": _factorised,
    "ablations": _ablations,
    "periods": _periods,
    "lengths": _lengths,
    "drift": _drift,
    "rewiring": _rewiring,
}
