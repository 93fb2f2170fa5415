"""`python -m benchmarks orders`: paper 000's experiments (its Figures 2 to 5), and a drift.

The query of the paper, written in all 24 orders of its four streams; every orderer starts from the written order and
re-chooses every period T.  Runs go through the engine's own tasks, state and commit in this process (`LocalEngine`),
without Spark's fixed cost per epoch, which is the same for all orders and would only dilute what is compared.

*Work* is counted: lookups and tuples, weighted by nanoseconds that were measured once for all contestants.  It does
not depend on the machine's noise.  Seconds are those of the whole run.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks import jobs as race
from benchmarks.options import Options
from benchmarks.orders.drift import drift, drift_plot, drift_table
from benchmarks.tpcds import data
from benchmarks.tpcds.workloads import FOUR
from plait.config import Config
from plait.errors import ConfigError
from plait.order.cost import Coefficients
from plait.query.expr import ColumnRef
from plait.query.graph import Alias, Equality, JoinGraph, Output
from plait.query.observed import EdgeCount
from plait.query.relation import ColumnDef, Relation
from plait.runtime.sinks import Noop
from plait.share.reoptimise import Planner
from plait.testing import LocalEngine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHORT = {"Cu": "customer", "Cr": "catalog_returns", "Wr": "web_returns", "Sr": "store_returns"}
"""The paper's names for the streams."""
ORDERERS = ("fixed", "selectivity_first", "greedy", "dp_pick")
ABLATIONS = ("query_cost_only", "match_cost_only", "no_smoothing")
SWEPT = ("CrWrSrCu", "WrCuCrSr")
"""The two initial orders of the paper's Figures 4 and 5."""
PARTS = ("iterative", "factorised", "ablations", "periods", "lengths", "drift")
TIE = 0.001
"""Contestants whose work differs by less than 0.1 % are equal."""
PAPER = {"fixed": 31.2, "greedy": 20.4, "selectivity_first": 56.1}
"""Paper 000: dpPick's average saving in per cent against each."""
PAPER_ABLATIONS = {"query_cost_only": 19.5, "match_cost_only": 6.3, "no_smoothing": None}
COLOURS = {
    "fixed": "#7a7a7a",
    "selectivity_first": "#b5541c",
    "greedy": "#3b6ea5",
    "dp_pick": "#0b6e4f",
    "query_cost_only": "#e07a1f",
    "match_cost_only": "#8e6bbf",
    "no_smoothing": "#c9a227",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: counted work and seconds."""

    seconds: float
    rows: int
    counts: EdgeCount
    planning: float
    """Seconds spent on statistics and planning."""
    switches: int


@dataclass
class Bench:
    """Data and settings that all runs have in common."""

    arrivals: list[dict[str, pa.Table]]
    scratch: Path
    coefficients: Coefficients = field(default_factory=Coefficients)

    def run(self, order: str, **settings: Any) -> Measured:
        """The whole input once, starting from a written order such as CuCrWrSr."""
        # No hysteresis, as in the paper: what differs between two runs is the orderer alone.
        config = Config(tasks=1, sync=False, history=len(self.arrivals), replan_gain=0.0, **settings)
        planner = Planner({"q": graph(order)}, relations(), config)
        checkpoint = tempfile.mkdtemp(prefix="orders-", dir=self.scratch)
        try:
            with LocalEngine(checkpoint, planner.plan, config, planner=planner) as engine:
                engine.driver.sinks = {"q": Noop()}
                begun = time.perf_counter()
                for arrived in self.arrivals:
                    engine.run(arrived)
                seconds = time.perf_counter() - begun
                progress = list(engine.driver.progress)
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        total = EdgeCount()
        for report in progress:
            for count in report["edges"].values():
                total.add(EdgeCount(**count))
        planning = sum(p["optimiser"]["seconds"] + p["task_seconds"].get("sample", 0.0) for p in progress)
        return Measured(seconds, sum(p["rows_out"]["q"] for p in progress), total, planning, len(planner.switches))

    def making_rows(self, measured: Measured) -> float:
        """The part of the work that no order can save: the last probe multiplies out the results themselves."""
        return self.coefficients.alpha_m * measured.rows / 1e9

    def work(self, measured: Measured) -> float:
        """Seconds of work as the common coefficients see it."""
        return self.coefficients.work(measured.counts) / 1e9


def graph(order: str) -> JoinGraph:
    """The paper's query with its streams written in this order."""
    names = [order[i : i + 2] for i in range(0, len(order), 2)]
    columns = {n: FOUR.columns[SHORT[n]] for n in names}
    aliases = tuple(Alias(n, SHORT[n], None, tuple(ColumnDef(c, c, "bigint") for c in columns[n])) for n in names)
    keys = {n: ColumnRef(n, columns[n][0], "bigint") for n in names}
    values = {n: ColumnRef(n, columns[n][1], "bigint") for n in names}
    equalities = tuple(Equality(keys["Cu"], keys[n]) for n in names if n != "Cu")
    outputs = tuple(Output(v.column, "bigint", v, v.column, (v,)) for v in values.values())
    return JoinGraph(FOUR.sql, aliases, equalities, outputs)


def relations() -> dict[str, Relation]:
    """The four streams."""
    return {t: Relation(t, tuple((c, "bigint") for c in FOUR.columns[t])) for t in SHORT.values()}


def run(out: Path, options: Options, console: Console) -> int:
    """Run it, write orders.json, orders.md and orders.png into `out`; 0 if all runs gave DuckDB's number of rows."""
    sf = options.sf or (0.01 if options.quick else 1.0)
    epochs = options.epochs or (8 if options.quick else 40)
    parts = options.parts or PARTS
    for part in parts:
        if part not in PARTS:
            raise ConfigError("BENCH_NAME", f"there is no part {part!r}", f"use: {', '.join(PARTS)}")
    document: dict[str, Any] = {
        "benchmark": "orders",
        "machine": race.machine(),
        "setup": {"sf": sf, "epochs": epochs, "repeat": options.repeat or 1},
        "parts": [],
    }
    with tempfile.TemporaryDirectory(prefix="orders-", dir=out) as scratch:
        folder = data.ensure(FOUR, out / "data", sf, epochs)
        bench = Bench(_arrivals(folder, epochs), Path(scratch))
        expected = _expected(bench.arrivals)
        bench.run("CuCrWrSr", probe="iterative")
        for part in (p for p in PARTS if p in parts):
            console.print(f"{part} …", highlight=False)
            found = _MEASURE[part](bench, options, console) | {"part": part}
            found["equal"] = set(found.pop("rows", [expected])) == {expected} and found.get("equal", True)
            document["parts"].append(found)
            _write(document, out)
    console.print((out / "orders.md").read_text(), markup=False, highlight=False)
    return 0 if all(part["equal"] for part in document["parts"]) else 1


def _arrivals(folder: Path, epochs: int) -> list[dict[str, pa.Table]]:
    def read(table: str, epoch: int) -> pa.Table:
        rows = pq.read_table(folder / table / f"{epoch:04}.parquet").select(list(FOUR.columns[table]))
        return rows.cast(pa.schema([(c, pa.int64()) for c in FOUR.columns[table]]))

    return [{t: read(t, e) for t in SHORT.values()} for e in range(epochs)]


def _expected(arrivals: Sequence[Mapping[str, pa.Table]]) -> int:
    """The number of results, by DuckDB."""
    import duckdb

    with duckdb.connect() as database:
        for table in SHORT.values():
            database.register(table, pa.concat_tables([arrived[table] for arrived in arrivals]))
        found = database.execute(f"SELECT count(*) FROM ({FOUR.sql})").fetchone()
    assert found is not None
    return int(found[0])


def _orders() -> list[str]:
    return ["".join(order) for order in permutations(SHORT)]


def _compared(bench: Bench, probe: str, contestants: Mapping[str, dict[str, Any]], repeat: int) -> dict[str, Any]:
    """Every contestant from every initial order; contestants are interleaved, seconds are medians."""
    runs: dict[str, dict[str, list[Measured]]] = {}
    for _ in range(repeat):
        for order in _orders():
            for who, settings in contestants.items():
                measured = bench.run(order, probe=probe, **settings)
                runs.setdefault(order, {}).setdefault(who, []).append(measured)
    everything = [m for by_who in runs.values() for measured in by_who.values() for m in measured]
    # One price list for all: measured over all runs together.
    bench.coefficients = Coefficients().fitted(m.counts for m in everything)
    return {
        "contestants": list(contestants),
        "coefficients": {
            "alpha_q": bench.coefficients.alpha_q,
            "rho": bench.coefficients.rho,
            "alpha_m": bench.coefficients.alpha_m,
        },
        "rows": [m.rows for m in everything],
        "runs": {
            order: {
                who: {
                    "work": statistics.median(bench.work(m) for m in measured),
                    "choice": statistics.median(bench.work(m) - bench.making_rows(m) for m in measured),
                    "seconds": statistics.median(m.seconds for m in measured),
                    "lookups": measured[0].counts.lookups,
                    "tuples": measured[0].counts.tuples,
                    "planning": statistics.median(m.planning / m.seconds for m in measured),
                    "switches": measured[0].switches,
                }
                for who, measured in by_who.items()
            }
            for order, by_who in runs.items()
        },
    }


def _iterative(bench: Bench, options: Options, console: Console) -> dict[str, Any]:
    title = "All 24 initial orders, iterative probing as in the paper (its Figure 2)"
    return {"title": title, **_compared(bench, "iterative", _by_orderer(), options.repeat or 1)}


def _factorised(bench: Bench, options: Options, console: Console) -> dict[str, Any]:
    title = "The same with the factorised probe, Plait's default"
    return {"title": title, **_compared(bench, "factorised", _by_orderer(), options.repeat or 1)}


def _ablations(bench: Bench, options: Options, console: Console) -> dict[str, Any]:
    contestants: dict[str, dict[str, Any]] = {"fixed": {"orderer": "fixed"}, "dp_pick": {"orderer": "dp_pick"}}
    contestants |= {variant: {"orderer": "dp_pick", "cost_variant": variant} for variant in ABLATIONS}
    title = "Ablations of dp_pick, iterative probing (Figure 3)"
    return {"title": title, **_compared(bench, "iterative", contestants, options.repeat or 1)}


def _by_orderer() -> dict[str, dict[str, Any]]:
    return {name: {"orderer": name} for name in ORDERERS}


def _swept(bench: Bench, settings: Mapping[str, Sequence[int]], title: str) -> dict[str, Any]:
    """dp_pick under each value of one setting, from the paper's two initial orders."""
    ((name, values),) = settings.items()
    lines: dict[str, list[dict[str, float]]] = {}
    rows = []
    for order in SWEPT:
        base = bench.run(order, probe="iterative", orderer="fixed")
        rows.append(base.rows)
        lines[f"{order} fixed"] = [{"value": v, "work": bench.work(base), "seconds": base.seconds} for v in values]
        found = []
        for value in values:
            one: dict[str, Any] = {"replan_epochs": 1, name: value}
            measured = bench.run(order, probe="iterative", orderer="dp_pick", **one)
            rows.append(measured.rows)
            found.append({"value": value, "work": bench.work(measured), "seconds": measured.seconds})
        lines[f"{order} dp_pick"] = found
    return {"title": title, "setting": name, "lines": lines, "rows": rows}


def _periods(bench: Bench, options: Options, console: Console) -> dict[str, Any]:
    epochs = len(bench.arrivals)
    values = [v for v in (1, 2, 3, 4, 6, 8, 10, 13, 16, 20) if v <= epochs // 2]
    return _swept(bench, {"replan_epochs": values}, "Period T, in epochs (Figure 4)")


def _lengths(bench: Bench, options: Options, console: Console) -> dict[str, Any]:
    values = [v for v in (1, 2, 4, 6, 10, 20, 40, 60, 100) if v <= max(len(bench.arrivals), 10)]
    return _swept(bench, {"history_periods": values}, "Length L of the statistics, T = 1 epoch (Figure 5)")


def _drift(bench: Bench, options: Options, console: Console) -> dict[str, Any]:
    return drift(bench.scratch, quick=options.quick)


_MEASURE = {
    "iterative": _iterative,
    "factorised": _factorised,
    "ablations": _ablations,
    "periods": _periods,
    "lengths": _lengths,
    "drift": _drift,
}


def _write(document: Mapping[str, Any], out: Path) -> None:
    (out / "orders.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    (out / "orders.md").write_text("\n".join(_markdown(document)) + "\n")
    _plot(document, out / "orders.png")


def summary(part: Mapping[str, Any], who: str = "dp_pick", measure: str = "work") -> dict[str, Any]:
    """How one contestant compares with the others, over all initial orders."""
    runs: Mapping[str, Mapping[str, Mapping[str, float]]] = part["runs"]
    others = [name for name in part["contestants"] if name != who]
    behind = []
    for by_who in runs.values():
        best = min(by_who[name][measure] for name in part["contestants"])
        behind.append(by_who[who][measure] / best - 1)
    return {
        "orders": len(runs),
        # Ties count: from many orders greedy ends with the very same plans, a few epochs earlier or later.
        "least": sum(b <= TIE for b in behind),
        "most_behind": max(behind),
        "saving": {
            name: 100 * statistics.fmean(1 - r[who][measure] / r[name][measure] for r in runs.values())
            for name in others
        },
        "saving_range": {
            name: (
                100 * min(1 - r[who][measure] / r[name][measure] for r in runs.values()),
                100 * max(1 - r[who][measure] / r[name][measure] for r in runs.values()),
            )
            for name in others
        },
    }


def _markdown(document: Mapping[str, Any]) -> Iterator[str]:
    setup, machine = document["setup"], document["machine"]
    yield "# python -m benchmarks orders"
    yield ""
    yield (
        f"TPC-DS at scale factor {setup['sf']:g}, {setup['epochs']} epochs, {setup['repeat']} run(s) of each; the "
        "engine's own tasks, state and commit in one process, one task, without Spark.  Work is counted (lookups and "
        "tuples, priced alike for all contestants); seconds are of the whole run."
    )
    yield ""
    memory = machine["memory_bytes"] / 2**30
    yield f"{machine['cores']} cores, {memory:.0f} GiB, {machine['system']}; {machine['when']}."
    for part in document["parts"]:
        yield ""
        yield f"## {part['title']}"
        yield ""
        if part["part"] == "drift":
            yield drift_table(part)
        elif "runs" in part:
            yield from _compared_lines(part)
        else:
            yield from _swept_lines(part)


def _compared_lines(part: Mapping[str, Any]) -> Iterator[str]:
    names = part["contestants"]
    prices = part["coefficients"]
    yield (
        f"Prices: α_q {prices['alpha_q']:.1f} ns per run visited (each doubling {prices['rho']:.2f} of that), "
        f"α_m {prices['alpha_m']:.1f} ns per tuple.  Work in seconds."
    )
    yield ""
    yield (
        "| initial order | "
        + " | ".join(f"{n} work" for n in names)
        + " | "
        + " | ".join(f"{n} s" for n in names)
        + " |"
    )
    yield "|---|" + "---:|" * (2 * len(names))
    for order, by_who in part["runs"].items():
        works = [f"{by_who[n]['work']:.3f}" for n in names]
        seconds = [f"{by_who[n]['seconds']:.2f}" for n in names]
        yield f"| {order} | " + " | ".join(works) + " | " + " | ".join(seconds) + " |"
    found = summary(part)
    yield ""
    yield (
        f"dp_pick needs the least work from {found['least']} of {found['orders']} initial orders (ties within 0.1 % "
        f"included) and is at most {100 * found['most_behind']:.1f} % behind the best."
    )
    yield ""
    paper = PAPER_ABLATIONS if part["part"] == "ablations" else PAPER
    yield "| dp_pick saves, against | work, average | range | work less making rows | seconds | paper 000, seconds |"
    yield "|---|---:|---:|---:|---:|---:|"
    by_seconds = summary(part, measure="seconds")["saving"]
    by_choice = summary(part, measure="choice")["saving"]
    for name, saving in found["saving"].items():
        low, high = found["saving_range"][name]
        said = paper.get(name)
        yield (
            f"| {name} | {saving:.1f} % | {low:.1f} to {high:.1f} % | {by_choice[name]:.1f} % | "
            f"{by_seconds[name]:.1f} % | "
            f"{'' if said is None else f'{said:.1f} %'} |"
        )
    same = statistics.fmean(1 - r["fixed"]["choice"] / r["fixed"]["work"] for r in part["runs"].values())
    yield ""
    yield (
        f"Making the result rows is {100 * same:.0f} % of the fixed orders' work and the same for every order; the "
        "third column leaves it out."
    )
    planning = statistics.median(r["dp_pick"]["planning"] for r in part["runs"].values())
    yield ""
    yield f"Statistics and planning take {100 * planning:.2f} % of dp_pick's run (median; without Spark's fixed cost)."


def _swept_lines(part: Mapping[str, Any]) -> Iterator[str]:
    lines = part["lines"]
    yield f"| {part['setting']} | " + " | ".join(f"{name}: work (seconds)" for name in lines) + " |"
    yield "|---|" + "---:|" * len(lines)
    for i, point in enumerate(next(iter(lines.values()))):
        cells = [f"{points[i]['work']:.3f} ({points[i]['seconds']:.2f})" for points in lines.values()]
        yield f"| {point['value']:g} | " + " | ".join(cells) + " |"


def _plot(document: Mapping[str, Any], file: Path) -> None:
    """One row per part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = document["parts"]
    figure, grid = pyplot.subplots(len(parts), 1, figsize=(13, 3.9 * len(parts)), squeeze=False, layout="constrained")
    for (axes,), part in zip(grid, parts, strict=True):
        if part["part"] == "drift":
            drift_plot(part, axes)
        elif "runs" in part:
            _plot_compared(axes, part)
        else:
            _plot_swept(axes, part)
    setup = document["setup"]
    figure.suptitle(f"python -m benchmarks orders, SF {setup['sf']:g}, {setup['epochs']} epochs")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _plot_compared(axes: Axes, part: Mapping[str, Any]) -> None:
    names, orders = part["contestants"], list(part["runs"])
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(orders))]
        axes.bar(places, [part["runs"][o][name]["work"] for o in orders], width, label=name, color=COLOURS[name])
    axes.set_xticks(range(len(orders)), orders, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("work, seconds")
    axes.set_title(part["title"], fontsize=10)
    axes.legend(fontsize=8, ncols=len(names), loc="upper center")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.15)


def _plot_swept(axes: Axes, part: Mapping[str, Any]) -> None:
    for name, points in part["lines"].items():
        style = "--" if name.endswith("fixed") else "o-"
        axes.plot([p["value"] for p in points], [p["work"] for p in points], style, label=name)
    axes.set_xlabel(part["setting"])
    axes.set_ylabel("work, seconds")
    axes.set_ylim(bottom=0)
    axes.set_title(part["title"], fontsize=10)
    axes.legend(fontsize=8)
