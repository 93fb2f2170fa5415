"""Tables of the benchmark `state`; its plots are in `plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import Document, Part, Report, size, table
from benchmarks.state.plot import NAMES, draw
from benchmarks.state.soak_data import DELAY_EPOCHS, NEVER, OLD

ENFORCED = {
    "cgroup v1": "a memory cgroup (v1): the kernel charges processes, page cache and tmpfs, reclaims cache, then kills",
    "cgroup v2": "a memory cgroup (v2): the kernel charges processes, page cache and tmpfs, reclaims cache, then kills",
    "watched": "a watcher that ends the tree when its summed PSS and tmpfs pass the limit; **the page cache is not "
    "limited, so seconds under a limit mean little**",
}


LIMITS_COLUMNS = (
    "memory for state",
    "state / memory",
    "contestant",
    "limit",
    "outcome",
    "epochs",
    "seconds",
    "× Plait",
    "results",
    "peak",
    "without cache",
    "read",
    "written",
)


def how(document: Document) -> str:
    """What was measured, and how."""
    setup = document["setup"]
    enforced = sorted({run["enforced"] for part in document["parts"] for run in _runs(part)})
    told = (
        f"Each run is one process tree (Python, Java with a fully resident heap of {setup['memory']}, Python workers) "
        f"on 2 cores under one limit, set by {'; '.join(ENFORCED[e] for e in enforced)}.  Seconds run from defining "
        "the query to its end, with the session up and after a warm-up over a few rows; rows are dropped (noop)."
    )
    if setup.get("settings"):
        told += f"  Plait's settings: {', '.join(f'{k}={v}' for k, v in setup['settings'].items())}."
    return told


def lines(part: Part, document: Document) -> list[str]:
    """The tables of one part."""
    return _LINES[part["part"]](part, document["setup"])


def _limits(part: Part, setup: Mapping[str, Any]) -> list[str]:
    plait = part["bases"].get("plait", min(part["bases"].values()))
    more = [f"{NAMES[who]} gets its own, {size(base)}" for who, base in part["bases"].items() if base > plait]
    free = (f"{NAMES[r['who']]} {r['seconds']:.1f} s{_lean(r)}" for r in part["ample"] if r["outcome"] == "finished")
    found = [
        f"TPC-DS scale factor {setup['sf']:g} in {setup['epochs']} epochs; {part['expected']:,} rows must come out "
        f"(DuckDB).  The state that Plait ends with is {size(part['state_bytes'])}.  With ample memory: "
        f"{', '.join(free)}.",
        "",
        f"A limit is the base and the memory for the state.  The base, {size(plait)}, is what Plait's processes hold "
        "apart from state, over all epochs, at most; it is the same for all"
        + (f", but {', '.join(more)}, which is more generous" if more else "")
        + f".  Spark has a heap of 1 GiB, and its RocksDB is told to keep within half of the memory for the state.  "
        f"Who takes {part['patience']:g} times as long as Plait under the same limit is stopped.",
        "",
        *table(LIMITS_COLUMNS, [_limits_row(run, part) for run in part["runs"]], "rrlrlrrrrrrrr"),
        "",
    ]
    return [*found, *(f"- {sentence}" for sentence in verdicts(part))]


def _limits_row(run: Mapping[str, Any], part: Part) -> tuple[str, ...]:
    share = run["rows"] / part["expected"] if part["expected"] else 1.0
    return (
        size(run["memory"]),
        f"{run['ratio']:.1f}",
        NAMES[run["who"]],
        size(run["limit"]),
        outcome(run, part["expected"]),
        f"{len(run['epochs'])}",
        f"{run['seconds']:.1f}",
        times_plait(run, part["runs"]),
        f"{100 * share:.1f} %",
        size(run["peak_bytes"]),
        size(run["peak_held"]),
        size(run["read_bytes"]),
        size(run["written_bytes"]),
    )


def _lean(run: Mapping[str, Any]) -> str:
    return f" (`memory_limit` {run['config']['memory_limit']})" if "memory_limit" in run["config"] else ""


def times_plait(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """The seconds of a run over Plait's under the same limit; empty for a run that died.

    >>> runs = [{"who": w, "memory": 1, "outcome": "finished", "seconds": s} for w, s in (("plait", 2), ("spark", 9))]
    >>> [times_plait(run, runs) for run in runs], times_plait(runs[1] | {"outcome": "stopped"}, runs)
    (['1.0', '4.5'], '> 4.5')
    """
    mine = [r for r in runs if r["who"] == "plait" and r["memory"] == run["memory"] and r["outcome"] == "finished"]
    if not mine or run["outcome"] not in ("finished", "stopped"):
        return ""
    return f"{'> ' if run['outcome'] == 'stopped' else ''}{run['seconds'] / mine[0]['seconds']:.1f}"


def outcome(run: Mapping[str, Any], expected: int | None) -> str:
    """How a run ended, in a word or two.

    >>> outcome({"outcome": "finished", "rows": 3}, 4), outcome({"outcome": "killed", "rows": 3}, 4)
    ('**WRONG ROWS**', '**killed**')
    """
    if run["outcome"] != "finished":
        return f"**{run['outcome']}**"
    return "finished" if run["rows"] == expected else "**WRONG ROWS**"


def verdicts(part: Part) -> list[str]:
    """One sentence for each contestant, why a run failed that was not killed for its memory, and the goals."""
    said = []
    for who in dict.fromkeys(run["who"] for run in part["runs"]):
        runs = [run for run in part["runs"] if run["who"] == who]
        ended = [run for run in runs if run["outcome"] == "finished"]
        sentence = f"{NAMES[who]} finishes under {len(ended)} of {len(runs)} limits"
        if ended:
            tight, wide = (f(ended, key=lambda run: run["memory"]) for f in (min, max))
            sentence += f": {wide['seconds']:.1f} s with {size(wide['memory'])}"
            if tight["memory"] < wide["memory"]:
                sentence += f", {tight['seconds']:.1f} s with {size(tight['memory'])}"
            sentence += f" for {tight['ratio']:.1f} times as much state"
        said.append(sentence + ".")
        said += [
            f"{NAMES[who]} failed under {size(run['memory'])}: `{(run['failure'] or '')[:300]}`".replace("\n", " ")
            for run in runs
            if run["outcome"] == "failed"
        ]
    goals = {
        "quarter": "With a quarter of the state Plait takes at most twice its time with ample memory "
        f"({part['ample_seconds']:.1f} s)",
        "memory_dies": "State in memory dies there",
        "spark": "Spark's joins take at least three times as long as Plait under every limit, or do not end",
    }
    return said + [f"{goals[goal]}: {'yes' if met else '**no**'}." for goal, met in part["met"].items()]


def _soak(part: Part, setup: Mapping[str, Any]) -> list[str]:
    run = part["run"]
    found = [
        "Orders, payments, shipments and returns on the order's number, nothing ever expires; "
        f"{part['rows_per_epoch']:,} rows per epoch; most name an order {DELAY_EPOCHS:g} epoch after it on average, "
        f"{OLD:.0%} any order of the past, {NEVER:.0%} one that never comes.  Sized for {part['state_gb']:g} GiB in "
        f"{part['epochs']} epochs; the whole process tree lives within {size(run['limit'])}.",
        "",
        *table(("", ""), _soak_rows(part)),
        "",
        f"The input is made beside the run, outside of its limit, and took {part['feeding_seconds']:.1f} s of a core; "
        f"the engine had to wait for it {part['starved']} times.",
    ]
    return [*found, "", f"It ended early: `{run['failure'][:400]}`"] if run["failure"] else found


def _soak_rows(part: Part) -> list[tuple[str, str]]:
    run, figures, checked = part["run"], part["figures"], part["checked"]
    epochs = run["epochs"]
    last = epochs[-1] if epochs else {}
    state = last.get("state_bytes", 0)
    rows = [
        ("outcome", outcome(run, part["expected"])),
        ("epochs, seconds", f"{len(epochs)}, {run['seconds']:.1f}"),
        ("rows in, rows out", f"{sum(sum(e['rows_in'].values()) for e in epochs):,}, {run['rows']:,}"),
        ("state at the end", f"{size(state)}, {last.get('state_rows', 0):,} rows"),
        ("state / limit", f"{state / run['limit']:.2f}"),
        ("peak memory, page cache included", size(run["peak_bytes"])),
        ("peak memory without it", size(run["peak_held"])),
    ]
    if figures:
        seconds = f"{figures['median']:.2f}, {figures['p99']:.2f}, {figures['max']:.2f}"
        late = f"{figures['late_throughput']:.2f} {_met(part['met']['throughput'])}"
        rows += [
            ("seconds per epoch: median, p99, max", seconds),
            ("p99 / median, at most 3", f"{figures['p99_over_median']:.2f} {_met(part['met']['p99'])}"),
            ("rows in per second, by quarter", ", ".join(f"{q:,.0f}" for q in figures["quarters"])),
            ("last quarter / second, at least 0.7", late),
        ]
    if amplification := last.get("state", {}).get("amplification"):
        factors = ", ".join(f"{kind} {factor:.2f}" for kind, factor in amplification.items())
        rows.append(("amplification at the end", factors))
    if filters := _summed(epochs, "filter"):
        rows.append(("keys asked of filters, passed, found", ", ".join(f"{n:,}" for n in filters.values())))
    if part["disk"]:
        most = max(d["bytes"] / d["live"] for d in part["disk"] if d["live"]) if last else 0.0
        rows.append(("checkpoint on disk / live state, at most", f"{most:.2f}"))
    wrong = checked["wrong"]
    told = f"**{len(wrong)} wrong or more, first {wrong[0]}**" if wrong else "all right"
    return [*rows, ("epochs whose rows were compared", f"{checked['compared']}: {told}")]


def _sweep(part: Part, setup: Mapping[str, Any]) -> list[str]:
    usual = ", ".join(f"`{name}` {'auto' if value is None else value}" for name, value in part["usual"].items())
    found = [
        f"Plait alone, TPC-DS scale factor {setup['sf']:g}, {size(part['state_bytes'])} of state, "
        f"{size(part['limit'])} for the process tree: the base, {size(part['base'])}, and a quarter of the state.  One "
        f"thing changes at a time; the rest is {usual}.  State is what lies on disk at the end."
    ]
    measures = ("outcome", "seconds", "state", "write / read / space amplification", "read", "written")
    for name, runs in part["lines"].items():
        rows = [_sweep_row(run, part["expected"]) for run in runs]
        found += ["", *table((f"`{name}`", *measures), rows, "rlrrrrr")]
    return found


def _sweep_row(run: Mapping[str, Any], expected: int) -> tuple[str, ...]:
    last = run["epochs"][-1] if run["epochs"] else {}
    factors = last.get("state", {}).get("amplification", {})
    return (
        f"{run['value']}",
        outcome(run, expected),
        f"{run['seconds']:.1f}",
        size(last.get("state_bytes", 0)),
        " / ".join(f"{factors[kind]:.2f}" for kind in ("write", "read", "space") if kind in factors),
        size(run["read_bytes"]),
        size(run["written_bytes"]),
    )


def _backends(part: Part, setup: Mapping[str, Any]) -> list[str]:
    backends = list(dict.fromkeys(run["who"] for run in part["runs"]))
    rows = []
    for ratio in dict.fromkeys(run["ratio"] for run in part["runs"]):
        found = [run for run in part["runs"] if run["ratio"] == ratio]
        cells = [f"{_ended(run, setup)}; {size(run['read_bytes'])}, {size(run['written_bytes'])}" for run in found]
        share, under = ("ample", "none") if ratio is None else (f"{ratio:g}", size(found[0]["limit"]))
        rows.append((share, under, *cells))
    return [
        f"TPC-DS scale factor {setup['sf']:g} in {setup['epochs']} epochs, one process without Spark: the same "
        "operator with its state in Plait's sorted runs on disk, in memory, and in RocksDB (rocksdict).  The state "
        f"weighs {size(part['state_bytes'])} in runs; the limit of a process is the base, {size(part['base'])}, and a "
        "share of that.  Seconds, or how it ended; bytes read from and written to the disk.  Who takes "
        f"{part['patience']:g} times as long as the runs is stopped.",
        "",
        *table(("memory / state", "limit", *backends), rows),
    ]


def _ended(run: Mapping[str, Any], setup: Mapping[str, Any]) -> str:
    if run["outcome"] == "finished":
        return f"{run['seconds']:.1f} s"
    return f"**{run['outcome']}** at {run['seconds']:.1f} s, {len(run['epochs'])} of {setup['epochs']} epochs"


_LINES = {"limits": _limits, "soak": _soak, "sweep": _sweep, "backends": _backends}


def _runs(part: Part) -> list[Mapping[str, Any]]:
    swept = [run for line in part.get("lines", {}).values() for run in line]
    return [*part.get("runs", ()), *swept, *([part["run"]] if "run" in part else [])]


def _summed(epochs: list[Mapping[str, Any]], what: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for epoch in epochs:
        for key, value in epoch.get("state", {}).get(what, {}).items():
            total[key] = total.get(key, 0) + value
    return total


def _met(yes: bool) -> str:
    return "(met)" if yes else "**(not met)**"


REPORT = Report(how, lines, draw)
