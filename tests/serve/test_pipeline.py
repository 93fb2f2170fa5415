"""A pipeline file is checked before Spark starts, and every refusal names the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import PipelineError
from plait.serve.pipeline import Pipeline, load

GOOD = """
[engine]
checkpoint = "state/here"

[config]
tasks = 3
probe = "iterative"

[spark]
master = "local[2]"
"spark.sql.session.timeZone" = "UTC"
spark.ui.enabled = false

[streams.orders]
format = "json"
path = "orders"
schema = "id BIGINT, ts TIMESTAMP"
options = { maxFilesPerTrigger = 1, multiLine = true }
watermark = "ts, 10 minutes"
ttl = "7 days"
needed = "id < 5"

[streams.ticks]
format = "rate"

[tables.regions]
format = "csv"
path = "regions.csv"
options = { header = true }

[queries.big]
sql = "SELECT * FROM orders o JOIN ticks t ON o.id = t.value"

[queries.big.sink]
type = "parquet"
path = "/tmp/out"

[queries.kept]
sql_file = "kept.sql"
output_mode = "update"

[trigger]
every = "1 second"
"""


def write(folder: Path, text: str) -> Path:
    (folder / "kept.sql").write_text("SELECT 1")
    file = folder / "pipeline.toml"
    file.write_text(text)
    return file


def refused(folder: Path, text: str) -> PipelineError:
    with pytest.raises(PipelineError) as caught:
        load(write(folder, text))
    return caught.value


@pytest.fixture
def good(tmp_path: Path) -> Pipeline:
    return load(write(tmp_path, GOOD))


def test_paths_are_relative_to_the_file(good: Pipeline, tmp_path: Path) -> None:
    assert good.checkpoint == str(tmp_path / "state/here")
    assert good.streams[0].path == str(tmp_path / "orders")


def test_absolute_paths_and_uris_stay_as_they_are(good: Pipeline, tmp_path: Path) -> None:
    assert good.queries[0].sink == ("parquet", {"path": "/tmp/out"})
    text = GOOD.replace('path = "orders"', 'path = "s3a://bucket/orders"')
    assert load(write(tmp_path, text)).streams[0].path == "s3a://bucket/orders"


def test_a_stream_takes_options_watermark_ttl_and_what_is_needed_longer(good: Pipeline) -> None:
    orders, ticks = good.streams
    assert orders.options == {"maxFilesPerTrigger": "1", "multiLine": "true"}
    assert orders.watermark == ("ts", "10 minutes")
    assert (orders.ttl, orders.needed) == ("7 days", "id < 5")
    assert (ticks.ttl, ticks.needed) == (None, None)
    assert (ticks.path, ticks.schema, ticks.watermark) == (None, None, None)


def test_config_spark_settings_and_trigger_are_read(good: Pipeline) -> None:
    assert (good.config.tasks, good.config.probe) == (3, "iterative")
    assert good.master == "local[2]"
    assert good.settings == {"spark.sql.session.timeZone": "UTC", "spark.ui.enabled": "false"}
    assert good.every == "1 second"


def test_a_query_may_stand_in_a_file_of_its_own(good: Pipeline) -> None:
    assert good.queries[1].sql == "SELECT 1"
    assert good.queries[1].sink is None


def test_a_table_is_a_batch_source_whose_schema_may_be_inferred(good: Pipeline, tmp_path: Path) -> None:
    (regions,) = good.tables
    assert (regions.name, regions.format, regions.path) == ("regions", "csv", str(tmp_path / "regions.csv"))
    assert (regions.schema, regions.options) == (None, {"header": "true"})


def test_a_query_may_have_an_output_mode(good: Pipeline) -> None:
    assert [query.output_mode for query in good.queries] == [None, "update"]


def test_the_prompt_needs_no_queries(tmp_path: Path) -> None:
    text = GOOD[: GOOD.index("[queries.big]")]
    assert refused(tmp_path, text).code == "PIPELINE_MISSING"
    assert load(write(tmp_path, text), needs_queries=False).queries == ()


def test_without_a_trigger_what_is_available_is_read(tmp_path: Path) -> None:
    assert load(write(tmp_path, GOOD.replace('[trigger]\nevery = "1 second"', ""))).every is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"nowhere\.toml cannot be read") as caught:
        load(tmp_path / "nowhere.toml")
    assert caught.value.code == "PIPELINE_FILE"


def test_broken_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    error = refused(tmp_path, "[engine\n")
    assert error.code == "PIPELINE_TOML"
    assert "line 1" in error.cause


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("[engine]", "[enigne]", "PIPELINE_KEY", "'enigne' is not a known key; did you mean 'engine'?"),
        ("checkpoint =", "chekpoint =", "PIPELINE_KEY", "[engine] 'chekpoint'"),
        ('checkpoint = "state/here"', "", "PIPELINE_MISSING", "[engine] checkpoint is missing"),
        ('checkpoint = "state/here"', "checkpoint = 7", "PIPELINE_VALUE", "[engine] checkpoint = 7"),
        ("tasks = 3", "task = 3", "PIPELINE_KEY", "[config] 'task' is not a known key; did you mean 'tasks'?"),
        ("tasks = 3", "tasks = 0", "PIPELINE_VALUE", "[config] tasks=0 is out of range"),
        ("master =", "mastre =", "PIPELINE_KEY", "[spark] 'mastre' is not a known key; did you mean 'master'?"),
        ("spark.ui.enabled", "ui.enabled", "PIPELINE_KEY", "did you mean 'spark.ui.enabled'?"),
        ('schema = "id BIGINT, ts TIMESTAMP"', "", "PIPELINE_MISSING", "[streams.orders] schema is missing"),
        ('path = "orders"', "", "PIPELINE_MISSING", "[streams.orders] path is missing"),
        ('format = "rate"', "", "PIPELINE_MISSING", "[streams.ticks] format is missing"),
        ("ttl =", "tll =", "PIPELINE_KEY", "[streams.orders] 'tll' is not a known key; did you mean 'ttl'?"),
        ('ttl = "7 days"', "", "PIPELINE_MISSING", "[streams.orders] needed is given, but ttl is missing"),
        ('ttl = "7 days"', 'ttl = "soon"', "PIPELINE_VALUE", "[streams.orders] ttl = 'soon'"),
        ('ttl = "7 days"', 'ttl = "0 days"', "PIPELINE_VALUE", "[streams.orders] ttl = '0 days'"),
        ('needed = "id < 5"', "needed = true", "PIPELINE_VALUE", "[streams.orders] needed = True"),
        ('needed = "id < 5"', 'needed = ""', "PIPELINE_VALUE", "[streams.orders] needed = ''"),
        ("needed =", "neded =", "PIPELINE_KEY", "'neded' is not a known key; did you mean 'needed'?"),
        ('"ts, 10 minutes"', '"ts"', "PIPELINE_VALUE", "[streams.orders] watermark = 'ts'"),
        ('format = "rate"', 'format = "rate"\noptions = 3', "PIPELINE_VALUE", "[streams.ticks] options = 3"),
        ('sql_file = "kept.sql"', "", "PIPELINE_MISSING", "[queries.kept] needs either sql or sql_file"),
        ('"kept.sql"', '"none.sql"', "PIPELINE_FILE", "none.sql cannot be read"),
        ('"update"', '"upsert"', "PIPELINE_VALUE", "[queries.kept] output_mode = 'upsert'"),
        ('path = "regions.csv"', "", "PIPELINE_MISSING", "[tables.regions] path is missing"),
        ("[tables.regions]", "[tables.ORDERS]", "PIPELINE_VALUE", "[tables.ORDERS] and [streams.orders] have one name"),
        ('"regions.csv"', '"r"\nttl = "1 day"', "PIPELINE_KEY", "[tables.regions] 'ttl' is not a known key"),
        ("[tables.regions]", "[tabels.regions]", "PIPELINE_KEY", "'tabels' is not a known key; did you mean 'tables'?"),
        ('type = "parquet"', 'type = "parkett"', "PIPELINE_VALUE", "did you mean 'parquet'?"),
        ('path = "/tmp/out"', "", "PIPELINE_MISSING", "[queries.big.sink] path is missing"),
        ('every = "1 second"', 'every = "1 second"\navailable_now = true', "PIPELINE_VALUE", "[trigger]"),
        ('every = "1 second"', "available_now = false", "PIPELINE_VALUE", "[trigger]"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, old: str, new: str, code: str, said: str) -> None:
    assert old in GOOD
    error = refused(tmp_path, GOOD.replace(old, new))
    assert error.code == code
    assert said in error.cause
    assert str(tmp_path) in error.cause
    assert error.remedy


def test_a_pipeline_needs_streams_and_queries(tmp_path: Path) -> None:
    error = refused(tmp_path, '[engine]\ncheckpoint = "c"\n')
    assert (error.code, "[streams] is missing" in error.cause) == ("PIPELINE_MISSING", True)


def test_a_stream_says_what_it_keeps_and_a_query_which_past_it_begins_with(tmp_path: Path) -> None:
    text = GOOD.replace('ttl = "7 days"', 'ttl = "7 days"\nkeep = "all"').replace(
        'sql_file = "', 'since = "state"\nreplace = true\nsql_file = "'
    )
    found = load(write(tmp_path, text))
    assert [stream.keep for stream in found.streams] == ["all", "used"]
    assert [(query.since, query.replace) for query in found.queries][:2] == [(None, False), ("state", True)]
    for wrong, key in (('since = "then"', "since"), ('replace = "yes"', "replace")):
        with pytest.raises(PipelineError, match=key):
            load(write(tmp_path, GOOD.replace('sql_file = "', f'{wrong}\nsql_file = "')))
    with pytest.raises(PipelineError, match="keep"):
        load(write(tmp_path, GOOD.replace('ttl = "7 days"', 'ttl = "7 days"\nkeep = "some"')))
