"""tpch.json, tpch.md and tpch.png from one document of measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tpcds.report import COLOURS

NAMES = {"plait": "Plait", "spark": "Spark", "spark-tuned": "Spark, Plait's session"}


def write(document: Mapping[str, Any], out: Path) -> str:
    """Write all three files; gives the table."""
    (out / "tpch.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    text = markdown(document)
    (out / "tpch.md").write_text(text)
    plot(document, out / "tpch.png")
    return text


def markdown(document: Mapping[str, Any]) -> str:
    """The table, with what was measured how."""
    setup, machine = document["setup"], document["machine"]
    tuned = "spark-tuned" in setup["who"]
    checked = ", ".join(str(epoch + 1) for epoch in setup["checked"])
    lines = [
        "# python -m benchmarks tpch",
        "",
        f"TPC-H at scale factor {setup['sf']:g}, all eight tables as streams, shuffled, {setup['epochs']} epochs; "
        f"after every epoch the whole answer is collected.  {setup['repeat']} round(s), Plait and Spark by turns, "
        "medians.  Spark runs its own streaming plan where it accepts the query, otherwise the batch query over all "
        "files so far, again after every epoch.  Seconds run from starting the query to its last answer, in a session "
        f"that has run the query once over one epoch.  Equal: answers after epochs {checked} as DuckDB's.",
        "",
        f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}, Python "
        f"{machine['python']}, "
        + ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
        + f"; {machine['when']}.",
        "",
        "| query | Plait s | Spark s | Spark / Plait | last epoch: Plait s | Spark s | Plait rows/s | equal | "
        f"Plait keeps | Spark runs |{' Spark s, Plait’s session | / Plait |' if tuned else ''}",
        f"|---|---:|---:|---:|---:|---:|---:|---|---|---|{'---:|---:|' if tuned else ''}",
    ]
    for query, of in document["queries"].items():
        plait, spark = of.get("plait"), of.get("spark")
        rows = document["rows"][query]
        lines.append(
            f"| Q{query} | {_seconds(plait)} | {_seconds(spark)} | {_ratio(plait, spark)} | {_last(plait)} | "
            f"{_last(spark)} | {rows / plait['seconds'] if plait else 0:,.0f} | "
            f"{'yes' if all(one['equal'] for one in of.values()) else 'NO'} | {plait['how'] if plait else ''} | "
            f"{spark['how'] if spark else ''} |"
            + (f" {_seconds(of['spark-tuned'])} | {_ratio(plait, of['spark-tuned'])} |" if tuned else "")
        )
    return "\n".join(lines) + "\n"


def _seconds(one: Mapping[str, Any] | None) -> str:
    return "" if one is None else f"{one['seconds']:.1f}"


def _last(one: Mapping[str, Any] | None) -> str:
    return "" if one is None or not one["epochs"] else f"{one['epochs'][-1]:.2f}"


def _ratio(plait: Mapping[str, Any] | None, spark: Mapping[str, Any] | None) -> str:
    return "" if plait is None or spark is None else f"{spark['seconds'] / plait['seconds']:.2f}×"


def plot(document: Mapping[str, Any], file: Path) -> None:
    """Seconds per query side by side, and seconds per epoch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    queries = list(document["queries"])
    who = [name for name in NAMES if any(name in of for of in document["queries"].values())]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2), layout="constrained")
    for number, name in enumerate(who):
        width = 0.8 / len(who)
        places = [i + (number - (len(who) - 1) / 2) * width for i in range(len(queries))]
        heights = [document["queries"][q][name]["seconds"] for q in queries]
        left.bar(places, heights, 0.95 * width, label=NAMES[name], color=COLOURS[name])
        for query in queries:
            epochs = document["queries"][query][name]["epochs"]
            label = NAMES[name] if query == queries[0] else None
            right.plot(range(1, len(epochs) + 1), epochs, color=COLOURS[name], alpha=0.5, lw=1.2, label=label)
    left.set_xticks(range(len(queries)), [f"Q{q}" for q in queries])
    left.set_ylabel("seconds, all epochs")
    left.set_title("TPC-H over streams: an answer after every epoch", fontsize=10)
    left.legend()
    right.set_xlabel("epoch")
    right.set_ylabel("seconds from the last answer to this")
    right.set_title("each line one query", fontsize=10)
    right.set_ylim(bottom=0)
    right.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)
