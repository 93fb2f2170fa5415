"""Rows of 100 KB in one process: slices, batches and result files are measured in bytes of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plait.config import Config
from plait.kernels.hashing import even_bounds
from plait.runtime.answers import result_reader as rows
from plait.runtime.answers.live_results import mergeable
from plait.runtime.answers.result_reader import SMALL_BYTES, stays_small
from plait.runtime.driver.batch_sizes import BATCH_BYTES, LIMIT, UNLIMITED, Batches
from plait.runtime.spark.session import SETTINGS
from plait.runtime.task import bucketise
from plait.runtime.task.bucketise import EpochParameters, buckets
from plait.runtime.task.exchange import decode
from plait.runtime.task.result_writer import ResultWriter
from plait.share.planner import Planner
from plait.state.files.storage import LocalFiles
from plait.state.log.manifest import ResultFile
from tests.share.streams import joined, streams

WIDE = "x" * 100_000


def test_a_batch_of_wide_rows_is_worked_through_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner({"q": joined("a.k = b.k", "b.m = c.m")}, streams("abc"), Config(replan_epochs=0)).plan
    source = plan.input_by_relation["b"]
    assert len(source.edges) == 2
    monkeypatch.setattr(bucketise, "_SLICE_BYTES", 1 << 20)
    count = 200_000
    names = [c.name for c in source.columns]
    batch = pa.record_batch([pa.array(range(count), pa.int64()) for _ in names], names=names)
    before, most = pa.total_allocated_bytes(), 0
    arrived: dict[int, list[int]] = {}
    for found in buckets([batch], source, EpochParameters(even_bounds(2), 0)):
        most = max(most, pa.total_allocated_bytes() - before)
        for edge, payload in zip(found.column(1).to_pylist(), found.column(2).to_pylist(), strict=True):
            if edge >= 0:
                arrived.setdefault(edge, []).extend(decode(payload).column("id").to_pylist())
    assert sorted(arrived) == sorted(edge.id for edge in source.edges)
    assert all(sorted(ids) == list(range(count)) for ids in arrived.values())
    # Of every slice a sorted copy and its bytes for Spark, whatever the batch weighs and however many edges there are.
    assert most < 4 << 20 < batch.nbytes


class Conf:
    """The settings of a session."""

    def __init__(self, value: str) -> None:
        self.values, self.conf = {LIMIT: value}, self

    def get(self, name: str, default: str) -> str:
        return self.values.get(name, default)

    def set(self, name: str, value: str) -> None:
        self.values[name] = value


def test_batches_are_limited_in_bytes_until_rows_are_known_to_be_narrow() -> None:
    session, batches = Conf(SETTINGS[LIMIT]), Batches()

    def limits() -> tuple[str, str]:
        batches.for_sources(session)  # type: ignore[arg-type]
        sources = session.values[LIMIT]
        batches.for_buckets(session)  # type: ignore[arg-type]
        return sources, session.values[LIMIT]

    limited, free = str(BATCH_BYTES), str(UNLIMITED)
    assert limits() == (limited, limited)
    batches.saw(80.0)
    assert limits() == (free, limited)
    batches.saw(0.0)
    assert limits() == (free, limited)
    batches.saw(1e5)
    assert limits() == (limited, limited)
    # What somebody else has set is left alone.
    session, batches = Conf("12345"), Batches()
    batches.saw(80.0)
    assert limits() == ("12345", "12345")


def test_a_result_file_weighs_what_its_rows_do_in_memory(tmp_path: Path) -> None:
    table = pa.table({"k": range(400), "t": [WIDE] * 400})
    writer = ResultWriter("q", ("k", "t"), LocalFiles(str(tmp_path), sync=False), sync=False)
    writer.add(table)
    (file,) = writer.close(grouped=True)
    assert file.bytes < SMALL_BYTES // 100
    assert file.weight == table.nbytes > SMALL_BYTES
    assert not mergeable([file])
    # Files that Spark has written are counted as far as it matters.
    assert pq.read_metadata(tmp_path / file.path).row_group(0).total_byte_size < SMALL_BYTES // 100
    count, unpacked = rows._counted(str(tmp_path / file.path))
    assert count == 400
    assert SMALL_BYTES < unpacked < 1.01 * table.nbytes
    small = table.slice(0, 10).combine_chunks()
    pq.write_table(small, tmp_path / "small.parquet")
    assert rows._counted(str(tmp_path / "small.parquet")) == (10, pytest.approx(small.nbytes, rel=0.01))


def test_rows_that_spark_may_make_larger_do_not_pass_through_the_driver() -> None:
    (query,) = Planner({"q": joined("a.k = b.k")}, streams("ab"), Config(replan_epochs=0)).plan.queries
    query = replace(query, columns=(("a.id", "bigint"), ("b.s", "string")), output=(("x", "string"),))
    few = [ResultFile("q", "f", rows=1000, bytes=10, checksum="", unpacked=50_000)]
    for sql, kind, small in (
        ("`b.s`", "string", True),
        ("`a.id` + 1", "bigint", True),
        ("CAST(`a.id` AS DECIMAL(20, 2))", "decimal(20,2)", True),
        ("repeat(`b.s`, 1000000)", "string", False),
        ("collect_list(`b.s`)", "array<string>", False),
    ):
        asked = replace(query, select=((sql, "x"),), output=(("x", kind),))
        assert stays_small(asked, few) == small, sql
    assert stays_small(replace(query, select=()), few)
    # A thousand numbers more per row are more than the rows themselves.
    wide = replace(query, select=(("`a.id` + 1", "x"),) * 3000, output=(("x", "bigint"),) * 3000)
    assert not stays_small(wide, few)
    assert not stays_small(query, [replace(few[0], unpacked=SMALL_BYTES + 1)])
