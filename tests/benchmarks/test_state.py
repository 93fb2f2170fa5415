"""The benchmark `state`: limits that hold, input whose results are known, reports of runs that died.  No Spark."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import report
from benchmarks.options import Options
from benchmarks.process_tree import Look
from benchmarks.state.backend_state import RocksRun, keys_of
from benchmarks.state.backends import NUMBERS, as_numbers, graph
from benchmarks.state.benchmark import settle
from benchmarks.state.limits import goals
from benchmarks.state.report import REPORT
from benchmarks.state.soak import check, measures
from benchmarks.state.soak_data import SHARES, SOAK, Feed
from benchmarks.state.trial import Trial
from plait.errors import ConfigError


def fed(folder: Path, rows: int, epochs: int) -> Feed:
    feed = Feed(folder, rows, epochs)
    for _ in range(epochs):
        feed.make()
    return feed


def as_read(feed: Feed) -> list[dict[str, Any]]:
    """Reports of an engine that reads one file of each stream per epoch and makes no mistake."""
    return [
        {
            "epoch": e,
            "at": e + 1.0,
            "rows_in": dict(feed.size),
            "rows_out": feed.expected[e] - (feed.expected[e - 1] if e else 0),
            "state_rows": (e + 1) * sum(feed.size.values()),
            "state_bytes": (e + 1) << 20,
            "seconds": {"total": 0.5},
            "task_seconds": {"probe": 0.1, "merge": 0.2},
            "state": {"amplification": {"write": 2.0, "read": 3.0, "space": 1.1}, "filter": {"asked": 9, "passed": 2}},
        }
        for e in range(feed.epochs)
    ]


def test_the_feed_knows_what_every_epoch_must_give(tmp_path: Path) -> None:
    feed = fed(tmp_path, rows=2000, epochs=5)
    for epoch in range(feed.epochs):
        with duckdb.connect() as connection:
            for table in SOAK.tables:
                files = [str(tmp_path / table / f"{e:04}.parquet") for e in range(epoch + 1)]
                connection.execute(f"CREATE VIEW {table} AS FROM read_parquet({files})")
            row = connection.execute(f"SELECT count(*) FROM ({SOAK.sql})").fetchone()
        assert row == (feed.expected[epoch],)
    assert feed.expected[0] > 0


def test_some_rows_name_old_orders_and_some_name_none(tmp_path: Path) -> None:
    feed = fed(tmp_path, rows=4000, epochs=20)
    keys = pq.read_table(tmp_path / "payments" / "0019.parquet").column("p_order").to_numpy()
    assert np.mean(keys % 2 == 1) == pytest.approx(0.10, abs=0.03)
    assert np.mean(keys // 2 < 12 * feed.size["orders"]) == pytest.approx(0.01 * 12 / 20, abs=0.006)
    assert keys.max() < 2 * 20 * feed.size["orders"]


def test_the_feed_stays_ahead_and_removes_what_is_read(tmp_path: Path) -> None:
    feed = Feed(tmp_path, 100, 20, ahead=3)
    for _ in range(5):
        feed.keep_ahead({})
    assert feed.made == 3
    for _ in range(5):
        feed.keep_ahead({stream: 3 * size for stream, size in feed.size.items()})
    assert [f.name for f in sorted((tmp_path / "orders").iterdir())] == [f"{e:04}.parquet" for e in range(1, 6)]
    feed.remove()
    assert not tmp_path.exists()


def test_every_epoch_is_compared_once_all_streams_are_read_equally_far(tmp_path: Path) -> None:
    feed = fed(tmp_path, rows=500, epochs=4)
    epochs = as_read(feed)
    assert check(epochs, feed) == {"compared": 4, "wrong": [], "complete": True}
    ahead = epochs[1]["rows_in"].pop("orders")
    epochs[2]["rows_in"]["orders"] += ahead
    assert check(epochs, feed)["compared"] == 3
    epochs[3]["rows_out"] += 1
    assert [w["epoch"] for w in check(epochs, feed)["wrong"]] == [3]
    assert not check(epochs[:3], feed)["complete"]


def test_quarters_are_compared_by_wall_time(tmp_path: Path) -> None:
    epochs = as_read(fed(tmp_path, rows=100, epochs=9))
    for number in (7, 8):
        epochs[number]["at"] = epochs[number - 1]["at"] + 2.0
        epochs[number]["seconds"]["total"] = 2.0
    found = measures(epochs)
    assert found["late_throughput"] == pytest.approx(0.5)
    assert (found["median"], found["max"], found["p99_over_median"]) == (0.5, 2.0, 4.0)


@pytest.mark.parametrize(
    "options",
    [
        Options(sf=-1),
        Options(parts=("four",)),
        Options(who=("flink",)),
        Options(limit="2 apples"),
        Options(settings=("x",)),
    ],
)
def test_options_that_cannot_be_are_refused(options: Options) -> None:
    with pytest.raises(ConfigError):
        settle(options)


def test_defaults_are_large_and_quick_is_small() -> None:
    full, quick = settle(Options()), settle(Options(quick=True))
    assert (full.state_gb, full.soak_epochs, full.limit, full.sf) == (20, 200, 2 << 30, 10)
    assert (quick.state_gb, quick.who) == (0.05, ("plait", "plait-memory"))
    assert settle(Options(settings=("fan_in=8",))).settings == {"spark.plait.fan_in": "8"}


def ran(who: str, outcome: str, epochs: list[dict[str, Any]]) -> dict[str, Any]:
    failure = None if outcome == "finished" else "exit code 1: no room"
    rows = sum(e["rows_out"] for e in epochs)
    one = Trial(who, 1 << 30, "cgroup v1", outcome, 4.0, rows, 1 << 30, 1 << 29, 0, 3, failure, {}, epochs)
    one.looks.extend([Look(0.0, 1 << 28, 0), Look(1.0, 1 << 29, 1 << 28)])
    plain: dict[str, Any] = json.loads(json.dumps(asdict(one)))
    return plain


def document(tmp_path: Path) -> dict[str, Any]:
    feed = fed(tmp_path / "feed", rows=400, epochs=8)
    epochs = as_read(feed)
    runs = [
        {"memory": memory, "ratio": (8 << 20) / memory, **ran(who, how, epochs if how == "finished" else epochs[:2])}
        for memory, spark in ((8 << 20, "stopped"), (2 << 20, "failed"))
        for who, how in (("plait", "finished"), ("plait-memory", "killed"), ("spark-rocksdb", spark))
    ]
    limits = {
        "part": "limits",
        "title": "Limited memory",
        "expected": feed.expected[-1],
        "state_bytes": 8 << 20,
        "ample_seconds": 1.0,
        "ample": [ran("plait", "finished", epochs)],
        "bases": {"plait": 1 << 30, "plait-memory": 1 << 30, "spark-rocksdb": 5 << 28},
        "patience": 4.0,
        "runs": runs,
        "met": goals(runs, 1.0),
        "equal": True,
    }
    soak = {
        "part": "soak",
        "title": "Soak",
        "state_gb": 0.01,
        "epochs": 8,
        "rows_per_epoch": 400,
        "expected": feed.expected[-1],
        "run": ran("plait", "finished", epochs),
        "disk": [{"epoch": 3, "bytes": 3 << 20, "live": 2 << 20}],
        "feeding_seconds": 0.5,
        "starved": 0,
        "figures": measures(epochs),
        "checked": check(epochs, feed),
        "met": {"throughput": True, "p99": False},
        "equal": True,
    }
    swept = [{"value": value, **ran("plait", "finished", epochs)} for value in (2, 4)]
    sweep = {
        "part": "sweep",
        "title": "Sweep",
        "expected": feed.expected[-1],
        "limit": 1 << 30,
        "base": 1 << 29,
        "state_bytes": 8 << 20,
        "usual": {"fan_in": 4, "compress_above": None},
        "lines": {"fan_in": swept},
        "equal": True,
    }
    ways = [
        {"ratio": ratio, **ran(backend, outcome, epochs)}
        for ratio, outcome in ((None, "finished"), (0.25, "killed"))
        for backend in ("runs", "memory", "rocksdb")
    ]
    backends = {
        "part": "backends",
        "title": "Backends",
        "base": 1 << 29,
        "state_bytes": 8 << 20,
        "patience": 6.0,
        "runs": ways,
        "equal": True,
    }
    machine = dict.fromkeys(("cores", "system", "python", "when"), "?") | {"memory_bytes": 1 << 34, "versions": {}}
    setup = {"sf": 1.0, "epochs": 8, "memory": "512m", "settings": {}}
    return {"benchmark": "state", "machine": machine, "setup": setup, "parts": [limits, soak, sweep, backends]}


def test_the_report_tells_who_died_and_how_far_they_came(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    text = report.write(document(tmp_path), REPORT, out)
    assert "| 2 MiB | 4.0 | Plait, state in memory | 1,024 MiB | **killed** | 2 |" in text
    assert "| Spark joins, RocksDB | 1,024 MiB | **stopped** | 2 | 4.0 | > 1.0 |" in text
    assert "but Spark joins, RocksDB gets its own, 1,280 MiB, which is more generous" in text
    assert "Plait finishes under 2 of 2 limits" in text
    assert "Plait, state in memory finishes under 0 of 2 limits." in text
    assert "Spark joins, RocksDB failed under 2 MiB: `exit code 1: no room`" in text
    assert "twice its time with ample memory (1.0 s): **no**." in text
    assert "State in memory dies there: yes." in text
    assert "| 0.25 | 1,024 MiB | **killed** at 4.0 s, 8 of 8 epochs; 0 MiB, 0 MiB |" in text
    assert "**(not met)**" in text
    assert "| amplification at the end | write 2.00, read 3.00, space 1.10 |" in text
    assert "the rest is `fan_in` 4, `compress_above` auto." in text
    assert "| epochs whose rows were compared | 8: all right |" in text
    assert sorted(f.name for f in out.iterdir()) == ["state.json", "state.md", "state.png"]


def test_every_stream_has_a_share_of_the_rows() -> None:
    assert set(SHARES) == set(SOAK.tables)
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_the_wide_query_has_numbers_only() -> None:
    rows = pa.table({"key": pa.array([1, None]), "money": pa.array([1.25, None]).cast(pa.decimal128(7, 2))})
    assert as_numbers(rows).to_pydict() == {"key": [1, None], "money": [125, -1]}
    assert [len(columns) for columns in NUMBERS.columns.values()] == [20, 10, 24, 27]
    assert len(graph().outputs) == 81


@pytest.mark.parametrize("keep", [0.0, 40.0, float("inf")])
def test_rows_in_rocksdb_are_the_same_whether_kept_or_fetched_again(keep: float) -> None:
    class Fake(dict[bytes, bytes]):
        def get(self, keys: list[bytes]) -> list[bytes | None]:  # type: ignore[override]
            return [super(Fake, self).get(key) for key in keys]

    hashes = np.array([3, 7, 9], np.uint64)
    rows = {3: [(1, 10)], 7: [(2, 20), (3, 30)], 9: [(4, 40)]}
    stored = Fake(zip(keys_of(hashes), (np.array(r, np.int64).tobytes() for r in rows.values()), strict=True))
    run = RocksRun(stored, ["a", "b"], keep)
    at, low, high, _, _ = run.find(np.array([2, 7, 7, 9], np.uint64))
    assert (at.tolist(), (high - low).tolist()) == ([1, 2, 3], [2, 2, 1])
    wanted = np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)])
    found = [column.to_pylist() for column in run.take(["b", "a"], wanted)]
    assert found == [[20, 30, 20, 30, 40], [2, 3, 2, 3, 4]]
