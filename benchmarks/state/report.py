"""state.json, state.md and state.png from one document of measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.state.plot import NAMES, plot
from benchmarks.state.soak_data import DELAY_EPOCHS, NEVER, OLD

HOW = {
    "cgroup v1": "a memory cgroup (v1): the kernel charges processes, page cache and tmpfs, reclaims cache, then kills",
    "cgroup v2": "a memory cgroup (v2): the kernel charges processes, page cache and tmpfs, reclaims cache, then kills",
    "watched": "a watcher that ends the tree when its summed PSS and tmpfs pass the limit; **the page cache is not "
    "limited, so seconds under a limit mean little**",
}


def write(document: Mapping[str, Any], out: Path) -> str:
    """Write all three files; gives the table."""
    (out / "state.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    text = markdown(document)
    (out / "state.md").write_text(text)
    plot(document, out / "state.png")
    return text


def markdown(document: Mapping[str, Any]) -> str:
    """The tables, with what was measured how."""
    setup, machine = document["setup"], document["machine"]
    runs = [run for part in document["parts"] for run in _runs(part)]
    enforced = sorted({run["enforced"] for run in runs})
    lines = [
        "# python -m benchmarks state",
        "",
        f"Each run is one process tree (Python, Java with a fully resident heap of {setup['memory']}, Python workers) "
        f"on 2 cores under one limit, set by {'; '.join(HOW[e] for e in enforced)}.  Seconds run from defining the "
        "query to its end, with the session up and after a warm-up over a few rows; rows are dropped (noop).",
        "",
        f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}, Python "
        f"{machine['python']}, "
        + ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
        + f"; {machine['when']}.",
    ]
    if setup.get("settings"):
        lines += ["", f"Plait's settings: {', '.join(f'{k}={v}' for k, v in setup['settings'].items())}."]
    for part in document["parts"]:
        lines += ["", f"## {part['title']}", "", *_LINES[part["part"]](part, setup)]
    return "\n".join(lines) + "\n"


def _limits(part: Mapping[str, Any], setup: Mapping[str, Any]) -> list[str]:
    plait = part["bases"].get("plait", min(part["bases"].values()))
    more = [f"{NAMES[who]} gets its own, {_mib(base)}" for who, base in part["bases"].items() if base > plait]
    free = (f"{NAMES[r['who']]} {r['seconds']:.1f} s{_lean(r)}" for r in part["ample"] if r["outcome"] == "finished")
    lines = [
        f"TPC-DS scale factor {setup['sf']:g} in {setup['epochs']} epochs; {part['expected']:,} rows must come out "
        f"(DuckDB).  The state that Plait ends with is {_mib(part['state_bytes'])}.  With ample memory: "
        f"{', '.join(free)}.",
        "",
        f"A limit is the base and the memory for the state.  The base, {_mib(plait)}, is what Plait's processes hold "
        "apart from state, over all epochs, at most; it is the same for all"
        + (f", but {', '.join(more)}, which is more generous" if more else "")
        + f".  Spark has a heap of 1 GiB, and its RocksDB is told to keep within half of the memory for the state.  "
        f"Who takes {part['patience']:g} times as long as Plait under the same limit is stopped.",
        "",
        "| memory for state | state / memory | contestant | limit | outcome | epochs | seconds | × Plait | results "
        "| peak | without cache | read | written |",
        "|---:|---:|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in part["runs"]:
        share = run["rows"] / part["expected"] if part["expected"] else 1.0
        told = (
            _mib(run["memory"]),
            f"{run['ratio']:.1f}",
            NAMES[run["who"]],
            _mib(run["limit"]),
            outcome(run, part["expected"]),
            f"{len(run['epochs'])}",
            f"{run['seconds']:.1f}",
            times_plait(run, part["runs"]),
            f"{100 * share:.1f} %",
            _mib(run["peak_bytes"]),
            _mib(run["peak_held"]),
            _mib(run["read_bytes"]),
            _mib(run["written_bytes"]),
        )
        lines.append(f"| {' | '.join(told)} |")
    lines += ["", *(f"- {sentence}" for sentence in verdicts(part))]
    return lines


def _lean(run: Mapping[str, Any]) -> str:
    return f" (`memory_limit` {run['config']['memory_limit']})" if "memory_limit" in run["config"] else ""


def times_plait(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """Its seconds over Plait's under the same limit; nothing for who died.

    >>> runs = [{"who": w, "memory": 1, "outcome": "finished", "seconds": s} for w, s in (("plait", 2), ("spark", 9))]
    >>> [times_plait(run, runs) for run in runs], times_plait(runs[1] | {"outcome": "stopped"}, runs)
    (['1.0', '4.5'], '> 4.5')
    """
    mine = [r for r in runs if r["who"] == "plait" and r["memory"] == run["memory"] and r["outcome"] == "finished"]
    if not mine or run["outcome"] not in ("finished", "stopped"):
        return ""
    return f"{'> ' if run['outcome'] == 'stopped' else ''}{run['seconds'] / mine[0]['seconds']:.1f}"


def outcome(run: Mapping[str, Any], expected: int | None) -> str:
    """In a word or two.

    >>> outcome({"outcome": "finished", "rows": 3}, 4), outcome({"outcome": "killed", "rows": 3}, 4)
    ('**WRONG ROWS**', '**killed**')
    """
    if run["outcome"] != "finished":
        return f"**{run['outcome']}**"
    return "finished" if run["rows"] == expected else "**WRONG ROWS**"


def verdicts(part: Mapping[str, Any]) -> list[str]:
    """One sentence for each contestant, why a run failed that was not killed for its memory, and the goals."""
    said = []
    for who in dict.fromkeys(run["who"] for run in part["runs"]):
        runs = [run for run in part["runs"] if run["who"] == who]
        ended = [run for run in runs if run["outcome"] == "finished"]
        sentence = f"{NAMES[who]} finishes under {len(ended)} of {len(runs)} limits"
        if ended:
            tight, wide = (f(ended, key=lambda run: run["memory"]) for f in (min, max))
            sentence += f": {wide['seconds']:.1f} s with {_mib(wide['memory'])}"
            if tight["memory"] < wide["memory"]:
                sentence += f", {tight['seconds']:.1f} s with {_mib(tight['memory'])}"
            sentence += f" for {tight['ratio']:.1f} times as much state"
        said.append(sentence + ".")
        said += [
            f"{NAMES[who]} failed under {_mib(run['memory'])}: `{(run['failure'] or '')[:300]}`".replace("\n", " ")
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


def _soak(part: Mapping[str, Any], setup: Mapping[str, Any]) -> list[str]:
    run, figures, checked = part["run"], part["figures"], part["checked"]
    epochs = run["epochs"]
    last = epochs[-1] if epochs else {}
    lines = [
        "Orders, payments, shipments and returns on the order's number, nothing ever expires; "
        f"{part['rows_per_epoch']:,} rows per epoch; most name an order {DELAY_EPOCHS:g} epoch after it on average, "
        f"{OLD:.0%} any order of the past, {NEVER:.0%} one that never comes.  Sized for {part['state_gb']:g} GiB in "
        f"{part['epochs']} epochs; the whole process tree lives within {_mib(run['limit'])}.",
        "",
        "| | |",
        "|---|---:|",
        f"| outcome | {outcome(run, part['expected'])} |",
        f"| epochs, seconds | {len(epochs)}, {run['seconds']:.1f} |",
        f"| rows in, rows out | {sum(sum(e['rows_in'].values()) for e in epochs):,}, {run['rows']:,} |",
        f"| state at the end | {_mib(last.get('state_bytes', 0))}, {last.get('state_rows', 0):,} rows |",
        f"| state / limit | {last.get('state_bytes', 0) / run['limit']:.2f} |",
        f"| peak memory, page cache included | {_mib(run['peak_bytes'])} |",
        f"| peak memory without it | {_mib(run['peak_held'])} |",
    ]
    if figures:
        quarters = ", ".join(f"{q:,.0f}" for q in figures["quarters"])
        lines += [
            f"| seconds per epoch: median, p99, max | {figures['median']:.2f}, {figures['p99']:.2f}, "
            f"{figures['max']:.2f} |",
            f"| p99 / median, at most 3 | {figures['p99_over_median']:.2f} {_met(part['met']['p99'])} |",
            f"| rows in per second, by quarter | {quarters} |",
            f"| last quarter / second, at least 0.7 | {figures['late_throughput']:.2f} "
            f"{_met(part['met']['throughput'])} |",
        ]
    if amplification := last.get("state", {}).get("amplification"):
        told = ", ".join(f"{kind} {factor:.2f}" for kind, factor in amplification.items())
        lines.append(f"| amplification at the end | {told} |")
    if filters := _summed(epochs, "filter"):
        lines.append(f"| keys asked of filters, passed, found | {', '.join(f'{n:,}' for n in filters.values())} |")
    if part["disk"]:
        most = max(d["bytes"] / d["live"] for d in part["disk"] if d["live"]) if last else 0.0
        lines.append(f"| checkpoint on disk / live state, at most | {most:.2f} |")
    wrong = (
        f"**{len(checked['wrong'])} wrong or more, first {checked['wrong'][0]}**" if checked["wrong"] else "all right"
    )
    lines += [
        f"| epochs whose rows were compared | {checked['compared']}: {wrong} |",
        "",
        f"The input is made beside the run, outside of its limit, and took {part['feeding_seconds']:.1f} s of a core; "
        f"the engine had to wait for it {part['starved']} times.",
    ]
    if run["failure"]:
        lines += ["", f"It ended early: `{run['failure'][:400]}`"]
    return lines


def _sweep(part: Mapping[str, Any], setup: Mapping[str, Any]) -> list[str]:
    usual = ", ".join(f"`{name}` {'auto' if value is None else value}" for name, value in part["usual"].items())
    lines = [
        f"Plait alone, TPC-DS scale factor {setup['sf']:g}, {_mib(part['state_bytes'])} of state, "
        f"{_mib(part['limit'])} for the process tree: the base, {_mib(part['base'])}, and a quarter of the state.  One "
        f"thing changes at a time; the rest is {usual}.  State is what lies on disk at the end."
    ]
    for name, runs in part["lines"].items():
        lines += ["", f"| `{name}` | outcome | seconds | state | write / read / space amplification | read | written |"]
        lines.append("|---:|---|---:|---:|---:|---:|---:|")
        for run in runs:
            last = run["epochs"][-1] if run["epochs"] else {}
            factors = last.get("state", {}).get("amplification", {})
            told = (
                f"{run['value']}",
                outcome(run, part["expected"]),
                f"{run['seconds']:.1f}",
                _mib(last.get("state_bytes", 0)),
                " / ".join(f"{factors[kind]:.2f}" for kind in ("write", "read", "space") if kind in factors),
                _mib(run["read_bytes"]),
                _mib(run["written_bytes"]),
            )
            lines.append(f"| {' | '.join(told)} |")
    return lines


def _backends(part: Mapping[str, Any], setup: Mapping[str, Any]) -> list[str]:
    backends = list(dict.fromkeys(run["backend"] for run in part["runs"]))
    lines = [
        f"TPC-DS scale factor {setup['sf']:g} in {setup['epochs']} epochs, one process without Spark: the same "
        "operator with its state in Plait's sorted runs on disk, in memory, and in RocksDB (rocksdict).  The state "
        f"weighs {_mib(part['state_bytes'])} in runs; the limit of a process is the base, {_mib(part['base'])}, and a "
        "share of that.  Seconds, or how it ended; bytes read from and written to the disk.  Who takes "
        f"{part['patience']:g} times as long as the runs is stopped.",
        "",
        f"| memory / state | limit | {' | '.join(backends)} |",
        f"|---|---:|{'---:|' * len(backends)}",
    ]
    for ratio in dict.fromkeys(run["ratio"] for run in part["runs"]):
        found = [run for run in part["runs"] if run["ratio"] == ratio]
        limit = found[0]["limit"]
        cells = [f"{_ended(run, setup)}; {_mib(run['read_bytes'])}, {_mib(run['written_bytes'])}" for run in found]
        share, under = ("ample", "none") if ratio is None else (f"{ratio:g}", _mib(limit))
        lines.append(f"| {share} | {under} | {' | '.join(cells)} |")
    return lines


def _ended(run: Mapping[str, Any], setup: Mapping[str, Any]) -> str:
    if run["outcome"] == "finished":
        return f"{run['seconds']:.1f} s"
    return f"**{run['outcome']}** at {run['seconds']:.1f} s, {len(run['epochs'])} of {setup['epochs']} epochs"


_LINES = {"limits": _limits, "soak": _soak, "sweep": _sweep, "backends": _backends}


def _runs(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
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


def _mib(n: float) -> str:
    """A size in MiB, or in GiB from 10 on.

    >>> _mib(3 << 20), _mib(20 << 30)
    ('3 MiB', '20.0 GiB')
    """
    return f"{n / 2**30:.1f} GiB" if n >= 10 << 30 else f"{n / 2**20:,.0f} MiB"
