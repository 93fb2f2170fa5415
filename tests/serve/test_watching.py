"""`plait run --watch`: which changes of a file are applied, and what is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from plait.engine import Engine
from plait.errors import QueryError
from plait.serve import watching
from plait.serve.pipeline import Pipeline, load
from plait.serve.watching import Watching, edits, needs_restart

BEGIN = """
[engine]
checkpoint = "checkpoint"
[streams.a]
format = "rate"
[queries.one]
sql = "SELECT 1"
[queries.two]
sql = "SELECT 2"
"""


@dataclass
class Calls:
    """Notes what an engine is asked to do; a query with a bad text is refused, as by an engine."""

    made: list[tuple[str, ...]] = field(default_factory=list)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        before = list(self.made)
        try:
            yield
        except BaseException:
            self.made = before
            raise

    def _define(self, how: str, name: str, sql: str) -> Any:
        if "bad" in sql:
            raise QueryError("ANALYSIS", "it is bad", "correct it")
        self.made.append((how, name, sql))
        return self

    def query(self, name: str, sql: str, *_: Any) -> Any:
        return self._define("query", name, sql)

    def replace(self, name: str, sql: str, *_: Any) -> Any:
        return self._define("replace", name, sql)

    def sink(self, kind: str, **_: Any) -> None:
        self.made.append(("sink", kind))

    def drop(self, name: str) -> None:
        self.made.append(("drop", name))


class Watched:
    """A file, and who watches it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "pipeline.toml"
        self.write(BEGIN)
        self.engine, self.said = Calls(), list[str]()
        self.watching = Watching(load(self.file), cast(Engine, self.engine), self.said.append)
        self.looks()

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def looks(self, times: int = 2) -> list[tuple[str, ...]]:
        """What comes of some looks."""
        self.engine.made = []
        for _ in range(times):
            self.watching._next = 0.0
            self.watching.look()
        return self.engine.made


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_queries_are_added_dropped_and_replaced(watched: Watched) -> None:
    text = BEGIN.replace("SELECT 1", "SELECT 11").replace("queries.two", "queries.three")
    watched.write(text + '[queries.three.sink]\ntype = "noop"\n')
    # Two looks must find the same: an editor may be in the middle of writing.
    assert watched.looks(1) == []
    made = [("drop", "two"), ("query", "three", "SELECT 2"), ("sink", "noop"), ("replace", "one", "SELECT 11")]
    assert watched.looks(1) == made
    assert watched.said == [f"{watched.file}: added three; replaced one; dropped two"]
    assert watched.looks() == []


def test_a_broken_file_is_reported_once_and_the_last_good_one_goes_on(watched: Watched) -> None:
    watched.write("[engine")
    assert watched.looks(4) == []
    assert len(watched.said) == 1
    assert "PIPELINE_TOML" in watched.said[0]
    watched.write(BEGIN)
    assert watched.looks() == []
    watched.write(BEGIN.replace("SELECT 2", "SELECT 22"))
    assert watched.looks() == [("replace", "two", "SELECT 22")]


def test_of_a_file_with_a_query_that_is_refused_nothing_is_applied(watched: Watched) -> None:
    watched.write(BEGIN.replace("SELECT 1", "SELECT 11") + '[queries.three]\nsql = "bad"\n')
    assert watched.looks(4) == []
    assert len(watched.said) == 1
    assert "ANALYSIS" in watched.said[0]
    assert "nothing of the changed file is applied" in watched.said[0]
    watched.write(BEGIN.replace("SELECT 1", "SELECT 11"))
    assert watched.looks() == [("replace", "one", "SELECT 11")]


def test_what_takes_a_restart_is_said(watched: Watched) -> None:
    watched.write(BEGIN.replace('"rate"', '"rate-micro-batch"') + '[trigger]\nevery = "2 seconds"\n')
    assert watched.looks() == []
    assert watched.said == [f"{watched.file}: [streams], [trigger] changed, which takes a restart"]


def test_a_text_in_a_file_of_its_own_counts(watched: Watched) -> None:
    (watched.file.parent / "one.sql").write_text("SELECT 1")
    watched.write(BEGIN.replace('sql = "SELECT 1"', 'sql_file = "one.sql"'))
    assert watched.looks() == []
    (watched.file.parent / "one.sql").write_text("SELECT 100")
    assert watched.looks() == [("replace", "one", "SELECT 100")]


def test_limits_and_sinks_are_changes_and_since_is_none(watched: Watched) -> None:
    def changed(extra: str) -> list[str]:
        text = BEGIN.replace('sql = "SELECT 2"\n', f'sql = "SELECT 2"\n{extra}\n')
        watched.write(text)
        return [query.name for query in edits(watched.watching.pipeline, load(watched.file)).replaced]

    assert changed("max_rows_per_epoch = 5") == ["two"]
    assert changed('output_mode = "append"') == ["two"]
    assert changed('since = "state"') == changed("replace = true") == []


def test_a_look_is_taken_now_and_then_only(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Pipeline] = []
    monkeypatch.setattr(watching, "_read", lambda pipeline: looked.append(pipeline) or pipeline)
    watched.watching._next = 0.0
    for _ in range(5):
        watched.watching.look()
    assert len(looked) == 1
    assert needs_restart(watched.watching.pipeline, watched.watching.pipeline) == []
