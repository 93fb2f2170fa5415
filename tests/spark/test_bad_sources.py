"""Sources that are not what was agreed: rewritten files, other columns, bytes that are no text, very long names."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import plait
from plait.errors import SourceError
from plait.testing import run_epochs
from tests.oracle import Bag, bag
from tests.spark.pair import Pair, told

pytestmark = pytest.mark.spark

DAY = 1_600_000_000


def write(file: Path, table: pa.Table, second: int) -> None:
    file.parent.mkdir(exist_ok=True)
    pq.write_table(table, file)
    os.utime(file, (DAY + second, DAY + second))


# Files that change.


def test_a_file_that_is_rewritten_after_it_was_read_is_not_read_again(spark: SparkSession, tmp_path: Path) -> None:
    pair = Pair(spark, tmp_path).arrive(2)
    assert pair.run() == [0, 1]
    expected = pair.expected()
    write(Path(pair.a.files[0]), pa.table({"k": [1] * 7, "v": [99] * 7}), 1_000)
    with pair.engine() as engine:
        assert run_epochs(engine) == []
        assert bag(plait.QueryHandle(engine, "q").results().toArrow()) == expected


@pytest.mark.parametrize("rows", [3, 5_000], ids=["shorter", "longer"])
def test_a_file_that_is_rewritten_between_listing_and_reading_counts_as_it_is_then(
    spark: SparkSession, tmp_path: Path, rows: int
) -> None:
    pair = Pair(spark, tmp_path).arrive(2)
    seen: dict[int, Bag] = {}

    def rewrite(found: DataFrame, epoch: int) -> None:
        if epoch == 0:
            # Spark has listed it, with its length, to read it in the next epoch.
            write(Path(pair.a.files[1]), pa.table({"k": [i % 13 for i in range(rows)], "v": range(rows)}), 1)
        assert epoch not in seen
        seen[epoch] = bag(found.toArrow())

    with pair.engine() as engine:
        plait.QueryHandle(engine, "q").foreach_batch(rewrite)
        run = engine.start(available_now=True)
        with suppress(SourceError):
            run.await_termination()
        if run.exception is not None:
            # Its length is another one than was listed; read with the old one it is no Parquet file.
            assert Path(pair.a.files[1]).name in told(run.exception, "SOURCE_CORRUPT").cause
            run_epochs(engine)
    assert seen[0] + seen[1] == pair.expected()


# Columns.

MISSING, EXTRA, RETYPED = {"v": [1, 2]}, {"k": [1, 2], "v": [1, 2], "x": [5, 6]}, {"k": ["one", "2"], "v": [1, 2]}


def joined(engine: plait.Engine, spark: SparkSession, home: Path, kind: str) -> plait.QueryHandle:
    """Streams a(k, v) and b(k, w) from files, as they are declared."""
    for name, value in (("a", "v"), ("b", "w")):
        reader = spark.readStream.schema(f"k long, {value} long").format(kind)
        engine.stream(name, reader.load(str(home / name)))
    return engine.query("q", "SELECT a.v, b.w FROM a JOIN b ON a.k = b.k")


def put(home: Path, name: str, kind: str, number: int, columns: dict[str, list[Any]]) -> Path:
    file = home / name / f"{number}.{kind}"
    file.parent.mkdir(exist_ok=True)
    if kind == "parquet":
        write(file, pa.table(columns), number)
    else:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(file, (DAY + number, DAY + number))
    return file


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_missing_column_is_null_and_an_extra_one_is_left(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    put(tmp_path, "b", kind, 0, {"k": [1, 2], "w": [10, 20]})
    for number, columns in enumerate((MISSING, EXTRA)):
        put(tmp_path, "a", kind, number, columns)
    with plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint"), config=plait.Config(tasks=1)) as engine:
        query = joined(engine, spark, tmp_path, kind)
        run_epochs(engine)
        # A row without a key matches nothing.
        assert sorted(map(tuple, query.results().collect())) == [(1, 10), (2, 20)]
        put(tmp_path, "b", kind, 1, {"k": [1]})
        run_epochs(engine)
        assert sorted(map(tuple, query.results().collect()), key=str) == [(1, 10), (1, None), (2, 20)]


def test_a_retyped_column_of_parquet_is_an_error_that_names_the_file(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path, "b", "parquet", 0, {"k": [1, 2], "w": [10, 20]})
    bad = put(tmp_path, "a", "parquet", 0, RETYPED)
    with plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint"), config=plait.Config(tasks=1)) as engine:
        query = joined(engine, spark, tmp_path, "parquet")
        run = engine.start(available_now=True)
        with pytest.raises(SourceError) as caught:
            run.await_termination()
        assert bad.name in told(caught.value, "SOURCE_CORRUPT").cause
        put(tmp_path, "a", "parquet", 0, {"k": [1, 2], "v": [1, 2]})
        run_epochs(engine)
        assert sorted(map(tuple, query.results().collect())) == [(1, 10), (2, 20)]


def test_a_retyped_column_of_json_is_null_where_it_cannot_be_read_and_rows_are_counted_where_the_reader_tells(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path, "b", "json", 0, {"k": [1, 2], "w": [10, 20]})
    put(tmp_path, "a", "json", 0, {"k": ["one", 2], "v": [1, 2]})
    with (put(tmp_path, "c", "json", 0, {"k": ["one", 2], "v": [5, 6]})).open("a") as file:
        file.write("this is no JSON\n")
    with plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint"), config=plait.Config(tasks=1)) as engine:
        query = joined(engine, spark, tmp_path, "json")
        # Its schema has Spark's column for what could not be read; no query reads it.
        reader = spark.readStream.schema("k long, v long, _corrupt_record string")
        engine.stream("c", reader.json(str(tmp_path / "c")))
        other = engine.query("other", "SELECT c.v, b.w FROM c JOIN b ON c.k = b.k")
        (progress,) = run_epochs(engine)
        assert list(map(tuple, query.results().collect())) == [(2, 20)]
        assert list(map(tuple, other.results().collect())) == [(6, 20)]
        assert progress["rows_null_key"] == {"a": 1, "c": 2}
        assert progress["rows_corrupt"] == {"c": 2}


# Names.


def test_names_of_300_characters_work_from_the_file_to_the_answer(spark: SparkSession, tmp_path: Path) -> None:
    stream, other, column, name = "s" * 300, "t" * 300, "c" * 300, "q" * 300
    for number in range(2):
        write(tmp_path / str(number) / "0.parquet", pa.table({column: [1, 2, 2], "v": [number, 5, 6]}), 0)
    sql = f"SELECT x.{column}, x.v, y.v AS w FROM {stream} x JOIN {other} y ON x.{column} = y.{column}"
    config = plait.Config(tasks=2)
    for start in range(2):
        with plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint"), config=config) as engine:
            for number, source in enumerate((stream, other)):
                reader = spark.readStream.schema(f"{column} long, v long")
                engine.stream(source, reader.parquet(str(tmp_path / str(number))))
            query = engine.query(name, sql)
            grouped = engine.query(f"{name}g", f"SELECT {column}, count(*) AS n FROM ({sql}) GROUP BY {column}")
            assert len(run_epochs(engine)) == 1 - start
            assert query.results().columns == [column, "v", "w"]
            assert query.results().count() == 5
            assert sorted(map(tuple, grouped.results().collect())) == [(1, 1), (2, 4)]
            assert stream in engine.explain()


# Bytes.


def test_lines_that_are_no_utf_8_are_joined_byte_by_byte(spark: SparkSession, tmp_path: Path) -> None:
    lines = [b"\xff\xfe-1", b"caf\xe9", "café".encode(), b"\xc3", b"plain"]
    for name, content in (("a", lines), ("b", [*lines[:4], b"other"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.txt").write_bytes(b"\n".join(content) + b"\n")
    with plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint"), config=plait.Config(tasks=2)) as engine:
        for name in "ab":
            engine.stream(name, spark.readStream.text(str(tmp_path / name)))
        query = engine.query("q", "SELECT a.value, b.value AS other FROM a JOIN b ON a.value = b.value")
        grouped = engine.query("g", "SELECT a.value, count(*) AS n FROM a JOIN b ON a.value = b.value GROUP BY a.value")
        run_epochs(engine)
        found = query.results().selectExpr("hex(value)", "hex(other)").collect()
        expected = [line.hex().upper() for line in lines[:4]]
        assert sorted(map(tuple, found)) == sorted((text, text) for text in expected)
        assert sorted(r[0] for r in grouped.results().selectExpr("hex(value)").collect()) == sorted(expected)


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_bytes_that_are_no_utf_8_in_csv_and_json_are_what_spark_makes_of_them(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    rows = {
        "csv": [b"1,caf\xe9", b"2,good"],
        "json": [b'{"k": 1, "t": "caf\xe9"}', b'{"k": 2, "t": "good"}'],
    }[kind]
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"0.{kind}").write_bytes(b"\n".join(rows) + b"\n")
    with plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint"), config=plait.Config(tasks=1)) as engine:
        for name in "ab":
            engine.stream(name, spark.readStream.schema("k long, t string").format(kind).load(str(tmp_path / name)))
        query = engine.query("q", "SELECT a.k, b.t FROM a JOIN b ON a.k = b.k AND a.t = b.t")
        run_epochs(engine)
        batch = {n: spark.read.schema("k long, t string").format(kind).load(str(tmp_path / n)) for n in "ab"}
        expected = batch["a"].join(batch["b"], ["k", "t"]).selectExpr("k", "hex(t)").collect()
        found = query.results().selectExpr("k", "hex(t)").collect()
        assert sorted(map(tuple, found)) == sorted(map(tuple, expected))
        assert (2, b"good".hex().upper()) in map(tuple, found)


def test_binary_columns_carry_any_bytes(spark: SparkSession, tmp_path: Path) -> None:
    values = [bytes(range(256)), b"\xff" * 9, b"", b"\x00\x00"]
    for name in "ab":
        write(tmp_path / name / "0.parquet", pa.table({"k": pa.array(values, pa.binary()), "v": values}), 0)
    with plait.Engine(spark, checkpoint=str(tmp_path / "checkpoint"), config=plait.Config(tasks=2)) as engine:
        for name in "ab":
            engine.stream(name, spark.readStream.schema("k binary, v binary").parquet(str(tmp_path / name)))
        query = engine.query("q", "SELECT a.k, b.v FROM a JOIN b ON a.k = b.k")
        run_epochs(engine)
        assert sorted((bytes(r.k), bytes(r.v)) for r in query.results().collect()) == sorted((v, v) for v in values)
