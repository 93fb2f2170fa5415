"""Queries that come, go and change between runs on one checkpoint: each gives what it is promised, and no other row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.errors import CheckpointError, QueryError
from tests.oracle import Bag, bag
from tests.spark.changes_driver import BASE, Changing, die_at, found
from tests.spark.pair import told

pytestmark = pytest.mark.spark

WIDE = "SELECT a.k, a.m, a.v, a.s, b.w FROM a JOIN b ON a.k = b.k"
"""Uses all columns of a, so that rows at rest have them."""


@pytest.fixture
def changing(spark: SparkSession, tmp_path: Path) -> Changing:
    """Streams a and b without a checkpoint."""
    return Changing(spark, tmp_path)


def started(changing: Changing, sql: str = BASE, keep: Mapping[str, str] | None = None) -> Changing:
    """The same with a checkpoint on which a query `q` has run for two epochs."""
    changing.arrive().arrive()
    with changing.engine(keep=keep) as engine:
        engine.query("q", sql)
        changing.run(engine)
    return changing


class Batches:
    """A sink that remembers the rows of each epoch."""

    def __init__(self) -> None:
        self.rows: dict[int, Bag] = {}

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        assert epoch not in self.rows
        self.rows[epoch] = bag(rows.toArrow())


# ---------------------------------------------------------------- queries that begin on an old checkpoint


def test_a_new_query_begins_with_the_past_that_it_asks_for(changing: Changing) -> None:
    started(changing).arrive().arrive()
    batches = {since: Batches() for since in ("now", "state", "new")}
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        queries = {since: engine.query(f"{since}_one", BASE, since=since) for since in batches}
        for since, query in queries.items():
            assert (query.status, query.live_since, query.floors) == ("pending", None, {})
            query.foreach_batch(batches[since])
        default = engine.query("default_one", BASE)
        assert changing.run(engine) == [2, 3]
        assert {(q.status, q.live_since) for q in queries.values()} == {("live", 2)}
        assert queries["now"].floors == queries["state"].floors == {"a": 0, "b": 0}
        assert queries["new"].floors == {"a": 2, "b": 2}
        assert found(old) == changing.answer(BASE)
        assert found(default) == changing.since_now(BASE, 2)
    for epoch in (2, 3):
        new = changing.answer(BASE, before=epoch + 1) - changing.answer(BASE, before=epoch)
        assert batches["now"].rows[epoch] == new
        # What is among old rows comes with the first epoch.
        assert batches["state"].rows[epoch] == (changing.answer(BASE, before=3) if epoch == 2 else new)
    young = {"a": 2, "b": 2}
    assert batches["new"].rows[2] == changing.answer(BASE, young, before=3)
    assert batches["new"].rows[2] + batches["new"].rows[3] == changing.answer(BASE, young)
    # They go on like any other, and since says nothing about a query that lives.
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", BASE)
        handles = {since: engine.query(f"{since}_one", BASE) for since in batches}
        default = engine.query("default_one", BASE, since="new")
        assert changing.run(engine) == [4]
        assert handles["new"].floors == young
        assert found(default) == changing.since_now(BASE, 2)


def test_a_filter_is_found_in_the_past_where_rows_at_rest_can_tell(changing: Changing) -> None:
    started(changing, WIDE).arrive().arrive()
    texts = {
        # Tasks evaluate it on rows at rest.
        "native": ("SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE a.v > 6 AND a.s = 'x'", {"a": 0, "b": 0}),
        # Only Spark knows what it means, and sees rows when they arrive.
        "spark": ("SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE upper(a.s) = 'X'", {"a": 2, "b": 0}),
        "alike": ("SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE a.s LIKE 'x%' AND b.w < 0", {"a": 2, "b": 0}),
        # So it is with a part of a condition that only Spark can compute.
        "part": ("SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE a.s LIKE '%z%' OR b.w > -9", {"a": 2, "b": 0}),
        # A condition that Spark checks after the join looks at columns, and these are there.
        "late": ("SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE concat(a.s, b.w) > 'x-3'", {"a": 0, "b": 0}),
    }
    with changing.engine() as engine:
        engine.query("q", WIDE)
        queries = {}
        for name, (sql, _) in texts.items():
            queries[name] = engine.query(name, sql)
            queries[f"{name}_state"] = engine.query(f"{name}_state", sql, since="state")
        assert changing.run(engine) == [2, 3]
        for name, (sql, floors) in texts.items():
            assert queries[name].floors == queries[f"{name}_state"].floors == floors, name
            assert found(queries[name]) == changing.since_now(sql, 2, floors), name
            assert found(queries[f"{name}_state"]) == changing.answer(sql, floors), name
    # The same filter once more: those who came later find what the first one let in.
    sql, _ = texts["spark"]
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", WIDE)
        for name in texts:
            engine.query(name, texts[name][0])
            engine.query(f"{name}_state", texts[name][0])
        again = engine.query("again", sql.replace("b.w", "b.w, a.s"), since="state")
        assert changing.run(engine) == [4]
        assert again.floors == {"a": 2, "b": 0}
        assert found(again) == changing.answer(sql.replace("b.w", "b.w, a.s"), {"a": 2})


def test_a_new_column_has_no_past_where_only_what_is_used_is_kept(changing: Changing) -> None:
    started(changing).arrive().arrive()
    sql = "SELECT a.v, a.s, b.w FROM a JOIN b ON a.k = b.k"
    floors = {"a": 2, "b": 0}
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        now, state = engine.query("now_one", sql), engine.query("state_one", sql, since="state")
        assert changing.run(engine) == [2, 3]
        assert (state.status, state.live_since, state.floors, now.floors) == ("live", 2, floors, floors)
        assert found(old) == changing.answer(BASE)
        assert found(now) == changing.since_now(sql, 2, floors)
        assert found(state) == changing.answer(sql, floors)


def test_a_new_column_has_a_past_where_all_of_a_stream_is_kept(changing: Changing) -> None:
    sql = "SELECT a.v, a.s, b.w FROM a JOIN b ON a.k = b.k"
    texts = {
        "now_one": sql,
        "state_one": sql,
        "dear": f"{sql} WHERE a.s = 'z'",
        "hidden": f"{sql} WHERE a.m = 3",
        "spark_one": f"{sql} WHERE upper(a.s) = 'X'",
    }
    started(changing, keep={"a": "all"}).arrive()
    with changing.engine(keep={"a": "all"}) as engine:
        old = engine.query("q", BASE)
        queries = {n: engine.query(n, text, since="now" if n == "now_one" else "state") for n, text in texts.items()}
        run = engine.start(available_now=True)
        # A store is filled beside the first epoch, and the next one has results.
        assert queries["state_one"].status == "building"
        assert queries["state_one"].live_since is None
        run.await_termination()
        assert [progress["epoch"] for progress in run.recent_progress] == [2]
        assert {(q.status, q.live_since) for n, q in queries.items() if n != "spark_one"} == {("live", 3)}
        assert found(old) == changing.answer(BASE)
        # Of what only Spark can tell there is no past: it waits for nothing.
        assert (queries["spark_one"].status, queries["spark_one"].live_since) == ("live", 2)
    changing.arrive().arrive()
    with changing.engine(keep={"a": "all"}) as engine:
        old = engine.query("q", BASE)
        queries = {name: engine.query(name, text) for name, text in texts.items()}
        assert changing.run(engine) == [3, 4]
        assert found(old) == changing.answer(BASE)
        assert found(queries["now_one"]) == changing.since_now(sql, 3)
        for name in ("state_one", "dear", "hidden"):
            assert queries[name].floors == {"a": 0, "b": 0}
            assert found(queries[name]) == changing.answer(texts[name]), name
        assert queries["spark_one"].floors == {"a": 2, "b": 0}
        assert found(queries["spark_one"]) == changing.answer(texts["spark_one"], {"a": 2})


def test_a_run_goes_on_when_a_new_store_takes_the_place_of_an_old_one(changing: Changing) -> None:
    sql = "SELECT a.v, a.s, b.w FROM a JOIN b ON a.k = b.k"
    started(changing, keep={"a": "all"}).arrive().arrive().arrive()
    with changing.engine(keep={"a": "all"}) as engine:
        old, new = engine.query("q", BASE), engine.query("n", sql, since="state")
        # Sources go on cutting rows for the old store until the next start.
        assert changing.run(engine) == [2, 3, 4]
        assert (new.live_since, new.floors) == (3, {"a": 0, "b": 0})
        assert found(old) == changing.answer(BASE)
        assert found(new) == changing.answer(sql)
    changing.arrive()
    with changing.engine(keep={"a": "all"}) as engine:
        old, new = engine.query("q", BASE), engine.query("n", sql)
        assert changing.run(engine) == [5]
        assert [store.id for store in engine.plan.stores if store.relation == "a"] == ["a[]", "a[k]@1"]
        assert found(old) == changing.answer(BASE)
        assert found(new) == changing.answer(sql)


def test_a_new_key_has_a_past_if_a_store_can_be_filled_from_another(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(changing, WIDE, keep={"b": "all"})
    texts = {
        # The store by k has all rows that a join by k and m can use; only that of b by m is filled from all rows of b.
        "both": ("SELECT a.v, b.w FROM a JOIN b ON a.k = b.k AND a.m = b.m", {"a": 0, "b": 0}),
        "other": ("SELECT a.v, b.w FROM a JOIN b ON a.m = b.m", {"a": 2, "b": 0}),
    }
    # A build that takes several epochs.
    monkeypatch.setattr("plait.runtime.driver.prepare.BUILD_BYTES_PER_SECOND", 4000)
    for _ in range(5):
        changing.arrive()
    with changing.engine(keep={"b": "all"}) as engine:
        engine.query("q", WIDE)
        queries = {name: engine.query(name, sql, since="state") for name, (sql, _) in texts.items()}
        run = engine.start(available_now=True)
        assert {q.status for q in queries.values()} == {"building"}
        run.await_termination()
        assert {q.status for q in queries.values()} == {"building"}
        shares = [progress["builds"]["b[m]@1"] for progress in run.recent_progress]
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] < 1
    monkeypatch.undo()
    changing.arrive().arrive()
    with changing.engine(keep={"b": "all"}) as engine:
        engine.query("q", WIDE)
        queries = {name: engine.query(name, sql) for name, (sql, _) in texts.items()}
        assert changing.run(engine) == [7, 8]
        for name, (sql, floors) in texts.items():
            assert queries[name].status == "live"
            assert (queries[name].live_since or 0) > 2
            assert queries[name].floors == floors
            assert found(queries[name]) == changing.answer(sql, floors), name
        # What a build was for is there; the store that it was filled from stays for those who use it.
        assert not engine.checkpoint.log.live().builds


def test_a_longer_window_begins_with_the_rows_that_a_shorter_one_has_not_let_go(changing: Changing) -> None:
    text = "SELECT t.n AS n, u.n AS o FROM t JOIN u ON t.k = u.k AND u.ts BETWEEN t.ts AND t.ts + INTERVAL {} MINUTES"
    near, far, shorter_text = text.format(2), text.format(10), text.format(1)
    for _ in range(6):
        changing.arrive("t", "u")
    with changing.engine() as engine:
        engine.query("near", near)
        changing.run(engine)
    for _ in range(3):
        changing.arrive("t", "u")
    with changing.engine() as engine:
        old = engine.query("near", near)
        longer = engine.query("far", far)
        shorter = engine.query("shorter", shorter_text)
        assert changing.run(engine) == [6, 7, 8]
        assert found(old) == changing.answer(near)
        # Rows of t have expired; those of u were kept as long as the longer window keeps them.
        assert 0 < longer.floors["t"] <= 6
        assert shorter.floors["t"] == 0
        assert found(longer) == changing.since_now(far, 6, longer.floors)
        assert found(shorter) == changing.since_now(shorter_text, 6, shorter.floors)


def test_answers_that_spark_makes_of_a_join_can_begin_with_what_is_there(changing: Changing) -> None:
    started(changing, WIDE)
    texts = {
        "grouped": "SELECT a.s, count(*) AS n, sum(b.w) AS total FROM a JOIN b ON a.k = b.k GROUP BY a.s",
        "once": "SELECT DISTINCT a.s, b.w FROM a JOIN b ON a.k = b.k WHERE a.v > 3",
        "scan": "SELECT count(*) AS n, max(v) AS last FROM a",
    }
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", WIDE)
        queries = {name: engine.query(f"{name}_state", sql, since="state") for name, sql in texts.items()}
        news = {name: engine.query(f"{name}_new", sql, since="new") for name, sql in texts.items()}
        assert changing.run(engine) == [2]
        changing.arrive()
        assert changing.run(engine) == [3]
        for name, sql in texts.items():
            # Nobody has kept a for a query that reads it by itself.
            floors = {"a": 2} if name == "scan" else {"a": 0, "b": 0}
            assert queries[name].floors == floors
            assert found(queries[name]) == changing.answer(sql, floors), name
            assert found(news[name]) == changing.answer(sql, {"a": 2, "b": 2}), name
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", WIDE)
        for name, sql in texts.items():
            queries[name] = engine.query(f"{name}_state", sql)
            engine.query(f"{name}_new", sql)
        with pytest.raises(QueryError) as caught:
            engine.query("anti", "SELECT a.v FROM a LEFT ANTI JOIN b ON a.k = b.k", since="now")
        assert 'since="new"' in told(caught.value, "SINCE").remedy
        assert changing.run(engine) == [4]
        for name in ("grouped", "once"):
            assert found(queries[name]) == changing.answer(texts[name]), name


def test_what_is_not_there_is_asked_from_one_epoch_on_in_all_streams(changing: Changing) -> None:
    started(changing, WIDE).arrive()
    text = "SELECT a.v FROM a LEFT ANTI JOIN b ON a.k = b.k"
    oracle = "SELECT a.v FROM a WHERE NOT EXISTS (SELECT 1 FROM b WHERE a.k = b.k)"
    with changing.engine() as engine:
        engine.query("q", WIDE)
        with pytest.warns(plait.RecomputationWarning):
            state, new = engine.query("anti", text, since="state"), engine.query("young", text)
        assert changing.run(engine) == [2]
        (floor,) = set(state.floors.values())
        assert set(new.floors.values()) == {2}
        assert found(state) == changing.answer(oracle, {"a": floor, "b": floor})
        assert found(new) == changing.answer(oracle, {"a": 2, "b": 2})


def test_a_query_that_joins_a_stream_with_itself_begins_with_the_past_it_asks_for(changing: Changing) -> None:
    text = "SELECT x.v AS one, y.v AS other FROM a x JOIN a y ON x.k = y.k AND x.v < y.v"
    started(changing, WIDE).arrive()
    with changing.engine(tasks=1) as engine:
        engine.query("q", WIDE)
        queries = {since: engine.query(f"{since}_one", text, since=since) for since in ("now", "state", "new")}
        assert changing.run(engine) == [2]
        changing.arrive()
        assert changing.run(engine) == [3]
        assert queries["state"].floors == {"x": 0, "y": 0}
        assert found(queries["now"]) == changing.since_now(text, 2)
        assert found(queries["state"]) == changing.answer(text)
        assert found(queries["new"]) == changing.answer(text, {"a": 2})


def test_a_windowed_query_begins_with_the_rows_that_are_not_past_its_watermark(changing: Changing) -> None:
    text = "SELECT t.n AS n, u.n AS o FROM t JOIN u ON t.k = u.k AND u.ts BETWEEN t.ts AND t.ts + INTERVAL 3 MINUTES"
    for _ in range(5):
        changing.arrive("t", "u")
    with changing.engine() as engine:
        engine.query("q", text)
        changing.run(engine)
        before = changing.ran[-1]["watermark_ms"]
    changing.arrive("t", "u")
    with changing.engine() as engine:
        old = engine.query("q", text)
        state, now = engine.query("state_one", text, since="state"), engine.query("now_one", text)
        assert changing.run(engine) == [5]
        changing.arrive("t", "u")
        assert changing.run(engine) == [6]
        assert found(old) == changing.answer(text)
        assert found(now) == changing.since_now(text, 5)
        at = f"make_timestamp({before * 1000})"
        alive = f"{text} WHERE t.ts >= {at} - INTERVAL 3 MINUTES AND u.ts >= {at}"
        assert state.floors == {"t": 0, "u": 0}
        assert found(state) - found(now) == changing.answer(alive, before=5)
        assert found(state) == changing.answer(alive, before=5) + found(now)


def test_a_query_that_has_not_begun_has_no_results(changing: Changing) -> None:
    started(changing)
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        new, grouped = engine.query("n", BASE), engine.query("g", "SELECT v, count(*) AS n FROM a GROUP BY v")
        assert found(old) == changing.answer(BASE)
        assert found(new).total() == found(grouped).total() == 0


# ---------------------------------------------------------------- queries that end


def test_a_dropped_query_leaves_nothing_behind_and_the_others_go_on(changing: Changing) -> None:
    other = "SELECT a.v, b.w FROM a JOIN b ON a.m = b.m"
    changing.config["snapshot_every"] = 1
    changing.arrive().arrive()
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.query("p", other)
        changing.run(engine)
        assert set(engine.checkpoint.log.live().segments) == {"a[k]", "a[m]", "b[k]", "b[m]"}
    assert changing.kept("p") > 0
    changing.arrive().arrive()
    with changing.engine() as engine:
        query = engine.query("q", BASE)
        # It may stay in the program, and what was never there is no error.
        for name in ("p", "p", "never"):
            engine.drop(name)
        assert changing.run(engine) == [2, 3]
        assert found(query) == changing.answer(BASE)
        live = engine.checkpoint.log.live()
        assert {store for store, infos in live.segments.items() if infos} == {"a[k]", "b[k]"}
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.drop("p")
        assert changing.run(engine) == []
        engine.drop("p")
        changing.arrive()
        assert changing.run(engine) == [4]
        files = {Path(info.path).name for infos in engine.checkpoint.log.live().segments.values() for info in infos}
    assert changing.kept("p") == 0
    assert {path.name for path in (changing.checkpoint / "state").rglob("*.arrow")} == files
    # The name is free again, and what was committed under it before never comes back.
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", BASE)
        query = engine.query("p", other, since="state")
        assert changing.run(engine) == [5]
        assert query.floors == {"a": 5, "b": 5}
        assert found(query) == changing.answer(other, {"a": 5, "b": 5})
        assert changing.kept("p") == 0


def test_queries_with_sinks_of_all_kinds_are_dropped_once_their_rows_have_arrived(
    changing: Changing, tmp_path: Path
) -> None:
    texts = {
        "grouped": "SELECT a.s, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.s",
        "joined": BASE,
        "none": f"{BASE} WHERE a.v < 0",
    }
    changing.arrive().arrive()
    with changing.engine() as engine:
        engine.query("q", BASE)
        for name, sql in texts.items():
            engine.query(name, sql).foreach_batch(Batches())
        engine.query("scan", "SELECT v FROM a WHERE v > 3").sink("parquet", path=str(tmp_path / "scan"))
        changing.run(engine)
    changing.arrive()
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        for name in (*texts, "scan"):
            engine.drop(name)
        assert changing.run(engine) == [2]
        assert found(old) == changing.answer(BASE)


def test_a_query_is_dropped_and_defined_again_in_one_start(changing: Changing) -> None:
    started(changing).arrive()
    with changing.engine() as engine:
        engine.drop("q")
        query = engine.query("q", BASE)
        assert changing.run(engine) == [2]
        assert found(query) == changing.since_now(BASE, 2)
        assert query.live_since == 2


def test_a_replaced_query_gives_rows_of_its_new_text_only(changing: Changing, tmp_path: Path) -> None:
    changing.config["snapshot_every"] = 1
    old_path, new_path = tmp_path / "old", tmp_path / "new"
    changing.arrive().arrive()
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.query("p", BASE).sink("parquet", path=str(old_path))
        changing.run(engine)
    before = changing.answer(BASE)
    delivered = sorted(path.name for path in old_path.iterdir())
    text = "SELECT a.v + b.w AS both, a.v FROM a JOIN b ON a.k = b.k"
    changing.arrive()

    def replaced(epochs: list[int]) -> None:
        with changing.engine() as engine:
            q = engine.replace("q", text)
            p = engine.replace("p", text).sink("parquet", path=str(new_path))
            assert changing.run(engine) == epochs
            assert (q.live_since, q.floors) == (2, {"a": 0, "b": 0})
            assert found(q) == found(p) == changing.since_now(text, 2)
            assert found(plait.QueryHandle(engine, "q")) == changing.since_now(text, 2)

    # The call stays in the program: a second start with the same text changes nothing.
    replaced([2])
    versions = sorted(path.name for path in (changing.checkpoint / "catalog").iterdir())
    replaced([])
    changing.arrive()
    replaced([3])
    assert sorted(path.name for path in (changing.checkpoint / "catalog").iterdir()) == versions
    assert sorted(path.name for path in old_path.iterdir()) == delivered
    assert bag(changing.spark.read.parquet(str(old_path)).toArrow()) == before
    # Rows that were kept under the old text are gone.
    assert changing.kept("q") == 0
    # Another text must be called another one.
    with changing.engine() as engine:
        with pytest.raises(CheckpointError) as caught:
            engine.query("q", BASE)
        assert "engine.replace('q'" in told(caught.value, "QUERY_EXISTS").remedy
        engine.query("p", text.replace(" ", "\n  "))
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        assert "engine.drop('q')" in told(caught.value, "QUERY_MISSING").remedy
    changing.arrive()
    with changing.engine(on_missing_query="drop") as engine:
        engine.query("p", text).sink("parquet", path=str(new_path))
        assert changing.run(engine) == [4]
        assert [q["status"] for q in changing.ran[-1]["catalog"]["queries"].values()] == ["live"]
        assert found(plait.QueryHandle(engine, "p")) == changing.since_now(text, 2)


def test_an_aggregate_is_replaced_and_its_modes_hold(changing: Changing) -> None:
    one = "SELECT a.s, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.s"
    two = "SELECT a.m, sum(b.w) AS total FROM a JOIN b ON a.k = b.k GROUP BY a.m"
    changing.arrive().arrive()
    with changing.engine() as engine:
        engine.query("q", WIDE)
        engine.query("g", one)
        changing.run(engine)
    changing.arrive()
    groups = Batches()
    with changing.engine() as engine:
        engine.query("q", WIDE)
        query = engine.replace("g", two, output_mode="update", since="state").foreach_batch(groups)
        assert changing.run(engine) == [2]
        assert found(query) == groups.rows[2] == changing.answer(two)
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", WIDE)
        query = engine.replace("g", two, output_mode="update", since="state").foreach_batch(groups)
        assert changing.run(engine) == [3]
        assert found(query) == changing.answer(two)
        assert groups.rows[3] <= changing.answer(two)


def test_other_sinks_and_modes_do_not_make_another_query(changing: Changing, tmp_path: Path) -> None:
    grouped = "SELECT a.s, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.s"
    changing.arrive()
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.query("g", grouped, output_mode="complete")
        changing.run(engine)
    changing.arrive()
    batches, groups = Batches(), Batches()
    with changing.engine() as engine:
        q = engine.query("q", BASE).foreach_batch(batches)
        g = engine.query("g", grouped, output_mode="update").foreach_batch(groups)
        assert changing.run(engine) == [1]
        assert q.live_since == g.live_since == 0
        assert g.output_mode == "update"
        assert found(g) == changing.answer(grouped)
    assert batches.rows == {1: changing.answer(BASE) - changing.answer(BASE, before=1)}
    assert groups.rows[1] <= changing.answer(grouped)
    changing.arrive()
    with changing.engine() as engine:
        q = engine.query("q", BASE).sink("parquet", path=str(tmp_path / "out"))
        g = engine.query("g", grouped)
        assert changing.run(engine) == [2]
        assert found(q) == changing.answer(BASE) - changing.answer(BASE, before=2)
        assert found(g) == changing.answer(grouped)
    # Another TTL of a stream is no other query either.
    changing.arrive()
    settings = plait.Config(**changing.config)
    with plait.Engine(changing.spark, checkpoint=str(changing.checkpoint), config=settings) as engine:
        engine.stream("a", changing.frame("a"), ttl="1 day")
        engine.stream("b", changing.frame("b"))
        engine.query("q", BASE).sink("parquet", path=str(tmp_path / "out"))
        g = engine.query("g", grouped)
        assert changing.run(engine) == [3]
        assert found(g) == changing.answer(grouped)


def test_rows_committed_under_the_old_text_reach_the_old_sink_before_the_new_text_runs(
    changing: Changing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "SELECT a.v + b.w AS both FROM a JOIN b ON a.k = b.k"
    old_path = str(tmp_path / "old")
    changing.arrive().arrive()

    def define(engine: plait.Engine, batches: Batches) -> None:
        engine.query("p", BASE).sink("parquet", path=old_path)
        engine.query("f", BASE).foreach_batch(batches)

    first, again = Batches(), Batches()
    die_at(monkeypatch, "commit.3", 1)
    with changing.engine() as engine:
        define(engine, first)
        with pytest.raises(plait.PlaitError):
            changing.run(engine)
    monkeypatch.undo()
    assert set(first.rows) == {0}
    assert bag(changing.spark.read.parquet(old_path).toArrow()) == changing.answer(BASE, before=1)
    changing.arrive()
    # A function is not known any more: it must be given once more.
    with changing.engine() as engine:
        engine.query("p", BASE).sink("parquet", path=old_path)
        engine.replace("f", text)
        with pytest.raises(CheckpointError) as caught:
            engine.start(available_now=True)
        assert "'f'" in told(caught.value, "SINK_UNSERVED").cause
    # Files that a parquet sink has not got are copied now.
    with changing.engine() as engine:
        new = engine.replace("p", text).sink("parquet", path=str(tmp_path / "new"))
        engine.query("f", BASE).foreach_batch(again)
        assert changing.run(engine) == [2]
        assert found(new) == changing.since_now(text, 2)
    assert bag(changing.spark.read.parquet(old_path).toArrow()) == changing.answer(BASE, before=2)
    assert again.rows == {
        1: changing.answer(BASE, before=2) - changing.answer(BASE, before=1),
        2: changing.answer(BASE) - changing.answer(BASE, before=2),
    }


@pytest.mark.parametrize("point", ["commit.2", "commit.3"])
def test_a_query_whose_first_epoch_dies_has_each_result_once_after_a_restart(
    changing: Changing, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(changing).arrive()
    text = "SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE a.v > 3"
    grouped = "SELECT a.v, count(*) AS n FROM a JOIN b ON a.k = b.k GROUP BY a.v"
    die_at(monkeypatch, point, 2)
    with changing.engine() as engine:
        engine.query("q", BASE)
        engine.query("state_one", text, since="state")
        engine.query("now_one", text)
        engine.query("grouped", grouped, since="state")
        with pytest.raises(plait.PlaitError):
            changing.run(engine)
    monkeypatch.undo()
    changing.arrive()
    with changing.engine() as engine:
        old = engine.query("q", BASE)
        state, now = engine.query("state_one", text, since="state"), engine.query("now_one", text)
        answer = engine.query("grouped", grouped, since="state")
        one_more = engine.query("one_more", BASE, since="state")
        changing.run(engine)
        assert found(old) == changing.answer(BASE)
        assert (state.live_since, now.live_since) == (2, 2)
        assert found(state) == changing.answer(text)
        assert found(now) == changing.since_now(text, 2)
        assert found(answer) == changing.answer(grouped)
        assert found(one_more) == changing.answer(BASE)


def test_a_query_is_dropped_while_a_store_is_filled_for_it(changing: Changing, monkeypatch: pytest.MonkeyPatch) -> None:
    changing.config["snapshot_every"] = 1
    keep = {"a": "all", "b": "all"}
    text = "SELECT a.v, b.w FROM a JOIN b ON a.m = b.m"
    started(changing, keep=keep)
    monkeypatch.setattr("plait.runtime.driver.prepare.BUILD_BYTES_PER_SECOND", 4000)
    changing.arrive().arrive()
    with changing.engine(keep=keep) as engine:
        engine.query("q", BASE)
        query = engine.query("p", text, since="state")
        changing.run(engine)
        assert query.status == "building"
    monkeypatch.undo()
    changing.arrive().arrive()
    with changing.engine(keep=keep) as engine:
        old = engine.query("q", BASE)
        engine.drop("p")
        assert changing.run(engine) == [4, 5]
        live = engine.checkpoint.log.live()
        assert not live.builds
        assert {store for store, infos in live.segments.items() if infos} == {"a[]", "a[k]", "b[]", "b[k]"}
        assert found(old) == changing.answer(BASE)
    # Begun again, it is filled from all that is there now; and replaced while it is filled, by a text with another key.
    changing.arrive()
    with changing.engine(keep=keep) as engine:
        engine.query("q", BASE)
        query = engine.query("p", text, since="state")
        assert changing.run(engine) == [6]
        assert query.status == "live"
    other = "SELECT a.v, b.w FROM a JOIN b ON a.v = b.k"
    changing.arrive()
    with changing.engine(keep=keep) as engine:
        engine.query("q", BASE)
        query = engine.replace("p", other, since="state")
        assert changing.run(engine) == [7]
    changing.arrive()
    with changing.engine(keep=keep) as engine:
        old, query = engine.query("q", BASE), engine.replace("p", other, since="state")
        assert changing.run(engine) == [8]
        assert query.live_since == 8
        assert found(query) == changing.answer(other)
        assert found(old) == changing.answer(BASE)


def test_more_filters_than_a_word_has_bits(changing: Changing) -> None:
    texts = {
        f"q{i}": f"SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE a.v > {i} AND a.v < {2 * i + 9}" for i in range(65)
    }
    changing.arrive().arrive()
    with changing.engine() as engine:
        for name, sql in texts.items():
            engine.query(name, sql).sink("noop")
        kept = {f"q{i}": Batches() for i in (0, 1, 31, 61, 62, 63, 64)}
        for name, batches in kept.items():
            plait.QueryHandle(engine, name).foreach_batch(batches)
        changing.run(engine)
        rows = {name: sum(p["rows_out"].get(name, 0) for p in changing.ran) for name in texts}
        joined = changing.answer("SELECT a.v FROM a JOIN b ON a.k = b.k")
        assert rows == {f"q{i}": sum(n for (v,), n in joined.items() if i < v < 2 * i + 9) for i in range(65)}
    for name, batches in kept.items():
        assert sum(batches.rows.values(), Bag()) == changing.answer(texts[name]), name
    changing.arrive()
    more = "SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE a.v > 20 AND a.s = 'x'"
    among = "SELECT a.v, b.w FROM a JOIN b ON a.k = b.k WHERE a.v > 5 AND a.v < 1000"
    # Most of them end: the bits of those that go on are found in old segments all the same.
    with changing.engine(on_missing_query="drop") as engine:
        for name in kept:
            engine.query(name, texts[name]).sink("noop")
        one, two = engine.query("more", more, since="state"), engine.query("among", among, since="state")
        assert changing.run(engine) == [2]
        rows = changing.ran[-1]["rows_out"]
        assert all(rows.get(name, 0) == changing.since_now(texts[name], 2).total() for name in kept)
        # Nobody let all rows of a in, so there is no past of a that other filters could look through.
        assert one.floors == two.floors == {"a": 2, "b": 0}
        assert found(one) == changing.answer(more, {"a": 2})
        assert found(two) == changing.answer(among, {"a": 2})


def test_a_query_that_waits_for_a_store_has_no_rows_yet(spark: SparkSession, tmp_path: Path) -> None:
    changing = Changing(spark, tmp_path).arrive().arrive()
    with changing.engine(keep={"a": "all"}) as engine:
        engine.query("q", BASE)
        changing.run(engine)
    with changing.engine(keep={"a": "all"}) as engine:
        engine.query("q", BASE)
        new = engine.query("n", "SELECT a.v, a.s, b.w FROM a JOIN b ON a.k = b.k", since="state")
        # No data arrives, so nothing is copied.
        changing.run(engine)
        assert new.status == "building"
        assert found(new).total() == 0


def test_a_text_that_sparks_parser_refuses_is_told_as_our_error(spark: SparkSession, tmp_path: Path) -> None:
    changing = Changing(spark, tmp_path).arrive("t", "u")
    text = "SELECT t.n AS x FROM t JOIN u ON t.k = u.k AND u.ts BETWEEN t.ts AND t.ts + INTERVAL 0.5 MINUTES"
    with changing.engine() as engine, pytest.raises(plait.QueryError, match="SYNTAX"):
        engine.query("q", text)
